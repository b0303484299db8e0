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

import copy
import dataclasses
import functools
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

from gpucourse import html
from gpucourse.allocator import CachingAllocator, SimulatedOutOfMemoryError
from gpucourse.stand_in import device, stand_in
from gpucourse.storage_trace import Moment, StorageTrace, Tracer
from gpucourse.units import format_bytes

if TYPE_CHECKING:
    import torch

__all__ = [
    "METHOD_VERSION",
    "WORKSPACE_BYTES",
    "BatchError",
    "ModelError",
    "Peak",
    "Precision",
    "StepFailedError",
    "StepMemory",
    "StepMemoryError",
    "UnseenError",
    "predict_step_memory",
]

METHOD_VERSION = 1  # rises when the same step is predicted otherwise than before

Precision = Literal["fp32", "tf32", "fp16", "bf16"]

WORKSPACE_BYTES = 32 * 2**20
"""cuBLAS's workspace on Hopper, which PyTorch allocates at the first matrix product of a thread and keeps.

4,096 x 8 KiB where the compute capability is 9.0 or 10.0 and 8,320 KiB elsewhere, by `parseChosenWorkspaceSize` in
``aten/src/ATen/cuda/CublasHandlePool.cpp``; ``CUBLAS_WORKSPACE_CONFIG`` changes it. The backward pass runs on a
thread of its own, so a training step has two.
"""

LEFT_OUT = (
    "the CUDA context and the libraries' own memory (they are outside the allocator)",
    "other processes on the device",
    "cuDNN's workspaces for convolutions and recurrent layers, and the scratch memory of sorts and reductions",
)


class StepMemoryError(Exception):
    """No prediction can be made."""


class ModelError(StepMemoryError, ValueError):
    """The model is none that a training step can be predicted for."""


class BatchError(StepMemoryError, ValueError):
    """The batch is none that a step can take."""


class UnseenError(StepMemoryError, RuntimeError):
    """The step depends on values or on code that a trace without data cannot see."""


