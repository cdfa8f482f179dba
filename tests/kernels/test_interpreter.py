"""The cases of test_symmetric.py in Triton's interpreter, on any machine that has triton."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest


def test_every_case_passes_in_the_interpreter_and_none_is_skipped(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed; it exists for Linux only")
    cases = Path(__file__).with_name("test_symmetric.py")
    report = tmp_path / "report.xml"
    # The interpreter is chosen when a kernel's file is imported, so it needs a process of its own.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ran = subprocess.run(
        [*command, str(cases), f"--junitxml={report}"],
        cwd=cases.parent.parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-1000:]
    counts = ElementTree.parse(report).getroot().find("testsuite").attrib
    assert int(counts["tests"]) > 50
    assert int(counts["skipped"]) == 0
