"""Rewards that a rule can give, penalties on length, and a judge's scores.

A reward function takes one entry a completion and returns one float32 a completion, in the same order: what cannot
be parsed earns 0 and keeps its place, so that groups stay groups. Completions are strings or lists of token ids,
without the end token. Sums and products of rewards are plain tensor arithmetic; DeepSeek-R1 (arXiv:2501.12948,
§2.3) adds accuracy and language consistency, a search agent multiplies F1 by format (:func:`f1_times_format`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dslib.evaluation.answers import word_set_f1

Completion = str | Sequence[int]

#: A word is a run of letters; in Chinese, which has no spaces, a character.
_WORDS = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]|[^\W\d_\u3400-\u9fff\uf900-\ufaff]+")
LANGUAGES: dict[str, Callable[[str], bool]] = {
    "en": lambda word: word.isascii(),
    "zh": lambda word: re.fullmatch(r"[\u3400-\u9fff\uf900-\ufaff]", word) is not None,
}


def exact_answer(
    completions: Sequence[Completion],
    answers: Sequence[Any],
    extract: Callable[[Any], Any] | None = None,
    equal: Callable[[Any, Any], bool] | None = None,
) -> Tensor:
    """1 where the answer of a completion is the right one, else 0 → (n,) float32.

    ``extract``: completion → answer, such as :func:`dslib.evaluation.answers.boxed_answer`; None, or a ValueError,
    where there is none: 0. Without it the whole completion is the answer. ``equal``: (answer, right answer) → bool,
    such as :func:`dslib.evaluation.answers.same_answer`; by default strings are compared without the space around
    them, other sequences element by element. Raises ValueError when there are not as many answers as completions.
    """
    _check_lengths(completions=completions, answers=answers)
    equal = equal or _equal
    rewards = []
    for completion, right in zip(completions, answers, strict=True):
        try:
            found = completion if extract is None else extract(completion)
        except ValueError:
            found = None
        rewards.append(float(found is not None and bool(equal(found, right))))
    return torch.tensor(rewards, dtype=torch.float32)


def split_thought(
    completion: Completion, start: str | int | None = "<think>", end: str | int = "</think>"
) -> tuple[Completion, Completion] | None:
    """(thought, answer) of a completion of the form *start* thought *end* answer; None for any other form.

    Each tag must stand there once, the first at the very beginning (space aside), and an answer must follow; the
    thought may be empty. For lists of token ids the tags are ids. ``start=None``: the prompt has opened the tag.
    """
    if isinstance(completion, str):
        whole, first, last = completion.strip(), start, end
        count, size = whole.count, len(end)
    else:
        whole, first, last = list(completion), start, end
        count, size = whole.count, 1
    begin = 0
    if first is not None:
        begin = len(first) if isinstance(whole, str) else 1
        opens = whole.startswith(first) if isinstance(whole, str) else whole[:1] == [first]
        if not opens or count(first) != 1:
            return None
    if count(last) != 1 or whole.index(last) < begin:
        return None
    place = whole.index(last)
    thought, answer = whole[begin:place], whole[place + size :]
    if isinstance(whole, str):
        thought, answer = thought.strip(), answer.strip()
    return (thought, answer) if len(answer) else None


def format_tags(
    completions: Sequence[Completion], start: str | int | None = "<think>", end: str | int = "</think>"
) -> Tensor:
    """1 where a completion puts its thought between the tags and an answer behind them, as :func:`split_thought`
    reads it, else 0 → (n,) float32. DeepSeek-R1-Zero's format reward (arXiv:2501.12948, §2.2)."""
    return torch.tensor([float(split_thought(c, start, end) is not None) for c in completions])


