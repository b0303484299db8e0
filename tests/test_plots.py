"""Tests of the book's chart: what every figure carries, whatever it draws."""

from __future__ import annotations

import re

import pytest

from gpucourse.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, Chart, Table, figure, short_name
from gpucourse.recording import Recording


def chart(**changes) -> Chart:
    fig, ax = figure()
    ax.plot([0, 1], [0, 1], color=BLUE)
    ax.set_xlabel("width")
    facts = {"caption": "A <line>.", "alt": 'From "0" to 1.', "header": ["x", "y"], "rows": [[0, 0], [1, 1]]}
    return Chart(fig, **(facts | changes))


def test_text_takes_the_pages_colour_so_that_it_reads_in_light_and_dark():
    svg = chart().svg()
    assert "currentColor" in svg
    assert "#010203" not in svg
    assert not re.search(r"(fill|stroke): ?#(000000|ffffff)", svg)


def test_text_added_without_a_colour_takes_it_too():
    fig, ax = figure()
    ax.text(0.5, 0.5, "named")
    svg = Chart(fig, caption="c", alt="a", header=["x"], rows=[[1]]).svg()
    assert not re.search(r"(fill|stroke): ?(#000000|black)", svg)


def test_two_charts_on_one_page_share_no_element_name():
    one, two = (set(re.findall(r'id="([^"]+)"', chart().svg())) for _ in range(2))
    assert one
    assert not one & two


def test_every_reference_inside_a_chart_has_its_target():
    svg = chart().svg()
    targets = set(re.findall(r'id="([^"]+)"', svg))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)) <= targets


def test_caption_description_provenance_and_table_are_there_and_escaped():
    source = Recording(name="x", data={}, provenance={"gpu": "NVIDIA H200", "date": "2026-12-01T00:00:00"})
    found = chart(source=source)._repr_html_()
    for part in (
        "A &lt;line&gt;.",
        'aria-label="From &quot;0&quot; to 1."',
        "recorded on NVIDIA H200, 2026-12-01",
        "<td>1</td>",
    ):
        assert part in found


def test_picture_and_tables_are_named_by_their_caption_so_that_a_list_of_them_tells_them_apart():
    found = chart(caption='Rates of "x" by size. And more.')._repr_html_()
    assert 'role="group" aria-label="Picture: Rates of &quot;x&quot; by size"' in found
    assert 'role="region" aria-label="Data table: Rates of &quot;x&quot; by size"' in found
    source = Recording(name="x", data={}, provenance={"gpu": "NVIDIA H200", "date": "2026-12-01T00:00:00"})
    table = Table(("x",), (("1",),), caption="What <y> took.", source=source)._repr_html_()
    assert 'role="region" aria-label="Table: What &lt;y&gt; took"' in table


@pytest.mark.parametrize(
    "caption", ["", "One. Two.", "At 1.5 TB/s, 3 µs. And so on", "word " * 60, "x" * 200]
)
def test_a_short_name_is_short_and_the_captions_beginning(caption):
    name = short_name(caption)
    assert len(name) <= 70
    assert " ".join(caption.split()).startswith(name.removesuffix("…").rstrip())


def test_a_chart_says_how_narrow_it_may_be_drawn_for_its_smallest_words_to_be_read():
    def least(points: float) -> int:
        fig, ax = figure()
        ax.text(0.5, 0.5, "small", fontsize=points)
        ax.text(0.5, 0.5, "", fontsize=1)  # nothing to read
        svg = Chart(fig, caption="c", alt="a", header=["x"], rows=[[1]]).svg()
        return int(re.search(r"--least:(\d+)px", svg)[1])

    assert least(6.5) == round(557 * 7 / (6.5 * 4 / 3))
    assert least(8) < 390 < least(6.5)
    assert least(3) == 557  # no wider than it is drawn


def test_the_same_figure_gives_the_same_bytes():
    first, second = (re.sub(r"c\d+-", "", chart().svg()) for _ in range(2))
    assert first == second


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("page", ["#ffffff", "#14181e"])
@pytest.mark.parametrize("colour", [BLUE, ORANGE, GREEN, PURPLE, GREY])
def test_every_colour_has_a_contrast_of_three_to_one_in_light_and_dark(colour, page):
    high, low = sorted((luminance(colour), luminance(page)), reverse=True)
    assert (high + 0.05) / (low + 0.05) >= 3
