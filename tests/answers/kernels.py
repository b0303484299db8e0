"""Answers to the checkpoints of the chapter on kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.answers import Answers

COPIES = ("clone", "copy_", "_to_copy")


def run(keep: Callable[..., bool]) -> Callable[..., list[str]]:
    """Make a counter of the operations for which ``keep(func, args, result)`` holds."""

    class Mode(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if keep(func, args, result):
                self.names.append(func.overloadpacket.__name__)
            return result

    def count(fn: Callable[..., Any], *args: Any) -> list[str]:
        with Mode() as mode:
            fn(*args)
        return mode.names

    return count


def memory(values: Any) -> set[int]:
    return {v.untyped_storage().data_ptr() for v in tree_leaves(values) if isinstance(v, torch.Tensor)}


def writes(func: Any, args: Any, result: Any) -> bool:
    if func._schema.is_mutable:
        return True
    return not memory(result) <= memory(args) and "empty" not in func.overloadpacket.__name__


def computes(func: Any, args: Any, result: Any) -> bool:
    return not func.is_view and func.overloadpacket.__name__ not in ("_unsafe_view", "empty_like")


def pair(keep: Callable[..., bool], copies: tuple[str, ...] = COPIES) -> Callable[..., tuple[int, int]]:
    counter = run(keep)

    def answer(fn: Callable[..., Any], *args: Any) -> tuple[int, int]:
        names = counter(fn, *args)
        return len(names), sum(name in copies for name in names)

    return answer


def shared_memory_only(func: Any, args: Any, result: Any) -> bool:
    return not memory(result) <= memory(args) and "empty" not in func.overloadpacket.__name__


def without_copies(func: Any, args: Any, result: Any) -> bool:
    return computes(func, args, result) and func.overloadpacket.__name__ not in COPIES


def only_the_number(fn: Callable[..., Any], *args: Any) -> int:
    return len(run(computes)(fn, *args))


def turned_round(fn: Callable[..., Any], *args: Any) -> tuple[int, int]:
    launches, copies = pair(computes)(fn, *args)
    return copies, launches


def hard_coded(fn: Callable[..., Any], *args: Any) -> tuple[int, int]:
    return 70, 3


LAUNCH_COUNTER = Answers(
    right=[pair(writes), pair(computes)],
    wrong={
        "everything": (pair(lambda func, args, result: True), "a view only writes a new shape"),
        "is_view alone": (pair(lambda func, args, result: not func.is_view), "`_unsafe_view`"),
        "in-place left out": (pair(shared_memory_only), "write in place"),
        "copies left out": (pair(without_copies), "a copy is a kernel"),
        "allocation counted": (
            pair(
                lambda func, args, result: not func.is_view and func.overloadpacket.__name__ != "_unsafe_view"
            ),
            "reserves memory",
        ),
        "unsafe view counted": (
            pair(
                lambda func, args, result: not func.is_view and func.overloadpacket.__name__ != "empty_like"
            ),
            "`_unsafe_view`, which shares",
        ),
        "clones alone": (pair(computes, ("clone",)), "counted clones only"),
        "no casts": (pair(computes, ("clone", "copy_")), "a change of dtype"),
        "no copy_": (pair(computes, ("clone", "_to_copy")), "memory that is there already"),
        "one number": (only_the_number, "Two numbers"),
        "turned round": (turned_round, "launches come first"),
        "hard-coded": (hard_coded, "came out as 70"),
    },
)


# --- busy time -------------------------------------------------------------------------------------------

Trace = list[dict[str, Any]]


def intervals(kernels: Trace) -> list[tuple[float, float]]:
    return [(k["start_us"], k["start_us"] + k["duration_us"]) for k in kernels]


def span(kernels: Trace) -> float:
    both = intervals(kernels)
    return max(end for _, end in both) - min(start for start, _ in both)


def merged(kernels: Trace) -> tuple[float, float]:
    busy, reach = 0.0, -math.inf
    for start, end in sorted(intervals(kernels)):
        busy += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return busy, span(kernels) - busy


def swept(kernels: Trace) -> tuple[float, float]:
    """Walk over starts and ends with a count of running kernels."""
    edges = sorted(
        [(start, 1) for start, _ in intervals(kernels)] + [(end, -1) for _, end in intervals(kernels)],
        key=lambda edge: (edge[0], -edge[1]),
    )
    idle = 0.0
    running = 0
    for (at, change), (following, _) in itertools.pairwise(edges):
        running += change
        if running == 0:
            idle += following - at
    return span(kernels) - idle, idle


def summed(kernels: Trace) -> tuple[float, float]:
    busy = sum(k["duration_us"] for k in kernels)
    return busy, span(kernels) - busy


def by_stream(kernels: Trace) -> tuple[float, float]:
    busy = 0.0
    for stream in {k["stream"] for k in kernels}:
        busy += merged([k for k in kernels if k["stream"] == stream])[0]
    return busy, span(kernels) - busy


def last_end(kernels: Trace) -> tuple[float, float]:
    busy, reach = 0.0, -math.inf
    for start, end in sorted(intervals(kernels)):
        busy += max(0.0, end - max(start, reach))
        reach = end
    return busy, span(kernels) - busy


def unsorted(kernels: Trace) -> tuple[float, float]:
    busy, reach = 0.0, -math.inf
    for start, end in intervals(kernels):
        busy += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return busy, span(kernels) - busy


def from_zero(kernels: Trace) -> tuple[float, float]:
    busy = merged(kernels)[0]
    return busy, max(end for _, end in intervals(kernels)) - busy


def to_last_started(kernels: Trace) -> tuple[float, float]:
    ordered = sorted(intervals(kernels))
    busy = merged(kernels)[0]
    return busy, ordered[-1][1] - ordered[0][0] - busy


def sorts_in_place(kernels: Trace) -> tuple[float, float]:
    kernels.sort(key=lambda k: k["start_us"])
    return merged(kernels)


def gaps_by_stream(kernels: Trace) -> tuple[float, float]:
    idle = 0.0
    for stream in {k["stream"] for k in kernels}:
        mine = sorted(intervals([k for k in kernels if k["stream"] == stream]))
        idle += sum(after[0] - before[1] for before, after in itertools.pairwise(mine))
    return merged(kernels)[0], idle


BUSY_TIME = Answers(
    right=[merged, swept],
    wrong={
        "summed": (summed, "counted twice"),
        "by stream": (by_stream, "stream by stream"),
        "last end": (last_end, "the furthest end"),
        "unsorted": (unsorted, "sort first"),
        "from zero": (from_zero, "measured from 0"),
        "last started": (to_last_started, "last-started"),
        "sorts its input": (sorts_in_place, "changed its input"),
        "gaps of each stream": (gaps_by_stream, "no stream runs"),
        "turned round": (lambda kernels: merged(kernels)[::-1], "busy comes first"),
        "NaN": (lambda kernels: (math.nan, 0.0), "not a finite number"),
    },
)


# --- gaps ------------------------------------------------------------------------------------------------

Waits = list[dict[str, Any]]


def end(fact: dict[str, Any]) -> float:
    return fact["start_us"] + fact["duration_us"]


def idle(kernels: Trace) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Give the work before and after each gap."""
    found, last = [], kernels[0]
    for kernel in kernels[1:]:
        if kernel["start_us"] > end(last):
            found.append((last, kernel))
        last = max(last, kernel, key=end)
    return found


