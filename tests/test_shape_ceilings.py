"""A traced call made again from its shapes is the same operation; on a CPU here, where no time is read."""

from __future__ import annotations

import types

import pytest

from gpucourse import shape_ceilings as module
from gpucourse.environment import NoGPUError, cuda_available
from gpucourse.shape_ceilings import _AGAIN, remakes, shape_ceilings
from gpucourse.step_budget import TracedCall

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


def call(op: str, shapes, dtype: str = "float32", dtypes=None) -> TracedCall:
    return TracedCall(
        op=op, shapes=tuple(map(tuple, shapes)), dtypes=tuple(dtypes or [dtype] * len(shapes)), kernels=1,
        busy_us=1.0, off_device=False,
    )  # fmt: skip


def dispatched(run) -> list[tuple[str, list[tuple[int, ...]]]]:
    """Name the operations that a call reaches, with the shapes of their tensors."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            flat = [a for arg in args for a in (arg if isinstance(arg, list | tuple) else [arg])]
            tensors = [tuple(a.shape) for a in flat if isinstance(a, torch.Tensor)]
            seen.append((f"aten::{func.overloadpacket.__name__}", tensors))
            return func(*args, **(kwargs or {}))

    with Watch():
        run()
    return seen


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        ("aten::mm", [(6, 4), (4, 5)]),
        ("aten::addmm", [(5,), (6, 4), (4, 5)]),
        ("aten::bmm", [(2, 6, 4), (2, 4, 5)]),
        ("aten::add", [(6, 4), (4,)]),
        ("aten::mul_", [(6, 4)]),
        ("aten::copy_", [(6, 4), (6, 4)]),
        ("aten::fill_", [(6, 4)]),
        ("aten::cat", [(6, 4), (6, 4)]),
        ("aten::sum", [(6, 4)]),
        ("aten::gelu", [(6, 4)]),
        ("aten::gelu_backward", [(6, 4), (6, 4)]),
        ("aten::_log_softmax", [(6, 4)]),
        ("aten::_log_softmax_backward_data", [(6, 4), (6, 4)]),
        ("aten::native_layer_norm", [(2, 3, 4), (4,), (4,)]),
        ("aten::native_layer_norm_backward", [(2, 3, 4), (2, 3, 4), (2, 3, 1), (2, 3, 1), (4,), (4,)]),
    ],
)
def test_a_call_is_made_again_with_its_shapes(op, shapes) -> None:
    made = remakes(call(op, shapes), True, "cpu")
    assert len(made) == (3 if op in ("aten::mm", "aten::addmm", "aten::bmm") else 1)
    for make in made:
        seen = dispatched(make())
        tensors = next(tensors for name, tensors in seen if name == op)
        assert tensors[: len(shapes)] == shapes


def test_every_rule_for_making_a_call_again_has_its_test() -> None:
    tested = {"add", "mul_", "copy_", "fill_", "cat", "sum", "gelu", "gelu_backward", "_log_softmax",
              "_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward"}  # fmt: skip
    assert set(_AGAIN) - tested == {"add_", "mul", "sub", "div"}  # made by the same function as add


def test_a_products_layouts_differ_in_their_strides_and_not_in_their_shapes() -> None:
    strides = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket.__name__ == "mm":
                strides.add((args[0].is_contiguous(), args[1].is_contiguous()))
                assert (args[0].shape, args[1].shape) == ((6, 4), (4, 5))
            return func(*args, **(kwargs or {}))

    for make in remakes(call("aten::mm", [(6, 4), (4, 5)]), True, "cpu"):
        run = make()
        with Watch():
            run()
    assert strides == {(True, True), (True, False), (False, True)}


@pytest.mark.parametrize("op", ["aten::_flash_attention_forward", "aten::_cudnn_attention_forward"])
def test_attention_is_made_again_with_its_heads_in_their_place(op) -> None:
    shape = (2, 10, 3, 8) if "flash" in op else (2, 3, 10, 8)
    (make,) = remakes(call(op, [shape] * 3), True, "cpu")
    assert make()().shape == (2, 3, 10, 8)
    (make,) = remakes(call(op.replace("forward", "backward"), [shape] * 6), True, "cpu")
    grads = make()()
    assert [tuple(grad.shape) for grad in grads] == [shape] * 3


@pytest.mark.parametrize(
    "odd",
    [
        call("triton_poi_fused_0", [(4,)]),
        call("aten::special", [(4,)]),
        call("aten::mm", [(4, 4), (4, 4)], dtypes=["unknown", "float32"]),
        call("aten::mm", []),
        call("aten::_fused_adamw_", [(4,)] * 4),
    ],
)
def test_what_cannot_be_made_again_is_left_out(odd) -> None:
    assert remakes(odd, True, "cpu") == []


def test_each_distinct_call_is_measured_once_on_its_best_layout(monkeypatch) -> None:
    rests, timed = [], []

    def timing(run, max_seconds):
        timed.append(run().shape)
        return types.SimpleNamespace(median_ms=float(10 - len(timed)))

    monkeypatch.setattr(module, "require_cuda", lambda what: None)
    monkeypatch.setattr(module, "time_cuda", timing)
    monkeypatch.setattr(module.time, "sleep", rests.append)
    monkeypatch.setattr(module, "remakes", lambda call, causal: remakes(call, causal, "cpu"))
    kernel = {"name": "k", "start_us": 0.0, "duration_us": 1.0}
    mm = {**kernel, "op": "aten::mm", "shapes": [[6, 4], [4, 5]], "dtypes": ["float32"] * 2}
    trace = {
        "kernels": [
            {**mm, "call": 0},
            {**mm, "call": 1},
            {**kernel, "op": "aten::gelu", "shapes": [[6, 4]], "dtypes": ["float32"], "call": 2},
            {**mm, "shapes": [[6, 4], [9, 5]], "call": 3},  # no product: left out
        ]
    }
    found = shape_ceilings(trace, trace)
    assert list(found.values()) == [7.0]  # the fastest of three
    assert rests
    assert all(rest > 0 for rest in rests)
    assert len(shape_ceilings(trace, families=None)) == 2


@pytest.mark.skipif(cuda_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_measured() -> None:
    with pytest.raises(NoGPUError, match="shape_ceilings needs a CUDA device"):
        shape_ceilings({"kernels": []})
