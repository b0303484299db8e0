"""GPTs of many shapes, each with its predicted peaks: what the lab "will it fit?" shows without a GPU or torch.

The numbers stand in ``fit_grid.json`` beside this file, written by ``python -m gpucourse.fit_grid_prediction``, which
anyone can run again. Each shape was predicted at a few microbatches, and a ledger is fitted through those of the
predictions whose peak lies at the same operator; between the predictions nothing is made up.

>>> grid = load_grid()
>>> night = grid.shape(layers=12, width=768, tokens=1024, precision="fp32", checkpointing=False)
>>> night.point(16).microbatch, night.parameters
(16, 124475904)
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from gpucourse.gpt_config import GPTConfig
from gpucourse.ledger_fit import FittedLedger, fit_ledger
from gpucourse.microbatch_search import budget_bytes
from gpucourse.units import GB, format_bytes

__all__ = [
    "CHECKPOINTING",
    "COMMAND",
    "FORMAT",
    "LAYERS",
    "LINES",
    "MICROBATCHES",
    "PRECISIONS",
    "RESERVES",
    "TOKENS",
    "VOCABULARY",
    "WIDTHS",
    "FitGrid",
    "FitGridError",
    "Largest",
    "Point",
    "Shape",
    "StaleFitGridError",
    "load_grid",
]

FORMAT = 1
COMMAND = "python -m gpucourse.fit_grid_prediction"

LAYERS = (6, 12, 24)
WIDTHS = (768, 1024, 2048)
TOKENS = (1024, 2048)
PRECISIONS = ("fp32", "bf16")
CHECKPOINTING = (False, True)
MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)
RESERVES = (0.0, 0.1, 0.2)
VOCABULARY = 50_304
HEAD_WIDTH = 64

LINES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "casts",
    "temporaries",
    "inputs",
    "workspaces",
    "rounding",
)
"""The lines of a peak, in the order in which they are written."""


class FitGridError(ValueError):
    """The file of predictions is none, or what was asked for is not in it."""


class StaleFitGridError(FitGridError):
    """The predictions were made by another method than the one that is here."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One prediction.

    Attributes
    ----------
    microbatch
        Samples.
    step, phase, operator
        Where the peak is.
    allocated_bytes, reserved_bytes
        The peak of what is allocated, and the most that is reserved without a limit.
    lines
        Bytes that are live at the peak; their sum is `allocated_bytes`.
    runs_within_gb
        Limits on what may be reserved under which the allocator gets through, of those that were tried: memories of
        cards with less than `reserved_bytes` and no less than `allocated_bytes`. Below them it cannot get through, and
        above them it does.
    """

    microbatch: int
    step: int
    phase: str
    operator: str
    allocated_bytes: int
    reserved_bytes: int
    lines: Mapping[str, int]
    runs_within_gb: tuple[float, ...] = ()

    def fits(self, device_gb: float, reserve: float) -> bool:
        """Say whether the step fits.

        With a reserve, what is allocated decides, as in every ledger; without one, whether the allocator gets through
        with no more than the device's memory. The second can fail where the first does not.

        Parameters
        ----------
        device_gb
            The device's memory; without a reserve one that was tried.
        reserve
            The part that is left free.
        """
        if reserve:
            return self.allocated_bytes <= budget_bytes(round(device_gb * GB), reserve)
        return self.reserved_bytes <= device_gb * GB or device_gb in self.runs_within_gb

    def verdict(self, device_gb: float, reserve: float) -> str:
        """Put into words whether it fits, and by how much.

        Parameters
        ----------
        device_gb, reserve
            As for `fits`.
        """
        budget = budget_bytes(round(device_gb * GB), reserve)
        if reserve:
            left = budget - self.allocated_bytes
            if left < 0:
                return f"over the budget by {format_bytes(-left)}"
            if not self.fits(device_gb, 0.0):
                return f"within the budget, {format_bytes(left)} to spare, and yet it runs out: the room is in pieces"
            return f"fits, {format_bytes(left)} to spare"
        if self.reserved_bytes <= budget:
            return f"fits, {format_bytes(budget - self.reserved_bytes)} never reserved"
        if self.fits(device_gb, reserve):
            return "fits, once cached segments are given back"
        if self.allocated_bytes <= budget:
            return "does not fit: the room is in pieces"
        return f"does not fit, {format_bytes(self.allocated_bytes - budget)} too much"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest microbatch that fits, as far as predictions and the line through them decide it.

    Attributes
    ----------
    least, most
        It lies between them: they are one number unless the line passes the budget within its own residual. 0:
        nothing fits.
    why
        What decided, in words.
    """

    least: int
    most: int
    why: str

    def __str__(self) -> str:
        if self.most == 0:
            return "none"
        return str(self.least) if self.least == self.most else f"{self.least} to {self.most}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A GPT of one shape, in one precision, with or without checkpoints, and its predictions.

    Attributes
    ----------
    layers, width, tokens
        Of the model; a sample has `tokens` of them. Heads are 64 wide.
    precision
        "fp32", or "bf16" under autocast.
    checkpointing
        Whether each block's activations are thrown away and computed again in the backward pass.
    points
        By microbatch.
    """

    layers: int
    width: int
    tokens: int
    precision: str
    checkpointing: bool
    points: tuple[Point, ...]

    @property
    def config(self) -> GPTConfig:
        """The model's shape."""
        return GPTConfig(
            layers=self.layers,
            width=self.width,
            heads=self.width // HEAD_WIDTH,
            vocabulary=VOCABULARY,
            context=self.tokens,
        )

    @property
    def parameters(self) -> int:
        """Numbers that learn."""
        return self.config.parameters

    def point(self, microbatch: int) -> Point:
        """Give the prediction at a microbatch.

        Parameters
        ----------
        microbatch
            One that was predicted.

        Raises
        ------
        FitGridError
            It was not.
        """
        for point in self.points:
            if point.microbatch == microbatch:
                return point
        known = ", ".join(str(point.microbatch) for point in self.points)
        raise FitGridError(f"no prediction at microbatch {microbatch}; there are {known}")

    @property
    def on_the_line(self) -> tuple[Point, ...]:
        """Those predictions whose peak is at the same operator as that of the largest microbatch."""
        last = self.points[-1]
        return tuple(p for p in self.points if (p.phase, p.operator) == (last.phase, last.operator))

    @property
    def ledger(self) -> FittedLedger | None:
        """A ledger through the predictions on the line; None for fewer than two."""
        points = [(point.microbatch, point.allocated_bytes) for point in self.on_the_line]
        return fit_ledger(points) if len(points) > 1 else None

    @property
    def residual_gb(self) -> float | None:
        """How far the farthest prediction is from the line; None where two points or fewer cannot tell."""
        ledger = self.ledger
        if ledger is None or len(ledger.points) < 3:
            return None
        return max(map(abs, ledger.residuals_gb))

    def largest(self, device_gb: float, reserve: float) -> Largest | None:
        """Find the largest microbatch that fits.

        Parameters
        ----------
        device_gb, reserve
            As for `Point.fits`.

        Returns
        -------
        Largest or None
            None without a reserve: there the allocator's pieces decide, of which a line knows nothing.
        """
        if not reserve:
            return None
        fits = [point.microbatch for point in self.points if point.fits(device_gb, reserve)]
        over = [point.microbatch for point in self.points if not point.fits(device_gb, reserve)]
        if not fits and over[0] == 1:
            return Largest(least=0, most=0, why="one sample is over the budget, as predicted")
        least = max(fits)
        most = min(over) - 1 if over else None
        if least == most:
            return Largest(least=least, most=most, why=f"predicted: {least} fits and {least + 1} does not")
        ledger, residual = self.ledger, self.residual_gb
        if ledger is None or residual is None:
            if most is None:
                return Largest(least=least, most=least, why=f"predicted up to {least}, and that fits")
            return Largest(
                least=least,
                most=most,
                why=f"predicted: {least} fits and {most + 1} does not, no line between them",
            )
        budget_gb = budget_bytes(round(device_gb * GB), reserve) / GB

        def by_line(shift_gb: float) -> int:
            found = int((budget_gb - shift_gb - ledger.fixed_gb) // ledger.activations_gb_per_sample)
            return max(least, found if most is None else min(found, most))

        beyond = "" if most is not None else f", followed beyond {least}"
        pieces = self._in_pieces(device_gb, least)
        why = f"by the line through {len(ledger.points)} predictions{beyond}{pieces}"
        return Largest(least=by_line(residual), most=by_line(-residual), why=why)

    def _in_pieces(self, device_gb: float, most: int) -> str:
        """Say from where on a step within the budget runs out all the same."""
        for point in self.points:
            if point.microbatch <= most and not point.fits(device_gb, 0.0):
                return f"; of allocated memory alone: {point.microbatch} runs out, in pieces"
        return ", of allocated memory alone"

    def target(self) -> str:
        """Write the model as `gpucourse predict` takes it."""
        config = f"layers={self.layers}, width={self.width}, tokens={self.tokens}"
        return f"gpucourse.fit_grid_prediction:model({config}, checkpointing={self.checkpointing})"

    def command(self, microbatch: int, device: str, reserve: float) -> str:
        """Write the command that predicts this step on a device.

        Parameters
        ----------
        microbatch
            Samples.
        device
            Its short name.
        reserve
            The part of it that is left free.
        """
        shape = f"{microbatch}x{self.tokens}:int64"
        return (
            f'gpucourse predict "{self.target()}" --batch {shape} {shape} '
            f"--loss gpucourse.training:next_token_loss --precision {self.precision} "
            f'--device "{device}" --reserve {reserve:g}'
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitGrid:
    """All shapes, and what predicted them.

    Attributes
    ----------
    torch_version
        The release whose operators were traced.
    method_version
        `gpucourse.step_memory.METHOD_VERSION` of then.
    date
        When, in ISO form.
    shapes
        In the order of the axes: layers, width, tokens, precision, checkpointing.
    """

    torch_version: str
    method_version: int
    date: str
    shapes: tuple[Shape, ...]

    def shape(self, *, layers: int, width: int, tokens: int, precision: str, checkpointing: bool) -> Shape:
        """Give one shape.

        Parameters
        ----------
        layers, width, tokens, precision, checkpointing
            As `Shape` has them.

        Raises
        ------
        FitGridError
            It is not in the grid.
        """
        wanted = (layers, width, tokens, precision, checkpointing)
        for made in self.shapes:
            if (made.layers, made.width, made.tokens, made.precision, made.checkpointing) == wanted:
                return made
        raise FitGridError(
            f"no prediction of {layers} layers, width {width}, T = {tokens}, {precision}, checkpointing "
            f"{checkpointing}; the grid has layers {LAYERS}, widths {WIDTHS}, T {TOKENS}, {PRECISIONS}. For others "
            "run gpucourse predict"
        )

    def line(self) -> str:
        """Say in one line where the numbers come from."""
        return (
            f"predicted without a GPU by {COMMAND} (step memory's method {self.method_version}) for torch "
            f"{self.torch_version} and the kernels of an H200, {self.date}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Give the grid as plain data, as the file holds it."""
        return {
            "format": FORMAT,
            "made_by": COMMAND,
            "torch": self.torch_version,
            "method_version": self.method_version,
            "date": self.date,
            "optimizer": "AdamW",
            "vocabulary": VOCABULARY,
            "lines": list(LINES),
            "shapes": [_shape_out(shape) for shape in self.shapes],
        }


def _shape_out(shape: Shape) -> dict[str, Any]:
    return {
        "layers": shape.layers,
        "width": shape.width,
        "tokens": shape.tokens,
        "precision": shape.precision,
        "checkpointing": shape.checkpointing,
        "points": [
            [
                p.microbatch,
                p.step,
                p.phase,
                p.operator,
                p.allocated_bytes,
                p.reserved_bytes,
                [p.lines[name] for name in LINES],
                list(p.runs_within_gb),
            ]
            for p in shape.points
        ],
    }


def _shape_in(given: Mapping[str, Any]) -> Shape:
    return Shape(
        **{name: given[name] for name in ("layers", "width", "tokens", "precision", "checkpointing")},
        points=tuple(_point_in(row) for row in given["points"]),
    )


def _point_in(row: Sequence[Any]) -> Point:
    microbatch, step, phase, operator, allocated, reserved, lines, within = row
    if sum(lines) != allocated:
        raise FitGridError(f"the lines at microbatch {microbatch} add up to {sum(lines)}, not to {allocated}")
    return Point(
        microbatch=microbatch,
        step=step,
        phase=phase,
        operator=operator,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        lines=dict(zip(LINES, lines, strict=True)),
        runs_within_gb=tuple(within),
    )


def read_grid(text: str, *, method_version: int) -> FitGrid:
    """Read a file of predictions.

    Parameters
    ----------
    text
        JSON.
    method_version
        What the predictions must have been made by.

    Raises
    ------
    FitGridError
        The text is no such file.
    StaleFitGridError
        Another version made it.
    """
    again = f"Make it anew: {COMMAND}"
    try:
        given = json.loads(text)
        if given["format"] != FORMAT or tuple(given["lines"]) != LINES:
            raise FitGridError(f"the grid of predictions has another format. {again}")
        if given["method_version"] != method_version:
            raise StaleFitGridError(
                f"the grid of predictions was made by method {given['method_version']} of step_memory, and here is "
                f"{method_version}: its numbers are stale. {again}"
            )
        return FitGrid(
            torch_version=given["torch"],
            method_version=given["method_version"],
            date=given["date"],
            shapes=tuple(_shape_in(shape) for shape in given["shapes"]),
        )
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise FitGridError(f"the grid of predictions cannot be read ({error!r}). {again}") from error


@functools.cache
def load_grid() -> FitGrid:
    """Read the package's predictions; needs no torch.

    Raises
    ------
    StaleFitGridError
        They were made by another method than the one that is here.
    """
    from gpucourse.step_memory import METHOD_VERSION

    text = (resources.files("gpucourse") / "fit_grid.json").read_text(encoding="utf-8")
    return read_grid(text, method_version=METHOD_VERSION)
