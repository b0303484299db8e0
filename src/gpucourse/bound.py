"""The bound itself: no faster than the arithmetic, no faster than the bytes.

`Roofline` holds what a device can do; the larger of the two times is the least that a `Work` can take.

>>> roof = Roofline(peak_flops=989e12, bandwidth=4.8e12)
>>> roof.ridge, roof.attainable(85) / 1e12
(206.041..., 408.0)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import numpy as np

from gpucourse.work import Work, is_finite_number, short

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpucourse.hardware import Device

__all__ = [
    "Bound",
    "LeastTime",
    "Roofline",
    "RooflineInputError",
    "RooflineInputs",
    "compute_c12",
    "is_finite",
    "validate_shapes_and_units",
]

Bound: TypeAlias = Literal["memory", "compute"]
Numbers: TypeAlias = "float | NDArray[np.float64]"


class RooflineInputError(ValueError):
    """A quantity of the roofline is missing or makes no sense; `symbol` names it and the message says why."""

    def __init__(self, symbol: str, problem: str) -> None:
        super().__init__(f"{symbol}: {problem}")
        self.symbol = symbol


# --- from quantities with units to plain numbers ------------------------------------------------------------

_SYMBOLS = {
    # symbol: (what it is, SI unit here, an example, must be positive rather than at least 0)
    "P_peak": ("peak arithmetic rate", "FLOP/s", 'ureg.Quantity(989, "TFLOP/s")', True),
    "I": ("arithmetic intensity", "FLOP/byte", 'ureg.Quantity(85, "FLOP/byte")', False),
    "B_mem": ("memory bandwidth", "byte/s", 'ureg.Quantity(4800, "GB/s")', True),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RooflineInputs:
    """Checked inputs of the bound, in SI units; made by `validate_shapes_and_units`.

    Attributes
    ----------
    peak_flops
        P_peak in flop/s: a float or an array.
    intensity
        I in flop/byte: a float or an array.
    bandwidth
        B_mem in bytes/s: a float or an array. Arrays among the three have one and the same shape.
    """

    peak_flops: Numbers
    intensity: Numbers
    bandwidth: Numbers


def validate_shapes_and_units(batch: Mapping[str, Any]) -> RooflineInputs:
    """Check the three quantities of the bound and strip their units.

    Parameters
    ----------
    batch
        Maps ``"P_peak"``, ``"I"`` and ``"B_mem"`` to quantities of `gpucourse.units.ureg`: scalars or
        arrays. A scalar goes with any shape; two arrays must have the same shape.

    Returns
    -------
    RooflineInputs
        The same values in flop/s, flop/byte and bytes/s.

    Raises
    ------
    RooflineInputError
        A symbol is missing or unknown, has no unit or one of another dimension, holds something that is not
        a finite real number, is not positive (I may be 0, a plain copy), or its shape disagrees with another.
    TypeError
        `batch` is no mapping.

    Examples
    --------
    >>> from gpucourse.units import ureg
    >>> inputs = validate_shapes_and_units({
    ...     "P_peak": ureg.Quantity(989, "TFLOP/s"),
    ...     "I": ureg.Quantity([0, 85, 1000], "FLOP/byte"),
    ...     "B_mem": ureg.Quantity(4800, "GB/s"),
    ... })
    >>> (compute_c12(inputs) / 1e12).tolist()
    [0.0, 408.0, 989.0]
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch is a {type(batch).__name__}; wanted a mapping of {', '.join(_SYMBOLS)}")
    for symbol in batch:
        if symbol not in _SYMBOLS:
            raise RooflineInputError(
                str(symbol), f"not a symbol of the bound; it takes {', '.join(_SYMBOLS)}"
            )
    values: dict[str, Numbers] = {}
    for symbol in _SYMBOLS:
        if symbol not in batch:
            _, _, example, _ = _SYMBOLS[symbol]
            raise RooflineInputError(symbol, f"missing; give it as a quantity, such as {example}")
        values[symbol] = _checked(symbol, batch[symbol])
    _check_shapes(values)
    return RooflineInputs(peak_flops=values["P_peak"], intensity=values["I"], bandwidth=values["B_mem"])


