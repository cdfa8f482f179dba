"""Deliberately broken notebooks, all in one run: each must fail for its own reason, and only it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from dslib.suite import notebooks, runner, scoreboard
from dslib.suite._nbformat import nbformat
from dslib.suite.claims import load_claims
from dslib.suite.outputs import reports
from dslib.suite.rundir import RunDirectory

# Spaces, letters beyond ASCII and braces (which papermill takes for a template).
PLACE = "Übung {a} 一/notebooks"

WIDGET = """
import ipywidgets
out = ipywidgets.Output()
with out:
    raise KeyError("caught by the widget")
"""
CALLBACK = """
import ipywidgets
button = ipywidgets.Button()
button.on_click(lambda b: 1 / 0)
button.click()
"""
AGG = """
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
plt.plot([1, 2])
plt.show()
"""
PARAMETERS = "profile = 'quick'\nsizes = (1, 2)\ntable = {1: 'a'}\ntext = 'x'"
REPORT = "from dslib.suite import report\nx = report('toy.mean', [-1.0, -1.5, -0.5, -1.0, -1.0])"
FLOOD = """
import os, sys, pathlib
here = pathlib.Path.cwd()
print(len(list(here.glob("*.ipynb"))), here.name, os.environ["OMP_NUM_THREADS"], os.environ["DSLIB_PROFILE"])
for i in range(20_000):
    print("line", i)
