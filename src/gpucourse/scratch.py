"""Memory that an operator takes and gives back while it runs on CUDA, beyond what it returns.

No operator says how much it is. Each rule here is read off the source that is named with it, or off the layout
that a kernel works in, and was held against every allocation of a device; what has no rule counts as nothing.

>>> scratch_bytes("aten.relu", (), Card())
0
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Card", "reduction_bytes", "scratch_bytes"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What of a GPU decides how much scratch memory its kernels take.

    Attributes
    ----------
    multiprocessors
        Of the card; an H200 has 132.
    threads
        The most that one of them holds: 2,048 on data-centre cards from Pascal to Hopper, 1,536 on compute
        capability 8.6 and 8.9, 1,024 on 7.5 (CUDA C++ Programming Guide, technical specifications).
    """

    multiprocessors: int = 132
    threads: int = 2048


Scratch = int | tuple[int, ...] | list[tuple[int, ...]]
"""Bytes that are taken and given back: at once; one number for each result; or together, one tuple after the other."""


def scratch_bytes(operator: str, args: tuple[Any, ...], card: Card) -> Scratch:
    """Count what an operator takes and gives back, in bytes.

    One number; a tuple with one for each result, where it works on one by one; or a list of tuples, where several
    blocks live together and others follow them.

    Parameters
    ----------
    operator
        Its name without the overload, such as "aten.sum".
    args
        What it is called with.
    card
        Where it runs.
    """
    rule = _RULES.get(operator)
    return 0 if rule is None else rule(args, card)


# ------------------------------------------------------------------------------------------------------ attention


