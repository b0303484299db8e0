"""Facts about the charts and tables of the roofline chapter, and its numbers worked by hand."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

from gpucourse import hardware
from gpucourse.plots import roof as draw
from gpucourse.recording import Recording, load
from gpucourse.roofline import Roofline, elementwise_work, matmul_work

CHAPTER = (Path(__file__).parents[1] / "book" / "05_roofline.md").read_text(encoding="utf-8")
SIZE = 10**9
ROOFS = {
    "fp32": Roofline(peak_flops=50e12, bandwidth=4e12),
    "bf16": Roofline(peak_flops=700e12, bandwidth=4e12),
}


def recording(data, gpu="NVIDIA H200"):
    return Recording(name="made_up", data=data, provenance={"gpu": gpu, "date": "2026-12-01"})


def stream(reads, writes, rates_gb_per_s):
    moved = (reads + writes) * SIZE
    return {
        "reads": reads,
        "writes": writes,
        "call": "a.copy_(b)",
        "bytes": moved,
        "samples_ms": [moved / rate / 1e6 for rate in rates_gb_per_s],
    }


def timing(median_ms, *, l2="warm", elapsed_ms=None, throttled=False):
    samples = [median_ms * factor for factor in (0.99, 1.0, 1.02)]
    return {
        "median_ms": median_ms,
        "iqr_ms": 0.01 * median_ms,
        "samples_ms": samples,
        "elapsed_ms": elapsed_ms,
        "l2": l2,
        "throttled": throttled,
    }


def point(name, precision, work, median_ms, launch=False, **facts):
    return {
        "name": name,
        "precision": precision,
        "flops": work.flops,
        "bytes": work.bytes,
        "launch": launch,
        "timing": timing(median_ms, **facts),
    }


def add(n):
    return elementwise_work(n, reads=(4, 4), writes=(4,))


def row(op, family, calls, least_us, measured_us, *, kernels=None, reason=None, shapes=((16384, 768),)):
    return {
        "op": f"aten::{op}",
        "family": family,
        "shapes": [list(shape) for shape in shapes],
        "dtypes": ["float32", "bfloat16"],
        "calls": calls,
        "kernels": kernels or calls,
        "bound": None if least_us is None else "memory",
        "reason": reason,
        "least_us": least_us,
        "measured_us": measured_us,
    }


STEP = {
    "rows": [
        row("mm", "products", 36, 3000.0, 3600.0),
        row("addmm", "products", 12, 1000.0, 1500.0),
        row("gelu", "element-wise", 12, 500.0, 900.0),
        row("sort", "other", 1, None, 250.0, kernels=5, reason="no counting rule"),
    ],
    "families": {
        "products": {"calls": 48, "least_us": 4000.0, "expected_us": 4700.0, "measured_us": 5100.0},
        "element-wise": {"calls": 12, "least_us": 500.0, "expected_us": 500.0, "measured_us": 900.0},
        "other": {"calls": 1, "least_us": 0.0, "expected_us": 0.0, "measured_us": 250.0},
    },
    "gap_us": 400.0,
}
STREAMS = {
    "array_bytes": SIZE,
    "kinds": {"read": stream(1, 0, (4300, 4400, 4500)), "copy": stream(1, 1, (4200, 4250, 4260))},
}
PRODUCTS = {
    "rates": {
        "torch.float32": [{"m": 2048, "n": 2048, "k": 2048, "random": [50, 51, 52], "zeros": [60, 61]}],
        "torch.bfloat16": [{"m": 4096, "n": 4096, "k": 8192, "random": [700, 710], "zeros": [900, 910]}],
    }
}
CURVE = {
    "dtype": "bfloat16",
    "width": 4096,
    "zeros": [[0.1 * k, 900.0, 1960.0] for k in range(1, 40)],
    "random": [[0.1 * k, 760.0 - k, 1950.0 - 10 * k] for k in range(1, 40)],
}
POINTS = {
    "l2_bytes": 60e6,
    "points": [
        point("add, 1 Ki", "fp32", add(2**10), 0.001, launch=True, elapsed_ms=0.018),
        point("add, 2 Mi", "fp32", add(2**21), 0.004),
        point("add, 2 Mi, flushed", "fp32", add(2**21), 0.009, l2="cold"),
        point("product", "bf16", matmul_work(4096, 4096, 4096, 2), 0.2),
    ],
}
CHARTS = {
    "streams": lambda gpu: draw.streams(recording(STREAMS, gpu)),
    "under_load": lambda gpu: draw.under_load(recording(CURVE, gpu)),
    "on_the_roof": lambda gpu: draw.on_the_roof(recording(POINTS, gpu), ROOFS),
    "budgets": lambda gpu: draw.budgets(recording({"x": 1}, gpu), {"eager": STEP}),
}


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA Unheard-of"])
@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_shows_its_values_in_its_table_with_the_provenance(name, gpu):
    chart = CHARTS[name](gpu)
    page = chart._repr_html_()
    assert "<svg" in page
    assert gpu in page
    assert page.count("<tr>") == len(chart.rows) + 1
    assert all(len(cells) == len(chart.header) for cells in chart.rows)
    assert not re.search(r"\bnan\b", page, re.IGNORECASE)


# --- ceilings ---------------------------------------------------------------------------------------------


def test_a_stream_is_judged_by_the_median_of_all_the_bytes_it_moves():
    read, copy = draw.streams(recording(STREAMS)).rows
    assert read[0] == "read"
    assert read[4:] == ("4,400", "4,300 to 4,500", f"{4400 / 4800:.1%}")
    assert copy[4:] == ("4,250", "4,200 to 4,260", f"{4250 / 4800:.1%}")


def test_a_stream_on_a_card_without_a_record_has_a_rate_and_no_share():
    (_, *_, rate, _, share), _ = draw.streams(recording(STREAMS, "NVIDIA Unheard-of")).rows
    assert (rate, share) == ("4,400", "unavailable for NVIDIA Unheard-of")


def test_products_are_shared_by_their_own_precisions_dense_peak():
    fp32, bf16 = draw.products(recording(PRODUCTS)).rows
    assert fp32 == ("fp32", "2,048³", "51.0", "50.0 to 52.0", f"{51 / 67:.0%}", "60.5")
    assert bf16 == ("bf16", "4,096×4,096×8,192", "705", "700 to 710", f"{705 / 989:.0%}", "905")


def test_products_on_a_card_without_a_record_have_no_share():
    assert {cells[4] for cells in draw.products(recording(PRODUCTS, "NVIDIA Unheard-of")).rows} == {"–"}


def test_the_table_of_the_load_is_thinned_and_keeps_both_fillings():
    rows = draw.under_load(recording(CURVE)).rows
    assert {cells[0] for cells in rows} == {"zeros", "random"}
    assert len(rows) <= 2 * 40
    assert rows[0] == ("zeros", "0.10", "900", "1,960")


def ceiling(tflops, shape=(4096, 4096, 4096), transposed=False):
    return {
        "what": " × ".join(map(str, shape)) + (", second matrix transposed" if transposed else ""),
        "tflops": tflops,
        "low_tflops": 0.9 * tflops,
        "high_tflops": 1.1 * tflops,
        "shape": list(shape),
    }


def test_ceilings_stand_beside_the_datasheet_and_say_what_was_not_measured():
    roofs = {
        "fp32": {"burst": ceiling(50), "datasheet": {"tflops": 67.0}},
        "fp16": {"burst": ceiling(700, (4096, 4096, 8192)), "datasheet": None},
        "fp8": None,
    }
    table = draw.ceilings(recording({"roofs": roofs}), {"fp32": ceiling(40, transposed=True), "fp16": None})
    assert table.rows == (
        ("fp32", "burst", "50.0\N{NO-BREAK SPACE}(45.0–55.0)", f"{50 / 67:.0%} of 67", "4,096³"),
        ("fp32", "sustained", "40.0\N{NO-BREAK SPACE}(36.0–44.0)", f"{40 / 67:.0%} of 67", "4,096³ᵀ"),
        ("fp16", "burst", "700\N{NO-BREAK SPACE}(630–770)", "unavailable", "4,096×4,096×8,192"),
        ("fp16", "sustained", "not measured", "", ""),
    )


def test_a_sweep_stands_beside_ours_round_by_round_and_a_reading_that_is_missing_is_a_dash():
    rounds = [
        {"peers": {"event_loop": {"tflops": 49.0}, "do_bench": {"tflops": None}}},
        {"peers": {"event_loop": {"tflops": 51.26}, "do_bench": {"tflops": 48.0}}},
    ]
    data = {
        "roofs": {"fp32": {"burst": ceiling(50)}, "fp16": {"burst": ceiling(700)}},
        "peers": {"fp32": rounds, "fp16": rounds[:1]},
    }
    turns = [
        {"ours_tflops": 40.0, "peer_tflops": {"2048 × 2048 × 2048": 30.0, "4096 × 4096 × 4096": 41.0}},
        {"ours_tflops": 42.0, "peer_tflops": {}},
    ]
    assert draw.beside_peers(recording(data), {"fp32": {"turns": turns}}).rows == (
        ("fp32", "50.0 (45.0 to 55.0)", "49.0; 51.3", "–; 48.0", "40.0; 42.0", "41.0; –"),
        ("fp16", "700.0 (630.0 to 770.0)", "49.0", "–", "not measured", "not measured"),
    )


# --- kernels under the roof -------------------------------------------------------------------------------


def test_a_kernel_that_waits_for_its_launch_stands_twice_once_by_each_time():
    rows = draw.on_the_roof(recording(POINTS), ROOFS).rows
    assert [cells[1] for cells in rows][:2] == ["add, 1 Ki", "add, 1 Ki, one call"]
    assert rows[0][4] == "1.00"
    assert rows[1][4] == "18.00"
    assert "launch-bound" in rows[1][-1]


def test_a_kernel_served_by_the_cache_stays_above_the_roof_and_says_so():
    (warm,) = [cells for cells in draw.on_the_roof(recording(POINTS), ROOFS).rows if cells[1] == "add, 2 Mi"]
    share = (2**21 / 0.004e-3) / (4e12 / 12)
    assert share > 1
    assert warm[-1].startswith(f"{100 * share:.0f} % of the roof")
    assert "L2" in warm[-1]


def test_the_same_kernel_with_the_cache_flushed_is_held_to_the_memory():
    (cold,) = [cells for cells in draw.on_the_roof(recording(POINTS), ROOFS).rows if "flushed" in cells[1]]
    assert cold[-1].startswith("memory side")


def test_the_names_of_the_roofs_stand_beyond_their_lines_and_clear_of_the_letters():
    (ax,) = draw.on_the_roof(recording(POINTS), ROOFS).fig.axes
    names = {text.get_text(): text.xy[0] for text in ax.texts if "," in text.get_text()}
    letters = [text.xy[0] for text in ax.texts if len(text.get_text()) == 1]
    assert set(names) == {"fp32, 50", "bf16, 700"}
    assert min(names.values()) > max(letters)


def test_a_kernel_whose_precision_has_no_measured_roof_is_left_out():
    rows = draw.on_the_roof(recording(POINTS), {"fp32": ROOFS["fp32"]}).rows
    assert [cells[2] for cells in rows] == ["fp32"] * 4


def test_without_an_l2_size_nothing_is_put_down_to_it():
    rows = draw.on_the_roof(recording({**POINTS, "l2_bytes": None}), ROOFS).rows
    assert not any("L2 and" in cells[-1] for cells in rows)


# --- budgets ----------------------------------------------------------------------------------------------


def test_a_budget_adds_up_each_family_and_keeps_what_has_no_count_in_the_measured_time():
    rows = draw.budgets(recording({"x": 1}), {"eager": STEP}).rows
    assert rows == [
        ("eager", "products", "48", "4.00", "5.10", f"{4 / 5.1:.0%}"),
        ("eager", "element-wise", "12", "0.50", "0.90", f"{5 / 9:.0%}"),
        ("eager", "other", "1", "0.00", "0.25", "0%"),
        ("eager", "gaps", "", "0.00", "0.40", "–"),
    ]


def test_families_beyond_the_palette_share_one_colour_and_each_keeps_its_row():
    sums = {"calls": 1, "least_us": 1.0, "expected_us": 1.0}
    step = {"families": {f"family {k}": {**sums, "measured_us": 9.0 - k} for k in range(8)}, "gap_us": 0.0}
    chart = draw.budgets(recording({"x": 1}), {"made up": step})
    (legend,) = chart.fig.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        *(f"family {k}" for k in range(5)),
        "all others",
    ]
    assert len(chart.rows) == 8


def test_each_precision_has_an_axis_of_its_own_so_that_the_short_steps_can_be_read():
    steps = {"fp32, eager": STEP, "bf16, eager": STEP, "bf16, compiled": STEP}
    axes = draw.budgets(recording({"x": 1}), steps).fig.axes
    assert [len(ax.get_yticks()) for ax in axes] == [2, 4]


def test_letters_of_one_intensity_stand_left_and_right_in_turn():
    assert draw._sides([(0.1, 3.0), (0.1, 1.0), (0.1, 2.0), (10.0, 1.0)]) == ["left", "left", "right", "left"]


def test_of_two_neighbours_the_one_further_left_has_its_letter_on_the_left():
    assert draw._sides([(592.0, 690.0), (693.0, 660.0)]) == ["right", "left"]
    assert draw._sides([(693.0, 690.0), (592.0, 660.0)]) == ["left", "right"]


def test_letters_on_one_side_of_a_column_stand_a_letter_apart():
    places = [(0.1, 1.0), (0.1, 1.1), (0.1, 1.2), (0.1, 100.0), (10.0, 1.0)]
    lifts = draw._lifts(places, ["left"] * 3 + ["left", "left"])
    heights = [draw._POINTS_A_DECADE * np.log10(y) + lift for (_, y), lift in zip(places, lifts, strict=True)]
    assert min(np.diff(heights[:4])) >= draw._LETTER_POINTS - 1e-9
    assert (lifts[0], lifts[3], lifts[4]) == (0.0, 0.0, 0.0)
    assert draw._lifts(places[:2], ["left", "right"]) == [0.0, 0.0]


def test_the_idle_time_is_hatched_in_the_pages_own_colour():
    chart = draw.budgets(recording({"x": 1}), {"fp32, eager": {**STEP, "gap_us": 500.0}})
    (gap,) = [patch for patch in chart.fig.axes[0].patches if patch.get_hatch()]
    assert to_hex(gap.get_edgecolor()) == draw.plots.INK


def test_shares_are_of_the_steps_own_time_and_the_last_is_what_lies_outside_its_kernels():
    step = {
        "step_ms": 10.0,
        "busy_us": 9200.0,
        "burst": {"least_over_step": 0.7, "expected_over_step": 0.801},
        "every_call_alone": {"expected_over_step": 0.9},
    }
    table = draw.shares(recording({"x": 1}), {"made up": step})
    assert table.rows == (("made up", "10.0", "70.0%", "80.1%", "90.0%", "8.0%"),)
    assert len(table.header) == 6


def test_losses_are_sorted_by_what_lies_beyond_the_bound_and_the_rest_is_summed():
    table = draw.losses(recording({"x": 1}), STEP, caption="made up", most=2)
    assert [line[0] for line in table.rows] == ["mm", "addmm", "all others"]
    assert table.rows[0] == ("mm", "16,384×768", "fp32, bf16", "36", "memory", "3,000", "3,600", "600")
    assert table.rows[-1] == ("all others", "", "", "13", "", "500", "1,150", "650")


def test_a_sum_over_small_calls_stands_with_the_rest_however_large():
    step = {"rows": [*STEP["rows"], row("9 more", "products", 90, 10.0, 9000.0, shapes=())]}
    lines = draw.losses(recording({"x": 1}), step, caption="made up", most=9).rows
    assert lines[-1] == ("all others", "", "", "90", "", "10", "9,000", "8,990")
    assert len(lines) == 5


def test_a_call_without_a_count_says_why_and_all_of_its_time_is_beyond():
    table = draw.losses(recording({"x": 1}), STEP, caption="made up")
    (sort,) = [line for line in table.rows if line[0] == "sort"]
    assert sort[4:] == ("no counting rule", "no count", "250", "250")


# --- the chapter's numbers, worked again ------------------------------------------------------------------

H200 = hardware.device("H200")


def test_the_three_kernels_by_hand_come_out_as_the_chapter_says():
    fp32, bf16 = Roofline.of(H200, "fp32"), Roofline.of(H200, "bf16")
    scores, product = matmul_work(1024, 1024, 64, 2), matmul_work(4096, 4096, 4096, 2)
    assert (scores.flops, scores.bytes) == (134_217_728, 2_359_296)
    assert f"{scores.intensity:.1f} | 989 | 273 | 273" == "56.9 | 989 | 273 | 273"
    assert round(bf16.attainable(scores.intensity) / 1e12) == 273
    assert round(product.intensity) == 1365
    assert round(product.intensity * 4.8) == 6554
    assert round(fp32.least_time(add(2**24)).time_ms * 1e3, 1) == 41.9
    assert round(bf16.least_time(scores).time_ms * 1e3, 3) == 0.492
    assert round(bf16.least_time(product).time_ms * 1e3) == 139
    for text in ("134,217,728 flop", "2,359,296 bytes", "41.9 µs", "0.492 µs", "139 µs", "6,554"):
        assert text in CHAPTER


def test_the_nights_pace_and_its_arithmetic_are_as_the_chapter_says():
    assert round(16384 / (12e9 / 28800) * 1e3, 1) == 39.3
    assert round(6 * 124e6 * 16384 / 1e12, 1) == 12.2
    assert round(6 * 124e6 * 16384 / 989e12 * 1e3, 1) == 12.3
    assert round(12e9 / 28800) == 416_667


def test_three_roundings_stay_far_below_the_declared_tolerance():
    assert 3 * np.finfo(float).eps / 2 < 1e-15 < 1e-12


def test_the_chapter_lists_every_symbol_of_its_derivation():
    table = CHAPTER.split(":::{list-table}")[1].split("\n:::")[0]
    for symbol in ("$R$", "$n$", "$t$", "$t_k$", "$W_k$", "$Q_k$", "$I_k", "$P_k$", "$B$", "$C_{12,k}$"):
        assert symbol in table


def test_the_bursts_that_the_chapter_compares_were_reached_by_the_shapes_that_it_names():
    assert "528/512, 3.1 % more" in CHAPTER
    assert (3072 // 256) * (5632 // 128) == 528 == 4 * 132
    assert (4096 // 256) * (8448 // 128) == 8 * 132
    assert (4096 // 256) * (4096 // 128) == 512 == 4 * 132 - 16
    assert "nvjet_sm90_tst_256x128" in " ".join(load("ncu_speed_of_light")["lines"])
    by_hand = load("plain_products")["rates"]["torch.bfloat16"][2]
    assert (by_hand["m"], by_hand["n"], by_hand["k"]) == (4096, 4096, 8192)
    assert load("roofs_here")["bf16"]["burst"]["shape"] == [4096, 4096, 8192]
    products = load("roofline_burst")["roofs"]["bf16"]["products"]
    assert [products[place]["what"] for place in (8, 12, 14)] == [
        "4096 × 4096 × 8192",
        "4096 × 8448 × 8192",
        "3072 × 5632 × 8192",
    ]
    assert products[12]["tflops"] == pytest.approx(products[14]["tflops"], rel=0.002)
    assert load("step_budgets")["roofs"]["bf16"]["burst"]["shape"] == [3072, 5632, 8192]


def test_the_rows_that_the_chapter_quotes_by_their_place_are_those_it_speaks_of():
    calls, rows = load("night_step")["calls"], load("step_budgets")["steps"]["bf16_eager"]["rows"]
    wide, narrow = [[16384, 50304]] * 2, [[16, 1024, 768]] * 2
    known = {  # operation, shapes, types with the one that is written first, how often
        "night_step.calls[15]": ("aten::copy_", wide, ["bfloat16", "float32"], 1),
        "night_step.calls[2]": ("aten::copy_", wide, ["float32", "bfloat16"], 1),
        "night_step.calls[22]": ("aten::copy_", narrow, ["bfloat16", "float32"], 49),
        "night_step.calls[23]": ("aten::copy_", narrow, ["float32", "bfloat16"], 25),
        "step_budgets.steps.bf16_eager.rows[41]": (
            "aten::mm",
            [[16384, 50304], [50304, 768]],
            ["bfloat16"] * 2,
            1,
        ),
    }
    known["step_budgets.steps.bf16_eager.rows[42]"] = (
        "aten::add_",
        [[16, 1024, 768]] * 2,
        ["float32"] * 2,
        24,
    )
    quoted = set(re.findall(r"night_step\.calls\[\d+\]|step_budgets\.steps\.\w+\.rows\[\d+\]", CHAPTER))
    assert quoted == set(known)
    for path, facts in known.items():
        place = int(path.rstrip("]").split("[")[1])
        found = (calls if path.startswith("night") else rows)[place]
        assert (found["op"], found["shapes"], found["dtypes"], found["calls"]) == facts, path


def test_the_points_that_the_chapter_quotes_by_their_place_are_those_it_speaks_of():
    points = load("kernels_on_the_roof")["points"]
    names = {
        0: "add, 1 Ki",
        2: "add, 1 Mi",
        3: "add, 2 Mi",
        4: "add, 2 Mi, L2 flushed",
        5: "add, 128 Mi",
        13: "product, 768 to 3,072",
        15: "product, 4,096 wide",
        16: "causal attention",
    }
    quoted = {int(place) for place in re.findall(r"kernels_on_the_roof\.points\[(\d+)\]", CHAPTER)}
    assert quoted == set(names)
    assert {place: points[place]["name"] for place in quoted} == names


def test_a_flop_an_element_in_the_chapters_trial_is_its_flop_a_byte_times_the_elements_size():
    by_hand, sizes = (1 / 12, 134_217_728 / 2_359_296, 4096 / 3), (4, 2, 2)
    (line,) = re.findall(r'"flop an element": \{"I": ureg\.Quantity\(\[([^]]*)\], "FLOP"\)', CHAPTER)
    (slip,) = re.findall(r'"flop an element, not a byte": \(989, ([\d.]+), 4\.8\)', CHAPTER)
    tried = [float(Fraction(text.strip().replace(" ", ""))) for text in line.split(",")]
    assert tried == pytest.approx([i * size for i, size in zip(by_hand, sizes, strict=True)], rel=1e-3)
    assert float(slip) == tried[1]


# --- sentences that compare recorded figures --------------------------------------------------------------


def test_who_leads_in_a_burst_is_as_the_chapter_says():
    burst = load("roofline_burst")
    leads = {}
    for precision, rounds in burst["peers"].items():
        pairs = max(row["peers"]["event_loop"]["tflops"] / row["ours_tflops"] - 1 for row in rounds)
        leads[precision] = pairs
        best = burst["roofs"][precision]["burst"]
        if precision != "tf32":
            assert pairs < best["iqr_tflops"] / best["tflops"], "less than our samples scatter"
    assert max(leads, key=leads.get) == "fp16"
    assert "transposed" in burst["roofs"]["tf32"]["burst"]["what"]
    assert leads["tf32"] < -0.01
    copies = [
        rate
        for rows in burst["peers"].values()
        for row in rows
        for rate in row["peer_copy_gb_per_s"].values()
    ] + [row["ours_copy_gb_per_s"] for rows in burst["peers"].values() for row in rows]
    assert {round(100 * rate / 4800) for rate in copies} == {89}


def test_who_leads_hot_and_by_how_much_is_as_the_chapter_says():
    hot = {**load("roofline_sustained_full"), **load("roofline_sustained_half")}
    leads = {
        precision: [max(turn["peer_tflops"].values()) / turn["ours_tflops"] - 1 for turn in row["turns"]]
        for precision, row in hot.items()
    }
    assert all(lead < 0 for precision in ("fp32", "tf32") for lead in leads[precision])
    assert all(sorted(lead > 0 for lead in leads[p]) == [False, True] for p in ("bf16", "fp16"))
    assert max(lead for row in leads.values() for lead in row) == leads["fp16"][0]
    first, second = (turn["peer_tflops"] for turn in hot["fp16"]["turns"])
    assert max(first, key=first.get) == max(second, key=second.get) == "3072 × 5632 × 8192"
    burst = load("roofline_burst")["roofs"]
    shares = [burst["fp16"]["burst"]["tflops"] / burst["bf16"]["burst"]["tflops"]]
    shares += [hot["fp16"]["roof"]["sustained"]["tflops"] / hot["bf16"]["roof"]["sustained"]["tflops"]]
    assert f"{shares[0]:.0%}" == f"{shares[1]:.0%}", "in a burst and hot alike"


def test_what_stands_above_the_roof_by_a_hundredth_or_more_is_what_the_chapter_lists():
    listed = {"aten::add_", "aten::mul", "aten::gelu_backward", "aten::_foreach_addcmul_", "aten::mm"}
    in_step = load("step_budgets")["steps"]
    above = {}
    for name, step in in_step.items():
        for cells in step["rows"]:
            excess = (cells["least_us"] or 0.0) / cells["measured_us"] - 1
            if excess >= 0.01 and "generated" not in cells["op"] and not cells["op"].startswith("triton"):
                above.setdefault(cells["op"], []).append((excess, name, cells))
    assert set(above) == listed
    assert all(
        name == "fp32_eager" for op in ("aten::mul", "aten::gelu_backward") for _, name, _ in above[op]
    )
    assert all(
        [16384, 50304] in row["shapes"] or [50304, 16384] in row["shapes"] for *_, row in above["aten::mm"]
    )
    additions = in_step["bf16_eager"]["rows"][42]
    assert (additions["op"], additions["calls"]) == ("aten::add_", 24)
    largest = max(excess for op in listed - {"aten::_foreach_addcmul_"} for excess, *_ in above[op])
    assert additions["least_us"] / additions["measured_us"] - 1 == largest
    (fp32,) = [row for _, name, row in above["aten::mm"] if name == "fp32_eager"]
    assert fp32["least_us"] > fp32["alone_us"], "in fp32 the product beats the ceiling alone, too"


def test_the_first_steps_of_the_night_show_no_drift():
    samples = load("night_step")["samples_ms"]
    assert "first seven steps" in CHAPTER
    assert len(samples) == 7
    assert samples not in (sorted(samples), sorted(samples, reverse=True))
    assert samples.index(max(samples)) < 3, "the slowest is among the first"
