"""Countdown: reach a target with given numbers, each used once, from left to right.

The answer is short and the space of answers finite, so the correct ones are listed by trying all; yet with
five numbers it holds 9 720 expressions, far more than one samples, and a guesser does not reach all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dslib.tasks.verifiable import check_problems, checked_indices, distinct_rows, generated_tokens

OPERATORS = "+-×"


@dataclass(frozen=True)
class CountdownProblem:
    """``numbers`` in the order of the prompt, and the ``target`` to reach with all of them."""

    numbers: tuple[int, ...]
    target: int

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.numbers))} = {self.target}"


@dataclass(frozen=True)
class Countdown:
    """``problems`` problems of ``numbers`` different numbers from 1 to ``largest``, with targets of up to
    ``digits`` digits, 1 at the least.

    An answer names every number once with one of + − × between two: n o n o n o n o n. It is evaluated from
    left to right, so 2 + 3 × 4 is 20; on the way values may be negative or large. Expressions that differ as
    text are different answers. Targets come from random expressions, kept when within bounds, so a problem
    always has an answer, and those with many are drawn more often.

    Tokens: 0 ends a text, n is the number n, then follow the operators, =, and the ten digits of targets.
    Tasks of one ``seed`` whose ranges ``skip`` … ``skip + problems`` do not overlap share no problem, not even
    in another order of its numbers. In :meth:`demonstrations` the share ``random_share`` shows a random
    expression in the place of a correct one. Raises ValueError for sizes out of bounds.
    """

    problems: int = 60_000
    seed: int = 0
    skip: int = 0
    numbers: int = 5
    largest: int = 25
    digits: int = 3
    random_share: float = 0.4

    def __post_init__(self) -> None:
        check_problems(numbers=(self.numbers, 2, 6), largest=(self.largest, self.numbers, 99))
        check_problems(digits=(self.digits, 1, 4))
        if not 0 <= self.random_share <= 1:
            raise ValueError(f"random_share={self.random_share} must lie between 0 and 1")
        if self.problems < 1 or self.skip < 0:
            raise ValueError(f"problems={self.problems} must be at least 1 and skip={self.skip} at least 0")

    end = 0

    @property
    def vocab_size(self) -> int:
        """End, numbers, operators, =, digits."""
        return self._digit + 10

    @property
    def max_new_tokens(self) -> int:
        """The length of every well-formed answer; it needs no end."""
        return 2 * self.numbers - 1

    @property
    def answer_space(self) -> int:
        """The number of well-formed answers to a problem: numbers! · 3^(numbers − 1)."""
        return math.factorial(self.numbers) * len(OPERATORS) ** (self.numbers - 1)

    @property
    def _operator(self) -> int:
        return self.largest + 1

    @property
    def _digit(self) -> int:
        return self._operator + len(OPERATORS) + 1

    def __len__(self) -> int:
        return self.problems

    def problem(self, index: int) -> CountdownProblem:
        """One problem; raises IndexError when there is none of that index."""
        numbers, target, _ = self._at(checked_indices([index], len(self)))
        return CountdownProblem(tuple(numbers[0].tolist()), int(target))

    def prompts(self, indices: Tensor | Sequence[int]) -> Tensor:
        """The numbers, =, and the digits of the target: (n, numbers + 1 + digits) int64."""
        numbers, target, _ = self._at(checked_indices(indices, len(self)))
        powers = 10 ** torch.arange(self.digits - 1, -1, -1)
        digits = self._digit + target.unsqueeze(1) // powers % 10
        return torch.cat((numbers, torch.full_like(target, self._digit - 1).unsqueeze(1), digits), dim=1)

    def well_formed(self, indices: Tensor | Sequence[int], completions: Tensor, mask: Tensor) -> Tensor:
        """Whether each completion names all numbers once with operators between, and no more: (n,) bool.

        Arguments as in :class:`~dslib.tasks.verifiable.Task`; an end after the answer is allowed.
        """
        return self._read(checked_indices(indices, len(self)), completions, mask)[0]

    def rewards(self, indices: Tensor | Sequence[int], completions: Tensor, mask: Tensor) -> Tensor:
        """1 where a completion is well formed and reaches the target, else 0: (n,) float32."""
        indices = checked_indices(indices, len(self))
        well_formed, values = self._read(indices, completions, mask)
        return (well_formed & (values == self._at(indices)[1])).float()

    def answers(self, index: int) -> Tensor:
        """All well-formed answers to a problem, each once: (answer_space, max_new_tokens) int64."""
        numbers, _, _ = self._at(checked_indices([index], len(self)))
        order, operators = self._expressions
        return self._tokens(numbers[0][order], operators)

    def correct_answers(self, index: int) -> Tensor:
        """Those of :meth:`answers` that reach the target, never none: (m, max_new_tokens) int64."""
        numbers, target, _ = self._at(checked_indices([index], len(self)))
        order, operators = self._expressions
        right = from_left_to_right(numbers[0][order], operators) == target
        return self._tokens(numbers[0][order[right]], operators[right])

    def demonstrations(
        self, indices: Tensor | Sequence[int], generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """What supervised fine-tuning shows: completions (n, max_new_tokens) int64 and their mask, all True.

        The share ``random_share``, drawn anew in every call, are uniformly random well-formed answers; the
        others are the expression that the problem was made of, which is a uniformly random one of its correct
        answers, drawn once.
        """
        indices = checked_indices(indices, len(self))
        numbers, _, witness = self._at(indices)
        order, operators = witness.split((self.numbers, self.numbers - 1), dim=1)
        n = len(indices)
        replaced = torch.rand(n, 1, generator=generator) < self.random_share
        other_order, other_operators = self._random_expressions(n, generator)
        order = torch.where(replaced, other_order, order)
        completions = self._tokens(
            numbers.gather(1, order), torch.where(replaced, other_operators, operators)
        )
        return completions, torch.ones_like(completions, dtype=torch.bool)

    def text(self, tokens: Tensor | Sequence[int]) -> str:
        """Tokens (time,) as people write them; raises ValueError for a token outside the vocabulary."""
        names = ["■", *map(str, range(1, self.largest + 1)), *OPERATORS, "=", *map(str, range(10))]
        found = torch.as_tensor(tokens).tolist()
        if not all(0 <= token < self.vocab_size for token in found):
            raise ValueError(f"tokens {found} are not all below vocab_size={self.vocab_size}")
        numbers = found[: found.index(self._digit - 1) + 1] if self._digit - 1 in found else found
        digits = "".join(names[token] for token in found[len(numbers) :])
        return " ".join([*(names[token] for token in numbers), *([digits] if digits else [])])

    def _read(self, indices: Tensor, completions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(well formed, value) of each completion; the value of what is not well formed means nothing."""
        tokens, length = generated_tokens(indices, completions, mask), self.max_new_tokens
        tokens = torch.nn.functional.pad(tokens, (0, max(0, length + 1 - tokens.shape[1])), value=-1)
        used, operators = tokens[:, 0:length:2], tokens[:, 1:length:2] - self._operator
        after = tokens[:, length:]
        good = (used.sort(dim=1).values == self._at(indices)[0].sort(dim=1).values).all(dim=1)
        good &= ((operators >= 0) & (operators < len(OPERATORS))).all(dim=1)
        good &= ((after[:, 0] == -1) | (after[:, 0] == self.end)) & (after[:, 1:] == -1).all(dim=1)
        readable = good.unsqueeze(1)
        return good, from_left_to_right(torch.where(readable, used, 0), torch.where(readable, operators, 0))

    def _at(self, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Numbers (n, numbers), targets (n,) and expressions (n, 2·numbers − 1) of problems."""
        rows = self._rows[indices]
        return rows[:, : self.numbers], rows[:, self.numbers], rows[:, self.numbers + 1 :]

    @cached_property
    def _rows(self) -> Tensor:
        def identity(rows: Tensor) -> Tensor:
            return torch.cat((rows[:, : self.numbers].sort(dim=1).values, rows[:, self.numbers, None]), dim=1)

        return distinct_rows(self._draw, identity, self.skip, self.problems, self.seed)

    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        numbers = 1 + torch.rand(count, self.largest, generator=generator).topk(self.numbers, dim=1).indices
        order, operators = self._random_expressions(count, generator)
        target = from_left_to_right(numbers.gather(1, order), operators)
        rows = torch.cat((numbers, target.unsqueeze(1), order, operators), dim=1)
        return rows[(target >= 1) & (target < 10**self.digits)]

    def _random_expressions(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Orders (count, numbers) and operators (count, numbers − 1), all equally likely."""
        order = torch.rand(count, self.numbers, generator=generator).argsort(dim=1)
        return order, torch.randint(len(OPERATORS), (count, self.numbers - 1), generator=generator)

    @cached_property
    def _expressions(self) -> tuple[Tensor, Tensor]:
        """Every order with every choice of operators: (space, numbers) and (space, numbers − 1)."""
        orders = torch.tensor(list(itertools.permutations(range(self.numbers))))
        choices = torch.tensor(list(itertools.product(range(len(OPERATORS)), repeat=self.numbers - 1)))
        return orders.repeat_interleave(len(choices), dim=0), choices.repeat(len(orders), 1)

    def _tokens(self, used: Tensor, operators: Tensor) -> Tensor:
        tokens = used.new_empty(len(used), self.max_new_tokens)
        tokens[:, 0::2], tokens[:, 1::2] = used, operators + self._operator
        return tokens


def from_left_to_right(numbers: Tensor, operators: Tensor) -> Tensor:
    """((a ∘ b) ∘ c) …, numbers (..., n) and operators (..., n − 1), 0 for +, 1 for −, 2 for × → (...,)."""
    value = numbers[..., 0]
    for place in range(operators.shape[-1]):
        right, operator = numbers[..., place + 1], operators[..., place]
        value = torch.where(
            operator == 0, value + right, torch.where(operator == 1, value - right, value * right)
        )
    return value
