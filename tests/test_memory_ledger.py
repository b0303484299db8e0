"""The ledger's arithmetic, its edges, and what it refuses."""

from __future__ import annotations

import math
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpucourse import recording
from gpucourse.memory_ledger import (
    BLOCKS,
    OVER,
    RESIDENT,
    FixedPartOverBudgetError,
    LedgerTypeError,
    LedgerValueError,
    MemoryLedger,
    NegativeMicrobatchError,
    NonIntegerMicrobatchError,
    UnlimitedMicrobatchError,
)

PLAN = MemoryLedger(fixed_gb=3.2, activations_gb_per_sample=0.34, device_gb=24, reserve=0.10)

amounts = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
sizes = st.integers(0, 100_000).map(
    lambda mb: mb / 1000
)  # as a person types them: 0 to 100 GB, three decimals
ledgers = st.builds(
    MemoryLedger,
    fixed_gb=sizes,
    activations_gb_per_sample=sizes,
    device_gb=sizes,
    reserve=st.integers(0, 99).map(lambda percent: percent / 100),
)
wild_ledgers = st.builds(
    MemoryLedger,
    fixed_gb=amounts,
    activations_gb_per_sample=amounts,
    device_gb=amounts,
    reserve=st.floats(0, 1, exclude_max=True),
)
microbatches = st.integers(0, 10_000)


# --- the plan of the lab -----------------------------------------------------------------------------


def test_the_given_plan_reads_as_the_lab_prints_it() -> None:
    assert MemoryLedger() == PLAN
    assert PLAN.budget_gb == 21.6
    assert PLAN.reserve_gb == 2.4
    assert PLAN.max_microbatch == 54
    assert PLAN.total_gb(16) == 8.64
    assert PLAN.headroom_gb(16) == 12.96
    assert [round(block.activations_gb, 2) for block in PLAN.blocks(16)] == [1.09, 2.18, 3.26, 4.35, 5.44]
    assert [block.state for block in PLAN.blocks(16)] == [RESIDENT] * BLOCKS
    assert [block.item for block in PLAN.blocks(16)] == [f"block {k}" for k in range(1, 6)]


@pytest.mark.parametrize(
    ("microbatch", "said"),
    [
        (0, "fits, 18.40 GB to spare"),
        (16, "fits, 12.96 GB to spare"),
        (32, "fits, 7.52 GB to spare"),
        (54, "fits, 0.04 GB to spare"),
        (55, "over the budget by 0.30 GB: block 5 is where it breaks"),
        (64, "over the budget by 3.36 GB: block 5 is where it breaks"),
        (68, "over the budget by 4.72 GB: block 4 is where it breaks"),
        (1000, "over the budget by 321.60 GB: block 1 is where it breaks"),
    ],
)
def test_the_verdict_says_by_how_much_and_where_it_breaks(microbatch: int, said: str) -> None:
    assert PLAN.verdict(microbatch) == said


def test_microbatch_zero_is_the_fixed_part_alone() -> None:
    assert PLAN.total_gb(0) == PLAN.fixed_gb
    assert {(block.activations_gb, block.state) for block in PLAN.blocks(0)} == {(0.0, RESIDENT)}


def test_a_block_crosses_where_it_exceeds_the_budget_with_the_fixed_part() -> None:
    # 3.2 + 68 x 0.34 x k / 5 is 17.07 at k = 3 and 21.70 at k = 4, against 21.6.
    assert [block.state for block in PLAN.blocks(68)] == [RESIDENT] * 3 + [OVER] * 2


