"""Answers to the checkpoints of the memory lab."""

from __future__ import annotations

import math
from decimal import ROUND_FLOOR, Decimal

from gpucourse.memory_ledger import FixedPartOverBudgetError, MemoryLedger
from tests.answers import Answers

GIB = 2**30


def in_bytes(fixed, activations, device, reserve):
    budget = round(device * (1 - reserve) * 1e9)
    room = budget - round(fixed * 1e9)
    return room // round(activations * 1e9) if room >= 0 else -1


def in_decimals(fixed, activations, device, reserve):
    f, a, d, r = (Decimal(str(x)) for x in (fixed, activations, device, reserve))
    room = d * (1 - r) - f
    return -1 if room < 0 else int((room / a).to_integral_value(rounding=ROUND_FLOOR))


def by_trying(fixed, activations, device, reserve):
    budget, largest = device * (1 - reserve) + 1e-10, -1
    while fixed + (largest + 1) * activations <= budget:
        largest += 1
    return largest


def by_the_package(fixed, activations, device, reserve):
    ledger = MemoryLedger(
        fixed_gb=fixed, activations_gb_per_sample=activations, device_gb=device, reserve=reserve
    )
    try:
        return ledger.max_microbatch
    except FixedPartOverBudgetError:
        return -1


def _room(fixed, device, reserve):
    return round(device * (1 - reserve) - fixed, 9)


def in_floats(fixed, activations, device, reserve):
    room = device * (1 - reserve) - fixed
    return int(room // activations) if room >= 0 else -1


def negative_where_over(fixed, activations, device, reserve):
    return math.floor(_room(fixed, device, reserve) / activations + 1e-9)


def zero_where_over(fixed, activations, device, reserve):
    return max(in_bytes(fixed, activations, device, reserve), 0)


def rounded(fixed, activations, device, reserve):
    room = _room(fixed, device, reserve)
    return round(room / activations) if room >= 0 else -1


def no_reserve(fixed, activations, device, reserve):
    return in_bytes(fixed, activations, device, 0.0)


def no_fixed(fixed, activations, device, reserve):
    return in_bytes(0.0, activations, device, reserve)


def reserve_of_the_rest(fixed, activations, device, reserve):
    return int((device - fixed) * (1 - reserve) / activations)


def gib_device(fixed, activations, device, reserve):
    return in_bytes(fixed, activations, device * GIB / 1e9, reserve)


def device_in_gib(fixed, activations, device, reserve):
    return in_bytes(fixed, activations, device * 1e9 / GIB, reserve)


def line(m_a, peak_a, m_b, peak_b):
    slope = (peak_b - peak_a) / (m_b - m_a)
    return (peak_a - slope * m_a) / 1e9, slope / 1e9


def solved(m_a, peak_a, m_b, peak_b):
    fixed = (peak_a * m_b - peak_b * m_a) / (m_b - m_a)
    return [fixed / 1e9, (peak_b - fixed) / m_b / 1e9]


def whole_peak(m_a, peak_a, m_b, peak_b):
    return 0.0, peak_a / m_a / 1e9


def swapped(*run):
    return line(*run)[::-1]


def gib_ledger(*run):
    return tuple(x * 1e9 / GIB for x in line(*run))


def bytes_ledger(*run):
    return tuple(x * 1e9 for x in line(*run))


def no_division(m_a, peak_a, m_b, peak_b):
    return peak_a / 1e9, abs(peak_b - peak_a) / 1e9


def smaller_peak_is_fixed(m_a, peak_a, m_b, peak_b):
    return min(peak_a, peak_b) / 1e9, line(m_a, peak_a, m_b, peak_b)[1]


def assumes_order(m_a, peak_a, m_b, peak_b):
    slope = abs(peak_b - peak_a) / (m_b - m_a)
    return (peak_a - slope * m_a) / 1e9, slope / 1e9


UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}


