"""Checkpoints of the chapter on the roofline: the equation as code, a step's budget, a drifting clock."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpucourse.checkpoints._core import Wrong, call, checkpoint, items, judge, keyed, show, word

# --- the bound over a batch ------------------------------------------------------------------------------


def _outcome(answer: Any, *args: Any) -> tuple[str, Any]:
    """Give ("value", result) or ("refused", message): a `ValueError` is an answer here."""

    def guarded(*given: Any) -> Any:
        try:
            found = answer(*given)
        except ValueError as error:
            return "refused", str(error)
        bare = (
            found is None or found is ... or inspect.iscoroutine(found)
        )  # for `call` to say what it thinks of it
        return found if bare else ("value", found)

    kind, found = call(guarded if callable(answer) else answer, *args)
    return kind, found


def _elements(found: Any, shape: tuple[int, ...], case: str) -> list[Any]:
    """Read a result of the wanted shape as a flat list of its elements."""
    if not shape:
        if type(found) is np.ndarray and found.shape == ():
            return [found.item()]
        return [found]
    if type(found) in (list, tuple) and len(shape) == 1:
        return items(found, "the rates", length=shape[0])
    if type(found) is not np.ndarray:
        raise Wrong(f"For {case} an array of shape {shape} is wanted, not {show(found)}.")
    if found.shape != shape:
        raise Wrong(
            f"For {case} the result has shape {found.shape}. Each place of the batch has its own rate, so the "
            f"shape is that of the arrays, {shape}."
        )
    return found.ravel().tolist()


def _spelled(peak: Any, intensity: Any, bandwidth: Any) -> str:
    def one(value: Any) -> str:
        return f"shape {value.shape}" if isinstance(value, np.ndarray) else f"{value:.4g}"

    return f"P = {one(peak)}, I = {one(intensity)}, B = {one(bandwidth)}"


def _judge_batch(answer: Any, peak: Any, intensity: Any, bandwidth: Any) -> None:
    case = _spelled(peak, intensity, bandwidth)
    kind, found = _outcome(answer, peak, intensity, bandwidth)
    if kind == "refused":
        zero = bool(np.any(np.asarray(intensity) == 0))
        why = " An intensity of 0 is a plain copy: its rate of arithmetic is 0." if zero else ""
        raise Wrong(f"Your function refused {case}, saying {show(found)}; this batch is sound.{why}")
    shape = np.broadcast_shapes(np.shape(peak), np.shape(intensity), np.shape(bandwidth))
    p, i, b = (
        np.broadcast_to(np.asarray(v, dtype=float), shape).ravel() for v in (peak, intensity, bandwidth)
    )
    least = float(min(np.minimum(p, i * b)))
    for k, value in enumerate(_elements(found, shape, case)):
        slope = float(i[k] * b[k])
        right = min(float(p[k]), slope)
        slips = {
            "the peak is a ceiling too: beyond the ridge the rate stays level": slope,
            "the slope is a ceiling too: below the ridge the bytes set the rate": float(p[k]),
            "the smaller of the two ceilings binds, not the larger": max(float(p[k]), slope),
            "the two times overlap: the longer one counts, not their sum": float(p[k])
            * slope
            / (p[k] + slope),
            "flop/byte times byte/s is flop/s; a quotient of the two is not": float(i[k] / b[k]),
            "each place of the batch has its own rate; this is the smallest of them": least,
        }
        place = f"{case}, place {k}" if shape else case
        judge(value, right, slips, rtol=1e-9, case=place, what="the attainable rate in flop/s")


def _must_refuse(answer: Any, symbols: Sequence[str], problem: str, *args: Any) -> str:
    """Take the message of a refusal that names a symbol at fault; anything else is wrong."""
    kind, found = _outcome(answer, *args)
    if kind != "refused":
        raise Wrong(
            f"{problem}, and your function returned {show(found)}. A batch like this raises a `ValueError`; a "
            "finite result is no proof of finite inputs."
        )
    if not any(re.search(rf"(?<!\w){symbol}(?!\w)", found) for symbol in symbols):
        raise Wrong(
            f"{problem}. Your function refuses it, saying {show(found)}: name the symbol at fault, "
            f"{' or '.join(f'`{s}`' for s in symbols)}, or the reader has to search for it."
        )
    return str(found)


@checkpoint("roof.attainable_batch")
def attainable_batch(answer: Any, rng: np.random.Generator) -> str:
    """Turn the bound into code over a batch: values of any shape, and refusals that name the symbol."""
    peak, bandwidth = float(rng.uniform(60, 1200)) * 1e12, float(rng.uniform(0.3, 8)) * 1e12
    ridge = peak / bandwidth

    def spread(*shape: int) -> NDArray[np.float64]:
        return ridge * 10.0 ** rng.uniform(-2, 2, shape)

    n = int(rng.integers(2, 6)) * 2 + 1
    around = ridge * np.sort(rng.uniform(0.2, 3.0, n)) * np.where(np.arange(n) % 2, 4.0, 0.2)
    with_copy = spread(n)
    with_copy[int(rng.integers(n))] = 0.0
    peaks, bandwidths = peak * rng.uniform(0.2, 2, (3, n)), bandwidth * rng.uniform(0.2, 2, (3, n))
    sound: list[tuple[Any, Any, Any]] = [
        (peak, around, bandwidth),
        (peak, ridge * float(rng.uniform(0.1, 0.9)), bandwidth),
        (peak, ridge * float(rng.uniform(2, 9)), bandwidth),
        (peaks[0], spread(n), bandwidth),
        (peaks, spread(3, n), bandwidths),
        (peak, with_copy, bandwidths[1]),
        (peak, rng.integers(1, 2000, n), bandwidth),
    ]
    for batch in sound:
        _judge_batch(answer, *batch)

    def spoiled(value: float) -> NDArray[np.float64]:
        array = spread(n)
        array[int(rng.integers(1, n))] = value
        return array

    bad: list[tuple[Sequence[str], str, Any, Any, Any]] = [
        (["I"], "One intensity is NaN", peak, spoiled(math.nan), bandwidth),
        (["I"], "One intensity is infinite", peak, spoiled(math.inf), bandwidth),
        (["P"], "One peak is infinite", spoiled(math.inf) * bandwidth, spread(n), bandwidth),
        (["B"], "The bandwidth is NaN", peak, spread(n), math.nan),
        (["B"], "The bandwidth is infinite", peak, spread(n), math.inf),
        (["P"], "The peak is NaN", math.nan, spread(n), bandwidth),
        (["I"], "One intensity is negative", peak, spoiled(-1.0), bandwidth),
        (["B"], "The bandwidth is 0", peak, spread(n), 0.0),
        (["P"], "One peak is 0", spoiled(0.0) * bandwidth, spread(n), bandwidth),
        (["P"], "The peak is negative", -peak, spread(n), bandwidth),
        (["B"], "One bandwidth is negative", peak, spread(n), spoiled(-1.0) * bandwidth),
        (["P", "I"], f"P has shape ({n},) and I shape ({n + 2},)", peaks[0], spread(n + 2), bandwidth),
        (["P", "I"], f"P has shape (1,) and I shape ({n},)", peaks[0][:1], spread(n), bandwidth),
        (["I", "B"], f"I has shape ({n}, 1) and B shape ({n},)", peak, spread(n, 1), bandwidths[0]),
        (["P", "B"], f"P has shape ({n},) and B shape (1,)", peaks[0], ridge, bandwidths[1][:1]),
    ]
    # numpy refuses some shapes by itself, so the others come first: an answer without a check is told so.
    shapes = len(bad) - 4
    said: dict[str, str] = {}
    for k in (*rng.permutation(shapes), *(shapes + rng.permutation(4))):
        symbols, problem, peak, intensity, bandwidth = bad[int(k)]
        message = _must_refuse(answer, symbols, problem, peak, intensity, bandwidth)
        other = said.setdefault(message, symbols[0])
        if int(k) < shapes and other != symbols[0]:
            raise Wrong(
                f"{problem}, and your function says {show(message)}, as it does where `{other}` is at fault: a message "
                "that fits several symbols names none."
            )
    return (
        "Right for every batch, sound or not. The infinite intensity is the one to remember: the minimum hides "
        "it, so a check of the result alone lets it through."
    )


# --- the budget of a step --------------------------------------------------------------------------------

_PRODUCTS = ("mm", "bmm")
_ELEMENTWISE = ("add", "mul", "gelu")
_SIZES = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """The counting rule of the exercise, and each way to get it wrong."""

    elements: bool = False
    no_output: bool = False
    no_two: bool = False
    one_of_stack: bool = False
    first_shape: bool = False
    largest_shape: bool = False
    peak_of: str | None = None
    bytes_alone: bool = False
    sum_of_both: bool = False
    clamped: bool = False

    def counts(self, kernel: Mapping[str, Any]) -> tuple[float, float] | None:
        """Flop and bytes of one kernel; None where the exercise has no rule."""
        shapes, op = kernel["shapes"], kernel["op"]
        if op in _PRODUCTS:
            (*stack, m, k), (*_, n) = shapes
            times = 1 if self.one_of_stack else math.prod(stack)
            flops, result = (1 if self.no_two else 2) * times * m * n * k, times * m * n
            read = [times * m * k, times * k * n]
        elif op in _ELEMENTWISE:
            result = math.prod(np.broadcast_shapes(*shapes))
            if self.first_shape:
                result = math.prod(shapes[0])
            if self.largest_shape:
                result = max(math.prod(shape) for shape in shapes)
            flops, read = result, [math.prod(shape) for shape in shapes]
        else:
            return None
        sizes = [1 if self.elements else _SIZES[dtype] for dtype in kernel["dtypes"]]
        moved = sum(count * size for count, size in zip(read, sizes, strict=True))
        return flops, moved + (0 if self.no_output else result * sizes[0])

    def least_us(
        self, kernel: Mapping[str, Any], peaks: Mapping[str, float], bandwidth: float
    ) -> float | None:
        """Least time of one kernel."""
        counted = self.counts(kernel)
        if counted is None:
            return None
        arithmetic = counted[0] / peaks[self.peak_of or kernel["dtypes"][0]] * 1e6
        transport = counted[1] / bandwidth * 1e6
        if self.bytes_alone:
            return transport
        least = arithmetic + transport if self.sum_of_both else max(arithmetic, transport)
        return min(least, kernel["us"]) if self.clamped else least

    def total_us(
        self, kernels: Sequence[Mapping[str, Any]], peaks: Mapping[str, float], bandwidth: float
    ) -> float:
        """Sum over the kernels that have a count."""
        return sum(self.least_us(kernel, peaks, bandwidth) or 0.0 for kernel in kernels)


def _max_of_sums(kernels: Sequence[Mapping[str, Any]], peaks: Mapping[str, float], bandwidth: float) -> float:
    counted = [(rule, k) for k in kernels if (rule := _Rule().counts(k)) is not None]
    arithmetic = sum(flops / peaks[k["dtypes"][0]] for (flops, _), k in counted)
    return max(arithmetic, sum(moved for (_, moved), _ in counted) / bandwidth) * 1e6


def _draw_kernel(
    op: str, rng: np.random.Generator, peaks: Mapping[str, float], bandwidth: float, factor: float
) -> dict[str, Any]:
    """Make one kernel whose measured time is `factor` times its bound; a second word fixes dtype or shapes."""
    kind, _, dtype = op.partition(" ")
    if dtype not in _SIZES:
        kind, dtype = op, str(rng.choice(list(_SIZES)))
    # Products are large enough to be compute-bound under either peak, so that a wrong one shows.
    low, high = (250, 500) if kind == "mm" else (30, 300)
    a, b, c = (int(v) * 8 + 1 for v in rng.integers(low, high, 3))
    stack = int(rng.integers(3, 40))
    mixed = "bfloat16" if dtype == "float32" else "float32"
    shapes, dtypes = {
        "mm": ([(a, b), (b, c)], [dtype, dtype]),
        "bmm": ([(stack, a, 65), (stack, 65, c)], [dtype, dtype]),
        "add": ([(stack, a, b), (b,)], [dtype, "float32"]),
        "add row first": ([(b,), (stack, a, b)], [dtype, mixed]),
        "add outer": ([(a, 1), (1, stack * b)], [dtype, mixed]),
        "mul": ([(stack, a, b), (stack, a, b)], [dtype, mixed]),
        "gelu": ([(stack * a, c)], [dtype]),
        "sort": ([(a * b,)], ["float32"]),
        "embedding_dense_backward": ([(a, c), (a,)], [dtype, "int64"]),
        "_scaled_dot_product_flash_attention": ([(stack, 12, a, 64)] * 3, [dtype] * 3),
    }[kind]
    op = kind.split(" ")[0]
    kernel: dict[str, Any] = {"op": op, "shapes": shapes, "dtypes": dtypes, "us": 1.0}
    least = _Rule().least_us(kernel, peaks, bandwidth)
    kernel["us"] = round((least if least is not None else float(rng.uniform(5, 300))) * factor, 3)
    return kernel


_UNCOUNTED = ("sort", "embedding_dense_backward", "_scaled_dot_product_flash_attention")


@checkpoint("roof.step_budget")
def step_budget(answer: Any, rng: np.random.Generator) -> str:
    """Sum each kernel's least time over a step; what has no count is reported, not counted as 0."""
    bandwidth = float(rng.uniform(0.6, 5)) * 1e12
    peaks = {
        "float32": bandwidth * float(rng.uniform(8, 25)),
        "bfloat16": bandwidth * float(rng.uniform(100, 250)),
    }

    def several(*ops: str, low: float = 1.05, high: float = 2.5) -> list[dict[str, Any]]:
        return [_draw_kernel(op, rng, peaks, bandwidth, float(rng.uniform(low, high))) for op in ops]

    mixed = ["mm float32", "add", "gelu", "mm bfloat16", "mul", "bmm", "add"]
    steps: list[tuple[str, list[dict[str, Any]]]] = [
        ("one bf16 product", several("mm bfloat16")),
        ("one fp32 product", several("mm float32")),
        ("one element-wise kernel with a broadcast row", several("add")),
        ("one element-wise kernel whose first operand is the row", several("add row first")),
        ("one sum of a column and a row", several("add outer")),
        ("one stack of products", several("bmm")),
        ("two operands of different dtypes", several("mul")),
        ("a step of several kernels", several(*mixed)),
        ("a step with a kernel that the L2 served", several(*mixed) + several("add", low=0.4, high=0.7)),
        (
            "a step with kernels that have no rule",
            several(*mixed, *(str(op) for op in rng.permutation(_UNCOUNTED))),
        ),
        ("a step in which nothing has a rule", several("sort", "sort")),
    ]
    for case, kernels in steps:
        _judge_budget(answer, kernels, peaks, bandwidth, case)
    return (
        "Right for every step. The bound is a sum of maxima, since kernels run one after the other; and what is "
        "not counted is neither explained nor free."
    )


