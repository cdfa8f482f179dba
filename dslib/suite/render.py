"""The scoreboard as Markdown, as a page that needs nothing else, and as JUnit XML."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from typing import Any

from dslib.suite import counts
from dslib.suite.formats import interval, number, with_interval
from dslib.suite.verdicts import row_ok

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 2rem; }
th, td { text-align: left; vertical-align: top; padding: .4rem .8rem;
  border-bottom: 1px solid rgb(128 128 128 / .35); }
th { font-weight: 600; }
.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
.small { opacity: .75; font-size: .875rem; }
.verdict { font-weight: 600; white-space: nowrap; }
.good .verdict { color: light-dark(#1b5e9b, #7db8f0); }
.bad .verdict { color: light-dark(#a8480b, #f2a468); }
pre { overflow-x: auto; padding: .8rem; border: 1px solid rgb(128 128 128 / .35); border-radius: 4px; }
"""

STRUCTURAL = "Structural: identities, definitions and counts, true by construction"


def measured(row: Mapping[str, Any]) -> str:
    """``"−0.013 nats [−0.02, −0.007], n = 5"``."""
    if row["measured"] is None:
        return "–"
    unit = f" {row['unit']}" if row["unit"] else ""
    spread = "" if row["ci"] is None else f" {interval(row['ci'])}"
    return f"{number(row['measured'])}{unit}{spread}, n = {row['n']}"


def null_text(row: Mapping[str, Any]) -> str:
    """The null's mean and interval, and claim − null where they are paired; ``"–"`` without a null."""
    null = row["null"]
    if null is None:
        return "–"
    text = with_interval(null["measured"], null["ci"])
    if row["contrast"] is not None:
        text += f"; claim − null {with_interval(row['contrast'], row['contrast_ci'])}"
    return text


def premise_text(row: Mapping[str, Any]) -> str:
    """The premise's mean, interval and rule, ``""`` for a claim without one."""
    gate = row["gate"]
    return "" if gate is None else f"premise {with_interval(gate['measured'], gate['ci'])}, {gate['rule']}"


def rule_text(row: Mapping[str, Any]) -> str:
    """The rule, and whether it is older than the data."""
    return f"{row['rule']}; registered {row['registered']}" if row["rule"] else "–"


def verdict_text(row: Mapping[str, Any]) -> str:
    """The verdict, marked where a claim held that is registered not to."""
    return f"{row['verdict']} (unexpected)" if row["unexpected"] else str(row["verdict"])


def markdown(board: Mapping[str, Any]) -> str:
    """Counts, then tables: the claims, what is structural, and the notebooks."""
    rows = board["claims"]
    lines = ["# Scoreboard", "", *counts.summary(counts.count(rows)), ""]
    lines += _markdown_table(counts.statements(rows))
    if structural := counts.structural_rows(rows):
        lines += ["", f"## {STRUCTURAL}", "", *_markdown_table(structural)]
    lines += ["", "| notebook | status | seconds | claims held / judged |", "|---|---|---|---|"]
    for item in board["notebooks"]:
        cells = [item["name"], item["status"], str(item["seconds"]), held_text(rows, item["name"])]
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    lines += ["", _environment_line(board), ""]
    return "\n".join(lines)


def held_text(rows: Sequence[Mapping[str, Any]], notebook: str) -> str:
    """``"held / judged"`` of one notebook, ``"–"`` if it has no claim."""
    found = counts.count(rows, notebook)
    return f"{found.held} / {found.judged}" if found.verdicts else "–"


def html_page(board: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """One page, light or dark as the reader's system is, without scripts or anything to load."""
    pages = {result["name"]: result.get("page") for result in results}
    rows = board["claims"]
    items = ""
    for item in board["notebooks"]:
        name = html.escape(item["name"])
        if pages.get(item["name"]):
            name = f'<a href="{html.escape(pages[item["name"]])}">{name}</a>'
        good = "good" if item["status"] == "ok" else "bad"
        items += f'<tr class="{good}"><td>{name}</td><td class="verdict">{item["status"]}</td>'
        items += f'<td class="number">{item["seconds"]}</td>'
        items += f'<td class="number">{held_text(rows, item["name"])}</td></tr>'
    failed = "".join(_failure_block(result) for result in results if result.get("failure"))
    summary = "<br>".join(html.escape(line) for line in counts.summary(counts.count(rows)))
    structural = counts.structural_rows(rows)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Scoreboard</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>Scoreboard</h1><p>{summary}</p>"
        f"<h2>Claims</h2>{_html_table(counts.statements(rows))}"
        + (f"<h2>{STRUCTURAL}</h2>{_html_table(structural)}" if structural else "")
        + '<h2>Notebooks</h2><div class="wide"><table><thead><tr><th>notebook</th><th>status</th>'
        f"<th>seconds</th><th>claims held / judged</th></tr></thead><tbody>{items}</tbody></table></div>{failed}"
        f'<p class="small">{html.escape(_environment_line(board))}</p></body></html>\n'
    )


