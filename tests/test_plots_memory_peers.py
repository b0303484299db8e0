"""The memory benchmark's tables judge what they show, on made-up measurements."""

from __future__ import annotations

from typing import Any

import pytest

from gpucourse.plots import memory_peers as draw
from gpucourse.recording import Recording

MINUS, SPACE = "\N{MINUS SIGN}", "\N{NO-BREAK SPACE}"


def _case(model: str, measured: Any, predicted: Any, kept_out: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "kept_out": kept_out,
        "precision": "bf16",
        "optimizer": "AdamW",
        "checkpointing": False,
        "samples": 8,
        "measured": measured
        if isinstance(measured, dict)
        else {"allocated_bytes": measured, "reserved_bytes": 1.25 * measured},
        "predicted": predicted
        if isinstance(predicted, dict)
        else {"allocated_bytes": predicted, "reserved_bytes": 1.25 * predicted, "seconds": 3.5},
        "peers": {
            "MemTracker": {"bytes": 0.5 * measured if not isinstance(measured, dict) else 1, "seconds": 1.0},
            "mlsysim": {"bytes": None, "seconds": 0.0},
            "accelerate": {"bytes": None, "error": "ModuleNotFoundError: No module named 'accelerate'"},
            "16 bytes a parameter": {"bytes": 4e9, "seconds": 0.0},
        },
        **more,
    }


def _search(
    model: str, said: int | None, found: int | None, tried: Any, kept_out: bool = False
) -> dict[str, Any]:
    return {
        "model": model,
        "kept_out": kept_out,
        "precision": "bf16",
        "optimizer": "AdamW",
        "checkpointing": True,
        "predicted": {"error": "UnseenError: no"} if said is None else {"microbatch": said},
        "found": {"error": "no answer in time"} if found is None else {"microbatch": found, "tried": tried},
    }


def _recording(cases: list[Any], searches: list[Any]) -> Recording:
    return Recording(
        name="memory_vs_peers",
        data={
            "cases": cases,
            "searches": searches,
            "cap_bytes": 24_000_000_000,
            "cores": 16,
            "predicting_at_once": 14,
        },
        provenance={"gpu": "NVIDIA H200", "date": "2026-12-01T00:00:00", "torch": "2.11.0"},
    )


@pytest.fixture
def made_up() -> Recording:
    cases = [
        _case("night", 4e9, 4.02e9),
        _case("unet", 2e9, 1.88e9),
        _case("mlp", 0.5e9, 0.53e9),
        _case("vit", 3e9, 3.03e9, kept_out=True),
        _case("swin", 2e9, 2.04e9, kept_out=True),
        _case("llama", {"error": "OutOfMemoryError: no"}, 2e9, kept_out=True),
    ]
    searches = [
        _search("night", 20, 21, [[19, True], [20, True], [21, True], [22, False]]),
        _search("unet", 240, 230, [[230, True], [231, False], [240, False], [241, False]]),
        _search("vit", 300, 306, [[300, True], [306, True], [307, False]], kept_out=True),
        _search("swin", None, 100, [[100, True]], kept_out=True),
    ]
    return _recording(cases, searches)


def test_a_miss_is_what_is_said_beyond_what_was_measured(made_up: Recording) -> None:
    night = made_up["cases"][0]
    assert draw.miss(night) == pytest.approx(0.005)
    assert draw.miss(night, "MemTracker") == pytest.approx(-0.5)
    assert draw.miss(night, "16 bytes a parameter") == 0
    assert draw.miss(night, what="reserved_bytes") == pytest.approx(0.005)
    assert draw.miss(night, "mlsysim") is None
    assert draw.miss(made_up["cases"][5]) is None


def test_a_case_whose_peers_were_not_asked_has_no_miss_of_theirs() -> None:
    row = _case("night", 4e9, 4e9, peers={"error": "no answer in time"})
    assert draw.miss(row, "MemTracker") is None
    assert draw.miss(row) == 0


@pytest.mark.parametrize(
    ("said", "found", "tried", "verdict"),
    [
        (20, 21, [[21, True], [22, False]], (0, True)),
        (22, 21, [[21, True], [22, False]], (1, True)),  # near, and yet said to fit where it does not
        (19, 21, [[21, True], [22, False]], (0, False)),
        (294, 300, [[300, True], [301, False]], (0, True)),
        (293, 300, [[300, True], [301, False]], (0, False)),
        (310, 300, [[300, True], [301, False], [305, False], [320, False]], (2, False)),
        (None, 300, [], None),
        (300, None, [], None),
    ],
)
def test_a_search_is_within_one_sample_or_two_percent_and_each_refused_try_below_it_is_a_false_fit(
    said: int | None, found: int | None, tried: list[Any], verdict: Any
) -> None:
    assert draw.limits(_search("m", said, found, tried)) == verdict


