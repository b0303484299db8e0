"""What an allocator's recorded history says of training steps: what each block was for, and what lived at the peak.

Between the phases of a step somebody noted, with the allocator's own counters, where they began and at which
addresses parameters, gradients and the like lay (`Seen`). A block that the forward pass made and that still lives
when the backward pass begins is an activation; one that a checkpoint's second forward pass made is recomputed (its
stack shows it; casts made there count with it); what clearing cuBLAS's workspaces frees is a workspace; the rest is
temporary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from gpucourse.allocator_history import AllocatorHistory, Block, HistoryError
from gpucourse.storage_trace import Role, StorageTrace

__all__ = ["MeasuredPeak", "RecordedSteps", "Seen"]

# Where a block is two things, the one further left names it; as in a prediction.
_ORDER: tuple[Role, ...] = (
    "parameters",
    "buffers",
    "inputs",
    "optimizer",
    "gradients",
    "workspaces",
    "casts",
    "activations",
    "recomputed",
    "temporaries",
)


@dataclasses.dataclass(slots=True)
class Seen:
    """What was noted while the steps ran, each with how many allocations and frees there had been.

    Attributes
    ----------
    segments, base
        The device's segments when it began, and the allocator's two counters then.
    marks
        (name, allocations, frees): a phase that begins.
    addresses
        (allocations, frees, address, role).
    """

    segments: list[Mapping[str, Any]]
    base: tuple[int, int]
    marks: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    addresses: list[tuple[int, int, int, Role]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPeak:
    """The instant of a step at which most was allocated.

    Attributes
    ----------
    step
        From 1.
    phase
        "forward", "backward" or "optimizer".
    code
        The line of Python that allocated last, as "file:line in function"; empty where the backward pass did, which
        runs no Python.
    allocated_bytes
        ``torch.cuda.max_memory_allocated()`` of the step, less what others held on the device before.
    lines
        Bytes by role as asked for, and "rounding", what the allocator handed out beyond; "unexplained" is there
        only where the history disagrees with the allocator's own count. Their sum is `allocated_bytes`.
    """

    step: int
    phase: str
    code: str
    allocated_bytes: int
    lines: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Give the peak as plain data."""
        return {**dataclasses.asdict(self), "lines": dict(self.lines)}


class RecordedSteps:
    """Steps as the allocator's history has them.

    Parameters
    ----------
    seen
        What was noted meanwhile: "N forward", "leaving" (autocast's context is about to be left), "left",
        "N backward" for each microbatch, "N optimizer"; "over" after the last step, "workspaces" and "end" around
        clearing these.
    trace
        The device's events, which may begin before those that were noted.

    Attributes
    ----------
    history
        The blocks and events.
    roles
        What each block was for.

    Raises
    ------
    HistoryError
        The events are fewer than the allocator counted.
    """

    def __init__(self, seen: Seen, trace: Sequence[Mapping[str, Any]]) -> None:
        self.history = AllocatorHistory(seen.segments, _own_events(trace, seen))
        marks = [(name, self._position(seen, a, f)) for name, a, f in seen.marks]
        self.roles = _roles(
            self.history, marks, [(self._position(seen, a, f), at, role) for a, f, at, role in seen.addresses]
        )
        self._phases = [(at, *_phase(name)) for name, at in marks if name[0].isdigit()]
        self._end = next(at for name, at in marks if name == "over")

    def _position(self, seen: Seen, allocated: int, freed: int) -> int:
        return self.history.position(allocated - seen.base[0], freed - seen.base[1])

    def peaks(self, reported: Sequence[int], other_bytes: int = 0) -> list[MeasuredPeak]:
        """Find the instant of each step at which most was allocated, and what lived then.

        Parameters
        ----------
        reported
            ``torch.cuda.max_memory_allocated()`` of each step.
        other_bytes
            What of it was there before.
        """
        sizes = [0] * self.history.before + [
            block.block_bytes for block in self.history.blocks[self.history.before :]
        ]
        highest: dict[int, tuple[int, str, int]] = {}  # step: allocated, phase, the event before that instant
        total = step = waiting = 0
        phase = ""
        for at, event in enumerate(self.history.events[: self._end]):
            while waiting < len(self._phases) and self._phases[waiting][0] <= at:
                _, step, phase = self._phases[waiting]
                waiting += 1
                if step not in highest:  # a step's peak may be what it found
                    highest[step] = (total, phase, at - 1)
            total += sizes[event] if event >= 0 else -sizes[-1 - event]
            if step and total > highest[step][0]:
                highest[step] = (total, phase, at)
        found = []
        for step, most in enumerate(reported, start=1):
            replayed, phase, at = highest[step]
            lines: dict[str, int] = {str(role): 0 for role in get_args(Role)}
            for number in _live_after(self.history, at):
                lines[self.roles[number]] += self.history.blocks[number].requested_bytes
            lines["rounding"] = replayed - sum(lines.values())
            if most - other_bytes != replayed:
                lines["unexplained"] = most - other_bytes - replayed
            event = self.history.events[at] if at >= 0 else -1
            found.append(
                MeasuredPeak(
                    step=step,
                    phase=phase,
                    code=_code(self.history.blocks[event].frames) if event >= 0 else "",
                    allocated_bytes=most - other_bytes,
                    lines=lines,
                )
            )
        return found

    def storage_trace(self) -> StorageTrace:
        """Write the history as a prediction's trace is written, without what was there before."""
        history, start = self.history, self._phases[0][0]
        gone = {-1 - event for event in history.events[:start] if event < 0}
        gone.update(range(history.before))
        # What came and went before the first step, such as a compiler's trials, is none of the steps'.
        kept = [number for number in range(len(history.blocks)) if number not in gone]
        new = {number: place for place, number in enumerate(kept)}
        trace = StorageTrace(
            sizes=[history.blocks[number].requested_bytes for number in kept],
            roles=[self.roles[number] for number in kept],
        )
        phase_at = 0
        for at, event in enumerate(history.events[: self._end]):
            while phase_at < len(self._phases) and self._phases[phase_at][0] <= at:
                _, step, phase = self._phases[phase_at]
                trace.marks.append((len(trace.events), step, phase, ""))
                phase_at += 1
            place = new.get(event if event >= 0 else -1 - event)
            if place is not None:
                trace.events.append(place if event >= 0 else -1 - place)
        return trace


