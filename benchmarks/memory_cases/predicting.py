"""What is known of a step before any GPU is touched: our prediction and four peers'."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import nn

from memory_cases.cases import CAP_BYTES, OPTIMIZERS, Way
from memory_cases.models import MODELS, batch_of, made

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def told(error: Exception) -> str:
    """Write an error in one line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]


def ours(way: Way, samples: int) -> Any:
    """Predict a step with gpucourse."""
    from gpucourse.step_memory import predict_step_memory

    return predict_step_memory(
        lambda: made(way.model, way.checkpointing),
        batch_of(way.model, samples, "meta"),
        loss=MODELS[way.model].loss,
        optimizer=OPTIMIZERS[way.optimizer],
        precision=way.precision,
    )


def plain_tracker(way: Way, samples: int) -> int:
    """Give the peak in bytes by torch's own tracker: two steps on fake tensors of the CPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with torch.device("meta"):
        empty = made(way.model, way.checkpointing)
    with FakeTensorMode(allow_non_fake_inputs=True):
        # Made in here, some models ask for values on the way. A copy keeps tied weights tied.
        tensors = (*empty.parameters(), *empty.buffers())
        model = copy.deepcopy(empty, {id(t): _on_cpu(t) for t in tensors})
        batch = batch_of(way.model, samples, "cpu")
        optimizer = OPTIMIZERS[way.optimizer](model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *batch)
        dtype = AUTOCAST.get(way.precision)
        with tracker:
            for step in range(2):
                with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                    value = MODELS[way.model].loss(model, *batch)
                value.backward()
                del value
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    made_here = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(made_here) if isinstance(tensor, nn.Parameter) else made_here


def accelerate_estimate(way: Way) -> int:
    """Give what ``accelerate estimate-memory`` prints for training with Adam, in bytes, from its own functions."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils.modeling import calculate_maximum_sizes

    with torch.device("meta"):
        model = made(way.model, False)
    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[way.precision]
    return int(max(estimate_training_usage(calculate_maximum_sizes(model)[0], dtype).values()))


def mlsysim_estimate(way: Way, samples: int, parameters: int) -> int | None:
    """Give mlsysim's training memory in bytes, told whether all is computed again; None for what is no transformer."""
    sizes = MODELS[way.model].transformer
    if sizes is None:
        return None
    from mlsysim import Hardware
    from mlsysim.core.units import ureg
    from mlsysim.models.types import TransformerWorkload
    from mlsysim.solvers import TrainingMemoryModel

    layers, width, heads, tokens = sizes
    workload = TransformerWorkload(
        name=way.model,
        architecture="Transformer",
        parameters=parameters * ureg.count,
        layers=layers,
        hidden_dim=width,
        heads=heads,
    )
    found = TrainingMemoryModel().solve(
        workload,
        Hardware.Cloud.H200,
        batch_size=samples,
        seq_len=tokens,
        precision=way.precision,
        optimizer="sgd" if way.optimizer.startswith("SGD") else "adamw",
        activation_checkpointing="full" if way.checkpointing else "none",
    )
    return int(found.total_memory.to("byte").magnitude)


def predict(way: Way, samples: int) -> dict[str, Any]:
    """Predict a case with gpucourse.

    Parameters
    ----------
    way, samples
        The case.
    """
    begun = time.perf_counter()
    step = ours(way, samples)
    peak = step.peak
    return {
        "allocated_bytes": step.allocated_bytes,
        "reserved_bytes": step.reserved_bytes,
        "steps_bytes": [peak.allocated_bytes for peak in step.peaks],
        "lines": {name: value for name, value in step.lines.items() if value},
        "where": f"step {peak.step}, {peak.phase}, {peak.operator}",
        "method_version": step.as_dict()["method_version"],
        "notes": list(step.notes),
        "seconds": time.perf_counter() - begun,
        "gpus_visible": torch.cuda.device_count(),
        "torch": torch.__version__,
    }


PEERS = ("MemTracker", "mlsysim", "accelerate", "16 bytes a parameter")


def peers(way: Way, samples: int) -> dict[str, Any]:
    """Ask the peers; one that fails says why, and one that knows no such model gives None.

    Parameters
    ----------
    way, samples
        The case.

    Returns
    -------
    dict
        By peer: ``bytes`` or None, ``seconds``, and ``error`` where it failed.
    """
    with torch.device("meta"):
        parameters = sum(p.numel() for p in made(way.model, False).parameters())
    asked = {
        "MemTracker": lambda: plain_tracker(way, samples),
        "mlsysim": lambda: mlsysim_estimate(way, samples, parameters),
        "accelerate": lambda: accelerate_estimate(way),
        "16 bytes a parameter": lambda: 16 * parameters,
    }
    found: dict[str, Any] = {}
    for name in PEERS:
        begun = time.perf_counter()
        try:
            found[name] = {"bytes": asked[name]()}
        except Exception as error:  # a peer that is not installed or fails is told in its own column
            found[name] = {"bytes": None, "error": told(error)}
        found[name]["seconds"] = time.perf_counter() - begun
    return found


def largest(way: Way, limit_bytes: int = CAP_BYTES) -> dict[str, Any]:
    """Find the largest microbatch that the prediction lets through a hard limit on reserved bytes.

    Parameters
    ----------
    way
        How the model is trained.
    limit_bytes
        The limit.

    Returns
    -------
    dict
        ``microbatch``, and ``tried``: [microbatch, whether it fits, predicted allocated and reserved bytes].
    """
    tried: dict[int, tuple[bool, int, int]] = {}
    begun = time.perf_counter()

    def fits(samples: int) -> bool:
        if samples not in tried:
            step = ours(way, samples)
            tried[samples] = (step.runs_within(limit_bytes), step.allocated_bytes, step.reserved_bytes)
        return tried[samples][0]

    least, more = MODELS[way.model].batches
    fits(least), fits(more)
    slope = (tried[more][1] - tried[least][1]) / (more - least)
    start = int(more + (limit_bytes - tried[more][1]) / slope)
    best = boundary(fits, start)
    return {
        "microbatch": best,
        "tried": [[samples, *row] for samples, row in sorted(tried.items())],
        "seconds": time.perf_counter() - begun,
        "gpus_visible": torch.cuda.device_count(),
    }


def boundary(fits: Any, start: int) -> int:
    """Find the largest whole number that fits, from a guess: steps of a fiftieth, doubled, then bisection.

    Parameters
    ----------
    fits
        Says of a number whether it fits; what is larger than one that does not is taken not to.
    start
        The guess.

    Returns
    -------
    int
        0 where 1 does not fit.

    Examples
    --------
    >>> boundary(lambda m: m <= 93, 120), boundary(lambda m: m <= 93, 20), boundary(lambda m: False, 3)
    (93, 93, 0)
    """
    stride = max(1, start // 50)
    low = high = max(1, start)
    if fits(low):
        while fits(high):
            low, high, stride = high, high + stride, 2 * stride
    else:
        while low > 0 and not fits(low):
            low, high, stride = max(0, low - stride), low, 2 * stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
