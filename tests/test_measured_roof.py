"""Ceilings as measured: best of several, spread kept, burst and long load apart; the device is made up here."""

from __future__ import annotations

import itertools
import json
import math
import types

import pytest

from gpucourse import hardware, measured_roof
from gpucourse.environment import Environment, NoGPUError, cuda_available
from gpucourse.measured_roof import STREAMS, Ceiling, MeasuredRoofline, measure_roofline, sustained

torch = pytest.importorskip("torch")


def product(rate: float, *, what: str = "2 × 3 × 4", spread: float = 0.0, seconds: float = 0.0) -> Ceiling:
    times = [48 / rate * 1e3 * factor for factor in (1 - spread, 1.0, 1 + spread)]
    return Ceiling(
        kind="product", what=what, shape=(2, 3, 4), amount=48, samples_ms=tuple(times), seconds=seconds
    )


def stream(rate: float, kind: str = "copy", seconds: float = 0.0) -> Ceiling:
    return Ceiling(
        kind=kind, what="1.00 GB an array", shape=(250_000_000,), amount=2e9,
        samples_ms=(2e9 / rate * 1e3,) * 3, seconds=seconds,
    )  # fmt: skip


def roof(**changes: object) -> MeasuredRoofline:
    facts: dict[str, object] = {
        "device": "NVIDIA H200",
        "precision": "bf16",
        "products": (product(700e12, what="slow"), product(800e12, spread=0.01)),
        "streams": (stream(4.2e12), stream(4.4e12, "read"), stream(4.3e12, "triad")),
        "datasheet_flops": 989e12,
        "datasheet_bandwidth": 4.8e12,
        "clock_mhz": (1980.0, 1755.0),
        "l2_bytes": 62_914_560,
        "conditions": "NVIDIA H200, torch 2.11.0",
    }
    return MeasuredRoofline(**facts | changes)  # type: ignore[arg-type]


def test_the_roof_is_made_of_the_best_product_and_the_best_stream_and_names_both() -> None:
    measured = roof()
    assert measured.roofline.peak_flops == pytest.approx(800e12)
    assert measured.roofline.bandwidth == pytest.approx(4.3e12)  # of those that read and write
    assert roof(streams=(stream(4.4e12, "read"), stream(4.6e12, "write"))).best_stream.kind == "write"
    assert measured.arithmetic_kind == "bfloat16 product, 2 × 3 × 4"
    assert measured.bandwidth_kind == "triad of 1.00 GB an array, read plus write"
    assert measured.stream("triad").rate == pytest.approx(4.3e12)
    with pytest.raises(KeyError, match="no stream 'scale' was measured; there are copy, read, triad"):
        measured.stream("scale")


def test_a_rate_is_amount_over_the_median_and_its_spread_the_quartiles() -> None:
    row = Ceiling(kind="copy", what="x", shape=(1,), amount=1e9, samples_ms=(1.0, 2.0, 4.0, 5.0, 8.0))
    assert row.rate == pytest.approx(1e9 / 4e-3)
    assert (row.low, row.high) == (pytest.approx(1e9 / 5e-3), pytest.approx(1e9 / 2e-3))
    assert row.as_dict()["iqr_gb_per_s"] == pytest.approx(500 - 200)
    single = Ceiling(kind="product", what="x", shape=(1, 1, 1), amount=2e12, samples_ms=(4.0,))
    assert single.low == single.high == single.rate == pytest.approx(500e12)


def test_the_text_says_device_operation_spread_share_of_the_datasheet_and_clocks() -> None:
    text = str(roof())
    assert text.startswith(
        "NVIDIA H200, bf16; burst 800.0 TFLOP/s (product 2 × 3 × 4; middle half 796.0 to 804.0"
    )
    assert "80.9% of the datasheet's 989.0 TFLOP/s" in text
    assert "clock 1980 → 1755 MHz" in text
    assert "after" not in text


def test_where_there_is_no_datasheet_record_that_is_said_and_nothing_is_made_up() -> None:
    measured = roof(datasheet_flops=None, datasheet_bandwidth=None, device="NVIDIA Strange 9000")
    assert "datasheet unavailable for NVIDIA Strange 9000" in str(measured)
    assert measured.as_dict()["datasheet"] == {"tflops": None, "gb_per_s": None}
    assert {row[4] for row in measured.table()} == {"unavailable"}
    assert "unavailable" in measured._repr_html_()


