"""Tests of gpucourse.kernels that need no GPU: the profiler's file is read, operations are counted."""

from __future__ import annotations

import sys

import pytest
import torch

from gpucourse.environment import Environment, NoGPUError, cuda_available
from gpucourse.kernels import count_launches, merge_intervals, parse_chrome_trace, short_name, trace

MACHINE = Environment(gpu="NVIDIA H200")


def op(name, ts, dur, dims, tid=1):
    return {"cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "tid": tid, "args": {"Input Dims": dims}}


def launch(ts, correlation, name="cudaLaunchKernel", tid=1):
    return {
        "cat": "cuda_runtime",
        "name": name,
        "ts": ts,
        "dur": 3,
        "tid": tid,
        "args": {"correlation": correlation},
    }


def kernel(ts, dur, correlation, stream=7, name="k", **facts):
    facts = {"grid": [8, 1, 1], "block": [128, 1, 1], "registers per thread": 32, "shared memory": 0} | facts
    return {
        "cat": "kernel",
        "name": name,
        "ts": ts,
        "dur": dur,
        "args": {"correlation": correlation, "stream": stream, **facts},
    }


MARK = {"cat": "user_annotation", "name": "gpucourse.trace", "ts": 100, "dur": 100, "args": {}}


def test_a_kernel_is_given_its_innermost_operation_shapes_and_times():
    events = [
        MARK,
        op("aten::linear", 110, 40, [[4, 8], [3, 8], []]),
        op("aten::addmm", 115, 30, [[3], [4, 8], [8, 3], [], []]),
        launch(120, 1),
        kernel(130.5, 2.25, 1, name="gemm"),
    ]
    (found,) = parse_chrome_trace(events, MACHINE).kernels
    assert (found.op, found.shapes) == ("aten::addmm", ((3,), (4, 8), (8, 3)))
    assert (found.start_us, found.duration_us, found.launch_us) == (0.0, 2.25, -10.5)
    assert (found.grid, found.block, found.registers) == ((8, 1, 1), (128, 1, 1), 32)


def test_busy_is_a_union_over_streams_and_not_a_sum():
    events = [MARK, launch(110, 1), launch(111, 2), launch(112, 3)]
    events += [kernel(200, 10, 1, stream=7), kernel(205, 10, 2, stream=8), kernel(220, 5, 3, stream=7)]
    found = parse_chrome_trace(events, MACHINE)
    assert found.span_us == 25
    assert found.busy_us == 20
    assert found.gaps_us == [5]
    assert not found.launch_bound


def test_a_dropped_kernel_makes_the_trace_incomplete_and_it_says_so():
    found = parse_chrome_trace([MARK, launch(110, 1), launch(111, 2), kernel(200, 10, 2)], MACHINE)
    assert (found.complete, found.launches, found.missing) == (False, 2, 1)
    assert "INCOMPLETE: the profiler dropped 1 of 2 launches" in str(found)
    assert "INCOMPLETE" in found._repr_html_()


def test_launches_outside_the_marked_call_do_not_count():
    found = parse_chrome_trace(
        [MARK, launch(50, 1), launch(250, 2), kernel(60, 1, 1), kernel(260, 1, 2)], MACHINE
    )
    assert (found.kernels, found.launches) == ((), 0)


def test_an_operation_of_another_thread_is_not_taken_for_the_launcher():
    events = [MARK, op("aten::add", 105, 50, [[2]], tid=1), launch(120, 1, tid=2), kernel(130, 1, 1)]
    assert parse_chrome_trace(events, MACHINE).kernels[0].op == ""


def test_a_copy_has_no_grid():
    copy = {
        "cat": "gpu_memcpy",
        "name": "Memcpy",
        "ts": 130,
        "dur": 4,
        "args": {"correlation": 1, "stream": 7},
    }
    found = parse_chrome_trace([MARK, launch(120, 1, "cudaMemcpyAsync"), copy], MACHINE)
    assert found.kernels[0].grid is None
    assert found.complete


def test_a_file_that_trace_did_not_make_is_refused():
    with pytest.raises(ValueError, match=r"no event 'gpucourse\.trace'"):
        parse_chrome_trace([launch(120, 1)], MACHINE)


@pytest.mark.parametrize(
    ("intervals", "merged"),
    [
        ([], []),
        ([(0, 1), (1, 2)], [(0, 2)]),
        ([(3, 4), (0, 9)], [(0, 9)]),
        ([(0, 1), (2, 3)], [(0, 1), (2, 3)]),
    ],
)
def test_intervals_merge_where_they_touch(intervals, merged):
    assert merge_intervals(intervals) == merged


@pytest.mark.parametrize(
    ("long", "short"),
    [
        ("ampere_sgemm_128x64_nn", "ampere_sgemm_128x64_nn"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128>(Params)", "cutlass_80_simt_sgemm_256x128"),
        (
            "sm80_xmma_gemm_f32f32_f32_nn_n_tilesize64x128x8_stage3_split_k_kernel",
            "sm80_xmma_gemm_64x128_split_k",
        ),
        (
            "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<direct_copy_kernel_cuda>>(int)",
            "elementwise_kernel (direct_copy_kernel_cuda)",
        ),
    ],
)
def test_short_names_keep_what_tells_kernels_apart(long, short):
    assert short_name(long) == short


X = torch.randn(6, 8)


@pytest.mark.parametrize(
    ("expression", "operations", "views"),
    [
        (lambda: X.t(), (), 1),
        (lambda: X.view(-1)[2:].unsqueeze(0), (), 3),
        (lambda: X.t().reshape(-1), ("clone",), None),
        (lambda: X.reshape(-1), (), 1),
        (lambda: X * 2 + 1, ("mul", "add"), 0),
        (lambda: X.clone().add_(1), ("clone", "add_"), 0),
        (lambda: X.contiguous(), (), 0),
        (lambda: torch.empty_like(X), (), 1),
        (lambda: torch.zeros_like(X), ("zeros_like",), 0),
    ],
)
def test_views_and_allocations_are_not_launches(expression, operations, views):
    found = count_launches(expression)
    assert found.operations == operations
    assert found.count == len(operations)
    assert views is None or len(found.views) == views


def test_a_backward_pass_inside_is_counted():
    weight = torch.randn(8, 3, requires_grad=True)
    found = count_launches(lambda: (X @ weight).sum().backward())
    assert found.operations.count("mm") == 2


def test_counting_works_on_meta_tensors_which_hold_no_memory():
    found = count_launches(torch.mm, torch.empty(4, 5, device="meta"), torch.empty(5, 6, device="meta"))
    assert found.operations == ("mm",)


def test_in_place_views_and_profiler_marks_are_not_launches():
    def marked():
        with torch.profiler.record_function("step"):
            return X.clone().t_().unsqueeze_(0)

    assert count_launches(marked).operations == ("clone",)


def test_host_tensors_beside_a_device_launch_nothing_on_it():
    step, weight = torch.tensor(1.0), torch.empty(4, device="meta")
    found = count_launches(lambda: (step.add_(1), weight.mul(2)))
    assert (found.operations, found.host) == (("mul",), ("add_",))
    assert count_launches(lambda: step.add_(1)).operations == ("add_",), (
        "alone, the host stands for the device"
    )


def test_a_trace_without_warm_up_is_refused():
    with pytest.raises(ValueError, match="warm_up is at least 1, found 0"):
        trace(lambda: None, warm_up=0)


@pytest.mark.skipif(cuda_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_names_what_needs_none():
    with pytest.raises(NoGPUError, match="count_launches needs none"):
        trace(lambda: None)


def test_a_result_in_place_of_a_function_is_named():
    x = torch.ones(2, 2)
    for count in (trace, count_launches):
        with pytest.raises(
            TypeError, match=r"calls a function itself, found Tensor: pass torch\.matmul and its"
        ):
            count(x @ x)


@pytest.mark.parametrize("warm_up", [1.5, True, "3", None, float("nan")])
def test_a_warm_up_that_counts_no_calls_is_refused(warm_up):
    with pytest.raises(TypeError, match="warm_up counts calls, found"):
        trace(print, warm_up=warm_up)


def test_counting_without_torch_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match=r"count_launches counts torch's operations.*Install torch"):
        count_launches(print)
