"""The command line measures, prints and draws, and says what it could not."""

from __future__ import annotations

import dataclasses
import json

import pytest

from gpucourse import cli, measured_roof
from gpucourse.commands import roofline as command
from gpucourse.environment import cuda_available
from gpucourse.measured_roof import Ceiling, MeasuredRoofline

FLOPS = {"fp32": 51e12, "tf32": 400e12, "bf16": 800e12, "fp16": 810e12, "fp64": 60e12}


def measured(precision: str, sustained_s: float = 0.0) -> MeasuredRoofline:
    def row(kind: str, rate: float, seconds: float = 0.0) -> Ceiling:
        return Ceiling(
            kind=kind, what="64 × 64 × 64" if kind == "product" else "1 GB an array", shape=(64, 64, 64),
            amount=rate / 1e3, samples_ms=(0.99, 1.0, 1.01), seconds=seconds,
        )  # fmt: skip

    peak = FLOPS[precision]
    hot = (
        (row("product", 0.9 * peak, sustained_s), row("triad", 4.1e12, sustained_s + 1))
        if sustained_s
        else ()
    )
    return MeasuredRoofline(
        device="NVIDIA Test",
        precision=precision,
        products=(row("product", peak),),
        streams=(row("copy", 4.2e12), row("triad", 4.3e12)),
        sustained=hot,
        conditions="NVIDIA Test, torch 2.11.0",
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    asked: list[tuple[str, float]] = []

    def measure(dtype: str, *, sustained_s: float) -> MeasuredRoofline:
        asked.append((dtype, sustained_s))
        return measured(dtype, sustained_s)

    monkeypatch.setattr(command, "require_cuda", lambda what: None)
    monkeypatch.setattr(command, "measure_roofline", measure)
    return asked


@pytest.mark.skipif(cuda_available(), reason="there is a GPU here")
def test_without_a_gpu_it_fails_and_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["roofline", "--dtype", "bf16"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("gpucourse roofline: this command needs a CUDA device")


def test_the_usual_precisions_are_measured_and_printed_with_every_operation(gpu, capsys) -> None:
    assert cli.main(["roofline"]) == 0
    assert gpu == [("fp32", 0.0), ("tf32", 0.0), ("bf16", 0.0), ("fp16", 0.0)]
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("NVIDIA Test, ") for line in lines) == 4
    (copy, *_) = [line for line in lines if "copy: b = a" in line]
    assert "4,200 GB/s" in copy
    assert "4,158 to 4,242 GB/s" in copy or "4,179 to 4,221 GB/s" in copy
    assert copy.endswith("unavailable")


def test_json_is_for_programs_and_holds_every_sample(gpu, capsys) -> None:
    assert cli.main(["roofline", "--dtype", "bf16", "fp32", "--sustained", "30", "--json"]) == 0
    assert gpu == [("bf16", 30.0), ("fp32", 30.0)]
    said = capsys.readouterr()
    first, second = json.loads(said.out)
    assert (first["precision"], second["precision"]) == ("bf16", "fp32")
    assert first["burst"]["samples_ms"] == [0.99, 1.0, 1.01]
    assert first["sustained"]["seconds"] == 30.0
    assert MeasuredRoofline.from_dict(first) == measured("bf16", 30.0)
    assert said.err == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dtype", "int8"], "invalid choice: 'int8' (choose from"),
        (["--sustained", "-3"], "'-3' is no time in seconds"),
        (["--sustained", "long"], "'long' is no time in seconds"),
        (["--sustained", "inf"], "'inf' is no time in seconds"),
    ],
)
def test_what_is_asked_for_wrongly_exits_with_2_and_says_what_is_known(gpu, capsys, arguments, said) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["roofline", *arguments])
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert said in text
    assert "--dtype" not in arguments or all(known in text for known in measured_roof.PRECISIONS)
    assert gpu == []


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_picture_is_drawn_where_it_is_asked_for(gpu, tmp_path, capsys, ending) -> None:
    path = tmp_path / f"roof.{ending}"
    assert cli.main(["roofline", "--plot", str(path), "--sustained", "1"]) == 0
    assert path.stat().st_size > 2000
    assert path.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending])


