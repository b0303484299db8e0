"""Answers to the checkpoints of the chapter on bottlenecks."""

from __future__ import annotations

import math

import numpy as np

from tests.answers import Answers

# --- bottleneck.norm_bytes ------------------------------------------------------------------------------


def norm_bytes(rows, columns, x_size, y_size):
    x, y, m = rows * columns * x_size, rows * columns * y_size, rows * columns * 4
    row, column = rows * 4, columns * 4
    layer_norm = [
        (x, row),  # mean
        (x + row, m),  # d
        (m, m),  # s
        (m, row),  # mean of s
        (row, row),  # v
        (row, row),  # r
        (m + row, m),  # h
        (m + column, m),  # g
        (m + column, y),  # y
    ]
    softmax = [(x, row), (x + row, m), (m, m), (m, row), (m + row, y)]
    return {
        "layer_norm_fused": x + 2 * column + y,
        "layer_norm_steps": sum(map(sum, layer_norm)),
        "softmax_fused": x + y,
        "softmax_steps": sum(map(sum, softmax)),
    }


def norm_bytes_closed_form(rows, columns, x_size, y_size):
    n = rows * columns
    return {
        "softmax_fused": float(n * (x_size + y_size)),
        "softmax_steps": n * (2 * x_size + 20 + y_size) + 16 * rows,
        "layer_norm_fused": np.int64(n * (x_size + y_size) + 8 * columns),
        "layer_norm_steps": n * (2 * x_size + 36 + y_size) + 32 * rows + 8 * columns,
    }


def _changed(key, change):
    def answer(rows, columns, x_size, y_size):
        result = norm_bytes(rows, columns, x_size, y_size)
        result[key] = change(result[key], rows, columns, x_size, y_size)
        return result

    return answer


def _elements(rows, columns, x_size, y_size):
    n = rows * columns
    return {
        "layer_norm_fused": 2 * n + 2 * columns,
        "layer_norm_steps": 12 * n + 8 * rows + 2 * columns,
        "softmax_fused": 2 * n,
        "softmax_steps": 8 * n + 4 * rows,
    }


NORM_BYTES = Answers(
    right=[norm_bytes, norm_bytes_closed_form],
    wrong={
        "elements": (_elements, "elements, not bytes"),
        "output forgotten": (
            _changed("softmax_fused", lambda value, r, c, x, y: value - r * c * y),
            "output's bytes are forgotten",
        ),
        "scale and shift forgotten": (
            _changed("layer_norm_fused", lambda value, r, c, x, y: value - 8 * c),
            "scale and the shift",
        ),
        "fused given for steps": (
            _changed("softmax_steps", lambda value, r, c, x, y: r * c * (x + y)),
            "count for one kernel",
        ),
        "vectors forgotten": (
            _changed("layer_norm_steps", lambda value, r, c, x, y: value - 32 * r - 8 * c),
            "one number a row",
        ),
        "d read twice": (
            _changed("layer_norm_steps", lambda value, r, c, x, y: value + 4 * r * c),
            "reads it once",
        ),
        "intermediates in the size of x": (
            lambda r, c, x, y: {
                **norm_bytes(r, c, x, y),
                "softmax_steps": r * c * (7 * x + y) + 4 * r * x,
            },
            "is fp32, whatever x is",
        ),
        "one itemsize": (lambda r, c, x, y: norm_bytes(r, c, x, x), "itemsize of its own"),
        "in kibibytes": (
            lambda r, c, x, y: {k: v / 1024 for k, v in norm_bytes(r, c, x, y).items()},
            "That is not it",
        ),
        "one number for all": (lambda r, c, x, y: r * c * (x + y), "A dict"),
        "a key missing": (lambda r, c, x, y: {"softmax_fused": r * c * (x + y)}, "lacks"),
        "hard-coded": (
            lambda r, c, x, y: dict.fromkeys(norm_bytes(1, 1, 1, 1), 201_332_736),
            "That is not it",
        ),
        "NaN": (lambda r, c, x, y: dict.fromkeys(norm_bytes(1, 1, 1, 1), math.nan), "not a finite number"),
    },
)


# --- bottleneck.classify --------------------------------------------------------------------------------


def classify(flops, reads, writes, sheet):
    moved = sum(math.prod(shape) * itemsize for shape, itemsize in [*reads, *writes])
    peak = sheet["tflops"] * 1e12 / (2 if sheet["with_sparsity"] else 1)
    arithmetic_us = flops / peak * 1e6
    bytes_us = moved / (sheet["bandwidth_gb_per_s"] * 1e9) * 1e6
    return max(arithmetic_us, bytes_us), "memory" if bytes_us > arithmetic_us else "compute"


def classify_by_intensity(flops, reads, writes, sheet):
    moved = 0
    for shape, itemsize in reads + writes:
        moved += int(np.prod(shape, dtype=np.int64)) * itemsize
    peak = sheet["tflops"] * (0.5 if sheet["with_sparsity"] else 1.0) * 1e12
    bandwidth = sheet["bandwidth_gb_per_s"] * 1e9
    intensity, ridge = flops / moved, peak / bandwidth
    if intensity < ridge:
        return [moved / bandwidth * 1e6, "Memory"]
    return [flops / peak * 1e6, "Compute"]


def _classify(change):
    """Make a version of the reference with one slip."""

    def answer(flops, reads, writes, sheet):
        reads, writes, sheet = list(reads), list(writes), dict(sheet)
        return change(flops, reads, writes, sheet)

    return answer


