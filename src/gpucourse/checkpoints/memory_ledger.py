"""Checkpoints of the memory lab: the largest microbatch, a ledger from two runs, an error text in GB.

None needs a GPU. Amounts are drawn in hundredths of a GB, so that "exactly at the budget" can be drawn too.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from gpucourse.checkpoints._core import Wrong, call, checkpoint, items, judge, number, show, whole

_GIB = 2**30
_Numbers = tuple[Fraction, Fraction, Fraction, Fraction]  # fixed, activations a sample, device; reserve


def _cents(rng: np.random.Generator, low: float, high: float) -> Fraction:
    return Fraction(int(rng.integers(round(low * 100), round(high * 100) + 1)), 100)


# --- largest microbatch ----------------------------------------------------------------------------------


def _at_budget(rng: np.random.Generator) -> _Numbers:
    """Draw numbers for which a microbatch meets the budget exactly and plain floats deny it."""
    while True:
        device, reserve = (
            Fraction(int(rng.choice([8, 16, 24, 48]))),
            Fraction(int(rng.choice([5, 10, 20])), 100),
        )
        activations, microbatch = _cents(rng, 0.05, 0.9), int(rng.integers(8, 65))
        fixed = device * (1 - reserve) - microbatch * activations
        floats = [float(x) for x in (fixed, activations, device, reserve)]
        denied = int((floats[2] * (1 - floats[3]) - floats[0]) / floats[1]) < microbatch
        if fixed > 0 and fixed * 100 == int(fixed * 100) and denied:
            return fixed, activations, device, reserve


def _slips(fixed: Fraction, activations: Fraction, device: Fraction, reserve: Fraction) -> dict[str, int]:
    """Name the slips in a plan and what each gives; no two alike on a case that `_plain_case` draws."""
    budget, gib = device * (1 - reserve), Fraction(_GIB, 10**9)
    room = {
        "The reserve was forgotten.": device - fixed,
        "The fixed part was forgotten.": budget,
        "The reserve was taken of what the fixed part leaves, not of the device.": (device - fixed)
        * (1 - reserve),
        "What is left in reserve was taken for the budget.": device * reserve - fixed,
        "The device was divided by 2**30; all amounts are in GB (1e9 bytes).": budget / gib - fixed,
        "The device was taken for that many GiB; all amounts are in GB (1e9 bytes).": budget * gib - fixed,
        "Rounded up, so that many samples do not fit: round down.": budget - fixed + activations,
    }
    return {slip: math.floor(gb / activations) for slip, gb in room.items()}


def _plain_case(rng: np.random.Generator) -> _Numbers:
    """Draw a plan with room, far from a whole number of samples, on which every slip gives another number."""
    while True:
        device, reserve = Fraction(int(rng.integers(16, 97))), Fraction(int(rng.integers(4, 26)), 100)
        numbers = (_cents(rng, 1.5, 6.0), _cents(rng, 0.05, 0.7), device, reserve)
        quotient = (device * (1 - reserve) - numbers[0]) / numbers[1]
        found = [math.floor(quotient), *_slips(*numbers).values()]
        if (
            quotient > 0
            and Fraction(55, 100) < quotient % 1 < Fraction(95, 100)
            and len(set(found)) == len(found)
        ):
            return numbers


@checkpoint("memory_ledger.largest_microbatch")
def largest_microbatch(answer: Any, rng: np.random.Generator) -> str:
    """Judge ``f(fixed_gb, activations_gb_per_sample, device_gb, reserve) -> int``."""
    cases = [_plain_case(rng) for _ in range(4)]
    device, reserve = Fraction(int(rng.integers(8, 25))), Fraction(int(rng.integers(5, 21)), 100)
    budget, activations = device * (1 - reserve), _cents(rng, 0.1, 0.9)
    over = 2 * activations + _cents(rng, 0.5, 3)
    cases += [
        (_cents(rng, 0.5, 3), activations, device, Fraction(0)),
        (budget + over, activations, device, reserve),
        (budget - Fraction(1, 100), activations, device, reserve),
        _at_budget(rng),
        _at_budget(rng),
    ]
    for numbers in cases:
        given = tuple(float(x) for x in numbers)
        _judge_largest(call(answer, *given), numbers)
    return (
        "Nine plans, two of them exactly at the budget, one with room for no sample and one over before the "
        "first: each as the ledger says."
    )


def _judge_largest(found: Any, numbers: _Numbers) -> None:
    fixed, activations, device, reserve = numbers
    room = device * (1 - reserve) - fixed
    right = -1 if room < 0 else math.floor(room / activations)
    value = whole(found, "the largest microbatch")
    if value == right:
        return
    case = "fixed {:g} GB, {:g} GB a sample, device {:g} GB, reserve {:g}".format(*map(float, numbers))
    where = f"For {case} the largest microbatch came out as {value:,}."
    if room >= 0 and room % activations == 0 and value == right - 1:
        raise Wrong(
            "A plan exactly at the budget fits, and here one sample more meets it exactly; floats lost it "
            f"(0.1 + 0.2 is not 0.3). {where} Count in whole bytes, or round, before you compare."
        )
    if right == -1:
        meaning = "0 says that the fixed part fits" if value == 0 else "no such microbatch fits"
        raise Wrong(f"The fixed part alone is over the budget, for which -1 is wanted: {meaning}. {where}")
    for slip, wrong in _slips(*numbers).items():
        if value == wrong:
            raise Wrong(f"{slip} {where}")
    judge(value, right, case=case, what="the largest microbatch")


# --- a ledger from two runs ------------------------------------------------------------------------------


@checkpoint("memory_ledger.from_two_runs")
def from_two_runs(answer: Any, rng: np.random.Generator) -> str:
    """Judge ``f(m_a, peak_a_bytes, m_b, peak_b_bytes) -> (fixed_gb, activations_gb_per_sample)``."""
    for turn in range(5):
        fixed_bytes = int(rng.integers(5 * 10**8, 9 * 10**9))
        sample_bytes = int(rng.integers(4 * 10**7, 2 * 10**9))
        # Neither neighbours nor a microbatch and its double: there, slips give each other's numbers.
        m_a = int(rng.integers(2, 17))
        m_b = int(rng.choice([m for m in range(m_a + 2, 33) if m != 2 * m_a]))
        if turn == 2:
            m_a, m_b = m_b, m_a  # nobody promised that the smaller run comes first
        peak_a, peak_b = fixed_bytes + m_a * sample_bytes, fixed_bytes + m_b * sample_bytes
        pair = items(call(answer, m_a, peak_a, m_b, peak_b), "the ledger (fixed, activations a sample)", 2)
        fixed_gb, sample_gb = fixed_bytes / 1e9, sample_bytes / 1e9
        found = [
            number(pair[0], "the fixed part in GB"),
            number(pair[1], "the activations a sample in GB"),
        ]
        case = f"peaks of {peak_a:,} bytes at {m_a} and {peak_b:,} bytes at {m_b}"
        if math.isclose(found[0], sample_gb, rel_tol=1e-6) and math.isclose(found[1], fixed_gb, rel_tol=1e-6):
            raise Wrong(
                f"The two are swapped: the fixed part comes first. For {case} you returned {show(pair)}."
            )
        judge(
            found[1],
            sample_gb,
            {
                "a whole peak was divided by its microbatch, fixed part and all": peak_a / m_a / 1e9,
                "the second peak was divided by its microbatch, fixed part and all": peak_b / m_b / 1e9,
                "the difference of the peaks was not divided by the difference of the microbatches": abs(
                    peak_b - peak_a
                )
                / 1e9,
                "the difference of the peaks was divided by one microbatch, not by their difference": (
                    (peak_b - peak_a) / m_b / 1e9
                ),
                "the peaks were added, not subtracted": (peak_b + peak_a) / (m_a + m_b) / 1e9,
            },
            case=case,
            what="the activations a sample in GB",
        )
        judge(
            found[0],
            fixed_gb,
            {
                "the smaller run's whole peak was taken for the fixed part": min(peak_a, peak_b) / 1e9,
                "one sample was taken off, not the whole microbatch": (peak_a - sample_bytes) / 1e9,
                "the activations of the other run were taken off": (peak_a - m_b * sample_bytes) / 1e9,
            },
            rtol=1e-5,
            case=case,
            what="the fixed part in GB",
        )
    return "Five pairs of runs, one of them with the larger first: the line through both peaks each time."


# --- an error text in GB ---------------------------------------------------------------------------------


def _printed(count: int) -> str:
    """Print bytes as the allocator's messages do, to two decimals of a binary unit.

    >>> _printed(24 * 10**9), _printed(3 * 2**20)
    ('22.35 GiB', '3.00 MiB')
    """
    for unit, size in (("GiB", _GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


@checkpoint("memory_ledger.short_by")
def short_by(answer: Any, rng: np.random.Generator) -> str:
    """Judge ``f(allowed, reserved, asked) -> GB``, each amount as an allocator's message prints it."""
    for turn in range(5):
        allowed = int(rng.integers(8, 81)) * 10**9
        asked = int(rng.integers(_GIB, 4 * _GIB)) if turn % 2 else int(rng.integers(20 * 2**20, 900 * 2**20))
        free = int(rng.integers(2 * 2**20, 12 * 2**20)) if turn == 2 else int(asked * rng.uniform(0.1, 0.8))
        texts = [_printed(allowed), _printed(allowed - free), _printed(asked)]
        in_bytes = [float(t.split()[0]) * {"GiB": _GIB, "MiB": 2**20}[t.split()[1]] for t in texts]
        right = (in_bytes[1] + in_bytes[2] - in_bytes[0]) / 1e9
        plain = [float(t.split()[0]) for t in texts]
        found = call(answer, *texts)
        judge(
            found,
            right,
            {
                "a MiB was read as a GiB": (plain[1] + plain[2] - plain[0]) * _GIB / 1e9,
                "the units were not read at all": plain[1] + plain[2] - plain[0],
                "this is still in GiB; a ledger counts in GB": right * 1e9 / _GIB,
                "a GiB was taken for 1e9 bytes": sum(
                    s * v * {"GiB": 1.0, "MiB": 1e-3}[t.split()[1]]
                    for s, v, t in zip((-1, 1, 1), plain, texts, strict=True)
                ),
                "that is what is left under the cap, not what is missing": (in_bytes[0] - in_bytes[1]) / 1e9,
                "what is already reserved was forgotten": (in_bytes[2] - in_bytes[0]) / 1e9,
                "only what was asked for was converted": in_bytes[2] / 1e9,
                "that is a number of the message as it stands": plain[2],
            },
            rtol=1e-4,
            case=f"{texts[0]} allowed, {texts[1]} reserved, {texts[2]} asked",
            what="the shortfall in GB",
        )
    return "Five messages, some of them in MiB: what was missing, in the ledger's own GB."
