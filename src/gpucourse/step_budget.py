"""A step's time, call by call: the least that each call could take on this roof, beside what it took.

The least time of a call is max(flops / P, bytes / B). Summed over a step's calls and set beside the measured
span, it says how much of the span the roof explains, and which calls the rest is in. Nothing is clamped: a call
whose bytes came from the L2 may take less than its least, and its loss is then negative.

>>> kernel = dict(name="gemm", op="aten::mm", shapes=[[512, 512], [512, 512]], dtypes=["float32"] * 2, call=0)
>>> trace = {"kernels": [dict(kernel, start_us=0.0, duration_us=8.0)]}
>>> budget = step_budget(trace, Roofline(peak_flops=67e12, bandwidth=4.8e12))
>>> print(budget)
step of 8.0 µs: roof 4.0 µs (50.1 %), beyond the roof's time 4.0 µs, without a count 0.0 µs, idle 0.0 µs; 1 call
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from gpucourse import html
from gpucourse import plain_data as given
from gpucourse.bound import Bound, Roofline
from gpucourse.call_work import Family, Missing, family_of, work_of_call
from gpucourse.hardware import PRECISION_OF_DTYPE
from gpucourse.kernels import KernelTrace, merge_intervals
from gpucourse.measured_roof import MeasuredRoofline
from gpucourse.work import Work, short

__all__ = ["BudgetRow", "StepBudget", "TracedCall", "step_budget", "traced_calls"]

_PRECISIONS = {**PRECISION_OF_DTYPE, "float64": "fp64"}
_KEPT_SHAPES = 8  # of a row in plain data; an optimizer's lists hold hundreds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRow:
    """All calls of one operation on one set of shapes and types.

    Attributes
    ----------
    op
        The innermost operation around the launches; the kernel's name where there is none.
    family
        What kind of operation.
    shapes, dtypes
        Of its tensor arguments.
    calls, kernels
        How many calls, and how many kernels they launched together.
    flops, bytes
        Work of all calls together; None where there is no count.
    reason
        Why there is no count; "" where there is one.
    convention
        How it was counted; "" where it was not.
    precision
        Whose ceiling the arithmetic is held against; "" where there is no count.
    bound
        Which ceiling sets the least time; None where there is none.
    least_us
        Least time of all calls together on this roof, in µs; None where there is none.
    measured_us
        Time in which at least one of its kernels ran, call by call, in µs.
    alone_us
        Time of as many such calls measured alone, on the best layout, in µs; None where that was not done.
    in_l2
        Whether the bytes of one call fit the L2, so that they need not travel.
    """

    op: str
    family: Family
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    calls: int
    kernels: int
    flops: float | None
    bytes: float | None
    reason: str
    convention: str
    precision: str
    bound: Bound | None
    least_us: float | None
    measured_us: float
    alone_us: float | None = None
    in_l2: bool = False

    @property
    def loss_us(self) -> float:
        """What it took beyond its least time, in µs; all of its time where there is no count."""
        return self.measured_us - (self.least_us or 0.0)

    @property
    def expected_us(self) -> float | None:
        """Its time measured alone where there is one, else its least time; None where there is neither."""
        return self.least_us if self.alone_us is None else self.alone_us

    @property
    def reached_us(self) -> float | None:
        """The least that such calls were seen to take, alone or in the step; the least time where none ran alone.

        A call that ran faster in the step than alone was not timed fairly alone: another kernel was chosen, or
        its launch took longer than its work.
        """
        return self.least_us if self.alone_us is None else min(self.alone_us, self.measured_us)

    def shapes_text(self) -> str:
        """Write the shapes in a table's cell, a long list cut."""
        texts = ["×".join(map(str, shape)) for shape in self.shapes[:4]]
        more = len(self.shapes) - 4
        return ", ".join([*texts, f"and {more} more"] if more > 0 else texts)

    def as_dict(self) -> dict[str, Any]:
        """Plain data; of more than eight shapes the first eight, and how many there are."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        data["tensors"] = len(self.shapes)
        data["shapes"] = [list(shape) for shape in self.shapes[:_KEPT_SHAPES]]
        data["dtypes"] = list(self.dtypes[:_KEPT_SHAPES])
        data["loss_us"] = self.loss_us
        return data


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """A step, explained as far as the roof explains it.

    These add up: ``least_us + beyond_us + uncounted_us + gap_us = span_us + overlap_us``.

    Attributes
    ----------
    rows
        One an operation, shapes and types, the largest loss first.
    span_us
        From the first kernel's start to the last one's end, in µs.
    busy_us
        Time in which at least one kernel ran, in µs.
    remarks
        What to know before believing the shares, such as that one roof judged every precision.
    """

    rows: tuple[BudgetRow, ...]
    span_us: float
    busy_us: float
    remarks: tuple[str, ...] = ()

    @property
    def calls(self) -> int:
        """How many calls the step's kernels come from."""
        return sum(row.calls for row in self.rows)

    @property
    def least_us(self) -> float:
        """Sum of the least times of all calls that could be counted, in µs."""
        return math.fsum(row.least_us for row in self.rows if row.least_us is not None)

    @property
    def measured_us(self) -> float:
        """Sum over calls of the time in which their kernels ran, in µs; above `busy_us` where calls overlap."""
        return math.fsum(row.measured_us for row in self.rows)

    @property
    def beyond_us(self) -> float:
        """What the counted calls took beyond their least times, in µs."""
        return math.fsum(row.loss_us for row in self.rows if row.least_us is not None)

    @property
    def uncounted_us(self) -> float:
        """What the calls without a count took, in µs."""
        return math.fsum(row.measured_us for row in self.rows if row.least_us is None)

    @property
    def gap_us(self) -> float:
        """Idle time between the kernels, in µs."""
        return self.span_us - self.busy_us

    @property
    def overlap_us(self) -> float:
        """How much calls ran beside one another, in µs."""
        return self.measured_us - self.busy_us

    @property
    def explained(self) -> float:
        """The sum of the least times over the span."""
        return self.least_us / self.span_us if self.span_us else 0.0

    @property
    def unexplained_us(self) -> float:
        """What the roof leaves of the span, in µs: beyond the roof's time, without a count, and idle."""
        return self.span_us - self.least_us

    @property
    def expected_us(self) -> float:
        """Like `least_us`, with the calls that were measured alone at that time, in µs."""
        return math.fsum(row.expected_us for row in self.rows if row.expected_us is not None)

    @property
    def explained_at_shapes(self) -> float:
        """`expected_us` over the span: what the same calls, each measured alone, explain."""
        return self.expected_us / self.span_us if self.span_us else 0.0

    @property
    def reached_us(self) -> float:
        """Like `expected_us`, but no call counts with more than it took in the step, in µs."""
        return math.fsum(row.reached_us for row in self.rows if row.reached_us is not None)

    @property
    def explained_as_reached(self) -> float:
        """`reached_us` over the span."""
        return self.reached_us / self.span_us if self.span_us else 0.0

    @property
    def has_alone(self) -> bool:
        """Whether any call was measured alone."""
        return any(row.alone_us is not None for row in self.rows)

    def by_family(self) -> dict[str, dict[str, float]]:
        """Sum rows of one kind of operation.

        Returns
        -------
        dict
            Family to ``calls``, ``least_us``, ``expected_us``, ``measured_us`` and ``loss_us``, the longest
            first.
        """
        found: dict[str, dict[str, float]] = {}
        for row in self.rows:
            sums = found.setdefault(
                row.family, dict.fromkeys(("calls", "least_us", "expected_us", "measured_us", "loss_us"), 0.0)
            )
            sums["calls"] += row.calls
            sums["least_us"] += row.least_us or 0.0
            sums["expected_us"] += row.expected_us or 0.0
            sums["measured_us"] += row.measured_us
            sums["loss_us"] += row.loss_us
        return dict(sorted(found.items(), key=lambda item: -item[1]["measured_us"]))

    def condensed(self, most: int) -> StepBudget:
        """Keep the longest rows and sum the others, a row for each kind of operation.

        Parameters
        ----------
        most
            How many rows to keep; the sums do not change.
        """
        longest = sorted(self.rows, key=lambda row: -row.measured_us)
        kept, rest = longest[:most], longest[most:]
        groups: dict[tuple[Family, bool], list[BudgetRow]] = {}
        for row in rest:
            groups.setdefault((row.family, row.least_us is None), []).append(row)
        summed = [_sum_rows(group) for group in groups.values()]
        rows = sorted([*kept, *summed], key=lambda row: -row.loss_us)
        return dataclasses.replace(self, rows=tuple(rows))

    def __str__(self) -> str:
        parts = [
            f"roof {_us(self.least_us)} ({100 * self.explained:.1f} %)",
            f"beyond the roof's time {_us(self.beyond_us)}",
            f"without a count {_us(self.uncounted_us)}",
            f"idle {_us(self.gap_us)}",
        ]
        if self.has_alone:
            parts.insert(
                1, f"at these shapes {_us(self.expected_us)} ({100 * self.explained_at_shapes:.1f} %)"
            )
        if self.overlap_us > 0.01 * self.busy_us:
            parts.append(f"less {_us(self.overlap_us)} that overlap")
        number = f"{self.calls} call{'s' if self.calls != 1 else ''}"
        remarks = "".join(f"; {remark}" for remark in self.remarks)
        return f"step of {_us(self.span_us)}: {', '.join(parts)}; {number}{remarks}"

    def table(self, most: int | None = None) -> list[tuple[str, ...]]:
        """Give a row of text for each operation, the largest loss first.

        Parameters
        ----------
        most
            How many rows; what is left over is summed in one more. All by default.
        """
        kept = self.rows if most is None else self.rows[:most]
        rest = self.rows[len(kept) :]
        rows = [
            (
                _bare(row.op),
                row.shapes_text(),
                f"{row.calls:,}",
                _optional(row.least_us),
                *([_optional(row.alone_us)] if self.has_alone else []),
                _plain(row.measured_us),
                _plain(row.loss_us),
                row.reason or f"{row.bound or 'both'}{', fits the L2' if row.in_l2 else ''}",
            )
            for row in kept
        ]
        if rest:
            least = math.fsum(row.least_us or 0.0 for row in rest)
            alone = math.fsum(row.expected_us or 0.0 for row in rest)
            measured = math.fsum(row.measured_us for row in rest)
            rows.append(
                (
                    f"{len(rest)} more",
                    "",
                    f"{sum(row.calls for row in rest):,}",
                    _plain(least),
                    *([_plain(alone)] if self.has_alone else []),
                    _plain(measured),
                    _plain(measured - least),
                    "",
                )
            )
        return rows

    def _repr_html_(self) -> str:
        header = ["Operation", "Shapes", "Calls", "Roof, µs", "Measured, µs", "Loss, µs", "Bound"]
        if self.has_alone:
            header.insert(4, "Alone, µs")
        return f"{html.table(header, self.table(20))}<p>{html.escape(str(self))}</p>"

    def as_dict(self) -> dict[str, Any]:
        """Give sums, families and rows as plain data."""
        sums = ("span_us", "busy_us", "gap_us", "least_us", "expected_us", "measured_us")
        more = ("uncounted_us", "overlap_us", "unexplained_us", "explained", "explained_at_shapes", "calls")
        return {
            **{name: getattr(self, name) for name in (*sums, *more)},
            "above_us": self.beyond_us,  # the name that recordings and their readers know it by
            "remarks": list(self.remarks),
            "families": self.by_family(),
            "rows": [row.as_dict() for row in self.rows],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepBudget:
        """Make it again from what `as_dict` gave, as a recording replays it.

        Parameters
        ----------
        data
            Plain data; sums are computed anew (so they may be there under any name, or not), of long lists of
            shapes only the first are there. Remarks, which older data lacks, are then empty.

        Raises
        ------
        ValueError
            A field is missing, or its value no fit one: it was recorded by an older version, or is something else.
        """
        try:
            return cls(
                rows=tuple(_row_from_dict(row) for row in given.rows(data["rows"], "rows")),
                span_us=given.number(data["span_us"], "span_us", least=0),
                busy_us=given.number(data["busy_us"], "busy_us", least=0),
                remarks=tuple(
                    given.text(r, "a remark") for r in given.rows(data.get("remarks", ()), "remarks")
                ),
            )
        except KeyError as error:
            raise ValueError(
                f"no budget as StepBudget.as_dict writes it: {error} is missing; record it again"
            ) from error
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"no budget as StepBudget.as_dict writes it: {error}; record it again"
            ) from error


