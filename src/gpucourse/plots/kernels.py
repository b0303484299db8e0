"""Charts of the chapter on kernels: what one launch is, what a trace holds, where a sweep has its steps.

A kernel here is what `gpucourse.kernels.trace` gives as plain data: a mapping with ``name``, ``op``, ``shapes``,
``start_us``, ``duration_us``, ``stream``, ``grid`` and ``block``; a trace is a mapping with ``kernels``, ``gaps``,
``span_us``, ``busy_us`` and ``launches``. Both come the same from a measurement and from a recording; one without
``gaps``, of an older version, is drawn without their causes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpucourse.plots import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, Chart, figure
from gpucourse.units import format_time_ms

if TYPE_CHECKING:
    from gpucourse.recording import Recording

__all__ = [
    "WARP",
    "durations",
    "families",
    "hierarchy",
    "idle_by_cause",
    "operation",
    "rows_sweep",
    "square_rates",
    "tile",
    "timeline",
    "warps",
    "waterfall",
    "wave_steps",
]

WARP = 32  # threads that take one instruction together; CUDA Programming Guide, "Warps and SIMT"

_FAMILIES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("product", BLUE, ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "addmv", "mv")),
    ("attention", PURPLE, ("attention",)),
    ("optimizer", GREEN, ("foreach", "fused_adam")),
    ("normalization", GREY, ("norm", "softmax")),
)
_REST = ("element-wise and reductions", ORANGE)


# Colour and stroke of an idle time by its cause, and what the cause says; the order is that of the lanes.
_CAUSES: dict[str, tuple[str, str, str]] = {
    "host": (ORANGE, "-", "host was late"),
    "synchronization": (PURPLE, "--", "host waited"),
    "copy": (GREEN, "-.", "host waited for a copy"),
    "queue": (GREY, ":", "between queued work"),
    "unknown": (GREY, ":", "cause unknown"),
}


def idle_by_cause(trace: Mapping[str, Any]) -> dict[str, tuple[int, float]]:
    """Count a trace's idle times and sum them in µs, by cause; only the causes that occur.

    >>> idle_by_cause({"gaps": [{"cause": "host", "duration_us": 4.0}, {"cause": "host", "duration_us": 2.5}]})
    {'host': (2, 6.5)}
    """
    found: dict[str, tuple[int, float]] = {}
    for gap in sorted(trace.get("gaps") or (), key=lambda gap: list(_CAUSES).index(gap["cause"])):
        count, total = found.get(gap["cause"], (0, 0.0))
        found[gap["cause"]] = (count + 1, total + float(gap["duration_us"]))
    return found


def operation(kernel: Mapping[str, Any]) -> str:
    """Name the operation that launched a kernel, without the namespace.

    >>> operation({"op": "aten::native_layer_norm", "name": "vectorized_layer_norm_kernel"})
    'native_layer_norm'
    >>> operation({"op": None, "name": "Memset (Device)"})
    'Memset (Device)'
    """
    return str(kernel.get("op") or kernel.get("name") or "unknown").removeprefix("aten::")


def families(kernel: Mapping[str, Any]) -> tuple[str, str]:
    """Sort a kernel into a kind of work by the operation that launched it; gives the kind and its colour.

    >>> families({"op": "aten::addmm"})[0], families({"op": "aten::_foreach_add_"})[0]
    ('product', 'optimizer')
    >>> families({"op": "aten::gelu"})[0]
    'element-wise and reductions'
    """
    name = operation(kernel)
    for family, colour, words in _FAMILIES:
        for word in words:
            # The products' names are short, so they match whole; the others are parts of longer names.
            if (family == "product" and name.strip("_") == word) or (family != "product" and word in name):
                return family, colour
    return _REST


def _size(extent: Sequence[int]) -> int:
    return math.prod(int(length) for length in extent)


def warps(block: Sequence[int]) -> int:
    """Count the warps of a block: its threads in groups of 32, the last one perhaps partly empty.

    Parameters
    ----------
    block
        Threads along x, y and z.

    Examples
    --------
    >>> warps((256, 1, 1)), warps((20, 5, 1))
    (8, 4)
    """
    return -(-_size(block) // WARP)


def _times(extent: Sequence[int]) -> str:
    """Write a grid or block as a product, without its trailing ones."""
    kept = [int(length) for length in extent]
    while len(kept) > 1 and kept[-1] == 1:
        kept.pop()
    return " × ".join(f"{length:,}" for length in kept)


def _short(kernel: Mapping[str, Any]) -> str:
    from gpucourse.kernels import short_name

    return str(short_name(str(kernel["name"])))


def _need_kernels(trace: Mapping[str, Any], what: str) -> list[Mapping[str, Any]]:
    kernels = list(trace["kernels"])
    if not kernels:
        raise ValueError(f"{what} needs a trace with kernels; this one has none: nothing was launched")
    return kernels


# --- one launch ------------------------------------------------------------------------------------------


def hierarchy(kernel: Mapping[str, Any], multiprocessors: int, *, source: Recording | None = None) -> Chart:
    """Draw what one launch is: a grid of blocks, dealt out to the multiprocessors, run in warps.

    Parameters
    ----------
    kernel
        A kernel of a trace; its ``grid`` (blocks) and ``block`` (threads) are drawn.
    multiprocessors
        How many the device has.
    source
        The recording that the kernel comes from.

    Raises
    ------
    ValueError
        The kernel has no grid or block (a copy or a fill by the copy engine has none).

    Examples
    --------
    >>> hierarchy({"name": "add", "op": "aten::add", "grid": (6, 1, 1), "block": (128, 1, 1)}, 4).rows[2]
    ('blocks', '6', '6')
    """
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    if not kernel.get("grid") or not kernel.get("block"):
        raise ValueError(f"{kernel.get('name')!r} has no grid or block: it is no kernel but a copy or a fill")
    if multiprocessors < 1:
        raise ValueError(f"a device has at least one multiprocessor, found {multiprocessors}")
    grid, block = kernel["grid"], kernel["block"]
    blocks, threads = _size(grid), _size(block)
    in_block = warps(block)
    fig, ax = figure(5.8, 5.0)
    ax.set_axis_off()
    ax.set_xlim(0, 100)
    ax.set_ylim(0, 100)

    def tiles(count: int, left: float, top: float, width: float, height: float, colour: str) -> None:
        """Fill a box with at most 1,000 equal cells, the first of them in orange."""
        drawn = min(count, 1000)
        # One line for the few cells of a block or a warp, a box for the many of a grid.
        columns = drawn if drawn <= 32 else math.ceil(math.sqrt(drawn * width / height))
        lines = math.ceil(drawn / columns)
        step_x, step_y = width / columns, min(height / lines, 5.0)
        cells = [
            Rectangle(
                (left + step_x * (index % columns), top - step_y * (index // columns + 1)),
                step_x * 0.8,
                step_y * 0.8,
            )
            for index in range(drawn)
        ]
        ax.add_collection(PatchCollection(cells[1:], facecolor=colour, edgecolor="none", alpha=0.75))
        ax.add_collection(PatchCollection(cells[:1], facecolor=ORANGE, edgecolor=INK, linewidth=0.6))

    def label(height: float, title: str, text: str) -> None:
        ax.text(0, height, title, weight="bold", va="top", ha="left", color=INK)
        ax.text(0, height - 4.6, text, va="top", ha="left", fontsize=8.5, linespacing=1.35, color=INK)

    def down(top: float, bottom: float) -> None:
        ax.annotate(
            "", (40, bottom), (40, top), arrowprops={"arrowstyle": "->", "color": ORANGE, "linewidth": 1.2}
        )

    # The device deals them out as places come free, so this is an even share and no promise.
    share = -(-blocks // multiprocessors)
    label(100, "one launch", f"{operation(kernel)} queues\none kernel")
    ax.text(35, 95, _short(kernel), va="center", ha="left", family="monospace", fontsize=9.5, color=INK)
    down(91, 85)
    label(
        83,
        "a grid",
        f"{_times(grid)}\n= {blocks:,} blocks" if len(_times(grid)) < 24 else f"{blocks:,} blocks",
    )
    tiles(blocks, 35, 83, 65, 17, BLUE)
    if blocks > 1000:
        ax.text(100, 64, f"1,000 of {blocks:,} drawn", ha="right", va="top", fontsize=7.5, color=INK)
    down(63, 57)
    label(
        55,
        "the device",
        f"{multiprocessors} multiprocessors,\nabout {share:,} block{'s' * (share > 1)} each",
    )
    tiles(multiprocessors, 35, 55, 65, 16, PURPLE)
    down(36, 30)
    label(28, "a block", f"{_times(block)} threads\n= {in_block} warp{'s' * (in_block > 1)}")
    tiles(in_block, 35, 28, 65, 5, GREEN)
    down(20, 14)
    label(12, "a warp", f"{WARP} threads, one\ninstruction at a time")
    tiles(WARP, 35, 12, 65, 5, GREY)
    rows = [
        ("launches", "1", "1"),
        ("kernel", _short(kernel), "1"),
        ("blocks", _times(grid), f"{blocks:,}"),
        ("multiprocessors", f"{multiprocessors}", f"{multiprocessors}"),
        ("blocks a multiprocessor, dealt evenly", f"⌈{blocks:,} / {multiprocessors}⌉", f"{share:,}"),
        ("threads a block", _times(block), f"{threads:,}"),
        ("warps a block", f"⌈{threads:,} / {WARP}⌉", f"{in_block}"),
        ("threads in the launch", f"{blocks:,} × {threads:,}", f"{blocks * threads:,}"),
    ]
    return Chart(
        fig,
        caption=(
            f"One launch, with the numbers of a real kernel: {blocks:,} blocks for {multiprocessors} "
            f"multiprocessors, {in_block} warps a block. "
            "Orange: one block, the multiprocessor that takes it, one of its warps, one thread."
        ),
        alt=(
            f"A diagram of five layers from top to bottom: one launch of {operation(kernel)}; a grid of {blocks:,} "
            f"blocks; {multiprocessors} multiprocessors that take about {share:,} blocks each; a block of "
            f"{threads:,} threads in {in_block} warps; a warp of {WARP} threads."
        ),
        header=("Layer", "How it is made up", "Number"),
        rows=rows,
        source=source,
    )


# --- a trace ---------------------------------------------------------------------------------------------


def _kernel_rows(kernels: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    start = min(float(kernel["start_us"]) for kernel in kernels)
    return [
        (
            f"{place}",
            operation(kernel),
            _short(kernel),
            f"{float(kernel['start_us']) - start:,.1f}",
            f"{float(kernel['duration_us']):,.1f}",
            _times(kernel["grid"]) if kernel.get("grid") else "none",
            _times(kernel["block"]) if kernel.get("block") else "none",
        )
        for place, kernel in enumerate(kernels, start=1)
    ]


def _idle_rows(trace: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            "",
            f"idle, {_CAUSES[cause][2]}",
            f"{count} gap{'s' * (count > 1)}",
            "",
            f"{total:,.1f}",
            "none",
            "none",
        )
        for cause, (count, total) in idle_by_cause(trace).items()
    ]


def _idle_text(trace: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{_CAUSES[cause][2]} {total:,.1f} µs" for cause, (_, total) in idle_by_cause(trace).items()
    )


_KERNEL_HEADER = ("", "Operation", "Kernel", "Start, µs", "Duration, µs", "Grid, blocks", "Block, threads")


def waterfall(
    traces: Mapping[str, Mapping[str, Any]], *, caption: str, source: Recording | None = None
) -> Chart:
    """Draw each kernel of one or two short traces on a line of its own, against time.

    Parameters
    ----------
    traces
        A trace under each title; all share one time axis that starts at each one's first kernel. A thin line leads
        over each idle time to the kernel that ended it; its stroke says the cause, which the line under the title sums.
    caption
        What the reader should see.
    source
        The recording that the traces come from.

    Raises
    ------
    ValueError
        A trace without kernels.
    """
    listed = {title: _need_kernels(trace, "a waterfall") for title, trace in traces.items()}
    lines = [len(kernels) for kernels in listed.values()]
    height = 0.8 + sum(0.19 * count + 0.45 for count in lines)
    fig, axes = figure(
        5.8,
        height,
        nrows=len(listed),
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": [n + 0.6 for n in lines]},
    )
    rows: list[tuple[str, ...]] = []
    longest = max(
        float(k["start_us"]) + float(k["duration_us"]) - min(float(j["start_us"]) for j in kernels)
        for kernels in listed.values()
        for k in kernels
    )
    for (title, kernels), ax in zip(listed.items(), axes[:, 0], strict=True):
        start = min(float(kernel["start_us"]) for kernel in kernels)
        for place, kernel in enumerate(kernels):
            left, length = float(kernel["start_us"]) - start, float(kernel["duration_us"])
            # A kernel far shorter than the picture would vanish: give it the width of a hair.
            ax.barh(place, max(length, longest * 0.002), left=left, height=0.75, color=families(kernel)[1])
            ax.annotate(
                f"{length:,.1f}",
                (left + length, place),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=INK,
            )
        ax.set_xlim(0, longest * 1.1)
        ax.set_yticks(range(len(kernels)), [operation(kernel) for kernel in kernels])
        ax.set_ylim(len(kernels) - 0.4, -0.6)
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        for gap in traces[title].get("gaps") or ():
            colour, stroke, _ = _CAUSES[gap["cause"]]
            left, place = float(gap["start_us"]) - start, int(gap["after"])
            ends = (left, left + float(gap["duration_us"]))
            ax.plot(ends, (place, place), linestyle=stroke, color=colour, linewidth=1.0)
        idle = _idle_text(traces[title])
        ax.set_title(title, loc="left", fontsize=10.5, color=INK, pad=15 if idle else 6)
        if idle:
            ax.annotate(
                f"idle: {idle}",
                (0, 1),
                xycoords="axes fraction",
                xytext=(0, 4),
                textcoords="offset points",
                fontsize=8,
                color=INK,
            )
        rows += [(f"{title}, {row[0]}", *row[1:]) for row in _kernel_rows(kernels)]
        rows += [(title, *row[1:]) for row in _idle_rows(traces[title])]
    axes[-1, 0].set_xlabel("µs since the first kernel began; the numbers are durations")
    counts = "; ".join(
        f"{title}: {len(kernels)} kernels, span {float(traces[title]['span_us']):,.1f} µs, "
        f"busy {float(traces[title]['busy_us']):,.1f} µs"
        f"{', idle: ' if traces[title].get('gaps') else ''}{_idle_text(traces[title])}"
        for title, kernels in listed.items()
    )
    return Chart(
        fig,
        caption=caption,
        alt=f"Bars of kernels against time, one line a kernel. {counts}.",
        header=_KERNEL_HEADER,
        rows=rows,
        source=source,
    )


def timeline(trace: Mapping[str, Any], *, caption: str, source: Recording | None = None) -> Chart:
    """Draw a long trace as lanes by kind of work against time, and the idle times as lanes by cause.

    Parameters
    ----------
    trace
        One trace.
    caption
        What the reader should see.
    source
        The recording that it comes from.

    Raises
    ------
    ValueError
        A trace without kernels.
    """
    kernels = _need_kernels(trace, "a timeline")
    start = min(float(kernel["start_us"]) for kernel in kernels)
    span = max(float(k["start_us"]) + float(k["duration_us"]) for k in kernels) - start
    unit, scale = ("ms", 1e-3) if span > 3000 else ("µs", 1.0)
    lanes = {families(kernel)[0] for kernel in kernels}
    order = [name for name in [f[0] for f in _FAMILIES] + [_REST[0]] if name in lanes]
    idle = {cause: f"idle: {_CAUSES[cause][2]}" for cause in idle_by_cause(trace)}
    fig, ax = figure(5.8, 1.0 + 0.42 * (len(order) + 1 + len(idle)))
    places = {name: index for index, name in enumerate(["any kernel", *order, *idle.values()])}
    for kernel in kernels:
        family, colour = families(kernel)
        left, length = (float(kernel["start_us"]) - start) * scale, float(kernel["duration_us"]) * scale
        # No edge: it would widen a short kernel into a gap. A hair keeps it visible.
        for lane, shade in (("any kernel", INK), (family, colour)):
            ax.barh(
                places[lane],
                max(length, span * scale * 5e-4),
                left=left,
                height=0.7,
                color=shade,
                linewidth=0,
            )
    for gap in trace.get("gaps") or ():
        ax.barh(
            places[idle[gap["cause"]]],
            max(float(gap["duration_us"]) * scale, span * scale * 5e-4),
            left=(float(gap["start_us"]) - start) * scale,
            height=0.35,
            color=_CAUSES[gap["cause"]][0],
            linewidth=0,
        )
    ax.set_yticks(list(places.values()), list(places))
    ax.set_ylim(len(places) - 0.5, -0.5)
    ax.set_xlim(0, span * scale * 1.01)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(f"time since the first kernel began, {unit}")
    busy, whole = float(trace["busy_us"]), float(trace["span_us"])
    return Chart(
        fig,
        caption=caption,
        alt=(
            f"A timeline of {len(kernels)} kernels over {format_time_ms(whole / 1e3)}, busy for "
            f"{format_time_ms(busy / 1e3)}, with a lane for each of: {', '.join(order)}."
            + (f" Idle: {_idle_text(trace)}." if idle else "")
        ),
        header=_KERNEL_HEADER,
        rows=[*_kernel_rows(kernels), *_idle_rows(trace)],
        source=source,
    )


def durations(
    trace: Mapping[str, Any], *, caption: str, most: int = 12, source: Recording | None = None
) -> Chart:
    """Draw where a trace's kernel time goes, summed by the operation that launched the kernels.

    Parameters
    ----------
    trace
        One trace.
    caption
        What the reader should see.
    most
        How many operations get a bar of their own; the rest are summed.
    source
        The recording that it comes from.

    Raises
    ------
    ValueError
        A trace without kernels.
    """
    kernels = _need_kernels(trace, "a bar chart")
    found: dict[str, list[Mapping[str, Any]]] = {}
    for kernel in kernels:
        found.setdefault(operation(kernel), []).append(kernel)
    sums = {name: sum(float(k["duration_us"]) for k in group) for name, group in found.items()}
    ranked = sorted(sums, key=lambda name: -sums[name])
    total = sum(sums.values())
    bars = [(name, sums[name], len(found[name]), families(found[name][0])[1]) for name in ranked[:most]]
    if rest := ranked[most:]:
        count = sum(len(found[name]) for name in rest)
        bars.append((f"{len(rest)} others", sum(sums[name] for name in rest), count, _REST[1]))
    fig, ax = figure(5.8, 0.8 + 0.25 * len(bars))
    for place, (_, time_us, count, colour) in enumerate(bars):
        ax.barh(place, time_us, height=0.72, color=colour)
        text = f"{time_us:,.0f} µs in {count} kernel{'s' * (count > 1)}"
        ax.annotate(
            text,
            (time_us, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
        )
    ax.set_yticks(range(len(bars)), [name for name, *_ in bars])
    ax.set_ylim(len(bars) - 0.4, -0.6)
    ax.set_xlim(0, bars[0][1] * 1.5)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("device time, µs")
    rows = [
        (name, f"{len(found[name])}", f"{sums[name]:,.1f}", f"{100 * sums[name] / total:.1f}")
        for name in ranked
    ]
    return Chart(
        fig,
        caption=caption,
        alt=(
            f"Bars of device time by operation. The longest is {ranked[0]} with {sums[ranked[0]]:,.0f} µs, "
            f"{100 * sums[ranked[0]] / total:.0f} percent of {total:,.0f} µs in {len(kernels)} kernels."
        ),
        header=("Operation", "Kernels", "Device time, µs", "Share, %"),
        rows=rows,
        source=source,
    )


# --- the sweeps ------------------------------------------------------------------------------------------


def _logarithmic(ax: Any) -> None:
    """Set both axes to logarithmic with plain numbers: powers of 2 along x, of 10 along y."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
        )
        axis.set_minor_formatter(NullFormatter())


