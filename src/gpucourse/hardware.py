"""Datasheet figures of GPUs, each with its kind and its source.

A device is found by the exact name that `torch.cuda.get_device_name()` gives, or by a listed short one, and
never by a part of a name: a neighbour's figure is worse than none. What a card has no figure for raises.

>>> device("H200").peak_flops("bf16") / device("H200").bandwidth_bytes_per_s
206.04...
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from gpucourse import html

__all__ = [
    "DEVICES",
    "Device",
    "Figure",
    "MissingFigureError",
    "Source",
    "UnknownDeviceError",
    "device",
    "find",
    "reference_tables",
]

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "fp16", "bf16", "fp8")

#: Precisions by torch's names of the types that arithmetic here runs in.
PRECISION_OF_DTYPE: Mapping[str, Precision] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

_DTYPES: Mapping[str, Precision] = {
    **PRECISION_OF_DTYPE,
    "float": "fp32",
    "half": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    **{name: name for name in PRECISIONS},
}


class UnknownDeviceError(LookupError):
    """No record has this name; the message quotes it and the nearest ones."""


class MissingFigureError(LookupError):
    """The record of this device has no such figure; the message says which it has."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a figure was read.

    Attributes
    ----------
    title
        The document.
    url
        Its address.
    checked
        ISO date on which the figure was read there; "" where the document could not be opened, and then
        the figure is unverified.
    """

    title: str
    url: str
    checked: str = ""

    @property
    def status(self) -> str:
        """Say "checked DATE" or "unverified"."""
        return f"checked {self.checked}" if self.checked else "unverified"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of a datasheet.

    Attributes
    ----------
    value
        In SI units: flop/s, bytes/s, bytes, or a count.
    kind
        What exactly it counts: "dense, fp32 accumulate", "read + write".
    source
        Where it was read.
    note
        What a reader has to know besides.
    fma_per_clock
        Fused multiply-adds of one multiprocessor a clock cycle; 0 where it is no arithmetic rate.
    clock_mhz
        The clock that belongs to `value`, so that multiprocessors · fma_per_clock · 2 · clock gives it.
    """

    value: float
    kind: str
    source: Source
    note: str = ""
    fma_per_clock: int = 0
    clock_mhz: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What the datasheet says of one GPU.

    Attributes
    ----------
    name
        As `torch.cuda.get_device_name()` gives it.
    short
        The short name that `device` takes as well.
    memory, bandwidth, multiprocessor_count
        Figures that every record has.
    peaks
        Dense arithmetic by precision; what is absent, the card's datasheet does not give.
    l2
        Size of the L2 cache; None where no source gives it for this card.
    """

    name: str
    short: str
    memory: Figure
    bandwidth: Figure
    multiprocessor_count: Figure
    peaks: Mapping[Precision, Figure]
    l2: Figure | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "peaks", types.MappingProxyType(dict(self.peaks)))

    @property
    def memory_gb(self) -> float:
        """Size of the memory as the card is sold, in GB; what torch reports is a little less or more."""
        return self.memory.value / 1e9

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bytes a second to and from memory, reads and writes together."""
        return self.bandwidth.value

    @property
    def multiprocessors(self) -> int:
        """Streaming multiprocessors."""
        return int(self.multiprocessor_count.value)

    @property
    def l2_bytes(self) -> int | None:
        """Bytes of L2 cache; None where no source gives them for this card."""
        return None if self.l2 is None else int(self.l2.value)

    def peak(self, dtype: Any) -> Figure:
        """Give the figure for the peak of one precision.

        Parameters
        ----------
        dtype
            "fp32", "tf32", "fp16", "bf16", "fp8", or a torch dtype; torch.float32 is fp32, never tf32.

        Raises
        ------
        MissingFigureError
            The card's datasheet has none, or `dtype` is not a precision of these.
        """
        precision = _DTYPES.get(str(dtype).removeprefix("torch."))
        if precision is None:
            raise MissingFigureError(
                f"{dtype!r} is no precision that records have; they have {', '.join(PRECISIONS)}"
            )
        if precision not in self.peaks:
            raise MissingFigureError(
                f"{self.name} has no {precision} figure: its tensor cores do not compute in it. It has "
                f"{', '.join(self.peaks)}"
            )
        return self.peaks[precision]

    def peak_flops(self, dtype: Any) -> float:
        """Give the dense peak of one precision in flop/s.

        Parameters
        ----------
        dtype
            As in `peak`.

        Raises
        ------
        MissingFigureError
            As in `peak`.

        Examples
        --------
        >>> device("Tesla T4").peak_flops("fp16")
        65000000000000.0
        """
        return self.peak(dtype).value

    def peak_flops_at_clock(self, dtype: Any, clock_mhz: float | None = None) -> float:
        """Give the dense limit of one precision at a clock above the datasheet's.

        The datasheet's figure belongs to one clock and the card may run faster, so this is the limit that no
        honest measurement passes.

        Parameters
        ----------
        dtype
            As in `peak`.
        clock_mhz
            The card's maximum clock, in MHz; None takes the highest clock of its own figures.

        Returns
        -------
        float
            In flop/s; never below `peak_flops`.

        Raises
        ------
        MissingFigureError
            As in `peak`.

        Examples
        --------
        >>> round(device("H200").peak_flops_at_clock("bf16", 1980) / 1e12)
        1070
        """
        figure = self.peak(dtype)
        clock = max(peak.clock_mhz for peak in self.peaks.values()) if clock_mhz is None else clock_mhz
        return figure.value * max(1.0, clock / figure.clock_mhz)

    def figures(self) -> Iterator[tuple[str, str, Figure]]:
        """Walk through all figures: what it is, the value in words, the figure itself."""
        yield "Memory", f"{self.memory_gb:g} GB", self.memory
        yield "Memory bandwidth", f"{self.bandwidth_bytes_per_s / 1e9:,.0f} GB/s", self.bandwidth
        yield "Multiprocessors", f"{self.multiprocessors}", self.multiprocessor_count
        if self.l2 is not None:
            yield "L2 cache", f"{self.l2.value / 1e6:.1f} MB", self.l2
        for precision, figure in self.peaks.items():
            yield f"{precision} arithmetic", f"{figure.value / 1e12:g} TFLOP/s", figure


