"""Tests of gpucourse.arguments: which tensors a call is given, and their values back."""

from __future__ import annotations

import functools

import pytest
import torch

from gpucourse.arguments import Kept, describe, refuse_deferred, tensors_of
from gpucourse.cuda_events import time_cuda
from gpucourse.launch_count import count_launches

ROOM = 1e9


def test_tensors_are_found_wherever_a_call_is_given_them():
    a, b, c, d, e = (torch.full((n,), float(n)) for n in range(1, 6))
    fn = functools.partial(functools.partial(len, a), key=b)
    found = tensors_of(fn, ([c, {"deep": (d, 3)}], "text", None, c))
    assert {id(t) for t in found} == {id(t) for t in (a, b, c, d)}
    assert [id(t) for t in tensors_of(e.add_, (1,))] == [id(e)], "a tensor's own method writes that tensor"
    assert describe([c]) == ({"shape": [3], "dtype": "float32"},)


def test_values_come_back_without_a_new_version():
    x = torch.arange(5.0)
    kept = Kept([x], ROOM)
    assert not kept.changed()
    x.mul_(3)
    version = x._version
    assert kept.changed()
    assert kept.restore()
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert x._version == version


def test_a_write_that_torch_does_not_count_shows_in_the_bytes():
    x = torch.zeros(4)
    kept = Kept([x], ROOM)
    x.numpy()[2] = 7.0
    assert x._version == 0
    assert kept.changed()
    assert kept.restore()
    assert x.tolist() == [0, 0, 0, 0]


def test_not_a_number_equals_itself():
    assert not Kept([torch.tensor([float("nan"), 1.0])], ROOM).changed()


def test_views_of_one_memory_are_kept_once_and_restored_whole():
    x = torch.arange(12.0).view(3, 4)
    kept = Kept([x, x.t(), x[1:]], ROOM)
    assert len(kept._storages) == 1
    x[2].zero_()
    assert kept.restore()
    assert x.flatten().tolist() == list(range(12))


@pytest.mark.parametrize("had", [False, True])
def test_gradients_come_back(had):
    x = torch.ones(3, requires_grad=True)
    if had:
        x.grad = torch.full((3,), 2.0)
    kept = Kept([x], ROOM)
    (x * 5).sum().backward()
    assert kept.changed()
    assert kept.restore()
    assert x.grad is None if not had else x.grad.tolist() == [2, 2, 2]


def test_without_room_for_copies_a_write_is_noticed_and_cannot_be_undone():
    x = torch.zeros(1000)
    kept = Kept([x], room_bytes=3999)
    assert not kept.copied
    assert not kept.changed()
    x.add_(1)
    assert kept.changed()
    assert not kept.restore()
    assert Kept([x], room_bytes=4000).copied


def test_out_of_memory_while_copying_leaves_no_copies(monkeypatch):
    def full(_storage):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.UntypedStorage, "clone", full)
    kept = Kept([torch.zeros(3)], ROOM)
    assert not kept.copied
    assert not kept.changed()


def test_a_resized_argument_cannot_be_restored():
    x = torch.zeros(4)
    kept = Kept([x], ROOM)
    x.resize_(100_000)
    assert kept.changed()
    assert not kept.restore()


def test_empty_and_inference_and_sparse_tensors_are_arguments_too():
    with torch.inference_mode():
        inference = torch.zeros(3)
    sparse = torch.eye(3).to_sparse()
    kept = Kept([torch.zeros(0, 3), inference, sparse], ROOM)
    assert not kept.changed()
    with torch.inference_mode():
        inference.add_(1)
    assert kept.changed()
    assert kept.restore()
    assert inference.tolist() == [0, 0, 0]


def test_a_fake_tensor_has_no_memory_to_keep_and_is_not_asked_for_it():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.ones(8)
    kept = Kept([x], 1e9)  # a warning would be an error here
    assert not kept.changed()
    assert kept.restore()


@pytest.mark.parametrize("how", ["set_", "data", "transposed in place"])
def test_an_argument_that_was_given_other_memory_stands_for_its_own_again(how):
    x = torch.arange(6.0).reshape(2, 3)
    address = x.data_ptr()
    kept = Kept([x], ROOM)
    assert not kept.changed()
    if how == "set_":
        x.set_(torch.zeros(5))
    elif how == "data":
        x.data = torch.zeros(5)
    else:
        x.t_()
    assert kept.changed()
    assert kept.restore()
    assert x.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert x.data_ptr() == address


def test_a_parameter_whose_data_were_exchanged_and_written_gets_both_back():
    weight = torch.nn.Parameter(torch.ones(3))
    kept = Kept([weight], ROOM)
    with torch.no_grad():
        weight.mul_(2)
    weight.data = torch.zeros(3, dtype=torch.float64)
    assert kept.changed()
    assert kept.restore()
    assert weight.tolist() == [1.0, 1.0, 1.0]
    assert weight.dtype == torch.float32
    assert weight.requires_grad


def test_what_has_no_one_memory_is_not_followed():
    sparse = torch.eye(3).to_sparse()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    kept = Kept([sparse, nested, torch.ones(3, device="meta")], ROOM)
    assert not kept.changed()
    assert kept.restore()


def test_an_argument_that_holds_itself_is_refused():
    endless: list[object] = [torch.ones(2)]
    endless.append(endless)
    with pytest.raises(ValueError, match="an argument holds itself"):
        tensors_of(len, (endless,))


def test_a_function_whose_call_runs_nothing_is_refused():
    def steps(n):
        yield n

    async def fetched(n):
        return n

    async def streamed(n):
        yield n

    for fn, kind in ((steps, "generator"), (fetched, "coroutine"), (streamed, "generator")):
        for given in (fn, functools.partial(fn, 1)):
            with pytest.raises(
                TypeError, match=f"time_cuda calls a function, and calling .* only makes a {kind}"
            ):
                refuse_deferred(given, "time_cuda")
            with pytest.raises(TypeError, match=f"count_launches .* only makes a {kind}"):
                count_launches(given, 1)
            with pytest.raises(TypeError, match=f"time_cuda .* only makes a {kind}"):
                time_cuda(given, 1, device="cpu")
    for plain in (len, torch.add, torch.nn.Linear(2, 2), functools.partial(max, 1), lambda: 1):
        refuse_deferred(plain, "time_cuda")


def test_the_most_seconds_are_a_number_that_a_clock_can_hold():
    for seconds in (10**400, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="max_seconds"):
            time_cuda(len, "", device="cpu", max_seconds=seconds)
