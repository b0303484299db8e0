"""What is alive in this process that torch made: storages, and the nodes of autograd graphs.

A `Census` counts without holding on to anything: storages are known by weak references of torch's own, nodes by a
mark in their metadata, which lives and dies with the node. Storages are found behind the tensors that Python sees
and behind those that only a graph saves; a graph that has been freed by a backward pass saves none.

`Origins` says which line made what: while it is entered, storages are noted as operators return them, and nodes by
the traceback that torch's anomaly mode writes on each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import linecache
import re
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "Born",
    "Census",
    "Count",
    "Frozen",
    "Made",
    "Origins",
    "Site",
    "packed",
    "saved_tensors",
    "storages_of",
]

# Frames of these are never what the reader wrote.
_OWN = tuple(
    str(Path(__file__).with_name(name))
    for name in ("live_memory.py", "holders.py", "suspects.py", "retention.py")
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A line of code.

    Attributes
    ----------
    file, line, function
        Where it stands.
    """

    file: str
    line: int
    function: str

    @property
    def code(self) -> str:
        """The line's text; empty where the source cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        name = re.sub(r"^.*[/\\]", "", self.file)
        return f"{name}:{self.line} in {self.function}" + (f": {self.code}" if self.code else "")


@dataclasses.dataclass(slots=True)
class Born:
    """A storage that lives: a weak reference, its size, where it lies, the step in which it was first seen."""

    ref: Any
    nbytes: int
    device: str
    step: int
    nbytes_first: int


@dataclasses.dataclass(slots=True)
class Made:
    """A storage as an operator returned it: the line, the step, its size, shape and dtype."""

    ref: Any
    site: Site | None
    step: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What one look found.

    Attributes
    ----------
    host_bytes, device_bytes
        In storages on the CPU and on accelerators, each storage once.
    nodes
        Graph nodes.
    """

    host_bytes: int
    device_bytes: int
    nodes: int


class _Kinds(dict[type, str]):
    """Which types are tensors and which are nodes, asked once a type: a process has some 100,000 objects."""

    def __missing__(self, kind: type) -> str:
        import torch

        # The class of an object, never the object: some libraries import or warn when theirs are looked at.
        if issubclass(kind, torch.Tensor):
            found = "tensor"
        elif issubclass(kind, torch._C._FunctionBase) or _is_node(kind):
            found = "node"
        else:
            found = ""
        self[kind] = found
        return found


def _is_node(kind: type) -> bool:
    # torch makes its nodes' types in C++, and not all of them pass for its abstract Node (CopySlices does not).
    return kind.__module__ in ("builtins", "torch._C._functions") and hasattr(kind, "next_functions")


def storages_of(tensor: Any) -> list[Any]:
    """Give the storages that a tensor's values lie in.

    Parameters
    ----------
    tensor
        Of any layout; one that has no memory of its own (a wrapper around others, a fake or a meta
        tensor, a lazy module's parameter before its first call) has none.

    Returns
    -------
    list of torch.UntypedStorage
        One for a strided tensor, one for each part of a sparse one.
    """
    import torch

    try:
        if tensor.layout == torch.strided:
            parts = [tensor]
        elif tensor.layout == torch.sparse_coo:
            parts = [tensor._indices(), tensor._values()]
        else:
            names = ("crow_indices", "ccol_indices", "col_indices", "row_indices", "values")
            parts = []
            for name in names:
                with contextlib.suppress(RuntimeError):
                    parts.append(getattr(tensor, name)())
        found = [part.untyped_storage() for part in parts]
        return [storage for storage in found if storage.device.type != "meta"]
    except (NotImplementedError, RuntimeError, TypeError, AttributeError, ValueError):
        return []


_saved_names: dict[type, tuple[str, ...]] = {}


