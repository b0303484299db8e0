"""The memory lab's scenarios without a browser: lines, measured points and residuals are the ledgers' own."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator
from typing import Any

import ipywidgets
import pytest

from gpucourse import recording
from gpucourse.memory_ledger import FixedPartOverBudgetError, MemoryLedger
from gpucourse.scenarios import MeasuredPeaks, Scenario, night_scenarios
from gpucourse.widgets import ControlError, scenario_lab
from tests.test_widgets import MICROBATCH, StaticPage

DEVICES = (16.0, 24.0, 40.0, 48.0)
RESERVES = (0.0, 0.1, 0.2)


@pytest.fixture(autouse=True)
def _no_widgets_left() -> Iterator[None]:
    """Close what a test made: ipywidgets keeps every widget, and looks through all of them for links."""
    yield
    ipywidgets.Widget.close_all()


@pytest.fixture(scope="module")
def lab() -> StaticPage:
    return StaticPage(scenario_lab())


def expected_scenario(
    scenario: Scenario, microbatch: int, device_gb: float, reserve: float
) -> dict[str, str]:
    """Give the first two columns of the lab's tables, from the ledger and the measured points alone."""
    ledger = dataclasses.replace(scenario.ledger, device_gb=device_gb, reserve=reserve)
    try:
        largest = str(ledger.max_microbatch)
    except FixedPartOverBudgetError:
        largest = "none"
    early = dict(scenario.predicted).get(microbatch) if microbatch < scenario.holds_from else None
    peak = ledger.total_gb(microbatch) if early is None else early
    found = {
        "Item": "Value",
        "Fixed part": f"{ledger.fixed_gb:.2f} GB",
        "Activations": f"{microbatch * ledger.activations_gb_per_sample:.2f} GB",
        "Peak": f"{peak:.2f} GB",
        "Budget": f"{device_gb * (1 - reserve):.2f} GB",
        "Largest microbatch": largest,
    }
    if scenario.measured:
        found |= {"Microbatch": "Ledger (GB)"}
        found |= {str(m): f"{scenario.peak_gb(m):.2f}" for m, _ in scenario.measured.points}
    return found


def put(page: StaticPage, scenario: int, microbatch: int, device_gb: float, reserve: float) -> None:
    page.set("Scenario", scenario)
    page.set(MICROBATCH, microbatch)
    page.set("Device (GB)", DEVICES.index(device_gb))
    page.set("Reserve", RESERVES.index(reserve))


def test_the_lab_opens_on_the_plan() -> None:
    page = StaticPage(scenario_lab())
    assert page.table() == expected_scenario(night_scenarios()[0], 16, 24.0, 0.1)
    assert "Microbatch 16, the plan: fits, 12.96 GB to spare\n" in page.text()


@pytest.mark.parametrize("seed", range(40))
def test_any_setting_shows_the_numbers_of_its_ledger(lab: StaticPage, seed: int) -> None:
    rng = random.Random(seed)
    place, microbatch = rng.randrange(5), rng.randrange(1, 65)
    size, reserve = rng.choice(DEVICES), rng.choice(RESERVES)
    put(lab, place, microbatch, size, reserve)
    scenario = night_scenarios()[place]
    assert lab.table() == expected_scenario(scenario, microbatch, size, reserve)
    ledger = dataclasses.replace(scenario.ledger, device_gb=size, reserve=reserve)
    fits = scenario.peak_gb(microbatch) <= ledger.budget_gb
    said = "fits, " if fits else "over the budget by "
    assert f"Microbatch {microbatch}, {scenario.label}: {said}" in lab.text()


def test_measured_points_are_drawn_where_they_were_measured(lab: StaticPage) -> None:
    put(lab, 1, 16, 24.0, 0.1)
    frame = next(
        leaf for leaf in lab.leaves(lab.root) if "<style>" not in leaf and 'class="measured"' in leaf
    )
    frame = frame[: frame.index('<ul class="key">')]
    crosses = re.findall(r'<path class="measured" d="M([\d.]+) ([\d.]+)l8 8m0 -8l-8 8"/>', frame)
    tried = recording.load("largest_by_trying").data["tried"]
    ran = sorted((t["rows"], t["allocated_bytes"] / 1e9) for t in tried.values() if not t["message"])
    wanted = [(34 + 318 * m / 64 - 4, 196 - 186 * gb / 60 - 4) for m, gb in ran]
    assert [tuple(map(float, cross)) for cross in crosses] == [pytest.approx(at, abs=0.11) for at in wanted]


def test_a_step_that_nobody_measured_says_so(lab: StaticPage) -> None:
    put(lab, 4, 16, 24.0, 0.1)
    assert "Not measured: no recording holds this step yet" in lab.text()
    put(lab, 1, 16, 24.0, 0.1)
    assert "Not measured" not in lab.text()


def test_residuals_and_both_releases_stand_beside_the_points(lab: StaticPage) -> None:
    put(lab, 1, 16, 24.0, 0.1)
    text = lab.text().replace("\xa0", " ")
    scenario = night_scenarios()[1]
    assert scenario.measured is not None
    for m, gb in scenario.measured.points:
        off = 1000 * (gb - scenario.peak_gb(m))
        assert f"{off:+.1f} MB".replace("-", "−") in text
    found = recording.load("largest_by_trying")
    assert found.line() in text
    assert (
        f"predicted for torch {scenario.torch_version}, and torch {found.provenance['torch']} measured"
        in text
    )


def test_below_the_line_the_peak_is_said_to_be_predicted(lab: StaticPage) -> None:
    put(lab, 2, 1, 24.0, 0.1)
    assert "as predicted: another part of the step has its peak here" in lab.text()
    put(lab, 2, 2, 24.0, 0.1)
    assert "another part" not in lab.text()


def test_a_point_above_the_picture_is_an_arrow(lab: StaticPage) -> None:
    put(lab, 1, 64, 24.0, 0.1)
    assert "↑" in lab.text()
    put(lab, 1, 16, 24.0, 0.1)
    assert "↑" not in lab.text()


def test_a_learners_own_points_can_be_shown() -> None:
    own = Scenario(
        label="mine",
        ledger=MemoryLedger(fixed_gb=1.0, activations_gb_per_sample=0.5),
        measured=MeasuredPeaks(points=((4, 3.1), (8, 4.9)), torch_version="2.9.0", line="measured here"),
    )
    page = StaticPage(scenario_lab([own, night_scenarios()[0]]))
    assert page.table() == expected_scenario(own, 16, 24.0, 0.1)
    assert "+100.0 MB" in page.text()
    assert "−100.0 MB" in page.text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"microbatches": range(65)}, "1 or more and rising"),
        ({"microbatches": [1, 2, 4], "start": 2}, r"found \[1, 2, 4\]"),
        ({"start": 65}, "starts at 65"),
        ({"start_device_gb": 23.0}, "starts at 23.0"),
    ],
)
def test_what_cannot_be_shown_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ControlError, match=said):
        scenario_lab(**arguments)


def test_one_scenario_is_no_menu() -> None:
    with pytest.raises(ControlError, match="has 1 value"):
        scenario_lab(night_scenarios()[:1])
