"""The launch lab without a browser: every state shows the simulator's numbers and draws them to scale."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import ipywidgets
import pytest

from gpucourse.simulator import Kernel, SimulatedDevice
from gpucourse.widgets import ControlError, launch_lab
from tests.test_widgets import StaticPage

COST = "Launch cost (µs)"
KERNELS = (1, 2, 10, 50, 100, 400)
LENGTHS = (0.9, 2.0, 8.0, 16.0, 32.0, 100.0, 1000.0)
WAYS = ("eager", "graph")


@pytest.fixture(autouse=True)
def _no_widgets_left() -> Iterator[None]:
    """Close what a test made: ipywidgets keeps every widget, and looks through all of them for links."""
    yield
    ipywidgets.Widget.close_all()


@pytest.fixture(scope="module")
def lab() -> StaticPage:
    return StaticPage(launch_lab())


def written(us: float) -> str:
    """Write a time with four digits, as the lab does."""
    scaled, unit = (us, "µs") if us < 1000 else (us / 1000, "ms")
    return f"{float(f'{scaled:.4g}'):,.6f}".rstrip("0").rstrip(".") + f" {unit}"


def simulated(kernels: int, kernel_us: float, launch_us: int, way: str) -> SimulatedDevice:
    device = SimulatedDevice(launch_us=float(launch_us))
    for duration_us in [kernel_us] * kernels if way == "eager" else [kernel_us * kernels]:
        device.launch(Kernel(duration_us=duration_us))
    device.synchronize()
    return device


def expected_chain(kernels: int, kernel_us: float, launch_us: int, way: str) -> dict[str, str]:
    """Give the first two columns of the lab's table, from the simulator alone."""
    device = simulated(kernels, kernel_us, launch_us, way)
    launches = [span for span in device.history if span.kind == "launch"]
    ran = [span for span in device.history if span.kind == "kernel"]
    total_us = device.perf_counter_ns() / 1e3
    busy_us = sum(span.end_us - span.start_us for span in ran)
    longest = max(
        k - sum(kernel.end_us <= launch.end_us for kernel in ran[:k]) for k, launch in enumerate(launches, 1)
    )
    table = {
        "Quantity": "Value",
        "Launches": str(len(launches)),
        "Host launches for": written(len(launches) * launch_us),
        "Device works for": written(busy_us),
        "Total": written(total_us),
    }
    if len(ran) > 1:
        table["Pace"] = written(ran[1].start_us - ran[0].start_us)
    return table | {
        "Device idle": f"{float(f'{100 * (total_us - busy_us) / total_us:.3g}'):g} %",
        "Longest queue": str(longest),
        "Bends at": f"{written(launch_us / (kernels if way == 'graph' else 1))} a kernel",
    }


def expected_state(kernels: int, kernel_us: float, launch_us: int, way: str) -> str:
    """Say which state the verdict names."""
    single = way == "graph" or kernels == 1
    work_us = kernel_us * kernels if way == "graph" else kernel_us
    side = (work_us > launch_us) - (work_us < launch_us)
    if single:
        words = ("as long as its work", "shorter than its work", "longer than its work")
        return f"one launch, {words[side]}"
    return ("in balance", "device-bound", "launch-bound")[side]


def set_chain(page: StaticPage, kernels: int, kernel_us: float, launch_us: int, way: str) -> None:
    page.set("Kernels", KERNELS.index(kernels))
    page.set("Kernel length", LENGTHS.index(kernel_us))
    page.set("Launched", WAYS.index(way))
    page.set(COST, launch_us)


def test_the_lab_opens_on_the_hundred_additions() -> None:
    page = StaticPage(launch_lab())
    slider = page.models[page.control(COST)]
    assert (slider["_model_name"], slider["min"], slider["max"], slider["step"], slider["value"]) == (
        "IntSliderModel",
        2,
        40,
        2,
        8,
    )
    assert page.table() == expected_chain(100, 0.9, 8, "eager")
    said = "100 kernels of 0.9 µs, one by one, 8 µs a launch: launch-bound, 800.9 µs, of which the device is "
    assert said in page.text()


