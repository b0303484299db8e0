"""The charts and tables of the chapter on moving bytes show what was recorded, and say what was not."""

from __future__ import annotations

import re
import statistics
from typing import Any

import pytest

from gpucourse.plots import moving_bytes as draw
from gpucourse.recording import Recording, load

SPACE = "\N{NO-BREAK SPACE}"


def _recording(data: dict[str, Any]) -> Recording:
    facts = {"gpu": "Some New GPU", "date": "2026-12-01T00:00:00", "torch": "2.11.0"}
    return Recording(name="example", data=data, provenance=facts)


def _texts(chart: Any, place: int = 0) -> list[str]:
    return [text.get_text() for text in chart.fig.axes[place].texts]


# --- the road


def _road(**changes: Any) -> Recording:
    levels = {
        "file_gb_s": 1.2,
        "cached_file_gb_s": 6.0,
        "host_gb_s": 9.0,
        "pageable_gb_s": 18.0,
        "pinned_gb_s": 54.9,
        "pageable_back_gb_s": 15.0,
        "pinned_back_gb_s": 55.2,
        "same_direction_gb_s": 27.5,
        "both_directions_gb_s": 50.1,
        "hbm_gb_s": 4000.0,
        "l2_gb_s": 7000.0,
    }
    link = {"generation": 5, "generation_max": 5, "width": 16, "width_max": 16}
    return _recording({**levels, "link": link, **changes})


def test_the_road_lists_each_level_and_the_nights_need() -> None:
    chart = draw.road(_road())
    table = dict(chart.rows)
    assert table["what the night needs"] == "3.3 MB/s"
    assert table["link, from pinned memory"] == "54.9 GB/s"
    assert table["HBM, read and written"] == "4,000 GB/s"
    assert table["link, by the driver"] == "PCIe generation 5, 16 lanes"
    assert len(chart.fig.axes[0].patches) == 8


def test_a_level_that_was_not_measured_is_unavailable_and_has_no_bar() -> None:
    nothing = dict.fromkeys(("generation", "generation_max", "width", "width_max"))
    chart = draw.road(_road(file_gb_s=None, link=nothing))
    table = dict(chart.rows)
    assert table["file, not in the system's cache"] == table["link, by the driver"] == "unavailable"
    assert len(chart.fig.axes[0].patches) == 7
    assert "<svg" in chart._repr_html_()


def _sets() -> list[dict[str, float]]:
    inside = [{"bytes": n * 1e6, "us": 3.0 + n / 8} for n in (8, 16, 24)]
    between = [{"bytes": n * 1e6, "us": n / 3} for n in (40, 60)]
    return [*inside, *between, *({"bytes": n * 1e6, "us": 2.0 + n / 4} for n in (130, 200, 400))]


def test_the_two_slopes_are_those_of_sets_inside_and_outside_the_l2() -> None:
    inside, outside = draw.two_slopes(_sets(), 60_000_000)
    assert inside == pytest.approx((3.0, 8000.0))
    assert outside == pytest.approx((2.0, 4000.0))
    assert draw.two_slopes(_sets()[:4], 60_000_000)[1] is None


def test_working_sets_tell_both_slopes_or_which_of_them_is_unavailable() -> None:
    chart = draw.working_sets(_recording({"rows": _sets(), "l2_bytes": 60_000_000}))
    assert "inside the L2 3.0 µs + bytes / (8.0 TB/s)" in chart.caption
    assert "outside 2.0 µs + bytes / (4.0 TB/s)" in chart.caption
    assert len(chart.rows) == 8
    few = draw.working_sets(_recording({"rows": _sets()[:4], "l2_bytes": 60_000_000}))
    assert "outside unavailable" in few.caption


def test_a_strided_read_pays_one_piece_a_float_and_no_more() -> None:
    times = [draw.strided_us(1_000_000, stride, 32, 4000.0) for stride in (1, 2, 8, 16, 64)]
    assert times == [2.0, 3.0, 9.0, 9.0, 9.0]


def test_far_apart_sets_three_predictions_beside_the_measurement() -> None:
    rows = [{"stride": stride, "us": 40.0 * stride} for stride in (1, 8, 32)]
    chart = draw.far_apart(_recording({"floats": 10**6, "rows": rows}), _road())
    assert chart.header[2:] == ("Pieces of 32 bytes", "Pieces of 64 bytes", "Pieces of 128 bytes")
    assert chart.rows[0] == ("1 floats", *(f"{us}{SPACE}µs" for us in ("40.0", "2.00", "2.00", "2.00")))
    assert chart.rows[2][2:] == (f"9.00{SPACE}µs", f"17.0{SPACE}µs", f"33.0{SPACE}µs")


