"""What must not stand in the built site, and what must: leaks, places, provenance, notebooks that run."""

from __future__ import annotations

import ast
import html
import io
import json
import os
import platform
import re
import sys
import tokenize
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import nbclient
import nbformat
import pygments
import pytest
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from gpucourse import recorder
from tests.conftest import ROOT
from tests.site_text import as_read, texts

sys.path.insert(0, str(ROOT / "book" / "_ext"))
import clean_notebooks

# All of these look at the built book.
pytestmark = pytest.mark.slow

SECRET_FILES = sorted(
    path
    for folder in ("src/gpucourse/checkpoints", "tests/answers")
    for path in (ROOT / folder).glob("*.py")
    if path.name != "__init__.py"
)
#: How much code in a row is no coincidence: lines, and characters in them.
ROW, LENGTH = 3, 80


# --- no assert source, no answer ---------------------------------------------------------------------------


def code_lines(source: str) -> list[str]:
    """Return a source's lines of code with single spaces; comments, docstrings and imports are left out."""
    without = set()
    for node in ast.walk(ast.parse(source)):
        doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if doc or isinstance(node, ast.Import | ast.ImportFrom):
            without.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.strip() == token.string:
            without.add(token.start[0])
    lines = (line for number, line in enumerate(source.splitlines(), 1) if number not in without)
    return [plain for line in lines if (plain := " ".join(line.split()))]


def rows(lines: Iterable[str]) -> Iterator[str]:
    """Yield every run of `ROW` lines that is long enough to be no coincidence."""
    listed = list(lines)
    for start in range(len(listed) - ROW + 1):
        row = "\n".join(listed[start : start + ROW])
        if len(row) >= LENGTH:
            yield row


def secrets() -> dict[str, str]:
    """Map each row of the checkpoints' and the answers' code to its file."""
    return {
        row: path.relative_to(ROOT).as_posix()
        for path in SECRET_FILES
        for row in rows(code_lines(path.read_text(encoding="utf-8")))
    }


def leaks(written: Iterable[tuple[str, str]]) -> list[str]:
    """Name each place where secret code, or the name of a file of answers, stands in written text."""
    known, found = secrets(), []
    for name, text in written:
        read = as_read(name, text)
        lines = [" ".join(line.split()) for line in read.splitlines() if line.strip()]
        found += [f"{name}: from {known[row]}: {row!r}" for row in rows(lines) if row in known]
        found += [f"{name}: names {path}" for path in ("tests/answers/", "tests.answers") if path in read]
    return found


def test_no_assert_source_and_no_answer_stands_in_the_site(site: Path) -> None:
    written = list(texts(site))
    assert any(name.startswith("notebooks.zip/") for name, _ in written)
    assert leaks(written) == []


@pytest.mark.parametrize("secret", SECRET_FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
@pytest.mark.parametrize("kind", ["html", "ipynb", "search index", "widget"])
def test_a_planted_secret_is_found(secret: Path, kind: str) -> None:
    source = secret.read_text(encoding="utf-8")
    function = next(
        text
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and (text := ast.get_source_segment(source, node))
        and len(list(rows(code_lines(text)))) > 2
    )
    name, text = {
        "html": ("page.html", f"<p>x</p>{pygments.highlight(function, PythonLexer(), HtmlFormatter())}"),
        "ipynb": ("notebooks.zip/a.ipynb", json.dumps({"cells": [{"source": function}]})),
        "search index": ("searchindex.js", function),
        "widget": (
            "lab.html",
            f'<script type="application/json">{json.dumps({"value": html.escape(function)})}</script>',
        ),
    }[kind]
    assert leaks([(name, text)]), function


# --- nothing of the machine that built it ------------------------------------------------------------------


def machine_words() -> list[str]:
    """Return what names this machine: its folders and its name, where they are long enough to be telling."""
    words = {str(ROOT), sys.prefix, str(Path.home()), platform.node(), "/site-packages/", "/ipykernel_"}
    return sorted(word for word in words if len(word) > 5)


def places(folder: Path) -> list[str]:
    """Name each file below ``folder``, zips' contents included, that names this machine."""
    found = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        contents = {"": path.read_bytes()}
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as files:
                contents |= {name: files.read(name) for name in files.namelist()}
        for inner, content in contents.items():
            found += [
                f"{path.relative_to(folder)} {inner}: {word}"
                for word in machine_words()
                if os.fsencode(word) in content
            ]
    return found


def test_nothing_built_names_the_machine_that_built_it(site: Path) -> None:
    assert places(site) == []


def test_a_place_on_this_machine_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(f"UserWarning in {ROOT}/src/x.py")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as files:
        files.writestr("a.ipynb", f'"{sys.prefix}/lib"')
    found = places(tmp_path)
    assert f"page.html : {ROOT}" in found
    assert f"all.zip a.ipynb: {sys.prefix}" in found


# --- nothing from elsewhere --------------------------------------------------------------------------------

LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed|object)\b[^>]*\b(?:src|data)\s*=\s*["']?(?:https?:)?//"""
    r"""|<link\b(?![^>]*rel="?(?:canonical|author|license))[^>]*\bhref\s*=\s*["']?(?:https?:)?//"""
    r"""|url\(\s*["']?(?:https?:)?//|@import\s+["'](?:https?:)?//"""
)