def rows_sweep(
    sweep: Sequence[Mapping[str, float]],
    product_busy_us: float,
    *,
    product: str,
    caption: str,
    source: Recording | None = None,
) -> Chart:
    """Draw what a chain of kernels takes on the device and what its caller waits for, against its rows.

    Parameters
    ----------
    sweep
        ``rows``, ``launches``, ``busy_us``, ``elapsed_us`` (unprofiled) and ``traced_span_us`` of each chain, by
        rising rows.
    product_busy_us
        Device time of one large product, drawn as a level to compare with.
    product
        What that product is: "one 2048-wide product".
    caption
        What the reader should see.
    source
        The recording that it comes from.

    Raises
    ------
    ValueError
        The sweep has no point.
    """
    if not sweep:
        raise ValueError("a sweep needs at least one point, found none")
    rows = [point["rows"] for point in sweep]
    fig, ax = figure(5.8, 3.2)
    for key, name, colour, lift in (
        ("elapsed_us", "elapsed", ORANGE, -16),
        ("busy_us", "kernels busy", BLUE, 9),
    ):
        values = [point[key] for point in sweep]
        ax.plot(rows, values, marker="o", color=colour)
        beside = values[:4]  # the name is as long as four points: above all of them, or below
        height = max(beside) if lift > 0 else min(beside)
        ax.annotate(
            name, (rows[0], height), xytext=(0, lift), textcoords="offset points", color=colour, ha="left"
        )
    ax.axhline(product_busy_us, color=GREY, linewidth=1.2, linestyle=(0, (5, 3)))
    ax.annotate(product, (rows[0], product_busy_us), xytext=(0, 4), textcoords="offset points", color=GREY)
    _logarithmic(ax)
    ax.set_xlabel("rows of 768 floats")
    ax.set_ylabel("µs")
    ax.grid(True, axis="y")
    first, last = sweep[0], sweep[-1]
    return Chart(
        fig,
        caption=caption,
        alt=(
            f"Two curves on logarithmic axes against rows. At {first['rows']:,} rows {first['elapsed_us']:,.0f} µs "
            f"elapse and kernels are busy for {first['busy_us']:,.0f} µs; at {last['rows']:,} rows "
            f"{last['elapsed_us']:,.0f} and {last['busy_us']:,.0f} µs. "
            f"A level line at {product_busy_us:,.0f} µs: {product}."
        ),
        header=(
            "Rows",
            "Launches",
            "Kernels busy, µs",
            "Elapsed, µs",
            "Busy share, %",
            "Span in the profiler, µs",
        ),
        rows=[
            (
                f"{p['rows']:,}",
                f"{p['launches']}",
                f"{p['busy_us']:,.1f}",
                f"{p['elapsed_us']:,.1f}",
                f"{100 * p['busy_us'] / p['elapsed_us']:.0f}",
                f"{p['traced_span_us']:,.1f}",
            )
            for p in sweep
        ],
        source=source,
    )


