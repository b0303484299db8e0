"""The operations of a call that would launch work, counted without a device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

from gpucourse.arguments import refuse_deferred
from gpucourse.streams import compiler_aside, launches

__all__ = [
    "LaunchCount",
    "count_launches",
    "refuse_result",
]


def refuse_result(fn: object, who: str) -> None:
    """Raise TypeError where `fn` cannot be called, or where calling it runs nothing."""
    if not callable(fn):
        raise TypeError(
            f"{who} calls a function itself, found {type(fn).__name__}: pass torch.matmul and its arguments, "
            "or lambda: x @ x, not the result"
        )
    refuse_deferred(fn, who)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCount:
    """Operations that would launch work on a device, counted without one.

    Attributes
    ----------
    operations
        Names of the operations that compute or copy, in order.
    views
        Names of those that only look at memory differently, or only allocate, and launch nothing.
    host
        Names of those on host tensors alone, in a call that works on a device too: they launch nothing there.
    empty
        Names of those whose results have no element: PyTorch returns before it launches anything.
    """

    operations: tuple[str, ...]
    views: tuple[str, ...]
    host: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many operations would launch; each may launch one kernel or several."""
        return len(self.operations)

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} × {times}" for name, times in Counter(self.operations).items())
        counted = f"{self.count} operations would launch ({kinds or 'none'})"
        return f"{counted}; {len(self.views)} views launch nothing"


def count_launches(fn: Callable[..., Any], *args: Any) -> LaunchCount:
    """Count the operations of ``fn(*args)`` that would launch work, on any device, a CPU or "meta" included.

    Parameters
    ----------
    fn, *args
        What to call, once.

    Returns
    -------
    LaunchCount
        Counted below autograd, so a backward pass inside `fn` is included. An operation may launch several
        kernels, or a fused one may stand for several: on a GPU, `trace` shows which. What `fn` leaves to threads
        of its own is not seen.

    Raises
    ------
    TypeError
        `fn` cannot be called, or is a generator's or a coroutine's function, whose call runs nothing.
    ModuleNotFoundError
        torch is not installed.
    """
    refuse_result(fn, "count_launches")
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"count_launches counts torch's operations: {error}. Install torch (a CPU build is enough).",
            name=error.name,
        ) from error
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    seen: list[tuple[str, str, set[str]]] = []  # name, "view", "empty" or "launch", devices of its tensors

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.namespace != "profiler":  # the marks that optimizers put around their steps
                name = func.overloadpacket.__name__
                leaves = tree_leaves((args, kwargs, result))
                devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
                results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
                # Where the size of the result is found by the work itself (nonzero), the work was launched.
                found = torch.Tag.dynamic_output_shape in func.tags
                empty = bool(results) and not found and all(leaf.numel() == 0 for leaf in results)
                kind = "view" if not launches(func) else "empty" if empty else "launch"
                seen.append((name, kind, devices))
            return result

    with compiler_aside(), Counting():  # type: ignore[no-untyped-call]
        fn(*args)
    # Beside work on a device, an operation on host tensors alone (an optimizer's step counter) launches nothing.
    beside = any(devices - {"cpu"} for _, _, devices in seen)
    host = {"cpu"} if beside else None
    return LaunchCount(
        operations=tuple(name for name, kind, on in seen if kind == "launch" and on != host),
        views=tuple(name for name, kind, _ in seen if kind == "view"),
        host=tuple(name for name, kind, on in seen if kind == "launch" and on == host),
        empty=tuple(name for name, kind, _ in seen if kind == "empty"),
    )
