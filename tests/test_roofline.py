"""Facts about the bound, the counting rules and the refusal of bad input."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucourse import hardware, roofline
from gpucourse.environment import NoGPUError, cuda_available
from gpucourse.roofline import (
    LeastTime,
    Roofline,
    RooflineInputError,
    RooflineInputs,
    Work,
    attention_work,
    compute_c12,
    convolution_work,
    elementwise_work,
    is_finite,
    layer_norm_backward_work,
    layer_norm_steps,
    layer_norm_work,
    linear_backward_work,
    matmul_work,
    matrix_vector_work,
    measure_roofline,
    softmax_backward_work,
    softmax_steps,
    softmax_work,
    validate_shapes_and_units,
)
from gpucourse.units import ureg

Q = ureg.Quantity


def batch(**changes):
    """Give a good batch with some symbols replaced; None leaves one out."""
    good = {"P_peak": Q(989, "TFLOP/s"), "I": Q(85, "FLOP/byte"), "B_mem": Q(4800, "GB/s")} | changes
    return {symbol: quantity for symbol, quantity in good.items() if quantity is not None}


# --- from quantities to numbers ---------------------------------------------------------------------------


def test_units_are_stripped_to_si():
    inputs = validate_shapes_and_units(batch())
    assert (inputs.peak_flops, inputs.intensity, inputs.bandwidth) == (989e12, 85.0, 4.8e12)
    assert compute_c12(inputs) == pytest.approx(408e12)


def test_the_same_quantity_in_other_units_is_the_same_number():
    one = validate_shapes_and_units(batch())
    other = validate_shapes_and_units(
        batch(P_peak=Q(0.989, "PFLOP/s"), I=Q(85 * 2**30, "FLOP/GiB"), B_mem=Q(38.4, "Tbit/s"))
    )
    assert other.peak_flops == pytest.approx(one.peak_flops)
    assert other.intensity == pytest.approx(one.intensity)
    assert other.bandwidth == pytest.approx(one.bandwidth)


def test_a_scalar_goes_with_any_shape():
    rates = compute_c12(validate_shapes_and_units(batch(I=Q(np.array([[0, 85, 1000]]), "FLOP/byte"))))
    assert rates.shape == (1, 3)
    assert rates.tolist() == [[0.0, pytest.approx(408e12), 989e12]]


def test_arrays_of_one_shape_go_together_element_by_element():
    peaks, bandwidths = Q(np.array([67.0, 989.0]), "TFLOP/s"), Q(np.array([4800.0, 4800.0]), "GB/s")
    rates = compute_c12(
        validate_shapes_and_units(batch(P_peak=peaks, I=Q(20, "FLOP/byte"), B_mem=bandwidths))
    )
    assert (rates / 1e12).tolist() == [67.0, pytest.approx(96.0)]


@pytest.mark.parametrize("symbol", ["P_peak", "I", "B_mem"])
def test_a_missing_symbol_is_named_with_an_example(symbol):
    with pytest.raises(RooflineInputError, match=rf"{symbol}: missing.*ureg\.Quantity") as caught:
        validate_shapes_and_units(batch(**{symbol: None}))
    assert caught.value.symbol == symbol


@pytest.mark.parametrize("symbol", ["P_peak", "I", "B_mem"])
@pytest.mark.parametrize("plain", [989e12, "989 TFLOP/s", np.array([1.0])])
def test_a_number_without_a_unit_is_refused(symbol, plain):
    with pytest.raises(RooflineInputError, match=rf"{symbol}: .*has no unit") as caught:
        validate_shapes_and_units(batch(**{symbol: plain}))
    assert caught.value.symbol == symbol


@pytest.mark.parametrize(
    ("symbol", "quantity"),
    [
        ("P_peak", Q(989, "TFLOP")),
        ("P_peak", Q(989, "THz")),
        ("P_peak", Q(4800, "GB/s")),
        ("I", Q(85, "FLOP")),
        ("I", Q(85, "dimensionless")),
        ("I", Q(85, "byte/FLOP")),
        ("B_mem", Q(4800, "GHz")),
        ("B_mem", Q(4800, "GB")),
        ("B_mem", Q(4800, "Gb/s")),  # a gilbert, to pint: the bit is written bit
        ("B_mem", Q(989, "TFLOP/s")),
    ],
)
def test_a_wrong_dimension_is_refused_and_named(symbol, quantity):
    with pytest.raises(
        RooflineInputError, match=rf"{symbol}: .* is not a unit of .*; that is measured in"
    ) as caught:
        validate_shapes_and_units(batch(**{symbol: quantity}))
    assert caught.value.symbol == symbol


@pytest.mark.parametrize(("symbol", "unit"), [("P_peak", "TFLOP/s"), ("I", "FLOP/byte"), ("B_mem", "GB/s")])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, [1.0, math.nan]])
def test_what_is_not_finite_is_refused_and_named(symbol, unit, value):
    with pytest.raises(RooflineInputError, match=rf"{symbol}: .*(nan|inf) is not a finite number"):
        validate_shapes_and_units(batch(**{symbol: Q(value, unit)}))


@pytest.mark.parametrize(("symbol", "unit"), [("P_peak", "TFLOP/s"), ("B_mem", "GB/s")])
@pytest.mark.parametrize("value", [0, -1.5, [989.0, 0.0]])
def test_a_ceiling_that_is_not_positive_is_refused(symbol, unit, value):
    with pytest.raises(RooflineInputError, match=rf"{symbol}: .*must be positive"):
        validate_shapes_and_units(batch(**{symbol: Q(value, unit)}))


def test_a_negative_intensity_is_refused_and_zero_is_a_plain_copy():
    with pytest.raises(RooflineInputError, match=r"I: -2 .*must not be negative"):
        validate_shapes_and_units(batch(I=Q(-2, "FLOP/byte")))
    assert compute_c12(validate_shapes_and_units(batch(I=Q(0, "FLOP/byte")))) == 0.0


def test_shapes_that_disagree_are_refused_even_where_numpy_would_broadcast():
    with pytest.raises(RooflineInputError, match=r"B_mem: shape \(1, 2\) disagrees with I of shape \(2,\)"):
        validate_shapes_and_units(batch(I=Q(np.ones(2), "FLOP/byte"), B_mem=Q(np.ones((1, 2)), "GB/s")))
    with pytest.raises(RooflineInputError, match="disagrees"):
        validate_shapes_and_units(batch(P_peak=Q(np.ones(1), "TFLOP/s"), I=Q(np.ones(3), "FLOP/byte")))


def test_a_symbol_that_the_bound_does_not_have_is_refused():
    with pytest.raises(RooflineInputError, match=r"P_max: not a symbol.*P_peak, I, B_mem"):
        validate_shapes_and_units(batch(P_max=Q(989, "TFLOP/s")))


def test_a_quantity_of_another_registry_is_refused():
    pint = pytest.importorskip("pint")
    other = pint.UnitRegistry()
    with pytest.raises(RooflineInputError, match=r"B_mem: .*another registry.*gpucourse\.units\.ureg"):
        validate_shapes_and_units(batch(B_mem=other.Quantity(4800, "GB/s")))


@pytest.mark.parametrize("magnitude", [[True, False], 1 + 2j, np.array([1.0, "x"], dtype=object)])
def test_magnitudes_that_are_no_real_numbers_are_refused(magnitude):
    with pytest.raises(RooflineInputError, match=r"I: its magnitude is .*, not real numbers"):
        validate_shapes_and_units(batch(I=Q(magnitude, "FLOP/byte")))


def test_a_batch_that_is_no_mapping_is_a_type_error():
    with pytest.raises(TypeError, match=r"list.*P_peak, I, B_mem"):
        validate_shapes_and_units([1, 2, 3])


def test_compute_takes_checked_inputs_only():
    with pytest.raises(TypeError, match="call validate_shapes_and_units first"):
        compute_c12(batch())


def test_an_intensity_beyond_all_floats_is_capped_by_the_peak():
    inputs = RooflineInputs(peak_flops=1e15, intensity=1e308, bandwidth=1e13)
    assert compute_c12(inputs) == 1e15


def test_is_finite_reads_numbers_arrays_and_quantities():
    assert is_finite(1.0)
    assert is_finite(np.arange(3))
    assert is_finite(Q(np.array([1.0, 2.0]), "GB/s"))
    assert not is_finite(math.inf)
    assert not is_finite(np.array([1.0, math.nan]))
    assert not is_finite(Q(math.nan, "GB/s"))
    for bad in ("1", None, [object()], True, 1 + 1j):
        with pytest.raises(TypeError, match="real numbers"):
            is_finite(bad)


# --- the bound --------------------------------------------------------------------------------------------

ceilings = st.floats(min_value=1e9, max_value=1e16)
intensities = st.floats(min_value=0, max_value=1e6)
roofs = st.builds(Roofline, peak_flops=ceilings, bandwidth=ceilings)


@given(roofs, intensities, intensities)
def test_attainable_never_falls_with_intensity_and_never_passes_a_ceiling(roof, one, other):
    low, high = sorted((one, other))
    assert roof.attainable(low) <= roof.attainable(high)
    assert roof.attainable(high) <= roof.peak_flops
    assert roof.attainable(high) <= high * roof.bandwidth * (1 + 1e-12)


@given(roofs)
def test_the_ridge_is_where_both_ceilings_meet(roof):
    assert roof.attainable(roof.ridge) == pytest.approx(roof.peak_flops)
    assert roof.attainable(roof.ridge / 2) == pytest.approx(roof.peak_flops / 2)
    assert roof.bound(roof.ridge) == "compute"
    assert roof.bound(roof.ridge * 0.999) == "memory"


@given(roofs, intensities)
def test_bound_says_which_ceiling_is_reached(roof, intensity):
    if roof.bound(intensity) == "compute":
        assert roof.attainable(intensity) == pytest.approx(roof.peak_flops)
    else:
        assert roof.attainable(intensity) == pytest.approx(intensity * roof.bandwidth)


@given(roofs, st.floats(1e3, 1e18), st.floats(1e3, 1e15))
def test_least_time_is_the_work_at_the_attainable_rate(roof, flops, moved):
    work = Work(flops=flops, bytes=moved)
    least = roof.least_time(work)
    assert least.time_ms == max(least.arithmetic_ms, least.bytes_ms)
    assert least.time_ms == pytest.approx(flops / roof.attainable(work.intensity) * 1e3)
    if abs(work.intensity / roof.ridge - 1) > 1e-9:
        assert least.bound == roof.bound(work.intensity)


@given(roofs, intensities, st.floats(0.01, 100))
def test_scaling_both_ceilings_scales_the_rate_and_leaves_the_bound(roof, intensity, factor):
    scaled = Roofline(peak_flops=factor * roof.peak_flops, bandwidth=factor * roof.bandwidth)
    assert scaled.attainable(intensity) == pytest.approx(factor * roof.attainable(intensity))
    assert scaled.ridge == pytest.approx(roof.ridge)


@given(ceilings, intensities, ceilings)
def test_the_checked_path_and_the_roofline_agree_whatever_the_units(peak, intensity, bandwidth):
    inputs = validate_shapes_and_units(
        {
            "P_peak": Q(peak / 1e12, "TFLOP/s"),
            "I": Q(intensity * 1e3, "FLOP/kB"),
            "B_mem": Q(bandwidth / 2**30, "GiB/s"),
        }
    )
    roof = Roofline(peak_flops=peak, bandwidth=bandwidth)
    assert compute_c12(inputs) == pytest.approx(roof.attainable(intensity), rel=1e-9)
    assert is_finite(compute_c12(inputs))


def test_arrays_go_through_attainable_and_bound():
    roof = Roofline(peak_flops=989e12, bandwidth=4.8e12)
    grid = np.array([[0.0, 85.0], [206.1, 1e4]])
    assert roof.attainable(grid).shape == (2, 2)
    assert roof.bound(grid).tolist() == [["memory", "memory"], ["compute", "compute"]]
    assert roof.bound([1, 1000]).tolist() == ["memory", "compute"]


def test_h200_ridges_by_hand():
    h200 = hardware.device("H200")
    assert Roofline.of(h200, "bf16").ridge == pytest.approx(989 / 4.8)
    assert Roofline.of(h200, "fp32").ridge == pytest.approx(67 / 4.8)


@pytest.mark.parametrize("name", ["peak_flops", "bandwidth"])
@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, True, "989 TFLOP/s", Q(989, "TFLOP/s"), None])
def test_a_roofline_of_a_bad_ceiling_names_it(name, bad):
    good = {"peak_flops": 989e12, "bandwidth": 4.8e12}
    with pytest.raises(RooflineInputError, match=name) as caught:
        Roofline(**{**good, name: bad})
    assert caught.value.symbol == name


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, "85", [1.0, -2.0], True])
def test_a_bad_intensity_is_named(bad):
    roof = Roofline(peak_flops=989e12, bandwidth=4.8e12)
    for method in (roof.attainable, roof.bound):
        with pytest.raises(RooflineInputError, match=r"^I: "):
            method(bad)


# --- what operations must do ------------------------------------------------------------------------------


def test_a_square_product_by_hand():
    work = matmul_work(2048, 2048, 2048, 2)
    assert work.flops == 17_179_869_184
    assert work.bytes == 3 * 2048 * 2048 * 2
    assert work.intensity == pytest.approx(2048 / 3)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([1, 2, 4, 8]))
def test_a_products_intensity_is_the_harmonic_rule(m, n, k, itemsize):
    # 2mnk / itemsize(mk + kn + mn) = 2 / itemsize / (1/m + 1/n + 1/k)
    work = matmul_work(m, n, k, itemsize)
    assert work.intensity == pytest.approx(2 / itemsize / (1 / m + 1 / n + 1 / k))
    assert work.intensity < 2 * min(m, n, k) / itemsize


def test_an_fp32_result_weighs_twice_a_bf16_one():
    assert matmul_work(3, 5, 7, 2, out_itemsize=4).bytes - matmul_work(3, 5, 7, 2).bytes == 2 * 15


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3000))
def test_the_backward_pass_of_a_linear_layer_is_twice_the_forward(tokens, inputs, outputs):
    forward = matmul_work(tokens, outputs, inputs, 2)
    backward = linear_backward_work(tokens, inputs, outputs, 2)
    assert backward.flops == 2 * forward.flops
    # Both products touch the same three matrices as the forward pass, one of each pair read and one written.
    assert backward.bytes == 2 * forward.bytes


def test_element_wise_passes_cost_one_and_a_half_backward():
    assert softmax_backward_work(640, 480, 4).bytes == 1.5 * softmax_work(640, 480, 4).bytes
    ratio = layer_norm_backward_work(10_000, 768, 4).bytes / layer_norm_work(10_000, 768, 4).bytes
    assert ratio == pytest.approx(1.5, rel=2e-3)


def test_layer_norm_by_hand_on_an_odd_shape():
    # 37 rows of 129 in bf16 with fp32 parameters: x and y 2 bytes each, 129 scales and shifts of 4.
    work = layer_norm_work(37, 129, 2, param_itemsize=4)
    assert work.bytes == 37 * 129 * 4 + 2 * 129 * 4
    assert layer_norm_work(37, 129, 2, param_itemsize=4, stats=True).bytes - work.bytes == 37 * 8


def test_steps_move_six_and_four_times_what_the_fused_kernels_move():
    rows, columns = 131072, 768
    norm = sum(step.work.bytes for step in layer_norm_steps(rows, columns, 4))
    soft = sum(step.work.bytes for step in softmax_steps(rows, columns, 4))
    assert norm / layer_norm_work(rows, columns, 4).bytes == pytest.approx(6, rel=2e-3)
    assert soft / softmax_work(rows, columns, 4).bytes == pytest.approx(4, rel=2e-3)


def test_steps_do_the_same_arithmetic_as_the_fused_kernel():
    assert sum(step.flops for step in softmax_steps(37, 129, 4)) == softmax_work(37, 129, 4).flops
    norm = sum(step.flops for step in layer_norm_steps(37, 129, 4))
    assert norm == pytest.approx(layer_norm_work(37, 129, 4).flops, rel=0.01)


def _launches(expression, *shapes):
    """Bytes that an unfused expression reads and writes, seen operation by operation by torch itself."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    class Bytes(TorchDispatchMode):
        moved = 0
        kernels = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = {id(a): a for a in args if isinstance(a, torch.Tensor)}
            self.moved += sum(t.numel() * t.element_size() for t in [*tensors.values(), out])
            self.kernels += 1
            return out

    tensors = [torch.randn(*shape) for shape in shapes]
    with Bytes() as seen:
        expression(*tensors)
    return seen.kernels, seen.moved


