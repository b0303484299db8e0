"""``gpucourse roofline``: measure this GPU's ceilings, as text, as JSON and as a picture."""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpucourse.commands.picture import picture, save
from gpucourse.commands.seconds import seconds
from gpucourse.environment import NoGPUError, require_cuda
from gpucourse.measured_roof import PRECISIONS, MeasuredRoofline, measure_roofline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["add", "draw", "run"]

_LINE_SHARE = 0.065  # of the picture's height, one line of text
USUAL = ("fp32", "tf32", "bf16", "fp16")  # fp64 is measured where it is asked for


def add(commands: Any) -> None:
    """Add the command to the parser's commands.

    Parameters
    ----------
    commands
        What ``ArgumentParser.add_subparsers`` returned.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        "roofline", help="measure this GPU's ceilings of arithmetic and bandwidth"
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=PRECISIONS,
        metavar="DTYPE",
        help=f"precisions to measure, of {', '.join(PRECISIONS)} (default: {', '.join(USUAL)})",
    )
    parser.add_argument(
        "--sustained",
        type=seconds,
        default=0.0,
        metavar="S",
        help="seconds of long load after the bursts, a precision (default 0; 30 warms up a large card)",
    )
    parser.add_argument("--json", action="store_true", help="write JSON, with every sample")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw the roofs into an image file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print, draw; give the exit status (0 done, 1 failed).

    Parameters
    ----------
    options
        What the parser read.
    """
    try:
        require_cuda("this command")
    except NoGPUError as error:
        print(f"gpucourse roofline: {error}", file=sys.stderr)
        return 1
    found: list[MeasuredRoofline] = []
    failed = False
    for dtype in dict.fromkeys(options.dtype or USUAL):
        try:
            measured = measure_roofline(dtype, sustained_s=options.sustained)
        except ValueError as error:  # not built into this GPU, or nothing fits in its memory
            # Of the usual precisions a card may lack some; one that was asked for by name is missed.
            failed = failed or options.dtype is not None
            print(f"gpucourse roofline: {dtype}: {error}", file=sys.stderr)
            continue
        except RuntimeError as error:  # the driver's: somebody else has taken the memory, say
            failed = True
            said = str(error).partition("\n")[0] or type(error).__name__
            print(f"gpucourse roofline: {dtype}: {said}", file=sys.stderr)
            continue
        found.append(measured)
        if not options.json:
            print(_text(measured), flush=True)
    if options.json:
        print(json.dumps([measured.as_dict() for measured in found], indent=1))
    if not found:
        return 1
    if options.plot is not None:
        failed = not save("roofline", functools.partial(draw, found), options.plot) or failed
    return 1 if failed else 0


def _text(measured: MeasuredRoofline) -> str:
    """Give a table of all operations under one line that names the roof."""
    rows = [
        ("operation", "when", "rate", "middle half of the samples", "of the datasheet"),
        *measured.table(),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([str(measured), *(f"  {line.rstrip()}" for line in table), ""])


def draw(found: Sequence[MeasuredRoofline]) -> Figure:
    """Draw the measured roofs of one GPU: bursts as lines, long loads dashed.

    Parameters
    ----------
    found
        One a precision.

    Returns
    -------
    matplotlib.figure.Figure
        Intensity in flop/byte against TFLOP/s, both logarithmic, each roof with its peaks beside its end.
    """
    from gpucourse import plots

    fig, axes = plots.figure(6.4, 4.0)
    colours = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE, plots.GREY)
    ridges = [measured.roofline.ridge for measured in found]
    left, right = min(ridges) / 20, max(ridges) * 20
    names: list[tuple[float, str, str]] = []
    for measured, colour in zip(found, colours, strict=False):
        name = f" {measured.precision}: {measured.roofline.peak_flops / 1e12:,.0f}"
        for roof, dashed in ((measured.roofline, False), (measured.sustained_roofline, True)):
            if roof is None:
                continue
            intensity = [left, roof.ridge, right]
            rates = [roof.attainable(value) / 1e12 for value in intensity]
            axes.loglog(intensity, rates, color=colour, linestyle="--" if dashed else "-")
            if dashed:
                name += f", after {measured.sustained[0].seconds:.0f} s {rates[-1]:,.0f}"
        names.append((measured.roofline.peak_flops / 1e12, name, colour))
    low, high = axes.get_ylim()
    # Ceilings may lie within a few percent of one another; their names keep a line's height apart.
    line = (high / low) ** _LINE_SHARE
    place = math.inf
    for rate, name, colour in sorted(names, reverse=True):
        place = min(rate, place / line)
        axes.annotate(name, (right, place), color=colour, va="center", annotation_clip=False)
    best = found[0].best_stream
    axes.set_xlim(left, right)
    axes.set_xlabel("intensity, flop/byte")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{found[0].device}: {best.format(best.rate)} ({best.kind}), measured")
    axes.grid(True, which="major")
    return fig
