"""Both ceilings of this GPU, measured: several streams, several products, a burst and a long load told apart.

A ceiling is that of an operation: a stream that only reads, one that copies and one that adds two arrays reach
different bandwidths, and so do products of different shapes. Each row names its operation and keeps its
samples; the roof is made of the best of them.

>>> trial = Ceiling(kind="copy", what="1.00 GB", shape=(250_000_000,), amount=2e9, samples_ms=(0.47, 0.48, 0.5))
>>> trial.text()
'4,167 GB/s (copy of 1.00 GB; middle half 4,082 to 4,211 GB/s)'
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from gpucourse import hardware, html
from gpucourse import plain_data as given
from gpucourse.bound import Roofline
from gpucourse.environment import Environment, require_cuda
from gpucourse.streams import timing_event
from gpucourse.units import format_bandwidth, format_bytes, format_rate
from gpucourse.work import short

__all__ = ["PRECISIONS", "SHAPES", "STREAMS", "Ceiling", "MeasuredRoofline", "measure_roofline", "sustained"]

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp64")

STREAMS: Mapping[str, tuple[str, int, int]] = {
    # name: (what it computes on arrays a, b and c, arrays read, arrays written)
    "read": ("sum of a · b", 2, 0),
    "write": ("a = number", 0, 1),
    "copy": ("b = a", 1, 1),
    "scale": ("b = number · a", 1, 1),
    "add": ("c = a + b", 2, 1),
    "triad": ("c = a + number · b", 2, 1),
}

SHAPES: tuple[tuple[int, int, int], ...] = (
    # (m, n, k): squares, as sweeps have them, and products with a longer sum.
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (6144, 6144, 6144),
    (8192, 8192, 8192),
    (4096, 4096, 8192),
    (8192, 8192, 4096),
)
TILE_COLUMNS = 64  # a multiprocessor, of one more shape: its tiles fill all multiprocessors, wave after wave

STREAM_BYTES = 2**31  # of one array
FIRST_REST_S = 0.1  # before the bursts that only choose which shapes to measure again
REST_S = 0.3  # before a burst that is compared: seen on an H200, 0.1 s gives a hot card its clock back
BURST_MS = 20.0  # what one burst keeps the device busy
SLICE_MS = 250.0  # of a long load: one rate and one clock a slice
CLOCK_CYCLES = 1_000_000  # how long the clock itself is timed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """What one operation reached.

    Attributes
    ----------
    kind
        "product", or the name of a stream in `STREAMS`.
    what
        Its size in words; for a product whose second matrix is stored transposed, that too.
    shape
        (m, n, k) of a product; (elements,) of each array of a stream.
    amount
        Floating-point operations of one call of a product; bytes read plus bytes written by one of a stream.
    samples_ms
        Device time of one call, a value a sample.
    seconds
        How long the device had been under load when the samples ended; 0 for a burst.
    """

    kind: str
    what: str
    shape: tuple[int, ...]
    amount: float
    samples_ms: tuple[float, ...]
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Amount over the median time, in flop/s or bytes/s."""
        return self.amount / statistics.median(self.samples_ms) * 1e3

    @property
    def low(self) -> float:
        """Rate at the upper quartile of the times; `rate` for fewer than two samples."""
        return self.amount / self._quartiles()[1] * 1e3

    @property
    def high(self) -> float:
        """Rate at the lower quartile of the times; `rate` for fewer than two samples."""
        return self.amount / self._quartiles()[0] * 1e3

    def _quartiles(self) -> tuple[float, float]:
        if len(self.samples_ms) < 2:
            return self.samples_ms[0], self.samples_ms[0]
        low, _, high = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return low, high

    @property
    def is_product(self) -> bool:
        """Whether it is a ceiling of arithmetic."""
        return self.kind == "product"

    def format(self, rate: float) -> str:
        """Write a rate of this ceiling's kind with its unit.

        Parameters
        ----------
        rate
            In flop/s or bytes/s.
        """
        return format_rate(rate) if self.is_product else format_bandwidth(rate)

    def text(self) -> str:
        """Give rate, operation and spread in one line."""
        spread = f"middle half {_number(self.format(self.low))} to {self.format(self.high)}"
        name = f"product {self.what}" if self.is_product else f"{self.kind} of {self.what}"
        return f"{self.format(self.rate)} ({name}; {spread})"

    def as_dict(self) -> dict[str, Any]:
        """Give the fields and the derived rates, in TFLOP/s or GB/s, as plain data."""
        unit, scale = ("tflops", 1e12) if self.is_product else ("gb_per_s", 1e9)
        return {
            unit: self.rate / scale,
            f"low_{unit}": self.low / scale,
            f"high_{unit}": self.high / scale,
            f"iqr_{unit}": (self.high - self.low) / scale,
            "kind": self.kind,
            "what": self.what,
            "shape": list(self.shape),
            "amount": self.amount,
            "samples_ms": list(self.samples_ms),
            "seconds": self.seconds,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Ceiling:
        """Make it again from what `as_dict` gave.

        Parameters
        ----------
        data
            Plain data; derived values are computed anew.

        Raises
        ------
        ValueError
            A field is missing, or its value no fit one.
        """
        try:
            kind = given.text(data["kind"], "kind")
            if kind != "product" and kind not in STREAMS:
                raise ValueError(f"kind is {short(kind)}: product or one of {', '.join(STREAMS)} is wanted")
            samples = given.rows(data["samples_ms"], "samples_ms")
            if not samples:
                raise ValueError("samples_ms is empty: a rate needs one sample at the least")
            return cls(
                kind=kind,
                what=given.text(data["what"], "what"),
                shape=tuple(
                    given.whole(size, "a length in shape", least=1)
                    for size in given.rows(data["shape"], "shape")
                ),
                amount=given.number(data["amount"], "amount", above=0),
                samples_ms=tuple(given.number(sample, "a sample", above=0) for sample in samples),
                seconds=given.number(data["seconds"], "seconds", least=0),
            )
        except KeyError as error:
            raise ValueError(f"no ceiling as Ceiling.as_dict writes it: {error} is missing") from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"no ceiling as Ceiling.as_dict writes it: {error}") from error