def _judge_budget(
    answer: Any, kernels: list[dict[str, Any]], peaks: dict[str, float], bandwidth: float, case: str
) -> None:
    found = keyed(
        call(answer, kernels, peaks, bandwidth), ("least_us", "counted_us", "uncounted_us", "uncounted")
    )
    least = _Rule().total_us(kernels, peaks, bandwidth)
    has_rule = [_Rule().counts(kernel) is not None for kernel in kernels]
    counted = sum(k["us"] for k, known in zip(kernels, has_rule, strict=True) if known)
    uncounted = sum(k["us"] for k, known in zip(kernels, has_rule, strict=True) if not known)

    def otherwise(**change: Any) -> float:
        return _Rule(**change).total_us(kernels, peaks, bandwidth)

    sums = {
        "kernels run one after the other: take the longer time of each, then add": _max_of_sums(
            kernels, peaks, bandwidth
        )
    }
    slips = (sums if len(kernels) > 1 else {}) | {
        "counted elements, not bytes": otherwise(elements=True),
        "each kernel writes its result too": otherwise(no_output=True),
        "a multiply and an add are two operations": otherwise(no_two=True),
        "a stack of products is as many products": otherwise(one_of_stack=True),
        "the result has the operands' shapes broadcast together, not the first one's": otherwise(
            first_shape=True
        ),
        "the result has the operands' shapes broadcast together, not the largest one's": otherwise(
            largest_shape=True
        ),
        "a bf16 kernel has the peak of bf16, not that of fp32": otherwise(peak_of="float32"),
        "an fp32 kernel has the peak of fp32, not that of bf16": otherwise(peak_of="bfloat16"),
        "that is the time of the bytes alone": otherwise(bytes_alone=True),
        "a kernel's two times overlap: the longer one counts, not their sum": otherwise(sum_of_both=True),
        "a kernel faster than its bound is a fact to report; cut off, it hides a cache or a wrong count": otherwise(
            clamped=True
        ),
        "a kernel without a rule was given its measured time as its bound, so it explains itself": least
        + uncounted,
    }
    judge(found["least_us"], least, slips, rtol=1e-6, case=case, what="`least_us`")
    both = {"kernels without a rule do not belong here": counted + uncounted}
    judge(found["counted_us"], counted, both, rtol=1e-6, case=case, what="`counted_us`")
    zero = {"what has no count took its time all the same": 0.0}
    judge(found["uncounted_us"], uncounted, zero, rtol=1e-6, case=case, what="`uncounted_us`")
    named = found["uncounted"]
    named = list(named) if isinstance(named, set | frozenset) else items(named, "`uncounted`")
    missing = sorted({k["op"] for k, known in zip(kernels, has_rule, strict=True) if not known})
    for op in missing:
        if not any(type(name) is str and name == op for name in named):
            raise Wrong(f"For {case} `{op}` has no rule and is not in `uncounted`, {show(named)}.")
    for name in named:
        if type(name) is not str or name not in missing:
            raise Wrong(
                f"For {case} `uncounted` holds {show(name)}, which is no operation without a rule there."
            )