def _sparse(flops, reads, writes, sheet):
    return classify(flops, reads, writes, {**sheet, "with_sparsity": False})


def _always_halved(flops, reads, writes, sheet):
    return classify(flops, reads, writes, {**sheet, "with_sparsity": True})


def _gib(flops, reads, writes, sheet):
    scaled = sheet["bandwidth_gb_per_s"] * 2**30 / 1e9
    return classify(flops, reads, writes, {**sheet, "bandwidth_gb_per_s": scaled})


def _no_output(flops, reads, writes, sheet):
    return classify(flops, reads, [], sheet)


def _count_elements(flops, reads, writes, sheet):
    return classify(flops, [(s, 1) for s, _ in reads], [(s, 1) for s, _ in writes], sheet)


def _both_times(flops, reads, writes, sheet):
    moved = sum(math.prod(shape) * itemsize for shape, itemsize in [*reads, *writes])
    peak = sheet["tflops"] * 1e12 / (2 if sheet["with_sparsity"] else 1)
    return flops / peak * 1e6, moved / sheet["bandwidth_gb_per_s"] / 1e3


def _added(*args):
    return sum(_both_times(*args)), classify(*args)[1]


def _shorter(*args):
    return min(_both_times(*args)), classify(*args)[1]


def _turned_round(*args):
    time, bound = classify(*args)
    return time, "compute" if bound == "memory" else "memory"


def _memory_at_the_ridge(*args):
    arithmetic, moved = _both_times(*args)
    return max(arithmetic, moved), "memory" if moved >= arithmetic else "compute"


def _sorts_its_input(flops, reads, writes, sheet):
    reads.append(writes[0])
    return classify(flops, reads[:-1], writes, sheet)


CLASSIFY = Answers(
    right=[classify, classify_by_intensity],
    wrong={
        "sparse peak": (_classify(_sparse), "with sparsity"),
        "halved twice": (_classify(_always_halved), "dense already"),
        "GiB": (_classify(_gib), "1e9 bytes, not 2**30"),
        "output forgotten": (_classify(_no_output), "output's bytes are forgotten"),
        "elements": (_classify(_count_elements), "elements, not bytes"),
        "added": (_added, "added the two times"),
        "shorter": (_shorter, "time of the bytes alone"),
        "bytes alone": (lambda *a: (_both_times(*a)[1], classify(*a)[1]), "bytes alone"),
        "arithmetic alone": (lambda *a: (_both_times(*a)[0], classify(*a)[1]), "arithmetic alone"),
        "milliseconds": (lambda *a: (classify(*a)[0] / 1e3, classify(*a)[1]), "power of 1000"),
        "bound turned round": (_turned_round, "the longer names"),
        "equal times called memory": (_memory_at_the_ridge, "where they are equal"),
        "only the time": (lambda *a: classify(*a)[0], "A pair"),
        "another word": (lambda *a: (classify(*a)[0], "bandwidth"), "Give one of"),
        "changes its input": (_sorts_its_input, "changed its input"),
        "NaN": (lambda *a: (math.nan, "memory"), "not a finite number"),
    },
)


# --- bottleneck.linear_backward -------------------------------------------------------------------------


def linear_backward(x, w, dy):
    flat_x, flat_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return dy @ w.T, flat_x.T @ flat_dy


def linear_backward_by_einsum(x, w, dy):
    return [np.einsum("bto,io->bti", dy, w), np.einsum("bti,bto->io", x, dy)]


LINEAR_BACKWARD = Answers(
    right=[linear_backward, linear_backward_by_einsum],
    wrong={
        "one gradient an example": (
            lambda x, w, dy: (dy @ w.T, np.swapaxes(x, 1, 2) @ dy),
            "one W serves all",
        ),
        "averaged over the batch": (
            lambda x, w, dy: (dy @ w.T, (np.swapaxes(x, 1, 2) @ dy).mean(0)),
            "you averaged",
        ),
        "averaged over tokens": (
            lambda x, w, dy: (dy @ w.T, linear_backward(x, w, dy)[1] / (x.shape[0] * x.shape[1])),
            "you averaged",
        ),
        "dW transposed": (lambda x, w, dy: (dy @ w.T, linear_backward(x, w, dy)[1].T), "transpose"),
        "W not transposed": (lambda x, w, dy: (dy @ w, linear_backward(x, w, dy)[1]), "raised ValueError"),
        "dX of the wrong shape": (
            lambda x, w, dy: ((dy @ w.T).reshape(-1, x.shape[-1]), linear_backward(x, w, dy)[1]),
            "shape of what it belongs to",
        ),
        "exchanged": (lambda x, w, dy: linear_backward(x, w, dy)[::-1], "shape of what it belongs to"),
        "only one": (lambda x, w, dy: dy @ w.T, "A pair"),
        "a factor": (lambda x, w, dy: (2 * dy @ w.T, linear_backward(x, w, dy)[1]), "other values"),
        "NaN": (lambda x, w, dy: (dy @ w.T * np.nan, linear_backward(x, w, dy)[1]), "not finite"),
    },
)


ANSWERS = {
    "bottleneck.classify": CLASSIFY,
    "bottleneck.linear_backward": LINEAR_BACKWARD,
    "bottleneck.norm_bytes": NORM_BYTES,
}
