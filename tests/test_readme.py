"""The README is short, its code runs, and its numbers are those of the committed board."""

import re
import warnings
from pathlib import Path

import pytest

from dslib.suite import board as boards
from dslib.suite import landing, notebooks
from dslib.suite.claims import load_claims

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
USING = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
HOW = "`python docs/make_readme.py` writes it"


@pytest.fixture(scope="module")
def board():
    return boards.read(ROOT / landing.BOARD)


@pytest.fixture(scope="module")
def titles():
    files = notebooks.list_notebooks(ROOT / "notebooks")
    return {file.stem: notebooks.title(notebooks.read_notebook(file)) for file in files}


def examples(text):
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_examples_of_the_library_run_and_those_that_train_learn(capsys):
    optimizer, reinforcement, agent = examples(README)
    exec(optimizer, {})
    assert float(capsys.readouterr().out.split()[-1]) < 2.5  # from ln 64 = 4.16
    exec(reinforcement, {})
    before, after = map(float, re.findall(r"0\.\d+", capsys.readouterr().out))
    assert after > before + 0.1
    exec(agent, {})
    said, visible = map(int, re.findall(r"\d+", capsys.readouterr().out))
    assert 3 < visible < said == 41


def test_example_of_attention_runs(capsys):
    (attention,) = examples(USING)
    exec(attention, {})
    assert "[1, 16, 8, 64]" in capsys.readouterr().out


def test_readme_can_be_read_in_a_sitting():
    assert len(README.encode()) <= 15_000


def test_readme_and_its_page_say_what_the_board_says(board, titles):
    notes = landing.read_notes(ROOT)
    assert landing.rendered(README, board, notes, titles) == README, HOW
    page = (ROOT / landing.PAGE).read_text(encoding="utf-8")
    assert landing.page(board, notes, titles) == page, HOW


def test_every_notebook_has_a_row_and_no_row_is_of_another(board, titles):
    assert [item["name"] for item in board["notebooks"]] == list(titles), HOW
    for name in titles:
        assert f"(notebooks/{name}.ipynb)" in README


def test_board_shows_no_claim_that_is_gone_and_says_of_new_ones_that_they_wait(board):
    claims = load_claims()
    assert {row["id"] for row in board["claims"]} <= set(claims), HOW
    if waiting := boards.pending(board, claims):
        warnings.warn(f"not measured yet, run their notebooks: {', '.join(waiting)}", stacklevel=1)


@pytest.mark.parametrize("file", ["README.md", "docs/using.md", "docs/scoreboard.md", "docs/papers.md"])
def test_every_local_file_that_is_named_is_there(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", text):
        assert ((ROOT / file).parent / target).is_file(), target


def test_every_command_that_is_named_exists():
    from dslib.suite.cli import app

    there = {command.name for command in app.registered_commands}
    assert set(re.findall(r"^dslib (\w+)", README + USING, flags=re.MULTILINE)) <= there
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"[`\n]make ([a-z]+)", README + USING)) <= targets
