"""Checkpoints of the launch lab: a chain's total and idle time, the fewest fused operations, two slopes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpucourse.checkpoints._core import Wrong, call, checkpoint, items, judge, number, show, word
from gpucourse.launch_model import LaunchModel


def _draw(rng: np.random.Generator, low: float, high: float) -> float:
    """Draw a time in µs, a multiple of a quarter: sums of these are exact in floats."""
    return round(float(rng.uniform(low, high)) * 4) / 4


# --- total and idle time of a chain -----------------------------------------------------------------------------


@checkpoint("launch_timeline.total")
def total(answer: Any, rng: np.random.Generator) -> str:
    """Give a chain's total and the device's idle time in it, in µs."""
    launch, latency = _draw(rng, 5, 20), _draw(rng, 3, 9) + 0.1  # never as long as a kernel
    short, long = _draw(rng, 0.5, launch / 2), _draw(rng, launch * 1.5, launch * 6)
    cases = [
        (int(rng.integers(40, 300)), short, launch, latency),
        (int(rng.integers(40, 300)), long, launch, latency),
        (int(rng.integers(40, 300)), launch, launch, latency),
        (1, short, launch, latency),
        (1, long, launch, latency),
        (2, short, launch, 0.0),
        (int(rng.integers(4, 9)), launch + 0.25, launch, latency),
    ]
    for kernels, kernel_us, launch_us, latency_us in cases:
        _judge_total(answer, kernels, kernel_us, launch_us, latency_us)
    return (
        "Right on both sides of the bend. One of the two times is paid for every kernel and the other once, and "
        "the device's idle time needs no second rule: it is what the kernels do not fill."
    )


def _judge_total(answer: Any, kernels: int, kernel_us: float, launch_us: float, latency_us: float) -> None:
    model = LaunchModel(kernels=kernels, kernel_us=kernel_us, launch_us=launch_us, latency_us=latency_us)
    case = f"{kernels} × {kernel_us:g} µs, {launch_us:g} µs a launch, latency {latency_us:g} µs"
    found = items(call(answer, kernels, kernel_us, launch_us, latency_us), "total and idle", length=2)
    n, t, c, right = kernels, kernel_us, launch_us, model.total_us
    slips = {
        "the latency is left out: the first kernel cannot begin before its launch has arrived": right
        - latency_us,
        "the latency is paid once: later launches travel while the device works or waits": right
        + (n - 1) * latency_us,
        "launch and kernel are added for every kernel, but the host launches while the device works": latency_us
        + n * (c + t),
        "the last kernel runs after the last launch": latency_us + n * max(c, t),
        "the first launch comes before the first kernel": latency_us + n * t,
        "that is the sum where launches set the pace; here the kernels are longer": latency_us + n * c + t,
        "that is the sum where kernels set the pace; here the launches are longer": latency_us + c + n * t,
        "one kernel too many": right + max(c, t),
    }
    judge(found[0], right, slips, case=case, what="the total in µs")
    idle = model.idle_us
    idle_slips = {
        "the device also waits for the first launch": idle - c - latency_us,
        "the device also waits for the first launch to arrive": idle - latency_us,
        "there are gaps before the first kernel and between kernels, one less between": n * max(c - t, 0.0)
        + c
        + latency_us,
        "that is the share; the time in µs is wanted": idle / right,
        "that is the time in which the device works": n * t,
        "that is the host's idle time": right - n * c,
    }
    judge(found[1], idle, idle_slips, case=case, what="the device's idle time in µs")


# --- how many operations a kernel must hold ---------------------------------------------------------------------


@checkpoint("launch_timeline.fewest")
def fewest(answer: Any, rng: np.random.Generator) -> str:
    """Give the fewest operations a kernel with which launches no longer set the pace; inf where none do."""
    work = _draw(rng, 0.5, 1.5)
    start = 2 * work + _draw(rng, 0.25, 1)  # so long that no two slips meet
    k = int(rng.integers(4, 9))
    level = start + k * work  # k operations last exactly as long as this launch
    between = level + work / 2
    cases = [
        (int(rng.integers(200, 400)), start, work, level),
        (int(rng.integers(200, 400)), start, work, between),
        (k + 1, start, work, between),  # all of them in one kernel are just enough
        (k, start, work, between),  # and here they are not
        (k, start, work, level),
        (int(rng.integers(200, 400)), start, work, start / 2),  # not launch-bound to begin with
        (int(rng.integers(200, 400)), start + 30, work, start + 30),
        (int(rng.integers(2000, 4000)), 0.0, 0.25, 100.0),
    ]
    for operations, start_us, work_us, launch_us in cases:
        _judge_fewest(answer, operations, start_us, work_us, launch_us)
    return (
        "Right, also at the edges. Up to that number each operation that is fused saves a launch; beyond it, "
        "only a kernel's start."
    )


def _judge_fewest(answer: Any, operations: int, start_us: float, work_us: float, launch_us: float) -> None:
    case = (
        f"{operations} operations, {start_us:g} µs to start and stop, {work_us:g} µs an operation, "
        f"{launch_us:g} µs a launch"
    )
    found = call(answer, operations, start_us, work_us, launch_us)
    infinite = isinstance(found, (float, np.floating)) and math.isinf(found) and found > 0
    right = max(1, math.ceil((launch_us - start_us) / work_us))
    if right > operations:
        if not infinite:
            value = number(found, "the number of operations")
            raise Wrong(
                f"For {case} your answer came out as {value:g}. Even one kernel with all of the operations is shorter "
                "than a launch: no number is enough."
            )
        return
    if infinite:
        raise Wrong(
            f"For {case} you say that no number is enough, but a kernel with all of the operations lasts as long "
            "as a launch, or longer."
        )
    slips = {
        "a kernel holds one operation at least": min(0, math.ceil((launch_us - start_us) / work_us)),
        "a kernel starts and stops once, however many operations it holds": math.ceil(
            launch_us / (start_us + work_us)
        ),
        "the kernel's own start and stop count, too": math.ceil(launch_us / work_us),
        "a kernel as long as a launch is long enough": right + 1,
        "with that many the kernel is still shorter than a launch: round up": right - 1,
        "that is a number of launches; operations a kernel are wanted": math.ceil(operations / right),
        "operations come whole: round up": (launch_us - start_us) / work_us,
    }
    judge(found, right, slips, case=case, what="the fewest operations a kernel")


# --- launch cost and kernel length, read off measured chains ----------------------------------------------------


@checkpoint("launch_timeline.read_off")
def read_off(answer: Any, rng: np.random.Generator) -> str:
    """Read pace, kernel length and bound off two chains, each measured eager and as a graph."""
    for bound in ("launch", "device", "launch", "device"):
        launch = _draw(rng, 6, 20)
        kernel = _draw(rng, 0.75, launch / 2) if bound == "launch" else _draw(rng, launch * 1.5, launch * 5)
        few, many = int(rng.integers(20, 90)), int(rng.integers(150, 400))
        fixed = {"eager": _draw(rng, 5, 15), "graph": _draw(rng, 16, 40)}
        totals = {
            way: {
                n: LaunchModel(kernels=n, kernel_us=kernel, launch_us=launch, way=way).total_us + fixed[way]  # type: ignore[arg-type]
                for n in (many, few)
            }
            for way in fixed
        }
        _judge_read_off(answer, totals["eager"], totals["graph"], max(launch, kernel), kernel, bound)
    return (
        "Right for both kinds. A difference of two chains has no fixed cost in it, and a quotient always has."
    )


def _judge_read_off(
    answer: Any,
    eager: dict[int, float],
    graph: dict[int, float],
    pace: float,
    kernel: float,
    bound: str,
) -> None:
    many, few = eager
    case = f"eager {show(eager)}, graph {show(graph)}"
    found = items(call(answer, dict(eager), dict(graph)), "pace, kernel length and bound", length=3)
    per_kernel = "a total over its number of kernels still has the fixed cost in it"
    swapped = "eager and graph are exchanged"
    judge(
        found[0],
        pace,
        {
            f"{per_kernel}: take a difference": eager[many] / many,
            f"{per_kernel} : take a difference": eager[few] / few,
            swapped: kernel,
            "the difference is for several kernels: divide by their number": eager[many] - eager[few],
            "the difference is for as many kernels as the chains differ in": (eager[many] - eager[few])
            / many,
        },
        case=case,
        what="the pace in µs a kernel",
    )
    judge(
        found[1],
        kernel,
        {
            f"{per_kernel}: take a difference": graph[many] / many,
            f"{per_kernel} : take a difference": graph[few] / few,
            swapped: pace,
            "the difference is for several kernels: divide by their number": graph[many] - graph[few],
        },
        case=case,
        what="the kernel length in µs",
    )
    told = word(found[2], "the bound", ("launch", "device"))
    if told != bound:
        why = (
            "In a graph the same kernels come faster, so they are not what the eager chain waits for."
            if bound == "launch"
            else "The graph has no launches between its kernels and keeps the same pace: what could the launches "
            "have cost?"
        )
        raise Wrong(f"For {case} the bound came out as {show(found[2])}. {why}")
