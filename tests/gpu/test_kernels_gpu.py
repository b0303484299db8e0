"""Traces on a real device."""

from __future__ import annotations

import importlib.util
import json
import math

import pytest

torch = pytest.importorskip("torch")

from gpucourse.kernels import KernelTrace, count_launches, trace  # noqa: E402

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
    assert all(kernel.call is not None for kernel in found.kernels)
    backward = [k for k in found.kernels if k.op == "aten::gelu_backward"]
    assert [k.thread for k in backward] == [1], "autograd's own thread"
    assert backward[0].shapes == ((64, 512), (64, 512))
    assert backward[0].dtypes == ("float32", "float32")


def test_dtypes_are_those_of_the_arguments():
    x = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(64, (7,), device="cuda")
    found = trace(lambda: (x + x.float(), x.index_select(0, ids), x > 0))
    print(found)
    by_op = {kernel.op: kernel for kernel in found.kernels}
    assert by_op["aten::add"].dtypes == ("bfloat16", "float32")
    assert by_op["aten::index_select"].dtypes == ("bfloat16", "int64")
    assert by_op["aten::gt"].dtypes == ("bfloat16",)


def test_kernels_of_one_call_share_their_number():
    x = torch.randn(2**22, device="cuda")
    found = trace(lambda: (torch.sort(x), x + 1))
    sorting = [kernel.call for kernel in found.kernels if kernel.op == "aten::sort"]
    print(len(found.kernels), sorting)
    assert len(sorting) > 1
    assert len(set(sorting)) == 1
    assert found.kernels[-1].call not in sorting


def test_a_fused_optimizer_keeps_the_shapes_and_dtypes_of_its_lists():
    layers = [torch.nn.Linear(96, 96) for _ in range(20)]  # 40 tensors: more than the exported file writes
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(8, 96, device="cuda")

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    fused = [kernel for kernel in trace(step).kernels if "fused_adamw" in kernel.op]
    print(len(fused), fused[0].shapes[:3])
    elements = sum(parameter.numel() for parameter in model.parameters())
    for kernel in fused:
        assert sum(math.prod(shape) for shape in kernel.shapes) == 4 * elements
        assert set(kernel.dtypes) == {"float32"}


@pytest.mark.parametrize(
    ("wait", "causes"),
    [
        (lambda y: y.sum().item(), {"copy"}),
        (lambda y: y.cpu(), {"copy"}),
        (lambda y: torch.cuda.synchronize(), {"synchronization"}),
        (lambda y: torch.cuda.current_stream().synchronize(), {"synchronization"}),
    ],
    ids=["item", "cpu", "device", "stream"],
)
def test_the_gap_behind_a_wait_has_its_cause(wait, causes):
    x = torch.randn(2048, 2048, device="cuda")

    def work():
        y = x @ x
        wait(y)
        return y + 1

    found = trace(work)
    print(found, found.waits, found.gaps, sep="\n")
    last = found.gaps[-1]
    assert last.after == len(found.kernels) - 1
    assert last.cause in causes
    again = KernelTrace.from_dict(json.loads(json.dumps(found.as_dict())), found.environment)
    assert again == found


def test_a_host_that_is_late_and_a_queue_that_is_full_are_told_apart():
    small = torch.randn(256, device="cuda")

    def late():
        for _ in range(30):
            small.add_(1)

    def queued():
        torch.cuda._sleep(20_000_000)  # long enough for all the launches
        late()

    waits_for_host, waits_in_queue = trace(late), trace(queued)
    print(waits_for_host.idle_us(), waits_in_queue.idle_us())
    assert waits_for_host.launch_bound
    assert [gap.cause for gap in waits_for_host.gaps].count("host") >= 25
    assert waits_in_queue.idle_us()["host"] == 0
    assert not waits_in_queue.launch_bound


def test_a_chain_of_element_wise_kernels_is_one_candidate_and_a_product_ends_it():
    x, w = torch.randn(1024, 768, device="cuda"), torch.randn(768, 768, device="cuda")

    def work():
        return torch.relu(x * 2 + 1) @ w

    found = trace(work)
    (candidate,) = found.fuse_candidates()
    print(candidate)
    assert candidate.indices == (0, 1, 2)
    assert candidate.bytes_saved == 2 * 2 * x.numel() * 4
    assert candidate.launches_saved == 2


def test_a_perfetto_file_has_an_arrow_for_each_kernel(tmp_path):
    x = torch.randn(512, 512, device="cuda")
    found = trace(lambda: (x @ x).relu().sum().item())
    events = json.loads(found.write_perfetto(tmp_path / "trace.json").read_text())["traceEvents"]
    phases = [event["ph"] for event in events]
    assert phases.count("s") == phases.count("f") == len(found.kernels)
    assert all(event["ts"] >= 0 for event in events if event["ph"] == "X")


def test_empty_tensors_launch_nothing_in_the_trace_and_in_the_count():
    e, x = torch.empty(0, 8, device="cuda"), torch.randn(8, 4, device="cuda")

    def nothing():
        return e + 1, e @ x, torch.cat([e, e])

    found = trace(nothing)
    print(found)
    assert len(found.kernels) == count_launches(nothing).count == 0


def test_a_cuda_graph_is_one_launch_whose_kernels_are_all_there():
    x = torch.randn(256, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(6):
            x.add_(1)
    found = trace(graph.replay)
    print(found)
    assert (found.launches, found.graphs, len(found.kernels)) == (1, 1, 6)
    assert {gap.cause for gap in found.gaps} <= {"queue"}


def test_a_compiled_functions_kernel_has_its_name_and_shapes():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    x, w = torch.randn(512, 768, device="cuda"), torch.ones(768, device="cuda")
    compiled = torch.compile(lambda a, b: torch.relu(a * b + 1))
    found = trace(compiled, x, w)
    print(found)
    (fused,) = found.kernels
    assert found.complete
    assert fused.op.startswith("triton_")
    assert fused.shapes[:2] == ((512, 768), (768,))
    assert set(fused.dtypes) == {"float32"}


def test_a_function_that_raises_under_the_profiler_leaves_it_stopped():
    x = torch.randn(8, device="cuda")
    calls = []

    def fails():
        calls.append(x + 1)
        if len(calls) > 3:
            raise ZeroDivisionError("in the traced call")

    with pytest.raises(ZeroDivisionError, match="in the traced call"):
        trace(fails, warm_up=3)
    assert not torch.autograd.profiler._is_profiler_enabled
    assert len(trace(lambda: x + 1).kernels) == 1
