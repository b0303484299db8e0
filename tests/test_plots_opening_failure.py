"""The opening chapter's charts show what was recorded, and judge only where there is a figure to judge by."""

from __future__ import annotations

from typing import Any

import pytest

from gpucourse.plots import opening_failure as draw
from gpucourse.recording import Recording, load

H200 = {"gpu": "NVIDIA H200", "date": "2026-12-01T00:00:00", "torch": "2.11.0"}
UNKNOWN = {**H200, "gpu": "Some New GPU"}
FLOP = 741e6


def _recording(data: dict[str, Any], provenance: dict[str, Any] = H200) -> Recording:
    return Recording(name="example", data=data, provenance=provenance)


def _trial(rows: int, allocated_gb: float, *, refused: bool = False, retries: int = 0) -> dict[str, Any]:
    return {
        "rows": rows,
        "allocated_bytes": int(allocated_gb * 1e9),
        "reserved_bytes": int(allocated_gb * 1.1e9),
        "tokens_per_s": None if refused else 50_000.0 + rows,
        "message": "CUDA out of memory." if refused else None,
        "retries": retries,
    }


def _trials(*trials: dict[str, Any]) -> Recording:
    return _recording({"cap_bytes": 24e9, "tried": {str(trial["rows"]): trial for trial in trials}})


def _clocks(returned_ms: float, provenance: dict[str, Any] = H200) -> Recording:
    readings = {
        str(rows): {
            "rows": rows,
            "tokens": 1024 * rows,
            "returned_ms": returned_ms,
            "done_ms": 20.0 * rows,
        }
        for rows in (1, 2, 16, 8)
    }
    return _recording({"readings": readings}, provenance)


def _texts(chart: Any) -> list[str]:
    return [text.get_text() for text in chart.fig.axes[0].texts]


# --- memory by rows


def test_every_tried_microbatch_has_a_row_in_order_and_says_whether_it_ran() -> None:
    chart = draw.memory_by_rows(
        _trials(_trial(16, 21), _trial(32, 20, refused=True), _trial(1, 3), _trial(17, 22.5, retries=2))
    )
    assert [row[0] for row in chart.rows] == [1, 16, 17, 32]
    assert [row[-1] for row in chart.rows] == [
        "ran",
        "ran",
        "ran, after giving back what it cached 2 times",
        "refused",
    ]
    assert chart.rows[1][1:4] == ("21.00", "23.10", "50,016")
    assert chart.rows[3][3] == ""
    assert "The largest that runs is 17." in chart.caption


def test_one_retry_is_no_plural() -> None:
    assert draw.memory_by_rows(_trials(_trial(2, 4, retries=1))).rows[0][-1].endswith("1 time")


def test_the_lines_join_what_ran_and_the_crosses_are_what_was_refused() -> None:
    chart = draw.memory_by_rows(_trials(_trial(1, 3), _trial(16, 21), _trial(20, 18, refused=True)))
    allocated, reserved, crosses, cap = chart.fig.axes[0].lines
    assert list(allocated.get_xdata()) == list(reserved.get_xdata()) == [1, 16]
    assert list(allocated.get_ydata()) == [3, 21]
    assert list(crosses.get_xdata()) == [20]
    assert list(crosses.get_ydata()) == [pytest.approx(19.8)]
    assert set(cap.get_ydata()) == {24.0}
    assert "the cap, 24.0 GB" in _texts(chart)
    assert "refused" in _texts(chart)


def test_where_nothing_ran_the_chart_says_so_and_where_nothing_was_refused_it_draws_no_cross() -> None:
    assert "None of them runs." in draw.memory_by_rows(_trials(_trial(1, 3, refused=True))).caption
    assert "refused" not in _texts(draw.memory_by_rows(_trials(_trial(1, 3), _trial(2, 4))))


def test_nothing_tried_is_refused() -> None:
    with pytest.raises(ValueError, match="no microbatch was tried"):
        draw.memory_by_rows(_trials())


# --- one step, read twice


def test_a_reading_below_the_least_time_is_impossible_and_one_above_it_is_not_refuted() -> None:
    chart = draw.one_step_read_twice(_clocks(25.0), FLOP)
    assert [row[0] for row in chart.rows] == [1, 2, 8, 16]
    # 1,024 tokens a row x 741e6 flop over 67e12 flop/s: 11.3 ms a row
    assert [row[4] for row in chart.rows] == ["not refuted", "not refuted", "impossible", "impossible"]
    assert chart.rows[0][3] == "11.3\N{NO-BREAK SPACE}ms"


