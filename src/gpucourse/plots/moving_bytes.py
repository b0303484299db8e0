"""Charts and tables of the chapter "Moving bytes": what each road carries, who waits, and what is read too early."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpucourse import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gpucourse.recording import Recording

__all__ = [
    "absorbed",
    "bound_workers",
    "copy_sizes",
    "far_apart",
    "fit_line",
    "held",
    "lanes",
    "other_races",
    "overlaps",
    "pinning",
    "pipeline_us",
    "road",
    "stale_shares",
    "starving",
    "step_ms",
    "strided_us",
    "trace_rows",
    "two_slopes",
    "working_sets",
]

Line = tuple[float, float]  # start in µs, bandwidth in GB/s

NIGHT_GB_S = 12e9 / (8 * 3600) * 8 / 1e9  # 12e9 tokens in 8 hours, 8 bytes each


def _us(value: float | None) -> str:
    return "unavailable" if value is None else plots.unbroken_ms(value / 1e3)


def _size(count: float) -> str:
    """Write a size that is a power of two by its own unit: the sweeps go by powers of two.

    >>> _size(131072), _size(65540), _size(3 * 2**19)
    ('128 KiB', '65,540 B', '1.5 MiB')
    """
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size and (count * 4 / size).is_integer():
            return f"{count / size:g} {unit}"
    return f"{int(count):,} B"


def _gb_s(value: float | None) -> str:
    """Write a bandwidth given in GB/s in the unit that suits it.

    >>> _gb_s(0.0033), _gb_s(54.91), _gb_s(4249.0), _gb_s(None)
    ('3.3 MB/s', '54.9 GB/s', '4,249 GB/s', 'unavailable')
    """
    if value is None:
        return "unavailable"
    if value < 0.1:
        return f"{value * 1e3:.1f} MB/s"
    return f"{value:.1f} GB/s" if value < 1000 else f"{value:,.0f} GB/s"


def _size_axis(ax: Axes, sizes: Sequence[float], every: int = 4) -> None:
    ax.set_xscale("log", base=2)
    shown = [size for k, size in enumerate(sizes) if k % every == 0]
    ax.set_xticks(shown, labels=[_size(size) for size in shown])
    ax.set_xticks([], minor=True)


# --- the road --------------------------------------------------------------------------------------------

_LEVELS = (
    ("file_gb_s", "file, not in the system's cache"),
    ("cached_file_gb_s", "file, in the system's cache"),
    ("host_gb_s", "host memory to host memory, one thread"),
    ("pageable_gb_s", "link, from pageable memory"),
    ("pinned_gb_s", "link, from pinned memory"),
    ("hbm_gb_s", "HBM, read and written"),
    ("l2_gb_s", "L2, read and written, by difference"),
)


def road(source: Recording) -> plots.Chart:
    """Draw the bandwidth of each level between a file and the L2, beside what the night needs.

    Parameters
    ----------
    source
        The recording `road_to_a_register`; a level that is None there is left out and called unavailable.

    Returns
    -------
    Chart
        Bars on a logarithmic axis; its table gives the link's generation and width too.
    """
    levels = [(text, source[key]) for key, text in _LEVELS]
    drawn = [(text, rate) for text, rate in levels if rate is not None]
    fig, ax = plots.figure(height=0.9 + 0.36 * (len(drawn) + 1))
    ax.set_xscale("log")
    left = NIGHT_GB_S / 2
    ax.barh(0, NIGHT_GB_S - left, left=left, height=0.66, color=plots.ORANGE)
    ax.annotate(
        _gb_s(NIGHT_GB_S), (NIGHT_GB_S, 0), (5, 0), textcoords="offset points", va="center", color=plots.INK
    )
    for k, (text, rate) in enumerate(drawn, start=1):
        colour = plots.GREEN if text.startswith("link") else plots.BLUE
        ax.barh(k, rate - left, left=left, height=0.66, color=colour)
        ax.annotate(_gb_s(rate), (rate, k), (5, 0), textcoords="offset points", va="center", color=plots.INK)
    ax.set_yticks(range(len(drawn) + 1), labels=["what the night needs", *(text for text, _ in drawn)])
    ax.invert_yaxis()
    ax.set_xlim(left, 12 * max(rate for _, rate in drawn))
    ax.set_xlabel("GB/s")
    ax.tick_params(axis="y", length=0)
    link = source["link"]
    says = (
        "unavailable"
        if link["generation"] is None
        else f"PCIe generation {link['generation']}, {link['width']} lanes"
    )
    others = [
        ("link, to pageable memory", source["pageable_back_gb_s"]),
        ("link, to pinned memory", source["pinned_back_gb_s"]),
        ("link, each of two streams in one direction", source["same_direction_gb_s"]),
        ("link, each of two streams in opposite directions", source["both_directions_gb_s"]),
    ]
    return plots.Chart(
        fig,
        caption="What each stretch of the road carries; the night's tokens stand above. The axis is logarithmic.",
        alt=(
            "Bar chart, logarithmic: bandwidth of a file, host memory, the link from pageable and from pinned "
            "memory, HBM and L2, rising from level to level; the night's need is far below every bar."
        ),
        header=("Level", "Bandwidth"),
        rows=[
            ("what the night needs", _gb_s(NIGHT_GB_S)),
            *((text, _gb_s(rate)) for text, rate in [*levels, *others]),
            ("link, by the driver", says),
        ],
        source=source,
    )


def two_slopes(rows: Sequence[Mapping[str, float]], l2_bytes: int) -> tuple[Line | None, Line | None]:
    """Fit one line to the sets that surely fit into the L2 and one to those that surely do not.

    Parameters
    ----------
    rows
        ``bytes`` and ``us`` of each working set.
    l2_bytes
        Size of the L2. Sets up to half of it count as inside, from twice it as outside; what lies between is
        left out, since part of it is still found in the cache.

    Returns
    -------
    (line or None, line or None)
        Start in µs and bandwidth in GB/s, inside and outside; None where there are fewer than two sets.

    Examples
    --------
    >>> rows = [{"bytes": n * 1e6, "us": 2 + n / 8} for n in (5, 10, 20)]
    >>> inside, outside = two_slopes(rows, 40_000_000)
    >>> round(inside[1]), outside
    (8000, None)
    """
    lines: list[Line | None] = []
    # The smallest sets wait for the launch alone, not for memory.
    for low, high in ((l2_bytes / 8, l2_bytes / 2), (2 * l2_bytes, float("inf"))):
        chosen = [row for row in rows if low <= row["bytes"] <= high]
        lines.append(
            fit_line([row["bytes"] for row in chosen], [row["us"] for row in chosen])
            if len(chosen) > 1
            else None
        )
    return lines[0], lines[1]


def working_sets(source: Recording) -> plots.Chart:
    """Draw the time of a copy within the device against the bytes that it touches, and its two lines.

    Parameters
    ----------
    source
        The recording `working_sets`.

    Returns
    -------
    Chart
        To two and a half times the L2; the table has every set. A dotted line stands at the size of the L2.
    """
    rows, l2_bytes = source["rows"], source["l2_bytes"]
    shown = [row for row in rows if row["bytes"] <= 2.5 * l2_bytes]
    fig, ax = plots.figure(height=3.4)
    ax.plot([row["bytes"] / 1e6 for row in shown], [row["us"] for row in shown], "o", color=plots.BLUE)
    told = []
    end = 2.5 * l2_bytes
    for line, name, colour, until, offset in zip(
        two_slopes(rows, l2_bytes),
        ("inside the L2", "outside"),
        (plots.GREEN, plots.ORANGE),
        (1.5 * l2_bytes, end),
        ((6, -4), (-110, 0)),
        strict=True,
    ):
        if line is None:
            told.append(f"{name} unavailable")
            continue
        start_us, gb_s = line
        ax.plot([0, until / 1e6], [start_us, start_us + until / gb_s / 1e3], "--", color=colour, zorder=1)
        ax.annotate(
            f"{name}, {gb_s / 1e3:.1f} TB/s",
            (until / 1e6, start_us + until / gb_s / 1e3),
            offset,
            textcoords="offset points",
            color=colour,
        )
        told.append(f"{name} {start_us:.1f} µs + bytes / ({gb_s / 1e3:.1f} TB/s)")
    ax.axvline(l2_bytes / 1e6, color=plots.GREY, linestyle=":")
    ax.annotate(
        f"L2: {_size(l2_bytes)}",
        (l2_bytes / 1e6, 0.96),
        (4, 0),
        textcoords="offset points",
        xycoords=("data", "axes fraction"),
        va="top",
        color=plots.INK,
    )
    ax.set_xlim(0, 1.02 * end / 1e6)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("source and target together, MB")
    ax.set_ylabel("time, µs")
    return plots.Chart(
        fig,
        caption=f"A copy within the device, repeated. Dashed: {'; '.join(told)}.",
        alt=(
            "Dots: time of a copy against its working set. Small sets follow a slowly rising line, sets well beyond "
            "the L2 a steeper one; from about half of the L2 on the dots pass from one to the other."
        ),
        header=("Working set", "Part of the L2", "Time", "Bytes over time"),
        rows=[
            (
                f"{row['bytes'] / 1e6:.1f} MB",
                f"{row['bytes'] / l2_bytes:.2f}",
                _us(row["us"]),
                _gb_s(row["bytes"] / row["us"] / 1e3),
            )
            for row in rows
        ],
        source=source,
    )


def strided_us(floats: int, stride: int, piece_bytes: int, gb_s: float) -> float:
    """Predict the time of reading every `stride`-th float, where memory is read in pieces.

    Parameters
    ----------
    floats
        How many are read, and written side by side.
    stride
        Distance in floats.
    piece_bytes
        The smallest piece that memory gives: 4 bytes are paid as one piece once each has its own.
    gb_s
        Bandwidth, reads and writes together.

    Examples
    --------
    >>> strided_us(1_000_000, 1, 32, 4000.0)
    2.0
    >>> strided_us(1_000_000, 64, 32, 4000.0)
    9.0
    """
    return floats * (min(4 * stride, piece_bytes) + 4) / gb_s / 1e3


def far_apart(source: Recording, levels: Recording) -> plots.Chart:
    """Draw the time of reading floats that lie apart, against pieces of 32, 64 and 128 bytes.

    Parameters
    ----------
    source
        The recording `far_apart`.
    levels
        The recording `road_to_a_register`, for the bandwidth of HBM.
    """
    rows = source["rows"]
    strides = [row["stride"] for row in rows]
    predicted = {
        piece: [strided_us(source["floats"], stride, piece, levels["hbm_gb_s"]) for stride in strides]
        for piece in (32, 64, 128)
    }
    fig, ax = plots.figure(height=3.4)
    ax.set_xscale("log", base=2)
    for piece, style in ((32, "--"), (64, ":"), (128, "-.")):
        ax.plot(strides, predicted[piece], style, color=plots.GREY, zorder=1)
        above = piece == 128  # what was measured lies above the other two lines
        ax.annotate(
            f"pieces of {piece} bytes",
            (strides[-1], predicted[piece][-1]),
            (0, 5 if above else -5),
            textcoords="offset points",
            ha="right",
            va="bottom" if above else "top",
            color=plots.INK,
        )
    ax.plot(strides, [row["us"] for row in rows], "o", color=plots.BLUE)
    ax.annotate(
        "measured", (strides[1], rows[1]["us"]), (-4, 8), textcoords="offset points", color=plots.BLUE
    )
    ax.set_xticks(strides, labels=[str(stride) for stride in strides])
    ax.set_xticks([], minor=True)
    ax.set_ylim(0, 1.15 * max(*predicted[128], *(row["us"] for row in rows)))
    ax.set_xlabel("distance between neighbours, in floats")
    ax.set_ylabel("time for the same floats, µs")
    return plots.Chart(
        fig,
        caption=(
            "The same number of floats read from further and further apart. The lines are bytes over the "
            "bandwidth of HBM, for three sizes of the piece that memory hands out."
        ),
        alt=(
            "Dots: time against stride, beside three lines that rise together and level off one by one, where "
            "each float has a piece of memory of its own: at 8 floats for pieces of 32 bytes, at 16 for 64, "
            "at 32 for 128. The dots leave the lowest line."
        ),
        header=("Distance", "Measured", *(f"Pieces of {piece} bytes" for piece in predicted)),
        rows=[
            (f"{stride} floats", _us(row["us"]), *(_us(times[k]) for times in predicted.values()))
            for k, (stride, row) in enumerate(zip(strides, rows, strict=True))
        ],
        source=source,
    )


# --- the link --------------------------------------------------------------------------------------------


def fit_line(sizes_bytes: Sequence[float], times_us: Sequence[float]) -> tuple[float, float]:
    """Fit ``start + bytes / bandwidth`` so that each point's *relative* distance counts.

    A plain least-squares line would hear the largest sizes alone, whose scatter exceeds the start many times.

    Returns
    -------
    (float, float)
        The start in µs and the bandwidth in GB/s.

    Raises
    ------
    ValueError
        There are fewer than two sizes.

    Examples
    --------
    >>> start_us, gb_s = fit_line([1000, 1_000_000], [2.02, 22.0])
    >>> round(start_us, 3), round(gb_s, 3)
    (2.0, 50.0)
    """
    if len(sizes_bytes) < 2:
        raise ValueError(f"a line needs two sizes or more, found {len(sizes_bytes)}: measure another size")
    times = np.asarray(times_us, dtype=float)
    slope, start = np.polyfit(np.asarray(sizes_bytes, dtype=float), times, 1, w=1 / times)
    return float(start), float(1e-3 / slope)


def copy_sizes(source: Recording) -> plots.Chart:
    """Draw the time of a copy to the device against its size, with the line that fits the device's part.

    Parameters
    ----------
    source
        The recording `copy_sizes`.

    Returns
    -------
    Chart
        Both axes logarithmic; its caption gives the fitted start, bandwidth and half-bandwidth size.
    """
    rows = source["rows"]
    sizes = [row["bytes"] for row in rows]
    start_us, gb_s = fit_line(sizes, [row["device_us"] for row in rows])
    half = start_us * gb_s * 1e3
    fig, ax = plots.figure(height=3.6)
    ax.set_yscale("log")
    _size_axis(ax, sizes, every=3)
    curves = (
        ("pageable_there_us", "pageable, as called", plots.ORANGE, "o-", (0, 8), "right"),
        ("pinned_there_us", "pinned, as called", plots.GREEN, "o-", (0, -14), "left"),
        ("device_us", "pinned, the device's part", plots.BLUE, "o", (0, -16), "left"),
    )
    for key, text, colour, style, offset, side in curves:
        values = [row[key] for row in rows]
        ax.plot(sizes, values, style, color=colour)
        at = {"pageable_there_us": -4, "pinned_there_us": 0, "device_us": 0}[key]
        ax.annotate(text, (sizes[at], values[at]), offset, textcoords="offset points", ha=side, color=colour)
    ax.plot(sizes, [start_us + size / gb_s / 1e3 for size in sizes], "--", color=plots.GREY)
    ax.axvline(half, color=plots.GREY, linestyle=":")
    ax.annotate(
        f"half-bandwidth size, {half / 1e3:.0f} kB",
        (half, 0.96),
        (4, 0),
        textcoords="offset points",
        xycoords=("data", "axes fraction"),
        color=plots.INK,
        va="top",
    )
    ax.set_ylim(bottom=min(row["device_us"] for row in rows) / 3)
    ax.set_xlabel("size of the copy")
    ax.set_ylabel("time, µs")
    return plots.Chart(
        fig,
        caption=(
            f"A copy to the device by size. Dashed: {start_us:.1f} µs + bytes / ({gb_s:.1f} GB/s), fitted to "
            "the device's part."
        ),
        alt=(
            "Line chart, both axes logarithmic: time of a copy against its size. Small copies take the same "
            "time whatever their size, large ones grow in proportion; pageable memory lies above pinned."
        ),
        header=(
            "Size",
            "Pageable: host held",
            "Pageable: there",
            "Pinned: host held",
            "Pinned: there",
            "Pinned: device's part",
            "Fitted line",
        ),
        rows=[
            (
                _size(row["bytes"]),
                _us(row["pageable_held_us"]),
                _us(row["pageable_there_us"]),
                _us(row["pinned_held_us"]),
                _us(row["pinned_there_us"]),
                _us(row["device_us"]),
                _us(start_us + row["bytes"] / gb_s / 1e3),
            )
            for row in rows
        ],
        source=source,
    )


_WAYS = (
    ("pageable", "pageable", plots.ORANGE, "s-"),
    ("pageable_non_blocking", "pageable, non_blocking", plots.PURPLE, "o-"),
    ("pinned", "pinned", plots.GREEN, "^-"),
    ("pinned_non_blocking", "pinned, non_blocking", plots.BLUE, "o-"),
)


def held(source: Recording) -> plots.Chart:
    """Draw how long each way of copying holds the host while the device is busy.

    Parameters
    ----------
    source
        The recording `held_behind_work`.
    """
    rows = source["rows"]
    sizes = [row["bytes"] for row in rows]
    fig, ax = plots.figure(height=3.2)
    ax.set_yscale("log")
    _size_axis(ax, sizes, every=1)
    shown = [size for size in sizes if size in (1024, 16384, 131072, 2**20, 2**22)]
    ax.set_xticks(shown, labels=[_size(size) for size in shown])
    for key, text, colour, style in _WAYS:
        ax.plot(sizes, [row[key] for row in rows], style, color=colour, label=text)
    ax.axhline(source["pending_us"], color=plots.GREY, linestyle="--")
    ax.annotate(
        "the pending work",
        (sizes[0], source["pending_us"]),
        (0, 5),
        textcoords="offset points",
        color=plots.INK,
    )
    ax.set_ylim(top=source["pending_us"] * 40)
    ax.legend(frameon=False, ncols=2, loc="upper left", fontsize=9)
    ax.set_xlabel("size of the copy")
    ax.set_ylabel("host held, µs")
    return plots.Chart(
        fig,
        caption=(
            f"How long a copy to the device holds the host behind {source['pending_us'] / 1e3:.1f} ms of pending "
            "work. On the dashed line the host has waited for all of it."
        ),
        alt=(
            "Line chart, both axes logarithmic: the time that a copy call holds the host, against the copy's "
            "size, for four ways. Blocking copies lie at the pending work; the pinned non_blocking one stays "
            "at microseconds; the pageable non_blocking one leaves the bottom at some size and joins the top."
        ),
        header=("Size", *(text for _, text, _, _ in _WAYS)),
        rows=[(_size(row["bytes"]), *(_us(row[key]) for key, _, _, _ in _WAYS)) for row in rows],
        source=source,
    )


def pinning(source: Recording) -> plots.Table:
    """List what a copy takes from memory that is pinned already, on the fly, or not at all.

    Parameters
    ----------
    source
        The recording `pinning`.
    """
    columns = (
        ("pinned_us", "Pinned before"),
        ("plain_us", "Pageable"),
        ("again_us", "Pinned on the fly, memory reused"),
        ("first_time_us", "Pinned on the fly, first time"),
        ("pin_us", "Pinning alone, first time"),
    )
    return plots.Table(
        ("Size", *(text for _, text in columns)),
        tuple((_size(row["bytes"]), *(_us(row[key]) for key, _ in columns)) for row in source["rows"]),
        caption="From the call until the bytes are on the device",
        source=source,
    )


# --- overlap ---------------------------------------------------------------------------------------------


def pipeline_us(chunks: int, copy_us: float, compute_us: float, *, overlapping: bool = True) -> float:
    """Predict the time of equal chunks that are each copied, then computed on, with two buffers or more.

    Examples
    --------
    >>> pipeline_us(8, 1000.0, 1500.0)
    13000.0
    >>> pipeline_us(8, 1000.0, 1500.0, overlapping=False)
    20000.0
    """
    if not overlapping:
        return chunks * (copy_us + compute_us)
    return copy_us + (chunks - 1) * max(copy_us, compute_us) + compute_us


# Way, its name, whether copy and computation should overlap, and which copy it makes.
_RUNS = (
    ("two_buffers", "pinned, side stream, two buffers", True, "copy_us"),
    ("three_buffers", "pinned, side stream, three buffers", True, "copy_us"),
    ("one_buffer", "pinned, side stream, one buffer", False, "copy_us"),
    ("same_stream", "pinned, one stream for all, two buffers", False, "copy_us"),
    ("synchronized", "pinned, side stream, two buffers, a wait after each chunk", False, "copy_us"),
    ("pageable", "pageable, side stream, two buffers", True, "pageable_copy_us"),
)


def overlaps(source: Recording) -> plots.Table:
    """List predicted and measured totals of each way to run copies beside computation.

    Parameters
    ----------
    source
        The recording `overlaps`.
    """
    rows = []
    for label, case in source["cases"].items():
        for key, text, overlapping, copy in _RUNS:
            predicted = pipeline_us(
                source["chunks"], source[copy], case["compute_us"], overlapping=overlapping
            )
            measured = case[key]["total_us"]
            rows.append(
                (
                    f"{label}: {text}",
                    "max" if overlapping else "sum",
                    _us(predicted),
                    _us(measured),
                    f"{100 * (measured / predicted - 1):+.1f} %",
                    _us(case[key]["held_us"]),
                )
            )
    compute = ", ".join(f"{label} {_us(case['compute_us'])}" for label, case in source["cases"].items())
    return plots.Table(
        ("Way", "Rule", "Predicted", "Measured", "Residual", "Host held"),
        tuple(rows),
        caption=(
            f"{source['chunks']} chunks of {_size(source['chunk_bytes'])}: a copy takes "
            f"{_us(source['copy_us'])} from pinned memory, {_us(source['pageable_copy_us'])} from pageable; the "
            f"computation on a chunk, {compute}"
        ),
        source=source,
    )


def lanes(source: Recording, case: str, ways: Sequence[str]) -> plots.Chart:
    """Draw copies and computations of some runs as two lanes each, from events on the device's clock.

    Parameters
    ----------
    source
        The recording `overlaps`.
    case
        A key of its ``cases``.
    ways
        Which runs of the case, from top to bottom.
    """
    texts = {key: text for key, text, _, _ in _RUNS}
    fig, axes = plots.figure(height=0.7 + 1.15 * len(ways), nrows=len(ways), sharex=True, squeeze=False)
    rows: list[tuple[str, ...]] = []
    for ax, way in zip(axes[:, 0], ways, strict=True):
        for k, (copying, copied, computing, computed) in enumerate(source["cases"][case][way]["steps_us"]):
            for lane, begin, end, colour in (
                (0, copying, copied, plots.GREEN),
                (1, computing, computed, plots.BLUE),
            ):
                ax.barh(
                    lane,
                    (end - begin) / 1e3,
                    left=begin / 1e3,
                    height=0.66,
                    color=colour,
                    edgecolor=plots.INK,
                    linewidth=0.5,
                )
                ax.text((begin + end) / 2e3, lane, str(k + 1), ha="center", va="center", fontsize=8)
                rows.append(
                    (texts[way], ("copy", "compute")[lane], str(k + 1), f"{begin:,.0f}", f"{end:,.0f}")
                )
        ax.set_yticks([0, 1], labels=["copy", "compute"])
        ax.invert_yaxis()
        ax.set_title(texts[way])
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="y", length=0)
    axes[-1, 0].set_xlabel("ms since a mark before the first copy, by events")
    return plots.Chart(
        fig,
        caption="Copies and computations on the device's clock; the numbers are the chunks.",
        alt=(
            "Pairs of lanes against time, one pair a way. With a side stream and two buffers the copy of the "
            "next chunk stands above the computation on this one; with one buffer, or in one stream, they take "
            "turns and the run is longer."
        ),
        header=("Way", "Lane", "Chunk", "Start, µs", "End, µs"),
        rows=rows,
        source=source,
    )


# --- races -----------------------------------------------------------------------------------------------


def stale_shares(source: Recording) -> plots.Chart:
    """Draw which share of a buffer was still old when the host read it before the copy had ended.

    Parameters
    ----------
    source
        The recording `stale_shares`.
    """
    reads = source["reads"]
    middles = [(read["begin_us"] + read["end_us"]) / 2 for read in reads]
    fig, ax = plots.figure(height=3.0)
    ax.plot([0, source["copy_us"] / 1e3, max(middles) / 1e3], [100, 0, 0], "--", color=plots.GREY, zorder=1)
    ax.plot([m / 1e3 for m in middles], [100 * read["stale"] for read in reads], "o", color=plots.ORANGE)
    ax.annotate(
        "1 - time / the copy's own time",
        (source["copy_us"] / 2e3, 50),
        (8, 4),
        textcoords="offset points",
        color=plots.INK,
    )
    ax.set_xlabel("when the host read, ms after the call")
    ax.set_ylabel("old values read, %")
    ax.set_ylim(-4, 108)
    return plots.Chart(
        fig,
        caption=(
            "A copy to the host, read too early: the share of places that still held the old value. "
            "Behind an event the share is "
            f"{100 * source['after_event']:.0f} %."
        ),
        alt=(
            "Dots: share of stale values against the moment of reading. It falls in a straight line from "
            "everything to nothing over the time that the copy takes."
        ),
        header=("Read from", "Read until", "Old values", "Copy done by then"),
        rows=[
            (
                _us(read["begin_us"]),
                _us(read["end_us"]),
                f"{100 * read['stale']:.1f} %",
                "yes" if read["done"] else "no",
            )
            for read in reads
        ],
        source=source,
    )


def other_races(source: Recording) -> plots.Table:
    """List the share of wrong values of the other ways to misuse memory that a copy still needs.

    Parameters
    ----------
    source
        The recording `other_races`.
    """
    reused = "reused at once" if source["dropped_memory_reused_at_once"] else "not reused at once"
    rows = (
        ("pinned source overwritten while the copy is pending", source["overwritten"]),
        (f"pinned source dropped while the copy is pending ({reused})", source["dropped"]),
        ("device tensor freed while another stream reads it", source["other_stream"]),
        ("the same, after x.record_stream(side)", source["other_stream_told"]),
    )
    return plots.Table(
        ("What was done", "Wrong values"),
        tuple((text, f"{100 * share:.0f} %") for text, share in rows),
        caption="Values that arrived, compared with those that were sent",
        source=source,
    )


# --- the loader ------------------------------------------------------------------------------------------


def step_ms(compute_ms: float, load_ms: float, workers: int, cores: int, *, wait: bool = False) -> float:
    """Predict a step behind a loader: the slower of the two, and their sum where one process does both in turn.

    Parameters
    ----------
    compute_ms
        The device's time for a step.
    load_ms
        One worker's time for a batch.
    workers
        Worker processes; 0 loads in the training process itself.
    cores
        Processor cores: workers beyond them share.
    wait
        Whether the training process waits for each step before it asks for the next batch; it matters for
        ``workers=0`` alone.

    Examples
    --------
    >>> step_ms(39.3, 90.0, 2, 16), step_ms(39.3, 90.0, 4, 16), step_ms(39.0, 90.0, 0, 16, wait=True)
    (45.0, 39.3, 129.0)
    """
    if workers == 0 and wait:
        return compute_ms + load_ms
    return max(compute_ms, load_ms / max(1, min(workers, cores)))


def starving(source: Recording) -> plots.Chart:
    """Draw the step time against the number of workers, measured and by the rule of `step_ms`.

    Parameters
    ----------
    source
        The recording `starving_loader`.
    """
    runs = source["runs"]
    rule = [
        step_ms(source["compute_ms"], run["load_ms"], run["workers"], source["cores"], wait=run["wait"])
        for run in runs
    ]
    names = [f"{run['workers']}, waits" if run["wait"] else str(run["workers"]) for run in runs]
    fig, ax = plots.figure(height=3.0)
    places = range(len(runs))
    ax.bar(places, [run["step_ms"] for run in runs], width=0.6, color=plots.BLUE, alpha=0.8)
    ax.plot(places, rule, "_", color=plots.ORANGE, markersize=30, markeredgewidth=2.5)
    ax.axhline(source["compute_ms"], color=plots.GREY, linestyle="--")
    ax.annotate(
        f"device: {source['compute_ms']:.1f} ms",
        (len(runs) - 0.5, source["compute_ms"]),
        (0, 12),  # above the strokes of runs that keep up with the device
        textcoords="offset points",
        ha="right",
        color=plots.INK,
    )
    ax.set_xticks(places, labels=names)
    ax.set_xlabel("workers")
    ax.set_ylabel("step, ms")
    return plots.Chart(
        fig,
        caption=(
            "A step behind a loader that tokenizes. Bars are measured, orange strokes are "
            "max(compute, load / workers), and the sum where one process waits and loads in turn. A stroke takes "
            "the mean of all batches, a bar only the steps after the first few."
        ),
        alt=(
            "Bar chart: step time by number of workers, with the predicted value as a stroke. From one worker on "
            "it falls, until it reaches the device's own time."
        ),
        header=(
            "Workers",
            "A batch in its worker",
            "Predicted step",
            "Measured step",
            "Residual",
            "Device idle",
        ),
        rows=[
            (
                name,
                f"{run['load_ms']:.1f} ms",
                f"{predicted:.1f} ms",
                f"{run['step_ms']:.1f} ms",
                f"{100 * (run['step_ms'] / predicted - 1):+.1f} %",
                f"{100 * max(0.0, 1 - source['compute_ms'] / run['step_ms']):.0f} %",
            )
            for name, predicted, run in zip(names, rule, runs, strict=True)
        ],
        source=source,
    )


# --- at work ---------------------------------------------------------------------------------------------


def trace_rows(source: Recording) -> plots.Table:
    """List the copies and kernels of a profiler's trace, as Perfetto shows them in lanes.

    Parameters
    ----------
    source
        The recording `copies_in_a_trace`.
    """

    def rate(event: Mapping[str, Any]) -> str:
        if not event["bytes"] or not event["duration_us"]:
            return ""
        return _gb_s(event["bytes"] / event["duration_us"] / 1e3)

    return plots.Table(
        ("Name in the trace", "Stream", "Start", "Duration", "Bytes over duration"),
        tuple(
            (
                event["name"],
                "unavailable" if event["stream"] is None else str(event["stream"]),
                _us(event["start_us"]),
                _us(event["duration_us"]),
                rate(event),
            )
            for event in source["events"]
        ),
        caption="One call of work() on the device, in order of start",
        source=source,
    )


def absorbed(source: Recording) -> plots.Table:
    """List how many pageable copies one after another return before one has to wait.

    Parameters
    ----------
    source
        The recording `absorbed_copies`.
    """

    def told(count: int) -> str:
        return f"{count} or more" if count >= source["limit"] else str(count)

    return plots.Table(
        ("Size of each", "Returned before one was held, in each repeat"),
        tuple((_size(row["bytes"]), ", ".join(map(told, row["returned"]))) for row in source["rows"]),
        caption="Pageable copies with non_blocking=True behind pending work",
        source=source,
    )


def bound_workers(source: Recording) -> plots.Table:
    """List what a batch costs by the process that makes it and the processors it may use.

    Parameters
    ----------
    source
        The recording `bound_workers`; a way that could not be run there is None.
    """
    labels = {
        "here": "the training process itself",
        "one": "one worker",
        "free": "two workers, placed by the system",
        "apart": "two workers, each bound to a core of its own",
        "shared": "two workers, bound to the two halves of one core",
    }

    def told(loads_ms: Sequence[float] | None) -> str:
        if not loads_ms:
            return "unavailable"
        return f"{statistics.median(loads_ms):.0f} ms ({min(loads_ms):.0f} to {max(loads_ms):.0f})"

    return plots.Table(
        ("Where the batch is made", "Median, and range"),
        tuple((text, told(source[key])) for key, text in labels.items()),
        caption="One batch of 16,384 tokens, nothing else at work",
        source=source,
    )
