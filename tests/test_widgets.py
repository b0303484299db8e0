"""Grids of frames without a browser: the state that a page gets, moved as html-manager would move it."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import random
import re
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import ipywidgets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ipywidgets.embed import dependency_state, embed_data

from gpucourse import hardware
from gpucourse.memory_ledger import (
    FixedPartOverBudgetError,
    LedgerValueError,
    MemoryLedger,
    UnlimitedMicrobatchError,
)
from gpucourse.roof_points import MeasuredRoof, RoofPoint, recorded_roofs
from gpucourse.roofline import Roofline, Work
from gpucourse.widgets import (
    NIGHT_FLOPS,
    Control,
    ControlError,
    Each,
    FrameGrid,
    frame_grid,
    launch_lab,
    memory_lab,
    roofline_lab,
)


@pytest.fixture(autouse=True)
def _no_widgets_left() -> Iterator[None]:
    """Close what a test made: ipywidgets keeps every widget, and looks through all of them for links."""
    yield
    ipywidgets.Widget.close_all()


VOID = {"br", "hr", "img", "input", "wbr"}


class Visible(HTMLParser):
    """The text of a leaf that is shown when the alternatives ``shown`` are: one an attribute."""

    def __init__(self, shown: dict[str, str]) -> None:
        super().__init__()
        self.shown, self.hidden_from, self.open, self.parts = shown, 0, 0, []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in VOID:
            return
        self.open += 1
        which = {name: value.split() for name, value in attrs if name in self.shown and value is not None}
        if not self.hidden_from and any(self.shown[name] not in values for name, values in which.items()):
            self.hidden_from = self.open

    def handle_endtag(self, tag: str) -> None:
        if self.hidden_from == self.open:
            self.hidden_from = 0
        self.open -= 1
        if tag in ("td", "th", "caption", "tr", "p", "div"):
            self.parts.append("\n" if tag in ("tr", "p", "div", "caption") else "\t")

    def handle_data(self, data: str) -> None:
        if not self.hidden_from:
            self.parts.append(data)


class StaticPage:
    """What html-manager does with a page's widget state: models, one-way links, one visible child a Stack."""

    def __init__(self, grid: FrameGrid) -> None:
        embedded = embed_data(views=[grid], state=dependency_state([grid], drop_defaults=False))
        text = json.dumps(embedded["manager_state"])  # it must survive being JSON in a page
        self.models = {key: model["state"] for key, model in json.loads(text)["state"].items()}
        self.root = embedded["view_specs"][0]["model_id"]

    def named(self, name: str) -> list[str]:
        return [key for key, state in self.models.items() if state["_model_name"] == name]

    def control(self, label: str) -> str:
        (found,) = (key for key, state in self.models.items() if state.get("description") == label)
        return found

    def set(self, label: str, value: int) -> None:
        """Move a slider to a value or a menu to a position."""
        source = self.control(label)
        trait = "value" if self.models[source]["_model_name"] == "IntSliderModel" else "index"
        self.models[source][trait] = value
        for key in self.named("DirectionalLinkModel"):
            (from_, from_trait), (to, to_trait) = self.models[key]["source"], self.models[key]["target"]
            if (from_.removeprefix("IPY_MODEL_"), from_trait) == (source, trait):
                self.models[to.removeprefix("IPY_MODEL_")][to_trait] = value

    def leaves(self, key: str) -> list[str]:
        state = self.models[key.removeprefix("IPY_MODEL_")]
        if state["_model_name"] == "HTMLModel":
            return [state["value"]]
        children = state.get("children", [])
        if state["_model_name"] == "StackModel":
            children = [children[state["selected_index"]]]
        return [leaf for child in children for leaf in self.leaves(child)]

    def text(self) -> str:
        leaves = self.leaves(self.root)
        sheets = [
            found for leaf in leaves for found in re.findall(r'\[(data-c\d?)\]:not\(\[\1~="(\d+)"\]\)', leaf)
        ]
        shown = dict(sheets)
        assert len(shown) == len(sheets) > 0
        (frame,) = (leaf for leaf in leaves if "<style>" not in leaf)
        visible = Visible(shown)
        visible.feed(frame)
        return "".join(visible.parts)

    def table(self) -> dict[str, str]:
        lines = self.text().replace("\xa0", " ").splitlines()
        return {line.split("\t")[0]: line.split("\t")[1] for line in lines if "\t" in line}


