"""Turn a page of the book into a plain Jupyter notebook, which needs nothing of the book's own machinery.

A page is MyST Markdown. Any Jupyter shows only CommonMark, mathematics and HTML, so directives and roles are
rewritten into those: a fold becomes ``<details>``, an admonition a quoted block, a list-table a table with
pipes, a measured number its text with its origin at the end of the notebook. What has no rewriting is an
error: a reader would see the raw directive.

This module knows nothing of Sphinx: the build and ``make lab`` both use it.
"""

from __future__ import annotations

import base64
import html
import io
import json
import mimetypes
import os
import posixpath
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import yaml
from recorded_values import RecordedValueError, read

INSTALL_VARIABLE = "GPUCOURSE_INSTALL"
ARCHIVE = "notebooks.zip"

FENCE = re.compile(r"^(?P<indent> {0,3})(?P<fence>`{3,}|~{3,}|:{3,})(?P<info>.*)$")
DIRECTIVE = re.compile(r"^\{(?P<name>[^}\s]+)\}\s*(?P<argument>.*)$")
OPTION = re.compile(r"^:(?P<key>[\w-]+):\s*(?P<value>.*)$")
LABEL = re.compile(r"^\([^()\s]+\)=\s*$")
INLINE = re.compile(
    r"\{(?P<role>[\w:+-]+)\}(?P<ticks>`+)(?P<content>.+?)(?P=ticks)(?!`)"
    r"|(?P<code>(?P<codeticks>`+)(?!`).*?(?<!`)(?P=codeticks)(?!`))"
    r"|(?P<image>!\[(?P<alt>[^\]]*)\]\((?P<source>[^)\s]+)\))"
    r"|(?P<link>(?<!\!)\[(?P<text>(?:[^\[\]`]|`[^`]*`)+)\]\((?P<target>[^)\s]+)(?P<title>\s+\"[^\"]*\")?\))",
    re.DOTALL,
)
ADMONITIONS = ("attention", "caution", "danger", "error", "hint", "important", "note", "tip", "warning")


class NotebookError(Exception):
    """A page cannot be turned into a plain notebook; the message names the page and what has no rewriting."""


@dataclass(kw_only=True)
class Page:
    """One page while it is being rewritten."""

    root: Path
    name: str  # "book/02_kernels", relative to the root and without its suffix
    notebooks: frozenset[str]  # the pages that are offered as notebooks
    origins: dict[str, str] = field(default_factory=dict)  # recording -> its line of provenance
    attachments: dict[str, dict[str, str]] = field(default_factory=dict)  # of the cell at hand

    @property
    def file(self) -> Path:
        """The page's source."""
        return self.root / f"{self.name}.md"

    def fail(self, what: str) -> NotebookError:
        """Return the error that says what has no rewriting."""
        return NotebookError(
            f"{self.name}.md: {what} has no rewriting for a plain notebook. Use another form, or add a "
            "rewriting to book/_ext/clean_notebooks.py"
        )

    def resolve(self, target: str) -> str:
        """Return the page that a link's path means, relative to the root."""
        folder = "" if target.startswith("/") else posixpath.dirname(self.name)
        return posixpath.normpath(posixpath.join(folder, target.lstrip("/")))

    def attach(self, source: str) -> str:
        """Put a picture into the cell at hand and return the address by which the cell shows it."""
        if source.startswith(("http:", "https:", "data:", "attachment:")):
            return source
        path = self.root / self.resolve(source)
        if not path.is_file():
            raise NotebookError(f"{self.name}.md: picture {source} is not there")
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        self.attachments[path.name] = {kind: base64.b64encode(path.read_bytes()).decode()}
        return f"attachment:{path.name}"


# --- within a line -----------------------------------------------------------------------------------------


