"""The charts of the chapter on kernels draw what they were given, and their tables say it in numbers."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from gpucourse import recording
from gpucourse.kernels import KernelTrace
from gpucourse.plots import Chart
from gpucourse.plots import kernels as plots


def kernel(op: str, start_us: float, duration_us: float, **more: Any) -> dict[str, Any]:
    return {
        "name": f"void at::native::{op}_kernel<float>(int)",
        "op": f"aten::{op}",
        "shapes": [[8, 768]],
        "start_us": start_us,
        "duration_us": duration_us,
        "stream": 7,
        "grid": [6, 2, 1],
        "block": [96, 1, 1],
        **more,
    }


def trace_of(*kernels: dict[str, Any]) -> dict[str, Any]:
    span = max((k["start_us"] + k["duration_us"] for k in kernels), default=0.0)
    busy = sum(k["duration_us"] for k in kernels)
    return {"kernels": list(kernels), "span_us": span, "busy_us": busy, "launches": len(kernels)}


def cells(chart: Chart) -> list[list[str]]:
    return [[str(cell) for cell in row] for row in chart.rows]


def point(rows: int, blocks: int, time_us: float, name: str = "tilesize64x64", **more: Any) -> dict[str, Any]:
    return {"rows": rows, "kernel": f"sm80_xmma_gemm_{name}", "blocks": blocks, "time_us": time_us, **more}


# --- one launch ------------------------------------------------------------------------------------------


def test_hierarchy_counts_blocks_warps_and_threads() -> None:
    chart = plots.hierarchy(kernel("mm", 0, 1), 5)
    table = {row[0]: row[2] for row in cells(chart)}
    assert table["blocks"] == "12"
    assert table["blocks a multiprocessor, dealt evenly"] == "3"
    assert table["warps a block"] == "3"
    assert table["threads in the launch"] == "1,152"


def test_a_partly_filled_warp_counts_whole() -> None:
    assert plots.warps((33, 1, 1)) == 2
    assert plots.warps((32, 1, 1)) == 1
    assert plots.warps((16, 16, 2)) == 16


def test_hierarchy_draws_every_block_up_to_a_thousand_and_says_when_not() -> None:
    few = plots.hierarchy(kernel("mm", 0, 1, grid=[30, 20, 1]), 132)
    many = plots.hierarchy(kernel("add", 0, 1, grid=[98304, 1, 1]), 132)
    drawn = [sum(len(c.get_paths()) for c in chart.fig.axes[0].collections[:2]) for chart in (few, many)]
    assert drawn == [600, 1000]
    texts = [text.get_text() for text in many.fig.axes[0].texts]
    assert "1,000 of 98,304 drawn" in texts
    assert not any("drawn" in text.get_text() for text in few.fig.axes[0].texts)


def test_hierarchy_refuses_a_copy_and_a_device_without_multiprocessors() -> None:
    with pytest.raises(ValueError, match="no grid or block"):
        plots.hierarchy(kernel("copy_", 0, 1, grid=None, block=None), 132)
    with pytest.raises(ValueError, match="at least one multiprocessor, found 0"):
        plots.hierarchy(kernel("mm", 0, 1), 0)


# --- a trace ---------------------------------------------------------------------------------------------


def test_waterfall_lists_each_kernel_from_its_own_traces_start() -> None:
    first = trace_of(kernel("mean", 100.0, 4.0), kernel("sub", 107.5, 2.0))
    second = trace_of(kernel("native_layer_norm", 900.0, 3.0))
    chart = plots.waterfall({"chain": first, "library": second}, caption="c")
    assert [row[0] for row in cells(chart)] == ["chain, 1", "chain, 2", "library, 1"]
    assert [row[3] for row in cells(chart)] == ["0.0", "7.5", "0.0"]
    assert [row[5] for row in cells(chart)] == ["6 × 2"] * 3
    lefts = [bar.get_x() for bar in chart.fig.axes[0].patches]
    assert lefts == [0.0, 7.5]


def test_charts_of_a_trace_without_kernels_say_that_nothing_was_launched() -> None:
    empty = trace_of()
    for draw in (
        lambda: plots.waterfall({"views": empty}, caption="c"),
        lambda: plots.timeline(empty, caption="c"),
        lambda: plots.durations(empty, caption="c"),
    ):
        with pytest.raises(ValueError, match="nothing was launched"):
            draw()


def test_timeline_draws_each_kernel_on_its_own_lane_and_on_the_common_one() -> None:
    chart = plots.timeline(
        trace_of(kernel("addmm", 0, 50), kernel("gelu", 60, 10), kernel("_foreach_add_", 75, 5)), caption="c"
    )
    axes = chart.fig.axes[0]
    lanes = [label.get_text() for label in axes.get_yticklabels()]
    assert lanes == ["any kernel", "product", "optimizer", "element-wise and reductions"]
    assert len(axes.patches) == 6
    assert "3 kernels over 80.0 µs, busy for 65.0 µs" in chart.alt


GAPS = [
    {"start_us": 50.0, "duration_us": 10.0, "cause": "host", "before": 0, "after": 1},
    {"start_us": 70.0, "duration_us": 5.0, "cause": "copy", "before": 1, "after": 2},
    {"start_us": 80.0, "duration_us": 2.0, "cause": "host", "before": 2, "after": 3},
]


def test_timeline_gives_each_cause_of_idle_time_its_own_lane_and_sums_it_in_words() -> None:
    whole = trace_of(
        kernel("addmm", 0, 50), kernel("gelu", 60, 10), kernel("add", 75, 5), kernel("add", 82, 5)
    )
    chart = plots.timeline({**whole, "gaps": GAPS}, caption="c")
    axes = chart.fig.axes[0]
    lanes = [label.get_text() for label in axes.get_yticklabels()]
    assert lanes[-2:] == ["idle: host was late", "idle: host waited for a copy"]
    drawn = [(bar.get_x(), bar.get_width()) for bar in axes.patches[-3:]]
    assert drawn == [(50.0, 10.0), (70.0, 5.0), (80.0, 2.0)]
    assert "Idle: host was late 12.0 µs, host waited for a copy 5.0 µs" in chart.alt
    assert cells(chart)[-2:] == [
        ["", "idle, host was late", "2 gaps", "", "12.0", "none", "none"],
        ["", "idle, host waited for a copy", "1 gap", "", "5.0", "none", "none"],
    ]


def test_waterfall_leads_a_line_over_each_idle_time_to_the_kernel_that_ended_it() -> None:
    whole = trace_of(
        kernel("addmm", 0, 50), kernel("gelu", 60, 10), kernel("add", 75, 5), kernel("add", 82, 5)
    )
    chart = plots.waterfall({"w": {**whole, "gaps": GAPS}}, caption="c")
    axes = chart.fig.axes[0]
    assert [tuple(line.get_xdata()) for line in axes.lines] == [(50.0, 60.0), (70.0, 75.0), (80.0, 82.0)]
    assert [line.get_ydata()[0] for line in axes.lines] == [1, 2, 3]
    strokes = [line.get_linestyle() for line in axes.lines]
    assert strokes[0] == strokes[2] != strokes[1], "causes are told apart without colour"
    words = [text.get_text() for text in axes.texts]
    assert "idle: host was late 12.0 µs, host waited for a copy 5.0 µs" in words


def test_every_cause_that_the_instrument_gives_can_be_drawn() -> None:
    from gpucourse.kernels import GAP_CAUSES

    gaps = [{**GAPS[0], "cause": cause} for cause in (*GAP_CAUSES, "unknown")]
    whole = {**trace_of(kernel("add", 0, 50), kernel("add", 60, 5)), "gaps": gaps}
    assert len(plots.idle_by_cause(whole)) == len(GAP_CAUSES) + 1
    assert len(cells(plots.timeline(whole, caption="c"))) == 2 + len(GAP_CAUSES) + 1


def test_durations_sum_by_operation_and_the_shares_make_a_whole() -> None:
    chart = plots.durations(
        trace_of(kernel("mm", 0, 30), kernel("add", 40, 10), kernel("mm", 60, 40), kernel("sum", 110, 20)),
        caption="c",
        most=2,
    )
    assert cells(chart)[0] == ["mm", "2", "70.0", "70.0"]
    assert math.isclose(sum(float(row[3]) for row in cells(chart)), 100.0)
    labels = [label.get_text() for label in chart.fig.axes[0].get_yticklabels()]
    assert labels == ["mm", "sum", "1 others"]


def test_families_are_told_apart_by_whole_names_of_products() -> None:
    kinds = {
        op: plots.families(kernel(op, 0, 1))[0]
        for op in ("mm", "addmm", "sum", "_efficient_attention_forward")
    }
    assert kinds == {
        "mm": "product",
        "addmm": "product",
        "sum": "element-wise and reductions",
        "_efficient_attention_forward": "attention",
    }
    assert plots.families(kernel("native_layer_norm_backward", 0, 1))[0] == "normalization"
    assert plots.families(kernel("_foreach_addcdiv_", 0, 1))[0] == "optimizer"


# --- the sweeps ------------------------------------------------------------------------------------------


def test_rows_sweep_draws_both_curves_and_keeps_the_profilers_span_in_the_table() -> None:
    sweep = [
        {"rows": 8, "launches": 9, "busy_us": 12.0, "elapsed_us": 80.0, "traced_span_us": 300.0},
        {"rows": 65536, "launches": 9, "busy_us": 820.0, "elapsed_us": 825.0, "traced_span_us": 870.0},
    ]
    chart = plots.rows_sweep(sweep, 340.0, product="one product", caption="c")
    assert cells(chart)[0] == ["8", "9", "12.0", "80.0", "15", "300.0"]
    elapsed, busy, level = chart.fig.axes[0].lines
    assert list(elapsed.get_ydata()) == [80.0, 825.0]
    assert list(busy.get_ydata()) == [12.0, 820.0]
    assert set(level.get_ydata()) == {340.0}
    with pytest.raises(ValueError, match="at least one point"):
        plots.rows_sweep([], 1.0, product="p", caption="c")


def test_wave_steps_show_prediction_beside_measurement_and_leave_the_rest_without() -> None:
    measured = [point(64, 8, 11.0, "tilesize32x32"), point(128, 130, 20.0), point(192, 140, 39.0)]
    predicted = [
        {**measured[1], "slots": 132, "waves": 1, "predicted_us": 20.0},
        {**measured[2], "slots": 132, "waves": 2, "predicted_us": 40.0},
    ]
    chart = plots.wave_steps(predicted, measured, caption="c")
    assert cells(chart)[0][3:] == ["none", "none", "none", "11.0"]
    assert cells(chart)[2] == ["192", "xmma, tile 64 × 64", "140", "132", "2", "40.0", "39.0"]
    assert "2.5 percent" in chart.alt or "2.6 percent" in chart.alt
    stairs = [line for line in chart.fig.axes[0].lines if line.get_linewidth() == 3.0]
    assert len(stairs) == 1
    assert set(stairs[0].get_ydata()) == {20.0, 40.0}


def test_wave_steps_break_the_staircase_where_another_kernel_takes_over() -> None:
    measured = [
        point(64 * i, 100 * i, 10.0 * i, "tilesize64x64" if i != 3 else "tilesize256x128")
        for i in range(1, 6)
    ]
    predicted = [{**p, "slots": 132, "waves": 1, "predicted_us": 10.0} for p in measured]
    chart = plots.wave_steps(predicted, measured, caption="c")
    stairs = [line for line in chart.fig.axes[0].lines if line.get_linewidth() == 3.0]
    assert [len(line.get_xdata()) - 2 for line in stairs] == [2, 1, 2]


def test_wave_steps_without_any_prediction_still_draw_what_was_measured() -> None:
    chart = plots.wave_steps([], [point(64, 8, 11.0)], caption="c")
    assert "through 0 of them" in chart.alt
    assert cells(chart)[0][-1] == "11.0"
    with pytest.raises(ValueError, match="found none"):
        plots.wave_steps([], [], caption="c")


def test_tiles_are_read_from_the_names_of_the_libraries() -> None:
    assert (
        plots.tile("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize128x64x8_stage3") == "xmma, tile 128 × 64"
    )
    assert plots.tile("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(P)") == (
        "cutlass, tile 256 × 128"
    )
    assert plots.tile("void some::other_gemm<float>(int)") == "other_gemm"


def test_square_rates_count_two_operations_a_multiply_add_and_compare_with_half_the_width() -> None:
    sweep = {
        "fp32": [
            {"width": 1000, "median_ms": 0.1, "kernels": 1, "fills": 0},
            {"width": 2000, "median_ms": 0.4, "kernels": 1, "fills": 1},
        ]
    }
    chart = plots.square_rates(sweep, {"fp32": 80e12}, caption="c")
    assert cells(chart) == [
        ["fp32, 1,000", "1 + 0", "100.0", "none", "20.0", "25"],
        ["fp32, 2,000", "1 + 1", "400.0", "4.00", "40.0", "50"],
    ]


def test_square_rates_without_a_datasheet_say_unavailable_and_draw_no_peak() -> None:
    sweep = {"fp32": [{"width": 512, "median_ms": 0.1, "kernels": 1, "fills": 0}]}
    chart = plots.square_rates(sweep, None, caption="c")
    assert cells(chart)[0][-1] == "unavailable"
    assert len(chart.fig.axes[0].lines) == 1


def test_every_chart_has_a_text_for_readers_who_do_not_see_it_and_a_table_of_the_headers_width() -> None:
    one = trace_of(kernel("mm", 0, 5), kernel("add", 6, 2))
    for chart in (
        plots.hierarchy(kernel("mm", 0, 1), 132),
        plots.waterfall({"t": one}, caption="c"),
        plots.timeline(one, caption="c"),
        plots.durations(one, caption="c"),
        plots.wave_steps([], [point(64, 8, 11.0)], caption="c"),
    ):
        html = chart._repr_html_()
        assert re.search(r'<svg role="img" aria-label="[^"]{40,}"', html)
        assert "currentColor" in html
        assert all(len(row) == len(chart.header) for row in chart.rows)


def test_no_text_of_a_chart_is_black_which_the_dark_theme_would_hide() -> None:
    from matplotlib.text import Text

    one = trace_of(kernel("mm", 0, 5), kernel("add", 6, 2))
    sweep = [{"rows": 8, "launches": 9, "busy_us": 12.0, "elapsed_us": 80.0, "traced_span_us": 300.0}]
    measured = [point(128, 130, 20.0), point(192, 40, 39.0, "tilesize32x32")]
    rates = {"fp32": [{"width": 512, "median_ms": 0.1, "kernels": 1, "fills": 0}]}
    for chart in (
        plots.hierarchy(kernel("mm", 0, 1, grid=[98304, 1, 1]), 132),
        plots.waterfall({"t": one}, caption="c"),
        plots.timeline(one, caption="c"),
        plots.durations(one, caption="c"),
        plots.rows_sweep(sweep, 340.0, product="p", caption="c"),
        plots.wave_steps(
            [{**measured[0], "slots": 132, "waves": 1, "predicted_us": 20.0}], measured, caption="c"
        ),
        plots.square_rates(rates, {"fp32": 80e12}, caption="c"),
    ):
        chart.svg()  # ticks get their labels when the figure is drawn
        black = [
            text.get_text()
            for text in chart.fig.findobj(Text)
            if text.get_text() and text.get_color() in ("black", "k", "#000000")
        ]
        assert black == [], chart.caption


# --- what the chapter's prose names, held to its recordings -----------------------------------------------


def sweep_of_2048() -> dict[int, dict[str, Any]]:
    return {point["rows"]: point for point in recording.load("width_steps")["columns_2048"]}


@pytest.mark.parametrize(("first", "last", "waves"), [(1600, 2048, 1), (3456, 4224, 2), (5312, 6272, 3)])
def test_the_stretches_that_the_chapter_names_are_whole_waves_of_one_kernel(first, last, waves) -> None:
    sweep = sweep_of_2048()
    stretch = [sweep[rows] for rows in range(first, last + 1, 64)]
    assert {point["kernel"] for point in stretch} == {stretch[0]["kernel"]}
    assert {math.ceil(point["blocks"] / 132) for point in stretch} == {waves}
    times_us = [point["time_us"] for point in stretch]
    assert max(times_us) < 1.02 * min(times_us)


def test_nine_and_ten_blocks_of_a_kernel_that_holds_two_take_the_same_time() -> None:
    nine, ten = (sweep_of_2048()[rows] for rows in (4672, 4864))
    assert nine["kernel"] == ten["kernel"]
    assert [math.ceil(point["blocks"] / 132) for point in (nine, ten)] == [9, 10]
    assert nine["time_us"] == pytest.approx(ten["time_us"], rel=0.02)


def test_the_elapsed_time_of_the_chain_shows_no_slope_where_the_host_sets_the_pace() -> None:
    waited_us = recording.load("callers_wait")
    first = recording.load("chain_by_rows")["points"][0]
    assert first["rows"] == 8
    assert waited_us["rows_1024"] < 2 * waited_us["rows_8"]
    assert first["busy_us"] < 0.25 * waited_us["rows_8"]


def test_the_candidates_in_the_blocks_step_are_runs_that_its_code_really_hands_on() -> None:
    found = KernelTrace.from_dict(recording.load("block_step")["trace"]).fuse_candidates()
    runs = [tuple(op.removeprefix("aten::") for op in candidate.ops) for candidate in found]
    assert runs[0] == ("add", "native_layer_norm"), "the residual sum and the second norm"
    assert ("add", "mse_loss", "mean") in runs
    assert all(op.startswith("_foreach_") for op in runs[-1])
    assert len(runs[-1]) == 8
    assert found[0].bytes_saved == 2 * 4 * 1024 * 768 * 4
    assert found[-1].bytes_saved is None


def test_the_gap_in_the_middle_of_nonzero_is_a_copys_and_nothing_else_there_is() -> None:
    single = recording.load("single_operations")
    causes = {name: [gap["cause"] for gap in single[name]["trace"]["gaps"]] for name in ("nonzero", "sort")}
    assert causes["nonzero"].count("copy") == 1
    assert "synchronization" not in causes["nonzero"]
    assert set(causes["sort"]) == {"host"}


def test_bf16_squares_stop_gaining_before_they_lose() -> None:
    by_width = {point["width"]: point for point in recording.load("square_widths")["bf16"]}
    rates = {width: 2 * width**3 / by_width[width]["median_ms"] for width in (2048, 4096, 6144, 8192)}
    assert rates[6144] == pytest.approx(rates[4096], rel=0.03)
    assert rates[8192] < 0.97 * rates[4096]
    assert rates[4096] < 1.1 * rates[2048]


def test_every_addmm_of_the_blocks_step_is_one_kernel_and_none_is_lost() -> None:
    trace = recording.load("block_step")["trace"]
    assert trace["missing"] == 0
    assert [kernel["op"] for kernel in trace["kernels"]].count("aten::addmm") == 4


def test_the_grid_of_small_half_precision_squares_did_not_grow_with_the_width() -> None:
    by_width = {point["width"]: point for point in recording.load("square_widths")["bf16"]}
    assert by_width[512]["blocks"] <= by_width[256]["blocks"]
    assert by_width[512]["median_ms"] > 5 * 2 * 512**3 / 989e12 * 1e3
    fp32 = {point["width"]: point for point in recording.load("square_widths")["fp32"]}
    assert fp32[3072]["fills"] == 1
    assert fp32[3072]["blocks"] > 24 * 12


def test_the_places_that_the_prose_counts_to_are_the_sizes_that_it_names() -> None:
    steps = recording.load("width_steps")["columns_2048"]
    for place, rows in {6: 448, 12: 832, 31: 2048, 32: 2112, 65: 4224, 72: 4672, 75: 4864, 97: 6272}.items():
        assert steps[place]["rows"] == rows
    for points in (recording.load("square_widths")["fp32"], recording.load("square_widths")["bf16"]):
        for place, width in {0: 256, 2: 512, 4: 1024, 6: 2048, 7: 3072, 8: 4096, 9: 6144, 10: 8192}.items():
            assert points[place]["width"] == width
    chain = [kernel["op"] for kernel in recording.load("layer_norm_traces")["chain"]["kernels"]]
    assert chain[1:3] == ["aten::sub", "aten::mul"]
    assert recording.load("chain_by_rows")["points"][0]["rows"] == 8


def test_what_the_library_reaches_is_the_prose_of_the_index_three_quarters_and_more() -> None:
    squares = recording.load("square_widths")
    for precision, peak_tflops in (("fp32", 67), ("bf16", 989)):
        point = squares[precision][8]
        assert 2 * point["width"] ** 3 / point["median_ms"] / 1e9 > 0.75 * peak_tflops
