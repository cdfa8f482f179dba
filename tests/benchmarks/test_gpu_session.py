"""The prepared session runs from end to end where there is no GPU, so that none is wasted where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch

from dslib.runs.measurements import PROVENANCE

SCRIPT = Path(__file__).with_name("gpu_session.py")


def test_dry_run_writes_rows_with_what_made_them(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed; it exists for Linux only")
    command = [sys.executable, str(SCRIPT), str(tmp_path / "out"), "--dry-run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    rows = pandas.read_csv(tmp_path / "out" / "dry_run.csv", keep_default_na=False)
    assert {*PROVENANCE, "card", "triton", "cuda", "median_ms", "min_ms", "max_ms", "n"} <= set(rows.columns)
    assert set(rows["task"]) == {"XXᵀ", "bA + cA²", "NS5 plain", "NS5 gram", "XXᵀ by tile"}
    assert (rows["error"] < 1e-3).all()
    assert rows["command"].str.contains("--dry-run").all()
    attention = pandas.read_csv(tmp_path / "out" / "dry_run_attention.csv", keep_default_na=False)
    assert set(attention["way"]) == {"dense", "torch", "triton"}
    assert {"window", "chosen blocks, gradients", "chosen entries, gradients"} <= set(attention["task"])
    assert (attention.loc[attention["way"] == "triton", "error"].astype(float) < 1e-5).all()
    assert "passed" in (tmp_path / "out" / "tests.txt").read_text()
    assert not list((tmp_path / "out").glob("*gpu.csv"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_measures_nothing_and_names_the_dry_run(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "--dry-run" in ran.stderr
    assert not (tmp_path / "out").exists()
