"""The memory ledger: what is fixed, what each sample adds, and which microbatch fits.

`MemoryLedger` is arithmetic on four numbers; `fit_ledger` finds two of them from peaks that were predicted or
measured. Neither needs torch.

>>> ledger = fit_ledger([(8, 11.40e9), (16, 21.23e9), (32, 40.89e9)], device_gb=24, reserve=0.10)
>>> ledger.max_microbatch, ledger.fits(17)
(16, False)
"""

from gpucourse.ledger_fit import FittedLedger, LedgerFitError, fit_ledger
from gpucourse.planning_ledger import (
    BLOCKS,
    OVER,
    RESIDENT,
    Block,
    FixedPartOverBudgetError,
    LedgerError,
    LedgerTypeError,
    LedgerValueError,
    MemoryLedger,
    NegativeMicrobatchError,
    NonIntegerMicrobatchError,
    UnlimitedMicrobatchError,
)

__all__ = [
    "BLOCKS",
    "OVER",
    "RESIDENT",
    "Block",
    "FittedLedger",
    "FixedPartOverBudgetError",
    "LedgerError",
    "LedgerFitError",
    "LedgerTypeError",
    "LedgerValueError",
    "MemoryLedger",
    "NegativeMicrobatchError",
    "NonIntegerMicrobatchError",
    "UnlimitedMicrobatchError",
    "fit_ledger",
]
