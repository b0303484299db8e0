"""The lab "roofline explorer": a device's roof, and what it allows at an intensity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gpucourse.hardware import DEVICES, PRECISIONS, Device
from gpucourse.html import Raw, escape, table
from gpucourse.roof_points import Kind, MeasuredRoof, recorded_roofs
from gpucourse.roofline import Roofline
from gpucourse.widgets.grid import Control, ControlError, Each, FrameGrid, frame_grid

__all__ = ["NIGHT_FLOPS", "roofline_lab"]

_ROOF_CSS = """
.rl{color:inherit;max-width:50em;font-size:1.1em}
.rl .verdict{font-weight:700;margin:.6em 0 .2em}
.rl svg{display:block;width:100%;max-width:36em;height:auto;overflow:visible}
.rl svg text{fill:currentColor;font-size:11px}
.rl svg .small{font-size:10px}
.rl svg .end{text-anchor:end}
.rl svg .mid{text-anchor:middle}
.rl svg .net{stroke:currentColor;opacity:.22;stroke-width:.6;fill:none}
.rl svg .roof{stroke:currentColor;stroke-width:2.4;fill:none}
.rl svg .bytes{stroke:currentColor;stroke-width:2.4;fill:none;stroke-dasharray:2 3}
.rl svg .measured{stroke:#2a8f4c;stroke-width:1.8;fill:none;stroke-dasharray:7 3}
.rl svg .ridge{stroke:currentColor;stroke-width:1;fill:none;stroke-dasharray:1 3}
.rl svg .drop{stroke:#d0602a;stroke-width:1.4}
.rl svg .here{fill:#d0602a;stroke:currentColor;stroke-width:1.4}
.rl svg .hot{stroke-dasharray:2 3}
.rl svg .spread{stroke:#2f7fd0;stroke-width:1}
.rl svg .mark{fill:none;stroke:#2f7fd0;stroke-width:1.5}
.rl .key{list-style:none;display:flex;flex-wrap:wrap;gap:.1em 1.2em;padding:0;margin:.4em 0 .8em;font-size:.85em}
.rl .key li{margin:0}
.rl .key svg{display:inline-block;width:2.2em;height:1em;margin-right:.4em;vertical-align:-.12em}
.rl table{border-collapse:collapse;width:100%;font-size:.95em;color:inherit;margin:0 0 1em}
.rl caption{text-align:left;color:inherit;padding:.2em 0;caption-side:top}
.rl tr,.rl thead,.rl tbody tr:nth-child(odd){background:transparent;color:inherit}
.rl th,.rl td{text-align:left!important;vertical-align:top;padding:.25em .6em .25em 0!important;
white-space:normal!important;border-bottom:1px solid rgba(128,128,128,.45)}
.rl tbody th{font-weight:600}
.rl .source{font-size:.85em;margin:0}
"""

NIGHT_FLOPS = 6 * 124e6 * 12e9
"""Arithmetic of the course's night: six operations for each of 124e6 parameters and 12e9 tokens."""


def roofline_lab(
    doublings: Sequence[int] = range(17),
    start: int = 10,
    *,
    lowest: float = 1 / 16,
    devices: Sequence[Device] = DEVICES,
    device: str = "NVIDIA H200",
    dtypes: Sequence[str] = PRECISIONS,
    dtype: str = "bf16",
    amount: str = "The night",
    amount_flops: float = NIGHT_FLOPS,
    window_h: float = 8.0,
    measured: Sequence[MeasuredRoof] | None = None,
) -> FrameGrid:
    """Show the roof of a device and what it allows at an intensity, as a picture, a verdict and a data table.

    A slider doubles the intensity; menus choose the device and the precision. Where a device's record has no
    figure for a precision, the frame says so and shows what the bytes alone allow, which is still a bound.

    Parameters
    ----------
    doublings : sequence of int
        The slider's positions, evenly spaced, 0 or more: how often `lowest` is doubled.
    start : int
        The one shown first.
    lowest : float
        Intensity at 0 doublings, in flop/byte.
    devices : sequence of Device
        Records to choose from; a single one makes no menu.
    device : str
        Exact name of the one shown first.
    dtypes : sequence of str
        Precisions to choose from; a single one makes no menu.
    dtype : str
        The one shown first.
    amount, amount_flops, window_h : str, float, float
        A named amount of arithmetic in flop, whose least time is shown, and the hours that there are for it.
    measured : sequence of MeasuredRoof, optional
        Ceilings and kernels to draw beside the datasheet's roof of the same device and precision; what
        `gpucourse.roof_points.recorded_roofs` reads where none are given, none for an empty one.

    Returns
    -------
    FrameGrid
        A box of standard widgets that also works in a page with no kernel.

    Raises
    ------
    ControlError
        The doublings are not evenly spaced integers from 0 up, a start is none of the values, or an amount,
        an intensity or a window is not positive and finite.

    Examples
    --------
    >>> lab = roofline_lab(measured=())
    >>> "64 flop/byte on H200 in bf16: memory side, at most 307.2 TFLOP/s" in lab.first_frame
    True
    """
    for name, value in (("lowest", lowest), ("amount_flops", amount_flops), ("window_h", window_h)):
        if isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise ControlError(f"{name} must be a positive finite number, found {value!r}")
    label = f"Doublings of intensity, from {_intensity_text(lowest)} flop/byte"
    first = Control(
        name="doublings",
        label=label,
        values=doublings,
        start=start,
        spoken=lambda k: f"{_intensity_text(lowest * 2.0**k)} flop/byte",
    )
    if not first.slides:
        raise ControlError(
            "doublings must be evenly spaced integers, 0 or more and rising, found "
            f"{list(doublings)!r}: give a range such as range(0, 17)"
        )
    by_name = {one.name: one for one in devices}
    if device not in by_name:
        raise ControlError(f"device starts at {device!r}, which is none of {', '.join(by_name) or 'none'}")
    if dtype not in dtypes:
        raise ControlError(f"dtype starts at {dtype!r}, which is none of {', '.join(dtypes) or 'none'}")
    controls = [first]
    if len(by_name) > 1:
        names = list(by_name)
        controls.append(
            Control(
                name="device", label="Device", values=names, start=device, show=lambda n: by_name[n].short
            )
        )
    if len(dtypes) > 1:
        controls.append(Control(name="dtype", label="Precision", values=list(dtypes), start=dtype))
    measured = recorded_roofs() if measured is None else measured
    found = {(roof.gpu, roof.precision): roof for roof in measured}
    intensities = {k: lowest * 2.0**k for k in first.values}
    axes = _Axes.around(intensities.values(), by_name.values(), measured)

    def render(each: Each, **chosen: str) -> str:
        record, precision = by_name[chosen.get("device", device)], chosen.get("dtype", dtype)
        frame = _RoofFrame(
            device=record,
            precision=precision,
            roof=Roofline.of(record, precision) if precision in record.peaks else None,
            measured=found.get((record.name, precision)),
            intensities=intensities,
            axes=axes,
            amount=amount,
            amount_flops=amount_flops,
            window_h=window_h,
        )
        return frame.html(each)

    return frame_grid(render, controls, css=_ROOF_CSS)


def _intensity_text(value: float) -> str:
    """Write an intensity as people say it: 1/16, 64, 4,096."""
    if value < 1 and (1 / value).is_integer():
        return f"1/{1 / value:,.0f}"
    return _four(value)


def _four(value: float) -> str:
    """Write a number with four significant digits and no more zeros than it needs."""
    return f"{float(f'{value:.4g}'):,.10g}"


def _tflops(rate: float) -> str:
    return f"{_four(rate / 1e12)} TFLOP/s"


def _gb_per_s(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:,.0f} GB/s"


def _duration(hours: float) -> str:
    """Write hours in the unit that a person plans with."""
    for most, unit, size in ((1.0, "min", 1 / 60), (48.0, "h", 1.0), (24 * 730.0, "days", 24.0)):
        if hours < most:
            return f"{float(f'{hours / size:.3g}'):,.10g} {unit}"
    return f"{float(f'{hours / 24 / 365:.3g}'):,.10g} years"


def _times(factor: float) -> str:
    return f"{float(f'{factor:.3g}'):,.10g} times"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    """The picture's two logarithmic axes: one pair for all frames, so that devices can be compared."""

    log2_low: float
    log2_high: float
    log10_low: int
    log10_high: int

    LEFT, RIGHT, TOP, BOTTOM = 44.0, 352.0, 18.0, 238.0

    @classmethod
    def around(
        cls, intensities: Iterable[float], devices: Iterable[Device], measured: Sequence[MeasuredRoof]
    ) -> _Axes:
        points = [point for roof in measured for point in roof.points]
        across = [*intensities, *(point.work.intensity for point in points)]
        least = min(intensity for intensity in across)
        most = max(intensity for intensity in across)
        rates = [point.rate for point in points]
        for record in devices:
            rates.append(least * record.bandwidth_bytes_per_s)
            # Without a peak the bytes' line goes on to the right edge.
            peaks = [figure.value for figure in record.peaks.values()]
            rates.append(max([*peaks, most * record.bandwidth_bytes_per_s if len(peaks) < 5 else 0.0]))
        return cls(
            log2_low=math.floor(math.log2(least)) - 0.5,
            log2_high=math.ceil(math.log2(most)) + 0.5,
            log10_low=math.floor(math.log10(min(rates))),
            log10_high=math.ceil(math.log10(max(rates))),
        )

    @property
    def lowest(self) -> float:
        return math.exp2(self.log2_low)

    @property
    def highest(self) -> float:
        return math.exp2(self.log2_high)

    def x(self, intensity: float) -> float:
        part = (math.log2(intensity) - self.log2_low) / (self.log2_high - self.log2_low)
        return round(self.LEFT + part * (self.RIGHT - self.LEFT), 1)

    def y(self, rate: float) -> float:
        part = (math.log10(rate) - self.log10_low) / (self.log10_high - self.log10_low)
        return round(self.BOTTOM - part * (self.BOTTOM - self.TOP), 1)

    def slope_degrees(self) -> float:
        """Angle at which rate grows in proportion to intensity."""
        across = math.log10(2) * (self.RIGHT - self.LEFT) ** -1 * (self.log2_high - self.log2_low)
        up = (self.log10_high - self.log10_low) / (self.BOTTOM - self.TOP)
        return math.degrees(math.atan2(across, up))

    def line(self, bandwidth: float, peak: float | None) -> str:
        """Path of a roof, from the left or lower edge to the right or upper one."""
        start = max(self.lowest, 10.0**self.log10_low / bandwidth)
        end = min(self.highest, 10.0**self.log10_high / bandwidth)
        if peak is None:
            corners = [(start, start * bandwidth), (end, end * bandwidth)]
        else:
            ridge = min(max(peak / bandwidth, self.lowest), self.highest)
            corners = [(start, start * bandwidth), (ridge, ridge * bandwidth), (self.highest, peak)]
        return "M" + "L".join(f"{self.x(a)} {self.y(b)}" for a, b in corners)

    def net(self) -> str:
        """Draw grid lines, ticks and the units of both axes."""
        parts, path = [], []
        for power in range(math.ceil(math.log10(self.lowest)), math.floor(math.log10(self.highest)) + 1):
            x = self.x(10.0**power)
            path.append(f"M{x} {self.TOP}V{self.BOTTOM}")
            parts.append(
                f'<text class="mid small" x="{x}" y="{self.BOTTOM + 12}">{_four(10.0**power)}</text>'
            )
        for power in range(self.log10_low, self.log10_high + 1):
            y = self.y(10.0**power)
            path.append(f"M{self.LEFT} {y}H{self.RIGHT}")
            parts.append(
                f'<text class="end small" x="{self.LEFT - 4}" y="{y + 3.5}">{_four(10.0 ** (power - 12))}</text>'
            )
        return (
            f'<path class="net" d="{"".join(path)}"/>{"".join(parts)}'
            f'<text x="2" y="10">TFLOP/s</text>'
            f'<text x="{self.LEFT}" y="{self.BOTTOM + 26}">flop/byte</text>'
        )


_SHAPES: dict[Kind, str] = {
    "memory": "M{x} {y}m-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0-6.8 0",
    "L2": "M{x} {y}m0-4.6l4.6 4.6l-4.6 4.6l-4.6-4.6z",
    "launch": "M{x} {y}m-3.4-3.4h6.8v6.8h-6.8z",
}
_SHAPE_NAMES: dict[Kind, str] = {
    "memory": "recorded kernel",
    "L2": "recorded, its bytes fit the L2",
    "launch": "recorded with its launch",
}


def _shape(kind: Kind, x: float, y: float) -> str:
    return f'<path class="mark" d="{_SHAPES[kind].format(x=x, y=y)}"/>'


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoofFrame:
    """One device in one precision, for every intensity of the slider."""

    device: Device
    precision: str
    roof: Roofline | None
    measured: MeasuredRoof | None
    intensities: dict[int, float]
    axes: _Axes
    amount: str
    amount_flops: float
    window_h: float

    @property
    def bandwidth(self) -> float:
        return self.device.bandwidth_bytes_per_s

    def at_most(self, k: int) -> float:
        """Give the bound on the rate: the roof, or the bytes alone where there is no peak."""
        intensity = self.intensities[k]
        return self.roof.attainable(intensity) if self.roof else intensity * self.bandwidth

    def has(self) -> str:
        return ", ".join(self.device.peaks)

    def verdict(self, k: int) -> str:
        start = f"{_intensity_text(self.intensities[k])} flop/byte on {self.device.short} in {self.precision}"
        rate = _tflops(self.at_most(k))
        if self.roof is None:
            return f"{start}: no peak on record, so the bytes alone bound it, at {rate}"
        side = self.roof.bound(self.intensities[k])
        return f"{start}: {side} side, at most {rate}, {self.share(k)} of the peak"

    def share(self, k: int) -> str:
        if self.roof is None:
            return "–"
        part = self.at_most(k) / self.roof.peak_flops
        return "100 %" if part == 1 else f"{float(f'{100 * part:.3g}'):g} %"

    def against_ridge(self, k: int) -> str:
        if self.roof is None:
            return "its side cannot be said without a peak"
        factor = self.intensities[k] / self.roof.ridge
        where = f"{_times(1 / factor)} below" if factor < 1 else f"{_times(factor)}"
        return f"{where} the ridge: {self.roof.bound(self.intensities[k])} side"

    def reason(self, k: int) -> str:
        product = f"{_intensity_text(self.intensities[k])} flop/byte × {_gb_per_s(self.bandwidth)}"
        if self.roof is None:
            return f"{product}, the bytes' ceiling alone"
        if self.roof.bound(self.intensities[k]) == "memory":
            return f"{product}: the slope"
        return "the peak: the flat part"

    def hours(self, k: int) -> float:
        return self.amount_flops / self.at_most(k) / 3600

    def window(self, k: int) -> str:
        hours = self.hours(k)
        if hours <= self.window_h:
            return f"within the {self.window_h:g} h, if all of it ran at this bound"
        return f"{_times(hours / self.window_h)} the {self.window_h:g} h"

    def html(self, each: Each) -> str:
        precision, name = self.precision, self.device.short
        if self.roof is None:
            peak = ("–", f"the record of {name} has no {precision}; it has {self.has()}")
            ridge = ("–", "no peak, no ridge")
        else:
            figure = next(f for p, f in self.device.peaks.items() if p == precision)
            peak = (_tflops(figure.value), f"{figure.kind}; datasheet, {figure.source.status}")
            ridge = (
                f"{_four(self.roof.ridge)} flop/byte",
                "peak over bandwidth: where both take equally long",
            )
        by_bytes = "at most " if self.roof is None else ""
        sheet = self.device.bandwidth
        amount = f"{self.amount_flops:.3g}".replace("e+", " × 10^")
        rows: list[list[str]] = [
            ["Peak", *peak],
            ["Bandwidth", _gb_per_s(self.bandwidth), f"{sheet.kind}; datasheet, {sheet.source.status}"],
            ["Ridge", *ridge],
            [
                "Intensity",
                Raw(each(lambda k: _intensity_text(self.intensities[k])) + " flop/byte"),
                Raw(each(self.against_ridge)),
            ],
            ["Attainable", Raw(by_bytes + each(lambda k: _tflops(self.at_most(k)))), Raw(each(self.reason))],
            ["Share of the peak", Raw(each(self.share)), "attainable over peak"],
            [
                Raw(f"{escape(self.amount)}, {_superscript(amount)} flop"),
                Raw(each(lambda k: f"{_duration(self.hours(k))} or more")),
                Raw(each(self.window)),
            ],
        ]
        rows += self.measured_rows(each)
        caption = Raw(
            f"{each(lambda k: _intensity_text(self.intensities[k]))} flop/byte, "
            f"{escape(self.device.name)}, {precision}."
        )
        body = table(["Quantity", "Value", "What it says"], rows)
        body = body.replace("<thead>", f"<caption>{caption}</caption><thead>", 1)
        return (
            f'<div class="rl"><p class="verdict" role="status">{each(lambda k: escape(self.verdict(k)))}</p>'
            f'<div aria-hidden="true">{self.picture(each)}{self.key()}</div>{body}{self.kernels()}</div>'
        )

    def measured_rows(self, each: Each) -> list[list[str]]:
        if self.measured is None or self.roof is None:
            return []
        found = self.measured.roofline

        def part(mine: float, sheet: float) -> str:
            return f"{100 * mine / sheet:.1f} % of the datasheet"

        return [
            [
                "Peak, measured",
                f"{_tflops(found.peak_flops)}, {part(found.peak_flops, self.roof.peak_flops)}",
                f"burst: {self.measured.arithmetic_kind}",
            ],
            [
                "Bandwidth, measured",
                f"{_gb_per_s(found.bandwidth)}, {part(found.bandwidth, self.bandwidth)}",
                f"burst: {self.measured.bandwidth_kind}",
            ],
            [
                "Attainable, measured",
                Raw(each(lambda k: _tflops(found.attainable(self.intensities[k])))),
                f"by these two; their ridge is at {_four(found.ridge)} flop/byte",
            ],
            *self.hot_rows(part),
        ]

    def hot_rows(self, part: Callable[[float, float], str]) -> list[list[str]]:
        """Give the ceilings after a long load, where they were recorded."""
        if self.measured is None or self.measured.sustained is None or self.roof is None:
            return []
        hot, when = self.measured.sustained, f"after {self.measured.sustained_s:.0f} s of load"
        return [
            [
                "Peak, sustained",
                f"{_tflops(hot.peak_flops)}, {part(hot.peak_flops, self.roof.peak_flops)}",
                f"{when}: the card's power limit sets the clock",
            ],
            [
                "Bandwidth, sustained",
                f"{_gb_per_s(hot.bandwidth)}, {part(hot.bandwidth, self.bandwidth)}",
                when,
            ],
        ]

    def kernels(self) -> str:
        """Lay out the recorded kernels as the second table, with spread and provenance."""
        if self.measured is None or self.roof is None or not self.measured.points:
            return ""
        rows = []
        for letter, point in zip(_LETTERS, self.measured.points, strict=False):
            spread = (
                "one pair" if point.iqr_ms is None else f"IQR {100 * point.iqr_ms / point.time_ms:.2g}\u00a0%"
            )
            rows.append(
                [
                    f"{letter}: {point.name}",
                    _four(point.work.intensity),
                    f"{_four(float(f'{point.rate / 1e12:.3g}'))}, {spread}",
                    point.state(self.roof, self.measured.l2_bytes),
                ]
            )
        body = table(["Recorded kernel", "flop/byte", "TFLOP/s, spread", "Where it lies"], rows)
        caption = "<caption>Recorded kernels, against the datasheet's roof.</caption>"
        body = body.replace("<thead>", f"{caption}<thead>", 1)
        return f'{body}<p class="source">{escape(self.measured.provenance)}</p>'

    def picture(self, each: Each) -> str:
        axes, parts = self.axes, [self.axes.net()]
        if self.roof is None:
            parts.append(f'<path class="bytes" d="{axes.line(self.bandwidth, None)}"/>')
        else:
            peak, ridge = self.roof.peak_flops, self.roof.ridge
            parts.append(f'<path class="roof" d="{axes.line(self.bandwidth, peak)}"/>')
            x, top = axes.x(ridge), axes.y(peak)
            parts.append(
                f'<path class="ridge" d="M{x} {top}V{axes.BOTTOM}"/>'
                f'<text class="end" x="{axes.RIGHT}" y="{top - 5}">peak {_tflops(peak)}</text>'
                f'<text class="end" x="{x - 5}" y="{axes.BOTTOM - 5}">◂ memory</text>'
                f'<text x="{x + 5}" y="{axes.BOTTOM - 5}">compute ▸</text>'
                f'<text class="mid" x="{x}" y="{axes.BOTTOM + 26}">ridge {_four(float(f"{ridge:.3g}"))}</text>'
            )
        middle = self.axes.lowest * 2**5
        x, y = axes.x(middle), axes.y(middle * self.bandwidth) - 6
        parts.append(
            f'<text class="mid" transform="translate({x} {y}) rotate(-{axes.slope_degrees():.0f})">'
            f"{_gb_per_s(self.bandwidth)}</text>"
        )
        if self.measured is not None and self.roof is not None:
            found = self.measured.roofline
            parts.append(f'<path class="measured" d="{axes.line(found.bandwidth, found.peak_flops)}"/>')
            if self.measured.sustained is not None:
                hot = self.measured.sustained
                parts.append(f'<path class="measured hot" d="{axes.line(hot.bandwidth, hot.peak_flops)}"/>')
            places = [(axes.x(point.work.intensity), axes.y(point.rate)) for point in self.measured.points]
            for letter, point, (x, y) in zip(_LETTERS, self.measured.points, places, strict=False):
                if point.between is not None:
                    low, high = (axes.y(rate) for rate in point.between)
                    parts.append(f'<path class="spread" d="M{x} {low}V{high}"/>')
                parts.append(_shape(point.kind(self.measured.l2_bytes), x, y))
                # A letter stands at its mark's lower right, out of the way of a neighbour's mark.
                down = -4 if point.share(self.roof) > 1 else 9
                crowded = any(0 < x2 - x < 14 and abs(y2 - y) < 14 for x2, y2 in places)
                side = f'class="end small" x="{x - 5:.1f}"' if crowded else f'class="small" x="{x + 5:.1f}"'
                parts.append(f'<text {side} y="{y + down:.1f}">{letter}</text>')

        def here(k: int) -> str:
            x, y = axes.x(self.intensities[k]), axes.y(self.at_most(k))
            return f'<path class="drop" d="M{x} {axes.BOTTOM}V{y}"/><circle class="here" cx="{x}" cy="{y}" r="5.5"/>'

        parts.append(each(here, tag="g"))
        return f'<svg viewBox="0 0 360 268">{"".join(parts)}</svg>'

    def key(self) -> str:
        def item(drawing: str, text: str) -> str:
            return f'<li><svg viewBox="0 0 26 12">{drawing}</svg>{text}</li>'

        line = '<path class="{}" d="M1 6H25"/>'
        items = [item('<circle class="here" cx="13" cy="6" r="5"/>', "the bound at this intensity")]
        if self.roof is None:
            items.append(item(line.format("bytes"), "the bytes' ceiling; no peak on record"))
        else:
            items.append(item(line.format("roof"), "the datasheet's roof"))
        if self.measured is not None and self.roof is not None:
            items.append(item(line.format("measured"), "measured in a burst"))
            if self.measured.sustained is not None:
                items.append(
                    item(line.format("measured hot"), f"measured after {self.measured.sustained_s:.0f} s")
                )
            kinds = [point.kind(self.measured.l2_bytes) for point in self.measured.points]
            items += [item(_shape(kind, 13, 6), _SHAPE_NAMES[kind]) for kind in _SHAPES if kind in kinds]
        return f'<ul class="key">{"".join(items)}</ul>'


_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _superscript(text: str) -> str:
    mantissa, _, power = text.partition("^")
    return f"{mantissa}<sup>{power}</sup>" if power else text
