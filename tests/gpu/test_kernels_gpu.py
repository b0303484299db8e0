"""Traces on a real device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gpucourse.kernels import count_launches, trace  # noqa: E402

pytestmark = pytest.mark.gpu


def test_views_launch_nothing_in_the_trace_and_in_the_count():
    x = torch.randn(64, 64, device="cuda")

    def views():
        return x.t()[1:].unsqueeze(0).expand(3, -1, -1)

    assert trace(views).kernels == ()
    assert count_launches(views).count == 0


def test_element_wise_operations_launch_one_kernel_each():
    x = torch.randn(2**20, device="cuda")

    def chain():
        return torch.relu(x * 2 + 1)

    found = trace(chain)
    print(found)
    assert found.complete
    assert len(found.kernels) == count_launches(chain).count == 3
    assert [kernel.op for kernel in found.kernels] == ["aten::mul", "aten::add", "aten::relu"] or [
        kernel.op for kernel in found.kernels
    ][:2] == ["aten::mul", "aten::add"]
    assert all((2**20,) in kernel.shapes for kernel in found.kernels)
    assert all(kernel.grid and kernel.block and kernel.registers for kernel in found.kernels)
    assert 0 < found.busy_us <= found.span_us


def test_two_streams_overlap_in_the_union_and_not_in_the_sum():
    side = torch.cuda.Stream()
    x = torch.randn(512, 512, device="cuda")

    def both():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(20):
                torch.cuda._sleep(100_000)
        for _ in range(20):
            torch.cuda._sleep(100_000)
        torch.cuda.current_stream().wait_stream(side)
        return x

    found = trace(both)
    total = sum(kernel.duration_us for kernel in found.kernels)
    print(found._sums(), total)
    assert len({kernel.stream for kernel in found.kernels}) == 2
    assert found.busy_us < 0.8 * total


def test_a_training_step_is_traced_whole():
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(64, 256, device="cuda"), torch.randint(10, (64,), device="cuda")

    def step():
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    found = trace(step)
    print(found)
    assert found.complete
    assert any("mm" in kernel.op for kernel in found.kernels)
    assert found.launch_bound
