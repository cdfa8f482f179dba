"""Pointer chasing: follow a permutation for some hops, with a scratchpad that a machine checks.

The answer after many hops is hard to give at once and easy one hop at a time, so writing nodes down pays, and
how many are worth their price can be measured. Each node that was written is right or wrong by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dslib.tasks.verifiable import check_problems, checked_indices, distinct_rows, generated_tokens


@dataclass(frozen=True)
class PointerProblem:
    """Where each symbol ``f`` leads, the ``start``, the number of ``hops``, and the ``path``: the node after
    each hop, the answer last."""

    f: tuple[int, ...]
    start: int
    hops: int
    path: tuple[int, ...]

    @property
    def answer(self) -> int:
        """The node after all hops."""
        return self.path[-1]


@dataclass(frozen=True)
class Scratchpad:
    """What a completion says. Unless it is ``well_formed`` (think tag, nodes, end tag, answer, end), the
    answer is None and the thought empty. ``at`` has for each node of the thought the hop it stands at, the
    earliest after the node before it, or None where the path has it no more; ``valid`` means that
    none is None: the thought leads to the answer. ``correct`` looks at the answer alone."""

    well_formed: bool
    thought: tuple[int, ...] = ()
    answer: int | None = None
    correct: bool = False
    at: tuple[int | None, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether the thought, if any, follows the path in order."""
        return self.well_formed and None not in self.at


