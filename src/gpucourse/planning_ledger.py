"""A planning formula for the memory of one training step: what is fixed, and what each sample adds.

Plain arithmetic on four numbers; neither torch nor numpy is needed. The formula is a *plan*: "fits" means
that the predicted peak of **allocated** memory is at most device x (1 - reserve). What the allocator reserves
on top, what it loses to fragmentation and what the CUDA context takes are paid for by the reserve, and are not
predicted.

>>> ledger = MemoryLedger()
>>> ledger.budget_gb, ledger.max_microbatch
(21.6, 54)
>>> ledger.verdict(16)
'fits, 12.96 GB to spare'
>>> ledger.verdict(55)
'over the budget by 0.30 GB: block 5 is where it breaks'
>>> [round(block.activations_gb, 2) for block in ledger.blocks(16)]
[1.09, 2.18, 3.26, 4.35, 5.44]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from numbers import Integral, Real

BLOCKS = 5
"""Number of equal blocks into which the ledger divides a sample's activations."""

RESIDENT = "resident"
"""State of a block that still lies within the budget."""

OVER = "over the budget"
"""State of a block that, with the fixed part and the blocks below it, exceeds the budget."""

# Memory comes in whole bytes. An excess that rounds to no byte comes from rounding of the inputs (0.1 + 0.2
# is 5e-17 above 0.3), never from a tensor.
_HALF_A_BYTE_GB = Fraction(1, 2 * 10**9)


class LedgerError(Exception):
    """Base of every error that the ledger raises."""


class LedgerValueError(LedgerError, ValueError):
    """An amount is negative or not finite, or the reserve lies outside [0, 1)."""


class LedgerTypeError(LedgerError, TypeError):
    """An amount or the reserve is not a plain number."""


class NegativeMicrobatchError(LedgerError, ValueError):
    """The microbatch is below 0."""


class NonIntegerMicrobatchError(LedgerError, TypeError):
    """The microbatch is not an integer: a float (NaN and infinity too), a bool, a string."""


class FixedPartOverBudgetError(LedgerError, ValueError):
    """No microbatch fits: the fixed part alone is over the budget."""


class UnlimitedMicrobatchError(LedgerError, ValueError):
    """Every microbatch fits, because a sample costs nothing: there is no largest one."""


@lru_cache(maxsize=4096)
def _exact(value: float) -> Fraction:
    # The decimal that was typed, not the binary neighbour that stores it: 16 * 0.34 + 3.2 is then 8.64.
    return Fraction(repr(value))


def _to_float(value: Fraction | int, divisor: int = 1) -> float:
    try:
        return float(value / divisor)
    except OverflowError:  # behaves as float arithmetic does
        return math.inf if value > 0 else -math.inf


