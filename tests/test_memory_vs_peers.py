"""The memory benchmark's parts: its cases, its workers, its searches, and what it recorded."""

from __future__ import annotations

import collections
import importlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gpucourse import recording
from gpucourse.plots import memory_peers
from gpucourse.step_memory import METHOD_VERSION

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
OWN = ("lstm", "mlp", "night", "unet")


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import a module of benchmarks/memory_cases."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(f"memory_cases.{name}")

    yield load
    for name in [name for name in sys.modules if name.partition(".")[0] == "memory_cases"]:
        del sys.modules[name]


# --- the cases


def test_there_are_more_cases_than_the_sixty_that_are_wanted_and_every_kind_of_model(part: Any) -> None:
    cases, models = part("cases"), part("models")
    assert len(cases.CASES) == len(set(cases.CASES)) == 90
    assert len(models.MODELS) == 15
    assert {"llama", "night", "bert", "vit", "resnet", "convnext"} < set(models.MODELS)
    assert {"mobilenet", "densenet", "swin", "unet", "lstm", "mlp"} < set(models.MODELS)


def test_each_model_meets_each_precision_and_each_precision_every_optimizer_and_both_ways(part: Any) -> None:
    cases = part("cases")
    for model, ways in cases.WAYS.items():
        assert [way.precision for way in ways] == list(cases.PRECISIONS), model
        assert {way.checkpointing for way in ways} == {True, False}, model
    met = collections.Counter((way.precision, way.optimizer, way.checkpointing) for way, _ in cases.CASES)
    assert len(met) == 3 * 3 * 2
    assert min(met.values()) >= 4


def test_a_third_of_the_models_is_kept_out_by_a_rule_that_looks_at_names_alone(part: Any) -> None:
    models = part("models")
    assert tuple(sorted(models.MODELS))[2::3] == models.KEPT_OUT
    assert models.KEPT_OUT == ("densenet", "llama", "mobilenet", "swin", "vit")


