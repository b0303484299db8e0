"""A line through measured peaks is labelled as one, and takes measurements alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from gpucourse.calibrated_step import calibrate_step_memory
from gpucourse.ledger_fit import LedgerFitError
from gpucourse.step_memory import predict_step_memory


def test_a_peak_on_the_line_through_two_measurements_says_that_it_is_calibrated() -> None:
    found = calibrate_step_memory([(4, 3.0e9), (8, 5.0e9)], microbatch=16)
    assert (found.basis, found.allocated_bytes, found.uncertainty_bytes) == (
        "calibrated",
        9_000_000_000,
        None,
    )
    assert "calibrated by measurements at 4, 8" in str(found)
    assert json.loads(json.dumps(found.as_dict()))["basis"] == "calibrated"


def test_three_measurements_say_how_sure_it_is() -> None:
    found = calibrate_step_memory([(4, 3.0e9), (8, 5.1e9), (12, 7.0e9)], microbatch=16)
    assert found.uncertainty_bytes is not None
    assert found.uncertainty_bytes > 0
    assert "±" in str(found)


def test_a_prediction_is_no_measurement() -> None:
    predicted = predict_step_memory(
        nn.Linear(4, 4), torch.empty(2, 4), loss=lambda m, x: m(x).sum(), optimizer=None
    )
    points: Any = [predicted, predicted]
    with pytest.raises(LedgerFitError, match=r"a point is a prediction \(StepMemory\).*measure_step_memory"):
        calibrate_step_memory(points, microbatch=8)


@pytest.mark.parametrize(
    ("microbatch", "kind", "said"),
    [(0, ValueError, "microbatch is 0"), (True, TypeError, "is True"), (1.5, TypeError, "is 1.5")],
)
def test_a_microbatch_that_is_none_is_told(microbatch: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        calibrate_step_memory([(4, 3.0e9), (8, 5.0e9)], microbatch=microbatch)


def test_one_microbatch_is_not_enough() -> None:
    with pytest.raises(LedgerFitError, match="wanted two or more"):
        calibrate_step_memory([(4, 3.0e9)], microbatch=8)
