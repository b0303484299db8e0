"""How a checkpoint is declared, run and judged.

A checkpoint is one function ``f(answer, rng)`` that either returns (right) or raises `Wrong` with the likely
slip named. Everything that a learner's object can do to it, from returning text to calling ``sys.exit``, is
met here, so that a checker only has to state what is right.

The verdict is plain data and the checker a function of ``(answer, rng)`` alone: a grader can run the two in
different processes without any change to the checkers.
"""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import difflib
import functools
import html
import importlib
import inspect
import math
import pkgutil
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, Literal

import numpy as np

Status = Literal["right", "wrong", "unanswered"]
Checker = Callable[[Any, np.random.Generator], "str | None"]

_ID = re.compile(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*")
_REGISTRY: dict[str, Checker] = {}

# False while a check runs, True once the learner's function has given a real value in it: a `None` that comes
# after that is a branch without a return, not an exercise that has not been begun. None outside a check.
_has_answered: contextvars.ContextVar[bool | None] = contextvars.ContextVar("has_answered", default=None)


class Wrong(Exception):  # noqa: N818 - it is a verdict that travels as an exception, not a fault
    """Raised by a checker: the answer is wrong, and the text names the likely slip.

    The text is shown to the learner. It says what was given or returned and for which input, never what the
    right value is.
    """


class _Unanswered(Exception):  # noqa: N818 - see Wrong
    """The placeholder is still there; the text says where."""


class UnknownCheckpointError(LookupError):
    """No checkpoint has this id; the text lists the nearest ones."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What `check` found.

    Attributes
    ----------
    checkpoint : str
        The id that was checked.
    status : {"right", "wrong", "unanswered"}
        The grade.
    message : str
        One or two sentences for the learner; words in backticks are code.
    """

    checkpoint: str
    status: Status
    message: str

    def __post_init__(self) -> None:
        # A learner's text may hold half of a pair of code units, which no page and no terminal can be sent.
        sendable = self.message.encode("utf-8", "backslashreplace").decode("utf-8")
        object.__setattr__(self, "message", sendable)

    def __repr__(self) -> str:
        sign, word, _ = _FACES[self.status]
        return f"{sign} {word} ({self.checkpoint}). {self.message}".rstrip()

    def _repr_html_(self) -> str:
        sign, word, colour = _FACES[self.status]
        text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(self.message)).replace("\n", "<br>")
        # Text keeps the page's own colour and background; the bar's three mid-tones stand at 3:1 or more on
        # white and on the dark theme, and the sign and the word say the same without colour.
        return (
            f'<div role="status" class="gpucourse-verdict" data-status="{self.status}" '
            f'style="border:1px solid {colour};border-left-width:.4em;border-radius:.25em;'
            'padding:.5em .8em;margin:.5em 0;color:inherit;overflow-wrap:anywhere">'
            f'<strong><span aria-hidden="true">{sign} </span>{word}</strong> '
            f"<code>{html.escape(self.checkpoint)}</code><br>{text}</div>"
        )


_FACES: dict[str, tuple[str, str, str]] = {
    "right": ("✓", "Right", "#2a8f4c"),
    "wrong": ("✗", "Not right", "#d1495b"),
    "unanswered": ("…", "Not answered yet", "#7a7f87"),
}


# ------------------------------------------------------------------------------------------ registry


def checkpoint(identifier: str) -> Callable[[Checker], Checker]:
    """Register a checker under ``"key.name"``; ``key`` is the name of the module that it stands in.

    Parameters
    ----------
    identifier : str
        Lower-case, ``key.name``.

    Raises
    ------
    ValueError
        For an id of another form, or one that a different function already has.
    """
    if not isinstance(identifier, str) or not _ID.fullmatch(identifier):
        raise ValueError(
            f"checkpoint id {identifier!r}: wanted 'key.name' in lower case, such as 'kernels.busy'"
        )

    def register(checker: Checker) -> Checker:
        known = _REGISTRY.get(identifier)
        if known is not None and _where(known) != _where(checker):  # a reload registers the same place again
            raise ValueError(
                f"checkpoint {identifier!r} is registered twice: {_where(known)} and {_where(checker)}"
            )
        _REGISTRY[identifier] = checker
        return checker

    return register


