"""The charts and tables of the chapter on tiny additions show what was recorded, and say what was not."""

from __future__ import annotations

from typing import Any

import pytest

from gpucourse import plots
from gpucourse.plots import launch_bound as draw
from gpucourse.recording import Recording, load
from gpucourse.simulator import Kernel, SimulatedDevice

H200 = {"gpu": "NVIDIA H200", "date": "2026-12-01T00:00:00", "torch": "2.11.0"}


def _recording(data: dict[str, Any]) -> Recording:
    return Recording(name="example", data=data, provenance=H200)


def _texts(chart: plots.Chart, axes: int = 0) -> list[str]:
    return [text.get_text() for text in chart.fig.axes[axes].texts]


def test_three_times_stand_in_one_row_and_are_never_mixed_up() -> None:
    times = {"elapsed_ms": 0.8, "host_ms": 0.7, "device_ms": 0.2}
    table = draw.three_times(_recording({"additions": times, "product": times, "nothing": times}))
    assert table.header[1:] == ("Elapsed", "Host", "Device alone")
    assert table.rows[0][1:] == tuple(f"{us}.0\N{NO-BREAK SPACE}µs" for us in (800, 700, 200))
    assert len(table.rows) == 3


# --- the timeline


def _kernels(count: int, *, launched: bool = True) -> list[dict[str, Any]]:
    return [
        {
            "launch_us": 8.0 * k - 5.0 if launched else None,
            "launch_duration_us": 3.0 if launched else None,
            "start_us": 8.0 * k,
            "duration_us": 1.5,
        }
        for k in range(count)
    ]


def test_the_timeline_counts_from_the_first_launch_and_lists_every_kernel() -> None:
    chart = draw.timeline(_recording({"chain": _kernels(9), "product": _kernels(1)}))
    assert len(chart.rows) == 10
    assert tuple(chart.rows[0]) == ("addition", 1, "0.0", "5.0", "1.50")
    assert tuple(chart.rows[1])[2:4] == ("8.0", "13.0")
    assert chart.rows[-1][0] == "product"
    assert "<svg" in chart._repr_html_()


def test_the_timeline_enlarges_no_more_than_fits_and_joins_each_launch_to_its_kernel() -> None:
    chart = draw.timeline(_recording({"chain": _kernels(40), "product": _kernels(2)}))
    zoom = chart.fig.axes[1]
    assert len(zoom.patches) == 2 * 6  # a launch and a kernel each
    assert len(zoom.texts) == 6
    assert zoom.get_title(loc="left") == "the first 6 additions, enlarged"


def test_a_launch_that_the_profiler_lost_is_unknown_and_has_no_mark() -> None:
    chart = draw.timeline(_recording({"chain": _kernels(3, launched=False), "product": _kernels(1)}))
    assert [row[2] for row in chart.rows] == ["unknown", "unknown", "unknown", "0.0"]
    assert len(chart.fig.axes[1].texts) == 0


@pytest.mark.parametrize("empty", ["chain", "product"])
def test_a_timeline_without_kernels_is_refused(empty: str) -> None:
    data = {"chain": _kernels(2), "product": _kernels(1), empty: []}
    with pytest.raises(ValueError, match=f"{empty} holds no kernel"):
        draw.timeline(_recording(data))


# --- the sweep


def _row(kernels: int, elements: int, elapsed_ms: float = 0.8) -> dict[str, Any]:
    return {
        "kernels": kernels,
        "elements": elements,
        "elapsed_ms": elapsed_ms,
        "host_ms": 0.7,
        "device_ms": 0.2,
        "graph_ms": 0.12,
        "graph_device_ms": 0.11,
    }


SWEEP = _recording(
    {
        "chains": [
            _row(400, 2**10, 3.2),
            _row(100, 2**24, 3.6),
            _row(1, 2**10, 0.01),
            _row(100, 2**10),
            _row(100, 2**20),
        ]
    }
)


PREDICTIONS = {
    (row["kernels"], row["elements"]): {
        "predicted_ms": row["elapsed_ms"] / 1.25,
        "own_pace_ms": row["elapsed_ms"],
    }
    for row in SWEEP["chains"]
}


def test_each_sweep_takes_its_own_chains_in_order_of_size() -> None:
    by_size = draw.by_elements(SWEEP, PREDICTIONS)
    assert [row[0] for row in by_size.rows] == ["1,024", "1,048,576", "16,777,216"]
    by_count = draw.by_kernels(SWEEP, PREDICTIONS)
    assert [row[0] for row in by_count.rows] == ["1", "100", "400"]


