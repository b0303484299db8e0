"""Ceilings and budgets on a real device: what is claimed of them holds here, whatever the device."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from gpucourse import cli, hardware  # noqa: E402
from gpucourse.environment import Environment  # noqa: E402
from gpucourse.kernels import KernelTrace, trace  # noqa: E402
from gpucourse.roofline import (  # noqa: E402
    MeasuredRoofline,
    Roofline,
    StepBudget,
    generated_arguments,
    measure_roofline,
    shape_ceilings,
    step_budget,
    sustained,
    work_of_call,
)
from gpucourse.training import GPT, GPTConfig, next_token_loss, plain_step, random_tokens  # noqa: E402

pytestmark = pytest.mark.gpu

ON_H200 = pytest.mark.skipif(
    Environment.capture().gpu != "NVIDIA H200", reason="a figure of the book's own device"
)
SMALL = GPTConfig(layers=2, width=768, heads=12, vocabulary=50_304, context=1_024)


def half() -> str:
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


@pytest.fixture(scope="module")
def roofs() -> dict[str, MeasuredRoofline]:
    time.sleep(1.0)  # whatever ran before may have left the card hot
    return {precision: measure_roofline(precision) for precision in ("fp32", half())}


def test_the_ceilings_are_below_what_the_device_can_do_at_all(roofs) -> None:
    record = hardware.find(Environment.capture().gpu or "")
    for precision, measured in roofs.items():
        print(measured)
        assert measured.roofline.peak_flops > 0
        assert all(c.low <= c.rate <= c.high for c in (*measured.products, *measured.streams))
        if record is not None:
            peak = record.peak_flops_at_clock(precision, Environment.capture().max_sm_clock_mhz)
            assert measured.roofline.peak_flops < peak
            assert all(c.rate < record.bandwidth_bytes_per_s for c in measured.streams)


def test_the_samples_of_the_best_rows_lie_close_together(roofs) -> None:
    for measured in roofs.values():
        for best in (measured.best_product, measured.best_stream):
            assert (best.high - best.low) / best.rate < 0.05, best.text()


@ON_H200
def test_an_h200_reaches_its_shares_of_the_datasheet(roofs) -> None:
    fp32, bf16 = roofs["fp32"], roofs["bf16"]
    assert fp32.stream("copy").rate / 4.8e12 >= 0.88
    assert bf16.roofline.peak_flops / 989e12 >= 0.78
    assert fp32.roofline.peak_flops / 67e12 >= 0.75


def test_tf32_and_half_types_are_faster_than_fp32_where_there_are_tensor_cores(roofs) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no tf32 here")
    tf32 = measure_roofline("tf32", streams=("copy",))
    assert roofs["fp32"].roofline.peak_flops < tf32.roofline.peak_flops
    assert tf32.roofline.peak_flops < roofs[half()].roofline.peak_flops
    assert not torch.backends.cuda.matmul.allow_tf32


def test_a_plain_sweep_of_event_pairs_finds_no_higher_burst(roofs) -> None:
    """The peer's way on our own shapes; the benchmark gives it shapes of its own and do_bench besides."""
    dtype = torch.bfloat16 if half() == "bf16" else torch.float16
    best = 0.0
    for n in (2048, 4096, 8192):
        a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
        time.sleep(0.5)
        for _ in range(3):
            torch.mm(a, b)
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(10)]
        for start, end in pairs:
            start.record()
            torch.mm(a, b)
            end.record()
        torch.cuda.synchronize()
        times = sorted(start.elapsed_time(end) for start, end in pairs)
        best = max(best, 2 * n**3 / times[5] * 1e3)
    assert roofs[half()].roofline.peak_flops > 0.99 * best


def test_a_long_load_says_how_long_it_was_and_is_no_faster_than_the_burst() -> None:
    measured = measure_roofline(half(), shapes=(4096,), streams=("copy", "triad"), sustained_s=3.0)
    print(measured)
    assert measured.sustained_roofline is not None
    assert measured.sustained[0].seconds >= 3.0
    assert measured.sustained_roofline.peak_flops < 1.02 * measured.roofline.peak_flops
    assert measured.sustained_roofline.bandwidth == pytest.approx(measured.roofline.bandwidth, rel=0.1)
    assert len(measured.curve) >= 8
    assert all(mhz > 100 for _, _, mhz in measured.curve)
    assert MeasuredRoofline.from_dict(json.loads(json.dumps(measured.as_dict()))).curve == measured.curve


def test_the_device_does_not_rest_between_the_slices_of_a_long_load() -> None:
    a = torch.randn(4096, 4096, device="cuda")
    rows = sustained({"mm": (lambda: torch.mm(a, a), 3.0)}, 2.0)
    worked = sum(round(250 / 3.0) * row[2] for row in rows) / 1e3
    assert worked > 0.9 * rows[-1][1]


def test_counts_agree_with_a_trace_of_the_real_operation() -> None:
    a, b = torch.randn(512, 256, device="cuda"), torch.randn(256, 128, device="cuda")
    (kernel, *_) = trace(torch.mm, a, b).kernels
    found = work_of_call(kernel.op, kernel.shapes, kernel.dtypes)
    assert found
    assert found.flops == 2 * 512 * 256 * 128
    assert found.bytes == 4 * (512 * 256 + 256 * 128 + 512 * 128)
    x = torch.randn(1000, 768, device="cuda")
    for fn in (
        torch.nn.functional.gelu,
        lambda t: t.half(),
        lambda t: t.sum(0),
        lambda t: torch.softmax(t, -1),
    ):
        for kernel in trace(fn, x).kernels:
            assert work_of_call(kernel.op, kernel.shapes, kernel.dtypes), kernel.op


