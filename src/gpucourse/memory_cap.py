"""A limit on what PyTorch's allocator may take of the GPU, so that a small card can be tried out on a large one.

>>> cap_memory(float("nan"))
Traceback (most recent call last):
...
ValueError: the cap is nan GB; wanted a finite number above 0

`gpucourse.memory_statement` says what lived when a step runs into it.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from numbers import Real
from typing import Any

from gpucourse.environment import require_cuda
from gpucourse.memory_statement import (
    Attempt,
    MemoryStatement,
    NotOutOfMemoryError,
    attempt,
    give_back_cache,
)
from gpucourse.units import GB, format_bytes
from gpucourse.work import short

__all__ = [
    "NOT_LIMITED",
    "Attempt",
    "CapError",
    "MemoryCap",
    "MemoryStatement",
    "NotOutOfMemoryError",
    "attempt",
    "cap_memory",
]

NOT_LIMITED = (
    "the CUDA context and what libraries allocate themselves: some hundred MB, which a real card holds, too",
    "other processes on the device",
    "speed: bandwidth, multiprocessors and clock stay this card's",
    "the choice of kernels and their workspaces, which follow this card and not the one that is played",
)


class CapError(ValueError):
    """The device has less than the cap, or the process already holds more."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCap:
    """A limit as it is set.

    Attributes
    ----------
    asked_bytes
        What the caller wanted.
    limit_bytes
        What holds: the same, or an outer cap's limit where that is lower.
    total_bytes
        All memory of the device.
    device
        Its index.
    not_limited
        What the cap says nothing of.
    """

    asked_bytes: int
    limit_bytes: int
    total_bytes: int
    device: int
    not_limited: tuple[str, ...] = NOT_LIMITED

    def as_dict(self) -> dict[str, Any]:
        """Give the cap as plain data."""
        return {**dataclasses.asdict(self), "not_limited": list(self.not_limited)}

    def __str__(self) -> str:
        outer = (
            f" ({format_bytes(self.asked_bytes)} asked for: the cap around it is lower)"
            if self.limit_bytes < self.asked_bytes
            else ""
        )
        return (
            f"cuda:{self.device}: the allocator may reserve {format_bytes(self.limit_bytes)} of "
            f"{format_bytes(self.total_bytes)}{outer}; not limited: {'; '.join(self.not_limited)}"
        )


@dataclasses.dataclass(slots=True)
class _Device:
    """The caps that are set on a device, outermost first, and the fraction that was set before the first."""

    before: float = 1.0
    limits: list[int] = dataclasses.field(default_factory=list)


_devices: dict[int, _Device] = {}
_lock = threading.Lock()


def cap_memory(gb: float, *, device: Any = None) -> AbstractContextManager[MemoryCap]:
    """Limit what the caching allocator may reserve while a block runs.

    Caps nest: a larger one inside a smaller one loosens nothing. Leaving the block, by an error too, sets the limit
    that there was before; where the torch cannot say which that was, none. Where the allocator's cache holds more
    than the cap, it is emptied.

    Parameters
    ----------
    gb
        The limit in GB (1e9 bytes).
    device
        A device or its index; by default the current one.

    Returns
    -------
    context manager of MemoryCap
        The limit that holds, and what it does not limit.

    Raises
    ------
    TypeError
        `gb` is no number; a bool is none.
    ValueError
        It is not finite, or not above 0.
    NoGPUError
        There is no CUDA device.
    CapError
        On entering the block: the device has less memory, or more than that is allocated already.

    Examples
    --------
    >>> from gpucourse.environment import cuda_available
    >>> if cuda_available():
    ...     with cap_memory(1.0) as cap:
    ...         assert cap.limit_bytes == 1_000_000_000
    """
    if isinstance(gb, bool) or not isinstance(gb, Real):
        raise TypeError(f"the cap is {short(gb)}; wanted a number of GB, such as 24")
    if not math.isfinite(gb) or gb <= 0:
        raise ValueError(f"the cap is {gb} GB; wanted a finite number above 0")
    require_cuda("cap_memory")
    return _capped(round(float(gb) * GB), device)


@contextmanager
def _capped(asked: int, device: Any) -> Iterator[MemoryCap]:
    import torch

    index = torch.cuda._utils._get_device_index(device, optional=True)
    total = int(torch.cuda.mem_get_info(index)[1])
    if asked > total:
        raise CapError(
            f"a cap of {format_bytes(asked)} is above what cuda:{index} has, {format_bytes(total)}: it would limit "
            "nothing. Give a smaller one"
        )
    with _lock:
        state = _devices.setdefault(index, _Device())
        if not state.limits:
            # Not in every release: without it, a limit that was set by hand is not known, and ends with the cap.
            read = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _index: 1.0)
            state.before = float(read(index))
        limit = min(asked, *state.limits, _bytes_of(state.before, total))
        _refuse_less_than_used(torch, limit, index)
        state.limits.append(limit)
        try:
            _set(torch, limit, total, index)
        except BaseException:
            state.limits.remove(limit)
            raise
    try:
        yield MemoryCap(asked_bytes=asked, limit_bytes=limit, total_bytes=total, device=index)
    finally:
        with _lock:
            state.limits.remove(limit)
            if state.limits:
                _set(torch, min(state.limits), total, index)
            else:
                torch.cuda.set_per_process_memory_fraction(state.before, index)


def _bytes_of(fraction: float, total: int) -> int:
    return total if fraction >= 1.0 else round(fraction * total)


def _set(torch: Any, limit: int, total: int, index: int) -> None:
    """Set the limit to the byte: the allocator takes a fraction, and cuts fraction x total to whole bytes."""
    fraction = min(1.0, limit / total)
    while fraction < 1.0 and int(fraction * total) < limit:
        fraction = math.nextafter(fraction, 1.0)
    torch.cuda.set_per_process_memory_fraction(fraction, index)


def _refuse_less_than_used(torch: Any, limit: int, index: int) -> None:
    if torch.cuda.memory_reserved(index) > limit:
        give_back_cache(torch)
    allocated, reserved = torch.cuda.memory_allocated(index), torch.cuda.memory_reserved(index)
    if reserved <= limit:
        return
    where = (
        f"{format_bytes(allocated)} is allocated"
        if allocated > limit
        else f"{format_bytes(allocated)} is allocated, in segments of {format_bytes(reserved)} in all"
    )
    raise CapError(
        f"a cap of {format_bytes(limit)} on cuda:{index} is below what this process holds: {where}. Drop tensors first "
        "(del, gc.collect()), or give a larger cap"
    )
