"""The README's tables and ``docs/scoreboard.md``, from the committed board and ``docs/notebooks.toml``.

``docs/notebooks.toml`` has a table for each notebook: its ``question``, and in one sentence the
``outcome`` with fields such as ``{muon.ten_steps_more_exact:.2f}`` that take their numbers from the
board. Words are true of one verdict only, so ``supposes`` says under which verdict of which claims the
sentence was written; where the board says otherwise nothing is written until the sentence is.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dslib.suite import board as boards
from dslib.suite import render
from dslib.suite.board import Board, BoardError, Row
from dslib.suite.claims import Claim, nearest
from dslib.suite.counts import PENDING, count, judged_rows, statements, structural_rows, summary

README, BOARD, PAGE, NOTES = "README.md", "docs/scoreboard.json", "docs/scoreboard.md", "docs/notebooks.toml"

_FIELD = re.compile(
    r"\{(?P<minus>-?)(?P<id>[a-z0-9_]+(?:\.[a-z0-9_]+)+)"
    r"(?:\|(?P<part>null|low|high|n|paper))?(?::(?P<format>[^{}]+))?\}"
)
_INTRODUCTION = """\
# Scoreboard

Every claim that the notebooks measure, with the newest run of each notebook at `quick`. Written by
`python docs/make_readme.py`; the same without prose is in [scoreboard.json](scoreboard.json).

