"""The profiler's file where it is damaged: what says no time is left out, and counted as missing."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gpucourse.chrome_trace import parse_chrome_trace
from gpucourse.environment import Environment
from gpucourse.fusion import fuse_candidates
from gpucourse.kernel_trace import KernelTrace
from gpucourse.trace_facts import Kernel

MARK = {"cat": "user_annotation", "name": "gpucourse.trace", "ts": 100, "dur": 100, "args": {}}


def launch(at: object, correlation: int) -> dict[str, Any]:
    facts = {"correlation": correlation}
    return {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 1, "tid": 1, "args": facts}


def kernel(at: object, duration: object, correlation: int) -> dict[str, Any]:
    facts = {"correlation": correlation, "stream": 7}
    return {"cat": "kernel", "name": "add", "ts": at, "dur": duration, "args": facts}


@pytest.mark.parametrize("duration", [math.nan, math.inf, -1, None, "soon", 10**400])
def test_a_kernel_without_a_fit_duration_counts_as_not_recorded(duration: object) -> None:
    events = [MARK, launch(110, 1), kernel(111, 2, 1), launch(120, 2), kernel(121, duration, 2)]
    found = parse_chrome_trace(events, Environment())
    assert [kernel.duration_us for kernel in found.kernels] == [2.0]
    assert (found.launches, found.missing) == (2, 1)
    assert not found.complete
    assert KernelTrace.from_dict(found.as_dict()).kernels == found.kernels


def test_records_without_a_begin_are_left_out() -> None:
    broken = kernel(0, 1, 1)
    del broken["ts"], broken["dur"]
    events = [MARK, launch(110, 1), broken, launch(math.nan, 3), kernel(111, 2, 1)]
    found = parse_chrome_trace(events, Environment())
    assert (len(found.kernels), found.launches, found.missing) == (1, 1, 0)


def test_a_mark_without_a_length_is_no_mark() -> None:
    with pytest.raises(ValueError, match=r"no event .* in the trace"):
        parse_chrome_trace([{**MARK, "dur": None}, launch(110, 1)], Environment())


@pytest.mark.parametrize(
    "op", ["aten::name", "aten::_dir", "aten::__class__", "aten::__getattr__", "aten::", "aten::a.b"]
)
def test_an_operation_that_torch_does_not_have_is_no_element_wise_one(op: str) -> None:
    facts: dict[str, Any] = dict.fromkeys(("launch_us", "grid", "block", "registers", "shared_bytes"))
    twice = [
        Kernel(
            name="k",
            op=op,
            shapes=((2, 2),),
            dtypes=("float32",),
            start_us=at,
            duration_us=1.0,
            stream=7,
            **facts,
        )
        for at in (0.0, 2.0)
    ]
    assert fuse_candidates(twice, frozenset()) == ()
