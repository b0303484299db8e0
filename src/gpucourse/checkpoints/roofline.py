"""Checkpoints of the roofline lab: the intensity that a rate asks for, and where a measured kernel lies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpucourse.checkpoints._core import Wrong, call, checkpoint, items, judge, number, show, word

# --- the least intensity at which a device can reach a rate ---------------------------------------------------


@checkpoint("roofline.least_intensity")
def least_intensity(answer: Any, rng: np.random.Generator) -> str:
    """Give the least flop/byte at which the roof allows a rate; infinite where no intensity does."""
    bandwidth = float(rng.integers(300, 7000))
    dense = float(rng.integers(60, 900))
    printed = {"tflops": 2 * dense, "with_sparsity": True, "bandwidth_gb_per_s": bandwidth}
    plain = {"tflops": dense, "with_sparsity": False, "bandwidth_gb_per_s": bandwidth}
    low = round(dense * float(rng.uniform(0.1, 0.8)), 1)
    between = round(dense * float(rng.uniform(1.2, 1.8)), 1)
    cases = [
        (low, plain),
        (low, printed),
        (dense, plain),  # exactly the peak, which the ridge reaches
        (dense, printed),
        (between, plain),
        (between, printed),  # below what is printed, above what dense matrices get
        (round(dense * 3, 1), printed),
    ]
    for asked, sheet in cases:
        _judge_intensity(answer, asked, sheet)
    return (
        "Right on every device. Below the peak, precision and peak do not enter at all: what a rate asks of the "
        "code is the rate over the bandwidth."
    )


def _judge_intensity(answer: Any, asked: float, sheet: dict[str, Any]) -> None:
    peak = sheet["tflops"] / (2 if sheet["with_sparsity"] else 1)
    kind = "with sparsity" if sheet["with_sparsity"] else "dense"
    bandwidth = sheet["bandwidth_gb_per_s"]
    case = f"{asked:g} TFLOP/s asked, {sheet['tflops']:g} ({kind}) and {bandwidth:,.0f} GB/s"
    found = call(answer, asked, dict(sheet))
    infinite = isinstance(found, (float, np.floating)) and math.isinf(found) and found > 0
    if asked > peak:
        if infinite:
            return
        value = number(found, "the least intensity in flop/byte")
        if sheet["with_sparsity"] and asked <= sheet["tflops"]:
            raise Wrong(
                f"For {case} your answer came out as {value:g}. Dense matrices get half of a figure with sparsity, so "
                "is there an intensity that reaches this rate?"
            )
        raise Wrong(
            f"For {case} your answer came out as {value:g}. The flat part of the roof lies below what is asked: no "
            "intensity is enough."
        )
    if infinite:
        edge = " The peak itself can be reached: the ridge does." if asked == peak else ""
        raise Wrong(f"For {case} you say that no intensity is enough, but the peak is not below it.{edge}")
    slips = {
        "that is the ridge, where the peak begins, whatever rate is asked": peak / bandwidth * 1e3,
        "the quotient is turned round: a rate over a bandwidth is wanted": bandwidth / asked / 1e3,
        "bandwidth times rate is no intensity: divide": asked * bandwidth,
        "TFLOP/s over GB/s is not yet flop/byte": asked / bandwidth,
        "the rate asked for is not halved by sparsity, the peak is": asked / 2 / bandwidth * 1e3,
    }
    judge(found, asked / bandwidth * 1e3, slips, case=case, what="the least intensity in flop/byte")


# --- where a measured kernel lies -----------------------------------------------------------------------------

_STATES = ("launch", "L2", "impossible", "memory", "compute")


@checkpoint("roofline.place")
def place(answer: Any, rng: np.random.Generator) -> str:
    """Give a kernel's share of the roof, not clamped, and say what its place comes from."""
    tflops, gb_per_s = float(rng.integers(60, 900)), float(rng.integers(300, 4000))
    ridge = tflops / gb_per_s * 1e3
    l2 = float(rng.integers(20, 80)) * 1e6
    large, small = l2 * float(rng.uniform(3, 9)), l2 * float(rng.uniform(0.1, 0.9))
    low, high = ridge * float(rng.uniform(0.05, 0.5)), ridge * float(rng.uniform(2, 8))
    # bytes, intensity, share of the roof, elapsed over device time
    cases = {
        "memory": (large, low, 0.85, 1.2),
        "compute": (large, high, 0.7, 1.1),
        "L2": (small, low, float(rng.uniform(1.2, 1.9)), 1.3),
        "launch": (small, low, float(rng.uniform(0.3, 0.9)), float(rng.uniform(3, 20))),
        "impossible": (large, low, float(rng.uniform(1.2, 3.0)), 1.05),
        # The names again, where one fact alone would decide otherwise.
        "launch ": (small, low, 1.4, float(rng.uniform(1.6, 9))),
        "memory ": (small, low, 0.4, 1.45),
        "compute ": (small, high, 0.5, 1.4),
        "impossible ": (large, high, 1.3, 1.4),
        "L2 ": (small, high, 1.2, 1.2),
    }
    names = list(cases)
    order = [*names[:5], *(names[5 + int(k)] for k in rng.permutation(5))]
    for name in order:
        moved, intensity, share, over = cases[name]
        moved = float(round(moved))
        flops = float(round(moved * intensity))
        roof = min(tflops * 1e12, flops / moved * gb_per_s * 1e9)
        device_us = round(flops / (share * roof) * 1e6, 6)
        kernel = {
            "flops": flops,
            "bytes": moved,
            "device_us": device_us,
            "elapsed_us": round(device_us * over, 6),
        }
        _judge_place(answer, kernel, {"tflops": tflops, "gb_per_s": gb_per_s, "l2_bytes": l2}, name.strip())
    return (
        "Right for every kind. A share above 1 is a fact to be explained, and cutting it off at 1 would have "
        "hidden two different ones."
    )


