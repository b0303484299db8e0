"""A step's memory without a GPU: nets counted by hand, the night's model as it was measured, and bad input."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from gpucourse import step_memory
from gpucourse.allocator import CachingAllocator, SimulatedOutOfMemoryError, rounded
from gpucourse.step_memory import (
    BatchError,
    ModelError,
    StepFailedError,
    StepMemory,
    UnseenError,
    predict_step_memory,
)
from gpucourse.training import GPT, GPTConfig, next_token_loss, night_config

WORKSPACES = 2 * 32 * 2**20
RECORDINGS = Path(step_memory.__file__).parent / "recordings" / "nvidia-h200"


def of_sum(model: nn.Module, *inputs: Tensor) -> Tensor:
    return model(*inputs).float().sum()


def shape(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


predict_sum = functools.partial(predict_step_memory, loss=of_sum)


def counted(found: StepMemory) -> dict[str, int]:
    """Give the lines that are not 0, without the rounding, which the allocator's own tests hold."""
    return {name: n for name, n in found.lines.items() if n and name != "rounding"}


# ---------------------------------------------------------------------------------------------------- by hand

B, IN, HIDDEN, OUT = 4096, 64, 128, 10
FIRST, SECOND = IN * HIDDEN, HIDDEN * OUT
MLP_SGD = {
    # x (B, 64) -> (B, 128) -> relu -> (B, 10) -> sum. The most lives while relu's backward pass runs; the partial sums
    # of a bias's gradient are a matter of tests/test_scratch.py, so the biases are left out here.
    "parameters": 4 * (FIRST + SECOND),
    "gradients": 4 * SECOND,  # the first layer's do not exist yet
    "activations": 4 * B * HIDDEN,  # relu's output, which the second layer saves, too: once
    "temporaries": 2 * 4 * B * HIDDEN
    + 2 * 4,  # gradients of relu's output and input; the loss and its gradient
    "inputs": 4 * B * IN,
    "workspaces": WORKSPACES,
}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(IN, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, OUT, bias=False))


def test_an_mlp_with_sgd_needs_what_a_count_by_hand_says_to_the_byte() -> None:
    found = predict_sum(mlp(), shape(B, IN), optimizer=torch.optim.SGD)
    assert counted(found) == MLP_SGD
    assert (found.peak.phase, found.peak.operator) == ("backward", "aten.threshold_backward")
    assert sum(found.lines.values()) == found.allocated_bytes
    assert 0 <= found.line("rounding") < 512 * 20
    assert found.trainable == FIRST + SECOND


def test_in_a_second_microbatch_all_gradients_are_there() -> None:
    found = predict_sum(mlp(), shape(B, IN), optimizer=torch.optim.SGD, accumulation=2)
    assert counted(found) == MLP_SGD | {"gradients": 4 * (FIRST + SECOND)}


def test_gradients_that_are_kept_are_there_in_the_next_step() -> None:
    found = predict_sum(mlp(), shape(B, IN), optimizer=torch.optim.SGD, set_to_none=False)
    assert counted(found) == MLP_SGD | {"gradients": 4 * (FIRST + SECOND)}
    assert found.peak.step == 2


def test_with_few_activations_the_peak_is_in_adamw_and_costs_20_bytes_a_parameter() -> None:
    found = predict_sum(nn.Linear(1000, 1000), shape(2, 1000))
    n = 4 * 1_001_000
    assert found.peak.phase == "optimizer"
    assert [found.line(name) for name in ("parameters", "gradients", "optimizer")] == [n, n, 2 * n]
    assert found.line("temporaries") == n  # the root of the second moment, for all tensors at once


def test_without_tensor_lists_adamw_needs_them_for_one_tensor_at_a_time() -> None:
    single = functools.partial(torch.optim.AdamW, foreach=False)
    found = predict_sum(
        nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000)), shape(2, 1000), optimizer=single
    )
    # The root and its quotient for one matrix, and the quotient of the bias before it, whose name is not free yet.
    assert found.line("temporaries") == 2 * 4 * 1000 * 1000 + 4 * 1000
    assert found.line("optimizer") == 2 * found.line("parameters")


