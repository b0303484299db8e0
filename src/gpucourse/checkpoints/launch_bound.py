"""Checkpoints of the chapter on a hundred tiny additions: a queue of one's own, its bend, and a replay."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from gpucourse.checkpoints._core import Wrong, call, checkpoint, items, judge, number, show

Step = dict[str, Any]
Spans = list[tuple[float, float]]


def _draw(rng: np.random.Generator, low: float, high: float) -> float:
    return round(float(rng.uniform(low, high)), 2)


# --- the host and the device as a queue ------------------------------------------------------------------

_Slip = Literal[
    "",
    "the host waits",
    "starts with its launch",
    "host alone",
    "device alone",
    "no wait",
    "back in time",
    "waits for one stream",
    "one queue for all",
    "no order",
    "python is free",
]

_QUEUE_SLIPS: dict[_Slip, str] = {
    "the host waits": "you let the host wait for each kernel before it goes on; a launch only queues",
    "starts with its launch": "a kernel began before its own launch was done",
    "host alone": "a kernel began although the one before it in its stream was still running",
    "device alone": "a kernel began when its stream was free, though the host had not launched it yet",
    "no wait": "a synchronize has to stop the host: what it launches afterwards comes later",
    "back in time": "where the device is done already, a synchronize leaves the host where it is: time never "
    "goes back",
    "waits for one stream": "a synchronize waits for every stream, not for the one launched to last",
    "one queue for all": "you let a kernel wait for kernels of the other stream; each stream is a queue of its own, "
    "and streams run beside each other",
    "no order": "a kernel waits for all kernels before it in its stream, not for the longest one alone",
    "python is free": "the host's own work between two launches takes its time too",
}


def _run(steps: list[Step], slip: _Slip = "") -> tuple[Spans, float]:
    """Work through a program; gives each kernel's start and end in µs and the instant when all is done."""
    host, last = 0.0, 0
    free: dict[int, float] = {}
    spans: Spans = []
    for step in steps:
        if step["do"] == "python":
            host += 0.0 if slip == "python is free" else step["host_us"]
        elif step["do"] == "synchronize":
            if slip == "waits for one stream":
                host = max(host, free.get(last, 0.0))
            elif slip == "back in time":
                host = max(free.values(), default=host)
            elif slip != "no wait":
                host = max([host, *free.values()])
        else:
            before, host, last = host, host + step["host_us"], step["stream"]
            queue = 0 if slip == "one queue for all" else last
            arrived = {"starts with its launch": before, "device alone": 0.0}.get(slip, host)
            begin = arrived if slip == "host alone" else max(arrived, free.get(queue, 0.0))
            if slip == "no order":
                begin = max(arrived, max((end for _, end in spans[-1:]), default=0.0))
            spans.append((begin, begin + step["kernel_us"]))
            free[queue] = max(free.get(queue, 0.0), spans[-1][1])
            if slip == "the host waits":
                host = spans[-1][1]
    return spans, max([host, *free.values()])


def _program(rng: np.random.Generator, kinds: str, kernel_us: tuple[float, float]) -> list[Step]:
    """Build a program from letters: 0 and 1 launch to that stream, p is host work, s a synchronize."""
    steps: list[Step] = []
    for kind in kinds:
        if kind == "s":
            steps.append({"do": "synchronize"})
        elif kind == "p":
            steps.append({"do": "python", "host_us": _draw(rng, 20, 60)})
        else:
            launch_us, length_us = _draw(rng, 4, 9), _draw(rng, *kernel_us)
            steps.append({"do": "launch", "host_us": launch_us, "kernel_us": length_us, "stream": int(kind)})
    return steps


def _cases(rng: np.random.Generator) -> list[tuple[str, list[Step]]]:
    many = int(rng.integers(5, 12))
    short, long, mixed = (0.8, 3.0), (30.0, 80.0), (0.8, 25.0)
    return [
        ("one launch", _program(rng, "0", short)),
        (f"{many} short kernels", _program(rng, "0" * many, short)),
        (f"{many} long kernels", _program(rng, "0" * many, long)),
        ("kernels short and long", _program(rng, "0" * many, mixed)),
        ("host work between launches", _program(rng, "00p0p00", short)),
        ("a synchronize in the middle", _program(rng, "000s00", long)),
        ("two streams", _program(rng, "0110010", long)),
        ("two streams and a synchronize", _program(rng, "000001s01", long)),
        ("two streams, a wait and host work", _program(rng, "01p1s0p01s1p", mixed)),
        ("a synchronize when the device is done already", _program(rng, "0ps0p0", short)),
        (
            "a long kernel and then a short one beside it",
            _program(rng, "0", long) + _program(rng, "1", short),
        ),
        ("a program that launches nothing", _program(rng, "sps", short)),
        ("an empty program", []),
    ]