def _own_events(trace: Sequence[Mapping[str, Any]], seen: Seen) -> Sequence[Mapping[str, Any]]:
    """Leave out what a history that was on already holds from before.

    The last mark says how many allocations and frees there were since; what else happened before the first of
    them belongs to it, if it is a new segment.
    """
    _, allocated, freed = seen.marks[-1]
    wanted = (allocated - seen.base[0]) + (freed - seen.base[1])
    counted = [k for k, event in enumerate(trace) if event["action"] in ("alloc", "free_requested")]
    if len(counted) < wanted:
        raise HistoryError(
            f"the allocator's history holds {len(counted)} allocations and frees, and the steps had {wanted}: a "
            "history that is already being recorded is too short or holds no events. Switch it off "
            "(torch.cuda.memory._record_memory_history(None)), and measure again"
        )
    if len(counted) == wanted:
        return trace
    return trace[counted[-wanted - 1] + 1 :] if wanted else trace[len(trace) :]


def _phase(name: str) -> tuple[int, str]:
    number, _, phase = name.partition(" ")
    return int(number), phase


def _roles(
    history: AllocatorHistory, marks: Sequence[tuple[str, int]], addresses: Sequence[tuple[int, int, Role]]
) -> list[Role]:
    """Say what each block was for."""
    rank = {role: k for k, role in enumerate(_ORDER)}
    roles: list[Role] = ["temporaries"] * len(history.blocks)

    def better(number: int, role: Role) -> None:
        if rank[role] < rank[roles[number]]:
            roles[number] = role

    bounds = {name: at for name, at in marks if name in ("workspaces", "end")}
    for event in history.events[bounds["workspaces"] : bounds["end"]]:
        if event < 0:  # what clearing the workspaces freed
            better(-1 - event, "workspaces")
    kept_apart = set()  # the loss itself is live between the passes and no activation
    places = history.numbers_at((at, address) for at, address, _ in addresses)
    for number, (_, _, role) in zip(places, addresses, strict=True):
        if number is None:
            continue
        if role == "temporaries":
            kept_apart.add(number)
        else:
            better(number, role)
    for place, (name, at) in enumerate(marks):
        following = marks[place + 1][1] if place + 1 < len(marks) else len(history.events)
        if name.endswith("forward"):
            # What the forward pass made and what is still there when the backward pass begins.
            backward = next(p for n, p in marks[place:] if n.endswith("backward"))
            made = [e for e in history.events[at:backward] if e >= 0]
            freed = {-1 - e for e in history.events[at:backward] if e < 0}
            for number in made:
                if number not in freed and number not in kept_apart:
                    better(number, "activations")
        elif name == "leaving":
            for event in history.events[at:following]:
                if event < 0:  # autocast's cache of casts ends with its context
                    better(-1 - event, "casts")
        elif name.endswith("backward"):
            for event in history.events[at:following]:
                if event >= 0 and _in_checkpoint(history.blocks[event]):
                    better(event, "recomputed")
    return roles


def _in_checkpoint(block: Block) -> bool:
    return any(
        str(f["filename"]).replace("\\", "/").endswith("torch/utils/checkpoint.py") for f in block.frames
    )


def _live_after(history: AllocatorHistory, at: int) -> set[int]:
    """List the blocks that live right after an event, without those that were there before all events."""
    live: set[int] = set()
    for event in history.events[: at + 1]:
        if event >= history.before:
            live.add(event)
        else:
            live.discard(-1 - event)
    return live


def _code(frames: Sequence[Mapping[str, Any]]) -> str:
    """Name the innermost line of the reader's; where there is none, torch's own that allocated."""
    own = ("gpucourse/memory_measurement.py", "gpucourse/measured_run.py")
    for frame in frames:
        name = str(frame["filename"]).replace("\\", "/")
        if name.endswith(own):  # what called the measurement is none of the step's
            break
        if "/torch/" not in name and not name.startswith("<"):
            return f"{name.rpartition('/')[2]}:{frame['line']} in {frame['name']}"
    if frames:
        frame = frames[0]
        name = str(frame["filename"]).replace("\\", "/")
        return f"{name.rpartition('/')[2]}:{frame['line']} in {frame['name']}"
    return ""