# --- the records --------------------------------------------------------------------------------------------
# Figures were read in stored copies of the pages below on the date given. The vendor's own pages could not
# be opened: where one is the only source, the figure is marked unverified, and what speaks for it is the
# identity with clock and units, which a test holds for every arithmetic figure.

_READ = "2026-12-01"
_ML_ENGINEERING = Source(
    title="Stas Bekman, Machine Learning Engineering, chapter Accelerators (commit 744d01e)",
    url="https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md",
    checked=_READ,
)
_TORCH_H200 = Source(
    title="torch.cuda.get_device_properties on an NVIDIA H200",
    url="https://docs.pytorch.org/docs/stable/generated/torch.cuda.get_device_properties.html",
    checked=_READ,
)
_DEVICE_QUERY_A100 = Source(
    title="deviceQuery output of an NVIDIA A100-SXM4-80GB (5120 bit at 1,593 MHz)",
    url="https://gist.github.com/gengwg/3520df2ebf8872e5ee4818367e3a4122",
    checked=_READ,
)
_A100_40_CLOCK = Source(
    title="Table of GPU specifications (A100 SXM4 40 GB: 5120 bit at 1,215 MHz)",
    url="https://huggingface.co/spaces/lambdabrendan/Lambda-LLM-Calculator/blame/main/data/gpu_specs.csv",
    checked=_READ,
)
_HMC_B200 = Source(
    title="HMC Tech, NVIDIA B200 and B100 compared",
    url="https://hmc-tech.com/gpus/nvidia-b200-vs-nvidia-b100",
    checked=_READ,
)
_SYSRQMTS_T4 = Source(
    title="SysRqmts, NVIDIA Tesla T4", url="https://sysrqmts.com/en/gpus/nvidia/tesla/t4", checked=_READ
)
_SYSRQMTS_A10 = Source(
    title="SysRqmts, NVIDIA A10 PCIe",
    url="https://sysrqmts.com/ru/gpus/compare/nvidia-a10-pcie-vs-nvidia-quadro-rtx-4000",
    checked=_READ,
)
_GIST_A10 = Source(
    title="Table of fp16 compute and bandwidth by kimbochen",
    url="https://gist.github.com/kimbochen",
    checked=_READ,
)
_FPSBENCH_L4 = Source(
    title="FPSBench, NVIDIA L4",
    url="https://fpsbench.com/compare/gpu/nvidia-l4-vs-nvidia-tesla-m40",
    checked=_READ,
)
_SOURCECODE_L4 = Source(
    title="Source Code store, NVIDIA L4 (prints the sparse figure, halved here)",
    url="https://store.sourcecode.com/en-us/bg-bucket-compare/125/9820",
    checked=_READ,
)
_GROKIPEDIA_L4 = Source(
    title="L4 and L40S compared (prints the sparse figures, halved here)",
    url="https://grokipedia.com/page/NVIDIA_L4_vs_L40S",
    checked=_READ,
)
_NERDVANA_3090 = Source(
    title="GeForce RTX 3090 specifications",
    url="https://holynerdvana.blogspot.com/2022/10/nvidia-geforce-rtx-3090-specifications.html",
    checked=_READ,
)
_WAREDB_4090 = Source(
    title="WareDB, NVIDIA GeForce RTX 4090",
    url="https://waredb.com/processor/nvidia-geforce-rtx-4090",
    checked=_READ,
)
_NVIDIA_VOLTA = Source(
    title="NVIDIA technical blog, Programming Tensor Cores in CUDA 9",
    url="https://developer.nvidia.com/programming-tensor-cores-cuda-9-0",
    checked=_READ,
)
_CATALOG_V100 = Source(
    title="GPU catalogue of a runtime predictor (V100)",
    url="https://huggingface.co/RajBhope/gpu-runtime-predictor/blob/main/gpu_catalog.json",
    checked=_READ,
)
_XENON_V100 = Source(
    title="Xenon, Tesla Volta V100 (architecture table)",
    url="http://www.xenon.com.au/nvidia-tesla-volta-worlds-advanced-data-center-gpu/",
    checked=_READ,
)
_GA102 = Source(
    title="NVIDIA Ampere GA102 GPU Architecture, whitepaper V2",
    url="https://images.nvidia.com/aem-dam/en-zz/Solutions/geforce/ampere/pdf/"
    "NVIDIA-ampere-GA102-GPU-Architecture-Whitepaper-V1.pdf",
)
_A10_DATASHEET = Source(
    title="NVIDIA A10 datasheet", url="https://www.nvidia.com/en-us/data-center/products/a10-gpu/"
)