class StepFailedError(StepMemoryError, RuntimeError):
    """The step raised an error of its own; it is the cause of this one."""


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
            gives back the segments in which nothing lives.

        Raises
        ------
        ValueError
            The limit is not above 0.
        """
        if limit_bytes <= 0:
            raise ValueError(f"limit_bytes is {limit_bytes}; wanted bytes above 0")
        try:
            self.trace.replay(CachingAllocator(limit_bytes=limit_bytes))
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
        return f"{self.model}, microbatch {self.microbatch}{windows}, {self.precision}, {self.optimizer}"

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
    workspace_bytes: int = WORKSPACE_BYTES,
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
    workspace_bytes
        cuBLAS's workspace of each of two threads.

    Returns
    -------
    StepMemory
        Lines, allocated and reserved.

    Raises
    ------
    ModelError
        No module, one without parameters, with none that learns, or compiled.
    BatchError
        No tensors, or one with nothing in it.
    UnseenError
        The step branches on data, or uses what cannot be traced without data.
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
    _check(precision, accumulation, steps, workspace_bytes)
    leaves = _tensors(batch)
    samples = _samples(leaves, microbatch)
    with stand_in(), _errors_told():
        placed, notes = _placed(model)
        tracer = Tracer(device(), workspace_bytes=workspace_bytes)
        for role, tensors in (("parameters", placed.parameters()), ("buffers", placed.buffers())):
            for tensor in tensors:
                tracer.see(tensor, role)  # type: ignore[arg-type]  # both are roles
        given = _on_device(batch)
        for tensor in _tensors(given):
            tracer.see(tensor, "inputs")
        trained = [p for p in placed.parameters() if p.requires_grad]
        updates = _optimizer(optimizer, model, placed)
        run = _Run(tracer, placed, trained, updates, given, loss or _own_loss, precision)
        with tracer.mode, _roles_followed(tracer, trained, torch):
            for step in range(1, steps + 1):
                run.step(step, accumulation, set_to_none)
        counts = [
            sum(p.numel() for p in placed.parameters() if p.requires_grad == learns)
            for learns in (True, False)
        ]
        name, updated = type(placed).__name__, "none" if updates is None else type(updates).__name__
        trace = tracer.trace
        # What the step leaves behind is dropped here, after the trace has ended.
        trace = dataclasses.replace(trace, events=list(trace.events), marks=list(trace.marks))
    allocator = CachingAllocator()
    moments = [moment for moment in trace.replay(allocator) if moment.step > 0]
    return StepMemory(
        model=name,
        microbatch=samples,
        precision=precision,
        accumulation=accumulation,
        optimizer=updated,
        trainable=counts[0],
        frozen=counts[1],
        peaks=tuple(_peak(trace, moment) for moment in moments),
        reserved_bytes=allocator.peak_reserved_bytes,
        torch_version=torch.__version__,
        seconds=time.perf_counter() - begun,
        notes=tuple(notes),
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


# ---------------------------------------------------------------------------------------------------- the step


@dataclasses.dataclass(slots=True)
class _Run:
    """The step as it is traced. What lives in a frame here lives in the reader's own loop, too."""

    tracer: Tracer
    model: Any
    trained: list[Any]
    optimizer: Any
    batch: Any
    loss: Callable[..., Any]
    precision: Precision

    def step(self, number: int, accumulation: int, set_to_none: bool) -> None:
        for _ in range(accumulation):
            self.tracer.enter(number, "forward")
            value = self._forward()
            if accumulation > 1:
                value = value / accumulation
            self.tracer.enter(number, "backward")
            value.backward()
            del value
        self.tracer.enter(number, "optimizer")
        if self.optimizer is not None:
            self.optimizer.step()
            for state in self.optimizer.state.values():
                for tensor in _tensors(state):
                    self.tracer.see(tensor, "optimizer")
            self.optimizer.zero_grad(set_to_none=set_to_none)
        if set_to_none or self.optimizer is None:
            self.model.zero_grad(set_to_none=set_to_none)

    def _forward(self) -> Any:
        import torch

        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            value = _call(self.loss, self.model, self.batch)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            what = (
                f"a tensor of shape {tuple(value.shape)}"
                if isinstance(value, torch.Tensor)
                else repr(type(value))
            )
            raise StepFailedError(
                f"the loss is {what}; wanted one number: give loss=f, where f(model, *batch) returns it"
            )
        if not value.requires_grad:
            raise StepFailedError(
                "the loss depends on no parameter that learns (it has no graph): nothing would be trained"
            )
        return value


