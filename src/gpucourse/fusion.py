"""Which neighbours in a trace one kernel could replace, judged by shape and order."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence, Set
from typing import Any

from gpucourse.trace_facts import ITEM_BYTES, Kernel

__all__ = [
    "Candidate",
    "fuse_candidates",
]


# Element-wise, for torch's tag is not at hand without torch, and some do not carry it (losses: the mean over their
# elements is an operation of its own).
_ELEMENT_WISE = frozenset(
    re.findall(
        r"\w+",
        "abs add addcdiv addcmul binary_cross_entropy binary_cross_entropy_backward bitwise_and bitwise_not "
        "bitwise_or ceil clamp clamp_max clamp_min clone copy cos div elu eq erf exp fill floor ge gelu "
        "gelu_backward gt hardtanh huber_loss huber_loss_backward isnan le leaky_relu lerp log logical_and "
        "logical_not logical_or lt masked_fill maximum minimum mse_loss mse_loss_backward mul native_dropout "
        "native_dropout_backward ne neg pow reciprocal relu remainder round rsqrt rsub sigmoid "
        "sigmoid_backward sign silu silu_backward sin smooth_l1_loss smooth_l1_loss_backward softplus sqrt "
        "square sub tanh tanh_backward threshold_backward to_copy where zero",
    )
)
_REDUCTIONS = frozenset(
    re.findall(
        r"\w+",
        "all amax amin any argmax argmin fused_rms_norm fused_rms_norm_backward linalg_vector_norm log_softmax "
        "log_softmax_backward_data logsumexp max mean min native_batch_norm native_group_norm "
        "native_group_norm_backward native_layer_norm native_layer_norm_backward norm prod softmax "
        "softmax_backward_data std std_mean sum var var_mean",
    )
)
# Those of them whose result is as large as what they read.
_KEEP_SIZE = re.compile(r"(native_\w+|fused_rms)_norm|softmax")


def _bare(op: str) -> str:
    """Give an operation's name without its namespace and outer underscores: ``aten::_softmax`` is ``softmax``."""
    return op.removeprefix("aten::").strip("_")


