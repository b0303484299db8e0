"""Tests of gpucourse.recorder and of the command line; tests/gpu records for real."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap

import pytest

from gpucourse import cli, recorder, recording
from gpucourse.environment import NoGPUError
from tests.conftest import NOTEBOOK_HEADER


def cell(source: str) -> str:
    return f"\n```{{code-cell}} ipython3\n{textwrap.dedent(source).strip()}\n```\n"


@pytest.fixture
def book(tmp_path):
    """Make a book of one page with one recorded function."""
    (tmp_path / "_toc.yml").write_text("root: book/index\n")
    for folder in ("book", "labs"):
        (tmp_path / folder).mkdir()

    def write(name: str, *cells: str):
        (tmp_path / "book" / name).write_text(NOTEBOOK_HEADER + "# A page\n" + "".join(map(cell, cells)))
        return tmp_path

    return write


ONE = "@recorded\ndef one():\n    return {'x': 1}\none()"


def test_pages_are_found_by_their_recorded_functions(book):
    book(
        "a.md",
        "%matplotlib inline",
        ONE,
        "@recorded(needs_gb=20, pending='later')\ndef two():\n    return {}",
    )
    root = book("b.md", "print('nothing recorded')")
    (page,) = recorder.find_pages(root)
    assert page.path.name == "a.md"
    assert page.recorded == ("one", "two")
    assert page.pending == ("two",)


def test_two_functions_of_one_name_are_an_error_that_names_both_pages(book):
    book("a.md", ONE)
    root = book("b.md", ONE)
    with pytest.raises(recorder.RecordPageError, match=r"two functions are named 'one'.*a\.md.*b\.md"):
        recorder.find_pages(root)


@pytest.fixture
def any_gpu(monkeypatch):
    """Pretend that there is a GPU, for what is said before one is used."""
    monkeypatch.setattr(cli, "require_cuda", lambda _what: None)


@pytest.mark.usefixtures("any_gpu")
def test_a_folder_that_is_no_book_says_so(tmp_path, capsys):
    assert cli.main(["record", "--root", str(tmp_path)]) == 1
    assert "holds no _toc.yml" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_recorded_and_the_reason_is_said(book, monkeypatch, capsys):
    root = book("a.md", ONE)

    def none(what):
        raise NoGPUError(f"{what} needs a CUDA device: none here")

    monkeypatch.setattr(cli, "require_cuda", none)
    assert cli.main(["record", "--root", str(root)]) == 1
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.usefixtures("any_gpu")
def test_a_page_without_recordings_is_refused_with_the_pages_that_have_some(book, capsys):
    book("b.md", "print('nothing recorded')")
    root = book("a.md", ONE)
    assert cli.main(["record", "--root", str(root), str(root / "book" / "b.md")]) == 2
    out = capsys.readouterr().out
    assert "no recorded function in" in out
    assert "a.md" in out


def test_check_names_missing_pending_corrupt_and_orphaned(book, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "recordings" / recording.BOOK_DEVICE
    folder.mkdir(parents=True)
    monkeypatch.setenv(recording.FOLDER_VARIABLE, str(folder.parent))
    (folder / "orphan.json").write_text("{}")
    (folder / "three.json").write_text("{")
    root = book(
        "a.md",
        ONE,
        "@recorded(pending='later')\ndef two():\n    return {}",
        "@recorded\ndef three():\n    return {}",
    )
    assert cli.main(["record", "--check", "--root", str(root)]) == 1
    out = capsys.readouterr().out
    for said in (
        "no recording 'one'",
        "two is not yet measured",
        "three.json cannot be used",
        "orphan belongs to no",
    ):
        assert said in out


@pytest.mark.parametrize(
    ("cell", "unchecked"),
    [
        ("found = one()", ()),
        ("found = one() if live else load('one')", ("one",)),
        ("if live:\n    found = one()\nelse:\n    found = recording.load('one')", ("one",)),
        ("found = load('one')", ("one",)),
        ("found = one()\n\n\ndef of(run):\n    return found if run else load('one')", ()),
        ("found = one()\nother = load('elsewhere')", ()),
        ("%time one()\nload('one')", ()),
    ],
)
def test_a_recording_that_its_page_loads_where_it_should_replay_it_is_known(book, cell, unchecked):
    (page,) = recorder.find_pages(book("a.md", ONE.removesuffix("one()"), cell))
    assert page.unchecked == unchecked


def test_check_notes_what_is_read_without_a_check_and_fails_for_nothing_else(
    book, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "recordings" / recording.BOOK_DEVICE
    folder.mkdir(parents=True)
    monkeypatch.setenv(recording.FOLDER_VARIABLE, str(folder.parent))
    monkeypatch.setattr(recording, "load", lambda name: None)
    (folder / "one.json").write_text("{}")
    root = book("a.md", ONE.removesuffix("one()"), "found = one() if live else load('one')")
    assert cli.main(["record", "--check", "--root", str(root)]) == 0
    first, note = capsys.readouterr().out.splitlines()
    assert first == "every recording is there, whole, and belongs to a chapter"
    assert note.startswith("note: ")
    assert "a.md: one is read by load() and not replayed" in note


def run_page(book, monkeypatch, tmp_path, *cells):
    """Run a page's recording for real, in a kernel, with the GPU pretended inside that kernel."""
    pretend = """
        from gpucourse import recording
        from gpucourse.environment import Environment
        machine = Environment(gpu="NVIDIA H200", torch="2.11.0")
        recording.cuda_available = lambda: True
        recording.Environment.capture = classmethod(lambda _cls: machine)
        from gpucourse.recording import recorded
    """
    monkeypatch.setenv(recording.FOLDER_VARIABLE, str(tmp_path / "made"))
    monkeypatch.setattr(recorder, "require_cuda", lambda _what: None)
    root = book("a.md", pretend, *cells)
    (page,) = recorder.find_pages(root)
    return recorder.record_page(page, root), tmp_path / "made" / "nvidia-h200"


