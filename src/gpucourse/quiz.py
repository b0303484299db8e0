"""Quizzes that need no kernel, no script and no server: a native form whose state is read by CSS alone.

A quiz is declared once, in ``quizzes/<key>.toml`` of the package; the notebook's cell shows no answer::

    title = "What a launch is"

    [[question]]
    text = "Which of these starts a kernel on the device?"
    [[question.choice]]
    text = "`x.t()`"
    right = false
    why = "A transpose writes new strides into a header; no element moves."

Each question has three or four choices, exactly one of them right, and an explanation for every one. The
choices keep the order of the file, so that two readers can talk about "the second one".

What is shown when is decided by three kinds of selectors: an explanation by its own radio button and the open
``details``; a missing answer by ``:not(:has(:checked))``; and the score by chains of siblings, since
``right ~ right ~ right ~ details`` matches where three or more questions are right. The score is thus real
text, which a screen reader announces and a test can read, where a CSS counter would be neither.
"""

from __future__ import annotations

import dataclasses
import html
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

PASS_PERCENT = 80
_QUESTIONS_AT_LEAST = 5
_CHOICES = (3, 4)
# JupyterLab's command mode takes the arrow keys and Enter from whatever has the focus unless that element,
# not one around it, carries this.
_OWN_KEYS = 'data-lm-suppress-shortcuts="true"'


class QuizError(ValueError):
    """A quiz file does not hold what a quiz needs; the text names the file, the question and the remedy."""


