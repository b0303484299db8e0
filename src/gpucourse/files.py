"""Write a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write beside the file, then rename: a reader, or a full disk, never meets a part of it.

    Parameters
    ----------
    path
        The file; where it is a link, what it leads to is replaced. What is no plain file, such as a terminal, is
        written into.
    content
        Text is written as UTF-8.

    Returns
    -------
    Path
        The path that was given.

    Raises
    ------
    OSError
        It cannot be written; what was there before is whole, and nothing is left beside it.
    """
    data = content.encode() if isinstance(content, str) else content
    target = path.resolve()
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return path
    temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o777)
        os.replace(temporary, target)
    except BaseException:  # an interrupt, too
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path