def expected_table(ledger: MemoryLedger, microbatch: int) -> dict[str, str]:
    """Give the first two columns of the lab's table, from the ledger alone."""
    try:
        largest = str(ledger.max_microbatch) if ledger.max_microbatch <= 10**6 else "over a million"
    except FixedPartOverBudgetError:
        largest = "none"
    except UnlimitedMicrobatchError:
        largest = "no limit"
    fixed = "resident" if ledger.fixed_gb <= ledger.budget_gb else "over the budget"
    return {
        "Item": "Computed state",
        "Fixed part": f"{ledger.fixed_gb:.2f} GB, {fixed}",
        **{
            f"Block {k}": f"{block.activations_gb:.2f} GB, {block.state}"
            for k, block in enumerate(ledger.blocks(microbatch), start=1)
        },
        "Predicted peak": f"{ledger.total_gb(microbatch):.2f} GB",
        "Budget": f"{ledger.budget_gb:.2f} GB",
        "Largest microbatch": largest,
    }


LABELS = {
    "activations_gb_per_sample": "Activations a sample (GB)",
    "fixed_gb": "Fixed part (GB)",
    "device_gb": "Device (GB)",
    "reserve": "Reserve",
}
STEPS = {
    "activations_gb_per_sample": (0.085, 0.17, 0.34, 0.68, 1.36),
    "fixed_gb": (1.6, 3.2, 6.4, 12.8),
    "device_gb": (12.0, 16.0, 24.0, 48.0, 80.0),
    "reserve": (0.0, 0.1, 0.2),
}
MICROBATCH = "Microbatch (samples)"


@pytest.fixture(scope="module")
def lab() -> StaticPage:
    return StaticPage(memory_lab())


# --- the memory lab ----------------------------------------------------------------------------------


def test_the_lab_opens_at_sixteen_with_the_given_plan(lab: StaticPage) -> None:
    page = StaticPage(memory_lab())
    slider = page.models[page.control(MICROBATCH)]
    assert (slider["_model_name"], slider["min"], slider["max"], slider["value"]) == (
        "IntSliderModel",
        0,
        64,
        16,
    )
    table = page.table()
    assert [table[f"Block {k}"] for k in range(1, 6)] == [
        f"{gb} GB, resident" for gb in ("1.09", "2.18", "3.26", "4.35", "5.44")
    ]
    assert table["Largest microbatch"] == "54"
    assert "Microbatch 16: fits, 12.96 GB to spare\n" in page.text()


def test_the_microbatch_is_the_first_control_and_the_assumptions_follow() -> None:
    grid = memory_lab()
    shown = [w for child in grid.children for w in (child, *getattr(child, "children", ()))]
    labels = [w.description for w in shown if getattr(w, "description", "")]
    assert labels == [MICROBATCH, *LABELS.values()]


@pytest.mark.parametrize("seed", range(40))
def test_any_setting_shows_the_numbers_of_the_ledger(lab: StaticPage, seed: int) -> None:
    rng = random.Random(seed)
    positions = {name: rng.randrange(len(steps)) for name, steps in STEPS.items()}
    microbatch = rng.randrange(65)
    for name, position in positions.items():
        lab.set(LABELS[name], position)
    lab.set(MICROBATCH, microbatch)
    ledger = MemoryLedger(**{name: STEPS[name][k] for name, k in positions.items()})
    assert lab.table() == expected_table(ledger, microbatch)
    assert f"Microbatch {microbatch}: {ledger.verdict(microbatch)}\n" in lab.text()


def test_every_control_has_its_steps_and_marks_the_given_one(lab: StaticPage) -> None:
    for name, steps in STEPS.items():
        options = lab.models[lab.control(LABELS[name])]["_options_labels"]
        assert len(options) == len(steps)
        assert [option for option in options if option.endswith(" (given)")] == [
            {
                "activations_gb_per_sample": "0.34 (given)",
                "fixed_gb": "3.2 (given)",
                "device_gb": "24 (given)",
                "reserve": "10 % (given)",
            }[name]
        ]


def test_the_comparison_fails_where_the_slider_is_linked_to_nothing() -> None:
    page = StaticPage(memory_lab(device_gb=(), fixed_gb=(), reserve=()))
    slider = page.control(MICROBATCH)
    for key in page.named("DirectionalLinkModel"):
        if page.models[key]["source"][0] == f"IPY_MODEL_{slider}":
            del page.models[key]
    page.set(MICROBATCH, 55)
    assert page.table() != expected_table(MemoryLedger(), 55)


def test_a_learners_own_ledger_becomes_the_given_one() -> None:
    own = MemoryLedger(fixed_gb=7, activations_gb_per_sample=0.9, device_gb=40, reserve=0.15)
    page = StaticPage(memory_lab(own, start=3))
    assert page.table() == expected_table(own, 3)
    given_ = [
        option
        for label in LABELS.values()
        for option in page.models[page.control(label)]["_options_labels"]
        if "(given)" in option
    ]
    assert given_ == ["0.9 (given)", "7 (given)", "40 (given)", "15 % (given)"]
    page.set(LABELS["reserve"], 0)
    page.set(MICROBATCH, 64)
    assert page.table() == expected_table(
        MemoryLedger(fixed_gb=7, activations_gb_per_sample=0.9, device_gb=40, reserve=0), 64
    )


