"""The chapters on a GPU that the book does not know and that is small: they run, live where they can."""

from __future__ import annotations

from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

from gpucourse import recorder  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).resolve().parents[2]
MEMORY_GB = 1.5

STRANGER = f"""
import torch
_total = int({MEMORY_GB} * 1e9)
torch.cuda.get_device_name = lambda *_: "NVIDIA Strange 9000"
torch.cuda.set_per_process_memory_fraction(_total / torch.cuda.get_device_properties().total_memory)
torch.cuda.mem_get_info = lambda *_: (_total - torch.cuda.memory_reserved(), _total)
"""


def texts(notebook) -> str:
    outputs = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.get("outputs", [])
    ]
    return "\n".join(str(output.get("text", output.get("data", ""))) for output in outputs)


CHAPTERS = [
    page for page in recorder.find_pages(ROOT) if page.path.suffix == ".md"
]  # benchmarks run by themselves


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.path.stem)
def test_a_chapter_runs_on_a_small_gpu_without_a_datasheet_record(page):
    notebook = jupytext.read(page.path)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(STRANGER))
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(page.path.parent)}}
    ).execute()
    shown = texts(notebook)
    assert "measured here on NVIDIA Strange 9000" in shown
    source = page.path.read_text()
    if "needs_gb=" in source:
        replayed = shown.split("(replayed: ")[1:]
        assert all(line.startswith(("needs", "ran out of memory here")) for line in replayed)
        assert replayed, "what needs more memory than there is must be replayed"
