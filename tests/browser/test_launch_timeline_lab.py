"""The launch lab in a real browser: every control moved, the page's table held against the simulator's numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Page, expect

from tests.browser.grids import Grid, check_speed
from tests.test_widgets_launch import COST, KERNELS, LENGTHS, WAYS, expected_chain, expected_state, written

LAB = "labs/launch_timeline.html"
FIRST, LAST, STEP = 2, 40, 2
Scheme = Literal["http", "file"]
#: Whether something of the picture is drawn; a line has no height, so for the driver it is never visible.
SHOWN = "e => !e.closest('g') || getComputedStyle(e.closest('g')).display !== 'none'"


class Lab(Grid):
    """The page's grid, and what its controls stand at, as Python knows it."""

    MENUS = ("Kernels", "Kernel length", "Launched")
    OFFERED = (KERNELS, LENGTHS, WAYS)

    def __init__(self, page: Page) -> None:
        grid = page.locator(".gpucourse-grid")
        expect(grid).to_have_count(1)
        expect(grid.locator("table")).to_have_count(1)
        super().__init__(grid, LAST, first=FIRST, step=STEP)
        self.chosen = [KERNELS.index(100), LENGTHS.index(0.9), WAYS.index("eager")]

    @property
    def setting(self) -> tuple[int, float, int, str]:
        """Kernels, kernel length, launch cost and way."""
        kernels, length, way = self.chosen
        return KERNELS[kernels], LENGTHS[length], self.position, WAYS[way]

    def check(self) -> None:
        """Compare the page with the simulator, run with the values that were set."""
        kernels, kernel_us, launch_us, way = self.setting
        said = f"{'one by one' if way == 'eager' else 'as one CUDA graph'}, {launch_us} µs a launch: "
        said += f"{expected_state(*self.setting)}, "
        verdict = self.grid.locator(".verdict")
        expect(verdict).to_contain_text(said, timeout=3_000, use_inner_text=True)
        shown = f"{kernels} kernel{'s' * (kernels > 1)} of {written(kernel_us)}, "
        expect(verdict).to_contain_text(shown, timeout=3_000, use_inner_text=True)
        assert self.table() == expected_chain(*self.setting), self.setting

    def offered(self) -> dict[str, int]:
        return {menu: len(options) for menu, options in zip(self.MENUS, self.OFFERED, strict=True)}

    def choose(self, menu: str, position: int, *, keys: bool) -> None:
        (self.choose_by_keyboard if keys else self.choose_by_mouse)(menu, position)
        self.chosen[self.MENUS.index(menu)] = position


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_every_control_moves_the_table_to_the_simulators_numbers(
    open_page: Callable[..., Page], scheme: Scheme
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown where it fails
    page = open_page(LAB, scheme=scheme)
    Lab(page).exercise(random.Random(seed), rounds=3)
    # No control of the page was left out.
    assert page.get_by_role("slider").count() == 1
    assert page.locator("select").count() == 3


def test_the_page_moves_as_its_text_says(open_page: Callable[..., Page]) -> None:
    lab = Lab(open_page(LAB))
    lab.check()
    assert (lab.table()["Total"], lab.table()["Device idle"]) == ("800.9 µs", "88.8 %")
    lab.choose("Kernel length", LENGTHS.index(2.0), keys=True)
    lab.check()
    assert (lab.table()["Total"], lab.table()["Device idle"]) == ("802 µs", "75.1 %")
    lab.choose("Kernel length", LENGTHS.index(0.9), keys=True)
    for cost, eager, graph in (
        (4, "400.9 µs", "94 µs"),
        (8, "800.9 µs", "98 µs"),
        (40, "4.001 ms", "130 µs"),
    ):
        lab.slide_by_keyboard(cost)
        lab.choose("Launched", 0, keys=True)
        lab.check()
        assert lab.table()["Total"] == eager
        lab.choose("Launched", 1, keys=True)
        lab.check()
        assert lab.table()["Total"] == graph
    lab.slide_by_keyboard(8)
    lab.choose("Kernel length", LENGTHS.index(32.0), keys=True)
    for way in (1, 0):
        lab.choose("Launched", way, keys=True)
        lab.check()
        assert lab.table()["Total"] == "3.208 ms"
    assert lab.table()["Longest queue"] == "76"
    lab.slide_by_keyboard(4)
    assert lab.table()["Total"] == "3.204 ms"
    lab.choose("Kernel length", LENGTHS.index(16.0), keys=True)
    for cost, total in ((14, "1.614 ms"), (16, "1.616 ms"), (18, "1.816 ms")):
        lab.slide_by_keyboard(cost)
        lab.check()
        assert lab.table()["Total"] == total
    lab.choose("Kernel length", LENGTHS.index(0.9), keys=True)
    lab.slide_by_keyboard(8)
    for kernels, total in ((1, "8.9 µs"), (400, "3.201 ms")):
        lab.choose("Kernels", KERNELS.index(kernels), keys=True)
        lab.check()
        assert lab.table()["Total"] == total


def test_the_lanes_follow_the_slider(open_page: Callable[..., Page]) -> None:
    lab = Lab(open_page(LAB))
    lab.choose("Kernels", KERNELS.index(1), keys=True)
    lab.choose("Kernel length", LENGTHS.index(100.0), keys=True)
    begins = []
    for cost in (10, 20, 40):
        lab.slide_by_keyboard(cost)
        lab.check()
        (left,) = lab.grid.locator(".lt > div > svg").first.evaluate(
            f"svg => [...svg.querySelectorAll('.k')].filter({SHOWN})"
            ".map(e => (e.getBoundingClientRect().left - svg.getBoundingClientRect().left)"
            " / svg.getBoundingClientRect().width * 360)"
        )
        begins.append(left)
    # The kernel begins where its launch ends: at 10 of 110, 20 of 120, 40 of 140 µs.
    assert begins == pytest.approx([46 + 306 * c / (c + 100) for c in (10, 20, 40)], abs=0.5)


def test_one_frame_only_is_there_for_a_screen_reader_and_controls_have_names(
    open_page: Callable[..., Page],
) -> None:
    lab = Lab(open_page(LAB))
    lab.slide_by_keyboard(12)
    lab.check()
    heard = lab.grid.locator("table").first.aria_snapshot()
    assert heard.count('cell "1.201 ms"') == 1
    assert '"800.9 µs"' not in heard
    assert "100 kernels of 0.9 µs, one by one, 12 µs a launch." in heard
    assert heard.count("row ") == 9
    expect(lab.slider).to_have_accessible_name(COST)
    expect(lab.slider).to_have_attribute("aria-valuetext", "12 µs")
    for label in Lab.MENUS:
        expect(lab.grid.get_by_label(label, exact=True)).to_have_accessible_name(label)


@pytest.mark.parametrize("colour", ["light", "dark"])
def test_the_lab_has_no_accessibility_fault(open_page: Callable[..., Page], colour: str) -> None:
    page = open_page(LAB, width=390, scheme_colour=colour)
    Lab(page).slide_by_keyboard(30)
    page.add_script_tag(path=Path(__file__).resolve().parents[2] / "book" / "vendor" / "axe" / "axe.min.js")
    result = page.evaluate('() => axe.run(".gpucourse-grid")')
    faults = [(v["id"], v["impact"], [n["html"][:120] for n in v["nodes"]]) for v in result["violations"]]
    assert [fault for fault in faults if fault[1] in ("serious", "critical")] == []
    assert len(result["passes"]) > 5, "axe looked at nothing"


@pytest.mark.parametrize("colour", ["light", "dark"])
def test_the_lab_fits_a_narrow_page(open_page: Callable[..., Page], colour: str) -> None:
    lab = Lab(open_page(LAB, width=390, scheme_colour=colour))
    lab.exercise(random.Random(390), rounds=1)
    for way in range(len(WAYS)):
        for length in range(len(LENGTHS)):
            lab.choose("Launched", way, keys=False)
            lab.choose("Kernel length", length, keys=False)
            lab.check()
            box = lab.grid.bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 390
            inside = lab.grid.evaluate("grid => [grid.scrollWidth, grid.clientWidth]")
            assert inside[0] <= inside[1] + 1
            # What is drawn stays in the picture, and its text is readable.
            drawn = lab.grid.locator(".lt > div > svg").first.evaluate(
                f"svg => [...svg.querySelectorAll('path,text')].filter({SHOWN})"
                ".map(e => [e.getBoundingClientRect().left, e.getBoundingClientRect().right])"
            )
            assert len(drawn) == 7  # two names, two lines, two lanes, and where the omission is said
            assert min(left for left, _ in drawn) >= 0
            assert max(right for _, right in drawn) <= 390
            sizes = lab.grid.locator(".lt > div > svg text:visible").evaluate_all(
                "found => found.map(e => parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().d)"
            )
            assert min(sizes) > 8


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_the_slider_works_soon_after_the_page_is_asked_for_and_moves_at_once(
    open_page: Callable[..., Page], scheme: Scheme
) -> None:
    check_speed(open_page(LAB, scheme=scheme), scheme, 11, "ArrowRight")  # from 10 µs on


def test_the_page_weighs_about_a_megabyte(site: Path) -> None:
    weight = (site / LAB).stat().st_size
    print(f"{weight / 1e6:.2f} MB")
    assert weight < 1.5e6
