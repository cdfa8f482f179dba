"""Which sequences and which groups are left out of a loss."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslib.rl import informative_groups, off_policy_sequence_mask


def case(drifts, lengths, advantages, tokens=5):
    """Sequences that the policy now finds e^drift times less likely, a token."""
    mask = torch.arange(tokens) < torch.tensor(lengths).unsqueeze(1)
    old = -torch.rand(mask.shape, generator=torch.Generator().manual_seed(0))
    logp = old - torch.tensor(drifts).unsqueeze(1)
    return logp, old, torch.tensor(advantages), mask


def test_only_bad_sequences_that_the_policy_has_left_are_masked():
    logp, old, advantages, mask = case([0.5, 0.5, 0.1, -0.5, 0.5], [5, 2, 5, 5, 3], [-1.0, -0.2, -1, -1, 1])
    assert off_policy_sequence_mask(logp, old, advantages, mask, 0.3).tolist() == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_the_mean_is_over_a_sequences_own_tokens_and_not_over_the_batchs_width():
    """Two tokens of drift 0.5 in a row of 5: divided by 5 it would be 0.2 and the sequence kept."""
    logp, old, advantages, mask = case([0.5], [2], [-1.0])
    assert off_policy_sequence_mask(logp, old, advantages, mask, 0.45).tolist() == [False]
    assert off_policy_sequence_mask(logp, old, advantages, mask, 0.55).tolist() == [True]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_padding_does_not_decide(poison):
    logp, old, advantages, mask = case([0.5, 0.1], [2, 3], [-1.0, -1.0])
    expected = off_policy_sequence_mask(logp, old, advantages, mask, 0.3)
    logp, old = (torch.where(mask, x, poison) for x in (logp, old))
    assert torch.equal(off_policy_sequence_mask(logp, old, advantages, mask, 0.3), expected)
    assert expected.tolist() == [False, True]


def test_advantages_of_tokens_count_by_their_mean_over_scored_ones():
    logp, old, _, mask = case([0.5, 0.5], [2, 2], [0.0, 0.0])
    advantages = torch.tensor([[1.0, -3, 9, 9, 9], [3, -1, -9, -9, math.nan]])
    assert off_policy_sequence_mask(logp, old, advantages, mask, 0.3).tolist() == [False, True]


@given(st.floats(0, 2), st.floats(0, 2))
def test_a_larger_delta_keeps_at_least_as_many(a, b):
    logp, old, advantages, mask = case([0.1, 0.4, 0.9, 1.5], [5, 4, 3, 2], [-1.0] * 4)
    few, many = (off_policy_sequence_mask(logp, old, advantages, mask, d) for d in sorted((a, b)))
    assert (few <= many).all()


def test_a_sequence_without_a_token_and_an_empty_batch_are_kept():
    logp, old, advantages, mask = case([9.0], [0], [-1.0])
    assert off_policy_sequence_mask(logp, old, advantages, mask, 0.0).tolist() == [True]
    empty = torch.zeros(0, 4)
    assert off_policy_sequence_mask(empty, empty, empty, empty.bool(), 0.1).shape == (0,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"delta": -0.1}, "delta=-0.1"),
        ({"delta": math.nan}, "delta=nan"),
        ({"mask": torch.ones(1, 5)}, "mask is torch.float32"),
        ({"logp": torch.zeros(1, 4)}, r"logp has shape \(1, 4\)"),
        ({"advantages": torch.zeros(2)}, r"advantages has shape \(2,\)"),
    ],
)
def test_bad_input_is_refused_with_its_name_and_value(change, words):
    logp, old, advantages, mask = case([0.5], [5], [-1.0])
    arguments = {"logp": logp, "logp_old": old, "advantages": advantages, "mask": mask, "delta": 0.1}
    with pytest.raises(ValueError, match=words):
        off_policy_sequence_mask(**{**arguments, **change})


def test_groups_with_one_reward_throughout_teach_nothing():
    nan = math.nan
    rewards = torch.tensor([[1.0, 1, 1], [0, 0, 0], [0, 1, 0], [nan, 1, 1], [nan, 1, 0], [nan, nan, nan]])
    assert informative_groups(rewards).tolist() == [False, False, True, False, True, False]
    assert informative_groups(torch.zeros(2, 0)).tolist() == [False, False]
    with pytest.raises(ValueError, match=r"\(3,\)"):
        informative_groups(torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16, torch.float64])
def test_groups_are_informative_whatever_type_their_rewards_have(dtype):
    rewards = torch.tensor([[0, 1], [1, 1], [0, 0]]).to(dtype)
    assert informative_groups(rewards).tolist() == [True, False, False]
