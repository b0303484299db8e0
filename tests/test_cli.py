"""The command line ends in words and a status, whatever becomes of its output or of the person at the keyboard."""

from __future__ import annotations

import functools
import io
import os
import signal
import subprocess
import sys
import time

import pytest

from gpucourse import cli
from gpucourse.environment import cuda_available

HOST = ["time", "x.sum()", "--setup", "x = 1\nimport torch\nx = torch.ones(3)", "--device", "cpu"]
SHORT = ["--max-seconds", "0.02"]


def start(*arguments: str, **options: object) -> subprocess.Popen[bytes]:
    # As a terminal or a pipe would have it: not unbuffered.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    environment |= dict(options.pop("env", {}))  # type: ignore[call-overload]
    return subprocess.Popen(
        [sys.executable, "-m", "gpucourse.cli", *arguments],
        stderr=subprocess.PIPE,
        env=environment,
        **options,  # type: ignore[call-overload]
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["doctor"], ["--help"]])
def test_a_reader_that_leaves_early_ends_it_without_a_word(arguments, unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    env = {"PYTHONUNBUFFERED": unbuffered} if unbuffered else {}
    with start(*arguments, stdout=writing, env=env) as child:
        os.close(writing)
        assert child.communicate(timeout=120)[1] == b""
    # With a written-through stream argparse itself swallows the error of its help.
    assert child.returncode == 141 or (arguments == ["--help"] and unbuffered and child.returncode == 0)


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_full_disk_is_told_in_a_line(extra):
    with open("/dev/full", "wb") as full, start(*HOST, *SHORT, *extra, stdout=full) as child:
        said = child.communicate(timeout=120)[1].decode()
    assert said == "gpucourse: the output could not be written: No space left on device\n"
    assert child.returncode == 1


def test_an_interrupt_from_the_keyboard_is_a_word_and_130():
    setup = "import sys, time\nprint('ready', flush=True)\ntime.sleep(60)"
    # A shell starts what runs in the background with the interrupt ignored, and children inherit that.
    heeded = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    arguments = ("time", "x", "--setup", setup, "--device", "cpu")
    with start(*arguments, stdout=subprocess.PIPE, preexec_fn=heeded) as child:
        assert child.stderr is not None
        assert child.stderr.readline() == b"ready\n"
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        out, said = child.communicate(timeout=60)
    assert (out, said) == (b"", b"gpucourse: interrupted\n")
    assert child.returncode == 130


def test_an_encoding_without_the_letter_costs_the_letter_and_no_result():
    with start(*HOST, *SHORT, stdout=subprocess.PIPE, env={"PYTHONIOENCODING": "ascii"}) as child:
        out, said = child.communicate(timeout=120)
    assert out.startswith(b"host time ")
    assert (said, child.returncode) == (b"", 0)


def test_output_that_the_shell_has_closed_fails_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main([*HOST, *SHORT, "--plot", str(tmp_path / "samples.png")]) == 0
    assert (tmp_path / "samples.png").stat().st_size > 2000


def test_an_error_about_a_file_of_the_commands_own_is_not_called_the_outputs(monkeypatch):
    def fails() -> list[str]:
        raise FileNotFoundError(2, "No such file or directory", "missing.md")

    monkeypatch.setattr(cli, "doctor_lines", fails)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(FileNotFoundError, match=r"missing\.md"):
        cli.main(["doctor"])


def test_the_help_says_what_each_command_is_for_before_it_lists_them(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    before = capsys.readouterr().out.partition("positional")[0]
    for word in ("machine", "time a snippet", "roofline", "record"):
        assert word in " ".join(before.split())


@pytest.mark.skipif(cuda_available(), reason="there is a GPU here")
@pytest.mark.parametrize("arguments", [["time", "1"], ["roofline"], ["record"]])
def test_an_error_names_its_command_once(arguments, capsys):
    assert cli.main(arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"gpucourse {arguments[0]}: this command needs a CUDA device: ")
    assert said.count(f"gpucourse {arguments[0]}") == 1
