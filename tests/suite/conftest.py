"""Stub notebooks and stub claims, small enough to read in a test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslib.suite._nbformat import nbformat

CLAIM = {
    "id": "toy.mean",
    "notebook": "01_toy",
    "statement": "The toy goes down",
    "source": "arXiv:0000.00000, §1",
    "paper": "0.52",
    "quantity": "difference of losses",
    "unit": "nats",
    "samples": "seeds",
    "op": "<",
    "threshold": 0.0,
    "on": "interval",
    "profile": "smoke",
    "scale": "a toy",
}


@pytest.fixture
def claim_row():
    """A valid row of the claims file, with changes."""
    return lambda **changes: {**CLAIM, **changes}


@pytest.fixture
def make_claim():
    """A Claim, with changes; None removes a key."""
    from dslib.suite.claims import Claim

    def make(**changes):
        row = {**CLAIM, **changes}
        return Claim.model_validate({key: value for key, value in row.items() if value is not None})

    return make


def _line(key: str, value) -> str:
    # Numbers, lists of numbers and plain strings are written in TOML as in JSON.
    return f"{key} = {json.dumps(value, ensure_ascii=False)}"


def toml(rows: list[dict]) -> str:
    """Rows as TOML; only the kinds of value that claims hold."""
    lines = []
    for row in rows:
        lines.append("[[claim]]")
        tables = {key: value for key, value in row.items() if isinstance(value, dict)}
        lines += [_line(key, value) for key, value in row.items() if key not in tables]
        for name, table in tables.items():
            lines.append(f"[claim.{name}]")
            lines += [_line(key, value) for key, value in table.items()]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def write_claims():
    """Write rows to a claims file; without rows, the one valid claim."""

    def write(path: Path, rows: list[dict] | None = None) -> Path:
        path.write_text(toml([CLAIM] if rows is None else rows), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def write_notebook():
    """Write a notebook of the given code cells; a cell may be (source, tags)."""

    def write(path: Path, *cells, parameters: str | None = "profile = 'quick'", metadata=None) -> Path:
        made = [nbformat.v4.new_markdown_cell("# A stub", id="title")]
        if parameters is not None:
            made.append(
                nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}, id="parameters")
            )
        for number, cell in enumerate(cells):
            source, tags = cell if isinstance(cell, tuple) else (cell, [])
            made.append(nbformat.v4.new_code_cell(source, id=f"code-{number}"))
            if tags:
                made[-1].metadata["tags"] = tags
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook = nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": kernel, **(metadata or {})})
        notebook.nbformat_minor = 5
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
        return path

    return write


@pytest.fixture
def dslib_command(monkeypatch):
    """Run the command line in this process; returns the exit status."""
    import sys

    from dslib.suite import cli

    def call(*arguments) -> int:
        monkeypatch.setattr(sys, "argv", ["dslib", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0

    return call
