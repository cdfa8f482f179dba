"""The part of ``dslib lint`` about how a notebook reads: width and length, badges, golf, English."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CODE_LINES = 15
#: Of a cell that draws and is folded away (tag "hide-input"): how a figure is drawn is seldom what a reader came for.
FOLDED_LINES = 30
WIDTH = 78
CELLS = 45

#: Rules that only warn. A rule that every notebook obeys is taken out of here, and then fails the lint.
ONLY_WARN = frozenset({"cells", "width", "figure badge", "table badge", "golf", "english"})

_FIGURES = {"figure", "subplots", "subplot_mosaic"}
# Only where nothing but a rate can be meant: a unit, "a", what it is counted per, and the end of the phrase.
_A_FOR_PER = re.compile(
    r"\b(?:nats|bits|bytes|[KMG]B|G?FLOPs) an? (?:answer|byte|key|layer|problem|query|second|seed|step|token)"
    r"(?=[.,;:)\]\"'*]|$| and\b)",
    re.MULTILINE,
)


def style_findings(cells: Sequence[Mapping[str, Any]]) -> list[tuple[int | None, str, str]]:
    """(cell or None, rule, message) of a notebook's cells; a rule that many cells break is one finding."""
    found: list[tuple[int | None, str, str]] = []
    wide: dict[int, int] = {}
    bare: dict[str, list[int]] = {"figure badge": [], "table badge": []}
    for position, cell in enumerate(cells, start=1):
        source = "".join(cell["source"])
        english = _A_FOR_PER.search(source)
        if english:
            message = f"says {english[0]!r}; a rate has 'per' between its units"
            found.append((position, "english", message))
        if cell["cell_type"] != "code":
            continue
        lines = sum(bool(line.strip()) for line in source.splitlines())
        folded = "hide-input" in (cell.get("metadata", {}).get("tags") or [])
        if folded and not re.search(r"\bplt\.", source):
            found.append((position, "folded", "is folded away but draws nothing; only plotting is folded"))
        if lines > (FOLDED_LINES if folded else CODE_LINES):
            most = f"{FOLDED_LINES} of a folded figure" if folded else str(CODE_LINES)
            message = f"has {lines} lines of code; at most {most} can be read at a glance"
            found.append((position, "lines", message))
        if count := sum(len(line) > WIDTH for line in source.splitlines()):
            wide[position] = count
        tree = parsed(source)
        found += [(position, "golf", message) for message in _golf(tree)]
        for rule in _without_badge(tree):
            bare[rule].append(position)
    if wide:
        where, count = _cells(list(wide)), sum(wide.values())
        message = (
            f"{count} lines of code are wider than {WIDTH} characters, which the exported page cuts: {where}"
        )
        found.append((None, "width", message))
    if where := _cells(bare["figure badge"]):
        message = f"figures without nb.badge(fig, ...), which says whether they are live or shipped: {where}"
        found.append((None, "figure badge", message))
    if where := _cells(bare["table badge"]):
        message = f"tables without badge=..., which says whether they are live or shipped: {where}"
        found.append((None, "table badge", message))
    if len(cells) > CELLS:
        message = f"{len(cells)} cells; about forty can be read in a sitting, at most {CELLS}"
        found.append((None, "cells", message))
    return found


def parsed(source: str) -> ast.Module:
    """The syntax tree of a cell; magics are left out, and what is no Python is empty."""
    # Magics are not Python; the rest of the cell still is.
    code = "\n".join("pass" if re.match(r"\s*[%!?]", line) else line for line in source.splitlines())
    try:
        return ast.parse(code)
    except SyntaxError:
        return ast.Module([], [])


def called(call: ast.Call) -> str:
    """The last name of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _without_badge(tree: ast.Module) -> Iterator[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {called(call) for call in calls}
    if "badge" not in names and any(called(call) in _FIGURES and _of_pyplot(call) for call in calls):
        yield "figure badge"
    if any(
        called(call) == "show_table"
        and len(call.args) < 4
        and not any(each.arg in ("badge", None) for each in call.keywords)
        for call in calls
    ):
        yield "table badge"


def _of_pyplot(call: ast.Call) -> bool:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id in ("plt", "pyplot")


def _golf(tree: ast.Module) -> Iterator[str]:
    last = tree.body[-1] if tree.body else None
    for node in ast.walk(tree):
        # The value of a cell's last expression is displayed.
        if isinstance(node, ast.Expr) and node is not last and isinstance(node.value, _COMPREHENSIONS):
            yield "runs a comprehension for its side effect; write a loop"
        if isinstance(node, (ast.For, ast.comprehension)) and not _names_only(node.target):
            yield f"loops over {ast.unparse(node.target)!r}; loop over a name and assign inside"
        if isinstance(node, ast.Call):
            for each in node.keywords:
                if each.arg is None and _could_be_keywords(each.value):
                    yield f"unpacks {ast.unparse(each.value)[:40]!r} where keywords serve"


_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)


def _names_only(target: ast.expr) -> bool:
    return not any(isinstance(node, (ast.Attribute, ast.Subscript)) for node in ast.walk(target))


def _could_be_keywords(value: ast.expr) -> bool:
    return isinstance(value, ast.Dict) and all(
        isinstance(key, ast.Constant)
        and isinstance(key.value, str)
        and key.value.isidentifier()
        and not keyword.iskeyword(key.value)
        for key in value.keys
    )


def _cells(positions: Sequence[int]) -> str:
    if not positions:
        return ""
    return f"cell{'s' * (len(positions) > 1)} {', '.join(map(str, positions))}"
