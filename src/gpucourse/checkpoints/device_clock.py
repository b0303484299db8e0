"""Checkpoints of the chapter on timing; all on a simulated host and device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpucourse.checkpoints._core import Wrong, call, checkpoint, items, judge, keyed, number, show
from gpucourse.simulator import Kernel, SimulatedDevice

_TIMERS = ("wall", "waited", "pair", "behind_spin")


def _draw(rng: np.random.Generator, low: float, high: float) -> float:
    """Draw a time in µs, a multiple of the simulator's nanosecond."""
    return round(float(rng.uniform(low, high)), 2)


# --- four timers on one queue ----------------------------------------------------------------------------


def _read_timers(launch_us: float, kernel_us: float, n: int, pending_us: float) -> dict[str, float]:
    """Run the four timers, each on a fresh device that still has `pending_us` of work before it; µs."""

    def fresh() -> SimulatedDevice:
        device = SimulatedDevice(launch_us=launch_us, keep_history=False)
        if pending_us:
            device.launch(Kernel(duration_us=pending_us, name="pending"))
        return device

    def launch_all(device: SimulatedDevice) -> None:
        for _ in range(n):
            device.launch(Kernel(duration_us=kernel_us))

    readings = {}
    device = fresh()
    begin = device.perf_counter_ns()
    launch_all(device)
    readings["wall"] = (device.perf_counter_ns() - begin) / 1e3
    device.synchronize()
    readings["waited"] = (device.perf_counter_ns() - begin) / 1e3
    for name, spin_us in (("pair", 0.0), ("behind_spin", 2 * n * launch_us + 1000.0)):
        device = fresh()
        if spin_us:
            device.spin(spin_us)
        start, end = device.Event(enable_timing=True), device.Event(enable_timing=True)
        start.record()
        launch_all(device)
        end.record()
        device.synchronize()
        readings[name] = start.elapsed_time(end) * 1e3
    return readings


@checkpoint("device_clock.four_timers")
def four_timers(answer: Any, rng: np.random.Generator) -> str:
    """Predict what four timers read in µs, and which of them read exactly n * kernel_us."""
    many = int(rng.integers(20, 60))
    # Launch, kernel, count, pending: each case sets two of the four apart that another one leaves equal.
    cases = [
        (_draw(rng, 4, 9), _draw(rng, 200, 400), 1, 0.0),
        (_draw(rng, 5, 9), _draw(rng, 0.8, 3), many, 0.0),
        (_draw(rng, 3, 6), _draw(rng, 20, 60), many, 0.0),
        (_draw(rng, 5, 9), _draw(rng, 0.8, 3), many, _draw(rng, 20, 60)),  # the queue runs dry on the way
        (_draw(rng, 5, 9), _draw(rng, 0.8, 3), many, _draw(rng, 900, 2000)),  # the host stays ahead
        (_draw(rng, 3, 6), _draw(rng, 20, 60), int(rng.integers(2, 9)), _draw(rng, 100, 900)),
    ]
    for k in rng.permutation(len(cases)):
        _judge_timers(answer, *cases[k])
    return (
        "Right on every queue. One of the four tells the device time on all of them: the one whose launches "
        "were all in the queue before the device came to the first."
    )


def _judge_timers(answer: Any, launch_us: float, kernel_us: float, n: int, pending_us: float) -> None:
    case = f"launch_us={launch_us}, kernel_us={kernel_us}, n={n}, pending_us={pending_us}"
    found = keyed(call(answer, launch_us, kernel_us, n, pending_us), (*_TIMERS, "honest"))
    right = _read_timers(launch_us, kernel_us, n, pending_us)
    idle = _read_timers(launch_us, kernel_us, n, 0.0)
    busy, stepwise, paced = n * kernel_us, n * (launch_us + kernel_us), n * max(launch_us, kernel_us)
    slips = {
        "wall": {
            "this timer never waits: a launch returns before its kernel runs": stepwise,
            "this timer never waits, so the device's work is not in it": busy,
            "this timer never waits, neither for its own kernels nor for what was pending": right["waited"],
        },
        "waited": {
            "what was pending when the clock started is waited for too": idle["waited"],
            "what was pending when the clock started is waited for, too": busy,
            "you let the host wait for each kernel before it launches the next": stepwise,
            "nothing hides the first launch, or the last kernel": paced,
            "the launches and the device's work overlap; you added them up": n * launch_us
            + busy
            + pending_us,
        },
        "pair": {
            "the start event lies behind the pending work, so that work is not in the pair": right["waited"],
            "an idle device waits inside the pair for the next launch": busy,
            "behind pending work some launches are there before the start event is passed": idle["pair"],
            "you let the host wait for each kernel before it launches the next": stepwise,
            "nothing hides the first launch, or the last kernel": paced,
        },
        "behind_spin": {
            "when the spin kernel ends, all launches are in the queue already": right["pair"],
            "when the spin kernel ends, all launches are in the queue: they cost nothing now": stepwise,
            "when the spin kernel ends, all launches are in the queue: nothing paces them now": paced,
        },
    }
    for timer in _TIMERS:
        judge(found[timer], right[timer], slips[timer], case=case, what=f"`{timer}` in µs")
    honest = {timer for timer in _TIMERS if abs(right[timer] - busy) <= 1e-6 * busy}
    named = found["honest"]
    named = sorted(named, key=str) if isinstance(named, set | frozenset) else items(named, "`honest`")
    for name in named:
        if name not in _TIMERS:
            raise Wrong(f"`honest` names {show(name)}; the timers are {', '.join(_TIMERS)}.")
    for name in _TIMERS:
        if name in named and name not in honest:
            raise Wrong(f"You trust `{name}` for {case}, but it does not read n * kernel_us there.")
        if name in honest and name not in named:
            raise Wrong(f"You distrust `{name}` for {case}, but it reads n * kernel_us there.")


