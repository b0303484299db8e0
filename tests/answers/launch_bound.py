"""Answers to the checkpoints of the chapter on a hundred tiny additions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpucourse.simulator import Kernel, SimulatedDevice
from tests.answers import Answers

# --- launch_bound.queue


def _instants(steps: list[dict[str, Any]]) -> tuple[list[tuple[float, float]], float]:
    host, ends, spans = 0.0, {}, []
    for step in steps:
        if step["do"] == "synchronize":
            host = max(host, *ends.values()) if ends else host
            continue
        host += step["host_us"]
        if step["do"] == "launch":
            begin = max(host, ends.get(step["stream"], 0.0))
            ends[step["stream"]] = begin + step["kernel_us"]
            spans.append((begin, ends[step["stream"]]))
    return spans, max([host, *ends.values()])


def _simulated_device(steps: list[dict[str, Any]]) -> SimulatedDevice:
    device = SimulatedDevice(launch_us=0.0)
    streams = {0: device.current_stream, 1: device.new_stream()}
    for step in steps:
        if step["do"] == "synchronize":
            device.synchronize()
            continue
        device.sleep(step["host_us"])
        if step["do"] == "launch":
            device.launch(Kernel(duration_us=step["kernel_us"]), stream=streams[step["stream"]])
    return device


def _simulated(steps: list[dict[str, Any]]) -> tuple[list[list[float]], float]:
    device = _simulated_device(steps)
    spans = [[span.start_us, span.end_us] for span in device.history if span.kind == "kernel"]
    device.synchronize()
    return spans, device.perf_counter() * 1e6


def _waits_for_each(steps: list[dict[str, Any]]) -> Any:
    host, spans = 0.0, []
    for step in steps:
        host += step.get("host_us", 0.0)
        if step["do"] == "launch":
            spans.append((host, host + step["kernel_us"]))
            host = spans[-1][1]
    return spans, host


def _slipped(change: str) -> Callable[[list[dict[str, Any]]], Any]:
    def answer(steps: list[dict[str, Any]]) -> Any:
        host, ends, spans, last = 0.0, {}, [], 0
        for step in steps:
            if step["do"] == "synchronize":
                if change == "last stream":
                    host = max(host, ends.get(last, 0.0))
                elif change == "back in time":
                    host = max(ends.values(), default=host)
                elif change != "no wait":
                    host = max([host, *ends.values()])
                continue
            if step["do"] == "launch" or change != "python is free":
                host += step["host_us"]
            if step["do"] == "launch":
                last = 0 if change == "one queue" else step["stream"]
                arrived = host - step["host_us"] if change == "too early" else host
                begin = arrived if change == "host alone" else max(arrived, ends.get(last, 0.0))
                if change == "device alone":
                    begin = ends.get(last, 0.0)
                ends[last] = max(ends.get(last, 0.0), begin + step["kernel_us"])
                spans.append((begin, begin + step["kernel_us"]))
        return spans, max([host, *ends.values()])

    return answer


def _total(change: Callable[[list[dict[str, Any]], Any, float], float]) -> Callable[..., Any]:
    def answer(steps: list[dict[str, Any]]) -> Any:
        spans, total = _instants(steps)
        return spans, change(steps, spans, total)

    return answer


def _host_end(steps: list[dict[str, Any]]) -> float:
    device = _simulated_device(steps)
    return device.perf_counter() * 1e6


def _sums(steps: list[dict[str, Any]]) -> tuple[float, float]:
    host = sum(step.get("host_us", 0.0) for step in steps)
    return host, sum(step.get("kernel_us", 0.0) for step in steps)


QUEUE = Answers(
    right=[_instants, _simulated],
    wrong={
        "host waits for each kernel": (_waits_for_each, "only queues"),
        "kernel begins with its launch": (_slipped("too early"), "before its own launch was done"),
        "kernels of one stream overlap": (_slipped("host alone"), "still running"),
        "device needs no launch": (_slipped("device alone"), "had not launched it yet"),
        "synchronize waits for nothing": (_slipped("no wait"), "stop the host"),
        "synchronize sets the host's clock back": (_slipped("back in time"), "never goes back"),
        "synchronize of one stream": (_slipped("last stream"), "every stream"),
        "one queue for both streams": (_slipped("one queue"), "queue of its own"),
        "host work is free": (_slipped("python is free"), "own work"),
        "total of the last kernel": (
            _total(lambda s, k, t: k[-1][1] if k else 0.0),
            "whichever kernel ends last",
        ),
        "later of the host and the last launched": (
            _total(lambda s, k, t: max(_host_end(s), k[-1][1] if k else 0.0)),
            "not the one launched last",
        ),
        "larger of two sums": (_total(lambda s, k, t: max(_sums(s))), "the larger of them"),
        "sum of both": (_total(lambda s, k, t: sum(_sums(s))), "adds up what overlaps"),
        "host's end": (_total(lambda s, k, t: _sums(s)[0]), "host's own times"),
        "device's end": (
            _total(lambda s, k, t: max((e for _, e in k), default=0.0)),
            "whichever kernel ends last",
        ),
        "milliseconds": (
            lambda steps: (
                [(a / 1e3, b / 1e3) for a, b in _instants(steps)[0]],
                _instants(steps)[1] / 1e3,
            ),
            "power of 1000",
        ),
        "lengths for ends": (
            lambda steps: ([(a, b - a) for a, b in _instants(steps)[0]], _instants(steps)[1]),
            "length where the end is wanted",
        ),
        "spans alone": (lambda steps: _instants(steps)[0], "pair (spans, total_us)"),
        "one span short": (lambda steps: (_instants(steps)[0][1:], _instants(steps)[1]), "launches"),
        "sorted in place": (lambda steps: (steps.clear(), _instants(steps))[1], "changed its input"),
    },
)

# --- launch_bound.bend


def _equal_times(
    host_us: float, floor_us: float, gb_per_s: float, reads: int, writes: int, size: int
) -> float:
    return max(0.0, host_us - floor_us) * 1e-6 * gb_per_s * 1e9 / ((reads + writes) * size)


def _by_search(host_us: float, floor_us: float, gb_per_s: float, reads: int, writes: int, size: int) -> int:
    low, high = 0, 2**40
    while low < high:
        middle = (low + high) // 2
        if floor_us + middle * (reads + writes) * size / gb_per_s * 1e-3 >= host_us:
            high = middle
        else:
            low = middle + 1
    return low


BEND = Answers(
    right=[_equal_times, _by_search, lambda *given: max(1, _by_search(*given))],
    wrong={
        "no floor": (lambda h, f, g, r, w, s: h * 1e3 * g / ((r + w) * s), "needs its floor"),
        "floor added": (lambda h, f, g, r, w, s: (h + f) * 1e3 * g / ((r + w) * s), "you added it"),
        "writes forgotten": (
            lambda h, f, g, r, w, s: max(0.0, h - f) * 1e3 * g / (r * s),
            "both have to move",
        ),
        "reads forgotten": (
            lambda h, f, g, r, w, s: max(0.0, h - f) * 1e3 * g / (w * s),
            "one of the two is missing",
        ),
        "bytes": (lambda h, f, g, r, w, s: max(0.0, h - f) * 1e3 * g, "elements are wanted"),
        "one byte an element": (
            lambda h, f, g, r, w, s: max(0.0, h - f) * 1e3 * g / (r + w),
            "more than one byte",
        ),
        "always fp32": (lambda h, f, g, r, w, s: max(0.0, h - f) * 1e3 * g / ((r + w) * 4), "`itemsize`"),
        "a negative size": (lambda h, f, g, r, w, s: (h - f) * 1e3 * g / ((r + w) * s), "never negative"),
        "milliseconds": (
            lambda h, f, g, r, w, s: _equal_times(h, f, g, r, w, s) * 1e3,
            "power of 1000",
        ),
        "GiB": (lambda h, f, g, r, w, s: _equal_times(h, f, g, r, w, s) * 2**30 / 1e9, "GiB"),
        "a constant": (lambda h, f, g, r, w, s: 2**20, "came out as 1,048,576"),
    },
)

# --- launch_bound.replay


def _copy_replay_clone(graph: Any, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    results = []
    for batch in batches:
        graph.inputs[: len(batch)].copy_(batch)
        graph.replay()
        results.append(graph.outputs[: len(batch)].clone())
    return results


def _padded(graph: Any, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    results = []
    for batch in batches:
        rows = graph.inputs.shape[0] - batch.shape[0]
        graph.inputs.copy_(torch.nn.functional.pad(batch, (0, 0, 0, rows)))
        graph.replay()
        results.append(torch.stack(list(graph.outputs)[: len(batch)]))
    return results


def _rebinds(graph: Any, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    results = []
    for batch in batches:
        graph.inputs = batch
        graph.replay()
        results.append(graph.outputs[: len(batch)].clone())
    return results


def _replays_first(graph: Any, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    results = []
    for batch in batches:
        graph.replay()
        graph.inputs[: len(batch)].copy_(batch)
        results.append(graph.outputs[: len(batch)].clone())
    return results


def _keeps_the_buffer(graph: Any, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    results = []
    for batch in batches:
        graph.inputs[: len(batch)].copy_(batch)
        graph.replay()
        results.append(graph.outputs[: len(batch)])
    return results


def _whole_buffer(graph: Any, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    results = []
    for batch in batches:
        graph.inputs[: len(batch)].copy_(batch)
        graph.replay()
        results.append(graph.outputs.clone())
    return results


def _same_size_only(graph: Any, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    results = []
    for batch in batches:
        graph.inputs.copy_(batch[: graph.inputs.shape[0]].reshape(graph.inputs.shape))
        graph.replay()
        results.append(graph.outputs.clone())
    return results


def _replays_twice(graph: Any, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    for _ in batches:
        graph.replay()
    return _copy_replay_clone(graph, batches)


REPLAY = Answers(
    right=[_copy_replay_clone, _padded],
    wrong={
        "gives the name another tensor": (_rebinds, "whatever a name is bound to"),
        "replays before copying": (_replays_first, "when it is replayed"),
        "keeps the output buffer": (_keeps_the_buffer, "output buffer"),
        "returns the whole buffer": (_whole_buffer, "earlier batch"),
        "fits full batches only": (_same_size_only, "raised RuntimeError"),
        "replays too often": (_replays_twice, "once a batch"),
        "last result only": (
            lambda graph, batches: _copy_replay_clone(graph, batches)[-1:] if batches else [],
            "values are wanted",
        ),
        "never replays": (lambda graph, batches: [b.clone() for b in batches], "result 0"),
        "lists": (
            lambda graph, batches: [r.tolist() for r in _copy_replay_clone(graph, batches)],
            "a tensor",
        ),
        "one tensor": (lambda graph, batches: torch.zeros(2, 2), "a list is wanted"),
    },
)

ANSWERS = {"launch_bound.queue": QUEUE, "launch_bound.bend": BEND, "launch_bound.replay": REPLAY}