def _title(page: Page, name: str) -> str:
    """Return the heading of another page."""
    file = page.root / f"{name}.md"
    heading = (
        re.search(r"^# (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE) if file.is_file() else None
    )
    if heading is None:
        raise NotebookError(f"{page.name}.md: {{doc}}`{name}` is no page with a heading")
    return heading[1].strip()


def _to_page(page: Page, text: str, target: str) -> str:
    """Link to another page's notebook; where it has none, leave the text."""
    path, _, _ = target.partition("#")
    name = page.resolve(path.removesuffix(".md"))
    if name not in page.notebooks:
        return text
    return f"[{text}]({posixpath.relpath(name, posixpath.dirname(page.name) or '.')}.ipynb)"


def _role(page: Page, name: str, content: str) -> str:
    text, _, target = content.rpartition("<") if content.endswith(">") else (content, "", "")
    text, target = text.strip(), target.removesuffix(">").strip()
    match name:
        case "rec":
            try:
                written, used = read(content)
            except RecordedValueError as error:
                raise NotebookError(f"{page.name}.md: {error}") from error
            page.origins.update({key: found.line() for key, found in used.items()})
            return written
        case "math":
            return f"${content}$"
        case "term" | "abbr" | "notebooks":
            return text
        case "kbd":
            return f"<kbd>{html.escape(content)}</kbd>"
        case "sub" | "sup":
            return f"<{name}>{html.escape(content)}</{name}>"
        case "doc":
            return _to_page(page, text if target else _title(page, page.resolve(content)), target or content)
        case "ref" if target:
            return text
    raise page.fail(f"role {{{name}}}`{content}`")


def rewrite_inline(text: str, page: Page) -> str:
    """Rewrite roles, links and pictures in running text; code stays as it is."""

    def one(match: re.Match[str]) -> str:
        if match["role"]:
            return _role(page, match["role"], match["content"].replace("\n", " "))
        if match["image"]:
            return f"![{match['alt']}]({page.attach(match['source'])})"
        if match["link"]:
            label = rewrite_inline(match["text"], page)
            target: str = match["target"]
            if re.match(r"[a-z]+:", target):
                return f"[{label}]({target}{match['title'] or ''})"
            if target.startswith("#"):
                return label
            if target.partition("#")[0].endswith(".md"):
                return _to_page(page, label, target)
            raise page.fail(f"link to {target}")
        return match[0]

    return INLINE.sub(one, text)


# --- blocks ------------------------------------------------------------------------------------------------


def _options(lines: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split a directive's options from its content."""
    if lines and lines[0].strip() == "---":
        end = next((i for i, line in enumerate(lines[1:], 1) if line.strip() == "---"), len(lines))
        loaded = yaml.safe_load("\n".join(lines[1:end])) or {}
        return {key: str(value) for key, value in loaded.items()}, lines[end + 1 :]
    options: dict[str, str] = {}
    while lines and (match := OPTION.match(lines[0].strip())):
        options[match["key"]] = match["value"]
        lines = lines[1:]
    return options, lines


def _quote(title: str, body: str) -> str:
    text = f"**{title}**\n\n{body}" if body else f"**{title}**"
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def _list_table(page: Page, title: str, options: dict[str, str], lines: list[str]) -> str:
    """Rewrite rows written as ``* - cell`` and ``  - cell`` into a table with pipes."""
    rows: list[list[list[str]]] = []
    for line in lines:
        if match := re.match(r"^\s*[*-] +[*-](?: (.*))?$", line):
            rows.append([[match[1] or ""]])
        elif rows and (match := re.match(r"^\s+[*-](?: (.*))?$", line)):
            rows[-1].append([match[1] or ""])
        elif line.strip():
            if not rows:
                raise page.fail(f"list-table line {line!r}")
            rows[-1][-1].append(line.strip())
    cells = [
        [rewrite_inline(" ".join(cell).strip(), page).replace("|", r"\|") for cell in row] for row in rows
    ]
    if not cells or any(len(row) != len(cells[0]) for row in cells):
        raise page.fail(f"list-table {title!r} with rows of {sorted({len(row) for row in cells})} cells")
    if int(options.get("header-rows", "0")) == 0:
        cells.insert(0, ["" for _ in cells[0]])
    written = [f"| {' | '.join(row)} |" for row in cells]
    written.insert(1, f"|{'---|' * len(cells[0])}")
    return "\n".join(([f"**{rewrite_inline(title, page)}**", ""] if title else []) + written)


def _directive(page: Page, name: str, argument: str, lines: list[str]) -> str:
    options, content = _options(lines)
    match name:
        case "dropdown":
            opened = " open" if "open" in options else ""
            body = rewrite_blocks(content, page)
            summary = html.escape(argument or "More", quote=False)
            return f"<details{opened}><summary><b>{summary}</b></summary>\n\n{body}\n\n</details>"
        case "admonition":
            return _quote(rewrite_inline(argument, page), rewrite_blocks(content, page))
        case _ if name in ADMONITIONS:
            # A first line on the directive's own line is content.
            body = [rewrite_inline(argument, page), ""] if argument else []
            return _quote(name.capitalize(), "\n".join([*body, rewrite_blocks(content, page)]).strip())
        case "math":
            return "$$\n" + "\n".join([argument, *content] if argument else content).strip() + "\n$$"
        case "figure" | "image":
            picture = f"![{options.get('alt', '')}]({page.attach(argument)})"
            caption = rewrite_blocks(content, page).strip()
            return f"{picture}\n\n{caption}" if caption else picture
        case "list-table":
            return _list_table(page, argument, options, content)
        case "table":
            title = f"**{rewrite_inline(argument, page)}**\n\n" if argument else ""
            return title + rewrite_blocks(content, page)
        case "code" | "code-block":
            return "\n".join([f"```{argument}", *content, "```"])
    raise page.fail(f"directive {{{name}}}")


def _block(lines: list[str], start: int, fence: re.Match[str], page: Page) -> tuple[list[str], int]:
    """Return the lines inside a fence and the index after its end."""
    mark = fence["fence"]
    closing = re.compile(rf"^ {{0,3}}{re.escape(mark[0])}{{{len(mark)},}}\s*$")
    for index in range(start + 1, len(lines)):
        if closing.match(lines[index]):
            indent = len(fence["indent"])
            return [
                line[indent:] if line[:indent].isspace() else line for line in lines[start + 1 : index]
            ], index + 1
    raise NotebookError(f"{page.name}.md: the block {lines[start]!r} is never closed")


def rewrite_blocks(lines: Iterable[str], page: Page) -> str:
    """Rewrite Markdown line by line; fences may stand within fences."""
    source, done, text = list(lines), [], []  # type: ignore[var-annotated]

    def flush() -> None:
        if text:
            done.append(rewrite_inline("\n".join(text), page))
            text.clear()

    index = 0
    while index < len(source):
        line = source[index]
        if fence := FENCE.match(line):
            inside, after = _block(source, index, fence, page)
            directive = DIRECTIVE.match(fence["info"].strip())
            flush()
            if directive:
                done.append(_directive(page, directive["name"], directive["argument"].strip(), inside))
            elif fence["fence"].startswith(":"):
                raise page.fail(f"block {line!r}")
            else:
                done.append("\n".join(source[index:after]))
            index = after
            continue
        if re.match(r"^\$\$", line):
            # A displayed equation; its label, which only the book can refer to, goes.
            end = index
            if line.strip() == "$$" or "$$" not in line[2:]:
                end = next((i for i in range(index + 1, len(source)) if "$$" in source[i]), index)
            flush()
            equation = "\n".join(source[index : end + 1])
            done.append(re.sub(r"\$\$\s*\([\w:.-]+\)\s*$", "$$", equation))
            index = end + 1
            continue
        if not LABEL.match(line) and not line.startswith("% "):
            text.append(line)
        index += 1
    flush()
    return "\n".join(done)


# --- notebooks ---------------------------------------------------------------------------------------------


def is_notebook(file: Path) -> bool:
    """Tell whether a page has code cells, by its header: the same sign that makes the build execute it."""
    text = file.read_text(encoding="utf-8")
    header = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    return header is not None and "jupytext" in (yaml.safe_load(header[1]) or {})


def pages(root: Path) -> list[str]:
    """Return every page of the table of contents, in order."""

    def walk(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            if "file" in node or "root" in node:
                yield (node.get("file") or node["root"]).removesuffix(".md")
            for value in node.values():
                yield from walk(value)
        elif isinstance(node, list):
            for item in node:
                yield from walk(item)

    return list(walk(yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))))


def notebook_pages(root: Path) -> list[str]:
    """Return the pages that are offered as notebooks."""
    return [name for name in pages(root) if (file := root / f"{name}.md").is_file() and is_notebook(file)]


def install_cell() -> str:
    """Return the code that makes the package importable, or says how.

    The address comes from ``$GPUCOURSE_INSTALL``, which publishing sets to the repository at the very commit.
    """
    address = os.environ.get(INSTALL_VARIABLE, "").strip()
    if address:
        missing = f"    %pip install --quiet {address}"
    else:
        advice = (
            "the package gpucourse is not installed in this kernel. Either run `python -m pip install .` in the "
            "repository's folder, or, in a hosted notebook, upload the wheel that `python -m pip wheel . --no-deps` "
            "makes there, put it beside this notebook and run `%pip install gpucourse-*.whl`. "
            "Then restart the kernel"
        )
        missing = f'    raise ModuleNotFoundError(\n        "{advice}"\n    ) from None'
    return (
        "# This notebook uses the book's package, gpucourse.\n"
        f"try:\n    import gpucourse\nexcept ModuleNotFoundError:\n{missing}"
    )


def _origins_cell(origins: dict[str, str]) -> str:
    rows = "\n".join(f"- `{name}`: {line}" for name, line in sorted(origins.items()))
    return f"**Where the measured numbers in the text come from**\n\n{rows}"


def convert(root: Path, name: str, notebooks: Iterable[str]) -> nbformat.NotebookNode:
    """Return the plain notebook of one page, without outputs.

    Raises
    ------
    NotebookError
        Something in the page has no rewriting.
    """
    page = Page(root=root, name=name, notebooks=frozenset(notebooks))
    source = jupytext.reads(page.file.read_text(encoding="utf-8"), fmt="md:myst")
    cells = []
    for cell in source.cells:
        if cell.cell_type == "markdown":
            page.attachments = {}
            new = nbformat.v4.new_markdown_cell(rewrite_blocks(cell.source.splitlines(), page))
            if page.attachments:
                new["attachments"] = page.attachments
        elif cell.cell_type == "code":
            tags = list(cell.metadata.get("tags", []))
            new = nbformat.v4.new_code_cell(cell.source, metadata={"tags": tags} if tags else {})
            if {"remove-input", "hide-input", "remove-cell", "hide-cell"} & set(tags):
                new.metadata["jupyter"] = {"source_hidden": True}
        else:
            raise page.fail(f"a {cell.cell_type} cell")
        cells.append(new)
    cells.insert(0, nbformat.v4.new_code_cell(install_cell()))
    if page.origins:
        cells.append(nbformat.v4.new_markdown_cell(_origins_cell(page.origins)))
    for number, cell in enumerate(cells):
        cell["id"] = f"{posixpath.basename(name)[:48]}-{number:03d}"
    notebook = nbformat.v4.new_notebook(
        cells=cells,
        metadata={
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
    )
    nbformat.validate(notebook)
    return notebook


def text_of(notebook: nbformat.NotebookNode) -> str:
    """Write a notebook, the same bytes for the same content."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def convert_all(root: Path, report: Callable[[str], None]) -> dict[str, str]:
    """Return the text of every page's notebook by page; ``report`` is called with each error's message."""
    names = notebook_pages(root)
    written = {}
    for name in names:
        try:
            written[name] = text_of(convert(root, name, names))
        except NotebookError as error:
            report(str(error))
    return written


def archive(notebooks: dict[str, str]) -> bytes:
    """Return one zip of all notebooks in the book's own folders, so that their links to each other work."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as files:
        for name, text in sorted(notebooks.items()):
            # A fixed date, for the same notebooks are the same archive.
            files.writestr(zipfile.ZipInfo(f"gpucourse-notebooks/{name}.ipynb", (1980, 1, 1, 0, 0, 0)), text)
    return buffer.getvalue()
