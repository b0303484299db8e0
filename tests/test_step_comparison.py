"""A prediction and a measurement stand side by side only where they are of one step; what is left over has a sign."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpucourse.step_comparison import Comparison, ComparisonError, compare_step_memory


def step(**more: Any) -> dict[str, Any]:
    return {
        "model": "MLP",
        "microbatch": 8,
        "precision": "bf16",
        "accumulation": 1,
        "optimizer": "SGD",
        "trainable": 10,
        "frozen": 0,
        "compiled": "",
        "torch_version": "2.11.0",
        "reserved_bytes": 3_000_000,
    } | more


def peak(lines: dict[str, int], phase: str = "backward", number: int = 2) -> dict[str, Any]:
    return {"step": number, "phase": phase, "allocated_bytes": sum(lines.values()), "lines": lines}


LINES = {"parameters": 400_000, "activations": 600_000, "casts": 0, "recomputed": 0}


def predicted(**more: Any) -> dict[str, Any]:
    return step(peaks=[peak({"parameters": 1}, number=1), peak(LINES)]) | more


def measured(**more: Any) -> dict[str, Any]:
    lines = LINES | {"activations": 550_000, "casts": 50_000, "unexplained": 1_000}
    return step(gpu="NVIDIA H200", notes=[], peaks=[peak(lines)]) | more


def test_each_line_has_both_and_the_residual_is_measured_less_predicted() -> None:
    found = compare_step_memory(predicted(), measured())
    assert [(r.name, r.predicted_bytes, r.measured_bytes, r.residual_bytes) for r in found.rows] == [
        ("parameters", 400_000, 400_000, 0),
        ("activations", 600_000, 550_000, -50_000),
        ("casts", 0, 50_000, 50_000),
        ("unexplained", 0, 1_000, 1_000),
        ("allocated", 1_000_000, 1_001_000, 1_000),
        ("reserved", 3_000_000, 3_000_000, 0),
    ]
    assert found.row("activations").residual_share == pytest.approx(-50 / 550)
    assert found.row("casts").cells() == ("casts", "0 B", "50.0 kB", "+50.0 kB", "+100.00 %")
    assert found.row("activations").cells()[3:] == ("−50.0 kB", "−9.09 %")
    with pytest.raises(KeyError, match="no row 'weights'; there are parameters, activations"):
        found.row("weights")


def test_a_line_that_only_the_prediction_has_has_no_share() -> None:
    found = compare_step_memory(predicted(), measured(peaks=[peak({"parameters": 400_000})]))
    assert found.row("activations").residual_share is None
    assert found.row("activations").cells()[3:] == ("−600.0 kB", "none measured")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "GPT"}, "the model differs: MLP predicted, GPT measured"),
        ({"trainable": 11}, "number of parameters that learn differs: 10 predicted, 11 measured"),
        ({"frozen": 1}, "number of frozen parameters differs"),
        ({"microbatch": 16}, "the microbatch differs: 8 predicted, 16 measured"),
        ({"accumulation": 2}, "the accumulation differs"),
        ({"precision": "fp32"}, "the precision differs: bf16 predicted, fp32 measured"),
        ({"optimizer": "AdamW"}, "the optimizer differs"),
        ({"compiled": "model"}, "what is compiled differs: nothing predicted, model measured"),
    ],
)
def test_two_steps_are_not_compared(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ComparisonError, match=says):
        compare_step_memory(predicted(), measured(**change))


def test_what_is_neither_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"the prediction is a str without model.*wanted what predict_step_memory"
    ):
        compare_step_memory("MLP", measured())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"the measurement is a dict without .*peaks"):
        compare_step_memory(predicted(), {"model": "MLP"})


def test_two_releases_of_torch_are_said_and_one_is_too() -> None:
    same = compare_step_memory(predicted(), measured())
    other = compare_step_memory(predicted(torch_version="2.13.0+cpu"), measured())
    for text in (str(same), same._repr_html_()):
        assert "oth with torch 2.11.0, measured on NVIDIA H200" in text
        assert "two releases" not in text
    for text in (str(other), other._repr_html_()):
        assert "redicted for torch 2.13.0+cpu and measured with torch 2.11.0: two releases" in text


def test_peaks_in_two_phases_are_said() -> None:
    lines = {"parameters": 400_000}
    found = compare_step_memory(predicted(), measured(peaks=[peak(lines, phase="optimizer")]))
    assert "the backward pass predicted and the optimizer pass measured" in str(found)
    assert compare_step_memory(predicted(), measured()).notes == ()


def test_what_the_measurement_noted_stands_under_the_table() -> None:
    found = compare_step_memory(predicted(), measured(notes=["the batch had no data"]))
    assert "note: the batch had no data" in str(found)
    assert "Note: the batch had no data" in found._repr_html_()


def test_both_forms_have_every_row_and_the_data_is_plain() -> None:
    found = compare_step_memory(predicted(accumulation=2), measured(accumulation=2))
    assert isinstance(found, Comparison)
    assert str(found).startswith("MLP, microbatch 8 x 2, bf16, SGD: measured less predicted")
    for row in found.rows:
        for cell in row.cells():
            assert cell in str(found)
            assert cell in found._repr_html_()
    data = json.loads(json.dumps(found.as_dict()))
    assert data["rows"][1]["residual_bytes"] == -50_000
    assert data["predicted_at"] == [2, "backward"]
