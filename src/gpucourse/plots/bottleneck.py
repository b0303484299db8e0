"""Charts and tables of the chapter "Classify the bottleneck": a prediction beside its measurement.

What is predicted comes from the datasheet record of the GPU that measured. A GPU without a record gets the
measured values alone, and the words "unavailable for NAME".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpucourse import hardware, plots
from gpucourse.roofline import Roofline, Work, matmul_work
from gpucourse.units import format_bytes, format_time_ms

if TYPE_CHECKING:
    from gpucourse.recording import Recording

__all__ = [
    "add_bandwidth",
    "compare",
    "instruction_costs",
    "row_times",
    "shape_rates",
    "speedups",
]

_PART_NAMES = {
    "layer_norm": "layer norm",
    "qkv": "product: Q, K, V",
    "scores": "product: scores",
    "softmax": "softmax",
    "values": "product: values",
    "projection": "product: projection",
    "residual": "residual add",
    "widen": "product: widen",
    "gelu": "GELU",
    "narrow": "product: narrow",
}
_ELEMENT_WISE = ("layer_norm", "softmax", "residual", "gelu")  # no tensor cores, whatever the precision


def _roof(source: Recording, dtype: str) -> Roofline | None:
    """Give the datasheet's roof for the GPU that measured; None where a figure is missing."""
    record = hardware.find(str(source.provenance.get("gpu")))
    if record is None:
        return None
    try:
        return Roofline.of(record, dtype)
    except hardware.MissingFigureError:
        return None


def _unavailable(source: Recording) -> str:
    return f"unavailable for {source.provenance.get('gpu')}"


def _log_ticks(axis: Any, values: Sequence[float], labels: Sequence[str]) -> None:
    axis.set_ticks(values, labels=labels)
    axis.set_ticks([], minor=True)


# --- prediction and measurement, row by row -------------------------------------------------------------


def compare(
    rows: Mapping[str, tuple[Work, str, Mapping[str, Any]]], source: Recording, *, caption: str
) -> plots.Table:
    """Set the least time of each work beside its measured device time.

    Parameters
    ----------
    rows
        By name: the work, the precision that runs ("fp32", "bf16"), and a timing of `source` as plain data.
    source
        The recording that the timings come from; its GPU gives the roof.
    caption
        What the table shows.

    Returns
    -------
    Table
        Columns: operation, both counted times, which is longer, measured time, measured over the longer.
    """
    lines = []
    for name, (work, dtype, timing) in rows.items():
        roof = _roof(source, dtype)
        measured_ms = timing["median_ms"]
        if roof is None:
            middle, share = [_unavailable(source)] * 3, "–"
        else:
            least = roof.least_time(work)
            middle = [plots.unbroken_ms(least.arithmetic_ms), plots.unbroken_ms(least.bytes_ms), least.bound]
            share = f"{measured_ms / least.time_ms:.2f}"
        lines.append((name, *middle, plots.unbroken_ms(measured_ms), share))
    header = ("Operation", "Arithmetic", "Bytes", "Bound", "Measured", "× bound")
    return plots.Table(header, tuple(lines), caption=caption, source=source)


# --- charts -----------------------------------------------------------------------------------------------