def wave_steps(
    predicted: Sequence[Mapping[str, Any]],
    measured: Sequence[Mapping[str, Any]],
    *,
    caption: str,
    source: Recording | None = None,
) -> Chart:
    """Draw a product's measured time against its rows, over the steps that whole waves of blocks predict.

    Parameters
    ----------
    predicted
        ``rows``, ``kernel``, ``blocks``, ``slots`` (blocks that the device holds at once), ``waves``,
        ``predicted_us`` and ``time_us`` of each product that has a prediction, by rising rows.
    measured
        ``rows``, ``kernel``, ``blocks`` and ``time_us`` of every product; those without a prediction are grey.
    caption
        What the reader should see.
    source
        The recording that it comes from.

    Raises
    ------
    ValueError
        There is nothing measured to draw.
    """
    if not measured:
        raise ValueError("a staircase needs at least one measured product, found none")
    by_rows = {point["rows"]: point for point in predicted}
    names = [str(point["kernel"]) for point in predicted]
    ranked = sorted(set(names), key=lambda name: -names.count(name))
    colours = {name: (BLUE, GREEN, PURPLE, INK)[min(place, 3)] for place, name in enumerate(ranked)}
    fig, ax = figure(5.8, 3.8)
    others = [point for point in measured if point["rows"] not in by_rows]
    ax.plot([p["rows"] for p in others], [p["time_us"] for p in others], ".", color=GREY, markersize=4)
    # One piece of staircase for each stretch in which one kernel serves all rows.
    stretch: list[Mapping[str, Any]] = []
    for point in [*measured, None]:
        mine = by_rows.get(point["rows"]) if point else None
        if stretch and (mine is None or mine["kernel"] != stretch[-1]["kernel"]):
            rows = [p["rows"] for p in stretch]
            half = (measured[1]["rows"] - measured[0]["rows"]) / 2 if len(measured) > 1 else 0.5
            edges = [rows[0] - half, *rows, rows[-1] + half]
            levels = [p["predicted_us"] for p in stretch]
            ax.step(
                edges, [levels[0], *levels, levels[-1]], where="mid", color=ORANGE, linewidth=3.0, alpha=0.8
            )
            stretch = []
        if mine is not None:
            stretch.append(mine)
    for name in ranked:
        group = [point for point in predicted if point["kernel"] == name]
        ax.plot(
            [p["rows"] for p in group],
            [p["time_us"] for p in group],
            ".",
            color=colours[name],
            markersize=4.5,
        )
    # Neighbouring points belong to different kernels, so names stand apart, in the colours of what they name.
    notes = [(f"measured, {tile(name)}", colours[name]) for name in ranked[:4]]
    notes += [("measured, sum split: no prediction", GREY)] if others else []
    notes += [("predicted, whole waves", ORANGE)] if predicted else []
    for place, (text, colour) in enumerate(notes):
        ax.text(0.02, 0.97 - 0.07 * place, text, transform=ax.transAxes, color=colour, va="top", fontsize=9)
    ax.set_xlabel("rows of the product")
    ax.set_ylabel("device time, µs")
    ax.set_xlim(0)
    ax.set_ylim(0)
    errors = sorted(abs(p["time_us"] / p["predicted_us"] - 1) for p in predicted)
    distance = f"; the median distance is {100 * errors[len(errors) // 2]:.1f} percent" if errors else ""
    return Chart(
        fig,
        caption=caption,
        alt=(
            f"Device time against rows: {len(measured)} points that rise in steps, with a predicted staircase "
            f"through {len(predicted)} of them{distance}."
        ),
        header=("Rows", "Kernel", "Blocks", "Blocks held at once", "Waves", "Predicted, µs", "Measured, µs"),
        rows=[
            (
                f"{p['rows']:,}",
                tile(str(p["kernel"])),
                f"{p['blocks']:,}",
                *(
                    (f"{q['slots']:,}", f"{q['waves']}", f"{q['predicted_us']:,.1f}")
                    if (q := by_rows.get(p["rows"]))
                    else ("none", "none", "none")
                ),
                f"{p['time_us']:,.1f}",
            )
            for p in measured
        ],
        source=source,
    )


