"""Charts of the chapter "The opening failure": what a step held by microbatch, and one step read twice."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpucourse import hardware, plots

if TYPE_CHECKING:
    from gpucourse.recording import Recording

__all__ = ["memory_by_rows", "one_step_read_twice"]


def memory_by_rows(trials: Recording) -> plots.Chart:
    """Draw what each tried microbatch held at its peak, against the cap.

    Parameters
    ----------
    trials
        The recording `largest_by_trying`: ``cap_bytes``, and ``tried`` by microbatch with ``rows``,
        ``allocated_bytes``, ``reserved_bytes``, ``tokens_per_s`` and ``message``, None where it ran.

    Returns
    -------
    Chart
        A refused step stands where it stopped, and its last column says so.

    Raises
    ------
    ValueError
        Nothing was tried.
    """
    tried = sorted(trials["tried"].values(), key=lambda trial: trial["rows"])
    if not tried:
        raise ValueError("no microbatch was tried: the recording's `tried` is empty")
    ran = [trial for trial in tried if trial["message"] is None]
    refused = [trial for trial in tried if trial["message"] is not None]
    fig, ax = plots.figure(height=3.3)
    for key, colour, mark in (("allocated_bytes", plots.BLUE, "o"), ("reserved_bytes", plots.GREEN, "s")):
        ax.plot(
            [trial["rows"] for trial in ran], [trial[key] / 1e9 for trial in ran], f"{mark}-", color=colour
        )
    if ran:
        place = ran[max(0, len(ran) - 2)]  # left of the upper end, clear of the axis
        for key, text, colour, offset, side in (
            ("allocated_bytes", "allocated", plots.BLUE, (8, -12), "left"),
            ("reserved_bytes", "reserved", plots.GREEN, (-8, 6), "right"),
        ):
            at = (place["rows"], place[key] / 1e9)
            ax.annotate(text, at, offset, textcoords="offset points", color=colour, ha=side)
    if refused:
        ax.plot(
            [trial["rows"] for trial in refused],
            [trial["reserved_bytes"] / 1e9 for trial in refused],
            "x",
            color=plots.ORANGE,
            markersize=8,
            markeredgewidth=2,
        )
        last = refused[-1]
        at = (last["rows"], last["reserved_bytes"] / 1e9)
        ax.annotate(
            "refused",
            at,
            (0, -16),
            textcoords="offset points",
            color=plots.ORANGE,
            ha="right" if ran else "center",
        )
    cap_gb = trials["cap_bytes"] / 1e9
    ax.axhline(cap_gb, color=plots.GREY, linestyle="--")
    ax.annotate(
        f"the cap, {cap_gb:.1f} GB",
        (0, cap_gb),
        (4, 4),
        textcoords="offset points",
        color=plots.INK,
    )
    ax.set_xlim(0, tried[-1]["rows"] * 1.06)
    ax.set_ylim(0, cap_gb * 1.15)
    ax.set_xlabel("microbatch, rows")
    ax.set_ylabel("peak of the step, GB")
    largest = max((trial["rows"] for trial in ran), default=None)
    found = f"The largest that runs is {largest}." if largest else "None of them runs."
    return plots.Chart(
        fig,
        caption=(
            f"What a step holds by its microbatch. {found} Refused steps stand where they stopped, "
            "with their next request still unmet."
        ),
        alt=(
            "Line chart: gigabytes at the peak of a step against the rows of the microbatch. Allocated and "
            "reserved memory rise along straight lines to the dashed cap; the microbatches that were refused "
            "are crosses close to it, to the right of those that ran."
        ),
        header=("Rows", "Allocated, GB", "Reserved, GB", "Tokens/s", "The step"),
        rows=[
            (
                trial["rows"],
                f"{trial['allocated_bytes'] / 1e9:.2f}",
                f"{trial['reserved_bytes'] / 1e9:.2f}",
                "" if trial["tokens_per_s"] is None else f"{trial['tokens_per_s']:,.0f}",
                _outcome(trial),
            )
            for trial in tried
        ],
        source=trials,
    )


def _outcome(trial: Mapping[str, Any]) -> str:
    if trial["message"] is not None:
        return "refused"
    retries = trial["retries"]
    if not retries:
        return "ran"
    return f"ran, after giving back what it cached {retries} time{'s' if retries > 1 else ''}"


def one_step_read_twice(clocks: Recording, flop_a_token: float) -> plots.Chart:
    """Draw both readings of one clock by microbatch, and the least time that the card's peak leaves.

    Parameters
    ----------
    clocks
        The recording `one_step_read_twice`: ``readings`` by microbatch with ``rows``, ``tokens``,
        ``returned_ms`` and ``done_ms``.
    flop_a_token
        Operations that a token takes at the least, in flop.

    Returns
    -------
    Chart
        Both axes logarithmic. For a GPU without a record there is no bound, and no judgement.

    Raises
    ------
    ValueError
        There is no reading, or `flop_a_token` is not positive.
    """
    readings = sorted(clocks["readings"].values(), key=lambda reading: reading["rows"])
    if not readings:
        raise ValueError("no step was read: the recording's `readings` is empty")
    if not flop_a_token > 0:
        raise ValueError(f"flop_a_token is {flop_a_token}; wanted the operations of one token, above 0")
    gpu = str(clocks.provenance.get("gpu"))
    record = hardware.find(gpu)
    limit = None if record is None else record.peak_flops_at_clock("fp32")
    rows = [reading["rows"] for reading in readings]
    least_ms = (
        None if limit is None else [reading["tokens"] * flop_a_token / limit * 1e3 for reading in readings]
    )
    fig, ax = plots.figure(height=3.4)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    curves = [
        ("done_ms", plots.BLUE, "read after a wait"),
        ("returned_ms", plots.ORANGE, "read when the step returns"),
    ]
    for key, colour, text in curves:
        values = [reading[key] for reading in readings]
        ax.plot(rows, values, "o-", color=colour)
        at = (rows[-1], values[-1])
        ax.annotate(text, at, (-6, 8), textcoords="offset points", color=colour, ha="right")
    if least_ms is not None:
        ax.plot(rows, least_ms, "--", color=plots.GREY)
        # Below the line's upper end, where a rising line leaves room.
        ax.text(rows[-1], 0.25 * least_ms[-1], "least time at the card's peak", color=plots.INK, ha="right")
    ax.set_ylim(top=1.7 * max(reading["done_ms"] for reading in readings))
    ax.set_xticks(rows, labels=[str(count) for count in rows])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("microbatch, rows")
    ax.set_ylabel("the clock's reading, ms")

    def judged(reading: Mapping[str, Any], least: float | None) -> str:
        if least is None:
            return f"limit unavailable for {gpu}"
        return "impossible" if reading["returned_ms"] < least else "not refuted"

    verdicts = [
        judged(reading, least)
        for reading, least in zip(readings, least_ms or itertools.repeat(None), strict=False)
    ]
    refuted = [
        reading["rows"]
        for reading, verdict in zip(readings, verdicts, strict=True)
        if verdict == "impossible"
    ]
    below = f", below the dashed least time at {', '.join(map(str, refuted))} rows" if refuted else ""
    return plots.Chart(
        fig,
        caption=(
            "One step, one clock, read twice. The reading taken when the step returns hardly knows how much "
            "work was asked for."
        ),
        alt=(
            "Line chart, both axes logarithmic: milliseconds against the rows of the microbatch. The reading "
            "after a wait rises with the rows. The reading at the return of the step stays nearly "
            f"level{below}."
        ),
        header=(
            "Rows",
            "At the return",
            "After a wait",
            "Least time",
            "First reading",
            "Growth of the two readings",
        ),
        rows=[
            (
                reading["rows"],
                plots.unbroken_ms(reading["returned_ms"]),
                plots.unbroken_ms(reading["done_ms"]),
                "unavailable" if least is None else plots.unbroken_ms(least),
                verdict,
                "" if before is None else _growth(before, reading),
            )
            for before, reading, least, verdict in zip(
                [None, *readings[:-1]], readings, least_ms or itertools.repeat(None), verdicts, strict=False
            )
        ],
        source=clocks,
    )


def _growth(before: Mapping[str, Any], reading: Mapping[str, Any]) -> str:
    """Say by which factor each reading grew from the microbatch before, which had fewer rows."""
    returned, done = (reading[key] / before[key] for key in ("returned_ms", "done_ms"))
    return f"× {returned:.2f} and × {done:.2f}"