def _peak(
    tflops: float, fma: int, clock_mhz: float, source: Source, note: str = "", *, kind: str = ""
) -> Figure:
    return Figure(
        value=tflops * 1e12,
        kind=kind or "dense, tensor cores, fp32 accumulate",
        source=source,
        note=note,
        fma_per_clock=fma,
        clock_mhz=clock_mhz,
    )


def _fp32(tflops: float, fma: int, clock_mhz: float, source: Source, note: str = "") -> Figure:
    return _peak(tflops, fma, clock_mhz, source, note, kind="dense, no tensor cores")


def _memory(gb: float, source: Source, note: str = "") -> Figure:
    return Figure(value=gb * 1e9, kind="as sold", source=source, note=note)


def _bandwidth(gb_per_s: float, source: Source, note: str = "") -> Figure:
    return Figure(value=gb_per_s * 1e9, kind="read + write together", source=source, note=note)


def _count(value: int, source: Source, note: str = "") -> Figure:
    return Figure(value=value, kind="enabled on this card", source=source, note=note)


def _l2(size_bytes: float, source: Source, note: str = "") -> Figure:
    return Figure(value=size_bytes, kind="whole device", source=source, note=note)


_MIB = 2**20


def _volta(memory_gb: int) -> Device:
    return Device(
        name=f"Tesla V100-SXM2-{memory_gb}GB",
        short=f"V100 {memory_gb}GB",
        memory=_memory(memory_gb, _CATALOG_V100 if memory_gb == 32 else _XENON_V100),
        bandwidth=_bandwidth(900, _CATALOG_V100, "4096 bit at 877 MHz give 898"),
        multiprocessor_count=_count(80, _XENON_V100),
        l2=_l2(6144 * 1024, _XENON_V100),
        peaks={
            "fp32": _fp32(15.7, 64, 1530, _CATALOG_V100),
            "fp16": _peak(125, 512, 1530, _NVIDIA_VOLTA),
        },
    )


