"""A time in seconds as an option gives it."""

from __future__ import annotations

import argparse
import math

__all__ = ["seconds"]


def seconds(text: str, *, zero: bool = True) -> float:
    """Read a finite time in seconds.

    Parameters
    ----------
    text
        What was typed.
    zero
        Whether 0 is one.

    Raises
    ------
    argparse.ArgumentTypeError
        It is no such time.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or (value == 0 and not zero):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time in seconds{', 0 or more' if zero else ' above 0'}"
        )
    return value
