"""The charts and tables of the timing chapter show what was recorded, and say what was not."""

from __future__ import annotations

from typing import Any

import pytest

from gpucourse.plots import device_clock as draw
from gpucourse.recording import Recording
from gpucourse.simulator import Kernel, SimulatedDevice

H200 = {"gpu": "NVIDIA H200", "date": "2026-12-01T00:00:00", "torch": "2.11.0"}
UNKNOWN = {**H200, "gpu": "Some New GPU"}


def _recording(data: dict[str, Any], provenance: dict[str, Any] = H200) -> Recording:
    return Recording(name="example", data=data, provenance=provenance)


def _clocks(wall_ms: float, provenance: dict[str, Any] = H200) -> Recording:
    rows = {}
    for n in (256, 2048, 8192):
        row = {"n": n, "launches": 1, "wall_ms": wall_ms, "waited_ms": n / 500, "pair_ms": n / 510}
        rates = {f"{name}_tflops": 2 * n**3 / row[f"{name}_ms"] / 1e9 for name in ("wall", "waited", "pair")}
        rows[f"n{n}"] = {**row, **rates}
    return _recording({"rows": rows}, provenance)


# --- lanes


def _history() -> SimulatedDevice:
    device = SimulatedDevice(launch_us=8.0, record_us=1.0)
    device.spin(20.0)
    event = device.Event(name="mark")
    event.record()
    device.launch(Kernel(duration_us=40.0, name="product"))
    device.synchronize()
    return device


def test_lanes_list_every_span_and_every_timer() -> None:
    device = _history()
    chart = draw.lanes(device.history, {"host clock": (0.0, 17.0)}, caption="c", alt="a")
    assert len(chart.rows) == len(device.history) + 1
    assert chart.rows[-1] == ("timer", "reading", "host clock", "0", "17")
    assert ("stream 0", "kernel", "product", "28", "68") in [tuple(row) for row in chart.rows]


def test_lanes_write_each_timers_reading_into_the_picture() -> None:
    chart = draw.lanes(_history().history, {"host clock": (0.0, 17.0)}, caption="c", alt="a")
    texts = [text.get_text() for text in chart.fig.axes[0].texts]
    assert "17.0\N{NO-BREAK SPACE}µs" in texts
    labels = [label.get_text() for label in chart.fig.axes[0].get_yticklabels()]
    assert labels == ["host", "stream 0", "host clock"]
    assert "<svg" in chart._repr_html_()


def test_lanes_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="history is empty"):
        draw.lanes([], {}, caption="c", alt="a")


# --- three clocks


def test_a_rate_above_the_cards_limit_is_called_impossible_and_one_below_is_not() -> None:
    chart = draw.achieved_rates(_clocks(wall_ms=0.02))
    assert [row[-1] for row in chart.rows] == ["possible", "impossible", "impossible"]
    assert all(row[-1] == "possible" for row in draw.achieved_rates(_clocks(wall_ms=1e3)).rows)


def test_a_gpu_without_a_record_gets_no_limit_and_no_judgement() -> None:
    chart = draw.achieved_rates(_clocks(wall_ms=0.02, provenance=UNKNOWN))
    assert {row[-1] for row in chart.rows} == {"limit unavailable for Some New GPU"}
    assert not any("limit" in text.get_text() for text in chart.fig.axes[0].texts)


def test_the_clocks_table_gives_each_reading_with_its_unit() -> None:
    row = draw.achieved_rates(_clocks(wall_ms=0.02)).rows[1]
    assert row[0] == "2,048"
    assert row[2] == "20.0\N{NO-BREAK SPACE}µs"
    assert row[5] == "859.0 TFLOP/s"  # 2 * 2048**3 / 20 µs


# --- waits and first calls


def test_where_to_wait_keeps_the_refusal_as_text() -> None:
    keys = (
        "pair",
        "host_waited",
        "host_behind_others",
        "pair_behind_others",
        "wait_before_end",
        "pair_around_a_pause",
    )
    data = {f"{key}_us": 350.0 for key in keys} | {"read_at_once": "RuntimeError: not completed"}
    shown = draw.where_to_wait(_recording(data))
    assert len(shown.rows) == 7
    assert shown.rows[-1][1] == "RuntimeError: not completed"
    assert shown.rows[0][1] == "350.0\N{NO-BREAK SPACE}µs"
    assert "recorded on NVIDIA H200" in repr(shown)
    assert "<caption>" in shown._repr_html_()


def test_first_calls_say_where_allocations_were_not_counted() -> None:
    calls = [
        {"call": "torch.zeros(1, device='cuda')", "ms": 900.0, "driver_allocations": None},
        {"call": "x @ x, fp32, call 1", "ms": 30.0, "driver_allocations": 2},
        {"call": "x @ x, fp32, call 2", "ms": 0.4, "driver_allocations": 0},
    ]
    chart = draw.first_calls(_recording({"calls": calls}))
    assert [row[2] for row in chart.rows] == ["not counted", 2, 0]
    colours = [patch.get_facecolor() for patch in chart.fig.axes[0].patches]
    assert colours[0] == colours[1] != colours[2]  # first calls stand out


def test_a_call_waits_when_it_held_the_host_for_most_of_the_pending_work() -> None:
    calls = [
        {"call": "x.sum()", "warnings": 0, "host_ms": 0.02},
        {"call": "x.sum().item()", "warnings": 1, "host_ms": 10.1},
    ]
    shown = draw.hidden_waits(_recording({"pending_ms": 10.0, "calls": calls}))
    assert [row[-1] for row in shown.rows] == ["goes on", "waits"]
    assert [row[1] for row in shown.rows] == ["–", "1 ×"]


