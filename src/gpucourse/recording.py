"""Recordings: a chapter's measurement runs live where there is a GPU and is replayed elsewhere.

A function that measures is decorated `recorded`. On a CUDA machine, calling it measures. Elsewhere the same
call gives what ``gpucourse record`` once measured on the book's own device, with its provenance, and says so.
A recording belongs to the code that made it: where the function, the notebook's helpers that it calls, or the
method of an instrument has changed since, the recording is stale and replaying it is an error.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import datetime
import difflib
import dis
import functools
import hashlib
import importlib
import inspect
import io
import json
import math
import os
import re
import tempfile
import textwrap
import time
import tokenize
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, overload

from gpucourse import html
from gpucourse.environment import Environment, cuda_available

__all__ = [
    "CorruptRecordingError",
    "MissingRecordingError",
    "NotYetMeasuredError",
    "Recording",
    "RecordingError",
    "RecordingWriteError",
    "StaleRecordingError",
    "fingerprint",
    "load",
    "names",
    "recorded",
    "recordings_folder",
]

FORMAT = 1
RULE = 2  # of what belongs to the code of a recording; rises when `fingerprint` takes in more
BOOK_DEVICE = "nvidia-h200"  # the folder of the device that the book's own figures come from
INSTRUMENTS = (
    "cuda_events",
    "kernels",
    "roofline",
    "training",
    "step_memory",
    "memory_measurement",
    "retention",
)
RECORD_VARIABLE = (
    "GPUCOURSE_RECORD"  # set by `gpucourse record` alone: the command that stands in the provenance
)
FOLDER_VARIABLE = "GPUCOURSE_RECORDINGS"
ABANDONED_S = 60.0
DEVICE_VARIABLE = "GPUCOURSE_DEVICE"


class RecordingError(Exception):
    """A recording cannot be used; each subclass is one reason."""


class MissingRecordingError(RecordingError):
    """There is no recording of this name."""


class CorruptRecordingError(RecordingError):
    """The file is truncated, not JSON, of another format, or was changed by hand."""


class StaleRecordingError(RecordingError):
    """The code that made the recording has changed since."""


class RecordingWriteError(RecordingError):
    """The new recording could not be written; the old one is whole."""


class NotYetMeasuredError(RecordingError):
    """The figure is marked as not yet measured, so it has no value to give."""


def recordings_folder() -> Path:
    """Where recordings live: the package's own folder, or ``$GPUCOURSE_RECORDINGS``."""
    return Path(os.environ.get(FOLDER_VARIABLE) or Path(__file__).parent / "recordings")


def device_folder_name(gpu: str) -> str:
    """Turn a GPU's name into the name of its folder.

    >>> device_folder_name("NVIDIA A100-SXM4-80GB")
    'nvidia-a100-sxm4-80gb'
    """
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def _replay_folder() -> Path:
    return recordings_folder() / (os.environ.get(DEVICE_VARIABLE) or BOOK_DEVICE)


def names() -> list[str]:
    """List the recordings that can be replayed here, in alphabetical order."""
    return sorted(path.stem for path in _replay_folder().glob("*.json"))


# --- plain data ------------------------------------------------------------------------------------------


def plain(value: Any, where: str = "data") -> Any:
    """Turn what a recorded function returned into JSON's own types.

    Parameters
    ----------
    value
        Nested dict (string keys), list or tuple, str, int, float, bool or None; an object with ``as_dict()``
        (`Timing`, `KernelTrace`) gives that.
    where
        The path so far, for error messages.

    Raises
    ------
    TypeError
        Something else stands in it, or a key is no string.
    ValueError
        A float is NaN or infinite: what could not be measured is None.
    """
    if hasattr(value, "as_dict"):
        return plain(value.as_dict(), where)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(
                    f"{where} has the key {key!r}: a recording's keys are strings, so use str({key!r})"
                )
        return {key: plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}: what could not be measured is None, never NaN or infinity")
        return float(value)
    raise TypeError(
        f"{where} is a {type(value).__name__}: a recorded function returns plain data "
        "(dict, list, str, int, float, bool, None), Timing or KernelTrace; use tensor.item() or .tolist()"
    )