def _row_from_dict(row: Any) -> BudgetRow:
    """Read a row, each field as what it is; where there is no count, all that would follow from one is None."""
    facts: dict[str, Any] = {
        "shapes": _shapes(row["shapes"]),
        "dtypes": tuple(given.text(dtype, "a dtype") for dtype in given.rows(row["dtypes"], "dtypes")),
        "measured_us": given.number(row["measured_us"], "measured_us", least=0),
        **{name: given.text(row[name], name) for name in ("op", "reason", "convention", "precision")},
        **{name: given.whole(row[name], name, least=1) for name in ("calls", "kernels")},
    }
    for name in ("flops", "bytes", "least_us", "alone_us"):
        facts[name] = None if row[name] is None else given.number(row[name], name, least=0)
    if len({facts[name] is None for name in ("flops", "bytes", "least_us")}) > 1:
        raise ValueError(f"flops, bytes and least_us of {facts['op']} are all given or all None")
    for name, words in (("family", get_args(Family)), ("bound", (*get_args(Bound), None))):
        if row[name] not in words:
            raise ValueError(f"{name} is {short(row[name])}: one of {', '.join(map(str, words))} is wanted")
        facts[name] = row[name]
    if not isinstance(row["in_l2"], bool):
        raise ValueError(f"in_l2 is {short(row['in_l2'])}: true or false is wanted")
    return BudgetRow(**facts, in_l2=row["in_l2"])