@settings(max_examples=15, deadline=None)
@given(
    st.builds(
        MemoryLedger,
        fixed_gb=st.floats(0, 200),
        activations_gb_per_sample=st.floats(0, 20),
        device_gb=st.floats(0, 200),
        reserve=st.floats(0, 0.99),
    ),
    st.integers(0, 8),
)
def test_any_ledger_can_be_shown(ledger: MemoryLedger, microbatch: int) -> None:
    page = StaticPage(memory_lab(ledger, range(9), start=0, fixed_gb=(), device_gb=(), reserve=()))
    page.set(MICROBATCH, microbatch)
    found, wanted = page.table(), expected_table(ledger, microbatch)
    if ledger.fits(0) and ledger.fixed_gb > ledger.budget_gb:
        wanted["Fixed part"] = found["Fixed part"]  # within half a byte: the ledger's to decide
    assert found == wanted


def test_a_fixed_part_over_the_budget_and_free_samples_are_shown_as_such() -> None:
    over = StaticPage(memory_lab(MemoryLedger(fixed_gb=23.2), device_gb=(), fixed_gb=(), reserve=()))
    assert "the fixed part alone is over the budget by 1.60 GB" in over.text()
    assert over.table()["Largest microbatch"] == "none"
    assert over.table()["Fixed part"] == "23.20 GB, over the budget"
    free = StaticPage(memory_lab(MemoryLedger(activations_gb_per_sample=0), fixed_gb=(), device_gb=()))
    assert free.table()["Largest microbatch"] == "no limit"


def test_other_microbatches_keep_the_slider_and_the_table_together() -> None:
    page = StaticPage(
        memory_lab(microbatches=range(8, 65, 8), start=16, fixed_gb=(), device_gb=(), reserve=())
    )
    for microbatch in range(8, 65, 8):
        page.set(MICROBATCH, microbatch)
        assert page.table() == expected_table(MemoryLedger(), microbatch)


