"""The timings of `time_cuda` against the profiler's own record of the same kernels, in the same process."""

from __future__ import annotations

import statistics

import pytest

torch = pytest.importorskip("torch")

from gpucourse.cuda_events import ImpossibleTimingError, region, time_cuda  # noqa: E402
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


@pytest.mark.parametrize("case", ["add 1 Mi", "add 16 Mi", "matmul 2048 bf16"])
def test_cold_is_not_faster_than_warm(case):
    fn, *args = CASES[case]()
    warm, cold = time_cuda(fn, *args), time_cuda(fn, *args, l2="cold")
    print(f"{case}: warm {warm}\n  cold {cold}")
    assert cold.median_ms > 0.97 * warm.median_ms


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
            for _ in range(3):
                x @ x

    assert time_cuda(escaping).escaped
    assert not time_cuda(torch.matmul, x, x).escaped


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
