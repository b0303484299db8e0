"""Charts and tables of the chapter "The roofline bound": measured ceilings, kernels under them, a step's budget."""

from __future__ import annotations

import math
import statistics
import string
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpucourse import hardware, plots
from gpucourse.roof_points import RoofPoint
from gpucourse.roofline import Roofline, Work
from gpucourse.units import format_bytes

if TYPE_CHECKING:
    from gpucourse.recording import Recording

__all__ = [
    "beside_peers",
    "budgets",
    "ceilings",
    "losses",
    "on_the_roof",
    "products",
    "shares",
    "streams",
    "under_load",
]

_COLOURS = {"fp32": plots.GREEN, "tf32": plots.PURPLE, "bf16": plots.BLUE, "fp16": plots.BLUE}
_PALETTE = (plots.BLUE, plots.GREEN, plots.ORANGE, plots.PURPLE, "#a8830f")
_FADED = 0.3
_LETTERS = string.ascii_lowercase + string.ascii_uppercase


def _unavailable(source: Recording) -> str:
    return f"unavailable for {source.provenance.get('gpu')}"


def _datasheet(source: Recording, precision: str) -> Roofline | None:
    """Give the datasheet's roof for the GPU that measured; None where a figure is missing."""
    record = hardware.find(str(source.provenance.get("gpu")))
    if record is None:
        return None
    try:
        return Roofline.of(record, precision)
    except hardware.MissingFigureError:
        return None


def _shape(sizes: Sequence[int]) -> str:
    """Write a shape so that it does not break over two lines.

    >>> _shape((4096, 4096, 4096)), _shape((8192, 768))
    ('4,096³', '8,192×768')
    """
    if len(sizes) == 3 and len(set(sizes)) == 1:
        return f"{sizes[0]:,}³"
    return "×".join(f"{size:,}" for size in sizes)


def _range(values: Sequence[float]) -> str:
    return f"{_rate(min(values))} to {_rate(max(values))}"


def _rate(value: float) -> str:
    """Write a rate with three digits at the least, or neighbours in fp32 would look alike.

    >>> _rate(51.347), _rate(823.6), _rate(4304.5)
    ('51.3', '824', '4,304')
    """
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


# --- the ceilings -----------------------------------------------------------------------------------------


