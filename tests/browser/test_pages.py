"""Every page of the built site: reaches nothing outside, says nothing on the console, is readable by all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.conftest import NARROW, ROOT, WIDE, OpenPage, Watch, serve, settle
from tests.conftest import SmallBook
from tests.site_text import toc_pages

PAGES = [f"{name}.html" for name in toc_pages(ROOT)]
GENERATED = ["index.html", "search.html", "genindex.html"]
AXE = ROOT / "book" / "vendor" / "axe" / "axe.min.js"
#: Impacts that stop the build of the site.
SERIOUS = ("serious", "critical")


def axe_findings(page: Page) -> list[str]:
    """Return axe-core's serious findings on a page, one line each."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    # preload would fetch the style sheets once more, which a browser refuses from file://.
    options = "{resultTypes: ['violations'], preload: false}"
    result: dict[str, Any] = page.evaluate(f"() => axe.run(document, {options})")
    return [
        f"{finding['id']} ({finding['impact']}): {finding['help']}: {node['html'][:160]}"
        for finding in result["violations"]
        if finding["impact"] in SERIOUS
        for node in finding["nodes"][:5]
    ]


def overflow(page: Page) -> list[str]:
    """Name what makes a page wider than its window, an empty list if nothing does."""
    return page.evaluate(
        """() => {
            const room = document.documentElement.clientWidth;
            if (document.documentElement.scrollWidth <= room && document.body.scrollWidth <= room) return [];
            const scrolls = e => e && (/auto|scroll|hidden|clip/.test(getComputedStyle(e).overflowX)
                && e !== document.body && e !== document.documentElement || scrolls(e.parentElement));
            const wide = [...document.querySelectorAll('body *')]
                .filter(e => e.getBoundingClientRect().right > room + 1 && !scrolls(e.parentElement))
                .map(e => `<${e.tagName.toLowerCase()} class="${e.className}"> `
                    + `${Math.round(e.getBoundingClientRect().right)} px of ${room}`);
            return [`scrolls to ${document.documentElement.scrollWidth} px`, ...wide.slice(0, 5)];
        }"""
    )


@pytest.mark.parametrize("scheme", ["http", "file"])
@pytest.mark.parametrize("path", PAGES + GENERATED)
def test_page_stays_within_the_site_and_has_no_error(open_page: OpenPage, path: str, scheme: str) -> None:
    page = open_page(path, scheme=scheme)
    # The watch of `open_page` judges; this makes sure that it saw the page at all.
    assert page.watch.requests, "no request was seen"
    assert page.locator("h1").count() >= 1


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("colour", ["light", "dark"])
@pytest.mark.parametrize("path", [*PAGES, "search.html"])
def test_page_is_accessible_and_fits(open_page: OpenPage, path: str, colour: str, width: int) -> None:
    page = open_page(path, scheme_colour=colour, width=width)
    assert page.evaluate("document.documentElement.dataset.theme") == colour
    assert overflow(page) == []
    # Colours that still fade from one theme to the other are no page's colours.
    page.add_style_tag(
        content="*, ::before, ::after { transition: none !important; animation: none !important }"
    )
    assert axe_findings(page) == []


@pytest.mark.parametrize("path", PAGES)
def test_page_reads_without_scripts(open_page: OpenPage, path: str) -> None:
    page = open_page(path, scheme="file", java_script_enabled=False)
    assert len(page.locator("article").inner_text()) > 200
    assert not page.get_by_text("Error displaying widget").is_visible()


@pytest.mark.parametrize("path", PAGES)
def test_every_link_within_the_site_leads_somewhere(open_page: OpenPage, site: Path, path: str) -> None:
    page = open_page(path, scheme="file")
    links: list[str] = page.eval_on_selector_all("a[href]", "links => links.map(a => a.href)")
    inside = {link for link in links if link.startswith(site.as_uri())}
    assert inside, "the page has no link at all"
    missing = []
    for link in inside:
        address, _, fragment = link.partition("#")
        file = site / address.removeprefix(site.as_uri()).lstrip("/").partition("?")[0]
        if not file.is_file():
            missing.append(link)
        elif fragment and file.suffix == ".html":
            text = file.read_text(encoding="utf-8")
            if f'id="{fragment}"' not in text and f'name="{fragment}"' not in text:
                missing.append(link)
    assert missing == []


@pytest.mark.parametrize("path", PAGES)
def test_a_wide_equation_shows_its_beginning_first(open_page: OpenPage, path: str) -> None:
    page = open_page(path, width=NARROW)
    begins = page.locator("div.math").evaluate_all(
        """boxes => boxes.map(box => [box.getBoundingClientRect().left,
            box.querySelector("mjx-math").getBoundingClientRect().left])"""
    )
    assert [pair for pair in begins if pair[1] < pair[0]] == []


