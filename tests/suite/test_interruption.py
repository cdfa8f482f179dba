"""A run that is stopped leaves no process and nothing half-written, and goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

# Starts a child that leaves the kernel's session, then waits until the test says "go".
SLOW = """
import pathlib, subprocess, sys, time
code = "import time; time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
pathlib.Path("child.pid").write_text(str(child.pid))
while not pathlib.Path("go").exists():
    time.sleep(0.05)
"""
START_WITHIN = 120


@pytest.fixture(scope="module")
def place(tmp_path_factory, write_notebook, write_claims):
    root = tmp_path_factory.mktemp("stopped")
    write_notebook(root / "notebooks" / "01_fast.ipynb", "x = 1")
    write_notebook(root / "notebooks" / "02_slow.ipynb", SLOW)
    write_claims(root / "claims.toml", [])
    return root


def start(place, *arguments):
    environment = {**os.environ, "DSLIB_CLAIMS": str(place / "claims.toml")}
    command = [sys.executable, "-m", "dslib.suite.cli", "run", "--jobs", "2", *arguments]
    (place / "notebooks" / "child.pid").unlink(missing_ok=True)
    process = subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.PIPE, text=True)
    return process


def child_of_slow(place, process):
    """Wait until the slow notebook is in its cell; returns the process it started."""
    file = place / "notebooks" / "child.pid"
    deadline = time.monotonic() + START_WITHIN
    while time.monotonic() < deadline:
        if file.exists() and file.read_text():
            return psutil.Process(int(file.read_text()))
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    raise AssertionError("the slow notebook did not start")


def wait_for_fast(place, process):
    """It runs beside the slow one, and the runner has heard of its end."""
    deadline = time.monotonic() + START_WITHIN
    for line in process.stdout:
        if line.startswith("01_fast: ok"):
            return
        assert time.monotonic() < deadline, line
    raise AssertionError("the run ended before the fast notebook did")


def family(process, child):
    """Runner, workers, kernels, and the child that left them."""
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True), child]


def assert_all_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=20)
    alive = [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert alive == []


def assert_clean(run):
    names = {file.name for file in run.iterdir()}
    assert "02_slow.ipynb" not in names
    assert "02_slow.failed.ipynb" not in names
    assert not [name for name in names if name.startswith((".work", ".tmp"))]
    assert not (run / "results" / "02_slow.json").exists()


@pytest.mark.skipif(os.name == "nt", reason="signals of this kind are POSIX")
def test_interrupting_leaves_nothing_behind_and_resume_goes_on(place):
    process = start(place)
    child = child_of_slow(place, process)
    everyone = family(process, child)
    assert len(everyone) >= 4, "runner, worker, kernel and child"
    wait_for_fast(place, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in output
    assert_all_gone(everyone)
    run = (place / "runs" / "latest").resolve()
    assert_clean(run)
    assert (run / "01_fast.ipynb").is_file(), "what was finished is kept"
    board = json.loads((run / "scoreboard.json").read_text())
    assert [item["name"] for item in board["notebooks"]] == ["01_fast"]
    first = (run / "01_fast.ipynb").stat().st_mtime_ns

    # Ended outright: nobody is left to clean up, so the worker must notice by itself.
    process = start(place, "--resume")
    child = child_of_slow(place, process)
    everyone = family(process, child)
    process.kill()
    process.communicate(timeout=60)
    assert_all_gone(everyone)

    process = start(place, "--resume")
    child = child_of_slow(place, process)
    everyone = family(process, child)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert_all_gone(everyone)
    assert_clean(run)

    (place / "notebooks" / "go").write_text("")
    process = start(place, "--resume")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "01_fast: unchanged" in output
    assert (run / "02_slow.ipynb").is_file()
    assert (run / "01_fast.ipynb").stat().st_mtime_ns == first
    assert [path.name for path in (place / "runs").iterdir() if path.name != "latest"] == [run.name]
    # The notebook ended well, but its child did not end by itself.
    pid = int((place / "notebooks" / "child.pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
