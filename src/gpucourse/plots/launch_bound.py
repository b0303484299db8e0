"""Charts and tables of the chapter "A hundred tiny additions": a chain of kernels, its host and its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpucourse import plots

if TYPE_CHECKING:
    from gpucourse.recording import Recording

__all__ = [
    "after_a_wait",
    "by_elements",
    "by_kernels",
    "captures",
    "launch_costs",
    "steps",
    "three_times",
    "timeline",
    "updates",
    "ways",
]

_ZOOM = 6  # kernels in the enlarged part: with more, the arrows can no longer be told apart


def _ms(value: float | None) -> str:
    return "unavailable" if value is None else plots.unbroken_ms(value)


def _bare_ms(value: float) -> str:
    """Write ms without the unit, for a table too wide to say it in each cell."""
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _us(value: float | None) -> str:
    return "unavailable" if value is None else plots.unbroken_ms(value / 1e3)


def _share(measured: float, predicted: float) -> str:
    return f"{(measured / predicted - 1) * 100:+.0f}\N{NO-BREAK SPACE}%"


# --- three times of one call ------------------------------------------------------------------------------


def three_times(source: Recording) -> plots.Table:
    """List what the additions, the product and an empty call cost the program, the host and the device.

    Parameters
    ----------
    source
        The recording `hundred_additions`: for each ``elapsed_ms``, ``host_ms`` and ``device_ms``.
    """
    labels = {
        "additions": "a hundred additions on 1,024 floats",
        "product": "one product of width 2,048",
        "nothing": "nothing between the events",
    }
    return plots.Table(
        ("Call, fp32", "Elapsed", "Host", "Device alone"),
        tuple(
            (text, *(_ms(source[key][field]) for field in ("elapsed_ms", "host_ms", "device_ms")))
            for key, text in labels.items()
        ),
        caption="What the program pays, what the host needs to launch it, what the device needs once all is queued",
        source=source,
    )


# --- the measured timeline -------------------------------------------------------------------------------


def timeline(source: Recording) -> plots.Chart:
    """Draw a chain of small kernels and one product as the profiler recorded them, launches and kernels.

    Parameters
    ----------
    source
        The recording `hundred_timeline`: ``chain`` and ``product``, each a list of kernels with ``launch_us``
        and ``launch_duration_us`` (None where unknown), ``start_us`` and ``duration_us``.

    Returns
    -------
    Chart
        Above, all of both on one axis; below, the first kernels of the chain enlarged. Times count from the
        chain's, and the product's, first launch.

    Raises
    ------
    ValueError
        One of the two holds no kernel.
    """
    chain, product = (_from_first_launch(source[key], key) for key in ("chain", "product"))
    fig, (whole, zoom) = plots.figure(height=4.2, nrows=2, height_ratios=(3, 2))
    lanes = (("additions: launches", chain), ("additions: kernels", chain), ("product: kernels", product))
    for row, (label, kernels) in enumerate(lanes):
        for kernel in kernels:
            _bar(whole, row, kernel, launches=label.endswith("launches"))
    whole.set_yticks(range(len(lanes)), labels=[label for label, _ in lanes])
    whole.set_ylim(len(lanes) - 0.5, -0.5)
    whole.set_xlim(left=0)

    first = chain[:_ZOOM]
    for kernel in first:
        _bar(zoom, 0, kernel, launches=True)
        _bar(zoom, 1, kernel, launches=False)
        if kernel["launch_us"] is not None:
            zoom.annotate(
                "",
                (kernel["start_us"], 0.68),
                (kernel["launch_us"], 0.32),
                arrowprops={"arrowstyle": "->", "color": plots.GREY, "linewidth": 0.9},
            )
    zoom.set_yticks([0, 1], labels=["launches", "kernels"])
    zoom.set_ylim(1.5, -0.5)
    zoom.set_xlim(left=0)
    zoom.set_title(f"the first {len(first)} additions, enlarged", loc="left", fontsize=10)
    zoom.set_xlabel("µs since the first launch, under the profiler")
    for axes in (whole, zoom):
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)

    rows = [
        (
            name,
            k,
            "unknown" if kernel["launch_us"] is None else f"{kernel['launch_us']:.1f}",
            f"{kernel['start_us']:.1f}",
            f"{kernel['duration_us']:.2f}",
        )
        for name, kernels in (("addition", chain), ("product", product))
        for k, kernel in enumerate(kernels, start=1)
    ]
    return plots.Chart(
        fig,
        caption=(
            "Where the time is. The additions' kernels are thin lines with the device idle between them; each "
            "begins about when its own launch ends. The product is one bar."
        ),
        alt=(
            "Three lanes against time. The launches of the additions follow each other at regular distances, "
            "and so do their kernels, each a thin line with a wide gap before the next. The product fills its "
            "lane without a gap. Below, the first few enlarged: an arrow from each launch to its kernel."
        ),
        header=("What", "Number", "Launch, µs", "Start, µs", "Duration, µs"),
        rows=rows,
        source=source,
    )


def _bar(axes: Any, row: int, kernel: Mapping[str, Any], *, launches: bool) -> None:
    start_us, length_us, colour = kernel["start_us"], kernel["duration_us"], plots.BLUE
    if launches:
        start_us, length_us, colour = kernel["launch_us"], kernel["launch_duration_us"], plots.ORANGE
    if start_us is not None:
        axes.barh(
            row, length_us or 0.0, left=start_us, height=0.6, color=colour, edgecolor=colour, linewidth=0.6
        )


def _from_first_launch(kernels: Sequence[Mapping[str, Any]], what: str) -> list[dict[str, Any]]:
    if not kernels:
        raise ValueError(f"{what} holds no kernel: the profiler recorded nothing, so there is no timeline")
    known = [kernel["launch_us"] for kernel in kernels if kernel["launch_us"] is not None]
    zero = min([*known, kernels[0]["start_us"]])
    return [
        {
            **kernel,
            "launch_us": None if kernel["launch_us"] is None else kernel["launch_us"] - zero,
            "start_us": kernel["start_us"] - zero,
        }
        for kernel in kernels
    ]


# --- the sweep and its prediction ------------------------------------------------------------------------

_CURVES = (
    ("elapsed_ms", "as launched", plots.ORANGE, "o"),
    ("device_ms", "device alone", plots.BLUE, "s"),
    ("graph_ms", "one graph", plots.GREEN, "^"),
)


def by_elements(source: Recording, predictions: Mapping[tuple[int, int], Mapping[str, float]]) -> plots.Chart:
    """Draw a chain's time against the elements of its tensor, beside what was predicted.

    Parameters
    ----------
    source
        The recording `chain_sweep`; its chains of 100 kernels are drawn.
    predictions
        (kernels, elements) to ``predicted_ms``, by one pace of the host for all chains, and ``own_pace_ms``, by
        the pace of the very launches.

    Returns
    -------
    Chart
        Both axes logarithmic; the table holds the residual, measured over predicted less one.
    """
    rows = sorted(
        (row for row in source["chains"] if row["kernels"] == 100), key=lambda row: int(row["elements"])
    )
    return _sweep(
        source,
        rows,
        "elements",
        predictions,
        xlabel="elements of the tensor (fp32)",
        caption=(
            "One hundred additions. As launched, the time stays level until a kernel outlasts a launch, then "
            "follows the device. The dashed line is the queue's, from the host's pace and one addition alone."
        ),
        alt=(
            "Line chart, both axes logarithmic: time of a hundred additions against elements. The curve as "
            "launched is level at first and then rises to meet the device's own, which lies far below it at "
            "the small end. The graph's curve runs a little below the device's. The dashed prediction follows "
            "the curve as launched."
        ),
    )


def by_kernels(source: Recording, predictions: Mapping[tuple[int, int], Mapping[str, float]]) -> plots.Chart:
    """Draw the time of chains on 1,024 elements against their number of kernels, beside what was predicted.

    Parameters
    ----------
    source
        The recording `chain_sweep`; its chains on 1,024 elements are drawn.
    predictions
        As in `by_elements`.

    Returns
    -------
    Chart
        Both axes logarithmic; the table holds the residual, measured over predicted less one.
    """
    rows = sorted(
        (row for row in source["chains"] if row["elements"] == 1024), key=lambda row: int(row["kernels"])
    )
    return _sweep(
        source,
        rows,
        "kernels",
        predictions,
        xlabel="additions in the chain (1,024 elements)",
        caption=(
            "From one addition to four hundred. As launched, a long chain grows by a launch an addition, in a graph "
            "by a short kernel; the shortest lie a little above the dashed prediction."
        ),
        alt=(
            "Line chart, both axes logarithmic: time against the number of additions. The curve as launched is "
            "the highest, the device's own and the graph's lie below it; the graph's is nearly level at first. "
            "The dashed prediction lies on the curve as launched, a little below it at the short end."
        ),
    )


def _sweep(
    source: Recording,
    rows: Sequence[Mapping[str, Any]],
    key: str,
    predictions: Mapping[tuple[int, int], Mapping[str, float]],
    *,
    xlabel: str,
    caption: str,
    alt: str,
) -> plots.Chart:
    if not rows:
        raise ValueError(f"the sweep holds no chain to draw against its {key}")
    sizes = [int(row[key]) for row in rows]
    made = [predictions[row["kernels"], row["elements"]] for row in rows]
    fig, ax = plots.figure(height=3.5)
    ax.set_xscale("log", base=2 if key == "elements" else 10)
    ax.set_yscale("log")
    for field, label, colour, marker in _CURVES:
        ax.plot(sizes, [row[field] for row in rows], marker + "-", color=colour, label=label)
    ax.plot(
        sizes,
        [prediction["predicted_ms"] for prediction in made],
        "--",
        color=plots.INK,
        linewidth=1.3,
        label="predicted, as launched",
    )
    ax.legend(frameon=False, loc="upper left")
    ax.set_xticks(sizes[:: 3 if key == "elements" else 1], labels=_ticks(sizes, key))
    ax.set_xticks([], minor=True)
    ax.set_xlabel(xlabel)
    ax.set_ylabel("ms")
    ax.grid(axis="y")
    return plots.Chart(
        fig,
        caption=caption,
        alt=alt,
        header=(
            key.capitalize(),
            "As launched",
            "Predicted",
            "Residual",
            "By its own pace",
            "Residual",
            "Host",
            "Device alone",
            "One graph",
        ),
        rows=[
            (
                f"{size:,}",
                _ms(row["elapsed_ms"]),
                _ms(prediction["predicted_ms"]),
                _share(row["elapsed_ms"], prediction["predicted_ms"]),
                _ms(prediction["own_pace_ms"]),
                _share(row["elapsed_ms"], prediction["own_pace_ms"]),
                *(_ms(row[field]) for field in ("host_ms", "device_ms", "graph_ms")),
            )
            for size, row, prediction in zip(sizes, rows, made, strict=True)
        ],
        source=source,
    )


def _ticks(sizes: Sequence[int], key: str) -> list[str]:
    if key == "kernels":
        return [f"{size:,}" for size in sizes]
    return [f"{size >> 20} Mi" if size >= 2**20 else f"{size >> 10} Ki" for size in sizes[::3]]


# --- where the host's microseconds go --------------------------------------------------------------------


def launch_costs(source: Recording) -> plots.Chart:
    """Draw what calls that do more and more of a launch's work cost the host.

    Parameters
    ----------
    source
        The recording `launch_costs`: ``calls``, a list of ``call``, ``what`` and ``host_us``.

    Returns
    -------
    Chart
        Bars in µs, in the recording's order.
    """
    calls = source["calls"]
    fig, ax = plots.figure(height=0.8 + 0.28 * len(calls))
    for k, row in enumerate(calls):
        ax.barh(k, row["host_us"], height=0.66, color=plots.ORANGE if row["launches"] else plots.GREY)
        ax.annotate(_us(row["host_us"]), (row["host_us"], k), (4, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(calls)), labels=[row["call"] for row in calls])
    ax.set_ylim(len(calls) - 0.4, -0.6)
    ax.set_xlim(0, 1.2 * max(row["host_us"] for row in calls))
    ax.set_xlabel("host's time a call, µs (orange: launches a kernel)")
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return plots.Chart(
        fig,
        caption="What the host pays for, one call at a time: each line does a part of what y + 1 does, or more.",
        alt=(
            "Horizontal bars: microseconds of the host's time for calls from an empty Python function to an "
            "addition that autograd records. Calls that launch a kernel are the longer ones."
        ),
        header=("Call", "What it does", "Host's time"),
        rows=[(row["call"], row["what"], _us(row["host_us"])) for row in calls],
        source=source,
    )


# --- before and after ------------------------------------------------------------------------------------


def ways(source: Recording) -> plots.Table:
    """List the ways of doing a hundred additions, and the product, by launches, host, device and elapsed time.

    Parameters
    ----------
    source
        The recording `hundred_ways`: ``ways``, a list of ``way``, ``launches``, ``host_ms``, ``device_ms`` and
        ``elapsed_ms``; one that cannot run on the recording's machine has None for its times.
    """
    return plots.Table(
        ("Way", "Launches", "Host", "Device alone", "Elapsed"),
        tuple(
            (
                row["way"],
                f"{row['launches']:,}",
                *(_ms(row[field]) for field in ("host_ms", "device_ms", "elapsed_ms")),
            )
            for row in source["ways"]
        ),
        caption="One hundred additions on 1,024 floats, and one product of width 2,048, fp32",
        source=source,
    )


# --- graphs ----------------------------------------------------------------------------------------------


def captures(source: Recording) -> plots.Table:
    """List calls and whether a graph can hold them.

    Parameters
    ----------
    source
        The recording `what_a_graph_refuses`: ``calls``, a list of ``call`` and ``error``, None where it was
        captured.
    """
    return plots.Table(
        ("Call", "Under capture"),
        tuple((row["call"], row["error"] or "captured") for row in source["calls"]),
        caption="What a CUDA graph takes, and what it refuses",
        source=source,
    )


# --- the night -------------------------------------------------------------------------------------------


def updates(source: Recording) -> plots.Table:
    """List the ways to run one AdamW step over the night's parameters.

    Parameters
    ----------
    source
        The recording `night_launches`; ``updates`` has for each kind ``launches``, ``host_ms``, ``busy_ms`` and
        ``elapsed_ms``.
    """
    return plots.Table(
        ("AdamW", "Launches", "Host", "Device busy", "Elapsed"),
        tuple(
            (
                kind,
                f"{row['launches']:,}",
                *(_ms(row[field]) for field in ("host_ms", "busy_ms", "elapsed_ms")),
            )
            for kind, row in source["updates"].items()
        ),
        caption=f"One AdamW step over {source['tensors']} tensors with {source['parameters'] / 1e6:.1f} M parameters",
        source=source,
    )


def steps(source: Recording) -> plots.Table:
    """List whole training steps of the night's model, and one of them as a CUDA graph.

    Parameters
    ----------
    source
        The recording `night_launches`: ``steps``, and ``graph``, None where the step could not be captured (then
        ``graph_refused`` says why). The graph's own ``busy_ms`` is shown where it was traced.
    """
    rows = [
        (
            f"{row['rows']}",
            row["precision"],
            row["optimizer"],
            f"{row['launches']:,}",
            *(_bare_ms(row[field]) for field in ("host_ms", "busy_ms", "elapsed_ms")),
            f"{row['tokens_per_s']:,.0f}",
        )
        for row in source["steps"]
    ]
    graph = source["graph"]
    one = next(row for row in source["steps"] if row["rows"] == 1 and row["optimizer"] == "fused")
    rows.append(
        (
            "1",
            one["precision"],
            "fused, all as a graph",
            "1",
            *(
                (
                    _bare_ms(graph["host_ms"]),
                    _bare_ms(graph["busy_ms"]) if "busy_ms" in graph else "not traced",
                    _bare_ms(graph["elapsed_ms"]),
                    f"{graph['tokens_per_s']:,.0f}",
                )
                if graph
                else (str(source["graph_refused"]), "unavailable", "unavailable", "unavailable")
            ),
        )
    )
    return plots.Table(
        ("Rows", "dtype", "AdamW", "Launches", "Host, ms", "Busy, ms", "Elapsed, ms", "Tokens/s"),
        tuple(rows),
        caption="One training step of the night's model on rows of 1,024 tokens",
        source=source,
    )


def after_a_wait(source: Recording) -> plots.Table:
    """List what one addition costs the host, by what the host did just before it.

    Parameters
    ----------
    source
        The recording `after_a_wait`: rows with ``after`` and, in µs, ``host_us`` and ``quartiles_us``.
    """
    return plots.Table(
        ("Just before it", "Host, µs", "Middle half, µs"),
        tuple(
            (row["after"], f"{row['host_us']:.1f}", "{:.1f} to {:.1f}".format(*row["quartiles_us"]))
            for row in source["after"]
        ),
        caption="The host's time for one y + 1",
        source=source,
    )
