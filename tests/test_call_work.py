"""The work of a traced call: right where shapes suffice, missing with a reason where they do not, never 0."""

from __future__ import annotations

import pytest

from gpucourse import work
from gpucourse.call_work import (
    _ATTENTIONS,
    _FOREACH,
    _FUSED,
    _LISTS,
    _POINTWISE,
    _RULES,
    Missing,
    family_of,
    generated_arguments,
    work_of_call,
)
from gpucourse.work import Work

torch = pytest.importorskip("torch")


def counted(op: str, shapes, dtypes="float32", **options) -> Work:
    if isinstance(dtypes, str):
        dtypes = [dtypes] * len(shapes)
    found = work_of_call(op, shapes, dtypes, **options)
    assert isinstance(found, Work), found
    assert found.convention
    return found


def missing(op: str, shapes, dtypes="float32", **options) -> str:
    if isinstance(dtypes, str):
        dtypes = [dtypes] * len(shapes)
    found = work_of_call(op, shapes, dtypes, **options)
    assert isinstance(found, Missing), found
    assert not found
    assert found.op == op
    return found.reason


# --- products ------------------------------------------------------------------------------------------------

BF16, FP32, I64 = "bfloat16", "float32", "int64"


@pytest.mark.parametrize(
    ("op", "shapes", "flops", "numbers"),
    [
        ("aten::mm", [(5, 7), (7, 3)], 2 * 5 * 7 * 3, 35 + 21 + 15),
        ("aten::mm", [(5, 7), (7, 3), (5, 3)], 2 * 5 * 7 * 3, 35 + 21 + 15),  # out=
        ("aten::addmm", [(3,), (5, 7), (7, 3)], 2 * 5 * 7 * 3, 35 + 21 + 15 + 3),
        ("aten::addmm", [(5, 3), (5, 7), (7, 3), (5, 3)], 2 * 5 * 7 * 3, 35 + 21 + 15 + 15),
        ("aten::bmm", [(4, 5, 7), (4, 7, 3)], 4 * 2 * 5 * 7 * 3, 4 * (35 + 21 + 15)),
        ("aten::baddbmm", [(4, 5, 3), (4, 5, 7), (4, 7, 3)], 4 * 2 * 5 * 7 * 3, 4 * (35 + 21 + 15 + 15)),
        ("aten::linear", [(2, 5, 7), (3, 7), (3,)], 2 * 10 * 7 * 3, 70 + 21 + 30 + 3),
        ("aten::linear", [(5, 7), (3, 7)], 2 * 5 * 7 * 3, 35 + 21 + 15),
        ("aten::mv", [(5, 7), (7,)], 2 * 5 * 7, 35 + 7 + 5),
        ("aten::addmv", [(5,), (5, 7), (7,)], 2 * 5 * 7, 35 + 7 + 5 + 5),
        ("aten::dot", [(9,), (9,)], 2 * 9, 19),
    ],
)
def test_a_product_is_counted_by_hand(op, shapes, flops, numbers) -> None:
    for dtype, itemsize in ((FP32, 4), (BF16, 2)):
        found = counted(op, shapes, dtype)
        assert (found.flops, found.bytes) == (flops, numbers * itemsize)
        assert family_of(op) == "product"


@pytest.mark.parametrize("op", ["mm", "addmm", "bmm", "baddbmm"])
def test_torchs_own_counter_agrees_on_products(op) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    shapes = {"mm": [(5, 7), (7, 3)], "addmm": [(3,), (5, 7), (7, 3)], "bmm": [(4, 5, 7), (4, 7, 3)],
              "baddbmm": [(4, 5, 3), (4, 5, 7), (4, 7, 3)]}[op]  # fmt: skip
    with FlopCounterMode(display=False) as counter:
        getattr(torch, op)(*(torch.randn(shape) for shape in shapes))
    assert counted(f"aten::{op}", shapes).flops == counter.get_total_flops()