def tile(kernel: str) -> str:
    """Name a product's kernel by its tile, where its name says it.

    >>> tile("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4")
    'xmma, tile 64 × 64'
    >>> tile("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(Params)")
    'cutlass, tile 256 × 128'
    """
    found = re.search(r"(xmma|cutlass|ampere|volta|turing)\w*?(?:tilesize|gemm_|mma_)(\d+)x(\d+)", kernel)
    if found is None:
        from gpucourse.kernels import short_name

        return str(short_name(kernel))
    return f"{found[1]}, tile {found[2]} × {found[3]}"


def square_rates(
    sweep: Mapping[str, Sequence[Mapping[str, Any]]],
    peaks: Mapping[str, float] | None = None,
    *,
    caption: str,
    source: Recording | None = None,
) -> Chart:
    """Draw the arithmetic rate of square products against their width, one curve a dtype.

    Parameters
    ----------
    sweep
        Under each dtype's name: ``width``, ``median_ms``, ``kernels`` and ``fills`` of each product, by rising width.
    peaks
        Datasheet peak in flop/s under the same names, drawn as a level; None where no datasheet is at hand.
    caption
        What the reader should see.
    source
        The recording that it comes from.
    """
    fig, ax = figure(5.8, 3.4)
    rows = []
    ends = []
    for (dtype, points), colour in zip(sweep.items(), (BLUE, ORANGE, GREEN, PURPLE), strict=False):
        widths = [float(point["width"]) for point in points]
        rates = [2 * float(p["width"]) ** 3 / (float(p["median_ms"]) * 1e-3) for p in points]
        ax.plot(widths, [rate / 1e12 for rate in rates], marker="o", color=colour)
        ax.annotate(
            dtype,
            (widths[-1], rates[-1] / 1e12),
            xytext=(-4, -14),
            textcoords="offset points",
            color=colour,
            ha="right",
        )
        peak = (peaks or {}).get(dtype)
        if peak:
            ax.axhline(peak / 1e12, color=colour, linewidth=1.0, linestyle=(0, (5, 3)))
            ax.annotate(
                f"{dtype} peak, datasheet", (widths[-1], peak / 1e12),
                xytext=(0, 3),
                textcoords="offset points",
                color=colour,
                fontsize=8.5,
                ha="right",
            )  # fmt: skip
        for place, (point, rate) in enumerate(zip(points, rates, strict=True)):
            half = next((q for q in points[:place] if 2 * q["width"] == point["width"]), None)
            ratio = f"{float(point['median_ms']) / float(half['median_ms']):.2f}" if half else "none"
            share = f"{100 * rate / peak:.0f}" if peak else "unavailable"
            rows.append(
                (
                    f"{dtype}, {point['width']:,}",
                    f"{point['kernels']} + {point['fills']}",
                    f"{float(point['median_ms']) * 1e3:,.1f}",
                    ratio,
                    f"{rate / 1e12:,.1f}",
                    share,
                )
            )
        ends.append(f"{dtype} from {rates[0] / 1e12:,.1f} to {rates[-1] / 1e12:,.1f} TFLOP/s")
    _logarithmic(ax)
    ax.set_xlabel("width of the square product")
    ax.set_ylabel("TFLOP/s")
    ax.grid(True, axis="y")
    return Chart(
        fig,
        caption=caption,
        alt=f"Curves of arithmetic rate against width on logarithmic axes: {'; '.join(ends)}.",
        header=(
            "dtype, width",
            "Launches",
            "Device time, µs",
            "Time over half the width",
            "TFLOP/s",
            "Of peak, %",
        ),
        rows=rows,
        source=source,
    )
