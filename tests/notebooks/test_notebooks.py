"""The notebooks themselves: executable at smoke, exercises that open and close; `dslib lint` keeps them clean."""

import types
from pathlib import Path

import pytest

from dslib.notebook import run_checks
from dslib.suite import processes, runner, scoreboard
from dslib.suite.claims import load_claims
from dslib.suite.rundir import RunDirectory

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))

each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)


@each_notebook
def test_notebook_runs_at_smoke_and_its_structural_claims_hold(notebook, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "cores", lambda: 1)  # others are tested beside it
    monkeypatch.setenv("DSLIB_CACHE", "off")
    run = RunDirectory(tmp_path / "run")
    result = runner.execute(runner.plan([notebook], "smoke", {}), run, silent()).results[notebook.stem]
    assert result["status"] == "ok", explained(result)
    board = scoreboard.build([result], load_claims())
    assert scoreboard.failures(board) == []
    page = (run.path / result["page"]).read_text(encoding="utf-8")
    assert "<math" in page
    assert "<svg" in page


@each_notebook
def test_exercises_are_open_without_solutions_and_solved_with_them(notebook, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    assert set(run_checks(notebook, None).values()) == {"open"}
    assert set(run_checks(notebook, notebook.parent / "solutions" / notebook.name).values()) == {"solved"}


def test_a_claim_that_needs_no_scale_is_judged_at_smoke():
    judged = {claim.id for claim in load_claims().values() if claim.judged_at("smoke")}
    assert "muon.singular_value_band" in judged, "else the test above judges nothing"


def silent():
    def nothing(*_): ...

    return types.SimpleNamespace(begin=nothing, event=nothing, done=nothing, tick=nothing, end=nothing)


def explained(result):
    failure = result["failure"] or {}
    return "\n".join(str(failure.get(part) or "") for part in ("kind", "message", "source", "traceback"))
