"""What a training step needs in memory, predicted from the model's code on a machine with no GPU.

The step runs twice on tensors without data (`gpucourse.stand_in`), each storage is followed from its birth to
its end (`gpucourse.storage_trace`), and the caching allocator is run over that sequence
(`gpucourse.allocator`). The peak is the most that is allocated at one instant; its lines are what lives at that
instant, not each line's own maximum.

>>> import torch
>>> model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))
>>> found = predict_step_memory(
...     model, torch.empty(64, 256), loss=lambda model, x: model(x).sum(), optimizer=torch.optim.SGD
... )
>>> found.line("parameters") == 4 * (256 * 1024 + 1024 + 1024 * 10 + 10)
True
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from gpucourse import html
from gpucourse.allocator import CachingAllocator, SimulatedOutOfMemoryError
from gpucourse.calibrated_step import CalibratedStep, calibrate_step_memory
from gpucourse.compiled_program import collector_paused, compiler_without_a_gpu, region
from gpucourse.memory_measurement import MeasuredStep, compare_step_memory, measure_step_memory
from gpucourse.placed_model import (
    Placed,
    flatten_recurrent,
    on_device,
    optimizer_of,
    placed,
    samples,
    tensors,
)
from gpucourse.scratch import Card
from gpucourse.stand_in import device, stand_in
from gpucourse.step_errors import (
    BatchError,
    ModelError,
    StepFailedError,
    StepMemoryError,
    UnseenError,
    errors_told,
)
from gpucourse.storage_trace import Moment, StorageTrace, Tracer
from gpucourse.traced_step import Precision, Run, check, own_loss, roles_followed
from gpucourse.units import format_bytes

if TYPE_CHECKING:
    import torch

__all__ = [
    "METHOD_VERSION",
    "OTHER_WORKSPACE_BYTES",
    "WORKSPACE_BYTES",
    "BatchError",
    "CalibratedStep",
    "Card",
    "MeasuredStep",
    "ModelError",
    "Peak",
    "Precision",
    "StepFailedError",
    "StepMemory",
    "StepMemoryError",
    "UnseenError",
    "calibrate_step_memory",
    "compare_step_memory",
    "measure_step_memory",
    "predict_step_memory",
]

METHOD_VERSION = 3  # rises when the same step is predicted otherwise than before

WORKSPACE_BYTES = 32 * 2**20
"""cuBLAS's workspace on Hopper, which PyTorch allocates at the first matrix product of a thread and keeps.

