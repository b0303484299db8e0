"""A quiz file is read whole or refused with the place of its fault; every quiz of the course is fair."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib import resources
from itertools import groupby
from pathlib import Path

import pytest

from gpucourse import quiz
from gpucourse.quiz import Quiz, QuizError, UnknownQuizError

ROOT = Path(__file__).parents[1]
KEYS = sorted(
    f.name[:-5] for f in (resources.files("gpucourse") / "quizzes").iterdir() if f.name.endswith(".toml")
)


def toml(questions: int = 5, choices: int = 3, right: int = 1) -> str:
    parts = ['title = "A trial"']
    for q in range(1, questions + 1):
        parts.append(f'[[question]]\ntext = "Question {q}: is `a < b`?"')
        for c in range(choices):
            parts.append(f'[[question.choice]]\ntext = "answer {c}"')
            parts.append(f'right = {str(c == right).lower()}\nwhy = "because {q}.{c}"')
    return "\n".join(parts) + "\n"


# --------------------------------------------------------------------------------- the quizzes of the course


@pytest.fixture(params=KEYS)
def course_quiz(request: pytest.FixtureRequest) -> Quiz:
    return Quiz(request.param)


def longest_run(places: list[int]) -> int:
    return max(len(list(run)) for _, run in groupby(places))


def test_the_right_answer_stands_in_no_place_too_often(course_quiz: Quiz) -> None:
    places = [q.right for q in course_quiz.questions]
    often = max(places.count(p) for p in places)
    assert often <= 0.6 * len(places), f"places of the right choice: {places}"
    assert longest_run(places) <= 3, f"places of the right choice: {places}"


def test_the_right_answer_is_not_given_away_by_its_length(course_quiz: Quiz) -> None:
    longest = [
        len(q.choices[q.right].text) > max(len(c.text) for c in q.choices if not c.right)
        for q in course_quiz.questions
    ]
    assert sum(longest) <= 0.6 * len(longest), f"right choice is the longest: {longest}"


def test_every_choice_is_explained_in_a_sentence_of_its_own(course_quiz: Quiz) -> None:
    whys = [c.why for q in course_quiz.questions for c in q.choices]
    assert [w for w in whys if len(w) < 30] == []
    assert len(set(whys)) == len(whys)


def test_no_question_needs_mathematics_that_a_screen_reader_loses(course_quiz: Quiz) -> None:
    assert [q.text for q in course_quiz.questions if re.search(r"\$|\\\(|\\[a-z]+\{", q.text)] == []


def test_every_chapter_and_lab_ends_in_its_quiz_and_hides_the_cell_that_calls_it() -> None:
    pages = [*ROOT.glob("book/[0-9][0-9]_*.md"), *ROOT.glob("labs/*.md")]
    assert pages, "no chapter was found: the globs above no longer fit the layout"
    keys = []
    for page in pages:
        cells = re.findall(r"```\{code-cell\}.*?\n(.*?)```", page.read_text("utf-8"), re.S)
        quizzes = [cell for cell in cells if re.search(r'^Quiz\("', cell, re.M)]
        assert len(quizzes) == 1, page
        assert "remove-input" in quizzes[0], page
        keys += re.findall(r'^Quiz\("(\w+)"\)', quizzes[0], re.M)
    assert sorted(keys) == KEYS


def test_places_and_runs_that_give_the_answer_away_are_told() -> None:
    assert longest_run([0, 1, 1, 1, 1, 0]) == 4
    assert longest_run([0, 1, 0]) == 1


# ------------------------------------------------------------------------------------------ reading a file


def test_a_quiz_keeps_the_order_of_its_file_and_asks_for_four_in_five() -> None:
    trial = Quiz.from_toml(toml(questions=6, choices=4, right=2))
    assert [c.text for c in trial.questions[0].choices] == ["answer 0", "answer 1", "answer 2", "answer 3"]
    assert [q.right for q in trial.questions] == [2] * 6
    assert trial.needed == 5
    assert repr(trial).startswith("Quiz('draft'): A trial; 6 questions, 5 right pass.")


@pytest.mark.parametrize(("questions", "needed"), [(5, 4), (6, 5), (7, 6), (8, 7), (10, 8)])
def test_eighty_per_cent_are_rounded_up(questions: int, needed: int) -> None:
    assert Quiz.from_toml(toml(questions)).needed == needed


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('title = "A trial"', "", "draft.toml has no `title`"),
        ('title = "A trial"', "title = 3", "title = 3; wanted a text"),
        ('title = "A trial"', 'titel = "A"', "unknown `titel`; wanted question, title"),
        ('title = "A trial"', 'title = "A', "draft.toml is not TOML: "),
        ('text = "Question 3: is `a < b`?"', "", "draft.toml, question 3 has no `text`"),
        ('"Question 3: is `a < b`?"', '"Is `a?"', "question 3: a backtick in `text` is not closed: Is `a?"),
        ('"Question 3: is `a < b`?"', '"Question 2: is `a < b`?"', "question 3 repeats question 2"),
        ('why = "because 2.0"', "", "question 2, choice 1 has no `why`"),
        ('why = "because 2.0"', 'why = " "', "question 2, choice 1 has why = ' '; wanted a text"),
        ('why = "because 2.0"', 'why = "b"\nhint = "c"', "question 2, choice 1 has an unknown `hint`"),
        ('right = false\nwhy = "because 4.2"', 'why = "because 4.2"', "question 4, choice 3 has no `right`"),
        ('right = false\nwhy = "because 4.2"', 'right = "no"\nwhy = "b"', "3 has right = 'no'; wanted"),
        ('right = false\nwhy = "because 4.2"', 'right = true\nwhy = "b"', "question 4 has 2 right choices"),
        ('right = true\nwhy = "because 4.1"', 'right = false\nwhy = "b"', "question 4 has 0 right choices"),
    ],
)  # fmt: skip
def test_a_fault_in_the_file_is_told_with_its_place(old: str, new: str, said: str) -> None:
    assert toml().count(old) == 1
    with pytest.raises(QuizError) as caught:
        Quiz.from_toml(toml().replace(old, new))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (toml(questions=4), "has 4 questions; at least 5 are wanted"),
        (toml(choices=2), "question 1 has 2 choices; 3 or 4 are wanted"),
        (toml(choices=5), "question 1 has 5 choices; 3 or 4 are wanted"),
        ('title = "A"\n[question]\ntext = "b"\n', "wanted each question as a table of its own"),
        (toml().replace('"answer 1"', '"answer 0"', 1), "question 1: choice 2 repeats choice 1: answer 0"),
        ("", "has no `title`"),
    ],
)  # fmt: skip
def test_a_file_of_another_form_is_refused(text: str, said: str) -> None:
    with pytest.raises(QuizError) as caught:
        Quiz.from_toml(text)
    assert said in str(caught.value)


@pytest.mark.parametrize("key", ["kernel", "", "../quiz", "kernels.toml"])
def test_an_unknown_quiz_lists_those_there_are(key: str) -> None:
    with pytest.raises(UnknownQuizError) as caught:
        Quiz(key)
    assert f"{key!r}; there are: {', '.join(KEYS) or 'none'}" in str(caught.value)


# ---------------------------------------------------------------------------------------------- the form


class Tags(HTMLParser):
    """Collect start tags and hold that they close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag != "input":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_form_is_whole_native_and_free_of_scripts() -> None:
    tags = Tags()
    tags.feed(Quiz.from_toml(toml(questions=5, choices=4))._repr_html_())
    tags.close()
    names = [t for t, _ in tags.seen]
    assert tags.open == []
    assert names.count("fieldset") == names.count("legend") == 5
    assert names.count("input") == names.count("label") == 20
    assert "script" not in names
    assert [
        k for _, attrs in tags.seen for k in attrs if k.startswith("on") or k in ("src", "href", "id")
    ] == []
    groups = [attrs["name"] for t, attrs in tags.seen if t == "input"]
    assert [(n, len(list(g))) for n, g in groupby(groups)] == [(f"draft-{i}", 4) for i in range(1, 6)]


