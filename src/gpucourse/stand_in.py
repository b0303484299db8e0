"""A device that is not there: tensors without bytes that torch treats as CUDA's where memory depends on it.

Torch's fake tensors have shape, dtype and device but no data. On the device "cuda" they cannot run a backward
pass in a build without CUDA: the autograd engine asks for a driver and the process ends (torch 2.13). On the
device "cpu" the step runs, but as the CPU would run it: with the CPU's list of autocast operators, its
attention, its dropout. So the stand-in is both: a fake tensor whose dispatch keys are CUDA's, so that autocast
and autograd follow CUDA's lists, and whose device reads ``cpu:0``, which no engine minds. The host is ``cpu``,
without an index; a tensor of the host that meets one of the device is an error here as it is there.

Where operators look at the device themselves, CUDA's choice is put in by hand:

- `scaled_dot_product_attention`: a fused kernel, which saves one number a row for the backward pass instead of
  the scores; the plain formula where no fused kernel takes the inputs (``aten/src/ATen/native/transformers/cuda/
  sdp_utils.cpp``);
- `dropout`: a mask of one byte an element instead of the scaled mask in the input's dtype (``Dropout.cpp``);
- `rms_norm`: one kernel, which saves one number a row (``layer_norm.cpp``);
- `lstm`, `gru`, `rnn_tanh`, `rnn_relu`: one cuDNN call with a reserve instead of a loop over time (``RNN.cpp``);
- optimizers and gradient clipping: the tensor-list forms that are CUDA's default (``torch/optim/optimizer.py``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from gpucourse.cuda_autocast import cast_to_lower, cuda_autocast

__all__ = ["device", "stand_in"]


def device() -> Any:
    """Give the device that the stand-in's tensors say they are on."""
    import torch

    return torch.device("cpu", 0)


@contextlib.contextmanager
def stand_in() -> Iterator[Any]:
    """Let torch work without data, and as on CUDA, inside the block.

    Torch is changed for the whole process while the block runs, so no other thread may use it meanwhile.

    Yields
    ------
    torch._subclasses.fake_tensor.FakeTensorMode
        The mode that makes the tensors.
    """
    import torch
    from torch._subclasses import fake_tensor
    from torch.optim import optimizer
    from torch.utils import _foreach_utils
    from torch.utils.checkpoint import DefaultDeviceType

    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # Copying a module that is made here looks at the address of its weights, and copies them all the same.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        change = functools.partial(_changed, stack)
        change(fake_tensor.FakeTensor, "__new__", staticmethod(_new_fake(fake_tensor.FakeTensor.__new__)))
        if hasattr(fake_tensor, "init_gpu_context"):  # would make a context where a GPU is visible
            change(fake_tensor, "init_gpu_context", lambda *_: None)
        # Tensor lists are the default on these devices, for these types.
        devices = [*_foreach_utils._get_foreach_kernels_supported_devices(), device().type]
        types = [*optimizer._foreach_supported_types, fake_tensor.FakeTensor]
        for module in (_foreach_utils, optimizer):
            if hasattr(module, "_get_foreach_kernels_supported_devices"):
                change(module, "_get_foreach_kernels_supported_devices", lambda: list(devices))
        change(optimizer, "_foreach_supported_types", types)
        change(_foreach_utils, "_foreach_supported_types", types)
        # A checkpoint saves the state of autocast for the device that it takes for the default one.
        change(DefaultDeviceType, "_default_device_type", "cuda")
        stack.enter_context(_kernels_known())
        stack.enter_context(cuda_autocast(device()))
        # Inside a function of torch.nn.functional the mode below is off, but its names are looked up here.
        change(torch.nn.functional, "scaled_dot_product_attention", _attention)
        change(torch, "rms_norm", _rms_norm)
        masks = _masks_of_transformers()
        if masks is not None:
            change(masks, "find_packed_sequence_indices", lambda *_, **__: None)
        for name, choice in _CHOICES.items():
            change(torch._VF, name, choice)
        # A failure is reported by the exception; the log would print the same traceback before it.
        log = logging.getLogger(fake_tensor.__name__)
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.CRITICAL + 1)

        mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        stack.enter_context(mode)
        stack.enter_context(_operators()())
        yield mode


