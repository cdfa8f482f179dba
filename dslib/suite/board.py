"""The committed scoreboard: for each notebook its newest run that was kept, a row for each claim.

``docs/scoreboard.json`` is what the README and ``docs/scoreboard.md`` are written from. It holds no
samples. A run of one notebook replaces that notebook's rows and leaves the others, so that a new claim
costs one notebook's minutes and not the suite's. A claim that was registered or changed since its
notebook last ran stands on it as "not measured yet".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dslib.suite.claims import Claim
from dslib.suite.counts import PENDING
from dslib.suite.scoreboard import columns

#: The profile whose runs are kept: minutes and numbers of different profiles do not belong in one table.
PROFILE = "quick"

Board = Mapping[str, Any]
Row = Mapping[str, Any]


class BoardError(ValueError):
    """A run or a sentence that does not fit the board; the message says what would do."""


def read(file: Path) -> dict[str, Any]:
    """The board in ``file``; an empty one if there is none. Raises BoardError for another file."""
    if not file.is_file():
        return {"claims": [], "notebooks": [], "environment": None}
    try:
        board = json.loads(file.read_text(encoding="utf-8"))
        rows, items = board["claims"], board["notebooks"]
        if not all("id" in row for row in rows) or not all("name" in item for item in items):
            raise TypeError("a row without an id, or a notebook without a name")
    except (ValueError, KeyError, TypeError) as error:
        raise BoardError(f"{file} is no scoreboard ({error}); take the committed one back") from None
    return board


def text(board: Board) -> str:
    """The board as it is committed."""
    return json.dumps(board, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def merged(
    board: Board, run: Board | None, claims: Mapping[str, Claim], notebooks: Iterable[str]
) -> dict[str, Any]:
    """``board`` with the notebooks of ``run`` (a scoreboard) that ended well in place of their earlier rows.

    One row for each of ``claims``, in their order, and one entry for each of ``notebooks`` (stems); what
    is no longer registered or no longer there is left out.
    """
    run = run or {"claims": [], "notebooks": [], "environment": None}
    fresh = {item["name"]: item for item in run["notebooks"] if item["status"] == "ok"}
    old = {item["name"]: item for item in board["notebooks"]}
    new_rows, old_rows = ({row["id"]: row for row in each["claims"]} for each in (run, board))
    items = []
    for stem in notebooks:
        if stem in fresh:
            items.append({**fresh[stem], "environment": run["environment"]})
        else:
            items.append(dict(old.get(stem, {"name": stem, "status": PENDING, "seconds": None})))
    rows = []
    for claim in claims.values():
        row = (new_rows if claim.notebook in fresh else old_rows).get(claim.id)
        rows.append(_without_samples(row) if row and _measures(row, claim) else _pending(claim))
    return {"claims": rows, "notebooks": items}


def pending(board: Board, claims: Mapping[str, Claim]) -> list[str]:
    """The ids of claims that no run on the board has measured as they are registered now."""
    rows = {row["id"]: row for row in board["claims"] if row["verdict"] != PENDING}
    return [id for id, claim in claims.items() if id not in rows or not _measures(rows[id], claim)]


def of(board: Board, notebook: str) -> Sequence[Row]:
    """The rows of one notebook."""
    return [row for row in board["claims"] if row["notebook"] == notebook]


def _measures(row: Row, claim: Claim) -> bool:
    # Statement and rule are what a reader takes for measured; the rest of a claim explains it.
    return (row["notebook"], row["statement"], row["rule"]) == (claim.notebook, claim.statement, claim.rule)


def _without_samples(row: Row) -> dict[str, Any]:
    def slim(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: slim(item) for key, item in value.items() if key != "samples"}
        return value

    return slim(row)


def _pending(claim: Claim) -> dict[str, Any]:
    row = columns(claim.id, claim) | {"verdict": PENDING, "reason": f"dslib run {claim.notebook}"}
    if claim.null is not None:
        row["null"] = {"statement": claim.null.statement, "measured": None, "ci": None}
    return _without_samples(row)
