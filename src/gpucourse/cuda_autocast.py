"""CUDA's autocast for tensors that only stand for CUDA's.

Which operators autocast touches is read from torch itself: those with a kernel under CUDA's autocast key. That
kernel asks a tensor for its device before it casts, and a stand-in's is not CUDA, so for the length of a block
each is replaced by one that does the same without asking. What each does, by ``aten/src/ATen/autocast_mode.h``:
an operator that gains from tensor cores casts its inputs to the lower precision; one that needs range or
accuracy casts them to fp32, or where it can takes them as they are and computes in fp32; the rest of the list
promotes its inputs to the widest.

A weight's cast is kept until the outermost autocast ends, so that a weight used twice is cast once. The graph
may keep it longer.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["cast_to_lower", "cuda_autocast"]

# fmt: off
_LOWER = frozenset({
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "prelu", "addmm", "addmv",
    "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul",
    "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
})
_COMPUTES_IN_FP32 = frozenset({
    "prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum",
})
_RESULT_IN_FP32 = frozenset({"norm"})
_PROMOTES = frozenset({
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
})
# fmt: on

_weights: dict[int, tuple[Any, Any]] = {}  # by identity: the weight, and its cast


@contextlib.contextmanager
def cuda_autocast(device: Any) -> Iterator[None]:
    """Let CUDA's autocast serve the tensors of another device inside the block, for the whole process.

    Parameters
    ----------
    device
        Their device. Their dispatch keys must be CUDA's.
    """
    import torch

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    clear = torch.clear_autocast_cache
    init = torch.autocast.__init__
    common = torch.cuda.amp.common
    available, bf16 = common.amp_definitely_not_available, torch.cuda.is_bf16_supported

    @functools.wraps(init)
    def on_cuda(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        # A model asks for autocast by the device of its tensors. Torch's own code, such as a checkpoint that
        # sets up both devices again, means the host where it says so.
        asks = not str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.")
        init(self, "cuda" if asks and device_type == device.type else device_type, *args, **kwargs)

    def cleared() -> None:
        _weights.clear()
        clear()

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says once that a kernel is replaced
            for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
                space, _, name = name.partition("::")
                if space == "aten":
                    library.impl(name, _kernel(name, device), "AutocastCUDA")  # type: ignore[no-untyped-call]
        torch.clear_autocast_cache = cleared
        torch.autocast.__init__ = on_cuda  # type: ignore[method-assign]
        # Autocast turns itself off where there is no CUDA.
        common.amp_definitely_not_available = lambda: False
        torch.cuda.is_bf16_supported = lambda *_, **__: True
        yield
    finally:
        _weights.clear()
        torch.cuda.is_bf16_supported = bf16
        common.amp_definitely_not_available = available
        torch.autocast.__init__ = init  # type: ignore[method-assign]
        torch.clear_autocast_cache = clear
        library._destroy()  # type: ignore[no-untyped-call]


def cast_to_lower(tensor: Any, dtype: Any) -> Any:
    """Cast a tensor as autocast does for a product: floating-point ones but doubles, a weight only once.

    Parameters
    ----------
    tensor
        Any tensor.
    dtype
        The lower precision.
    """
    import torch

    if not _eligible(tensor) or tensor.dtype == dtype:
        return tensor
    keep = (
        tensor.dtype == torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
        and torch.is_autocast_cache_enabled()
    )
    if not keep:
        return tensor.to(dtype)
    if id(tensor) not in _weights:
        _weights[id(tensor)] = (tensor, tensor.to(dtype))
    return _weights[id(tensor)][1]


def _eligible(tensor: Any) -> bool:
    import torch

    return bool(tensor.is_floating_point()) and tensor.dtype != torch.float64


def _kernel(name: str, device: Any) -> Callable[..., Any]:
    """Make the kernel of one operator."""
    import torch
    from torch.utils._pytree import tree_leaves

    base, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, base), overload or "default")
    names = [argument.name for argument in operator._schema.arguments]
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    without = torch._C._ExcludeDispatchKeyGuard

    def mapped(cast: Callable[[Any], Any], value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return cast(value) if value.device == device else value
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            return [mapped(cast, v) for v in value]
        return value

    def call(cast: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
        # The last argument is cast first: the kernel casts them all in one call, and GCC, which builds torch for
        # CUDA, evaluates a call's arguments from right to left. It decides which free block each cast is cut from.
        given = [*args, *kwargs.values()]
        made = [mapped(cast, value) for value in reversed(given)][::-1]
        return operator(*made[: len(args)], **dict(zip(kwargs, made[len(args) :], strict=True)))

    def to_fp32(tensor: Any) -> Any:
        return tensor.to(torch.float32) if _eligible(tensor) else tensor

    def lower(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cuda")
        with without(key):
            return call(lambda tensor: cast_to_lower(tensor, dtype), args, kwargs)

    def fp32(*args: Any, **kwargs: Any) -> Any:
        with without(key):
            return call(to_fp32, args, kwargs)

    def computes_in_fp32(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("dtype") is None and _eligible(args[0]):
            given["dtype"] = torch.float32
        with without(key):
            return operator(**given)

    def result_in_fp32(*args: Any, **kwargs: Any) -> Any:
        with without(key):
            return to_fp32(operator(*args, **kwargs))

    def promotes(*args: Any, **kwargs: Any) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and _eligible(t)]
        wide = any(t.dtype == torch.float32 for t in given)
        widest = torch.float32 if wide else torch.get_autocast_dtype("cuda")
        with without(key):
            return call(lambda t: t.to(widest) if _eligible(t) else t, args, kwargs)

    if base in _LOWER:
        return lower
    if base in _COMPUTES_IN_FP32:
        return computes_in_fp32
    if base in _RESULT_IN_FP32:
        return result_in_fp32
    return promotes if base in _PROMOTES else fp32