def to_bytes(text):
    value, unit = text.split()
    return float(value) * UNITS[unit]


def shortfall(allowed, reserved, asked):
    return (to_bytes(reserved) + to_bytes(asked) - to_bytes(allowed)) / 1e9


def shortfall_in_steps(allowed, reserved, asked):
    amounts = []
    for text in (allowed, reserved, asked):
        power = {"G": 3, "M": 2, "K": 1}[text[-3]]
        amounts.append(float(text[:-4]) * 1024**power)
    left = amounts[0] - amounts[1]
    return (amounts[2] - left) * 1e-9


def every_unit_gib(allowed, reserved, asked):
    a, r, q = (float(text.split()[0]) for text in (allowed, reserved, asked))
    return (r + q - a) * GIB / 1e9


def in_gib(*texts):
    return shortfall(*texts) * 1e9 / GIB


def gib_is_gb(allowed, reserved, asked):
    size = {"GiB": 1.0, "MiB": 1e-3}
    a, r, q = (float(t.split()[0]) * size[t.split()[1]] for t in (allowed, reserved, asked))
    return r + q - a


def left(allowed, reserved, asked):
    return (to_bytes(allowed) - to_bytes(reserved)) / 1e9


def forgot_reserved(allowed, reserved, asked):
    return (to_bytes(asked) - to_bytes(allowed)) / 1e9


def in_bytes_still(*texts):
    return shortfall(*texts) * 1e9


ANSWERS = {
    "memory_ledger.largest_microbatch": Answers(
        right=[in_bytes, in_decimals, by_trying, by_the_package],
        wrong={
            "plain floats": (in_floats, "exactly at the budget"),
            "0 where nothing fits": (zero_where_over, "0 says that the fixed part fits"),
            "a negative count where nothing fits": (negative_where_over, "-1 is wanted"),
            "rounded to the nearest": (rounded, "round down"),
            "no reserve": (no_reserve, "reserve was forgotten"),
            "no fixed part": (no_fixed, "fixed part was forgotten"),
            "reserve of the rest": (reserve_of_the_rest, "not of the device"),
            "a device of that many GiB": (gib_device, "that many GiB"),
            "a device divided by 2**30": (device_in_gib, "divided by 2**30"),
            "the lab's own 54": (lambda *_: 54, "came out as 54"),
            "a fraction": (lambda f, a, d, r: (d * (1 - r) - f) / a, "whole number"),
        },
    ),
    "memory_ledger.from_two_runs": Answers(
        right=[line, solved],
        wrong={
            "peak over microbatch": (whole_peak, "fixed part and all"),
            "swapped": (swapped, "swapped"),
            "in GiB": (gib_ledger, "GiB"),
            "in bytes": (bytes_ledger, "power of 1000"),
            "not divided": (no_division, "not divided by the difference"),
            "smaller peak as fixed": (smaller_peak_is_fixed, "whole peak was taken"),
            "smaller run first": (assumes_order, "sign is turned round"),
            "the lab's own numbers": (lambda *_: (3.2, 0.34), "came out as 0.34"),
            "one number": (lambda *run: line(*run)[1], "a list is wanted"),
        },
    ),
    "memory_ledger.short_by": Answers(
        right=[shortfall, shortfall_in_steps],
        wrong={
            "MiB as GiB": (every_unit_gib, "MiB was read as a GiB"),
            "in GiB": (in_gib, "GiB"),
            "GiB as GB": (gib_is_gb, "1e9 bytes"),
            "what is left": (left, "what is left under the cap"),
            "reserved forgotten": (forgot_reserved, "already reserved was forgotten"),
            "as printed": (lambda *texts: float(texts[2].split()[0]), "a number of the message as it stands"),
            "in bytes": (in_bytes_still, "power of 1000"),
            "text": (lambda *texts: f"{shortfall(*texts)} GB", "without the unit"),
        },
    ),
}
