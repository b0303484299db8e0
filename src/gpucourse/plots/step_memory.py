"""Memory over a training step with its lines stacked, as it was predicted or measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpucourse import plots
from gpucourse.memory_measurement import MeasuredStep
from gpucourse.units import GB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gpucourse.recording import Recording
    from gpucourse.step_memory import StepMemory

__all__ = ["over_step"]

Point = tuple[int, str, Mapping[str, int]]  # step, phase, bytes by role

# From below: what stays over the step, then what comes and goes. Colours that touch differ in lightness, too.
_STACK = {
    "parameters": (plots.BLUE, 1.0),
    "optimizer": (plots.BLUE, 0.45),
    "buffers": (plots.GREY, 0.9),
    "inputs": (plots.GREY, 0.6),
    "workspaces": (plots.GREY, 0.35),
    "gradients": (plots.GREEN, 1.0),
    "casts": (plots.PURPLE, 0.9),
    "activations": (plots.ORANGE, 0.85),
    "recomputed": (plots.ORANGE, 0.4),
    "temporaries": (plots.PURPLE, 0.4),
}
_THIN = 0.004  # of the peak: thinner lines are drawn together
_LETTER = 0.018  # of the picture's width that a letter needs
_TEXT = 0.075  # of the picture's height that a label needs


def over_step(
    memory: StepMemory | MeasuredStep | Mapping[str, Any],
    *,
    step: int | None = None,
    limit_gb: float | None = None,
    points: int = 400,
    source: Recording | None = None,
) -> plots.Chart:
    """Draw what is live over one step, line upon line.

    Parameters
    ----------
    memory
        A prediction, a measurement, or a measurement's ``as_dict()`` as a recording holds it.
    step
        Which one, from 1; by default the one with the highest peak.
    limit_gb
        A limit in GB to draw beside it.
    points
        Instants to draw of a prediction's steps; a measurement has its own.
    source
        The recording that a measurement comes from.

    Returns
    -------
    Chart
        The horizontal axis counts allocations and frees, which is no time. Its table has each line at the highest
        instant of each phase, as asked for, without the allocator's rounding.

    Raises
    ------
    ValueError
        There is no such step.
    """
    if isinstance(memory, Mapping):
        memory = MeasuredStep.from_dict(memory)
    measured = isinstance(memory, MeasuredStep)
    timeline: Sequence[Any] = (
        memory.timeline if isinstance(memory, MeasuredStep) else memory.trace.timeline(points)
    )
    wanted = memory.peak.step if step is None else step
    drawn: list[Point] = [(at, phase, lines) for at, phase, lines in timeline if at == wanted]
    if not drawn:
        steps = sorted({at for at, _, _ in timeline if at})
        raise ValueError(f"there is no step {step}; there are {', '.join(map(str, steps))}")
    peak = memory.peaks[wanted - 1]
    fig, ax = plots.figure(height=3.6)
    bands = _bands(drawn)
    _stack(ax, bands)
    top = 1.12 * max(sum(values[k] for values in bands.values()) for k in range(len(drawn)))
    if limit_gb is not None:
        top = max(top, 1.08 * limit_gb)
        ax.axhline(limit_gb, color=plots.INK, linestyle="--", linewidth=1)
        ax.text(
            1.02, limit_gb / top, f"{limit_gb:g} GB", transform=ax.transAxes, va="center", color=plots.INK
        )
    ax.set_ylim(0, top)
    _name_bands(ax, bands, top)
    _mark_phases(ax, [phase for _, phase, _ in drawn], top)
    ax.set_xlim(0, len(drawn))
    ax.set_xticks([])
    ax.set_xlabel("allocations and frees, in their order")
    ax.set_ylabel("live, GB")
    what = "measured" if measured else "predicted"
    title = f"{memory.model}, microbatch {memory.microbatch}, {memory.precision}, {memory.optimizer}"
    phases = list(dict.fromkeys(phase for _, phase, _ in drawn))
    highest = {
        phase: max((p for p in drawn if p[1] == phase), key=lambda p: sum(p[2].values()))[2]
        for phase in phases
    }
    names = [name for name in _STACK if any(lines.get(name) for lines in highest.values())]
    return plots.Chart(
        fig,
        caption=(
            f"{title}: step {wanted}, {what}. The most is live in the {peak.phase} pass: "
            f"{format_bytes(peak.allocated_bytes)}, with the allocator's rounding."
        ),
        alt=(
            f"Stacked areas: memory in GB over one training step, by what it is for. {_course(highest)} The highest "
            f"point is {format_bytes(peak.allocated_bytes)}, in the {peak.phase} pass."
        ),
        header=("Line", *(f"highest in {phase}" for phase in phases)),
        rows=[
            *((name, *(format_bytes(highest[phase].get(name, 0)) for phase in phases)) for name in names),
            ("sum", *(format_bytes(sum(highest[phase].values())) for phase in phases)),
        ],
        source=source,
    )


def _bands(drawn: Sequence[Point]) -> dict[str, list[float]]:
    """Give each drawn line's course in GB, from below; what is too thin to be seen is drawn as one."""
    peak = max(sum(lines.values()) for _, _, lines in drawn)
    bands: dict[str, list[float]] = {}
    others = [0.0] * len(drawn)
    for name in _STACK:
        values = [lines.get(name, 0) / GB for _, _, lines in drawn]
        if max(values) * GB > _THIN * peak:
            bands[name] = values
        else:
            others = [a + b for a, b in zip(others, values, strict=True)]
    if any(others):
        bands = {"others": others} | bands
    return bands


