"""The launch lab's chart and table show every recorded chain beside the model, with the residual's sign."""

from __future__ import annotations

import pytest

from gpucourse import recording
from gpucourse.launch_model import compare
from gpucourse.plots import launch_timeline as draw
from gpucourse.recording import Recording
from tests.test_launch_model import sweep

H200 = {"gpu": "NVIDIA H200", "date": "2026-12-01T00:00:00", "torch": "2.11.0"}
NB = "\N{NO-BREAK SPACE}"


def recorded(**changes: object) -> Recording:
    return Recording(name="chain_sweep", data=sweep(**changes), provenance=H200)


def test_the_chart_draws_the_chains_of_one_length_and_lists_each_with_its_residual() -> None:
    chart = draw.chains_by_length(recorded())
    assert [row[0] for row in chart.rows] == ["1,024", "1,024", "1,048,576", "1,048,576"] + ["16,777,216"] * 2
    assert chart.rows[0] == (
        "1,024",
        "eager",
        f"1.00{NB}µs",
        f"751.0{NB}µs",
        f"760.0{NB}µs",
        f"+9.00{NB}µs",
        f"+1.2{NB}%",
        f"+9.00{NB}µs",
    )
    assert "recorded on NVIDIA H200" in chart._repr_html_()


def test_the_models_lines_bend_at_the_launch_cost_and_the_points_are_what_was_measured() -> None:
    chart = draw.chains_by_length(recorded())
    axes = chart.fig.axes[0]
    eager, eager_points, graph, graph_points, bend = axes.lines
    assert list(bend.get_xdata()) == [7.5, 7.5]
    x, y = (list(map(float, values)) for values in eager.get_data())
    assert y[0] == pytest.approx(7.5, rel=0.01)
    assert y[-1] == pytest.approx(x[-1], rel=0.01)
    measured = [row.measured_us / 100 for row in compare(sweep()) if row.kernels == 100]
    assert list(eager_points.get_ydata()) == measured[::2]
    assert list(graph_points.get_ydata()) == measured[1::2]
    assert len(graph.get_xdata()) == len(x)


def test_without_graphs_the_chart_draws_the_eager_chains_alone() -> None:
    data = sweep()
    for chain in data["chains"]:
        chain["graph_ms"] = None
    chart = draw.chains_by_length(Recording(name="chain_sweep", data=data, provenance=H200))
    assert {row[1] for row in chart.rows} == {"eager"}
    assert "as a CUDA graph" not in [text.get_text() for text in chart.fig.axes[0].texts]


def test_the_table_lists_the_smallest_addition_by_number() -> None:
    table = draw.chains_by_number(recorded())
    assert [row[:2] for row in table.rows] == [
        (n, w) for n in ("1", "100", "400") for w in ("eager", "graph")
    ]
    assert table.caption == f"Additions of 1,024 elements: 1.00{NB}µs each on the device, 7.50{NB}µs a launch"


def test_a_residual_below_the_prediction_has_a_minus_and_none_has_no_sign() -> None:
    data = sweep()
    for chain in data["chains"]:
        if chain["elapsed_ms"] > 0.018:  # a reading is above 0
            chain["elapsed_ms"] -= 0.018
    table = draw.chains_by_number(Recording(name="chain_sweep", data=data, provenance=H200))
    assert table.rows[2][4:] == (f"−9.00{NB}µs", f"−1.2{NB}%", f"−9.00{NB}µs")
    assert draw._signed_us(0.0) == f"0{NB}s"


def test_a_chain_without_the_hosts_clock_says_that_its_own_launch_cost_is_unavailable() -> None:
    data = sweep()
    for chain in data["chains"]:
        chain["host_ms"] = None
    table = draw.chains_by_number(Recording(name="chain_sweep", data=data, provenance=H200))
    assert [row[-1] == "unavailable" for row in table.rows] == [True, False] * 3


def test_a_sweep_without_chains_to_compare_says_so() -> None:
    for make in (draw.chains_by_length, draw.chains_by_number):
        with pytest.raises(ValueError, match="nothing to compare"):
            make(recorded(one=[]))


def test_the_prose_of_the_lab_finds_the_chains_at_their_places() -> None:
    data = recording.load("chain_sweep").data
    sizes = [2**power for power in range(10, 27)]
    numbers = (1, 2, 5, 10, 20, 50, 100, 200, 400)
    found = [(chain["kernels"], chain["elements"]) for chain in data["chains"]]
    assert found == [(n, 1024) for n in numbers] + [(100, size) for size in sizes[1:]]
    assert [row["elements"] for row in data["one"]] == sizes


def test_what_the_lab_says_of_the_residuals_is_so() -> None:
    data = recording.load("chain_sweep").data
    rows = {(row.kernels, row.elements, row.way): row for row in compare(data)}
    launch_bound = [r for r in rows.values() if (r.way, r.model.bound) == ("eager", "launch")]
    assert rows[1, 1024, "eager"].residual_share >= 0.5
    assert all(0 < r.residual_share < 0.04 for r in launch_bound if r.kernels >= 50)
    chains = {(chain["kernels"], chain["elements"]): chain for chain in data["chains"]}
    for row in launch_bound:  # with its own launch cost, the second record is all that is left
        chain = chains[row.kernels, row.elements]
        record_us = (chain["recorded_ms"] - chain["host_ms"]) * 1e3
        assert abs(chain["elapsed_ms"] - chain["recorded_ms"]) < 1e-3
        assert row.own_residual_us == pytest.approx(record_us - row.model.kernel_us, abs=1)
    hundreds = [r for r in launch_bound if r.kernels == 100]
    own_us = {r: chains[100, r.elements]["host_us"] for r in hundreds}
    slow, quick = max(hundreds, key=own_us.__getitem__), min(hundreds, key=own_us.__getitem__)
    assert [row.elements for row in (quick, slow)] == [data["chains"][k]["elements"] for k in (15, 10)]
    spread_us = max(r.residual_us for r in hundreds) - min(r.residual_us for r in hundreds)
    assert 100 * (own_us[slow] - own_us[quick]) == pytest.approx(spread_us, rel=0.25)
    long = chains[100, 2**24]
    gaps_us = (long["device_ms"] - long["graph_device_ms"]) * 1e3
    assert 0.9 < gaps_us / rows[100, 2**24, "eager"].residual_us < 1
    assert long["recorded_ms"] < 0.5 * long["elapsed_ms"]  # so the record is hidden
    assert rows[100, 2**22, "eager"].model.bound == "launch"
    assert rows[100, 2**23, "eager"].model.bound == "device"
    assert rows[100, 2**22, "graph"].residual_us > 100
    assert rows[100, 2**23, "graph"].residual_us < -90
    assert all(abs(rows[100, 2**k, "graph"].residual_share) < 0.01 for k in (24, 25, 26))
