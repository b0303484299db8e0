"""What a training step needs in memory, measured on the GPU line by line.

The step runs as it would anywhere, with no mode or hook of torch's in it that could change what it allocates. The
allocator's own history is recorded meanwhile (`gpucourse.allocator_history` replays it), and between the phases of
the step the addresses of parameters, gradients, optimizer state and batch are noted. What lives from the forward
pass into the backward pass is an activation; the rest is temporary.

`gpucourse.step_comparison` holds a measurement against a prediction of `gpucourse.step_memory`.

>>> from gpucourse.environment import cuda_available
>>> import torch
>>> if cuda_available():
...     found = measure_step_memory(torch.nn.Linear(8, 8), torch.ones(4, 8), loss=lambda m, x: m(x).sum())
...     assert sum(found.lines.values()) == found.allocated_bytes
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

from gpucourse import html
from gpucourse import plain_data as given
from gpucourse.allocator_history import HistoryError
from gpucourse.environment import Environment, require_cuda
from gpucourse.live_memory import saved_tensors, storages_of
from gpucourse.measured_roof import tf32_products
from gpucourse.recorded_steps import MeasuredPeak, RecordedSteps, Seen
from gpucourse.step_comparison import Comparison, ComparisonError, compare
from gpucourse.step_parts import (
    ModelError,
    Precision,
    check,
    forward,
    made_model,
    made_optimizer,
    own_loss,
    samples_in,
    tensors_in,
)
from gpucourse.storage_trace import Role
from gpucourse.units import format_bytes

if TYPE_CHECKING:
    import torch

__all__ = [
    "METHOD_VERSION",
    "Comparison",
    "ComparisonError",
    "HistoryError",
    "MeasuredPeak",
    "MeasuredStep",
    "compare",
    "measure_step_memory",
]

METHOD_VERSION = 1  # rises when the same step would be measured otherwise than before

MOST_EVENTS = 2_000_000  # of the allocator's history: some 100 bytes each, and the stack of each allocation
DEVICE = "cuda"
POINTS = 240  # of the timeline, so that a recording of it stays small


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A training step as the allocator saw it.

    Attributes
    ----------
    model, microbatch, precision, accumulation, optimizer, trainable, frozen
        As `gpucourse.step_memory.StepMemory` has them.
    peaks
        One a step.
    reserved_bytes
        The most that the allocator reserved, less what it had reserved before.
    timeline
        (step, phase, bytes by role as asked for) in order of time: of each stretch of the steps its highest instant.
    other_bytes
        What was allocated in this process before, and is in none of these numbers.
    events
        Allocations and frees that were replayed.
    torch_version, gpu
        What it was measured with and on.
    seconds
        What the measurement took, model and optimizer made included.
    notes
        What was found on the way and should be known.
    """

    model: str
    microbatch: int
    precision: Precision
    accumulation: int
    optimizer: str
    trainable: int
    frozen: int
    peaks: tuple[MeasuredPeak, ...]
    reserved_bytes: int
    timeline: tuple[tuple[int, str, Mapping[str, int]], ...] = dataclasses.field(repr=False)
    other_bytes: int
    events: int
    torch_version: str
    gpu: str
    seconds: float = dataclasses.field(compare=False)
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> MeasuredPeak:
        """The highest of the steps' peaks; the first one of equals."""
        return max(self.peaks, key=lambda peak: peak.allocated_bytes)

    @property
    def allocated_bytes(self) -> int:
        """The most that was allocated at one instant, as ``torch.cuda.max_memory_allocated()`` counts."""
        return self.peak.allocated_bytes

    @property
    def lines(self) -> Mapping[str, int]:
        """What lived at the peak, in bytes by role; the sum is `allocated_bytes`."""
        return self.peak.lines

    def line(self, name: str) -> int:
        """Give one line of the peak in bytes.

        Parameters
        ----------
        name
            A role, such as "gradients", or "rounding".

        Raises
        ------
        KeyError
            There is no such line.
        """
        if name not in self.lines:
            raise KeyError(f"no line {name!r}; there are {', '.join(self.lines)}")
        return self.lines[name]

    def as_dict(self) -> dict[str, Any]:
        """Give the measurement as plain data; `from_dict` reads it."""
        roles = [role for role in get_args(Role) if any(lines.get(role) for _, _, lines in self.timeline)]
        return {
            "model": self.model,
            "microbatch": self.microbatch,
            "precision": self.precision,
            "accumulation": self.accumulation,
            "optimizer": self.optimizer,
            "trainable": self.trainable,
            "frozen": self.frozen,
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "other_bytes": self.other_bytes,
            "peaks": [peak.as_dict() for peak in self.peaks],
            # One list a role would be shorter still, but a point a row is what a reader of the file can follow.
            "timeline": {
                "roles": roles,
                "points": [
                    [step, phase, *(lines[role] for role in roles)] for step, phase, lines in self.timeline
                ],
            },
            "events": self.events,
            "torch_version": self.torch_version,
            "gpu": self.gpu,
            "method_version": METHOD_VERSION,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MeasuredStep:
        """Read what `as_dict` gave.

        Parameters
        ----------
        data
            Plain data, such as a recording holds.

        Raises
        ------
        ValueError
            A field is missing or is none of what it can be.
        """
        try:
            return cls(
                model=given.text(data["model"], "model"),
                microbatch=given.whole(data["microbatch"], "microbatch", least=1),
                precision=_precision(data["precision"]),
                accumulation=given.whole(data["accumulation"], "accumulation", least=1),
                optimizer=given.text(data["optimizer"], "optimizer"),
                trainable=given.whole(data["trainable"], "trainable"),
                frozen=given.whole(data["frozen"], "frozen"),
                peaks=_peaks_of(data["peaks"]),
                reserved_bytes=given.whole(data["reserved_bytes"], "reserved_bytes"),
                timeline=tuple(_points_of(data["timeline"])),
                other_bytes=given.whole(data["other_bytes"], "other_bytes"),
                events=given.whole(data["events"], "events"),
                torch_version=given.text(data["torch_version"], "torch_version"),
                gpu=given.text(data["gpu"], "gpu"),
                seconds=given.number(data["seconds"], "seconds", least=0.0),
                notes=tuple(given.text(note, "notes") for note in given.rows(data["notes"], "notes")),
            )
        except KeyError as error:
            raise ValueError(
                f"the measurement has no {error}: wanted what MeasuredStep.as_dict() gave"
            ) from None

    def __str__(self) -> str:
        width = max(map(len, self.lines))
        rows = [f"  {name:<{width}}  {format_bytes(n):>9}" for name, n in self.lines.items() if n]
        return "\n".join(
            [
                f"{self._title()}: {format_bytes(self.allocated_bytes)} allocated at the peak, "
                f"{format_bytes(self.reserved_bytes)} reserved (measured)",
                f"live at the peak, {self._where()}:",
                *rows,
                *(f"note: {note}" for note in self.notes),
                f"measured on {self.gpu}, torch {self.torch_version}",
            ]
        )

    def _repr_html_(self) -> str:
        rows = [[name, format_bytes(n)] for name, n in self.lines.items() if n]
        rows += [["allocated", format_bytes(self.allocated_bytes)]]
        rows += [["reserved", format_bytes(self.reserved_bytes)]]
        found = html.table(
            ["live at the peak", "measured"], rows, f"{self._title()}: the peak, {self._where()}"
        )
        notes = "".join(f"<p>Note: {html.escape(note)}.</p>" for note in self.notes)
        return f"{found}{notes}<p>Measured on {html.escape(self.gpu)}, torch {html.escape(self.torch_version)}.</p>"

    def _title(self) -> str:
        windows = f" x {self.accumulation}" if self.accumulation > 1 else ""
        return f"{self.model}, microbatch {self.microbatch}{windows}, {self.precision}, {self.optimizer}"

    def _where(self) -> str:
        peak = self.peak
        return f"step {peak.step}, {peak.phase}" + (f", {peak.code}" if peak.code else "")


def _precision(value: object) -> Precision:
    if value not in get_args(Precision):
        raise ValueError(f"precision is {value!r}; wanted one of {', '.join(get_args(Precision))}")
    return value  # type: ignore[return-value]  # as was just checked


def _peaks_of(data: object) -> tuple[MeasuredPeak, ...]:
    found = tuple(
        MeasuredPeak(
            step=given.whole(peak["step"], "step"),
            phase=given.text(peak["phase"], "phase"),
            code=given.text(peak["code"], "code"),
            allocated_bytes=given.whole(peak["allocated_bytes"], "allocated_bytes"),
            lines={
                given.text(name, "a line"): int(given.number(n, f"lines.{name}"))
                for name, n in peak["lines"].items()
            },
        )
        for peak in given.rows(data, "peaks")
    )
    if not found:
        raise ValueError("peaks is empty: a measurement has one a step")
    return found


def _points_of(data: Mapping[str, Any]) -> Iterator[tuple[int, str, dict[str, int]]]:
    roles = [given.text(role, "a role of the timeline") for role in given.rows(data["roles"], "roles")]
    for point in given.rows(data["points"], "points"):
        step, phase, *numbers = given.rows(point, "a point of the timeline")
        if len(numbers) != len(roles):
            raise ValueError(f"a point of the timeline has {len(numbers)} numbers for {len(roles)} roles")
        lines: dict[str, int] = dict.fromkeys(get_args(Role), 0)
        for role, number in zip(roles, numbers, strict=True):
            lines[role] = given.whole(number, role)
        yield given.whole(step, "step"), given.text(phase, "phase"), lines


# ----------------------------------------------------------------------------------------------- the measurement


def measure_step_memory(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    batch: Any,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: Any = "AdamW",
    precision: Precision = "fp32",
    accumulation: int = 1,
    set_to_none: bool = True,
    microbatch: int | None = None,
    steps: int = 2,
    points: int = POINTS,
) -> MeasuredStep:
    """Run a training step on the GPU and say what lived at its peak.

    The arguments are those of `gpucourse.step_memory.predict_step_memory`, and so are the names of the lines. The
    allocator's cache is emptied before and after, its peak statistics are reset, and the cuBLAS workspaces of this
    process are given back, so that the step's own are counted.

    Parameters
    ----------
    model
        The module, which is copied to the device and left as it is; or a function of no arguments that makes it.
    batch
        One microbatch as the model takes it: a tensor, a tuple or list (arguments) or a dict (named arguments),
        wherever it is. Tensors without data (``device="meta"``) become normal random numbers, or zeros where they
        are integers.
    loss
        ``loss(model, *batch)`` or ``loss(model, **batch)`` gives one number. By default the model gives it: as its
        output, or as the ``loss`` of its output.
    optimizer
        A class, a `functools.partial` of one, or any function that takes the parameters that learn; the name of a
        class in ``torch.optim``; an optimizer of the model's parameters, which is left as it is; None for no step.
    precision
        "fp32" runs products in fp32, "tf32" on the tensor cores; "fp16" and "bf16" under autocast, the weights in
        fp32.
    accumulation
        Microbatches a step.
    set_to_none
        Whether the gradients are freed after the step or kept as zeros.
    microbatch
        Samples in `batch`, where it is not the length of its first tensor's first axis.
    steps
        How many to run; the first differs, for the optimizer's state comes at its end.
    points
        How many the timeline has at most.

    Returns
    -------
    MeasuredStep
        Lines, allocated and reserved, and memory over the steps.

    Raises
    ------
    NoGPUError
        There is no CUDA device.
    ModelError, BatchError, StepFailedError
        Of `gpucourse.step_parts`: the model, the batch or the loss is none that can be trained on.
    HistoryError
        A history that somebody else records is too short for the step.
    TypeError, ValueError
        Another argument is none of what it can be.
    torch.OutOfMemoryError
        The step does not fit; what it had allocated is freed before. `gpucourse.memory_cap.attempt` says what lived.
    """
    check(precision, accumulation=(accumulation, 1), steps=(steps, 1), points=(points, 1))
    samples = samples_in(tensors_in(batch), microbatch)
    require_cuda("measure_step_memory")
    import torch

    begun = time.perf_counter()
    torch.cuda.init()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    _give_back(torch)
    other_bytes, other_reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    notes = []
    if other_bytes:
        notes.append(
            f"{format_bytes(other_bytes)} lived on the device before and is not counted; "
            "what is reserved is then what was added, since the step also fits into free pieces between"
        )
    try:
        with _history(torch) as recorder, tf32_products(precision == "tf32"):
            run = _Run(recorder, precision, accumulation, set_to_none)
            about = run.all(model, batch, loss or own_loss, optimizer, steps)
            gc.collect()
            recorder.mark("workspaces")
            _clear_workspaces(torch)
            recorder.mark("end")
            events = recorder.events()
    except BaseException as error:
        # The traceback's frames hold the model and the batch, and its reader wants the memory back.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        _give_back(torch)
    if any(t.device.type == "meta" for t in tensors_in(batch)):
        notes.append("the batch had no data: normal random numbers, and zeros for integers, stood for it")
    if about["evaluation"]:
        notes.append(
            "the model is in evaluation mode: call model.train() for dropout and batch norm in training"
        )
    steps_seen = RecordedSteps(recorder.seen, events)
    peaks = steps_seen.peaks(run.allocated, other_bytes)
    if any("unexplained" in peak.lines for peak in peaks):
        notes.append(
            "the replayed history and the allocator's own count differ: the allocator is set up otherwise than "
            "usual (rounding, splitting), or another thread used the device"
        )
    return MeasuredStep(
        model=about["model"],
        microbatch=samples,
        precision=precision,
        accumulation=accumulation,
        optimizer=about["optimizer"],
        trainable=about["trainable"],
        frozen=about["frozen"],
        peaks=tuple(peaks),
        reserved_bytes=max(0, max(run.reserved) - other_reserved),
        timeline=tuple(
            (step, phase, {str(role): n for role, n in live.items()})
            for step, phase, live in steps_seen.storage_trace().timeline(points)
        ),
        other_bytes=other_bytes,
        events=len(steps_seen.history.events),
        torch_version=torch.__version__,
        gpu=Environment.capture().gpu or "unknown GPU",
        seconds=time.perf_counter() - begun,
        notes=tuple(notes),
    )


def _give_back(torch: Any) -> None:
    gc.collect()
    torch.cuda.synchronize()
    _clear_workspaces(torch)
    torch.cuda.empty_cache()


def _clear_workspaces(torch: Any) -> None:
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


class _Recorder:
    """Notes marks and addresses beside the allocator's history. Its only trace on the device is none."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._device = torch.cuda.current_device()
        self.seen = Seen(segments=self._segments(torch.cuda.memory._snapshot()), base=self.counted())

    def counted(self) -> tuple[int, int]:
        """Read how many allocations and frees the device has had."""
        count = self._torch._C._cuda_memoryStats(self._device)["allocation"]["all"]
        return int(count["allocated"]), int(count["freed"])

    def mark(self, name: str) -> None:
        self.seen.marks.append((name, *self.counted()))

    def see(self, tensors: Iterable[Any], role: Role) -> None:
        now = self.counted()
        for tensor in tensors:
            for storage in storages_of(tensor):
                if storage.device.type == DEVICE:
                    self.seen.addresses.append((*now, storage.data_ptr(), role))

    def events(self) -> list[Mapping[str, Any]]:
        """Give the device's events."""
        traces = self._torch.cuda.memory._snapshot()["device_traces"]
        return list(traces[self._device])

    def _segments(self, snapshot: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return [s for s in snapshot["segments"] if s.get("device", self._device) == self._device]


@contextmanager
def _history(torch: Any) -> Iterator[_Recorder]:
    """Record the allocator's history, and leave the switch as it was."""
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)()
    if not enabled:
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=MOST_EVENTS
        )
    try:
        yield _Recorder(torch)
    finally:
        if not enabled:
            torch.cuda.memory._record_memory_history(None)


