"""``dslib lint``: what a notebook must be before it is committed."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dslib.runs.files import write_atomic
from dslib.suite import notebooks, parameters
from dslib.suite.claims import Claim, nearest
from dslib.suite.lint_style import ONLY_WARN, called, parsed, style_findings

KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}

_NETWORK = re.compile(
    r"^\s*[%!]+\s*(pip|conda|mamba|uv|wget|curl|git)\b|\b(urlopen|urlretrieve|requests\.(get|post)|httpx\.\w+)\s*\(",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Finding:
    """One thing to change; a warning does not fail the lint."""

    notebook: str
    cell: int | None
    message: str
    warning: bool = False

    def __str__(self) -> str:
        where = f", cell {self.cell}" if self.cell else ""
        return f"{self.notebook}{where}: {'warning: ' if self.warning else ''}{self.message}"


def lint_notebook(file: Path, claims: Mapping[str, Claim]) -> list[Finding]:
    """All findings of one notebook file, in the order of its cells; those of style come last."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        cells = raw["cells"]
        if not (isinstance(cells, list) and isinstance(raw["metadata"], dict)):
            raise TypeError("cells is no list or metadata no table")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [Finding(file.stem, None, f"cannot be read as a notebook: {type(error).__name__} {error}")]
    found: list[tuple[int | None, str]] = []
    found += [(None, message) for message in _whole(raw)]
    identifiers: dict[str, int] = {}
    for position, cell in enumerate(cells, start=1):
        found += [(position, message) for message in _cell(cell)]
        id = cell.get("id")
        if id is not None and identifiers.setdefault(id, position) != position:
            found.append((position, f"has the id {id!r} of cell {identifiers[id]}"))
    try:
        if parameters.read_parameters(raw) is None:
            found.append((None, "no cell is tagged 'parameters'"))
    except parameters.ParameterError as error:
        found.append((parameters.tagged_cells(raw)[0] + 1, str(error)))
    found += _claims(file.stem, cells, claims)
    findings = [Finding(file.stem, position, message) for position, message in found]
    for position, rule, message in style_findings(cells):
        findings.append(Finding(file.stem, position, message, warning=rule in ONLY_WARN))
    return findings


def lint_unowned_claims(files: Sequence[Path], claims: Mapping[str, Claim]) -> list[Finding]:
    """Claims that name a notebook which does not exist."""
    stems = [file.stem for file in files]
    return [
        Finding(
            claim.notebook,
            None,
            f"claim {claim.id!r} names this notebook, which is not there{nearest(claim.notebook, stems)}",
        )
        for claim in claims.values()
        if claim.notebook not in stems
    ]


def lint_scoreboard(board: Mapping[str, Any] | None) -> list[Finding]:
    """Claims that held in the newest run although something else is registered as expected of them.

    For "did not reproduce" that is an error; what is open may end either way, and is a warning.
    """
    return [
        Finding(
            row["notebook"],
            None,
            f"claim {row['id']!r} is registered as {row['expected']!r}, but it held",
            warning=row["expected"] != "did not reproduce",
        )
        for row in (board or {}).get("claims", [])
        if row["verdict"] == "held" and row.get("expected")
    ]


def fix(file: Path) -> bool:
    """Clear what an execution left and set format, kernel and ids; True if the file changed.

    Sources, tags and the author's other metadata stay. A file that is no notebook stays as it is.
    """
    from dslib.suite._nbformat import nbformat

    try:
        before = file.read_text(encoding="utf-8")
        notebook = notebooks.read_notebook(file)
    except (OSError, ValueError):
        return False
    notebooks.clear(notebook)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata["kernelspec"] = dict(KERNEL)
    notebook.metadata["language_info"] = {"name": "python"}
    if isinstance(notebook.metadata.get("dslib"), dict):
        notebook.metadata.dslib.pop("run", None)
    had_ids = {cell.get("id") for cell in json.loads(before)["cells"]} - {None}
    taken: set[str] = set()
    for position, cell in enumerate(notebook.cells, start=1):
        # Ids that the reader made up are random; a new id must be the same on every machine.
        if cell.get("id") not in had_ids or cell["id"] in taken or not _good_id(cell.get("id")):
            cell.id = _free_id(f"cell-{position:02}", taken | had_ids)
        taken.add(cell.id)
        cell.metadata.pop("collapsed", None)
    after = nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n"
    if after == before:
        return False
    write_atomic(file, after)
    return True


def _whole(raw: Mapping[str, Any]) -> list[str]:
    metadata = raw["metadata"]
    messages = []
    if (raw.get("nbformat"), raw.get("nbformat_minor")) != (4, 5):
        messages.append(f"is nbformat {raw.get('nbformat')}.{raw.get('nbformat_minor')}, not 4.5")
    kernel = (metadata.get("kernelspec") or {}).get("name")
    if kernel != "python3":
        messages.append(f"asks for the kernel {kernel!r}, not 'python3'")
    if "widgets" in metadata:
        messages.append("holds saved widget state")
    if "papermill" in metadata or "run" in (metadata.get("dslib") or {}):
        messages.append("is an executed copy (it carries a run's metadata)")
    return messages


def _cell(cell: Mapping[str, Any]) -> list[str]:
    messages = []
    if not _good_id(cell.get("id")):
        messages.append(f"has no valid cell id ({cell.get('id')!r})")
    tags = cell.get("metadata", {}).get("tags") or []
    if "injected-parameters" in tags or "papermill-error-cell-tag" in tags:
        messages.append("was injected by a run")
    if cell["cell_type"] != "code":
        return messages
    if cell.get("outputs"):
        messages.append("holds saved outputs")
    if cell.get("execution_count") is not None:
        messages.append(f"has the execution count {cell['execution_count']}")
    source = "".join(cell["source"])
    if found := _NETWORK.search(source):
        messages.append(f"installs or downloads: {found[0].strip()!r}")
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            messages.append("imports relatively; a notebook has no package")
    return messages


def _claims(
    stem: str, cells: Sequence[Mapping[str, Any]], claims: Mapping[str, Claim]
) -> list[tuple[int | None, str]]:
    found: list[tuple[int | None, str]] = []
    reported: dict[str, int] = {}
    computed = False
    for position, cell in enumerate(cells, start=1):
        for node in ast.walk(parsed("".join(cell["source"]))) if cell["cell_type"] == "code" else ():
            if not (isinstance(node, ast.Call) and called(node) == "report" and (node.args or node.keywords)):
                continue
            first = (
                node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "id"), None)
            )
            if not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
                computed = True  # an id made at run time: the runner will check it
                continue
            reported.setdefault(first.value, position)
    for id, position in reported.items():
        if id not in claims:
            found.append((position, f"reports {id!r}, which no claim registers{nearest(id, claims)}"))
        elif claims[id].notebook != stem:
            found.append((position, f"reports {id!r}, which is registered for {claims[id].notebook}"))
    if not computed:
        missing = [
            claim.id for claim in claims.values() if claim.notebook == stem and claim.id not in reported
        ]
        found += [(None, f"claim {id!r} is registered for it, but it does not report it") for id in missing]
    return found


def _good_id(id: Any) -> bool:
    return isinstance(id, str) and re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", id) is not None


def _free_id(wanted: str, taken: set[Any]) -> str:
    candidate, count = wanted, 1
    while candidate in taken:
        count += 1
        candidate = f"{wanted}-{count}"
    return candidate
