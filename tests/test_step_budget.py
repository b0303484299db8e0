"""A step's budget: calls put together, held against the right ceiling, and every microsecond accounted for."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucourse.bound import Roofline
from gpucourse.environment import Environment
from gpucourse.kernels import Kernel, KernelTrace
from gpucourse.measured_roof import Ceiling, MeasuredRoofline
from gpucourse.recording import load
from gpucourse.step_budget import StepBudget, step_budget, traced_calls

ROOFS = {
    "fp32": Roofline(peak_flops=50e12, bandwidth=4e12),
    "tf32": Roofline(peak_flops=400e12, bandwidth=4e12),
    "bf16": Roofline(peak_flops=800e12, bandwidth=4e12),
}


def kernel(
    op: str, shapes, start: float, duration: float, call: int | None = None, **facts: Any
) -> dict[str, Any]:
    dtypes = facts.pop("dtypes", ["float32"] * len(shapes))
    return {
        "name": "kernel", "op": op, "shapes": shapes, "dtypes": dtypes, "call": call,
        "start_us": start, "duration_us": duration, **facts,
    }  # fmt: skip


PRODUCT = [[4096, 4096], [4096, 4096]]
ADD = [[2**25], [2**25]]


def trace(*kernels: dict[str, Any]) -> dict[str, Any]:
    return {"kernels": list(kernels)}


def test_a_product_and_an_addition_are_explained_by_hand() -> None:
    budget = step_budget(
        trace(kernel("aten::mm", PRODUCT, 0, 3000, 0), kernel("aten::add", ADD, 3100, 110, 1)), ROOFS
    )
    product, add = sorted(budget.rows, key=lambda row: row.op, reverse=True)
    assert product.least_us == pytest.approx(2 * 4096**3 / 50e12 * 1e6)
    assert add.least_us == pytest.approx(12 * 2**25 / 4e12 * 1e6)
    assert (product.bound, add.bound) == ("compute", "memory")
    assert (budget.span_us, budget.busy_us, budget.gap_us) == (3210, 3110, 100)
    assert budget.explained == pytest.approx((product.least_us + add.least_us) / 3210)
    assert budget.unexplained_us == pytest.approx(3210 - product.least_us - add.least_us)
    assert budget.rows[0] is product or budget.rows[0].loss_us >= budget.rows[1].loss_us


def test_the_kernels_of_one_call_share_its_work_and_their_time_is_a_union() -> None:
    found = step_budget(
        trace(
            kernel("aten::mm", PRODUCT, 0, 100, 7),
            kernel("aten::mm", PRODUCT, 50, 100, 7),
            kernel("aten::mm", PRODUCT, 200, 10, 8),
        ),
        ROOFS,
    )
    (row,) = found.rows
    assert (row.calls, row.kernels, row.measured_us) == (2, 3, 160)
    assert row.flops == 2 * 2 * 4096**3


def test_calls_of_other_shapes_or_types_are_other_rows() -> None:
    found = step_budget(
        trace(
            kernel("aten::mm", PRODUCT, 0, 10, 0),
            kernel("aten::mm", PRODUCT, 10, 10, 1, dtypes=["bfloat16"] * 2),
            kernel("aten::mm", [[64, 64], [64, 64]], 20, 10, 2),
        ),
        ROOFS,
    )
    assert len(found.rows) == 3
    by_type = {row.precision: row.least_us for row in found.rows if row.shapes[0] == (4096, 4096)}
    assert by_type["fp32"] == pytest.approx(16 * by_type["bf16"])


def test_kernels_without_a_call_stand_for_themselves_and_without_an_operation_have_no_count() -> None:
    found = step_budget(trace(kernel("", [], 0, 5), kernel("", [], 5, 5)), ROOFS)
    (row,) = found.rows
    assert (row.op, row.calls, row.kernels) == ("kernel", 2, 2)
    assert row.least_us is None
    assert row.reason
    assert found.uncounted_us == 10
    assert found.explained == 0


def test_tf32_is_held_against_its_own_ceiling_for_products_only() -> None:
    kernels = trace(kernel("aten::mm", PRODUCT, 0, 10, 0), kernel("aten::gelu", [[2**24]], 10, 10, 1))
    found = {row.op: row for row in step_budget(kernels, ROOFS, tf32=True).rows}
    assert found["aten::mm"].precision == "tf32"
    assert found["aten::mm"].least_us == pytest.approx(2 * 4096**3 / 400e12 * 1e6)
    assert found["aten::gelu"].precision == "fp32"


def test_a_precision_without_a_roof_has_no_count_and_says_which_there_are() -> None:
    found = step_budget(
        trace(kernel("aten::mm", PRODUCT, 0, 10, 0, dtypes=["float16"] * 2)), {"fp32": ROOFS["fp32"]}
    )
    assert found.rows[0].reason == "no roof for fp16; there are fp32"
    assert found.uncounted_us == 10


def test_one_roof_serves_every_precision() -> None:
    found = step_budget(trace(kernel("aten::mm", PRODUCT, 0, 10, 0, dtypes=["float16"] * 2)), ROOFS["fp32"])
    assert found.rows[0].least_us == pytest.approx(2 * 4096**3 / 50e12 * 1e6)


def test_element_wise_arithmetic_never_runs_at_the_tensor_cores_rate() -> None:
    many = kernel("aten::gelu_backward", [[1000], [1000]], 0, 10, 0, dtypes=["bfloat16"] * 2)
    slow = {"fp32": Roofline(peak_flops=1e9, bandwidth=4e12), "bf16": ROOFS["bf16"]}
    (row,) = step_budget(trace(many), slow).rows
    assert row.least_us == pytest.approx(10 * 1000 / 1e9 * 1e6)
    assert row.bound == "compute"


def test_causal_attention_is_half_the_work_and_the_caller_says_whether_it_is() -> None:
    heads = kernel(
        "aten::_flash_attention_forward", [[16, 1024, 12, 64]] * 3, 0, 10, 0, dtypes=["bfloat16"] * 3
    )
    causal = step_budget(trace(heads), ROOFS).rows[0].flops
    whole = step_budget(trace(heads), ROOFS, causal=False).rows[0].flops
    assert causal is not None
    assert whole is not None
    assert causal / whole == pytest.approx(0.5, rel=0.01)


def test_a_copy_over_the_bus_is_not_held_against_the_memorys_roof() -> None:
    facts = {"name": "Memcpy HtoD (Pinned -> Device)"}
    row = step_budget(trace({**kernel("aten::copy_", [[64], [64]], 0, 10, 0), **facts}), ROOFS).rows[0]
    assert row.least_us is None
    assert "between host and device" in row.reason


def measured(l2_bytes: int | None = None) -> MeasuredRoofline:
    def row(kind: str, rate: float) -> Ceiling:
        return Ceiling(kind=kind, what="x", shape=(1, 1, 1), amount=rate / 1e3, samples_ms=(1.0,))

    return MeasuredRoofline(
        device="NVIDIA Test",
        precision="fp32",
        products=(row("product", 50e12),),
        streams=(row("copy", 4e12), row("write", 4.6e12), row("read", 4.4e12)),
        l2_bytes=l2_bytes,
    )


def test_under_a_measured_roof_fills_sums_and_the_rest_have_each_their_own_stream() -> None:
    found = step_budget(
        trace(
            kernel("aten::fill_", [[2**25]], 0, 100, 0),
            kernel("aten::sum", [[2**25]], 100, 100, 1),
            kernel("aten::copy_", [[2**25], [2**25]], 200, 100, 2),
            kernel("aten::cumsum", [[2**25]], 300, 100, 3),
        ),
        {"fp32": measured()},
    )
    rates = {row.op: row.bytes / row.least_us * 1e6 for row in found.rows if row.bytes and row.least_us}
    assert rates["aten::fill_"] == pytest.approx(4.6e12)
    assert rates["aten::sum"] == pytest.approx(4.4e12)
    assert rates["aten::copy_"] == rates["aten::cumsum"] == pytest.approx(4e12)


def test_what_fits_the_l2_is_flagged_by_the_roofs_or_the_traces_own_machine() -> None:
    small, large = kernel("aten::gelu", [[1000]], 0, 10, 0), kernel("aten::gelu", [[2**24]], 10, 10, 1)
    flags = {row.shapes: row.in_l2 for row in step_budget(trace(small, large), measured(60_000_000)).rows}
    assert flags == {((1000,),): True, ((2**24,),): False}
    assert not any(row.in_l2 for row in step_budget(trace(small, large), measured()).rows)
    real = KernelTrace(
        kernels=tuple(
            Kernel(
                name="k", op="aten::gelu", shapes=((1000,),), dtypes=("float32",), call=0, start_us=0.0,
                duration_us=10.0, launch_us=None, stream=7, grid=None, block=None, registers=None,
                shared_bytes=None,
            )
            for _ in range(1)
        ),
        launches=1, missing=0, environment=Environment(l2_bytes=50_000_000),
    )  # fmt: skip
    assert step_budget(real, ROOFS).rows[0].in_l2
    assert step_budget(real.as_dict(), ROOFS, l2_bytes=50_000_000).rows == step_budget(real, ROOFS).rows


def test_a_call_measured_alone_stands_beside_its_least_time() -> None:
    kernels = trace(kernel("aten::mm", PRODUCT, 0, 3500, 0), kernel("aten::add", ADD, 3500, 120, 1))
    (key,) = [call.key for call in traced_calls(kernels) if call.op == "aten::mm"]
    plain, known = step_budget(kernels, ROOFS), step_budget(kernels, ROOFS, alone={key: 3.2})
    assert not plain.has_alone
    assert plain.expected_us == plain.least_us
    product = next(row for row in known.rows if row.op == "aten::mm")
    assert product.alone_us == pytest.approx(3200)
    assert known.least_us == plain.least_us
    assert known.expected_us == pytest.approx(3200 + 12 * 2**25 / 4e12 * 1e6)
    assert "at these shapes" in str(known)
    assert "Alone, µs" in known._repr_html_()
    assert "Alone, µs" not in plain._repr_html_()


def test_a_call_that_ran_faster_in_the_step_than_alone_counts_with_its_time_in_the_step() -> None:
    kernels = trace(kernel("aten::mm", PRODUCT, 0, 3500, 0), kernel("aten::add", ADD, 3500, 120, 1))
    (key,) = [call.key for call in traced_calls(kernels) if call.op == "aten::mm"]
    add_us = 12 * 2**25 / 4e12 * 1e6
    fair, unfair = (step_budget(kernels, ROOFS, alone={key: ms}) for ms in (3.2, 9.0))
    assert fair.reached_us == fair.expected_us == pytest.approx(3200 + add_us)
    assert unfair.expected_us == pytest.approx(9000 + add_us)
    assert unfair.reached_us == pytest.approx(3500 + add_us)
    assert unfair.explained_as_reached == pytest.approx((3500 + add_us) / 3620)
    assert step_budget(kernels, ROOFS).reached_us == step_budget(kernels, ROOFS).least_us


def test_work_from_the_l2_may_beat_the_roof_and_is_not_clamped() -> None:
    (row,) = step_budget(trace(kernel("aten::add", ADD, 0, 50, 0)), ROOFS).rows
    assert row.loss_us < 0


calls = st.lists(
    st.tuples(
        st.sampled_from(["aten::mm", "aten::mul", "aten::nothing_known", "aten::fill_"]),
        st.floats(0, 1000),
        st.floats(0.5, 200),
        st.one_of(st.none(), st.integers(0, 3)),
    ),
    min_size=1,
    max_size=12,
)


@given(calls)
def test_every_microsecond_is_accounted_for(rows) -> None:
    # What shares a number is one call, so it has one operation and one set of shapes.
    ops: dict[int, str] = {}
    kernels = []
    for op, start, duration, call in rows:
        op = op if call is None else ops.setdefault(call, op)
        kernels.append(kernel(op, [[64, 64], [64, 64]], start, duration, call))
    found = step_budget(trace(*kernels), ROOFS)
    total = found.least_us + found.beyond_us + found.uncounted_us + found.gap_us
    assert total == pytest.approx(found.span_us + found.overlap_us, abs=1e-6)
    assert found.overlap_us >= -1e-6
    assert found.gap_us >= -1e-6
    assert sum(row.kernels for row in found.rows) == len(kernels)
    for most in (0, 1, 2):
        short = found.condensed(most)
        for name in ("least_us", "measured_us", "uncounted_us", "beyond_us", "expected_us", "calls"):
            assert getattr(short, name) == pytest.approx(getattr(found, name), abs=1e-6)
    families = found.by_family()
    assert sum(sums["measured_us"] for sums in families.values()) == pytest.approx(found.measured_us)


def test_a_condensed_budget_keeps_the_longest_rows_and_a_sum_for_each_kind() -> None:
    kernels = [kernel("aten::mm", [[n, n], [n, n]], 1000 * n, 10 * n, n) for n in range(1, 30)]
    kernels += [kernel("aten::mul", [[n]], 100_000 + n, 0.5, 100 + n) for n in range(1, 5)]
    kernels += [kernel("aten::odd", [[n]], 200_000 + n, 0.5, 200 + n) for n in range(1, 3)]
    short = step_budget(trace(*kernels), ROOFS).condensed(3)
    assert {row.op for row in short.rows} == {
        "aten::mm", "26 more of product", "4 more of element-wise", "2 more of other",
    }  # fmt: skip
    other = next(row for row in short.rows if row.family == "other")
    assert other.least_us is None
    assert other.reason == "no counting rule for odd"
    assert "26 more of product" in short._repr_html_()


def test_a_recorded_budget_is_read_back_and_long_lists_are_cut_in_it() -> None:
    kernels = trace(
        kernel("aten::_fused_adamw_", [[100, 10]] * 400, 0, 50, 0), kernel("aten::mm", PRODUCT, 60, 3000, 1)
    )
    found = step_budget(kernels, ROOFS)
    data = json.loads(json.dumps(found.as_dict()))
    again = StepBudget.from_dict(data)
    assert str(again) == str(found)
    assert again.by_family() == found.by_family()
    adam = next(row for row in data["rows"] if row["op"] == "aten::_fused_adamw_")
    assert adam["tensors"] == 400
    assert len(adam["shapes"]) == 8
    assert len(json.dumps(data)) < 4000
    del data["rows"][0]["measured_us"]
    with pytest.raises(ValueError, match="no budget as StepBudget"):
        StepBudget.from_dict(data)


def test_a_budget_recorded_under_either_name_of_the_loss_is_read_and_keeps_the_name_that_readers_use() -> (
    None
):
    found = step_budget(trace(kernel("aten::mm", PRODUCT, 0, 3000, 0)), ROOFS)
    data = json.loads(json.dumps(found.as_dict()))
    assert data["above_us"] == found.beyond_us > 0
    renamed = {("beyond_us" if name == "above_us" else name): value for name, value in data.items()}
    older = {name: value for name, value in data.items() if name != "remarks"}
    for given_data in (data, renamed, older):
        again = StepBudget.from_dict(given_data)
        assert again == found
        assert again.beyond_us == data["above_us"]


def test_the_recorded_budgets_of_the_night_are_read_and_add_up_to_what_was_recorded() -> None:
    for recorded in load("step_budgets")["steps"].values():
        found = StepBudget.from_dict(recorded)
        assert found.beyond_us == pytest.approx(recorded["above_us"])
        assert "beyond the roof's time" in str(found)


def test_one_roof_for_calls_of_several_precisions_is_remarked_on() -> None:
    half = kernel("aten::mm", PRODUCT, 4000, 300, 1, dtypes=["bfloat16"] * 2)
    both = trace(kernel("aten::mm", PRODUCT, 0, 3000, 0), half)
    said = "one roof was used for all precisions (fp32, bf16): give a roof for each"
    found = step_budget(both, ROOFS["fp32"])
    assert said in str(found)
    assert said in found.condensed(1)._repr_html_()
    assert StepBudget.from_dict(json.loads(json.dumps(found.as_dict()))).remarks == found.remarks
    assert step_budget(both, ROOFS).remarks == ()
    assert step_budget(trace(half), ROOFS["bf16"]).remarks == ()


def test_a_measured_roof_that_judges_calls_of_another_precision_alone_is_remarked_on() -> None:
    half = trace(kernel("aten::mm", PRODUCT, 0, 300, 0, dtypes=["bfloat16"] * 2))
    roof = measured()
    assert roof.precision == "fp32"
    (remark,) = step_budget(half, roof).remarks
    assert remark.startswith("the roof of fp32 was used for all precisions (bf16)")
    assert step_budget(trace(kernel("aten::mm", PRODUCT, 0, 3000, 0)), roof).remarks == ()


def test_the_text_says_what_is_explained_and_where_the_rest_is() -> None:
    found = step_budget(
        trace(
            kernel("aten::mm", PRODUCT, 0, 3000, 0),
            kernel("aten::odd", [[3]], 3000, 40, 1),
            kernel("aten::mul", ADD, 3100, 110, 2),
        ),
        ROOFS,
    )
    assert str(found) == (
        "step of 3.21 ms: roof 2.85 ms (88.8 %), beyond the roof's time 260.6 µs, without a count 40.0 µs, "
        "idle 60.0 µs; 3 calls"
    )
    rows = found.table()
    assert [row[0] for row in rows] == ["mm", "odd", "mul"]
    assert rows[1][3] == "none"
    assert rows[1][-1] == "no counting rule for odd"
    assert found.table(1)[1][0] == "2 more"
    html = found._repr_html_()
    assert '<th scope="col">Loss, µs</th>' in html
    assert "88.8 %" in html


def test_kernels_that_overlap_are_said_to() -> None:
    found = step_budget(
        trace(kernel("aten::mul", ADD, 0, 100, 0), kernel("aten::mul", ADD, 50, 100, 1)), ROOFS
    )
    assert found.overlap_us == 50
    assert "less 50.0 µs that overlap" in str(found)


@pytest.mark.parametrize(
    ("given_trace", "roofs", "error", "said"),
    [
        (3, ROOFS, TypeError, "takes a KernelTrace or its dict with the kernels, not 3"),
        ({"span_us": 1.0}, ROOFS, TypeError, "takes a KernelTrace or its dict"),
        (
            {"trace": trace()},
            ROOFS,
            TypeError,
            "not keys .'trace'.: pass the trace itself, not the recording",
        ),
        (trace(), ROOFS, ValueError, "the trace has no kernel"),
        (
            trace({"name": "k", "op": "", "start_us": 0.0}),
            ROOFS,
            ValueError,
            "kernel 0 of the trace lacks duration_us",
        ),
        (trace(kernel("aten::mm", PRODUCT, 0, 1, 0)), {}, ValueError, "no roof: give one"),
        (trace(kernel("aten::mm", PRODUCT, 0, 1, 0)), {"fp32": 67e12}, TypeError, "the roof for fp32 is 6"),
        (trace(kernel("aten::mm", PRODUCT, 0, 1, 0)), None, TypeError, "the roof is None"),
    ],
)
def test_what_is_no_trace_and_no_roof_is_named(given_trace, roofs, error, said) -> None:
    with pytest.raises(error, match=said):
        step_budget(given_trace, roofs)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("duration_us", float("nan"), "duration_us is nan"),
        ("duration_us", -1.0, "duration_us is -1.0: 0 or more"),
        ("duration_us", True, "duration_us is True"),
        ("start_us", 10**400, "start_us is 1000"),
        ("start_us", "3", "start_us is '3'"),
        ("shapes", [[2, 2.5], [2, 2]], "a length in shapes is 2.5"),
        ("shapes", {1, 2}, "shapes is {1, 2}: a list is wanted"),
        ("dtypes", [None, None], "a dtype is None: a text is wanted"),
        ("call", "0", "call is '0'"),
        ("name", None, "name is None: a text is wanted"),
        ("op", 5, "op is 5: a text is wanted"),
    ],
)
def test_a_kernel_with_a_field_that_no_trace_has_is_named_and_not_summed(field, value, said):
    kernel = {
        "name": "gemm",
        "op": "aten::mm",
        "shapes": [[2, 2], [2, 2]],
        "dtypes": ["float32"] * 2,
        "call": 0,
    }
    whole = {**kernel, "start_us": 0.0, "duration_us": 2.0}
    roof = Roofline(peak_flops=67e12, bandwidth=4.8e12)
    assert step_budget({"kernels": [whole]}, roof).span_us == 2.0
    with pytest.raises(ValueError, match="kernel 1 of the trace: " + re.escape(said)):
        step_budget({"kernels": [whole, {**whole, field: value}]}, roof)


def test_a_kernel_that_is_no_table_is_named():
    with pytest.raises(TypeError, match="kernel 0 of the trace is 'gemm': a table of fields is wanted"):
        step_budget({"kernels": ["gemm"]}, Roofline(peak_flops=67e12, bandwidth=4.8e12))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("measured_us", float("inf"), "measured_us is inf"),
        ("measured_us", [1.0], r"measured_us is \[1.0\]"),
        ("least_us", None, "flops, bytes and least_us of aten::mm are all given or all None"),
        ("calls", 1.5, "calls is 1.5"),
        ("family", "products", "family is 'products': one of product, attention"),
        ("bound", "l2", "bound is 'l2': one of memory, compute, None"),
        ("in_l2", 1, "in_l2 is 1: true or false"),
        ("shapes", [5], "a shape is 5: a list is wanted"),
        ("op", None, "op is None: a text is wanted"),
    ],
)
def test_a_row_with_a_field_that_no_budget_has_is_named_and_makes_no_budget(field, value, said):
    kernel = {
        "name": "gemm",
        "op": "aten::mm",
        "shapes": [[2, 2], [2, 2]],
        "dtypes": ["float32"] * 2,
        "call": 0,
    }
    trace = {"kernels": [{**kernel, "start_us": 0.0, "duration_us": 2.0}]}
    data = json.loads(json.dumps(step_budget(trace, Roofline(peak_flops=67e12, bandwidth=4.8e12)).as_dict()))
    assert StepBudget.from_dict(data).as_dict() == data
    data["rows"][0][field] = value
    with pytest.raises(ValueError, match=said):
        StepBudget.from_dict(data)