def test_each_residual_is_measured_over_its_own_prediction() -> None:
    chart = draw.by_elements(SWEEP, PREDICTIONS)
    assert tuple(chart.header[3::2]) == ("Residual", "Residual", "Device alone")
    assert {row[3] for row in chart.rows} == {"+25\N{NO-BREAK SPACE}%"}
    assert {row[5] for row in chart.rows} == {"+0\N{NO-BREAK SPACE}%"}


def test_the_prediction_is_drawn_beside_three_measured_curves() -> None:
    chart = draw.by_kernels(SWEEP, PREDICTIONS)
    lines = chart.fig.axes[0].lines
    assert [line.get_label() for line in lines] == [
        "as launched",
        "device alone",
        "one graph",
        "predicted, as launched",
    ]
    assert list(lines[3].get_ydata()) == [0.01 / 1.25, 0.8 / 1.25, 3.2 / 1.25]


def test_a_chain_without_a_prediction_is_no_silent_gap() -> None:
    with pytest.raises(KeyError):
        draw.by_elements(SWEEP, {})


def test_a_sweep_without_its_chains_is_refused() -> None:
    with pytest.raises(ValueError, match="no chain to draw against its elements"):
        draw.by_elements(_recording({"chains": [_row(5, 2**10)]}), {})


# --- costs, ways, the night


def test_costs_keep_their_order_and_tell_a_launch_by_its_colour() -> None:
    calls = [
        {"call": "nothing", "what": "a loop", "launches": 0, "host_us": 0.05},
        {"call": "y + 1", "what": "all of it", "launches": 1, "host_us": 5.0},
    ]
    chart = draw.launch_costs(_recording({"calls": calls}))
    assert [row[0] for row in chart.rows] == ["nothing", "y + 1"]
    assert "5.00\N{NO-BREAK SPACE}µs" in _texts(chart)
    grey, orange = (bar.get_facecolor() for bar in chart.fig.axes[0].patches)
    assert grey != orange


def test_a_way_that_could_not_run_is_unavailable_not_zero() -> None:
    rows = [
        {"way": "chain", "launches": 100, "host_ms": 0.7, "device_ms": 0.2, "elapsed_ms": 0.8},
        {"way": "Triton", "launches": 1, "host_ms": None, "device_ms": None, "elapsed_ms": None},
    ]
    table = draw.ways(_recording({"ways": rows}))
    assert table.rows[1] == ("Triton", "1", "unavailable", "unavailable", "unavailable")
    assert table.rows[0][0:2] == ("chain", "100")
    assert "recorded on NVIDIA H200" in table._repr_html_()


def test_what_a_graph_refused_is_quoted_and_what_it_took_is_said() -> None:
    calls = [{"call": "x + 1", "error": None}, {"call": "x.item()", "error": "AcceleratorError: no"}]
    assert draw.captures(_recording({"calls": calls})).rows == (
        ("x + 1", "captured"),
        ("x.item()", "AcceleratorError: no"),
    )


def _night(graph: dict[str, Any] | None) -> Recording:
    step = {"rows": 1, "precision": "bf16", "launches": 1400, "host_ms": 15.0, "busy_ms": 4.0}
    return _recording(
        {
            "parameters": 124_475_904,
            "tensors": 148,
            "updates": {"fused": {"launches": 7, "host_ms": 0.4, "busy_ms": 0.9, "elapsed_ms": 1.3}},
            "steps": [{**step, "optimizer": "fused", "elapsed_ms": 15.5, "tokens_per_s": 66_000.4}],
            "graph": graph,
            "graph_refused": None if graph else "a backward pass waited",
        }
    )


def test_an_update_says_over_how_many_tensors_it_goes() -> None:
    table = draw.updates(_night(None))
    assert table.rows == (
        ("fused", "7", "400.0\N{NO-BREAK SPACE}µs", "900.0\N{NO-BREAK SPACE}µs", "1.30\N{NO-BREAK SPACE}ms"),
    )
    assert table.caption == "One AdamW step over 148 tensors with 124.5 M parameters"


