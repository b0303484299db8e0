"""The lab "will it fit?": the predicted peak of a GPT of the reader's own, line by line, against a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gpucourse import hardware
from gpucourse.fit_grid import RESERVES, FitGrid, FitGridError, Point, Shape, load_grid
from gpucourse.html import Raw, escape, table
from gpucourse.units import GB
from gpucourse.widgets.grid import Control, Each, FrameGrid, frame_grid

__all__ = ["fit_lab"]

_CSS = """
.wf{color:inherit;max-width:50em;font-size:1.1em}
.wf .verdict{font-weight:700;margin:.6em 0 .2em}
.wf .scale{position:relative;height:1.5em;font-size:.85em}
.wf .scale>.edge{position:absolute;white-space:nowrap;font-weight:400;transform:translateX(-100%);
padding-right:.35em;border-right:2px solid currentColor;font-style:normal}
.wf .scale>.device{border-right-width:4px}
.wf .scale>i.more{position:absolute;right:0}
.wf .bar{position:relative;height:2.8em;border:1px solid currentColor;border-right-style:dashed;
overflow:hidden;display:flex}
.wf .bar.thin{height:1em;border-top:0}
.wf .bar b{display:contents}
.wf .bar i{display:block;flex:none;width:0}
.wf .lines{flex:1 1 0;min-width:0;display:flex}
.wf .lines s{min-width:0;box-shadow:inset 1px 0 #111;text-decoration:none}
.wf .P{background:#9cc3ee}.wf .O{background:#5f97cf}.wf .G{background:#b7a3e3}.wf .C{background:#e3e08a}
.wf .A{background:#f6c88f}.wf .T{background:#e59aa8}.wf .R{background:#b9bec5}
.wf .held{flex:1 1 0;min-width:0;background:repeating-linear-gradient(90deg,currentColor 0 2px,transparent 2px 6px);
opacity:.6}
.wf .bar>u{position:absolute;top:0;bottom:0;border-left:2px solid currentColor;text-decoration:none;
background:repeating-linear-gradient(45deg,rgba(120,120,120,.75) 0 2px,transparent 2px 7px)}
.wf .bar>.outside{position:absolute;top:0;bottom:0;left:80%;right:0;border-left:4px solid currentColor}
.wf .key{list-style:none;display:flex;flex-wrap:wrap;gap:.1em 1.2em;padding:0;margin:.4em 0 .8em;font-size:.85em}
.wf .key li{margin:0}
.wf .key s{display:inline-block;width:1.1em;height:1em;margin-right:.4em;vertical-align:-.12em;
border:1px solid currentColor;text-decoration:none}
.wf table{border-collapse:collapse;width:100%;font-size:.95em;color:inherit;margin:0}
.wf caption{text-align:left;color:inherit;padding:.2em 0;caption-side:top}
.wf tr,.wf thead,.wf tbody tr:nth-child(odd){background:transparent;color:inherit}
.wf th,.wf td{text-align:left!important;vertical-align:top;padding:.25em .6em .25em 0!important;
white-space:normal!important;border-bottom:1px solid rgba(128,128,128,.45)}
.wf tbody th{font-weight:600}
.wf td:last-child{overflow-wrap:anywhere}
.wf tr.sum>*{border-top:2px solid currentColor}
.wf .ask{margin:.8em 0 .2em}
.wf .source{font-size:.85em;margin:.6em 0}
.wf pre{white-space:pre-wrap;overflow-wrap:anywhere;color:inherit;background:none;border:1px solid currentColor;
padding:.5em .7em;margin:0;font-size:.85em}
.wf pre b{font-weight:inherit}
@media (min-width:700px){.wf th{white-space:nowrap!important}}
"""

# Where the device ends on the axis, in percent; the rest is for what does not fit.
_DEVICE_AT = 80.0

_START: Mapping[str, Any] = {
    "layers": 12,
    "width": 768,
    "tokens": 1024,
    "precision": "fp32",
    "checkpointing": False,
    "microbatch": 16,
    "device": "L4",
    "reserve": 0.1,
}


def fit_lab(grid: FitGrid | None = None) -> FrameGrid:
    """Show the predicted peak of a GPT, its lines and whether it fits, moved by its shape and the device.

    A slider doubles the microbatch; menus choose layers, width, tokens a sample, precision, checkpointing, device and
    reserve. All peaks are predictions of the grid, none lies between two of them; the ledger through them says how
    far from it they lie.

    Parameters
    ----------
    grid : FitGrid, optional
        The predictions; the package's own where none are given.

    Returns
    -------
    FrameGrid
        A box of standard widgets that also works in a page with no kernel.

    Raises
    ------
    FitGridError
        A shape of the grid's axes is missing, or the microbatches are no doublings of 1.
    StaleFitGridError
        The package's predictions were made by another method than the one that is here.

    Examples
    --------
    >>> lab = fit_lab()
    >>> "12 layers, width 768, T = 1,024, fp32, microbatch 16 on L4" in lab.first_frame
    True
    """
    known = load_grid() if grid is None else grid

    def axis(name: str) -> list[Any]:
        return sorted({getattr(shape, name) for shape in known.shapes})

    def control(name: str, label: str, values: list[Any], show: Callable[[Any], str] = str) -> Control:
        start = _START[name] if _START[name] in values else values[0]
        return Control(name=name, label=label, values=values, start=start, show=show)

    shared = sorted(
        set.intersection(*({point.microbatch for point in shape.points} for shape in known.shapes))
    )
    if shared != [2**k for k in range(len(shared))]:
        raise FitGridError(
            f"the grid's microbatches are {shared}; wanted doublings of 1, for the slider's places"
        )
    first = Control(
        name="microbatch",
        label="Doublings of the microbatch, from 1 sample",
        values=range(len(shared)),
        start=shared.index(_START["microbatch"]),
        spoken=lambda k: f"{2**k} sample{'' if k == 0 else 's'}",
    )
    shows: dict[str, tuple[str, Callable[[Any], str]]] = {
        "layers": ("Layers", str),
        "width": ("Width", "{:,}".format),
        "tokens": ("T (tokens a sample)", "{:,}".format),
        "precision": ("Precision", str),
        "checkpointing": ("Checkpointing", _checkpoints),
    }
    axes = {name: axis(name) for name in shows}
    axes["precision"].sort(reverse=True)  # fp32 is where everyone starts
    # By their texts: values that happen to be evenly spaced would make sliders.
    texts = {name: {shows[name][1](value): value for value in values} for name, values in axes.items()}
    controls = [first]
    for name, offered in texts.items():
        start = shows[name][1](_START[name])
        if len(offered) > 1:
            controls.append(
                Control(
                    name=name,
                    label=shows[name][0],
                    values=tuple(offered),
                    start=start if start in offered else next(iter(offered)),
                )
            )
    single = {name: values[0] for name, values in axes.items() if len(values) == 1}
    within = [
        control("device", "Device", [record.short for record in hardware.DEVICES], _sized),
        control("reserve", "Reserve", list(RESERVES), _percent),
    ]

    def render(each: Each, *, device: Each, reserve: Each, **chosen: Any) -> str:
        values = {name: texts[name][text] for name, text in chosen.items()}
        return _Frame(known.shape(**single, **values), each, device, reserve).html(known)

    return frame_grid(render, controls, within=within, css=_CSS)


def _checkpoints(on: bool) -> str:
    return "each block" if on else "none"


def _memory_gb(device: str) -> float:
    return hardware.device(device).memory_gb


def _sized(device: str) -> str:
    size = f"{_memory_gb(device):g} GB"
    # Some short names end in the size already.
    return device if device.endswith(size.replace(" ", "")) else f"{device} ({size})"


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _gb(nbytes: float) -> str:
    return f"{nbytes / GB:.2f} GB"


_REST = ("inputs", "workspaces", "rounding")
_LINES: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("P", "Parameters", ("parameters",), ""),
    ("O", "Optimizer state", ("optimizer",), "AdamW: two fp32 numbers a parameter"),
    ("G", "Gradients", ("gradients",), ""),
    ("C", "Casts", ("casts",), "the bf16 copies of weights that autocast keeps"),
    ("A", "Activations", ("activations",), ""),
    ("T", "Temporaries", ("temporaries",), "what the operators at work hold and nothing keeps"),
    ("R", "The rest", _REST, "the batch, cuBLAS's workspaces, the allocator's rounding"),
)


class _Frame:
    """One shape, for every microbatch, device and reserve."""

    def __init__(self, shape: Shape, each: Each, device: Each, reserve: Each) -> None:
        self.shape, self.each, self.device, self.reserve = shape, each, device, reserve
        self.lines = [line for line in _LINES if line[0] != "C" or shape.precision != "fp32"]

    def at(self, text: Callable[[Point], str]) -> str:
        """Give a text of every point."""
        return self.each(lambda k: text(self.shape.point(2**k)))

    def on(self, text: Callable[[str, float], str]) -> str:
        """Give a text of every device and reserve."""
        return self.device(lambda name: self.reserve(lambda share: text(name, share)))

    def html(self, grid: FitGrid) -> str:
        some = self.shape
        shape = f"{some.layers} layers, width {some.width:,}, T = {some.tokens:,}, {some.precision}"
        checkpointed = ", checkpointed" if some.checkpointing else ""
        microbatch = self.each(lambda k: str(2**k))
        conditions = f"{shape}{checkpointed}, microbatch {microbatch} on {self.device(escape)}"
        verdict = self.at(lambda point: self.on(lambda name, share: point.verdict(_memory_gb(name), share)))
        body = table(["Item", "At the peak", "What it says"], self.rows())
        # The conditions stand in the caption, so that the table says all of it to someone who hears only the table.
        caption = f"{conditions} with {self.reserve(_percent)} in reserve, AdamW, predicted."
        body = body.replace("<thead>", f"<caption>{caption}</caption><thead>", 1)
        body = body.replace('<tr><th scope="row">Allocated', '<tr class="sum"><th scope="row">Allocated', 1)
        return (
            f'<div class="wf"><p class="verdict" role="status">{conditions}: {verdict}</p>'
            f'<div aria-hidden="true">{self.picture()}{self.key()}</div>{body}{self.command()}'
            f'<p class="source">{escape(grid.line()[0].upper() + grid.line()[1:])}.</p></div>'
        )

    def command(self) -> str:
        asked = f"{self.each(lambda k: str(2**k))}x{self.shape.tokens}:int64"
        # As `Shape.command` writes it, with what moves in its place.
        return (
            '<p class="ask">The same by the command, which takes your own model, too:</p>'
            f"<pre>gpucourse predict &quot;{escape(self.shape.target())}&quot; --batch {asked} {asked} "
            f"--loss gpucourse.training:next_token_loss --precision {self.shape.precision} "
            f"--device &quot;{self.device(escape)}&quot; --reserve {self.reserve('{:g}'.format)}</pre>"
        )

    # --- the table

    def rows(self) -> list[list[str]]:
        rows: list[list[str]] = []
        for _, name, parts, meaning in self.lines:
            said = {
                "Parameters": f"{self.shape.parameters / 1e6:,.1f} M numbers in fp32",
                "Gradients": self.at(_gradients),
                "Activations": "kept for the backward pass: each block's input, the blocks at work, the loss"
                if self.shape.checkpointing
                else "kept for the backward pass, loss included",
            }.get(name, escape(meaning))
            rows.append([name, Raw(self.at(partial(_sum, parts)) + " GB"), Raw(said)])
        return [
            *rows,
            [
                "Allocated",
                Raw(self.at(lambda point: _gb(point.allocated_bytes))),
                Raw("the peak: " + self.at(_where)),
            ],
            [
                "Reserved",
                Raw(self.at(lambda point: _gb(point.reserved_bytes))),
                "the most that the allocator takes of a device with room for it",
            ],
            ["Budget", Raw(self.on(_budget)), Raw(self.on(_budget_of))],
            ["Ledger", _ledger(self.shape), self.points()],
            ["Largest microbatch", Raw(self.largest(0)), Raw(self.largest(1))],
        ]

    def points(self) -> str:
        shape = self.shape
        points, residual = shape.on_the_line, shape.residual_gb
        if residual is None:
            return "too few predictions have their peak at one operator"
        from_ = "" if len(points) == len(shape.points) else f" from microbatch {points[0].microbatch} on"
        return f"through {len(points)} predictions{from_}, the farthest {1000 * residual:.0f} MB off the line"

    def largest(self, part: int) -> str:
        """Write the largest microbatch that fits, or how it was found."""

        def text(name: str, share: float) -> str:
            found = self.shape.largest(_memory_gb(name), share)
            if found is None:
                return (
                    "–",
                    "with nothing in reserve the pieces decide: add --microbatch largest to the command",
                )[part]
            return escape((str(found), found.why)[part])

        return self.on(text)

    # --- the picture

    def picture(self) -> str:
        reserve = self.reserve(
            lambda share: "",
            lambda share: f"style=left:{_DEVICE_AT * (1 - share):g}%;width:{_DEVICE_AT * share:g}%",
            tag="u",
        )
        budget = self.reserve(
            lambda share: "budget " + self.device(lambda name: _budget(name, share)),
            lambda share: f"class=edge style=left:{_DEVICE_AT * (1 - share):g}%",
        )
        runs_out = self.at(
            lambda point: self.device(lambda name: "→" if _across(point.allocated_bytes, name) > 100 else "")
        )
        outside = '<span class="outside"></span>'
        return (
            f'<div class="scale">{budget}<i class="more">{runs_out}</i></div>'
            f'<div class="bar"><span class="lines">{self.at(self.drawn)}</span>'
            f"{self.rest_of_the_axis('allocated_bytes')}{reserve}{outside}</div>"
            f'<div class="bar thin"><span class="held"></span>{self.rest_of_the_axis("reserved_bytes")}{outside}</div>'
            f'<div class="scale"><span class="edge device" style="left:{_DEVICE_AT:g}%">'
            f"{self.device(lambda name: escape(_sized(name)))}</span></div>"
        )

    def drawn(self, point: Point) -> str:
        parts = []
        for letter, _, names, _ in self.lines:
            nbytes = sum(point.lines[name] for name in names)
            if nbytes:
                parts.append(f"<s class={letter} style=flex:{1000 * nbytes / point.allocated_bytes:.3g}></s>")
        return "".join(parts)

    def rest_of_the_axis(self, of: str) -> str:
        """Give what is left of the axis behind a bar; negative where the bar runs out of the picture."""
        return self.at(
            lambda point: self.device(
                lambda name: "",
                lambda name: f"style=margin-right:{max(100 - _across(getattr(point, of), name), -4000):.1f}%",
                tag="i",
            )
        )

    def key(self) -> str:
        items = [f'<li><s class="{letter}"></s>{name.lower()}</li>' for letter, name, _, _ in self.lines]
        return f'<ul class="key">{"".join(items)}<li><s class="held"></s>reserved, the thin bar</li></ul>'


def _across(nbytes: int, device: str) -> float:
    """Give how far an amount reaches on a device's axis, in percent."""
    return _DEVICE_AT * nbytes / GB / _memory_gb(device)


def _sum(names: tuple[str, ...], point: Point) -> str:
    return f"{sum(point.lines[name] for name in names) / GB:.2f}"


def _gradients(point: Point) -> str:
    whole, live = point.lines["parameters"], point.lines["gradients"]
    if not live:
        return "none is live at this instant"
    return "all of them, live at this instant" if live >= whole else "those that are made already"


def _where(point: Point) -> str:
    when = {"forward": "forward pass", "backward": "backward pass", "optimizer": "optimizer's update"}
    operator = point.operator.removeprefix("aten.").lstrip("_")
    return escape(f"in the {when.get(point.phase, point.phase)}, at {operator}")


def _budget(device: str, share: float) -> str:
    return f"{_memory_gb(device) * (1 - share):.2f} GB"


def _budget_of(device: str, share: float) -> str:
    if not share:
        return escape(f"{_sized(device)}, nothing in reserve: what is reserved decides")
    return escape(f"{_sized(device)} less {_percent(share)}: what is allocated decides")


def _ledger(shape: Shape) -> str:
    ledger = shape.ledger
    if ledger is None:
        return "–"
    return f"{ledger.fixed_gb:.2f} GB + {ledger.activations_gb_per_sample:.3f} GB a sample"
