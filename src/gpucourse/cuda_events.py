"""Time device work on the device's own clock.

Two different times are measured and neither is ever given for the other. The *device time* is what one
call costs the device when launches never keep it waiting. The *elapsed time* is what an event pair reads
around the call exactly as Python launches it, waiting included.

A single event pair around a short kernel reads the road to the device, not the kernel. So short calls are
timed many at once, in a CUDA graph or queued behind a kernel that spins while the host enqueues them; which
way was taken stands in `Timing.method`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from gpucourse.environment import Environment, require_cuda

if TYPE_CHECKING:
    from gpucourse.roofline import Work

__all__ = [
    "METHOD_VERSION",
    "ImpossibleTimingError",
    "NothingLaunchedError",
    "Region",
    "Timing",
    "region",
    "time_cuda",
]

METHOD_VERSION = 2

LONG_MS = 0.2  # from here on, an event (about 1 µs) between two calls no longer shows
GRAPH_MS = 0.3  # how much device time one replay holds
CLOCK_CYCLES = 500_000  # how long the clock itself is timed, before and after
SPIN_CYCLES_PER_MS = 2_000_000  # clock cycles; at a lower clock the spin only lasts longer
MIN_SAMPLES, MAX_SAMPLES = 20, 1000
NOTHING_MS = 5e-5  # no kernel is over in 50 ns
LAUNCH_BOUND = 1.5  # elapsed above this many times the device time


class NothingLaunchedError(ValueError):
    """The call put no work on the device, so there is no device time to give."""


class ImpossibleTimingError(ValueError):
    """A time that no such device can reach: the clock was read without waiting, or work was missed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The device time and the elapsed time of one call, with the conditions they were measured under.

    Attributes
    ----------
    samples_ms
        Device time of one call, in ms, one value a sample; statistics are derived from these.
    elapsed_ms
        Median over warmed-up event pairs around one call as Python launches it on an idle queue, in ms.
    host_ms
        Median time that the host needs to enqueue one call, in ms.
    method
        How the samples were taken.
    l2
        "warm": the calls find in the L2 what the call before left there; "cold": flushed before each call.
    arguments
        Shape and dtype of each argument that is a tensor.
    arguments_changed
        Whether `fn` wrote into its arguments, so that the calls did not all see the same input.
    escaped
        Whether work was still running on another stream when the end event was complete: it is not counted.
    device
        "cuda", or "cpu" where the host itself was timed.
    environment
        The machine.
    tf32_allowed
        Whether fp32 products could run in tf32.
    clock_mhz
        The multiprocessors' clock before and after the samples, in MHz, by the device's own cycle counter.
    """

    samples_ms: tuple[float, ...]
    elapsed_ms: float
    host_ms: float
    method: str
    l2: str
    arguments: tuple[dict[str, Any], ...]
    arguments_changed: bool
    escaped: bool
    device: str
    environment: Environment
    tf32_allowed: bool = False
    clock_mhz: tuple[float, ...] = ()

    @property
    def median_ms(self) -> float:
        """Median device time of one call, in ms."""
        return statistics.median(self.samples_ms)

    @property
    def iqr_ms(self) -> float:
        """Distance between the quartiles of the samples, in ms (0 for fewer than two samples)."""
        return _iqr(self.samples_ms)

    @property
    def launch_bound(self) -> bool:
        """Whether the elapsed time is well above the device time, so launching is what the call pays for."""
        return self.device == "cuda" and self.elapsed_ms > LAUNCH_BOUND * self.median_ms

    @property
    def noisy(self) -> bool:
        """Whether the quartiles lie further apart than a tenth of the median."""
        return self.iqr_ms > 0.1 * self.median_ms

    @property
    def throttled(self) -> bool:
        """Whether the clock fell by more than a thirtieth while it was timed, or stood a tenth below its maximum."""
        if not self.clock_mhz:
            return False
        highest = self.environment.max_sm_clock_mhz or 0
        return self.clock_mhz[-1] < max(0.97 * self.clock_mhz[0], 0.9 * highest)

    def as_dict(self) -> dict[str, Any]:
        """Give the fields and the derived values as plain data; the machine stands in the provenance."""
        names = ("elapsed_ms", "host_ms", "method", "l2", "arguments_changed", "escaped", "device")
        return {
            "median_ms": self.median_ms,
            "iqr_ms": self.iqr_ms,
            "launch_bound": self.launch_bound,
            "throttled": self.throttled,
            "clock_mhz": list(self.clock_mhz),
            **{name: getattr(self, name) for name in names},
            "arguments": list(self.arguments),
            "samples_ms": list(self.samples_ms),
        }

    def __str__(self) -> str:
        kind = "device time" if self.device == "cuda" else "host time (no GPU was timed)"
        parts = [f"{kind} {_ms(self.median_ms)} (IQR {_ms(self.iqr_ms)}, {len(self.samples_ms)} samples)"]
        if self.launch_bound:
            parts.append(f"elapsed {_ms(self.elapsed_ms)} as launched (launch-bound)")
        if self.noisy:
            parts.append("noisy: compare nothing within its spread")
        if self.throttled:
            parts.append(f"clock {' → '.join(f'{mhz:.0f}' for mhz in self.clock_mhz)} MHz: throttled")
        if self.escaped:
            parts.append("work on another stream was still running at the end and is not counted")
        if self.arguments_changed:
            parts.append("the call changed its arguments")
        parts += [self.method, f"L2 {self.l2}"] if self.device == "cuda" else [self.method]
        parts.append(
            " ".join(f"{tuple(a['shape'])} {a['dtype']}" for a in self.arguments) or "no tensor arguments"
        )
        parts.append(self.environment.line())
        return "; ".join(parts)

    def check(self, work: Work) -> str:
        """Hold the time against what the device can do at all.

        Parameters
        ----------
        work
            Floating-point operations and least traffic of one call.

        Returns
        -------
        str
            The rate reached and what was compared, or "cannot judge" with the reason.

        Raises
        ------
        ImpossibleTimingError
            The rate is above the dense peak of the precision that ran, at the card's maximum clock; or the
            traffic is above the bandwidth of the memory although it cannot have come from the L2.
        """
        from gpucourse import hardware

        if self.device != "cuda":
            return "cannot judge: the host was timed, not a GPU"
        record = hardware.find(self.environment.gpu or "")
        if record is None:
            return (
                f"cannot judge: no datasheet record of {self.environment.gpu!r}; `gpucourse.roofline."
                "measure_roofline` measures this card's ceilings"
            )
        seconds = self.median_ms / 1e3
        said = []
        precision = self._precision()
        if work.flops and precision and precision not in record.peaks:
            said.append(f"cannot judge the arithmetic: the record of {record.name} has no {precision} peak")
        elif work.flops and precision:
            rate = work.flops / seconds
            peak = record.peak_flops_at_clock(precision, self.environment.max_sm_clock_mhz)
            if rate > peak:
                raise ImpossibleTimingError(
                    f"{work.flops:.4g} FLOP in {_ms(self.median_ms)} are {rate / 1e12:,.1f} TFLOP/s, and "
                    f"{record.name} reaches at most {peak / 1e12:,.1f} in dense {precision}. Was the clock "
                    "read before the device was done, or did the work run on another stream?"
                )
            said.append(f"{rate / 1e12:,.1f} TFLOP/s, {rate / peak:.0%} of dense {precision}")
        if work.bytes:
            bandwidth, l2_bytes = work.bytes / seconds, self.environment.l2_bytes or 0
            from_memory = self.l2 == "cold" or (l2_bytes > 0 and work.bytes > 4 * l2_bytes)
            share = bandwidth / record.bandwidth_bytes_per_s
            if share > 1 and from_memory:
                raise ImpossibleTimingError(
                    f"{work.bytes:.4g} bytes in {_ms(self.median_ms)} are {bandwidth / 1e9:,.0f} GB/s, and "
                    f"the memory of {record.name} moves {record.bandwidth_bytes_per_s / 1e9:,.0f}. Was the "
                    "clock read before the device was done, or are the bytes counted twice?"
                )
            note = " (served from the L2)" if share > 1 else ""
            said.append(f"{bandwidth / 1e9:,.0f} GB/s, {share:.0%} of the datasheet's bandwidth{note}")
        return "; ".join(said) or "cannot judge: the work has no counts"

    def _precision(self) -> str | None:
        """Give the precision whose peak binds: that of the first floating-point argument."""
        names = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
        for argument in self.arguments:
            found = names.get(argument["dtype"])
            if found:
                return "tf32" if found == "fp32" and self.tf32_allowed else found
        return None


def _ms(value: float) -> str:
    return f"{value * 1e3:.3g} µs" if value < 0.1 else f"{value:.4g} ms"


def _iqr(samples: tuple[float, ...] | list[float]) -> float:
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high - low


def _describe(args: tuple[Any, ...]) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"shape": list(arg.shape), "dtype": str(arg.dtype).removeprefix("torch.")}
        for arg in args
        if hasattr(arg, "shape") and hasattr(arg, "dtype")
    )


def _versions(args: tuple[Any, ...]) -> list[int]:
    """Count the in-place writes that autograd has seen on each tensor argument."""
    return [arg._version for arg in args if hasattr(arg, "_version")]


def _settled(samples: list[float], spread: float) -> bool:
    """Whether the median's standard error (1.25 IQR / 1.35 / sqrt n) is within `spread` of the median."""
    if len(samples) < MIN_SAMPLES:
        return False
    error = 1.25 * _iqr(samples) / 1.35 / math.sqrt(len(samples))
    return error <= spread * statistics.median(samples)