@contextlib.contextmanager
def _kernels_known() -> Iterator[None]:
    """Say that CUDA has kernels of its own for operators that torch otherwise takes apart.

    A build without CUDA knows of none, and where the host has a kernel and CUDA seems to have none, the formula in
    smaller operators is used: the backward pass of SiLU is such a one, with five temporaries instead of none.
    """
    import torch

    known: Any = torch._C._dispatch_get_registrations_for_dispatch_key
    taken_apart = set(known("CPU")) & set(known("CompositeImplicitAutograd")) - set(known("CUDA"))

    def never(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("a kernel of CUDA was asked for, where tensors have no data")

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for name in taken_apart:
            space, _, name = name.partition("::")
            if space == "aten":
                library.impl(name, never, "CUDA")  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _masks_of_transformers() -> Any:
    """Give the module of `transformers` that asks positions for several documents in a row; None without it.

    It asks where it has values, and takes any tensor without data for a trace, in which it makes a mask of T x T that
    the device never sees. A row is taken for one document.
    """
    if "transformers" not in sys.modules:
        return None
    try:
        module = importlib.import_module("transformers.masking_utils")
    except ImportError:
        return None
    return module if hasattr(module, "find_packed_sequence_indices") else None


def _changed(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack unwinds."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def _new_fake(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    stand, keys_of = device(), torch.device("cuda", 0)

    def new(cls: Any, fake_mode: Any, elem: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        where = torch.device(device)
        if where.type in ("cpu", "meta") and where != stand:
            return original(cls, fake_mode, elem, where, *args, **kwargs)
        made = original(cls, fake_mode, elem, keys_of, *args, **kwargs)
        made.fake_device = stand
        return made

    return new


@functools.cache
def _operators() -> Any:
    """Make the mode that puts CUDA's operators in, and knows ``"cuda"`` as the stand-in."""
    import torch
    from torch.overrides import TorchFunctionMode

    stand = device()
    replaced: dict[Any, Callable[..., Any]] = {
        torch.nn.functional.scaled_dot_product_attention: _attention,
        **{getattr(torch, name): choice for name, choice in _CHOICES.items()},
        torch.rms_norm: _rms_norm,
        torch.tensor: functools.partial(_from_values, torch.tensor),
        torch.as_tensor: functools.partial(_from_values, torch.as_tensor),
        torch.asarray: functools.partial(_from_values, torch.asarray),
        torch.Tensor.cuda: lambda x, *_, **__: x.to(stand),
        torch.Tensor.pin_memory: lambda x, *_, **__: x,
    }

    moves = {torch.Tensor.to, torch.Tensor.new_tensor}

    class Operators(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func in replaced:
                return replaced[func](*args, **kwargs)
            if "device" in kwargs:
                kwargs = {**kwargs, "device": _moved(kwargs["device"])}
            if func in moves:
                args = tuple(_moved(a) for a in args)
            return func(*args, **kwargs)

    return Operators


# ------------------------------------------------------------------------------------ operators as CUDA runs them


def _cast(dtype: Any, *tensors: Any) -> tuple[Any, ...]:
    return tuple(None if t is None else cast_to_lower(t, dtype) for t in tensors)


def _moved(value: Any) -> Any:
    """Put the stand-in where "cuda" is asked for."""
    import torch

    if isinstance(value, torch.device) and value.type == "cuda":
        return device()
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return device()
    return value


def _from_values(make: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a tensor of Python's values on the host, as CUDA does, and move it."""
    import torch

    where = _moved(kwargs.pop("device", None))
    if isinstance(data, torch.Tensor) and where is None:
        where = data.device
    made = make(data, *args, **kwargs)
    if where is None or torch.device(where) == made.device:
        return made
    learns = made.requires_grad
    if made.numel() == 0:  # moving nothing leaves it where it is
        return torch.empty(made.shape, dtype=made.dtype, device=where, requires_grad=learns)
    return made.detach().to(where).requires_grad_(learns)


def _rms_norm(input: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """Normalize in one kernel, which saves its input and one number a row, where the dtypes allow it."""
    import torch

    if _autocast_dtype() is not None:
        input, weight = (
            t.to(torch.float32) if t is not None and t.dtype != torch.float64 else t for t in (input, weight)
        )
    mixed = weight is not None and weight.dtype != input.dtype
    if mixed or input.is_complex() or _compiling():  # a compiler takes the norm apart
        return torch.ops.aten.rms_norm(input, shape, weight, eps)
    return _rms_norm_function().apply(input, weight, len(shape))


@functools.cache
def _rms_norm_function() -> Any:
    import torch

    class RmsNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, input, weight, dims):  # type: ignore[no-untyped-def]
            wide = torch.float64 if input.dtype == torch.float64 else torch.float32
            ctx.save_for_backward(input, weight, input.new_empty(input.shape[:-dims], dtype=wide))
            return torch.empty_like(input, memory_format=torch.contiguous_format)

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            input, weight, _ = ctx.saved_tensors
            needed = zip((input, weight), ctx.needs_input_grad, strict=False)
            return (*(torch.empty_like(t) if needs else None for t, needs in needed), None)

    return RmsNorm


def _compiling() -> bool:
    import torch

    return torch._guards.TracingContext.try_get() is not None


def _autocast_dtype() -> Any:
    import torch

    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def _dropout(input: Any, p: float, train: bool) -> Any:
    import torch

    if train and 0 < p < 1 and input.numel() > 0:
        return torch.ops.aten.native_dropout(input, p, train)[0]
    return torch.ops.aten.dropout(input, p, train)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Choose among the kernels as CUDA does on Ampere and later, and call the one chosen.

    cuDNN's, the flash and the memory-efficient kernel save the same: query, key, value, output and one fp32
    number a row. So the flash operator stands for cuDNN's, too; the efficient one serves fp32 and masks.
    """
    import torch

    aten = torch.ops.aten
    dtype = _autocast_dtype()
    if dtype is not None:
        query, key, value, attn_mask = _cast(dtype, query, key, value, attn_mask)
    half = query.dtype in (torch.float16, torch.bfloat16)
    width, width_v = query.shape[-1], value.shape[-1]
    dense = query.dim() == key.dim() == value.dim() == 4 and query.numel() > 0 and key.numel() > 0
    grouped = query.shape[-3] != key.shape[-3] if query.dim() > 2 else False
    train = any(t.requires_grad for t in (query, key, value)) and torch.is_grad_enabled()
    kernels: Any = torch.backends.cuda  # what torch.nn.attention.sdpa_kernel allows
    flash = kernels.flash_sdp_enabled() or kernels.cudnn_sdp_enabled()
    if flash and dense and half and attn_mask is None and width == width_v <= 256:
        if grouped and not enable_gqa:
            dense = False  # the plain formula raises, as it should
        else:
            if width % 8:  # the flash kernel pads the width
                pad = (0, 8 - width % 8)
                query, key, value = (torch.nn.functional.pad(t, pad) for t in (query, key, value))
            made = aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale or width**-0.5
            )
            return made[0][..., :width] if width % 8 else made[0]
    aligned = width % (8 if half else 4) == 0 and width_v % (8 if half else 4) == 0
    known = query.dtype in (torch.float16, torch.bfloat16, torch.float32)
    if attn_mask is not None and attn_mask.requires_grad and train:
        known = False  # a mask that learns, such as a position bias, goes through the plain formula
    if kernels.mem_efficient_sdp_enabled() and dense and not grouped and aligned and known:
        mask = _efficient_mask(attn_mask, query, key)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, train, dropout_p, is_causal, scale=scale
        )[0]
    masked = attn_mask is not None and attn_mask.is_floating_point() and not is_causal
    if masked and train and 0 < dropout_p < 1 and dense and not grouped and not _compiling():
        # The plain formula, with the dropout that CUDA has: its mask is of booleans, the host's of numbers.
        root = (scale or width**-0.5) ** 0.5
        scores = torch.matmul(query * root, key.transpose(-2, -1) * root)
        scores.add_(attn_mask)
        return torch.matmul(_dropout(torch.softmax(scores, -1), dropout_p, True), value)
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _efficient_mask(mask: Any, query: Any, key: Any) -> Any:
    """Make a mask additive, its rows start at multiples of 16 elements, and as large as the scores without copies."""
    import torch

    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    keys = key.shape[-2]
    if mask.shape[-1] % 16 and mask.shape[-1] == keys:
        mask = torch.nn.functional.pad(mask, (0, 16 - keys % 16))[..., :keys]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], keys)


# Numbers a step of time, a sample and a hidden unit that cuDNN keeps of each layer for the backward pass: the gates,
# and for the LSTM the cell. Between layers it keeps the lower one's output, too. The library tells the size only where
# it runs (``cudnnGetRNNTempSpaceSizes``): 5, 6 and 1 were read there, in fp32, fp16 and bf16 alike.
_RESERVE = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
RECURRENT_WORKSPACE_BYTES = 24 * 2**20
"""Room for each layer and direction in the workspace of a recurrent layer, of which cuDNN alone knows the size.

The workspace holds the input, the weights, and for a layer its output and the gates of all steps of time; beside them
is a part that does not grow with these, of 16 to 24 MiB where it was read (35 calls on an H200): 24 keeps on the safe
side of each.
"""


def _recurrent(kind: str, *args: Any, **kwargs: Any) -> Any:
    """Run all layers and all steps of time as one call that keeps a reserve, as cuDNN does."""
    if _compiling():
        raise NotImplementedError(
            f"torch.{kind} in a compiled model: torch.compile breaks its graph there, and what is kept between the "
            "pieces cannot be seen. Compile the other parts of the model, or calibrate: calibrate_step_memory"
        )
    if kwargs or len(args) != 9 or isinstance(args[3], (list, tuple)):
        raise NotImplementedError(
            f"torch.{kind} on a packed sequence: what cuDNN keeps for it cannot be traced"
        )
    x, hidden, weights, _, layers, _, train, both_ways, batch_first = args
    states = list(hidden) if kind == "lstm" else [hidden]
    dtype = _autocast_dtype()
    if dtype is not None:
        x, *states = _cast(dtype, x, *states)
        sizes = [w.numel() for w in weights]
        flat: Any = _flattened_function().apply(dtype, *weights)  # one buffer, saved by the graph
        weights = [part.view(w.shape) for part, w in zip(flat.split(sizes), weights, strict=True)]
    ways = 2 if both_ways else 1
    kept = (_RESERVE[kind] * layers + layers - 1) * ways if train else 0
    if batch_first:
        x = x.transpose(0, 1).contiguous()  # cuDNN takes time first, and copies
    numbers = (_GATES[kind] + 1) * x.shape[0] * x.shape[1] * states[0].shape[-1] * ways + x.numel()
    numbers += sum(w.numel() for w in weights)
    room = numbers + layers * ways * RECURRENT_WORKSPACE_BYTES // x.element_size()
    made = _recurrent_function().apply(x, len(states), ways, kept, room, *states, *weights)
    return (made[0].transpose(0, 1), *made[1:]) if batch_first else made


@functools.cache
def _flattened_function() -> Any:
    import torch

    class Flattened(torch.autograd.Function):
        """Weights side by side in another dtype, copied without a buffer between."""

        @staticmethod
        def forward(ctx, dtype, *weights):  # type: ignore[no-untyped-def]
            ctx.shapes = [(w.shape, w.dtype) for w in weights]
            return weights[0].new_empty(sum(w.numel() for w in weights), dtype=dtype)

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            parts = grad.split([shape.numel() for shape, _ in ctx.shapes])
            return None, *(
                part.view(shape).to(dtype) for part, (shape, dtype) in zip(parts, ctx.shapes, strict=True)
            )

    return Flattened


@functools.cache
def _recurrent_function() -> Any:
    import torch

    class Recurrent(torch.autograd.Function):
        @staticmethod
        def forward(  # type: ignore[no-untyped-def]
            ctx, x, count, ways, kept, room, *tensors
        ):
            states, weights = tensors[:count], tensors[count:]
            width = states[0].shape[-1]
            output = x.new_empty((*x.shape[:2], width * ways))
            final = tuple(torch.empty_like(s) for s in states)
            workspace = x.new_empty(room)
            reserve = x.new_empty(kept * x.shape[0] * x.shape[1] * width)
            ctx.save_for_backward(x, output, reserve, *states, *weights)
            ctx.count, ctx.room = count, room
            del workspace
            return (output, *final)

        @staticmethod
        def backward(ctx, grad, *grads):  # type: ignore[no-untyped-def]
            x, _, _, *tensors = ctx.saved_tensors
            states, weights = tensors[: ctx.count], tensors[ctx.count :]
            back = torch.empty_like(x) if ctx.needs_input_grad[0] else None
            begun = [torch.empty_like(s) for s in states]
            x.new_empty(
                ctx.room
            )  # the workspace of the data's gradients comes and goes, then that of the weights'
            flat = x.new_empty(sum(w.numel() for w in weights))  # all weights' gradients are written into one
            x.new_empty(ctx.room)
            parts = flat.split([w.numel() for w in weights])
            given = [part.view(w.shape) for part, w in zip(parts, weights, strict=True)]
            return (back, None, None, None, None, *begun, *given)

    return Recurrent


_CHOICES: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    **{kind: functools.partial(_recurrent, kind) for kind in _RESERVE},
}