def _number(value: object, name: str, example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise LedgerTypeError(
            f"{name} must be a plain number such as {example}, found {value!r} of type {type(value).__name__}"
        )
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats, perhaps too long to be written
        number = -math.inf if value < 0 else math.inf
    if not math.isfinite(number):
        raise LedgerValueError(f"{name} must be finite, found {number}: give a number such as {example}")
    return number + 0.0  # -0.0 becomes 0.0


def _shown(count: int) -> str:
    """Write an integer, a long one by its power of ten."""
    if abs(count) < 10**18:
        return str(count)
    sign, power = "-" if count < 0 else "", math.floor(math.log10(abs(count)))
    return f"{sign}{abs(count) / 10**power:.2f}e{power}" if power < 300 else f"about {sign}1e{power}"


def _format_gb(gb: Fraction) -> str:
    """Two decimals in GB; smaller units where those would round a real amount to nothing."""
    if gb >= 10**15:  # beyond all memory, and perhaps beyond all floats
        return f"{_shown(round(gb))} GB"
    if gb == 0 or gb >= Fraction(5, 1000):
        return f"{_to_float(gb):.2f} GB"
    for unit, per_gb in (("MB", 10**3), ("kB", 10**6)):
        if gb * per_gb >= 1:
            return f"{_to_float(gb * per_gb):.2f} {unit}"
    count = round(gb * 10**9)
    return f"{count} byte{'' if count == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One of the five activation blocks of a ledger at a given microbatch.

    Attributes
    ----------
    item : str
        Name of the block: ``"block 1"`` to ``"block 5"``.
    activations_gb : float
        *Cumulative* activations in GB (1e9 bytes): those of this block and of all blocks below it.
    state : str
        ``RESIDENT``, or ``OVER`` where the fixed part and ``activations_gb`` together exceed the budget.
    """

    item: str
    activations_gb: float
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """Planned memory of a training step as a function of the microbatch.

    ``total = fixed + microbatch x activations a sample``, compared with ``budget = device x (1 - reserve)``.
    The comparison is made on the decimals as typed, exactly; an excess of less than half a byte counts as
    rounding of the inputs. Exactly at the budget fits.

    Parameters
    ----------
    fixed_gb : float
        Weights, gradients and optimizer state in GB (1e9 bytes): what does not grow with the microbatch.
    activations_gb_per_sample : float
        Activations in GB that one sample keeps for the backward pass.
    device_gb : float
        Device memory in GB. A card of 24 GiB has 25.77 GB.
    reserve : float
        Part of the device that the plan leaves free, in [0, 1): for the CUDA context, fragmentation and what
        the allocator reserves beyond what is allocated.

    Raises
    ------
    LedgerValueError
        An amount is negative or not finite, or ``reserve`` lies outside [0, 1).
    LedgerTypeError
        An argument is not a plain number (a bool is none).

    Examples
    --------
    >>> ledger = MemoryLedger(fixed_gb=3.2, activations_gb_per_sample=0.34, device_gb=24, reserve=0.10)
    >>> ledger.total_gb(16), ledger.headroom_gb(16), ledger.fits(54), ledger.fits(55)
    (8.64, 12.96, True, False)
    """

    fixed_gb: float = 3.2
    activations_gb_per_sample: float = 0.34
    device_gb: float = 24.0
    reserve: float = 0.10

    def __post_init__(self) -> None:
        for name, example in (
            ("fixed_gb", "3.2"),
            ("activations_gb_per_sample", "0.34"),
            ("device_gb", "24"),
            ("reserve", "0.10"),
        ):
            value = _number(getattr(self, name), name, example)
            object.__setattr__(self, name, value)
            if name != "reserve" and value < 0:
                raise LedgerValueError(f"{name} must not be negative, found {value:g}: give an amount in GB")
        if not 0 <= self.reserve < 1:
            raise LedgerValueError(
                f"reserve must be a part of the device in [0, 1), found {self.reserve:g}: write 10 % as 0.10"
            )

    @property
    def budget_gb(self) -> float:
        """What the plan may use, in GB: device x (1 - reserve).

        >>> MemoryLedger(device_gb=80, reserve=0.05).budget_gb
        76.0
        """
        return _to_float(self._budget)

    @property
    def reserve_gb(self) -> float:
        """What the plan leaves free, in GB: device x reserve.

        >>> MemoryLedger().reserve_gb
        2.4
        """
        return _to_float(_exact(self.device_gb) * _exact(self.reserve))

    @property
    def max_microbatch(self) -> int:
        """Largest microbatch that fits.

        Raises
        ------
        FixedPartOverBudgetError
            Not even microbatch 0 fits.
        UnlimitedMicrobatchError
            A sample costs 0 GB, so every microbatch fits.

        Examples
        --------
        >>> MemoryLedger(activations_gb_per_sample=0.68).max_microbatch
        27
        """
        room = self._budget + _HALF_A_BYTE_GB - _exact(self.fixed_gb)
        if room < 0:
            raise FixedPartOverBudgetError(
                f"no microbatch fits: {self.verdict(0)} ({self.fixed_gb:g} GB against {self.budget_gb:g} GB)."
                " Shrink the fixed part, or take a larger device or a smaller reserve."
            )
        if self.activations_gb_per_sample == 0:
            raise UnlimitedMicrobatchError(
                "activations_gb_per_sample is 0, so every microbatch fits and none is the largest: "
                "give what one sample keeps for the backward pass, in GB"
            )
        return int(room // _exact(self.activations_gb_per_sample))

    def total_gb(self, microbatch: int) -> float:
        """Predicted peak of allocated memory in GB; microbatch 0 is the fixed part alone.

        >>> MemoryLedger().total_gb(0), MemoryLedger().total_gb(54)
        (3.2, 21.56)
        """
        return _to_float(self._total(microbatch))

    def headroom_gb(self, microbatch: int) -> float:
        """Budget minus predicted peak, in GB: negative exactly where the microbatch does not fit.

        >>> MemoryLedger().headroom_gb(55)
        -0.3
        """
        return _to_float(self._headroom(microbatch))

    def fits(self, microbatch: int) -> bool:
        """Whether the predicted peak is at most the budget.

        >>> MemoryLedger(fixed_gb=0.1, activations_gb_per_sample=0.2, device_gb=0.3, reserve=0).fits(1)
        True
        """
        return self._headroom(microbatch) >= 0

    def blocks(self, microbatch: int) -> tuple[Block, ...]:
        """Five blocks, block k holding the cumulative activations ``microbatch x activations x k / 5``.

        Parameters
        ----------
        microbatch : int
            Samples in one forward and backward pass, 0 or more.

        Returns
        -------
        tuple of Block
            From block 1 to block 5; once a block is over the budget, every later one is, too.

        Raises
        ------
        NegativeMicrobatchError
            The microbatch is below 0.
        NonIntegerMicrobatchError
            The microbatch is not an integer.

        Examples
        --------
        >>> MemoryLedger().blocks(55)[4]
        Block(item='block 5', activations_gb=18.7, state='over the budget')
        """
        activations = self._activations(microbatch)
        room = self._budget + _HALF_A_BYTE_GB - _exact(self.fixed_gb)
        # Whole numbers from here on: a lab asks for these blocks 19,500 times.
        part, parts = activations.numerator, activations.denominator * BLOCKS
        crosses_at = room.numerator * parts, room.denominator * part
        return tuple(
            Block(
                item=f"block {k}",
                activations_gb=_to_float(part * k, parts),
                state=RESIDENT if k * crosses_at[1] <= crosses_at[0] else OVER,
            )
            for k in range(1, BLOCKS + 1)
        )

    def verdict(self, microbatch: int) -> str:
        """Say in words whether the microbatch fits, by how much, and where it breaks.

        >>> MemoryLedger().verdict(54)
        'fits, 0.04 GB to spare'
        >>> MemoryLedger(fixed_gb=23.2).verdict(1)
        'the fixed part alone is over the budget by 1.60 GB'
        """
        headroom = self._headroom(microbatch)
        if headroom >= 0:
            return f"fits, {_format_gb(headroom)} to spare"
        fixed_alone = self._headroom(0)
        if fixed_alone < 0:
            return f"the fixed part alone is over the budget by {_format_gb(-fixed_alone)}"
        breaks = next(block.item for block in self.blocks(microbatch) if block.state == OVER)
        return f"over the budget by {_format_gb(-headroom)}: {breaks} is where it breaks"

    @property
    def _budget(self) -> Fraction:
        return _exact(self.device_gb) * (1 - _exact(self.reserve))

    def _activations(self, microbatch: int) -> Fraction:
        if isinstance(microbatch, bool) or not isinstance(microbatch, Integral):
            raise NonIntegerMicrobatchError(
                f"microbatch must be an integer, found {microbatch!r} of type {type(microbatch).__name__}: "
                "it counts samples, so give 0, 1, 2, …"
            )
        count = int(microbatch)
        if count < 0:
            raise NegativeMicrobatchError(
                f"microbatch must be 0 or more, found {_shown(count)}: it counts samples in one pass"
            )
        return count * _exact(self.activations_gb_per_sample)

    def _total(self, microbatch: int) -> Fraction:
        return _exact(self.fixed_gb) + self._activations(microbatch)

    def _headroom(self, microbatch: int) -> Fraction:
        headroom = self._budget - self._total(microbatch)
        return Fraction(0) if -_HALF_A_BYTE_GB <= headroom < 0 else headroom
