"""Mend what the theme and its companions do to every page.

Jupyter Book always loads sphinx-thebe, which runs code on a remote server. This book does not use it, and
its scripts are at fault twice over: they declare the same constant twice, an error on every page, and they
name an address outside the site.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

_MARKS = ("THEBE_JS_URL", "sphinx-thebe", "text/x-thebe-config", "kernelName =")


def _is_thebe(text: str) -> bool:
    return any(mark in text for mark in _MARKS)


def drop_thebe_nodes(_app: Sphinx, doctree: nodes.document, _docname: str) -> None:
    """Remove the configuration that sphinx-thebe appends to a page's own content."""
    for node in list(doctree.findall(nodes.raw)):
        if _is_thebe(node.astext()):
            node.parent.remove(node)


def drop_thebe_files(
    _app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: nodes.document | None
) -> None:
    """Remove sphinx-thebe's scripts and style from a page's head and foot."""
    for key in ("script_files", "css_files"):
        context[key] = [
            item
            for item in context.get(key, [])
            if not _is_thebe(f"{getattr(item, 'filename', item)} {getattr(item, 'attributes', '')}")
        ]


def mend_body(
    _app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: nodes.document | None
) -> None:
    """Give every reader what the page's own markup withholds from some.

    A folded cell is named "Toggle hidden content" to a screen reader while it shows other words. A displayed
    equation wider than a phone scrolls inside itself, so the keyboard must be able to reach it.
    """
    body = context.get("body", "")
    body = body.replace('<summary aria-label="Toggle hidden content">', "<summary>")
    context["body"] = body.replace(
        '<div class="math notranslate', '<div tabindex="0" class="math notranslate'
    )


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to Sphinx, late: after sphinx-thebe has added its part."""
    app.connect("doctree-resolved", drop_thebe_nodes, priority=900)
    app.connect("html-page-context", drop_thebe_files, priority=900)
    app.connect("html-page-context", mend_body, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