def add_bandwidth(source: Recording) -> plots.Chart:
    """Draw the rate of x + y against the size of the three arrays, L2 warm and flushed.

    Parameters
    ----------
    source
        The recording `add_sweep`.

    Returns
    -------
    Chart
        Bytes by convention (two read, one written) over device time.
    """
    sizes = [row for key, row in source.items() if key.startswith("mi_")]
    megabytes = [row["bytes"] / 1e6 for row in sizes]
    rates = {l2: [row[f"{l2}_gb_per_s"] / 1e3 for row in sizes] for l2 in ("warm", "cold")}
    record = hardware.find(str(source.provenance.get("gpu")))
    fig, ax = plots.figure()
    ax.set_xscale("log")
    for l2, colour, text, offset in (
        ("warm", plots.BLUE, "L2 warm", (8, 0)),
        ("cold", plots.ORANGE, "L2 flushed", (8, -10)),
    ):
        ax.plot(megabytes, rates[l2], "o-", color=colour)
        ax.annotate(text, (megabytes[1], rates[l2][1]), offset, textcoords="offset points", color=colour)
    datasheet = _unavailable(source)
    if record is not None:
        limit = record.bandwidth_bytes_per_s / 1e12
        datasheet = f"{limit * 1e3:,.0f}"
        ax.axhline(limit, color=plots.GREY, linestyle="--")
        at = (megabytes[-1], limit)
        ax.annotate(
            f"datasheet, {limit:.2f}", at, (0, 5), textcoords="offset points", ha="right", color=plots.INK
        )
    l2_bytes = source.data.get("l2_cache_size")
    if l2_bytes:
        ax.axvline(l2_bytes / 1e6, color=plots.GREY, linestyle=":")
        at = (l2_bytes / 1e6, 0.03)
        units = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        ax.annotate(f"L2, {format_bytes(l2_bytes)}", at, (5, 0), color=plots.INK, **units)
    ax.set_ylim(bottom=0)
    _log_ticks(ax.xaxis, megabytes[::2], [f"{value:,.0f}" for value in megabytes[::2]])
    ax.set_xlabel("three arrays together, MB")
    ax.set_ylabel("bytes / time, TB/s")
    return plots.Chart(
        fig,
        caption="The rate of x + y in fp32 by size: what still lies in the L2 is not held to the memory's rate.",
        alt=(
            f"Line chart, terabytes a second against {megabytes[0]:,.0f} to {megabytes[-1]:,.0f} megabytes on a "
            f"logarithmic axis. With a warm L2 the rate peaks at {max(rates['warm']):.1f} and ends at "
            f"{rates['warm'][-1]:.1f}; with the L2 flushed it rises from {rates['cold'][0]:.1f} to "
            f"{rates['cold'][-1]:.1f}."
        ),
        header=("MB", "Warm, GB/s", "Flushed, GB/s", "Datasheet, GB/s"),
        rows=[
            (f"{size:,.1f}", f"{warm * 1e3:,.0f}", f"{cold * 1e3:,.0f}", datasheet)
            for size, warm, cold in zip(megabytes, rates["warm"], rates["cold"], strict=True)
        ],
        source=source,
    )


def row_times(source: Recording) -> plots.Chart:
    """Draw the time of (m, 8192) @ (8192, 8192) against m, with the two times counted by hand.

    Parameters
    ----------
    source
        The recording `rows_sweep`.

    Returns
    -------
    Chart
        Both axes logarithmic.
    """
    points = [row for key, row in source.items() if key.startswith("m_")]
    ms = [row["m"] for row in points]
    measured = [row["timing"]["median_ms"] * 1e3 for row in points]
    roof = _roof(source, source["dtype"])
    fig, ax = plots.figure()
    ax.set_xscale("log")
    ax.set_yscale("log")
    columns: list[list[str]] = [[_unavailable(source)] * 2 for _ in points]
    lowest = min(measured)
    if roof is not None:
        least = [roof.least_time(matmul_work(m, 8192, 8192, 2)) for m in ms]
        columns = [[f"{one.bytes_ms * 1e3:.1f}", f"{one.arithmetic_ms * 1e3:.1f}"] for one in least]
        for kind, colour, at, offset in (
            ("bytes", plots.GREEN, 2, -14),
            ("arithmetic", plots.ORANGE, -4, -16),
        ):
            times = [getattr(one, f"{kind}_ms") * 1e3 for one in least]
            ax.plot(ms, times, "--", color=colour)
            ax.annotate(kind, (ms[at], times[at]), (6, offset), textcoords="offset points", color=colour)
        lowest = min(one.time_ms * 1e3 for one in least)
    ax.plot(ms, measured, "o-", color=plots.BLUE)
    ax.annotate("measured", (ms[2], measured[2]), (0, 8), textcoords="offset points", color=plots.BLUE)
    ax.set_ylim(lowest / 2, max(measured) * 1.5)
    _log_ticks(ax.xaxis, ms, [str(m) for m in ms])
    ticks = [
        t for t in (10, 30, 100, 300, 1000, 3000, 10_000, 30_000) if lowest / 2 < t < max(measured) * 1.5
    ]
    _log_ticks(ax.yaxis, ticks, [f"{tick:,}" for tick in ticks])
    ax.set_xlabel("rows m of the left matrix")
    ax.set_ylabel("time, µs")
    return plots.Chart(
        fig,
        caption="(m, 8192) @ (8192, 8192), L2 flushed: the same time for few rows, because the weights set it.",
        alt=(
            f"Line chart, both axes logarithmic. Measured: {measured[0]:.0f} microseconds at {ms[0]} row, "
            f"{measured[len(ms) // 2 - 1]:.0f} at {ms[len(ms) // 2 - 1]}, {measured[-1]:.0f} at {ms[-1]}. The time "
            "of the bytes is nearly level, that of the arithmetic rises in proportion; the measured time follows "
            "the higher of the two from above."
        ),
        header=("m", "Bytes, µs", "Arithmetic, µs", "Measured, µs"),
        rows=[(m, *cells, f"{value:.1f}") for m, cells, value in zip(ms, columns, measured, strict=True)],
        source=source,
    )


