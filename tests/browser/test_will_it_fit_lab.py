"""The lab "will it fit?" in a real browser: every control moved, the page's table held against the grid's numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Page, expect

from gpucourse.fit_grid import MICROBATCHES, load_grid
from tests.browser.grids import Grid, check_speed
from tests.test_widgets_fit import DOUBLINGS, MENUS, START, expected_fit, expected_verdict, shape_of

LAB = "labs/will_it_fit.html"
LAST = len(MICROBATCHES) - 1
Scheme = Literal["http", "file"]


class Lab(Grid):
    """The page's grid, and what its controls stand at, as Python knows it."""

    def __init__(self, page: Page) -> None:
        grid = page.locator(".gpucourse-grid")
        expect(grid).to_have_count(1)
        expect(grid.locator("table")).to_have_count(1)
        super().__init__(grid, last=LAST)
        self.setting: dict[str, Any] = dict(START)

    def now(self) -> dict[str, Any]:
        return self.setting | {"microbatch": MICROBATCHES[self.position]}

    def check(self) -> None:
        """Compare the page with the grid's predictions of the values that were set."""
        verdict = self.grid.locator(".verdict")
        expect(verdict).to_have_text(expected_verdict(self.now()), timeout=3_000, use_inner_text=True)
        assert self.table() == expected_fit(self.now()), self.now()

    def offered(self) -> dict[str, int]:
        return {name: len(values) for name, (_, values) in MENUS.items()}

    def choose(self, menu: str, position: int, *, keys: bool) -> None:
        label, values = MENUS[menu]
        (self.choose_by_keyboard if keys else self.choose_by_mouse)(label, position)
        self.setting[menu] = values[position]

    def put(self, **setting: Any) -> None:
        """Set some menus, and the slider, to values."""
        for name, value in setting.items():
            if name == "microbatch":
                self.slide_by_keyboard(MICROBATCHES.index(value))
            else:
                self.choose(name, MENUS[name][1].index(value), keys=False)
        self.check()


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_every_control_moves_the_table_to_the_grids_numbers(
    open_page: Callable[..., Page], scheme: Scheme
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown where it fails
    page = open_page(LAB, scheme=scheme)
    Lab(page).exercise(random.Random(seed), rounds=2)
    # No control of the page was left out.
    assert page.get_by_role("slider").count() == 1
    assert page.locator("select").count() == len(MENUS)


def test_each_control_moves_the_line_above_the_picture(open_page: Callable[..., Page]) -> None:
    lab = Lab(open_page(LAB))
    lab.check()
    seen = {lab.grid.locator(".verdict").inner_text()}
    for name, (_, values) in MENUS.items():
        other = next(value for value in values if value != lab.setting[name])
        lab.put(**{name: other})
        seen.add(lab.grid.locator(".verdict").inner_text())
        lab.put(**{name: START[name]})
    lab.put(microbatch=32)
    seen.add(lab.grid.locator(".verdict").inner_text())
    assert len(seen) == len(MENUS) + 2


def test_the_page_moves_as_its_text_says(open_page: Callable[..., Page]) -> None:
    lab = Lab(open_page(LAB))
    for setting, row, value in (
        ({}, "Allocated", "21.24 GB"),
        ({"precision": "bf16"}, "Allocated", "15.58 GB"),
        ({"precision": "bf16", "microbatch": 32}, "Allocated", "29.37 GB"),
        ({"checkpointing": True}, "Activations", "4.00 GB"),
        ({"checkpointing": True}, "Allocated", "12.17 GB"),
        ({"checkpointing": True, "microbatch": 32}, "Allocated", "22.75 GB"),
        ({"precision": "bf16", "checkpointing": True, "microbatch": 32}, "Allocated", "19.48 GB"),
        ({"precision": "bf16", "checkpointing": True, "microbatch": 32}, "Reserved", "29.03 GB"),
        ({"layers": 6}, "Largest microbatch", "22"),
        ({"tokens": 2048, "microbatch": 8}, "Allocated", "21.25 GB"),
    ):
        lab.put(**(START | setting))
        assert lab.table()[row] == value, setting
    lab.put(**(START | {"precision": "bf16", "checkpointing": True, "microbatch": 32}))
    assert "yet it runs out" in lab.grid.locator(".verdict").inner_text()


def test_the_bars_are_drawn_to_the_scale_of_the_device(open_page: Callable[..., Page]) -> None:
    lab = Lab(open_page(LAB))
    for setting, size_gb in (({}, 24), ({"device": "A100 40GB"}, 40), ({"precision": "bf16"}, 24)):
        lab.put(**(START | setting))
        point = shape_of(lab.now()).point(16)
        bars = lab.grid.locator(".wf .bar")
        for place, inner, nbytes in (
            (0, ".lines", point.allocated_bytes),
            (1, ".held", point.reserved_bytes),
        ):
            whole, part = bars.nth(place).bounding_box(), bars.nth(place).locator(inner).bounding_box()
            assert whole is not None
            assert part is not None
            assert part["width"] == pytest.approx(whole["width"] * 0.8 * nbytes / 1e9 / size_gb, abs=3), (
                setting
            )
        drawn = (
            bars.nth(0)
            .locator(".lines s:visible")
            .evaluate_all("found => found.map(e => [e.className, e.getBoundingClientRect().width])")
        )
        whole = bars.nth(0).bounding_box()
        assert whole is not None
        widths = dict(drawn)
        assert widths["A"] == pytest.approx(
            whole["width"] * 0.8 * point.lines["activations"] / 1e9 / size_gb, abs=3
        )
        assert ("C" in widths) == (lab.now()["precision"] == "bf16")


def test_the_budget_and_the_device_are_marked_where_they_are(open_page: Callable[..., Page]) -> None:
    lab = Lab(open_page(LAB))
    for reserve in (0.0, 0.1, 0.2):
        lab.put(reserve=reserve)
        bar = lab.grid.locator(".wf .bar").first.bounding_box()
        budget = lab.grid.locator(".wf .scale > b:visible").first.bounding_box()
        device = lab.grid.locator(".wf .scale > .device").bounding_box()
        assert bar is not None
        assert budget is not None
        assert device is not None
        assert budget["x"] + budget["width"] == pytest.approx(
            bar["x"] + bar["width"] * 0.8 * (1 - reserve), abs=4
        )
        assert device["x"] + device["width"] == pytest.approx(bar["x"] + bar["width"] * 0.8, abs=4)


def test_one_frame_only_is_there_for_a_screen_reader_and_controls_have_names(
    open_page: Callable[..., Page],
) -> None:
    lab = Lab(open_page(LAB))
    lab.put(microbatch=8)
    heard = lab.grid.locator("table").aria_snapshot()
    assert heard.count("row ") == len(expected_fit(lab.now()))
    assert f'cell "{expected_fit(lab.now())["Allocated"]}"' in heard
    assert f'"{expected_fit(dict(START))["Allocated"]}"' not in heard
    assert "microbatch 8 on L4 with 10 % in reserve, AdamW, predicted." in heard
    expect(lab.slider).to_have_accessible_name(DOUBLINGS)
    expect(lab.slider).to_have_attribute("aria-valuetext", "8 samples")
    for label, _ in MENUS.values():
        expect(lab.grid.get_by_label(label, exact=True)).to_have_accessible_name(label)


def test_the_command_that_is_shown_is_the_settings(open_page: Callable[..., Page]) -> None:
    lab = Lab(open_page(LAB))
    lab.put(device="A100 40GB", checkpointing=True, microbatch=2, reserve=0.2)
    shown = lab.grid.locator("pre").inner_text().strip()
    assert shown == shape_of(lab.now()).command(2, "A100 40GB", 0.2)


@pytest.mark.parametrize("colour", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_lab_has_no_accessibility_fault(open_page: Callable[..., Page], colour: str, width: int) -> None:
    page = open_page(LAB, width=width, scheme_colour=colour)
    Lab(page).put(precision="bf16", microbatch=32)
    page.add_script_tag(path=Path(__file__).resolve().parents[2] / "book" / "vendor" / "axe" / "axe.min.js")
    result = page.evaluate('() => axe.run(".gpucourse-grid")')
    faults = [(v["id"], v["impact"], [n["html"][:120] for n in v["nodes"]]) for v in result["violations"]]
    assert [fault for fault in faults if fault[1] in ("serious", "critical")] == []
    assert len(result["passes"]) > 5, "axe looked at nothing"


@pytest.mark.parametrize("colour", ["light", "dark"])
def test_the_lab_fits_a_narrow_page(open_page: Callable[..., Page], colour: str) -> None:
    lab = Lab(open_page(LAB, width=390, scheme_colour=colour))
    lab.exercise(random.Random(390), rounds=1)
    for name, (_, values) in MENUS.items():
        for place in range(len(values)):
            lab.choose(name, place, keys=False)
            box = lab.grid.bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 390
            inside = lab.grid.evaluate("grid => [grid.scrollWidth, grid.clientWidth]")
            assert inside[0] <= inside[1] + 1, (name, place)
    lab.check()


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_the_slider_works_soon_after_the_page_is_asked_for_and_moves_at_once(
    open_page: Callable[..., Page], scheme: Scheme
) -> None:
    check_speed(open_page(LAB, scheme=scheme), scheme, 5, "ArrowLeft")  # from 32 samples down to 1


def test_the_page_weighs_less_than_seven_megabytes(site: Path) -> None:
    weight = (site / LAB).stat().st_size
    print(f"{weight / 1e6:.2f} MB for {len(load_grid().shapes)} shapes")
    assert weight < 7e6
