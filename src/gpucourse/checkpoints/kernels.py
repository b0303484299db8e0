"""Checkpoints of the chapter on kernels: count launches, read a trace's busy time and its gaps, predict waves.

None needs a GPU: the first runs small expressions on the CPU under the learner's own counter, the next two draw
traces like the recorded ones, the last is arithmetic.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gpucourse.checkpoints._core import Wrong, call, checkpoint, items, judge, word

# --- launch counter --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """One statement on a contiguous 3-D tensor `y`, and what it costs by construction."""

    text: str
    run: Callable[[Any], Any]
    launches: int = 0
    copies: int = 0
    in_place: int = 0


def _steps(shape: tuple[int, int, int], weight: Any) -> dict[str, list[_Step]]:
    """List the statements by kind; each takes and leaves a contiguous tensor of this shape."""
    import torch

    def doubled_tail(y: Any) -> Any:
        y[1:].mul_(2)
        return y

    def spread_head(y: Any) -> Any:
        y[1:].copy_(y[:1])
        return y

    def allocated(y: Any) -> Any:
        torch.empty_like(y)
        return y

    return {
        "view": [
            _Step("y = y.transpose(0, 2).transpose(2, 0)", lambda y: y.transpose(0, 2).transpose(2, 0)),
            _Step("y = y.unsqueeze(0)[0]", lambda y: y.unsqueeze(0)[0]),
            _Step(f"y = y.view(-1).view{shape}", lambda y: y.view(-1).view(shape)),
            _Step("y = y.permute(1, 2, 0).permute(2, 0, 1)", lambda y: y.permute(1, 2, 0).permute(2, 0, 1)),
        ],
        "reshape that looks": [
            _Step(f"y = y.reshape(-1).reshape{shape}", lambda y: y.reshape(-1).reshape(shape)),
            _Step("y = y.contiguous()", lambda y: y.contiguous()),
            _Step("y = y.to(torch.float32)", lambda y: y.to(torch.float32)),
        ],
        "reshape that copies": [
            _Step(
                f"y = y.transpose(0, 2).reshape(-1).view{shape}",
                lambda y: y.transpose(0, 2).reshape(-1).view(shape),
                1,
                1,
            ),
            _Step(f"y = y.transpose(1, 2).reshape{shape}", lambda y: y.transpose(1, 2).reshape(shape), 1, 1),
        ],
        "copy": [
            _Step("y = y.clone()", lambda y: y.clone(), 1, 1),
            _Step(
                f"y = y.transpose(0, 1).contiguous().view{shape}",
                lambda y: y.transpose(0, 1).contiguous().view(shape),
                1,
                1,
            ),
        ],
        "cast": [_Step("y = y.double().float()", lambda y: y.double().float(), 2, 2)],
        "copy in place": [_Step("y[1:].copy_(y[:1])", spread_head, 1, 1, 1)],
        "update in place": [
            _Step("y.add_(1)", lambda y: y.add_(1), 1, 0, 1),
            _Step("y[1:].mul_(2)", doubled_tail, 1, 0, 1),
        ],
        "compute": [
            _Step("y = y + 0.5", lambda y: y + 0.5, 1),
            _Step("y = y.tanh()", lambda y: y.tanh(), 1),
            _Step("y = -y", lambda y: -y, 1),
        ],
        "product": [_Step("y = y @ w", lambda y: y @ weight, 1)],
        "allocation": [_Step("torch.empty_like(y)", allocated)],
    }


def _run(steps: list[_Step]) -> Callable[[Any], Any]:
    def expression(x: Any) -> Any:
        y = x
        for step in steps:
            y = step.run(y)
        return y

    return expression


def _tally(step: _Step, y: Any) -> dict[str, int]:
    """Count how often each operation runs in one statement, by name."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names: dict[str, int] = {}

    class Listing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            names[name] = names.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    with Listing():  # type: ignore[no-untyped-call]
        step.run(y)
    return names


