"""The checkpoints of the chapter on the compiler: breaks removed, kernels counted, a compilation repaid."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpucourse.checkpoints._core import Wrong, call, checkpoint, judge, number

if TYPE_CHECKING:
    import numpy as np

__all__ = ["agreement", "break_even", "graph_breaks", "kernel_count"]


# --- graph breaks ----------------------------------------------------------------------------------------

_LIMIT = 3.0  # the chapter's own, above which its function scales

# Operations on functions whose bodies the compiler reads: both branches, or what a checkpoint computes twice.
_READ_WHOLE = {"cond", "tag_activation_checkpoint"}


def _clipped(x: Any, weight: Any) -> tuple[Any, Any]:
    import torch

    y = x @ weight
    peak = y.abs().max()
    return torch.tanh(torch.where(peak > _LIMIT, y * (_LIMIT / peak), y)), peak


def _inputs(rng: np.random.Generator) -> list[tuple[str, Any, Any]]:
    """Draw inputs of different sizes, some of which reach the limit, some only by a negative element."""
    import torch

    # No two sizes of one input are equal, none is 1, and each differs from that of the input before: a size
    # that was taken for a constant shows at the second input.
    pool = [int(size) for size in rng.permutation([2, 3, 4, 5, 6, 7, 9])]
    sizes = [(pool[i], pool[(i + 1) % 7], pool[(i + 2) % 7]) for i in range(5)]
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    drawn = []
    for (rows, inner, columns), kind in zip(
        sizes,
        ("below the limit", "above it", "above it by a negative element", "all zero", "below"),
        strict=True,
    ):
        x = torch.randn(rows, inner, generator=generator)
        weight = torch.randn(inner, columns, generator=generator)
        y = x @ weight
        if kind.startswith("below"):
            x = x * (float(rng.uniform(0.6, 0.9)) * _LIMIT / float(y.abs().max()))
        elif kind == "all zero":
            x = torch.zeros_like(x)
        else:
            x = x * (float(rng.uniform(2, 4)) * _LIMIT / float(y.abs().max()))
            y = x @ weight
            # The largest element in size gets the sign that the case asks for.
            if (float(y.max()) >= -float(y.min())) == kind.endswith("negative element"):
                x = -x
        drawn.append((f"x of {rows} × {inner}, weight of {inner} × {columns}, peak {kind}", x, weight))
    return drawn


def _judge_pair(found: Any, x: Any, weight: Any, case: str, how: str) -> None:
    import torch

    if type(found) is not tuple or len(found) != 2:
        raise Wrong(
            f"Two results are wanted, `(result, peak)`, for {case}; a {type(found).__name__} came back."
        )
    result, peak = _clipped(x, weight)
    got, got_peak = found
    for value, label in ((got, "result"), (got_peak, "peak")):
        if not isinstance(value, torch.Tensor):
            raise Wrong(
                f"The {label} is a {type(value).__name__}, not a tensor: its value had to come to Python, and "
                "that is what breaks the graph."
            )
    if got_peak.shape != ():
        raise Wrong(
            f"The peak has the shape {tuple(got_peak.shape)}; one number without dimensions is wanted."
        )
    if got.shape != result.shape:
        raise Wrong(f"For {case} the result has the shape {tuple(got.shape)}, not that of `x @ weight`.")

    def close(value: Any, wanted: Any) -> bool:
        return bool(torch.allclose(value.to(wanted.dtype), wanted, rtol=1e-4, atol=1e-5))

    y = x @ weight
    largest = y.abs().max()
    if not close(got_peak, peak):
        if close(got_peak, y.max()):
            raise Wrong(f"For {case} the peak is the largest element; wanted is the largest in size.")
        if close(got_peak, torch.minimum(largest, torch.tensor(_LIMIT))):
            raise Wrong(f"For {case} the peak was read after scaling; the log wants it as it was before.")
        raise Wrong(f"For {case} the peak differs from the chapter's.")
    if not close(got, result):
        slips = {
            "every input is scaled, whether it reaches the limit or not": torch.tanh(y * (_LIMIT / largest)),
            "each element is cut at the limit, where the whole matrix is to be scaled": torch.tanh(
                y.clamp(-_LIMIT, _LIMIT)
            ),
            "nothing is scaled": torch.tanh(y),
            "the last `tanh` is missing": torch.where(largest > _LIMIT, y * (_LIMIT / largest), y),
            "each row is scaled by its own largest element, where all rows are to be by one": torch.tanh(
                y / (y.abs().amax(1, keepdim=True) / _LIMIT).clamp(min=1)
            ),
            "elements above the limit are scaled one by one, where all of them are to be": torch.tanh(
                torch.where(y.abs() > _LIMIT, y * (_LIMIT / largest), y)
            ),
        }
        for slip, wrong in slips.items():
            if close(got, wrong):
                raise Wrong(f"{slip[:1].upper() + slip[1:]} ({case}{how}).")
        nan = " It holds NaN: look at what is divided by what." if bool(got.isnan().any()) else ""
        raise Wrong(f"For {case}{how} the result differs from the chapter's.{nan}")


@contextlib.contextmanager
def _counting() -> Iterator[tuple[list[Any], Callable[..., Any]]]:
    """Give a list that fills with each graph that Dynamo makes, and a backend that runs them as they are."""
    import torch._dynamo

    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    # What was compiled before would count against the limit of this one, and the reverse.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    quiet_before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the verdict says what the log would
    try:
        with torch._dynamo.config.patch(capture_scalar_outputs=False, suppress_errors=False):
            yield graphs, backend
    finally:
        logging.disable(quiet_before)
        torch._dynamo.reset()


def _opaque(graph: Any) -> str | None:
    """Name what stands in a graph without having been read: a function of the learner's, whole."""
    import torch

    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        target = node.target
        if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            name = str(target)
            if not name.startswith(("aten.", "prims.", "aten::", "prims::")):
                return name
        elif isinstance(target, torch._ops.HigherOrderOperator) and str(target) not in _READ_WHOLE:
            return str(target)
        elif isinstance(target, types.FunctionType) and not str(target.__module__).startswith("torch"):
            return target.__name__
    return None