# --- a speed-up under a drifting clock -------------------------------------------------------------------

_VERDICTS = ("faster", "slower", "undecided", "not comparable")


def _log(
    rng: np.random.Generator,
    *,
    rounds: int,
    gain: float,
    noise: float,
    drift: float,
    blocks: bool = False,
    hit: bool = False,
) -> list[dict[str, Any]]:
    """Make a log in the order of time; `gain` is old over new, `drift` the clock's relative fall over it.

    The order within a round turns round every time, so the drift inside a pair favours neither version.
    """
    orders = [("old", "new") if k % 2 == 0 else ("new", "old") for k in range(rounds)]
    versions = [v for order in orders for v in order]
    if blocks:
        versions = ["old"] * rounds + ["new"] * rounds
    base_us = float(rng.uniform(20, 4000))
    entries: list[dict[str, Any]] = []
    for k, version in enumerate(versions):
        mhz = 1980 * (1 - drift * k / (2 * rounds - 1))
        us = base_us * 1980 / mhz * (1.0 if version == "old" else 1 / gain)
        us *= 1 + noise * float(np.clip(rng.normal(), -1.5, 1.5))
        entries.append({"version": version, "us": round(us, 6), "mhz": round(mhz)})
    if hit:  # one reading of the old version that something else disturbed: mean and deviation follow it
        olds = [entry for entry in entries if entry["version"] == "old"]
        olds[int(rng.integers(len(olds)))]["us"] *= 7.0
    return entries