def time_cuda(
    fn: Callable[..., Any],
    *args: Any,
    device: Literal["cuda", "cpu"] = "cuda",
    l2: Literal["warm", "cold"] = "warm",
    spread: float = 0.002,
    max_seconds: float = 0.5,
) -> Timing:
    """Time one call of ``fn(*args)``: device time and elapsed time, each by a method of its own.

    Parameters
    ----------
    fn
        What to time; its keyword arguments go in by `functools.partial`. It is called many times.
    *args
        Its arguments, passed on unchanged.
    device
        "cuda", or "cpu" to time the host instead (the result says so).
    l2
        "warm" leaves in the L2 what the call before left there; "cold" flushes it before each call, outside
        the interval.
    spread
        Stop sampling when the standard error of the median is this share of it (never before 20 samples).
    max_seconds
        Stop sampling after this many seconds whatever the spread; the pilot comes on top.

    Returns
    -------
    Timing
        Counted is the work on the current stream, and what that stream waits for.

    Raises
    ------
    NoGPUError
        There is no CUDA device and `device` is "cuda".
    NothingLaunchedError
        `fn` put no work on the device.
    TypeError, ValueError
        `fn` cannot be called, or an option is none of the above.

    Notes
    -----
    A pilot takes the elapsed time and estimates the device time behind a spinning kernel. Then, warm: calls
    of 0.2 ms and longer are queued behind the spinning kernel, up to twenty (4 ms) in one event pair;
    shorter ones are put into two CUDA graphs, of n and 2n calls, whose difference holds no launch of the
    graph; where `fn` cannot be captured, n and 2n calls are queued behind the spinning kernel instead.
    Cold: two CUDA graphs of ten flushes of the L2, with and without the call, and their difference; where
    `fn` cannot be captured, one event pair a call behind the spinning kernel, less what an empty pair reads
    there. A flush writes twice the size of the L2. Events resolve about half a microsecond (CUDA
    documentation of ``cudaEventElapsedTime``), which n divides.
    """
    if not callable(fn):
        raise TypeError(
            f"time_cuda times a function, found {type(fn).__name__}: pass torch.matmul, not its result"
        )
    if device not in ("cuda", "cpu") or l2 not in ("warm", "cold"):
        raise ValueError(f'device is "cuda" or "cpu" and l2 is "warm" or "cold"; found {device!r} and {l2!r}')
    for name, value in (("spread", spread), ("max_seconds", max_seconds)):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, found {value!r} of type {type(value).__name__}")
    if not 0 < spread < 1 or not 0 < max_seconds < math.inf:
        raise ValueError(f"spread is in (0, 1) and max_seconds above 0; found {spread!r} and {max_seconds!r}")
    call = functools.partial(fn, *args)
    before = _versions(args)
    if device == "cpu":
        return _time_host(call, args, before, spread, max_seconds)
    require_cuda("time_cuda")
    import torch

    with torch.cuda.device(torch.cuda.current_device()):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        changed = _versions(args) != before
        elapsed_ms, host_ms, escaped = _as_launched(call)
        first_mhz = _clock_mhz()
        try:
            samples, method = (_cold if l2 == "cold" else _warm)(call, host_ms, spread, max_seconds)
        except _QueueRanDryError:
            samples, method = _unqueued(call, spread, max_seconds)
            if l2 == "cold":
                method += "; the L2 could not be flushed between"
        last_mhz = _clock_mhz()
        if statistics.median(samples) < NOTHING_MS:
            where = (
                "its work runs on a stream that the current one does not wait for"
                if escaped
                else "it is empty"
            )
            raise NothingLaunchedError(
                f"the call leaves no work on the current stream: {where}. Let the current stream wait "
                '(torch.cuda.current_stream().wait_stream(side)), or time the host with device="cpu".'
            )
    return Timing(
        samples_ms=tuple(samples),
        elapsed_ms=elapsed_ms,
        host_ms=host_ms,
        method=method,
        l2=l2,
        arguments=_describe(args),
        arguments_changed=changed,
        escaped=escaped,
        device="cuda",
        environment=Environment.capture(),
        tf32_allowed=bool(torch.backends.cuda.matmul.allow_tf32),
        clock_mhz=(first_mhz, last_mhz) if first_mhz and last_mhz else (),
    )


