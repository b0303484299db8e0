"""An out-of-memory error as a statement of account: asked, allowed, allocated, reserved, and what lived.

>>> message = (
...     "CUDA out of memory. Tried to allocate 1.54 GiB. GPU 0 has a total capacity of 139.81 GiB of which 115.90 GiB "
...     "is free. 22.35 GiB allowed; Of the allocated memory 21.90 GiB is allocated by PyTorch, and 301.50 MiB is "
...     "reserved by PyTorch but unallocated."
... )
>>> figures_in(message)["allowed_bytes"], figures_in(message)["asked_bytes"]
(23998129766, 1653562409)

After such an error the traceback still holds the tensors of the frames that it went through: `attempt` runs a step,
takes the statement and lets them go.
"""

from __future__ import annotations

import dataclasses
import gc
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpucourse import html
from gpucourse import plain_data as given
from gpucourse.environment import cuda_available, require_cuda
from gpucourse.live_memory import storages_of
from gpucourse.placed_model import tensors
from gpucourse.units import GIB, format_bytes

if TYPE_CHECKING:
    pass

__all__ = [
    "Attempt",
    "MemoryStatement",
    "NotOutOfMemoryError",
    "attempt",
    "figures_in",
    "give_back_cache",
]

REST = "activations and temporaries"  # where model and optimizer are known
UNKNOWN = "not told apart"  # where they are not
SHOWN = 8  # groups of blocks in a statement


class NotOutOfMemoryError(TypeError):
    """The error is none that the allocator raises when it cannot serve a request."""


_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
_FIGURES = {
    "asked_bytes": r"Tried to allocate ([\d.]+) (\w+)",
    "total_bytes": r"total capacity of ([\d.]+) (\w+)",
    "free_bytes": r"of which ([\d.]+) (\w+) is free",
    "allowed_bytes": r"([\d.]+) (\w+) allowed;",
    "allocated_bytes": r"Of the allocated memory ([\d.]+) (\w+) is allocated by PyTorch",
    "unallocated_bytes": r"and ([\d.]+) (\w+) is reserved by PyTorch but unallocated",
}


