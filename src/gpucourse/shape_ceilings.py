"""The ceiling of each shape: a step's calls, each measured alone.

The best shape's rate is not every shape's, and an element-wise kernel may not stream as a plain copy does. Measured
alone, on random data, a call shows what its own shape and its own kernel allow; what a step still takes beyond that
belongs to the step: idle time, heat, what its calls do to one another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from gpucourse.call_work import Family, family_of
from gpucourse.cuda_events import time_cuda
from gpucourse.environment import require_cuda
from gpucourse.kernels import KernelTrace
from gpucourse.measured_roof import tf32_products
from gpucourse.step_budget import TracedCall, traced_calls

__all__ = ["shape_ceilings"]

_REST_S = 0.1  # so that a hot card has its clock back
_SAMPLE_S = 0.02
_Call = Callable[[], Any]


def shape_ceilings(
    *traces: KernelTrace | Mapping[str, Any],
    families: Collection[Family] | None = ("product", "attention"),
    causal: bool = True,
    tf32: bool = False,
) -> dict[str, float]:
    """Measure each distinct call of some traces alone, on random data.

    Parameters
    ----------
    *traces
        Of `gpucourse.kernels.trace`, or their dicts.
    families
        Kinds of operation to measure; None for all that can be made again from their shapes: products,
        attention, layer norm, softmax, gelu, copies, fills, additions and their like. Generated kernels and
        optimizers cannot.
    causal
        Whether attention is causal.
    tf32
        Whether fp32 products run in tf32.

    Returns
    -------
    dict
        For `step_budget`'s `alone`: a key for each operation, shapes and types to the median device time of
        one call in ms, in a burst after a rest. Of the layouts that a product's operands may have (each as
        it is or stored transposed), which the trace does not say, the fastest. What cannot be made again, or
        does not fit in memory, is left out.

    Raises
    ------
    NoGPUError
        There is no CUDA device.
    TypeError, ValueError
        As in `step_budget`.

    Notes
    -----
    Short calls are timed in CUDA graphs (`gpucourse.cuda_events.time_cuda`), so that a host slower than the device
    does not show in their figure.
    """
    require_cuda("shape_ceilings")
    import torch

    distinct = {call.key: call for trace in traces for call in traced_calls(trace) if not call.off_device}
    found: dict[str, float] = {}
    with tf32_products(tf32):
        for key, call in distinct.items():
            if families is not None and family_of(call.op) not in families:
                continue
            times = []
            for make in remakes(call, causal):
                try:
                    call_again = make()
                    time.sleep(_REST_S)
                    times.append(time_cuda(call_again, max_seconds=_SAMPLE_S).median_ms)
                except (torch.cuda.OutOfMemoryError, RuntimeError, TypeError, ValueError, IndexError):
                    continue  # shapes that are not those of this overload, or too large for this device
                finally:
                    torch.cuda.empty_cache()
            if times:
                found[key] = min(times)
    return found


def remakes(call: TracedCall, causal: bool, device: str = "cuda") -> list[Callable[[], _Call]]:
    """Give what makes a call again, one for each layout worth trying; empty where that is not known.

    Parameters
    ----------
    call
        From `gpucourse.step_budget.traced_calls`.
    causal
        Whether attention is causal.
    device
        Where its tensors lie.
    """
    import torch

    name = call.op.rsplit("::", 1)[-1]
    dtypes: list[Any] = [getattr(torch, dtype, None) for dtype in call.dtypes]
    if not call.op.startswith("aten::") or not dtypes or None in dtypes:
        return []

    def random(place: int, turned: bool = False) -> Any:
        shape, dtype = call.shapes[place], dtypes[place]
        if not dtype.is_floating_point:
            return torch.zeros(shape, device=device, dtype=dtype)
        if not turned:
            return torch.randn(shape, device=device, dtype=dtype)
        stored = (*shape[:-2], shape[-1], shape[-2])
        return torch.randn(stored, device=device, dtype=dtype).transpose(-1, -2)

    if name in ("mm", "bmm", "addmm", "baddbmm"):
        return [_product(name, random, turned) for turned in ((False, False), (False, True), (True, False))]
    if family_of(call.op) == "attention":
        inner = name.startswith(("_flash_attention", "_efficient_attention"))
        backward = "backward" in name  # its first tensor is the gradient of the output
        return [_attention(lambda: [random(p + backward) for p in range(3)], inner, backward, causal)]
    again = _AGAIN.get(name)
    return [] if again is None else [lambda: again([random(place) for place in range(len(call.shapes))])]


def _product(name: str, random: Callable[[int, bool], Any], turned: tuple[bool, bool]) -> Callable[[], _Call]:
    import torch

    def make() -> _Call:
        first = 1 if name in ("addmm", "baddbmm") else 0
        a, b = random(first, turned[0]), random(first + 1, turned[1])
        function = getattr(torch, name)
        if first:
            added = random(0, False)
            return lambda: function(added, a, b)
        return lambda: function(a, b)

    return make


def _attention(
    arrays: Callable[[], list[Any]], inner: bool, backward: bool, causal: bool
) -> Callable[[], _Call]:
    """Make attention again on queries, keys and values; the inner operations have the heads third."""
    import torch
    import torch.nn.functional as F  # noqa: N812 - its usual name

    def make() -> _Call:
        leaves = [array.requires_grad_(backward) for array in arrays()]
        q, k, v = (leaf.transpose(1, 2) if inner else leaf for leaf in leaves)

        def forward() -> Any:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        if not backward:
            return forward
        out = forward()
        grad = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return make


def _binary(name: str) -> Callable[[list[Any]], _Call]:
    def again(tensors: list[Any]) -> _Call:
        import torch

        method = getattr(torch.Tensor, name)
        if len(tensors) == 1:
            return lambda: method(tensors[0], 1.0)
        return lambda: method(*tensors[:2])

    return again


def _copy(tensors: list[Any]) -> _Call:
    return lambda: tensors[0].copy_(tensors[1])


def _fill(tensors: list[Any]) -> _Call:
    return lambda: tensors[0].fill_(0.0)


def _cat(tensors: list[Any]) -> _Call:
    import torch

    return lambda: torch.cat(tensors, -1)


def _column_sums(tensors: list[Any]) -> _Call:
    if tensors[0].dim() != 2:
        raise ValueError("over which dimensions is not in the trace")
    return lambda: tensors[0].sum(0)


def _gelu(tensors: list[Any]) -> _Call:
    import torch

    return lambda: torch.nn.functional.gelu(tensors[0])


def _gelu_backward(tensors: list[Any]) -> _Call:
    import torch

    return lambda: torch.ops.aten.gelu_backward(tensors[0], tensors[1])


def _log_softmax(tensors: list[Any]) -> _Call:
    import torch

    return lambda: torch.log_softmax(tensors[0], -1)


def _log_softmax_backward(tensors: list[Any]) -> _Call:
    import torch

    grad, out = tensors[:2]
    return lambda: torch.ops.aten._log_softmax_backward_data(grad, out, -1, grad.dtype)


def _layer_norm(tensors: list[Any]) -> _Call:
    import torch

    x, weight, bias = tensors
    return lambda: torch.native_layer_norm(x, weight.shape, weight, bias, 1e-5)


def _layer_norm_backward(tensors: list[Any]) -> _Call:
    import torch

    grad, x, mean, rstd, weight, bias = tensors
    whole = [True, True, True]
    return lambda: torch.ops.aten.native_layer_norm_backward(
        grad, x, weight.shape, mean, rstd, weight, bias, whole
    )


_AGAIN: dict[str, Callable[[list[Any]], _Call]] = {
    **{name: _binary(name) for name in ("add", "add_", "mul", "mul_", "sub", "div")},
    "copy_": _copy,
    "fill_": _fill,
    "cat": _cat,
    "sum": _column_sums,
    "gelu": _gelu,
    "gelu_backward": _gelu_backward,
    "_log_softmax": _log_softmax,
    "_log_softmax_backward_data": _log_softmax_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
}