_ = sys.stderr.write("one\\rtwo\\rthree\\n")
"""


class Silent:
    def __init__(self):
        self.events = []

    def begin(self, names):
        pass

    def event(self, name, event):
        self.events.append((name, event))

    def done(self, name, result):
        pass

    def tick(self):
        pass

    def end(self):
        pass


@pytest.fixture(scope="module")
def finished(tmp_path_factory, write_notebook, write_claims):
    root = tmp_path_factory.mktemp("faults")
    place = root / PLACE
    good = write_notebook(
        place / "01_toy.ipynb",
        "assert (profile, sizes, table, text) == ('smoke', (3,), {2: 'b'}, '007')",
        FLOOD,
        REPORT,
        ("raise NotImplementedError('solve me')", ["raises-exception"]),
        ("raise SystemError('never executed')", ["skip-execution"]),
        "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()",
        parameters=PARAMETERS,
    )
    # An executed copy was saved: outputs, an old error, counts, widget state, injected values.
    dirty = nbformat.read(good, 4)
    error = nbformat.v4.new_output("error", ename="OldError", evalue="saved", traceback=["saved"])
    dirty.cells[2].outputs = [error]
    dirty.cells[2].execution_count = 9
    injected = nbformat.v4.new_code_cell(
        "sizes = 'stale'", metadata={"tags": ["injected-parameters"]}, id="old"
    )
    dirty.cells.insert(2, injected)
    state = {"x": {"model_name": "OutputModel", "state": {"outputs": [error]}}}
    dirty.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": state}}
    nbformat.write(dirty, good)

    plain = {"parameters": None}
    write_notebook(place / "02_dead.ipynb", "import os\nos._exit(1)", **plain)
    write_notebook(place / "03_endless.ipynb", "print('in')\nwhile True: pass", "print('after')", **plain)
    write_notebook(place / "04_widget.ipynb", WIDGET, "print('later cells run')", **plain)
    write_notebook(place / "05_callback.ipynb", CALLBACK, **plain)
    write_notebook(place / "06_agg.ipynb", AGG, **plain)
    write_notebook(place / "07_magic.ipynb", "x = 1\n%nosuchmagic", **plain)
    write_notebook(place / "08_exit.ipynb", "import sys\nsys.exit(0)", "print('never')", **plain)
    missing = {"kernelspec": {"name": "no-such-kernel", "display_name": "x", "language": "python"}}
    write_notebook(place / "09_kernel.ipynb", "x = 1", metadata=missing, **plain)
    (place / "10_broken.ipynb").write_text("{ not json")
    nan = "from dslib.suite import report\nreport('toy.mean', [float('nan')] * 5)"
    write_notebook(place / "11_nan.ipynb", nan, **plain)

    write_notebook(place / "12_quit.ipynb", "x = 1\nexit()", "print('never')", **plain)

    patch = pytest.MonkeyPatch()
    patch.setenv("MPLBACKEND", "Agg")  # set for scripts on many servers; notebooks must draw all the same
    patch.setenv("DSLIB_CLAIMS", str(write_claims(root / "claims.toml")))
    try:
        files = notebooks.list_notebooks(place)
        given = {"sizes": [3], "table": {2: "b"}, "text": "007"}
        first = runner.plan(files[:1], "smoke", given)
        rest = runner.plan(files[1:], "smoke", {}, jobs=2)
        out, display = RunDirectory(place.parent / "out"), Silent()
        endless = [job for job in rest.jobs if job.name == "03_endless"]
        others = [job for job in first.jobs + rest.jobs if job.name != "03_endless"]
        found = runner.execute(runner.Plan(tuple(others), "smoke", 120, 2), out, display).results
        found |= runner.execute(runner.Plan(tuple(endless), "smoke", 3, 2), out, display, resume=True).results
        found = {name: found[name] for name in sorted(found)}
        board = scoreboard.build(list(found.values()), load_claims())
        scoreboard.write(board, out.path, list(found.values()))
    finally:
        patch.undo()
    return out, found, board, display


def failure(finished, name):
    result = finished[1][name]
    assert result["status"] == "failed"
    assert not (finished[0].path / f"{name}.ipynb").exists(), "a failed notebook must not look finished"
    return result["failure"]


def test_a_good_notebook_passes_whatever_was_saved_in_it(finished):
    result = finished[1]["01_toy"]
    assert result["failure"] is None
    assert result["status"] == "ok"


def test_saved_outputs_and_injected_values_do_not_survive(finished):
    text = (finished[0].path / "01_toy.ipynb").read_text(encoding="utf-8")
    assert "OldError" not in text
    assert "stale" not in text


def test_what_is_written_is_valid_and_says_nothing_of_when(finished):
    executed = nbformat.read(finished[0].path / "01_toy.ipynb", 4)
    nbformat.validate(executed)
    assert "papermill" not in executed.metadata
    assert not any("execution" in cell.metadata or "papermill" in cell.metadata for cell in executed.cells)


def test_a_flood_of_prints_becomes_one_short_output_that_says_so(finished):
    executed = nbformat.read(finished[0].path / "01_toy.ipynb", 4)
    cell = next(cell for cell in executed.cells if "20_000" in cell.source)
    assert [output.name for output in cell.outputs] == ["stdout", "stderr"]
    assert len(cell.outputs[0].text) < 21_000
    assert "left out" in cell.outputs[0].text
    assert cell.outputs[1].text == "three\n", "only the last state of a progress line stays"


def test_the_kernel_runs_in_the_notebooks_directory_with_capped_threads(finished):
    executed = nbformat.read(finished[0].path / "01_toy.ipynb", 4)
    cell = next(cell for cell in executed.cells if "20_000" in cell.source)
    count, name, threads, profile = cell.outputs[0].text.split("\n")[0].split()
    assert (int(count), name, profile) == (12, "notebooks", "smoke")
    assert int(threads) == 1


def test_an_exercise_may_raise_and_is_shown_raising(finished):
    executed = nbformat.read(finished[0].path / "01_toy.ipynb", 4)
    shown = [o.ename for cell in executed.cells for o in cell.get("outputs", []) if o.output_type == "error"]
    assert shown == ["NotImplementedError"]


def test_a_report_is_found_in_the_executed_notebook(finished):
    executed = nbformat.read(finished[0].path / "01_toy.ipynb", 4)
    assert [payload["id"] for payload in reports(executed)] == ["toy.mean"]
    assert finished[2]["claims"][0]["verdict"] == "held"


def test_progress_names_each_cell(finished):
    cells = [event for name, event in finished[3].events if name == "01_toy" and event["event"] == "cell"]
    assert cells[0]["of"] == 9
    assert cells[0]["section"] == "A stub"
    assert "profile" in cells[0]["head"]


def test_a_dead_kernel_fails_although_its_metadata_says_completed(finished):
    found = failure(finished, "02_dead")
    assert found["kind"] == "dead kernel"
    assert "os._exit" in found["source"]


def test_an_endless_cell_is_stopped_and_named(finished):
    found = failure(finished, "03_endless")
    assert found["kind"] == "timeout"
    assert "--timeout" in found["message"]
    assert (found["cell"], "while True" in found["source"]) == (2, True)
    kept = (finished[0].path / "03_endless.failed.ipynb").read_text()
    assert '"in\\n"' in kept, "what it printed before is kept"


def test_an_error_inside_a_widget_is_a_failure(finished):
    found = failure(finished, "04_widget")
    assert found["kind"] == "swallowed error"
    assert "KeyError" in found["message"]


def test_an_error_in_a_callback_is_a_failure(finished):
    found = failure(finished, "05_callback")
    assert "ZeroDivisionError" in found["message"]


def test_drawing_without_showing_is_a_failure_that_says_what_to_do(finished):
    found = failure(finished, "06_agg")
    assert found["kind"] == "no figure"
    assert '"figures": false' in found["message"]


def test_a_failing_magic_is_a_failure(finished):
    found = failure(finished, "07_magic")
    assert (found["kind"], "nosuchmagic" in found["message"] + found["traceback"]) == ("error", True)


def test_leaving_with_status_zero_does_not_count_as_finishing(finished):
    assert "SystemExit" in failure(finished, "08_exit")["message"]


def test_a_missing_kernel_names_those_that_are_there(finished):
    found = failure(finished, "09_kernel")
    assert found["kind"] == "kernel"
    assert "no-such-kernel" in found["message"]
    assert "python3" in found["message"]


def test_a_file_that_is_no_notebook_is_named_and_stops_nothing_else(finished):
    assert "10_broken.ipynb cannot be read" in failure(finished, "10_broken")["message"]


def test_bad_samples_stop_the_notebook_with_the_claims_name(finished):
    found = failure(finished, "11_nan")
    assert "claim 'toy.mean': samples[0] is nan" in found["message"]
    assert "\x1b" not in found["traceback"], "terminal colours are for terminals"


def test_nothing_half_written_and_no_kernel_files_stay(finished):
    left = [file.name for file in finished[0].path.rglob(".*") if file.name != ".lock"]
    left += [file.name for file in finished[0].path.rglob("kernel-*.json")]
    assert left == []


def test_every_page_is_written_beside_its_notebook(finished):
    assert (finished[0].path / "01_toy.html").read_text(encoding="utf-8").startswith("<!")


def test_the_scoreboard_has_every_notebook_and_the_columns_that_readers_rely_on(finished):
    board = json.loads((finished[0].path / "scoreboard.json").read_text(encoding="utf-8"))
    assert [item["status"] for item in board["notebooks"]].count("ok") == 1
    columns = {
        "id",
        "statement",
        "source",
        "paper",
        "samples",
        "measured",
        "ci",
        "null",
        "n",
        "profile",
        "verdict",
    }
    assert columns <= board["claims"][0].keys()
    assert set(board["notebooks"][0]) == {"name", "status", "seconds"}
    assert {"python", "platform", "cores", "packages"} <= board["environment"].keys()


def test_junit_counts_notebooks_and_claims(finished):
    root = ET.parse(finished[0].path / "junit.xml").getroot()
    suites = {suite.get("name"): suite for suite in root}
    assert (suites["notebooks"].get("tests"), suites["notebooks"].get("failures")) == ("12", "11")
    assert (suites["claims"].get("tests"), suites["claims"].get("failures")) == ("1", "0")


def test_a_cell_that_calls_exit_ends_the_notebook_as_failed_there(finished):
    """IPython's exit() only asks the frontend to close: what stands below would run on."""
    problem = failure(finished, "12_quit")
    assert problem["kind"] == "exit"
    assert problem["cell"] == 2
    assert "exit()" in problem["source"]
    text = (finished[0].path / "12_quit.failed.ipynb").read_text(encoding="utf-8")
    assert "never\\n" not in text