def test_the_summary_judges_the_models_that_were_kept_out_apart(made_up: Recording) -> None:
    found = draw.summary(made_up)
    kept, tuned, both = (found[name] for name in ("kept out", "tuned on", "all"))
    assert (kept["searches"], kept["near"], kept["false_fits"]) == (1, 1, 0)
    assert (both["searches"], both["near"], both["false_fits"]) == (3, 2, 2)
    assert (kept["large"], tuned["large"], both["large"]) == (2, 2, 4)
    assert kept["median"] == pytest.approx(0.015)
    assert both["median"] == pytest.approx((0.01 + 0.02) / 2)
    assert tuned["worst"] == pytest.approx(0.06)
    assert (kept["small"], kept["small_worst_bytes"]) == (0, None)
    assert tuned["small_worst_bytes"] == pytest.approx(30e6)
    assert (kept["unjudged"], tuned["unjudged"]) == (1, 0)


def test_the_goals_table_begins_with_the_heaviest_goal_and_shows_the_kept_out_first(
    made_up: Recording,
) -> None:
    table = draw.goals(made_up)
    assert table.header == ("Goal", "Wanted", "Kept out", "Tuned on", "All")
    assert table.rows[0][1:] == ("never", "0 tries in 1 models", "2 tries in 2 models", "2 tries in 3 models")
    assert table.rows[1][1:] == ("8 of 8", "1 of 1", "1 of 2", "2 of 3")
    assert table.rows[2][2] == "1.50% of 2"
    assert table.rows[3][3] == "6.00% of 2"
    assert table.rows[4][2:4] == ("–", "30 MB of 1")
    assert table.rows[5][2:] == ("1", "0", "1")
    assert "<table" in table._repr_html_()


def test_the_cases_print_each_miss_the_kept_out_first(made_up: Recording) -> None:
    table = draw.cases(made_up)
    assert [row[0] for row in table.rows] == ["vit", "swin", "llama", "night", "unet", "mlp"]
    night = dict(zip(table.header[5:9], table.rows[3][5:9], strict=True))
    assert night == {
        "Samples": "8",
        "Measured, GB": "4.000",
        "Predicted, GB": "4.020",
        "Miss": f"+0.50{SPACE}%",
    }
    assert table.rows[3][11:15] == (f"{MINUS}50{SPACE}%", "–", "–", f"+0.00{SPACE}%")
    assert table.rows[2][6] == "–"


def test_the_searches_say_which_tries_ran_out_of_memory(made_up: Recording) -> None:
    table = draw.searches(made_up)
    rows = {row[0]: row[5:] for row in table.rows}
    assert rows["night"] == ("20", "21", f"{MINUS}1", "within", "19, 20, 21, 22 ✗")
    assert rows["unet"][3] == "refused 2 of what it said would fit"
    assert rows["swin"][:4] == ("–", "100", "–", "no number")


def test_the_chart_has_a_line_a_method_and_fills_the_models_that_were_kept_out(made_up: Recording) -> None:
    chart = draw.misses(made_up)
    axes = chart.fig.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["gpucourse", *draw.PEERS]
    hollow, filled = axes.lines[0], axes.lines[1]
    assert list(hollow.get_xdata()) == pytest.approx([0.5, -6.0, 6.0])
    assert list(filled.get_xdata()) == pytest.approx([1.0, 2.0])
    assert (hollow.get_markerfacecolor() == "none", filled.get_markerfacecolor() == "none") == (True, False)
    assert tuple(chart.rows[0]) == (
        "gpucourse", "5 of 6", f"1.50{SPACE}%", f"2.00{SPACE}%", f"2.00{SPACE}%", f"6.00{SPACE}%", "1",
    )  # fmt: skip
    assert tuple(chart.rows[2]) == ("mlsysim", "0 of 6", "–", "–", "–", "–", "0")
    assert "<svg" in chart._repr_html_()


def test_what_is_missing_is_told_with_its_reason_and_alike_reasons_together(made_up: Recording) -> None:
    told = list(draw.reasons(made_up))
    assert "measured, llama bf16 no 8: OutOfMemoryError: no" in told
    assert "predicted, swin bf16 yes search: UnseenError: no" in told
    (absent,) = (line for line in told if line.startswith("accelerate"))
    assert "and 3 more: ModuleNotFoundError" in absent
