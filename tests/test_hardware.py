"""Facts about the datasheet records."""

from __future__ import annotations

import dataclasses
import datetime
import re
import subprocess
import sys

import pytest

from gpucourse import hardware
from gpucourse.hardware import DEVICES, MissingFigureError, UnknownDeviceError, device, find

# Dense TFLOP/s and GB/s by short name, typed apart from the records so that a slip in one shows.
EXPECTED = {
    "V100 16GB": (15.7, None, 125, None, None, 900),
    "V100 32GB": (15.7, None, 125, None, None, 900),
    "T4": (8.1, None, 65, None, None, 320),
    "A10": (31.2, 62.5, 125, 125, None, 600),
    "L4": (30.3, 60, 121, 121, 242, 300),
    "RTX 3090": (35.6, 35.6, 71, 71, None, 936),
    "RTX 4090": (82.6, 82.6, 165.2, 165.2, 330.3, 1008),
    "A100 40GB": (19.5, 156, 312, 312, None, 1555),
    "A100 80GB": (19.5, 156, 312, 312, None, 2039),
    "H100 SXM": (67, 494.5, 989, 989, 1979, 3350),
    "H200": (67, 494.5, 989, 989, 1979, 4800),
    "B200": (75, 1125, 2250, 2250, 4500, 7700),
}
TORCH_NAMES = {
    "Tesla V100-SXM2-16GB",
    "Tesla V100-SXM2-32GB",
    "Tesla T4",
    "NVIDIA A10",
    "NVIDIA L4",
    "NVIDIA GeForce RTX 3090",
    "NVIDIA GeForce RTX 4090",
    "NVIDIA A100-SXM4-40GB",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA H200",
    "NVIDIA B200",
}


def test_every_card_of_the_course_has_a_record():
    assert {record.short for record in DEVICES} == set(EXPECTED)
    assert {record.name for record in DEVICES} == TORCH_NAMES


@pytest.mark.parametrize("short", EXPECTED)
def test_dense_peaks_and_bandwidth(short):
    record = device(short)
    found = [record.peaks[p].value / 1e12 if p in record.peaks else None for p in hardware.PRECISIONS]
    assert (*found, record.bandwidth_bytes_per_s / 1e9) == EXPECTED[short]


@pytest.mark.parametrize("record", DEVICES, ids=lambda record: record.short)
def test_every_peak_is_multiprocessors_times_fma_times_two_times_clock(record):
    for precision, figure in record.peaks.items():
        identity = record.multiprocessors * figure.fma_per_clock * 2 * figure.clock_mhz * 1e6
        # Datasheets round: the coarsest is the L4's 60 for 60.6.
        assert figure.value == pytest.approx(identity, rel=0.01), precision


def test_the_identity_would_catch_a_sparse_peak_and_a_neighbours_figure():
    figure = device("H200").peak("bf16")
    sparse = dataclasses.replace(figure, value=2 * figure.value)
    neighbour = device("A100 80GB").peak("bf16")
    for wrong in (sparse, neighbour):
        identity = 132 * figure.fma_per_clock * 2 * figure.clock_mhz * 1e6
        assert wrong.value != pytest.approx(identity, rel=0.01)


@pytest.mark.parametrize("record", DEVICES, ids=lambda record: record.short)
def test_every_figure_has_kind_source_and_address(record):
    for what, text, figure in record.figures():
        assert figure.value > 0, what
        assert text
        assert figure.kind
        assert figure.source.title
        assert re.match(r"https?://", figure.source.url), what
        if figure.source.checked:
            assert datetime.date.fromisoformat(figure.source.checked) <= datetime.date(2100, 1, 1)
    assert {figure.kind for figure in record.peaks.values()} <= {
        "dense, tensor cores, fp32 accumulate",
        "dense, no tensor cores",
    }
    assert record.bandwidth.kind == "read + write together"


def test_an_unopened_source_is_unverified_and_has_no_date():
    source = device("A10").peak("tf32").source
    assert (source.checked, source.status) == ("", "unverified")
    assert device("H200").peak("bf16").source.status.startswith("checked 20")