def test_matrices_that_do_not_fit_are_no_product() -> None:
    assert "[5, 7], [8, 3] are not those of mm (7 columns meet 8 rows)" in missing(
        "aten::mm", [(5, 7), (8, 3)]
    )
    assert "not those of mm" in missing("aten::mm", [(5, 7)])


# --- attention -------------------------------------------------------------------------------------------------

HEADS_SECOND, HEADS_THIRD = (2, 3, 10, 8), (2, 10, 3, 8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("aten::_scaled_dot_product_flash_attention", HEADS_SECOND),
        ("aten::_scaled_dot_product_efficient_attention", HEADS_SECOND),
        ("aten::_cudnn_attention_forward", HEADS_SECOND),
        ("aten::_flash_attention_forward", HEADS_THIRD),
        ("aten::_efficient_attention_forward", HEADS_THIRD),
    ],
)
def test_attention_is_counted_whichever_way_its_heads_lie(op, shape, causal) -> None:
    expected = work.attention_work(2, 3, 10, 8, 2, causal=causal)
    found = counted(op, [shape] * 3, BF16, causal=causal)
    assert (found.flops, found.bytes) == (expected.flops, expected.bytes)
    backward = counted(f"{op.removesuffix('_forward')}_backward", [shape] * 5, BF16, causal=causal)
    assert backward.flops == 2.5 * expected.flops  # five products in place of two
    assert backward.bytes == 8 * 2 * 3 * 10 * 8 * 2
    assert ("causal" in found.convention) is causal
    assert family_of(op) == "attention"


def test_keys_that_several_heads_share_are_moved_once() -> None:
    q, k = (2, 12, 10, 8), (2, 3, 20, 8)
    found = counted("aten::_scaled_dot_product_flash_attention", [q, k, k], BF16)
    expected = work.attention_work(2, 12, 10, 8, 2, keys=20, kv_heads=3)
    assert (found.flops, found.bytes) == (expected.flops, expected.bytes)


# --- convolution, norms, softmax, loss -----------------------------------------------------------------------------


def test_a_convolution_forward_is_missing_for_its_stride_and_its_backward_is_counted() -> None:
    for op in ("aten::conv2d", "aten::convolution", "aten::cudnn_convolution"):
        assert "stride and padding" in missing(op, [(2, 4, 8, 8), (6, 4, 3, 3)])
    forward = work.convolution_work(2, 4, 6, (8, 8), (3, 3), 4, padding=1)
    backward = counted("aten::convolution_backward", [(2, 6, 8, 8), (2, 4, 8, 8), (6, 4, 3, 3)])
    assert backward.flops == 2 * forward.flops
    grouped = counted("aten::convolution_backward", [(2, 4, 8, 8), (2, 4, 8, 8), (4, 1, 3, 3)])
    assert grouped.flops == 2 * work.convolution_work(2, 4, 4, (8, 8), (3, 3), 4, padding=1, groups=4).flops
    assert "transposed" in missing("aten::convolution_backward", [(2, 9, 8, 8), (2, 6, 8, 8), (6, 4, 3, 3)])


def test_layer_norm_takes_its_row_from_the_scale_and_its_backward_from_the_means() -> None:
    shapes = [(3, 5, 16), (16,), (16,)]
    found = counted("aten::native_layer_norm", shapes)
    expected = work.layer_norm_work(15, 16, 4, stats=True)
    assert (found.flops, found.bytes) == (expected.flops, expected.bytes)
    assert "length of a row is not in the trace" in missing("aten::native_layer_norm", shapes[:1])
    back = counted(
        "aten::native_layer_norm_backward", [(3, 5, 16), (3, 5, 16), (3, 5, 1), (3, 5, 1), (16,), (16,)]
    )
    assert back.bytes == work.layer_norm_backward_work(15, 16, 4).bytes


