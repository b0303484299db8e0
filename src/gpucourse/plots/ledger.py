"""Charts of the chapter "The memory ledger": peaks by rows, ways to save, and an allocator in pieces."""

from __future__ import annotations

import base64
import dataclasses
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpucourse import html, plots
from gpucourse.units import GB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gpucourse.ledger_fit import FittedLedger
    from gpucourse.recording import Recording

__all__ = ["ViewerFile", "peaks_by_rows", "segments", "viewer_file", "ways"]


def peaks_by_rows(
    predicted: Mapping[str, Mapping[str, Any]],
    ledger: FittedLedger,
    trials: Recording,
) -> plots.Chart:
    """Draw predicted peaks by the rows of the microbatch beside those that were found by trying.

    Parameters
    ----------
    predicted
        Predictions by their rows, each with ``allocated_bytes`` and ``reserved_bytes``.
    ledger
        The line through the allocated ones.
    trials
        The recording `largest_by_trying`: ``cap_bytes``, and ``tried`` by microbatch with ``rows``,
        ``allocated_bytes``, ``reserved_bytes`` and ``message``, None where the step ran.

    Returns
    -------
    Chart
        Lines for what is predicted, dots for what was measured, a cross for what was refused.

    Raises
    ------
    ValueError
        Nothing is predicted.
    """
    if not predicted:
        raise ValueError("there is no prediction to draw; wanted one microbatch or more")
    counts = sorted(predicted, key=int)
    tried = sorted(trials["tried"].values(), key=lambda trial: trial["rows"])
    cap_gb = trials["cap_bytes"] / GB
    budget_gb = float(ledger.budget_gb)
    fig, ax = plots.figure(height=3.5)
    rows = [int(count) for count in counts]
    for key, colour, text, mark in (
        ("allocated_bytes", plots.BLUE, "allocated", "o"),
        ("reserved_bytes", plots.GREEN, "reserved", "s"),
    ):
        values = [predicted[count][key] / GB for count in counts]
        ax.plot(rows, values, "-", color=colour)
        ran = [trial for trial in tried if trial["message"] is None]
        ax.plot([t["rows"] for t in ran], [t[key] / GB for t in ran], mark, color=colour)
        # Half way up the longest stretch, where nothing else is written.
        at = max(range(1, len(rows)), key=lambda k: rows[k] - rows[k - 1]) if len(rows) > 1 else 0
        middle = ((rows[at] + rows[at - 1]) / 2, (values[at] + values[at - 1]) / 2)
        offset, side = ((-8, 4), "right") if key == "reserved_bytes" else ((8, -10), "left")
        ax.annotate(f"{text}, predicted", middle, offset, textcoords="offset points", color=colour, ha=side)
    refused = [trial for trial in tried if trial["message"] is not None]
    ax.plot(
        [trial["rows"] for trial in refused],
        [cap_gb] * len(refused),
        "x",
        color=plots.ORANGE,
        markersize=8,
        markeredgewidth=2,
    )
    last = max((trial["rows"] for trial in tried), default=rows[-1])
    for level, text in (
        (cap_gb, f"the cap, {cap_gb:.1f} GB"),
        (budget_gb, f"the budget, {budget_gb:.1f} GB"),
    ):
        ax.axhline(level, color=plots.GREY, linestyle="--")
        ax.annotate(text, (0, level), (4, 3), textcoords="offset points", color=plots.INK)
    ax.set_xlim(0, 1.1 * max(last, rows[-1]))
    ax.set_ylim(0, 1.25 * max(cap_gb, max(p["reserved_bytes"] for p in predicted.values()) / GB))
    ax.set_xlabel("microbatch, rows")
    ax.set_ylabel("peak of the step, GB")
    return plots.Chart(
        fig,
        caption=(
            "Predicted peaks (lines) and those that were found by trying (dots; a cross was refused). Allocated "
            "memory follows one line; reserved memory meets the cap first."
        ),
        alt=(
            "Line chart: gigabytes at the peak of a step against the rows of the microbatch. Two predicted lines rise, "
            "allocated below reserved. Measured dots lie on them. Crosses at the dashed cap mark refused microbatches."
        ),
        header=(
            "Rows",
            "Allocated, predicted, GB",
            "Allocated, found, GB",
            "Reserved, predicted, GB",
            "Reserved, found, GB",
        ),
        rows=[
            (
                count,
                *_pair(predicted, tried, count, "allocated_bytes"),
                *_pair(predicted, tried, count, "reserved_bytes"),
            )
            for count in sorted({*rows, *(trial["rows"] for trial in tried)})
        ],
        source=trials,
    )


