"""A training step as a loop would run it, with every storage followed and told what it is for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

from gpucourse.placed_model import tensors
from gpucourse.step_errors import StepFailedError
from gpucourse.storage_trace import Tracer

__all__ = ["Precision", "Run", "check", "forward", "own_loss", "roles_followed"]

Precision = Literal["fp32", "tf32", "fp16", "bf16"]


def check(
    precision: object, *, compile: object = False, clip_norm: object = None, **counts: tuple[object, int]
) -> None:
    """Refuse a precision, a count, a way to compile or a limit that is none.

    Parameters
    ----------
    precision
        One of `Precision`.
    compile
        A boolean or "model".
    clip_norm
        A number above 0, or None.
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
    if not (isinstance(compile, bool) or compile == "model"):
        raise ValueError(f"compile is {compile!r}; wanted True (model and loss), 'model' or False")
    if clip_norm is None:
        return
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, (int, float)):
        raise TypeError(f"clip_norm is {clip_norm!r}; wanted a number, or None for no clipping")
    if not clip_norm > 0:
        raise ValueError(f"clip_norm is {clip_norm}; wanted a number above 0, or None for no clipping")


@dataclasses.dataclass(slots=True, kw_only=True)
class Run:
    """The step as it is traced. What lives in a frame here lives in the reader's own loop, too.

    Attributes
    ----------
    tracer
        Follows the storages.
    model
        On the stand-in.
    trained
        Its parameters that learn.
    optimizer
        Of these; None for none.
    batch
        On the stand-in.
    loss
        ``loss(model, *batch)`` or ``loss(model, **batch)``.
    precision
        Of the forward pass.
    scaler
        A `torch.amp.GradScaler`; None for none.
    clip_norm
        What the norm of all gradients is brought down to before the update; None where it is not.
    """

    tracer: Tracer
    model: Any
    trained: list[Any]
    optimizer: Any
    batch: Any
    loss: Callable[..., Any]
    precision: Precision
    scaler: Any = None
    clip_norm: float | None = None

    def step(self, number: int, accumulation: int, set_to_none: bool) -> None:
        """Run one step.

        Parameters
        ----------
        number
            From 1.
        accumulation
            Forward and backward passes before the update.
        set_to_none
            Whether the gradients are freed at the end.
        """
        for _ in range(accumulation):
            self.tracer.enter(number, "forward")
            value = self._forward()
            if accumulation > 1:
                value = value / accumulation
            if self.scaler is not None:
                value = self.scaler.scale(value)
            self.tracer.enter(number, "backward")
            value.backward()
            del value
        self.tracer.enter(number, "optimizer")
        if self.optimizer is not None:
            self._update()
            self.optimizer.zero_grad(set_to_none=set_to_none)
        if set_to_none or self.optimizer is None:
            self.model.zero_grad(set_to_none=set_to_none)

    def once(self) -> None:
        """Run forward and backward and drop the gradients, so that what compiles at first use is compiled."""
        self._forward().backward()
        self.model.zero_grad(set_to_none=True)

    def _update(self) -> None:
        import torch

        if self.scaler is not None:
            # `GradScaler.step` would ask whether a gradient is infinite, which no trace without data can tell, and
            # then does no more than this: the gradients are divided in place.
            self.scaler.unscale_(self.optimizer)
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.trained, self.clip_norm)
        self.optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        for state in self.optimizer.state.values():
            for tensor in tensors(state):
                self.tracer.see(tensor, "optimizer")

    def _forward(self) -> Any:
        return forward(self.loss, self.model, self.batch, self.precision)


def _call(fn: Callable[..., Any], model: Any, batch: Any) -> Any:
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


def forward(
    fn: Callable[..., Any],
    model: Any,
    batch: Any,
    precision: Precision,
    *,
    before_exit: Callable[[Any], object] | None = None,
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
        value = _call(fn, model, batch)
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


def own_loss(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the loss from what the model itself gives: its output, or the ``loss`` of its output.

    Parameters
    ----------
    model
        What is called.
    args, kwargs
        With what.
    """
    made = model(*args, **kwargs)
    if isinstance(made, Mapping):
        return made.get("loss", made)
    return getattr(made, "loss", made)


@contextmanager
def roles_followed(tracer: Tracer, trained: Sequence[Any], torch: Any) -> Iterator[None]:
    """Learn which storages the graph saves, and which become gradients.

    Parameters
    ----------
    tracer
        Is told.
    trained
        The parameters that learn.
    torch
        The module.
    """

    def pack(tensor: Any) -> Any:
        if isinstance(tensor, torch.Tensor):
            tracer.see(tensor, "activations")
        # The tensor itself would hold the node that saves it, for ever.
        return tensor.detach()

    def accumulated(parameter: Any) -> None:
        if parameter.grad is not None:
            tracer.see(parameter.grad, "gradients")

    linear = torch.nn.functional.linear

    @functools.wraps(linear)
    def seen(*args: Any, **kwargs: Any) -> Any:
        tracer.in_linear = True
        try:
            return linear(*args, **kwargs)
        finally:
            tracer.in_linear = False

    handles = [p.register_post_accumulate_grad_hook(accumulated) for p in trained]
    torch.nn.functional.linear = seen
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
            yield
    finally:
        torch.nn.functional.linear = linear
        for handle in handles:
            handle.remove()