def _a100(memory_gb: int, bandwidth: Figure) -> Device:
    return Device(
        name=f"NVIDIA A100-SXM4-{memory_gb}GB",
        short=f"A100 {memory_gb}GB",
        memory=_memory(memory_gb, _ML_ENGINEERING if memory_gb == 80 else _A100_40_CLOCK),
        bandwidth=bandwidth,
        multiprocessor_count=_count(108, _ML_ENGINEERING),
        l2=_l2(40 * _MIB, _ML_ENGINEERING),
        peaks={
            "fp32": _fp32(19.5, 64, 1410, _ML_ENGINEERING),
            "tf32": _peak(156, 512, 1410, _ML_ENGINEERING),
            "fp16": _peak(312, 1024, 1410, _ML_ENGINEERING),
            "bf16": _peak(312, 1024, 1410, _ML_ENGINEERING),
        },
    )


_HOPPER_NOTE = "the figure belongs to 1,830 MHz; at the 1,980 MHz that the card reaches the limit is 1,071"
_HOPPER: Mapping[Precision, Figure] = {
    "fp32": _fp32(67, 128, 1980, _ML_ENGINEERING),
    "tf32": _peak(494.5, 1024, 1830, _ML_ENGINEERING),
    "fp16": _peak(989, 2048, 1830, _ML_ENGINEERING, _HOPPER_NOTE),
    "bf16": _peak(989, 2048, 1830, _ML_ENGINEERING, _HOPPER_NOTE),
    "fp8": _peak(1979, 4096, 1830, _ML_ENGINEERING),
}
_GEFORCE_NOTE = "half of the figure with fp16 accumulate, which is the one often printed"
_B200_FP32_NOTE = "148 multiprocessors at 1,980 MHz; 80 is printed too, for other boards"