def _pair(
    predicted: Mapping[str, Mapping[str, Any]], tried: Sequence[Mapping[str, Any]], rows: int, key: str
) -> tuple[str, str]:
    said = predicted.get(str(rows))
    found = next((trial for trial in tried if trial["rows"] == rows), None)
    seen = "not tried"
    if found is not None:
        seen = "refused" if found["message"] is not None else f"{found[key] / GB:.2f}"
    return "not asked" if said is None else f"{said[key] / GB:.2f}", seen


# From below: what stays over the step, then what comes and goes.
_PARTS: dict[str, tuple[tuple[str, ...], str, float]] = {
    "parameters": (("parameters", "buffers"), plots.BLUE, 1.0),
    "optimizer": (("optimizer",), plots.BLUE, 0.45),
    "gradients": (("gradients",), plots.GREEN, 1.0),
    "casts": (("casts",), plots.PURPLE, 1.0),
    "activations": (("activations", "recomputed"), plots.ORANGE, 0.85),
    "temporaries": (("temporaries",), plots.PURPLE, 0.4),
    "the rest": (("inputs", "workspaces", "rounding", "unexplained"), plots.GREY, 0.6),
}


def ways(found: Mapping[str, Mapping[str, Any]], *, source: Recording) -> plots.Chart:
    """Draw what lives at the peak of several ways to run one step, and each one's prediction.

    Parameters
    ----------
    found
        By the name that the chart shows: ``measured`` and ``predicted`` as their ``as_dict`` gave them.
    source
        The recording that the measurements come from.

    Returns
    -------
    Chart
        One bar a way, its lines stacked; a mark where the prediction ends. The table has prediction, measurement and
        residual of allocated and of reserved memory.

    Raises
    ------
    ValueError
        There is nothing to draw, or a measurement has a line that the chart does not know.
    """
    if not found:
        raise ValueError("there is no way to draw; wanted one or more")
    known = {name for names, _, _ in _PARTS.values() for name in names}
    fig, ax = plots.figure(height=0.6 + 0.62 * len(found))
    legend = {}
    for at, pair in enumerate(found.values()):
        lines = _peak(pair["measured"])["lines"]
        strange = sorted(name for name, nbytes in lines.items() if nbytes and name not in known)
        if strange:
            raise ValueError(
                f"a measurement has the line {strange[0]!r}; known are {', '.join(sorted(known))}"
            )
        begun = 0.0
        for part, (names, colour, alpha) in _PARTS.items():
            gb = sum(lines.get(name, 0) for name in names) / GB
            if gb:
                legend[part] = ax.barh(at, gb, left=begun, height=0.6, color=colour, alpha=alpha, linewidth=0)
            begun += gb
        said = _peak(pair["predicted"])["allocated_bytes"] / GB
        ax.plot([said, said], [at - 0.42, at + 0.42], color=plots.INK, linewidth=2)
    ax.set_yticks(range(len(found)), labels=list(found))
    ax.invert_yaxis()
    ax.set_xlabel("allocated at the peak, GB; the mark is the prediction")
    fig.legend(
        [legend[part] for part in _PARTS if part in legend],
        [part for part in _PARTS if part in legend],
        loc="outside upper left",
        ncols=4,
        frameon=False,
        fontsize=8.5,
    )
    rows = []
    for name, pair in found.items():
        cells = [name]
        for key in ("allocated_bytes", "reserved_bytes"):
            said, seen = (_peak_of(pair[side], key) for side in ("predicted", "measured"))
            cells += [
                format_bytes(said),
                format_bytes(seen),
                f"{100 * (seen - said) / seen:+.2f} %".replace("-", "\N{MINUS SIGN}"),
            ]
        rows.append(tuple(cells))
    return plots.Chart(
        fig,
        caption="What lives at the peak, by the way the step is run. The mark shows what was predicted without a GPU.",
        alt=(
            "Stacked horizontal bars, one for each way to run the step: gigabytes at the peak, made of parameters, "
            "optimizer state, gradients, casts, activations and temporaries. A mark on each bar is its prediction. "
            + " ".join(f"{row[0]}: {row[2]}, predicted {row[1]}." for row in rows)
        ),
        header=(
            "The step",
            "Allocated, predicted",
            "Measured",
            "Residual",
            "Reserved, predicted",
            "Measured",
            "Residual",
        ),
        rows=rows,
        source=source,
    )


