"""The grid of predictions is the predictor's own: random points are predicted again, a stale file is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import shlex
from importlib import resources
from pathlib import Path

import pytest
import torch

from gpucourse import cli, fit_grid, hardware
from gpucourse.fit_grid import (
    CHECKPOINTING,
    LAYERS,
    LINES,
    MICROBATCHES,
    PRECISIONS,
    RESERVES,
    TOKENS,
    WIDTHS,
    FitGrid,
    FitGridError,
    Point,
    Shape,
    StaleFitGridError,
    load_grid,
    read_grid,
)
from gpucourse.fit_grid_prediction import predict_point, predict_shape, written
from gpucourse.step_memory import METHOD_VERSION

NAMES = ("layers", "width", "tokens", "precision", "checkpointing")
SIZES_GB = sorted({record.memory_gb for record in hardware.DEVICES})


def same_release() -> bool:
    return torch.__version__.split(".")[:2] == load_grid().torch_version.split(".")[:2]


only_of_its_release = pytest.mark.skipif(
    not same_release(), reason=f"the grid speaks for torch {load_grid().torch_version}, and here is another"
)


def differences(stored: Point, again: Point) -> list[str]:
    """Name what differs; a byte is told apart from a byte."""
    fields = [field.name for field in dataclasses.fields(Point)]
    return [name for name in fields if getattr(stored, name) != getattr(again, name)]


def drawn(rng: random.Random, shapes: list[Shape]) -> tuple[Shape, Point]:
    shape = rng.choice(shapes)
    return shape, rng.choice(shape.points)


def again(shape: Shape, microbatch: int) -> Point:
    return predict_point(microbatch, **{name: getattr(shape, name) for name in NAMES})


# ------------------------------------------------------------------------------------------ the predictor's numbers


@only_of_its_release
def test_points_drawn_at_random_are_predicted_again_to_the_byte() -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown where it fails
    rng = random.Random(seed)
    shapes = [shape for shape in load_grid().shapes if shape.layers < max(LAYERS)]  # those that are quick
    for _ in range(3):
        shape, point = drawn(rng, shapes)
        assert differences(point, again(shape, point.microbatch)) == [], (shape.target(), point.microbatch)


@only_of_its_release
@pytest.mark.slow
def test_points_of_the_deepest_shapes_are_predicted_again_to_the_byte() -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(6):
        shape, point = drawn(rng, [shape for shape in load_grid().shapes if shape.layers == max(LAYERS)])
        assert differences(point, again(shape, point.microbatch)) == [], (shape.target(), point.microbatch)


def test_a_point_that_is_off_by_one_rounding_is_told() -> None:
    point = load_grid().shapes[0].points[0]
    off = dataclasses.replace(point, allocated_bytes=point.allocated_bytes + 512)
    assert differences(point, off) == ["allocated_bytes"]


@only_of_its_release
def test_the_largest_microbatch_by_the_line_is_the_predictors() -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    shape = rng.choice([shape for shape in load_grid().shapes if shape.layers == min(LAYERS)])
    for size in (16.0, 24.0):
        found = shape.largest(size, 0.1)
        assert found is not None
        assert again(shape, found.least).allocated_bytes <= size * 0.9e9, (shape.target(), size)
        assert again(shape, found.most + 1).allocated_bytes > size * 0.9e9, (shape.target(), size)


@only_of_its_release
def test_the_command_that_the_lab_shows_gives_the_labs_number(capsys: pytest.CaptureFixture[str]) -> None:
    for checkpointing in CHECKPOINTING:
        shape = load_grid().shape(
            layers=6, width=768, tokens=1024, precision="bf16", checkpointing=checkpointing
        )
        command = shlex.split(shape.command(4, "H200", 0.1))
        assert command[:2] == ["gpucourse", "predict"]
        assert cli.main([*command[1:], "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["prediction"]["allocated_bytes"] == shape.point(4).allocated_bytes
        assert found["device"]["reserve"] == 0.1
        assert found["device"]["fits"] is True


# --------------------------------------------------------------------------------------------------------- the file


def stored() -> str:
    return (resources.files("gpucourse") / "fit_grid.json").read_text(encoding="utf-8")


def test_every_shape_is_there_once_at_every_microbatch() -> None:
    found = [tuple(getattr(shape, name) for name in NAMES) for shape in load_grid().shapes]
    assert found == list(itertools.product(LAYERS, WIDTHS, TOKENS, PRECISIONS, CHECKPOINTING))
    for shape in load_grid().shapes:
        assert tuple(p.microbatch for p in shape.points)[: len(MICROBATCHES)] == MICROBATCHES


def test_the_file_says_what_made_it_and_is_small() -> None:
    given = json.loads(stored())
    assert given["method_version"] == METHOD_VERSION
    assert given["made_by"] == "python -m gpucourse.fit_grid_prediction"
    assert given["torch"].startswith("2.")
    assert len(given["date"]) == 10
    assert len(stored()) < 400_000
    assert f"step memory's method {METHOD_VERSION}) for torch {given['torch']}" in load_grid().line()


def test_what_is_written_is_read_back() -> None:
    assert read_grid(written(load_grid()), method_version=METHOD_VERSION) == load_grid()
    assert written(load_grid()) == stored()


def test_a_grid_of_another_method_is_stale() -> None:
    with pytest.raises(
        StaleFitGridError,
        match=rf"made by method {METHOD_VERSION} of step_memory, and here is {METHOD_VERSION + 1}: .* stale. Make it "
        r"anew: python -m gpucourse.fit_grid_prediction",
    ):
        read_grid(stored(), method_version=METHOD_VERSION + 1)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: text[:1000], "cannot be read"),
        (lambda text: "[]", "cannot be read"),
        (lambda text: text.replace('"format": 1', '"format": 7'), "has another format"),
        (lambda text: text.replace('"gradients"', '"gradient"'), "has another format"),
        (lambda text: text.replace('"date"', '"day"'), "cannot be read"),
    ],
)
def test_a_file_that_is_no_grid_is_refused(spoil: object, said: str) -> None:
    with pytest.raises(FitGridError, match=said):
        read_grid(spoil(stored()), method_version=METHOD_VERSION)  # type: ignore[operator]


def test_a_byte_that_was_changed_is_found_by_the_sum_of_the_lines() -> None:
    given = json.loads(stored())
    given["shapes"][3]["points"][2][4] += 1
    with pytest.raises(FitGridError, match="the lines at microbatch 4 add up to"):
        read_grid(json.dumps(given), method_version=METHOD_VERSION)


def test_a_shape_and_a_microbatch_that_are_not_there_are_refused_with_what_is() -> None:
    with pytest.raises(
        FitGridError, match=r"no prediction of 7 layers.*the grid has layers \(6, 12, 24\).*gpucourse"
    ):
        load_grid().shape(layers=7, width=768, tokens=1024, precision="fp32", checkpointing=False)
    with pytest.raises(FitGridError, match="no prediction at microbatch 3; there are 1, 2, 4"):
        load_grid().shapes[0].point(3)


# ---------------------------------------------------------------------------------------------- what is made of them


def test_the_lines_lie_within_thirty_megabytes_of_every_prediction_on_them() -> None:
    for shape in load_grid().shapes:
        assert len(shape.on_the_line) >= 3, shape.target()
        assert shape.residual_gb is not None
        assert shape.residual_gb < 0.03, shape.target()


def test_off_the_line_a_peak_is_higher_than_the_line_says() -> None:
    # So a line never promises room where another part of the step is the highest.
    bent = 0
    for shape in load_grid().shapes:
        ledger, low = shape.ledger, shape.on_the_line[0].microbatch
        assert ledger is not None
        for point in shape.points:
            if point.microbatch < low:
                bent += 1
                assert point.allocated_bytes / 1e9 > ledger.total_gb(point.microbatch) - 0.03
    assert bent > 10


def test_the_largest_microbatch_agrees_with_every_prediction() -> None:
    for shape, size, reserve in itertools.product(load_grid().shapes, SIZES_GB, RESERVES):
        found = shape.largest(size, reserve)
        if not reserve:
            assert found is None
            continue
        assert found is not None
        assert found.least <= found.most
        for point in shape.points:
            if point.microbatch <= found.least:
                assert point.fits(size, reserve), (shape.target(), point.microbatch, size)
            if point.microbatch > found.most:
                assert not point.fits(size, reserve), (shape.target(), point.microbatch, size)


def test_more_samples_or_a_smaller_device_never_help() -> None:
    for shape in load_grid().shapes:
        peaks = [point.allocated_bytes for point in shape.points]
        # The allocator's rounding comes and goes with the sizes, where the update has the peak.
        assert all(b > a - 20e6 for a, b in itertools.pairwise(peaks)), shape.target()
        for point, reserve in itertools.product(shape.points, (0.1, 0.2)):
            fits = [point.fits(size, reserve) for size in SIZES_GB]
            assert fits == sorted(fits)


def test_checkpoints_and_bf16_never_cost_memory_where_the_loss_has_the_peak() -> None:
    grid = load_grid()
    for layers, width, tokens in itertools.product(LAYERS, WIDTHS, TOKENS):
        plain, saved = (
            grid.shape(layers=layers, width=width, tokens=tokens, precision="fp32", checkpointing=on).points[
                -1
            ]
            for on in (False, True)
        )
        assert saved.allocated_bytes < plain.allocated_bytes


# ------------------------------------------------------------------------------------------------------- the verdict


def made(microbatch: int, allocated: int, reserved: int = 0, **change: object) -> Point:
    lines = dict.fromkeys(LINES, 0) | {"activations": allocated}
    return Point(
        **(  # type: ignore[arg-type]
            {
                "microbatch": microbatch,
                "step": 2,
                "phase": "backward",
                "operator": "aten.mm",
                "allocated_bytes": allocated,
                "reserved_bytes": reserved or allocated,
                "lines": lines,
            }
            | change
        )
    )


def shape_of(*points: Point) -> Shape:
    return Shape(layers=1, width=64, tokens=8, precision="fp32", checkpointing=False, points=points)


@pytest.mark.parametrize(
    ("allocated", "reserved", "within", "reserve", "verdict"),
    [
        (21_600_000_000, 23_000_000_000, (), 0.1, "fits, 0 B to spare"),
        (21_600_000_512, 23_000_000_000, (), 0.1, "over the budget by 512 B"),
        (20_000_000_000, 25_000_000_000, (24.0,), 0.1, "fits, 1.60 GB to spare"),
        (
            20_000_000_000,
            25_000_000_000,
            (),
            0.1,
            "within the budget, 1.60 GB to spare, and yet it runs out: the room is in pieces",
        ),
        (20_000_000_000, 24_000_000_000, (), 0.0, "fits, 0 B never reserved"),
        (20_000_000_000, 25_000_000_000, (24.0,), 0.0, "fits, once cached segments are given back"),
        (20_000_000_000, 25_000_000_000, (), 0.0, "does not fit: the room is in pieces"),
        (24_500_000_000, 25_000_000_000, (), 0.0, "does not fit, 500.0 MB too much"),
    ],
)
def test_a_verdict_tells_allocated_from_reserved(
    allocated: int, reserved: int, within: tuple[float, ...], reserve: float, verdict: str
) -> None:
    point = made(4, allocated, reserved, runs_within_gb=within)
    assert point.verdict(24.0, reserve) == verdict
    assert point.fits(24.0, reserve) == verdict.startswith(("fits", "within"))


def line(*microbatches: int, off: int = 0) -> list[Point]:
    return [made(m, 10**9 * (2 + m) + off * (-1) ** k) for k, m in enumerate(microbatches)]


@pytest.mark.parametrize(
    ("points", "size", "found", "why"),
    [
        (line(1, 2, 4, 8), 10.0, "7", "by the line through 4 predictions, of allocated memory alone"),
        (line(1, 2, 4, 8), 80.0, "70", "followed beyond 8"),
        (line(1, 2, 4, 8), 1.0, "none", "one sample is over the budget"),
        (line(1, 2, 4, 8), 4.0, "1", "predicted: 1 fits and 2 does not"),
        (line(1, 2, 4, 8, off=10**7), 10.0, "6 to 7", "by the line"),
        (line(1, 8), 8.0, "1 to 7", "1 fits and 8 does not, no line between"),
        (line(1, 8), 24.0, "8", "predicted up to 8"),
    ],
)
def test_the_largest_microbatch_says_how_it_was_found(
    points: list[Point], size: float, found: str, why: str
) -> None:
    largest = shape_of(*points).largest(size, 0.1)
    assert largest is not None
    assert str(largest) == found
    assert why in largest.why


def test_points_of_another_part_of_the_step_are_not_on_the_line() -> None:
    update = [made(m, 9 * 10**9, phase="optimizer", operator="aten._foreach_sqrt") for m in (1, 2, 4)]
    shape = shape_of(*update, *line(8, 16, 32))
    assert [point.microbatch for point in shape.on_the_line] == [8, 16, 32]
    ledger = shape.ledger
    assert ledger is not None
    assert (round(ledger.fixed_gb, 9), round(ledger.activations_gb_per_sample, 9)) == (2, 1)
    assert str(shape.largest(10.0, 0.1)) == "7"
    assert str(shape.largest(9.0, 0.1)) == "none"


def test_a_step_within_the_budget_that_runs_out_in_pieces_is_said_beside_the_largest() -> None:
    points = line(1, 2, 4, 8, 16)
    points[3] = dataclasses.replace(points[3], reserved_bytes=30 * 10**9)
    largest = shape_of(*points).largest(24.0, 0.1)
    assert largest is not None
    assert (
        largest.why
        == "by the line through 5 predictions, followed beyond 16; of allocated memory alone: 8 runs out, in pieces"
    )


@pytest.mark.slow
def test_a_shape_whose_line_begins_late_is_predicted_further() -> None:
    shape = predict_shape((6, 2048, 1024, "bf16", True))
    assert len(shape.on_the_line) >= 3
    assert shape.points[: len(MICROBATCHES)][-1].microbatch == MICROBATCHES[-1]


def test_a_grid_is_plain_data_and_back() -> None:
    grid = FitGrid(
        torch_version="2.13.0", method_version=1, date="2026-12-01", shapes=(shape_of(*line(1, 2, 4)),)
    )
    assert read_grid(json.dumps(grid.as_dict()), method_version=1) == grid
    assert fit_grid.COMMAND in grid.line()


# ------------------------------------------------------------------------------------------------- the page's numbers

PAGE = (Path(__file__).parents[1] / "labs" / "will_it_fit.md").read_text(encoding="utf-8")


def night(precision: str = "fp32", checkpointing: bool = False, **change: int) -> Shape:
    given = {"layers": 12, "width": 768, "tokens": 1024} | change
    return load_grid().shape(**given, precision=precision, checkpointing=checkpointing)


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}"


def says(*parts: str) -> None:
    """Hold that a sentence of the page, with the grid's numbers in it, stands there."""
    sentence = "".join(parts)
    assert sentence in PAGE, sentence


