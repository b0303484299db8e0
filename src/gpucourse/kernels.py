"""The kernels that an expression really launches, as the profiler recorded them on the device.

>>> short_name("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)")
'vectorized_elementwise_kernel (CUDAFunctor_add)'
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from gpucourse import html
from gpucourse.environment import Environment, require_cuda

__all__ = [
    "GAP_CAUSES",
    "METHOD_VERSION",
    "Candidate",
    "Gap",
    "Kernel",
    "KernelTrace",
    "LaunchCount",
    "ProfilerError",
    "Wait",
    "count_launches",
    "merge_intervals",
    "short_name",
    "trace",
]

METHOD_VERSION = 2

GAP_CAUSES = ("host", "synchronization", "copy", "queue")

_DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST_KINDS = ("cuda_runtime", "cuda_driver")
_LAUNCH = re.compile(r"Launch(Cooperative)?Kernel|GraphLaunch|Memcpy|Memset")
_GRAPH = re.compile(r"GraphLaunch")
_SYNCHRONIZE = re.compile(r"Synchronize")
_COPY = re.compile(r"Memcpy")
_TO_OR_FROM_HOST = re.compile(r"DtoH|HtoD")
# CUPTI puts the device's stamps on the host's clock; the two agree to about a microsecond.
_SKEW_US = 1.0


class ProfilerError(RuntimeError):
    """The profiler recorded nothing of CUDA, so a trace would be empty for the wrong reason."""


def short_name(name: str) -> str:
    """Shorten a kernel's C++ name to what tells it apart.

    Element-wise kernels (over one tensor or a list) keep what they compute, library products their name and tile.
    """
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    wrapped = re.match(r"cutlass::Kernel2?<(\w+)>", bare)
    if wrapped:
        return wrapped.group(1)
    base = re.split(r"[<(]", bare, maxsplit=1)[0].strip()
    rest = bare[len(base) :]
    base = base.rsplit("::", 1)[-1] or name
    tiled = re.match(r"(sm\d+_xmma_gemm)_.*tilesize(\d+x\d+)", base)
    if tiled:
        return f"{tiled.group(1)}_{tiled.group(2)}{'_split_k' if 'split_k' in base else ''}"
    if base.endswith(("elementwise_kernel", "multi_tensor_apply_kernel")):
        for pattern in (r"\w+_kernel_cuda", r"\w*[Ff]unctor\w*", r"\b(?!gpu_kernel)\w+_kernel_impl"):
            found = re.search(pattern, rest)
            if found:
                return f"{base} ({found.group()})"
    return base


def merge_intervals(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge intervals (start, end) that touch or overlap, in order of their start.

    >>> merge_intervals([(5, 6), (0, 2), (1, 3)])
    [(0, 3), (5, 6)]
    """
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One piece of work that the device ran: a kernel, a copy or a fill.

    Attributes
    ----------
    name
        Full C++ name as the profiler gives it; `short_name` shortens it.
    op
        The innermost PyTorch operation whose call launched it; "" where none encloses the launch.
    shapes
        Shapes of that operation's tensor arguments in order, the tensors of a list one by one. Plain numbers are left
        out, and 0-dimensional tensors with them: the profiler shows a number that PyTorch wrapped in a tensor just so.
        Lists that may hold None (the indices of ``x[i]``) are not in its record.
    dtypes
        One for each of the shapes, by torch's name ("float32"); "unknown" where the profiler does not say.
    call
        Which call of an operation launched it: kernels of one call share the number; None where no operation
        encloses the launch. Calls are numbered from 0 by their start on the host, those that launched nothing left out.
    start_us, duration_us
        Start after the first kernel's start, and duration, in µs of the device's clock.
    launch_us
        When the host launched it, on the same axis (negative before the first kernel); None where unknown.
    stream
        CUDA stream.
    grid, block
        Blocks in the grid and threads in a block, (x, y, z); None for a copy or a fill.
    registers, shared_bytes
        Registers a thread, and bytes of shared memory a block; None where the profiler does not say.
    launch_duration_us
        How long the host was in the call that launched it, the profiler's own part included; None where unknown.
    thread
        Which host thread launched it: 0 is the first that launched, a backward pass runs on another. None where
        unknown.
    """

    name: str
    op: str
    shapes: tuple[tuple[int, ...], ...]
    start_us: float
    duration_us: float
    launch_us: float | None
    stream: int
    grid: tuple[int, ...] | None
    block: tuple[int, ...] | None
    registers: int | None
    shared_bytes: int | None
    dtypes: tuple[str, ...] = ()
    call: int | None = None
    launch_duration_us: float | None = None
    thread: int | None = None

    @property
    def end_us(self) -> float:
        """End after the first kernel's start, in µs."""
        return self.start_us + self.duration_us


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One call in which the host stood still until the device, or a copy, was done.

    Attributes
    ----------
    name
        The runtime's function: ``cudaStreamSynchronize``, or ``cudaMemcpyAsync`` from or to pageable memory.
    start_us, duration_us
        Start after the first kernel's start, and duration, in µs.
    thread
        Which host thread waited, numbered as `Kernel.thread`; None where that thread launched nothing.
    """

    name: str
    start_us: float
    duration_us: float
    thread: int | None = None

    @property
    def end_us(self) -> float:
        """End after the first kernel's start, in µs."""
        return self.start_us + self.duration_us

    @property
    def copies(self) -> bool:
        """Whether the call copies, and does not only wait."""
        return _COPY.search(self.name) is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time between two pieces of work in which the whole device was idle, and why.

    Attributes
    ----------
    start_us, duration_us
        Start after the first kernel's start, and duration, in µs.
    cause
        "copy": the device ran dry behind a copy to or from the host, for which the host waited before it launched what
        came next, or while the host stood in a blocking copy. "synchronization": the host was in another waiting call
        when the device ran dry, and launched what came next only then. "host": what came next was launched after the
        device had run dry, by a host that waited for nothing: it was late. "queue": what came next was in the
        queue already, so the pause is the device's own. "unknown": it is not known when it was launched.
    before, after
        Indices in `KernelTrace.kernels` of the work that ended last and of that which came next.
    """

    start_us: float
    duration_us: float
    cause: str
    before: int
    after: int

    def as_dict(self) -> dict[str, Any]:
        """Give the fields as plain data."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Neighbours that one kernel might replace, judged by shape and order.

    Attributes
    ----------
    indices
        Their places in `KernelTrace.kernels`.
    ops
        The operations, one for each call.
    elements
        How many elements each of them runs over.
    bytes_saved
        Bytes of intermediate results that would no longer be written and read again, and of a tensor that a
        reduction in front would no longer read apart; None where a dtype is unknown or the operations take lists.
    launches_saved
        Launches that would fall away.
    duration_us
        What the kernels take as they are, in µs: an upper limit on what can be gained on the device.
    """

    indices: tuple[int, ...]
    ops: tuple[str, ...]
    elements: int
    bytes_saved: int | None
    launches_saved: int
    duration_us: float

    def as_dict(self) -> dict[str, Any]:
        """Give the fields as plain data."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelTrace:
    """What the device ran for one call, in order of start.

    Attributes
    ----------
    kernels
        Kernels, copies and fills.
    launches
        How many launches the host made in the call; a CUDA graph is one.
    missing
        How many of those launches have no record on the device: above 0 the trace is incomplete.
    environment
        The machine.
    waits
        The calls in which the host waited, in order of start.
    graphs
        How many of the launches were CUDA graphs. How many kernels a graph holds is not in the record, so its launch
        counts as recorded when at least one kernel of it is.
    unrecorded
        The runtime's functions that made the launches without a record, in order; empty in data that did not keep it.
    """

    kernels: tuple[Kernel, ...]
    launches: int
    missing: int
    environment: Environment
    waits: tuple[Wait, ...] = ()
    graphs: int = 0
    unrecorded: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], environment: Environment | None = None) -> KernelTrace:
        """Take up a trace from the plain data that `as_dict` gave, such as a recording's.

        Parameters
        ----------
        data
            The plain data. What an older version did not keep (dtypes, calls, waits) is then empty; without waits
            no gap can be a synchronization's or a copy's.
        environment
            The machine, which stands in a recording's provenance and not in the data.

        Raises
        ------
        TypeError, ValueError
            The data is no trace, or a field of it is missing, unknown or no fit value.
        """
        if not isinstance(data, Mapping) or "kernels" not in data:
            found = f"keys {sorted(map(str, data))[:6]}" if isinstance(data, Mapping) else type(data).__name__
            raise TypeError(
                f"a trace as KernelTrace.as_dict gives it has 'kernels', found {found}: pass the trace itself, "
                "not the recording around it"
            )
        kernels = _each(Kernel, data["kernels"], "kernels")
        starts = [kernel.start_us for kernel in kernels]
        if starts != sorted(starts):
            raise ValueError(
                "kernels stand in order of start_us, found them unsorted: they were changed by hand"
            )
        launches, missing, graphs = (
            _whole(data.get(name, default), name)
            for name, default in (("launches", None), ("missing", None), ("graphs", 0))
        )
        if missing > launches or graphs > launches:
            raise ValueError(
                f"missing and graphs are at most the launches, found {missing} and {graphs} of {launches}"
            )
        return cls(
            kernels=kernels,
            launches=launches,
            missing=missing,
            environment=environment or Environment(),
            waits=_each(Wait, data.get("waits", ()), "waits"),
            graphs=graphs,
            unrecorded=_fit("dtypes", data.get("unrecorded", ()), "unrecorded"),
        )

    @property
    def complete(self) -> bool:
        """Whether every launch has its record on the device (a CUDA graph's: at least one)."""
        return self.missing == 0

    def _busy(self) -> list[tuple[float, float]]:
        return merge_intervals((kernel.start_us, kernel.end_us) for kernel in self.kernels)

    @property
    def span_us(self) -> float:
        """From the first start to the last end, in µs (0 where nothing ran)."""
        return max((kernel.end_us for kernel in self.kernels), default=0.0)

    @property
    def busy_us(self) -> float:
        """Time in which at least one kernel ran, in µs: a union over streams, never a sum."""
        return sum(end - start for start, end in self._busy())

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """The idle times between busy stretches, in order, each with its cause."""
        found: list[Gap] = []
        last: int | None = None  # the work with the furthest end so far
        for index, kernel in enumerate(self.kernels):
            if last is not None and kernel.start_us > self.kernels[last].end_us:
                begin = self.kernels[last].end_us
                found.append(
                    Gap(
                        start_us=begin,
                        duration_us=kernel.start_us - begin,
                        cause=self._cause(self.kernels[last], kernel),
                        before=last,
                        after=index,
                    )
                )
            if last is None or kernel.end_us > self.kernels[last].end_us:
                last = index
        return tuple(found)

    def _cause(self, before: Kernel, after: Kernel) -> str:
        dry, launch = before.end_us, after.launch_us
        if launch is None:
            return "unknown"
        for wait in self.waits:
            over = wait.end_us <= launch
            # Small copies end about when the wait for them begins, so a wait behind a copy need not span its end.
            copied = _TO_OR_FROM_HOST.search(before.name) and (before.launch_us or dry) <= wait.start_us
            if copied and over and dry <= wait.end_us + _SKEW_US:
                return "copy"
            if not wait.start_us - _SKEW_US <= dry <= wait.end_us + _SKEW_US:
                continue
            # A copy's own call launches it: what came next may be the copy that the host stood in.
            if wait.copies and wait.start_us <= launch:
                return "copy"
            if over:
                return "synchronization"
        return "host" if launch > dry else "queue"

    @property
    def gaps_us(self) -> list[float]:
        """The idle times between busy stretches, in µs, in order."""
        return [gap.duration_us for gap in self.gaps]

    def idle_us(self) -> dict[str, float]:
        """Sum the gaps by cause, in µs; every cause in `GAP_CAUSES` has its entry."""
        sums = dict.fromkeys(GAP_CAUSES, 0.0)
        for gap in self.gaps:
            sums[gap.cause] = sums.get(gap.cause, 0.0) + gap.duration_us
        return sums

    @property
    def launch_bound(self) -> bool:
        """Whether the device waits for a late host for more than half of the span.

        Waits for a synchronization or a copy do not count: fewer launches would not shorten them. The profiler slows
        every launch, so a call near the limit is better judged without it (`cuda_events.Timing.launch_bound`).
        """
        return self.idle_us()["host"] > 0.5 * self.span_us

    def fuse_candidates(self) -> tuple[Candidate, ...]:
        """Find runs of neighbours that one kernel could replace.

        A run is two calls or more that follow each other on one stream, element-wise operations over the same number
        of elements, perhaps with one reduction or norm over as many at its start or its end. It never reaches across a
        product, any other operation, a copy to or from the host, a wait, or a kernel that a compiler generated (the
        compiler saw the graph and chose where to stop).

        A candidate is judged by shape and order. Whether one operation really takes the other's result, and whether
        anything else needs that result, is not in a trace: read the code before you believe `bytes_saved`.
        """
        waited = {
            gap.after for gap in self.gaps if gap.cause in ("synchronization", "copy")
        }  # work that came after the host had waited
        found: list[Candidate] = []
        for stream in dict.fromkeys(kernel.stream for kernel in self.kernels):
            run: list[_Call] = []
            for call in _calls(self.kernels, stream):
                if run and not (_joins(run, call) and waited.isdisjoint(call.indices)):
                    found += _candidate(run, self.kernels)
                    run = []
                if call.kind != "other":
                    run.append(call)
            found += _candidate(run, self.kernels)
        return tuple(sorted(found, key=lambda candidate: candidate.indices))

    def perfetto(self) -> dict[str, Any]:
        """Give the trace in Chrome's trace format, which https://ui.perfetto.dev and ``chrome://tracing`` open.

        The host has a lane a thread with its launches and waits, the device a lane a stream with its work and one
        with the gaps by cause; an arrow leads from each launch to what it launched. Times are in µs, moved so that
        none is negative. A launch whose duration is unknown is drawn 1 µs long.
        """
        return _perfetto(self)

    def write_perfetto(self, path: str | Path) -> Path:
        """Write `perfetto` as JSON to a file and give its path; open it at https://ui.perfetto.dev.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        target = Path(path)
        target.write_text(json.dumps(self.perfetto()), encoding="utf-8")
        return target

    def as_dict(self) -> dict[str, Any]:
        """Give kernels, waits, gaps and sums as plain data; the machine stands in the provenance."""
        return {
            "span_us": self.span_us,
            "busy_us": self.busy_us,
            "launches": self.launches,
            "missing": self.missing,
            "complete": self.complete,
            "graphs": self.graphs,
            "unrecorded": list(self.unrecorded),
            "kernels": [dataclasses.asdict(kernel) for kernel in self.kernels],
            "waits": [dataclasses.asdict(wait) for wait in self.waits],
            "gaps": [gap.as_dict() for gap in self.gaps],
        }

    def __str__(self) -> str:
        lines = [
            f"{kernel.start_us:9.1f} µs {kernel.duration_us:8.1f} µs  {kernel.op:27} {short_name(kernel.name)}"
            for kernel in self.kernels
        ]
        return "\n".join([*lines, self._sums()])

    def _sums(self) -> str:
        share = f" ({self.busy_us / self.span_us:.0%})" if self.span_us else ""
        parts = [f"{len(self.kernels)} kernels, busy {self.busy_us:.1f} of {self.span_us:.1f} µs{share}"]
        idle = [f"{cause} {time:.1f} µs" for cause, time in self.idle_us().items() if time]
        if idle:
            parts.append(f"idle by cause: {', '.join(idle)}")
        if self.launches and self.missing == self.launches:
            parts.append(
                f"NOTHING RECORDED of {self.launches} launches: the profiler heard the host, not the device"
            )
        elif not self.complete:
            lost = Counter(self.unrecorded)
            names = f" ({', '.join(f'{name} × {times}' for name, times in lost.items())})" if lost else ""
            parts.append(
                f"INCOMPLETE: the profiler dropped {self.missing} of {self.launches} launches{names}"
            )
        if self.graphs:
            which = "is a CUDA graph" if self.graphs == 1 else "are CUDA graphs"
            parts.append(
                f"{self.graphs} of {self.launches} launches {which}, whose number of kernels cannot be checked"
            )
        parts.append(
            self.environment.line() if self.environment.gpu else "the data does not name its machine"
        )
        return "; ".join(parts)

    def _repr_html_(self) -> str:
        rows = [
            (
                index + 1,
                kernel.op,
                _shapes_text(kernel),
                short_name(kernel.name),
                f"{kernel.start_us:.1f}",
                f"{kernel.duration_us:.1f}",
            )
            for index, kernel in enumerate(self.kernels)
        ]
        header = ("#", "Operation", "Shapes", "Kernel", "Start, µs", "Duration, µs")
        return f"{html.table(header, rows)}<p class='provenance'>{html.escape(self._sums())}</p>"


def trace(fn: Callable[..., Any], *args: Any, warm_up: int = 3) -> KernelTrace:
    """Record the kernels that one call of ``fn(*args)`` launches.

    Parameters
    ----------
    fn, *args
        What to call; keyword arguments go in by `functools.partial`.
    warm_up
        Calls before the recorded one, at least 1: the first carries library set-up and kernel choice.

    Returns
    -------
    KernelTrace
        Times come from the profiler (CUPTI) on the device's clock. Profiling slows the host's side of each
        launch, so the gaps are wider than in an unprofiled run: judge durations by a trace, and the gaps'
        existence, not their width.

    Raises
    ------
    NoGPUError
        There is no CUDA device; `count_launches` needs none.
    ProfilerError
        The profiler recorded no call of CUDA at all, not even those that `trace` makes: it cannot use CUPTI here.
    TypeError, ValueError
        `fn` cannot be called; `warm_up` is no whole number or below 1.
    """
    _refuse_result(fn, "trace")
    if isinstance(warm_up, bool) or not isinstance(warm_up, Integral):
        raise TypeError(f"warm_up counts calls, found {warm_up!r} of type {type(warm_up).__name__}")
    if warm_up < 1:
        raise ValueError(f"warm_up is at least 1, found {warm_up!r}: a first call differs from later ones")
    require_cuda("trace (count_launches needs none)")
    import torch
    from torch.profiler import ProfilerActivity

    def begin() -> None:
        # A launch of our own: where the profiler does not hear even this one, it hears nothing.
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()

    for _ in range(warm_up):
        fn(*args)
    torch.cuda.synchronize()
    activities = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
    _profile(
        begin, activities=activities, begin=begin, end=torch.cuda.synchronize
    )  # the first can lose kernels
    events, lists = _profile(
        functools.partial(fn, *args), activities=activities, begin=begin, end=torch.cuda.synchronize
    )
    return parse_chrome_trace(events, Environment.capture(), lists)


def _profile(
    fn: Callable[[], Any],
    *,
    activities: Sequence[Any],
    begin: Callable[[], Any],
    end: Callable[[], Any],
) -> tuple[list[dict[str, Any]], dict[int, _Lists]]:
    """Run a call under the profiler, marked; give its events and the tensor lists of each operation."""
    from torch.profiler import profile, record_function

    with profile(activities=activities, record_shapes=True, acc_events=True) as profiled:
        begin()
        with record_function(_MARK):
            fn()
        end()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events, _tensor_lists(profiled)


# Shapes and dtypes of the tensors in each list that an operation was given.
_Lists = Sequence[Sequence[tuple[tuple[int, ...], str]]]


def _tensor_lists(profiled: Any) -> dict[int, _Lists]:
    """Read the tensors in lists from the profiler's event tree, by the operation's external id.

    The exported file leaves out their dtypes, and of lists of more than 30 tensors also their shapes. The tree is an
    experimental part of torch: where it is another or gone, what the file does not say stays unknown.
    """
    found: dict[int, _Lists] = {}
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


def _refuse_result(fn: object, who: str) -> None:
    if not callable(fn):
        raise TypeError(
            f"{who} calls a function itself, found {type(fn).__name__}: pass torch.matmul and its arguments, "
            "or lambda: x @ x, not the result"
        )


_MARK = "gpucourse.trace"


def parse_chrome_trace(
    events: list[dict[str, Any]],
    environment: Environment,
    lists: Mapping[int, _Lists] | None = None,
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
    """
    marks = [e for e in events if e.get("name") == _MARK and e.get("cat") == "user_annotation"]
    if not marks:
        raise ValueError(f"no event {_MARK!r} in the trace: it was not made by gpucourse.kernels.trace")
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


