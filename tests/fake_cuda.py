"""A `torch.cuda` without a GPU: a simulated device with CUDA's rules for streams, events and captures."""

from __future__ import annotations

import contextlib
import types
import warnings
from collections import deque
from typing import Any

import pytest
import torch

from gpucourse import cuda_events, streams
from gpucourse.environment import Environment
from gpucourse.simulator import Kernel, SimulatedDevice


class Stream:
    """A simulated stream with the names that torch's has."""

    def __init__(self, fake: FakeCuda) -> None:
        self.fake = fake
        self.queue = fake.sim.new_stream()
        self.cuda_stream = id(self)
        self.device = torch.device("cuda", 0)
        self.capturing = False
        self.loose = False  # holds captured work that nothing waits for yet

    def wait_stream(self, other: Stream) -> None:
        if other.capturing:
            self.capturing, other.loose = True, False
            self.loose = self is not self.fake.capture_stream
        elif self.capturing:
            raise RuntimeError("dependency created on uncaptured work in another stream")
        else:
            mark = self.fake.sim.Event()
            mark.record(other.queue)
            self.queue.wait_event(mark)


class Event:
    """A simulated event that records on fake streams."""

    def __init__(self, fake: FakeCuda) -> None:
        self.fake, self.mark = fake, fake.sim.Event(enable_timing=True)

    def record(self, stream: Stream | None = None) -> None:
        self.mark.record((stream or self.fake.current).queue)

    def query(self) -> bool:
        return self.mark.query()

    def synchronize(self) -> None:
        self.mark.synchronize()

    def elapsed_time(self, end: Event) -> float:
        return self.mark.elapsed_time(end.mark)


class FakeCuda:
    """What the tests turn: the device, its memory, and how a call's work is put on it.

    Work is `work(us)`: a kernel on the current stream, and one real operation of torch's, so that a dispatch mode
    sees it. Every CPU tensor passes for one on the device.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **times: float) -> None:
        self.sim = SimulatedDevice(keep_history=False, **({"launch_us": 4.0, "record_us": 1.0} | times))
        self.one = torch.ones(1)
        self.default = self.current = Stream(self)
        self.capture_stream: Stream | None = None
        self.graph_stream = Stream(self)  # what captures run on unless they are given another
        self.recorded: list[float] = []
        self.repaired = 0
        self.allocated, self.free = 0, 10**9
        self.depth: int | None = None  # how many launches the queue holds; None: any number
        self.pending: deque[Any] = deque()
        monkeypatch.setattr(cuda_events, "require_cuda", lambda _what: None)
        monkeypatch.setattr(cuda_events, "time", types.SimpleNamespace(perf_counter=self.sim.perf_counter))
        monkeypatch.setattr(cuda_events, "_flush_of_l2", lambda: lambda: self.work(30.0))
        monkeypatch.setattr(cuda_events.Environment, "capture", classmethod(lambda cls: Environment()))
        for module in (cuda_events, streams):
            monkeypatch.setattr(module, "end_failed_capture", self.repair)
        monkeypatch.setattr(streams, "_cuda_device", lambda *_trees: self.default.device)
        replaced = {
            "synchronize": self.synchronize,
            "Event": lambda enable_timing=False: Event(self),
            "_sleep": lambda cycles: self.sim.spin(cycles / 2000, self.current.queue),
            "current_stream": lambda _device=None: self.current,
            "set_stream": self.set_stream,
            "stream": self.entered,
            "Stream": lambda: Stream(self),
            "CUDAGraph": lambda: types.SimpleNamespace(us=0.0, replay=None, pool=object),
            "graph": self.captured,
            "is_current_stream_capturing": lambda: self.current.capturing,
            "current_device": lambda: 0,
            "device": lambda _index: contextlib.nullcontext(),
            "mem_get_info": lambda: (self.free - self.allocated, 2 * 10**9),
            "memory_reserved": lambda: self.allocated,
            "memory_allocated": lambda: self.allocated,
            "get_per_process_memory_fraction": lambda: 1.0,
        }
        for name, what in replaced.items():
            monkeypatch.setattr(torch.cuda, name, what, raising=False)

    def work(self, us: float) -> None:
        """Put a kernel on the current stream; in a capture, into the graph."""
        torch.add(self.one, 1)
        self.raw(us)

    def raw(self, us: float) -> None:
        """Put a kernel there that torch's dispatcher never hears of."""
        if self.current.capturing:
            self.recorded.append(us)
            self.current.loose = self.current is not self.capture_stream
        else:
            self.make_room()
            self.sim.launch(Kernel(duration_us=us), self.current.queue)

    def make_room(self) -> None:
        """Hold the host while the queue is full, as the driver does."""
        if self.depth is None:
            return
        while self.pending and self.pending[0].query():
            self.pending.popleft()
        if len(self.pending) >= self.depth:
            self.pending.popleft().synchronize()
        self.pending.append(self.sim.Event())
        self.pending[-1].record(self.current.queue)

    def synchronize(self) -> None:
        if self.capture_stream is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.sim.synchronize()

    def repair(self) -> None:
        self.repaired += 1

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextlib.contextmanager
    def entered(self, stream: Stream):
        before = self.current
        torch.cuda.set_stream(stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(before)

    @contextlib.contextmanager
    def captured(self, graph, pool=None, stream=None):
        """Capture as torch does: where it fails at its end, the capture's stream stays the current one."""
        before = self.current
        here = stream or self.graph_stream
        self.capture_stream, self.recorded, self.current, here.capturing = here, [], here, True
        broken = False
        try:
            yield
        except RuntimeError:
            broken = True  # a call that is not permitted in a capture ends it
            raise
        finally:
            self.capture_stream = None
            loose = [side for side in self.sides if side.loose]
            for side in [*self.sides, here]:
                side.capturing = side.loose = False
            if loose or broken:
                raise RuntimeError(
                    f"CUDA error: capturing stream has {'unjoined work' if loose else 'failed'}"
                )
            self.current = before
        if not self.recorded:
            warnings.warn("The CUDA Graph is empty", stacklevel=2)
        graph.us = sum(self.recorded)
        graph.replay = lambda: self.sim.launch(Kernel(duration_us=graph.us), self.current.queue)

    sides: tuple[Stream, ...] = ()

    def side(self, stream: Stream | None = None) -> Stream:
        """Make a stream beside the current one, or let it be that one."""
        self.sides = (*self.sides, stream or Stream(self))
        return self.sides[-1]