def test_the_step_as_a_graph_stands_last_and_a_refusal_in_its_place() -> None:
    graph = {"host_ms": 0.05, "elapsed_ms": 4.5, "tokens_per_s": 227_000.0}
    taken, refused = draw.steps(_night(graph)), draw.steps(_night(None))
    assert taken.rows[0][4:] == ("15.0", "4.0", "15.5", "66,000")
    assert taken.rows[-1][3:] == ("1", "0.05", "not traced", "4.5", "227,000")
    traced = draw.steps(_night({**graph, "busy_ms": 3.9}))
    assert traced.rows[-1][5] == "3.9"
    assert [name for name in taken.header if name.endswith(", ms")] == ["Host, ms", "Busy, ms", "Elapsed, ms"]
    assert refused.rows[-1][4:] == ("a backward pass waited", "unavailable", "unavailable", "unavailable")
    assert all(len(row) == len(taken.header) for row in (*taken.rows, *refused.rows))


def test_what_the_chapter_says_of_the_recorded_updates_holds() -> None:
    night = load("night_launches")
    loop, fused, foreach = (night["updates"][kind] for kind in ("for-loop", "fused", "foreach"))
    assert loop["elapsed_ms"] == pytest.approx(loop["host_ms"], rel=0.01)  # its kernels are hidden
    assert loop["busy_ms"] < loop["host_ms"]
    sticks_out_ms = fused["elapsed_ms"] - fused["host_ms"]
    assert 0 < sticks_out_ms < fused["busy_ms"]
    whole = load("compiled_night")["whole"]["eager"]
    assert load("night_step")["kernels"] - foreach["launches"] + fused["launches"] == whole["launches"]
    counts = {
        kernel["op"]: kernel["count"]
        for kernel in whole["kernels"]
        if "optim" in kernel["name"].lower() or "foreach" in kernel["op"]
    }
    assert (counts["aten::_fused_adamw_"], counts["aten::_foreach_add_"]) == (7, 2)
    assert sum(counts.values()) == fused["launches"]


def test_one_addition_after_a_wait_shows_its_middle_half() -> None:
    row = {"after": "a wait of 1 ms", "host_us": 21.46, "quartiles_us": [20.04, 23.96]}
    table = draw.after_a_wait(_recording({"after": [row]}))
    assert table.rows == (("a wait of 1 ms", "21.5", "20.0 to 24.0"),)


def test_the_pair_ends_when_the_host_has_made_its_second_record() -> None:
    hundred, sweep = load("hundred_additions"), load("chain_sweep")
    launch_bound = [chain for chain in sweep["chains"] if chain["elements"] <= 2**22]
    for call in (hundred["additions"], hundred["nothing"], *launch_bound):
        assert call["elapsed_ms"] == pytest.approx(call["recorded_ms"], abs=1e-3)
    records_ms = [chain["recorded_ms"] - chain["host_ms"] for chain in sweep["chains"][:9:2]]
    assert records_ms[0] < records_ms[-2] < records_ms[-1]  # 1, 100 and 400 additions


def test_the_single_addition_is_the_sweeps_worst_prediction_and_the_queue_is_not_to_blame() -> None:
    ruler_us, sweep = load("hundred_additions")["nothing"]["elapsed_ms"] * 1e3, load("chain_sweep")
    alone_us = {row["elements"]: row["device_ms"] * 1e3 for row in sweep["one"]}

    def off(chain: dict[str, float], host_us: float) -> float:
        count, kernel_us = chain["kernels"], alone_us[int(chain["elements"])]
        said_us = max(count * host_us + ruler_us, host_us + count * kernel_us)
        return chain["elapsed_ms"] * 1e3 / said_us - 1

    missed = [off(chain, sweep["host_us"]) for chain in sweep["chains"]]
    assert max(missed, key=abs) == missed[0] > 0.05
    assert abs(off(sweep["chains"][0], sweep["chains"][0]["host_us"])) < 0.05


def test_a_wait_makes_the_next_launch_dear_and_its_likes_before_it_hardly() -> None:
    same, wait, others, both = (row["host_us"] for row in load("after_a_wait")["after"])
    assert wait - same > 2 * (others - same) > 0
    assert both - wait < 0.2 * (wait - same)
    way = load("hundred_ways")["ways"][3]
    assert way["way"] == "y + 100"
    # What other calls leave behind costs more than the wait, which both readings have before them.
    assert 1e3 * (way["first_host_ms"] - way["host_ms"]) > 4 * (wait - same)