def test_softmax_and_loss_by_hand() -> None:
    assert counted("aten::_log_softmax", [(6, 10)]).bytes == 2 * 60 * 4
    assert counted("aten::_softmax", [(2, 3, 10)], BF16).flops == 5 * 60
    assert counted("aten::_log_softmax_backward_data", [(6, 10), (6, 10)]).bytes == 3 * 60 * 4
    assert counted("aten::nll_loss_forward", [(6, 10), (6,)], [FP32, I64]).bytes == 6 * 4 + 6 * 8
    # The loss's own gradient is one number, which a trace leaves out; the sum's has a value a row.
    for first in ([], [(6,)]):
        shapes, dtypes = [*first, (6, 10), (6,)], [*(FP32 for _ in first), FP32, I64]
        assert counted("aten::nll_loss_backward", shapes, dtypes).bytes == 6 * 4 + 6 * 8
    assert "not those of nll_loss_backward" in missing("aten::nll_loss_backward", [(6,)])


def test_a_table_is_read_where_it_is_looked_up_and_no_further() -> None:
    looked = counted("aten::index_select", [(1000, 16), (6,)], [FP32, I64])
    assert looked.bytes == 6 * 16 * 4 + 6 * 8 + 6 * 16 * 4
    often = counted("aten::embedding", [(4, 16), (2, 50)], [FP32, I64])
    assert often.bytes == 4 * 16 * 4 + 100 * 8 + 100 * 16 * 4  # the table once, however often it is used
    spread = counted("aten::gather", [(1000, 16), (6, 16), (6, 16)], [FP32, I64, FP32])
    assert spread.bytes == looked.bytes
    assert (
        counted("aten::embedding_dense_backward", [(6, 16), (6,)], [FP32, I64]).bytes == 2 * 6 * 16 * 4 + 48
    )
    assert family_of("aten::gather") == "embedding"


# --- element by element, copies, reductions -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "shapes", "dtypes", "moved"),
    [
        ("aten::add", [(8, 16), (8, 16)], [FP32, FP32], 3 * 512),
        ("aten::add", [(8, 16), (16,)], [FP32, FP32], 512 + 64 + 512),
        ("aten::add", [(8, 1), (1, 16)], [FP32, FP32], 32 + 64 + 512),
        ("aten::add", [(8, 16), (8, 16)], [FP32, BF16], 512 + 256 + 512),
        ("aten::mul", [(8, 16), ()], [BF16, FP32], 256 + 4 + 256),  # a number goes along with the tensor's type
        ("aten::add_", [(8, 16), (16,)], [BF16, FP32], 256 + 64 + 256),
        ("aten::add", [(8, 16), (8, 16), (8, 16)], [FP32] * 3, 3 * 512),  # out=
        ("aten::gt", [(8, 16), (8, 16)], [FP32, FP32], 512 + 512 + 128),
        ("aten::gelu", [(8, 16)], [FP32], 1024),
        ("aten::gelu_backward", [(8, 16), (8, 16)], [BF16, BF16], 3 * 256),
        ("aten::addcdiv_", [(8, 16)] * 3, [FP32] * 3, 4 * 512),
        ("aten::where", [(8, 16), (8, 16), ()], ["bool", FP32, FP32], 128 + 512 + 4 + 512),
        ("aten::copy_", [(8, 16), (8, 16)], [BF16, FP32], 256 + 512),
        ("aten::copy_", [(8, 16), (16,)], [FP32, FP32], 512 + 64),
        ("aten::fill_", [(8, 16)], [FP32], 512),
        ("aten::zero_", [(8, 16)], [BF16], 256),
        ("aten::cat", [(8, 16), (8, 16)], [FP32, FP32], 2 * 1024),
        ("aten::sum", [(8, 16)], [FP32], 512),
        ("aten::sum", [(8, 16), (16,)], [FP32, FP32], 512 + 64),
        ("aten::cumsum", [(8, 16)], [FP32], 1024),
    ],
)  # fmt: skip
def test_what_goes_element_by_element_moves_each_array_once(op, shapes, dtypes, moved) -> None:
    assert counted(op, shapes, dtypes).bytes == moved