def test_the_page_says_of_bf16_what_the_grid_says() -> None:
    plain, half = night().point(16), night("bf16").point(16)
    says(
        f"the peak goes from {gb(plain.allocated_bytes)} GB to …\n{gb(half.allocated_bytes)} GB, by a quarter"
    )
    says(f"shrink from {gb(plain.lines['activations'])} to {gb(half.lines['activations'])} GB only")
    logits = 16 * 1024 * 50_304
    blocks = [gb(plain.lines["activations"] - 4 * logits), gb(half.lines["activations"] - 6 * logits)]
    says(f"the blocks' part falls from {blocks[0]} to {blocks[1]}, ")
    says(f"its log-softmax twice, {gb(2 * logits)} GB in bf16 and a copy of {gb(4 * logits)} in fp32")
    assert half.lines["temporaries"] == pytest.approx(plain.lines["temporaries"] / 2, rel=0.01)
    assert half.operator != plain.operator
    says(
        f"At 32 rows it is {gb(night('bf16').point(32).allocated_bytes)} GB: the first proposal does not fit."
    )
    assert not night("bf16").point(32).fits(24.0, 0.1)


def test_the_page_says_of_checkpoints_what_the_grid_says() -> None:
    plain, saved = night(), night(checkpointing=True)
    says(f"the activations go from {gb(plain.point(16).lines['activations'])} GB to …\n")
    says(
        f"{gb(saved.point(16).lines['activations'])} GB, and the peak to {gb(saved.point(16).allocated_bytes)}."
    )
    logits, inputs = 4 * 16 * 1024 * 50_304, 12 * 16 * 1024 * 768 * 4
    says(f"What is left is {gb(logits)} GB of log-softmax")
    says(f"and {gb(inputs)} GB of inputs to the twelve blocks")
    assert logits + inputs == pytest.approx(saved.point(16).lines["activations"], rel=0.03)
    at_32 = saved.point(32).allocated_bytes
    says(f"At 32 rows the peak is {gb(at_32)} GB: the second proposal misses by {gb(at_32 - 21.6e9)} GB")
    assert saved.ledger is not None
    says(f"Its ledger says {saved.ledger.activations_gb_per_sample:.3f} GB a sample, ")
    says(f"of which the loss's three tensors are {3 * 4 * 1024 * 50_304 / 1e9:.3f}.")


