"""The caching allocator's arithmetic: rounding, segments, splitting and merging, with no GPU.

What a program asks for, what is *allocated* and what is *reserved* are three numbers. Every request is rounded
up to 512 B. It is cut from a segment that the allocator asked the driver for: one of 2 MiB for requests of up
to 1 MiB, one of 20 MiB for those below 10 MiB, and for larger ones a segment of their own, rounded up to 2 MiB.
A segment goes on being reserved after all in it was freed; the next request that fits takes the smallest free
block that can hold it. Source: `c10/cuda/CUDACachingAllocator.cpp` and its header in PyTorch (2.9 to 2.13), with
the allocator's default settings.

Not modelled: streams (one is assumed), expandable segments and ``max_split_size``. Where in its address space the
driver puts a segment decides between free blocks of one size, and cannot be known: later ones lie higher here, or
anywhere, by `shuffle`.

>>> allocator = CachingAllocator()
>>> allocator.allocate("x", 1000)
>>> allocator.allocated_bytes, allocator.reserved_bytes
(1024, 2097152)
"""

from __future__ import annotations

import bisect
import dataclasses
import random
from collections.abc import Hashable

from gpucourse.units import format_bytes

__all__ = ["CachingAllocator", "SimulatedOutOfMemoryError", "rounded", "segment_bytes"]

ROUND = 512  # kMinBlockSize
SMALL = (
    2**20
)  # kSmallSize: up to here from the small pool; a large block is split only if more than this is left
SMALL_SEGMENT = 2 * 2**20  # kSmallBuffer
LARGE_SEGMENT = 20 * 2**20  # kLargeBuffer
OWN_SEGMENT_FROM = 10 * 2**20  # kMinLargeAlloc
LARGE_ROUND = 2 * 2**20  # kRoundLarge


class SimulatedOutOfMemoryError(MemoryError):
    """The allocator would go over its limit, even after giving back every segment in which nothing lives."""


