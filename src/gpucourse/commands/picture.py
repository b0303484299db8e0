"""The picture that a command may draw: its file's name is judged before anything is measured."""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gpucourse.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["picture", "save"]


def picture(text: str) -> Path:
    """Read the value of ``--plot``.

    Parameters
    ----------
    text
        A file to be written. Matplotlib would put ".png" behind a name without an ending, and so write beside a
        folder of that name; such names are refused.

    Returns
    -------
    Path
        The file, from the root on.

    Raises
    ------
    argparse.ArgumentTypeError
        It is no name of an image file, or its folder cannot take one.
    """
    path = Path(text)
    ending = path.suffix.removeprefix(".").lower()
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} names no file: give one, such as samples.png")
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise argparse.ArgumentTypeError(f"drawing needs matplotlib ({error})") from None
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if ending not in known:
        raise argparse.ArgumentTypeError(f"{text!r} ends in no kind of image: {', '.join(known)} are known")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"there is no folder {str(path.parent)!r} to draw into: make it first"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: give a file in a folder of yours")
    return path.absolute()  # the code that is timed may change the folder


def save(command: str, drawn: Callable[[], Figure], path: Path) -> bool:
    """Draw and write; where that fails, say so on standard error and that the numbers are whole.

    Parameters
    ----------
    command
        Whose picture it is, such as "time".
    drawn
        Gives the figure.
    path
        As `picture` read it.

    Returns
    -------
    bool
        Whether the file is there.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # a sign in the snippet that the font lacks
            drawing = io.BytesIO()
            drawn().savefig(drawing, facecolor="white", dpi=150, format=path.suffix.removeprefix(".").lower())
        write_whole(path, drawing.getvalue())
    except (OSError, ValueError, ImportError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        print(
            f"gpucourse {command}: could not draw into {path}: {said}; the numbers above are whole. Give a file "
            "that can be written, such as --plot samples.png",
            file=sys.stderr,
        )
        return False
    return True
