"""Reversed addition: a sum written from its last digit, each digit a matter of two digits and a carry.

The control beside :mod:`dslib.tasks.countdown`: one rule serves all problems and each has one answer, so what
is learned on one problem helps the others, and nothing has to be given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dslib.tasks.verifiable import check_problems, checked_indices, distinct_rows, generated_tokens


@dataclass(frozen=True)
class ReversedAddition:
    """``problems`` sums of two numbers of ``digits`` digits, leading zeros included.

    Digits stand with the least significant first. Prompt: first number, +, second number, =; answer: the
    ``digits`` + 1 digits of the sum. Tokens: 0 … 9 are digits, then +, = and the end, which an answer does not
    need. Tasks of one ``seed`` whose ranges ``skip`` … ``skip + problems`` do not overlap share no problem. In
    :meth:`demonstrations` each digit is, with probability ``noise`` and independently of all others, a
    random one. Raises ValueError for sizes out of bounds.
    """

    problems: int = 10_000
    seed: int = 0
    skip: int = 0
    digits: int = 4
    noise: float = 0.2

    def __post_init__(self) -> None:
        check_problems(digits=(self.digits, 1, 17))
        if not 0 <= self.noise <= 1:
            raise ValueError(f"noise={self.noise} must lie between 0 and 1")
        if self.problems < 1 or self.skip < 0:
            raise ValueError(f"problems={self.problems} must be at least 1 and skip={self.skip} at least 0")

    plus, equals, end, vocab_size = 10, 11, 12, 13

    @property
    def max_new_tokens(self) -> int:
        """The length of every answer."""
        return self.digits + 1

    @property
    def answer_space(self) -> int:
        """10^(digits + 1) strings of digits."""
        return 10**self.max_new_tokens

    def __len__(self) -> int:
        return self.problems

    def problem(self, index: int) -> tuple[int, int]:
        """The two numbers; raises IndexError when there is no problem of that index."""
        first, second = self._rows[checked_indices([index], len(self))][0].tolist()
        return first, second

    def prompts(self, indices: Tensor | Sequence[int]) -> Tensor:
        """First number, +, second number, =: (n, 2·digits + 2) int64."""
        rows = self._rows[checked_indices(indices, len(self))]
        sign = torch.full((len(rows), 1), self.plus)
        first, second = (_digits(rows[:, column], self.digits) for column in (0, 1))
        return torch.cat((first, sign, second, torch.full_like(sign, self.equals)), dim=1)

    def rewards(self, indices: Tensor | Sequence[int], completions: Tensor, mask: Tensor) -> Tensor:
        """1 where a completion is the sum's digits, followed by nothing or the end; else 0: (n,) float32."""
        indices = checked_indices(indices, len(self))
        tokens = generated_tokens(indices, completions, mask)
        length = self.max_new_tokens
        tokens = torch.nn.functional.pad(tokens, (0, max(0, length + 1 - tokens.shape[1])), value=-1)
        right = (tokens[:, :length] == self._sums(indices)).all(dim=1)
        right &= (tokens[:, length] == -1) | (tokens[:, length] == self.end)
        return (right & (tokens[:, length + 1 :] == -1).all(dim=1)).float()

    def answers(self, index: int) -> Tensor:
        """All strings of digits + 1 digits: (answer_space, digits + 1) int64, for small ``digits`` only.

        Raises ValueError above a million.
        """
        checked_indices([index], len(self))
        if self.answer_space > 10**6:
            raise ValueError(
                f"digits={self.digits} have {self.answer_space} answers; list those of at most 5"
            )
        return _digits(torch.arange(self.answer_space), self.max_new_tokens)

    def correct_answers(self, index: int) -> Tensor:
        """The one correct answer: (1, digits + 1) int64."""
        return self._sums(checked_indices([index], len(self)))

    def demonstrations(
        self, indices: Tensor | Sequence[int], generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Sums with noise, drawn anew in every call: completions (n, digits + 1) int64 and mask, all True."""
        sums = self._sums(checked_indices(indices, len(self)))
        replaced = torch.rand(sums.shape, generator=generator) < self.noise
        completions = torch.where(replaced, torch.randint(10, sums.shape, generator=generator), sums)
        return completions, torch.ones_like(completions, dtype=torch.bool)

    def _sums(self, indices: Tensor) -> Tensor:
        return _digits(self._rows[indices].sum(dim=1), self.max_new_tokens)

    @cached_property
    def _rows(self) -> Tensor:
        def draw(count: int, generator: torch.Generator) -> Tensor:
            return torch.randint(10**self.digits, (count, 2), generator=generator)

        return distinct_rows(draw, lambda rows: rows, self.skip, self.problems, self.seed)


def _digits(numbers: Tensor, count: int) -> Tensor:
    """(n,) → (n, count), the least significant digit first."""
    return numbers.unsqueeze(1) // 10 ** torch.arange(count) % 10
