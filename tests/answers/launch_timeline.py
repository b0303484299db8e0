"""Answers to the checkpoints of the launch lab."""

from __future__ import annotations

import math

from tests.answers import Answers

# --- launch_timeline.total --------------------------------------------------------------------------------


def total(kernels, kernel_us, launch_us, latency_us):
    whole = latency_us + launch_us + (kernels - 1) * max(launch_us, kernel_us) + kernel_us
    return whole, whole - kernels * kernel_us


def total_by_steps(kernels, kernel_us, launch_us, latency_us):
    """Walk through the chain, launch by launch."""
    host = free = idle = 0.0
    for _ in range(kernels):
        host += launch_us
        begin = max(host + latency_us, free)
        idle += begin - free
        free = begin + kernel_us
    return [free, idle]


def _total(change):
    def answer(kernels, kernel_us, launch_us, latency_us):
        whole, _ = total(kernels, kernel_us, launch_us, latency_us)
        whole = change(whole, kernels, kernel_us, launch_us, latency_us)
        return whole, whole - kernels * kernel_us

    return answer


def _idle(change):
    def answer(kernels, kernel_us, launch_us, latency_us):
        whole, idle = total(kernels, kernel_us, launch_us, latency_us)
        return whole, change(idle, whole, kernels, kernel_us, launch_us, latency_us)

    return answer


# --- launch_timeline.fewest -------------------------------------------------------------------------------


def fewest(operations, start_us, work_us, launch_us):
    needed = max(1, math.ceil((launch_us - start_us) / work_us))
    return needed if needed <= operations else math.inf


def fewest_by_trying(operations, start_us, work_us, launch_us):
    for held in range(1, operations + 1):
        if start_us + held * work_us >= launch_us:
            return float(held)
    return float("inf")


def _strict(operations, start_us, work_us, launch_us):
    for held in range(1, operations + 1):
        if start_us + held * work_us > launch_us:
            return held
    return math.inf


def _no_edge(operations, start_us, work_us, launch_us):
    return max(1, math.ceil((launch_us - start_us) / work_us))


def _start_each(operations, start_us, work_us, launch_us):
    return math.ceil(launch_us / (start_us + work_us))


def _no_start(operations, start_us, work_us, launch_us):
    needed = math.ceil(launch_us / work_us)
    return needed if needed <= operations else math.inf


def _floor(operations, start_us, work_us, launch_us):
    needed = max(1, math.floor((launch_us - start_us) / work_us))
    return needed if needed <= operations else math.inf


def _not_whole(operations, start_us, work_us, launch_us):
    needed = max(1, (launch_us - start_us) / work_us)
    return needed if needed <= operations else math.inf


def _no_floor_at_one(operations, start_us, work_us, launch_us):
    needed = math.ceil((launch_us - start_us) / work_us)
    return needed if needed <= operations else math.inf


def _launches(operations, start_us, work_us, launch_us):
    held = fewest(operations, start_us, work_us, launch_us)
    return held if math.isinf(held) else math.ceil(operations / held)


# --- launch_timeline.read_off -----------------------------------------------------------------------------


def _slope(totals):
    (a, at_a), (b, at_b) = totals.items()
    return (at_a - at_b) / (a - b)


def read_off(eager, graph):
    pace, kernel = _slope(eager), _slope(graph)
    return pace, kernel, "launch" if pace > 1.05 * kernel else "device"


def read_off_by_fit(eager, graph):
    """Fit a straight line to each."""
    import numpy as np

    pace, kernel = (float(np.polyfit(list(t), list(t.values()), 1)[0]) for t in (eager, graph))
    return [pace, kernel, "device" if math.isclose(pace, kernel, rel_tol=0.01) else "Launch"]


def _quotient(eager, graph):
    n = max(eager)
    pace, kernel = eager[n] / n, graph[n] / n
    return pace, kernel, "launch" if pace > 1.2 * kernel else "device"