def label(kernels: Trace, waits: Waits) -> list[str]:
    causes = []
    for before, after in idle(kernels):
        dry = end(before)
        waited = [w for w in waits if w["start_us"] <= dry <= end(w) <= after["launch_us"]]
        if waited:
            causes.append("copy" if "DtoH" in before["name"] else "synchronization")
        else:
            causes.append("host" if after["launch_us"] > dry else "queue")
    return causes


def label_from_the_instrument(kernels: Trace, waits: Waits) -> tuple[str, ...]:
    from gpucourse.kernels import KernelTrace

    first = kernels[0]["start_us"]
    facts = {"op": "", "shapes": [], "grid": None, "block": None, "registers": None, "shared_bytes": None}
    moved = [
        {**facts, **k, "start_us": k["start_us"] - first, "launch_us": k["launch_us"] - first}
        for k in kernels
    ]
    trace = {
        "kernels": moved,
        "launches": len(kernels),
        "missing": 0,
        "waits": [{**w, "start_us": w["start_us"] - first} for w in waits],
    }
    return tuple(gap.cause for gap in KernelTrace.from_dict(trace).gaps)


def no_waits(kernels: Trace, waits: Waits) -> list[str]:
    return label(kernels, [])


def any_wait(kernels: Trace, waits: Waits) -> list[str]:
    causes = label(kernels, waits)
    for place, (before, after) in enumerate(idle(kernels)):
        inside = [
            w
            for w in waits
            if w["start_us"] <= after["start_us"] and end(w) >= end(before) and after["launch_us"] >= end(w)
        ]
        if inside:
            causes[place] = "copy" if "DtoH" in before["name"] else "synchronization"
    return causes


def wait_alone(kernels: Trace, waits: Waits) -> list[str]:
    causes = label(kernels, waits)
    for place, (before, _) in enumerate(idle(kernels)):
        if any(w["start_us"] <= end(before) <= end(w) for w in waits):
            causes[place] = "copy" if "DtoH" in before["name"] else "synchronization"
    return causes


