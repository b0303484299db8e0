"""A small GPT, plain enough to be read beside its trace. Importing this needs torch.

Shapes in the comments: B examples, T tokens each, W numbers a token, H heads of D = W / H numbers, V words.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from gpucourse.gpt_config import GPTConfig

__all__ = ["GPT", "Attention", "Block"]


class Attention(nn.Module):
    """Each token gathers from itself and the tokens before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)  # one product in place of three
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens of each example; (B, T, W) in and out."""
        B, T, W = x.shape  # noqa: N806 - the letters of the comments
        q, k, v = self.qkv(x).split(W, dim=2)  # (B, T, 3W) -> three views (B, T, W)
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in (q, k, v))  # (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
        return self.out(y.transpose(1, 2).reshape(B, T, W))  # type: ignore[no-any-return]  # a module's call


class Block(nn.Module):
    """Attention, then an MLP on each token; both add to the stream that passes by."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Add both parts to the stream; (B, T, W) in and out."""
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))  # type: ignore[no-any-return]  # (B, T, 4W) inside


class GPT(nn.Module):
    """Tokens in, a score for each possible next token out.

    Parameters
    ----------
    config
        Its shape.

    Raises
    ------
    TypeError
        `config` is no `GPTConfig`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if not isinstance(config, GPTConfig):
            raise TypeError(f"GPT takes a GPTConfig, such as night_config(), not {config!r}")
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.token.weight  # one table for words that come in and words that go out
        self.apply(_initialize)
        # Each block adds to the stream twice. Its last matrices start smaller, so that the sum of 2·layers
        # contributions starts as large as one would be.
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Score the next token at every place.

        Parameters
        ----------
        tokens
            (B, T) whole numbers from 0 to V − 1; T at most the context. One beyond V is an error on the CPU
            and stops the process's CUDA work on a GPU.

        Returns
        -------
        torch.Tensor
            (B, T, V) logits; those at place t depend on the tokens 0 to t.

        Raises
        ------
        TypeError, ValueError
            The tokens are no whole numbers, not of shape (B, T), or more than the context.
        """
        _check_tokens(tokens, self.config.context)
        places = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
        x = self.token(tokens) + self.position(places)  # (B, T, W) + (T, W)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]  # (B, T, V)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _check_tokens(tokens: Tensor, context: int) -> None:
    if not isinstance(tokens, Tensor):
        raise TypeError(
            f"tokens are a {type(tokens).__name__}; wanted a tensor of whole numbers, torch.int64"
        )
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"tokens are {tokens.dtype}; wanted whole numbers, torch.int64")
    if tokens.dim() != 2 or tokens.numel() == 0:
        raise ValueError(
            f"tokens have the shape {tuple(tokens.shape)}; wanted (examples, tokens), at least (1, 1)"
        )
    if tokens.shape[1] > context:
        raise ValueError(f"a row has {tokens.shape[1]} tokens and the model's context is {context}; cut it")
