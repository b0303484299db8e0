"""Ledgers of steps that exist: the plan of the night, and the night's GPT as it was predicted and measured.

>>> [scenario.label for scenario in night_scenarios()]
['the plan', 'GPT, fp32', 'GPT, fp32, checkpointed', 'GPT, bf16', 'GPT, bf16, checkpointed']
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from gpucourse.fit_grid import FitGrid, load_grid
from gpucourse.planning_ledger import MemoryLedger
from gpucourse.recording import load
from gpucourse.units import GB

__all__ = ["MeasuredPeaks", "Scenario", "measured_peaks", "night_scenarios"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPeaks:
    """Allocated peaks of one step at several microbatches, from a recording.

    Attributes
    ----------
    points
        (microbatch, GB) each, by microbatch.
    torch_version
        What they were measured with.
    line
        Where they come from, in one line.
    """

    points: tuple[tuple[int, float], ...]
    torch_version: str
    line: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A ledger, what it was fitted to, and what was measured of the same step.

    Attributes
    ----------
    label
        Its name in a menu.
    ledger
        The line.
    predicted
        (microbatch, GB) of each prediction; none for a plan.
    holds_from
        The smallest microbatch at which the line holds: below it the peak lies in another part of the step.
    residual_gb
        How far the farthest prediction is from the line; None for a plan.
    torch_version
        What the predictions speak for; "" for a plan.
    measured
        None where no recording has it.
    """

    label: str
    ledger: MemoryLedger
    predicted: tuple[tuple[int, float], ...] = ()
    holds_from: int = 1
    residual_gb: float | None = None
    torch_version: str = ""
    measured: MeasuredPeaks | None = None

    def peak_gb(self, microbatch: int) -> float:
        """Give the peak: by the line, and where that does not hold as predicted.

        Parameters
        ----------
        microbatch
            Samples, 1 or more.

        Examples
        --------
        >>> Scenario(label="the plan", ledger=MemoryLedger()).peak_gb(16)
        8.64
        """
        other = {m: gb for m, gb in self.predicted if m < self.holds_from}
        return other.get(microbatch, self.ledger.total_gb(microbatch))


def _by_trying(data: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """Read the trials of the opening failure that ran."""
    ran = [trial for trial in data["tried"].values() if not trial["message"]]
    return tuple(sorted((trial["rows"], trial["allocated_bytes"] / GB) for trial in ran))


_Reader = Callable[[Mapping[str, Any]], tuple[tuple[int, float], ...]]

# The recordings that hold measured peaks of the night's GPT, by precision and checkpointing. A step that is missing
# here has not been measured; one more recording is one more line.
_RECORDED: Mapping[tuple[str, bool], tuple[str, _Reader]] = {
    ("fp32", False): ("largest_by_trying", _by_trying)
}


def measured_peaks(precision: str, checkpointing: bool) -> MeasuredPeaks | None:
    """Give what was measured of the night's GPT; None where no recording has it.

    Parameters
    ----------
    precision, checkpointing
        Of the step.
    """
    if (precision, checkpointing) not in _RECORDED:
        return None
    name, read = _RECORDED[precision, checkpointing]
    found = load(name)
    return MeasuredPeaks(points=read(found), torch_version=str(found.provenance["torch"]), line=found.line())


def night_scenarios(grid: FitGrid | None = None) -> tuple[Scenario, ...]:
    """Give the plan, and the night's GPT in both precisions, with and without checkpoints.

    Parameters
    ----------
    grid
        The predictions; the package's own where none are given.

    Raises
    ------
    RecordingError
        A recording of measured peaks is missing or broken.
    ValueError
        The predictions of a step make no line.
    """
    known = load_grid() if grid is None else grid
    made = [Scenario(label="the plan", ledger=MemoryLedger(), measured=measured_peaks("fp32", False))]
    for precision in ("fp32", "bf16"):
        for checkpointing in (False, True):
            shape = known.shape(
                layers=12, width=768, tokens=1024, precision=precision, checkpointing=checkpointing
            )
            ledger = shape.ledger
            if ledger is None:
                raise ValueError(f"the predictions of {shape.target()} make no line")
            made.append(
                Scenario(
                    label=f"GPT, {precision}{', checkpointed' if checkpointing else ''}",
                    ledger=ledger,
                    predicted=tuple((p.microbatch, p.allocated_bytes / GB) for p in shape.points),
                    holds_from=shape.on_the_line[0].microbatch,
                    residual_gb=shape.residual_gb,
                    torch_version=known.torch_version,
                    measured=measured_peaks(precision, checkpointing),
                )
            )
    return tuple(made)
