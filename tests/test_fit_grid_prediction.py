"""The grid is made by one command, of models that compute the same with checkpoints and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpucourse import fit_grid_prediction as making
from gpucourse.fit_grid import LINES, MICROBATCHES, read_grid
from gpucourse.fit_grid_prediction import batch, model, predict_point
from gpucourse.step_memory import METHOD_VERSION
from gpucourse.training import next_token_loss

SMALL = {"layers": 2, "width": 64, "tokens": 32}


def test_a_checkpointed_model_computes_the_same_loss_and_gradients() -> None:
    torch.manual_seed(0)
    plain, saved = model(**SMALL), model(**SMALL, checkpointing=True)
    saved.load_state_dict(
        {
            name.replace("blocks.0.", "blocks.0.block.").replace("blocks.1.", "blocks.1.block."): value
            for name, value in plain.state_dict().items()
        }
    )
    tokens = torch.randint(50_304, (2, 33))
    losses = [next_token_loss(made, tokens[:, :-1], tokens[:, 1:]) for made in (plain, saved)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()
    pairs = zip(plain.parameters(), saved.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]


def test_the_models_are_the_courses_with_heads_of_64() -> None:
    config = model(layers=1, width=128, tokens=16).config
    assert (config.heads, config.vocabulary, config.context) == (2, 50_304, 16)
    assert [tensor.device.type for tensor in batch(3, 16)] == ["meta", "meta"]


def test_a_point_keeps_the_lines_of_the_peak() -> None:
    point = predict_point(4, **SMALL, precision="bf16", checkpointing=True)
    assert tuple(point.lines) == LINES
    assert sum(point.lines.values()) == point.allocated_bytes <= point.reserved_bytes
    assert point.lines["parameters"] == 4 * (50_304 * 64 + 32 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64)


def test_a_line_that_the_grid_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "LINES", tuple(name for name in LINES if name != "activations"))
    with pytest.raises(ValueError, match="lines that the grid has not: activations"):
        predict_point(4, **SMALL, precision="fp32", checkpointing=False)


@pytest.mark.slow
def test_the_command_writes_a_grid_that_is_read_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    axes = {"LAYERS": (1,), "WIDTHS": (64,), "TOKENS": (64,), "PRECISIONS": ("fp32",)}
    for name, values in axes.items():
        monkeypatch.setattr(making, name, values)
    target = tmp_path / "grid.json"
    assert making.main(["--processes", "1", "--out", str(target)]) == 0
    grid = read_grid(target.read_text(encoding="utf-8"), method_version=METHOD_VERSION)
    assert [shape.checkpointing for shape in grid.shapes] == [False, True]
    assert [point.microbatch for point in grid.shapes[0].points][: len(MICROBATCHES)] == list(MICROBATCHES)
    assert grid.torch_version == torch.__version__
