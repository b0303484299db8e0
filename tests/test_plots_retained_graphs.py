"""The charts and tables of the chapter on what leaks show what was recorded, and say what was not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpucourse.plots import retained_graphs as draw
from gpucourse.recording import Recording

SPACE = "\N{NO-BREAK SPACE}"
MB = 10**6


def _recording(data: dict[str, Any]) -> Recording:
    facts = {"gpu": "Some New GPU", "date": "2026-12-01T00:00:00", "torch": "2.11.0"}
    return Recording(name="example", data=data, provenance=facts)


def _texts(chart: Any, place: int = 0) -> list[str]:
    return [text.get_text() for text in chart.fig.axes[place].texts]


# --- the failing row


@pytest.mark.parametrize(
    ("limit", "start", "row", "transient"),
    [(24e9, 1.56e9, 0.817e9, 0.206e9), (10, 0, 3, 1), (9, 0, 3, 0), (5, 9, 1, 0)],
)
def test_the_failing_row_is_the_first_that_would_hold_more_than_the_limit(
    limit: float, start: float, row: float, transient: float
) -> None:
    found = draw.failing_row(limit, start, row, transient)
    first = next(k for k in range(1, 1000) if start + k * row + transient > limit)
    assert found == first


def test_an_evaluation_that_leaves_nothing_has_no_failing_row() -> None:
    with pytest.raises(ValueError, match="a row leaves 0 bytes: memory does not run out"):
        draw.failing_row(10, 1, 0, 1)


# --- the night's evaluation


def _night(**changes: Any) -> Recording:
    log = [[(1500 + 800 * k) * MB, (1600 + 850 * k) * MB, (1700 + 800 * k) * MB] for k in range(5)]
    return _recording(
        {
            "planned": 64,
            "cap_bytes": 5400 * MB,
            "start_bytes": 1500 * MB,
            "row_bytes": 800 * MB,
            "row_reserved_bytes": 850 * MB,
            "transient_bytes": 200 * MB,
            "failed_row": 5,
            "with_graph": {"log": log, "rows": 4, "error": "CUDA out of memory."},
            "without_graph": {"log": [[1500 * MB, 1600 * MB, 1900 * MB]] * 3, "rows": 64, "error": ""},
            **changes,
        }
    )


def test_the_nights_curves_rise_to_the_cap_and_the_table_has_each_row() -> None:
    chart = draw.night(_night())
    reserved, allocated = chart.fig.axes[0].lines[1:3]
    assert list(allocated.get_ydata()) == pytest.approx([1.5, 2.3, 3.1, 3.9, 4.7])
    assert list(reserved.get_ydata()) == pytest.approx([1.6, 2.45, 3.3, 4.15, 5.0])
    assert chart.rows[4] == (4, f"4.70{SPACE}GB", f"5.00{SPACE}GB")
    assert "row 5 fails" in chart.caption
    assert "the cap, 5.4 GB" in _texts(chart)


def test_an_evaluation_that_fits_is_not_said_to_fail() -> None:
    chart = draw.night(_night(failed_row=None))
    assert "all 4 rows fit" in chart.caption
    assert "fails" not in chart.caption


def test_the_forecast_stands_beside_the_measurement_with_its_residual() -> None:
    table = draw.forecast(_night(), row_bytes=792 * MB, start_bytes=1515 * MB, transient_bytes=200 * MB)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["left by a row"] == (f"792.0{SPACE}MB", f"800.0{SPACE}MB", "-1.00 %")
    assert rows["before the first row"][2] == "+1.00 %"
    assert rows["for a moment in each row"][2] == "+0.00 %"
    # 1,515 + 792 k + 200 passes 5,400 at k = 4.65.
    assert rows["the row that fails"] == ("5", "5", "+0")


def test_a_forecast_without_a_measurement_has_no_residual() -> None:
    source = _night(failed_row=None, row_bytes=None, transient_bytes=None)
    rows = {row[0]: row[1:] for row in draw.forecast(source, 792 * MB, 1515 * MB, 200 * MB).rows}
    assert rows["left by a row"] == (f"792.0{SPACE}MB", "unavailable", "unavailable")
    assert rows["the row that fails"] == ("5", "none of 64", "")


# --- the zoo


def _loop(**changes: Any) -> dict[str, Any]:
    return {"device_bytes": 0, "host_bytes": 0, "nodes": 0, "cause": None, **changes}


def test_the_zoo_says_what_each_loop_retains_and_where() -> None:
    loops = {
        "evaluation_sum": _loop(device_bytes=2_621_440.0, nodes=8.0, cause="running sum"),
        "copies": _loop(host_bytes=524_288.0, cause="kept tensors"),
        "items": _loop(),
    }
    assert draw.zoo(_recording({"loops": loops})).rows == (
        ("sum the losses, no backward pass", f"2.62{SPACE}MB", "–", "8", "running sum"),
        ("keep CPU copies of the outputs", "–", f"524.3{SPACE}kB", "–", "kept tensors"),
        ("keep loss.item() of each step", "–", "–", "–", "nothing retained"),
    )


# --- the host


def _host(resident: list[int | None], **changes: Any) -> Recording:
    def run(step: int, values: list[int | None]) -> dict[str, Any]:
        return {
            "every": 20,
            "resident_bytes": values,
            "allocated_bytes": [100 * MB] * len(values),
            "step_bytes": step if None not in values else None,
            "device_step_bytes": 0.0,
        }

    level = [value and resident[0] for value in resident]
    deep = {"item": run(0, level), "detach": run(0, level), "loss": run(200_000, resident)}
    return _recording(
        {"modules": 150, "deep": deep, "night": run(290_000, resident), "night_nodes": 384.0, **changes}
    )


def test_the_hosts_growth_is_drawn_for_the_loss_and_level_for_its_value() -> None:
    chart = draw.host(_host([500 * MB + 4 * MB * k for k in range(8)]))
    left, right = chart.fig.axes
    assert [list(line.get_ydata()) for line in left.lines] == [
        pytest.approx([0, 4, 8, 12, 16]),
        [0] * 5,
        [0] * 5,
    ]
    assert [list(line.get_ydata()) for line in right.lines] == [[0] * 5] * 3
    assert list(left.lines[0].get_xdata()) == [60, 80, 100, 120, 140]
    assert chart.rows[0] == ("total + loss", f"200.0{SPACE}kB", "0 B".replace(" ", SPACE))
    assert chart.rows[3][1] == f"290.0{SPACE}kB"


def test_where_the_system_does_not_tell_resident_memory_it_is_unavailable() -> None:
    chart = draw.host(_host([None] * 8))
    left, right = chart.fig.axes
    assert len(left.lines) == 0
    assert "unavailable" in _texts(chart)
    assert len(right.lines) == 3
    assert chart.rows[0][1] == "unavailable"
    assert "<svg" in chart._repr_html_()


# --- the others


def test_each_moment_after_an_error_says_what_is_held_and_whether_a_retry_is_served() -> None:
    moments = {
        "inside the except block": {"allocated_bytes": 2_304 * MB, "served": False},
        "after the except block": {"allocated_bytes": 0, "served": True},
    }
    assert draw.caught(_recording({"moments": moments, "text": "CUDA out of memory."})).rows == (
        ("inside the except block", f"2.30{SPACE}GB", "out of memory"),
        ("after the except block", f"0{SPACE}B", "served"),
    )


def test_three_counters_are_drawn_and_listed_for_each_moment() -> None:
    counted = [
        ["the model is there", 100 * MB, 120 * MB, 130 * MB],
        ["step 1", 300 * MB, 700 * MB, 710 * MB],
        ["everything is deleted", 0, 700 * MB, 710 * MB],
        ["the cache is emptied", 0, 0, 10 * MB],
    ]
    chart = draw.counters(_recording({"counted": counted}))
    axes = chart.fig.axes[0]
    assert [list(line.get_ydata()) for line in axes.lines] == [
        pytest.approx([0.13, 0.71, 0.71, 0.01]),
        pytest.approx([0.12, 0.7, 0.7, 0]),
        pytest.approx([0.1, 0.3, 0, 0]),
    ]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["model", "1", "deleted", "emptied"]
    assert chart.rows[2] == ("everything is deleted", f"0{SPACE}B", f"700.0{SPACE}MB", f"710.0{SPACE}MB")


def test_lines_in_use_stand_with_their_file_and_code() -> None:
    entry = {"file": "gpt.py", "function": "forward", "code": "x = x + y", "bytes": 5 * MB}
    bare = {"file": "?", "function": "before the recording", "code": "", "bytes": 1000}
    assert draw.lines(_recording({"lines": [entry, bare]})).rows == (
        (f"5.00{SPACE}MB", "gpt.py", "forward", "x = x + y"),
        (f"1.00{SPACE}kB", "?", "before the recording", "–"),
    )


@pytest.mark.parametrize(
    "chart",
    [
        lambda: draw.night(_night()),
        lambda: draw.host(_host([500 * MB + 4 * MB * k for k in range(8)])),
        lambda: draw.counters(
            _recording({"counted": [["a", 1, 2, 3], ["b", 1, 2, 3], ["c", 0, 2, 3], ["d", 0, 0, 1]]})
        ),
    ],
    ids=["night", "host", "counters"],
)
def test_no_text_of_a_chart_is_black_which_the_dark_theme_would_hide(chart: Any) -> None:
    svg = chart().svg()
    assert not re.search(r"(fill|stroke): ?#000000|(fill|stroke)=\"#000", svg)
    assert "currentColor" in svg