def _graph_quotient(eager, graph):
    pace, _, bound = read_off(eager, graph)
    return pace, graph[min(graph)] / min(graph), bound


def _swapped(eager, graph):
    return read_off(graph, eager)


def _difference(eager, graph):
    _, kernel, bound = read_off(eager, graph)
    return eager[max(eager)] - eager[min(eager)], kernel, bound


def _always_launch(eager, graph):
    return (*read_off(eager, graph)[:2], "launch")


def _always_device(eager, graph):
    return (*read_off(eager, graph)[:2], "device")


def _pops(eager, graph):
    found = read_off(eager, graph)
    eager.popitem()
    return found


ANSWERS = {
    "launch_timeline.total": Answers(
        right=[total, total_by_steps],
        wrong={
            "no latency": (_total(lambda w, n, t, c, a: w - a), "the latency is left out"),
            "latency a kernel": (_total(lambda w, n, t, c, a: w + (n - 1) * a), "the latency is paid once"),
            "nothing overlaps": (
                _total(lambda w, n, t, c, a: a + n * (c + t)),
                "launches while the device works",
            ),
            "the longer sum": (_total(lambda w, n, t, c, a: a + n * max(c, t)), "runs after the last launch"),
            "kernels alone": (_total(lambda w, n, t, c, a: a + n * t), "first launch comes before"),
            "always launch-bound": (
                _total(lambda w, n, t, c, a: a + n * c + t),
                "here the kernels are longer",
            ),
            "always device-bound": (
                _total(lambda w, n, t, c, a: a + c + n * t),
                "here the launches are longer",
            ),
            "a kernel too many": (_total(lambda w, n, t, c, a: w + max(c, t)), "one kernel too many"),
            "idle between kernels only": (
                _idle(lambda i, w, n, t, c, a: (n - 1) * max(c - t, 0)),
                "also waits for the first launch",
            ),
            "idle as a share": (_idle(lambda i, w, n, t, c, a: i / w), "that is the share"),
            "busy for idle": (_idle(lambda i, w, n, t, c, a: n * t), "in which the device works"),
            "the host's idle time": (_idle(lambda i, w, n, t, c, a: w - n * c), "host's idle time"),
            "the total alone": (lambda n, t, c, a: total(n, t, c, a)[0], "a list is wanted"),
            "milliseconds": (_total(lambda w, n, t, c, a: w / 1000), "1e-3"),
            "nan": (lambda n, t, c, a: (math.nan, 0.0), "not a finite number"),
        },
    ),
    "launch_timeline.fewest": Answers(
        right=[fewest, fewest_by_trying],
        wrong={
            "start paid by each operation": (_start_each, "starts and stops once"),
            "no start": (_no_start, "start and stop count"),
            "longer than a launch is asked": (_strict, "as long as a launch is long enough"),
            "rounded down": (_floor, "round up"),
            "not rounded": (_not_whole, "operations come whole"),
            "never enough not seen": (_no_edge, "your answer came out as"),
            "less than one": (_no_floor_at_one, "one operation at least"),
            "launches": (_launches, "a number of launches"),
            "always all": (lambda n, s, w, c: n, "is not it"),
            "never": (lambda n, s, w, c: math.inf, "with all of the operations lasts as long"),
        },
    ),
    "launch_timeline.read_off": Answers(
        right=[read_off, read_off_by_fit],
        wrong={
            "quotient": (_quotient, "still has the fixed cost"),
            "quotient of the graph": (_graph_quotient, "still has the fixed cost"),
            "exchanged": (_swapped, "exchanged"),
            "difference not divided": (_difference, "divide by their number"),
            "always launch": (_always_launch, "what could the launches have cost"),
            "always device": (_always_device, "not what the eager chain waits for"),
            "other word": (lambda e, g: (*read_off(e, g)[:2], "host"), "Give one of"),
            "changes its input": (_pops, "changed its input"),
        },
    ),
}