def language_consistency(
    thoughts: Sequence[Completion], language: str | Callable[[Any], bool] = "en", empty: float = 0.0
) -> Tensor:
    """The share of words in the target language, of each chain of thought → (n,) float32 (DeepSeek-R1,
    arXiv:2501.12948, §2.3, which adds it to the accuracy).

    ``language``: ``"en"`` counts words of ASCII letters, ``"zh"`` Chinese characters; or a function of a word,
    or of a token id where the thoughts are lists of those. Numbers and signs are no words. ``empty``: the
    share of a thought without a word. With 0 it has shown nothing, and a needless thought pays; with 1 nothing is mixed
    in it, and not to think at all pays for a model that mixes. Raises ValueError for another language or share.
    """
    if not callable(language) and language not in LANGUAGES:
        raise ValueError(f"language={language!r} is unknown; use one of {', '.join(map(repr, LANGUAGES))}")
    if not 0 <= empty <= 1:
        raise ValueError(f"empty={empty} is a share; give a number between 0 and 1")
    belongs = language if callable(language) else LANGUAGES[language]
    shares = []
    for thought in thoughts:
        words = _WORDS.findall(thought) if isinstance(thought, str) else list(thought)
        shares.append(sum(bool(belongs(word)) for word in words) / len(words) if words else empty)
    return torch.tensor(shares, dtype=torch.float32)


def f1_times_format(
    completions: Sequence[Completion],
    answers: Sequence[Completion],
    start: str | int | None = "<think>",
    end: str | int = "</think>",
    f1: Callable[[Any, Any], float] | None = None,
) -> Tensor:
    """Format (0 or 1) times the F1 of the answer behind the tags, (n,) float32: a right answer in the wrong form
    earns nothing, and neither does an empty form. The reward of a search agent trained from a base model
    (ASearcher, arXiv:2508.07976).

    ``f1``: (answer, right answer) → [0, 1]; by default that of the two sets of words, as there
    (:func:`dslib.evaluation.word_set_f1`; SQuAD's counts repetitions: ``f1=answer_f1``), and of token ids that of the
    two sets of ids. Raises ValueError when there are not as many answers as completions.
    """
    _check_lengths(completions=completions, answers=answers)
    f1 = f1 or _f1
    rewards = []
    for completion, right in zip(completions, answers, strict=True):
        split = split_thought(completion, start, end)
        rewards.append(0.0 if split is None else float(f1(split[1], right)))
    return torch.tensor(rewards, dtype=torch.float32)


def length_penalty(
    lengths: Tensor | Sequence[int], coefficient: float, free: int = 0, maximum: float = math.inf
) -> Tensor:
    """−min(maximum, coefficient·max(0, length − free)), float32 in the shape of ``lengths``, thinking tokens.

    Raises ValueError for a negative length, coefficient, ``free`` or maximum.
    """
    _check_numbers(coefficient=coefficient, free=free, maximum=maximum)
    return 0.0 - (coefficient * (_lengths(lengths) - free).clamp_min(0)).clamp_max(maximum).float()


def overlong_penalty(lengths: Tensor | Sequence[int], max_length: int, cache: int) -> Tensor:
    """DAPO's soft punishment of answers that come near the limit (arXiv:2503.14476, eq. 13): 0 up to
    max_length − cache, from there linearly down to −1 at max_length, and −1 past it.

    lengths: of any shape → float32 of that shape. Raises ValueError for a negative length or a cache outside
    1 … max_length.
    """
    if not 1 <= cache <= max_length:
        raise ValueError(f"cache={cache} must lie between 1 and max_length={max_length}")
    return 0.0 - ((_lengths(lengths) - (max_length - cache)) / cache).clamp(0, 1).float()