def junit(board: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """One test case a notebook and one a claim, structural ones in a suite of their own; claims that are
    not judged count as skipped."""
    root = ET.Element("testsuites")
    suite = ET.SubElement(root, "testsuite", name="notebooks")
    for result in results:
        case = _case(suite, "notebooks", result["name"], result["seconds"])
        if problem := result.get("failure"):
            element = ET.SubElement(case, "failure", type=problem["kind"], message=_xml(problem["message"]))
            element.text = _xml(
                "\n\n".join(problem[part] for part in ("source", "traceback") if problem.get(part))
            )
    _count(suite)
    _junit_claims(root, "claims", counts.statements(board["claims"]))
    if structural := counts.structural_rows(board["claims"]):
        _junit_claims(root, "structural", structural)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _junit_claims(root: ET.Element, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
    suite = ET.SubElement(root, "testsuite", name=kind)
    for row in rows:
        case = _case(suite, kind, row["id"], 0)
        good = row["verdict"] != "not judged" and row_ok(row)
        if row["verdict"] == "not judged":
            ET.SubElement(case, "skipped", message=_xml(row["reason"]))
        elif not good:
            message = f"{verdict_text(row)}: {row['reason']}"
            element = ET.SubElement(case, "failure", type=row["verdict"], message=_xml(message))
            element.text = _xml(f"{row['statement']}\nmeasured {measured(row)}\nrule: {row['rule']}")
    _count(suite)


def _markdown_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| claim | source | paper | measured, 95 % interval | null | rule | verdict |",
        "|---|" + "---|" * 6,
    ]
    for row in rows:
        statement = "<br>".join(
            [
                _cell(row["statement"] or f"`{row['id']}`"),
                *(f"*changed {_cell(entry)}*" for entry in row["changed"]),
            ]
        )
        numbers = "; ".join(filter(None, (measured(row), premise_text(row))))
        cells = [row["source"] or "–", row["paper"] or "–", numbers, null_text(row), rule_text(row)]
        verdict = verdict_text(row)
        if row["verdict"] not in ("held", "contradicted"):
            verdict += f": {row['reason']}"
        lines.append("| " + " | ".join([statement, *map(_cell, (*cells, verdict))]) + " |")
    return lines


def _html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    return (
        '<div class="wide"><table><thead><tr><th>claim</th><th>paper</th>'
        "<th>measured, 95 % interval</th><th>null</th><th>verdict</th></tr></thead>"
        f"<tbody>{''.join(map(_claim_row, rows))}</tbody></table></div>"
    )


def _claim_row(row: Mapping[str, Any]) -> str:
    def text(value: Any) -> str:
        return html.escape(str(value)) if value else "–"

    good = "good" if row["verdict"] != "not judged" and row_ok(row) else "bad"
    good = "" if row["verdict"] == "not judged" else good
    details = " · ".join(html.escape(str(row[key])) for key in ("id", "source") if row[key])
    details += "".join(f"<br>changed {html.escape(entry)}" for entry in row["changed"])
    null = ""
    if row["null"] is not None:
        null = f'<div class="small">{text(row["null"]["statement"])}</div>'
    quantity = f"{row['quantity']}; {rule_text(row)}" if row["quantity"] else ""
    if premise := premise_text(row):
        quantity += f"; {premise}: {row['gate']['statement']}"
    return (
        f'<tr class="{good}"><td>{text(row["statement"])}<div class="small">{details}</div></td>'
        f"<td>{text(row['paper'])}</td>"
        f'<td><span class="number">{html.escape(measured(row))}</span>'
        f'<div class="small">{html.escape(quantity)}</div></td>'
        f'<td><span class="number">{html.escape(null_text(row))}</span>{null}</td>'
        f'<td><span class="verdict">{text(verdict_text(row))}</span>'
        f'<div class="small">{text(row["reason"])}</div></td></tr>'
    )


def _failure_block(result: Mapping[str, Any]) -> str:
    problem = result["failure"]
    where = f", cell {problem['cell']}" if problem.get("cell") else ""
    parts = [problem[part] for part in ("source", "traceback") if problem.get(part)]
    blocks = "".join(f"<pre>{html.escape(part)}</pre>" for part in parts)
    head = f"{result['name']}{where}: {problem['kind']}"
    return f"<h3>{html.escape(head)}</h3><p>{html.escape(problem['message'])}</p>{blocks}"


def _case(suite: ET.Element, kind: str, name: str, seconds: float) -> ET.Element:
    return ET.SubElement(suite, "testcase", classname=f"dslib.{kind}", name=_xml(name), time=f"{seconds:.1f}")


def _count(suite: ET.Element) -> None:
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    suite.set("errors", "0")


def _xml(text: Any) -> str:
    # Characters that XML 1.0 cannot carry, not even escaped.
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", str(text))


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _environment_line(board: Mapping[str, Any]) -> str:
    environment = board["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    machine = f"{environment['platform']}, {environment['cores']} cores"
    return f"Python {environment['python']} on {machine}; {packages}"