def test_what_an_author_writes_is_text_and_never_markup() -> None:
    evil = toml().replace("answer 0", "<img src=x> & `a < b`")
    page = Quiz.from_toml(evil)._repr_html_()
    assert "<img" not in page
    assert "&lt;img src=x&gt; &amp; <code>a &lt; b</code>" in page


def test_the_same_file_gives_the_same_form() -> None:
    assert Quiz.from_toml(toml())._repr_html_() == Quiz.from_toml(toml())._repr_html_()


@pytest.mark.parametrize(
    ("right", "said"),
    [
        (0, "Not passed yet.</strong> 0 of 5 right, 0 %; 80 % is asked, so 4 more are wanted."),
        (3, "Not passed yet.</strong> 3 of 5 right, 60 %; 80 % is asked, so 1 more is wanted."),
        (4, "Passed.</strong> 4 of 5 right, 80 %; 80 % was asked."),
        (5, "Passed.</strong> 5 of 5 right, 100 %: all of them."),
    ],
)
def test_the_score_is_said_in_words(right: int, said: str) -> None:
    assert said in quiz._score(right, 5, 4)


@pytest.mark.parametrize(("text", "key"), [(b"title = 1", "draft"), (None, "draft"), ("title = 1", 3)])
def test_what_is_no_text_is_no_quiz(text, key):
    with pytest.raises(QuizError, match="a quiz is read from text under a key that is text; found"):
        Quiz.from_toml(text, key)


def test_a_quiz_nested_beyond_reading_is_no_toml():
    with pytest.raises(QuizError, match="is not TOML"):
        Quiz.from_toml("a = " + "[" * 100_000)


def test_a_quiz_file_that_is_not_utf8_is_named(tmp_path, monkeypatch):
    (tmp_path / "quizzes").mkdir()
    (tmp_path / "quizzes" / "latin.toml").write_bytes("title = 'µ'".encode("latin-1"))
    monkeypatch.setattr(quiz.resources, "files", lambda _package: tmp_path)
    with pytest.raises(QuizError, match=r"quizzes/latin\.toml is not UTF-8 text"):
        Quiz("latin")
