"""Answers to the checkpoints of the opening chapter."""

from __future__ import annotations

import re
from typing import Any

from tests.answers import Answers

# --- opening_failure.why_refused

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _amount(message: str, pattern: str, units: dict[str, float] | None = None) -> float:
    found = re.search(pattern.replace("#", r"([\d.]+) (\w+)"), message)
    assert found, pattern
    return float(found[1]) * (units or _UNITS)[found[2]]


def _amounts(message: str, units: dict[str, float] | None = None) -> dict[str, float]:
    allocated = _amount(message, "memory # is allocated", units)
    return {
        "asked": _amount(message, "allocate #", units),
        "allowed": _amount(message, "# allowed", units),
        "allocated": allocated,
        "reserved": allocated + _amount(message, "and # is reserved", units),
    }


def _by_sums(message: str) -> dict[str, Any]:
    found = _amounts(message)
    if found["allocated"] + found["asked"] > found["allowed"]:
        return {**found, "because": "tensors"}
    if found["reserved"] + found["asked"] > found["allowed"]:
        return {**found, "because": "pieces"}
    return {**found, "because": "card"}


def _by_order_of_amounts(message: str) -> dict[str, Any]:
    """Walk through the message's amounts in their order, and compare rooms in place of sums."""
    sizes = [float(n) * _UNITS[unit] for n, unit in re.findall(r"([\d.]+) (bytes|KiB|MiB|GiB)\b", message)]
    asked, _, _, _, allowed, allocated, unallocated = sizes
    reserved = allocated + unallocated
    new_room, all_room = allowed - reserved, allowed - allocated
    because = "card" if asked <= new_room else "pieces" if asked <= all_room else "tensors"
    return {
        "asked": asked,
        "allowed": allowed,
        "allocated": allocated,
        "reserved": reserved,
        "because": because,
    }


def _refused(change: Any) -> Any:
    """Give the reference with what `change` makes of the message in place of some of it."""
    return lambda message: {**_by_sums(message), **change(message)}


def _holes_alone(message: str) -> dict[str, str]:
    found = _amounts(message)
    holes = found["reserved"] - found["allocated"]
    named = _by_sums(message)["because"]
    return {"because": named if named == "card" else "pieces" if holes >= found["asked"] else "tensors"}


def _many_holes(message: str) -> dict[str, str]:
    found = _amounts(message)
    return {"because": "pieces" if found["reserved"] - found["allocated"] > 0.8e9 else "tensors"}


def _by_what_the_card_has(message: str) -> dict[str, str]:
    free, asked = _amount(message, "which # is free"), _amounts(message)["asked"]
    return {"because": "card" if free < asked else "pieces"}


WHY_REFUSED = Answers(
    right=[_by_sums, _by_order_of_amounts],
    wrong={
        "only GiB is known": (
            lambda m: {**_by_sums(m), **_amounts(m, dict.fromkeys(_UNITS, 2**30))},
            "look at each unit",
        ),
        "GB for GiB": (
            lambda m: {**_by_sums(m), **_amounts(m, {"bytes": 1, "KiB": 1e3, "MiB": 1e6, "GiB": 1e9})},
            "was taken for 1e",
        ),
        "units not read": (
            lambda m: {**_by_sums(m), **_amounts(m, dict.fromkeys(_UNITS, 1))},
            "was not read",
        ),
        "the card's size for what is allowed": (
            _refused(lambda m: {"allowed": _amount(m, "capacity of #")}),
            "whole card",
        ),
        "reserved without allocated": (
            _refused(lambda m: {"reserved": _amount(m, "and # is reserved")}),
            "add the two",
        ),
        "reserved is allocated": (
            _refused(lambda m: {"reserved": _amounts(m)["allocated"]}),
            "left out",
        ),
        "the process's memory for reserved": (
            _refused(lambda m: {"reserved": _amount(m, "process has #")}),
            "`reserved`",
        ),
        "always the tensors": (_refused(lambda m: {"because": "tensors"}), "room"),
        "always the pieces": (_refused(lambda m: {"because": "pieces"}), "room"),
        "holes alone must hold it": (_refused(_holes_alone), "add `allocated` and `asked`"),
        "any large hole is to blame": (_refused(_many_holes), "room"),
        "looks at the card first": (_refused(_by_what_the_card_has), "holes included"),
        "a cause of its own": (_refused(lambda m: {"because": "fragmentation"}), "Give one of"),
        "text for a number": (_refused(lambda m: {"asked": "6.14 GiB"}), "is text"),
        "a list": (lambda m: list(_by_sums(m).values()), "dict"),
    },
)

