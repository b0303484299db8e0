"""An out-of-memory error becomes a statement that adds up, says why, and after which the memory is free."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from gpucourse import memory_statement
from gpucourse.environment import NoGPUError, cuda_available
from gpucourse.memory_statement import (
    REST,
    UNKNOWN,
    Attempt,
    MemoryStatement,
    NotOutOfMemoryError,
    attempt,
    figures_in,
)

MIB, GIB = 2**20, 2**30
MESSAGE = (
    "CUDA out of memory. Tried to allocate 6.14 GiB. GPU 0 has a total capacity of 139.81 GiB of which 115.90 GiB is "
    "free. Including non-PyTorch memory, this process has 23.89 GiB memory in use. 22.35 GiB allowed; Of the allocated "
    "memory 21.90 GiB is allocated by PyTorch, and 301.50 MiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def segment(address: int, *blocks: tuple[int, int, str], **more: Any) -> dict[str, Any]:
    """Make a segment of (size, asked for, state) blocks."""
    at, made = address, []
    for size, asked, state in blocks:
        frames = more.get("frames", [])
        made.append({"address": at, "size": size, "requested_size": asked, "state": state, "frames": frames})
        at += size
    live = sum(size for size, _, state in blocks if state == "active_allocated")
    return {
        "device": 0,
        "address": address,
        "total_size": at - address,
        "allocated_size": live,
        "blocks": made,
    }


LIVE, FREE = "active_allocated", "inactive"


def test_the_figures_of_torchs_message_are_read_with_their_units() -> None:
    assert figures_in(MESSAGE) == {
        "asked_bytes": round(6.14 * GIB),
        "total_bytes": round(139.81 * GIB),
        "free_bytes": round(115.90 * GIB),
        "allowed_bytes": round(22.35 * GIB),
        "allocated_bytes": round(21.90 * GIB),
        "unallocated_bytes": round(301.50 * MIB),
    }


def test_a_message_without_a_cap_and_with_private_pools_is_read_too() -> None:
    message = (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 1 has a total capacity of 23.68 GiB of which 3.19 MiB is "
        "free. Process 7 has 1.00 GiB memory in use. Of the allocated memory 22.10 GiB is allocated by PyTorch, with "
        "30.00 MiB allocated in private pools (e.g., CUDA Graphs), and 512 bytes is reserved by PyTorch but "
        "unallocated."
    )
    found = figures_in(message)
    assert "allowed_bytes" not in found
    assert (found["asked_bytes"], found["unallocated_bytes"]) == (20 * MIB, 512)
    assert figures_in("something else") == {}


def test_an_error_alone_gives_the_messages_figures_and_says_that_they_are_rounded() -> None:
    found = MemoryStatement.from_error(torch.OutOfMemoryError(MESSAGE))
    assert (found.exact, found.allowed_bytes, found.asked_bytes) == (
        False,
        round(22.35 * GIB),
        round(6.14 * GIB),
    )
    assert found.reserved_bytes == round(21.90 * GIB) + round(301.50 * MIB)
    assert "figures as torch's message rounds them" in str(found)


def test_another_error_is_no_statement() -> None:
    with pytest.raises(NotOutOfMemoryError, match=r"the error is KeyError; wanted torch.OutOfMemoryError"):
        MemoryStatement.from_error(KeyError("x"))


SEGMENTS = [
    segment(0, (600 * MIB, 600 * MIB - 100, LIVE), (400 * MIB, 0, FREE)),
    segment(2**40, (300 * MIB, 300 * MIB, LIVE), (100 * MIB, 0, FREE), (300 * MIB, 300 * MIB, LIVE)),
    segment(2**41, (512, 4, LIVE), (512, 512, "active_awaiting_free"), (2 * MIB - 1024, 0, FREE)),
]


def statement(**more: Any) -> MemoryStatement:
    return MemoryStatement.from_segments(
        SEGMENTS, **({"asked_bytes": 700 * MIB, "allowed_bytes": 2000 * MIB, "free_bytes": 100 * GIB} | more)
    )


def test_the_lines_add_up_to_what_is_allocated() -> None:
    owners = {0: "parameters", 2**40: "optimizer"}
    found = statement(owners=owners)
    assert sum(found.lines.values()) == found.allocated_bytes == 1200 * MIB + 512
    assert found.lines["parameters"] == 600 * MIB - 100
    assert found.lines["optimizer"] == found.lines[REST] - 4 == 300 * MIB
    assert found.lines["rounding"] == 100 + 508
    assert (found.pieces, found.largest_piece_bytes) == (3, 400 * MIB)
    assert found.reserved_bytes == 1702 * MIB
    assert found.unallocated_bytes == 502 * MIB - 512


def test_without_a_model_blocks_are_told_apart_by_size() -> None:
    found = statement()
    assert dict(found.lines) == {UNKNOWN: 1200 * MIB - 100 + 4, "rounding": 608}
    assert [group[1:] for group in found.largest] == [(2, 600 * MIB), (1, 600 * MIB - 100), (1, 4)]
    assert found.largest[0][0] == "314.6 MB each"


def test_where_stacks_were_recorded_blocks_are_named_by_the_readers_line() -> None:
    frames = [
        {"filename": "/lib/torch/nn/functional.py", "line": 1, "name": "linear"},
        {"filename": "/home/me/net.py", "line": 30, "name": "forward"},
        {"filename": "/home/me/train.py", "line": 8, "name": "main"},
    ]
    found = MemoryStatement.from_segments([segment(0, (512, 500, LIVE), (512, 100, LIVE), frames=frames)])
    assert found.largest == (("net.py:30 in forward", 2, 600),)
    later = MemoryStatement.from_segments(
        [segment(0, (512, 500, LIVE), frames=frames), segment(2**30, (2**20, 2**20, LIVE))]
    )
    assert later.largest[0] == ("1.05 MB each, by no line of Python", 1, 2**20)  # the backward pass runs none


def test_a_request_that_fits_by_what_is_allocated_fails_for_fragmentation() -> None:
    found = statement()
    assert found.fragmented is True
    assert found.why().startswith(
        "Fragmentation: by what was allocated the request fitted, with 104.9 MB to spare."
    )
    assert "526.4 MB was reserved but not allocated, in 3 pieces, the largest of 419.4 MB" in found.why()
    assert "could not give them back" in found.why()


def test_a_request_that_does_not_fit_at_all_says_by_how_much_and_that_fragmentation_is_not_why() -> None:
    found = statement(asked_bytes=900 * MIB)
    assert found.fragmented is False
    assert "It does not fit, however the memory lies" in found.why()
    assert f"{(100 * MIB + 512) / 1e6:.1f} MB more than is allowed" in found.why()


def test_without_a_cap_the_limit_is_what_the_driver_had_left() -> None:
    found = statement(allowed_bytes=None, free_bytes=50 * MIB)
    assert found.limit_bytes == 1752 * MIB
    assert found.fragmented is False
    assert "more than is left on the device" in found.why()
    assert "no cap" in str(found)


def test_what_is_not_known_is_no_verdict() -> None:
    found = statement(asked_bytes=None, allowed_bytes=None, free_bytes=None)
    assert found.fragmented is None
    assert found.why().startswith("526.4 MB was reserved but not allocated")
    assert "unavailable" in str(found)


def test_a_statement_reads_back_as_it_was() -> None:
    found = statement(owners={0: "parameters"})
    assert MemoryStatement.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    data = found.as_dict()
    with pytest.raises(ValueError, match=r"lines.parameters is -1"):
        MemoryStatement.from_dict(data | {"lines": {"parameters": -1}})
    del data["pieces"]
    with pytest.raises(ValueError, match="the statement has no 'pieces'"):
        MemoryStatement.from_dict(data)


def test_both_forms_have_every_figure() -> None:
    found = statement(owners={0: "parameters"}, total_bytes=140 * GIB)
    for text in (str(found), found._repr_html_()):
        for figure in (
            "734.0 MB",
            "2.10 GB",
            "1.26 GB",
            "1.78 GB",
            "526.4 MB",
            "live: parameters",
            "Fragmentation",
        ):
            assert figure in text
    assert "taken at the instant of the failure" in str(found)


def test_the_largest_groups_are_few() -> None:
    many = [segment(2**30 * k, (512 * (k + 1), 512 * (k + 1), LIVE)) for k in range(40)]
    assert len(MemoryStatement.from_segments(many).largest) == memory_statement.SHOWN


def test_an_address_that_is_two_things_is_the_one_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    found = [
        (kind, storage.device.type)
        for kind, held in memory_statement._owned(model, optimizer, [model.weight])
        for tensor in held
        for storage in [tensor.untyped_storage()]
    ]
    assert {kind for kind, _ in found} == {"inputs", "optimizer", "gradients", "parameters"}
    assert found[-1][0] == "parameters"  # the last one named is the one that holds


# ----------------------------------------------------------------------------------------------- a step that fails


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let attempts run without a device; give what was called."""
    state: dict[str, Any] = {"emptied": 0, "cleared": 0, "history": [], "on": False}
    monkeypatch.setattr(memory_statement, "require_cuda", lambda _what: None)
    replaced = {
        "memory_allocated": lambda: 0,
        "synchronize": lambda: None,
        "empty_cache": lambda: state.update(emptied=state["emptied"] + 1),
    }
    for name, what in replaced.items():
        monkeypatch.setattr(torch.cuda, name, what)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda *args, **_: state["history"].append(args[0])
    )
    monkeypatch.setattr(
        torch._C,
        "_cuda_clearCublasWorkspaces",
        lambda: state.update(cleared=state["cleared"] + 1),
        raising=False,
    )
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: state["on"], raising=False)
    return state


