"""Charts and tables of the launch lab: the launch model beside recorded chains of additions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpucourse import plots
from gpucourse.launch_model import ChainComparison, LaunchModel, compare

if TYPE_CHECKING:
    from gpucourse.recording import Recording

__all__ = ["chains_by_length", "chains_by_number"]


def _us(us: float) -> str:
    return plots.unbroken_ms(us / 1e3)


def _signed_us(us: float) -> str:
    return f"{'+' if us > 0 else '−' if us < 0 else ''}{_us(abs(us))}"


def _signed_percent(share: float) -> str:
    return f"{'+' if share > 0 else '−' if share < 0 else ''}{100 * abs(share):.1f}\N{NO-BREAK SPACE}%"


def _commonest(numbers: list[int]) -> int:
    return max(sorted(set(numbers)), key=numbers.count)


def chains_by_length(source: Recording) -> plots.Chart:
    """Draw the time of a kernel's turn against the kernel's length, measured and by the model.

    Parameters
    ----------
    source
        The recording `chain_sweep`; of its chains those with the most common number of kernels are drawn.

    Returns
    -------
    Chart
        Both axes logarithmic. Its table has prediction, reading and residual of every drawn chain.

    Raises
    ------
    ValueError
        The recording has no chain to compare.
    """
    rows = compare(source.data)
    number = _commonest([row.kernels for row in rows])
    rows = tuple(row for row in rows if row.kernels == number)
    launch_us = rows[0].model.launch_us
    fig, ax = plots.figure(height=3.6)
    ax.set_xscale("log")
    ax.set_yscale("log")
    lengths = [row.model.kernel_us for row in rows]
    low, high = min(lengths) / 1.3, max(lengths) * 1.3
    fine = [low * (high / low) ** (k / 200) for k in range(201)]
    for way, colour, marker, label, at, offset in (
        ("eager", plots.ORANGE, "o", "one by one", 0.0, (0, 9)),
        ("graph", plots.BLUE, "s", "as a CUDA graph", 0.6, (10, -18)),
    ):
        drawn = [row for row in rows if row.way == way]
        if not drawn:
            continue
        curve = [
            LaunchModel(kernels=number, kernel_us=us, launch_us=launch_us, way=way).total_us / number  # type: ignore[arg-type]
            for us in fine
        ]
        ax.plot(fine, curve, color=colour, linewidth=1.2)
        points = [(row.model.kernel_us, row.measured_us / number) for row in drawn]
        ax.plot(*zip(*points, strict=True), marker, color=colour, fillstyle="none")
        ax.annotate(label, points[int(at * len(points))], offset, textcoords="offset points", color=colour)
    ax.axvline(launch_us, color=plots.GREY, linestyle="--", linewidth=1)
    ax.annotate(
        f"a launch: {_us(launch_us)}",
        (launch_us, ax.get_ylim()[1]),
        (5, -12),
        textcoords="offset points",
        color=plots.INK,
    )
    ax.set_xlabel("device time of one addition alone, µs")
    ax.set_ylabel(f"chain of {number} / {number}, µs")
    return plots.Chart(
        fig,
        caption=(
            f"Chains of {number} additions, divided by {number}. Lines: the model, with nothing fitted to these "
            "points. One by one, a chain stays level until its kernels outlast a launch, and bends there."
        ),
        alt=(
            f"Line chart, both axes logarithmic: time of a chain of {number} additions for each addition, against "
            "the device time of one addition. The chain that is launched one by one is level at the launch cost, "
            "then bends and rises in proportion. The CUDA graph rises in proportion from the start; beyond the "
            "bend the two lie on one line."
        ),
        header=(
            "Elements",
            "Way",
            "Kernel",
            "Predicted",
            "Measured",
            "Residual",
            "Of the reading",
            "With its own launch cost",
        ),
        rows=[(f"{row.elements:,}", row.way, _us(row.model.kernel_us), *_judged(row)) for row in rows],
        source=source,
    )


def chains_by_number(source: Recording) -> plots.Table:
    """List chains of the smallest addition by their number of kernels: prediction, reading, residual.

    Parameters
    ----------
    source
        The recording `chain_sweep`.

    Raises
    ------
    ValueError
        The recording has no chain to compare.
    """
    rows = compare(source.data)
    smallest = min(row.elements for row in rows)
    rows = tuple(row for row in rows if row.elements == smallest)
    kernel_us, launch_us = rows[0].model.kernel_us, rows[0].model.launch_us
    return plots.Table(
        ("Kernels", "Way", "Predicted", "Measured", "Residual", "Of the reading", "With its own launch cost"),
        tuple((str(row.kernels), row.way, *_judged(row)) for row in rows),
        caption=(
            f"Additions of {smallest:,} elements: {_us(kernel_us)} each on the device, {_us(launch_us)} a launch"
        ),
        source=source,
    )


def _judged(row: ChainComparison) -> tuple[str, str, str, str, str]:
    own_us = row.own_residual_us
    return (
        _us(row.predicted_us),
        _us(row.measured_us),
        _signed_us(row.residual_us),
        _signed_percent(row.residual_share),
        "unavailable" if own_us is None else _signed_us(own_us),
    )
