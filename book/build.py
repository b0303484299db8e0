"""Build the book: ``make book``, or ``python book/build.py`` in the project's environment.

The site in ``_build/html`` is either what the sources say now or absent:

* Nothing is done where no input has changed since the last good build.
* A page's executed outputs are kept by its code. They are all thrown away when something else that they come
  from has changed: the package, a recording, the environment, the kind of machine.
* Pages are always rendered anew and from nothing. That takes seconds, and no page keeps an old title in its
  navigation or an old warning in the dark.
* Warnings and failing cells end the build with exit status 1, and the site of the last good build is removed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

#: What an executed cell's output depends on besides its page.
CODE_INPUTS = ("src", "requirements.txt", "book/build.py")
#: What else the site is made of.
SITE_INPUTS = (
    "book",
    "labs",
    "benchmarks",
    "_config.yml",
    "_toc.yml",
    "CHANGELOG.md",
    "LICENSE",
    "LICENSE-TEXT",
)
#: Settings of the person who builds that must not reach the chapters' kernels.
FOREIGN_VARIABLES = ("JUPYTER", "IPYTHON", "PYTHON", "MATPLOTLIBRC", "MPL", "SPHINX", "GPUCOURSE_RECORD")
KEPT_VARIABLES = ("GPUCOURSE_RECORDINGS",)
#: A line of Jupyter Book's log that says what is wrong: a warning, or the last line of a traceback.
FAULT = re.compile(r"(.*\b(WARNING|ERROR|CRITICAL)|[\w.]*(Error|Exception|Interrupt)): \S")


class BuildError(Exception):
    """The book cannot be built; the message says why and what to do."""


def input_files(root: Path, inputs: tuple[str, ...]) -> Iterator[Path]:
    """Yield every file below the named inputs, in a fixed order; compiled and fetched files are none."""
    for name in inputs:
        top = root / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            inside = path.relative_to(root)
            fetched = inside.parts[:2] == ("book", "vendor") and inside.name != "stamp"
            unimportant = "__pycache__" in inside.parts or ".ipynb_checkpoints" in inside.parts
            if path.is_file() and not fetched and not unimportant:
                yield path


def digest(root: Path, inputs: tuple[str, ...], extra: object = None) -> str:
    """Return one checksum over names and contents of the inputs, and over ``extra``."""
    total = hashlib.sha256(repr(extra).encode())
    for path in input_files(root, inputs):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return total.hexdigest()


def machine_facts() -> list[object]:
    """Say what of the machine and the caller's settings shows in a page: live or replayed, and from where."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("GPUCOURSE_")}
    gpu = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [sys.version, sys.prefix, sorted(settings.items()), gpu, visible]


def input_digests(root: Path) -> dict[str, str]:
    """Return the checksums that decide what is to be done: of the code, and of the rest of the site."""
    return {"code": digest(root, CODE_INPUTS, machine_facts()), "site": digest(root, SITE_INPUTS)}


