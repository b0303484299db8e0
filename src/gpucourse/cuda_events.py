"""Time device work on the device's own clock.

Two different times are measured and neither is ever given for the other. The *device time* is what one
call costs the device when launches never keep it waiting. The *elapsed time* is what an event pair reads
around the call exactly as Python launches it, waiting included.

A single event pair around a short kernel reads the road to the device, not the kernel. So short calls are
timed many at once, in a CUDA graph or queued behind a kernel that spins while the host enqueues them; which
way was taken stands in `Timing.method`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from gpucourse.arguments import Kept, describe, refuse_deferred, tensors_of
from gpucourse.environment import Environment, require_cuda
from gpucourse.streams import (
    SPIN_CYCLES_PER_MS,
    Look,
    OtherStream,
    capturing,
    end_failed_capture,
    look_at_streams,
    timing_event,
)

if TYPE_CHECKING:
    from gpucourse.roofline import Work

__all__ = [
    "METHOD_VERSION",
    "ImpossibleTimingError",
    "NothingLaunchedError",
    "Region",
    "RegionError",
    "Timing",
    "TimingMemoryError",
    "region",
    "time_cuda",
]

METHOD_VERSION = 3

LONG_MS = 0.2  # from here on, an event (about 1 µs) between two calls no longer shows
GRAPH_MS = 0.3  # how much device time one replay holds
CLOCK_CYCLES = 500_000  # how long the clock itself is timed, before and after
MIN_SAMPLES, MAX_SAMPLES = 20, 1000
NOTHING_MS = 5e-5  # no kernel is over in 50 ns
LAUNCH_BOUND = 1.5  # elapsed above this many times the device time
WARM_UP = (3, 20)  # calls at least and at most until a call is steady
PILOT_CALLS = 40  # what the pilot and the smallest sample need
HOST_COPY_BYTES = 2**30  # of arguments, where the host is timed
NOTHING_ELSEWHERE_MS = 5e-4
ON_THE_HOST = (
    "the call leaves no work on the device: its arguments are on the CPU. Move them there "
    '(x = x.to("cuda")), or time the host with device="cpu".'
)


class NothingLaunchedError(ValueError):
    """The call put no work on the device, so there is no device time to give."""


class ImpossibleTimingError(ValueError):
    """A time that no such device can reach: the clock was read without waiting, or work was missed."""


class TimingMemoryError(RuntimeError):
    """The call does not fit into memory as often as a timing has to make it."""


class RegionError(RuntimeError):
    """A region was read that has no time: its block has not ended, or it raised."""


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
        Shape and dtype of each tensor that the call is given.
    arguments_changed
        Whether `fn` wrote into its arguments, so that the calls did not all see the same input.
    arguments_restored
        Whether they hold again what they held before; False where nothing had changed.
    escaped
        Whether work on another stream is not, or cannot be shown to be, in the interval; `streams` says which.
    streams
        The streams beside the current one that torch's operations in the call ran on, and whether they are joined.
    device
        "cuda", or "cpu" where the host itself was timed.
    environment
        The machine.
    tf32_allowed
        Whether fp32 products could run in tf32.
    clock_mhz
        The multiprocessors' clock before and after the samples, in MHz, by the device's own cycle counter; some
        1 % low (20 MHz of 1980), since an event pair's own 2 to 3 µs stand in an interval of about 250.
    left_bytes
        How much more memory is allocated after each call than before it, in bytes; 0 where a call leaves nothing.
    remarks
        What else a reader of the numbers has to know, a sentence each.
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
    arguments_restored: bool = False
    streams: tuple[OtherStream, ...] = ()
    left_bytes: int = 0
    remarks: tuple[str, ...] = ()

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
        names = (
            *("elapsed_ms", "host_ms", "method", "l2", "arguments_changed", "arguments_restored"),
            *("escaped", "left_bytes", "device"),
        )
        return {
            "median_ms": self.median_ms,
            "iqr_ms": self.iqr_ms,
            "launch_bound": self.launch_bound,
            "throttled": self.throttled,
            "clock_mhz": list(self.clock_mhz),
            **{name: getattr(self, name) for name in names},
            "streams": [stream.as_dict() for stream in self.streams],
            "remarks": list(self.remarks),
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
            which = "; ".join(str(stream) for stream in self.streams if stream.escaped)
            parts.append(
                f"work on another stream is not counted ({which or 'some was still running at the end'})"
            )
        if self.arguments_changed:
            end = "they are restored" if self.arguments_restored else "they could not be restored"
            parts.append(f"the call changed its arguments, so its calls met different inputs; {end}")
        parts += self.remarks
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
        from gpucourse.hardware import PRECISION_OF_DTYPE

        for argument in self.arguments:
            found = PRECISION_OF_DTYPE.get(argument["dtype"])
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
        What to time; its keyword arguments go in by `functools.partial`. It is called many times. What it raises
        is passed on, with the device left at rest.
    *args
        Its arguments, passed on unchanged. Where they lie on another CUDA device than the current one, that one
        is timed. Tensors that it writes into, those in lists and dicts and their gradients included, get back
        what they held. What `fn` closes over cannot be known: an optimizer's step leaves its model changed.
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
        Counted is the work on the current stream, and what that stream waits for. Work that torch's operations
        put on other streams is told as joined or escaped, however short; a kernel that another library launches
        on a stream of its own is noticed only where it runs on for some 50 µs after the end.

    Raises
    ------
    NoGPUError
        There is no CUDA device and `device` is "cuda".
    NothingLaunchedError
        `fn` put no work on the device.
    TimingMemoryError
        `fn` fits into memory once, and not as often as it has to be called: it keeps what it allocates.
    TypeError, ValueError
        `fn` cannot be called, or an option is none of the above; or the arguments lie on several CUDA devices.

    Notes
    -----
    Warm-up ends with a call that compiles nothing and takes no less than half of the one before. A pilot takes the
    elapsed time, looks at the streams (`gpucourse.streams`) and estimates the device time behind a spinning
    kernel. Then, warm: calls of 0.2 ms and longer are queued behind the spinning kernel, up to twenty (4 ms, and
    no more than the queue holds) in one event pair; shorter ones are put into two CUDA graphs, of n and 2n calls,
    whose difference holds no launch of the graph; where `fn` cannot be captured, n and 2n calls are queued behind
    the spinning kernel instead. Cold: two CUDA graphs of ten flushes of the L2, with and without the call, and
    their difference; where `fn` cannot be captured, one event pair a call behind the spinning kernel, less what an
    empty pair reads there. A flush writes twice the size of the L2. Where a call cannot be queued ahead, because
    it waits for the device inside or launches more than the queue holds (some 1,000 kernels), plain event pairs
    are taken, whose gaps are counted. Events resolve about half a microsecond (CUDA documentation of
    ``cudaEventElapsedTime``; an H200's readings step by 32 ns), which n divides.
    """
    if not callable(fn):
        raise TypeError(
            f"time_cuda times a function, found {type(fn).__name__}: pass torch.matmul, not its result"
        )
    refuse_deferred(fn, "time_cuda")
    if device not in ("cuda", "cpu") or l2 not in ("warm", "cold"):
        raise ValueError(f'device is "cuda" or "cpu" and l2 is "warm" or "cold"; found {device!r} and {l2!r}')
    for name, value in (("spread", spread), ("max_seconds", max_seconds)):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, found {value!r} of type {type(value).__name__}")
        if value > sys.float_info.max:
            raise ValueError(f"{name} is larger than any float: spread is in (0, 1), max_seconds such as 0.5")
    if not 0 < spread < 1 or not 0 < max_seconds < math.inf:
        raise ValueError(f"spread is in (0, 1) and max_seconds above 0; found {spread!r} and {max_seconds!r}")
    call = functools.partial(fn, *args)
    tensors = tensors_of(fn, args)
    if device == "cpu":
        return _time_host(call, tensors, spread, max_seconds)
    require_cuda("time_cuda")
    import torch

    with torch.cuda.device(_device_of(tensors)):
        kept = Kept(tensors, 0.5 * _free_bytes())
        try:
            _first_call(call, kept)
            found = _without_running_out(functools.partial(_measure, call, kept, l2, spread, max_seconds))
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # a broken device stays so; the first error counts
                torch.cuda.synchronize()
                kept.restore()
            if isinstance(error, NothingLaunchedError) and _on_the_host(tensors):
                raise NothingLaunchedError(ON_THE_HOST) from None
            raise
        changed = found.pop("changed")
        restored = kept.restore() if changed else False
        torch.cuda.synchronize()
    if statistics.median(found["samples_ms"]) < found.pop("least_ms"):
        raise NothingLaunchedError(_why_nothing(found, tensors))
    return Timing(
        **found,
        l2=l2,
        arguments=describe(tensors),
        arguments_changed=changed,
        arguments_restored=restored,
        device="cuda",
        environment=Environment.capture(),
        tf32_allowed=bool(torch.backends.cuda.matmul.allow_tf32),
    )


