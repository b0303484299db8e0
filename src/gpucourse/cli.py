"""The command ``gpucourse``: doctor, time, roofline, predict and record."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gpucourse import __version__, recording
from gpucourse.commands import predict as predict_command
from gpucourse.commands import roofline as roofline_command
from gpucourse.commands import time as time_command
from gpucourse.environment import Environment, NoGPUError, _torch_state, require_cuda

__all__ = ["doctor_lines", "main"]

BOOK_CAP_GB = 24
DESCRIPTION = (
    "Say what this machine can do, time a snippet of torch, measure this GPU's roofline, predict a training step's "
    "memory without a GPU, and record the book's measurements."
)


def doctor_lines() -> list[str]:
    """Say, a line each, what this machine is and what of the book runs live on it.

    Returns
    -------
    list of str
        "label: finding" lines; the last says what will be live and what replayed.
    """
    environment = Environment.capture()
    lines = [f"gpucourse: {__version__}", f"Python: {environment.python} on {environment.platform}"]
    reason = _torch_state()
    lines.append(f"torch: {environment.torch or reason.removeprefix('torch ').removeprefix('is ')}")
    if reason:
        lines.append(f"GPU: none to use ({reason})")
    else:
        lines += _gpu_lines(environment)
    widgets = importlib.util.find_spec("ipywidgets") is not None
    lines.append(f"sliders: ipywidgets is {'installed' if widgets else 'not installed, so none will show'}")
    count, device = len(recording.names()), recording.BOOK_DEVICE
    if reason:
        lines.append(f"measurements: replayed, each saying so ({count} recordings of {device} are here)")
    else:
        lines.append(
            "measurements: live on this GPU; what needs more memory than is free is replayed and says why"
        )
    return lines


def _gpu_lines(environment: Environment) -> list[str]:
    import torch

    from gpucourse import hardware

    free, total = torch.cuda.mem_get_info()
    facts = [f"compute capability {environment.capability}", f"{environment.multiprocessors} multiprocessors"]
    if environment.l2_bytes:
        facts.append(f"{environment.l2_bytes / 2**20:.0f} MiB of L2")
    cap = min(BOOK_CAP_GB, 0.9 * free / 1e9)
    record = hardware.find(environment.gpu or "")
    sheet = "on record" if record else "no record: what needs a datasheet figure says unavailable"
    return [
        f"GPU: {environment.gpu}, {', '.join(facts)}",
        f"driver: {environment.driver or 'unavailable'}; CUDA of torch: {environment.cuda}",
        f"memory: {free / 1e9:.1f} of {total / 1e9:.1f} GB free; the night's cap here is {cap:.1f} GB",
        f"bf16: {'yes' if torch.cuda.is_bf16_supported(including_emulation=False) else 'no, fp16 stands in'}",
        f"datasheet: {sheet}",
        f"triton: {'installed' if importlib.util.find_spec('triton') else 'not installed'}",
    ]


def _doctor(_: argparse.Namespace) -> int:
    print("\n".join(doctor_lines()))
    return 0


def _record(options: argparse.Namespace) -> int:
    from gpucourse import recorder

    root = options.root
    try:
        if not options.check:
            require_cuda("this command")  # before the chapters are read, which takes seconds
        pages = recorder.find_pages(root)
        if options.check:
            problems = recorder.check_recordings(root)
            print("\n".join(problems) or "every recording is there, whole, and belongs to a chapter")
            for note in recorder.unchecked_recordings(root):
                print(f"note: {note}")
            return 1 if problems else 0
        if options.pages:
            wanted = {path.resolve() for path in options.pages}
            unknown = wanted - {page.path.resolve() for page in pages}
            if unknown:
                known = ", ".join(str(page.path) for page in pages) or "none"
                print(f"no recorded function in {', '.join(map(str, sorted(unknown)))}; pages: {known}")
                return 2
            pages = [page for page in pages if page.path.resolve() in wanted]
        for page in pages:
            print(f"{page.path}: {', '.join(page.recorded)} …", flush=True)
            seconds = recorder.record_page(page, root)
            print(f"{page.path}: recorded in {seconds:.0f} s", flush=True)
    except (recorder.RecordPageError, NoGPUError) as error:
        print(f"gpucourse record: {error}", file=sys.stderr)
        return 1
    return 0


def _run(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Run the command that was asked for, with all that it printed on its way before the status is given."""
    try:
        options = parser.parse_args(arguments)
        return int(options.run(options))
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()  # what cannot be written shows here, not when Python has ended


def _write_no_more() -> None:
    """Let what is still in the buffer go nowhere: Python would try again when it ends, and complain."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns
    -------
    int
        The exit status: 0 done, 1 failed, 2 asked for wrongly, 130 interrupted from the keyboard, 141 the reader of
        the output left before its end (as the shell says it of a program that a closed pipe ends).
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # an encoding without µ costs the letter, no result
    parser = argparse.ArgumentParser(prog="gpucourse", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    doctor = commands.add_parser(
        "doctor", help="say what this machine can do, what will be live, what replayed"
    )
    doctor.set_defaults(run=_doctor)
    record = commands.add_parser("record", help="run the chapters on this GPU and keep their measurements")
    record.add_argument(
        "pages", nargs="*", type=Path, help="chapters to record; all that measure, by default"
    )
    record.add_argument("--root", type=Path, default=Path(), help="the book's folder (default: this one)")
    record.add_argument(
        "--check", action="store_true", help="only say which recordings are missing or broken"
    )
    record.set_defaults(run=_record)
    predict_command.add(commands)
    roofline_command.add(commands)
    time_command.add(commands)
    try:
        return _run(parser, arguments)
    except KeyboardInterrupt:
        print("gpucourse: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _write_no_more()
        return 141
    except OSError as error:
        if error.filename is not None:  # a file of the command's own, not the output
            raise
        _write_no_more()
        print(f"gpucourse: the output could not be written: {error.strerror or error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
