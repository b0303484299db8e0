"""The search ends with the largest microbatch that fits and the next one, which does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpucourse.microbatch_search import (
    NothingFitsError,
    budget_bytes,
    fits,
    largest_microbatch,
    with_samples,
)
from gpucourse.step_memory import BatchError, StepMemory, predict_step_memory


def of_sum(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum()


def predict(samples: int) -> StepMemory:
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 1))
    return predict_step_memory(model, torch.empty(samples, 256, device="meta"), loss=of_sum)


@pytest.mark.slow
@pytest.mark.parametrize("reserve", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("device_bytes", [90_000_000, 150_000_000, 700_000_000])
def test_one_sample_more_does_not_fit(device_bytes: int, reserve: float) -> None:
    asked: list[int] = []

    def counted(samples: int) -> StepMemory:
        asked.append(samples)
        return predict(samples)

    try:
        found = largest_microbatch(counted, device_bytes=device_bytes, reserve=reserve)
    except NothingFitsError:
        assert not fits(predict(1), device_bytes, reserve)
        return
    assert found.over is not None
    assert found.over.microbatch == found.microbatch + 1
    assert fits(found.fits, device_bytes, reserve)
    assert not fits(found.over, device_bytes, reserve)
    assert len(asked) < 40
    assert f"largest microbatch: {found.microbatch} (" in str(found)


def test_where_all_fit_the_search_ends_and_says_at_least() -> None:
    found = largest_microbatch(predict, device_bytes=10**12, most=50)
    assert (found.microbatch, found.over) == (50, None)
    assert "at least 50" in str(found)


def test_a_fixed_part_over_the_budget_is_told_with_what_to_do() -> None:
    with pytest.raises(
        NothingFitsError, match=r"one sample needs .* no microbatch fits. Take a larger device"
    ):
        largest_microbatch(predict, device_bytes=10_000_000)


@pytest.mark.parametrize(
    ("device_bytes", "reserve", "said"),
    [(0, 0.1, "0 bytes"), (1, 1.0, "reserve is 1"), (1, -0.1, "reserve is -0.1")],
)
def test_a_device_that_is_none_is_told(device_bytes: int, reserve: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        budget_bytes(device_bytes, reserve)


def test_a_longer_batch_has_its_samples_and_keeps_what_is_no_sample() -> None:
    batch: Any = {"x": torch.empty(4, 3), "mask": torch.empty(9, 9), "scale": 2.0, "one": torch.tensor(1.0)}
    longer = with_samples(batch, 7)
    assert [tuple(longer[name].shape) for name in ("x", "mask", "one")] == [(7, 3), (9, 9), ()]
    assert longer["scale"] == 2.0
    assert batch["x"].shape == (4, 3)
    with pytest.raises(BatchError, match="no tensor with a first axis"):
        with_samples((torch.tensor(1.0),), 3)