4,096 x 8 KiB where the compute capability is 9.0 or 10.0 and 8,320 KiB elsewhere, by `parseChosenWorkspaceSize` in
``aten/src/ATen/cuda/CublasHandlePool.cpp``; ``CUBLAS_WORKSPACE_CONFIG`` changes it. The backward pass runs on a
thread of its own, so a training step has two.
"""

OTHER_WORKSPACE_BYTES = 8320 * 2**10
"""The same on other GPUs: two of 4,096 KiB and eight of 16."""

LEFT_OUT = (
    "the CUDA context and the libraries' own memory (they are outside the allocator)",
    "other processes on the device",
    "the workspaces of grouped convolutions, and what other convolutions take beyond copies of their tensors and a "
    "card full of partial sums: cuDNN chooses, and does without where there is no room",
    "where the driver puts segments, which decides between free blocks of one size",
)


LEFT_OUT_COMPILED = (
    "graph breaks: each compiled call is taken for one graph",
    "what the compiler's own autotuning takes before the first step",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The instant of a step at which most is allocated.

    Attributes
    ----------
    step
        From 1. The first step has no optimizer state until its end; later ones are alike.
    phase
        "forward", "backward" or "optimizer"; "setup" where the step only frees.
    operator
        What was running, in torch's name for it.
    allocated_bytes
        With the allocator's rounding, as `torch.cuda.max_memory_allocated` counts.
    lines
        Bytes by role as asked for, and "rounding", what the allocator added: their sum is `allocated_bytes`.
    """

    step: int
    phase: str
    operator: str
    allocated_bytes: int
    lines: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Give the peak as plain data."""
        return {
            "step": self.step,
            "phase": self.phase,
            "operator": self.operator,
            "allocated_bytes": self.allocated_bytes,
            "lines": dict(self.lines),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """A predicted training step.

    Attributes
    ----------
    model
        Name of its class.
    microbatch
        Samples in one forward and backward pass.
    precision, accumulation, optimizer
        As asked for.
    compiled
        What ran as a compiled graph: "" for nothing, "model", "model and loss", or the names of the model's parts.
    trainable, frozen
        Numbers in the parameters that learn and in those that do not; a tied one counts once.
    peaks
        One a step.
    reserved_bytes
        The most that the allocator reserves in all steps, with no limit.
    torch_version
        The torch whose operators were traced: a prediction holds for that release.
    seconds
        What the prediction took.
    left_out
        What is not in it.
    notes
        What was found on the way and should be known.
    trace
        Every allocation and free, in order.
    """

    model: str
    microbatch: int
    precision: Precision
    accumulation: int
    optimizer: str
    compiled: str = ""
    trainable: int
    frozen: int
    peaks: tuple[Peak, ...]
    reserved_bytes: int
    torch_version: str
    seconds: float = dataclasses.field(compare=False)
    left_out: tuple[str, ...] = LEFT_OUT
    notes: tuple[str, ...] = ()
    trace: StorageTrace = dataclasses.field(repr=False, compare=False)

    @property
    def peak(self) -> Peak:
        """The highest of the steps' peaks; the first one of equals."""
        return max(self.peaks, key=lambda peak: peak.allocated_bytes)

    @property
    def allocated_bytes(self) -> int:
        """The most that is allocated at one instant, with the allocator's rounding."""
        return self.peak.allocated_bytes

    @property
    def lines(self) -> Mapping[str, int]:
        """What is live at the peak, in bytes by role; the sum is `allocated_bytes`."""
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

    def runs_within(self, limit_bytes: int) -> bool:
        """Say whether the allocator gets through the steps with a limit on what it may reserve.

        Parameters
        ----------
        limit_bytes
            The limit, as a cap on the process's share of the device sets it. At the limit the allocator first
            gives back the segments in which nothing lives. Where the driver puts segments cannot be known: the
            allocator has to get through in each of three orders of them.

        Raises
        ------
        ValueError
            The limit is not above 0.
        """
        if limit_bytes <= 0:
            raise ValueError(f"limit_bytes is {limit_bytes}; wanted bytes above 0")
        try:
            for shuffle in range(3):
                self.trace.replay(CachingAllocator(limit_bytes=limit_bytes, shuffle=shuffle))
        except SimulatedOutOfMemoryError:
            return False
        return True

    def as_dict(self) -> dict[str, Any]:
        """Give the prediction as plain data, without the trace."""
        return {
            "model": self.model,
            "microbatch": self.microbatch,
            "precision": self.precision,
            "accumulation": self.accumulation,
            "optimizer": self.optimizer,
            "compiled": self.compiled,
            "trainable": self.trainable,
            "frozen": self.frozen,
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "peaks": [peak.as_dict() for peak in self.peaks],
            "torch_version": self.torch_version,
            "method_version": METHOD_VERSION,
            "seconds": self.seconds,
            "left_out": list(self.left_out),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        width = max(map(len, self.lines))
        rows = [f"  {name:<{width}}  {format_bytes(n):>9}" for name, n in self.lines.items() if n]
        return "\n".join(
            [
                f"{self._title()}: {format_bytes(self.allocated_bytes)} allocated at the peak, "
                f"{format_bytes(self.reserved_bytes)} reserved (predicted)",
                f"live at the peak, {self._where()}:",
                *rows,
                *(f"note: {note}" for note in self.notes),
                f"predicted for torch {self.torch_version}; left out: {'; '.join(self.left_out)}",
            ]
        )

    def _repr_html_(self) -> str:
        rows = [[name, format_bytes(n)] for name, n in self.lines.items() if n]
        rows += [["allocated", format_bytes(self.allocated_bytes)]]
        rows += [["reserved", format_bytes(self.reserved_bytes)]]
        found = html.table(
            ["live at the peak", "predicted"], rows, f"{self._title()}: the peak, {self._where()}"
        )
        notes = "".join(f"<p>Note: {html.escape(note)}.</p>" for note in self.notes)
        left = html.escape("; ".join(self.left_out))
        return (
            f"{found}{notes}<p>Predicted for torch {html.escape(self.torch_version)}. Left out: {left}.</p>"
        )

    def _title(self) -> str:
        windows = f" x {self.accumulation}" if self.accumulation > 1 else ""
        compiled = f", compiled ({self.compiled})" if self.compiled else ""
        return f"{self.model}, microbatch {self.microbatch}{windows}, {self.precision}, {self.optimizer}{compiled}"

    def _where(self) -> str:
        peak = self.peak
        return f"step {peak.step}, {peak.phase}" + (f", {peak.operator}" if peak.operator else "")


def predict_step_memory(
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
    workspace_bytes: int = WORKSPACE_BYTES,
    card: Card | None = None,
) -> StepMemory:
    """Predict the peak of a training step on CUDA, without a GPU and without the model's memory.

    A step is `accumulation` times forward and backward, then the optimizer's step, then the gradients are freed.

    Parameters
    ----------
    model
        The module, wherever it is, which is left as it is; or a function of no arguments that makes it, which
        needs no memory for its weights either, unless it asks for values on the way.
    batch
        One microbatch as the model takes it: a tensor, a tuple or list (arguments) or a dict (named arguments).
        Only shapes and dtypes count, so ``torch.empty(..., device="meta")`` will do.
    loss
        ``loss(model, *batch)`` or ``loss(model, **batch)`` gives one number. By default the model gives it: as
        its output, or as the ``loss`` of its output.
    optimizer
        A class such as ``torch.optim.AdamW``, a ``functools.partial`` of one, or any function that takes the
        parameters that learn; the name of a class in ``torch.optim``; an optimizer of the model's parameters,
        which is left as it is; None for no step.
    precision
        "fp32" and "tf32" need the same memory; "fp16" and "bf16" run under autocast, the weights in fp32.
    accumulation
        Microbatches a step.
    set_to_none
        Whether the gradients are freed after the step, which is torch's default, or kept as zeros.
    microbatch
        Samples in `batch`, where it is not the length of its first tensor's first axis.
    steps
        How many to trace; the first differs, for the optimizer's state comes at its end.
    compile
        True: model and loss are one function that is compiled; "model": the model alone, its loss eager, which is
        also what a model that ``torch.compile`` made is predicted as. See `gpucourse.compiled_program` for what of
        the compiler is seen.
    scaler
        Whether the loss is scaled and the gradients divided as by `torch.amp.GradScaler`; by default under "fp16".
    clip_norm
        What `torch.nn.utils.clip_grad_norm_` brings the gradients' norm down to before the update; None: no clipping.
    workspace_bytes
        cuBLAS's workspace of each of two threads.
    card
        What of the GPU decides how much scratch memory its kernels take; an H200 by default.

    Returns
    -------
    StepMemory
        Lines, allocated and reserved.

    Raises
    ------
    ModelError
        No module, one without parameters, or with none that learns.
    BatchError
        No tensors, or one with nothing in it.
    UnseenError
        The step branches on data, or uses what cannot be traced without data; sparse gradients and L-BFGS do.
    StepFailedError
        The step itself fails.
    TypeError, ValueError
        Another argument is none of what it can be.

    Examples
    --------
    >>> from gpucourse.training import GPT, GPTConfig, next_token_loss, random_tokens
    >>> config = GPTConfig(layers=2, width=64, heads=2, vocabulary=1000, context=128)
    >>> batch = random_tokens(config, 4)
    >>> found = predict_step_memory(lambda: GPT(config), batch, loss=next_token_loss, precision="bf16")
    >>> found.microbatch, found.peak.phase
    (4, 'backward')
    """
    import torch

    begun = time.perf_counter()
    check(
        precision,
        compile=compile,
        clip_norm=clip_norm,
        accumulation=(accumulation, 1),
        steps=(steps, 1),
        workspace_bytes=(workspace_bytes, 0),
    )
    count = samples(tensors(batch), microbatch)
    lossy = loss or own_loss
    with stand_in(), errors_told():
        copied = placed(model)
        whole = compile is True or hasattr(lossy, "_torchdynamo_orig_callable")
        made = copied.module
        if whole:
            made = region(made, getattr(lossy, "_torchdynamo_orig_callable", lossy))
            lossy = _call_it
        elif compile and "" not in copied.compiled:
            made = region(made)
        compiled = _compiled(copied, whole, bool(compile))
        tracer = Tracer(device(), workspace_bytes=workspace_bytes, card=card)
        for role, found in (("parameters", made.parameters()), ("buffers", made.buffers())):
            for tensor in found:
                tracer.see(tensor, role)  # type: ignore[arg-type]  # both are roles
        flatten_recurrent(made, tracer.see)
        given = on_device(batch)
        for tensor in tensors(given):
            tracer.see(tensor, "inputs")
        trained = [p for p in made.parameters() if p.requires_grad]
        updates = optimizer_of(optimizer, model, made)
        scales = precision == "fp16" if scaler is None else scaler
        run = Run(
            tracer=tracer,
            model=made,
            trained=trained,
            optimizer=updates,
            batch=given,
            loss=lossy,
            precision=precision,
            scaler=torch.amp.GradScaler("cuda") if scales and updates is not None else None,
            clip_norm=clip_norm,
        )
        with compiler_without_a_gpu() if compiled else contextlib.nullcontext():
            if compiled:
                with collector_paused():
                    run.once()
            with tracer.mode, roles_followed(tracer, trained, torch):
                for step in range(1, steps + 1):
                    run.step(step, accumulation, set_to_none)
        numbers = [
            sum(p.numel() for p in made.parameters() if p.requires_grad == learns) for learns in (True, False)
        ]
        updated = "none" if updates is None else type(updates).__name__
        trace = tracer.trace
        # What the step leaves behind is dropped here, after the trace has ended.
        trace = dataclasses.replace(trace, events=list(trace.events), marks=list(trace.marks))
    allocator = CachingAllocator()
    moments = [moment for moment in trace.replay(allocator) if moment.step > 0]
    return StepMemory(
        model=copied.name,
        microbatch=count,
        precision=precision,
        accumulation=accumulation,
        optimizer=updated,
        compiled=compiled,
        trainable=numbers[0],
        frozen=numbers[1],
        peaks=tuple(_peak(trace, moment) for moment in moments),
        reserved_bytes=allocator.peak_reserved_bytes,
        torch_version=torch.__version__,
        seconds=time.perf_counter() - begun,
        left_out=LEFT_OUT + (LEFT_OUT_COMPILED if compiled else ()),
        notes=copied.notes,
        trace=trace,
    )


def _peak(trace: StorageTrace, moment: Moment) -> Peak:
    lines: dict[str, int] = dict(trace.live(moment).items())
    lines["rounding"] = moment.allocated_bytes - moment.requested_bytes
    return Peak(
        step=moment.step,
        phase=moment.phase,
        operator=moment.operator,
        allocated_bytes=moment.allocated_bytes,
        lines=lines,
    )


def _call_it(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _compiled(copied: Placed, whole: bool, asked: bool) -> str:
    """Say what runs as a compiled graph."""
    if whole:
        return "model and loss"
    if asked or "" in copied.compiled:
        return "model"
    return ", ".join(copied.compiled)
