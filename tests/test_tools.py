"""What the make targets set up: whole or not at all, and a clear word where something is missing."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.conftest import ROOT


def tool(name: str) -> ModuleType:
    """Import one of the scripts in ``tools``."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


environment, lab, vendor_tool = tool("environment"), tool("lab"), tool("vendor")


def shell(script: str, path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run one of the shell scripts with nothing but ``path`` (and sh's own tools) to find commands in."""
    return subprocess.run(
        ["/bin/sh", str(ROOT / "tools" / script)],
        env={"PATH": str(path), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def command(folder: Path, name: str, body: str) -> Path:
    """Make a command that runs ``body``."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Return a folder with the few commands that the scripts themselves use."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("head", "id", "cat"):
        (folder / name).symlink_to(shutil.which(name) or name)
    return folder


# --- the Python that makes the environment -----------------------------------------------------------------


def test_a_name_on_the_path_that_does_not_run_is_passed_over(bare: Path) -> None:
    command(bare, "python3", "echo 'no such version' >&2; exit 127")
    good = command(bare, "python3.12", f'exec {sys.executable} "$@"')
    assert shell("python.sh", bare).stdout.strip() == str(good)


def test_a_python_that_is_too_old_is_named_and_what_is_wanted(bare: Path) -> None:
    command(bare, "python3", 'case "$1" in --version) echo "Python 3.9.2";; *) exit 1;; esac')
    found = shell("python.sh", bare)
    assert found.returncode == 1
    assert found.stdout == ""
    assert "python3 is: Python 3.9.2" in found.stderr
    assert "Wanted: Python 3.11 or newer with venv" in found.stderr


def test_a_named_python_is_the_only_candidate(bare: Path) -> None:
    command(bare, "python3", f'exec {sys.executable} "$@"')
    assert shell("python.sh", bare, PYTHON="python9").returncode == 1
    assert shell("python.sh", bare, PYTHON=sys.executable).stdout.strip() == sys.executable


# --- the environment ---------------------------------------------------------------------------------------


def test_the_scripts_of_a_moved_environment_name_its_new_place(tmp_path: Path) -> None:
    new, final = tmp_path / "work" / "environment", tmp_path / ".venv"
    (new / "bin").mkdir(parents=True)
    (new / "pyvenv.cfg").write_text(f"command = python -m venv {new}\n")
    (new / "bin" / "pip").write_text(f"#!{new}/bin/python\nimport pip\n")
    (new / "bin" / "tool").write_bytes(b"\x7fELF\0" + os.fsencode(new))
    (new / "bin" / "python").symlink_to(sys.executable)
    environment.rewrite_paths(new, final)
    assert (new / "pyvenv.cfg").read_text() == f"command = python -m venv {final}\n"
    assert (new / "bin" / "pip").read_text().startswith(f"#!{final}/bin/python\n")
    assert os.fsencode(new) in (new / "bin" / "tool").read_bytes(), "a binary must not be edited"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a tree that has just what the environment is made from."""
    (tmp_path / "requirements.txt").write_text("nothing==1\n")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "_build").mkdir()
    return tmp_path


def test_an_environment_that_cannot_be_completed_leaves_the_old_one_whole(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tree / ".venv" / "bin"
    old.mkdir(parents=True)
    (old / "python").write_text("the old one")

    def run(step: str, command: list[str], root: Path) -> None:
        if "requirements" in step:
            raise environment.SetupError(f"{step} failed")
        Path(command[-1], "bin").mkdir(parents=True)

    monkeypatch.setattr(environment, "run", run)
    with pytest.raises(environment.SetupError):
        environment.make(tree, tree / ".venv")
    assert (old / "python").read_text() == "the old one"
    assert list((tree / "_build").iterdir()) == [], "the half-made one was left behind"


def test_what_a_killed_make_left_is_removed_and_an_environment_without_its_python_is_made_anew(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tree / "_build" / "environment-abc" / "environment" / "bin"
    left.mkdir(parents=True)
    final = tree / ".venv"
    final.mkdir()
    (final / "stamp").write_text(environment.environment_stamp(tree))
    (final / "package-stamp").write_text(environment.package_stamp(tree))
    made: list[Path] = []
    monkeypatch.setattr(environment, "make", lambda _root, place: made.append(place))
    monkeypatch.setattr(environment, "__file__", str(tree / "tools" / "environment.py"))
    assert environment.main() == 0
    assert made == [final], "its stamp says that it is complete, but it has no Python"
    assert not (tree / "_build" / "environment-abc").exists()
    (final / "bin").mkdir()
    (final / "bin" / "python").symlink_to(sys.executable)
    assert environment.main() == 0
    assert made == [final], "a whole one is kept"


def test_an_environment_is_renewed_when_what_it_is_made_from_changes(tree: Path) -> None:
    stamp = environment.environment_stamp(tree)
    assert environment.environment_stamp(tree) == stamp
    (tree / "requirements.txt").write_text("nothing==2\n")
    assert environment.environment_stamp(tree) != stamp


def test_a_change_of_a_tools_settings_does_not_reinstall_the_package(tree: Path) -> None:
    stamp = environment.package_stamp(tree)
    text = (tree / "pyproject.toml").read_text()
    (tree / "pyproject.toml").write_text(text.replace("line-length = 110", "line-length = 111"))
    assert environment.package_stamp(tree) == stamp
    (tree / "pyproject.toml").write_text(text.replace('name = "gpucourse"', 'name = "other"'))
    assert environment.package_stamp(tree) != stamp


def test_every_requirement_is_one_exact_version_without_a_place() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert len(pins) > 100
    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][\w.]*", line)] == []
    assert "torch==2.13.0" in pins


# --- the fetched scripts -----------------------------------------------------------------------------------


def package_archive(folder: Path, files: dict[str, str]) -> Path:
    """Make an archive as npm does."""
    archive = folder / "package.tgz"
    with tarfile.open(archive, "w:gz") as made:
        for name, text in files.items():
            path = folder / "file"
            path.write_text(text)
            made.add(path, name)
    return archive


def test_an_archive_with_another_checksum_is_refused(tmp_path: Path) -> None:
    archive = package_archive(tmp_path, {"package/embed.js": "x"})
    package = vendor_tool.Package(name="p", version="1.0", sha512="AAAA", take={})
    with pytest.raises(vendor_tool.VendorError, match=r"(?s)p 1\.0: the archive's sha512 is .* Nothing was"):
        vendor_tool.check_archive(archive, package)
    right = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    vendor_tool.check_archive(archive, vendor_tool.Package(name="p", version="1.0", sha512=right, take={}))


def test_only_listed_files_are_unpacked_and_a_list_that_fits_nothing_is_an_error(tmp_path: Path) -> None:
    archive = package_archive(tmp_path, {"package/a.js": "a", "package/b.js": "b", "package/../c.js": "c"})
    package = vendor_tool.Package(name="p", version="1", sha512="", take={r"package/(?P<path>a\.js)": "site"})
    vendor_tool.unpack(archive, package, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*.js")] == ["a.js"]
    none = vendor_tool.Package(name="p", version="1", sha512="", take={r"package/(?P<path>z\.js)": "site"})
    with pytest.raises(vendor_tool.VendorError, match="nothing in its archive matches"):
        vendor_tool.unpack(archive, none, tmp_path / "out")


def test_every_fault_of_a_package_is_mended_and_one_that_is_gone_is_an_error(tmp_path: Path) -> None:
    archive = package_archive(tmp_path, {"package/a.js": "one two", "package/b.js": "one two"})

    def package(*mend: tuple[str, str, str]) -> vendor_tool.Package:
        return vendor_tool.Package(
            name="p", version="1", sha512="", take={r"package/(?P<path>.\.js)": "site"}, mend=mend
        )

    vendor_tool.unpack(archive, package(("a.js", "one", "1"), ("a.js", "two", "2")), tmp_path / "out")
    assert (tmp_path / "out" / "site" / "a.js").read_text() == "1 2"
    assert (tmp_path / "out" / "site" / "b.js").read_text() == "one two"
    with pytest.raises(vendor_tool.VendorError, match=r"a\.js no longer has 'three' to be mended"):
        vendor_tool.unpack(archive, package(("a.js", "one", "1"), ("a.js", "three", "3")), tmp_path / "out")


def test_scripts_that_cannot_be_fetched_leave_the_old_ones_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm = command(tmp_path / "bin", "npm", "exit 1")
    monkeypatch.setenv("PATH", f"{npm.parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "vendor").mkdir()
    (tmp_path / "vendor" / "old.js").write_text("old")
    with pytest.raises(vendor_tool.VendorError, match="npm could not fetch @jupyter-widgets/html-manager"):
        vendor_tool.fetch(tmp_path / "vendor")
    assert (tmp_path / "vendor" / "old.js").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "vendor"]


def test_what_a_killed_fetch_left_among_the_sources_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm = command(tmp_path / "bin", "npm", "exit 1")
    monkeypatch.setenv("PATH", f"{npm.parent}{os.pathsep}{os.environ['PATH']}")
    left = tmp_path / "book" / ".vendor-abc" / "node"
    left.mkdir(parents=True)
    (left / "README.md").write_text("# Not a page")
    with pytest.raises(vendor_tool.VendorError):
        vendor_tool.fetch(tmp_path / "book" / "vendor")
    assert list((tmp_path / "book").iterdir()) == []


def test_of_two_fetches_at_once_the_second_finds_it_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "book" / "vendor"
    fetched: list[int] = []

    def fetch(_folder: Path) -> None:
        fetched.append(1)
        time.sleep(0.3)
        folder.mkdir()
        (folder / "stamp").write_text(vendor_tool.stamp())

    monkeypatch.setattr(vendor_tool, "fetch", fetch)
    monkeypatch.setattr(sys, "argv", ["vendor.py", "--into", str(folder)])
    with ThreadPoolExecutor(2) as pool:
        assert [run.result() for run in [pool.submit(vendor_tool.main) for _ in range(2)]] == [0, 0]
    assert fetched == [1]


def test_scripts_that_cannot_be_written_are_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "book").write_text("a file where the folder should be")
    monkeypatch.setattr(sys, "argv", ["vendor.py", "--into", str(tmp_path / "book" / "vendor")])
    assert vendor_tool.main() == 1
    assert capsys.readouterr().err.startswith("error: [Errno 17] File exists")


def test_scripts_of_another_list_are_fetched_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = vendor_tool.stamp()
    monkeypatch.setattr(vendor_tool, "PACKAGES", vendor_tool.PACKAGES[:-1])
    assert vendor_tool.stamp() != stamp


# --- the browser -------------------------------------------------------------------------------------------


def test_without_a_browser_and_without_rights_it_says_how_to_get_one(bare: Path) -> None:
    (bare / "id").unlink()
    command(bare, "id", "echo 1000")
    found = shell("chromium.sh", bare)
    assert found.returncode == 1
    assert "sudo apt-get install --no-install-recommends chromium" in found.stderr
    assert "make test CHROMIUM=/path/to/chrome" in found.stderr


def test_a_browser_that_runs_is_enough(bare: Path) -> None:
    command(bare, "chromium-browser", "echo Chromium 156")
    assert shell("chromium.sh", bare).returncode == 0


# --- the working folder of make lab ------------------------------------------------------------------------


def test_notebooks_are_written_and_renewed_while_the_reader_has_not_touched_them(tmp_path: Path) -> None:
    assert lab.fill(tmp_path, {"book/one": "first"}) == []
    assert lab.fill(tmp_path, {"book/one": "second"}) == []
    assert (tmp_path / "book" / "one.ipynb").read_text() == "second"
    assert [path.name for path in (tmp_path / "book").iterdir()] == ["one.ipynb"]


def test_a_changed_notebook_is_never_written_over(tmp_path: Path) -> None:
    lab.fill(tmp_path, {"one": "first"})
    mine = tmp_path / "one.ipynb"
    mine.write_text("my work")
    assert lab.fill(tmp_path, {"one": "first"}) == [], "the book has nothing newer, so nothing is to be said"
    told = lab.fill(tmp_path, {"one": "second"})
    assert mine.read_text() == "my work"
    assert (tmp_path / "one-updated.ipynb").read_text() == "second"
    assert told == [
        "one.ipynb holds work of yours and stays as it is; the book's newer version is one-updated.ipynb"
    ]
    # Asked again: the same words, no further copy. A copy that the reader worked in is safe too.
    assert lab.fill(tmp_path, {"one": "second"}) == told
    (tmp_path / "one-updated.ipynb").write_text("more work")
    lab.fill(tmp_path, {"one": "third"})
    assert (tmp_path / "one-updated.ipynb").read_text() == "more work"
    assert (tmp_path / "one-updated-2.ipynb").read_text() == "third"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"null", b"\xff\xfe"])
def test_a_record_that_cannot_be_read_makes_every_changed_notebook_the_readers(
    tmp_path: Path, damage: bytes
) -> None:
    lab.fill(tmp_path, {"one": "first", "two": "first"})
    (tmp_path / "one.ipynb").write_text("my work")
    (tmp_path / lab.RECORD).write_bytes(damage)
    assert len(lab.fill(tmp_path, {"one": "second", "two": "first"})) == 1
    assert (tmp_path / "one.ipynb").read_text() == "my work"
    assert (tmp_path / "one-updated.ipynb").read_text() == "second"
    assert lab.fill(tmp_path, {"two": "second"}) == [], "the one that was as the book's is known again"


def test_a_notebook_in_another_encoding_is_the_readers_too(tmp_path: Path) -> None:
    lab.fill(tmp_path, {"one": "first"})
    (tmp_path / "one.ipynb").write_bytes(b"\xff\xfem\x00")
    (tmp_path / "one-updated.ipynb").write_bytes(b"\xff\xfe")
    assert len(lab.fill(tmp_path, {"one": "second"})) == 1
    assert (tmp_path / "one.ipynb").read_bytes() == b"\xff\xfem\x00"
    assert (tmp_path / "one-updated-2.ipynb").read_text() == "second"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (['--lab-args="open'], "error: LAB_ARGS '\"open' cannot be read: No closing quotation"),
        (["--folder", "/dev/null/lab"], "error: the notebooks cannot be written: [Errno 20]"),
    ],
)
def test_what_make_lab_cannot_do_is_an_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["lab.py", "--folder", str(tmp_path), "--only-notebooks", *options])
    assert lab.main() == 1
    assert capsys.readouterr().err.startswith(said)


