"""A training step run for real on the GPU, with looks at the allocator between its phases.

The step is the one that `gpucourse.traced_step` traces, written as a reader writes it. No mode and no hook of
torch's is in it: either would change what autograd allocates.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gpucourse.live_memory import saved_tensors
from gpucourse.placed_model import is_compiled, optimizer_of, tensors
from gpucourse.step_errors import ModelError
from gpucourse.storage_trace import Role
from gpucourse.traced_step import Precision, forward

if TYPE_CHECKING:
    pass

__all__ = ["DEVICE", "INIT_SCALE", "Looks", "Run"]

DEVICE = "cuda"
INIT_SCALE = 1024.0  # of the scaler: torch's own 65,536 overflows in the first steps, which are then skipped


class Looks(Protocol):
    """Takes note of where in the allocator's history something was."""

    def mark(self, name: str) -> None:
        """Note that a phase begins.

        Parameters
        ----------
        name
            As `gpucourse.recorded_steps.RecordedSteps` reads it.
        """

    def see(self, tensors: Iterable[Any], role: Role) -> None:
        """Note where tensors lie, and what they are for.

        Parameters
        ----------
        tensors, role
            The tensors and their role.
        """


@dataclasses.dataclass(slots=True, kw_only=True)
class Run:
    """The step as a reader writes it, with looks at the allocator between its phases."""

    recorder: Looks
    precision: Precision
    accumulation: int
    set_to_none: bool
    compile: bool | Literal["model"]
    scaler: Any
    clip_norm: float | None
    allocated: list[int] = dataclasses.field(default_factory=list)  # the allocator's own peak of each step
    reserved: list[int] = dataclasses.field(default_factory=list)

    def all(self, model: Any, batch: Any, loss: Any, optimizer: Any, steps: int) -> dict[str, Any]:
        """Make model, batch and optimizer on the device and run the steps; nothing of them outlives the call."""
        import torch

        made = _made(model)
        parts = [name for name, part in made.named_modules() if is_compiled(part)]
        name = type(getattr(made, "_orig_mod", made)).__name__
        placed = _placed(made, copied=isinstance(model, torch.nn.Module))
        self.recorder.see(placed.parameters(), "parameters")
        self.recorder.see(placed.buffers(), "buffers")
        on_device = _on_device(batch)
        self.recorder.see(tensors(on_device), "inputs")
        updates = optimizer_of(optimizer, model, placed)
        whole = self.compile is True or hasattr(loss, "_torchdynamo_orig_callable")
        if self.compile is True and not hasattr(loss, "_torchdynamo_orig_callable"):
            loss = torch.compile(loss)
        elif self.compile == "model" and "" not in parts:
            placed = torch.compile(placed)
        compiled = "model and loss" if whole else "model" if self.compile or "" in parts else ", ".join(parts)
        if compiled:
            forward(loss, placed, on_device, self.precision).backward()
            placed.zero_grad(set_to_none=True)
        gc.collect()  # what making the model, or compiling it, has left in the cache is none of the step's
        torch.cuda.empty_cache()
        for step in range(1, steps + 1):
            torch.cuda.reset_peak_memory_stats()
            self.step(step, placed, on_device, loss, updates)
            self.allocated.append(torch.cuda.max_memory_allocated())
            self.reserved.append(torch.cuda.max_memory_reserved())
        self.recorder.mark("over")
        parameters = list(placed.parameters())
        return {
            "model": name,
            "compiled": compiled,
            "optimizer": "none" if updates is None else type(updates).__name__,
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "frozen": sum(p.numel() for p in parameters if not p.requires_grad),
            "evaluation": not placed.training,
            "skipped": self.scaler is not None and self.scaler.get_scale() < INIT_SCALE,
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
            recorder.see((value,), "temporaries")
            if self.accumulation > 1:
                value = value / self.accumulation
            if self.scaler is not None:
                value = self.scaler.scale(value)
            recorder.see((value,), "temporaries")
            recorder.mark(f"{number} backward")
            value.backward()
            del value
            recorder.see((p.grad for p in model.parameters() if p.grad is not None), "gradients")
        recorder.mark(f"{number} optimizer")
        if optimizer is not None:
            self._update(model, optimizer)
            recorder.see(tensors(list(optimizer.state.values())), "optimizer")
            optimizer.zero_grad(set_to_none=self.set_to_none)
        if self.set_to_none or optimizer is None:
            model.zero_grad(set_to_none=self.set_to_none)

    def _update(self, model: Any, optimizer: Any) -> None:
        import torch

        if self.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            trained = [p for p in model.parameters() if p.requires_grad]
            torch.nn.utils.clip_grad_norm_(trained, self.clip_norm)
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

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

    Autocast makes such a copy by an operator of its own: in the graph, the node of a product has an edge that leads,
    over views, to a cast and from there to the parameter, and saves the copy under the name of that input. A frozen
    weight's copy has no edge; it is known by its shape.
    """
    import torch

    small = (torch.bfloat16, torch.float16)
    frozen = {tuple(p.shape) for p in model.parameters() if not p.requires_grad and p.dtype == torch.float32}
    weights = {id(p) for p in model.parameters()}
    found: list[Any] = []
    visited: set[Any] = set()
    waiting: list[Any] = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        edges = [following for following, _ in node.next_functions]
        waiting += edges
        names = _INPUTS.get(type(node).__name__)
        if names is None:
            lengths = {n for edge in edges if (n := _cast_behind(edge, weights)) is not None}
            if lengths:
                found += [t for t in saved_tensors(node) if t.dtype in small and t.numel() in lengths]
            continue
        for name, edge in zip(names, edges, strict=False):
            saved = _saved_as(node, name)
            if saved is None or saved.dtype not in small:
                continue
            shapes = (tuple(saved.shape), tuple(saved.shape[::-1]))
            if _cast_behind(edge, weights) is not None or (edge is None and not frozen.isdisjoint(shapes)):
                found.append(saved)
    return found


# The inputs of the products' nodes in the order of their edges, by the names under which they are saved.
_INPUTS = {
    "AddmmBackward0": ("self", "mat1", "mat2"),
    "MmBackward0": ("self", "mat2"),
    "BmmBackward0": ("self", "mat2"),
    "BaddbmmBackward0": ("self", "batch1", "batch2"),
    "LinearBackward0": ("input", "weight", "bias"),
    "ConvolutionBackward0": ("input", "weight", "bias"),
}


def _saved_as(node: Any, name: str) -> Any:
    """Give an input that a node saves; None where it saves none, or where a hook packed it."""
    import torch

    try:
        data = getattr(node, f"_raw_saved_{name}").data
    except (AttributeError, RuntimeError):
        return None
    return data if isinstance(data, torch.Tensor) else None


def _cast_behind(node: Any, weights: set[int]) -> int | None:
    """Follow views down to a cast of a parameter; the parameter's number of elements, None where there is none."""
    for _ in range(6):
        if node is None:
            return None
        name, edges = type(node).__name__, node.next_functions
        if name == "ToCopyBackward0":
            end: Any = edges[0][0] if edges else None
            if type(end).__name__ != "AccumulateGrad" or id(end.variable) not in weights:
                return None
            return int(end.variable.numel())
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


def _made(model: object) -> Any:
    """Give the module: the one given, or what the function given makes.

    Parameters
    ----------
    model
        A `torch.nn.Module`, or a function of no arguments.

    Raises
    ------
    ModelError
        It is no module, has no parameters, none that learns, or one without a shape or that is no plain tensor.
    """
    import torch

    made: Any = model
    if not isinstance(model, torch.nn.Module):
        if not callable(model):
            raise ModelError(f"the model is {model!r}; wanted a torch.nn.Module or a function that makes one")
        made = model()
        if not isinstance(made, torch.nn.Module):
            raise ModelError(f"the function made {type(made).__name__}; wanted a torch.nn.Module")
    parameters = list(made.parameters())
    if not parameters:
        raise ModelError(f"{type(made).__name__} has no parameters: there is nothing to train")
    lazy: Any = vars(torch.nn.parameter)["UninitializedTensorMixin"]  # torch's types leave it out
    for name, tensor in (*made.named_parameters(), *made.named_buffers()):
        if isinstance(tensor, lazy):
            raise ModelError(f"{name} has no shape yet: run the lazy module once on a sample first")
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise ModelError(
                f"{name} is a {type(tensor).__name__} of layout {tensor.layout}: what it holds cannot be counted"
            )
    if not any(p.requires_grad for p in parameters):
        raise ModelError(
            f"all {len(parameters)} parameters of {type(made).__name__} are frozen: requires_grad is False in each"
        )
    return made