def figures_in(message: str) -> dict[str, int]:
    """Read the figures in the text of torch's error, which gives two decimals.

    Parameters
    ----------
    message
        The text.

    Returns
    -------
    dict
        Bytes; a figure that the text does not give is left out.
    """
    found = {}
    for name, pattern in _FIGURES.items():
        match = re.search(pattern, message)
        if match and match.group(2) in _UNITS:
            found[name] = round(float(match.group(1)) * _UNITS[match.group(2)])
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStatement:
    """What the allocator held when it could not serve a request.

    Attributes
    ----------
    asked_bytes
        The segment that it asked the driver for: the request, rounded up to 2 MiB, or 20 MiB for small ones.
    allowed_bytes
        The cap; None where there was none.
    allocated_bytes, reserved_bytes
        What tensors held, and what the allocator held of the device.
    total_bytes, free_bytes
        Of the device, as the driver says.
    lines
        What lived, in bytes by role; the sum is `allocated_bytes` where `exact`.
    largest
        (what, how many blocks, bytes) of what is no parameter and the like: by line of code, or by size.
    pieces, largest_piece_bytes
        How many free pieces the reserved memory had, and the largest.
    exact
        Whether it was taken at the instant of the failure. Otherwise the figures are the message's, with two
        decimals, and the lines are of later, when the error was caught: what the failing call had in hand is gone.
    """

    asked_bytes: int | None
    allowed_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int
    total_bytes: int | None
    free_bytes: int | None
    lines: Mapping[str, int]
    largest: tuple[tuple[str, int, int], ...]
    pieces: int
    largest_piece_bytes: int
    exact: bool

    @classmethod
    def from_error(
        cls, error: BaseException, *, model: Any = None, optimizer: Any = None, batch: Any = None
    ) -> MemoryStatement:
        """Read an error that was caught, and what lives now, while the error still holds it.

        Parameters
        ----------
        error
            A `torch.OutOfMemoryError`.
        model, optimizer, batch
            Whose parameters, gradients, state and tensors get lines of their own.

        Raises
        ------
        NotOutOfMemoryError
            The error is another one.
        """
        import torch

        if not isinstance(error, torch.OutOfMemoryError):
            raise NotOutOfMemoryError(
                f"the error is {type(error).__name__}; wanted torch.OutOfMemoryError, which the allocator raises"
            )
        figures = figures_in(str(error))
        here = cuda_available()
        segments = _segments(torch, torch.cuda.current_device()) if here else []
        owners = _owners(model, optimizer, batch)
        allocated = figures.get("allocated_bytes", _sum_of(segments, "allocated_size"))
        reserved = (
            allocated + figures["unallocated_bytes"]
            if "unallocated_bytes" in figures
            else _sum_of(segments, "total_size")
        )
        return cls(
            asked_bytes=figures.get("asked_bytes"),
            allowed_bytes=figures.get("allowed_bytes"),
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            total_bytes=figures.get("total_bytes"),
            free_bytes=figures.get("free_bytes"),
            exact=False,
            **_held(segments, owners),
        )

    @classmethod
    def from_segments(
        cls,
        segments: list[Mapping[str, Any]],
        *,
        asked_bytes: int | None = None,
        allowed_bytes: int | None = None,
        total_bytes: int | None = None,
        free_bytes: int | None = None,
        owners: Mapping[int, str] | None = None,
    ) -> MemoryStatement:
        """Make a statement of a snapshot of this instant.

        Parameters
        ----------
        segments
            As ``torch.cuda.memory_snapshot()`` lists them, of one device.
        asked_bytes, allowed_bytes, total_bytes, free_bytes
            As the attributes.
        owners
            Roles by the address of a block.
        """
        return cls(
            asked_bytes=asked_bytes,
            allowed_bytes=allowed_bytes,
            allocated_bytes=_sum_of(segments, "allocated_size"),
            reserved_bytes=_sum_of(segments, "total_size"),
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            exact=True,
            **_held(segments, owners or {}),
        )

    @property
    def unallocated_bytes(self) -> int:
        """What was reserved and held no tensor."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def limit_bytes(self) -> int | None:
        """What the allocator could have held: the cap, or what it held and the driver had left; None if unknown."""
        left = None if self.free_bytes is None else self.reserved_bytes + self.free_bytes
        known = [limit for limit in (self.allowed_bytes, left) if limit is not None]
        return min(known) if known else None

    @property
    def fragmented(self) -> bool | None:
        """Whether the request would have fitted by what was allocated; None where a figure is unknown."""
        if self.asked_bytes is None or self.limit_bytes is None:
            return None
        return self.allocated_bytes + self.asked_bytes <= self.limit_bytes

    def why(self) -> str:
        """Say what stood in the way, and what reserved but unallocated memory has to do with it."""
        pieces = (
            f"{format_bytes(self.unallocated_bytes)} was reserved but not allocated, in {self.pieces} pieces, the "
            f"largest of {format_bytes(self.largest_piece_bytes)}"
        )
        if self.fragmented is None or self.asked_bytes is None or self.limit_bytes is None:
            return f"{pieces[0].upper()}{pieces[1:]}."
        over = self.allocated_bytes + self.asked_bytes - self.limit_bytes
        if self.fragmented:
            return (
                f"Fragmentation: by what was allocated the request fitted, with {format_bytes(-over)} to spare. But "
                f"{pieces}; something lives in each of their segments, so that the allocator could not give them back."
            )
        limit = "allowed" if self.limit_bytes == self.allowed_bytes else "left on the device"
        return (
            "It does not fit, however the memory lies: what was allocated and the request together are "
            f"{format_bytes(over)} more than is {limit}. {pieces[0].upper()}{pieces[1:]}; all of it would not have "
            "been enough."
        )

    def as_dict(self) -> dict[str, Any]:
        """Give the statement as plain data; `from_dict` reads it."""
        return {
            **{
                field.name: getattr(self, field.name)
                for field in dataclasses.fields(self)
                if field.name not in ("lines", "largest")
            },
            "unallocated_bytes": self.unallocated_bytes,
            "fragmented": self.fragmented,
            "lines": dict(self.lines),
            "largest": [list(group) for group in self.largest],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MemoryStatement:
        """Read what `as_dict` gave.

        Parameters
        ----------
        data
            Plain data, such as a recording holds.

        Raises
        ------
        ValueError
            A field is missing or is none of what it can be.
        """

        def optional(name: str) -> int | None:
            return None if data[name] is None else given.whole(data[name], name)

        try:
            return cls(
                asked_bytes=optional("asked_bytes"),
                allowed_bytes=optional("allowed_bytes"),
                allocated_bytes=given.whole(data["allocated_bytes"], "allocated_bytes"),
                reserved_bytes=given.whole(data["reserved_bytes"], "reserved_bytes"),
                total_bytes=optional("total_bytes"),
                free_bytes=optional("free_bytes"),
                lines={
                    given.text(k, "a line"): given.whole(n, f"lines.{k}") for k, n in data["lines"].items()
                },
                largest=tuple(
                    (given.text(what, "largest"), given.whole(count, "largest"), given.whole(n, "largest"))
                    for what, count, n in given.rows(data["largest"], "largest")
                ),
                pieces=given.whole(data["pieces"], "pieces"),
                largest_piece_bytes=given.whole(data["largest_piece_bytes"], "largest_piece_bytes"),
                exact=bool(data["exact"]),
            )
        except KeyError as error:
            raise ValueError(
                f"the statement has no {error}: wanted what MemoryStatement.as_dict() gave"
            ) from None

    def _rows(self) -> list[tuple[str, str]]:
        def said(number: int | None) -> str:
            return "unavailable" if number is None else format_bytes(number)

        rows = [
            ("asked for", said(self.asked_bytes)),
            ("allowed", "no cap" if self.allowed_bytes is None else said(self.allowed_bytes)),
            ("allocated", said(self.allocated_bytes)),
            ("reserved", said(self.reserved_bytes)),
            ("reserved but not allocated", said(self.unallocated_bytes)),
            ("free on the device", said(self.free_bytes)),
        ]
        rows += [(f"live: {name}", format_bytes(n)) for name, n in self.lines.items() if n]
        rows += [
            (f"largest: {what}", f"{format_bytes(n)} in {count} block{'s' if count > 1 else ''}")
            for what, count, n in self.largest
        ]
        return rows

    def _taken(self) -> str:
        return (
            "taken at the instant of the failure"
            if self.exact
            else "figures as torch's message rounds them; the lines are of when the error was caught"
        )

    def __str__(self) -> str:
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(
            [
                f"out of memory ({self._taken()})",
                *(f"  {name:<{width}}  {value}" for name, value in rows),
                self.why(),
            ]
        )

    def _repr_html_(self) -> str:
        table = html.table(["out of memory", "bytes"], self._rows(), f"Out of memory, {self._taken()}")
        return f"{table}<p>{html.escape(self.why())}</p>"


def _sum_of(segments: list[Mapping[str, Any]], field: str) -> int:
    return sum(int(segment[field]) for segment in segments)


def _segments(torch: Any, device: int) -> list[Mapping[str, Any]]:
    return [s for s in torch.cuda.memory._snapshot()["segments"] if s.get("device", device) == device]


def _owned(model: Any, optimizer: Any, batch: Any) -> list[tuple[str, list[Any]]]:
    """List what the caller knows of; what is two things is the one named last."""
    parameters = [] if model is None else list(model.parameters())
    if optimizer is not None:
        known = set(map(id, parameters))
        parameters += [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    return [
        ("inputs", tensors(batch)),
        ("optimizer", [] if optimizer is None else tensors(list(optimizer.state.values()))),
        ("gradients", [p.grad for p in parameters if p.grad is not None]),
        ("buffers", [] if model is None else list(model.buffers())),
        ("parameters", parameters),
    ]


def _owners(model: Any, optimizer: Any, batch: Any) -> dict[int, str]:
    """Name what each address on the device holds."""
    return {
        storage.data_ptr(): role
        for role, held in _owned(model, optimizer, batch)
        for tensor in held
        for storage in storages_of(tensor)
        if storage.device.type == "cuda"
    }


def _held(segments: list[Mapping[str, Any]], owners: Mapping[int, str]) -> dict[str, Any]:
    order = ("parameters", "gradients", "optimizer", "buffers", "inputs")
    rest = REST if owners else UNKNOWN
    lines: dict[str, int] = dict.fromkeys((*order, rest, "rounding") if owners else (rest, "rounding"), 0)
    groups: dict[str, list[int]] = {}
    free = []
    traced = any(block.get("frames") for segment in segments for block in segment["blocks"])
    for segment in segments:
        address = int(segment["address"])
        for block in segment["blocks"]:
            size, at = int(block["size"]), int(block.get("address", address))
            address = at + size
            if block["state"] == "inactive":
                free.append(size)
            if block["state"] != "active_allocated":
                continue
            asked = int(block.get("requested_size", size))
            role = owners.get(at, rest)
            lines[role] += asked
            lines["rounding"] += size - asked
            if role == rest:
                groups.setdefault(_label(block, asked, traced), []).append(asked)
    largest = sorted(((what, len(n), sum(n)) for what, n in groups.items()), key=lambda group: -group[2])
    return {
        "lines": lines,
        "largest": tuple(largest[:SHOWN]),
        "pieces": len(free),
        "largest_piece_bytes": max(free, default=0),
    }


def _label(block: Mapping[str, Any], asked: int, traced: bool) -> str:
    """Name a block by the line that allocated it, or by its size where no stack was recorded."""
    for frame in block.get("frames") or ():
        name = str(frame["filename"]).replace("\\", "/")
        if "/torch/" not in name and not name.startswith("<") and not name.endswith("memory_statement.py"):
            return f"{name.rpartition('/')[2]}:{frame['line']} in {frame['name']}"
    # The backward pass allocates on a thread that runs no Python.
    return f"{format_bytes(asked)} each" + (", by no line of Python" if traced else "")


# --------------------------------------------------------------------------------------------- a step that may fail


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """How a call went that may run out of memory.

    Attributes
    ----------
    value
        What it returned; None where it failed.
    statement
        What the allocator held when it failed; None where it did not.
    left_bytes
        What was allocated afterwards beyond what was before; 0 where it was less.
    gradients_dropped
        Whether gradients that the failed call had begun were set to None.
    """

    value: Any = None
    statement: MemoryStatement | None = None
    left_bytes: int = 0
    gradients_dropped: bool = False

    @property
    def fits(self) -> bool:
        """Whether the call ran to its end."""
        return self.statement is None


class _Watch:
    """Reads the allocator at the instant of a failure, if it is the innermost that is open."""

    open: list[_Watch] = []  # noqa: RUF012 - one list for all, on purpose
    attached = False

    def __init__(self, owners: Callable[[], Mapping[int, str]]) -> None:
        self.owners = owners
        self.statement: MemoryStatement | None = None

    @classmethod
    def attach(cls, torch: Any) -> None:
        """Let torch call `failed`. It has no way to take an observer back, so there is one, idle between attempts."""
        observe = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if observe is not None and not cls.attached:
            torch.cuda.init()
            observe(cls.failed)
            cls.attached = True

    @classmethod
    def failed(cls, device: int, asked: int, limit: int, free: int) -> None:
        """Take the statement; called by the allocator, which raises its error afterwards."""
        if not cls.open:
            return
        import torch

        watch = cls.open[-1]
        try:
            total = int(torch.cuda.mem_get_info(device)[1])
            watch.statement = MemoryStatement.from_segments(
                _segments(torch, device),
                asked_bytes=asked,
                allowed_bytes=limit if limit < total else None,
                total_bytes=total,
                free_bytes=free,
                owners=watch.owners(),
            )
        except Exception:  # an error here would hide the one that is on its way
            watch.statement = None


def attempt(
    fn: Callable[[], Any],
    *,
    model: Any = None,
    optimizer: Any = None,
    batch: Any = None,
    code: bool = True,
) -> Attempt:
    """Run a step that may run out of memory; if it does, say what lived, and free it.

    Other errors go through. After a failure the tensors of the failed frames are let go and the allocator's cache is
    emptied, cuBLAS's workspaces included, so that a smaller step can follow. Where `model` is given, gradients that
    were None before are None again: the failed backward pass made some of them, and the next one would add to these.
    Gradients that were there before are left as they are, with what the failed pass added, and an optimizer's step
    that failed half way stays half done.

    Parameters
    ----------
    fn
        Called without arguments.
    model, optimizer, batch
        Whose parameters, gradients, state and tensors get lines of their own in the statement.
    code
        Whether to record the stack of each allocation, about 2 µs each, so that what lived is named by line of code.
        A history that is being recorded already is left alone.

    Returns
    -------
    Attempt
        The value, or the statement.

    Raises
    ------
    NoGPUError
        There is no CUDA device.

    Examples
    --------
    >>> from gpucourse.environment import cuda_available
    >>> if cuda_available():
    ...     import torch
    ...     tried = attempt(lambda: torch.empty(2**50, device="cuda"))
    ...     assert not tried.fits
    """
    require_cuda("attempt")
    import torch

    _Watch.attach(torch)
    parameters = [] if model is None else [p for p in model.parameters() if p.grad is None]
    before = torch.cuda.memory_allocated()
    watch = _Watch(lambda: _owners(model, optimizer, batch))
    value, statement = None, None
    with _stacks(torch, code):
        _Watch.open.append(watch)
        try:
            value = fn()
        except torch.OutOfMemoryError as error:
            statement = watch.statement or MemoryStatement.from_error(
                error, model=model, optimizer=optimizer, batch=batch
            )
            _let_go(error)
        finally:
            _Watch.open.remove(watch)
    if statement is None:
        return Attempt(value=value, left_bytes=max(0, torch.cuda.memory_allocated() - before))
    dropped = False
    for parameter in parameters:
        dropped |= parameter.grad is not None
        parameter.grad = None
    give_back_cache(torch)
    return Attempt(
        statement=statement,
        left_bytes=max(0, torch.cuda.memory_allocated() - before),
        gradients_dropped=dropped,
    )


def give_back_cache(torch: Any) -> None:
    """Give back to the driver all in which no tensor lives.

    cuBLAS's workspaces are among it: one of 32 MiB that was cut from a segment of gigabytes keeps all of that
    reserved. They are made anew at the next product.

    Parameters
    ----------
    torch
        The module.
    """
    gc.collect()
    torch.cuda.synchronize()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    torch.cuda.empty_cache()


@contextmanager
def _stacks(torch: Any, wanted: bool) -> Iterator[None]:
    """Record the stack of what lives, unless a history is being recorded already."""
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", lambda: True)()
    if not wanted or enabled:
        yield
        return
    torch.cuda.memory._record_memory_history("state", context="state", stacks="python")
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None)


def _let_go(error: BaseException | None) -> None:
    """Empty the frames that an error went through, and those of the errors that it followed."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
