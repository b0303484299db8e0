"""The ceiling of each shape: a step's products and attention, each measured alone.

The best shape's rate is not every shape's. Measured alone, on random data, a call shows what its own shape
allows; what a step still takes beyond that is the step's, not the shape's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpucourse.call_work import family_of
from gpucourse.environment import require_cuda
from gpucourse.kernels import KernelTrace
from gpucourse.measured_roof import burst, tf32_products
from gpucourse.step_budget import TracedCall, traced_calls

__all__ = ["shape_ceilings"]

_REST_S = 0.1  # so that a hot card has its clock back


def shape_ceilings(
    trace: KernelTrace | Mapping[str, Any], *, causal: bool = True, tf32: bool = False
) -> dict[str, float]:
    """Measure each distinct product and attention call of a trace alone, on random data.

    The ceiling of the best shape is not that of every shape. This says what the same call reaches when nothing
    else is asked of the device: what is then still missing in the step is not the shape's.

    Parameters
    ----------
    trace
        Of `gpucourse.kernels.trace`, or its dict.
    causal
        Whether attention is causal.
    tf32
        Whether fp32 products run in tf32.

    Returns
    -------
    dict
        For `step_budget`'s `alone`: a key for each operation, shapes and types to the median device time of
        one call in ms. Of the layouts that a product's operands may have (each as it is or transposed), which
        the trace does not say, the fastest. Operations that it cannot make from their shapes are left out,
        and so is what does not fit in memory.

    Raises
    ------
    NoGPUError
        There is no CUDA device.
    TypeError, ValueError
        As in `step_budget`.
    """
    require_cuda("shape_ceilings")
    import torch

    distinct = {call.key: call for call in traced_calls(trace) if not call.off_device}
    found: dict[str, float] = {}
    with tf32_products(tf32):
        for key, call in distinct.items():
            times = []
            for make in _remakes(call, causal):
                try:
                    times.append(statistics.median(burst(make(), _REST_S)))
                except (torch.cuda.OutOfMemoryError, RuntimeError, ValueError):
                    continue
                finally:
                    torch.cuda.empty_cache()
            if times:
                found[key] = min(times)
    return found


def _remakes(call: TracedCall, causal: bool) -> list[Callable[[], Callable[[], Any]]]:
    """Give, for each layout worth trying, what makes the call again; empty where it is none of those known."""
    import torch

    name = call.op.rsplit("::", 1)[-1]
    dtypes = [getattr(torch, dtype, None) for dtype in call.dtypes]
    if not dtypes or any(dtype is None or not dtype.is_floating_point for dtype in dtypes[:3]):
        return []
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        return [_product_again(name, call.shapes, dtypes, layout) for layout in ("nn", "nt", "tn")]
    if family_of(call.op) == "attention":
        return [_attention_again(name, call.shapes, dtypes[0], causal)]
    return []


def _product_again(
    name: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any], layout: str
) -> Callable[[], Callable[[], Any]]:
    import torch

    def operand(shape: tuple[int, ...], dtype: Any, how: str) -> Any:
        if how == "n":
            return torch.randn(shape, device="cuda", dtype=dtype)
        turned = (*shape[:-2], shape[-1], shape[-2])
        return torch.randn(turned, device="cuda", dtype=dtype).transpose(-1, -2)

    def make() -> Callable[[], Any]:
        first = 1 if name in ("addmm", "baddbmm") else 0
        a = operand(shapes[first], dtypes[first], layout[0])
        b = operand(shapes[first + 1], dtypes[first + 1], layout[1])
        function = getattr(torch, name)
        if first:
            added = torch.randn(shapes[0], device="cuda", dtype=dtypes[0])
            return lambda: function(added, a, b)
        return lambda: function(a, b)

    return make


def _attention_again(
    name: str, shapes: Sequence[tuple[int, ...]], dtype: Any, causal: bool
) -> Callable[[], Callable[[], Any]]:
    import torch
    import torch.nn.functional as F  # noqa: N812 - its usual name

    backward = "backward" in name
    q, k, v = shapes[1:4] if backward else shapes[:3]
    inner = name.startswith(("_flash_attention", "_efficient_attention"))

    def make() -> Callable[[], Any]:
        def array(shape: tuple[int, ...]) -> Any:
            x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=backward)
            return x.transpose(1, 2) if inner else x

        queries, keys, values = array(q), array(k), array(v)

        def forward() -> Any:
            return F.scaled_dot_product_attention(queries, keys, values, is_causal=causal)

        if not backward:
            return forward
        out = forward()
        grad = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (queries, keys, values), grad, retain_graph=True)

    return make
