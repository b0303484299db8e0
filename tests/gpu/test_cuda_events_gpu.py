"""The timings of `time_cuda` against the profiler's own record of the same kernels, in the same process."""

from __future__ import annotations

import statistics
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from gpucourse.cuda_events import (  # noqa: E402
    ImpossibleTimingError,
    NothingLaunchedError,
    TimingMemoryError,
    region,
    time_cuda,
)
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
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
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


def on_a_side(side, work, *, fork, join):
    def call():
        here = torch.cuda.current_stream()
        if fork:
            side.wait_stream(here)
        with torch.cuda.stream(side):
            work()
        torch.ones(2**20, device="cuda")
        if join:
            here.wait_stream(side)

    return call


@pytest.mark.parametrize("numbers", [2**10, 2**24])
@pytest.mark.parametrize("fork", [True, False])
@pytest.mark.parametrize("join", [True, False])
def test_a_missing_fork_or_join_is_told_however_short_the_work(fork, join, numbers):
    x = torch.randn(numbers, device="cuda")
    for _ in range(10):
        timing = time_cuda(
            on_a_side(torch.cuda.Stream(), lambda: x + 1, fork=fork, join=join), max_seconds=0.01
        )
        (found,) = timing.streams
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert timing.escaped == (not (fork and join)), timing
        assert found.begins_inside in ((True,) if fork else (False, None))
        assert found.ends_inside in ((True,) if join else (False, None))


def test_plain_functions_never_escape():
    x, layer = torch.randn(512, 512, device="cuda"), torch.nn.Linear(512, 512, device="cuda")

    def backward():
        layer.zero_grad(set_to_none=True)
        layer(x).sum().backward()

    for call in (lambda: x + 1, lambda: x @ x, backward, lambda: x.softmax(-1).sum(), lambda: x.sum().item()):
        for _ in range(10):
            timing = time_cuda(call, max_seconds=0.01)
            assert not timing.escaped, timing
            assert timing.streams == ()


def test_a_backward_pass_of_another_stream_is_joined_by_autograd():
    side, layer = torch.cuda.Stream(), torch.nn.Linear(256, 256, device="cuda")
    batch = torch.randn(512, 256, device="cuda")

    def step():
        layer.zero_grad(set_to_none=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = layer(batch).sum()
        loss.backward()

    assert not time_cuda(step).escaped


def test_arguments_written_in_place_hold_their_values_again():
    x, nested = torch.randn(2**20, device="cuda"), {"y": [torch.ones(3, device="cuda")]}
    before = x.clone()

    def writes(x, nested):
        x.mul_(1.5)
        nested["y"][0].add_(1)

    timing = time_cuda(writes, x, nested)
    assert timing.arguments_changed
    assert timing.arguments_restored
    assert torch.equal(x, before)
    assert nested["y"][0].tolist() == [1, 1, 1]
    assert not time_cuda(lambda x: x.view(-1), x + 1, device="cpu").arguments_changed


def test_the_arguments_device_is_timed_whichever_is_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("one device only")
    x = torch.randn(2**20, device="cuda:1")
    assert time_cuda(torch.add, x, 1).median_ms > 5e-4
    with pytest.raises(ValueError, match="lie on cuda:0, cuda:1"):
        time_cuda(lambda a, b: a, x, torch.ones(1, device="cuda:0"))


def test_a_call_that_keeps_its_results_says_how_much():
    held = []
    x = torch.randn(2**20, device="cuda")
    timing = time_cuda(lambda: held.append(x + 1), max_seconds=0.05)
    assert timing.left_bytes == 4 * 2**20
    assert any("each call leaves 4.19 MB allocated" in remark for remark in timing.remarks)
    assert timing.median_ms < 0.02
    held.clear()
    huge = int(torch.cuda.mem_get_info()[0] / 60)
    with pytest.raises(TimingMemoryError, match="each call leaves"):
        time_cuda(lambda: held.append(torch.empty(huge, dtype=torch.int8, device="cuda").zero_()))
    held.clear()
    torch.cuda.empty_cache()


def test_what_the_call_raises_leaves_the_device_usable():
    x, calls = torch.zeros(2**20, device="cuda"), 0

    def breaks(x):
        nonlocal calls
        calls += 1
        x.add_(1)
        if torch.cuda.is_current_stream_capturing():
            raise KeyError("in the capture")

    with pytest.raises(KeyError, match="in the capture"):
        time_cuda(breaks, x)
    assert float(x.sum()) == 0.0
    assert torch.randn(3, device="cuda").isfinite().all()
    assert time_cuda(torch.add, x, 1).median_ms > 0


def test_a_compiled_function_stays_compiled():
    pytest.importorskip("triton")
    from torch._dynamo.utils import counters

    def eager(x):
        return ((x * 2 + 1).relu() * 3).sin()

    x = torch.randn(2**24, device="cuda")
    compiled = torch.compile(eager)
    first = time_cuda(compiled, x)
    seen = sum(counters["frames"].values())
    again = time_cuda(compiled, x)
    assert first.median_ms < 0.6 * time_cuda(eager, x).median_ms, "it ran uncompiled"
    assert again.median_ms == pytest.approx(first.median_ms, rel=0.1)
    assert sum(counters["frames"].values()) == seen
    assert first.remarks == ()


def test_cold_calls_that_wait_inside_are_flushed_before():
    x = torch.randn(2**20, device="cuda")
    timing = time_cuda(lambda: x.sum().item(), l2="cold", max_seconds=0.05)
    assert timing.method.endswith("(the L2 flushed before)")


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


def test_the_very_first_call_of_a_process_returns_within_a_second_too():
    code = (
        "import time, torch\nfrom gpucourse.cuda_events import time_cuda\n"
        "x = torch.randn(1024, 1024, device='cuda')\nx @ x\ntorch.cuda.synchronize()\n"
        "begin = time.perf_counter()\ntime_cuda(torch.mm, x, x)\nprint(time.perf_counter() - begin)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert float(done.stdout) < 1.0


def test_an_in_place_call_says_that_its_arguments_changed():
    x = torch.zeros(1024, device="cuda")
    assert time_cuda(lambda x: x.add_(1.0), x).arguments_changed
    assert float(x.sum()) == 0.0
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
