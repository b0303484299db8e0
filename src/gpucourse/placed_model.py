"""A model, its batch and its optimizer, copied onto the stand-in for a GPU; the caller's own are left alone."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from gpucourse.compiled_program import region
from gpucourse.stand_in import device
from gpucourse.step_errors import BatchError, ModelError, UnseenError
from gpucourse.storage_trace import is_dense

__all__ = [
    "Placed",
    "flatten_recurrent",
    "is_compiled",
    "on_device",
    "optimizer_of",
    "placed",
    "samples",
    "tensors",
]


def tensors(tree: Any) -> list[Any]:
    """List the tensors in a tree of tuples, lists and dicts.

    Parameters
    ----------
    tree
        Anything.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def samples(leaves: Sequence[Any], microbatch: int | None) -> int:
    """Say how many samples a batch holds.

    Parameters
    ----------
    leaves
        Its tensors.
    microbatch
        What the caller said; None for the length of the first tensor's first axis.

    Raises
    ------
    BatchError
        There is no tensor, or one with nothing in it.
    """
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


def on_device(tree: Any) -> Any:
    """Put tensors on the stand-in in place of those of a tree.

    Parameters
    ----------
    tree
        Anything; its tensors may be anywhere.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, _twin, tree)


def _twin(tensor: Any) -> Any:
    """Make a tensor on the stand-in with the shape, strides and dtype of one that may be anywhere."""
    import torch

    # Moving a tensor keeps its strides where they leave no holes, and makes it contiguous otherwise.
    dense = is_dense(tensor.size(), tensor.stride())
    with torch.no_grad():
        twin = (
            torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device())
            if dense
            else torch.empty(tensor.size(), dtype=tensor.dtype, device=device())
        )
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad and tensor.is_leaf)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A model on the stand-in.

    Attributes
    ----------
    module
        The copy, its compiled parts replaced by what compiles them without a GPU.
    name
        Name of the model's class.
    compiled
        Names of the parts that the caller compiled; "" is the model itself.
    notes
        What was found on the way and should be known.
    """

    module: Any
    name: str
    compiled: tuple[str, ...]
    notes: tuple[str, ...]


def placed(model: Any) -> Placed:
    """Copy the model with its parameters and buffers on the stand-in, tied ones still tied.

    Parameters
    ----------
    model
        A module, or a function that makes one.

    Raises
    ------
    ModelError
        It is none that can be trained, or it cannot be copied.
    """
    import torch

    made = model
    if not isinstance(model, torch.nn.Module):
        if not callable(model):
            raise ModelError(f"the model is {model!r}; wanted a torch.nn.Module or a function that makes one")
        made = _made(model)
        if not isinstance(made, torch.nn.Module):
            raise ModelError(f"the function made {type(made).__name__}; wanted a torch.nn.Module")
    compiled = {name: part for name, part in made.named_modules() if is_compiled(part)}
    name = type(getattr(made, "_orig_mod", made)).__name__
    parameters = list(made.parameters())
    _check_tensors(made, name, parameters)
    memo: dict[int, Any] = {id(t): _twin(t) for t in (*parameters, *made.buffers())}
    try:
        for part in reversed(compiled.values()):  # what stands inside another one first
            memo[id(part)] = region(copy.deepcopy(getattr(part, "_orig_mod", part), memo))
        copied = copy.deepcopy(made, memo)
    except Exception as error:
        raise ModelError(
            f"{name} cannot be copied ({error}): give a function that makes it instead"
        ) from error
    notes = []
    if not copied.training:
        notes.append(
            "the model is in evaluation mode: call model.train() to predict dropout and batch norm in training"
        )
    return Placed(module=copied, name=name, compiled=tuple(compiled), notes=tuple(notes))


def is_compiled(part: Any) -> bool:
    """Say whether a module was compiled, by `torch.compile` or by its own ``compile()``.

    Parameters
    ----------
    part
        A module, or anything else: what cannot be compiled was not.
    """
    return hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None