def test_the_page_says_of_both_what_the_grid_says() -> None:
    both = night("bf16", True).point(32)
    says(
        f"{gb(both.allocated_bytes)} GB allocated, within the budget by {gb(21.6e9 - both.allocated_bytes)} GB, "
    )
    says(f"Read the row *Reserved*: {gb(both.reserved_bytes)} GB, on a device of 24.")
    assert both.fits(24.0, 0.1)
    assert not both.fits(24.0, 0.0)


def test_the_page_says_of_layers_and_tokens_what_the_grid_says() -> None:
    fewer = night(layers=6)
    says(
        f"the largest microbatch goes from {night().largest(24.0, 0.1)} to …\n{fewer.largest(24.0, 0.1)}, not 32."
    )
    assert fewer.ledger is not None
    each = fewer.ledger.activations_gb_per_sample
    says(f"it is {3 * 4 * 1024 * 50_304 / 1e9:.2f} of the {each:.2f} GB that each sample costs")
    longer = night(tokens=2048).point(8)
    says(
        f"the peak goes from {gb(night().point(16).allocated_bytes)} GB to …\n{gb(longer.allocated_bytes)}. "
    )
    more = 1024 * 768 * 4 * 3  # 1,024 positions more: weights and two moments
    assert longer.allocated_bytes - night().point(16).allocated_bytes == pytest.approx(more, rel=0.3)


def test_where_the_line_bends_is_where_the_page_says() -> None:
    saved = night(checkpointing=True)
    assert saved.on_the_line[0].microbatch == 2
    update = saved.point(1)
    assert update.phase == "optimizer"
    assert update.allocated_bytes == pytest.approx(20 * saved.parameters, rel=0.05)
    deep = night(checkpointing=True, layers=24, width=2048)
    assert {deep.point(m).phase for m in (1, 2, 4, 8)} == {"optimizer"}
    assert deep.point(1).allocated_bytes > 24e9
