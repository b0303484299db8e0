"""What this machine is: the conditions that every measurement is printed with.

>>> Environment(gpu="NVIDIA H200", torch="2.11.0", cuda="13.0").line()
'NVIDIA H200, torch 2.11.0, CUDA 13.0'
"""

from __future__ import annotations

import dataclasses
import functools
import platform
import subprocess
from typing import Any

__all__ = ["Environment", "NoGPUError", "cuda_available", "require_cuda"]


class NoGPUError(RuntimeError):
    """A CUDA device is needed and this process has none; the message says what torch sees."""


@functools.cache
def _torch_state() -> str:
    """Say in words why there is no CUDA device here, or "" where there is one."""
    try:
        import torch
    except ModuleNotFoundError as error:
        return "torch is not installed" if error.name == "torch" else f"torch cannot be imported ({error})"
    except (ImportError, OSError) as error:  # a shared library that is missing or of another system
        return f"torch cannot be imported ({error})"
    if not hasattr(torch, "version"):
        return "torch is an empty folder, not the package"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no usable GPU or driver"
    return ""


def cuda_available() -> bool:
    """Whether torch is installed here and sees a CUDA device (False without torch, too)."""
    return not _torch_state()


def require_cuda(what: str) -> None:
    """Raise `NoGPUError` where there is no CUDA device.

    Parameters
    ----------
    what
        What needs the device, for the message: "time_cuda", "trace".
    """
    state = _torch_state()
    if state:
        raise NoGPUError(
            f"{what} needs a CUDA device: {state}. Run it on a CUDA machine; "
            "`gpucourse doctor` says what this one can do."
        )


@functools.cache
def _nvidia_smi(query: str, index: int | str) -> str | None:
    """Ask the driver's own tool for one value of one device; None where it does not answer."""
    try:
        out = subprocess.run(
            ["nvidia-smi", f"--id={index}", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    value = out.stdout.strip()
    return value if value and not value.startswith("[") else None


def _of_driver(query: str, properties: Any, index: int) -> str | None:
    """Ask the driver's tool about torch's device; it counts otherwise than CUDA does, so by UUID if there is one.

    CUDA puts the fastest device first and hides what ``CUDA_VISIBLE_DEVICES`` leaves out; the tool does neither.
    """
    uuid = getattr(properties, "uuid", None)
    found = _nvidia_smi(query, f"GPU-{uuid}") if uuid is not None else None
    return found or _nvidia_smi(query, index)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The hardware and software that a number was measured on; None is "unavailable", never 0.

    Attributes
    ----------
    gpu
        Exactly what ``torch.cuda.get_device_name()`` gives.
    memory_bytes
        All memory of the device, in bytes, as the driver reports it to CUDA.
    multiprocessors
        Number of streaming multiprocessors.
    l2_bytes
        Size of the L2 cache in bytes.
    capability
        CUDA compute capability, such as "9.0".
    driver, cuda, torch, python, platform
        Versions as each reports itself.
    max_sm_clock_mhz
        The highest clock of the multiprocessors that the driver allows, in MHz.
    """

    gpu: str | None = None
    memory_bytes: int | None = None
    multiprocessors: int | None = None
    l2_bytes: int | None = None
    capability: str | None = None
    driver: str | None = None
    cuda: str | None = None
    torch: str | None = None
    python: str | None = None
    platform: str | None = None
    max_sm_clock_mhz: int | None = None

    @classmethod
    def capture(cls) -> Environment:
        """Read this machine; works without torch and without a GPU."""
        facts: dict[str, Any] = {
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
        }
        try:
            import torch
        except (ImportError, OSError):
            return cls(**facts)
        if not hasattr(torch, "version"):
            return cls(**facts)
        facts["torch"] = torch.__version__
        facts["cuda"] = torch.version.cuda
        if cuda_available():
            index = torch.cuda.current_device()
            properties = torch.cuda.get_device_properties(index)
            clock = _of_driver("clocks.max.sm", properties, index)
            facts |= {
                "gpu": torch.cuda.get_device_name(index),
                "memory_bytes": int(properties.total_memory),
                "multiprocessors": int(properties.multi_processor_count),
                "l2_bytes": int(getattr(properties, "L2_cache_size", 0)) or None,
                "capability": f"{properties.major}.{properties.minor}",
                "driver": _of_driver("driver_version", properties, index),
                "max_sm_clock_mhz": int(clock) if clock and clock.isdigit() else None,
            }
        return cls(**facts)

    def line(self) -> str:
        """Give the conditions in one line, leaving out what is unavailable."""
        parts = [self.gpu or "no GPU"]
        for label, value in (("torch", self.torch), ("CUDA", self.cuda), ("driver", self.driver)):
            if value:
                parts.append(f"{label} {value}")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Give the fields as plain data, in the order of their declaration."""
        return dataclasses.asdict(self)
