"""``gpucourse time``: time a snippet of torch on the device's clock, as text, as JSON and as a picture.

The JSON is one object, ``"schema": "gpucourse.time/1"``:

- ``snippet``, ``setup``: what was run, as given;
- ``median_ms``, ``iqr_ms``, ``samples_ms``: the device time of one call (the host's where ``device`` is "cpu");
- ``elapsed_ms``, ``host_ms``: one call as Python launches it, and the host's part of it;
- ``launch_bound``, ``noisy``, ``throttled``, ``escaped``, ``arguments_changed``, ``arguments_restored``: booleans;
- ``method``, ``l2``, ``device``, ``remarks``: how it was measured, and what else to know;
- ``arguments``: shape and dtype of each tensor that the snippet names;
- ``streams``: the other streams that it used; ``left_bytes``: what each call leaves allocated;
- ``clock_mhz``: before and after; ``environment``: GPU, driver, CUDA, torch, as `Environment.as_dict` gives them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import json
import os
import sys
import traceback
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gpucourse.commands.picture import picture, save
from gpucourse.commands.seconds import seconds
from gpucourse.cuda_events import Timing, time_cuda
from gpucourse.environment import NoGPUError, require_cuda
from gpucourse.units import format_time_ms

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SCHEMA", "add", "draw", "run"]

SCHEMA = "gpucourse.time/1"
SNIPPET, SETUP = "the snippet", "--setup"  # also the file names that tracebacks carry


def add(commands: Any) -> None:
    """Add the command to the parser's commands.

    Parameters
    ----------
    commands
        What ``ArgumentParser.add_subparsers`` returned.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        "time",
        help="time a snippet of torch on the device's clock",
        epilog='example: gpucourse time "x @ x" --setup "x = torch.randn(2048, 2048, device=\'cuda\')". A snippet '
        'that begins with a dash comes last, after two: gpucourse time --setup "x = torch.ones(3)" -- "-x"',
    )
    parser.add_argument(
        "snippet",
        help="statements to time; torch is imported, each call begins with the names as --setup left them, and "
        "what it prints goes to standard error",
    )
    parser.add_argument(
        "--setup", default="", metavar="CODE", help="statements that run once before, outside the time"
    )
    parser.add_argument(
        "--l2",
        choices=("warm", "cold"),
        default="warm",
        help="leave the L2 as the call before left it, or flush it before each (default: warm)",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu times the host instead, and says so"
    )
    parser.add_argument(
        "--max-seconds",
        type=functools.partial(seconds, zero=False),
        default=0.5,
        metavar="S",
        help="stop sampling after so many seconds (default: 0.5)",
    )
    parser.add_argument("--json", action="store_true", help="write JSON, with every sample")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw the samples into an image file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Time the snippet, print, draw; give the exit status (0 done, 1 failed, 2 asked for wrongly).

    Parameters
    ----------
    options
        What the parser read.
    """
    codes = []
    for name, text in ((SNIPPET, options.snippet), (SETUP, options.setup)):
        try:
            codes.append(compile(text, name, "exec"))
        except (SyntaxError, ValueError) as error:  # ValueError: null bytes
            return _fail(_syntax(name, text, error), 2)
        except (RecursionError, MemoryError):
            return _fail(f"{name} is nested too deeply for Python to compile it", 2)
    snippet, setup = codes
    if not ast.parse(options.snippet).body:
        return _fail('the snippet is empty: give statements to time, such as "x @ x"', 2)
    try:
        if options.device == "cuda":
            require_cuda("this command")
        timing = _timed(snippet, setup, options)
    except NoGPUError as error:
        return _fail(f"{error} Or time the host with --device cpu.", 1)
    except KeyboardInterrupt:
        raise
    except (
        BaseException
    ) as error:  # whatever the given code raises, SystemExit and errors of its own kinds included
        return _fail(_raised(error, {SNIPPET: options.snippet, SETUP: options.setup}), 1)
    if options.json:
        print(json.dumps(_as_dict(timing, options), indent=1))
    else:
        print("\n".join(_lines(timing)))
    if options.plot is not None:
        if sys.stdout is not None:  # as where the shell has closed it
            sys.stdout.flush()
        return 0 if save("time", functools.partial(draw, timing, options.snippet), options.plot) else 1
    return 0


def _fail(message: str, status: int) -> int:
    print(f"gpucourse time: {message}", file=sys.stderr)
    return status


def _syntax(name: str, text: str, error: SyntaxError | ValueError) -> str:
    """Name the line that does not compile, with a mark under the place."""
    if not isinstance(error, SyntaxError) or error.lineno is None:
        return f"{name} is not Python: {error}"
    lines = text.splitlines()  # the compiler's later stages leave the line out of the error
    given = lines[error.lineno - 1] if error.lineno <= len(lines) else ""
    line = (error.text or given).rstrip("\n")
    mark = f"\n  {' ' * max(0, (error.offset or 1) - 1)}^" if line else ""
    return f"{name} is not Python: line {error.lineno}: {error.msg}\n  {line}{mark}"


def _raised(error: BaseException, texts: dict[str, str]) -> str:
    """Say what was raised, and where in the given code; an error of the timer's own says it by itself."""
    said = traceback.format_exception_only(error)[-1].strip()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in texts and frame.lineno is not None:
            lines = texts[frame.filename].splitlines()
            return f"{frame.filename} raised {said}\n  line {frame.lineno}: {lines[frame.lineno - 1].strip()}"
    return str(error) or said


