"""A trace as a file for https://ui.perfetto.dev: lanes of the host and of the device, arrows between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpucourse.trace_facts import Gap, Kernel, Wait, shapes_text, short_name

__all__ = [
    "perfetto",
]


# Process and lane numbers in the file. Perfetto gives lane 0 of every process to one idle thread, so none is 0.
_HOST, _DEVICE = 1, 2
_THREADS, _IDLE, _STREAMS = 100, 999, 1000


def _slice(name: str, process: int, lane: int, begin: float, length: float, **facts: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": lane,
        "ts": round(begin, 3),
        "dur": round(length, 3),
        "args": {key: value for key, value in facts.items() if value is not None},
    }


def perfetto(
    kernels: Sequence[Kernel], waits: Sequence[Wait], gaps: Sequence[Gap], gpu: str | None
) -> dict[str, Any]:
    """Give a trace in Chrome's trace format; see `KernelTrace.perfetto`."""
    starts = [k.launch_us for k in kernels if k.launch_us is not None]
    shift = -min([0.0, *starts, *(wait.start_us for wait in waits)])
    lanes = {stream: _STREAMS + stream for stream in sorted({kernel.stream for kernel in kernels})}
    threads = sorted({k.thread or 0 for k in kernels} | {w.thread or 0 for w in waits})
    named = {(_HOST, _THREADS + thread): f"host thread {thread}" for thread in threads}
    named |= {(_DEVICE, lane): f"stream {stream}" for stream, lane in lanes.items()}
    named[_DEVICE, _IDLE] = "idle, by cause"
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
        for process, name in ((_HOST, "host"), (_DEVICE, gpu or "device"))
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": process, "tid": lane, "args": {"name": name}}
        for (process, lane), name in named.items()
    ]
    drawn: set[tuple[float, int]] = set()
    for index, kernel in enumerate(kernels):
        begin, lane = kernel.start_us + shift, lanes[kernel.stream]
        events.append(
            _slice(
                short_name(kernel.name),
                _DEVICE,
                lane,
                begin,
                kernel.duration_us,
                op=kernel.op or None,
                shapes=shapes_text(kernel) or None,
                grid=list(kernel.grid) if kernel.grid else None,
                block=list(kernel.block) if kernel.block else None,
                registers=kernel.registers,
                shared_bytes=kernel.shared_bytes,
                call=kernel.call,
                kernel=kernel.name,
                index=index,
            )
        )
        if kernel.launch_us is None:
            continue
        launch, thread = kernel.launch_us + shift, _THREADS + (kernel.thread or 0)
        if (launch, thread) not in drawn:  # a CUDA graph is one launch of many kernels
            drawn.add((launch, thread))
            label = f"launch {kernel.op.removeprefix('aten::') or short_name(kernel.name)}"
            length = 1.0 if kernel.launch_duration_us is None else kernel.launch_duration_us
            events.append(_slice(label, _HOST, thread, launch, length, op=kernel.op or None))
        arrow = {"name": "launch", "cat": "launch", "id": index + 1}
        events.append({"ph": "s", "pid": _HOST, "tid": thread, "ts": round(launch, 3), **arrow})
        events.append({"ph": "f", "bp": "e", "pid": _DEVICE, "tid": lane, "ts": round(begin, 3), **arrow})
    for wait in waits:
        begin, thread = wait.start_us + shift, _THREADS + (wait.thread or 0)
        if (begin, thread) not in drawn:  # a blocking copy is drawn as its launch
            events.append(_slice(wait.name, _HOST, thread, begin, wait.duration_us, waits=True))
    events += [_slice(gap.cause, _DEVICE, _IDLE, gap.start_us + shift, gap.duration_us) for gap in gaps]
    return {"traceEvents": events, "displayTimeUnit": "ns"}
