"""An executed notebook as one HTML page that needs no network, no script and no font of its own."""

from __future__ import annotations

import copy
import html
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from bs4 import BeautifulSoup
from jinja2 import pass_context
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import (
    IPythonRenderer,
    MarkdownWithMath,
    MathBlockParser,
    MathInlineParser,
)
from traitlets.config import Config

from dslib.notebook.style import INK
from dslib.runs.files import write_atomic
from dslib.suite.mathml import FormulaError, to_mathml
from dslib.suite.page import STYLE, TEMPLATE

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
NEEDS_CARE = re.compile(
    r"<(?:script|link|iframe|object|embed|base|meta|img|video|audio|source|style|svg|input|form)\b|\bbackground=",
    re.IGNORECASE,
)
Link = tuple[str, str]  # (title, address)
Heading = tuple[int, str, str, str]  # (level, id, plain text, markup)


class ExportError(ValueError):
    """A notebook that cannot become a faithful page; the message names the cell and the cause."""


def export_html(
    notebook_path: str | Path,
    html_path: str | Path,
    previous: Link | None = None,
    following: Link | None = None,
) -> None:
    """Write the executed notebook as one self-contained page; it appears whole or not at all.

    Formulae of Markdown cells and outputs become MathML, figures are inline SVG, widgets are what
    they showed last. ``previous`` and ``following``, as (title, address), are linked at the end.

    Raises FileNotFoundError for a missing notebook; ExportError, naming the cell, for a formula
    that cannot be rendered, an image that is not in the notebook, or a file that is no notebook.
    """
    source, target = Path(notebook_path), Path(html_path)
    if not source.is_file():
        raise FileNotFoundError(f"there is no notebook {source}")
    try:
        notebook = nbformat.read(source, as_version=4)
    except Exception as error:  # nbformat raises json, validation and its own errors
        raise ExportError(f"{source} is not a notebook: {error}") from error
    try:
        page = render_page(notebook, source.stem, previous, following)
    except FormulaError as error:
        raise ExportError(f"{source.name}: {error}") from error
    write_atomic(target, page)


def render_page(
    notebook: Any, name: str = "notebook", previous: Link | None = None, following: Link | None = None
) -> str:
    """The page of ``notebook`` as text; ``name`` is its title when it has no heading."""
    exporter = OfflineExporter()
    body, _ = exporter.from_notebook_node(_with_static_outputs(notebook))
    title = next((text for level, _, text, _ in exporter.headings if level == 1), name)
    parts = {
        "@TITLE@": html.escape(title),
        "@STYLE@": STYLE,
        "@CONTENTS@": _contents(exporter.headings),
        "@LINKS@": _links(previous, following),
    }
    # Only the template's own marks: a cell may well contain such text.
    head, mark, rest = body.partition("<main>")
    for key in ("@TITLE@", "@STYLE@", "@CONTENTS@"):
        head = head.replace(key, parts[key])
    before, _, after = rest.rpartition("@LINKS@")
    return head + mark + exporter.put_figures_back(before) + parts["@LINKS@"] + after


