"""Answers to the checkpoints of the chapter on moving bytes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.answers import Answers

Program = list[dict[str, Any]]

# --- moving_bytes.race_finder


def _touches(first: dict[str, Any], second: dict[str, Any]) -> bool:
    if first["do"] != "work" or second["do"] != "work":
        return False
    return bool(
        set(first["writes"]) & {*second["reads"], *second["writes"]}
        or set(first["reads"]) & set(second["writes"])
    )


def _vector_clocks(program: Program) -> list[tuple[int, int]]:
    """Carry along each queue what is known to be over, and compare."""
    known: dict[str, set[int]] = {}
    recorded: dict[str, set[int]] = {}
    over: list[set[int]] = []
    for k, op in enumerate(program):
        before = known.get(op["at"], set()) | known.get("host", set())
        if op["do"] == "wait":
            before = before | recorded.get(op["event"], set())
        if op["do"] == "synchronize":
            before = before.union(*known.values()) if known else before
        over.append(before)
        known[op["at"]] = before | {k}
        if op["do"] == "record":
            recorded[op["event"]] = before | {k}
    return [(i, j) for j in range(len(program)) for i in range(j) if _race(program, over, i, j)]


def _race(program: Program, over: list[set[int]], i: int, j: int) -> bool:
    return _touches(program[i], program[j]) and i not in over[j]


def _by_reachability(program: Program) -> set[tuple[int, int]]:
    """Build a matrix of direct orders and square it until nothing is added."""
    n = len(program)
    order = np.zeros((n, n), dtype=bool)
    for j, op in enumerate(program):
        for i in range(j):
            other = program[i]
            later = program[i + 1 : j]
            order[i, j] |= other["at"] == op["at"]
            order[i, j] |= other["at"] == "host"
            order[i, j] |= op["do"] == "synchronize"
            same = op["do"] == "wait" and other["do"] == "record" and other["event"] == op["event"]
            again = any(o["do"] == "record" and o["event"] == op.get("event") for o in later)
            order[i, j] |= same and not again
    for _ in range(n):
        order |= order @ order
    return {
        (i, j)
        for i, j in itertools.combinations(range(n), 2)
        if _touches(program[i], program[j]) and not order[i, j]
    }


def _stream_order_only(program: Program) -> list[tuple[int, int]]:
    return [
        (i, j)
        for i, j in itertools.combinations(range(len(program)), 2)
        if _touches(program[i], program[j])
        and program[i]["at"] != program[j]["at"]
        and program[i]["at"] != "host"
    ]


def _same_queue_or_not(program: Program) -> list[tuple[int, int]]:
    pairs = itertools.combinations(range(len(program)), 2)
    return [
        (i, j) for i, j in pairs if _touches(program[i], program[j]) and program[i]["at"] != program[j]["at"]
    ]


def _without_write_after_read(program: Program) -> list[tuple[int, int]]:
    return [
        (i, j)
        for i, j in _vector_clocks(program)
        if set(program[i]["writes"]) & {*program[j]["reads"], *program[j]["writes"]}
    ]


def _read_after_write_only(program: Program) -> list[tuple[int, int]]:
    return [
        (i, j) for i, j in _vector_clocks(program) if set(program[i]["writes"]) & set(program[j]["reads"])
    ]


def _event_covers_until_the_wait(program: Program) -> list[tuple[int, int]]:
    """Let a wait stand for everything that the recording stream was given by now."""
    known: dict[str, set[int]] = {}
    recorder: dict[str, str] = {}
    over: list[set[int]] = []
    for k, op in enumerate(program):
        before = known.get(op["at"], set()) | known.get("host", set())
        if op["do"] == "wait" and op["event"] in recorder:
            before = before | known[recorder[op["event"]]]
        if op["do"] == "synchronize":
            before = before.union(*known.values()) if known else before
        over.append(before)
        known[op["at"]] = before | {k}
        if op["do"] == "record":
            recorder[op["event"]] = op["at"]
    return [(i, j) for j in range(len(program)) for i in range(j) if _race(program, over, i, j)]


def _all_records_count(program: Program) -> list[tuple[int, int]]:
    """Add up what each record of an event covered, where the last one alone counts."""
    known: dict[str, set[int]] = {}
    recorded: dict[str, set[int]] = {}
    over: list[set[int]] = []
    for k, op in enumerate(program):
        before = known.get(op["at"], set()) | known.get("host", set())
        if op["do"] == "wait":
            before = before | recorded.get(op["event"], set())
        if op["do"] == "synchronize":
            before = before.union(*known.values()) if known else before
        over.append(before)
        known[op["at"]] = before | {k}
        if op["do"] == "record":
            recorded[op["event"]] = recorded.get(op["event"], set()) | before | {k}
    return [(i, j) for j in range(len(program)) for i in range(j) if _race(program, over, i, j)]


def _host_reads_at_once(program: Program) -> list[tuple[int, int]]:
    return [(i, j) for i, j in _vector_clocks(program) if program[j]["at"] != "host"]


def _reads_race_too(program: Program) -> list[tuple[int, int]]:
    wider = [{**op, "writes": [*op["reads"], *op["writes"]]} if op["do"] == "work" else op for op in program]
    return _vector_clocks(wider)


RACE_FINDER = Answers(
    right=[_vector_clocks, _by_reachability],
    wrong={
        "stream order only": (_stream_order_only, "events and synchronize order"),
        "other queue, other time": (_same_queue_or_not, "but they are ordered"),
        "write after read forgotten": (_without_write_after_read, "still be reading"),
        "read after write only": (_read_after_write_only, "and a write after a write, are races"),
        "event covers until the wait": (_event_covers_until_the_wait, "before the record"),
        "every record counts": (_all_records_count, "an earlier one covered"),
        "host reads at once": (_host_reads_at_once, "has been issued, not finished"),
        "reads race": (_reads_race_too, "only read"),
        "nothing races": (lambda program: [], "pair is missing"),
        "pairs turned round": (
            lambda program: [(j, i) for i, j in _vector_clocks(program)],
            "(earlier, later)",
        ),
        "a count": (lambda program: len(_vector_clocks(program)), "list"),
        "changes its input": (lambda program: program.clear() or [], "changed its input"),
    },
)

# --- moving_bytes.pipeline


def _recurrence(copies_ms: list[float], computes_ms: list[float], buffers: int) -> float:
    copied = 0.0
    ends: list[float] = []
    for k, (copy, compute) in enumerate(zip(copies_ms, computes_ms, strict=True)):
        copied = max(copied, ends[k - buffers] if k >= buffers else 0.0) + copy
        ends.append(max(copied, ends[-1] if ends else 0.0) + compute)
    return ends[-1]


def _longest_path(copies_ms: list[float], computes_ms: list[float], buffers: int) -> float:
    """Walk the graph of who waits for whom, backwards from the last compute."""

    def copied(k: int) -> float:
        if k < 0:
            return 0.0
        return max(copied(k - 1), computed(k - buffers)) + copies_ms[k]

    def computed(k: int) -> float:
        if k < 0:
            return 0.0
        return max(copied(k), computed(k - 1)) + computes_ms[k]

    return computed(len(copies_ms) - 1)


PIPELINE = Answers(
    right=[_recurrence, _longest_path],
    wrong={
        "the sum": (lambda c, w, b: sum(c) + sum(w), "nothing overlaps"),
        "the maximum": (lambda c, w, b: max(sum(c), sum(w)), "have no partner"),
        "first copy forgotten": (lambda c, w, b: _recurrence([0.0, *c[1:]], w, b), "copies_ms"),
        "last compute forgotten": (lambda c, w, b: _recurrence(c, [*w[:-1], 0.0], b), "copies_ms"),
        "buffers without end": (lambda c, w, b: _recurrence(c, w, len(c)), "as many as there are chunks"),
        "always two buffers": (lambda c, w, b: _recurrence(c, w, 2), "does not depend on `buffers`"),
        "three are enough for all": (lambda c, w, b: _recurrence(c, w, min(b, 3)), "buffer fewer"),
        "no end from the third": (lambda c, w, b: _recurrence(c, w, b if b < 3 else len(c)), "buffer"),
        "own copy beside own compute": (lambda c, w, b: sum(map(max, c, w)), "copies_ms"),
        "averages": (
            lambda c, w, b: c[0] + len(c) * max(statistics.fmean(c), statistics.fmean(w)),
            "does not depend on `buffers`",
        ),
        "buffers ignored": (
            lambda c, w, b: c[0] + sum(map(max, c[1:], w[:-1])) + w[-1],
            "does not depend on `buffers`",
        ),
        "seconds": (lambda c, w, b: _recurrence(c, w, b) / 1e3, "power of 1000"),
        "nothing": (lambda c, w, b: float("nan"), "finite"),
    },
)

# --- moving_bytes.line


def _by_two_ends(sizes: list[int], samples_us: list[list[float]]) -> dict[str, float]:
    times = [statistics.median(row) for row in samples_us]
    slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
    start = times[0] - sizes[0] * slope
    return {"start_us": start, "gb_per_s": 1e-3 / slope, "half_bytes": start / slope}


def _by_relative_least_squares(sizes: list[int], samples_us: list[list[float]]) -> dict[str, float]:
    times = np.array([sorted(row)[len(row) // 2] for row in samples_us])
    slope, start = np.polyfit(sizes, times, 1, w=1 / times)
    return {"start_us": float(start), "gb_per_s": float(1e-3 / slope), "half_bytes": float(start / slope)}


def _changed(**changes: Any) -> Any:
    def answer(sizes: list[int], samples_us: list[list[float]]) -> dict[str, float]:
        return {
            **_by_two_ends(sizes, samples_us),
            **{key: change(sizes, samples_us) for key, change in changes.items()},
        }

    return answer


def _by_means(sizes: list[int], samples_us: list[list[float]]) -> dict[str, float]:
    slope, start = np.polyfit(sizes, [statistics.fmean(row) for row in samples_us], 1)
    return {"start_us": float(start), "gb_per_s": float(1e-3 / slope), "half_bytes": float(start / slope)}


def _line_through(summary: Any) -> Any:
    """Draw a line through the ends of whatever sums up a row of samples."""

    def answer(sizes: list[int], samples_us: list[list[float]]) -> dict[str, float]:
        return _by_two_ends(sizes, [[summary(row)] for row in samples_us])

    return answer


def _largest(sizes: Sequence[int], samples_us: Sequence[Sequence[float]]) -> float:
    return sizes[-1] / statistics.median(samples_us[-1]) / 1e3


LINE = Answers(
    right=[_by_two_ends, _by_relative_least_squares],
    wrong={
        "rate of the largest": (_changed(gb_per_s=_largest), "still has its start"),
        "means": (_by_means, "mean takes the interrupted"),
        "means of the two ends": (_line_through(statistics.fmean), "mean takes the interrupted"),
        "means, relative errors alike": (
            lambda n, t: _by_relative_least_squares(n, [[statistics.fmean(row)] for row in t]),
            "mean takes the interrupted",
        ),
        "start by means alone": (
            _changed(start_us=lambda n, t: _by_means(n, t)["start_us"]),
            "mean takes the interrupted",
        ),
        "rate by means alone": (
            _changed(gb_per_s=lambda n, t: _by_means(n, t)["gb_per_s"]),
            "mean takes the interrupted",
        ),
        "mean of the largest": (
            _changed(gb_per_s=lambda n, t: n[-1] / statistics.fmean(t[-1]) / 1e3),
            "mean takes the interrupted",
        ),
        "mean of the smallest": (
            _changed(start_us=lambda n, t: statistics.fmean(t[0])),
            "start and bytes, and the interrupted",
        ),
        "longest samples": (_line_through(max), "interrupted samples are in your times"),
        "trimmed means": (
            _line_through(lambda row: statistics.fmean(sorted(row)[1:-1])),
            "interrupted samples are in your times",
        ),
        "smallest is the start": (_changed(start_us=lambda n, t: statistics.median(t[0])), "start and bytes"),
        "slope for bandwidth": (
            _changed(gb_per_s=lambda n, t: 1e-3 / _by_two_ends(n, t)["gb_per_s"]),
            "inverse",
        ),
        "GiB": (_changed(gb_per_s=lambda n, t: _by_two_ends(n, t)["gb_per_s"] * 1e9 / 2**30), "GiB"),
        "half of the half": (
            _changed(half_bytes=lambda n, t: _by_two_ends(n, t)["half_bytes"] / 2),
            "half as long",
        ),
        "milliseconds": (
            _changed(start_us=lambda n, t: _by_two_ends(n, t)["start_us"] / 1e3),
            "power of 1000",
        ),
        "a tuple": (lambda n, t: tuple(_by_two_ends(n, t).values()), "dict"),
    },
)

ANSWERS = {
    "moving_bytes.race_finder": RACE_FINDER,
    "moving_bytes.pipeline": PIPELINE,
    "moving_bytes.line": LINE,
}