def _number(text: str) -> str:
    return text.split(" ")[0]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRoofline:
    """The ceilings that this GPU reached in one precision, what reached them, and the datasheet beside them.

    Attributes
    ----------
    device
        The GPU's name.
    precision
        "fp32", "tf32", "bf16", "fp16" or "fp64".
    products
        Bursts of arithmetic, one a shape: each some 20 ms long, after a rest.
    streams
        Bursts of memory traffic, one a kind.
    sustained
        The best product, and a stream, at the end of a long load; empty where none was asked for.
    curve
        Of the long load: seconds since its start, flop/s and clock in MHz (0 where it could not be read), a
        row a slice.
    datasheet_flops, datasheet_bandwidth
        Dense peak and bandwidth of the datasheet; None where there is no record of the device, or no figure.
    clock_mhz
        The multiprocessors' clock before and after all bursts; empty where it could not be read.
    l2_bytes
        Size of the L2 cache; None where unknown.
    conditions
        Device and software in one line.
    """

    device: str
    precision: str
    products: tuple[Ceiling, ...]
    streams: tuple[Ceiling, ...]
    sustained: tuple[Ceiling, ...] = ()
    curve: tuple[tuple[float, float, float], ...] = ()
    datasheet_flops: float | None = None
    datasheet_bandwidth: float | None = None
    clock_mhz: tuple[float, ...] = ()
    l2_bytes: int | None = None
    conditions: str = ""

    def __post_init__(self) -> None:
        if not self.products or not self.streams:
            raise ValueError("a measured roof needs a product and a stream at the least")

    @property
    def best_product(self) -> Ceiling:
        """The burst that reached most arithmetic."""
        return max(self.products, key=lambda ceiling: ceiling.rate)

    @property
    def best_stream(self) -> Ceiling:
        """The burst that reached most bandwidth among the streams that read and write, as most kernels do.

        A stream that only writes, or only reads, is another ceiling; it counts where no other was measured.
        """
        both = [c for c in self.streams if STREAMS[c.kind][1] and STREAMS[c.kind][2]]
        return max(both or self.streams, key=lambda ceiling: ceiling.rate)

    @property
    def roofline(self) -> Roofline:
        """Both ceilings in a burst: the best product, and the best stream that reads and writes."""
        return Roofline(peak_flops=self.best_product.rate, bandwidth=self.best_stream.rate)

    @property
    def sustained_roofline(self) -> Roofline | None:
        """Both ceilings at the end of the long load; None where there was none."""
        rates = {ceiling.is_product: ceiling.rate for ceiling in self.sustained}
        return Roofline(peak_flops=rates[True], bandwidth=rates[False]) if len(rates) == 2 else None

    @property
    def arithmetic_kind(self) -> str:
        """The operation that reached the arithmetic ceiling."""
        return f"{_describe(self.precision)} product, {self.best_product.what}"

    @property
    def bandwidth_kind(self) -> str:
        """The operation that reached the bandwidth."""
        best = self.best_stream
        return f"{best.kind} of {best.what}, {_directions(best.kind)}"

    def stream(self, kind: str) -> Ceiling:
        """Give the burst of one kind of stream.

        Parameters
        ----------
        kind
            A name of `STREAMS`.

        Raises
        ------
        KeyError
            It was not measured.
        """
        for ceiling in self.streams:
            if ceiling.kind == kind:
                return ceiling
        raise KeyError(
            f"no stream {kind!r} was measured; there are {', '.join(c.kind for c in self.streams)}"
        )

    def _share(self, ceiling: Ceiling) -> str:
        sheet = self.datasheet_flops if ceiling.is_product else self.datasheet_bandwidth
        if sheet is None:
            return f"datasheet unavailable for {self.device}"
        return f"{ceiling.rate / sheet:.1%} of the datasheet's {ceiling.format(sheet)}"

    def __str__(self) -> str:
        parts = [
            f"{self.device}, {self.precision}",
            *(f"burst {best.text()}, {self._share(best)}" for best in (self.best_product, self.best_stream)),
        ]
        for ceiling in self.sustained:
            parts.append(f"after {ceiling.seconds:.0f} s of load {ceiling.text()}, {self._share(ceiling)}")
        if self.clock_mhz:
            parts.append(f"clock {' → '.join(f'{mhz:.0f}' for mhz in self.clock_mhz)} MHz over the bursts")
        if self.conditions:
            parts.append(self.conditions)
        return "; ".join(parts)

    def table(self) -> list[tuple[str, str, str, str, str]]:
        """Give a row for each operation: what, when, rate, middle half, share of the datasheet; best first."""
        rows = []
        for group in (self.products, self.streams, self.sustained):
            for row in sorted(group, key=lambda ceiling: -ceiling.rate):
                name = (
                    f"product {row.what}"
                    if row.is_product
                    else f"{row.kind}: {STREAMS[row.kind][0]}, {row.what}"
                )
                when = f"after {row.seconds:.0f} s of load" if row.seconds else "burst"
                spread = f"{_number(row.format(row.low))} to {row.format(row.high)}"
                sheet = self.datasheet_flops if row.is_product else self.datasheet_bandwidth
                share = f"{row.rate / sheet:.1%}" if sheet else "unavailable"
                rows.append((name, when, row.format(row.rate), spread, share))
        return rows

    def _repr_html_(self) -> str:
        header = ("Operation", "When", "Rate", "Middle half of the samples", "Of the datasheet")
        body = html.table(header, self.table(), f"{self.device}, {self.precision}: ceilings measured")
        return f'{body}<p class="provenance">{html.escape(self.conditions or self.device)}</p>'

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for a recording; `from_dict` makes the object again."""
        tflops, gb_per_s = self.datasheet_flops, self.datasheet_bandwidth
        product = next((c for c in self.sustained if c.is_product), None)
        stream = next((c for c in self.sustained if not c.is_product), None)
        return {
            "device": self.device,
            "precision": self.precision,
            "regime": "burst",
            "peak_flops": self.roofline.peak_flops,
            "bandwidth": self.roofline.bandwidth,
            "arithmetic_kind": self.arithmetic_kind,
            "bandwidth_kind": self.bandwidth_kind,
            "burst": self.best_product.as_dict(),
            "sustained": product.as_dict() if product else None,
            "sustained_stream": stream.as_dict() if stream else None,
            "streams": {ceiling.kind: ceiling.as_dict() for ceiling in self.streams},
            "products": [ceiling.as_dict() for ceiling in self.products],
            "datasheet": {
                "tflops": None if tflops is None else tflops / 1e12,
                "gb_per_s": None if gb_per_s is None else gb_per_s / 1e9,
            },
            "curve": [list(row) for row in self.curve],
            "clock_mhz": list(self.clock_mhz),
            "l2_bytes": self.l2_bytes,
            "conditions": self.conditions,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MeasuredRoofline:
        """Make it again from what `as_dict` gave, as a recording replays it.

        Parameters
        ----------
        data
            Plain data; derived values are computed anew.

        Raises
        ------
        ValueError
            A field is missing, or its value no fit one: it was recorded by an older version, or is something else.
        """
        try:
            sheet, streams = data["datasheet"], data["streams"]
            for what, table in (("datasheet", sheet), ("streams", streams)):
                if not isinstance(table, Mapping):
                    raise ValueError(f"{what} is {short(table)}: a table is wanted")
            tflops, gb_per_s = (
                None if sheet[key] is None else given.number(sheet[key], key, above=0)
                for key in ("tflops", "gb_per_s")
            )
            curve = []
            for row in given.rows(data["curve"], "curve"):
                if len(given.rows(row, "a row of curve")) != 3:
                    raise ValueError(f"a row of curve is {short(row)}: seconds, flop/s and MHz are wanted")
                seconds, rate, mhz = (given.number(value, "a value in curve", least=0) for value in row)
                curve.append((seconds, rate, mhz))
            precision = given.text(data["precision"], "precision")
            if precision not in PRECISIONS:
                raise ValueError(f"precision is {short(precision)}: one of {', '.join(PRECISIONS)} is wanted")
            return cls(
                device=given.text(data["device"], "device"),
                precision=precision,
                products=_ceilings("products", data["products"], True),
                streams=_ceilings("streams", list(streams.values()), False),
                sustained=(
                    *_ceilings("sustained", [data["sustained"]], True),
                    *_ceilings("sustained_stream", [data["sustained_stream"]], False),
                ),
                curve=tuple(curve),
                datasheet_flops=None if tflops is None else tflops * 1e12,
                datasheet_bandwidth=None if gb_per_s is None else gb_per_s * 1e9,
                clock_mhz=tuple(
                    given.number(m, "clock_mhz", least=0) for m in given.rows(data["clock_mhz"], "clock_mhz")
                ),
                l2_bytes=None if data["l2_bytes"] is None else given.whole(data["l2_bytes"], "l2_bytes"),
                conditions=given.text(data["conditions"], "conditions"),
            )
        except KeyError as error:
            raise ValueError(
                f"no roof as MeasuredRoofline.as_dict writes it: {error} is missing; record it again"
            ) from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"no roof as MeasuredRoofline.as_dict writes it: {error}; record it again"
            ) from error


def _ceilings(what: str, data: object, product: bool) -> tuple[Ceiling, ...]:
    """Read the ceilings of one kind, those left out where none was measured."""
    found = [Ceiling.from_dict(row) for row in given.rows(data, what) if row is not None]
    for ceiling in found:
        if ceiling.is_product is not product:
            wanted = "a product" if product else f"one of {', '.join(STREAMS)}"
            raise ValueError(f"{what} holds a ceiling of the kind {ceiling.kind!r}: {wanted} is wanted")
    return tuple(found)


def _directions(kind: str) -> str:
    _, reads, writes = STREAMS[kind]
    return " plus ".join(word for word, count in (("read", reads), ("write", writes)) if count)


_WORDS = {
    "fp32": "float32 (tf32 off)",
    "tf32": "float32 (tf32 on)",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp64": "float64",
}


def _describe(precision: str) -> str:
    return _WORDS.get(precision, precision)


# --- measuring -----------------------------------------------------------------------------------------------


def measure_roofline(
    dtype: Any,
    *,
    shapes: Sequence[int | Sequence[int]] | None = None,
    streams: Sequence[str] = tuple(STREAMS),
    sustained_s: float = 0.0,
) -> MeasuredRoofline:
    """Measure both ceilings on this GPU: products of several shapes, streams of several kinds.

    Parameters
    ----------
    dtype
        "fp32" (tf32 off), "tf32", "bf16", "fp16", "fp64", or a torch dtype; torch.float32 follows
        ``allow_tf32`` as it stands, and the result says which.
    shapes
        Products to try, (m, n, k) each, or a width alone for a square; `SHAPES` by default, and two whose tiles
        come out even on this GPU: (4096, 64 for each multiprocessor, 8192), and 3072 rows by as many columns as
        make four whole waves of 128 × 256 tiles. Those that do not fit in half of the free memory are left out.
        Each is measured with both matrices as they are and with the second one stored transposed.
    streams
        Kinds of stream, names of `STREAMS`. Each array holds fp32 numbers in 2**31 bytes, or an eighth of the
        free memory where that is less, and both directions count.
    sustained_s
        Seconds of long load after the bursts, on the six best products in turn; 0 for none. Some 30 s
        bring a large card to the clock that its power limit allows. The rates are those of the last third.

    Returns
    -------
    MeasuredRoofline
        All rows with their samples. Another shape may reach some percent more.

    Raises
    ------
    NoGPUError
        There is no CUDA device.
    ValueError
        The precision or a stream is unknown, this GPU does not have the precision, a shape is none, no shape
        fits, or `sustained_s` is negative or not finite.

    Notes
    -----
    A burst is some 20 ms of calls queued one behind the other, each timed between two events, on random
    values: products of zeros draw less power and run faster. Every shape gets a first burst; the four best
    are measured again, each after a rest of 0.3 s, and those samples are kept: a card at its power limit
    falls off its highest clock within some 40 ms of load.
    """
    require_cuda("measure_roofline")
    import torch

    precision, torch_dtype = _precision(dtype)
    if shapes is None:
        processors = torch.cuda.get_device_properties().multi_processor_count
        # Tiles of 128 x 256: 24 rows of them, and as many columns as make four whole waves of multiprocessors.
        waves = (3072, 256 * (4 * processors // 24), 8192)
        shapes = (*SHAPES, (4096, TILE_COLUMNS * processors, 8192), waves)
    wanted = [_shape(shape) for shape in shapes]
    _check_streams(streams)
    if not 0 <= sustained_s < math.inf:
        raise ValueError(f"sustained_s is {sustained_s!r}; wanted seconds, 0 or more")
    free_bytes, _ = torch.cuda.mem_get_info()
    fitting = [
        (m, n, k) for m, n, k in wanted if (m * k + k * n + m * n) * torch_dtype.itemsize < free_bytes / 2
    ]
    if not fitting:
        raise ValueError(f"none of the products {wanted} fits in half of {free_bytes} free bytes")
    before = clock_mhz()
    with tf32_products(precision == "tf32"):
        measured_streams = tuple(_stream(kind, free_bytes) for kind in streams)
        products = _products(fitting, torch_dtype)
        after = clock_mhz()
        bursts = MeasuredRoofline(device="", precision=precision, products=products, streams=measured_streams)
        loads, curve = _long_load(products, bursts.best_stream, torch_dtype, sustained_s)
    environment = Environment.capture()
    sheet = hardware.find(environment.gpu or "")
    return dataclasses.replace(
        bursts,
        device=environment.gpu or "",
        sustained=loads,
        curve=curve,
        datasheet_flops=_sheet_flops(sheet, precision),
        datasheet_bandwidth=sheet.bandwidth_bytes_per_s if sheet else None,
        clock_mhz=(before, after) if before and after else (),
        l2_bytes=environment.l2_bytes,
        conditions=environment.line(),
    )


def _sheet_flops(sheet: hardware.Device | None, precision: str) -> float | None:
    try:
        return sheet.peak_flops(precision) if sheet else None
    except (hardware.MissingFigureError, ValueError, TypeError):
        return None


def _precision(dtype: Any) -> tuple[str, Any]:
    """Give the precision's name and the torch dtype; refuse what is unknown here or not built into this GPU."""
    import torch

    names = {
        "fp32": torch.float32,
        "tf32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp64": torch.float64,
    }
    name = dtype
    if isinstance(dtype, torch.dtype):
        name = next((key for key, value in names.items() if value is dtype), dtype)
        if name == "fp32" and torch.backends.cuda.matmul.allow_tf32:
            name = "tf32"
    if not isinstance(name, str) or name not in names:
        raise ValueError(
            f"{short(dtype)} is no precision to measure here; known are {', '.join(PRECISIONS)}, or "
            "torch.bfloat16, for one"
        )
    gpu = torch.cuda.get_device_name()
    if name == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(f"{gpu} has no bf16 arithmetic; measure fp16")
    if name == "tf32" and torch.cuda.get_device_capability() < (8, 0):
        raise ValueError(f"{gpu} has no tf32; its fp32 products run in fp32, so measure that")
    return name, names[name]