def test_a_long_load_is_another_roof_and_says_so() -> None:
    assert roof().sustained_roofline is None
    hot = roof(sustained=(product(700e12, seconds=30.0), stream(4.1e12, seconds=31.0)))
    assert hot.roofline.peak_flops == pytest.approx(800e12)
    assert hot.sustained_roofline is not None
    assert hot.sustained_roofline.peak_flops == pytest.approx(700e12)
    assert hot.sustained_roofline.bandwidth == pytest.approx(4.1e12)
    assert "after 30 s of load 700.0 TFLOP/s" in str(hot)
    assert [row[1] for row in hot.table()][-2:] == ["after 30 s of load", "after 31 s of load"]


@pytest.mark.parametrize(
    "measured",
    [roof(), roof(sustained=(product(7e14, seconds=30.0), stream(4e12, seconds=31.0)), curve=((0.2, 7e14, 1500.0),)),
     roof(datasheet_flops=None, l2_bytes=None, clock_mhz=())],
)  # fmt: skip
def test_a_recorded_roof_is_read_back_whole(measured: MeasuredRoofline) -> None:
    data = measured.as_dict()
    again = MeasuredRoofline.from_dict(data)
    assert again.as_dict()["burst"] == data["burst"]
    assert again.as_dict()["streams"] == data["streams"]
    assert (again.products, again.sustained, again.curve) == (
        measured.products,
        measured.sustained,
        measured.curve,
    )
    assert sorted(again.streams, key=lambda c: c.kind) == sorted(measured.streams, key=lambda c: c.kind)
    assert again.roofline == measured.roofline
    assert str(again) == str(measured)


@pytest.mark.parametrize("gone", ["products", "datasheet", "streams", "curve"])
def test_a_recording_without_a_part_is_refused_by_name(gone: str) -> None:
    data = roof().as_dict()
    del data[gone]
    with pytest.raises(ValueError, match=f"'{gone}' is missing"):
        MeasuredRoofline.from_dict(data)
    with pytest.raises(ValueError, match="no ceiling as Ceiling"):
        Ceiling.from_dict({"kind": "copy"})


def test_a_roof_without_a_product_is_none() -> None:
    with pytest.raises(ValueError, match="needs a product and a stream"):
        roof(products=())


# --- measuring, on a device that is made up --------------------------------------------------------------


