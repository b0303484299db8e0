"""A measured step has the prediction's lines, its sum is the allocator's own, and what it changed is put back."""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpucourse import measured_run, recorded_steps
from gpucourse.allocator import rounded
from gpucourse.environment import NoGPUError, cuda_available
from gpucourse.memory_measurement import HistoryError, MeasuredStep, compare_step_memory, measure_step_memory
from gpucourse.recorded_steps import RecordedSteps, Seen
from gpucourse.step_errors import BatchError, ModelError, StepFailedError
from gpucourse.step_memory import predict_step_memory
from gpucourse.storage_trace import Tracer
from tests.fake_allocator import FakeDevice, fake_device

B = 512


def of_sum(model: nn.Module, *inputs: Tensor) -> Tensor:
    return model(*inputs).float().sum()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def shape(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Set aside what the process holds already: each measurement collects garbage several times."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    # The predictor knows what CUDA's kernels take and give back while they run; those of the CPU take nothing.
    monkeypatch.setattr(Tracer, "inside", lambda *_, **__: None)
    monkeypatch.setattr("gpucourse.storage_trace.BIAS_WORKSPACE_BYTES", 0)
    return fake_device(monkeypatch)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"accumulation": 2},
        {"set_to_none": False},
        {"accumulation": 3, "steps": 3},
        {"optimizer": None},
    ],
    ids=str,
)
def test_a_net_without_a_gpu_has_the_predicted_lines_to_the_byte(
    device: FakeDevice, more: dict[str, Any]
) -> None:
    more = {"optimizer": sgd, "loss": of_sum} | more
    # One thread runs both passes on the CPU, so there is one workspace.
    predicted = predict_step_memory(mlp, shape(B, 64), workspace_bytes=4 * 2**20, **more)
    measured = measure_step_memory(mlp, shape(B, 64), **more)
    assert dict(measured.lines) == dict(predicted.lines)
    assert measured.allocated_bytes == predicted.allocated_bytes == sum(measured.lines.values())
    assert measured.reserved_bytes == predicted.reserved_bytes
    assert [(p.step, p.phase) for p in measured.peaks] == [(p.step, p.phase) for p in predicted.peaks]
    assert (measured.trainable, measured.optimizer) == (predicted.trainable, predicted.optimizer)
    assert all(row.residual_bytes == 0 for row in compare_step_memory(predicted, measured).rows)