def rounded(nbytes: int) -> int:
    """Round a request up to the multiple of 512 B that is allocated for it.

    Parameters
    ----------
    nbytes
        Bytes asked for; 0 allocates nothing.

    Raises
    ------
    ValueError
        `nbytes` is negative.

    Examples
    --------
    >>> rounded(0), rounded(1), rounded(512), rounded(513)
    (0, 512, 512, 1024)
    """
    if nbytes < 0:
        raise ValueError(f"a request of {nbytes} bytes; wanted 0 or more")
    return -(-nbytes // ROUND) * ROUND


def segment_bytes(nbytes: int) -> int:
    """Give the size of the segment that the driver is asked for where no free block can serve a request.

    Parameters
    ----------
    nbytes
        Bytes asked for, above 0.

    Raises
    ------
    ValueError
        `nbytes` is not above 0.

    Examples
    --------
    >>> [segment_bytes(n) // 2**20 for n in (1, 2**20, 2**20 + 1, 10 * 2**20, 21 * 2**20)]
    [2, 2, 20, 10, 22]
    """
    size = rounded(nbytes)
    if size == 0:
        raise ValueError("a request of 0 bytes needs no segment")
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT_FROM:
        return LARGE_SEGMENT
    return -(-size // LARGE_ROUND) * LARGE_ROUND


@dataclasses.dataclass(slots=True, eq=False)
class _Block:
    """A stretch of one segment, in use or free; its neighbours in the segment on both sides."""

    address: int
    size: int
    small: bool
    free: bool = True
    before: _Block | None = None
    after: _Block | None = None

    @property
    def order(self) -> tuple[int, int]:
        return self.size, self.address


class CachingAllocator:
    """Serves requests as PyTorch's caching allocator does on one stream.

    Parameters
    ----------
    limit_bytes
        What may be reserved, as `torch.cuda.set_per_process_memory_fraction` sets it; None for no limit.
    shuffle
        0: each new segment lies above those before it. Any other number: anywhere, the same for the same number.

    Attributes
    ----------
    allocated_bytes, reserved_bytes
        Now, in bytes.
    peak_allocated_bytes, peak_reserved_bytes
        The most there was of each.
    retries
        How often the limit made it give back the segments in which nothing lived.

    Examples
    --------
    What is freed stays reserved, and a block that is too small for the next request serves nobody:

    >>> allocator = CachingAllocator()
    >>> for name, mib in (("a", 40), ("b", 60)):
    ...     allocator.allocate(name, mib * 2**20)
    >>> allocator.free("a"), allocator.free("b")
    (None, None)
    >>> allocator.allocate("c", 70 * 2**20)
    >>> allocator.allocated_bytes // 2**20, allocator.reserved_bytes // 2**20
    (70, 170)
    """

    def __init__(self, *, limit_bytes: int | None = None, shuffle: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self._anywhere = random.Random(shuffle) if shuffle else None
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        self._held: dict[Hashable, _Block | None] = {}
        # Free blocks by size, then address: the first one not smaller than a request is the best fit.
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._next_address = 0

    def allocate(self, key: Hashable, nbytes: int) -> None:
        """Serve a request.

        Parameters
        ----------
        key
            Names it until it is freed.
        nbytes
            Bytes asked for.

        Raises
        ------
        KeyError
            `key` is in use.
        SimulatedOutOfMemoryError
            The limit does not allow it, even after every segment in which nothing lives was given back.
        """
        if key in self._held:
            raise KeyError(f"{key!r} is allocated already: free it first")
        size = rounded(nbytes)
        if size == 0:
            self._held[key] = None  # a null pointer
            return
        block = self._best_fit(size) or self._new_segment(size)
        self._split(block, size)
        block.free = False
        self._held[key] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, key: Hashable) -> None:
        """Give a block back to the allocator; its segment stays reserved.

        Parameters
        ----------
        key
            As it was allocated.

        Raises
        ------
        KeyError
            Nothing is allocated under it.
        """
        if key not in self._held:
            raise KeyError(f"{key!r} is not allocated")
        block = self._held.pop(key)
        if block is None:
            return
        self.allocated_bytes -= block.size
        block.free = True
        before, after = block.before, block.after
        if before is not None and before.free:
            self._take(before)
            before.size += block.size
            before.after, block = after, before
            if after is not None:
                after.before = block
        if after is not None and after.free:
            self._take(after)
            block.size += after.size
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        self._put(block)

    def empty_cache(self) -> int:
        """Give every segment in which nothing lives back to the driver.

        Returns
        -------
        int
            Bytes given back.
        """
        given = 0
        for blocks in self._free.values():
            for _, _, block in [b for b in blocks if b[2].before is None and b[2].after is None]:
                self._take(block)
                given += block.size
        self.reserved_bytes -= given
        return given

    def _best_fit(self, size: int) -> _Block | None:
        blocks = self._free[size <= SMALL]
        at = bisect.bisect_left(blocks, (size, -1))
        return blocks.pop(at)[2] if at < len(blocks) else None

    def _new_segment(self, size: int) -> _Block:
        asked = segment_bytes(size)
        limit = self.limit_bytes
        if limit is not None and self.reserved_bytes + asked > limit:
            self.retries += 1
            self.empty_cache()
            if self.reserved_bytes + asked > limit:
                raise SimulatedOutOfMemoryError(
                    f"{format_bytes(size)} asked for, {format_bytes(limit)} allowed: "
                    f"{format_bytes(self.allocated_bytes)} are allocated and "
                    f"{format_bytes(self.reserved_bytes)} reserved in segments in which something lives"
                )
        address = self._next_address if self._anywhere is None else self._anywhere.randrange(2**50)
        block = _Block(address=address, size=asked, small=size <= SMALL)
        self._next_address += asked
        self.reserved_bytes += asked
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _split(self, block: _Block, size: int) -> None:
        left = block.size - size
        if not (left >= ROUND if block.small else left > SMALL):
            return  # the whole block is handed out, and counts as allocated
        rest = _Block(
            address=block.address + size, size=left, small=block.small, before=block, after=block.after
        )
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._put(rest)

    def _put(self, block: _Block) -> None:
        bisect.insort(self._free[block.small], (*block.order, block), key=lambda entry: entry[:2])

    def _take(self, block: _Block) -> None:
        blocks = self._free[block.small]
        del blocks[bisect.bisect_left(blocks, block.order, key=lambda entry: entry[:2])]
