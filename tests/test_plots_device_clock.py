"""The charts and tables of the timing chapter show what was recorded, and say what was not."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from gpucourse import hardware, plots, recording
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


def _cells(shown: plots.Table) -> dict[str, str]:
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
        "6\N{NO-BREAK SPACE}%",
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


# --- the timers held against the profiler


def _row(truth: float | None, error: float, spread: float = 0.0) -> dict[str, Any]:
    return {"truth_us": truth, "error_us": error, "truth_spread_us": spread}


@pytest.mark.parametrize(
    ("row", "verdict", "ratio"),
    [
        (_row(1.0, 0.4), "within", 1.0),
        (_row(19.9, -0.5), "outside", -1.25),
        (_row(20.0, 0.6), "within", 1.0),
        (_row(100.0, -3.3), "outside", -1.1),
        (_row(100.0, 50.0, spread=3.1), "undecided", 50 / 3),
        (_row(None, 0.0), "no record", None),
    ],
)
def test_a_reading_is_judged_by_the_goal_of_its_length_unless_its_truth_moves(
    row: dict[str, Any], verdict: str, ratio: float | None
) -> None:
    found = draw.judgement(row)
    assert found[0] == verdict
    assert found[1] == (None if ratio is None else pytest.approx(ratio))


def test_the_peers_chart_counts_only_what_is_decided_and_shows_the_rest_hollow() -> None:
    cases = {
        "add": {"methods": {"time_cuda": _row(1.0, 0.1), "one event pair": _row(1.0, 20.0)}},
        "product": {
            "methods": {"time_cuda": _row(100.0, -4.0, spread=9.0), "one event pair": _row(None, 0.0)}
        },
    }
    cases["product"]["methods"]["time_cuda"] |= {
        "profiling_us": 1.65,
        "same_launches": {"events_us": [100.2, 101.0, 99.5], "records_us": [100.0, 100.9, 99.8]},
    }
    chart = draw.peers(_recording({"cases": cases}))
    assert chart.header[:3] == ("Call", "time_cuda", "one event pair")
    assert chart.rows[0][1] == "1.00\N{NO-BREAK SPACE}µs +0.10\N{NO-BREAK SPACE}µs"
    assert chart.rows[0][2].endswith("(outside)")
    assert chart.rows[1][1] == "100.0\N{NO-BREAK SPACE}µs \N{MINUS SIGN}4.0\N{NO-BREAK SPACE}% (undecided)"
    assert chart.rows[1][2] == "no complete record"
    assert chart.rows[1][3:] == ("9.00", "+0.10", "+1.65")
    assert chart.rows[0][3:] == ("0.00", "unavailable", "unavailable")
    assert "time_cuda: 1 of 1" in chart.caption
    dots = chart.fig.axes[0].lines
    assert [dot.get_markerfacecolor() == "none" for dot in dots] == [False, True, False]
    assert "<svg" in chart._repr_html_()


# --- what the chapter says of its recordings: a re-recording that contradicts a sentence fails here

NAMES = (
    "night_log",
    "three_clocks",
    "opening_example",
    "where_to_wait",
    "first_calls",
    "clock_after_rest",
    "hidden_waits",
    "launches_between",
    "queue_depth",
    "short_kernels",
    "profiled_process",
    "by_the_instrument",
    "other_addresses",
    "kernels_on_the_roof",
    "by_torch_benchmark",
    "timing_vs_peers",
)
PEAK = hardware.device("H200").peak_flops("fp32") / 1e12
CHAPTER = (Path(__file__).parents[1] / "book" / "04_device_clock.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rec() -> dict[str, Recording]:
    return {name: recording.load(name) for name in NAMES}


def test_no_measured_number_of_the_prose_is_typed() -> None:
    prose = re.sub(r"```.*?```|\{rec\}`[^`]*`", "", CHAPTER, flags=re.DOTALL)
    typed = set(re.findall(r"\d+\.\d+ (?:µs|ms|GB/s|TB/s|TFLOP/s|MHz|%)", prose))
    assert typed == {
        "13.9 ms",
        "4.8 TB/s",
        "0.1 µs",
        "0.2 ms",
        "0.4 µs",
        "0.5 µs",
    }  # arithmetic, datasheet, time_cuda's own limits and goals


def test_the_log_is_impossible_without_the_wait_and_plausible_with_it(rec: dict[str, Recording]) -> None:
    night = rec["night_log"]
    assert night["logged_tflops"] > 2 * PEAK
    assert 0.4 * PEAK < night["with_item_tflops"] < PEAK
    assert night["logged_ms"] + night["still_running_ms"] == pytest.approx(night["with_item_ms"], rel=0.05)
    assert 12000 / night["with_item_mtokens_per_s"] / 3600 > 8  # the window


def test_the_unsynchronized_clock_follows_the_host_and_the_other_two_agree(rec: dict[str, Recording]) -> None:
    rows = rec["three_clocks"]["rows"]
    walls = [row["wall_ms"] for row in rows.values()]
    assert max(walls) < 4 * min(walls)  # while the arithmetic grows by 32,768
    assert {row["launches"] for row in rows.values()} <= {1, 2}
    assert rows["n256"]["wall_tflops"] < PEAK < rows["n2048"]["wall_tflops"]
    assert rows["n8192"]["waited_ms"] == pytest.approx(rows["n8192"]["pair_ms"], rel=0.02)
    case = rec["timing_vs_peers"]["cases"]["matmul 1024 fp32"]["methods"]["one event pair"]
    assert rows["n1024"]["pair_ms"] * 1e3 > 1.3 * case["truth_us"]


def test_the_wait_costs_where_the_chapter_says_that_it_does(rec: dict[str, Recording]) -> None:
    waits = rec["where_to_wait"]
    assert waits["pair_behind_others_us"] < 0.95 * waits["pair_us"]
    assert waits["wait_before_end_us"] > waits["pair_us"] + 10
    assert waits["host_behind_others_us"] > waits["pair_behind_others_us"] + 1000
    assert waits["pair_around_a_pause_us"] > 2 * waits["pair_behind_others_us"] + 4500
    assert waits["read_at_once"].startswith("RuntimeError")
    assert waits["pair_us"] > waits["host_waited_us"]  # where the second should hold more
    assert "after the way with the pause" in draw.where_to_wait(waits).caption
    turned = _recording({**waits.data, "pair_us": waits["host_waited_us"] - 1})
    assert "pause" not in draw.where_to_wait(turned).caption
    assert rec["opening_example"]["ms"] * 1e3 == pytest.approx(waits["pair_behind_others_us"], rel=0.03)


def test_a_new_width_costs_little_beside_new_code(rec: dict[str, Recording]) -> None:
    calls = [call["ms"] for call in rec["first_calls"]["calls"]]
    assert calls[2] > 50 * calls[6]
    assert calls[7] < 0.1 * min(calls[2], calls[10], calls[13])
    rest = rec["clock_after_rest"]
    assert rest["after_work_mhz"] < 0.9 * rest["rested_median_mhz"]


def test_the_two_detectors_of_hidden_waits_agree_except_on_synchronize(rec: dict[str, Recording]) -> None:
    hidden = rec["hidden_waits"]
    waited = {row["call"] for row in hidden["calls"] if row["host_ms"] > hidden["pending_ms"] / 2}
    warned = {row["call"] for row in hidden["calls"] if row["warnings"]}
    assert waited - warned == {"torch.cuda.synchronize()"}
    assert warned < waited
    assert (
        waited & {"x.sum()", "torch.where(mask, x, 0.0)", "x[index]", "torch.full((), 0.5, device='cuda')"}
        == set()
    )


def test_the_readings_of_a_tiny_kernel_fall_as_the_account_says(rec: dict[str, Recording]) -> None:
    found = rec["launches_between"]
    assert found["idle_us"] > 10 * found["kernel_us"]
    assert found["spin_us"][0] - found["spin_us"][-1] == pytest.approx(found["empty_spin_us"], abs=0.3)
    order = [found[key] for key in ("kernel_us", "slope_us", "start_to_start_us")]
    assert order == sorted(order)
    assert found["graph_us"][-1] < found["spin_us"][-1] < found["spin_us"][0] < found["idle_us"]
    depth = rec["queue_depth"]
    assert depth["free_launches"] > 500
    assert depth["longest_ms"] > 50


def test_what_a_way_reads_too_long_is_a_constant_divided_by_its_calls(rec: dict[str, Recording]) -> None:
    rows = rec["short_kernels"]["rows"]
    off = [
        rows[case]["pair_spin"]["profiled_us"] - rows[case]["pair_spin"]["kernel_us"]
        for case in ("add_1Ki_fp32", "matmul_2048_bf16", "matmul_2048_fp32")
    ]
    assert max(off) - min(off) < 0.4
    add = rows["add_1Ki_fp32"]
    assert off[0] > add["pair_spin"]["kernel_us"]
    fixed = {
        way: calls * (add[way]["profiled_us"] - add[way]["period_us"])
        for way, calls in (("pair_spin", 1), ("spin_20", 20), ("graph_20", 20), ("graph_40", 40))
    }
    assert fixed["spin_20"] == pytest.approx(fixed["pair_spin"], abs=0.6)
    assert fixed["graph_40"] == pytest.approx(fixed["graph_20"], abs=0.6)
    product = rows["matmul_2048_fp32"]
    rest = product["time_cuda"]["profiled_us"] - product["time_cuda"]["kernel_us"]
    gap = product["spin_20"]["period_us"] - product["spin_20"]["kernel_us"]
    assert 0.5 * rest < gap < rest + 0.2
    assert rows["add_1Mi_fp32"]["do_bench"]["kernel_us"] > 1.3 * rows["add_1Mi_fp32"]["graph_20"]["kernel_us"]


def test_a_process_that_has_used_the_profiler_launches_slowly_and_stays_slow(
    rec: dict[str, Recording],
) -> None:
    found = rec["profiled_process"]
    for key in ("launch_us", "pair_us"):
        assert found["inside"][key] > 1.5 * found["before"][key]
        assert found["after"][key] > 1.2 * found["before"][key]
    loop_us = rec["by_torch_benchmark"]["add_1Ki"]["median_us"]
    assert loop_us == pytest.approx(found["after"]["launch_us"], rel=0.25)


def test_the_instrument_accounts_for_the_night(rec: dict[str, Recording]) -> None:
    timed = rec["by_the_instrument"]
    assert 12 * timed["block_8192_tokens"]["median_ms"] == pytest.approx(
        rec["night_log"]["with_item_ms"], rel=0.05
    )
    assert timed["block_1_token"]["launch_bound"]
    assert not timed["block_8192_tokens"]["launch_bound"]
    product_us = rec["by_torch_benchmark"]["matmul_2048"]["median_us"]
    assert product_us == pytest.approx(timed["matmul_2048"]["median_ms"] * 1e3, rel=0.01)


def test_one_addition_has_two_readings_and_the_places_of_its_inputs_are_not_why(
    rec: dict[str, Recording],
) -> None:
    short = rec["short_kernels"]["rows"]["add_1Ki_fp32"]
    timed, elsewhere = rec["by_the_instrument"]["add_1Ki"], rec["kernels_on_the_roof"]["points"][0]["timing"]
    low_us, again_us = timed["median_ms"] * 1e3, elsewhere["median_ms"] * 1e3
    assert low_us < short["graph_40"]["kernel_us"]  # "a period below the span"
    readings = rec["timing_vs_peers"]["cases"]["add 1 Ki fp32"]["methods"]["time_cuda"]["readings_us"]
    high_us = (
        short["time_cuda"]["plain_us"],
        statistics.median(readings),
        *rec["other_addresses"]["median_us"],
    )
    assert len(high_us) == 14
    assert max(high_us) - min(high_us) < 0.03  # "all of them the upper reading"
    assert abs(low_us - again_us) < 0.03
    assert min(high_us) - max(low_us, again_us) > 5 * timed["iqr_ms"] * 1e3
    assert elsewhere["elapsed_ms"] < 0.5 * timed["elapsed_ms"]  # no profiler has slowed that process
    assert (
        short["graph_40"]["kernel_us"] - short["spin_20"]["kernel_us"] > 0.1
    )  # the span has two lengths, too


def _own(cases: Any) -> dict[tuple[str, str], Any]:
    ways = ("time_cuda", "time_cuda, cold")
    return {(name, way): case["methods"][way] for name, case in cases.items() for way in ways}


SOFTMAX, SMALL, LARGE = "softmax 4096 x 4096 fp32", "matmul 256 bf16", "matmul 8192 bf16"


def test_the_instrument_misses_where_the_chapter_says_and_nowhere_else(rec: dict[str, Recording]) -> None:
    own = _own(rec["timing_vs_peers"]["cases"])
    missed = {key for key, row in own.items() if draw.judgement(row)[0] == "outside"}
    assert missed == {(SOFTMAX, "time_cuda"), (SOFTMAX, "time_cuda, cold"), (SMALL, "time_cuda, cold")}
    short = [row["error_us"] > 0 for row in own.values() if row["truth_us"] < draw.LONG_US]
    assert 0.8 * len(short) < sum(short) <= len(short)  # "on most short calls"


def test_each_miss_has_the_cause_that_the_chapter_names(rec: dict[str, Recording]) -> None:
    cases = rec["timing_vs_peers"]["cases"]
    own = _own(cases)
    for way in (
        "time_cuda",
        "time_cuda, cold",
    ):  # what the profiler adds accounts for all but a third of a µs
        row = own[SOFTMAX, way]
        assert abs(row["error_us"] + row["profiling_us"]) < 0.35
    methods = cases[SOFTMAX]["methods"]
    gap_us = statistics.median(methods["torch.utils.benchmark"]["readings_us"]) - statistics.median(
        methods["time_cuda"]["readings_us"]
    )
    assert gap_us == pytest.approx(
        methods["time_cuda"]["profiling_us"], abs=0.2
    )  # "hides what watching adds"
    row = own[SMALL, "time_cuda, cold"]
    grown_us = statistics.median(row["same_launches"]["records_us"])
    assert grown_us - row["truth_us"] > draw.GOAL_US  # the gap alone is more than the goal
    assert grown_us == pytest.approx(row["truth_us"] + row["error_us"], abs=0.1)
    low, high = cases[LARGE]["mhz"]
    for way in ("time_cuda", "time_cuda, cold"):
        row = own[LARGE, way]
        assert draw.judgement(row)[0] == "undecided"
        assert row["error_us"] / row["truth_us"] < high / low - 1
        assert row["profiling_us"] < -0.5 * row["error_us"]  # "watched launches are faster here"


def test_a_default_call_on_a_kernel_under_10_ms_returns_within_a_second(rec: dict[str, Recording]) -> None:
    cases = rec["timing_vs_peers"]["cases"]
    quick = {
        name: case["default_call_s"]
        for name, case in cases.items()
        if case["methods"]["time_cuda"]["truth_us"] < 10_000
    }
    assert len(quick) == 16
    assert max(quick.values()) < 1
    assert max(quick, key=quick.__getitem__) == LARGE  # "the longest, for this product"
    assert next(iter(cases)) == "add 1 Ki fp32"  # the first call of the process
    assert quick["add 1 Ki fp32"] < 0.5


def test_events_and_record_agree_on_the_very_launches_that_were_timed(rec: dict[str, Recording]) -> None:
    looks, apart = 0, 0
    for name, case in rec["timing_vs_peers"]["cases"].items():
        for way in ("time_cuda", "time_cuda, cold"):
            row = case["methods"][way]
            off = draw.same_launches_us(row)
            assert off is not None, name
            assert abs(off) <= max(0.5, 0.02 * row["truth_us"]), (name, way)
            same = row["same_launches"]
            for events, records in zip(same["events_us"], same["records_us"], strict=True):
                looks += 1
                apart += abs(events - records) > max(0.5, 0.02 * row["truth_us"])
    assert (looks, apart) == (180, 0)  # "in none of the 180 looks"


def test_the_other_timers_err_as_the_chapter_says(rec: dict[str, Recording]) -> None:
    cases = rec["timing_vs_peers"]["cases"].values()

    def within(way: str) -> float:
        verdicts = [draw.judgement(case["methods"][way])[0] for case in cases]
        return verdicts.count("within") / (len(verdicts) - verdicts.count("undecided"))

    others = ("do_bench", "torch.utils.benchmark", "one event pair")
    assert within("time_cuda") > within("do_bench_cudagraph") > max(map(within, others))
    marks_us = rec["timing_vs_peers"]["cases"]["add 1 Mi fp32"]["methods"]["do_bench"]["error_us"]
    assert 1.0 < marks_us < 4.0


def test_only_fp32_ends_at_the_datasheets_figure_when_the_clock_is_at_its_highest() -> None:
    device = hardware.device("H200")
    assert device.peak_flops_at_clock("fp32") == pytest.approx(device.peak_flops("fp32"), rel=0.01)
    assert device.peak_flops_at_clock("bf16") > 1.05 * device.peak_flops("bf16")


def test_the_pair_on_an_idle_queue_was_read_on_a_host_that_the_profiler_had_slowed(
    rec: dict[str, Recording],
) -> None:
    process, idle_us = rec["profiled_process"], rec["launches_between"]["idle_us"]
    assert idle_us > 1.2 * process["before"]["pair_us"]
    assert idle_us == pytest.approx(process["after"]["pair_us"], rel=0.1)


def test_the_second_table_of_ways_says_that_its_readings_were_watched(rec: dict[str, Recording]) -> None:
    idle = rec["short_kernels"]["rows"]["add_1Ki_fp32"]["pair_idle"]
    assert idle["profiled_us"] - idle["kernel_us"] > idle["plain_us"]  # it would contradict the first table
    assert "while nothing watches" in draw.ways(rec["short_kernels"]).caption
    for against in ("kernel_us", "period_us"):
        assert "under the profiler" in draw.ways(rec["short_kernels"], against=against).caption


def test_the_places_that_the_prose_counts_to_are_the_calls_that_it_names(rec: dict[str, Recording]) -> None:
    calls = [call["call"] for call in rec["first_calls"]["calls"]]
    assert calls[0] == "torch.zeros(1, device='cuda')"
    assert [calls[place][-6:] for place in (2, 6, 7, 9, 10, 13)] == [f"call {k}" for k in (1, 5, 1, 3, 1, 1)]
    assert [word in calls[place] for place, word in ((7, "1,999"), (10, "fp16"), (13, "softmax"))] == [
        True
    ] * 3
    assert [rec["launches_between"]["counts"][place] for place in (0, 7)] == [1, 200]
    assert rec["kernels_on_the_roof"]["points"][0]["name"] == "add, 1 Ki"