def test_copies_and_fills_do_no_arithmetic_and_sums_one_operation_an_element() -> None:
    for op, shapes in (("aten::copy_", [(8, 16)] * 2), ("aten::fill_", [(8, 16)]), ("aten::cat", [(8, 16)])):
        assert counted(op, shapes).flops == 0
        assert family_of(op) == "copy or fill"
    assert counted("aten::sum", [(8, 16)]).flops == 128
    assert counted("aten::gelu", [(8, 16)]).flops == 5 * 128


def test_an_operation_that_torch_tags_as_element_wise_is_counted_and_says_how() -> None:
    assert "digamma" not in _POINTWISE
    found = counted("aten::digamma", [(8, 16)])
    assert (found.flops, found.bytes) == (128, 1024)
    assert "for want of a better count" in found.convention
    assert family_of("aten::digamma") == "element-wise"


@pytest.mark.parametrize("name", sorted(_POINTWISE))
def test_every_element_wise_rule_is_of_an_operation_that_torch_has(name) -> None:
    packet = getattr(torch.ops.aten, name)
    tags = [tag for kind in packet.overloads() for tag in getattr(packet, kind).tags]
    untagged = {"native_dropout_backward", "where", "masked_fill", "rsub", "floor_divide"}
    assert torch.Tag.pointwise in tags or name in untagged
    most, flops = _POINTWISE[name]
    assert 1 <= most <= 3
    assert flops >= 1


@pytest.mark.parametrize("name", sorted({*_RULES, *_FUSED, *_LISTS} - {"cudnn_convolution_transpose"}))
def test_every_rule_is_of_an_operation_that_torch_has(name) -> None:
    assert hasattr(torch.ops.aten, name), name
    assert family_of(f"aten::{name}") != "other"


def test_shapes_that_do_not_broadcast_have_no_count() -> None:
    assert "[3, 4] do not broadcast" in missing("aten::add", [(8, 3), (8, 4)])
    assert "[3, 4] do not broadcast" in missing("aten::add", [(8, 4), (8, 3)])


# --- lists --------------------------------------------------------------------------------------------------------

PARAMETERS = [(10, 4), (4,), (7, 3)]
ELEMENTS = 40 + 4 + 21


@pytest.mark.parametrize(
    ("op", "lists", "moved"),
    [
        ("aten::_fused_adamw_", 4, 7),  # parameters, gradients, two moments read; three of them written
        ("aten::_fused_sgd_", 3, 5),
        ("aten::_foreach_mul_", 1, 2),
        ("aten::_foreach_add_", 2, 3),
        ("aten::_foreach_lerp_", 2, 3),
        ("aten::_foreach_addcmul_", 3, 4),
        ("aten::_foreach_addcdiv_", 3, 4),
        ("aten::_foreach_sqrt", 1, 2),
        ("aten::_foreach_copy_", 2, 2),
        ("aten::_foreach_zero_", 1, 1),
        ("aten::_foreach_norm", 1, 1),
    ],
)
def test_a_call_on_lists_moves_each_list_as_often_as_it_is_read_and_written(op, lists, moved) -> None:
    found = counted(op, PARAMETERS * lists)
    assert found.bytes == moved * 4 * ELEMENTS
    assert family_of(op) == "optimizer"
    assert counted(op, PARAMETERS * lists, BF16).bytes == moved * 2 * ELEMENTS


def test_a_list_that_the_profiler_left_out_is_counted_from_the_parameters_or_not_at_all() -> None:
    assert "lists of more than 30 tensors; pass list_elements" in missing("aten::_fused_adamw_", [])
    found = counted("aten::_fused_adamw_", [], list_elements=ELEMENTS)
    assert found.bytes == 7 * 4 * ELEMENTS
    assert "65 fp32 elements assumed" in found.convention
    assert "no counting rule for _foreach_erf" in missing("aten::_foreach_erf", PARAMETERS)


