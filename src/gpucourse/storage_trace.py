"""When each storage on the device came to be and when it went, and what it was for.

A `StorageTrace` is a list of events, allocations and frees, in the order in which a step made them, so that an
allocator can be run over it. What a storage was for is a fact about its whole life: the buffer that becomes a
parameter's gradient is a gradient from its first byte.

Why not `torch.distributed._tools.mem_tracker.MemTracker`: it follows storages in the same way, but its
categories are those of the code that was running (all that a forward pass makes is "activation"), it keeps no
order of events, copies its counts at every module, and refuses a module's second forward pass, so that
accumulation has to reset it each time.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Sequence
from typing import Any, Literal, get_args

from gpucourse.allocator import CachingAllocator, SimulatedOutOfMemoryError
from gpucourse.scratch import Card, scratch_bytes

__all__ = ["Moment", "Role", "StorageTrace", "Tracer", "is_dense"]

Role = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "recomputed",
    "casts",
    "temporaries",
    "buffers",
    "inputs",
    "workspaces",
]
"""What a storage is for. "recomputed" is what a checkpoint's second forward pass makes while the backward runs."""

# Where a storage is two things, the lower rank names it: a weight that the graph saves is still a parameter.
_RANK = {
    role: rank
    for rank, role in enumerate(
        (
            "parameters",
            "buffers",
            "inputs",
            "optimizer",
            "gradients",
            "workspaces",
            "casts",
            "activations",
            "recomputed",
        )
    )
} | {"temporaries": 99}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An instant of the trace.

    Attributes
    ----------
    event
        Its place in the trace.
    step
        Which step, from 1; 0 before the first.
    phase
        "setup", "forward", "backward" or "optimizer".
    operator
        What was running, in torch's name for it.
    allocated_bytes
        What the allocator had handed out, with its rounding.
    requested_bytes
        The same as asked for.
    """

    event: int
    step: int
    phase: str
    operator: str
    allocated_bytes: int
    requested_bytes: int


@dataclasses.dataclass(slots=True, kw_only=True)
class StorageTrace:
    """Allocations and frees in their order.

    Attributes
    ----------
    sizes
        Bytes of each storage as asked for; a storage's number is its index.
    roles
        What each was for.
    events
        The number of a storage that comes, or −1 − its number where it goes.
    marks
        (first event, step, phase, operator): what was running from that event on.
    optional
        Numbers of storages without which the step goes on: where cuDNN's workspace for a convolution cannot be had,
        the next algorithm is tried, and some need none (`try_configs` in ``ATen/native/cudnn/Conv_v8.cpp``).
    """

    sizes: list[int] = dataclasses.field(default_factory=list)
    roles: list[Role] = dataclasses.field(default_factory=list)
    events: list[int] = dataclasses.field(default_factory=list)
    marks: list[tuple[int, int, str, str]] = dataclasses.field(default_factory=list)
    optional: set[int] = dataclasses.field(default_factory=set)

    def replay(self, allocator: CachingAllocator) -> list[Moment]:
        """Run an allocator over the trace.

        Parameters
        ----------
        allocator
            A fresh one.

        Returns
        -------
        list of Moment
            For each step, from 0, the instant of its allocated peak: the first one, where there are several.

        Raises
        ------
        SimulatedOutOfMemoryError
            The allocator has a limit and cannot serve the trace within it.
        """
        peaks: dict[int, tuple[int, int, int]] = {}  # step: allocated, event, requested
        requested, mark, step = 0, 0, 0
        refused: set[int] = set()
        for at, event in enumerate(self.events):
            while mark < len(self.marks) and self.marks[mark][0] <= at:
                step = self.marks[mark][1]
                mark += 1
            if event < 0:
                number = -1 - event
                if number in refused:
                    continue
                allocator.free(number)
                requested -= self.sizes[number]
            else:
                try:
                    allocator.allocate(event, self.sizes[event])
                except SimulatedOutOfMemoryError:
                    if event not in self.optional:
                        raise
                    refused.add(event)
                    continue
                requested += self.sizes[event]
            # A step's peak may be what it found: a step that only frees has one, too.
            if step not in peaks or allocator.allocated_bytes > peaks[step][0]:
                peaks[step] = (allocator.allocated_bytes, at, requested)
        return [
            Moment(event=at, allocated_bytes=most, requested_bytes=asked, **self._running(at))
            for _, (most, at, asked) in sorted(peaks.items())
        ]

    def timeline(self, points: int = 400) -> list[tuple[int, str, dict[Role, int]]]:
        """Give what is live over the steps, at about so many instants: of each stretch its highest.

        Parameters
        ----------
        points
            How many at most.

        Returns
        -------
        list
            (step, phase, bytes by role as asked for) in order of time.

        Raises
        ------
        ValueError
            `points` is below 1.
        """
        if points < 1:
            raise ValueError(f"points is {points}; wanted 1 or more")
        stretch = -(-len(self.events) // points) or 1
        live: dict[Role, int] = dict.fromkeys(get_args(Role), 0)
        total = highest = mark = step = 0
        phase = "setup"
        found: list[tuple[int, str, dict[Role, int]]] = []
        for at, event in enumerate(self.events):
            while mark < len(self.marks) and self.marks[mark][0] <= at:
                _, step, phase, _ = self.marks[mark]
                mark += 1
            number, sign = (event, 1) if event >= 0 else (-1 - event, -1)
            live[self.roles[number]] += sign * self.sizes[number]
            total += sign * self.sizes[number]
            if at % stretch == 0:
                found.append((step, phase, dict(live)))
                highest = total
            elif total > highest:
                found[-1] = (step, phase, dict(live))
                highest = total
        return found

    def live(self, moment: Moment) -> dict[Role, int]:
        """Sum what is live right after an instant, as asked for.

        Parameters
        ----------
        moment
            One of `replay`'s.

        Returns
        -------
        dict
            Bytes by role; the sum is the moment's ``requested_bytes``.
        """
        found: dict[Role, int] = dict.fromkeys(get_args(Role), 0)
        for event in self.events[: moment.event + 1]:
            number, sign = (event, 1) if event >= 0 else (-1 - event, -1)
            found[self.roles[number]] += sign * self.sizes[number]
        return found

    def _running(self, at: int) -> dict[str, Any]:
        step, phase, operator = 0, "setup", ""
        for first, *what in self.marks:
            if first > at:
                break
            step, phase, operator = what  # type: ignore[assignment]  # as `marks` says
        return {"step": step, "phase": phase, "operator": operator}


class Tracer:
    """Follows the storages of a device while its ``mode`` is entered.

    Parameters
    ----------
    device
        Whose storages count.
    workspace_bytes
        What the first matrix product of each of the two host threads, the program's and the backward pass's,
        makes the library allocate for good.
    card
        What of the GPU decides how much scratch memory its kernels take; an H200 by default.

    Attributes
    ----------
    trace
        What was seen so far.
    card
        As given.
    mode
        The dispatch mode to enter.
    in_linear
        Whether `torch.nn.functional.linear` runs, which adds its bias in place where it is no part of the product.
    """

    def __init__(self, device: Any, *, workspace_bytes: int, card: Card | None = None) -> None:
        self.trace = StorageTrace()
        self.step, self.phase = 0, "setup"
        self.in_linear = False
        self.card = Card() if card is None else card
        self._device = device
        self._workspace_bytes = workspace_bytes
        self._threads: set[bool] = set()
        self._bias_threads: set[bool] = set()
        self._live: dict[int, tuple[int, Any]] = {}  # by address: number, weak reference
        self._marked: tuple[int, str, str] = (-1, "", "")
        self.mode = _mode_class()(self)

    def enter(self, step: int, phase: str) -> None:
        """Say what the program begins.

        Parameters
        ----------
        step
            From 1.
        phase
            "forward", "backward" or "optimizer".
        """
        self.step, self.phase = step, phase

    def see(self, tensor: Any, role: Role = "temporaries") -> None:
        """Take note of a tensor's storage, if it is on the device, and of what it is for.

        Parameters
        ----------
        tensor
            Any tensor.
        role
            What it is for; kept where the storage is known for something of a lower rank.
        """
        if tensor.device != self._device:
            return
        if str(tensor.layout) != "torch.strided":
            raise NotImplementedError(f"a tensor of layout {tensor.layout}, whose size depends on its values")
        storage = tensor.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        known = self._live.get(address)
        trace = self.trace
        if known is None:
            number = self._allocate(nbytes, role)
            self._live[address] = (
                number,
                weakref.ref(storage, functools.partial(self._gone, address, number)),
            )
            return
        number = known[0]
        if trace.sizes[number] != nbytes:  # resized in place: a new block, then the old one goes
            fresh = self._allocate(nbytes, trace.roles[number])
            trace.events.append(-1 - number)
            self._live[address] = (
                fresh,
                weakref.ref(storage, functools.partial(self._gone, address, fresh)),
            )
            number = fresh
        if _RANK[role] < _RANK[trace.roles[number]]:
            trace.roles[number] = role

    def role(self, tensor: Any) -> Role | None:
        """Say what a tensor's storage is known to be for; None where it is not followed.

        Parameters
        ----------
        tensor
            Any tensor.
        """
        known = self._live.get(tensor.untyped_storage()._cdata)
        return None if known is None else self.trace.roles[known[0]]

    def before(self, operator: str) -> None:
        """Take note of an operator that is about to run.

        Parameters
        ----------
        operator
            Its name without the overload, such as "aten.mm".
        """
        self._mark(operator)

    def after(self, operator: str, overload: str = "default") -> None:
        """Take note of what an operator made the libraries keep, after it has allocated its result.

        Parameters
        ----------
        operator
            Its name without the overload, such as "aten.mm".
        overload
            The overload; a compiled program writes into what it has allocated ("out"), and adds its biases elsewhere.
        """
        if operator in _PRODUCTS:
            thread = self.phase == "backward"
            if thread not in self._threads:
                self._threads.add(thread)
                self._allocate(self._workspace_bytes, "workspaces")
        if operator in _WITH_BIAS and overload == "default":
            thread = self.phase == "backward"
            if thread not in self._bias_threads:
                self._bias_threads.add(thread)
                self._allocate(BIAS_WORKSPACE_BYTES, "workspaces")

    def inside(self, *nbytes: int, optional: bool = False) -> None:
        """Take note of memory that an operator takes and gives back while it runs.

        Parameters
        ----------
        *nbytes
            How much; blocks that live together are taken in this order and given back in the other.
        optional
            Whether the operator does without where there is no room.
        """
        numbers = [self._allocate(n, "temporaries") for n in nbytes if n]
        if optional:
            self.trace.optional.update(numbers)
        self.trace.events += [-1 - number for number in reversed(numbers)]

    def _allocate(self, nbytes: int, role: Role) -> int:
        trace = self.trace
        number = len(trace.sizes)
        trace.sizes.append(nbytes)
        trace.roles.append(role)
        trace.events.append(number)
        return number

    def _gone(self, address: int, number: int, _: Any) -> None:
        known = self._live.get(address)
        if known is not None and known[0] == number:
            del self._live[address]
            self.trace.events.append(-1 - number)

    def _mark(self, operator: str) -> None:
        now = (self.step, self.phase, operator)
        if now != self._marked:
            self._marked = now
            self.trace.marks.append((len(self.trace.events), *now))


BIAS_WORKSPACE_BYTES = 2**20
"""cuBLASLt's own workspace, allocated at a thread's first product that adds a bias, and kept.

