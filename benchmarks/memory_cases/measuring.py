"""What the allocator says of a step on the device."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memory_cases.cases import CAP_BYTES, OPTIMIZERS, Way
from memory_cases.models import MODELS, batch_of, checkpointed, made
from memory_cases.predicting import AUTOCAST, boundary

STEPS = 3
_kept: dict[str, torch.nn.Module] = {}


def fresh(way: Way) -> torch.nn.Module:
    """Give the model on the host; one is kept, for its next cases."""
    if way.model not in _kept:
        _kept.clear()
        _kept[way.model] = made(way.model, False)
    model = copy.deepcopy(_kept[way.model])
    return checkpointed(way.model, model) if way.checkpointing else model


def clean() -> int:
    """Give all back to the driver, the libraries' workspaces included; what is still allocated, in bytes."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def steps(way: Way, samples: int) -> tuple[list[int], int]:
    """Run the steps, and give the allocated peak of each and the most that was reserved, in bytes.

    Parameters
    ----------
    way, samples
        The case.
    """
    model = fresh(way).cuda()
    batch = batch_of(way.model, samples, "cuda")
    optimizer = OPTIMIZERS[way.optimizer](model.parameters())
    dtype = AUTOCAST.get(way.precision)
    peaks, reserved = [], 0
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            value = MODELS[way.model].loss(model, *batch)
        value.backward()
        del value
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        reserved = max(reserved, torch.cuda.max_memory_reserved())
    return peaks, reserved


def measure(way: Way, samples: int) -> dict[str, Any]:
    """Measure a case from an empty allocator.

    Parameters
    ----------
    way, samples
        The case.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    left = clean()
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    peaks, reserved = steps(way, samples)
    found = {
        "allocated_bytes": max(peaks) - left,
        "reserved_bytes": reserved,
        "steps_bytes": [peak - left for peak in peaks],
        "left_bytes": left,
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "seconds": time.perf_counter() - begun,
    }
    clean()
    return found


@contextmanager
def capped(limit_bytes: int) -> Iterator[None]:
    """Let the process reserve no more than this.

    Parameters
    ----------
    limit_bytes
        The cap.
    """
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# cuDNN tries its engines one by one, and passes over those whose workspace the allocator refuses.
NO_ENGINE_LEFT = "unable to find an engine"


def refusal(way: Way, samples: int, limit_bytes: int) -> str:
    """Run the steps under the cap, from an empty allocator, and give what refused them; "" where they ran.

    Parameters
    ----------
    way, samples
        The case.
    limit_bytes
        The cap.

    Raises
    ------
    RuntimeError
        They failed for another reason than memory.
    """
    clean()
    why = ""
    try:
        with capped(limit_bytes):
            steps(way, samples)
    except torch.cuda.OutOfMemoryError:
        why = "allocator"
    except RuntimeError as error:
        if NO_ENGINE_LEFT not in str(error):
            raise
        why = "cuDNN: no engine left"
    clean()  # after the except blocks, whose tracebacks hold the frame's tensors
    return why


def largest(
    way: Way, peaks: list[list[int]], also: list[int], limit_bytes: int = CAP_BYTES
) -> dict[str, Any]:
    """Find the largest microbatch that runs under the cap, by bisection from two measured peaks.

    Parameters
    ----------
    way
        How the model is trained.
    peaks
        Two pairs of microbatch and measured allocated peak in bytes.
    also
        Microbatches to try whatever the search says: the predicted ones.
    limit_bytes
        The cap.

    Returns
    -------
    dict
        ``microbatch``; ``tried``: [microbatch, whether it ran]; ``refused``: what refused, by microbatch.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    begun = time.perf_counter()
    (least, low), (more, high) = peaks
    refused: dict[int, str] = {}

    def fits(samples: int) -> bool:
        if samples not in refused:
            refused[samples] = refusal(way, samples, limit_bytes)
        return not refused[samples]

    # Reserved runs some percent above allocated: begin a little below what allocated alone would let through.
    best = boundary(fits, int((more + (limit_bytes - high) * (more - least) / (high - low)) * 0.97))
    for samples in also:
        fits(samples)
    return {
        "microbatch": best,
        "tried": [[samples, not why] for samples, why in sorted(refused.items())],
        "refused": {str(samples): why for samples, why in sorted(refused.items()) if why},
        "seconds": time.perf_counter() - begun,
    }