@dataclass(frozen=True)
class EffortPenalty:
    """A penalty on reasoning tokens that fades as more effort is requested (DeepSeek-V4.1, §5.1.4).

        r = −min(C_max, k(b)·ℓ/L_norm)                         eq. 9
        k(b) = k₀·exp(−(b − b_min)/τ),    τ = λ·Δb              eq. 10

    The report gives no values; these are ours. Rewards are to be compared within one effort only: groups are of
    (prompt, effort). Efforts between the levels are interpolated by the same formula.

    Raises ValueError for fewer than two levels, levels that do not rise, and numbers that are not positive.
    """

    #: The efforts trained with, in rising order; b_min is the first, Δb their mean distance.
    levels: tuple[int, ...] = (25, 50, 75, 100)
    #: k₀.
    base: float = 1.0
    #: λ.
    decay: float = 1.0
    #: L_norm, in tokens.
    normal_length: float = 100.0
    #: C_max, the most one answer can lose.
    maximum: float = 1.0

    def __post_init__(self) -> None:
        if len(self.levels) < 2 or any(a >= b for a, b in zip(self.levels, self.levels[1:], strict=False)):
            raise ValueError(f"levels={self.levels} must be at least two efforts in rising order")
        for name in ("base", "decay", "normal_length", "maximum"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number above 0")

    @property
    def tau(self) -> float:
        """By how much the effort must rise for the penalty to fall to 1/e."""
        return self.decay * (self.levels[-1] - self.levels[0]) / (len(self.levels) - 1)

    def coefficient(self, efforts: Tensor | Sequence[float] | float) -> Tensor:
        """k(b), float32 in the shape of ``efforts``. Raises ValueError for an effort outside the levels."""
        efforts = torch.as_tensor(efforts, dtype=torch.float64)
        lowest, highest = self.levels[0], self.levels[-1]
        if not ((efforts >= lowest) & (efforts <= highest)).all():
            outside = efforts[~((efforts >= lowest) & (efforts <= highest))].flatten()[0].item()
            raise ValueError(f"efforts holds {outside:g}; levels go from {lowest} to {highest}")
        return (self.base * torch.exp(-(efforts - self.levels[0]) / self.tau)).float()

    def __call__(self, lengths: Tensor | Sequence[int], efforts: Tensor | Sequence[float] | float) -> Tensor:
        """The penalty of answers with ``lengths`` reasoning tokens, asked for with ``efforts``: float32 ≤ 0 of the
        shape that both broadcast to. Raises ValueError for a negative length and an effort outside the levels."""
        cost = self.coefficient(efforts) * (_lengths(lengths) / self.normal_length)
        return 0.0 - cost.clamp_max(self.maximum).float()


@dataclass(frozen=True)
class Rubric:
    """One criterion that a judge scores, and what it counts. Raises ValueError for a weight that is not positive."""

    criterion: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight={self.weight} of {self.criterion!r} must be a finite number above 0")


def rubric_reward(
    judge: Callable[[Any, Any, str], float | None],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    rubrics: Sequence[Sequence[Rubric]],
) -> Tensor:
    """Weighted means of a judge's scores, (n,) float32: each prompt has criteria of its own, as for the general
    tasks of DeepSeek-V3.2 (arXiv:2512.02556, §3), scored by a model, or by any function.

    ``judge``: (prompt, completion, criterion) → score in [0, 1], or None where it cannot tell: the reward is then
    NaN, and :func:`dslib.rl.group_advantages` leaves that sample out. What the judge raises is not caught. Raises
    ValueError for a score outside [0, 1], no criterion, or sequences of different lengths.
    """
    _check_lengths(completions=completions, prompts=prompts, rubrics=rubrics)
    rewards = []
    for place, (prompt, completion, criteria) in enumerate(zip(prompts, completions, rubrics, strict=True)):
        if not criteria:
            raise ValueError(f"rubrics[{place}] is empty; give at least one criterion")
        total = 0.0
        for rubric in criteria:
            score = judge(prompt, completion, rubric.criterion)
            score = math.nan if score is None else float(score)
            if not (math.isnan(score) or 0 <= score <= 1):
                raise ValueError(
                    f"the judge gave {score} for {rubric.criterion!r} of completion {place}; it must lie in [0, 1]"
                )
            total += rubric.weight * score
        rewards.append(total / math.fsum(rubric.weight for rubric in criteria))
    return torch.tensor(rewards, dtype=torch.float32)


def _equal(found: Any, right: Any) -> bool:
    if isinstance(found, str) and isinstance(right, str):
        return found.strip() == right.strip()
    if isinstance(found, Sequence) and isinstance(right, Sequence) and not isinstance(right, str):
        return list(found) == list(right)
    return found == right


def _f1(found: Completion, right: Completion) -> float:
    if isinstance(found, str):
        return word_set_f1(found, right)
    said, wanted = set(found), set(right)
    return 2 * len(said & wanted) / max(len(said) + len(wanted), 1)


def _lengths(lengths: Tensor | Sequence[int]) -> Tensor:
    lengths = torch.as_tensor(lengths).double()
    if lengths.numel() and not lengths.min() >= 0:
        raise ValueError(f"lengths goes down to {lengths.min().item()}; a length is at least 0")
    return lengths


def _check_numbers(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value >= 0:
            raise ValueError(f"{name}={value} must be at least 0")


def _check_lengths(**sequences: Sequence) -> None:
    (first, x), *rest = sequences.items()
    for name, other in rest:
        if len(other) != len(x):
            raise ValueError(f"{len(other)} {name} for {len(x)} {first}; give one each")
