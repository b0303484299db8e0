"""What is written in a built site, by file: what the guards against leaks look through."""

from __future__ import annotations

import html
import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

#: Files of a site that are text that we or the build wrote. Third-party scripts and fonts are none.
TEXT_SUFFIXES = (".html", ".js", ".css", ".md", ".ipynb", ".json", ".txt", ".xml", ".svg", ".toml", ".py")


def toc_pages(root: Path) -> list[str]:
    """Return every page that ``_toc.yml`` names, in order, without suffix."""

    def walk(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            yield from (node[key] for key in ("root", "file") if key in node)
            for value in node.values():
                yield from walk(value)
        elif isinstance(node, list):
            for item in node:
                yield from walk(item)

    return list(walk(yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))))


def as_read(name: str, text: str) -> str:
    """Return text as a person reads it: markup and escapes gone, so that coloured code is code again."""
    if name.endswith(".html"):
        text = html.unescape(re.sub(r"<[^>]*>", "", text))
        # Widgets carry HTML inside JSON inside HTML.
        text = html.unescape(text.replace(r"\u003c", "<").replace(r"\u003e", ">").replace(r"\n", "\n"))
        return text.replace(r"\"", '"')
    if name.endswith((".ipynb", ".json")):
        parts: list[str] = []

        def collect(node: Any) -> None:
            if isinstance(node, str):
                parts.append(node)
            elif isinstance(node, dict | list):
                for item in node.items() if isinstance(node, dict) else node:
                    collect(list(item) if isinstance(item, tuple) else item)

        collect(json.loads(text))
        return "\n".join(parts)
    return text


def texts(site: Path) -> Iterator[tuple[str, str]]:
    """Yield every text in a site with its name; files inside zips too. Binary files are skipped."""
    for path in sorted(site.rglob("*")):
        name = path.relative_to(site).as_posix()
        if path.is_file():
            yield from _texts_of(name, path.read_bytes())


def _texts_of(name: str, content: bytes) -> Iterator[tuple[str, str]]:
    if name.endswith(".zip"):
        with zipfile.ZipFile(io.BytesIO(content)) as files:
            for inner in files.namelist():
                yield from _texts_of(f"{name}/{inner}", files.read(inner))
    elif name.endswith(TEXT_SUFFIXES):
        yield name, content.decode("utf-8")