def test_two_lists_of_one_shape_are_told_from_one_list_with_a_number() -> None:
    assert counted("aten::_foreach_add_", PARAMETERS).bytes == 2 * 4 * ELEMENTS
    assert counted("aten::_foreach_add_", [(8, 2), (3,), (5,), (2,)]).bytes == 2 * 4 * 26
    assert set(_FOREACH) > {"add", "addcdiv"}


# --- generated kernels ------------------------------------------------------------------------------------------


def test_a_generated_kernel_moves_each_argument_once_and_what_it_updates_twice() -> None:
    op, shapes = "triton_poi_fused_add_0", [(8, 16), (8, 16)]
    assert counted(op, shapes).bytes == 2 * 512
    assert counted(op, shapes, arguments=("in_out_ptr0", "in_ptr0")).bytes == 3 * 512
    assert counted(op, shapes).flops == 0
    assert "arithmetic is not counted" in counted(op, shapes).convention
    assert family_of(op) == "generated"
    assert "its lengths are not told apart" in missing("triton_tem_fused_mm_1", shapes)
    assert "arguments are not in the trace" in missing(op, [])


def test_a_generated_lookup_reads_as_many_rows_as_it_has_indices() -> None:
    shapes, dtypes = [(2, 3), (1000, 16), (2, 3, 16)], [I64, FP32, FP32]
    found = counted("triton_poi_fused_embedding_0", shapes, dtypes)
    assert found.bytes == 6 * 8 + 6 * 16 * 4 + 96 * 4
    assert "as many rows as there are indices" in found.convention
    assert counted("triton_poi_fused_add_0", shapes, dtypes).bytes == 6 * 8 + 1000 * 16 * 4 + 96 * 4


def test_the_names_of_generated_arguments_come_from_the_compilers_code(tmp_path) -> None:
    inside = tmp_path / "ab"
    inside.mkdir()
    (inside / "one.py").write_text(
        "def triton_poi_fused_add_0(in_out_ptr0, in_ptr0, xnumel, XBLOCK : tl.constexpr):\n    pass\n"
        "def triton_red_fused_sum_1(in_ptr0, out_ptr0,\n    ws_ptr, xnumel, r0_numel):\n    pass\n"
    )
    (inside / "two.py").write_text("def triton_poi_fused_mul_0(in_ptr0, out_ptr0, xnumel):\n    pass\n")
    (tmp_path / "three.py").write_text("def triton_poi_fused_mul_0(in_out_ptr0, xnumel):\n    pass\n")
    (tmp_path / "four.py").write_bytes(b"\xff\xfe no text")
    assert generated_arguments(tmp_path) == {
        "triton_poi_fused_add_0": ("in_out_ptr0", "in_ptr0"),
        "triton_red_fused_sum_1": ("in_ptr0", "out_ptr0", "ws_ptr"),
    }  # mul is written twice, otherwise each time
    assert generated_arguments(tmp_path / "nowhere") == {}


# --- what has no count ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "shapes", "dtypes", "reason"),
    [
        ("", [(8,)], [FP32], "no operation of torch encloses the launch"),
        ("aten::special_thing", [(8,)], [FP32], "no counting rule for special_thing"),
        ("Memcpy", [], [], "no counting rule for Memcpy"),
        ("aten::add", [(8,)], [], "0 types for 1 shapes"),
        ("aten::add", [(8,)], ["unknown"], "'unknown' of an argument has no known size"),
        ("aten::add", [], [], "its shapes are not in the trace"),
        ("aten::fill_", [], [], "what it fills is not in the trace"),
        ("aten::copy_", [(8,)], [FP32], "what it writes is not in the trace"),
        ("aten::add", [(0, 4), (4,)], [FP32, FP32], ""),
        ("aten::fill_", [(0, 4)], [FP32], "its tensors are empty"),
        ("aten::mm", [(0, 4), (4, 0)], [FP32, FP32], "not those of mm"),
    ],
)
def test_what_cannot_be_counted_says_why_and_is_never_zero(op, shapes, dtypes, reason) -> None:
    found = work_of_call(op, shapes, dtypes)
    if reason:
        assert isinstance(found, Missing)
        assert reason in found.reason
    else:
        assert found.bytes > 0