1,024 KiB unless ``CUBLASLT_WORKSPACE_SIZE`` says otherwise, by ``aten/src/ATen/cuda/CUDABlas.cpp``.
"""

_WITH_BIAS = frozenset({"aten.addmm", "aten._addmm_activation"})

# What goes through cuBLAS. Convolutions go through cuDNN, which takes and gives back its own workspaces.
_PRODUCTS = frozenset(
    f"aten.{name}"
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "dot",
        "_addmm_activation",
        "linear",
    )
)


_DO_WITHOUT = frozenset({"aten.convolution", "aten.convolution_backward"})

# The mask is allocated before what it is laid over (`dropout_cuda` in ``ATen/native/cuda/Dropout.cu``).
_LAST_RESULT_FIRST = frozenset({"aten.native_dropout"})


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Say whether a tensor's elements fill their stretch of memory, each once, in whatever order of the axes.

    Parameters
    ----------
    size, stride
        Of the tensor.

    Examples
    --------
    >>> is_dense((2, 3), (1, 2)), is_dense((2, 3), (6, 1)), is_dense((2, 3), (0, 1))
    (True, False, False)
    """
    expected = 1
    for step, length in sorted(pair for pair in zip(stride, size, strict=True) if pair[1] != 1):
        if step != expected:
            return False
        expected *= length
    return True