class UnknownQuizError(LookupError):
    """No quiz has this key; the text lists those there are."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer that can be ticked, and why it is right or is not."""

    text: str
    right: bool
    why: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question with its choices in the order of the file."""

    text: str
    choices: tuple[Choice, ...]

    @property
    def right(self) -> int:
        """The place of the right choice, from 0."""
        return next(i for i, c in enumerate(self.choices) if c.right)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    title: str
    questions: tuple[Question, ...]


class Quiz:
    """A chapter's quiz; as the last line of a notebook cell it shows itself.

    Parameters
    ----------
    key : str
        The chapter's key: the file ``quizzes/<key>.toml`` is read.

    Raises
    ------
    UnknownQuizError
        If there is no such file.
    QuizError
        If the file does not hold a quiz.
    """

    __slots__ = ("key", "questions", "title")

    def __init__(self, key: str) -> None:
        folder = resources.files("gpucourse") / "quizzes"
        known = sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".toml"))
        if key not in known:
            raise UnknownQuizError(f"no quiz is called {key!r}; there are: {', '.join(known) or 'none'}")
        try:
            text = (folder / f"{key}.toml").read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise QuizError(
                f"quizzes/{key}.toml is not UTF-8 text ({error.reason}): save it as such"
            ) from None
        self._fill(key, text)

    def _fill(self, key: str, text: str) -> None:
        content = _parse(text, f"quizzes/{key}.toml")
        self.key, self.title, self.questions = key, content.title, content.questions

    @classmethod
    def from_toml(cls, text: str, key: str = "draft") -> Quiz:
        """Read a quiz from text, to try one out before it is put into the package.

        Raises
        ------
        QuizError
            If the text does not hold a quiz.
        """
        if not isinstance(text, str) or not isinstance(key, str):
            raise QuizError(
                f"a quiz is read from text under a key that is text; found {type(text).__name__} and "
                f"{type(key).__name__}"
            )
        quiz = cls.__new__(cls)
        quiz._fill(key, text)
        return quiz

    @property
    def needed(self) -> int:
        """The number of right answers that pass: 80 % of the questions, rounded up."""
        return -(-len(self.questions) * PASS_PERCENT // 100)

    def __repr__(self) -> str:
        return (
            f"Quiz({self.key!r}): {self.title}; {len(self.questions)} questions, {self.needed} right pass. "
            "It shows as a form wherever a notebook or a page shows HTML."
        )

    def _repr_html_(self) -> str:
        n = len(self.questions)
        # `dialog` outside a dialog submits nowhere, so Enter in a form without a server loses no answer.
        return "".join(
            [
                f'<form method="dialog" class="gpucourse-quiz" autocomplete="off" '
                f'aria-label="{html.escape("Quiz: " + self.title)}">',
                f"<style>{_style(n)}</style>",
                f"<p>{n} questions; {self.needed} right answers ({PASS_PERCENT} %) pass. Nothing is judged "
                "before you ask for it below.</p>",
                '<p class="old">This browser is too old to judge the answers: it lacks the CSS selector '
                "<code>:has()</code>, which the major browsers have had since the end of 2023.</p>",
                *(self._fieldset(i, q) for i, q in enumerate(self.questions, start=1)),
                f"<details><summary {_OWN_KEYS}>Check my answers</summary>",
                '<div role="status">',
                *(f'<p data-score="{k}">{_score(k, n, self.needed)}</p>' for k in range(n + 1)),
                "</div></details>",
                f'<button type="reset" {_OWN_KEYS}>Clear my answers</button></form>',
            ]
        )

    def _fieldset(self, number: int, question: Question) -> str:
        parts = [f"<fieldset><legend>{number}. {_inline(question.text)}</legend>"]
        for place, choice in enumerate(question.choices):
            state = "right" if choice.right else "wrong"
            said = "✓</span> Right." if choice.right else "✗</span> Not right."
            parts.append(
                f'<label><input type="radio" name="{html.escape(self.key)}-{number}" value="{place}" '
                f'data-state="{state}" {_OWN_KEYS}> <span>{_inline(choice.text)}</span></label>'
                f'<div role="status" class="why" data-state="{state}">'
                f'<p><strong><span aria-hidden="true">{said}</strong> {_inline(choice.why)}</p></div>'
            )
        parts.append('<div role="status" class="open"><p>Not answered yet.</p></div></fieldset>')
        return "".join(parts)


def _score(right: int, questions: int, needed: int) -> str:
    share = f"{right} of {questions} right, {100 * right / questions:.0f} %"
    if right == questions:
        return f"<strong>Passed.</strong> {share}: all of them."
    if right >= needed:
        return f"<strong>Passed.</strong> {share}; {PASS_PERCENT} % was asked."
    short = needed - right
    return (
        f"<strong>Not passed yet.</strong> {share}; {PASS_PERCENT} % is asked, so {short} more "
        f"{'is' if short == 1 else 'are'} wanted. The notes under the questions say where to look again."
    )


# Colours are mid-tones that stand out on the light and the dark page; text and ground stay the page's own. A
# legend that floats stands inside the frame, where one of several lines would otherwise be cut by it.
_STYLE = """
.Q fieldset {border: 1px solid #7a7f87; border-radius: .25em; margin: 0 0 1em; padding: .6em .9em;
  min-width: 0}
