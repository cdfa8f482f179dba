"""Finding notebooks, choosing among them by name, reading them, and clearing what was saved."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import re
import warnings
from pathlib import Path
from typing import Any

from dslib.suite.claims import nearest

NAME = re.compile(r"(\d+)_\w.*")


class NotebookError(ValueError):
    """Notebooks that are not there, or a name that chooses none or several."""


def find_directory(named: str | Path | None = None, start: str | Path = ".") -> Path:
    """The directory of the notebooks: ``named``, or ``notebooks/``, or here when we stand in it.

    Raises NotebookError when it holds none; an installed dslib carries no notebooks.
    """
    start = Path(start).resolve()
    if named is not None:
        candidates = [Path(named).resolve()]
    else:
        candidates = [start / "notebooks", start]
    for directory in candidates:
        if directory.is_dir() and list_notebooks(directory):
            return directory
    raise NotebookError(
        f"there are no notebooks (files named like 01_topic.ipynb) in {candidates[0]}; the installed package "
        "carries none: clone the repository, or name their directory with --notebooks DIR"
    )


def list_notebooks(directory: Path) -> list[Path]:
    """Files named ``NN_topic.ipynb`` directly in ``directory``, in order; not its solutions."""
    files = [file for file in directory.glob("*.ipynb") if NAME.fullmatch(file.stem)]
    files = [file for file in files if not file.name.endswith(".failed.ipynb")]
    return sorted(files, key=lambda file: (int(NAME.fullmatch(file.stem)[1]), file.stem))


def select(files: list[Path], names: list[str]) -> list[Path]:
    """The notebooks that ``names`` choose, in reading order; all of them for no names.

    A name is a number (``1``, ``01``), a stem, an unambiguous beginning of a stem or of its topic (``muon``), or a
    path, which means that very file, wherever it lies. Raises NotebookError with the nearest name, and for two files
    of one stem.
    """
    if not names:
        return list(files)
    chosen = list(dict.fromkeys(_one(files, name) for name in names))
    for first, second in itertools.combinations(chosen, 2):
        if first.stem == second.stem:
            raise NotebookError(f"{first} and {second} would both be called {first.stem}; run one at a time")
    return sorted(chosen, key=lambda file: (files.index(file) if file in files else len(files), file.stem))


def is_path(name: str) -> bool:
    """Whether a name on the command line is a path: it names a folder."""
    return len(Path(name).parts) > 1


def _one(files: list[Path], name: str) -> Path:
    if is_path(name):
        file = Path(name).expanduser().resolve()
        if not file.is_file() or not NAME.fullmatch(file.stem) or file.suffix != ".ipynb":
            what = "no notebook (a file named like 01_topic.ipynb)" if file.is_file() else "no such file"
            raise NotebookError(f"{name} is {what}; without its folder a name means one of the notebooks")
        return next((known for known in files if known.resolve() == file), file)
    wanted = Path(name).name.removesuffix(".ipynb")
    if wanted.isdecimal():
        matches = [file for file in files if int(NAME.fullmatch(file.stem)[1]) == int(wanted)]
    else:
        exact = [file for file in files if wanted in (file.stem, topic(file))]
        matches = exact or [
            file for file in files if file.stem.startswith(wanted) or topic(file).startswith(wanted)
        ]
    if not wanted or not matches:
        raise NotebookError(f"no notebook is called {name!r}{nearest(name, [file.stem for file in files])}")
    if len(matches) > 1:
        raise NotebookError(
            f"{name!r} may mean {' or '.join(file.stem for file in matches)}; write more of it"
        )
    return matches[0]


def topic(file: Path) -> str:
    """``muon`` of ``01_muon.ipynb``."""
    return file.stem.partition("_")[2]


def read_notebook(path: Path) -> Any:
    """The notebook as a NotebookNode of format 4; raises NotebookError when it is none."""
    from dslib.suite._nbformat import nbformat

    try:
        with warnings.catch_warnings(), _quiet("traitlets"):
            # Old files miss cell ids and the like; `dslib lint` says so, a run need not.
            warnings.simplefilter("ignore")
            notebook = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    except (ValueError, KeyError, AttributeError, TypeError, nbformat.ValidationError) as error:
        raise NotebookError(f"{path} cannot be read as a notebook: {str(error)[:200]}") from None
    if not isinstance(notebook.get("cells"), list):
        raise NotebookError(f"{path} cannot be read as a notebook: it has no cells")
    return notebook


@contextlib.contextmanager
def _quiet(logger: str):
    log = logging.getLogger(logger)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def title(notebook: Any) -> str:
    """The first heading, or an empty string."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown" and (
            found := re.search(r"^#+ +(.+)$", cell["source"], re.MULTILINE)
        ):
            return found[1].strip()
    return ""


def clear(notebook: Any) -> Any:
    """Remove, in place, everything that an earlier execution left in the notebook."""
    for key in ("widgets", "papermill"):
        notebook.metadata.pop(key, None)
    notebook.cells = [cell for cell in notebook.cells if not _is_leftover(cell)]
    for cell in notebook.cells:
        for key in ("execution", "papermill", "ExecuteTime"):
            cell.metadata.pop(key, None)
        if cell.cell_type == "code":
            cell.outputs = []
            cell.execution_count = None
    return notebook


def _is_leftover(cell: Any) -> bool:
    tags = cell.metadata.get("tags") or []
    return "injected-parameters" in tags or "papermill-error-cell-tag" in tags


def source_hash(notebook: Any) -> str:
    """A hash of what is executed: the sources, their kinds and tags; not outputs or positions of ids."""
    parts = [
        (cell["cell_type"], "".join(cell["source"]), sorted(cell.get("metadata", {}).get("tags") or []))
        for cell in notebook["cells"]
        if not _is_leftover(cell)
    ]
    kernel = notebook["metadata"].get("kernelspec", {}).get("name", "")
    settings = notebook["metadata"].get("dslib", {})
    text = json.dumps([parts, kernel, settings], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def code_length(path: Path) -> int:
    """Characters of code in the notebook, 0 for a file that is none: a rough measure of how long it runs."""
    try:
        cells = read_notebook(path)["cells"]
    except (NotebookError, OSError):
        return 0
    return sum(len("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code")


def draws_figures(notebook: Any) -> bool:
    """Whether the executed notebook must show at least one figure.

    ``{"dslib": {"figures": true}}`` or ``false`` in the notebook's metadata decides; without
    it, whether its code speaks of matplotlib.
    """
    said = notebook["metadata"].get("dslib", {}).get("figures")
    if said is not None:
        return bool(said)
    code = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    code = re.sub(r"#.*", "", code)
    return re.search(r"\bplt\.|\bmatplotlib\b|\bpyplot\b|\.subplots\(|\.savefig\(", code) is not None