def test_a_type_has_its_size_by_torchs_name_and_by_the_profilers() -> None:
    for dtype in ("float32", "float", "torch.float32"):
        assert counted("aten::fill_", [(8,)], dtype).bytes == 32
    for dtype in ("bfloat16", "c10::BFloat16", "c10::Half", "float16"):
        assert counted("aten::fill_", [(8,)], dtype).bytes == 16
    for dtype in ("int64", "long int", "double"):
        assert counted("aten::fill_", [(8,)], dtype).bytes == 64


def test_an_operation_is_named_by_a_text() -> None:
    with pytest.raises(TypeError, match="op is the name of an operation, such as 'aten::mm', not 3"):
        work_of_call(3, [], [])  # type: ignore[arg-type]


def test_every_attention_rule_takes_the_causal_flag() -> None:
    for name, rule in _RULES.items():
        assert (rule in _ATTENTIONS) == ("attention" in name)


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        ("aten::native_layer_norm", [(5, 0), (0,), (0,)]),
        ("aten::native_layer_norm_backward", [(0, 5), (0, 5), (0, 1)]),
        ("aten::_softmax", [(5, 0)]),
        ("aten::_softmax_backward_data", [(5, 0), (5, 0)]),
        ("aten::linear", [(2, 0), (3, 0)]),
        ("aten::gather", [(5, 3), (5, 0)]),
        ("aten::mm", [(0, 5), (5, 3)]),
        ("aten::bmm", [(0, 2, 2), (0, 2, 2)]),
    ],
)
def test_a_call_on_an_empty_tensor_has_no_count_and_stops_nothing(op, shapes) -> None:
    assert "empty" in missing(op, shapes)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (
            {"shapes": [(2, 2.5), (2, 2)]},
            TypeError,
            r"a length in the shape \(2, 2.5\) is a whole number, not 2.5",
        ),
        ({"shapes": [(True, 2), (2, 2)]}, TypeError, "not True"),
        ({"shapes": [(float("inf"), 2), (2, 2)]}, TypeError, "not inf"),
        ({"shapes": [(-2, 2), (2, 2)]}, ValueError, "is -2; wanted 0 or more"),
        ({"shapes": [None, (2, 2)]}, TypeError, "a shape is a list of whole numbers, not None"),
        ({"shapes": None}, TypeError, "shapes are a list, one a tensor, not None"),
        ({"dtypes": "float32"}, TypeError, "dtypes are a list of names, one a shape, not 'float32'"),
        ({"list_elements": 1.5}, TypeError, "list_elements is a whole number, not 1.5"),
        ({"list_elements": -1}, ValueError, "list_elements is -1; wanted 0 or more"),
    ],
)
def test_shapes_that_no_tensor_has_are_refused_and_not_rounded(given, error, said) -> None:
    facts = {"shapes": [(2, 2), (2, 2)], "dtypes": ["float32"] * 2} | given
    with pytest.raises(error, match=said):
        work_of_call("aten::mm", **facts)


@pytest.mark.parametrize("op", ["aten::name", "aten::_dir", "aten::__class__", "aten::__getattr__"])
def test_an_attribute_of_torchs_that_is_no_operation_has_no_rule(op) -> None:
    assert "no counting rule" in missing(op, [(2, 2)])
    assert family_of(op) == "other"
