"""Whether a loop retains memory, how much a step, and what holds it.

A loop leaks when what each step made outlives the step, again and again. So the loop's body is run a number of
times, and after each time a full collection and a `live_memory.Census` say what is still there. What rises once
(an optimizer's state, a cache that fills) is no leak; what survives from every part of the run is.

The looks disturb the loop as little as they can: no operator is intercepted while growth is measured. Only where
something grows are three more steps run, with the line of code noted that makes each storage and graph node.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from gpucourse.environment import Environment
from gpucourse.html import escape, table
from gpucourse.suspects import CAUSES, TRACED_STEPS, WINDOWS, Search, Suspect, in_every_window, windows
from gpucourse.units import format_bytes

if TYPE_CHECKING:
    from gpucourse.live_memory import Census, Count

__all__ = ["METHOD_VERSION", "Growth", "Trend", "watch_growth"]

METHOD_VERSION = 1

MIN_STEPS = 2 * WINDOWS
SIGNIFICANT = 3.0  # standard errors

State = Literal["grows", "steady", "unclear"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """One quantity after each step.

    Attributes
    ----------
    what
        "device memory", "host tensors" (both in bytes) or "graph nodes".
    values
        After the warm-up, then after each measured step.
    per_step
        How much it rises a step: the mean of the changes where it grows, else the slope of the straight line
        through the values.
    uncertainty
        Its standard error.
    state
        "grows": it rises in every part of the run, or survivors are left from every part; "steady": it does not;
        "unclear": it rose, but not so that a leak can be told from noise.
    """

    what: str
    values: tuple[int, ...]
    per_step: float
    uncertainty: float
    state: State

    @property
    def amount(self) -> str:
        """How much a step, with its uncertainty where there is one, in words."""
        if self.what == "graph nodes":
            text, error, of = f"{self.per_step:.3g}", f"{self.uncertainty:.2g}", " graph nodes"
        else:
            text, error = format_bytes(round(self.per_step, 1)), format_bytes(round(self.uncertainty, 1))
            of = f" of {self.what}"
        exact = self.uncertainty <= 1e-3 * abs(self.per_step)
        return f"{text}{of}" if exact else f"{text} ± {error}{of}"

    def as_dict(self) -> dict[str, Any]:
        """Give the fields as plain data."""
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "values": list(self.values),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Whether a loop retains memory, how much a step, and what holds it.

    Attributes
    ----------
    steps, warm_up
        How many were measured, and how many ran before.
    host, nodes
        Storages on the CPU in bytes, and graph nodes: nodes are host memory too, some hundreds of bytes each.
    device
        The accelerator's memory in bytes (the allocator's count on CUDA); None where the process uses none.
    suspects
        What is retained, the largest first; empty where nothing grows.
    remarks
        What else a reader of the numbers has to know.
    environment
        The machine.
    """

    steps: int
    warm_up: int
    host: Trend
    nodes: Trend
    device: Trend | None
    suspects: tuple[Suspect, ...]
    remarks: tuple[str, ...]
    environment: Environment

    @property
    def trends(self) -> tuple[Trend, ...]:
        """The quantities that were watched."""
        return tuple(trend for trend in (self.device, self.host, self.nodes) if trend is not None)

    @property
    def leaks(self) -> bool:
        """Whether anything grows."""
        return any(trend.state == "grows" for trend in self.trends)

    @property
    def unclear(self) -> bool:
        """Whether nothing certainly grows, and something may."""
        return not self.leaks and any(trend.state == "unclear" for trend in self.trends)

    @property
    def causes(self) -> tuple[str, ...]:
        """The suspects' causes, each once, the largest first."""
        return tuple(dict.fromkeys(suspect.cause for suspect in self.suspects))

    @property
    def verdict(self) -> str:
        """One sentence: what grows, where, how much a step and by whom."""
        run = f"in {self.steps} steps after {self.warm_up} of warm-up"
        if self.leaks:
            grows = " and ".join(t.amount for t in self.trends if t.state == "grows")
            why = (
                f": {CAUSES[self.suspects[0].cause][0]} ({self.suspects[0].holder})"
                if self.suspects
                else "; what holds it is not to be seen from Python"
            )
            return f"The loop retains {grows} a step{why}."
        if self.unclear:
            noisy = " and ".join(f"{t.what} ({t.amount} a step)" for t in self.trends if t.state == "unclear")
            return (
                f"Too noisy to tell {run}: {noisy} rose, but up and down. "
                f"Watch longer: steps={4 * self.steps}, or make each step do the same work."
            )
        return f"The loop retains nothing {run}."

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(f"- {suspect}" for suspect in self.suspects), *self.remarks])

    def as_dict(self) -> dict[str, Any]:
        """Give the fields and the verdict as plain data; the machine stands in the provenance."""
        return {
            "verdict": self.verdict,
            "leaks": self.leaks,
            "unclear": self.unclear,
            "causes": list(self.causes),
            "steps": self.steps,
            "warm_up": self.warm_up,
            "device": self.device.as_dict() if self.device else None,
            "host": self.host.as_dict(),
            "nodes": self.nodes.as_dict(),
            "suspects": [suspect.as_dict() for suspect in self.suspects],
            "remarks": list(self.remarks),
        }

    def _repr_html_(self) -> str:
        watched = table(
            ["Watched", "After warm-up", "At the end", "A step", "State"],
            [
                [t.what, _amount(t, t.values[0]), _amount(t, t.values[-1]), t.amount, t.state]
                for t in self.trends
            ],
            self.verdict,
        )
        held = table(
            ["Cause", "Held by", "Bytes a step", "Nodes a step", "Made at", "What helps"],
            [
                [
                    s.cause,
                    s.holder,
                    format_bytes(round(s.bytes, 1)),
                    f"{s.nodes:.3g}",
                    s.lines[0] if s.lines else "",
                    CAUSES[s.cause][1],
                ]
                for s in self.suspects
            ],
            "What holds it",
        )
        said = "".join(f"<p>{escape(text)}</p>" for text in (*self.remarks, self.environment.line()))
        return watched + (held if self.suspects else "") + said


