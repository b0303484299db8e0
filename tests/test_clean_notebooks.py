"""Plain notebooks: every form of the book's pages becomes one that any Jupyter shows."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest

from tests.conftest import NOTEBOOK_HEADER, ROOT

sys.path.insert(0, str(ROOT / "book" / "_ext"))
import clean_notebooks
from clean_notebooks import NotebookError, Page, rewrite_blocks, rewrite_inline


@pytest.fixture
def page(tmp_path: Path) -> Page:
    """Return a page of a book that has two notebooks and a plain page."""
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "setup.md").write_text("# Set-up\n")
    (tmp_path / "book" / "dot.svg").write_text("<svg/>")
    return Page(
        root=tmp_path, name="book/02_kernels", notebooks=frozenset({"book/02_kernels", "labs/memory_ledger"})
    )


@pytest.mark.parametrize(
    ("myst", "plain"),
    [
        ("a {term}`kernel` runs", "a kernel runs"),
        ("many {term}`kernels <kernel>` run", "many kernels run"),
        ("{math}`n^2`", "$n^2$"),
        ("{doc}`the set-up <setup>`", "the set-up"),
        ("{doc}`setup`", "Set-up"),
        ("{ref}`the figure <fig-one>`", "the figure"),
        ("[the lab](../labs/memory_ledger.md)", "[the lab](../labs/memory_ledger.ipynb)"),
        ("[the lab](../labs/memory_ledger.md#check)", "[the lab](../labs/memory_ledger.ipynb)"),
        ("[a {term}`grid`\nthere](setup.md)", "a grid\nthere"),
        ("[below](#what-to-notice)", "below"),
        ('[PyTorch](https://pytorch.org/docs "docs")', '[PyTorch](https://pytorch.org/docs "docs")'),
        ("[`x.item()`](https://pytorch.org)", "[`x.item()`](https://pytorch.org)"),
        ("code `{term}`x``", "code `{term}`x``"),
        ("`[a](b.md)` stays", "`[a](b.md)` stays"),
        ("``a `{rec}` role``", "``a `{rec}` role``"),
    ],
)
def test_running_text_is_rewritten(page: Page, myst: str, plain: str) -> None:
    assert rewrite_inline(myst, page) == plain


@pytest.mark.parametrize(
    ("myst", "plain"),
    [
        (
            ":::{admonition} The {term}`claim`\nOne.\n\nTwo.\n:::",
            "> **The claim**\n>\n> One.\n>\n> Two.",
        ),
        ("```{note}\nMind `this`.\n```", "> **Note**\n>\n> Mind `this`."),
        (
            "::::{dropdown} Need a hint?\n:color: light\n\nCount.\n\n:::{tip}\nTwice.\n:::\n::::",
            "<details><summary><b>Need a hint?</b></summary>\n\n\nCount.\n\n> **Tip**\n>\n> Twice.\n\n</details>",
        ),
        ("```{math}\n:label: eq-one\nx = y\n```", "$$\nx = y\n$$"),
        ("$$\nx\n$$ (eq-one)", "$$\nx\n$$"),
        ("(label-one)=\n## Heading", "## Heading"),
        ("% a remark\nText", "Text"),
        ("```python\nx = '{term}`y`'\n```", "```python\nx = '{term}`y`'\n```"),
        (
            ":::{list-table} Peaks\n:header-rows: 1\n\n* - GPU\n  - a | b\n* - T4\n  - 65\n    TFLOP/s\n:::",
            "**Peaks**\n\n| GPU | a \\| b |\n|---|---|\n| T4 | 65 TFLOP/s |",
        ),
        ("```{table} Two\n| a |\n|---|\n| 1 |\n```", "**Two**\n\n| a |\n|---|\n| 1 |"),
    ],
)
def test_blocks_are_rewritten(page: Page, myst: str, plain: str) -> None:
    assert rewrite_blocks(myst.splitlines(), page) == plain


@pytest.mark.parametrize(
    ("myst", "said"),
    [
        ("```{mermaid}\ngraph\n```", "directive {mermaid} has no rewriting"),
        ("{eval}`x`", "role {eval}`x` has no rewriting"),
        ("{ref}`fig-one`", "role {ref}`fig-one` has no rewriting"),
        (":::note\nx\n:::", "block ':::note' has no rewriting"),
        (":::{note}\nx", "is never closed"),
        ("[data](table.csv)", "link to table.csv has no rewriting"),
        ("![a picture](missing.png)", "picture missing.png is not there"),
        ("{doc}`nowhere`", "is no page with a heading"),
        (":::{list-table} T\n* - a\n  - b\n* - c\n:::", "rows of [1, 2] cells"),
    ],
)
def test_what_has_no_rewriting_is_an_error_that_names_the_page(page: Page, myst: str, said: str) -> None:
    with pytest.raises(NotebookError) as caught:
        rewrite_blocks(myst.splitlines(), page)
    assert said in str(caught.value)
    assert str(caught.value).startswith("book/02_kernels.md: ")


def test_a_picture_travels_inside_its_cell(page: Page) -> None:
    assert rewrite_blocks("```{figure} dot.svg\n:alt: a dot\n\nA dot.\n```".splitlines(), page) == (
        "![a dot](attachment:dot.svg)\n\n\nA dot."
    ).replace("\n\n\n", "\n\n")
    assert page.attachments == {"dot.svg": {"image/svg+xml": "PHN2Zy8+"}}


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """Return the folder of a book with one executed page."""
    (tmp_path / "book").mkdir()
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/index\nchapters:\n- file: book/page\n")
    (tmp_path / "book" / "index.md").write_text("# Index\n")
    (tmp_path / "book" / "page.md").write_text(
        NOTEBOOK_HEADER
        + "# Page\n\n```{code-cell}\n1 + 1\n```\n\n```{code-cell}\n:tags: [remove-input]\n2\n```\n"
    )
    return tmp_path


def test_only_executed_pages_become_notebooks(book: Path) -> None:
    assert clean_notebooks.notebook_pages(book) == ["book/page"]


def test_a_notebook_begins_with_the_package_and_keeps_hidden_cells_as_code(book: Path) -> None:
    notebook = clean_notebooks.convert(book, "book/page", ["book/page"])
    nbformat.validate(notebook)
    kinds = [(cell.cell_type, cell.source) for cell in notebook.cells]
    assert kinds[0] == ("code", clean_notebooks.install_cell())
    assert kinds[1:] == [("markdown", "# Page"), ("code", "1 + 1"), ("code", "2")]
    assert notebook.cells[3].metadata == {"tags": ["remove-input"], "jupyter": {"source_hidden": True}}
    assert all(cell.outputs == [] for cell in notebook.cells if cell.cell_type == "code")
    assert [cell.id for cell in notebook.cells] == ["page-000", "page-001", "page-002", "page-003"]


def test_the_same_page_gives_the_same_bytes(book: Path) -> None:
    first = clean_notebooks.convert_all(book, pytest.fail)
    assert clean_notebooks.convert_all(book, pytest.fail) == first
    assert clean_notebooks.archive(first) == clean_notebooks.archive(first)


def test_the_archive_holds_every_notebook(book: Path) -> None:
    notebooks = clean_notebooks.convert_all(book, pytest.fail)
    with zipfile.ZipFile(io.BytesIO(clean_notebooks.archive(notebooks))) as files:
        assert files.namelist() == ["gpucourse-notebooks/book/page.ipynb"]
        assert json.loads(files.read(files.namelist()[0]))["nbformat"] == 4


def test_the_install_cell_says_what_to_do_where_no_address_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(clean_notebooks.INSTALL_VARIABLE, raising=False)
    # As on a machine without the package.
    code = clean_notebooks.install_cell().replace("import gpucourse", "import gpucourse_that_is_not_there")
    with pytest.raises(ModuleNotFoundError) as missing:
        exec(code, {})
    # A notebook on its own, in a hosted runtime, has no repository's folder: the second way is for it.
    said = str(missing.value)
    assert "run `python -m pip install .` in the repository's folder" in said
    assert "`python -m pip wheel . --no-deps`" in said
    assert "`%pip install gpucourse-*.whl`" in said


def test_the_install_cell_installs_from_the_address_that_publishing_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(clean_notebooks.INSTALL_VARIABLE, "git+https://example.org/book@abc")
    assert "    %pip install --quiet git+https://example.org/book@abc" in clean_notebooks.install_cell()


def test_every_page_of_the_real_book_has_a_plain_notebook() -> None:
    faults: list[str] = []
    notebooks = clean_notebooks.convert_all(ROOT, faults.append)
    assert faults == []
    assert set(notebooks) == set(clean_notebooks.notebook_pages(ROOT))
    assert {"book/02_kernels", "labs/memory_ledger"} <= set(notebooks)
    for name, text in notebooks.items():
        assert "{code-cell}" not in text, name
        assert "```{" not in text and ":::" not in text, name  # noqa: PT018
