"""Sliders that need no kernel: Python renders every frame beforehand, and the controls choose one.

`frame_grid` makes a grid of frames from a render function and its controls, out of standard ipywidgets alone,
so that the same object works in a notebook and, with no kernel, in a page. `memory_lab` and `roofline_lab`
are calls of it.

How it stays small. Without a kernel, a control can set the ``selected_index`` of a ``Stack`` (`jsdlink`) and
little else. With one child a combination, 65 microbatches and 300 settings of the rest would need 19,500
models. Here the first control turns a Stack of 65 tiny style sheets, each showing the alternatives of one
microbatch and hiding all others, while the other controls turn nested Stacks, whose 300 leaves hold the
alternatives for every microbatch. A hidden alternative has ``display: none``, so neither eyes nor a screen
reader meet it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from keyword import iskeyword
from numbers import Integral, Real
from typing import Any, Protocol

try:
    import ipywidgets
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"sliders need ipywidgets: {error}. Run `pip install 'ipywidgets>=8.1'` in the notebook's "
        "environment; the ledger itself works without: gpucourse.memory_ledger.MemoryLedger().",
        name=error.name,
    ) from error

from gpucourse.hardware import DEVICES, PRECISIONS, Device
from gpucourse.html import Raw, escape, table
from gpucourse.memory_ledger import (
    OVER,
    FixedPartOverBudgetError,
    MemoryLedger,
    UnlimitedMicrobatchError,
)
from gpucourse.roof_points import Kind, MeasuredRoof, recorded_roofs
from gpucourse.roofline import Roofline

__all__ = [
    "Control",
    "ControlError",
    "Each",
    "FrameGrid",
    "Render",
    "frame_grid",
    "memory_lab",
    "roofline_lab",
]


MOST_VALUES = 1_000
"""Most values of one control: each is compared with each, and the first control's each have a style sheet."""

MOST_POSITIONS = 10_000
"""Highest value of a slider, which hands over its value and so needs a place for every integer below it."""

MOST_FRAMES = 2_000
"""Most combinations of the controls besides the first: a page with so many takes seconds to come alive."""


class ControlError(ValueError):
    """The controls, or what they are to move, cannot make a grid."""


class Each(Protocol):
    """What a render function calls for text that depends on the first control.

    ``each(text)`` gives the HTML of ``text(value)`` for every value of the first control, equal texts once;
    ``attributes(value)`` adds to the tag of an alternative.
    """

    def __call__(
        self,
        text: Callable[[Any], str],
        attributes: Callable[[Any], str] | None = None,
        *,
        tag: str = "b",
    ) -> str:
        """Give the alternatives of ``text``, of which one is visible at a time."""
        ...


Render = Callable[..., str]
"""``render(each, **values)``: the HTML of a frame, given a value for every control but the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One input of a grid of frames.

    Values that are evenly spaced integers give a slider, whose position is its value; any others give a menu:
    a slider over a list speaks the *position* to a screen reader ("2"), never the value ("0.34").

    Parameters
    ----------
    name : str
        Keyword under which the render function gets the value.
    label : str
        What stands beside the control, unit included.
    values : sequence
        At least two different values.
    start : object
        The one shown first.
    show : callable
        Text of a value in a menu.

    Raises
    ------
    ControlError
        Fewer than two values, two equal ones, a start that is none of them, or an empty label.
    """

    name: str
    label: str
    values: Sequence[Any]
    start: Any
    show: Callable[[Any], str] = str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier() or iskeyword(self.name):
            raise ControlError(f"a control's name must be a Python identifier, found {self.name!r}")
        if self.name == "each":
            raise ControlError(
                "a control cannot be named 'each': render gets its first argument by that name"
            )
        if not isinstance(self.label, str) or not self.label.strip():
            raise ControlError(f"control {self.name!r} has no label: say what it changes, with its unit")
        if not callable(self.show):
            raise ControlError(f"control {self.name!r} shows values by {self.show!r}, which cannot be called")
        if isinstance(self.values, str | bytes) or not isinstance(self.values, Iterable):
            raise ControlError(
                f"control {self.name!r} needs several values, such as (12, 24, 48), found {self.values!r}"
            )
        # One more than are allowed tells enough: an endless one is never walked to its end.
        object.__setattr__(self, "values", tuple(itertools.islice(self.values, MOST_VALUES + 1)))
        if len(self.values) > MOST_VALUES:
            raise ControlError(
                f"control {self.name!r} has more than {MOST_VALUES} values, and every one is rendered: "
                "take larger steps"
            )
        if len(self.values) < 2:
            raise ControlError(
                f"control {self.name!r} has {len(self.values)} value(s), so it could move nothing: "
                "give two or more, or leave it out"
            )
        if any(_equal(a, b) for a, b in itertools.combinations(self.values, 2)):
            raise ControlError(f"control {self.name!r} has a value twice: {list(self.values)!r}")
        if isinstance(self.start, bool) != any(isinstance(value, bool) for value in self.values) or (
            self.start not in self.values
        ):
            raise ControlError(
                f"control {self.name!r} starts at {self.start!r}, which is none of its values "
                f"({self.values[0]!r} … {self.values[-1]!r})"
            )

    @property
    def position(self) -> int:
        """Index of the start among the values."""
        return self.values.index(self.start)

    @property
    def slides(self) -> bool:
        """Whether the values are evenly spaced integers from 0 up, which a slider can show as themselves."""
        values = self.values
        if any(isinstance(value, bool) or not isinstance(value, Integral) or value < 0 for value in values):
            return False
        steps = {int(b) - int(a) for a, b in itertools.pairwise(values)}
        return len(steps) == 1 and steps.pop() > 0