# --- short kernels


def _ways(**extra: Any) -> Recording:
    def way(plain: float, kernel: float | None) -> dict[str, Any]:
        return {"plain_us": plain, "profiled_us": plain + 0.5, "kernel_us": kernel, "period_us": kernel}

    row = {
        "pair_idle": way(18.0, 1.0),
        "pair_spin": way(3.0, None),
        "spin_20": way(1.7, 1.0),
        "graph_20": way(1.1, 1.0),
        "graph_40": way(1.05, 0.9),
        "time_cuda": {"plain_us": 1.0, "profiled_us": 1.1, "kernel_us": 1.0},
        "kernels_a_call": 1,
        **extra,
    }
    return _recording({"rows": {"add_1Ki_fp32": row}})


def _cells(shown: draw.Readings) -> dict[str, str]:
    """Give the one kernel's column by way."""
    assert shown.header == ("Way", "add 1 Ki fp32")
    return {row[0]: row[1] for row in shown.rows}


def test_ways_give_the_reading_and_the_profilers_time_last() -> None:
    shown = draw.ways(_ways())
    assert _cells(shown)["pair, idle queue"] == "18.0\N{NO-BREAK SPACE}µs"
    assert shown.rows[-1] == ("profiler, in the graph", "900.0\N{NO-BREAK SPACE}ns")


def test_ways_against_the_profiler_are_differences_of_the_same_launches() -> None:
    shown = draw.ways(_ways(), against="kernel_us")
    assert "µs" in shown.caption
    cells = _cells(shown)
    assert cells["pair, idle queue"] == "+17.50"
    assert cells["pair, spin"] == "unavailable"
    assert cells["20 calls, spin"] == "+1.20"


def test_a_reading_below_the_profilers_carries_a_minus_sign() -> None:
    short = {"plain_us": 0.8, "profiled_us": 0.75, "kernel_us": 1.0}
    cells = _cells(draw.ways(_ways(time_cuda=short), against="kernel_us"))
    assert cells["time_cuda"] == "\N{MINUS SIGN}0.25"


def test_a_timer_that_cannot_be_imported_is_left_out() -> None:
    assert "do_bench (cold)" not in _cells(draw.ways(_ways()))
    with_it = _ways(do_bench={"plain_us": 4.0, "profiled_us": 4.0, "kernel_us": 1.5})
    assert "do_bench (cold)" in _cells(draw.ways(with_it))
    assert "do_bench (cold)" not in _cells(draw.ways(with_it, against="period_us"))


def test_a_way_measured_for_some_kernels_only_says_so_for_the_others() -> None:
    both = {"add_1Ki_fp32": _ways()["rows"]["add_1Ki_fp32"]}
    both["add_1Mi_fp32"] = {"graph_40": both["add_1Ki_fp32"]["graph_40"]}
    shown = draw.ways(_recording({"rows": both}))
    assert shown.rows[0][2] == "not measured"


def test_ways_against_something_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel_us"):
        draw.ways(_ways(), against="kernel")


@pytest.mark.parametrize("kernel_us", [0.9, None])
def test_readings_per_call_draw_the_profilers_line_only_where_it_was_recorded(
    kernel_us: float | None,
) -> None:
    data = {
        "counts": [1, 2, 5, 10, 20],
        "spin_us": [3.0, 2.4, 2.0, 1.8, 1.7],
        "graph_us": [2.5, 1.8, 1.4, 1.2, 1.1],
        "idle_us": 18.0,
        "kernel_us": kernel_us,
    }
    chart = draw.readings_per_call(_recording(data))
    assert tuple(chart.rows[0]) == (1, "3.00", "2.50")
    named = any("profiler" in text.get_text() for text in chart.fig.axes[0].texts)
    assert named is (kernel_us is not None)


def test_the_instruments_table_keeps_device_time_and_elapsed_time_apart() -> None:
    timing = {"median_ms": 0.001, "elapsed_ms": 0.018, "host_ms": 0.006, "launch_bound": True}
    shown = draw.instrument(_recording({"add_1Ki": timing}))
    assert shown.rows[0] == (
        "add, 1 Ki",
        "1.00\N{NO-BREAK SPACE}µs",
        "18.0\N{NO-BREAK SPACE}µs",
        "6.00\N{NO-BREAK SPACE}µs",
        "launches",
    )


def test_the_clock_speeds_carry_their_unit() -> None:
    data = {"first_mhz": 345.0, "rested_median_mhz": 1980.0, "after_work_mhz": 1755.4}
    assert [row[1] for row in draw.clock_speeds(_recording(data)).rows] == [
        "345 MHz",
        "1,980 MHz",
        "1,755 MHz",
    ]


def test_no_text_in_a_chart_is_black_which_a_dark_page_would_swallow() -> None:
    from matplotlib.text import Text

    data = {"counts": [1, 2, 5, 10, 20], "spin_us": [3.0] * 5, "graph_us": [2.0] * 5, "idle_us": 18.0}
    calls = [{"call": "x @ x, fp32, call 1", "ms": 30.0, "driver_allocations": 2}]
    charts = [
        draw.lanes(_history().history, {"host clock": (0.0, 17.0)}, caption="c", alt="a"),
        draw.achieved_rates(_clocks(wall_ms=0.02)),
        draw.readings_per_call(_recording({**data, "kernel_us": 0.9})),
        draw.first_calls(_recording({"calls": calls})),
    ]
    for chart in charts:
        black = [
            text.get_text()
            for text in chart.fig.findobj(Text)
            if text.get_text() and text.get_color() in ("black", "k", "#000000")
        ]
        assert black == []
