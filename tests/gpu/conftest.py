"""These tests need a CUDA device; elsewhere they skip themselves and say why."""

from __future__ import annotations

import pytest

from gpucourse import environment


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if environment.cuda_available():
        return
    reason = f"no CUDA device: {environment._torch_state()}"
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=reason))
