"""Numbers in prose: every form that the role reads, and every way in which it says no."""

from __future__ import annotations

import sys

import pytest

from gpucourse import recording
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "book" / "_ext"))
import recorded_values

RECORDED = {
    "loop": {
        "median_us": 23.74,
        "count": 12345,
        "label": "a hundred additions",
        "samples_ms": [1.0, 2.0, 4.0],
        "rows": [{"us": 1.5}, {"us": 3.0}],
        "by_width": {"2048": {"ms": 0.0237}},
        "unavailable": None,
    },
    "matmul": {"median_us": 11.87},
}
NBSP = "\N{NO-BREAK SPACE}"


@pytest.fixture(autouse=True)
def recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `recording.load` know the two recordings above, and no other."""

    def load(name: str) -> recording.Recording:
        if name not in RECORDED:
            raise recording.MissingRecordingError(f"there is no recording {name!r}; run gpucourse record")
        return recording.Recording(name=name, data=RECORDED[name], provenance={"gpu": "NVIDIA H200"})

    monkeypatch.setattr(recording, "load", load)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("loop.median_us | .1f µs", f"23.7{NBSP}µs"),
        ("loop.median_us|.0f", "24"),
        ("loop.by_width.2048.ms | *1000 .1f µs", f"23.7{NBSP}µs"),
        ('loop.by_width["2048"].ms | .4f ms', f"0.0237{NBSP}ms"),
        ("loop.rows[1].us | .1f µs", f"3.0{NBSP}µs"),
        ("loop.rows[-1].us / loop.rows[0].us | .0f", "2"),
        ("loop.median_us / matmul.median_us | .1f times", f"2.0{NBSP}times"),
        ("median(loop.samples_ms) | .1f ms", f"2.0{NBSP}ms"),
        ("loop.count", "12,345"),
        ("ceil(loop.median_us / 2)", "12"),  # a fraction of a step repays nothing
        ("loop.count | ,d launches", f"12,345{NBSP}launches"),
        ("loop.label", "a hundred additions"),
        (r"loop.median_us \| .1f µs", f"23.7{NBSP}µs"),  # in a table with pipes
        ("1.5 * loop.rows[0].us | .2f", "2.25"),
    ],
)
def test_a_number_is_written_as_asked(text: str, written: str) -> None:
    assert recorded_values.read(text)[0] == written


def test_the_recordings_that_a_ratio_comes_from_are_both_named() -> None:
    _, used = recorded_values.read("loop.median_us / matmul.median_us | .1f")
    assert sorted(used) == ["loop", "matmul"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing.median_us | .1f µs", "there is no recording 'nothing'"),
        ("loop.median_ms | .1f ms", "loop has no 'median_ms': there is median_us, count"),
        ("loop.rows[2].us | .1f", r"loop.rows has no 2: it is a list of 2"),
        ("loop.label.length | d", "loop.label has no 'length': it is 'a hundred additions'"),
        ("loop.median_us", "say how to write it"),
        ("loop.label | .1f", "is no number but 'a hundred additions'"),
        ("loop.unavailable | .1f ms", "is no number but None"),
        ("loop.label * 2 | .1f", "is no number but 'a hundred additions'"),
        ("loop.median_us | many", "'many' is no format"),
        ("loop.median_us ( | .1f", "cannot be read"),
        ("2 + 2 | d", "names no recording"),
        ("__import__('os') | s", "is no path, number"),
        ("loop.median_us ** 2 | .1f", "is no path, number"),
    ],
)
def test_what_cannot_be_given_says_why(text: str, said: str) -> None:
    with pytest.raises(recorded_values.RecordedValueError) as caught:
        recorded_values.read(text)
    assert said in str(caught.value)
