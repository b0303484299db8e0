"""What a training step is given, read and checked: the model, the batch, the loss and the optimizer.

A prediction and a measurement take the same arguments, mean the same by them and refuse the same ones, in the same
words.

>>> samples_in([], None)
Traceback (most recent call last):
...
gpucourse.step_parts.BatchError: the batch holds no tensor; give what the model is called with, such as \
torch.empty(16, 3)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import torch

__all__ = [
    "BatchError",
    "ModelError",
    "Precision",
    "StepFailedError",
    "StepMemoryError",
    "called",
    "check",
    "forward",
    "made_model",
    "made_optimizer",
    "own_loss",
    "samples_in",
    "tensors_in",
]

Precision = Literal["fp32", "tf32", "fp16", "bf16"]


class StepMemoryError(Exception):
    """Of this step nothing can be said."""


class ModelError(StepMemoryError, ValueError):
    """The model is none that can be trained."""


class BatchError(StepMemoryError, ValueError):
    """The batch is none that a step can take."""


class StepFailedError(StepMemoryError, RuntimeError):
    """The step gives no loss that can be trained on."""


def check(precision: object, **counts: tuple[object, int]) -> None:
    """Refuse a precision or a count that is none.

    Parameters
    ----------
    precision
        One of `Precision`.
    **counts
        By name: the value, and the least that it may be.

    Raises
    ------
    TypeError, ValueError
        One is something else.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision is {precision!r}; wanted one of {', '.join(get_args(Precision))}")
    for name, (value, least) in counts.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}; wanted a whole number")
        if value < least:
            raise ValueError(f"{name} is {value}; wanted {least} or more")


def tensors_in(tree: object) -> list[Any]:
    """List the tensors in lists, tuples and dicts, in order.

    Parameters
    ----------
    tree
        A batch, or the state of an optimizer.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def samples_in(leaves: Sequence[Any], microbatch: int | None) -> int:
    """Say how many samples a batch has.

    Parameters
    ----------
    leaves
        Its tensors.
    microbatch
        The number, where it is not the length of the first tensor's first axis.

    Raises
    ------
    BatchError
        There is no tensor, one with nothing in it, or the number is none.
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


def made_model(model: object) -> Any:
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


def made_optimizer(wanted: Any, model: Any, placed: Any) -> Any:
    """Make the optimizer of a copied model.

    Parameters
    ----------
    wanted
        A class, a function of the parameters that learn, a name in ``torch.optim``, an optimizer of `model`'s
        parameters, or None.
    model
        The module as it was given.
    placed
        Its copy on the device.

    Returns
    -------
    torch.optim.Optimizer or None
        Without state.

    Raises
    ------
    ModelError
        The optimizer is made already and its parameters are not the model's.
    TypeError, ValueError
        It is none of what it can be.
    """
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
        by_name: Any = found
        return by_name(trained)
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


def called(fn: Callable[..., Any], model: Any, batch: Any) -> Any:
    """Call ``fn(model, *batch)``, or ``fn(model, **batch)`` where the batch is a dict.

    Parameters
    ----------
    fn, model, batch
        As they were given.
    """
    if isinstance(batch, Mapping):
        return fn(model, **batch)
    if isinstance(batch, (tuple, list)):
        return fn(model, *batch)
    return fn(model, batch)


def own_loss(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the loss that a model gives: its output, or the ``loss`` of its output.

    Parameters
    ----------
    model
        The module.
    *args, **kwargs
        The batch.
    """
    made = model(*args, **kwargs)
    if isinstance(made, Mapping):
        return made.get("loss", made)
    return getattr(made, "loss", made)


def forward(
    fn: Callable[..., Any],
    model: Any,
    batch: Any,
    precision: Precision,
    *,
    before_exit: Callable[[torch.Tensor], object] | None = None,
) -> Any:
    """Run the forward pass in a precision, up to the loss.

    Parameters
    ----------
    fn
        Gives the loss: ``fn(model, *batch)``.
    model, batch
        On the device.
    precision
        "fp16" and "bf16" run under autocast.
    before_exit
        Called with the loss before autocast's context is left, which frees the casts that it cached.

    Returns
    -------
    torch.Tensor
        One number, with its graph.

    Raises
    ------
    StepFailedError
        The loss is something else.
    """
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
        value = called(fn, model, batch)
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
        if before_exit is not None:
            before_exit(value)
    return value