class Big:
    """Stands for a tensor: it can be watched, and a frame holds it."""


def test_a_call_that_fits_gives_its_value(no_card: dict[str, Any]) -> None:
    done = attempt(lambda: 42)
    assert (done.value, done.fits, done.statement) == (42, True, None)
    assert no_card["emptied"] == 0
    assert no_card["history"] == ["state", None]


def test_after_a_failure_the_frames_hold_nothing_any_more(no_card: dict[str, Any]) -> None:
    watched: list[weakref.ref[Big]] = []

    def inner() -> None:
        big = Big()
        watched.append(weakref.ref(big))
        raise torch.OutOfMemoryError(MESSAGE)

    def outer() -> None:
        other = Big()
        watched.append(weakref.ref(other))
        try:
            inner()
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(MESSAGE) from error

    done = attempt(outer)
    assert not done.fits
    assert [ref() for ref in watched] == [None, None]
    assert (no_card["emptied"], no_card["cleared"]) == (1, 1)
    assert no_card["history"] == ["state", None]


def test_an_error_that_is_caught_as_usual_does_hold_its_frames() -> None:
    watched: list[weakref.ref[Big]] = []

    def failing() -> None:
        big = Big()
        watched.append(weakref.ref(big))
        raise torch.OutOfMemoryError(MESSAGE)

    try:
        failing()
    except torch.OutOfMemoryError as error:
        gc.collect()
        assert watched[0]() is not None
        memory_statement._let_go(error)
        assert watched[0]() is None


