"""One training step, plain enough that every kernel of its trace can be found in it.

The model is `GPT` (in `gpucourse.gpt`, loaded when first asked for, since it needs torch), its shape a
`GPTConfig` (in `gpucourse.gpt_config`, which does not).

>>> night_config().parameters
124475904
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, get_args

from gpucourse.gpt_config import GPTConfig, night_config
from gpucourse.measured_roof import tf32_products
from gpucourse.work import short

if TYPE_CHECKING:
    import torch

    from gpucourse.gpt import GPT

__all__ = [
    "GPT",
    "METHOD_VERSION",
    "GPTConfig",
    "Precision",
    "next_token_loss",
    "night_config",
    "plain_step",
    "random_tokens",
]

METHOD_VERSION = 1  # rises when the model or the step does other work than before

Precision = Literal["fp32", "tf32", "bf16", "fp16"]

# In fp16 the smallest gradients would round to 0. A fixed factor lifts them and leaves the largest below 65,504
# for the models of this course; it is not adjusted while training, which `torch.amp.GradScaler` would do.
FP16_LOSS_SCALE = 1024.0


def __getattr__(name: str) -> Any:
    if name == "GPT":
        from gpucourse.gpt import GPT

        return GPT
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def random_tokens(
    config: GPTConfig, examples: int, *, device: str = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a batch of random tokens, and as targets the token that follows each.

    Parameters
    ----------
    config
        Shape of the model.
    examples
        Rows; each has ``config.context`` tokens.
    device
        Where the batch goes: "cpu" or "cuda".
    seed
        The same seed gives the same tokens on every device.

    Returns
    -------
    tuple of torch.Tensor
        Tokens and targets, both (examples, context) int64.

    Raises
    ------
    TypeError, ValueError
        `examples` or `seed` is no whole number, `examples` is below 1, or `seed` has more than 64 bits.
    """
    import torch

    for name, value in (("examples", examples), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} must be a whole number, not {value!r}")
    if examples < 1:
        raise ValueError(f"examples is {examples}; wanted 1 or more")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {short(seed)}; wanted one of 64 bits")
    examples = int(examples)
    generator = torch.Generator().manual_seed(int(seed))
    drawn = torch.randint(config.vocabulary, (examples, config.context + 1), generator=generator)
    return drawn[:, :-1].to(device), drawn[:, 1:].to(device)


def next_token_loss(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Give the mean cross-entropy of the tokens that follow.

    Parameters
    ----------
    model
        Maps (B, T) tokens to (B, T, V) logits.
    tokens, targets
        (B, T) each, int64; a target of −100 does not count.

    Returns
    -------
    torch.Tensor
        One number, with its graph.
    """
    import torch.nn.functional as F  # noqa: N812 - its usual name

    logits = model(tokens)  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # (B·T, V) and (B·T,)


def plain_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    precision: Precision = "fp32",
    *,
    loss_of: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Train on one batch: forward, loss, backward, optimizer step, gradients freed.

    Parameters
    ----------
    model
        Maps (B, T) tokens to (B, T, V) logits: a `GPT`, or what ``torch.compile`` made of it.
    optimizer
        Of the model's parameters, which are fp32 whatever the precision.
    tokens, targets
        (B, T) each, int64; a target of −100 does not count. Where none counts, the loss and the gradients are NaN,
        and so are the model's weights afterwards: what a mean over nothing is cannot be told without a wait.
    precision
        What the products run in. "fp32": fp32, tf32 off. "tf32": fp32 tensors, products on the tensor cores.
        "bf16", "fp16": under autocast; fp16 with a loss scaled by a fixed 1,024.
    loss_of
        What gives the loss: `next_token_loss` by default, or what ``torch.compile`` made of it, which fuses
        model and loss; compiling the model alone leaves the loss eager.

    Returns
    -------
    torch.Tensor
        The mean loss a token, detached, on the model's device. Reading its value (``.item()``) waits for it.

    Raises
    ------
    TypeError, ValueError
        The precision is none of these, tokens and targets are no tensors or differ in shape, or targets are not int64.

    Examples
    --------
    >>> import torch
    >>> from gpucourse.training import GPT
    >>> config = GPTConfig(layers=1, width=16, heads=2, vocabulary=11, context=8)
    >>> model = GPT(config)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> plain_step(model, optimizer, *random_tokens(config, 4)).shape
    torch.Size([])
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision is {precision!r}; wanted one of {', '.join(get_args(Precision))}")
    _check_batch(tokens, targets, own_loss=loss_of is not None)
    if tokens.shape != targets.shape:
        raise ValueError(
            f"tokens have the shape {tuple(tokens.shape)} and targets {tuple(targets.shape)}; "
            "each token needs the one that follows it"
        )
    with tf32_products(precision == "tf32"):
        with _autocast(precision, tokens.device.type):
            loss = (loss_of or next_token_loss)(model, tokens, targets)
        if precision == "fp16":
            (loss * FP16_LOSS_SCALE).backward()  # type: ignore[no-untyped-call]
            _divide_gradients(optimizer, FP16_LOSS_SCALE)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def _check_batch(tokens: object, targets: object, own_loss: bool) -> None:
    """Refuse what torch would name deep inside the step, or after the forward pass; looks at no value."""
    import torch

    for name, given in (("tokens", tokens), ("targets", targets)):
        if not isinstance(given, torch.Tensor):
            raise TypeError(f"{name} are a {type(given).__name__}; wanted a tensor, such as torch.tensor(…)")
        if name == "targets" and not own_loss and given.dtype != torch.int64:
            raise TypeError(f"targets are {given.dtype}; wanted torch.int64, as the loss takes them")


def _autocast(precision: Precision, device: str) -> Any:
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None)


def _divide_gradients(optimizer: torch.optim.Optimizer, factor: float) -> None:
    import torch

    found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if found:
        torch._foreach_mul_(found, 1.0 / factor)
