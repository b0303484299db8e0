"""A caching allocator without a GPU: CPU tensors pass for the device's, and their lives are its history."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpucourse import measured_run, memory_measurement, recorded_steps
from gpucourse.allocator import CachingAllocator
from gpucourse.live_memory import storages_of
from gpucourse.storage_trace import Role


class FakeDevice(TorchDispatchMode):
    """Follows the storages that operators make, and serves each from a simulated allocator.

    Its events have the form of a snapshot's ``device_traces``, with the addresses that the simulation gave.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocator = CachingAllocator()
        self.trace: list[dict[str, Any]] = []
        self.allocated = self.freed = 0
        self.live: dict[int, tuple[int, Any]] = {}
        self.workspace: tuple[str, int] | None = None
        self.frames: tuple[dict[str, Any], ...] = ()
        self.on = False
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func) and self.workspace is None:
            self.workspace = ("workspace", self.allocate(8 * 2**20))
        made = func(*args, **(kwargs or {}))
        for value in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(value, torch.Tensor):
                self.follow(value)
        return made

    def follow(self, tensor: Any) -> None:
        for storage in storages_of(tensor):
            key = storage._cdata
            if key not in self.live and storage.nbytes():
                number = self.allocate(storage.nbytes())
                self.live[key] = (number, weakref.ref(storage, functools.partial(self.gone, key)))

    def address(self, number: int) -> int:
        block = self.allocator._held[number]
        assert block is not None
        return block.address

    def allocate(self, nbytes: int) -> int:
        number, before = self.numbers, self.allocator._next_address
        self.numbers += 1
        self.allocator.allocate(number, nbytes)
        if self.allocator._next_address != before:
            self.trace.append(
                {
                    "action": "segment_alloc",
                    "addr": self.address(number),
                    "size": self.allocator._next_address - before,
                    "frames": [],
                }
            )
        self.trace.append(
            {"action": "alloc", "addr": self.address(number), "size": nbytes, "frames": list(self.frames)}
        )
        self.allocated += 1
        return number

    def free(self, number: int) -> None:
        at = self.address(number)
        for action in ("free_requested", "free_completed"):
            self.trace.append({"action": action, "addr": at, "size": 0, "frames": []})
        self.allocator.free(number)
        self.freed += 1

    def gone(self, key: int, _: Any) -> None:
        if key in self.live:
            self.free(self.live.pop(key)[0])

    def clear_workspaces(self) -> None:
        if self.workspace is not None:
            self.free(self.workspace[1])
            self.workspace = None


class FakeRecorder:
    """What `memory_measurement._Recorder` does, on a fake device."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.seen = recorded_steps.Seen(segments=[], base=(device.allocated, device.freed))

    def mark(self, name: str) -> None:
        self.seen.marks.append((name, self.device.allocated, self.device.freed))

    def see(self, tensors: Iterable[Any], role: Role) -> None:
        for tensor in tensors:
            self.device.follow(tensor)
            for storage in storages_of(tensor):
                if storage._cdata in self.device.live:
                    address = self.device.address(self.device.live[storage._cdata][0])
                    self.seen.addresses.append((self.device.allocated, self.device.freed, address, role))

    def events(self) -> list[dict[str, Any]]:
        return list(self.device.trace)


def fake_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Let `measure_step_memory` run on CPU tensors."""
    device = FakeDevice()
    allocator = device.allocator

    @contextlib.contextmanager
    def history(_torch: Any) -> Iterator[FakeRecorder]:
        device.on = True
        try:
            with device:
                yield FakeRecorder(device)
        finally:
            device.on = False

    def reset() -> None:
        allocator.peak_allocated_bytes = allocator.allocated_bytes
        allocator.peak_reserved_bytes = allocator.reserved_bytes

    monkeypatch.setattr(measured_run, "DEVICE", "cpu")
    monkeypatch.setattr(memory_measurement, "require_cuda", lambda _what: None)
    monkeypatch.setattr(memory_measurement, "_history", history)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", device.clear_workspaces, raising=False)
    replaced = {
        "init": lambda: None,
        "synchronize": lambda: None,
        "empty_cache": allocator.empty_cache,
        "memory_allocated": lambda: allocator.allocated_bytes,
        "memory_reserved": lambda: allocator.reserved_bytes,
        "reset_peak_memory_stats": reset,
        "max_memory_allocated": lambda: allocator.peak_allocated_bytes,
        "max_memory_reserved": lambda: allocator.peak_reserved_bytes,
    }
    for name, what in replaced.items():
        monkeypatch.setattr(torch.cuda, name, what)
    return device
