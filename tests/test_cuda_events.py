"""Tests of gpucourse.cuda_events that need no GPU; tests/gpu holds it against the profiler."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time

import pytest
import torch

from gpucourse import cuda_events, hardware
from gpucourse.cuda_events import ImpossibleTimingError, Timing, _settled, region, time_cuda
from gpucourse.environment import Environment, NoGPUError, cuda_available
from gpucourse.roofline import Work

H200 = Environment(gpu="NVIDIA H200", l2_bytes=60 * 2**20, max_sm_clock_mhz=1980)


def timing(ms: float, **changes) -> Timing:
    facts = {
        "samples_ms": (ms,) * 20,
        "elapsed_ms": ms,
        "host_ms": 0.005,
        "method": "fixture",
        "l2": "warm",
        "arguments": ({"shape": [2048, 2048], "dtype": "float32"},) * 2,
        "arguments_changed": False,
        "escaped": False,
        "device": "cuda",
        "environment": H200,
    }
    return Timing(**(facts | changes))


MATMUL = Work(flops=2 * 2048**3, bytes=3 * 4 * 2048**2)


def test_a_wall_clock_read_too_early_is_impossible():
    # 2 * 2048^3 FLOP in 0.05 ms would be 344 TFLOP/s; the card's dense fp32 peak is 67.
    with pytest.raises(ImpossibleTimingError, match=r"343\.6 TFLOP/s.*at most 67\.0 in dense fp32"):
        timing(0.05).check(MATMUL)


def test_a_possible_time_gives_its_share_of_the_peak():
    assert "46.7 TFLOP/s, 70% of dense fp32" in timing(0.368).check(MATMUL)


def test_where_tf32_is_allowed_its_own_peak_binds():
    assert "dense tf32" in timing(0.05, tf32_allowed=True).check(MATMUL)


def test_more_bytes_than_the_memory_moves_is_impossible_unless_the_l2_can_have_served_them():
    big = Work(flops=0, bytes=2**30)
    small = Work(flops=0, bytes=2**23)
    with pytest.raises(ImpossibleTimingError, match=r"GB/s, and the memory of NVIDIA H200 moves 4,800"):
        timing(0.1).check(big)
    assert "(served from the L2)" in timing(0.0005).check(small)
    with pytest.raises(ImpossibleTimingError, match="GB/s"):
        timing(0.0005, l2="cold").check(small)


def test_a_card_without_a_record_cannot_be_judged():
    stranger = dataclasses.replace(H200, gpu="NVIDIA Strange 9000")
    assert "cannot judge: no datasheet record of 'NVIDIA Strange 9000'" in timing(
        0.05, environment=stranger
    ).check(MATMUL)


def test_a_precision_without_a_peak_is_not_judged_by_another():
    tesla = dataclasses.replace(H200, gpu="Tesla T4")
    half = ({"shape": [2048, 2048], "dtype": "bfloat16"},) * 2
    found = timing(0.5, environment=tesla, arguments=half).check(Work(flops=2 * 2048**3, bytes=0))
    assert found == "cannot judge the arithmetic: the record of Tesla T4 has no bf16 peak"


def test_the_peak_binds_at_the_cards_maximum_clock_not_at_the_datasheets():
    record = hardware.device("NVIDIA H200")
    # 989 TFLOP/s is given for 1,830 MHz; at 1,980 MHz the same units reach 1,070.
    assert record.peak_flops_at_clock("bf16", 1980) == pytest.approx(1070e12, rel=0.002)
    assert record.peak_flops_at_clock("bf16", None) >= record.peak_flops("bf16")


def test_launch_bound_prints_both_times_and_otherwise_only_the_device_time():
    waiting, busy = timing(0.001, elapsed_ms=0.02), timing(1.0, elapsed_ms=1.02)
    assert waiting.launch_bound
    assert "elapsed 20 µs as launched" in str(waiting)
    assert not busy.launch_bound
    assert "elapsed" not in str(busy)


def test_the_text_names_spread_escapes_changes_and_conditions():
    text = str(timing(1.0, samples_ms=(1.0, 1.4, 1.0, 1.5), escaped=True, arguments_changed=True))
    for part in (
        "noisy",
        "another stream",
        "changed its arguments",
        "(2048, 2048) float32",
        "NVIDIA H200",
        "L2 warm",
    ):
        assert part in text


def test_samples_are_kept_and_statistics_derived():
    found = timing(0, samples_ms=(1.0, 2.0, 3.0, 4.0, 5.0))
    assert (found.median_ms, found.iqr_ms) == (3.0, 2.0)
    data = found.as_dict()
    assert data["samples_ms"] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert data["median_ms"] == 3.0


def test_a_clock_that_falls_or_stands_low_is_named():
    assert timing(1.0, clock_mhz=(1950.0, 1400.0)).throttled
    assert timing(1.0, clock_mhz=(1410.0, 1400.0)).throttled, "a tenth below the card's maximum of 1980"
    assert not timing(1.0, clock_mhz=(1950.0, 1940.0)).throttled
    assert not timing(1.0).throttled
    assert "clock 1950 → 1400 MHz: throttled" in str(timing(1.0, clock_mhz=(1950.0, 1400.0)))


@pytest.mark.parametrize(
    ("l2", "said"), [("warm", "pairs"), ("cold", "pairs; the L2 could not be flushed between")]
)
def test_a_queue_that_runs_dry_at_any_moment_falls_back_and_says_so(monkeypatch, l2, said):
    def dry(*_args):
        raise cuda_events._QueueRanDryError

    monkeypatch.setattr(cuda_events, "require_cuda", lambda _what: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda_events, "_as_launched", lambda _call: (1.0, 0.1, False))
    monkeypatch.setattr(cuda_events, "_clock_mhz", lambda: 1900.0)
    monkeypatch.setattr(cuda_events, "_warm", dry)
    monkeypatch.setattr(cuda_events, "_cold", dry)
    monkeypatch.setattr(cuda_events, "_unqueued", lambda *_args: ([1.0], "pairs"))
    assert time_cuda(len, "", l2=l2).method == said


def test_sampling_stops_on_spread_and_never_before_twenty():
    assert not _settled([1.0] * 19, 0.01)
    assert _settled([1.0] * 20, 0.01)
    assert not _settled([1.0, 2.0] * 10, 0.01)


def test_the_host_can_be_timed_and_says_that_it_was_the_host():
    found = time_cuda(time.sleep, 0.01, device="cpu", max_seconds=0.15)
    assert 10 <= found.median_ms < 15
    assert "no GPU was timed" in str(found)
    assert not found.launch_bound
    assert found.check(MATMUL).startswith("cannot judge: the host was timed")


def test_an_in_place_argument_is_noticed():
    found = time_cuda(lambda x: x.add_(1), torch.zeros(3), device="cpu", max_seconds=0.01)
    assert found.arguments_changed
    kept = time_cuda(functools.partial(torch.sum, dim=0), torch.zeros(3, 4), device="cpu", max_seconds=0.01)
    assert not kept.arguments_changed
    assert kept.arguments == ({"shape": [3, 4], "dtype": "float32"},)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "said"),
    [
        ((3.0,), {}, TypeError, "times a function, found float"),
        ((len, ""), {"device": "tpu"}, ValueError, "'tpu'"),
        ((len, ""), {"l2": "hot"}, ValueError, "'hot'"),
        ((len, ""), {"spread": 0}, ValueError, "spread is in"),
        ((len, ""), {"max_seconds": float("nan")}, ValueError, "found .*nan"),
    ],
)
def test_bad_arguments_are_named(arguments, options, error, said):
    with pytest.raises(error, match=said):
        time_cuda(*arguments, **options)


@pytest.mark.skipif(cuda_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing():
    with pytest.raises(NoGPUError, match="time_cuda needs a CUDA device"):
        time_cuda(torch.sum, torch.zeros(3))
    with pytest.raises(NoGPUError, match="region needs a CUDA device"), region():
        pass


def test_however_short_the_time_there_is_one_sample():
    assert len(time_cuda(lambda: None, device="cpu", max_seconds=1e-9).samples_ms) == 1


@pytest.mark.parametrize("option", ["spread", "max_seconds"])
@pytest.mark.parametrize("bad", ["0.1", None, True])
def test_an_option_that_is_no_number_is_named(option, bad):
    with pytest.raises(TypeError, match=f"{option} must be a number, found {bad!r}"):
        time_cuda(lambda: None, device="cpu", **{option: bad})
