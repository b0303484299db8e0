"""A cap on a real allocator, a step that runs into it, and the memory afterwards."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from gpucourse.memory_cap import CapError, MemoryStatement, attempt, cap_memory  # noqa: E402
from gpucourse.memory_statement import give_back_cache  # noqa: E402

pytestmark = pytest.mark.gpu

GB = 10**9


@pytest.fixture(autouse=True)
def clean():
    give_back_cache(torch)
    yield
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    assert not torch._C._cuda_isHistoryEnabled()


def limit():
    return torch.cuda.get_per_process_memory_fraction() * torch.cuda.mem_get_info()[1]


def test_the_allocator_stops_at_the_cap_and_not_before():
    with cap_memory(1.0):
        torch.empty(GB - 16 * 2**20, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        with pytest.raises(torch.OutOfMemoryError, match="allowed"):
            torch.empty(GB + 1, dtype=torch.uint8, device="cuda")
    torch.empty(GB + 1, dtype=torch.uint8, device="cuda")


def test_caps_nest_and_are_put_back():
    with cap_memory(1.0):
        assert limit() == pytest.approx(1e9, abs=1)
        with cap_memory(2.0) as inner:
            assert inner.limit_bytes == GB
            assert limit() == pytest.approx(1e9, abs=1)
        with cap_memory(0.5):
            assert limit() == pytest.approx(0.5e9, abs=1)
        assert limit() == pytest.approx(1e9, abs=1)


def test_an_error_inside_puts_it_back():
    with pytest.raises(torch.OutOfMemoryError), cap_memory(0.1):
        torch.empty(GB, dtype=torch.uint8, device="cuda")


def test_a_cap_above_the_card_or_below_what_is_held_is_refused():
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(CapError, match="above what"):
        cap_memory(total / 1e9 + 1).__enter__()
    held = torch.empty(GB // 2, dtype=torch.uint8, device="cuda")
    with pytest.raises(CapError, match="is allocated"):
        cap_memory(0.2).__enter__()
    del held
    with cap_memory(0.2) as cap:  # the cache alone is no hindrance
        assert cap.limit_bytes == GB // 5


def test_a_workspace_in_a_large_segment_is_no_hindrance():
    large = torch.empty(GB, dtype=torch.uint8, device="cuda")
    del large
    a = torch.randn(64, 64, device="cuda")
    a @ a  # its workspace is cut from the large segment
    del a
    with cap_memory(0.2) as cap:
        assert cap.limit_bytes == GB // 5


def net():
    return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(20))).cuda()


def test_a_step_under_a_cap_says_what_lived_and_frees_it():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(rows):
        batch = torch.randn(rows, 1024, device="cuda")
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step(64)
    with cap_memory(0.8):
        before = torch.cuda.memory_allocated()
        failed = attempt(lambda: step(16_384), model=model, optimizer=optimizer)
        assert failed.statement is not None
        found = failed.statement
        assert found.exact
        assert found.allowed_bytes == pytest.approx(0.8e9, abs=1)
        assert sum(found.lines.values()) == found.allocated_bytes <= found.reserved_bytes <= 0.8e9
        assert found.lines["parameters"] == sum(p.nbytes for p in model.parameters())
        assert found.lines["optimizer"] == 2 * found.lines["parameters"]
        assert "test_memory_cap_gpu.py" in found.largest[0][0]
        assert MemoryStatement.from_dict(json.loads(json.dumps(found.as_dict()))) == found
        assert failed.left_bytes == 0
        assert torch.cuda.memory_allocated() <= before
        assert attempt(lambda: step(256), model=model, optimizer=optimizer).fits


def test_a_backward_pass_that_fails_leaves_no_gradient_to_add_to():
    model = net()

    def step():
        batch = torch.randn(4096, 1024, device="cuda")
        value = model(batch).square().mean()
        torch.cuda.set_per_process_memory_fraction(
            (torch.cuda.memory_reserved() + 2**21) / torch.cuda.mem_get_info()[1]
        )
        value.backward()

    before = torch.cuda.memory_allocated()
    with cap_memory(8):
        failed = attempt(step, model=model)
    assert failed.statement is not None
    assert all(p.grad is None for p in model.parameters())
    assert torch.cuda.memory_allocated() <= before


def test_an_error_that_was_caught_gives_the_messages_figures():
    with cap_memory(1.0):
        try:
            torch.empty(2 * GB, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            found = MemoryStatement.from_error(error)
    assert not found.exact
    assert found.asked_bytes == pytest.approx(2 * GB, rel=0.01)
    assert found.allowed_bytes == pytest.approx(GB, rel=0.01)


def test_memory_in_pieces_is_told_from_memory_that_is_gone():
    def pieces():
        live = [torch.empty(5 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(160)]
        kept = live[::4]  # one in each segment of 20 MiB
        del live
        kept.append(torch.empty(700 * 2**20, dtype=torch.uint8, device="cuda"))

    with cap_memory(1.0):
        failed = attempt(pieces)
    assert failed.statement is not None
    assert failed.statement.fragmented
    assert failed.statement.pieces >= 40
    assert failed.statement.largest_piece_bytes < 20 * 2**20

    with cap_memory(1.0):
        failed = attempt(
            lambda: [torch.empty(600 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(2)]
        )
    assert failed.statement is not None
    assert failed.statement.fragmented is False
