"""The lab "will it fit?" without a browser: every setting shows the grid's numbers, and a bar as long as they say."""

from __future__ import annotations

import html
import random
import re
from collections.abc import Iterator
from typing import Any

import ipywidgets
import pytest

from gpucourse import fit_grid, hardware
from gpucourse.fit_grid import FitGrid, FitGridError, Shape, load_grid
from gpucourse.widgets import fit_lab
from tests.test_widgets import StaticPage

DOUBLINGS = "Doublings of the microbatch, from 1 sample"
MENUS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "layers": ("Layers", fit_grid.LAYERS),
    "width": ("Width", fit_grid.WIDTHS),
    "tokens": ("T (tokens a sample)", fit_grid.TOKENS),
    "precision": ("Precision", fit_grid.PRECISIONS),
    "checkpointing": ("Checkpointing", fit_grid.CHECKPOINTING),
    "device": ("Device", tuple(record.short for record in hardware.DEVICES)),
    "reserve": ("Reserve", fit_grid.RESERVES),
}
START = {
    "layers": 12,
    "width": 768,
    "tokens": 1024,
    "precision": "fp32",
    "checkpointing": False,
    "device": "L4",
    "reserve": 0.1,
    "microbatch": 16,
}


@pytest.fixture(autouse=True)
def _no_widgets_left() -> Iterator[None]:
    """Close what a test made: ipywidgets keeps every widget, and looks through all of them for links."""
    yield
    ipywidgets.Widget.close_all()


@pytest.fixture(scope="module")
def lab() -> StaticPage:
    return StaticPage(fit_lab())


def shape_of(setting: dict[str, Any]) -> Shape:
    names = ("layers", "width", "tokens", "precision", "checkpointing")
    return load_grid().shape(**{name: setting[name] for name in names})


def expected_fit(setting: dict[str, Any]) -> dict[str, str]:
    """Give the first two columns of the lab's table, from the grid alone."""
    shape = shape_of(setting)
    point, size = shape.point(setting["microbatch"]), hardware.device(setting["device"]).memory_gb
    lines = {name: nbytes / 1e9 for name, nbytes in point.lines.items()}
    found = {
        "Item": "At the peak",
        "Parameters": f"{lines['parameters']:.2f} GB",
        "Optimizer state": f"{lines['optimizer']:.2f} GB",
        "Gradients": f"{lines['gradients']:.2f} GB",
        "Casts": f"{lines['casts']:.2f} GB",
        "Activations": f"{lines['activations']:.2f} GB",
        "Temporaries": f"{lines['temporaries']:.2f} GB",
        "The rest": f"{lines['inputs'] + lines['workspaces'] + lines['rounding']:.2f} GB",
        "Allocated": f"{point.allocated_bytes / 1e9:.2f} GB",
        "Reserved": f"{point.reserved_bytes / 1e9:.2f} GB",
        "Budget": f"{size * (1 - setting['reserve']):.2f} GB",
    }
    if setting["precision"] == "fp32":
        del found["Casts"]
    ledger, largest = shape.ledger, shape.largest(size, setting["reserve"])
    assert ledger is not None
    found["Ledger"] = f"{ledger.fixed_gb:.2f} GB + {ledger.activations_gb_per_sample:.3f} GB a sample"
    return found | {"Largest microbatch": str(largest or "–")}


def expected_verdict(setting: dict[str, Any]) -> str:
    """Give the line above the picture."""
    shape = shape_of(setting)
    size = hardware.device(setting["device"]).memory_gb
    saved = ", checkpointed" if setting["checkpointing"] else ""
    return (
        f"{shape.layers} layers, width {shape.width:,}, T = {shape.tokens:,}, {shape.precision}{saved}, microbatch "
        f"{setting['microbatch']} on {setting['device']}: "
        f"{shape.point(setting['microbatch']).verdict(size, setting['reserve'])}"
    )


def drawn(rng: random.Random) -> dict[str, Any]:
    setting = {name: rng.choice(values) for name, (_, values) in MENUS.items()}
    return setting | {"microbatch": rng.choice(fit_grid.MICROBATCHES)}


def put(page: StaticPage, setting: dict[str, Any]) -> None:
    for name, (label, values) in MENUS.items():
        page.set(label, values.index(setting[name]))
    page.set(DOUBLINGS, fit_grid.MICROBATCHES.index(setting["microbatch"]))


