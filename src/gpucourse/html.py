"""Small pieces of HTML that pages and notebooks share.

>>> table(["GPU", "GB/s"], [["T4", 320]])
'<table class="data"><thead><tr><th scope="col">GPU</th><th scope="col">GB/s</th></tr></thead><tbody><tr><th scope="row">T4</th><td>320</td></tr></tbody></table>'
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["Raw", "escape", "table"]


class Raw(str):
    """Text that is HTML already and is not to be escaped again."""

    __slots__ = ()


def _cell(value: object) -> str:
    return value if isinstance(value, Raw) else escape(str(value))


def table(
    header: Sequence[object], rows: Iterable[Sequence[object]], caption: str = "", *, row_header: bool = True
) -> str:
    """Lay out a data table that a screen reader can walk.

    Parameters
    ----------
    header
        One cell a column.
    rows
        Rows of cells, each as long as `header`; anything but `Raw` is escaped.
    caption
        What the table shows; none by default.
    row_header
        Whether the first cell of a row names the row.

    Raises
    ------
    ValueError
        A row has another length than the header.
    """
    width = len(header)
    body = []
    for row in rows:
        if len(row) != width:
            raise ValueError(f"a row has {len(row)} cells where the header has {width}: {list(row)!r}")
        cells = [f"<td>{_cell(value)}</td>" for value in row]
        if row_header and cells:
            cells[0] = f'<th scope="row">{_cell(row[0])}</th>'
        body.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f'<th scope="col">{_cell(value)}</th>' for value in header)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<table class="data">{title}<thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
