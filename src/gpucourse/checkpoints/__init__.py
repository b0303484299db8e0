"""Checkpoints: ``check("kernels.busy", answer)`` says right, wrong with the likely slip, or not answered yet.

One module a chapter, loaded when one of its ids is first checked; each draws fresh random inputs, odd sizes
among them, and needs no GPU.
"""

from __future__ import annotations

from gpucourse.checkpoints._core import (
    UnknownCheckpointError,
    Verdict,
    Wrong,
    call,
    check,
    checkpoint,
    ids,
    items,
    judge,
    keys,
    number,
    show,
    whole,
    word,
)

__all__ = [
    "UnknownCheckpointError",
    "Verdict",
    "Wrong",
    "call",
    "check",
    "checkpoint",
    "ids",
    "items",
    "judge",
    "keys",
    "number",
    "show",
    "whole",
    "word",
]