def test_the_lab_opens_on_the_night_at_the_largest_microbatch_that_ran() -> None:
    page = StaticPage(fit_lab())
    slider = page.models[page.control(DOUBLINGS)]
    assert (slider["_model_name"], slider["min"], slider["max"], slider["value"]) == (
        "IntSliderModel",
        0,
        6,
        4,
    )
    assert slider["value_texts"] == {str(k): f"{2**k} sample{'s' if k else ''}" for k in range(7)}
    assert page.table() == expected_fit(START)
    assert f"{expected_verdict(START)}\n" in page.text()


@pytest.mark.parametrize("seed", range(60))
def test_any_setting_shows_the_numbers_of_the_grid(lab: StaticPage, seed: int) -> None:
    setting = drawn(random.Random(seed))
    put(lab, setting)
    assert lab.table() == expected_fit(setting), setting
    assert f"{expected_verdict(setting)}\n" in lab.text()


@pytest.mark.parametrize("seed", range(10))
def test_the_command_below_is_that_of_the_setting(lab: StaticPage, seed: int) -> None:
    setting = drawn(random.Random(100 + seed))
    put(lab, setting)
    command = shape_of(setting).command(setting["microbatch"], setting["device"], setting["reserve"])
    assert command in html.unescape(lab.text())


def test_every_menu_has_the_grids_values_and_devices_their_memory(lab: StaticPage) -> None:
    for label, values in MENUS.values():
        assert len(lab.models[lab.control(label)]["_options_labels"]) == len(values)
    assert lab.models[lab.control("Device")]["_options_labels"][:4] == [
        "V100 16GB",
        "V100 32GB",
        "T4 (16 GB)",
        "A10 (24 GB)",
    ]
    assert lab.models[lab.control("Reserve")]["_options_labels"] == ["0 %", "10 %", "20 %"]


def test_the_lines_of_the_bar_are_those_of_the_peak() -> None:
    frame = fit_lab().first_frame
    point = shape_of(START).point(16)
    bar = re.search(r'<span class="lines">(.*?)</span>', frame)
    assert bar
    parts = dict(re.findall(r"<s class=(\w) style=flex:([\d.e+]+)>", bar[1]))
    assert list(parts) == ["P", "O", "A", "T", "R"]  # no gradients live at that instant
    assert float(parts["A"]) == pytest.approx(
        1000 * point.lines["activations"] / point.allocated_bytes, rel=0.01
    )
    # Drawn to the device's scale: 24 GB are 80 % of the picture.
    margins = [float(margin) for margin in re.findall(r"<i style=margin-right:([-\d.]+)%>", frame)]
    assert margins == pytest.approx(
        [100 - 80 * nbytes / 24e9 for nbytes in (point.allocated_bytes, point.reserved_bytes)], abs=0.06
    )


def test_a_bar_that_leaves_the_picture_has_an_arrow(lab: StaticPage) -> None:
    put(lab, START | {"microbatch": 64})
    assert "→" in lab.text()
    put(lab, START)
    assert "→" not in lab.text()


def test_gradients_are_said_to_live_where_they_do(lab: StaticPage) -> None:
    put(lab, START)
    assert "none is live at this instant" in lab.text()
    put(lab, START | {"checkpointing": True, "microbatch": 1})
    assert "all of them, live at this instant" in lab.text()
    assert "in the optimizer's update" in html.unescape(lab.text())


def test_the_conditions_of_the_grid_stand_under_every_frame(lab: StaticPage) -> None:
    put(lab, drawn(random.Random(5)))
    line = load_grid().line()
    assert line[0].upper() + line[1:] in html.unescape(lab.text())


def test_a_grid_with_a_hole_or_other_microbatches_is_refused() -> None:
    whole = load_grid()
    few = [shape for shape in whole.shapes if shape.width <= 1024]

    def grid(shapes: list[Shape]) -> FitGrid:
        return FitGrid(torch_version="2.13.0", method_version=1, date="2026-12-01", shapes=tuple(shapes))

    with pytest.raises(FitGridError, match="no prediction of"):
        fit_lab(grid(few[:-1]))
    import dataclasses

    cut = [dataclasses.replace(shape, points=shape.points[1:]) for shape in few]
    with pytest.raises(FitGridError, match=r"microbatches are \[2, 4, 8.*wanted doublings of 1"):
        fit_lab(grid(cut))


def test_an_axis_with_one_value_makes_no_menu() -> None:
    few = [s for s in load_grid().shapes if s.width == 768 and s.tokens == 1024 and s.precision == "fp32"]
    grid = FitGrid(torch_version="2.13.0", method_version=1, date="2026-12-01", shapes=tuple(few))
    page = StaticPage(fit_lab(grid))
    labels = {page.models[key]["description"] for key in page.named("DropdownModel")}
    assert labels == {"Layers", "Checkpointing", "Device", "Reserve"}
