"""Answers to the checkpoints of the chapter on timing."""

from __future__ import annotations

import itertools
from typing import Any

from gpucourse.simulator import Kernel, SimulatedDevice
from tests.answers import Answers

# --- device_clock.four_timers


def _honest(readings: dict[str, float], busy: float) -> list[str]:
    return [name for name, value in readings.items() if abs(value - busy) < 1e-9 * busy]


def _by_recurrence(launch_us: float, kernel_us: float, n: int, pending_us: float) -> dict[str, Any]:
    free = pending_us
    for k in range(1, n + 1):
        free = max(free, k * launch_us) + kernel_us
    readings = {
        "wall": n * launch_us,
        "waited": free,
        "pair": free - pending_us,
        "behind_spin": n * kernel_us,
    }
    return {**readings, "honest": _honest(readings, n * kernel_us)}


def _in_closed_form(launch_us: float, kernel_us: float, n: int, pending_us: float) -> dict[str, Any]:
    # The last kernel ends after the longest of: all work behind the pending, or j launches and the rest.
    end = max(pending_us + n * kernel_us, launch_us + n * kernel_us, n * launch_us + kernel_us)
    readings = {"wall": n * launch_us, "waited": end, "pair": end - pending_us, "behind_spin": n * kernel_us}
    return {**readings, "honest": set(_honest(readings, n * kernel_us))}


def _changed(**changes: Any) -> Any:
    """Give the reference with some of its readings replaced; each change is a function of the arguments."""

    def answer(launch_us: float, kernel_us: float, n: int, pending_us: float) -> dict[str, Any]:
        readings = _by_recurrence(launch_us, kernel_us, n, pending_us)
        for name, change in changes.items():
            readings[name] = change(launch_us, kernel_us, n, pending_us)
        return readings

    return answer


def _end(launch_us: float, kernel_us: float, n: int, pending_us: float) -> float:
    return float(_by_recurrence(launch_us, kernel_us, n, pending_us)["waited"])


FOUR_TIMERS = Answers(
    right=[_by_recurrence, _in_closed_form],
    wrong={
        "launches that wait": (_changed(wall=lambda la, k, n, p: n * (la + k)), "never waits"),
        "wall reads the device's work": (_changed(wall=lambda la, k, n, p: n * k), "never waits"),
        "wall waits": (_changed(wall=_end), "never waits"),
        "pending forgotten": (
            _changed(waited=lambda la, k, n, p: _end(la, k, n, 0)),
            "pending when the clock",
        ),
        "nothing overlaps": (_changed(waited=lambda la, k, n, p: n * (la + k) + p), "`waited`"),
        "first launch hidden": (_changed(waited=lambda la, k, n, p: p + n * max(la, k)), "`waited`"),
        "pending work in the pair": (_changed(pair=_end), "not in the pair"),
        "events never see gaps": (_changed(pair=lambda la, k, n, p: n * k), "idle device waits"),
        "pair without regard to the queue": (
            _changed(pair=lambda la, k, n, p: _end(la, k, n, 0)),
            "pending work",
        ),
        "gaps behind the spin kernel": (
            _changed(behind_spin=lambda la, k, n, p: n * max(la, k)),
            "spin kernel ends",
        ),
        "trusts every event": (_changed(honest=lambda la, k, n, p: ["pair", "behind_spin"]), "trust `pair`"),
        "trusts the spin kernel alone": (
            _changed(honest=lambda la, k, n, p: ["behind_spin"]),
            "distrust `pair`",
        ),
        "seconds": (
            lambda la, k, n, p: {
                key: value if key == "honest" else value / 1e6
                for key, value in _by_recurrence(la, k, n, p).items()
            },
            "power of 1000",
        ),
        "a list": (lambda la, k, n, p: [n * la, _end(la, k, n, p)], "dict"),
        "one timer left out": (
            lambda la, k, n, p: {"wall": n * la, "waited": _end(la, k, n, p), "honest": []},
            "lacks",
        ),
        "not a number": (_changed(pair=lambda la, k, n, p: float("nan")), "finite"),
    },
)


# --- device_clock.timer


def _events(device: SimulatedDevice) -> tuple[Any, Any]:
    return device.Event(enable_timing=True), device.Event(enable_timing=True)


def _behind_spin(device: SimulatedDevice, call: Any) -> float:
    call()
    device.synchronize()
    start, end = _events(device)
    device.spin(5000.0)
    start.record()
    call()
    end.record()
    device.synchronize()
    return start.elapsed_time(end) * 1e3


