"""What a loop leaves behind, by cause: who holds it, and which line made it.

What is left of two traced steps is sorted by the line that made it; for each line the holder of an example is
looked for, in Python's objects or up the graph that saves it; and the holder's kind names the cause.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gpucourse.units import format_bytes

if TYPE_CHECKING:
    from gpucourse.holders import Link, Path
    from gpucourse.live_memory import Census, Made, Origins

__all__ = ["CAUSES", "TRACED_STEPS", "WINDOWS", "Search", "Suspect", "in_every_window", "windows"]

WINDOWS = 3  # parts of the run in each of which a leak has to show
TRACED_STEPS = (
    3  # with the lines noted; what the last of them leaves may be what every step leaves for a moment
)
MAX_GROUPS = 24  # kinds of survivors whose holder is looked for, the largest first

CAUSES: dict[str, tuple[str, str]] = {
    "running sum": (
        "a running sum keeps the graph of every step that it has added",
        "add loss.item() or loss.detach()",
    ),
    "carried graph": (
        "a value carried from step to step keeps the graph of every step before",
        "detach() it where the step ends",
    ),
    "retain_graph": (
        "backward(retain_graph=True) leaves the saved tensors in graphs whose outputs are kept",
        "leave retain_graph out, or keep outputs detached",
    ),
    "create_graph": (
        "backward(create_graph=True) leaves gradients that have graphs of their own",
        "use torch.autograd.grad, or set .grad to None before it is replaced",
    ),
    "outputs kept with their graph": (
        "outputs are kept, and each keeps the graph that made it",
        "keep output.detach().cpu() or a number",
    ),
    "forward hook": (
        "a hook stores what passes through a module",
        "remove the hook's handle, or clear what it fills",
    ),
    "custom Function": (
        "a custom Function keeps tensors on its ctx, where no backward pass frees them",
        "use ctx.save_for_backward, or let the output go",
    ),
    "exception": (
        "an exception is kept, its traceback keeps the frames and they their tensors",
        "keep str(error), or error.with_traceback(None)",
    ),
    "generator": ("a suspended generator is kept with its local variables", "exhaust it or close() it"),
    "closure": (
        "a function is kept with the tensors that it closes over",
        "give it numbers, or drop the function",
    ),
    "cache": ("a cache gets a new key each step", "bound its size, or use keys that come again"),
    "module attribute": ("a module's attribute collects tensors", "clear it each step, or keep numbers"),
    "kept tensors": (
        "tensors are kept",
        "keep numbers or a CPU copy of what is needed, or bound the container",
    ),
    "growing tensor": (
        "a tensor is made anew each step, larger than before",
        "collect on the host, or in parts",
    ),
    "unknown": (
        "nothing that Python or a graph shows holds it",
        "look for NumPy arrays made from it, or code in C++ that keeps tensors",
    ),
}
"""What can hold memory, by name: what happens, and what helps."""


def windows(steps: int) -> list[range]:
    """Cut steps 1 to n into parts as equal as can be."""
    edges = [round(steps * k / WINDOWS) for k in range(WINDOWS + 1)]
    return [range(low + 1, high + 1) for low, high in itertools.pairwise(edges)]


def in_every_window(births: Sequence[int], steps: int) -> bool:
    """Whether survivors are left from every part of the run, what the last step left aside."""
    return all(any(birth in part and birth < steps for birth in births) for part in windows(steps))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """What is retained for one reason and by one holder.

    Attributes
    ----------
    cause
        A key of `CAUSES`.
    holder
        Who holds it, from the tensor outwards, in words.
    host_bytes, device_bytes
        How much a step, in bytes.
    tensors, nodes
        How many storages and graph nodes a step.
    shapes
        dtype and shape of the largest storages.
    lines
        The lines of code that made them, the one that made most first.
    """

    cause: str
    holder: str
    host_bytes: float
    device_bytes: float
    tensors: float
    nodes: float
    shapes: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def bytes(self) -> float:
        """Host and device together, in bytes a step."""
        return self.host_bytes + self.device_bytes

    def __str__(self) -> str:
        amounts = [format_bytes(round(self.bytes, 1))] if self.bytes else []
        amounts += [f"{self.nodes:.3g} graph nodes"] if self.nodes else []
        line = f"; made at {self.lines[0]}" if self.lines else ""
        return (
            f"{' and '.join(amounts)} a step by {self.cause}: {CAUSES[self.cause][0]} ({self.holder}){line}. "
            f"What helps: {CAUSES[self.cause][1]}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Give the fields as plain data."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "shapes": list(self.shapes), "lines": list(self.lines)}


@dataclasses.dataclass(slots=True)
class _Group:
    """Survivors that one line made alike: sizes and examples."""

    line: str
    shape: str
    device: str
    steps: int  # that they were left by
    bytes: int = 0
    tensors: int = 0
    nodes: int = 0
    examples: list[int] = dataclasses.field(default_factory=list)


def _shape(made: Made) -> str:
    return f"{made.dtype.removeprefix('torch.')} {list(made.shape)}"


class Search:
    """Looks for who holds what the traced steps left.

    It keeps living objects in three containers, which its own search leaves aside, and everything else by number.
    """

    def __init__(
        self,
        census: Census,
        origins: Origins,
        step: Any,
        steps: int,
        every: set[tuple[str, int]],
        growing: frozenset[str],
    ) -> None:
        from gpucourse.holders import held_by_hooks, locals_of_running
        from gpucourse.live_memory import packed, saved_tensors, storages_of

        self.census, self.origins, self.steps = census, origins, steps
        self.every, self.growing = every, growing
        self.traced = range(steps + 1, steps + TRACED_STEPS)
        self.tensors, self.node_objects = census.objects()
        self.graph = census.walk(self.tensors, self.node_objects, steps + TRACED_STEPS)
        self.ends = frozenset({id(step)})
        self.ignore = frozenset({id(self.tensors), id(self.node_objects), id(self.graph)})
        self.running: dict[int, Link] = locals_of_running()
        self.hooks = held_by_hooks()
        self.paths: dict[int, Path | None] = {}
        self.climbed: dict[int, tuple[str, str] | None] = {}
        self.seen_by: dict[int, list[int]] = defaultdict(list)
        self.saved_by: dict[int, list[int]] = defaultdict(list)
        self.owners: dict[int, list[int]] = defaultdict(list)
        self.above: dict[int, list[int]] = defaultdict(list)
        self.hooked: dict[int, int] = {}
        self.number = {id(node): number for number, node in self.graph.items()}
        self.gradient_of: dict[int, int] = {}
        for at, tensor in enumerate(self.tensors):
            if tensor.is_leaf and tensor.grad is not None:
                self.gradient_of[id(tensor.grad)] = at
            for storage in storages_of(tensor):
                self.seen_by[storage._cdata].append(at)
            with contextlib.suppress(RuntimeError):
                if tensor.grad_fn is not None:
                    self.owners[census.mark(tensor.grad_fn, 0)[0]].append(at)
        for number, node in self.graph.items():
            for saved in saved_tensors(node):
                for storage in storages_of(saved):
                    self.saved_by[storage._cdata].append(number)
            for item in packed(node):
                self.hooked[id(item)] = number
            for child, _ in node.next_functions:
                if child is not None:
                    self.above[census.mark(child, 0)[0]].append(number)
        # What saved-tensor hooks packed is held by a graph, and a way that reaches it goes on there.
        self.ends |= set(self.hooked)
        self.held = self._held()

    def _held(self) -> set[int]:
        """Give the identities of tensors and nodes that something in Python holds, in one pass over all objects."""
        wanted = {id(tensor) for tensor in self.tensors} | set(self.number)
        held = {identity for identity in wanted if identity in self.running}
        objects = [item for item in gc.get_objects() if id(item) not in self.ignore]
        # Many objects a call: what each holds is of no interest here, and one by one takes three times as long.
        for at in range(0, len(objects), 4096):
            held.update(wanted.intersection(map(id, gc.get_referents(*objects[at : at + 4096]))))
        return held

    def suspects(self) -> tuple[Suspect, ...]:
        """Give what is retained, joined by cause and holder, the largest first."""
        found: dict[tuple[str, str], list[_Group]] = defaultdict(list)
        for group, explain in self._groups():
            cause, holder = explain(group)
            found[cause, holder].append(group)
        suspects = [self._suspect(cause, holder, groups) for (cause, holder), groups in found.items()]
        return tuple(sorted(suspects, key=lambda s: (-s.bytes, -s.nodes)))

    def _suspect(self, cause: str, holder: str, groups: list[_Group]) -> Suspect:
        groups = sorted(groups, key=lambda g: (-g.bytes, -g.nodes))
        return Suspect(
            cause=cause,
            holder=holder,
            host_bytes=sum(g.bytes / g.steps for g in groups if g.device == "cpu"),
            device_bytes=sum(g.bytes / g.steps for g in groups if g.device != "cpu"),
            tensors=sum(g.tensors / g.steps for g in groups),
            nodes=sum(g.nodes / g.steps for g in groups),
            shapes=tuple(dict.fromkeys(g.shape for g in groups if g.shape))[:3],
            lines=tuple(dict.fromkeys(g.line for g in groups if g.line))[:3],
        )

    def _groups(self) -> Iterator[tuple[_Group, Callable[[_Group], tuple[str, str]]]]:
        chosen = sorted(self._storage_groups(), key=lambda g: -g.bytes)
        yield from ((group, self._explain_storage) for group in chosen[:MAX_GROUPS])
        yield from ((group, self._explain_growing) for group in self._larger_each_step())
        yield from ((group, self._explain_growing) for group in self._larger_in_place())
        if "nodes" in self.growing:
            chosen = sorted(self._node_groups(), key=lambda g: -g.nodes)
            yield from ((group, self._explain_nodes) for group in chosen[:MAX_GROUPS])

    def _storage_groups(self) -> Iterator[_Group]:
        for kind in self.growing & {"cpu", "device"}:
            born = {
                c: b
                for c, b in self.census.born.items()
                if ("cpu" if b.device == "cpu" else "device") == kind
            }
            sizes = {size for size in self.every if (size[0] == "cpu") == (kind == "cpu")}
            # A leak that does not show in each step may have left nothing of the traced ones.
            for steps in (self.traced, range(1, self.steps)):
                left = {
                    cdata: one
                    for cdata, one in born.items()
                    if one.step in steps and (not sizes or (one.device, one.nbytes) in sizes)
                }
                if left:
                    break
            groups: dict[tuple[str, str], _Group] = {}
            for cdata, one in left.items():
                made = self.origins.made.get(cdata)
                line = str(made.site) if made and made.site else ""
                shape = _shape(made) if made else ""
                group = groups.setdefault((line, shape), _Group(line, shape, kind, len(steps)))
                group.bytes += one.nbytes
                group.tensors += 1
                group.examples.append(cdata)
            yield from groups.values()

    def _node_groups(self) -> Iterator[_Group]:
        born = {number: self.census.mark(node, 0)[1] for number, node in self.graph.items()}
        steps = self.traced if set(born.values()) & set(self.traced) else range(1, self.steps)
        groups: dict[str, _Group] = {}
        for number, node in self.graph.items():
            if born[number] in steps:
                site = self.origins.node_site(node)
                line = str(site) if site else ""
                group = groups.setdefault(line, _Group(line, "", "cpu", len(steps)))
                group.nodes += 1
                group.examples.append(number)
        yield from groups.values()

    def _larger_each_step(self) -> list[_Group]:
        """Find lines that make one tensor a step, larger each time, of which the last lives."""
        by_line: dict[tuple[str, str], list[Any]] = defaultdict(list)
        for cdata, made in self.origins.made.items():
            if made.site:
                by_line[str(made.site), made.dtype].append((made.step, made.nbytes, cdata, made))
        found = []
        for (line, _), all_made in by_line.items():
            most: dict[int, int] = {}
            for at, nbytes, *_ in all_made:
                most[at] = max(nbytes, most.get(at, 0))
            sizes = [most[step] for step in sorted(most)]
            step, _, cdata, made = max(all_made, key=lambda entry: entry[:2])
            if len(sizes) < TRACED_STEPS or any(b <= a for a, b in itertools.pairwise(sizes)):
                continue
            born = self.census.born.get(cdata)
            if born is None or born.step != step:
                continue
            device = "cpu" if born.device == "cpu" else "device"
            if device not in self.growing:
                continue
            grown = (sizes[-1] - sizes[0]) // (len(sizes) - 1)
            found.append(_Group(line, _shape(made), device, 1, bytes=grown, tensors=1, examples=[cdata]))
        return found

    def _larger_in_place(self) -> Iterator[_Group]:
        """Find storages that were made larger where they are (`resize_`)."""
        for cdata, born in self.census.born.items():
            device = "cpu" if born.device == "cpu" else "device"
            steps = self.steps + TRACED_STEPS - born.step
            if device in self.growing and born.nbytes > born.nbytes_first and steps > 0:
                grown = born.nbytes - born.nbytes_first
                yield _Group("", "", device, steps, bytes=grown, tensors=1, examples=[cdata])

    # ------------------------------------------------------------------------------------------------- explain

    def _explain_storage(self, group: _Group) -> tuple[str, str]:
        for cdata in (group.examples[0], group.examples[-1]):
            found = self._of_storage(cdata)
            if found:
                return found
        return "unknown", "no holder found"

    def _explain_growing(self, group: _Group) -> tuple[str, str]:
        found = self._of_storage(group.examples[0])
        return "growing tensor", found[1] if found else "no holder found"

    def _explain_nodes(self, group: _Group) -> tuple[str, str]:
        for number in (group.examples[0], group.examples[-1]):
            found = self._climb(number)
            if found:
                return found
        return "unknown", "no holder found"

    def _of_storage(self, cdata: int) -> tuple[str, str] | None:
        loose: tuple[Any, Path] | None = None
        for at in self.seen_by[cdata]:
            tensor = self.tensors[at]
            path = self._path(tensor)
            if path is None:
                continue
            context = path.has("context")
            if context is not None and not path.rooted:
                above = self._climb(self.number.get(context.holder, 0))
                kept = f", in the graph of {above[1]}" if above else ""
                return "custom Function", context.words + kept
            last = path.links[-1].holder if path.links else 0
            if last in self.hooked:
                found = self._climb(self.hooked[last])
                if found:
                    return found
            if path.rooted:
                cause = self._cause(tensor, path)
                return cause, self._holder(cause, path)
            loose = loose or (tensor, path)
        for number in self.saved_by[cdata]:
            found = self._climb(number)
            if found:
                return found
        if loose is not None and any(link.name for link in loose[1].links):
            cause = self._cause(*loose)
            return cause, self._holder(cause, loose[1])
        return None

    def _climb(self, number: int) -> tuple[str, str] | None:
        """Go from a node up through the graph to what Python holds."""
        if number in self.climbed:
            return self.climbed[number]
        found = None
        waiting, seen = [number], {number}
        while waiting and found is None:
            current = waiting.pop(0)
            for item in [*(self.tensors[at] for at in self.owners.get(current, ())), self.graph.get(current)]:
                path = self._path(item) if item is not None else None
                if path is not None and path.rooted:
                    cause = self._graph_cause(item, path)
                    found = (cause, self._holder(cause, path))
                    break
            for above in self.above.get(current, ()):
                if above not in seen:
                    seen.add(above)
                    waiting.append(above)
        self.climbed[number] = found
        return found

    def _path(self, item: Any) -> Path | None:
        from gpucourse.holders import Link, Path, find_path

        owner = self.gradient_of.get(id(item))
        if owner is not None:
            path = self._path(self.tensors[owner])
            held = Link(kind="gradient", name="grad", words="the gradient `.grad` of a parameter", holder=0)
            return Path(links=(held, *(path.links if path else ())), rooted=True)
        if id(item) not in self.held:
            return None
        if id(item) not in self.paths:
            self.paths[id(item)] = find_path(item, self.running, self.ends, self.ignore)
        return self.paths[id(item)]

    def _graph_cause(self, item: Any, path: Path) -> str:
        """Name the cause where a tensor, or a node, keeps a graph."""
        import torch

        cause = self._special(path)
        if cause:
            return cause
        if path.has("gradient"):  # nothing else gives a gradient a graph
            return "create_graph"
        node = item.grad_fn if issubclass(type(item), torch.Tensor) else item
        below = self._below(node)
        if in_every_window([self.census.mark(n, 0)[1] for n in below], self.steps):
            return "running sum" if node.name().startswith(("Add", "Sub")) else "carried graph"
        told = {self.origins.kept_by_backward(n) for n in (node, *below)} - {""}
        if told:
            return max(told)
        general = self._general(path)
        return "outputs kept with their graph" if general == "kept tensors" else general

    def _below(self, node: Any) -> list[Any]:
        return list(self.census.walk((), [node], 0).values())

    def _cause(self, tensor: Any, path: Path) -> str:
        if tensor.grad_fn is not None:
            return self._graph_cause(tensor, path)
        return self._special(path) or self._general(path)

    def _special(self, path: Path) -> str:
        if path.has("context"):
            return "custom Function"
        if path.has("traceback", "exception"):
            return "exception"
        if path.has("generator"):
            return "generator"
        if any(link.holder in self.hooks for link in path.links):
            return "forward hook"
        return ""

    def _holder(self, cause: str, path: Path) -> str:
        if cause != "forward hook":
            return path.words
        at = next(at for at, link in enumerate(path.links) if link.holder in self.hooks)
        named = next((n for n in range(at, len(path.links)) if path.links[n].name), at)
        shown = dataclasses.replace(path, links=path.links[: named + 1])
        return f"{shown.words}, filled by {self.hooks[path.links[at].holder]}"

    def _general(self, path: Path) -> str:
        if path.has("closure", "default") and path.has("sequence", "mapping"):
            inner = [link.kind for link in path.links]
            kept = next((k for k in inner if k in ("closure", "default", "sequence", "mapping")), "")
            if kept in ("closure", "default"):
                return "closure"
        if path.has("cache"):
            return "cache"
        if path.has("module attribute"):
            return "module attribute"
        if path.links and path.links[0].kind == "mapping":
            return "cache"
        return "kept tensors"
