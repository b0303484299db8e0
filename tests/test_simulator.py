"""The simulated host and device keep CUDA's rules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpucourse.simulator import Kernel, SimulatedDevice, SimulatedEvent, SimulatedStream


def _pair(device: SimulatedDevice) -> tuple[SimulatedEvent, SimulatedEvent]:
    return device.Event(enable_timing=True), device.Event(enable_timing=True)


# --- by hand ------------------------------------------------------------------------------------------------


def test_a_launch_costs_the_host_its_launch_whatever_the_kernel_does() -> None:
    device = SimulatedDevice(launch_us=5.0)
    device.launch(Kernel(duration_us=1e6))
    assert device.perf_counter_ns() == 5_000
    assert device.perf_counter() == pytest.approx(5e-6)


def test_synchronize_holds_the_host_until_the_last_kernel_has_ended() -> None:
    device = SimulatedDevice(launch_us=5.0, synchronize_us=3.0)
    for _ in range(3):
        device.launch(Kernel(duration_us=40.0))
    device.synchronize()
    assert device.perf_counter_ns() == (5 + 3 * 40 + 3) * 1000


def test_short_kernels_leave_the_device_idle_between_launches() -> None:
    device = SimulatedDevice(launch_us=8.0)
    for _ in range(4):
        device.launch(Kernel(duration_us=1.0))
    device.synchronize()
    assert device.perf_counter_ns() == (4 * 8 + 1) * 1000


def test_a_pair_on_an_idle_queue_reads_the_launch_too() -> None:
    device = SimulatedDevice(launch_us=8.0)
    start, end = _pair(device)
    start.record()
    device.launch(Kernel(duration_us=2.0))
    end.record()
    device.synchronize()
    assert start.elapsed_time(end) == pytest.approx(0.010)


def test_a_pair_behind_a_spin_kernel_reads_the_kernel_alone() -> None:
    device = SimulatedDevice(launch_us=8.0, record_us=1.0, latency_us=4.0)
    start, end = _pair(device)
    device.spin(100.0)
    start.record()
    device.launch(Kernel(duration_us=2.0))
    end.record()
    device.synchronize()
    assert start.elapsed_time(end) == pytest.approx(0.002)


def test_a_pair_does_not_count_what_was_pending_before_it() -> None:
    device = SimulatedDevice(launch_us=5.0)
    device.launch(Kernel(duration_us=1000.0, name="somebody else's"))
    start, end = _pair(device)
    start.record()
    device.launch(Kernel(duration_us=340.0))
    end.record()
    device.synchronize()
    assert start.elapsed_time(end) == pytest.approx(0.340)


def test_a_wait_before_the_end_event_puts_the_hosts_return_into_the_pair() -> None:
    device = SimulatedDevice(launch_us=5.0, synchronize_us=10.0)
    start, end = _pair(device)
    start.record()
    device.launch(Kernel(duration_us=340.0))
    device.synchronize()
    end.record()
    device.synchronize()
    assert start.elapsed_time(end) == pytest.approx(0.355)


def test_latency_delays_the_device_and_not_the_host() -> None:
    device = SimulatedDevice(launch_us=5.0, latency_us=7.0)
    device.launch(Kernel(duration_us=1.0))
    assert device.perf_counter_ns() == 5_000
    device.synchronize()
    assert device.perf_counter_ns() == 13_000


def test_the_first_launch_of_each_name_costs_the_host_more() -> None:
    device = SimulatedDevice(launch_us=5.0, first_launch_us=2000.0)
    for name in ("a", "a", "b"):
        device.launch(Kernel(duration_us=0.0, name=name))
    assert device.perf_counter_ns() == (3 * 5 + 2 * 2000) * 1000


def test_host_work_and_device_work_overlap() -> None:
    device = SimulatedDevice(launch_us=5.0)
    device.launch(Kernel(duration_us=100.0))
    device.sleep(60.0)
    device.synchronize()
    assert device.perf_counter_ns() == 105_000


def test_item_waits_though_nothing_says_so() -> None:
    device = SimulatedDevice(launch_us=5.0)
    device.launch(Kernel(duration_us=100.0))
    device.item()
    assert device.perf_counter_ns() == 105_000


def test_a_full_queue_holds_the_host_until_one_kernel_has_ended() -> None:
    device = SimulatedDevice(launch_us=1.0, queue_depth=2)
    for _ in range(3):
        device.launch(Kernel(duration_us=100.0))
    assert device.perf_counter_ns() == (1 + 100 + 1) * 1000  # waited for the first, then launched
    assert "full queue" in [span.name for span in device.history]


# --- streams ------------------------------------------------------------------------------------------------


def test_streams_run_side_by_side_and_synchronize_waits_for_all() -> None:
    device = SimulatedDevice(launch_us=5.0)
    side = device.new_stream()
    device.launch(Kernel(duration_us=100.0))
    device.launch(Kernel(duration_us=300.0), stream=side)
    device.current_stream.synchronize()
    assert device.perf_counter_ns() == 105_000
    assert not side.query()
    device.synchronize()
    assert device.perf_counter_ns() == 310_000
    assert side.query()


def test_work_on_another_stream_escapes_a_pair_unless_it_is_joined() -> None:
    def reading(join: bool) -> float:
        device = SimulatedDevice(launch_us=0.0)
        side = device.new_stream()
        start, end = _pair(device)
        start.record()
        with device.stream(side):
            device.launch(Kernel(duration_us=300.0))
            done = device.Event()
            done.record()
        if join:
            device.current_stream.wait_event(done)
        end.record()
        device.synchronize()
        return start.elapsed_time(end)

    assert reading(join=False) == 0.0
    assert reading(join=True) == pytest.approx(0.300)


def test_an_event_is_a_mark_in_the_stream_it_was_recorded_in() -> None:
    device = SimulatedDevice(launch_us=0.0)
    side = device.new_stream()
    device.launch(Kernel(duration_us=100.0), stream=side)
    here, there = _pair(device)
    here.record()
    there.record(side)
    assert here.state == "complete"
    assert there.state == "pending"


def test_waiting_for_an_unrecorded_event_holds_nothing() -> None:
    device = SimulatedDevice(launch_us=0.0)
    device.current_stream.wait_event(device.Event())
    device.Event().synchronize()
    assert device.perf_counter_ns() == 0


def test_the_current_stream_comes_back_after_an_error() -> None:
    device = SimulatedDevice()
    before = device.current_stream
    with pytest.raises(ZeroDivisionError), device.stream(device.new_stream()):
        _ = 1 // 0
    assert device.current_stream is before


# --- events -------------------------------------------------------------------------------------------------


def test_an_event_goes_from_unrecorded_over_pending_to_complete() -> None:
    device = SimulatedDevice(launch_us=1.0)
    event = device.Event(enable_timing=True)
    assert (event.state, event.query()) == ("unrecorded", True)
    device.launch(Kernel(duration_us=10.0))
    event.record()
    assert (event.state, event.query()) == ("pending", False)
    event.synchronize()
    assert (event.state, event.query()) == ("complete", True)
    assert device.perf_counter_ns() == 11_000


def test_recording_again_moves_the_mark() -> None:
    device = SimulatedDevice(launch_us=1.0)
    start, end = _pair(device)
    start.record()
    end.record()
    device.launch(Kernel(duration_us=10.0))
    end.record()
    assert end.state == "pending"
    device.synchronize()
    assert start.elapsed_time(end) == pytest.approx(0.011)


def test_marks_in_the_other_order_give_a_negative_time() -> None:
    device = SimulatedDevice(launch_us=1.0)
    start, end = _pair(device)
    start.record()
    device.launch(Kernel(duration_us=10.0))
    end.record()
    device.synchronize()
    assert end.elapsed_time(start) == -start.elapsed_time(end)


def test_a_pending_event_has_no_time_yet() -> None:
    device = SimulatedDevice()
    start, end = _pair(device)
    start.record()
    device.launch(Kernel(duration_us=10.0))
    end.record()
    with pytest.raises(RuntimeError, match="must be completed"):
        start.elapsed_time(end)


def test_an_unrecorded_event_has_no_time() -> None:
    device = SimulatedDevice()
    start, end = _pair(device)
    start.record()
    with pytest.raises(ValueError, match="must be recorded"):
        start.elapsed_time(end)


def test_an_event_without_timing_cannot_be_read() -> None:
    device = SimulatedDevice()
    start, end = device.Event(), device.Event(enable_timing=True)
    start.record()
    end.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        start.elapsed_time(end)


def test_events_of_two_devices_do_not_mix() -> None:
    one, other = SimulatedDevice(), SimulatedDevice()
    start, end = one.Event(enable_timing=True), other.Event(enable_timing=True)
    start.record()
    end.record()
    with pytest.raises(ValueError, match="another simulated device"):
        start.elapsed_time(end)
    with pytest.raises(ValueError, match="another simulated device"):
        one.launch(Kernel(duration_us=1.0), stream=other.current_stream)


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("us", [-1.0, math.nan, math.inf])
def test_a_time_that_is_negative_or_not_finite_is_refused(us: float) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        Kernel(duration_us=us)
    with pytest.raises(ValueError, match="launch_us"):
        SimulatedDevice(launch_us=us)
    with pytest.raises(ValueError, match="finite and not negative"):
        SimulatedDevice().sleep(us)


@pytest.mark.parametrize("us", [True, "5", None])
def test_a_time_that_is_no_number_is_refused(us: Any) -> None:
    with pytest.raises(TypeError, match="is a number"):
        Kernel(duration_us=us)
    with pytest.raises(TypeError, match="record_us"):
        SimulatedDevice(record_us=us)


@pytest.mark.parametrize(
    ("depth", "error"), [(0, ValueError), (-3, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_a_queue_depth_is_a_positive_integer(depth: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="positive integer"):
        SimulatedDevice(queue_depth=depth)


def test_launching_what_is_no_kernel_says_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"found float; write Kernel\(duration_us="):
        SimulatedDevice().launch(340.0)  # type: ignore[arg-type]


def test_a_stream_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="new_stream"):
        SimulatedDevice().launch(Kernel(duration_us=1.0), stream="side")  # type: ignore[arg-type]


def test_a_device_without_history_says_so() -> None:
    device = SimulatedDevice(keep_history=False)
    device.launch(Kernel(duration_us=1.0))
    with pytest.raises(RuntimeError, match="keeps no history"):
        _ = device.history


def test_the_history_cannot_be_changed_from_outside() -> None:
    device = SimulatedDevice()
    device.launch(Kernel(duration_us=1.0))
    device.history.clear()
    assert len(device.history) == 2


# --- any program --------------------------------------------------------------------------------------------

_TIMES = st.integers(0, 50_000).map(lambda ns: ns / 1000)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("launch"), _TIMES, st.integers(0, 2)),
        st.tuples(st.just("sleep"), _TIMES, st.just(0)),
        st.tuples(st.just("record"), st.just(0.0), st.integers(0, 2)),
        st.tuples(st.just("wait_event"), st.just(0.0), st.integers(0, 2)),
        st.tuples(st.just("synchronize"), st.just(0.0), st.just(0)),
        st.tuples(st.just("stream_synchronize"), st.just(0.0), st.integers(0, 2)),
    ),
    max_size=30,
)
_COSTS = st.fixed_dictionaries(
    {
        "launch_us": _TIMES,
        "record_us": _TIMES,
        "latency_us": _TIMES,
        "synchronize_us": _TIMES,
        "first_launch_us": _TIMES,
        "queue_depth": st.integers(1, 8),
    }
)


def _run(
    costs: dict[str, Any],
    steps: list[tuple[str, float, int]],
    watch: Callable[[SimulatedDevice], None] | None = None,
) -> tuple[SimulatedDevice, list[SimulatedStream], list[SimulatedEvent]]:
    device = SimulatedDevice(**costs)
    streams = [device.current_stream, device.new_stream(), device.new_stream()]
    events: list[SimulatedEvent] = []
    for what, us, place in steps:
        if what == "launch":
            device.launch(Kernel(duration_us=us, name=f"k{int(us) % 3}"), stream=streams[place])
        elif what == "sleep":
            device.sleep(us)
        elif what == "record":
            events.append(device.Event(enable_timing=True))
            events[-1].record(streams[place])
        elif what == "wait_event" and events:
            streams[place].wait_event(events[-1])
        elif what == "synchronize":
            device.synchronize()
        elif what == "stream_synchronize":
            streams[place].synchronize()
        if watch is not None:
            watch(device)
    return device, streams, events


@given(_COSTS, _STEPS)
def test_the_hosts_clock_never_runs_backwards(
    costs: dict[str, Any], steps: list[tuple[str, float, int]]
) -> None:
    seen = [0]

    def watch(device: SimulatedDevice) -> None:
        assert device.perf_counter_ns() >= seen[-1]
        seen.append(device.perf_counter_ns())

    _run(costs, steps, watch)


@given(_COSTS, _STEPS)
def test_synchronize_makes_all_complete(costs: dict[str, Any], steps: list[tuple[str, float, int]]) -> None:
    device, streams, events = _run(costs, steps)
    device.synchronize()
    assert all(stream.query() for stream in streams)
    assert all(event.state == "complete" for event in events)
    end_us = max((span.end_us for span in device.history), default=0.0)
    assert device.perf_counter() * 1e6 >= end_us - 1e-6


@given(_COSTS, _STEPS)
def test_each_stream_works_in_order_and_on_one_kernel_at_a_time(
    costs: dict[str, Any], steps: list[tuple[str, float, int]]
) -> None:
    device, streams, _ = _run(costs, steps)
    for stream in streams:
        spans = [span for span in device.history if span.lane == stream.lane]
        assert all(a.end_us <= b.start_us for a, b in itertools.pairwise(spans))


@given(_COSTS, _STEPS)
def test_no_kernel_begins_before_its_launch_is_over(
    costs: dict[str, Any], steps: list[tuple[str, float, int]]
) -> None:
    device, _, _ = _run(costs, steps)
    launches = [span for span in device.history if span.kind == "launch"]
    kernels = [span for span in device.history if span.kind == "kernel"]
    assert len(launches) == len(kernels)
    for launch, kernel in zip(launches, kernels, strict=True):
        assert kernel.start_us >= launch.end_us + costs["latency_us"] - 1e-6


@given(_COSTS, st.lists(_TIMES, max_size=20), _TIMES)
def test_an_elapsed_time_is_at_least_the_kernels_between_its_marks(
    costs: dict[str, Any], durations: list[float], pending_us: float
) -> None:
    device = SimulatedDevice(**costs)
    device.launch(Kernel(duration_us=pending_us))
    start, end = _pair(device)
    start.record()
    for us in durations:
        device.launch(Kernel(duration_us=us))
    end.record()
    device.synchronize()
    assert start.elapsed_time(end) * 1e3 >= sum(durations) - 1e-6


@given(_COSTS, st.lists(_TIMES, min_size=1, max_size=20))
def test_behind_a_long_spin_the_elapsed_time_is_exactly_the_kernels(
    costs: dict[str, Any], durations: list[float]
) -> None:
    device = SimulatedDevice(**{**costs, "queue_depth": 1024})
    start, end = _pair(device)
    device.spin(5e6)
    start.record()
    for us in durations:
        device.launch(Kernel(duration_us=us))
    end.record()
    device.synchronize()
    assert start.elapsed_time(end) * 1e3 == pytest.approx(sum(durations), abs=1e-6)


@settings(max_examples=50)
@given(st.integers(1, 12), _TIMES, st.lists(_TIMES, max_size=30))
def test_no_more_kernels_are_pending_than_the_queue_holds(
    depth: int, launch_us: float, durations: list[float]
) -> None:
    device = SimulatedDevice(launch_us=launch_us, queue_depth=depth)
    for us in durations:
        device.launch(Kernel(duration_us=us))
        now_us = device.perf_counter() * 1e6
        assert sum(span.kind == "kernel" and span.end_us > now_us + 1e-6 for span in device.history) <= depth


# --- numbers of other kinds ----------------------------------------------------------------------------------


def test_numpys_numbers_are_times_and_depths_like_any():
    device = SimulatedDevice(launch_us=np.int8(5), queue_depth=np.int64(3))
    device.sleep(np.float32(2.5))
    device.launch(Kernel(duration_us=np.int8(120)))  # 120,000 ns do not fit in eight bits
    device.synchronize()
    assert device.perf_counter_ns() == 127_500


@pytest.mark.parametrize("us", [10**400, 1e308])
def test_a_time_beyond_all_floats_is_refused_as_not_finite(us):
    with pytest.raises(ValueError, match="a time in µs is finite"):
        Kernel(duration_us=us)
