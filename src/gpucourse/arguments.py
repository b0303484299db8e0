"""The tensors that a timed call is given: which they are, whether it wrote into them, and their values back.

A call that is timed runs many times. If it writes into its arguments, each run meets what the run before left,
and the caller would get their tensors back after hundreds of updates. So their bytes are copied first, compared
after the first calls, and put back at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Kept", "describe", "refuse_deferred", "tensors_of"]

CHUNK_BYTES = 2**28  # compared at a time: a comparison writes a temporary as large


def refuse_deferred(fn: Callable[..., Any], who: str) -> None:
    """Raise TypeError where calling `fn` only makes a generator or a coroutine, and runs nothing of what it says."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    kinds = {
        "a generator": inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn),
        "a coroutine": inspect.iscoroutinefunction(fn),
    }
    for kind, found in kinds.items():
        if found:
            name = getattr(fn, "__name__", "the function")
            raise TypeError(
                f"{who} calls a function, and calling {name} only makes {kind}: nothing of it would run. Pass a plain "
                "function that runs it to its end"
            )


def tensors_of(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """List the tensors that a call is given, each once.

    Parameters
    ----------
    fn
        Where it is a `functools.partial`, what it holds counts; where it is a tensor's own method, the tensor.
    args
        Its arguments; tensors in lists, tuples and dicts are found.

    Returns
    -------
    list of torch.Tensor
        Empty where torch has not been imported, since nothing can be a tensor then. What `fn` closes over, or a
        module's parameters, cannot be known from outside.

    Raises
    ------
    ValueError
        An argument holds itself.
    """
    if "torch" not in sys.modules:
        return []
    import torch
    from torch.utils._pytree import tree_leaves

    given: list[Any] = []
    while isinstance(fn, functools.partial):
        given += [fn.args, fn.keywords]
        fn = fn.func
    given.append(getattr(fn, "__self__", None))
    found: dict[int, Any] = {}
    try:
        leaves = tree_leaves((args, *given))
    except RecursionError:
        raise ValueError("an argument holds itself, so its tensors have no end: pass what does not") from None
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.setdefault(id(leaf), leaf)
    return list(found.values())


def describe(tensors: Iterable[Any]) -> tuple[dict[str, Any], ...]:
    """Give shape and dtype of each tensor as plain data."""
    return tuple(
        {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")} for tensor in tensors
    )


def _version(tensor: Any) -> int | None:
    """Count the in-place writes that autograd has seen; None where it does not count (inference tensors)."""
    try:
        return int(tensor._version)
    except RuntimeError:
        return None


def _bytes(storage: Any) -> Any:
    """See a storage as a flat tensor of bytes."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclasses.dataclass(slots=True)
class _Storage:
    """The memory behind one or several arguments, where it lay, and a copy of it (None where there is none)."""

    memory: Any
    address: int
    copy: Any

    def same(self) -> bool:
        if self.memory.data_ptr() != self.address or self.memory.nbytes() != self.copy.nbytes():
            return False
        now, before = _bytes(self.memory), _bytes(self.copy)
        return all(
            bool((now[begin : begin + CHUNK_BYTES] == before[begin : begin + CHUNK_BYTES]).all())
            for begin in range(0, before.numel(), CHUNK_BYTES)
        )

    def restore(self) -> bool:
        """Put the bytes back without a new version of the tensor; whether that was possible."""
        if self.copy is None or self.memory.data_ptr() != self.address:
            return False
        if self.memory.nbytes() != self.copy.nbytes():
            return False
        self.memory.copy_(self.copy, non_blocking=False)
        return True


@dataclasses.dataclass(slots=True)
class _Place:
    """Which part of which memory a tensor stood for, and another tensor that still does (None where there is none)."""

    tensor: Any
    facts: tuple[Any, ...] | None
    twin: Any

    @classmethod
    def of(cls, tensor: Any) -> _Place:
        facts = _place(tensor)
        return cls(tensor, facts, None if facts is None else tensor.detach())

    def same(self) -> bool:
        return self.facts is None or _place(self.tensor) == self.facts

    def restore(self) -> bool:
        """Let the tensor stand for it again, where ``set_`` or ``.data =`` gave it something else."""
        if self.same():
            return True
        try:
            self.tensor.data = self.twin
        except (RuntimeError, TypeError):
            return False
        return self.same()


def _place(tensor: Any) -> tuple[Any, ...] | None:
    """Give address, offset, shape, strides and type; None where a tensor has no one memory."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(tensor, FakeTensor):
        return None
    try:
        address = tensor.untyped_storage().data_ptr()
        return address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    except (NotImplementedError, RuntimeError):  # sparse or nested
        return None


class Kept:
    """The arguments as they were before the first call.

    Parameters
    ----------
    tensors
        The arguments, as `tensors_of` lists them.
    room_bytes
        Copies are made where all of them fit into so many bytes; without copies, writes are still noticed where
        torch counts them, but cannot be undone.
    """

    def __init__(self, tensors: list[Any], room_bytes: float) -> None:
        import torch
        from torch._subclasses.fake_tensor import FakeTensor

        self._places = [_Place.of(tensor) for tensor in tensors]
        self._versions = [(tensor, _version(tensor)) for tensor in tensors]
        self._grads = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
        memories: dict[tuple[str, int], Any] = {}
        for tensor in [*tensors, *(grad for _, grad in self._grads if grad is not None)]:
            if isinstance(tensor, FakeTensor):  # it has no memory, and only warns when it is asked where
                continue
            try:
                storage = tensor.untyped_storage()
                key = (str(storage.device), storage.data_ptr())
            except (NotImplementedError, RuntimeError):  # sparse or nested: no one memory
                continue
            if storage.nbytes() and key[1]:
                memories.setdefault(key, storage)
        self._storages = [_Storage(memory, key[1], None) for key, memory in memories.items()]
        self.copied = sum(memory.nbytes() for memory in memories.values()) <= room_bytes
        if self.copied:
            try:
                for storage in self._storages:
                    storage.copy = storage.memory.clone()
            except torch.OutOfMemoryError:
                self.drop()

    def drop(self) -> None:
        """Let go of the copies."""
        self.copied = False
        for storage in self._storages:
            storage.copy = None

    def changed(self) -> bool:
        """Whether an argument or its gradient is not what it was: by torch's count of writes, or by place and bytes."""
        if not all(place.same() for place in self._places):
            return True
        counted = any(_version(tensor) != before for tensor, before in self._versions)
        replaced = any(tensor.grad is not before for tensor, before in self._grads)
        return counted or replaced or (self.copied and not all(storage.same() for storage in self._storages))

    def restore(self) -> bool:
        """Put values and gradients back; whether all of it was possible."""
        for tensor, before in self._grads:
            tensor.grad = before
        # Each is tried, also after one that failed.
        done = [place.restore() for place in self._places]
        done += [storage.restore() for storage in self._storages]
        return all(done)