class Device:
    """A GPU with 400 kB free, whose operations take what the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "NVIDIA Test") -> None:
        self.bursts: list[tuple[object, float]] = []
        self.tf32: list[bool] = []
        real = {name: getattr(torch, name) for name in ("randn", "empty")}
        monkeypatch.setattr(measured_roof, "require_cuda", lambda what: None)
        monkeypatch.setattr(measured_roof, "burst", self.burst)
        monkeypatch.setattr(measured_roof, "clock_mhz", lambda: 1980.0)
        monkeypatch.setattr(torch, "randn", lambda *s, device, dtype: real["randn"](*s, dtype=dtype))
        monkeypatch.setattr(torch, "empty", lambda *s, device, dtype: real["empty"](*s, dtype=dtype))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (400_000, 1_000_000))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
        processors = types.SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: processors)
        monkeypatch.setattr(
            Environment, "capture", classmethod(lambda cls: cls(gpu=name, torch="2.11.0", l2_bytes=4096))
        )

    def burst(self, call, rest_s: float = 0.0, busy_ms: float = 20.0) -> tuple[float, ...]:
        result = call()
        self.tf32.append(torch.backends.cuda.matmul.allow_tf32)
        self.bursts.append((tuple(result.shape), rest_s))
        width = result.shape[0] if result.dim() == 2 else 0
        ms = {0: 2.0, 64: 1.0, 128: 4.0}[width]
        return (ms, ms, ms if rest_s else 1.5 * ms)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_measuring_takes_the_best_shape_and_every_stream_with_its_bytes(device: Device) -> None:
    measured = measure_roofline(torch.float32, shapes=(64, (128, 128, 128), 4096))
    assert measured.roofline.peak_flops == pytest.approx(2 * 128**3 / 4e-3)
    turned = ", second matrix transposed"
    assert sorted(p.what for p in measured.products) == sorted(  # 4096 does not fit
        f"{n} × {n} × {n}{how}" for n in (64, 128) for how in ("", turned)
    )
    array = 400_000 // 8 // 4 * 4
    assert {s.kind: s.amount for s in measured.streams} == {
        "read": 2 * array, "write": array, "copy": 2 * array, "scale": 2 * array, "add": 3 * array, "triad": 3 * array,
    }  # fmt: skip
    assert measured.device == "NVIDIA Test"
    assert measured.l2_bytes == 4096
    assert measured.clock_mhz == (1980.0, 1980.0)
    assert "NVIDIA Test, torch 2.11.0" in str(measured)


def test_the_shapes_that_are_compared_are_measured_after_a_rest(device: Device) -> None:
    measure_roofline("bf16", shapes=(64, 128), streams=("copy",))
    first, compared = measured_roof.FIRST_REST_S, measured_roof.REST_S
    assert [rest for _, rest in device.bursts] == [0.0] + [first] * 4 + [compared] * 4
    assert 0 < first < compared
    shapes = [shape for shape, _ in device.bursts]
    assert shapes[0] == (400_000 // 8 // 4,)
    assert sorted(shapes[1:5]) == sorted(shapes[5:]) == [(64, 64), (64, 64), (128, 128), (128, 128)]


def test_the_shapes_that_are_tried_fit_the_multiprocessors_and_both_layouts(
    device: Device, monkeypatch
) -> None:
    made = []
    monkeypatch.setattr(
        measured_roof, "_matrices", lambda *asked: (made.append(asked), lambda: torch.zeros(64, 1))[1]
    )
    monkeypatch.setattr(measured_roof, "_stream_call", lambda kind, free: (lambda: torch.zeros(1), 1))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80_000_000_000, 80_000_000_000))
    measured = measure_roofline("bf16")
    assert {shape for shape, _, _ in made} == {*measured_roof.SHAPES, (4096, 8448, 8192), (3072, 5632, 8192)}
    assert {turned for _, _, turned in made} == {True, False}
    assert len(measured.products) == 2 * (len(measured_roof.SHAPES) + 2)


def test_a_second_matrix_that_is_stored_transposed_has_the_same_shape_and_product(device: Device) -> None:
    for turned in (False, True):
        call = measured_roof._matrices((3, 5, 7), torch.float32, turned)
        inside = dict(
            zip(call.__code__.co_freevars, (c.cell_contents for c in call.__closure__), strict=True)
        )
        assert inside["b"].shape == (7, 5)
        assert inside["b"].is_contiguous() is not turned
        torch.testing.assert_close(call(), inside["a"] @ inside["b"])


@pytest.mark.parametrize(("asked", "ran"), [("fp32", False), ("tf32", True), ("bf16", False)])
def test_tf32_is_on_only_where_it_is_asked_for_and_put_back_after(
    device: Device, asked: str, ran: bool
) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    measured = measure_roofline(asked, shapes=(64,), streams=("copy",))
    assert set(device.tf32) == {ran}
    assert measured.precision == asked
    assert torch.backends.cuda.matmul.allow_tf32 is before
    words = {"fp32": "float32 (tf32 off)", "tf32": "float32 (tf32 on)", "bf16": "bfloat16"}
    assert measured.arithmetic_kind == f"{words[asked]} product, 64 × 64 × 64"


def test_float32_as_a_dtype_follows_what_is_allowed(device: Device) -> None:
    for allowed, precision in ((True, "tf32"), (False, "fp32")):
        with measured_roof.tf32_products(allowed):
            assert measure_roofline(torch.float32, shapes=(64,), streams=("copy",)).precision == precision


def test_the_products_multiply_random_values_and_not_zeros(device: Device, monkeypatch) -> None:
    seen = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: (seen.append((a, b)), mm(a, b, out=out))[1])
    measure_roofline("fp32", shapes=(64,), streams=("copy",))
    assert seen
    assert all(a.std() > 0.5 and b.std() > 0.5 for a, b in seen)


@pytest.mark.parametrize("kind", list(STREAMS))
def test_a_stream_computes_what_its_name_says(device: Device, kind: str) -> None:
    call, n = measured_roof._stream_call(kind, 8 * 4 * 1000)
    assert n == 1000
    result = call()
    assert result.numel() == (1 if kind == "read" else 1000)
    assert {"read": lambda r: r > 100, "write": lambda r: (r == 1.5).all()}.get(
        kind, lambda r: (r != 1.5).any()
    )(result)


def test_the_datasheet_stands_beside_where_there_is_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch, "NVIDIA H200")
    measured = measure_roofline("bf16", shapes=(64,), streams=("copy",))
    assert measured.datasheet_flops == hardware.device("H200").peak_flops("bf16")
    assert measured.datasheet_bandwidth == 4.8e12
    assert measure_roofline("fp64", shapes=(64,), streams=("copy",)).datasheet_flops is None


@pytest.mark.skipif(cuda_available(), reason="there is a GPU here")
def test_without_a_gpu_there_is_nothing_to_measure() -> None:
    with pytest.raises(NoGPUError, match="measure_roofline needs a CUDA device"):
        measure_roofline("bf16")
    with pytest.raises(NoGPUError, match="sustained needs a CUDA device"):
        sustained({"x": (lambda: None, 1.0)}, 1.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dtype": "fp8"}, "'fp8' is no precision to measure here; known are fp32, tf32, bf16, fp16, fp64"),
        ({"dtype": torch.int32}, "torch.int32 is no precision to measure here"),
        ({"dtype": None}, "None is no precision"),
        ({"shapes": (4096,)}, r"none of the products \[\(4096, 4096, 4096\)\] fits in half of 400000 free"),
        ({"shapes": ((64, 64),)}, r"\(64, 64\) is no product; give \(m, n, k\)"),
        ({"shapes": (0,)}, "0 is no product"),
        ({"streams": ("copy", "swap")}, r"\['swap'\]: known streams are read, write, copy"),
        ({"streams": ()}, "no stream"),
        ({"sustained_s": -1.0}, "sustained_s is -1.0; wanted seconds, 0 or more"),
        ({"sustained_s": math.nan}, "sustained_s is nan"),
    ],
)
def test_what_cannot_be_measured_is_named(device: Device, arguments, said) -> None:
    with pytest.raises(ValueError, match=said):
        measure_roofline(**{"dtype": "fp32", **arguments})
    assert device.bursts == []


def test_a_gpu_without_bf16_or_tf32_says_so(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    with pytest.raises(ValueError, match="NVIDIA Test has no bf16 arithmetic; measure fp16"):
        measure_roofline("bf16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(ValueError, match="NVIDIA Test has no tf32"):
        measure_roofline("tf32")
    assert measure_roofline("fp16", shapes=(64,), streams=("copy",)).precision == "fp16"


# --- a long load ---------------------------------------------------------------------------------------------


class Clock:
    """A device on which each call takes a millisecond, growing by a hundredth a second, and a spin 0.5 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 0.0
        self.running = self.most = 0
        clock = self

        class Event:
            def __init__(self) -> None:
                self.at = math.nan

            def record(self) -> None:
                self.at = clock.now_ms

            def synchronize(self) -> None:
                assert not math.isnan(self.at)

            def elapsed_time(self, other: Event) -> float:
                return other.at - self.at

        def sleep(cycles: int) -> None:
            clock.now_ms += cycles / 2e6

        monkeypatch.setattr(measured_roof, "require_cuda", lambda what: None)
        monkeypatch.setattr(measured_roof, "timing_event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", sleep, raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(
            measured_roof, "time",
            types.SimpleNamespace(perf_counter=lambda: clock.now_ms / 1e3, sleep=lambda seconds: None),
        )  # fmt: skip

    def call(self) -> None:
        self.now_ms += 1.0 + self.now_ms / 1e5


def test_a_long_load_gives_a_rate_and_a_clock_for_every_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    rows = sustained({"a": (clock.call, 1.0), "b": (clock.call, 1.0)}, 3.0)
    assert [row[0] for row in rows[:4]] == ["a", "b", "a", "b"]
    assert rows[-1][1] >= 3.0
    times = [row[2] for row in rows]
    assert times == sorted(times)
    assert times[0] == pytest.approx(1.0, rel=0.01)
    assert all(row[3] == pytest.approx(2000.0) for row in rows)
    for calls, seconds in (({}, 1.0), ({"a": (clock.call, 1.0)}, 0.0)):
        with pytest.raises(ValueError, match="a long load takes a call and a time above 0 s"):
            sustained(calls, seconds)


def test_every_call_of_a_short_load_gets_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    rows = sustained(dict.fromkeys("abc", (clock.call, 1.0)), 0.001)
    assert [row[0] for row in rows] == ["a", "b", "c"]


def test_a_burst_times_calls_between_events_and_leaves_the_first_ones_out(monkeypatch) -> None:
    clock = Clock(monkeypatch)
    slow = iter([50.0] + [0.4] * 1000)

    def call() -> None:
        clock.now_ms += next(slow)

    samples = measured_roof.burst(call)
    assert len(samples) == 16  # intervals of 3 calls, 1.2 ms, in 20 ms
    assert samples == pytest.approx([0.4] * 16)


def test_the_sustained_rates_are_those_of_the_last_third(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(measured_roof, "_matrices", lambda shape, dtype, turned: clock.call)
    monkeypatch.setattr(measured_roof, "_stream_call", lambda kind, free: (clock.call, 1000))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 1))
    loads, curve = measured_roof._long_load(
        [product(4.8e4), product(4e4, what="slower")], stream(2e12), torch.float32, 9.0
    )
    done, copied = loads
    assert done.seconds >= 9.0
    assert copied.kind == "copy"
    assert copied.seconds > done.seconds
    assert min(done.samples_ms) > 1.0 + 5.5 / 100  # nothing of the first two thirds
    assert len(curve) == pytest.approx(9.0 / 0.24, rel=0.1)  # slices of 250 and of 208 calls
    assert all(at <= then for (at, _, _), (then, _, _) in itertools.pairwise(curve))
    assert measured_roof._long_load([product(1.0)], stream(1.0), torch.float32, 0) == ((), ())


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("products", 0, "samples_ms", 0), float("nan"), "a sample is nan: a finite number is wanted"),
        (("products", 0, "samples_ms", 0), True, "a sample is True: a finite number is wanted"),
        (("products", 0, "samples_ms", 0), 0, "a sample is 0: more than 0 is wanted"),
        (("products", 0, "samples_ms"), [], "samples_ms is empty"),
        (("products", 0, "samples_ms"), "12", "samples_ms is '12': a list is wanted"),
        (("products", 0, "amount"), 10**400, "amount is 1000.*: a finite number is wanted"),
        (("products", 0, "shape", 0), 2.5, "a length in shape is 2.5: a whole number, 1 or more"),
        (("products", 0, "kind"), "copy", "products holds a ceiling of the kind 'copy': a product is wanted"),
        (("products", 0, "kind"), "stroll", "kind is 'stroll': product or one of read, write, copy"),
        (("products",), {}, "products is {}: a list is wanted"),
        (("streams",), [], r"streams is \[\]: a table is wanted"),
        (("datasheet", "tflops"), -1, "tflops is -1: more than 0 is wanted"),
        (("datasheet",), None, "datasheet is None: a table is wanted"),
        (("curve",), [[1.0, 2.0]], "seconds, flop/s and MHz are wanted"),
        (("curve",), ["abc"], "a row of curve is 'abc': a list is wanted"),
        (("clock_mhz",), [None], "a clock is None|clock_mhz is None"),
        (("l2_bytes",), 1.5, "l2_bytes is 1.5: a whole number"),
        (("conditions",), 5, "conditions is 5: a text is wanted"),
        (("precision",), ["bf16"], r"precision is \['bf16'\]: a text is wanted"),
        (("precision",), "int8", "precision is 'int8': one of fp32"),
    ],
)
def test_a_value_that_no_measurement_gives_is_named_and_makes_no_roof(path, value, said) -> None:
    data = recording_of_a_roof()
    assert MeasuredRoofline.from_dict(data).as_dict() == data  # whole, before it is spoiled
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=said):
        MeasuredRoofline.from_dict(data)


def recording_of_a_roof() -> dict:
    """Give a measured roof as JSON has it."""
    product = Ceiling(
        kind="product", what="4096³", shape=(4096, 4096, 4096), amount=2.0 * 4096**3, samples_ms=(0.2, 0.21)
    )
    stream = Ceiling(kind="copy", what="1 GB", shape=(250_000_000,), amount=2e9, samples_ms=(0.5, 0.52))
    roof = MeasuredRoofline(
        device="Card",
        precision="bf16",
        products=(product,),
        streams=(stream,),
        sustained=(product, stream),
        curve=((0.25, 6e14, 1980.0),),
        datasheet_flops=9.89e14,
        datasheet_bandwidth=4.8e12,
        clock_mhz=(1980.0, 1965.0),
        l2_bytes=2**20,
        conditions="torch",
    )
    return json.loads(json.dumps(roof.as_dict()))
