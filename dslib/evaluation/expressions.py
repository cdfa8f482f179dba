"""Expressions: numbers read exactly, and the tuples, sets, intervals and lists that are made of them.

Numbers are compared as exact fractions: 1/2004! and 1/2006! differ, though both are 0 in floating point. The
work that an expression may cause is bounded before it is done, so nothing needs a timer, and the rules
hold in any thread.
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

#: An expression longer than this, or with a value of more bits or deeper nesting, is not read as a number.
MAX_CHARACTERS, MAX_BITS, MAX_DEPTH = 200, 50_000, 20

_TOKEN = re.compile(
    r"\s*([1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?![\d,])|\d+\.?\d*(?:[eE][+-]?\d{1,4})?|\.\d+|\\frac|\*\*|[-+*/^!%(){}])"
)
#: A fraction's digits without braces, as in \\frac12: first the one above, then the one below.
_SHORT_FRACTIONS = (
    re.compile(r"(\\frac)\s*(\d)"),
    re.compile(r"(\\frac\s*\{[^{}]*\})\s*(\d)"),
)
#: How the same sign is written elsewhere.
_SIGNS = {
    "−": "-",
    "×": "*",
    "·": "*",
    "÷": "/",
    "\\times": "*",
    "\\cdot": "*",
    "\\div": "/",
    "\\left": "",
    "\\right": "",
    "\\$": "",
    "\\%": "%",
    "\\,": "",
    "\\!": "",
    "{,}": "",
    "$": "",
}
_FRACTION = re.compile(r"\\[dt]frac(?![a-zA-Z])")
#: Quotes and dashes that word processors put in the place of the plain ones.
_QUOTES = str.maketrans({"‘": "'", "’": "'", "‚": "'", "“": '"', "”": '"', "„": '"', "′": "'"})


@dataclass(frozen=True)
class Collection:
    """Several values in order: ``opened`` and ``closed`` are ``"("``, ``"["`` or ``"{"`` and what closes it, or empty
    for a bare list. Each element is a number, another collection, or text."""

    opened: str
    closed: str
    elements: tuple[Value, ...]

    @property
    def ordered(self) -> bool:
        """Tuples and intervals are; a set is not, and neither is a bare list, which names solutions."""
        return self.opened not in ("{", "")

    def same(self, other: Collection) -> bool:
        """Equal brackets and elements; of a set and of a bare list it does not count how often one stands there."""
        if (self.opened, self.closed) != (other.opened, other.closed):
            return False
        if self.ordered:
            return len(self.elements) == len(other.elements) and all(
                map(same_value, self.elements, other.elements)
            )
        return _covers(self.elements, other.elements) and _covers(other.elements, self.elements)


Value = Fraction | Collection | str


def parse_value(text: str) -> Value:
    r"""The number, collection or text that an answer is.

    ``(0, 1)`` is a tuple or an open interval, ``[0, 1)`` an interval, ``\{1, 2\}`` and ``{1, 2}`` are sets, and
    ``1, 2`` is a bare list, of numbers only: words with commas are text. A comma stands between elements where it
    can: ``1,234`` alone is a number, with groups of three after a digit that is not 0, but ``(1,234)`` is a pair.
    Text is as :func:`plain_text` leaves it.
    """
    number = parse_number(text)
    inner = _unified(text)
    sequence = None if len(inner) > MAX_CHARACTERS else _sequence(inner)
    if sequence is not None and (number is None or sequence.opened):
        return sequence
    return plain_text(text) if number is None else number


def same_value(one: Value, other: Value) -> bool:
    """Whether two parsed answers are the same; a number is never the same as what is none."""
    if isinstance(one, Collection) and isinstance(other, Collection):
        return one.same(other)
    return type(one) is type(other) and one == other


def plain_text(text: str) -> str:
    """Text as it is compared: quotes, accents and LaTeX's spellings of one kind, without case, blanks, dollar signs
    and a final full stop."""
    return "".join(_unified(text).casefold().split())


def unified_characters(text: str) -> str:
    """``text`` with straight quotes and composed accents (Unicode's NFC): the same words typed on another machine."""
    return unicodedata.normalize("NFC", text.translate(_QUOTES))


def _unified(text: str) -> str:
    text = unified_characters(text).strip().removesuffix(".")
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    return _FRACTION.sub(r"\\frac", text).strip()


def _sequence(text: str) -> Collection | None:
    if text.startswith("\\{") and text.endswith("\\}"):
        text = "{" + text[2:-2] + "}"
    opened, closed = (text[:1], text[-1:]) if _encloses(text) else ("", "")
    parts = _split(text[1:-1] if opened else text)
    if parts is None or len(parts) < 2 or not all(part.strip() for part in parts):
        return None
    elements = tuple(parse_value(part) for part in parts)
    words = any(isinstance(element, str) for element in elements)
    return None if words and not opened else Collection(opened, closed, elements)


def _encloses(text: str) -> bool:
    """Whether one pair of brackets, of intervals of mixed kinds, stands around all of ``text``."""
    if (
        len(text) < 2
        or text[0] not in "([{"
        or text[-1] not in ")]}"
        or (text[0] == "{") != (text[-1] == "}")
    ):
        return False
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0:
            return place == len(text) - 1
    return False


def _split(text: str) -> list[str] | None:
    """What stands between the commas outside brackets; None where brackets do not match or nest too deep."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if not 0 <= depth <= MAX_DEPTH:
            return None
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return None if depth else parts


def _covers(some: tuple[Value, ...], others: tuple[Value, ...]) -> bool:
    return all(any(same_value(one, other) for other in others) for one in some)


def parse_number(text: str) -> Fraction | None:
    r"""The exact value of an arithmetic expression, None where it is none or would cost too much.

    Read are whole and decimal numbers (``1,234.5``, ``2e-3``), mixed numbers (``10 1/2``, ``1\frac{7}{9}``),
    + − × ÷ / * ^ ** ! %, brackets, ``\frac{a}{b}`` and LaTeX's other signs for these.
    More than ``MAX_CHARACTERS`` characters, ``MAX_DEPTH`` brackets in each other, or values of more than
    ``MAX_BITS`` bits are refused unread.
    """
    text = _unified(text)
    for pattern in _SHORT_FRACTIONS:
        text = pattern.sub(r"\1{\2}", text)
    if not text or len(text) > MAX_CHARACTERS:
        return None
    tokens: list[str] = []
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            return None
        tokens.append(match[1])
        place = match.end()
    try:
        return _Parser(tokens).whole()
    except (_NotANumber, ZeroDivisionError):
        return None


class _NotANumber(Exception):
    """The text is no expression, or one that is too large."""


class _Parser:
    """Recursive descent over tokens; every value is checked before it is computed."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.place, self.depth = tokens, 0, 0

    def whole(self) -> Fraction:
        value = self.sum()
        if self.place < len(self.tokens):
            raise _NotANumber
        return value

    def next(self, *wanted: str) -> str | None:
        """The next token if it is one of ``wanted``, which is then consumed."""
        if self.place < len(self.tokens) and self.tokens[self.place] in wanted:
            self.place += 1
            return self.tokens[self.place - 1]
        return None

    def sum(self) -> Fraction:
        value = self.product()
        while sign := self.next("+", "-"):
            other = self.product()
            _within(_bits(value) + _bits(other))
            value = value + other if sign == "+" else value - other
        return value

    def product(self) -> Fraction:
        value = self.signed()
        while sign := self.next("*", "/"):
            other = self.signed()
            _within(_bits(value) + _bits(other))
            value = value * other if sign == "*" else value / other
        return value

    def signed(self) -> Fraction:
        negative = False
        while sign := self.next("+", "-"):
            negative ^= sign == "-"
        value = self.power()
        return -value if negative else value

    def power(self) -> Fraction:
        value = self.postfixed()
        if not self.next("^", "**"):
            return value
        self.nested(1)
        exponent = self.signed()
        self.nested(-1)
        if exponent.denominator != 1:
            raise _NotANumber
        if value == 0 and exponent < 0:
            raise ZeroDivisionError
        if value in (0, 1, -1):  # of any power, however large
            return value ** (2 + exponent.numerator % 2 if exponent else 0)
        _within(_bits(value) * abs(exponent.numerator))
        return value**exponent.numerator

    def postfixed(self) -> Fraction:
        value = self.atom()
        while sign := self.next("!", "%"):
            if sign == "%":
                value /= 100
                continue
            if value.denominator != 1 or value < 0:
                raise _NotANumber
            n = value.numerator
            _within(n * n.bit_length())
            value = Fraction(math.factorial(n))
        return value

    def atom(self) -> Fraction:
        if self.next("\\frac"):
            return self.fraction()
        if self.place < len(self.tokens) and self.tokens[self.place] in ("(", "{"):
            return self.bracketed()
        if self.place == len(self.tokens) or not re.match(r"[\d.]", self.tokens[self.place]):
            raise _NotANumber
        self.place += 1
        whole = self.tokens[self.place - 1]
        return Fraction(whole.replace(",", "")) + (self.rest_of_mixed() if whole.isdigit() else 0)

    def rest_of_mixed(self) -> Fraction:
        """What a fraction right behind a whole number adds to it: 10 1/2, 1\\frac{7}{9}."""
        if self.next("\\frac"):
            return self.fraction()
        following = self.tokens[self.place : self.place + 3]
        if len(following) == 3 and following[0].isdigit() and following[1] == "/" and following[2].isdigit():
            self.place += 3
            return Fraction(int(following[0]), int(following[2]))
        return Fraction(0)

    def fraction(self) -> Fraction:
        above, below = self.bracketed(), self.bracketed()
        _within(_bits(above) + _bits(below))
        return above / below

    def bracketed(self) -> Fraction:
        opened = self.next("(", "{")
        if opened is None:
            raise _NotANumber
        self.nested(1)
        value = self.sum()
        self.nested(-1)
        if not self.next(")" if opened == "(" else "}"):
            raise _NotANumber
        return value

    def nested(self, deeper: int) -> None:
        self.depth += deeper
        if self.depth > MAX_DEPTH:
            raise _NotANumber


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _within(bits: int) -> None:
    if bits > MAX_BITS:
        raise _NotANumber