@pytest.mark.parametrize("seed", range(60))
def test_any_setting_shows_the_numbers_of_the_simulator(lab: StaticPage, seed: int) -> None:
    rng = random.Random(seed)
    setting = (rng.choice(KERNELS), rng.choice(LENGTHS), rng.randrange(2, 41, 2), rng.choice(WAYS))
    set_chain(lab, *setting)
    assert lab.table() == expected_chain(*setting)
    assert f" {setting[2]} µs a launch: {expected_state(*setting)}, " in lab.text()


def test_every_state_has_its_own_words_and_formula(lab: StaticPage) -> None:
    cases = {
        (100, 0.9, 8, "eager"): ("launch-bound", "100 launches + the last kernel"),
        (100, 32.0, 8, "eager"): ("device-bound", "the first launch + 100 kernels"),
        (100, 8.0, 8, "eager"): ("in balance", "100 launches + the last kernel, or the first launch"),
        (100, 0.9, 8, "graph"): ("one launch, shorter than its work", "one launch + 100 kernels"),
        (1, 0.9, 8, "eager"): ("one launch, longer than its work", "one launch + one kernel"),
    }
    for setting, (state, formula) in cases.items():
        set_chain(lab, *setting)
        assert f": {state}, " in lab.text()
        assert f"\t{formula}" in lab.text()


def test_a_number_of_one_is_written_in_the_singular(lab: StaticPage) -> None:
    set_chain(lab, 1, 2.0, 8, "eager")
    assert "1 kernel of 2 µs, one by one, 8 µs a launch" in lab.text()


# --- the picture ------------------------------------------------------------------------------------------


def leaf_of(page: StaticPage) -> str:
    (leaf,) = (leaf for leaf in page.leaves(page.root) if "<style>" not in leaf)
    return leaf


def blocks(leaf: str, kind: str) -> list[tuple[float, float]]:
    """Give the blocks that a dashed lane of a frame with one launch cost draws: left and right edge, in px."""
    found = re.search(rf"<path class={kind} d=(\S+) (?:stroke-dasharray=([\d.,]+))? ?/>", leaf)
    assert found is not None
    dash = [float(part) for part in found[2].split(",")] if found[2] else None
    drawn = []
    for start, end in re.findall(r"M([\d.]+),[\d.]+H([\d.]+)", found[1]):
        x, stop = float(start), float(end)
        way = 1 if stop >= x else -1
        if dash is None:
            drawn.append((min(x, stop), max(x, stop)))
            continue
        while (stop - x) * way > 0.1:  # less is rounding
            edge = x + way * min(dash[0], abs(stop - x))
            drawn.append((min(x, edge), max(x, edge)))
            x += way * sum(dash)
    return sorted(drawn)


def pitch_px(leaf: str) -> float:
    """Give the distance from one kernel of a drawn lane to the next, in px."""
    (dash,) = re.findall(r"class=k d=\S+ stroke-dasharray=([\d.,]+)", leaf)
    return sum(float(part) for part in dash.split(","))


def frame(kernels: int, kernel_us: float, launch_us: int, way: str) -> str:
    page = StaticPage(
        launch_lab(
            [launch_us, launch_us + 2],
            launch_us,
            kernels=[kernels],
            start_kernels=kernels,
            kernel_us=[kernel_us],
            start_kernel_us=kernel_us,
            ways=[way],  # type: ignore[list-item]
        )
    )
    (one,) = re.findall(r"<g data-c=0>(.*?)</g>", leaf_of(page))
    return str(one)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernels", [1, 2, 6, 10, 100, 400])
