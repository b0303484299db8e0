"""Offer each executed page as a plain notebook, and all of them as one zip, ``notebooks.zip``.

The notebook stands in the theme's download menu. The role ``notebooks`` links to the zip from anywhere:
``{notebooks}`all notebooks in one archive` ``. A browser shows a
notebook opened from ``file://`` as text, but downloads a zip.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import clean_notebooks
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole
from sphinx.util.osutil import relative_uri

LOGGER = logging.getLogger(__name__)


class NotebooksRole(SphinxRole):
    """A link to the zip of all notebooks."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return a link whose address is known when the page is written."""
        node = nodes.reference(self.rawtext, self.text, refuri="", course_notebooks=True, internal=True)
        return [node], []


def address_archive(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Give the links to the zip their address, relative to the page."""
    for node in doctree.findall(nodes.reference):
        if node.get("course_notebooks"):
            node["refuri"] = relative_uri(app.builder.get_target_uri(docname), clean_notebooks.ARCHIVE)


def convert_pages(app: Sphinx, _env: Any) -> None:
    """Rewrite every page once all are read; a page that cannot be rewritten is a warning, so an error."""
    app.course_notebooks = clean_notebooks.convert_all(  # type: ignore[attr-defined]
        Path(app.srcdir), lambda message: LOGGER.warning("%s", message)
    )


def add_to_menu(
    app: Sphinx, page: str, _template: str, context: dict[str, Any], _doctree: nodes.document | None
) -> None:
    """Name the notebook to the theme, before it makes its menu."""
    if page in app.course_notebooks:  # type: ignore[attr-defined]
        context["ipynb_source"] = f"{page}.ipynb"


def write(app: Sphinx, exception: Exception | None) -> None:
    """Write the notebooks where the menu looks for them, and the zip."""
    if exception is not None or app.builder.format != "html":
        return
    notebooks: dict[str, str] = app.course_notebooks  # type: ignore[attr-defined]
    for name, text in notebooks.items():
        path = Path(app.outdir) / "_sources" / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (Path(app.outdir) / clean_notebooks.ARCHIVE).write_bytes(clean_notebooks.archive(notebooks))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the role and connect the steps."""
    app.add_role("notebooks", NotebooksRole())
    app.connect("env-updated", convert_pages)
    app.connect("doctree-resolved", address_archive)
    app.connect("html-page-context", add_to_menu, priority=100)
    app.connect("build-finished", write)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