def kernel_environment(root: Path, scratch: Path) -> dict[str, str]:
    """Return the environment that the build and its kernels run in.

    The chapters run with this very Python and this tree's package, whatever kernels, start-up files and
    settings the person who builds has.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT_VARIABLES or not name.startswith(FOREIGN_VARIABLES)
    }
    own = scratch / "home"
    return kept | {
        "PYTHONPATH": str(root / "src"),
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "JUPYTER_PREFER_ENV_PATH": "1",
        "JUPYTER_PLATFORM_DIRS": "1",
        "JUPYTER_DATA_DIR": str(own / "jupyter-data"),
        "JUPYTER_CONFIG_DIR": str(own / "jupyter-config"),
        "JUPYTER_RUNTIME_DIR": str(own / "jupyter-run"),
        "IPYTHONDIR": str(own / "ipython"),
        "MPLCONFIGDIR": str(own / "matplotlib"),
    }


def warm_up_fonts(environment: dict[str, str]) -> None:
    """Let matplotlib look for fonts before a cell does: it announces the search on stderr, once a machine."""
    command = [sys.executable, "-c", "import matplotlib.font_manager"]
    subprocess.run(command, env=environment, check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run_jupyter_book(root: Path, scratch: Path, environment: dict[str, str], lock: int) -> list[str]:
    """Render the whole book into ``scratch``; return what is wrong with it, an empty list if nothing.

    Jupyter Book holds the lock (a file descriptor), too: where this process is killed, it goes on for a while, and
    the next build must not write beside it.
    """
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", str(root)]
    command += ["--path-output", str(scratch), "-W", "-n", "--keep-going"]
    wrong: list[str] = []
    with subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=(lock,),
    ) as process:
        assert process.stdout is not None
        echo = True
        for line in process.stdout:
            # What follows is Jupyter Book's advice to open the pages where it left them.
            echo = echo and not line.startswith("The HTML pages are in")
            sys.stdout.write(line if echo else "")
            plain = re.sub(r"\x1b\[[0-9;]*m", "", line).strip()
            if FAULT.match(plain) and plain not in wrong:
                wrong.append(plain)
        sys.stdout.flush()
    if process.returncode != 0:
        return wrong or [f"Jupyter Book ended with exit status {process.returncode}"]
    return []


def not_yet_measured(site: Path) -> list[str]:
    """List the figures that a page shows as not yet measured, as "page: reason"."""
    found = []
    for page in sorted(site.rglob("*.html")):
        for reason in re.findall(r"not yet measured: ([^<]+)<", page.read_text(encoding="utf-8")):
            found.append(f"{page.relative_to(site).as_posix()}: {reason}")
    return found


def publish(rendered: Path, site: Path) -> None:
    """Put a copy of the rendered site in place, whole.

    The theme's source maps, a quarter of the site, serve only those who mend the theme.
    """
    new = site.with_name(".html-new")
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(rendered, new, ignore=shutil.ignore_patterns("*.map"))
    shutil.rmtree(site, ignore_errors=True)
    new.rename(site)


def remembered(state: Path) -> object:
    """Return the checksums of the last good build; None where there are none, or a full disk cut them short."""
    try:
        return json.loads(state.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def build(root: Path, *, force: bool = False) -> bool:
    """Build the book of the tree ``root``; return whether there was anything to do.

    Raises
    ------
    BuildError
        The book cannot be built. ``_build/html`` is gone then.
    """
    output = root / "_build"
    site, state, scratch = output / "html", output / "state.json", output / "work"
    output.mkdir(exist_ok=True)
    with open(output / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # two builds of one tree would write over each other
            print("another build of this tree is running; waiting for its end", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        digests = input_digests(root)
        if not force and remembered(state) == digests and (site / "index.html").is_file():
            return False
        try:
            state.unlink(missing_ok=True)
            if not (root / "book" / "vendor" / "stamp").is_file():
                raise BuildError("book/vendor has no scripts: run `make book`, which fetches them first")
            rendered = render(root, scratch, digests["code"], lock.fileno(), force=force)
            publish(rendered, site)
        except BaseException:
            shutil.rmtree(site, ignore_errors=True)
            raise
        if input_digests(root) == digests:
            state.write_text(json.dumps(digests) + "\n")
        else:
            (scratch / "executed-with").unlink()
            print("note: a source changed while the book was being built; the next build starts afresh")
    for line in not_yet_measured(site):
        print(f"not yet measured, and not to be published: {line}")
    return True


def render(root: Path, scratch: Path, code: str, lock: int, *, force: bool) -> Path:
    """Render into ``scratch`` and return the pages' folder; executed pages of the same code are reused."""
    inner = scratch / "_build"
    executed, key = inner / ".jupyter_cache", scratch / "executed-with"
    if force or not key.is_file() or key.read_text() != code:
        shutil.rmtree(executed, ignore_errors=True)
    for path in inner.iterdir() if inner.is_dir() else []:
        if path != executed:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    scratch.mkdir(parents=True, exist_ok=True)
    key.write_text(code)
    environment = kernel_environment(root, scratch)
    warm_up_fonts(environment)
    wrong = run_jupyter_book(root, scratch, environment, lock)
    if wrong:
        listed = "\n".join(f"  {line}" for line in wrong[:40])
        raise BuildError(f"the book has {len(wrong)} fault(s); the full text is above\n{listed}")
    return inner / "html"


def main() -> int:
    """Build, and say in one line what happened."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--force", action="store_true", help="build anew, executing every page")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    start = time.monotonic()
    try:
        done = build(root, force=arguments.force)
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        if not (root / "_build" / "html").exists():
            print("No site: _build/html was removed, for it would be out of date.", file=sys.stderr)
        return 1
    seconds = time.monotonic() - start
    site = root / "_build" / "html" / "index.html"
    print(f"built in {seconds:.0f} s: {site}" if done else f"nothing has changed: {site}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
