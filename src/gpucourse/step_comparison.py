"""A predicted training step beside the measured one, line by line, with what is left over.

>>> step = {"model": "MLP", "microbatch": 8, "precision": "fp32", "accumulation": 1, "optimizer": "SGD",
...         "trainable": 10, "frozen": 0, "torch_version": "2.13.0"}
>>> predicted = step | {"reserved_bytes": 2_097_152, "peaks": [{"step": 1, "phase": "backward",
...     "allocated_bytes": 1_000_000, "lines": {"parameters": 400_000, "activations": 600_000}}]}
>>> measured = step | {"reserved_bytes": 2_097_152, "peaks": [{"step": 1, "phase": "backward",
...     "allocated_bytes": 1_250_000, "lines": {"parameters": 400_000, "activations": 850_000}}]}
>>> print(compare_step_memory(predicted, measured))
MLP, microbatch 8, fp32, SGD: measured less predicted, of what was measured
  live at the peak  predicted  measured   residual
  parameters         400.0 kB  400.0 kB        0 B
  activations        600.0 kB  850.0 kB  +250.0 kB  +29.41 %
  allocated           1.00 MB   1.25 MB  +250.0 kB  +20.00 %
  reserved            2.10 MB   2.10 MB        0 B
both with torch 2.13.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpucourse import html
from gpucourse.units import format_bytes

if TYPE_CHECKING:
    from gpucourse.memory_measurement import MeasuredStep
    from gpucourse.step_memory import StepMemory

__all__ = ["Comparison", "ComparisonError", "ComparisonRow", "compare_step_memory"]

# What must agree, and what to say it is.
_SAME = {
    "model": "model",
    "trainable": "number of parameters that learn",
    "frozen": "number of frozen parameters",
    "microbatch": "microbatch",
    "accumulation": "accumulation",
    "precision": "precision",
    "optimizer": "optimizer",
}


class ComparisonError(ValueError):
    """The two are not of one step, so that their difference would say nothing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One line of both.

    Attributes
    ----------
    name
        A role, "rounding", "allocated" or "reserved".
    predicted_bytes, measured_bytes
        What each says.
    """

    name: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def residual_bytes(self) -> int:
        """Measured less predicted."""
        return self.measured_bytes - self.predicted_bytes

    @property
    def residual_share(self) -> float | None:
        """Residual over what was measured; None where nothing was."""
        return self.residual_bytes / self.measured_bytes if self.measured_bytes else None

    def cells(self) -> tuple[str, str, str, str, str]:
        """Write the row: name, predicted, measured, residual in bytes and in per cent."""
        share, left = self.residual_share, self.residual_bytes
        of = (
            "" if not left else "none measured" if share is None else f"{_sign(left)}{100 * abs(share):.2f} %"
        )
        return (
            self.name,
            format_bytes(self.predicted_bytes),
            format_bytes(self.measured_bytes),
            f"{_sign(left)}{format_bytes(abs(left))}",
            of,
        )


def _sign(number: int) -> str:
    return "+" if number > 0 else "\N{MINUS SIGN}" if number < 0 else ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A prediction beside a measurement.

    Attributes
    ----------
    title
        The step that both are of.
    rows
        The lines at the peak of each, then "allocated" and "reserved".
    predicted_at, measured_at
        (step, phase) of the two peaks.
    predicted_torch, measured_torch
        The torch releases.
    gpu
        What was measured on.
    notes
        What should be known, such as peaks in two different phases.
    """

    title: str
    rows: tuple[ComparisonRow, ...]
    predicted_at: tuple[int, str]
    measured_at: tuple[int, str]
    predicted_torch: str
    measured_torch: str
    gpu: str
    notes: tuple[str, ...] = ()

    def row(self, name: str) -> ComparisonRow:
        """Give one row.

        Parameters
        ----------
        name
            A line, "allocated" or "reserved".

        Raises
        ------
        KeyError
            There is no such row.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no row {name!r}; there are {', '.join(row.name for row in self.rows)}")

    def as_dict(self) -> dict[str, Any]:
        """Give the comparison as plain data."""
        return {
            "title": self.title,
            "rows": [
                {
                    "name": row.name,
                    "predicted_bytes": row.predicted_bytes,
                    "measured_bytes": row.measured_bytes,
                    "residual_bytes": row.residual_bytes,
                    "residual_share": row.residual_share,
                }
                for row in self.rows
            ],
            "predicted_at": list(self.predicted_at),
            "measured_at": list(self.measured_at),
            "predicted_torch": self.predicted_torch,
            "measured_torch": self.measured_torch,
            "gpu": self.gpu,
            "notes": list(self.notes),
        }

    def _torches(self) -> str:
        on = f", measured on {self.gpu}" if self.gpu else ""
        if self.predicted_torch == self.measured_torch:
            return f"both with torch {self.measured_torch}{on}"
        return (
            f"predicted for torch {self.predicted_torch} and measured with torch {self.measured_torch}: two releases, "
            f"whose operators may allocate otherwise; a residual may be theirs{on}"
        )

    def __str__(self) -> str:
        head = ("live at the peak", "predicted", "measured", "residual", "")
        table = [head, *(row.cells() for row in self.rows)]
        width = [max(len(row[k]) for row in table) for k in range(5)]
        lines = [
            "  ".join(
                cell.ljust(size) if k == 0 else cell.rjust(size)
                for k, (cell, size) in enumerate(zip(row, width, strict=True))
            ).rstrip()
            for row in table
        ]
        return "\n".join(
            [
                f"{self.title}: measured less predicted, of what was measured",
                *(f"  {line}" for line in lines),
                *(f"note: {note}" for note in self.notes),
                self._torches(),
            ]
        )

    def _repr_html_(self) -> str:
        table = html.table(
            ["live at the peak", "predicted", "measured", "residual", "of the measurement"],
            [row.cells() for row in self.rows],
            self.title,
        )
        notes = "".join(f"<p>Note: {html.escape(note)}.</p>" for note in self.notes)
        said = self._torches()
        return f"{table}{notes}<p>{html.escape(said[0].upper() + said[1:])}.</p>"


def compare_step_memory(
    prediction: StepMemory | Mapping[str, Any], measurement: MeasuredStep | Mapping[str, Any]
) -> Comparison:
    """Put the lines of a prediction and of a measurement side by side.

    Parameters
    ----------
    prediction
        Of `gpucourse.step_memory.predict_step_memory`, or its ``as_dict()``.
    measurement
        Of `gpucourse.memory_measurement.measure_step_memory`, or its ``as_dict()``, as a recording holds it.

    Returns
    -------
    Comparison
        Lines that neither has are left out.

    Raises
    ------
    ComparisonError
        They are of two steps: another model, microbatch, precision, accumulation or optimizer.
    TypeError
        One is neither.
    """
    predicted, measured = _plain(prediction, "prediction"), _plain(measurement, "measurement")
    for key, words in _SAME.items():
        if predicted[key] != measured[key]:
            raise ComparisonError(
                f"the {words} differs: {predicted[key]} predicted, {measured[key]} measured. Predict and measure "
                "one step, with the same arguments"
            )
    one, other = (found.get("compiled") or "nothing" for found in (predicted, measured))
    if one != other:
        raise ComparisonError(
            f"what is compiled differs: {one} predicted, {other} measured. An eager program's peak says nothing of a "
            "compiled one's"
        )
    ours, theirs = _peak(predicted), _peak(measured)
    names = [*ours["lines"], *(name for name in theirs["lines"] if name not in ours["lines"])]
    rows = [
        ComparisonRow(
            name=name,
            predicted_bytes=int(ours["lines"].get(name, 0)),
            measured_bytes=int(theirs["lines"].get(name, 0)),
        )
        for name in names
        if ours["lines"].get(name) or theirs["lines"].get(name)
    ]
    rows.append(
        ComparisonRow(
            name="allocated",
            predicted_bytes=int(ours["allocated_bytes"]),
            measured_bytes=int(theirs["allocated_bytes"]),
        )
    )
    rows.append(
        ComparisonRow(
            name="reserved",
            predicted_bytes=int(predicted["reserved_bytes"]),
            measured_bytes=int(measured["reserved_bytes"]),
        )
    )
    notes = []
    at = [(int(peak["step"]), str(peak["phase"])) for peak in (ours, theirs)]
    if at[0][1] != at[1][1]:
        notes.append(
            f"the peaks are in two phases, the {at[0][1]} pass predicted and the {at[1][1]} pass measured: their "
            "lines are of two instants"
        )
    windows = f" x {measured['accumulation']}" if measured["accumulation"] > 1 else ""
    compiled = f", compiled ({measured['compiled']})" if measured.get("compiled") else ""
    return Comparison(
        title=f"{measured['model']}, microbatch {measured['microbatch']}{windows}, {measured['precision']}, "
        f"{measured['optimizer']}{compiled}",
        rows=tuple(rows),
        predicted_at=at[0],
        measured_at=at[1],
        predicted_torch=str(predicted["torch_version"]),
        measured_torch=str(measured["torch_version"]),
        gpu=str(measured.get("gpu", "")),
        notes=(*notes, *(str(note) for note in measured.get("notes", ()))),
    )


def _plain(given: Any, what: str) -> Mapping[str, Any]:
    found = given if isinstance(given, Mapping) else getattr(given, "as_dict", dict)()
    missing = [key for key in (*_SAME, "peaks", "reserved_bytes", "torch_version") if key not in found]
    if missing:
        raise TypeError(
            f"the {what} is a {type(given).__name__} without {', '.join(missing)}; wanted what "
            f"{'predict' if what == 'prediction' else 'measure'}_step_memory gives, or its as_dict()"
        )
    return found


def _peak(found: Mapping[str, Any]) -> Mapping[str, Any]:
    peaks: list[Mapping[str, Any]] = list(found["peaks"])
    return max(peaks, key=lambda peak: int(peak["allocated_bytes"]))
