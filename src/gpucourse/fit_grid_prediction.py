"""Predict the grid of shapes of the lab "will it fit?": ``python -m gpucourse.fit_grid_prediction``.

It needs torch and no GPU, and takes some fifteen minutes on two cores. The file that it writes is `fit_grid`'s.

>>> batch(8, 1024)[0].shape
torch.Size([8, 1024])
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpucourse import hardware
from gpucourse.fit_grid import (
    CHECKPOINTING,
    HEAD_WIDTH,
    LAYERS,
    LINES,
    MICROBATCHES,
    PRECISIONS,
    TOKENS,
    VOCABULARY,
    WIDTHS,
    FitGrid,
    Point,
    Shape,
)
from gpucourse.step_memory import METHOD_VERSION, StepMemory, predict_step_memory
from gpucourse.training import GPTConfig, next_token_loss
from gpucourse.units import GB

if TYPE_CHECKING:
    import torch

__all__ = ["batch", "model", "predict_point", "predict_shape"]

_MOST_EXTRA = 512  # microbatches beyond the grid's own that are predicted where a line has too few points


def model(*, layers: int, width: int, tokens: int, checkpointing: bool = False) -> torch.nn.Module:
    """Make a GPT of the grid: the course's, with heads of 64 and the night's vocabulary.

    Parameters
    ----------
    layers, width, tokens
        Its shape.
    checkpointing
        Whether each block's activations are thrown away and computed again in the backward pass.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    from gpucourse.gpt import GPT

    class Checkpointed(torch.nn.Module):
        def __init__(self, block: torch.nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
            return found

    made = GPT(
        GPTConfig(
            layers=layers, width=width, heads=width // HEAD_WIDTH, vocabulary=VOCABULARY, context=tokens
        )
    )
    if checkpointing:
        made.blocks = torch.nn.ModuleList(Checkpointed(block) for block in made.blocks)
    return made


def batch(microbatch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a batch without data: tokens and targets.

    Parameters
    ----------
    microbatch, tokens
        Its shape.
    """
    import torch

    given = torch.empty(microbatch, tokens, dtype=torch.int64, device="meta")
    return given, torch.empty_like(given)


def predict_point(
    microbatch: int, *, layers: int, width: int, tokens: int, precision: Any, checkpointing: bool
) -> Point:
    """Predict one step with AdamW.

    Parameters
    ----------
    microbatch, layers, width, tokens, precision, checkpointing
        As `Shape` has them.

    Raises
    ------
    ValueError
        The peak has a line that the grid does not know.
    """
    found = predict_step_memory(
        lambda: model(layers=layers, width=width, tokens=tokens, checkpointing=checkpointing),
        batch(microbatch, tokens),
        loss=next_token_loss,
        precision=precision,
    )
    peak = found.peak
    unknown = {name for name, nbytes in peak.lines.items() if nbytes} - set(LINES)
    if unknown:
        raise ValueError(f"the peak has lines that the grid has not: {', '.join(sorted(unknown))}")
    return Point(
        microbatch=microbatch,
        step=peak.step,
        phase=peak.phase,
        operator=peak.operator,
        allocated_bytes=peak.allocated_bytes,
        reserved_bytes=found.reserved_bytes,
        lines={name: peak.lines.get(name, 0) for name in LINES},
        runs_within_gb=_runs_within_gb(found),
    )


def _runs_within_gb(found: StepMemory) -> tuple[float, ...]:
    """Try the memories of the cards on record that lie between what is allocated and what is reserved."""
    sizes = sorted({round(record.memory.value) for record in hardware.DEVICES})
    return tuple(
        size / GB
        for size in sizes
        if found.allocated_bytes <= size < found.reserved_bytes and found.runs_within(size)
    )


def predict_shape(given: tuple[int, int, int, str, bool]) -> Shape:
    """Predict a shape at the grid's microbatches, and at larger ones until three lie on a line.

    Parameters
    ----------
    given
        Layers, width, tokens, precision, checkpointing.
    """
    names = ("layers", "width", "tokens", "precision", "checkpointing")
    named: dict[str, Any] = dict(zip(names, given, strict=True))
    points = [predict_point(microbatch, **named) for microbatch in MICROBATCHES]
    made = Shape(**named, points=tuple(points))
    while len(made.on_the_line) < 3 and points[-1].microbatch < _MOST_EXTRA:
        points.append(predict_point(2 * points[-1].microbatch, **named))
        made = Shape(**named, points=tuple(points))
    return made


def written(grid: FitGrid) -> str:
    """Write a grid as JSON, one shape a line.

    Parameters
    ----------
    grid
        The shapes.
    """
    given = grid.as_dict()
    shapes = given.pop("shapes")
    lines = ",\n".join(json.dumps(shape, separators=(",", ":")) for shape in shapes)
    return json.dumps(given, indent=1).removesuffix("\n}") + f',\n "shapes": [\n{lines}\n]}}\n'


def main(arguments: list[str] | None = None) -> int:
    """Predict all shapes and write the file; give the exit status.

    Parameters
    ----------
    arguments
        Of the command line.
    """
    import torch

    parser = argparse.ArgumentParser(prog="python -m gpucourse.fit_grid_prediction", description=__doc__)
    parser.add_argument("--processes", type=int, default=2, help="predictions at a time (default: 2)")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).with_name("fit_grid.json"), help="the file to write"
    )
    options = parser.parse_args(arguments)
    wanted = list(itertools.product(LAYERS, WIDTHS, TOKENS, PRECISIONS, CHECKPOINTING))
    shapes = []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for shape in pool.imap(predict_shape, wanted):
            shapes.append(shape)
            print(f"\r{len(shapes)} of {len(wanted)} shapes", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    grid = FitGrid(
        torch_version=torch.__version__,
        method_version=METHOD_VERSION,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        shapes=tuple(shapes),
    )
    options.out.write_text(written(grid), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
