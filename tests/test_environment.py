"""Tests of gpucourse.environment."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from gpucourse import environment
from gpucourse.environment import Environment, NoGPUError, cuda_available, require_cuda

SOURCES = Path(environment.__file__).resolve().parents[1]


def test_capture_names_this_python_and_torch():
    import torch

    found = Environment.capture()
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.torch == torch.__version__


def test_a_line_leaves_out_what_is_unavailable():
    assert Environment(gpu="NVIDIA L4", driver="580.1").line() == "NVIDIA L4, driver 580.1"
    assert Environment().line() == "no GPU"


def test_without_a_gpu_the_error_says_what_was_found_and_what_to_do(monkeypatch):
    monkeypatch.setattr(environment, "_torch_state", lambda: "torch 9.9 is a build without CUDA")
    with pytest.raises(
        NoGPUError, match=r"time_cuda needs a CUDA device: torch 9.9 is a build.*gpucourse doctor"
    ):
        require_cuda("time_cuda")
    assert not cuda_available()


def test_without_torch_there_is_no_gpu_and_the_capture_still_works():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from gpucourse.environment import Environment, cuda_available, _torch_state\n"
        "found = Environment.capture()\n"
        "assert found.torch is None and found.gpu is None and not cuda_available()\n"
        "print(_torch_state())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "torch is not installed"


def test_a_driver_tool_that_is_missing_or_fails_gives_none(monkeypatch):
    def broken(*_args, **_kwargs):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(environment.subprocess, "run", broken)
    environment._nvidia_smi.cache_clear()
    assert environment._nvidia_smi("driver_version", 0) is None
    environment._nvidia_smi.cache_clear()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"torch.py": "raise ImportError('libc10.so: no such file')\n"},
            "torch cannot be imported (libc10.so",
        ),
        ({"torch.py": "import nothing_of_this_name\n"}, "torch cannot be imported (No module named"),
        ({"torch/notes.txt": ""}, "torch is an empty folder, not the package"),
    ],
)
def test_a_torch_that_cannot_be_used_is_no_gpu_and_the_reason_is_said(tmp_path, files, said):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    # Without the installed packages: a folder without code is only found where the real one is not.
    code = (
        f"import sys; sys.path[:] = [{str(tmp_path)!r}, *(p for p in sys.path if 'site-packages' not in p)]\n"
        f"sys.path.append({str(SOURCES)!r})\n"
        "from gpucourse import environment as e\n"
        "print(e.cuda_available(), e.Environment.capture().torch, e._torch_state())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"False None {said}")


def test_the_driver_is_asked_by_uuid_for_it_counts_devices_otherwise_than_cuda(monkeypatch):
    clocks = {"GPU-aa-bb": "1980", 0: "1590"}  # device 0 of the tool is another card
    monkeypatch.setattr(environment, "_nvidia_smi", lambda _query, which: clocks.get(which))
    asked = environment._of_driver
    assert asked("clocks.max.sm", types.SimpleNamespace(uuid="aa-bb"), 0) == "1980"
    assert asked("clocks.max.sm", types.SimpleNamespace(), 0) == "1590"
    assert asked("clocks.max.sm", types.SimpleNamespace(uuid="unknown to the tool"), 0) == "1590"
