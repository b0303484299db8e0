"""The launch lab's chart and table show every recorded chain beside the model, with the residual's sign."""

from __future__ import annotations

import pytest

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