def _is_engine_s_sum(first: Any, second: Any) -> bool:
    """Say whether this is autograd adding up two gradients of one tensor, which it does in place where it can.

    It can where nobody else holds the first one, and does not for tensors that something watches, as a trace does:
    then it makes a third (``can_accumulate_inplace`` in ``torch/csrc/autograd/input_buffer.cpp``).
    """
    import torch

    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return False
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return False
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(_BETWEEN):
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    if frame is None or frame.f_code.co_name != "_engine_run_backward":
        return False  # a backward pass written in Python adds, and keeps what it likes
    held = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    return held <= _HELD_ONCE and is_dense(first.size(), first.stride())


# Between a dispatch mode and whoever called the operator.
_BETWEEN = ("torch/_dynamo/eval_frame.py", "torch/_compile.py", "torch/utils/_stats.py", "storage_trace.py")
_HELD_ONCE = 2  # by the tensor, and by the Python object through which it is asked


@functools.cache
def _mode_class() -> Any:
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.utils._python_dispatch import TorchDispatchMode

    casts, value_of = torch.ops.aten._to_copy.default, torch.ops.aten._local_scalar_dense.default
    sum_of_two, into_the_first = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor

    class Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
        def __init__(self, tracer: Tracer) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.tracer = tracer

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in ("prim", "profiler"):
                return func(*args, **(kwargs or {}))  # a question, no work
            tracer = self.tracer
            operator, _, overload = str(func).rpartition(".")
            tracer.before(operator)
            # `linear` adds in place, too, unless something watches ("composite compliance", ATen/native/Linear.cpp).
            if func is sum_of_two and not kwargs and (tracer.in_linear or _is_engine_s_sum(*args)):
                func = into_the_first
            try:
                made = func(*args, **(kwargs or {}))
            except DataDependentOutputException:
                if func is value_of and tracer.phase == "optimizer":
                    return 1.0  # an optimizer asks for its count of steps and the like, and no shape depends on it
                raise
            inside = scratch_bytes(operator, args, tracer.card)
            role: Role = "temporaries"
            if func is casts and tracer.role(args[0]) == "parameters":
                role = "casts"  # autocast's copy of a weight in a smaller dtype
            elif torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
                role = "recomputed"  # a backward pass itself runs without gradients of its own
            does_without = operator in _DO_WITHOUT
            one_by_one = iter(inside if isinstance(inside, tuple) else ())
            waiting = [made[::-1] if operator in _LAST_RESULT_FIRST else made]
            while waiting:
                value = waiting.pop()
                if isinstance(value, torch.Tensor):
                    tracer.see(value, role)
                    tracer.inside(next(one_by_one, 0), optional=does_without)
                elif isinstance(value, (tuple, list)):
                    waiting += reversed(value)
                else:  # no gradient was asked for
                    next(one_by_one, 0)
            tracer.after(operator, overload)
            if isinstance(inside, int):
                tracer.inside(inside, optional=does_without)
            elif isinstance(inside, list):
                for together in inside:
                    tracer.inside(*together)
            return made

    return Follow