@pytest.mark.parametrize(("kernel_us", "launch_us"), [(0.9, 8), (8.0, 8), (32.0, 30), (100.0, 8), (0.9, 40)])
def test_the_blocks_of_both_lanes_stand_where_the_simulators_spans_do(
    kernels: int, kernel_us: float, launch_us: int, way: str
) -> None:
    leaf = frame(kernels, kernel_us, launch_us, way)
    device = simulated(kernels, kernel_us, launch_us, "eager")  # a graph's kernels, each by itself, are below
    spans = {"h": [], "k": []}  # type: dict[str, list[tuple[float, float]]]
    for span in device.history:
        if span.kind in ("launch", "kernel"):
            spans["h" if span.kind == "launch" else "k"].append((span.start_us, span.end_us))
    if way == "graph":
        spans["h"] = [(0.0, float(launch_us))]
        spans["k"] = [(launch_us + k * kernel_us, launch_us + (k + 1) * kernel_us) for k in range(kernels)]
    total_us = spans["k"][-1][1]
    whole = leaf.count("M352,") == 0
    scale = 306 / total_us if whole else pitch_px(leaf) / (spans["k"][1][0] - spans["k"][0][0])
    assert total_us * scale > 280 or whole, "a chain that fits is cut"
    for kind, lane in spans.items():
        drawn = blocks(leaf, kind)
        for left, right in drawn:
            tail = left > 275 and not whole
            begin_us, end_us = (
                (total_us - (352 - x) / scale if tail else (x - 46) / scale) for x in (left, right)
            )
            # Half a pixel for rounding, and for a block that is widened so as to be seen.
            slack_us = 0.6 / scale
            one = any(s[0] - slack_us <= begin_us and end_us <= s[1] + slack_us for s in lane)
            fine = scale * (lane[0][1] - lane[0][0]) < 3  # too fine for seams: a run of them is one bar
            assert one or fine, (kind, begin_us, end_us)
        if whole and scale * (lane[0][1] - lane[0][0]) >= 3:
            assert len(drawn) == len(lane)
        assert drawn[-1][1] == pytest.approx(
            352 - (total_us - lane[-1][1]) * scale
            if whole or (total_us - lane[-1][1]) * scale < 76
            else min(250, 46 + lane[-1][1] * scale),
            abs=0.8,
        )


def test_a_kernel_that_is_shorter_than_its_launch_leaves_a_gap_as_long_as_the_difference() -> None:
    drawn = blocks(frame(100, 2.0, 8, "eager"), "k")
    widths = [right - left for left, right in drawn]
    pitch = drawn[1][0] - drawn[0][0]
    assert widths[0] / pitch == pytest.approx(2 / 8, rel=0.01)
    assert len({round(width, 1) for width in widths}) <= 2


def test_a_longer_chain_says_that_its_middle_is_left_out() -> None:
    for kernels, cut in ((2, False), (400, True)):
        page = StaticPage(launch_lab(kernels=[kernels], start_kernels=kernels))
        assert ("⋯" in page.text()) is cut


# --- size and refusals ------------------------------------------------------------------------------------


def test_models_and_text_stay_small() -> None:
    page = StaticPage(launch_lab())
    assert len(page.named("HTMLModel")) == 20 + 6 * 7 * 2 + 1
    assert sum(len(page.models[key]["value"]) for key in page.named("HTMLModel")) < 900_000


def test_single_values_leave_only_the_slider() -> None:
    page = StaticPage(launch_lab(kernels=[100], kernel_us=[0.9], ways=["graph"]))
    assert page.named("DropdownModel") == []
    assert len(page.named("IntSliderModel")) == 1
    assert "as one CUDA graph" in page.text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"start": 7}, r"starts at 7, which is none of its values \(2 … 40\)"),
        ({"launch_us": [2, 3, 5], "start": 2}, r"evenly spaced integers, 1 or more.*found \[2, 3, 5\]"),
        ({"launch_us": range(3), "start": 1}, r"1 or more and rising, found \[0, 1, 2\]"),
        ({"kernels": (10, 20)}, "kernels starts at 100, which is none of 10, 20"),
        ({"kernels": ()}, "kernels starts at 100, which is none of none"),
        ({"kernels": (100, 0)}, "a value of kernels cannot be shown: kernels is 0: a positive integer"),
        ({"kernel_us": (0.9, -1.0)}, "a value of kernel_us cannot be shown: kernel_us is -1.0"),
        ({"kernel_us": (0.9, 0.0)}, "a value of kernel_us cannot be shown: 0.0 is less than a nanosecond"),
        ({"ways": ("compiled",)}, "a value of way cannot be shown: way is 'compiled'"),
        ({"ways": ()}, "way starts at None, which is none of none"),
    ],
)
def test_a_launch_lab_that_cannot_be_shown_says_why(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ControlError, match=said):
        launch_lab(**arguments)