@pytest.mark.parametrize("record", DEVICES, ids=lambda record: record.short)
def test_a_device_is_found_by_torchs_name_and_by_its_short_name(record):
    assert device(record.name) is record is device(record.short) is find(record.name)


@pytest.mark.parametrize(
    "name",
    [
        "H100",
        "NVIDIA H100 PCIe",
        "NVIDIA H200 NVL",
        "h200",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA A10G",
        "NVIDIA",
        "",
    ],
)
def test_a_part_of_a_name_or_a_neighbour_is_unknown(name):
    assert find(name) is None
    with pytest.raises(UnknownDeviceError, match=re.escape(repr(name))):
        device(name)


def test_an_unknown_device_names_the_nearest_and_the_command_that_measures():
    with pytest.raises(UnknownDeviceError, match=r"'NVIDIA H200'.*match exactly.*measure_roofline"):
        device("NVIDIA H200 NVL")


def test_bf16_on_a_t4_is_missing_not_a_neighbours_figure():
    with pytest.raises(MissingFigureError, match=r"Tesla T4 has no bf16 figure.*fp32, fp16"):
        device("T4").peak_flops("bf16")
    with pytest.raises(MissingFigureError, match="no fp8 figure"):
        device("A100 80GB").peak_flops("fp8")


def test_torch_dtypes_name_a_precision_and_fp32_is_never_tf32():
    torch = pytest.importorskip("torch")
    h200 = device("H200")
    assert h200.peak_flops(torch.float32) == h200.peak_flops("fp32") == 67e12
    assert h200.peak_flops(torch.bfloat16) == h200.peak_flops("bf16")
    assert h200.peak_flops(torch.float16) == h200.peak_flops("half")
    assert h200.peak_flops(torch.float8_e4m3fn) == 1979e12


@pytest.mark.parametrize("dtype", ["int8", "bf-16", None, 16])
def test_what_is_no_precision_is_refused_with_those_there_are(dtype):
    with pytest.raises(MissingFigureError, match="fp32, tf32, fp16, bf16, fp8"):
        device("H200").peak_flops(dtype)


def test_the_limit_at_the_cards_own_clock_is_above_the_datasheet_where_the_clock_is():
    h200 = device("H200")
    assert h200.peak_flops_at_clock("bf16", 1980) == pytest.approx(1070e12, rel=1e-3)
    assert h200.peak_flops_at_clock("bf16") == h200.peak_flops_at_clock("bf16", 1980)
    assert h200.peak_flops_at_clock("bf16", 1200) == h200.peak_flops("bf16")
    assert h200.peak_flops_at_clock("fp32") == h200.peak_flops("fp32")


def test_geforce_figures_say_fp32_accumulate_and_that_the_printed_one_is_twice():
    for short in ("RTX 3090", "RTX 4090"):
        figure = device(short).peak("fp16")
        assert "fp32 accumulate" in figure.kind
        assert "fp16 accumulate" in figure.note


def test_records_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        device("H200").short = "H100"  # type: ignore[misc]
    with pytest.raises(TypeError):
        device("H200").peaks["bf16"] = device("T4").peaks["fp16"]  # type: ignore[index]


def test_the_page_shows_every_figure_with_its_source():
    page = hardware.reference_tables()._repr_html_()
    for record in DEVICES:
        assert record.name in page
        for _, text, figure in record.figures():
            assert text in page
            assert figure.source.url.replace("&", "&amp;") in page
    assert page.count("unverified") == sum(
        not figure.source.checked for record in DEVICES for _, _, figure in record.figures()
    )
    assert 'tabindex="0"' in page  # the wide table can be scrolled by keyboard


def test_importing_hardware_is_light():
    code = "import sys, gpucourse.hardware; sys.exit(bool({'torch', 'numpy', 'pint'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", [None, 3, [], {}])
def test_what_is_no_name_has_no_record(name):
    assert hardware.find(name) is None
    with pytest.raises(hardware.UnknownDeviceError, match="no datasheet record of"):
        hardware.device(name)