@checkpoint("compile_kernels.graph_breaks")
def graph_breaks(answer: Any, rng: np.random.Generator) -> str:
    """Judge a function ``(x, weight) -> (result, peak)`` that has to become one graph for all shapes."""
    import torch
    import torch._dynamo

    drawn = _inputs(rng)
    for case, x, weight in drawn:
        _judge_pair(call(answer, x, weight), x, weight, case, "")
    with _counting() as (graphs, backend):
        try:
            # Sizes as symbols from the start: one graph must do for all shapes, and half the time is saved.
            compiled = torch.compile(answer, backend=backend, dynamic=True)
        except Exception as error:
            raise Wrong(f"`torch.compile` refuses it: {type(error).__name__}.") from None
        for place, (case, x, weight) in enumerate(drawn):
            before = len(graphs)
            found = call(compiled, x, weight)
            made = len(graphs) - before
            if place == 0 and not graphs:
                raise Wrong(
                    "The compiler saw no graph at all: the function is kept from it, and runs as it was written."
                )
            if made > 1:
                raise Wrong(f"{made} graphs where one is wanted: {_why()}")
            if hidden := next((name for graph in graphs if (name := _opaque(graph))), None):
                raise Wrong(
                    f"The graph holds `{hidden}` as a whole: it was put in unread, so nothing in it can be fused."
                )
            _judge_pair(found, x, weight, case, ", compiled")
            if torch._dynamo.utils.counters["graph_break"]:
                raise Wrong(f"The graph breaks: {_why()}")
            if len(graphs) > 1:
                raise Wrong(
                    f"{len(graphs)} compilations for {place + 1} shapes, with `dynamic=True`: one is enough. "
                    "Something in it asks Python for a size or a value."
                )
    return (
        "One graph for all shapes, with the same values on both sides of the limit. The peak stays on the "
        "device until somebody asks for it, outside."
    )


def _why() -> str:
    import torch._dynamo

    reasons = [str(reason).strip().splitlines()[0] for reason in torch._dynamo.utils.counters["graph_break"]]
    return f"the compiler says “{reasons[0]}”." if reasons else "it gives no reason."


# --- counting kernels ------------------------------------------------------------------------------------

Operation = tuple[str, str, list[str]]


