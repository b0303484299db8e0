"""The time of a chain of equal kernels, from three numbers: how many, how long, and what a launch costs.

The rules are those of `gpucourse.simulator`, on one stream: the host pays for each launch and goes on, a
kernel begins once its launch has arrived and the kernel before it has ended. For equal kernels these rules
have a closed form. With m launches that cost L each, w of work behind each, and a latency a from the host to
the device,

    total = a + L + (m - 1) * max(L, w) + w                                                    [µs]

so the longer of the two sets the pace and the shorter shows at one end only. A CUDA graph is one launch with
the work of all kernels behind it: m = 1.

>>> chain = LaunchModel(kernels=100, kernel_us=0.9, launch_us=8.0)
>>> chain.total_us, chain.bound
(800.9, 'launch')
>>> LaunchModel(kernels=100, kernel_us=0.9, launch_us=8.0, way="graph").total_us
98.0

`compare` holds the model against a recorded sweep of chains.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from numbers import Integral
from typing import Any, Literal

from gpucourse import plain_data as given
from gpucourse.simulator import Kernel, SimulatedDevice
from gpucourse.work import short

__all__ = ["Bound", "ChainComparison", "LaunchModel", "Way", "compare"]

Way = Literal["eager", "graph"]
Bound = Literal["launch", "device", "both"]

_WAYS: tuple[Way, ...] = ("eager", "graph")
# In the recording chain_sweep: an event pair around the chain, and the host's clock around it without a wait.
_READINGS: dict[Way, str] = {"eager": "elapsed_ms", "graph": "graph_ms"}
_HOST_READINGS: dict[Way, str] = {"eager": "host_ms", "graph": "graph_host_ms"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchModel:
    """A chain of equal kernels on one stream, launched one by one or as one CUDA graph.

    The simulator counts in whole nanoseconds, and so does this model.

    Attributes
    ----------
    kernels
        How many.
    kernel_us
        How long the device needs for one, in µs: the period of such kernels back to back.
    launch_us
        What a launch costs the host, in µs; a graph costs one of these.
    way
        "eager" for one launch a kernel, "graph" for one launch in all.
    latency_us
        From the end of a launch on the host to its arrival at the device, in µs.

    Raises
    ------
    TypeError, ValueError
        The count is no positive integer, a time is no number, negative or not finite, or the way is neither
        word.

    Examples
    --------
    >>> LaunchModel(kernels=0, kernel_us=1.0, launch_us=8.0)
    Traceback (most recent call last):
    ...
    ValueError: kernels is 0: a positive integer is wanted
    """

    kernels: int
    kernel_us: float
    launch_us: float
    way: Way = "eager"
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        kernels: object = self.kernels  # numpy's integers are good ones, too
        if isinstance(kernels, bool) or not isinstance(kernels, Integral):
            raise TypeError(f"kernels is a {type(kernels).__name__}: a positive integer is wanted")
        if kernels < 1:
            raise ValueError(f"kernels is {kernels}: a positive integer is wanted")
        if self.way not in _WAYS:
            raise ValueError(f'way is {self.way!r}: "eager" or "graph" is wanted')
        # The simulator refuses the times that no host or device can have.
        SimulatedDevice(launch_us=self.launch_us, latency_us=self.latency_us)
        try:
            Kernel(duration_us=self.kernel_us)
        except (TypeError, ValueError) as error:
            raise type(error)(str(error).replace("duration_us", "kernel_us")) from None
        if self._total_ns > sys.float_info.max:
            raise ValueError(
                f"{short(self.kernels)} kernels of {short(self.kernel_us)} µs, {short(self.launch_us)} µs a launch, "
                "take longer than a float can say: fewer or shorter ones are wanted"
            )

    @property
    def launches(self) -> int:
        """Launches that the host pays for: one a kernel, or one for a graph."""
        return 1 if self.way == "graph" else int(self.kernels)

    @property
    def work_us(self) -> float:
        """Work that one launch puts before the device, in µs: a kernel, or all of a graph's."""
        return self._work_ns / 1e3

    @property
    def host_us(self) -> float:
        """What the host spends on launches, in µs."""
        return self.launches * _ns(self.launch_us) / 1e3

    @property
    def device_us(self) -> float:
        """What the device spends on kernels, in µs."""
        return self._device_ns / 1e3

    @property
    def pace_us(self) -> float:
        """From the start of one launch's work to the start of the next one's, in µs: the longer of the two."""
        return max(_ns(self.launch_us), self._work_ns) / 1e3

    @property
    def total_us(self) -> float:
        """From the first launch's begin on the host to the last kernel's end on the device, in µs."""
        return self._total_ns / 1e3

    @property
    def idle_us(self) -> float:
        """Part of the total in which the device runs nothing, in µs."""
        return (self._total_ns - self._device_ns) / 1e3

    @property
    def idle_share(self) -> float:
        """Idle part of the total, from 0 to 1; 0 where the total is 0."""
        return (self._total_ns - self._device_ns) / self._total_ns if self._total_ns else 0.0

    @property
    def bound(self) -> Bound:
        """What sets the pace: "launch", "device", or "both" where a launch lasts as long as its work."""
        launch, work = _ns(self.launch_us), self._work_ns
        return "both" if launch == work else "launch" if work < launch else "device"

    @property
    def bend_us(self) -> float:
        """Kernel length at which the total bends, in µs: below it, shorter kernels gain next to nothing."""
        return self.launch_us / (self.kernels if self.way == "graph" else 1)

    @property
    def queue_most(self) -> int:
        """Most launches that are made and not yet over, looked at whenever the host has made another.

        A real queue ends somewhere (chapter 4 records where); a chain longer than that holds the host, and
        changes neither the total nor the idle time.
        """
        launch, work, latency = _ns(self.launch_us), self._work_ns, _ns(self.latency_us)
        m = self.launches
        if work <= launch:  # each ends `latency + work` after its own launch
            return min(m, -(-(latency + work) // launch)) if launch else m * (latency > 0)
        # The k-th ends at `latency + launch + k * work`, so most wait when the last is launched.
        return m - max(0, ((m - 1) * launch - latency) // work)

    def simulate(self) -> SimulatedDevice:
        """Run the chain on a simulated device and wait for it; its history has every span.

        Examples
        --------
        >>> device = LaunchModel(kernels=3, kernel_us=2.0, launch_us=8.0).simulate()
        >>> device.perf_counter_ns()
        26000
        """
        device = SimulatedDevice(launch_us=self.launch_us, latency_us=self.latency_us)
        for _ in range(self.launches):
            device.launch(Kernel(duration_us=self.work_us))
        device.synchronize()
        return device

    @property
    def _work_ns(self) -> int:
        return _ns(self.kernel_us) * (int(self.kernels) if self.way == "graph" else 1)

    @property
    def _device_ns(self) -> int:
        return int(self.kernels) * _ns(self.kernel_us)

    @property
    def _total_ns(self) -> int:
        launch, work = _ns(self.launch_us), self._work_ns
        return _ns(self.latency_us) + launch + (self.launches - 1) * max(launch, work) + work


def _ns(us: float) -> int:
    return round(float(us) * 1000)


# --- beside what was recorded -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChainComparison:
    """One recorded chain of additions, and what the model says of it.

    Attributes
    ----------
    kernels
        Additions in the chain.
    elements
        Numbers that each adds to.
    way
        How it was launched.
    model
        The chain by the model.
    measured_us
        What an event pair around it read on an idle queue, in µs.
    own_pace
        The chain by the model once more, with what the host's clock read for this very chain as its launch
        cost; None where that was not read.
    """

    kernels: int
    elements: int
    way: Way
    model: LaunchModel
    measured_us: float
    own_pace: LaunchModel | None = None

    @property
    def predicted_us(self) -> float:
        """The model's total, in µs."""
        return self.model.total_us

    @property
    def residual_us(self) -> float:
        """Measured less predicted, in µs."""
        return self.measured_us - self.predicted_us

    @property
    def residual_share(self) -> float:
        """Residual over what was measured."""
        return self.residual_us / self.measured_us

    @property
    def own_residual_us(self) -> float | None:
        """Measured less what the model says with this chain's own launch cost, in µs; None without one."""
        return None if self.own_pace is None else self.measured_us - self.own_pace.total_us

    def as_dict(self) -> dict[str, Any]:
        """Give the numbers as plain data."""
        return {
            "kernels": self.kernels,
            "elements": self.elements,
            "way": self.way,
            "kernel_us": self.model.kernel_us,
            "launch_us": self.model.launch_us,
            "bound": self.model.bound,
            "predicted_us": self.predicted_us,
            "measured_us": self.measured_us,
            "residual_us": self.residual_us,
            "residual_share": self.residual_share,
            "own_launch_us": None if self.own_pace is None else self.own_pace.launch_us,
            "own_residual_us": self.own_residual_us,
        }


def compare(sweep: Mapping[str, Any]) -> tuple[ChainComparison, ...]:
    """Hold the model against a recorded sweep of chains, with nothing fitted to the chains' own totals.

    The launch cost is one for all chains, ``host_us``; the kernel's length is the device time of one addition
    of that size by itself, so that no chain predicts itself. A host is not always equally fast: `own_pace`
    takes the launch cost from the host's clock on that very chain, and so tells what the formula misses from
    what its input missed.

    Parameters
    ----------
    sweep
        The recording ``chain_sweep``: ``host_us``, ``chains`` and ``one``.

    Returns
    -------
    tuple of ChainComparison
        Each chain twice, eager and as a graph, by number of kernels and then by size. A reading that is None
        is left out, and so is a chain whose size was not measured by itself.

    Raises
    ------
    TypeError, ValueError
        It is no such recording, a reading in it is no fit one, the launch cost was not measured, or nothing is left
        to compare.

    Examples
    --------
    >>> sweep = {
    ...     "host_us": 8.0,
    ...     "one": [{"elements": 1024, "device_ms": 0.001}],
    ...     "chains": [{"kernels": 100, "elements": 1024, "elapsed_ms": 0.81, "graph_ms": 0.12}],
    ... }
    >>> [(row.way, row.predicted_us, round(row.residual_us, 1)) for row in compare(sweep)]
    [('eager', 801.0, 9.0), ('graph', 108.0, 12.0)]
    """
    if not isinstance(sweep, Mapping):
        raise TypeError(f"compare takes the recording chain_sweep, not {short(sweep)}")
    try:
        return _compared(sweep)
    except KeyError as error:
        raise ValueError(
            f"this sweep has no {error}, as the recording chain_sweep has: record chain_sweep anew on a GPU"
        ) from error


def _compared(sweep: Mapping[str, Any]) -> tuple[ChainComparison, ...]:
    if sweep["host_us"] is None:
        raise ValueError(
            "this sweep has no host_us, the host's cost of a launch: record chain_sweep anew on a GPU"
        )
    launch_us = given.number(sweep["host_us"], "host_us", least=0)
    singles, chains = (
        [_table(row, name) for row in given.rows(sweep[name], name)] for name in ("one", "chains")
    )
    alone = {
        given.whole(row["elements"], "elements", least=1): given.number(
            row["device_ms"], "device_ms", above=0
        )
        for row in singles
        if row["device_ms"] is not None
    }
    for row in chains:
        for name in ("kernels", "elements"):
            given.whole(row[name], name, least=1)
    rows = []
    for chain in sorted(chains, key=lambda row: (row["elements"], row["kernels"])):
        kernel_ms = alone.get(chain["elements"])
        for way in _WAYS:
            reading = chain[_READINGS[way]]
            if kernel_ms is None or reading is None:
                continue
            kernels, kernel_us = chain["kernels"], kernel_ms * 1e3
            reading = given.number(reading, _READINGS[way], above=0)
            host_ms = chain.get(_HOST_READINGS[way])
            own = None
            if host_ms is not None:
                own_us = (
                    given.number(host_ms, _HOST_READINGS[way], least=0)
                    * 1e3
                    / (1 if way == "graph" else kernels)
                )
                own = LaunchModel(kernels=kernels, kernel_us=kernel_us, launch_us=own_us, way=way)
            rows.append(
                ChainComparison(
                    kernels=kernels,
                    elements=chain["elements"],
                    way=way,
                    model=LaunchModel(kernels=kernels, kernel_us=kernel_us, launch_us=launch_us, way=way),
                    measured_us=reading * 1e3,
                    own_pace=own,
                )
            )
    if not rows:
        raise ValueError("this sweep has no chain whose size was also measured by itself: nothing to compare")
    return tuple(rows)


def _table(row: object, what: str) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise ValueError(f"an entry of {what} is {short(row)}: a table of fields is wanted")
    return row
