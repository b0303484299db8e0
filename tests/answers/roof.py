"""Answers to the checkpoints of the chapter on the roofline."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np

from tests.answers import Answers

# --- roof.attainable_batch --------------------------------------------------------------------------------


def attainable(P: Any, I: Any, B: Any) -> Any:  # noqa: E741, N803 - the symbols of the exercise
    values = {"P": P, "I": I, "B": B}
    shape: tuple[str, tuple[int, ...]] | None = None
    for symbol, value in values.items():
        if not np.all(np.isfinite(value)):
            raise ValueError(f"{symbol} is not finite everywhere")
        if np.any(np.less(value, 0)) or (symbol != "I" and np.any(np.equal(value, 0))):
            raise ValueError(f"{symbol} has a value below what is possible")
        if np.ndim(value):
            if shape and shape[1] != np.shape(value):
                raise ValueError(f"{symbol} has shape {np.shape(value)} and {shape[0]} {shape[1]}")
            shape = (symbol, np.shape(value))
    return np.minimum(P, np.asarray(I) * B)


def by_times(P: Any, I: Any, B: Any) -> Any:  # noqa: E741, N803
    """For one flop: the longer of 1/P and 1/(I·B), place by place, in Python's own numbers."""
    arrays = {s: np.asarray(v, dtype=float) for s, v in (("P", P), ("I", I), ("B", B))}
    shapes = {s: a.shape for s, a in arrays.items() if a.ndim}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes disagree: {shapes}")
    whole = next(iter(shapes.values()), ())
    flat = {s: np.broadcast_to(a, whole).ravel().tolist() for s, a in arrays.items()}
    rates = []
    for p, i, b in zip(flat["P"], flat["I"], flat["B"], strict=True):
        for symbol, value in (("P", p), ("I", i), ("B", b)):
            if not math.isfinite(value) or value < 0 or (value == 0 and symbol != "I"):
                raise ValueError(f"{symbol} = {value}")
        rates.append(1 / max(1 / p, 1 / (i * b)) if i else 0.0)
    return np.reshape(rates, whole) if whole else rates[0]


def _rate(formula: Any) -> Any:
    def answer(P: Any, I: Any, B: Any) -> Any:  # noqa: E741, N803
        attainable(P, I, B)
        return formula(np.asarray(P, dtype=float), np.asarray(I, dtype=float), np.asarray(B, dtype=float))

    return answer


def _no_check(P: Any, I: Any, B: Any) -> Any:  # noqa: E741, N803
    return np.minimum(P, np.multiply(I, B))


def _result_checked(P: Any, I: Any, B: Any) -> Any:  # noqa: E741, N803
    for symbol, value in (("P", P), ("B", B)):
        if not np.all(np.isfinite(value)) or np.any(np.less_equal(value, 0)):
            raise ValueError(symbol)
    if np.any(np.less(I, 0)):
        raise ValueError("I")
    shapes = {np.shape(v) for v in (P, I, B) if np.ndim(v)}
    if len(shapes) > 1:
        raise ValueError("P, I or B")
    rate = np.minimum(P, np.multiply(I, B))
    if not np.all(np.isfinite(rate)):
        raise ValueError("I")
    return rate


def _first_checked(P: Any, I: Any, B: Any) -> Any:  # noqa: E741, N803
    attainable(*(float(np.ravel(v)[0]) for v in (P, I, B)))
    shapes = {np.shape(v) for v in (P, I, B) if np.ndim(v)}
    if len(shapes) > 1:
        raise ValueError("P, I or B")
    return np.minimum(P, np.multiply(I, B))


def _broadcasts(P: Any, I: Any, B: Any) -> Any:  # noqa: E741, N803
    for symbol, value in (("P", P), ("I", I), ("B", B)):
        attainable(**({"P": 1.0, "I": 1.0, "B": 1.0} | {symbol: value}))
    try:
        return np.minimum(P, np.multiply(I, B))
    except ValueError:
        raise ValueError("P, I or B") from None


def _nameless(P: Any, I: Any, B: Any) -> Any:  # noqa: E741, N803
    try:
        return attainable(P, I, B)
    except ValueError:
        raise ValueError("bad input") from None