def test_other_errors_go_through_and_the_history_is_put_back(no_card: dict[str, Any]) -> None:
    def failing() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        attempt(failing)
    assert no_card["history"] == ["state", None]
    assert memory_statement._Watch.open == []


def test_a_history_that_is_being_recorded_is_left_alone(no_card: dict[str, Any]) -> None:
    no_card["on"] = True
    attempt(lambda: None)
    no_card["on"] = False
    attempt(lambda: None, code=False)
    assert no_card["history"] == []


def test_gradients_that_the_failed_pass_began_are_dropped_and_older_ones_are_kept(
    no_card: dict[str, Any],
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    old = torch.ones(2, 2)
    model[0].weight.grad = old

    def failing() -> None:
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        raise torch.OutOfMemoryError(MESSAGE)

    done = attempt(failing, model=model)
    assert done.gradients_dropped
    assert model[0].weight.grad is old
    assert model[0].bias.grad is None
    assert model[1].weight.grad is None


def test_the_allocators_own_call_at_the_failure_gives_the_exact_figures(
    no_card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (0, 140 * GIB))
    monkeypatch.setattr(
        torch.cuda.memory, "_snapshot", lambda: {"segments": [*SEGMENTS, {"device": 1}], "device_traces": []}
    )

    def failing() -> None:
        memory_statement._Watch.failed(
            0, 700 * MIB, 2000 * MIB, 100 * GIB
        )  # as torch calls it before it raises
        raise torch.OutOfMemoryError(MESSAGE)

    done = attempt(failing)
    assert done.statement == statement(total_bytes=140 * GIB)
    assert done.statement is not None
    assert done.statement.exact
    memory_statement._Watch.failed(0, 1, 2, 3)  # between attempts it does nothing


def test_a_look_that_fails_hides_nothing(no_card: dict[str, Any]) -> None:
    def failing() -> None:
        memory_statement._Watch.failed(0, 700 * MIB, 2000 * MIB, 100 * GIB)  # there is no device to look at
        raise torch.OutOfMemoryError(MESSAGE)

    done = attempt(failing)
    assert done.statement is not None
    assert not done.statement.exact
    assert done.statement.asked_bytes == round(6.14 * GIB)


def test_an_attempt_without_a_statement_fits() -> None:
    assert Attempt(value=1).fits


@pytest.mark.skipif(cuda_available(), reason="has a GPU")
def test_without_a_gpu_an_attempt_says_so() -> None:
    with pytest.raises(NoGPUError, match="attempt needs a CUDA device"):
        attempt(lambda: None)
