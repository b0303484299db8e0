"""Facts about the charts and tables of the chapter on bottlenecks, and its numbers worked by hand."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from gpucourse import hardware, recording
from gpucourse.plots import bottleneck as draw
from gpucourse.recording import Recording
from gpucourse.roofline import (
    Roofline,
    Work,
    elementwise_work,
    layer_norm_steps,
    layer_norm_work,
    matmul_work,
    softmax_steps,
    softmax_work,
)

CHAPTER = (Path(__file__).parents[1] / "book" / "03_bottleneck.md").read_text(encoding="utf-8")
H200 = hardware.device("H200")
FP32, BF16 = Roofline.of(H200, "fp32"), Roofline.of(H200, "bf16")


def block(size, n=16 * 1024, d=768, pairs=16 * 12, length=1024):
    return {
        "layer_norm": layer_norm_work(n, d, size),
        "qkv": matmul_work(n, 3 * d, d, size),
        "scores": pairs * matmul_work(length, length, 64, size),
        "softmax": softmax_work(pairs * length, length, size),
        "values": pairs * matmul_work(length, 64, length, size),
        "projection": matmul_work(n, d, d, size),
        "residual": elementwise_work(n * d, reads=(size, size), writes=(size,)),
        "widen": matmul_work(n, 4 * d, d, size),
        "gelu": elementwise_work(n * 4 * d, reads=(size,), writes=(size,), flops_per_element=10),
        "narrow": matmul_work(n, d, 4 * d, size),
    }


def elsewhere(name):
    """Give a recording as if an unknown card had made it."""
    real = recording.load(name)
    return dataclasses.replace(real, provenance={**real.provenance, "gpu": "NVIDIA Unheard-of"})


CHARTS = {
    "add_sweep": draw.add_bandwidth,
    "rows_sweep": draw.row_times,
    "block_parts": lambda source: draw.speedups(source, block(4), block(2)),
    "third_limit": draw.instruction_costs,
    "odd_shapes": draw.shape_rates,
}


# --- charts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_shows_its_values_in_its_table_with_the_provenance(name):
    source = recording.load(name)
    page = CHARTS[name](source)._repr_html_()
    assert "<svg" in page
    assert "NVIDIA H200" in page
    assert page.count("<tr>") == len(CHARTS[name](source).rows) + 1
    assert not re.search(r"\bnan\b", page, re.IGNORECASE)


@pytest.mark.parametrize("name", CHARTS)
def test_on_a_card_without_a_record_a_chart_shows_what_was_measured(name):
    chart = CHARTS[name](elsewhere(name))
    cells = [str(cell) for row in chart.rows for cell in row]
    assert "NVIDIA Unheard-of" in chart._repr_html_()
    if name in ("add_sweep", "rows_sweep", "block_parts"):
        assert "unavailable for NVIDIA Unheard-of" in cells
    measured = [cell for row in CHARTS[name](recording.load(name)).rows for cell in map(str, row)]
    assert set(cells) - {"unavailable for NVIDIA Unheard-of"} <= set(measured)


def test_the_bandwidth_chart_divides_twelve_bytes_an_element_by_the_device_time():
    source = recording.load("add_sweep")
    rows = draw.add_bandwidth(source).rows
    row = source["mi_128"]
    rate = 12 * 2**27 / (row["warm"]["median_ms"] / 1e3) / 1e9
    assert rows[-1] == ("1,610.6", f"{rate:,.0f}", f"{row['cold_gb_per_s']:,.0f}", "4,800")


def test_predicted_gains_are_two_for_element_wise_kernels_and_the_ratio_of_peaks_for_wide_products():
    rows = {row[0]: row for row in draw.speedups(recording.load("block_parts"), block(4), block(2)).rows}
    assert rows["GELU"][4] == rows["softmax"][4] == rows["residual add"][4] == "2.0"
    assert rows["product: widen"][4] == f"{989 / 67:.1f}"
    assert rows["product: scores"][1] == "compute → memory"


def test_half_precision_does_not_give_element_wise_kernels_the_tensor_cores_peak():
    # A kernel of 100 operations a byte: bound by arithmetic off the tensor cores, by bytes on them.
    heavy = {**block(2), "gelu": Work(flops=100e9, bytes=1e9)}
    rows = {row[0]: row for row in draw.speedups(recording.load("block_parts"), block(4), heavy).rows}
    assert rows["GELU"][1] == "memory → compute"


def test_shapes_are_green_only_where_the_rows_lengths_are_multiples_of_eight():
    chart = draw.shape_rates(recording.load("odd_shapes"))
    bars = chart.fig.axes[0].patches
    near = [row for row in chart.rows if row[0] < 8000]
    colours = {(m, n, k): bar.get_facecolor() for (m, n, k, *_), bar in zip(near, bars, strict=True)}
    assert colours[4095, 4096, 4096] == colours[4096, 4096, 4096] == colours[4088, 4088, 4088]
    assert colours[4096, 4095, 4096] == colours[4096, 4096, 4095] == colours[4100, 4100, 4100]
    assert colours[4096, 4096, 4096] != colours[4095, 4095, 4095]


# --- the table --------------------------------------------------------------------------------------------


def test_a_comparison_gives_both_times_the_bound_and_the_ratio():
    source = Recording(name="x", data={}, provenance={"gpu": "NVIDIA H200", "date": "2026-12-01"})
    work = matmul_work(4096, 4096, 4096, 2)
    table = draw.compare({"a product": (work, "bf16", {"median_ms": 0.2})}, source, caption="one product")
    assert table.rows == (
        (
            "a product",
            "139.0\N{NO-BREAK SPACE}µs",
            "21.0\N{NO-BREAK SPACE}µs",
            "compute",
            "200.0\N{NO-BREAK SPACE}µs",
            "1.44",
        ),
    )
    page = table._repr_html_()
    assert "recorded on NVIDIA H200, 2026-12-01" in page
    assert 'tabindex="0"' in page
    assert "a product | 139.0" in repr(table)


@pytest.mark.parametrize(("gpu", "dtype"), [("NVIDIA Unheard-of", "bf16"), ("Tesla T4", "bf16")])
def test_a_comparison_without_a_figure_says_unavailable_and_keeps_the_measurement(gpu, dtype):
    source = Recording(name="x", data={}, provenance={"gpu": gpu}, measured_here=True)
    work = matmul_work(64, 64, 64, 2)
    (row,) = draw.compare({"a product": (work, dtype, {"median_ms": 0.2})}, source, caption="c").rows
    assert row[1:4] == (f"unavailable for {gpu}",) * 3
    assert row[4:] == ("200.0\N{NO-BREAK SPACE}µs", "–")


# --- the chapter's numbers, worked again ------------------------------------------------------------------

SHAPE = (131072, 768, 4)


def _microseconds(work, roof=FP32):
    return roof.least_time(work).time_ms * 1e3


ADD = elementwise_work(2**24, reads=(4, 4), writes=(4,))
LARGE_ADD = elementwise_work(2**27, reads=(4, 4), writes=(4,))
PRODUCT = matmul_work(4096, 4096, 4096, 2)
NORM_STEPS = sum(step.work.bytes for step in layer_norm_steps(*SHAPE))
SOFTMAX_STEPS = sum(step.work.bytes for step in softmax_steps(*SHAPE))
NIGHT = 6 * 124e6 * 12e9 / (8 * 3600)
LEAST = {
    key: {part: roof.least_time(work) for part, work in block(size).items()}
    for key, roof, size in (("fp32", FP32, 4), ("bf16", BF16, 2))
}
TOTAL = {
    key: sum((2 if part in ("layer_norm", "residual") else 1) * time.time_ms for part, time in parts.items())
    for key, parts in LEAST.items()
}

WORKED = {
    "the night asks for": f"asks for {NIGHT / 1e12:.0f} TFLOP/s ([the sum](index.md)), {NIGHT / 67e12:.1f} times",
    "datasheet's promise": f"That is {989 / 67:.1f} times as much",
    "add: arithmetic": f"= {FP32.least_time(ADD).arithmetic_ms * 1e3:.2f} µs",
    "add: megabytes": f"= {ADD.bytes / 1e6:.0f} MB, and",
    "add: bytes": f"= {FP32.least_time(ADD).bytes_ms * 1e3:.1f} µs. The bytes take "
    f"{FP32.least_time(ADD).bytes_ms / FP32.least_time(ADD).arithmetic_ms:.0f} times",
    "product: arithmetic": f"= {PRODUCT.flops / 1e9:.0f} Gflop, and 137 × 10⁹ / (989 × 10¹²) s = "
    f"{_microseconds(PRODUCT, BF16):.0f} µs",
    "product: bytes": f"= {PRODUCT.bytes / 1e6:.0f} MB, {BF16.least_time(PRODUCT).bytes_ms * 1e3:.0f} µs",
    "without the output": f"says {8 * 2**27 / 4.8e12 * 1e6:.0f} µs",
    "with the output": f"says {_microseconds(LARGE_ADD):.0f} µs",
    "its share": f"{{rec}}`{_microseconds(LARGE_ADD) / 1e3:.8f} / add_sweep.mi_128",
    "smallest add": f"where the bytes account for {12 * 2**20 / 4.8e12 * 1e6:.1f}",
    "ridges": f"989/4.8 = {BF16.ridge:.0f} flop/byte in bf16 and at 67/4.8 = {FP32.ridge:.0f} in fp32",
    "weights": f"the {2 * 8192**2 / 1e6:.0f} MB of weights",
    "crossing": f"Setting $I$ = 206 gives $m$ = {206 / (1 - 2 * 206 / 8192):.0f}",
    "level": f"{_microseconds(matmul_work(1, 8192, 8192, 2), BF16):.0f} µs, whether it multiplies one row",
    "x": f"numbers, {4 * 131072 * 768 / 1e6:.0f} MB)",
    "fused": f"that is {_microseconds(layer_norm_work(*SHAPE)):.0f} µs for either operation",
    "steps": f"{NORM_STEPS / 4.8e6:,.0f} µs for layer norm in steps and {SOFTMAX_STEPS / 4.8e6:.0f} µs for softmax",
    "gain": f"Predicted gain of {{term}}`fusion`: {NORM_STEPS / layer_norm_work(*SHAPE).bytes:.0f} and "
    f"{SOFTMAX_STEPS / softmax_work(*SHAPE).bytes:.0f}",
    "a vectorized step": f"/ {layer_norm_steps(*SHAPE)[2].work.bytes / 4.8e6:.4f} |",
    "a broadcast step": f"/ {layer_norm_steps(*SHAPE)[1].work.bytes / 4.8e6:.4f} |",
    "linear layer": f"= {matmul_work(32768, 3072, 768, 4).flops / 1e9:.0f} Gflop, so the backward pass costs "
    f"{2 * matmul_work(32768, 3072, 768, 4).flops / 1e9:.0f}",
    "block": f"{TOTAL['fp32']:.2f} ms become {TOTAL['bf16']:.2f}: a factor of "
    f"{TOTAL['fp32'] / TOTAL['bf16']:.1f}",
    "scores": f"have {block(4)['scores'].intensity:.0f} flop/byte in fp32, above that ridge of 14, and "
    f"{block(2)['scores'].intensity:.0f} in bf16",
    "widen, fp32": f"widen.median_ms / {LEAST['fp32']['widen'].time_ms:.5f} |",
    "widen, bf16": f"widen.median_ms / {LEAST['bf16']['widen'].time_ms:.6f} |",
    "array of scores": f"an array of {2 * 192 * 1024**2 / 1e6:.0f} MB",
    "attention, fp32": f"alone needs {4 * 192 * 1024**2 * 64 / 67e9:.2f} ms at the peak",
    "scores, fp32": f"fp32.scores.median_ms / {LEAST['fp32']['scores'].time_ms:.6f} |",
    "one row of weights": f"m_1.timing.median_ms / {_microseconds(matmul_work(1, 8192, 8192, 2), BF16) / 1e3:.7f} |",
    "instructions": f"are {67 / 2:.1f} × 10¹² instructions a second",
    "rows of 4095": f"{1 - (4095 / 4096) ** 3:.2%} less arithmetic".replace("%", " %"),
    "a row of 12,288": f"{4 * 12288 / 1e3:.0f} kB",
}


@pytest.mark.parametrize("name", WORKED)
def test_a_number_of_the_chapter_follows_from_the_datasheet(name):
    assert WORKED[name] in CHAPTER


def test_the_levels_end_is_where_the_two_times_meet():
    at = 206 / (1 - 2 * 206 / 8192)
    before, after = (BF16.least_time(matmul_work(m, 8192, 8192, 2)) for m in (int(at) - 5, int(at) + 5))
    assert (before.bound, after.bound) == ("memory", "compute")


def test_the_gain_counted_on_paper_is_within_a_tenth_of_the_measured_one():
    parts = recording.load("block_parts")
    measured = {
        key: sum(
            (2 if part in ("layer_norm", "residual") else 1) * parts[key][part]["median_ms"]
            for part in block(4)
        )
        for key in ("fp32", "half")
    }
    counted = TOTAL["fp32"] / TOTAL["bf16"]
    assert counted == pytest.approx(measured["fp32"] / measured["half"], rel=0.1)


def test_no_kernel_of_the_block_beats_its_bound():
    parts = recording.load("block_parts")
    for key, precision in (("fp32", "fp32"), ("half", "bf16")):
        for part, least in LEAST[precision].items():
            assert parts[key][part]["median_ms"] > least.time_ms, part


def test_the_recorded_card_confirms_its_own_datasheet_record():
    facts = recording.load("add_sweep")
    assert facts["l2_cache_size"] == H200.l2_bytes
    from_clock = facts["memory_clock_rate"] * 1e3 * facts["memory_bus_width"] / 8 * 2
    assert from_clock == pytest.approx(H200.bandwidth_bytes_per_s, rel=0.01)
    note = H200.bandwidth.note
    assert f"{facts['memory_bus_width']:,} bit" in note
    assert f"{from_clock / 1e9:,.0f}" in note


def test_no_measured_number_of_the_prose_is_typed():
    # Times with a decimal and rates in the running text are either from a recording or in WORKED.
    prose = re.sub(r"```.*?```|:::\{math\}.*?:::|\{rec\}`[^`]*`", "", CHAPTER, flags=re.DOTALL)
    typed = set(re.findall(r"\d+\.\d+ (?:µs|ms|GB/s|TB/s|TFLOP/s)", prose))
    assert typed <= {"0.25 µs", "41.9 µs", "4.76 ms", "0.77 ms", "4.8 TB/s"}


def test_the_l2_serves_the_small_additions_and_not_the_larger() -> None:
    adds = recording.load("add_sweep")
    assert adds["mi_2"]["warm_gb_per_s"] > H200.bandwidth_bytes_per_s / 1e9 > adds["mi_4"]["warm_gb_per_s"]
    assert adds["mi_1"]["cold_gb_per_s"] < 0.6 * H200.bandwidth_bytes_per_s / 1e9


def test_a_fixed_time_a_row_predicts_the_layer_norm_in_fp32_and_less_well_in_half() -> None:
    times = recording.load("third_limit")

    def misses(precision: str) -> list[float]:
        found = {key: value["median_ms"] for key, value in times[precision].items()}
        a_row = found["layer_norm_768"] - found["copy"]
        cases = ((256, 3), (3072, 0.25))
        return [abs((found["copy"] + by * a_row) / found[f"layer_norm_{c}"] - 1) for c, by in cases]

    assert max(misses("fp32")) < 0.1 < max(misses("half")) < 0.35


def test_an_odd_row_costs_and_an_odd_number_of_rows_does_not() -> None:
    odd = recording.load("odd_shapes")
    assert odd["m_4095"]["ms"] < 1.25 * odd["all_4096"]["ms"]
    for case in ("n_4095", "k_4095"):
        assert odd[case]["ms"] > 0.95 * odd["all_4095"]["ms"]
    for case in ("all_4092", "all_4094", "all_4098", "all_4100"):
        assert odd["all_4095"]["tflops"] < odd[case]["tflops"] < odd["all_4096"]["tflops"]


def test_the_level_of_the_few_rows_is_explained_by_bandwidth_and_start_as_far_as_the_chapter_says() -> None:
    adds, level_ms = recording.load("add_sweep"), recording.load("rows_sweep")["m_1"]["timing"]["median_ms"]
    bytes_ms = BF16.least_time(matmul_work(1, 8192, 8192, 2)).time_ms
    share = adds["mi_128"]["warm_gb_per_s"] * 1e9 / H200.bandwidth_bytes_per_s
    start_ms = 2 * adds["mi_16"]["cold"]["median_ms"] - adds["mi_32"]["cold"]["median_ms"]
    explained = (bytes_ms / share + start_ms - bytes_ms) / (level_ms - bytes_ms)
    assert "little more than half of the excess" in CHAPTER
    assert 0.5 < explained < 0.6


def test_the_time_of_few_rows_leaves_its_level_between_128_and_256() -> None:
    rows = {
        key: row["timing"]["median_ms"] for key, row in recording.load("rows_sweep").items() if key != "dtype"
    }
    assert "between 128 and 256" in CHAPTER
    assert rows["m_128"] < 1.05 * rows["m_1"]
    assert rows["m_256"] > 1.2 * rows["m_1"]


def test_the_kernels_of_odd_shapes_are_of_the_generations_that_the_chapter_names() -> None:
    odd = recording.load("odd_shapes")
    names = {
        key: [name for name in odd[key]["kernels"] if "Memset" not in name]
        for key in odd
        if "kernels" in odd[key]
    }
    assert all(len(found) == 1 for found in names.values())
    marks = {"all_4096": "sm90", "m_4095": "sm90", "all_4100": "align2", "all_4095": "align1"}
    assert {key: mark in names[key][0] for key, mark in marks.items()} == dict.fromkeys(marks, True)
    assert "cutlass_80" in names["all_4100"][0]
    assert "cutlass_75" in names["all_4095"][0]
    assert all("Memset (Device)" in odd[key]["kernels"] for key in ("all_4096", "m_4095"))


def test_a_row_of_the_layer_norm_has_the_block_that_the_chapter_quotes_from_a_trace() -> None:
    (kernel,) = recording.load("layer_norm_traces")["library"]["kernels"]
    assert kernel["grid"][0] == kernel["shapes"][0][0], "a block a row"
    assert kernel["block"] == [32, 4, 1]
    assert "128 threads (32 × 4 in" in CHAPTER


def test_the_caption_of_the_instructions_promises_no_order_that_three_of_the_five_do_not_show() -> None:
    limits = recording.load("third_limit")
    gains = {
        name: limits["fp32"][name]["median_ms"] / limits["half"][name]["median_ms"]
        for name in ("copy", "relu", "exp")
    }
    assert all(gain == pytest.approx(2, rel=0.02) for gain in gains.values())
    assert "less 16 bits buy" not in draw.instruction_costs(limits).caption


def test_the_figures_of_the_profiler_that_name_a_bound_are_not_those_of_the_caches() -> None:
    """A product is busiest in a cache, far above the bus: the page must not take one for the other."""
    lines = " ".join(recording.load("ncu_speed_of_light")["lines"])
    busiest, bus = (
        float(re.search(rf"{name} Throughput +% +([\d.]+)", lines)[1]) for name in ("Memory", "DRAM")
    )
    assert busiest > 5 * bus
    assert 'Read "DRAM Throughput"' in CHAPTER