def _time_host(call: Callable[[], Any], tensors: list[Any], spread: float, max_seconds: float) -> Timing:
    kept = Kept(tensors, HOST_COPY_BYTES) if tensors else None
    try:
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
    finally:
        changed = kept is not None and kept.changed()
        restored = kept is not None and changed and kept.restore()
    return Timing(
        samples_ms=tuple(samples),
        elapsed_ms=statistics.median(samples),
        host_ms=statistics.median(samples),
        method="host clock (time.perf_counter) around each call",
        l2="warm",
        arguments=describe(tensors),
        arguments_changed=changed,
        arguments_restored=restored,
        escaped=False,
        device="cpu",
        environment=Environment.capture(),
    )


def _device_of(tensors: list[Any]) -> int:
    """Give the CUDA device that the arguments lie on; the current one where none lies on any."""
    import torch

    found = sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})
    if len(found) > 1:
        names = ", ".join(f"cuda:{index}" for index in found)
        raise ValueError(
            f"the arguments lie on {names}, and an event pair reads one device's clock: put them on one, "
            "or time each device's part by itself"
        )
    return int(found[0]) if found else torch.cuda.current_device()


def _free_bytes() -> float:
    """Give what this process can still allocate on the current device, in bytes."""
    import torch

    free, total = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)()
    return float(min(free, share * total - held) + held - torch.cuda.memory_allocated())


