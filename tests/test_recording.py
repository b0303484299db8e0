"""Tests of gpucourse.recording: live, replayed, stale, missing, corrupt, and writes that fail."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time

import pytest

from gpucourse import recording
from gpucourse.recording import (
    CorruptRecordingError,
    MissingRecordingError,
    NotYetMeasuredError,
    RecordingError,
    RecordingWriteError,
    StaleRecordingError,
    fingerprint,
    load,
    names,
    plain,
    recorded,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(recording.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.delenv(recording.DEVICE_VARIABLE, raising=False)
    return tmp_path


@pytest.fixture
def gpu(folder, monkeypatch):
    """Pretend that there is an H200, for the part of the path that needs no kernel."""
    from gpucourse.environment import Environment

    machine = Environment(gpu="NVIDIA H200", torch="2.11.0+cu130", cuda="13.0", driver="580.1")
    monkeypatch.setattr(recording, "cuda_available", lambda: True)
    monkeypatch.setattr(recording.Environment, "capture", classmethod(lambda _cls: machine))
    return folder


@pytest.fixture
def no_gpu(monkeypatch):
    def leave():
        monkeypatch.setattr(recording, "cuda_available", lambda: False)
        monkeypatch.delenv(recording.RECORD_VARIABLE, raising=False)

    return leave


def notebook(source: str) -> dict:
    """Run source as a notebook cell does: its own namespace, its text known to inspect."""
    import linecache

    name = f"<cell {abs(hash(source))}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict = {"__name__": "__main__", "recorded": recorded}
    exec(compile(source, name, "exec"), scope)
    return scope


CELL = """
FACTOR = 3

def helper(x):
    return FACTOR * x

@recorded
def measured():
    '''Docstring.'''
    return {"value_ms": helper(2.0), "samples_ms": [1.0, 2.0]}
"""


def record(monkeypatch, cell: str = CELL):
    monkeypatch.setenv(recording.RECORD_VARIABLE, "gpucourse record book/x.md")
    return notebook(cell)["measured"]()


def test_on_a_gpu_it_runs_and_says_measured_here(gpu):
    found = notebook(CELL)["measured"]()
    assert found["value_ms"] == 6.0
    assert found.line() == "measured here on NVIDIA H200, torch 2.11.0+cu130, CUDA 13.0, driver 580.1"
    assert not list(gpu.rglob("*.json")), "only `gpucourse record` writes"


def test_recorded_there_it_is_replayed_here_with_its_provenance(gpu, monkeypatch, no_gpu):
    record(monkeypatch)
    no_gpu()
    found = notebook(CELL)["measured"]()
    assert found["value_ms"] == 6.0
    assert not found.measured_here
    assert found.line().startswith("recorded on NVIDIA H200, 2")
    assert found.provenance["command"] == "gpucourse record book/x.md"
    assert "recorded on NVIDIA H200" in found._repr_html_()
    assert names() == ["measured"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("helper(2.0)", "helper(2.5)"),  # the function
        ("FACTOR * x", "FACTOR + x"),  # a helper of the notebook
        ("FACTOR = 3", "FACTOR = 4"),  # a constant of the notebook
    ],
)
def test_a_change_in_the_code_makes_it_stale(gpu, monkeypatch, no_gpu, old, new):
    record(monkeypatch)
    no_gpu()
    assert old in CELL
    with pytest.raises(StaleRecordingError, match=r"'measured' is stale.*gpucourse record book/x.md.*undo"):
        notebook(CELL.replace(old, new))["measured"]()


LISTED = """
def double(x):
    return 2 * x

CALLS = [("double", double)]

@recorded
def measured():
    return {"value_ms": CALLS[0][1](1.0)}