def _shapes(value: object) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(given.whole(size, "a length in shapes") for size in given.rows(shape, "a shape"))
        for shape in given.rows(value, "shapes")
    )


def _sum_rows(rows: Sequence[BudgetRow]) -> BudgetRow:
    """Put rows of one kind, all with a count or all without, into one."""
    if len(rows) == 1:
        return rows[0]
    counted = rows[0].least_us is not None

    def total(name: str) -> float:
        return math.fsum(getattr(row, name) or 0.0 for row in rows)

    return BudgetRow(
        op=f"{len(rows)} more of {rows[0].family}",
        family=rows[0].family,
        shapes=(),
        dtypes=(),
        calls=sum(row.calls for row in rows),
        kernels=sum(row.kernels for row in rows),
        flops=total("flops") if counted else None,
        bytes=total("bytes") if counted else None,
        reason="" if counted else "; ".join(dict.fromkeys(row.reason for row in rows)),
        convention="the sum of several rows" if counted else "",
        precision="",
        bound=rows[0].bound if len({row.bound for row in rows}) == 1 else None,
        least_us=total("least_us") if counted else None,
        measured_us=total("measured_us"),
        alone_us=math.fsum(row.expected_us or 0.0 for row in rows)
        if any(row.alone_us is not None for row in rows)
        else None,
        in_l2=all(row.in_l2 for row in rows),
    )