_TORCH_NAMES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "long int": "int64",
    "long": "int64",
    "long long": "int64",
    "int": "int32",
    "short int": "int16",
    "short": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "short unsigned int": "uint16",
    "unsigned short": "uint16",
    "unsigned int": "uint32",
    "long unsigned int": "uint64",
    "unsigned long": "uint64",
    "bool": "bool",
    "c10::complex<c10::Half>": "complex32",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}

_ITEM_BYTES = {
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}


def _torch_name(name: str) -> str:
    """Give torch's name of a dtype that the profiler names in C++; one that is not listed loses its namespace."""
    if name in ("", "Scalar", "TensorList", "GenericList"):
        return "unknown"
    return _TORCH_NAMES.get(name) or name.removeprefix("c10::").lower()


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(size, int) for size in value)


def _arguments(
    op: Mapping[str, Any] | None, lists: Mapping[int, _Lists]
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
            found.append((tuple(value), _torch_name(kind)))
    kept = [(shape, dtype) for shape, dtype in found if shape]
    return tuple(shape for shape, _ in kept), tuple(dtype for _, dtype in kept)


# --- plain data ------------------------------------------------------------------------------------------


def _each(kind: type[Any], rows: object, what: str) -> tuple[Any, ...]:
    """Make the facts of one kind from a list of dicts, and say which entry does not fit."""
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise TypeError(f"{what} are a list, found {type(rows).__name__}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    made = []
    for place, row in enumerate(rows):
        where = f"{what}[{place}]"
        if not isinstance(row, Mapping):
            raise TypeError(f"{where} is a dict of fields, found {type(row).__name__}")
        lacking = [n for n, f in fields.items() if n not in row and f.default is dataclasses.MISSING]
        unknown = sorted(set(map(str, row)) - fields.keys())
        if lacking or unknown:
            said = (
                f"lacks {', '.join(lacking)}" if lacking else f"has the unknown fields {', '.join(unknown)}"
            )
            raise ValueError(f"{where} {said}: it is no {kind.__name__} of this version of gpucourse")
        made.append(
            kind(**{name: _fit(name, row[name], f"{where}.{name}") for name in fields if name in row})
        )
        if kind is Kernel and made[-1].dtypes and len(made[-1].dtypes) != len(made[-1].shapes):
            raise ValueError(
                f"{where} has {len(made[-1].shapes)} shapes and {len(made[-1].dtypes)} dtypes: one for each is wanted"
            )
    return tuple(made)


def _fit(name: str, value: object, where: str) -> Any:
    """Check one field of plain data and give it the type that the facts have."""
    if name in ("name", "op"):
        if not isinstance(value, str):
            raise TypeError(f"{where} is text, found {value!r}")
        return value
    if name in ("shapes", "grid", "block", "dtypes"):
        if value is None and name in ("grid", "block"):
            return None
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise TypeError(f"{where} is a list, found {value!r}")
        if name == "shapes":
            return tuple(tuple(_whole(size, where) for size in shape) for shape in value)
        if name == "dtypes":
            return tuple(_fit("name", dtype, where) for dtype in value)
        return tuple(_whole(size, where) for size in value)
    if name in ("start_us", "duration_us"):
        return _time(value, where, least=0.0 if name == "duration_us" else -math.inf)
    if name in ("launch_us", "launch_duration_us"):
        return None if value is None else _time(value, where)
    return None if value is None and name != "stream" else _whole(value, where)


def _time(value: object, where: str, least: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value < least:
        wanted = "a finite number of µs" if least == -math.inf else f"a number of µs from {least:g}"
        raise ValueError(f"{where} is {wanted}, found {value!r}")
    return float(value)


def _whole(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise ValueError(f"{where} is a whole number from 0, found {value!r}")
    return int(value)


# --- fusion ----------------------------------------------------------------------------------------------

# Element-wise, for torch's tag is not at hand without torch, and some do not carry it (losses: the mean over their
# elements is an operation of its own).
_ELEMENT_WISE = frozenset(
    re.findall(
        r"\w+",
        "abs add addcdiv addcmul binary_cross_entropy binary_cross_entropy_backward bitwise_and bitwise_not "
        "bitwise_or ceil clamp clamp_max clamp_min clone copy cos div elu eq erf exp fill floor ge gelu "
        "gelu_backward gt hardtanh huber_loss huber_loss_backward isnan le leaky_relu lerp log logical_and "
        "logical_not logical_or lt masked_fill maximum minimum mse_loss mse_loss_backward mul native_dropout "
        "native_dropout_backward ne neg pow reciprocal relu remainder round rsqrt rsub sigmoid "
        "sigmoid_backward sign silu silu_backward sin smooth_l1_loss smooth_l1_loss_backward softplus sqrt "
        "square sub tanh tanh_backward threshold_backward to_copy where zero",
    )
)
_REDUCTIONS = frozenset(
    re.findall(
        r"\w+",
        "all amax amin any argmax argmin fused_rms_norm fused_rms_norm_backward linalg_vector_norm log_softmax "
        "log_softmax_backward_data logsumexp max mean min native_batch_norm native_group_norm "
        "native_group_norm_backward native_layer_norm native_layer_norm_backward norm prod softmax "
        "softmax_backward_data std std_mean sum var var_mean",
    )
)
# Those of them whose result is as large as what they read.
_KEEP_SIZE = re.compile(r"(native_\w+|fused_rms)_norm|softmax")


def _bare(op: str) -> str:
    """Give an operation's name without its namespace and outer underscores: ``aten::_softmax`` is ``softmax``."""
    return op.removeprefix("aten::").strip("_")


@functools.cache
def _pointwise(op: str) -> bool:
    """Whether each element of the operation's result needs only the elements at its own place."""
    name = op.removeprefix("aten::")
    if name.startswith("_foreach_"):
        return _bare(op) not in ("foreach_norm", "foreach_max")
    if not op.startswith("aten::"):
        return False
    if _bare(op) in _ELEMENT_WISE:
        return True
    try:
        import torch
    except (ImportError, OSError):
        return False
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The kernels of one call of an operation on one stream, and what kind of operation it is."""

    indices: tuple[int, ...]
    op: str
    kind: str  # "pointwise", "reduction" or "other"
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    elements: int

    @property
    def lists(self) -> bool:
        return "_foreach_" in self.op

    @property
    def keeps_size(self) -> bool:
        return self.kind == "pointwise" or _KEEP_SIZE.search(self.op) is not None

    @property
    def full_shapes(self) -> list[tuple[int, ...]]:
        return [shape for shape in self.shapes if math.prod(shape) == self.elements]


def _calls(kernels: Sequence[Kernel], stream: int) -> list[_Call]:
    mine = [(index, kernel) for index, kernel in enumerate(kernels) if kernel.stream == stream]
    found = []
    # Without a number (no operation, older data) each kernel stands for itself.
    for _, group in itertools.groupby(
        mine, key=lambda pair: (pair[1].call, pair[1].call is None and pair[0])
    ):
        indices, members = zip(*group, strict=True)
        first = members[0]
        elements = _elements(first)
        moves = any(re.search(r"HtoD|DtoH|PtoP|HtoH", kernel.name) for kernel in members)
        kind = "other"
        if elements and not moves:
            if _pointwise(first.op):
                kind = "pointwise"
            elif _bare(first.op) in _REDUCTIONS and first.op.startswith("aten::"):
                kind = "reduction"
        found.append(
            _Call(
                indices=indices,
                op=first.op,
                kind=kind,
                shapes=first.shapes,
                dtypes=first.dtypes or ("unknown",) * len(first.shapes),
                elements=elements,
            )
        )
    return found


def _elements(kernel: Kernel) -> int:
    """Count what an operation runs over: the broadcast of its shapes, or all tensors of a list; 0 where unknown."""
    if not kernel.shapes:
        return 0
    if "_foreach_" in kernel.op:
        return sum(math.prod(shape) for shape in kernel.shapes)
    if _bare(kernel.op) in _REDUCTIONS:
        return max(math.prod(shape) for shape in kernel.shapes)
    width = max(map(len, kernel.shapes))
    padded = [(1,) * (width - len(shape)) + shape for shape in kernel.shapes]
    return math.prod(max(sizes) if min(sizes) else 0 for sizes in zip(*padded, strict=True))


def _joins(run: Sequence[_Call], call: _Call) -> bool:
    """Whether a call can go on with a run: only at its two ends may a reduction stand."""
    last = run[-1]
    if call.kind == "other" or (last.kind == "reduction" and (len(run) > 1 or call.kind == "reduction")):
        return False
    if last.lists and call.lists:  # one takes p, another p and g: the longer is the shorter, repeated
        short, long_ = sorted((last.shapes, call.shapes), key=len)
        return short * (len(long_) // len(short)) == long_
    if last.lists != call.lists or last.elements != call.elements or not _full(call):
        return False
    # In front of a run, a reduction to less shares with it only what both read: a tensor of one shape.
    return last.keeps_size or not set(call.shapes).isdisjoint(last.full_shapes)


def _full(call: _Call) -> tuple[str, ...]:
    """Give the dtypes of those arguments that have all the elements which the call runs over."""
    return tuple(
        dtype
        for shape, dtype in zip(call.shapes, call.dtypes, strict=True)
        if math.prod(shape) == call.elements
    )


def _candidate(run: Sequence[_Call], kernels: Sequence[Kernel]) -> list[Candidate]:
    if len(run) < 2:
        return []
    indices = tuple(sorted(itertools.chain.from_iterable(call.indices for call in run)))
    saved: int | None = 0
    for before, after in itertools.pairwise(run):
        sizes = {_ITEM_BYTES.get(dtype) for dtype in _full(after)}
        size = sizes.pop() if len(sizes) == 1 else None
        if size is None or after.lists or saved is None:
            saved = None
            break
        # Written and read again; after a reduction to less, only its own reading of the tensor falls away.
        saved += after.elements * size * (2 if before.keeps_size else 1)
    return [
        Candidate(
            indices=indices,
            ops=tuple(call.op for call in run),
            elements=min(call.elements for call in run),
            bytes_saved=saved,
            # A call that needs several launches for itself (a long list, a fill before a sum) keeps needing them.
            launches_saved=len(indices) - max(len(call.indices) for call in run),
            duration_us=sum(kernels[index].duration_us for index in indices),
        )
    ]


# --- Perfetto --------------------------------------------------------------------------------------------

# Process and lane numbers in the file. Perfetto gives lane 0 of every process to one idle thread, so none is 0.
_HOST, _DEVICE = 1, 2
_THREADS, _IDLE, _STREAMS = 100, 999, 1000


def _shapes_text(kernel: Kernel) -> str:
    """Write the shapes with their dtypes; a long list is cut."""
    dtypes = kernel.dtypes or ("unknown",) * len(kernel.shapes)
    texts = [
        str(list(shape)) + (f" {dtype}" if dtype != "unknown" else "")
        for shape, dtype in zip(kernel.shapes, dtypes, strict=True)
    ]
    return ", ".join([*texts[:6], f"and {len(texts) - 6} more"] if len(texts) > 6 else texts)


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


def _perfetto(trace: KernelTrace) -> dict[str, Any]:
    starts = [k.launch_us for k in trace.kernels if k.launch_us is not None]
    shift = -min([0.0, *starts, *(wait.start_us for wait in trace.waits)])
    lanes = {stream: _STREAMS + stream for stream in sorted({kernel.stream for kernel in trace.kernels})}
    threads = sorted({k.thread or 0 for k in trace.kernels} | {w.thread or 0 for w in trace.waits})
    named = {(_HOST, _THREADS + thread): f"host thread {thread}" for thread in threads}
    named |= {(_DEVICE, lane): f"stream {stream}" for stream, lane in lanes.items()}
    named[_DEVICE, _IDLE] = "idle, by cause"
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
        for process, name in ((_HOST, "host"), (_DEVICE, trace.environment.gpu or "device"))
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": process, "tid": lane, "args": {"name": name}}
        for (process, lane), name in named.items()
    ]
    drawn: set[tuple[float, int]] = set()
    for index, kernel in enumerate(trace.kernels):
        begin, lane = kernel.start_us + shift, lanes[kernel.stream]
        events.append(
            _slice(
                short_name(kernel.name),
                _DEVICE,
                lane,
                begin,
                kernel.duration_us,
                op=kernel.op or None,
                shapes=_shapes_text(kernel) or None,
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
    for wait in trace.waits:
        begin, thread = wait.start_us + shift, _THREADS + (wait.thread or 0)
        if (begin, thread) not in drawn:  # a blocking copy is drawn as its launch
            events.append(_slice(wait.name, _HOST, thread, begin, wait.duration_us, waits=True))
    events += [_slice(gap.cause, _DEVICE, _IDLE, gap.start_us + shift, gap.duration_us) for gap in trace.gaps]
    return {"traceEvents": events, "displayTimeUnit": "ns"}


# --- counting without a device ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCount:
    """Operations that would launch work on a device, counted without one.

    Attributes
    ----------
    operations
        Names of the operations that compute or copy, in order.
    views
        Names of those that only look at memory differently, or only allocate, and launch nothing.
    host
        Names of those on host tensors alone, in a call that works on a device too: they launch nothing there.
    empty
        Names of those whose results have no element: PyTorch returns before it launches anything.
    """

    operations: tuple[str, ...]
    views: tuple[str, ...]
    host: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many operations would launch; each may launch one kernel or several."""
        return len(self.operations)

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} × {times}" for name, times in Counter(self.operations).items())
        counted = f"{self.count} operations would launch ({kinds or 'none'})"
        return f"{counted}; {len(self.views)} views launch nothing"


_ALIASES = {"_unsafe_view", "lift_fresh"}  # views that their schema does not call so
_ALLOCATE_ONLY = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}


def count_launches(fn: Callable[..., Any], *args: Any) -> LaunchCount:
    """Count the operations of ``fn(*args)`` that would launch work, on any device, a CPU or "meta" included.

    Parameters
    ----------
    fn, *args
        What to call, once.

    Returns
    -------
    LaunchCount
        Counted below autograd, so a backward pass inside `fn` is included. An operation may launch several
        kernels, or a fused one may stand for several: on a GPU, `trace` shows which.

    Raises
    ------
    TypeError
        `fn` cannot be called.
    ModuleNotFoundError
        torch is not installed.
    """
    _refuse_result(fn, "count_launches")
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"count_launches counts torch's operations: {error}. Install torch (a CPU build is enough).",
            name=error.name,
        ) from error
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    seen: list[tuple[str, str, set[str]]] = []  # name, "view", "empty" or "launch", devices of its tensors

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.namespace != "profiler":  # the marks that optimizers put around their steps
                name = func.overloadpacket.__name__
                view = func.is_view or torch.Tag.inplace_view in func.tags or name in _ALIASES
                leaves = tree_leaves((args, kwargs, result))
                devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
                results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
                # Where the size of the result is found by the work itself (nonzero), the work was launched.
                found = torch.Tag.dynamic_output_shape in func.tags
                empty = bool(results) and not found and all(leaf.numel() == 0 for leaf in results)
                kind = "view" if view or name in _ALLOCATE_ONLY else "empty" if empty else "launch"
                seen.append((name, kind, devices))
            return result

    with Counting():  # type: ignore[no-untyped-call]
        fn(*args)
    # Beside work on a device, an operation on host tensors alone (an optimizer's step counter) launches nothing.
    beside = any(devices - {"cpu"} for _, _, devices in seen)
    host = {"cpu"} if beside else None
    return LaunchCount(
        operations=tuple(name for name, kind, on in seen if kind == "launch" and on != host),
        views=tuple(name for name, kind, _ in seen if kind == "view"),
        host=tuple(name for name, kind, on in seen if kind == "launch" and on == host),
        empty=tuple(name for name, kind, _ in seen if kind == "empty"),
    )