def _clear(draw: Callable[[], list[dict[str, Any]]], verdict: str) -> list[dict[str, Any]]:
    """Draw logs until one's verdict is the intended one by every usual definition of a quartile."""
    while True:
        log = draw()
        ratios = _ratios(log, lambda entry: entry["us"])
        bounds = [statistics.quantiles(ratios, n=4, method=how)[::2] for how in ("inclusive", "exclusive")]
        bounds += [list(np.quantile(ratios, (0.25, 0.75), method=how)) for how in ("lower", "higher")]
        if {_verdict(low, high) for low, high in bounds} == {verdict}:
            return log


def _verdict(low: float, high: float) -> str:
    return "faster" if low > 1 else "slower" if high < 1 else "undecided"


def _broken(log: list[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Turn a late round into two of old and another into two of new, so that there are as many of each."""
    rounds = rng.choice(np.arange(2, len(log) // 2), 2, replace=False)
    for k, version in zip(rounds, ("old", "new"), strict=True):
        for entry in log[2 * int(k) : 2 * int(k) + 2]:
            entry["version"] = version
    return log


def _ratios(log: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float]) -> list[float]:
    found = []
    for first, second in zip(log[::2], log[1::2], strict=True):
        pair = {first["version"]: value(first), second["version"]: value(second)}
        found.append(pair["old"] / pair["new"])
    return found


@checkpoint("roof.drifting_clock")
def drifting_clock(answer: Any, rng: np.random.Generator) -> str:
    """Judge a speed-up from pairs measured in alternation, or refuse a log that has no pairs."""
    n = int(rng.integers(10, 16)) * 2

    def log(**facts: Any) -> list[dict[str, Any]]:
        return _log(rng, **({"rounds": n, "gain": 1.0, "noise": 0.004, "drift": 0.3} | facts))

    small = float(rng.uniform(1.025, 1.05))
    paired: list[tuple[str, dict[str, Any], str]] = [
        ("a small gain while the clock falls by 30 %", {"gain": small}, "faster"),
        ("a small loss while the clock falls by 30 %", {"gain": 1 / small}, "slower"),
        ("a large gain, one reading disturbed", {"gain": 2.1, "hit": True, "drift": 0.05}, "faster"),
        ("a rising clock and a small gain", {"gain": small, "drift": -0.25}, "faster"),
        ("no difference, wide spread", {"noise": 0.03}, "undecided"),
        (
            "a thousandth, with a spread of a fiftieth",
            {"gain": 1.001, "noise": 0.02, "drift": 0.0},
            "undecided",
        ),
    ]
    cases = [
        (case, _clear(functools.partial(log, **facts), verdict), verdict) for case, facts, verdict in paired
    ]
    in_blocks, broken = log(gain=small, blocks=True), _broken(log(gain=small), rng)
    cases.append(("all of old, then all of new, while the clock falls", in_blocks, "not comparable"))
    cases.append(("two rounds that hold one version twice", broken, "not comparable"))
    for k in rng.permutation(len(cases)):
        _judge_log(answer, *cases[int(k)])
    return (
        "Right for every log. Two readings taken side by side share their clock, so their ratio survives the "
        "drift; a log in blocks has no such pairs, and no arithmetic afterwards gives it any."
    )


def _judge_log(answer: Any, case: str, log: list[dict[str, Any]], made: str) -> None:
    found = keyed(call(answer, log), ("speedup", "verdict"))
    told = word(found["verdict"], "the verdict", _VERDICTS)
    case = f"the log “{case}”"
    if made == "not comparable":
        if told != made:
            raise Wrong(
                f"For {case} the verdict came out as `{told}`. Some rounds there are of one version alone, and nothing "
                "sets their versions apart from the clock: `not comparable`, and `speedup` is `math.nan`."
            )
        speedup = found["speedup"]
        if not isinstance(speedup, float) or not math.isnan(speedup):
            raise Wrong(f"For {case} there is no speed-up to give, so it is `math.nan`, not {show(speedup)}.")
        return
    ratios = _ratios(log, lambda entry: entry["us"])
    right = statistics.median(ratios)
    old, new = ([e["us"] for e in log if e["version"] == v] for v in ("old", "new"))
    cycles = _ratios(log, lambda entry: entry["us"] * entry["mhz"])
    slips = {
        "that is the new time over the old: a speed-up is old over new": 1 / right,
        "the medians of both versions are divided; the ratio is taken within each round": statistics.median(
            old
        )
        / statistics.median(new),
        "the means of both versions are divided; the ratio is taken within each round": statistics.fmean(old)
        / statistics.fmean(new),
        "the mean of the ratios follows one disturbed reading; the median does not": statistics.fmean(ratios),
        "the fastest readings of each version may come from different clocks": min(old) / min(new),
        "times were turned into cycles; what the night saves is time": statistics.median(cycles),
        "that is the first half of the log against the second, so mostly the clock": statistics.fmean(
            e["us"] for e in log[: len(log) // 2]
        )
        / statistics.fmean(e["us"] for e in log[len(log) // 2 :]),
    }
    judge(found["speedup"], right, slips, rtol=1e-9, case=case, what="the speed-up")
    verdict = made
    if told == verdict:
        return
    pooled = "The readings of one version scatter with the clock; the ratios within rounds do not."
    reasons = {
        "undecided": "The middle half of its ratios lies on both sides of 1: the spread is wider than the gain.",
        "faster": f"The middle half of its ratios lies above 1. {pooled}",
        "slower": f"The middle half of its ratios lies below 1. {pooled}",
    }
    if told == "not comparable":
        raise Wrong(
            f"For {case} the verdict came out as `{told}`, but every round holds one of each version."
        )
    raise Wrong(f"For {case} the verdict came out as `{told}`. {reasons[verdict]}")
