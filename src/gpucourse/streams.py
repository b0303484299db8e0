"""Which streams a call puts work on, and whether the current stream encloses that work.

An event pair on the current stream counts what that stream waits for. Work on another stream is inside the
interval if it waits for what came before the call, and if the current stream waits for its end. Whether it does
cannot be seen from how long it takes; it shows when one of the two streams is held up on purpose.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = [
    "Look",
    "OtherStream",
    "Watch",
    "capturing",
    "compiler_aside",
    "end_failed_capture",
    "launches",
    "look_at_streams",
    "timing_event",
]

SPIN_CYCLES_PER_MS = 2_000_000  # clock cycles; at a lower clock the spin only lasts longer
VIEWS = {"_unsafe_view", "lift_fresh"}  # views that their schema does not call so
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "record_stream"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OtherStream:
    """A stream beside the current one that the call put work on.

    Attributes
    ----------
    name
        Its device and its address, as torch prints them.
    begins_inside
        Whether its work waits for what the current stream held before the call; None where that cannot be told.
    ends_inside
        Whether the current stream waits for its work; None where that cannot be told.
    """

    name: str
    begins_inside: bool | None
    ends_inside: bool | None

    @property
    def escaped(self) -> bool:
        """Whether its work is not, or cannot be shown to be, inside the interval."""
        return not (self.begins_inside and self.ends_inside)

    def as_dict(self) -> dict[str, Any]:
        """Give the fields and the verdict as plain data."""
        return {**dataclasses.asdict(self), "escaped": self.escaped}

    def __str__(self) -> str:
        said = []
        if self.begins_inside is False:
            said.append("starts without waiting for the current one")
        if self.ends_inside is False:
            said.append("is not waited for")
        if not said and self.escaped:
            said.append("cannot be shown to be waited for")
        return f"{self.name} {' and '.join(said) or 'is joined'}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What `look_at_streams` found.

    Attributes
    ----------
    others
        The streams beside the current one; empty where all of torch's operations run on the current stream.
    whole
        Whether everything that was seen goes into a CUDA graph.
    at_home
        Whether an operation was seen on the current stream at all.
    capture_on
        The stream to capture the call on, none of those that it uses; None where torch's own will do.
    """

    others: tuple[OtherStream, ...] = ()
    whole: bool = True
    at_home: bool = True
    capture_on: Any = None


@dataclasses.dataclass(slots=True)
class Used:
    """What a `Watch` saw of one stream: the stream, its operations, and those outside a graph's capture."""

    stream: Any
    operations: int = 0
    entered: bool = False
    outside_capture: bool = False


def launches(func: Any) -> bool:
    """Whether one of torch's operations starts a kernel or a copy, by what its schema says of it.

    >>> import torch
    >>> launches(torch.ops.aten.add.Tensor), launches(torch.ops.aten.t.default)
    (True, False)
    """
    import torch

    name = func.overloadpacket.__name__
    view = func.is_view or torch.Tag.inplace_view in func.tags or name in VIEWS
    return not view and name not in ALLOCATIONS and func.namespace != "profiler"


