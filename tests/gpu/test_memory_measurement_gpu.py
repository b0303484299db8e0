"""A step measured on a GPU: its lines are the allocator's own sum, and a prediction's; nothing is left behind."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from gpucourse.gpt_config import GPTConfig  # noqa: E402
from gpucourse.memory_measurement import MeasuredStep, compare_step_memory, measure_step_memory  # noqa: E402
from gpucourse.memory_statement import give_back_cache  # noqa: E402
from gpucourse.step_memory import predict_step_memory  # noqa: E402
from gpucourse.training import GPT, next_token_loss, random_tokens  # noqa: E402

pytestmark = pytest.mark.gpu

SMALL = GPTConfig(layers=3, width=256, heads=4, vocabulary=5000, context=256)


def gpt():
    return GPT(SMALL)


def mlp():
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10))


def of_sum(model, x):
    return model(x).float().sum()


def history_is_on():
    return torch._C._cuda_isHistoryEnabled()


def clean():
    give_back_cache(torch)
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def measured(precision="fp32", **more):
    return measure_step_memory(
        gpt, random_tokens(SMALL, 8), loss=next_token_loss, precision=precision, **more
    )


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_the_lines_add_up_to_the_allocators_own_peak(precision):
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("no bf16 here")
    found = measured(precision)
    assert sum(found.lines.values()) == found.allocated_bytes
    assert "unexplained" not in found.lines
    assert found.line("parameters") == 4 * SMALL.parameters
    assert found.line("optimizer") >= 8 * SMALL.parameters
    assert found.reserved_bytes >= found.allocated_bytes
    assert (found.line("casts") > 0) == (precision in ("bf16", "fp16"))


def test_recording_the_history_changes_nothing_of_what_is_allocated():
    found = measured()
    before, _ = clean()
    torch.cuda.reset_peak_memory_stats()
    model, batch = gpt().cuda(), random_tokens(SMALL, 8, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        next_token_loss(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    # Which free block serves a request depends on addresses, and so does what is too small to be split off.
    assert abs(torch.cuda.max_memory_allocated() - before - found.allocated_bytes) < 2 * 2**20
    assert abs(torch.cuda.max_memory_reserved() - found.reserved_bytes) <= 20 * 2**20


@pytest.mark.parametrize(
    "more", [{}, {"accumulation": 2}, {"set_to_none": False}, {"clip_norm": 1.0}], ids=str
)
def test_the_lines_that_stay_are_the_predicted_ones_to_the_byte(more):
    batch = random_tokens(SMALL, 8)
    predicted = predict_step_memory(gpt, batch, loss=next_token_loss, **more)
    found = measured(**more)
    table = compare_step_memory(predicted, found)
    for name in ("parameters", "optimizer", "inputs"):
        assert table.row(name).residual_bytes == 0, table
    assert predicted.peak.phase == found.peak.phase, table
    assert abs(table.row("allocated").residual_bytes) < 60e6, table


def test_of_an_mlp_with_sgd_every_line_but_the_workspaces_is_the_predicted_one():
    batch = torch.randn(4096, 512)
    predicted = predict_step_memory(mlp, batch, loss=of_sum, optimizer=torch.optim.SGD)
    table = compare_step_memory(
        predicted, measure_step_memory(mlp, batch, loss=of_sum, optimizer=torch.optim.SGD)
    )
    for name in ("parameters", "activations", "inputs"):
        assert table.row(name).residual_bytes == 0, table


def test_everything_is_given_back_and_switched_off():
    before = clean()
    model = mlp()
    kept = [p.clone() for p in model.parameters()]
    measure_step_memory(model, torch.randn(64, 512), loss=of_sum)
    assert clean() == before
    assert not history_is_on()
    assert all(torch.equal(a, b) for a, b in zip(kept, model.parameters(), strict=True))
    assert next(model.parameters()).device.type == "cpu"


def test_a_step_that_runs_out_of_memory_leaves_nothing():
    before = clean()

    def too_much(model, x):
        value = model(x).sum()
        return value + torch.empty(2**50, device="cuda").sum()

    with pytest.raises(torch.OutOfMemoryError):
        measure_step_memory(mlp, torch.randn(64, 512), loss=too_much)
    assert clean() == before
    assert not history_is_on()


def test_a_history_that_was_on_stays_on_and_is_read():
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=100_000)
    try:
        torch.empty(1000, device="cuda")
        found = measure_step_memory(mlp, torch.randn(64, 512), loss=of_sum)
        assert history_is_on()
        assert "unexplained" not in found.lines
    finally:
        torch.cuda.memory._record_memory_history(None)


def test_what_lived_before_is_not_counted():
    alone = measure_step_memory(mlp, torch.randn(64, 512), loss=of_sum)
    other = torch.empty(10_000_000, device="cuda")
    found = measure_step_memory(mlp, torch.randn(64, 512), loss=of_sum)
    assert found.other_bytes >= other.nbytes
    rounding = {"rounding": 0}  # it depends on where the free pieces lie
    assert dict(found.lines) | rounding == dict(alone.lines) | rounding


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512), nn.ReLU()) for _ in range(6)
        )

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_what_a_checkpoint_makes_anew_has_its_line():
    batch = torch.randn(8192, 512)
    found = measure_step_memory(Checkpointed, batch, loss=of_sum, optimizer=torch.optim.SGD)
    predicted = predict_step_memory(Checkpointed, batch, loss=of_sum, optimizer=torch.optim.SGD)
    table = compare_step_memory(predicted, found)
    assert found.line("recomputed") > 0, table
    # The two may have their peaks in neighbouring instants of one layer's backward pass.
    assert abs(table.row("activations").residual_bytes) <= 4 * 8192 * 512, table
    assert abs(table.row("recomputed").residual_bytes) <= 4 * 8192 * 2048, table


def test_a_recording_of_the_timeline_is_small_and_reads_back():
    import json

    found = measured(steps=3)
    text = json.dumps(found.as_dict())
    assert len(text) < 100_000
    assert MeasuredStep.from_dict(json.loads(text)) == found
    highest = max(sum(lines.values()) for _, _, lines in found.timeline)
    assert highest <= found.allocated_bytes
    assert highest > 0.99 * (found.allocated_bytes - found.line("rounding"))


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # the compiler's advice, where fp32 was asked for
def test_a_compiled_step_is_measured_as_one():
    batch = torch.randn(1024, 512)
    found = measure_step_memory(mlp, batch, loss=of_sum, compile=True, optimizer=torch.optim.SGD)
    assert found.compiled == "model and loss"
    assert sum(found.lines.values()) == found.allocated_bytes
    assert "unexplained" not in found.lines