@pytest.fixture(scope="module")
def step_parts():
    free_gb = torch.cuda.mem_get_info()[0] / 1e9
    if free_gb < 8:
        pytest.skip(f"needs 8 GB, {free_gb:.1f} GB are free")
    torch.manual_seed(0)
    model = GPT(SMALL).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return model, optimizer, random_tokens(SMALL, 8 if free_gb > 20 else 2, device="cuda")


def test_a_training_step_learns_on_the_device_in_every_precision_it_has(step_parts) -> None:
    config = GPTConfig(layers=2, width=128, heads=4, vocabulary=512, context=64)
    for precision in ("fp32", "tf32", half(), "fp16"):
        torch.manual_seed(0)
        model, batch = GPT(config).cuda(), random_tokens(config, 8, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = [plain_step(model, optimizer, *batch, precision) for _ in range(40)]
        assert losses[0].item() == pytest.approx(math.log(512), abs=0.2)
        assert losses[-1].item() < 0.5 * losses[0].item(), precision


def whole_trace(step: Callable[[], object]) -> KernelTrace:
    """Trace a step until the profiler lost nothing: what it loses is no fault of a budget."""
    missing = []
    for _ in range(3):
        traced = trace(step)
        if traced.complete:
            return traced
        missing.append(f"{traced.missing} of {traced.launches}")
    pytest.fail(f"three traces of a step, and each lacks kernels: {', '.join(missing)}")


def faults(budget: StepBudget) -> list[str]:
    """Say what is wrong with an eager step's budget, in words.

    Shares are of the time in which kernels ran. Of the span they would judge the host as well, which the profiler
    slows, the more so the more was traced in this process before.
    """
    least, reached = budget.least_us / budget.busy_us, budget.reached_us / budget.busy_us
    found = []
    if not budget.uncounted_us < 0.01 * budget.busy_us:
        missing = {row.op: row.reason for row in budget.rows if row.least_us is None}
        found.append(f"{budget.uncounted_us:.0f} µs are without a count: {missing}")
    if not 0.5 < least < 1.05:
        found.append(f"the least times are {least:.1%} of the kernels' time, wanted 50 to 105 %")
    if not least < reached < 1.05:
        found.append(
            f"as reached alone {reached:.1%}: wanted above the least times' {least:.1%}, below 105 %"
        )
    for row in budget.rows:
        if row.family not in ("product", "attention"):
            continue
        if row.alone_us is None:
            found.append(f"{row.op} {row.shapes_text()} was not measured alone")
    for family in ("product", "attention"):
        rows = [row for row in budget.rows if row.family == family and row.alone_us is not None]
        alone = sum(row.alone_us or 0.0 for row in rows)
        measured = sum(row.measured_us for row in rows)
        # A reading of the launch instead of the kernel was twice the kernel's time; a hot card's clock is a fifth.
        if rows and not 0.7 * measured < alone < 1.4 * measured:
            found.append(f"{family}: {alone:.0f} µs alone, {measured:.0f} µs in the step")
    return found


def test_an_eager_step_is_explained_call_by_call(step_parts, roofs) -> None:
    model, optimizer, batch = step_parts
    for precision in ("fp32", half()):
        traced = whole_trace(lambda precision=precision: plain_step(model, optimizer, *batch, precision))
        budget = step_budget(traced, roofs, alone=shape_ceilings(traced))
        print(precision, budget)
        print("\n".join("  ".join(row) for row in budget.table(12)))
        assert budget.busy_us == pytest.approx(traced.busy_us)
        parts = budget.least_us + budget.beyond_us + budget.uncounted_us + budget.gap_us
        assert parts == pytest.approx(budget.span_us + budget.overlap_us)
        found = faults(budget)
        roof = roofs[precision].roofline
        assert not found, f"{precision}, roof {roof}: {'; '.join(found)}; {budget}"


@ON_H200
def test_on_an_h200_the_roof_explains_nine_tenths_of_an_fp32_step_at_its_shapes(step_parts, roofs) -> None:
    model, optimizer, batch = step_parts
    traced = trace(lambda: plain_step(model, optimizer, *batch, "fp32"))
    budget = step_budget(traced, roofs, alone=shape_ceilings(traced))
    assert budget.explained_as_reached == pytest.approx(1.0, abs=0.1)


def test_a_compiled_step_has_a_count_for_its_generated_kernels(step_parts, roofs) -> None:
    pytest.importorskip("triton")
    model, optimizer, batch = step_parts
    compiled = torch.compile(next_token_loss)
    traced = trace(lambda: plain_step(model, optimizer, *batch, half(), loss_of=compiled))
    budget = step_budget(traced, roofs, arguments=generated_arguments())
    print(budget)
    generated = [row for row in budget.rows if row.family == "generated"]
    assert generated
    assert budget.uncounted_us < 0.02 * budget.busy_us
    assert any("read and written twice" in row.convention for row in generated)


def test_the_command_line_measures_here(capsys, tmp_path) -> None:
    picture = tmp_path / "roof.png"
    assert cli.main(["roofline", "--dtype", half(), "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{Environment.capture().gpu}, {half()}; burst ")
    assert picture.stat().st_size > 5000
    assert cli.main(["roofline", "--dtype", "fp32", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert Roofline(peak_flops=row["peak_flops"], bandwidth=row["bandwidth"]).ridge > 1
