"""Sliders that need no kernel: Python renders every frame beforehand, and the controls choose one.

`frame_grid` makes a grid of frames from a render function and its controls, out of standard ipywidgets alone,
so that the same object works in a notebook and, with no kernel, in a page. `memory_lab`,
`scenario_lab`, `fit_lab`, `roofline_lab` and `launch_lab` are calls of it, each in a file of its own.
"""

from __future__ import annotations

try:
    import ipywidgets  # noqa: F401 - asked for here, before a file of the package needs it
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"sliders need ipywidgets: {error}. Run `pip install 'ipywidgets>=8.1'` in the notebook's "
        "environment; the ledger itself works without: gpucourse.memory_ledger.MemoryLedger().",
        name=error.name,
    ) from error

from gpucourse.widgets.fit import fit_lab
from gpucourse.widgets.grid import Control, ControlError, Each, FrameGrid, Render, frame_grid
from gpucourse.widgets.launch import launch_lab
from gpucourse.widgets.memory import memory_lab
from gpucourse.widgets.roof import NIGHT_FLOPS, roofline_lab
from gpucourse.widgets.scenarios import scenario_lab

__all__ = [
    "NIGHT_FLOPS",
    "Control",
    "ControlError",
    "Each",
    "FrameGrid",
    "Render",
    "fit_lab",
    "frame_grid",
    "launch_lab",
    "memory_lab",
    "roofline_lab",
    "scenario_lab",
]
