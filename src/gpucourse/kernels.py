"""The kernels that an expression really launches, as the profiler recorded them on the device.

Its parts are modules of their own: `trace_facts` and `kernel_trace` hold what a trace is, `chrome_trace` reads the
profiler's file, `fusion` finds neighbours to fuse, `perfetto` writes a file to look at, and `launch_count` counts
without a device. Import from here.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from gpucourse.chrome_trace import MARK, ProfilerError, TensorLists, parse_chrome_trace, tensor_lists
from gpucourse.environment import Environment, require_cuda
from gpucourse.fusion import Candidate
from gpucourse.kernel_trace import GAP_CAUSES, KernelTrace
from gpucourse.launch_count import LaunchCount, count_launches, refuse_result
from gpucourse.trace_facts import Gap, Kernel, Wait, merge_intervals, short_name

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
    refuse_result(fn, "trace")
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
) -> tuple[list[dict[str, Any]], dict[int, TensorLists]]:
    """Run a call under the profiler, marked; give its events and the tensor lists of each operation."""
    from torch.profiler import profile, record_function

    with profile(activities=activities, record_shapes=True, acc_events=True) as profiled:
        begin()
        with record_function(MARK):
            fn()
        end()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events, tensor_lists(profiled)
