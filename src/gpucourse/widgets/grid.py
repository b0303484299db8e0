"""A grid of frames that Python renders beforehand, and the controls that choose one.

How it stays small. Without a kernel, a control can set the ``selected_index`` of a ``Stack`` (`jsdlink`) and
little else. With one child a combination, 65 microbatches and 300 settings of the rest would need 19,500
models. Here the first control turns a Stack of 65 tiny style sheets, each showing the alternatives of one
microbatch and hiding all others, while the other controls turn nested Stacks, whose 300 leaves hold the
alternatives for every microbatch. A hidden alternative has ``display: none``, so neither eyes nor a screen
reader meet it. Where little of a frame depends on a control, it can be one of those that turn style sheets, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from numbers import Integral
from typing import Any, Protocol

import ipywidgets
import traitlets

__all__ = ["Control", "ControlError", "Each", "FrameGrid", "Render", "frame_grid"]


MOST_VALUES = 1_000
"""Most values of one control: each is compared with each, and the first control's each have a style sheet."""

MOST_POSITIONS = 10_000
"""Highest value of a slider, which hands over its value and so needs a place for every integer below it."""

MOST_WITHIN = 3
"""Most controls besides the first that choose among a frame's alternatives: the style sheet names each."""

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
"""``render(each, **values)``: the HTML of a frame, given a value for every control but the first.

For a control that chooses within a frame it is given an `Each` of that control in place of a value; alternatives of one
control may hold those of another."""


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
    spoken : callable, optional
        What a screen reader says for a slider's value, with its unit; the bare value where there is none. Only
        the pages of the site say it: their widget manager is mended for it.

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
    spoken: Callable[[Any], str] | None = None

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
        if self.spoken is not None and not callable(self.spoken):
            raise ControlError(
                f"control {self.name!r} speaks values by {self.spoken!r}, which cannot be called"
            )
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


class SpokenSlider(ipywidgets.IntSlider):  # type: ignore[misc]  # ipywidgets ships no types
    """A slider that carries the words for its values to the page; another widget manager passes them over."""

    value_texts = traitlets.Dict(value_trait=traitlets.Unicode(), key_trait=traitlets.Unicode()).tag(
        sync=True
    )


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
.gpucourse-grid .widget-html-content :is(b[data-c],b[data-c1],b[data-c2],b[data-c3]){font-weight:inherit}
@media (max-width:600px){.gpucourse-grid .widget-slider{flex-wrap:wrap;height:auto}
.gpucourse-grid .widget-slider>.widget-label{width:100%!important}}
.gpucourse-grid.jupyter-widgets-disconnected::before,
.gpucourse-grid .jupyter-widgets-disconnected::before{content:none}
"""


def frame_grid(
    render: Render, controls: Sequence[Control], *, within: Sequence[Control] = (), css: str = ""
) -> FrameGrid:
    """Make a grid of Python-rendered frames that its controls choose from, with a kernel or without.

    Parameters
    ----------
    render : callable
        ``render(each, **values) -> str``: the HTML of a frame. It gets a value for every control but the
        first; for what depends on the first it calls ``each``, see `Each`.
    controls : sequence of Control
        In the order in which they are shown. Give the one with most values first: the models number that
        control's values plus the product of the others'.
    within : sequence of Control
        Three more at the most, shown after the others. Like the first they choose among alternatives within a frame,
        so they make no frame of their own: for what little of a frame depends on them.
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
    controls, within = list(controls), list(within)
    if not controls:
        raise ControlError("a grid of frames needs at least one control")
    if len(within) > MOST_WITHIN:
        raise ControlError(f"{len(within)} controls choose within a frame, and {MOST_WITHIN} are the most")
    for control in [*controls, *within]:
        if not isinstance(control, Control):
            raise ControlError(f"controls must be a list of Control, found {control!r} in it")
        if control.slides and control.values[-1] > MOST_POSITIONS:
            raise ControlError(
                f"control {control.name!r} slides up to {control.values[-1]:,}, and each integer on the way "
                f"costs a place in the page; {MOST_POSITIONS:,} are the most: count in larger units"
            )
    names = [control.name for control in [*controls, *within]]
    if len(set(names)) != len(names):
        raise ControlError(f"two controls have one name: {', '.join(names)}")
    first, *rest = controls
    frames_wanted = math.prod(len(control.values) for control in rest)
    if frames_wanted > MOST_FRAMES:
        raise ControlError(
            f"these controls have {frames_wanted:,} combinations besides the first, and every one is rendered; "
            f"at most {MOST_FRAMES:,} are: give fewer values, or put the longest control first"
        )

    leaves, varies = _render_leaves(render, first, rest, within)
    _refuse_idle_controls([first, *within], rest, leaves, varies)

    everything = [*controls, *within]
    inputs = [_input(control) for control in everything]
    # One layout and one style for all frames: each would otherwise bring two more models of its own.
    plain = ipywidgets.Layout(overflow="visible")
    unseen = ipywidgets.Layout(display="none")
    text_style = ipywidgets.HTML().style

    def stack(children: Sequence[ipywidgets.Widget], of: Control, layout: ipywidgets.Layout) -> Any:
        control = inputs[everything.index(of)]
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
        + render(
            _only(first.start),
            **{control.name: control.start for control in rest},
            **{control.name: _only(control.start) for control in within},
        ),
    )
    # The model's id is unique even among notebooks that are open side by side.
    scope = f"g{grid.model_id}"

    def sheets(of: Control, mark: str) -> Any:
        made = [
            ipywidgets.HTML(
                f'<style>.{scope} [{mark}]:not([{mark}~="{k}"]){{display:none}}</style>',
                layout=unseen,
                style=text_style,
            )
            for k in range(len(of.values))
        ]
        return stack(made, of, unseen)

    turned = [sheets(control, mark) for control, mark in zip([first, *within], _MARKS, strict=False)]
    base = ipywidgets.HTML(f"<style>{_BASE_CSS}{css}</style>", layout=unseen, style=text_style)
    grid.add_class("gpucourse-grid")
    grid.add_class(scope)
    grid.children = (base, *_rows(inputs), *turned, frames)
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


