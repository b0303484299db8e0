"""The memory lab in a real browser: every control moved, the page's table held against Python's numbers.

The table is what is read, never a slider's own readout: a slider that moves and changes nothing must fail here,
and `test_a_page_whose_slider_is_linked_to_nothing_fails_the_comparison` shows that it does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import ipywidgets
import pytest
from ipywidgets.embed import dependency_state, embed_data
from playwright.sync_api import Browser, Locator, Page, expect

from gpucourse import recording
from gpucourse.memory_ledger import MemoryLedger
from gpucourse.scenarios import night_scenarios
from gpucourse.widgets import memory_lab
from tests.browser.grids import Grid, check_speed
from tests.test_widgets import LABELS, MICROBATCH, expected_table
from tests.test_widgets_scenarios import DEVICES, RESERVES, expected_scenario

LAB = "labs/memory_ledger.html"
Scheme = Literal["http", "file"]


def plans() -> list[MemoryLedger]:
    """Give the ledgers that the page's grids start from, in their order."""
    loss = recording.load("loss_memory").data["per_sample_bytes"]
    return [MemoryLedger(), MemoryLedger(fixed_gb=1.98, activations_gb_per_sample=round(loss / 1e9, 3))]


class Lab(Grid):
    """One grid of frames on a page, and what its controls stand at, as Python knows it."""

    def __init__(self, grid: Locator, given: MemoryLedger) -> None:
        super().__init__(grid, last=64)
        self.values = {name: getattr(given, name) for name in LABELS}
        self.menus = {
            name: grid.get_by_label(label, exact=True)
            for name, label in LABELS.items()
            if grid.get_by_label(label, exact=True).count()
        }

    def check(self) -> None:
        """Compare the page with a ledger made of the values that were set."""
        ledger = MemoryLedger(**self.values)
        # A move is drawn within a frame or two; the table is compared whole once it shows this microbatch.
        verdict = f"Microbatch {self.position}: {ledger.verdict(self.position)}"
        expect(self.grid.locator(".verdict")).to_have_text(verdict, timeout=3_000, use_inner_text=True)
        assert self.table() == expected_table(ledger, self.position), f"{self.values}, {self.position}"

    def steps(self, name: str) -> list[float]:
        """Read a menu's values; the sign of percent is the menu's only unit."""
        options = self.menus[name].locator("option").all_inner_texts()
        texts = [text.replace("\xa0", " ").removesuffix(" (given)") for text in options]
        return [float(t[:-2]) / 100 if t.endswith(" %") else float(t) for t in texts]

    def offered(self) -> dict[str, int]:
        return {name: len(self.steps(name)) for name in self.menus}

    def choose(self, name: str, position: int, *, keys: bool) -> None:
        """Set a menu by keyboard or by mouse."""
        (self.choose_by_keyboard if keys else self.choose_by_mouse)(LABELS[name], position)
        self.values[name] = self.steps(name)[position]


class Scenarios(Grid):
    """The grid of real steps at the end, and what its controls stand at."""

    MENUS = ("Scenario", "Device (GB)", "Reserve")

    def __init__(self, grid: Locator) -> None:
        super().__init__(grid, last=64, first=1)
        self.known = night_scenarios()
        self.chosen = [0, DEVICES.index(24.0), RESERVES.index(0.1)]

    def check(self) -> None:
        """Compare the page with the ledger of the scenario that was set."""
        place, device, reserve = self.chosen
        scenario = self.known[place]
        verdict = self.grid.locator(".verdict")
        start = f"Microbatch {self.position}, {scenario.label}: "
        expect(verdict).to_contain_text(start, timeout=3_000, use_inner_text=True)
        wanted = expected_scenario(scenario, self.position, DEVICES[device], RESERVES[reserve])
        assert self.table() == wanted, (self.chosen, self.position)

    def offered(self) -> dict[str, int]:
        counts = (len(self.known), len(DEVICES), len(RESERVES))
        return dict(zip(self.MENUS, counts, strict=True))

    def choose(self, menu: str, position: int, *, keys: bool) -> None:
        (self.choose_by_keyboard if keys else self.choose_by_mouse)(menu, position)
        self.chosen[self.MENUS.index(menu)] = position


def grids(page: Page) -> Locator:
    """Wait for the plans' grids, and that of the scenarios behind them, which has a table of what was measured."""
    found = page.locator(".gpucourse-grid")
    expect(found).to_have_count(len(plans()) + 1)
    expect(page.locator(".gpucourse-grid table")).to_have_count(len(plans()) + 2)
    return found


def labs(page: Page) -> list[Lab]:
    return [Lab(grids(page).nth(k), plan) for k, plan in enumerate(plans())]


