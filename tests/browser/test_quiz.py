"""The quiz in a browser: every state of a trial form, each chapter's by keyboard, and in JupyterLab."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, Locator, Page

from gpucourse.quiz import Quiz

ROOT = Path(__file__).parents[2]
PAGES = {
    m[1]: page.relative_to(ROOT).with_suffix(".html").as_posix()
    for page in sorted([*ROOT.glob("book/*.md"), *ROOT.glob("labs/*.md")])
    if (m := re.search(r"Quiz\([\"'](\w+)[\"']\)", page.read_text(encoding="utf-8")))
}
TRIAL = 'title = "A trial"\n' + "".join(
    f'[[question]]\ntext = "Is `{q}` more than 2?"\n'
    + "".join(
        f'[[question.choice]]\ntext = "choice {c}"\nright = {str(c == q % 3).lower()}\nwhy = "since {q}{c}"\n'
        for c in range(3)
    )
    for q in range(1, 6)
)

# Ticks one choice a question (-1: none) and says which explanations and which scores are shown.
READ_STATE = """(states) => states.map((state) => {
    const form = document.querySelector("form.gpucourse-quiz");
    const shown = (selector) => [...form.querySelectorAll(selector)].filter((e) => e.checkVisibility())
        .map((e) => e.textContent.trim());
    form.reset();
    state.forEach((choice, i) => {
        const inputs = form.querySelectorAll("fieldset")[i].querySelectorAll("input");
        if (choice >= 0) inputs[choice].checked = true;
    });
    form.querySelector("details").open = false;
    const before = [...shown(".why, .open"), ...shown("[data-score]")];
    form.querySelector("details").open = true;
    return {before, why: shown(".why, .open"), score: shown("[data-score]")};
})"""


def trial_page(chromium: Browser, folder: Path, form: str, *, scripts: bool = True) -> Page:
    """Open a page of its own, from ``file://``, that holds nothing but a form."""
    file = folder / "trial.html"
    file.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Trial</title><main>{form}</main>',
        encoding="utf-8",
    )
    page = chromium.new_page(java_script_enabled=scripts)
    page.goto(file.as_uri())
    return page


def wrong_states(page: Page, quiz: Quiz) -> list[str]:
    """Put the form into every state there is and say where it does not show what it should."""
    choices = [range(-1, len(q.choices)) for q in quiz.questions]
    states = list(itertools.product(*choices))
    found = []
    for state, seen in zip(states, page.evaluate(READ_STATE, states), strict=True):
        why = [
            "Not answered yet."
            if place < 0
            else f"{'✓ Right.' if q.choices[place].right else '✗ Not right.'} {q.choices[place].why}"
            for place, q in zip(state, quiz.questions, strict=True)
        ]
        right = sum(place == q.right for place, q in zip(state, quiz.questions, strict=True))
        passed = right * 100 >= 80 * len(quiz.questions)
        if seen["before"]:
            found.append(f"{state}: before the check it shows {seen['before']}")
        if seen["why"] != why:
            found.append(f"{state}: it explains {seen['why']}")
        start = "Passed." if passed else "Not passed yet."
        if len(seen["score"]) != 1 or not seen["score"][0].startswith(
            f"{start} {right} of {len(state)} right"
        ):
            found.append(f"{state}: it scores {seen['score']}")
    return found


def test_every_state_of_the_form_shows_its_explanations_and_its_score(
    chromium: Browser, tmp_path: Path
) -> None:
    quiz = Quiz.from_toml(TRIAL, "trial")
    page = trial_page(chromium, tmp_path, quiz._repr_html_())
    assert wrong_states(page, quiz) == []
    page.close()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (' ~ details [data-score="4"]', ' ~ details [data-score="3"]'),
        (".gpucourse-quiz:has(details[open]) label", ".gpucourse-quiz label"),
        ("label:has(:checked) + .why", "label + .why"),
        ('data-state="right"', 'data-state="wrong"'),
    ],
)
def test_a_fault_in_the_style_or_the_marks_is_found(
    chromium: Browser, tmp_path: Path, old: str, new: str
) -> None:
    quiz = Quiz.from_toml(TRIAL, "trial")
    form = quiz._repr_html_()
    assert old in form
    page = trial_page(chromium, tmp_path, form.replace(old, new))
    assert wrong_states(page, quiz) != []
    page.close()


def tick(page: Page, place: int) -> None:
    """Choose in the group whose first radio button has the focus, by keys alone."""
    page.keyboard.press("Space")
    for _ in range(place):
        page.keyboard.press("ArrowDown")


def answer_by_keyboard(page: Page, form: Locator, quiz: Quiz, places: list[int]) -> None:
    """Tab from question to question, tick ``places``, then open the check; nothing shows before that."""
    form.locator("input").first.focus()
    for place in places:
        tick(page, place)
        page.keyboard.press("Tab")
    ticked = form.locator("input:checked").evaluate_all("found => found.map(e => Number(e.value))")
    assert ticked == places
    assert form.locator(".why:visible, .open:visible, [data-score]:visible").count() == 0
    assert form.locator("summary").evaluate("e => e === document.activeElement")
    page.keyboard.press("Enter")


def test_the_form_works_with_scripts_switched_off(chromium: Browser, tmp_path: Path) -> None:
    quiz = Quiz.from_toml(TRIAL, "trial")
    page = trial_page(chromium, tmp_path, quiz._repr_html_(), scripts=False)
    form = page.locator("form")
    form.locator("input").nth(1).check()
    form.locator("summary").click()
    assert form.locator(".why:visible").inner_text() == "✓ Right. since 11"
    assert form.locator("[data-score]:visible").inner_text().startswith("Not passed yet. 1 of 5 right, 20 %")
    page.close()


