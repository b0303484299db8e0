"""Recorded kernels under a roof: read from the recordings, never clamped, and called what they are."""

from __future__ import annotations

import dataclasses

import pytest

from gpucourse import hardware, recording, roof_points
from gpucourse.recording import MissingRecordingError
from gpucourse.roof_points import RoofPoint, _precision_of, recorded_roofs
from gpucourse.roofline import Ceiling, MeasuredRoofline, Roofline, Work

ROOF = Roofline(peak_flops=100e12, bandwidth=1e12)  # ridge at 100


def point(share: float, *, intensity: float = 10.0, moved: float = 1e9, **facts: object) -> RoofPoint:
    work = Work(flops=intensity * moved, bytes=moved)
    time_ms = work.flops / (share * ROOF.attainable(intensity)) * 1e3
    return RoofPoint(name="trial", work=work, time_ms=time_ms, source="trial", **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.01, 0.5, 1.0, 1.7, 40.0])
def test_a_share_is_what_was_measured_however_far_above_the_roof(share: float) -> None:
    assert point(share).share(ROOF) == pytest.approx(share)
    assert point(share, intensity=400.0).share(ROOF) == pytest.approx(share)


@pytest.mark.parametrize(
    ("made", "kind", "said"),
    [
        (point(0.8), "memory", "memory side, 80 % of the roof"),
        (point(0.8, intensity=400.0), "memory", "compute side, 80 % of the roof"),
        (point(1.3, moved=20e6), "L2", "130 % of the roof: its 20.0 MB fit the L2 and need not travel"),
        (point(0.3, moved=20e6), "L2", "memory side, 30 % of the roof; its 20.0 MB fit the L2"),
        (point(0.3, moved=20e6, cold=True), "memory", "memory side, 30 % of the roof, L2 flushed"),
        (point(0.05, device_ms=0.1), "launch", "launch-bound, 5 % of the roof: the device works for 100.0 µs of"),
        (point(0.8, throttled=True), "memory", "80 % of the roof; the clock fell meanwhile"),
        (point(1.3), "memory", "memory side, 130 % of the roof"),
    ],
)  # fmt: skip
def test_a_point_says_where_it_lies_and_what_served_it(made: RoofPoint, kind: str, said: str) -> None:
    assert made.kind(50e6) == kind
    assert said in made.state(ROOF, 50e6)


def test_where_the_size_of_the_l2_is_unknown_nothing_is_put_down_to_it() -> None:
    assert point(1.3, moved=20e6).kind(None) == "memory"


def test_a_point_reaches_from_the_upper_quartiles_rate_to_the_lower_ones() -> None:
    spread = point(0.8, iqr_ms=0.2 * point(0.8).time_ms).between
    assert spread is not None
    assert spread == (pytest.approx(point(0.8).rate / 1.1), pytest.approx(point(0.8).rate / 0.9))
    assert point(0.8).between is None
    wild = point(0.8, iqr_ms=5 * point(0.8).time_ms).between
    assert wild is not None
    assert 0 < wild[0] < wild[1] < float("inf")


def test_a_long_load_that_was_recorded_stands_beside_the_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(kind: str, rate: float, seconds: float) -> Ceiling:
        return Ceiling(
            kind=kind, what="x", shape=(1, 1, 1), amount=rate / 1e3, samples_ms=(1.0,), seconds=seconds
        )

    load = MeasuredRoofline(
        device="NVIDIA H200",
        precision="bf16",
        products=(row("product", 8e14, 0.0),),
        streams=(row("triad", 4.3e12, 0.0),),
        sustained=(row("product", 7e14, 30.0), row("triad", 4.2e12, 31.0)),
    )
    monkeypatch.setattr(roof_points, "_long_loads", lambda: {"bf16": ("ceilings", load)})
    fp32, half = recorded_roofs()
    assert fp32.sustained is None
    assert half.sustained == load.sustained_roofline
    assert half.sustained_s == 30.0
    stranger = dataclasses.replace(load, device="NVIDIA Strange 9000")
    monkeypatch.setattr(roof_points, "_long_loads", lambda: {"bf16": ("ceilings", stranger)})
    assert recorded_roofs()[1].sustained is None


def test_the_recorded_roofs_hold_the_numbers_of_their_recordings() -> None:
    ceilings = recording.load("ceilings").data
    fp32, half = recorded_roofs()
    assert fp32.roofline.peak_flops == ceilings["fp32"]["peak_flops"]
    assert half.roofline.bandwidth == ceilings["half"]["bandwidth"]
    named = {p.name: p for p in fp32.points}
    adds = recording.load("add_sweep").data
    add = named["add, 128 Mi numbers"]
    assert (add.time_ms, add.work.bytes) == (adds["mi_128"]["warm"]["median_ms"], adds["mi_128"]["bytes"])
    launched = named["add, 1 Mi numbers, as Python launches it"]
    assert launched.time_ms == adds["mi_1"]["warm"]["elapsed_ms"]
    assert launched.device_ms == adds["mi_1"]["warm"]["median_ms"]
    rows = recording.load("rows_sweep").data
    (thin,) = (p for p in half.points if p.name.startswith("product, 128 × 8,192"))
    assert thin.rate / 1e12 == pytest.approx(rows["m_128"]["tflops"])


def test_every_kind_of_point_is_among_the_recorded_ones_and_each_has_its_provenance() -> None:
    kinds = set()
    for roof in recorded_roofs():
        kinds |= {p.kind(roof.l2_bytes) for p in roof.points}
        for p in roof.points:
            assert p.source in roof.provenance
            assert (p.iqr_ms is None) == (p.device_ms is not None)
        assert roof.gpu in roof.provenance
        assert [p.work.intensity for p in roof.points] == sorted(p.work.intensity for p in roof.points)
        assert len({p.name for p in roof.points}) == len(roof.points)
    assert kinds == {"memory", "L2", "launch"}


def test_what_beats_the_roof_on_the_books_device_did_not_come_from_its_memory() -> None:
    for roof in recorded_roofs():
        sheet = Roofline.of(hardware.device(roof.gpu), roof.precision)
        above = [p for p in roof.points if p.share(sheet) > 1]
        assert all(p.kind(roof.l2_bytes) == "L2" for p in above)
    assert above == []  # in half precision nothing does; in fp32 the small addition


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("bfloat16 product, 4096 × 4096 × 4096", "bf16"),
        ("float16 product, 2048 × 2048 × 2048", "fp16"),
        ("float32 (tf32 off) product, 8192 × 8192 × 8192", "fp32"),
        ("float32 (tf32 on) product, 8192 × 8192 × 8192", "tf32"),
        ("torch.float16", "fp16"),
    ],
)
def test_the_precision_is_read_from_what_really_ran(text: str, precision: str) -> None:
    assert _precision_of(text) == precision


def test_a_missing_recording_is_an_error_and_no_empty_roof(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("GPUCOURSE_RECORDINGS", str(tmp_path))
    with pytest.raises(MissingRecordingError, match="ceilings"):
        recorded_roofs()
