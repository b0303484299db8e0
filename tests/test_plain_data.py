"""Plain data read back: what fits passes as Python's own, everything else is named with its field."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from gpucourse import plain_data


@pytest.mark.parametrize("value", [3, 3.0, np.float32(3), np.int64(3), Fraction(3)])
def test_a_number_of_any_kind_becomes_a_float(value: object) -> None:
    found = plain_data.number(value, "x")
    assert type(found) is float
    assert found == 3.0


@pytest.mark.parametrize(
    "value", [True, np.True_, None, "3", 3j, [3], math.nan, math.inf, -math.inf, 10**400]
)
def test_what_is_no_finite_number_is_named(value: object) -> None:
    with pytest.raises(ValueError, match=r"^duration_us is .*: a finite number is wanted$"):
        plain_data.number(value, "duration_us")


def test_a_number_keeps_to_its_limits() -> None:
    assert plain_data.number(0, "x", least=0) == 0
    with pytest.raises(ValueError, match="x is -1: 0 or more is wanted"):
        plain_data.number(-1, "x", least=0)
    with pytest.raises(ValueError, match="x is 0: more than 0 is wanted"):
        plain_data.number(0, "x", above=0)


def test_a_whole_number_is_no_bool_and_no_float() -> None:
    assert plain_data.whole(np.int32(7), "calls") == 7
    assert type(plain_data.whole(np.int32(7), "calls")) is int
    for value in (True, 7.0, "7", None, -1):
        with pytest.raises(ValueError, match=r"calls is .*: a whole number, 0 or more, is wanted"):
            plain_data.whole(value, "calls")
    with pytest.raises(ValueError, match="1 or more"):
        plain_data.whole(0, "calls", least=1)


def test_a_text_is_no_list_and_a_list_no_text() -> None:
    assert plain_data.text("mm", "op") == "mm"
    assert plain_data.rows([1], "rows") == [1]
    with pytest.raises(ValueError, match="op is b'mm': a text is wanted"):
        plain_data.text(b"mm", "op")
    for value in ("ab", b"ab", {1}, {"a": 1}, None, 3):
        with pytest.raises(ValueError, match=r"rows is .*: a list is wanted"):
            plain_data.rows(value, "rows")
