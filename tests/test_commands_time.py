"""The command line times a snippet, prints, draws, and says what it could not."""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys

import pytest
import torch

from gpucourse import cli
from gpucourse.commands import time as command
from gpucourse.cuda_events import NothingLaunchedError, Timing
from gpucourse.environment import Environment, cuda_available
from gpucourse.streams import OtherStream

HOST = ["--device", "cpu", "--max-seconds", "0.02"]
X = ["--setup", "x = torch.ones(3, 2)"]
MEASURED = Timing(
    samples_ms=(0.339, 0.340, 0.341, 0.345),
    elapsed_ms=0.36,
    host_ms=0.01,
    method="11 calls queued behind a spinning kernel in one event pair",
    l2="warm",
    arguments=({"shape": [2048, 2048], "dtype": "float32"},),
    arguments_changed=False,
    escaped=False,
    device="cuda",
    environment=Environment(gpu="NVIDIA Test", torch="2.11.0", cuda="13.0"),
    clock_mhz=(1980.0, 1965.0),
)


@pytest.fixture
def gpu(monkeypatch):
    """Let the command find a GPU whose timer returns what it is told."""
    answers: list[object] = [MEASURED]
    asked: list[tuple[object, dict]] = []

    def timer(call, *tensors, **options):
        call(*tensors)
        asked.append((tensors, options))
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return answers[-1]

    monkeypatch.setattr(command, "require_cuda", lambda _what: None)
    monkeypatch.setattr(command, "time_cuda", timer)
    return answers, asked