@pytest.mark.slow
def test_a_page_is_run_and_its_recordings_written_with_the_command(book, monkeypatch, tmp_path):
    seconds, folder = run_page(book, monkeypatch, tmp_path, ONE)
    made = json.loads((folder / "one.json").read_text())
    assert seconds > 0
    assert made["data"] == {"x": 1}
    assert made["provenance"]["command"] == "gpucourse record book/a.md"


@pytest.mark.slow
def test_a_failing_cell_stops_the_page_and_keeps_what_was_made_before_it(book, monkeypatch, tmp_path):
    with pytest.raises(recorder.RecordPageError, match=r"a\.md stopped:(.|\n)*broken on purpose"):
        run_page(book, monkeypatch, tmp_path, ONE, "raise RuntimeError('broken on purpose')")
    assert json.loads((tmp_path / "made" / "nvidia-h200" / "one.json").read_text())["data"] == {"x": 1}


@pytest.mark.slow
def test_a_recorded_function_that_is_never_called_is_said(book, monkeypatch, tmp_path):
    with pytest.raises(recorder.RecordPageError, match="one was never called"):
        run_page(book, monkeypatch, tmp_path, ONE.removesuffix("one()"))


def test_the_doctor_says_what_is_live_and_what_is_replayed(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torch: " in out
    assert "measurements: " in out


def test_the_doctor_works_without_torch_and_says_why_there_is_no_gpu(monkeypatch):
    machine = dataclasses.replace(cli.Environment.capture(), torch=None, gpu=None)
    monkeypatch.setattr(cli.Environment, "capture", classmethod(lambda _cls: machine))
    monkeypatch.setattr(cli, "_torch_state", lambda: "torch is not installed")
    lines = cli.doctor_lines()
    assert "torch: not installed" in lines
    assert "GPU: none to use (torch is not installed)" in lines
    assert lines[-1].startswith("measurements: replayed")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe@recorded", "a.md is not UTF-8 text"),
        (b"---\njupytext: [\n---\n@recorded\n", "a.md is no page that jupytext can read"),
        (None, "a.md cannot be read: Is a directory"),
    ],
)
def test_a_page_that_cannot_be_read_is_named_and_why(book, capsys, content, said):
    root = book("b.md", ONE)
    page = root / "book" / "a.md"
    if content is None:
        page.mkdir()
    else:
        page.write_bytes(content)
    assert cli.main(["record", "--check", "--root", str(root)]) == 1
    assert f"gpucourse record: {root}" in (out := capsys.readouterr()).err
    assert said in out.err


def test_a_folder_that_may_not_be_read_is_no_book(tmp_path, monkeypatch):
    def denied(_path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(recorder.os, "stat", denied)
    with pytest.raises(recorder.RecordPageError, match=r"holds no _toc\.yml"):
        recorder.find_pages(tmp_path)


def test_the_doctor_says_why_a_broken_torch_cannot_be_used(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so: cannot open shared object file')\n")
    done = subprocess.run(
        [sys.executable, "-m", "gpucourse.cli", "doctor"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = "cannot be imported (libcudart.so: cannot open shared object file)"
    assert f"torch: {said}" in done.stdout
    assert f"GPU: none to use (torch {said})" in done.stdout
    assert "measurements: replayed" in done.stdout
