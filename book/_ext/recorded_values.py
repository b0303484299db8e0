"""Numbers in prose, taken from recordings: the arithmetic behind the role ``rec``.

``launch_cost.median_us | .1f µs`` reads: recording ``launch_cost``, its key ``median_us``, one decimal, and
the unit. Left of the bar stands an expression over recordings, so that a ratio needs no typed number either:

=============================================  ==========================================================
``widths.rows[3].median_ms | *1000 .1f µs``    a list's fourth entry, scaled from milliseconds
``loop.elapsed_ms / matmul.elapsed_ms | .1f``  a ratio of two recordings
``widths["2048"].median_ms``                   a key that is no name; ``widths.2048.median_ms`` is the same
``median(loop.samples_ms) | .2f ms``           ``min``, ``max``, ``median``, ``len`` and ``sum`` of a list
``ceil(1000 * run.cost_s / run.saved_ms)``     rounded up to a whole number, as for what is counted in steps
=============================================  ==========================================================
"""

from __future__ import annotations

import ast
import math
import operator
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpucourse import recording

NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "ceil": math.ceil,
    "len": len,
    "max": max,
    "median": statistics.median,
    "min": min,
    "sum": sum,
}
OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Div: operator.truediv,
    ast.Mult: operator.mul,
    ast.Sub: operator.sub,
}
PATH = re.compile(r"[A-Za-z_]\w*(?:\.\w+|\[[^\]]*\])+")
FORMAT = re.compile(r"(?:\*(?P<factor>[\d.e+-]+)\s+)?(?P<spec>[,_]?(?:\.\d+)?[defgs%])(?:\s+(?P<unit>.+))?")


class RecordedValueError(Exception):
    """A number in prose cannot be given; the message says what there is and what to do."""


def _quote_number_keys(text: str) -> str:
    """Turn ``widths.2048.x`` into ``widths["2048"].x``, which Python can parse."""
    return PATH.sub(lambda path: re.sub(r"\.(\d\w*)", r'["\1"]', path[0]), text)


def _what_there_is(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"there is {', '.join(value)}" if value else "it is empty"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"it is a list of {len(value)}"
    return f"it is {value!r}"


class _Reader:
    """Evaluates one expression and notes the recordings that it read."""

    def __init__(self) -> None:
        self.used: dict[str, recording.Recording] = {}

    def load(self, name: str) -> recording.Recording:
        if name not in self.used:
            try:
                self.used[name] = recording.load(name)
            except recording.RecordingError as error:
                raise RecordedValueError(str(error)) from error
        return self.used[name]

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name):
                return self.load(name).data
            case ast.Attribute(value=inner, attr=key):
                return self._item(inner, key)
            case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
                return self._item(inner, key)
            case ast.Subscript(
                value=inner, slice=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(k)))
            ):
                return self._item(inner, -k)
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](self._number(left), self._number(right))
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
                return FUNCTIONS[name](self.value(argument))
        raise RecordedValueError(
            f"{ast.unparse(node)} is no path, number, + - * /, nor one of {', '.join(sorted(FUNCTIONS))}"
        )

    def _item(self, inner: ast.expr, key: str | int) -> Any:
        container = self.value(inner)
        try:
            if isinstance(container, Mapping) or (isinstance(key, int) and isinstance(container, list)):
                return container[key]
        except (KeyError, IndexError):
            pass
        raise RecordedValueError(
            f"{ast.unparse(inner)} has no {key!r}: {_what_there_is(container)}. If a cell was given that key "
            "since, `gpucourse record` on a CUDA machine records it anew"
        )

    def _number(self, node: ast.expr) -> float:
        found = self.value(node)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise RecordedValueError(f"{ast.unparse(node)} is no number but {found!r}")
        return found


def read(text: str) -> tuple[str, dict[str, recording.Recording]]:
    """Give what stands in the text, and the recordings that it comes from.

    Parameters
    ----------
    text
        ``expression`` or ``expression | [*factor] format [unit]``; the format is one of Python's for numbers.

    Raises
    ------
    RecordedValueError
        A recording or key does not exist, the value is no number, or the text cannot be read.
    """
    expression, bar, shape = (part.strip() for part in text.replace(r"\|", "|").partition("|"))
    try:
        tree = ast.parse(_quote_number_keys(expression), mode="eval")
    except SyntaxError as error:
        raise RecordedValueError(f"{expression!r} cannot be read: {error.msg}") from error
    reader = _Reader()
    value = reader.value(tree.body)
    if not reader.used:
        raise RecordedValueError(f"{expression!r} names no recording")
    if not bar:
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise RecordedValueError(
                f"{expression} is {value!r}: say how to write it, as in `{expression} | .1f ms`"
            )
        return (value if isinstance(value, str) else f"{value:,}"), reader.used
    match = FORMAT.fullmatch(shape)
    if match is None:
        raise RecordedValueError(f"{shape!r} is no format; write `.1f µs`, `,.0f` or `*1000 .1f µs`")
    if match["spec"] != "s" and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise RecordedValueError(
            f"{expression} is no number but {value!r}, so {match['spec']} cannot write it"
        )
    if match["factor"]:
        value = value * float(match["factor"])
    written = format(value, match["spec"])
    return written + (NO_BREAK_SPACE + match["unit"] if match["unit"] else ""), reader.used
