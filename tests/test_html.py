"""Tests of gpucourse.html."""

from __future__ import annotations

import pytest

from gpucourse.html import Raw, table


def test_cells_are_escaped_and_raw_ones_pass():
    found = table(["a", "b"], [["<x>", Raw("<b>y</b>")]])
    assert "&lt;x&gt;" in found
    assert "<b>y</b>" in found


def test_the_first_cell_names_its_row_unless_told_otherwise():
    assert '<th scope="row">1</th><td>2</td>' in table(["a", "b"], [[1, 2]])
    assert "<td>1</td><td>2</td>" in table(["a", "b"], [[1, 2]], row_header=False)


def test_a_row_of_another_length_is_an_error_that_shows_it():
    with pytest.raises(ValueError, match=r"1 cells where the header has 2: \['x'\]"):
        table(["a", "b"], [["x"]])