def _peak(step: Mapping[str, Any]) -> Mapping[str, Any]:
    peak: Mapping[str, Any] = max(step["peaks"], key=lambda peak: peak["allocated_bytes"])
    return peak


def _peak_of(step: Mapping[str, Any], key: str) -> int:
    return int(_peak(step)[key] if key == "allocated_bytes" else step[key])


# ---------------------------------------------------------------------------------------- an allocator in pieces


def segments(refusal: Mapping[str, Any], *, source: Recording, most: int = 6) -> plots.Chart:
    """Draw the allocator's segments at the instant of a refusal, what lives in them and what is free.

    Parameters
    ----------
    refusal
        ``asked_bytes``, ``cap_bytes``, and ``segments``: each with ``bytes`` and ``pieces``, a list of
        [bytes, whether it lives, …] in the order of their addresses.
    source
        The recording that it comes from.
    most
        Sizes of segments that are drawn, those with the most free memory; the others are counted.

    Returns
    -------
    Chart
        One bar for all segments of a size, end to end; beneath, as long as it is, what was asked for.

    Raises
    ------
    ValueError
        There is no segment, or a segment's pieces are not as long as it is.
    """
    held = refusal["segments"]
    if not held:
        raise ValueError("the snapshot has no segment; wanted the allocator at the instant of a refusal")
    alike: dict[int, list[Mapping[str, Any]]] = {}
    for segment in held:
        length = sum(piece[0] for piece in segment["pieces"])
        if length != segment["bytes"]:
            raise ValueError(
                f"the pieces of a segment of {segment['bytes']:,} B are {length:,} B together; they fill it wholly"
            )
        alike.setdefault(segment["bytes"], []).append(segment)
    ordered = sorted(alike.items(), key=lambda group: -sum(map(_free, group[1])))
    drawn, others = ordered[:most], [segment for _, group in ordered[most:] for segment in group]
    fig, ax = plots.figure(height=1.0 + 0.3 * (len(drawn) + 1))
    for at, (_, group) in enumerate(drawn):
        _bar(ax, at, sorted(group, key=_free))
    at, asked = len(drawn), refusal["asked_bytes"]
    ax.barh(at, asked / GB, height=0.7, color="none", edgecolor=plots.INK, linewidth=1.4, linestyle="--")
    names = [f"{len(group)} × {format_bytes(size)}" for size, group in drawn]
    ax.set_yticks(range(len(drawn) + 1), labels=[*names, "asked for"])
    ax.invert_yaxis()
    ax.set_xlabel("GB of all segments of a size, end to end: blue lives, orange is free")
    ax.set_ylabel("segments")
    pieces = [piece[0] for segment in held for piece in segment["pieces"] if not piece[1]]
    caption = (
        f"The allocator when {format_bytes(asked)} was refused under {format_bytes(refusal['cap_bytes'])}: "
        f"{format_bytes(sum(pieces))} is reserved and free, in {len(pieces)} pieces, "
        f"the longest of {format_bytes(max(pieces, default=0))}."
    )
    return plots.Chart(
        fig,
        caption=caption,
        alt=(
            f"Horizontal bars, one for all segments of a size, the {len(drawn)} sizes with the most free memory: "
            f"what lives is blue, what is free is orange. The dashed bar below is the request. {caption}"
        ),
        header=("Segments", "Together", "Lives", "Free", "Free pieces", "Longest free"),
        rows=[
            *((name, *_told(group)) for name, (_, group) in zip(names, drawn, strict=True)),
            *([(f"{len(others)} of other sizes", *_told(others))] if others else []),
        ],
        source=source,
    )