def test_no_control_is_shown_that_has_one_value() -> None:
    page = StaticPage(memory_lab(activations_gb_per_sample=(), fixed_gb=(), device_gb=(24,), reserve=(0.1,)))
    assert page.named("DropdownModel") == []
    assert len(page.named("IntSliderModel")) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"ledger": 24}, TypeError, "takes a MemoryLedger, found int: build one with"),
        ({"start": 65}, ControlError, r"starts at 65, which is none of its values \(0 … 64\)"),
        ({"microbatches": range(0, 1), "start": 0}, ControlError, "has 1 value"),
        ({"microbatches": [1, 2, 4], "start": 2}, ControlError, r"found \[1, 2, 4\]: give a range"),
        ({"microbatches": range(-2, 5), "start": 0}, ControlError, "0 or more and rising"),
        ({"microbatches": range(5, 0, -1), "start": 3}, ControlError, "0 or more and rising"),
        ({"microbatches": [0.5, 1.5], "start": 0.5}, ControlError, "evenly spaced integers"),
        ({"fixed_gb": (-1.0,)}, LedgerValueError, "fixed_gb must not be negative, found -1"),
        ({"reserve": (1.0,)}, LedgerValueError, r"found 1: write 10 % as 0\.10"),
        ({"device_gb": ("big",)}, ControlError, "must be a plain number, found 'big'"),
    ],
)
def test_a_lab_that_cannot_be_shown_says_why(
    arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        memory_lab(**arguments)


@pytest.mark.parametrize(
    ("make", "label", "words"),
    [
        (memory_lab, MICROBATCH, {"0": "0 samples", "1": "1 sample", "64": "64 samples"}),
        (
            roofline_lab,
            "Doublings of intensity, from 1/16 flop/byte",
            {"0": "1/16 flop/byte", "10": "64 flop/byte", "16": "4,096 flop/byte"},
        ),
        (launch_lab, "Launch cost (µs)", {"2": "2 µs", "40": "40 µs"}),
    ],
)
def test_a_slider_carries_words_with_a_unit_for_each_of_its_values(
    make: Callable[[], FrameGrid], label: str, words: dict[str, str]
) -> None:
    page = StaticPage(make())
    slider = page.models[page.control(label)]
    assert slider["_model_name"] == "IntSliderModel"  # what every widget manager knows
    texts = slider["value_texts"]
    assert {value: texts[value] for value in words} == words
    assert [int(value) for value in texts] == list(range(slider["min"], slider["max"] + 1, slider["step"]))


@pytest.mark.parametrize("make", [memory_lab, roofline_lab, launch_lab])
def test_a_labs_verdict_is_announced_and_nothing_else_is(make: Callable[[], FrameGrid]) -> None:
    frame = make().first_frame
    assert frame.count('<p class="verdict" role="status">') == 1
    assert frame.count("role=") == 1


def test_words_that_cannot_be_called_are_refused() -> None:
    with pytest.raises(ControlError, match="speaks values by 'µs', which cannot be called"):
        Control(name="a", label="A (µs)", values=range(3), start=0, spoken="µs")  # type: ignore[arg-type]


# --- the roofline lab --------------------------------------------------------------------------------

DOUBLINGS = "Doublings of intensity, from 1/16 flop/byte"
NIGHT_ROW = "The night, 8.93 × 1018 flop"  # the 18 is a superscript


def four(value: float) -> str:
    """Write four significant digits, as the lab does."""
    text = f"{float(f'{value:.4g}'):,.6f}".rstrip("0").rstrip(".")
    return text


def expected_intensity(doublings: int) -> str:
    return f"1/{2 ** (4 - doublings)}" if doublings < 4 else f"{2 ** (doublings - 4):,}"


def expected_roof(device: hardware.Device, precision: str, doublings: int) -> dict[str, str]:
    """Give the first two columns of the lab's table, and of its kernels', from the package's arithmetic alone."""
    intensity = 2.0 ** (doublings - 4)
    by_bytes = intensity * device.bandwidth_bytes_per_s
    roof = None
    if precision in device.peaks:
        roof = Roofline.of(device, precision)
    rate = roof.attainable(intensity) if roof else by_bytes
    hours = NIGHT_FLOPS / rate / 3600
    unit, size = next((u, n) for limit, u, n in UNITS if hours < limit)
    time = f"{four(float(f'{hours / size:.3g}'))} {unit} or more"
    share = f"{four(float(f'{100 * rate / roof.peak_flops:.3g}'))} %" if roof else "–"
    table = {
        "Quantity": "Value",
        "Peak": f"{four(roof.peak_flops / 1e12)} TFLOP/s" if roof else "–",
        "Bandwidth": f"{device.bandwidth_bytes_per_s / 1e9:,.0f} GB/s",
        "Ridge": f"{four(roof.ridge)} flop/byte" if roof else "–",
        "Intensity": f"{expected_intensity(doublings)} flop/byte",
        "Attainable": f"{'' if roof else 'at most '}{four(rate / 1e12)} TFLOP/s",
        "Share of the peak": share,
        NIGHT_ROW: time,
    }
    for found in recorded_roofs():
        if roof and (found.gpu, found.precision) == (device.name, precision):
            peak, bandwidth = found.roofline.peak_flops, found.roofline.bandwidth
            table |= {
                "Peak, measured": f"{four(peak / 1e12)} TFLOP/s, "
                f"{100 * peak / roof.peak_flops:.1f} % of the datasheet",
                "Bandwidth, measured": f"{bandwidth / 1e9:,.0f} GB/s, "
                f"{100 * bandwidth / roof.bandwidth:.1f} % of the datasheet",
                "Attainable, measured": f"{four(min(peak, intensity * bandwidth) / 1e12)} TFLOP/s",
                "Recorded kernel": "flop/byte",
            }
            if found.sustained is not None:
                hot = found.sustained
                table |= {
                    "Peak, sustained": f"{four(hot.peak_flops / 1e12)} TFLOP/s, "
                    f"{100 * hot.peak_flops / roof.peak_flops:.1f} % of the datasheet",
                    "Bandwidth, sustained": f"{hot.bandwidth / 1e9:,.0f} GB/s, "
                    f"{100 * hot.bandwidth / roof.bandwidth:.1f} % of the datasheet",
                }
            table |= {
                f"{letter}: {point.name}": four(point.work.intensity)
                for letter, point in zip("abcdefghijklmnop", found.points, strict=False)
            }
    return table


UNITS = ((1.0, "min", 1 / 60), (48.0, "h", 1.0), (17520.0, "days", 24.0), (float("inf"), "years", 8760.0))


@pytest.fixture(scope="module")
def roofs() -> StaticPage:
    return StaticPage(roofline_lab())


def set_roof(page: StaticPage, device: hardware.Device, precision: str, doublings: int) -> None:
    page.set("Device", hardware.DEVICES.index(device))
    page.set("Precision", hardware.PRECISIONS.index(precision))
    page.set(DOUBLINGS, doublings)


def test_the_roofline_lab_opens_just_short_of_what_the_night_needs() -> None:
    page = StaticPage(roofline_lab())
    said = "64 flop/byte on H200 in bf16: memory side, at most 307.2 TFLOP/s, 31.1 % of the peak"
    assert said in page.text()
    assert page.table() == expected_roof(hardware.device("H200"), "bf16", 10)
    assert page.table()[NIGHT_ROW] == "8.07 h or more"


@pytest.mark.parametrize("seed", range(60))
def test_any_setting_shows_the_numbers_of_the_roofline(roofs: StaticPage, seed: int) -> None:
    rng = random.Random(seed)
    device, precision = rng.choice(hardware.DEVICES), rng.choice(hardware.PRECISIONS)
    doublings = rng.randrange(17)
    set_roof(roofs, device, precision, doublings)
    assert roofs.table() == expected_roof(device, precision, doublings)
    start = f"{expected_intensity(doublings)} flop/byte on {device.short} in {precision}: "
    assert start in roofs.text()


def test_no_state_of_the_roofline_lab_shows_nothing_and_a_missing_peak_moves_with_the_slider(
    roofs: StaticPage,
) -> None:
    missing = [(d, p) for d in hardware.DEVICES for p in hardware.PRECISIONS if p not in d.peaks]
    assert missing, "every record has every precision: nothing is tested here"
    for device, precision in missing:
        seen = set()
        for doublings in range(17):
            set_roof(roofs, device, precision, doublings)
            table, text = roofs.table(), roofs.text()
            assert (table["Peak"], table["Ridge"], table["Share of the peak"]) == ("–", "–", "–")
            assert f"the record of {device.short} has no {precision}; it has " in text
            assert "no peak on record, so the bytes alone bound it" in text
            assert "memory side" not in text
            assert "compute side" not in text
            seen.add(table["Attainable"])
        assert len(seen) == 17


def test_every_side_is_said_in_words_and_agrees_with_the_roofline(roofs: StaticPage) -> None:
    for device in hardware.DEVICES:
        for precision in device.peaks:
            roof = Roofline.of(device, precision)
            for doublings in range(17):
                set_roof(roofs, device, precision, doublings)
                side = roof.bound(2.0 ** (doublings - 4))
                assert f" in {precision}: {side} side, at most " in roofs.text()


def test_measured_kernels_stand_only_beside_the_roof_of_their_own_device_and_precision(
    roofs: StaticPage,
) -> None:
    shown = set()
    for device in hardware.DEVICES:
        for precision in hardware.PRECISIONS:
            set_roof(roofs, device, precision, 3)
            if "Peak, measured" in roofs.table():
                shown.add((device.name, precision))
            assert ("recorded on " in roofs.text()) == ((device.name, precision) in shown)
    assert shown == {(roof.gpu, roof.precision) for roof in recorded_roofs()}


def leaf_of(page: StaticPage) -> str:
    (leaf,) = (leaf for leaf in page.leaves(page.root) if "<style>" not in leaf)
    return leaf


def one_point(rate: float, intensity: float = 1.0) -> MeasuredRoof:
    work = Work(flops=intensity * 1e6, bytes=1e6)
    point = RoofPoint(name="trial", work=work, time_ms=work.flops / rate * 1e3, iqr_ms=0.0, source="trial")
    return MeasuredRoof(
        gpu="NVIDIA H200",
        precision="bf16",
        roofline=Roofline(peak_flops=7e14, bandwidth=4e12),
        arithmetic_kind="a product",
        bandwidth_kind="a copy",
        l2_bytes=60e6,
        points=(point,),
        provenance="trial",
    )


def test_a_point_above_the_roof_is_drawn_above_it_and_never_clamped() -> None:
    heights = []
    for rate in (2.4e12, 4.8e12, 9.6e12):
        page = StaticPage(roofline_lab(measured=[one_point(rate)]))
        (height,) = re.findall(
            r'class="mark" d="M[\d.]+ ([\d.]+)m0-4.6', re.sub(r"<ul.*?</ul>", "", leaf_of(page))
        )
        heights.append(float(height))
        if rate > 4.8e12:
            assert "200 % of the roof: its 1.00 MB fit the L2 and need not travel" in page.text()
    low, on, high = heights
    assert low - on == pytest.approx(on - high, abs=0.2)  # one factor of two each, on a logarithmic axis
    assert low - on > 5


def test_the_picture_is_drawn_to_one_scale_for_all_devices(roofs: StaticPage) -> None:
    tops = {}
    for name in ("H200", "T4", "B200"):
        device = hardware.device(name)
        set_roof(roofs, device, "fp16", 16)
        (top,) = re.findall(r'class="roof" d="M[^L]+L[^L]+L[\d.]+ ([\d.]+)"', leaf_of(roofs))
        tops[name] = (float(top), device.peak_flops("fp16"))
    (a, peak_a), (b, peak_b), (c, peak_c) = tops.values()
    decade = (b - a) / math.log10(peak_a / peak_b)
    assert decade == pytest.approx((b - c) / math.log10(peak_c / peak_b), rel=0.02)


def test_one_device_and_one_precision_leave_only_the_slider() -> None:
    page = StaticPage(roofline_lab(devices=[hardware.device("H200")], dtypes=["bf16"], measured=()))
    assert page.named("DropdownModel") == []
    assert len(page.named("IntSliderModel")) == 1


def test_another_amount_of_work_is_named_and_timed() -> None:
    page = StaticPage(roofline_lab(amount="A step", amount_flops=989e12, window_h=0.01, measured=()))
    page.set(DOUBLINGS, 16)
    assert page.table()["A step, 9.89 × 1014 flop"] == "0.0167 min or more"
    assert "within the 0.01 h" in page.text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"device": "H100 PCIe"}, "device starts at 'H100 PCIe', which is none of"),
        ({"dtype": "int8"}, "dtype starts at 'int8', which is none of fp32, tf32"),
        ({"doublings": [0, 1, 3], "start": 0}, r"doublings must be evenly spaced .*found \[0, 1, 3\]"),
        ({"doublings": range(-1, 5), "start": 0}, "0 or more and rising"),
        ({"start": 17}, r"starts at 17, which is none of its values \(0 … 16\)"),
        ({"lowest": 0.0}, "lowest must be a positive finite number, found 0.0"),
        ({"amount_flops": float("nan")}, "amount_flops must be a positive finite number, found nan"),
        ({"window_h": -8}, "window_h must be a positive finite number, found -8"),
        ({"devices": ()}, "device starts at 'NVIDIA H200', which is none of none"),
    ],
)
def test_a_roofline_lab_that_cannot_be_shown_says_why(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ControlError, match=said):
        roofline_lab(measured=(), **arguments)


