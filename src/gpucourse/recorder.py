"""Run the chapters on a CUDA machine, from top to bottom, and keep what their recorded functions measured."""

from __future__ import annotations

import ast
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gpucourse import recording
from gpucourse.environment import require_cuda

__all__ = ["Page", "RecordPageError", "check_recordings", "find_pages", "record_page", "unchecked_recordings"]

CELL_TIMEOUT_S = 900


class RecordPageError(RuntimeError):
    """A page could not be recorded; recordings that it had already made, and all old ones, are whole."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A chapter with recorded functions.

    Attributes
    ----------
    path
        The MyST file.
    recorded
        Names of its recorded functions, in order.
    pending
        Those marked as not yet measured.
    unchecked
        Those whose recording the page takes from `recording.load` wherever it cannot measure: the replay, which
        would refuse it if the code has changed since, is passed by.
    """

    path: Path
    recorded: tuple[str, ...]
    pending: tuple[str, ...]
    unchecked: tuple[str, ...] = ()


def _read(path: Path) -> Any:
    try:
        import jupytext
    except ModuleNotFoundError as error:
        raise RecordPageError(
            "reading chapters needs jupytext, which is not installed: pip install 'gpucourse[record]'"
        ) from error
    try:
        return jupytext.read(path)
    except Exception as error:  # of its parsers, each with errors of its own
        raise RecordPageError(f"{path} is no page that jupytext can read: {error}") from error


def _decorators(source: str) -> Iterator[tuple[str, bool]]:
    """Give each recorded function of a cell, and whether it is pending; a cell with magics has none."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            target = call.func if call else decorator
            name = getattr(target, "id", getattr(target, "attr", ""))
            if name == "recorded":
                yield node.name, any(keyword.arg == "pending" for keyword in (call.keywords if call else []))


def _loaded_and_replayed(node: ast.AST, conditional: bool = False) -> Iterator[tuple[str, bool]]:
    """Give each name that code loads, with False, and each function that it calls on all its ways, with True."""
    conditional = conditional or isinstance(node, ast.If | ast.IfExp)
    if isinstance(node, ast.Call):
        called = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if called == "load" and node.args and isinstance(node.args[0], ast.Constant):
            yield str(node.args[0].value), False
        elif not conditional:
            yield called, True
    for child in ast.iter_child_nodes(node):
        yield from _loaded_and_replayed(child, conditional)


def _unchecked(sources: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    loaded: set[str] = set()
    replayed: set[str] = set()
    for source in sources:
        try:
            tree = ast.parse(source)
        except SyntaxError:  # a cell with magics
            continue
        for name, is_replay in _loaded_and_replayed(tree):
            (replayed if is_replay else loaded).add(name)
    return tuple(name for name in names if name in loaded - replayed)


def find_pages(root: Path) -> list[Page]:
    """Find the chapters and benchmarks below `root` that define recorded functions.

    Parameters
    ----------
    root
        The folder that holds ``_toc.yml``.

    Raises
    ------
    RecordPageError
        `root` is no book, a page cannot be read, or two recorded functions have one name.
    """
    if not os.path.isfile(root / "_toc.yml"):  # False, too, in a folder that may not be read
        raise RecordPageError(f"{root} holds no _toc.yml: run this in the book's own folder")
    pages: list[Page] = []
    owner: dict[str, Path] = {}
    for folder, kind in (("book", "*.md"), ("labs", "*.md"), ("benchmarks", "*.py")):
        for path in sorted((root / folder).rglob(kind)):
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise RecordPageError(
                    f"{path} is not UTF-8 text ({error.reason}): save it as such"
                ) from error
            except OSError as error:
                raise RecordPageError(f"{path} cannot be read: {error.strerror}") from error
            if "@recorded" not in text:
                continue
            sources = [cell.source for cell in _read(path).cells if cell.cell_type == "code"]
            found = [pair for source in sources for pair in _decorators(source)]
            for name, _ in found:
                if name in owner:
                    raise RecordPageError(
                        f"two functions are named {name!r}, in {owner[name]} and {path}: rename one"
                    )
                owner[name] = path
            if found:
                names = tuple(name for name, _ in found)
                pages.append(
                    Page(
                        path=path,
                        recorded=names,
                        pending=tuple(n for n, pending in found if pending),
                        unchecked=_unchecked(sources, names),
                    )
                )
    return pages


def record_page(page: Page, root: Path) -> float:
    """Run one chapter as a notebook with recording on.

    Parameters
    ----------
    page
        From `find_pages`.
    root
        The book's folder; the command in the provenance names the page relative to it.

    Returns
    -------
    float
        Seconds that it took.

    Raises
    ------
    NoGPUError
        There is no CUDA device.
    RecordPageError
        A cell failed, or the run ended without one of the page's recordings.
    """
    require_cuda("this command")
    notebook = _read(page.path)
    try:
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    except ModuleNotFoundError as error:
        raise RecordPageError("running chapters needs nbclient: pip install 'gpucourse[record]'") from error
    relative = page.path.resolve().relative_to(root.resolve())
    began = time.time()
    environment = {**os.environ, recording.RECORD_VARIABLE: f"gpucourse record {relative.as_posix()}"}
    # This environment's kernel, whatever other kernels the user has registered.
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(page.path.parent)}},
    )
    try:
        client.execute(env=environment)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise RecordPageError(f"{relative} stopped: {error}") from error
    folder = recording.recordings_folder()
    for name in page.recorded:
        if name in page.pending:
            continue
        fresh = [path for path in folder.glob(f"*/{name}.json") if path.stat().st_mtime >= began - 1]
        if not fresh:
            raise RecordPageError(
                f"{relative} ran, but {name} was never called: call it in a cell of the page"
            )
    return time.time() - began


def unchecked_recordings(root: Path) -> list[str]:
    """List the recordings that their own page reads without asking whether they are stale; none keeps a book back."""
    return [
        f"{page.path}: {name} is read by load() and not replayed, so nothing says if its code has changed since; "
        f"measure it again, then call {name}() alone"
        for page in find_pages(root)
        for name in page.unchecked
    ]


def check_recordings(root: Path) -> list[str]:
    """List what keeps the book from being published: missing, corrupt, pending and orphaned recordings.

    Whether a recording is stale shows when its chapter runs, so `make book` checks that.
    """
    problems: list[str] = []
    known: set[str] = set()
    for page in find_pages(root):
        for name in page.recorded:
            known.add(name)
            if name in page.pending:
                problems.append(f"{page.path}: {name} is not yet measured")
                continue
            try:
                recording.load(name)
            except recording.RecordingError as error:
                problems.append(f"{page.path}: {error}")
    problems += [f"recording {name} belongs to no chapter" for name in recording.names() if name not in known]
    return problems
