"""Memory over a step: the bands' sum is what is live, and the table has each line at each phase's highest instant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matplotlib.collections import PolyCollection
from torch import nn

from gpucourse.memory_measurement import MeasuredStep
from gpucourse.plots import step_memory as draw
from gpucourse.recorded_steps import MeasuredPeak
from gpucourse.recording import Recording
from gpucourse.step_memory import predict_step_memory

GB = 10**9


def lines(**more: int) -> dict[str, int]:
    return dict.fromkeys(draw._STACK, 0) | {name: n * GB for name, n in more.items()}


def made_up(**more: Any) -> MeasuredStep:
    """Two steps of a model that nobody measured."""
    one = [
        ("forward", lines(parameters=2, activations=1)),
        ("forward", lines(parameters=2, activations=4, temporaries=1)),
        ("backward", lines(parameters=2, activations=4, temporaries=3)),
        ("backward", lines(parameters=2, gradients=2, temporaries=1)),
        ("optimizer", lines(parameters=2, gradients=2, optimizer=4)),
    ]
    timeline = [
        (0, "setup", lines(parameters=2)),
        *((1, *point) for point in one),
        *((2, phase, point | {"optimizer": 4 * GB}) for phase, point in one),
    ]
    peaks = tuple(
        MeasuredPeak(step=step, phase="backward", code="", allocated_bytes=n * GB, lines=lines(parameters=n))
        for step, n in ((1, 9), (2, 13))
    )
    facts: dict[str, Any] = {
        "model": "GPT",
        "microbatch": 4,
        "precision": "bf16",
        "accumulation": 1,
        "optimizer": "AdamW",
        "trainable": 1,
        "frozen": 0,
        "peaks": peaks,
        "reserved_bytes": 14 * GB,
        "timeline": tuple(timeline),
        "other_bytes": 0,
        "events": 10,
        "torch_version": "2.11.0",
        "gpu": "NVIDIA H200",
        "seconds": 1.0,
    }
    return MeasuredStep(**(facts | more))


def heights(chart: Any) -> list[float]:
    """Give the top of each band, from below."""
    bands = [c for c in chart.fig.axes[0].collections if isinstance(c, PolyCollection)]
    return [float(band.get_paths()[0].vertices[:, 1].max()) for band in bands]


def words(chart: Any) -> set[str]:
    return {text.get_text() for text in chart.fig.axes[0].texts}


def test_the_bands_stand_on_each_other_and_reach_what_is_live() -> None:
    chart = draw.over_step(made_up())
    assert heights(chart)[0] == 2  # the parameters are at the bottom
    assert max(heights(chart)) == 13
    assert heights(chart) == sorted(heights(chart))


def test_the_step_with_the_highest_peak_is_drawn_unless_another_is_asked_for() -> None:
    assert "step 2, measured" in draw.over_step(made_up()).caption
    first = draw.over_step(made_up(), step=1)
    assert "step 1, measured. The most is live in the backward pass: 9.00 GB" in first.caption
    assert max(heights(first)) == 9
    with pytest.raises(ValueError, match="there is no step 3; there are 1, 2"):
        draw.over_step(made_up(), step=3)


def test_the_table_has_each_line_at_the_highest_instant_of_each_phase_and_their_sum() -> None:
    chart = draw.over_step(made_up())
    assert chart.header == ("Line", "highest in forward", "highest in backward", "highest in optimizer")
    table = {row[0]: row[1:] for row in chart.rows}
    assert table["activations"] == ("4.00 GB", "4.00 GB", "0 B")
    assert table["temporaries"] == ("1.00 GB", "3.00 GB", "0 B")
    assert table["sum"] == ("11.0 GB", "13.0 GB", "8.00 GB")
    assert "casts" not in table  # there are none


def test_every_band_has_its_name_and_the_thin_ones_have_one_together() -> None:
    point = lines(parameters=2, activations=4) | {"inputs": GB // 100, "workspaces": GB // 50}
    chart = draw.over_step(made_up(timeline=((2, "forward", point), (2, "backward", point))))
    assert {"parameters", "activations", "others"} <= words(chart)
    assert "inputs" not in words(chart)
    assert {"inputs", "workspaces"} <= {row[0] for row in chart.rows}  # the table has them apart


def test_a_limit_is_drawn_with_its_figure_and_fits_into_the_picture() -> None:
    chart = draw.over_step(made_up(), limit_gb=24)
    axes = chart.fig.axes[0]
    assert any(list(line.get_ydata()) == [24, 24] for line in axes.lines)
    assert "24 GB" in words(chart)
    assert axes.get_ylim()[1] > 24


def test_a_recorded_measurement_is_drawn_with_where_it_comes_from() -> None:
    data = made_up().as_dict()
    source = Recording(
        name="night_step", data=data, provenance={"gpu": "NVIDIA H200", "date": "2026-12-01T00:00:00"}
    )
    chart = draw.over_step(data, source=source)
    assert heights(chart) == heights(draw.over_step(made_up()))
    assert "recorded on NVIDIA H200" in chart._repr_html_()


def test_a_prediction_is_drawn_too_and_says_so() -> None:
    found = predict_step_memory(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        torch.empty(4096, 64, device="meta"),
        loss=lambda model, x: model(x).sum(),
        workspace_bytes=0,
    )
    chart = draw.over_step(found)
    assert "predicted" in chart.caption
    assert max(heights(chart)) == pytest.approx(
        (found.allocated_bytes - found.line("rounding")) / 1e9, rel=1e-6
    )
    assert chart._repr_html_().count("<svg") == 1


def test_phases_are_named_where_there_is_room() -> None:
    phases = ["forward"] * 50 + ["backward"] * 50 + ["optimizer"]
    long = made_up(timeline=tuple((2, phase, lines(parameters=1)) for phase in phases))
    assert {"forward", "backward"} <= words(draw.over_step(long))
    assert "optimizer" not in words(draw.over_step(long))


def test_the_words_for_those_who_cannot_see_it_follow_the_phases() -> None:
    alt = draw.over_step(made_up()).alt
    assert "In the forward pass it reaches 11.0 GB, the largest part of it" in alt
    assert "The highest point is 13.0 GB, in the backward pass" in alt
