"""The core meets every kind of answer, and each checker holds to its right and wrong ones."""

from __future__ import annotations

import dataclasses
import importlib
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpucourse import checkpoints
from gpucourse.checkpoints import UnknownCheckpointError, Verdict, Wrong, call, check, judge, number
from gpucourse.checkpoints import _core as core
from tests.answers import Answers, problems

ROOT = Path(__file__).parents[1]
CHAPTERS = sorted([*ROOT.glob("book/**/*.md"), *ROOT.glob("labs/*.md")])
CALL = re.compile(r"""\bcheck\(\s*["']([^"']+)["']""")


# ------------------------------------------------------------------------------- every chapter's checkers


def answers_of(key: str) -> dict[str, Answers]:
    return importlib.import_module(f"tests.answers.{key}").ANSWERS


@pytest.mark.parametrize("key", checkpoints.keys())
def test_every_checkpoint_of_a_chapter_has_answers_and_no_answers_are_left_over(key: str) -> None:
    assert sorted(answers_of(key)) == checkpoints.ids(key)


@pytest.mark.parametrize("key", checkpoints.keys())
def test_a_chapter_has_two_checkpoints_or_more_each_under_its_own_key(key: str) -> None:
    own = [i for i, f in core._REGISTRY.items() if f.__module__ == f"gpucourse.checkpoints.{key}"]
    assert checkpoints.ids(key) == sorted(own)
    assert len(own) >= 2


