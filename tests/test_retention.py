"""A zoo of loops: those that leak are found by the name of their cause, those that do not raise no alarm."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import itertools
import json
import math
import random
import re
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from torch.utils.weak import TensorWeakRef  # noqa: E402

from gpucourse import live_memory  # noqa: E402
from gpucourse.retention import _trend, watch_growth  # noqa: E402
from gpucourse.suspects import CAUSES  # noqa: E402

WIDTH = 32


@pytest.fixture
def whole_process():
    """Ask for the process as it is, with all that it holds."""


@pytest.fixture(autouse=True)
def small_process(request):
    """In `make check`, set aside what the process holds already, unless a test asks for the whole.

    A look goes over every object, of which a process that has collected all tests has a million. In the full run
    nothing is set aside.
    """
    if "not slow" not in request.config.option.markexpr or "whole_process" in request.fixturenames:
        yield
        return
    gc.freeze()
    yield
    gc.unfreeze()


def net() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))


def batch() -> Any:
    return torch.randn(8, WIDTH)


def loss_of(model: Any) -> Any:
    return model(batch()).square().mean()


# ------------------------------------------------------------------------------------------------------ they leak


def evaluation_sum() -> Callable[[], Any]:
    model, total = net(), torch.zeros(())

    def step():
        nonlocal total
        total = total + loss_of(model)

    return step


def evaluation_sum_in_place() -> Callable[[], Any]:
    model, total = net(), torch.zeros(())

    def step():
        nonlocal total
        total += loss_of(model)

    return step


def training_sum() -> Callable[[], Any]:
    model, total = net(), torch.zeros(())

    def step():
        nonlocal total
        loss = loss_of(model)
        loss.backward()
        total = total + loss

    return step


def carried_state() -> Callable[[], Any]:
    cell, state = torch.nn.RNNCell(WIDTH, WIDTH), torch.zeros(8, WIDTH)

    def step():
        nonlocal state
        state = cell(batch(), state)

    return step


def retained_graph() -> Callable[[], Any]:
    model, outputs = net(), []

    def step():
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        outputs.append(loss)

    return step


def created_graph() -> Callable[[], Any]:
    model, norms = net(), []

    def step():
        loss = loss_of(model)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        norms.append(sum(g.square().sum() for g in grads))

    return step


def list_of_outputs() -> Callable[[], Any]:
    model, outputs = net(), []
    return lambda: outputs.append(model(batch()))


def list_of_losses_after_backward() -> Callable[[], Any]:
    model, losses = net(), []

    def step():
        loss = loss_of(model)
        loss.backward()
        losses.append(loss)

    return step


def list_of_detached_outputs() -> Callable[[], Any]:
    model, outputs = net(), []
    return lambda: outputs.append(model(batch()).detach())


def deque_without_bound() -> Callable[[], Any]:
    model, recent = net(), collections.deque()
    return lambda: recent.append(model(batch()).detach().clone())


def view_of_a_large_output() -> Callable[[], Any]:
    firsts = []
    return lambda: firsts.append(torch.randn(1000, 10)[0])


def activation_hook() -> Callable[[], Any]:
    model, activations = net(), []

    def save(module, inputs, output):
        activations.append(output.detach())

    model[0].register_forward_hook(save)
    return lambda: model(batch())


class Recorder:
    def __init__(self) -> None:
        self.seen = collections.defaultdict(list)

    def __call__(self, module, inputs, output):
        self.seen[type(module).__name__].append(output)


def hook_object_with_graph() -> Callable[[], Any]:
    model, recorder = net(), Recorder()
    for module in model:
        module.register_forward_hook(recorder)

    def step():
        model(batch())

    return step


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = x * 2
        return ctx.kept + 0

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def function_that_keeps_tensors() -> Callable[[], Any]:
    model, losses = net(), []

    def step():
        loss = Doubled.apply(model(batch())).mean()
        loss.backward()
        losses.append(loss)

    return step


def exceptions_kept() -> Callable[[], Any]:
    model, errors = net(), []

    def fails():
        activations = model(batch()).detach() * 2
        raise ValueError(f"a bad batch of {len(activations)}")

    def step():
        try:
            fails()
        except ValueError as error:
            errors.append(error)

    return step


def cache_by_step() -> Callable[[], Any]:
    cache, number = {}, 0

    def step():
        nonlocal number
        number += 1
        cache[number] = torch.full((100,), float(number))

    return step


def lru_cache_by_step() -> Callable[[], Any]:
    @functools.cache
    def mask(length):
        return torch.ones(100) * length

    number = 0

    def step():
        nonlocal number
        number += 1
        mask(number)

    return step


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.history = []

    def forward(self, x):
        y = self.linear(x)
        self.history.append(y.detach())
        return y


def list_in_a_module() -> Callable[[], Any]:
    model = Net()

    def step():
        model(batch())

    return step


def closures_kept() -> Callable[[], Any]:
    model, callbacks = net(), []

    def step():
        output = model(batch()).detach()
        callbacks.append(lambda: output.sum())

    return step


def generators_kept() -> Callable[[], Any]:
    model, readers = net(), []

    def reader():
        held = model(batch()).detach()
        yield from held

    def step():
        rows = reader()
        next(rows)
        readers.append(rows)

    return step


def growing_tensor() -> Callable[[], Any]:
    outputs = torch.zeros(0, WIDTH)

    def step():
        nonlocal outputs
        outputs = torch.cat([outputs, batch()])

    return step


def lengths_that_vary() -> Callable[[], Any]:
    kept, sizes = [], random.Random(0)
    return lambda: kept.append(torch.ones(sizes.randrange(50, 5000)))


def cycle_of_objects_in_a_list() -> Callable[[], Any]:
    class Item:
        pass

    items = []

    def step():
        item = Item()
        item.self, item.value = item, batch()
        items.append(item)

    return step


GLOBAL_LOG: list[Any] = []


def global_list() -> Callable[[], Any]:
    GLOBAL_LOG.clear()
    return lambda: GLOBAL_LOG.append(batch())


def gradients_with_graphs() -> Callable[[], Any]:
    model = net()

    def step():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of this very leak
            loss_of(model).backward(create_graph=True)

    return step


def hook_on_a_gradient() -> Callable[[], Any]:
    model, gradients = net(), []

    def save(gradient):
        gradients.append(gradient)

    model[0].weight.register_hook(save)

    def step():
        model.zero_grad()
        loss_of(model).backward()

    return step


def node_kept() -> Callable[[], Any]:
    model, nodes = net(), []
    return lambda: nodes.append(loss_of(model).grad_fn)


class Meter:
    values: ClassVar[list[Any]] = []


def class_attribute() -> Callable[[], Any]:
    Meter.values.clear()
    return lambda: Meter.values.append(batch())


def default_of_the_step() -> Callable[[], Any]:
    def step(kept=[]):  # noqa: B006
        kept.append(batch())

    return step


def average_of_weights_with_graph() -> Callable[[], Any]:
    model = net()
    averages = [weight.detach().clone() for weight in model.parameters()]

    def step():
        for average, weight in zip(averages, model.parameters(), strict=True):
            average.mul_(0.9).add_(weight * 0.1)

    return step


class Trainer:
    def __init__(self) -> None:
        self.model, self.losses = net(), []

    def step(self):
        loss = loss_of(self.model)
        loss.backward()
        self.losses.append(loss.detach())


def bound_method() -> Callable[[], Any]:
    return Trainer().step


def metrics_by_name() -> Callable[[], Any]:
    model, metrics = net(), collections.defaultdict(list)
    return lambda: metrics["loss"].append(loss_of(model))


def buffers_by_step() -> Callable[[], Any]:
    model, number = net(), itertools.count()
    return lambda: model.register_buffer(f"mask{next(number)}", torch.zeros(100))


def checkpointed_outputs() -> Callable[[], Any]:
    from torch.utils.checkpoint import checkpoint

    model, outputs = net(), []
    return lambda: outputs.append(checkpoint(model, batch().requires_grad_(), use_reentrant=False))


def resized_in_place() -> Callable[[], Any]:
    buffer = torch.zeros(10)
    return lambda: buffer.resize_(buffer.numel() + 1000)


def every_third_step() -> Callable[[], Any]:
    kept, number = [], itertools.count()
    return lambda: kept.append(batch()) if next(number) % 3 == 0 else None


def other_thread() -> Callable[[], Any]:
    queue = []

    def work():
        queue.append(batch())

    def step():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    return step


def sparse_tensors() -> Callable[[], Any]:
    kept = []
    return lambda: kept.append(torch.eye(50).to_sparse())


def inference_outputs() -> Callable[[], Any]:
    model, outputs = net(), []

    def step():
        with torch.inference_mode():
            outputs.append(model(batch()))

    return step


def numpy_arrays_of_tensors() -> Callable[[], Any]:
    arrays = []
    return lambda: arrays.append(batch().numpy())


@dataclasses.dataclass
class Leak:
    make: Callable[[], Callable[[], Any]]
    cause: str
    holder: str
    line: str
    host: bool = True
    nodes: bool = True


LEAKS = [
    Leak(evaluation_sum, "running sum", "`total`", "loss_of"),
    Leak(evaluation_sum_in_place, "running sum", "`total`", "loss_of"),
    Leak(training_sum, "running sum", "`total`", "", host=False),
    Leak(carried_state, "carried graph", "`state`", "cell(batch(), state)"),
    Leak(retained_graph, "retain_graph", "a list of 15, in `outputs`", "loss_of"),
    Leak(created_graph, "create_graph", "`norms`", "torch.autograd.grad"),
    Leak(list_of_outputs, "outputs kept with their graph", "`outputs`", "outputs.append(model(batch()))"),
    Leak(list_of_losses_after_backward, "outputs kept with their graph", "`losses`", "", host=True),
    Leak(
        list_of_detached_outputs, "kept tensors", "a list of 15, in `outputs`", "model(batch())", nodes=False
    ),
    Leak(deque_without_bound, "kept tensors", "a deque of 15, in `recent`", ".clone()", nodes=False),
    Leak(view_of_a_large_output, "kept tensors", "`firsts`", "torch.randn(1000, 10)[0]", nodes=False),
    Leak(activation_hook, "forward hook", "`activations`", "model(batch())", nodes=False),
    Leak(hook_object_with_graph, "forward hook", "`seen`", "model(batch())"),
    Leak(function_that_keeps_tensors, "custom Function", "`kept` on ctx of Function Doubled", "x * 2"),
    Leak(exceptions_kept, "exception", "local `activations` of fails()", "* 2", nodes=False),
    Leak(cache_by_step, "cache", "a dict of 15, in `cache`", "torch.full", nodes=False),
    Leak(lru_cache_by_step, "cache", "the lru_cache of mask()", "torch.ones(100) * length", nodes=False),
    Leak(list_in_a_module, "module attribute", "attribute `history` of Net", "self.linear(x)", nodes=False),
    Leak(closures_kept, "closure", "`output`, a closure variable", "model(batch())", nodes=False),
    Leak(generators_kept, "generator", "reader()", "model(batch())", nodes=False),
    Leak(growing_tensor, "growing tensor", "`outputs`", "torch.cat", nodes=False),
    Leak(lengths_that_vary, "kept tensors", "`kept`", "torch.ones", nodes=False),
    Leak(cycle_of_objects_in_a_list, "kept tensors", "`items`", "torch.randn", nodes=False),
    Leak(gradients_with_graphs, "create_graph", "the gradient `.grad` of a parameter", "create_graph=True"),
    Leak(
        hook_on_a_gradient,
        "forward hook",
        "filled by the hook save() on a tensor's gradient",
        ".backward()",
        nodes=False,
    ),
    Leak(node_kept, "outputs kept with their graph", "`nodes`", "loss_of"),
    Leak(class_attribute, "kept tensors", "class attribute `values` of Meter", "torch.randn", nodes=False),
    Leak(default_of_the_step, "kept tensors", "a default of step()", "torch.randn", nodes=False),
    Leak(average_of_weights_with_graph, "running sum", "`averages`", "weight * 0.1"),
    Leak(bound_method, "kept tensors", "attribute `losses` of Trainer", "loss_of", nodes=False),
    Leak(metrics_by_name, "outputs kept with their graph", "`metrics`", "loss_of"),
    Leak(
        buffers_by_step,
        "module attribute",
        "attribute `_buffers` of Sequential",
        "torch.zeros(100)",
        nodes=False,
    ),
    Leak(checkpointed_outputs, "outputs kept with their graph", "`outputs`", "checkpoint(model"),
    Leak(resized_in_place, "growing tensor", "`buffer`", "", nodes=False),
    Leak(every_third_step, "kept tensors", "`kept`", "", nodes=False),
    Leak(other_thread, "kept tensors", "`queue`", "", nodes=False),
    Leak(sparse_tensors, "kept tensors", "`kept`", "to_sparse", nodes=False),
    Leak(inference_outputs, "kept tensors", "`outputs`", "model(batch())", nodes=False),
    Leak(numpy_arrays_of_tensors, "unknown", "no holder found", "torch.randn", nodes=False),
    Leak(global_list, "kept tensors", "global `GLOBAL_LOG`", "torch.randn", nodes=False),
]


# ------------------------------------------------------------------------------------------------- they do not leak


def numbers_only() -> Callable[[], Any]:
    model, total, losses = net(), 0.0, []

    def step():
        nonlocal total
        loss = loss_of(model)
        loss.backward()
        total += loss.item()
        losses.append(loss.item())

    return step


def copies_dropped() -> Callable[[], Any]:
    model, seen = net(), []

    def step():
        output = model(batch()).detach().cpu().clone()
        seen.append(float(output.mean()))

    return step


def training_with_adam() -> Callable[[], Any]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    return step


def gradients_kept_and_added_to() -> Callable[[], Any]:
    model = net()

    def step():
        loss_of(model).backward()

    return step


def last_output_kept() -> Callable[[], Any]:
    model, last = net(), None

    def step():
        nonlocal last
        last = loss_of(model)

    return step


def bounded_deque() -> Callable[[], Any]:
    model, recent = net(), collections.deque(maxlen=4)
    return lambda: recent.append(model(batch()))


def cache_that_settles() -> Callable[[], Any]:
    cache, number = {}, 0

    def step():
        nonlocal number
        number += 1
        cache.setdefault(number % 3, torch.ones(100))

    return step


def list_cleared_now_and_then() -> Callable[[], Any]:
    outputs = []

    def step():
        outputs.append(batch())
        if len(outputs) == 3:
            outputs.clear()

    return step


def sizes_that_vary() -> Callable[[], Any]:
    sizes, last = random.Random(1), None

    def step():
        nonlocal last
        last = torch.ones(sizes.randrange(50, 5000))

    return step


def cycles_that_only_a_collection_frees() -> Callable[[], Any]:
    class Item:
        pass

    def step():
        item = Item()
        item.self, item.value = item, batch()

    return step


def exceptions_handled() -> Callable[[], Any]:
    texts = []

    def step():
        try:
            x = batch()
            raise ValueError(f"{x.shape}")
        except ValueError as error:
            texts.append(str(error))

    return step


def running_sum_detached() -> Callable[[], Any]:
    model, total = net(), torch.zeros(())

    def step():
        nonlocal total
        loss = loss_of(model)
        loss.backward()
        total = total + loss.detach()

    return step


def carried_state_detached() -> Callable[[], Any]:
    cell, state = torch.nn.RNNCell(WIDTH, WIDTH), torch.zeros(8, WIDTH)

    def step():
        nonlocal state
        state = cell(batch(), state).detach()

    return step


def python_objects_only() -> Callable[[], Any]:
    rows = []
    return lambda: rows.append({"step": len(rows), "name": "x" * 100})


def checkpointed_training() -> Callable[[], Any]:
    from torch.utils.checkpoint import checkpoint

    model = net()

    def step():
        checkpoint(model, batch(), use_reentrant=False).square().mean().backward()

    return step


def batch_norm_statistics() -> Callable[[], Any]:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))

    def step():
        loss_of(model).backward()
        model.zero_grad()

    return step


HEALTHY = [
    numbers_only,
    copies_dropped,
    training_with_adam,
    gradients_kept_and_added_to,
    last_output_kept,
    bounded_deque,
    cache_that_settles,
    list_cleared_now_and_then,
    sizes_that_vary,
    cycles_that_only_a_collection_frees,
    exceptions_handled,
    running_sum_detached,
    carried_state_detached,
    python_objects_only,
    checkpointed_training,
    batch_norm_statistics,
]


# Each watch takes a second or more: these stand for their kind in `make check`, the others run in `make test`.
QUICK = {
    evaluation_sum,
    training_sum,
    retained_graph,
    activation_hook,
    function_that_keeps_tensors,
    exceptions_kept,
}
QUICK |= {numbers_only, training_with_adam, bounded_deque, cache_that_settles, checkpointed_training}


def some_are_slow(made: list[Any]) -> list[Any]:
    names = [getattr(one, "make", one) for one in made]
    return [
        pytest.param(one, id=name.__name__, marks=() if name in QUICK else pytest.mark.slow)
        for one, name in zip(made, names, strict=True)
    ]


@pytest.mark.parametrize("leak", some_are_slow(LEAKS))
def test_a_loop_that_leaks_is_found_by_the_name_of_its_cause(leak):
    growth = watch_growth(leak.make(), steps=9)
    assert growth.leaks, growth
    first = growth.suspects[0]
    assert first.cause == leak.cause
    assert leak.holder in first.holder.replace("of 16", "of 15")
    assert any(leak.line in line for line in first.lines) or not leak.line
    assert (growth.host.state == "grows") == leak.host
    assert (growth.nodes.state == "grows") == leak.nodes


@pytest.mark.parametrize("make", some_are_slow(HEALTHY))
@pytest.mark.parametrize("warm_up", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_loop_that_settles_raises_no_alarm(make, warm_up):
    growth = watch_growth(make(), warm_up=warm_up)
    assert not growth.leaks, growth
    assert not growth.unclear or make is sizes_that_vary, growth
    assert growth.suspects == ()
    assert growth.verdict.startswith(("The loop retains nothing in 12 steps", "Too noisy"))


# ------------------------------------------------------------------------------------------------ noise and numbers


@pytest.mark.slow
def test_growth_that_goes_up_and_down_is_not_called_a_leak_nor_steady():
    sizes, last, number = random.Random(3), None, 0

    def step():
        nonlocal last, number
        number += 1
        last = torch.ones(2000 * number + sizes.randrange(6000))

    growth = watch_growth(step)
    assert growth.unclear
    assert not growth.leaks
    assert growth.verdict.startswith("Too noisy to tell in 12 steps after 3 of warm-up: ")
    assert "steps=48" in growth.verdict


def test_the_amount_a_step_is_exact_where_each_step_keeps_the_same():
    kept = []
    growth = watch_growth(lambda: kept.append(torch.ones(1000)), steps=6, warm_up=0)
    assert growth.host.per_step == 4000
    assert growth.host.uncertainty == 0
    assert [after - before for before, after in itertools.pairwise(growth.host.values)] == [4000] * 6
    assert growth.suspects[0].host_bytes == 4000
    assert growth.suspects[0].tensors == 1
    assert growth.suspects[0].shapes == ("float32 [1000]",)
    assert len(kept) == 6 + 3


def test_a_storage_that_two_tensors_share_counts_once():
    kept = []

    def step():
        x = torch.ones(1000)
        kept.extend([x, x[10:20], x.view(10, 100)])

    assert watch_growth(step, steps=6).host.per_step == 4000


@pytest.mark.slow
def test_the_amount_of_a_leak_of_varying_size_carries_an_uncertainty_that_covers_it():
    sizes, kept = random.Random(7), []
    growth = watch_growth(lambda: kept.append(torch.ones(sizes.randrange(1000, 3000))), steps=24)
    assert growth.leaks
    assert growth.host.uncertainty > 100
    assert abs(growth.host.per_step - 4 * 2000) < 4 * growth.host.uncertainty
    assert " ± " in growth.verdict


def test_what_saved_tensors_hold_counts_though_no_python_object_holds_them():
    model, outputs = net(), []

    def step():
        outputs.append(model(batch()).sum())

    growth = watch_growth(step, steps=6)
    # The input, the hidden layer after the ReLU (saved once though two operations save it), and the sum itself.
    assert growth.host.per_step == 2 * 8 * WIDTH * 4 + 4


@pytest.mark.slow
def test_a_backward_pass_that_frees_the_graph_leaves_nodes_only():
    growth = watch_growth(training_sum(), steps=6)
    assert growth.host.state == "steady"
    assert growth.nodes.state == "grows"
    assert growth.nodes.per_step >= 5
    assert "graph nodes a step" in growth.verdict


@pytest.mark.parametrize(
    ("values", "births", "state"),
    [
        ([5] * 10, [0] * 5, "steady"),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [], "grows"),
        ([0, 3, 6, 9, 9, 9, 9, 9, 9, 9], [1, 2, 3], "steady"),  # a cache that settles
        ([0, 1, 2, 0, 1, 2, 0, 1, 2, 0], [7, 8], "steady"),  # cleared now and then
        ([9, 7, 9, 8, 9, 7, 8, 9, 8, 7], [1, 5, 8], "grows"),  # noisy, and something is left of every part
        ([0, 4, 2, 6, 4, 8, 6, 10, 8, 12], [9], "unclear"),
        ([9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [9], "steady"),
        ([0, 0, 0, 0, 0, 0, 0, 0, 0, 7], [9], "steady"),  # once, in the last step
    ],
)
def test_a_trend_is_judged_by_its_course_and_by_when_survivors_were_made(values, births, state):
    assert _trend("host tensors", values, births).state == state


def test_the_line_s_slope_and_error_are_those_of_least_squares():
    values = [3, 1, 4, 1, 5, 9, 2]
    found = _trend("host tensors", values, [])
    xs = range(7)
    slope = sum((x - 3) * y for x, y in zip(xs, values, strict=True)) / 28
    rests = [y - sum(values) / 7 - slope * (x - 3) for x, y in zip(xs, values, strict=True)]
    assert math.isclose(found.per_step, slope)
    assert math.isclose(found.uncertainty, math.sqrt(sum(r * r for r in rests) / 5 / 28))


# ---------------------------------------------------------------------------------------------------- what is said


@pytest.mark.usefixtures("whole_process")
def test_the_verdict_names_amount_cause_and_holder_and_the_text_what_helps():
    growth = watch_growth(evaluation_sum(), steps=6)
    assert re.fullmatch(
        r"The loop retains 3\.07 kB of host tensors and \d+ graph nodes a step: a running sum keeps the graph of "
        r"every step that it has added \(`total`, a closure variable of step\(\)\)\.",
        growth.verdict,
    )
    assert "add loss.item() or loss.detach()" in str(growth)
    assert growth.causes == ("running sum",)


def test_a_growth_is_plain_data_and_a_page():
    growth = watch_growth(list_of_outputs(), steps=6)
    data = json.loads(json.dumps(growth.as_dict()))
    assert data["leaks"] is True
    assert data["suspects"][0]["cause"] == "outputs kept with their graph"
    assert data["host"]["values"] == list(growth.host.values)
    page = growth._repr_html_()
    assert page.count("<table") == 2
    assert "outputs kept with their graph" in page
    assert "closure variable of a lambda" in page
    assert watch_growth(numbers_only(), steps=6)._repr_html_().count("<table") == 1


def test_no_device_is_none_not_zero():
    growth = watch_growth(numbers_only(), steps=6)
    if not torch.cuda.is_available():
        assert growth.device is None
        assert growth.as_dict()["device"] is None


def test_every_cause_has_an_animal_in_the_zoo():
    assert {leak.cause for leak in LEAKS} == set(CAUSES)


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("given", [None, 3, torch.ones(2), [lambda: None]])
def test_what_cannot_be_called_is_refused(given):
    with pytest.raises(TypeError, match=r"needs the loop's body as a function, .*write watch_growth\(step\)"):
        watch_growth(given)


@pytest.mark.parametrize("steps", [5, 1, 0, -3])
def test_too_few_steps_are_refused(steps):
    with pytest.raises(ValueError, match=f"steps={steps} is too few to tell: at least 6, .* 3 parts"):
        watch_growth(lambda: None, steps=steps)


def test_a_negative_warm_up_is_refused():
    with pytest.raises(ValueError, match="warm_up=-1 is too few to tell: at least 0"):
        watch_growth(lambda: None, warm_up=-1)


@pytest.mark.parametrize(
    ("steps", "kind"), [(True, "bool"), (8.0, "float"), ("8", "str"), (None, "NoneType")]
)
def test_a_number_of_steps_that_is_none_is_refused(steps, kind):
    with pytest.raises(TypeError, match=rf"is no whole number of steps but a {kind}"):
        watch_growth(lambda: None, steps=steps)


def test_a_generator_function_is_refused_since_its_body_does_not_run():
    def step():
        yield batch()

    async def coroutine():
        return batch()

    with pytest.raises(TypeError, match=r"returned a generator and ran none of its body"):
        watch_growth(step)
    with pytest.raises(TypeError, match=r"returned a coroutine and ran none of its body"):
        watch_growth(coroutine)


@pytest.mark.usefixtures("whole_process")
@pytest.mark.parametrize("at", [1, 8, 17])
def test_what_the_step_raises_is_passed_on_and_everything_is_put_back(at):
    number, refs, kept = 0, [], []
    before = state()

    def step():
        nonlocal number
        number += 1
        x = torch.ones(100)
        refs.append(weakref.ref(x))
        kept.append(torch.ones(10))  # it leaks, so that the steps with lines noted come, too
        if number == at:
            raise KeyError("the loop's own error")

    with pytest.raises(KeyError, match="the loop's own error"):
        watch_growth(step)
    assert number == at
    gc.collect()
    assert [ref() for ref in refs] == [None] * at
    assert state() == before


# ------------------------------------------------------------------------------------ the instrument keeps nothing


def state() -> tuple[Any, ...]:
    return (
        gc.get_freeze_count(),
        gc.isenabled(),
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        torch.autograd.backward,
        torch.autograd.grad,
        torch._C._len_torch_dispatch_stack(),
        torch.is_grad_enabled(),
    )


def live_tensors() -> int:
    gc.collect()
    return sum(1 for item in gc.get_objects() if issubclass(type(item), torch.Tensor))


@pytest.mark.parametrize(
    "make", [evaluation_sum, exceptions_kept, generators_kept, function_that_keeps_tensors]
)
def test_nothing_of_what_was_watched_is_held_afterwards(make):
    watch_growth(make(), steps=6)
    before, as_it_was = live_tensors(), state()
    growth = watch_growth(make(), steps=6)
    assert growth.leaks
    assert live_tensors() == before
    assert state() == as_it_was


def test_nothing_is_held_afterwards_that_only_a_collection_would_free():
    kept, refs = [], []

    def step():
        kept.append(torch.ones(100))
        refs.append(TensorWeakRef(kept[-1]))

    gc.disable()
    try:
        growth = watch_growth(step, steps=6)
        assert growth.leaks
        kept.clear()
        assert [ref() for ref in refs] == [None] * (3 + 6 + 3)
    finally:
        gc.enable()


@pytest.mark.usefixtures("whole_process")
def test_a_step_s_tensors_are_gone_when_the_loop_lets_them_go_also_with_lines_noted():
    refs, kept = [], []

    def step():
        gc.collect()
        assert [ref() for ref in refs] == [None] * len(refs)
        x = torch.ones(100)
        refs.append(weakref.ref(x))
        kept.append(torch.ones(10))

    growth = watch_growth(step, steps=6)
    assert growth.leaks
    assert growth.host.per_step == 40
    assert len(refs) == 3 + 6 + 3


@pytest.mark.slow
def test_a_variable_of_the_caller_can_be_freed_afterwards():
    kept = []
    mine = torch.ones(1000)
    ref = weakref.ref(mine)
    assert watch_growth(lambda: kept.append(torch.ones(10)), steps=6).leaks
    del mine
    gc.collect()
    assert ref() is None


def test_a_caller_that_keeps_its_locals_keeps_them():
    kept, mine = [], 7
    copy = locals()
    assert watch_growth(lambda: kept.append(torch.ones(10)), steps=6).leaks
    assert copy["mine"] == mine
    assert copy["kept"] is kept


@pytest.mark.usefixtures("whole_process")
def test_no_mark_is_left_on_the_graph():
    model, outputs = net(), []
    assert watch_growth(lambda: outputs.append(model(batch())), steps=6).leaks
    census = live_memory.Census()
    left = [dict(node.metadata) for node in census.walk(outputs, (), 0).values()]
    assert len(left) > len(outputs)
    assert all(set(metadata) == {census.key} for metadata in left)


def test_a_census_does_not_take_the_marks_of_one_that_is_gone_for_its_own():
    model, outputs, counts = net(), [], []
    for _ in range(6):
        outputs.append(model(batch()).softmax(1).sum())
        counts.append(live_memory.Census().take(0))  # it leaves its marks, and goes
    grown = {
        (after.host_bytes - before.host_bytes, after.nodes - before.nodes)
        for before, after in itertools.pairwise(counts)
    }
    # The input, the layer after the ReLU, the softmax and the sum; two linear layers with what turns each weight.
    assert grown == {(3 * 8 * WIDTH * 4 + 4, 7)}


@pytest.mark.slow
def test_saved_tensor_hooks_are_not_run_by_looking():
    model, outputs, unpacked = net(), [], []

    def step():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: unpacked.append(t) or t):
            outputs.append(model(batch()))

    growth = watch_growth(step, steps=6)
    assert growth.leaks
    assert unpacked == []


@pytest.mark.slow
def test_a_loop_is_judged_the_same_when_it_is_watched_again():
    step = evaluation_sum()
    first, second = watch_growth(step, steps=6), watch_growth(step, steps=6)
    assert first.host.per_step == second.host.per_step
    assert first.causes == second.causes


@pytest.mark.usefixtures("whole_process")
def test_leaks_of_two_causes_are_told_apart():
    model, outputs, cache = net(), [], {}

    def step():
        outputs.append(model(batch()).detach())
        cache[len(cache)] = torch.ones(5000)

    growth = watch_growth(step, steps=6)
    assert [(s.cause, s.host_bytes) for s in growth.suspects] == [("cache", 20000), ("kept tensors", 1024)]


def test_a_lazy_modules_parameter_before_its_first_call_has_no_memory():
    lazy = torch.nn.LazyLinear(3)
    assert [live_memory.storages_of(parameter) for parameter in lazy.parameters()] == [[], []]
    kept = []
    assert watch_growth(lambda: kept.append(torch.ones(1024)), steps=6, warm_up=1).leaks
