"""Facts about the charts of the chapter on the compiler, on made-up measurements."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from gpucourse import hardware, recorder, recording
from gpucourse.checkpoints.compile_kernels import agreement
from gpucourse.plots import compile_kernels as draw
from gpucourse.training import night_config

ROOT = Path(__file__).parents[1]
CHAPTER = (ROOT / "book" / "07_compile.md").read_text(encoding="utf-8")


def timing(device_ms: float, elapsed_ms: float) -> dict[str, float]:
    return {"median_ms": device_ms, "elapsed_ms": elapsed_ms}


CHAINS = {
    "start_s": 3.0,
    "one_addition": {"first_s": 0.5, "eager": timing(0.001, 0.016), "compiled": timing(0.0011, 0.05)},
    "layer_norm": {"first_s": 0.5, "eager": timing(1.5, 1.6), "compiled": timing(0.19, 0.23)},
    "library": timing(0.3, 0.33),
}


def kernel(name: str, op: str | None, count: int, us: float) -> dict[str, Any]:
    return {"name": name, "op": op, "count": count, "us": us}


STEPS = {
    "as written": {
        "step_ms": 12.0,
        "kernels": [
            kernel("gemm", "aten::mm", 10, 6000.0),
            kernel("add", "aten::add", 30, 4000.0),
            kernel("adam", "aten::_fused_adamw_", 1, 500.0),
        ],
    },
    "compiled": {
        "step_ms": 8.5,
        "kernels": [
            kernel("gemm", "aten::mm", 10, 6000.0),
            kernel("triton_poi_fused_add_0", "triton_poi_fused_add_0", 6, 1500.0),
        ],
    },
}
SHAPES = {
    "default": [{"rows": 5, "wall_ms": 500.0}, {"rows": 7, "wall_ms": 700.0}, {"rows": 9, "wall_ms": 0.2}],
    "static": [{"rows": 5, "wall_ms": 500.0}, {"rows": 7, "wall_ms": 600.0}, {"rows": 9, "wall_ms": 600.0}],
}


def test_calls_gives_each_function_a_line_as_written_and_one_compiled_in_us() -> None:
    chart = draw.calls(CHAINS, caption="c")
    assert chart.rows == [
        ("one addition", "as written", "1.00", "16.0"),
        ("one addition", "compiled", "1.10", "50.0"),
        ("layer norm", "as written", "1,500.00", "1,600.0"),
        ("layer norm", "compiled", "190.00", "230.0"),
    ]
    assert "layer norm compiled 190.0 to 230.0" in chart.alt
    assert chart.svg().startswith("<svg")


def test_calls_without_a_pair_to_compare_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw.calls({"start_s": 3.0, "library": timing(1, 2)}, caption="c")


@pytest.mark.parametrize(
    ("name", "op", "whose"),
    [
        ("triton_per_fused_mean_0", "triton_per_fused_mean_0", "written by the compiler"),
        ("nvjet", "aten::addmm", "products"),
        ("splitKreduce_kernel", "aten::mm", "products"),
        ("cudnn_generated", "aten::_cudnn_attention_backward", "attention"),
        ("multi_tensor_apply_kernel", "aten::_fused_adamw_", "optimizer"),
        ("reduce_kernel", "aten::sum", "torch's other kernels"),
        ("Memcpy DtoD", None, "torch's other kernels"),
    ],
)
def test_a_kernel_belongs_to_whoever_launched_it(name: str, op: str | None, whose: str) -> None:
    assert draw.family({"name": name, "op": op}) == whose


def test_guard_cost_finds_the_line_that_made_the_points() -> None:
    points = [{"inputs": n, "host_us": 11 + 0.1 * n} for n in (1, 10, 100)]
    chart, base_us, each_us = draw.guard_cost(points, caption="c")
    assert base_us == pytest.approx(11)
    assert each_us == pytest.approx(0.1)
    assert "11.0 µs and 100 ns for each tensor" in chart.alt
    assert chart.rows[1] == ("10", "12.0", "12.0")


def test_guard_cost_needs_two_numbers_of_inputs() -> None:
    with pytest.raises(ValueError, match="two different numbers"):
        draw.guard_cost([{"inputs": 3, "host_us": 1.0}, {"inputs": 3, "host_us": 2.0}], caption="c")


def test_shape_calls_lists_each_call_and_counts_the_slow_ones() -> None:
    chart = draw.shape_calls(SHAPES, caption="c")
    assert chart.header == ("Call", "Rows", "default, ms", "static, ms")
    assert chart.rows[2] == ("3", "9", "0.20", "600.00")
    assert "default 2, static 3 of 3" in chart.alt


def test_shape_calls_compares_only_the_same_shapes_in_the_same_order() -> None:
    other = {**SHAPES, "static": list(reversed(SHAPES["static"]))}
    with pytest.raises(ValueError, match="same rows in the same order"):
        draw.shape_calls(other, caption="c")


def test_step_families_sums_launches_and_time_of_each_kind() -> None:
    chart = draw.step_families(STEPS, caption="c")
    assert ("as written", "torch's other kernels", "30", "4.00") in chart.rows
    assert ("as written", "all kernels", "41", "10.50") in chart.rows
    assert ("compiled", "written by the compiler", "6", "1.50") in chart.rows
    assert ("compiled", "step, unprofiled", "", "8.50") in chart.rows
    assert "compiled, all kernels 7.50 in 16 launches" in chart.alt


@pytest.mark.parametrize("steps", [{}, {"a": {"step_ms": 1.0, "kernels": []}}])
def test_step_families_without_kernels_is_refused(steps: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs its kernels"):
        draw.step_families(steps, caption="c")


def test_repaid_counts_whole_steps_by_hand() -> None:
    chart = draw.repaid(44.0, 34.0, {"empty cache": 20.004, "full cache": 5.0}, caption="c")
    assert [row[3] for row in chart.rows] == ["2,001", "500"]
    assert chart.rows[0][1] == "20.0 s"
    assert "after 2,001 steps (empty cache)" in chart.alt


def test_what_saves_nothing_is_never_repaid() -> None:
    with pytest.raises(ValueError, match="never repays"):
        draw.repaid(34.0, 34.0, {"empty cache": 20.0}, caption="c")


def test_every_chart_of_the_chapter_can_be_drawn() -> None:
    charts = [
        draw.calls(CHAINS, caption="c"),
        draw.shape_calls(SHAPES, caption="c"),
        draw.step_families(STEPS, caption="c"),
        draw.repaid(44.0, 34.0, {"empty cache": 20.0}, caption="c"),
        draw.guard_cost([{"inputs": n, "host_us": float(n)} for n in (1, 2)], caption="c")[0],
    ]
    for chart in charts:
        page = chart._repr_html_()
        assert page.count("<svg") == 1
        assert page.count('<th scope="row">') == len(chart.rows)


# --- what the chapter says --------------------------------------------------------------------------------


def test_the_chapters_typed_numbers_follow_from_its_shapes_and_the_datasheet() -> None:
    bandwidth = hardware.device("H200").bandwidth_bytes_per_s
    passed = 131_072 * 768 * 4
    assert f"{2 * passed / 1e6:.0f} MB" == "805 MB"
    assert f"{2 * passed / bandwidth * 1e6:.0f} µs" == "168 µs"
    assert f"{12 * passed / bandwidth * 1e6:,.0f} µs" == "1,007 µs"  # 12 whole passes; vectors make it 1,008
    tokens = 16 * night_config().context
    logits = tokens * night_config().vocabulary
    assert (f"{2 * logits / 1e9:.2f}", f"{4 * logits / 1e9:.1f}") == ("1.65", "3.3")
    assert f"{12e9 / tokens:,.0f}" == "732,422"
    for factor in ("/ 0.099 ", "*3.344 ", "*0.20345 ", "16.78 / ", "16384000 / "):
        assert factor in CHAPTER
    assert pytest.approx(1 / 0.099) == 1e3 / 99  # ms times MHz -> clock cycles for each of 99 additions
    assert pytest.approx(3.344, rel=1e-3) == 1e3 / 299  # µs over 299 tensors -> ns for one
    assert 12e9 / tokens / 3.6e6 == pytest.approx(0.20345, rel=1e-4)  # ms a step -> hours a night
    assert 2 * passed / bandwidth * 1e5 == pytest.approx(16.78, rel=1e-3)  # least ms, times 100 for per cent


def test_the_kernel_that_is_read_has_three_loads_one_store_and_two_sums() -> None:
    source = recording.load("generated_code")["layer_norm"]
    (kernel,) = re.findall(r"@triton\.jit\n(.*?)\n'''", source, re.DOTALL)
    assert (kernel.count("tl.load("), kernel.count("tl.store("), kernel.count("tl.sum(")) == (3, 1, 2)
    for name in ("r0_mask", "xmask", "XBLOCK", "r0_1 + 768*x0", "evict_last"):
        assert name in kernel


def test_the_rule_counts_what_was_launched_and_no_launch_lacks_its_record() -> None:
    found = recording.load("launched_kernels")
    assert agreement(found["drawn"]) == len(found["drawn"])
    every = [*found["examples"].values(), *found["drawn"]]
    assert [program["missing"] for program in every] == [0] * len(every)
    assert [name.startswith("Memcpy") for name in found["examples"]["added_back"]["kernels"]].count(True) == 1
    added_back = [["s", "elementwise", ["x"]], ["p", "product", ["s"]], ["r", "elementwise", ["s", "p"]]]
    assert (
        agreement([{"operations": added_back, **found["examples"]["added_back"]}]) == 1
    )  # as many, but others


def test_compiling_the_loss_too_is_faster_by_fewer_bytes_and_leaves_the_products_alone() -> None:
    night = recording.load("compiled_night")["whole"]
    steps = [night[label]["step_ms"] for label in ("with_loss", "model_only", "eager")]
    assert steps == sorted(steps)

    def launches(label: str, whose: str) -> int:
        return sum(k["count"] for k in night[label]["kernels"] if draw.family(k) == whose)

    for whose in ("products", "attention"):
        assert len({launches(label, whose) for label in ("eager", "model_only", "with_loss")}) == 1
    peaks = [night[label]["peak_gb"] for label in ("eager", "model_only", "with_loss")]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)  # it is the loss inside that frees memory
    assert peaks[2] < 0.7 * peaks[1]


@pytest.mark.parametrize("label", ["eager", "model_only"])
def test_outside_the_compiler_the_softmax_is_in_half_precision_and_its_result_is_what_is_cast(
    label: str,
) -> None:
    kernels = recording.load("compiled_night")["whole"][label]["kernels"]
    named = {
        op: [k["name"] for k in kernels if k["op"] == op] for op in ("aten::_log_softmax", "aten::copy_")
    }
    (softmax,) = named["aten::_log_softmax"]
    read, _, written = re.findall(r"c10::BFloat16|float", softmax)[:3]
    assert read == written == "c10::BFloat16"
    (loss,) = (k["name"] for k in kernels if k["op"] == "aten::nll_loss_forward")
    assert "<float, float, long>" in loss  # so there is a cast between the two
    assert named["aten::copy_"]
    filled_us = sum(k["us"] for k in kernels if k["op"] == "aten::fill_")
    logits = 16 * night_config().context * night_config().vocabulary
    assert filled_us * 1e-6 > 4 * logits / hardware.device("H200").bandwidth_bytes_per_s


def test_compiled_too_many_kernels_do_nothing_but_cast_and_take_a_seventh_of_the_time() -> None:
    night = recording.load("compiled_night")["whole"]
    (pattern,) = re.findall(r'cast = re\.compile\(r"(.+?)"\)', CHAPTER)

    def casts(label: str) -> tuple[int, float]:
        found = [k for k in night[label]["kernels"] if re.fullmatch(pattern, str(k["op"]))]
        return sum(k["count"] for k in found), sum(k["us"] for k in found)

    written, compiled = casts("eager"), casts("with_loss")
    assert written[0] / 2 < compiled[0] < written[0]
    assert written[1] / compiled[1] == pytest.approx(7, abs=0.5)


def test_the_chapters_text_and_its_table_round_the_steps_to_repay_alike() -> None:
    sys.path.insert(0, str(ROOT / "book" / "_ext"))
    from recorded_values import read

    night = recording.load("compiled_night")
    eager, compiled = night["whole"]["eager"], night["whole"]["with_loss"]
    chart = draw.repaid(eager["step_ms"], compiled["step_ms"], {"empty": compiled["first_s"]}, caption="c")
    (written,) = re.findall(r"is repaid after \{rec\}`([^`]+)` steps", CHAPTER)
    assert read(written)[0] == chart.rows[0][-1]


def test_units_in_the_chapters_formulas_stand_upright() -> None:
    formulas = re.findall(r"\$\$(.+?)\$\$", CHAPTER, re.DOTALL)
    assert formulas
    for formula in formulas:
        for unit in re.findall(r"\\;\[(.+?)\]", formula):
            assert re.fullmatch(r"(\\text\{[^}]+\}/?)+", unit), unit


def test_each_recording_of_the_chapter_is_checked_and_none_is_called_an_exception() -> None:
    (page,) = (page for page in recorder.find_pages(ROOT) if page.path.name == "07_compile.md")
    assert "launched_kernels" in page.recorded
    assert not page.unchecked
    assert "one exception" not in CHAPTER


def test_a_compiled_call_stands_for_the_launches_that_the_chapter_says() -> None:
    parts = recording.load("host_parts")
    compiled_us = [found["compiled_us"] for found in parts.values()]
    checked_us = [found["checked_us"] for found in parts.values()]
    unchecked_us = [found["unchecked_us"] for found in parts.values()]
    one, hundred, norm = parts.values()
    assert (min(compiled_us), max(compiled_us)) == (one["compiled_us"], hundred["compiled_us"])
    assert (min(checked_us), max(checked_us)) == (pytest.approx(one["checked_us"]), norm["checked_us"])
    assert (min(unchecked_us), max(unchecked_us)) == (one["unchecked_us"], hundred["unchecked_us"])
    left_us = [
        found["compiled_us"] - found["checked_us"] - found["unchecked_us"] for found in (norm, one, hundred)
    ]
    assert 0 < left_us[0] == min(left_us)
    assert left_us[-1] == max(left_us)
    assert one["eager_us"] < one["compiled_us"]
    for found in parts.values():  # what a call costs beyond its check is a dearer launch
        assert found["unchecked_us"] > max(found["checked_us"], 2 * one["eager_us"])


def test_a_list_of_tensors_costs_its_check_more_than_three_arguments_do() -> None:
    points = recording.load("guard_cost")["points"]
    assert [point["inputs"] for point in points][:2] == [1, 3]
    parts = recording.load("host_parts")
    assert points[1]["host_us"] > parts["layer_norm"]["checked_us"] > parts["one_addition"]["checked_us"]
    each_us = (points[-1]["host_us"] - points[0]["host_us"]) / (points[-1]["inputs"] - 1)
    assert points[0]["host_us"] - each_us > 0.95 * points[0]["host_us"]  # hardly any of it is the tensor's


def test_shapes_beyond_the_limit_run_as_written_and_an_old_shape_by_its_graph() -> None:
    shapes = recording.load("changing_shapes")
    assert shapes["static_launches"] == [9, 1]
    slow = {name: sum(c["wall_ms"] > 20 for c in shapes[name]) for name in ("default", "dynamic", "static")}
    assert slow == {"default": 2, "dynamic": 1, "static": 8}


def test_the_throttled_reading_of_the_product_is_the_one_that_the_chapter_names() -> None:
    product = recording.load("compiled_chains")["product"]
    assert [product[how]["throttled"] for how in ("eager", "compiled")] == [False, True]
    assert product["compiled"]["median_ms"] < 1.1 * product["eager"]["median_ms"]
    replayed = recording.load("graph_mode")
    assert replayed["hundred_additions"]["compiled_us"] < replayed["hundred_additions"]["replayed_us"]
    layers = replayed["twenty_layers"]
    assert layers["replayed_us"] < layers["eager_us"] < layers["compiled_us"]
