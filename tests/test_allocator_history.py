"""A history replayed gives each block the bytes that the allocator handed out, and knows when it is not whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucourse.allocator import CachingAllocator
from gpucourse.allocator_history import AllocatorHistory, HistoryError
from tests.fake_allocator import FakeDevice

MIB = 2**20


def event(action: str, addr: int, size: int = 0, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, **more}


def handed_out(history: AllocatorHistory) -> list[int]:
    return [block.block_bytes for block in history.blocks]


def test_a_request_is_rounded_up_where_the_rest_can_be_split_off() -> None:
    history = AllocatorHistory([], [event("segment_alloc", 0, 2 * MIB), event("alloc", 0, 1000)])
    assert handed_out(history) == [1024]
    assert history.blocks[0].requested_bytes == 1000
    assert history.unplaced == 0


@pytest.mark.parametrize(
    ("segment", "asked", "handed"),
    [
        (22 * MIB, 21 * MIB, 22 * MIB),  # a rest of 1 MiB stays with a large block
        (23 * MIB, 21 * MIB, 21 * MIB),
        (2 * MIB, 2 * MIB - 512, 2 * MIB),
        (2 * MIB, MIB, MIB),
        (2 * MIB, MIB - 100, MIB),
    ],
)
def test_a_rest_that_is_too_small_to_be_split_off_is_handed_out_with_the_block(
    segment: int, asked: int, handed: int
) -> None:
    history = AllocatorHistory([], [event("segment_alloc", 0, segment), event("alloc", 0, asked)])
    assert handed_out(history) == [handed]


def test_in_an_expandable_segment_every_rest_is_split_off() -> None:
    history = AllocatorHistory([], [event("segment_map", 0, 22 * MIB), event("alloc", 0, 21 * MIB)])
    assert handed_out(history) == [21 * MIB]
    more = AllocatorHistory(
        [],
        [
            event("segment_map", 0, 20 * MIB),
            event("segment_map", 20 * MIB, 20 * MIB),  # it grows: one stretch
            event("alloc", 0, 30 * MIB),
        ],
    )
    assert (handed_out(more), more.unplaced) == ([30 * MIB], 0)


def test_two_segments_side_by_side_are_never_one_stretch() -> None:
    events = [event("segment_alloc", 0, 20 * MIB), event("segment_alloc", 20 * MIB, 20 * MIB)]
    assert AllocatorHistory([], [*events, event("alloc", 0, 30 * MIB)]).unplaced == 1
    assert AllocatorHistory([], [*events, event("alloc", 0, 20 * MIB)]).unplaced == 0


def test_a_block_that_another_stream_still_uses_cannot_be_handed_out() -> None:
    start = [event("segment_alloc", 0, 2 * MIB), event("alloc", 0, 512), event("free_requested", 0)]
    assert AllocatorHistory([], [*start, event("alloc", 0, 512)]).unplaced == 1
    freed = AllocatorHistory([], [*start, event("free_completed", 0), event("alloc", 0, 512)])
    assert (freed.unplaced, freed.events) == (0, [0, -1, 1])


def test_a_segment_that_went_back_to_the_driver_serves_nobody() -> None:
    start = [event("segment_alloc", 0, 2 * MIB), event("alloc", 0, 512)]
    start += [event("free_requested", 0), event("free_completed", 0), event("segment_free", 0, 2 * MIB)]
    assert AllocatorHistory([], [*start, event("alloc", 0, 512)]).unplaced == 1


def test_what_was_there_before_counts_apart_and_its_space_is_used_when_it_goes() -> None:
    segments = [
        {
            "address": 4096,
            "blocks": [
                {"address": 4096, "size": 1024, "requested_size": 1000, "state": "active_allocated"},
                {"address": 5120, "size": 512, "requested_size": 512, "state": "active_awaiting_free"},
                {"address": 5632, "size": 2 * MIB - 1536, "requested_size": 0, "state": "inactive"},
            ],
        }
    ]
    trace = [event("alloc", 5632, 100), event("free_requested", 4096), event("free_completed", 4096)]
    history = AllocatorHistory(segments, [*trace, event("alloc", 4096, 1000)])
    assert (history.before, history.unplaced) == (1, 0)
    assert history.events == [1, -1, 2]
    assert handed_out(history) == [1024, 512, 1024]


def test_a_history_that_lost_its_beginning_is_refused() -> None:
    with pytest.raises(HistoryError, match=r"frees a block at 0x200 .*max_entries was too small"):
        AllocatorHistory([], [event("free_requested", 512)])


def test_the_allocators_counters_say_the_place_among_the_events() -> None:
    history = AllocatorHistory(
        [], [event("segment_alloc", 0, 2 * MIB), event("alloc", 0, 1), event("free_requested", 0)]
    )
    assert [history.position(*counts) for counts in ((0, 0), (1, 0), (1, 1))] == [0, 1, 2]
    for counts in ((2, 1), (-1, 2)):
        with pytest.raises(HistoryError, match="the history holds 2 of both"):
            history.position(*counts)


def test_an_address_names_the_block_that_held_it_then() -> None:
    trace = [event("segment_alloc", 0, 2 * MIB), event("alloc", 0, 512), event("alloc", 512, 1024)]
    trace += [event("free_requested", 0), event("free_completed", 0), event("alloc", 0, 100)]
    history = AllocatorHistory([], trace)
    asked = [(1, 0), (4, 0), (3, 0), (2, 512), (2, 512 + 1023), (2, 512 + 1024), (0, 0)]
    assert history.numbers_at(asked) == [0, 2, None, 1, 1, None, None]


sizes = st.one_of(st.integers(1, 5000), st.integers(1, 3 * MIB), st.integers(9 * MIB, 40 * MIB))


@given(st.lists(st.one_of(sizes, st.tuples(st.just("free"), st.integers(0, 50))), max_size=60))
def test_what_was_handed_out_is_what_the_allocator_counts_after_each_event(steps: list[Any]) -> None:
    device, live, counted = FakeDevice(), [], []
    for step in steps:
        if isinstance(step, int):
            live.append(device.allocate(step))
        elif live:
            device.free(live.pop(step[1] % len(live)))
        else:
            continue
        counted.append(device.allocator.allocated_bytes)
    history = AllocatorHistory([], device.trace)
    total, replayed = 0, []
    for number in history.events:
        total += (
            history.blocks[number].block_bytes if number >= 0 else -history.blocks[-1 - number].block_bytes
        )
        replayed.append(total)
    assert replayed == counted
    assert history.unplaced == 0


def test_that_property_sees_an_allocator_that_splits_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of_it(self: CachingAllocator, block: Any, size: int) -> None:
        return None

    monkeypatch.setattr(CachingAllocator, "_split", all_of_it)
    device = FakeDevice()
    device.allocate(1000)
    assert handed_out(AllocatorHistory([], device.trace)) == [1024]
    assert device.allocator.allocated_bytes == 2 * MIB
