"""What the book claims of its ceilings and budgets, held against their recordings."""

from __future__ import annotations

import pytest

from gpucourse import recording
from gpucourse.measured_roof import MeasuredRoofline
from gpucourse.step_budget import StepBudget

BURST = recording.load("roofline_burst").data
LOADS = {
    precision: row
    for name in ("roofline_sustained_full", "roofline_sustained_half")
    for precision, row in recording.load(name).data.items()
}
BUDGETS = recording.load("step_budgets").data
STEPS = BUDGETS["steps"]
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


# The one shape of the peers' list that ours lacks; 528 tiles of 128 × 256 are four whole waves of an H200.
ONLY_THEIRS = "3072 × 5632 × 8192"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_best_of_our_bursts_is_within_a_hundredth_of_the_best_of_the_peers(precision: str) -> None:
    rounds = BURST["peers"][precision]
    ours = max(row["ours_tflops"] for row in rounds)
    theirs = max(peer["tflops"] for row in rounds for peer in row["peers"].values())
    assert ours >= 0.99 * theirs
    for row in rounds:
        for peer in row["peers"].values():
            # One round is not another: which shapes are tried a second time hangs on a first, hotter try.
            assert row["ours_tflops"] >= 0.97 * peer["tflops"], row


@pytest.mark.parametrize("precision", PRECISIONS)
def test_where_a_peers_burst_is_ahead_it_is_by_the_one_shape_that_is_not_on_our_list(precision: str) -> None:
    for row in BURST["peers"][precision]:
        for peer in row["peers"].values():
            if peer["tflops"] > row["ours_tflops"]:
                assert " × ".join(map(str, peer["shape"])) == ONLY_THEIRS


@pytest.mark.parametrize("precision", PRECISIONS)
def test_under_a_long_load_only_that_shape_is_well_ahead_of_ours_and_by_less_than_a_thirtieth(
    precision: str,
) -> None:
    load = LOADS[precision]
    roof = MeasuredRoofline.from_dict(load["roof"])
    assert roof.sustained[0].seconds >= 30
    for turn in load["turns"]:
        for shape, rate in turn["peer_tflops"].items():
            assert turn["ours_tflops"] >= (0.97 if shape == ONLY_THEIRS else 0.985) * rate, (shape, rate)
    last = load["turns"][-1]["ours_tflops"]
    assert roof.sustained[0].rate / 1e12 == pytest.approx(last, rel=0.02)  # still as hot after the 30 s


@pytest.mark.parametrize("precision", PRECISIONS)
def test_our_copy_is_not_below_a_peers(precision: str) -> None:
    for row in BURST["peers"][precision]:
        for rate in row["peer_copy_gb_per_s"].values():
            assert row["ours_copy_gb_per_s"] >= 0.99 * rate


def test_the_shares_of_the_datasheet_are_reached() -> None:
    bf16 = MeasuredRoofline.from_dict(BURST["roofs"]["bf16"])
    assert bf16.datasheet_flops is not None
    assert bf16.datasheet_bandwidth is not None
    assert bf16.roofline.peak_flops / bf16.datasheet_flops >= 0.78
    assert bf16.stream("copy").rate / bf16.datasheet_bandwidth >= 0.88


def test_a_long_load_is_slower_than_a_burst_where_the_tensor_cores_work() -> None:
    for precision in ("tf32", "bf16", "fp16"):
        roof = MeasuredRoofline.from_dict(LOADS[precision]["roof"])
        assert roof.sustained_roofline is not None
        assert roof.sustained_roofline.peak_flops < roof.roofline.peak_flops


@pytest.mark.parametrize("name", ["fp32_eager", "fp32_compiled", "bf16_eager", "bf16_compiled"])
def test_a_budget_accounts_for_its_whole_step_and_its_trace_is_complete(name: str) -> None:
    row = STEPS[name]
    budget = StepBudget.from_dict(row)
    assert row["complete"]
    assert BUDGETS["failed"] == {}
    parts = budget.least_us + budget.beyond_us + budget.uncounted_us + budget.gap_us
    assert parts == pytest.approx(budget.span_us + budget.overlap_us)
    assert budget.uncounted_us < 0.01 * budget.span_us
    assert budget.least_us == pytest.approx(row["burst"]["least_us"])
    assert row["tokens_per_s"] == pytest.approx(BUDGETS["examples"] * 1024 / row["step_ms"] * 1e3)


def test_a_step_that_was_timed_without_a_trace_is_not_longer_than_its_trace() -> None:
    for row in STEPS.values():
        assert row["step_ms"] <= 1.01 * row["span_us"] / 1e3
        assert row["step_ms"] >= 0.99 * row["busy_us"] / 1e3


@pytest.mark.parametrize("name", ["fp32_eager", "fp32_compiled"])
def test_the_roof_explains_seven_eighths_of_an_fp32_step_and_its_shapes_all_but_a_tenth(name: str) -> None:
    row = STEPS[name]
    assert row["sustained"]["least_over_step"] == pytest.approx(0.89, abs=0.015)  # the goal is 0.90
    assert StepBudget.from_dict(row).reached_us / 1e3 / row["step_ms"] == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("name", ["bf16_eager", "bf16_compiled"])
def test_in_bf16_the_roof_explains_three_quarters_of_the_hot_step(name: str) -> None:
    row, budget = STEPS[name], StepBudget.from_dict(STEPS[name])
    assert 0.72 < row["sustained"]["least_over_step"] < 0.82
    assert budget.explained < budget.explained_as_reached < 1


def test_what_the_roof_leaves_of_the_steps_is_where_the_book_says_it_is() -> None:
    fp32, bf16 = STEPS["fp32_eager"]["families"], STEPS["bf16_eager"]["families"]
    lost = {name: sums["loss_us"] for name, sums in fp32.items()}
    assert sorted(lost, key=lambda name: -lost[name])[:2] == ["attention", "product"]
    assert fp32["attention"]["least_us"] / fp32["attention"]["measured_us"] == pytest.approx(0.576, abs=0.01)
    lost = {name: sums["loss_us"] for name, sums in bf16.items()}
    assert sorted(lost, key=lambda name: -lost[name])[:3] == ["attention", "normalization", "copy or fill"]


def test_a_reading_alone_that_is_longer_than_in_the_step_counts_with_the_steps() -> None:
    """Attention's backward pass, measured alone after the traces, read its launch."""
    for name in ("bf16_eager", "bf16_compiled"):
        budget = StepBudget.from_dict(STEPS[name])
        (row,) = (row for row in budget.rows if row.op == "aten::_cudnn_attention_backward")
        assert row.alone_us is not None
        assert row.alone_us > 2 * row.measured_us
        assert row.reached_us == row.measured_us
