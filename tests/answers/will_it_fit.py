"""Answers to the checkpoints of the lab "will it fit?"."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tests.answers import Answers

# --- will_it_fit.peak -----------------------------------------------------------------------------------------


def at(lives, instant):
    found = {}
    for line, mb, born, gone in lives:
        if born <= instant < gone:
            found[line] = found.get(line, 0) + mb
    return found


def scanned(lives):
    live = max((at(lives, born) for _, _, born, _ in lives), key=lambda found: sum(found.values()))
    return sum(live.values()), live


def swept(lives):
    """Walk through births and ends in order of time, ends first."""
    events = sorted(
        [(gone, 0, line, -mb) for line, mb, _, gone in lives] + [(b, 1, line, mb) for line, mb, b, _ in lives]
    )
    now, best, total = Counter(), (0, {}), 0
    for _, _, line, mb in events:
        now[line] += mb
        total += mb
        if total > best[0]:
            best = (total, dict(now))
    return list(best)


def _owns(lives):
    instants = {born for _, _, born, _ in lives}
    lines = {line for line, *_ in lives}
    return {line: max(at(lives, t).get(line, 0) for t in instants) for line in lines}


def own_maxima(lives):
    owns = _owns(lives)
    return sum(owns.values()), owns


def everything(lives):
    found = Counter()
    for line, mb, _, _ in lives:
        found[line] += mb
    return sum(found.values()), dict(found)


def ends_shared(lives):
    def live(t):
        found = Counter()
        for line, mb, born, gone in lives:
            if born <= t <= gone:
                found[line] += mb
        return found

    best = max((live(t) for life in lives for t in life[2:]), key=lambda found: sum(found.values()))
    return sum(best.values()), dict(best)


def right_peak_own_lines(lives):
    return scanned(lives)[0], _owns(lives)


def largest_tensor(lives):
    line, mb, _, _ = max(lives, key=lambda life: life[1])
    return mb, {line: mb}


def right_peak_all_lines(lives):
    return scanned(lives)[0], everything(lives)[1]


def sorts_in_place(lives):
    result = scanned(lives)
    lives.sort(key=lambda life: -life[3])
    return result


# --- will_it_fit.largest --------------------------------------------------------------------------------------


def by_the_line(points, budget):
    floor = max(mb for _, phase, mb in points if phase == "optimizer")
    (a, peak_a), (b, peak_b) = sorted((m, mb) for m, phase, mb in points if phase == "backward")
    each = (peak_b - peak_a) // (b - a)
    return 0 if floor > budget else (budget - peak_a + each * a) // each


def by_counting(points, budget):
    line = [(m, mb) for m, phase, mb in points if phase == "backward"]
    slope, fixed = np.polyfit([m for m, _ in line], [mb for _, mb in line], 1)
    floor = min(mb for _, phase, mb in points if phase != "backward")
    microbatch = 0
    while max(floor, fixed + slope * (microbatch + 1)) <= budget + 1e-3:
        microbatch += 1
    return microbatch


def through_all(points, budget):
    slope, fixed = np.polyfit([m for m, _, _ in points], [mb for _, _, mb in points], 1)
    return (
        max(0, int((budget - fixed) // slope))
        if budget >= max(mb for _, p, mb in points if p == "optimizer")
        else 0
    )


def no_floor(points, budget):
    (a, peak_a), (b, peak_b) = sorted((m, mb) for m, phase, mb in points if phase == "backward")
    each = (peak_b - peak_a) // (b - a)
    return (budget - peak_a + each * a) // each


def of_the_predicted(points, budget):
    return max((m for m, _, mb in points if mb <= budget), default=0)


def rounded_up(points, budget):
    found = by_the_line(points, budget)
    return found and found + 1


def floor_as_fixed(points, budget):
    floor = max(mb for _, phase, mb in points if phase == "optimizer")
    (a, peak_a), (b, peak_b) = sorted((m, mb) for m, phase, mb in points if phase == "backward")
    return max(0, (budget - floor) // ((peak_b - peak_a) // (b - a)))


def no_fixed(points, budget):
    floor = max(mb for _, phase, mb in points if phase == "optimizer")
    (a, peak_a), (b, peak_b) = sorted((m, mb) for m, phase, mb in points if phase == "backward")
    return 0 if floor > budget else budget // ((peak_b - peak_a) // (b - a))


def below_only(points, budget):
    found = by_the_line(points, budget)
    (a, peak_a), (b, peak_b) = sorted((m, mb) for m, phase, mb in points if phase == "backward")
    each = (peak_b - peak_a) // (b - a)
    return found - 1 if found and peak_a + each * (found - a) == budget else found


ANSWERS = {
    "will_it_fit.peak": Answers(
        right=[scanned, swept],
        wrong={
            "each line's own maximum": (own_maxima, "own maximum"),
            "everything that lived": (everything, "as if nothing had been freed"),
            "the end belongs to it": (ends_shared, "gone at its last instant"),
            "the largest tensor": (largest_tensor, "not what lives beside it"),
            "the peak, with the lines' own maxima": (right_peak_own_lines, "own maximum"),
            "the peak, with all tensors of a line": (right_peak_all_lines, "adds all tensors of the line"),
            "in bytes": (lambda lives: (scanned(lives)[0] * 10**6, scanned(lives)[1]), "power of 1000"),
            "sorts its input": (sorts_in_place, "changed its input"),
            "no lines": (lambda lives: scanned(lives)[0], "a list is wanted"),
        },
    ),
    "will_it_fit.largest": Answers(
        right=[by_the_line, by_counting],
        wrong={
            "a line through all": (through_all, "only those in one phase"),
            "no floor": (no_floor, "nothing fits"),
            "the largest predicted": (of_the_predicted, "the line decides"),
            "rounded up": (rounded_up, "Rounded up"),
            "the update as the fixed part": (floor_as_fixed, "taken for the fixed part"),
            "no fixed part": (no_fixed, "fixed part was forgotten"),
            "at the budget does not fit": (below_only, "exactly at the budget fits"),
            "the night's 16": (lambda points, budget: 16, "came out as 16"),
        },
    ),
}