def _told(group: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    whole, free = sum(segment["bytes"] for segment in group), sum(map(_free, group))
    pieces = [piece[0] for segment in group for piece in segment["pieces"] if not piece[1]]
    return (
        format_bytes(whole),
        format_bytes(whole - free),
        format_bytes(free),
        str(len(pieces)),
        format_bytes(max(pieces, default=0)),
    )


def _free(segment: Mapping[str, Any]) -> int:
    return sum(int(piece[0]) for piece in segment["pieces"] if not piece[1])


def _bar(ax: Axes, at: int, group: Sequence[Mapping[str, Any]]) -> None:
    begun = 0
    for segment in group:
        for nbytes, lives, *_ in segment["pieces"]:
            colour = plots.BLUE if lives else plots.ORANGE
            ax.barh(at, nbytes / GB, left=begun / GB, height=0.7, color=colour, linewidth=0)
            begun += nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class ViewerFile:
    """A memory snapshot as a file for PyTorch's viewer.

    Attributes
    ----------
    name
        File name.
    data
        A pickle of plain data, protocol 4, as the viewer reads it.
    """

    name: str
    data: bytes = dataclasses.field(repr=False)

    def _repr_html_(self) -> str:
        coded = base64.b64encode(self.data).decode("ascii")
        name = html.escape(self.name)
        return (
            f'<p><a download="{name}" href="data:application/octet-stream;base64,{coded}">{name}</a> '
            f"({len(self.data) / 1000:.0f} kB)</p>"
        )


def viewer_file(refusal: Mapping[str, Any], name: str = "refused.pickle") -> ViewerFile:
    """Write a recorded refusal in the form that `torch.cuda.memory._dump_snapshot` writes.

    Parameters
    ----------
    refusal
        ``segments`` as `segments` takes them, each with ``address`` too, and pieces of [bytes, lives, place];
        ``events``: [action, address, bytes, place] in order of time, actions "alloc", "free", "segment_alloc",
        "segment_free" and "oom"; ``places``: the lines of code that a place counts in, each (file, line, function).
    name
        File name.

    Returns
    -------
    ViewerFile
        The page offers it for download; nothing in it is from the machine but the allocator's numbers.

    Raises
    ------
    ValueError
        An event's action is none of these.
    """
    frames = [
        [{"filename": file, "line": int(line), "name": function}]
        for file, line, function in refusal["places"]
    ]

    def stack(place: int | None) -> list[dict[str, Any]]:
        return [] if place is None else frames[place]

    found: list[dict[str, Any]] = []
    for segment in refusal["segments"]:
        address, blocks = int(segment["address"]), []
        for nbytes, lives, place in segment["pieces"]:
            blocks.append(
                {
                    "address": address,
                    "size": nbytes,
                    "requested_size": nbytes if lives else 0,
                    "state": "active_allocated" if lives else "inactive",
                    "frames": stack(place),
                }
            )
            address += nbytes
        found.append(
            {
                "device": 0,
                "address": int(segment["address"]),
                "total_size": segment["bytes"],
                "allocated_size": segment["bytes"] - _free(segment),
                "stream": 0,
                "segment_type": "large" if segment["bytes"] > 2 * 2**20 else "small",
                "blocks": blocks,
                "frames": [],
            }
        )
    trace: list[dict[str, Any]] = []
    for action, address, nbytes, place in refusal["events"]:
        if action not in ("alloc", "free", "segment_alloc", "segment_free", "oom"):
            raise ValueError(
                f"an event's action is {action!r}; wanted alloc, free, segment_alloc, segment_free or oom"
            )
        # The viewer takes a free for two events that follow each other.
        for part in ("free_requested", "free_completed") if action == "free" else (action,):
            event = {"action": part, "addr": address, "size": nbytes, "stream": 0, "frames": stack(place)}
            if action == "oom":
                event["device_free"] = 0
            trace.append(event)
    return ViewerFile(name, pickle.dumps({"segments": found, "device_traces": [trace]}, protocol=4))