def _first_call(call: Callable[[], Any], kept: Kept) -> None:
    """Make the first call, whose errors are the caller's; without copies where it does not fit beside them."""
    import torch

    try:
        call()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        if not kept.copied:
            raise
    else:
        return
    kept.restore()
    kept.drop()
    call()
    torch.cuda.synchronize()


def _without_running_out(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Turn an out-of-memory error among the later calls into what it means for a timing."""
    import torch

    try:
        return measure()
    except torch.OutOfMemoryError as error:
        said = str(error).splitlines()[0]
    # Raised outside the except block, so that no traceback keeps the failed call's tensors alive.
    raise TimingMemoryError(
        "the call fitted into memory once, and not as often as a timing makes it: does it keep its results, in a "
        f"list or in a graph? Let go of them in the call, or time a smaller one. torch says: {said}"
    )


def _why_nothing(found: dict[str, Any], tensors: list[Any]) -> str:
    if found["escaped"]:
        return (
            "the call leaves no work on the current stream: its work runs on a stream that the current one does "
            "not wait for. Let the current stream wait (torch.cuda.current_stream().wait_stream(side)), or time "
            'the host with device="cpu".'
        )
    if _on_the_host(tensors):
        return ON_THE_HOST
    return 'the call leaves no work on the current stream: it is empty. Time the host with device="cpu".'


def _on_the_host(tensors: list[Any]) -> bool:
    return bool(tensors) and all(tensor.device.type == "cpu" for tensor in tensors)


def _compilations() -> int:
    """Count the functions that torch.compile has looked at so far in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return sum(utils.counters["frames"].values()) if utils else 0


def _warm_up(call: Callable[[], Any]) -> tuple[int, bool]:
    """Call until a call compiles nothing and takes no less than half of the one before.

    Returns
    -------
    int
        Bytes that each of the last calls left allocated.
    bool
        Whether the calls became steady.
    """
    import torch

    least, most = WARM_UP
    previous_ms, allocated = math.inf, [torch.cuda.memory_allocated()]
    for number in range(1, most + 1):
        compiled, begin = _compilations(), time.perf_counter()
        call()
        torch.cuda.synchronize()
        ms = (time.perf_counter() - begin) * 1e3
        allocated.append(torch.cuda.memory_allocated())
        if number >= least and compiled == _compilations() and ms > 0.5 * previous_ms:
            break
        previous_ms = ms
    else:
        return 0, False
    return max(0, min(after - before for before, after in itertools.pairwise(allocated[-3:]))), True


@dataclasses.dataclass(slots=True, kw_only=True)
class _Plan:
    """What the sampling needs to know of a call, and whether memory stopped it."""

    call: Callable[[], Any]
    host_ms: float
    spread: float
    max_seconds: float
    graphs: bool = True  # whether a CUDA graph holds all of the call
    capture_on: Any = None  # a stream that the call does not use itself
    left_bytes: int = 0
    room_bytes: float = math.inf
    stopped: bool = False

    def calls(self, wanted: int) -> int:
        """Give how many calls one sample may hold, where each leaves memory allocated."""
        if not self.left_bytes:
            return wanted
        return max(1, min(wanted, int(self.room_bytes / self.left_bytes / 8)))

    def full(self) -> bool:
        """Whether the next sample might need more than the room that was there at first."""
        if not self.left_bytes:
            return False
        import torch

        self.stopped = torch.cuda.memory_allocated() > self.room_bytes
        return self.stopped


def _measure(
    call: Callable[[], Any], kept: Kept, l2: str, spread: float, max_seconds: float
) -> dict[str, Any]:
    """Warm up, look at the streams, take the samples; the fields of a `Timing` that come from it."""
    import torch

    remarks = []
    left_bytes, steady = _warm_up(call)
    if not steady:
        remarks.append(f"not steady after {WARM_UP[1]} calls: does it compile anew each time?")
    changed = kept.changed()
    if not changed:
        kept.drop()
    free = _free_bytes()
    if left_bytes * PILOT_CALLS > 0.5 * free:
        raise TimingMemoryError(
            f"each call leaves {left_bytes / 1e6:,.1f} MB allocated, and {free / 1e9:,.1f} GB are free: a timing "
            f"makes at least {PILOT_CALLS} calls. Does it keep its results, in a list or in a graph? Let go of "
            "them in the call, or time a smaller one."
        )
    elapsed_ms, host_ms, still_busy = _as_launched(call)
    look = _look(call, host_ms, elapsed_ms, remarks)
    plan = _Plan(
        call=call,
        host_ms=host_ms,
        spread=spread,
        max_seconds=max_seconds,
        graphs=look.whole,
        capture_on=look.capture_on,
        left_bytes=left_bytes,
        room_bytes=torch.cuda.memory_allocated() + 0.5 * free if left_bytes else math.inf,
    )
    first_mhz = _clock_mhz()
    try:
        samples, method = (_cold if l2 == "cold" else _warm)(plan)
    except _QueueRanDryError:
        samples, method = _unqueued(plan, l2)
    last_mhz = _clock_mhz()
    if left_bytes:
        early = f": sampling stopped at {len(samples)} samples for want of memory" if plan.stopped else ""
        remarks.append(f"each call leaves {left_bytes / 1e6:,.3g} MB allocated{early}")
    escaped = still_busy or any(stream.escaped for stream in look.others)
    return {
        "samples_ms": tuple(samples),
        "elapsed_ms": elapsed_ms,
        "host_ms": host_ms,
        "method": method,
        "escaped": escaped,
        "streams": look.others,
        "clock_mhz": (first_mhz, last_mhz) if first_mhz and last_mhz else (),
        "left_bytes": left_bytes,
        "remarks": tuple(remarks),
        "changed": changed,
        # Where all work was seen to go elsewhere, what is read here is the scatter of the marks.
        "least_ms": NOTHING_ELSEWHERE_MS if escaped and not look.at_home else NOTHING_MS,
    }


def _look(call: Callable[[], Any], host_ms: float, elapsed_ms: float, remarks: list[str]) -> Look:
    """Look at the call's streams; where it cannot be watched, make sure that it still runs unwatched and say so."""
    import torch

    try:
        return look_at_streams(call, host_ms, elapsed_ms)
    except Exception as error:  # whatever the watching breaks: the call alone decides
        torch.cuda.synchronize()
        call()
        torch.cuda.synchronize()
        remarks.append(
            f"its streams could not be watched ({type(error).__name__}): short work may have escaped"
        )
        return Look()


def _as_launched(
    call: Callable[[], Any], before: Callable[[], Any] | None = None, times: int = 10
) -> tuple[float, float, bool]:
    """Read one event pair around a call on an idle queue, the host's part of it, and whether work outlasts it."""
    elapsed, host, after = _pairs_as_launched(call, before, times)
    elapsed_ms = statistics.median(elapsed)
    # Waiting for an idle device takes the host some microseconds, and more after a long wait. Where even the
    # shortest of the waits is longer than that, some stream may still have been busy; what is over sooner than
    # that after the end event goes unnoticed here.
    usual_ms = 0.05 + 0.02 * elapsed_ms
    busy = min(after) > usual_ms
    if busy:  # or the host is slow to return: after a profiler has run, say. A spin has nothing elsewhere.
        control = _pairs_as_launched(functools.partial(_spin, elapsed_ms), None, 5)[2]
        busy = min(after) > usual_ms + 2 * max(control)
    return elapsed_ms, statistics.median(host), busy


def _pairs_as_launched(
    call: Callable[[], Any], before: Callable[[], Any] | None, times: int
) -> tuple[list[float], list[float], list[float]]:
    import torch

    elapsed, host, after = [], [], []
    for _ in range(times):
        if before is not None:
            before()
        torch.cuda.synchronize()
        start, end = timing_event(), timing_event()
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
    return elapsed, host, after


def _spin(ms: float) -> None:
    import torch

    torch.cuda._sleep(int(ms * SPIN_CYCLES_PER_MS))  # type: ignore[no-untyped-call]


def _clock_mhz() -> float | None:
    """Time the spinning kernel, which counts the device's own cycles, behind another one; None where it fails.

    The marks and the kernel's start are in the interval and not subtracted: it reads about 1 % low at 2 GHz.
    """
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
        start, end = timing_event(), timing_event()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        return [start, end]

    return _behind_spin(enqueue, calls * host_ms)[0]


def _each_queued(call: Callable[[], Any], calls: int, host_ms: float) -> float:
    """Estimate the time of one call in ms from so many queued ones, or from one where the queue holds no more."""
    try:
        return _queue(call, calls, host_ms) / calls
    except _QueueRanDryError:
        return _queue(call, 1, host_ms)


def _as_queued(sampled: Callable[[int], list[float]], calls: int) -> tuple[list[float], int]:
    """Sample with so many calls in the queue, or with half as many as long as the queue does not hold them.

    A full queue lets the host in only as fast as the device takes launches out, so that gaps would be measured. It
    holds some 1,000 launches, and nothing tells how many one call makes.
    """
    while True:
        try:
            return sampled(calls), calls
        except _QueueRanDryError:
            if calls == 1:
                raise
            calls //= 2


def _sample(once: Callable[[], list[float]], plan: _Plan) -> list[float]:
    samples: list[float] = []
    end = time.perf_counter() + plan.max_seconds
    while len(samples) < MAX_SAMPLES and not _settled(samples, plan.spread):
        samples += once()
        if time.perf_counter() > end or plan.full():
            break
    return samples


def _warm(plan: _Plan) -> tuple[list[float], str]:
    call, host_ms = plan.call, plan.host_ms
    estimate = min(_each_queued(call, 5, host_ms) for _ in range(2))
    if estimate >= LONG_MS:
        calls = plan.calls(max(1, min(20, int(4 / estimate))))
        samples, calls = _as_queued(
            lambda calls: _sample(lambda: [_queue(call, calls, host_ms) / calls], plan), calls
        )
        return (
            samples,
            f"{calls} {'calls' if calls > 1 else 'call'} queued behind a spinning kernel in one event pair",
        )
    calls = plan.calls(max(4, min(100, math.ceil(GRAPH_MS / max(estimate, 1e-4)))))
    if plan.graphs:
        short = _capture(call, calls, on=plan.capture_on)
        long = _capture(call, 2 * calls, short, on=plan.capture_on)
        if short is not None and long is not None:
            samples = _sample(lambda: [_replay_difference(short, long) / calls], plan)
            return samples, f"CUDA graphs of {2 * calls} and {calls} calls, their difference"
    calls = min(calls, 50)  # the driver's launch queue holds about a thousand kernels

    def differences(calls: int) -> list[float]:
        return _sample(
            lambda: [(_queue(call, 2 * calls, host_ms) - _queue(call, calls, host_ms)) / calls], plan
        )

    samples, calls = _as_queued(differences, calls)
    return samples, f"{2 * calls} and {calls} calls queued behind a spinning kernel, their difference"


def _unqueued(plan: _Plan, l2: str) -> tuple[list[float], str]:
    """Time a call that cannot be queued ahead: it waits for the device inside, or its launches fill the queue."""
    flush = _flush_of_l2() if l2 == "cold" else None
    samples = _sample(lambda: [_as_launched(plan.call, flush)[0]], plan)
    method = (
        "one event pair a call: the call waits for the device inside, or launches more than the queue holds, so "
        "its own gaps are counted"
    )
    return samples, method + (" (the L2 flushed before)" if flush else "")


def _capture(call: Callable[[], Any], calls: int, beside: Any = None, on: Any = None) -> Any | None:
    """Capture so many calls into a CUDA graph and replay it once; None where the call cannot be captured.

    Beside another graph, in that one's memory: what the calls allocate lies at the same addresses in both, on which
    the time of a call that lives in the L2 depends by some percent.
    """
    import torch

    graph = torch.cuda.CUDAGraph()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with capturing(graph, pool=None if beside is None else beside.pool(), stream=on):
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
        end_failed_capture()
        return None
    return graph


def _replay_difference(less: Any, more: Any) -> float:
    """Give how much longer one graph takes than another, in ms, replayed one behind the other.

    The first calls after a pause run slower, by half a percent where the first graph stands in the interval; so
    one replay goes ahead of it.
    """

    def enqueue() -> list[Any]:
        events = [timing_event() for _ in range(3)]
        less.replay()
        events[0].record()
        less.replay()
        events[1].record()
        more.replay()
        events[2].record()
        return events

    first, second = _behind_spin(enqueue, 0.15)
    return second - first


def _flush_of_l2() -> Callable[[], Any]:
    """Give a function that writes twice the size of the L2."""
    import torch

    l2_bytes = getattr(torch.cuda.get_device_properties(), "L2_cache_size", 0) or 64 * 2**20
    return torch.empty(2 * l2_bytes, dtype=torch.int8, device="cuda").zero_


def _cold(plan: _Plan) -> tuple[list[float], str]:
    call, host_ms, flush = plan.call, plan.host_ms, _flush_of_l2()

    def flushed() -> None:
        flush()
        call()

    estimate = 2 * _each_queued(call, 2, host_ms)
    calls = plan.calls(max(2, min(10, int(10 / max(estimate, 1e-4)))))
    if plan.graphs:
        _capture(call, 1, on=plan.capture_on)  # raises where nothing is launched: the flush would hide it
        alone = _capture(flush, calls, on=plan.capture_on)
        together = _capture(flushed, calls, alone, on=plan.capture_on)
        if alone is not None and together is not None:
            samples = _sample(lambda: [_replay_difference(alone, together) / calls], plan)
            return samples, f"CUDA graphs of {calls} flushes with and without the call, their difference"

    def pairs(what: Callable[[], Any], calls: int) -> list[float]:
        def enqueue() -> list[Any]:
            events = []
            for _ in range(calls):
                flush()
                start, end = timing_event(), timing_event()
                start.record()
                what()
                end.record()
                events += [start, end]
            return events

        return _behind_spin(enqueue, calls * (host_ms + 0.03))[::2]

    empty = statistics.median(pairs(lambda: None, calls) + pairs(lambda: None, calls))
    samples, _ = _as_queued(
        lambda calls: _sample(lambda: [value - empty for value in pairs(call, calls)], plan), calls
    )
    return (
        samples,
        f"one event pair a call behind a spinning kernel, less an empty pair ({empty * 1e3:.1f} µs)",
    )


@dataclasses.dataclass(slots=True)
class Region:
    """The time between the two events of a `region`; read it after the block."""

    start: Any
    end: Any
    state: Literal["running", "ended", "failed"] = "running"

    @property
    def elapsed_ms(self) -> float:
        """Elapsed time in ms; waits for the end event, and for nothing else.

        Raises
        ------
        RegionError
            The block has not ended, or it raised: there is no time to give.
        """
        if self.state == "running":
            raise RegionError("the block of this region has not ended: read elapsed_ms after the with block")
        if self.state == "failed":
            raise RegionError(
                "the block of this region raised an error: there is no time for the whole of it"
            )
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end))


@contextmanager
def region() -> Iterator[Region]:
    """Put an event pair around a block of code: its elapsed time on the stream that is current, as launched.

    Raises
    ------
    NoGPUError
        There is no CUDA device.
    """
    require_cuda("region")
    import torch

    stream = (
        torch.cuda.current_stream()
    )  # the end belongs to the same queue, whatever the block makes current
    pair = Region(timing_event(), timing_event())
    pair.start.record(stream)
    try:
        yield pair
    except BaseException:
        pair.state = "failed"
        raise
    pair.end.record(stream)
    pair.state = "ended"
