"""A new notebook is complete, clean and green at once; a name that cannot be leaves the tree as it was."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dslib.suite import board as boards
from dslib.suite import landing, lint, new
from dslib.suite.claims import load_claims

ROOT = Path(__file__).resolve().parent.parent.parent
TOPIC = "a_topic_as_long_as_one_can_get"  # thirty letters
STEM = f"08_{TOPIC}"
REPORT = "from dslib.suite import report\nreport('toy.mean', [-1.0, -1.0])"


def tree(root, write_notebook, write_claims):
    """A clone with one notebook, in which the rooms are those of this one, but for experiments and data."""
    write_notebook(
        root / "notebooks" / "07_toy.ipynb",
        REPORT,
    )
    for folder in ("dslib/experiments", "data"):
        (root / folder).mkdir(parents=True)
        shutil.copy(ROOT / folder / "__init__.py", root / folder)
    for room in (ROOT / "dslib").iterdir():
        if room.name not in ("experiments", "__pycache__"):
            (root / "dslib" / room.name).symlink_to(room)
    (root / "dslib" / "data").symlink_to(root / "data")
    write_claims(root / "data" / "claims.toml", [{**_toy(), "notebook": "07_toy"}])
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "docs").mkdir()
    markers = "".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in ("verdicts", "notebooks"))
    (root / "README.md").write_text(markers)
    for file, content in landing.files(root, load_claims(root / "data" / "claims.toml"), ["07_toy"]).items():
        file.write_text(content)
    return root


def _toy():
    text = {"statement": "it is", "source": "s", "paper": "p", "quantity": "q", "unit": "", "scale": "a toy"}
    rule = {"samples": "seeds", "op": "<", "threshold": 0.0, "on": "interval", "profile": "smoke"}
    return {"id": "toy.mean", "notebook": "01_toy", **text, **rule}


def content(root):
    return {
        file: file.read_bytes()
        for file in root.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


@pytest.fixture
def place(tmp_path, write_notebook, write_claims, monkeypatch):
    monkeypatch.delenv("DSLIB_CLAIMS", raising=False)
    return tree(tmp_path, write_notebook, write_claims)


@pytest.fixture(scope="module")
def made(tmp_path_factory, write_notebook, write_claims):
    root = tree(tmp_path_factory.mktemp("clone"), write_notebook, write_claims)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DSLIB_CLAIMS", raising=False)
        new.make(STEM, root / "notebooks")
    return root


def python(root, *arguments):
    settings = {"DSLIB_CACHE": "off", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    environment = {**os.environ, **settings, "PYTHONPATH": str(root)}
    environment.pop("DSLIB_CLAIMS", None)
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_new_notebook_is_clean_and_reports_what_is_registered_for_it(made):
    claims = load_claims(made / "data" / "claims.toml")
    assert [id for id in claims if id.startswith(TOPIC)] == [
        f"{TOPIC}.fewer_steps",
        f"{TOPIC}.factor_is_root",
    ]
    assert lint.lint_notebook(made / "notebooks" / f"{STEM}.ipynb", claims) == []
    assert lint.lint_notebook(made / "notebooks" / "07_toy.ipynb", claims) == []


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_ruff_accepts_the_new_files_even_under_the_longest_name(made, command):
    sources = [f"dslib/experiments/{TOPIC}.py", f"tests/experiments/test_{TOPIC}.py"]
    cells = map(str, (made / "notebooks").rglob(f"{STEM}.ipynb"))
    python(made, "-m", "ruff", *command, "--no-cache", *sources, *cells)


def test_no_line_of_its_code_is_cut_off_on_the_page(made):
    for file in (made / "notebooks").rglob(f"{STEM}.ipynb"):
        for cell in json.loads(file.read_text())["cells"]:
            if cell["cell_type"] == "code":
                assert max(map(len, "".join(cell["source"]).splitlines())) <= 78


def test_new_notebook_runs_at_smoke_draws_and_is_judged(made):
    python(made, "-m", "dslib.suite", "run", "8", "--profile", "smoke", "--out", "out")
    board = json.loads((made / "out" / "scoreboard.json").read_text())
    assert [(item["name"], item["status"]) for item in board["notebooks"]] == [(STEM, "ok")]
    assert [row["verdict"] for row in board["claims"]] == ["not judged", "not judged"]
    page = (made / "out" / f"{STEM}.html").read_text()
    assert "<math" in page
    assert "<svg" in page


CHECKS = f"""
import pytest
from dslib.notebook import run_checks
print("tests", int(pytest.main(["-q", "-p", "no:cacheprovider", "tests/experiments/test_{TOPIC}.py"])))
print(run_checks("notebooks/{STEM}.ipynb", None))
print(run_checks("notebooks/{STEM}.ipynb", "notebooks/solutions/{STEM}.ipynb"))
"""


def test_its_tests_pass_and_its_exercise_opens_and_closes(made):
    said = python(made, "-c", CHECKS)  # one process: importing torch is what takes long
    assert "6 passed" in said
    assert "tests 0" in said
    assert "{'1': 'open'}" in said
    assert said.endswith("{'1': 'solved'}\n")


def test_readme_and_board_have_a_row_that_waits_for_a_run(made):
    board = boards.read(made / landing.BOARD)
    assert [item["name"] for item in board["notebooks"]] == ["07_toy", STEM]
    assert f"(notebooks/{STEM}.ipynb)" in (made / "README.md").read_text()
    waiting = boards.pending(board, load_claims(made / "data" / "claims.toml"))
    assert f"{TOPIC}.fewer_steps" in waiting
    titles = {STEM: TOPIC.replace("_", " ").capitalize()}
    assert boards.PENDING in landing.table(board, landing.read_notes(made), titles).splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("07_other", "number 07 is that of 07_toy; 08_other would do"),
        ("08_toy", "topic 'toy' is that of 07_toy; 08_toy_2 would do"),
        ("other", "'other' is not like NN_topic, two digits and a topic; 08_other would do"),
        ("8_other", "08_other would do"),
        ("08_class", "cannot name a module"),
        ("08_My Topic", "08_my_topic would do"),
        ("08_" + "x" * 31, "at most 30"),
        ("08_../x", "08_x would do"),
        ("08_existing", "topic 'existing' is that of dslib/experiments/existing.py; 08_existing_2 would do"),
        ("08_held", "topic 'held' is that of claim held.by; 08_held_2 would do"),
    ],
)
def test_a_name_that_cannot_be_exits_2_with_one_that_can_and_writes_nothing(
    place, dslib_command, capsys, monkeypatch, write_claims, name, message
):
    (place / "dslib" / "experiments" / "existing.py").write_text("")
    write_claims(place / "data" / "claims.toml", [{**_toy(), "id": "held.by"}])
    before = content(place)
    monkeypatch.chdir(place)
    assert dslib_command("new", name) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert content(place) == before


def test_a_file_that_cannot_be_written_takes_the_others_back(place, monkeypatch):
    before = content(place)
    write = new.write_atomic

    def full_disk(file, text):
        if file.name == "README.md" and len(text) > len(before[file]):
            raise OSError(28, "No space left on device", str(file))
        write(file, text)

    monkeypatch.setattr(new, "write_atomic", full_disk)
    with pytest.raises(new.NewError, match="No space left on device; nothing was made"):
        new.make("08_other", place / "notebooks")
    assert content(place) == before


def test_claims_of_ones_own_take_the_stubs_and_leave_the_readme(place, monkeypatch, write_claims):
    own = write_claims(place / "own.toml")
    before = content(place)
    monkeypatch.setenv("DSLIB_CLAIMS", str(own))
    new.make("08_other", place / "notebooks")
    assert "other.fewer_steps" in load_claims(own)
    assert (place / "README.md").read_bytes() == before[place / "README.md"]
    assert (place / "data" / "claims.toml").read_bytes() == before[place / "data" / "claims.toml"]


def test_notebooks_elsewhere_have_no_room_for_an_experiment(tmp_path, write_notebook):
    write_notebook(tmp_path / "notebooks" / "01_toy.ipynb", "x = 1")
    with pytest.raises(new.NewError, match="call this in a clone"):
        new.make("02_other", tmp_path / "notebooks")