def _bare(op: str) -> str:
    return op.removeprefix("aten::")


def _plain(us: float) -> str:
    return f"{us:,.1f}" if abs(us) < 1000 else f"{us:,.0f}"


def _optional(us: float | None) -> str:
    return "none" if us is None else _plain(us)


def _us(us: float) -> str:
    return f"{us:,.1f} µs" if abs(us) < 1000 else f"{us / 1e3:,.2f} ms"


# --- making one ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """One call of an operation, as its kernels in a trace show it.

    Attributes
    ----------
    op
        The innermost operation around the launches; the kernel's name where there is none.
    shapes, dtypes
        Of its tensor arguments.
    kernels
        How many it launched.
    busy_us
        Time in which at least one of them ran, in µs.
    off_device
        Whether it is a copy over the bus, between host and device.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    kernels: int
    busy_us: float
    off_device: bool

    @property
    def key(self) -> str:
        """Operation, shapes and types in one text: what calls of one row share."""
        sizes = " ".join("x".join(map(str, shape)) for shape in self.shapes)
        return f"{self.op} {sizes} {' '.join(self.dtypes)}{' off the device' if self.off_device else ''}"


def step_budget(
    trace: KernelTrace | Mapping[str, Any],
    roofs: Roofline | MeasuredRoofline | Mapping[str, Roofline | MeasuredRoofline],
    *,
    causal: bool = True,
    tf32: bool = False,
    alone: Mapping[str, float] | None = None,
    arguments: Mapping[str, Sequence[str]] | None = None,
    list_elements: int | None = None,
    l2_bytes: float | None = None,
) -> StepBudget:
    """Explain a traced step as the sum over its calls of max(flops / P, bytes / B).

    Parameters
    ----------
    trace
        Of `gpucourse.kernels.trace`, or what its ``as_dict`` gave. Kernels of one call are one entry: its
        time is that in which at least one of them ran.
    roofs
        A roof for each precision, "fp32", "tf32", "bf16", …; or one for all, which the result remarks on where
        the calls differ. A measured roof stands for its
        burst ceilings: fills are held against its stream that writes, sums against the one that reads, all
        else against the best that does both. The arithmetic of a product or of attention is held against its
        inputs' precision, all other arithmetic, which the tensor cores do not do, against "fp32" where there
        is one.
    causal
        Whether attention in this step is causal, which the trace does not say.
    tf32
        Whether fp32 products of this step ran in tf32, which the trace does not say either.
    alone
        What `shape_ceilings` gave: the time of the same calls, each measured alone.
    arguments
        What `generated_arguments` gave, where kernels of this step were generated.
    list_elements
        For calls on lists whose shapes the trace does not have; see `work_of_call`.
    l2_bytes
        Size of the L2; that of the trace's own machine or of a measured roof by default.

    Returns
    -------
    StepBudget
        Calls without a count are in it with their time and the reason, never as 0.

    Raises
    ------
    TypeError
        `trace` is no trace, or `roofs` no roofs.
    ValueError
        There is no kernel in the trace, one of them has no fit times or shapes, or there is no roof.
    """
    calls, span_us, busy_us, l2 = _read(trace)
    known, streams = _roofs(roofs), _streams(roofs)
    if l2_bytes is None:
        measured = [r.l2_bytes for r in _each_measured(roofs) if r.l2_bytes]
        l2_bytes = l2 or (measured[0] if measured else None)
    grouped: dict[str, list[TracedCall]] = {}
    for call in calls:
        grouped.setdefault(call.key, []).append(call)
    rows = [
        _row(
            group,
            known,
            streams,
            alone or {},
            l2_bytes,
            _work_of(group[0], causal, arguments, list_elements),
            tf32,
        )
        for group in grouped.values()
    ]
    rows.sort(key=lambda row: -row.loss_us)
    return StepBudget(rows=tuple(rows), span_us=span_us, busy_us=busy_us, remarks=_remarks(rows, roofs))