def _call(fn: Callable[..., Any], model: Any, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return fn(model, **batch)
    if isinstance(batch, (tuple, list)):
        return fn(model, *batch)
    return fn(model, batch)


def _own_loss(model: Any, *args: Any, **kwargs: Any) -> Any:
    made = model(*args, **kwargs)
    if isinstance(made, Mapping):
        return made.get("loss", made)
    return getattr(made, "loss", made)


@contextmanager
def _roles_followed(tracer: Tracer, trained: Sequence[Any], torch: Any) -> Iterator[None]:
    """Learn which storages the graph saves, and which become gradients."""

    def pack(tensor: Any) -> Any:
        if isinstance(tensor, torch.Tensor):
            tracer.see(tensor, "activations")
        # The tensor itself would hold the node that saves it, for ever.
        return tensor.detach()

    def accumulated(parameter: Any) -> None:
        if parameter.grad is not None:
            tracer.see(parameter.grad, "gradients")

    handles = [p.register_post_accumulate_grad_hook(accumulated) for p in trained]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
            yield
    finally:
        for handle in handles:
            handle.remove()


# ------------------------------------------------------------------------------------------- what the step takes


def _check(precision: Any, accumulation: Any, steps: Any, workspace_bytes: Any) -> None:
    if precision not in get_args(Precision):
        raise ValueError(f"precision is {precision!r}; wanted one of {', '.join(get_args(Precision))}")
    for name, value, least in (
        ("accumulation", accumulation, 1),
        ("steps", steps, 1),
        ("workspace_bytes", workspace_bytes, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}; wanted a whole number")
        if value < least:
            raise ValueError(f"{name} is {value}; wanted {least} or more")


def _tensors(tree: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _samples(leaves: Sequence[Any], microbatch: int | None) -> int:
    if not leaves:
        raise BatchError(
            "the batch holds no tensor; give what the model is called with, such as torch.empty(16, 3)"
        )
    for leaf in leaves:
        if leaf.numel() == 0:
            raise BatchError(
                f"the batch holds a tensor of shape {tuple(leaf.shape)}, with nothing in it: "
                "a step needs one sample or more"
            )
    if microbatch is not None:
        if isinstance(microbatch, bool) or not isinstance(microbatch, int) or microbatch < 1:
            raise BatchError(f"microbatch is {microbatch!r}; wanted a whole number, 1 or more")
        return microbatch
    return next((int(leaf.shape[0]) for leaf in leaves if leaf.dim()), 1)


def _on_device(tree: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, _twin, tree)


def _twin(tensor: Any) -> Any:
    """Make a tensor on the stand-in with the shape, strides and dtype of one that may be anywhere."""
    import torch

    # Moving a tensor keeps its strides where they leave no holes, and makes it contiguous otherwise.
    dense = _is_dense(tensor.size(), tensor.stride())
    with torch.no_grad():
        twin = (
            torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device())
            if dense
            else torch.empty(tensor.size(), dtype=tensor.dtype, device=device())
        )
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Say whether the elements fill their stretch of memory, each once, in whatever order of the axes."""
    expected = 1
    for step, length in sorted(pair for pair in zip(stride, size, strict=True) if pair[1] != 1):
        if step != expected:
            return False
        expected *= length
    return True


def _placed(model: Any) -> tuple[Any, list[str]]:
    """Copy the model with its parameters and buffers on the stand-in, tied ones still tied."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    made = model
    if not isinstance(model, torch.nn.Module):
        if not callable(model):
            raise ModelError(f"the model is {model!r}; wanted a torch.nn.Module or a function that makes one")
        made = _made(model)
        if not isinstance(made, torch.nn.Module):
            raise ModelError(f"the function made {type(made).__name__}; wanted a torch.nn.Module")
    if any(hasattr(part, "_orig_mod") for part in made.modules()):
        raise ModelError(
            "the model is compiled, and an eager step says nothing of a compiled one's peak: predict the module that "
            "was compiled (its _orig_mod), and read the result as the eager step's"
        )
    parameters = list(made.parameters())
    if not parameters:
        raise ModelError(f"{type(made).__name__} has no parameters: there is nothing to train")
    lazy: Any = vars(torch.nn.parameter)["UninitializedTensorMixin"]  # torch's types leave it out
    for name, tensor in (*made.named_parameters(), *made.named_buffers()):
        if isinstance(tensor, lazy):
            raise ModelError(
                f"{name} has no shape yet: run the lazy module once on a sample, then predict it"
            )
        if (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter, FakeTensor)
            or tensor.layout != torch.strided
        ):
            raise ModelError(
                f"{name} is a {type(tensor).__name__} of layout {tensor.layout}: what it holds cannot be counted"
            )
    if not any(p.requires_grad for p in parameters):
        raise ModelError(
            f"all {len(parameters)} parameters of {type(made).__name__} are frozen: requires_grad is False in each"
        )
    memo: dict[int, Any] = {id(t): _twin(t) for t in (*parameters, *made.buffers())}
    try:
        placed = copy.deepcopy(made, memo)
    except Exception as error:
        raise ModelError(
            f"{type(made).__name__} cannot be copied ({error}): give a function that makes it instead"
        ) from error
    notes = []
    if not placed.training:
        notes.append(
            "the model is in evaluation mode: call model.train() to predict dropout and batch norm in training"
        )
    return placed, notes


def _made(factory: Callable[[], Any]) -> Any:
    """Make a model without memory for its weights, or with, where their first values decide how it is made."""
    from torch._subclasses import fake_tensor

    try:
        return factory()
    except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException):
        with fake_tensor.unset_fake_temporarily():
            return factory()


