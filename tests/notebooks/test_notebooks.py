"""The notebooks themselves: clean, executable at smoke, exercises that open and close."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dslib.notebook import run_checks

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_exercises_are_open_without_solutions_and_solved_with_them(notebook, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    assert set(run_checks(notebook, None).values()) == {"open"}
    assert set(run_checks(notebook, notebook.parent / "solutions" / notebook.name).values()) == {"solved"}


def test_suite_at_smoke_runs_every_notebook_and_judges_its_structural_claims(tmp_path):
    environment = {**os.environ, "DSLIB_CACHE": "off"}
    command = [
        sys.executable,
        "-m",
        "dslib.suite",
        "run",
        "--profile",
        "smoke",
        "--out",
        str(tmp_path / "run"),
    ]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    board = json.loads((tmp_path / "run" / "scoreboard.json").read_text())
    assert {item["name"]: item["status"] for item in board["notebooks"]} == {
        file.stem: "ok" for file in NOTEBOOKS
    }
    judged = {row["id"]: row["verdict"] for row in board["claims"]}
    assert judged["muon.singular_value_band"] == "held"
    assert "error" not in judged.values()
    for file in NOTEBOOKS:
        page = (tmp_path / "run" / f"{file.stem}.html").read_text()
        assert "<math" in page
        assert "<svg" in page
