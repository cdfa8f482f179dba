"""The README's code runs and its scoreboard is one that a run wrote."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_examples_of_the_library_run_and_those_that_train_learn(capsys):
    first, second, third, fourth = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(first, {})
    assert float(capsys.readouterr().out.split()[-1]) < 2.5  # from ln 64 = 4.16
    exec(second, {})
    assert "[1, 16, 8, 64]" in capsys.readouterr().out
    exec(third, {})
    before, after = map(float, re.findall(r"0\.\d+", capsys.readouterr().out))
    assert after > before + 0.1
    exec(fourth, {})
    said, visible = map(int, re.findall(r"\d+", capsys.readouterr().out))
    assert 3 < visible < said == 41


def test_every_claim_is_on_the_scoreboard():
    from dslib.suite.claims import load_claims

    board = re.search(r"<!-- scoreboard -->(.*?)<!-- /scoreboard -->", README, flags=re.DOTALL)[1]
    missing = [
        claim.id for claim in load_claims().values() if claim.statement.replace("|", "\\|") not in board
    ]
    assert not missing, f"`make site` writes the scoreboard; it lacks {missing}"


def test_output_shown_is_that_of_a_run():
    output = re.search(r"<!-- output -->(.*?)<!-- /output -->", README, flags=re.DOTALL)[1]
    assert "claims held / judged" in output
    assert "01_muon" in output


def test_every_local_file_that_is_named_is_there():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).is_file(), target


def test_writing_the_readme_needs_its_markers():
    spec = importlib.util.spec_from_file_location("make_readme", ROOT / "docs" / "make_readme.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert (
        maker.replaced("a\n<!-- x -->\nold\n<!-- /x -->\nb", "x", "new")
        == "a\n<!-- x -->\nnew\n<!-- /x -->\nb"
    )
    with pytest.raises(SystemExit, match="one pair of markers"):
        maker.replaced("no markers", "x", "new")