def _canonical(data: object) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# --- the fingerprint of the code -------------------------------------------------------------------------


def _source_tokens(source: str) -> list[str]:
    """Split a definition into the tokens that matter, the same on every Python since 3.11.

    Decorators, comments, blank lines, the docstring and the width of the indentation are left out. Python
    3.12 began to split f-strings into parts; they are put together again here.
    """
    source = textwrap.dedent(source)
    lines = source.splitlines(keepends=True)
    opened = {
        getattr(tokenize, name) for name in ("FSTRING_START", "TSTRING_START") if hasattr(tokenize, name)
    }
    closed = {getattr(tokenize, name) for name in ("FSTRING_END", "TSTRING_END") if hasattr(tokenize, name)}
    found: list[tuple[int, str]] = []
    depth, start = 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in opened:
            if depth == 0:
                start = token.start
            depth += 1
        elif token.type in closed:
            depth -= 1
            if depth == 0:
                found.append((tokenize.STRING, _between(lines, start, token.end)))
        elif depth or token.type in (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER):
            continue
        elif token.type in (tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE):
            found.append((token.type, tokenize.tok_name[token.type]))
        else:
            found.append((token.type, token.string))
    while found and found[0][1] not in ("def", "class", "async"):  # decorators
        found.pop(0)
    texts: list[str] = []
    for index, (kind, text) in enumerate(found):
        opens_body = index > 0 and found[index - 1][0] == tokenize.INDENT
        after = found[index + 1][0] if index + 1 < len(found) else tokenize.NEWLINE
        if kind == tokenize.STRING and opens_body and after == tokenize.NEWLINE:
            continue
        texts.append(text)
    while texts and texts[-1] in ("NEWLINE", "DEDENT"):
        texts.pop()
    return texts


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    middle = lines[start[0] : end[0] - 1]
    return "".join([lines[start[0] - 1][start[1] :], *middle, lines[end[0] - 1][: end[1]]])


def _parts_of(thing: Any) -> list[types.FunctionType]:
    """Give the functions whose source makes up a function or a notebook's own class, the class's bases included."""
    if not inspect.isclass(thing):
        return [thing]
    found = []
    for kind in thing.__mro__:
        if kind.__module__ == thing.__module__:
            for _, item in sorted(vars(kind).items()):
                inside = (item.fget, item.fset, item.fdel) if isinstance(item, property) else (item,)
                found += [part for part in map(_beneath, inside) if part is not None]
    return found


def _values_of(thing: type) -> dict[str, Any]:
    """Give the plain values that a notebook's own class, and its bases there, hold: ``width = 64`` in their bodies."""
    return {
        f"{kind.__qualname__}.{name}": item
        for kind in thing.__mro__
        if kind.__module__ == thing.__module__
        for name, item in sorted(vars(kind).items())
        if not name.startswith("__") and isinstance(item, _PLAIN)
    }


def _beneath(thing: Any) -> types.FunctionType | None:
    """Give the function as it was written, beneath a method's or a cache's wrapping or a compiler's; None for else."""
    seen: set[int] = set()
    while id(thing) not in seen:
        seen.add(id(thing))
        deeper = thing.__func__ if isinstance(thing, staticmethod | classmethod) else None
        deeper = deeper or getattr(thing, "__dict__", {}).get("__wrapped__")
        if deeper is None:
            break
        thing = deeper
    return thing if isinstance(thing, types.FunctionType) else None