def speedups(source: Recording, fp32: Mapping[str, Work], half: Mapping[str, Work]) -> plots.Chart:
    """Draw, for each part of the block, the gain of half precision over fp32: predicted and measured.

    Parameters
    ----------
    source
        The recording `block_parts`.
    fp32, half
        Work of each part in fp32 and in half precision.

    Returns
    -------
    Chart
        One row a part.
    """
    name_of_half = source["half"]["dtype"].removeprefix("torch.")
    fig, ax = plots.figure(height=3.6)
    rows: list[tuple[str, ...]] = []
    gains: list[float] = []
    for y, (part, name) in enumerate(_PART_NAMES.items()):
        before, after = (source[key][part]["median_ms"] for key in ("fp32", "half"))
        gains.append(before / after)
        predicted, bounds = _unavailable(source), _unavailable(source)
        slow_roof = _roof(source, "fp32")
        fast_roof = _roof(source, "fp32" if part in _ELEMENT_WISE else name_of_half)
        if slow_roof is not None and fast_roof is not None:
            slow, fast = slow_roof.least_time(fp32[part]), fast_roof.least_time(half[part])
            gain = slow.time_ms / fast.time_ms
            predicted, bounds = f"{gain:.1f}", f"{slow.bound} → {fast.bound}"
            ax.plot([gain, gains[-1]], [y, y], color=plots.GREY, linewidth=1)
            ax.plot(gain, y, "o", color=plots.ORANGE, markerfacecolor="none", markersize=7)
            if y == 0:
                at = (gain, y)
                ax.annotate("predicted", at, (8, -3), textcoords="offset points", color=plots.ORANGE)
        ax.plot(gains[-1], y, "o", color=plots.BLUE)
        if y == 1:
            at = (gains[-1], y)
            ax.annotate("measured", at, (-8, -3), textcoords="offset points", color=plots.BLUE, ha="right")
        rows.append(
            (name, bounds, format_time_ms(before), format_time_ms(after), predicted, f"{gains[-1]:.1f}")
        )
    ax.set_yticks(range(len(_PART_NAMES)), labels=list(_PART_NAMES.values()))
    ax.invert_yaxis()
    ax.set_xlim(left=0)
    ax.set_xlabel(f"time in fp32 / time in {name_of_half}")
    ax.grid(axis="x")
    return plots.Chart(
        fig,
        caption=f"What {name_of_half} buys each kernel of the block over fp32.",
        alt=(
            "Dot chart, one row for each of ten kernels, of predicted and measured gain. Measured: "
            + ", ".join(f"{name} {gain:.1f}" for name, gain in zip(_PART_NAMES.values(), gains, strict=True))
            + "."
        ),
        header=("Kernel", "Bound, fp32 → half", "fp32", name_of_half, "Predicted gain", "Measured gain"),
        rows=rows,
        source=source,
    )


