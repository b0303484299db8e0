"""One grid of frames on a page, moved as a reader moves it: what the browser tests of all labs share."""

from __future__ import annotations

import random

from playwright.sync_api import Locator, Page


class Grid:
    """A slider with menus below it, and the table of the visible frame.

    The table is what is read, never a slider's own readout. ``position`` is what the slider stands at, as
    Python knows it; ``last`` is its highest value, ``first`` its lowest, ``step`` what lies between two.
    """

    def __init__(self, grid: Locator, last: int, *, first: int = 0, step: int = 1) -> None:
        self.grid, self.page = grid, grid.page
        self.first, self.last, self.step = first, last, step
        self.slider = grid.get_by_role("slider")
        self.position = int(self.slider.get_attribute("aria-valuenow").split(".")[0])

    def table(self) -> dict[str, str]:
        """Read the first two columns of the visible tables; no-break spaces read as spaces."""
        rows = self.grid.locator("table tr")
        cells = rows.evaluate_all("rows => rows.map(row => [row.cells[0].innerText, row.cells[1].innerText])")
        return {name.strip(): value.replace("\xa0", " ").strip() for name, value in cells}

    def press(self, *keys: str) -> None:
        """Press keys on the slider."""
        self.slider.focus()
        for key in keys:
            self.page.keyboard.press(key)

    def slide_by_keyboard(self, target: int) -> None:
        """Go to the nearer end, then step."""
        up = target - self.first <= self.last - target
        steps = min(target - self.first, self.last - target) // self.step
        self.press("Home" if up else "End", *["ArrowRight" if up else "ArrowLeft"] * steps)
        self.position = target

    def slide_by_mouse(self, target: int) -> None:
        """Drag the handle by as much as the target is away."""
        self.slider.scroll_into_view_if_needed()
        track, handle = self.grid.locator(".noUi-base").bounding_box(), self.slider.bounding_box()
        assert track is not None
        assert handle is not None
        x, y = handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        self.page.mouse.move(
            x + track["width"] * (target - self.position) / (self.last - self.first), y, steps=4
        )
        self.page.mouse.up()
        self.position = target

    def click_track(self, target: int) -> None:
        """Click on the track where the target is, or well away from the handle, which takes clicks itself."""
        if abs(target - self.position) <= (self.last - self.first) // 8:
            places = (self.last - self.first) // self.step + 1
            place = (self.position - self.first) // self.step
            target = self.first + (place + places // 2) % places * self.step
        self.slider.scroll_into_view_if_needed()
        track = self.grid.locator(".noUi-base").bounding_box()
        assert track is not None
        # The track's ends belong to its neighbours.
        across = min(
            max(track["width"] * (target - self.first) / (self.last - self.first), 1), track["width"] - 1
        )
        self.page.mouse.click(track["x"] + across, track["y"] + track["height"] / 2)
        self.position = target

    def check(self) -> None:
        """Compare the page with what Python gives for the values that were set; each lab has its own."""
        raise NotImplementedError

    def offered(self) -> dict[str, int]:
        """Give the menus and how many options each has."""
        raise NotImplementedError

    def choose(self, menu: str, position: int, *, keys: bool) -> None:
        """Set a menu by keyboard or by mouse."""
        raise NotImplementedError

    def exercise(self, rng: random.Random, rounds: int) -> None:
        """Move every control by keyboard and by mouse, to random settings, and compare after each."""
        self.check()
        for _ in range(rounds):
            for move in (self.slide_by_keyboard, self.slide_by_mouse, self.click_track):
                move(rng.randrange(self.first, self.last + 1, self.step))
                self.check()
            for keys in (True, False):
                for menu, count in self.offered().items():
                    self.choose(menu, rng.randrange(count), keys=keys)
                    self.check()

    def choose_by_keyboard(self, label: str, position: int) -> None:
        """Step through a menu from its first option."""
        self.grid.get_by_label(label, exact=True).focus()
        self.page.keyboard.press("Home")
        for _ in range(position):
            self.page.keyboard.press("ArrowDown")

    def choose_by_mouse(self, label: str, position: int) -> None:
        """Pick an option; the open list belongs to the browser, not to the page, so no coordinates here."""
        self.grid.get_by_label(label, exact=True).select_option(index=position)


#: Notes in ``window.firstMove`` when, after the page was asked for, a key on the first slider changed the verdict.
FIRST_MOVE = """
window.firstMove = new Promise(resolve => {
  const look = () => {
    const grid = document.querySelector('.gpucourse-grid');
    const handle = grid && grid.querySelector('[role=slider]');
    const verdict = grid && grid.querySelector('.verdict');
    if (!handle || !verdict || !verdict.innerText) { setTimeout(look, 5); return; }
    const before = verdict.innerText;
    handle.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}));
    const moved = () => {
      const now = grid.querySelector('.verdict');
      if (now && now.innerText !== before) resolve(performance.now()); else setTimeout(moved, 1);
    };
    moved();
  };
  look();
});
"""

#: Takes a number of moves and their key; returns how long each took until the frame was there and laid out, in ms.
MOVES = """
async ([count, key]) => {
  const grid = document.querySelector('.gpucourse-grid');
  const handle = grid.querySelector('[role=slider]');
  const times = [];
  for (let k = 0; k < count; k++) {
    const before = grid.querySelector('.verdict').innerText, start = performance.now();
    handle.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
    while (grid.querySelector('.verdict').innerText === before) {
      if (performance.now() - start > 5000) throw new Error('the slider moves nothing');
      await new Promise(go => setTimeout(go, 0));
    }
    grid.querySelector('table').getBoundingClientRect();  // laid out, too
    times.push(performance.now() - start);
  }
  return times;
}
"""

#: What a working slider may take on a slow, shared machine; the goals are 1,500 and 50.
LOAD_AT_MOST_MS, MOVE_AT_MOST_MS = 15_000, 500


def check_speed(page: Page, scheme: str, presses: int, key: str) -> None:
    """Hold the time from asking for a lab's page to a slider that works, and that of a move, to their limits.

    Medians of three loads and of `presses` moves by `key`.
    """
    page.add_init_script(FIRST_MOVE)
    loads = []
    for _ in range(3):
        page.reload(wait_until="load")
        loads.append(page.evaluate("() => window.firstMove"))
    moves = page.evaluate(MOVES, [presses, key])
    load, move = sorted(loads)[1], sorted(moves)[presses // 2]
    print(
        f"{scheme}: working slider after {load:.0f} ms, a move takes {move:.1f} ms (worst {max(moves):.1f})"
    )
    assert load < LOAD_AT_MOST_MS
    assert move < MOVE_AT_MOST_MS