class OfflineExporter(HTMLExporter):
    """nbconvert's exporter with our template, MathML instead of MathJax, and no scripts."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.raw_template = TEMPLATE
        self.headings: list[Heading] = []
        self._figures: list[str] = []
        self._mark = uuid.uuid4().hex  # no cell can hold it; it never reaches the page

    @property
    def default_config(self) -> Config:
        kinds = [
            "text/html",
            "text/markdown",
            "image/svg+xml",
            "image/png",
            "image/jpeg",
            "text/latex",
            "text/plain",
        ]
        config = Config({"NbConvertBase": {"display_data_priority": kinds}})
        inherited = super().default_config.copy()
        inherited.merge(config)
        return inherited

    def default_filters(self) -> Iterator[tuple[str, Any]]:
        yield from super().default_filters()
        yield "inline_svg", self._inline_svg
        yield "static_html", _static_html

    @pass_context
    def markdown2html(self, context: Any, source: str) -> str:
        """Markdown with its formulae as MathML; nbconvert calls it for cells and outputs alike."""
        cell = context.get("cell", {})
        output = context.get("output")
        renderer = _Renderer(escape=False, attachments=cell.get("attachments", {}), headings=self.headings)
        renderer.in_output = output is not None and cell.get("cell_type") == "code"
        try:
            markup = MarkdownWithMath(renderer, block=_Blocks(), inline=_Inlines(hard_wrap=False)).render(
                source
            )
        except FormulaError as error:
            raise FormulaError(f"cell {_excerpt(cell)}: {error}") from error
        return _static_html(markup, f"cell {_excerpt(cell)}")

    def _inline_svg(self, source: str) -> str:
        """A mark instead of the figure: nbconvert parses the page, which is slow and changes SVG."""
        self._figures.append(_clean_svg(source, f"f{len(self._figures)}"))
        return f"<!--{self._mark} {len(self._figures) - 1}-->"

    def put_figures_back(self, body: str) -> str:
        """The page's body with the figures where their marks stood."""
        return re.sub(rf"<!--{self._mark} (\d+)-->", lambda m: self._figures[int(m[1])], body)


class _Blocks(MathBlockParser):
    """Display formulae begin at the start of a line, or ``$$`` in code would be taken for one."""

    SPECIFICATION = {  # noqa: RUF012
        **MathBlockParser.SPECIFICATION,
        "multiline_math": r"^ {0,3}(?:" + MathBlockParser.MULTILINE_MATH + r")[ \t]*$",
    }


class _Inlines(MathInlineParser):
    """An inline formula ends in its paragraph and holds no backtick."""

    SPECIFICATION = {  # noqa: RUF012
        **MathInlineParser.SPECIFICATION,
        "inline_math_tex": r"(?<![$\\])\$(?P<math_inline_tex>(?:\\[\s\S]|[^$`\\])+?)\$(?!\$)",
    }


class _Renderer(IPythonRenderer):
    def __init__(self, *, headings: list[Heading], **options: Any) -> None:
        super().__init__(**options)
        self.headings = headings
        self.in_output = False

    def inline_math(self, body: str) -> str:
        return to_mathml(body)

    def block_math(self, body: str) -> str:
        return to_mathml(body, display=True)

    def latex_environment(self, name: str, body: str) -> str:
        return to_mathml(f"\\begin{{{name}}}{body}\\end{{{name}}}", display=True)

    def heading(self, text: str, level: int, **attributes: Any) -> str:
        """A heading with an id of its own, remembered for the table of contents."""
        soup = BeautifulSoup(text, "html.parser")
        plain = " ".join(soup.get_text().split())
        anchor = re.sub(r"[^\w-]+", "-", plain.lower()).strip("-") or "section"
        taken = {a for _, a, _, _ in self.headings}
        numbered = (anchor if n == 1 else f"{anchor}-{n}" for n in range(1, len(taken) + 2))
        unique = next(candidate for candidate in numbered if candidate not in taken)
        if not self.in_output:
            self.headings.append((level, unique, plain, text))
            place = html.escape(unique)
            link = f'<a class="anchor-link" href="#{place}" aria-label="link to this section">¶</a>'
            return f'<h{level} id="{place}">{text}{link}</h{level}>\n'
        return f"<h{level}>{text}</h{level}>\n"

    def block_mermaidjs(self, code: str) -> str:
        return f"<pre>{html.escape(code)}</pre>"  # a drawing would need a script

    def paragraph(self, text: str) -> str:
        """Display formulae are blocks: the paragraph ends before one and begins anew after it."""
        if '<div class="equation">' not in text:
            return super().paragraph(text)
        parts = re.split(r'(<div class="equation">.*?</div>)', text, flags=re.DOTALL)
        pieces = (part if i % 2 else f"<p>{part.strip()}</p>" for i, part in enumerate(parts) if part.strip())
        return "\n".join(pieces) + "\n"


