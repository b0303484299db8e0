"""The glossary and the reading list agree with the chapters that they serve."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "book" / "reference"
CHAPTERS = sorted([*ROOT.glob("book/[0-9][0-9]_*.md"), *ROOT.glob("labs/*.md")])
PAGES = {p.resolve(): p.read_text(encoding="utf-8") for p in sorted(ROOT.glob("book/**/*.md")) + CHAPTERS}


def entries(glossary: str) -> dict[tuple[str, ...], str]:
    """Read the glossary: the names of each entry, and its text."""
    body = re.search(r"^:::\{glossary\}\n(.*?)^:::$", glossary, re.S | re.M)
    assert body is not None, "the glossary has no entries"
    found = {}
    for block in body[1].strip().split("\n\n"):
        lines = block.splitlines()
        names = tuple(line for line in lines if not line.startswith(" "))
        found[names] = " ".join(line.strip() for line in lines if line.startswith(" "))
    return found


def linked_pages(text: str) -> set[Path]:
    """Name the pages that an entry says the term is used on."""
    return {(REFERENCE / target).resolve() for target in re.findall(r"\]\(([^)]+\.md)\)", text)}


def mentions(page: str, names: tuple[str, ...]) -> bool:
    """Tell whether a page uses one of the names, in any of its ordinary forms."""
    plain = re.sub(r"[\s-]+", " ", page.casefold())
    return any(re.sub(r"[\s-]+", " ", name.casefold()) in plain for name in names)


def linked_terms(page: str) -> set[str]:
    """Name the terms that a page links to."""
    found = re.findall(r"\{term\}`(?:[^`<]*<([^>`]+)>|([^`<]+))`", page)
    return {(explicit or plain).strip().casefold() for explicit, plain in found}


GLOSSARY = entries((REFERENCE / "glossary.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("names", GLOSSARY, ids="/".join)
def test_a_term_is_used_on_every_page_that_its_entry_names(names: tuple[str, ...]) -> None:
    pages = linked_pages(GLOSSARY[names])
    assert pages, f"{names[0]} names no page"
    assert [p.name for p in sorted(pages) if not mentions(PAGES[p], names)] == []


def test_a_term_that_a_page_links_to_names_that_page() -> None:
    missing = []
    for path, text in PAGES.items():
        if path.parent == REFERENCE or path.name == "index.md":
            continue
        for term in sorted(linked_terms(text)):
            named = [t for names, t in GLOSSARY.items() if term in map(str.casefold, names)]
            if len(named) != 1 or path not in linked_pages(named[0]):
                missing.append(f"{path.name}: {term}")
    assert missing == []


def test_the_terms_that_the_course_cannot_do_without_are_there() -> None:
    known = {name for names in GLOSSARY for name in names}
    assert {"kernel", "HBM bandwidth", "arithmetic intensity", "pinned memory"} <= known


def test_no_term_has_two_entries_and_they_stand_in_alphabetical_order() -> None:
    heads = [names[0].casefold() for names in GLOSSARY]
    every = [name.casefold() for names in GLOSSARY for name in names]
    assert heads == sorted(heads)
    assert len(set(every)) == len(every)


def sources(page: str) -> dict[str, str]:
    """Read a chapter's primary reading: address -> the whole item."""
    section = re.search(r"^## Primary reading\n(.*?)(?=^## |\Z)", page, re.S | re.M)
    found = {}
    for item in re.split(r"^[-*] ", section[1], flags=re.M)[1:] if section else []:
        for address in re.findall(r"\]\((https?://[^)\s]+)\)", item):
            found[address] = " ".join(item.split())
    return found


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_a_chapter_names_its_reading_each_with_a_question(chapter: Path) -> None:
    items = sources(chapter.read_text(encoding="utf-8"))
    assert len(items) >= 2
    assert [i for i in items.values() if "?" not in re.sub(r"\(https?://\S+\)", "", i)] == []


def test_the_reading_list_holds_every_source_of_the_chapters_and_asks_a_question_of_each() -> None:
    text = (REFERENCE / "reading.md").read_text(encoding="utf-8")
    wanted = {address for page in CHAPTERS for address in sources(page.read_text(encoding="utf-8"))}
    assert sorted(a for a in wanted if f"({a})" not in text) == []
    items = re.split(r"^- ", text, flags=re.M)[1:]
    assert len(items) >= 5
    assert [i[:60] for i in items if "?" not in re.sub(r"\(https?://\S+\)", "", i)] == []


def test_a_term_without_its_page_and_a_source_without_its_question_are_found() -> None:
    page = "The {term}`Warp <warp>` and the {term}`HBM bandwidth`.\n\n## Primary reading\n\n- [A](https://a.b/c), why\n"
    assert linked_terms(page) == {"warp", "hbm bandwidth"}
    assert not mentions(page, ("kernel",))
    assert mentions("memory-bound", ("memory bound",))
    assert sources(page) == {"https://a.b/c": "[A](https://a.b/c), why"}
    both = entries(":::{glossary}\na\nb\n  Text. [x](../02_kernels.md)\n\nc\n  More.\n:::\n")
    assert list(both) == [("a", "b"), ("c",)]
    assert [p.name for p in linked_pages(both["a", "b"])] == ["02_kernels.md"]