# --- grids of frames ---------------------------------------------------------------------------------


def area(each: Each, height: float) -> str:
    return f"<p>{each(lambda width: f'{width * height:g} m²')}</p>"


def controls(*heights: float) -> list[Control]:
    return [
        Control(name="width", label="Width", values=range(1, 9), start=2),
        Control(name="height", label="Height", values=heights, start=heights[0]),
    ]


def test_every_combination_shows_the_frame_that_was_rendered_for_it() -> None:
    page = StaticPage(frame_grid(area, controls(0.5, 1.5, 2.5)))
    for width in range(1, 9):
        for k, height in enumerate((0.5, 1.5, 2.5)):
            page.set("Width", width)
            page.set("Height", k)
            assert page.text() == f"{width * height:g} m²\n"


def test_three_nested_controls_in_any_order_of_size_reach_their_leaves() -> None:
    def render(each: Each, a: str, b: str, c: str) -> str:
        return f"<p>{a}{b}{c}{each(str)}</p>"

    made = [
        Control(name="n", label="N", values=("x", "y"), start="y"),
        Control(name="a", label="A", values=tuple("pqrs"), start="q"),
        Control(name="b", label="B", values=tuple("tu"), start="u"),
        Control(name="c", label="C", values=tuple("vwz"), start="v"),
    ]
    page = StaticPage(frame_grid(render, made))
    assert page.text() == "quvy\n"
    for n, a, b, c in [(0, 3, 0, 2), (1, 0, 1, 1), (0, 2, 1, 0)]:
        for label, k in zip("NABC", (n, a, b, c), strict=True):
            page.set(label, k)
        assert page.text() == f"{'pqrs'[a]}{'tu'[b]}{'vwz'[c]}{'xy'[n]}\n"