def _amount(trend: Trend, value: int) -> str:
    return f"{value:,}" if trend.what == "graph nodes" else format_bytes(value)


# --------------------------------------------------------------------------------------------------- the judgement


def _trend(what: str, values: Sequence[int], births: Sequence[int]) -> Trend:
    """Judge a quantity by its course and by when what is left of it was made.

    Parameters
    ----------
    what
        Its name.
    values
        After the warm-up and after each step.
    births
        The step in which each survivor was first seen.
    """
    steps = len(values) - 1
    line = statistics.linear_regression(range(steps + 1), values)
    slope = line.slope
    rests = [value - line.intercept - line.slope * at for at, value in enumerate(values)]
    spread = sum((at - steps / 2) ** 2 for at in range(steps + 1))
    error = math.sqrt(sum(rest * rest for rest in rests) / (steps - 1) / spread)
    never_falls = all(after >= before for before, after in itertools.pairwise(values))
    parts = windows(steps)
    rises = all(values[part[-1]] > values[part[0] - 1] for part in parts)
    last = parts[-1]
    new_high = max(values[last[0] :]) > max(values[: last[0]])
    if in_every_window(births, steps) or (never_falls and rises):
        # A walk whose steps vary: its mean step is the better estimate, and the line's error far too small.
        state: State = "grows"
        changes = [after - before for before, after in itertools.pairwise(values)]
        slope, error = statistics.fmean(changes), statistics.stdev(changes) / math.sqrt(steps)
    elif new_high and slope > SIGNIFICANT * error:
        state = "unclear"
    else:
        state = "steady"
    return Trend(
        what=what, values=tuple(values), per_step=float(slope), uncertainty=float(error), state=state
    )


# ----------------------------------------------------------------------------------------------------- the watch


