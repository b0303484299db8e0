"""Charts and tables of the chapter "What really leaks": what grows with each step, where, and what holds it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpucourse import plots
from gpucourse.units import format_bytes

if TYPE_CHECKING:
    from gpucourse.recording import Recording

__all__ = ["caught", "counters", "failing_row", "forecast", "host", "lines", "night", "zoo"]

BELIEFS: dict[str, str] = {
    "evaluation_sum": "sum the losses, no backward pass",
    "training_sum": "sum the losses after backward",
    "items": "keep loss.item() of each step",
    "outputs": "keep the outputs",
    "detached_outputs": "keep the outputs, detached",
    "copies": "keep CPU copies of the outputs",
    "losses_after_backward": "keep the losses after backward",
    "retain_graph": "retain_graph=True, losses kept",
    "retain_graph_and_drop": "retain_graph=True, nothing kept",
    "activation_hook": "a forward hook that stores",
    "context_attribute": "a Function with a tensor on ctx, losses kept",
    "kept_errors": "keep the errors that were caught",
    "cache_by_step": "a cache with the step as its key",
    "first_steps_of_adam": "the first steps of AdamW",
    "lengths_that_change": "batches whose length changes",
    "cycles": "an object that refers to itself",
}
"""The loops of the chapter, in words."""


def _bytes(value: float | None) -> str:
    return "unavailable" if value is None else format_bytes(value).replace(" ", "\N{NO-BREAK SPACE}")


def failing_row(limit_bytes: float, start_bytes: float, row_bytes: float, transient_bytes: float) -> int:
    """Say in which row of an evaluation that keeps every graph memory runs out.

    Parameters
    ----------
    limit_bytes
        What may be held.
    start_bytes
        What is held before the first row.
    row_bytes
        What each row leaves behind.
    transient_bytes
        What a row needs for a moment on top of what it leaves.

    Returns
    -------
    int
        From 1: the first row during which more than the limit would be held.

    Raises
    ------
    ValueError
        A row leaves nothing, so none of them is the last.

    Examples
    --------
    >>> failing_row(10.0, 1.0, 2.0, 0.5)  # after four rows 9.0 is held, and the fifth needs 2.5
    5
    >>> failing_row(10.0, 1.0, 2.0, 1.5)  # the fourth needs 7.0 + 3.5
    4
    """
    if row_bytes <= 0:
        raise ValueError(f"a row leaves {row_bytes} bytes: memory does not run out")
    return max(1, math.floor((limit_bytes - start_bytes - transient_bytes) / row_bytes) + 1)


def night(source: Recording) -> plots.Chart:
    """Draw what is allocated and reserved after each row of the evaluation, below the cap.

    Parameters
    ----------
    source
        The recording `night_evaluation`.

    Returns
    -------
    Chart
        Two rising curves, the cap, and the level of the same evaluation without a graph.
    """
    log = source["with_graph"]["log"]
    cap, flat = source["cap_bytes"], source["without_graph"]["log"][-1][0]
    rows = range(len(log))
    fig, ax = plots.figure(height=3.1)
    ax.axhline(cap / 1e9, color=plots.ORANGE, lw=1.4)
    ax.annotate(
        f"the cap, {cap / 1e9:.1f} GB",
        (0, cap / 1e9),
        (2, -4),
        textcoords="offset points",
        va="top",
        color=plots.INK,
    )
    ax.plot(rows, [entry[1] / 1e9 for entry in log], color=plots.GREY)
    ax.plot(rows, [entry[0] / 1e9 for entry in log], color=plots.BLUE, marker="o", markersize=3)
    ax.axhline(flat / 1e9, color=plots.GREEN, lw=1.4)
    middle = len(log) // 2
    for text, value, below in (("reserved", log[middle][1], False), ("allocated", log[middle][0], True)):
        ax.annotate(
            text,
            (middle, value / 1e9),
            (6, -9) if below else (-6, 7),
            textcoords="offset points",
            ha="left" if below else "right",
            color=plots.INK,
        )
    ax.annotate(
        "under no_grad",
        (len(log) - 1, flat / 1e9),
        (0, 4),
        textcoords="offset points",
        ha="right",
        color=plots.INK,
    )
    ax.set_ylim(0, 1.1 * cap / 1e9)
    ax.set_xlabel("rows evaluated")
    ax.set_ylabel("GB after the row")
    failed = source["failed_row"]
    end = f"row {failed} fails" if failed else f"all {len(log) - 1} rows fit"
    return plots.Chart(
        fig,
        caption=(
            f"The night's evaluation, one row of 1,024 tokens at a time, with the graphs kept: {end}. "
            "The lower line is the same evaluation under no_grad."
        ),
        alt=(
            "Line chart: memory against the number of rows evaluated. Allocated and reserved memory rise in a "
            "straight line to the cap, reserved above allocated; under no_grad the line is flat at the bottom."
        ),
        header=("Rows", "Allocated", "Reserved"),
        rows=[(row, _bytes(log[row][0]), _bytes(log[row][1])) for row in rows],
        source=source,
    )


def forecast(source: Recording, row_bytes: int, start_bytes: int, transient_bytes: int) -> plots.Table:
    """Put what was computed without a GPU beside what was measured.

    Parameters
    ----------
    source
        The recording `night_evaluation`.
    row_bytes, start_bytes, transient_bytes
        The prediction: what a row leaves, what is there before the first, what a row needs for a moment.

    Returns
    -------
    Table
        Predicted, measured and residual of each, and the row that fails by allocated and by reserved memory.
    """
    limit = source["cap_bytes"]
    pairs = [
        ("before the first row", start_bytes, source["start_bytes"]),
        ("left by a row", row_bytes, source["row_bytes"]),
        ("for a moment in each row", transient_bytes, source["transient_bytes"]),
    ]
    rows = [
        (
            what,
            _bytes(said),
            _bytes(found),
            "unavailable" if not found else f"{(said / found - 1) * 100:+.2f} %",
        )
        for what, said, found in pairs
    ]
    predicted = failing_row(limit, start_bytes, row_bytes, transient_bytes)
    failed = source["failed_row"]
    rows.append(
        (
            "the row that fails",
            str(predicted),
            str(failed or f"none of {source['planned']}"),
            f"{predicted - failed:+d}" if failed else "",
        )
    )
    return plots.Table(
        ("Of the evaluation", "Predicted", "Measured", "Residual"),
        tuple(rows),
        caption="Computed from shapes on a machine without a GPU, and measured under the cap",
        source=source,
    )


def _grows(loop: Mapping[str, Any], key: str) -> str:
    value = loop[key]
    if not value:
        return "–"
    return f"{value:.3g}" if key == "nodes" else _bytes(round(value))


def zoo(source: Recording) -> plots.Table:
    """List what each loop retains a step, where, and the cause that was named.

    Parameters
    ----------
    source
        The recording `sixteen_loops`.
    """
    return plots.Table(
        ("The loop", "Device", "Host tensors", "Graph nodes", "Cause, as named"),
        tuple(
            (
                BELIEFS[name],
                _grows(loop, "device_bytes"),
                _grows(loop, "host_bytes"),
                _grows(loop, "nodes"),
                loop["cause"] or "nothing retained",
            )
            for name, loop in source["loops"].items()
        ),
        caption="Retained a step, by watch_growth",
        source=source,
    )


_WAYS = (
    ("loss", "total + loss", plots.ORANGE),
    ("detach", "total + loss.detach()", plots.BLUE),
    ("item", "total + loss.item()", plots.GREEN),
)


def host(source: Recording) -> plots.Chart:
    """Draw host memory and device memory against the training steps for three ways to sum the losses.

    Parameters
    ----------
    source
        The recording `host_growth`.

    Returns
    -------
    Chart
        Growth since the fourth reading; where the system does not say how much is resident, "unavailable".
    """
    runs = source["deep"]
    known = all(value is not None for run in runs.values() for value in run["resident_bytes"])
    fig, (left, right) = plots.figure(height=2.8, ncols=2, sharey=True)
    for ax, key, title in (
        (left, "resident_bytes", "host, resident"),
        (right, "allocated_bytes", "device, allocated"),
    ):
        ax.set_title(title)
        ax.set_xlabel("training steps")
        if key == "resident_bytes" and not known:
            ax.text(0.5, 0.5, "unavailable", transform=ax.transAxes, ha="center", color=plots.INK)
            continue
        for way, text, colour in _WAYS:
            read, every = runs[way][key][3:], runs[way]["every"]
            steps = [every * (k + 3) for k in range(len(read))]
            ax.plot(steps, [(value - read[0]) / 1e6 for value in read], color=colour)
            if way == "loss" and key == "resident_bytes":
                ax.annotate(
                    text,
                    (steps[-1], (read[-1] - read[0]) / 1e6),
                    (-8, 0),
                    textcoords="offset points",
                    ha="right",
                    va="center",
                    color=plots.INK,
                )
    right.annotate(
        "all three",
        (0.5, 0),
        (0, 5),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="center",
    )
    left.annotate(
        "the other two",
        (0.98, 0),
        (0, 5),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
    )
    left.set_ylabel("MB more than at step 60")
    rows = [
        (text, _bytes(runs[way]["step_bytes"]), _bytes(runs[way]["device_step_bytes"]))
        for way, text, _ in _WAYS
    ]
    night_run = source["night"]
    rows.append(
        (
            "total + loss, the night's graph",
            _bytes(night_run["step_bytes"]),
            _bytes(night_run["device_step_bytes"]),
        )
    )
    return plots.Chart(
        fig,
        caption=(
            f"Training a net of {source['modules']} modules and summing its losses in three ways. "
            "One of them grows, and only on the host."
        ),
        alt=(
            "Two line charts against training steps. Host memory rises in a straight line where the loss itself is "
            "summed and is level where its value is; device memory is level for all three."
        ),
        header=("Loop", "Host, a step", "Device, a step"),
        rows=rows,
        source=source,
    )


def caught(source: Recording) -> plots.Table:
    """List what is allocated at each moment after an out-of-memory error, and whether a retry is served.

    Parameters
    ----------
    source
        The recording `after_an_error`.
    """
    return plots.Table(
        ("The moment", "Still allocated", "Another 1.5 GB"),
        tuple(
            (moment, _bytes(found["allocated_bytes"]), "served" if found["served"] else "out of memory")
            for moment, found in source["moments"].items()
        ),
        caption="After an out-of-memory error under a cap of 2.5 GB",
        source=source,
    )


def counters(source: Recording) -> plots.Chart:
    """Draw what three counters say of a healthy loop, from the model's birth to the emptied cache.

    Parameters
    ----------
    source
        The recording `looks_like_a_leak`.
    """
    counted = source["counted"]
    places = range(len(counted))
    fig, ax = plots.figure(height=3.1)
    for column, text, colour in (
        (3, "used, says the driver", plots.GREY),
        (2, "reserved", plots.ORANGE),
        (1, "allocated", plots.BLUE),
    ):
        values = [entry[column] / 1e9 for entry in counted]
        ax.plot(places, values, color=colour, marker="o", markersize=3, label=text)
    ax.legend(frameon=False, loc="upper left")
    ax.set_ylim(0, 1.35 * max(entry[column] for entry in counted for column in (1, 2, 3)) / 1e9)
    short = ["model", *(str(k) for k in range(1, len(counted) - 2)), "deleted", "emptied"]
    ax.set_xticks(list(places), labels=short, rotation=45, ha="right")
    ax.set_ylabel("GB")
    ax.set_xlabel("after step")
    return plots.Chart(
        fig,
        caption=(
            "A training loop that retains nothing, its batches of changing length: what is reserved climbs for "
            "several steps and stays when everything is deleted."
        ),
        alt=(
            "Line chart of three counters over ten steps and two deletions. Allocated rises once with the first "
            "step and falls to zero when all is deleted; reserved and used climb, and fall only when the cache is "
            "emptied."
        ),
        header=("After", "Allocated", "Reserved", "Used, says the driver"),
        rows=[(entry[0], *map(_bytes, entry[1:])) for entry in counted],
        source=source,
    )


def lines(source: Recording) -> plots.Table:
    """List the lines of code whose allocations are still in use.

    Parameters
    ----------
    source
        The recording `held_by_line`.
    """
    found: Sequence[Mapping[str, Any]] = source["lines"]
    return plots.Table(
        ("In use", "File", "Function", "Line"),
        tuple(
            (_bytes(entry["bytes"]), entry["file"], entry["function"], entry["code"] or "–")
            for entry in found
        ),
        caption="Blocks in use after eight evaluations, by the line that allocated them",
        source=source,
    )