def _optimizer(wanted: Any, model: Any, placed: Any) -> Any:
    import torch

    trained = [p for p in placed.parameters() if p.requires_grad]
    if wanted is None:
        return None
    if isinstance(wanted, str):
        found = getattr(torch.optim, wanted, None)
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            raise ValueError(
                f"torch.optim has no optimizer {wanted!r}; give a name such as 'AdamW', or the class"
            )
        name: Any = found
        return name(trained)
    if isinstance(wanted, torch.optim.Optimizer):
        return _rebuilt(wanted, model, placed)
    if callable(wanted):
        made = wanted(trained)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(
                f"the optimizer's function made {type(made).__name__}; wanted a torch.optim.Optimizer"
            )
        return made
    raise TypeError(
        f"the optimizer is {wanted!r}; wanted a class, a function of the parameters, a name or None"
    )


def _rebuilt(optimizer: Any, model: Any, placed: Any) -> Any:
    """Make an optimizer like one that exists, over the copies of its parameters, without its state."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ModelError("the optimizer is made already, so the model must be, too: give the module itself")
    twins = dict(zip(map(id, model.parameters()), placed.parameters(), strict=True))
    groups = []
    for group in optimizer.param_groups:
        strangers = [p for p in group["params"] if id(p) not in twins]
        if strangers:
            raise ModelError(f"{len(strangers)} parameters of the optimizer are none of the model's")
        groups.append({**group, "params": [twins[id(p)] for p in group["params"]]})
    made = copy.copy(optimizer)
    made.param_groups, made.state = groups, type(optimizer.state)(dict)
    return made


# ------------------------------------------------------------------------------------------------------ failures


@contextmanager
def _errors_told() -> Iterator[None]:
    """Turn what a trace without data cannot see into words."""
    from torch._subclasses import fake_tensor

    unseen = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
        fake_tensor.UnsupportedFakeTensorException,
        NotImplementedError,
    )
    try:
        yield
    except StepMemoryError:
        raise
    except unseen as error:
        raise UnseenError(f"{_line_of(error)} {_reason(error)}") from error
    except (TypeError, ValueError) as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename == __file__:
            raise  # a wrong argument
        raise StepFailedError(
            f"the step failed at {_line_of(error)} {type(error).__name__}: {error}"
        ) from error
    except Exception as error:
        text = str(error)
        if any(told in text for told in ("not compiled with CUDA", "NVIDIA driver", "No CUDA GPUs")):
            raise UnseenError(
                f"{_line_of(error)} asks the driver for something ({text.splitlines()[0]}), and a prediction has none: "
                "leave calls of torch.cuda out of what is predicted"
            ) from error
        if "data pointer" in text or ".numpy() is not supported" in text:
            raise UnseenError(f"{_line_of(error)} reads a tensor's values, and a trace has none") from error
        if "same device" in text or "different devices" in text:
            raise StepFailedError(
                f"{_line_of(error)} brings a tensor of the host together with one on the device ('{device()}' "
                "stands for the GPU here): make it there, with device=x.device"
            ) from error
        raise StepFailedError(
            f"the step failed at {_line_of(error)} {type(error).__name__}: {text}"
        ) from error


def _reason(error: Exception) -> str:
    from torch._subclasses import fake_tensor

    operator = str(getattr(error, "func", error))
    if isinstance(error, fake_tensor.DataDependentOutputException):
        return (
            f"asks for a value ({operator}): a trace without data has none, so it cannot see which way the step goes. "
            "Take the branch out of the step, or predict each way as a model of its own"
        )
    if isinstance(error, fake_tensor.DynamicOutputShapeException):
        return (
            f"makes a tensor whose shape depends on values ({operator}): its bytes cannot be seen without data. "
            "Use a form of fixed shape (torch.where, a mask that multiplies)"
        )
    return f"uses what cannot be traced without data: {error}"


def _line_of(error: BaseException) -> str:
    """Name the innermost line that is neither torch's nor ours."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename.replace("\\", "/") and frame.filename not in _own()
    ]
    if not frames:
        return "the step:"
    last = frames[-1]
    return f"{last.filename}:{last.lineno} ({last.line or last.name}):"


@functools.cache
def _own() -> frozenset[str]:
    from gpucourse import stand_in as first
    from gpucourse import storage_trace as second

    return frozenset(str(module.__file__) for module in (first, second)) | {__file__}
