"""``gpucourse predict``: what a model's training step needs in memory, without a GPU, as text or as JSON.

The model is named by a module and an expression in it, ``package.module:factory`` or ``file.py:Net(width=64)``: a
module, or a function that makes one. Its batch is named by shapes, and dtypes where they are not float32:

- ``--batch 32x3x224x224 32:int64``: positional arguments;
- ``--batch input_ids=16x1024:int64 labels=16x1024:int64``: named ones.

The JSON is one object, ``"schema": "gpucourse.predict/1"``: ``target`` and ``batch`` as given, ``prediction`` as
`StepMemory.as_dict` gives it, and ``device``: null, or its name, ``device_bytes``, ``reserve``, ``budget_bytes``,
``fits``, and ``over``: the allocated peak of one sample more, where ``--microbatch largest`` was asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpucourse import hardware
from gpucourse.microbatch_search import budget_bytes, fits, largest_microbatch, with_samples
from gpucourse.step_memory import (
    OTHER_WORKSPACE_BYTES,
    WORKSPACE_BYTES,
    Card,
    Precision,
    StepMemory,
    StepMemoryError,
    predict_step_memory,
)
from gpucourse.units import format_bytes

__all__ = ["SCHEMA", "AskedWronglyError", "add", "loss_named", "parse_batch", "run"]

SCHEMA = "gpucourse.predict/1"
LOSSES = ("own", "mean", "cross-entropy")
_LARGE_WORKSPACES = ("H100 SXM", "H200", "B200")  # compute capability 9.0 and 10.0
_THREADS = {"T4": 1024, "A10": 1536, "L4": 1536, "RTX 3090": 1536, "RTX 4090": 1536}  # of others: `Card`'s


class AskedWronglyError(StepMemoryError, ValueError):
    """An argument of the command is none of what it can be."""


def add(commands: Any) -> None:
    """Add the command to the parser's commands.

    Parameters
    ----------
    commands
        What ``ArgumentParser.add_subparsers`` returned.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        "predict",
        help="predict a model's training memory without a GPU",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        '  gpucourse predict "torch.nn:Linear(4096, 4096)" --batch 64x4096 --loss mean --device L4\n'
        "  gpucourse predict \"timm:create_model('resnet50')\" --batch 32x3x224x224 32:int64 --loss cross-entropy\n"
        '  gpucourse predict "transformers:GPT2LMHeadModel(GPT2Config())" --precision bf16 \\\n'
        "      --batch input_ids=8x1024:int64 labels=8x1024:int64 --device L4 --microbatch largest",
    )
    parser.add_argument(
        "target",
        help="MODULE:EXPRESSION or FILE.py:EXPRESSION: a module, or a function of no arguments that makes one; the "
        "names in the expression are the module's",
    )
    parser.add_argument(
        "--batch",
        nargs="+",
        required=True,
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="one microbatch as the model takes it: 16x1024 is a float32 tensor, 16x1024:int64 one of integers, "
        "input_ids=16x1024:int64 a named argument; NAME=true, false, none or a number is passed as it is",
    )
    parser.add_argument(
        "--loss",
        default="own",
        metavar="LOSS",
        help="own: the model gives it, as its output or the loss of its output (default); mean: of the model's first "
        "output; cross-entropy: of the first output with the last tensor of --batch as targets; or MODULE:FUNCTION, "
        "called with the model and the batch",
    )
    parser.add_argument(
        "--optimizer",
        default="AdamW",
        metavar="OPTIMIZER",
        help="a class in torch.optim (default: AdamW), none, or MODULE:FUNCTION of the parameters",
    )
    parser.add_argument(
        "--precision", choices=("fp32", "tf32", "fp16", "bf16"), default="fp32", help="default: fp32"
    )
    parser.add_argument(
        "--accumulation", type=int, default=1, metavar="N", help="microbatches a step (default: 1)"
    )
    parser.add_argument(
        "--compile",
        choices=("model", "loss"),
        help="the step is compiled: the model alone, or model and loss as one function",
    )
    parser.add_argument("--clip-norm", type=float, metavar="NORM", help="gradients are clipped to this norm")
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="a GPU on record, such as L4, or an amount such as 24GB: says whether the step fits",
    )
    parser.add_argument(
        "--reserve",
        type=float,
        default=0.10,
        metavar="PART",
        help="part of the device that is left free (default: 0.10); with 0, what the allocator reserves decides",
    )
    parser.add_argument(
        "--microbatch",
        metavar="N",
        help='samples, instead of the batch\'s own; "largest" finds the most that fit on --device',
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Predict and print; give the exit status (0 done, 1 failed, 2 asked for wrongly).

    Parameters
    ----------
    options
        What the parser read.
    """
    try:
        size = None if options.device is None else _device(options.device)
        with contextlib.redirect_stdout(sys.stderr):  # what the model's code prints
            found, over = _predicted(options, size)
        budget = None if size is None else budget_bytes(size[1], options.reserve)
    except (AskedWronglyError, hardware.UnknownDeviceError) as error:
        print(f"gpucourse predict: {error}", file=sys.stderr)
        return 2
    except (StepMemoryError, ValueError, TypeError) as error:
        print(f"gpucourse predict: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(_as_dict(options, found, over, size, budget), indent=1))
    else:
        print("\n".join([str(found), *_verdict(options, found, over, size, budget)]))
    return 0


def _predicted(
    options: argparse.Namespace, size: tuple[str, int] | None
) -> tuple[StepMemory, StepMemory | None]:
    model = _model(options.target)
    batch = parse_batch(options.batch)
    loss = loss_named(options.loss)
    optimizer: Any = options.optimizer
    if optimizer.lower() == "none":
        optimizer = None
    elif ":" in optimizer:
        optimizer = _named(optimizer)
    precision: Precision = options.precision
    large = size is None or size[0] in _LARGE_WORKSPACES

    def predict(samples: int | None) -> StepMemory:
        return predict_step_memory(
            model,
            batch if samples is None else with_samples(batch, samples),
            loss=loss,
            optimizer=optimizer,
            precision=precision,
            accumulation=options.accumulation,
            compile="model" if options.compile == "model" else options.compile == "loss",
            clip_norm=options.clip_norm,
            workspace_bytes=WORKSPACE_BYTES if large else OTHER_WORKSPACE_BYTES,
            card=_card(size),
        )

    if options.microbatch == "largest":
        if size is None:
            raise AskedWronglyError("--microbatch largest needs a --device to fit into, such as L4 or 24GB")
        largest = largest_microbatch(predict, device_bytes=size[1], reserve=options.reserve)
        return largest.fits, largest.over
    if options.microbatch is None:
        return predict(None), None
    if not options.microbatch.isdecimal() or int(options.microbatch) < 1:
        raise AskedWronglyError(f'--microbatch is {options.microbatch!r}; wanted 1 or more, or "largest"')
    return predict(int(options.microbatch)), None


# ----------------------------------------------------------------------------------------------- what was named


class _Names(dict[str, Any]):
    """A module's names, those that it makes when asked for included."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__()
        self.module = module

    def __missing__(self, name: str) -> Any:
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise KeyError(name) from None


def _named(target: str, what: str = "a function") -> Any:
    """Give what MODULE:EXPRESSION names."""
    place, colon, expression = target.partition(":")
    if not (colon and place and expression.strip()):
        raise AskedWronglyError(f"{target!r} names no {what[2:]}; wanted MODULE:NAME or FILE.py:NAME")
    module = _module(place)
    try:
        return eval(expression.strip(), {"__builtins__": __builtins__}, _Names(module))
    except NameError as error:
        raise AskedWronglyError(f"{place} has no {error.name!r}, which {expression!r} names") from error
    except SyntaxError as error:
        raise AskedWronglyError(f"{expression!r} is no expression of Python: {error.msg}") from error


def _module(place: str) -> types.ModuleType:
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise AskedWronglyError(f"there is no file {place}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise AskedWronglyError(f"{place} cannot be loaded as a module of Python")
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        sys.path.insert(0, str(path.parent))  # as where Python runs the file
        spec.loader.exec_module(module)
        return module
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise AskedWronglyError(
            f"{place} cannot be imported ({error}): install it beside torch, or name a file, FILE.py:NAME"
        ) from error


def _model(target: str) -> Callable[[], Any]:
    place, colon, expression = target.partition(":")
    if not (colon and place and expression.strip()):
        raise AskedWronglyError(f"{target!r} names no model; wanted MODULE:FACTORY, such as mynet.py:make")
    _module(place)  # what is wrong with it is said before anything is made

    def make() -> Any:
        import torch

        found = _named(target, "a model")
        return found if isinstance(found, torch.nn.Module) or not callable(found) else found()

    return make


def parse_batch(given: list[str]) -> Any:
    """Read a batch: a tuple of tensors without data, or a dict where they have names.

    Parameters
    ----------
    given
        ``[NAME=]SHAPE[:DTYPE]`` each.

    Raises
    ------
    AskedWronglyError
        One is none of these, or some have names and some have none.

    Examples
    --------
    >>> [tuple(t.shape) for t in parse_batch(["2x3", "2:int64"])]
    [(2, 3), (2,)]
    >>> batch = parse_batch(["tokens=2x8:int64", "use_cache=false"])
    >>> batch["tokens"].dtype, batch["use_cache"]
    (torch.int64, False)
    """
    named = [re.fullmatch(r"([A-Za-z_]\w*)=(.*)", item) for item in given]
    if not any(named):
        return tuple(_tensor(item) for item in given)
    for item, match in zip(given, named, strict=True):
        if match is None:
            raise AskedWronglyError(
                f"--batch has names and {item!r} has none: name each tensor, or none of them"
            )
    return {match[1]: _value(match[2]) for match in named if match is not None}


def _value(text: str) -> Any:
    plain = {"true": True, "false": False, "none": None}
    if text.lower() in plain:
        return plain[text.lower()]
    if re.fullmatch(r"-?\d*\.\d+", text):
        return float(text)
    return _tensor(text)


def _tensor(text: str) -> Any:
    import torch

    shape, colon, kind = text.partition(":")
    dtype = getattr(torch, kind if colon else "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise AskedWronglyError(f"{text!r}: torch has no dtype {kind!r}; wanted float32, int64, bfloat16 …")
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        raise AskedWronglyError(
            f"{text!r} is no tensor; wanted SHAPE or SHAPE:DTYPE, such as 16x1024 or 16x1024:int64"
        )
    return torch.empty([int(length) for length in shape.split("x")], dtype=dtype, device="meta")


def loss_named(name: str) -> Callable[..., Any] | None:
    """Give the loss that a name stands for; None where the model gives its own.

    Parameters
    ----------
    name
        One of `LOSSES`, or ``MODULE:FUNCTION``.

    Raises
    ------
    AskedWronglyError
        It is none.
    """
    if ":" in name:
        found = _named(name, "a loss")
        if not callable(found):
            raise AskedWronglyError(
                f"--loss {name} is {found!r}; wanted a function of the model and the batch"
            )
        function: Callable[..., Any] = found
        return function
    if name not in LOSSES:
        raise AskedWronglyError(f"--loss is {name!r}; wanted {', '.join(LOSSES)} or MODULE:FUNCTION")
    return {"own": None, "mean": _mean, "cross-entropy": _cross_entropy}[name]


def _first_output(made: Any) -> Any:
    """Take the logits of a model's output, or its first tensor."""
    import torch
    from torch.utils._pytree import tree_leaves

    if getattr(made, "logits", None) is not None:
        return made.logits
    return next((leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)), made)


def _mean(model: Any, *args: Any, **kwargs: Any) -> Any:
    return _first_output(model(*args, **kwargs)).float().mean()


def _cross_entropy(model: Any, *args: Any, **kwargs: Any) -> Any:
    import torch.nn.functional as F  # noqa: N812 - its usual name

    if args:
        *args_left, target = args
    else:
        args_left, target = [], kwargs.pop(list(kwargs)[-1])
    logits = _first_output(model(*args_left, **kwargs))
    if logits.shape[:-1] == target.shape:  # classes along the last axis
        return F.cross_entropy(logits.flatten(0, -2), target.flatten())
    return F.cross_entropy(logits, target)


def _card(size: tuple[str, int] | None) -> Card:
    record = None if size is None else hardware.find(size[0])
    if record is None:
        return Card()
    return Card(multiprocessors=record.multiprocessors, threads=_THREADS.get(record.short, Card().threads))


def _device(text: str) -> tuple[str, int]:
    """Give the short name and the bytes of a device on record, or of an amount such as 24GB."""
    amount = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GB|GiB)", text)
    if amount:
        return text, round(float(amount[1]) * (10**9 if amount[2] == "GB" else 2**30))
    found = hardware.device(text)
    return found.short, round(found.memory.value)


# --------------------------------------------------------------------------------------------------- what is said


def _verdict(
    options: argparse.Namespace,
    found: StepMemory,
    over: StepMemory | None,
    size: tuple[str, int] | None,
    budget: int | None,
) -> list[str]:
    if size is None or budget is None:
        return []
    kept = f"{options.reserve:.0%} in reserve" if options.reserve else "nothing in reserve"
    decides = found.allocated_bytes if options.reserve else found.reserved_bytes
    left = budget - decides
    what = "allocated" if options.reserve else "reserved"
    if fits(found, size[1], options.reserve):
        # With no reserve it may fit although more is reserved without a limit: the cache is given back at the cap.
        told = (
            f"fits, {format_bytes(left)} to spare"
            if left >= 0
            else "fits, once cached segments are given back"
        )
    else:
        told = f"does not fit: {format_bytes(abs(left))} {what} over" if left < 0 else "does not fit"
    lines = [f"on {size[0]} ({format_bytes(size[1])}, {kept}): {told}"]
    if options.microbatch == "largest":
        nearest = "" if over is None else f"; {over.microbatch} needs {format_bytes(over.allocated_bytes)}"
        lines.append(f"largest microbatch that fits: {found.microbatch}{nearest}")
    return lines


def _as_dict(
    options: argparse.Namespace,
    found: StepMemory,
    over: StepMemory | None,
    size: tuple[str, int] | None,
    budget: int | None,
) -> dict[str, Any]:
    device = None
    if size is not None:
        device = {
            "name": size[0],
            "device_bytes": size[1],
            "reserve": options.reserve,
            "budget_bytes": budget,
            "fits": fits(found, size[1], options.reserve),
            "over": None if over is None else over.allocated_bytes,
        }
    return {
        "schema": SCHEMA,
        "target": options.target,
        "batch": options.batch,
        "prediction": found.as_dict(),
        "device": device,
    }