def scenarios(page: Page) -> Scenarios:
    return Scenarios(grids(page).nth(len(plans())))


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_every_control_moves_the_table_to_pythons_numbers(
    open_page: Callable[..., Page], scheme: Scheme
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown where it fails
    page = open_page(LAB, scheme=scheme)
    found, real = labs(page), scenarios(page)
    for lab in (*found, real):
        lab.exercise(random.Random(seed), rounds=3)
    # No control of the page was left out.
    assert page.get_by_role("slider").count() == len(found) + 1
    assert page.locator("select").count() == sum(len(lab.menus) for lab in found) + len(real.MENUS)
    assert [sorted(lab.menus) for lab in found] == [sorted(LABELS), ["activations_gb_per_sample"]]


def test_the_lab_opens_as_the_text_says_and_finds_the_edge(open_page: Callable[..., Page]) -> None:
    lab = labs(open_page(LAB))[0]
    assert [lab.table()[f"Block {k}"] for k in range(1, 6)] == [
        f"{gb} GB, resident" for gb in ("1.09", "2.18", "3.26", "4.35", "5.44")
    ]
    assert lab.table()["Largest microbatch"] == "54"
    lab.slide_by_keyboard(55)
    lab.check()
    assert "over the budget by 0.30 GB: block 5 is where it breaks" in lab.grid.inner_text()


def test_measured_points_lie_on_the_line_of_the_step_and_not_on_the_plans(
    open_page: Callable[..., Page],
) -> None:
    real = scenarios(open_page(LAB))
    measured = recording.load("largest_by_trying").data["tried"]
    ran = sorted(trial["rows"] for trial in measured.values() if not trial["message"])
    off = []
    for place in (0, 1):
        real.choose("Scenario", place, keys=True)
        real.slide_by_keyboard(ran[-1])
        real.check()
        crosses = real.grid.locator(".sc > div > svg > .measured:visible")
        expect(crosses).to_have_count(len(ran))
        cross, here = crosses.last.bounding_box(), real.grid.locator("svg .here:visible").bounding_box()
        assert cross is not None
        assert here is not None
        assert cross["x"] + cross["width"] / 2 == pytest.approx(here["x"] + here["width"] / 2, abs=1.5)
        off.append(here["y"] + here["height"] / 2 - cross["y"] - cross["height"] / 2)
    assert off[0] > 20  # the plan's point lies far below what was measured
    assert abs(off[1]) < 1.5


def test_a_step_that_was_not_measured_says_so_on_the_page(open_page: Callable[..., Page]) -> None:
    real = scenarios(open_page(LAB))
    assert "Not measured" not in real.grid.inner_text()
    real.choose("Scenario", 4, keys=True)
    real.check()
    assert "Not measured: no recording holds this step yet" in real.grid.inner_text()


def test_a_number_typed_beside_the_slider_moves_the_table(open_page: Callable[..., Page]) -> None:
    lab = labs(open_page(LAB))[0]
    readout = lab.grid.locator(".widget-readout").first
    readout.click()
    lab.page.keyboard.press("Control+A")
    lab.page.keyboard.type("41")
    lab.page.keyboard.press("Enter")
    lab.position = 41
    lab.check()


def test_two_labs_in_one_page_do_not_move_each_other(open_page: Callable[..., Page]) -> None:
    page = open_page(LAB)
    (first, second), third = labs(page), scenarios(page)
    before = second.table(), third.table()
    first.slide_by_keyboard(5)
    first.check()
    assert (second.table(), third.table()) == before


def test_one_frame_only_is_there_for_eyes_and_for_a_screen_reader(open_page: Callable[..., Page]) -> None:
    lab = labs(open_page(LAB))[0]
    lab.slide_by_keyboard(17)
    lab.check()
    heard, seen = lab.grid.locator("table").aria_snapshot(), lab.grid.inner_text()
    for text, cell in ((heard, 'cell "1.16 GB, resident"'), (seen, "1.16 GB, resident")):
        assert text.count(cell) == 1  # microbatch 17
        assert "1.09" not in text  # 16
        assert "1.22" not in text  # 18
    assert heard.count("row ") == 10


def test_every_control_has_a_name_that_says_its_unit(open_page: Callable[..., Page]) -> None:
    page = open_page(LAB)
    for lab in labs(page):
        expect(lab.slider).to_have_accessible_name(MICROBATCH)
        expect(lab.slider).to_have_attribute(
            "aria-valuetext", f"{lab.position} sample{'' if lab.position == 1 else 's'}"
        )
        for name, menu in lab.menus.items():
            expect(menu).to_have_accessible_name(LABELS[name])


def test_the_picture_is_drawn_to_the_scale_of_the_ledger(open_page: Callable[..., Page]) -> None:
    lab = labs(open_page(LAB))[0]
    for microbatch in (16, 40, 60):
        lab.slide_by_keyboard(microbatch)
        lab.check()
        boxes = {
            part: lab.grid.locator(f".bar > .{part}").bounding_box() for part in ("fixed", "acts", "reserve")
        }
        bar = lab.grid.locator(".bar").bounding_box()
        assert bar is not None
        for part, gb in (("fixed", 3.2), ("acts", 0.34 * microbatch), ("reserve", 2.4)):
            box = boxes[part]
            assert box is not None
            assert box["width"] == pytest.approx(bar["width"] * gb / 30, abs=3), part
        over = lab.grid.locator(".bar .k.over:visible").all_inner_texts()
        assert over == (["5"] if microbatch == 60 else [])


@pytest.mark.parametrize("colour", ["light", "dark"])
def test_the_lab_fits_a_narrow_page(open_page: Callable[..., Page], colour: str) -> None:
    page = open_page(LAB, width=390, scheme_colour=colour)
    for lab in (*labs(page), scenarios(page)):
        lab.exercise(random.Random(390), rounds=1)
        box = lab.grid.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
        inside = lab.grid.evaluate("grid => [grid.scrollWidth, grid.clientWidth]")
        assert inside[0] <= inside[1] + 1


# --- time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_the_slider_works_soon_after_the_page_is_asked_for_and_moves_at_once(
    open_page: Callable[..., Page], scheme: Scheme
) -> None:
    check_speed(open_page(LAB, scheme=scheme), scheme, 30, "ArrowRight")


