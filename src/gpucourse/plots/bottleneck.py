"""Charts and tables of the chapter "Classify the bottleneck": a prediction beside its measurement.

What is predicted comes from the datasheet record of the GPU that measured. A GPU without a record gets the
measured values alone, and the words "unavailable for NAME".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpucourse import hardware, html, plots
from gpucourse.roofline import Roofline, Work, elementwise_work, matmul_work
from gpucourse.units import format_bytes, format_time_ms

if TYPE_CHECKING:
    from gpucourse.recording import Recording

__all__ = ["Comparison", "add_bandwidth", "compare", "row_times", "shape_rates", "speedups"]

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


def _log_ticks(axis: Any, values: list[float], labels: list[str]) -> None:
    axis.set_ticks(values, labels=labels)
    axis.set_ticks([], minor=True)


# --- prediction and measurement, row by row -------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """A table of predictions and measurements; shows itself as HTML."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str
    provenance: str

    def _repr_html_(self) -> str:
        table = html.table(self.header, self.rows, self.caption)
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(self.caption)}">{table}'
            f'</div><p class="provenance">{html.escape(self.provenance)}</p>'
        )

    def __repr__(self) -> str:
        return "\n".join(" | ".join(row) for row in (self.header, *self.rows)) + f"\n{self.provenance}"


