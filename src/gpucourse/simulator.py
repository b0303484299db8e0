"""A host and a device as clocks and queues, with CUDA's rules and no GPU.

What a timer reads follows from a few rules: the host spends time on each launch and goes on; the device
works through each stream in order; an event is a mark in a stream that the device passes when all before it
in that stream has ended; `synchronize` holds the host until the device has nothing left. `SimulatedDevice`
keeps these rules in integer nanoseconds, so a reading has one right value and a queue can be drawn.

Not modelled: kernels of different streams never slow each other down, an event takes the device no time, and
a launch that waits for a full queue wakes at once.

>>> device = SimulatedDevice(launch_us=5.0)
>>> begin = device.perf_counter()
>>> device.launch(Kernel(duration_us=340.0))
>>> round((device.perf_counter() - begin) * 1e6)  # the host has launched, no more
5
>>> device.synchronize()
>>> round((device.perf_counter() - begin) * 1e6)  # the device has worked
345
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import math
from collections.abc import Iterator
from numbers import Integral, Real
from typing import Any, Literal

__all__ = ["Kernel", "SimulatedDevice", "SimulatedEvent", "SimulatedStream", "Span"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A piece of work for the device.

    Attributes
    ----------
    duration_us
        How long the device works on it, in µs.
    name
        Kernels of one name share their first-launch cost.

    Raises
    ------
    TypeError, ValueError
        The duration is no number, negative or not finite.

    Examples
    --------
    >>> Kernel(duration_us=-1.0)
    Traceback (most recent call last):
    ...
    ValueError: duration_us is -1.0: a time in µs is finite and not negative
    """

    duration_us: float
    name: str = "kernel"

    def __post_init__(self) -> None:
        _nanoseconds(self.duration_us, "duration_us")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What a lane did from one instant to another; a mark where both are the same.

    Attributes
    ----------
    lane
        "host", or "stream 0", "stream 1" and so on.
    kind
        "launch", "record", "wait" and "work" on the host; "kernel", "spin" and "event" on a stream.
    name
        The kernel's or the event's name.
    start_us, end_us
        Since the simulation began, in µs.
    """

    lane: str
    kind: Literal["launch", "record", "wait", "work", "kernel", "spin", "event"]
    name: str
    start_us: float
    end_us: float


class SimulatedStream:
    """A queue that the device works through in order; made by `SimulatedDevice.new_stream`."""

    def __init__(self, device: SimulatedDevice, number: int) -> None:
        self._device = device
        self._free_ns = 0  # when all that has been queued here will have ended
        self.lane = f"stream {number}"

    def synchronize(self) -> None:
        """Hold the host until all that was queued here has ended."""
        self._device._wait(self._free_ns, self.lane)

    def query(self) -> bool:
        """Whether all that was queued here has ended, without waiting."""
        return self._free_ns <= self._device._now_ns

    def wait_event(self, event: SimulatedEvent) -> None:
        """Let nothing queued here from now on begin before `event`'s latest record; the host goes on.

        An event that was never recorded holds nothing, as in CUDA.
        """
        self._device._own(event)
        if event._done_ns is not None:
            self._free_ns = max(self._free_ns, event._done_ns)

    def __repr__(self) -> str:
        return f"SimulatedStream({self.lane})"


class SimulatedEvent:
    """A mark in a stream; made by `SimulatedDevice.Event`.

    It is unrecorded, then pending, then complete once the device has passed it. Recording it again moves it.
    """

    def __init__(self, device: SimulatedDevice, enable_timing: bool, name: str) -> None:
        self._device = device
        self._timing = enable_timing
        self._done_ns: int | None = None
        self.name = name

    @property
    def state(self) -> Literal["unrecorded", "pending", "complete"]:
        """The state at the host's present instant."""
        if self._done_ns is None:
            return "unrecorded"
        return "complete" if self._done_ns <= self._device._now_ns else "pending"

    def record(self, stream: SimulatedStream | None = None) -> None:
        """Put the mark at the end of `stream`'s queue (the current stream's by default); the host goes on."""
        self._done_ns = self._device._mark(self._device._stream(stream), self.name)

    def query(self) -> bool:
        """Whether the device has passed the mark; True for an unrecorded event, as in CUDA."""
        return self.state != "pending"

    def synchronize(self) -> None:
        """Hold the host until the device has passed the mark; returns at once where it is unrecorded."""
        if self._done_ns is not None:
            self._device._wait(self._done_ns, self.name)

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Give the time on the device's clock from this mark to `end`, in ms.

        Raises
        ------
        ValueError
            One of the two was made without ``enable_timing=True`` or never recorded, or belongs to another
            device.
        RuntimeError
            The device has not passed one of them yet: something has to wait first.
        """
        self._device._own(end)
        if not (self._timing and end._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._done_ns is None or end._done_ns is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end._done_ns - self._done_ns) / 1e6

    def __repr__(self) -> str:
        return f"SimulatedEvent({self.name}, {self.state})"


class SimulatedDevice:
    """One host thread and one device.

    Parameters
    ----------
    launch_us
        What a launch costs the host, in µs.
    record_us
        What recording an event costs the host, in µs.
    latency_us
        From the end of a launch or record on the host to its arrival at the device, in µs.
    synchronize_us
        From the end of the device's work to the host's return from a wait for it, in µs.
    first_launch_us
        What the first launch of each kernel name costs the host on top (loading it, choosing it), in µs.
    queue_depth
        How many kernels may be pending at once; a launch beyond that holds the host.
    keep_history
        Whether `history` is kept.

    Raises
    ------
    TypeError, ValueError
        A time is no number, negative or not finite, or the depth no positive integer.

    Examples
    --------
    Work of somebody else is pending; the event pair does not count it.

    >>> device = SimulatedDevice(launch_us=5.0)
    >>> device.launch(Kernel(duration_us=1000.0, name="somebody else's"))
    >>> start, end = device.Event(enable_timing=True), device.Event(enable_timing=True)
    >>> start.record()
    >>> device.launch(Kernel(duration_us=340.0))
    >>> end.record()
    >>> start.elapsed_time(end)
    Traceback (most recent call last):
    ...
    RuntimeError: Both events must be completed before calculating elapsed time.
    >>> device.synchronize()
    >>> round(start.elapsed_time(end), 3)
    0.34
    """

    def __init__(
        self,
        *,
        launch_us: float = 5.0,
        record_us: float = 0.0,
        latency_us: float = 0.0,
        synchronize_us: float = 0.0,
        first_launch_us: float = 0.0,
        queue_depth: int = 1024,
        keep_history: bool = True,
    ) -> None:
        depth: object = queue_depth  # numpy's integers are good ones, too
        if isinstance(depth, bool) or not isinstance(depth, Integral):
            raise TypeError(f"queue_depth is a {type(depth).__name__}: a positive integer is wanted")
        if depth < 1:
            raise ValueError(f"queue_depth is {depth}: a positive integer is wanted")
        self._launch_ns = _nanoseconds(launch_us, "launch_us")
        self._record_ns = _nanoseconds(record_us, "record_us")
        self._latency_ns = _nanoseconds(latency_us, "latency_us")
        self._synchronize_ns = _nanoseconds(synchronize_us, "synchronize_us")
        self._first_launch_ns = _nanoseconds(first_launch_us, "first_launch_us")
        self._depth = int(queue_depth)
        self._now_ns = 0
        self._pending: list[int] = []  # a heap of the instants at which pending kernels will have ended
        self._seen: set[str] = set()
        self._events = 0
        self._history: list[Span] | None = [] if keep_history else None
        self._streams = [SimulatedStream(self, 0)]
        self._current = self._streams[0]

    # --- the host's clock

    def perf_counter(self) -> float:
        """Read the host's clock, in seconds; reading takes no time."""
        return self._now_ns / 1e9

    def perf_counter_ns(self) -> int:
        """Read the host's clock, in nanoseconds."""
        return self._now_ns

    def sleep(self, us: float) -> None:
        """Let the host do something else for `us` µs; the device goes on with its queue."""
        self._spend(_nanoseconds(us, "us"), "work", "host work")

    # --- streams and events

    @property
    def current_stream(self) -> SimulatedStream:
        """The stream that launches and records go to."""
        return self._current

    def new_stream(self) -> SimulatedStream:
        """Make another stream; it does not wait for the others by itself."""
        self._streams.append(SimulatedStream(self, len(self._streams)))
        return self._streams[-1]

    @contextlib.contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[SimulatedStream]:
        """Make `stream` the current one inside the block."""
        before, self._current = self._current, self._stream(stream)
        try:
            yield stream
        finally:
            self._current = before

    def Event(self, enable_timing: bool = False, name: str = "") -> SimulatedEvent:  # noqa: N802 - as torch.cuda
        """Make an event; only one with ``enable_timing=True`` can be read."""
        self._events += 1
        return SimulatedEvent(self, enable_timing, name or f"event {self._events}")

    # --- work

    def launch(self, kernel: Kernel, stream: SimulatedStream | None = None) -> None:
        """Queue a kernel (on the current stream by default); the host pays for the launch and goes on.

        Raises
        ------
        TypeError
            `kernel` is no `Kernel`.
        """
        if not isinstance(kernel, Kernel):
            raise TypeError(
                f"launch takes a Kernel, found {type(kernel).__name__}; write Kernel(duration_us=340.0)"
            )
        self._enqueue(kernel.name, _nanoseconds(kernel.duration_us, "duration_us"), stream, "kernel")

    def spin(self, us: float, stream: SimulatedStream | None = None) -> None:
        """Queue a kernel that only holds the stream for `us` µs, as ``torch.cuda._sleep`` does for cycles."""
        self._enqueue("spin", _nanoseconds(us, "us"), stream, "spin")

    def synchronize(self) -> None:
        """Hold the host until every stream has come to its end."""
        self._wait(max(stream._free_ns for stream in self._streams), "device")

    def item(self) -> None:
        """Copy one value back from the current stream: nothing says so, but it waits like `synchronize`."""
        self._current.synchronize()

    @property
    def history(self) -> list[Span]:
        """What host and streams did so far, in order of being queued.

        Raises
        ------
        RuntimeError
            The device was made with ``keep_history=False``.
        """
        if self._history is None:
            raise RuntimeError(
                "this device keeps no history: read events, or make one with keep_history=True"
            )
        return list(self._history)

    # --- the rules

    def _enqueue(
        self, name: str, duration_ns: int, stream: SimulatedStream | None, kind: Literal["kernel", "spin"]
    ) -> None:
        queue = self._stream(stream)
        while self._pending and self._pending[0] <= self._now_ns:
            heapq.heappop(self._pending)
        if len(self._pending) >= self._depth:
            begin, self._now_ns = self._now_ns, heapq.heappop(self._pending)
            self._remember("host", "wait", "full queue", begin, self._now_ns)
        first = self._first_launch_ns if kind == "kernel" and name not in self._seen else 0
        self._seen.add(name)
        self._spend(self._launch_ns + first, "launch", name)
        begin = max(self._now_ns + self._latency_ns, queue._free_ns)
        queue._free_ns = begin + duration_ns
        heapq.heappush(self._pending, queue._free_ns)
        self._remember(queue.lane, kind, name, begin, queue._free_ns)

    def _mark(self, queue: SimulatedStream, name: str) -> int:
        self._spend(self._record_ns, "record", name)
        queue._free_ns = max(self._now_ns + self._latency_ns, queue._free_ns)
        self._remember(queue.lane, "event", name, queue._free_ns, queue._free_ns)
        return queue._free_ns

    def _wait(self, until_ns: int, name: str) -> None:
        begin = self._now_ns
        self._now_ns = max(begin, until_ns) + self._synchronize_ns
        self._remember("host", "wait", name, begin, self._now_ns)

    def _spend(self, ns: int, kind: Literal["launch", "record", "work"], name: str) -> None:
        begin, self._now_ns = self._now_ns, self._now_ns + ns
        self._remember("host", kind, name, begin, self._now_ns)

    def _remember(
        self,
        lane: str,
        kind: Literal["launch", "record", "wait", "work", "kernel", "spin", "event"],
        name: str,
        begin_ns: int,
        end_ns: int,
    ) -> None:
        if self._history is not None:
            span = Span(lane=lane, kind=kind, name=name, start_us=begin_ns / 1e3, end_us=end_ns / 1e3)
            self._history.append(span)

    def _stream(self, stream: SimulatedStream | None) -> SimulatedStream:
        if stream is None:
            return self._current
        self._own(stream)
        return stream

    def _own(self, thing: SimulatedStream | SimulatedEvent) -> None:
        if not isinstance(thing, SimulatedStream | SimulatedEvent):
            raise TypeError(
                f"found {type(thing).__name__} where a stream or an event of this device is wanted: "
                "make it with new_stream() or Event()"
            )
        if thing._device is not self:
            raise ValueError(f"{thing!r} belongs to another simulated device")


def _nanoseconds(us: Any, what: str) -> int:
    if isinstance(us, bool) or not isinstance(us, Real):
        raise TypeError(f"{what} is a {type(us).__name__}: a time in µs is a number")
    try:
        time_us = float(us)  # numpy's narrow integers would wrap round
    except OverflowError:  # an integer beyond all floats
        time_us = math.inf
    if not math.isfinite(time_us * 1000) or time_us < 0:
        raise ValueError(f"{what} is {time_us}: a time in µs is finite and not negative")
    return round(time_us * 1000)
