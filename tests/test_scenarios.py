"""The memory lab's scenarios: fitted to predictions, held against recordings, and nothing typed in between."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gpucourse import recording, scenarios
from gpucourse.fit_grid import load_grid
from gpucourse.memory_ledger import MemoryLedger
from gpucourse.recording import MissingRecordingError
from gpucourse.scenarios import Scenario, measured_peaks, night_scenarios


def by_label() -> dict[str, Scenario]:
    return {scenario.label: scenario for scenario in night_scenarios()}


def test_the_plan_comes_first_with_the_labs_own_numbers() -> None:
    plan = night_scenarios()[0]
    assert plan.label == "the plan"
    assert plan.ledger == MemoryLedger()
    assert (plan.predicted, plan.residual_gb, plan.torch_version) == ((), None, "")


def test_measured_points_are_the_recordings() -> None:
    found = measured_peaks("fp32", False)
    assert found is not None
    tried = recording.load("largest_by_trying").data["tried"]
    ran = {int(rows): trial["allocated_bytes"] / 1e9 for rows, trial in tried.items() if not trial["message"]}
    assert dict(found.points) == ran
    assert list(found.points) == sorted(found.points)
    assert found.line == recording.load("largest_by_trying").line()


def test_a_step_without_a_recording_has_no_points() -> None:
    assert [label for label, scenario in by_label().items() if scenario.measured] == ["the plan", "GPT, fp32"]
    assert measured_peaks("bf16", True) is None


def test_a_recording_that_is_named_and_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {("bf16", False): ("no_such_recording", scenarios._by_trying)}
    monkeypatch.setattr(scenarios, "_RECORDED", missing)
    with pytest.raises(MissingRecordingError, match="no_such_recording"):
        measured_peaks("bf16", False)


def test_a_further_recording_is_one_more_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(data: Any) -> tuple[tuple[int, float], ...]:
        return tuple((int(m), nbytes / 1e9) for m, nbytes in data["peak_bytes"].items())

    monkeypatch.setattr(scenarios, "_RECORDED", {("bf16", False): ("loss_memory", read)})
    found = by_label()["GPT, bf16"].measured
    assert found is not None
    assert [m for m, _ in found.points] == [1, 2, 4]


def test_a_ledger_is_the_line_through_the_predictions_and_its_residual_is_theirs() -> None:
    for label, scenario in by_label().items():
        if label == "the plan":
            continue
        off = [gb - scenario.ledger.total_gb(m) for m, gb in scenario.predicted if m >= scenario.holds_from]
        assert sum(off) == pytest.approx(0, abs=1e-6)
        assert max(map(abs, off)) == pytest.approx(scenario.residual_gb)
        assert scenario.torch_version == load_grid().torch_version


def test_where_the_line_does_not_hold_the_peak_is_the_predicted_one() -> None:
    scenario = by_label()["GPT, fp32, checkpointed"]
    assert scenario.holds_from == 2
    assert scenario.peak_gb(1) == scenario.predicted[0][1] > scenario.ledger.total_gb(1)
    assert scenario.peak_gb(2) == scenario.ledger.total_gb(2)


def test_prediction_and_measurement_of_the_night_agree_within_their_residuals() -> None:
    scenario = by_label()["GPT, fp32"]
    assert scenario.measured is not None
    for m, gb in scenario.measured.points:
        assert abs(gb - dict(scenario.predicted)[m]) < 0.02
        assert abs(gb - scenario.peak_gb(m)) < 0.03


def test_the_memory_labs_text_agrees_with_the_ledger_it_speaks_of() -> None:
    ledger = by_label()["GPT, fp32"].ledger
    largest = recording.load("largest_by_trying").data["largest"]["rows"]
    assert dataclasses.replace(ledger, device_gb=24, reserve=0.1).max_microbatch == largest
    assert dataclasses.replace(ledger, device_gb=24, reserve=0.0).max_microbatch == 18
    tried = recording.load("largest_by_trying").data["tried"]
    assert tried["17"]["message"]
    measured = {int(m): t["allocated_bytes"] / 1e9 for m, t in tried.items() if not t["message"]}
    off = {m: MemoryLedger().total_gb(m) - gb for m, gb in measured.items()}
    assert off[1] > 0 > off[2]  # too careful at one row, too kind at two
