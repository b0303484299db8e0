"""The role ``rec`` for measured numbers in prose, and the directive ``recordings`` that lists all recordings.

Every number links to its recording's entry, with the GPU and the date in the link's title. A number whose
recording or key does not exist is a warning, and warnings end the build.
"""

from __future__ import annotations

import dataclasses
import html
import os
from pathlib import Path
from typing import Any

from docutils import nodes
from recorded_values import RecordedValueError, read
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole
from sphinx.util.nodes import make_refnode

from gpucourse import recorder, recording

LOGGER = logging.getLogger(__name__)
#: Shown with each recording, in this order; what a recording lacks is left out.
PROVENANCE = (
    ("Device", "gpu"),
    ("Date", "date"),
    ("torch", "torch"),
    ("CUDA", "cuda"),
    ("Driver", "driver"),
    ("Python", "python"),
    ("Made by", "command"),
)

UNCHECKED = (
    "An exception: its chapter reads this file without comparing the fingerprints, so that the code has not changed "
    "since is not checked. Measured anew, it will be."
)


def recording_file(name: str) -> Path:
    """Return the file that `recording.load` reads."""
    device = os.environ.get(recording.DEVICE_VARIABLE) or recording.BOOK_DEVICE
    return recording.recordings_folder() / device / f"{name}.json"


def anchor(name: str) -> str:
    """Return the identifier of a recording's entry on the measurements page."""
    return f"rec-{name}"


def makers(env: BuildEnvironment) -> dict[str, recorder.Page]:
    """Map each recorded function to the chapter or benchmark that defines it, its path from the book's root on."""
    root = Path(env.srcdir)
    return {
        name: dataclasses.replace(page, path=page.path.relative_to(root))
        for page in recorder.find_pages(root)
        for name in page.recorded
    }


class RecRole(SphinxRole):
    """A measured number in prose."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Read the number and refer to the entry of (the first of) its recordings."""
        try:
            written, used = read(self.text)
        except RecordedValueError as error:
            LOGGER.warning("rec %r: %s", self.text, error, location=self.get_location())
            return [nodes.problematic(self.rawtext, self.rawtext)], []
        for name in used:
            self.env.note_dependency(str(recording_file(name)))
        first = next(iter(used))
        reference = addnodes.pending_xref(
            self.rawtext,
            nodes.inline(self.rawtext, written, classes=["rec"]),
            refdomain="",
            reftype="rec",
            reftarget=first,
            refexplicit=True,
            refwarn=True,
            title="; ".join(f"{name}: {found.line()}" for name, found in used.items()),
        )
        reference.source, reference.line = self.get_source_info()
        return [reference], []


def resolve_rec(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """Point a number to its entry; where no page lists recordings it stays text, and Sphinx warns."""
    page = getattr(env, "course_recordings_page", None)
    if node.get("reftype") != "rec" or page is None:
        return None
    return make_refnode(
        app.builder, node["refdoc"], page, anchor(node["reftarget"]), content, title=node["title"]
    )


def _row(*cells: nodes.Node | str) -> nodes.row:
    row = nodes.row()
    for cell in cells:
        content = nodes.Text(cell) if isinstance(cell, str) else cell
        row += nodes.entry("", nodes.paragraph("", "", content))
    return row


def _table(header: tuple[str, str], rows: list[nodes.row]) -> nodes.table:
    group = nodes.tgroup(
        "", nodes.colspec(colwidth=40), nodes.colspec(colwidth=60), nodes.thead("", _row(*header)), cols=2
    )
    group += nodes.tbody("", *rows)
    return nodes.table("", group, classes=["recording-values"])


def _fold(summary: str, *content: nodes.Node) -> list[nodes.Node]:
    """Fold content away: one recording may hold hundreds of values."""
    opened = f'<details class="recording-fold"><summary>{html.escape(summary)}</summary>'
    return [nodes.raw("", opened, format="html"), *content, nodes.raw("", "</details>", format="html")]


class RecordingsDirective(SphinxDirective):
    """Every recording of the book's device: where and how it was measured, its values, its file."""

    def run(self) -> list[nodes.Node]:
        """Return one section a recording, in alphabetical order."""
        self.env.course_recordings_page = self.env.docname  # type: ignore[attr-defined]
        try:
            made_by = makers(self.env)
        except recorder.RecordPageError as error:
            raise self.error(str(error)) from error
        sections = []
        for name in recording.names():
            self.env.note_dependency(str(recording_file(name)))
            try:
                found = recording.load(name)
            except recording.RecordingError as error:
                LOGGER.warning("%s", error, location=self.get_location())
                continue
            if name not in made_by:
                LOGGER.warning(
                    "recording %r belongs to no page: neither a chapter nor a benchmark has an @recorded "
                    "function of that name. Delete %s, or bring the function back.",
                    name,
                    recording_file(name).name,
                    location=self.get_location(),
                )
                continue
            sections.append(self._section(found, made_by[name]))
        if not sections:
            return [nodes.paragraph("", "There is no recording yet.")]
        return sections

    def _section(self, found: recording.Recording, made_by: recorder.Page) -> nodes.section:
        section = nodes.section(
            "", nodes.title("", "", nodes.literal("", found.name)), ids=[anchor(found.name)]
        )
        line = found.line()
        section += nodes.paragraph("", f"{line[0].upper()}{line[1:]}.", classes=["provenance"])
        page = made_by.path.with_suffix("").as_posix()
        if page in self.env.found_docs:
            source: nodes.Node = addnodes.pending_xref(
                "", nodes.inline("", page), refdomain="std", reftype="doc",
                reftarget=f"/{page}", refexplicit=False, refwarn=True, refdoc=self.env.docname,
            )  # fmt: skip
            links = nodes.paragraph("", "Made by a cell of ", source)
        else:
            links = nodes.paragraph("", "Made by ", nodes.literal("", made_by.path.as_posix()))
        file = recording_file(found.name)
        if file.is_relative_to(self.env.srcdir):
            inside = file.relative_to(self.env.srcdir).as_posix()
            links += nodes.Text("; as recorded: ")
            links += addnodes.download_reference(
                "", "", nodes.literal("", file.name), reftarget=f"/{inside}", refdoc=self.env.docname,
                refdomain="", reftype="download", refexplicit=False, refwarn=False,
            )  # fmt: skip
        links += nodes.Text(".")
        section += links
        if found.name in made_by.unchecked:
            section += nodes.paragraph("", UNCHECKED)
        facts = found.provenance
        conditions = [(label, str(facts[key])) for label, key in PROVENANCE if facts.get(key)]
        conditions += [
            (f"Method of {instrument}", f"version {version}")
            for instrument, version in facts.get("methods", {}).items()
        ]
        section += _fold(
            "How it was measured", _table(("Condition", "Value"), [_row(*pair) for pair in conditions])
        )
        values = [_row(nodes.literal("", path), text) for path, text in recording.summary(found.data)]
        if values:
            title = "What it gave" if len(values) == 1 else f"What it gave: {len(values)} values"
            section += _fold(title, _table(("Value", "Reading"), values))
        return section


def forget_page(_app: Sphinx, env: BuildEnvironment, docname: str) -> None:
    """Forget the measurements page when it is read again."""
    if getattr(env, "course_recordings_page", None) == docname:
        del env.course_recordings_page  # type: ignore[attr-defined]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the role and the directive."""
    app.add_role("rec", RecRole())
    app.add_directive("recordings", RecordingsDirective)
    app.connect("missing-reference", resolve_rec)
    app.connect("env-purge-doc", forget_page)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}
