"""Answers to the checkpoints of the chapter on the compiler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo

from tests.answers import Answers

# --- graph breaks ----------------------------------------------------------------------------------------

Tensor = torch.Tensor


def scaled_where(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ weight
    peak = y.abs().max()
    return torch.tanh(torch.where(peak > 3, y * (3 / peak), y)), peak


def scaled_by_factor(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.mm(x, weight)
    peak = torch.maximum(y.max(), -y.min())
    return (y * (3 / peak).clamp(max=1.0)).nan_to_num(0.0).tanh(), peak


def scaled_by_mask(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ weight
    peak = y.abs().amax()
    over = (peak > 3).to(y.dtype)
    return torch.tanh(y * (over * 3 / peak.clamp(min=1e-6) + (1 - over))), peak


def scaled_in_branches(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ weight
    peak = y.abs().max()
    scaled = torch.cond(peak > 3, lambda y, peak: y * (3 / peak), lambda y, peak: y.clone(), (y, peak))
    return torch.tanh(scaled), peak


class AsModule(torch.nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return scaled_where(x, weight)


def as_written(x: Tensor, weight: Tensor) -> tuple[Tensor, float]:
    y = x @ weight
    peak = y.abs().max().item()
    if peak > 3:
        y = y * (3 / peak)
    return torch.tanh(y), peak


def item_kept_inside(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    result, peak = as_written(x, weight)
    return result, torch.tensor(peak)


def branch_on_tensor(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ weight
    peak = y.abs().max()
    if peak > 3:
        y = y * (3 / peak)
    return torch.tanh(y), peak


def breaks_still(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    result, peak = scaled_where(x, weight)
    torch._dynamo.graph_break()
    return result + 0, peak


@torch._dynamo.disable
def _kept_away(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return branch_on_tensor(x, weight)


def disabled(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return _kept_away(x, weight)


@torch._dynamo.disable
def _disabled_part(y: Tensor, peak: Tensor) -> Tensor:
    return y * (3 / peak) if peak > 3 else y


def disabled_inside(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ weight
    peak = y.abs().max()
    return torch.tanh(_disabled_part(y, peak)), peak


@torch._dynamo.allow_in_graph
def _unread(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return scaled_where(x, weight)


def put_in_unread(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    result, peak = _unread(x, weight)
    return result, peak


def row_by_row(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    peak = (x @ weight).abs().max()
    factor = torch.where(peak > 3, 3 / peak, torch.ones_like(peak))
    return torch.stack([torch.tanh(x[row] @ weight * factor) for row in range(x.shape[0])]), peak


def always_scaled(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ weight
    peak = y.abs().max()
    return torch.tanh(y * (3 / peak)), peak


def cut_elements(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ weight
    return torch.tanh(y.clamp(-3, 3)), y.abs().max()


def each_row_by_its_own(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ weight
    peaks = y.abs().amax(1, keepdim=True)
    return torch.tanh(torch.where(peaks > 3, y * (3 / peaks), y)), y.abs().max()


def signed_peak(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return scaled_where(x, weight)[0], (x @ weight).max()


def peak_after(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    result, peak = scaled_where(x, weight)
    return result, peak.clamp(max=3)


def divides_by_zero(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ weight
    peak = y.abs().max()
    return torch.tanh(y / peak * peak.clamp(max=3)), peak


def unscaled(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ weight
    return torch.tanh(y), y.abs().max()


def only_the_result(x: Tensor, weight: Tensor) -> Tensor:
    return scaled_where(x, weight)[0]


GRAPH_BREAKS = Answers(
    right=[scaled_where, scaled_by_factor, scaled_by_mask, scaled_in_branches, AsModule()],
    wrong={
        "as written": (as_written, "The peak is a float"),
        "item kept inside": (item_kept_inside, "graphs where one is wanted"),
        "branch on a tensor": (branch_on_tensor, "graph"),
        "a break left": (breaks_still, "graphs where one is wanted"),
        "disabled": (disabled, "no graph at all"),
        "disabled inside": (disabled_inside, "graph"),
        "allow_in_graph": (put_in_unread, "`_unread` as a whole"),
        "row by row": (row_by_row, "compilations for 2 shapes"),
        "always scaled": (always_scaled, "every input is scaled"),
        "elements cut": (cut_elements, "each element is cut"),
        "signed": (signed_peak, "largest in size"),
        "peak after": (peak_after, "read after scaling"),
        "divides by zero": (divides_by_zero, "NaN"),
        "unscaled": (unscaled, "nothing is scaled"),
        "one result": (only_the_result, "Two results are wanted"),
        "row by row scaled": (each_row_by_its_own, "each row is scaled by its own largest"),
    },
    seeds=4,  # most of these are compiled, twice where they break
)


# --- counting kernels ------------------------------------------------------------------------------------

Operation = tuple[str, str, list[str]]
Counter = Callable[[list[Operation]], int]


def by_paths(siblings: bool = True, between: bool = True, alone: tuple[str, ...] = ("product",)) -> Counter:
    """Merge sets of operations, with the paths between them walked afresh each time."""

    def answer(operations: list[Operation]) -> int:
        reads = {name: set(inputs) for name, _, inputs in operations}
        apart = {name for name, kind, _ in operations if kind in alone}
        kernels = [frozenset([name]) for name in reads]

        def needs(later: frozenset[str], earlier: frozenset[str]) -> bool:
            return any(reads[name] & earlier for name in later)

        def reaches(start: frozenset[str], goal: frozenset[str], without: frozenset[str]) -> bool:
            """Whether a path leads from start to goal through kernels other than these two."""
            todo = [k for k in kernels if k not in (start, goal, without) and needs(k, start)]
            seen = set(todo)
            while todo:
                here = todo.pop()
                if needs(goal, here):
                    return True
                for k in kernels:
                    if k not in seen and k not in (start, goal) and needs(k, here):
                        seen.add(k)
                        todo.append(k)
            return False

        def may(a: frozenset[str], b: frozenset[str]) -> bool:
            if (a | b) & apart:
                return False
            read_a, read_b = (set[str]().union(*(reads[n] for n in k)) for k in (a, b))
            if not (needs(a, b) or needs(b, a) or (siblings and read_a & read_b)):
                return False
            none: frozenset[str] = frozenset()
            return not (between and (reaches(a, b, none) or reaches(b, a, none)))

        merged = True
        while merged:
            merged = False
            for a, b in itertools.combinations(kernels, 2):
                if may(a, b):
                    kernels = [k for k in kernels if k not in (a, b)] + [a | b]
                    merged = True
                    break
        return len(kernels)

    return answer


def backwards(operations: list[Operation]) -> int:
    """Go through the pairs from the end, and test a merge by sorting what would be left."""
    kernels = [{name} for name, _, _ in operations]
    reads = {name: set(inputs) for name, _, inputs in operations}
    products = {name for name, kind, _ in operations if kind == "product"}

    def can_run(kernels: list[set[str]]) -> bool:
        left, done = list(kernels), set[str]()
        everything = set(reads)
        while left:
            ready = [k for k in left if set().union(*(reads[n] for n in k)) & everything <= done | k]
            if not ready:
                return False
            for k in ready:
                left.remove(k)
                done |= k
        return True

    changed = True
    while changed:
        changed = False
        for a, b in itertools.combinations(reversed(kernels), 2):
            tensors_a, tensors_b = (k.union(*(reads[n] for n in k)) for k in (a, b))
            if (a | b) & products or not tensors_a & tensors_b:
                continue
            rest = [k for k in kernels if k is not a and k is not b] + [a | b]
            if can_run(rest):
                kernels, changed = rest, True
                break
    return len(kernels)


def runs(operations: list[Operation]) -> int:
    kinds = [kind for _, kind, _ in operations]
    return len(kinds) - sum(a == b == "elementwise" for a, b in itertools.pairwise(kinds))


def runs_with_reductions(operations: list[Operation]) -> int:
    kinds = [kind for _, kind, _ in operations]
    return len(kinds) - sum("product" not in pair for pair in itertools.pairwise(kinds))


def without_products(operations: list[Operation]) -> int:
    return by_paths()(operations) - sum(kind == "product" for _, kind, _ in operations)


def one_pass(operations: list[Operation]) -> int:
    return agreed(operations, again=False)


def agreed(operations: list[Operation], again: bool = True) -> int:
    """Put each operation into a kernel; with `again` set, merge kernels afterwards until none may."""
    reads = {name: set(inputs) for name, _, inputs in operations}
    products = {name for name, kind, _ in operations if kind == "product"}
    kernels: list[set[str]] = []

    def between(a: set[str], b: set[str], kernels: list[set[str]]) -> bool:
        others = [k for k in kernels if k is not a and k is not b]
        reached, grown = a, True
        while grown:
            new = [k for k in others if not k & reached and any(reads[n] & reached for n in k)]
            found = set().union(*new)
            if any(reads[n] & found for n in b):
                return True
            reached, grown = reached | found, bool(new)
        return False

    def may(a: set[str], b: set[str]) -> bool:
        if (a | b) & products:
            return False
        tensors_a, tensors_b = (k.union(*(reads[n] for n in k)) for k in (a, b))
        return bool(tensors_a & tensors_b) and not (between(a, b, kernels) or between(b, a, kernels))

    for name, _, _ in operations:
        kernels.append({name})
        into = next((k for k in kernels[:-1] if not again and may(k, kernels[-1])), None)
        if into is not None:
            into |= kernels.pop()
    while again:
        pair = next(((a, b) for a, b in itertools.combinations(kernels, 2) if may(a, b)), None)
        if pair is None:
            break
        kernels = [k for k in kernels if k not in pair] + [pair[0] | pair[1]]
    return len(kernels)


KERNEL_COUNT = Answers(
    right=[by_paths(), backwards, agreed],
    wrong={
        "operations": (len, "counted operations"),
        "runs": (runs, "merged neighbours in the list"),
        "runs with reductions": (runs_with_reductions, "merged neighbours up to each product"),
        "contact": (by_paths(between=False), "it must run between them"),
        "reductions apart": (by_paths(alone=("product", "reduction")), "kept reductions apart"),
        "no siblings": (by_paths(siblings=False), "two that read the same tensor"),
        "no products": (without_products, "left out the products"),
        "products merged": (by_paths(alone=()), "merged products"),
        "one pass": (one_pass, "the program"),  # some other slip may count the same
        "hard-coded": (lambda operations: 1, "came out as 1"),
    },
    seeds=8,  # the programs of one judging are searched for
)


# --- break-even ------------------------------------------------------------------------------------------


def steps_needed(
    first_s: float, recompile_s: float, recompiles: int, eager_ms: float, compiled_ms: float
) -> float:
    saved_s = (eager_ms - compiled_ms) / 1000
    return math.ceil((first_s + recompiles * recompile_s) / saved_s) if saved_s > 0 else math.inf


def in_milliseconds(
    first_s: float, recompile_s: float, recompiles: int, eager_ms: float, compiled_ms: float
) -> float:
    if compiled_ms >= eager_ms:
        return float("inf")
    return -(-(first_s + recompile_s * recompiles) * 1000 // (eager_ms - compiled_ms))


def slipped(formula: Callable[..., float]) -> Callable[..., float]:
    def answer(*costs: Any) -> float:
        return formula(*costs) if costs[3] > costs[4] else math.inf

    return answer


BREAK_EVEN = Answers(
    right=[steps_needed, in_milliseconds],
    wrong={
        "units": (slipped(lambda f, r, n, e, c: math.ceil((f + n * r) / (e - c))), "bring both to one unit"),
        "rounded down": (slipped(lambda f, r, n, e, c: int(1000 * (f + n * r) / (e - c))), "rounded down"),
        "a fraction": (slipped(lambda f, r, n, e, c: 1000 * (f + n * r) / (e - c)), "round up"),
        "first alone": (
            slipped(lambda f, r, n, e, c: math.ceil(1000 * f / (e - c))),
            "left out the later compilations",
        ),
        "later alone": (
            slipped(lambda f, r, n, e, c: math.ceil(1000 * n * r / (e - c))),
            "left out the first",
        ),
        "of the whole step": (
            slipped(lambda f, r, n, e, c: math.ceil(1000 * (f + n * r) / e)),
            "the step as written",
        ),
        "never is negative": (
            lambda f, r, n, e, c: math.ceil(1000 * (f + n * r) / (e - c)),
            "it never pays",
        ),
        "always never": (lambda *costs: math.inf, "it pays some day"),
        "hard-coded": (slipped(lambda *costs: 1000), "came out as 1,000"),
    },
)


ANSWERS = {
    "compile_kernels.graph_breaks": GRAPH_BREAKS,
    "compile_kernels.kernel_count": KERNEL_COUNT,
    "compile_kernels.break_even": BREAK_EVEN,
}
