"""The timings of `time_cuda` against the profiler's own record of the same kernels, in the same process."""

from __future__ import annotations

import statistics

import pytest

torch = pytest.importorskip("torch")

from gpucourse.cuda_events import ImpossibleTimingError, NothingLaunchedError, region, time_cuda  # noqa: E402
from gpucourse.kernels import trace  # noqa: E402

pytestmark = pytest.mark.gpu


def profiler_us(fn, *args, calls: int = 20) -> float:
    """Median kernel duration in µs, as CUPTI records it."""

    def many():
        for _ in range(calls):
            fn(*args)

    found = trace(many)
    assert found.complete
    assert len(found.kernels) == calls
    return statistics.median(kernel.duration_us for kernel in found.kernels)


CASES = {
    "add 1 Ki": lambda: (torch.add, torch.randn(1024, device="cuda"), 1.0),
    "add 1 Mi": lambda: (torch.add, torch.randn(2**20, device="cuda"), 1.0),
    "add 16 Mi": lambda: (torch.add, torch.randn(2**24, device="cuda"), 1.0),
    "matmul 256 bf16": lambda: (
        torch.matmul,
        *(torch.randn(256, 256, device="cuda").bfloat16() for _ in "ab"),
    ),
    "matmul 2048 bf16": lambda: (
        torch.matmul,
        *(torch.randn(2048, 2048, device="cuda").bfloat16() for _ in "ab"),
    ),
    "matmul 2048 fp32": lambda: (torch.matmul, *(torch.randn(2048, 2048, device="cuda") for _ in "ab")),
}


@pytest.mark.parametrize("case", CASES)
def test_device_time_agrees_with_the_profiler(case):
    fn, *args = CASES[case]()
    truth_us = profiler_us(fn, *args)
    timing = time_cuda(fn, *args)
    found_us = timing.median_ms * 1e3
    print(f"{case}: profiler {truth_us:.2f} µs, time_cuda {found_us:.2f} µs; {timing}")
    assert found_us == pytest.approx(truth_us, rel=0.10, abs=0.6)


@pytest.mark.parametrize("case", ["add 1 Ki", "add 1 Mi", "add 16 Mi", "matmul 2048 bf16"])
def test_cold_agrees_with_the_profiler_after_a_flush(case):
    fn, *args = CASES[case]()
    flush = torch.empty(2**27, dtype=torch.int8, device="cuda")

    def flushed():
        for _ in range(20):
            flush.zero_()
            fn(*args)

    found = trace(flushed)
    fill = found.kernels[0].name
    truth_us = statistics.median(kernel.duration_us for kernel in found.kernels if kernel.name != fill)
    cold = time_cuda(fn, *args, l2="cold")
    print(f"{case}: profiler {truth_us:.2f} µs; {cold}")
    assert cold.median_ms * 1e3 == pytest.approx(truth_us, rel=0.05, abs=0.6)


def test_one_pair_around_a_short_kernel_reads_the_road_and_device_time_does_not():
    timing = time_cuda(torch.add, torch.randn(1024, device="cuda"), 1.0)
    assert timing.launch_bound
    assert timing.elapsed_ms > 4 * timing.median_ms
    assert "elapsed" in str(timing)


def test_a_hundred_additions_have_two_times():
    def additions(y):
        for _ in range(100):
            y = y + 1
        return y

    timing = time_cuda(additions, torch.randn(1024, device="cuda"))
    print(timing)
    assert timing.launch_bound
    assert timing.elapsed_ms > 3 * timing.median_ms


def test_a_call_that_waits_inside_says_so():
    timing = time_cuda(lambda x: x.sum().item(), torch.randn(2**20, device="cuda"))
    print(timing)
    assert "waits for the device inside" in timing.method


def test_work_left_on_another_stream_is_reported_as_escaped():
    side = torch.cuda.Stream()
    x = torch.randn(4096, 4096, device="cuda")

    def escaping():
        with torch.cuda.stream(side):
            x @ x
        return x + 1

    def wholly():
        with torch.cuda.stream(side):
            x @ x

    assert time_cuda(escaping).escaped
    assert not time_cuda(torch.matmul, x, x).escaped
    with pytest.raises(NothingLaunchedError, match="runs on a stream that the current one does not wait for"):
        time_cuda(wholly)
    assert torch.randn(3, device="cuda").isfinite().all(), (
        "a failed capture must leave random numbers working"
    )


def test_a_region_that_joins_its_second_stream_is_counted_whole():
    side = torch.cuda.Stream()
    x = torch.randn(2048, 2048, device="cuda")

    def joined():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x @ x
        torch.cuda.current_stream().wait_stream(side)

    both, one = time_cuda(joined), time_cuda(torch.matmul, x, x)
    assert not both.escaped
    assert both.median_ms == pytest.approx(one.median_ms, rel=0.1)


@pytest.mark.parametrize("l2", ["warm", "cold"])
def test_a_view_has_no_device_time(l2):
    x = torch.randn(64, 64, device="cuda")
    with pytest.raises(NothingLaunchedError, match="launched nothing on the device"):
        time_cuda(x.t, l2=l2)


def test_the_clock_is_read_before_and_after():
    timing = time_cuda(torch.add, torch.randn(1024, device="cuda"), 1.0)
    highest = timing.environment.max_sm_clock_mhz or 1e4
    assert all(0.1 * highest < mhz < 1.02 * highest for mhz in timing.clock_mhz)
    assert len(timing.clock_mhz) == 2


def test_a_default_call_on_a_kernel_under_ten_milliseconds_returns_within_a_second():
    import time

    for width in (256, 4096):
        x = torch.randn(width, width, device="cuda")
        torch.mm(x, x)
        begin = time.perf_counter()
        time_cuda(torch.mm, x, x)
        assert time.perf_counter() - begin < 1.0


def test_an_in_place_call_says_that_its_arguments_changed():
    assert time_cuda(lambda x: x.add_(1.0), torch.zeros(1024, device="cuda")).arguments_changed
    assert not time_cuda(lambda x: x + 1.0, torch.zeros(1024, device="cuda")).arguments_changed


def test_a_backward_pass_is_timed():
    model = torch.nn.Linear(1024, 1024, device="cuda")
    x = torch.randn(4096, 1024, device="cuda")

    def step():
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)

    timing = time_cuda(step)
    print(timing)
    assert timing.median_ms > 0.1


def test_region_reads_the_elapsed_time_of_its_block():
    x = torch.randn(4096, 4096, device="cuda")
    x @ x
    torch.cuda.synchronize()
    with region() as one:
        x @ x
    with region() as four:
        for _ in range(4):
            x @ x
    assert 2.5 < four.elapsed_ms / one.elapsed_ms < 5


def test_check_refuses_a_time_that_the_card_cannot_reach_and_accepts_a_real_one():
    import dataclasses

    from gpucourse.roofline import Work

    x = torch.randn(4096, 4096, device="cuda")
    timing = time_cuda(torch.matmul, x, x)
    work = Work(flops=2 * 4096**3, bytes=3 * 4 * 4096**2)
    print(timing.check(work))
    too_fast = dataclasses.replace(timing, samples_ms=tuple(s / 100 for s in timing.samples_ms))
    if "cannot judge" in timing.check(work):
        pytest.skip("this card has no datasheet record")
    with pytest.raises(ImpossibleTimingError, match="TFLOP/s"):
        too_fast.check(work)
