"""Tests of gpucourse.cuda_events that need no GPU; tests/gpu holds it against the profiler."""

from __future__ import annotations

import dataclasses
import functools
import time

import pytest
import torch

from gpucourse import cuda_events, hardware
from gpucourse.cuda_events import (
    ImpossibleTimingError,
    NothingLaunchedError,
    RegionError,
    Timing,
    TimingMemoryError,
    _settled,
    region,
    time_cuda,
)
from gpucourse.environment import Environment, NoGPUError, cuda_available
from gpucourse.roofline import Work
from gpucourse.streams import OtherStream
from tests.fake_cuda import FakeCuda

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
        "changed its arguments, so its calls met different inputs; they could not be restored",
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


@pytest.fixture
def fake(monkeypatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def us(found: Timing) -> float:
    return found.median_ms * 1e3


@pytest.mark.parametrize("l2", ["warm", "cold"])
@pytest.mark.parametrize(("kernel_us", "way"), [(1.0, "CUDA graphs"), (40.0, "CUDA graphs"), (900.0, "")])
def test_device_time_holds_neither_launches_nor_marks(fake, kernel_us, way, l2):
    found = time_cuda(fake.work, kernel_us, l2=l2)
    assert us(found) == pytest.approx(kernel_us, abs=0.01)
    assert way in found.method
    assert (found.escaped, found.streams, found.remarks) == (False, (), ())
    assert found.launch_bound == (kernel_us == 1.0)
    assert found.elapsed_ms * 1e3 == pytest.approx(max(kernel_us + 4.0, 5.0), abs=1.01)


@pytest.mark.parametrize("l2", ["warm", "cold"])
def test_what_cannot_be_captured_is_queued_instead(fake, l2):
    def refuses(us):
        if fake.current.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        fake.work(us)

    found = time_cuda(refuses, 7.0, l2=l2)
    assert us(found) == pytest.approx(7.0, abs=1.01 if l2 == "cold" else 0.01)
    assert "spinning kernel" in found.method
    assert fake.repaired > 0, "a failed capture has to be repaired, or random numbers stop working"
    assert fake.current is fake.default, "the failed capture left its stream the current one"


@pytest.mark.parametrize(("l2", "said"), [("warm", "are counted"), ("cold", "(the L2 flushed before)")])
def test_a_call_that_waits_inside_is_timed_by_plain_pairs_and_says_so(fake, l2, said):
    def waits(us):
        fake.work(us)
        torch.cuda.synchronize()

    found = time_cuda(waits, 50.0, l2=l2)
    assert found.method.startswith("one event pair a call: the call waits for the device inside")
    assert found.method.endswith(said)
    assert us(found) == pytest.approx(found.elapsed_ms * 1e3)
    assert us(found) > 50


@pytest.mark.parametrize(
    ("kernels", "kernel_us", "refuses", "l2", "method"),
    [
        (100, 3.0, False, "warm", "6 calls queued"),  # 13 would fill the queue
        (400, 3.0, False, "warm", "1 call queued"),  # as five of them in the pilot would
        (
            100,
            0.5,
            True,
            "warm",
            "6 and 3 calls queued behind a spinning kernel, their difference",
        ),  # 12 and 6
        (400, 3.0, True, "cold", "one event pair a call behind a spinning kernel"),
    ],
)
def test_no_more_is_queued_than_the_queue_holds(fake, kernels, kernel_us, refuses, l2, method):
    fake.depth = 1000

    def call():
        if refuses and fake.current.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        for _ in range(kernels):
            fake.work(kernel_us)

    found = time_cuda(call, l2=l2)
    assert found.method.startswith(method)
    assert us(found) == pytest.approx(kernel_us * kernels, abs=1.5)
    assert found.launch_bound, "a full queue sets the host's pace, and its gaps would count as device time"


def test_a_call_that_alone_fills_the_queue_says_that_its_gaps_are_counted(fake):
    fake.depth = 1000
    found = time_cuda(lambda: [fake.work(3.0) for _ in range(1500)])
    assert "launches more than the queue holds" in found.method
    assert us(found) == pytest.approx(found.elapsed_ms * 1e3)


@pytest.mark.parametrize("moment", [0, 5, 40])
def test_what_the_call_raises_is_passed_on_and_the_device_left_at_rest(fake, moment):
    calls = 0

    def breaks(x):
        nonlocal calls
        calls += 1
        x.add_(1)
        fake.work(500.0)
        if calls > moment:
            raise KeyError("the call's own")

    x = torch.zeros(3)
    with pytest.raises(KeyError, match="the call's own"):
        time_cuda(breaks, x)
    assert fake.default.queue.query(), "work is still running"
    assert x.tolist() == [0, 0, 0], "the argument keeps what the failed calls wrote"
    assert torch.cuda.set_stream == fake.set_stream, "the watch on streams was not taken off"


def test_an_error_in_the_capture_itself_is_passed_on(fake):
    def breaks():
        if fake.current.capturing:
            raise KeyError("in the capture")
        fake.work(5.0)

    with pytest.raises(KeyError, match="in the capture"):
        time_cuda(breaks)
    assert fake.capture_stream is None


@pytest.mark.parametrize("l2", ["warm", "cold"])
def test_a_call_that_launches_nothing_has_no_device_time(fake, l2):
    with pytest.raises(NothingLaunchedError, match="launched nothing on the device"):
        time_cuda(lambda: None, l2=l2)


@pytest.mark.parametrize("captured", [True, False])
def test_arguments_on_the_cpu_are_the_named_cause_of_an_empty_call(fake, monkeypatch, captured):
    if not captured:
        monkeypatch.setattr(cuda_events, "_capture", lambda *_args, **_options: None)
    with pytest.raises(
        NothingLaunchedError, match=r"its arguments are on the CPU. Move them there \(x = x.to"
    ):
        time_cuda(torch.add, torch.zeros(3), 1)
    with pytest.raises(NothingLaunchedError, match="launched nothing" if captured else "it is empty"):
        time_cuda(lambda: None)


class On:
    """An argument that only says where it lies."""

    def __init__(self, where: str) -> None:
        self.device = torch.device(where)


def test_the_device_of_the_arguments_is_timed_and_two_devices_are_refused(fake):
    assert cuda_events._device_of([On("cpu"), On("cuda:1"), On("cuda:1")]) == 1
    assert cuda_events._device_of([On("cpu")]) == 0
    with pytest.raises(
        ValueError, match=r"lie on cuda:0, cuda:2, and an event pair reads one device's clock"
    ):
        cuda_events._device_of([On("cuda:2"), On("cuda:0")])


def test_warm_up_outlasts_compilation(fake):
    calls = 0

    def compiled():
        nonlocal calls
        calls += 1
        fake.sim.sleep(1e6 / 2**calls if calls < 8 else 0.0)  # each compiles something smaller
        fake.work(3.0)

    found = time_cuda(compiled)
    assert us(found) == pytest.approx(3.0, abs=0.01)
    assert found.host_ms < 0.01, "the pilot met a call that still compiled"
    assert found.remarks == ()


def test_what_torch_compile_looks_at_is_counted_until_it_stops(monkeypatch):
    seen = torch.compile(lambda x: x + 1, backend="eager")
    before = cuda_events._compilations()
    seen(torch.zeros(3))
    after = cuda_events._compilations()
    seen(torch.zeros(3))
    assert after > before
    assert cuda_events._compilations() == after


def test_a_call_that_never_becomes_steady_is_named(fake):
    calls = 0

    def always_halves():
        nonlocal calls
        calls += 1
        fake.sim.sleep(4e9 / 2.2**calls if calls < 22 else 0)
        fake.work(3.0)

    assert any("not steady after 20 calls" in remark for remark in time_cuda(always_halves).remarks)


def test_a_call_that_keeps_its_results_is_stopped_before_the_memory_is_full(fake):
    def keeps():
        fake.work(499.0 + fake.allocated / 2e6 % 3)  # never the same twice, so nothing settles
        fake.allocated += 2_000_000
        assert fake.allocated < fake.free, "the card ran out of memory"

    found = time_cuda(keeps, spread=1e-9, max_seconds=60.0)
    assert found.left_bytes == 2_000_000
    assert fake.allocated < 0.75 * fake.free
    assert any("sampling stopped at" in remark and "for want of memory" in remark for remark in found.remarks)
    assert us(found) == pytest.approx(500.0, abs=0.5)


def test_a_call_that_leaves_too_much_to_be_timed_is_refused_with_the_amounts(fake):
    def keeps():
        fake.work(500.0)
        fake.allocated += 20_000_000

    with pytest.raises(TimingMemoryError, match=r"each call leaves 20\.0 MB allocated, and 0\.9 GB are free"):
        time_cuda(keeps)
    assert fake.allocated < 10 * 20_000_000


def test_out_of_memory_at_the_first_call_is_the_calls_own_and_later_the_timings(fake):
    def never_fits():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")

    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        time_cuda(never_fits)
    calls = 0

    def fits_ten_times():
        nonlocal calls
        calls += 1
        fake.work(5.0)
        if calls > 10:
            never_fits()

    with pytest.raises(
        TimingMemoryError, match=r"fitted into memory once.*Tried to allocate 3\.00 GiB"
    ) as error:
        time_cuda(fits_ten_times)
    assert error.value.__context__ is None, "the traceback keeps the failed call's tensors alive"


def test_where_copies_of_the_arguments_leave_no_room_the_call_is_timed_without(fake):
    calls = 0

    def crowded(x):
        nonlocal calls
        calls += 1
        x.add_(1)
        if calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        fake.work(5.0)

    x = torch.zeros(3)
    found = time_cuda(crowded, x)
    assert found.arguments_changed
    assert not found.arguments_restored
    assert "they could not be restored" in str(found)


def test_arguments_that_the_call_writes_hold_their_values_again(fake):
    x, nested, kept = torch.zeros(3), [torch.ones(2), {"deep": torch.full((2,), 5.0)}], torch.ones(4)

    def writes(x, nested, kept):
        fake.work(5.0)
        x += 1
        nested[1]["deep"].mul_(2)
        return kept.view(2, 2)  # aliases it, and writes nothing

    found = time_cuda(writes, x, nested, kept)
    assert found.arguments_changed
    assert found.arguments_restored
    assert (x.tolist(), nested[1]["deep"].tolist()) == ([0, 0, 0], [5, 5])
    assert [a["shape"] for a in found.arguments] == [[3], [2], [2], [4]]
    assert "changed its arguments, so its calls met different inputs; they are restored" in str(found)


def test_a_result_that_aliases_an_argument_is_no_write(fake):
    def aliases(x):
        fake.work(5.0)
        return x.view(-1)

    found = time_cuda(aliases, torch.zeros(3, 2))
    assert not found.arguments_changed
    assert not found.arguments_restored


def test_empty_tensors_are_arguments_like_others(fake):
    def call(x):
        fake.work(2.0)
        return x + 1

    assert time_cuda(call, torch.zeros(0, 3)).arguments == ({"shape": [0, 3], "dtype": "float32"},)


def test_an_escaped_stream_stands_in_the_result_by_name(fake):
    side = fake.side()

    def escapes():
        fake.work(20.0)
        side.wait_stream(fake.current)
        with torch.cuda.stream(side):
            fake.work(1.0)

    found = time_cuda(escapes)
    assert found.escaped
    assert (
        f"work on another stream is not counted (stream {side.cuda_stream:#x} of cuda:0 is not waited for)"
        in str(found)
    )
    assert found.as_dict()["streams"] == [
        {
            "name": f"stream {side.cuda_stream:#x} of cuda:0",
            "begins_inside": True,
            "ends_inside": False,
            "escaped": True,
        }
    ]
    assert us(found) == pytest.approx(20.0, abs=0.1), "the current stream's own work is what is left to read"


def test_a_joined_stream_is_counted_and_is_no_escape(fake):
    side = fake.side()

    def joined():
        side.wait_stream(fake.current)
        with torch.cuda.stream(side):
            fake.work(20.0)
        fake.current.wait_stream(side)

    found = time_cuda(joined)
    assert not found.escaped
    assert us(found) == pytest.approx(20.0, abs=0.1)
    assert "another stream" not in str(found)


def test_a_call_whose_work_is_all_elsewhere_has_nothing_to_time(fake):
    side = fake.side()

    def elsewhere():
        with torch.cuda.stream(side):
            fake.work(20.0)

    with pytest.raises(NothingLaunchedError, match="runs on a stream that the current one does not wait for"):
        time_cuda(elsewhere)


def test_long_work_of_a_library_on_a_stream_of_its_own_is_noticed(fake):
    side = fake.side()

    def library():
        fake.work(10.0)
        fake.current, before = side, fake.current
        fake.raw(300.0)
        fake.current = before

    found = time_cuda(library)
    assert found.escaped
    assert found.streams == ()
    assert "(some was still running at the end)" in str(found)


def test_a_host_that_is_slow_to_return_from_a_wait_is_no_escape(monkeypatch):
    slow = FakeCuda(monkeypatch, synchronize_us=700.0)
    assert not time_cuda(slow.work, 50.0).escaped


def test_a_call_that_cannot_be_watched_is_timed_and_says_so(fake):
    def dislikes_modes():
        if torch.utils._python_dispatch.is_in_torch_dispatch_mode():
            raise TypeError("no modes here")
        fake.work(5.0)

    found = time_cuda(dislikes_modes)
    assert found.remarks == ("its streams could not be watched (TypeError): short work may have escaped",)
    assert us(found) == pytest.approx(5.0, abs=0.01)


def test_estimates_of_no_length_divide_nothing(fake):
    for l2 in ("warm", "cold"):
        with pytest.raises(NothingLaunchedError, match="leaves no work"):
            time_cuda(fake.work, 0.0, l2=l2)


def test_a_region_is_read_after_its_block(fake):
    with region() as block:
        fake.work(30.0)
        with pytest.raises(RegionError, match="has not ended: read elapsed_ms after the with block"):
            _ = block.elapsed_ms
    assert block.elapsed_ms * 1e3 == pytest.approx(34.0, abs=1.01)


def test_a_region_whose_block_raises_passes_the_error_on_and_has_no_time(fake):
    with pytest.raises(KeyError, match="inside"), region() as block:
        raise KeyError("inside")
    with pytest.raises(RegionError, match="raised an error: there is no time"):
        _ = block.elapsed_ms


def test_a_region_ends_on_the_stream_that_it_began_on(fake):
    side = fake.side()
    with region() as block:
        fake.work(30.0)
        torch.cuda.set_stream(side)
    fake.set_stream(fake.default)
    assert block.elapsed_ms * 1e3 == pytest.approx(34.0, abs=1.01)


def test_events_that_are_not_complete_or_never_recorded_give_no_number(fake):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(ValueError, match="must be recorded"):
        start.elapsed_time(end)
    start.record()
    fake.work(50.0)
    end.record()
    with pytest.raises(RuntimeError, match="must be completed"):
        start.elapsed_time(end)
    block = cuda_events.Region(start, end, "ended")
    assert block.elapsed_ms * 1e3 == pytest.approx(53.0, abs=1.01), "the reading waits for the end event"


def test_streams_print_what_became_of_their_work():
    lost = OtherStream(name="stream 0x1 of cuda:0", begins_inside=False, ends_inside=False)
    assert (
        str(lost) == "stream 0x1 of cuda:0 starts without waiting for the current one and is not waited for"
    )
    unknown = dataclasses.replace(lost, begins_inside=None, ends_inside=True)
    assert unknown.escaped
    assert str(unknown).endswith("cannot be shown to be waited for")
    assert str(dataclasses.replace(lost, begins_inside=True, ends_inside=True)).endswith("is joined")