def _merge(
    operations: Sequence[Operation],
    *,
    alone: Iterable[str] = ("product",),
    siblings: bool = True,
    between: bool = True,
    chains: bool = True,
    order: np.random.Generator | None = None,
) -> int:
    """Count kernels: merge two that touch, unless a third has to run between them, until none is left.

    Parameters
    ----------
    operations
        Name, kind and inputs of each, in the order of the program.
    alone
        Kinds that share their kernel with nothing.
    siblings
        Whether reading the same tensor is touching too.
    between
        Whether a third kernel in between forbids it.
    chains
        Whether several kernels in between, one after the other, forbid it too.
    order
        Draws the order in which pairs are tried; the order of the program without it.
    """
    apart = set(alone)
    bits: dict[str, int] = {}
    for name, _, inputs in operations:
        for tensor in (*inputs, name):
            bits.setdefault(tensor, 1 << len(bits))
    count = len(operations)
    made = [bits[name] for name, _, _ in operations]
    read = [sum({bits[tensor] for tensor in inputs}) for _, _, inputs in operations]
    may = [kind not in apart for _, kind, _ in operations]
    # before[j]: bit i is set where kernel j needs something of kernel i, directly or through others.
    before, after = [0] * count, [0] * count
    for j in range(count):
        for i in range(j):
            if made[i] & read[j]:
                before[j] |= 1 << i | before[i]
    for j, i in itertools.product(range(count), repeat=2):
        after[i] |= (before[j] >> i & 1) << j
    left = list(range(count))
    while True:
        pairs = list(itertools.combinations([i for i in left if may[i]], 2))
        if order is not None:
            pairs = [pairs[place] for place in order.permutation(len(pairs))]
        for i, j in pairs:
            touch = made[i] & read[j] | made[j] & read[i] | (read[i] & read[j] if siblings else 0)
            third = (after[i] & before[j] | after[j] & before[i]) & ~(1 << i | 1 << j)
            if touch and third and between and not chains:
                third = any(
                    made[a] & read[k] and made[k] & read[b] for a, b in ((i, j), (j, i)) for k in left
                )
            if touch and not (between and third):
                break
        else:
            return len(left)
        # Kernel i takes j in: what either needs, both need now, and what needs either needs both.
        both = 1 << i | 1 << j
        made[i], read[i] = made[i] | made[j], read[i] | read[j]
        before[i], after[i] = ((sets[i] | sets[j]) & ~both for sets in (before, after))
        left.remove(j)
        for k in left:
            if after[i] >> k & 1:
                before[k] = before[k] & ~both | 1 << i | before[i]
            if before[i] >> k & 1:
                after[k] = after[k] & ~both | 1 << i | after[i]


def _runs(operations: Sequence[Operation]) -> int:
    """Count as the first counter of the chapter does: neighbours in the program share a kernel."""
    kinds = [kind for _, kind, _ in operations]
    joined = sum(a == b == "elementwise" for a, b in itertools.pairwise(kinds))
    return len(kinds) - joined


def _runs_rows(operations: Sequence[Operation]) -> int:
    """Count neighbours in the program with reductions in them."""
    kinds = [kind for _, kind, _ in operations]
    return len(kinds) - sum("product" not in pair for pair in itertools.pairwise(kinds))


def _one_pass(operations: Sequence[Operation]) -> int:
    """Count with each operation joined to the first kernel that it may join, and no two kernels to each other."""
    kernels: list[tuple[set[str], set[str]]] = []  # what each makes, and what it reads
    above: dict[str, set[str]] = {}  # whatever an operation needs, directly or through others
    closed = {name for name, kind, _ in operations if kind == "product"}
    for name, kind, inputs in operations:
        above[name] = set(inputs).union(*(above.get(tensor, set()) for tensor in inputs))
        for made, read in kernels:
            through = (tensor for tensor in above[name] - made if above.get(tensor, set()) & made)
            touch = not (made | read).isdisjoint(inputs)
            if kind != "product" and touch and not made & closed and not any(through):
                made.add(name)
                read.update(inputs)
                break
        else:
            kernels.append(({name}, set(inputs)))
    return len(kernels)


# What a learner who made the slip would count, from the program and the right number; the quick ones first.
_SLIPS: dict[str, Callable[[Sequence[Operation], int], int]] = {
    "counted operations: one kernel can hold many": lambda program, _: len(program),
    "merged neighbours in the list: the order of the lines is not who needs whose result": (
        lambda program, _: _runs(program)
    ),
    "merged neighbours up to each product: the order of the lines is not who needs whose result": (
        lambda program, _: _runs_rows(program)
    ),
    "left out the products: each is a kernel": lambda program, right: right - _products(program),
    "one kernel for all products: each is a kernel of its own": (
        lambda program, right: right - _products(program) + min(_products(program), 1)
    ),
    "merged two kernels although a product needs the one and feeds the other, so it must run between them": (
        lambda program, _: _merge(program, between=False)
    ),
    "kept reductions apart: over one row they share a kernel with what touches them": (
        lambda program, _: _merge(program, alone=("product", "reduction"))
    ),
    "merged only what one needs of the other: two that read the same tensor share a kernel too": (
        lambda program, _: _merge(program, siblings=False)
    ),
    "merged products with what touches them: a product shares its kernel with nothing": (
        lambda program, _: _merge(program, alone=())
    ),
}

