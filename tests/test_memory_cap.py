"""A cap is set to the byte, nests, is put back whatever happens, and refuses what it cannot be."""

from __future__ import annotations

import contextlib
import json
import threading
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from gpucourse import memory_cap
from gpucourse.environment import NoGPUError, cuda_available
from gpucourse.memory_cap import NOT_LIMITED, CapError, cap_memory

TOTAL = 150_142_189_568  # an H200's, by its driver: no round number
GB = 10**9


class Card:
    """A device whose allocator has a limit, as `set_per_process_memory_fraction` sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.cached = 0
        self.fractions = {0: 1.0, 1: 1.0}
        self.emptied = 0
        replaced = {
            "_utils": torch.cuda._utils,
            "mem_get_info": lambda _device: (TOTAL - self.allocated - self.cached, TOTAL),
            "memory_allocated": lambda _device=None: self.allocated,
            "memory_reserved": lambda _device=None: self.allocated + self.cached,
            "empty_cache": self.empty,
            "synchronize": lambda: None,
            "set_per_process_memory_fraction": self.set,
            "get_per_process_memory_fraction": self.fractions.__getitem__,
        }
        for name, what in replaced.items():
            monkeypatch.setattr(torch.cuda, name, what)
        monkeypatch.setattr(torch.cuda._utils, "_get_device_index", lambda device, optional: device or 0)
        monkeypatch.setattr(memory_cap, "require_cuda", lambda _what: None)
        monkeypatch.setattr(memory_cap, "_devices", {})

    def empty(self) -> None:
        self.emptied += 1
        self.cached = 0

    @property
    def fraction(self) -> float:
        return self.fractions[0]

    def set(self, fraction: float, device: int) -> None:
        assert isinstance(fraction, float)  # torch takes nothing else
        assert 0 <= fraction <= 1
        self.fractions[device] = fraction

    @property
    def limit(self) -> int:
        return int(self.fraction * TOTAL)  # as the allocator cuts it


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


@pytest.mark.parametrize("gb", [24, 24.0, 0.001, 7.3, Fraction(1, 3), np.float32(16), np.int64(40), 150])
def test_the_limit_is_what_was_asked_for_to_the_byte(card: Card, gb: Any) -> None:
    with cap_memory(gb) as cap:
        assert card.limit == cap.limit_bytes == cap.asked_bytes == round(float(gb) * 1e9)
    assert card.fraction == 1.0


def test_a_larger_cap_inside_loosens_nothing_and_a_smaller_one_tightens(card: Card) -> None:
    with cap_memory(24):
        with cap_memory(30) as inner:
            assert (inner.asked_bytes, inner.limit_bytes, card.limit) == (30 * GB, 24 * GB, 24 * GB)
            assert "30.0 GB asked for: the cap around it is lower" in str(inner)
            with cap_memory(8) as innermost:
                assert innermost.limit_bytes == card.limit == 8 * GB
            assert card.limit == 24 * GB
        assert card.limit == 24 * GB
    assert card.fraction == 1.0


def test_a_limit_that_was_set_before_holds_inside_and_comes_back(card: Card) -> None:
    card.fractions[0] = 0.1
    with cap_memory(24) as cap:
        assert cap.limit_bytes == card.limit == round(0.1 * TOTAL)
    with cap_memory(8):
        assert card.limit == 8 * GB
    assert card.fraction == 0.1


def test_a_torch_that_cannot_tell_its_limit_is_capped_all_the_same(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    with cap_memory(24):
        with cap_memory(8):
            assert card.limit == 8 * GB
        assert card.limit == 24 * GB
    assert card.fraction == 1.0


def test_after_an_error_the_limit_is_put_back(card: Card) -> None:
    with pytest.raises(KeyError), cap_memory(24):
        raise KeyError("inside")
    assert card.fraction == 1.0
    assert memory_cap._devices[0].limits == []


def test_caps_that_are_left_in_another_order_leave_the_tightest_that_is_open(card: Card) -> None:
    outer, inner = cap_memory(24), cap_memory(8)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert card.limit == 8 * GB
    inner.__exit__(None, None, None)
    assert card.fraction == 1.0


def test_a_cap_that_torch_refuses_leaves_nothing_behind(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fraction: float, _device: int) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as inside:
        inside.setattr(torch.cuda, "set_per_process_memory_fraction", refuse)
        with pytest.raises(RuntimeError, match="no"), cap_memory(24):
            pass
    assert memory_cap._devices[0].limits == []
    with cap_memory(30):
        assert card.limit == 30 * GB


def test_caps_of_two_devices_do_not_meet(card: Card) -> None:
    with cap_memory(24, device=0), cap_memory(30, device=1) as other:
        assert other.limit_bytes == 30 * GB
        assert card.limit == 24 * GB


def test_caps_of_several_threads_leave_the_limit_that_was(card: Card) -> None:
    def work() -> None:
        for gb in (5, 3, 9):
            with cap_memory(gb):
                assert card.limit <= gb * GB

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert card.fraction == 1.0


def test_a_cache_above_the_cap_is_emptied_and_one_below_is_left(card: Card) -> None:
    card.allocated, card.cached = 2 * GB, 30 * GB
    with cap_memory(40):
        assert card.emptied == 0
    with cap_memory(24):
        assert card.emptied == 1


@pytest.mark.parametrize(
    ("gb", "error", "says"),
    [
        (True, TypeError, "the cap is True; wanted a number of GB"),
        ("24", TypeError, "the cap is '24'"),
        (None, TypeError, "the cap is None"),
        (float("nan"), ValueError, "the cap is nan GB; wanted a finite number above 0"),
        (float("inf"), ValueError, "the cap is inf GB"),
        (0, ValueError, "the cap is 0 GB"),
        (-3.5, ValueError, "the cap is -3.5 GB"),
    ],
)
def test_what_is_no_amount_is_refused_before_the_block_is_entered(
    card: Card, gb: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        cap_memory(gb)


def test_a_cap_above_the_card_is_refused(card: Card) -> None:
    with pytest.raises(CapError, match=r"a cap of 151.0 GB is above what cuda:0 has, 150.1 GB.*smaller"):
        cap_memory(151).__enter__()
    assert card.fraction == 1.0


def test_a_cap_below_what_is_held_is_refused_with_what_holds_it(card: Card) -> None:
    card.allocated = 3 * GB
    with pytest.raises(CapError, match=r"cap of 2.00 GB on cuda:0 is below .*: 3.00 GB is allocated\. Drop"):
        cap_memory(2).__enter__()
    assert card.fraction == 1.0


def test_segments_that_cannot_go_back_count_as_held(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    card.allocated, card.cached = 1 * GB, 3 * GB
    monkeypatch.setattr(card, "cached", 3 * GB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)  # something lives in each
    with pytest.raises(CapError, match=r"1.00 GB is allocated, in segments of 4.00 GB in all"):
        cap_memory(2).__enter__()


@pytest.mark.skipif(cuda_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(NoGPUError, match="cap_memory needs a CUDA device"):
        cap_memory(24)


def test_a_cap_says_what_it_does_not_limit(card: Card) -> None:
    with cap_memory(24) as cap:
        text, data = str(cap), json.loads(json.dumps(cap.as_dict()))
    assert text.startswith("cuda:0: the allocator may reserve 24.0 GB of 150.1 GB; not limited: ")
    for what in ("context", "other processes", "speed", "kernels"):
        assert what in text
    assert data["not_limited"] == list(NOT_LIMITED)
    assert (data["limit_bytes"], data["total_bytes"]) == (24 * GB, TOTAL)


def test_a_cap_serves_once(card: Card) -> None:
    cap = cap_memory(24)
    with cap:
        pass
    with pytest.raises((RuntimeError, AttributeError)), cap:
        pass
    with contextlib.ExitStack() as stack:
        stack.enter_context(cap_memory(24))
        assert card.limit == 24 * GB
    assert card.fraction == 1.0
