"""Make the project's environment, ``.venv``, or do nothing if it is there: the first step of every make target.

The environment is built under another name and renamed when it is complete, so that ``.venv`` is never half
made: interrupt this at any moment, and the old environment is whole or there is none. It is made anew when
``requirements.txt``, the Python or the place of the tree changes. The package itself is installed editable; its
metadata is renewed in place when the part of ``pyproject.toml`` that describes it changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path


class SetupError(Exception):
    """The environment could not be made; the message says which step failed."""


def environment_stamp(root: Path) -> str:
    """Return what a complete environment of this tree says of itself."""
    facts = [sys.version, str(root), (root / "requirements.txt").read_text(encoding="utf-8")]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def package_stamp(root: Path) -> str:
    """Return a checksum of what the installed metadata of the package comes from."""
    data = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    facts = [data.get("build-system"), data.get("project"), data.get("tool", {}).get("hatch")]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def says(file: Path, stamp: str) -> bool:
    """Tell whether a stamp file holds exactly this stamp."""
    return file.is_file() and file.read_text(encoding="utf-8").strip() == stamp


def runs(final: Path) -> bool:
    """Tell whether the environment's Python is there; its stamp may outlive it."""
    return os.access(final / "bin" / "python", os.X_OK)


def remove_abandoned(root: Path) -> None:
    """Remove the half-made environments of makes that were killed, 2 GB each; call it with the lock held."""
    for left in (root / "_build").glob("environment-*"):
        shutil.rmtree(left, ignore_errors=True)


def run(step: str, command: list[str], root: Path) -> None:
    """Run one step; its output is shown."""
    print(f"environment: {step}", flush=True)
    if subprocess.run(command, cwd=root, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise SetupError(
            f"{step} failed; the reason is above. Nothing was changed: mend it and run make again."
        )


def rewrite_paths(folder: Path, final: Path) -> None:
    """Make the scripts of an environment name the place that it will be moved to.

    ``venv`` and pip write the environment's own path into its scripts. Only files that are text and hold that
    path are touched.
    """
    old, new = os.fsencode(folder), os.fsencode(final)
    for path in [folder / "pyvenv.cfg", *(folder / "bin").iterdir()]:
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            if old in content and b"\0" not in content:
                path.write_bytes(content.replace(old, new))


def make(root: Path, final: Path) -> None:
    """Build the environment beside its place and move it there."""
    # Longer than the final path: pip writes scripts of another kind once a path is long, and none may become
    # so only after the move.
    work = Path(tempfile.mkdtemp(prefix="environment-", dir=root / "_build"))
    new = work / "environment"
    try:
        run(f"making one with {sys.executable}", [sys.executable, "-m", "venv", str(new)], root)
        pip = [str(new / "bin" / "python"), "-m", "pip", "install", "--no-input", "--quiet"]
        requirements = ["--disable-pip-version-check", "-r", str(root / "requirements.txt")]
        run("installing requirements.txt (a minute or two)", [*pip, *requirements], root)
        rewrite_paths(new, final)
        (new / "stamp").write_text(environment_stamp(root) + "\n", encoding="utf-8")
        if final.exists():
            final.rename(work / "old")
        new.rename(final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def install_package(root: Path, final: Path) -> None:
    """Install the package of this tree, editable, with the environment's own build tools."""
    marker = final / "package-stamp"
    marker.unlink(missing_ok=True)
    command = [str(final / "bin" / "python"), "-m", "pip", "install", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--no-deps", "--no-build-isolation", "-e", str(root)]
    run("installing the package, editable", command, root)
    marker.write_text(package_stamp(root) + "\n", encoding="utf-8")


def main() -> int:
    """Make whatever is missing."""
    root = Path(__file__).resolve().parents[1]
    final = root / ".venv"
    if sys.version_info >= (3, 14):
        print(
            "note: requirements.txt is known to work on Python 3.11 to 3.13; trying a newer one", flush=True
        )
    try:
        (root / "_build").mkdir(exist_ok=True)
        with open(root / "_build" / ".environment-lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two makes at once: the second waits and finds it done
            remove_abandoned(root)
            if not (runs(final) and says(final / "stamp", environment_stamp(root))):
                make(root, final)
            if not says(final / "package-stamp", package_stamp(root)):
                install_package(root, final)
    except (SetupError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