@dataclass(frozen=True)
class PointerChasing:
    """``problems`` random permutations of ``symbols`` symbols, each with a start and ``least_hops`` to
    ``most_hops`` hops, all equally likely.

    Prompt: f(0) … f(symbols − 1), the start, the number of hops. Completion: think tag, at most ``max_thought``
    nodes, end tag, answer, end. The reward is for the answer alone. Tokens: symbols, then the numbers of hops,
    then ``think``, ``think_end``, ``end``. A trace of stride d names the nodes after d, 2d, … hops, short of
    the answer, and stride 0 names none; :meth:`demonstrations` draws from ``strides``. Tasks of one ``seed``
    whose ranges ``skip`` … ``skip + problems`` do not overlap share no problem. Raises ValueError for sizes
    out of bounds.
    """

    problems: int = 60_000
    seed: int = 0
    skip: int = 0
    symbols: int = 8
    least_hops: int = 2
    most_hops: int = 8
    max_thought: int = 12
    strides: tuple[int, ...] = (0, 0, 1, 2, 3)

    def __post_init__(self) -> None:
        check_problems(symbols=(self.symbols, 2, 64), least_hops=(self.least_hops, 1, self.most_hops))
        if self.max_thought < self.most_hops - 1:
            raise ValueError(
                f"max_thought={self.max_thought} is too short for the {self.most_hops - 1} nodes between start "
                f"and answer of most_hops={self.most_hops}"
            )
        if not self.strides or min(self.strides) < 0:
            raise ValueError(f"strides={self.strides} must name at least one, none below 0")
        if self.problems < 1 or self.skip < 0:
            raise ValueError(f"problems={self.problems} must be at least 1 and skip={self.skip} at least 0")

    @property
    def think(self) -> int:
        """The tag before the thought."""
        return self.symbols + self.most_hops - self.least_hops + 1

    @property
    def think_end(self) -> int:
        """The tag after the thought."""
        return self.think + 1

    @property
    def end(self) -> int:
        """The end of a completion."""
        return self.think + 2

    @property
    def vocab_size(self) -> int:
        """Symbols, numbers of hops, three tags."""
        return self.think + 3

    @property
    def max_new_tokens(self) -> int:
        """Two tags, the longest thought, the answer and the end."""
        return self.max_thought + 4

    def __len__(self) -> int:
        return self.problems

    def problem(self, index: int) -> PointerProblem:
        """One problem; raises IndexError when there is none of that index."""
        indices = checked_indices([index], len(self))
        *f, start, hops = self._rows[indices][0].tolist()
        return PointerProblem(tuple(f), start, hops, tuple(self._paths[indices][0, :hops].tolist()))

    def prompts(self, indices: Tensor | Sequence[int]) -> Tensor:
        """Where each symbol leads, start, hops: (n, symbols + 2) int64."""
        prompts = self._rows[checked_indices(indices, len(self))]
        prompts[:, -1] += self.symbols - self.least_hops
        return prompts

    def read(self, indices: Tensor | Sequence[int], completions: Tensor, mask: Tensor) -> list[Scratchpad]:
        """What each completion says, step by step. Arguments as in :class:`~dslib.tasks.verifiable.Task`."""
        indices = checked_indices(indices, len(self))
        tokens = generated_tokens(indices, completions, mask).tolist()
        paths, hops = self._paths[indices].tolist(), self._rows[indices, -1].tolist()
        return [self._read(*row) for row in zip(tokens, paths, hops, strict=True)]

    def rewards(self, indices: Tensor | Sequence[int], completions: Tensor, mask: Tensor) -> Tensor:
        """1 where a completion is well formed and its answer right, whatever it thought; (n,) float32."""
        return torch.tensor([float(pad.correct) for pad in self.read(indices, completions, mask)])

    def traces(
        self, indices: Tensor | Sequence[int], strides: Tensor | Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Correct completions (n, max_new_tokens) int64, with thoughts of the given ``strides`` (n,), and their
        mask; what follows the end is the end again, masked out.

        Raises ValueError for a negative stride or another number of them than of indices.
        """
        indices = checked_indices(indices, len(self))
        strides = torch.as_tensor(strides)
        if strides.shape != indices.shape or (strides < 0).any():
            raise ValueError(
                f"strides {strides.tolist()!r:.80} must be {len(indices)} numbers of at least 0, one an index"
            )
        hops = self._rows[indices, -1]
        count = torch.where(strides > 0, (hops - 1) // strides.clamp(min=1), 0)
        place = torch.arange(self.max_new_tokens)
        # The node after (j + 1)·stride hops stands at place j + 1.
        nodes = self._paths[indices].gather(
            1, (place * strides.unsqueeze(1) - 1).clamp(0, self.most_hops - 1)
        )
        answer = self._paths[indices].gather(1, hops.unsqueeze(1) - 1)
        count = count.unsqueeze(1)
        completions = torch.where((place >= 1) & (place <= count), nodes, self.end)
        completions[:, 0] = self.think
        completions.scatter_(1, count + 1, self.think_end).scatter_(1, count + 2, answer)
        return completions, place <= count + 3

    def demonstrations(
        self, indices: Tensor | Sequence[int], generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """:meth:`traces` with strides drawn from ``strides``, anew in every call."""
        indices = checked_indices(indices, len(self))
        chosen = torch.randint(len(self.strides), (len(indices),), generator=generator)
        return self.traces(indices, torch.tensor(self.strides)[chosen])

    def text(self, tokens: Tensor | Sequence[int]) -> str:
        """Tokens (time,) in readable form; raises ValueError for a token outside the vocabulary."""
        numbers = [f"{hops}×" for hops in range(self.least_hops, self.most_hops + 1)]
        names = [*map(str, range(self.symbols)), *numbers, "<think>", "</think>", "■"]
        found = torch.as_tensor(tokens).tolist()
        if not all(0 <= token < self.vocab_size for token in found):
            raise ValueError(f"tokens {found} are not all below vocab_size={self.vocab_size}")
        return " ".join(names[token] for token in found)

    def _read(self, tokens: list[int], path: list[int], hops: int) -> Scratchpad:
        tokens = [token for token in tokens if token != -1]
        thought = tuple(tokens[1:-3])
        well_formed = (
            len(tokens) >= 4
            and (tokens[0], tokens[-3], tokens[-1]) == (self.think, self.think_end, self.end)
            and all(0 <= node < self.symbols for node in (*thought, tokens[-2]))
        )
        if not well_formed:
            return Scratchpad(well_formed=False)
        at: list[int | None] = []
        hop = 0
        for node in thought:
            later = next((h for h in range(hop + 1, hops + 1) if path[h - 1] == node), None)
            at.append(later)
            hop = hop if later is None else later
        return Scratchpad(True, thought, tokens[-2], tokens[-2] == path[hops - 1], tuple(at))

    @cached_property
    def _paths(self) -> Tensor:
        """The node after hop 1, 2, …: (problems, most_hops) int64."""
        f, node = self._rows[:, : self.symbols], self._rows[:, self.symbols, None]
        nodes = []
        for _ in range(self.most_hops):
            node = f.gather(1, node)
            nodes.append(node)
        return torch.cat(nodes, dim=1)

    @cached_property
    def _rows(self) -> Tensor:
        def draw(count: int, generator: torch.Generator) -> Tensor:
            f = torch.rand(count, self.symbols, generator=generator).argsort(dim=1)
            start = torch.randint(self.symbols, (count, 1), generator=generator)
            hops = torch.randint(self.least_hops, self.most_hops + 1, (count, 1), generator=generator)
            return torch.cat((f, start, hops), dim=1)

        return distinct_rows(draw, lambda rows: rows, self.skip, self.problems, self.seed)