def _remarks(rows: Sequence[BudgetRow], roofs: Any) -> tuple[str, ...]:
    """Say where one roof, given without a precision, was held against calls of others."""
    if isinstance(roofs, Mapping):
        return ()
    found = dict.fromkeys(row.precision for row in rows if row.precision)
    own = roofs.precision if isinstance(roofs, MeasuredRoofline) else ""
    if len({*found, *([own] if own and found else [])}) < 2:
        return ()
    roof = f"the roof of {own}" if own else "one roof"
    return (
        f"{roof} was used for all precisions ({', '.join(found)}): give a roof for each, such as "
        '{"fp32": …, "bf16": …}',
    )


def _work_of(
    call: TracedCall,
    causal: bool,
    arguments: Mapping[str, Sequence[str]] | None,
    list_elements: int | None,
) -> Work | Missing:
    if call.off_device:
        return Missing(call.op, "crosses the bus between host and device, which is no ceiling of this roof")
    return work_of_call(
        call.op,
        call.shapes,
        call.dtypes,
        causal=causal,
        list_elements=list_elements,
        arguments=(arguments or {}).get(call.op),
    )


def _row(
    group: Sequence[TracedCall],
    roofs: Mapping[str, Roofline],
    streams: Mapping[str, float],
    alone: Mapping[str, float],
    l2_bytes: float | None,
    work: Work | Missing,
    tf32: bool,
) -> BudgetRow:
    first, times = group[0], len(group)
    family = family_of(first.op)
    precision = _precision_of(family, first.dtypes, tf32)
    roof = _roof_for(roofs, precision, family)
    if isinstance(work, Work) and roof is None:
        work = Missing(first.op, f"no roof for {precision}; there are {', '.join(roofs)}")
    facts: dict[str, Any] = {
        "op": first.op,
        "family": family,
        "shapes": first.shapes,
        "dtypes": first.dtypes,
        "calls": times,
        "kernels": sum(call.kernels for call in group),
        "measured_us": math.fsum(call.busy_us for call in group),
    }
    one_alone_ms = alone.get(first.key)
    if one_alone_ms is not None:
        facts["alone_us"] = times * one_alone_ms * 1e3
    if isinstance(work, Missing) or roof is None:
        reason = work.reason if isinstance(work, Missing) else ""
        facts |= dict.fromkeys(("flops", "bytes", "bound", "least_us"))
        return BudgetRow(**facts, reason=reason, convention="", precision="")
    stream = streams.get(_stream_of(first.op, family))
    if stream is not None:
        roof = Roofline(peak_flops=roof.peak_flops, bandwidth=stream)
    least = roof.least_time(work)
    return BudgetRow(
        **facts,
        flops=times * work.flops,
        bytes=times * work.bytes,
        reason="",
        convention=work.convention,
        precision=precision,
        bound=least.bound,
        least_us=times * least.time_ms * 1e3,
        in_l2=l2_bytes is not None and work.bytes <= l2_bytes,
    )


