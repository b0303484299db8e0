"""A compiled step's memory, from the program that the compiler writes for it."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpucourse import compiled_program
from gpucourse.compiled_program import CompilerError, collector_paused
from gpucourse.step_errors import ModelError, UnseenError
from gpucourse.step_memory import StepMemory, predict_step_memory
from gpucourse.training import GPT, GPTConfig, next_token_loss

SMALL = GPTConfig(layers=1, width=64, heads=2, vocabulary=2000, context=64)
UNIT = 4 * 16_384 * 64


def shape(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


def of_sum(model: nn.Module, *inputs: Tensor) -> Tensor:
    return model(*inputs).float().sum()


def small(model: Any = lambda: GPT(SMALL), **options: Any) -> StepMemory:
    batch = (shape(8, 64, dtype=torch.int64),) * 2
    return predict_step_memory(model, batch, loss=next_token_loss, precision="bf16", **options)


class Chain(nn.Module):
    """A layer, then element-wise operations of which each one keeps something when it runs alone."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def part(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(torch.sin(torch.exp(torch.cos(layer(x)))))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = (
                checkpoint(self.part, layer, x, use_reentrant=False)
                if self.checkpointed
                else self.part(layer, x)
            )
        return x


def test_what_is_merged_is_not_kept() -> None:
    eager = predict_step_memory(Chain(), shape(16_384, 64), loss=of_sum, optimizer="SGD")
    compiled = predict_step_memory(Chain(), shape(16_384, 64), loss=of_sum, optimizer="SGD", compile=True)
    assert eager.line("activations") == 11 * UNIT
    assert (
        compiled.line("activations") <= 8 * UNIT
    )  # of each layer its product, and its result for the next one
    assert (eager.compiled, compiled.compiled) == ("", "model and loss")


def test_a_checkpoint_inside_keeps_its_input_alone() -> None:
    plain, saved = (
        predict_step_memory(Chain(on), shape(16_384, 64), loss=of_sum, optimizer="SGD", compile=True)
        for on in (False, True)
    )
    assert saved.line("activations") < plain.line("activations")


@pytest.mark.slow
def test_a_loss_inside_the_graph_never_stores_its_logits_in_fp32() -> None:
    outside, inside = small(compile="model"), small(compile=True)
    logits = 8 * 64 * 2000
    assert outside.lines["activations"] + outside.lines["temporaries"] >= 2 * 4 * logits
    assert inside.allocated_bytes < outside.allocated_bytes - 4 * logits
    assert [inside.compiled, outside.compiled] == ["model and loss", "model"]
    for said in (str(inside), inside._repr_html_()):
        assert "compiled (model and loss)" in said
        assert "graph breaks" in said


@pytest.mark.slow
def test_a_compiled_module_is_predicted_as_compiled_whatever_way_it_was_compiled() -> None:
    asked = small(compile="model")
    assert small(torch.compile(GPT(SMALL))) == asked
    by_itself = GPT(SMALL)
    by_itself.compile()
    assert small(by_itself) == asked
    assert small(lambda: torch.compile(GPT(SMALL))) == asked


@pytest.mark.slow
def test_parts_that_are_compiled_are_named() -> None:
    model = GPT(SMALL)
    model.blocks[0] = torch.compile(model.blocks[0])  # type: ignore[assignment]  # torch types it loosely
    found = small(model)
    assert found.compiled == "blocks.0"
    assert isinstance(model.blocks[0], torch._dynamo.eval_frame.OptimizedModule)


@pytest.mark.slow
def test_a_compiled_loss_takes_the_model_in() -> None:
    compiled = torch.compile(next_token_loss)
    batch = (shape(8, 64, dtype=torch.int64),) * 2
    found = predict_step_memory(lambda: GPT(SMALL), batch, loss=compiled, precision="bf16")
    assert found.compiled == "model and loss"


@pytest.mark.slow
def test_in_a_second_microbatch_all_gradients_are_there() -> None:
    found = small(compile=True, accumulation=2)
    assert found.line("gradients") >= found.line("parameters")


def test_a_recurrent_layer_in_a_compiled_model_is_told() -> None:
    with pytest.raises(UnseenError, match=r"torch.lstm in a compiled model.*breaks its graph.*calibrate"):
        predict_step_memory(
            nn.LSTM(8, 8), shape(5, 4, 8), loss=lambda m, x: m(x)[0].sum(), optimizer=None, compile=True
        )


def test_a_branch_on_data_is_told_as_in_an_eager_step() -> None:
    with pytest.raises(UnseenError, match="asks for a value"):
        predict_step_memory(
            nn.Linear(4, 4),
            shape(2, 4),
            loss=lambda m, x: m(x).sum() * (2 if m(x).sum() > 0 else 1),
            compile=True,
        )


def test_a_compiler_that_cannot_be_run_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codegen import wrapper

    monkeypatch.delattr(wrapper.PythonWrapperCodegen, "write_triton_header_once")
    with pytest.raises(UnseenError, match=r"PythonWrapperCodegen has no .*calibrate_step_memory") as caught:
        small(compile=True)
    assert isinstance(caught.value.__cause__, CompilerError)


def test_a_failure_inside_the_compiler_is_no_failure_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    def fails(*_: Any, **__: Any) -> Any:
        raise AttributeError("moved elsewhere")

    monkeypatch.setattr(compile_fx, "compile_fx", fails)
    with pytest.raises(UnseenError, match=r"AttributeError: moved elsewhere.*calibrate_step_memory"):
        small(compile=True)


def test_torch_and_the_disk_are_left_as_they_were(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import async_compile, codecache, config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    look = lambda: (  # noqa: E731 - twice the same
        async_compile.AsyncCompile.__dict__["triton"],
        codecache.PyCodeCache.__dict__["load_by_key_path"],
        torch.utils.checkpoint._checkpoint_without_reentrant_generator,
        config.cpu_backend,
        gc.isenabled(),
    )
    before = look()
    small(compile=True)
    assert look() == before
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not compiled_program.compiling()


def test_the_collector_is_switched_on_again_only_where_it_was_on() -> None:
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_compiled_model_without_parameters_is_no_model() -> None:
    with pytest.raises(ModelError, match="ReLU has no parameters"):
        predict_step_memory(torch.compile(nn.ReLU()), shape(2, 4), loss=of_sum)
