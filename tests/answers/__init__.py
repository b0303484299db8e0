"""Right and wrong answers to every checkpoint, and the harness that holds a checker to them.

Kept out of the package and of everything built: a learner's copy of the course has no answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpucourse.checkpoints import Verdict


@dataclasses.dataclass(frozen=True, slots=True)
class Answers:
    """The answers to one checkpoint.

    Attributes
    ----------
    right : list
        The reference first, then at least one that reaches the same by another way.
    wrong : dict of str to (answer, str)
        At least four plausible slips: label -> (answer, text that the verdict's message must contain).
    seeds : int
        How often each is judged, on other inputs each time; fewer only where one judging takes long.
    """

    right: list[Any]
    wrong: Mapping[str, tuple[Any, str]]
    seeds: int = 20


def problems(
    check: Callable[..., Verdict], identifier: str, answers: Answers, seeds: Iterable[int] | None = None
) -> list[str]:
    """Hold one checker to its answers and return what does not hold, empty where all does."""
    found = []
    if len(answers.right) < 2:
        found.append(f"{identifier}: {len(answers.right)} right answers; a reference and another are wanted")
    if len(answers.wrong) < 4:
        found.append(f"{identifier}: {len(answers.wrong)} wrong answers; at least four are wanted")
    if answers.seeds < 4:
        found.append(f"{identifier}: {answers.seeds} seeds; at least four are wanted")
    for seed in range(answers.seeds) if seeds is None else seeds:
        for place, answer in enumerate(answers.right):
            verdict = check(identifier, answer, seed=seed)
            if verdict.status != "right":
                found.append(f"{identifier}: right answer {place}, seed {seed}, was judged {verdict!r}")
        for label, (answer, slip) in answers.wrong.items():
            verdict = check(identifier, answer, seed=seed)
            if verdict.status != "wrong":
                found.append(f"{identifier}: wrong answer {label!r}, seed {seed}, was judged {verdict!r}")
            elif not slip or slip.casefold() not in verdict.message.casefold():
                found.append(f"{identifier}: {label!r}, seed {seed}: {slip!r} is not in {verdict.message!r}")
    return found
