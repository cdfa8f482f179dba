"""Pointer chasing in two scripts: each node has two names, so that a thought can be right and yet hard to read.

DeepSeek-R1-Zero mixed languages in its thoughts, and DeepSeek-R1 (arXiv:2501.12948, §2.3) pays for the share of
words in the target language. Here the target is the script of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dslib.tasks.pointer_chasing import PointerChasing, PointerProblem, Scratchpad
from dslib.tasks.verifiable import checked_indices, generated_tokens


@dataclass(frozen=True)
class Reading:
    """What a completion says: ``tagged`` when the thought stands between the tags and an answer behind them,
    ``pad`` as :class:`PointerChasing` reads it, tags or not, and ``native``, for each node of the
    thought whether it is written in the script of the prompt."""

    tagged: bool
    pad: Scratchpad
    native: tuple[bool, ...] = ()

    @property
    def consistency(self) -> float:
        """The share of the thought in the script of the prompt; 0 for an empty thought, which shows nothing."""
        return sum(self.native) / max(len(self.native), 1)

    @property
    def readable(self) -> bool:
        """Between tags, in one script, every node on the path in order: what a cold start shows."""
        return self.tagged and all(self.native) and self.pad.valid


@dataclass(frozen=True)
class TwoScripts:
    """``task`` with a second name for each node, as many tokens behind the task's own; the prompt uses the
    first. Like text from everywhere, :meth:`demonstrations` writes each node of a thought in either script
    with equal chance, and leaves the tags out of ``untagged`` of all completions: thought, answer, end.

    The reward is for the answer alone, the last node before the end, in either script, between tags or not.
    Raises ValueError for a share outside 0 … 1.
    """

    task: PointerChasing = field(default_factory=PointerChasing)
    untagged: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.untagged <= 1:
            raise ValueError(f"untagged={self.untagged} must be a share, 0 to 1")

    @property
    def vocab_size(self) -> int:
        """The task's tokens and the second names."""
        return self.task.vocab_size + self.task.symbols

    @property
    def end(self) -> int:
        """The task's."""
        return self.task.end

    @property
    def max_new_tokens(self) -> int:
        """The task's."""
        return self.task.max_new_tokens

    def __len__(self) -> int:
        return len(self.task)

    def problem(self, index: int) -> PointerProblem:
        """The task's."""
        return self.task.problem(index)

    def prompts(self, indices: Tensor | Sequence[int]) -> Tensor:
        """The end of whatever text came before, then the task's prompt: (n, symbols + 3) int64. A first token that
        is always the same tells a model without absolute positions where the symbols stand."""
        prompts = self.task.prompts(indices)
        return torch.cat((prompts.new_full((len(prompts), 1), self.end), prompts), dim=1)

    def native(self, completions: Tensor) -> Tensor:
        """``completions`` with every node under its first name, of the same shape."""
        second = completions >= self.task.vocab_size
        return torch.where(second, completions - self.task.vocab_size, completions)

    def read(self, indices: Tensor | Sequence[int], completions: Tensor, mask: Tensor) -> list[Reading]:
        """What each completion says, whatever script it mixes. Arguments as in
        :class:`~dslib.tasks.verifiable.Task`."""
        indices = checked_indices(indices, len(self))
        written = generated_tokens(indices, completions, mask)
        width, kinds, rows = written.shape[1] + 2, [], []
        for row, plain in zip(written.tolist(), self.native(written).tolist(), strict=True):
            row, plain = row[: len(row) - row.count(-1)], plain[: len(plain) - plain.count(-1)]
            tagged = self.task.think in plain or self.task.think_end in plain
            if not tagged and len(plain) > 1:  # give the tags that are missing, so that one reader suffices
                plain = [self.task.think, *plain[:-2], self.task.think_end, *plain[-2:]]
                row = [self.task.think, *row]
            kinds.append((tagged, row))
            rows.append(plain + [-1] * (width - len(plain)))
        rows = torch.tensor(rows, dtype=torch.long).view(-1, width)
        pads = self.task.read(indices, rows.clamp(min=0), rows >= 0)
        return [
            Reading(
                tagged and pad.well_formed,
                pad,
                tuple(token < self.task.symbols for token in row[1 : 1 + len(pad.thought)]),
            )
            for (tagged, row), pad in zip(kinds, pads, strict=True)
        ]

    def rewards(self, indices: Tensor | Sequence[int], completions: Tensor, mask: Tensor) -> Tensor:
        """1 where the answer is right, whatever was thought and in which script; (n,) float32."""
        return torch.tensor([float(r.pad.correct) for r in self.read(indices, completions, mask)])

    def demonstrations(
        self, indices: Tensor | Sequence[int], generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """The task's, in mixed scripts and partly without tags; completions and mask, (n, max_new_tokens)."""
        completions, mask = self.task.demonstrations(indices, generator)
        place = torch.arange(completions.shape[1])
        inside = (place >= 1) & (place < mask.sum(1, keepdim=True) - 3)
        second = torch.rand(completions.shape, generator=generator) < 0.5
        completions = torch.where(inside & second, completions + self.task.vocab_size, completions)
        bare = torch.rand(len(completions), 1, generator=generator) < self.untagged
        # Without its tags a completion moves up by one, and from the second tag on by one more.
        shift = 1 + (place >= mask.sum(1, keepdim=True) - 4)
        moved = completions.gather(1, (place + shift).clamp(max=completions.shape[1] - 1))
        return torch.where(bare, moved, completions), mask & ~(
            bare & (place >= mask.sum(1, keepdim=True) - 2)
        )

    def text(self, tokens: Tensor | Sequence[int]) -> str:
        """Tokens (time,) in readable form, second names as letters; raises ValueError as the task's."""
        tokens = torch.as_tensor(tokens)
        if (tokens >= self.vocab_size).any():
            raise ValueError(f"tokens {tokens.tolist()} are not all below vocab_size={self.vocab_size}")
        native = self.native(tokens).tolist()
        return " ".join(
            chr(ord("a") + plain) if token != plain else self.task.text([plain])
            for token, plain in zip(tokens.tolist(), native, strict=True)
        )