def _equal(a: object, b: object) -> bool:
    try:
        return bool(a == b)
    except ValueError as error:  # arrays: equal here and there is neither yes nor no
        raise ControlError(f"a value of a control must be one thing, found {a!r}: {error}") from error


class FrameGrid(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets ships no types
    """Controls above the frame that they choose.

    Where widgets cannot be shown (PDF, EPUB, a viewer without them) the first frame stands in.
    """

    def __init__(self, children: Sequence[ipywidgets.Widget], *, first_frame: str, **kwargs: Any) -> None:
        super().__init__(children, **kwargs)
        self.first_frame = first_frame

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        data: dict[str, Any] = super()._repr_mimebundle_(**kwargs)
        data["text/html"] = self.first_frame
        return data


# The widgets' own style sheets set colours for a light page, where a page may be dark, cut labels short, and
# put a broken chain beside every widget that has no kernel.
_BASE_CSS = """
.gpucourse-grid{overflow:visible;max-width:100%}
.gpucourse-grid,.gpucourse-grid .jupyter-widgets,.gpucourse-grid .widget-html-content,
.gpucourse-grid .widget-label,.gpucourse-grid .widget-readout{color:inherit}
.gpucourse-grid .widget-label{text-align:left;min-width:13.4em}
.gpucourse-grid .widget-dropdown>select{flex:none;width:10.5em;color:inherit;background:none;appearance:auto}
.gpucourse-grid .widget-dropdown>select>option{color:#111;background:#fff}
.gpucourse-grid .widget-html{width:auto;overflow:visible}
.gpucourse-grid .widget-html-content{width:100%;overflow:visible;line-height:1.45}
.gpucourse-grid .widget-html-content b[data-c]{font-weight:inherit}
@media (max-width:600px){.gpucourse-grid .widget-slider{flex-wrap:wrap;height:auto}
.gpucourse-grid .widget-slider>.widget-label{width:100%!important}}
.gpucourse-grid.jupyter-widgets-disconnected::before,
.gpucourse-grid .jupyter-widgets-disconnected::before{content:none}
"""


def frame_grid(render: Render, controls: Sequence[Control], *, css: str = "") -> FrameGrid:
    """Make a grid of Python-rendered frames that its controls choose from, with a kernel or without.

    Parameters
    ----------
    render : callable
        ``render(each, **values) -> str``: the HTML of a frame. It gets a value for every control but the
        first; for what depends on the first it calls ``each``, see `Each`.
    controls : sequence of Control
        In the order in which they are shown. Give the one with most values first: the models number that
        control's values plus the product of the others'.
    css : str
        Style sheet of the frames, once for all of them.

    Returns
    -------
    FrameGrid
        A box of standard widgets.

    Raises
    ------
    TypeError
        ``render`` is no function, or what it returns is no text.
    ControlError
        No control, one name twice, or a control that changes no frame.

    Examples
    --------
    >>> def area(each, height):
    ...     return f"<p>{each(lambda width: str(width * height))} m²</p>"
    >>> grid = frame_grid(area, [
    ...     Control(name="width", label="Width (m)", values=range(1, 9), start=2),
    ...     Control(name="height", label="Height (m)", values=(0.5, 1.5), start=0.5),
    ... ])
    >>> grid.first_frame
    '<p>1.0 m²</p>'
    """
    if not callable(render):
        raise TypeError(f"render must be a function that returns HTML, found {type(render).__name__}")
    if isinstance(controls, Control) or not isinstance(controls, Iterable):
        raise ControlError(f"controls must be a list of Control, found {type(controls).__name__}")
    controls = list(controls)
    if not controls:
        raise ControlError("a grid of frames needs at least one control")
    for control in controls:
        if not isinstance(control, Control):
            raise ControlError(f"controls must be a list of Control, found {control!r} in it")
        if control.slides and control.values[-1] > MOST_POSITIONS:
            raise ControlError(
                f"control {control.name!r} slides up to {control.values[-1]:,}, and each integer on the way "
                f"costs a place in the page; {MOST_POSITIONS:,} are the most: count in larger units"
            )
    names = [control.name for control in controls]
    if len(set(names)) != len(names):
        raise ControlError(f"two controls have one name: {', '.join(names)}")
    first, *rest = controls
    frames_wanted = math.prod(len(control.values) for control in rest)
    if frames_wanted > MOST_FRAMES:
        raise ControlError(
            f"these controls have {frames_wanted:,} combinations besides the first, and every one is rendered; "
            f"at most {MOST_FRAMES:,} are: give fewer values, or put the longest control first"
        )

    leaves, varies = _render_leaves(render, first, rest)
    _refuse_idle_controls(controls, leaves, varies)

    inputs = [_input(control) for control in controls]
    # One layout and one style for all frames: each would otherwise bring two more models of its own.
    plain = ipywidgets.Layout(overflow="visible")
    unseen = ipywidgets.Layout(display="none")
    text_style = ipywidgets.HTML().style

    def stack(children: Sequence[ipywidgets.Widget], of: Control, layout: ipywidgets.Layout) -> Any:
        control = inputs[controls.index(of)]
        source = "index"
        position = of.position
        if of.slides:
            # A slider hands over its value, not its position: fill the gaps, so that the value is the index.
            source, position = "value", int(of.start)
            low, step = int(of.values[0]), int(of.values[1]) - int(of.values[0])
            children = [children[max(0, (v - low) // step)] for v in range(int(of.values[-1]) + 1)]
        made = ipywidgets.Stack(children, selected_index=position, layout=layout)
        ipywidgets.jsdlink((control, source), (made, "selected_index"))
        return made

    # The fewest Stacks (and links) come from putting the longest list of values innermost.
    order = sorted(range(len(rest)), key=lambda i: len(rest[i].values))

    def nest(depth: int, chosen: dict[int, int]) -> ipywidgets.Widget:
        if depth == len(order):
            leaf = leaves[tuple(chosen[i] for i in range(len(rest)))]
            return ipywidgets.HTML(leaf, layout=plain, style=text_style)
        i = order[depth]
        children = [nest(depth + 1, {**chosen, i: k}) for k in range(len(rest[i].values))]
        return stack(children, rest[i], plain)

    frames = nest(0, {})
    grid = FrameGrid(
        (),
        first_frame=(f"<style>{css}</style>" if css else "")
        + render(_only(first.start), **{control.name: control.start for control in rest}),
    )
    # The model's id is unique even among notebooks that are open side by side.
    scope = f"g{grid.model_id}"
    sheets = [
        ipywidgets.HTML(
            f'<style>.{scope} [data-c]:not([data-c~="{k}"]){{display:none}}</style>',
            layout=unseen,
            style=text_style,
        )
        for k in range(len(first.values))
    ]
    base = ipywidgets.HTML(f"<style>{_BASE_CSS}{css}</style>", layout=unseen, style=text_style)
    grid.add_class("gpucourse-grid")
    grid.add_class(scope)
    grid.children = (base, *_rows(inputs), stack(sheets, first, unseen), frames)
    return grid


def _only(value: Any) -> Each:
    """Give an `Each` for one value of the first control: its text, with nothing hidden beside it."""

    def each(
        text: Callable[[Any], str],
        attributes: Callable[[Any], str] | None = None,
        *,
        tag: str = "b",
    ) -> str:
        extra = attributes(value) if attributes else ""
        return f"<{tag} {extra}>{text(value)}</{tag}>" if extra else text(value)

    return each


def _render_leaves(
    render: Render, first: Control, rest: Sequence[Control]
) -> tuple[dict[tuple[int, ...], str], bool]:
    """Render one leaf a combination of the other controls; say whether the first control changes any."""
    varies = False

    def each(
        text: Callable[[Any], str],
        attributes: Callable[[Any], str] | None = None,
        *,
        tag: str = "b",
    ) -> str:
        nonlocal varies
        alternatives: dict[tuple[str, str], list[str]] = {}
        for k, value in enumerate(first.values):
            key = (attributes(value) if attributes else "", text(value))
            alternatives.setdefault(key, []).append(str(k))
        if len(alternatives) == 1:
            return _only(first.values[0])(text, attributes, tag=tag)
        varies = True
        parts = []
        for (extra, inner), positions in alternatives.items():
            # Quotes cost two bytes in a page and four in its JSON, 100,000 times: leave out what HTML does.
            which = positions[0] if len(positions) == 1 else f'"{" ".join(positions)}"'
            parts.append(f"<{tag} data-c={which}{' ' + extra if extra else ''}>{inner}</{tag}>")
        return "".join(parts)

    leaves = {}
    for chosen in itertools.product(*(range(len(control.values)) for control in rest)):
        values = {control.name: control.values[k] for control, k in zip(rest, chosen, strict=True)}
        leaf = render(each, **values)
        if not isinstance(leaf, str):
            raise TypeError(f"render must return HTML as a str, found {type(leaf).__name__} for {values!r}")
        leaves[chosen] = leaf
    return leaves, varies


def _refuse_idle_controls(
    controls: Sequence[Control], leaves: dict[tuple[int, ...], str], varies: bool
) -> None:
    idle = [] if varies else [controls[0].name]
    for i, control in enumerate(controls[1:]):
        by_others: dict[tuple[int, ...], set[str]] = {}
        for chosen, leaf in leaves.items():
            by_others.setdefault(chosen[:i] + chosen[i + 1 :], set()).add(leaf)
        if all(len(texts) == 1 for texts in by_others.values()):
            idle.append(control.name)
    if idle:
        raise ControlError(f"these controls would move nothing, so leave them out: {', '.join(idle)}")


def _rows(inputs: Sequence[ipywidgets.Widget]) -> list[ipywidgets.Widget]:
    """Give each slider a row and let neighbouring menus share one, as far as the page is wide."""
    rows: list[ipywidgets.Widget] = []
    for slides, group in itertools.groupby(inputs, lambda made: isinstance(made, ipywidgets.IntSlider)):
        if slides:
            rows += group
        else:
            rows.append(
                ipywidgets.Box(
                    list(group), layout=ipywidgets.Layout(flex_flow="row wrap", grid_gap="0 1.5em")
                )
            )
    return rows


def _input(control: Control) -> ipywidgets.Widget:
    style = {"description_width": "initial"}
    if control.slides:
        return ipywidgets.IntSlider(
            value=int(control.start),
            min=int(control.values[0]),
            max=int(control.values[-1]),
            step=int(control.values[1]) - int(control.values[0]),
            description=control.label,
            tooltip=control.label,  # else the label gets title="null"
            style=style,
            layout=ipywidgets.Layout(width="auto", max_width="40em"),
        )
    return ipywidgets.Dropdown(
        options=[(control.show(value), k) for k, value in enumerate(control.values)],
        index=control.position,
        description=control.label,
        tooltip=control.label,
        style=style,
        layout=ipywidgets.Layout(width="auto", flex="none"),
    )


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
    first = Control(name="microbatch", label="Microbatch (samples)", values=microbatches, start=start)
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
        f'<div class="ml"><p class="verdict">Microbatch {each(str)}: {each(ledger.verdict)}</p>'
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


# --- the roofline lab -----------------------------------------------------------------------------------------

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
    first = Control(name="doublings", label=label, values=doublings, start=start)
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
        body = table(["Item", "Computed state", "Interpretation"], rows)
        body = body.replace("<thead>", f"<caption>{caption}</caption><thead>", 1)
        return (
            f'<div class="rl"><p class="verdict">{each(lambda k: escape(self.verdict(k)))}</p>'
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
            places = [(axes.x(point.work.intensity), axes.y(point.rate)) for point in self.measured.points]
            for letter, point, (x, y) in zip(_LETTERS, self.measured.points, places, strict=False):
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
            kinds = [point.kind(self.measured.l2_bytes) for point in self.measured.points]
            items += [item(_shape(kind, 13, 6), _SHAPE_NAMES[kind]) for kind in _SHAPES if kind in kinds]
        return f'<ul class="key">{"".join(items)}</ul>'


_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _superscript(text: str) -> str:
    mantissa, _, power = text.partition("^")
    return f"{mantissa}<sup>{power}</sup>" if power else text
