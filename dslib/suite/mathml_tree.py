"""Repairs on the tree that latex2mathml builds, until browsers draw it as TeX would."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from xml.etree.ElementTree import Element, SubElement


class Broken(Exception):
    """Why a formula cannot be rendered; the caller adds the formula."""


ARITY = {"mfrac": 2, "msub": 2, "msup": 2, "msubsup": 3, "munder": 2, "mover": 2, "munderover": 3, "mroot": 2}
LIMITS = {"max", "min", "sup", "inf", "lim", "det", "gcd", "Pr", *"∑∏⋃⋂⨁⨂⋁⋀∐"}
ACCENTS = set("^~¯ˉ˙¨→ˆ˜\u0302\u02c7\u02d8\u00b4`")
FENCES = set("⌊⌋⌈⌉⟨⟩‖")
OPENING = set("([{⌊⌈⟨")
SPACES = {"negativethinmathspace": "-0.167em", "negativemediummathspace": "-0.222em"}
TEXT_STYLES = {
    "bold": "font-weight:bold",
    "italic": "font-style:italic",
    "monospace": "font-family:monospace",
    "sans-serif": "font-family:sans-serif",
}
# variant: first code point of A-Z, a-z, capital Greek, small Greek, digits
ALPHABETS: dict[str, tuple[int, int, int, int, int]] = {
    "bold": (0x1D400, 0x1D41A, 0x1D6A8, 0x1D6C2, 0x1D7CE),
    "italic": (0x1D434, 0x1D44E, 0x1D6E2, 0x1D6FC, 0),
    "bold-italic": (0x1D468, 0x1D482, 0x1D71C, 0x1D736, 0x1D7CE),
    "script": (0x1D49C, 0x1D4B6, 0, 0, 0),
    "fraktur": (0x1D504, 0x1D51E, 0, 0, 0),
    "double-struck": (0x1D538, 0x1D552, 0, 0, 0x1D7D8),
    "sans-serif": (0x1D5A0, 0x1D5BA, 0, 0, 0x1D7E2),
    "monospace": (0x1D670, 0x1D68A, 0, 0, 0x1D7F6),
}
HOLES = {  # letters that had a code point before the mathematical alphabets came
    "italic": {"h": "ℎ"},
    "script": dict(zip("BEFHILMRego", "ℬℰℱℋℐℒℳℛℯℊℴ", strict=True)),
    "fraktur": dict(zip("CHIRZ", "ℭℌℑℜℨ", strict=True)),
    "double-struck": dict(zip("CHNPQRZ", "ℂℍℕℙℚℝℤ", strict=True)),
}


def repair(tree: Element, display: bool, limit_names: set[str], tag_mark: str, gather_mark: str) -> None:
    """Change ``tree`` in place; ``limit_names`` take their subscripts below in a display.

    Raises Broken where the tree shows that something was not understood.
    """
    for element in tree.iter():
        element.text = html.unescape(element.text) if element.text else None
        _check(element)
        _attributes(element)
        _symbol(element)
    _tables(tree, tag_mark, gather_mark)
    if display:
        _limits(tree, LIMITS | limit_names)
    _function_spacing(tree)
    _merge_upright(tree)


def _check(element: Element) -> None:
    if element.tag == "mtext" and element.text:
        element.text = re.sub(r"\\([_%&#${} ])", r"\1", element.text)
    text = element.text or ""
    if "\\" in text and text != "\\":
        raise Broken(f"{text} was not understood")
    wanted = ARITY.get(element.tag)
    if wanted is not None and len(element) != wanted:
        raise Broken(f"an argument is missing: <{element.tag}> has {len(element)} of {wanted} parts")
    if element.tag == "mo" and not text and not len(element) and not element.get("fence"):
        raise Broken("the name of an operator is not plain text")
    if element.get("linebreak") == "newline":
        raise Broken("a line break stands outside aligned, cases or a matrix")


def _attributes(element: Element) -> None:
    """Say with CSS or Unicode what MathML Core no longer says with attributes."""
    variant = element.attrib.pop("mathvariant", None)
    if variant and element.tag in {"mtext", "ms"}:
        _style(element, ";".join(css for name, css in TEXT_STYLES.items() if name in variant))
    elif variant and element.text:
        if variant == "normal" and element.tag == "mi" and len(element.text) == 1:
            element.set("mathvariant", "normal")
        else:
            element.text = "".join(_letter(c, variant) for c in element.text)
    align = element.attrib.pop("columnalign", None)
    if align and element.tag == "mtd":
        _style(element, f"text-align:{align}")
    element.attrib.pop("columnspacing", None)
    element.attrib.pop("rowspacing", None)
    if element.get("width") in SPACES:
        element.set("width", SPACES[element.attrib["width"]])
    if element.tag == "menclose":
        if element.attrib.pop("notation", "box") != "box":
            raise Broken("only \\boxed encloses; strike-outs are not supported")
        element.tag = "mrow"
        _style(element, "border:1px solid;padding:0.2em")


def _symbol(element: Element) -> None:
    """Right the symbols that latex2mathml gives the wrong element or code point."""
    text = element.text or ""
    if element.tag == "mi" and text == "~":
        element.tag, element.text = "mo", "∼"
    elif element.tag == "mi" and (text in FENCES or text == "|"):
        element.tag = "mo"
        element.set("stretchy", "false")
    elif element.tag == "mi" and text in {":", ";"}:
        element.tag = "mo"
    elif element.tag == "mo" and text in {"|", "‖"} and not {"stretchy", "minsize"} & set(element.keys()):
        element.set("stretchy", "false")
    elif element.tag == "mo" and len(element):  # \mathop: an operator holds text only
        element.text = html.unescape("".join(element.itertext()))
        for child in list(element):
            element.remove(child)
        if element.text.replace("\u2009", "").isalpha():
            element.set("class", "mathop")
    elif element.tag == "mover" and len(element) == 2 and element[1].tag == "mo":
        accent = html.unescape(element[1].text or "")
        if accent == "―":  # \overline
            element.remove(element[1])  # many fonts do not stretch a bar; a border always fits
            element.tag = "mrow"
            _style(element, "border-top:0.06em solid;padding-top:0.1em")
        elif accent in ACCENTS:
            element.set("accent", "true")


def _letter(character: str, variant: str) -> str:
    held = HOLES.get(variant, {}).get(character)
    starts = ALPHABETS.get(variant)
    if held or starts is None:
        return held or character
    for start, first, count in zip(starts, "AaΑα0", (26, 26, 25, 25, 10), strict=True):
        if start and 0 <= (offset := ord(character) - ord(first)) < count:
            return chr(start + offset)
    return character


def _style(element: Element, css: str) -> None:
    if css:
        element.set("style", ";".join(filter(None, (element.get("style"), css))))


def _tables(tree: Element, tag_mark: str, gather_mark: str) -> None:
    for table in tree.iter("mtable"):
        if table.get("displaystyle") == "true":
            table.set("class", "aligned")
        for row in table.findall("mtr"):
            for cell in row.findall("mtd"):
                for parent in list(cell.iter()):
                    for child in list(parent):
                        text = child.text or ""
                        if child.tag != "mtext" or not text.startswith((tag_mark, gather_mark)):
                            continue
                        parent.remove(child)
                        if text.startswith(gather_mark):
                            table.set("displaystyle", "true")
                        else:
                            number = SubElement(row, "mtd", {"class": "row-tag"})
                            SubElement(number, "mtext").text = text.removeprefix(tag_mark)


def _limits(tree: Element, names: set[str]) -> None:
    r"""Below in a display: the subscript of \sum, \max and of starred operators."""
    for element in tree.iter():
        if element.tag in {"msub", "msubsup"} and (
            (element[0].text or "") in names or element[0].get("class") == "mathop"
        ):
            element.tag = "munder" if element.tag == "msub" else "munderover"


def _is_function(element: Element) -> bool:
    """Whether this is a named operator, or one with a subscript or limits."""
    if element.tag in {"msub", "msup", "msubsup", "munder", "munderover"}:
        return _is_function(element[0])
    text = (element.text or "").replace("\u2009", "").replace("\u2006", "")
    return element.tag in {"mi", "mo"} and len(text) > 1 and text.isalpha() and text.isascii()


def _name_of(element: Element) -> Element:
    while len(element):
        element = element[0]
    return element


def _function_spacing(tree: Element) -> None:
    """A thin space around log, max or clip, as TeX sets it; none before its bracket."""
    for parent in list(tree.iter()):
        if parent.tag not in {"mrow", "mtd", "mstyle", "math", "mpadded"}:
            continue
        children = list(parent)
        for child in children:
            if _is_function(child):
                name = _name_of(child)
                name.tag = "mi"
                name.attrib.pop("movablelimits", None)
        spaced: list[Element] = []
        for before, child, after in _with_neighbours(children):
            space = Element("mspace", {"width": "0.167em"})
            if _is_function(child) and before is not None and _ends_a_term(before):
                spaced.append(space)
            spaced.append(child)
            opens = (
                after is not None and (_name_of(after).text or "") in OPENING and after.tag in {"mo", "mrow"}
            )
            if _is_function(child) and after is not None and not opens and after.tag not in {"mo", "mspace"}:
                spaced.append(space)
        if len(spaced) != len(children):
            parent[:] = spaced


def _with_neighbours(items: list[Element]) -> Iterator[tuple[Element | None, Element, Element | None]]:
    padded = [None, *items, None]
    for i, item in enumerate(items):
        yield padded[i], item, padded[i + 2]


def _ends_a_term(element: Element) -> bool:
    if element.tag == "mo":
        return (element.text or "") in {")", "]", "}"}
    return element.tag not in {"mspace", "mtext"} and not _is_function(element)


def _merge_upright(tree: Element) -> None:
    r"""One identifier for \mathrm{op}: latex2mathml makes a letter each."""
    for parent in list(tree.iter()):
        if len(parent) < 2 or parent.tag != "mrow":
            continue
        if all(
            c.tag == "mi" and c.get("mathvariant") == "normal" and (c.text or "").isalpha() for c in parent
        ):
            word = "".join(c.text or "" for c in parent)
            for child in list(parent):
                parent.remove(child)
            SubElement(parent, "mi").text = word