# --- exactly at the budget ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fixed", "each", "device", "reserve", "microbatch"),
    [
        (3.2, 0.49, 24, 0.05, 40),  # in floats 22.8 <= 22.799999999999997
        (0.1, 0.2, 0.3, 0, 1),  # in floats 0.1 + 0.2 > 0.3
        (2.0, 0.1, 8, 0.05, 56),
        (3.2, 0.2, 16, 0.1, 56),
        (12.8, 0.34, 16, 0.2, 0),
    ],
)
def test_exactly_at_the_budget_fits_though_floats_deny_it(
    fixed: float, each: float, device: float, reserve: float, microbatch: int
) -> None:
    ledger = MemoryLedger(fixed_gb=fixed, activations_gb_per_sample=each, device_gb=device, reserve=reserve)
    assert ledger.fits(microbatch)
    assert not ledger.fits(microbatch + 1)
    assert ledger.max_microbatch == microbatch
    assert ledger.headroom_gb(microbatch) == 0
    assert ledger.verdict(microbatch) == "fits, 0.00 GB to spare"
    assert all(block.state == RESIDENT for block in ledger.blocks(microbatch))


def test_an_amount_that_was_itself_rounded_still_fits_at_the_budget() -> None:
    assert 0.1 + 0.2 != 0.3
    ledger = MemoryLedger(fixed_gb=0.1 + 0.2, activations_gb_per_sample=1, device_gb=0.3, reserve=0)
    assert ledger.fits(0)
    assert ledger.headroom_gb(0) == 0
    assert ledger.max_microbatch == 0


def test_one_byte_over_the_budget_does_not_fit_and_is_named() -> None:
    ledger = MemoryLedger(fixed_gb=10.000000001, activations_gb_per_sample=1, device_gb=10, reserve=0)
    assert not ledger.fits(0)
    assert ledger.verdict(0) == "the fixed part alone is over the budget by 1 byte"
    with pytest.raises(FixedPartOverBudgetError):
        _ = ledger.max_microbatch


@pytest.mark.parametrize(
    ("over_gb", "said"),
    [(1.6, "1.60 GB"), (0.005, "0.01 GB"), (0.004, "4.00 MB"), (0.0000004, "400 bytes"), (2e-6, "2.00 kB")],
)
def test_a_small_excess_is_not_rounded_away(over_gb: float, said: str) -> None:
    over = float(Decimal("20") + Decimal(str(over_gb)))
    ledger = MemoryLedger(fixed_gb=over, device_gb=20, reserve=0)
    assert ledger.verdict(3).endswith(f"by {said}")


@given(ledgers, microbatches)
def test_fitting_agrees_with_the_decimals_as_typed(ledger: MemoryLedger, microbatch: int) -> None:
    total = Decimal(str(ledger.fixed_gb)) + microbatch * Decimal(str(ledger.activations_gb_per_sample))
    budget = Decimal(str(ledger.device_gb)) * (1 - Decimal(str(ledger.reserve)))
    assert ledger.fits(microbatch) is (total <= budget)
    assert ledger.total_gb(microbatch) == float(total)


# --- properties --------------------------------------------------------------------------------------


@given(wild_ledgers)
def test_the_largest_microbatch_is_the_last_that_fits(ledger: MemoryLedger) -> None:
    if not ledger.fits(0):
        with pytest.raises(FixedPartOverBudgetError):
            _ = ledger.max_microbatch
    elif ledger.activations_gb_per_sample == 0:
        with pytest.raises(UnlimitedMicrobatchError):
            _ = ledger.max_microbatch
    else:
        assert ledger.fits(ledger.max_microbatch)
        assert not ledger.fits(ledger.max_microbatch + 1)


@given(wild_ledgers, microbatches)
def test_every_answer_of_a_ledger_agrees_with_every_other(ledger: MemoryLedger, microbatch: int) -> None:
    fits = ledger.fits(microbatch)
    assert (ledger.headroom_gb(microbatch) >= 0) is fits
    assert ledger.verdict(microbatch).startswith("fits, ") is fits
    blocks = ledger.blocks(microbatch)
    assert len(blocks) == BLOCKS
    assert (blocks[-1].state == RESIDENT) is fits
    states = [block.state for block in blocks]
    assert states == sorted(states, key=[RESIDENT, OVER].index)  # once over, over to the end
    if not fits and ledger.fits(0):
        first = next(block.item for block in blocks if block.state == OVER)
        assert ledger.verdict(microbatch).endswith(f": {first} is where it breaks")