def test_models_grow_with_the_sum_not_with_the_full_product() -> None:
    lab = StaticPage(memory_lab())
    combinations = 65 * 5 * 4 * 5 * 3
    assert combinations == 19_500
    assert len(lab.named("HTMLModel")) == 65 + 5 * 4 * 5 * 3 + 1
    assert len(lab.models) < 600


def test_all_frames_share_one_layout_and_one_style() -> None:
    page = StaticPage(frame_grid(area, controls(0.5, 1.5)))
    frames = [page.models[key] for key in page.named("HTMLModel")]
    assert len({frame["style"] for frame in frames}) == 1
    assert len({frame["layout"] for frame in frames}) == 2  # what is shown, and the style sheets


def test_equal_texts_are_written_once() -> None:
    grid = frame_grid(
        lambda each: f"<p>{each(lambda n: 'even' if n % 2 == 0 else 'odd')}{each(lambda n: 'same')}</p>",
        [Control(name="n", label="N", values=range(4), start=0)],
    )
    (leaf,) = (
        state["value"]
        for state in StaticPage(grid).models.values()
        if state["_model_name"] == "HTMLModel" and "<style>" not in state["value"]
    )
    assert leaf == '<p><b data-c="0 2">even</b><b data-c="1 3">odd</b>same</p>'


