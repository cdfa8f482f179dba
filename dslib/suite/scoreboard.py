"""The scoreboard: every claim with its interval and verdict, every notebook with its status."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dslib.runs.files import write_atomic, write_json
from dslib.suite import processes
from dslib.suite.claims import Claim, ClaimError, nearest
from dslib.suite.verdicts import judge, row_ok

PACKAGES = """dslib-notebooks torch triton numpy scipy pandas matplotlib papermill nbclient ipykernel
ipywidgets tokenizers"""


def build(results: Sequence[Mapping[str, Any]], claims: Mapping[str, Claim]) -> dict[str, Any]:
    """The scoreboard of ``results`` (one a notebook, as the workers wrote them).

    A claim that its notebook did not report, a report that no claim registers or that another
    notebook owns, and a claim reported twice become rows with the verdict "error".
    """
    reports: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for result in results:
        for payload in result.get("reports", []):
            reports.setdefault(str(payload.get("id")), []).append((result["name"], payload))
    status = {result["name"]: result["status"] for result in results}
    rows = []
    for claim in claims.values():
        mine = reports.pop(claim.id, [])
        if claim.notebook in status or mine:
            rows.append(_row(claim, mine, status.get(claim.notebook, "not run")))
    for id, found in sorted(reports.items()):
        reason = f"{found[0][0]} reports it, but no claim registers it{nearest(id, claims)}"
        rows.append(_error_row(id, reason))
    return {
        "claims": rows,
        "notebooks": [
            {"name": result["name"], "status": result["status"], "seconds": result["seconds"]}
            for result in results
        ],
        "environment": environment(),
    }


def failures(board: Mapping[str, Any]) -> list[str]:
    """Why the suite does not pass, one line each; empty when it does."""
    lines = [
        f"notebook {notebook['name']}: {notebook['status']}"
        for notebook in board["notebooks"]
        if notebook["status"] != "ok"
    ]
    lines += [
        f"claim {row['id']}: {row['verdict']}: {row['reason']}" for row in board["claims"] if not row_ok(row)
    ]
    return lines


def environment() -> dict[str, Any]:
    """What the numbers may depend on."""
    packages = {}
    for name in PACKAGES.split():
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": processes.cores(),
        "packages": packages,
    }


def write(board: Mapping[str, Any], directory: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Write ``scoreboard.json``, ``.md``, ``.html`` and ``junit.xml`` into ``directory``."""
    from dslib.suite import render

    write_json(directory / "scoreboard.json", board)
    write_atomic(directory / "scoreboard.md", render.markdown(board))
    write_atomic(directory / "scoreboard.html", render.html_page(board, results))
    write_atomic(directory / "junit.xml", render.junit(board, results))


def read(directory: Path) -> dict[str, Any] | None:
    """The scoreboard written in ``directory``, or None."""
    try:
        return json.loads((directory / "scoreboard.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _row(claim: Claim, found: Sequence[tuple[str, Mapping[str, Any]]], status: str) -> dict[str, Any]:
    if not found:
        if status == "failed":
            return _error_row(claim.id, f"{claim.notebook} failed before reporting it", claim)
        return _error_row(claim.id, f"{claim.notebook} does not report it", claim)
    if len(found) > 1:
        return _error_row(
            claim.id, f"reported {len(found)} times, by {', '.join(name for name, _ in found)}", claim
        )
    name, payload = found[0]
    if name != claim.notebook:
        return _error_row(claim.id, f"{name} reports it, but it is registered for {claim.notebook}", claim)
    try:
        judgement = judge(claim, payload["samples"], payload["null"], payload["profile"], payload.get("gate"))
    except ClaimError as error:
        return _error_row(claim.id, str(error), claim)
    null = gate = None
    if claim.null is not None:
        null = {
            "statement": claim.null.statement,
            "paired": claim.null.paired,
            "samples": payload["null"],
            "measured": judgement.null_measured,
            "ci": judgement.null_ci and list(judgement.null_ci),
        }
    if claim.gate is not None:
        gate = {
            "statement": claim.gate.statement,
            "rule": claim.gate.rule,
            "samples": payload["gate"],
            "measured": judgement.gate_measured,
            "ci": judgement.gate_ci and list(judgement.gate_ci),
        }
    return columns(claim.id, claim) | {
        "samples": payload["samples"],
        "measured": judgement.measured,
        "ci": judgement.ci and list(judgement.ci),
        "null": null,
        "contrast": judgement.contrast,
        "contrast_ci": judgement.contrast_ci and list(judgement.contrast_ci),
        "gate": gate,
        "n": judgement.n,
        "profile": judgement.profile,
        "verdict": judgement.verdict,
        "reason": judgement.reason,
        "unexpected": judgement.unexpected,
    }


def _error_row(id: str, reason: str, claim: Claim | None = None) -> dict[str, Any]:
    return columns(id, claim) | {"verdict": "error", "reason": reason}


def columns(id: str, claim: Claim | None) -> dict[str, Any]:
    """A row with every column, so that readers of the file need no special cases."""
    return {
        "id": id,
        "kind": claim.kind if claim else "claim",
        "notebook": claim and claim.notebook,
        "statement": claim and claim.statement,
        "source": claim and claim.source,
        "paper": claim and claim.paper,
        "quantity": claim and claim.quantity,
        "unit": claim and claim.unit,
        "rule": claim and claim.rule,
        "scale": claim and claim.scale,
        "registered": claim and claim.registered,
        "changed": list(claim.changed) if claim else [],
        "expected": claim and claim.expected,
        "samples": None,
        "measured": None,
        "ci": None,
        "null": None,
        "contrast": None,
        "contrast_ci": None,
        "gate": None,
        "n": 0,
        "profile": None,
        "verdict": None,
        "reason": None,
        "unexpected": False,
    }