def test_with_a_record_in_between_a_wait_explains_little_of_what_the_products_launch_costs() -> None:
    sweep, hundred = load("chain_sweep"), load("hundred_additions")
    same, wait = (row["host_us"] for row in load("after_a_wait")["after"][:2])
    after_us = sweep["chains"][0]["host_us"] - sweep["host_us"]
    assert 0 < after_us < 0.5 * (wait - same)
    over_us = 1e3 * (hundred["product"]["host_ms"] - hundred["additions"]["host_ms"] / 100)
    assert after_us < 0.5 * over_us


def test_of_an_addition_queued_beforehand_the_kernel_itself_is_half() -> None:
    each_us = load("hundred_additions")["additions"]["device_ms"] * 10
    assert load("hundred_timeline")["kernel_us"] / each_us == pytest.approx(0.5, abs=0.1)


def test_kernels_that_are_launched_separately_follow_each_other_less_closely_than_a_graphs() -> None:
    fifty, four_hundred = (load("chain_sweep")["chains"][k] for k in (5, 8))
    assert (fifty["kernels"], four_hundred["kernels"]) == (50, 400)

    def each_us(field: str) -> float:
        return 1e3 * (four_hundred[field] - fifty[field]) / 350

    assert each_us("graph_ms") == pytest.approx(each_us("graph_device_ms"), rel=0.02)
    assert each_us("device_ms") > 1.5 * each_us("graph_ms")


def test_one_process_reads_two_paces_for_the_same_loop() -> None:
    elapsed_us = load("compiled_chains")["hundred_additions"]["eager"]["host_ms"] * 10
    tight_us = load("host_parts")["hundred_additions"]["eager_us"] / 100
    assert elapsed_us > 1.2 * tight_us
    assert not 0.9 < tight_us / load("chain_sweep")["host_us"] < 1.1


def test_two_unequal_halves_take_longer_than_host_or_device_needs() -> None:
    device, many = SimulatedDevice(launch_us=0.0), 1000
    for host_ms, kernels_ms in ((15, 8), (8, 15)):
        for _ in range(many):
            device.sleep(host_ms * 1e3 / many)
            device.launch(Kernel(duration_us=kernels_ms * 1e3 / many))
    assert device.perf_counter() * 1e3 == pytest.approx(23)  # what the host needs
    assert sum(span.end_us - span.start_us for span in device.history if span.kind == "kernel") == 23_000
    device.synchronize()
    assert device.perf_counter() * 1e3 == pytest.approx(30, abs=0.1)


def test_the_nights_step_is_its_hosts_up_to_four_rows_and_the_devices_with_sixteen() -> None:
    night = load("night_launches")
    full, half, *fused = night["steps"]
    assert [step["rows"] for step in fused] == [1, 2, 4, 8, 16]
    for step in (full, half, *fused[:3]):
        assert step["elapsed_ms"] == pytest.approx(step["host_ms"], rel=0.02)
    assert full["busy_ms"] < full["host_ms"] < 1.1 * full["busy_ms"]  # but only just
    update = night["updates"]["for-loop"]
    assert full["busy_ms"] - update["busy_ms"] > full["host_ms"] - update["host_ms"]  # until the update
    assert half["elapsed_ms"] > full["elapsed_ms"]
    one, _, four, eight, sixteen = fused
    a_row_ms = (four["busy_ms"] - one["busy_ms"]) / 3
    assert 7.5 < (four["host_ms"] - one["busy_ms"]) / a_row_ms + 1 < 8.5
    assert sixteen["elapsed_ms"] == pytest.approx(one["busy_ms"] + 15 * a_row_ms, rel=0.06)
    assert eight["elapsed_ms"] > 1.1 * max(eight["host_ms"], eight["busy_ms"])
    over_ms = [step["elapsed_ms"] - max(step["host_ms"], step["busy_ms"]) for step in (eight, sixteen)]
    assert over_ms[0] > 2 * over_ms[1] > 0
    rest = {key: full[key] - update[key] for key in ("host_ms", "launches")}  # forward and backward
    assert rest["host_ms"] / rest["launches"] > 4 * update["host_ms"] / update["launches"]
    assert sixteen["busy_ms"] > sixteen["host_ms"]
    window = 12e9 / (8 * 3600)
    assert max(sixteen["tokens_per_s"], night["graph"]["tokens_per_s"]) < window