@given(ledgers, microbatches)
def test_blocks_are_cumulative_and_end_at_the_whole_of_the_activations(
    ledger: MemoryLedger, microbatch: int
) -> None:
    whole = microbatch * Fraction(str(ledger.activations_gb_per_sample))
    assert [block.activations_gb for block in ledger.blocks(microbatch)] == [
        float(whole * k / 5) for k in range(1, 6)
    ]


@given(ledgers, microbatches)
def test_one_sample_more_never_frees_memory(ledger: MemoryLedger, microbatch: int) -> None:
    assert ledger.headroom_gb(microbatch + 1) <= ledger.headroom_gb(microbatch)
    assert ledger.fits(microbatch) or not ledger.fits(microbatch + 1)


@given(wild_ledgers, st.integers(min_value=10**20, max_value=10**400))
def test_a_microbatch_beyond_any_float_is_answered_all_the_same(
    ledger: MemoryLedger, microbatch: int
) -> None:
    assume(ledger.activations_gb_per_sample > 0)
    total = ledger.total_gb(microbatch)
    assert total >= 0
    assert not math.isnan(total)
    assert isinstance(ledger.fits(microbatch), bool)
    assert ledger.verdict(microbatch)


# --- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["total_gb", "headroom_gb", "fits", "blocks", "verdict"])
@pytest.mark.parametrize(
    "microbatch",
    [
        -1,
        -(10**30),
        2.5,
        16.0,
        math.nan,
        math.inf,
        -math.inf,
        True,
        False,
        np.True_,
        "16",
        None,
        1j,
        np.float64(3),
    ],
)
def test_a_microbatch_that_counts_no_samples_is_refused(ask: str, microbatch: object) -> None:
    wanted = NegativeMicrobatchError if type(microbatch) is int else NonIntegerMicrobatchError
    with pytest.raises(wanted, match=r"microbatch must be .* found .*: it counts"):
        getattr(PLAN, ask)(microbatch)


def test_the_microbatch_errors_are_value_and_type_errors() -> None:
    assert issubclass(NegativeMicrobatchError, ValueError)
    assert issubclass(NonIntegerMicrobatchError, TypeError)
    assert issubclass(FixedPartOverBudgetError, ValueError)
    assert issubclass(UnlimitedMicrobatchError, ValueError)


def test_numpy_integers_are_integers() -> None:
    assert PLAN.total_gb(np.int64(16)) == 8.64


@pytest.mark.parametrize("name", ["fixed_gb", "activations_gb_per_sample", "device_gb"])
@pytest.mark.parametrize("value", [-1, -1e-300, math.nan, math.inf, -math.inf, 10**400])
def test_an_amount_that_no_memory_has_is_refused(name: str, value: float) -> None:
    with pytest.raises(LedgerValueError, match=rf"{name} must (not be negative|be finite), found .*: give a"):
        MemoryLedger(**{name: value})


@pytest.mark.parametrize("name", ["fixed_gb", "activations_gb_per_sample", "device_gb", "reserve"])
@pytest.mark.parametrize("value", ["0.5", None, True, 1j, [0.5], np.array([0.5])])
def test_an_amount_that_is_no_plain_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(LedgerTypeError, match=rf"{name} must be a plain number such as .*, found .* of type"):
        MemoryLedger(**{name: value})


@pytest.mark.parametrize("reserve", [1, 1.5, 10, -0.1, math.nan, math.inf])
def test_a_reserve_outside_zero_to_one_is_refused(reserve: float) -> None:
    with pytest.raises(LedgerValueError, match=r"reserve must be .*found"):
        MemoryLedger(reserve=reserve)


def test_ten_percent_typed_as_ten_is_told_how_to_be_written() -> None:
    with pytest.raises(LedgerValueError, match=r"found 10: write 10 % as 0\.10"):
        MemoryLedger(reserve=10)


def test_a_fixed_part_over_the_budget_is_said_by_how_much() -> None:
    ledger = MemoryLedger(fixed_gb=23.2)
    for microbatch in (0, 1, 64):
        assert ledger.verdict(microbatch) == "the fixed part alone is over the budget by 1.60 GB"
    assert all(block.state == OVER for block in ledger.blocks(0))
    with pytest.raises(FixedPartOverBudgetError, match=r"no microbatch fits: .* over the budget by 1\.60 GB"):
        _ = ledger.max_microbatch