def _checked(symbol: str, quantity: Any) -> Numbers:
    import pint

    from gpucourse.units import ureg

    meaning, unit, example, positive = _SYMBOLS[symbol]
    if not isinstance(quantity, pint.Quantity):
        raise RooflineInputError(
            symbol, f"{short(quantity)} has no unit; wanted the {meaning} as a quantity, such as {example}"
        )
    if quantity._REGISTRY is not ureg:
        raise RooflineInputError(
            symbol, "its unit comes from another registry; make the quantity with gpucourse.units.ureg"
        )
    if not quantity.is_compatible_with(unit):
        raise RooflineInputError(
            symbol,
            f"{quantity.units} is not a unit of {meaning}; that is measured in {unit}, such as {example}",
        )
    if isinstance(quantity.magnitude, np.ma.MaskedArray) and np.ma.is_masked(quantity.magnitude):
        raise RooflineInputError(
            symbol, "some of its places are masked, so they have no value: give whole arrays"
        )
    try:
        raw = np.asarray(quantity.magnitude)
    except (TypeError, RuntimeError) as error:  # a tensor of another device, or one that holds no values
        raise RooflineInputError(symbol, f"its magnitude is no array of numbers: {error}") from error
    if raw.dtype.kind not in "iuf":
        raise RooflineInputError(symbol, f"its magnitude is {raw.dtype}, not real numbers")
    with np.errstate(over="ignore"):  # what is too large for a float becomes infinite, and is told so below
        si = np.asarray(ureg.Quantity(raw.astype(np.float64), quantity.units).to(unit).magnitude)
    if not np.isfinite(si).all():
        raise RooflineInputError(symbol, f"{_first(raw, ~np.isfinite(si))} is not a finite number")
    wrong = si <= 0 if positive else si < 0
    if wrong.any():
        least = "must be positive" if positive else "must not be negative (0 is a plain copy)"
        raise RooflineInputError(symbol, f"{_first(raw, wrong)} {quantity.units}: a {meaning} {least}")
    return float(si) if si.ndim == 0 else si


def _check_shapes(values: Mapping[str, Numbers]) -> None:
    shapes = {symbol: np.shape(value) for symbol, value in values.items() if np.ndim(value)}
    first, *others = shapes or [""]
    for symbol in others:
        if shapes[symbol] != shapes[first]:
            raise RooflineInputError(
                symbol,
                f"shape {shapes[symbol]} disagrees with {first} of shape {shapes[first]}; arrays must have "
                "the same shape, a scalar goes with any",
            )


def _first(values: NDArray[Any], where: NDArray[np.bool_]) -> str:
    return repr(values[where].flat[0].item() if values.ndim else values.item())


def compute_c12(inputs: RooflineInputs) -> Numbers:
    """Attainable rate of arithmetic, min(P_peak, I · B_mem).

    Parameters
    ----------
    inputs
        What `validate_shapes_and_units` returned.

    Returns
    -------
    float or numpy.ndarray
        In flop/s, of the shape that the inputs share.

    Raises
    ------
    TypeError
        `inputs` was not checked first.

    Examples
    --------
    >>> compute_c12(RooflineInputs(peak_flops=100.0, intensity=2.0, bandwidth=30.0))
    60.0
    """
    if not isinstance(inputs, RooflineInputs):
        raise TypeError(
            f"compute_c12 takes RooflineInputs, not {type(inputs).__name__}; "
            "call validate_shapes_and_units first"
        )
    return _attainable(inputs.peak_flops, inputs.intensity, inputs.bandwidth)


def _attainable(peak: Numbers, intensity: Numbers, bandwidth: Numbers) -> Numbers:
    # An intensity so large that the product overflows is far beyond the ridge: the minimum is the peak.
    with np.errstate(over="ignore"):
        rate = np.minimum(peak, np.multiply(intensity, bandwidth))
    return float(rate) if np.ndim(rate) == 0 else np.asarray(rate)


def is_finite(value: Any) -> bool:
    """Whether every number in `value` is finite.

    Parameters
    ----------
    value
        A number, an array, or a quantity of either.

    Raises
    ------
    TypeError
        `value` does not hold real numbers.

    Examples
    --------
    >>> is_finite(60.0), is_finite(np.array([1.0, np.nan]))
    (True, False)
    """
    try:
        array = np.asarray(getattr(value, "magnitude", value))
    except (ValueError, TypeError, RuntimeError) as error:
        raise TypeError(f"is_finite takes numbers of one shape, not {short(value)}") from error
    if array.dtype.kind not in "iuf":
        raise TypeError(f"is_finite takes real numbers, not {short(value)}")
    return bool(np.isfinite(array).all())


