"""What kernels take and give back, held against what a device allocated (H200, torch 2.11)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpucourse.scratch import Card, reduction_bytes, scratch_bytes
from gpucourse.step_memory import StepMemory, predict_step_memory


def shape(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("rows", "columns", "measured"),
    [
        (4096, 4096, 134_217_728),
        (8192, 768, 50_331_648),
        (8192, 2304, 139_198_464),
        (8192, 3072, 138_412_032),
        (8192, 1536, 100_663_296),
        (8192, 2048, 134_217_728),
    ],
)
def test_a_bias_s_gradient_leaves_the_partial_sums_that_were_measured(
    rows: int, columns: int, measured: int
) -> None:
    for itemsize in (2, 4):  # sums of halves are kept in fp32
        assert reduction_bytes((rows, columns), (columns, 1), (0,), itemsize, Card()) == measured
    assert scratch_bytes("aten.sum", (shape(rows, columns), [0], True), Card()) == measured


def test_a_smaller_card_is_full_with_fewer_partial_sums() -> None:
    wide = ((8192, 3072), (3072, 1), (0,), 4)
    assert reduction_bytes(*wide, Card(multiprocessors=58, threads=1536)) < reduction_bytes(*wide, Card())


@pytest.mark.parametrize(
    ("size", "strides", "axes"),
    [
        ((64, 2304), (2304, 1), (0,)),  # few rows: no block needs another
        ((8192, 768), (768, 1), ()),  # nothing is summed
        ((8192, 1), (1, 1), (1,)),
        ((0, 5), (5, 1), (0,)),
    ],
)
def test_a_sum_that_is_not_split_leaves_nothing(size: Any, strides: Any, axes: Any) -> None:
    assert reduction_bytes(size, strides, axes, 4, Card()) == 0


def test_a_sum_along_memory_leaves_one_number_a_block() -> None:
    # All of 2^24 numbers into one: whole blocks work together, and no lane leaves its own.
    assert 0 < reduction_bytes((4096, 4096), (4096, 1), (0, 1), 4, Card()) < 100_000


def test_attention_in_fp32_writes_a_product_before_the_query_s_sums() -> None:
    q = shape(8, 12, 1024, 64)
    measured = [(25_165_824, 393_216), (393_216, 25_190_400)]
    assert (
        scratch_bytes("aten._scaled_dot_product_efficient_attention_backward", (q, q, q, q), Card())
        == measured
    )


def test_attention_in_16_bits_makes_the_product_inside_its_kernel() -> None:
    q = shape(8, 12, 1024, 64, dtype=torch.bfloat16)
    found = scratch_bytes("aten._scaled_dot_product_efficient_attention_backward", (q, q, q, q), Card())
    assert found == [(393_216, 25_190_400)]


@pytest.mark.parametrize(
    ("tokens", "words", "width", "pieces"),
    [((8, 1024), 50304, 768, 27_681_792), ((64, 256), 10_000, 512, 23_834_624)],
)
def test_an_embedding_s_gradient_leaves_room_for_the_most_pieces(
    tokens: tuple[int, int], words: int, width: int, pieces: int
) -> None:
    args = (shape(*tokens, width), shape(*tokens, dtype=torch.int64), words, -1, False)
    ((sort, found),) = scratch_bytes("aten.embedding_dense_backward", args, Card())  # type: ignore[misc, union-attr]
    assert found == pieces
    assert sort == 7 * 8 * tokens[0] * tokens[1]


def test_few_tokens_are_summed_without_a_sort() -> None:
    args = (shape(1024, 768), shape(1024, dtype=torch.int64), 1024, -1, False)
    assert scratch_bytes("aten.embedding_dense_backward", args, Card()) == 0


def convolve(layer: nn.Module, *size: int, dtype: torch.dtype = torch.float32, **options: Any) -> StepMemory:
    x = shape(*size, dtype=dtype).to(**options)
    return predict_step_memory(
        layer.to(dtype), x, loss=lambda model, x: model(x).float().sum(), optimizer=None, steps=1
    )


# (layer, input, bytes of one element, forward, and the larger of the two gradients), all in NCHW
MEASURED = [
    (nn.Conv2d(64, 64, 3, 1, 1, bias=False), (64, 64, 56, 56), 4, 102_908_051, 104_972_967),
    (nn.Conv2d(64, 64, 3, 1, 1, bias=False), (64, 64, 56, 56), 2, 51_454_099, 53_371_559),
    (nn.Conv2d(3, 64, 7, 2, 3, bias=False), (64, 3, 224, 224), 4, 244_093_712, 262_972_560),
    (nn.Conv2d(3, 64, 7, 2, 3, bias=False), (64, 3, 224, 224), 2, 154_190_864, 160_312_464),
    (nn.Conv2d(64, 128, 3, 2, 1, bias=False), (64, 64, 56, 56), 4, 51_675_152 + 25_690_112, 81_625_823),
    (nn.Conv2d(32, 32, 3, 1, 1, bias=False), (16, 32, 256, 256), 4, 268_472_467, 270_275_195),
    (nn.Conv2d(256, 1024, 1, bias=False), (64, 256, 14, 14), 4, 0, 67_108_864),
    (nn.Conv2d(256, 1024, 1, bias=False), (64, 256, 14, 14), 2, 0, 34_210_095),
    (nn.Conv2d(96, 96, 7, 1, 3, groups=96, bias=False), (64, 96, 56, 56), 4, 0, 0),
]


@pytest.mark.parametrize(("layer", "size", "itemsize", "forward", "backward"), MEASURED)
def test_a_convolution_takes_about_the_copies_that_were_measured(
    layer: nn.Conv2d, size: tuple[int, ...], itemsize: int, forward: int, backward: int
) -> None:
    dtype = torch.float32 if itemsize == 4 else torch.bfloat16
    x, weight = shape(*size, dtype=dtype), layer.weight.to(dtype)
    how = (list(layer.stride), list(layer.padding), list(layer.dilation), False, [0, 0], layer.groups)
    found = scratch_bytes("aten.convolution", (x, weight, None, *how), Card())
    assert found == pytest.approx(forward, rel=0.001)
    with torch.device("meta"):
        grad = torch.nn.functional.conv2d(
            x, weight.to("meta"), None, layer.stride, layer.padding, layer.dilation, layer.groups
        )
    both = scratch_bytes("aten.convolution_backward", (grad, x, weight, None, *how, [True] * 3), Card())
    # The weight's gradient takes partial sums on top: how many is cuDNN's choice, and a full card of them is counted.
    most = max(both if isinstance(both, tuple) else (both,))  # type: ignore[type-var]
    assert 0.94 * backward <= most <= 1.21 * backward  # type: ignore[operator]


@pytest.mark.parametrize(
    ("size", "out", "measured"),
    [
        ((64, 256, 14, 14), 1024, 67_108_864),  # a product for each of 64 images
        ((16, 32, 256, 256), 10, 177_214_647),  # ten rows do not lie at multiples of 16 B: copies
    ],
)
def test_a_filter_of_one_place_sums_its_gradient_over_images_where_rows_are_aligned(
    size: tuple[int, ...], out: int, measured: int
) -> None:
    x, weight, grad = shape(*size), shape(out, size[1], 1, 1), shape(size[0], out, *size[2:])
    how = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    both = scratch_bytes("aten.convolution_backward", (grad, x, weight, None, *how, [True] * 3), Card())
    assert isinstance(both, tuple)
    assert both[1] == pytest.approx(measured, rel=0.02)


def test_channels_that_lie_innermost_need_no_copies() -> None:
    layer = nn.Conv2d(64, 64, 3, 1, 1, bias=False)
    planes = convolve(layer, 64, 64, 56, 56)
    innermost = convolve(layer, 64, 64, 56, 56, memory_format=torch.channels_last)
    copies = 2 * 4 * 64 * 64 * 56 * 56 + 4 * layer.weight.numel()
    partial = 132 * 64 * 128 * 4  # a tile of the weight's gradient for each multiprocessor
    assert copies in planes.trace.sizes  # forward
    assert copies + partial in planes.trace.sizes  # the weight's gradient: the batch needs none
    assert copies not in innermost.trace.sizes
    assert partial in innermost.trace.sizes


def test_a_transposed_convolution_counts_the_size_that_it_makes() -> None:
    layer = nn.ConvTranspose2d(64, 32, 2, 2, bias=False)
    found = convolve(layer, 4, 64, 32, 32)
    copies = 4 * (4 * 64 * 32 * 32 + 4 * 32 * 64 * 64) + 4 * layer.weight.numel()
    assert copies in found.trace.sizes


def test_doubles_have_no_tensor_cores_to_copy_for() -> None:
    found = convolve(nn.Conv2d(64, 64, 3, bias=False), 4, 64, 32, 32, dtype=torch.float64)
    roles = dict(zip(found.trace.sizes, found.trace.roles, strict=True))
    assert 8 * (4 * 64 * (32 * 32 + 30 * 30)) + 8 * 64 * 64 * 9 not in roles
