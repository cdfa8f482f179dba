"""LaTeX formulae as MathML, so that an exported page needs neither a network nor a script.

latex2mathml does the conversion. Around it stand the checks that it lacks (a command or an
environment that it does not know would come out as wrong text, silently) and the repairs that
browsers need, which draw MathML Core: no ``mathvariant``, no ``columnalign``, no ``menclose``.
"""

from __future__ import annotations

import html
import re
from functools import cache
from xml.etree import ElementTree

from dslib.suite.mathml_tree import Broken, repair


class FormulaError(ValueError):
    """A formula that cannot be shown faithfully; the message holds the formula."""


ALIGNED = {"align", "align*", "aligned", "split", "eqnarray", "eqnarray*", "flalign", "flalign*"}
CENTRED = {"gather", "gather*", "gathered", "multline", "multline*"}
PLAIN = {"equation", "equation*", "displaymath", "math"}
GRIDS = {"matrix", "pmatrix", "bmatrix", "Bmatrix", "vmatrix", "Vmatrix", "smallmatrix"}
ENVIRONMENTS = {*ALIGNED, *CENTRED, *PLAIN, *GRIDS, "cases", "dcases", "array", "substack"}

# Commands that latex2mathml leaves out or gets wrong, said in a way it gets right.
REWRITES = (
    (re.compile(r"(?<!\\)%[^\n]*"), ""),
    (re.compile(r"\\(?:label|ref)\s*\{[^{}]*\}"), ""),
    (re.compile(r"\\(?:nonumber|notag)\b"), ""),
    (re.compile(r"\\\\\s*\[[^\][]*(?:pt|em|ex|mm|cm)\]"), r"\\\\ "),
    (re.compile(r"\\math(?:ds|bbm)(?![A-Za-z])"), r"\\mathbb"),
    (re.compile(r"\\hspace\*"), r"\\hspace"),
    (re.compile(r"(\\operatorname\*?\s*\{)\s*\\(?:math|text)(?:rm|sf|bf)?\s*\{([^{}]*)\}\s*\}"), r"\1\2}"),
    (re.compile(r"\\arg(?![A-Za-z])"), r"\\operatorname{arg}"),
    (re.compile(r"\\not\s*="), r"\\neq "),
    (re.compile(r"\\not\s*\\in(?![A-Za-z])"), r"\\notin "),
    (re.compile(r"(\\[bB]igg?[lrm]?)\s*\\(?:\||[lr]?Vert(?![A-Za-z]))"), "\\1‖"),
    (re.compile(r"(\\[bB]igg?[lrm]?)\s*\\[lr]?vert(?![A-Za-z])"), "\\1|"),
    (re.compile(r"\\([lr])vert(?![A-Za-z])"), r"\\\1vert "),
)
SPACES_IN_NAMES = re.compile(r"\\[,;:! ]|~")
TEXT_GROUP = re.compile(r"\\(text(?:rm|bf|it)?|mbox)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
COMMAND = re.compile(r"\\([A-Za-z]+\*?|.)", re.DOTALL)
BEGIN_OR_END = re.compile(r"\\(begin|end)\s*\{([^{}]*)\}")
#: ``\begin{aligned}[t]`` says where the block stands on its line, and nothing in a formula of its own.
POSITION = re.compile(r"(\\begin\s*\{(?:aligned|gathered|split)\})\s*\[[tbc]\]")
OPENING_BRACKET = re.compile(r"(\\begin\s*\{[^{}]*\})(?=\s*\[)")
TAG = re.compile(r"\\tag(\*?)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")

TAG_MARK = "\ue000"  # private characters that cannot stand in a formula
GATHER_MARK = "\ue001"


def to_mathml(latex: str, display: bool = False) -> str:
    r"""The formula ``latex`` (without its dollar signs) as one MathML element.

    A ``\tag{3}`` of a display formula is kept at the right edge; rows of ``align`` keep theirs.

    Raises FormulaError, with the formula, for unbalanced braces or environments, an unknown
    command or environment, a missing argument, and whatever else could only be shown wrong.
    """
    source = latex.strip()
    if not source:
        raise FormulaError("the formula is empty: write something between the dollar signs")
    try:
        _check_balance(source)
        prepared, tag = _prepare(source, display)
        names = _limit_names(prepared)
        prepared = prepared.replace("\\operatorname*", "\\operatorname")
        _check_commands(prepared)
        tree = _convert(prepared, display)
        repair(tree, display, names, TAG_MARK, GATHER_MARK)
    except Broken as error:
        raise FormulaError(f"cannot render the formula ${source}$: {error}") from error
    tree.set("alttext", source)
    markup = ElementTree.tostring(tree, encoding="unicode", short_empty_elements=False)
    if not display:
        return markup
    number = f'<span class="equation-tag">{html.escape(tag)}</span>' if tag else ""
    return f'<div class="equation">{markup}{number}</div>'


def _check_balance(source: str) -> None:
    """Raise Broken for braces or environments that do not pair up."""
    depth = 0
    for character in re.sub(r"\\.", "", re.sub(r"\\\\", "", source), flags=re.DOTALL):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            raise Broken("a closing brace has no opening one")
    if depth:
        raise Broken(f"{depth} opening brace(s) are not closed")
    stack: list[str] = []
    for which, name in BEGIN_OR_END.findall(source):
        if name not in ENVIRONMENTS:
            raise Broken(
                f"the environment {name!r} is not supported; use one of {', '.join(sorted(ENVIRONMENTS))}"
            )
        if which == "begin":
            stack.append(name)
        elif not stack or stack.pop() != name:
            raise Broken(f"\\end{{{name}}} has no \\begin{{{name}}}")
    if stack:
        raise Broken(f"\\begin{{{stack[-1]}}} is not closed")
    outside = re.split(r"\\(?:begin|end)\s*\{[^{}]*\}", source)
    if "\\begin" not in source and re.search(r"(?<!\\)&", outside[0]):
        raise Broken("an & stands outside aligned, cases or a matrix")


def _prepare(source: str, display: bool) -> tuple[str, str]:
    """The formula in latex2mathml's dialect, and its number (empty when it has none)."""
    prepared = TEXT_GROUP.sub(_split_text, source)
    for pattern, replacement in REWRITES:
        prepared = pattern.sub(replacement, prepared)
    prepared = re.sub(
        r"\\operatorname(\*?)\s*\{([^{}]*)\}",
        lambda m: f"\\operatorname{m[1]}{{{SPACES_IN_NAMES.sub(chr(0x2009), m[2]).strip()}}}",
        prepared,
    )
    tags = list(TAG.finditer(prepared))
    if tags and not display:
        raise Broken("\\tag numbers a display formula; set this one between double dollar signs")
    outer = ""
    for match in reversed(tags):
        shown = match[2] if match[1] else f"({match[2]})"
        open_rows = 0
        for which, name in BEGIN_OR_END.findall(prepared[: match.start()]):
            if name in ALIGNED | CENTRED:
                open_rows += 1 if which == "begin" else -1
        if open_rows:
            prepared = f"{prepared[: match.start()]}\\text{{{TAG_MARK}{shown}}}{prepared[match.end() :]}"
        elif outer:
            raise Broken("more than one \\tag stands outside the rows of an environment")
        else:
            outer, prepared = shown, prepared[: match.start()] + prepared[match.end() :]
    prepared = POSITION.sub(r"\1", prepared)
    # The converter takes a bracket for the option of an environment; an empty group keeps it in the formula.
    return OPENING_BRACKET.sub(r"\1{}", BEGIN_OR_END.sub(_environment, prepared)), outer


def _split_text(match: re.Match[str]) -> str:
    r"""``\text{if $x$ holds}`` as text, formula, text: latex2mathml prints the dollar signs."""
    command, body = match[1], re.sub(r"(?<!\\)[{}]", "", match[2])  # inner braces only group
    parts = re.split(r"(?<!\\)\$", body)
    if len(parts) % 2 == 0:
        raise Broken(f"a dollar sign in \\{command}{{{body}}} has no partner")
    pieces = [part if i % 2 else f"\\{command}{{{part}}}" for i, part in enumerate(parts) if part]
    return " ".join(pieces)


def _environment(match: re.Match[str]) -> str:
    which, name = match[1], match[2]
    if name in PLAIN:
        return ""
    if name in ALIGNED:
        return f"\\{which}{{align*}}"
    if name in CENTRED:
        return f"\\begin{{matrix}}\\text{{{GATHER_MARK}}}" if which == "begin" else "\\end{matrix}"
    if name == "dcases":
        return f"\\{which}{{cases}}"
    return match[0]


def _limit_names(prepared: str) -> set[str]:
    r"""Names whose subscript stands below in a display: those given with \operatorname*."""
    return set(re.findall(r"\\operatorname\*\{([^{}]*)\}", prepared))


@cache
def _known_commands() -> frozenset[str]:
    """Every command that latex2mathml converts: its constants and its table of symbols."""
    from latex2mathml import commands
    from latex2mathml.symbols_parser import parse_symbols

    known: set[str] = set(parse_symbols())
    for value in vars(commands).values():
        for item in (value,) if isinstance(value, str) else value if isinstance(value, (tuple, dict)) else ():
            known.add(item if isinstance(item, str) else "")
    # Known by name, but not to be relied on in a page: macros, links, anything with a side effect.
    known -= {
        r"\newcommand",
        r"\newenvironment",
        r"\def",
        r"\DeclareMathOperator",
        r"\href",
        r"\verb",
        r"\class",
    }
    known -= {
        r"\nolimits",
        r"\style",
        r"\unicode",
        r"\tag",
        r"\tag*",
        r"\not",
        r"\eqalignno",
        r"\math",
        r"\cases",
        r"\align",
    }
    return frozenset(known | {rf"\{c}" for c in r",:;!>{}|\%$#&_ "} | {r"\begin", r"\end"})


def _check_commands(prepared: str) -> None:
    for match in COMMAND.finditer(TEXT_GROUP.sub("", prepared)):
        name = "\\" + match[1]
        if name == "\\\n":
            raise Broken("a single backslash ends a line; a new row takes two")
        known = _known_commands()
        if name not in known and name.rstrip("*") not in known:
            hint = "write \\neq or \\notin" if name == "\\not" else "spell it with commands that are"
            raise Broken(f"the command {name} is not supported; {hint}")


def _convert(prepared: str, display: bool) -> ElementTree.Element:
    from latex2mathml.converter import Converter

    try:
        return Converter(display="block" if display else "inline").convert_to_element(prepared)
    except Exception as error:  # its errors are many small classes, often without a message
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).removesuffix(" Error").lower()
        raise Broken(f"{name} {error}".strip()) from error