@checkpoint("launch_bound.queue")
def queue(answer: Any, rng: np.random.Generator) -> str:
    """Write the queue: each kernel's start and end in µs, and when host and device are both done."""
    cases = _cases(rng)
    # Short kernels tell most slips apart, so they come first; without a launch all slips look alike.
    for text, steps in [cases[1], *(cases[k] for k in rng.permutation(len(cases) - 2)), *cases[-2:]]:
        found = items(call(answer, steps), "what your function returns, the pair (spans, total_us)", 2)
        spans = [items(span, "a kernel's span, the pair (start_us, end_us)", 2) for span in
                 items(found[0], "the spans")]  # fmt: skip
        _judge_queue(text, steps, spans, found[1])
    return (
        "Right on every program. Each kernel begins at the later of two instants, the end of its launch and "
        "the end of its stream's work so far: all else in this chapter follows from that line."
    )


def _judge_queue(text: str, steps: list[Step], spans: list[list[Any]], total: Any) -> None:
    right, right_total = _run(steps)
    if len(spans) != len(right):
        raise Wrong(f"For {text} there are {len(right)} launches; your list has {len(spans)} spans.")
    read = [
        (number(begin, f"the start of kernel {k} in µs"), number(end, f"the end of kernel {k} in µs"))
        for k, (begin, end) in enumerate(spans)
    ]
    if not _alike(read, right):
        for slip, said in _QUEUE_SLIPS.items():
            if _alike(read, _run(steps, slip)[0]):
                k = next(k for k in range(len(right)) if not _alike(read[k : k + 1], right[k : k + 1]))
                raise Wrong(
                    f"For {text}: {said}. Kernel {k}, counted from 0, is the first that is not right."
                )
        for k, (mine, theirs) in enumerate(zip(read, right, strict=True)):
            slips = {
                "you gave the length where the end is wanted": theirs[1] - theirs[0],
                "the kernel ends with its launch here": theirs[0],
            }
            judge(mine[0], theirs[0], case=text, what=f"the start of kernel {k} in µs")
            judge(mine[1], theirs[1], slips, case=text, what=f"the end of kernel {k} in µs")
    host = sum(step["host_us"] for step in steps if step["do"] != "synchronize")
    device = sum(step["kernel_us"] for step in steps if step["do"] == "launch")
    later = "the total is the later of two ends, the host's and that of whichever kernel ends last"
    sums = "the total is the later of two ends, not one of two sums or the larger of them"
    slips = {
        f"{later} (the host has more to do here)": max((end for _, end in right), default=0.0),
        f"{later} (here not the one launched last)": right[-1][1] if right else 0.0,
        f"that is what the host's own times add up to; {sums}": host,
        f"that is what the kernels' times add up to; {sums}": device,
        "the total adds up what overlaps": host + device,
    }
    judge(total, right_total, slips, case=text, what="the total in µs")


def _alike(one: Spans, other: Spans) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-6) for x, y in zip(one, other, strict=True)
               for a, b in zip(x, y, strict=True))  # fmt: skip


# --- where the curve bends -------------------------------------------------------------------------------


@checkpoint("launch_bound.bend")
def bend(answer: Any, rng: np.random.Generator) -> str:
    """Give the elements from which on a chain of equal kernels is no longer launch-bound."""
    for text, (host_us, floor_us, gb_per_s, reads, writes, itemsize) in _bends(rng):
        bytes_each = (reads + writes) * itemsize
        right = max(0.0, (host_us - floor_us) * 1e3 * gb_per_s / bytes_each)
        slips = {
            "a kernel needs its floor even for one element, and that part of the host's time is gone": (
                host_us * 1e3 * gb_per_s / bytes_each
            ),
            "the floor shortens what is left for moving bytes; you added it": (
                (host_us + floor_us) * 1e3 * gb_per_s / bytes_each
            ),
            "what is read and what is written both have to move; one of the two is missing": (
                (host_us - floor_us) * 1e3 * gb_per_s / (writes * itemsize)
            ),
            "what is read and what is written both have to move; that counts what is read alone": (
                (host_us - floor_us) * 1e3 * gb_per_s / (reads * itemsize)
            ),
            "those are bytes; elements are wanted": (host_us - floor_us) * 1e3 * gb_per_s,
            "an element has more than one byte": (host_us - floor_us) * 1e3 * gb_per_s / (reads + writes),
            "the device is the slower one at any size, and a size is never negative": (
                (host_us - floor_us) * 1e3 * gb_per_s / bytes_each
            ),
            "four bytes fit fp32 only; use `itemsize`": (
                (host_us - floor_us) * 1e3 * gb_per_s / ((reads + writes) * 4)
            ),
        }
        found = call(answer, host_us, floor_us, gb_per_s, reads, writes, itemsize)
        if right == 0.0 and number(found, "the number of elements") == 1.0:
            continue  # the smallest tensor that there is
        case = (
            f"{text} (host_us={host_us}, floor_us={floor_us}, gb_per_s={gb_per_s}, reads={reads}, "
            f"writes={writes}, itemsize={itemsize})"
        )
        # Whoever rounds to whole elements is right as well; the fewest that are drawn are 32,500.
        judge(found, right, slips, rtol=4e-5, case=case, what="the number of elements")
    return (
        "Right. The bend lies where two times are equal, so whatever makes the host faster moves it towards "
        "smaller tensors, and whatever makes the device faster towards larger ones."
    )


