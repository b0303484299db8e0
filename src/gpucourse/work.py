"""What an operation must do at the least: its arithmetic, and the bytes that it must move.

Each counter names its rule; `Work` keeps the rule's words. None of them needs torch or a GPU.

>>> elementwise_work(2**24, reads=(4, 4), writes=(4,), flops_per_element=1)
Work(flops=16777216, bytes=201326592, convention='each array read or written once; ...')
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = [
    "Step",
    "Work",
    "attention_work",
    "convolution_work",
    "elementwise_work",
    "layer_norm_backward_work",
    "layer_norm_steps",
    "layer_norm_work",
    "linear_backward_work",
    "matmul_work",
    "matrix_vector_work",
    "softmax_backward_work",
    "softmax_steps",
    "softmax_work",
]


def is_finite_number(value: Any) -> bool:
    """Whether a number is finite, integers beyond all floats included among those that are not."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def short(value: object) -> str:
    """Write a value for an error message, in at most 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        text = f"a {type(value).__name__} too long to write"
    return text if len(text) <= 60 else text[:57] + "..."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an operation must do at the least: arithmetic and bytes to and from device memory.

    Works add up (operations one after the other), and a whole number times a work is that many of it.

    Attributes
    ----------
    flops
        Floating-point operations; a multiply and an add are two.
    bytes
        Bytes read from plus bytes written to device memory.
    convention
        What was counted and what was left out, in words.

    Raises
    ------
    ValueError
        An amount is negative or not finite, or both are 0.

    Examples
    --------
    >>> Work(flops=2, bytes=8).intensity
    0.25
    >>> 3 * Work(flops=2, bytes=8) + Work(flops=1, bytes=0)
    Work(flops=7, bytes=24, convention='')
    """

    flops: float
    bytes: float
    convention: str = ""

    def __post_init__(self) -> None:
        for name in ("flops", "bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
                raise TypeError(f"Work: {name} must be a number, not {short(value)}")
            # Python's own numbers from here on: numpy's integers wrap round without an error.
            value = int(value) if isinstance(value, (int, np.integer)) else float(value)
            if not is_finite_number(value) or value < 0:
                raise ValueError(f"Work: {name} is {short(value)}; wanted a finite amount, 0 or more")
            object.__setattr__(self, name, value)
        if self.flops == 0 and self.bytes == 0:
            raise ValueError(
                "Work: neither arithmetic nor bytes; an operation that does nothing has no bound"
            )

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in flop/byte; infinite where no byte moves."""
        return self.flops / self.bytes if self.bytes else math.inf

    def __add__(self, other: Work) -> Work:
        if not isinstance(other, Work):
            return NotImplemented
        both = (
            [self.convention] if other.convention == self.convention else [self.convention, other.convention]
        )
        return Work(
            flops=self.flops + other.flops,
            bytes=self.bytes + other.bytes,
            convention="; ".join(text for text in both if text),
        )

    def __rmul__(self, times: int) -> Work:
        if isinstance(times, bool) or not isinstance(times, int):
            return NotImplemented
        try:
            flops, moved = times * self.flops, times * self.bytes
        except OverflowError:  # an integer beyond all floats, times one of them
            raise ValueError(f"{short(times)} times this work is beyond all floats") from None
        return Work(flops=flops, bytes=moved, convention=self.convention)

    __mul__ = __rmul__

    def as_dict(self) -> dict[str, float | str]:
        """Plain data, for a recording."""
        return {"flops": self.flops, "bytes": self.bytes, "convention": self.convention}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One kernel of a chain: what it reads, what it writes.

    Attributes
    ----------
    name
        What the kernel computes.
    reads_bytes
        Bytes that it must read.
    writes_bytes
        Bytes that it must write.
    flops
        Its arithmetic.
    """

    name: str
    reads_bytes: int
    writes_bytes: int
    flops: int

    @property
    def work(self) -> Work:
        """Arithmetic and bytes of this kernel alone."""
        return Work(flops=self.flops, bytes=self.reads_bytes + self.writes_bytes, convention=_ELEMENTWISE)


_ELEMENTWISE = "each array read or written once; add, multiply, divide, compare, exp and root count one each"
_PRODUCT = "multiply and add count two; each matrix moved once"
_ATTENTION = (
    "two products over {}, softmax not counted; queries, keys, values and output moved once, scores never"
)
_CONVOLUTION = "multiply and add count two, padding included; image, weights and result moved once"


def _sizes(**values: int) -> list[int]:
    """Check sizes and give them as Python's integers: numpy's wrap round at 2**31 or 2**63 without an error."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} must be a whole number, not {short(value)}")
        if value < 1:
            raise ValueError(f"{name} is {short(value)}; wanted 1 or more")
    return [int(value) for value in values.values()]


def _operands(name: str, values: Sequence[int]) -> list[int]:
    if isinstance(values, str) or not isinstance(values, (Sequence, np.ndarray)):
        raise TypeError(
            f"{name} must list the bytes an element of each operand, such as (4, 4), not {short(values)}"
        )
    return _sizes(**{f"{name}[{i}]": size for i, size in enumerate(values)})


def _extents(name: str, values: Sequence[int]) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, (Sequence, np.ndarray)):
        raise TypeError(f"{name} must list an extent a dimension, such as (56, 56), not {short(values)}")
    return tuple(_sizes(**{f"{name}[{i}]": size for i, size in enumerate(values)}))


def matmul_work(m: int, n: int, k: int, itemsize: int, *, out_itemsize: int | None = None) -> Work:
    """Work of an (m, k) by (k, n) matrix product.

    Counting rule: each of the m·n results takes k multiplies and k adds, so 2·m·n·k; each input matrix is
    read once and the result written once. Tiles read again because a multiprocessor cannot hold the whole
    matrix are not counted: a real product moves at least this much.

    Parameters
    ----------
    m, n, k
        Rows of the result, columns of the result, and the length that is summed over.
    itemsize
        Bytes an element of the inputs.
    out_itemsize
        Bytes an element of the result; `itemsize` by default.

    Raises
    ------
    TypeError, ValueError
        A size is not a whole number or is below 1.

    Examples
    --------
    >>> work = matmul_work(4096, 4096, 4096, 2)
    >>> work.flops, work.bytes, round(work.intensity, 1)
    (137438953472, 100663296, 1365.3)
    """
    out = itemsize if out_itemsize is None else out_itemsize
    m, n, k, itemsize, out = _sizes(m=m, n=n, k=k, itemsize=itemsize, out_itemsize=out)
    return Work(flops=2 * m * n * k, bytes=(m * k + k * n) * itemsize + m * n * out, convention=_PRODUCT)


def linear_backward_work(tokens: int, inputs: int, outputs: int, itemsize: int) -> Work:
    """Work of the backward pass of Y = X W: dX = dY Wᵀ and dW = Xᵀ dY.

    Counting rule: two products with the arithmetic of the forward pass each; each product reads its two
    matrices and writes its result once (dY is read by both).

    Parameters
    ----------
    tokens, inputs, outputs
        X is (tokens, inputs), W is (inputs, outputs), dY is (tokens, outputs).
    itemsize
        Bytes an element.

    Raises
    ------
    TypeError, ValueError
        A size is not a whole number or is below 1.

    Examples
    --------
    >>> forward = matmul_work(16384, 3072, 768, 2)
    >>> linear_backward_work(16384, 768, 3072, 2).flops / forward.flops
    2.0
    """
    d_input = matmul_work(tokens, inputs, outputs, itemsize)
    d_weight = matmul_work(inputs, outputs, tokens, itemsize)
    return d_input + d_weight


def matrix_vector_work(rows: int, columns: int, itemsize: int, *, out_itemsize: int | None = None) -> Work:
    """Work of a (rows, columns) matrix times a vector.

    Counting rule: that of `matmul_work` with one column, 2·rows·columns; matrix and vector are read once and
    the result written once. For every element of the matrix there are two operations, so the intensity stays
    below 2 / itemsize, whatever the shape.

    torch's `FlopCounterMode` (2.11 and 2.13) counts 0 for it, and the same product with the vector as a
    matrix of one column in full.

    Parameters
    ----------
    rows, columns
        Of the matrix; the vector has `columns` elements and the result `rows`.
    itemsize
        Bytes an element of matrix and vector.
    out_itemsize
        Bytes an element of the result; `itemsize` by default.

    Raises
    ------
    TypeError, ValueError
        A size is not a whole number or is below 1.

    Examples
    --------
    >>> work = matrix_vector_work(8192, 8192, 2)
    >>> work.flops, work.bytes, round(work.intensity, 3)
    (134217728, 134250496, 1.0)
    """
    _sizes(rows=rows, columns=columns)
    return matmul_work(rows, 1, columns, itemsize, out_itemsize=out_itemsize)


def attention_work(
    batch: int,
    heads: int,
    queries: int,
    head_dim: int,
    itemsize: int,
    *,
    keys: int | None = None,
    kv_heads: int | None = None,
    causal: bool = False,
) -> Work:
    """Work of scaled dot-product attention, forward, in one fused kernel.

    Counting rule: the two products, queries with keys and weights with values, take 2·head_dim operations
    each for every pair of a query and a key. Without `causal` that is every pair. With it, only the pairs
    that the mask leaves: query i (from 0) sees keys 0 to i, aligned at the first key as
    ``is_causal=True`` of torch aligns it, so n queries on n keys have n·(n + 1) / 2 pairs. The softmax (some
    five operations a pair, on other units) is not counted. Queries, keys, values and output travel once;
    the scores never leave the chip, nor are the row statistics that a training step keeps counted.

    Conventions differ: torch's `FlopCounterMode` counts every pair, causal or not (on the CPU its fused
    kernels count 0), the FlashAttention authors half of them where causal. A kernel that masks after having
    computed whole tiles does more than is counted here; what it does in excess is not work.

    Parameters
    ----------
    batch, heads, queries, head_dim
        The queries and the output are (batch, heads, queries, head_dim).
    itemsize
        Bytes an element, of all four arrays.
    keys
        Number of keys and of values; as many as queries by default.
    kv_heads
        Heads of keys and values, where several heads of queries share one; `heads` by default.
    causal
        Whether a query sees only the keys up to its own place.

    Raises
    ------
    TypeError, ValueError
        A size is not a whole number or is below 1, or `heads` is no multiple of `kv_heads`.

    Examples
    --------
    >>> attention_work(16, 12, 1024, 64, 2).intensity
    512.0
    >>> attention_work(16, 12, 1024, 64, 2, causal=True).intensity
    256.25
    """
    keys = queries if keys is None else keys
    kv_heads = heads if kv_heads is None else kv_heads
    batch, heads, queries, head_dim, itemsize = _sizes(
        batch=batch, heads=heads, queries=queries, head_dim=head_dim, itemsize=itemsize
    )
    keys, kv_heads = _sizes(keys=keys, kv_heads=kv_heads)
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"causal must be True or False, not {short(causal)}")
    if heads % kv_heads:
        raise ValueError(
            f"heads is {heads}, no multiple of kv_heads = {kv_heads}; each head of keys serves equally many"
        )
    pairs = queries * keys
    if causal:
        seen = min(queries, keys)  # from there on a query sees all keys
        pairs = seen * (seen + 1) // 2 + (queries - seen) * keys
    moved = 2 * batch * head_dim * itemsize * (heads * queries + kv_heads * keys)
    which = "the pairs that the causal mask leaves" if causal else "all pairs"
    return Work(flops=4 * batch * heads * pairs * head_dim, bytes=moved, convention=_ATTENTION.format(which))


def convolution_work(
    batch: int,
    in_channels: int,
    out_channels: int,
    image: Sequence[int],
    kernel: Sequence[int],
    itemsize: int,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    out_itemsize: int | None = None,
) -> Work:
    """Work of a convolution, forward, computed directly.

    Counting rule: each element of the result sums over in_channels / groups channels and the kernel's extent,
    a multiply and an add each; the ones that meet padding are counted, as torch counts them, and a bias is
    not. Image and weights are read once, the result is written once. An algorithm that trades arithmetic
    (Winograd, FFT) or copies patches (im2col) does another amount.

    torch's `FlopCounterMode` agrees on this forward pass, groups included. Its count of a grouped
    convolution's backward pass is several times too high; none is given here.

    Parameters
    ----------
    batch, in_channels, out_channels
        The image is (batch, in_channels, *image), the result (batch, out_channels, …).
    image, kernel
        Extents, one a dimension: ``(224, 224)`` and ``(3, 3)``.
    itemsize
        Bytes an element of image and weights.
    stride, padding, dilation
        The same in every dimension; padding on both sides.
    groups
        Groups of channels that do not see each other; as many as channels is a depthwise convolution.
    out_itemsize
        Bytes an element of the result; `itemsize` by default.

    Raises
    ------
    TypeError, ValueError
        A size is not a whole number or is below 1 (`padding`: below 0), image and kernel differ in their
        number of dimensions, the channels do not divide into groups, or the kernel is larger than the image.

    Examples
    --------
    >>> plain = convolution_work(32, 256, 256, (56, 56), (3, 3), 2, padding=1)
    >>> depthwise = convolution_work(32, 256, 256, (56, 56), (3, 3), 2, padding=1, groups=256)
    >>> plain.flops // depthwise.flops, round(plain.intensity), round(depthwise.intensity, 2)
    (256, 1139, 4.5)
    """
    out = itemsize if out_itemsize is None else out_itemsize
    batch, in_channels, out_channels, groups = _sizes(
        batch=batch, in_channels=in_channels, out_channels=out_channels, groups=groups
    )
    itemsize, out, stride, dilation = _sizes(
        itemsize=itemsize, out_itemsize=out, stride=stride, dilation=dilation
    )
    image, kernel = _extents("image", image), _extents("kernel", kernel)
    if isinstance(padding, bool) or not isinstance(padding, (int, np.integer)):
        raise TypeError(f"padding must be a whole number, not {short(padding)}")
    if padding < 0:
        raise ValueError(f"padding is {padding}; wanted 0 or more")
    padding = int(padding)
    if not image or len(image) != len(kernel):
        raise ValueError(f"image {image} and kernel {kernel} must have equally many dimensions, 1 or more")
    for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
        if channels % groups:
            raise ValueError(f"{name} is {channels}, which does not divide into {groups} groups")
    extents = [
        (size + 2 * padding - dilation * (width - 1) - 1) // stride + 1
        for size, width in zip(image, kernel, strict=True)
    ]
    if min(extents) < 1:
        raise ValueError(
            f"kernel {kernel} with dilation {dilation} does not fit in image {image} with padding {padding}"
        )
    results, weights = batch * out_channels * math.prod(extents), in_channels // groups * math.prod(kernel)
    moved = (batch * in_channels * math.prod(image) + out_channels * weights) * itemsize + results * out
    return Work(flops=2 * results * weights, bytes=moved, convention=_CONVOLUTION)


def elementwise_work(
    n: int, *, reads: Sequence[int], writes: Sequence[int], flops_per_element: int = 1
) -> Work:
    """Work of an operation that treats n elements one by one.

    Counting rule: each operand is read once, each result written once; a broadcast operand should not be
    listed among `reads`, since it is far smaller than n elements.

    Parameters
    ----------
    n
        Elements.
    reads, writes
        Bytes an element of each operand and of each result: ``reads=(4, 4), writes=(4,)`` for x + y in fp32.
    flops_per_element
        Operations an element; 0 for a copy or a cast.

    Raises
    ------
    TypeError, ValueError
        A size is not a whole number or is below 1, or nothing is read or written.

    Examples
    --------
    >>> elementwise_work(2**20, reads=(4, 4), writes=(4,)).bytes
    12582912
    """
    (n,) = _sizes(n=n)
    moved = sum(_operands("reads", reads)) + sum(_operands("writes", writes))
    if not moved:
        raise ValueError("reads and writes are both empty; an operation on memory reads or writes something")
    if isinstance(flops_per_element, bool) or not isinstance(
        flops_per_element, (int, float, np.integer, np.floating)
    ):
        raise TypeError(f"flops_per_element must be a number, not {short(flops_per_element)}")
    if not is_finite_number(flops_per_element) or flops_per_element < 0:
        raise ValueError(
            f"flops_per_element is {short(flops_per_element)}; wanted a finite amount, 0 for a copy or a cast"
        )
    if isinstance(flops_per_element, np.integer):
        flops_per_element = int(flops_per_element)
    return Work(flops=n * flops_per_element, bytes=n * moved, convention=_ELEMENTWISE)


def layer_norm_work(
    rows: int, columns: int, itemsize: int, *, param_itemsize: int | None = None, stats: bool = False
) -> Work:
    """Work of layer normalization in one fused kernel.

    Counting rule: x read once, y written once, scale and shift (`columns` elements each) read once; with
    `stats` the mean and the inverse deviation of each row (fp32), which a training step keeps, written once.
    Seven operations an element (two sums, subtract, square, three to apply), four a row.

    Parameters
    ----------
    rows, columns
        x is (rows, columns); each row is normalized.
    itemsize
        Bytes an element of x and y.
    param_itemsize
        Bytes an element of scale and shift; `itemsize` by default.
    stats
        Whether the two numbers a row are written out for the backward pass.

    Raises
    ------
    TypeError, ValueError
        A size is not a whole number or is below 1.

    Examples
    --------
    >>> layer_norm_work(32768, 768, 4).bytes
    201332736
    """
    param = itemsize if param_itemsize is None else param_itemsize
    rows, columns, itemsize, param = _sizes(
        rows=rows, columns=columns, itemsize=itemsize, param_itemsize=param
    )
    moved = 2 * rows * columns * itemsize + 2 * columns * param + (8 * rows if stats else 0)
    return Work(flops=rows * (7 * columns + 4), bytes=moved, convention=_ELEMENTWISE)


def layer_norm_steps(rows: int, columns: int, itemsize: int) -> tuple[Step, ...]:
    """Layer normalization as nine kernels, one an expression, as unfused torch runs it.

    Counting rule: a kernel reads each of its operands once and writes its result once, vectors of one
    number a row (mean, variance, inverse deviation) and one a column (scale, shift) included.

    Parameters
    ----------
    rows, columns
        x is (rows, columns).
    itemsize
        Bytes an element, of every array.

    Raises
    ------
    TypeError, ValueError
        A size is not a whole number or is below 1.

    Examples
    --------
    >>> sum(s.reads_bytes + s.writes_bytes for s in layer_norm_steps(1000, 100, 4)) / (1000 * 100 * 4)
    12.082
    """
    rows, columns, itemsize = _sizes(rows=rows, columns=columns, itemsize=itemsize)
    x, row, column = rows * columns * itemsize, rows * itemsize, columns * itemsize
    n = rows * columns

    def step(name: str, reads: int, writes: int, flops: int) -> Step:
        return Step(name=name, reads_bytes=reads, writes_bytes=writes, flops=flops)

    return (
        step("mean of x", x, row, n),
        step("d = x − mean", x + row, x, n),
        step("s = d · d", x, x, n),
        step("mean of s", x, row, n),
        step("v = mean of s + ε", row, row, rows),
        step("r = 1 / √v", row, row, rows),
        step("h = d · r", x + row, x, n),
        step("g = h · scale", x + column, x, n),
        step("y = g + shift", x + column, x, n),
    )


def layer_norm_backward_work(rows: int, columns: int, itemsize: int) -> Work:
    """Work of the backward pass of layer normalization, fused as far as it can be.

    Counting rule: dy and x read once, mean and inverse deviation (fp32) and scale read, dx written, the
    gradients of scale and shift written. Fourteen operations an element. Real implementations read dy and x
    twice, once for dx and once for the two column sums.

    Parameters
    ----------
    rows, columns
        x is (rows, columns).
    itemsize
        Bytes an element.

    Raises
    ------
    TypeError, ValueError
        A size is not a whole number or is below 1.

    Examples
    --------
    >>> layer_norm_backward_work(32768, 768, 4).bytes / layer_norm_work(32768, 768, 4).bytes
    1.501...
    """
    rows, columns, itemsize = _sizes(rows=rows, columns=columns, itemsize=itemsize)
    moved = 3 * rows * columns * itemsize + 8 * rows + 3 * columns * itemsize
    return Work(flops=14 * rows * columns, bytes=moved, convention=_ELEMENTWISE)


def softmax_work(rows: int, columns: int, itemsize: int, *, out_itemsize: int | None = None) -> Work:
    """Work of a softmax over each row in one fused kernel.

    Counting rule: x read once, y written once. Five operations an element: maximum, subtract, exp, sum and
    divide.

    Parameters
    ----------
    rows, columns
        x is (rows, columns).
    itemsize
        Bytes an element of x.
    out_itemsize
        Bytes an element of y; `itemsize` by default.

    Raises
    ------
    TypeError, ValueError
        A size is not a whole number or is below 1.

    Examples
    --------
    >>> softmax_work(1024, 1024, 4).intensity
    0.625
    """
    out = itemsize if out_itemsize is None else out_itemsize
    rows, columns, itemsize, out = _sizes(rows=rows, columns=columns, itemsize=itemsize, out_itemsize=out)
    n = rows * columns
    return Work(flops=5 * n, bytes=n * (itemsize + out), convention=_ELEMENTWISE)


def softmax_steps(rows: int, columns: int, itemsize: int) -> tuple[Step, ...]:
    """Softmax as five kernels, one an expression, as unfused torch runs it.

    Counting rule: as in `layer_norm_steps`.

    Parameters
    ----------
    rows, columns
        x is (rows, columns).
    itemsize
        Bytes an element, of every array.

    Raises
    ------
    TypeError, ValueError
        A size is not a whole number or is below 1.

    Examples
    --------
    >>> sum(s.reads_bytes + s.writes_bytes for s in softmax_steps(1000, 100, 4)) / (1000 * 100 * 4)
    8.04
    """
    rows, columns, itemsize = _sizes(rows=rows, columns=columns, itemsize=itemsize)
    x, row, n = rows * columns * itemsize, rows * itemsize, rows * columns
    return (
        Step(name="maximum of x", reads_bytes=x, writes_bytes=row, flops=n),
        Step(name="d = x − maximum", reads_bytes=x + row, writes_bytes=x, flops=n),
        Step(name="e = exp(d)", reads_bytes=x, writes_bytes=x, flops=n),
        Step(name="sum of e", reads_bytes=x, writes_bytes=row, flops=n),
        Step(name="y = e / sum", reads_bytes=x + row, writes_bytes=x, flops=n),
    )


def softmax_backward_work(rows: int, columns: int, itemsize: int) -> Work:
    """Work of the backward pass of softmax, dx = y · (dy − Σ y·dy), in one fused kernel.

    Counting rule: y and dy read once, dx written once; four operations an element.

    Parameters
    ----------
    rows, columns
        x is (rows, columns).
    itemsize
        Bytes an element.

    Raises
    ------
    TypeError, ValueError
        A size is not a whole number or is below 1.

    Examples
    --------
    >>> softmax_backward_work(8, 8, 4).bytes / softmax_work(8, 8, 4).bytes
    1.5
    """
    rows, columns, itemsize = _sizes(rows=rows, columns=columns, itemsize=itemsize)
    n = rows * columns
    return Work(flops=4 * n, bytes=3 * n * itemsize, convention=_ELEMENTWISE)