# ------------------------------------------------------------------------------------- the built chapters


def other(right: int) -> int:
    return 1 if right == 0 else 0


@pytest.mark.parametrize("look", [("http", 1280, "light"), ("file", 390, "dark")], ids=lambda v: v[0])
@pytest.mark.parametrize("key", PAGES)
def test_a_chapters_quiz_is_passed_failed_and_cleared_by_keyboard(
    open_page, key: str, look: tuple[str, int, str]
) -> None:
    scheme, width, colour = look
    quiz = Quiz(key)
    n, right = len(quiz.questions), [q.right for q in quiz.questions]
    page = open_page(PAGES[key], scheme, width, colour)
    form = page.locator("form.gpucourse-quiz")
    score = form.locator("[data-score]:visible")

    answer_by_keyboard(page, form, quiz, right)
    assert score.inner_text() == f"Passed. {n} of {n} right, 100 %: all of them."
    assert form.locator(".why:visible").count() == n

    page.keyboard.press("Tab")  # from the summary to the button that clears
    page.keyboard.press("Enter")
    assert form.locator(".open:visible").count() == n
    assert score.inner_text().startswith(f"Not passed yet. 0 of {n} right")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")  # closed again

    failing = [other(r) if i < 2 else r for i, r in enumerate(right)]
    answer_by_keyboard(page, form, quiz, failing)
    assert score.inner_text().startswith(f"Not passed yet. {n - 2} of {n} right")
    said = form.locator('.why[data-state="wrong"]:visible').all_inner_texts()
    whys = [q.choices[p].why for q, p in list(zip(quiz.questions, failing, strict=True))[:2]]
    assert said == [f"✗ Not right. {w.replace('`', '')}" for w in whys]


@pytest.mark.parametrize("colour", ["light", "dark"])
@pytest.mark.parametrize("key", PAGES)
def test_an_answered_quiz_has_no_accessibility_fault(open_page, key: str, colour: str) -> None:
    page = open_page(PAGES[key], "http", 390, colour)
    form = page.locator("form.gpucourse-quiz")
    answer_by_keyboard(page, form, Quiz(key), [0] * len(Quiz(key).questions))
    page.add_script_tag(path=ROOT / "book" / "vendor" / "axe" / "axe.min.js")
    result = page.evaluate('() => axe.run("form.gpucourse-quiz")')
    faults = [(v["id"], v["impact"], [n["html"][:120] for n in v["nodes"]]) for v in result["violations"]]
    assert faults == []
    assert len(result["passes"]) > 5, "axe looked at nothing"


@pytest.mark.parametrize("key", PAGES)
def test_a_quiz_fits_a_narrow_page(open_page, key: str) -> None:
    page = open_page(PAGES[key], "http", 390)
    form = page.locator("form.gpucourse-quiz")
    assert form.evaluate("e => e.scrollWidth <= e.clientWidth")
    assert form.evaluate("e => e.getBoundingClientRect().right") <= 390


# --------------------------------------------------------------------------------------------- JupyterLab


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a folder with one notebook that shows the trial quiz, as it is and without its own keys."""
    folder = tmp_path_factory.mktemp("lab")
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(
                "from gpucourse.quiz import Quiz\n"
                f"trial = Quiz.from_toml({json.dumps(TRIAL)}, 'trial')\n"
                "trial"
            ),
            nbformat.v4.new_code_cell(
                "from IPython.display import HTML\n"
                "HTML(trial._repr_html_().replace('data-lm-suppress-shortcuts', 'data-nothing')"
                ".replace('<form ', '<form id=\"robbed\" '))"
            ),
        ],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    nbformat.write(notebook, folder / "quiz.ipynb")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    command += [
        f"--port={port}",
        f"--notebook-dir={folder}",
        "--IdentityProvider.token=",
        "--expose-app-in-browser",
    ]
    command += ["--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    own = tmp_path_factory.mktemp("lab-home")  # nothing of the user's settings, nothing left in them
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_WORKSPACES_DIR")
    names += ("JUPYTERLAB_SETTINGS_DIR", "IPYTHONDIR")
    environment = os.environ | {name: str(own / name.lower()) for name in names}
    log = own / "log"
    with log.open("w") as out:
        server = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
        )
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api", timeout=2).close()
                break
            except OSError:
                if server.poll() is not None:
                    pytest.fail(f"JupyterLab ended: {log.read_text()[-2000:]}", pytrace=False)
                time.sleep(0.25)
        yield f"http://127.0.0.1:{port}/lab/tree/quiz.ipynb"
    finally:
        server.terminate()
        server.wait(timeout=20)


def test_in_jupyterlab_the_quiz_keeps_its_keys_and_is_passed_by_keyboard(chromium: Browser, lab: str) -> None:
    quiz = Quiz.from_toml(TRIAL, "trial")
    page = chromium.new_page(viewport={"width": 1200, "height": 1200})
    page.goto(lab)
    page.locator(".jp-Notebook .jp-CodeCell").first.click(timeout=60_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    form = page.locator("form.gpucourse-quiz:not(#robbed)")
    robbed = page.locator("form#robbed")
    robbed.wait_for(timeout=60_000)

    answer_by_keyboard(page, form, quiz, [q.right for q in quiz.questions])
    assert form.locator("[data-score]:visible").inner_text() == "Passed. 5 of 5 right, 100 %: all of them."

    # The guard itself: without the attribute JupyterLab takes the arrow key, and this test would see it.
    robbed.locator("input").first.focus()
    tick(page, 1)
    assert robbed.locator("input:checked").get_attribute("value") == "0"
    page.close()
