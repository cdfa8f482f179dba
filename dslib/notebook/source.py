"""Show a library function's source inside a notebook, highlighted for both themes."""

from __future__ import annotations

import ast
import html
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from dslib.notebook.environment import show

# JupyterLab's own variables, so that the colours follow its theme; the exported page defines
# the same ones for light and dark. The fallbacks are middle tones that both can bear.
TOKEN_CSS = """\
.k,.kc,.kd,.kn,.kr,.ow{color:var(--jp-mirror-editor-keyword-color,#3a9a3a);font-weight:600}
.nb,.bp,.nc,.nf,.fm{color:var(--jp-mirror-editor-def-color,#4a86e8)}
.kt,.nd{color:var(--jp-mirror-editor-builtin-color,#4a9a6a)}
.s,.s1,.s2,.sa,.sb,.sc,.se,.sh,.si,.sr,.ss,.sx,.sd,.dl{color:var(--jp-mirror-editor-string-color,#d0553e)}
.c,.c1,.ch,.cm,.cp,.cs{color:var(--jp-mirror-editor-comment-color,#5f8f8f);font-style:italic}
.m,.mf,.mi,.mb,.mh,.mo,.il{color:var(--jp-mirror-editor-number-color,#3a9a6a)}
.o{color:var(--jp-mirror-editor-operator-color,#a860e0)}
"""


def token_css(scope: str) -> str:
    """The highlighting rules, limited to what stands inside the CSS selector ``scope``."""
    rules = []
    for line in TOKEN_CSS.splitlines():
        selectors, body = line.split("{", 1)
        rules.append(",".join(f"{scope} {s}" for s in selectors.split(",")) + "{" + body)
    return "\n".join(rules)


def show_source(
    function_or_class: Callable[..., Any] | type,
    lines: tuple[int, int] | None = None,
    docstring: bool = False,
) -> None:
    """Display the source of a function or class with the name of its module.

    ``lines=(first, last)`` keeps those lines of what would be shown, counted from 1;
    ``docstring=True`` keeps the docstrings. Raises TypeError for an object without Python source
    and ValueError for lines outside it.
    """
    found = inspect.unwrap(function_or_class)
    name = getattr(found, "__qualname__", repr(function_or_class))
    try:
        source = textwrap.dedent(inspect.getsource(found))
    except (TypeError, OSError) as error:
        raise TypeError(
            f"function_or_class={name} has no Python source to show; give a function or class of dslib"
        ) from error
    if not docstring:
        source = _without_docstrings(source)
    rows = source.rstrip().splitlines()
    where = f"{found.__module__}.{name}"
    if lines is not None:
        first, last = lines
        if not 1 <= first <= last <= len(rows):
            raise ValueError(f"lines={lines} lies outside the source; {where} has the lines 1 to {len(rows)}")
        rows = textwrap.dedent("\n".join(rows[first - 1 : last])).splitlines()
        where += f", lines {first} to {last}"
    text = "\n".join(rows)
    show(f"# {where}\n{text}", html=_as_html(text, where))


def _without_docstrings(source: str) -> str:
    """The source without the docstrings of its functions and classes, and nothing else changed."""
    rows = source.splitlines()
    drop: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        # A body of nothing but a docstring would become empty, which is no longer Python.
        if len(node.body) < 2 or ast.get_docstring(node, clean=False) is None:
            continue
        start, end = node.body[0].lineno, node.body[0].end_lineno or node.body[0].lineno
        drop.update(range(start, end + 1))
        if end < len(rows) and not rows[end].strip():
            drop.add(end + 1)
    return "\n".join(row for i, row in enumerate(rows, 1) if i not in drop)


def _as_html(text: str, where: str) -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    code = highlight(text, PythonLexer(), HtmlFormatter(nowrap=True)).rstrip("\n")
    frame = "border-left:3px solid #8886;padding:0.2em 0 0.2em 0.9em;margin:0.3em 0"
    return (
        f"<style>{token_css('.dslib-source')}</style>"
        f'<div class="dslib-source" style="{frame}">'
        f'<div style="font:85% monospace;opacity:0.75">{html.escape(where)}</div>'
        '<pre style="margin:0.3em 0 0;background:none;overflow-x:auto;white-space:pre;font-size:90%">'
        f"{code}</pre></div>"
    )
