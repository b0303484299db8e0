"""The roofline lab in a real browser: every control moved, the page's table held against Python's numbers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Page, expect

from gpucourse import hardware
from tests.browser.grids import Grid, check_speed
from tests.test_widgets import DOUBLINGS, expected_intensity, expected_roof

LAB = "labs/roofline.html"
LAST = 16
Scheme = Literal["http", "file"]


class Lab(Grid):
    """The page's grid, and what its controls stand at, as Python knows it."""

    def __init__(self, page: Page) -> None:
        grid = page.locator(".gpucourse-grid")
        expect(grid).to_have_count(1)
        expect(grid.locator("table")).to_have_count(2)
        super().__init__(grid, last=LAST)
        self.device, self.precision = hardware.device("H200"), "bf16"

    def check(self) -> None:
        """Compare the page with the roofline of the values that were set."""
        start = f"{expected_intensity(self.position)} flop/byte on {self.device.short} in {self.precision}: "
        expect(self.grid.locator(".verdict")).to_contain_text(start, timeout=3_000, use_inner_text=True)
        # innerText of a number with a superscript has it in line, as the expected name has.
        found = {name.replace("\n", ""): value for name, value in self.table().items()}
        assert found == expected_roof(self.device, self.precision, self.position)

    def offered(self) -> dict[str, int]:
        return {"Device": len(hardware.DEVICES), "Precision": len(hardware.PRECISIONS)}

    def choose(self, menu: str, position: int, *, keys: bool) -> None:
        (self.choose_by_keyboard if keys else self.choose_by_mouse)(menu, position)
        if menu == "Device":
            self.device = hardware.DEVICES[position]
        else:
            self.precision = hardware.PRECISIONS[position]


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_every_control_moves_the_table_to_pythons_numbers(
    open_page: Callable[..., Page], scheme: Scheme
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown where it fails
    page = open_page(LAB, scheme=scheme)
    Lab(page).exercise(random.Random(seed), rounds=4)
    # No control of the page was left out.
    assert page.get_by_role("slider").count() == 1
    assert page.locator("select").count() == 2


def test_the_page_moves_as_its_text_says(open_page: Callable[..., Page]) -> None:
    lab = Lab(open_page(LAB))
    for position, rate in ((10, "307.2"), (11, "614.4"), (12, "989")):
        lab.slide_by_keyboard(position)
        lab.check()
        assert lab.table()["Attainable"] == f"{rate} TFLOP/s"
    lab.slide_by_keyboard(10)
    lab.choose("Precision", hardware.PRECISIONS.index("fp8"), keys=True)
    lab.check()
    assert (lab.table()["Attainable"], lab.table()["Share of the peak"]) == ("307.2 TFLOP/s", "15.5 %")
    lab.choose("Precision", hardware.PRECISIONS.index("bf16"), keys=True)
    lab.choose("Device", hardware.DEVICES.index(hardware.device("H100 SXM")), keys=True)
    lab.check()
    assert lab.table()["Attainable"] == "214.4 TFLOP/s"


def test_a_precision_that_a_device_lacks_shows_a_dash_and_goes_on_moving(
    open_page: Callable[..., Page],
) -> None:
    lab = Lab(open_page(LAB))
    lab.choose("Device", hardware.DEVICES.index(hardware.device("T4")), keys=True)
    lab.check()
    assert lab.table()["Peak"] == "–"
    assert lab.table()["Attainable"] == "at most 20.48 TFLOP/s"
    lab.slide_by_keyboard(9)
    lab.check()
    assert lab.table()["Attainable"] == "at most 10.24 TFLOP/s"


def test_the_point_follows_the_roof_in_the_picture(open_page: Callable[..., Page]) -> None:
    lab = Lab(open_page(LAB))
    seen = []
    for position in (8, 9, 10, 13, 14, 15):
        lab.slide_by_keyboard(position)
        lab.check()
        points = lab.grid.locator(".rl > div > svg .here:visible")
        expect(points).to_have_count(1)
        box = points.bounding_box()
        assert box is not None
        seen.append((box["x"], box["y"]))
    steps = [(b[0] - a[0], a[1] - b[1]) for a, b in itertools.pairwise(seen)]
    assert steps[0] == pytest.approx(steps[1], abs=0.5)  # doublings of the intensity, up the slope
    assert steps[0][1] > 5
    assert steps[3] == pytest.approx((steps[0][0], 0), abs=0.5)  # level beyond the ridge
    assert steps[4] == pytest.approx((steps[0][0], 0), abs=0.5)


def test_one_frame_only_is_there_for_a_screen_reader_and_controls_have_names(
    open_page: Callable[..., Page],
) -> None:
    lab = Lab(open_page(LAB))
    lab.slide_by_keyboard(7)
    lab.check()
    heard = lab.grid.locator("table").first.aria_snapshot()
    assert heard.count('cell "8 flop/byte"') == 1
    assert "4 flop/byte" not in heard
    assert "16 flop/byte" not in heard
    assert heard.count("row ") == 13  # the header, the datasheet, the burst, and the two after a long load
    expect(lab.slider).to_have_accessible_name(DOUBLINGS)
    expect(lab.slider).to_have_attribute("aria-valuetext", "8 flop/byte")
    for label in ("Device", "Precision"):
        expect(lab.grid.get_by_label(label, exact=True)).to_have_accessible_name(label)


@pytest.mark.parametrize("colour", ["light", "dark"])
def test_the_lab_fits_a_narrow_page_in_every_precision(open_page: Callable[..., Page], colour: str) -> None:
    lab = Lab(open_page(LAB, width=390, scheme_colour=colour))
    lab.exercise(random.Random(390), rounds=1)
    lab.choose("Device", hardware.DEVICES.index(hardware.device("H200")), keys=False)
    for position in range(len(hardware.PRECISIONS)):
        lab.choose("Precision", position, keys=False)
        lab.check()
        box = lab.grid.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
        inside = lab.grid.evaluate("grid => [grid.scrollWidth, grid.clientWidth]")
        assert inside[0] <= inside[1] + 1
        # Text of the picture is readable and inside it.
        texts = lab.grid.locator(".rl > div > svg text:visible").evaluate_all(
            "found => found.map(e => [e.getBoundingClientRect().left, e.getBoundingClientRect().right,"
            " parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().d])"
        )
        assert min(left for left, _, _ in texts) >= 0
        assert max(right for _, right, _ in texts) <= 390
        level = [size for _, _, size in texts if size > 0]
        assert min(level) > 8


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_the_slider_works_soon_after_the_page_is_asked_for_and_moves_at_once(
    open_page: Callable[..., Page], scheme: Scheme
) -> None:
    check_speed(open_page(LAB, scheme=scheme), scheme, 11, "ArrowLeft")  # from 11 to the lower end


def test_the_page_weighs_less_than_four_megabytes(site: Path) -> None:
    weight = (site / LAB).stat().st_size
    print(f"{weight / 1e6:.2f} MB")
    assert weight < 4e6