# --- opening_failure.night_ends


def _planned(rows: Any, settled: int, owed_tokens: int, window_s: float) -> dict[str, float]:
    elapsed, done = sum(row[0] for row in rows), sum(row[1] for row in rows)
    steady = rows[settled:]
    rate = sum(row[1] for row in steady) / sum(row[0] for row in steady)
    return {
        "end_s": elapsed + (owed_tokens - done) / rate,
        "share": min(1.0, (done + rate * (window_s - elapsed)) / owed_tokens),
    }


def _by_a_lost_time(rows: Any, settled: int, owed_tokens: int, window_s: float) -> dict[str, float]:
    """Let the whole night run at the settled pace, then add what the slow start lost against that pace."""
    seconds_a_token = sum(s for s, _ in rows[settled:]) / sum(t for _, t in rows[settled:])
    lost_s = sum(s - t * seconds_a_token for s, t in rows[:settled])
    share = (window_s - lost_s) / seconds_a_token / owed_tokens
    return {"end_s": owed_tokens * seconds_a_token + lost_s, "share": 1.0 if share > 1 else share}


def _night(rate_of: Any = None, **changes: Any) -> Any:
    """Give the plan with another rate, or with some of its results replaced."""

    def answer(rows: Any, settled: int, owed_tokens: int, window_s: float) -> dict[str, float]:
        found = _planned(rows, settled, owed_tokens, window_s)
        elapsed, done = sum(s for s, _ in rows), sum(t for _, t in rows)
        rate = (owed_tokens - done) / (found["end_s"] - elapsed)
        if rate_of:
            rate = rate_of(rows, settled)
            found["end_s"] = elapsed + (owed_tokens - done) / rate
        for name, change in changes.items():
            found[name] = change(elapsed, done, rate, owed_tokens, window_s)
        return found

    return answer


def _rates(rows: Any) -> list[float]:
    return [tokens / seconds for seconds, tokens in rows]


NIGHT_ENDS = Answers(
    right=[_planned, _by_a_lost_time],
    wrong={
        "start-up in the rate": (
            _night(lambda rows, settled: sum(t for _, t in rows) / sum(s for s, _ in rows)),
            "slow start went into the rate",
        ),
        "mean of rates": (
            _night(lambda rows, settled: sum(_rates(rows)[settled:]) / len(rows[settled:])),
            "averaged row by row",
        ),
        "mean of all rates": (
            _night(lambda rows, settled: sum(_rates(rows)) / len(rows)),
            "averaged",
        ),
        "last row": (_night(lambda rows, settled: _rates(rows)[-1]), "only the last row"),
        "first settled row": (_night(lambda rows, settled: _rates(rows)[settled]), "before it fell"),
        "elapsed forgotten": (
            _night(end_s=lambda elapsed, done, rate, owed, window: (owed - done) / rate),
            "part of the night",
        ),
        "no slow start": (
            _night(end_s=lambda elapsed, done, rate, owed, window: owed / rate),
            "as if there had been no slow start",
        ),
        "owed twice": (
            _night(end_s=lambda elapsed, done, rate, owed, window: elapsed + owed / rate),
            "not owed again",
        ),
        "hours": (
            _night(end_s=lambda elapsed, done, rate, owed, window: (elapsed + (owed - done) / rate) / 3600),
            "hours",
        ),
        "more than all": (
            _night(share=lambda elapsed, done, rate, owed, window: (done + rate * (window - elapsed)) / owed),
            "1 at the most",
        ),
        "whole window at the rate": (
            _night(share=lambda elapsed, done, rate, owed, window: min(1.0, window * rate / owed)),
            "whole window",
        ),
        "done forgotten": (
            _night(
                share=lambda elapsed, done, rate, owed, window: min(1.0, rate * (window - elapsed) / owed)
            ),
            "`share`",
        ),
        "per cent": (
            _night(
                share=lambda elapsed, done, rate, owed, window: (
                    100 * min(1.0, (done + rate * (window - elapsed)) / owed)
                )
            ),
            "per cent",
        ),
        "a verdict": (lambda rows, settled, owed_tokens, window_s: False, "dict"),
        "not a number": (_night(end_s=lambda *_: float("nan")), "finite"),
    },
)

