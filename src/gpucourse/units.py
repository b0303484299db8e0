"""GB and GiB, readable numbers, and the one registry of units.

Inside the package a quantity is a float in SI units (seconds, bytes, flop/s); its name carries the unit
where it is another (`_ms`, `_gb`). `ureg` serves the edge where a person types a quantity.

>>> format_bytes(24 * GIB), format_bytes(24 * GB)
('25.8 GB', '24.0 GB')
>>> from gpucourse import units
>>> units.ureg.Quantity(989, "TFLOP/s").to("FLOP/s").magnitude
989000000000000.0
"""

from __future__ import annotations

import functools
import math
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pint

    ureg: pint.UnitRegistry[Any]

__all__ = ["GB", "GIB", "format_bandwidth", "format_bytes", "format_rate", "format_time_ms", "ureg"]

GB = 1e9
"""Bytes in a gigabyte, as datasheets and this course count: 10 to the power of 9."""

GIB = 2**30
"""Bytes in a gibibyte, as torch's error messages and `nvidia-smi` count: 2 to the power of 30."""


@functools.cache
def _registry() -> pint.UnitRegistry[Any]:
    import pint

    # pint takes a bit for a pure number, so that 3 FLOP/byte and 3 FLOP, or 1 GB/s and 8 GHz, would have one
    # dimension and pass for each other. Here data has a dimension of its own, and so has arithmetic.
    registry: pint.UnitRegistry[Any] = pint.UnitRegistry(on_redefinition="ignore")
    registry.define("bit = [information]")
    registry.define("FLOP = [floating_point_operation]")
    # What pint worked out for byte and its multiples before the redefinition would stay as it was.
    registry._build_cache()
    return registry


def __getattr__(name: str) -> Any:
    # pint takes a moment to load and the arithmetic of the package does not need it.
    if name == "ureg":
        return _registry()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _scaled(value: float, unit: str, prefixes: tuple[tuple[float, str], ...]) -> str:
    """Write `value` with the largest prefix that leaves at least 1 in front of it, three digits or so."""
    value = _finite(value, unit)
    if value == 0:
        return f"0 {unit}"
    for index, (scale, prefix) in enumerate(prefixes):
        number = value / scale
        # What rounds to 1000 belongs to the next prefix up: 999.96 kB is 1.0 MB.
        if abs(number) >= 0.99995 or index == len(prefixes) - 1:
            return f"{_three_digits(number)} {prefix}{unit}"
    raise AssertionError("no prefixes")


def _finite(value: Any, unit: str) -> float:
    """Read a plain finite number as a float; Python's own refusals say neither what for nor what is wanted."""
    if isinstance(value, bool) or not isinstance(value, Real):
        # A bool, numpy's too, text, an array, a quantity with a unit: nothing of these is an amount.
        kind = ValueError if type(value).__name__ in ("bool", "bool_") else TypeError
        raise kind(
            f"cannot write {value!r} in {unit}: it is not a finite number but a {type(value).__name__}"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"cannot write {number} in {unit}: it is not a finite number")
    return number


def _three_digits(number: float) -> str:
    if abs(number) >= 9.995:
        return f"{number:.1f}" if abs(number) < 999.95 else f"{number:,.0f}"
    return f"{number:.2f}"


_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def format_bytes(n: float) -> str:
    """Write an amount of memory in decimal units (1 GB is 1e9 bytes).

    Parameters
    ----------
    n
        Bytes; a negative amount (a shortfall) keeps its sign.

    Raises
    ------
    ValueError
        `n` is NaN, infinite or a bool.
    TypeError
        `n` is no plain number: text, an array, a quantity with a unit.

    Examples
    --------
    >>> format_bytes(512), format_bytes(33_554_432), format_bytes(-300e6)
    ('512 B', '33.6 MB', '-300.0 MB')
    """
    n = _finite(n, "B")
    if abs(n) < 999.95:
        return f"{n:.0f} B" if n == int(n) else f"{n:.1f} B"
    return _scaled(n, "B", _SI)


def format_time_ms(ms: float) -> str:
    """Write a time given in milliseconds, in the unit that suits it.

    Parameters
    ----------
    ms
        Milliseconds; a negative time (a difference) keeps its sign.

    Raises
    ------
    ValueError
        `ms` is NaN, infinite or a bool.
    TypeError
        `ms` is no plain number: text, an array, a quantity with a unit.

    Examples
    --------
    >>> format_time_ms(0.0237), format_time_ms(304.5), format_time_ms(28_800_000)
    ('23.7 µs', '304.5 ms', '28,800 s')
    """
    return _scaled(_finite(ms, "ms") / 1e3, "s", ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n")))


def format_rate(flops_per_s: float) -> str:
    """Write a rate of arithmetic.

    Parameters
    ----------
    flops_per_s
        Floating-point operations a second, a multiply and an add counted as two.

    Raises
    ------
    ValueError
        The rate is NaN, infinite or a bool.
    TypeError
        It is no plain number: text, an array, a quantity with a unit.

    Examples
    --------
    >>> format_rate(46.03e12)
    '46.0 TFLOP/s'
    """
    return _scaled(flops_per_s, "FLOP/s", _SI)


def format_bandwidth(bytes_per_s: float) -> str:
    """Write a rate of bytes; figures of this size are read in GB/s, so it stops there.

    Parameters
    ----------
    bytes_per_s
        Bytes a second.

    Raises
    ------
    ValueError
        The rate is NaN, infinite or a bool.
    TypeError
        It is no plain number: text, an array, a quantity with a unit.

    Examples
    --------
    >>> format_bandwidth(4.8e12), format_bandwidth(54.9e9)
    ('4,800 GB/s', '54.9 GB/s')
    """
    return _scaled(bytes_per_s, "B/s", _SI[1:])