class Blocks(nn.Module):
    """Eight blocks of linear, relu, linear, relu, all 64 wide."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False), nn.ReLU())
            for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def test_checkpointing_keeps_a_block_s_input_and_makes_one_block_anew() -> None:
    unit = 4 * 65_536 * 64
    batch = shape(65_536, 64)
    plain = predict_sum(Blocks(False), batch, optimizer="SGD")
    saved = predict_sum(Blocks(True), batch, optimizer="SGD")
    # Two outputs of relu a block; the last one is gone when its gradient is multiplied into the layer below.
    assert plain.line("activations") == 15 * unit
    # The inputs of blocks 2 to 7 while block 7 is run again: gradient, first relu, second linear, second relu.
    assert saved.line("activations") == 6 * unit
    assert saved.line("recomputed") == 3 * unit
    assert saved.line("temporaries") == unit + 8  # the gradient that comes in; the loss and its gradient
    assert plain.line("recomputed") == 0
    assert saved.peak.phase == "backward"


def test_a_checkpointed_block_is_run_again_under_the_same_autocast() -> None:
    batch = shape(4096, 64)
    plain, saved = (predict_sum(Blocks(on), batch, precision="bf16") for on in (False, True))
    assert saved.line("activations") < plain.line("activations") / 2


def test_a_tied_weight_counts_once_and_a_frozen_one_has_no_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(1000, 1000, bias=False) for _ in range(3))
            self.b.weight = self.a.weight
            self.c.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x)))

    found = predict_sum(Tied(), shape(2, 1000))
    assert (found.trainable, found.frozen) == (1_000_000, 1_000_000)
    assert found.line("parameters") == 8_000_000
    assert found.line("gradients") == 4_000_000
    assert found.line("optimizer") == 8_000_000


def test_autocast_keeps_each_weight_s_cast_until_the_backward_pass_frees_it() -> None:
    found = predict_sum(
        nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))), shape(8, 64), precision="bf16"
    )
    trace = found.trace
    casts = [n for n, role in zip(trace.sizes, trace.roles, strict=True) if role == "casts"]
    assert casts == [2 * 64 * 64] * 8  # four weights, two steps


def test_a_product_s_result_is_allocated_before_the_workspace_that_it_brings() -> None:
    # As in a device's history: 7,000,000 B for the result, then 32 MiB, then cuBLASLt's 1 MiB.
    found = predict_step_memory(
        nn.Linear(300, 700),
        torch.empty(2500, 300),
        loss=lambda model, x: model(x).sum(),
        optimizer=None,
        steps=1,
    )
    trace = found.trace
    begun = next(first for first, step, phase, _ in trace.marks if (step, phase) == (1, "forward"))
    sizes = [trace.sizes[event] for event in trace.events[begun : begun + 3]]
    assert sizes == [7_000_000, 32 * 2**20, 2**20]


def test_a_dropout_s_mask_is_allocated_before_its_result() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    found = predict_step_memory(model, torch.empty(1000, 8), loss=lambda model, x: model(x).sum(), steps=1)
    assert made_by(found, "aten.native_dropout") == [8000, 32_000]


def test_linear_adds_a_bias_in_place_where_its_input_is_no_matrix() -> None:
    # Nothing watches a step on the device; a trace that watches would see the sum beside the product.
    x = torch.empty(40, 30, 8)
    found = predict_step_memory(
        nn.Linear(8, 16), x, loss=lambda model, x: model(x.transpose(0, 1)).sum(), optimizer=None, steps=1
    )
    assert made_by(found, "aten.mm")[0] == 4 * 40 * 30 * 16
    assert made_by(found, "aten.add") == []


def made_by(found: StepMemory, operator: str) -> list[int]:
    """Give the sizes of what the operator allocated, in order."""
    trace = found.trace
    starts = [first for first, *_ in trace.marks] + [len(trace.events)]
    return [
        trace.sizes[event]
        for i, (first, _, _, running) in enumerate(trace.marks)
        if running == operator
        for event in trace.events[first : starts[i + 1]]
        if event >= 0
    ]


def test_a_convolution_does_without_the_workspace_for_which_there_is_no_room() -> None:
    layer = nn.Conv2d(64, 64, 3, padding=1, bias=False)
    found = predict_step_memory(
        layer, torch.empty(16, 64, 56, 56), loss=lambda model, x: model(x).sum(), optimizer=None, steps=1
    )
    trace = found.trace
    limit = found.allocated_bytes - 4 * 2**20
    assert found.peak.operator == "aten.convolution"
    assert found.runs_within(limit)
    needed = dataclasses.replace(trace, optional=set())
    with pytest.raises(SimulatedOutOfMemoryError):
        needed.replay(CachingAllocator(limit_bytes=limit))


@pytest.mark.parametrize(
    (
        "kind",
        "precision",
        "measured",
    ),  # of one call on an H200; 64 samples, 256 steps, 512 in and 1,024 out, 2 layers
    [
        (nn.LSTM, "fp32", 449_839_872),
        (nn.LSTM, "bf16", 233_308_928),
        (nn.GRU, "fp32", 365_429_504),
        (nn.GRU, "bf16", 191_103_744),
    ],
)
def test_a_recurrent_layer_s_workspace_is_not_below_what_was_measured(
    kind: Any, precision: Any, measured: int
) -> None:
    found = predict_step_memory(
        lambda: kind(512, 1024, 2, batch_first=True),
        torch.empty(64, 256, 512, device="meta"),
        loss=lambda model, x: model(x)[0].sum(),
        precision=precision,
        steps=1,
    )
    come = [size for size in found.trace.sizes if measured <= size <= 1.3 * measured]
    assert len(come) >= 3  # forward, the data's gradients, the weights'


def test_a_recurrent_layer_s_weights_move_into_one_block_and_leave_theirs_reserved() -> None:
    found = predict_step_memory(
        nn.LSTM(256, 256), torch.empty(2, 2, 256), loss=lambda model, x: model(x)[0].sum(), steps=1
    )
    trace = found.trace
    weights = 4 * 256 * (256 + 256 + 2) * 4
    begun = trace.marks[0][0]
    held = {event for event in trace.events[:begun] if event >= 0}
    held -= {-1 - event for event in trace.events[:begun] if event < 0}
    assert [trace.sizes[n] for n in sorted(held) if trace.roles[n] == "parameters"] == [weights]


def test_the_plain_formula_of_attention_keeps_its_dropout_as_booleans() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(1, 2, 128, 128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=self.bias, dropout_p=0.1)

    x = torch.empty(4, 2, 128, 64, requires_grad=True)
    found = predict_step_memory(Biased(), x, loss=lambda model, x: model(x * 1.0).sum(), steps=1)
    assert made_by(found, "aten.native_dropout") == [4 * 2 * 128 * 128, 4 * 4 * 2 * 128 * 128]


def test_autocast_casts_the_last_argument_first() -> None:
    # A device's history of the same product has the bias's cast, the weight's and then the input's.
    found = predict_step_memory(
        nn.Linear(300, 700),
        torch.empty(5000, 300),
        loss=lambda model, x: model(x).float().sum(),
        precision="bf16",
    )
    trace = found.trace
    begun = next(first for first, step, phase, _ in trace.marks if (step, phase) == (1, "forward"))
    sizes = [trace.sizes[event] for event in trace.events[begun : begun + 3]]
    assert sizes == [2 * 700, 2 * 300 * 700, 2 * 5000 * 300]


def test_a_weight_used_twice_under_autocast_is_cast_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    trace = predict_sum(Twice(), shape(8, 64), precision="fp16", steps=1).trace
    assert trace.roles.count("casts") == 1


def sizes_of(found: StepMemory, role: str) -> set[int]:
    return {n for n, r in zip(found.trace.sizes, found.trace.roles, strict=True) if r == role}


def test_dropout_saves_a_mask_of_one_byte_an_element() -> None:
    found = predict_sum(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)), shape(1000, 64))
    assert 1000 * 64 in sizes_of(found, "activations")


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_saves_its_input_and_a_few_numbers_a_row(norm: Any) -> None:
    found = predict_sum(nn.Sequential(nn.Linear(64, 64), norm(64), nn.Linear(64, 64)), shape(1000, 64))
    assert sizes_of(found, "activations") == {4 * 1000 * 64, 4 * 1000}


@pytest.mark.parametrize(
    "name",
    [
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    ],
)
def test_torch_s_optimizers_can_be_predicted(name: str) -> None:
    found = predict_sum(nn.Linear(1000, 1000), shape(2, 1000), optimizer=name)
    assert found.line("gradients") == found.line("parameters") == 4 * 1_001_000


def test_the_four_precisions_differ_where_the_device_s_do() -> None:
    needed = {p: predict_sum(mlp(), shape(B, IN), precision=p) for p in ("fp32", "tf32", "fp16", "bf16")}
    assert needed["tf32"].lines == needed["fp32"].lines
    # The loss's scale, its product with the loss and its growth are three numbers, 512 bytes each.
    assert 0 < needed["fp16"].allocated_bytes - needed["bf16"].allocated_bytes <= 4 * 512
    assert needed["bf16"].line("activations") < needed["fp32"].line("activations")


def attend(dtype: torch.dtype, **options: Any) -> StepMemory:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(64, 192, dtype=dtype)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (2, 32)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            mask = x.new_ones(512, 512).tril().bool() if options.get("masked") else None
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)

    return predict_sum(Attend(), shape(4, 512, 64, dtype=dtype), optimizer="SGD")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_attention_saves_one_number_a_row_and_no_scores(dtype: torch.dtype) -> None:
    found = attend(dtype)
    assert 4 * 2 * 512 * 4 in sizes_of(found, "activations")
    assert max(sizes_of(found, "activations")) < dtype.itemsize * 4 * 2 * 512 * 512


def test_attention_follows_the_kernels_that_are_allowed() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert max(sizes_of(attend(torch.float32), "activations")) == 4 * 4 * 2 * 512 * 512


def test_a_mask_is_saved_as_large_as_it_is_and_not_as_the_scores() -> None:
    found = attend(torch.bfloat16, masked=True)
    assert 2 * 512 * 512 in sizes_of(found, "activations")
    assert max(sizes_of(found, "activations")) < 2 * 4 * 2 * 512 * 512


def test_a_mask_that_learns_goes_through_the_plain_formula() -> None:
    class Biased(nn.Module):
        def __init__(self, learns: bool) -> None:
            super().__init__()
            self.qkv = nn.Linear(64, 192)
            self.bias = nn.Parameter(torch.zeros(1, 2, 512, 512), requires_grad=learns)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (2, 32)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)

    scores = 4 * 4 * 2 * 512 * 512
    kept = [sizes_of(predict_sum(Biased(on), shape(4, 512, 64)), "activations") for on in (True, False)]
    assert [scores in sizes for sizes in kept] == [True, False]


def test_a_product_with_a_bias_has_a_workspace_of_its_own() -> None:
    plain, biased = (
        predict_sum(nn.Linear(64, 64, bias=on), shape(8, 64), optimizer="SGD") for on in (False, True)
    )
    assert biased.line("workspaces") - plain.line("workspaces") == 2**20


def test_attention_in_doubles_has_no_fused_kernel_and_saves_the_scores() -> None:
    assert 8 * 4 * 2 * 512 * 512 in sizes_of(attend(torch.float64), "activations")


# ------------------------------------------------------------------------------------- as it was measured

TOKENS = 1024


def night(examples: int, precision: Any, loss: Any = next_token_loss, **options: Any) -> StepMemory:
    batch = (shape(examples, TOKENS, dtype=torch.int64),) * 2
    return predict_step_memory(lambda: GPT(night_config()), batch, loss=loss, precision=precision, **options)


def fp32_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def test_the_night_in_fp32_is_within_a_half_percent_of_the_device_and_takes_seconds() -> None:
    found = night(16, "fp32")
    assert found.allocated_bytes == pytest.approx(21.24e9, rel=0.005)  # H200, torch 2.11
    assert found.reserved_bytes == pytest.approx(23.56e9, rel=0.01)
    assert found.seconds < 20
    # Not 16 bytes a parameter: at the instant of the peak there are no gradients.
    assert found.line("gradients") == 0
    assert found.line("parameters") + found.line("optimizer") == 12 * night_config().parameters


def test_the_night_in_bf16_with_an_fp32_loss_is_within_a_half_percent_of_the_device() -> None:
    assert night(16, "bf16", fp32_loss).allocated_bytes == pytest.approx(
        17.24e9, rel=0.005
    )  # H200, torch 2.11


def test_the_recorded_bf16_step_is_within_a_half_percent_of_the_prediction() -> None:
    recorded = json.loads((RECORDINGS / "compiled_night.json").read_text(encoding="utf-8"))
    peak_gb = recorded["data"]["whole"]["eager"]["peak_gb"]
    assert night(16, "bf16").allocated_bytes == pytest.approx(peak_gb * 1e9, rel=0.005)


def test_the_night_s_peaks_lie_on_the_measured_line() -> None:
    at = {b: night(b, "fp32").allocated_bytes for b in (8, 16, 32)}
    slope = (at[32] - at[8]) / 24
    assert slope == pytest.approx(1.229e9, rel=0.005)
    assert at[8] - 8 * slope == pytest.approx(1.564e9, rel=0.01)
    assert at[16] == pytest.approx((2 * at[8] + at[32]) / 3, rel=0.001)


# ------------------------------------------------------------------------------------------------- properties

SMALL = GPTConfig(layers=2, width=64, heads=2, vocabulary=500, context=64)


def small(examples: int, **options: Any) -> StepMemory:
    batch = (shape(examples, 64, dtype=torch.int64),) * 2
    return predict_step_memory(lambda: GPT(SMALL), batch, loss=next_token_loss, **options)


@pytest.mark.slow
def test_more_samples_never_need_less() -> None:
    needed = [small(b).allocated_bytes for b in (1, 2, 3, 5, 8, 13, 21)]
    assert needed == sorted(needed)


def test_reserved_is_at_least_allocated_and_decides_under_a_limit() -> None:
    found = small(8)
    assert found.reserved_bytes >= found.allocated_bytes
    assert found.reserved_bytes % 2**21 == 0
    assert found.runs_within(found.reserved_bytes)
    assert not found.runs_within(found.allocated_bytes - 1)
    with pytest.raises(ValueError, match="above 0"):
        found.runs_within(0)


def test_a_module_and_a_function_that_makes_it_need_the_same() -> None:
    batch = (shape(4, 64, dtype=torch.int64),) * 2
    made = predict_step_memory(GPT(SMALL), batch, loss=next_token_loss)
    assert made == small(4)
    on_meta = predict_sum(mlp().to("meta"), shape(4, IN))
    assert on_meta == predict_sum(mlp(), torch.zeros(4, IN)) == predict_sum(mlp, shape(4, IN))


def test_a_model_whose_making_asks_for_values_is_made_in_memory() -> None:
    def make() -> nn.Module:
        model = mlp()
        rates = torch.linspace(0, 0.5, 3).tolist()
        model.append(nn.Dropout(rates[1]))
        assert nn.init.trunc_normal_(model[0].weight).shape == (HIDDEN, IN)
        return model

    assert predict_sum(make, shape(8, IN)).line("parameters") == 4 * (FIRST + SECOND)


def test_a_model_that_is_predicted_is_left_as_it_was() -> None:
    model = mlp()
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = predict_sum(model, shape(8, IN), optimizer=optimizer)
    assert found.line("optimizer") == found.line("parameters")
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
    for name, p in model.named_parameters():
        assert id(p) == before[name][0]
        assert p.grad is None
        assert not isinstance(p, FakeTensor)
        assert torch.equal(p, before[name][1])


def test_torch_is_left_as_it_was_after_a_failure_too() -> None:
    def look() -> list[Any]:
        return [
            FakeTensor.__new__,
            torch.autocast.__init__,
            torch.clear_autocast_cache,
            torch.cuda.is_bf16_supported,
            F.scaled_dot_product_attention,
            torch.rms_norm,
            dict(vars(torch._VF)),
            *(torch._C._dispatch_dump(f"aten::{name}") for name in ("mm", "softmax.int", "layer_norm")),
        ]

    before = look()
    small(1, precision="bf16")
    with pytest.raises(StepFailedError):
        predict_step_memory(nn.Linear(4, 4), shape(2, 5), loss=of_sum, precision="bf16")
    assert look() == before
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.Linear(4, 4)(torch.zeros(1, 4)).dtype == torch.bfloat16
    assert F.dropout(torch.ones(4), 0.5).shape == (4,)


def test_a_dict_names_the_arguments_and_the_model_may_give_its_own_loss() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, *, x: Tensor, scale: float) -> dict[str, Tensor]:
            return {"loss": (self.layer(x) * scale).mean(), "logits": x}

    found = predict_step_memory(Own(), {"x": shape(5, 8), "scale": 2.0})
    assert (found.microbatch, found.model) == (5, "Own")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recurrent_layers_run_as_one_call(kind: Any, precision: Any) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = kind(16, 32, num_layers=2, batch_first=True, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)[0]

    found = predict_sum(Last(), shape(4, 50, 16), precision=precision)
    assert len(found.trace.events) < 1000  # not one product a step of time
    assert found.microbatch == 4


def test_torch_s_own_transformer_is_made_and_traced_with_its_masks() -> None:
    def make() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.1), 2)

    found = predict_sum(make, shape(4, 100, 64), precision="bf16")
    assert found == predict_sum(make(), shape(4, 100, 64), precision="bf16")
    masks = [n for n, r in zip(found.trace.sizes, found.trace.roles, strict=True) if r == "activations"]
    assert (
        masks.count(4 * 100 * 64) == 2 * 2 * 2
    )  # steps, layers, and two dropouts as wide as the stream: their masks
    assert max(masks) <= 2 * 3 * 4 * 100 * 64  # no scores: the widest saved are q, k and v in bf16


def test_scaling_divides_the_gradients_in_place_and_clipping_multiplies_them_in_place() -> None:
    plain, scaled, clipped = (
        predict_sum(nn.Linear(1000, 1000), shape(2, 1000), optimizer="SGD", **options)
        for options in ({}, {"scaler": True}, {"clip_norm": 1.0})
    )
    for found in (scaled, clipped):
        assert 0 <= found.allocated_bytes - plain.allocated_bytes < 20 * 512


def test_without_tensor_lists_the_update_s_temporaries_are_one_tensor_s() -> None:
    model = functools.partial(lambda: nn.Sequential(*(nn.Linear(500, 500) for _ in range(4))))
    found = {
        name: predict_sum(model, shape(2, 500), optimizer=functools.partial(torch.optim.AdamW, **options))
        for name, options in (("lists", {}), ("one by one", {"foreach": False}), ("fused", {"fused": True}))
    }
    weights = found["lists"].line("parameters")
    assert found["lists"].line("temporaries") == weights
    assert found["one by one"].line("temporaries") < weights
    assert found["fused"].peak.phase == "backward"  # the update itself needs none


def test_two_gradients_of_one_tensor_are_added_in_place() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Linear(64, 64, bias=False) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return x + self.b(x)

    unit = 4 * 65_536 * 64
    found = predict_sum(Both(), shape(65_536, 64), optimizer="SGD")
    # The sum's gradient is a number for all; made dense for the product, then the product's own.
    assert found.line("temporaries") <= 2 * unit + 8


def test_silu_s_backward_pass_is_one_kernel() -> None:
    unit = 4 * 65_536 * 64
    found = predict_sum(
        nn.Sequential(nn.Linear(64, 64, bias=False), nn.SiLU(), nn.Linear(64, 64, bias=False)),
        shape(65_536, 64),
        optimizer="SGD",
    )
    assert found.line("temporaries") <= 2 * unit + 8  # the gradient that comes and the one that goes


def test_a_recurrent_layer_keeps_what_cudnn_keeps() -> None:
    class Last(nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.layers = kind(16, 32, num_layers=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)[0]

    unit = 4 * 50 * 4 * 32
    for kind, numbers in ((nn.LSTM, 11), (nn.GRU, 13), (nn.RNN, 3)):
        assert numbers * unit in sizes_of(predict_sum(Last(kind), shape(50, 4, 16)), "activations")


def test_measurement_stands_beside_prediction() -> None:
    assert {"measure_step_memory", "compare_step_memory", "calibrate_step_memory"} <= set(step_memory.__all__)
    assert all(hasattr(step_memory, name) for name in step_memory.__all__)


def test_the_optimizer_can_be_a_class_a_name_a_function_or_none() -> None:
    for optimizer in (torch.optim.Adam, "Adam", lambda parameters: torch.optim.Adam(parameters)):
        assert predict_sum(mlp(), shape(8, IN), optimizer=optimizer).optimizer == "Adam"
    found = predict_sum(mlp(), shape(8, IN), optimizer=None)
    assert (found.optimizer, found.line("optimizer")) == ("none", 0)


def test_the_model_may_move_and_make_tensors_on_cuda_by_name() -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            made = (
                torch.zeros(4, device="cuda")
                + torch.ones(4).cuda()
                + torch.tensor([1.0] * 4, device=x.device)
            )
            with torch.autocast("cuda", torch.bfloat16):
                y = self.layer(x.to("cuda:0"))
            assert y.dtype == torch.bfloat16
            return y + made

    predict_sum(Moves(), shape(2, 4))


# -------------------------------------------------------------------------------------------------- its forms


def test_its_text_names_the_lines_the_instant_the_torch_and_what_is_left_out() -> None:
    found = small(2)
    for said in (str(found), found._repr_html_()):
        assert f"{found.peak.phase}, {found.peak.operator}" in said
        assert torch.__version__ in said
        assert "CUDA context" in said
        assert "parameters" in said
        assert "casts" not in said  # 0 here
    assert "<table" in found._repr_html_()


def test_its_timeline_keeps_the_peak_and_the_order() -> None:
    found = small(4)
    for points in (1, 50, 10**6):
        line = found.trace.timeline(points)
        assert len(line) <= points
        assert max(sum(live.values()) for _, _, live in line) >= sum(found.lines.values()) - found.line(
            "rounding"
        )
        assert [step for step, _, _ in line] == sorted(step for step, _, _ in line)
    with pytest.raises(ValueError, match="points is 0"):
        found.trace.timeline(0)


def test_its_plain_data_goes_through_json_and_its_lines_add_up() -> None:
    data = json.loads(json.dumps(small(2).as_dict()))
    for peak in data["peaks"]:
        assert sum(peak["lines"].values()) == peak["allocated_bytes"]
    assert data["allocated_bytes"] == max(peak["allocated_bytes"] for peak in data["peaks"])
    assert len(data["peaks"]) == 2
    with pytest.raises(KeyError, match="no line 'weights'"):
        small(2).line("weights")


def test_a_model_in_evaluation_mode_is_noted() -> None:
    assert any("evaluation mode" in note for note in predict_sum(mlp().eval(), shape(2, IN)).notes)


def test_the_input_s_line_is_the_batch_s_bytes() -> None:
    found = small(3)
    assert found.line("inputs") == 2 * 3 * 64 * 8
    assert rounded(found.line("inputs")) == math.ceil(found.line("inputs") / 512) * 512


def test_a_batch_is_moved_as_it_lies_in_memory_and_without_its_holes() -> None:
    lying = shape(4, 8, 16, 16).to(memory_format=torch.channels_last)
    for batch in (lying, shape(4, 16, 16, 8).permute(0, 3, 1, 2), shape(4, 8, 16, 32)[..., ::2]):
        assert predict_sum(nn.Conv2d(8, 1, 3), batch).line("inputs") == 4 * 4 * 8 * 16 * 16
    # One row that is expanded is copied into four.
    assert predict_sum(nn.Linear(8, 1), shape(1, 8).expand(4, 8)).line("inputs") == 4 * 4 * 8


# --------------------------------------------------------------------------------------------------- bad input


class Layer(nn.Module):
    """A linear layer whose output goes through a function that a test gives."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(4, 4), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.layer(x))


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (lambda y: y * 2 if y.sum() > 0 else y, r"asks for a value .*which way the step goes"),
        (lambda y: y * y.sum().item(), r"asks for a value"),
        (lambda y: y[y > 0], r"shape depends on values \(aten.nonzero"),
        (lambda y: y * float(y.detach().cpu().numpy()[0, 0]), r"reads a tensor's values"),
        (lambda y: y * y.detach().tolist()[0][0], r"asks for a value"),
        (lambda y: torch.cuda.synchronize() or y, r"asks the driver"),
    ],
)
def test_what_depends_on_data_is_told_with_its_line(then: Any, said: str) -> None:
    with pytest.raises(UnseenError, match=rf"test_step_memory.py:\d+.*{said}"):
        predict_sum(Layer(then), shape(2, 4))


