"""What the chapters' sources promise to a reader who looks for "chapter 3": numbers in titles and in mentions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

CHAPTERS = sorted((ROOT / "book").glob("[0-9][0-9]_*.md"))
PROSE = [
    *CHAPTERS,
    ROOT / "book" / "index.md",
    ROOT / "book" / "setup.md",
    *sorted((ROOT / "labs").glob("*.md")),
]
PADDED = re.compile(r"\bchapters? 0\d", re.IGNORECASE)


def number(chapter: Path) -> int:
    """Return the number that a chapter's file name carries."""
    return int(chapter.name[:2])


def title(page: Path) -> str:
    """Return a page's first heading."""
    found = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{page.name} has no title"
    return found[1]


def names(page: str) -> list[tuple[str, str]]:
    """Return each link "chapter N" with the chapter's file that it leads to."""
    return re.findall(r"\[[Cc]hapter (\d+)\]\((?:\.\./book/)?(\d\d_\w+\.md)\)", page)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda page: page.stem)
def test_a_chapters_title_begins_with_its_number(chapter: Path) -> None:
    assert re.match(rf"{number(chapter)}\. [A-Z]", title(chapter)), title(chapter)


def test_the_list_on_the_first_page_gives_each_chapter_its_whole_title() -> None:
    index = (ROOT / "book" / "index.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^- \*\*\[([^\]]+)\]\((\d\d_\w+\.md)\)", index, re.MULTILINE))
    assert listed == {title(chapter): chapter.name for chapter in CHAPTERS}


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.stem)
def test_a_chapter_is_cited_by_the_number_in_its_title_and_linked_to_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert PADDED.findall(text) == []
    assert [pair for pair in names(text) if int(pair[0]) != int(pair[1][:2])] == []


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.stem)
def test_the_first_mention_of_a_chapter_in_a_section_is_a_link(page: Path) -> None:
    bare = []
    for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        linked: set[str] = set()
        for found in re.finditer(r"(\[)?\b[Cc]hapter (\d+)\b", section):
            if found[1]:
                linked.add(found[2])
            elif found[2] not in linked:
                bare.append(section[max(found.start() - 40, 0) : found.end()])
    assert bare == []


def unnamed(readme: str, folder: Path) -> list[str]:
    """Return the package's modules and folders that a read-me's map does not name."""
    shown = re.search(r"^src/gpucourse/(.*?)^\w+/", readme, re.MULTILINE | re.DOTALL)
    assert shown, "the read-me has no map of the package"
    names = set(re.findall(r"\w+", shown[1]))
    parts = [
        path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    ]
    return sorted(part for part in parts if part != "__init__" and part not in names)


def test_the_read_mes_map_names_every_module_of_the_package(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert unnamed(readme, ROOT / "src" / "gpucourse") == []
    (tmp_path / "unheard_of.py").touch()
    assert unnamed(readme, tmp_path) == ["unheard_of"]


def test_the_read_me_names_every_command() -> None:
    listed = re.search(
        r"^  cli  commands/ +gpucourse (.+)$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE
    )
    assert listed
    folder = ROOT / "src" / "gpucourse" / "commands"
    # The others there read what an option was given.
    written = {path.stem for path in folder.glob("*.py") if "\ndef add(" in path.read_text("utf-8")}
    assert written == {"predict", "roofline", "time"}
    assert written | {"doctor", "record"} == set(listed[1].split(" · "))
