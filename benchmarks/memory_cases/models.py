"""Fifteen models with random weights, from configurations alone: nothing is downloaded.

A third of them is kept out while the predictor is tuned. The rule was fixed before any figure was seen: the models in
the alphabetical order of their names, and of these every third one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model of the comparison.

    Attributes
    ----------
    what
        What it is, in words.
    make
        Makes it.
    batch
        Gives (kind, shape) of each tensor of a batch of so many samples; the kind is the number of words for whole
        numbers, 0 for real ones.
    loss
        ``loss(model, *batch)``.
    blocks
        The classes whose calls are checkpointed, by name; () where the model has a switch of its own.
    batches
        The two sizes that are measured.
    source
        The package that it comes from; "" for a definition of our own.
    transformer
        Layers, width, heads and tokens a sample, for the estimator that knows transformers alone.
    """

    what: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], list[tuple[int, tuple[int, ...]]]]
    loss: Callable[..., torch.Tensor]
    blocks: tuple[str, ...] = ()
    batches: tuple[int, int]
    source: str = ""
    transformer: tuple[int, int, int, int] | None = None


# ------------------------------------------------------------------------------------------ definitions of our own


class Recurrent(nn.Module):
    """Words, two LSTM layers one by one, and a head over the words."""

    def __init__(self, words: int = 10_000, width: int = 512, hidden: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.LSTM(size, hidden, batch_first=True) for size in (width, hidden))
        self.head = nn.Linear(hidden, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Score the next word: (B, T) to (B, T, words)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


class Hidden(nn.Module):
    """One hidden layer of the MLP, added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, width) to (B, width)."""
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def mlp(width: int = 1024, layers: int = 6) -> nn.Module:
    """Make a multilayer perceptron of residual layers."""
    return nn.Sequential(
        nn.Linear(256, width), *(Hidden(width) for _ in range(layers)), nn.Linear(width, 100)
    )


class Twice(nn.Sequential):
    """Two convolutions, each normalized."""

    def __init__(self, a: int, b: int) -> None:
        parts: list[nn.Module] = []
        for channels in (a, b):
            parts += [
                nn.Conv2d(channels, b, 3, padding=1, bias=False),
                nn.BatchNorm2d(b),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*parts)


class UNet(nn.Module):
    """Down four times, up four times, with the way across at each size."""

    def __init__(self, classes: int = 21, width: int = 32) -> None:
        super().__init__()
        widths = [width * 2**k for k in range(5)]
        self.down = nn.ModuleList(Twice(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(Twice(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Score each pixel: (B, 3, H, W) to (B, classes, H, W)."""
        across = []
        for block in self.down[:-1]:
            x = block(x)
            across.append(x)
            x = F.max_pool2d(x, 2)
        x = self.down[-1](x)
        for k in reversed(range(4)):
            x = self.up[k](torch.cat([across.pop(), self.widen[k](x)], 1))
        return self.head(x)


# ------------------------------------------------------------------------------------------------- from packages


def _night() -> nn.Module:
    from gpucourse.training import GPT, night_config

    return GPT(night_config())


def _vision(name: str) -> nn.Module:
    import torchvision

    return getattr(torchvision.models, name)(weights=None)


def _hub(kind: str, head: str, **config: Any) -> nn.Module:
    import transformers

    return getattr(transformers, kind + head)(
        getattr(transformers, f"{kind}Config")(use_cache=False, **config)
    )


def _classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def _next_word(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def _own_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(input_ids=x, labels=y).loss


def _words(count: int, tokens: int) -> Callable[[int], list[tuple[int, tuple[int, ...]]]]:
    return lambda b: [(count, (b, tokens)), (count, (b, tokens))]


def _pictures(size: int, classes: int = 1000) -> Callable[[int], list[tuple[int, tuple[int, ...]]]]:
    return lambda b: [(0, (b, 3, size, size)), (classes, (b,))]


def _of_torchvision(name: str, what: str, batches: tuple[int, int], *blocks: str, **more: Any) -> Model:
    return Model(
        what=what,
        make=functools.partial(_vision, name),
        batch=_pictures(224),
        loss=_classify,
        blocks=blocks,
        batches=batches,
        source="torchvision",
        **more,
    )


def _of_transformers(
    make: Callable[[], nn.Module],
    what: str,
    words: int,
    batches: tuple[int, int],
    sizes: tuple[int, int, int, int],
) -> Model:
    return Model(
        what=what,
        make=make,
        batch=_words(words, sizes[3]),
        loss=_own_loss,
        batches=batches,
        source="transformers",
        transformer=sizes,
    )


MODELS: dict[str, Model] = {
    "bert": _of_transformers(
        functools.partial(_hub, "Bert", "ForMaskedLM"),
        "encoder, 110 M parameters, 512 tokens",
        30_522,
        (8, 16),
        (12, 768, 12, 512),
    ),
    "convnext": _of_torchvision("convnext_tiny", "ConvNeXt tiny, 224²", (32, 64), "CNBlock"),
    "densenet": _of_torchvision("densenet121", "DenseNet 121, 224²", (32, 64), "_DenseBlock"),
    "efficientnet": _of_torchvision("efficientnet_b0", "EfficientNet B0, 224²", (48, 96), "MBConv"),
    "gpt2": _of_transformers(
        functools.partial(_hub, "GPT2", "LMHeadModel"),
        "decoder, 124 M parameters, 1,024 tokens, dropout",
        50_257,
        (3, 6),
        (12, 768, 12, 1024),
    ),
    "llama": _of_transformers(
        functools.partial(
            _hub,
            "Llama",
            "ForCausalLM",
            vocab_size=32_000,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=4,
            max_position_embeddings=1024,
        ),
        "decoder with 3 query heads a key head, 1,024 tokens",
        32_000,
        (4, 8),
        (12, 768, 12, 1024),
    ),
    "lstm": Model(
        what="two LSTM layers, 1,024 wide, 256 tokens",
        make=Recurrent,
        batch=_words(10_000, 256),
        loss=_next_word,
        blocks=("LSTM",),
        batches=(48, 96),
    ),
    "mlp": Model(
        what="six residual hidden layers, 1,024 wide",
        make=mlp,
        batch=lambda b: [(0, (b, 256)), (100, (b,))],
        loss=_classify,
        blocks=("Hidden",),
        batches=(2048, 16_384),
    ),
    "mobilenet": _of_torchvision(
        "mobilenet_v3_large", "MobileNet V3 large, 224²", (48, 128), "InvertedResidual"
    ),
    "night": Model(
        what="the night's decoder, 124 M parameters, 1,024 tokens",
        make=_night,
        batch=_words(50_304, 1024),
        loss=_next_word,
        blocks=("Block",),
        batches=(4, 8),
        transformer=(12, 768, 12, 1024),
    ),
    "resnet": _of_torchvision("resnet50", "ResNet 50, 224²", (32, 64), "Bottleneck"),
    "swin": _of_torchvision("swin_t", "Swin tiny, 224²", (32, 64), "SwinTransformerBlock"),
    "t5": _of_transformers(
        functools.partial(_hub, "T5", "ForConditionalGeneration", decoder_start_token_id=0),
        "encoder and decoder, 60 M parameters, 512 tokens each",
        32_128,
        (4, 8),
        (12, 512, 8, 512),
    ),
    "unet": Model(
        what="U-Net, 32 channels at full size, 256²",
        make=UNet,
        batch=lambda b: [(0, (b, 3, 256, 256)), (21, (b, 256, 256))],
        loss=_classify,
        blocks=("Twice",),
        batches=(16, 32),
    ),
    "vit": _of_torchvision(
        "vit_b_16", "ViT B, 16² a patch, 224²", (32, 64), "EncoderBlock", transformer=(12, 768, 12, 197)
    ),
}

KEPT_OUT = tuple(sorted(MODELS)[2::3])
"""Not looked at while the predictor is tuned; the headline figures are theirs."""


def made(name: str, checkpointing: bool) -> nn.Module:
    """Make a model in training mode, its blocks checkpointed if asked for.

    Parameters
    ----------
    name
        A key of `MODELS`.
    checkpointing
        Whether each block's forward pass is run again in the backward pass instead of being kept.
    """
    model = MODELS[name].make().train()
    return checkpointed(name, model) if checkpointing else model


def checkpointed(name: str, model: nn.Module) -> nn.Module:
    """Have a model's blocks run again in the backward pass; changes the model and gives it back.

    Parameters
    ----------
    name
        A key of `MODELS`.
    model
        Made by it.

    Raises
    ------
    ValueError
        It has none of these blocks.
    """
    kind = MODELS[name]
    if not kind.blocks:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model
    found = [part for part in model.modules() if type(part).__name__ in kind.blocks]
    if not found:
        raise ValueError(f"{name} has no {' or '.join(kind.blocks)} to checkpoint")
    for part in found:
        part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False)
    return model


def batch_of(name: str, samples: int, device: str) -> tuple[torch.Tensor, ...]:
    """Make a batch; on "meta" it has shapes alone.

    Parameters
    ----------
    name
        A key of `MODELS`.
    samples
        How many.
    device
        Where.
    """
    return tuple(
        torch.randint(words, shape, device=device) if words else torch.randn(*shape, device=device)
        for words, shape in MODELS[name].batch(samples)
    )


def batches_of(name: str) -> tuple[int, int]:
    """Give the two sizes that are measured.

    Parameters
    ----------
    name
        A key of `MODELS`.
    """
    return MODELS[name].batches


def described() -> dict[str, dict[str, str]]:
    """Say of each model what it is and which package it comes from."""
    return {name: {"what": model.what, "source": model.source} for name, model in MODELS.items()}
