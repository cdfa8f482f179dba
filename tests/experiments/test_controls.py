"""Shuffled rewards: the same rewards in each batch or group, and no longer those of their answers."""

import pickle

import pytest
import torch

from dslib.experiments.controls import ShuffledEpisodeTrainer, ShuffledRewards, shuffled
from dslib.rl import group_advantages
from dslib.tasks import Task
from dslib.tasks.countdown import Countdown

TASK = Countdown(problems=50, numbers=3, largest=6, digits=2)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_within_the_batch_the_rewards_are_the_same_and_groups_lose_their_own():
    rewards = torch.arange(32.0)
    found = shuffled(rewards, "batch", seeded())
    assert found.sort().values.tolist() == rewards.tolist()
    assert found.tolist() != rewards.tolist()
    assert found.view(4, 8).sum(1).tolist() != rewards.view(4, 8).sum(1).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_within_a_group_each_keeps_its_own_and_the_sizes_of_its_advantages(seed):
    groups, rewards = torch.tensor([3, 0, 7, 1]).repeat_interleave(16), torch.rand(64, generator=seeded(9))
    found = shuffled(rewards, "group", seeded(seed), groups)
    for before, after in zip(rewards.view(4, 16), found.view(4, 16), strict=True):
        assert before.tolist() != after.tolist()
        assert before.sort().values.tolist() == after.sort().values.tolist()
    sizes = [group_advantages(x.view(4, 16)).sort(1).values for x in (rewards, found)]
    torch.testing.assert_close(*sizes)


def test_groups_need_not_stand_together():
    groups = torch.tensor([0, 1] * 8)
    rewards = groups.float()
    assert torch.equal(shuffled(rewards, "group", seeded(), groups), rewards)


@pytest.mark.parametrize("within", ["batch", "group"])
def test_a_shuffled_task_is_the_other_but_for_the_order(within):
    indices = torch.arange(10).repeat_interleave(5)
    completions, mask = TASK.demonstrations(indices, seeded())
    true = TASK.rewards(indices, completions, mask)
    task = ShuffledRewards(TASK, within, seed=0)
    assert isinstance(task, Task)
    assert len(task) == len(TASK)
    assert torch.equal(task.prompts(indices), TASK.prompts(indices))
    first, second = (task.rewards(indices, completions, mask) for _ in range(2))
    assert true.sum() == first.sum() == second.sum() > 0
    assert not torch.equal(first, second)
    again = ShuffledRewards(TASK, within, seed=0).rewards(indices, completions, mask)
    assert torch.equal(first, again)


def test_without_a_seed_the_order_depends_on_the_completions_alone():
    indices = torch.arange(10).repeat_interleave(5)
    completions, mask = TASK.demonstrations(indices, seeded())
    task = ShuffledRewards(TASK, "group")
    found = [x.rewards(indices, completions, mask) for x in (task, task, pickle.loads(pickle.dumps(task)))]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_what_is_shuffled_within_what_has_to_be_said():
    with pytest.raises(ValueError, match="within='step' is unknown; use one of 'batch', 'group'"):
        ShuffledRewards(TASK, "step")
    with pytest.raises(ValueError, match="within='step'"):
        ShuffledEpisodeTrainer(within="step")
    with pytest.raises(ValueError, match=r"groups is None for rewards \(3,\)"):
        shuffled(torch.ones(3), "group", seeded())
