"""Charts and tables of the memory benchmark: predicted peaks held against the allocator, ours and the peers'."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpucourse import plots

if TYPE_CHECKING:
    from gpucourse.recording import Recording

__all__ = ["PEERS", "cases", "goals", "limits", "miss", "misses", "reasons", "searches", "summary"]

PEERS = ("MemTracker", "mlsysim", "accelerate", "16 bytes a parameter")
LARGE_BYTES = 1e9  # from here on a miss counts as a share, below in bytes
GOAL_MEDIAN, GOAL_WORST, GOAL_SMALL_BYTES = 0.01, 0.05, 60e6
GOAL_SAMPLES, GOAL_SAMPLES_SHARE = 1, 0.02
_OURS = "gpucourse"
_GROUPS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "kept out": lambda row: bool(row["kept_out"]),
    "tuned on": lambda row: not row["kept_out"],
    "all": lambda _: True,
}


def miss(row: Mapping[str, Any], method: str = _OURS, what: str = "allocated_bytes") -> float | None:
    """Give what a method says beyond what the allocator says, as a share of the latter.

    Parameters
    ----------
    row
        One of the recording's ``cases``.
    method
        "gpucourse" or one of `PEERS`.
    what
        "allocated_bytes" or "reserved_bytes", which only gpucourse predicts.

    Returns
    -------
    float or None
        None where either side has no number.

    Examples
    --------
    >>> miss({"measured": {"allocated_bytes": 2e9}, "predicted": {"allocated_bytes": 1.9e9}})
    -0.05
    """
    measured = row["measured"].get(what)
    said = row["predicted"].get(what) if method == _OURS else row["peers"].get(method, {}).get("bytes")
    if measured is None or said is None:
        return None
    return round(float(said) / float(measured) - 1, 12)


def _limit_samples(found: int) -> float:
    return max(GOAL_SAMPLES, GOAL_SAMPLES_SHARE * found)


def limits(row: Mapping[str, Any]) -> tuple[int, bool] | None:
    """Judge one search for the largest microbatch.

    Parameters
    ----------
    row
        One of the recording's ``searches``.

    Returns
    -------
    (int, bool) or None
        How many tries the prediction said would fit and the allocator refused; and whether the predicted microbatch
        is within one sample or 2 % of the one found. None where either side has no number.
    """
    said, found = row["predicted"].get("microbatch"), row["found"].get("microbatch")
    if said is None or found is None:
        return None
    wrong = sum(samples <= said and not ran for samples, ran in row["found"]["tried"])
    return wrong, abs(said - found) <= _limit_samples(found)


def summary(source: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Condense the recording by goal, for the models kept out, for those tuned on, and for all.

    Parameters
    ----------
    source
        The recording `memory_vs_peers`.

    Returns
    -------
    dict
        By group: ``searches`` judged, ``false_fits`` (tries), ``near`` (searches within the goal), ``large`` (cases of
        1 GB and more), ``median`` and ``worst`` (shares, of those), ``small`` (cases below), ``small_worst_bytes``,
        ``unjudged`` (cases without a number on either side), ``seconds`` (the longest prediction). What has no case
        is None.
    """
    found = {}
    for name, belongs in _GROUPS.items():
        judged = [one for row in source["searches"] if belongs(row) and (one := limits(row)) is not None]
        rows = [row for row in source["cases"] if belongs(row)]
        large, small, unjudged = [], [], 0
        for row in rows:
            share = miss(row)
            if share is None:
                unjudged += 1
            elif (measured := row["measured"]["allocated_bytes"]) >= LARGE_BYTES:
                large.append(abs(share))
            else:
                small.append(abs(share) * measured)
        seconds = [row["predicted"]["seconds"] for row in rows if "seconds" in row["predicted"]]
        found[name] = {
            "searches": len(judged),
            "false_fits": sum(wrong for wrong, _ in judged) if judged else None,
            "near": sum(near for _, near in judged) if judged else None,
            "large": len(large),
            "median": statistics.median(large) if large else None,
            "worst": max(large, default=None),
            "small": len(small),
            "small_worst_bytes": max(small, default=None),
            "unjudged": unjudged,
            "seconds": max(seconds, default=None),
        }
    return found