def volume(each: Each, height: float, depth: Each, name: Each) -> str:
    return f"<p>{name(str)}: {each(lambda w: depth(lambda d: f'{w * height * d:g} m³'))}</p>"


def deep(**change: Any) -> list[Control]:
    depth = Control(name="depth", label="Depth (m)", values=(1, 10, 100), start=10)
    return [
        depth,
        Control(**({"name": "name", "label": "Name", "values": ("tank", "box"), "start": "box"} | change)),
    ]


def test_controls_within_a_frame_choose_among_its_alternatives() -> None:
    grid = frame_grid(volume, controls(0.5, 1.5), within=deep())
    assert grid.first_frame == "<p>box: 10 m³</p>"
    page = StaticPage(grid)
    assert page.text().strip() == "box: 10 m³"
    for depth, height, name, width in itertools.product(range(3), range(2), range(2), range(1, 9)):
        for label, value in {
            "Depth (m)": depth,
            "Height": height,
            "Name": name,
            "Width": width,
        }.items():
            page.set(label, value)
        wanted = width * (0.5, 1.5)[height] * 10**depth
        assert page.text().strip() == f"{('tank', 'box')[name]}: {wanted:g} m³"


def test_a_control_within_a_frame_costs_one_style_sheet_a_value_and_no_frame() -> None:
    assert len(_html(frame_grid(volume, controls(0.5, 1.5), within=deep()))) == 1 + 8 + 3 + 2 + 2
    shown = [
        getattr(w, "description", "")
        for w in frame_grid(volume, controls(0.5, 1.5), within=deep()).children[1:3]
    ]
    assert shown == ["Width", ""]  # the menus share a row


@pytest.mark.parametrize(
    ("render", "within", "said"),
    [
        (
            lambda each, height, depth, name: f"{each(str)}{height}{depth(str)}",
            deep(),
            "move nothing.*: name$",
        ),
        (volume, deep(name="height"), "two controls have one name: width, height, depth, height"),
        (volume, [*deep(), *deep()], "4 controls choose within a frame, and 3 are the most"),
        (volume, [*deep(), 3], "must be a list of Control, found 3 in it"),
    ],
)
def test_controls_within_a_frame_that_cannot_be_are_refused(
    render: Callable[..., str], within: list[Any], said: str
) -> None:
    with pytest.raises(ControlError, match=said):
        frame_grid(render, controls(0.5, 1.5), within=within)


def test_two_grids_in_one_page_do_not_hide_each_others_frames() -> None:
    first, second = (frame_grid(area, controls(0.5, 1.5)) for _ in range(2))
    scopes = [[name for name in grid._dom_classes if name != "gpucourse-grid"] for grid in (first, second)]
    assert scopes[0] != scopes[1]
    for grid, (scope,) in zip((first, second), scopes, strict=True):
        sheets = [v for v in _html(grid) if v.startswith("<style>.g")]
        assert len(sheets) == 8
        assert all(sheet.startswith(f"<style>.{scope} ") for sheet in sheets)


def _html(grid: FrameGrid) -> list[str]:
    page = StaticPage(grid)
    return [page.models[key]["value"] for key in page.named("HTMLModel")]


def test_a_grid_shows_its_first_frame_where_there_are_no_widgets() -> None:
    grid = frame_grid(area, controls(0.5, 1.5), css="p{margin:0}")
    data = grid._repr_mimebundle_()
    assert data["text/html"] == "<style>p{margin:0}</style><p>1 m²</p>"
    assert "application/vnd.jupyter.widget-view+json" in data


def test_only_standard_widgets_are_used() -> None:
    page = StaticPage(memory_lab())
    assert {state["_model_module"] for state in page.models.values()} <= {
        "@jupyter-widgets/base",
        "@jupyter-widgets/controls",
    }
    assert isinstance(memory_lab(device_gb=(), fixed_gb=(), reserve=()), ipywidgets.VBox)