def _bends(rng: np.random.Generator) -> list[tuple[str, tuple[float, float, float, int, int, int]]]:
    def host() -> float:
        return _draw(rng, 5, 14)

    def floor() -> float:
        return _draw(rng, 0.9, 2.4)

    def rate() -> float:
        return float(rng.integers(300, 6000))

    cases = [
        ("adding a number to fp32", (host(), floor(), rate(), 1, 1, 4)),
        ("adding two bf16 tensors", (host(), floor(), rate(), 2, 1, 2)),
        ("multiplying two fp64 tensors", (host(), floor(), rate(), 2, 1, 8)),
        ("an addcmul_ of fp16 tensors, in place", (host(), floor(), rate(), 3, 1, 2)),
        ("a graph, whose host is faster than any kernel", (_draw(rng, 0.2, 0.8), floor(), rate(), 1, 1, 4)),
    ]
    return [cases[k] for k in rng.permutation(len(cases))]


# --- replaying a graph -----------------------------------------------------------------------------------


class _Graph:
    """What a captured graph leaves the program: two buffers at fixed addresses, and `replay`.

    Giving `inputs` another tensor is as silent and as useless as it is with a real graph.
    """

    def __init__(self, rng: np.random.Generator, rows: int, width: int, out: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        self.inputs = torch.randn(rows, width, generator=generator)
        self.outputs = torch.randn(rows, out, generator=generator)
        self._weight = torch.randn(width, out, generator=generator)
        self._captured = self.inputs, self.outputs
        self._replays = 0

    def replay(self) -> None:
        source, target = self._captured
        target.copy_(self._compute(source))
        self._replays += 1

    def _compute(self, x: Any) -> Any:
        return (x @ self._weight).tanh()


@checkpoint("launch_bound.replay")
def replay(answer: Any, rng: np.random.Generator) -> str:
    """Send batches of a few rows or fewer through a captured graph and keep every result."""
    rows = int(rng.integers(4, 9))
    for text, sizes in (
        ("one batch that fills the buffer", [rows]),
        ("three batches that fill the buffer", [rows] * 3),
        ("a last batch with fewer rows", [rows, rows, rows - 2]),
        ("batches of several sizes", [int(n) for n in rng.integers(1, rows + 1, size=5)] + [rows, 1]),
        ("no batch at all", []),
    ):
        _judge_replay(answer, rng, text, rows, sizes)
    return (
        "Right for every list of batches. The graph knows two addresses; everything between your data and "
        "those addresses is a copy that somebody has to write."
    )


def _judge_replay(answer: Any, rng: np.random.Generator, text: str, rows: int, sizes: list[int]) -> None:
    import torch

    width, out = int(rng.integers(3, 8)), int(rng.integers(2, 6))
    graph = _Graph(rng, rows, width, out)
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    batches = [torch.randn(n, width, generator=generator) for n in sizes]
    captured_in, captured_out = graph._captured
    stale = graph._compute(captured_in).clone()
    found = items(call(answer, graph, batches), "the results", len(batches))
    for k, result in enumerate(found):
        if type(result) is not torch.Tensor:
            raise Wrong(f"For {text} result {k} is {show(result)}; a tensor is wanted.")
    shared = [
        result.untyped_storage().data_ptr() == captured_out.untyped_storage().data_ptr() for result in found
    ]
    rights = [graph._compute(batch) for batch in batches]
    for k, (result, right) in enumerate(zip(found, rights, strict=True)):
        shape, wanted = tuple(result.shape), tuple(right.shape)
        if shape == (rows, out) != wanted:
            raise Wrong(
                f"For {text} result {k} has {rows} rows for a batch of {wanted[0]}: the rest of the buffer "
                "belongs to an earlier batch."
            )
        if shape != wanted:
            raise Wrong(f"For {text} result {k} has the shape {shape}; its batch has {wanted[0]} rows.")
        if torch.allclose(result, right, atol=1e-6):
            continue
        if torch.allclose(result, stale[: len(right)], atol=1e-6):
            raise Wrong(
                f"For {text} result {k} belongs to what stood in the buffer before: the graph reads the memory "
                "that it was captured with, whatever a name is bound to now, and when it is replayed."
            )
        if shared[k]:
            raise Wrong(
                f"For {text} result {k} lies in the graph's own output buffer, and a later replay wrote over it."
            )
        if k and torch.allclose(result, graph._compute(batches[k - 1])[: len(right)][:1], atol=1e-6):
            raise Wrong(
                f"For {text} result {k} is that of batch {k - 1}: replay comes after the copy, not before."
            )
        raise Wrong(f"For {text} result {k} is not what the graph computes from batch {k}.")
    if any(shared):
        raise Wrong(
            f"For {text} the results are right only until the next replay: one of them lies in the graph's own "
            "output buffer."
        )
    if graph._replays > len(batches):
        raise Wrong(f"For {text} the graph was replayed {graph._replays} times; once a batch is enough.")
