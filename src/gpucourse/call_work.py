"""The work of one traced call, read off its name, shapes and types: or why it cannot be read.

A profiler's record of a call has the shapes and types of the tensors that went in, and seldom more: no stride of
a convolution, no causal flag, no shape of what came out. Where these suffice, the count says by which convention;
where they do not, there is no count, and never a 0.

>>> work_of_call("aten::mm", [(16384, 768), (768, 3072)], ["bfloat16", "bfloat16"]).flops
77309411328
>>> work_of_call("aten::conv2d", [(32, 3, 224, 224), (64, 3, 7, 7)], ["float32"] * 2)
Missing(op='aten::conv2d', reason='stride and padding of a convolution are not in a trace; convolution_work ...')
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gpucourse.trace_facts import ITEM_BYTES, torch_name
from gpucourse.work import (
    Work,
    attention_work,
    layer_norm_backward_work,
    layer_norm_work,
    matmul_work,
    short,
    softmax_backward_work,
    softmax_work,
)

__all__ = ["Family", "Missing", "family_of", "generated_arguments", "work_of_call"]

Family: TypeAlias = Literal[
    "product",
    "attention",
    "normalization",
    "softmax and loss",
    "element-wise",
    "copy or fill",
    "reduction",
    "embedding",
    "optimizer",
    "generated",
    "other",
]
Shape: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Missing:
    """No count, and why: false where a `Work` is true, so that ``if work:`` tells them apart.

    Attributes
    ----------
    op
        The operation.
    reason
        What a count would need and the trace does not have.
    """

    op: str
    reason: str

    def __bool__(self) -> bool:
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    shape: Shape
    itemsize: int

    @property
    def n(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.n * self.itemsize


class _NoCountError(Exception):
    """Why there is no count; becomes a `Missing`."""


# Names as torch writes them and as the profiler does.


def work_of_call(
    op: str,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[str],
    *,
    causal: bool = False,
    list_elements: int | None = None,
    arguments: Sequence[str] | None = None,
) -> Work | Missing:
    """Count one call's arithmetic and least traffic from what a trace says of it.

    Parameters
    ----------
    op
        The innermost operation around the launch, as the profiler names it: "aten::mm", "triton_poi_…".
    shapes
        Shapes of its tensors in the order of its arguments; those of a list of tensors one after the other.
    dtypes
        Their types, one each: "float32", "bfloat16", "int64", or the profiler's "float", "c10::BFloat16".
    causal
        Whether attention is causal. No trace of `gpucourse.kernels` says so, and it halves the work: pass
        what the code says; all pairs by default.
    list_elements
        Elements of one list of tensors, for calls on lists whose shapes are not in the trace: the profiler
        leaves out those of lists of more than 30. For an optimizer it is the number of parameters.
    arguments
        Names of a generated kernel's arguments (`generated_arguments`): without them one that is both read
        and written counts once.

    Returns
    -------
    Work or Missing
        The convention of the count stands in ``Work.convention``. Common to all: inputs read once and results
        written once, whatever the caches served; a broadcast operand at its own size; a result's shape
        follows from the inputs.

    Raises
    ------
    TypeError
        `op` is no text, shapes are no lists of whole numbers, or `list_elements` is no whole number.
    ValueError
        A length, or `list_elements`, is negative.

    Examples
    --------
    >>> work_of_call("aten::add", [(8, 1024), (1024,)], ["float32", "float32"]).bytes
    69632
    >>> work_of_call("aten::special_thing", [(8,)], ["float32"]).reason
    'no counting rule for special_thing'
    """
    if not isinstance(op, str):
        raise TypeError(f"op is the name of an operation, such as 'aten::mm', not {short(op)}")
    shapes = _whole_shapes(shapes)
    if list_elements is not None:
        list_elements = _whole(list_elements, "list_elements")
    if isinstance(dtypes, str) or not isinstance(dtypes, Sequence):
        raise TypeError(f"dtypes are a list of names, one a shape, not {short(dtypes)}")
    if not op:
        return Missing(op, "no operation of torch encloses the launch")
    name = _base(op)
    try:
        if name in _LISTS or name.startswith("_foreach_") or name in _FUSED:
            return _of_lists(name, _tensors(shapes, dtypes), list_elements)
        tensors = _tensors(shapes, dtypes)
        if op.startswith("triton_"):
            return _generated(op, tensors, arguments)
        rule = _RULES.get(name)
        if rule is not None:
            return rule(tensors, causal) if rule in _ATTENTIONS else rule(tensors)
        return _element_wise(name, tensors)
    except _NoCountError as error:
        return Missing(op, str(error))
    except (ValueError, TypeError, IndexError, StopIteration, ArithmeticError) as error:
        # The tensors are not those that the rule expects: another overload, a record cut short, a length of 0.
        found = ", ".join(str(list(shape)) for shape in shapes) or "none"
        why = "one is empty" if any(0 in shape for shape in shapes) else error
        return Missing(op, f"the shapes {found} are not those of {name} ({why})")


def _base(op: str) -> str:
    return op.rsplit("::", 1)[-1]


def _tensors(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> list[_Tensor]:
    if len(shapes) != len(dtypes):
        raise _NoCountError(
            f"the trace gives {len(dtypes)} types for {len(shapes)} shapes: it was made by an older version"
        )
    found = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        itemsize = ITEM_BYTES.get(torch_name(str(dtype).removeprefix("torch.")))
        if itemsize is None:
            raise _NoCountError(f"the type {dtype!r} of an argument has no known size")
        found.append(_Tensor(tuple(shape), itemsize))
    return found


def _whole_shapes(shapes: object) -> list[Shape]:
    """Read the shapes: half an element, or fewer than none, would be counted without an error."""
    if isinstance(shapes, str) or not isinstance(shapes, Sequence):
        raise TypeError(f"shapes are a list, one a tensor, not {short(shapes)}")
    for shape in shapes:
        if isinstance(shape, str) or not isinstance(shape, Sequence):
            raise TypeError(f"a shape is a list of whole numbers, not {short(shape)}")
    return [
        tuple(_whole(size, f"a length in the shape {short(shape)}") for size in shape) for shape in shapes
    ]


def _whole(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{what} is a whole number, not {short(value)}")
    if value < 0:
        raise ValueError(f"{what} is {short(value)}; wanted 0 or more")
    return int(value)


def _work(flops: float, moved: float, convention: str) -> Work:
    if not flops and not moved:
        raise _NoCountError("its tensors are empty")
    return Work(flops=flops, bytes=moved, convention=convention)


# --- products ------------------------------------------------------------------------------------------------


def _product(a: _Tensor, b: _Tensor, batch: int = 1, out: _Tensor | None = None) -> Work:
    """Count (…, m, k) by (…, k, n)."""
    (m, k), (inner, n) = a.shape[-2:], b.shape[-2:]
    if k != inner:
        raise ValueError(f"{k} columns meet {inner} rows")
    one = matmul_work(m, n, k, a.itemsize, out_itemsize=out.itemsize if out else None)
    return batch * one


def _plus(work: Work, added: _Tensor) -> Work:
    return Work(
        flops=work.flops,
        bytes=work.bytes + added.bytes,
        convention=f"{work.convention}; what is added is read once, the additions are not counted",
    )


def _mm(tensors: list[_Tensor]) -> Work:
    a, b, *out = tensors
    return _product(a, b, out=out[0] if out else None)


def _addmm(tensors: list[_Tensor]) -> Work:
    added, a, b, *_ = tensors
    return _plus(_product(a, b), added)


def _bmm(tensors: list[_Tensor]) -> Work:
    a, b, *_ = tensors
    return _product(a, b, batch=a.shape[0])


def _baddbmm(tensors: list[_Tensor]) -> Work:
    added, a, b, *_ = tensors
    return _plus(_product(a, b, batch=a.shape[0]), added)


def _linear(tensors: list[_Tensor]) -> Work:
    x, weight, *bias = tensors
    (n, k), rows = weight.shape, x.n // x.shape[-1]
    work = _product(_Tensor((rows, x.shape[-1]), x.itemsize), _Tensor((k, n), weight.itemsize))
    return _plus(work, bias[0]) if bias else work


def _mv(tensors: list[_Tensor]) -> Work:
    a, x, *_ = tensors
    return _product(a, _Tensor((x.n, 1), x.itemsize))


def _addmv(tensors: list[_Tensor]) -> Work:
    added, a, x, *_ = tensors
    return _plus(_mv([a, x]), added)


def _dot(tensors: list[_Tensor]) -> Work:
    a, b, *_ = tensors
    return _work(
        2 * a.n, a.bytes + b.bytes + a.itemsize, "multiply and add count two; both vectors read once"
    )


# --- attention -------------------------------------------------------------------------------------------


def _attention(q: _Tensor, k: _Tensor, causal: bool, heads_at: int, products: int, arrays: str) -> Work:
    tokens_at = 3 - heads_at
    forward = attention_work(
        q.shape[0],
        q.shape[heads_at],
        q.shape[tokens_at],
        q.shape[3],
        q.itemsize,
        keys=k.shape[tokens_at],
        kv_heads=k.shape[heads_at],
        causal=causal,
    )
    if products == 2:
        return forward
    which = "the pairs that the causal mask leaves" if causal else "all pairs"
    return Work(
        flops=forward.flops * products / 2,
        bytes=2 * forward.bytes,  # q, k, v, output and its gradient read, three gradients written
        convention=f"{products} products over {which}, one of them the scores once more; {arrays}",
    )


_EIGHT = "q, k, v, output and four gradients moved once"


def _heads_second(tensors: list[_Tensor], causal: bool) -> Work:
    """Count a forward call on (B, H, T, D)."""
    return _attention(tensors[0], tensors[1], causal, 1, 2, "")


def _heads_third(tensors: list[_Tensor], causal: bool) -> Work:
    """Count a forward call on (B, T, H, D), as the inner operations have it."""
    return _attention(tensors[0], tensors[1], causal, 2, 2, "")


def _heads_second_back(tensors: list[_Tensor], causal: bool) -> Work:
    return _attention(tensors[1], tensors[2], causal, 1, 5, _EIGHT)


def _heads_third_back(tensors: list[_Tensor], causal: bool) -> Work:
    return _attention(tensors[1], tensors[2], causal, 2, 5, _EIGHT)


# --- convolution -------------------------------------------------------------------------------------------


def _convolution(tensors: list[_Tensor]) -> Work:
    raise _NoCountError(
        "stride and padding of a convolution are not in a trace; convolution_work counts it from them"
    )


def _convolution_backward(tensors: list[_Tensor]) -> Work:
    grad, image, weight, *_ = tensors
    if not len(grad.shape) == len(image.shape) == len(weight.shape) >= 3:
        raise ValueError("gradient, image and weights differ in their dimensions")
    if grad.shape[1] != weight.shape[0]:
        raise _NoCountError("the weights of a transposed convolution do not say its groups")
    flops = 2 * 2 * grad.n * math.prod(weight.shape[1:])
    return _work(
        flops,
        grad.bytes + 2 * image.bytes + 2 * weight.bytes,
        "gradients of image and weights, each with the arithmetic of the forward pass, padding included; "
        "each array moved once",
    )


# --- normalization, softmax, loss --------------------------------------------------------------------------


def _layer_norm(tensors: list[_Tensor]) -> Work:
    x, *parameters = tensors
    if not parameters:
        raise _NoCountError("without scale and shift the length of a row is not in the trace")
    columns = parameters[0].n
    return layer_norm_work(
        x.n // columns, columns, x.itemsize, param_itemsize=parameters[0].itemsize, stats=True
    )


def _layer_norm_backward(tensors: list[_Tensor]) -> Work:
    grad, _, mean, *_ = tensors
    return layer_norm_backward_work(mean.n, grad.n // mean.n, grad.itemsize)


def _softmax(tensors: list[_Tensor]) -> Work:
    x = tensors[0]
    out = tensors[1].itemsize if len(tensors) > 1 else x.itemsize
    return softmax_work(x.n // x.shape[-1], x.shape[-1], x.itemsize, out_itemsize=out)


def _softmax_backward(tensors: list[_Tensor]) -> Work:
    grad, *_ = tensors
    return softmax_backward_work(grad.n // grad.shape[-1], grad.shape[-1], grad.itemsize)


def _nll(tensors: list[_Tensor]) -> Work:
    scores, targets, *_ = tensors
    moved = targets.n * scores.itemsize + targets.bytes
    return _work(targets.n, moved, "one score a row and its target read, one sum; the result is one number")


def _nll_backward(tensors: list[_Tensor]) -> Work:
    # Before them stands the loss's own gradient, which a trace leaves out where it is a single number.
    place = next(place for place, tensor in enumerate(tensors) if len(tensor.shape) > 1)
    scores, targets = tensors[place : place + 2]
    moved = targets.n * scores.itemsize + targets.bytes
    return _work(0, moved, "one gradient a row written; the zeros around it are another call's")


# --- tables --------------------------------------------------------------------------------------------------


def _lookup(table: _Tensor, index: _Tensor) -> Work:
    row = math.prod(table.shape[1:]) * table.itemsize
    read = min(index.n, table.shape[0]) * row
    return _work(
        0, read + index.bytes + index.n * row, "each row looked up is read once and written once a use"
    )


def _embedding(tensors: list[_Tensor]) -> Work:
    return _lookup(tensors[0], tensors[1])


def _gather(tensors: list[_Tensor]) -> Work:
    table, index, *_ = tensors
    row = index.shape[-1] if len(index.shape) > 1 else 1
    return _work(
        0,
        2 * index.n * table.itemsize + index.bytes // row,
        "each element looked up is read once and written once, an index a row (an embedding spreads one over it)",
    )


def _embedding_backward(tensors: list[_Tensor]) -> Work:
    grad, index, *_ = tensors
    return _work(
        grad.n,
        2 * grad.bytes + index.bytes,
        "each row of the gradient read and added to its place once; sorting and the zeros around it are not "
        "counted",
    )


# --- moving and filling ----------------------------------------------------------------------------------------


def _copy(tensors: list[_Tensor]) -> Work:
    if len(tensors) < 2:
        raise _NoCountError("the shape or type of what it writes is not in the trace")
    target, source, *_ = tensors
    return _work(0, target.bytes + min(source.n, target.n) * source.itemsize, "read once, written once")


def _fill(tensors: list[_Tensor]) -> Work:
    if not tensors:
        raise _NoCountError("the shape of what it fills is not in the trace")
    return _work(0, tensors[0].bytes, "written once")


def _cat(tensors: list[_Tensor]) -> Work:
    if not tensors:
        raise _NoCountError("the shapes of a list of more than 30 tensors are not in the trace")
    return _work(0, 2 * sum(tensor.bytes for tensor in tensors), "each read once and written once")


def _reduction(tensors: list[_Tensor]) -> Work:
    x, *out = tensors
    moved = x.bytes + sum(tensor.bytes for tensor in out)
    return _work(x.n, moved, "one operation an element; read once, the far smaller result not counted")


def _scan(tensors: list[_Tensor]) -> Work:
    return _work(tensors[0].n, 2 * tensors[0].bytes, "one operation an element; read once, written once")


# --- element by element ----------------------------------------------------------------------------------------

# name: (tensors that go in at the most, operations an element). An exp, an erf or a root counts one.
_POINTWISE: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div", "maximum", "minimum", "fmod", "remainder"), (2, 1)),
    **dict.fromkeys(
        ("atan2", "bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or"), (2, 1)
    ),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "pow", "floor_divide", "true_divide"), (2, 1)),
    **dict.fromkeys(("neg", "abs", "exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt"), (1, 1)),
    **dict.fromkeys(("reciprocal", "sin", "cos", "tan", "tanh", "erf", "floor", "ceil", "round"), (1, 1)),
    **dict.fromkeys(
        ("sign", "relu", "logical_not", "bitwise_not", "isnan", "isinf", "square", "trunc"), (1, 1)
    ),
    **dict.fromkeys(("clamp_min", "clamp_max", "threshold", "masked_fill", "leaky_relu"), (2, 1)),
    "clamp": (3, 2),
    "where": (3, 1),
    "sigmoid": (1, 3),
    "silu": (1, 4),
    "gelu": (1, 5),
    "softplus": (1, 3),
    "lerp": (3, 3),
    "addcmul": (3, 3),
    "addcdiv": (3, 3),
    "threshold_backward": (2, 1),
    "tanh_backward": (2, 3),
    "sigmoid_backward": (2, 3),
    "silu_backward": (2, 7),
    "gelu_backward": (2, 10),
    "native_dropout_backward": (2, 2),
}
_TO_BOOL = {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "logical_and", "logical_or", "logical_not"}


def _element_wise(name: str, tensors: list[_Tensor]) -> Work:
    in_place = name.endswith("_") and not name.endswith("__")
    base = name.removesuffix("_")
    known = _POINTWISE.get(base)
    if known is None and not _is_pointwise(base):
        raise _NoCountError(f"no counting rule for {base}")
    if not tensors:
        raise _NoCountError("its shapes are not in the trace")
    most, flops = known or (len(tensors), 1)
    inputs, out = tensors[:most], tensors[most:]
    if in_place:
        n, itemsize = inputs[0].n, inputs[0].itemsize
    elif out:
        n, itemsize = out[0].n, out[0].itemsize
    else:
        n = math.prod(_broadcast([tensor.shape for tensor in inputs]))
        # A tensor without dimensions goes along with the others' type.
        wide = [tensor for tensor in inputs if tensor.shape] or inputs
        itemsize = 1 if base in _TO_BOOL else max(tensor.itemsize for tensor in wide)
    moved = sum(tensor.bytes for tensor in inputs) + n * itemsize
    counted = "" if known else ", one operation an element for want of a better count"
    return _work(flops * n, moved, f"each array read or written once{counted}")


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    result: list[int] = []
    for place in range(1, max(len(shape) for shape in shapes) + 1):
        sizes = {shape[-place] for shape in shapes if len(shape) >= place}
        larger = sizes - {1}
        if len(larger) > 1:
            raise ValueError(f"{sorted(larger)} do not broadcast")
        result.append(larger.pop() if larger else 1)
    return tuple(reversed(result))


def _is_pointwise(name: str) -> bool:
    """Whether torch tags the operation as element-wise; without torch, no."""
    try:
        import torch
    except (ImportError, OSError):
        return False
    packet: Any = getattr(torch.ops.aten, name, None)
    overloads: Any = getattr(packet, "overloads", list)  # some names are attributes that are no operations
    return any(torch.Tag.pointwise in getattr(packet, kind).tags for kind in overloads())


# --- lists of tensors --------------------------------------------------------------------------------------------

# name: (lists that are read, lists that are written, operations an element)
_FUSED: dict[str, tuple[int, int, int]] = {
    "_fused_adamw_": (4, 3, 16),
    "_fused_adam_": (4, 3, 16),
    "_fused_sgd_": (3, 2, 4),
    "_fused_adagrad_": (3, 2, 6),
}
# name without _foreach_ and _: (lists that go in at the least, at the most, operations an element)
_FOREACH: dict[str, tuple[int, int, int]] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max"), (1, 2, 1)),
    **dict.fromkeys(("sqrt", "rsqrt", "reciprocal", "neg", "abs", "exp", "log", "pow"), (1, 1, 1)),
    "lerp": (2, 2, 3),
    "addcmul": (3, 3, 3),
    "addcdiv": (3, 3, 3),
}
_LISTS = {"_foreach_copy_", "_foreach_zero_", "_foreach_norm"}


def _of_lists(name: str, tensors: list[_Tensor], list_elements: int | None) -> Work:
    base = name.removeprefix("_foreach_").removesuffix("_")
    if name in _FUSED:
        least, written, flops = _FUSED[name]
        most = least
    elif name in _LISTS:
        least, most, flops, written = {
            "copy": (2, 2, 0, 1),
            "zero": (1, 1, 0, 1),
            "norm": (1, 1, 2, 0),
        }[base]
    elif base in _FOREACH:
        least, most, flops = _FOREACH[base]
        written = 1
    else:
        raise _NoCountError(f"no counting rule for {name}")
    if tensors:
        lists = least
        if most > least and len(tensors) % most == 0:
            # Two lists, or one with a number: two lists have the same shapes.
            half = len(tensors) // most
            lists = most if [t.shape for t in tensors[:half]] == [t.shape for t in tensors[half:]] else least
        each = len(tensors) // lists
        n, moved_once = sum(t.n for t in tensors[:each]), sum(t.bytes for t in tensors[:each])
        where = "shapes of the lists as recorded"
    elif list_elements is not None:
        lists, n, moved_once = least, list_elements, 4 * list_elements
        where = (
            f"the profiler leaves out lists of more than 30 tensors: {list_elements:,} fp32 elements assumed"
        )
    else:
        raise _NoCountError(
            "the profiler leaves out the shapes of lists of more than 30 tensors; pass list_elements"
        )
    reads = 0 if base == "zero" else 1 if base == "copy" else lists
    convention = f"{reads} of the lists read and {written} written once; {where}"
    return _work(flops * n, (reads + written) * moved_once, convention)


# --- kernels that a compiler wrote ---------------------------------------------------------------------------------


def _generated(op: str, tensors: list[_Tensor], arguments: Sequence[str] | None) -> Work:
    if op.startswith("triton_tem_"):
        raise _NoCountError("a generated product: its lengths are not told apart in the trace")
    if not tensors:
        raise _NoCountError("a generated kernel whose arguments are not in the trace")
    named = [str(name) for name in arguments or ()][: len(tensors)]
    twice = [name.startswith("in_out") for name in named] + [False] * (len(tensors) - len(named))
    moved, cut = 0, ""
    # A kernel that looks rows up in a table does not read all of it.
    indices = [tensor.n for tensor in tensors if tensor.itemsize == 8]
    for tensor, again in zip(tensors, twice, strict=True):
        share = 1.0
        if "embedding" in op and indices and len(tensor.shape) == 2 and tensor.shape[0] > max(indices):
            share, cut = max(indices) / tensor.shape[0], ", of a table as many rows as there are indices"
        moved += int(tensor.bytes * share) * (2 if again else 1)
    how = "one that is read and written twice" if named else "one that is read and written too"
    return _work(
        0,
        moved,
        f"a generated kernel: each tensor argument moved once, {how}{cut}; its arithmetic is not counted",
    )


def generated_arguments(folder: Path | str | None = None) -> dict[str, tuple[str, ...]]:
    """Read the argument names of the kernels that torch's compiler wrote, from the code it keeps.

    A trace gives a generated kernel's tensors, but not which of them are read and written: their names do,
    ``in_ptr0``, ``out_ptr0``, ``in_out_ptr0``.

    Parameters
    ----------
    folder
        Where the compiler keeps its code; that of this process by default.

    Returns
    -------
    dict
        Kernel to names of its arguments in order; a name that several kernels share, with other arguments,
        is left out. Empty where nothing was compiled.
    """
    if folder is None:
        try:
            from torch._inductor.runtime.cache_dir_utils import cache_dir
        except (ImportError, OSError):
            return {}
        folder = cache_dir()
    found: dict[str, set[tuple[str, ...]]] = {}
    for path in Path(folder).rglob("*.py"):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):  # another process may be at work there
            continue
        for kernel, inside in re.findall(r"def (triton_\w+)\(([^)]*)\)", text):
            found.setdefault(kernel, set()).add(tuple(re.findall(r"\w*_ptr\d*", inside)))
    return {kernel: names.pop() for kernel, names in found.items() if len(names) == 1}


# --- which rule for which operation --------------------------------------------------------------------------------

_RULES: dict[str, Callable[..., Work]] = {
    "mm": _mm,
    "addmm": _addmm,
    "addmm_": _addmm,
    "_addmm_activation": _addmm,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "baddbmm_": _baddbmm,
    "linear": _linear,
    "mv": _mv,
    "addmv": _addmv,
    "addmv_": _addmv,
    "dot": _dot,
    "vdot": _dot,
    "_flash_attention_forward": _heads_third,
    "_efficient_attention_forward": _heads_third,
    "_cudnn_attention_forward": _heads_second,
    "_scaled_dot_product_flash_attention": _heads_second,
    "_scaled_dot_product_efficient_attention": _heads_second,
    "_scaled_dot_product_cudnn_attention": _heads_second,
    "_flash_attention_backward": _heads_third_back,
    "_efficient_attention_backward": _heads_third_back,
    "_cudnn_attention_backward": _heads_second_back,
    "_scaled_dot_product_flash_attention_backward": _heads_second_back,
    "_scaled_dot_product_efficient_attention_backward": _heads_second_back,
    "_scaled_dot_product_cudnn_attention_backward": _heads_second_back,
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "convolution", "_convolution", "cudnn_convolution"), _convolution
    ),
    **dict.fromkeys(("_conv_depthwise2d", "conv_depthwise3d", "cudnn_convolution_transpose"), _convolution),
    "convolution_backward": _convolution_backward,
    "native_layer_norm": _layer_norm,
    "layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
    "nll_loss_forward": _nll,
    "nll_loss": _nll,
    "nll_loss_backward": _nll_backward,
    "embedding": _embedding,
    "index_select": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "gather": _gather,
    "copy_": _copy,
    **dict.fromkeys(("_to_copy", "clone", "contiguous", "to"), _copy),
    **dict.fromkeys(("fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "arange"), _fill),
    "cat": _cat,
    "stack": _cat,
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min", "prod", "norm", "any", "all"), _reduction),
    **dict.fromkeys(("linalg_vector_norm", "argmax", "argmin", "var", "std", "logsumexp"), _reduction),
    **dict.fromkeys(("cumsum", "cumprod"), _scan),
}
_ATTENTIONS = {_heads_second, _heads_third, _heads_second_back, _heads_third_back}

_FAMILIES: dict[Callable[..., Work], Family] = {
    **dict.fromkeys((_mm, _addmm, _bmm, _baddbmm, _linear, _mv, _addmv, _dot), "product"),
    **dict.fromkeys((_convolution, _convolution_backward), "product"),
    **dict.fromkeys(_ATTENTIONS, "attention"),
    **dict.fromkeys((_layer_norm, _layer_norm_backward), "normalization"),
    **dict.fromkeys((_softmax, _softmax_backward, _nll, _nll_backward), "softmax and loss"),
    **dict.fromkeys((_embedding, _embedding_backward, _gather), "embedding"),
    **dict.fromkeys((_copy, _fill, _cat), "copy or fill"),
    **dict.fromkeys((_reduction, _scan), "reduction"),
}


def family_of(op: str) -> Family:
    """Say which kind of operation it is, for a table's rows.

    Parameters
    ----------
    op
        As the profiler names it.

    Examples
    --------
    >>> family_of("aten::addmm"), family_of("triton_poi_fused_add_3"), family_of("aten::gelu_backward")
    ('product', 'generated', 'element-wise')
    """
    name = _base(op)
    if op.startswith("triton_"):
        return "generated"
    if name in _FUSED or name.startswith("_foreach_"):
        return "optimizer"
    rule = _RULES.get(name)
    if rule is not None:
        return _FAMILIES[rule]
    base = name.removesuffix("_")
    return "element-wise" if base in _POINTWISE or (base and _is_pointwise(base)) else "other"