def _names(code: types.CodeType) -> Iterator[str]:
    """Give the names that code uses, functions and comprehensions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


@contextlib.contextmanager
def _output_aside() -> Iterator[None]:
    """Send to standard error what the given code prints, by whatever way: standard output is the result's alone.

    A kernel's ``printf``, a library or a program that the code starts writes to the file, not to Python's stream.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            if sys.__stdout__ is not None:
                sys.__stdout__.flush()
            kept = os.dup(1)
        except (OSError, ValueError):  # closed by the shell
            yield
            return
        stack.callback(os.close, kept)
        try:
            os.dup2(2, 1)
        except OSError:  # there is no standard error either
            yield
            return
        stack.callback(os.dup2, kept, 1)
        yield


def _timed(snippet: types.CodeType, setup: types.CodeType, options: argparse.Namespace) -> Timing:
    import torch

    names: dict[str, Any] = {"torch": torch, "__name__": "__main__"}
    with _output_aside():
        exec(setup, names)
    given = [
        names[name] for name in dict.fromkeys(_names(snippet)) if isinstance(names.get(name), torch.Tensor)
    ]

    def call(*_tensors: Any) -> None:
        # Its own names each time: with "x = torch.cat([x, x])" the thousandth call would not fit into any memory.
        fresh = dict(names)
        exec(snippet, fresh)
        fresh.clear()  # a function that the snippet defines refers back to them, and so would keep its tensors

    # The tensors go in as arguments, so that the result names them and their values are put back.
    with _output_aside():
        return time_cuda(call, *given, device=options.device, l2=options.l2, max_seconds=options.max_seconds)


def _lines(timing: Timing) -> list[str]:
    """Lay the result out for people, a fact a line."""
    device = timing.device == "cuda"
    samples = len(timing.samples_ms)
    spread = f"the middle half spans {format_time_ms(timing.iqr_ms)}; {samples} samples"
    if samples == 1:
        spread = "one sample, so its spread is unknown: give more --max-seconds"
    rows = [
        (
            "device time" if device else "host time",
            f"{format_time_ms(timing.median_ms)} a call ({spread}{'' if device else '; no GPU was timed'})",
        )
    ]
    if device:
        bound = ": launch-bound" if timing.launch_bound else ""
        rows.append(
            (
                "elapsed",
                f"{format_time_ms(timing.elapsed_ms)} as launched, the host's part "
                f"{format_time_ms(timing.host_ms)}{bound}",
            )
        )
    rows.append(("method", timing.method + (f"; L2 {timing.l2}" if device else "")))
    tensors = ", ".join(f"{tuple(a['shape'])} {a['dtype']}" for a in timing.arguments)
    rows.append(("tensors", tensors or "none named"))
    if timing.clock_mhz:
        fell = ": throttled" if timing.throttled else ""
        rows.append(("clock", f"{' → '.join(f'{mhz:,.0f}' for mhz in timing.clock_mhz)} MHz{fell}"))
    rows += [("note", note) for note in _notes(timing)]
    rows.append(("on", timing.environment.line()))
    return [f"{label:12} {text}" for label, text in rows]


def _notes(timing: Timing) -> list[str]:
    notes = []
    if timing.noisy:
        notes.append("noisy: compare nothing within its spread")
    notes += [str(stream) for stream in timing.streams if stream.escaped]
    if timing.escaped:
        notes.append("work on another stream is not counted")
    if timing.arguments_changed:
        end = "they are restored" if timing.arguments_restored else "they could not be restored"
        notes.append(f"the snippet changed its tensors, so its calls met different inputs; {end}")
    return [*notes, *timing.remarks]


def _as_dict(timing: Timing, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "snippet": options.snippet,
        "setup": options.setup,
        **timing.as_dict(),
        "noisy": timing.noisy,
        "environment": timing.environment.as_dict(),
    }


def draw(timing: Timing, title: str = "") -> Figure:
    """Draw the samples in the order they were taken, and how often each value came.

    Parameters
    ----------
    timing
        What was measured.
    title
        Written above, such as the snippet.

    Returns
    -------
    matplotlib.figure.Figure
        Left, µs a call against the sample's number, with the median and the middle half; right, their histogram.
    """
    from gpucourse import plots

    fig, (strip, counts) = plots.figure(6.4, 3.2, ncols=2, sharey=True, width_ratios=(3, 1))
    samples_us = [ms * 1e3 for ms in timing.samples_ms]
    median_us = timing.median_ms * 1e3
    # A few stragglers would squeeze the others into a line: they are counted instead.
    reach_us = 4 * timing.iqr_ms * 1e3 or 0.05 * median_us
    inside = [us for us in samples_us if abs(us - median_us) <= reach_us]
    if len(inside) < 0.95 * len(samples_us):
        inside = samples_us
    outside = len(samples_us) - len(inside)
    strip.plot(range(1, len(samples_us) + 1), samples_us, "o", color=plots.BLUE, markersize=3)
    counts.hist(inside, bins=min(30, max(5, len(inside) // 3)), orientation="horizontal", color=plots.BLUE)
    if outside:
        strip.set_ylim(median_us - reach_us, median_us + reach_us)
    for axes in (strip, counts):
        axes.axhline(median_us, color=plots.ORANGE)
    strip.set_xlabel("sample" + (f" ({outside} of {len(samples_us)} lie outside)" if outside else ""))
    strip.set_ylabel(f"{'device' if timing.device == 'cuda' else 'host'} time of one call, µs")
    counts.set_xlabel("samples")
    counts.set_title(f"median {format_time_ms(timing.median_ms)}", color=plots.ORANGE, loc="left")
    first = title.strip().splitlines()[0] if title.strip() else ""
    short = first if len(first) <= 60 else f"{first[:57]}…"
    strip.set_title(short.replace("$", r"\$"), loc="left")  # a dollar would begin a formula
    return fig