class Frozen(nn.Module):
    """A frozen first layer, a buffer, and a tied pair."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64).requires_grad_(False)
        self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 64)
        self.third.weight = self.second.weight
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x) * self.scale))


def test_frozen_and_tied_weights_and_buffers_count_once(device: FakeDevice) -> None:
    predicted = predict_step_memory(Frozen, shape(8, 64), loss=of_sum, workspace_bytes=4 * 2**20)
    measured = measure_step_memory(Frozen, shape(8, 64), loss=of_sum)
    assert (measured.trainable, measured.frozen) == (predicted.trainable, predicted.frozen)
    assert measured.line("parameters") == 4 * (2 * 64 * 64 + 3 * 64)
    assert measured.line("buffers") == 4 * 64


def test_the_model_and_the_batch_are_left_as_they_are_and_nothing_stays_allocated(device: FakeDevice) -> None:
    model, batch = mlp(), shape(B, 64)
    before = [p.clone() for p in model.parameters()]
    measure_step_memory(model, batch, loss=of_sum, optimizer=sgd)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    # The model that was given lies on the same device here.
    assert device.allocator.allocated_bytes == sum(rounded(p.nbytes) for p in model.parameters())
    measure_step_memory(mlp, batch, loss=of_sum, optimizer=sgd)
    assert device.allocator.allocated_bytes == sum(rounded(p.nbytes) for p in model.parameters())
    assert not device.on


def test_an_optimizer_that_exists_is_left_without_state(device: FakeDevice) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    found = measure_step_memory(model, shape(B, 64), loss=of_sum, optimizer=optimizer)
    assert (found.optimizer, len(optimizer.state)) == ("SGD", 0)


def test_a_step_that_fails_gives_back_what_it_had(device: FakeDevice) -> None:
    def failing(model: nn.Module, x: Tensor) -> Tensor:
        kept = model(x)
        raise torch.OutOfMemoryError(f"CUDA out of memory, with {kept.shape} in hand")

    with pytest.raises(torch.OutOfMemoryError):
        measure_step_memory(mlp, shape(B, 64), loss=failing)
    assert device.allocator.reserved_bytes == 0
    assert not device.on


def test_what_lived_before_is_not_counted_and_is_said(device: FakeDevice) -> None:
    alone = measure_step_memory(mlp, shape(B, 64), loss=of_sum, optimizer=sgd)
    with device:
        other = torch.ones(300_000)
    found = measure_step_memory(mlp, shape(B, 64), loss=of_sum, optimizer=sgd)
    assert found.other_bytes == 1_200_128  # rounded
    assert found.lines == alone.lines
    assert "1.20 MB lived on the device before and is not counted" in " ".join(found.notes)
    del other


def test_a_batch_without_data_is_filled_and_that_is_said(device: FakeDevice) -> None:
    def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        assert x.std() > 0.5
        assert not y.any()
        return nn.functional.cross_entropy(model(x), y)

    batch = (shape(B, 64), shape(B, dtype=torch.int64))
    assert "had no data" in measure_step_memory(mlp, batch, loss=classify).notes[0]
    full = (torch.randn(B, 64), torch.zeros(B, dtype=torch.int64))
    assert not any("no data" in note for note in measure_step_memory(mlp, full, loss=classify).notes)


def test_a_model_in_evaluation_mode_is_said(device: FakeDevice) -> None:
    assert "evaluation mode" in measure_step_memory(lambda: mlp().eval(), shape(8, 64), loss=of_sum).notes[-1]


def test_an_allocator_that_counts_otherwise_leaves_a_line_of_its_own(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = device.allocator
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: allocator.peak_allocated_bytes + 4096)
    found = measure_step_memory(mlp, shape(B, 64), loss=of_sum)
    assert found.line("unexplained") == 4096
    assert sum(found.lines.values()) == found.allocated_bytes
    assert "differ" in found.notes[-1]


def test_the_timeline_is_bounded_and_reaches_the_peak(device: FakeDevice) -> None:
    model = functools.partial(nn.Sequential, *(nn.Linear(32, 32) for _ in range(60)))
    found = measure_step_memory(lambda: model(), shape(64, 32), loss=of_sum, steps=3, points=100)
    assert len(found.timeline) <= 100
    highest = max(sum(lines.values()) for _, _, lines in found.timeline)
    assert highest == found.allocated_bytes - found.line("rounding")
    assert [step for step, _, _ in found.timeline] == sorted(step for step, _, _ in found.timeline)
    assert {phase for _, phase, _ in found.timeline} == {"setup", "forward", "backward", "optimizer"}


def test_a_recording_of_a_measurement_is_small_and_reads_back_as_it_was(device: FakeDevice) -> None:
    found = measure_step_memory(mlp, shape(B, 64), loss=of_sum, steps=20)
    text = json.dumps(found.as_dict())
    assert len(text) < 60_000
    assert MeasuredStep.from_dict(json.loads(text)) == found


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"precision": "fp8"}, "wanted one of fp32"),
        ({"microbatch": 0}, "microbatch is 0"),
        ({"peaks": []}, "peaks is empty"),
        ({"timeline": {"roles": ["parameters"], "points": [[1, "forward", 1, 2]]}}, "2 numbers for 1 roles"),
        ({"reserved_bytes": 1.5}, "reserved_bytes is 1.5"),
        ({"model": None}, "model is None: a text"),
    ],
    ids=str,
)
def test_data_that_is_no_measurement_is_refused(
    device: FakeDevice, change: dict[str, Any], says: str
) -> None:
    data = measure_step_memory(mlp, shape(8, 64), loss=of_sum).as_dict()
    with pytest.raises(ValueError, match=says):
        MeasuredStep.from_dict(data | change)
    del data["events"]
    with pytest.raises(ValueError, match=r"no 'events': wanted what MeasuredStep.as_dict\(\) gave"):
        MeasuredStep.from_dict(data)


def test_both_forms_of_a_measurement_say_what_it_is(device: FakeDevice) -> None:
    found = measure_step_memory(mlp, shape(B, 64), loss=of_sum, optimizer=sgd, accumulation=2)
    for text in (str(found), found._repr_html_()):
        assert f"Sequential, microbatch {B} x 2, fp32, SGD" in text
        assert "parameters" in text
        assert f"torch {torch.__version__}" in text
    assert "recomputed" not in str(found)  # it is 0
    with pytest.raises(KeyError, match="no line 'weights'; there are parameters"):
        found.line("weights")


# ----------------------------------------------------------------------------------------------- what is refused


@pytest.mark.skipif(cuda_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(NoGPUError, match="measure_step_memory needs a CUDA device"):
        measure_step_memory(mlp, shape(8, 64), loss=of_sum)


@pytest.mark.parametrize(
    ("model", "batch", "more", "error", "says"),
    [
        (mlp, (), {}, BatchError, "holds no tensor"),
        (mlp, shape(0, 64), {}, BatchError, "with nothing in it"),
        (mlp, shape(8, 64), {"microbatch": True}, BatchError, "microbatch is True"),
        (mlp, shape(8, 64), {"precision": "fp8"}, ValueError, "wanted one of fp32, tf32"),
        (mlp, shape(8, 64), {"steps": 0}, ValueError, "steps is 0; wanted 1 or more"),
        (mlp, shape(8, 64), {"points": 2.5}, TypeError, "points is 2.5; wanted a whole number"),
        (nn.ReLU(), shape(8, 64), {}, ModelError, "ReLU has no parameters"),
        (nn.Linear(64, 2).requires_grad_(False), shape(8, 64), {}, ModelError, "are frozen"),
        (nn.LazyLinear(3), shape(8, 64), {}, ModelError, "has no shape yet"),
        (nn.Linear(64, 2, device="meta"), shape(8, 64), {}, ModelError, "weight is on the meta device"),
        (lambda: 3, shape(8, 64), {}, ModelError, "the function made int"),
        (3, shape(8, 64), {}, ModelError, "the model is 3"),
        (mlp, shape(8, 64), {"optimizer": "Adamm"}, ValueError, "no optimizer 'Adamm'"),
        (mlp, shape(8, 64), {"optimizer": 3}, TypeError, "the optimizer is 3"),
        (mlp, shape(8, 64), {"loss": lambda m, x: m(x)}, StepFailedError, r"shape \(8, 10\); wanted one"),
        (mlp, shape(8, 64), {"loss": lambda m, x: x.sum()}, StepFailedError, "has no graph"),
    ],
)
def test_what_is_no_step_is_refused_in_words(
    device: FakeDevice, model: Any, batch: Any, more: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        measure_step_memory(model, batch, **({"loss": of_sum} | more))
    assert device.allocator.reserved_bytes == 0


def test_an_optimizer_of_other_parameters_is_refused(device: FakeDevice) -> None:
    other = torch.optim.SGD(mlp().parameters(), lr=1)
    with pytest.raises(ModelError, match="4 parameters of the optimizer are none of the model's"):
        measure_step_memory(mlp(), shape(8, 64), loss=of_sum, optimizer=other)
    with pytest.raises(ModelError, match="made already"):
        measure_step_memory(mlp, shape(8, 64), loss=of_sum, optimizer=other)


# ----------------------------------------------------------------------------------------------------- the roles


def names_of_casts(model: nn.Module, x: Tensor) -> list[tuple[int, ...]]:
    with torch.autocast("cpu", torch.bfloat16):
        value = model(x).float().sum()
    return sorted(tuple(t.shape) for t in measured_run._saved_casts(value, model))


def test_the_graphs_copies_of_weights_are_found_and_no_activation_of_their_size_is() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
    # With 64 rows the activations have the first weight's shape.
    found = names_of_casts(model, torch.randn(64, 64, requires_grad=True))
    assert [tuple(sorted(size)) for size in found] == [(32, 64), (64, 64)]


def test_a_frozen_weights_copy_is_known_by_its_shape() -> None:
    model = nn.Sequential(nn.Linear(16, 48), nn.Linear(48, 8).requires_grad_(False))
    found = names_of_casts(model, torch.randn(5, 16, requires_grad=True))
    assert (48, 8) in found or (8, 48) in found


def test_without_autocast_the_graph_has_no_copies() -> None:
    model = mlp()
    assert measured_run._saved_casts(model(torch.randn(8, 64)).sum(), model) == []


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_what_a_checkpoint_keeps_is_an_activation(device: FakeDevice) -> None:
    predicted = predict_step_memory(Checkpointed, shape(B, 64), loss=of_sum, workspace_bytes=4 * 2**20)
    measured = measure_step_memory(Checkpointed, shape(B, 64), loss=of_sum)
    assert measured.line("activations") == predicted.line("activations")


def history_of(*events: tuple[str, int, int] | tuple[str, int, int, str]) -> list[dict[str, Any]]:
    start = [{"action": "segment_alloc", "addr": 0, "size": 2**21}]
    return start + [
        {
            "action": action,
            "addr": addr,
            "size": size,
            "frames": [{"filename": more[0], "line": 7, "name": "f"}] if more else [],
        }
        for action, addr, size, *more in events
    ]


def steps_of(marks: list[tuple[str, int, int]], trace: list[dict[str, Any]], **more: Any) -> RecordedSteps:
    return RecordedSteps(Seen(segments=[], base=(0, 0), marks=marks, **more), trace)


MARKS = [
    ("1 forward", 0, 0),
    ("leaving", 2, 0),
    ("left", 2, 1),
    ("1 backward", 2, 1),
    ("1 optimizer", 4, 1),
    ("over", 4, 1),
    ("workspaces", 4, 1),
    ("end", 4, 2),
]
EVENTS = history_of(
    ("alloc", 0, 512, "/home/me/net.py"),
    ("alloc", 512, 1024),
    ("free_requested", 512, 0),
    ("free_completed", 512, 0),
    ("alloc", 512, 1536, "/usr/lib/python3/site-packages/torch/utils/checkpoint.py"),
    ("alloc", 2048, 512),
    ("free_requested", 2048, 0),
    ("free_completed", 2048, 0),
)


def test_each_block_has_the_role_that_its_life_shows() -> None:
    steps = steps_of(MARKS, EVENTS)
    # Lives into the backward pass; freed with autocast's context; made by a checkpoint; freed with the workspaces.
    assert steps.roles == ["activations", "casts", "recomputed", "workspaces"]


def test_an_address_that_was_noted_names_the_block_and_the_loss_is_no_activation() -> None:
    noted = [(4, 1, 512, "gradients"), (2, 1, 0, "temporaries"), (4, 1, 99_999, "optimizer")]
    steps = steps_of(MARKS, EVENTS, addresses=noted)
    assert steps.roles == ["temporaries", "casts", "gradients", "workspaces"]


def test_the_peak_is_where_the_allocators_count_is_highest_and_its_line_of_code_is_the_readers() -> None:
    (peak,) = steps_of(MARKS, EVENTS).peaks([2560])
    assert (peak.phase, peak.code, peak.allocated_bytes) == ("backward", "", 2560)
    assert {k: n for k, n in peak.lines.items() if n} == {
        "activations": 512,
        "recomputed": 1536,
        "workspaces": 512,
    }
    (first,) = steps_of(
        [
            ("1 forward", 0, 0),
            ("1 backward", 1, 0),
            ("1 optimizer", 1, 1),
            ("over", 1, 1),
            ("workspaces", 1, 1),
            ("end", 1, 1),
        ],
        history_of(("alloc", 0, 300, "/home/me/net.py"), ("free_requested", 0, 0)),
    ).peaks([512])
    assert (first.code, first.lines["rounding"]) == ("net.py:7 in f", 212)


def test_the_timeline_begins_with_what_the_first_step_finds_and_ends_with_the_last_step(
    real: dict[str, Any],
) -> None:
    trial = history_of(("alloc", 2**20, 100), ("free_requested", 2**20, 0), ("free_completed", 2**20, 0))
    shifted = [(name, a + 1, f + 1) for name, a, f in MARKS]
    trace = steps_of(shifted, trial + EVENTS[1:]).storage_trace()  # a compiler's trial before the step
    assert (trace.sizes, trace.events) == ([512, 1024, 1536, 512], [0, 1, -2, 2, 3])
    steps = RecordedSteps(Seen(**real["seen"]), real["events"])
    last = steps.storage_trace().timeline(1000)[-1]
    # The model and its optimizer's state live on after the last step; only then are they dropped.
    assert last[:2] == (2, "optimizer")
    assert {k: n for k, n in last[2].items() if n and k not in ("workspaces", "inputs")} == {
        "parameters": 870_840,
        "optimizer": 1_741_680,
    }


def test_where_no_line_is_the_readers_torchs_own_is_named_and_never_the_caller_of_the_measurement() -> None:
    def frame(filename: str, name: str) -> dict[str, Any]:
        return {"filename": filename, "line": 3, "name": name}

    inside = [frame("/lib/torch/optim/adam.py", "step"), frame("/x/gpucourse/measured_run.py", "_update")]
    assert recorded_steps._code([*inside, frame("/home/me/page.py", "main")]) == "adam.py:3 in step"
    assert recorded_steps._code([]) == ""


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    """Return a history as torch 2.11 recorded it on an H200: two steps of a small net in bf16."""
    data = json.loads((Path(__file__).parent / "data" / "allocator_history_h200.json").read_text())
    frames = [
        [dict(zip(("filename", "line", "name"), f, strict=True)) for f in stack] for stack in data["frames"]
    ]
    data["events"] = [
        {"action": action, "addr": addr, "size": size, "frames": frames[stack] if stack >= 0 else []}
        for action, addr, size, stack in data["events"]
    ]
    return data


def test_a_real_history_is_replayed_to_the_byte_that_the_allocator_reported(real: dict[str, Any]) -> None:
    steps = RecordedSteps(Seen(**real["seen"]), real["events"])
    peaks = steps.peaks(real["reported"])
    assert steps.history.unplaced == 0
    assert all("unexplained" not in peak.lines for peak in peaks)
    assert [sum(peak.lines.values()) for peak in peaks] == real["reported"]
    # 28,313,600 bytes in a segment of 28 MiB, whose rest is too small to be split off: that is most of the rounding.
    assert peaks[1].lines["rounding"] > 28 * 2**20 - 28_313_600


def test_a_real_historys_blocks_have_the_roles_that_their_sizes_show(real: dict[str, Any]) -> None:
    steps = RecordedSteps(Seen(**real["seen"]), real["events"])
    sizes: dict[str, list[int]] = {}
    for block, role in zip(steps.history.blocks, steps.roles, strict=True):
        sizes.setdefault(role, []).append(block.requested_bytes)
    weights = [4 * n for n in (300 * 700, 700, 700 * 10, 10)]
    assert sizes["parameters"] == weights
    assert sorted(sizes["optimizer"]) == sorted(weights * 2)
    assert sorted(sizes["gradients"]) == sorted(weights * 2)  # in each of two steps
    assert sizes["workspaces"] == [
        32 * 2**20,
        2**20,
        32 * 2**20,
    ]  # cuBLAS, cuBLASLt; the backward pass's thread
    assert sorted(sizes["casts"]) == sorted([2 * n for n in (300 * 700, 700, 700 * 10, 10)] * 2)
    for saved in (2 * 5000 * 300, 2 * 5000 * 700):  # the input's cast, and relu's output
        assert sizes["activations"].count(saved) == 2


def test_a_history_that_was_on_before_is_read_from_where_the_steps_begin() -> None:
    older = history_of(("alloc", 2**20, 100), ("free_requested", 2**20, 0), ("free_completed", 2**20, 0))
    assert steps_of(MARKS, older + EVENTS[1:]).roles == steps_of(MARKS, EVENTS).roles


def test_a_history_that_is_too_short_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        HistoryError, match=r"holds 5 allocations and frees, and the steps had 6.*Switch it off"
    ):
        steps_of(MARKS, EVENTS[2:])
