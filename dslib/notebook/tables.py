"""Tables that are readable in both themes and in the exported page."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dslib.notebook.badges import Origin, badge_text
from dslib.notebook.environment import show

if TYPE_CHECKING:
    from pandas import DataFrame

Format = str | Callable[[Any], str]
BADGE = "border:1px solid currentColor;border-radius:4px;padding:0 0.4em;opacity:0.7;white-space:nowrap"


def show_table(
    frame: DataFrame, caption: str, formats: Mapping[str, Format] | None = None, badge: Origin | None = None
) -> None:
    """Display a pandas frame with a caption, and ``badge``, where its numbers come from, behind it.

    ``formats`` gives a column a format (``".3f"`` or ``"{:.1%}"``) or a function to text. A plain
    counting index is left out. ``badge`` is what :func:`dslib.notebook.badge` takes: ``"live"``, a shipped table, or a
    dictionary of the parts of both. A frame made of shipped rows does not say so by itself: a column of live
    numbers may have been added to it.

    Raises ValueError for a format of a column that is not there, or that does not fit its
    values, and for a badge that says nothing; TypeError when ``frame`` is no frame.
    """
    if not (hasattr(frame, "columns") and hasattr(frame, "itertuples")):
        raise TypeError(f"frame is a {type(frame).__name__}; give a pandas DataFrame")
    formats = dict(formats or {})
    names = [str(c) for c in frame.columns]
    for column in formats:
        if column not in frame.columns:
            raise ValueError(f"formats names the column {column!r}; the frame has {', '.join(names)}")
    counting = frame.index.name is None and list(frame.index) == list(range(len(frame)))
    head = ([] if counting else [str(frame.index.name or "")]) + names
    body: list[list[str]] = []
    numeric = [] if counting else [False]
    for position, column in enumerate(frame.columns):
        values = frame.iloc[:, position]
        numeric.append(values.dtype.kind in "iufc")
        body.append([_cell(v, formats.get(column), column) for v in values])
    rows = [list(row) for row in zip(*body, strict=True)] if body else [[] for _ in range(len(frame))]
    if not counting:
        rows = [[str(label), *row] for label, row in zip(frame.index, rows, strict=True)]
    origin = "" if badge is None else badge_text(badge)
    plain = f"{caption} [{origin}]" if origin else caption
    show(_as_text(head, rows, numeric, plain), html=_as_html(head, rows, numeric, caption, origin))


def _cell(value: Any, form: Format | None, column: Any) -> str:
    missing = value is None or (isinstance(value, float) and value != value)
    if missing:
        return "–"
    if form is None:
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    try:
        if callable(form):
            return str(form(value))
        return form.format(value) if "{" in form else format(value, form)
    except (ValueError, TypeError) as error:
        raise ValueError(f"formats[{column!r}]={form!r} does not fit the value {value!r}: {error}") from error


def _as_html(
    head: list[str], rows: list[list[str]], numeric: list[bool], caption: str, origin: str = ""
) -> str:
    line, pad = "1px solid #8886", "padding:0.25em 0.8em"
    align = [f"text-align:{'right' if n else 'left'}" for n in numeric]
    titles = "".join(
        f'<th style="{pad};{a};border-bottom:1px solid #888">{html.escape(h)}</th>'
        for h, a in zip(head, align, strict=True)
    )
    lines = "".join(
        "<tr>"
        + "".join(
            f'<td style="{pad};{a};border-bottom:{line}">{html.escape(c)}</td>'
            for c, a in zip(row, align, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    label = f' <small style="{BADGE}">{html.escape(origin)}</small>' if origin else ""
    return (
        '<table class="dslib-table" style="border-collapse:collapse;font-variant-numeric:tabular-nums">'
        f'<caption style="caption-side:top;text-align:left;padding:0.3em 0;color:inherit">'
        f"{html.escape(caption)}{label}</caption><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"
    )


def _as_text(head: list[str], rows: list[list[str]], numeric: list[bool], caption: str) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        padded = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(cells, widths, numeric, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([caption, line(head), *map(line, rows)])