def watch_growth(step: Callable[[], Any], *, steps: int = 12, warm_up: int = 3) -> Growth:
    """Run a loop's body and say whether it retains memory, how much a step, and what holds it.

    Parameters
    ----------
    step
        The loop's body, called without arguments; what it returns is dropped. It is called `warm_up` + `steps`
        times, and three times more where something grows, to note the lines of code. What it raises is passed on.
    steps
        How many steps are judged, at least six. A leak that shows less often than once in a third of them is not
        seen; a container that is emptied or full only after more of them looks like a leak.
    warm_up
        How many run before: optimizer states, caches and workspaces come into being there.

    Returns
    -------
    Growth
        Its text form is the verdict. On CUDA the device's memory is the allocator's count, in bytes, after a
        synchronize; on the host, CPU tensors' storages and graph nodes count, other Python objects do not.

    Raises
    ------
    TypeError
        `step` is not callable or makes a generator or coroutine instead of running; `steps` or `warm_up` is no int.
    ValueError
        Too few steps to tell a leak from a loop that settles.

    Examples
    --------
    >>> import torch
    >>> kept = []
    >>> growth = watch_growth(lambda: kept.append(torch.ones(1000)), steps=6, warm_up=1)
    >>> growth.leaks, growth.causes, growth.host.per_step
    (True, ('kept tensors',), 4000.0)
    >>> print(watch_growth(lambda: torch.ones(1000).sum().item(), steps=6, warm_up=1))
    The loop retains nothing in 6 steps after 1 of warm-up.
    """
    _check(step, steps, warm_up)
    from gpucourse.live_memory import Census, Frozen, Origins

    remarks: list[str] = []
    if gc.get_freeze_count():
        remarks.append("gc.freeze() was called before: tensors that were frozen are not seen.")
    gc.collect()
    census, frozen = Census(), Frozen()
    try:
        frozen.freeze()
        census.frozen = frozen.on
        for _ in range(warm_up):
            _run(step)
        counts = [_look(census, 0)]
        for at in range(1, steps + 1):
            _run(step)
            counts.append(_look(census, at))
        trends = _judge(census, counts)
        suspects: tuple[Suspect, ...] = ()
        if any(trend.state == "grows" for trend in trends.values()):
            every = _sizes_left_everywhere(census, steps)
            origins = Origins(census)
            for at in range(steps + 1, steps + TRACED_STEPS + 1):
                origins.step = at
                with origins:
                    _run(step)
                _look(census, at)
            frozen.thaw()
            census.frozen = False
            gc.collect()
            growing = frozenset(kind for kind, trend in trends.items() if trend.state == "grows")
            suspects = Search(census, origins, step, steps, every, growing).suspects()
    finally:
        frozen.thaw()
        census.frozen = False
        tensors, nodes = census.objects()
        census.forget(census.walk(tensors, nodes, 0).values())
        del tensors, nodes
    return Growth(
        steps=steps,
        warm_up=warm_up,
        host=trends["cpu"],
        nodes=trends["nodes"],
        device=trends.get("device"),
        suspects=suspects,
        remarks=tuple(remarks),
        environment=Environment.capture(),
    )


def _check(step: Any, steps: Any, warm_up: Any) -> None:
    if not callable(step):
        raise TypeError(
            f"watch_growth needs the loop's body as a function, and got {type(step).__name__}: "
            "write watch_growth(step), not watch_growth(step())"
        )
    for name, value, least in (("steps", steps, MIN_STEPS), ("warm_up", warm_up, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r} is no whole number of steps but a {type(value).__name__}")
        if value < least:
            raise ValueError(
                f"{name}={value} is too few to tell: at least {least}"
                + (
                    f", for a leak has to show in each of {WINDOWS} parts of the run, two steps each"
                    if name == "steps"
                    else ""
                )
            )


def _run(step: Callable[[], Any]) -> None:
    result = step()
    if inspect.isgenerator(result) or inspect.iscoroutine(result):
        kind = type(result).__name__
        result.close()
        raise TypeError(
            f"step() returned a {kind} and ran none of its body: give a plain function that runs one step"
        )


def _look(census: Census, at: int) -> Count:
    """Wait for the device, collect, count."""
    import torch

    on_cuda = torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    # Only devices that memory was reserved on: to wait for another one would make a context there.
    devices = (
        [i for i in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(i)] if on_cuda else []
    )
    for index in devices:
        torch.cuda.synchronize(index)
    gc.collect()
    count = census.take(at)
    if on_cuda:
        allocated = sum(torch.cuda.memory_allocated(index) for index in devices)
        count = dataclasses.replace(count, device_bytes=allocated)
    return count


def _judge(census: Census, counts: list[Count]) -> dict[str, Trend]:
    tensors, nodes = census.objects()
    births = [census.mark(node, 0)[1] for node in census.walk(tensors, nodes, 0).values()]
    del tensors, nodes
    by_device: dict[str, list[int]] = defaultdict(list)
    for born in census.born.values():
        by_device["cpu" if born.device == "cpu" else "device"].append(born.step)
    found = {
        "cpu": _trend("host tensors", [c.host_bytes for c in counts], by_device["cpu"]),
        "nodes": _trend("graph nodes", [c.nodes for c in counts], births),
    }
    if any(count.device_bytes for count in counts):
        found["device"] = _trend("device memory", [c.device_bytes for c in counts], by_device["device"])
    return found


def _sizes_left_everywhere(census: Census, steps: int) -> set[tuple[str, int]]:
    """Give the devices and sizes of which every part of the run left a storage."""
    births: dict[tuple[str, int], list[int]] = defaultdict(list)
    for born in census.born.values():
        births[born.device, born.nbytes].append(born.step)
    return {size for size, steps_born in births.items() if in_every_window(steps_born, steps)}