@pytest.mark.parametrize("colour", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_what_scrolls_inside_itself_on_a_phone_shows_that_there_is_more(
    open_page: OpenPage, path: str, colour: str
) -> None:
    page = open_page(path, width=NARROW, scheme_colour=colour)
    page.eval_on_selector_all("article details", "folds => folds.forEach(fold => fold.open = true)")
    silent = page.locator("article :is(.scroll, div.math, .pst-scrollable-table-container)").evaluate_all(
        """boxes => boxes.filter(box => box.scrollWidth > box.clientWidth + 1)
            .filter(box => getComputedStyle(box).backgroundImage.split("linear-gradient").length !== 5)
            .map(box => box.outerHTML.slice(0, 120))"""
    )
    assert silent == []
    # A chart fits the whole width, unless its words would be too small to read.
    wide = page.locator("figure.chart .drawing").evaluate_all(
        """drawings => drawings.filter(d => d.clientWidth < innerWidth
            || d.scrollWidth > Math.max(d.clientWidth, parseFloat(d.firstElementChild.style
                .getPropertyValue("--least"))) + 1).map(d => d.ariaLabel)"""
    )
    assert wide == []


def test_a_wide_tables_labels_do_not_break_at_every_word(open_page: OpenPage) -> None:
    page = open_page(next(path for path in PAGES if "launch_bound" in path), width=NARROW)
    labels = page.locator("table.data").first.locator("tbody th")
    widths = labels.evaluate_all("cells => cells.map(cell => cell.getBoundingClientRect().width)")
    assert len(widths) > 1
    assert min(widths) >= 8 * 16


def test_search_finds_a_page(open_page: OpenPage) -> None:
    page = open_page("search.html?q=kernel")
    page.wait_for_selector("#search-results li a")
    assert page.locator("#search-results li").count() >= 1


def test_folds_open_by_keyboard(open_page: OpenPage) -> None:
    page = open_page(next(path for path in PAGES if "kernels" in path), scheme="file")
    fold = page.locator("details", has=page.locator("summary", has_text="Need a hint?")).first
    fold.locator("summary").focus()
    page.keyboard.press("Enter")
    assert fold.get_attribute("open") is not None


def test_print_shows_what_is_folded(open_page: OpenPage) -> None:
    page = open_page(next(path for path in PAGES if "kernels" in path), scheme="file")
    page.emulate_media(media="print")
    hidden = page.locator("details:not([open]) > *:not(summary)").evaluate_all(
        "folded => folded.filter(e => e.getBoundingClientRect().height === 0 && e.textContent.trim()).length"
    )
    assert hidden == 0


@pytest.mark.slow
def test_a_sliders_name_is_read_out_and_its_mathematics_typeset(
    small_book: SmallBook, chromium: Browser
) -> None:
    small_book.notebook(
        "book/page.md",
        "# A page\n\nWith $x$.\n\n```{code-cell}\nimport ipywidgets\n\n"
        'ipywidgets.VBox([ipywidgets.IntSlider(description="Width $n$", tooltip="Width n"),\n'
        '    ipywidgets.IntRangeSlider(description="From, to"),\n'
        '    ipywidgets.SelectionSlider(description="Device", options=["T4", "L4"])])\n```\n',
    )
    built = small_book.build()
    assert built.returncode == 0, built.stdout + built.stderr
    context = chromium.new_context()
    page = context.new_page()
    watch = Watch(small_book.site, small_book.site.as_uri())
    watch.attach(page)
    page.goto(f"{small_book.site.as_uri()}/book/page.html")
    settle(page)
    page.wait_for_selector(".widget-label mjx-container")
    names = page.locator(".noUi-handle").evaluate_all("handles => handles.map(h => h.ariaLabel)")
    assert names == ["Width $n$", "From, to", "From, to", "Device"]
    said = page.locator(".noUi-handle").evaluate_all("handles => handles.map(h => h.ariaValueText)")
    assert said == ["0", "25", "75", "T4"]
    # What can be typed into beside a slider of numbers has a kind and a name; the book has no other sliders.
    boxes = page.locator(".widget-readout[contenteditable=true]").evaluate_all(
        "boxes => boxes.map(b => [b.role, b.ariaLabel])"
    )
    assert boxes[:2] == [["textbox", "Type a value: Width $n$"], ["textbox", "Type a value: From, to"]]
    assert axe_findings(page) == []
    context.close()
    assert watch.problems == []


# --- the guards themselves ---------------------------------------------------------------------------------

FAULTY = {
    "leaves.html": '<img src="https://example.org/pixel.png" alt="">',
    "script.html": "<script>undefinedName()</script>",
    "console.html": "<script>console.error('broken')</script>",
    "missing.html": '<img src="nowhere.png" alt="">',
    "wide.html": '<div style="width:900px">x</div>',
    "unnamed.html": "<button></button><img src='data:image/gif;base64,R0lGODlhAQABAAAAACw='>",
    "pale.html": '<p style="color:#bbb;background:#fff">pale words</p>',
}


@pytest.fixture
def faulty(chromium: Browser, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    """Open one faulty page at 390 px, watched as `open_page` does."""
    for name, body in FAULTY.items():
        (tmp_path / name).write_text(
            f'<!doctype html><html lang="en"><title>t</title><main><h1>t</h1>{body}</main></html>'
        )
    server, origin = serve(tmp_path)
    context = chromium.new_context(viewport={"width": NARROW, "height": 800})
    page = context.new_page()
    page.watch = Watch(tmp_path, origin)
    page.watch.attach(page)
    page.goto(f"{origin}/{request.param}", wait_until="load")
    settle(page)
    yield page
    context.close()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("faulty", "said"),
    [
        ("leaves.html", "a request leaves the site: https://example.org/pixel.png"),
        ("script.html", "undefinedName"),
        ("console.html", "console error: broken"),
        ("missing.html", "status 404"),
    ],
    indirect=["faulty"],
)
def test_the_watch_reports_a_fault(faulty: Page, said: str) -> None:
    assert any(said in problem for problem in faulty.watch.problems), json.dumps(faulty.watch.problems)


@pytest.mark.parametrize("faulty", ["wide.html"], indirect=True)
def test_the_width_check_reports_what_is_too_wide(faulty: Page) -> None:
    assert overflow(faulty)[0] == "scrolls to 908 px"


@pytest.mark.parametrize(
    ("faulty", "rule"),
    [("unnamed.html", "button-name"), ("pale.html", "color-contrast")],
    indirect=["faulty"],
)
def test_the_accessibility_check_reports_a_fault(faulty: Page, rule: str) -> None:
    assert any(finding.startswith(rule) for finding in axe_findings(faulty))
