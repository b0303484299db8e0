"""The look of the book's charts: inline SVG that follows the page, with its data table beside it.

Each chapter's own charts stand in a module named after its key; each function there returns a `Chart`.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpucourse import html
from gpucourse.units import format_time_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gpucourse.recording import Recording

__all__ = [
    "BLUE",
    "GREEN",
    "GREY",
    "INK",
    "ORANGE",
    "PURPLE",
    "Chart",
    "Table",
    "figure",
    "short_name",
    "unbroken_ms",
]

# Each has a contrast of 3 : 1 or more against both a white page and the dark theme's background.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#2f7fc1", "#c8691c", "#2c8f57", "#9463cf", "#7d8590"
INK = "#010203"  # stands for the page's own text colour: it leaves the SVG as `currentColor`

_numbers = itertools.count(1)
_STYLE: dict[Any, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "font.size": 9.5,
    "font.family": "sans-serif",
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "grid.color": GREY,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "svg.fonttype": "path",
    "svg.hashsalt": "gpucourse",  # the same figure gives the same bytes, so an unchanged page stays unchanged
}


def figure(width: float = 5.8, height: float = 3.2, **subplots: Any) -> tuple[Figure, Any]:
    """Make a figure in the book's style, outside pyplot's global state.

    Parameters
    ----------
    width, height
        Size in inches; 5.8 fills the text column and stays readable on a phone.
    **subplots
        Passed to ``Figure.subplots`` (``nrows``, ``ncols``, ``sharex`` …).

    Returns
    -------
    (Figure, Axes)
        An array of axes where more than one was asked for.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        fig = Figure(figsize=(width, height), layout="constrained")
        axes: Axes = fig.subplots(**subplots)
    return fig, axes


@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """A drawn figure with caption, provenance and data table.

    Attributes
    ----------
    fig
        The matplotlib figure, made by `figure`.
    caption
        What the reader should see in it.
    alt
        The same for a reader who cannot see it: kind of picture, axes, course of the curves.
    header, rows
        The data table: header cells with units, and the drawn values.
    source
        The recording that the values come from; None for a drawing or a derivation.
    """

    fig: Figure
    _: dataclasses.KW_ONLY
    caption: str
    alt: str
    header: Sequence[object]
    rows: Sequence[Sequence[object]]
    source: Recording | None = None

    def svg(self) -> str:
        """Draw the figure as an SVG element whose text has the page's own colour."""
        import matplotlib
        from matplotlib.text import Text

        # Text that was added after the axes were made has matplotlib's own default, black.
        for text in self.fig.findobj(Text):
            if text.get_color() in ("black", "k"):
                text.set_color(INK)
        target = io.StringIO()
        with matplotlib.rc_context(_STYLE):
            self.fig.savefig(target, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
        svg = target.getvalue()
        svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        # Element names must be unique on a page that holds several charts.
        mark = f"c{next(_numbers)}-"
        svg = re.sub(r'\bid="([^"]+)"', rf'id="{mark}\1"', svg)
        svg = re.sub(r'href="#([^"]+)"', rf'href="#{mark}\1"', svg)
        svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{mark}\1)", svg)
        size = re.search(r'width="([\d.]+)pt"', svg)
        width = round(float(size.group(1)) * 4 / 3) if size else 560
        style = f"width:100%;max-width:{width}px;height:auto;--least:{self._least_px(width)}px"
        opening = f'<svg role="img" aria-label="{html.escape(self.alt)}" style="{style}"'
        svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
        return svg.replace("<svg", opening, 1)

    def _least_px(self, width: int) -> int:
        """Give the width, in CSS pixels, at which the smallest words of a picture are 7 pixels high."""
        from matplotlib.text import Text

        points = [
            float(text.get_fontsize())
            for text in self.fig.findobj(Text)
            if text.get_visible() and text.get_text().strip()
        ]
        return round(min(width, width * 7 / (min(points) * 4 / 3))) if points else 0

    def _repr_html_(self) -> str:
        source = ""
        if self.source is not None:
            source = f' <span class="provenance">{html.escape(self.source.line())}.</span>'
        table, name = html.table(self.header, self.rows), short_name(self.caption)
        return (
            '<figure class="chart"><div class="scroll drawing" tabindex="0" role="group" '
            f'aria-label="{html.escape(f"Picture: {name}")}">{self.svg()}</div>'
            f"<figcaption>{html.escape(self.caption)}{source}</figcaption>"
            f"<details><summary>Data table</summary>"
            '<div class="scroll" tabindex="0" role="region" '
            f'aria-label="{html.escape(f"Data table: {name}")}">{table}</div>'
            "</details></figure>"
        )

    def __repr__(self) -> str:
        return f"Chart: {self.caption}"


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A table of measured values that says under itself where they come from.

    Attributes
    ----------
    header, rows
        Cells as text; each row as long as the header.
    caption
        What the table shows.
    source
        The recording that the values come from.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    _: dataclasses.KW_ONLY
    caption: str
    source: Recording

    def _repr_html_(self) -> str:
        table = html.table(self.header, self.rows, self.caption)
        name = html.escape(f"Table: {short_name(self.caption)}")
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">{table}'
            f'</div><p class="provenance">{html.escape(self.source.line())}</p>'
        )

    def __repr__(self) -> str:
        return "\n".join([*(" | ".join(row) for row in (self.header, *self.rows)), self.source.line()])


def short_name(caption: str, most: int = 70) -> str:
    """Shorten a caption to what tells its picture from others when a screen reader lists them.

    Parameters
    ----------
    caption
        One sentence or more.
    most
        Characters that the name may have.

    Returns
    -------
    str
        The first sentence without its full stop, cut after a word where it is too long.

    Examples
    --------
    >>> short_name("The rate of x + y by size: 1.5 TB/s at the most. What lies in the L2 is not held to it.")
    'The rate of x + y by size: 1.5 TB/s at the most'
    >>> short_name("What it buys each kernel of the block over fp32, and what not", most=30)
    'What it buys each kernel of …'
    """
    first = re.split(r"(?<=\w)[.?!](?=\s+[A-Z]|\s*$)", " ".join(caption.split()), maxsplit=1)[0]
    if len(first) <= most:
        return first
    return f"{first[: most - 2].rsplit(' ', 1)[0].rstrip(' ,:;')} …"


def unbroken_ms(value: float) -> str:
    r"""Format a time in ms so that number and unit stay on one line of a narrow table.

    >>> unbroken_ms(0.0237)
    '23.7\xa0µs'
    """
    return format_time_ms(value).replace(" ", "\N{NO-BREAK SPACE}")