def _excerpt(cell: Any) -> str:
    first = next((line for line in str(cell.get("source", "")).splitlines() if line.strip()), "")
    return f"{first[:60]!r}"


def _static_html(markup: str, where: str = "an output") -> str:
    """The markup without scripts and without anything that a browser would fetch."""
    if not NEEDS_CARE.search(markup):
        return markup
    soup = BeautifulSoup(markup, "html.parser")
    for element in soup.find_all(["script", "link", "iframe", "object", "embed", "base", "meta"]):
        element.decompose()
    for element in soup.find_all("style"):
        if re.search(r"@import|url\(\s*['\"]?(?!data:|#)", element.get_text()):
            element.decompose()
    for element in soup.find_all(True):
        for attribute in ("src", "srcset", "poster", "xlink:href", "background"):
            address = str(element.get(attribute) or "")
            if not address or address.startswith(("data:", "#")):
                continue
            if element.name == "img":
                raise ExportError(
                    f"{where}: the image {address!r} is not in the notebook; attach it to the cell or draw it"
                )
            del element[attribute]
    return str(soup)


def _clean_svg(source: str, prefix: str) -> str:
    """A figure fit to stand in the page: the page's ink, ids of its own, no prolog or metadata."""
    svg = re.sub(
        r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>", "", source, flags=re.DOTALL
    )
    svg = re.sub(r"<script\b.*?</script>|<style type=\"text/css\">\*\{.*?</style>", "", svg, flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor")
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)
    return re.sub(r">\s+<", "><", svg).strip()


def _with_static_outputs(notebook: Any) -> Any:
    """A copy whose widgets are the outputs they held and whose streams show their final text."""
    changed = copy.deepcopy(notebook)
    states = changed.metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    for cell in changed.cells:
        if cell.cell_type != "code":
            continue
        kept: list[Any] = []
        for output in cell.outputs:
            if WIDGET_VIEW in output.get("data", {}):
                held = list(_held_outputs(states, output["data"][WIDGET_VIEW].get("model_id", "")))
                if not held and set(output["data"]) - {WIDGET_VIEW, "text/plain"}:
                    held = [output]  # it brings a picture of itself
                kept += held
            elif output.output_type == "stream" and kept and kept[-1].get("name") == output.name:
                kept[-1].text += output.text
            else:
                kept.append(output)
        for output in kept:
            if output.output_type == "stream":  # a line rewritten with \r shows its last state
                output.text = re.sub(r"[^\n]*\r(?!\n)", "", output.text)
            elif output.output_type == "execute_result":  # one way of showing for both
                output.output_type = "display_data"
                output.pop("execution_count", None)
        cell.outputs = kept
    return changed


def _held_outputs(states: dict[str, Any], model: str) -> Iterator[Any]:
    """The outputs of all Output widgets inside the widget ``model``, in order."""
    state = states.get(model, {}).get("state", {})
    for output in state.get("outputs", ()):
        yield nbformat.from_dict(output)
    for child in state.get("children", ()):
        yield from _held_outputs(states, str(child).removeprefix("IPY_MODEL_"))


def _contents(headings: list[Heading]) -> str:
    entries = ""
    for level, anchor, _, markup in headings:
        if level in {2, 3}:
            shown = re.sub("</?a[^>]*>", "", markup)  # a link cannot stand in a link
            entries += f'<li class="level-{level}"><a href="#{html.escape(anchor)}">{shown}</a></li>'
    if not entries:
        return '<nav class="contents"></nav>'
    folded = f"<details open><summary>Contents</summary><ol>{entries}</ol></details>"
    return f'<nav class="contents" aria-label="contents">{folded}</nav>'


def _links(previous: Link | None, following: Link | None) -> str:
    if previous is None and following is None:
        return ""
    ends = [
        f'<a href="{html.escape(link[1])}">{html.escape(text.format(link[0]))}</a>'
        if link
        else "<span></span>"
        for link, text in ((previous, "← {}"), (following, "{} →"))
    ]
    return f"<footer>{''.join(ends)}</footer>"
