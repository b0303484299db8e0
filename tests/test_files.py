"""A file is written whole, or what was there before is whole."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpucourse.files import write_whole


def test_text_and_bytes_are_written_and_the_path_comes_back(tmp_path: Path) -> None:
    assert write_whole(tmp_path / "a.json", "µs") == tmp_path / "a.json"
    assert (tmp_path / "a.json").read_bytes() == "µs".encode()
    write_whole(tmp_path / "a.json", b"\x00")
    assert (tmp_path / "a.json").read_bytes() == b"\x00"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_file_that_may_grow_no_further_leaves_the_old_one_whole_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_whole(path, "old")
    code = (
        "import sys\n"
        "from gpucourse.kernels import KernelTrace\n"
        "kernel = dict(name='k' * 10**6, op='', shapes=[], start_us=0.0, duration_us=1.0, launch_us=None, stream=7,\n"
        "              grid=None, block=None, registers=None, shared_bytes=None)\n"
        "trace = KernelTrace.from_dict(dict(kernels=[kernel], launches=1, missing=0))\n"
        "trace.write_perfetto(sys.argv[1])\n"
    )

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = subprocess.run(
        [sys.executable, "-B", "-c", code, str(path)],
        preexec_fn=small_files,
        capture_output=True,
        check=False,
    )
    assert b"File too large" in done.stderr
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["trace.json"]


def test_an_interrupt_in_the_middle_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    write_whole(path, "old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["trace.json"]


def test_a_link_stays_a_link_and_the_rights_stay(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_whole(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert real.stat().st_mode & 0o777 == 0o640


def test_a_new_file_has_the_rights_that_open_would_give(tmp_path: Path) -> None:
    (tmp_path / "by_open").write_text("")
    write_whole(tmp_path / "by_us", "")
    assert (tmp_path / "by_us").stat().st_mode == (tmp_path / "by_open").stat().st_mode


def test_a_device_is_written_into_and_a_missing_folder_said(tmp_path: Path) -> None:
    write_whole(Path(os.devnull), "x")
    assert not Path(os.devnull).is_file()
    with pytest.raises(OSError) as error:  # noqa: PT011 - its number says which
        write_whole(Path("/dev/full"), "x")
    assert error.value.errno == errno.ENOSPC
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "none" / "a.json", "x")


def test_two_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    texts = [letter * 200_000 for letter in "abcd"]
    writers = [threading.Thread(target=write_whole, args=(path, text)) for text in texts]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert path.read_text() in texts
    assert os.listdir(tmp_path) == ["trace.json"]