def test_the_host_is_timed_where_it_is_asked_for_and_says_so(capsys):
    assert cli.main(["time", "x.sum()", *X, *HOST]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("host time ")
    assert "no GPU was timed" in said.out
    assert "(3, 2) float32" in said.out
    assert said.err == ""


@pytest.mark.skipif(cuda_available(), reason="there is a GPU here")
def test_without_a_gpu_it_fails_and_says_what_it_needs(capsys):
    assert cli.main(["time", "x.sum()", *X]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("gpucourse time: this command needs a CUDA device")
    assert said.err.endswith("Or time the host with --device cpu.\n")


def test_text_is_for_people_a_fact_a_line(gpu, capsys):
    assert cli.main(["time", "x @ x.t()", *X, "--l2", "cold", "--max-seconds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "device time  340.5 µs a call (the middle half spans 2.25 µs; 4 samples)"
    assert [line.split()[0] for line in lines] == ["device", "elapsed", "method", "tensors", "clock", "on"]
    ((tensors, options),) = gpu[1]
    assert [tuple(t.shape) for t in tensors] == [(3, 2)]
    assert options == {"device": "cuda", "l2": "cold", "max_seconds": 2.0}


def test_what_makes_a_number_unfit_is_printed(gpu, capsys):
    lost = OtherStream(name="stream 0x5 of cuda:0", begins_inside=True, ends_inside=False)
    gpu[0].append(
        dataclasses.replace(
            MEASURED,
            samples_ms=(0.001, 0.004, 0.002, 0.009),
            escaped=True,
            streams=(lost,),
            arguments_changed=True,
            arguments_restored=True,
            clock_mhz=(1980.0, 1200.0),
            remarks=("each call leaves 4.19 MB allocated",),
        )
    )
    assert cli.main(["time", "x.add_(1)", *X]) == 0
    said = capsys.readouterr().out
    for part in (
        "launch-bound",
        "noisy",
        "stream 0x5 of cuda:0 is not waited for",
        "changed its tensors, so its calls met different inputs; they are restored",
        "MHz: throttled",
        "each call leaves 4.19 MB allocated",
    ):
        assert part in said


def test_json_is_for_programs_and_follows_its_schema(gpu, capsys):
    assert cli.main(["time", "x.sum()", *X, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == command.SCHEMA == "gpucourse.time/1"
    assert found["snippet"] == "x.sum()"
    assert found["samples_ms"] == list(MEASURED.samples_ms)
    assert found["environment"]["gpu"] == "NVIDIA Test"
    documented = command.__doc__ or ""
    assert [key for key in found if f"``{key}``" not in documented and key != "schema"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x @@ x"], "the snippet is not Python: line 1: invalid syntax\n  x @@ x\n     ^"),
        (
            ["x", "--setup", "x = 1\ny = (2"],
            "--setup is not Python: line 2: '(' was never closed\n  y = (2\n",
        ),
        (["  "], "the snippet is empty"),
        (["x\0"], "the snippet is not Python"),
    ],
)
def test_a_snippet_that_is_no_python_exits_with_2_and_the_line(gpu, capsys, arguments, said):
    assert cli.main(["time", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert gpu[1] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["x", "--max-seconds", "0"],
        ["x", "--max-seconds", "nan"],
        ["x", "--l2", "hot"],
        ["x", "--device", "tpu"],
        [],
    ],
)
def test_what_is_asked_for_wrongly_exits_with_2(gpu, capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["time", *arguments])
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("snippet", "setup", "said"),
    [
        ("y @ y", "", "the snippet raised NameError: name 'y' is not defined\n  line 1: y @ y"),
        ("x", "x = 3\nx / 0", "--setup raised ZeroDivisionError: division by zero\n  line 2: x / 0"),
        (
            "f()",
            "def f():\n    raise KeyError('deep')",
            "--setup raised KeyError: 'deep'\n  line 2: raise KeyError",
        ),
        ("exit(0)", "", "the snippet raised SystemExit: 0"),
    ],
)
def test_an_error_inside_the_given_code_is_its_own_and_exits_with_1(capsys, snippet, setup, said):
    assert cli.main(["time", snippet, "--setup", setup, *HOST]) == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert said in found.err
    assert "Traceback" not in found.err


def test_an_error_of_the_timers_own_says_it_by_itself(gpu, capsys):
    gpu[0].append(NothingLaunchedError("the call launched nothing on the device"))
    assert cli.main(["time", "x.t()", *X]) == 1
    assert capsys.readouterr().err == "gpucourse time: the call launched nothing on the device\n"


def test_tensors_that_the_snippet_writes_are_put_back(capsys):
    holder = "import torch\nx = torch.zeros(2)\ntorch.kept = x"
    try:
        assert cli.main(["time", "[x.add_(n) for n in (1, 2)]", "--setup", holder, *HOST]) == 0
        assert torch.kept.tolist() == [0, 0]
    finally:
        del torch.kept
    assert "changed its tensors" in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_samples_are_drawn_where_it_is_asked_for(gpu, tmp_path, capsys, ending):
    path = tmp_path / f"samples.{ending}"
    assert cli.main(["time", "x.sum()  # $5", *X, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[ending])
    strip, counts = command.draw(MEASURED, "x.sum()").axes
    assert strip.lines[0].get_ydata() == pytest.approx([339.0, 340.0, 341.0, 345.0])
    assert sum(patch.get_width() for patch in counts.patches) == 4
    assert strip.get_ylabel() == "device time of one call, µs"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere/samples.png", "there is no folder"),
        ("samples.xyz", "ends in no kind of image: "),
        ("samples", "ends in no kind of image: "),
        (".", "names no file"),
        ("", "names no file"),
    ],
)
def test_a_picture_that_cannot_be_is_refused_before_anything_is_measured(
    gpu, tmp_path, monkeypatch, capsys, name, said
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["time", "x.sum()", *X, "--plot", name])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
    assert gpu[1] == []
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_fails_when_it_is_written_costs_no_number(gpu, tmp_path, capsys):
    path = tmp_path / "samples.png"
    path.symlink_to("/dev/full")
    assert cli.main(["time", "x.sum()", *X, "--plot", str(path)]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("device time")
    assert f"could not draw into {path}: No space left on device; the numbers above are whole" in said.err


def test_what_the_code_prints_leaves_the_json_alone(capsys):
    assert cli.main(["time", "print('noise')", "--setup", "print('before')", *HOST, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["snippet"] == "print('noise')"
    assert said.err.startswith("before\nnoise\n")


def test_each_call_begins_with_the_names_as_setup_left_them(capsys):
    # Names that live on from call to call would double the tensor until no memory holds it.
    setup = "import torch\nx = torch.ones(2)\ntorch.sizes = set()"
    try:
        code = "torch.sizes.add(x.numel()); x = torch.cat([x, x]); y = [x.numel() for _ in range(2)]"
        assert cli.main(["time", code, "--setup", setup, *HOST]) == 0
        assert torch.sizes == {2}
    finally:
        del torch.sizes
    assert "(2,) float32" in capsys.readouterr().out


def test_a_snippet_that_defines_a_function_keeps_no_tensor_of_an_earlier_call(capsys):
    setup = "import gc, torch, weakref\ngc.disable()\ntorch.left = weakref.WeakSet()"
    try:
        code = "def f(): return torch.ones(3)\ny = f()\ntorch.left.add(y)"
        assert cli.main(["time", code, "--setup", setup, *HOST]) == 0
        assert len(torch.left) == 0
    finally:
        gc.enable()
        del torch.left


def test_nothing_to_time_is_told_even_where_there_is_text(gpu, capsys):
    assert cli.main(["time", "# x.sum()"]) == 2
    assert "the snippet is empty" in capsys.readouterr().err


def test_an_error_of_the_compilers_later_stages_shows_its_line(gpu, capsys):
    assert cli.main(["time", "x = 1\nreturn x"]) == 2
    assert "line 2: 'return' outside function\n  return x\n  ^" in capsys.readouterr().err


def test_what_is_nested_too_deeply_is_told_in_words(gpu, capsys):
    assert cli.main(["time", "~" * 100_000 + "1"]) == 2
    assert "nested too deeply" in capsys.readouterr().err


def test_one_sample_is_told_as_one_whose_spread_is_unknown(gpu, capsys):
    gpu[0].append(dataclasses.replace(MEASURED, samples_ms=(3.0,)))
    assert cli.main(["time", "x.sum()", *X]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith("a call (one sample, so its spread is unknown: give more --max-seconds)")


def test_a_picture_lies_where_the_command_was_given_and_may_carry_any_sign(gpu, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    setup = f"import os, torch; os.chdir({str(elsewhere)!r}); x = torch.ones(2)"
    assert cli.main(["time", "x.sum()  # 漢字 $\\frac$", "--setup", setup, "--plot", "samples.svg"]) == 0
    assert (tmp_path / "samples.svg").stat().st_size > 2000
    assert list(elsewhere.iterdir()) == []


def test_stragglers_are_counted_and_do_not_squeeze_the_rest():
    samples = (*(0.100 + 0.0001 * n for n in range(40)), 9.0, 12.0)
    strip, counts = command.draw(dataclasses.replace(MEASURED, samples_ms=samples), "").axes
    assert strip.get_ylim()[1] < 150
    assert strip.get_xlabel() == "sample (2 of 42 lie outside)"
    assert sum(patch.get_width() for patch in counts.patches) == 40


def test_one_sample_can_be_drawn():
    fig = command.draw(dataclasses.replace(MEASURED, samples_ms=(1.0,)), "")
    fig.canvas.draw()
    assert len(fig.axes) == 2


def on_the_host(*arguments: str) -> subprocess.CompletedProcess[str]:
    command_line = [sys.executable, "-m", "gpucourse.cli", "time", *arguments]
    return subprocess.run(
        [*command_line, "--device", "cpu", "--max-seconds", "0.01"],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_result_stands_alone_whatever_way_the_snippet_writes():
    loud = "import os, sys; print('a'); sys.stdout.flush(); os.write(1, b'b'); os.system('echo c')"
    done = on_the_host(loud, "--setup", "import os; os.write(1, b'first')", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["snippet"] == loud
    assert done.stderr.startswith("first")
    assert {"a", "bc"} <= set(done.stderr.split())


@pytest.mark.parametrize("raised", ["BaseException('q')", "GeneratorExit('q')", "SystemExit('q')"])
def test_what_is_no_ordinary_error_is_told_in_a_line_too(raised):
    done = on_the_host("1", "--setup", f"raise {raised}")
    assert (done.returncode, done.stdout) == (1, "")
    kind = raised.partition("(")[0]
    assert done.stderr == f"gpucourse time: --setup raised {kind}: q\n  line 1: raise {raised}\n"


def test_an_interrupt_is_an_interrupt():
    done = on_the_host("raise KeyboardInterrupt")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "gpucourse: interrupted\n")
