"""Reasoning effort: compared within one effort, priced by it, and the number asked for stands in the prompt."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslib.models import DecoderConfig
from dslib.rl import EffortPenalty, group_advantages
from dslib.rl.config import RLConfig
from dslib.rl.effort import EffortTask, subgroup_advantages, thought_lengths
from dslib.rl.trainer import Trainer
from dslib.tasks.pointer_chasing import PointerChasing
from dslib.tasks.verifiable import Task

NAN = float("nan")
PENALTY = EffortPenalty(levels=(20, 60, 100), base=0.5, decay=0.5, normal_length=4.0, maximum=0.9)


def test_responses_are_compared_with_those_of_their_own_effort_only():
    rewards = torch.tensor([1.0, 0.0, 0.0, 5.0, 4.0, 4.5, 4.5])
    subgroups = torch.tensor([7, 7, 7, 2, 2, 2, 2])
    expected = [2 / 3, -1 / 3, -1 / 3, 0.5, -0.5, 0, 0]
    assert subgroup_advantages(rewards, subgroups).tolist() == pytest.approx(expected)


@given(seed=st.integers(0, 10**6), prompts=st.integers(1, 5), group_size=st.integers(1, 5))
def test_of_equal_sizes_they_are_grpos_without_deviation_in_any_order(seed, prompts, group_size):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(prompts, group_size, generator=generator)
    order = torch.randperm(prompts * group_size, generator=generator)
    ids = torch.arange(prompts).repeat_interleave(group_size) - 2
    found = subgroup_advantages(rewards.flatten()[order], ids[order])
    torch.testing.assert_close(found, group_advantages(rewards, "grpo_no_std").flatten()[order])


def test_equal_rewards_give_exactly_nothing():
    assert subgroup_advantages(torch.full((7,), 0.1), torch.zeros(7, dtype=torch.long)).tolist() == [0] * 7
    assert subgroup_advantages(torch.tensor([]), torch.tensor([], dtype=torch.long)).shape == (0,)


def test_a_missing_reward_takes_its_sample_out_and_a_missing_subgroup_is_an_error():
    subgroups = torch.tensor([0, 0, 0, 1])
    with pytest.warns(RuntimeWarning, match="1 of 4"):
        found = subgroup_advantages(torch.tensor([1.0, NAN, 0.0, 3.0]), subgroups)
    assert found.tolist() == [0.5, 0, -0.5, 0]
    with pytest.raises(ValueError, match="all rewards of subgroup 1 are NaN"):
        subgroup_advantages(torch.tensor([1.0, 0.0, 0.0, NAN]), subgroups)
    with pytest.raises(ValueError, match=r"rewards\[1\] is infinite"):
        subgroup_advantages(torch.tensor([1.0, float("inf"), 0.0, 0.0]), subgroups)
    with pytest.raises(ValueError, match=r"rewards \(4,\) and subgroups \(3,\)"):
        subgroup_advantages(torch.zeros(4), torch.zeros(3))


def test_a_thought_is_what_stands_between_its_tags():
    think, close = 8, 9
    rows = [
        [8, 1, 2, 9, 3],
        [8, 9, 1, 2, 3],
        [1, 8, 2, 3, 4],
        [1, 9, 2, 3, 4],
        [8, 1, 8, 2, 9],
        [8, 1, 2, 9, 3],
    ]
    mask = torch.ones(6, 5, dtype=torch.bool)
    mask[5, 2:] = False
    assert thought_lengths(torch.tensor(rows), mask, think, close).tolist() == [2, 0, 3, 0, 3, 1]


def effort_task():
    inner = PointerChasing(problems=5, symbols=3, least_hops=1, most_hops=3, max_thought=3)
    return EffortTask(
        inner, PENALTY, thinking=lambda c, m: thought_lengths(c, m, inner.think, inner.think_end)
    )


def test_every_problem_is_asked_at_every_effort():
    task = effort_task()
    assert isinstance(task, Task)
    assert len(task) == 15
    assert task.vocab_size == task.task.vocab_size + 10
    assert [task.problem(i)[1] for i in range(4)] == [20, 60, 100, 20]
    assert task.problem(4)[0] == task.task.problem(1)
    prompts, digit = task.prompts([4, 5]), task.task.vocab_size
    assert prompts[:, :3].tolist() == [[digit, digit + 6, digit], [digit + 1, digit, digit]]
    assert torch.equal(prompts[:, 3:], task.task.prompts([1, 1]))
    with pytest.raises(IndexError, match="problem 15"):
        task.prompts([15])


def test_the_same_thought_costs_less_at_higher_effort():
    task = effort_task()
    completions, mask = task.task.traces([3, 3, 3], [1, 1, 1])
    indices = torch.tensor([9, 10, 11])
    assert task.accuracy(indices, completions, mask).tolist() == [1, 1, 1]
    thoughts = task.lengths(completions, mask)
    assert thoughts[0] == task.task.problem(3).hops - 1
    rewards = task.rewards(indices, completions, mask)
    # Eq. 10: τ = λ·Δb = 20; eq. 9 with ℓ/L_norm.
    k = 0.5 * torch.exp(-torch.tensor([0.0, 40.0, 80.0]) / 20)
    torch.testing.assert_close(rewards, 1 - (k * thoughts / 4.0).clamp_max(0.9))


def test_efforts_between_the_levels_can_be_asked_for():
    task = replace(effort_task(), efforts=(40,))
    assert len(task) == 5
    completions, mask = task.task.traces([2], [1])
    length = task.lengths(completions, mask)
    expected = 1 - 0.5 * torch.exp(torch.tensor(-1.0)) * length / 4
    torch.testing.assert_close(task.rewards([2], completions, mask), expected.float())
    for bad in ((), (0,), (101,)):
        with pytest.raises(ValueError, match="effort"):
            replace(task, efforts=bad)


class Talk:
    """Any answer is right: what is left is the price of its tokens."""

    vocab_size, end, max_new_tokens = 4, 3, 6

    def __len__(self):
        return 2

    def prompts(self, indices):
        return torch.as_tensor(indices).unsqueeze(1)

    def rewards(self, indices, completions, mask):
        talked = (mask & (completions != self.end)).sum(1)
        return 0.15 * talked.float()


def test_a_model_learns_to_be_brief_where_brevity_is_asked_for():
    """Each token earns .15 and costs 1/3 at effort 1, next to nothing at effort 100."""
    penalty = EffortPenalty(levels=(1, 100), base=2.0, decay=0.2, normal_length=6.0, maximum=2.0)
    task = EffortTask(Talk(), penalty)
    model = DecoderConfig(vocab_size=task.vocab_size, d_model=16, layers=1, heads=2).build(0)
    config = RLConfig(algorithm="grpo_no_std", prompts=8, group_size=8, lr=2e-2)
    trainer = Trainer(model, task, config)
    trainer.run(40)
    lengths = {1: [], 100: []}
    for _ in range(3):
        trainer.step()
        _, efforts = task.split(trainer.last.indices)
        for effort, length in zip(efforts, trainer.last.rollout.lengths.view(-1, 8).double(), strict=True):
            lengths[int(effort)].append(length.mean().item())
    mean = {effort: sum(found) / len(found) for effort, found in lengths.items()}
    assert mean[100] > mean[1] + 2


def test_bar_has_a_full_tick_for_every_ten_so_that_neighbouring_efforts_look_alike():
    task = EffortTask(PointerChasing(problems=4), efforts=(10, 40, 90, 100), written="bar")
    prompts = task.prompts(range(4))
    ticks = prompts[:, :10] - task.task.vocab_size
    assert ticks.tolist() == [[1] * n + [0] * (10 - n) for n in (1, 4, 9, 10)]
    assert torch.equal(prompts[:, 10:], task.task.prompts([0] * 4))
    assert int(prompts.max()) < task.vocab_size == task.task.vocab_size + 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"efforts": (25,), "written": "bar"}, "effort 25 is no whole number of ticks; use multiples of 10"),
        ({"written": "roman"}, "written='roman' is unknown"),
    ],
)
def test_effort_that_cannot_be_written_so_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EffortTask(PointerChasing(problems=4), **options)
