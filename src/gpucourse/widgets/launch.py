"""The lab "launch timeline": a chain of equal kernels, with host and device as two lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gpucourse.html import Raw, escape, table
from gpucourse.launch_model import LaunchModel, Way
from gpucourse.widgets.grid import Control, ControlError, Each, FrameGrid, frame_grid

__all__ = ["launch_lab"]

_CSS = """
.lt{color:inherit;max-width:50em;font-size:1.1em}
.lt .verdict{font-weight:700;margin:.6em 0 .2em}
.lt svg{display:block;width:100%;max-width:40em;height:auto;overflow:visible}
.lt svg text{fill:currentColor;font-size:11px}
.lt svg .mid{text-anchor:middle}
.lt svg path{fill:none}
.lt svg .base{stroke:currentColor;stroke-width:.8;opacity:.5}
.lt svg .h{stroke:#c8691c;stroke-width:20}
.lt svg .k{stroke:#2f7fc1;stroke-width:20}
.lt .key{list-style:none;display:flex;flex-wrap:wrap;gap:.1em 1.2em;padding:0;margin:.4em 0 .8em;font-size:.85em}
.lt .key li{margin:0}
.lt .key svg{display:inline-block;width:2.2em;height:1em;margin-right:.4em;vertical-align:-.12em}
.lt .key .h,.lt .key .k{stroke-width:10}
.lt table{border-collapse:collapse;width:100%;font-size:.95em;color:inherit;margin:0 0 1em}
.lt caption{text-align:left;color:inherit;padding:.2em 0;caption-side:top}
.lt tr,.lt thead,.lt tbody tr:nth-child(odd){background:transparent;color:inherit}
.lt th,.lt td{text-align:left!important;vertical-align:top;padding:.25em .6em .25em 0!important;
white-space:normal!important;border-bottom:1px solid rgba(128,128,128,.45)}
.lt tbody th{font-weight:600}
@media (min-width:700px){.lt th,.lt td:nth-child(2){white-space:nowrap!important}}
"""

_KERNELS = (1, 2, 10, 50, 100, 400)
_LENGTHS_US = (0.9, 2.0, 8.0, 16.0, 32.0, 100.0, 1000.0)
_WAYS: dict[Way, str] = {"eager": "one by one", "graph": "one CUDA graph"}


def launch_lab(
    launch_us: Sequence[int] = range(2, 41, 2),
    start: int = 8,
    *,
    kernels: Sequence[int] = _KERNELS,
    start_kernels: int = 100,
    kernel_us: Sequence[float] = _LENGTHS_US,
    start_kernel_us: float = 0.9,
    ways: Sequence[Way] = ("eager", "graph"),
) -> FrameGrid:
    """Show a chain of equal kernels as two lanes, a verdict and a data table, moved by the launch cost.

    A slider sets what a launch costs the host; menus choose how many kernels there are, how long each is, and
    whether they are launched one by one or as one graph. All numbers are those of
    `gpucourse.launch_model.LaunchModel`.

    Parameters
    ----------
    launch_us : sequence of int
        The slider's positions in µs, evenly spaced, 1 or more.
    start : int
        The one shown first.
    kernels : sequence of int
        Numbers of kernels to choose from; a single one makes no menu.
    start_kernels : int
        The one shown first.
    kernel_us : sequence of float
        Lengths of a kernel to choose from, in µs; a single one makes no menu.
    start_kernel_us : float
        The one shown first.
    ways : sequence of {"eager", "graph"}
        Ways of launching to choose from, the first one shown first; a single one makes no menu.

    Returns
    -------
    FrameGrid
        A box of standard widgets that also works in a page with no kernel.

    Raises
    ------
    ControlError
        The launch costs are not evenly spaced integers from 1 up, a start is none of its values, or a value
        is one that no chain can have.

    Examples
    --------
    >>> lab = launch_lab()
    >>> "100 kernels of 0.9 µs, one by one, 8 µs a launch: launch-bound, 800.9 µs" in lab.first_frame
    True
    """
    first = Control(
        name="launch_us",
        label="Launch cost (µs)",
        values=launch_us,
        start=start,
        spoken=lambda us: f"{us} µs",
    )
    if not first.slides or first.values[0] < 1:
        raise ControlError(
            f"launch_us must be evenly spaced integers, 1 or more and rising, found {list(first.values)!r}: "
            "give a range such as range(2, 41, 2)"
        )
    given = {"kernels": start_kernels, "kernel_us": start_kernel_us, "way": ways[0] if ways else None}
    offered: dict[str, tuple[str, Sequence[object], Callable[[object], str]]] = {
        "kernels": ("Kernels", kernels, str),
        "kernel_us": ("Kernel length", kernel_us, _length),
        "way": ("Launched", ways, lambda way: _WAYS.get(way, str(way))),  # type: ignore[call-overload]
    }
    controls = [first]
    for name, (label, values, show) in offered.items():
        if given[name] not in values:
            listed = ", ".join(map(str, values)) or "none"
            raise ControlError(f"{name} starts at {given[name]!r}, which is none of {listed}")
        for value in values:
            _refuse_impossible(name, value)
        if len(values) > 1:
            controls.append(Control(name=name, label=label, values=values, start=given[name], show=show))

    def render(each: Each, **chosen: object) -> str:
        shape = given | chosen
        chains = {cost: LaunchModel(launch_us=cost, **shape) for cost in first.values}  # type: ignore[arg-type]
        return _LaunchFrame(chains=chains).html(each)

    return frame_grid(render, controls, css=_CSS)


def _refuse_impossible(name: str, value: object) -> None:
    """Let the model refuse a value; a chain of no length would have nothing to draw."""
    try:
        LaunchModel(**({"kernels": 1, "kernel_us": 1.0, "launch_us": 1.0} | {name: value}))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ControlError(f"a value of {name} cannot be shown: {error}") from None
    if name == "kernel_us" and not round(float(value) * 1000):  # type: ignore[arg-type]
        raise ControlError(f"a value of kernel_us cannot be shown: {value!r} is less than a nanosecond")


def _length(us: object) -> str:
    return _time(float(us))  # type: ignore[arg-type]


def _time(us: float) -> str:
    """Write a time with four significant digits, in µs below a millisecond and in ms from there on."""
    scaled, unit = (us, "µs") if us < 1000 else (us / 1000, "ms")
    return f"{float(f'{scaled:.4g}'):,.10g} {unit}"


def _percent(share: float) -> str:
    return f"{float(f'{100 * share:.3g}'):g} %"


def _px(value: float) -> str:
    # Four digits: a dash is repeated hundreds of times, and its rounding with it.
    return f"{value:.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaunchFrame:
    """One number of kernels of one length, launched in one way, for every launch cost of the slider."""

    chains: dict[int, LaunchModel]

    # Of a longer chain, four kernels at least are drawn from the left edge on, and two up to the right one.
    LEFT, FIRST_END, LAST_BEGIN, RIGHT = 46.0, 250.0, 276.0, 352.0
    HOST, DEVICE = 24.0, 68.0

    @property
    def any(self) -> LaunchModel:
        """A chain of the frame, for what does not depend on the launch cost."""
        return next(iter(self.chains.values()))

    @property
    def conditions(self) -> str:
        n, way = self.any.kernels, "one by one" if self.any.way == "eager" else "as one CUDA graph"
        return f"{n} kernel{'s' * (n > 1)} of {_time(self.any.kernel_us)}, {way}, "

    def state(self, cost: int) -> str:
        chain = self.chains[cost]
        if chain.launches > 1:
            words = {"launch": "launch-bound", "device": "device-bound", "both": "in balance"}
        else:
            words = {
                "launch": "one launch, longer than its work",
                "device": "one launch, shorter than its work",
                "both": "one launch, as long as its work",
            }
        return words[chain.bound]

    def sum(self, cost: int) -> str:
        chain = self.chains[cost]
        n = chain.kernels
        if chain.launches == 1:
            return "one launch + one kernel" if n == 1 else f"one launch + {n} kernels"
        formulas = {
            "launch": f"{n} launches + the last kernel",
            "device": f"the first launch + {n} kernels",
            "both": f"{n} launches + the last kernel, or the first launch + {n} kernels",
        }
        return formulas[chain.bound]

    def pace(self, cost: int) -> str:
        why = {
            "launch": "set by the launch: each kernel is over before the next one arrives",
            "device": "set by the kernel: the next launch has been made already",
            "both": "set by both alike",
        }
        return why[self.chains[cost].bound]

    def idle(self, cost: int) -> str:
        return _percent(self.chains[cost].idle_share)

    def total(self, cost: int) -> str:
        return _time(self.chains[cost].total_us)

    def html(self, each: Each) -> str:
        chain, chains = self.any, self.chains
        n, length, single = chain.kernels, _time(chain.kernel_us), chain.launches == 1
        cost = each(lambda c: f"{c} µs")
        graph = single and n > 1
        rows: list[list[str]] = [
            ["Launches", str(chain.launches), f"one for all {n} kernels" if graph else "one a kernel"],
            [
                "Host launches for",
                Raw(each(lambda c: _time(chains[c].host_us))),
                f"{chain.launches} × the launch cost",
            ],
            ["Device works for", _time(chain.device_us), f"{n} × {length}"],
            ["Total", Raw(each(self.total)), Raw(each(self.sum))],
        ]
        if not single:
            rows.append(["Pace", Raw(each(lambda c: _time(chains[c].pace_us))), Raw(each(self.pace))])
        rows += [
            [
                "Device idle",
                Raw(each(self.idle)),
                "of the total",
            ],
            [
                "Longest queue",
                Raw(each(lambda c: str(chains[c].queue_most))),
                "launches made and not yet over",
            ],
            [
                "Bends at",
                Raw(each(lambda c: _time(chains[c].bend_us)) + " a kernel"),
                "the launch cost over the number of kernels" if graph else "the launch cost",
            ],
        ]
        body = table(["Quantity", "Value", "What it says"], rows)
        caption = f"{escape(self.conditions)}{cost} a launch."
        body = body.replace("<thead>", f"<caption>{caption}</caption><thead>", 1)
        return (
            f'<div class="lt"><p class="verdict" role="status">{escape(self.conditions)}{cost} a launch: '
            f"{each(self.state)}, {each(self.total)}, of which the device is idle {each(self.idle)}</p>"
            f'<div aria-hidden="true">{self.picture(each)}{self.key()}</div>{body}</div>'
        )

    # --- the picture

    def picture(self, each: Each) -> str:
        names = "".join(
            f'<text x="2" y="{y + 4:g}">{name}</text><path class="base" d="M{self.LEFT:g} {y:g}H{self.RIGHT:g}"/>'
            for name, y in (("host", self.HOST), ("device", self.DEVICE))
        )
        left_out = each(lambda c: "⋯" if self.cut(c) else "", tag="tspan")
        return (
            f'<svg viewBox="0 0 360 96">{names}'
            f'<text class="mid" x="{(self.FIRST_END + self.LAST_BEGIN) / 2:g}" y="60">{left_out}</text>'
            f"{each(self.lanes, tag='g')}</svg>"
        )

    def scale(self, cost: int) -> float:
        """Give the scale of a picture whose middle is left out, in pixels per µs."""
        chain = self.chains[cost]
        first = (self.FIRST_END - self.LEFT) / (cost + 4 * self.pitch(cost))
        last = (self.RIGHT - self.LAST_BEGIN) / (self.pitch(cost) + chain.kernel_us)
        return min(first, last)

    def pitch(self, cost: int) -> float:
        """Give the time from the start of one kernel to the start of the next, in µs."""
        chain = self.chains[cost]
        return chain.kernel_us if chain.launches == 1 else chain.pace_us

    def cut(self, cost: int) -> bool:
        """Say whether the middle is left out: the whole chain does not fit at the scale of its ends."""
        drawn = self.FIRST_END - self.LEFT + self.RIGHT - self.LAST_BEGIN
        return self.chains[cost].total_us * self.scale(cost) > drawn

    def lanes(self, cost: int) -> str:
        """Draw the launches and the kernels of one chain to one scale.

        A lane of equal blocks is one dashed line: its dash is a block. What is right of the omission is drawn
        from its end to the left, so that the last block is whole. Attributes stand without quotes, which cost
        four bytes each in the page, ten thousand times.
        """
        chain, cut = self.chains[cost], self.cut(cost)
        total, launched, pitch = chain.total_us, chain.host_us, self.pitch(cost)
        scale = self.scale(cost) if cut else (self.RIGHT - self.LEFT) / total
        first_end, last_begin = (self.FIRST_END, self.LAST_BEGIN) if cut else (self.RIGHT, self.RIGHT)

        def first(us: float) -> str:
            return f"{min(self.LEFT + us * scale, first_end):.1f}"

        host = f"M{self.LEFT:g},{self.HOST:g}H{first(launched)}"
        device = f"M{first(cost)},{self.DEVICE:g}H{first(total)}"
        if cut:
            end = self.RIGHT - (total - launched) * scale
            if end > last_begin:
                host += f"M{end:.1f},{self.HOST:g}H{last_begin:g}"
            device += f"M{self.RIGHT:g},{self.DEVICE:g}H{last_begin:g}"
        return (
            f"<path class=h d={host} {_dash(cost, cost, scale)} />"
            f"<path class=k d={device} {_dash(chain.kernel_us, pitch, scale)} />"
        )

    def key(self) -> str:
        def item(drawing: str, text: str) -> str:
            return f'<li><svg viewBox="0 0 26 12">{drawing}</svg>{text}</li>'

        line = partial('<path class="{}" d="M1 6H25"/>'.format)
        items = [
            item(line("h"), "the host launches"),
            item(line("k"), "the device runs a kernel"),
            item(line("base"), "waits"),
        ]
        return f'<ul class="key">{"".join(items)}</ul>'


def _dash(block_us: float, pitch_us: float, scale: float) -> str:
    """Give the dash of a lane whose blocks are so long and so far apart; neighbours that touch get a seam."""
    pitch = pitch_us * scale
    seam = 0.7 if pitch > 3 else 0.0
    block = max(min(block_us * scale, pitch - seam), 0.8 if pitch > 1.6 else 0.0)
    if pitch - block < 0.05:
        return ""  # too fine to be told apart: a solid line
    return f"stroke-dasharray={_px(block)},{_px(pitch - block)}"
