"""Tests of gpucourse.arguments: which tensors a call is given, and their values back."""

from __future__ import annotations

import functools

import pytest
import torch

from gpucourse.arguments import Kept, describe, tensors_of

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
