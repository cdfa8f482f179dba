"""What a scoreboard adds up to; one definition for the console, the pages and the README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dslib.suite.verdicts import CONFIDENCE, VERDICTS, row_ok

#: The verdict on the committed board of a claim that no run has measured as it is registered now.
PENDING = "not measured yet"


@dataclass(frozen=True)
class Counts:
    """Counts of claims; structural rows stand apart, and are in none but the last two (those judged, held).

    ``verdicts`` counts every verdict that occurs, in the order of VERDICTS; ``judged`` is all but those not
    judged at their profile, or not measured yet. ``excused`` are judged, not held, and well for the suite since
    ``expected`` registers it.
    ``by_luck`` is 0.05 times the claims that were judged by an interval: as many may be held at 95 %
    although there is nothing (an upper bound: where there is nothing, an interval lies on one given
    side of its threshold in 2.5 % of the cases).
    """

    verdicts: Mapping[str, int]
    judged: int
    held: int
    excused: int
    by_interval: int
    by_luck: float
    structural: int
    structural_held: int


def count(rows: Sequence[Mapping[str, Any]], notebook: str | None = None) -> Counts:
    """The counts of a scoreboard's ``claims``, or of those of one notebook."""
    rows = [row for row in rows if notebook is None or row["notebook"] == notebook]
    claims = statements(rows)
    judged, structural = _with_verdict(claims), _with_verdict(structural_rows(rows))
    found = {verdict: sum(row["verdict"] == verdict for row in claims) for verdict in (*VERDICTS, PENDING)}
    by_interval = sum(row["ci"] is not None for row in judged)
    return Counts(
        verdicts={verdict: number for verdict, number in found.items() if number},
        judged=len(judged),
        held=found["held"],
        excused=sum(row["verdict"] != "held" and row_ok(row) for row in judged),
        by_interval=by_interval,
        by_luck=(1 - CONFIDENCE) * by_interval,
        structural=len(structural),
        structural_held=sum(row["verdict"] == "held" for row in structural),
    )


def judged_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The statements that have a verdict."""
    return _with_verdict(statements(rows))


def statements(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows that say what a paper says."""
    return [row for row in rows if row.get("kind") != "structural"]


def structural_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows that are true by construction: identities, definitions, counts restated."""
    return [row for row in rows if row.get("kind") == "structural"]


def summary(counts: Counts) -> list[str]:
    """The counts in sentences, as they stand under every board."""
    others = [f"{number} {verdict}" for verdict, number in counts.verdicts.items() if verdict != "held"]
    lines = [
        f"{counts.held} of {counts.judged} claims held" + "".join(f", {other}" for other in others) + "."
    ]
    if counts.excused:
        lines.append(
            f"{counts.excused} of those not held are excused by what is registered as expected of them."
        )
    if counts.by_interval:
        lines.append(
            f"Of {counts.by_interval} judged by a 95 % interval up to {counts.by_luck:.1f} may be held by luck "
            f"(0.05 × {counts.by_interval})."
        )
    if counts.structural:
        lines.append(
            f"Structural, true by construction and not counted: {counts.structural_held} of {counts.structural} held."
        )
    return lines


def _with_verdict(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["verdict"] not in (PENDING, "not judged")]
