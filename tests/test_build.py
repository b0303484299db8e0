"""The build: the site is what the sources say now, or it is absent and the build says why."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, SmallBook

sys.path.insert(0, str(ROOT / "book"))
import build as book_build

# Each of these runs Sphinx.
pytestmark = pytest.mark.slow

STAMPED = "```{code-cell}\nimport time\nprint('executed at', time.time_ns())\n```\n"


def executed_at(book: SmallBook, page: str) -> str:
    """Return when a page with the cell `STAMPED` was executed."""
    return book.html(page).split("executed at ")[1].split("\n")[0]


def add_recording(book: SmallBook, name: str) -> None:
    """Put the first of the real recordings into a book, under its own name."""
    source = ROOT / "src" / "gpucourse" / "recordings" / "nvidia-h200" / f"{name}.json"
    target = book.root / "src" / "gpucourse" / "recordings" / "nvidia-h200" / source.name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


@pytest.fixture
def a_recording() -> str:
    """Return the name of some recording of the book."""
    folder = ROOT / "src" / "gpucourse" / "recordings" / "nvidia-h200"
    return sorted(path.stem for path in folder.glob("*.json"))[0]


# --- what is built, and when -------------------------------------------------------------------------------


def test_a_second_build_does_nothing_and_a_change_does_just_what_it_must(small_book: SmallBook) -> None:
    small_book.write(
        "_toc.yml",
        "format: jb-book\nroot: book/index\nchapters:\n  - file: book/page\n  - file: book/other\n",
    )
    small_book.notebook("book/page.md", f"# A page\n\n{STAMPED}")
    small_book.notebook(
        "book/other.md", f"# Another\n\n{STAMPED}print(2)\n".replace("```\nprint", "```\n\nText ")
    )
    first = small_book.build()
    assert first.returncode == 0, first.stdout + first.stderr
    page, other = executed_at(small_book, "book/page.html"), executed_at(small_book, "book/other.html")

    before = small_book.site.stat().st_mtime_ns
    second = small_book.build()
    assert second.returncode == 0
    assert second.stdout.startswith("nothing has changed"), second.stdout
    assert small_book.site.stat().st_mtime_ns == before

    # Prose alone: the page is rendered anew, nothing is executed.
    small_book.notebook("book/page.md", f"# A page by another name\n\n{STAMPED}")
    assert small_book.build().returncode == 0
    assert "A page by another name" in small_book.html("book/other.html"), "the navigation kept the old title"
    assert executed_at(small_book, "book/page.html") == page

    # Code: that page is executed, and no other.
    small_book.notebook("book/page.md", "# A page\n\n" + STAMPED.replace("import time", "import time  # now"))
    assert small_book.build().returncode == 0
    assert executed_at(small_book, "book/page.html") != page
    assert executed_at(small_book, "book/other.html") == other

    # The package: everything is executed.
    small_book.write("src/gpucourse/extra.py", '"""Nothing yet."""\n')
    assert small_book.build().returncode == 0
    assert executed_at(small_book, "book/other.html") != other


def test_a_page_runs_with_this_trees_package(small_book: SmallBook) -> None:
    small_book.write("src/gpucourse/extra.py", 'WORD = "first"\n')
    small_book.notebook(
        "book/page.md", "# A page\n\n```{code-cell}\nfrom gpucourse.extra import WORD\nprint(WORD)\n```\n"
    )
    assert small_book.build().returncode == 0
    assert "first" in small_book.html("book/page.html")
    small_book.write("src/gpucourse/extra.py", 'WORD = "second"\n')
    assert small_book.build().returncode == 0
    assert "second" in small_book.html("book/page.html")


def test_a_page_runs_with_this_environment_whatever_the_users_own_settings(
    small_book: SmallBook, tmp_path: Path
) -> None:
    kernel = tmp_path / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    spec = {"argv": ["/bin/false", "{connection_file}"], "display_name": "Mine", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00.py").write_text("print('from the start-up file')\n")
    small_book.notebook("book/page.md", "# A page\n\n```{code-cell}\nimport sys\nprint(sys.prefix)\n```\n")
    built = small_book.build(
        JUPYTER_PATH=str(tmp_path / "jupyter"),
        JUPYTER_DATA_DIR=str(tmp_path / "jupyter"),
        IPYTHONDIR=str(tmp_path / "ipython"),
        PYTHONPATH="relative",
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert sys.prefix in small_book.html("book/page.html")
    assert "start-up file" not in small_book.html("book/page.html")


# --- what ends the build -----------------------------------------------------------------------------------

FAULTY = {
    "a missing page": ("[text](nowhere.md)", "nowhere.md"),
    "an unknown term": ("{term}`flux`", "flux"),
    "an unknown directive": ("```{flowchart}\nx\n```", "flowchart"),
    "a directive that a notebook cannot show": (
        "```{versionadded} 1.0\n```",
        "directive {versionadded} has no",
    ),
    "a failing cell": (
        "```{code-cell}\nraise RuntimeError('the cell is at fault')\n```",
        "the cell is at fault",
    ),
    "a cell that writes to stderr": (
        "```{code-cell}\nimport sys\nprint('a path', file=sys.stderr)\n```",
        "stderr",
    ),
    "a number without a recording": ("{rec}`nothing.median_us | .1f µs`", "gpucourse record"),
    "a missing recording": (
        "```{code-cell}\nfrom gpucourse.recording import recorded\n\n@recorded\ndef nothing():\n"
        "    return {}\n\nnothing()\n```",
        "there is no recording 'nothing'",
    ),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_fault_ends_the_build_and_no_old_page_stays(small_book: SmallBook, fault: str) -> None:
    text, said = FAULTY[fault]
    small_book.site.mkdir(parents=True)
    (small_book.site / "index.html").write_text("an old page")
    small_book.notebook("book/page.md", f"# A page\n\n{text}\n")
    built = small_book.build()
    assert built.returncode == 1, built.stdout
    assert said in built.stderr, built.stdout + built.stderr
    assert "No site: _build/html was removed" in built.stderr
    assert not small_book.site.exists()
    # It is no better the second time, for a build that failed is not remembered as done.
    assert small_book.build().returncode == 1


def test_a_key_that_a_recording_lacks_ends_the_build(small_book: SmallBook, a_recording: str) -> None:
    add_recording(small_book, a_recording)
    small_book.write(
        "book/index.md", f"# A small book\n\nIt takes {{rec}}`{a_recording}.no_such_key | .1f µs`.\n"
    )
    built = small_book.build()
    assert built.returncode == 1
    assert f"{a_recording} has no 'no_such_key': there is " in built.stderr


def test_a_stale_recording_ends_the_build(small_book: SmallBook, a_recording: str) -> None:
    add_recording(small_book, a_recording)
    small_book.notebook(
        "book/page.md",
        "# A page\n\n```{code-cell}\nfrom gpucourse.recording import recorded\n\n@recorded\n"
        f"def {a_recording}():\n    return {{'changed': True}}\n\n{a_recording}()\n```\n",
    )
    built = small_book.build(CUDA_VISIBLE_DEVICES="")
    assert built.returncode == 1
    assert f"recording '{a_recording}' is stale" in built.stderr


def test_a_recording_that_no_cell_makes_ends_the_build(small_book: SmallBook, a_recording: str) -> None:
    add_recording(small_book, a_recording)
    small_book.write("book/index.md", "# A small book\n\n```{recordings}\n```\n")
    built = small_book.build()
    assert built.returncode == 1
    assert f"recording '{a_recording}' belongs to no page" in built.stderr


def test_a_recording_that_its_page_reads_unchecked_says_so_in_its_entry(
    small_book: SmallBook, a_recording: str
) -> None:
    add_recording(small_book, a_recording)
    small_book.write("book/index.md", "# A small book\n\n```{recordings}\n```\n")
    small_book.notebook(
        "book/page.md",
        "# A page\n\n```{code-cell}\nfrom gpucourse.recording import load, recorded\n\n@recorded\n"
        f"def {a_recording}():\n    return {{'changed': True}}\n\nlive = False\n"
        f"found = {a_recording}() if live else load({a_recording!r})\n```\n",
    )
    built = small_book.build(CUDA_VISIBLE_DEVICES="")
    assert built.returncode == 0, built.stdout + built.stderr
    assert "without comparing the fingerprints" in small_book.html("book/index.html")


def test_a_figure_not_yet_measured_is_built_and_listed(small_book: SmallBook) -> None:
    small_book.notebook(
        "book/page.md",
        "# A page\n\n```{code-cell}\nfrom gpucourse.recording import recorded\n\n"
        '@recorded(pending="no device of that kind")\ndef later():\n    return {}\n\nlater()\n```\n',
    )
    built = small_book.build(CUDA_VISIBLE_DEVICES="")
    assert built.returncode == 0, built.stdout + built.stderr
    assert "not to be published: book/page.html: no device of that kind" in built.stdout


def test_without_the_fetched_scripts_the_build_says_what_fetches_them(small_book: SmallBook) -> None:
    (small_book.root / "book" / "vendor").unlink()
    built = small_book.build()
    assert built.returncode == 1
    assert "run `make book`" in built.stderr


def test_the_inputs_are_every_source_and_nothing_that_is_built_or_fetched() -> None:
    inputs = [*book_build.CODE_INPUTS, *book_build.SITE_INPUTS]
    found = {path.relative_to(ROOT).as_posix() for path in book_build.input_files(ROOT, tuple(inputs))}
    assert {
        "src/gpucourse/recording.py",
        "book/_ext/course_theme.py",
        "_toc.yml",
        "requirements.txt",
    } <= found
    assert {"book/assets/course.css", "book/_templates/theme-switcher.html", "book/index.md"} <= found
    assert not [name for name in found if "__pycache__" in name or name.startswith("_build")]
    assert not [name for name in found if name.startswith("book/vendor") and not name.endswith("stamp")]


# --- disks and kills ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["", '{"code": ', "\0\0\0", None])
def test_a_state_that_a_full_disk_cut_short_only_means_a_new_build(tmp_path: Path, left: str | None) -> None:
    state = tmp_path / "state.json"
    if left is not None:
        state.write_text(left)
    assert book_build.remembered(state) is None
    state.write_text('{"code": "1"}')
    assert book_build.remembered(state) == {"code": "1"}


def an_old_site(root: Path) -> Path:
    site = root / "_build" / "html"
    site.mkdir(parents=True)
    (site / "index.html").write_text("an old page")
    (root / "book" / "vendor").mkdir(parents=True)
    (root / "book" / "vendor" / "stamp").write_text("")
    return site


def test_a_disk_that_is_full_when_the_site_is_put_in_place_leaves_no_old_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = an_old_site(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(book_build, "render", lambda *_, **__: tmp_path)
    monkeypatch.setattr(book_build, "publish", full)
    monkeypatch.setattr(sys, "argv", ["build.py", "--root", str(tmp_path)])
    assert book_build.main() == 1
    said = capsys.readouterr().err
    assert "error: [Errno 28] No space left on device" in said
    assert "No site: _build/html was removed" in said
    assert not site.exists()


def test_what_hinders_a_build_before_it_begins_is_said_and_no_site_is_called_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = an_old_site(tmp_path)
    (tmp_path / "_build" / ".lock").mkdir()
    monkeypatch.setattr(sys, "argv", ["build.py", "--root", str(tmp_path)])
    assert book_build.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("error: [Errno 21] Is a directory")
    assert "removed" not in said
    assert site.exists()


DRIVER = """
import fcntl, sys
from pathlib import Path
sys.path.insert(0, {book!r})
import build
lock = open({lock!r}, "w")
fcntl.flock(lock, fcntl.LOCK_EX)
build.sys.executable = {renderer!r}
build.run_jupyter_book(Path({root!r}), Path({root!r}), {{"PATH": "/usr/bin:/bin"}}, lock.fileno())
"""


def test_a_build_that_was_killed_keeps_the_lock_while_its_renderer_still_writes(tmp_path: Path) -> None:
    lock, started, renderer = tmp_path / "lock", tmp_path / "started", tmp_path / "renderer"
    renderer.write_text(
        f"#!/bin/sh\necho $$ > {started}.part && mv {started}.part {started}\nexec sleep 60\n"
    )
    renderer.chmod(0o755)
    code = DRIVER.format(book=str(ROOT / "book"), lock=str(lock), renderer=str(renderer), root=str(tmp_path))
    driver = subprocess.Popen([sys.executable, "-c", code])
    end = time.monotonic() + 60
    while not started.exists():
        assert driver.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    driver.kill()
    driver.wait()
    with open(lock, "w") as again:
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.kill(int(started.read_text()), signal.SIGKILL)
        fcntl.flock(again, fcntl.LOCK_EX)  # free at once when the renderer is gone, or this would hang
