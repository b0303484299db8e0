"""Loops on a GPU: the device's memory is the allocator's, and the same causes are found by name."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

from gpucourse.retention import watch_growth  # noqa: E402

pytestmark = pytest.mark.gpu

WIDTH = 512


@pytest.fixture
def whole_process():
    """Ask for the process as it is, with all that it holds."""


@pytest.fixture(autouse=True)
def small_process(request):
    """Set aside what the process holds already, unless a test asks for the whole: looks go over every object."""
    if "whole_process" in request.fixturenames:
        yield
        return
    gc.freeze()
    yield
    gc.unfreeze()


def net():
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    ).cuda()


def batch():
    return torch.randn(256, WIDTH, device="cuda")


def loss_of(model):
    return model(batch()).square().mean()


@pytest.mark.usefixtures("whole_process")
def test_an_evaluation_sum_keeps_its_graphs_on_the_device():
    model, total = net(), torch.zeros((), device="cuda")

    def step():
        nonlocal total
        total = total + loss_of(model)

    growth = watch_growth(step)
    assert growth.device is not None
    assert growth.device.state == "grows"
    assert growth.host.state == "steady"
    assert growth.nodes.state == "grows"
    assert growth.suspects[0].cause == "running sum"
    assert "`total`" in growth.suspects[0].holder
    # Input, hidden layer and output, 512 KiB each: what the graph saves is what the allocator gave out.
    assert growth.suspects[0].device_bytes == pytest.approx(growth.device.per_step, rel=0.02)
    assert growth.device.per_step >= 3 * 256 * WIDTH * 4


def test_a_training_sum_grows_on_the_host_only():
    model, total = net(), torch.zeros((), device="cuda")

    def step():
        nonlocal total
        loss = loss_of(model)
        loss.backward()
        total = total + loss

    growth = watch_growth(step)
    assert growth.device is not None
    assert growth.device.state == "steady"
    assert growth.nodes.state == "grows"
    assert growth.causes == ("running sum",)


def test_retain_graph_with_kept_outputs_is_named():
    model, outputs = net(), []

    def step():
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        outputs.append(loss)

    growth = watch_growth(step)
    assert growth.device is not None
    assert growth.device.state == "grows"
    assert growth.suspects[0].cause == "retain_graph"


def test_gradients_made_in_the_backward_threads_get_the_line_that_waits_for_them():
    model, gradients = net(), []
    model[0].weight.register_hook(lambda gradient: gradients.append(gradient))

    def step():
        model.zero_grad()
        loss = loss_of(model)
        loss.backward()

    growth = watch_growth(step)
    assert growth.device is not None
    assert growth.device.per_step == WIDTH * WIDTH * 4
    assert growth.suspects[0].cause == "forward hook"
    assert "loss.backward()" in growth.suspects[0].lines[0]


def test_tensors_on_the_device_and_copies_on_the_host_are_told_apart():
    model, copies = net(), []
    growth = watch_growth(lambda: copies.append(model(batch()).detach().cpu()))
    assert growth.device is not None
    assert growth.device.state == "steady"
    assert growth.host.state == "grows"
    assert growth.host.per_step == 256 * WIDTH * 4
    assert growth.suspects[0].cause == "kept tensors"
    assert growth.suspects[0].host_bytes == 256 * WIDTH * 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_retains_nothing(precision):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(model)
        loss.backward()
        optimizer.step()
        loss.item()

    growth = watch_growth(step)
    assert not growth.leaks, growth
    assert not growth.unclear, growth
    assert growth.suspects == ()


def test_what_the_allocator_only_caches_is_no_growth():
    def step():
        for size in (1, 3, 7, 20, 60):
            torch.empty(size * 2**20, device="cuda")

    growth = watch_growth(step)
    assert not growth.leaks
    assert not growth.unclear


@pytest.mark.usefixtures("whole_process")
def test_after_the_watch_the_device_holds_what_the_loop_holds():
    gc.collect()  # what earlier tests left in cycles
    before = torch.cuda.memory_allocated()
    kept = []
    assert watch_growth(lambda: kept.append(batch())).leaks
    assert torch.cuda.memory_allocated() - before == len(kept) * 256 * WIDTH * 4
    kept.clear()
    assert torch.cuda.memory_allocated() == before


def test_a_capture_with_cuda_graphs_does_not_grow_when_it_is_replayed():
    static, model = batch(), net().requires_grad_(False)
    for _ in range(3):
        model(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(static)

    def step():
        graph.replay()
        return output.sum().item()

    assert not watch_growth(step).leaks