def _precision_of(family: Family, dtypes: Sequence[str], tf32: bool) -> str:
    for dtype in dtypes:
        found = _PRECISIONS.get(dtype)
        if found is not None:
            tensor_cores = family in ("product", "attention")
            return "tf32" if found == "fp32" and tf32 and tensor_cores else found
    return "fp32"  # whole numbers: their arithmetic runs beside that of fp32


def _roof_for(roofs: Mapping[str, Roofline], precision: str, family: Family) -> Roofline | None:
    if "" in roofs:
        return roofs[""]
    if family in ("product", "attention"):
        return roofs.get(precision)
    # Element-wise arithmetic does not run on the tensor cores, in whatever type its numbers are.
    return roofs.get("fp32") or roofs.get(precision) or next(iter(roofs.values()))


def _stream_of(op: str, family: Family) -> str:
    """Name the stream that moves bytes as this operation does; "" for one that reads and writes."""
    if _bare(op) in ("fill_", "zero_"):
        return "write"
    return "read" if family == "reduction" and _bare(op) not in ("cumsum", "cumprod") else ""


def _streams(roofs: Any) -> dict[str, float]:
    """Give the bandwidth of each kind of stream in bytes/s; it is the same memory in every precision."""
    found: dict[str, float] = {}
    for measured in _each_measured(roofs):
        for ceiling in measured.streams:
            found[ceiling.kind] = max(ceiling.rate, found.get(ceiling.kind, 0.0))
    return found


def _each_measured(roofs: Any) -> list[MeasuredRoofline]:
    values = roofs.values() if isinstance(roofs, Mapping) else [roofs]
    return [value for value in values if isinstance(value, MeasuredRoofline)]


def _roofs(roofs: Any) -> dict[str, Roofline]:
    named = roofs if isinstance(roofs, Mapping) else {"": roofs}
    if not named:
        raise ValueError('no roof: give one, or a mapping such as {"fp32": roof, "bf16": roof}')
    found = {}
    for name, roof in named.items():
        if isinstance(roof, MeasuredRoofline):
            roof = roof.roofline
        if not isinstance(roof, Roofline):
            raise TypeError(
                f"the roof{f' for {name}' if name else ''} is {short(roof)}; wanted a Roofline or a "
                "MeasuredRoofline"
            )
        found[str(name)] = roof
    return found


