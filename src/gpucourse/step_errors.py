"""Why no prediction can be made, in words that say what was found, what was wanted and what to do next."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpucourse.compiled_program import CompilerError
from gpucourse.stand_in import device

__all__ = [
    "BatchError",
    "ModelError",
    "StepFailedError",
    "StepMemoryError",
    "UnseenError",
    "errors_told",
]


class StepMemoryError(Exception):
    """No prediction can be made."""


class ModelError(StepMemoryError, ValueError):
    """The model is none that a training step can be predicted for."""


class BatchError(StepMemoryError, ValueError):
    """The batch is none that a step can take."""


class UnseenError(StepMemoryError, RuntimeError):
    """The step depends on values or on code that a trace without data cannot see."""


class StepFailedError(StepMemoryError, RuntimeError):
    """The step raised an error of its own; it is the cause of this one."""


@contextmanager
def errors_told() -> Iterator[None]:
    """Turn what a trace without data cannot see into words.

    Raises
    ------
    UnseenError
        Instead of torch's error about values, shapes or operators without a form for tensors without data.
    StepFailedError
        Instead of any other error that comes from the step.
    """
    from torch._subclasses import fake_tensor

    unseen = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
        fake_tensor.UnsupportedFakeTensorException,
        NotImplementedError,
    )
    try:
        yield
    except StepMemoryError:
        raise
    except unseen as error:
        raise UnseenError(f"{_line_of(error)} {_reason(error)}") from error
    except CompilerError as error:
        raise UnseenError(_compiler_failed(error)) from error
    except (TypeError, ValueError) as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename in _own():
            raise  # a wrong argument
        raise StepFailedError(
            f"the step failed at {_line_of(error)} {type(error).__name__}: {error}"
        ) from error
    except Exception as error:
        text = str(error)
        if type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
            raise UnseenError(_compiler_failed(error)) from error
        if any(told in text for told in ("not compiled with CUDA", "NVIDIA driver", "No CUDA GPUs")):
            raise UnseenError(
                f"{_line_of(error)} asks the driver for something ({text.splitlines()[0]}), and a prediction has none: "
                "leave calls of torch.cuda out of what is predicted"
            ) from error
        if "data pointer" in text or ".numpy() is not supported" in text:
            raise UnseenError(f"{_line_of(error)} reads a tensor's values, and a trace has none") from error
        if "same device" in text or "different devices" in text:
            raise StepFailedError(
                f"{_line_of(error)} brings a tensor of the host together with one on the device ('{device()}' "
                "stands for the GPU here): make it there, with device=x.device"
            ) from error
        raise StepFailedError(
            f"the step failed at {_line_of(error)} {type(error).__name__}: {text}"
        ) from error


def _compiler_failed(error: Exception) -> str:
    import torch

    said = str(error).strip().splitlines() or [type(error).__name__]
    return (
        f"the compiler of torch {torch.__version__} could not be run without a GPU ({said[0]}): measure two small "
        "microbatches of the compiled step on the device and give them to calibrate_step_memory; an eager prediction "
        "says nothing of a compiled peak"
    )


def _reason(error: Exception) -> str:
    from torch._subclasses import fake_tensor

    operator = str(getattr(error, "func", error))
    if isinstance(error, fake_tensor.DataDependentOutputException):
        return (
            f"asks for a value ({operator}): a trace without data has none, so it cannot see which way the step goes. "
            "Take the branch out of the step, or predict each way as a model of its own"
        )
    if isinstance(error, fake_tensor.DynamicOutputShapeException):
        return (
            f"makes a tensor whose shape depends on values ({operator}): its bytes cannot be seen without data. "
            "Use a form of fixed shape (torch.where, a mask that multiplies)"
        )
    said = str(error).strip().splitlines() or [type(error).__name__]
    return f"uses what cannot be traced without data: {said[0]}"


def _line_of(error: BaseException) -> str:
    """Name the innermost line that is neither torch's nor ours."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename.replace("\\", "/") and frame.filename not in _own()
    ]
    if not frames:
        return "the step:"
    last = frames[-1]
    return f"{last.filename}:{last.lineno} ({last.line or last.name}):"


_MODULES = (
    "compiled_program",
    "cuda_autocast",
    "placed_model",
    "stand_in",
    "step_errors",
    "step_memory",
    "storage_trace",
    "traced_step",
)


@functools.cache
def _own() -> frozenset[str]:
    return frozenset(str(Path(__file__).with_name(f"{name}.py")) for name in _MODULES)