def test_the_steps_of_layer_norm_are_the_kernels_that_torch_dispatches():
    torch = pytest.importorskip("torch")

    def norm(x, scale, shift):
        d = x - x.mean(-1, keepdim=True)
        r = torch.rsqrt((d * d).mean(-1, keepdim=True) + 1e-5)
        return d * r * scale + shift

    steps = layer_norm_steps(37, 129, 4)
    assert _launches(norm, (37, 129), (129,), (129,)) == (len(steps), sum(step.work.bytes for step in steps))


def test_the_steps_of_softmax_are_the_kernels_that_torch_dispatches():
    torch = pytest.importorskip("torch")

    def softmax(x):
        e = torch.exp(x - x.amax(-1, keepdim=True))
        return e / e.sum(-1, keepdim=True)

    steps = softmax_steps(37, 129, 4)
    assert _launches(softmax, (37, 129)) == (len(steps), sum(step.work.bytes for step in steps))


def test_torchs_own_counter_agrees_on_products():
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    x, w = (torch.randn(*shape, requires_grad=True) for shape in ((33, 65), (65, 17)))
    with FlopCounterMode(display=False) as counted:
        y = x @ w
    assert counted.get_total_flops() == matmul_work(33, 17, 65, 4).flops
    with FlopCounterMode(display=False) as counted:
        y.sum().backward()
    assert counted.get_total_flops() == linear_backward_work(33, 65, 17, 4).flops


