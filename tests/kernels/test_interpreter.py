"""The cases of every kernel in Triton's interpreter, on any machine that has triton."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent
#: Every file of ``kernels/`` but what has no kernel, and so no cases of its own.
KERNELS = sorted(
    {file.stem for file in (HERE.parent.parent / "kernels").glob("*.py")} - {"__init__", "launching"}
)


def test_every_case_passes_in_the_interpreter_and_none_is_skipped(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed; it exists for Linux only")
    cases = [str(HERE / f"test_{name}.py") for name in KERNELS]
    report = tmp_path / "report.xml"
    # The interpreter is chosen when a kernel's file is imported, so it needs a process of its own.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ran = subprocess.run(
        [*command, *cases, f"--junitxml={report}"],
        cwd=HERE.parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-1000:]
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert int(suite.attrib["skipped"]) == 0
    tests = Counter(case.attrib["classname"].rpartition(".")[2] for case in suite.iter("testcase"))
    assert set(tests) == {f"test_{name}" for name in KERNELS}
    assert all(count >= 20 for count in tests.values()), tests