def _global_words(code: types.CodeType) -> set[str]:
    """Give the names that a function looks up in its notebook: no local names, no attributes."""
    loaded = {
        step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    inner = (item for item in code.co_consts if isinstance(item, types.CodeType))
    return loaded.union(*(_global_words(item) for item in inner))


_PLAIN = (str, bytes, int, float, complex, tuple, list, dict, set, frozenset, range, functools.partial)


def _functions_in(thing: Any) -> list[types.FunctionType]:
    """Give the functions and classes' functions that stand in a constant, however deep."""
    if isinstance(thing, dict):
        return [part for item in thing.items() for part in _functions_in(item)]
    if isinstance(thing, tuple | list | set | frozenset):
        return [part for item in thing for part in _functions_in(item)]
    if isinstance(thing, functools.partial):
        return _functions_in((thing.func, thing.args, thing.keywords))
    beneath = _beneath(thing)
    if beneath is not None:
        return [beneath]
    return _parts_of(thing) if inspect.isclass(thing) else []


def _in_parts(thing: Any) -> bool:
    """Whether a constant is written part by part: its own text would hold an address, or come in any order."""
    if isinstance(thing, dict):
        return any(_in_parts(part) for item in thing.items() for part in item)
    if isinstance(thing, tuple | list):
        return any(map(_in_parts, thing))
    return isinstance(thing, set | frozenset | functools.partial) or _beneath(thing) is not None


def _constant(thing: Any, name: str) -> str:
    """Write a constant as text that is the same in every process: a function by its name, its code apart."""
    beneath = _beneath(thing)
    if beneath is None and _in_parts(thing):
        if isinstance(thing, functools.partial):
            return f"partial{_constant((thing.func, thing.args, thing.keywords), name)}"
        if isinstance(thing, dict):
            pairs = (f"{_constant(key, name)}: {_constant(item, name)}" for key, item in thing.items())
            return f"{{{', '.join(pairs)}}}"
        texts = [_constant(item, name) for item in thing]
        if isinstance(thing, set | frozenset):
            return f"set({', '.join(sorted(texts))})"
        inside = ", ".join(texts)
        return f"({inside})" if isinstance(thing, tuple) else f"[{inside}]"
    if beneath is not None:
        return beneath.__qualname__
    try:
        text = repr(thing)
    except ValueError:  # an integer of more digits than Python writes
        text = hex(thing) if isinstance(thing, int) else f"a {type(thing).__name__}"
    if not isinstance(thing, str) and re.search(r" at 0x[0-9a-f]+>", text):
        raise TypeError(
            f"the constant {name} holds {text[:80]}, whose text is an address: it differs in each process, so a "
            "recording could never agree with it. Make the object inside the function that measures."
        )
    return text


def _written(thing: Any, name: str) -> str:
    try:
        return _constant(thing, name)
    except RecursionError:
        raise TypeError(
            f"the constant {name} holds itself, so it has no text that a recording could keep: make it inside the "
            "function that measures"
        ) from None


def _label_and_tokens(function: types.FunctionType) -> tuple[str, list[str]]:
    """Give the name that a function counts under, and its tokens; lambdas have no name, and count by their text."""
    source = inspect.getsource(function)
    if function.__name__ != "<lambda>":
        return function.__qualname__, _source_tokens(source)
    try:
        tokens = [token.string for token in tokenize.generate_tokens(io.StringIO(source.strip()).readline)]
    except (tokenize.TokenError, SyntaxError):  # a line out of the middle of a list
        tokens = re.findall(r"\w+|[^\w\s]", source)
    tokens = [token for token in tokens if token.strip() and not token.startswith("#")]
    return " ".join(tokens), tokens


def fingerprint(function: Callable[..., Any], rule: int = RULE) -> dict[str, Any]:
    """Say which code a recording comes from.

    Parameters
    ----------
    function
        The function that measures. Functions, classes and plain constants of the same notebook that it names
        belong to it, and so do the instruments of `gpucourse` that it names.
    rule
        1 is how recordings without a rule of their own were marked: it leaves out dicts, sets and what stands in the
        bodies of classes. A recording is held against the rule that it was made by.

    Returns
    -------
    dict
        ``source``: SHA-256 of the tokens; ``methods``: the ``METHOD_VERSION`` of each instrument by module;
        ``rule`` from rule 2 on.

    Raises
    ------
    NameError
        It uses a name that is not defined by now. A replay would never notice, and the same page would fail
        on a GPU.
    TypeError
        A constant that it names holds what has no lasting text, or holds itself.

    Notes
    -----
    Constants are text, bytes, numbers, and lists, tuples, dicts, sets, ranges and partials of these, of functions and
    of classes. Any other object of the notebook (a tensor, a model) is not followed: make it in the function.
    """
    scope = function.__globals__
    pieces: dict[str, list[str]] = {}
    constants: dict[str, str] = {}
    waiting: list[Any] = [function]
    while waiting:
        current = waiting.pop()
        label, tokens = _label_and_tokens(current)
        if label in pieces:
            continue
        pieces[label] = tokens
        words = _global_words(current.__code__)
        undefined = sorted(words - scope.keys() - set(dir(builtins)))
        if undefined:
            raise NameError(
                f"{label} uses {', '.join(undefined)}, which no cell above defines: measuring it live would fail"
            )
        for word in sorted(words & set(pieces[label])):
            thing = scope.get(word)
            if isinstance(thing, _Recorded):
                thing = thing.function
            beneath = _beneath(thing)
            if beneath is not None:
                waiting += [beneath] if beneath.__globals__ is scope else []
            elif inspect.isclass(thing) and thing.__module__ == function.__module__:
                waiting += [part for part in _parts_of(thing) if part.__globals__ is scope]
                for name, value in _values_of(thing).items() if rule > 1 else ():
                    constants[name] = _written(value, name)
            elif isinstance(thing, _PLAIN if rule > 1 else (str, int, float, tuple, list)):
                constants[word] = _written(thing, word)
                waiting += [part for part in _functions_in(thing) if part.__globals__ is scope]
    words = {word for piece in pieces.values() for word in piece}
    methods = {}
    for instrument in INSTRUMENTS:
        module = importlib.import_module(f"gpucourse.{instrument}")
        version = getattr(module, "METHOD_VERSION", None)
        if version is not None and words & {instrument, *getattr(module, "__all__", ())}:
            methods[instrument] = version
    mark = {"source": _sha256(_canonical([pieces, constants])), "methods": methods}
    return {**mark, "rule": rule} if rule > 1 else mark


# --- the recording ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recording(Mapping[str, Any]):
    """What a recorded function measured, and under which conditions; reads like a dict.

    Attributes
    ----------
    name
        The name of the function that measured.
    data
        What it returned, as plain data.
    provenance
        ``gpu``, ``driver``, ``cuda``, ``torch``, ``date`` (ISO, UTC), ``command`` and the other fields of
        `Environment`; ``methods`` maps each instrument to the version of its method.
    measured_here
        True where it ran on this machine just now, False where it is replayed.
    reason
        Why it is replayed although there is a GPU, or why it is not measured yet; "" otherwise.
    """

    name: str
    data: dict[str, Any]
    provenance: dict[str, Any]
    measured_here: bool = False
    reason: str = ""
    pending: bool = False

    def __getitem__(self, key: str) -> Any:
        if self.pending:
            raise NotYetMeasuredError(
                f"{self.name} is not yet measured ({self.reason}), so it has no {key!r}"
            )
        try:
            return self.data[key]
        except KeyError:
            raise KeyError(f"recording {self.name} has no {key!r}; it has {', '.join(self.data)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def line(self) -> str:
        """Give the provenance in one line: "recorded on …" or "measured here on …"."""
        if self.pending:
            return f"not yet measured: {self.reason}"
        facts = self.provenance
        parts = [str(facts.get("gpu"))]
        if not self.measured_here:
            parts.append(str(facts.get("date", ""))[:10])
        for label, key in (("torch", "torch"), ("CUDA", "cuda"), ("driver", "driver")):
            if facts.get(key):
                parts.append(f"{label} {facts[key]}")
        text = f"{'measured here on' if self.measured_here else 'recorded on'} {', '.join(parts)}"
        return f"{text} (replayed: {self.reason})" if self.reason else text

    def __str__(self) -> str:
        rows = [f"{path} = {value}" for path, value in summary(self.data)]
        return "\n".join([self.name, *rows, self.line()])

    def _repr_html_(self) -> str:
        rows = summary(self.data)
        body = html.table(["Value", "Reading"], rows, self.name) if rows else ""
        return f'<div class="recording">{body}<p class="provenance">{html.escape(self.line())}</p></div>'


def summary(data: object, path: str = "") -> list[tuple[str, str]]:
    """Flatten plain data into rows of path and reading; a list of numbers gives its count, median and range.

    >>> summary({"a_ms": [1.0, 2.0, 4.0, 7.0, 9.0], "b": {"c": 3}})
    [('a_ms', '5 values, median 4, from 1 to 9'), ('b.c', '3')]
    """
    if isinstance(data, Mapping):
        return [row for key, item in data.items() for row in summary(item, f"{path}.{key}" if path else key)]
    if isinstance(data, list):
        numbers = [item for item in data if isinstance(item, int | float) and not isinstance(item, bool)]
        if data and len(numbers) == len(data):
            if len(data) <= 4:
                return [(path, ", ".join(_number(item) for item in numbers))]
            middle = sorted(numbers)[len(numbers) // 2]
            low, high = _number(min(numbers)), _number(max(numbers))
            return [(path, f"{len(numbers)} values, median {_number(middle)}, from {low} to {high}")]
        if len(data) > 8:
            return [(path, f"{len(data)} entries")]
        return [row for index, item in enumerate(data) for row in summary(item, f"{path}[{index}]")]
    if isinstance(data, float | int) and not isinstance(data, bool):
        return [(path, _number(data))]
    return [(path, "unavailable" if data is None else str(data))]


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


# What a replay reads of each part of a file; the checksum covers the data alone.
_PARTS: dict[str, dict[str, type]] = {
    "data": {},
    "fingerprint": {"source": str, "methods": dict},
    "provenance": {"gpu": str, "date": str, "command": str},
}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def load(name: str) -> Recording:
    """Read a recording from disk, whole and unchanged.

    Raises
    ------
    MissingRecordingError
        There is none of this name; the message lists what there is.
    CorruptRecordingError
        The file is truncated, no JSON, of another format, cannot be read, its data does not match its
        checksum, or its provenance names another device than its folder.
    TypeError
        `name` is no str.
    """
    if not isinstance(name, str):
        raise TypeError(f"a recording's name is a str, found {type(name).__name__}")
    path = _replay_folder() / f"{name}.json"
    try:
        if not re.fullmatch(r"\w+", name):  # the name of a function, so that it is never a path
            raise FileNotFoundError
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        near = difflib.get_close_matches(name, names(), n=3)
        known = f"nearest: {', '.join(near)}" if near else f"{len(names())} of other names"
        raise MissingRecordingError(
            f"there is no recording {name!r} for {_replay_folder().name} ({known}). On a CUDA machine, "
            "`gpucourse record` makes it from the chapter that defines it."
        ) from None
    except UnicodeDecodeError as error:
        raise CorruptRecordingError(_corrupt(path, f"it is not text ({error.reason})")) from error
    except OSError as error:
        raise CorruptRecordingError(_corrupt(path, f"it cannot be read ({error.strerror})")) from error
    try:
        record = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptRecordingError(_corrupt(path, f"it is not whole JSON ({error})")) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CorruptRecordingError(_corrupt(path, f"its format is not {FORMAT}"))
    missing = [
        key for key in ("name", "data", "data_sha256", "fingerprint", "provenance") if key not in record
    ]
    if missing:
        raise CorruptRecordingError(_corrupt(path, f"it lacks {', '.join(missing)}"))
    for key, parts in _PARTS.items():
        found = record[key]
        if not isinstance(found, dict) or not all(isinstance(found.get(p), k) for p, k in parts.items()):
            wanted = f" with {', '.join(parts)}" if parts else ""
            raise CorruptRecordingError(_corrupt(path, f"its {key} is not a table{wanted}"))
    if _sha256(_canonical(record["data"])) != record["data_sha256"]:
        raise CorruptRecordingError(_corrupt(path, "its data does not match its checksum, so it was changed"))
    if record["name"] != name:
        raise CorruptRecordingError(_corrupt(path, f"it says that it is {record['name']!r}"))
    gpu = record["provenance"]["gpu"]
    if device_folder_name(gpu) != path.parent.name:
        raise CorruptRecordingError(
            _corrupt(path, f"it says that it comes from {gpu!r}, but lies in {path.parent.name}")
        )
    provenance = {**record["provenance"], "fingerprint": record["fingerprint"]}
    return Recording(name=name, data=record["data"], provenance=provenance)


def _corrupt(path: Path, what: str) -> str:
    return f"recording {path.name} cannot be used: {what}. Restore it from version control or re-record it."


def _write(path: Path, record: dict[str, Any]) -> None:
    """Write beside, then rename: a reader sees the old file or the new one, never a part."""
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.stem}.", suffix=".tmp", delete=False
        ) as file:
            temporary = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        state = "the old recording is unchanged" if os.path.exists(path) else "nothing was written"
        raise RecordingWriteError(
            f"could not write {path}: {error.strerror or error}; {state}. Free the disk, or set "
            f"{FOLDER_VARIABLE} to a folder that can be written."
        ) from error
    except BaseException:  # interrupted: the old recording is whole, and the part goes
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise
    _remove_abandoned(path)


def _remove_abandoned(path: Path) -> None:
    """Remove what writers of this recording left that were killed: no writer takes a minute for its file."""
    for left in path.parent.glob(f".{path.stem}.*.tmp"):
        with contextlib.suppress(OSError):  # another recorder may be quicker
            if time.time() - left.stat().st_mtime > ABANDONED_S:
                left.unlink()


class _Recorded:
    """A function that measures here or is replayed; made by `recorded`."""

    def __init__(self, function: Callable[[], Any], needs_gb: float, pending: str) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = function.__name__
        self.needs_gb = needs_gb
        self.pending = pending

    def __call__(self) -> Recording:
        if self.pending:
            return Recording(name=self.name, data={}, provenance={}, reason=self.pending, pending=True)
        command = os.environ.get(RECORD_VARIABLE, "")
        if not cuda_available():
            return self._replay("")
        short = self._too_little_memory()
        if short and not command:
            return self._replay(short)
        if short:
            raise RecordingError(f"cannot record {self.name}: it {short}")
        import torch

        try:
            data = plain(self.function())
        except torch.cuda.OutOfMemoryError as error:
            if command:
                raise
            reason = f"ran out of memory here ({str(error).split('. ')[0]})"
        else:
            return self._measured(data, command)
        # Outside the except block: the traceback would keep the failed frame's tensors alive.
        torch.cuda.empty_cache()
        return self._replay(reason)

    def _too_little_memory(self) -> str:
        if not self.needs_gb:
            return ""
        import torch

        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if free >= self.needs_gb * 1e9:
            return ""
        return f"needs {self.needs_gb:g} GB and this GPU has {free / 1e9:.1f} GB free"

    def _measured(self, data: Any, command: str) -> Recording:
        if not isinstance(data, dict):
            raise TypeError(
                f"{self.name} returned a {type(data).__name__}: a recorded function returns a dict"
            )
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        environment = Environment.capture()
        mark = fingerprint(self.function)
        provenance = {**environment.as_dict(), "date": now, "command": command, "methods": mark["methods"]}
        if command:
            folder = recordings_folder() / device_folder_name(environment.gpu or "unknown")
            record = {
                "format": FORMAT,
                "name": self.name,
                "fingerprint": mark,
                "provenance": provenance,
                "data_sha256": _sha256(_canonical(data)),
                "data": data,
            }
            _write(folder / f"{self.name}.json", record)
        return Recording(name=self.name, data=data, provenance=provenance, measured_here=True)

    def _replay(self, reason: str) -> Recording:
        found = load(self.name)
        then = found.provenance["fingerprint"]
        rule = then.get("rule", 1)
        if rule not in (1, RULE):
            raise CorruptRecordingError(
                f"recording {self.name!r} was marked by rule {rule}, and this version of gpucourse knows 1 and {RULE}: "
                "install the version that made it, or re-record it"
            )
        mark = fingerprint(self.function, rule)
        if mark != then:
            changed = (
                []
                if mark["source"] == then["source"]
                else [f"the source of {self.name} or of a helper it calls"]
            )
            changed += [
                f"the method of {key} ({then['methods'].get(key)} then, {mark['methods'].get(key)} now)"
                for key in sorted({*mark["methods"], *then["methods"]})
                if mark["methods"].get(key) != then["methods"].get(key)
            ]
            raise StaleRecordingError(
                f"recording {self.name!r} is stale: since {found.provenance['date'][:10]}, "
                f"{' and '.join(changed)} changed. Re-record it on a CUDA machine with "
                f"`{found.provenance['command']}`, or undo the change."
            )
        return dataclasses.replace(found, reason=reason)


@overload
def recorded(function: Callable[[], Any], /) -> Callable[[], Recording]: ...
@overload
def recorded(
    *, needs_gb: float = 0.0, pending: str = ""
) -> Callable[[Callable[[], Any]], Callable[[], Recording]]: ...
def recorded(function: Any = None, /, *, needs_gb: float = 0.0, pending: str = "") -> Any:
    """Make a measuring function run live on CUDA and be replayed elsewhere.

    Parameters
    ----------
    function
        Takes no argument and returns a dict of plain data; `Timing` and `KernelTrace` may stand in it. Its
        name is the recording's name, unique in the whole book.
    needs_gb
        Device memory that it needs, in GB (1e9 bytes). Where less is free it is replayed and says why.
    pending
        Why this figure is not measured yet. The call then gives a `Recording` without values; the build lists
        such figures and publishing refuses them.

    Returns
    -------
    callable
        Calling it gives a `Recording`.

    Raises
    ------
    TypeError, ValueError
        The function takes arguments; `needs_gb` is no amount, or `pending` no text.
    """
    if isinstance(needs_gb, bool) or not isinstance(needs_gb, int | float):
        raise TypeError(f"needs_gb is {needs_gb!r}: an amount in GB is wanted, such as needs_gb=20")
    if not 0 <= needs_gb < math.inf:
        raise ValueError(f"needs_gb is {needs_gb}: an amount in GB is finite and not negative")
    if not isinstance(pending, str):
        raise TypeError(f"pending is {pending!r}: say why in words, such as pending='needs two GPUs'")
    if function is None:
        return functools.partial(_decorate, needs_gb=needs_gb, pending=pending)
    return _decorate(function, needs_gb=needs_gb, pending=pending)


def _decorate(function: Callable[[], Any], needs_gb: float, pending: str) -> _Recorded:
    if not isinstance(function, types.FunctionType):
        raise TypeError(
            f"@recorded decorates a function, found {type(function).__name__}; write @recorded above def"
        )
    if inspect.signature(function).parameters:
        raise TypeError(
            f"{function.__name__} takes arguments: a recorded function takes none, "
            "so that a replay is the same call"
        )
    return _Recorded(function, needs_gb, pending)
