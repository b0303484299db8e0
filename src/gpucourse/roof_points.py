"""Recorded kernels and ceilings, ready to be drawn under a roof.

A point keeps its work, its time and its spread, and says in words why it lies where it lies. One whose bytes
came from the L2 cache may lie above the memory's line, and one that waited for its launch far below it: both
are shown where they are and called what they are.

>>> roof = Roofline(peak_flops=67e12, bandwidth=4.8e12)
>>> add = RoofPoint(name="add", work=Work(flops=2**21, bytes=12 * 2**21), time_ms=0.00412, source="add_sweep")
>>> add.state(roof, l2_bytes=62.9e6)
'127 % of the roof: its 25.2 MB fit the L2 and need not travel'
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Literal

from gpucourse import recording
from gpucourse.hardware import PRECISION_OF_DTYPE
from gpucourse.roofline import (
    MeasuredRoofline,
    Roofline,
    Work,
    attention_work,
    elementwise_work,
    layer_norm_work,
    matmul_work,
    softmax_work,
)
from gpucourse.units import format_bytes, format_time_ms

__all__ = ["Kind", "MeasuredRoof", "RoofPoint", "recorded_roofs"]

Kind = Literal["memory", "L2", "launch"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoofPoint:
    """One measured kernel.

    Attributes
    ----------
    name
        The operation with its shape.
    work
        Its arithmetic and least traffic.
    time_ms
        Median device time; for a point of kind "launch" the elapsed time of one call as Python launches it.
    iqr_ms
        Distance between the quartiles of the samples; None where there is one sample.
    device_ms
        The device's share of an elapsed time; None where `time_ms` is the device time itself.
    cold
        Whether the L2 was flushed before each call.
    throttled
        Whether the clock fell while it was measured.
    source
        The recording that it comes from.
    """

    name: str
    work: Work
    time_ms: float
    iqr_ms: float | None = None
    device_ms: float | None = None
    cold: bool = False
    throttled: bool = False
    source: str

    @property
    def rate(self) -> float:
        """Arithmetic rate in flop/s."""
        return self.work.flops / self.time_ms * 1e3

    @property
    def between(self) -> tuple[float, float] | None:
        """Rates in flop/s half an IQR above and below the median time; None where there is one sample."""
        if self.iqr_ms is None:
            return None
        slow, fast = self.time_ms + self.iqr_ms / 2, max(self.time_ms - self.iqr_ms / 2, self.time_ms / 10)
        return self.work.flops / slow * 1e3, self.work.flops / fast * 1e3

    def share(self, roof: Roofline) -> float:
        """Rate over what the roof allows at this intensity; above 1 where the bytes came from elsewhere."""
        return self.rate / roof.attainable(self.work.intensity)

    def kind(self, l2_bytes: float | None) -> Kind:
        """Say what served it: the memory, the L2 cache, or nothing because it waited for its launch.

        Parameters
        ----------
        l2_bytes
            Size of the L2; None where unknown, and then nothing is put down to it.
        """
        if self.device_ms is not None:
            return "launch"
        return "L2" if l2_bytes and not self.cold and self.work.bytes <= l2_bytes else "memory"

    def state(self, roof: Roofline, l2_bytes: float | None) -> str:
        """Say in words where the point lies and why.

        Parameters
        ----------
        roof
            The roof that it is compared with.
        l2_bytes
            Size of the L2; None where unknown.
        """
        share = f"{_percent(self.share(roof))} of the roof"
        kind = self.kind(l2_bytes)
        if kind == "launch":
            assert self.device_ms is not None
            busy, whole = format_time_ms(self.device_ms), format_time_ms(self.time_ms)
            text = f"launch-bound, {share}: the device works for {busy} of {whole}"
        elif kind == "L2" and self.share(roof) > 1:
            text = f"{share}: its {format_bytes(self.work.bytes)} fit the L2 and need not travel"
        elif kind == "L2":
            side = roof.bound(self.work.intensity)
            text = f"{side} side, {share}; its {format_bytes(self.work.bytes)} fit the L2"
        else:
            text = f"{roof.bound(self.work.intensity)} side, {share}{', L2 flushed' if self.cold else ''}"
        return f"{text}; the clock fell meanwhile" if self.throttled else text


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRoof:
    """Both ceilings of one GPU in one precision as they were recorded, and kernels to set beside them.

    Attributes
    ----------
    gpu
        Exact name of the device that measured.
    precision
        "fp32", "tf32", "fp16" or "bf16".
    roofline
        The measured ceilings, in a short burst.
    arithmetic_kind, bandwidth_kind
        The operations that reached them.
    l2_bytes
        As the device reported it; None where it did not.
    points
        Kernels in this precision, from low to high intensity.
    provenance
        Where the numbers come from: names of the recordings, and a line each with device, date and software.
    sustained
        The ceilings at the end of a long load; None where none was recorded.
    sustained_s
        How long that load was, in seconds; 0 where none was recorded.
    """

    gpu: str
    precision: str
    roofline: Roofline
    arithmetic_kind: str
    bandwidth_kind: str
    l2_bytes: float | None
    points: tuple[RoofPoint, ...]
    provenance: str
    sustained: Roofline | None = None
    sustained_s: float = 0.0


def recorded_roofs() -> tuple[MeasuredRoof, ...]:
    """Read the recorded ceilings and the kernels recorded in chapters 2 and 3.

    Returns
    -------
    tuple of MeasuredRoof
        One a precision; none of them for a GPU other than the recordings' own.

    Raises
    ------
    RecordingError
        A recording is missing or corrupt.

    Examples
    --------
    >>> [(roof.gpu, roof.precision) for roof in recorded_roofs()]
    [('NVIDIA H200', 'fp32'), ('NVIDIA H200', 'bf16')]
    """
    names = ("ceilings", "square_widths", "add_sweep", "norms", "rows_sweep", "block_parts")
    found = {name: recording.load(name) for name in names}
    hot = _long_loads()
    roofs = []
    for row in found["ceilings"].data.values():
        precision = _precision_of(row["arithmetic_kind"])
        points = [p for dtype, p in _points(found) if dtype == precision]
        used = ["ceilings", *dict.fromkeys(p.source for p in points)]
        loaded, load = hot.get(precision, ("", None))
        if load is not None and load.device == row["device"]:
            found[loaded] = recording.load(loaded)
            used.append(loaded)
        else:
            load = None
        lines = dict.fromkeys(found[name].line() for name in used)
        l2 = found["ceilings"].provenance.get("l2_bytes")
        roofs.append(
            MeasuredRoof(
                gpu=row["device"],
                precision=precision,
                roofline=Roofline(peak_flops=row["peak_flops"], bandwidth=row["bandwidth"]),
                arithmetic_kind=row["arithmetic_kind"],
                bandwidth_kind=row["bandwidth_kind"],
                l2_bytes=float(l2) if l2 else None,
                points=tuple(sorted(points, key=lambda p: (p.work.intensity, p.rate))),
                provenance=f"{', '.join(used)}: {'; '.join(lines)}",
                sustained=load.sustained_roofline if load else None,
                sustained_s=load.sustained[0].seconds if load and load.sustained else 0.0,
            )
        )
    return tuple(roofs)


def _long_loads() -> dict[str, tuple[str, MeasuredRoofline]]:
    """Give the roofs that were measured under a long load, by precision, with the recording's name."""
    known = recording.names()
    return {
        precision: (name, MeasuredRoofline.from_dict(row["roof"]))
        for name in ("roofline_sustained_full", "roofline_sustained_half")
        if name in known
        for precision, row in recording.load(name).data.items()
    }


