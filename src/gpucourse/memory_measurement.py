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

import dataclasses
import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

from gpucourse import html
from gpucourse import plain_data as given
from gpucourse.allocator_history import HistoryError
from gpucourse.environment import Environment, require_cuda
from gpucourse.live_memory import storages_of
from gpucourse.measured_roof import tf32_products
from gpucourse.measured_run import INIT_SCALE, Run
from gpucourse.memory_statement import give_back_cache
from gpucourse.placed_model import samples, tensors
from gpucourse.recorded_steps import MeasuredPeak, RecordedSteps, Seen
from gpucourse.step_comparison import Comparison, ComparisonError, compare_step_memory
from gpucourse.storage_trace import Role
from gpucourse.traced_step import Precision, own_loss
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
    "compare_step_memory",
    "measure_step_memory",
]

METHOD_VERSION = 1  # rises when the same step would be measured otherwise than before

MOST_EVENTS = 2_000_000  # of the allocator's history: some 100 bytes each, and the stack of each allocation
POINTS = 240  # of the timeline, so that a recording of it stays small


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A training step as the allocator saw it.

    Attributes
    ----------
    model, microbatch, precision, accumulation, optimizer, trainable, frozen
        As `gpucourse.step_memory.StepMemory` has them.
    compiled
        What ran as a compiled graph: "" for nothing, "model", "model and loss", or the names of the model's parts.
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
    compiled: str = ""
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
            "compiled": self.compiled,
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
                compiled=given.text(data["compiled"], "compiled"),
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
        compiled = f", compiled ({self.compiled})" if self.compiled else ""
        return f"{self.model}, microbatch {self.microbatch}{windows}, {self.precision}, {self.optimizer}{compiled}"

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
    compile: bool | Literal["model"] = False,
    scaler: bool | None = None,
    clip_norm: float | None = None,
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
    compile
        True: model and loss are one function that is compiled; "model": the model alone, its loss eager. What compiles
        at first use is run once before the first step.
    scaler
        Whether the loss is scaled and the gradients divided by a `torch.amp.GradScaler`; by default under "fp16".
    clip_norm
        What `torch.nn.utils.clip_grad_norm_` brings the gradients' norm down to before the update; None: no clipping.
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
        Of `gpucourse.step_errors`: the model, the batch or the loss is none that can be trained on.
    HistoryError
        A history that somebody else records is too short for the step.
    TypeError, ValueError
        Another argument is none of what it can be.
    torch.OutOfMemoryError
        The step does not fit; what it had allocated is freed before. `gpucourse.memory_cap.attempt` says what lived.
    """
    _check(precision, {"accumulation": accumulation, "steps": steps, "points": points}, compile, clip_norm)
    count = samples(tensors(batch), microbatch)
    require_cuda("measure_step_memory")
    import torch

    begun = time.perf_counter()
    torch.cuda.init()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    give_back_cache(torch)
    other_bytes, other_reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    notes = []
    if other_bytes:
        notes.append(
            f"{format_bytes(other_bytes)} lived on the device before and is not counted; "
            "what is reserved is then what was added, since the step also fits into free pieces between"
        )
    try:
        with _history(torch) as recorder, tf32_products(precision == "tf32"):
            scaled = precision == "fp16" if scaler is None else scaler
            run = Run(
                recorder=recorder,
                precision=precision,
                accumulation=accumulation,
                set_to_none=set_to_none,
                compile=compile,
                scaler=torch.amp.GradScaler("cuda", init_scale=INIT_SCALE)
                if scaled and optimizer is not None
                else None,
                clip_norm=clip_norm,
            )
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
        give_back_cache(torch)
    if any(t.device.type == "meta" for t in tensors(batch)):
        notes.append("the batch had no data: normal random numbers, and zeros for integers, stood for it")
    if about["skipped"]:
        notes.append(
            "gradients overflowed and the scaler skipped an update: the optimizer's state may have come late"
        )
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
        microbatch=count,
        precision=precision,
        accumulation=accumulation,
        optimizer=about["optimizer"],
        trainable=about["trainable"],
        frozen=about["frozen"],
        compiled=about["compiled"],
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


def _check(precision: object, counts: Mapping[str, object], compile: object, clip_norm: object) -> None:
    _precision(precision)
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}; wanted a whole number")
        if value < 1:
            raise ValueError(f"{name} is {value}; wanted 1 or more")
    if not (isinstance(compile, bool) or compile == "model"):
        raise ValueError(f"compile is {compile!r}; wanted True (model and loss), 'model' or False")
    if clip_norm is None:
        return
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, (int, float)):
        raise TypeError(f"clip_norm is {clip_norm!r}; wanted a number, or None for no clipping")
    if not clip_norm > 0:
        raise ValueError(f"clip_norm is {clip_norm}; wanted a number above 0, or None for no clipping")


def _clear_workspaces(torch: Any) -> None:
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


class _Recorder:
    """Notes marks and addresses beside the allocator's history; it allocates nothing itself."""

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
                if storage.device.type == "cuda":
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
