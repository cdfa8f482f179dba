"""The house: rooms import in one direction, and no method knows an experiment (the contract is in pyproject.toml)."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def house(tmp_path):
    """The packages as they are imported: kernels and data inside dslib."""
    only_sources = shutil.ignore_patterns("__pycache__", "*.csv", "*.safetensors")
    for folder, package in (("dslib", "dslib"), ("kernels", "dslib/kernels"), ("data", "dslib/data")):
        shutil.copytree(ROOT / folder, tmp_path / package, ignore=only_sources)
    return tmp_path


def arrows(house):
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()"]
    options = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    return subprocess.run([*command, *options], cwd=house, capture_output=True, text=True)


def test_arrows_between_rooms_point_one_way(house):
    found = arrows(house)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "2 kept, 0 broken" in found.stdout


def test_a_method_that_imports_an_experiment_and_a_kernel_that_imports_a_method_are_found(house):
    for file, line in (
        ("rl/kl.py", "from dslib.experiments import muon"),
        ("kernels/wkv7.py", "from dslib.attention import rwkv"),
    ):
        path = house / "dslib" / file
        path.write_text(path.read_text() + f"\n{line}\n")
    found = arrows(house)
    assert found.returncode == 1
    assert "dslib.rl.kl -> dslib.experiments.muon" in found.stdout
    assert "dslib.kernels.wkv7 -> dslib.attention.rwkv" in found.stdout