def saved_tensors(node: Any) -> Iterator[Any]:
    """Yield the tensors that a graph node saves for its backward pass.

    Parameters
    ----------
    node
        A `torch.autograd.graph.Node`; a leaf's own counts as saving it. Hooks that would unpack (and recompute) are
        not run: what a hook packed is a Python object, and found as one.
    """
    import torch

    for saved in _saved(node):
        try:
            data = saved.data
        except (AttributeError, RuntimeError):
            continue
        if issubclass(type(data), torch.Tensor):
            yield data
    if type(node).__name__ == "AccumulateGrad":  # the graph's end keeps the leaf that it is for
        yield node.variable


def packed(node: Any) -> Iterator[Any]:
    """Yield what saved-tensor hooks left in a graph node: what they packed, and the function that unpacks it.

    Parameters
    ----------
    node
        A `torch.autograd.graph.Node`.
    """
    for saved in _saved(node):
        try:
            hook = saved.unpack_hook
        except (AttributeError, RuntimeError):
            continue
        if hook is not None:
            yield hook
            yield saved.data


def _saved(node: Any) -> Iterator[Any]:
    kind = type(node)
    names = _saved_names.get(kind)
    if names is None:
        names = tuple(name for name in dir(node) if name.startswith("_raw_saved_"))
        _saved_names[kind] = names
    for name in names:
        try:
            raw = getattr(node, name)
        except RuntimeError:  # freed by a backward pass
            continue
        yield from raw if isinstance(raw, tuple | list) else (raw,)


class Frozen:
    """Sets aside what the process holds already, so that collections and looks only see what is new.

    A full collection goes over every object of the process, some 0.2 s where torch is loaded; the objects that were
    there before the loop ran need it once. What they hold still counts as held.
    """

    def __init__(self) -> None:
        self.on = False

    def freeze(self) -> None:
        """Set aside what there is, unless the program has frozen objects of its own."""
        if gc.get_freeze_count() == 0:
            gc.freeze()
            self.on = True

    def thaw(self) -> None:
        """Bring it back; the second time it does nothing."""
        if self.on:
            gc.unfreeze()
            self.on = False


_censuses = itertools.count(1)