def test_sparse_gradients_are_told_as_what_cannot_be_seen() -> None:
    words = nn.Embedding(100, 64, sparse=True)
    for optimizer in ("SGD", "SparseAdam"):
        with pytest.raises(
            UnseenError, match=r"Embedding has sparse=True.*layout torch.sparse_coo.*25,600 bytes"
        ):
            predict_sum(words, shape(4, 8, dtype=torch.int64), optimizer=optimizer)


def test_a_packed_sequence_is_told_as_what_cannot_be_traced() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 3]))
            return self.layers(packed)[0].data

    with pytest.raises(UnseenError):
        predict_sum(Packed(), shape(3, 2, 4))


def test_a_tensor_of_the_host_that_meets_the_device_is_an_error_here_as_there() -> None:
    with pytest.raises(StepFailedError, match=r"tensor of the host.*device=x.device"):
        predict_sum(Layer(lambda y: y + torch.ones(2, 4)), shape(2, 4))


def test_a_step_that_fails_says_where_and_keeps_the_cause() -> None:
    with pytest.raises(StepFailedError, match=r"the step failed at .*test_step_memory.py:\d+") as caught:
        predict_sum(nn.Linear(4, 4), shape(2, 5))
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.ReLU(), "ReLU has no parameters"),
        (nn.Linear(4, 4).requires_grad_(False), "all 2 parameters of Linear are frozen"),
        (nn.LazyLinear(4), "has no shape yet"),
        (3, "wanted a torch.nn.Module or a function"),
        (lambda: 3, "the function made int"),
    ],
)
def test_a_model_that_cannot_be_trained_is_told(model: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        predict_sum(model, shape(2, 4))


def test_lbfgs_is_refused_with_the_size_of_its_history() -> None:
    with pytest.raises(UnseenError, match=r"LBFGS.step needs a closure.*2 x 100 x 20 numbers, 16,000 bytes"):
        predict_sum(nn.Linear(4, 4), shape(2, 4), optimizer="LBFGS")


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    other = torch.optim.SGD(nn.Linear(4, 4).parameters())
    with pytest.raises(ModelError, match="none of the model's"):
        predict_sum(nn.Linear(4, 4), shape(2, 4), optimizer=other)
    with pytest.raises(ModelError, match="give the module itself"):
        predict_sum(lambda: nn.Linear(4, 4), shape(2, 4), optimizer=other)


@pytest.mark.parametrize(
    ("batch", "options", "said"),
    [
        (shape(0, 4), {}, r"shape \(0, 4\), with nothing in it"),
        ((), {}, "holds no tensor"),
        (3, {}, "holds no tensor"),
        (shape(2, 4), {"microbatch": 0}, "microbatch is 0"),
        (shape(2, 4), {"microbatch": True}, "microbatch is True"),
    ],
)
def test_a_batch_that_is_none_is_told(batch: Any, options: Any, said: str) -> None:
    with pytest.raises(BatchError, match=said):
        predict_sum(nn.Linear(4, 4), batch, **options)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"precision": "fp8"}, ValueError, "precision is 'fp8'; wanted one of fp32, tf32, fp16, bf16"),
        ({"accumulation": 0}, ValueError, "accumulation is 0; wanted 1 or more"),
        ({"accumulation": True}, TypeError, "wanted a whole number"),
        ({"steps": 1.5}, TypeError, "steps is 1.5"),
        ({"workspace_bytes": -1}, ValueError, "workspace_bytes is -1"),
        ({"compile": "all"}, ValueError, "compile is 'all'; wanted True"),
        ({"clip_norm": 0}, ValueError, "clip_norm is 0; wanted a number above 0"),
        ({"clip_norm": "1"}, TypeError, "clip_norm is '1'; wanted a number"),
        ({"optimizer": "Adamant"}, ValueError, "torch.optim has no optimizer 'Adamant'"),
        ({"optimizer": 3}, TypeError, "the optimizer is 3"),
        ({"optimizer": lambda parameters: 3}, TypeError, "made int; wanted a torch.optim.Optimizer"),
    ],
)
def test_another_argument_that_is_wrong_is_told(options: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        predict_sum(nn.Linear(4, 4), shape(2, 4), **options)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, x: model(x), r"a tensor of shape \(2, 4\); wanted one number"),
        (lambda model, x: 3.0, "wanted one number"),
        (lambda model, x: model(x).sum().detach(), "no parameter that learns"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_told(loss: Any, said: str) -> None:
    with pytest.raises(StepFailedError, match=said):
        predict_step_memory(nn.Linear(4, 4), shape(2, 4), loss=loss)