def copies_by_name(kernels: Trace, waits: Waits) -> list[str]:
    return [
        "copy" if "DtoH" in before["name"] else cause
        for cause, (before, _) in zip(label(kernels, waits), idle(kernels), strict=True)
    ]


def no_copies(kernels: Trace, waits: Waits) -> list[str]:
    return ["synchronization" if cause == "copy" else cause for cause in label(kernels, waits)]


def last_started(kernels: Trace, waits: Waits) -> list[str]:
    """Gaps where they are, but judged by the work that started last."""
    causes = []
    for _, after in idle(kernels):
        before = kernels[kernels.index(after) - 1]
        dry = end(before)
        waited = [w for w in waits if w["start_us"] <= dry <= end(w) <= after["launch_us"]]
        causes.append(
            ("copy" if "DtoH" in before["name"] else "synchronization")
            if waited
            else "host"
            if after["launch_us"] > dry
            else "queue"
        )
    return causes


def neighbours(kernels: Trace, waits: Waits) -> list[str]:
    """Take a gap between any two neighbours that do not touch, whatever else runs."""
    return [
        "host" if after["launch_us"] > end(before) else "queue"
        for before, after in itertools.pairwise(kernels)
        if after["start_us"] != end(before)
    ]


def turned(kernels: Trace, waits: Waits) -> list[str]:
    swap = {"host": "queue", "queue": "host"}
    return [swap.get(cause, cause) for cause in label(kernels, waits)]


GAP_CAUSES = Answers(
    right=[label, label_from_the_instrument],
    wrong={
        "no waits": (no_waits, "looks at no wait"),
        "any wait": (any_wait, "already run dry"),
        "wait alone": (wait_alone, "launched before the wait was over"),
        "copies by name": (copies_by_name, "only where the host waits for it"),
        "no copies": (no_copies, "not a synchronization's"),
        "last started": (last_started, "furthest end"),
        "neighbours": (neighbours, "a gap is where no stream runs"),
        "turned round": (turned, "turned round"),
        "all host": (lambda kernels, waits: ["host"] * len(idle(kernels)), "came out as `host`"),
        "another word": (lambda kernels, waits: ["sync"] * len(idle(kernels)), "Give one of `queue`"),
    },
)


# --- waves -----------------------------------------------------------------------------------------------


def whole_waves(
    m: int, n: int, tile_m: int, tile_n: int, multiprocessors: int, resident: int, wave_us: float
) -> float:
    blocks = math.ceil(m / tile_m) * math.ceil(n / tile_n)
    return math.ceil(blocks / (multiprocessors * resident)) * wave_us


def dealt_out(
    m: int, n: int, tile_m: int, tile_n: int, multiprocessors: int, resident: int, wave_us: float
) -> float:
    """Deal the blocks out wave by wave."""
    left, time_us = -(-m // tile_m) * -(-n // tile_n), 0.0
    while left > 0:
        left -= multiprocessors * resident
        time_us += wave_us
    return time_us


WAVES = Answers(
    right=[whole_waves, dealt_out],
    wrong={
        "fractions of waves": (
            lambda m, n, tm, tn, sms, held, us: math.ceil(m / tm) * math.ceil(n / tn) / (sms * held) * us,
            "round the waves up",
        ),
        "rounded down": (
            lambda m, n, tm, tn, sms, held, us: math.ceil(m / tm) * math.ceil(n / tn) // (sms * held) * us,
            "rounded down",
        ),
        "one block each": (
            lambda m, n, tm, tn, sms, held, us: math.ceil(math.ceil(m / tm) * math.ceil(n / tn) / sms) * us,
            "holds several",
        ),
        "tiles cut off": (
            lambda m, n, tm, tn, sms, held, us: math.ceil((m // tm) * (n // tn) / (sms * held)) * us,
            "hangs over the edge",
        ),
        "areas": (
            lambda m, n, tm, tn, sms, held, us: math.ceil(math.ceil(m * n / (tm * tn)) / (sms * held)) * us,
            "hangs over the edge",
        ),
        "waves, not time": (
            lambda m, n, tm, tn, sms, held, us: math.ceil(
                math.ceil(m / tm) * math.ceil(n / tn) / (sms * held)
            ),
            "not their time",
        ),
        "hard-coded": (lambda m, n, tm, tn, sms, held, us: 3 * us, "came out as"),
    },
)

ANSWERS = {
    "kernels.launch_counter": LAUNCH_COUNTER,
    "kernels.busy_time": BUSY_TIME,
    "kernels.gap_causes": GAP_CAUSES,
    "kernels.waves": WAVES,
}