def counted_flops(function, *args, **kwargs):
    """Count with torch's own counter."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counted:
        function(*args, **kwargs)
    return counted.get_total_flops()


def test_attention_by_hand_on_an_odd_shape():
    work = attention_work(2, 3, 5, 7, 2)
    assert work.flops == 2 * 3 * (2 * 5 * 5 * 7 + 2 * 5 * 5 * 7)
    assert work.bytes == 4 * (2 * 3 * 5 * 7) * 2


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (9, 4), (4, 9), (1, 33)])
def test_causal_attention_counts_the_pairs_that_torchs_mask_leaves(queries, keys):
    torch = pytest.importorskip("torch")
    pairs = int(torch.ones(queries, keys).tril().sum())
    work = attention_work(2, 3, queries, 7, 4, keys=keys, causal=True)
    assert work.flops == 4 * 2 * 3 * 7 * pairs
    # The mask that is counted is the one that torch applies: its output is that of the pairs left.
    q, k, v = torch.randn(1, 1, queries, 7), torch.randn(1, 1, keys, 7), torch.randn(1, 1, keys, 7)
    scores = (q @ k.mT / 7**0.5).masked_fill(~torch.ones(queries, keys).tril().bool(), -math.inf)
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(found, scores.softmax(-1) @ v)


def test_heads_that_share_keys_move_fewer_bytes_and_do_the_same_arithmetic():
    own, shared = attention_work(2, 12, 64, 16, 2), attention_work(2, 12, 64, 16, 2, kv_heads=3)
    assert shared.flops == own.flops
    assert own.bytes - shared.bytes == 2 * (2 * 9 * 64 * 16) * 2


def test_torchs_counter_agrees_on_attention_in_products_and_does_not_halve_the_causal_one():
    torch = pytest.importorskip("torch")
    q, k = torch.randn(2, 3, 32, 16), torch.randn(2, 3, 40, 16)
    ours = attention_work(2, 3, 32, 16, 4, keys=40).flops
    assert counted_flops(lambda: (q @ k.mT).softmax(-1) @ k) == ours
    fused = torch.nn.functional.scaled_dot_product_attention
    assert counted_flops(fused, q, k, k) == 0, "torch counts the CPU's kernels now: mend the docstring"
    meta = q.to("meta")
    causal = counted_flops(fused, meta, meta, meta, is_causal=True)
    assert causal == attention_work(2, 3, 32, 16, 4).flops
    assert causal / attention_work(2, 3, 32, 16, 4, causal=True).flops == pytest.approx(2 * 32 / 33)


def test_a_matrix_vector_product_has_less_than_one_flop_a_byte_in_bf16():
    work = matrix_vector_work(37, 129, 2, out_itemsize=4)
    assert (work.flops, work.bytes) == (2 * 37 * 129, 2 * (37 * 129 + 129) + 4 * 37)
    assert work.intensity < 1


def test_torchs_counter_misses_a_matrix_vector_product_and_counts_it_as_a_thin_product():
    torch = pytest.importorskip("torch")
    matrix, vector = torch.randn(37, 129), torch.randn(129)
    assert counted_flops(torch.mv, matrix, vector) == 0, "torch counts it now: mend the docstring"
    assert counted_flops(torch.mm, matrix, vector[:, None]) == matrix_vector_work(37, 129, 4).flops


@pytest.mark.parametrize(
    ("image", "kernel", "options"),
    [
        ((9, 11), (3, 3), {}),
        ((9, 11), (3, 5), {"padding": 2, "stride": 2}),
        ((13, 12), (3, 3), {"dilation": 3, "groups": 3}),
        ((8, 8), (1, 1), {"groups": 6}),
        ((17,), (4,), {"stride": 3, "groups": 2}),
        ((5, 6, 7), (2, 3, 2), {"padding": 1}),
    ],
)
def test_a_convolution_forward_is_what_torch_counts_and_moves_its_three_arrays(image, kernel, options):
    torch = pytest.importorskip("torch")
    x = torch.randn(2, 6, *image)
    w = torch.randn(12, 6 // options.get("groups", 1), *kernel)
    convolve = getattr(torch.nn.functional, f"conv{len(image)}d")
    work = convolution_work(2, 6, 12, image, kernel, 4, **options)
    assert work.flops == counted_flops(convolve, x, w, **options)
    assert work.bytes == 4 * (x.numel() + w.numel() + convolve(x, w, **options).numel())


def test_torchs_counter_is_far_off_on_a_grouped_convolution_backward():
    torch = pytest.importorskip("torch")
    x = torch.randn(2, 64, 8, 8, requires_grad=True)
    w = torch.randn(64, 4, 3, 3, requires_grad=True)
    y = torch.nn.functional.conv2d(x, w, padding=1, groups=16)
    twice = 2 * convolution_work(2, 64, 64, (8, 8), (3, 3), 4, padding=1, groups=16).flops
    counted = counted_flops(lambda: y.sum().backward())
    assert counted > 2 * twice, "torch counts it rightly now: mend the docstring"


def test_numpys_small_integers_do_not_wrap_round_in_the_counts_of_attention_and_convolution():
    small = np.int32
    wide = attention_work(small(64), small(32), small(8192), small(128), small(2), causal=True)
    assert wide == attention_work(64, 32, 8192, 128, 2, causal=True)
    image = tuple(map(small, (512, 512)))
    plain = convolution_work(small(64), small(512), small(512), image, (small(3), 3), small(2))
    assert plain == convolution_work(64, 512, 512, (512, 512), (3, 3), 2)


@pytest.mark.parametrize(
    ("count", "error", "said"),
    [
        (lambda: attention_work(2, 12, 8, 4, 2, kv_heads=5), ValueError, "12, no multiple of kv_heads = 5"),
        (lambda: attention_work(2, 12, 8, 4, 2, causal=1), TypeError, "causal must be True or False, not 1"),
        (lambda: attention_work(2, 12, 0, 4, 2), ValueError, "queries is 0; wanted 1 or more"),
        (lambda: attention_work(2, 12, 8, 4, 2, keys=0), ValueError, "keys is 0; wanted 1 or more"),
        (lambda: matrix_vector_work(3, 0, 2), ValueError, "columns is 0; wanted 1 or more"),
        (lambda: matrix_vector_work(3.0, 2, 2), TypeError, "rows must be a whole number, not 3.0"),
        (lambda: convolution_work(1, 6, 8, (9, 9), (3, 3), 4, groups=4), ValueError, "in_channels is 6, which"),
        (lambda: convolution_work(1, 8, 6, (9, 9), (3, 3), 4, groups=4), ValueError, "out_channels is 6, w"),
        (lambda: convolution_work(1, 2, 2, (9, 9), (3,), 4), ValueError, "equally many dimensions"),
        (lambda: convolution_work(1, 2, 2, 9, (3, 3), 4), TypeError, "image must list an extent a dimension"),
        (lambda: convolution_work(1, 2, 2, (), (), 4), ValueError, "equally many dimensions, 1 or more"),
        (lambda: convolution_work(1, 2, 2, (9, 2), (3, 3), 4), ValueError, r"does not fit in image \(9, 2\)"),
        (lambda: convolution_work(1, 2, 2, (9, 9), (3, 3), 4, padding=-1), ValueError, "padding is -1; wanted 0"),
        (lambda: convolution_work(1, 2, 2, (9, 9), (3, 3), 4, padding=True), TypeError, "padding must be a whole"),
        (lambda: convolution_work(1, 2, 2, (9, 9), (3, 3), 4, stride=0), ValueError, "stride is 0; wanted 1"),
    ],
)  # fmt: skip
def test_a_count_of_an_operation_that_cannot_be_is_refused(count, error, said):
    with pytest.raises(error, match=said):
        count()


def test_an_add_moves_twelve_bytes_an_element():
    work = elementwise_work(2**24, reads=(4, 4), writes=(4,))
    assert (work.flops, work.bytes, work.intensity) == (2**24, 12 * 2**24, pytest.approx(1 / 12))
    assert elementwise_work(5, reads=(4,), writes=(2,), flops_per_element=0).intensity == 0


@pytest.mark.parametrize(
    "count",
    [
        lambda bad: matmul_work(bad, 4, 4, 2),
        lambda bad: matmul_work(4, 4, 4, bad),
        lambda bad: layer_norm_work(4, bad, 2),
        lambda bad: layer_norm_steps(bad, 4, 2),
        lambda bad: layer_norm_backward_work(bad, 4, 2),
        lambda bad: softmax_work(4, bad, 2),
        lambda bad: softmax_steps(4, bad, 2),
        lambda bad: softmax_backward_work(4, 4, bad),
        lambda bad: linear_backward_work(bad, 4, 4, 2),
        lambda bad: elementwise_work(bad, reads=(4,), writes=(4,)),
        lambda bad: elementwise_work(4, reads=(bad,), writes=(4,)),
    ],
)
def test_sizes_that_are_no_positive_whole_numbers_are_refused(count):
    for bad in (0, -3):
        with pytest.raises(ValueError, match=f"is {bad}; wanted 1 or more"):
            count(bad)
    for bad in (2.5, math.nan, True, "4", None):
        with pytest.raises(TypeError, match="must be a whole number"):
            count(bad)


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf])
def test_work_of_an_impossible_amount_is_refused(bad):
    for good in ({"flops": bad, "bytes": 1}, {"flops": 1, "bytes": bad}):
        with pytest.raises(ValueError, match=r"Work: (flops|bytes) is"):
            Work(**good)
    with pytest.raises(TypeError, match="Work: bytes must be a number"):
        Work(flops=1, bytes="8")
    with pytest.raises(ValueError, match="neither arithmetic nor bytes"):
        Work(flops=0, bytes=0)


def test_works_add_up_and_keep_their_conventions():
    total = matmul_work(2, 3, 4, 4) + softmax_work(2, 3, 4)
    assert total.flops == 48 + 30
    assert total.bytes == (8 + 12 + 6) * 4 + 2 * 6 * 4
    assert total.convention.count(";") >= 2
    assert (
        (3 * softmax_work(2, 3, 4)).bytes
        == 3 * softmax_work(2, 3, 4).bytes
        == (softmax_work(2, 3, 4) * 3).bytes
    )
    for nonsense in (1.5, True, "2"):
        with pytest.raises(TypeError):
            _ = nonsense * softmax_work(2, 3, 4)
    with pytest.raises(TypeError):
        _ = softmax_work(2, 3, 4) + 1


def test_work_without_bytes_has_no_finite_intensity():
    assert Work(flops=1, bytes=0).intensity == math.inf


def test_equal_times_count_as_compute():
    assert LeastTime(arithmetic_ms=1.0, bytes_ms=1.0).bound == "compute"


# --- measuring --------------------------------------------------------------------------------------------


@pytest.mark.skipif(cuda_available(), reason="there is a GPU here")
def test_measuring_without_a_gpu_says_so():
    with pytest.raises(NoGPUError, match="measure_roofline needs a CUDA device"):
        measure_roofline("bf16")


def test_the_arithmetic_works_where_torch_is_not_installed():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from gpucourse import hardware, roofline, units\n"
        "roof = roofline.Roofline.of(hardware.device('H200'), 'bf16')\n"
        "assert roof.least_time(roofline.matmul_work(64, 64, 64, 2)).bound == 'memory'\n"
        "q = units.ureg.Quantity\n"
        "roofline.compute_c12(roofline.validate_shapes_and_units("
        "{'P_peak': q(1, 'TFLOP/s'), 'I': q(1, 'FLOP/byte'), 'B_mem': q(1, 'GB/s')}))\n"
        "try: roofline.measure_roofline('bf16')\n"
        "except Exception as error: assert 'torch is not installed' in str(error), error\n"
        "else: raise AssertionError\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# --- numbers that are not plain Python's ---------------------------------------------------------------------


def test_numpys_integers_count_as_pythons_and_never_wrap_round():
    small, wide = np.int32(4096), np.int64(2**21)
    assert roofline.matmul_work(small, small, small, np.int32(2)).flops == 2 * 4096**3
    assert roofline.matmul_work(wide, wide, wide, 2).flops == 2**64
    assert roofline.softmax_work(np.int32(65536), np.int32(65536), 4).bytes == 2**35
    assert roofline.layer_norm_work(np.int8(100), np.int8(100), np.int8(4)).bytes == 80_800
    assert roofline.layer_norm_backward_work(np.int32(65536), np.int32(65536), 4).flops == 14 * 2**32
    assert roofline.softmax_backward_work(np.int32(65536), np.int32(65536), 4).flops == 2**34
    assert roofline.layer_norm_steps(np.int32(65536), np.int32(65536), 4)[0].reads_bytes == 2**34
    assert roofline.softmax_steps(np.int32(65536), np.int32(65536), 4)[0].reads_bytes == 2**34
    counted = roofline.elementwise_work(
        np.int32(2**30), reads=np.array([4, 4], np.int8), writes=(4,), flops_per_element=np.int32(4)
    )
    assert (counted.flops, counted.bytes) == (2**32, 3 * 2**32)
    half = Work(flops=np.int32(2**30), bytes=np.int32(2**30))
    assert (half + half).flops == 2**31
    assert type(half.flops) is int


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"reads": (), "writes": ()}, ValueError, "reads and writes are both empty"),
        ({"reads": 4, "writes": (4,)}, TypeError, r"reads must list .* such as \(4, 4\), not 4"),
        ({"reads": (4,), "writes": "44"}, TypeError, "writes must list"),
        ({"reads": (4,), "writes": (4,), "flops_per_element": True}, TypeError, "must be a number, not True"),
        ({"reads": (4,), "writes": (4,), "flops_per_element": "1"}, TypeError, "must be a number, not '1'"),
        (
            {"reads": (4,), "writes": (4,), "flops_per_element": float("nan")},
            ValueError,
            "flops_per_element is nan",
        ),
        ({"reads": (4,), "writes": (4,), "flops_per_element": -1}, ValueError, "flops_per_element is -1"),
    ],
)
def test_element_wise_work_refuses_what_it_cannot_count(arguments, error, said):
    with pytest.raises(error, match=said):
        roofline.elementwise_work(2**20, **arguments)


def test_an_integer_beyond_all_floats_is_no_finite_amount():
    with pytest.raises(ValueError, match=r"Work: flops is 1000.*\.\.\.; wanted a finite amount"):
        Work(flops=10**400, bytes=1)
    with pytest.raises(ValueError, match="Work: bytes is a int too long to write"):
        Work(flops=1, bytes=10**5000)
    with pytest.raises(RooflineInputError, match=r"peak_flops: 1000.* is not a positive finite number"):
        Roofline(peak_flops=10**400, bandwidth=1.0)


def test_a_quantity_is_never_stripped_of_its_unit_in_silence():
    roof = Roofline(peak_flops=989e12, bandwidth=4.8e12)
    for read in (roof.attainable, roof.bound):
        with pytest.raises(RooflineInputError, match="quantities go to validate_shapes_and_units"):
            read(ureg.Quantity(85, "FLOP/kB"))


def test_ragged_numbers_and_things_of_another_kind_are_named():
    roof = Roofline(peak_flops=989e12, bandwidth=4.8e12)
    with pytest.raises(RooflineInputError, match="no array of numbers of one shape"):
        roof.attainable([[1, 2], [3]])
    with pytest.raises(TypeError, match="numbers of one shape"):
        is_finite([[1], [1, 2]])
    with pytest.raises(TypeError, match="least_time takes Work, not 3"):
        roof.least_time(3)
    for nothing in ("H200", None):
        with pytest.raises(TypeError, match=r"takes a record, not .*hardware\.device"):
            Roofline.of(nothing, "bf16")


def _bound_with(**given):
    batch = {
        "P_peak": ureg.Quantity(989, "TFLOP/s"),
        "I": ureg.Quantity(85, "FLOP/byte"),
        "B_mem": ureg.Quantity(4800, "GB/s"),
    }
    return validate_shapes_and_units(batch | given)


def test_a_masked_place_has_no_value_and_is_refused():
    whole = np.ma.array([1.0, 2.0], mask=[False, False])
    assert _bound_with(I=ureg.Quantity(whole, "FLOP/byte")).intensity.tolist() == [1.0, 2.0]
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    with pytest.raises(RooflineInputError, match="I: some of its places are masked"):
        _bound_with(I=ureg.Quantity(masked, "FLOP/byte"))


def test_a_rate_beyond_all_floats_in_its_si_unit_is_no_finite_number_and_warns_of_nothing():
    with pytest.raises(RooflineInputError, match=r"P_peak: 1e\+300 is not a finite number"):
        _bound_with(P_peak=ureg.Quantity(1e300, "YFLOP/s"))


def test_a_tensor_without_values_is_no_array_of_numbers():
    torch = pytest.importorskip("torch")
    empty = torch.ones(2, device="meta")
    with pytest.raises(RooflineInputError, match="I: its magnitude is no array of numbers"):
        _bound_with(I=ureg.Quantity(empty, "FLOP/byte"))
    with pytest.raises(RooflineInputError, match=r"I: .* is no array of numbers of one shape"):
        Roofline(peak_flops=1e14, bandwidth=1e12).attainable(empty)
    with pytest.raises(TypeError, match="is_finite takes"):
        is_finite(empty)


def test_a_work_taken_more_often_than_a_float_can_say_is_refused():
    with pytest.raises(ValueError, match="times this work is beyond all floats"):
        10**400 * Work(flops=1.5, bytes=1.0)
    with pytest.raises(ValueError, match="wanted a finite amount"):
        10**20 * Work(flops=1e300, bytes=1)
