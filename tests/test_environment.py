"""Tests of gpucourse.environment."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpucourse import environment
from gpucourse.environment import Environment, NoGPUError, cuda_available, require_cuda


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
