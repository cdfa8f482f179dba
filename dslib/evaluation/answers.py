"""Rules that say whether an answer is right: words in common, equal text, equal numbers.

Numbers are compared as exact fractions: 1/2004! and 1/2006! differ, though both are 0 in floating point. The
work that an expression may cause is bounded before it is done, so nothing needs a timer, and the rules
hold in any thread.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

#: An expression longer than this, or with a value of more bits or deeper nesting, is not read as a number.
MAX_CHARACTERS, MAX_BITS, MAX_DEPTH = 200, 50_000, 20

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_TOKEN = re.compile(
    r"\s*(\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])|\d+\.?\d*(?:[eE][+-]?\d{1,4})?|\.\d+|\\[dt]?frac|\*\*|[-+*/^!%(){}])"
)
#: A fraction's digits without braces, as in \\frac12: first the one above, then the one below.
_SHORT_FRACTIONS = (
    re.compile(r"(\\[dt]?frac)\s*(\d)"),
    re.compile(r"(\\[dt]?frac\s*\{[^{}]*\})\s*(\d)"),
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
    "\\%": "%",
    "\\,": "",
    "\\!": "",
    "{,}": "",
    "$": "",
}


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, English articles and superfluous blanks (SQuAD, arXiv:1606.05250).

    For words. It drops signs and decimal points: numbers are :func:`same_answer`'s business.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def exact_match(prediction: str, references: str | Sequence[str]) -> float:
    """1.0 where the prediction equals one of the references after :func:`normalize_answer`, else 0.0.

    Raises ValueError for no reference.
    """
    return float(any(normalize_answer(prediction) == normalize_answer(r) for r in _several(references)))


def answer_f1(prediction: str, references: str | Sequence[str]) -> float:
    """F1 of the words of prediction and reference, after :func:`normalize_answer`; the best of the references.

    2PR/(P + R), P and R the shares of the prediction's and the reference's words that the other has as well,
    counted with repetition (SQuAD, arXiv:1606.05250, §6.1). Where one side is "yes", "no" or "noanswer", or has
    no words at all, it is 1.0 if they are equal and else 0.0 (HotpotQA's script). Words are what blanks
    separate. Raises ValueError for no reference.
    """
    return max(_f1(normalize_answer(prediction), normalize_answer(r)) for r in _several(references))


def _several(references: str | Sequence[str]) -> Sequence[str]:
    found = [references] if isinstance(references, str) else references
    if not found:
        raise ValueError("references are empty; give at least one answer")
    return found


def _f1(prediction: str, reference: str) -> float:
    if not prediction or not reference or {prediction, reference} & {"yes", "no", "noanswer"}:
        return float(prediction == reference)
    said, wanted = Counter(prediction.split()), Counter(reference.split())
    common = (said & wanted).total()
    return 2 * common / (said.total() + wanted.total())


def boxed_answer(text: str) -> str | None:
    r"""What stands in the last ``\boxed{…}``, with nested braces; None without one that closes."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place].strip()
    return None


def tagged_answer(text: str, tag: str = "answer") -> str | None:
    """What stands in the last ``<tag>…</tag>``; None without a closed pair."""
    found = re.findall(
        rf"<{re.escape(tag)}>((?:(?!<{re.escape(tag)}>).)*?)</{re.escape(tag)}>", text, re.DOTALL
    )
    return found[-1].strip() if found else None


def verify(completion: str, reference: str, extract: str = "boxed") -> bool:
    """A verifier with a binary outcome: is the final answer of ``completion`` the ``reference``?

    ``extract`` says where the answer stands: ``"boxed"``, ``"answer"`` (tags), or ``"all"`` of the text.
    Nothing there: False. Raises ValueError for another ``extract``.
    """
    rules = {"boxed": boxed_answer, "answer": tagged_answer, "all": str}
    if extract not in rules:
        raise ValueError(f"extract={extract!r} is unknown; use one of {', '.join(map(repr, rules))}")
    answer = rules[extract](completion)
    return answer is not None and same_answer(answer, reference)


def same_answer(answer: str, reference: str) -> bool:
    """Whether two answers are the same number, exactly; or, where neither is a number, the same text but for
    case, blanks, dollar signs and a final full stop. A number is never the same as what is none."""
    numbers = parse_number(answer), parse_number(reference)
    if numbers != (None, None):
        return numbers[0] == numbers[1]

    def plain(text: str) -> str:
        return "".join(text.replace("$", "").casefold().split()).removesuffix(".")

    return plain(answer) == plain(reference)


def parse_number(text: str) -> Fraction | None:
    r"""The exact value of an arithmetic expression, None where it is none or would cost too much.

    Read are whole and decimal numbers (``1,234.5``, ``2e-3``), + − × ÷ / * ^ ** ! %, brackets,
    ``\frac{a}{b}`` and LaTeX's other signs for these. More than ``MAX_CHARACTERS`` characters, ``MAX_DEPTH``
    brackets in each other, or values of more than ``MAX_BITS`` bits are refused unread.
    """
    text = text.strip().removesuffix(".")
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    text = text.strip()
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
        if self.next("\\frac", "\\dfrac", "\\tfrac"):
            above, below = self.bracketed(), self.bracketed()
            _within(_bits(above) + _bits(below))
            return above / below
        if self.place < len(self.tokens) and self.tokens[self.place] in ("(", "{"):
            return self.bracketed()
        if self.place == len(self.tokens) or not re.match(r"[\d.]", self.tokens[self.place]):
            raise _NotANumber
        self.place += 1
        return Fraction(self.tokens[self.place - 1].replace(",", ""))

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