def _difference_of_batches(device: SimulatedDevice, call: Any) -> float:
    """Hold the device with a kernel of its own; ten calls less five, so that any fixed part would cancel."""
    call()
    marks = [device.Event(enable_timing=True) for _ in range(3)]
    device.launch(Kernel(duration_us=50_000.0, name="hold"))
    marks[0].record()
    for _ in range(5):
        call()
    marks[1].record()
    for _ in range(10):
        call()
    marks[2].record()
    marks[2].synchronize()
    first, second = (a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    return (second - first) * 1e3 / 5


def _unsynchronized(device: SimulatedDevice, call: Any) -> float:
    call()
    device.synchronize()
    begin = device.perf_counter()
    call()
    return (device.perf_counter() - begin) * 1e6


def _host_clock(device: SimulatedDevice, call: Any) -> float:
    call()
    device.synchronize()
    begin = device.perf_counter()
    call()
    device.synchronize()
    return (device.perf_counter() - begin) * 1e6


def _host_clock_cold(device: SimulatedDevice, call: Any) -> float:
    begin = device.perf_counter()
    call()
    device.synchronize()
    return (device.perf_counter() - begin) * 1e6


def _never_waits(device: SimulatedDevice, call: Any) -> float:
    call()
    start, end = _events(device)
    device.spin(5000.0)
    start.record()
    call()
    end.record()
    return start.elapsed_time(end) * 1e3


def _waits_before_the_end(device: SimulatedDevice, call: Any) -> float:
    call()
    device.synchronize()
    start, end = _events(device)
    start.record()
    call()
    device.synchronize()
    end.record()
    device.synchronize()
    return start.elapsed_time(end) * 1e3


def _single_pair(device: SimulatedDevice, call: Any) -> float:
    call()
    device.synchronize()
    start, end = _events(device)
    start.record()
    call()
    end.record()
    device.synchronize()
    return start.elapsed_time(end) * 1e3


def _without_warm_up(device: SimulatedDevice, call: Any) -> float:
    start, end = _events(device)
    device.spin(1000.0)
    start.record()
    call()
    end.record()
    device.synchronize()
    return start.elapsed_time(end) * 1e3


def _spin_too_short(device: SimulatedDevice, call: Any) -> float:
    call()
    device.synchronize()
    start, end = _events(device)
    device.spin(6.0)
    start.record()
    call()
    end.record()
    device.synchronize()
    return start.elapsed_time(end) * 1e3


def _spin_inside(device: SimulatedDevice, call: Any) -> float:
    call()
    device.synchronize()
    start, end = _events(device)
    start.record()
    device.spin(1000.0)
    call()
    end.record()
    device.synchronize()
    return start.elapsed_time(end) * 1e3


def _divided_once_too_often(device: SimulatedDevice, call: Any) -> float:
    return _behind_spin(device, call) / 20


def _milliseconds(device: SimulatedDevice, call: Any) -> float:
    return _behind_spin(device, call) / 1e3


def _without_timing(device: SimulatedDevice, call: Any) -> float:
    call()
    start, end = device.Event(), device.Event()
    start.record()
    call()
    end.record()
    device.synchronize()
    return start.elapsed_time(end) * 1e3


def _leaves_work(device: SimulatedDevice, call: Any) -> float:
    result = _behind_spin(device, call)
    device.spin(100.0)
    return result


TIMER = Answers(
    right=[_behind_spin, _difference_of_batches],
    wrong={
        "clock read without waiting": (_unsynchronized, "without waiting"),
        "host clock, waited": (_host_clock, "host time"),
        "host clock, first call in it": (_host_clock_cold, "host time"),
        "elapsed time read at once": (_never_waits, "completed"),
        "waits before the end event": (_waits_before_the_end, "before the end event was recorded"),
        "one pair on an idle queue": (_single_pair, "idle between your marks"),
        "no warm-up": (_without_warm_up, "first call"),
        "spins too short": (_spin_too_short, "More than the device worked"),
        "spins between the marks": (_spin_inside, "More than the device worked"),
        "divided by calls not made": (_divided_once_too_often, "Less than the device worked"),
        "milliseconds": (_milliseconds, "unit"),
        "events without timing": (_without_timing, "enable_timing"),
        "leaves the device working": (_leaves_work, "still working"),
        "a constant": (lambda device, call: 18.3, "device"),
        "text": (lambda device, call: "1.0 µs", "text"),
    },
)

ANSWERS = {"device_clock.four_timers": FOUR_TIMERS, "device_clock.timer": TIMER}
