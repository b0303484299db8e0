"""The lab "GPU memory ledger": a ledger as a stacked picture, a verdict and a data table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Real
from typing import Any

from gpucourse.html import Raw, table
from gpucourse.memory_ledger import (
    OVER,
    FixedPartOverBudgetError,
    MemoryLedger,
    UnlimitedMicrobatchError,
)
from gpucourse.widgets.grid import Control, ControlError, Each, FrameGrid, frame_grid

__all__ = ["memory_lab"]

_MEMORY_CSS = """
.ml{color:inherit;max-width:50em;font-size:1.1em}
.ml .verdict{font-weight:700;margin:.6em 0 .2em}
.ml .scale{position:relative;height:1.5em;font-size:.85em}
.ml .scale>b{position:absolute;white-space:nowrap;font-weight:400;transform:translateX(-100%);
padding-right:.35em;border-right:2px solid currentColor}
.ml .scale>b.device{border-right-width:4px}
.ml .scale>i{position:absolute;right:0}
.ml .bar{position:relative;height:3.2em;border:1px solid currentColor;border-right-style:dashed;
overflow:hidden;display:flex}
.ml .bar>*{min-width:0;overflow:hidden;text-align:center;line-height:3.2em;color:#111;font-size:.85em}
.ml .bar>.fixed{flex:none}
.ml .fixed{background:#9cc3ee}
.ml .acts{flex:1 1 0;display:flex}
.ml .acts>.k{flex:1 1 0;min-width:0;overflow:hidden;box-shadow:inset 1px 0 #111;font-weight:400}
.ml .k{background:#f6c88f}
.ml .over{background:repeating-linear-gradient(0deg,#a11 0 2px,transparent 2px 5px) bottom/100% 30% no-repeat,
#f9b9a8}
.ml .bar .over{font-weight:700}
.ml .reserve{background:repeating-linear-gradient(45deg,rgba(120,120,120,.75) 0 2px,transparent 2px 7px)}
.ml .bar>.reserve,.ml .bar>.outside{position:absolute;top:0;bottom:0;color:inherit}
.ml .bar>.reserve{border-left:2px solid currentColor}
.ml .bar>.outside{border-left:4px solid currentColor}
.ml .key{list-style:none;display:flex;flex-wrap:wrap;gap:.1em 1.2em;padding:0;margin:.4em 0 .8em;
font-size:.85em}
.ml .key li{margin:0}
.ml .key i{display:inline-block;width:1.1em;height:1em;margin-right:.4em;vertical-align:-.12em;
border:1px solid currentColor}
.ml table{border-collapse:collapse;width:100%;font-size:.95em;color:inherit;margin:0}
.ml caption{text-align:left;color:inherit;padding:.2em 0;caption-side:top}
.ml tr,.ml thead,.ml tbody tr:nth-child(odd){background:transparent;color:inherit}
.ml th,.ml td{text-align:left!important;vertical-align:top;padding:.25em .6em .25em 0!important;
white-space:normal!important;border-bottom:1px solid rgba(128,128,128,.45)}
.ml tbody th{font-weight:600}
@media (min-width:700px){.ml th,.ml td:nth-child(2){white-space:nowrap!important}}
"""


def memory_lab(
    ledger: MemoryLedger | None = None,
    microbatches: Sequence[int] = range(65),
    start: int = 16,
    *,
    activations_gb_per_sample: Iterable[float] | None = None,
    fixed_gb: Iterable[float] | None = None,
    device_gb: Iterable[float] | None = None,
    reserve: Iterable[float] | None = None,
) -> FrameGrid:
    """Show a memory ledger as a stacked picture, a verdict and a data table, moved by a microbatch slider.

    Parameters
    ----------
    ledger : MemoryLedger, optional
        The given values; the lab starts there. `MemoryLedger()` where none is given.
    microbatches : sequence of int
        Evenly spaced, 0 or more: the slider's positions.
    start : int
        The one shown first.
    activations_gb_per_sample, fixed_gb, device_gb, reserve : iterable of float, optional
        Steps of each assumption; the ledger's own value joins them. Where left out: a quarter to four times
        the ledger's activations, a half to four times its fixed part, common device sizes, 0 to 20 % in
        reserve. An empty one leaves that control out.

    Returns
    -------
    FrameGrid
        A box of standard widgets that also works in a page with no kernel.

    Raises
    ------
    TypeError
        ``ledger`` is no `MemoryLedger`.
    ControlError
        The microbatches are not evenly spaced integers from 0 up, or ``start`` is none of them.
    LedgerError
        A step that no ledger can have, such as a negative amount.

    Examples
    --------
    >>> lab = memory_lab(device_gb=(), reserve=(), fixed_gb=())
    >>> "fits, 12.96 GB to spare" in lab.first_frame
    True
    """
    if ledger is None:
        ledger = MemoryLedger()
    if not isinstance(ledger, MemoryLedger):
        raise TypeError(
            f"memory_lab takes a MemoryLedger, found {type(ledger).__name__}: "
            "build one with MemoryLedger(fixed_gb=…, activations_gb_per_sample=…, device_gb=…, reserve=…)"
        )
    first = Control(
        name="microbatch",
        label="Microbatch (samples)",
        values=microbatches,
        start=start,
        spoken=lambda m: f"{m} sample{'' if m == 1 else 's'}",
    )
    if not first.slides:
        raise ControlError(
            "microbatches must be evenly spaced integers, 0 or more and rising, found "
            f"{list(microbatches)!r}: give a range such as range(0, 65)"
        )

    def scaled(given: float, otherwise: float, factors: Sequence[float]) -> tuple[float, ...]:
        # Rounded to the digits a person would type: 0.34 x 2 is 0.68.
        return tuple(float(f"{(given or otherwise) * factor:.6g}") for factor in factors)

    given = {
        "activations_gb_per_sample": ledger.activations_gb_per_sample,
        "fixed_gb": ledger.fixed_gb,
        "device_gb": ledger.device_gb,
        "reserve": ledger.reserve,
    }
    labels = {
        "activations_gb_per_sample": "Activations a sample (GB)",
        "fixed_gb": "Fixed part (GB)",
        "device_gb": "Device (GB)",
        "reserve": "Reserve",
    }
    asked = {
        "activations_gb_per_sample": activations_gb_per_sample,
        "fixed_gb": fixed_gb,
        "device_gb": device_gb,
        "reserve": reserve,
    }
    usual = {
        "activations_gb_per_sample": scaled(ledger.activations_gb_per_sample, 0.34, (0.25, 0.5, 1, 2, 4)),
        "fixed_gb": scaled(ledger.fixed_gb, 3.2, (0.5, 1, 2, 4)),
        "device_gb": (12.0, 16.0, 24.0, 48.0, 80.0),
        "reserve": (0.0, 0.1, 0.2),
    }
    controls = [first]
    for name, value in given.items():
        chosen = asked[name]
        steps = sorted({*(usual[name] if chosen is None else _amounts(name, chosen)), value})
        if len(steps) > 1:
            controls.append(
                Control(name=name, label=labels[name], values=steps, start=value, show=_shown(name, value))
            )

    def render(each: Each, **assumed: float) -> str:
        return _memory_frame(each, MemoryLedger(**(given | assumed)), first.values)

    return frame_grid(render, controls, css=_MEMORY_CSS)


def _amounts(name: str, chosen: Any) -> list[float]:
    """Read the steps of an assumption; a ledger refuses the amounts that none can have."""
    if isinstance(chosen, str | bytes) or not isinstance(chosen, Iterable):
        raise ControlError(
            f"{name} lists the steps of its control, such as (12, 24, 48), or () for none; found {chosen!r}"
        )
    steps = list(chosen)
    for step in steps:
        if isinstance(step, bool) or not isinstance(step, Real):
            raise ControlError(f"a step of {name} must be a plain number, found {step!r}")
        MemoryLedger(**{name: float(step)})
    return [float(step) for step in steps]


def _shown(name: str, given: float) -> Callable[[float], str]:
    def show(value: float) -> str:
        text = f"{100 * value:.4g} %" if name == "reserve" else f"{value:g}"
        return f"{text} (given)" if value == given else text

    return show


def _memory_frame(each: Each, ledger: MemoryLedger, microbatches: Sequence[int]) -> str:
    blocks = {m: ledger.blocks(m) for m in microbatches}
    totals = {m: ledger.total_gb(m) for m in microbatches}
    count = len(blocks[microbatches[0]])
    budget, device = f"{ledger.budget_gb:.2f} GB", f"{ledger.device_gb:g} GB"
    fixed_fits = ledger.fits(0)
    axis_gb = (ledger.device_gb or ledger.fixed_gb or 1.0) * 1.25

    def percent(gb: float) -> float:
        return round(100 * gb / axis_gb, 2)

    def over(k: int, m: int) -> bool:
        return blocks[m][k].state == OVER

    def amount(k: int, m: int) -> str:
        return f"{blocks[m][k].activations_gb:.2f}"

    def state(k: int, m: int) -> str:
        return blocks[m][k].state

    def meaning(k: int, m: int) -> str:
        held = "fixed part + block 1" if k == 0 else f"fixed part + blocks 1–{k + 1}"
        if not over(k, m):
            return f"{held}: within the budget"
        if not fixed_fits:
            return "the fixed part alone is over"
        if k and over(k - 1, m):
            return "beyond where it breaks"
        return f"{held}: over, it breaks here"

    def margin(m: int) -> str:
        # What is left of the axis after the bar; negative where the bar runs out of the picture.
        return f"style=margin-right:{max(100 - percent(totals[m]), -2000):.1f}%"

    def block(k: int) -> str:
        return each(
            lambda m: str(k + 1),
            lambda m: 'class="k over"' if over(k, m) else "class=k",
        )

    picture = (
        f'<div class="scale"><b style="left:{percent(ledger.budget_gb)}%">budget {budget}</b>'
        f"<i>{each(lambda m: '→' if totals[m] > axis_gb else '')}</i></div>"
        f'<div class="bar"><span class="fixed{"" if fixed_fits else " over"}" '
        f'style="width:{percent(ledger.fixed_gb)}%">fixed</span>'
        f'<span class="acts">{"".join(block(k) for k in range(count))}</span>'
        f"{each(lambda m: '', margin)}"
        f'<span class="reserve" style="left:{percent(ledger.budget_gb)}%;'
        f'width:{percent(ledger.reserve_gb)}%"></span>'
        f'<span class="outside" style="left:{percent(ledger.device_gb)}%;right:0"></span></div>'
        f'<div class="scale"><b class="device" style="left:{percent(ledger.device_gb)}%">device {device}</b>'
        "</div>"
    )
    key = (
        '<ul class="key"><li><i class="fixed"></i>fixed part</li>'
        '<li><i class="k"></i>activation blocks 1–5</li>'
        '<li><i class="k over"></i>block over the budget</li><li><i class="reserve"></i>reserve</li></ul>'
    )
    fixed_state = "resident" if fixed_fits else OVER
    rows: list[list[str]] = [
        [
            "Fixed part",
            f"{ledger.fixed_gb:.2f} GB, {fixed_state}",
            "weights, gradients, optimizer: the same at every microbatch",
        ]
    ]
    for k in range(count):
        computed = f"{each(partial(amount, k))} GB, {each(partial(state, k))}"
        rows.append([f"Block {k + 1}", Raw(computed), Raw(each(partial(meaning, k)))])
    rows += [
        [
            "Predicted peak",
            Raw(each(lambda m: f"{totals[m]:.2f}") + " GB"),
            "fixed part + all five blocks",
        ],
        ["Budget", budget, f"{device} less {100 * ledger.reserve:.4g} % in reserve"],
        ["Largest microbatch", *_largest(ledger)],
    ]
    # The caption names the conditions, so that the table says all of it to someone who hears only the table.
    caption = Raw(
        f"Microbatch {each(str)} at {ledger.activations_gb_per_sample:g} GB a sample, "
        f"{ledger.fixed_gb:g} GB fixed, {device}, {100 * ledger.reserve:.4g} % in reserve. "
        "Blocks are cumulative."
    )
    body = table(["Item", "Computed state", "Interpretation"], rows)
    body = body.replace("<thead>", f"<caption>{caption}</caption><thead>", 1)
    return (
        f'<div class="ml"><p class="verdict" role="status">Microbatch {each(str)}: {each(ledger.verdict)}</p>'
        f'<div aria-hidden="true">{picture}{key}</div>{body}</div>'
    )


def _largest(ledger: MemoryLedger) -> tuple[str, str]:
    room = f"({ledger.budget_gb:.2f} − {ledger.fixed_gb:.2f}) / {ledger.activations_gb_per_sample:g}"
    try:
        largest = ledger.max_microbatch
    except FixedPartOverBudgetError:
        return "none", ledger.verdict(0)
    except UnlimitedMicrobatchError:
        return "no limit", "a sample costs nothing"
    if largest > 10**6:
        return "over a million", "a sample costs next to nothing"
    exact = (ledger.budget_gb - ledger.fixed_gb) / ledger.activations_gb_per_sample
    # The quotient in floats may sit a hair below an exact integer; show it as the ledger decides it.
    shown = max(math.floor(exact * 100 + 1e-6) / 100, float(largest))
    return str(largest), f"{room} = {shown:.2f}, rounded down"