def test_the_table_says_how_each_reading_grew_from_the_microbatch_before() -> None:
    rows = draw.one_step_read_twice(_clocks(25.0), FLOP).rows
    assert [row[-1] for row in rows] == ["", "× 1.00 and × 2.00", "× 1.00 and × 4.00", "× 1.00 and × 2.00"]


def test_a_gpu_without_a_record_gets_no_bound_and_no_judgement() -> None:
    chart = draw.one_step_read_twice(_clocks(25.0, UNKNOWN), FLOP)
    assert {row[4] for row in chart.rows} == {"limit unavailable for Some New GPU"}
    assert {row[3] for row in chart.rows} == {"unavailable"}
    assert len(chart.fig.axes[0].lines) == 2
    assert len(draw.one_step_read_twice(_clocks(25.0), FLOP).fig.axes[0].lines) == 3


def test_the_bound_follows_the_operations_of_a_token() -> None:
    assert all(row[4] == "not refuted" for row in draw.one_step_read_twice(_clocks(25.0), FLOP / 100).rows)


def test_no_reading_and_no_operations_are_refused() -> None:
    with pytest.raises(ValueError, match="no step was read"):
        draw.one_step_read_twice(_recording({"readings": {}}), FLOP)
    for flop in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="flop_a_token"):
            draw.one_step_read_twice(_clocks(25.0), flop)


@pytest.mark.parametrize(
    "chart",
    [
        draw.memory_by_rows(_trials(_trial(1, 3), _trial(20, 18, refused=True))),
        draw.one_step_read_twice(_clocks(25.0), FLOP),
    ],
    ids=["memory", "clock"],
)
def test_a_chart_is_a_picture_with_words_a_table_and_its_source(chart: Any) -> None:
    page = chart._repr_html_()
    assert "<svg" in page
    assert "Data table" in page
    assert "recorded on NVIDIA H200" in page
    assert len(chart.alt) > 100


# --- what the chapter says of its recordings: a re-recording that contradicts a sentence fails here


def test_the_description_names_the_rows_whose_first_reading_is_impossible_and_promises_no_doubling() -> None:
    chart = draw.one_step_read_twice(load("one_step_read_twice"), FLOP)
    impossible = [str(row[0]) for row in chart.rows if row[4] == "impossible"]
    assert f"below the dashed least time at {', '.join(impossible)} rows" in chart.alt
    assert "dashed" not in draw.one_step_read_twice(_clocks(25.0, UNKNOWN), FLOP).alt
    readings = load("one_step_read_twice")["readings"]
    for rows in (1, 2, 4, 8):  # "double the rows and see whether it doubles" would refuse an honest clock
        growth = readings[str(2 * rows)]["done_ms"] / readings[str(rows)]["done_ms"]
        assert 1.5 < growth < 1.9


def test_the_cards_label_is_in_gib_as_the_message_shows() -> None:
    capacity = load("night_fails")["amounts"]["capacity"]
    assert 139 < capacity / 2**30 < 141  # "a little under the label"
    assert capacity / 1e9 > 145


def test_the_plans_nine_tenths_hold_the_largest_steps_tensors_and_not_what_is_reserved() -> None:
    largest = load("largest_by_trying")["largest"]
    assert largest["allocated_bytes"] < 0.9 * 24e9 < largest["reserved_bytes"] < 24e9


def test_what_the_output_layers_line_had_is_one_result_of_the_last_norm() -> None:
    found = {label: held for label, _, held, *_ in load("night_statement")["largest"]}
    one = 32 * 1024 * 768 * 4
    label, _, held, *_ = load("night_statement")["largest"][4]
    assert label.startswith("gpt.py:")
    assert one <= held < 1.01 * one
    assert max(found, key=lambda name: found[name]) == load("night_statement")["largest"][0][0]


def test_the_refused_sizes_were_refused_for_the_cause_that_the_chapter_names() -> None:
    trials = load("largest_by_trying")
    steps = {int(rows): len(trial["step_ms"]) for rows, trial in trials["tried"].items() if trial["message"]}
    assert {rows for rows, done in steps.items() if done == 1} == {17, 18}  # "in the second"
    assert all(done == 0 for rows, done in steps.items() if rows >= 20)  # "in the first step"