def _precision_of(text: str) -> str:
    """Read a precision off "bfloat16 product, …", "float32 (tf32 on) product, …" or "torch.float16"."""
    (dtype,) = re.findall(r"^(?:torch\.)?(\w+)", text)
    return "tf32" if "tf32 on" in text else PRECISION_OF_DTYPE[dtype]


def _points(found: dict[str, recording.Recording]) -> Iterator[tuple[str, RoofPoint]]:
    """Pick the kernels to draw, each with the precision that it ran in."""
    adds = found["add_sweep"].data
    for key, size in (("mi_2", "2 Mi"), ("mi_128", "128 Mi")):
        work = elementwise_work(adds[key]["elements"], reads=(4, 4), writes=(4,))
        yield "fp32", _point(f"add, {size} numbers", work, adds[key]["warm"], "add_sweep")
    work = elementwise_work(adds["mi_1"]["elements"], reads=(4, 4), writes=(4,))
    yield (
        "fp32",
        _launched("add, 1 Mi numbers, as Python launches it", work, adds["mi_1"]["warm"], "add_sweep"),
    )

    norms = found["norms"].data
    shape = (131072, 768, 4)
    yield "fp32", _point("softmax, 131,072 × 768", softmax_work(*shape), norms["softmax"]["fused"], "norms")
    fused = norms["layer_norm"]["fused"]
    yield "fp32", _point("layer norm, 131,072 × 768", layer_norm_work(*shape), fused, "norms")

    rows = found["rows_sweep"].data
    for m in (1, 32, 128, 4096):
        name = f"product, {m:,} × 8,192 by 8,192²"
        work = matmul_work(m, 8192, 8192, 2)
        yield _precision_of(rows["dtype"]), _point(name, work, rows[f"m_{m}"]["timing"], "rows_sweep")

    parts = found["block_parts"].data
    for key, itemsize in (("fp32", 4), ("half", 2)):
        part, dtype = parts[key], _precision_of(parts[key]["dtype"])
        product = "tf32" if dtype == "fp32" and parts["tf32_allowed"] else dtype
        scores = 192 * matmul_work(1024, 1024, 64, itemsize)
        yield product, _point("attention scores, 192 heads", scores, part["scores"], "block_parts")
        attention = attention_work(16, 12, 1024, 64, itemsize)
        yield product, _point("fused attention, 192 heads", attention, part["attention"], "block_parts")
        if itemsize == 2:
            work = layer_norm_work(16384, 768, itemsize)
            yield dtype, _point("layer norm, 16,384 × 768", work, part["layer_norm"], "block_parts")
            work = elementwise_work(16384 * 768, reads=(2, 2), writes=(2,))
            yield dtype, _point("add, 12 Mi numbers", work, part["residual"], "block_parts")
            name = "add, 12 Mi numbers, as Python launches it"
            yield dtype, _launched(name, work, part["residual"], "block_parts")

    for key, itemsize in (("fp32", 4), ("fp16", 2), ("bf16", 2)):
        for row in found["square_widths"].data.get(key, ()):
            n = row["width"]
            if n in (256, 1024, 8192):
                work = matmul_work(n, n, n, itemsize)
                yield key, _point(f"product, {n:,} wide", work, row, "square_widths")


def _point(name: str, work: Work, timing: dict[str, Any], source: str) -> RoofPoint:
    return RoofPoint(
        name=name,
        work=work,
        time_ms=timing["median_ms"],
        iqr_ms=timing["iqr_ms"],
        cold=timing.get("l2") == "cold",
        throttled=bool(timing.get("throttled")),
        source=source,
    )


def _launched(name: str, work: Work, timing: dict[str, Any], source: str) -> RoofPoint:
    """Make the point of one call with its launch: one event pair, so it has no spread."""
    return RoofPoint(
        name=name, work=work, time_ms=timing["elapsed_ms"], device_ms=timing["median_ms"], source=source
    )
