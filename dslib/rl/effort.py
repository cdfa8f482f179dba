"""Reasoning effort: one model, a number in the prompt, and a price of tokens that falls as the number rises.

DeepSeek-V4.1, §5.1.4. For each prompt x and each effort b of a few levels, responses are sampled, and only those
of one (x, b) are compared with each other (eq. 8); the reward carries a penalty on length that depends on b (eq. 9
and 10, :class:`dslib.rl.rewards.EffortPenalty`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dslib.rl.rewards import EffortPenalty
from dslib.tasks.verifiable import Task, checked_indices

#: The instruction names efforts of 1 to 100, in three digits or as a bar of ten ticks.
LARGEST_EFFORT, DIGITS, TICKS = 100, 3, 10


def subgroup_advantages(rewards: Tensor, subgroups: Tensor) -> Tensor:
    """R − mean of the rewards of the same subgroup, (n,) → (n,); ``subgroups``: (n,) int64, an id for each (x, b).

    The sizes M_b may differ between efforts (eq. 8); where they are all equal this is
    ``group_advantages(…, "grpo_no_std")`` of the subgroups. Equal rewards give exactly 0. A NaN reward takes its
    sample out: advantage 0, and a RuntimeWarning counts them. Raises ValueError for shapes that differ, infinite
    rewards, and a subgroup all of whose rewards are NaN.
    """
    if rewards.ndim != 1 or rewards.shape != subgroups.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and subgroups {tuple(subgroups.shape)} must both be (n,)"
        )
    if rewards.isinf().any():
        raise ValueError(f"rewards[{int(rewards.isinf().nonzero()[0])}] is infinite")
    ids, member = subgroups.unique(return_inverse=True)
    values, present = rewards.detach().double(), ~rewards.isnan()
    count = torch.zeros(len(ids), dtype=torch.float64).index_add(0, member, present.double())
    if (count == 0).any():
        lost = ids[count == 0].tolist()
        raise ValueError(f"all rewards of subgroup {lost[0]} are NaN, and of {len(lost)} subgroups in all")
    if not present.all():
        warnings.warn(
            f"{int((~present).sum())} of {len(rewards)} rewards are NaN; those samples have advantage 0",
            RuntimeWarning,
            stacklevel=2,
        )
    # From the lowest on, so that equal rewards are exactly 0 from it.
    lowest = torch.full_like(count, float("inf"))
    lowest = lowest.scatter_reduce(0, member[present], values[present], "amin")
    above = torch.where(present, values - lowest[member], 0.0)
    mean = torch.zeros_like(count).index_add(0, member, above) / count
    advantages = torch.where(present, above - mean[member], 0.0)
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def thought_lengths(completions: Tensor, mask: Tensor, think: int, think_end: int) -> Tensor:
    """ℓ of eq. 9, the tokens between the first ``think`` and the first ``think_end`` after it: (n, new) → (n,)
    int64. A thought that is not closed goes on to the end, and one that is not opened has length 0."""
    opened = ((completions == think) & mask).cumsum(1) > 0
    inside = opened & mask
    closed = ((completions == think_end) & inside).cumsum(1) > 0
    return (inside & ~closed).sum(1) - opened.any(1).long()


@dataclass(frozen=True)
class EffortTask:
    """A task whose prompts ask for an effort and whose rewards charge for thoughts accordingly.

    Problem ``i`` is problem ``i // len(efforts)`` of ``task`` at effort ``efforts[i % len(efforts)]``, so that the
    groups of :class:`dslib.rl.trainer.Trainer` are the subgroups (x, b); the algorithm has to be one that compares
    within groups and does not divide by their deviation, ``"grpo_no_std"``. The effort stands before the prompt,
    in three digits, ten tokens behind the task's own, or as a bar of ten ticks, one full for each ten, of two
    tokens behind the task's: to a model that has not learnt from text how numbers are ordered, 87 has nothing to do
    with 75 and 100. Raises ValueError for an effort outside 1 … 100, and in a bar for one that is no multiple of ten.
    """

    #: What is asked.
    task: Task
    #: What a thought costs at each effort.
    penalty: EffortPenalty = field(default_factory=EffortPenalty)
    #: The efforts of the problems; None for the penalty's levels. Others, between them too, serve evaluation.
    efforts: tuple[int, ...] | None = None
    #: (completions, mask) → (n,), how many reasoning tokens there are; without it all tokens count.
    thinking: Callable[[Tensor, Tensor], Tensor] | None = None
    #: ``"digits"`` or ``"bar"``.
    written: str = "digits"

    def __post_init__(self) -> None:
        if self.written not in ("digits", "bar"):
            raise ValueError(f"written={self.written!r} is unknown; use 'digits' or 'bar'")
        if self.efforts is not None and not self.efforts:
            raise ValueError("efforts=() must name at least one")
        for effort in self.asked:
            if not 1 <= effort <= LARGEST_EFFORT:
                raise ValueError(f"effort {effort} must lie in 1 … {LARGEST_EFFORT}")
            if self.written == "bar" and effort * TICKS % LARGEST_EFFORT:
                raise ValueError(
                    f"effort {effort} is no whole number of ticks; use multiples of {LARGEST_EFFORT // TICKS}"
                )

    @property
    def asked(self) -> tuple[int, ...]:
        """The efforts of the problems."""
        return self.penalty.levels if self.efforts is None else self.efforts

    @property
    def vocab_size(self) -> int:
        """The task's tokens and ten digits, or two ticks."""
        return self.task.vocab_size + (2 if self.written == "bar" else 10)

    @property
    def end(self) -> int:
        """The task's."""
        return self.task.end

    @property
    def max_new_tokens(self) -> int:
        """The task's."""
        return self.task.max_new_tokens

    def __len__(self) -> int:
        return len(self.task) * len(self.asked)

    def split(self, indices: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
        """Indices of the task, and efforts, (n,) int64 each; raises IndexError outside the problems."""
        indices = checked_indices(indices, len(self))
        return indices // len(self.asked), torch.tensor(self.asked)[indices % len(self.asked)]

    def problem(self, index: int) -> tuple[Any, int]:
        """The task's problem and the effort."""
        inner, efforts = self.split([index])
        return self.task.problem(int(inner)), int(efforts)

    def prompts(self, indices: Tensor | Sequence[int]) -> Tensor:
        """Three digits, or ten ticks, then the task's prompt: (n, 3 + time) or (n, 10 + time) int64."""
        inner, efforts = self.split(indices)
        if self.written == "bar":
            digits = (efforts.unsqueeze(1) * TICKS > LARGEST_EFFORT * torch.arange(TICKS)).long()
        else:
            digits = efforts.unsqueeze(1) // 10 ** torch.arange(DIGITS - 1, -1, -1) % 10
        return torch.cat((self.task.vocab_size + digits, self.task.prompts(inner)), dim=1)

    def rewards(self, indices: Tensor | Sequence[int], completions: Tensor, mask: Tensor) -> Tensor:
        """The task's rewards and the penalties, added: (n,) float32."""
        _, efforts = self.split(indices)
        return self.accuracy(indices, completions, mask) + self.penalty(
            self.lengths(completions, mask), efforts
        )

    def accuracy(self, indices: Tensor | Sequence[int], completions: Tensor, mask: Tensor) -> Tensor:
        """The task's rewards alone: (n,) float32."""
        return self.task.rewards(self.split(indices)[0], completions, mask)

    def lengths(self, completions: Tensor, mask: Tensor) -> Tensor:
        """Reasoning tokens: (n,) int64."""
        return mask.sum(1) if self.thinking is None else self.thinking(completions, mask)

    def demonstrations(
        self, indices: Tensor | Sequence[int], generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """The task's, whatever the effort: a model starts without knowing what the number means."""
        return self.task.demonstrations(self.split(indices)[0], generator)