def _shape(shape: Any) -> tuple[int, int, int]:
    sizes = (shape,) * 3 if isinstance(shape, int) else tuple(shape)
    if len(sizes) != 3 or not all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in sizes):
        raise ValueError(f"{short(shape)} is no product; give (m, n, k), or a width for a square one")
    return sizes[0], sizes[1], sizes[2]


def _check_streams(streams: Sequence[str]) -> None:
    unknown = [kind for kind in streams if kind not in STREAMS]
    if unknown or not streams:
        raise ValueError(
            f"{unknown or 'no stream'}: known streams are {', '.join(STREAMS)}; name at least one"
        )


@contextmanager
def tf32_products(allowed: bool) -> Iterator[None]:
    """Let fp32 products run in tf32 or forbid it, and put back what was set before."""
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def clock_mhz() -> float | None:
    """Read the multiprocessors' clock in MHz off a kernel that counts its own cycles; None where it fails."""
    import torch

    torch.cuda._sleep(CLOCK_CYCLES // 5)  # type: ignore[no-untyped-call]  # the queue fills meanwhile
    start, end = timing_event(), timing_event()
    start.record()
    torch.cuda._sleep(CLOCK_CYCLES)  # type: ignore[no-untyped-call]
    end.record()
    torch.cuda.synchronize()
    elapsed_ms = start.elapsed_time(end)
    return float(CLOCK_CYCLES / (elapsed_ms * 1e3)) if elapsed_ms > 0 else None


def burst(call: Callable[[], Any], rest_s: float = 0.0, busy_ms: float = BURST_MS) -> tuple[float, ...]:
    """Time calls queued one behind the other, between events; ms of one call, a value an interval."""
    import torch

    torch.cuda.synchronize()
    time.sleep(rest_s)
    call()  # the first call carries the library's choice of a kernel
    start, end = timing_event(), timing_event()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    one_ms = max(start.elapsed_time(end), 1e-3)
    calls = max(1, math.ceil(1.0 / one_ms))  # an interval of 1 ms hides what an event costs
    count = max(5, min(20, int(busy_ms / (calls * one_ms))))
    torch.cuda._sleep(CLOCK_CYCLES)  # type: ignore[no-untyped-call]  # the host gets ahead meanwhile
    events = [timing_event()]
    events[0].record()
    for _ in range(count):
        for _ in range(calls):
            call()
        events.append(timing_event())
        events[-1].record()
    torch.cuda.synchronize()
    return tuple(a.elapsed_time(b) / calls for a, b in itertools.pairwise(events))


def _matrices(shape: tuple[int, int, int], dtype: Any, turned: bool) -> Callable[[], Any]:
    """Make a product's matrices; `turned` stores the second one transposed, as a linear layer its weights."""
    import torch

    m, n, k = shape
    a = torch.randn(m, k, device="cuda", dtype=dtype)
    b = (
        torch.randn(n, k, device="cuda", dtype=dtype).t()
        if turned
        else torch.randn(k, n, device="cuda", dtype=dtype)
    )
    out = torch.empty(m, n, device="cuda", dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


_TURNED = ", second matrix transposed"


def _product(
    shape: tuple[int, int, int], turned: bool, samples_ms: Sequence[float], seconds: float = 0.0
) -> Ceiling:
    return Ceiling(
        kind="product",
        what=" × ".join(map(str, shape)) + (_TURNED if turned else ""),
        shape=shape,
        amount=2 * math.prod(shape),
        samples_ms=tuple(samples_ms),
        seconds=seconds,
    )


def _products(shapes: Sequence[tuple[int, int, int]], dtype: Any) -> tuple[Ceiling, ...]:
    found = {
        (shape, turned): _product(
            shape, turned, burst(_matrices(shape, dtype, turned), FIRST_REST_S, BURST_MS / 2)
        )
        for shape in shapes
        for turned in (False, True)
    }
    for shape, turned in sorted(found, key=lambda key: -found[key].rate)[:4]:
        samples = burst(_matrices(shape, dtype, turned), REST_S)
        found[shape, turned] = _product(shape, turned, samples)
    return tuple(found.values())


def _stream_call(kind: str, free_bytes: int) -> tuple[Callable[[], Any], int]:
    """Make the call of a stream on fp32 numbers, whose width the memory does not see, and say on how many."""
    import torch

    _, reads, writes = STREAMS[kind]
    n = int(min(STREAM_BYTES, free_bytes // 8)) // 4
    a = torch.empty(n, device="cuda", dtype=torch.float32).uniform_()
    b = torch.empty_like(a).uniform_() if reads + writes > 1 else a
    c = torch.empty_like(a) if reads + writes > 2 else a
    calls: dict[str, Callable[[], Any]] = {
        "read": lambda: torch.dot(a, b),
        "write": lambda: a.fill_(1.5),
        "copy": lambda: b.copy_(a),
        "scale": lambda: torch.mul(a, 1.5, out=b),
        "add": lambda: torch.add(a, b, out=c),
        "triad": lambda: torch.add(a, b, alpha=1.5, out=c),
    }
    return calls[kind], n


def _stream(kind: str, free_bytes: int) -> Ceiling:
    call, n = _stream_call(kind, free_bytes)
    return _stream_ceiling(kind, n, burst(call))


def _stream_ceiling(kind: str, n: int, samples_ms: Sequence[float], seconds: float = 0.0) -> Ceiling:
    _, reads, writes = STREAMS[kind]
    return Ceiling(
        kind=kind,
        what=f"{format_bytes(4 * n)} an array",
        shape=(n,),
        amount=4 * (reads + writes) * n,
        samples_ms=tuple(samples_ms),
        seconds=seconds,
    )


# --- a long load ---------------------------------------------------------------------------------------------


def sustained(
    calls: Mapping[Any, tuple[Callable[[], Any], float]], seconds: float
) -> list[tuple[Any, float, float, float | None]]:
    """Keep the device busy with some calls in turn and say what each slice of a quarter second reached.

    The next slice is queued before the one before it has ended, so the device never rests.

    Parameters
    ----------
    calls
        Maps a name to a call and its device time in ms, roughly.
    seconds
        How long.

    Returns
    -------
    list of tuple
        A row a slice: name, seconds since the start, ms of one call, clock in MHz after it (None where it
        could not be read).

    Raises
    ------
    NoGPUError
        There is no CUDA device.
    ValueError
        There is no call, or `seconds` is not positive.
    """
    require_cuda("sustained")
    if not calls or not 0 < seconds < math.inf:
        raise ValueError(f"a long load takes a call and a time above 0 s; found {len(calls)} and {seconds!r}")
    import torch

    rows: list[tuple[Any, float, float, float | None]] = []
    began = time.perf_counter()
    waiting: tuple[Any, int, list[Any]] | None = None
    names = list(calls)
    turn = 0
    while time.perf_counter() - began < seconds or turn < len(names):
        name = names[turn % len(names)]
        turn += 1
        call, one_ms = calls[name]
        count = max(1, round(SLICE_MS / one_ms))
        events = [timing_event() for _ in range(3)]
        events[0].record()
        for _ in range(count):
            call()
        events[1].record()
        torch.cuda._sleep(CLOCK_CYCLES)  # type: ignore[no-untyped-call]
        events[2].record()
        if waiting is not None:
            rows.append(_slice(*waiting, began))
        waiting = name, count, events
    if waiting is not None:
        rows.append(_slice(*waiting, began))
    return rows


def _slice(name: Any, count: int, events: list[Any], began: float) -> tuple[Any, float, float, float | None]:
    events[2].synchronize()
    spin_ms = events[1].elapsed_time(events[2])
    mhz = CLOCK_CYCLES / (spin_ms * 1e3) if spin_ms > 0 else None
    return name, time.perf_counter() - began, events[0].elapsed_time(events[1]) / count, mhz


def _long_load(
    products: Sequence[Ceiling], stream: Ceiling, dtype: Any, seconds: float
) -> tuple[tuple[Ceiling, ...], tuple[tuple[float, float, float], ...]]:
    """Load the device with the best products in turn, then, still hot, with a stream."""
    if seconds == 0:
        return (), ()
    import torch

    best = {c.what: c for c in sorted(products, key=lambda ceiling: -ceiling.rate)[:6]}
    calls = {}
    for what, ceiling in best.items():
        m, n, k = ceiling.shape
        call = _matrices((m, n, k), dtype, what.endswith(_TURNED))
        calls[what] = call, statistics.median(ceiling.samples_ms)
    rows = sustained(calls, seconds)
    del call
    calls.clear()  # the matrices make room for the stream's arrays
    last = [row for row in rows if row[1] > rows[-1][1] * 2 / 3]
    loads = []
    for what, ceiling in best.items():
        samples = tuple(row[2] for row in last if row[0] == what)
        if samples:
            loads.append(dataclasses.replace(ceiling, samples_ms=samples, seconds=rows[-1][1]))
    fastest = max(loads, key=lambda ceiling: ceiling.rate)
    curve = tuple((at, best[what].amount / ms * 1e3, mhz or 0.0) for what, at, ms, mhz in rows)
    stream_call, count = _stream_call(stream.kind, torch.cuda.mem_get_info()[0])
    streamed = sustained({stream.kind: (stream_call, statistics.median(stream.samples_ms))}, 1.0)
    times = [row[2] for row in streamed]
    still = _stream_ceiling(stream.kind, count, times, rows[-1][1] + streamed[-1][1])
    return (fastest, still), curve