def _time_host(
    call: Callable[[], Any], args: tuple[Any, ...], before: list[int], spread: float, max_seconds: float
) -> Timing:
    for _ in range(3):
        call()
    samples: list[float] = []
    end = time.perf_counter() + max_seconds
    while len(samples) < MAX_SAMPLES and not _settled(samples, spread):
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e3)
        if time.perf_counter() > end:  # after a sample: however short the time, there is one
            break
    return Timing(
        samples_ms=tuple(samples),
        elapsed_ms=statistics.median(samples),
        host_ms=statistics.median(samples),
        method="host clock (time.perf_counter) around each call",
        l2="warm",
        arguments=_describe(args),
        arguments_changed=_versions(args) != before,
        escaped=False,
        device="cpu",
        environment=Environment.capture(),
    )


def _event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _as_launched(call: Callable[[], Any]) -> tuple[float, float, bool]:
    """Read one event pair around a call on an idle queue, the host's part of it, and what escapes it."""
    import torch

    elapsed, host, after = [], [], []
    for _ in range(10):
        torch.cuda.synchronize()
        start, end = _event(), _event()
        start.record()
        begin = time.perf_counter()
        call()
        host.append((time.perf_counter() - begin) * 1e3)
        end.record()
        end.synchronize()
        begin = time.perf_counter()
        torch.cuda.synchronize()
        after.append((time.perf_counter() - begin) * 1e3)
        elapsed.append(start.elapsed_time(end))
    # Waiting for an idle device takes the host some microseconds, and more after a long wait. Where even the
    # shortest of ten waits is longer than that, another stream was still busy; what is over sooner than that
    # after the end event goes unnoticed.
    usual_ms = 0.05 + 0.02 * statistics.median(elapsed)
    return statistics.median(elapsed), statistics.median(host), min(after) > usual_ms


