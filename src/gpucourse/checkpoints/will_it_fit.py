"""Checkpoints of the lab "will it fit?": a peak and what lives in it, the largest microbatch of a bent ledger.

Amounts are whole MB, so that sums and comparisons are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpucourse.checkpoints._core import Wrong, call, checkpoint, items, judge, keyed, number, show, whole

_LINES = ("parameters", "gradients", "optimizer", "activations", "temporaries")
_Life = tuple[str, int, int, int]  # line, MB, first instant, instant from which it is gone


# --- the peak and its lines --------------------------------------------------------------------------------------


def _at(lives: list[_Life], instant: int) -> dict[str, int]:
    found = dict.fromkeys(_LINES, 0)
    for line, mb, born, gone in lives:
        if born <= instant < gone:
            found[line] += mb
    return found


def _totals(lives: list[_Life]) -> dict[int, int]:
    """Give what is live at each instant at which something changes."""
    return {t: sum(_at(lives, t).values()) for t in sorted({t for life in lives for t in life[2:]})}


def _step(rng: np.random.Generator) -> list[_Life]:
    """Draw a step in which no two readings of "peak" agree: of one instant, its end shared, each line's own."""
    while True:
        blocks, size = int(rng.integers(3, 7)), int(rng.integers(40, 120))
        end = 4 * blocks + 6
        lives: list[_Life] = [
            ("parameters", size, 0, end),
            ("optimizer", 2 * size, 0, end),
        ]
        for k in range(blocks):
            kept = int(rng.integers(30, 200))
            lives.append(("activations", kept, 1 + k, 3 * blocks - 2 * k + 2))
            lives.append(("temporaries", int(rng.integers(60, 400)), 1 + k, 2 + k))
            # Its gradient is there when the block's backward pass ends: the activations go at that instant.
            lives.append(
                ("gradients", size // blocks + int(rng.integers(0, 9)), 3 * blocks - 2 * k + 2, end - 1)
            )
        lives.append(("temporaries", int(rng.integers(200, 500)), blocks + 1, blocks + 2))
        lives.append(("temporaries", size, end - 2, end - 1))
        order = [int(i) for i in rng.permutation(len(lives))]
        lives = [lives[i] for i in order]
        totals = _totals(lives)
        peak = max(totals.values())
        if list(totals.values()).count(peak) > 1:
            continue
        instant = max(totals, key=lambda t: totals[t])
        # Some of the temporaries are gone at the peak, and of the gradients none is there yet.
        gone = (
            sum(mb for line, mb, _, _ in lives if line == "temporaries") > _at(lives, instant)["temporaries"]
        )
        if gone and len({peak, *_slips(lives).values()}) == 1 + len(_slips(lives)):
            return lives


def _slips(lives: list[_Life]) -> Mapping[str, int]:
    totals = _totals(lives)
    owns = {line: max(_at(lives, t)[line] for t in totals) for line in _LINES}
    shared = {t: sum(mb for _, mb, born, gone in lives if born <= t <= gone) for t in totals}
    return {
        "that adds each line's own maximum, but the lines are not at their maxima at one instant": sum(
            owns.values()
        ),
        "that adds everything that lived, as if nothing had been freed": sum(mb for _, mb, _, _ in lives),
        "a tensor is gone at its last instant, and what is born there does not lie beside it": max(
            shared.values()
        ),
        "that is the largest tensor, not what lives beside it": max(mb for _, mb, _, _ in lives),
        "that is what lives at the last change but one": totals[sorted(totals)[-2]],
    }


@checkpoint("will_it_fit.peak")
def peak(answer: Any, rng: np.random.Generator) -> str:
    """Judge ``f(lives) -> (peak, {line: its part})``, each life being (line, MB, born, gone)."""
    for _ in range(4):
        lives = _step(rng)
        totals = _totals(lives)
        right = max(totals.values())
        instant = max(totals, key=lambda t: totals[t])
        lines = _at(lives, instant)
        found = items(call(answer, lives), "the peak and its lines", length=2)
        case = f"a step of {len(lives)} tensors"
        judge(
            found[0], right, {k: float(v) for k, v in _slips(lives).items()}, case=case, what="the peak in MB"
        )
        given = keyed(found[1], [line for line in _LINES if lines[line]])
        for line, value in given.items():
            if line not in _LINES:
                raise Wrong(f"There is no line {show(line)} in the lives that were given.")
            _judge_line(line, number(value, f"the line {line} in MB"), lives, lines[line])
    return "Four steps: the peak of each and what lived at that instant, which is less than the lines' own maxima."


def _judge_line(line: str, value: float, lives: list[_Life], right: int) -> None:
    if value == right:
        return
    own = max(_at(lives, t)[line] for t in _totals(lives))
    where = f"The line {line} came out as {value:g} MB."
    whole_line = sum(mb for name, mb, _, _ in lives if name == line)
    if value == own == whole_line:
        raise Wrong(
            "That adds all tensors of the line, which is its own maximum, too. At the peak some of them are "
            f"not there. {where}"
        )
    if value == own:
        raise Wrong(f"That is the line's own maximum, not its part of the peak. {where}")
    if value == whole_line:
        raise Wrong(f"That adds all tensors of the line, those that are gone at the peak too. {where}")
    judge(value, right, case="the instant of the peak", what=f"the line {line} in MB")


# --- the largest microbatch of a ledger with a bend --------------------------------------------------------------


class _Bent:
    """A step whose peak is in the optimizer's update for few samples, and grows with them from the bend on."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.floor = int(rng.integers(3_000, 6_000))
        self.fixed = int(rng.integers(900, 1_800))
        self.each = int(rng.integers(180, 420))
        self.bend = (self.floor - self.fixed) / self.each  # samples from which the backward pass is higher

    def peak(self, microbatch: int) -> tuple[str, int]:
        line = self.fixed + self.each * microbatch
        return ("backward", line) if line > self.floor else ("optimizer", self.floor)

    def points(self, rng: np.random.Generator) -> list[tuple[int, str, int]]:
        """Draw two predictions on each side of the bend."""
        below = sorted(int(m) for m in rng.choice(np.arange(1, int(self.bend)), 2, replace=False))
        first = int(self.bend) + 1
        above = sorted(int(m) for m in rng.choice(np.arange(first, first + 30), 2, replace=False))
        made = [(m, *self.peak(m)) for m in (*below, *above)]
        return [made[int(i)] for i in rng.permutation(4)]


def _largest(bent: _Bent, budget: int) -> int:
    if budget < bent.floor:
        return 0
    return (budget - bent.fixed) // bent.each


def _line(points: list[tuple[int, str, int]]) -> tuple[float, float]:
    """Fit a line to all points by least squares."""
    slope, fixed = np.polyfit([m for m, _, _ in points], [mb for _, _, mb in points], 1)
    return float(fixed), float(slope)


def _large_slips(points: list[tuple[int, str, int]], bent: _Bent, budget: int) -> dict[str, int]:
    fixed, slope = _line(points)
    by_all = int((budget - fixed) // slope)
    fits = [m for m, _, mb in points if mb <= budget]
    return {
        "A line through all predictions mixes two parts of the step: only those in one phase lie on one.": by_all,
        "That is the largest that was predicted to fit; between the predictions the line decides.": max(
            fits, default=0
        ),
        "Rounded up, so that many samples do not fit.": (budget - bent.fixed) // bent.each + 1,
        "The peak of the update was taken for the fixed part of the line.": max(
            0, (budget - bent.floor) // bent.each
        ),
        "The fixed part was forgotten.": budget // bent.each,
    }


def _case(rng: np.random.Generator) -> tuple[_Bent, list[tuple[int, str, int]], int]:
    """Draw a step and a budget above the floor on which no slip gives the right number."""
    while True:
        bent = _Bent(rng)
        if bent.bend < 4:
            continue
        points = bent.points(rng)
        top = max(mb for _, _, mb in points)
        budget = int(rng.integers(bent.floor + 2 * bent.each, top + 10 * bent.each))
        right = _largest(bent, budget)
        slips = _large_slips(points, bent, budget)
        if right not in slips.values() and len(set(slips.values())) == len(slips):
            return bent, points, budget


@checkpoint("will_it_fit.largest")
def largest(answer: Any, rng: np.random.Generator) -> str:
    """Judge ``f(points, budget) -> microbatch``, points being (microbatch, phase, peak in MB)."""
    for turn in range(6):
        bent, points, budget = _case(rng)
        if turn == 2:
            # The update alone is over, although the line would let some samples through.
            budget = bent.floor - int(rng.integers(1, bent.each // 2))
        if turn == 4:
            # Exactly at the budget.
            budget = bent.fixed + bent.each * (int(bent.bend) + int(rng.integers(3, 30)))
        right = _largest(bent, budget)
        told = ", ".join(f"{m}: {mb:,} MB ({phase})" for m, phase, mb in sorted(points))
        case = f"predictions {told}, budget {budget:,} MB"
        found = whole(call(answer, points, budget), "the largest microbatch")
        if found == right:
            continue
        where = f"For {case} the largest microbatch came out as {found:,}."
        if right == 0:
            raise Wrong(
                "The optimizer's update is over the budget, and it needs the same for any number of samples: nothing "
                f"fits, for which 0 is wanted. {where}"
            )
        if found == right - 1 and bent.peak(right)[1] == budget:
            raise Wrong(f"A step exactly at the budget fits. {where}")
        for slip, wrong in _large_slips(points, bent, budget).items():
            if found == wrong:
                raise Wrong(f"{slip} {where}")
        judge(found, right, case=case, what="the largest microbatch")
    return (
        "Six steps, one with an update that is over the budget at any microbatch and one exactly at it: the line "
        "of the backward pass decides the rest."
    )
