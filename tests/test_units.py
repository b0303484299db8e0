"""Facts about units and readable numbers."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucourse import units
from gpucourse.units import GB, GIB, format_bandwidth, format_bytes, format_rate, format_time_ms


def test_a_gibibyte_is_seven_percent_more_than_a_gigabyte():
    assert (GB, GIB) == (1e9, 1_073_741_824)


@pytest.mark.parametrize(
    ("text", "magnitude", "unit"),
    [
        ("989 TFLOP/s", 989e12, "FLOP/s"),
        ("4800 GB/s", 4.8e12, "byte/s"),
        ("4.8 TB/s", 4.8e12, "byte/s"),
        ("24 GiB", 25_769_803_776, "byte"),
        ("206 FLOP/byte", 206, "FLOP/byte"),
        ("8 Gbit/s", 1e9, "byte/s"),
        ("23.7 us", 23.7e-6, "s"),
    ],
)
def test_quantities_as_datasheets_print_them_can_be_read(text, magnitude, unit):
    assert units.ureg(text).to(unit).magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize(
    ("one", "other"),
    [("FLOP/byte", "FLOP"), ("byte/s", "Hz"), ("FLOP/s", "Hz"), ("FLOP", "byte"), ("TFLOP/s", "TFLOP")],
)
def test_arithmetic_data_and_pure_numbers_never_pass_for_each_other(one, other):
    assert not units.ureg.Quantity(1, one).is_compatible_with(other)


def test_a_rate_times_an_intensity_is_a_rate_of_arithmetic():
    product = units.ureg.Quantity(4800, "GB/s") * units.ureg.Quantity(85, "FLOP/byte")
    assert product.to("TFLOP/s").magnitude == pytest.approx(408)


def test_there_is_one_registry():
    assert units.ureg is units.ureg


def test_importing_units_loads_no_pint():
    code = "import sys, gpucourse.units; sys.exit('pint' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_in_units_is_an_attribute_error():
    with pytest.raises(AttributeError, match="furlong"):
        _ = units.furlong


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1e6, "1.00 MB"),
        (999_960, "1.00 MB"),
        (201_326_592, "201.3 MB"),
        (24e9, "24.0 GB"),
        (25_769_803_776, "25.8 GB"),
        (1.5e12, "1.50 TB"),
        (-0.3e9, "-300.0 MB"),
        (9_996_000, "10.0 MB"),
    ],
)
def test_bytes_are_written_in_decimal_units(n, text):
    assert format_bytes(n) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 s"),
        (0.0000123, "12.3 ns"),
        (0.00086, "860.0 ns"),
        (0.0237, "23.7 µs"),
        (0.345, "345.0 µs"),
        (1, "1.00 ms"),
        (52.13, "52.1 ms"),
        (1000, "1.00 s"),
        (8 * 3600 * 1000, "28,800 s"),
        (-0.0119, "-11.9 µs"),
    ],
)
def test_a_time_is_written_in_the_unit_that_suits_it(ms, text):
    assert format_time_ms(ms) == text


def test_rates_are_written_as_datasheets_print_them():
    assert format_rate(46.03e12) == "46.0 TFLOP/s"
    assert format_rate(1.979e15) == "1,979 TFLOP/s"
    assert format_bandwidth(4.8e12) == "4,800 GB/s"
    assert format_bandwidth(54.9e9) == "54.9 GB/s"


@pytest.mark.parametrize("write", [format_bytes, format_time_ms, format_rate, format_bandwidth])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), True])
def test_what_is_no_finite_number_is_refused(write, bad):
    with pytest.raises(ValueError, match="not a finite number"):
        write(bad)


@given(st.floats(min_value=1e-6, max_value=1e14))
def test_a_written_amount_reads_back_to_three_digits(n):
    number, unit = format_bytes(n * 1e3).replace(",", "").split(" ")
    scale = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]
    assert float(number) * scale == pytest.approx(n * 1e3, rel=5.1e-3, abs=0.051)


@pytest.mark.parametrize("write", [format_bytes, format_time_ms, format_rate, format_bandwidth])
def test_numpys_bools_and_integers_beyond_all_floats_are_no_amounts(write):
    with pytest.raises(ValueError, match="not a finite number but a bool"):
        write(np.bool_(True))
    with pytest.raises(ValueError, match="cannot write inf in"):
        write(10**400)


@pytest.mark.parametrize("write", [format_bytes, format_time_ms, format_rate, format_bandwidth])
@pytest.mark.parametrize("bad", ["3", None, 1j, [1], np.ones(1), units.ureg.Quantity(3, "GB")])
def test_what_is_no_plain_number_is_a_type_error_that_shows_it(write, bad):
    with pytest.raises(TypeError, match=f"cannot write .* in .*a {type(bad).__name__}"):
        write(bad)


def test_fractions_and_numpys_numbers_are_written_like_any():
    assert format_bytes(Fraction(7, 2)) == "3.5 B"
    assert format_bytes(np.int8(100)) == "100 B"
    assert format_time_ms(np.float32(2.5)) == "2.50 ms"