# --- opening_failure.judge_log


def _judged(weights: int, readings: Any, peak_tflops: float | None) -> dict[str, Any]:
    (few, few_ms), (many, many_ms) = sorted(readings)
    claimed = max(6 * weights * few / few_ms, 6 * weights * many / many_ms) / 1e9
    if peak_tflops is not None and claimed > peak_tflops:
        return {"tflops": claimed, "verdict": "impossible"}
    grows = many_ms / few_ms >= many / few / 2
    return {"tflops": claimed, "verdict": "not refuted" if grows else "suspect"}


def _by_time_a_token(weights: int, readings: Any, peak_tflops: float | None) -> dict[str, Any]:
    seconds = {tokens: ms / 1e3 / tokens for tokens, ms in readings}
    claimed = weights * 6e-12 / min(seconds.values())
    verdict = "suspect" if 2 * seconds[max(seconds)] < seconds[min(seconds)] else "not refuted"
    return {
        "tflops": claimed,
        "verdict": "impossible" if peak_tflops and claimed > peak_tflops else verdict,
    }


def _log(**changes: Any) -> Any:
    """Give the reference with some of its results replaced."""

    def answer(weights: int, readings: Any, peak_tflops: float | None) -> dict[str, Any]:
        found = _judged(weights, readings, peak_tflops)
        return {**found, **{name: change(weights, readings, peak_tflops) for name, change in changes.items()}}

    return answer


def _claims(weights: int, readings: Any, factor: float = 6) -> list[float]:
    return [factor * weights * tokens / ms / 1e9 for tokens, ms in readings]


def _with_claim(factor: float) -> Any:
    return _log(tflops=lambda w, r, p: max(_claims(w, r, factor)))


JUDGE_LOG = Answers(
    right=[_judged, _by_time_a_token],
    wrong={
        "forward only": (_with_claim(2), "backward pass"),
        "backward only": (_with_claim(4), "backward pass alone"),
        "multiply-adds": (_with_claim(3), "two operations"),
        "the lower claim": (_log(tflops=lambda w, r, p: min(_claims(w, r))), "lower of the two"),
        "the first reading": (_log(tflops=lambda w, r, p: _claims(w, r[0:1])[0]), "lower of the two"),
        "the mean": (_log(tflops=lambda w, r, p: sum(_claims(w, r)) / 2), "averaged"),
        "GFLOP/s": (_log(tflops=lambda w, r, p: max(_claims(w, r)) * 1e3), "power of 1000"),
        "never looks at the growth": (
            _log(
                verdict=lambda w, r, p: (
                    "impossible" if p is not None and max(_claims(w, r)) > p else "not refuted"
                )
            ),
            "did not wait",
        ),
        "never looks at the peak": (
            _log(verdict=lambda w, r, p: _judged(w, r, None)["verdict"]),
            "more than the peak",
        ),
        "no peak is a peak of 0": (
            _log(
                verdict=lambda w, r, p: (
                    "impossible" if max(_claims(w, r)) > (p or 0) else _judged(w, r, p)["verdict"]
                )
            ),
            "no peak to hold it against",
        ),
        "twice as far as the card goes": (
            _log(
                verdict=lambda w, r, p: _judged(w, r, p and 2 * p)["verdict"]  # the sparse figure
            ),
            "more than the peak",
        ),
        "must grow in full": (
            _log(
                verdict=lambda w, r, p: (
                    "suspect"
                    if _judged(w, r, p)["verdict"] == "not refuted"
                    and sorted(r)[1][1] / sorted(r)[0][1] < sorted(r)[1][0] / sorted(r)[0][0]
                    else _judged(w, r, p)["verdict"]
                )
            ),
            "nothing speaks against it",
        ),
        "says yes": (_log(verdict=lambda w, r, p: True), "Give one of"),
        "a list": (lambda w, r, p: [max(_claims(w, r)), "suspect"], "dict"),
    },
)

ANSWERS = {
    "opening_failure.why_refused": WHY_REFUSED,
    "opening_failure.night_ends": NIGHT_ENDS,
    "opening_failure.judge_log": JUDGE_LOG,
}