def test_eight_models_are_searched_some_of_them_kept_out_in_all_precisions(part: Any) -> None:
    searched = part("cases").SEARCHED
    assert len({way.model for way in searched}) == 8
    assert sum(way.kept_out for way in searched) == 3
    assert {way.precision for way in searched} == {"fp32", "bf16", "fp16"}
    assert {way.checkpointing for way in searched} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_a_model_of_our_own_gives_the_same_loss_with_its_blocks_checkpointed(part: Any, name: str) -> None:
    import torch

    models = part("models")
    if name == "night":  # its parts are held in the training module's own tests
        assert any(type(m).__name__ == "Block" for m in models.made(name, False).modules())
        return
    torch.manual_seed(3)
    model = models.made(name, False)
    batch = tuple(t[:, :64] if name == "lstm" else t for t in models.batch_of(name, 2, "cpu"))
    losses, grads = [], []
    for again in (False, True):
        if again:
            model = models.checkpointed(name, model)
        torch.manual_seed(5)  # dropout
        loss = models.MODELS[name].loss(model, *batch)
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        grads.append([p.grad.clone() for p in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(grads[0], grads[1])


def test_blocks_that_are_not_there_are_no_silent_plain_step(part: Any) -> None:
    import torch

    with pytest.raises(ValueError, match="unet has no Twice to checkpoint"):
        part("models").checkpointed("unet", torch.nn.Linear(2, 2))


# --- the searches


@pytest.mark.parametrize("true", [0, 1, 2, 7, 49, 50, 137, 1000])
@pytest.mark.parametrize("start", [1, 8, 60, 137, 500])
def test_the_boundary_is_found_from_any_guess(part: Any, true: int, start: int) -> None:
    asked: list[int] = []

    def fits(samples: int) -> bool:
        asked.append(samples)
        return samples <= true

    assert part("predicting").boundary(fits, start) == true
    assert min(asked) >= 1


def test_a_good_guess_needs_few_tries(part: Any) -> None:
    asked: set[int] = set()
    part("predicting").boundary(lambda m: asked.add(m) or m <= 204, 200)
    assert len(asked) <= 6


@pytest.mark.slow
def test_the_largest_microbatch_is_the_last_that_the_prediction_lets_through(part: Any) -> None:
    predicting, way = part("predicting"), part("cases").WAYS["mlp"][1]
    limit = 1_500_000_000
    found = predicting.largest(way, limit)
    best = found["microbatch"]
    assert predicting.ours(way, best).runs_within(limit)
    assert not predicting.ours(way, best + 1).runs_within(limit)
    assert [best, True] in [row[:2] for row in found["tried"]]
    assert found["gpus_visible"] == 0


# --- the peers


def test_the_plain_tracker_counts_the_step_of_a_model_that_it_can_follow(part: Any) -> None:
    predicting, way = part("predicting"), part("cases").WAYS["mlp"][0]
    said = predicting.plain_tracker(way, 512)
    parameters = sum(p.numel() for p in part("models").made("mlp", False).parameters())
    assert said > 3 * 4 * parameters  # weights, gradients and momentum live together at the step's end


def test_a_peer_that_is_not_installed_says_so_and_the_rule_needs_nothing(part: Any, monkeypatch: Any) -> None:
    predicting = part("predicting")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.setitem(sys.modules, "accelerate.commands.estimate", None)
    monkeypatch.setattr(predicting, "plain_tracker", lambda *_: 1_000)
    found = predicting.peers(part("cases").WAYS["unet"][0], 2)
    assert found["MemTracker"]["bytes"] == 1_000
    assert found["accelerate"]["bytes"] is None
    assert "accelerate" in found["accelerate"]["error"]
    assert found["mlsysim"] == {
        "bytes": None,
        "seconds": found["mlsysim"]["seconds"],
    }  # it knows no such model
    parameters = sum(p.numel() for p in part("models").made("unet", False).parameters())
    assert found["16 bytes a parameter"]["bytes"] == 16 * parameters


# --- workers and what they leave behind

ECHO = """
import json, os, sys, time
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "die":
        sys.exit("out of luck")
    if request["do"] == "hang":
        time.sleep(60)
    print(json.dumps({"process": os.getpid(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}), flush=True)
"""


@pytest.fixture
def worker(part: Any) -> Iterator[Any]:
    made = part("workers").Worker(sees_gpu=False, command=[sys.executable, "-c", ECHO])
    yield made
    made.close()


def test_a_worker_sees_no_gpu_and_stays_one_process(worker: Any) -> None:
    first, second = (worker.ask({"do": "tell"}, 20.0) for _ in range(2))
    assert first == second
    assert first["gpus"] == ""


def test_a_worker_that_dies_gives_its_last_words_and_is_replaced(worker: Any) -> None:
    before = worker.ask({"do": "tell"}, 20.0)
    assert worker.ask({"do": "die"}, 20.0) == {"error": "the worker ended with 1: out of luck"}
    assert worker.ask({"do": "tell"}, 20.0)["process"] != before["process"]


def test_a_worker_that_hangs_is_ended(worker: Any) -> None:
    worker.ask({"do": "tell"}, 20.0)
    begun = time.monotonic()
    assert worker.ask({"do": "hang"}, 0.3) == {"error": "no answer within 0 s"}
    assert time.monotonic() - begun < 10


def _request(samples: int = 8) -> dict[str, Any]:
    return {"do": "predict", "model": "mlp", "way": 0, "samples": samples}


def test_a_run_that_was_cut_off_goes_on_from_what_it_kept(part: Any, tmp_path: Path) -> None:
    workers, path = part("workers"), tmp_path / "rows.jsonl"
    store = workers.Store(path, "this code")
    store.put(_request(8), {"allocated_bytes": 1})
    store.put(_request(16), {"error": "no answer within 60 s"})
    workers.Store(path, "other code").put(_request(32), {"allocated_bytes": 3})
    with path.open("a") as file:
        file.write('{"mark": "this code", "key": "pre')  # killed as it wrote
    again = workers.Store(path, "this code")
    assert again.get(_request(8)) == {"allocated_bytes": 1}
    assert again.get(_request(16)) is None  # what failed is asked again
    assert again.get(_request(32)) is None  # another version's answer


class Counting:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.asked.append(request["samples"])
        return {"allocated_bytes": request["samples"], "timeout_s": timeout_s}

    def close(self) -> None:
        pass


def test_what_is_known_is_not_asked_again_and_nothing_is_asked_after_the_end(
    part: Any, tmp_path: Path
) -> None:
    workers, asked = part("workers"), Counting()
    store = workers.Store(tmp_path / "rows.jsonl", "m")
    until = time.monotonic() + 60
    for _ in range(2):
        found = workers.answered(asked, store, _request(), until, 5.0)
    assert (asked.asked, found["allocated_bytes"], found["timeout_s"]) == ([8], 8, 5.0)
    late = workers.answered(asked, store, _request(9), time.monotonic() - 1, 5.0)
    assert late == {"error": "not asked: the run's time was used up"}
    assert asked.asked == [8]


def test_several_workers_answer_every_request_once(part: Any, tmp_path: Path) -> None:
    workers, pool = part("workers"), [Counting(), Counting(), Counting()]
    store = workers.Store(tmp_path / "rows.jsonl", "m")
    requests = [_request(samples) for samples in range(1, 31)]
    threads = workers.in_background(
        requests,
        store,
        time.monotonic() + 60,
        {"predict": 5.0},
        [lambda one=one: one for one in pool],
        threading.Event(),
    )
    for thread in threads:
        thread.join(20)
    assert sorted(samples for one in pool for samples in one.asked) == list(range(1, 31))
    assert all(store.get(request) is not None for request in requests)


def test_what_is_optional_is_left_out_once_there_is_enough(part: Any, tmp_path: Path) -> None:
    workers, asked, enough = part("workers"), Counting(), threading.Event()
    store = workers.Store(tmp_path / "rows.jsonl", "m")
    requests = [_request(1), {**_request(2), "optional": True}, _request(3)]
    enough.set()
    for thread in workers.in_background(
        requests, store, time.monotonic() + 60, {"predict": 5.0}, [lambda: asked], enough
    ):
        thread.join(20)
    assert asked.asked == [1, 3]


def test_a_prediction_comes_from_a_process_without_a_gpu_and_a_failing_case_is_a_row(part: Any) -> None:
    worker = part("workers").Worker(sees_gpu=False)
    try:
        found = worker.ask(_request(256), 120.0)
        assert found["gpus_visible"] == 0
        assert found["allocated_bytes"] >= sum(found["lines"].values()) > 0
        assert worker.ask({**_request(), "samples": 0}, 60.0)["error"].startswith("BatchError")
        measured = worker.ask({**_request(8), "do": "measure"}, 60.0)
        assert "error" in measured  # no GPU is visible here
    finally:
        worker.close()


# --- what was measured on two cores, and what was recorded


def test_a_prediction_takes_less_than_twenty_seconds_on_two_cores_without_cuda() -> None:
    found = json.loads((BENCHMARKS / "memory_cases" / "on_two_cores.json").read_text())
    assert found["cores"] == 2
    assert found["cuda_build"] is None
    told = [row for row in found["rows"] if "error" not in row]
    assert {row["model"] for row in told} >= {"densenet", "swin", "llama", "unet", "lstm", "mlp"}
    assert len(told) == 45
    for row in told:
        assert row["gpus_visible"] == 0
        assert row["seconds"] <= 20, row
        assert row["cpu_seconds"] <= 2 * row["seconds"], row


@pytest.fixture(scope="module")
def recorded() -> recording.Recording:
    if "memory_vs_peers" not in recording.names():
        pytest.skip("not recorded yet: `gpucourse record benchmarks/memory_vs_peers.py` on a CUDA machine")
    return recording.load("memory_vs_peers")


def test_the_recording_is_of_these_models_cases_and_workers_and_of_this_predictor(
    part: Any, recorded: recording.Recording
) -> None:
    assert recorded["code_sha256"] == part("workers").code_sha256()
    versions = {row["predicted"].get("method_version", METHOD_VERSION) for row in recorded["cases"]}
    assert versions == {METHOD_VERSION}


def test_predictions_came_from_processes_without_a_gpu_on_the_torch_that_measured(
    recorded: recording.Recording,
) -> None:
    told = [row["predicted"] for row in recorded["cases"] if "error" not in row["predicted"]]
    assert len(told) >= 60
    assert {row["gpus_visible"] for row in told} == {0}
    assert {row["torch"] for row in told} == {recorded.provenance["torch"]}
    assert {row["predicted"].get("gpus_visible", 0) for row in recorded["searches"]} == {0}


def test_sixty_cases_and_more_were_judged_each_from_an_empty_allocator(recorded: recording.Recording) -> None:
    measured = [row["measured"] for row in recorded["cases"] if memory_peers.miss(row) is not None]
    assert len(measured) >= 60
    assert {row["left_bytes"] for row in measured} == {0}
    assert {row["retries"] for row in measured} == {0}


def test_each_search_tried_its_answer_the_next_and_the_predicted_one(recorded: recording.Recording) -> None:
    judged = [row for row in recorded["searches"] if memory_peers.limits(row) is not None]
    assert len(judged) == 8
    for row in judged:
        tried, best = dict(map(tuple, row["found"]["tried"])), row["found"]["microbatch"]
        assert (tried[best], tried[best + 1]) == (True, False)
        assert row["predicted"]["microbatch"] in tried


def _steps(limit: int, error: Exception) -> Any:
    def run(way: Any, samples: int) -> None:
        if samples > limit:
            raise error

    return run


@pytest.fixture
def measuring(part: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the measuring module with a device that has no memory of its own."""
    import torch

    module = part("measuring")
    monkeypatch.setattr(module, "clean", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("P", (), {"total_memory": 96e9}))
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    module.fractions = fractions
    return module


def test_the_largest_that_runs_is_found_under_the_cap_and_the_cap_is_lifted(
    part: Any, measuring: Any
) -> None:
    import torch

    way = part("cases").WAYS["mlp"][0]
    measuring.steps = _steps(93, torch.cuda.OutOfMemoryError("no"))
    found = measuring.largest(way, [[10, 3_000_000_000], [20, 5_000_000_000]], also=[97, 93])
    assert found["microbatch"] == 93
    tried = dict(map(tuple, found["tried"]))
    assert (tried[93], tried[94], tried[97]) == (True, False, False)
    assert found["refused"]["97"] == "allocator"
    assert measuring.fractions[:2] == [0.25, 1.0]
    assert measuring.fractions[-1] == 1.0


def test_a_convolution_without_an_engine_is_out_of_memory_and_another_error_is_none(
    part: Any, measuring: Any
) -> None:
    way = part("cases").WAYS["unet"][0]
    measuring.steps = _steps(0, RuntimeError("FIND was unable to find an engine to execute this computation"))
    assert measuring.refusal(way, 1, 24_000_000_000) == "cuDNN: no engine left"
    measuring.steps = _steps(0, RuntimeError("shapes do not agree"))
    with pytest.raises(RuntimeError, match="do not agree"):
        measuring.refusal(way, 1, 24_000_000_000)
    assert measuring.fractions[-1] == 1.0