def goals(source: Recording) -> plots.Table:
    """List each goal, and what was reached: first on the models that were kept out.

    Parameters
    ----------
    source
        The recording `memory_vs_peers`.
    """
    found = summary(source)
    cap = f"{source['cap_bytes'] / 1e9:g} GB"

    def row(goal: str, wanted: str, tell: Callable[[Mapping[str, Any]], str]) -> tuple[str, ...]:
        return (goal, wanted, *(tell(found[name]) for name in _GROUPS))

    def share(key: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda s: "–" if s[key] is None else f"{s[key]:.2%} of {s['large']}"

    rows = (
        row(
            f"says that it fits under {cap}, and the allocator refuses",
            "never",
            lambda s: (
                "–" if s["false_fits"] is None else f"{s['false_fits']} tries in {s['searches']} models"
            ),
        ),
        row(
            f"largest microbatch under {cap}, within 1 sample or 2 %",
            "8 of 8",
            lambda s: "–" if s["near"] is None else f"{s['near']} of {s['searches']}",
        ),
        row("median miss, peaks of 1 GB and more", f"{GOAL_MEDIAN:.0%} at most", share("median")),
        row("largest miss, peaks of 1 GB and more", f"{GOAL_WORST:.0%} at most", share("worst")),
        row(
            "largest miss, smaller peaks",
            f"{GOAL_SMALL_BYTES / 1e6:.0f} MB at most",
            lambda s: (
                "–"
                if s["small_worst_bytes"] is None
                else f"{s['small_worst_bytes'] / 1e6:.0f} MB of {s['small']}"
            ),
        ),
        row("cases without a number on either side", "none", lambda s: str(s["unjudged"])),
        row(
            f"longest prediction, {source['predicting_at_once']} at once on {source['cores']} cores",
            "–",
            lambda s: "–" if s["seconds"] is None else f"{s['seconds']:.1f} s",
        ),
    )
    return plots.Table(
        ("Goal", "Wanted", *(name.capitalize() for name in _GROUPS)),
        rows,
        caption="Predicted peaks against the allocator's, by goal",
        source=source,
    )


def searches(source: Recording) -> plots.Table:
    """List the largest microbatch under the cap, predicted and found, for each searched model.

    Parameters
    ----------
    source
        The recording `memory_vs_peers`.
    """
    rows = []
    for row in _kept_out_first(source["searches"]):
        judged = limits(row)
        said, found = (row[side].get("microbatch") for side in ("predicted", "found"))
        verdict = (
            "no number"
            if judged is None
            else f"refused {judged[0]} of what it said would fit"
            if judged[0]
            else "within"
            if judged[1]
            else "outside"
        )
        tried = ", ".join(f"{m}{'' if ran else ' ✗'}" for m, ran in row["found"].get("tried", ()))
        off = "–" if said is None or found is None else f"{said - found:+d}".replace("-", "\N{MINUS SIGN}")
        rows.append((*_named(row), _or_dash(said), _or_dash(found), off, verdict, tried or "–"))
    return plots.Table(
        (*_NAMED, "Predicted", "Found", "Difference", "Goal", "Tried (✗: out of memory)"),
        tuple(rows),
        caption=f"The largest microbatch under a hard cap of {source['cap_bytes'] / 1e9:g} GB",
        source=source,
    )


_NAMED = ("Model", "Kept out", "Precision", "Optimizer", "Checkpoints")


def cases(source: Recording) -> plots.Table:
    """List every case: measured, predicted, and what each method misses by.

    Parameters
    ----------
    source
        The recording `memory_vs_peers`.
    """
    rows = []
    for row in _kept_out_first(source["cases"]):
        measured, predicted = row["measured"], row["predicted"]
        rows.append(
            (
                *_named(row),
                str(row["samples"]),
                _gb(measured.get("allocated_bytes")),
                _gb(predicted.get("allocated_bytes")),
                _percent(miss(row)),
                _gb(measured.get("reserved_bytes")),
                _percent(miss(row, what="reserved_bytes")),
                *(_percent(miss(row, peer)) for peer in PEERS),
                f"{predicted['seconds']:.1f}" if "seconds" in predicted else "–",
            )
        )
    return plots.Table(
        (
            *_NAMED,
            "Samples",
            "Measured, GB",
            "Predicted, GB",
            "Miss",
            "Reserved, GB",
            "Reserved miss",
            *PEERS,
            "Predicted in, s",
        ),
        tuple(rows),
        caption="Peak of a training step, allocated: measured, predicted, and what each method misses by",
        source=source,
    )


def misses(source: Recording) -> plots.Chart:
    """Draw each method's miss on each case.

    Parameters
    ----------
    source
        The recording `memory_vs_peers`.

    Returns
    -------
    Chart
        One line a method, one dot a case, filled for models that were kept out; the table gives, by method, the
        median and the largest miss.
    """
    fig, ax = plots.figure(height=3.0)
    ax.set_xscale("symlog", linthresh=1)
    ax.axvspan(-100 * GOAL_WORST, 100 * GOAL_WORST, color=plots.GREY, alpha=0.25, linewidth=0)
    methods = (_OURS, *PEERS)
    rows = []
    for line, method in enumerate(methods):
        colour = plots.BLUE if method == _OURS else plots.ORANGE
        known = [
            (100 * share, bool(row["kept_out"]))
            for row in source["cases"]
            if (share := miss(row, method)) is not None
        ]
        for kept, lift in ((False, 0.14), (True, -0.14)):
            values = [value for value, its in known if its == kept]
            face = colour if kept else "none"
            ax.plot(
                values,
                [line + lift] * len(values),
                "o",
                color=colour,
                markerfacecolor=face,
                markersize=4,
                alpha=0.8,
            )
        of = {
            name: [v for v, its in known if its or not only]
            for name, only in (("kept", True), ("all", False))
        }
        rows.append(
            (
                method,
                f"{len(known)} of {len(source['cases'])}",
                *(_middle(of[name], how) for name in of for how in (statistics.median, max)),
                str(sum(value < -100 * GOAL_WORST for value, _ in known)),
            )
        )
    ax.set_yticks(range(len(methods)), labels=methods)
    ax.set_ylim(len(methods) - 0.5, -0.5)
    ticks = [-100, -10, -1, 0, 1, 10, 100]
    ax.set_xticks(ticks, labels=[f"{tick} %".replace("-", "\N{MINUS SIGN}") for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("predicted beyond measured")
    return plots.Chart(
        fig,
        caption=(
            "What each method says beyond the allocator's peak, a dot a case: filled for models that were kept out "
            "while tuning, hollow for the others. Grey band: within 5 %."
        ),
        alt=(
            "Dot plot, one line a method, one dot a case, over the miss in percent on an axis that is linear between "
            "minus one and one and logarithmic outside. Median miss of the models kept out: "
            + "; ".join(f"{row[0]} {row[2]}" for row in rows)
            + "."
        ),
        header=(
            "Method",
            "Cases with a number",
            "Median miss, kept out",
            "Largest, kept out",
            "Median, all",
            "Largest, all",
            "More than 5 % too low",
        ),
        rows=rows,
        source=source,
    )


def reasons(source: Mapping[str, Any]) -> Iterator[str]:
    """Say of each number that is missing why, alike ones together.

    Parameters
    ----------
    source
        The recording `memory_vs_peers`.

    Yields
    ------
    str
        Which cases, and the reason.
    """
    told: dict[tuple[str, str], list[str]] = {}
    for row in (*source["cases"], *source["searches"]):
        name = " ".join(map(str, (*_named(row)[::2], row.get("samples", "search"))))
        parts = {key: row[key] for key in ("predicted", "measured", "found") if key in row}
        peers = row.get("peers", {})
        parts |= {"peers": peers} if isinstance(peers.get("error"), str) else dict(peers)
        for part, facts in parts.items():
            if facts.get("error"):
                told.setdefault((part, facts["error"]), []).append(name)
    for (part, reason), names in told.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"{part}, {'; '.join(names[:3])}{more}: {reason}"


def _kept_out_first(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(rows, key=lambda row: not row["kept_out"])


def _named(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["model"],
        "yes" if row["kept_out"] else "no",
        row["precision"],
        row["optimizer"],
        "yes" if row["checkpointing"] else "no",
    )


def _or_dash(value: Any) -> str:
    return "–" if value is None else f"{value:,}"


def _gb(nbytes: float | None) -> str:
    return "–" if nbytes is None else f"{nbytes / 1e9:.3f}"


def _percent(share: float | None) -> str:
    if share is None:
        return "–"
    form = "+.2%" if abs(share) < 0.1 else "+.0%"
    return f"{share:{form}}".replace("-", "\N{MINUS SIGN}").replace("%", "\N{NO-BREAK SPACE}%")


def _middle(values: Sequence[float], how: Callable[[list[float]], float]) -> str:
    return f"{how([abs(value) for value in values]):.2f}\N{NO-BREAK SPACE}%" if values else "–"