def _names_all(P: Any, I: Any, B: Any) -> Any:  # noqa: E741, N803
    try:
        return attainable(P, I, B)
    except ValueError:
        raise ValueError("P, I or B is wrong") from None


def _zero_alone(P: Any, I: Any, B: Any) -> Any:  # noqa: E741, N803
    if np.any(np.less(P, 0)):
        return np.minimum(P, np.multiply(I, B))
    return attainable(P, I, B)


def _bandwidth_of_any_shape(P: Any, I: Any, B: Any) -> Any:  # noqa: E741, N803
    if np.ndim(P) and np.ndim(B) and not np.ndim(I):
        return np.minimum(P, np.multiply(I, B))
    return attainable(P, I, B)


def _refuses_copies(P: Any, I: Any, B: Any) -> Any:  # noqa: E741, N803
    if np.any(np.equal(I, 0)):
        raise ValueError("I is 0")
    return attainable(P, I, B)


def _in_place(P: Any, I: Any, B: Any) -> Any:  # noqa: E741, N803
    rate = attainable(P, I, B)
    if isinstance(I, np.ndarray) and I.dtype == float:
        np.multiply(I, B, out=I)
    return rate


def _asserts(P: Any, I: Any, B: Any) -> Any:  # noqa: E741, N803
    try:
        return attainable(P, I, B)
    except ValueError as error:
        raise AssertionError(str(error)) from None


ATTAINABLE = Answers(
    right=[attainable, by_times],
    wrong={
        "no peak": (_rate(lambda p, i, b: i * b * (p > 0)), "beyond the ridge"),
        "no slope": (_rate(lambda p, i, b: p + 0 * i * b), "below the ridge"),
        "the larger": (_rate(lambda p, i, b: np.maximum(p, i * b)), "ceiling too"),
        "one after the other": (_rate(lambda p, i, b: p * (i * b) / (p + i * b)), "overlap"),
        "a quotient": (_rate(lambda p, i, b: i / b + 0 * p), "a quotient of the two"),
        "GiB": (_rate(lambda p, i, b: np.minimum(p, i * b) * 1e9 / 2**30), "GiB"),
        "tera": (_rate(lambda p, i, b: np.minimum(p, i * b) / 1e12), "power of 1000"),
        "the smallest of the batch": (_rate(lambda p, i, b: float(np.min(np.minimum(p, i * b)))), "array of"),
        "the smallest, everywhere": (
            _rate(lambda p, i, b: 0 * p + 0 * i + np.min(np.minimum(p, i * b))),
            "has its own rate",
        ),
        "every peak with every intensity": (
            _rate(lambda p, i, b: np.minimum.outer(np.ravel(p), np.ravel(i * b))),
            "shape",
        ),
        "no check": (_no_check, "`ValueError`"),
        "checks the result": (_result_checked, "no proof of finite inputs"),
        "checks the first": (_first_checked, "`ValueError`"),
        "lets numpy stretch": (_broadcasts, "shape"),
        "names no symbol": (_nameless, "name the symbol"),
        "names every symbol": (_names_all, "fits several symbols"),
        "lets a negative peak through": (_zero_alone, "negative"),
        "compares with the intensity alone": (_bandwidth_of_any_shape, "B shape"),
        "refuses a copy": (_refuses_copies, "plain copy"),
        "changes its input": (_in_place, "changed its input"),
        "asserts": (_asserts, "AssertionError"),
        "a constant": (lambda P, I, B: 989e12, "array of"),  # noqa: E741, N803
    },
)

# --- roof.step_budget -------------------------------------------------------------------------------------


def _counts(kernel: dict[str, Any]) -> tuple[float, float] | None:
    size = [{"float32": 4, "bfloat16": 2}.get(d, 8) for d in kernel["dtypes"]]
    shapes = [tuple(s) for s in kernel["shapes"]]
    if kernel["op"] in ("mm", "bmm"):
        left, right = shapes
        result = (*left[:-1], right[-1])
        flops = 2 * math.prod(result) * left[-1]
    elif kernel["op"] in ("add", "mul", "gelu"):
        result = np.broadcast_shapes(*shapes)
        flops = math.prod(result)
    else:
        return None
    moved = sum(math.prod(s) * b for s, b in zip(shapes, size, strict=True)) + math.prod(result) * size[0]
    return flops, moved


