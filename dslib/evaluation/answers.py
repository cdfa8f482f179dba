"""Rules that say whether an answer is right: words in common, equal text, equal numbers, tuples, sets, intervals."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from dslib.evaluation.expressions import (
    parse_value,
    same_value,
    unified_characters,
)

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*(?P<brace>\{)|\s+(?=[^\s$]))")
_PUNCTUATION_TO_BLANKS = str.maketrans(dict.fromkeys(string.punctuation, " "))
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, English articles and superfluous blanks (SQuAD, arXiv:1606.05250).

    For words. It drops signs and decimal points: numbers are :func:`same_answer`'s business.
    """
    return " ".join(
        _ARTICLES.sub(" ", unified_characters(text).lower().translate(_WITHOUT_PUNCTUATION)).split()
    )


def exact_match(prediction: str, references: str | Sequence[str]) -> float:
    """1.0 where the prediction equals one of the references after :func:`normalize_answer`, else 0.0.

    Raises ValueError for no reference.
    """
    return float(any(normalize_answer(prediction) == normalize_answer(r) for r in _several(references)))


def answer_f1(prediction: str, references: str | Sequence[str]) -> float:
    """F1 of the words of prediction and reference, after :func:`normalize_answer`; the best of the references.

    2PR/(P + R), P and R the shares of the prediction's and the reference's words that the other has as well,
    counted with repetition (SQuAD, arXiv:1606.05250, §6.1). Where one side is "yes", "no" or "noanswer", it is 1.0
    if they are equal and else 0.0 (HotpotQA's script); where one has no words at all it is 0.0, also if neither has
    any, as in SQuAD 1.1 and HotpotQA (SQuAD 2.0 gives 1.0 to two empty answers). Words are what blanks separate.
    Raises ValueError for no reference.
    """
    return max(_f1(normalize_answer(prediction), normalize_answer(r)) for r in _several(references))


def word_set_f1(prediction: str, references: str | Sequence[str]) -> float:
    """F1 of the *sets* of words of prediction and reference, the best of the references: a search agent's reward
    (ASearcher, arXiv:2508.07976, §4).

    In lower case, punctuation separates words, articles stay, and a word counts once: "New York, New York" and "New
    York" are the same. 0.0 where one side has no words. Raises ValueError for no reference.
    """
    said = _word_set(prediction)
    found = []
    for reference in _several(references):
        wanted = _word_set(reference)
        found.append(2 * len(said & wanted) / max(1, len(said) + len(wanted)))
    return max(found)


def _word_set(text: str) -> set[str]:
    return set(unified_characters(text).lower().translate(_PUNCTUATION_TO_BLANKS).split())


def _several(references: str | Sequence[str]) -> Sequence[str]:
    found = [references] if isinstance(references, str) else references
    if not found:
        raise ValueError("references are empty; give at least one answer")
    return found


def _f1(prediction: str, reference: str) -> float:
    if not prediction or not reference:
        return 0.0
    if {prediction, reference} & {"yes", "no", "noanswer"}:
        return float(prediction == reference)
    said, wanted = Counter(prediction.split()), Counter(reference.split())
    common = (said & wanted).total()
    return 2 * common / (said.total() + wanted.total())


def boxed_answer(text: str) -> str | None:
    r"""What stands in the last ``\boxed{…}`` or ``\fbox{…}``, with nested braces, or, without braces, behind
    ``\boxed`` up to a blank or the formula's end; None without one, or if its braces do not close."""
    found = list(_BOX.finditer(text))
    if not found:
        return None
    begin = found[-1].end()
    if not found[-1]["brace"]:
        bare = re.match(r"[^\s$]+", text[begin:])
        return None if bare is None else bare[0]
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
    """Whether two answers are the same number, exactly; the same tuple, set, interval or list of answers; or else
    the same text but for case, blanks, quotes and accents of another spelling, dollar signs and a final full stop.

    Read by :func:`dslib.evaluation.expressions.parse_value`. A number is never the same as what is none: ``(0, 100)``
    is a pair, and not 100.
    """
    return same_value(parse_value(answer), parse_value(reference))
