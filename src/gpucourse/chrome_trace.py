"""Read a trace out of what torch.profiler recorded and exported."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gpucourse.environment import Environment
from gpucourse.kernel_trace import KernelTrace
from gpucourse.trace_facts import Kernel, Wait, torch_name

__all__ = [
    "MARK",
    "ProfilerError",
    "TensorLists",
    "parse_chrome_trace",
    "tensor_lists",
]


MARK = "gpucourse.trace"

_DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST_KINDS = ("cuda_runtime", "cuda_driver")
_LAUNCH = re.compile(r"Launch(Cooperative)?Kernel|GraphLaunch|Memcpy|Memset")
_GRAPH = re.compile(r"GraphLaunch")
_SYNCHRONIZE = re.compile(r"Synchronize")
_COPY = re.compile(r"Memcpy")

# Shapes and dtypes of the tensors in each list that an operation was given.
TensorLists = Sequence[Sequence[tuple[tuple[int, ...], str]]]


class ProfilerError(RuntimeError):
    """The profiler recorded nothing of CUDA, so a trace would be empty for the wrong reason."""


def tensor_lists(profiled: Any) -> dict[int, TensorLists]:
    """Read the tensors in lists from the profiler's event tree, by the operation's external id.

    The exported file leaves out their dtypes, and of lists of more than 30 tensors also their shapes. The tree is an
    experimental part of torch: where it is another or gone, what the file does not say stays unknown.
    """
    found: dict[int, TensorLists] = {}
    try:
        nodes = list(profiled.profiler.kineto_results.experimental_event_tree())
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children)
            inputs = getattr(node.extra_fields, "inputs", None) or ()
            lists = [
                [
                    (tuple(int(size) for size in tensor.sizes), str(tensor.dtype).removeprefix("torch."))
                    for tensor in value
                ]
                for value in inputs
                if isinstance(value, list) and value and all(hasattr(tensor, "sizes") for tensor in value)
            ]
            if lists:
                found[int(node.correlation_id)] = lists
    except (AttributeError, RuntimeError, TypeError):
        return {}
    return found


def parse_chrome_trace(
    events: list[dict[str, Any]],
    environment: Environment,
    lists: Mapping[int, TensorLists] | None = None,
) -> KernelTrace:
    """Read the kernels of the marked call out of a Chrome trace of torch.profiler.

    Parameters
    ----------
    events
        ``traceEvents`` of the exported file; times in µs.
    environment
        The machine that it was recorded on.
    lists
        Shapes and dtypes of the tensors in each operation's lists, by its external id: the file does not hold them all.

    Raises
    ------
    ProfilerError
        The profiler recorded no call of CUDA.
    ValueError
        The mark that `trace` puts around the call is missing.

    Notes
    -----
    A record whose begin or duration is no time (missing, negative, NaN) says nothing of when: it is left out, and the
    launch of a kernel that was so recorded counts as missing.
    """
    events = [event for event in events if isinstance(event, dict) and _has_time(event)]
    marks = [e for e in events if e.get("name") == MARK and e.get("cat") == "user_annotation"]
    if not marks:
        raise ValueError(f"no event {MARK!r} in the trace: it was not made by gpucourse.kernels.trace")
    if not any(e.get("cat") in _HOST_KINDS for e in events):
        raise ProfilerError(
            "the profiler recorded no call of CUDA, not even the ones that trace makes itself: CUPTI cannot be used "
            "here. See whether another profiler is attached (nsys, ncu, DCGM), and whether "
            "torch.profiler.supported_activities() lists CUDA"
        )
    begin = float(marks[0]["ts"])
    end = begin + float(marks[0]["dur"])
    calls = [e for e in events if e.get("cat") in _HOST_KINDS and begin <= float(e["ts"]) <= end]
    launches: dict[Any, dict[str, Any]] = {
        e["args"]["correlation"]: e
        for e in calls
        if "correlation" in e.get("args", {}) and _LAUNCH.search(e["name"])
    }
    ran = [
        e
        for e in events
        if e.get("cat") in _DEVICE_KINDS and e.get("args", {}).get("correlation") in launches
    ]
    ran.sort(key=lambda e: float(e["ts"]))
    origin = float(ran[0]["ts"]) if ran else begin
    in_order = sorted(launches.values(), key=lambda e: float(e["ts"]))
    launchers = _innermost(events, in_order)
    threads: dict[Any, int] = {}
    numbers: dict[int, int] = {}  # of calls of operations, by the identity of their event
    for launch in in_order:
        threads.setdefault(launch.get("tid"), len(threads))
    for around in sorted(filter(None, launchers.values()), key=lambda e: float(e["ts"])):
        numbers.setdefault(id(around), len(numbers))
    kernels = []
    for event in ran:
        facts = event["args"]
        launch = launches[facts["correlation"]]
        op = launchers[facts["correlation"]]
        shapes, dtypes = _arguments(op, lists or {})
        kernels.append(
            Kernel(
                name=event["name"],
                op=op["name"] if op else "",
                shapes=shapes,
                dtypes=dtypes,
                call=numbers[id(op)] if op else None,
                start_us=_after(origin, event),
                duration_us=float(event["dur"]),
                launch_us=_after(origin, launch),
                launch_duration_us=float(launch["dur"]) if "dur" in launch else None,
                thread=threads[launch.get("tid")],
                stream=int(facts.get("stream", 0)),
                grid=tuple(facts["grid"]) if "grid" in facts else None,
                block=tuple(facts["block"]) if "block" in facts else None,
                registers=facts.get("registers per thread"),
                shared_bytes=facts.get("shared memory"),
            )
        )
    recorded = {e["args"]["correlation"] for e in ran}
    pageable = {e["args"]["correlation"] for e in ran if "Pageable" in e["name"]}
    return KernelTrace(
        kernels=tuple(kernels),
        launches=len(launches),
        missing=len(launches.keys() - recorded),
        environment=environment,
        waits=tuple(
            Wait(
                name=e["name"],
                start_us=_after(origin, e),
                duration_us=float(e.get("dur", 0)),
                thread=threads.get(e.get("tid")),
            )
            for e in sorted(calls, key=lambda e: float(e["ts"]))
            if _waits(e, pageable)
        ),
        graphs=sum(_GRAPH.search(e["name"]) is not None for e in in_order),
        unrecorded=tuple(e["name"] for e in in_order if e["args"]["correlation"] not in recorded),
    )


def _has_time(event: Mapping[str, Any]) -> bool:
    """Whether a record can be read: what is neither of the host nor of the device is not asked for its time."""
    kind = event.get("cat")
    if kind not in (*_DEVICE_KINDS, *_HOST_KINDS, "cpu_op", "user_annotation"):
        return True
    needs_length = kind in _DEVICE_KINDS or event.get("name") == MARK
    try:
        begin, length = float(event["ts"]), float(event["dur"] if needs_length else event.get("dur", 0))
    except (KeyError, TypeError, ValueError, OverflowError):
        return False
    return math.isfinite(begin) and 0 <= length < math.inf


def _after(origin: float, event: Mapping[str, Any]) -> float:
    return round(float(event["ts"]) - origin, 3)  # the profiler's own resolution is 1 ns


def _waits(call: Mapping[str, Any], pageable: set[Any]) -> bool:
    """Whether the host stands still in a runtime call until the device, or a copy, is done."""
    name = call["name"]
    if _COPY.search(name):
        # An asynchronous copy from or to pageable memory still goes through a buffer of the driver's, and blocks.
        return "Async" not in name or call.get("args", {}).get("correlation") in pageable
    return _SYNCHRONIZE.search(name) is not None


def _innermost(
    events: Sequence[dict[str, Any]], launches: Sequence[dict[str, Any]]
) -> dict[Any, dict[str, Any] | None]:
    """Find the innermost operation around each launch, on the launch's own thread, by its correlation.

    A kernel that Inductor generated is launched inside an event with the kernel's name, which stands for the operation.
    """
    by_thread: dict[Any, list[tuple[float, int, float, dict[str, Any]]]] = {}
    for event in events:
        kind, name = event.get("cat"), str(event.get("name"))
        if kind == "cpu_op" or (kind == "user_annotation" and name.startswith("triton_")):
            entry = (float(event["ts"]), 0, -float(event.get("dur", 0)), event)
            by_thread.setdefault(event.get("tid"), []).append(entry)
    for launch in launches:
        by_thread.setdefault(launch.get("tid"), []).append((float(launch["ts"]), 1, 0.0, launch))
    found: dict[Any, dict[str, Any] | None] = {}
    for entries in by_thread.values():
        open_: list[dict[str, Any]] = []
        for at, is_launch, _, event in sorted(entries, key=lambda entry: entry[:3]):
            while open_ and float(open_[-1]["ts"]) + float(open_[-1].get("dur", 0)) < at:
                open_.pop()
            if is_launch:
                found[event["args"]["correlation"]] = open_[-1] if open_ else None
            else:
                open_.append(event)
    return found


def _arguments(
    op: Mapping[str, Any] | None, lists: Mapping[int, TensorLists]
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Read shapes and dtypes of an operation's tensors; lists are laid out flat, what has no dimension is left out."""
    facts = (op or {}).get("args", {})
    kinds = facts.get("Input type", [])
    whole = iter(lists.get(facts.get("External id"), ()))
    found: list[tuple[tuple[int, ...], str]] = []
    for place, value in enumerate(facts.get("Input Dims", [])):
        kind = str(kinds[place]) if place < len(kinds) else ""
        if kind == "TensorList" or (
            isinstance(value, list) and any(isinstance(size, list) for size in value)
        ):
            inside = next(whole, ())
            # The file writes a list of more than 30 as an empty one; what it does write must agree.
            agrees = not value or [list(shape) for shape, _ in inside] == value
            found += inside if agrees else [(tuple(shape), "unknown") for shape in value]
        elif isinstance(value, list) and all(isinstance(size, int) for size in value):
            found.append((tuple(value), torch_name(kind)))
    kept = [(shape, dtype) for shape, dtype in found if shape]
    return tuple(shape for shape, _ in kept), tuple(dtype for _, dtype in kept)