@dataclasses.dataclass(slots=True)
class _Run:
    """The step as a reader writes it, with looks at the allocator between its phases."""

    recorder: _Recorder
    precision: Precision
    accumulation: int
    set_to_none: bool
    allocated: list[int] = dataclasses.field(default_factory=list)  # the allocator's own peak of each step
    reserved: list[int] = dataclasses.field(default_factory=list)

    def all(self, model: Any, batch: Any, loss: Any, optimizer: Any, steps: int) -> dict[str, Any]:
        """Make model, batch and optimizer on the device and run the steps; nothing of them outlives the call."""
        import torch

        made = made_model(model)
        compiled = [part._orig_mod for part in made.modules() if hasattr(part, "_orig_mod")]
        placed = _placed(made, copied=isinstance(model, torch.nn.Module))
        self.recorder.see(placed.parameters(), "parameters")
        self.recorder.see(placed.buffers(), "buffers")
        on_device = _on_device(batch)
        self.recorder.see(tensors_in(on_device), "inputs")
        updates = made_optimizer(optimizer, model, placed)
        for step in range(1, steps + 1):
            torch.cuda.reset_peak_memory_stats()
            self.step(step, placed, on_device, loss, updates)
            self.allocated.append(torch.cuda.max_memory_allocated())
            self.reserved.append(torch.cuda.max_memory_reserved())
        parameters = list(placed.parameters())
        return {
            "model": type(compiled[0] if compiled else placed).__name__ + (" compiled" if compiled else ""),
            "optimizer": "none" if updates is None else type(updates).__name__,
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "frozen": sum(p.numel() for p in parameters if not p.requires_grad),
            "evaluation": not placed.training,
        }

    def step(self, number: int, model: Any, batch: Any, loss: Any, optimizer: Any) -> None:
        """Run one step; the marks say where in the allocator's history its phases begin."""
        recorder = self.recorder
        for _ in range(self.accumulation):
            recorder.mark(f"{number} forward")
            value = forward(
                loss, model, batch, self.precision, before_exit=lambda value: self._leaving(model, value)
            )
            recorder.mark("left")
            if self.accumulation > 1:
                value = value / self.accumulation
            recorder.see((value,), "temporaries")
            recorder.mark(f"{number} backward")
            value.backward()
            del value
            recorder.see((p.grad for p in model.parameters() if p.grad is not None), "gradients")
        recorder.mark(f"{number} optimizer")
        if optimizer is not None:
            optimizer.step()
            recorder.see(tensors_in(list(optimizer.state.values())), "optimizer")
            optimizer.zero_grad(set_to_none=self.set_to_none)
        if self.set_to_none or optimizer is None:
            model.zero_grad(set_to_none=self.set_to_none)

    def _leaving(self, model: Any, value: Any) -> None:
        if self.precision in ("bf16", "fp16"):
            self.recorder.see(_saved_casts(value, model), "casts")
        self.recorder.mark("leaving")