def budget(kernels, peaks, bandwidth):
    least, counted, uncounted, names = 0.0, 0.0, 0.0, []
    for kernel in kernels:
        found = _counts(kernel)
        if found is None:
            uncounted += kernel["us"]
            names.append(kernel["op"])
            continue
        least += max(found[0] / peaks[kernel["dtypes"][0]], found[1] / bandwidth) * 1e6
        counted += kernel["us"]
    return {"least_us": least, "counted_us": counted, "uncounted_us": uncounted, "uncounted": names}


def budget_by_intensity(kernels, peaks, bandwidth):
    known = [(k, _counts(k)) for k in kernels]
    least = sum(
        1e6 * c[0] / min(peaks[k["dtypes"][0]], c[0] / c[1] * bandwidth) for k, c in known if c is not None
    )
    whole = sum(k["us"] for k in kernels)
    rest = sum(k["us"] for k, c in known if c is None)
    return {
        "least_us": least,
        "counted_us": whole - rest,
        "uncounted_us": rest,
        "uncounted": {k["op"] for k, c in known if c is None},
    }


def _changed_least(least: Any) -> Any:
    """Give the reference with another bound for a kernel: a function of kernel, counts, peaks, bandwidth."""

    def answer(kernels, peaks, bandwidth):
        total = sum(least(k, c, peaks, bandwidth) for k in kernels if (c := _counts(k)) is not None)
        return budget(kernels, peaks, bandwidth) | {"least_us": total * 1e6}

    return answer


def _elements(k, c, peaks, bandwidth):
    return max(
        c[0] / peaks[k["dtypes"][0]], _counts(k | {"dtypes": ["e"] * len(k["dtypes"])})[1] / 8 / bandwidth
    )


def _no_output(k, c, peaks, bandwidth):
    size = {"float32": 4, "bfloat16": 2}
    read = sum(math.prod(s) * size[d] for s, d in zip(k["shapes"], k["dtypes"], strict=True))
    return max(c[0] / peaks[k["dtypes"][0]], read / bandwidth)


def _halved(k, c, peaks, bandwidth):
    flops = c[0] / (2 if k["op"] in ("mm", "bmm") else 1)
    return max(flops / peaks[k["dtypes"][0]], c[1] / bandwidth)


def _result_of(shape_of):
    def least(k, c, peaks, bandwidth):
        if k["op"] in ("mm", "bmm"):
            return max(c[0] / peaks[k["dtypes"][0]], c[1] / bandwidth)
        size = {"float32": 4, "bfloat16": 2}
        elements = [math.prod(s) for s in k["shapes"]]
        result = shape_of(elements)
        moved = sum(n * size[d] for n, d in zip(elements, k["dtypes"], strict=True))
        return max(result / peaks[k["dtypes"][0]], (moved + result * size[k["dtypes"][0]]) / bandwidth)

    return _changed_least(least)


def _max_of_sums(kernels, peaks, bandwidth):
    known = [(k, c) for k in kernels if (c := _counts(k)) is not None]
    times = (
        sum(c[0] / peaks[k["dtypes"][0]] for k, c in known),
        sum(c[1] for _, c in known) / bandwidth,
    )
    return budget(kernels, peaks, bandwidth) | {"least_us": max(times) * 1e6}


def _uncounted_are_free(kernels, peaks, bandwidth):
    found = budget(kernels, peaks, bandwidth)
    return found | {"uncounted_us": 0.0, "uncounted": []}


def _uncounted_pass_for_counted(kernels, peaks, bandwidth):
    found = budget(kernels, peaks, bandwidth)
    return found | {"counted_us": found["counted_us"] + found["uncounted_us"]}


def _uncounted_explain_themselves(kernels, peaks, bandwidth):
    found = budget(kernels, peaks, bandwidth)
    return found | {"least_us": found["least_us"] + found["uncounted_us"]}


def _says_nothing(kernels, peaks, bandwidth):
    return budget(kernels, peaks, bandwidth) | {"uncounted": []}