@contextlib.contextmanager
def compiler_aside() -> Iterator[None]:
    """Let compiled functions run eagerly in a block that dispatches through a mode.

    A compiled function that is called under a ``TorchDispatchMode`` runs eagerly ever after (seen with torch 2.11 and
    2.13), unless the compiler stands aside meanwhile. Where the compiler was never loaded, this does not load it.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield


def _cuda_device(*trees: Any) -> Any | None:
    """Give the first CUDA device among the tensors, and the devices asked for, of nested arguments."""
    from torch.utils._pytree import tree_leaves

    for leaf in tree_leaves(trees):
        device = getattr(leaf, "device", leaf)  # a factory or a copy has only the device that it is to fill
        if getattr(device, "type", None) == "cuda":
            return device
    return None


class Watch:
    """Note the stream of each of torch's operations in a call, and each stream that is made current in it.

    Seen are torch's operations, a backward pass's included, and whatever runs while a stream is current that was
    entered by ``torch.cuda.stream`` or ``torch.cuda.set_stream``. Not seen is a kernel that a library launches on
    a stream that it never makes current.

    Parameters
    ----------
    before
        Called before each operation that launches, with its stream and how many came before it on that stream.
    """

    def __init__(self, before: Callable[[Any, int], None] | None = None) -> None:
        self.used: dict[int, Used] = {}
        self._before = before

    def _use(self, stream: Any) -> Used:
        return self.used.setdefault(stream.cuda_stream, Used(stream))

    def operation(self, func: Any, trees: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Run one operation and note its stream."""
        import torch

        device = _cuda_device(*trees) if launches(func) else None
        if device is None:
            return run()
        stream = torch.cuda.current_stream(device)
        used = self._use(stream)
        if self._before is not None:
            self._before(stream, used.operations)
        used.operations += 1
        used.outside_capture |= not torch.cuda.is_current_stream_capturing()
        return run()

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        """Watch what the block does; functions of torch.compile run uncompiled in it, on the same streams."""
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        watch = self

        class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
            pass

        def dispatch(_mode: Any, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return watch.operation(func, (args, kwargs), lambda: func(*args, **(kwargs or {})))

        # Set afterwards, since what stands in the class is wrapped by torch so that its first call loads the
        # whole compiler, which takes seconds.
        Mode.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
        set_stream = torch.cuda.set_stream

        def noted(stream: Any) -> None:
            leaving = watch.used.get(torch.cuda.current_stream().cuda_stream)
            if leaving is not None and leaving.entered:
                leaving.outside_capture |= not torch.cuda.is_current_stream_capturing()
            set_stream(stream)
            if stream is not None:
                watch._use(stream).entered = True

        torch.cuda.set_stream = noted
        try:
            with compiler_aside(), Mode():  # type: ignore[no-untyped-call]
                yield self
        finally:
            torch.cuda.set_stream = set_stream


def timing_event() -> Any:
    """Make an event that keeps the time."""
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _spin(ms: float) -> None:
    import torch

    torch.cuda._sleep(int(ms * SPIN_CYCLES_PER_MS))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def capturing(graph: Any, **options: Any) -> Iterator[None]:
    """Capture into a graph as ``torch.cuda.graph`` does, and make the same stream current again whatever happens.

    Where a capture fails at its end, ``torch.cuda.graph`` (2.11, 2.13) leaves its own stream the current one.

    Parameters
    ----------
    graph, **options
        What ``torch.cuda.graph`` takes.
    """
    import torch

    before = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, **options):
            yield
    finally:
        torch.cuda.set_stream(before)


def _stream_beside(taken: Iterable[int]) -> Any:
    """Give a stream that is none of those: torch's come from a pool of 32, in turns, so two may be the same."""
    import torch

    taken = set(taken)
    for _ in range(len(taken) + 33):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if stream.cuda_stream not in taken:
            return stream
    return None


def end_failed_capture() -> None:
    """Let random numbers work again after a capture that failed, by one that succeeds.

    Seen with torch 2.11: the failed capture leaves the device's generator in its capturing state, and the next
    ``torch.randn`` outside raises "Offset increment outside graph capture encountered unexpectedly".
    """
    import torch

    cell = torch.zeros(1, device="cuda")
    with capturing(torch.cuda.CUDAGraph()):
        cell.add_(1)
    torch.cuda.synchronize()


def _captures(call: Callable[[], Any], sides: list[int], on: Any) -> tuple[bool, bool]:
    """Capture one call: whether all that it does is in the graph, and whether a stream was left unjoined.

    A stream is part of a capture only if it waits for the capturing one, and the capture ends well only if that
    one waits for it again. Neither depends on how long anything takes.
    """
    import torch

    watch = Watch()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an empty graph is no surprise here
            with capturing(torch.cuda.CUDAGraph(), stream=on), watch.watching():
                call()
    except RuntimeError as error:
        torch.cuda.synchronize()
        end_failed_capture()
        return False, "unjoined" in str(error)
    torch.cuda.synchronize()
    seen = [watch.used.get(side) for side in sides]
    return all(used is not None and not used.outside_capture for used in seen), False


