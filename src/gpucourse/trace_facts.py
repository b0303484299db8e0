"""What a trace is made of: pieces of work on the device, waits of the host, idle times; and their plain data.

>>> short_name("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)")
'vectorized_elementwise_kernel (CUDAFunctor_add)'
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

__all__ = [
    "ITEM_BYTES",
    "Gap",
    "Kernel",
    "Wait",
    "merge_intervals",
    "shapes_text",
    "short_name",
    "torch_name",
]


_COPY = re.compile(r"Memcpy")

_TORCH_NAMES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "half": "float16",
    "c10::BFloat16": "bfloat16",
    "long int": "int64",
    "long": "int64",
    "long long": "int64",
    "int": "int32",
    "short int": "int16",
    "short": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "short unsigned int": "uint16",
    "unsigned short": "uint16",
    "unsigned int": "uint32",
    "long unsigned int": "uint64",
    "unsigned long": "uint64",
    "bool": "bool",
    "c10::complex<c10::Half>": "complex32",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}

# Bytes an element, by torch's name of its type.
ITEM_BYTES = {
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}


def torch_name(name: str) -> str:
    """Give torch's name of a dtype that the profiler names in C++; one that is not listed loses its namespace."""
    if name in ("", "Scalar", "TensorList", "GenericList"):
        return "unknown"
    return _TORCH_NAMES.get(name) or name.removeprefix("c10::").lower()


def short_name(name: str) -> str:
    """Shorten a kernel's C++ name to what tells it apart.

    Element-wise kernels (over one tensor or a list) keep what they compute, library products their name and tile.
    """
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    wrapped = re.match(r"cutlass::Kernel2?<(\w+)>", bare)
    if wrapped:
        return wrapped.group(1)
    base = re.split(r"[<(]", bare, maxsplit=1)[0].strip()
    rest = bare[len(base) :]
    base = base.rsplit("::", 1)[-1] or name
    tiled = re.match(r"(sm\d+_xmma_gemm)_.*tilesize(\d+x\d+)", base)
    if tiled:
        return f"{tiled.group(1)}_{tiled.group(2)}{'_split_k' if 'split_k' in base else ''}"
    if base.endswith(("elementwise_kernel", "multi_tensor_apply_kernel")):
        for pattern in (r"\w+_kernel_cuda", r"\w*[Ff]unctor\w*", r"\b(?!gpu_kernel)\w+_kernel_impl"):
            found = re.search(pattern, rest)
            if found:
                return f"{base} ({found.group()})"
    return base


def merge_intervals(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge intervals (start, end) that touch or overlap, in order of their start.

    >>> merge_intervals([(5, 6), (0, 2), (1, 3)])
    [(0, 3), (5, 6)]
    """
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One piece of work that the device ran: a kernel, a copy or a fill.

    Attributes
    ----------
    name
        Full C++ name as the profiler gives it; `short_name` shortens it.
    op
        The innermost PyTorch operation whose call launched it; "" where none encloses the launch.
    shapes
        Shapes of that operation's tensor arguments in order, the tensors of a list one by one. Plain numbers are left
        out, and 0-dimensional tensors with them: the profiler shows a number that PyTorch wrapped in a tensor just so.
        Lists that may hold None (the indices of ``x[i]``) are not in its record.
    dtypes
        One for each of the shapes, by torch's name ("float32"); "unknown" where the profiler does not say.
    call
        Which call of an operation launched it: kernels of one call share the number; None where no operation
        encloses the launch. Calls are numbered from 0 by their start on the host, those that launched nothing left out.
    start_us, duration_us
        Start after the first kernel's start, and duration, in µs of the device's clock.
    launch_us
        When the host launched it, on the same axis (negative before the first kernel); None where unknown.
    stream
        CUDA stream.
    grid, block
        Blocks in the grid and threads in a block, (x, y, z); None for a copy or a fill.
    registers, shared_bytes
        Registers a thread, and bytes of shared memory a block; None where the profiler does not say.
    launch_duration_us
        How long the host was in the call that launched it, the profiler's own part included; None where unknown.
    thread
        Which host thread launched it: 0 is the first that launched, a backward pass runs on another. None where
        unknown.
    """

    name: str
    op: str
    shapes: tuple[tuple[int, ...], ...]
    start_us: float
    duration_us: float
    launch_us: float | None
    stream: int
    grid: tuple[int, ...] | None
    block: tuple[int, ...] | None
    registers: int | None
    shared_bytes: int | None
    dtypes: tuple[str, ...] = ()
    call: int | None = None
    launch_duration_us: float | None = None
    thread: int | None = None

    @property
    def end_us(self) -> float:
        """End after the first kernel's start, in µs."""
        return self.start_us + self.duration_us


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One call in which the host stood still until the device, or a copy, was done.

    Attributes
    ----------
    name
        The runtime's function: ``cudaStreamSynchronize``, or ``cudaMemcpyAsync`` from or to pageable memory.
    start_us, duration_us
        Start after the first kernel's start, and duration, in µs.
    thread
        Which host thread waited, numbered as `Kernel.thread`; None where that thread launched nothing.
    """

    name: str
    start_us: float
    duration_us: float
    thread: int | None = None

    @property
    def end_us(self) -> float:
        """End after the first kernel's start, in µs."""
        return self.start_us + self.duration_us

    @property
    def copies(self) -> bool:
        """Whether the call copies, and does not only wait."""
        return _COPY.search(self.name) is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time between two pieces of work in which the whole device was idle, and why.

    Attributes
    ----------
    start_us, duration_us
        Start after the first kernel's start, and duration, in µs.
    cause
        "copy": the device ran dry behind a copy to or from the host, for which the host waited before it launched what
        came next, or while the host stood in a blocking copy. "synchronization": the host was in another waiting call
        when the device ran dry, and launched what came next only then. "host": what came next was launched after the
        device had run dry, by a host that waited for nothing: it was late. "queue": what came next was in the
        queue already, so the pause is the device's own. "unknown": it is not known when it was launched.
    before, after
        Indices in `KernelTrace.kernels` of the work that ended last and of that which came next.
    """

    start_us: float
    duration_us: float
    cause: str
    before: int
    after: int

    def as_dict(self) -> dict[str, Any]:
        """Give the fields as plain data."""
        return dataclasses.asdict(self)


def shapes_text(kernel: Kernel) -> str:
    """Write the shapes with their dtypes; a long list is cut."""
    dtypes = kernel.dtypes or ("unknown",) * len(kernel.shapes)
    texts = [
        str(list(shape)) + (f" {dtype}" if dtype != "unknown" else "")
        for shape, dtype in zip(kernel.shapes, dtypes, strict=True)
    ]
    return ", ".join([*texts[:6], f"and {len(texts) - 6} more"] if len(texts) > 6 else texts)