def _placed(made: Any, *, copied: bool) -> Any:
    for name, tensor in (*made.named_parameters(), *made.named_buffers()):
        if tensor.device.type == "meta":
            raise ModelError(
                f"{name} is on the meta device and has no values: give a function that makes the model with them"
            )
    if copied:
        try:
            made = copy.deepcopy(made)
        except Exception as error:
            raise ModelError(
                f"{type(made).__name__} cannot be copied ({error}): give a function that makes it instead"
            ) from error
    return made.to(DEVICE)


def _on_device(tree: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    def moved(tensor: Any) -> Any:
        if tensor.device.type == "meta":
            filled = (
                torch.randn(tensor.shape, device=DEVICE).to(tensor.dtype)
                if tensor.is_floating_point() or tensor.is_complex()
                else torch.zeros(tensor.shape, dtype=tensor.dtype, device=DEVICE)
            )
        else:
            filled = tensor.detach().to(DEVICE, copy=True)
        return filled.requires_grad_(tensor.requires_grad and tensor.is_leaf)

    return tree_map_only(torch.Tensor, moved, tree)


def _saved_casts(value: Any, model: Any) -> list[Any]:
    """List the copies of weights in a smaller dtype that the graph of a loss keeps for its backward pass.

    Autocast makes such a copy by an operator of its own: in the graph, a node that saves a tensor of the copy's size
    and dtype has an edge that leads, over views, to a cast and from there to the parameter. A frozen weight's copy
    has no edge; it is known by its shape.
    """
    import torch

    small = (torch.bfloat16, torch.float16)
    frozen = {tuple(p.shape) for p in model.parameters() if not p.requires_grad and p.dtype == torch.float32}
    found: list[Any] = []
    visited: set[Any] = set()
    waiting: list[Any] = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        waiting += [following for following, _ in node.next_functions]
        lengths = {n for following, _ in node.next_functions if (n := _cast_behind(following)) is not None}
        if not lengths and not frozen:
            continue
        for tensor in saved_tensors(node):
            if tensor.dtype in small and (
                tensor.numel() in lengths
                or tuple(tensor.shape) in frozen
                or tuple(tensor.shape[::-1]) in frozen
            ):
                found.append(tensor)
    return found


def _cast_behind(node: Any) -> int | None:
    """Follow views down to a cast of a parameter; the parameter's number of elements, None where there is none."""
    for _ in range(6):
        if node is None:
            return None
        name, edges = type(node).__name__, node.next_functions
        if name == "ToCopyBackward0":
            end: Any = edges[0][0] if edges else None
            return int(end.variable.numel()) if type(end).__name__ == "AccumulateGrad" else None
        if not name.startswith(_VIEWS) or len(edges) != 1:
            return None
        node = edges[0][0]
    return None


_VIEWS = (
    "TBackward",
    "Transpose",
    "View",
    "UnsafeView",
    "Reshape",
    "Permute",
    "Squeeze",
    "Unsqueeze",
    "Expand",
)
