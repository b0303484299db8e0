"""Charts of the chapter on the compiler: calls before and after, checks, shapes, a step by kind, the debt repaid.

All take plain data as the chapter's recorded functions return it, live or replayed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpucourse.plots import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, Chart, figure, unbroken_ms

if TYPE_CHECKING:
    from gpucourse.recording import Recording

__all__ = ["calls", "family", "guard_cost", "repaid", "shape_calls", "step_families"]

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear")
_FAMILIES = {
    "products": BLUE,
    "attention": PURPLE,
    "optimizer": GREEN,
    "written by the compiler": ORANGE,
    "torch's other kernels": GREY,
}


def family(kernel: Mapping[str, Any]) -> str:
    """Say whose kernel it is, by its name and the operation that launched it.

    >>> family({"name": "triton_poi_fused_add_gelu_0", "op": "triton_poi_fused_add_gelu_0"})
    'written by the compiler'
    >>> family({"name": "nvjet_sm90_tst_256x128", "op": "aten::addmm"})
    'products'
    >>> family({"name": "multi_tensor_apply_kernel", "op": "aten::_fused_adamw_"})
    'optimizer'
    >>> family({"name": "Memset (Device)", "op": None})
    "torch's other kernels"
    """
    op = str(kernel.get("op") or "").removeprefix("aten::").strip("_")
    if str(kernel["name"]).startswith("triton_"):
        return "written by the compiler"
    if op in _PRODUCTS:
        return "products"
    if "attention" in op:
        return "attention"
    return "optimizer" if "adam" in op else "torch's other kernels"


def calls(chains: Mapping[str, Any], *, caption: str, source: Recording | None = None) -> Chart:
    """Draw device time and elapsed time of each function's call, as written and compiled.

    Parameters
    ----------
    chains
        Under each function's name ``eager`` and ``compiled``, with ``median_ms`` (device) and ``elapsed_ms``;
        entries without these two are passed over.
    caption
        What the reader should see.
    source
        The recording that it comes from.

    Raises
    ------
    ValueError
        No entry has both.
    """
    rows: list[tuple[str, str, float, float]] = []
    for label, found in chains.items():
        if isinstance(found, Mapping) and {"eager", "compiled"} <= found.keys():
            for how, said in (("eager", "as written"), ("compiled", "compiled")):
                timing = found[how]
                rows.append(
                    (
                        label.replace("_", " "),
                        said,
                        float(timing["median_ms"]) * 1000,
                        float(timing["elapsed_ms"]) * 1000,
                    )
                )
    if not rows:
        raise ValueError("no function with `eager` and `compiled` was found: nothing to draw")
    fig, ax = figure(5.8, 0.42 * len(rows) + 1.1)
    for place, (_, said, device_us, elapsed_us) in enumerate(rows):
        height = -(place + 0.35 * (place // 2))
        colour = ORANGE if said == "compiled" else BLUE
        ax.plot([device_us, elapsed_us], [height, height], color=colour, linewidth=2.4, alpha=0.45)
        ax.plot([device_us], [height], "o", color=colour, markersize=6.5)
        ax.plot([elapsed_us], [height], "|", color=colour, markersize=13, markeredgewidth=2.4)
    heights = [-(place + 0.35 * (place // 2)) for place in range(len(rows))]
    ax.set_yticks(heights, [f"{label}, {said}" for label, said, _, _ in rows])
    ax.tick_params(axis="y", length=0)
    ax.set_xscale("log")
    ax.set_xlabel("µs a call: dot, on the device; bar, until the caller has it")
    ax.grid(True, axis="x")
    ax.set_ylim(min(heights) - 0.6, 0.6)
    return Chart(
        fig,
        caption=caption,
        alt="For each function two lines on a logarithmic axis of µs, from the device time to the elapsed time: "
        + "; ".join(
            f"{label} {said} {device_us:,.1f} to {elapsed_us:,.1f}"
            for label, said, device_us, elapsed_us in rows
        )
        + ".",
        header=("Function", "How", "Device time, µs", "Elapsed, µs"),
        rows=[
            (label, said, f"{device_us:,.2f}", f"{elapsed_us:,.1f}")
            for label, said, device_us, elapsed_us in rows
        ],
        source=source,
    )


def guard_cost(
    points: Sequence[Mapping[str, Any]], *, caption: str, source: Recording | None = None
) -> tuple[Chart, float, float]:
    """Draw the host time of a call that only checks, against its inputs, with the straight line through it.

    Parameters
    ----------
    points
        ``inputs`` and ``host_us`` of each measurement.
    caption
        What the reader should see.
    source
        The recording that it comes from.

    Returns
    -------
    tuple of Chart, float, float
        The chart; the line's value at no input, in µs; its slope, in µs an input (least squares).

    Raises
    ------
    ValueError
        Fewer than two different numbers of inputs: no line goes through them.
    """
    counts = [float(point["inputs"]) for point in points]
    times = [float(point["host_us"]) for point in points]
    if len(set(counts)) < 2:
        raise ValueError(f"a line needs two different numbers of inputs, found {sorted(set(counts))}")
    mean_x, mean_y = sum(counts) / len(counts), sum(times) / len(times)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(counts, times, strict=True))
    slope /= sum((x - mean_x) ** 2 for x in counts)
    base = mean_y - slope * mean_x
    fig, ax = figure(5.8, 2.8)
    ax.plot([0, max(counts)], [base, base + slope * max(counts)], color=GREY, linewidth=1.2)
    ax.plot(counts, times, "o", color=BLUE)
    ax.set_xlabel("tensors among the arguments")
    ax.set_ylabel("host time of a call, µs")
    ax.set_xlim(0)
    ax.set_ylim(0)
    ax.grid(True)
    line = f"{base:.1f} µs and {slope * 1000:.0f} ns for each tensor"
    ax.annotate(
        line,
        (max(counts) / 2, base + slope * max(counts) / 2),
        xytext=(8, -14),
        textcoords="offset points",
        color=INK,
    )
    chart = Chart(
        fig,
        caption=caption,
        alt=f"Points of host time against the number of tensors lie near a straight line: {line}.",
        header=("Tensors", "Host time, µs", "Line, µs"),
        rows=[
            (f"{x:.0f}", f"{y:.1f}", f"{base + slope * x:.1f}") for x, y in zip(counts, times, strict=True)
        ],
        source=source,
    )
    return chart, base, slope


def shape_calls(
    series: Mapping[str, Sequence[Mapping[str, Any]]], *, caption: str, source: Recording | None = None
) -> Chart:
    """Draw the wall time of one call after the other, each with another shape, one curve a setting.

    Parameters
    ----------
    series
        Under each setting's name ``rows`` and ``wall_ms`` of each call; all settings saw the same rows.
    caption
        What the reader should see.
    source
        The recording that it comes from.

    Raises
    ------
    ValueError
        The settings did not see the same rows in the same order.
    """
    seen = {tuple(int(call["rows"]) for call in found) for found in series.values()}
    if len(seen) != 1:
        raise ValueError(
            f"each setting must see the same rows in the same order; {len(seen)} orders were found"
        )
    (rows,) = seen
    fig, ax = figure(5.8, 3.2)
    for (label, found), colour, marker in zip(series.items(), (BLUE, GREEN, ORANGE), "osD", strict=False):
        ax.plot(
            range(1, len(rows) + 1),
            [float(call["wall_ms"]) for call in found],
            marker=marker,
            color=colour,
            linewidth=1.0,
            label=label,
        )
    ax.set_yscale("log")
    ax.set_xticks(range(1, len(rows) + 1), [str(count) for count in rows], rotation=45)
    ax.set_xlabel("rows of each call, in order")
    ax.set_ylabel("wall time of the call, ms")
    ax.grid(True, axis="y")
    ax.legend(frameon=False, loc="upper center", ncols=3, bbox_to_anchor=(0.5, 1.16))
    slow = {label: sum(float(call["wall_ms"]) > 20 for call in found) for label, found in series.items()}
    return Chart(
        fig,
        caption=caption,
        alt="Wall time of each call on a logarithmic axis. Calls above 20 ms: "
        + ", ".join(f"{label} {count}" for label, count in slow.items())
        + f" of {len(rows)}.",
        header=("Call", "Rows", *(f"{label}, ms" for label in series)),
        rows=[
            (
                f"{place + 1}",
                f"{count}",
                *(f"{float(found[place]['wall_ms']):,.2f}" for found in series.values()),
            )
            for place, count in enumerate(rows)
        ],
        source=source,
    )


def step_families(
    steps: Mapping[str, Mapping[str, Any]], *, caption: str, source: Recording | None = None
) -> Chart:
    """Draw the kernel time of a step by whose kernels they are, one bar a way to run it.

    Parameters
    ----------
    steps
        Under each label ``kernels`` (``name``, ``op``, ``count``, ``us`` summed) and ``step_ms``.
    caption
        What the reader should see.
    source
        The recording that it comes from.

    Raises
    ------
    ValueError
        There is no step, or one without kernels.
    """
    if not steps or not all(found["kernels"] for found in steps.values()):
        raise ValueError("each step needs its kernels; one has none, or there is no step")
    fig, ax = figure(5.8, 0.62 * len(steps) + 1.5)
    table = []
    for place, (label, found) in enumerate(steps.items()):
        left = 0.0
        for name, colour in _FAMILIES.items():
            mine = [kernel for kernel in found["kernels"] if family(kernel) == name]
            ms = sum(float(kernel["us"]) for kernel in mine) / 1000
            count = sum(int(kernel["count"]) for kernel in mine)
            ax.barh(
                -place,
                ms,
                left=left,
                color=colour,
                height=0.62,
                label=name if place == 0 else None,
                alpha=0.85,
            )
            left += ms
            table.append((label, name, f"{count}", f"{ms:.2f}"))
        launches = sum(int(kernel["count"]) for kernel in found["kernels"])
        ax.annotate(
            f"{launches} launches",
            (left, -place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=INK,
        )
        table.append((label, "all kernels", f"{launches}", f"{left:.2f}"))
        table.append((label, "step, unprofiled", "", f"{float(found['step_ms']):.2f}"))
    widest = max(sum(float(k["us"]) for k in found["kernels"]) for found in steps.values()) / 1000
    ax.set_xlim(0, widest * 1.22)
    ax.set_yticks([-place for place in range(len(steps))], list(steps))
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("kernel time of one step, ms")
    ax.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.4, -0.28), fontsize=8.5)
    return Chart(
        fig,
        caption=caption,
        alt="Stacked bars of kernel time in ms: "
        + "; ".join(f"{row[0]}, {row[1]} {row[3]} in {row[2]} launches" for row in table if row[2])
        + ".",
        header=("Step", "Kernels", "Launches", "ms"),
        rows=table,
        source=source,
    )


def repaid(
    eager_ms: float,
    compiled_ms: float,
    costs_s: Mapping[str, float],
    *,
    caption: str,
    source: Recording | None = None,
) -> Chart:
    """Draw the time spent against the steps done, as written and compiled, from each compilation's cost on.

    Parameters
    ----------
    eager_ms, compiled_ms
        One step.
    costs_s
        Seconds that compiling takes, under a label each.
    caption
        What the reader should see.
    source
        The recording that the figures come from.

    Raises
    ------
    ValueError
        The compiled step is not the faster one: the lines never cross.
    """
    saved_s = (eager_ms - compiled_ms) / 1000
    if saved_s <= 0:
        raise ValueError(f"a compiled step of {compiled_ms} ms never repays against one of {eager_ms} ms")
    points = {label: cost / saved_s for label, cost in costs_s.items()}
    reach = 1.6 * max(points.values())
    fig, ax = figure(5.8, 3.0)
    ax.plot([0, reach], [0, reach * eager_ms / 1000], color=BLUE)
    ax.annotate(
        "as written",
        (reach, reach * eager_ms / 1000),
        xytext=(-4, -2),
        textcoords="offset points",
        color=BLUE,
        ha="right",
        va="bottom",
    )
    for (label, cost), colour in zip(costs_s.items(), (ORANGE, GREEN, PURPLE), strict=False):
        ax.plot([0, reach], [cost, cost + reach * compiled_ms / 1000], color=colour)
        ax.plot([points[label]], [points[label] * eager_ms / 1000], "o", color=colour)
        ax.annotate(
            f"{label}: {math.ceil(points[label]):,} steps",
            (points[label], points[label] * eager_ms / 1000),
            # Above and to the left of the last crossing, below and to the right of the others, no line runs.
            xytext=(-8, 8) if points[label] == max(points.values()) else (8, -12),
            ha="right" if points[label] == max(points.values()) else "left",
            textcoords="offset points",
            color=colour,
        )
    ax.set_xlabel("steps")
    ax.set_ylabel("s since the start")
    ax.set_xlim(0)
    ax.set_ylim(0)
    ax.grid(True)
    return Chart(
        fig,
        caption=caption,
        alt="Straight lines of time against steps. The compiled ones start later and rise less; they cross the "
        "other "
        + " and ".join(f"after {math.ceil(n):,} steps ({label})" for label, n in points.items())
        + ".",
        header=("Compiled with", "Cost", "Saved a step", "Repaid after, steps"),
        rows=[
            (label, f"{cost:.1f} s", unbroken_ms(saved_s * 1000), f"{math.ceil(points[label]):,}")
            for label, cost in costs_s.items()
        ],
        source=source,
    )
