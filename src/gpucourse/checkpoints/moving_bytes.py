"""Checkpoints of the chapter on moving bytes: a race finder, a pipeline's time, a link's line."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpucourse.checkpoints._core import Wrong, call, checkpoint, items, judge, keyed, number, show, whole

Operation = dict[str, Any]
Program = list[Operation]
Pairs = set[tuple[int, int]]

# --- a race finder ---------------------------------------------------------------------------------------
#
# The host issues a program from top to bottom. Whatever happens before an operation stands above it, so an
# order is a set of pairs (earlier, later) and its closure needs one pass.


def _work(at: str, reads: Sequence[str] = (), writes: Sequence[str] = ()) -> Operation:
    return {"do": "work", "at": at, "reads": list(reads), "writes": list(writes)}


def _record(at: str, event: str) -> Operation:
    return {"do": "record", "at": at, "event": event}


def _wait(at: str, event: str) -> Operation:
    return {"do": "wait", "at": at, "event": event}


def _synchronize() -> Operation:
    return {"do": "synchronize", "at": "host"}


def _before(program: Program, index: int, holds: Callable[[Operation], bool]) -> list[int]:
    """Give the last operation above `index` for which `holds` is true, as a list of one or none."""
    found = [k for k in range(index) if holds(program[k])]
    return found[-1:]


def _streams(program: Program) -> list[str]:
    return sorted({operation["at"] for operation in program} - {"host"})


def _direct(program: Program, slip: str = "") -> Pairs:
    """Give the direct orders of a program; `slip` leaves one rule out or bends it."""
    order: Pairs = set()
    for j, operation in enumerate(program):
        at = operation["at"]
        own = _before(program, j, lambda other, at=at: other["at"] == at)  # type: ignore[misc]
        order |= {(i, j) for i in own}
        if at != "host" and slip != "issue":
            order |= {(i, j) for i in _before(program, j, lambda other: other["at"] == "host")}
        if slip == "streams only":
            continue
        if at == "host" and slip == "host in order":
            order |= {(i, j) for i in range(j)}
        if operation["do"] == "wait":
            order |= {(i, j) for i in _covered(program, j, slip)}
        if operation["do"] == "synchronize":
            waited = _streams(program)[:1] if slip == "one stream" else _streams(program)
            for stream in waited:
                order |= {(i, j) for i in _before(program, j, lambda o, s=stream: o["at"] == s)}  # type: ignore[misc]
    return order


def _covered(program: Program, j: int, slip: str) -> list[int]:
    event = program[j]["event"]

    def records(other: Operation) -> bool:
        return other["do"] == "record" and bool(other["event"] == event)

    recorded = _before(program, j, records)
    if slip == "first record":
        recorded = [k for k in range(j) if records(program[k])][:1]
    if slip == "all records":
        recorded = [k for k in range(j) if records(program[k])]
    if slip == "up to the wait" and recorded:  # the event stands for all that its stream was given by now
        stream = program[recorded[0]]["at"]
        return _before(program, j, lambda other: other["at"] == stream)
    return recorded


def _closure(order: Pairs, count: int) -> Pairs:
    earlier: list[set[int]] = [set() for _ in range(count)]
    for j in range(count):
        for i in range(j):
            if (i, j) in order:
                earlier[j] |= {i} | earlier[i]
    return {(i, j) for j in range(count) for i in earlier[j]}


def _conflict(first: Operation, second: Operation, slip: str = "") -> bool:
    if first["do"] != "work" or second["do"] != "work":
        return False
    wrote, read = set(first["writes"]), set(first["reads"])
    then_wrote, then_read = set(second["writes"]), set(second["reads"])
    if slip == "two reads":
        return bool((wrote | read) & (then_wrote | then_read))
    if slip == "write after read":
        return bool(wrote & (then_read | then_wrote))
    if slip == "write after write":
        return bool(wrote & then_read or read & then_wrote)
    if slip == "read after write only":
        return bool(wrote & then_read)
    return bool(wrote & (then_read | then_wrote) or read & then_wrote)


def _races(program: Program, slip: str = "") -> Pairs:
    order = _direct(program, slip)
    if slip != "direct only":
        order = _closure(order, len(program))
    return {
        (i, j)
        for j in range(len(program))
        for i in range(j)
        if _conflict(program[i], program[j], slip) and (i, j) not in order
        if not (slip == "host never early" and program[j]["at"] == "host")
    }


_RACE_SLIPS = {
    "streams only": "events and synchronize order work of different streams, and of a stream and the host",
    "host in order": "a copy or kernel above a host operation has been issued, not finished: that needs a wait",
    "host never early": "a copy above a host operation has been issued, not finished: the host may be too early",
    "up to the wait": "an event covers what its stream was given before the record, not before the wait",
    "first record": "a wait means the last record of its event above the wait; here it is recorded twice",
    "all records": "a wait means the last record of its event alone: what an earlier one covered is not waited for",
    "write after read": "a write into what an earlier operation may still be reading is a race too",
    "write after write": "two writes into one buffer are a race too: who comes last?",
    "read after write only": "a write after a read, and a write after a write, are races too",
    "two reads": "two operations that only read a buffer never race",
    "issue": "what the host did before it issued an operation is over when that operation runs",
    "direct only": "orders chain: what happens before something that happens before me happens before me",
    "one stream": "`synchronize` lets the host wait for every stream",
}


def _line(index: int, operation: Operation) -> str:
    at, do = operation["at"], operation["do"]
    if do == "work":
        parts = [f"{verb} {', '.join(operation[verb])}" for verb in ("reads", "writes") if operation[verb]]
        return f"{index} {at} {' and '.join(parts)}"
    return f"{index} {at} {do}" + (f" {operation['event']}" if "event" in operation else "")


def _motifs(rng: np.random.Generator) -> list[Program]:
    """Give programs which between them set every slip apart from the rules, in names drawn afresh."""
    main, side, third = rng.permutation(["s0", "s1", "s2"]).tolist()
    a, b, c, d = rng.permutation(["w", "x", "y", "z"]).tolist()
    e, f = rng.permutation(["ready", "free"]).tolist()
    early_read = [_work(main, [a], [b]), _work("host", [b])]
    no_cover = [_record(main, e), _work(main, [a], [b]), _wait("host", e), _work("host", [b])]
    two_deep = [
        _work("host", [], [a]),
        _work(side, [a], [b]),
        _record(side, e),
        _wait(main, e),
        _work(main, [b], [c]),
        _work("host", [], [a]),  # overwrites the source while it may still be read
        _work(side, [a], [b]),  # and the copy that follows, the buffer
        _record(side, e),
        _wait(main, e),
        _work(main, [b], [d]),
    ]
    mended = [
        *two_deep[:5],
        _record(main, f),
        _wait("host", e),
        _work("host", [], [a]),
        _wait(side, f),
        *two_deep[6:],
    ]
    chain = [
        _work(main, [], [a]),
        _record(main, e),
        _wait(side, e),
        _work(side, [c], [d]),
        _record(side, f),
        _wait(third, f),
        _work(third, [a], [c]),
    ]
    late = [
        _work(main, [], [a]),
        _record(main, e),
        _work(main, [], [b]),
        _wait(side, e),
        _work(side, [a, b], [c]),
    ]
    twice = [
        _work(main, [], [a]),
        _record(main, e),
        _work(main, [], [b]),
        _record(main, e),
        _wait(side, e),
        _work(side, [a, b], [c]),
        _work(third, [a], [b]),
    ]
    moved = [
        _work(main, [], [a]),
        _record(main, e),
        _work(side, [], [b]),
        _record(side, e),  # from here on the event says nothing of the first stream
        _wait(third, e),
        _work(third, [a, b], [c]),
    ]
    all_wait = [
        _work(main, [a], [b]),
        _work(side, [a], [c]),
        _work(third, [], [d]),
        _synchronize(),
        _work("host", [b, c, d], [a]),
        _work(third, [], [d]),
        _work(side, [], [d]),
    ]
    return [early_read, no_cover, two_deep, mended, chain, late, twice, moved, all_wait]


def _random_program(rng: np.random.Generator) -> Program:
    streams, buffers, events = ["s0", "s1", "s2"], ["w", "x", "y", "z"], ["ready", "free"]
    program: Program = []
    for _ in range(int(rng.integers(9, 16))):
        at = str(rng.choice([*streams, "host"]))
        kind = rng.choice(["work", "work", "work", "record", "wait", "synchronize"], p=None)
        if kind == "synchronize" and rng.random() < 0.7:
            kind = "wait"
        if kind == "synchronize":
            program.append(_synchronize())
        elif kind == "record":
            program.append(_record(str(rng.choice(streams)), str(rng.choice(events))))
        elif kind == "wait":
            program.append(_wait(at, str(rng.choice(events))))
        else:
            reads = rng.choice(buffers, size=int(rng.integers(0, 3)), replace=False).tolist()
            writes = rng.choice(buffers, size=1).tolist() if rng.random() < 0.7 or not reads else []
            program.append(_work(at, reads, writes))
    return program


@checkpoint("moving_bytes.race_finder")
def race_finder(answer: Any, rng: np.random.Generator) -> str:
    """Find the pairs of a program over streams, events and buffers that race."""
    programs = [*_motifs(rng), *(_random_program(rng) for _ in range(12))]
    programs.sort(key=len)  # where several go wrong, the shortest is told
    found = [_pairs(call(answer, program), len(program)) for program in programs]
    right = [_races(program) for program in programs]
    for k, program in enumerate(programs):
        if found[k] != right[k]:
            # One program may fit several slips; the one that is named fits all of them.
            for slip, text in _RACE_SLIPS.items():
                if found == [_races(other, slip) for other in programs]:
                    text = f"{text[:1].upper()}{text[1:]}"
                    raise Wrong(f"{text}. You found {_told(found[k])} in:\n{_listing(program)}")
            _tell_pair(program, found[k], right[k])
    return (
        "Right on every program. Three things order work: a queue, an event, a wait of the host; the order in "
        "which the lines stand is none of them."
    )


def _tell_pair(program: Program, found: Pairs, right: Pairs) -> None:
    extra, missing = sorted(found - right), sorted(right - found)
    if extra:
        i, j = extra[0]
        why = (
            "they are ordered: is there a way from one to the other by queues, events and waits?"
            if _conflict(program[i], program[j])
            else "no buffer is written by one of them and touched by the other."
        )
        raise Wrong(f"You report {extra[0]}, but {why} That was in:\n{_listing(program)}")
    i, j = missing[0]
    raise Wrong(
        f"A pair is missing: {i} and {j} touch the same buffer, one of them writes, and nothing lets {j} "
        f"wait for {i}. You found {_told(found)} in:\n{_listing(program)}"
    )


def _listing(program: Program) -> str:
    return "\n".join(_line(k, operation) for k, operation in enumerate(program))


def _told(pairs: Pairs) -> str:
    return ", ".join(map(str, sorted(pairs))) or "no race"


def _pairs(value: Any, count: int) -> Pairs:
    """Read a list or set of pairs of places in the program."""
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    pairs: Pairs = set()
    for entry in items(value, "the races"):
        i, j = (whole(place, "a place in the program") for place in items(entry, "a pair", length=2))
        if not (0 <= i < count and 0 <= j < count) or i == j:
            raise Wrong(f"{show(entry)} is no pair of places in a program of {count} operations.")
        if i > j:
            raise Wrong(f"{show(entry)}: give each pair as (earlier, later), as they stand in the program.")
        pairs.add((i, j))
    return pairs


# --- the time of a pipeline ------------------------------------------------------------------------------


def _pipeline_ms(copies_ms: Sequence[float], computes_ms: Sequence[float], buffers: int) -> float:
    copied: list[float] = []
    computed: list[float] = []
    for k, (copy_ms, compute_ms) in enumerate(zip(copies_ms, computes_ms, strict=True)):
        free = computed[k - buffers] if k >= buffers else 0.0
        copied.append(max(copied[-1] if copied else 0.0, free) + copy_ms)
        computed.append(max(computed[-1] if computed else 0.0, copied[-1]) + compute_ms)
    return computed[-1]


def _freed_by_copy_ms(copies_ms: Sequence[float], computes_ms: Sequence[float], buffers: int) -> float:
    """Free a buffer when its compute *begins*, not when it ends."""
    copied: list[float] = []
    started: list[float] = []
    end = 0.0
    for k, (copy_ms, compute_ms) in enumerate(zip(copies_ms, computes_ms, strict=True)):
        free = started[k - buffers] if k >= buffers else 0.0
        copied.append(max(copied[-1] if copied else 0.0, free) + copy_ms)
        started.append(max(end, copied[-1]))
        end = started[-1] + compute_ms
    return end


def _uneven_times(rng: np.random.Generator, count: int, buffers: int) -> tuple[list[float], list[float]]:
    """Draw times of which the slower side changes, so that no one formula serves, nor another number of buffers."""
    early = np.arange(count) < count / 2
    while True:
        # Slow computations first let the copies run ahead as far as there are buffers; slow copies then use it up.
        copies = [round(float(t), 2) for t in rng.uniform(0.5, np.where(early, 3, 7))]
        computes = [round(float(t), 2) for t in rng.uniform(0.5, np.where(early, 7, 3))]
        totals = [_pipeline_ms(copies, computes, max(1, b)) for b in (buffers - 1, buffers, buffers + 1)]
        if count <= buffers + 1 or (
            (totals[0] > 1.01 * totals[1] or buffers == 1) and totals[1] > 1.01 * totals[2]
        ):
            return copies, computes


@checkpoint("moving_bytes.pipeline")
def pipeline(answer: Any, rng: np.random.Generator) -> str:
    """Predict the time of a copy-and-compute pipeline with 1, 2, 3 or more buffers, in ms."""
    cases = [(int(rng.integers(8, 13)), buffers) for buffers in (1, 2, 2, 3, 3, 4)]
    cases += [(1, 2), (2, 5), (int(rng.integers(5, 12)), 2)]
    for k in rng.permutation(len(cases)):
        count, buffers = cases[k]
        try:
            _judge_pipeline(answer, *_uneven_times(rng, count, buffers), buffers)
        except Wrong as wrong:
            if not _ignores_buffers(answer, *_uneven_times(rng, 9, 2)):
                raise
            raise Wrong(
                "Your answer does not depend on `buffers`: with 1, 2, 3 and 4 of them it came out the same for times "
                f"where each more saves some. {str(wrong).removesuffix(' That is not it.')}"
            ) from None
    return (
        "Right for every number of buffers. One buffer is the sum, two hide the smaller part of each pair, and "
        "a third pays only where the times are uneven."
    )


def _ignores_buffers(answer: Any, copies: list[float], computes: list[float]) -> bool:
    """Whether an answer gives one number however many buffers there are; one that fails on some of them does not."""
    try:
        totals = [number(call(answer, copies, computes, buffers), "the total") for buffers in (1, 2, 3, 4)]
    except Wrong:
        return False
    return len(set(totals)) == 1


def _judge_pipeline(answer: Any, copies: list[float], computes: list[float], buffers: int) -> None:
    pairs = list(zip(copies, computes, strict=True))
    mean = max(sum(copies), sum(computes)) / len(pairs)
    slips = {
        "that is the sum: nothing overlaps": sum(copies) + sum(computes),
        "that is the busier side alone: the first copy and the last compute have no partner": max(
            sum(copies), sum(computes)
        ),
        "the first copy has no compute beside it: the device waits for it": _pipeline_ms(
            [0.0, *copies[1:]], computes, buffers
        ),
        "the last compute has no copy beside it, and still takes its time": _pipeline_ms(
            copies, [*computes[:-1], 0.0], buffers
        ),
        "a copy may not begin before a buffer is free; you have as many as there are chunks": _pipeline_ms(
            copies, computes, len(pairs)
        ),
        "a buffer is free when its compute has ended, not when it begins": _freed_by_copy_ms(
            copies, computes, buffers
        ),
        "one buffer more than there is": _pipeline_ms(copies, computes, buffers + 1),
        "one buffer fewer than there is": _pipeline_ms(copies, computes, max(1, buffers - 1)),
        "the chunk that is copied is not the one that is computed on meanwhile": sum(map(max, pairs)),
        "the chunk that is copied is not the one that is computed on meanwhile, after the first": copies[0]
        + sum(map(max, pairs)),
        "the chunks differ, so the averages do not decide": copies[0] + len(pairs) * mean,
    }
    case = f"copies_ms={copies}, computes_ms={computes}, buffers={buffers}"
    judge(call(answer, copies, computes, buffers), _pipeline_ms(copies, computes, buffers), slips, case=case)


# --- a link's line ---------------------------------------------------------------------------------------


@checkpoint("moving_bytes.line")
def line(answer: Any, rng: np.random.Generator) -> str:
    """Read latency, bandwidth and half-bandwidth size from the samples of a sweep over transfer sizes."""
    for _ in range(4):
        start_us = float(rng.uniform(1.5, 12))
        bytes_per_us = float(rng.uniform(5_000, 60_000))
        half = start_us * bytes_per_us
        sizes = sorted({int(half * x) for x in np.geomspace(rng.uniform(0.2, 0.4), rng.uniform(30, 60), 9)})
        # One length of interruption for all sizes, so that whatever keeps interrupted samples is off by one factor,
        # by whichever line it is fitted, and can be told.
        longer = rng.uniform(1.5, 6)
        samples = []
        for size in sizes:
            around = 1 + rng.uniform(-0.0005, 0.0005, 9)
            around[rng.choice(9, 3, replace=False)] *= longer  # an interrupted host
            samples.append([float(t) for t in (start_us + size / bytes_per_us) * around])
        _judge_line(answer, sizes, samples, start_us, bytes_per_us)
    return (
        "Right: medians first, since an interruption only ever lengthens; then a line in which the small sizes "
        "tell the start and the large ones the slope."
    )


def _judge_line(
    answer: Any, sizes: list[int], samples: list[list[float]], start_us: float, bytes_per_us: float
) -> None:
    names = ("start_us", "gb_per_s", "half_bytes")
    found = keyed(call(answer, sizes, samples), names)
    case = f"sizes from {sizes[0]:,} to {sizes[-1]:,} bytes"
    medians = [statistics.median(row) for row in samples]
    means = [statistics.fmean(row) for row in samples]
    factor = statistics.fmean(
        mean / (start_us + n / bytes_per_us) for mean, n in zip(means, sizes, strict=True)
    )
    _tell_interrupted(found, start_us, bytes_per_us / 1e3, factor, case)
    judge(
        found["gb_per_s"],
        bytes_per_us / 1e3,
        {
            "bytes over time of the largest transfer still has its start in it": sizes[-1]
            / medians[-1]
            / 1e3,
            "a mean takes the interrupted samples in": bytes_per_us / factor / 1e3,
            "that is bytes over the mean time of the largest transfer; a mean takes the interrupted samples in, and "
            "the start is still in it": sizes[-1] / means[-1] / 1e3,
            "that is the slope, time for each byte; bandwidth is its inverse": 1 / bytes_per_us,
            "that is bytes for each microsecond": bytes_per_us,
        },
        rtol=0.01,
        case=case,
        what="`gb_per_s`",
    )
    judge(
        found["start_us"],
        start_us,
        {
            "the smallest transfer's time is start and bytes": medians[0],
            "a mean takes the interrupted samples in": start_us * factor,
            "a mean takes the interrupted samples of the smallest transfer in": means[0]
            - sizes[0] / bytes_per_us,
            "that is the mean time of the smallest transfer: start and bytes, and the interrupted samples": means[
                0
            ],
        },
        rtol=0.02,
        case=case,
        what="`start_us`",
    )
    half = start_us * bytes_per_us
    judge(
        found["half_bytes"],
        half,
        {
            "at the half-bandwidth size the bytes take as long as the start, not half as long": half / 2,
            "at the half-bandwidth size the bytes take as long as the start, not twice as long": half * 2,
        },
        rtol=0.03,
        case=case,
        what="`half_bytes`",
    )


def _tell_interrupted(
    found: dict[str, Any], start_us: float, gb_per_s: float, factor: float, case: str
) -> None:
    """Name times that are all too long by one factor: interrupted samples are in them, whatever summed them up."""
    start, rate = number(found["start_us"], "`start_us`"), number(found["gb_per_s"], "`gb_per_s`")
    if rate <= 0 or not 1.05 < gb_per_s / rate < 10:
        return
    slower = gb_per_s / rate
    if not math.isclose(start, start_us * slower, rel_tol=0.03):
        return
    mean = math.isclose(slower, factor, rel_tol=0.01)
    text = "a mean takes the interrupted samples in" if mean else "interrupted samples are in your times"
    raise Wrong(
        f"{text[:1].upper()}{text[1:]}: for {case} your line stands {slower:.2f} times too high, start and slope alike."
    )
