"""Answers to the checkpoints of the roofline lab."""

from __future__ import annotations

import math

from tests.answers import Answers

# --- roofline.least_intensity -----------------------------------------------------------------------------


def least_intensity(tflops_asked, sheet):
    peak = sheet["tflops"] / 2 if sheet["with_sparsity"] else sheet["tflops"]
    if tflops_asked > peak:
        return math.inf
    return tflops_asked * 1e12 / (sheet["bandwidth_gb_per_s"] * 1e9)


def by_the_ridge(tflops_asked, sheet):
    """Go down the slope from the ridge: rate and intensity are proportional there."""
    peak = sheet["tflops"] * (0.5 if sheet["with_sparsity"] else 1)
    ridge = 1000 * peak / sheet["bandwidth_gb_per_s"]
    return ridge * (tflops_asked / peak) if tflops_asked <= peak else float("inf")


def _sparse(tflops_asked, sheet):
    return least_intensity(tflops_asked, sheet | {"with_sparsity": False})


def _no_peak(tflops_asked, sheet):
    return tflops_asked * 1e3 / sheet["bandwidth_gb_per_s"]


def _ridge(tflops_asked, sheet):
    found = least_intensity(tflops_asked, sheet)
    peak = sheet["tflops"] / (2 if sheet["with_sparsity"] else 1)
    return found if math.isinf(found) else peak * 1e3 / sheet["bandwidth_gb_per_s"]


def _scaled(factor):
    return lambda asked, sheet: least_intensity(asked, sheet) * factor


def _strict(tflops_asked, sheet):
    peak = sheet["tflops"] / (2 if sheet["with_sparsity"] else 1)
    return math.inf if tflops_asked >= peak else least_intensity(tflops_asked, sheet)


def _clamped(tflops_asked, sheet):
    peak = sheet["tflops"] / (2 if sheet["with_sparsity"] else 1)
    return min(tflops_asked, peak) * 1e3 / sheet["bandwidth_gb_per_s"]


def _mutates(tflops_asked, sheet):
    found = least_intensity(tflops_asked, sheet)
    sheet["tflops"] = 1.0
    return found


# --- roofline.place ---------------------------------------------------------------------------------------


def place(kernel, device):
    intensity = kernel["flops"] / kernel["bytes"]
    roof = min(device["tflops"] * 1e12, intensity * device["gb_per_s"] * 1e9)
    share = kernel["flops"] / (kernel["device_us"] * 1e-6) / roof
    if kernel["elapsed_us"] > 1.5 * kernel["device_us"]:
        return share, "launch"
    if share > 1:
        return share, "L2" if kernel["bytes"] <= device["l2_bytes"] else "impossible"
    return share, "memory" if intensity * device["gb_per_s"] < device["tflops"] * 1e3 else "compute"


def place_by_times(kernel, device):
    """Compare times in place of rates: the least time over the measured one."""
    arithmetic_us = kernel["flops"] / device["tflops"] / 1e6
    bytes_us = kernel["bytes"] / device["gb_per_s"] / 1e3
    share = max(arithmetic_us, bytes_us) / kernel["device_us"]
    state = "memory" if bytes_us > arithmetic_us else "compute"
    if share > 1:
        state = "impossible" if kernel["bytes"] > device["l2_bytes"] else "l2"
    if kernel["elapsed_us"] / kernel["device_us"] > 1.5:
        state = "launch"
    return [share, state]


def _clamp(kernel, device):
    share, state = place(kernel, device)
    return min(share, 1.0), state


def _of_the_peak(kernel, device):
    return kernel["flops"] / kernel["device_us"] / 1e6 / device["tflops"], place(kernel, device)[1]


def _of_the_slope(kernel, device):
    return kernel["bytes"] / kernel["device_us"] / 1e3 / device["gb_per_s"], place(kernel, device)[1]


def _by_elapsed(kernel, device):
    return place(kernel | {"device_us": kernel["elapsed_us"]}, device)[0], place(kernel, device)[1]


def _no_launch(kernel, device):
    return place(kernel | {"elapsed_us": kernel["device_us"]}, device)


def _always_l2(kernel, device):
    share, state = place(kernel, device)
    return share, "L2" if state == "impossible" else state


def _small_is_l2(kernel, device):
    share, state = place(kernel, device)
    return share, "L2" if kernel["bytes"] <= device["l2_bytes"] and state != "launch" else state


def _never_impossible(kernel, device):
    share, state = place(kernel, device)
    return share, "memory" if state in ("impossible", "L2") else state


def _percent(kernel, device):
    share, state = place(kernel, device)
    return 100 * share, state


ANSWERS = {
    "roofline.least_intensity": Answers(
        right=[least_intensity, by_the_ridge],
        wrong={
            "the sparse peak": (_sparse, "half of a figure with sparsity"),
            "no peak at all": (_no_peak, "no intensity is enough"),
            "the ridge": (_ridge, "that is the ridge"),
            "TFLOP/s over GB/s": (_scaled(1e-3), "not yet flop/byte"),
            "GiB": (_scaled(1e9 / 2**30), "GiB"),
            "the peak is out of reach": (_strict, "the ridge does"),
            "clamped to the peak": (_clamped, "no intensity is enough"),
            "turned round": (
                lambda a, s: math.inf if math.isinf(v := least_intensity(a, s)) else 1 / v,
                "turned",
            ),
            "constant": (lambda asked, sheet: 64.6, "is not it"),
            "nan": (lambda asked, sheet: math.nan, "not a finite number"),
            "changes its input": (_mutates, "changed its input"),
        },
    ),
    "roofline.place": Answers(
        right=[place, place_by_times],
        wrong={
            "clamped": (_clamp, "cut off"),
            "share of the peak": (_of_the_peak, "share of the peak"),
            "share of the slope": (_of_the_slope, "the memory's line"),
            "elapsed time": (_by_elapsed, "elapsed time holds the launch"),
            "launch never seen": (_no_launch, "asked first"),
            "every excess is the L2": (_always_l2, "one of the numbers must be wrong"),
            "small means L2": (_small_is_l2, "does not beat the roof"),
            "excess not seen": (_never_impossible, "beats the roof"),
            "per cent": (_percent, "is not it"),
            "share alone": (lambda kernel, device: place(kernel, device)[0], "a list is wanted"),
        },
    ),
}