def _says_all(kernels, peaks, bandwidth):
    return budget(kernels, peaks, bandwidth) | {"uncounted": [k["op"] for k in kernels]}


def _in_ms(kernels, peaks, bandwidth):
    found = budget(kernels, peaks, bandwidth)
    return {k: v if k == "uncounted" else v / 1e3 for k, v in found.items()}


def _pops(kernels, peaks, bandwidth):
    found = budget(kernels, peaks, bandwidth)
    kernels.clear()
    return found


STEP_BUDGET = Answers(
    right=[budget, budget_by_intensity],
    wrong={
        "elements": (_changed_least(_elements), "elements, not bytes"),
        "reads alone": (_changed_least(_no_output), "writes its result"),
        "the first operand's shape": (_result_of(lambda elements: elements[0]), "not the first one's"),
        "the largest operand's shape": (_result_of(max), "not the largest one's"),
        "one for multiply and add": (_changed_least(_halved), "two operations"),
        "fp32 peak for bf16": (
            _changed_least(lambda k, c, p, b: max(c[0] / p["float32"], c[1] / b)),
            "peak of bf16",
        ),
        "bf16 peak for fp32": (
            _changed_least(lambda k, c, p, b: max(c[0] / p["bfloat16"], c[1] / b)),
            "peak of fp32",
        ),
        "bytes alone": (_changed_least(lambda k, c, p, b: c[1] / b), "bytes alone"),
        "both times added": (
            _changed_least(lambda k, c, p, b: c[0] / p[k["dtypes"][0]] + c[1] / b),
            "not their sum",
        ),
        "clamped": (
            _changed_least(lambda k, c, p, b: min(max(c[0] / p[k["dtypes"][0]], c[1] / b), k["us"] / 1e6)),
            "cut off",
        ),
        "maximum of the sums": (_max_of_sums, "then add"),
        "what is not counted is free": (_uncounted_are_free, "took its time all the same"),
        "what is not counted passes for counted": (_uncounted_pass_for_counted, "do not belong here"),
        "what is not counted explains itself": (_uncounted_explain_themselves, "explains itself"),
        "names nothing": (_says_nothing, "is not in `uncounted`"),
        "names everything": (_says_all, "no operation without a rule"),
        "milliseconds": (_in_ms, "power of 1000"),
        "empties its input": (_pops, "changed its input"),
        "the bound alone": (lambda k, p, b: budget(k, p, b)["least_us"], "dict"),
    },
)

# --- roof.drifting_clock ----------------------------------------------------------------------------------


def _pairs(log):
    return list(zip(log[::2], log[1::2], strict=True))


def judge_log(log):
    ratios = []
    for first, second in _pairs(log):
        if {first["version"], second["version"]} != {"old", "new"}:
            return {"speedup": math.nan, "verdict": "not comparable"}
        old, new = (first, second) if first["version"] == "old" else (second, first)
        ratios.append(old["us"] / new["us"])
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    verdict = "faster" if low > 1 else "slower" if high < 1 else "undecided"
    return {"speedup": middle, "verdict": verdict}


def by_logarithms(log):
    """Judge by the signs of the logarithms, with numpy."""
    if any(a["version"] == b["version"] for a, b in _pairs(log)):
        return {"speedup": float("nan"), "verdict": "not comparable"}
    signs = np.array([1 if a["version"] == "old" else -1 for a, _ in _pairs(log)])
    logs = signs * np.log([a["us"] / b["us"] for a, b in _pairs(log)])
    speedup = float(np.median(np.exp(logs)))
    if np.quantile(np.exp(logs), 0.25) > 1:
        return {"speedup": speedup, "verdict": "faster"}
    if np.quantile(np.exp(logs), 0.75) < 1:
        return {"speedup": speedup, "verdict": "slower"}
    return {"speedup": speedup, "verdict": "undecided"}


def _of(log, version):
    return [entry["us"] for entry in log if entry["version"] == version]


def _other_speedup(speedup: Any) -> Any:
    def answer(log):
        found = judge_log(log)
        return found if math.isnan(found["speedup"]) else found | {"speedup": speedup(log)}

    return answer


def _ratios(log, value):
    return [
        value(a if a["version"] == "old" else b) / value(b if a["version"] == "old" else a)
        for a, b in _pairs(log)
    ]