def streams(source: Recording) -> plots.Chart:
    """Draw the rate of each kind of stream with the range of its samples.

    Parameters
    ----------
    source
        The recording `plain_streams`: by name, the arrays read and written, the bytes, and the samples in ms.

    Returns
    -------
    Chart
        One row a kind, and the datasheet's bandwidth where the GPU has a record.
    """
    kinds: Mapping[str, Any] = source["kinds"]
    record = hardware.find(str(source.provenance.get("gpu")))
    limit = None if record is None else record.bandwidth_bytes_per_s / 1e9
    fig, ax = plots.figure(height=0.9 + 0.36 * len(kinds))
    rows = []
    for y, (name, kind) in enumerate(kinds.items()):
        rates = [kind["bytes"] / ms / 1e6 for ms in kind["samples_ms"]]
        middle = statistics.median(rates)
        ax.plot([min(rates) / 1e3, max(rates) / 1e3], [y, y], color=plots.BLUE, linewidth=5, alpha=_FADED)
        ax.plot(middle / 1e3, y, "o", color=plots.BLUE)
        share = _unavailable(source) if limit is None else f"{middle / limit:.1%}"
        rows.append(
            (
                name,
                kind["call"],
                kind["reads"],
                kind["writes"],
                f"{middle:,.0f}",
                _range(rates),
                share,
            )
        )
    if limit is not None:
        ax.axvline(limit / 1e3, color=plots.GREY, linestyle="--")
        ax.annotate(
            f"datasheet, {limit / 1e3:.2f}",
            (limit / 1e3, 0.02),
            (-4, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right",
            color=plots.INK,
        )
    ax.set_yticks(range(len(kinds)), labels=list(kinds))
    ax.set_ylim(len(kinds) - 0.4, -0.6)
    ax.margins(x=0.08)
    ax.set_xlabel("bytes / time, TB/s (bar: all samples, dot: median)")
    return plots.Chart(
        fig,
        caption=f"Kinds of stream over arrays of {format_bytes(source['array_bytes'])} each, in turn.",
        alt="Dot chart of terabytes a second. "
        + "; ".join(f"{row[0]}: {row[4]} gigabytes a second" for row in rows),
        header=("Stream", "Call", "Arrays read", "Written", "GB/s", "Samples, GB/s", "Of the datasheet"),
        rows=rows,
        source=source,
    )


def products(source: Recording) -> plots.Table:
    """Tabulate the products that were tried for the arithmetic ceiling, random data against zeros.

    Parameters
    ----------
    source
        The recording `plain_products`: by precision, a list of shapes with samples in TFLOP/s for each filling.

    Returns
    -------
    Table
        One row a precision and shape.
    """
    rows = []
    for precision, shapes in source["rates"].items():
        roof = _datasheet(source, precision)
        short = hardware.PRECISION_OF_DTYPE.get(precision.removeprefix("torch."), precision)
        for row in shapes:
            random, zeros = (statistics.median(row[filling]) for filling in ("random", "zeros"))
            share = "–" if roof is None else f"{random * 1e12 / roof.peak_flops:.0%}"
            rows.append(
                (
                    short,
                    _shape((row["m"], row["n"], row["k"])),
                    _rate(random),
                    _range(row["random"]),
                    share,
                    _rate(zeros),
                )
            )
    header = ("Precision", "m × n × k", "TFLOP/s", "Samples", "Of the datasheet", "With zeros")
    return plots.Table(
        header,
        tuple(rows),
        caption="Products in short bursts with pauses; random numbers, and zeros",
        source=source,
    )


def under_load(source: Recording) -> plots.Chart:
    """Draw the rate of one product and the clock against the time under load, random numbers and zeros.

    Parameters
    ----------
    source
        The recording `clock_curve`: for "random" and "zeros" a list of [s, TFLOP/s, MHz].

    Returns
    -------
    Chart
        Two panels over one axis of time.
    """
    fig, axes = plots.figure(height=4.2, nrows=2, sharex=True)
    rows = []
    last: dict[str, tuple[float, float]] = {}
    for filling, colour in (("zeros", plots.ORANGE), ("random", plots.BLUE)):
        seconds, rates, clocks = zip(*source[filling], strict=True)
        for ax, values in ((axes[0], rates), (axes[1], clocks)):
            ax.plot(seconds, values, "-", color=colour, linewidth=1.4)
        at = len(seconds) // 2
        axes[0].annotate(
            filling if filling == "zeros" else "random numbers",
            (seconds[at], rates[at]),
            (0, 6),
            textcoords="offset points",
            color=colour,
        )
        thinned = source[filling][:: max(1, len(seconds) // 20)]  # a table to read, not all of the samples
        rows += [(filling, f"{s:.2f}", f"{rate:,.0f}", f"{mhz:,.0f}") for s, rate, mhz in thinned]
        last[filling] = (rates[-1], clocks[-1])
    axes[0].set_ylabel("TFLOP/s")
    axes[1].set_ylabel("clock, MHz")
    axes[1].set_xlabel("seconds under load")
    for ax in axes:
        ax.set_ylim(bottom=0)
    shape = source["width"]
    return plots.Chart(
        fig,
        caption=f"One {source['dtype']} product, {shape:,} wide, again and again: rate and clock by the second.",
        alt=(
            f"Two line charts over seconds under load. With random numbers the rate begins at "
            f"{source['random'][0][1]:,.0f} teraflops a second and ends at {last['random'][0]:,.0f}, the clock goes "
            f"from {source['random'][0][2]:,.0f} to {last['random'][1]:,.0f} megahertz. With zeros they end at "
            f"{last['zeros'][0]:,.0f} and {last['zeros'][1]:,.0f}."
        ),
        header=("Data", "Seconds", "TFLOP/s", "MHz"),
        rows=rows,
        source=source,
    )


def ceilings(burst: Recording, sustained: Mapping[str, Any]) -> plots.Table:
    """Tabulate the measured ceilings beside the datasheet's, burst and sustained.

    Parameters
    ----------
    burst
        The recording `roofline_burst`.
    sustained
        By precision: what was reached at the end of a long load; None or absent where that was not measured.

    Returns
    -------
    Table
        Two rows a precision that was measured, one a load.
    """
    rows = []
    for precision, roof in burst["roofs"].items():
        if roof is None:
            continue
        sheet = (roof.get("datasheet") or {}).get("tflops")
        for load, found in (("burst", roof["burst"]), ("sustained", sustained.get(precision))):
            rows.append((precision, load, *_ceiling(found, sheet)))
    return plots.Table(
        ("Precision", "Load", "TFLOP/s (middle half)", "Of the datasheet", "m × n × k"),
        tuple(rows),
        caption="Arithmetic ceilings, and the shapes that reached them; ᵀ: the second matrix stored transposed",
        source=burst,
    )


def _ceiling(found: Mapping[str, Any] | None, sheet: float | None) -> tuple[str, str, str]:
    """Give the rate in TFLOP/s with the middle half of its samples, its share of the datasheet's, and its shape."""
    if found is None:
        return "not measured", "", ""
    return (
        f"{_rate(found['tflops'])}\N{NO-BREAK SPACE}({_rate(found['low_tflops'])}–{_rate(found['high_tflops'])})",
        "unavailable" if sheet is None else f"{found['tflops'] / sheet:.0%} of {sheet:,.4g}",
        _shape(found["shape"]) + ("ᵀ" if "transposed" in found["what"] else ""),
    )


def beside_peers(burst: Recording, hot: Mapping[str, Any]) -> plots.Table:
    """Tabulate our best product beside those of the peers' sweeps, round by round and turn by turn.

    Parameters
    ----------
    burst
        The recording `roofline_burst`.
    hot
        By precision, what `roofline_sustained_full` and `roofline_sustained_half` hold of it; one that is absent
        was not kept under load.

    Returns
    -------
    Table
        One row a precision, all rates in TFLOP/s.
    """
    rows = []
    for precision, rounds in burst["peers"].items():
        best = burst["roofs"][precision]["burst"]
        sweeps = [[row["peers"][name]["tflops"] for row in rounds] for name in ("event_loop", "do_bench")]
        turns = hot[precision]["turns"] if precision in hot else ()
        rows.append(
            (
                precision,
                f"{best['tflops']:,.1f} ({best['low_tflops']:,.1f} to {best['high_tflops']:,.1f})",
                *(_in_turn(rates) for rates in sweeps),
                _in_turn([turn["ours_tflops"] for turn in turns]),
                _in_turn([max(turn["peer_tflops"].values(), default=None) for turn in turns]),
            )
        )
    header = (
        "Precision",
        "Ours (middle half)",
        "Event pairs",
        "do_bench",
        "Ours, hot",
        "Event pairs, hot",
    )
    return plots.Table(
        header,
        tuple(rows),
        caption="The best product in TFLOP/s, ours and by two usual sweeps: bursts by round, hot by turn",
        source=burst,
    )


def _in_turn(rates: Sequence[float | None]) -> str:
    return "; ".join("–" if rate is None else f"{rate:,.1f}" for rate in rates) or "not measured"


# --- kernels under the roof -------------------------------------------------------------------------------


def on_the_roof(source: Recording, roofs: Mapping[str, Roofline]) -> plots.Chart:
    """Draw measured kernels under the measured roofs, with the range of their samples.

    Parameters
    ----------
    source
        The recording `kernels_on_the_roof`: ``l2_bytes`` and a list of ``points``, each with name, precision,
        flops, bytes and a timing. One with ``launch`` set is drawn twice, by device time and by elapsed time.
    roofs
        The measured roof by precision.

    Returns
    -------
    Chart
        Both axes logarithmic; its table says in words where each kernel lies and why.
    """
    fig, ax = plots.figure(height=4.8)
    ax.set_xscale("log")
    ax.set_yscale("log")
    l2_bytes = source["l2_bytes"]
    rows, told = [], []
    points = [(p, point) for p in source["points"] for point in _points_of(p)]
    intensities = [point.work.intensity for _, point in points]
    low, high = min(intensities) / 2.5, max(intensities) * 2.5
    for precision, roof in roofs.items():
        colour = _COLOURS.get(precision, plots.ORANGE)
        xs = [low, roof.ridge, high]
        ax.plot(xs, [roof.attainable(x) / 1e12 for x in xs], "-", color=colour)
        ax.annotate(
            f"{precision}, {roof.peak_flops / 1e12:,.0f}",
            (high, roof.peak_flops / 1e12),
            (4, 0),  # beyond the line's end: above it stand the letters of kernels that nearly reach it
            textcoords="offset points",
            va="center",
            color=colour,
        )
        sheet = _datasheet(source, precision)
        if sheet is not None:
            xs = [low, sheet.ridge, high]
            ax.plot(xs, [sheet.attainable(x) / 1e12 for x in xs], "--", color=plots.GREY, linewidth=1)
    marks = {"memory": "o", "L2": "D", "launch": "s"}
    drawn = [(p, point) for p, point in points if p["precision"] in roofs]
    places = [(point.work.intensity, point.rate) for _, point in drawn]
    sides = _sides(places)
    lifts = _lifts(places, sides)
    for letter, (p, point), side, lift in zip(_LETTERS, drawn, sides, lifts, strict=False):
        roof = roofs[p["precision"]]
        kind = point.kind(l2_bytes)
        colour = _COLOURS.get(p["precision"], plots.ORANGE)
        x, y = point.work.intensity, point.rate / 1e12
        samples = p["timing"]["samples_ms"] if kind != "launch" else []
        if samples:
            ends = [point.work.flops / ms / 1e9 for ms in (max(samples), min(samples))]
            ax.plot([x, x], ends, "-", color=colour, linewidth=4, alpha=_FADED, solid_capstyle="butt")
        fill = {"markerfacecolor": "none"} if kind == "launch" else {}
        ax.plot(x, y, marks[kind], color=colour, markersize=5, **fill)
        ax.annotate(
            letter,
            (x, y),
            (6 if side == "left" else -6, lift - 3),
            textcoords="offset points",
            ha=side,
            color=plots.INK,
            fontsize=8,
        )
        state = point.state(roof, l2_bytes)
        spread = (
            f"{min(samples) * 1e3:,.2f} to {max(samples) * 1e3:,.2f}" if len(samples) > 1 else "one reading"
        )
        rows.append(
            (
                letter,
                point.name,
                p["precision"],
                f"{x:,.3g}",
                f"{point.time_ms * 1e3:,.2f}",
                spread,
                f"{y:,.4g}",
                state,
            )
        )
        told.append(f"{point.name}: {state}")
    ax.set_xlabel("arithmetic intensity, flop/byte (least bytes)")
    ax.set_ylabel("TFLOP/s")
    ax.grid(alpha=0.25)
    return plots.Chart(
        fig,
        caption=(
            "Kernels under the measured roofs (dashed: datasheet). Circles move their bytes through the memory; "
            "diamonds fit the L2; open squares are one call as Python makes it. Bars: all samples."
        ),
        alt="Roofline chart, both axes logarithmic. " + ". ".join(told),
        header=("", "Kernel", "Precision", "flop/byte", "µs", "Samples, µs", "TFLOP/s", "Where, and why"),
        rows=rows,
        source=source,
    )


def _sides(points: Sequence[tuple[float, float]]) -> list[str]:
    """Say on which side each letter is anchored: neighbours above each other in turn, so that none overlap."""
    sides = ["left"] * len(points)
    columns: dict[int, list[int]] = {}
    for k, (x, _) in enumerate(points):
        columns.setdefault(round(5 * math.log10(x)), []).append(k)
    for column in columns.values():
        ordered = sorted(column, key=lambda k: points[k][1])
        for lower, upper in zip(ordered[::2], ordered[1::2], strict=False):
            # Of two, the letter of the one further left goes to the left, or each would stand at the other's mark.
            outer = lower if points[lower][0] < points[upper][0] else upper
            sides[outer] = "right"
    return sides


_POINTS_A_DECADE = 38.0  # of the vertical axis, as these charts come out
_LETTER_POINTS = 9.0  # what a letter needs


def _lifts(places: Sequence[tuple[float, float]], sides: Sequence[str]) -> list[float]:
    """Say by how many points a letter is moved up, so that two on one side of a column stay apart."""
    lifts = [0.0] * len(places)
    columns: dict[tuple[int, str], list[int]] = {}
    for k, ((x, _), side) in enumerate(zip(places, sides, strict=True)):
        columns.setdefault((round(5 * math.log10(x)), side), []).append(k)
    for column in columns.values():
        below = -math.inf
        for k in sorted(column, key=lambda k: places[k][1]):
            height = _POINTS_A_DECADE * math.log10(places[k][1])
            below = max(height, below + _LETTER_POINTS)
            lifts[k] = below - height
    return lifts


def _points_of(p: Mapping[str, Any]) -> list[RoofPoint]:
    timing = p["timing"]
    work = Work(flops=p["flops"], bytes=p["bytes"])
    facts: dict[str, Any] = {
        "work": work,
        "cold": timing.get("l2") == "cold",
        "throttled": bool(timing.get("throttled")),
        "source": "kernels_on_the_roof",
    }
    found = [RoofPoint(name=p["name"], time_ms=timing["median_ms"], iqr_ms=timing["iqr_ms"], **facts)]
    if p.get("launch") and timing.get("elapsed_ms"):
        name = f"{p['name']}, one call"
        found.append(
            RoofPoint(name=name, time_ms=timing["elapsed_ms"], device_ms=timing["median_ms"], **facts)
        )
    return found


# --- the budget of a step ---------------------------------------------------------------------------------


def budgets(source: Recording, steps: Mapping[str, Mapping[str, Any]]) -> plots.Chart:
    """Draw for each step what its kernels need at the least, what they take beyond it, and the gaps.

    Parameters
    ----------
    source
        The recording that the steps come from.
    steps
        By label, a step's budget as `StepBudget.as_dict` gives it: ``families``, ``gap_us``.

    Returns
    -------
    Chart
        Two bars a step, the measured one and the least one, cut by family; steps of one precision (the label
        up to its comma) share an axis.
    """
    whole: dict[str, float] = {}
    for step in steps.values():
        for family, sums in step["families"].items():
            whole[family] = whole.get(family, 0.0) + sums["measured_us"]
    ranked = sorted(whole, key=lambda family: -whole[family])
    colours = dict(zip(ranked, _PALETTE, strict=False))  # the smallest families share the grey
    panels: dict[str, dict[str, Mapping[str, Any]]] = {}
    for label, step in steps.items():
        panels.setdefault(label.split(",")[0], {})[label] = step
    fig, axes = plots.figure(
        height=1.0 + 0.5 * len(panels) + 0.62 * len(steps),
        nrows=len(panels),
        squeeze=False,
        height_ratios=[len(panel) for panel in panels.values()],
    )
    rows: list[tuple[object, ...]] = []
    told = []
    for ax, panel in zip(axes[:, 0], panels.values(), strict=True):
        labels = []
        for k, (label, step) in enumerate(panel.items()):
            left = {"measured": 0.0, "least": 0.0}
            for family in (name for name in ranked if name in step["families"]):
                sums = step["families"][family]
                least, measured = sums["least_us"], sums["measured_us"]
                for which, us, y in (("measured", measured, 2.6 * k), ("least", least, 2.6 * k + 1)):
                    ax.barh(
                        y,
                        us / 1e3,
                        left=left[which] / 1e3,
                        height=0.82,
                        color=colours.get(family, plots.GREY),
                        alpha=1.0 if which == "least" else 0.55,
                        edgecolor=plots.INK,
                        linewidth=0.4,
                    )
                    left[which] += us
                share = f"{least / measured:.0%}" if measured else "–"
                times = (f"{us / 1e3:,.2f}" for us in (least, measured))
                rows.append((label, family, f"{sums['calls']:,.0f}", *times, share))
            gap = step["gap_us"]
            if gap:
                ax.barh(
                    2.6 * k,
                    gap / 1e3,
                    left=left["measured"] / 1e3,
                    height=0.82,
                    facecolor="none",
                    edgecolor=plots.INK,  # the hatch's colour too: black would vanish on a dark page
                    linewidth=0.0,
                    hatch="///",
                )
                rows.append((label, "gaps", "", "0.00", f"{gap / 1e3:,.2f}", "–"))
            labels += [label, "at the least"]
            told.append(
                f"{label}: {(left['measured'] + gap) / 1e3:,.1f} milliseconds measured, "
                f"{left['least'] / 1e3:,.1f} at the least"
            )
        ax.set_yticks([2.6 * k + shift for k in range(len(panel)) for shift in (0, 1)], labels=labels)
        ax.invert_yaxis()
    axes[-1, 0].set_xlabel("ms a step")
    legend = colours | ({"all others": plots.GREY} if len(ranked) > len(colours) else {})
    handles = [_patch(colour) for colour in legend.values()]
    fig.legend(handles, list(legend), ncols=3, loc="outside lower center", frameon=False)
    return plots.Chart(
        fig,
        caption=(
            "A training step as the sum of its kernels, by family: traced (faded; hatched: idle under the profiler), "
            "and what the roof allows. Each precision has its own scale."
        ),
        alt="Bar charts of milliseconds a step, cut by families of kernels. " + "; ".join(told),
        header=("Step", "Family", "Calls", "Least, ms", "Measured, ms", "Explained"),
        rows=rows,
        source=source,
    )


def _patch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, edgecolor=plots.INK, linewidth=0.4)


def shares(source: Recording, steps: Mapping[str, Mapping[str, Any]]) -> plots.Table:
    """Tabulate what share of a step's own time its calls account for, the more of them measured alone.

    Parameters
    ----------
    source
        The recording that the steps come from.
    steps
        By label, a step of `step_budgets`: ``step_ms``, ``busy_us``, and the totals ``burst`` and
        ``every_call_alone``.

    Returns
    -------
    Table
        One row a step. The last column is what remains of the step's time beside that of its traced kernels.
    """
    rows = []
    for label, step in steps.items():
        found = (
            step["burst"]["least_over_step"],
            step["burst"]["expected_over_step"],
            step["every_call_alone"]["expected_over_step"],
            1 - step["busy_us"] / 1e3 / step["step_ms"],
        )
        rows.append((label, f"{step['step_ms']:,.1f}", *(f"{share:.1%}" for share in found)))
    header = (
        "Step",
        "ms, unwatched",
        "Least times",
        "Products and attention alone",
        "Every call alone",
        "Outside the kernels",
    )
    return plots.Table(
        header,
        tuple(rows),
        caption="Shares of a step's own time: the roof, then calls at what they take alone, where that is known",
        source=source,
    )


def losses(source: Recording, step: Mapping[str, Any], *, caption: str, most: int = 12) -> plots.Table:
    """Tabulate the calls of a step that take longest beyond their bound, and all that have none.

    Parameters
    ----------
    source
        The recording that the step comes from.
    step
        A step's budget as plain data.
    caption
        What the table shows.
    most
        How many rows; the rest is summed in the last one.

    Returns
    -------
    Table
        Operation, shapes, calls, bound, least and measured time, and the difference.
    """

    def loss(row: Mapping[str, Any]) -> float:
        return float(row["measured_us"] - (row["least_us"] or 0.0))

    # Rows without shapes are sums over small ones, made when the budget was condensed.
    ordered = sorted(step["rows"], key=loss, reverse=True)
    single = [row for row in ordered if row["shapes"]]
    lines = [_loss_line(row, loss(row)) for row in single[:most]]
    rest = [row for row in ordered if not row["shapes"]] + single[most:]
    if rest:
        least, measured = (sum(row[key] or 0.0 for row in rest) for key in ("least_us", "measured_us"))
        calls = sum(row["calls"] for row in rest)
        times = (f"{us:,.0f}" for us in (least, measured, measured - least))
        lines.append(("all others", "", "", f"{calls:,}", "", *times))
    header = ("Operation", "Shapes", "Types", "Calls", "Bound", "Least, µs", "Measured, µs", "Beyond, µs")
    return plots.Table(header, tuple(lines), caption=caption, source=source)


def _loss_line(row: Mapping[str, Any], loss: float) -> tuple[str, ...]:
    shapes = list(dict.fromkeys(_shape(shape) for shape in row["shapes"] if shape))
    text = ", ".join(shapes[:3]) + (", …" if len(shapes) > 3 else "")
    least = "no count" if row["least_us"] is None else f"{row['least_us']:,.0f}"
    bound = row["bound"] or (row["reason"] or "")
    types = ", ".join(dict.fromkeys(hardware.PRECISION_OF_DTYPE.get(dtype, dtype) for dtype in row["dtypes"]))
    name = row["op"].removeprefix("aten::").replace("_", " ").strip()
    times = (f"{us:,.0f}" for us in (row["measured_us"], loss))
    return (name, text, types, f"{row['calls']:,}", bound, least, *times)