def compare(
    rows: Mapping[str, tuple[Work, str, Mapping[str, Any]]], source: Recording, *, caption: str
) -> Comparison:
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
    Comparison
        Columns: operation, intensity, both times, bound, measured, and measured over predicted.
    """
    lines = []
    for name, (work, dtype, timing) in rows.items():
        roof = _roof(source, dtype)
        measured_ms = timing["median_ms"]
        if roof is None:
            middle = [_unavailable(source)] * 3
            share = "–"
        else:
            least = roof.least_time(work)
            middle = [format_time_ms(least.arithmetic_ms), format_time_ms(least.bytes_ms), least.bound]
            share = f"{measured_ms / least.time_ms:.2f}"
        lines.append((name, f"{work.intensity:.3g}", *middle, format_time_ms(measured_ms), share))
    header = ("Operation", "FLOP/byte", "Arithmetic", "Bytes", "Bound", "Measured", "Measured / larger")
    return Comparison(header, tuple(lines), caption, source.line())


# --- charts ------------------------------------------------------------------------------------------------


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
    record = hardware.find(str(source.provenance.get("gpu")))
    fig, ax = plots.figure()
    ax.set_xscale("log")
    for l2, colour, text, offset in (
        ("warm", plots.BLUE, "L2 warm", (0, 8)),
        ("cold", plots.ORANGE, "L2 flushed", (0, -16)),
    ):
        rates = [row[f"{l2}_gb_per_s"] / 1e3 for row in sizes]
        ax.plot(megabytes, rates, "o-", color=colour)
        peak = max(range(len(rates)), key=lambda i: rates[i]) if l2 == "warm" else 1
        ax.annotate(text, (megabytes[peak], rates[peak]), offset, textcoords="offset points", color=colour)
    datasheet = _unavailable(source)
    if record is not None:
        limit = record.bandwidth_bytes_per_s / 1e12
        datasheet = f"{limit:.2f}"
        ax.axhline(limit, color=plots.GREY, linestyle="--")
        ax.annotate(
            f"datasheet {limit:.2f}", (megabytes[-1], limit), (0, 5), textcoords="offset points", ha="right"
        )
    l2_bytes = source.data.get("l2_cache_size")
    if l2_bytes:
        ax.axvline(l2_bytes / 1e6, color=plots.GREY, linestyle=":")
        ax.annotate(
            f"L2: {format_bytes(l2_bytes)}",
            (l2_bytes / 1e6, 0.02),
            (4, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
        )
    ax.set_ylim(bottom=0)
    _log_ticks(ax.xaxis, megabytes[::2], [f"{value:,.0f}" for value in megabytes[::2]])
    ax.set_xlabel("three arrays together, MB")
    ax.set_ylabel("12 bytes an element / time, TB/s")
    return plots.Chart(
        fig,
        caption="Rate of x + y in fp32 by size: what stays in the L2 is not held to the memory's bandwidth.",
        alt=(
            "Line chart of terabytes a second against megabytes on a logarithmic axis. Warm: a hump above the "
            "datasheet's bandwidth while the arrays fit the L2, then down to just below it. Flushed: rising "
            "from below to the same level."
        ),
        header=("MB", "Warm, GB/s", "Flushed, GB/s", "Datasheet, TB/s"),
        rows=[
            (
                f"{row['bytes'] / 1e6:.1f}",
                *(f"{row[f'{l2}_gb_per_s']:,.0f}" for l2 in ("warm", "cold")),
                datasheet,
            )
            for row in sizes
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
    if roof is not None:
        least = [roof.least_time(matmul_work(m, 8192, 8192, 2)) for m in ms]
        columns = [[f"{one.bytes_ms * 1e3:.1f}", f"{one.arithmetic_ms * 1e3:.1f}"] for one in least]
        moved, counted = (
            [getattr(one, f"{kind}_ms") * 1e3 for one in least] for kind in ("bytes", "arithmetic")
        )
        ax.plot(ms, moved, "--", color=plots.GREEN)
        ax.annotate("bytes", (ms[2], moved[2]), (0, -14), textcoords="offset points", color=plots.GREEN)
        ax.plot(ms, counted, "--", color=plots.ORANGE)
        at = len(ms) - 4
        ax.annotate(
            "arithmetic", (ms[at], counted[at]), (6, -8), textcoords="offset points", color=plots.ORANGE
        )
        ax.set_ylim(bottom=min(moved) / 2)
    ax.plot(ms, measured, "o-", color=plots.BLUE)
    ax.annotate("measured", (ms[2], measured[2]), (0, 8), textcoords="offset points", color=plots.BLUE)
    _log_ticks(ax.xaxis, ms, [str(m) for m in ms])
    ticks = [
        value
        for value in (10, 30, 100, 300, 1000, 3000, 10000)
        if min(measured) / 2 < value < 2 * max(measured)
    ]
    _log_ticks(ax.yaxis, [float(value) for value in ticks], [f"{value:,}" for value in ticks])
    ax.set_xlabel("rows m of the left matrix")
    ax.set_ylabel("time, µs")
    return plots.Chart(
        fig,
        caption="Time of (m, 8192) @ (8192, 8192): flat while the weights' bytes take longer than the arithmetic.",
        alt=(
            "Line chart, both axes logarithmic: measured time is nearly flat for few rows, along the time of "
            "the bytes, and turns upwards near the crossing with the time of the arithmetic, which it then "
            "follows from above."
        ),
        header=("m", "Bytes, µs", "Arithmetic, µs", "Measured, µs"),
        rows=[(m, *cells, f"{value:.1f}") for m, cells, value in zip(ms, columns, measured, strict=True)],
        source=source,
    )


def block_works(batch: int, length: int, width: int, heads: int, itemsize: int) -> dict[str, Work]:
    """Count each kernel of a transformer block's forward pass, attention unfused.

    Parameters
    ----------
    batch, length, width, heads
        Examples, tokens an example, model width, attention heads.
    itemsize
        Bytes an element, of activations and weights alike.

    Returns
    -------
    dict
        Work by part. Layer norm and residual add occur twice in a block; here each stands once. Scale, mask,
        biases and dropout are left out.
    """
    from gpucourse.roofline import layer_norm_work, softmax_work

    n, per_head = batch * length, width // heads
    pairs = batch * heads
    return {
        "layer_norm": layer_norm_work(n, width, itemsize),
        "qkv": matmul_work(n, 3 * width, width, itemsize),
        "scores": pairs * matmul_work(length, length, per_head, itemsize),
        "softmax": softmax_work(pairs * length, length, itemsize),
        "values": pairs * matmul_work(length, per_head, length, itemsize),
        "projection": matmul_work(n, width, width, itemsize),
        "residual": elementwise_work(n * width, reads=(itemsize, itemsize), writes=(itemsize,)),
        "widen": matmul_work(n, 4 * width, width, itemsize),
        "gelu": elementwise_work(n * 4 * width, reads=(itemsize,), writes=(itemsize,), flops_per_element=10),
        "narrow": matmul_work(n, width, 4 * width, itemsize),
    }


def speedups(
    source: Recording, *, batch: int = 16, length: int = 1024, width: int = 768, heads: int = 12
) -> plots.Chart:
    """Draw, for each part of the block, the gain of half precision over fp32: predicted and measured.

    Parameters
    ----------
    source
        The recording `block_parts`.
    batch, length, width, heads
        The sizes that it was measured with.

    Returns
    -------
    Chart
        One row a part.
    """
    half = source["half"]["dtype"]
    roofs = _roof(source, "fp32"), _roof(source, half)
    works = [block_works(batch, length, width, heads, itemsize) for itemsize in (4, 2)]
    fig, ax = plots.figure(height=3.6)
    rows: list[tuple[str, ...]] = []
    for y, (part, name) in enumerate(_PART_NAMES.items()):
        before, after = (source[key][part]["median_ms"] for key in ("fp32", "half"))
        measured = before / after
        predicted, bounds = _unavailable(source), _unavailable(source)
        if roofs[0] is not None and roofs[1] is not None:
            slow, fast = (
                roof.least_time(work[part]) for roof, work in zip(roofs, works, strict=True) if roof
            )
            gain = slow.time_ms / fast.time_ms
            predicted, bounds = f"{gain:.1f}", f"{slow.bound} → {fast.bound}"
            ax.plot([gain, measured], [y, y], color=plots.GREY, linewidth=1)
            ax.plot(gain, y, "o", color=plots.ORANGE, markerfacecolor="none")
            if y == 1:
                ax.annotate(
                    "predicted",
                    (gain, y),
                    (0, -14),
                    textcoords="offset points",
                    color=plots.ORANGE,
                    ha="center",
                )
        ax.plot(measured, y, "o", color=plots.BLUE)
        if y == 1:
            ax.annotate(
                "measured", (measured, y), (0, -14), textcoords="offset points", color=plots.BLUE, ha="center"
            )
        rows.append(
            (name, bounds, format_time_ms(before), format_time_ms(after), predicted, f"{measured:.1f}")
        )
    ax.set_yticks(range(len(_PART_NAMES)), labels=list(_PART_NAMES.values()))
    ax.invert_yaxis()
    ax.set_xlim(left=0)
    ax.set_xlabel(f"fp32 time / {half.removeprefix('torch.')} time")
    ax.grid(axis="x")
    return plots.Chart(
        fig,
        caption="What half precision buys each kernel of the block: two for what is bound by bytes, more for products.",
        alt=(
            "Dot chart, one row for each of ten kernels: predicted and measured ratio of fp32 time to half-precision "
            "time. Layer norm, softmax, residual add and GELU lie near 2, the wide products far to the right."
        ),
        header=("Kernel", "Bound, fp32 → half", "fp32", "half", "Predicted gain", "Measured gain"),
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
        colour = plots.GREEN if all(row[size] % 8 == 0 for size in "mnk") else plots.ORANGE
        ax.barh(y, row["tflops"], color=colour, height=0.7)
        ax.annotate(
            f"{row['tflops']:,.0f}", (row["tflops"], y), (3, -3), textcoords="offset points", fontsize=8
        )
    ax.set_yticks(range(len(near)), labels=[f"{row['m']} × {row['n']} × {row['k']}" for row in near.values()])
    ax.tick_params(axis="y", labelsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("TFLOP/s")
    ax.set_ylabel("m × n × k")
    return plots.Chart(
        fig,
        caption="Half-precision products near 4096: green where all three sizes are multiples of 8.",
        alt=(
            "Bar chart of teraflops a second for products m by n by k. Shapes whose sizes are multiples of eight "
            "have the longest bars; most others fall well short; an odd m alone costs little."
        ),
        header=("m", "n", "k", "Time", "TFLOP/s"),
        rows=[
            (row["m"], row["n"], row["k"], format_time_ms(row["ms"]), f"{row['tflops']:,.0f}")
            for row in cases.values()
        ],
        source=source,
    )
