"""Solutions run against the very checks that a reader runs."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from dslib.notebook import results, run_checks


def write(path, *cells):
    nodes = []
    for tag, source in cells:
        nodes.append(new_code_cell(source, metadata={"tags": [tag]} if tag else {}))
    nbformat.write(new_notebook(cells=nodes), path)
    return path


@pytest.fixture
def notebook(tmp_path):
    return write(
        tmp_path / "übung 1.ipynb",
        ("parameters", "seed = 4"),
        (None, "raise RuntimeError('an untagged cell is not run')"),
        ("exercise-setup", "import math\nfrom dslib.notebook import attempt"),
        ("exercise-stub", "def root(x):\n    raise NotImplementedError"),
        ("exercise-check", "with attempt('1'):\n    assert root(seed) == 2"),
    )


def test_right_solution_is_solved(notebook, tmp_path):
    before = results()
    solutions = write(tmp_path / "s.ipynb", ("solution", "def root(x):\n    return math.sqrt(x)"))
    assert run_checks(notebook, solutions) == {"1": "solved"}
    assert results() == before  # a test's states do not leak into the process


def test_without_solutions_everything_is_open(notebook):
    assert run_checks(notebook, None) == {"1": "open"}


def test_wrong_solution_fails_with_the_cell_in_the_traceback(notebook, tmp_path):
    solutions = write(tmp_path / "s.ipynb", ("solution", "def root(x):\n    return x"))
    with pytest.raises(AssertionError) as caught:
        run_checks(notebook, solutions)
    assert any("übung 1.ipynb, cell 4" in str(entry.path) for entry in caught.traceback)


def test_nothing_to_check_is_an_error(tmp_path, notebook):
    empty = write(tmp_path / "e.ipynb", (None, "1"))
    with pytest.raises(ValueError, match="exercise-check"):
        run_checks(empty, None)
    with pytest.raises(ValueError, match="'solution'"):
        run_checks(notebook, empty)
    with pytest.raises(FileNotFoundError, match=r"none\.ipynb"):
        run_checks(tmp_path / "none.ipynb", None)


def test_magic_is_refused_because_there_is_no_kernel(tmp_path, notebook):
    solutions = write(tmp_path / "s.ipynb", ("solution", "%timeit 1"))
    with pytest.raises(ValueError, match="plain Python"):
        run_checks(notebook, solutions)