def _clock_mhz() -> float | None:
    """Time the spinning kernel, which counts the device's own cycles, behind another one; None where it fails."""
    import torch

    def spin() -> None:
        torch.cuda._sleep(CLOCK_CYCLES)  # type: ignore[no-untyped-call]

    try:
        return CLOCK_CYCLES / (_queue(spin, 1, 0.1) * 1e3)
    except _QueueRanDryError:
        return None


class _QueueRanDryError(Exception):
    """The device began before the host had enqueued everything, so gaps would be measured."""


def _behind_spin(enqueue: Callable[[], list[Any]], host_ms: float) -> list[float]:
    """Enqueue work with events behind a spinning kernel; give the times between neighbouring events in ms."""
    import torch

    spin_ms = 0.1 + 2 * host_ms
    for _ in range(4):
        torch.cuda.synchronize()
        torch.cuda._sleep(int(spin_ms * SPIN_CYCLES_PER_MS))  # type: ignore[no-untyped-call]
        events = enqueue()
        in_time = not events[0].query()  # the spin still runs, so the host was ahead throughout
        torch.cuda.synchronize()
        if in_time:
            return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        spin_ms *= 3
        if spin_ms > 200:
            break
    raise _QueueRanDryError


def _queue(call: Callable[[], Any], calls: int, host_ms: float) -> float:
    """Give the time of `calls` queued calls in ms, read by one event pair behind a spinning kernel."""

    def enqueue() -> list[Any]:
        start, end = _event(), _event()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        return [start, end]

    return _behind_spin(enqueue, calls * host_ms)[0]


def _sample(once: Callable[[], list[float]], spread: float, max_seconds: float) -> list[float]:
    samples: list[float] = []
    end = time.perf_counter() + max_seconds
    while len(samples) < MAX_SAMPLES and not _settled(samples, spread):
        samples += once()
        if time.perf_counter() > end:
            break
    return samples


