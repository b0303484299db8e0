"""Tests of gpucourse.streams on a simulated device; tests/gpu holds the same cases on a real one."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpucourse import streams
from gpucourse.streams import Look, Watch, launches, look_at_streams
from tests.fake_cuda import FakeCuda
from tests.fake_cuda import Stream as FakeStream


@pytest.fixture
def fake(monkeypatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def call_on(fake, side, *, fork=True, join=True, work_us=1.0, capturable=True):
    """Make a call with work on a second stream, which waits for the first or does not, and is waited for or not."""

    def call():
        if fake.capture_stream is not None and not capturable:
            raise RuntimeError("operation not permitted when stream is capturing")
        here = torch.cuda.current_stream()
        if fork:
            side.wait_stream(here)
        with torch.cuda.stream(side):
            fake.work(work_us)
        fake.work(2.0)
        if join:
            here.wait_stream(side)

    return call


@pytest.mark.parametrize("capturable", [True, False])
@pytest.mark.parametrize("work_us", [0.001, 1.0, 400.0])
@pytest.mark.parametrize("fork", [True, False])
@pytest.mark.parametrize("join", [True, False])
def test_a_fork_or_join_that_is_missing_is_told_however_short_the_work(fake, fork, join, work_us, capturable):
    side = fake.side()
    call = call_on(fake, side, fork=fork, join=join, work_us=work_us, capturable=capturable)
    look = look_at_streams(call, host_ms=0.02, elapsed_ms=0.5)
    (found,) = look.others
    assert (found.begins_inside, found.ends_inside) == (fork, join)
    assert found.escaped == (not (fork and join))
    assert look.whole == (fork and join and capturable)
    assert look.at_home
    assert fake.current is fake.default, "a capture that failed left its stream the current one"


def test_a_call_on_the_current_stream_alone_has_no_other_streams(fake):
    assert look_at_streams(lambda: fake.work(3.0), 0.01, 0.01) == Look()


def test_a_view_or_an_allocation_on_another_stream_is_no_work(fake):
    side = fake.side()

    def call():
        fake.current, before = side, fake.current
        torch.empty(3).view(1, 3).t()
        fake.current = before
        fake.work(1.0)

    assert look_at_streams(call, 0.01, 0.01).others == ()
    assert launches(torch.ops.aten.nonzero.default)
    assert not launches(torch.ops.aten.empty_like.default)


def test_an_operation_is_on_the_device_of_its_tensors_or_the_one_it_is_asked_to_fill():
    cuda = torch.device("cuda", 1)
    assert streams._cuda_device(([3], {"device": cuda}), None) == cuda
    assert streams._cuda_device((torch.ones(2), [types.SimpleNamespace(device=cuda)])) == cuda
    assert streams._cuda_device((torch.ones(2), "text", 3), {"device": torch.device("cpu")}) is None


def test_what_is_queued_after_the_join_is_told(fake):
    side = fake.side()

    def call():
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            fake.work(1.0)
        here.wait_stream(side)
        with torch.cuda.stream(side):
            fake.work(1.0)

    look = look_at_streams(call, 0.02, 0.02)
    (found,) = look.others
    assert found.ends_inside is False
    assert found.begins_inside is True
    assert not look.at_home


def test_what_is_queued_before_the_fork_is_told(fake):
    side = fake.side()

    def call():
        with torch.cuda.stream(side):
            fake.work(1.0)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            fake.work(1.0)
        torch.cuda.current_stream().wait_stream(side)

    look = look_at_streams(call, 0.02, 0.02)
    (found,) = look.others
    assert found.begins_inside is False
    assert found.ends_inside is True
    assert not look.whole


def test_a_library_kernel_on_a_stream_that_was_made_current_is_seen(fake):
    side = fake.side()

    def call(join):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            fake.raw(1.0)
        if join:
            torch.cuda.current_stream().wait_stream(side)

    for join in (True, False):
        (found,) = look_at_streams(lambda join=join: call(join), 0.02, 0.02).others
        assert (found.begins_inside, found.ends_inside) == (True, join)


def test_a_call_that_joins_the_callers_own_stream_by_name_is_joined_and_kept_out_of_graphs(fake):
    side, here = fake.side(), fake.default

    def call():
        side.wait_stream(here)
        with torch.cuda.stream(side):
            fake.work(1.0)
        here.wait_stream(side)

    look = look_at_streams(call, 0.02, 0.02)
    (found,) = look.others
    assert not found.escaped
    assert not look.whole, "a graph would hold nothing of the work on that stream"


@pytest.mark.parametrize("join", [True, False])
def test_where_two_streams_share_a_queue_only_the_capture_decides(fake, monkeypatch, join):
    monkeypatch.setattr(streams, "_independent", lambda *_streams: False)
    (found,) = look_at_streams(call_on(fake, fake.side(), join=join), 0.02, 0.02).others
    assert (found.begins_inside, found.ends_inside) == ((True, True) if join else (None, False))
    (found,) = look_at_streams(call_on(fake, fake.side(), fork=False), 0.02, 0.02).others
    assert (found.begins_inside, found.ends_inside, found.escaped) == (None, None, True)


def test_two_streams_are_told_apart_by_holding_one_up(fake):
    one, other = fake.side(), fake.side()
    assert streams._independent(one, other)
    other.queue = one.queue  # as if the driver had let them share
    assert not streams._independent(one, other)


def test_a_stream_of_another_device_cannot_be_told(fake):
    side = fake.side()
    side.device = torch.device("cuda", 1)
    call = call_on(fake, side, capturable=False)
    (found,) = look_at_streams(call, 0.02, 0.02).others
    assert (found.begins_inside, found.ends_inside, found.escaped) == (None, None, True)
    assert "of cuda:1 cannot be shown to be waited for" in str(found)


def test_a_call_that_takes_another_way_each_time_cannot_be_shown_to_join(fake):
    side, calls = fake.side(), 0

    def call():
        nonlocal calls
        calls += 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2 if calls == 1 else 1):
                fake.work(1.0)
        torch.cuda.current_stream().wait_stream(side)
        if fake.capture_stream is not None:
            raise RuntimeError("cannot be captured")

    (found,) = look_at_streams(call, 0.02, 0.02).others
    assert found.escaped


def test_the_watch_is_taken_off_again_whatever_the_call_does(fake):
    def breaks():
        raise KeyError("inside")

    with pytest.raises(KeyError), Watch().watching():
        breaks()
    assert torch.cuda.set_stream == fake.set_stream
    seen = Watch()
    with seen.watching():
        fake.work(1.0)
    fake.work(1.0)
    (used,) = seen.used.values()
    assert used.operations == 1


def test_watching_does_not_load_the_compiler():
    code = (
        "import sys, torch\nfrom gpucourse.streams import Watch\n"
        "watch = Watch()\ntorch.cuda.current_stream = torch.cuda.is_current_stream_capturing = None\n"
        "with watch.watching():\n    torch.ones(3) + 1\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "False", "the first call of time_cuda in a process takes seconds"


def counting_backend(runs):
    def backend(graph, _inputs):
        def run(*args):
            runs.append(1)
            return graph(*args)

        return run

    return backend


@pytest.mark.parametrize("mode", [None, TorchDispatchMode])
def test_a_compiled_function_stays_compiled_after_it_was_watched(fake, mode):
    runs: list[int] = []
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * 2 + 1, backend=counting_backend(runs))
    compiled(torch.ones(3))
    before = len(runs)
    if mode is None:
        with Watch().watching():
            compiled(torch.ones(3))
    else:  # what the watch has to prevent: a mode by itself makes it run uncompiled ever after

        class Plain(mode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

        with contextlib.suppress(RuntimeError), Plain():
            compiled(torch.ones(3))
    compiled(torch.ones(3))
    assert before == 1
    assert len(runs) == (2 if mode is None else 1)


def test_a_backward_pass_is_watched(fake):
    layer, seen = torch.nn.Linear(3, 3), Watch()
    with seen.watching():
        loss = layer(torch.ones(2, 3)).sum()
    forward = seen.used[fake.default.cuda_stream].operations
    with seen.watching():
        loss.backward()
    assert seen.used[fake.default.cuda_stream].operations > forward > 0


@pytest.mark.parametrize("join", [True, False])
def test_a_call_on_the_very_stream_that_captures_run_on_is_judged_all_the_same(fake, monkeypatch, join):
    side = fake.side(fake.graph_stream)  # torch hands its 32 streams out in turns, so this happens
    handed_out = iter([side, fake.default, FakeStream(fake)])
    monkeypatch.setattr(torch.cuda, "Stream", lambda: next(handed_out))
    look = look_at_streams(call_on(fake, side, join=join), 0.02, 0.02)
    (found,) = look.others
    assert (found.begins_inside, found.ends_inside, look.whole) == (True, join, join)
    assert look.capture_on.cuda_stream not in (side.cuda_stream, fake.default.cuda_stream)


def test_the_current_stream_is_the_same_after_a_capture_whatever_happens_in_it(fake):
    def refused():
        raise RuntimeError("not permitted")

    for error, inside in ((RuntimeError, refused), (KeyError, lambda: {}["missing"])):
        with pytest.raises(error), streams.capturing(torch.cuda.CUDAGraph()):
            inside()
        assert fake.current is fake.default
    with pytest.raises(RuntimeError, match="failed"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        refused()
    assert fake.current is fake.graph_stream, "what torch's own context leaves, which is why there is another"
