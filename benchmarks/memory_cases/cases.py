"""Which steps are predicted and measured: each model in three ways, each way with two batch sizes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from memory_cases.models import KEPT_OUT, MODELS

PRECISIONS = ("fp32", "bf16", "fp16")
OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "SGD with momentum": functools.partial(torch.optim.SGD, lr=0.001, momentum=0.9),
    "fused AdamW": functools.partial(torch.optim.AdamW, fused=True),
}
CAP_BYTES = 24_000_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to train one model.

    Attributes
    ----------
    model, precision, optimizer
        Keys of `MODELS`, `PRECISIONS`, `OPTIMIZERS`.
    checkpointing
        Whether the blocks' activations are computed again.
    """

    model: str
    precision: str
    optimizer: str
    checkpointing: bool

    @property
    def kept_out(self) -> bool:
        """Whether the model was not looked at while the predictor was tuned."""
        return self.model in KEPT_OUT

    def as_dict(self) -> dict[str, Any]:
        """Give the way as plain data."""
        return {**dataclasses.asdict(self), "kept_out": self.kept_out}


def _ways() -> dict[str, tuple[Way, ...]]:
    """Go round the optimizers and the checkpointing from model to model, so that each meets each precision."""
    found = {}
    for i, model in enumerate(sorted(MODELS)):
        found[model] = tuple(
            Way(
                model=model,
                precision=precision,
                optimizer=list(OPTIMIZERS)[(i + j) % len(OPTIMIZERS)],
                checkpointing=(i + j) % 2 == 1,
            )
            for j, precision in enumerate(PRECISIONS)
        )
    return found


WAYS = _ways()
CASES = tuple(
    (way, samples) for ways in WAYS.values() for way in ways for samples in MODELS[way.model].batches
)

# Every second model, precisions and optimizers in turn.
SEARCHED = tuple(WAYS[model][2 * k % 3] for k, model in enumerate(sorted(MODELS)[::2]))