@pytest.mark.parametrize("key", checkpoints.keys())
def test_right_answers_pass_and_each_slip_is_named(key: str) -> None:
    # Each answer on the first inputs; on all that are drawn for it below, in the full run.
    found = [p for i, a in answers_of(key).items() for p in problems(check, i, a, range(-(-a.seeds // 5)))]
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("key", checkpoints.keys())
def test_right_answers_pass_and_each_slip_is_named_over_all_seeds(key: str) -> None:
    found = [p for i, a in answers_of(key).items() for p in problems(check, i, a)]
    assert found == []


@pytest.mark.parametrize("key", checkpoints.keys())
def test_a_checkpoint_left_open_is_unanswered(key: str) -> None:
    for identifier in checkpoints.ids(key):
        assert check(identifier, ...).status == "unanswered", identifier
        assert check(identifier, None).status == "unanswered", identifier


@pytest.mark.parametrize("key", checkpoints.keys())
def test_what_claims_to_equal_everything_is_right_nowhere(key: str) -> None:
    for identifier in checkpoints.ids(key):
        for answer in (Agreeable(), lambda *_, **__: Agreeable(), float("nan"), True, object(), "5 GB"):
            assert check(identifier, answer, seed=1).status == "wrong", (identifier, answer)


def test_every_registered_checkpoint_stands_in_a_chapter_and_every_call_in_a_chapter_is_registered() -> None:
    called = {i for page in CHAPTERS for i in CALL.findall(page.read_text(encoding="utf-8"))}
    assert called == set(checkpoints.ids())


def test_every_numbered_chapter_and_every_lab_asks_for_two_answers_or_more() -> None:
    pages = [p for p in CHAPTERS if p.parent.name == "labs" or re.match(r"\d\d_", p.name)]
    assert pages, "no chapter was found: the globs above no longer fit the layout"
    asked = {p.name: len(set(CALL.findall(p.read_text(encoding="utf-8")))) for p in pages}
    assert {name: n for name, n in asked.items() if n < 2} == {}


def test_checkers_need_no_gpu_and_load_no_torch_before_they_run() -> None:
    code = (
        "import sys\n"
        "from gpucourse import checkpoints\n"
        "checkpoints.ids()\n"
        "assert 'torch' not in sys.modules, 'a checkpoint module imports torch at its top'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -------------------------------------------------------------------------- the harness, shown to fail


def doubled(answer: object, rng: np.random.Generator) -> str:
    for n in rng.integers(1, 10_000, size=3):
        judge(call(answer, int(n)), 2 * n, {"squared, not doubled": n * n}, case=f"n = {n}")
    return "Twice the input."


GOOD = Answers(
    right=[lambda n: 2 * n, lambda n: n + n],
    wrong={
        "square": (lambda n: n * n, "squared"),
        "same": (lambda n: n, "That is not it"),
        "nan": (lambda n: float("nan"), "not a finite"),
        "constant": (lambda n: -1, "came out as -1"),
    },
)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, core.Checker]:
    """Give a registry of its own, so that what a test declares is gone afterwards."""
    entries: dict[str, core.Checker] = {"test.doubled": doubled}
    monkeypatch.setattr(core, "_REGISTRY", entries)
    return entries


@pytest.mark.usefixtures("registry")
def test_the_harness_finds_nothing_in_a_sound_checkpoint() -> None:
    assert problems(check, "test.doubled", GOOD) == []


def test_the_harness_catches_a_checker_that_accepts_everything(registry: dict[str, core.Checker]) -> None:
    registry["test.lax"] = lambda answer, rng: "Fine."
    found = problems(check, "test.lax", GOOD, seeds=[0])
    assert [w for w in GOOD.wrong if any(repr(w) in line for line in found)] == list(GOOD.wrong)


def test_the_harness_catches_a_checker_that_refuses_everything(registry: dict[str, core.Checker]) -> None:
    def strict(answer: object, rng: np.random.Generator) -> None:
        raise Wrong("squared; That is not it; not a finite; came out as -1")

    registry["test.strict"] = strict
    assert [line[:28] for line in problems(check, "test.strict", GOOD, seeds=[0])] == [
        "test.strict: right answer 0,",
        "test.strict: right answer 1,",
    ]


def test_the_harness_catches_a_slip_that_only_some_inputs_tell_apart(
    registry: dict[str, core.Checker],
) -> None:
    registry["test.narrow"] = lambda answer, rng: judge(
        call(answer, n := int(rng.integers(2, 4))), 2 * n, {"squared, not doubled": n * n}
    )
    found = problems(check, "test.narrow", dataclasses.replace(GOOD), seeds=range(20))
    assert any("'square'" in line and "was judged ✓ Right" in line for line in found)


@pytest.mark.usefixtures("registry")
def test_the_harness_catches_a_wrong_answer_that_passes_and_a_slip_that_is_not_named() -> None:
    passing = dict(GOOD.wrong) | {"really right": (lambda n: 2 * n, "squared")}
    unnamed = dict(GOOD.wrong) | {"square": (lambda n: n * n, "cubed")}
    empty = dict(GOOD.wrong) | {"square": (lambda n: n * n, "")}
    for wrong, text in (
        (passing, "was judged ✓ Right"),
        (unnamed, "'cubed' is not in"),
        (empty, "'' is not in"),
    ):
        found = problems(check, "test.doubled", Answers(right=GOOD.right, wrong=wrong), seeds=[0])
        assert len(found) == 1
        assert text in found[0]


@pytest.mark.usefixtures("registry")
def test_the_harness_wants_two_right_answers_and_four_wrong_ones() -> None:
    few = Answers(right=GOOD.right[:1], wrong={"square": GOOD.wrong["square"]})
    assert [line.split("; ")[1] for line in problems(check, "test.doubled", few, seeds=[0])] == [
        "a reference and another are wanted",
        "at least four are wanted",
    ]


# ------------------------------------------------------------------------------------------ the grades


class Agreeable:
    """Claims to equal everything, to be every number, and to be called with anything."""

    __class__ = property(lambda self: int)  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __call__(self, *args: object, **kwargs: object) -> Agreeable:
        return self

    def __getattr__(self, name: str) -> Agreeable:
        return self

    def __repr__(self) -> str:
        raise RuntimeError("no text either")

    for _name in (
        "lt",
        "le",
        "gt",
        "ge",
        "add",
        "sub",
        "mul",
        "rsub",
        "radd",
        "abs",
        "float",
        "int",
        "index",
    ):
        locals()[f"__{_name}__"] = lambda self, *_: self


class Truthy(float):
    """A float that equals everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __float__(self) -> float:
        return 8.0

    def __sub__(self, other: object) -> float:
        return 0.0

    __rsub__ = __sub__
    __hash__ = float.__hash__


@pytest.fixture
def eight(registry: dict[str, core.Checker]) -> str:
    registry["test.eight"] = lambda answer, rng: judge(answer, 8, what="the bits of a byte")
    return "test.eight"


def ellipsis(n: int) -> object:
    return ...


def nothing(n: int) -> None:
    pass


def later(n: int) -> int:
    raise NotImplementedError


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("answer", [..., None, ellipsis, nothing, later])
def test_a_placeholder_is_not_answered_yet(answer: object) -> None:
    assert check("test.doubled", answer).status == "unanswered"


@pytest.mark.parametrize(
    "answer", [[1, ...], {"busy": 3.0, "idle": ...}, (None, 2), {"a": {"b": [..., 1]}}], ids=repr
)
def test_a_placeholder_inside_an_answer_is_not_answered_yet(answer: object, eight: str) -> None:
    verdict = check(eight, answer)
    assert verdict.status == "unanswered"
    assert "1 of 2 values still stand at `...`" in verdict.message


def test_a_list_that_contains_itself_is_read_to_an_end(eight: str) -> None:
    knot: list[object] = []
    knot.append(knot)
    assert check(eight, knot).status == "wrong"


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("late", [nothing, ellipsis, later])
def test_a_branch_without_a_result_is_wrong_once_another_input_was_answered(late: object) -> None:
    seen: list[int] = []

    def answer(n: int) -> object:
        seen.append(n)
        return 2 * n if len(seen) == 1 else late(n)  # type: ignore[operator]

    verdict = check("test.doubled", answer)
    assert verdict.status == "wrong"
    assert "a branch without a result" in verdict.message


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("result", [{"wall": 3.0, "pair": ...}, [..., 2], (1, ...)], ids=repr)
def test_a_result_with_a_placeholder_left_in_it_is_not_answered_yet(result: object) -> None:
    verdict = check("test.doubled", lambda _n: result)
    assert verdict.status == "unanswered"
    assert "leaves a `...` in what it returns" in verdict.message


@pytest.mark.usefixtures("registry")
def test_the_memory_of_one_check_does_not_reach_the_next() -> None:
    assert check("test.doubled", lambda n: 2 * n).status == "right"
    assert check("test.doubled", nothing).status == "unanswered"


@pytest.mark.parametrize("answer", [8, 8.0, Fraction(8), np.int32(8), np.float32(8), np.float64(8)], ids=repr)
def test_every_plain_number_is_read(answer: object, eight: str) -> None:
    assert check(eight, answer) == Verdict(checkpoint=eight, status="right", message="")


def generator() -> object:
    yield 8


async def coroutine(n: int) -> int:
    return 2 * n


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (True, "truth value"),
        (np.bool_(True), "truth value"),
        ("8", "is text, '8'. Give a plain number"),
        ("5 GB", "is text, '5 GB'"),
        (float("nan"), "nan, not a finite number"),
        (float("-inf"), "-inf, not a finite number"),
        (np.float32("nan"), "not a finite number"),
        (8j, "a complex"),
        (10**400, "too large for any machine"),
        (np.array(8.0), "an ndarray of shape (), float64. Give one plain number: `.item()`"),
        (np.ones(3), "an ndarray of shape (3,)"),
        (torch.tensor(8.0), "a Tensor of shape (), torch.float32"),
        (torch.ones(2, 3), "a Tensor of shape (2, 3)"),
        (torch.ones(3, device="meta"), "a Tensor"),
        ([8], "a list"),
        (generator(), "a generator"),
        (len, "a function. Call it"),
        (Agreeable(), "could not be read: TypeError"),
        (Truthy(3.0), "came out as 3"),
        (type("Half", (), {"__repr__": lambda self: 1 / 0})(), "a Half"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_is_no_number_is_wrong_and_says_what_it_is(answer: object, said: str, eight: str) -> None:
    verdict = check(eight, answer)
    assert verdict.status == "wrong"
    assert said in verdict.message


def forever(n: int) -> int:
    return forever(n)


def quits(n: int) -> int:
    sys.exit(0)


class Abort(BaseException):
    """What no ordinary handler catches."""


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError


def raising(error: BaseException) -> object:
    def answer(n: int) -> int:
        raise error

    return answer


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (forever, "never stops calling itself"),
        (quits, "ends the program"),
        (raising(Abort("away")), "raised Abort: away"),
        (raising(GeneratorExit()), "raised GeneratorExit."),
        (raising(MuteError()), "raised MuteError: (its text could not be read)"),
        (raising(ZeroDivisionError("by zero")), "raised ZeroDivisionError: by zero"),
        (raising(Wrong("I say so")), "raised Wrong: I say so"),
        (lambda: 3, "raised TypeError"),
        (generator, "raised TypeError"),
        (coroutine, "`async`"),
        (lambda n: (2 * n for _ in range(1)), "a generator"),
        (lambda n: Agreeable(), "could not be read"),
        (2.0, "A function is wanted here; the answer is a float."),
    ],
)
def test_what_goes_wrong_inside_a_learners_function_is_a_verdict(answer: object, said: str) -> None:
    verdict = check("test.doubled", answer)
    assert verdict.status == "wrong"
    assert said in verdict.message


@pytest.mark.usefixtures("registry")
def test_an_interrupt_is_passed_on_so_that_an_endless_loop_can_be_stopped() -> None:
    with pytest.raises(KeyboardInterrupt):
        check("test.doubled", raising(KeyboardInterrupt()))


@dataclasses.dataclass(frozen=True)
class Fact:
    values: list[int]


def spoil_list(x: list[int]) -> int:
    x.sort()
    return 1


def spoil_nested(x: dict[str, list[int]]) -> int:
    x["a"].append(1)
    return 1


def spoil_in_place(x: torch.Tensor) -> int:
    x += 1
    return 1


def spoil_fact(x: Fact) -> int:
    x.values[0] = 9
    return 1


@pytest.mark.parametrize(
    ("spoil", "given"),
    [
        (spoil_list, [3, 1]),
        (spoil_nested, {"a": [1]}),
        (spoil_in_place, np.zeros(3)),
        (spoil_in_place, torch.zeros(3)),
        (spoil_fact, Fact([1])),
    ],
)
def test_a_changed_input_is_found_and_the_checkers_own_copy_stays_whole(spoil: object, given: object) -> None:
    before = core._copy(given, {})
    with pytest.raises(Wrong, match="changed its input"):
        call(spoil, given)
    assert core._same(given, before)


@pytest.mark.parametrize(
    "given",
    [
        [1, 2.5, "a", None, float("nan")],
        {"a": (1, {2, 3})},
        np.array([1.0, np.nan]),
        torch.tensor([1.0, float("nan")]),
        torch.ones(3, requires_grad=True) * 2,
        torch.arange(6).reshape(2, 3).t(),
        torch.ones(2, device="meta"),
        Fact([1]),
        object(),
    ],
    ids=lambda v: type(v).__name__,
)
def test_an_untouched_input_is_not_called_changed(given: object) -> None:
    assert call(lambda x: 1, given) == 1


def test_two_tensors_that_share_storage_share_it_in_the_copy() -> None:
    base = torch.arange(4.0)
    assert call(lambda a, b: a.data_ptr() == b.data_ptr() - 8, base, base[2:]) is True


def test_an_object_that_is_no_plain_data_is_handed_over_itself() -> None:
    class Clock:
        ticks = 0

    clock = Clock()

    def tick(c: Clock) -> int:
        c.ticks += 1
        return c.ticks

    assert call(tick, clock) == 1
    assert clock.ticks == 1


# ------------------------------------------------------------------------------------------- judging


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (250.0, "Counted elements. For n = 3 the bytes came out as 250."),
        (1000.0 * 1e9 / 2**30, "a GiB is 2**30 bytes"),
        (1000.0 * 2**30 / 1e9, "a GiB is 2**30 bytes"),
        (8000.0, "a byte has 8 bits"),
        (1.0, "a power of 1000, 1e-3"),
        (-1000.0, "sign is turned round"),
        (999.0, "For n = 3 the bytes came out as 999. That is not it."),
    ],
)
def test_judge_names_the_slip_and_never_the_right_value(found: float, said: str) -> None:
    with pytest.raises(Wrong) as caught:
        judge(
            found,
            1000.0,
            {"counted elements": 250.0, "nothing wrong": 1000.0},
            case="n = 3",
            what="the bytes",
        )
    assert said in str(caught.value)
    assert "1000.0" not in str(caught.value)
    assert "1,000" not in str(caught.value).replace("-1,000", "")


@pytest.mark.parametrize(("right", "found"), [(0.0, 1e-9), (1e12, 1e12 * (1 + 1e-8)), (-3.0, -3.0)])
def test_judge_passes_what_is_within_the_tolerance(right: float, found: float) -> None:
    judge(found, right)


def test_a_slip_that_is_right_on_this_input_or_is_no_number_is_passed_over() -> None:
    judge(4.0, 4.0, {"squared": 4.0})
    with pytest.raises(Wrong, match="That is not it"):
        judge(5.0, 4.0, {"divided by nothing": float("inf"), "undefined": float("nan")})


def test_the_readers_of_whole_numbers_words_and_lists_say_what_they_want() -> None:
    assert core.whole(2**60 + 1, "the count") == 2**60 + 1
    assert core.items(np.arange(3), "the gaps", 3) == [0, 1, 2]
    assert core.items(torch.arange(2), "the gaps") == [0, 1]
    for reader, said in (
        (lambda: core.whole(2.5, "the count"), "The count is 2.5; a whole number"),
        (
            lambda: core.word("both", "the bound", ("memory", "compute")),
            "'both'. Give one of `memory`, `compute`",
        ),
        (lambda: core.word(3, "the bound", ("memory",)), "an int. Give one of"),
        (lambda: core.items("ab", "the gaps"), "a list is wanted, not a str"),
        (lambda: core.items([1], "the gaps", 2), "2 values are wanted, not 1"),
        (lambda: core.items(np.ones((2, 2)), "the gaps"), "a list is wanted, not an ndarray"),
    ):
        with pytest.raises(Wrong) as caught:
            reader()
        assert said in str(caught.value)
    for blank in (core.whole, core.items, lambda v, w: core.word(v, w, ("a",)), number):
        with pytest.raises(core._Unanswered):
            blank(..., "the count")


# ----------------------------------------------------------------------------- ids, seeds and the output


@pytest.mark.usefixtures("registry")
def test_an_unknown_id_lists_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownCheckpointError, match=r"'test.doubld'; nearest: test\.doubled"):
        check("test.doubld", 1)
    monkeypatch.setattr(core, "keys", list)
    with pytest.raises(UnknownCheckpointError, match=r"there are: .*test\.doubled"):
        check("zzz", 1)
    with pytest.raises(TypeError, match="id first, then the answer; the id was a function"):
        check(doubled, "test.doubled")  # type: ignore[arg-type]


def test_an_id_of_another_form_and_a_second_owner_are_refused(registry: dict[str, core.Checker]) -> None:
    for bad in ("kernels", "Kernels.busy", "kernels.busy.more", "", 3):
        with pytest.raises(ValueError, match=r"wanted 'key\.name' in lower case"):
            core.checkpoint(bad)  # type: ignore[arg-type]
    core.checkpoint("test.doubled")(doubled)
    with pytest.raises(ValueError, match="registered twice"):
        core.checkpoint("test.doubled")(lambda answer, rng: None)


def test_the_inputs_are_fresh_each_time_and_the_same_for_one_seed(registry: dict[str, core.Checker]) -> None:
    drawn: list[int] = []
    registry["test.draws"] = lambda answer, rng: drawn.append(int(rng.integers(2**62)))
    for seed in (None, None, 5, 5):
        check("test.draws", 1, seed=seed)
    assert len(set(drawn)) == 3
    assert drawn[2] == drawn[3]


def test_a_checker_that_returns_no_text_is_a_fault_of_ours(registry: dict[str, core.Checker]) -> None:
    registry["test.odd"] = lambda answer, rng: 3  # type: ignore[return-value]
    with pytest.raises(TypeError, match=r"checker of 'test.odd' returned int"):
        check("test.odd", 1)


@pytest.mark.parametrize(
    ("status", "words"),
    [("right", "✓ Right"), ("wrong", "✗ Not right"), ("unanswered", "… Not answered yet")],
)
def test_a_verdict_says_its_grade_in_words_and_announces_itself(status: core.Status, words: str) -> None:
    verdict = Verdict(checkpoint="a.b", status=status, message="`x < 1` & <b>more</b>")
    page = verdict._repr_html_()
    assert repr(verdict) == f"{words} (a.b). `x < 1` & <b>more</b>"
    assert 'role="status"' in page
    assert words.split(" ", 1)[1] in page
    assert "<code>x &lt; 1</code> &amp; &lt;b&gt;more&lt;/b&gt;" in page


def luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("ground", ["#ffffff", "#14181e", "#111111"])
def test_the_bars_stand_out_on_the_light_and_the_dark_page(ground: str) -> None:
    for _, _, colour in core._FACES.values():
        low, high = sorted((luminance(colour), luminance(ground)))
        assert (high + 0.05) / (low + 0.05) >= 3


class _Unreadable:
    """Ends the program whenever it is asked for anything, its type's name included."""

    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(name)

    def __call__(self, *_: Any) -> Any:
        return self


@pytest.mark.parametrize("identifier", core.ids())
@pytest.mark.parametrize("returned", [False, True])
def test_an_object_that_ends_the_program_when_it_is_asked_what_it_is_gets_a_verdict(
    identifier: str, returned: bool
) -> None:
    answer = _Unreadable()  # not a parameter: pytest asks its parameters for their names
    assert check(identifier, (lambda *_: answer) if returned else answer).status == "wrong"


def test_where_the_check_itself_needs_torch_the_learner_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    verdict = check("kernels.launch_counter", lambda fn, *args: (1, 2))
    assert verdict.status == "unanswered"
    assert verdict.message == "It cannot be judged here: this check needs torch, which is not installed."


def test_a_seed_that_is_none_is_the_callers_fault_and_not_the_answers() -> None:
    with pytest.raises(TypeError, match="SeedSequence"):
        check("kernels.waves", lambda *_: 1, seed="a")  # type: ignore[arg-type]
