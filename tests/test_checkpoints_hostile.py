"""Answers that are no answers: none passes, none gets out, and every verdict can be shown."""

from __future__ import annotations

import importlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gpucourse.checkpoints import check
from gpucourse.checkpoints._core import Wrong, ids

CHAPTERS = ("roof", "launch_bound", "compile_kernels", "moving_bytes", "launch_timeline")
IDS = [*(name for chapter in CHAPTERS for name in ids(chapter)), "kernels.gap_causes"]


class EqualToAll:
    """Equal to everything, less and more than it, and callable."""

    def __eq__(self, other: object) -> bool:
        return True

    __lt__ = __le__ = __gt__ = __ge__ = __eq__

    def __hash__(self) -> int:
        return 0

    def __float__(self) -> float:
        return 1.0

    def __sub__(self, other: object) -> int:
        return 0

    __rsub__ = __sub__

    def __call__(self, *_: object) -> EqualToAll:
        return self

    def __iter__(self) -> Iterator[object]:
        return iter(())


class EqualFloat(float):
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = EqualToAll.__eq__  # type: ignore[assignment]
    __hash__ = float.__hash__
    __sub__ = __rsub__ = EqualToAll.__sub__  # type: ignore[assignment]


class EqualText(str):
    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def casefold(self) -> str:
        return "launch"


class EqualDict(dict[str, Any]):
    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: object) -> EqualToAll:
        return EqualToAll()


class Endless(list[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


class NoText:
    def __repr__(self) -> str:
        raise SystemExit("repr")


class TextlessError(Exception):
    def __str__(self) -> str:
        raise SystemExit("str")


class ClaimsToBeANumber:
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return float


def _deeper(*_: object) -> object:
    return _deeper()


def _clears(*given: object) -> float:
    for one in given:
        if isinstance(one, list | dict):
            one.clear()
    return 1.0


def _generator(*_: object) -> Iterator[float]:
    yield 1.0


async def _coroutine(*_: object) -> float:
    return 1.0


def _raises(error: BaseException) -> Callable[..., Any]:
    def answer(*_: object) -> Any:
        raise error

    return answer


def _cyclic(*_: object) -> list[object]:
    found: list[object] = []
    found.append(found)
    return found


HOSTILE: dict[str, Any] = {
    "equal to all": EqualToAll(),
    "no text": NoText(),
    "claims to be a number": ClaimsToBeANumber(),
    "ends the program": sys.exit,
    "an exception's class": SystemExit,
    "a module": sys,
    "an array": np.ones(3),
    "recurses": _deeper,
    "clears its arguments": _clears,
    "a generator": _generator,
    "a coroutine": _coroutine,
    "holds itself": _cyclic,
    "raises without text": _raises(TextlessError()),
    "raises Wrong": _raises(Wrong("Right.")),
    "raises BaseException": _raises(BaseException("q")),
    "raises GeneratorExit": _raises(GeneratorExit()),
    "raises MemoryError": _raises(MemoryError()),
    "raises a missing module": _raises(ModuleNotFoundError("No module named 'x'", name="x")),
    "raises what names every symbol": _raises(ValueError("P I B one peak")),
    "raises half a letter": _raises(ValueError("\udcff")),
    "warns": lambda *_: warnings.warn("x", stacklevel=1),
    **{
        f"gives {name}": (lambda *_, value=value: value)
        for name, value in {
            "what is equal to all": EqualToAll(),
            "a float equal to all": EqualFloat(3.0),
            "two of them": [EqualFloat(3.0)] * 2,
            "three, one a text": [EqualFloat(3.0), EqualFloat(3.0), EqualText("launch")],
            "a dict that has every key": EqualDict(),
            "an endless list": Endless(),
            "what has no text": NoText(),
            "what claims to be a number": ClaimsToBeANumber(),
            "nan": float("nan"),
            "infinity": float("inf"),
            "an integer beyond all floats": 10**400,
            "a set of one that is equal to all": frozenset([EqualToAll()]),
            "an array of objects": np.array([EqualToAll(), EqualToAll()], dtype=object),
            "half a letter": "\udcff",
            "twenty texts equal to all": [EqualText("host")] * 20,
            "nothing": [],
        }.items()
    },
}


@pytest.mark.filterwarnings("ignore:x:UserWarning")
@pytest.mark.parametrize("identifier", IDS)
def test_no_hostile_answer_passes_or_gets_out_and_each_verdict_can_be_shown(identifier: str) -> None:
    for name, answer in HOSTILE.items():
        verdict = check(identifier, answer, seed=3)
        assert verdict.status != "right", name
        assert repr(verdict).encode(), name
        assert verdict._repr_html_().encode(), name


def test_checking_leaves_the_global_generators_alone() -> None:
    before = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index, union-attr]
    for identifier in IDS:
        check(identifier, lambda *_: 1.0)
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before  # type: ignore[index, union-attr]


# One checkpoint reads the answer's own code, by compiling it: there a replay is refused before it is run.
BY_RESULT = [name for name in IDS if name != "compile_kernels.graph_breaks"]


@pytest.mark.parametrize("identifier", BY_RESULT)
def test_results_learnt_by_heart_from_another_draw_are_wrong(identifier: str) -> None:
    module = importlib.import_module(f"tests.answers.{identifier.partition('.')[0]}")
    right = next(iter(module.ANSWERS[identifier].right))
    if not callable(right):
        pytest.skip("its answer is no function")
    learnt: list[tuple[bool, Any]] = []

    def learning(*given: Any, **named: Any) -> Any:
        try:
            learnt.append((True, right(*given, **named)))
        except Exception as error:
            learnt.append((False, error))
            raise
        return learnt[-1][1]

    assert check(identifier, learning, seed=1).status == "right"
    replay = iter(learnt)

    def by_heart(*_: Any, **__: Any) -> Any:
        fine, result = next(replay, learnt[-1])
        if not fine:
            raise result
        return result

    assert check(identifier, by_heart, seed=2).status == "wrong"