@functools.cache
def _pointwise(op: str) -> bool:
    """Whether each element of the operation's result needs only the elements at its own place."""
    name = op.removeprefix("aten::")
    if name.startswith("_foreach_"):
        return _bare(op) not in ("foreach_norm", "foreach_max")
    if not op.startswith("aten::"):
        return False
    if _bare(op) in _ELEMENT_WISE:
        return True
    try:
        import torch
    except (ImportError, OSError):
        return False
    packet: Any = getattr(torch.ops.aten, name, None)
    overloads: Any = getattr(packet, "overloads", list)  # some names are attributes that are no operations
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The kernels of one call of an operation on one stream, and what kind of operation it is."""

    indices: tuple[int, ...]
    op: str
    kind: str  # "pointwise", "reduction" or "other"
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    elements: int

    @property
    def lists(self) -> bool:
        return "_foreach_" in self.op

    @property
    def keeps_size(self) -> bool:
        return self.kind == "pointwise" or _KEEP_SIZE.search(self.op) is not None

    @property
    def full_shapes(self) -> list[tuple[int, ...]]:
        return [shape for shape in self.shapes if math.prod(shape) == self.elements]


def _calls(kernels: Sequence[Kernel], stream: int) -> list[_Call]:
    mine = [(index, kernel) for index, kernel in enumerate(kernels) if kernel.stream == stream]
    found = []
    # Without a number (no operation, older data) each kernel stands for itself.
    for _, group in itertools.groupby(
        mine, key=lambda pair: (pair[1].call, pair[1].call is None and pair[0])
    ):
        indices, members = zip(*group, strict=True)
        first = members[0]
        elements = _elements(first)
        moves = any(re.search(r"HtoD|DtoH|PtoP|HtoH", kernel.name) for kernel in members)
        kind = "other"
        if elements and not moves:
            if _pointwise(first.op):
                kind = "pointwise"
            elif _bare(first.op) in _REDUCTIONS and first.op.startswith("aten::"):
                kind = "reduction"
        found.append(
            _Call(
                indices=indices,
                op=first.op,
                kind=kind,
                shapes=first.shapes,
                dtypes=first.dtypes or ("unknown",) * len(first.shapes),
                elements=elements,
            )
        )
    return found


def _elements(kernel: Kernel) -> int:
    """Count what an operation runs over: the broadcast of its shapes, or all tensors of a list; 0 where unknown."""
    if not kernel.shapes:
        return 0
    if "_foreach_" in kernel.op:
        return sum(math.prod(shape) for shape in kernel.shapes)
    if _bare(kernel.op) in _REDUCTIONS:
        return max(math.prod(shape) for shape in kernel.shapes)
    width = max(map(len, kernel.shapes))
    padded = [(1,) * (width - len(shape)) + shape for shape in kernel.shapes]
    return math.prod(max(sizes) if min(sizes) else 0 for sizes in zip(*padded, strict=True))


def _joins(run: Sequence[_Call], call: _Call) -> bool:
    """Whether a call can go on with a run: only at its two ends may a reduction stand."""
    last = run[-1]
    if call.kind == "other" or (last.kind == "reduction" and (len(run) > 1 or call.kind == "reduction")):
        return False
    if last.lists and call.lists:  # one takes p, another p and g: the longer is the shorter, repeated
        short, long_ = sorted((last.shapes, call.shapes), key=len)
        return short * (len(long_) // len(short)) == long_
    if last.lists != call.lists or last.elements != call.elements or not _full(call):
        return False
    # In front of a run, a reduction to less shares with it only what both read: a tensor of one shape.
    return last.keeps_size or not set(call.shapes).isdisjoint(last.full_shapes)


def _full(call: _Call) -> tuple[str, ...]:
    """Give the dtypes of those arguments that have all the elements which the call runs over."""
    return tuple(
        dtype
        for shape, dtype in zip(call.shapes, call.dtypes, strict=True)
        if math.prod(shape) == call.elements
    )


def _candidate(run: Sequence[_Call], kernels: Sequence[Kernel]) -> list[Candidate]:
    if len(run) < 2:
        return []
    indices = tuple(sorted(itertools.chain.from_iterable(call.indices for call in run)))
    saved: int | None = 0
    for before, after in itertools.pairwise(run):
        sizes = {ITEM_BYTES.get(dtype) for dtype in _full(after)}
        size = sizes.pop() if len(sizes) == 1 else None
        if size is None or after.lists or saved is None:
            saved = None
            break
        # Written and read again; after a reduction to less, only its own reading of the tensor falls away.
        saved += after.elements * size * (2 if before.keeps_size else 1)
    return [
        Candidate(
            indices=indices,
            ops=tuple(call.op for call in run),
            elements=min(call.elements for call in run),
            bytes_saved=saved,
            # A call that needs several launches for itself (a long list, a fill before a sum) keeps needing them.
            launches_saved=len(indices) - max(len(call.indices) for call in run),
            duration_us=sum(kernels[index].duration_us for index in indices),
        )
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Neighbours that one kernel might replace, judged by shape and order.

    Attributes
    ----------
    indices
        Their places in `KernelTrace.kernels`.
    ops
        The operations, one for each call.
    elements
        How many elements each of them runs over.
    bytes_saved
        Bytes of intermediate results that would no longer be written and read again, and of a tensor that a
        reduction in front would no longer read apart; None where a dtype is unknown or the operations take lists.
    launches_saved
        Launches that would fall away.
    duration_us
        What the kernels take as they are, in µs: an upper limit on what can be gained on the device.
    """

    indices: tuple[int, ...]
    ops: tuple[str, ...]
    elements: int
    bytes_saved: int | None
    launches_saved: int
    duration_us: float

    def as_dict(self) -> dict[str, Any]:
        """Give the fields as plain data."""
        return dataclasses.asdict(self)


def fuse_candidates(kernels: Sequence[Kernel], waited: Set[int]) -> tuple[Candidate, ...]:
    """Find runs of neighbours that one kernel could replace; see `KernelTrace.fuse_candidates`.

    Parameters
    ----------
    kernels
        In order of start.
    waited
        Indices of the work that came after the host had waited: no run reaches across.
    """
    found: list[Candidate] = []
    for stream in dict.fromkeys(kernel.stream for kernel in kernels):
        run: list[_Call] = []
        for call in _calls(kernels, stream):
            if run and not (_joins(run, call) and waited.isdisjoint(call.indices)):
                found += _candidate(run, kernels)
                run = []
            if call.kind != "other":
                run.append(call)
        found += _candidate(run, kernels)
    return tuple(sorted(found, key=lambda candidate: candidate.indices))