"""


def test_functions_in_a_constant_count_by_their_code_and_not_by_their_address(gpu, monkeypatch, no_gpu):
    record(monkeypatch, LISTED)
    no_gpu()
    assert notebook(LISTED)["measured"]()["value_ms"] == 2.0  # defined anew: other addresses
    with pytest.raises(StaleRecordingError):
        notebook(LISTED.replace("2 * x", "3 * x"))["measured"]()


def test_an_object_whose_text_is_an_address_is_refused_in_a_constant():
    cell = "THINGS = [object()]\n@recorded\ndef measured():\n    return {'n': len(THINGS)}\n"
    with pytest.raises(TypeError, match=r"constant THINGS holds .* whose text is an address"):
        fingerprint(notebook(cell)["measured"].function)


CONSTANTS = {
    "a dict": ("K = {'rows': 8, 'tile': {'m': 64}}", "64", "128"),
    "a set": ("K = {'float32', 'int64'}", "int64", "bool"),
    "bytes": ("K = b'ab'", "ab", "ac"),
    "a range": ("K = range(3)", "3", "4"),
    "a function in a dict": ("def g(x):\n    return 2 * x\nK = {'double': g}", "2 \\*", "3 *"),
    "a function in a dict in a list": ("def g(x):\n    return 2 * x\nK = [{'double': g}]", "2 \\*", "3 *"),
    "a lambda": ("K = lambda x: 2 * x", "2 \\*", "3 *"),
    "the second of two lambdas": ("K = [lambda x: x, lambda x: 2 * x]", "2 \\*", "3 *"),
    "a partial's argument": ("import functools\nK = functools.partial(max, 2)", "2", "3"),
    "a partial's function": (
        "import functools\ndef g(x):\n    return 2 * x\nK = functools.partial(g, 1)",
        "2 \\*",
        "3 *",
    ),
    "a cached function": (
        "import functools\n@functools.cache\ndef K():\n    return 2",
        "return 2",
        "return 3",
    ),
    "a value in a class": (
        "class K:\n    width = 64\n    def rows(self):\n        return self.width",
        "64",
        "128",
    ),
    "a static method": (
        "class K:\n    @staticmethod\n    def rows():\n        return 2",
        "return 2",
        "return 3",
    ),
    "a property": ("class K:\n    @property\n    def rows(self):\n        return 2", "return 2", "return 3"),
    "a base class": (
        "class B:\n    def rows(self):\n        return 2\nclass K(B):\n    pass",
        "return 2",
        "return 3",
    ),
    "a class in a list": ("class A:\n    def rows(self):\n        return 2\nK = [A]", "return 2", "return 3"),
    "an integer too long to write": ("K = 10**5000", "5000", "5001"),
}


@pytest.mark.parametrize(("constant", "old", "new"), CONSTANTS.values(), ids=CONSTANTS)
def test_what_the_measurement_names_belongs_to_its_code_whatever_it_is(constant, old, new):
    def mark(text: str) -> str:
        cell = f"{text}\n@recorded\ndef measured():\n    return {{'value': K}}\n"
        return fingerprint(notebook(cell)["measured"].function)["source"]

    assert mark(constant) == mark(constant)  # made anew, at other addresses
    assert mark(constant) != mark(re.sub(old, new, constant))


def test_the_order_in_which_a_set_lies_in_memory_is_no_part_of_the_code():
    def mark(values: list[int]) -> tuple[list[int], str]:
        scope = notebook("@recorded\ndef measured():\n    return {'n': len(K)}\n")
        scope["K"] = set()
        for value in values:
            scope["K"].add(value)
        return list(scope["K"]), fingerprint(scope["measured"].function)["source"]

    one, another = mark([0, 8]), mark([8, 0])  # one slot of a small table: they lie as they came
    assert one[0] != another[0]
    assert one[1] == another[1]


def test_a_constant_that_holds_itself_is_refused():
    scope = notebook("K = [len]\nK.append(K)\n@recorded\ndef measured():\n    return {'n': len(K)}\n")
    with pytest.raises(TypeError, match="the constant K holds itself"):
        fingerprint(scope["measured"].function)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("'''Docstring.'''", "'''Another docstring.'''"),
        ("    return FACTOR * x", "    # why\n\n    return FACTOR   *  x"),
        ("@recorded\n", "@recorded(needs_gb=0.0)\n"),
    ],
)
def test_comments_layout_docstring_and_decorator_do_not(gpu, monkeypatch, no_gpu, old, new):
    record(monkeypatch)
    no_gpu()
    assert old in CELL
    assert notebook(CELL.replace(old, new))["measured"]()["value_ms"] == 6.0


def test_a_new_method_of_an_instrument_makes_it_stale(gpu, monkeypatch, no_gpu):
    from gpucourse import cuda_events

    cell = "from gpucourse.cuda_events import time_cuda\n@recorded\ndef measured():\n    time_cuda\n    return {}\n"
    record(monkeypatch, cell)
    no_gpu()
    assert notebook(cell)["measured"]().provenance["methods"] == {"cuda_events": cuda_events.METHOD_VERSION}
    monkeypatch.setattr(cuda_events, "METHOD_VERSION", cuda_events.METHOD_VERSION + 1)
    with pytest.raises(StaleRecordingError, match=r"method of cuda_events \(\d+ then, \d+ now\)"):
        notebook(cell)["measured"]()


def test_a_name_that_is_not_defined_by_now_is_found_without_a_gpu(gpu, monkeypatch, no_gpu):
    record(monkeypatch)
    no_gpu()
    late = CELL.replace("helper(2.0)", "helper(2.0) + later()")
    with pytest.raises(NameError, match="measured uses later, which no cell above defines"):
        notebook(late)["measured"]()


def test_a_learners_variable_named_like_an_attribute_or_a_local_is_no_part_of_the_code():
    cell = "import types\n@recorded\ndef measured():\n    n = 1\n    return {'x': types.SimpleNamespace(name=n).name}\n"
    scope = notebook(cell)
    before = fingerprint(scope["measured"].function)
    scope |= {"name": "mine", "n": 7}
    scope["measured"].function.__globals__.update(name="mine", n=7)
    assert fingerprint(scope["measured"].function) == before


def test_the_fingerprint_is_the_same_on_every_python():
    # Python 3.12 splits f-strings into tokens, 3.11 does not; this value was computed on 3.11.
    cell = 'def measured():\n    """Doc."""\n    x = 2\n    return {f"a{x:>{3}}b": f\'{x!r} {"y"}\', "c": (1, [x])}\n'
    found = fingerprint(notebook(cell)["measured"])["source"]
    assert found == "71e8b691a7fe0c55cadbf1ae084da56e11dd7945dfefc3f77bbac2a0016da8ef"


def test_a_missing_recording_names_the_nearest(gpu, monkeypatch):
    record(monkeypatch)
    with pytest.raises(
        MissingRecordingError, match=r"no recording 'measure' for nvidia-h200 \(nearest: measured\)"
    ):
        load("measure")
    with pytest.raises(
        MissingRecordingError, match=r"no recording 'else' for nvidia-h200 \(1 of other names\)"
    ):
        load("else")


def damage_truncate(text: str) -> str:
    return text[: len(text) // 2]


def damage_value(text: str) -> str:
    assert "6.0" in text
    return text.replace("6.0", "7.0")


def damage_key(text: str) -> str:
    data = json.loads(text)
    del data["provenance"]
    return json.dumps(data)


def damage_name(text: str) -> str:
    return text.replace('"name": "measured"', '"name": "other"')


def damage_format(text: str) -> str:
    return text.replace('"format": 1', '"format": 99')


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_truncate, "not whole JSON"),
        (damage_value, "does not match its checksum"),
        (damage_key, "lacks provenance"),
        (damage_name, "says that it is 'other'"),
        (damage_format, "format is not 1"),
        (lambda _text: "", "not whole JSON"),
        (lambda _text: "[]", "format is not 1"),
    ],
)
def test_a_damaged_recording_is_refused_and_says_how(gpu, monkeypatch, damage, said):
    record(monkeypatch)
    path = gpu / "nvidia-h200" / "measured.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(CorruptRecordingError, match=said):
        load("measured")


def test_bytes_that_are_no_text_are_corrupt_too(gpu):
    (gpu / "nvidia-h200").mkdir()
    (gpu / "nvidia-h200" / "measured.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CorruptRecordingError, match="not text"):
        load("measured")


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_recording_whole_and_no_litter(gpu, monkeypatch, failing):
    record(monkeypatch)
    path = gpu / "nvidia-h200" / "measured.json"
    before = path.read_bytes()

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recording.os, failing, full)
    with pytest.raises(RecordingWriteError, match="No space left on device; the old recording is unchanged"):
        record(monkeypatch, CELL.replace("2.0)", "5.0)"))
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["measured.json"]


def test_a_folder_that_cannot_be_written_is_said(gpu, monkeypatch):
    blocker = gpu / "file"
    blocker.write_text("")
    monkeypatch.setenv(recording.FOLDER_VARIABLE, str(blocker))
    with pytest.raises(RecordingWriteError, match=r"could not write .*; nothing was written"):
        record(monkeypatch)


def test_two_writers_at_once_leave_one_whole_recording(gpu, monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    path = gpu / "nvidia-h200" / "x.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda k: recording._write(path, {"k": k, "pad": "x" * 100_000}), range(40)))
    assert json.loads(path.read_text())["k"] in range(40)
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def fake_memory(monkeypatch, free_gb: float):
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free_gb * 1e9), int(24e9)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)


def test_on_a_gpu_that_is_too_small_it_is_replayed_and_says_why(gpu, monkeypatch):
    cell = CELL.replace("@recorded", "@recorded(needs_gb=20)")
    fake_memory(monkeypatch, 40)
    record(monkeypatch, cell)
    fake_memory(monkeypatch, 7.9)
    with pytest.raises(
        RecordingError, match=r"cannot record measured: it needs 20 GB and this GPU has 7\.9 GB free"
    ):
        record(monkeypatch, cell)
    monkeypatch.delenv(recording.RECORD_VARIABLE)
    found = notebook(cell)["measured"]()
    assert not found.measured_here
    assert "(replayed: needs 20 GB and this GPU has 7.9 GB free)" in found.line()


def test_running_out_of_memory_here_replays_and_says_so(gpu, monkeypatch):
    import torch

    record(monkeypatch)
    monkeypatch.delenv(recording.RECORD_VARIABLE)

    def exhausted(_data):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")

    monkeypatch.setattr(recording, "plain", exhausted)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert "ran out of memory here (CUDA out of memory)" in notebook(CELL)["measured"]().line()


def test_what_is_not_measured_yet_says_so_and_has_no_value():
    found = notebook(CELL.replace("@recorded", "@recorded(pending='no GPU yet')"))["measured"]()
    assert found.line() == "not yet measured: no GPU yet"
    with pytest.raises(NotYetMeasuredError, match="measured is not yet measured"):
        found["value_ms"]


def test_an_unknown_key_lists_what_there_is(gpu):
    with pytest.raises(KeyError, match="has no 'value'; it has value_ms, samples_ms"):
        notebook(CELL)["measured"]()["value"]


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        ({"x": float("nan")}, ValueError, "data.x is nan"),
        ({"x": [1.0, float("inf")]}, ValueError, r"data.x\[1\] is inf"),
        ({1: 2}, TypeError, "the key 1"),
        ({"x": object()}, TypeError, "data.x is a object"),
    ],
)
def test_only_plain_finite_data_is_recorded(value, error, said):
    with pytest.raises(error, match=said):
        plain(value)


def test_a_tensor_is_refused_with_the_way_out():
    import torch

    with pytest.raises(TypeError, match=r"is a Tensor: .*\.item\(\) or \.tolist\(\)"):
        plain({"x": torch.ones(2)})


def test_recorded_functions_take_no_argument_and_return_a_dict(gpu):
    with pytest.raises(TypeError, match="takes arguments"):
        notebook("@recorded\ndef measured(n):\n    return {}\n")
    with pytest.raises(TypeError, match="returned a list"):
        notebook("@recorded\ndef measured():\n    return [1]\n")["measured"]()
    with pytest.raises(TypeError, match="decorates a function, found int"):
        recorded(3)


def test_every_recording_in_the_package_is_whole():
    for name in names():
        found = load(name)
        assert found.provenance["gpu"], name
        assert found.provenance["command"].startswith("gpucourse record "), name
        assert isinstance(found.data, dict), name


def test_recordings_name_no_path_of_the_machine():
    for path in recording.recordings_folder().rglob("*.json"):
        text = path.read_text()
        for word in ("/root", "/home", "/work", "/tmp"):
            assert word not in text, (path, word)


# --- hands, disks and kills --------------------------------------------------------------------------------


def rewrite(edit, *, sign: bool = False):
    """Give a damage that changes the parsed file by `edit`, and its checksum with it."""

    def damage(text: str) -> str:
        found = json.loads(text)
        edit(found)
        if sign:
            found["data_sha256"] = recording._sha256(recording._canonical(found["data"]))
        return json.dumps(found)

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            rewrite(lambda r: r.update(provenance=None)),
            "its provenance is not a table with gpu, date, command",
        ),
        (rewrite(lambda r: r.update(provenance={})), "its provenance is not a table"),
        (rewrite(lambda r: r["provenance"].update(date=3)), "its provenance is not a table"),
        (rewrite(lambda r: r.update(fingerprint={})), "its fingerprint is not a table with source, methods"),
        (rewrite(lambda r: r.update(data=[1]), sign=True), "its data is not a table"),
        (rewrite(lambda r: r["data"].update(value_ms=float("nan"))), "NaN is no number of JSON"),
        (
            rewrite(lambda r: r["provenance"].update(gpu="NVIDIA B200")),
            "comes from 'NVIDIA B200', but lies in nvidia-h200",
        ),
        (lambda _text: "[" * 100_000, "not whole JSON"),
        (lambda _text: '{"format": ' + "1" * 5000 + "}", "not whole JSON"),
        (lambda _text: "\0" * 400, "not whole JSON"),
    ],
)
def test_a_recording_changed_by_hand_is_refused_and_says_where(gpu, monkeypatch, damage, said):
    record(monkeypatch)
    path = gpu / "nvidia-h200" / "measured.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(CorruptRecordingError, match=f"measured.json cannot be used: .*{said}"):
        load("measured")


def test_a_recording_that_cannot_be_read_says_why(gpu):
    (gpu / "nvidia-h200" / "measured.json").mkdir(parents=True)
    with pytest.raises(CorruptRecordingError, match=r"it cannot be read.*directory"):
        load("measured")


@pytest.mark.parametrize("name", ["../../secret", "", "a/b", "a\0b", "x " * 3000])
def test_a_name_is_a_functions_name_and_never_a_path(gpu, name):
    (gpu / "nvidia-h200").mkdir()
    with pytest.raises(MissingRecordingError, match="there is no recording"):
        load(name)


def test_a_name_that_is_no_text_is_a_type_error(gpu):
    with pytest.raises(TypeError, match="a recording's name is a str, found NoneType"):
        load(None)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"needs_gb": "20"}, TypeError, "needs_gb is '20': an amount in GB"),
        ({"needs_gb": True}, TypeError, "needs_gb is True"),
        ({"needs_gb": float("nan")}, ValueError, "needs_gb is nan"),
        ({"needs_gb": -1}, ValueError, "needs_gb is -1"),
        ({"pending": True}, TypeError, "pending is True: say why in words"),
    ],
)
def test_a_bad_option_is_refused_where_it_stands_and_not_first_on_a_gpu(options, error, said):
    with pytest.raises(error, match=said):
        recorded(**options)


def test_a_recorder_that_is_interrupted_leaves_the_old_recording_and_no_litter(gpu, monkeypatch):
    record(monkeypatch)
    path = gpu / "nvidia-h200" / "measured.json"
    before = path.read_bytes()

    def interrupted(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(recording.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        record(monkeypatch, CELL.replace("2.0)", "5.0)"))
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["measured.json"]


KILLED = """
import os, signal
from pathlib import Path
from gpucourse import recording
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
recording._write(Path("{path}"), {{"k": "new"}})
"""


def test_what_a_killed_recorder_left_is_no_recording_and_goes_with_the_next(gpu, monkeypatch):
    record(monkeypatch)
    path = gpu / "nvidia-h200" / "measured.json"
    before = path.read_bytes()
    killed = subprocess.run([sys.executable, "-c", KILLED.format(path=path)], check=False)
    assert killed.returncode == -9
    assert path.read_bytes() == before
    (left,) = set(path.parent.iterdir()) - {path}
    assert names() == ["measured"]
    record(monkeypatch)
    assert left.exists(), "a file this young may be another recorder's, at work now"
    long_ago = time.time() - 2 * recording.ABANDONED_S
    os.utime(left, (long_ago, long_ago))
    record(monkeypatch)
    assert [p.name for p in path.parent.iterdir()] == ["measured.json"]


WIDTHS = """
WIDTHS = {"a": 3}

@recorded
def measured():
    return {"value_ms": float(WIDTHS["a"])}
"""


def test_a_recording_is_held_against_the_rule_that_it_was_made_by(gpu, monkeypatch, no_gpu):
    record(monkeypatch, WIDTHS)
    (path,) = gpu.rglob("measured.json")
    kept = json.loads(path.read_text())
    assert kept["fingerprint"]["rule"] == 2
    no_gpu()
    with pytest.raises(StaleRecordingError):  # the second rule takes dicts in
        notebook(WIDTHS.replace("3", "4"))["measured"]()
    kept["fingerprint"] = fingerprint(notebook(WIDTHS)["measured"].function, 1)
    assert "rule" not in kept["fingerprint"]
    path.write_text(json.dumps(kept))
    assert notebook(WIDTHS)["measured"]()["value_ms"] == 3.0
    kept["fingerprint"]["rule"] = 3
    path.write_text(json.dumps(kept))
    with pytest.raises(CorruptRecordingError, match="rule 3, and this version of gpucourse knows 1 and 2"):
        notebook(WIDTHS)["measured"]()