def _check_tensors(made: Any, name: str, parameters: list[Any]) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if not parameters:
        raise ModelError(f"{name} has no parameters: there is nothing to train")
    lazy: Any = vars(torch.nn.parameter)["UninitializedTensorMixin"]  # torch's types leave it out
    for label, tensor in (*made.named_parameters(), *made.named_buffers()):
        if isinstance(tensor, lazy):
            raise ModelError(
                f"{label} has no shape yet: run the lazy module once on a sample, then predict it"
            )
        if (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter, FakeTensor)
            or tensor.layout != torch.strided
        ):
            raise ModelError(
                f"{label} is a {type(tensor).__name__} of layout {tensor.layout}: what it holds cannot be counted"
            )
    if not any(p.requires_grad for p in parameters):
        raise ModelError(
            f"all {len(parameters)} parameters of {name} are frozen: requires_grad is False in each"
        )
    for label, part in made.named_modules():
        if getattr(part, "sparse", False) is True and isinstance(
            part, (torch.nn.Embedding, torch.nn.EmbeddingBag)
        ):
            raise UnseenError(
                f"{label or name} has sparse=True: its gradient is a tensor of layout torch.sparse_coo, whose size "
                "depends on its values (a row for each index that the batch holds, once or more often). Predict with "
                f"sparse=False: the dense gradient, {part.weight.numel() * part.weight.element_size():,} bytes, is "
                "more than a sparse one's values if the batch holds fewer indices than the table has rows"
            )


def _made(factory: Callable[[], Any]) -> Any:
    """Make a model without memory for its weights, or with, where their first values decide how it is made."""
    from torch._subclasses import fake_tensor

    try:
        return factory()
    except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException):
        with fake_tensor.unset_fake_temporarily():
            return factory()


def optimizer_of(wanted: Any, model: Any, copied: Any) -> Any:
    """Make the optimizer of a copied model's parameters; None for none.

    Parameters
    ----------
    wanted
        As `gpucourse.step_memory.predict_step_memory` takes it.
    model
        What the caller gave.
    copied
        Its copy on the stand-in.

    Raises
    ------
    ModelError
        It is one of other parameters.
    UnseenError
        Its step evaluates the model as often as values tell it to.
    TypeError, ValueError
        It is no optimizer.
    """
    made = _made_optimizer(wanted, model, copied)
    if made is not None:
        _check_closure(made)
    return made


def _made_optimizer(wanted: Any, model: Any, copied: Any) -> Any:
    import torch

    trained = [p for p in copied.parameters() if p.requires_grad]
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
        return _rebuilt(wanted, model, copied)
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


def _check_closure(made: Any) -> None:
    """Refuse an optimizer that needs a closure: L-BFGS decides by values how often it calls it."""
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is None or closure.default is not inspect.Parameter.empty:
        return
    name = type(made).__name__
    group = made.param_groups[0]
    told = ""
    if "history_size" in group:
        numbers = sum(p.numel() for p in group["params"])
        nbytes = sum(p.numel() * p.element_size() for p in group["params"])
        told = (
            f" Its history alone grows to 2 x {group['history_size']} x {numbers:,} numbers, "
            f"{2 * group['history_size'] * nbytes:,} bytes."
        )
    raise UnseenError(
        f"{name}.step needs a closure, which it calls as often as the loss's values tell it to: a trace without data "
        f"cannot see how often, nor what of its history lives.{told} Predict the forward and backward pass with "
        "optimizer=None, and measure the rest"
    )


def _rebuilt(optimizer: Any, model: Any, copied: Any) -> Any:
    """Make an optimizer like one that exists, over the copies of its parameters, without its state."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ModelError("the optimizer is made already, so the model must be, too: give the module itself")
    twins = dict(zip(map(id, model.parameters()), copied.parameters(), strict=True))
    groups = []
    for group in optimizer.param_groups:
        strangers = [p for p in group["params"] if id(p) not in twins]
        if strangers:
            raise ModelError(f"{len(strangers)} parameters of the optimizer are none of the model's")
        groups.append({**group, "params": [twins[id(p)] for p in group["params"]]})
    made = copy.copy(optimizer)
    made.param_groups, made.state = groups, type(optimizer.state)(dict)
    return made


def flatten_recurrent(module: Any, see: Callable[[Any, Any], None]) -> None:
    """Lay the weights of each recurrent layer side by side in one block, as its move to the device does.

    The blocks in which they came are given back, but stay reserved: ``flatten_parameters`` in
    ``torch/nn/modules/rnn.py``.

    Parameters
    ----------
    module
        On the stand-in; its weights move.
    see
        Is told of each block and that it holds parameters, as `gpucourse.storage_trace.Tracer.see` is.
    """
    import torch

    for part in module.modules():
        if not isinstance(part, torch.nn.RNNBase):
            continue
        weights = [w for w in part._flat_weights if isinstance(w, torch.Tensor)]
        if len({w.dtype for w in weights}) != 1 or len({w.untyped_storage()._cdata for w in weights}) != len(
            weights
        ):
            continue  # shared or mixed weights stay where they are
        with torch.no_grad():
            flat = weights[0].new_empty(sum(w.numel() for w in weights))
            see(flat, "parameters")
            for weight, room in zip(weights, torch.split(flat, [w.numel() for w in weights]), strict=True):
                weight.data = room.view(weight.shape)
