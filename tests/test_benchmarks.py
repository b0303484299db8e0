"""The benchmarks' recordings belong to the code that stands in benchmarks/, and say what they claim."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from gpucourse import recorder, recording
from gpucourse.environment import cuda_available
from gpucourse.plots import device_clock

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


@pytest.mark.skipif(cuda_available(), reason="on a GPU the benchmark would run for minutes")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_replays_what_its_own_code_recorded(script, capsys):
    (page,) = (page for page in recorder.find_pages(ROOT) if page.path == script)
    runpy.run_path(str(script))  # a stale recording raises
    told = capsys.readouterr().out
    if page.pending == page.recorded:
        assert told.startswith("not yet measured: ")
    else:
        assert "recorded on NVIDIA H200" in told


def test_every_row_of_the_timers_comparison_follows_from_its_own_samples():
    found = recording.load("timing_vs_peers")
    assert len(found["cases"]) >= 14
    for name, case in found["cases"].items():
        for method, row in case["methods"].items():
            pairs = [
                (r, t) for r, t in zip(row["readings_us"], row["truths_us"], strict=True) if t is not None
            ]
            assert len(pairs) == row["rounds"], (name, method)
            if pairs:
                errors = sorted(reading - truth for reading, truth in pairs)
                assert errors[0] <= row["error_us"] <= errors[-1], (name, method)


def test_the_stored_method_is_the_timers_own_words():
    for name, case in recording.load("timing_vs_peers")["cases"].items():
        assert "graphs of" in case["method"] or "behind a spinning kernel" in case["method"], name
        assert "flushes" in case["cold_method"], name


def test_no_peer_in_the_same_cache_state_is_much_nearer_than_the_clock_but_in_the_row_that_chapter_04_names():
    """The goal: not further off than the best peer by more than 2 % of the kernel's time or 0.1 µs."""
    missed = set()
    for name, case in recording.load("timing_vs_peers")["cases"].items():
        for own in ("time_cuda", "time_cuda, cold"):
            row = case["methods"][own]
            peers = [
                abs(peer["error_us"])
                for method, peer in case["methods"].items()
                if not method.startswith("time_cuda") and peer["cache"] == row["cache"] and peer["rounds"]
            ]
            decided = device_clock.judgement(row)[0] != "undecided"
            if decided and abs(row["error_us"]) > min(peers) + max(0.02 * row["truth_us"], 0.1):
                missed.add((name, own))
    assert missed == {("softmax 4096 x 4096 fp32", "time_cuda")}


def test_no_plain_call_is_taken_for_one_that_escapes():
    assert not any(case["escaped"] for case in recording.load("timing_vs_peers")["cases"].values())