def test_samples_that_cost_nothing_have_no_largest_microbatch() -> None:
    ledger = MemoryLedger(activations_gb_per_sample=0)
    assert ledger.fits(10**9)
    with pytest.raises(UnlimitedMicrobatchError, match="every microbatch fits and none is the largest"):
        _ = ledger.max_microbatch


def test_minus_zero_is_zero() -> None:
    assert repr(MemoryLedger(fixed_gb=-0.0)) == repr(MemoryLedger(fixed_gb=0))


def test_a_ledger_cannot_be_changed_and_takes_names_only() -> None:
    with pytest.raises(AttributeError):
        PLAN.fixed_gb = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        MemoryLedger(3.2, 0.34, 24, 0.1)  # type: ignore[misc]


def test_the_ledger_works_where_torch_and_numpy_are_not_installed() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        "from gpucourse.memory_ledger import MemoryLedger\n"
        "print(MemoryLedger().max_microbatch)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "54"


# --- what the lab says of its recordings: a re-recording that contradicts a sentence fails here


def test_the_loss_alone_breaks_the_plan_at_microbatch_32() -> None:
    loss = recording.load("loss_memory")
    assert loss["logits_bytes_per_sample"] == 1024 * 50_304 * 4
    assert loss["copies"] == pytest.approx(4, abs=0.05)
    assert loss["per_sample_bytes"] > (21.6e9 - 1.98e9) / 32
    assert 32 * loss["per_sample_bytes"] > 24e9


def test_the_three_counters_move_by_the_allocators_units() -> None:
    before, one, two, three, four, deleted, emptied = recording.load("three_counters")["rows"]
    assert one["allocated"] - before["allocated"] == 512
    assert one["reserved"] - before["reserved"] == 2 * 2**20
    assert two["allocated"] - one["allocated"] == 1024
    assert two["reserved"] == one["reserved"]
    assert three["reserved"] - two["reserved"] == 20 * 2**20
    whole = math.ceil(100_000_000 / 2**21) * 2**21
    assert whole - 100_000_000 < 2**20  # so the rest is not split off
    assert four["reserved"] - three["reserved"] == four["allocated"] - three["allocated"] == whole
    assert (deleted["allocated"], deleted["reserved"]) == (before["allocated"], four["reserved"])
    assert emptied["reserved"] == before["reserved"]
    for row in (one, two, three, four, deleted, emptied):  # the driver's column follows the segments
        assert row["driver"] - before["driver"] == row["reserved"] - before["reserved"]


def test_a_cap_of_24e9_bytes_refuses_the_last_of_24_tensors_of_1e9() -> None:
    cap = recording.load("cap_met")
    assert (cap["cap_bytes"], cap["piece_bytes"], cap["pieces"]) == (24e9, 10**9, 23)
    assert cap["reserved"] == cap["allocated"] == 23 * 477 * 2**21
    assert 24 * 477 * 2**21 - 24 * 10**9 == 8_196_096
    for said in (
        "Tried to allocate 954.00 MiB",
        "22.35 GiB allowed",
        "is free",
        "reserved by PyTorch but unallocated",
    ):
        assert said in cap["message"]


def test_amounts_beyond_all_floats_are_told_in_words_that_hold() -> None:
    assert MemoryLedger().verdict(10**400).startswith("over the budget by about 1e399 GB: block 1")
    assert MemoryLedger().verdict(10**30).startswith("over the budget by 3.40e29 GB: block 1")
    for sign, shown in ((1, "inf"), (-1, "-inf")):
        with pytest.raises(LedgerValueError, match=f"fixed_gb must be finite, found {shown}: give"):
            MemoryLedger(fixed_gb=sign * 10**5000)
    with pytest.raises(NegativeMicrobatchError, match="found about -1e5000: it counts"):
        MemoryLedger().total_gb(-(10**5000))