def _telling_expression(
    rng: np.random.Generator,
) -> tuple[list[_Step], Any, int, int, dict[str, float], dict[str, float]]:
    """Draw an expression on which no two of the usual slips give the same number."""
    import torch

    # Extents of 2 or more, each its own: else a transposed axis may stay contiguous, and nothing is copied.
    shape = tuple(int(size) for size in rng.permutation(np.arange(2, 8))[:3])
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    x = torch.rand(shape, generator=generator)
    kinds = _steps((shape[0], shape[1], shape[2]), torch.rand((shape[2], shape[2]), generator=generator))
    tallies = {step.text: _tally(step, x.clone()) for steps in kinds.values() for step in steps}
    # The first statement computes, so that what follows may write in place and leave the input alone.
    first = _Step("y = x * 1.5", lambda y: y * 1.5, 1)
    names = list(kinds)
    for _ in range(400):
        drawn = [*names, *(names[int(i)] for i in rng.integers(len(names), size=int(rng.integers(4, 14))))]
        program = [kinds[drawn[int(place)]] for place in rng.permutation(len(drawn))]
        steps = [first, *(choice[int(rng.integers(len(choice)))] for choice in program)]
        seen: dict[str, int] = {"mul": 1}
        for step in steps[1:]:
            for name, times in tallies[step.text].items():
                seen[name] = seen.get(name, 0) + times
        launches, copies = sum(s.launches for s in steps), sum(s.copies for s in steps)
        in_place, clones = sum(s.in_place for s in steps), seen.get("clone", 0)
        unsafe, allocated = seen.get("_unsafe_view", 0), seen.get("empty_like", 0)
        slips: dict[str, float] = {
            "counted every operation: a view only writes a new shape and stride, and launches nothing": (
                sum(seen.values())
            ),
            "`is_view` does not mark everything that launches nothing: look at `_unsafe_view` and at allocation": (
                launches + unsafe + allocated
            ),
            "still counts `_unsafe_view`, which shares the memory that it is given": launches + unsafe,
            "counts `empty_like`, which reserves memory and writes none of it": launches + allocated,
            "left out the operations that write in place: their result shares memory with an argument, but "
            "they do write": launches - in_place,
            "left out the copies: a copy is a kernel like another": launches - copies,
            "left out the clones: a reshape that cannot be a view copies": launches - clones,
            "turned round: the launches come first, then the copies": copies,
        }
        copy_slips: dict[str, float] = {
            "counted clones only: `copy_` and `_to_copy` copy too": clones,
            "missed `_to_copy`, which a change of dtype becomes": copies - seen.get("_to_copy", 0),
            "missed `copy_`, the copy into memory that is there already": copies - seen.get("copy_", 0),
            "missed the clones, which `reshape` and `contiguous` become where they must copy": copies
            - clones,
            "counted launches, not copies": launches,
            "counted `_unsafe_view` as a copy: it follows one": copies + unsafe,
        }
        if _distinct(launches, slips) and _distinct(copies, copy_slips):
            break
    return steps, x, launches, copies, slips, copy_slips


def _distinct(right: float, slips: dict[str, float]) -> bool:
    values = [right, *slips.values()]
    return len(set(values)) == len(values)


@checkpoint("kernels.launch_counter")
def launch_counter(answer: Any, rng: np.random.Generator) -> str:
    """Judge a function ``(fn, *args) -> (launches, copies)`` that counts below autograd and skips views."""
    for _ in range(4):
        steps, x, launches, copies, slips, copy_slips = _telling_expression(rng)
        found = call(answer, _run(steps), x)
        text = "; ".join(step.text for step in steps)
        case = f"the expression `{text}` on shape {tuple(x.shape)}"
        if isinstance(found, int | float) and not isinstance(found, bool):
            raise Wrong("Two numbers are wanted, the launches and how many of them only copy; one came back.")
        pair = items(found, "what your function returns, `(launches, copies)`", length=2)
        judge(pair[0], launches, slips, case=case, what="the number of launches")
        judge(pair[1], copies, copy_slips, case=case, what="the number of copies")
    return (
        "Your counter tells what launches from what only looks, and sees the copies that `reshape` hides. "
        "It cannot see how many kernels one operation becomes: for that, ask the device."
    )