def _stack(ax: Axes, bands: Mapping[str, Sequence[float]]) -> None:
    below = [0.0] * len(next(iter(bands.values())))
    for name, values in bands.items():
        colour, alpha = _STACK.get(name, (plots.GREY, 0.8))
        above = [a + b for a, b in zip(below, values, strict=True)]
        ax.fill_between(
            range(len(values) + 1),  # each instant is as wide as the others, the last one, too
            [*below, below[-1]],
            [*above, above[-1]],
            color=colour,
            alpha=alpha,
            linewidth=0,
            step="post",
        )
        below = above


def _name_bands(ax: Axes, bands: Mapping[str, Sequence[float]], top: float) -> None:
    """Write each band's name into it where it is high enough, or else beside the picture, in the bands' order."""
    below = [0.0] * len(next(iter(bands.values())))
    beside: list[tuple[float, float, str]] = []
    for name, values in bands.items():
        first, end = _longest_run(values, _TEXT * top)
        if end - first > _LETTER * len(values) * len(name):
            inside = (first + end) // 2
            ax.text(
                (first + end) / 2,
                below[inside] + values[inside] / 2,
                name,
                ha="center",
                va="center",
                color=plots.INK,
            )
        else:
            # Led to where the band is still well seen, as far to the right as that is.
            at = max(k for k, value in enumerate(values) if value > max(values) / 3)
            beside.append((below[at] + values[at] / 2, at + 0.5, name))
        below = [a + b for a, b in zip(below, values, strict=True)]
    height = -1.0
    for middle_gb, instant, name in sorted(beside):
        height = max(middle_gb, height + _TEXT * top)
        ax.annotate(
            name,
            (instant, middle_gb),
            (1.02, height / top),
            textcoords="axes fraction",
            va="center",
            color=plots.INK,
            arrowprops={"arrowstyle": "-", "color": plots.GREY, "linewidth": 0.8, "shrinkA": 1, "shrinkB": 0},
            annotation_clip=False,
        )


def _longest_run(values: Sequence[float], least: float) -> tuple[int, int]:
    """Give the longest stretch in which all values are above one: its first place, and the one after its last."""
    best, begun = (0, 0), 0
    for k, value in enumerate([*values, least]):
        if value <= least:
            best, begun = max(best, (begun, k), key=lambda run: run[1] - run[0]), k + 1
    return best


def _mark_phases(ax: Axes, phases: Sequence[str], top: float) -> None:
    begun = 0
    for k in range(1, len(phases) + 1):
        if k < len(phases) and phases[k] == phases[begun]:
            continue
        if begun:
            ax.axvline(begun, color=plots.GREY, linewidth=0.8)
        # A phase of a few instants has no room for its name; the table has it.
        if k - begun > _LETTER * len(phases) * len(phases[begun]):
            ax.text((begun + k) / 2, 0.985 * top, phases[begun], ha="center", va="top", color=plots.INK)
        begun = k


def _course(highest: Mapping[str, Mapping[str, int]]) -> str:
    said = []
    for phase, lines in highest.items():
        name = max(lines, key=lambda line: lines[line])
        said.append(
            f"In the {phase} pass it reaches {format_bytes(sum(lines.values()))}, the largest part of it {name}."
        )
    return " ".join(said)