*Held*: the whole 95 % interval satisfies the registered rule, and the null, the same measurement with the
thing that matters removed, does not explain it: where the two share their seeds, the interval of claim − null
lies on the rule's side of zero; elsewhere the null fails the rule. *Contradicted*: the interval lies on the
other side; *did not reproduce*: that, where it was registered as expected, with its reason. *Inconclusive*: the
interval reaches over the threshold, or the null passes too. *Premise unmet*: the effect could not have shown.
Identities, definitions and counts are shown apart and not counted. Intervals are over seeds, or over seeds and
problems.
"""


def files(
    root: Path,
    claims: Mapping[str, Claim],
    notebooks: Iterable[str],
    run: Board | None = None,
    notes_text: str | None = None,
    titles: Mapping[str, str] | None = None,
) -> dict[Path, str]:
    """What README, page and board of the tree at ``root`` should hold, with ``run`` merged into the board.

    ``notes_text`` stands for the content of ``docs/notebooks.toml``. A notebook without an entry there is
    asked for by its title. Raises BoardError when a sentence does not fit the verdicts.
    """
    board = boards.merged(boards.read(root / BOARD), run, claims, notebooks)
    notes = read_notes(root, notes_text)
    readme = (root / README).read_text(encoding="utf-8")
    return {
        root / BOARD: boards.text(board),
        root / PAGE: page(board, notes, titles or {}),
        root / README: rendered(readme, board, notes, titles or {}),
    }


def read_notes(root: Path, content: str | None = None) -> dict[str, Any]:
    """The tables of ``docs/notebooks.toml``, by notebook. Raises BoardError for what is none."""
    file = root / NOTES
    if content is None:
        content = file.read_text(encoding="utf-8") if file.is_file() else ""
    try:
        notes = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise BoardError(f"{file} is not valid TOML: {error}") from None
    for name, note in notes.items():
        if not isinstance(note, dict) or not note.keys() <= {"question", "outcome", "supposes"}:
            raise BoardError(f"{file}: [{name}] takes question, outcome and supposes only")
    return notes


def rendered(readme: str, board: Board, notes: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    """``readme`` with its generated parts written anew."""
    for name, content in (("verdicts", verdicts(board)), ("notebooks", table(board, notes, titles))):
        readme = replaced(readme, name, content)
    return readme


def replaced(text: str, name: str, content: str) -> str:
    """``text`` with what stands between the markers of ``name`` replaced. Raises BoardError without them."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    new, count = re.subn(pattern, lambda match: f"{match[1]}{content}\n{match[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise BoardError(
            f"README.md needs one pair of markers <!-- {name} --> and <!-- /{name} -->, it has {count}"
        )
    return new


def verdicts(board: Board) -> str:
    """What the board adds up to, and by name the claims that did not reproduce."""
    rows = board["claims"]
    first, *others = summary(count(rows))
    lines = " ".join((f"**{first}**", *others))
    for verdict in ("did not reproduce", "contradicted", "premise unmet", "error"):
        if names := [f"`{row['id']}`" for row in judged_rows(rows) if row["verdict"] == verdict]:
            lines += f"\n\n{verdict.capitalize()}: {', '.join(names)}."
    return lines


def table(board: Board, notes: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    """The README's table, a row for each notebook. Raises BoardError for sentences that do not fit."""
    lines = ["| | question | what comes out | min | held / judged |", "|---|---|---|---|---|"]
    faults = []
    for item in board["notebooks"]:
        name = item["name"]
        rows = boards.of(board, name)
        note = notes.get(name, {})
        try:
            sentence = outcome(name, note, board)
        except BoardError as error:
            faults.append(str(error))
            continue
        minutes = "–" if item["seconds"] is None else f"{item['seconds'] / 60:.1f}"
        score = render.held_text(rows, name)
        link = f"[{name[:2]}](notebooks/{name}.ipynb)"
        # GitHub makes this anchor of the page's heading.
        cells = (
            link,
            _question(name, note, titles),
            sentence,
            minutes,
            f"[{score}](docs/scoreboard.md#{name})",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if faults:
        raise BoardError("\n".join(faults))
    return "\n".join(lines)


def outcome(name: str, note: Mapping[str, Any], board: Board) -> str:
    """The sentence of one notebook, with the board's numbers in it."""
    template, supposes = note.get("outcome", ""), note.get("supposes", {})
    rows = {row["id"]: row for row in board["claims"]}
    if not template:
        return PENDING if not judged_rows(boards.of(board, name)) else "see its rows on the scoreboard"
    for id in {*supposes, *(match["id"] for match in _FIELD.finditer(template))}:
        if id not in rows:
            mine = [row["id"] for row in boards.of(board, name)]
            raise BoardError(f"{NOTES}, {name}: no claim is called {id!r}{nearest(id, mine)}")
        if id not in supposes:
            raise BoardError(f"{NOTES}, {name}: outcome speaks of {id}; supposes must give its verdict")
    if any(rows[id]["verdict"] == PENDING for id in supposes):
        return PENDING
    for id, verdict in supposes.items():
        if rows[id]["verdict"] != verdict:
            raise BoardError(
                f"{NOTES}, {name}: outcome supposes that {id} is {verdict!r}, and it is "
                f"{rows[id]['verdict']!r}: write the sentence anew"
            )
    text = _FIELD.sub(lambda match: _value(name, rows[match["id"]], match), template)
    if "{" in text or "}" in text:
        raise BoardError(f"{NOTES}, {name}: outcome has a field that is none of a claim: {text!r}")
    return text


def page(board: Board, notes: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    """``docs/scoreboard.md``: the rows of each notebook under a heading of their own."""
    parts = [_INTRODUCTION, verdicts(board) + "\n"]
    for item in board["notebooks"]:
        name, rows = item["name"], boards.of(board, item["name"])
        took = PENDING if item["seconds"] is None else f"{item['seconds']:.0f} s"
        parts.append(f"## {name}\n\n{_question(name, notes.get(name, {}), titles)} ({took})\n")
        claims, identities = statements(rows), structural_rows(rows)
        parts += [_rows(claims)] if claims else []
        parts += [f"Identities, definitions and counts:\n\n{_rows(identities)}"] if identities else []
    parts.append(_environments(board))
    return "\n".join(parts)


def _question(name: str, note: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    return note.get("question") or titles.get(name) or name


def _rows(rows: Iterable[Row]) -> str:
    lines = [
        "| claim | source | paper | measured, 95 % interval | null | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        claim = f"{row['statement']} (`{row['id']}`; {row['rule']})"
        cells = [claim, row["source"] or "–", _paper(row), render.measured(row), render.null_text(row)]
        cells.append(_verdict(row))
        lines.append("| " + " | ".join(str(c).replace("|", "\\|").replace("\n", " ") for c in cells) + " |")
    return "\n".join(lines) + "\n"


def _paper(row: Row) -> str:
    scale = f" (here: {row['scale']})" if row.get("scale") else ""
    return f"{row['paper'] or '–'}{scale}"


def _verdict(row: Row) -> str:
    said = render.verdict_text(row)
    if row["reason"] and row["verdict"] not in ("held", "contradicted"):
        said += f": {row['reason']}"
    if row.get("registered") == "with data":
        said += ". Registered with the data"
    changed = row.get("changed") or []
    return said + "".join(
        f". Changed {change}" for change in ([changed] if isinstance(changed, str) else changed)
    )


def _value(name: str, row: Row, match: re.Match[str]) -> str:
    part, form = match["part"], match["format"] or ".3g"
    null = row["null"] or {}
    low, high = row["ci"] or (None, None)
    value = {
        "null": null.get("measured"),
        "low": low,
        "high": high,
        "n": row["n"],
        "paper": row["paper"],
    }.get(part, row["measured"])
    if value is None:
        raise BoardError(f"{NOTES}, {name}: {match[0]} has no value on the board")
    if isinstance(value, str):
        return value
    value = -value if match["minus"] else value
    if part == "n":
        return str(value)
    if form.endswith("points"):  # a share as points of a hundred: 0.414 is 41
        value, form = 100 * value, form.removesuffix("points") + ".0f"
    try:
        plain = f"{value:{form}}"
    except ValueError as error:
        raise BoardError(f"{NOTES}, {name}: {match[0]} cannot be written: {error}") from None
    return plain.replace("-", "−").replace("%", " %")


def _environments(board: Board) -> str:
    groups: dict[str, list[str]] = {}
    for item in board["notebooks"]:
        if environment := item.get("environment"):
            packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
            machine = f"{environment['platform']}, {environment['cores']} cores"
            line = f"Python {environment['python']} on {machine}; {packages}."
            groups.setdefault(line, []).append(item["name"])
    if len(groups) == 1:
        return f"Run with {next(iter(groups))}\n"
    return (
        "".join(f"{', '.join(names)}: run with {line}\n\n" for line, names in groups.items()).rstrip("\n")
        + "\n"
    )
