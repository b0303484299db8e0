"""The chapter's charts show what the ledger says, and a snapshot's file is one that PyTorch's viewer reads."""

from __future__ import annotations

import pickle
import pickletools
import re
from typing import Any

import pytest

from gpucourse.memory_ledger import fit_ledger
from gpucourse.plots import Chart
from gpucourse.plots import ledger as draw
from gpucourse.recording import Recording

GB, MIB = 10**9, 2**20
# What the viewer's own reader knows, by the names of `pickletools`
# (torch/utils/viz/MemoryViz.js, function `unpickle`, read on 2026-12-01).
VIEWER_READS = {
    *(
        "APPEND",
        "APPENDS",
        "BINFLOAT",
        "BINGET",
        "BININT",
        "BININT1",
        "BININT2",
        "BINPUT",
        "BINUNICODE",
        "DICT",
    ),
    *(
        "EMPTY_DICT",
        "EMPTY_LIST",
        "EMPTY_TUPLE",
        "FRAME",
        "LIST",
        "LONG1",
        "LONG_BINGET",
        "LONG_BINPUT",
        "MARK",
    ),
    *("MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP"),
    *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}


def recording(**data: Any) -> Recording:
    provenance = {"gpu": "NVIDIA H200", "date": "2026-12-01T00:00:00+00:00", "torch": "2.11.0"}
    return Recording(name="made_up", data=data, provenance=provenance)


def texts(chart: Chart) -> str:
    return " | ".join(text.get_text() for ax in chart.fig.axes for text in ax.texts)


# ------------------------------------------------------------------------------------------- peaks by rows


def trial(rows: int, allocated: float, reserved: float, message: str | None = None) -> dict[str, Any]:
    return {
        "rows": rows,
        "allocated_bytes": int(allocated * GB),
        "reserved_bytes": int(reserved * GB),
        "message": message,
    }


def by_rows() -> Chart:
    peaks = {"4": (6.5, 7.2), "8": (11.5, 12.1), "16": (21.5, 23.5), "17": (22.75, 25.1)}
    predicted = {
        rows: {"allocated_bytes": int(a * GB), "reserved_bytes": int(r * GB)}
        for rows, (a, r) in peaks.items()
    }
    ledger = fit_ledger([(int(rows), p["allocated_bytes"]) for rows, p in predicted.items()])
    tried = {"8": trial(8, 11.4, 12.2), "16": trial(16, 21.4, 23.6), "17": trial(17, 21.6, 21.7, "no")}
    return draw.peaks_by_rows(predicted, ledger, recording(cap_bytes=24e9, tried=tried))


def test_each_microbatch_has_what_was_predicted_and_what_was_found() -> None:
    rows = {row[0]: row[1:] for row in by_rows().rows}
    assert rows == {
        4: ("6.50", "not tried", "7.20", "not tried"),
        8: ("11.50", "11.40", "12.10", "12.20"),
        16: ("21.50", "21.40", "23.50", "23.60"),
        17: ("22.75", "refused", "25.10", "refused"),
    }


def test_the_lines_are_predictions_the_dots_ran_and_the_cross_at_the_cap_was_refused() -> None:
    ax = by_rows().fig.axes[0]
    drawn = {(line.get_linestyle(), line.get_marker()): line for line in ax.lines}
    assert list(drawn["None", "s"].get_xdata()) == [8, 16]
    assert list(drawn["None", "s"].get_ydata()) == [12.2, 23.6]
    assert list(drawn["None", "x"].get_xdata()) == [17]
    assert list(drawn["None", "x"].get_ydata()) == [24.0]
    assert [list(line.get_ydata()) for line in ax.lines if line.get_linestyle() == "-"] == [
        [6.5, 11.5, 21.5, 22.75],
        [7.2, 12.1, 23.5, 25.1],
    ]


def test_the_cap_and_the_budget_below_it_are_named_in_gb() -> None:
    assert "the cap, 24.0 GB" in texts(by_rows())
    assert "the budget, 21.6 GB" in texts(by_rows())


def test_without_a_prediction_there_is_nothing_to_draw() -> None:
    ledger = fit_ledger([(1, 1e9), (2, 2e9)])
    with pytest.raises(ValueError, match="no prediction to draw; wanted one microbatch or more"):
        draw.peaks_by_rows({}, ledger, recording(cap_bytes=24e9, tried={}))


