"""Long-range recall planted into text: what a window of recent tokens cannot answer.

Early in a window stand facts, one token each, of several kinds; much later each kind is asked for, and the
token after the question is the fact. Whoever can look back to the fact answers at once (one hop, unlike the
associative recall of arXiv:2312.04927, whose keys and values are tokens of their own); for anyone else the
values of a kind are equally likely.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dslib.tasks.corpus import batches, evaluation_windows

#: What a target position of a window is: text; planted and not to be foreseen; or recall.
TEXT, PLANTED, RECALL = 0, 1, 2


@dataclass(frozen=True)
class RecallTask:
    """``facts`` kinds of facts with ``values`` values each; question and fact of a kind stand at least
    ``distance`` tokens apart. The share ``planted`` of the windows gets them. In training an answer counts
    ``weight`` times a token of text, of which there are many more, and a fact or question, which nobody can
    foresee, not at all. Their tokens are bytes that
    ASCII text does not have: kind c with value v is ``first_symbol + c·values + v``, and the question for
    kind c is ``first_symbol + facts·values + c``."""

    facts: int = 8
    values: int = 8
    distance: int = 64
    first_symbol: int = 128
    planted: float = 1.0
    weight: float = 8.0

    def __post_init__(self) -> None:
        for name in ("facts", "values", "distance"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        last = self.first_symbol + self.facts * (self.values + 1)
        if self.first_symbol < 0 or last > 256:
            raise ValueError(
                f"facts={self.facts} of values={self.values} need {last - self.first_symbol} bytes from "
                f"first_symbol={self.first_symbol} on, and the last must be below 256"
            )
        if not self.weight >= 0:
            raise ValueError(f"weight={self.weight} must be at least 0")
        if not 0 <= self.planted <= 1:
            raise ValueError(f"planted={self.planted} must lie between 0 and 1")

    @property
    def least_time(self) -> int:
        """The shortest window that holds all facts, the distance and all questions."""
        return 4 * self.facts + self.distance

    def plant(self, windows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Write facts and questions into ``windows`` (batch, time) int64 → (tokens, kinds), both (batch, time).

        Of the time that ``distance`` leaves, the first half holds the facts at random places, the last the
        questions, each followed by its answer. ``kinds`` says of each token whether it is ``TEXT``,
        ``PLANTED`` (fact or question: not to be foreseen) or ``RECALL`` (an answer). The input is left as
        it is. Raises ValueError when a window is too short.
        """
        batch, time = windows.shape
        if time < self.least_time:
            raise ValueError(
                f"windows of {time} tokens are too short for facts={self.facts} asked for distance="
                f"{self.distance} later; use at least {self.least_time}"
            )
        half = (time - self.distance) // 2
        # Fact i and question j are random entries of two lists of places, in random order of the kinds.
        fact_at = _choose(batch, half, self.facts, generator)
        question_at = time - 2 * (half // 2) + 2 * _choose(batch, half // 2, self.facts, generator)
        value = torch.randint(self.values, (batch, self.facts), generator=generator)
        kind = torch.arange(self.facts)
        symbols = torch.cat(
            (
                self.first_symbol + kind * self.values + value,
                (self.first_symbol + self.facts * self.values + kind).expand(batch, -1),
                self.first_symbol + kind * self.values + value,
            ),
            dim=1,
        )
        places = torch.cat((fact_at, question_at, question_at + 1), dim=1)
        what = torch.tensor([PLANTED, PLANTED, RECALL]).repeat_interleave(self.facts).expand(batch, -1)
        chosen = torch.rand(batch, 1, generator=generator) < self.planted
        tokens = torch.where(chosen, windows.scatter(1, places, symbols), windows)
        return tokens, torch.where(chosen, torch.zeros_like(windows).scatter(1, places, what), TEXT)

    def weights(self, kinds: Tensor) -> Tensor:
        """What each target counts in training, float32 in ``kinds``' shape."""
        return torch.tensor([1.0, 0.0, self.weight], device=kinds.device)[kinds]

    def batches(
        self, text: Tensor, batch_size: int, context: int, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Endless batches from ``text`` (n,): inputs, targets and the targets' kinds, each
        (batch_size, context)."""
        for inputs, targets in batches(text, batch_size, context, generator):
            yield self._shifted(inputs, targets, generator)

    def evaluation(
        self, text: Tensor, count: int, context: int, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same ``count`` planted windows every time: inputs, targets, kinds, each (count, context)."""
        generator = torch.Generator().manual_seed(seed)
        return self._shifted(*evaluation_windows(text, count, context), generator)

    def _shifted(
        self, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, kinds = self.plant(torch.cat((inputs[:, :1], targets), dim=1), generator)
        return tokens[:, :-1], tokens[:, 1:], kinds[:, 1:]


def _choose(batch: int, places: int, count: int, generator: torch.Generator) -> Tensor:
    """``count`` different ones of ``places``, in random order: (batch, count) int64."""
    return torch.rand(batch, places, generator=generator).argsort(dim=1)[:, :count]
