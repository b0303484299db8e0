"""Checkpoints of the chapter on bottlenecks: bytes, least times, and the shapes of a backward pass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpucourse.checkpoints._core import Wrong, call, checkpoint, items, judge, keyed, number, show, word

_ITEMSIZES = {1: "fp8", 2: "bf16", 4: "fp32", 8: "fp64"}


# --- bytes of layer norm and softmax, fused and in steps ------------------------------------------------


def _norm_bytes(rows: int, columns: int, x: int, y: int, middle: int = 4) -> dict[str, int]:
    """Count by the rule of the exercise; `middle` is the size of everything that is neither x nor y."""
    n = rows * columns
    return {
        "layer_norm_fused": n * (x + y) + 2 * columns * middle,
        "layer_norm_steps": n * (2 * x + 9 * middle + y) + (8 * rows + 2 * columns) * middle,
        "softmax_fused": n * (x + y),
        "softmax_steps": n * (2 * x + 5 * middle + y) + 4 * rows * middle,
    }


@checkpoint("bottleneck.norm_bytes")
def norm_bytes(answer: Any, rng: np.random.Generator) -> str:
    """Count the least bytes of layer norm and softmax in one kernel and in steps, mixed precisions."""
    # The first case tells every slip from every other: x and y of four bytes and one, nothing else alike.
    _judge_norms(answer, int(rng.integers(20, 60)) * 2 + 1, int(rng.integers(20, 90)) * 2 + 1, 4, 1)
    cases = [
        (int(rng.integers(100, 400)), int(rng.integers(33, 300)), 2, 2),
        (int(rng.integers(100, 400)), int(rng.integers(33, 300)), 2, 4),
        (int(rng.integers(2, 9)), int(rng.integers(1000, 5000)), 4, 4),
        (1, int(rng.integers(5, 30)), 8, 2),
        (int(rng.integers(500, 900)), 1, 2, 1),
    ]
    for k in rng.permutation(len(cases)):
        _judge_norms(answer, *cases[k])
    return (
        "Right for every size. Fused, each of the two moves its input and its output and little else; in "
        "steps, every named array in between is written once and read at least once."
    )


def _judge_norms(answer: Any, rows: int, columns: int, x: int, y: int) -> None:
    case = f"{rows} rows of {columns}, x {_ITEMSIZES[x]}, y {_ITEMSIZES[y]}"
    right = _norm_bytes(rows, columns, x, y)
    found = keyed(call(answer, rows, columns, x, y), right)
    n = rows * columns
    swapped = _norm_bytes(rows, columns, y, x)
    for key, value in right.items():
        norm, steps = key.startswith("layer_norm"), key.endswith("steps")
        slips: dict[str, float] = {
            "counted elements, not bytes": _norm_bytes(rows, columns, 1, 1, 1)[key],
            "y is written too: the output's bytes are forgotten": value - n * y,
            "y has an itemsize of its own; you took that of x": _norm_bytes(rows, columns, x, x)[key],
            "x and y are exchanged": swapped[key],
        }
        if norm:
            slips["the scale and the shift are read too"] = value - 2 * columns * 4
        if norm and not steps:
            slips["the scale and the shift are fp32, whatever x is"] = n * (x + y) + 2 * columns * x
            slips["the scale and the shift have one number a column, not one an element"] = n * (x + y + 8)
        if steps:
            in_rows = 8 if norm else 4
            vectors = (in_rows * rows + (2 * columns if norm else 0)) * 4
            reads = n * (2 * x + (5 if norm else 3) * 4) + (5 * rows + 2 * columns if norm else 2 * rows) * 4
            slips |= {
                "what stands between x and y is fp32, whatever x is": _norm_bytes(rows, columns, x, y, x)[
                    key
                ],
                "the vectors of one number a row (and a column) are read and written too": value - vectors,
                "counted reads only: each kernel also writes its result": reads,
                "counted writes only: each kernel also reads its operands": value - reads,
                "that is the count for one kernel: in steps each array in between travels as well": right[
                    key.replace("steps", "fused")
                ],
                "x is read twice, by two kernels": value - n * x,
            }
        if norm and steps:
            slips["d · d names one array twice; a kernel reads it once"] = value + n * 4
        judge(found[key], value, slips, rtol=1e-9, case=case, what=f"`{key}` in bytes")


# --- least time and bound of any operation on any device ------------------------------------------------


def _least(
    flops: float, moved: float, sheet: dict[str, Any], *, sparse: bool = False, gib: bool = False
) -> tuple[float, float]:
    peak = sheet["tflops"] * 1e12 / (2 if sheet["with_sparsity"] and not sparse else 1)
    bandwidth = sheet["bandwidth_gb_per_s"] * (2**30 if gib else 1e9)
    return flops / peak * 1e6, moved / bandwidth * 1e6


def _volume(arrays: list[tuple[tuple[int, ...], int]], *, elements: bool = False) -> int:
    return sum(math.prod(shape) * (1 if elements else itemsize) for shape, itemsize in arrays)


def _draw_operations(rng: np.random.Generator) -> list[tuple[str, float, list[Any], list[Any]]]:
    m, n, k = (int(value) for value in rng.integers(900, 2000, 3) * 2 + 1)
    rows, columns = int(rng.integers(500, 5000)), int(rng.integers(100, 4000))
    batch, length = int(rng.integers(8, 200)), int(rng.integers(100, 1200))
    wide, thin = int(rng.integers(3000, 9000)), int(rng.integers(1, 16))
    whole, row = ((rows, columns), 4), ((columns,), 4)
    scores = ((batch, length, length), 2)
    return [
        ("a product", 2 * m * n * k, [((m, k), 2), ((k, n), 2)], [((m, n), 2)]),
        ("an add with a broadcast row", rows * columns, [whole, row], [whole]),
        ("a product with an fp32 result", 2 * m * n * k, [((m, k), 2), ((k, n), 2)], [((m, n), 4)]),
        ("a thin product", 2 * thin * wide**2, [((thin, wide), 2), ((wide, wide), 2)], [((thin, wide), 2)]),
        ("attention scores", 128 * math.prod(scores[0]), [((batch, length, 64), 2)] * 2, [scores]),
        ("a cast", 0, [whole], [((rows, columns), 2)]),
        ("a sum over everything", rows * columns, [whole], [((), 4)]),
    ]


@checkpoint("bottleneck.classify")
def classify(answer: Any, rng: np.random.Generator) -> str:
    """Give the least time in µs and the bound of an operation from shapes and a datasheet."""
    sheets = []
    for low, high, factor in ((60, 300, 2), (60, 300, 1), (8, 30, 1)):  # ridges as cards have them
        bandwidth = float(rng.integers(300, 4900))
        tflops = round(float(rng.uniform(low, high)) * bandwidth / 1e3 * factor, 1)
        sheets.append({"tflops": tflops, "with_sparsity": factor == 2, "bandwidth_gb_per_s": bandwidth})
    operations = _draw_operations(rng)
    product, add, *others = operations
    # A large product and an add tell every slip from every other on each kind of datasheet.
    for operation in (product, add):
        for sheet in sheets:
            _judge_operation(answer, *operation, sheet)
    for k in rng.permutation(len(others)):
        _judge_operation(answer, *others[int(k)], sheets[int(rng.integers(len(sheets)))])
    _judge_ridge(answer)
    return (
        "Right on every device. The same product can change sides from one device to the next, and from one "
        "precision to the next on the same device."
    )


def _judge_ridge(answer: Any) -> None:
    """Exactly at the ridge the two times agree, and the exercise calls that "compute"."""
    sheet = {"tflops": 2.0, "with_sparsity": True, "bandwidth_gb_per_s": 1000.0}
    array = ((16, 32), 1)
    _judge_operation(answer, "an operation at the ridge", 1024.0, [array], [array], sheet)


def _judge_operation(
    answer: Any, name: str, flops: float, reads: list[Any], writes: list[Any], sheet: dict[str, Any]
) -> None:
    case = f"{name}, reads {show(reads)}, writes {show(writes)}, {show(sheet)}"
    found = call(answer, flops, reads, writes, sheet)
    if not isinstance(found, tuple | list):
        raise Wrong(f"A pair (least time in µs, bound) is wanted, not {show(found)}.")
    time_us, bound = items(found, "the pair (least time in µs, bound)", length=2)
    moved = _volume(reads) + _volume(writes)
    arithmetic, travel = _least(flops, moved, sheet)
    right = max(arithmetic, travel)
    shorter = "bytes" if travel < arithmetic else "arithmetic"
    sparse, _ = _least(flops, moved, sheet, sparse=True)
    halved = arithmetic if sheet["with_sparsity"] else 2 * arithmetic
    elements = _least(flops, _volume([*reads, *writes], elements=True), sheet)[1]
    slips = {
        "the printed rate is with sparsity; dense arithmetic runs at half of it": max(sparse, travel),
        "this rate is dense already; you halved it": max(halved, travel),
        "a datasheet's GB is 1e9 bytes, not 2**30": max(arithmetic, _least(flops, moved, sheet, gib=True)[1]),
        "what is written travels too: the output's bytes are forgotten": max(
            arithmetic, _least(flops, _volume(reads), sheet)[1]
        ),
        "counted elements, not bytes": max(arithmetic, elements),
        "both go on at once, so the longer decides; you added the two times": arithmetic + travel,
        f"the longer of the two times is the least time; that is the time of the {shorter} alone": min(
            arithmetic, travel
        ),
    }
    judge(time_us, right, slips, case=case, what="the least time in µs")
    said = word(bound, "the bound", ("memory", "compute"))
    wanted = "memory" if travel > arithmetic else "compute"
    if said != wanted:
        raise Wrong(
            f"For {case} the time is right and the bound is `{said}`. Compare the two times: the longer names "
            "the bound, and where they are equal it is `compute`."
        )


# --- the backward pass of a linear layer ----------------------------------------------------------------


@checkpoint("bottleneck.linear_backward")
def linear_backward(answer: Any, rng: np.random.Generator) -> str:
    """Give dX and dW of Y = X W for X of shape (batch, tokens, inputs), as two products."""
    shapes = []
    for _ in range(3):
        batch, tokens, inputs, more = (int(value) for value in rng.integers(2, 9, 4))
        shapes.append((batch, tokens, inputs, inputs + more))
    shapes += [(4, 1, 2, 7), (3, 4, 5, 1), (1, 5, 3, 3)]
    for batch, tokens, inputs, outputs in shapes:
        x = rng.standard_normal((batch, tokens, inputs))
        w = rng.standard_normal((inputs, outputs))
        dy = rng.standard_normal((batch, tokens, outputs))
        _judge_backward(answer, x, w, dy)
    return (
        "Right. Each of the two products has the arithmetic of the forward pass, which is why a backward "
        "pass of products costs two forward passes."
    )


def _judge_backward(
    answer: Any, x: np.ndarray[Any, Any], w: np.ndarray[Any, Any], dy: np.ndarray[Any, Any]
) -> None:
    case = f"X {x.shape}, W {w.shape}, dY {dy.shape}"
    found = call(answer, x, w, dy)
    if type(found) not in (tuple, list) or len(found) != 2:
        raise Wrong(f"A pair (dX, dW) is wanted, not {show(found)}.")
    each = np.einsum("bti,bto->bio", x, dy)
    right = {"dX": np.einsum("bto,io->bti", dy, w), "dW": each.sum(0)}
    slips = {
        "dX": {"W is not transposed": dy @ w if w.shape[0] == w.shape[1] else None},
        "dW": {
            "every example has its own W here; one W serves all, so its gradients add up": each,
            "gradients of W add up over the examples; you averaged": each.mean(0),
            "gradients of W add up over all tokens; you averaged": each.sum(0) / (x.shape[0] * x.shape[1]),
            "that is the transpose": each.sum(0).T,
        },
    }
    for (name, value), given in zip(right.items(), found, strict=True):
        array = _array(given, name)
        if array.shape == value.shape and np.allclose(array, value, rtol=1e-8, atol=1e-10):
            continue
        for slip, wrong in slips[name].items():
            if wrong is not None and array.shape == wrong.shape and np.allclose(array, wrong, rtol=1e-8):
                raise Wrong(f"{name}, for {case}: {slip}.")
        if array.shape != value.shape:
            raise Wrong(
                f"{name} has shape {array.shape} for {case}. A gradient has the shape of what it belongs to."
            )
        raise Wrong(f"{name} has the right shape and other values, for {case}.")


def _array(value: Any, name: str) -> np.ndarray[Any, Any]:
    """Read a numpy array or CPU tensor of real numbers."""
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if type(value) is not np.ndarray:
        number(value, name)  # names what it is, if it is no number either
        raise Wrong(f"{name} is a single number; an array is wanted.")
    if value.dtype.kind not in "iuf":
        raise Wrong(f"{name} holds {value.dtype}, not real numbers.")
    if not np.isfinite(value).all():
        raise Wrong(f"{name} holds a value that is not finite.")
    return value
