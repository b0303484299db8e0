"""A step's peak at another microbatch, from measurements at two small ones: for what cannot be predicted.

>>> found = calibrate_step_memory([(4, 3.0e9), (8, 5.0e9)], microbatch=32)
>>> found.allocated_bytes, found.basis
(17000000000, 'calibrated')
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from gpucourse.ledger_fit import FittedLedger, LedgerFitError, fit_ledger
from gpucourse.units import GB, format_bytes

if TYPE_CHECKING:
    from gpucourse.memory_measurement import MeasuredStep

__all__ = ["CalibratedStep", "calibrate_step_memory"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedStep:
    """A peak read off a line through measured ones. It has no lines: nothing is known of what lives in it.

    Attributes
    ----------
    microbatch
        Samples in one forward and backward pass.
    allocated_bytes
        What the line gives.
    uncertainty_bytes
        Half the width of the 95 % interval, where three measurements or more say something of it.
    ledger
        The line and its points; another device by `dataclasses.replace`.
    basis
        Always "calibrated".
    """

    microbatch: int
    allocated_bytes: int
    uncertainty_bytes: int | None
    ledger: FittedLedger
    basis: Literal["calibrated"] = "calibrated"

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain data."""
        return {
            "basis": self.basis,
            "microbatch": self.microbatch,
            "allocated_bytes": self.allocated_bytes,
            "uncertainty_bytes": self.uncertainty_bytes,
            "fixed_gb": self.ledger.fixed_gb,
            "activations_gb_per_sample": self.ledger.activations_gb_per_sample,
            "points": [list(point) for point in self.ledger.points],
        }

    def __str__(self) -> str:
        measured = ", ".join(str(samples) for samples, _ in self.ledger.points)
        known = "two points say nothing of how well a line fits"
        if self.uncertainty_bytes is not None:
            known = f"± {format_bytes(self.uncertainty_bytes)}, if what is left over is chance"
        return (
            f"microbatch {self.microbatch}: {format_bytes(self.allocated_bytes)} allocated at the peak "
            f"(calibrated by measurements at {measured}; {known})"
        )


def calibrate_step_memory(
    measured: Iterable[MeasuredStep | tuple[int, float]], *, microbatch: int
) -> CalibratedStep:
    """Read a peak off the line through measured ones.

    The line holds while the peak comes from one instant of the step. A compiled step's graph, and so its peak, can
    change with the shapes; the larger of the measured microbatches should be near to the one asked for.

    Parameters
    ----------
    measured
        Measurements of one step (`gpucourse.memory_measurement.MeasuredStep`), or (microbatch, bytes) pairs, at two
        different microbatches or more.
    microbatch
        The one asked for, 1 or more.

    Raises
    ------
    LedgerFitError
        A point is a prediction or no point, there are fewer than two microbatches, or no line goes through them.
    TypeError, ValueError
        The microbatch is no whole number of 1 or more.

    Examples
    --------
    >>> print(calibrate_step_memory([(4, 3.0e9), (8, 5.0e9)], microbatch=16))
    microbatch 16: 9.00 GB allocated at the peak (calibrated by measurements at 4, 8; two points say nothing of how \
well a line fits)
    """
    if isinstance(microbatch, bool) or not isinstance(microbatch, int):
        raise TypeError(f"microbatch is {microbatch!r}; wanted a whole number")
    if microbatch < 1:
        raise ValueError(f"microbatch is {microbatch}; wanted 1 or more")
    points = list(measured)
    for point in points:
        if hasattr(point, "trace"):
            raise LedgerFitError(
                f"a point is a prediction ({type(point).__name__}): a calibration needs measurements, by "
                "measure_step_memory on the device"
            )
    ledger = fit_ledger(points)  # type: ignore[arg-type]  # it takes whatever has a microbatch and bytes
    beside = ledger.uncertainty_gb(microbatch)
    return CalibratedStep(
        microbatch=microbatch,
        allocated_bytes=round((ledger.fixed_gb + microbatch * ledger.activations_gb_per_sample) * GB),
        uncertainty_bytes=None if beside is None else round(beside * GB),
        ledger=ledger,
    )