def _warm(
    call: Callable[[], Any], host_ms: float, spread: float, max_seconds: float
) -> tuple[list[float], str]:
    estimate = min(_queue(call, 5, host_ms) / 5 for _ in range(2))
    if estimate >= LONG_MS:
        calls = max(1, min(20, int(4 / estimate)))
        samples = _sample(lambda: [_queue(call, calls, host_ms) / calls], spread, max_seconds)
        return (
            samples,
            f"{calls} {'calls' if calls > 1 else 'call'} queued behind a spinning kernel in one event pair",
        )
    calls = max(4, min(100, math.ceil(GRAPH_MS / max(estimate, 1e-4))))
    short, long = _capture(call, calls), _capture(call, 2 * calls)
    if short is not None and long is not None:
        samples = _sample(lambda: [_replay_difference(short, long) / calls], spread, max_seconds)
        return samples, f"CUDA graphs of {2 * calls} and {calls} calls, their difference"
    calls = min(calls, 50)  # the driver's launch queue holds about a thousand kernels

    def difference() -> list[float]:
        return [(_queue(call, 2 * calls, host_ms) - _queue(call, calls, host_ms)) / calls]

    samples = _sample(difference, spread, max_seconds)
    return samples, f"{2 * calls} and {calls} calls queued behind a spinning kernel, their difference"


def _unqueued(call: Callable[[], Any], spread: float, max_seconds: float) -> tuple[list[float], str]:
    """Time a call that cannot be queued ahead, as one that waits for the device inside: gaps are in it."""

    def pair() -> list[float]:
        return [_as_launched(call)[0]]

    method = "one event pair a call: the call waits for the device inside, so its own gaps are counted"
    return _sample(pair, spread, max_seconds), method


def _capture(call: Callable[[], Any], calls: int) -> Any | None:
    """Capture so many calls into a CUDA graph and replay it once; None where the call cannot be captured."""
    import torch

    graph = torch.cuda.CUDAGraph()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.cuda.graph(graph):
                for _ in range(calls):
                    call()
        if any("graph is empty" in str(warning.message).lower() for warning in caught):
            raise NothingLaunchedError(
                "the call launched nothing on the device (a view, or work on the host alone): "
                'time the host with device="cpu"'
            )
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError:
        torch.cuda.synchronize()
        _end_failed_capture()
        return None
    return graph


def _end_failed_capture() -> None:
    """Let random numbers work again after a capture that failed, by one that succeeds.

    Seen with torch 2.11: the failed capture leaves the device's generator in its capturing state, and the next
    ``torch.randn`` outside raises "Offset increment outside graph capture encountered unexpectedly".
    """
    import torch

    cell = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        cell.add_(1)
    torch.cuda.synchronize()


def _replay_difference(less: Any, more: Any) -> float:
    """Give how much longer one graph takes than another, in ms, replayed one behind the other."""

    def enqueue() -> list[Any]:
        events = [_event() for _ in range(3)]
        events[0].record()
        less.replay()
        events[1].record()
        more.replay()
        events[2].record()
        return events

    first, second = _behind_spin(enqueue, 0.1)
    return second - first


def _cold(
    call: Callable[[], Any], host_ms: float, spread: float, max_seconds: float
) -> tuple[list[float], str]:
    import torch

    l2_bytes = getattr(torch.cuda.get_device_properties(), "L2_cache_size", 0) or 64 * 2**20
    flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device="cuda")

    def flushed() -> None:
        flush.zero_()
        call()

    calls = max(2, min(10, int(10 / _queue(call, 2, host_ms))))
    _capture(call, 1)  # raises where nothing is launched: the flush would hide it
    alone, together = _capture(flush.zero_, calls), _capture(flushed, calls)
    if alone is not None and together is not None:
        samples = _sample(lambda: [_replay_difference(alone, together) / calls], spread, max_seconds)
        return samples, f"CUDA graphs of {calls} flushes with and without the call, their difference"

    def pairs(what: Callable[[], Any]) -> list[float]:
        def enqueue() -> list[Any]:
            events = []
            for _ in range(calls):
                flush.zero_()
                start, end = _event(), _event()
                start.record()
                what()
                end.record()
                events += [start, end]
            return events

        return _behind_spin(enqueue, calls * (host_ms + 0.03))[::2]

    empty = statistics.median(pairs(lambda: None) + pairs(lambda: None))
    samples = _sample(lambda: [value - empty for value in pairs(call)], spread, max_seconds)
    return (
        samples,
        f"one event pair a call behind a spinning kernel, less an empty pair ({empty * 1e3:.1f} µs)",
    )


@dataclasses.dataclass(slots=True)
class Region:
    """The time between the two events of a `region`; read it after the block."""

    start: Any
    end: Any

    @property
    def elapsed_ms(self) -> float:
        """Elapsed time in ms; waits for the end event, and for nothing else."""
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end))


@contextmanager
def region() -> Iterator[Region]:
    """Put an event pair around a block of code: its elapsed time on the current stream, as launched.

    Raises
    ------
    NoGPUError
        There is no CUDA device.
    """
    require_cuda("region")
    pair = Region(_event(), _event())
    pair.start.record()
    yield pair
    pair.end.record()