def instruction_costs(source: Recording) -> plots.Chart:
    """Draw the rate of bytes of element-wise operations that do more and more for each element.

    Parameters
    ----------
    source
        The recording `third_limit`.

    Returns
    -------
    Chart
        Pairs of bars: fp32 and half precision.
    """
    names = {"copy": "copy", "relu": "ReLU", "exp": "exp", "gelu_tanh": "GELU, tanh form", "gelu": "GELU"}
    elements = 32768 * 3072
    fig, ax = plots.figure(height=2.8)
    rows = []
    for y, (key, name) in enumerate(names.items()):
        times = [source[precision][key]["median_ms"] for precision in ("fp32", "half")]
        rates = [2 * elements * size / ms / 1e9 for size, ms in zip((4, 2), times, strict=True)]
        for shift, rate, colour in ((-0.2, rates[0], plots.GREEN), (0.2, rates[1], plots.BLUE)):
            ax.barh(y + shift, rate, height=0.36, color=colour)
        if y == 0:
            for shift, text in ((-0.2, "fp32"), (0.2, "16 bit")):
                ax.annotate(text, (0.1, y + shift), va="center", color="white", fontsize=8)
        rows.append((name, *(format_time_ms(ms) for ms in times), *(f"{rate * 1e3:,.0f}" for rate in rates)))
    record = hardware.find(str(source.provenance.get("gpu")))
    if record is not None:
        ax.axvline(record.bandwidth_bytes_per_s / 1e12, color=plots.GREY, linestyle="--")
    ax.set_yticks(range(len(names)), labels=list(names.values()))
    ax.invert_yaxis()
    ax.set_xlabel("bytes / time, TB/s (dashed: the datasheet's bandwidth)")
    return plots.Chart(
        fig,
        caption="Five operations that move the same bytes in each precision and do more and more for an element.",
        alt="Bar chart of terabytes a second, fp32 and 16 bit. "
        + "; ".join(f"{row[0]}: {row[3]} and {row[4]} gigabytes a second" for row in rows),
        header=("Operation", "fp32", "16 bit", "fp32, GB/s", "16 bit, GB/s"),
        rows=rows,
        source=source,
    )


def shape_rates(source: Recording) -> plots.Chart:
    """Draw the rate of half-precision products whose sizes lie near 4096.

    Parameters
    ----------
    source
        The recording `odd_shapes`.

    Returns
    -------
    Chart
        One bar a shape.
    """
    cases = {key: row for key, row in source.items() if isinstance(row, Mapping) and "tflops" in row}
    near = {key: row for key, row in cases.items() if not key.startswith("vocabulary")}
    fig, ax = plots.figure(height=3.6)
    for y, row in enumerate(near.values()):
        colour = plots.GREEN if all(row[size] % 8 == 0 for size in "nk") else plots.ORANGE
        ax.barh(y, row["tflops"], color=colour, height=0.7)
        at = (row["tflops"], y)
        ax.annotate(
            f"{row['tflops']:,.0f}",
            at,
            (3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=plots.INK,
        )
    ax.set_yticks(range(len(near)), labels=[f"{row['m']} × {row['n']} × {row['k']}" for row in near.values()])
    ax.tick_params(axis="y", labelsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.08)  # room for the last number
    ax.set_xlabel("TFLOP/s")
    ax.set_ylabel("m × n × k")
    return plots.Chart(
        fig,
        caption="16-bit products near 4096: green where n and k, the lengths of the rows, are multiples of 8.",
        alt="Bar chart of teraflops a second by m, n and k. "
        + "; ".join(f"{row['m']}, {row['n']}, {row['k']}: {row['tflops']:,.0f}" for row in near.values()),
        header=("m", "n", "k", "Time", "TFLOP/s"),
        rows=[
            (row["m"], row["n"], row["k"], format_time_ms(row["ms"]), f"{row['tflops']:,.0f}")
            for row in cases.values()
        ],
        source=source,
    )