def test_a_notebook_that_was_there_before_is_the_readers(tmp_path: Path) -> None:
    (tmp_path / "one.ipynb").write_text("from somewhere else")
    assert len(lab.fill(tmp_path, {"one": "first"})) == 1
    assert (tmp_path / "one.ipynb").read_text() == "from somewhere else"


@pytest.mark.slow
def test_make_lab_opens_the_notebooks_in_jupyterlab(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"--no-browser --ip=127.0.0.1 --port={port} --IdentityProvider.token=t"
    with subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "lab.py"), "--folder", str(tmp_path), "--lab-args", options],
        env=os.environ
        | {"JUPYTER_CONFIG_DIR": str(tmp_path / "none"), "JUPYTER_DATA_DIR": str(tmp_path / "none")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        try:
            listing = None
            for _ in range(240):
                try:
                    with urllib.request.urlopen(
                        f"http://127.0.0.1:{port}/api/contents/book?token=t", timeout=10
                    ) as reply:
                        listing = json.load(reply)
                        break
                except OSError:
                    if server.poll() is not None:
                        break
                    time.sleep(0.5)
        finally:
            server.terminate()
            said, _ = server.communicate(timeout=60)
    assert listing is not None, said
    assert "02_kernels.ipynb" in [entry["name"] for entry in listing["content"]]


# --- one command each --------------------------------------------------------------------------------------


def test_the_makefile_has_the_promised_targets() -> None:
    text = (ROOT / "Makefile").read_text()
    for target in ("book", "serve", "test", "check", "lint", "lab", "record", "clean"):
        assert re.search(rf"^{target}:.*## \S", text, re.MULTILINE), target


def test_continuous_integration_runs_the_test_command_and_workflows_only_call_make() -> None:
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("exec make test </dev/null")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert [path.name for path in workflows] == ["ci.yml", "pages.yml"]
    for path in workflows:
        jobs = yaml.safe_load(path.read_text())["jobs"]
        commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
        assert commands
        assert [
            line for line in commands if not re.fullmatch(r"make [a-z]+( [A-Z_]+=\S+)*|\.ci/run", line)
        ] == []


def test_publishing_refuses_when_the_recordings_do_not_check() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "pages.yml").read_text())["jobs"]
    commands = [step.get("run", step.get("uses", "")) for job in jobs.values() for step in job["steps"]]
    checked = commands.index("make record RECORD_ARGS=--check")
    uploaded = next(i for i, line in enumerate(commands) if line.startswith("actions/upload-pages-artifact"))
    assert checked < uploaded