# --- busy time -------------------------------------------------------------------------------------------


def _draw_trace(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Draw a trace in which kernels overlap across streams, one covers others, and gaps stay open."""
    streams = [
        7,
        *(int(s) for s in rng.choice(np.arange(13, 40), size=int(rng.integers(1, 3)), replace=False)),
    ]
    start = float(rng.integers(1_000, 90_000))  # a trace's clock does not begin at 0
    kernels: list[dict[str, Any]] = []
    for stream in streams:
        at = start + float(rng.integers(0, 40)) / 4
        for _ in range(int(rng.integers(4, 9))):
            duration = float(rng.integers(4, 120)) / 4
            kernels.append({"stream": stream, "start_us": at, "duration_us": duration})
            at += duration + float(rng.integers(1, 60)) / 4
    # One long kernel that covers others whole, then a stretch in which nothing runs, then a short last one.
    cover = dict(kernels[1])
    longest = float(rng.integers(200, 300)) / 4
    kernels.append({"stream": 99, "start_us": cover["start_us"] - 1.25, "duration_us": longest})
    end = max(k["start_us"] + k["duration_us"] for k in kernels)
    kernels.append({"stream": 7, "start_us": end + float(rng.integers(40, 200)) / 4, "duration_us": 2.5})
    # And one that starts last but ends before an earlier one does.
    kernels.append({"stream": streams[1], "start_us": end + 60, "duration_us": 90.0})
    kernels.append({"stream": 99, "start_us": end + 75, "duration_us": 3.75})
    order = rng.permutation(len(kernels))
    return [
        {"name": f"kernel_{place}", "op": "aten::add", **kernels[int(index)]}
        for place, index in enumerate(order)
    ]


def _union(intervals: list[tuple[float, float]]) -> float:
    busy, reach = 0.0, -math.inf
    for start, end in sorted(intervals):
        busy += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return busy


def _union_last_end(intervals: list[tuple[float, float]]) -> float:
    """Merge as the usual slip does: the reach is the last interval's end, not the furthest."""
    busy, reach = 0.0, -math.inf
    for start, end in sorted(intervals):
        busy += max(0.0, end - max(start, reach))
        reach = end
    return busy


@checkpoint("kernels.busy_time")
def busy_time(answer: Any, rng: np.random.Generator) -> str:
    """Judge a function ``kernels -> (busy_us, idle_us)`` over a trace with several streams."""
    for trial in range(6):
        kernels = _draw_trace(rng)
        if trial == 0:  # the plain case first: one stream, in order
            kernels = sorted((k for k in kernels if k["stream"] == 7), key=lambda k: k["start_us"])
        spans = [(k["start_us"], k["start_us"] + k["duration_us"]) for k in kernels]
        first, last = min(s for s, _ in spans), max(e for _, e in spans)
        ordered = sorted(spans)
        busy = _union(spans)
        streams = {k["stream"] for k in kernels}
        total = sum(end - start for start, end in spans)
        found = items(call(answer, kernels), "what your function returns, `(busy_us, idle_us)`", length=2)
        case = f"{len(kernels)} kernels on {len(streams)} stream{'s' * (len(streams) > 1)}, listed " + (
            "in order" if trial == 0 else "in no order"
        )
        judge(
            found[0],
            busy,
            {
                "added up, kernel by kernel or stream by stream: where two streams overlap, that time is "
                "counted twice": total,
                "a long kernel can cover later ones: keep the furthest end so far, not the last one's": (
                    _union_last_end(spans)
                ),
                "kernels are not listed in the order of their start: sort first": _union_unsorted(spans),
                "that is the whole span, from the first start to the last end": last - first,
                "that is the idle time: busy comes first": last - first - busy,
            },
            case=case,
            what="the busy time in µs",
        )
        judge(
            found[1],
            last - first - busy,
            {
                "idle and busy together are the span, and the durations' sum is not the busy time": last
                - first
                - total,
                "measured from 0: the span begins at the first kernel's start": last - busy,
                "the span ends at the last end, which is not the last-started kernel's end": ordered[-1][1]
                - first
                - busy,
                "the span ends where the last kernel ends, not where it starts": ordered[-1][0]
                - first
                - busy,
                "that is the whole span: the busy time is still in it": last - first,
                "added up gaps stream by stream: the device is idle only where no stream runs": _gaps_by_stream(
                    kernels
                ),
            },
            case=case,
            what="the idle time in µs",
        )
    return "Busy is a union over streams, and idle is what the span has left over."


def _union_unsorted(intervals: list[tuple[float, float]]) -> float:
    busy, reach = 0.0, -math.inf
    for start, end in intervals:
        busy += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return busy


def _gaps_by_stream(kernels: list[dict[str, Any]]) -> float:
    gaps = 0.0
    for stream in {k["stream"] for k in kernels}:
        mine = sorted(
            (k["start_us"], k["start_us"] + k["duration_us"]) for k in kernels if k["stream"] == stream
        )
        gaps += sum(after[0] - before[1] for before, after in itertools.pairwise(mine))
    return gaps


# --- gaps ------------------------------------------------------------------------------------------------

_CAUSES = ("queue", "host", "synchronization", "copy")
_KINDS = {
    "queued": "queue",
    "queued, then a wait": "queue",
    "copied and queued": "queue",
    "late": "host",
    "late, then a wait": "host",
    "late after a wait": "host",
    "copied and late": "host",
    "waited": "synchronization",
    "waited, a copy ended before": "synchronization",
    "waited for a copy": "copy",
}


def _draw_gaps(rng: np.random.Generator) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Draw a trace in which each usual slip gives another list of causes: kernels, waits and the right causes."""

    def some(low: int, high: int) -> float:
        return float(rng.integers(low, high)) / 4  # quarters of a µs are exact in a float

    kernels: list[dict[str, Any]] = []
    waits: list[dict[str, Any]] = []
    start, launched = some(0, 400), -some(40, 90)
    kinds = [*_KINDS, *(str(kind) for kind in rng.choice(list(_KINDS), size=int(rng.integers(2, 6))))]
    order = [kinds[int(place)] for place in rng.permutation(len(kinds))]

    def work(name: str, at: float, length: float, launch: float, stream: int = 7) -> float:
        fact = {"name": name, "start_us": at, "duration_us": length, "launch_us": launch, "stream": stream}
        kernels.append(fact)
        return at + length

    for kind in order:
        dry = work("elementwise_kernel", start, some(60, 160), launched)
        copied = "Memcpy DtoH (Device -> Pinned)"
        if kind == "waited, a copy ended before":  # on another stream, inside the kernel
            work(copied, start + some(4, 12), some(8, 24), launched + 0.25, stream=13)
        elif "cop" in kind:
            dry = work(copied, dry, some(8, 24), launched + 0.25)
        gap = some(48, 200)
        launched = dry - some(24, 40) if _KINDS[kind] == "queue" else dry + gap - some(4, 12)
        if kind == "late after a wait":
            begin, end = dry - some(20, 30), dry - some(8, 16)
        elif kind == "late, then a wait":
            begin, end = dry + some(8, 12), dry + gap - some(16, 24)
        else:
            begin, end = dry - some(8, 20), dry + some(4, 24)
        if "wait" in kind:
            name = str(rng.choice(["cudaStreamSynchronize", "cudaEventSynchronize"]))
            waits.append({"name": name, "start_us": begin, "duration_us": end - begin})
        start = dry + gap
    work("elementwise_kernel", start, some(8, 80), launched)
    return kernels, waits, [_KINDS[kind] for kind in order]


def _label_gaps(
    kernels: list[dict[str, Any]],
    waits: list[dict[str, Any]],
    cause: Callable[[dict[str, Any], dict[str, Any], list[dict[str, Any]]], str],
    *,
    furthest: bool = True,
) -> list[str]:
    """Label each gap by a rule over the work before it, the work after it and all waits."""
    found = []
    before = last = kernels[0]
    for after in kernels[1:]:
        if after["start_us"] > _end(last):
            found.append(cause(last if furthest else before, after, waits))
        if _end(after) > _end(last):
            last = after
        before = after
    return found


def _end(fact: dict[str, Any]) -> float:
    return float(fact["start_us"] + fact["duration_us"])


def _rule(
    *, covers: bool = True, later: bool = True, by_name: bool = False, copies: bool = True, looks: bool = True
) -> Callable[[dict[str, Any], dict[str, Any], list[dict[str, Any]]], str]:
    """Make the right rule, or one with a usual slip in it."""

    def cause(before: dict[str, Any], after: dict[str, Any], waits: list[dict[str, Any]]) -> str:
        dry, copied = _end(before), "DtoH" in before["name"]
        if by_name and copied:
            return "copy"
        for wait in waits if looks else []:
            # The slip takes a wait anywhere in the gap.
            until = dry if covers else after["start_us"]
            if (
                wait["start_us"] <= until
                and _end(wait) >= dry
                and (not later or after["launch_us"] >= _end(wait))
            ):
                return "copy" if copied and copies else "synchronization"
        return "host" if after["launch_us"] > dry else "queue"

    return cause


@checkpoint("kernels.gap_causes")
def gap_causes(answer: Any, rng: np.random.Generator) -> str:
    """Judge a function ``(kernels, waits) -> causes`` that labels each idle stretch of the device, in order."""
    for _ in range(5):
        kernels, waits, right = _draw_gaps(rng)
        slips = {
            "looks at no wait: a host that stands in a synchronizing call was not late": _rule(looks=False),
            "took a wait that only began when the device had already run dry for its reason": _rule(
                covers=False
            ),
            "what came next had been launched before the wait was over, so nobody waited for the wait": _rule(
                later=False
            ),
            "a copy to the host costs a gap only where the host waits for it": _rule(by_name=True),
            "a wait for a copy to the host is a copy's, not a synchronization's": _rule(copies=False),
        }
        found = items(call(answer, kernels, waits), "what your function returns, one cause a gap")
        if len(found) != len(right):
            raise Wrong(
                f"{len(found)} causes came back for {len(right)} gaps: a gap is where no stream runs, from the "
                "furthest end so far to the next start."
            )
        named = [
            word(cause, f"the cause of gap {place}", _CAUSES) for place, cause in enumerate(found, start=1)
        ]
        if named == right:
            continue
        swap = {"host": "queue", "queue": "host"}
        if named == [swap.get(cause, cause) for cause in right]:
            raise Wrong("`host` and `queue` are turned round: a late host launches after the device ran dry.")
        if named == _label_gaps(kernels, waits, _rule(), furthest=False):
            raise Wrong(
                "The device runs dry with the furthest end, which is not the last-started work's end."
            )
        for slip, rule in slips.items():
            if named == _label_gaps(kernels, waits, rule):
                raise Wrong(f"{slip[:1].upper()}{slip[1:]}.")
        place = next(place for place in range(len(right)) if named[place] != right[place])
        raise Wrong(_facts(kernels, waits, place, named[place]))
    return "Each gap has an owner: the host's lateness, its waiting, a copy, or the device itself."


def _facts(kernels: list[dict[str, Any]], waits: list[dict[str, Any]], place: int, said: str) -> str:
    """Tell what was known of one gap, without its cause."""
    ends: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def keep(before: dict[str, Any], after: dict[str, Any], waits: list[dict[str, Any]]) -> str:
        ends.append((before, after))
        return ""

    _label_gaps(kernels, waits, keep)
    before, after = ends[place]
    dry = _end(before)
    around = [
        f"{wait['name']} from {wait['start_us']:g} to {_end(wait):g}"
        for wait in waits
        if wait["start_us"] < after["start_us"] and _end(wait) > before["start_us"]
    ]
    return (
        f"Gap {place + 1} came out as `{said}`. The device ran dry at {dry:g} µs behind {before['name']}; what came "
        f"next was launched at {after['launch_us']:g}; waits around it: {'; '.join(around) or 'none'}. That is not it."
    )


# --- waves -----------------------------------------------------------------------------------------------


def _telling_product(
    rng: np.random.Generator,
) -> tuple[tuple[int, int, int, int, int, int, float], dict[str, float], float]:
    """Draw a product, its tile and a device on which no two of the usual slips give the same time."""
    for _ in range(2000):
        tile_m, tile_n = (int(t) for t in rng.choice([32, 64, 96, 128, 256], size=2))
        # A little over whole tiles, so that the tiles at the edge are nearly empty, and count all the same.
        m = int(rng.integers(6, 90)) * tile_m + int(rng.integers(1, tile_m // 4))
        n = int(rng.integers(6, 60)) * tile_n + int(rng.integers(1, tile_n // 4))
        multiprocessors = int(rng.choice([46, 58, 72, 80, 84, 108, 114, 128, 132, 148]))
        resident = int(rng.integers(2, 5))
        wave_us = float(rng.integers(40, 900)) / 4
        tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
        slots = multiprocessors * resident
        cut = math.ceil((m // tile_m) * (n // tile_n) / slots)
        area = math.ceil(m * n / (tile_m * tile_n) / slots)
        waves = {
            "a wave that is not full takes a whole wave's time: round the waves up": tiles / slots,
            "rounded down: a tile that hangs over the edge is a whole block, and a wave that is not full takes "
            "a whole wave's time": tiles // slots,
            "took one block a multiprocessor: the device holds several": math.ceil(tiles / multiprocessors),
            "a tile that hangs over the edge is a whole block: round up along rows and columns": (cut),
            "divided areas: a tile that hangs over the edge is a whole block, so round up along each side": (
                area
            ),
            "that is the time of all blocks one after the other: a wave holds many": tiles,
            "counted along the rows only: the grid has columns too": math.ceil(math.ceil(m / tile_m) / slots),
            "that is the number of waves, not their time": math.ceil(tiles / slots) / wave_us,
        }
        right = math.ceil(tiles / slots)
        apart = {right, tiles // slots, math.ceil(tiles / multiprocessors)}
        # Cutting tiles off and dividing areas may agree with each other or with rounding down, never with right.
        if right >= 2 and len(apart) == 3 and right not in (cut, area):
            break
    slips = {text: value * wave_us for text, value in waves.items()}
    return (m, n, tile_m, tile_n, multiprocessors, resident, wave_us), slips, right * wave_us


@checkpoint("kernels.waves")
def waves(answer: Any, rng: np.random.Generator) -> str:
    """Judge a function that predicts a product's time in whole waves from its size, its tile and the device."""
    for _ in range(8):
        size, slips, right = _telling_product(rng)
        m, n, tile_m, tile_n, multiprocessors, resident, wave_us = size
        found = call(answer, *size)
        case = (
            f"{m} × {n} in tiles of {tile_m} × {tile_n} on {multiprocessors} multiprocessors that hold "
            f"{resident} blocks each, {wave_us:g} µs a wave"
        )
        judge(found, right, slips, case=case, what="the predicted time in µs")
    return "Tiles round up along each side, blocks round up to whole waves: two roundings, one staircase."