# --- a timer of one's own --------------------------------------------------------------------------------

_ROOM_US = 20_000.0  # of spinning: outlasts the launches of any call drawn below


class _Case:
    """A device and a call on it, built alike as often as it is needed."""

    def __init__(
        self, text: str, rng: np.random.Generator, kernels: list[tuple[str, float]], pending_us: float
    ):
        # Each kernel has a name of its own, so that each pays for its own first launch.
        self.text = text
        self._body = [(where, Kernel(duration_us=us, name=f"k{i}")) for i, (where, us) in enumerate(kernels)]
        self._pending_us = pending_us
        self._launch_us, self._first_us = _draw(rng, 4, 12), _draw(rng, 2000, 6000)

    def build(self) -> tuple[SimulatedDevice, Callable[[], None]]:
        device = SimulatedDevice(
            launch_us=self._launch_us,
            record_us=1.0,
            synchronize_us=4.0,
            first_launch_us=self._first_us,
            keep_history=False,
        )
        side = device.new_stream()
        if self._pending_us:
            device.launch(Kernel(duration_us=self._pending_us, name="somebody else's"))

        def once() -> None:
            for where, kernel in self._body:
                if where == "main":
                    device.launch(kernel)
                    continue
                fork, join = device.Event(), device.Event()  # the side stream takes over, and hands back
                fork.record()
                side.wait_event(fork)
                device.launch(kernel, stream=side)
                join.record(side)
                device.current_stream.wait_event(join)

        return device, once

    def wall_us(self, *, warm: bool, wait: bool) -> float:
        """Read the host's clock around one call."""
        device, once = self.build()
        if warm:
            once()
            device.synchronize()
        begin = device.perf_counter_ns()
        once()
        if wait:
            device.synchronize()
        return (device.perf_counter_ns() - begin) / 1e3

    def pair_us(self, *, warm: bool, spin: bool, wait_inside: bool = False) -> float:
        """Read one event pair around one call."""
        device, once = self.build()
        if warm:
            once()
            device.synchronize()
        start, end = device.Event(enable_timing=True), device.Event(enable_timing=True)
        if spin:
            device.spin(_ROOM_US)
        start.record()
        once()
        if wait_inside:
            device.synchronize()
        end.record()
        device.synchronize()
        return start.elapsed_time(end) * 1e3

    def slips(self) -> dict[str, float]:
        """Give the readings of the timers that do not answer the question."""
        readings: dict[str, float] = {}
        for warm, too in ((True, ""), (False, ", and the first call is in it")):
            readings |= {
                f"the clock was read without waiting: that is the host's part{too}": self.wall_us(
                    warm=warm, wait=False
                ),
                f"that is host time, launches and wait included{too}": self.wall_us(warm=warm, wait=True),
                f"the device was idle between your marks, waiting for launches{too}": self.pair_us(
                    warm=warm, spin=False
                ),
                f"you waited before the end event was recorded: the host's return is in it{too}": (
                    self.pair_us(warm=warm, spin=False, wait_inside=True)
                ),
            }
        return readings


@checkpoint("device_clock.timer")
def timer(answer: Any, rng: np.random.Generator) -> str:
    """Time the device's part of one warmed-up call in µs, by events on a simulated device."""
    for case in _timer_cases(rng):
        device, once = case.build()
        right = case.pair_us(warm=True, spin=True)
        found = number(call(answer, device, once), "the time in µs")
        try:
            judge(found, right, case.slips(), rtol=1e-6, case=case.text, what="the time in µs")
        except Wrong as slip:
            if not str(slip).endswith("That is not it."):
                raise
            where = (
                "More than the device worked: is anything besides the call between your marks, or the first "
                "call, or did the queue run dry because the device was not held long enough?"
                if found > right
                else "Less than the device worked: is the end event behind the whole call, and is the time "
                "divided by the calls that were made?"
            )
            raise Wrong(f"{slip} {where}") from None
        if not device.current_stream.query():
            raise Wrong(f"For {case.text} your timer returned while the device was still working.")
    return (
        "Right on every queue: work pending before, kernels shorter and longer than their launches, a side "
        "stream. Two marks in the device's own queue, and nothing idle between them."
    )


def _timer_cases(rng: np.random.Generator) -> list[_Case]:
    def short() -> tuple[str, float]:
        return "main", _draw(rng, 0.8, 3)

    def long(where: str = "main") -> tuple[str, float]:
        return where, _draw(rng, 200, 900)

    several = int(rng.integers(3, 9))
    others_us = _draw(rng, 30_000, 60_000)
    cases = [
        _Case("one kernel shorter than its launch, idle queue", rng, [short()], 0.0),
        _Case("one kernel longer than its launch, idle queue", rng, [long()], 0.0),
        _Case(f"{several} short kernels, idle queue", rng, [short() for _ in range(several)], 0.0),
        _Case(
            f"{several} short kernels behind somebody else's work",
            rng,
            [short() for _ in range(several)],
            others_us,
        ),
        _Case("one long kernel behind somebody else's work", rng, [long()], others_us),
        _Case(
            "a long kernel on a side stream between two short ones",
            rng,
            [short(), long("side"), short()],
            0.0,
        ),
    ]
    return [cases[k] for k in rng.permutation(len(cases))]