DEVICES: tuple[Device, ...] = (
    _volta(16),
    _volta(32),
    Device(
        name="Tesla T4",
        short="T4",
        memory=_memory(16, _SYSRQMTS_T4),
        bandwidth=_bandwidth(320, _SYSRQMTS_T4),
        multiprocessor_count=_count(40, _SYSRQMTS_T4),
        l2=_l2(4 * _MIB, _SYSRQMTS_T4),
        peaks={
            "fp32": _fp32(8.1, 64, 1590, _SYSRQMTS_T4),
            "fp16": _peak(65, 512, 1590, _SYSRQMTS_T4, "70 W: the card seldom holds this clock"),
        },
    ),
    Device(
        name="NVIDIA A10",
        short="A10",
        memory=_memory(24, _SYSRQMTS_A10),
        bandwidth=_bandwidth(600, _SYSRQMTS_A10),
        multiprocessor_count=_count(72, _SYSRQMTS_A10),
        l2=_l2(6 * _MIB, _SYSRQMTS_A10),
        peaks={
            "fp32": _fp32(31.2, 128, 1695, _SYSRQMTS_A10),
            "tf32": _peak(62.5, 256, 1695, _A10_DATASHEET),
            "fp16": _peak(125, 512, 1695, _GIST_A10),
            "bf16": _peak(125, 512, 1695, _A10_DATASHEET),
        },
    ),
    Device(
        name="NVIDIA L4",
        short="L4",
        memory=_memory(24, _FPSBENCH_L4),
        bandwidth=_bandwidth(300, _FPSBENCH_L4),
        multiprocessor_count=_count(
            58, _FPSBENCH_L4, "7,424 cores of 128 each; the same page prints 60, the count of the full chip"
        ),
        l2=_l2(48 * _MIB, _FPSBENCH_L4),
        peaks={
            "fp32": _fp32(30.3, 128, 2040, _FPSBENCH_L4),
            "tf32": _peak(60, 256, 2040, _SOURCECODE_L4, "120 with sparsity"),
            "fp16": _peak(121, 512, 2040, _GROKIPEDIA_L4, "242 with sparsity"),
            "bf16": _peak(121, 512, 2040, _GROKIPEDIA_L4, "read from fp16, whose rate tensor cores share"),
            "fp8": _peak(242, 1024, 2040, _GROKIPEDIA_L4, "485 with sparsity"),
        },
    ),
    Device(
        name="NVIDIA GeForce RTX 3090",
        short="RTX 3090",
        memory=_memory(24, _NERDVANA_3090),
        bandwidth=_bandwidth(936, _NERDVANA_3090),
        multiprocessor_count=_count(82, _NERDVANA_3090),
        l2=_l2(6 * _MIB, _NERDVANA_3090),
        peaks={
            "fp32": _fp32(35.6, 128, 1695, _NERDVANA_3090),
            "tf32": _peak(35.6, 128, 1695, _GA102),
            "fp16": _peak(71, 256, 1695, _NERDVANA_3090, f"{_GEFORCE_NOTE} (142)"),
            "bf16": _peak(71, 256, 1695, _GA102),
        },
    ),
    Device(
        name="NVIDIA GeForce RTX 4090",
        short="RTX 4090",
        memory=_memory(24, _WAREDB_4090),
        bandwidth=_bandwidth(1008, _WAREDB_4090),
        multiprocessor_count=_count(128, _WAREDB_4090, "16,384 cores of 128 each"),
        l2=_l2(72 * _MIB, _WAREDB_4090),
        peaks={
            "fp32": _fp32(82.6, 128, 2520, _WAREDB_4090),
            "tf32": _peak(82.6, 128, 2520, _WAREDB_4090),
            "fp16": _peak(165.2, 256, 2520, _WAREDB_4090, f"{_GEFORCE_NOTE} (330)"),
            "bf16": _peak(165.2, 256, 2520, _WAREDB_4090),
            "fp8": _peak(330.3, 512, 2520, _WAREDB_4090, f"{_GEFORCE_NOTE} (661)"),
        },
    ),
    _a100(40, _bandwidth(1555, _A100_40_CLOCK, "clock · bus · 2")),
    _a100(80, _bandwidth(2039, _DEVICE_QUERY_A100, "clock · bus · 2; 2,000 is printed, rounded")),
    Device(
        name="NVIDIA H100 80GB HBM3",
        short="H100 SXM",
        memory=_memory(80, _ML_ENGINEERING),
        bandwidth=_bandwidth(3350, _ML_ENGINEERING),
        multiprocessor_count=_count(132, _ML_ENGINEERING),
        l2=_l2(50 * _MIB, _ML_ENGINEERING),
        peaks=_HOPPER,
    ),
    Device(
        name="NVIDIA H200",
        short="H200",
        memory=_memory(141, _ML_ENGINEERING),
        bandwidth=_bandwidth(4800, _ML_ENGINEERING, "6,016 bit at 3,201 MHz, as torch reports, give 4,814"),
        multiprocessor_count=_count(132, _TORCH_H200),
        l2=_l2(60 * _MIB, _TORCH_H200, "50 MiB is printed for H100 and H200 alike; torch reports 60 here"),
        peaks=_HOPPER,
    ),
    Device(
        name="NVIDIA B200",
        short="B200",
        memory=_memory(180, _ML_ENGINEERING, "192 is printed too"),
        bandwidth=_bandwidth(7700, _HMC_B200, "HGX board; 8,000 is printed too, for other boards"),
        multiprocessor_count=_count(148, _HMC_B200),
        peaks={
            "fp32": _fp32(75, 128, 1980, _HMC_B200, _B200_FP32_NOTE),
            "tf32": _peak(1125, 2048, 1856, _ML_ENGINEERING),
            "fp16": _peak(2250, 4096, 1856, _ML_ENGINEERING),
            "bf16": _peak(2250, 4096, 1856, _ML_ENGINEERING),
            "fp8": _peak(4500, 8192, 1856, _ML_ENGINEERING),
        },
    ),
)
"""Every record, from the oldest card to the newest."""

