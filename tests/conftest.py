"""Fixtures that several test files use: a small book made of the real build's own parts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

# A busy machine is slow now and then; what a property says is true at any speed.
hypothesis.settings.register_profile("course", deadline=None)
hypothesis.settings.load_profile("course")

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK_HEADER = """---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallBook:
    """A book of a few pages with the real configuration, extensions and build."""

    root: Path

    @property
    def site(self) -> Path:
        """The built pages."""
        return self.root / "_build" / "html"

    def write(self, name: str, text: str) -> None:
        """Write one source file."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def notebook(self, name: str, text: str) -> None:
        """Write a page whose cells are executed."""
        self.write(name, NOTEBOOK_HEADER + text)

    def build(self, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the build and return what it printed and its exit status."""
        return subprocess.run(
            [sys.executable, str(self.root / "book" / "build.py")],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def html(self, page: str) -> str:
        """Return a built page."""
        return (self.site / page).read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def site() -> Path:
    """Return the folder of the built pages. ``$BUILT_SITE`` names another one, to look at a site as it is."""
    if os.environ.get("BUILT_SITE"):
        return Path(os.environ["BUILT_SITE"]).resolve()
    built = subprocess.run(
        [sys.executable, str(ROOT / "book" / "build.py")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode != 0:
        pytest.fail(
            f"the book does not build:\n{built.stdout[-6000:]}\n{built.stderr[-2000:]}", pytrace=False
        )
    return ROOT / "_build" / "html"


@pytest.fixture(scope="session")
def vendor() -> Path:
    """Return the folder of the fetched scripts; fetch them if they are not there."""
    subprocess.run([sys.executable, str(ROOT / "tools" / "vendor.py")], check=True, stdin=subprocess.DEVNULL)
    return ROOT / "book" / "vendor"


@pytest.fixture
def small_book(tmp_path: Path, vendor: Path) -> SmallBook:
    """Return a book of an index and a measurements page, to which a test adds what it needs."""
    root = tmp_path / "small-book"
    (root / "book").mkdir(parents=True)
    for name in ("_config.yml", "requirements.txt", "book/build.py"):
        shutil.copy(ROOT / name, root / name)
    for name in ("book/_ext", "book/_templates", "book/assets", "src"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "nvidia-*"))
    (root / "book" / "vendor").symlink_to(vendor, target_is_directory=True)
    book = SmallBook(root=root)
    book.write("_toc.yml", "format: jb-book\nroot: book/index\nchapters:\n  - file: book/page\n")
    book.write("book/index.md", "# A small book\n\nIts [page](page.md).\n")
    book.notebook("book/page.md", '# A page\n\n```{code-cell}\nprint("six by", 7)\n```\n')
    return book
