"""Checkpoints of the opening chapter: why a request was refused, when a night ends, which reading to refuse.

None needs a GPU: messages, logs and readings are drawn afresh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpucourse.checkpoints._core import Wrong, call, checkpoint, judge, keyed, show, word

_GIB, _MIB = 2**30, 2**20
_UNITS = {"GiB": _GIB, "MiB": _MIB, "KiB": 2**10}

# --- why a request was refused ---------------------------------------------------------------------------

_CAUSES = ("tensors", "pieces", "card")


def _printed(count: int) -> str:
    """Print bytes as the allocator's messages do: two decimals of the largest binary unit."""
    for unit, size in _UNITS.items():
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def _read(text: str) -> float:
    amount, unit = text.split()
    return float(amount) * _UNITS.get(unit, 1)


def _message(asked: int, allowed: int, allocated: int, unallocated: int, free: int, capacity: int) -> str:
    """Word a refusal as PyTorch 2.11 does under a cap."""
    in_use = allocated + unallocated + 600 * _MIB  # the CUDA context is the driver's, not the allocator's
    return (
        f"CUDA out of memory. Tried to allocate {_printed(asked)}. GPU 0 has a total capacity of "
        f"{_printed(capacity)} of which {_printed(free)} is free. Including non-PyTorch memory, this process has "
        f"{_printed(in_use)} memory in use. {_printed(allowed)} allowed; Of the allocated memory "
        f"{_printed(allocated)} is allocated by PyTorch, and {_printed(unallocated)} is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


def _refusals(rng: np.random.Generator) -> list[tuple[str, dict[str, int]]]:
    """Draw refusals with their cause, each at least 100 MiB from where the cause would be another one."""

    def mib(low: int, high: int) -> int:
        return int(rng.integers(low * _MIB, high * _MIB))

    cases = []
    for cause, pooled, request in (
        # tensors: with next to nothing in pieces; with much in pieces, and still no room
        ("tensors", (0, 1), (2500, 7000)),
        ("tensors", (900, 2000), (3500, 7000)),
        # pieces: the holes alone would hold it; only the holes and what may still be reserved would
        ("pieces", (2200, 4000), (700, 1000)),
        ("pieces", (1400, 1900), (2100, 2500)),
        ("card", (30, 300), (600, 900)),
        ("card", (1500, 2500), (300, 900)),
    ):
        allowed = int(rng.integers(9, 81)) * 10**9
        asked, unallocated = mib(*request), mib(*pooled)
        if cause == "tensors":
            # Less room than was asked for, holes and all.
            left = int(max(0, asked - unallocated - 100 * _MIB) * rng.uniform(0.2, 0.9))
        elif cause == "pieces":
            # Less than asked for may still be reserved; with the holes it would be enough.
            low = max(60 * _MIB, asked - unallocated + 150 * _MIB)
            left = int(rng.integers(low, asked - 150 * _MIB))
        else:
            left = asked + mib(200, 1500)
        allocated = allowed - left - unallocated
        free = int(asked * rng.uniform(0.2, 0.8)) if cause == "card" else mib(30_000, 60_000)
        capacity = allowed + mib(61_000, 90_000)
        facts = {"asked": asked, "allowed": allowed, "allocated": allocated, "unallocated": unallocated}
        cases.append((cause, {**facts, "free": free, "capacity": capacity}))
    return cases


@checkpoint("opening_failure.why_refused")
def why_refused(answer: Any, rng: np.random.Generator) -> str:
    """Judge ``f(message)``: four amounts in bytes and which of three causes refused the request."""
    cases = _refusals(rng)
    for k in rng.permutation(len(cases)):
        cause, facts = cases[k]
        _judge_refusal(call(answer, _message(**facts)), cause, facts)
    return (
        "Six refusals, two for each cause, small requests and large ones: the amounts in bytes, and the sum that "
        "decides each time."
    )


def _judge_refusal(found: Any, cause: str, facts: dict[str, int]) -> None:
    found = keyed(found, ("asked", "allowed", "allocated", "reserved", "because"))
    texts = {name: _printed(count) for name, count in facts.items()}
    read = {name: _read(text) for name, text in texts.items()}
    reserved = read["allocated"] + read["unallocated"]
    case = (
        f"{texts['asked']} asked, {texts['allowed']} allowed, {texts['allocated']} allocated, "
        f"{texts['unallocated']} unallocated and {texts['free']} free on the card"
    )
    for name in ("asked", "allowed", "allocated"):
        plain = float(texts[name].split()[0])
        slips = {
            "the unit in the text was not read": plain,
            "every amount was read as GiB; look at each unit": plain * _GIB,
            "a GiB was taken for 1e9 bytes": plain * 1e9,
            "a MiB was taken for 1e6 bytes": plain * 1e6,
            "that is what the whole card has": read["capacity"],
        }
        judge(found[name], read[name], slips, rtol=1e-9, case=case, what=f"`{name}` in bytes")
    judge(
        found["reserved"],
        reserved,
        {
            "what is unallocated is reserved beside what is allocated: add the two": read["unallocated"],
            "what is reserved but unallocated was left out": read["allocated"],
            "every amount was read as GiB; look at each unit": _GIB
            * (float(texts["allocated"].split()[0]) + float(texts["unallocated"].split()[0])),
            "the context is the driver's and not reserved by PyTorch": _read(
                _printed(facts["allocated"] + facts["unallocated"] + 600 * _MIB)
            ),
        },
        rtol=1e-6,
        case=case,
        what="`reserved` in bytes",
    )
    named = word(found["because"], "`because`", _CAUSES)
    if named == cause:
        return
    reasons = {
        ("tensors", "pieces"): (
            "Pieces would be to blame only if all the room together, holes included, were enough for the request"
        ),
        ("tensors", "card"): "The cap alone already refuses it, so what the card has free was never asked",
        ("pieces", "tensors"): (
            "The live tensors leave room enough for the request: add `allocated` and `asked`, not `reserved`"
        ),
        ("pieces", "card"): "The cap refuses it first: what is reserved and what is asked exceed it together",
        ("card", "tensors"): "Under the cap there is room for the request, whatever the tensors hold",
        ("card", "pieces"): (
            "Under the cap there is room for the request as it stands, with no hole used; compare it with what is "
            "free on the card"
        ),
    }
    raise Wrong(f"{reasons[cause, named]}. For {case} you name {show(named)}.")


# --- when the night ends ---------------------------------------------------------------------------------

_Rows = list[tuple[float, int]]


def _log(rng: np.random.Generator) -> tuple[_Rows, int]:
    """Draw a log: rows of a slow start, then steady ones whose rate falls, the last one cut short."""
    a_step = 1024 * int(rng.integers(4, 20))
    rate = float(rng.uniform(30_000, 60_000))
    settled = int(rng.integers(1, 4))
    rows: _Rows = []
    for _ in range(settled):
        tokens = a_step * int(rng.integers(5, 20))
        rows.append((round(tokens / rate * float(rng.uniform(2.5, 6)), 1), tokens))
    steady = int(rng.integers(3, 7))
    for k in range(steady):
        tokens = a_step * (int(rng.integers(300, 900)) if k < steady - 1 else int(rng.integers(8, 30)))
        slower = float(rng.uniform(1.0, 1.03)) * (1 + 0.08 * k)
        rows.append((round(tokens / rate * slower, 1), tokens))
    return rows, settled


@checkpoint("opening_failure.night_ends")
def night_ends(answer: Any, rng: np.random.Generator) -> str:
    """Judge ``f(rows, settled, owed_tokens, window_s)``: when the last token is done, and the share in time."""
    for in_time in (False, True, False, True):
        rows, settled = _log(rng)
        elapsed, done, rate = _facts(rows, settled)
        whole_s = elapsed * float(rng.uniform(4, 9))
        owed = round(done + rate * (whole_s - elapsed))
        window = round(
            whole_s * (float(rng.uniform(1.15, 1.4)) if in_time else float(rng.uniform(0.4, 0.8))), 1
        )
        _judge_night(call(answer, rows, settled, owed, window), rows, settled, owed, window)
    return "Four logs, two of nights that meet their window: the time that has passed, and the rest at its own pace."


def _facts(rows: _Rows, settled: int) -> tuple[float, int, float]:
    """Give the seconds passed, the tokens done, and the rate of the settled rows in tokens/s."""
    steady = rows[settled:]
    rate = sum(tokens for _, tokens in steady) / sum(seconds for seconds, _ in steady)
    return sum(seconds for seconds, _ in rows), sum(tokens for _, tokens in rows), rate


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _judge_night(found: Any, rows: _Rows, settled: int, owed: int, window: float) -> None:
    found = keyed(found, ("end_s", "share"))
    elapsed, done, rate = _facts(rows, settled)
    rates = [tokens / seconds for seconds, tokens in rows]
    steady_s = sum(seconds for seconds, _ in rows[settled:])
    case = f"{len(rows)} rows, settled from row {settled}, {owed:,} tokens owed, a window of {window:g} s"
    judge(
        found["end_s"],
        elapsed + (owed - done) / rate,
        {
            "the slow start went into the rate; the rest of the night does not start again": elapsed
            + (owed - done) * elapsed / done,
            "the slow start went into the rate, for the whole night": owed * elapsed / done,
            "rates were averaged row by row, so a short row counts as much as a long one": elapsed
            + (owed - done) / _mean(rates[settled:]),
            "all rates were averaged, those of the slow start too": elapsed + (owed - done) / _mean(rates),
            "only the last row gave the rate": elapsed + (owed - done) / rates[-1],
            "the first settled row gave the rate, before it fell": elapsed + (owed - done) / rates[settled],
            "the best row gave the rate": elapsed + (owed - done) / max(rates),
            "the time that has passed is part of the night": (owed - done) / rate,
            "the whole night was planned at the settled rate, as if there had been no slow start": owed
            / rate,
            "what is done already is not owed again": elapsed + owed / rate,
            "the slow start's seconds have passed as well": steady_s + (owed - done) / rate,
            "that is in hours": (elapsed + (owed - done) / rate) / 3600,
        },
        rtol=1e-9,
        case=case,
        what="`end_s`",
    )
    by_then = (done + rate * (window - elapsed)) / owed
    judge(
        found["share"],
        min(1.0, by_then),
        {
            "a share of what is owed is 1 at the most": by_then,
            "the whole window was taken at the settled rate, slow start and all": min(
                1.0, window * rate / owed
            ),
            "the whole window was taken at the settled rate": window * rate / owed,
            "the tokens that are done already count": rate * (window - elapsed) / owed,
            "a window over a time is no share of tokens here, since the start was slower": window
            / (elapsed + (owed - done) / rate),
            "that is the share which is missing": 1 - min(1.0, by_then),
            "that is in per cent": 100 * min(1.0, by_then),
        },
        rtol=1e-9,
        case=case,
        what="`share`",
    )


# --- which reading to refuse -----------------------------------------------------------------------------

_VERDICTS = ("impossible", "suspect", "not refuted")


@checkpoint("opening_failure.judge_log")
def judge_log(answer: Any, rng: np.random.Generator) -> str:
    """Judge ``f(weights, readings, peak_tflops)``: the higher rate that two steps claim, and what to think of it."""
    cases = []
    for share, growth, known, largest_first, verdict in (
        # Share of the peak at the larger step; growth of the time over that of the tokens; is a peak on record?
        # Nobody promises that the smaller step comes first.
        (rng.uniform(1.05, 1.3), rng.uniform(0.9, 1.0), True, True, "impossible"),
        (rng.uniform(3, 9), rng.uniform(0.1, 0.3), True, False, "impossible"),
        (rng.uniform(0.8, 0.95), rng.uniform(0.8, 0.95), True, True, "not refuted"),
        (rng.uniform(0.6, 0.95), rng.uniform(0.3, 0.45), True, False, "suspect"),
        (rng.uniform(2, 9), rng.uniform(0.2, 0.45), False, True, "suspect"),
        (rng.uniform(0.3, 0.6), rng.uniform(0.55, 0.7), False, False, "not refuted"),
    ):
        weights = int(rng.integers(20, 900)) * 10**6
        peak = round(float(rng.uniform(15, 90)), 1)
        few = 1024 * int(rng.integers(1, 9))
        many = few * int(rng.integers(2, 9))
        many_ms = 6 * weights * many / (peak * float(share) * 1e12) * 1e3
        few_ms = many_ms / (many / few * float(growth))
        readings = [(few, round(few_ms, 4)), (many, round(many_ms, 4))]
        if largest_first:
            readings.reverse()
        cases.append((weights, readings, peak if known else None, verdict))
    for k in rng.permutation(len(cases)):
        _judge_verdict(answer, *cases[k])
    return (
        "Six logs: a rate above the peak, times that do not grow with the work, a card without a record, and "
        "readings that nothing speaks against."
    )


def _judge_verdict(
    answer: Any, weights: int, readings: list[tuple[int, float]], peak: float | None, verdict: str
) -> None:
    found = keyed(call(answer, weights, readings, peak), ("tflops", "verdict"))
    claims = [6 * weights * tokens / ms / 1e9 for tokens, ms in readings]
    case = f"{weights:,} weights, readings {show(readings)} and a peak of {peak} TFLOP/s"
    judge(
        found["tflops"],
        max(claims),
        {
            "the lower of the two claims; one impossible reading is enough to refuse a log": min(claims),
            "the two claims were averaged": _mean(claims),
            "a forward pass is two operations a weight and token; a step has a backward pass, too": max(
                claims
            )
            / 3,
            "the backward pass alone was counted": max(claims) * 2 / 3,
            "a multiply and an add are two operations": max(claims) / 2,
            "the weights were left out": max(claims) / weights,
            "both steps were added up": 6
            * weights
            * sum(tokens for tokens, _ in readings)
            / sum(ms for _, ms in readings)
            / 1e9,
        },
        case=case,
        what="`tflops`",
    )
    named = word(found["verdict"], "`verdict`", _VERDICTS)
    if named == verdict:
        return
    (few, few_ms), (many, many_ms) = sorted(readings)
    if verdict == "impossible":
        reason = "No reading may claim more than the peak, and one of the two does"
    elif named == "impossible":
        reason = (
            "There is no peak to hold it against, so nothing here is impossible"
            if peak is None
            else "Neither reading claims more than the peak; the unit of both is TFLOP/s"
        )
    elif verdict == "suspect":
        reason = (
            f"The tokens grew {many / few:.1f} times and the reading {many_ms / few_ms:.1f} times, less than half "
            "of that: who read this clock did not wait"
        )
    else:
        reason = (
            f"The tokens grew {many / few:.1f} times and the reading {many_ms / few_ms:.1f} times, more than half "
            "of that, so nothing speaks against it"
        )
    raise Wrong(f"{reason}. For {case} your verdict is {show(named)}.")
