"""Charts and tables of the chapter "Measure the device clock": what each timer reads, and why."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpucourse import hardware, plots
from gpucourse.units import format_rate

if TYPE_CHECKING:
    from gpucourse.recording import Recording
    from gpucourse.simulator import Span

__all__ = [
    "achieved_rates",
    "clock_speeds",
    "first_calls",
    "hidden_waits",
    "instrument",
    "judgement",
    "lanes",
    "peers",
    "readings_per_call",
    "same_launches_us",
    "ways",
    "where_to_wait",
]


def _us(value: float | None) -> str:
    return "unavailable" if value is None else plots.unbroken_ms(value / 1e3)


# --- the simulated queue -----------------------------------------------------------------------------------

_COLOURS = {
    "launch": plots.ORANGE,
    "record": plots.PURPLE,
    "wait": plots.GREY,
    "work": plots.GREY,
    "kernel": plots.BLUE,
    "spin": plots.GREY,
}


def lanes(
    history: Sequence[Span], timers: Mapping[str, tuple[float, float]], *, caption: str, alt: str
) -> plots.Chart:
    """Draw what host and streams did as lanes, and each timer's interval below.

    Parameters
    ----------
    history
        `SimulatedDevice.history`.
    timers
        By name: the two instants that the timer subtracts, in µs since the simulation began.
    caption, alt
        As in `Chart`.

    Returns
    -------
    Chart
        Its table lists every span, then every timer's reading.

    Raises
    ------
    ValueError
        The history is empty.
    """
    if not history:
        raise ValueError("the history is empty: launch something on the simulated device first")
    names = ["host", *sorted({span.lane for span in history} - {"host"})]
    fig, ax = plots.figure(height=1.1 + 0.42 * (len(names) + len(timers)))
    last = max(span.end_us for span in history)
    for span in history:
        row = names.index(span.lane)
        if span.kind == "event":
            ax.plot([span.start_us] * 2, [row - 0.42, row + 0.42], color=plots.PURPLE, linewidth=2)
            continue
        if span.end_us == span.start_us:
            continue
        quiet = span.kind in ("wait", "work", "spin")
        ax.barh(
            row,
            span.end_us - span.start_us,
            left=span.start_us,
            height=0.62,
            color=_COLOURS[span.kind],
            alpha=0.45 if quiet else 1.0,
            edgecolor=plots.INK,
            linewidth=0.5,
        )
        text = "waits" if span.kind == "wait" else span.name
        if span.end_us - span.start_us > 0.018 * last * len(text):  # about the width of a letter
            middle = (span.start_us + span.end_us) / 2
            ax.text(middle, row, text, ha="center", va="center", fontsize=8, color=plots.INK)
    for k, (begin, end) in enumerate(timers.values()):
        row = len(names) + k
        ax.plot([begin, end], [row, row], "|-", color=plots.GREEN, markersize=9)
        ax.annotate(
            _us(end - begin), (end, row), (6, 0), textcoords="offset points", va="center", color=plots.INK
        )
    ax.set_yticks(range(len(names) + len(timers)), labels=[*names, *timers])
    ax.set_ylim(len(names) + len(timers) - 0.4, -0.6)
    ax.set_xlim(0, last * 1.18)
    ax.set_xlabel("µs since the first launch (simulated)")
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    rows: list[tuple[str, ...]] = [
        (span.lane, span.kind, span.name, f"{span.start_us:g}", f"{span.end_us:g}") for span in history
    ]
    rows += [("timer", "reading", label, f"{begin:g}", f"{end:g}") for label, (begin, end) in timers.items()]
    return plots.Chart(
        fig, caption=caption, alt=alt, header=("Lane", "What", "Name", "Start, µs", "End, µs"), rows=rows
    )


# --- host clock and device clock ---------------------------------------------------------------------------


def achieved_rates(source: Recording) -> plots.Chart:
    """Draw the rate that each of three clocks claims for an n x n product, and the card's limit.

    Parameters
    ----------
    source
        The recording `three_clocks`.

    Returns
    -------
    Chart
        Both axes logarithmic; the limit is left out for a GPU without a record.
    """
    rows = list(source["rows"].values())
    widths = [row["n"] for row in rows]
    gpu = str(source.provenance.get("gpu"))
    record = hardware.find(gpu)
    fig, ax = plots.figure(height=3.4)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    curves = (
        ("wall", "host clock, read at once", plots.ORANGE, (-6, 4), "right"),
        ("waited", "host clock, after synchronize", plots.GREEN, (8, -12), "left"),
        ("pair", "event pair", plots.BLUE, (0, -16), "center"),
    )
    for key, text, colour, offset, side in curves:
        rates = [row[f"{key}_tflops"] for row in rows]
        ax.plot(widths, rates, "o-", color=colour)
        at = {"wall": -2, "waited": 1, "pair": -2}[key]
        ax.annotate(text, (widths[at], rates[at]), offset, textcoords="offset points", color=colour, ha=side)
    limit = None
    if record is not None:
        limit = record.peak_flops_at_clock("fp32")
        ax.axhline(limit / 1e12, color=plots.GREY, linestyle="--")
        ax.annotate(
            f"the card's limit: {format_rate(limit)}",
            (widths[-1], limit / 1e12),
            (0, 5),
            textcoords="offset points",
            ha="right",
            color=plots.INK,
        )
    ax.set_xticks(widths, labels=[f"{n:,}" for n in widths])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("width n of the fp32 product")
    ax.set_ylabel("2n³ / reading, TFLOP/s")

    def verdict(row: Mapping[str, Any]) -> str:
        if limit is None:
            return f"limit unavailable for {gpu}"
        return "impossible" if row["wall_tflops"] * 1e12 > limit else "possible"

    return plots.Chart(
        fig,
        caption=(
            "The rate that each clock claims. The clock that does not wait passes what the card can do at all; "
            "the other two bend and stay below."
        ),
        alt=(
            "Line chart, both axes logarithmic: teraflops a second against the width of a product. The host's "
            "clock without waiting rises far above the dashed limit. The host's clock after "
            "synchronize and the event pair rise together and level off below the limit."
        ),
        header=(
            "Width",
            "Launches",
            "Read at once",
            "After synchronize",
            "Event pair",
            "Rate read at once",
            "Judgement",
        ),
        rows=[
            (
                f"{row['n']:,}",
                row["launches"],
                *(plots.unbroken_ms(row[f"{key}_ms"]) for key in ("wall", "waited", "pair")),
                format_rate(row["wall_tflops"] * 1e12),
                verdict(row),
            )
            for row in rows
        ],
        source=source,
    )


def where_to_wait(source: Recording) -> plots.Table:
    """List what the same product reads with the wait in other places.

    Parameters
    ----------
    source
        The recording `where_to_wait`.
    """
    labels = {
        "pair": ("event pair, one synchronize after the end event", "the product, and its launch"),
        "host_waited": (
            "host clock, synchronize before each reading",
            "the product, its launch, the host's return",
        ),
        "pair_behind_others": ("event pair, somebody else's product pending", "the product"),
        "host_behind_others": ("host clock, the first synchronize left out", "somebody else's product too"),
        "wait_before_end": ("event pair, synchronize before the end event", "the host's return too"),
        "pair_around_a_pause": ("event pair around two products, 5 ms of host between", "an idle device too"),
    }
    rows = [(text, _us(source[f"{key}_us"]), what) for key, (text, what) in labels.items()]
    rows.append(("event pair, read at once", str(source["read_at_once"]), "nothing"))
    caption = "One fp32 product of width 2,048, the wait in seven places"
    if source["pair_us"] > source["host_waited_us"]:
        caption += (
            ". The first reads more than the second, in which there is more: its turn comes after the way with the "
            "pause, and a host that has rested may launch more slowly"
        )
    return plots.Table(
        ("Timer", "Reading", "What is in it"),
        tuple(rows),
        caption=caption,
        source=source,
    )


# --- first calls and hidden waits --------------------------------------------------------------------------


def first_calls(source: Recording) -> plots.Chart:
    """Draw the first calls of a fresh process, in order, each with all that it caused.

    Parameters
    ----------
    source
        The recording `first_calls`.

    Returns
    -------
    Chart
        Time on a logarithmic axis.
    """
    calls = source["calls"]
    labels = [row["call"] for row in calls]
    first = {label: "call " not in label or label.endswith("call 1") for label in labels}
    fig, ax = plots.figure(height=0.8 + 0.24 * len(calls))
    ax.set_xscale("log")
    left = min(row["ms"] for row in calls) / 2
    for k, row in enumerate(calls):
        colour = plots.ORANGE if first[row["call"]] else plots.BLUE
        ax.barh(k, row["ms"] - left, left=left, height=0.7, color=colour)
        ax.annotate(
            plots.unbroken_ms(row["ms"]),
            (row["ms"], k),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=plots.INK,
        )
    ax.set_yticks(range(len(calls)), labels=labels, fontsize=8)
    ax.set_ylim(len(calls) - 0.4, -0.6)
    ax.set_xlim(left, max(row["ms"] for row in calls) * 6)
    ax.set_xlabel("host clock after synchronize, ms")
    return plots.Chart(
        fig,
        caption="A fresh Python's first calls, in order. Orange: the first of its kind.",
        alt=(
            "Bar chart of milliseconds on a logarithmic axis, one bar a call. The first call of an operation or "
            "a precision stands far above its repetitions, that of another width only a little."
        ),
        header=("Call", "Time", "Allocations asked of the driver"),
        rows=[
            (
                row["call"],
                plots.unbroken_ms(row["ms"]),
                "not counted" if row["driver_allocations"] is None else row["driver_allocations"],
            )
            for row in calls
        ],
        source=source,
    )


def hidden_waits(source: Recording) -> plots.Table:
    """List which calls hold the host, as torch's warning and the host's clock tell it.

    Parameters
    ----------
    source
        The recording `hidden_waits`.
    """
    pending = source["pending_ms"]
    rows = []
    for row in source["calls"]:
        waited = row["host_ms"] > pending / 2
        warned = f"{row['warnings']} ×" if row["warnings"] else "–"
        rows.append(
            (row["call"], warned, plots.unbroken_ms(row["host_ms"]), "waits" if waited else "goes on")
        )
    return plots.Table(
        ("Call", "Warning", "Host time", "The host"),
        tuple(rows),
        caption=f"Calls made while {plots.unbroken_ms(pending)} of work are pending",
        source=source,
    )


# --- short kernels -----------------------------------------------------------------------------------------


def readings_per_call(source: Recording) -> plots.Chart:
    """Draw the reading per call against the number of calls between the two events.

    Parameters
    ----------
    source
        The recording `launches_between`.

    Returns
    -------
    Chart
        Both axes logarithmic.
    """
    counts = source["counts"]
    fig, ax = plots.figure(height=3.3)
    ax.set_xscale("log")
    ax.set_yscale("log")
    for key, text, colour in (
        ("spin_us", "queued behind a spin kernel", plots.ORANGE),
        ("graph_us", "CUDA graph", plots.BLUE),
    ):
        values = source[key]
        ax.plot(counts, values, "o-", color=colour)
        ax.annotate(
            text, (counts[4], values[4]), (4, 8), textcoords="offset points", color=colour, fontsize=9
        )
    ax.plot([1], [source["idle_us"]], "s", color=plots.PURPLE)
    ax.annotate(
        "one pair, idle queue",
        (1, source["idle_us"]),
        (8, 0),
        textcoords="offset points",
        va="center",
        color=plots.PURPLE,
    )
    if source["kernel_us"] is not None:
        ax.axhline(source["kernel_us"], color=plots.GREY, linestyle="--")
        ax.annotate(
            "the kernel's own span, by the profiler",
            (counts[0], source["kernel_us"]),
            (0, -12),
            textcoords="offset points",
            color=plots.INK,
        )
        ax.set_ylim(bottom=source["kernel_us"] * 0.7)
    ax.set_xticks(counts, labels=[str(n) for n in counts])
    ax.set_xticks([], minor=True)
    ticks = [1, 2, 5, 10, 20, 50]
    ax.set_yticks(ticks, labels=[str(value) for value in ticks])
    ax.set_yticks([], minor=True)
    ax.set_xlabel("calls between the two events")
    ax.set_ylabel("reading / calls, µs")
    return plots.Chart(
        fig,
        caption=(
            "One tiny addition, by the number of calls between two events: what the events cost is shared by more "
            "calls, and what a launch costs the device goes when the launches become one."
        ),
        alt=(
            "Line chart, both axes logarithmic: microseconds a call against the number of calls between two "
            "events. One pair on an idle queue stands highest. Calls behind a spin kernel fall and level off "
            "above one microsecond; calls in a CUDA graph fall further, towards a dashed line, the kernel's own "
            "span."
        ),
        header=("Calls", "Behind a spin kernel, µs", "CUDA graph, µs"),
        rows=[
            (n, f"{spin:.2f}", f"{graph:.2f}")
            for n, spin, graph in zip(counts, source["spin_us"], source["graph_us"], strict=True)
        ],
        source=source,
    )


def _signed(us: float) -> str:
    return f"{us:+.2f}".replace("-", "\N{MINUS SIGN}")


_WAYS = {
    "pair_idle": "pair, idle queue",
    "pair_spin": "pair, spin",
    "spin_20": "20 calls, spin",
    "graph_20": "graph of 20",
    "graph_40": "graph of 40",
    "time_cuda": "time_cuda",
    "do_bench": "do_bench (cold)",
}
_CASES = {
    "add_1Ki_fp32": "add 1 Ki fp32",
    "add_1Mi_fp32": "add 1 Mi fp32",
    "add_16Mi_fp32": "add 16 Mi fp32",
    "matmul_256_bf16": "product 256 bf16",
    "matmul_2048_bf16": "product 2,048 bf16",
    "matmul_2048_fp32": "product 2,048 fp32",
}


def ways(source: Recording, *, against: str = "") -> plots.Table:
    """List each kernel by each way of timing it.

    Parameters
    ----------
    source
        The recording `short_kernels`.
    against
        "" gives the readings; "kernel_us" the reading under the profiler less the profiler's own kernel time
        of the same launches; "period_us" less the time from the first start to the last end, per call.

    Raises
    ------
    ValueError
        `against` is none of these.
    """
    if against not in ("", "kernel_us", "period_us"):
        raise ValueError(f'against is "", "kernel_us" or "period_us", found {against!r}')
    cases = source["rows"]
    shown = [way for way in _WAYS if any(way in row for row in cases.values())]
    if against == "period_us":
        shown = [way for way in shown if way not in ("time_cuda", "do_bench")]

    def cell(found: Mapping[str, Any] | None) -> str:
        if found is None:
            return "not measured"
        if not against:
            return _us(found["plain_us"])
        if found.get(against) is None:
            return "unavailable"
        return _signed(found["profiled_us"] - found[against])

    rows = [(_WAYS[way], *(cell(row.get(way)) for row in cases.values())) for way in shown]
    if not against:
        rows.append(
            ("profiler, in the graph", *(_us(row["graph_40"]["kernel_us"]) for row in cases.values()))
        )
    captions = {
        "": (
            "Six kernels, read in every way while nothing watches; last, the profiler's kernel time of the "
            "launches in the graph"
        ),
        "kernel_us": "Reading under the profiler less its kernel time of the same launches, µs a call",
        "period_us": "Reading under the profiler less its first start to last end, same launches, µs a call",
    }
    header = ("Way", *(_CASES.get(label, label) for label in cases))
    return plots.Table(header, tuple(rows), caption=captions[against], source=source)


def instrument(source: Recording) -> plots.Table:
    """List device time, elapsed time and host time of the same calls.

    Parameters
    ----------
    source
        The recording `by_the_instrument`.
    """
    labels = {
        "add_1Ki": "add, 1 Ki",
        "add_16Mi": "add, 16 Mi",
        "matmul_2048": "product, 2,048",
        "block_1_token": "feed-forward block, 1 token",
        "block_8192_tokens": "feed-forward block, 8,192 tokens",
    }
    rows = [
        (
            labels.get(key, key),
            plots.unbroken_ms(timing["median_ms"]),
            plots.unbroken_ms(timing["elapsed_ms"]),
            plots.unbroken_ms(timing["host_ms"]),
            f"{timing['median_ms'] / timing['elapsed_ms']:.0%}".replace("%", "\N{NO-BREAK SPACE}%"),
        )
        for key, timing in source.items()
    ]
    return plots.Table(
        ("Call, fp32", "Device time", "Elapsed", "Host", "The device works for"),
        tuple(rows),
        caption="Device time and elapsed time are two measurements; last, the first as a share of the second",
        source=source,
    )


GOAL_SHARE, GOAL_US, LONG_US = 0.03, 0.4, 20.0  # what time_cuda sets itself: 3 %, or 0.4 µs below 20 µs

_METHODS = (
    "time_cuda",
    "time_cuda, cold",
    "do_bench_cudagraph",
    "do_bench",
    "torch.utils.benchmark",
    "one event pair",
)


def judgement(row: Mapping[str, Any]) -> tuple[str, float | None]:
    """Hold one timer's error on one call against the goal: 3 % from 20 µs on, 0.4 µs below.

    Parameters
    ----------
    row
        Of the recording `timing_vs_peers`: `truth_us`, `truth_spread_us` and `error_us`.

    Returns
    -------
    (str, float or None)
        "within", "outside", "undecided" where the truth itself moves by more than the goal, or "no record";
        and the error as a multiple of the goal, with its sign.
    """
    if row["truth_us"] is None:
        return "no record", None
    goal_us = GOAL_SHARE * row["truth_us"] if row["truth_us"] >= LONG_US else GOAL_US
    ratio = row["error_us"] / goal_us
    if row["truth_spread_us"] > goal_us:
        return "undecided", ratio
    return "within" if abs(ratio) <= 1 else "outside", ratio


def peers(source: Recording) -> plots.Chart:
    """Draw each timer's error on each call as a multiple of the goal.

    Parameters
    ----------
    source
        The recording `timing_vs_peers`.

    Returns
    -------
    Chart
        One line a timer, one point a call, hollow where undecided. The table gives truth and error, and for the
        warm `time_cuda` how far its truth moved, what its events read more than the profiler's record of the very
        same launches, and what the profiler itself adds, each in µs a call.
    """
    cases = source["cases"]
    shown = [name for name in _METHODS if any(name in case["methods"] for case in cases.values())]
    fig, ax = plots.figure(height=0.9 + 0.42 * len(shown))
    ax.set_xscale("symlog", linthresh=1)
    ax.axvspan(-1, 1, color=plots.GREY, alpha=0.25, linewidth=0)
    counts = []
    for line, name in enumerate(shown):
        found = [judgement(case["methods"][name]) for case in cases.values() if name in case["methods"]]
        colour = plots.BLUE if name.startswith("time_cuda") else plots.ORANGE
        for verdict, ratio in found:
            if ratio is not None:
                face = "none" if verdict == "undecided" else colour
                ax.plot([ratio], [line], "o", color=colour, markerfacecolor=face, markersize=5, alpha=0.85)
        verdicts = [verdict for verdict, _ in found]
        counts.append(f"{name}: {verdicts.count('within')} of {len(verdicts) - verdicts.count('undecided')}")
    ax.set_yticks(range(len(shown)), labels=shown)
    ax.set_ylim(len(shown) - 0.5, -0.5)
    ticks = [-10, -1, 0, 1, 10, 100]
    ax.set_xticks(ticks, labels=[f"{tick}".replace("-", "\N{MINUS SIGN}") for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("error / goal")
    return plots.Chart(
        fig,
        caption=(
            "Reading less truth, in multiples of the goal (grey band: within it). A hollow point is undecided: the "
            f"truth itself moved by more than the goal. Within, of those decided: {'; '.join(counts)}."
        ),
        alt=(
            "Dot plot, one line a timer, one dot a call, against the error in multiples of the goal on an axis "
            "that is linear between minus one and one and logarithmic outside. The table gives every value."
        ),
        header=("Call", *shown, "Truth moved by, µs", "Same launches, µs", "Profiler adds, µs"),
        rows=[
            (
                call,
                *(_held(case["methods"].get(name)) for name in shown),
                *_of_the_truth(case["methods"].get("time_cuda", {})),
            )
            for call, case in cases.items()
        ],
        source=source,
    )


def same_launches_us(row: Mapping[str, Any]) -> float | None:
    """Give what events read more than the profiler's record of the same launches, in µs a call.

    Parameters
    ----------
    row
        Of the recording `timing_vs_peers`; only `time_cuda`'s rows have it. None where there is no record.
    """
    same = row.get("same_launches")
    if not same or not same["events_us"]:
        return None
    pairs = zip(same["events_us"], same["records_us"], strict=True)
    return float(statistics.median(events - records for events, records in pairs))


def _of_the_truth(row: Mapping[str, Any]) -> tuple[str, str, str]:
    spread, adds, same = row.get("truth_spread_us"), row.get("profiling_us"), same_launches_us(row)
    return (
        "unavailable" if spread is None else f"{spread:.2f}",
        "unavailable" if same is None else _signed(same),
        "unavailable" if adds is None else _signed(adds),
    )


def _held(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    verdict, _ = judgement(row)
    if verdict == "no record":
        return "no complete record"
    truth, error = row["truth_us"], row["error_us"]
    off = f"{_signed(error)}\N{NO-BREAK SPACE}µs"
    if truth >= LONG_US:
        off = f"{round(error / truth, 3) + 0.0:+.1%}".replace("-", "\N{MINUS SIGN}").replace(
            "%", "\N{NO-BREAK SPACE}%"
        )
    mark = "" if verdict == "within" else f" ({verdict})"
    return f"{_us(truth)} {off}{mark}"


def clock_speeds(source: Recording) -> plots.Table:
    """List the multiprocessors' clock after a rest and after work.

    Parameters
    ----------
    source
        The recording `clock_after_rest`.
    """
    rows = (
        ("first spin after 5 s of rest", f"{source['first_mhz']:,.0f} MHz"),
        ("median of 20 after the rest", f"{source['rested_median_mhz']:,.0f} MHz"),
        ("first spin after 3 s of large products", f"{source['after_work_mhz']:,.0f} MHz"),
    )
    return plots.Table(
        ("When", "Clock"), rows, caption="The multiprocessors' clock, by a spin kernel", source=source
    )
