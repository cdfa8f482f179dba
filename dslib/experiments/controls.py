"""Controls that several experiments share: the same training, with what is to be learnt from taken away.

Shuffled rewards keep how much was earned and lose who earned it. Within a batch the means of groups change, too: a
problem that nobody solves gets some of another's rewards, and an advantage tells groups apart by luck. Within a
group each problem keeps its own rewards, and their spread, so the sizes of the advantages are those of the run that
it is the control of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dslib.rl.episodes import EpisodeTrainer
from dslib.rl.samples import Samples
from dslib.tasks.verifiable import Task

#: Among which samples rewards are shuffled.
WITHIN = ("batch", "group")


def shuffled(
    rewards: Tensor, within: str, generator: torch.Generator, groups: Tensor | None = None
) -> Tensor:
    """``rewards`` (n,) in a random order: of all of them, or ``within`` each ``"group"`` of equal numbers in ``groups``
    (n,) int64, a problem's index say. One permutation of n is drawn either way.

    Raises ValueError for another ``within``, and for ``"group"`` without ``groups`` of the shape of ``rewards``.
    """
    _check_within(within)
    order = torch.randperm(len(rewards), generator=generator)
    if within == "batch":
        return rewards[order]
    if groups is None or groups.shape != rewards.shape:
        found = None if groups is None else tuple(groups.shape)
        raise ValueError(
            f"groups is {found} for rewards {tuple(rewards.shape)}; within='group' needs one number each"
        )
    own, other = groups.argsort(stable=True), order[groups[order].argsort(stable=True)]
    return torch.empty_like(rewards).index_copy(0, own, rewards[other])


class ShuffledRewards:
    """A task whose rewards are those of another, shuffled ``within`` each ``"batch"``, or ``"group"`` of one problem;
    a problem that was drawn twice is one group. All else is the other task's.

    ``seed``: of the orders, one after another, so that the same batch has another order each time. None: an order
    depends on the completions alone, and the task keeps no state. Raises ValueError for another ``within``.
    """

    def __init__(self, task: Task, within: str, seed: int | None = None) -> None:
        _check_within(within)
        self.task, self.within = task, within
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "task":  # not there yet, while an instance is unpickled
            raise AttributeError(name)
        return getattr(self.task, name)

    def __len__(self) -> int:
        return len(self.task)

    def rewards(self, indices: Tensor | Sequence[int], completions: Tensor, mask: Tensor) -> Tensor:
        """The task's rewards in a random order, (n,)."""
        generator = self.generator
        if generator is None:
            generator = torch.Generator().manual_seed(int(completions.sum()))
        earned = self.task.rewards(indices, completions, mask)
        return shuffled(earned, self.within, generator, torch.as_tensor(indices))


class ShuffledEpisodeTrainer(EpisodeTrainer):
    """An :class:`~dslib.rl.episodes.EpisodeTrainer` that shuffles the rewards of a step ``within`` the ``"batch"`` of
    its episodes, or the ``"group"`` of those in one world, with its own random numbers. Arguments are the other's,
    and its errors; ValueError for another ``within``."""

    def __init__(self, *arguments: Any, within: str, **options: Any) -> None:
        _check_within(within)
        super().__init__(*arguments, **options)
        self.within = within

    def collect(self) -> Samples:
        """As in :class:`~dslib.rl.episodes.EpisodeTrainer`."""
        samples = super().collect()
        worlds = samples.indices.repeat_interleave(self.config.group_size)
        rewards = shuffled(samples.rewards.flatten(), self.within, self.generator, worlds)
        return replace(samples, rewards=rewards.view_as(samples.rewards))


def _check_within(within: str) -> None:
    if within not in WITHIN:
        raise ValueError(f"within={within!r} is unknown; use one of {', '.join(map(repr, WITHIN))}")