.Q legend {float: left; width: 100%; margin: 0 0 .2em; padding: 0; font-size: 1em; font-weight: 600}
.Q legend + * {clear: both}
.Q label {display: flex; gap: .6em; align-items: baseline; margin: 0; padding: .3em 0; cursor: pointer}
.Q input {flex: none; margin: 0; width: 1.1em; height: 1.1em}
.Q :is(input, summary, button):focus-visible {outline: 3px solid #3b82c4; outline-offset: 2px}
.Q summary {display: list-item; width: fit-content; list-style-position: inside; padding: .25em .8em;
  font-weight: 600; border: 1px solid #7a7f87; border-radius: .25em; cursor: pointer}
.Q button {margin: .5em 0; padding: .25em .8em; color: inherit; background: transparent; font: inherit;
  border: 1px solid #7a7f87; border-radius: .25em; cursor: pointer}
.Q p {margin: .3em 0}
.Q .why, .Q .open {display: none; border-left: .3em solid #7a7f87; padding: .1em .8em;
  margin: .2em 0 .4em 1.7em}
.Q .why[data-state="right"] {border-color: #2a8f4c}
.Q .why[data-state="wrong"] {border-color: #d1495b}
.Q:has(details[open]) label:has(:checked) + .why,
.Q:has(details[open]) fieldset:not(:has(:checked)) .open {display: block}
.Q [data-score]:not([data-score="0"]), .Q .old {display: none}
@supports not selector(:has(a)) {.Q .old {display: block} .Q details {display: none}}
"""

# `:has()` may not stand inside `:has()`, so the number of right questions cannot be asked of the form; it can
# of siblings. A chain of k is more specific than one of k - 1, so the longest that matches decides.
_RIGHT = 'fieldset:has([data-state="right"]:checked)'


def _style(questions: int) -> str:
    rules = [_STYLE]
    for k in range(1, questions + 1):
        chain = f".Q {' ~ '.join([_RIGHT] * k)} ~ details"
        rules.append(f'{chain} [data-score="{k - 1}"] {{display: none}}')
        rules.append(f'{chain} [data-score="{k}"] {{display: block}}')
    return "\n".join(rules).replace(".Q", ".gpucourse-quiz")


def _inline(text: str) -> str:
    """Escape a text of the quiz file and set what stands in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(" ".join(text.split()), quote=False))


# ------------------------------------------------------------------------------------------- reading a file


def _parse(text: str, file: str) -> _Content:
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise QuizError(f"{file} is not TOML: {error}") from None
    _only(data, {"title", "question"}, file)
    title = _words(data, "title", file)
    tables = data.get("question", [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise QuizError(f"{file}: wanted each question as a table of its own, [[question]]")
    if len(tables) < _QUESTIONS_AT_LEAST:
        raise QuizError(f"{file} has {len(tables)} questions; at least {_QUESTIONS_AT_LEAST} are wanted")
    questions = tuple(_question(t, f"{file}, question {i}") for i, t in enumerate(tables, start=1))
    _distinct([q.text for q in questions], "question", file)
    return _Content(title=title, questions=questions)


def _question(table: Mapping[str, Any], where: str) -> Question:
    _only(table, {"text", "choice"}, where)
    text = _words(table, "text", where)
    tables = table.get("choice", [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise QuizError(f"{where}: wanted each choice as a table of its own, [[question.choice]]")
    low, high = _CHOICES
    if not low <= len(tables) <= high:
        raise QuizError(f"{where} has {len(tables)} choices; {low} or {high} are wanted")
    choices = tuple(_choice(t, f"{where}, choice {i}") for i, t in enumerate(tables, start=1))
    _distinct([c.text for c in choices], "choice", where)
    right = sum(c.right for c in choices)
    if right != 1:
        raise QuizError(f"{where} has {right} right choices; exactly one is wanted")
    return Question(text=text, choices=choices)


def _choice(table: Mapping[str, Any], where: str) -> Choice:
    _only(table, {"text", "right", "why"}, where)
    right = table.get("right")
    if not isinstance(right, bool):
        found = "has no `right`" if right is None else f"has right = {right!r}"
        raise QuizError(f"{where} {found}; wanted right = true or right = false")
    return Choice(text=_words(table, "text", where), right=right, why=_words(table, "why", where))


def _words(table: Mapping[str, Any], name: str, where: str) -> str:
    value = table.get(name)
    if value is None:
        raise QuizError(f"{where} has no `{name}`")
    if not isinstance(value, str) or not value.strip():
        raise QuizError(f"{where} has {name} = {value!r}; wanted a text")
    if value.count("`") % 2:
        raise QuizError(f"{where}: a backtick in `{name}` is not closed: {value.strip()}")
    return value.strip()


def _only(table: Mapping[str, Any], names: set[str], where: str) -> None:
    for name in table:
        if name not in names:
            raise QuizError(f"{where} has an unknown `{name}`; wanted {', '.join(sorted(names))}")


def _distinct(texts: list[str], what: str, where: str) -> None:
    for i, text in enumerate(texts):
        if text in texts[:i]:
            raise QuizError(f"{where}: {what} {i + 1} repeats {what} {texts.index(text) + 1}: {text}")
