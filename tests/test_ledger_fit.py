"""A ledger fitted to peaks: the line, its residuals, and what they allow to be said."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpucourse.ledger_fit import FittedLedger, LedgerFitError, fit_ledger
from gpucourse.memory_ledger import MemoryLedger
from gpucourse.step_memory import StepMemory, predict_step_memory


@given(st.floats(0, 50), st.floats(0.001, 5), st.sets(st.integers(0, 500), min_size=2, max_size=6))
def test_points_on_a_line_give_the_line(fixed: float, slope: float, microbatches: set[int]) -> None:
    ledger = fit_ledger([(m, (fixed + slope * m) * 1e9) for m in sorted(microbatches, reverse=True)])
    assert ledger.fixed_gb == pytest.approx(fixed, abs=1e-6)
    assert ledger.activations_gb_per_sample == pytest.approx(slope, abs=1e-6)
    assert max(map(abs, ledger.residuals_gb)) < 1e-6
    assert ledger.points == tuple(sorted(ledger.points))


def test_a_fit_is_a_ledger_on_any_device() -> None:
    ledger = fit_ledger([(1, 2e9), (3, 3e9)], device_gb=10, reserve=0)
    assert isinstance(ledger, MemoryLedger)
    assert (ledger.fixed_gb, ledger.activations_gb_per_sample, ledger.max_microbatch) == (1.5, 0.5, 17)
    other = dataclasses.replace(ledger, device_gb=20)
    assert isinstance(other, FittedLedger)
    assert other.max_microbatch == 37


def test_residuals_and_the_interval_are_those_of_least_squares() -> None:
    ledger = fit_ledger([(1, 1e9), (2, 2e9), (3, 2e9)])
    assert ledger.residuals_gb == pytest.approx((-1 / 6, 1 / 3, -1 / 6))
    # One degree of freedom: t = 12.706, s = sqrt(1/6), and at the mean the factor is sqrt(1 + 1/3).
    assert ledger.uncertainty_gb(2) == pytest.approx(12.706 * (1 / 6) ** 0.5 * (4 / 3) ** 0.5)
    far, near = ledger.uncertainty_gb(10), ledger.uncertainty_gb(2)
    assert far is not None
    assert near is not None
    assert far > near


def test_two_points_say_nothing_of_their_own_uncertainty() -> None:
    ledger = fit_ledger([(1, 1e9), (2, 2e9)])
    assert ledger.uncertainty_gb(4) is None
    assert "nothing is known" in str(ledger)


def step(rows: int, **options: Any) -> StepMemory:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    return predict_step_memory(model, torch.empty(rows, 512), loss=lambda m, x: m(x).sum(), **options)


def test_predictions_fit_as_their_pairs_do() -> None:
    found = [step(rows) for rows in (8192, 16384, 32768)]
    ledger = fit_ledger(found)
    assert ledger == fit_ledger([(f.microbatch, f.allocated_bytes) for f in found])
    # A row: the input, relu's output, and the gradients of relu's output and input.
    assert ledger.activations_gb_per_sample * 1e9 == pytest.approx(4 * 4 * 512, rel=0.01)


def test_predictions_of_different_steps_make_no_ledger() -> None:
    with pytest.raises(LedgerFitError, match=r"differ in precision \(bf16 and fp32\)"):
        fit_ledger([step(8), step(16, precision="bf16")])
    with pytest.raises(LedgerFitError, match="differ in torch_version"):
        fit_ledger([step(8), dataclasses.replace(step(16), torch_version="1.0")])


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([], r"points at 0 microbatch \(none\)"),
        ([(4, 1e9), (4, 2e9)], r"points at 1 microbatch \(4\); wanted two or more"),
        ([(1, 2e9), (2, 1e9)], "neither can be negative"),
        ([(1, 1e9), (2, 3e9)], "neither can be negative"),
        ([(1, 1e9), (2.5, 3e9)], r"microbatch is 2.5"),
        ([(1, 1e9), (True, 3e9)], r"microbatch is True"),
        ([(1, 1e9), (2, float("nan"))], "nan bytes"),
        ([(1, 1e9), (2, "3 GB")], "'3 GB' bytes"),
        ([(1, 1e9), (2, 3e9, 4)], r"wanted \(microbatch, bytes\)"),
        ([(1, 1e9), 7], "a point is 7"),
    ],
)
def test_points_that_make_no_ledger_are_told(points: Any, said: str) -> None:
    with pytest.raises(LedgerFitError, match=said):
        fit_ledger(points)