def _flash_backward(args: tuple[Any, ...], _: Card) -> int:
    """Sum the query's gradient in fp32, rows padded to 128 and the width to 32, with one number a row.

    ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``.
    """
    batch, heads, rows, width = args[1].shape
    padded = -(-rows // 128) * 128
    return int(batch * heads * padded * (-(-width // 32) * 32 + 1) * 4)


def _efficient_backward(args: tuple[Any, ...], _: Card) -> Scratch:
    """Sum the query's gradient over blocks of keys, 64 rows and 64 columns at a time, each tile with its lock.

    Beside it one number a row, the sum of output times its gradient; in fp32 a product is written out for it first,
    in 16 bits the kernel makes it. ``workspace_size`` and ``kKernelComputesDelta`` in
    ``aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h``, ``attention_backward.cu``.
    """
    batch, heads, rows, width = args[1].shape
    delta = batch * heads * rows * 4
    tile = 16 + 64 * 64 * 4  # two integers, padded to 16 B, and the sums
    sums = batch * heads * -(-rows // 64) * -(-width // 64) * tile
    product = delta * args[3].shape[3]  # the output has the value's width
    whole = [(product, delta)] if args[1].element_size() == 4 else []
    return [*whole, (delta, sums)]


# ----------------------------------------------------------------------------------------------------- embeddings


def _embedding_backward(args: tuple[Any, ...], _: Card) -> Scratch:
    """Sort the tokens and sum the rows of each in pieces of ten, in fp32, where there are more than 3,072 tokens.

    How many pieces there are is not asked of the device, so there is room for the most. The sort has seven lists of
    64-bit numbers. ``embedding_backward_cuda_kernel`` in ``aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu``.
    """
    grad, tokens, words = args[:3]
    count = int(tokens.numel())
    if count <= 3072:
        return 0
    pieces = count // 10 + min(count, int(words))
    return [(7 * 8 * count, pieces * -(-int(grad.shape[-1]) // 32) * 32 * 4)]


# --------------------------------------------------------------------------------------------------- convolutions


def _channels_last(tensor: Any) -> bool:
    """Say whether the channels lie next to each other in memory."""
    return bool(tensor.dim() > 2 and tensor.stride(1) == 1 and tensor.shape[1] > 1)


def _copies(tensors: Sequence[Any]) -> int:
    """Count copies of tensors with the channels innermost, in halves padded to multiples of 8."""
    total = 0
    for tensor in tensors:
        channels = tensor.shape[1]
        if tensor.element_size() == 2:
            channels = -(-channels // 8) * 8
        total += tensor.numel() // tensor.shape[1] * channels * tensor.element_size()
    return total


def _goes_to_tensor_cores(x: Any, weight: Any, groups: int) -> bool:
    """Say whether cuDNN copies its inputs: its tensor-core kernels read channels innermost, and these lie otherwise.

    "cuDNN developer guide", tensor layouts and "NHWC is preferred". Depthwise convolutions have kernels of
    PyTorch's own; doubles have no such tensor cores; a first layer of few channels in fp32 has a direct kernel unless
    its filter is wide.
    """
    if groups != 1 or x.element_size() > 4 or _channels_last(x):
        return False
    return bool(x.element_size() == 2 or x.shape[1] >= 4 or weight.shape[-1] > 4)


def _convolution(args: tuple[Any, ...], _: Card) -> Scratch:
    x, weight, groups = args[0], args[1], args[8]
    if not _goes_to_tensor_cores(x, weight, groups):
        return 0
    if math.prod(weight.shape[2:]) == 1:
        return 0  # a matrix product over positions, for which no copy is needed
    return _copies((x, weight)) + _output_bytes(args)


def _output_bytes(args: tuple[Any, ...]) -> int:
    """Count the result of a convolution's forward pass in bytes."""
    x, weight, _, stride, padding, dilation, transposed, extra, groups = args[:9]
    places = 1
    for i, length in enumerate(x.shape[2:]):
        at = min(i, len(stride) - 1)
        reach = dilation[min(i, len(dilation) - 1)] * (weight.shape[2 + i] - 1)
        pad = padding[min(i, len(padding) - 1)]
        if transposed:
            places *= (length - 1) * stride[at] - 2 * pad + reach + extra[min(i, len(extra) - 1)] + 1
        else:
            places *= (length + 2 * pad - reach - 1) // stride[at] + 1
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return int(x.shape[0] * channels * places * x.element_size())


TILE = 128
"""Rows and columns of a weight's gradient that one multiprocessor sums, at most; CUTLASS's largest square tile."""


def _convolution_backward(args: tuple[Any, ...], card: Card) -> Scratch:
    """Copy for the gradient of the input as forward, and for the weight's whatever the size of the filter.

    The weight's gradient is small and its sums are long, so they are split until the card is full: each multiprocessor
    leaves the partial sums of its tile, in fp32. On an H200 that was measured as 0.35 to 2 times what is counted here.
    It is little, but the workspace is then larger than any block that the forward pass has left: a segment of its own.
    """
    grad, x, weight, groups = args[0], args[1], args[2], args[9]
    if groups != 1 or x.element_size() > 4:
        return 0
    rows, columns = weight.shape[0], weight.numel() // weight.shape[0]
    partial = card.multiprocessors * min(rows, TILE) * min(columns, TILE) * 4
    if _channels_last(x):
        return (0, partial)
    if not _goes_to_tensor_cores(x, weight, groups):
        return 0
    # Of a filter of one place, where rows lie at multiples of 16 B: a product for each image, and then their sum.
    aligned = all(n % 4 == 0 for n in (math.prod(x.shape[2:]), *weight.shape[:2]))
    if math.prod(weight.shape[2:]) == 1 and x.element_size() == 4 and max(args[4]) == 1 and aligned:
        return (0, int(x.shape[0]) * weight.numel() * 4)
    copies = _copies((grad, x, weight))
    return (copies if math.prod(weight.shape[2:]) > 1 else 0, copies + partial)


# ----------------------------------------------------------------------------------------------------- reductions


def _sum(args: tuple[Any, ...], card: Card) -> int:
    x = args[0]
    axes = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) and args[1] else range(x.dim())
    return reduction_bytes(x.shape, x.stride(), tuple(axes), x.element_size(), card)


def reduction_bytes(
    shape: Sequence[int], strides: Sequence[int], axes: Sequence[int], itemsize: int, card: Card
) -> int:
    """Count the partial sums that blocks of threads leave in global memory for one another.

    A sum with few results and many inputs to each, such as a bias's gradient, is split over blocks until the card is
    full. Each block leaves its partial sums, in fp32, and where the results lie next to each other every lane of it
    leaves its own: for 4,096 rows of 4,096 numbers they take twice the memory of the numbers themselves.
    ``setReduceConfig`` and ``ReduceConfig`` in ``aten/src/ATen/native/cuda/Reduce.cuh``.

    Parameters
    ----------
    shape, strides
        Of what is summed, in elements.
    axes
        That are summed over.
    itemsize
        Bytes of an element; sums of 2 and 4 bytes are kept in 4.
    card
        Whose multiprocessors are to be filled.

    Examples
    --------
    >>> reduction_bytes((4096, 4096), (4096, 1), (0,), 4, Card())
    134217728
    >>> reduction_bytes((8192, 2304), (2304, 1), (0,), 2, Card())
    139198464
    >>> reduction_bytes((64, 2304), (2304, 1), (0,), 4, Card())
    0
    """
    summed = {axis % len(shape) for axis in axes} if shape else set()
    kept = [i for i in range(len(shape)) if i not in summed and shape[i] > 1]
    reduced = [i for i in summed if shape[i] > 1]
    outputs = math.prod(shape[i] for i in kept)
    inputs = math.prod(shape[i] for i in reduced)
    if not reduced or not outputs:
        return 0
    inner = min(strides[i] for i in reduced)
    fastest = not kept or inner < min(strides[i] for i in kept)
    first, second = (inputs, outputs) if fastest else (outputs, inputs)
    vector = 1
    if not fastest and min(strides[i] for i in kept) == 1:
        row = shape[min(kept, key=lambda i: strides[i])]
        vector = next(n for n in (4, 2, 1) if row % n == 0 and all(strides[i] % n == 0 for i in reduced))
        first //= vector
    most = 512 // vector
    wide, high = (most if n >= most else 2 ** int(math.log2(max(n, 1))) for n in (first, second))
    height = min(high, most // min(wide, 32))
    width = min(wide, most // height)
    step_in, step_out = (width, 1) if fastest else (1, width)
    each = -(-inputs // step_in)
    across = each >= min(height * 16, 256)
    if across:
        step_in *= height
    else:
        step_out *= height
    each = -(-inputs // step_in)
    target = card.multiprocessors * (card.threads // (width * height))
    grid = -(-(outputs // vector) // step_out)
    if not across or each < 256 or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-each // 16)), -(-each // 256))
    if blocks == 1:
        return 0
    return max(itemsize, 4) * outputs * blocks * (1 if fastest else width * vector)


_RULES: dict[str, Callable[[tuple[Any, ...], Card], Scratch]] = {
    "aten._scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten._scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    "aten.sum": _sum,
    "aten.mean": _sum,
}