# --- the link


def test_the_line_finds_start_and_bandwidth_where_the_largest_sizes_scatter() -> None:
    sizes = [2**k for k in range(10, 29)]
    times = [2.5 + size / 50e3 for size in sizes]
    times[-1] *= 1.02  # 2 % of the largest are 40 times the start
    start_us, gb_s = draw.fit_line(sizes, times)
    assert start_us == pytest.approx(2.5, rel=0.02)
    assert gb_s == pytest.approx(50, rel=0.02)


def test_a_line_through_one_point_is_refused() -> None:
    with pytest.raises(ValueError, match="found 1: measure another size"):
        draw.fit_line([1024], [2.0])


def test_copy_sizes_give_the_fitted_line_in_caption_and_table() -> None:
    keys = ("pageable_held_us", "pageable_there_us", "pinned_held_us", "pinned_there_us")
    rows = [
        {"bytes": 2**k, **dict.fromkeys(keys, 20.0), "device_us": 2.0 + 2**k / 50e3} for k in range(10, 28)
    ]
    chart = draw.copy_sizes(_recording({"rows": rows}))
    assert "2.0 µs + bytes / (50.0 GB/s)" in chart.caption
    assert "half-bandwidth size, 100 kB" in _texts(chart)
    assert chart.rows[7][0] == "128 KiB"
    assert chart.rows[7][-1] == f"4.62{SPACE}µs"


def _held() -> Recording:
    keys = ("pageable", "pageable_non_blocking", "pinned", "pinned_non_blocking")
    rows = [{"bytes": size, **dict.fromkeys(keys, 10.0)} for size in (1024, 65536, 65540, 2**22)]
    return _recording({"rows": rows, "pending_us": 4000.0})


def test_held_names_four_ways_and_the_pending_work() -> None:
    chart = draw.held(_held())
    assert [row[0] for row in chart.rows] == ["1 KiB", "64 KiB", "65,540 B", "4 MiB"]
    assert chart.header[1:] == ("pageable", "pageable, non_blocking", "pinned", "pinned, non_blocking")
    assert "4.0 ms of pending work" in chart.caption
    assert "the pending work" in _texts(chart)


def test_pinning_puts_five_ways_beside_each_other() -> None:
    row = {"bytes": 2**20, "pin_us": 300.0, "first_time_us": 350.0, "again_us": 90.0, "plain_us": 70.0}
    shown = draw.pinning(_recording({"rows": [{**row, "pinned_us": 30.0}]}))
    assert shown.rows == (
        ("1 MiB", *(f"{us}{SPACE}µs" for us in ("30.0", "70.0", "90.0", "350.0", "300.0"))),
    )


# --- overlap


def _overlaps() -> Recording:
    steps = [[k * 10.0, k * 10.0 + 8, k * 10.0 + 8, k * 10.0 + 18] for k in range(3)]
    ways = ("two_buffers", "three_buffers", "one_buffer", "same_stream", "pageable", "synchronized")
    run = {"total_us": 38.0, "held_us": 5.0, "steps_us": steps}
    case = {"compute_us": 10.0, **dict.fromkeys(ways, run)}
    return _recording(
        {
            "chunks": 3,
            "chunk_bytes": 2**26,
            "copy_us": 8.0,
            "pageable_copy_us": 20.0,
            "cases": {"heavy": case},
        }
    )


def test_the_first_copy_and_the_last_compute_have_no_partner() -> None:
    assert draw.pipeline_us(3, 8.0, 10.0) == 38.0
    assert draw.pipeline_us(3, 10.0, 8.0) == 38.0
    assert draw.pipeline_us(1, 8.0, 10.0) == draw.pipeline_us(1, 8.0, 10.0, overlapping=False) == 18.0


def test_overlaps_predict_by_the_maximum_or_by_the_sum() -> None:
    shown = draw.overlaps(_overlaps())
    by_way = {row[0]: row for row in shown.rows}
    assert by_way["heavy: pinned, side stream, two buffers"][1:5] == (
        "max",
        f"38.0{SPACE}µs",
        f"38.0{SPACE}µs",
        "+0.0 %",
    )
    assert by_way["heavy: pinned, one stream for all, two buffers"][1:5] == (
        "sum",
        f"54.0{SPACE}µs",
        f"38.0{SPACE}µs",
        "-29.6 %",
    )
    assert by_way["heavy: pageable, side stream, two buffers"][1:3] == ("max", f"70.0{SPACE}µs")
    assert "64 MiB" in shown.caption


