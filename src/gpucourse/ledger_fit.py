"""A ledger from predictions or measurements at several microbatches: a line, and how far from it they lie.

>>> ledger = fit_ledger([(8, 11.40e9), (16, 21.23e9), (32, 40.89e9)])
>>> round(ledger.fixed_gb, 2), round(ledger.activations_gb_per_sample, 3)
(1.57, 1.229)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from gpucourse.planning_ledger import LedgerError, MemoryLedger
from gpucourse.units import GB

if TYPE_CHECKING:
    from gpucourse.step_memory import StepMemory

__all__ = ["FittedLedger", "LedgerFitError", "fit_ledger"]

# Student's t, two-sided 95 %, for 1 degree of freedom and more; from 30 on it is near the normal's 1.96.
_T_95 = (
    *(
        12.706,
        4.303,
        3.182,
        2.776,
        2.571,
        2.447,
        2.365,
        2.306,
        2.262,
        2.228,
        2.201,
        2.179,
        2.160,
        2.145,
        2.131,
    ),
    *(
        2.120,
        2.110,
        2.101,
        2.093,
        2.086,
        2.080,
        2.074,
        2.069,
        2.064,
        2.060,
        2.056,
        2.052,
        2.048,
        2.045,
        2.042,
    ),
)


class LedgerFitError(LedgerError, ValueError):
    """The points make no ledger."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FittedLedger(MemoryLedger):
    """A ledger that knows the points it came from.

    Attributes
    ----------
    points
        (microbatch, GB) each, by microbatch.

    Examples
    --------
    >>> ledger = fit_ledger([(1, 1.0e9), (2, 1.5e9), (4, 2.5e9)])
    >>> dataclasses.replace(ledger, device_gb=12, reserve=0).max_microbatch
    23
    """

    points: tuple[tuple[int, float], ...]

    @property
    def residuals_gb(self) -> tuple[float, ...]:
        """Each point minus the line, in GB, in the order of the points.

        >>> fit_ledger([(1, 1e9), (2, 2e9), (3, 2e9)]).residuals_gb
        (-0.166..., 0.333..., -0.166...)
        """
        return tuple(
            gb - self.fixed_gb - microbatch * self.activations_gb_per_sample for microbatch, gb in self.points
        )

    def uncertainty_gb(self, microbatch: int) -> float | None:
        """Half the width of the 95 % interval in which a further point at this microbatch is expected.

        It takes the residuals for independent and normal. Those of a prediction are neither (the allocator's
        rounding is the same each time), so it says how well a line describes the points, and no more.

        Parameters
        ----------
        microbatch
            Samples.

        Returns
        -------
        float or None
            GB; None for two points, which lie on their line whatever they are.

        Examples
        --------
        >>> fit_ledger([(8, 11.40e9), (16, 21.23e9)]).uncertainty_gb(32) is None
        True
        """
        free = len(self.points) - 2
        if free == 0:
            return None
        mean = sum(m for m, _ in self.points) / len(self.points)
        spread = sum((m - mean) ** 2 for m, _ in self.points)
        variance = sum(r * r for r in self.residuals_gb) / free
        t = _T_95[min(free, len(_T_95)) - 1]
        return t * math.sqrt(variance * (1 + 1 / len(self.points) + (microbatch - mean) ** 2 / spread))

    def __str__(self) -> str:
        worst = max(map(abs, self.residuals_gb))
        said = "two points, so nothing is known of how well a line fits"
        if len(self.points) > 2:
            said = f"{len(self.points)} points, the farthest {worst:.3f} GB from the line"
        return (
            f"{self.fixed_gb:.3f} GB + {self.activations_gb_per_sample:.4f} GB a sample "
            f"({said}; microbatches {self.points[0][0]} to {self.points[-1][0]})"
        )


def fit_ledger(
    points: Iterable[StepMemory | tuple[int, float]], *, device_gb: float = 24.0, reserve: float = 0.10
) -> FittedLedger:
    """Fit a ledger to peaks at several microbatches, by least squares.

    Parameters
    ----------
    points
        Predictions (`StepMemory`), or (microbatch, bytes) pairs, at two different microbatches or more. All of one
        model, precision and so on.
    device_gb, reserve
        As `MemoryLedger` takes them.

    Returns
    -------
    FittedLedger
        A `MemoryLedger` with its points and residuals. Another device by `dataclasses.replace`.

    Raises
    ------
    LedgerFitError
        Fewer than two microbatches, predictions of different steps or releases, a pair that is none, or points
        that do not rise with the microbatch from a fixed part of 0 or more: there a line is the wrong model.

    Examples
    --------
    >>> print(fit_ledger([(8, 11.40e9), (16, 21.23e9), (32, 40.89e9)]))
    1.570 GB + 1.2288 GB a sample (3 points, the farthest 0.000 GB from the line; microbatches 8 to 32)
    """
    given = list(points)
    _alike([point for point in given if not isinstance(point, tuple)])
    pairs = sorted(_pair(point) for point in given)
    found = sorted({microbatch for microbatch, _ in pairs})
    if len(found) < 2:
        raise LedgerFitError(
            f"points at {len(found)} microbatch ({', '.join(map(str, found)) or 'none'}); wanted two or more "
            "different ones, to tell the fixed part from the activations"
        )
    mean, mean_gb = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    slope = sum((m - mean) * (gb - mean_gb) for m, gb in pairs) / sum((m - mean) ** 2 for m, _ in pairs)
    fixed = mean_gb - slope * mean
    if abs(fixed) < 1e-9:
        fixed = 0.0  # what rounding left
    if slope < 0 or fixed < 0:
        raise LedgerFitError(
            f"the points give {fixed:.3f} GB + {slope:.4f} GB a sample, and neither can be negative: their peaks come "
            "from different parts of the step. Use larger microbatches, or points nearer to each other"
        )
    return FittedLedger(
        fixed_gb=fixed,
        activations_gb_per_sample=slope,
        device_gb=device_gb,
        reserve=reserve,
        points=tuple(pairs),
    )


def _pair(point: Any) -> tuple[int, float]:
    if not isinstance(point, tuple):
        try:
            return point.microbatch, point.allocated_bytes / GB
        except AttributeError:
            raise LedgerFitError(
                f"a point is {point!r}; wanted a StepMemory or (microbatch, bytes)"
            ) from None
    if len(point) != 2:
        raise LedgerFitError(f"a point is {point!r}; wanted (microbatch, bytes)")
    microbatch, nbytes = point
    if isinstance(microbatch, bool) or not isinstance(microbatch, Integral) or microbatch < 0:
        raise LedgerFitError(f"a point's microbatch is {microbatch!r}; wanted a whole number, 0 or more")
    if isinstance(nbytes, bool) or not isinstance(nbytes, Real) or not 0 <= float(nbytes) < math.inf:
        raise LedgerFitError(f"a point has {nbytes!r} bytes; wanted a finite number, 0 or more")
    return int(microbatch), float(nbytes) / GB


def _alike(predictions: list[Any]) -> None:
    for name in (
        "model",
        "precision",
        "accumulation",
        "optimizer",
        "compiled",
        "trainable",
        "frozen",
        "torch_version",
    ):
        values = {getattr(prediction, name, None) for prediction in predictions}
        if len(values) > 1:
            told = " and ".join(sorted(map(str, values)))
            raise LedgerFitError(f"the points differ in {name} ({told}): one ledger is of one step")