def test_no_move_shows_two_frames_at_once_or_none(open_page: Callable[..., Page]) -> None:
    page = open_page(LAB)
    counts = page.evaluate(
        """async moves => {
          const grid = document.querySelector('.gpucourse-grid');
          const handle = grid.querySelector('[role=slider]');
          const seen = new Set();
          for (let k = 0; k < moves; k++) {
            handle.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}));
            await new Promise(drawn => requestAnimationFrame(drawn));
            const texts = [...grid.querySelectorAll('.verdict > [data-c]')];
            seen.add(texts.filter(text => text.offsetWidth > 0).length);
          }
          return [...seen];
        }""",
        40,
    )
    assert counts == [2]  # "Microbatch" <16>: <fits, …>


def test_the_page_weighs_less_than_eight_megabytes(site: Path) -> None:
    weight = (site / LAB).stat().st_size
    print(f"{weight / 1e6:.2f} MB")
    assert weight < 8e6


# --- the guard itself --------------------------------------------------------------------------------


@pytest.fixture
def small_page(chromium: Browser, site: Path, tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    """Open a page of one small lab, after ``spoil`` has had its way with the widgets' state."""
    contexts = []

    def open_(spoil: Callable[[dict[str, Any], str], None]) -> Lab:
        grid = memory_lab(fixed_gb=(), reserve=())
        slider = next(child for child in grid.children if isinstance(child, ipywidgets.IntSlider))
        data = embed_data(views=[grid], state=dependency_state([grid], drop_defaults=False))
        spoil(data["manager_state"]["state"], f"IPY_MODEL_{slider.model_id}")
        scripts = (site / "_static" / "widgets" / "embed.js").as_uri()
        text = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><script src="{scripts}"></script>'
            f'<script type="application/vnd.jupyter.widget-state+json">{json.dumps(data["manager_state"])}'
            '</script><div><script type="application/vnd.jupyter.widget-view+json">'
            f"{json.dumps(data['view_specs'][0])}</script></div></html>"
        )
        path = tmp_path / "page.html"
        path.write_text(text, encoding="utf-8")
        context = chromium.new_context(viewport={"width": 1000, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.goto(path.as_uri())
        page.wait_for_selector(".gpucourse-grid table")
        return Lab(page.locator(".gpucourse-grid"), MemoryLedger())

    yield open_
    for context in contexts:
        context.close()
    ipywidgets.Widget.close_all()


def test_a_page_as_it_was_made_passes_the_comparison(small_page: Callable[..., Lab]) -> None:
    small_page(lambda state, slider: None).exercise(random.Random(1), rounds=1)


def test_a_page_whose_slider_is_linked_to_nothing_fails_the_comparison(
    small_page: Callable[..., Lab],
) -> None:
    def unlink(state: dict[str, Any], slider: str) -> None:
        links = [key for key, model in state.items() if model["state"].get("source", [None])[0] == slider]
        assert len(links) == 1
        del state[links[0]]

    lab = small_page(unlink)
    lab.check()  # it opens well: only moving it shows the fault
    lab.slide_by_keyboard(55)
    expect(lab.slider).to_have_attribute("aria-valuetext", "55 samples")  # its own readout did move
    with pytest.raises(AssertionError):
        lab.check()


def test_a_page_whose_frames_are_in_the_wrong_order_fails_the_comparison(
    small_page: Callable[..., Lab],
) -> None:
    def shift(state: dict[str, Any], slider: str) -> None:
        stacks = [m["state"] for m in state.values() if m["state"].get("_model_name") == "StackModel"]
        sheets = next(stack for stack in stacks if len(stack["children"]) == 65)
        sheets["children"] = [*sheets["children"][1:], sheets["children"][0]]

    with pytest.raises(AssertionError):
        small_page(shift).check()
