"""The caching allocator's arithmetic, against its documented rules and hand-made sequences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucourse.allocator import CachingAllocator, SimulatedOutOfMemoryError, rounded, segment_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("asked", "segment_mib"),
    [
        (1, 2),
        (MIB, 2),
        (MIB + 1, 20),
        (10 * MIB - 512, 20),
        (10 * MIB, 10),
        (10 * MIB + 1, 12),
        (33 * MIB, 34),
    ],
)
def test_a_segment_is_2_mib_20_mib_or_the_request_rounded_to_2_mib(asked: int, segment_mib: int) -> None:
    assert segment_bytes(asked) == segment_mib * MIB
    allocator = CachingAllocator()
    allocator.allocate("x", asked)
    assert allocator.reserved_bytes == segment_mib * MIB


def test_small_requests_share_a_segment_until_it_is_full() -> None:
    allocator = CachingAllocator()
    for k in range(4):
        allocator.allocate(k, 512 * 1024)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate("one more", 1)
    assert allocator.reserved_bytes == 4 * MIB
    assert allocator.allocated_bytes == 2 * MIB + 512


def test_a_large_block_is_handed_out_whole_where_1_mib_or_less_would_be_left() -> None:
    allocator = CachingAllocator()
    allocator.allocate("a", 20 * MIB)
    allocator.free("a")
    allocator.allocate("b", 19 * MIB)  # 1 MiB left: not split, and counted
    assert allocator.allocated_bytes == 20 * MIB
    allocator.free("b")
    allocator.allocate("c", 19 * MIB - 512)  # a little more left: split
    assert allocator.allocated_bytes == 19 * MIB - 512
    assert allocator.reserved_bytes == 20 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    for name, mib in (("large", 100), ("fitting", 30)):
        allocator.allocate(name, mib * MIB)
    allocator.free("large")
    allocator.free("fitting")
    allocator.allocate("x", 29 * MIB)
    allocator.allocate("y", 100 * MIB)  # would need a new segment, had x been cut from the large one
    assert allocator.reserved_bytes == 130 * MIB


def test_neighbours_merge_when_both_are_free() -> None:
    allocator = CachingAllocator()
    for name in "abcd":
        allocator.allocate(name, 5 * MIB)  # the four share one segment of 20 MiB
    for name in "acb":
        allocator.free(name)
    allocator.allocate("x", 15 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    with pytest.raises(KeyError, match="'b' is not allocated"):
        allocator.free("b")


def test_small_and_large_requests_never_share_a_segment() -> None:
    allocator = CachingAllocator()
    allocator.allocate("large", 2 * MIB)
    allocator.allocate("small", MIB)
    assert allocator.reserved_bytes == 22 * MIB


def test_nothing_is_allocated_for_nothing() -> None:
    allocator = CachingAllocator()
    allocator.allocate("empty", 0)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)
    allocator.free("empty")


def test_at_the_limit_cached_segments_are_given_back_and_the_request_is_served() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    allocator.allocate("a", 60 * MIB)
    allocator.free("a")
    allocator.allocate("b", 80 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    assert allocator.retries == 1


def test_it_runs_out_on_reserved_while_allocated_fits() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    allocator.allocate("a", 80 * MIB)
    allocator.free("a")
    allocator.allocate("keeps the segment", 2 * MIB)  # cut from the 80 MiB
    with pytest.raises(SimulatedOutOfMemoryError, match=r"94\.4 MB asked for, 104\.9 MB allowed: 2\.10 MB"):
        allocator.allocate("b", 90 * MIB)


def test_a_key_in_use_and_a_negative_request_are_errors() -> None:
    allocator = CachingAllocator()
    allocator.allocate("a", 1)
    with pytest.raises(KeyError, match="allocated already"):
        allocator.allocate("a", 1)
    with pytest.raises(ValueError, match="-1 bytes"):
        rounded(-1)
    with pytest.raises(ValueError, match="0 bytes"):
        segment_bytes(0)


@given(st.lists(st.integers(0, 40 * MIB), max_size=40), st.randoms(use_true_random=False))
def test_counts_hold_through_any_sequence(sizes: list[int], random: object) -> None:
    allocator = CachingAllocator()
    live: dict[int, int] = {}
    for key, size in enumerate(sizes):
        allocator.allocate(key, size)
        live[key] = rounded(size)
        if random.random() < 0.5:  # type: ignore[attr-defined]
            gone = random.choice(sorted(live))  # type: ignore[attr-defined]
            allocator.free(gone)
            del live[gone]
        asked = sum(live.values())
        # A block that would leave 1 MiB or less is handed out whole.
        assert asked <= allocator.allocated_bytes <= asked + len(live) * MIB
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
        assert allocator.reserved_bytes % (2 * MIB) == 0
    for key in list(live):
        allocator.free(key)
    assert allocator.allocated_bytes == 0
    assert allocator.empty_cache() == allocator.peak_reserved_bytes  # each segment came back whole
    assert allocator.reserved_bytes == 0


def test_where_segments_lie_decides_between_free_blocks_of_one_size() -> None:
    orders = []
    for shuffle in range(1, 9):
        allocator = CachingAllocator(shuffle=shuffle)
        for name in ("a", "b"):
            allocator.allocate(name, 40 * 2**20)
        first = allocator._held["a"].address  # type: ignore[union-attr]
        allocator.free("a")
        allocator.free("b")
        allocator.allocate("x", 30 * 2**20)
        orders.append(allocator._held["x"].address == first)  # type: ignore[union-attr]
    assert set(orders) == {True, False}


def test_a_shuffle_is_the_same_each_time() -> None:
    def run() -> list[int]:
        allocator = CachingAllocator(shuffle=5)
        for name in range(6):
            allocator.allocate(name, 3_000_000 * (name + 1))
        return [allocator._held[name].address for name in range(6)]  # type: ignore[union-attr]

    assert run() == run()
