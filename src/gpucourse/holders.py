"""Who holds an object, in words: the way from it to a name that the program wrote.

The garbage collector knows which objects refer to which. From a tensor the way leads outwards, a list, a dict, an
attribute, until it reaches a name: a global, a local variable of a function that runs, a variable that a closure
keeps. Locals of running functions are not the collector's to see, so they are read from the frames themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import sys
import types
from collections import deque
from typing import Any, Literal

from gpucourse.live_memory import _OWN

__all__ = ["Link", "Path", "find_path", "held_by_hooks", "locals_of_running"]

Kind = Literal[
    "sequence",
    "mapping",
    "attribute",
    "module attribute",
    "context",
    "closure",
    "default",
    "frame",
    "generator",
    "exception",
    "traceback",
    "global",
    "local",
    "class",
    "function",
    "method",
    "partial",
    "cache",
    "gradient",
    "other",
]

DEPTH = 14  # steps from a tensor to a name; longer ways are told as far as they were followed
WIDTH = 400  # objects looked at in one round: what is held by more is held by a registry, not by a loop


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One step of the way: what holds, and under which name.

    Attributes
    ----------
    kind
        What sort of holder.
    name
        A variable's, attribute's or function's name; empty where it has none.
    words
        The step in words.
    holder
        The identity of the object that holds.
    """

    kind: Kind
    name: str
    words: str
    holder: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The way from an object to a name.

    Attributes
    ----------
    links
        From the object outwards.
    rooted
        Whether the way ends at a name, or only where it was no longer followed.
    """

    links: tuple[Link, ...]
    rooted: bool

    @property
    def words(self) -> str:
        """The way in words, the innermost holder first."""
        said: list[str] = []
        for link in self.links:
            if link.words and (not said or said[-1] != link.words):
                said.append(link.words)
        return ", in ".join(said)

    def has(self, *kinds: Kind) -> Link | None:
        """Give the innermost link of one of these kinds."""
        return next((link for link in self.links if link.kind in kinds), None)


# ---------------------------------------------------------------------------------------------- the edges' names


def _called(function: Any) -> str:
    name = getattr(function, "__name__", _type_name(function))
    return "a lambda" if name == "<lambda>" else f"{name}()"


def _type_name(item: Any) -> str:
    return type(item).__name__


def _attributes(item: Any) -> dict[str, Any]:
    """Give what an instance holds by name, without running code of its own."""
    found: dict[str, Any] = {}
    try:
        instance = object.__getattribute__(item, "__dict__")
        if type(instance) is dict:
            found.update(instance)
    except (AttributeError, TypeError):
        pass
    for kind in type(item).__mro__:
        for name in kind.__dict__.get("__slots__", ()) if "__slots__" in kind.__dict__ else ():
            slot = kind.__dict__.get(name)
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    found[name] = slot.__get__(item, kind)
                except AttributeError:
                    continue
    return found


def _key_of(mapping: dict[Any, Any], child: Any) -> Any:
    return next((key for key, value in mapping.items() if value is child), None)


def _frame_local(frame: types.FrameType, child: Any) -> str:
    names = frame.f_locals
    found = next((name for name, value in names.items() if value is child), "")
    _let_go(frame, names)
    return found


def _let_go(frame: types.FrameType, names: Any) -> None:
    """Empty a frame's copy of its locals, unless the program has it, too (by `locals()`).

    Before Python 3.13 a frame keeps the copy that it gives, which would hold what it names; later ones make none.
    """
    mine = 4  # references: the frame's, this function's, the caller's and the one that is counted with
    if (
        type(names) is dict
        and frame.f_code.co_flags & inspect.CO_OPTIMIZED
        and sys.getrefcount(names) <= mine
    ):
        names.clear()


def _is_globals(mapping: dict[Any, Any]) -> bool:
    return "__name__" in mapping and ("__builtins__" in mapping or "__spec__" in mapping)


def _is_module(item: Any) -> bool:
    import torch

    return issubclass(type(item), torch.nn.Module)


def _attribute_link(owner: Any, name: str) -> Link:
    import torch

    if issubclass(type(owner), torch._C._FunctionBase):
        function = _type_name(owner).removesuffix("Backward")
        return Link(
            kind="context", name=name, words=f"`{name}` on ctx of Function {function}", holder=id(owner)
        )
    if issubclass(type(owner), BaseException):
        return Link(
            kind="exception",
            name=_type_name(owner),
            words=f"`{name}` of a {_type_name(owner)}",
            holder=id(owner),
        )
    kind: Kind = "module attribute" if _is_module(owner) else "attribute"
    return Link(kind=kind, name=name, words=f"attribute `{name}` of {_type_name(owner)}", holder=id(owner))


def _link(child: Any, parent: Any) -> Link | None:  # one case an object's kind
    """Say how `parent` holds `child`; None where it is no holder to speak of."""
    import torch

    at, kind = id(parent), type(parent)
    if kind is dict:
        if _is_globals(parent):
            name = _key_of(parent, child)
            module = parent.get("__name__")
            return Link(kind="global", name=str(name), words=f"global `{name}` of {module}", holder=at)
        key = _key_of(parent, child)
        return Link(kind="mapping", name=str(key), words=f"a dict of {len(parent)}", holder=at)
    if issubclass(kind, dict):
        return Link(kind="mapping", name="", words=f"a {kind.__name__} of {len(parent)}", holder=at)
    if issubclass(kind, list | tuple | set | frozenset | deque):
        return Link(kind="sequence", name="", words=f"a {kind.__name__} of {len(parent)}", holder=at)
    if kind is types.CellType:
        return Link(kind="closure", name="", words="", holder=at)
    if kind is types.FunctionType:
        return _function_link(child, parent)
    if kind is types.MethodType:
        return Link(kind="method", name=parent.__name__, words=f"bound method `{parent.__name__}`", holder=at)
    if kind is types.FrameType:
        if parent.f_code.co_filename in _OWN:
            return None
        name = _frame_local(parent, child)
        words = f"local `{name}` of {parent.f_code.co_name}(), line {parent.f_lineno}"
        return Link(kind="frame", name=name, words=words, holder=at)
    if kind is types.TracebackType:
        return Link(kind="traceback", name="", words="a traceback", holder=at)
    if kind in (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType):
        code = getattr(parent, "gi_code", None) or getattr(parent, "cr_code", None) or parent.ag_code
        frame = getattr(parent, "gi_frame", None) or getattr(parent, "cr_frame", None)
        name = _frame_local(frame, child) if frame is not None else ""
        words = (f"local `{name}` of " if name else "") + f"the suspended {kind.__name__} {code.co_name}()"
        return Link(kind="generator", name=code.co_name, words=words, holder=at)
    if issubclass(kind, functools.partial):
        return Link(kind="partial", name="", words="a partial", holder=at)
    if kind.__name__ == "_lru_cache_wrapper":
        name = getattr(parent, "__name__", "")
        return Link(kind="cache", name=name, words=f"the lru_cache of {name}()", holder=at)
    if kind is types.ModuleType:
        return Link(kind="global", name=parent.__name__, words=f"module {parent.__name__}", holder=at)
    if issubclass(kind, type):
        name = next((n for n, value in vars(parent).items() if value is child), "")
        return Link(
            kind="class", name=name, words=f"class attribute `{name}` of {parent.__name__}", holder=at
        )
    if issubclass(kind, BaseException):
        name = kind.__name__
        return Link(kind="exception", name=name, words=f"a {name}", holder=at)
    names = _attributes(parent)
    name = next((n for n, value in names.items() if value is child), "")
    if name:
        return _attribute_link(parent, name)
    if issubclass(kind, torch.Tensor):
        return Link(kind="other", name="", words="a tensor", holder=at)
    return Link(kind="other", name="", words=f"a {kind.__name__}", holder=at)


def _function_link(child: Any, function: types.FunctionType) -> Link | None:
    at = id(function)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        if cell is child or function.__closure__ is child:
            words = f"`{name}`, a closure variable of {_called(function)}" if cell is child else ""
            return Link(kind="closure", name=name if cell is child else "", words=words, holder=at)
    if function.__defaults__ is child or function.__kwdefaults__ is child:
        return Link(kind="default", name="", words=f"a default of {_called(function)}", holder=at)
    if function.__globals__ is child:
        return None
    return Link(kind="function", name=function.__name__, words=f"function {_called(function)}", holder=at)


# --------------------------------------------------------------------------------------------------- the search


def locals_of_running() -> dict[int, Link]:
    """Name what the functions that run now hold in local variables, by the identity of the object.

    Returns
    -------
    dict
        Identity of an object to the link that names it; a function's own copies are let go at once.
    """
    found: dict[int, Link] = {}
    # One of the frames is this function's own. No name for it may be left, or it would hold itself and with it all
    # that its callers hold, until the next collection: `frame` ends as None.
    frame: types.FrameType | None
    for frame in list(sys._current_frames().values()):
        while frame is not None:
            code = frame.f_code
            if (
                code.co_filename not in _OWN and code.co_flags & inspect.CO_OPTIMIZED
            ):  # a module's own names are globals
                names = frame.f_locals
                for name, value in names.items():
                    words = f"`{name}`, a local of {code.co_name}()"
                    link = Link(kind="local", name=name, words=words, holder=id(frame))
                    found.setdefault(id(value), link)
                value = None
                _let_go(frame, names)
            frame = frame.f_back
    return found


@dataclasses.dataclass(slots=True)
class _Way:
    """An object that was reached, the object that it holds, and how."""

    item: Any
    before: int
    link: Link | None


def find_path(
    item: Any, running: dict[int, Link], ends: frozenset[int], ignore: frozenset[int]
) -> Path | None:
    """Follow an object's holders outwards to the nearest name.

    Parameters
    ----------
    item
        What is held.
    running
        `locals_of_running`.
    ends
        Identities of objects whose own name needs no telling: the loop's body.
    ignore
        Identities of what belongs to the search itself.

    Returns
    -------
    Path or None
        The shortest way to a name; the longest that was found where none reaches a name; None where nothing in
        Python holds it (a graph may).
    """
    ways = [_Way(item, -1, None)]
    where = {id(item): 0}
    level = [0]
    rooted: int | None = None
    for _ in range(DEPTH):
        if id(item) in running or not level:
            break
        objects = [ways[index].item for index in level]
        referrers = gc.get_referrers(*objects)
        own = ignore | {id(ways), id(where), id(level), id(objects), id(referrers)}
        following: list[int] = []
        for referrer in referrers[:WIDTH]:
            if id(referrer) in own or id(referrer) in where or type(referrer) is _Way:
                continue
            held = {id(child) for child in gc.get_referents(referrer)}
            child = next((index for index in level if id(ways[index].item) in held), None)
            if child is None:
                continue
            link = _link(ways[child].item, referrer)
            if link is None:
                continue
            where[id(referrer)] = len(ways)
            following.append(len(ways))
            ways.append(_Way(referrer, child, link))
        del objects, referrers
        best = sorted(
            (rank, index) for index in following if (rank := _end(ways, index, running, ends)) is not None
        )
        if best:
            rooted = best[0][1]
            break
        level = following
    if len(ways) == 1:
        only = running.get(id(item))
        return Path(links=(only,), rooted=True) if only else None
    index = rooted if rooted is not None else len(ways) - 1
    last = running.get(id(ways[index].item))
    links = [last] if last is not None else []
    while index > 0:
        link, index = _told(ways, index)
        links.append(link)
    return Path(links=tuple(reversed(links)), rooted=rooted is not None)


def _end(ways: list[_Way], index: int, running: dict[int, Link], ends: frozenset[int]) -> int | None:
    """Rank a holder as the end of a way, the best 0; None where the way goes on."""
    way = ways[index]
    assert way.link is not None
    if way.link.kind == "global" and way.link.name != "None":
        return 0
    if id(way.item) in running:
        return 1
    if id(way.item) in ends:
        return 2
    if way.link.kind == "closure" and way.link.name:
        # A closure that is itself kept somewhere by the loop is the leak: its own holder is asked for, too.
        return None
    return 3 if way.link.kind == "class" and way.link.name else None


def _told(ways: list[_Way], index: int) -> tuple[Link, int]:
    """Tell a link, and which comes next inwards: an instance and its dict are one, a function and its cells too."""
    way = ways[index]
    link, inner = way.link, ways[way.before]
    assert link is not None
    if type(way.item) is types.FunctionType and type(inner.item) is tuple and inner.before > 0:
        cell = ways[inner.before].item
        if way.item.__defaults__ is inner.item:
            return link, inner.before
        names = zip(way.item.__code__.co_freevars, way.item.__closure__ or (), strict=False)
        name = next((name for name, held in names if held is cell), "")
        if name:
            words = f"`{name}`, a closure variable of {_called(way.item)}"
            return Link(kind="closure", name=name, words=words, holder=link.holder), ways[inner.before].before
    if type(inner.item) is dict and inner.link is not None:
        try:
            own = object.__getattribute__(way.item, "__dict__") is inner.item
        except (AttributeError, TypeError):
            own = False
        if own and type(way.item) is not types.ModuleType:
            return _attribute_link(way.item, inner.link.name), inner.before
        if (
            issubclass(type(way.item), type)
            and vars(way.item).get(inner.link.name) is ways[inner.before].item
        ):
            name = inner.link.name
            words = f"class attribute `{name}` of {way.item.__name__}"
            return Link(kind="class", name=name, words=words, holder=link.holder), inner.before
    return link, way.before


# ---------------------------------------------------------------------------------------------------------- hooks


_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


def held_by_hooks() -> dict[int, str]:
    """Say which objects the hooks of living modules keep at hand, by identity.

    Returns
    -------
    dict
        Identity of a list, dict or other object that a hook's closure, defaults, instance or globals name, to the
        hook and its module in words.
    """
    import torch
    from torch.nn.modules import module as of_all_modules

    found: dict[int, str] = {}

    def add(hooks: Any, kind: str, where: str) -> None:
        for hook in list(hooks.values()) if isinstance(hooks, dict) else ():
            name = getattr(hook, "__name__", None) or getattr(
                getattr(hook, "func", None), "__name__", _type_name(hook)
            )
            for item in _at_hand(hook):
                found.setdefault(id(item), f"the {kind} {name}() on {where}")

    kinds: dict[type, bool] = {}
    tensors: dict[type, bool] = {}
    for item in gc.get_objects():
        kind = type(item)
        if kind not in kinds:
            kinds[kind] = issubclass(kind, torch.nn.Module)
            tensors[kind] = issubclass(kind, torch.Tensor)
        if kinds[kind]:
            held = _attributes(item)
            for name, words in _HOOKS.items():
                add(held.get(name), words, _type_name(item))
        elif tensors[kind]:
            add(object.__getattribute__(item, "_backward_hooks"), "hook", "a tensor's gradient")
    for name, words in _HOOKS.items():
        add(getattr(of_all_modules, f"_global{name}", None), words, "every module")
    return found


def _at_hand(hook: Any) -> list[Any]:
    """Give the objects that a hook can put something into: containers and instances, not modules of code."""
    found: list[Any] = []
    while isinstance(hook, functools.partial):
        found += [*hook.args, *hook.keywords.values()]
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    function = getattr(hook, "__func__", hook)
    if type(function) is not types.FunctionType:
        owner, function = hook, vars(type(hook)).get("__call__")
    names: tuple[str, ...] = ()
    if type(function) is types.FunctionType:
        names = function.__code__.co_names
        for cell in function.__closure__ or ():
            try:
                found.append(cell.cell_contents)
            except ValueError:  # not bound yet
                continue
        found += function.__defaults__ or ()
        found += (function.__kwdefaults__ or {}).values()
        found += [function.__globals__[name] for name in names if name in function.__globals__]
    if owner is not None:
        held = _attributes(owner)
        found += [held[name] for name in names if name in held]
    # One level further: the attributes of an instance that the hook's code names.
    for item in list(found):
        held = _attributes(item)
        found += [held[name] for name in names if name in held]
    plain = (str, int, float, bool, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
    return [
        item
        for item in found
        if item is not None and not issubclass(type(item), plain) and not _is_module(item)
    ]