# ----------------------------------------------------------------------------------------------------- ways


def step(reserved: float, *peaks: dict[str, float]) -> dict[str, Any]:
    found = [
        {
            "allocated_bytes": round(sum(lines.values()) * GB),
            "lines": {name: round(gb * GB) for name, gb in lines.items()},
        }
        for lines in peaks
    ]
    return {
        "peaks": found,
        "allocated_bytes": max(p["allocated_bytes"] for p in found),
        "reserved_bytes": round(reserved * GB),
    }


FIRST = {"parameters": 1.0, "activations": 3.0}
LATER = {"parameters": 1.0, "optimizer": 2.0, "activations": 3.0, "workspaces": 0.5}


def two_ways() -> Chart:
    return draw.ways(
        {
            "fp32": {
                "predicted": step(7.0, FIRST, LATER | {"workspaces": 0.37}),
                "measured": step(7.0, FIRST, LATER),
            },
            "accumulated": {
                "predicted": step(8.0, LATER | {"gradients": 1.0}),
                "measured": step(7.5, LATER | {"gradients": 1.0}),
            },
        },
        source=recording(),
    )


def test_a_bar_is_made_of_the_lines_of_the_highest_peak_in_their_order() -> None:
    ax = two_ways().fig.axes[0]
    bars = [(bar.get_x(), bar.get_width()) for bar in ax.patches if abs(bar.get_y() + 0.3) < 1e-9]
    assert bars == [(0.0, 1.0), (1.0, 2.0), (3.0, 3.0), (6.0, 0.5)]


def test_the_mark_stands_where_the_prediction_ends() -> None:
    marks = [line.get_xdata()[0] for line in two_ways().fig.axes[0].lines]
    assert marks == pytest.approx([6.37, 7.5])


def test_the_residual_is_measured_less_predicted_as_a_share_of_what_was_measured() -> None:
    rows = {row[0]: row[1:] for row in two_ways().rows}
    assert rows["fp32"] == ("6.37 GB", "6.50 GB", "+2.00 %", "7.00 GB", "7.00 GB", "+0.00 %")
    assert rows["accumulated"][3:] == ("8.00 GB", "7.50 GB", "−6.67 %")


def test_a_line_that_the_chart_does_not_know_is_no_silent_gap_in_a_bar() -> None:
    strange = {"predicted": step(1.0, FIRST), "measured": step(1.0, FIRST | {"scratch": 1.0})}
    with pytest.raises(ValueError, match="the line 'scratch'; known are activations, "):
        draw.ways({"fp32": strange}, source=recording())
    with pytest.raises(ValueError, match="no way to draw; wanted one or more"):
        draw.ways({}, source=recording())


def test_every_line_of_a_prediction_and_of_a_measurement_has_a_colour() -> None:
    from typing import get_args

    from gpucourse.storage_trace import Role

    known = {name for names, _, _ in draw._PARTS.values() for name in names}
    assert {*get_args(Role), "rounding"} <= known


# ------------------------------------------------------------------------------------------------- segments


def refusal() -> dict[str, Any]:
    alike = [
        {"address": k * 40 * MIB, "bytes": 40 * MIB, "pieces": [[30 * MIB, True, 0], [10 * MIB, False, None]]}
        for k in range(3)
    ]
    large = {
        "address": 400 * MIB,
        "bytes": 100 * MIB,
        "pieces": [[20 * MIB, False, None], [60 * MIB, True, 1], [20 * MIB, False, None]],
    }
    return {
        "asked_bytes": 50 * MIB,
        "cap_bytes": 240 * MIB,
        "segments": [*alike, large],
        "places": [["gpt.py", 51, "forward"], ["training.py", 112, "next_token_loss"]],
        "events": [
            ["segment_alloc", 0, 40 * MIB, None],
            ["alloc", 0, 30 * MIB, 0],
            ["free", 0, 30 * MIB, None],
            ["alloc", 0, 30 * MIB, 0],
            ["segment_free", 900 * MIB, 20 * MIB, None],
            ["oom", 0, 50 * MIB, 1],
        ],
    }