# These show on few programs, so one is drawn around operations on which they do.
_RARE_SLIPS: dict[str, Callable[[Sequence[Operation], int], int]] = {
    "looked for one kernel between two others: there can be several, one after the other": (
        lambda program, _: _merge(program, chains=False)
    ),
    "let each operation join one kernel and went on: it can make two kernels touch, which then are one": (
        lambda program, _: _one_pass(program)
    ),
}


def _products(operations: Sequence[Operation]) -> int:
    return sum(kind == "product" for _, kind, _ in operations)


_PLANTED: tuple[Operation, ...] = (
    ("v0", "elementwise", ["x"]),
    ("v1", "product", ["v0"]),
    ("v2", "product", ["v1"]),
    ("v3", "elementwise", ["v0", "v2"]),  # two products, one after the other, between it and v0
    ("v4", "product", ["x"]),
    ("v5", "elementwise", ["v4"]),
    ("v6", "elementwise", ["v3", "v5"]),  # lets v3 and v5 touch, which did not
)


def _draw(
    rng: np.random.Generator, least: int, most: int, planted: Sequence[Operation] = ()
) -> list[Operation]:
    operations, rows = list(planted), list[str]()
    full = ["x", *(name for name, _, _ in planted)]
    for place in range(len(planted), len(planted) + int(rng.integers(least, most + 1))):
        kind = str(rng.choice(["elementwise", "reduction", "product"], p=[0.6, 0.18, 0.22]))
        inputs = [str(rng.choice(full))]
        if kind == "elementwise" and rng.random() < 0.5:
            other = str(rng.choice(full + rows))
            inputs += [other] if other != inputs[0] else []
        name = f"v{place}"
        (rows if kind == "reduction" else full).append(name)
        operations.append((name, kind, inputs))
    return operations


def _reordered(operations: Sequence[Operation], rng: np.random.Generator) -> list[Operation]:
    """Put the operations into another order in which each still stands behind what it needs, with new names."""
    left, names = list(operations), {"x": "x"}
    found: list[Operation] = []
    while left:
        ready = [operation for operation in left if names.keys() >= set(operation[2])]
        name, kind, inputs = ready[int(rng.integers(len(ready)))]
        left = [operation for operation in left if operation[0] != name]
        names[name] = f"v{len(names) - 1}"
        found.append((names[name], kind, [names[tensor] for tensor in inputs]))
    return found


def _one_count(operations: Sequence[Operation], right: int, rng: np.random.Generator) -> bool:
    """Whether merging in other orders ends with as many kernels, which it does for nearly every program."""
    return all(_merge(operations, order=rng) == right for _ in range(32))


def _plain_program(rng: np.random.Generator) -> list[Operation]:
    while True:
        operations = _draw(rng, 5, 10)
        if _one_count(operations, _merge(operations), rng):
            return operations


def _told_apart(operations: Sequence[Operation], right: int, *, rare: bool) -> bool:
    """Whether each of these slips gives a number of its own, which no rare one shares."""
    seen = {right}
    shown, others = (_RARE_SLIPS, _SLIPS) if rare else (_SLIPS, _RARE_SLIPS)
    for slip in shown.values():
        value = slip(operations, right)
        if value in seen:
            return False
        seen.add(value)
    seen.remove(right)
    return rare or all(slip(operations, right) not in seen for slip in others.values())


def _telling_program(rng: np.random.Generator, *, rare: bool) -> list[Operation]:
    """Draw a program whose count does not depend on the order of merging, and on which each slip shows."""
    for _ in range(1000):
        operations = _reordered(_draw(rng, 3, 7, _PLANTED), rng) if rare else _draw(rng, 12, 16)
        right = _merge(operations)
        if _told_apart(operations, right, rare=rare) and _one_count(operations, right, rng):
            return operations
    raise AssertionError("no program of 1000 tells the slips apart: the rule or the drawing has changed")


