"""The kernels of one call as they ran: span, busy time, and the idle times with their causes."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from gpucourse import html
from gpucourse.environment import Environment
from gpucourse.files import write_whole
from gpucourse.fusion import Candidate, fuse_candidates
from gpucourse.perfetto import perfetto
from gpucourse.trace_facts import Gap, Kernel, Wait, merge_intervals, shapes_text, short_name
from gpucourse.work import is_finite_number, short

__all__ = [
    "GAP_CAUSES",
    "KernelTrace",
]


GAP_CAUSES = ("host", "synchronization", "copy", "queue")

_TO_OR_FROM_HOST = re.compile(r"DtoH|HtoD")
# CUPTI puts the device's stamps on the host's clock; the two agree to about a microsecond.
_SKEW_US = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelTrace:
    """What the device ran for one call, in order of start.

    Attributes
    ----------
    kernels
        Kernels, copies and fills.
    launches
        How many launches the host made in the call; a CUDA graph is one.
    missing
        How many of those launches have no record on the device: above 0 the trace is incomplete.
    environment
        The machine.
    waits
        The calls in which the host waited, in order of start.
    graphs
        How many of the launches were CUDA graphs. How many kernels a graph holds is not in the record, so its launch
        counts as recorded when at least one kernel of it is.
    unrecorded
        The runtime's functions that made the launches without a record, in order; empty in data that did not keep it.
    """

    kernels: tuple[Kernel, ...]
    launches: int
    missing: int
    environment: Environment
    waits: tuple[Wait, ...] = ()
    graphs: int = 0
    unrecorded: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], environment: Environment | None = None) -> KernelTrace:
        """Take up a trace from the plain data that `as_dict` gave, such as a recording's.

        Parameters
        ----------
        data
            The plain data, such as ``load("block_step").data["trace"]`` of `gpucourse.recording`: the trace itself,
            not the recording around it. What an older version did not keep (dtypes, calls, waits) is then empty;
            without waits no gap can be a synchronization's or a copy's.
        environment
            The machine, which stands in a recording's provenance and not in the data.

        Raises
        ------
        TypeError, ValueError
            The data is no trace, or a field of it is missing, unknown or no fit value.
        """
        if not isinstance(data, Mapping) or "kernels" not in data:
            found = f"keys {sorted(map(str, data))[:6]}" if isinstance(data, Mapping) else type(data).__name__
            raise TypeError(
                f"a trace as KernelTrace.as_dict gives it has 'kernels', found {found}: pass the trace itself, "
                "not the recording around it"
            )
        kernels = _each(Kernel, data["kernels"], "kernels")
        starts = [kernel.start_us for kernel in kernels]
        if starts != sorted(starts):
            raise ValueError(
                "kernels stand in order of start_us, found them unsorted: they were changed by hand"
            )
        launches, missing, graphs = (
            _whole(data.get(name, default), name)
            for name, default in (("launches", None), ("missing", None), ("graphs", 0))
        )
        if missing > launches or graphs > launches:
            raise ValueError(
                f"missing and graphs are at most the launches, found {missing} and {graphs} of {launches}"
            )
        return cls(
            kernels=kernels,
            launches=launches,
            missing=missing,
            environment=environment or Environment(),
            waits=_each(Wait, data.get("waits", ()), "waits"),
            graphs=graphs,
            unrecorded=_fit("dtypes", data.get("unrecorded", ()), "unrecorded"),
        )

    @property
    def complete(self) -> bool:
        """Whether every launch has its record on the device (a CUDA graph's: at least one)."""
        return self.missing == 0

    def _busy(self) -> list[tuple[float, float]]:
        return merge_intervals((kernel.start_us, kernel.end_us) for kernel in self.kernels)

    @property
    def span_us(self) -> float:
        """From the first start to the last end, in µs (0 where nothing ran)."""
        return max((kernel.end_us for kernel in self.kernels), default=0.0)

    @property
    def busy_us(self) -> float:
        """Time in which at least one kernel ran, in µs: a union over streams, never a sum."""
        return sum(end - start for start, end in self._busy())

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """The idle times between busy stretches, in order, each with its cause."""
        found: list[Gap] = []
        last: int | None = None  # the work with the furthest end so far
        for index, kernel in enumerate(self.kernels):
            if last is not None and kernel.start_us > self.kernels[last].end_us:
                begin = self.kernels[last].end_us
                found.append(
                    Gap(
                        start_us=begin,
                        duration_us=kernel.start_us - begin,
                        cause=self._cause(self.kernels[last], kernel),
                        before=last,
                        after=index,
                    )
                )
            if last is None or kernel.end_us > self.kernels[last].end_us:
                last = index
        return tuple(found)

    def _cause(self, before: Kernel, after: Kernel) -> str:
        dry, launch = before.end_us, after.launch_us
        if launch is None:
            return "unknown"
        for wait in self.waits:
            over = wait.end_us <= launch
            # Small copies end about when the wait for them begins, so a wait behind a copy need not span its end.
            copied = _TO_OR_FROM_HOST.search(before.name) and (before.launch_us or dry) <= wait.start_us
            if copied and over and dry <= wait.end_us + _SKEW_US:
                return "copy"
            if not wait.start_us - _SKEW_US <= dry <= wait.end_us + _SKEW_US:
                continue
            # A copy's own call launches it: what came next may be the copy that the host stood in.
            if wait.copies and wait.start_us <= launch:
                return "copy"
            if over:
                return "synchronization"
        return "host" if launch > dry else "queue"

    @property
    def gaps_us(self) -> list[float]:
        """The idle times between busy stretches, in µs, in order."""
        return [gap.duration_us for gap in self.gaps]

    def idle_us(self) -> dict[str, float]:
        """Sum the gaps by cause, in µs; every cause in `GAP_CAUSES` has its entry."""
        sums = dict.fromkeys(GAP_CAUSES, 0.0)
        for gap in self.gaps:
            sums[gap.cause] = sums.get(gap.cause, 0.0) + gap.duration_us
        return sums

    @property
    def launch_bound(self) -> bool:
        """Whether the device waits for a late host for more than half of the span.

        Waits for a synchronization or a copy do not count: fewer launches would not shorten them. The profiler slows
        every launch, so a call near the limit is better judged without it (`cuda_events.Timing.launch_bound`).
        """
        return self.idle_us()["host"] > 0.5 * self.span_us

    def fuse_candidates(self) -> tuple[Candidate, ...]:
        """Find runs of neighbours that one kernel could replace.

        A run is two calls or more that follow each other on one stream, element-wise operations over the same number
        of elements, perhaps with one reduction or norm over as many at its start or its end. It never reaches across a
        product, any other operation, a copy to or from the host, a wait, or a kernel that a compiler generated (the
        compiler saw the graph and chose where to stop).

        A candidate is judged by shape and order. Whether one operation really takes the other's result, and whether
        anything else needs that result, is not in a trace: read the code before you believe `bytes_saved`.
        """
        waited = {
            gap.after for gap in self.gaps if gap.cause in ("synchronization", "copy")
        }  # work that came after the host had waited
        return fuse_candidates(self.kernels, waited)

    def perfetto(self) -> dict[str, Any]:
        """Give the trace in Chrome's trace format, which https://ui.perfetto.dev and ``chrome://tracing`` open.

        The host has a lane a thread with its launches and waits, the device a lane a stream with its work and one
        with the gaps by cause; an arrow leads from each launch to what it launched. Times are in µs, moved so that
        none is negative. A launch whose duration is unknown is drawn 1 µs long.
        """
        return perfetto(self.kernels, self.waits, self.gaps, self.environment.gpu)

    def write_perfetto(self, path: str | Path) -> Path:
        """Write `perfetto` as JSON to a file and give its path; open it at https://ui.perfetto.dev.

        Raises
        ------
        OSError
            The file cannot be written; one that was there before is whole.
        """
        return write_whole(Path(path), json.dumps(self.perfetto()))

    def as_dict(self) -> dict[str, Any]:
        """Give kernels, waits, gaps and sums as plain data; the machine stands in the provenance."""
        return {
            "span_us": self.span_us,
            "busy_us": self.busy_us,
            "launches": self.launches,
            "missing": self.missing,
            "complete": self.complete,
            "graphs": self.graphs,
            "unrecorded": list(self.unrecorded),
            "kernels": [dataclasses.asdict(kernel) for kernel in self.kernels],
            "waits": [dataclasses.asdict(wait) for wait in self.waits],
            "gaps": [gap.as_dict() for gap in self.gaps],
        }

    def __str__(self) -> str:
        lines = [
            f"{kernel.start_us:9.1f} µs {kernel.duration_us:8.1f} µs  {kernel.op:27} {short_name(kernel.name)}"
            for kernel in self.kernels
        ]
        return "\n".join([*lines, self._sums()])

    def _sums(self) -> str:
        share = f" ({self.busy_us / self.span_us:.0%})" if self.span_us else ""
        parts = [f"{len(self.kernels)} kernels, busy {self.busy_us:.1f} of {self.span_us:.1f} µs{share}"]
        idle = [f"{cause} {time:.1f} µs" for cause, time in self.idle_us().items() if time]
        if idle:
            parts.append(f"idle by cause: {', '.join(idle)}")
        if self.launches and self.missing == self.launches:
            parts.append(
                f"NOTHING RECORDED of {self.launches} launches: the profiler heard the host, not the device"
            )
        elif not self.complete:
            lost = Counter(self.unrecorded)
            names = f" ({', '.join(f'{name} × {times}' for name, times in lost.items())})" if lost else ""
            parts.append(
                f"INCOMPLETE: the profiler dropped {self.missing} of {self.launches} launches{names}"
            )
        if self.graphs:
            which = "is a CUDA graph" if self.graphs == 1 else "are CUDA graphs"
            parts.append(
                f"{self.graphs} of {self.launches} launches {which}, whose number of kernels cannot be checked"
            )
        parts.append(
            self.environment.line() if self.environment.gpu else "the data does not name its machine"
        )
        return "; ".join(parts)

    def _repr_html_(self) -> str:
        rows = [
            (
                index + 1,
                kernel.op,
                shapes_text(kernel),
                short_name(kernel.name),
                f"{kernel.start_us:.1f}",
                f"{kernel.duration_us:.1f}",
            )
            for index, kernel in enumerate(self.kernels)
        ]
        header = ("#", "Operation", "Shapes", "Kernel", "Start, µs", "Duration, µs")
        return f"{html.table(header, rows)}<p class='provenance'>{html.escape(self._sums())}</p>"


def _each(kind: type[Any], rows: object, what: str) -> tuple[Any, ...]:
    """Make the facts of one kind from a list of dicts, and say which entry does not fit."""
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise TypeError(f"{what} are a list, found {type(rows).__name__}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    made = []
    for place, row in enumerate(rows):
        where = f"{what}[{place}]"
        if not isinstance(row, Mapping):
            raise TypeError(f"{where} is a dict of fields, found {type(row).__name__}")
        lacking = [n for n, f in fields.items() if n not in row and f.default is dataclasses.MISSING]
        unknown = sorted(set(map(str, row)) - fields.keys())
        if lacking or unknown:
            said = (
                f"lacks {', '.join(lacking)}" if lacking else f"has the unknown fields {', '.join(unknown)}"
            )
            raise ValueError(f"{where} {said}: it is no {kind.__name__} of this version of gpucourse")
        made.append(
            kind(**{name: _fit(name, row[name], f"{where}.{name}") for name in fields if name in row})
        )
        if kind is Kernel and made[-1].dtypes and len(made[-1].dtypes) != len(made[-1].shapes):
            raise ValueError(
                f"{where} has {len(made[-1].shapes)} shapes and {len(made[-1].dtypes)} dtypes: one for each is wanted"
            )
    return tuple(made)


def _fit(name: str, value: object, where: str) -> Any:
    """Check one field of plain data and give it the type that the facts have."""
    if name in ("name", "op"):
        if not isinstance(value, str):
            raise TypeError(f"{where} is text, found {value!r}")
        return value
    if name in ("shapes", "grid", "block", "dtypes"):
        if value is None and name in ("grid", "block"):
            return None
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise TypeError(f"{where} is a list, found {value!r}")
        if name == "shapes":
            return tuple(tuple(_whole(size, where) for size in shape) for shape in value)
        if name == "dtypes":
            return tuple(_fit("name", dtype, where) for dtype in value)
        return tuple(_whole(size, where) for size in value)
    if name in ("start_us", "duration_us"):
        return _time(value, where, least=0.0 if name == "duration_us" else -math.inf)
    if name in ("launch_us", "launch_duration_us"):
        return None if value is None else _time(value, where)
    return None if value is None and name != "stream" else _whole(value, where)


def _time(value: object, where: str, least: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not is_finite_number(value) or value < least:
        wanted = "a finite number of µs" if least == -math.inf else f"a number of µs from {least:g}"
        raise ValueError(f"{where} is {wanted}, found {short(value)}")
    return float(value)


def _whole(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise ValueError(f"{where} is a whole number from 0, found {short(value)}")
    return int(value)
