"""The launch model is the simulator's closed form, refuses what no chain can be, and keeps its residuals."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpucourse.launch_model import LaunchModel, compare
from gpucourse.simulator import Kernel, SimulatedDevice

TIMES = st.one_of(
    st.floats(0, 60, allow_nan=False).map(lambda us: round(us, 3)), st.sampled_from([0.0, 2.0, 8.0])
)


def run(model: LaunchModel) -> tuple[int, int, int]:
    """Launch the chain on the simulator, as a program would; total and busy in ns, and the longest queue."""
    device = SimulatedDevice(launch_us=model.launch_us, latency_us=model.latency_us, queue_depth=10**6)
    if model.way == "graph":
        device.launch(Kernel(duration_us=model.kernel_us * model.kernels))
    else:
        for _ in range(model.kernels):
            device.launch(Kernel(duration_us=model.kernel_us))
    device.synchronize()
    kernels = [span for span in device.history if span.kind == "kernel"]
    busy = sum(round(span.end_us * 1000) - round(span.start_us * 1000) for span in kernels)
    made = [span.end_us for span in device.history if span.kind == "launch"]
    longest = max(
        k - sum(kernel.end_us <= now for kernel in kernels[:k]) for k, now in enumerate(made, start=1)
    )
    return device.perf_counter_ns(), busy, longest


@settings(max_examples=300, deadline=None)
@given(
    kernels=st.integers(1, 60),
    kernel_us=TIMES,
    launch_us=TIMES,
    latency_us=TIMES,
    way=st.sampled_from(["eager", "graph"]),
)
def test_the_closed_form_is_the_simulators_to_the_nanosecond(
    kernels: int, kernel_us: float, launch_us: float, latency_us: float, way: Any
) -> None:
    model = LaunchModel(
        kernels=kernels, kernel_us=kernel_us, launch_us=launch_us, latency_us=latency_us, way=way
    )
    total_ns, busy_ns, longest = run(model)
    assert round(model.total_us * 1000) == total_ns
    assert round(model.device_us * 1000) == busy_ns
    assert round(model.idle_us * 1000) == total_ns - busy_ns
    assert model.queue_most == longest
    assert model.simulate().perf_counter_ns() == total_ns


@pytest.mark.parametrize("seed", range(5))
def test_a_queue_that_is_full_holds_the_host_and_not_the_total(seed: int) -> None:
    rng = random.Random(seed)
    kernel_us, launch_us = rng.uniform(5, 40), rng.uniform(0.5, 4)
    model = LaunchModel(kernels=3000, kernel_us=kernel_us, launch_us=launch_us, latency_us=5.0)
    device = model.simulate()  # CUDA's depth, 1,024
    assert any(span.kind == "wait" and span.name == "full queue" for span in device.history)
    assert device.perf_counter_ns() == round(model.total_us * 1000)


def test_a_wrong_closed_form_would_be_seen() -> None:
    model = LaunchModel(kernels=7, kernel_us=2.0, launch_us=8.0)
    total_ns, _, _ = run(model)
    assert total_ns != round(max(7 * 8.0, 7 * 2.0) * 1000)  # the last kernel forgotten
    assert total_ns != round(7 * (8.0 + 2.0) * 1000)  # nothing overlaps


def test_the_longer_of_launch_and_kernel_sets_the_pace_and_the_shorter_shows_once() -> None:
    short = LaunchModel(kernels=100, kernel_us=0.9, launch_us=8.0)
    long = LaunchModel(kernels=100, kernel_us=64.0, launch_us=8.0)
    assert (short.total_us, short.bound) == (100 * 8.0 + 0.9, "launch")
    assert (long.total_us, long.bound) == (8.0 + 100 * 64.0, "device")
    level = LaunchModel(kernels=100, kernel_us=8.0, launch_us=8.0)
    assert (level.total_us, level.bound) == (808.0, "both")


def test_below_the_bend_the_kernels_length_shows_once_and_above_it_every_time() -> None:
    for way, bend in (("eager", 8.0), ("graph", 0.08)):
        below, at, above = (
            LaunchModel(kernels=100, kernel_us=bend * factor, launch_us=8.0, way=way)  # type: ignore[arg-type]
            for factor in (0.5, 1.0, 2.0)
        )
        assert at.bend_us == bend
        assert (below.bound, at.bound, above.bound) == ("launch", "both", "device")
    halves = [LaunchModel(kernels=100, kernel_us=us, launch_us=8.0).total_us for us in (2.0, 4.0, 16.0, 32.0)]
    assert halves[1] - halves[0] == pytest.approx(2.0)  # the last kernel's alone
    assert halves[3] - halves[2] == pytest.approx(100 * 16.0)


def test_a_graph_pays_one_launch_and_the_same_kernels() -> None:
    graph = LaunchModel(kernels=100, kernel_us=0.9, launch_us=8.0, way="graph")
    assert (graph.launches, graph.host_us, graph.device_us, graph.total_us) == (1, 8.0, 90.0, 98.0)
    assert graph.idle_share == pytest.approx(8 / 98)
    one = LaunchModel(kernels=1, kernel_us=0.9, launch_us=8.0)
    assert one.total_us == LaunchModel(kernels=1, kernel_us=0.9, launch_us=8.0, way="graph").total_us


def test_the_latency_enters_once_and_is_idle() -> None:
    near = LaunchModel(kernels=50, kernel_us=3.0, launch_us=8.0)
    far = LaunchModel(kernels=50, kernel_us=3.0, launch_us=8.0, latency_us=5.0)
    assert far.total_us - near.total_us == pytest.approx(5.0)
    assert far.idle_us - near.idle_us == pytest.approx(5.0)


def test_a_chain_of_nothing_is_never_idle() -> None:
    assert LaunchModel(kernels=3, kernel_us=0.0, launch_us=0.0).idle_share == 0.0


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"kernels": 0}, ValueError, "kernels is 0: a positive integer is wanted"),
        ({"kernels": 2.0}, TypeError, "kernels is a float"),
        ({"kernels": True}, TypeError, "kernels is a bool"),
        ({"kernel_us": -1.0}, ValueError, "kernel_us is -1.0: a time in µs is finite and not negative"),
        ({"kernel_us": "1"}, TypeError, "kernel_us is a str"),
        ({"launch_us": math.inf}, ValueError, "launch_us is inf"),
        ({"latency_us": math.nan}, ValueError, "latency_us is nan"),
        ({"way": "compiled"}, ValueError, 'way is \'compiled\'.*"eager" or "graph" is wanted'),
    ],
)
def test_what_no_chain_can_be_is_refused_by_name(
    change: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        LaunchModel(**({"kernels": 10, "kernel_us": 1.0, "launch_us": 8.0} | change))


def test_numpys_numbers_are_good_ones() -> None:
    model = LaunchModel(kernels=np.int16(400), kernel_us=np.float32(64.0), launch_us=np.float64(8.0))  # type: ignore[arg-type]
    assert model.total_us == 8.0 + 400 * 64.0  # an int16 would have wrapped round


# --- beside a recording -----------------------------------------------------------------------------------


def sweep(**changes: Any) -> dict[str, Any]:
    """Give a sweep as chapter 06 records it, with readings made up to lie 9 and 12 µs above the model."""
    host_us, alone = 7.5, {1024: 0.001, 2**20: 0.0024, 2**24: 0.033}
    chains = []
    for kernels, elements in [(1, 1024), (100, 1024), (400, 1024), (100, 2**20), (100, 2**24)]:
        work_us = alone[elements] * 1e3
        eager_us = host_us + (kernels - 1) * max(host_us, work_us) + work_us
        chains.append(
            {
                "kernels": kernels,
                "elements": elements,
                "device_ms": kernels * alone[elements],
                "elapsed_ms": (eager_us + 9.0) / 1e3,
                "host_ms": kernels * host_us / 1e3,
                "graph_ms": (host_us + kernels * work_us + 12.0) / 1e3,
                "graph_host_ms": 0.005,
                "graph_device_ms": kernels * alone[elements],
            }
        )
    one = [{"elements": n, "device_ms": ms, "elapsed_ms": 0.018} for n, ms in alone.items()]
    return {"dtype": "float32", "host_us": host_us, "chains": chains[::-1], "one": one} | changes


def test_a_comparison_keeps_what_was_measured_apart_from_what_was_predicted() -> None:
    rows = compare(sweep())
    assert len(rows) == 10
    assert {round(row.residual_us, 6) for row in rows if row.way == "eager"} == {9.0}
    assert {round(row.residual_us, 6) for row in rows if row.way == "graph"} == {12.0}
    hundred = next(r for r in rows if (r.kernels, r.elements, r.way) == (100, 1024, "eager"))
    assert hundred.predicted_us == pytest.approx(751.0)
    assert hundred.residual_share == pytest.approx(9 / 760)
    assert hundred.as_dict()["bound"] == "launch"
    assert next(r for r in rows if r.elements == 2**24).model.bound == "device"


def test_no_chain_enters_its_own_prediction() -> None:
    changed = sweep()
    for chain in changed["chains"]:
        chain.update({key: 1e3 for key in chain if key.endswith("_ms")})
    assert [r.predicted_us for r in compare(changed)] == [r.predicted_us for r in compare(sweep())]


def test_a_chains_own_launch_cost_tells_a_slow_host_from_a_wrong_formula() -> None:
    data = sweep()
    for chain in data["chains"]:
        if chain["elements"] == 1024:  # half as fast again while these were measured, as its own clock saw
            chain["host_ms"] *= 1.5
            chain["elapsed_ms"] += 0.5 * 7.5e-3 * chain["kernels"]
    rows = {(row.kernels, row.elements, row.way): row for row in compare(data)}
    hundred = rows[100, 1024, "eager"]
    assert hundred.residual_us == pytest.approx(9 + 375)
    assert hundred.own_residual_us == pytest.approx(9)
    assert rows[100, 2**24, "eager"].own_residual_us == pytest.approx(9)
    graph = rows[100, 1024, "graph"]
    assert graph.as_dict()["own_launch_us"] == pytest.approx(5)
    assert graph.own_residual_us == pytest.approx(12 + 7.5 - 5)


def test_without_the_hosts_clock_on_a_chain_there_is_no_second_residual() -> None:
    data = sweep()
    for chain in data["chains"]:
        chain["host_ms"] = None
        del chain["graph_host_ms"]
    assert {row.own_residual_us for row in compare(data)} == {None}
    assert {row.as_dict()["own_launch_us"] for row in compare(data)} == {None}


def test_rows_come_by_size_and_number_whatever_the_recordings_order() -> None:
    order = [(row.elements, row.kernels, row.way) for row in compare(sweep())]
    assert order == sorted(order)
    shuffled = sweep()
    random.Random(1).shuffle(shuffled["chains"])
    assert compare(shuffled) == compare(sweep())


def test_a_chain_whose_size_or_graph_was_not_measured_is_left_out() -> None:
    data = sweep()
    data["one"] = [row for row in data["one"] if row["elements"] != 2**24]
    data["chains"][0]["graph_ms"] = None  # stands first: 2**24, gone already
    data["chains"][1]["graph_ms"] = None
    found = [(row.elements, row.way) for row in compare(data) if row.elements > 1024]
    assert found == [(2**20, "eager")]


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"host_us": None}, "no host_us, the host's cost of a launch"), ({"one": []}, "nothing to compare")],
)
def test_a_sweep_without_its_launch_cost_or_its_single_kernels_says_so(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        compare(sweep(**changes))


@pytest.mark.parametrize("kernels", [10**400, 10**306])
def test_a_chain_that_outlasts_every_float_is_refused_and_not_met_later(kernels):
    with pytest.raises(ValueError, match="take longer than a float can say"):
        LaunchModel(kernels=kernels, kernel_us=1.0, launch_us=8.0)


def test_a_chain_of_a_million_million_million_kernels_has_its_time():
    chain = LaunchModel(kernels=10**18, kernel_us=1.0, launch_us=8.0)
    assert chain.total_us == pytest.approx(8e18)
    assert chain.queue_most == 1


SWEEP = {
    "host_us": 8.0,
    "one": [{"elements": 1024, "device_ms": 0.001}],
    "chains": [{"kernels": 100, "elements": 1024, "elapsed_ms": 0.81, "graph_ms": 0.12}],
}


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (lambda s: None, TypeError, "takes the recording chain_sweep, not None"),
        (lambda s: [], TypeError, "takes the recording chain_sweep"),
        (lambda s: {}, ValueError, "has no 'host_us'"),
        (lambda s: {**s, "host_us": float("nan")}, ValueError, "host_us is nan"),
        (lambda s: {**s, "host_us": True}, ValueError, "host_us is True"),
        (lambda s: {**s, "one": 5}, ValueError, "one is 5: a list is wanted"),
        (lambda s: {**s, "one": [{"elements": 1024, "device_ms": "1"}]}, ValueError, "device_ms is '1'"),
        (lambda s: {**s, "chains": [{**s["chains"][0], "kernels": 0}]}, ValueError, "kernels is 0"),
        (lambda s: {**s, "chains": [{**s["chains"][0], "elapsed_ms": 0.0}]}, ValueError, "elapsed_ms is 0.0"),
        (lambda s: {**s, "chains": [{**s["chains"][0], "host_ms": -1}]}, ValueError, "host_ms is -1"),
        (lambda s: {**s, "chains": [None]}, ValueError, "an entry of chains is None: a table of fields"),
        (lambda s: {**s, "chains": [{"kernels": 1, "elements": 1024}]}, ValueError, "has no 'elapsed_ms'"),
    ],
)
def test_a_sweep_that_no_gpu_gave_is_refused_with_its_fault(spoil, error, said):
    assert [row.way for row in compare(SWEEP)] == ["eager", "graph"]
    with pytest.raises(error, match=re.escape(said)):
        compare(spoil(SWEEP))
