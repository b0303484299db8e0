"""Plain data read back into facts: each value is what its field wants, or the error says which is not.

>>> number(3, "duration_us")
3.0
>>> whole(2.5, "calls")
Traceback (most recent call last):
...
ValueError: calls is 2.5: a whole number, 0 or more, is wanted
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from gpucourse.work import is_finite_number, short

__all__ = ["number", "rows", "text", "whole"]


def number(value: object, what: str, *, least: float = -math.inf, above: float = -math.inf) -> float:
    """Read a finite number.

    Parameters
    ----------
    value
        Of Python's or numpy's; a bool is none, nor is an integer beyond all floats.
    what
        The field, which begins the message.
    least, above
        It is at least the one, and more than the other.

    Raises
    ------
    ValueError
        It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not is_finite_number(value):
        raise ValueError(f"{what} is {short(value)}: a finite number is wanted")
    if value < least or value <= above:
        wanted = f"{least:g} or more" if value < least else f"more than {above:g}"
        raise ValueError(f"{what} is {short(value)}: {wanted} is wanted")
    return float(value)


def whole(value: object, what: str, *, least: int = 0) -> int:
    """Read a whole number of at least `least`.

    Raises
    ------
    ValueError
        It is something else; a bool and 3.0 are.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{what} is {short(value)}: a whole number, {least} or more, is wanted")
    return int(value)


def text(value: object, what: str) -> str:
    """Read a text.

    Raises
    ------
    ValueError
        It is something else.
    """
    if not isinstance(value, str):
        raise ValueError(f"{what} is {short(value)}: a text is wanted")
    return value


def rows(value: object, what: str) -> Sequence[Any]:
    """Read a list or a tuple; a text is none.

    Raises
    ------
    ValueError
        It is something else.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ValueError(f"{what} is {short(value)}: a list is wanted")
    return value