_BY_NAME: dict[str, Device] = {name: record for record in DEVICES for name in (record.name, record.short)}


def find(name: str) -> Device | None:
    """Look a device up by its exact name; None where there is no record.

    Parameters
    ----------
    name
        What `torch.cuda.get_device_name()` gives, or a listed short name.

    Examples
    --------
    >>> find("NVIDIA H100 PCIe") is None
    True
    """
    return _BY_NAME.get(name) if isinstance(name, str) else None


def device(name: str) -> Device:
    """Look a device up by its exact name.

    Parameters
    ----------
    name
        What `torch.cuda.get_device_name()` gives ("NVIDIA H200"), or a listed short name ("H200").

    Raises
    ------
    UnknownDeviceError
        No record has this name. A card that shares a part of its name with another is another card.

    Examples
    --------
    >>> device("NVIDIA A100-SXM4-80GB").short
    'A100 80GB'
    >>> device("NVIDIA H100 PCIe")
    Traceback (most recent call last):
    gpucourse.hardware.UnknownDeviceError: no datasheet record of 'NVIDIA H100 PCIe'; the nearest ...
    """
    found = find(name)
    if found is None:
        near = ", ".join(repr(one) for one in difflib.get_close_matches(str(name), _BY_NAME, n=3, cutoff=0.0))
        raise UnknownDeviceError(
            f"no datasheet record of {name!r}; the nearest names are {near}, and names match exactly, because "
            "a neighbour's figures would be wrong. Everything else runs without a record; "
            "gpucourse.roofline.measure_roofline measures this card's own ceilings"
        )
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Tables:
    markup: str

    def _repr_html_(self) -> str:
        return self.markup

    def __repr__(self) -> str:
        return f"Datasheet figures of {len(DEVICES)} GPUs"


def reference_tables() -> _Tables:
    """Lay out all figures for the page: an overview of all cards, then a table with sources for each.

    Returns
    -------
    object
        Shows itself as HTML in a notebook.
    """
    rows = [
        [
            record.short,
            *(f"{record.peaks[p].value / 1e12:g}" if p in record.peaks else "–" for p in PRECISIONS),
            f"{record.bandwidth_bytes_per_s / 1e9:,.0f}",
            f"{record.multiprocessors}",
        ]
        for record in DEVICES
    ]
    overview = html.table(
        ["GPU", *PRECISIONS, "GB/s", "SMs"], rows, "Dense TFLOP/s, GB/s and multiprocessors"
    )
    label = "Overview of all GPUs"
    parts = [
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">{overview}</div>',
        "<p>Every figure with what it counts and where it was read:</p>",
    ]
    for record in DEVICES:
        # Two columns, so that a phone shows them without scrolling.
        lines = [[html.Raw(_value(*line)), html.Raw(_source(line[2]))] for line in record.figures()]
        body = html.table(["Figure", "Read in"], lines, record.name)
        parts.append(f"<details><summary>{html.escape(record.name)}</summary>{body}</details>")
    return _Tables("".join(parts))


def _value(what: str, text: str, figure: Figure) -> str:
    note = f". {figure.note[0].upper()}{figure.note[1:]}" if figure.note else ""
    return f"{html.escape(f'{what}: {text}')}<br><small>{html.escape(figure.kind + note)}</small>"


def _source(figure: Figure) -> str:
    link = f'<a href="{html.escape(figure.source.url)}">{html.escape(figure.source.title)}</a>'
    return f"{link}<br><small>{html.escape(figure.source.status)}</small>"
