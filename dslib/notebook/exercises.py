"""Exercises that stay open until solved, and solutions that tests run against the same checks."""

from __future__ import annotations

import dis
import linecache
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar


class attempt:
    """Check a reader's solution: ``with attempt("1.2"): assert my_function(3) == 9``.

    A NotImplementedError that the reader's own stub raises says that the exercise is open, and is
    suppressed; every other exception, an AssertionError above all, propagates. Leaving the block
    says that it is solved. ``attempt.results`` holds "open", "solved" or "failed" for each label.

    Raises ValueError for an empty label.
    """

    results: ClassVar[dict[str, str]] = {}

    def __init__(self, label: str) -> None:
        if not isinstance(label, str) or not label.strip():
            raise ValueError(f"label={label!r} names no exercise; give it its number, such as '1.2'")
        self.label = label

    def __enter__(self) -> attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            attempt.results[self.label] = "solved"
            print(f"Exercise {self.label}: solved.")
            return False
        if isinstance(error, NotImplementedError) and trace is not None and _from_a_stub(trace):
            attempt.results[self.label] = "open"
            print(
                f"Exercise {self.label}: not solved yet — write the function above and run this cell again."
            )
            return True
        attempt.results[self.label] = "failed"
        return False


def results() -> dict[str, str]:
    """The state of every exercise that was checked so far: "open", "solved" or "failed"."""
    return dict(attempt.results)


def _from_a_stub(trace: TracebackType) -> bool:
    """Whether a ``raise`` statement of the notebook itself threw, not a library's operation.

    torch raises NotImplementedError for an operation that a device lacks: that is a fault to see.
    """
    first, last = trace, trace
    while last.tb_next is not None:
        last = last.tb_next
    opcode = last.tb_frame.f_code.co_code[last.tb_lasti]
    return last.tb_frame.f_globals is first.tb_frame.f_globals and dis.opname[opcode] == "RAISE_VARARGS"


def run_checks(notebook_path: str | Path, solutions_path: str | Path | None) -> dict[str, str]:
    """Run a notebook's exercise checks against the solutions, in this process, without a kernel.

    In one namespace: the notebook's cells tagged ``parameters``, ``exercise-setup`` and
    ``exercise-stub``, then the solutions' cells tagged ``solution``, then the notebook's cells
    tagged ``exercise-check``. Without solutions the stubs are checked, which should all be open.
    Returns the state of each label.

    Raises FileNotFoundError for a missing notebook, ValueError when there is nothing to check,
    no solution, or a cell with a magic; exceptions of cells propagate with the cell's number.
    """
    notebook = Path(notebook_path)
    cells = [c for tag in ("parameters", "exercise-setup", "exercise-stub") for c in _tagged(notebook, tag)]
    cells.sort(key=lambda cell: cell[0])
    checks = list(_tagged(notebook, "exercise-check"))
    if not checks:
        raise ValueError(
            f"{notebook.name} has no cell tagged 'exercise-check'; tag the cells that use attempt(...)"
        )
    steps = [(notebook, *cell) for cell in cells]
    if solutions_path is not None:
        solutions = Path(solutions_path)
        solved = list(_tagged(solutions, "solution"))
        if not solved:
            raise ValueError(
                f"{solutions.name} has no cell tagged 'solution'; tag the cells that solve exercises"
            )
        steps += [(solutions, *cell) for cell in solved]
    steps += [(notebook, *cell) for cell in checks]
    namespace: dict[str, Any] = {"__name__": "__main__", "display": lambda *objects, **_: None}
    with _headless_with_fresh_results() as states:
        for path, index, source in steps:
            _execute(path, index, source, namespace)
    if not states:
        raise ValueError(f"the cells of {notebook.name} tagged 'exercise-check' never use attempt(...)")
    return dict(states)


@contextmanager
def _headless_with_fresh_results() -> Iterator[dict[str, str]]:
    kept, variable = attempt.results, os.environ.get("DSLIB_HEADLESS")
    attempt.results = {}
    os.environ["DSLIB_HEADLESS"] = "1"
    try:
        yield attempt.results
    finally:
        attempt.results = kept
        if variable is None:
            del os.environ["DSLIB_HEADLESS"]
        else:
            os.environ["DSLIB_HEADLESS"] = variable


def _tagged(path: Path, tag: str) -> Iterator[tuple[int, str]]:
    import nbformat

    if not path.is_file():
        raise FileNotFoundError(f"there is no notebook {path}")
    for index, cell in enumerate(nbformat.read(path, as_version=4).cells):
        if cell.cell_type == "code" and tag in cell.metadata.get("tags", []):
            yield index, cell.source


def _execute(path: Path, index: int, source: str, namespace: dict[str, Any]) -> None:
    name = f"<{path.name}, cell {index}>"
    for line in source.splitlines():
        if line.lstrip().startswith(("%", "!")):
            raise ValueError(f"{name} uses {line.strip()!r}; cells of exercises are plain Python")
    # Tracebacks and inspect.getsource look the text up here, as they do for a kernel's cells.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), namespace)
