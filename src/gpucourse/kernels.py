"""The kernels that an expression really launches, as the profiler recorded them on the device.

>>> short_name("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)")
'vectorized_elementwise_kernel (CUDAFunctor_add)'
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from numbers import Integral
from pathlib import Path
from typing import Any

from gpucourse import html
from gpucourse.environment import Environment, require_cuda

__all__ = [
    "METHOD_VERSION",
    "Kernel",
    "KernelTrace",
    "LaunchCount",
    "count_launches",
    "merge_intervals",
    "short_name",
    "trace",
]

METHOD_VERSION = 1

_DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST_KINDS = ("cuda_runtime", "cuda_driver")
_LAUNCH = re.compile(r"Launch(Cooperative)?Kernel|GraphLaunch|Memcpy|Memset")


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
        Shapes of that operation's tensor arguments.
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

    @property
    def end_us(self) -> float:
        """End after the first kernel's start, in µs."""
        return self.start_us + self.duration_us


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelTrace:
    """What the device ran for one call, in order of start.

    Attributes
    ----------
    kernels
        Kernels, copies and fills.
    launches
        How many launches the host made in the call.
    missing
        How many of those launches have no record on the device: above 0 the trace is incomplete.
    environment
        The machine.
    """

    kernels: tuple[Kernel, ...]
    launches: int
    missing: int
    environment: Environment

    @property
    def complete(self) -> bool:
        """Whether every launch has its record on the device."""
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
    def gaps_us(self) -> list[float]:
        """The idle times between busy stretches, in µs, in order."""
        busy = self._busy()
        return [after[0] - before[1] for before, after in itertools.pairwise(busy)]

    @property
    def launch_bound(self) -> bool:
        """Whether the device is idle for more than half of the span."""
        return self.busy_us < 0.5 * self.span_us

    def as_dict(self) -> dict[str, Any]:
        """Give kernels and sums as plain data; the machine stands in the provenance."""
        return {
            "span_us": self.span_us,
            "busy_us": self.busy_us,
            "launches": self.launches,
            "missing": self.missing,
            "complete": self.complete,
            "kernels": [dataclasses.asdict(kernel) for kernel in self.kernels],
        }

    def __str__(self) -> str:
        lines = [
            f"{kernel.start_us:9.1f} µs {kernel.duration_us:8.1f} µs  {kernel.op:27} {short_name(kernel.name)}"
            for kernel in self.kernels
        ]
        return "\n".join([*lines, self._sums()])

    def _sums(self) -> str:
        share = f" ({self.busy_us / self.span_us:.0%})" if self.span_us else ""
        parts = [
            f"{len(self.kernels)} kernels, busy {self.busy_us:.1f} of {self.span_us:.1f} µs{share}",
            self.environment.line(),
        ]
        if not self.complete:
            parts.insert(1, f"INCOMPLETE: the profiler dropped {self.missing} of {self.launches} launches")
        return "; ".join(parts)

    def _repr_html_(self) -> str:
        rows = [
            (
                index + 1,
                kernel.op,
                " ".join(str(list(shape)) for shape in kernel.shapes),
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
    from torch.profiler import ProfilerActivity, profile, record_function

    for _ in range(warm_up):
        fn(*args)
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(
        activities=activities, acc_events=True
    ):  # the first profile of a process can lose its first kernels
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    with profile(activities=activities, record_shapes=True, acc_events=True) as profiled:
        torch.cuda.synchronize()
        with record_function(_MARK):
            fn(*args)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return parse_chrome_trace(events, Environment.capture())


def _refuse_result(fn: object, who: str) -> None:
    if not callable(fn):
        raise TypeError(
            f"{who} calls a function itself, found {type(fn).__name__}: pass torch.matmul and its arguments, "
            "or lambda: x @ x, not the result"
        )


_MARK = "gpucourse.trace"


def parse_chrome_trace(events: list[dict[str, Any]], environment: Environment) -> KernelTrace:
    """Read the kernels of the marked call out of a Chrome trace of torch.profiler.

    Parameters
    ----------
    events
        ``traceEvents`` of the exported file; times in µs.
    environment
        The machine that it was recorded on.

    Raises
    ------
    ValueError
        The mark that `trace` puts around the call is missing.
    """
    marks = [e for e in events if e.get("name") == _MARK and e.get("cat") == "user_annotation"]
    if not marks:
        raise ValueError(f"no event {_MARK!r} in the trace: it was not made by gpucourse.kernels.trace")
    begin = float(marks[0]["ts"])
    end = begin + float(marks[0]["dur"])
    launches = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in _HOST_KINDS
        and "correlation" in e.get("args", {})
        and _LAUNCH.search(e["name"])
        and begin <= float(e["ts"]) <= end
    }
    ran = [
        e
        for e in events
        if e.get("cat") in _DEVICE_KINDS and e.get("args", {}).get("correlation") in launches
    ]
    ran.sort(key=lambda e: float(e["ts"]))
    ops: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            ops.setdefault(event.get("tid"), []).append(event)
    origin = float(ran[0]["ts"]) if ran else begin
    kernels = []
    for event in ran:
        launch = launches[event["args"]["correlation"]]
        op = _innermost(ops.get(launch.get("tid"), []), float(launch["ts"]))
        facts = event["args"]
        kernels.append(
            Kernel(
                name=event["name"],
                op=op["name"] if op else "",
                shapes=_shapes(op),
                start_us=float(event["ts"]) - origin,
                duration_us=float(event["dur"]),
                launch_us=float(launch["ts"]) - origin,
                stream=int(facts.get("stream", 0)),
                grid=tuple(facts["grid"]) if "grid" in facts else None,
                block=tuple(facts["block"]) if "block" in facts else None,
                registers=facts.get("registers per thread"),
                shared_bytes=facts.get("shared memory"),
            )
        )
    recorded = {e["args"]["correlation"] for e in ran}
    return KernelTrace(
        kernels=tuple(kernels),
        launches=len(launches),
        missing=len(launches.keys() - recorded),
        environment=environment,
    )


def _innermost(ops: list[dict[str, Any]], at: float) -> dict[str, Any] | None:
    around = [op for op in ops if float(op["ts"]) <= at <= float(op["ts"]) + float(op["dur"])]
    return max(around, key=lambda op: float(op["ts"]), default=None)


def _shapes(op: dict[str, Any] | None) -> tuple[tuple[int, ...], ...]:
    dims = (op or {}).get("args", {}).get("Input Dims", [])
    return tuple(
        tuple(int(size) for size in shape)
        for shape in dims
        if isinstance(shape, list) and shape and all(isinstance(size, int) for size in shape)
    )


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
    """

    operations: tuple[str, ...]
    views: tuple[str, ...]
    host: tuple[str, ...] = ()

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

    seen: list[tuple[str, bool, set[str]]] = []  # name, launches nothing, devices of its tensors

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.namespace != "profiler":  # the marks that optimizers put around their steps
                name = func.overloadpacket.__name__
                view = func.is_view or torch.Tag.inplace_view in func.tags or name in _ALIASES
                leaves = tree_leaves((args, kwargs, result))
                devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
                seen.append((name, view or name in _ALLOCATE_ONLY, devices))
            return result

    with Counting():  # type: ignore[no-untyped-call]
        fn(*args)
    # Beside work on a device, an operation on host tensors alone (an optimizer's step counter) launches nothing.
    on_host = {"cpu"} if any(devices - {"cpu"} for _, _, devices in seen) else set()
    return LaunchCount(
        operations=tuple(n for n, nothing, on in seen if not nothing and (not on_host or on != on_host)),
        views=tuple(n for n, nothing, _ in seen if nothing),
        host=tuple(n for n, nothing, on in seen if not nothing and on_host and on == on_host),
    )