@checkpoint("compile_kernels.kernel_count")
def kernel_count(answer: Any, rng: np.random.Generator) -> str:
    """Judge a function ``operations -> int`` that predicts how many kernels the compiler launches."""
    simple: list[Operation] = [
        ("v0", "elementwise", ["x"]),
        ("v1", "reduction", ["v0"]),
        ("v2", "elementwise", ["v0", "v1"]),
    ]
    telling = (_telling_program(rng, rare=rare) for rare in (False, True))
    for operations in (*telling, *(_plain_program(rng) for _ in range(3)), simple):
        text = "; ".join(f"{name} = {kind}({', '.join(inputs)})" for name, kind, inputs in operations)
        right = _merge(operations)
        judge(
            call(answer, operations),
            right,
            {text: slip(operations, right) for text, slip in (_SLIPS | _RARE_SLIPS).items()},
            case=f"the program `{text}`",
            what="the number of kernels",
        )
    return "Products alone, everything else together with what it touches, and nothing across a product."


def agreement(drawn: Sequence[Mapping[str, Any]]) -> int:
    """Count the recorded programs on which the rule says how many kernels were launched.

    Parameters
    ----------
    drawn
        ``operations`` of each program and the names of the ``kernels`` that it launched.

    Examples
    --------
    >>> agreement([{"operations": [["v0", "elementwise", ["x"]]], "kernels": ["triton_poi_fused_sin_0"]}])
    1
    """
    return sum(
        _merge([(name, kind, inputs) for name, kind, inputs in program["operations"]])
        == len(program["kernels"])
        for program in drawn
    )


# --- break-even ------------------------------------------------------------------------------------------


def _draw_costs(rng: np.random.Generator, *, pays: bool) -> tuple[float, float, int, float, float]:
    while True:
        first_s, recompile_s = (float(rng.integers(20, 900)) / 8 for _ in range(2))
        recompiles = int(rng.integers(1, 7))
        eager_ms = float(rng.integers(80, 4000)) / 16
        saved_ms = float(rng.integers(1, 60)) / 16
        compiled_ms = eager_ms - saved_ms if pays else eager_ms + saved_ms
        steps = 1000 * (first_s + recompiles * recompile_s) / saved_ms
        # Neither whole nor nearly so, and a compiled step that takes some time.
        if compiled_ms > 1 and 0.1 < steps % 1 < 0.9 and first_s != recompile_s:
            return first_s, recompile_s, recompiles, eager_ms, compiled_ms


@checkpoint("compile_kernels.break_even")
def break_even(answer: Any, rng: np.random.Generator) -> str:
    """Judge a function that says after how many steps compiling has paid, `math.inf` where it never does."""
    for trial in range(8):
        pays = trial not in (3, 6)
        costs = _draw_costs(rng, pays=pays)
        first_s, recompile_s, recompiles, eager_ms, compiled_ms = costs
        case = (
            f"{first_s:g} s at first, {recompiles} × {recompile_s:g} s later, {eager_ms:g} ms a step as written, "
            f"{compiled_ms:g} ms compiled"
        )
        found = call(answer, *costs)
        if not pays:
            if isinstance(found, float) and float.__float__(found) == math.inf:
                continue
            steps = number(found, "the number of steps")
            raise Wrong(
                f"The compiled step is the slower one, so it never pays: `math.inf` is wanted. For {case} the "
                f"number of steps came out as {steps:g}."
            )
        if isinstance(found, float) and math.isinf(found):
            raise Wrong(f"The compiled step is the faster one, so it pays some day ({case}).")
        saved_ms = eager_ms - compiled_ms
        cost_s = first_s + recompiles * recompile_s
        steps = 1000 * cost_s / saved_ms
        judge(
            found,
            math.ceil(steps),
            {
                "rounded down: at that step something is still owed": math.floor(steps),
                "a fraction of a step repays nothing: round up": steps,
                "divided s by ms: bring both to one unit": math.ceil(cost_s / saved_ms),
                "left out the later compilations: each new shape is paid for too": math.ceil(
                    1000 * first_s / saved_ms
                ),
                "counted one later compilation; there are several": math.ceil(
                    1000 * (first_s + recompile_s) / saved_ms
                ),
                "left out the first compilation": math.ceil(1000 * recompiles * recompile_s / saved_ms),
                "divided by the step as written: only what a step saves repays": math.ceil(
                    1000 * cost_s / eager_ms
                ),
                "divided by the compiled step: only what a step saves repays": math.ceil(
                    1000 * cost_s / compiled_ms
                ),
            },
            rtol=1e-12,
            case=case,
            what="the number of steps",
        )
    return "Seconds paid over seconds saved a step, rounded up, and never where nothing is saved."