_MARKS = ("data-c", "data-c1", "data-c2", "data-c3")
"""Attributes that say for which values an alternative is shown: of the first control, and of those within."""


def _every(control: Control, mark: str, varies: set[str]) -> Each:
    """Give the `Each` of a control; its name joins ``varies`` once a text differs among its values."""

    def each(
        text: Callable[[Any], str],
        attributes: Callable[[Any], str] | None = None,
        *,
        tag: str = "b",
    ) -> str:
        alternatives: dict[tuple[str, str], list[str]] = {}
        for k, value in enumerate(control.values):
            key = (attributes(value) if attributes else "", text(value))
            alternatives.setdefault(key, []).append(str(k))
        if len(alternatives) == 1:
            return _only(control.values[0])(text, attributes, tag=tag)
        varies.add(control.name)
        parts = []
        for (extra, inner), positions in alternatives.items():
            # Quotes cost two bytes in a page and four in its JSON, 100,000 times: leave out what HTML does.
            which = positions[0] if len(positions) == 1 else f'"{" ".join(positions)}"'
            parts.append(f"<{tag} {mark}={which}{' ' + extra if extra else ''}>{inner}</{tag}>")
        return "".join(parts)

    return each


def _render_leaves(
    render: Render, first: Control, rest: Sequence[Control], within: Sequence[Control]
) -> tuple[dict[tuple[int, ...], str], set[str]]:
    """Render one leaf a combination of the other controls; name the controls that choose within one."""
    varies: set[str] = set()
    each = _every(first, _MARKS[0], varies)
    inner = {
        control.name: _every(control, mark, varies) for control, mark in zip(within, _MARKS[1:], strict=False)
    }
    leaves = {}
    for chosen in itertools.product(*(range(len(control.values)) for control in rest)):
        values = {control.name: control.values[k] for control, k in zip(rest, chosen, strict=True)}
        leaf = render(each, **values, **inner)
        if not isinstance(leaf, str):
            raise TypeError(f"render must return HTML as a str, found {type(leaf).__name__} for {values!r}")
        leaves[chosen] = leaf
    return leaves, varies


def _refuse_idle_controls(
    turning: Sequence[Control],
    rest: Sequence[Control],
    leaves: dict[tuple[int, ...], str],
    varies: set[str],
) -> None:
    idle = [control.name for control in turning if control.name not in varies]
    for i, control in enumerate(rest):
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
        spoken = control.spoken or str
        return SpokenSlider(
            value_texts={str(int(value)): spoken(value) for value in control.values},
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
