"""State tracking: what a product of group elements is after every factor, the field's test of recurrence.

Each token names an element of a finite group, and the target at each position is the product of all elements so
far. For the group of two elements that is parity. Attention of constant depth looks at all factors at once and
can hardly multiply many of them in order (arXiv:2404.08819); a recurrence has one multiplication a token to do.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateTracking:
    """Products of permutations of ``objects`` things: 2 is parity, 3 is S₃, the smallest group in which order
    matters. Tokens and targets are numbers of permutations, 0 … ``elements`` − 1, 0 the identity."""

    objects: int = 2

    def __post_init__(self) -> None:
        if not 2 <= self.objects <= 5:
            raise ValueError(f"objects={self.objects} must be 2 to 5: its permutations are the vocabulary")

    @cached_property
    def permutations(self) -> list[tuple[int, ...]]:
        """The elements, in lexicographic order: the identity first."""
        return list(itertools.permutations(range(self.objects)))

    @property
    def elements(self) -> int:
        """Size of the group."""
        return len(self.permutations)

    @cached_property
    def product(self) -> Tensor:
        """(elements, elements) int64: the number of "first row, then column"."""
        number = {p: i for i, p in enumerate(self.permutations)}
        return torch.tensor(
            [[number[tuple(q[i] for i in p)] for q in self.permutations] for p in self.permutations]
        )

    def batch(self, count: int, time: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """``count`` random words → (tokens, targets), each (count, time) int64: target t is the product of the
        tokens 0 … t. A guess from the last token alone is right once in ``elements``.

        Raises ValueError for a count or time below 1.
        """
        if count < 1 or time < 1:
            raise ValueError(f"count={count} and time={time} must be at least 1")
        tokens = torch.randint(self.elements, (count, time), generator=generator)
        targets = torch.empty_like(tokens)
        state = torch.zeros(count, dtype=torch.long)
        for t in range(time):
            state = targets[:, t] = self.product[state, tokens[:, t]]
        return tokens, targets