def test_lanes_draw_each_chunk_in_both_lanes_of_each_way() -> None:
    chart = draw.lanes(_overlaps(), "heavy", ("two_buffers", "same_stream"))
    assert len(chart.fig.axes) == 2
    assert [len(ax.patches) for ax in chart.fig.axes] == [6, 6]
    assert chart.rows[1] == ("pinned, side stream, two buffers", "compute", "1", "8", "18")
    single = draw.lanes(_overlaps(), "heavy", ("pageable",))
    assert len(single.fig.axes) == 1


# --- races


def test_stale_shares_keep_every_read_and_what_the_event_gave() -> None:
    reads = [
        {"begin_us": 0.0, "end_us": 100.0, "stale": 0.98, "done": False},
        {"begin_us": 6000.0, "end_us": 6100.0, "stale": 0.0, "done": True},
    ]
    chart = draw.stale_shares(_recording({"copy_us": 5000.0, "reads": reads, "after_event": 0.0}))
    assert [row[2:] for row in chart.rows] == [("98.0 %", "no"), ("0.0 %", "yes")]
    assert "Behind an event the share is 0 %" in chart.caption


@pytest.mark.parametrize(("reused", "told"), [(True, "(reused at once)"), (False, "(not reused at once)")])
def test_the_dropped_source_says_whether_its_memory_was_reused(reused: bool, told: str) -> None:
    shares = {"overwritten": 1.0, "dropped": 0.0, "other_stream": 0.999, "other_stream_told": 0.0}
    shown = draw.other_races(_recording({**shares, "dropped_memory_reused_at_once": reused}))
    assert [row[1] for row in shown.rows] == ["100 %", "0 %", "100 %", "0 %"]
    assert told in shown.rows[1][0]


# --- the loader


def test_a_loader_in_the_training_process_costs_the_sum_only_where_that_process_waits() -> None:
    assert draw.step_ms(40.0, 90.0, 0, 8, wait=True) == 130.0
    assert draw.step_ms(40.0, 90.0, 0, 8) == 90.0


def test_workers_beyond_the_cores_share_them() -> None:
    assert draw.step_ms(10.0, 90.0, 8, 2) == 45.0
    assert draw.step_ms(10.0, 90.0, 8, 16) == 11.25


def test_starving_sets_the_rule_beside_each_measured_step() -> None:
    runs = [
        {"workers": 0, "wait": True, "load_ms": 90.0, "step_ms": 130.0},
        {"workers": 1, "wait": False, "load_ms": 100.0, "step_ms": 110.0},
        {"workers": 3, "wait": False, "load_ms": 90.0, "step_ms": 40.0},
    ]
    chart = draw.starving(_recording({"compute_ms": 40.0, "cores": 8, "runs": runs}))
    assert chart.rows == [
        ("0, waits", "90.0 ms", "130.0 ms", "130.0 ms", "+0.0 %", "69 %"),
        ("1", "100.0 ms", "100.0 ms", "110.0 ms", "+10.0 %", "64 %"),
        ("3", "90.0 ms", "40.0 ms", "40.0 ms", "+0.0 %", "0 %"),
    ]


def test_trace_rows_give_a_rate_for_copies_and_none_for_kernels() -> None:
    copy = {"name": "Memcpy HtoD", "start_us": 0.0, "duration_us": 1000.0, "stream": 13, "bytes": 5 * 10**7}
    kernel = {"name": "gemm", "start_us": 5.0, "duration_us": 20.0, "stream": None, "bytes": None}
    shown = draw.trace_rows(_recording({"events": [copy, kernel]}))
    assert shown.rows[0][-1] == "50.0 GB/s"
    assert shown.rows[1][1] == "unavailable"
    assert shown.rows[1][-1] == ""


@pytest.mark.parametrize(
    "chart", [draw.road(_road()), draw.held(_held()), draw.lanes(_overlaps(), "heavy", ("one_buffer",))]
)
def test_every_chart_says_where_its_numbers_come_from(chart: Any) -> None:
    page = chart._repr_html_()
    assert "recorded on Some New GPU, 2026-12-01" in page
    assert not re.search(r"(fill|stroke): ?#(000000|ffffff)", page)


def test_what_the_chapters_say_stays_in_the_l2_is_on_its_line_and_the_next_size_is_not() -> None:
    sets = load("working_sets")
    inside, _ = draw.two_slopes(sets["rows"], sets["l2_bytes"])
    assert inside is not None
    start_us, gb_per_s = inside
    off = [row["us"] / (start_us + row["bytes"] / gb_per_s / 1e3) - 1 for row in sets["rows"]]
    assert off[8] < 0.1 < 0.2 < off[9]
    assert sets["rows"][8]["bytes"] >= 33.6e6  # what chapter 06 counts for 4 Mi


