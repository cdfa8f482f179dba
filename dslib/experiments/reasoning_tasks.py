"""What the stages of :mod:`dslib.experiments.reasoning_pipeline` are rewarded for, and the nulls of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dslib.rl.effort import EffortTask
from dslib.rl.rewards import language_consistency
from dslib.tasks.scripts import TwoScripts

#: The three rewards of R1's second stage.
ALL = ("accuracy", "format", "language")


@dataclass(frozen=True)
class Thinking:
    """Nodes before the answer, tags or not: a thought that hides outside its tags is charged for as well."""

    task: TwoScripts

    def __call__(self, completions: Tensor, mask: Tensor) -> Tensor:
        native = self.task.native(completions)
        return ((native < self.task.task.symbols) & mask).sum(1).sub(1).clamp(min=0)


@dataclass(frozen=True)
class Rewarded:
    """``task`` with the sum of some rewards: ``"accuracy"`` of the answer, ``"format"``, 1 for the tags,
    ``"language"``, the share of the thought in the prompt's script, 0 without tags or for an empty thought,
    ``"language or nothing"``, the same with 1 for an empty thought, and ``"tagged accuracy"``, the product of the first
    two. Raises ValueError for an unknown reward."""

    task: TwoScripts
    parts: tuple[str, ...] = ALL

    def __post_init__(self) -> None:
        unknown = set(self.parts) - {*ALL, "language or nothing", "tagged accuracy"}
        if unknown or not self.parts:
            raise ValueError(
                f"parts={self.parts} must be some of {ALL}, 'language or nothing', 'tagged accuracy'"
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "task":
            raise AttributeError(name)
        return getattr(self.task, name)  # prompts, vocabulary and the rest are the task's

    def __len__(self) -> int:
        return len(self.task)

    def rewards(self, indices: Tensor | Sequence[int], completions: Tensor, mask: Tensor) -> Tensor:
        """The sum, (n,) float32."""
        readings = self.task.read(indices, completions, mask)
        right = torch.tensor([float(r.pad.correct) for r in readings])
        tagged = torch.tensor([float(r.tagged) for r in readings])
        total = torch.zeros(len(readings))
        for part in self.parts:
            if part in ("language", "language or nothing"):
                empty = float(part == "language or nothing")
                total += tagged * language_consistency([r.native for r in readings], bool, empty)
            else:
                total += {"accuracy": right, "format": tagged, "tagged accuracy": right * tagged}[part]
        return total


@dataclass(frozen=True)
class UnaskedEffort(EffortTask):
    """The null of effort: the prompt shows another of the levels than the one that rewards go by, any of them
    as often, so that the number says nothing."""

    def prompts(self, indices: Tensor | Sequence[int]) -> Tensor:
        """As :class:`EffortTask`'s, with an effort that the problem, not the reward, determines."""
        count = len(self.asked)
        inner = torch.as_tensor(indices) // count
        shown = (inner * 7919 // 13 + torch.as_tensor(indices) * 5) % count
        return super().prompts(inner * count + (shown + inner) % count)