def _judge_place(answer: Any, kernel: dict[str, float], device: dict[str, float], state: str) -> None:
    found = items(call(answer, dict(kernel), dict(device)), "share and state", length=2)
    rate = kernel["flops"] / kernel["device_us"] * 1e6
    slope = kernel["flops"] / kernel["bytes"] * device["gb_per_s"] * 1e9
    peak = device["tflops"] * 1e12
    right = rate / min(peak, slope)
    case = (
        f"{kernel['flops']:.3g} flop, {kernel['bytes'] / 1e6:.3g} MB, {kernel['device_us']:.4g} µs on the device "
        f"and {kernel['elapsed_us']:.4g} µs elapsed, {device['tflops']:g} TFLOP/s, {device['gb_per_s']:g} GB/s, "
        f"L2 {device['l2_bytes'] / 1e6:g} MB"
    )
    slips = {
        "a share above 1 is cut off there, and with it what it tells": 1.0,
        "that is the share of the peak; at this intensity the roof is lower": rate / peak,
        "that is the share of the memory's line; at this intensity the peak is lower": rate / slope,
        "the elapsed time holds the launch as well: the share is the kernel's own, by device time": right
        * kernel["device_us"]
        / kernel["elapsed_us"],
        "the quotient is turned round: rate over roof": 1 / right,
    }
    judge(found[0], right, slips, rtol=1e-4, case=case, what="the share of the roof")
    told = word(found[1], "the state", tuple(name.casefold() for name in _STATES))
    if told != state.casefold():
        raise Wrong(f"For {case} the state came out as {show(found[1])}. {_why(told, state)}")


def _why(told: str, state: str) -> str:
    if state == "launch":
        return "Its elapsed time is more than 1.5 times its device time, and that is asked first."
    if told == "launch":
        return "Its elapsed time is not more than 1.5 times its device time."
    if state == "impossible":
        return "It beats the roof, and its bytes do not fit the L2: one of the numbers must be wrong."
    if state == "L2":
        return "It beats the roof, and its bytes fit the L2, from which they can have come."
    if told in ("l2", "impossible"):
        return "It does not beat the roof, so nothing has to be explained away: which side of the ridge is it on?"
    return "Compare its flop/byte with the ridge, peak over bandwidth."