def test_segments_of_a_size_lie_end_to_end_and_all_that_is_free_in_them_is_told() -> None:
    chart = draw.segments(refusal(), source=recording())
    assert chart.rows == [
        ("1 × 104.9 MB", "104.9 MB", "62.9 MB", "41.9 MB", "2", "21.0 MB"),
        ("3 × 41.9 MB", "125.8 MB", "94.4 MB", "31.5 MB", "3", "10.5 MB"),
    ]
    assert "73.4 MB is reserved and free, in 5 pieces, the longest of 21.0 MB" in chart.caption
    assert "52.4 MB was refused under 251.7 MB" in chart.caption


def test_the_bars_follow_the_pieces_and_the_request_stands_below_at_its_length() -> None:
    bars = draw.segments(refusal(), source=recording()).fig.axes[0].patches
    rows = {
        at: [round(bar.get_width() * GB / MIB) for bar in bars if round(bar.get_y() + 0.35) == at]
        for at in range(3)
    }
    assert rows == {0: [20, 60, 20], 1: [30, 10, 30, 10, 30, 10], 2: [50]}
    first = [bar for bar in bars if round(bar.get_y() + 0.35) == 0]
    assert len({bar.get_facecolor() for bar in first}) == 2
    assert first[0].get_facecolor() == first[2].get_facecolor()


def test_sizes_with_little_that_is_free_are_counted_where_there_are_too_many() -> None:
    chart = draw.segments(refusal(), source=recording(), most=1)
    assert chart.rows[1] == ("3 of other sizes", "125.8 MB", "94.4 MB", "31.5 MB", "3", "10.5 MB")


def test_a_snapshot_without_segments_and_pieces_that_leave_a_gap_are_refused() -> None:
    with pytest.raises(ValueError, match="the snapshot has no segment; wanted the allocator at the instant"):
        draw.segments(refusal() | {"segments": []}, source=recording())
    short = {"address": 0, "bytes": 40 * MIB, "pieces": [[30 * MIB, True, 0]]}
    with pytest.raises(ValueError, match=r"a segment of 41,943,040 B are 31,457,280 B together"):
        draw.segments(refusal() | {"segments": [short]}, source=recording())


# ------------------------------------------------------------------------------------------ the viewer's file


def test_the_file_uses_nothing_that_the_viewers_reader_does_not_know() -> None:
    data = draw.viewer_file(refusal()).data
    used = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert used <= VIEWER_READS
    # A pickle of another kind shows that the test can fail.
    assert not {op.name for op, _, _ in pickletools.genops(pickle.dumps({1, 2}, protocol=4))} <= VIEWER_READS


def test_the_blocks_follow_each_other_through_each_segment() -> None:
    snapshot = pickle.loads(draw.viewer_file(refusal()).data)
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            address += block["size"]
        assert address == segment["address"] + segment["total_size"]
        lives = sum(block["size"] for block in segment["blocks"] if block["state"] == "active_allocated")
        assert lives == segment["allocated_size"]
    frames = snapshot["segments"][3]["blocks"][1]["frames"]
    assert frames == [{"filename": "training.py", "line": 112, "name": "next_token_loss"}]


def test_a_free_is_two_events_as_the_viewer_wants_it_and_the_refusal_is_the_last() -> None:
    (trace,) = pickle.loads(draw.viewer_file(refusal()).data)["device_traces"]
    assert [event["action"] for event in trace] == [
        "segment_alloc",
        "alloc",
        "free_requested",
        "free_completed",
        "alloc",
        "segment_free",
        "oom",
    ]
    assert trace[-1]["size"] == 50 * MIB
    assert "device_free" in trace[-1]


def test_an_event_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="an event's action is 'segment_map'; wanted alloc, free"):
        draw.viewer_file(refusal() | {"events": [["segment_map", 0, 1, None]]})


def test_the_page_offers_the_file_itself_under_its_name() -> None:
    import base64

    file = draw.viewer_file(refusal(), "sixteen.pickle")
    page = file._repr_html_()
    coded = re.search(r'download="sixteen\.pickle" href="data:application/octet-stream;base64,([^"]+)"', page)
    assert coded is not None
    assert base64.b64decode(coded.group(1)) == file.data
    assert "data=" not in repr(file)


@pytest.mark.parametrize("chart", [by_rows, two_ways, lambda: draw.segments(refusal(), source=recording())])
def test_each_chart_has_words_a_table_and_its_source(chart: Any) -> None:
    page = chart()._repr_html_()
    assert 'role="img"' in page
    assert "recorded on NVIDIA H200" in page
    assert len(chart().alt) > 100
    assert all(len(row) == len(chart().header) for row in chart().rows)