# --- what a device can do -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeastTime:
    """The least time that a device needs for a work, and which ceiling sets it.

    Attributes
    ----------
    arithmetic_ms
        Time of the arithmetic at the peak rate.
    bytes_ms
        Time of the bytes at full bandwidth.
    """

    arithmetic_ms: float
    bytes_ms: float

    @property
    def time_ms(self) -> float:
        """The larger of the two: both go on at once, and the operation waits for the slower."""
        return max(self.arithmetic_ms, self.bytes_ms)

    @property
    def bound(self) -> Bound:
        """Say "memory" where the bytes take longer, else "compute" (exactly at the ridge, too)."""
        return "memory" if self.bytes_ms > self.arithmetic_ms else "compute"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Two ceilings of a device for one precision.

    Attributes
    ----------
    peak_flops
        Dense arithmetic of the precision in flop/s.
    bandwidth
        Bytes to and from device memory, reads and writes together, in bytes/s.

    Raises
    ------
    RooflineInputError
        A ceiling is not a positive finite number.

    Examples
    --------
    >>> roof = Roofline(peak_flops=67e12, bandwidth=4.8e12)
    >>> round(roof.ridge, 2), roof.attainable(5), roof.bound(5)
    (13.96, 24000000000000.0, 'memory')
    """

    peak_flops: float
    bandwidth: float

    def __post_init__(self) -> None:
        for name in ("peak_flops", "bandwidth"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
                raise RooflineInputError(
                    name, f"{short(value)} is not a plain number; quantities go to validate_shapes_and_units"
                )
            if not is_finite_number(value) or value <= 0:
                raise RooflineInputError(name, f"{short(value)} is not a positive finite number")

    @classmethod
    def of(cls, device: Device, dtype: Any) -> Roofline:
        """Take both ceilings from a datasheet record.

        Parameters
        ----------
        device
            From `gpucourse.hardware.device`.
        dtype
            "fp32", "tf32", "fp16", "bf16", "fp8" or a torch dtype.

        Raises
        ------
        MissingFigureError
            The record has no figure for this precision.
        TypeError
            `device` is no record: a name, or None.

        Examples
        --------
        >>> from gpucourse import hardware
        >>> round(Roofline.of(hardware.device("H200"), "bf16").ridge)
        206
        """
        from gpucourse import hardware

        if not isinstance(device, hardware.Device):
            raise TypeError(
                f"Roofline.of takes a record, not {short(device)}: look it up with hardware.device(name), "
                "or measure this card's own ceilings with measure_roofline"
            )
        return cls(peak_flops=device.peak_flops(dtype), bandwidth=device.bandwidth_bytes_per_s)

    @property
    def ridge(self) -> float:
        """Intensity in flop/byte at which the two ceilings meet."""
        return self.peak_flops / self.bandwidth

    @overload
    def attainable(self, intensity: float) -> float: ...
    @overload
    def attainable(self, intensity: NDArray[Any] | Sequence[float]) -> NDArray[np.float64]: ...
    def attainable(self, intensity: Any) -> Any:
        """Highest rate of arithmetic at an intensity.

        Parameters
        ----------
        intensity
            In flop/byte; a number or an array.

        Returns
        -------
        float or numpy.ndarray
            min(peak, intensity · bandwidth) in flop/s.

        Raises
        ------
        RooflineInputError
            The intensity is negative or not finite.
        """
        return _attainable(self.peak_flops, _intensity(intensity), self.bandwidth)

    @overload
    def bound(self, intensity: float) -> Bound: ...
    @overload
    def bound(self, intensity: NDArray[Any] | Sequence[float]) -> NDArray[np.str_]: ...
    def bound(self, intensity: Any) -> Any:
        """Which ceiling limits an operation of this intensity.

        Parameters
        ----------
        intensity
            In flop/byte; a number or an array.

        Returns
        -------
        str or numpy.ndarray of str
            "memory" below the ridge, "compute" at it and above.

        Raises
        ------
        RooflineInputError
            The intensity is negative or not finite.
        """
        below = np.less(_intensity(intensity), self.ridge)
        return np.where(below, "memory", "compute") if np.ndim(below) else ("memory" if below else "compute")

    def least_time(self, work: Work) -> LeastTime:
        """Least time of a work on this device.

        Parameters
        ----------
        work
            Its arithmetic and bytes.

        Returns
        -------
        LeastTime
            Both times, the larger, and which it is.

        Raises
        ------
        TypeError
            `work` is no `Work`.
        """
        if not isinstance(work, Work):
            raise TypeError(
                f"least_time takes Work, not {short(work)}; give Work(flops=…, bytes=…) or what a counter "
                "such as matmul_work returns"
            )
        return LeastTime(
            arithmetic_ms=work.flops / self.peak_flops * 1e3, bytes_ms=work.bytes / self.bandwidth * 1e3
        )


def _intensity(value: Any) -> Numbers:
    if hasattr(value, "magnitude"):  # numpy would take the unit off, whatever it is
        raise RooflineInputError(
            "I", f"{short(value)} is a quantity; quantities go to validate_shapes_and_units"
        )
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise RooflineInputError("I", f"{short(value)} is no array of numbers of one shape") from error
    if array.dtype.kind not in "iuf":
        raise RooflineInputError("I", f"{short(value)} is not a real number of flop/byte")
    if not np.isfinite(array).all():
        raise RooflineInputError("I", f"{_first(array, ~np.isfinite(array))} is not a finite number")
    if (array < 0).any():
        raise RooflineInputError(
            "I", f"{_first(array, array < 0)} is negative; 0 (a plain copy) is the least"
        )
    return float(array) if array.ndim == 0 else array.astype(np.float64)
