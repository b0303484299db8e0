"""Tests of gpucourse.kernels that need no GPU: the profiler's file is read, operations are counted."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity

from gpucourse import chrome_trace, fusion, kernels
from gpucourse.chrome_trace import parse_chrome_trace
from gpucourse.environment import Environment, NoGPUError, cuda_available
from gpucourse.kernels import (
    GAP_CAUSES,
    Kernel,
    KernelTrace,
    ProfilerError,
    Wait,
    count_launches,
    merge_intervals,
    short_name,
    trace,
)
from gpucourse.recording import load

MACHINE = Environment(gpu="NVIDIA H200")


def op(name, ts, dur, dims, types=None, tid=1, cat="cpu_op", **facts):
    facts = {"Input Dims": dims} | ({"Input type": types} if types else {}) | facts
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": facts}


def launch(ts, correlation, name="cudaLaunchKernel", tid=1, dur=3, cat="cuda_runtime"):
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": {"correlation": correlation}}


def kernel(ts, dur, correlation, stream=7, name="k", **facts):
    facts = {"grid": [8, 1, 1], "block": [128, 1, 1], "registers per thread": 32, "shared memory": 0} | facts
    return {
        "cat": "kernel",
        "name": name,
        "ts": ts,
        "dur": dur,
        "args": {"correlation": correlation, "stream": stream, **facts},
    }


def moved(ts, dur, correlation, name="Memcpy DtoH (Device -> Pinned)", stream=7):
    facts = {"correlation": correlation, "stream": stream, "bytes": 4}
    return {"cat": "gpu_memcpy", "name": name, "ts": ts, "dur": dur, "args": facts}


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
    assert found.unrecorded == ("cudaLaunchKernel",)
    assert "INCOMPLETE: the profiler dropped 1 of 2 launches (cudaLaunchKernel × 1)" in str(found)
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
    found = parse_chrome_trace([MARK, launch(120, 1, "cudaMemcpyAsync"), moved(130, 4, 1)], MACHINE)
    assert found.kernels[0].grid is None
    assert found.complete


def test_a_file_that_trace_did_not_make_is_refused():
    with pytest.raises(ValueError, match=r"no event 'gpucourse\.trace'"):
        parse_chrome_trace([launch(120, 1)], MACHINE)


# --- what an operation was given -------------------------------------------------------------------------


def only(*events, lists=None):
    (found,) = parse_chrome_trace([MARK, *events, launch(120, 1), kernel(130, 2, 1)], MACHINE, lists).kernels
    return found


def test_dtypes_are_torch_names_one_for_each_kept_shape():
    dims = [[4, 8], [], [8, 3], [3]]
    found = only(op("aten::addmm", 110, 40, dims, ["c10::BFloat16", "Scalar", "float", "long int"]))
    assert found.shapes == ((4, 8), (8, 3), (3,))
    assert found.dtypes == ("bfloat16", "float32", "int64")


DTYPES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128"


@pytest.mark.parametrize("dtype", DTYPES.split())
def test_every_dtype_that_this_profiler_names_is_given_by_torchs_name(dtype):
    x = torch.zeros(2, 3, dtype=getattr(torch, dtype))
    events, _ = on_cpu(x.clone)
    (call,) = [event for event in events if event["name"] == "aten::clone"]
    assert chrome_trace._arguments(call, {}) == (((2, 3),), (dtype,))


def test_numbers_and_tensors_without_a_dimension_are_left_out_for_they_look_alike():
    wrapped = op("aten::mul", 110, 40, [[512, 768], []], ["float", "long int"])
    assert (only(wrapped).shapes, only(wrapped).dtypes) == (((512, 768),), ("float32",))


def test_lists_of_tensors_are_laid_out_flat_with_their_dtypes():
    dims = [[[4, 8], [4]], [[4, 8], [4]], [], [[], []]]
    types = ["TensorList", "TensorList", "Scalar", "TensorList"]
    step = op("aten::_fused_adamw_", 110, 40, dims, types, **{"External id": 9})
    weights, gradients = ([((4, 8), dtype), ((4,), dtype)] for dtype in ("float32", "bfloat16"))
    counters = [((), "float32")] * 2
    found = only(step, lists={9: [weights, gradients, counters]})
    assert found.shapes == ((4, 8), (4,), (4, 8), (4,))
    assert found.dtypes == ("float32", "float32", "bfloat16", "bfloat16")
    assert only(step).dtypes == ("unknown",) * 4, "the exported file alone does not say"


def test_a_list_that_does_not_match_the_events_own_keeps_its_shapes_and_no_dtypes():
    step = op("aten::cat", 110, 40, [[[2], [3]], []], ["TensorList", "Scalar"], **{"External id": 9})
    found = only(step, lists={9: [[((2,), "float32")]]})
    assert (found.shapes, found.dtypes) == (((2,), (3,)), ("unknown", "unknown"))


def test_a_list_too_long_for_the_exported_file_is_read_whole():
    weights = [torch.zeros(3, 4) for _ in range(40)]
    events, lists = on_cpu(lambda: torch._foreach_add_(weights, 1.0))
    (step,) = [event for event in events if event["name"] == "aten::_foreach_add_"]
    assert step["args"]["Input Dims"][0] == [], "else this test is of no use any more"
    assert chrome_trace._arguments(step, lists) == (((3, 4),) * 40, ("float32",) * 40)


def test_kernels_of_one_call_share_its_number_and_none_is_given_outside_an_operation():
    events = [
        MARK,
        op("aten::sum", 110, 15, [[8]]),
        op("aten::sum", 130, 15, [[8]]),
        launch(112, 1, "cudaMemsetAsync"),
        launch(114, 2),
        launch(132, 3),
        launch(160, 4),
        *(kernel(200 + 5 * place, 2, place) for place in (1, 2, 3, 4)),
    ]
    found = parse_chrome_trace(events, MACHINE).kernels
    assert [k.call for k in found] == [0, 0, 1, None]


def test_a_backward_operation_launches_from_its_own_thread():
    events = [
        MARK,
        op("aten::mm", 110, 80, [[2, 2]], tid=1),
        op("autograd::engine::evaluate_function: MmBackward0", 112, 30, [], tid=2),
        op("aten::mul", 115, 10, [[5, 5]], ["float"], tid=2),
        launch(120, 1, tid=2),
        launch(121, 2, tid=1),
        kernel(130, 2, 1),
        kernel(140, 2, 2),
    ]
    backward, forward = parse_chrome_trace(events, MACHINE).kernels
    assert (backward.op, backward.shapes, backward.thread) == ("aten::mul", ((5, 5),), 0)
    assert (forward.op, forward.thread) == ("aten::mm", 1)


@pytest.mark.parametrize("category", ["cpu_op", "user_annotation"])
@pytest.mark.parametrize("name", ["cuLaunchKernel", "cuLaunchKernelEx"])
def test_a_generated_kernel_launched_through_the_driver_has_its_name_and_shapes(category, name):
    fused = "triton_poi_fused_add_mul_0"
    events = [
        MARK,
        op("Torch-Compiled Region: 0/0", 102, 90, []),
        op("## Call CompiledFxGraph f3x ##", 104, 80, [], cat="user_annotation"),
        op(fused, 110, 20, [[512], [512], []], ["float", "float", "Scalar"], cat=category),
        launch(115, 1, name, cat="cuda_driver"),
        kernel(130, 2, 1, name=fused),
    ]
    found = parse_chrome_trace(events, MACHINE)
    assert (found.launches, found.missing) == (1, 0)
    (generated,) = found.kernels
    assert (generated.op, generated.shapes) == (fused, ((512,), (512,)))
    assert generated.dtypes == ("float32", "float32")


def test_an_operation_that_ended_before_the_launch_is_not_its_launcher():
    events = [op("aten::linear", 105, 60, [[7, 7]]), op("aten::t", 108, 4, [[3, 3]])]
    assert only(*events).shapes == ((7, 7),)


# --- gaps ------------------------------------------------------------------------------------------------


def caused(*events):
    found = parse_chrome_trace([MARK, *events], MACHINE)
    return [(gap.cause, gap.duration_us, gap.before, gap.after) for gap in found.gaps]


def wait_call(ts, dur, name="cudaStreamSynchronize", tid=1):
    return launch(ts, 900 + ts, name, tid=tid, dur=dur)


def test_a_launch_after_the_device_ran_dry_is_the_hosts_gap():
    assert caused(launch(105, 1), launch(140, 2), kernel(110, 20, 1), kernel(145, 5, 2)) == [
        ("host", 15, 0, 1)
    ]


def test_work_that_was_in_the_queue_already_leaves_the_devices_own_gap():
    assert caused(launch(105, 1), launch(108, 2), kernel(110, 20, 1), kernel(132, 5, 2)) == [
        ("queue", 2, 0, 1)
    ]


@pytest.mark.parametrize(
    "name", ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize"]
)
def test_a_wait_when_the_device_ran_dry_is_a_synchronizations_gap(name):
    events = [launch(105, 1), wait_call(110, 22, name), launch(140, 2), kernel(110, 20, 1), kernel(145, 5, 2)]
    assert caused(*events) == [("synchronization", 15, 0, 1)]


def test_a_wait_that_began_after_the_device_ran_dry_is_not_its_reason():
    events = [launch(105, 1), wait_call(134, 3), launch(140, 2), kernel(110, 20, 1), kernel(145, 5, 2)]
    assert caused(*events) == [("host", 15, 0, 1)]


def test_a_wait_on_one_thread_does_not_explain_work_that_another_had_queued():
    events = [
        launch(105, 1),
        launch(107, 2),
        wait_call(108, 60, tid=2),
        kernel(110, 20, 1),
        kernel(133, 5, 2),
    ]
    assert caused(*events) == [("queue", 3, 0, 1)]


def test_a_wait_for_a_copy_to_the_host_is_a_copys_gap():
    events = [
        launch(105, 1),
        launch(112, 2, "cudaMemcpyAsync"),
        wait_call(116, 20),
        launch(150, 3),
        kernel(110, 20, 1),
        moved(130, 2, 2),
        kernel(155, 5, 3),
    ]
    assert caused(*events) == [("copy", 23, 1, 2)]


@pytest.mark.parametrize(
    ("name", "direction"),
    [("cudaMemcpyAsync", "Device -> Pageable"), ("cudaMemcpy", "Device -> Pinned")],
)
def test_a_copy_that_blocks_by_itself_is_a_copys_gap(name, direction):
    events = [launch(105, 1, name, dur=30), launch(150, 2)]
    events += [moved(110, 20, 1, f"Memcpy DtoH ({direction})"), kernel(155, 5, 2)]
    assert caused(*events) == [("copy", 25, 0, 1)]


def test_a_small_copy_that_is_over_before_its_wait_begins_is_waited_for_all_the_same():
    events = [launch(105, 1), launch(112, 2, "cudaMemcpyAsync"), wait_call(134, 3), launch(150, 3)]
    events += [kernel(110, 20, 1), moved(130, 1, 2), kernel(155, 5, 3)]
    assert caused(*events) == [("copy", 24, 1, 2)]


def test_a_synchronous_copy_to_the_device_is_a_copys_gap_too():
    events = [launch(105, 1, "cudaMemcpyAsync"), wait_call(109, 25), launch(150, 2)]
    events += [moved(110, 20, 1, "Memcpy HtoD (Pinned -> Device)"), kernel(155, 5, 2)]
    assert caused(*events) == [("copy", 25, 0, 1)]


def test_a_device_that_ran_dry_while_the_host_fed_a_pageable_copy_waits_for_that_copy():
    events = [launch(105, 1), launch(112, 2, "cudaMemcpyAsync", dur=60)]
    events += [kernel(110, 20, 1), moved(150, 20, 2, "Memcpy HtoD (Pageable -> Device)")]
    assert caused(*events) == [("copy", 20, 0, 1)]


def test_an_asynchronous_copy_of_pinned_memory_is_no_wait():
    events = [launch(105, 1), launch(128, 2, "cudaMemcpyAsync", dur=4), launch(140, 3)]
    events += [kernel(110, 20, 1), moved(132, 4, 2, "Memcpy HtoD (Pinned -> Device)"), kernel(145, 5, 3)]
    found = parse_chrome_trace([MARK, *events], MACHINE)
    assert found.waits == ()
    assert [gap.cause for gap in found.gaps] == ["queue", "host"]


def test_gaps_are_where_no_stream_runs_and_name_the_work_on_both_sides():
    events = [launch(101, 1), launch(102, 2), launch(103, 3)]
    events += [kernel(110, 40, 1, stream=7), kernel(115, 10, 2, stream=8), kernel(160, 5, 3, stream=8)]
    assert caused(*events) == [("queue", 10, 0, 2)], "the first kernel ends last, though it started first"


def test_idle_time_is_summed_by_cause_and_launch_bound_asks_for_the_hosts_share():
    late = [launch(105, 1), launch(140, 2), kernel(110, 5, 1), kernel(145, 5, 2)]
    found = parse_chrome_trace([MARK, *late], MACHINE)
    assert found.idle_us() == {"host": 30.0, "synchronization": 0.0, "copy": 0.0, "queue": 0.0}
    assert tuple(found.idle_us()) == GAP_CAUSES
    assert found.launch_bound
    assert "idle by cause: host 30.0 µs" in str(found)
    waited = parse_chrome_trace([MARK, wait_call(106, 12), *late], MACHINE)
    assert not waited.launch_bound, "the same gap, but a wait's: fewer launches would not shorten it"


# --- what the profiler did not record --------------------------------------------------------------------


def test_a_profiler_that_heard_nothing_of_cuda_is_an_error_and_not_an_empty_trace():
    with pytest.raises(ProfilerError, match=r"recorded no call of CUDA.*CUPTI.*supported_activities"):
        parse_chrome_trace([MARK, op("aten::add", 110, 10, [[2]])], MACHINE)


def test_launches_without_any_record_on_the_device_say_so():
    found = parse_chrome_trace([MARK, launch(110, 1), launch(111, 2)], MACHINE)
    assert (found.missing, found.launches, found.complete) == (2, 2, False)
    assert "NOTHING RECORDED of 2 launches" in str(found)
    assert (found.span_us, found.busy_us, found.gaps, found.launch_bound) == (0, 0, (), False)
    assert found.fuse_candidates() == ()


def test_a_cuda_graph_is_one_launch_of_many_kernels_and_its_completeness_is_bounded():
    events = [MARK, launch(110, 1, "cudaGraphLaunch"), launch(115, 2)]
    events += [*(kernel(130 + 3 * place, 2, 1) for place in range(4)), kernel(150, 2, 2)]
    found = parse_chrome_trace(events, MACHINE)
    assert (len(found.kernels), found.launches, found.graphs, found.complete) == (5, 2, 1, True)
    assert "1 of 2 launches is a CUDA graph, whose number of kernels cannot be checked" in str(found)
    lost = parse_chrome_trace([*events[:3], kernel(150, 2, 2)], MACHINE)
    assert lost.missing == 1


def on_cpu(fn):
    return kernels._profile(fn, activities=(ProfilerActivity.CPU,), begin=lambda: None, end=lambda: None)


def test_a_function_that_raises_leaves_the_profiler_stopped():
    def fails():
        raise ZeroDivisionError("in the traced call")

    with pytest.raises(ZeroDivisionError, match="in the traced call"):
        on_cpu(fails)
    assert not torch.autograd.profiler._is_profiler_enabled
    events, _ = on_cpu(lambda: torch.ones(2) + 1)
    assert any(event["name"] == "aten::add" for event in events)


def test_the_profilers_event_tree_gives_the_dtypes_in_lists():
    weight = torch.zeros(3, 4, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    events, lists = on_cpu(lambda: (optimizer.step(), torch.cat([X, X.double()])))
    by_name = {event["name"]: chrome_trace._arguments(event, lists) for event in events if "args" in event}
    assert by_name["aten::_fused_adamw_"] == (((3, 4),) * 4, ("float32",) * 4)
    assert by_name["aten::cat"] == (((6, 8), (6, 8)), ("float32", "float64"))


def test_an_event_tree_of_another_torch_leaves_dtypes_unknown():
    assert chrome_trace.tensor_lists(object()) == {}


# --- plain data ------------------------------------------------------------------------------------------


def small_trace():
    events = [
        MARK,
        op("aten::mul", 104, 6, [[64, 8], []], ["float", "long int"]),
        launch(105, 1),
        op("aten::add", 118, 6, [[64, 8], [8]], ["float", "float"]),
        launch(119, 2),
        launch(125, 3, "cudaMemcpyAsync"),
        wait_call(129, 15),
        launch(160, 4, tid=2),
        kernel(110, 10, 1),
        kernel(123, 4, 2),
        moved(131, 2, 3),
        kernel(170, 5, 4, stream=8),
    ]
    return parse_chrome_trace(events, MACHINE)


def test_a_trace_comes_back_whole_from_its_plain_data():
    found = small_trace()
    data = json.loads(json.dumps(found.as_dict()))
    again = KernelTrace.from_dict(data, MACHINE)
    assert again == found
    assert again.gaps == found.gaps
    assert data["gaps"][-1] == {
        "start_us": 23.0,
        "duration_us": 37.0,
        "cause": "copy",
        "before": 2,
        "after": 3,
    }


def test_a_trace_without_its_machine_does_not_claim_that_there_was_no_gpu():
    assert "the data does not name its machine" in str(KernelTrace.from_dict(small_trace().as_dict()))


def test_data_of_the_first_version_is_read_and_what_it_lacks_is_empty():
    data = small_trace().as_dict()
    data = {key: value for key, value in data.items() if key not in ("waits", "gaps", "graphs")}
    for row in data["kernels"]:
        for field in ("dtypes", "call", "launch_duration_us", "thread"):
            del row[field]
    found = KernelTrace.from_dict(data)
    assert {k.dtypes for k in found.kernels} == {()}
    assert (found.waits, found.graphs, found.kernels[0].call) == ((), 0, None)
    assert found.gaps[-1].cause == "host", "without the waits only the late launch is seen"
    assert found.perfetto()["traceEvents"]


def test_work_whose_launch_time_is_unknown_gives_a_gap_of_unknown_cause():
    data = small_trace().as_dict()
    data["kernels"][3]["launch_us"] = None
    found = KernelTrace.from_dict(data)
    assert found.gaps[-1].cause == "unknown"
    assert found.idle_us()["unknown"] == 37.0


def changed(path, value):
    data = copy.deepcopy(small_trace().as_dict())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["kernels"], {"a": 1}, r"kernels are a list, found dict"),
        (["kernels", 1], 7, r"kernels\[1\] is a dict of fields, found int"),
        (["kernels", 0], {"name": "k"}, r"kernels\[0\] lacks op, shapes, start_us"),
        (["kernels", 0, "colour"], "red", r"kernels\[0\] has the unknown fields colour"),
        (["kernels", 0, "name"], None, r"kernels\[0\]\.name is text, found None"),
        (["kernels", 0, "duration_us"], -1.0, r"duration_us is a number of µs from 0, found -1"),
        (["kernels", 0, "start_us"], float("nan"), r"start_us is a finite number of µs, found nan"),
        (["kernels", 0, "start_us"], "3", r"start_us is a finite number of µs, found '3'"),
        (["kernels", 0, "shapes"], [[2, True]], r"shapes is a whole number from 0, found True"),
        (["kernels", 0, "grid"], [1.5], r"grid is a whole number from 0, found 1\.5"),
        (["kernels", 0, "dtypes"], [], None),
        (["kernels", 0, "dtypes"], ["float32", "float32"], r"has 1 shapes and 2 dtypes"),
        (["kernels", 0, "start_us"], 500.0, r"in order of start_us, found them unsorted"),
        (["unrecorded"], [3], r"unrecorded is text, found 3"),
        (["launches"], 1.5, r"launches is a whole number from 0, found 1\.5"),
        (["missing"], 9, r"at most the launches, found 9 and 0 of 4"),
        (["waits", 0, "start_us"], None, r"waits\[0\]\.start_us is a finite number of µs, found None"),
    ],
)
def test_data_that_is_no_trace_is_refused_with_the_place_that_is_wrong(path, value, said):
    data = changed(path, value)
    if said is None:
        assert KernelTrace.from_dict(data).kernels[0].dtypes == ()
        return
    with pytest.raises((TypeError, ValueError), match=said):
        KernelTrace.from_dict(data)


@pytest.mark.parametrize("data", [[], {"chain": {}}, None])
def test_the_recording_around_a_trace_is_not_taken_for_one(data):
    with pytest.raises(TypeError, match=r"has 'kernels', found .*not the recording around it"):
        KernelTrace.from_dict(data)


def test_the_recorded_trace_that_from_dict_names_as_its_example_is_taken_up():
    assert 'load("block_step").data["trace"]' in KernelTrace.from_dict.__doc__
    trace = KernelTrace.from_dict(load("block_step").data["trace"])
    assert trace.launches == len(trace.kernels) > 0
    with pytest.raises(TypeError, match="not the recording around it"):
        KernelTrace.from_dict(load("block_step"))


# --- fusion ----------------------------------------------------------------------------------------------


def made(*rows, waits=()):
    """Make a trace of kernels one after the other: (op, shapes, dtype[, call[, stream[, kernel name]]])."""
    found = []
    for place, row in enumerate(rows):
        name, shapes, dtype, call, stream, kernel_name = (*row, *(None, 7, "k")[len(row) - 3 :])
        found.append(
            Kernel(
                name=kernel_name,
                op=name,
                shapes=tuple(shapes),
                dtypes=(dtype,) * len(shapes),
                call=place if call is None else call,
                start_us=place * 10.0,
                duration_us=9.0,
                launch_us=-50.0 + place,
                stream=stream,
                grid=(1, 1, 1),
                block=(128, 1, 1),
                registers=32,
                shared_bytes=0,
            )
        )
    return KernelTrace(kernels=tuple(found), launches=len(found), missing=0, environment=MACHINE, waits=waits)


N = (1024, 768)
MUL, ADD, SUM = ("aten::mul", [N], "float32"), ("aten::add", [N, N], "float32"), ("aten::sum", [N], "float32")
MM = ("aten::mm", [N, (768, 768)], "float32")


def indices(*rows, waits=()):
    return [candidate.indices for candidate in made(*rows, waits=waits).fuse_candidates()]


def test_element_wise_neighbours_over_the_same_elements_are_one_candidate():
    (found,) = made(MUL, ADD, MUL).fuse_candidates()
    assert (found.indices, found.ops) == ((0, 1, 2), ("aten::mul", "aten::add", "aten::mul"))
    assert (found.elements, found.launches_saved, found.duration_us) == (1024 * 768, 2, 27.0)
    assert found.bytes_saved == 2 * 2 * 1024 * 768 * 4, "two results, each written once and read once"
    assert found.as_dict()["indices"] == (0, 1, 2)


def test_one_alone_and_neighbours_over_other_sizes_are_none():
    assert indices(MUL) == indices() == []
    assert indices(MUL, ("aten::add", [(1024, 1)], "float32"), MUL) == []


def test_broadcast_arguments_count_as_what_they_spread_to():
    assert indices(MUL, ("aten::sub", [N, (1024, 1)], "float32")) == [(0, 1)]
    assert indices(MUL, ("aten::add", [(1024, 1), (1, 768)], "float32")) == [], "takes nothing of that size"


def test_a_reduction_stands_at_an_end_and_nothing_goes_on_behind_it():
    assert indices(SUM, MUL, ADD) == [(0, 1, 2)]
    assert indices(MUL, ADD, SUM) == [(0, 1, 2)]
    assert indices(MUL, SUM, ADD, MUL) == [(0, 1), (2, 3)]
    assert indices(SUM, SUM) == []


def test_a_reduction_in_front_must_read_a_tensor_of_the_same_shape_as_what_follows():
    flat = ("aten::mul", [(1024 * 768,), (1024 * 768,)], "float32")
    assert indices(SUM, flat, flat) == [(1, 2)]
    assert indices(flat, SUM) == [(0, 1)], "behind a run it may read a view of the result"
    norm = ("aten::native_layer_norm", [N, (768,), (768,)], "float32")
    assert indices(norm, flat) == [(0, 1)], "a norm hands on as much as it reads"


def test_bytes_saved_at_a_reduction_are_a_read_in_front_and_a_write_and_read_behind():
    size = 1024 * 768 * 4
    assert made(SUM, MUL).fuse_candidates()[0].bytes_saved == size
    assert made(MUL, SUM).fuse_candidates()[0].bytes_saved == 2 * size
    norm = ("aten::native_layer_norm", [N, (768,), (768,)], "float32")
    assert made(norm, MUL).fuse_candidates()[0].bytes_saved == 2 * size


def test_bytes_saved_follow_the_dtype_and_are_none_where_it_is_unknown():
    half = ("aten::mul", [N], "bfloat16")
    assert made(half, half).fuse_candidates()[0].bytes_saved == 2 * 1024 * 768 * 2
    unknown = ("aten::mul", [N], "unknown")
    assert made(unknown, unknown).fuse_candidates()[0].bytes_saved is None
    trace_ = made(MUL, ADD)
    mixed = dataclasses.replace(trace_.kernels[1], dtypes=("float32", "bfloat16"))
    assert (
        dataclasses.replace(trace_, kernels=(trace_.kernels[0], mixed)).fuse_candidates()[0].bytes_saved
        is None
    )


@pytest.mark.parametrize(
    "between",
    [
        MM,
        ("aten::copy_", [N], "float32", None, 7, "Memcpy DtoH (Device -> Pageable)"),
        ("triton_poi_fused_add_0", [N, N], "float32"),
        ("aten::embedding", [N, (64,)], "float32"),
        ("", [], "float32"),
    ],
)
def test_no_candidate_reaches_across_a_product_a_host_copy_or_what_is_not_known(between):
    assert indices(MUL, between, ADD) == []
    assert indices(MUL, MUL, between, ADD, ADD) == [(0, 1), (3, 4)]


def test_no_candidate_reaches_across_a_wait():
    waits = (Wait(name="cudaStreamSynchronize", start_us=2.0, duration_us=7.5),)
    late = made(MUL, ADD, waits=waits)
    later = dataclasses.replace(late.kernels[1], launch_us=9.6)
    assert dataclasses.replace(late, kernels=(late.kernels[0], later)).fuse_candidates() == ()
    assert indices(MUL, ADD) == [(0, 1)]


def test_neighbours_are_those_on_the_same_stream():
    side = ("aten::mm", [N, (768, 768)], "float32", None, 8)
    assert indices(MUL, side, ADD) == [(0, 2)]
    assert indices(MUL, ("aten::add", [N, N], "float32", None, 8)) == []


def test_the_kernels_of_one_call_are_one_link_of_a_run():
    clear = ("aten::sum", [N], "float32", 7, 7, "Memset (Device)")
    (found,) = made(MUL, clear, ("aten::sum", [N], "float32", 7)).fuse_candidates()
    assert (found.indices, found.ops) == ((0, 1, 2), ("aten::mul", "aten::sum"))
    assert found.launches_saved == 1, "the sum keeps the fill of its counters"


def test_passes_over_lists_join_where_one_list_is_the_other_repeated():
    lists = [(64, 8), (8,)]
    one, two = ("aten::_foreach_mul_", lists, "float32"), ("aten::_foreach_add_", lists * 2, "float32")
    (found,) = made(one, two, ("aten::_foreach_sqrt", [(64, 8)], "float32")).fuse_candidates()
    assert (found.indices, found.elements, found.bytes_saved) == ((0, 1), 520, None)
    assert indices(one, ("aten::_foreach_norm", lists, "float32")) == []


def test_the_list_of_element_wise_operations_agrees_with_torchs_tags():
    # Without the tag, but each element of the result needs only the one at its place.
    losses = ("binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss")
    untagged = {"copy", "fill", "native_dropout", "to_copy", "zero", *losses}
    untagged |= {f"{loss}_backward" for loss in losses}

    def tagged(name):
        packets = [getattr(torch.ops.aten, n, None) for n in (name, f"{name}_", f"_{name}")]
        return any(
            torch.Tag.pointwise in getattr(packet, overload).tags
            for packet in packets
            if packet
            for overload in packet.overloads()
        )

    assert {name for name in fusion._ELEMENT_WISE if not tagged(name)} == untagged
    assert not {name for name in fusion._REDUCTIONS if fusion._pointwise(f"aten::{name}")} - {"max", "min"}


def test_fusion_is_judged_without_torch_too():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from gpucourse.fusion import _pointwise\n"
        "print(_pointwise('aten::mul_'), _pointwise('aten::mm'), _pointwise('mylib::mul'))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["True", "False", "False"]


# --- Perfetto --------------------------------------------------------------------------------------------


def test_the_perfetto_file_has_lanes_slices_and_an_arrow_from_each_launch(tmp_path):
    found = small_trace()
    path = found.write_perfetto(tmp_path / "step.json")
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names.values()) == {"host thread 0", "host thread 1", "stream 7", "stream 8", "idle, by cause"}
    assert all(e["tid"] for e in events if "tid" in e), "Perfetto merges lanes 0 of all processes"
    slices = [e for e in events if e["ph"] == "X"]
    assert min(e["ts"] for e in slices) == 0
    on_device = [e for e in slices if names[e["pid"], e["tid"]].startswith("stream")]
    assert [e["dur"] for e in on_device] == [10, 4, 2, 5]
    assert on_device[1]["args"]["op"] == "aten::add"
    assert on_device[1]["args"]["shapes"] == "[64, 8] float32, [8] float32"
    assert (on_device[0]["args"]["grid"], on_device[0]["args"]["block"]) == ([8, 1, 1], [128, 1, 1])
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == len(ends) == 4
    for arrow, begin in starts.items():  # an arrow is bound to the slice that encloses its end
        for end in (begin, ends[arrow]):
            assert any(
                (s["pid"], s["tid"]) == (end["pid"], end["tid"])
                and s["ts"] <= end["ts"] <= s["ts"] + s["dur"]
                for s in slices
            )
    assert [e["name"] for e in slices if names[e["pid"], e["tid"]] == "idle, by cause"] == [
        gap.cause for gap in found.gaps
    ]
    assert [e["name"] for e in slices if e["args"].get("waits")] == ["cudaStreamSynchronize"]


def test_a_graphs_one_launch_is_drawn_once_with_an_arrow_to_each_kernel():
    events = [MARK, launch(110, 1, "cudaGraphLaunch"), *(kernel(130 + 3 * i, 2, 1) for i in range(3))]
    drawn = parse_chrome_trace(events, MACHINE).perfetto()["traceEvents"]
    assert sum(e["ph"] == "X" and e["pid"] == 1 for e in drawn) == 1
    assert sum(e["ph"] == "s" for e in drawn) == sum(e["ph"] == "f" for e in drawn) == 3


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


@pytest.mark.parametrize(
    ("expression", "operations", "empty"),
    [
        (lambda e: e + 1, (), ("add",)),
        (lambda e: e.add_(1), (), ("add_",)),
        (lambda e: torch.zeros(0, 8) @ torch.zeros(8, 4), ("zeros",), ("zeros", "mm")),
        (lambda e: e.sum(), ("sum",), ()),
        (lambda e: torch.zeros(2, 3).nonzero(), ("zeros", "nonzero"), ()),
    ],
)
def test_what_gives_no_element_launches_nothing_unless_its_size_had_to_be_found(
    expression, operations, empty
):
    found = count_launches(expression, torch.empty(0))
    assert found.operations == operations
    assert found.empty == empty


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


def test_counting_leaves_a_compiled_function_compiled():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * 2 + 1, backend=backend)
    compiled(torch.ones(3))
    assert count_launches(compiled, torch.ones(3)).count == 2
    compiled(torch.ones(3))
    compiled(torch.ones(5, 7))  # another shape is compiled anew, which a function left eager would not be
    assert len(graphs) == 2
    torch._dynamo.reset()