def keys() -> list[str]:
    """Return the chapter keys that have checkpoints, in alphabetical order."""
    package = importlib.import_module(__package__)
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def ids(key: str | None = None) -> list[str]:
    """Return the ids of one chapter, or of all, sorted; loads the modules that it needs.

    Parameters
    ----------
    key : str, optional
        A chapter key such as ``"kernels"``.
    """
    for name in keys() if key is None else [key]:
        _load(name)
    return sorted(i for i in _REGISTRY if key is None or i.startswith(f"{key}."))


def check(identifier: str, answer: Any, *, seed: int | None = None) -> Verdict:
    """Judge an answer against a checkpoint, on inputs drawn afresh each time.

    Parameters
    ----------
    identifier : str
        Such as ``"kernels.busy"``.
    answer : object
        What the exercise asks for: a function, a number, a table of numbers. ``...`` or ``None``, also inside
        a list or a dict, and a function that returns one of these or raises ``NotImplementedError``, count
        as not answered yet.
    seed : int, optional
        Draws the same inputs again; for tests.

    Returns
    -------
    Verdict
        Right, wrong with the likely slip, or unanswered. Whatever the answer does, short of a
        ``KeyboardInterrupt`` (passed on, so that an endless loop can be stopped), ends in a verdict.

    Raises
    ------
    UnknownCheckpointError
        For an id that no chapter has; the text lists the nearest.
    TypeError
        If the id is no text, or the checker (a fault of the book's) returned something other than text.
    """
    checker, rng = _find(identifier), np.random.default_rng(seed)
    token = _has_answered.set(False)
    try:
        _look_for_placeholders(answer)
        praise = checker(answer, rng)
    except _Unanswered as blank:
        return Verdict(checkpoint=identifier, status="unanswered", message=_text(blank))
    except Wrong as slip:
        return Verdict(checkpoint=identifier, status="wrong", message=_text(slip))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an object that breaks the reading of it is a wrong answer, not a crash
        # What a learner's function raises is `Wrong` by now, so a module that is missing is the checker's.
        if type(error) is ModuleNotFoundError and isinstance(error.name, str):
            found = f"It cannot be judged here: this check needs {error.name}, which is not installed."
            return Verdict(checkpoint=identifier, status="unanswered", message=found)
        try:
            found = f"The answer, {_kind(answer)}, could not be read: {type(error).__name__}: {_text(error)}"
        except KeyboardInterrupt:
            raise
        except BaseException:  # nor may it break the telling
            found = "The answer could not be read: asked for its type or its text, it fails."
        return Verdict(checkpoint=identifier, status="wrong", message=found)
    finally:
        _has_answered.reset(token)
    if praise is not None and type(praise) is not str:
        raise TypeError(f"checker of {identifier!r} returned {type(praise).__name__}; wanted a str or None")
    return Verdict(checkpoint=identifier, status="right", message=praise or "")


def _find(identifier: str) -> Checker:
    if not isinstance(identifier, str):
        raise TypeError(
            f"check() takes the checkpoint's id first, then the answer; the id was {_kind(identifier)}"
        )
    if identifier not in _REGISTRY and identifier.partition(".")[0] in keys():
        _load(identifier.partition(".")[0])
    if identifier not in _REGISTRY:
        known = ids()
        near = difflib.get_close_matches(identifier, known, n=3, cutoff=0.4)
        raise UnknownCheckpointError(
            f"no checkpoint is called {identifier!r}; "
            + (f"nearest: {', '.join(near)}" if near else f"there are: {', '.join(known) or 'none'}")
        )
    return _REGISTRY[identifier]