@pytest.mark.parametrize("name", ["nowhere/roof.png", "roof.xyz", "roof", "."])
def test_a_picture_that_cannot_be_is_refused_before_anything_is_measured(
    gpu, tmp_path, monkeypatch, capsys, name
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["roofline", "--dtype", "bf16", "--plot", name])
    assert stopped.value.code == 2
    assert "argument --plot: " in capsys.readouterr().err
    assert gpu == []
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_fails_when_it_is_written_costs_no_number(gpu, tmp_path, capsys) -> None:
    path = tmp_path / "roof.png"
    path.symlink_to("/dev/full")
    assert cli.main(["roofline", "--dtype", "bf16", "--plot", str(path)]) == 1
    said = capsys.readouterr()
    assert "burst 800.0 TFLOP/s" in said.out
    assert f"could not draw into {path}" in said.err
    assert "the numbers above are whole" in said.err


def test_a_precision_named_twice_is_measured_once(gpu, capsys) -> None:
    assert cli.main(["roofline", "--dtype", "bf16", "bf16"]) == 0
    assert gpu == [("bf16", 0.0)]


def test_an_error_of_the_drivers_is_told_and_the_other_precisions_go_on(gpu, monkeypatch, capsys) -> None:
    def measure(dtype: str, *, sustained_s: float) -> MeasuredRoofline:
        if dtype == "tf32":
            raise RuntimeError("CUDA out of memory. Tried to allocate\nand more")
        return measured(dtype)

    monkeypatch.setattr(command, "measure_roofline", measure)
    assert cli.main(["roofline"]) == 1
    said = capsys.readouterr()
    assert said.err == "gpucourse roofline: tf32: CUDA out of memory. Tried to allocate\n"
    assert said.out.count("NVIDIA Test, ") >= 3


def test_a_precision_that_the_gpu_lacks_is_named_and_fails_only_where_it_was_asked_for(
    gpu, monkeypatch, capsys
) -> None:
    def measure(dtype: str, *, sustained_s: float) -> MeasuredRoofline:
        if dtype == "bf16":
            raise ValueError("NVIDIA Test has no bf16 arithmetic; measure fp16")
        return measured(dtype)

    monkeypatch.setattr(command, "measure_roofline", measure)
    assert cli.main(["roofline"]) == 0
    said = capsys.readouterr()
    assert "bf16: NVIDIA Test has no bf16 arithmetic; measure fp16" in said.err
    assert said.out.count("NVIDIA Test, ") >= 3
    assert cli.main(["roofline", "--dtype", "bf16", "fp16"]) == 1
    assert "NVIDIA Test, fp16; burst" in capsys.readouterr().out
    assert cli.main(["roofline", "--dtype", "bf16"]) == 1


def test_the_picture_names_each_roof_with_its_ceiling_and_keeps_names_apart() -> None:
    fig = command.draw([measured("bf16", 30.0), measured("fp16"), measured("fp32")])
    (axes,) = fig.axes
    names = [text.get_text().strip() for text in axes.texts]
    assert names == ["fp16: 810", "bf16: 800, after 30 s 720", "fp32: 51"]
    assert [line.get_linestyle() for line in axes.lines] == ["-", "--", "-", "-"]
    assert "NVIDIA Test: 4,300 GB/s (triad), measured" in (axes.get_title(), axes.get_title(loc="left"))
    assert axes.get_xlabel() == "intensity, flop/byte"
    fig.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    for place, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[place + 1 :])


def test_the_roof_in_the_picture_bends_at_its_ridge() -> None:
    found = dataclasses.replace(measured("bf16"), streams=measured("bf16").streams[:1])
    (line,) = command.draw([found]).axes[0].lines
    (_, ridge, _), (low, top, end) = line.get_data()
    assert ridge == pytest.approx(800e12 / 4.2e12)
    assert top == end == pytest.approx(800)
    assert low < top
