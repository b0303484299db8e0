"""The memory lab's scenarios: ledgers of steps that exist, with what was measured drawn on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

from gpucourse.html import Raw, escape, table
from gpucourse.memory_ledger import FixedPartOverBudgetError, MemoryLedger
from gpucourse.scenarios import Scenario, night_scenarios
from gpucourse.widgets.grid import Control, ControlError, Each, FrameGrid, frame_grid

__all__ = ["scenario_lab"]

_CSS = """
.sc{color:inherit;max-width:50em;font-size:1.1em}
.sc .verdict{font-weight:700;margin:.6em 0 .2em}
.sc svg{display:block;width:100%;max-width:40em;height:auto;overflow:hidden}
.sc svg text{fill:currentColor;font-size:11px}
.sc svg .end{text-anchor:end}
.sc svg .mid{text-anchor:middle}
.sc svg path{fill:none}
.sc svg .net{stroke:currentColor;opacity:.22;stroke-width:.6}
.sc svg .line{stroke:#2f7fc1;stroke-width:2.2}
.sc svg .budget{stroke:currentColor;stroke-width:1.2;stroke-dasharray:5 3}
.sc svg .here{fill:#2f7fc1;stroke:currentColor;stroke-width:1.4}
.sc svg .drop{stroke:#2f7fc1;stroke-width:1}
.sc svg .measured{stroke:#c8691c;stroke-width:2}
.sc svg .predicted{stroke:#2f7fc1;stroke-width:1.5}
.sc .key{list-style:none;display:flex;flex-wrap:wrap;gap:.1em 1.2em;padding:0;margin:.4em 0 .8em;font-size:.85em}
.sc .key li{margin:0}
.sc .key svg{display:inline-block;width:2.2em;height:1em;margin-right:.4em;vertical-align:-.12em}
.sc table{border-collapse:collapse;width:100%;font-size:.95em;color:inherit;margin:0 0 1em}
.sc caption{text-align:left;color:inherit;padding:.2em 0;caption-side:top}
.sc tr,.sc thead,.sc tbody tr:nth-child(odd){background:transparent;color:inherit}
.sc th,.sc td{text-align:left!important;vertical-align:top;padding:.25em .6em .25em 0!important;
white-space:normal!important;border-bottom:1px solid rgba(128,128,128,.45)}
.sc tbody th{font-weight:600}
.sc .source{font-size:.85em;margin:0 0 .6em}
@media (min-width:700px){.sc th,.sc td:nth-child(2){white-space:nowrap!important}}
"""

_MICROBATCHES = range(1, 65)
_DEVICES_GB = (16.0, 24.0, 40.0, 48.0)
_RESERVES = (0.0, 0.1, 0.2)
_TOP_GB = 60.0


def scenario_lab(
    scenarios: Sequence[Scenario] | None = None,
    microbatches: Sequence[int] = _MICROBATCHES,
    start: int = 16,
    *,
    start_device_gb: float = 24.0,
    start_reserve: float = 0.1,
) -> FrameGrid:
    """Show the ledgers of real steps as lines over the microbatch, with what was measured of each.

    Parameters
    ----------
    scenarios : sequence of Scenario, optional
        Two or more; those of the night where none are given, the plan first.
    microbatches : sequence of int
        Evenly spaced, 1 or more: the slider's positions.
    start : int
        The one shown first.
    start_device_gb, start_reserve : float
        The device and the reserve shown first.

    Returns
    -------
    FrameGrid
        A box of standard widgets that also works in a page with no kernel.

    Raises
    ------
    ControlError
        Fewer than two scenarios, or microbatches that are not evenly spaced integers from 1 up.

    Examples
    --------
    >>> "Microbatch 16, the plan: fits, 12.96 GB to spare" in scenario_lab().first_frame
    True
    """
    known = list(night_scenarios() if scenarios is None else scenarios)
    first = Control(
        name="microbatch",
        label="Microbatch (samples)",
        values=microbatches,
        start=start,
        spoken=lambda m: f"{m} sample{'' if m == 1 else 's'}",
    )
    if not first.slides or first.values[0] < 1:
        raise ControlError(
            "microbatches must be evenly spaced integers, 1 or more and rising, found "
            f"{list(first.values)!r}: give a range such as range(1, 65)"
        )
    labels = [scenario.label for scenario in known]
    chosen = Control(name="scenario", label="Scenario", values=labels, start=labels[0] if labels else "")
    within = [
        Control(
            name="device_gb",
            label="Device (GB)",
            values=_DEVICES_GB,
            start=start_device_gb,
            show="{:g}".format,
        ),
        Control(name="reserve", label="Reserve", values=_RESERVES, start=start_reserve, show=_percent),
    ]

    def render(each: Each, scenario: str, device_gb: Each, reserve: Each) -> str:
        found = known[labels.index(scenario)]
        return _Frame(found, first.values, each, device_gb, reserve).html()

    return frame_grid(render, [first, chosen], within=within, css=_CSS)


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


class _Frame:
    """One scenario, for every microbatch, device and reserve."""

    LEFT, RIGHT, TOP, BOTTOM = 34.0, 352.0, 10.0, 196.0

    def __init__(
        self,
        scenario: Scenario,
        microbatches: Sequence[int],
        each: Each,
        device: Each,
        reserve: Each,
    ) -> None:
        self.scenario, self.microbatches = scenario, microbatches
        self.each, self.device, self.reserve = each, device, reserve
        self.last = microbatches[-1]

    def ledger(self, device_gb: float, share: float) -> MemoryLedger:
        return dataclasses.replace(self.scenario.ledger, device_gb=device_gb, reserve=share)

    def on(self, text: partial[str]) -> str:
        """Give a text of every device and reserve."""
        return self.device(lambda gb: self.reserve(lambda share: text(self.ledger(gb, share))))

    def html(self) -> str:
        scenario = self.scenario
        verdict = self.each(lambda m: self.on(partial(self.verdict, m)))
        where = f"{self.device('{:g}'.format)} GB with {self.reserve(_percent)} in reserve"
        conditions = f"Microbatch {self.each(str)}, {escape(scenario.label)}"
        body = table(["Item", "Value", "What it says"], self.rows())
        body = body.replace("<thead>", f"<caption>{conditions}, on {where}.</caption><thead>", 1)
        return (
            f'<div class="sc"><p class="verdict" role="status">{conditions}: {verdict}</p>'
            f'<div aria-hidden="true">{self.picture()}{self.key()}</div>{body}{self.measured()}</div>'
        )

    def verdict(self, microbatch: int, ledger: MemoryLedger) -> str:
        peak = self.scenario.peak_gb(microbatch)
        if peak == ledger.total_gb(microbatch):
            return ledger.verdict(microbatch).split(":")[0]  # the block where it breaks is the other lab's
        flat = dataclasses.replace(
            MemoryLedger(device_gb=ledger.device_gb, reserve=ledger.reserve), fixed_gb=peak
        )
        return flat.verdict(0).replace("the fixed part alone is over", "over")

    def rows(self) -> list[list[str]]:
        scenario, ledger = self.scenario, self.scenario.ledger
        fitted = "a plan: four numbers that nobody fitted"
        if scenario.residual_gb is not None:
            from_ = f", from microbatch {scenario.holds_from} on" if scenario.holds_from > 1 else ""
            on_it = sum(m >= scenario.holds_from for m, _ in scenario.predicted)
            fitted = (
                f"line through {on_it} predictions{from_}, the farthest {1000 * scenario.residual_gb:.0f} MB off; "
                f"torch {scenario.torch_version}"
            )
        return [
            ["Fixed part", f"{ledger.fixed_gb:.2f} GB", fitted],
            [
                "Activations",
                Raw(self.each(lambda m: f"{m * ledger.activations_gb_per_sample:.2f} GB")),
                f"{ledger.activations_gb_per_sample:.3f} GB a sample",
            ],
            [
                "Peak",
                Raw(self.each(lambda m: f"{scenario.peak_gb(m):.2f} GB")),
                Raw(self.each(self.by)),
            ],
            [
                "Budget",
                Raw(self.on(partial(_budget))),
                Raw(self.device("{:g} GB less ".format) + self.reserve(_percent)),
            ],
            ["Largest microbatch", Raw(self.on(partial(_largest))), "by the line, of allocated memory alone"],
        ]

    def by(self, microbatch: int) -> str:
        scenario = self.scenario
        if scenario.peak_gb(microbatch) != scenario.ledger.total_gb(microbatch):
            return "as predicted: another part of the step has its peak here, so the line does not hold"
        return "by the line"

    def measured(self) -> str:
        scenario, found = self.scenario, self.scenario.measured
        if found is None:
            return '<p class="source">Not measured: no recording holds this step yet, so the line stands alone.</p>'
        rows = []
        for m, gb in found.points:
            off = gb - scenario.peak_gb(m)
            rows.append([m, f"{scenario.peak_gb(m):.2f}", f"{gb:.2f}", _signed(off)])
        body = table(
            ["Microbatch", "Ledger (GB)", "Measured (GB)", "Measured less ledger"],
            rows,
            "Allocated peaks, ledger and measurement",
        )
        releases = ""
        if scenario.torch_version:
            predicted, measured = scenario.torch_version, found.torch_version
            releases = f" The ledger was predicted for torch {predicted}, and torch {measured} measured."
        return f'{body}<p class="source">{escape(found.line)}.{escape(releases)}</p>'

    # --- the picture

    def x(self, microbatch: float) -> float:
        return round(self.LEFT + (self.RIGHT - self.LEFT) * microbatch / self.last, 1)

    def y(self, gb: float) -> float:
        return round(self.BOTTOM - (self.BOTTOM - self.TOP) * gb / _TOP_GB, 1)

    def picture(self) -> str:
        scenario = self.scenario
        net = "".join(
            f'<path class="net" d="M{self.LEFT:g} {self.y(gb)}H{self.RIGHT:g}"/>'
            f'<text class="end" x="{self.LEFT - 4:g}" y="{self.y(gb) + 4:g}">{gb}</text>'
            for gb in range(0, int(_TOP_GB) + 1, 20)
        )
        ticks = [m for m in (1, 16, 32, 48, 64) if m <= self.last]
        net += "".join(
            f'<text class="mid" x="{self.x(m)}" y="{self.BOTTOM + 14:g}">{m}</text>' for m in ticks
        )
        net += (
            f'<text class="end" x="{self.RIGHT:g}" y="{self.BOTTOM + 28:g}">samples</text>'
            f'<text x="{self.LEFT - 30:g}" y="{self.BOTTOM + 28:g}">GB, allocated at the peak</text>'
        )
        total = scenario.ledger.total_gb
        end = min(self.last, self._reaches_top())
        begin = max(scenario.holds_from, self.microbatches[0])
        line = f'<path class="line" d="M{self.x(begin)} {self.y(total(begin))}L{self.x(end)} {self._y_at(end):.1f}"/>'
        budget = self.device(
            lambda gb: self.reserve(
                lambda share: "",
                lambda share: f'class=budget d="M{self.LEFT:g} {self.y(gb * (1 - share))}H{self.RIGHT:g}"',
                tag="path",
            ),
            tag="g",
        )
        marks = "".join(
            f'<path class="predicted" d="M{self.x(m)} {self.y(gb) - 4:.1f}v8"/>'
            for m, gb in scenario.predicted
            if gb <= _TOP_GB and m <= self.last
        )
        found = scenario.measured.points if scenario.measured else ()
        marks += "".join(
            f'<path class="measured" d="M{self.x(m) - 4:.1f} {self.y(gb) - 4:.1f}l8 8m0 -8l-8 8"/>'
            for m, gb in found
            if gb <= _TOP_GB and m <= self.last
        )
        here = self.each(self.here, tag="g")
        return f'<svg viewBox="0 0 360 228">{net}{line}{budget}{here}{marks}</svg>'

    def _reaches_top(self) -> float:
        ledger = self.scenario.ledger
        each_gb = ledger.activations_gb_per_sample
        return (_TOP_GB - ledger.fixed_gb) / each_gb if each_gb else math.inf

    def _y_at(self, microbatch: float) -> float:
        ledger = self.scenario.ledger
        return self.y(ledger.fixed_gb + microbatch * ledger.activations_gb_per_sample)

    def here(self, microbatch: int) -> str:
        gb, x = self.scenario.peak_gb(microbatch), self.x(microbatch)
        if gb > _TOP_GB:
            return f'<text class="mid" x="{min(x, self.RIGHT - 6):g}" y="{self.TOP + 10:g}">↑</text>'
        return (
            f'<path class=drop d="M{x} {self.BOTTOM:g}V{self.y(gb)}"/>'
            f"<circle class=here cx={x} cy={self.y(gb)} r=4 />"
        )

    def key(self) -> str:
        def item(drawing: str, text: str) -> str:
            return f'<li><svg viewBox="0 0 26 12">{drawing}</svg>{text}</li>'

        items = [item('<path class="line" d="M1 6H25"/>', "the ledger")]
        if self.scenario.predicted:
            items.append(item('<path class="predicted" d="M13 2v8"/>', "predicted"))
        if self.scenario.measured:
            items.append(item('<path class="measured" d="M9 2l8 8m0 -8l-8 8"/>', "measured"))
        items.append(item('<path class="budget" d="M1 6H25"/>', "the budget"))
        return f'<ul class="key">{"".join(items)}</ul>'


def _budget(ledger: MemoryLedger) -> str:
    return f"{ledger.budget_gb:.2f} GB"


def _largest(ledger: MemoryLedger) -> str:
    try:
        return str(ledger.max_microbatch)
    except FixedPartOverBudgetError:
        return "none"


def _signed(gb: float) -> str:
    text = f"{1000 * gb:+.1f} MB" if abs(gb) < 0.995 else f"{gb:+.2f} GB"
    return text.replace("-", "−")