def _load(key: str) -> None:
    importlib.import_module(f"{__package__}.{key}")


def _where(checker: Checker) -> str:
    return f"{checker.__module__}.{checker.__qualname__}"


# ---------------------------------------------------------------------------- running a learner's code


def call(answer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a learner's function on copies of the arguments and return what it returns.

    Plain data is copied and compared after the call: numbers, text, lists, tuples, dicts, sets, numpy arrays,
    torch tensors (sharing of storage is kept) and frozen dataclasses of these. Any other object, such as a
    simulated clock or a module, is handed over as it is, so that the checker can read afterwards what was
    done to it.

    Raises
    ------
    Wrong
        If the answer cannot be called, raises, changes its arguments, or returns ``None`` where it returned a
        value for an earlier input. ``KeyboardInterrupt`` is passed on.
    """
    if not callable(answer):
        raise Wrong(f"A function is wanted here; the answer is {_kind(answer)}.")
    storages: dict[int, Any] = {}
    given = _copy((args, kwargs), storages)
    try:
        result = answer(*given[0], **given[1])
    except KeyboardInterrupt:
        raise
    except NotImplementedError as error:
        _blank("raises `NotImplementedError`", error)
    except RecursionError:
        raise Wrong(f"Called with {show(args, kwargs)}, your function never stops calling itself.") from None
    except SystemExit:
        raise Wrong(
            f"Called with {show(args, kwargs)}, your function ends the program; return instead."
        ) from None
    except BaseException as error:
        text = _text(error)
        raise Wrong(
            f"Called with {show(args, kwargs)}, your function raised {type(error).__name__}"
            + (f": {text}" if text else ".")
        ) from None
    if not _same(given, (args, kwargs)):
        raise Wrong(
            f"Your function changed its input: called with {show(args, kwargs)}, it left other values in its "
            "arguments. Work on a copy."
        )
    if inspect.iscoroutine(result):
        result.close()  # else the interpreter warns later, far from here
        raise Wrong("Your function is `async`; a plain one is wanted.")
    if result is None or result is ...:
        _blank(f"returns `{'...' if result is ... else 'None'}`", None, show(args, kwargs))
    if type(result) in (dict, list, tuple) and any(part is ... for part in _parts(result)):
        _blank("leaves a `...` in what it returns", None, show(args, kwargs))
    if _has_answered.get() is False:
        _has_answered.set(True)
    return result


def _parts(result: Any) -> list[Any]:
    """Give the values of a plain container, one level down."""
    return list(result.values()) if type(result) is dict else list(result)


def _blank(what: str, error: BaseException | None, case: str = "") -> None:
    if _has_answered.get():
        raise Wrong(
            f"Your function {what} for {case or 'some inputs'}: a branch without a result."
        ) from error
    raise _Unanswered(f"Your function {what}.") from None


def _look_for_placeholders(answer: Any) -> None:
    """Raise `_Unanswered` where ``...`` or ``None`` is the answer or stands in a list or dict of it."""
    if answer is None or answer is ...:
        raise _Unanswered("Replace the `...` with your answer, then run this cell again.")
    open_, total = _placeholders(answer, depth=8)
    if open_:
        raise _Unanswered(f"{open_} of {total} values still stand at `...`.")


def _placeholders(value: Any, depth: int) -> tuple[int, int]:
    if value is None or value is ...:
        return 1, 1
    # Exact types only: a subclass may iterate forever. The depth bounds a list that contains itself.
    if depth and type(value) in (list, tuple, dict):
        parts = [_placeholders(part, depth - 1) for part in _parts(value)]
        return sum(p[0] for p in parts), sum(p[1] for p in parts)
    return 0, 1


def keyed(value: Any, keys: Iterable[str]) -> dict[str, Any]:
    """Take a dict that holds all of the keys.

    Raises
    ------
    Wrong
        It is no dict, or lacks some of them.
    """
    wanted = list(keys)
    if not isinstance(value, dict):
        raise Wrong(f"A dict with the keys {', '.join(wanted)} is wanted, not {show(value)}.")
    missing = [key for key in wanted if key not in value]
    if missing:
        raise Wrong(f"The dict lacks {', '.join(missing)}.")
    return value


def _torch() -> Any:
    """Torch where something has already loaded it: without that, no argument is a tensor."""
    return sys.modules.get("torch")


def _is_tensor(value: Any) -> bool:
    torch = _torch()
    # Meta and fake tensors hold no values to copy or compare.
    return bool(
        torch is not None
        and type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.device.type in ("cpu", "cuda")
        and value.layout == torch.strided
    )


def _is_facts(value: Any) -> bool:
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and bool(value.__dataclass_params__.frozen)  # type: ignore[attr-defined]
    )


def _copy(value: Any, storages: dict[int, Any]) -> Any:
    again = functools.partial(_copy, storages=storages)
    kind = type(value)
    if kind in (list, set):
        return kind(map(again, value))
    if kind is tuple:
        return tuple(map(again, value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*map(again, value))
    if kind is dict:
        return {k: again(v) for k, v in value.items()}
    if kind is np.ndarray:
        return value.copy()
    if _is_tensor(value):
        # Through the storage, so that two arguments that share memory still share it in the copy.
        whole = value.detach().untyped_storage()
        fresh = storages.setdefault(whole.data_ptr() or id(value), whole.clone())
        twin = value.detach().new_empty(0).set_(fresh, value.storage_offset(), value.shape, value.stride())
        return twin.requires_grad_(value.requires_grad)
    if _is_facts(value):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(twin, field.name, again(getattr(value, field.name)))
        return twin
    return value


def _same(a: Any, b: Any) -> bool:
    """Whether two plain values agree, by exact type and value; NaN agrees with NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if type(a) is dict:
        return list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
    if type(a) is np.ndarray:
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if _is_tensor(a):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        a, b = a.detach(), b.detach()
        return bool(((a == b) | ((a != a) & (b != b))).all())  # `x != x` is true of NaN alone
    if _is_facts(a):
        return all(_same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if type(a) in (int, float, complex, str, bytes, bool, set, frozenset):
        return bool(a == b) or (type(a) is float and a != a and b != b)
    return True  # handed over uncopied: what was done to it is the checker's to judge


# ------------------------------------------------------------------------------------ reading an answer


def number(value: Any, what: str) -> float:
    """Read a finite plain number, or say why it is none.

    Parameters
    ----------
    value : object
        An int, a float, a `fractions.Fraction` or a numpy scalar. A bool, text, an array, a tensor, a
        quantity with a unit, and whatever only claims to be a number are not.
    what : str
        What the number is, with its unit: ``"the busy time in µs"``. It begins the message.

    Raises
    ------
    Wrong
        Naming the type and the remedy.

    Examples
    --------
    >>> number(3, "the launch count")
    3.0
    >>> number("5 GB", "the peak in bytes")
    Traceback (most recent call last):
    ...
    gpucourse...Wrong: The peak in bytes is text, '5 GB'. Give a plain number, without the unit.
    """
    start = what[:1].upper() + what[1:]
    if value is None or value is ...:
        _blank(f"leaves {what} at `{'...' if value is ... else 'None'}`", None)
    if isinstance(value, (bool, np.bool_)):
        raise Wrong(f"{start} is {bool(value)}, a truth value. Give a number.")
    if isinstance(value, (str, bytes)):
        raise Wrong(f"{start} is text, {show(value)}. Give a plain number, without the unit.")
    try:
        if isinstance(value, float):
            found = float.__float__(value)  # not float(value): a subclass may answer anything
        elif isinstance(value, int):
            found = float(int.__int__(value))
        elif isinstance(value, Fraction | np.integer | np.floating):
            found = float(value)
        else:
            raise Wrong(f"{start} is {_kind(value)}. {_remedy(value)}")
    except OverflowError:
        raise Wrong(f"{start} is an integer too large for any machine.") from None
    if not math.isfinite(found):
        raise Wrong(f"{start} is {found}, not a finite number.")
    return float(found)


def whole(value: Any, what: str) -> int:
    """Read a whole number: `number`, and no fraction (``3.0`` is accepted).

    Raises
    ------
    Wrong
        As `number`, and for a fraction.

    Examples
    --------
    >>> whole(54.0, "the microbatch")
    54
    """
    found = number(value, what)
    if found != int(found):
        raise Wrong(f"{what[:1].upper() + what[1:]} is {found:g}; a whole number is wanted.")
    return int(value) if isinstance(value, int) else int(found)  # the integer itself: 2**60 + 1 is no float


def word(value: Any, what: str, among: tuple[str, ...]) -> str:
    """Read one of a few words, whatever its case and outer blanks.

    Raises
    ------
    Wrong
        For another type or word; the message lists the choices.

    Examples
    --------
    >>> word(" Memory ", "the bound", ("memory", "compute"))
    'memory'
    """
    start, choices = what[:1].upper() + what[1:], ", ".join(f"`{a}`" for a in among)
    if value is None or value is ...:
        _blank(f"leaves {what} at `{'...' if value is ... else 'None'}`", None)
    if not isinstance(value, str):
        raise Wrong(f"{start} is {_kind(value)}. Give one of {choices}.")
    found = str.casefold(str.strip(value))
    if found not in among:
        raise Wrong(f"{start} is {show(value)}. Give one of {choices}.")
    return found


def items(value: Any, what: str, length: int | None = None) -> list[Any]:
    """Read a list, tuple, one-dimensional array or tensor as a list.

    Raises
    ------
    Wrong
        For another type, and for another length where one is given.

    Examples
    --------
    >>> items((1, 2), "the gaps in µs", length=2)
    [1, 2]
    """
    start = what[:1].upper() + what[1:]
    if value is None or value is ...:
        _blank(f"leaves {what} at `{'...' if value is ... else 'None'}`", None)
    if type(value) in (list, tuple):
        found = list(value)
    elif (type(value) is np.ndarray or _is_tensor(value)) and value.ndim == 1:
        found = value.tolist()
    else:
        raise Wrong(f"{start}: a list is wanted, not {_kind(value)}.")
    if length is not None and len(found) != length:
        raise Wrong(f"{start}: {length} values are wanted, not {len(found)}.")
    return found


def judge(
    found: Any,
    right: float,
    slips: Mapping[str, float] | None = None,
    *,
    rtol: float = 1e-6,
    case: str = "",
    what: str = "the answer",
) -> None:
    """Compare a number with the right one; where it is wrong, name the slip that gives just this number.

    Parameters
    ----------
    found : object
        The learner's value; read by `number`.
    right : float
        Never shown.
    slips : mapping of str to float, optional
        What a learner who made the slip would give: ``{"counted elements, not bytes": n}``. One that
        coincides with the right value on this input is passed over. After these, a factor between common
        units is looked for (GB and GiB, bits and bytes, powers of 1000).
    rtol : float
        Relative tolerance; where ``right`` is 0 it is absolute.
    case : str
        The input in words: ``"shape (37, 129), fp32"``.
    what : str
        What the number is, with its unit.

    Raises
    ------
    Wrong
        With what was found and for which case.

    Examples
    --------
    >>> slips = {"counted elements, not bytes": 4773}
    >>> judge(4773, 19092, slips, case="shape (37, 129), fp32", what="the bytes")
    Traceback (most recent call last):
    ...
    gpucourse...Wrong: Counted elements, not bytes. For shape (37, 129), fp32 the bytes came out as 4,773.
    """
    value = number(found, what)
    if _close(value, right, rtol):
        return
    where = f"{f'For {case} {what}' if case else what[:1].upper() + what[1:]} came out as {_plain(value)}."
    for slip, wrong in (slips or {}).items():
        if _close(value, wrong, rtol) and not _close(right, wrong, rtol):
            raise Wrong(f"{slip[:1].upper() + slip[1:]}. {where}")
    for slip, factor in _UNIT_SLIPS:
        if right and _close(value, right * factor, rtol):
            raise Wrong(f"Look at the unit: {slip}. {where}")
    if right and _close(value, -right, rtol):
        raise Wrong(f"The sign is turned round. {where}")
    raise Wrong(f"{where} That is not it.")


_UNIT_SLIPS: tuple[tuple[str, float], ...] = (
    ("a GiB is 2**30 bytes, a GB 1e9", 1e9 / 2**30),
    ("a GiB is 2**30 bytes, a GB 1e9", 2**30 / 1e9),
    ("a MiB is 2**20 bytes, a MB 1e6", 1e6 / 2**20),
    ("a MiB is 2**20 bytes, a MB 1e6", 2**20 / 1e6),
    ("a byte has 8 bits", 8.0),
    ("a byte has 8 bits", 1 / 8),
    *((f"it is out by a power of 1000, 1e{k:+d}", 10.0**k) for k in (3, -3, 6, -6, 9, -9, 12, -12)),
)


def _close(a: float, b: float, rtol: float) -> bool:
    return math.isfinite(b) and abs(a - b) <= rtol * (abs(b) or 1.0)


def _plain(value: float) -> str:
    return f"{int(value):,}" if value == int(value) and abs(value) < 1e15 else f"{value:.6g}"


# ----------------------------------------------------------------------------------- saying what was seen


def show(args: Any, kwargs: Mapping[str, Any] | None = None, limit: int = 120) -> str:
    """Return a short text of a value or of a call's arguments; arrays and tensors as shape and dtype.

    Examples
    --------
    >>> show((3, "fp32"), {"k": 2.5})
    "(3, 'fp32', k=2.5)"
    """
    if kwargs:
        parts = [_brief(a) for a in args] + [f"{k}={_brief(v)}" for k, v in kwargs.items()]
        text = f"({', '.join(parts)})"
    elif type(args) is tuple and kwargs is not None:
        text = f"({', '.join(map(_brief, args))})"
    else:
        text = _brief(args)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _brief(value: Any) -> str:
    if type(value) is np.ndarray or _is_tensor(value):
        return f"{type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}"
    if type(value) in (list, tuple):
        inside = ", ".join(map(_brief, value[:6])) + (", …" if len(value) > 6 else "")
        return f"[{inside}]" if type(value) is list else f"({inside})"
    if type(value) is dict:
        shown = [f"{_brief(k)}: {_brief(v)}" for k, v in list(value.items())[:6]]
        return "{" + ", ".join(shown) + (", …}" if len(value) > 6 else "}")
    try:
        text = repr(value)
    except Exception:  # a hostile or half-built object; what matters is its type
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:79] + "…"


def _kind(value: Any) -> str:
    """Name a value by its type: "a list", "a Tensor of shape (3,)"."""
    if isinstance(value, types.GeneratorType):
        return "a generator"
    if inspect.isroutine(value):
        return "a function"
    if type(value) is np.ndarray or _is_tensor(value):
        return f"{'an' if type(value) is np.ndarray else 'a'} {_brief(value)}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _remedy(value: Any) -> str:
    if type(value) is np.ndarray or _is_tensor(value):
        return (
            "Give one plain number: `.item()` takes it out." if value.ndim == 0 else "Give one plain number."
        )
    if type(value) in (list, tuple, dict, set):
        return "Give one plain number."
    if inspect.isroutine(value):
        return "Call it, and give the number."
    return "Give a plain int or float."


def _text(error: BaseException) -> str:
    try:
        return str(error).strip()
    except Exception:
        return "(its text could not be read)"