class Census:
    """Counts what lives after each step, and remembers when each storage and node was first seen.

    What exists when the census is made counts as of step 0.
    """

    def __init__(self) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef
        from torch.utils.weak import TensorWeakRef

        self._kinds = _Kinds()
        self.weak_storage: Any = StorageWeakRef
        # Not its identity: a later census may get that of one that is gone, and take its marks for its own.
        self.key = f"gpucourse.census.{next(_censuses)}"
        self._next = 0
        self.traced = False
        self.born: dict[int, Born] = {}
        tensors, nodes = self.objects()
        # After a freeze these are out of the collector's sight. A tensor's own weak reference is used because
        # torch may hand a tensor's Python object over to C++ and back, which ends ordinary ones.
        self._before = [TensorWeakRef(tensor) for tensor in tensors]
        self._nodes_before = []
        for node in nodes:
            with contextlib.suppress(TypeError):
                self._nodes_before.append(weakref.ref(node))
        del tensors, nodes
        self.frozen = False

    def objects(self) -> tuple[list[Any], list[Any]]:
        """Give the tensors and the graph nodes that Python sees now; the lists hold them, so drop them soon."""
        kinds = self._kinds
        tensors: list[Any] = []
        nodes: list[Any] = []
        for item in gc.get_objects():
            kind = kinds[type(item)]
            if kind:
                (tensors if kind == "tensor" else nodes).append(item)
        if getattr(self, "frozen", False):
            tensors += [tensor for ref in self._before if (tensor := ref()) is not None]
            nodes += [node for weak in self._nodes_before if (node := weak()) is not None]
        # A gradient that Python never looked at has no Python object yet.
        known = {id(tensor) for tensor in tensors}
        for tensor in list(tensors):
            with contextlib.suppress(RuntimeError):
                if tensor.is_leaf and (gradient := tensor.grad) is not None and id(gradient) not in known:
                    known.add(id(gradient))
                    tensors.append(gradient)
        return tensors, nodes

    def mark(self, node: Any, step: int) -> tuple[int, int]:
        """Give a node's number and the step in which it was first seen; writes both on the node the first time."""
        metadata = node.metadata
        if self.traced:
            # Anomaly mode ties a gradient's nodes to those whose gradient they are, which would keep these alive.
            metadata.pop("parent_", None)
        found: tuple[int, int] | None = metadata.get(self.key)
        if found is None:
            self._next += 1
            found = metadata[self.key] = (self._next, step)
        return found

    def walk(self, tensors: Iterable[Any], nodes: Iterable[Any], step: int) -> dict[int, Any]:
        """Find every graph node that tensors and nodes reach, by number; the result holds them, so drop it soon."""
        found: dict[int, Any] = {}
        waiting = list(nodes)
        for tensor in tensors:
            try:
                node = tensor.grad_fn
            except RuntimeError:  # a view whose base was written in a way that forbids it a gradient
                continue
            if node is not None:
                waiting.append(node)
        while waiting:
            node = waiting.pop()
            try:
                number = self.mark(node, step)[0]
                following = node.next_functions
            except (AttributeError, RuntimeError):  # a context that never became a node
                continue
            if number not in found:
                found[number] = node
                waiting.extend(child for child, _ in following if child is not None)
        return found

    def take(self, step: int) -> Count:
        """Look once: what is new counts as born in `step`."""
        tensors, nodes = self.objects()
        graph = self.walk(tensors, nodes, step)
        seen: dict[int, tuple[int, str]] = {}
        for tensor in tensors:
            self._see(tensor, seen, step)
        for node in graph.values():
            for tensor in saved_tensors(node):
                self._see(tensor, seen, step)
        for cdata in [cdata for cdata in self.born if cdata not in seen]:
            del self.born[cdata]
        host = sum(nbytes for nbytes, device in seen.values() if device == "cpu")
        return Count(
            host_bytes=host,
            device_bytes=sum(nbytes for nbytes, _ in seen.values()) - host,
            nodes=len(graph),
        )

    def _see(self, tensor: Any, seen: dict[int, tuple[int, str]], step: int) -> None:
        for storage in storages_of(tensor):
            cdata, nbytes = storage._cdata, storage.nbytes()
            if cdata in seen or not nbytes:
                continue
            device = storage.device.type
            seen[cdata] = (nbytes, device)
            known = self.born.get(cdata)
            if known is None or known.ref.expired():
                # A weak reference keeps the address from being given to another storage, not the memory.
                self.born[cdata] = Born(self.weak_storage(storage), nbytes, device, step, nbytes)
            else:
                known.nbytes = nbytes

    def forget(self, graph: Iterable[Any]) -> None:
        """Take the marks off nodes, and anomaly mode's tracebacks where `Origins` had them written."""
        for node in graph:
            with contextlib.suppress(AttributeError, RuntimeError):
                metadata = node.metadata
                for key in [k for k in metadata if str(k).startswith(self.key)]:
                    del metadata[key]
                if self.traced:
                    metadata.pop("traceback_", None)


# ----------------------------------------------------------------------------------------------------- origins


def _torch_folder() -> str:
    import torch

    return str(Path(torch.__file__).parent)


