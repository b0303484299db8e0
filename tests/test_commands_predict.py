"""The command line predicts a model that it is told of, and says what it was told wrongly."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from gpucourse import cli
from gpucourse.commands import predict as command

NET = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.words = nn.Embedding(100, width)
        self.head = nn.Linear(width, 100)
    def forward(self, tokens, labels=None, flag=True):
        logits = self.head(self.words(tokens))
        assert flag is True
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}
def make():
    print("made")
    return Net()
def total(model, tokens):
    return model(tokens)["logits"].sum()
def sgd(parameters):
    return torch.optim.SGD(parameters, momentum=0.9)
three = 3
"""
NAMED = ["--batch", "tokens=8x16:int64", "labels=8x16:int64", "flag=true"]
PLAIN = ["--batch", "8x16:int64"]


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "a_small_net.py"
    path.write_text(NET, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return str(path)


def test_it_says_the_lines_and_whether_it_fits(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["predict", f"{net}:make", *NAMED, "--device", "L4"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("Net, microbatch 8, fp32, AdamW: ")
    assert "on L4 (24.0 GB, 10% in reserve): fits, 21." in said.out
    assert "made" not in said.out  # the model's own output goes elsewhere
    assert "made" in said.err


def test_its_json_has_the_prediction_and_the_verdict(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    how = ["--optimizer", f"{net}:sgd", "--precision", "bf16", "--accumulation", "2", "--clip-norm", "1"]
    asked = ["predict", f"{net}:Net(width=32)", *NAMED, "--device", "1GB", "--reserve", "0", *how, "--json"]
    assert cli.main(asked) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == command.SCHEMA
    found = data["prediction"]
    assert (found["optimizer"], found["precision"], found["accumulation"]) == ("SGD", "bf16", 2)
    assert data["device"]["fits"] is True
    assert data["device"]["budget_bytes"] == 10**9


def test_the_largest_microbatch_is_the_last_that_fits(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["predict", f"{net}:Net", *NAMED, "--device", "0.2GB", "--microbatch", "largest", "--json"]
    assert cli.main(asked) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["device"]["fits"] is True
    assert data["device"]["over"] > data["device"]["budget_bytes"]
    asked[asked.index("largest")] = str(data["prediction"]["microbatch"] + 1)
    assert cli.main(asked) == 0
    assert json.loads(capsys.readouterr().out)["device"]["fits"] is False


def test_a_card_s_own_workspaces_and_multiprocessors_count(
    net: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for device in ("L4", "H200"):
        assert cli.main(["predict", f"{net}:Net", *NAMED, "--device", device, "--json"]) == 0
        peaks = json.loads(capsys.readouterr().out)["prediction"]["peaks"]
        found[device] = max(peak["lines"]["workspaces"] for peak in peaks)
    bias = 2**20  # of cuBLASLt, in the thread of the forward pass
    assert found == {"L4": 2 * 8320 * 1024 + bias, "H200": 2 * 32 * 2**20 + bias}


@pytest.mark.parametrize("loss", ["mean", "a_small_net:total"])
def test_a_loss_can_be_named(net: str, loss: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["predict", "a_small_net:Net", *PLAIN, "--loss", loss]) == 0
    assert "Net, microbatch 8" in capsys.readouterr().out


def test_cross_entropy_takes_the_last_tensor_as_targets(capsys: pytest.CaptureFixture[str]) -> None:
    for batch in (["64x32", "64:int64"], ["8x5x32", "8x5:int64"]):
        asked = ["predict", "torch.nn:Linear(32, 10)", "--batch", *batch, "--loss", "cross-entropy"]
        assert cli.main(asked) == 0
    asked = ["predict", "torch.nn:Conv2d(3, 10, 1)", "--loss", "cross-entropy"]
    assert cli.main([*asked, "--batch", "4x3x8x8", "4x8x8:int64"]) == 0
    assert "Conv2d, microbatch 4" in capsys.readouterr().out


@pytest.mark.slow
def test_a_compiled_step_is_said_to_be_one(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["predict", f"{net}:Net", *NAMED, "--compile", "model"]) == 0
    assert "compiled (model)" in capsys.readouterr().out


def test_what_does_not_fit_says_by_how_much(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["predict", f"{net}:Net", *NAMED, "--device", "0.01GB"]) == 0
    assert "does not fit: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        (["NET", *NAMED], 2, "names no model; wanted MODULE:FACTORY"),
        (["nowhere.py:Net", *NAMED], 2, "there is no file nowhere.py"),
        (["no_such_module:Net", *NAMED], 2, "no_such_module cannot be imported"),
        (["NET:Gone", *NAMED], 2, "has no 'Gone'"),
        (["NET:Net(", *NAMED], 2, "is no expression of Python"),
        (["NET:three", *NAMED], 1, "the function made int; wanted a torch.nn.Module"),
        (["NET:Net", "--batch", "8x"], 2, "'8x' is no tensor; wanted SHAPE or SHAPE:DTYPE"),
        (["NET:Net", "--batch", "8x16"], 1, "the step failed at .*self.words"),
        (["NET:Net", "--batch", "8x16:integer"], 2, "torch has no dtype 'integer'"),
        (["NET:Net", "--batch", "tokens=8x16:int64", "8"], 2, "names and '8' has none"),
        (["NET:Net", "--batch", "0x16:int64"], 1, "with nothing in it"),
        (["NET:Net", *NAMED, "--device", "L5"], 2, "L5"),
        (["NET:Net", *NAMED, "--device", "L4", "--reserve", "1"], 1, "reserve is 1"),
        (["NET:Net", *NAMED, "--microbatch", "largest"], 2, "needs a --device"),
        (["NET:Net", *NAMED, "--microbatch", "0"], 2, "--microbatch is '0'"),
        (["NET:Net", *NAMED, "--device", "0.001GB", "--microbatch", "largest"], 1, "no microbatch fits"),
        (["NET:Net", *PLAIN], 1, "the loss is .*wanted one number"),
        (["NET:Net", *PLAIN, "--loss", "sum"], 2, "--loss is 'sum'; wanted own, mean"),
        (["NET:Net", *PLAIN, "--loss", "NET:three"], 2, "is 3; wanted a function"),
        (["NET:Net", *NAMED, "--optimizer", "Adamant"], 1, "no optimizer 'Adamant'"),
        (["NET:Net", *NAMED, "--accumulation", "0"], 1, "accumulation is 0"),
    ],
)
def test_what_is_asked_wrongly_is_told(
    net: str, asked: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["predict", *(word.replace("NET", net) for word in asked)]) == status
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.splitlines()[-1].startswith("gpucourse predict: ")
    assert re.search(said, written.err)


def test_the_help_says_how_a_batch_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["predict", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "[NAME=]SHAPE[:DTYPE]" in said
    assert "input_ids=16x1024:int64" in said


def test_numbers_and_switches_pass_through_a_batch() -> None:
    batch = command.parse_batch(["x=2x3", "flag=False", "nothing=none", "scale=0.5"])
    assert (batch["flag"], batch["nothing"], batch["scale"]) == (False, None, 0.5)
    assert batch["x"].device.type == "meta"
    assert isinstance(command.parse_batch(["2x3"]), tuple)
    assert torch.float32 == batch["x"].dtype
