"""The largest microbatch that fits, found by predicting a few: without a GPU, and without trying all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpucourse.step_memory import BatchError, StepMemory, StepMemoryError
from gpucourse.units import format_bytes

if TYPE_CHECKING:
    import torch

__all__ = [
    "LargestMicrobatch",
    "NothingFitsError",
    "budget_bytes",
    "fits",
    "largest_microbatch",
    "with_samples",
]


class NothingFitsError(StepMemoryError, ValueError):
    """Not even one sample fits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LargestMicrobatch:
    """The largest microbatch that fits, and the next one, which does not.

    Attributes
    ----------
    fits
        The prediction of the largest.
    over
        Of one sample more; None where the search ended at the most samples that it was to look at.
    device_bytes, reserve
        What it had to fit into.
    """

    fits: StepMemory
    over: StepMemory | None
    device_bytes: int
    reserve: float

    @property
    def microbatch(self) -> int:
        """Samples."""
        return self.fits.microbatch

    def __str__(self) -> str:
        budget = budget_bytes(self.device_bytes, self.reserve)
        what, used = (
            ("reserved", self.fits.reserved_bytes)
            if self.reserve == 0
            else (
                "allocated",
                self.fits.allocated_bytes,
            )
        )
        least = "at least " if self.over is None else ""
        return f"largest microbatch: {least}{self.microbatch} ({format_bytes(used)} {what} of {format_bytes(budget)})"


def budget_bytes(device_bytes: int, reserve: float) -> int:
    """Give what may be used of a device.

    Parameters
    ----------
    device_bytes
        Its memory.
    reserve
        The part that is left free, in [0, 1).

    Raises
    ------
    ValueError
        The memory is not above 0, or the reserve is no such part.

    Examples
    --------
    >>> budget_bytes(24_000_000_000, 0.1)
    21600000000
    """
    if not device_bytes > 0:
        raise ValueError(f"the device has {device_bytes} bytes; wanted more than 0")
    if not 0 <= reserve < 1:
        raise ValueError(f"reserve is {reserve:g}; wanted a part of the device in [0, 1): 10 % is 0.10")
    return round(device_bytes * (1 - reserve))


def fits(found: StepMemory, device_bytes: int, reserve: float) -> bool:
    """Say whether a predicted step fits.

    With a reserve the peak of *allocated* memory decides, and the reserve pays for what the allocator holds on top.
    Without one the question is a hard cap, and the allocator is run under it.

    Parameters
    ----------
    found
        The prediction.
    device_bytes, reserve
        As for `budget_bytes`.
    """
    budget = budget_bytes(device_bytes, reserve)
    return found.runs_within(budget) if reserve == 0 else found.allocated_bytes <= budget


def with_samples(batch: Any, samples: int) -> Any:
    """Give a batch of another number of samples, without data: each tensor's first axis is as long.

    Parameters
    ----------
    batch
        Tensors in tuples, lists or dicts; those whose first axis is as long as the first one's change.
    samples
        How many, 1 or more.

    Raises
    ------
    BatchError
        There is no tensor with a first axis.

    Examples
    --------
    >>> import torch
    >>> with_samples({"x": torch.empty(4, 3)}, 9)["x"].shape
    torch.Size([9, 3])
    """
    import torch
    from torch.utils._pytree import tree_leaves, tree_map_only

    axes = [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not axes:
        raise BatchError("the batch holds no tensor with a first axis, so it cannot be made longer")

    def longer(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != axes[0]:
            return tensor
        return torch.empty(samples, *tensor.shape[1:], dtype=tensor.dtype, device="meta")

    return tree_map_only(torch.Tensor, longer, batch)


def largest_microbatch(
    predict: Callable[[int], StepMemory], *, device_bytes: int, reserve: float = 0.10, most: int = 2**20
) -> LargestMicrobatch:
    """Find the largest microbatch that fits.

    Two predictions give a line; where it crosses the budget the next ones are made, until the largest that fits and
    the smallest that does not stand side by side.

    Parameters
    ----------
    predict
        Predicts the step with so many samples.
    device_bytes, reserve
        What it has to fit into: see `fits`.
    most
        Samples beyond which nothing is looked at.

    Raises
    ------
    NothingFitsError
        One sample is over the budget.
    ValueError
        The device or the reserve is none.

    Examples
    --------
    >>> import torch
    >>> from gpucourse.step_memory import predict_step_memory
    >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    >>> def predict(samples):
    ...     return predict_step_memory(model, torch.empty(samples, 512), loss=lambda m, x: m(x).sum())
    >>> found = largest_microbatch(predict, device_bytes=100_000_000)
    >>> found.microbatch + 1 == found.over.microbatch
    True
    """
    budget = budget_bytes(device_bytes, reserve)
    known: dict[int, StepMemory] = {}

    def at(samples: int) -> StepMemory:
        if samples not in known:
            known[samples] = predict(samples)
        return known[samples]

    low, high = 0, most + 1  # the largest known to fit, the smallest known not to
    guess = 1
    while high - low > 1:
        found = at(guess)
        if fits(found, device_bytes, reserve):
            low = guess
        else:
            high = guess
        if high == 1:
            raise NothingFitsError(
                f"one sample needs {format_bytes(found.allocated_bytes)} allocated and "
                f"{format_bytes(found.reserved_bytes)} reserved, and {format_bytes(budget)} may be used: "
                "no microbatch fits. Take a larger device, a smaller reserve or model, or an optimizer with less state"
            )
        guess = _next(known, low, high, budget, reserve)
    return LargestMicrobatch(
        fits=at(low), over=known.get(low + 1), device_bytes=device_bytes, reserve=reserve
    )


def _next(known: dict[int, StepMemory], low: int, high: int, budget: int, reserve: float) -> int:
    """Choose what to predict next: where the line between the ends crosses the budget, every third time the middle."""
    if (
        high not in known
    ):  # nothing was over yet: ahead along the line through the two largest, twice as far at least
        before = max((m for m in known if m < low), default=0)
        rise = (_used(known[low], reserve) - _used(known[before], reserve)) / (low - before) if before else 0
        ahead = low + int((budget - _used(known[low], reserve)) / rise) if rise > 0 else 0
        return min(max(2 * low, min(ahead, 64 * low)), high - 1)
    # Under a hard cap what is reserved without one says little: the allocator gives back what it only caches.
    if low not in known or reserve == 0 or len(known) % 3 == 0:
        return (low + high) // 2
    below, above = (_used(known[m], reserve) for m in (low, high))
    share = (budget - below) / (above - below) if above > below else 0.5
    return min(max(low + 1, low + int((high - low) * share)), high - 1)


def _used(found: StepMemory, reserve: float) -> int:
    return found.reserved_bytes if reserve == 0 else found.allocated_bytes