def traced_calls(trace: KernelTrace | Mapping[str, Any]) -> list[TracedCall]:
    """Put together the kernels of each call.

    Parameters
    ----------
    trace
        Of `gpucourse.kernels.trace`, or its dict. A kernel without a call's number stands for itself.

    Raises
    ------
    TypeError
        It is neither.
    ValueError
        It has no kernel, or one without fit times or shapes.
    """
    return _read(trace)[0]


def _read(trace: Any) -> tuple[list[TracedCall], float, float, int | None]:
    """Give the calls of a trace, its span and busy time in µs, and its machine's L2 in bytes if it says so."""
    if isinstance(trace, KernelTrace):
        l2_bytes = trace.environment.l2_bytes
        kernels: Iterable[Mapping[str, Any]] = [_facts(kernel) for kernel in trace.kernels]
    elif isinstance(trace, Mapping) and isinstance(trace.get("kernels"), Sequence):
        l2_bytes = None
        kernels = trace["kernels"]
    else:
        raise TypeError(
            f"step_budget takes a KernelTrace or its dict with the kernels, not {_told(trace)}; "
            "gpucourse.kernels.trace records one"
        )
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for place, kernel in enumerate(kernels):
        if not isinstance(trace, KernelTrace):
            kernel = _checked(kernel, place)
        number = kernel["call"]
        groups.setdefault(("alone", place) if number is None else number, []).append(kernel)
    if not groups:
        raise ValueError("the trace has no kernel: what was traced ran nothing on the device")
    calls = [_call(group) for group in groups.values()]
    every = [_interval(kernel) for group in groups.values() for kernel in group]
    span_us = max(end for _, end in every) - min(start for start, _ in every)
    return calls, span_us, _union_us(every), l2_bytes


def _told(given: Any) -> str:
    """Name what was given for a trace; of a mapping its keys, since the trace is often one of them."""
    if not isinstance(given, Mapping):
        return short(given)
    keys = f"keys {sorted(map(str, given))[:6]}"
    return f"{keys}: pass the trace itself, not the recording around it"


def _checked(kernel: object, place: int) -> dict[str, Any]:
    """Read a kernel of a trace's plain data: a time that is none would be summed without an error."""
    if not isinstance(kernel, Mapping):
        raise TypeError(f"kernel {place} of the trace is {short(kernel)}: a table of fields is wanted")
    lacking = [name for name in ("name", "start_us", "duration_us") if name not in kernel]
    if lacking:
        raise ValueError(f"kernel {place} of the trace lacks {', '.join(lacking)}; it is no whole trace")
    call = kernel.get("call")
    try:
        return {
            "name": given.text(kernel["name"], "name"),
            "op": given.text(kernel.get("op") or "", "op"),
            "shapes": _shapes(kernel.get("shapes", ())),
            "dtypes": tuple(given.text(d, "a dtype") for d in given.rows(kernel.get("dtypes", ()), "dtypes")),
            "call": None if call is None else given.whole(call, "call"),
            "start_us": given.number(kernel["start_us"], "start_us"),
            "duration_us": given.number(kernel["duration_us"], "duration_us", least=0),
        }
    except ValueError as error:
        raise ValueError(f"kernel {place} of the trace: {error}") from error


def _facts(kernel: Any) -> dict[str, Any]:
    names = ("name", "op", "shapes", "dtypes", "call", "start_us", "duration_us")
    return {name: getattr(kernel, name) for name in names}


def _interval(kernel: Mapping[str, Any]) -> tuple[float, float]:
    return kernel["start_us"], kernel["start_us"] + kernel["duration_us"]


def _union_us(intervals: Iterable[tuple[float, float]]) -> float:
    return math.fsum(end - start for start, end in merge_intervals(intervals))


def _call(kernels: Sequence[Mapping[str, Any]]) -> TracedCall:
    first = kernels[0]
    return TracedCall(
        op=first["op"] or first["name"],
        shapes=first["shapes"],
        dtypes=first["dtypes"],
        kernels=len(kernels),
        busy_us=_union_us(_interval(kernel) for kernel in kernels),
        off_device=any(word in k["name"] for k in kernels for word in ("HtoD", "DtoH", "HtoH", "PtoP")),
    )