def test_absorbed_says_where_the_count_came_to_its_limit() -> None:
    rows = [{"bytes": 1024, "returned": [100, 100]}, {"bytes": 131072, "returned": [2, 3]}]
    shown = draw.absorbed(_recording({"limit": 100, "rows": rows}))
    assert shown.rows == (("1 KiB", "100 or more, 100 or more"), ("128 KiB", "2, 3"))


def test_a_batch_that_no_worker_could_make_is_unavailable() -> None:
    data = {"here": [80.0, 82.0, 90.0], "one": [150.0, 155.0], "free": [99.4], "apart": None, "shared": None}
    shown = draw.bound_workers(_recording(data))
    told = ["82 ms (80 to 90)", "152 ms (150 to 155)", "99 ms (99 to 99)", "unavailable", "unavailable"]
    assert [row[1] for row in shown.rows] == told


# --- what the chapter says of its recordings: a re-recording that contradicts a sentence fails here


def test_absorbed_copies_obey_two_buffers_above_64_kib_and_a_room_of_4_mib_up_to_there() -> None:
    found = load("absorbed_copies")
    mib = 2**20
    for row in found["rows"]:
        if row["bytes"] > 65536:
            assert set(row["returned"]) == {2 * mib // max(row["bytes"], mib)}
        else:
            for count in row["returned"]:  # held only where the next ones would come to 4 MiB
                assert count == found["limit"] or 4 * mib - 2 * row["bytes"] <= count * row["bytes"] < 4 * mib
    held = {row["bytes"]: row for row in load("held_behind_work")["rows"]}
    waited_us = load("held_behind_work")["pending_us"] / 2
    assert held[2 * mib]["pageable_non_blocking"] < waited_us < held[3 * mib]["pageable_non_blocking"]
    sizes = {row["bytes"]: row for row in load("copy_sizes")["rows"]}
    assert sizes[131072]["pageable_held_us"] < 0.9 * sizes[65536]["pageable_held_us"]  # "its end shows"


def test_neither_another_worker_nor_spinning_makes_a_worker_slow() -> None:
    bound = load("bound_workers")
    best_ms = statistics.median(bound["here"])
    for way in ("one", "apart"):  # "take twice the training process's best"
        assert 1.8 * best_ms < statistics.median(bound[way]) < 2.2 * best_ms
    assert bound["shared"] is None  # "halves of one core this machine does not show"
    assert min(bound["here"][:2]) > 1.3 * max(bound["here"][2:])  # "for its first two batches, then"
    waiting = load("starving_loader")["runs"][0]
    assert waiting["wait"]
    slow_ms, quick_ms = max(waiting["loads_ms"]), min(waiting["loads_ms"])
    assert slow_ms > 2 * quick_ms
    thirds = [int(2.999 * (ms - quick_ms) / (slow_ms - quick_ms)) for ms in waiting["loads_ms"]]
    assert min(thirds.count(third) for third in range(3)) >= 2  # "at any speed between"
    workers = [ms for way in ("one", "free", "apart") for ms in bound[way]]
    assert sum(ms < 1.5 * best_ms for ms in workers) == 1  # "hardly ever has the better one"


def _played_ms(run: Any, compute_ms: float) -> float:
    """Play the recorded loads through: each worker one batch after another, the device in the batches' order."""
    free_ms, ends_ms, end_ms = [0.0] * run["workers"], [], 0.0
    for k, load_ms in enumerate(run["loads_ms"]):
        free_ms[k % run["workers"]] += load_ms
        end_ms = max(end_ms, free_ms[k % run["workers"]]) + compute_ms
        ends_ms.append(end_ms)
    return (ends_ms[17] - ends_ms[6]) / 11


def test_the_rule_for_workers_leaves_what_the_chapter_says() -> None:
    starving = load("starving_loader")
    runs = {(run["workers"], run["wait"]): run for run in starving["runs"]}
    for workers in (1, 2, 4):
        run = runs[workers, False]
        said_ms = draw.step_ms(starving["compute_ms"], run["load_ms"], workers, starving["cores"], wait=False)
        assert run["step_ms"] == pytest.approx(said_ms, rel=0.05)
    three = runs[3, False]
    assert three["step_ms"] < 0.9 * three["load_ms"] / 3  # "three beat the rule"
    by_rule_ms, played_ms = three["load_ms"] / 3, _played_ms(three, starving["compute_ms"])
    explained = (by_rule_ms - played_ms) / (by_rule_ms - three["step_ms"])
    assert 0.4 < explained < 0.6  # "is half of the miss"
    for run in (runs[0, True], runs[0, False]):  # the caption: all batches in the stroke, the last in the bar
        own_ms = sum(run["loads_ms"][7:]) / 11 + starving["compute_ms"] * run["wait"]
        assert run["step_ms"] == pytest.approx(own_ms, rel=0.015)
    falling = [runs[workers, False]["step_ms"] for workers in (1, 2, 3, 4)]
    assert falling == sorted(falling, reverse=True)
    assert runs[4, False]["step_ms"] < 1.05 * starving["compute_ms"]


def test_no_size_of_a_copy_lies_further_from_the_line_than_the_chapter_says() -> None:
    rows = load("copy_sizes")["rows"]
    start_us, gb_s = draw.fit_line([row["bytes"] for row in rows], [row["device_us"] for row in rows])
    off = [abs(row["device_us"] / (start_us + row["bytes"] / gb_s / 1e3) - 1) for row in rows]
    assert 0.09 < max(off) < 0.11


def test_a_pinned_copy_returns_in_tens_of_microseconds_but_not_at_every_size() -> None:
    held = load("held_behind_work")["rows"]
    assert all(row["pinned_non_blocking"] < 100 for row in held)
    largest = load("copy_sizes")["rows"][18]
    assert largest["bytes"] == 256 * 2**20
    assert largest["pinned_held_us"] > 100


def test_copies_from_pageable_memory_overlap_too_but_hold_the_host() -> None:
    found = load("overlaps")
    for label, most in (("heavy", 0.03), ("light", 0.06)):
        case = found["cases"][label]
        run = case["pageable"]
        said_us = draw.pipeline_us(found["chunks"], found["pageable_copy_us"], case["compute_us"])
        assert run["total_us"] == pytest.approx(said_us, rel=most)
        assert run["held_us"] > 0.95 * run["total_us"]
        assert case["two_buffers"]["held_us"] < 0.25 * case["two_buffers"]["total_us"]


def test_the_dots_leave_and_join_the_slopes_where_the_chapter_says() -> None:
    sets = load("working_sets")
    inside, outside = draw.two_slopes(sets["rows"], sets["l2_bytes"])
    assert inside is not None
    assert outside is not None
    for row in sets["rows"]:
        part = row["bytes"] / sets["l2_bytes"]
        (near_us, near_gb_s), (far_us, far_gb_s) = inside, outside
        near = row["us"] / (near_us + row["bytes"] / near_gb_s / 1e3) - 1
        far = row["us"] / (far_us + row["bytes"] / far_gb_s / 1e3) - 1
        assert part < 0.6 or near > 0.2  # "before two thirds"
        assert part < 1.5 or abs(far) < 0.01  # "by one and a half"


def test_a_transposed_copy_is_slower_where_it_breaks_up_rows_than_where_they_stay() -> None:
    apart, views = load("far_apart"), load("layer_norm_traces")["look_then_copy"]
    assert 3.5 < apart["turned_us"] / apart["straight_us"] < 3.7
    moved = 2 * 32 * 1024 * 768 // 2 * 4  # half of the heads, read and written
    assert moved == 100_663_296  # the chapter's figure
    assert moved / views["busy_us"] > 1.5 * apart["square_bytes"] / apart["turned_us"]


def test_the_places_that_the_prose_counts_to_are_the_sizes_that_it_names() -> None:
    kib, mib = 2**10, 2**20
    for name, sizes in {
        "copy_sizes": {0: kib, 6: 64 * kib, 7: 128 * kib, 18: 256 * mib},
        "held_behind_work": {3: 128 * kib, 10: 4 * mib},
        "absorbed_copies": {3: 64 * kib},
        "pinning": {0: 128 * kib, 1: 2 * mib, 3: 256 * mib},
    }.items():
        rows = load(name)["rows"]
        assert {place: rows[place]["bytes"] for place in sizes} == sizes
    assert [row["stride"] for row in load("far_apart")["rows"]][3:7] == [8, 16, 32, 64]
    ways = [(run["workers"], run["wait"]) for run in load("starving_loader")["runs"]]
    assert ways == [(0, True), (0, False), (1, False), (2, False), (3, False), (4, False)]
    sets, l2_bytes = load("working_sets")["rows"], load("working_sets")["l2_bytes"]
    assert [round(sets[place]["bytes"] / l2_bytes, 3) for place in (1, 7)] == [0.125, 0.5]  # the road's two
