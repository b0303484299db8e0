"""Put the chapters' notebooks into a working folder and open it in JupyterLab: ``make lab``.

A notebook that the reader has changed is never written over. Where the book has a newer version of it, that goes
beside it, as ``NAME-updated.ipynb``, and this says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book" / "_ext"))
RECORD = ".from-the-book.json"


def checksum(content: bytes) -> str:
    """Return the checksum of a notebook."""
    return hashlib.sha256(content).hexdigest()


def written_before(record: Path) -> dict[str, str]:
    """Return the checksums of what was written here; none where the record is gone or cannot be read.

    A notebook without one counts as the reader's own, so nothing is lost by a record that is.
    """
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def free_name(path: Path, text: str) -> Path:
    """Return a name beside ``path`` that is unused, or that already holds ``text``."""
    number = 1
    while True:
        name = path.with_name(f"{path.stem}-updated{'' if number == 1 else f'-{number}'}{path.suffix}")
        if not name.exists() or name.read_bytes() == text.encode():
            return name
        number += 1


def fill(folder: Path, notebooks: dict[str, str]) -> list[str]:
    """Write the notebooks into ``folder``; return what the reader is to be told.

    Parameters
    ----------
    folder
        The working folder; made if it is not there.
    notebooks
        The text of each notebook by page, as `clean_notebooks.convert_all` gives it.
    """
    record = folder / RECORD
    written = written_before(record)
    told = []
    for page, text in notebooks.items():
        path = folder / f"{page}.ipynb"
        wanted = text.encode()
        found = path.read_bytes() if path.is_file() else None  # bytes: the reader's may be of any encoding
        if found is None or checksum(found) == written.get(page):
            if found != wanted:
                write_whole(path, text)
        elif checksum(wanted) != written.get(page) and found != wanted:
            beside = free_name(path, text)
            if not beside.exists():
                write_whole(beside, text)
            told.append(
                f"{path.relative_to(folder)} holds work of yours and stays as it is; "
                f"the book's newer version is {beside.relative_to(folder)}"
            )
            continue
        written[page] = checksum(wanted)
    write_whole(record, json.dumps(written, indent=1) + "\n")
    return told


def main() -> int:
    """Fill the folder, then become JupyterLab."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "lab")
    parser.add_argument("--only-notebooks", action="store_true", help="do not start JupyterLab")
    parser.add_argument("--lab-args", default="", help="further arguments for JupyterLab, in one string")
    arguments = parser.parse_args()

    import clean_notebooks

    errors: list[str] = []
    notebooks = clean_notebooks.convert_all(ROOT, errors.append)
    if errors:
        print("\n".join(f"error: {error}" for error in errors), file=sys.stderr)
        return 1
    try:
        further = shlex.split(arguments.lab_args)
        told = fill(arguments.folder, notebooks)
    except ValueError as error:
        print(f"error: LAB_ARGS {arguments.lab_args!r} cannot be read: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: the notebooks cannot be written: {error}", file=sys.stderr)
        return 1
    for line in told:
        print(f"note: {line}")
    print(f"{len(notebooks)} notebooks in {arguments.folder}", flush=True)
    if arguments.only_notebooks:
        return 0
    # This environment's kernel, whatever other kernels the user has.
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={arguments.folder}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")  # a container's only user; without it JupyterLab refuses to start
    os.execv(sys.executable, [*command, *further])


if __name__ == "__main__":
    sys.exit(main())