def _caller(frame: types.FrameType | None, torch_folder: str) -> Site | None:
    """Give the innermost line that is neither torch's nor this instrument's."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith((torch_folder, "<frozen")) or file in _OWN):
            return Site(file=file, line=frame.f_lineno, function=frame.f_code.co_name)
        frame = frame.f_back
    return None


_FRAME = re.compile(r'^  File "(.*)", line (\d+), in (.*)$')


class Origins(contextlib.AbstractContextManager["Origins"]):
    """While it is entered, notes the line that makes each storage and each graph node, and what backward is told.

    It slows the loop and keeps compiled code from running, so it is for a step or two.
    """

    def __init__(self, census: Census) -> None:
        self.census = census
        self.step = 0
        self.made: dict[int, Made] = {}
        self._torch = _torch_folder()
        self._thread = threading.get_ident()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Origins:
        import torch
        from torch.utils import _python_dispatch

        mode: Any = _python_dispatch.TorchDispatchMode

        origins = self

        class Watch(mode):  # type: ignore[misc]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                origins.note(args, kwargs, result)
                return result

        with contextlib.ExitStack() as stack:
            was, check = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
            stack.callback(torch.autograd.set_detect_anomaly, was, check)
            torch.autograd.set_detect_anomaly(True, check_nan=check and was)
            self.census.traced = not was
            for name, place in (("backward", 2), ("grad", 3)):
                stack.enter_context(_listening(torch.autograd, name, place, self.census.key))
            watch: Any = Watch
            stack.enter_context(watch())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def note(self, args: Any, kwargs: Any, result: Any) -> None:
        """Note who made the storages of an operator's result that were not its arguments'."""
        import torch

        # Not torch's own tree functions: they may dispatch in turn, and arguments are flat or lists of tensors.
        given = {storage._cdata for tensor in _flat(args, kwargs) for storage in storages_of(tensor)}
        site: Site | None = None
        for tensor in _flat(result):
            if not issubclass(type(tensor), torch.Tensor):
                continue
            for storage in storages_of(tensor):
                cdata = storage._cdata
                known = self.made.get(cdata)
                if cdata in given or cdata in self.census.born or (known and not known.ref.expired()):
                    continue
                site = site or self._site()
                ref = self.census.weak_storage(storage)
                self.made[cdata] = Made(
                    ref, site, self.step, storage.nbytes(), tuple(tensor.shape), str(tensor.dtype)
                )

    def _site(self) -> Site | None:
        found = _caller(sys._getframe(1), self._torch)
        if found is None and threading.get_ident() != self._thread:
            # Backward passes on an accelerator run in threads of their own, while the loop's waits in backward().
            found = _caller(sys._current_frames().get(self._thread), self._torch)
        return found

    def node_site(self, node: Any) -> Site | None:
        """Give the line that made a graph node, by anomaly mode's traceback on it."""
        for entry in reversed(node.metadata.get("traceback_") or []):
            found = _FRAME.match(entry.split("\n")[0])
            if found and not (found[1].startswith((self._torch, "<frozen")) or found[1] in _OWN):
                return Site(file=found[1], line=int(found[2]), function=found[3])
        return None

    def kept_by_backward(self, node: Any) -> str:
        """Give "retain_graph" or "create_graph" where a backward pass from this node was told so, else ""."""
        return str(node.metadata.get(f"{self.census.key}.backward") or "")


def _flat(*values: Any) -> Iterator[Any]:
    import torch

    for value in values:
        if isinstance(value, tuple | list):
            yield from _flat(*value)
        elif isinstance(value, dict):
            yield from _flat(*value.values())
        elif issubclass(type(value), torch.Tensor):
            yield value


@contextlib.contextmanager
def _listening(module: Any, name: str, place: int, key: str) -> Iterator[None]:
    """Write on the nodes that a backward pass starts from whether it was told to keep the graph."""
    plain = getattr(module, name)

    def listening(*args: Any, **kwargs: Any) -> Any:
        retain, create = (
            kwargs.get(word, args[at] if len(args) > at else None)
            for word, at in (("retain_graph", place), ("create_graph", place + 1))
        )
        result = plain(*args, **kwargs)
        if retain or create:
            roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs", ()))
            said = "create_graph" if create else "retain_graph"
            # Where gradients get graphs of their own, those need not reach the graph that the pass started from.
            for tensor in _flat(roots, result):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.metadata[f"{key}.backward"] = said
        return result

    setattr(module, name, listening)
    try:
        yield
    finally:
        setattr(module, name, plain)