def _independent(one: Any, other: Any) -> bool:
    """Whether work on `other` can pass while `one` is held up: the driver lets some streams share a queue."""
    import torch

    torch.cuda.synchronize()
    held, free = timing_event(), timing_event()
    with torch.cuda.stream(one):
        _spin(0.5)
    held.record(one)
    free.record(other)
    torch.cuda.synchronize()
    return float(free.elapsed_time(held)) > 0


def _begins_inside(call: Callable[[], Any], side: Any, host_ms: float, elapsed_ms: float) -> bool:
    """Hold the current stream up: what `side` does meanwhile does not wait for it."""
    import torch

    key, first = side.cuda_stream, timing_event()
    marked = False

    def before(stream: Any, number: int) -> None:
        nonlocal marked
        if stream.cuda_stream == key and number == 0:
            first.record(stream)
            marked = True

    torch.cuda.synchronize()
    _spin(1.0 + 8 * host_ms + 2 * elapsed_ms)  # a watched call takes the host several times as long
    released = timing_event()
    released.record()
    with Watch(before).watching():
        call()
    if not marked:  # no operation of torch's own: then its end has to do
        first.record(side)
    torch.cuda.synchronize()
    return float(released.elapsed_time(first)) >= 0


def _ends_inside(
    call: Callable[[], Any], side: Any, operations: int, host_ms: float, elapsed_ms: float
) -> bool:
    """Hold `side` up before its last operation: a current stream that joins it ends later than that."""
    import torch

    key, released, end = side.cuda_stream, timing_event(), timing_event()
    spin_ms = 1.0 + 8 * host_ms + 3 * elapsed_ms
    held = False

    def hold() -> None:
        nonlocal held
        _spin(spin_ms)
        released.record(side)
        held = True

    def before(stream: Any, number: int) -> None:
        if stream.cuda_stream == key and number == operations - 1:
            hold()

    torch.cuda.synchronize()
    if operations == 0:
        with torch.cuda.stream(side):
            hold()
    with Watch(before).watching():
        call()
    end.record()
    torch.cuda.synchronize()
    if not held:
        return False  # this time it took another way: it cannot be shown to be joined
    return float(released.elapsed_time(end)) >= 0


def look_at_streams(call: Callable[[], Any], host_ms: float, elapsed_ms: float) -> Look:
    """Find the streams beside the current one that a warmed-up call uses, and what becomes of their work.

    Parameters
    ----------
    call
        Called a few times.
    host_ms, elapsed_ms
        How long the host needs to enqueue it, and how long it takes on an idle queue, in ms.

    Returns
    -------
    Look
        The streams and their fate; the device is at rest and the current stream the same as before.
    """
    import torch

    here = torch.cuda.current_stream()
    watch = Watch()
    with watch.watching():
        call()
    torch.cuda.synchronize()
    current = watch.used.get(here.cuda_stream)
    at_home = current is not None and current.operations > 0
    sides = {
        key: used
        for key, used in watch.used.items()
        if key != here.cuda_stream and (used.operations or used.entered)
    }
    if not sides:
        return Look(at_home=at_home)
    capture_on = _stream_beside(watch.used)
    whole, unjoined = _captures(call, list(sides), capture_on)
    found = []
    for used in sides.values():
        begins: bool | None = None
        ends: bool | None = None
        if whole:
            begins = ends = True
        elif used.stream.device == here.device:
            if _independent(here, used.stream):
                begins = _begins_inside(call, used.stream, host_ms, elapsed_ms)
            if _independent(used.stream, here):
                ends = _ends_inside(call, used.stream, used.operations, host_ms, elapsed_ms)
            elif unjoined and len(sides) == 1:
                ends = False
        found.append(OtherStream(name=_name(used.stream), begins_inside=begins, ends_inside=ends))
    return Look(others=tuple(found), whole=whole, at_home=at_home, capture_on=capture_on)


def _name(stream: Any) -> str:
    return f"stream {stream.cuda_stream:#x} of {stream.device}"