@pytest.mark.parametrize(
    ("render", "made", "said"),
    [
        (area, lambda: [], "at least one control"),
        (area, lambda: controls(0.5, 1.5) + controls(2.5, 3.5)[1:], "two controls have one name"),
        (lambda each, height: f"{height}", lambda: controls(0.5, 1.5), "would move nothing.*: width$"),
        (lambda each, height: each(str), lambda: controls(0.5, 1.5), "would move nothing.*: height$"),
        (lambda each, height: "frame", lambda: controls(0.5, 1.5), "would move nothing.*: width, height$"),
    ],
)
def test_a_grid_in_which_a_control_moves_nothing_is_refused(
    render: Callable[..., str], made: Callable[[], list[Control]], said: str
) -> None:
    with pytest.raises(ControlError, match=said):
        frame_grid(render, made())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"name": "two words"}, "must be a Python identifier, found 'two words'"),
        ({"label": " "}, "has no label: say what it changes"),
        ({"values": (1,), "start": 1}, r"has 1 value\(s\), so it could move nothing"),
        ({"values": (1, 2, 1)}, "has a value twice"),
        ({"start": 7}, r"starts at 7, which is none of its values \(1 … 3\)"),
    ],
)
def test_a_control_without_sense_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ControlError, match=said):
        Control(**({"name": "n", "label": "N", "values": (1, 2, 3), "start": 1} | changed))


def test_a_frame_that_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must return HTML as a str, found int for \{'height': 0\.5\}"):
        frame_grid(lambda each, height: 3, controls(0.5, 1.5))


@pytest.mark.parametrize(
    ("values", "slides"),
    [
        (range(5), True),
        ((2, 4, 6), True),
        ((1, 2, 4), False),
        ((3, 2, 1), False),
        ((-1, 0, 1), False),
        ((0.0, 1.0), False),
        ((False, True), False),
        (("a", "b"), False),
    ],
)
def test_only_evenly_spaced_whole_numbers_make_a_slider(values: Any, slides: bool) -> None:
    assert Control(name="n", label="N", values=values, start=next(iter(values))).slides is slides


# --- what cannot be a control ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": 3}, "must be a Python identifier, found 3"),
        ({"name": "class"}, "must be a Python identifier, found 'class'"),
        ({"name": "each"}, "cannot be named 'each'"),
        ({"label": None}, "has no label"),
        ({"show": 3}, "shows values by 3, which cannot be called"),
        ({"values": 5}, r"needs several values, such as \(12, 24, 48\), found 5"),
        ({"values": "abc", "start": "a"}, "needs several values, .* found 'abc'"),
        ({"values": itertools.count()}, "has more than 1000 values"),
        ({"values": range(10**12)}, "has more than 1000 values"),
        ({"values": [np.array([1, 2]), np.array([1, 3])]}, "must be one thing, found array"),
        ({"start": True}, "starts at True, which is none of its values"),
    ],
)
def test_a_control_of_another_kind_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    good = {"name": "width", "label": "Width (m)", "values": (1, 2, 3), "start": 1}
    with pytest.raises(ControlError, match=said):
        Control(**(good | change))


def test_a_grid_refuses_what_would_never_end() -> None:
    far = Control(name="far", label="Far", values=(0, 500_000), start=0)
    with pytest.raises(ControlError, match="'far' slides up to 500,000"):
        frame_grid(lambda each: each(str), [far])
    many = [Control(name=f"c{k}", label="C", values=range(50), start=0) for k in range(4)]
    with pytest.raises(ControlError, match="125,000 combinations besides the first"):
        frame_grid(lambda each, **_: each(str), many)


def test_a_grid_of_other_things_than_controls_is_refused() -> None:
    one = Control(name="one", label="One", values=(1, 2), start=1)
    for controls, found in ((one, "found Control"), (None, "found NoneType"), ([3], "found 3 in it")):
        with pytest.raises(ControlError, match=f"must be a list of Control, {found}"):
            frame_grid(lambda each: each(str), controls)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="render must be a function that returns HTML, found str"):
        frame_grid("<p></p>", [one])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["activations_gb_per_sample", "fixed_gb", "device_gb", "reserve"])
@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (24, r"lists the steps of its control, such as \(12, 24, 48\), or \(\) for none; found 24"),
        ("24", "lists the steps of its control, .* found '24'"),
        (("24",), "must be a plain number, found '24'"),
        ((None,), "must be a plain number, found None"),
        ((True,), "must be a plain number, found True"),
    ],
)
def test_steps_of_an_assumption_are_a_list_of_numbers(name: str, steps: Any, said: str) -> None:
    with pytest.raises(ControlError, match=said):
        memory_lab(**{name: steps})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1])
def test_a_step_that_no_ledger_can_have_is_refused_before_anything_is_drawn(bad: float) -> None:
    with pytest.raises(LedgerValueError, match="device_gb must"):
        memory_lab(device_gb=(24, bad))


def test_without_ipywidgets_it_says_what_to_install_and_what_works_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.delitem(sys.modules, "gpucourse.widgets")
    with pytest.raises(ModuleNotFoundError, match=r"sliders need ipywidgets.*pip install.*MemoryLedger\(\)"):
        importlib.import_module("gpucourse.widgets")
