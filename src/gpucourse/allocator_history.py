"""What torch's recorded history says the caching allocator did, block by block.

``torch.cuda.memory._snapshot()`` lists segments, and events since the history was switched on. An event says how
many bytes were *asked for*; how many were *handed out* depends on the free block that served it (512 B steps, and
a rest that is too small to be split off). `AllocatorHistory` runs over the events with their real addresses and
finds that out, so that what it counts can be held against ``torch.cuda.max_memory_allocated()`` to the byte.

Rules: ``c10/cuda/CUDACachingAllocator.cpp`` in PyTorch. An ``alloc`` and a ``free_requested`` are what ``allocated``
counts; a block can be used again from its ``free_completed`` on, which comes later where another stream used it.

>>> history = AllocatorHistory([], [
...     {"action": "segment_alloc", "addr": 4096, "size": 2097152},
...     {"action": "alloc", "addr": 4096, "size": 1000},
...     {"action": "alloc", "addr": 5120, "size": 512},
...     {"action": "free_requested", "addr": 4096, "size": 1000},
... ])
>>> [(block.requested_bytes, block.block_bytes) for block in history.blocks]
[(1000, 1024), (512, 512)]
>>> history.events
[0, 1, -1]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpucourse.allocator import ROUND, SMALL, rounded

__all__ = ["AllocatorHistory", "Block", "HistoryError"]


class HistoryError(RuntimeError):
    """The history does not hold what happened: it was cut short, or recorded without events."""


@dataclasses.dataclass(slots=True)
class Block:
    """A block of the allocator's, from its allocation to its end.

    Attributes
    ----------
    address
        Of its first byte.
    requested_bytes, block_bytes
        What was asked for, and what was handed out for it.
    frames
        The stack of the allocation, innermost first, where it was recorded: mappings with ``filename``, ``line``
        and ``name``.
    """

    address: int
    requested_bytes: int
    block_bytes: int
    frames: Sequence[Mapping[str, Any]] = ()


class AllocatorHistory:
    """Runs over the events of one device.

    Parameters
    ----------
    segments
        The device's segments when the events begin, as a snapshot lists them.
    trace
        The events, as a snapshot's ``device_traces`` has them.

    Attributes
    ----------
    blocks
        All that lived, those that were there before the first event first.
    before
        How many of them were there before.
    events
        The number of a block that comes, or −1 − its number where it goes: one for each ``alloc`` and each
        ``free_requested``.
    unplaced
        How many allocations were found where no free block was known, so that what was handed out for them is the
        rounded request: 0 where the history is whole.
    """

    def __init__(self, segments: Iterable[Mapping[str, Any]], trace: Iterable[Mapping[str, Any]]) -> None:
        self.blocks: list[Block] = []
        self.events: list[int] = []
        self.unplaced = 0
        self._space = _Space()
        self._live: dict[int, int] = {}  # address: number of the block that `allocated` counts
        self._waiting: dict[int, int] = {}  # freed, but another stream may still use it
        for segment in segments:
            self._take_in(segment)
        self.before = len(self.blocks)
        for event in trace:
            self._step(event)

    def _take_in(self, segment: Mapping[str, Any]) -> None:
        address = int(segment["address"])
        self._space.begin(address, expandable=bool(segment.get("is_expandable", False)))
        for found in segment["blocks"]:
            size, at = int(found["size"]), int(found.get("address", address))
            address = at + size
            if found["state"] == "inactive":
                self._space.give(at, size)
            elif found["state"] == "active_allocated":
                self._live[at] = len(self.blocks)
                self.blocks.append(Block(at, int(found.get("requested_size", size)), size))
            else:  # awaits its end, and `allocated` does not count it any more
                self._waiting[at] = size

    def _step(self, event: Mapping[str, Any]) -> None:
        action, address, size = event["action"], int(event.get("addr", 0)), int(event.get("size", 0))
        if action == "alloc":
            handed = self._space.take(address, size)
            if handed is None:
                self.unplaced += 1
                handed = rounded(size)
            number = len(self.blocks)
            self._live[address] = number
            self.blocks.append(Block(address, size, handed, event.get("frames") or ()))
            self.events.append(number)
        elif action == "free_requested":
            if address not in self._live:
                raise HistoryError(
                    f"the history frees a block at {address:#x} that it never allocated: its beginning is missing "
                    "(max_entries was too small, or it was not switched on with enabled='all')"
                )
            number = self._live.pop(address)
            self._waiting[address] = self.blocks[number].block_bytes
            self.events.append(-1 - number)
        elif action == "free_completed":
            if address in self._waiting:
                self._space.give(address, self._waiting.pop(address))
        elif action in ("segment_alloc", "segment_map"):
            self._space.begin(address, expandable=action == "segment_map")
            self._space.give(address, size)
        elif action in ("segment_free", "segment_unmap"):
            self._space.drop(address, size)

    def position(self, allocated: int, freed: int) -> int:
        """Give the place in `events` after so many allocations and frees.

        Parameters
        ----------
        allocated, freed
            Counted from the first event on, as the difference of ``allocation.all.allocated`` and
            ``allocation.all.freed`` of ``torch.cuda.memory_stats()`` is.

        Returns
        -------
        int
            How many events were before.

        Raises
        ------
        HistoryError
            The events do not come in such numbers.
        """
        at = allocated + freed
        if at > len(self.events) or min(allocated, freed) < 0:
            raise HistoryError(
                f"the allocator counted {allocated} allocations and {freed} frees, and the history holds "
                f"{len(self.events)} of both: it was cut short (max_entries), or recorded something else"
            )
        return at

    def numbers_at(self, asked: Iterable[tuple[int, int]]) -> list[int | None]:
        """Say which blocks lay at addresses at certain times.

        Parameters
        ----------
        asked
            (place in `events`, address) pairs, in any order.

        Returns
        -------
        list of int or None
            For each the number of the block that held the address after that many events; None where none did.
        """
        pairs = list(asked)
        found: list[int | None] = [None] * len(pairs)
        live = {self.blocks[number].address: number for number in range(self.before)}
        done = 0
        for place in sorted(range(len(pairs)), key=lambda k: pairs[k][0]):
            at, address = pairs[place]
            for event in self.events[done:at]:
                if event >= 0:
                    live[self.blocks[event].address] = event
                else:
                    live.pop(self.blocks[-1 - event].address, None)
            done = max(done, at)
            found[place] = live.get(address)
            if found[place] is None:  # a storage may begin inside a block
                found[place] = next(
                    (
                        number
                        for start, number in live.items()
                        if start < address < start + self.blocks[number].block_bytes
                    ),
                    None,
                )
        return found


class _Space:
    """Free stretches by address; stretches of two segments are never one, however they lie."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # of each free stretch: start -> end
        self._starts: dict[int, int] = {}  # end -> start
        self._borders: set[int] = set()
        self._expandable = False

    def begin(self, address: int, *, expandable: bool) -> None:
        # An expandable segment grows at its end: what is mapped next to it belongs to it.
        self._expandable |= expandable
        if not expandable:
            self._borders.add(address)

    def give(self, address: int, size: int) -> None:
        start, end = address, address + size
        if start in self._starts and start not in self._borders:
            start = self._starts.pop(start)
        if end in self._ends and end not in self._borders:
            end = self._ends.pop(end)
        self._ends[start], self._starts[end] = end, start

    def take(self, address: int, asked: int) -> int | None:
        """Cut a request off the free stretch that begins there; give what it gets, None without a stretch."""
        if address not in self._ends:
            return None
        size, end = rounded(asked), self._ends[address]
        rest = end - address - size
        if rest < 0:
            return None
        del self._ends[address], self._starts[end]
        least = ROUND if size <= SMALL or self._expandable else SMALL + 1
        if rest < least:
            return end - address
        self._ends[address + size], self._starts[end] = end, address + size
        return size

    def drop(self, address: int, size: int) -> None:
        """Forget a stretch that goes back to the driver; it may lie inside a larger free one."""
        for start, end in list(self._ends.items()):
            if start <= address and address + size <= end:
                del self._ends[start], self._starts[end]
                if start < address:
                    self._ends[start], self._starts[address] = address, start
                if address + size < end:
                    self._ends[address + size], self._starts[end] = end, address + size
                break
        self._borders.discard(address)