def loads_from_elsewhere(written: Iterable[tuple[str, str]]) -> list[str]:
    """Name each place in pages and styles that would load something from another site."""
    return [
        f"{name}: {match[0]}"
        for name, text in written
        if name.endswith((".html", ".css"))
        for match in LOADED.finditer(text)
    ]


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    assert loads_from_elsewhere(texts(site)) == []


@pytest.mark.parametrize(
    "text",
    [
        '<script async src="https://unpkg.com/x.js"></script>',
        "<link rel='stylesheet' href='//fonts.example/css'>",
        "@font-face{src:url(https://fonts.example/a.woff2)}",
        '<img alt="" src=http://example.org/a.png>',
    ],
)
def test_something_loaded_from_elsewhere_is_found(text: str) -> None:
    assert loads_from_elsewhere([("a.html", text)])


def test_a_link_that_the_reader_follows_is_not_loading() -> None:
    assert not loads_from_elsewhere([("a.html", '<a href="https://pytorch.org/">PyTorch</a>')])


# --- every measured number says where and how --------------------------------------------------------------

SAID = r"(?:recorded on|measured here on) [^,<]+, |not yet measured: "


def unsaid(page: str) -> list[str]:
    """Return each recorded output and each measured number of a page that does not say where it comes from."""
    outputs = re.findall(r'<div class="recording">(?:.(?!</div>))*.', page, re.DOTALL)
    numbers = re.findall(r'<a class="[^"]*"[^>]*?>(?=<span class="rec)', page)
    found = [output[:200] for output in outputs if not re.search(SAID, html.unescape(output))]
    return found + [
        link for link in numbers if not re.search(rf'title="[^"]*(?:{SAID})', html.unescape(link))
    ]


def test_every_recorded_output_and_number_says_where_it_was_measured(site: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert sum(page.count('<span class="rec') for page in pages.values()) > 10
    assert {path.name: found for path, page in pages.items() if (found := unsaid(page))} == {}


def test_a_number_without_its_origin_is_found() -> None:
    link = '<a class="reference internal" href="m.html#rec-x" title="{}"><span class="rec">1 µs</span></a>'
    assert unsaid(link.format(""))
    assert not unsaid(link.format("x: recorded on NVIDIA H200, 2026-12-01, torch 2.11"))
    assert unsaid('<div class="recording"><p class="provenance">somewhere</p></div>')


def test_the_measurements_page_has_every_recording_with_its_conditions_and_file(site: Path) -> None:
    page = (site / "book" / "reference" / "measurements.html").read_text(encoding="utf-8")
    recordings = sorted((ROOT / "src" / "gpucourse" / "recordings" / "nvidia-h200").glob("*.json"))
    assert recordings
    entries = dict(re.findall(r'<section id="rec-(\w+)">(.*?)</section>', page, re.DOTALL))
    assert sorted(entries) == [path.stem for path in recordings]
    for path in recordings:
        facts = json.loads(path.read_text(encoding="utf-8"))["provenance"]
        text = as_read("a.html", entries[path.stem])
        for key in ("gpu", "date", "torch", "cuda", "driver", "command"):
            assert facts[key] in text, (path.stem, key)
        download = re.search(r'download="" href="([^"]+)"', entries[path.stem])
        assert download, path.stem
        file = (site / "book" / "reference" / download[1]).resolve()
        assert file.read_bytes() == path.read_bytes()
    marked = {name for name, entry in entries.items() if "without comparing the fingerprints" in entry}
    assert marked == {name for page in recorder.find_pages(ROOT) for name in page.unchecked}


# --- the notebooks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", clean_notebooks.notebook_pages(ROOT))
def test_a_downloaded_notebook_runs_from_top_to_bottom(site: Path, tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(site / "notebooks.zip") as files:
        text = files.read(f"gpucourse-notebooks/{name}.ipynb").decode()
    assert text == (site / "_sources" / f"{name}.ipynb").read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=os.environ | {"JUPYTER_PREFER_ENV_PATH": "1"})
    assert any(cell.get("outputs") for cell in notebook.cells)


def test_each_executed_page_offers_its_notebook(site: Path) -> None:
    for name in clean_notebooks.notebook_pages(ROOT):
        page = (site / f"{name}.html").read_text(encoding="utf-8")
        assert f"_sources/{name}.ipynb" in page, name


def test_the_setup_page_links_the_archive_of_all_notebooks(site: Path) -> None:
    assert 'href="../notebooks.zip"' in (site / "book" / "setup.html").read_text(encoding="utf-8")