def _no_spread(log):
    found = judge_log(log)
    if math.isnan(found["speedup"]):
        return found
    return found | {"verdict": "faster" if found["speedup"] > 1 else "slower"}


def _pooled_verdict(log):
    found = judge_log(log)
    if math.isnan(found["speedup"]):
        return found
    old, new = (statistics.quantiles(_of(log, v), n=4) for v in ("old", "new"))
    verdict = "faster" if new[2] < old[0] else "slower" if old[2] < new[0] else "undecided"
    return found | {"verdict": verdict}


def _blocks_compared(log):
    found = judge_log(log)
    if not math.isnan(found["speedup"]):
        return found
    ratio = statistics.median(_of(log, "old")) / statistics.median(_of(log, "new"))
    return {"speedup": ratio, "verdict": "faster" if ratio > 1 else "slower"}


def _blocks_undecided(log):
    found = judge_log(log)
    return found | {"verdict": "undecided"} if math.isnan(found["speedup"]) else found


def _first_round_alone(log):
    if log[0]["version"] == log[1]["version"]:
        return {"speedup": math.nan, "verdict": "not comparable"}
    good = [e for a, b in _pairs(log) if a["version"] != b["version"] for e in (a, b)]
    return judge_log(good)


def _as_many_of_each(log):
    if all(a["version"] == b["version"] for a, b in _pairs(log)):
        return {"speedup": math.nan, "verdict": "not comparable"}
    return _first_round_alone(log)


def _mean_less_deviation(log):
    found = judge_log(log)
    if math.isnan(found["speedup"]):
        return found
    ratios = _ratios(log, lambda e: e["us"])
    mean, deviation = statistics.fmean(ratios), statistics.stdev(ratios)
    verdict = "faster" if mean - deviation > 1 else "slower" if mean + deviation < 1 else "undecided"
    return found | {"verdict": verdict}


def _blocks_one(log):
    found = judge_log(log)
    return found | {"speedup": 1.0} if math.isnan(found["speedup"]) else found


DRIFTING = Answers(
    right=[judge_log, by_logarithms],
    wrong={
        "turned round": (_other_speedup(lambda log: 1 / judge_log(log)["speedup"]), "old over new"),
        "ratio of medians": (
            _other_speedup(
                lambda log: statistics.median(_of(log, "old")) / statistics.median(_of(log, "new"))
            ),
            "medians of both",
        ),
        "ratio of means": (
            _other_speedup(lambda log: statistics.fmean(_of(log, "old")) / statistics.fmean(_of(log, "new"))),
            "means of both",
        ),
        "mean of ratios": (
            _other_speedup(lambda log: statistics.fmean(_ratios(log, lambda e: e["us"]))),
            "mean of the ratios",
        ),
        "ratio of the fastest": (
            _other_speedup(lambda log: min(_of(log, "old")) / min(_of(log, "new"))),
            "fastest readings",
        ),
        "cycles": (
            _other_speedup(lambda log: statistics.median(_ratios(log, lambda e: e["us"] * e["mhz"]))),
            "cycles",
        ),
        "no spread": (_no_spread, "spread is wider"),
        "pooled spread": (_pooled_verdict, "scatter with the clock"),
        "blocks compared": (_blocks_compared, "not comparable"),
        "blocks undecided": (_blocks_undecided, "not comparable"),
        "blocks equal": (_blocks_one, "math.nan"),
        "looks at the first round": (_first_round_alone, "not comparable"),
        "drops the broken rounds": (_as_many_of_each, "not comparable"),
        "mean and deviation": (_mean_less_deviation, "verdict came out"),
        "never comparable": (
            lambda log: {"speedup": judge_log(log)["speedup"], "verdict": "not comparable"},
            "one of each version",
        ),
        "a verdict alone": (lambda log: judge_log(log)["verdict"], "dict"),
        "per cent": (_other_speedup(lambda log: 100 * (judge_log(log)["speedup"] - 1)), "is not it"),
    },
)

ANSWERS = {
    "roof.attainable_batch": ATTAINABLE,
    "roof.step_budget": STEP_BUDGET,
    "roof.drifting_clock": DRIFTING,
}
