"""Advantages: the values of each kind, their scope, and what missing or equal rewards do."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslib.rl import gae, group_advantages, token_rewards, whiten

REWARDS = torch.tensor([[1.0, 0, 0, 0, 1, 0, 0, 0]])
GROUP_KINDS = ("grpo", "grpo_no_std", "rloo")


@pytest.mark.parametrize(
    ("kind", "options", "right", "wrong"),
    [
        ("grpo_no_std", {}, 0.75, -0.25),
        ("rloo", {}, 0.857143, -0.285714),
        ("grpo", {}, 1.62018, -0.54006),
        ("grpo", {"ddof": 0}, 1.73205, -0.57735),
        ("reinforce++", {}, 1.62018, -0.54006),
    ],
)
def test_known_values(kind, options, right, wrong):
    expected = torch.where(REWARDS == 1, right, wrong)
    torch.testing.assert_close(group_advantages(REWARDS, kind, **options), expected, rtol=0, atol=5e-6)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9))
def test_leaving_one_out_is_the_mean_of_the_others_and_rescales_the_centred_reward(rewards):
    values = torch.tensor([rewards], dtype=torch.float64)
    n = len(rewards)
    by_hand = [r - (sum(rewards) - r) / (n - 1) for r in rewards]
    assert group_advantages(values, "rloo")[0].tolist() == pytest.approx(by_hand, abs=1e-9)
    centred = group_advantages(values, "grpo_no_std")
    torch.testing.assert_close(group_advantages(values, "rloo"), centred * n / (n - 1))


@given(st.integers(0, 2**31), st.integers(2, 8))
def test_groups_do_not_see_each_other_and_their_advantages_add_up_to_0(seed, size):
    rewards = torch.rand(4, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for kind in GROUP_KINDS:
        together = group_advantages(rewards, kind)
        alone = torch.cat([group_advantages(row, kind) for row in rewards.split(1)])
        torch.testing.assert_close(together, alone)
        assert together.sum(-1).abs().max() < 1e-9


def test_the_scope_of_a_normalisation_is_the_papers_or_the_one_asked_for():
    rewards = torch.tensor([[1.0, 0, 0, 1], [1, 1, 1, 0]]).double()
    flat = rewards.reshape(1, -1)
    for kind in (*GROUP_KINDS, "reinforce++"):
        one_group = group_advantages(flat, kind, scope="group").reshape(2, 4)
        torch.testing.assert_close(group_advantages(rewards, kind, scope="batch"), one_group)
    torch.testing.assert_close(
        group_advantages(rewards, "reinforce++"), group_advantages(rewards, "grpo", scope="batch")
    )
    leave_one_out = (flat.sum() - rewards) / 7
    torch.testing.assert_close(group_advantages(rewards, "rloo", scope="batch"), rewards - leave_one_out)
    assert not torch.allclose(group_advantages(rewards, "rloo"), rewards - leave_one_out)


def test_remax_subtracts_the_reward_of_the_greedy_answer():
    rewards = torch.tensor([[1.0, 0], [1, 1]])
    found = group_advantages(rewards, "remax", baseline=torch.tensor([0.0, 1.0]))
    assert found.tolist() == [[1, 0], [0, 0]]


@pytest.mark.parametrize("value", [0.1, 1.0, -0.3, 1e6, 1e-8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [*GROUP_KINDS, "reinforce++"])
def test_equal_rewards_have_advantage_exactly_0(kind, dtype, value):
    """A standard deviation of rounding errors, 1.6e-4 in float32, would make thousands of it."""
    rewards = torch.full((3, 7), value).clamp(-6e4, 6e4).to(dtype)
    for eps in (0.0, 1e-6):
        assert group_advantages(rewards, kind, eps=eps).tolist() == [[0.0] * 7] * 3


def test_rewards_that_differ_by_a_rounding_alone_are_not_blown_up():
    rewards = torch.tensor([[0.3, 0.1 + 0.2, 0.3, 0.3]], dtype=torch.float64)
    assert group_advantages(rewards).abs().max() < 1e-9


def test_a_large_offset_costs_no_digits():
    torch.testing.assert_close(
        group_advantages(REWARDS.double() + 1e6), group_advantages(REWARDS.double()), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("kind", [*GROUP_KINDS, "reinforce++"])
def test_a_single_sample_has_nothing_to_be_compared_with(kind):
    assert group_advantages(torch.tensor([[3.0]]), kind).tolist() == [[0.0]]


@pytest.mark.parametrize("kind", [*GROUP_KINDS, "reinforce++", "remax"])
def test_a_nan_reward_takes_its_sample_out_and_is_counted(kind):
    whole = torch.tensor([[1.0, 0.0, math.nan, 0.0], [1.0, 1.0, 0.0, 0.0]])
    baseline = torch.tensor([0.5, 0.0]) if kind == "remax" else None
    with pytest.warns(RuntimeWarning, match="1 of 8 rewards are NaN"):
        found = group_advantages(whole, kind, baseline)
    assert found[0, 2] == 0
    if kind == "reinforce++":
        others = group_advantages(whole[~whole.isnan()].unsqueeze(0), kind)
        torch.testing.assert_close(found[~whole.isnan()].unsqueeze(0), others)
    else:
        base = None if baseline is None else baseline[:1]
        torch.testing.assert_close(found[0, [0, 1, 3]], group_advantages(whole[:1, [0, 1, 3]], kind, base)[0])
        torch.testing.assert_close(
            found[1:], group_advantages(whole[1:], kind, None if baseline is None else baseline[1:])
        )


def test_all_but_one_missing_leaves_one_that_has_nothing_to_be_compared_with():
    with pytest.warns(RuntimeWarning, match="2 of 3"):
        assert group_advantages(torch.tensor([[math.nan, 5.0, math.nan]]), "rloo").tolist() == [[0, 0, 0]]


def test_integer_rewards_give_float32_and_others_keep_their_dtype():
    assert group_advantages(torch.tensor([[1, 0]])).dtype == torch.float32
    assert group_advantages(torch.tensor([[1, 0]]).bfloat16()).dtype == torch.bfloat16
    assert group_advantages(torch.zeros(0, 4)).shape == (0, 4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: group_advantages(REWARDS[0]), r"\(8,\)"),
        (lambda: group_advantages(REWARDS, "ppo"), "kind='ppo'"),
        (lambda: group_advantages(REWARDS, scope="world"), "scope='world'"),
        (lambda: group_advantages(REWARDS, "remax", torch.zeros(1), scope="batch"), "'remax'"),
        (lambda: group_advantages(REWARDS, ddof=2), "ddof=2"),
        (lambda: group_advantages(REWARDS, eps=-1.0), "eps=-1.0"),
        (lambda: group_advantages(REWARDS, "remax"), "baseline is None"),
        (lambda: group_advantages(REWARDS, "remax", torch.zeros(2)), r"baseline has shape \(2,\)"),
        (
            lambda: group_advantages(REWARDS, "remax", torch.tensor([math.nan])),
            "baseline is nan for prompt 0",
        ),
        (lambda: group_advantages(REWARDS, "rloo", torch.zeros(1)), "kind='rloo'; only 'remax'"),
        (lambda: group_advantages(torch.tensor([[0.0, math.inf]])), "inf for sample 1 of prompt 0"),
        (lambda: group_advantages(torch.tensor([[1.0, 0], [math.nan, math.nan]])), "of prompt 1 are NaN"),
        (lambda: token_rewards(torch.zeros(2), torch.ones(3, 2, dtype=torch.bool)), r"\(2,\)"),
        (
            lambda: token_rewards(torch.zeros(3), torch.ones(3, 2, dtype=torch.bool), coefficient=0.1),
            "coefficient=0.1",
        ),
        (lambda: gae(*torch.zeros(2, 1, 2), torch.ones(1, 2, dtype=torch.bool), gamma=1.1), "gamma=1.1"),
        (lambda: gae(*torch.zeros(2, 1, 2), torch.ones(1, 2)), "float32"),
        (lambda: whiten(torch.zeros(1, 3), torch.ones(1, 2, dtype=torch.bool)), r"x has shape \(1, 3\)"),
    ],
)
def test_bad_input_is_refused_with_its_name_and_value(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def random_case(seed=0, sequences=3, tokens=6):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sequences, tokens, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([tokens, 4, 1])[:sequences]
    return rewards, values, torch.arange(tokens) < lengths.unsqueeze(1)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 1.0)])
def test_gae_is_the_discounted_sum_of_its_definition(gamma, lam):
    rewards, values, mask = random_case()
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for i in range(3):
        n = int(mask[i].sum())
        v = [*values[i, :n].tolist(), 0.0]
        delta = [rewards[i, t].item() + gamma * v[t + 1] - v[t] for t in range(n)]
        for t in range(n):
            by_hand = sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, n))
            assert advantages[i, t].item() == pytest.approx(by_hand)
            assert returns[i, t].item() == pytest.approx(by_hand + v[t])
    assert (advantages[~mask] == 0).all()
    assert (returns[~mask] == 0).all()


def test_without_discount_a_reward_at_the_end_is_compared_with_each_value():
    mask = torch.tensor([[True, True, True, False]])
    values = torch.tensor([[0.25, 0.5, 0.75, 9.0]])
    advantages, returns = gae(token_rewards(torch.tensor([1.0]), mask), values, mask)
    assert advantages.tolist() == [[0.75, 0.5, 0.25, 0]]
    assert returns.tolist() == [[1, 1, 1, 0]]


def test_gae_steps_over_tokens_that_are_not_scored():
    """What a tool wrote between two answers is as if it were not there."""
    rewards, values, _ = random_case(sequences=1)
    mask = torch.tensor([[True, True, False, False, True, True]])
    advantages, returns = gae(rewards, values, mask, 0.9, 0.7)
    short = [x[mask].unsqueeze(0) for x in (rewards, values)]
    for found, expected in zip(
        (advantages, returns), gae(*short, mask[mask].unsqueeze(0), 0.9, 0.7), strict=True
    ):
        torch.testing.assert_close(found[mask], expected[0])


def test_poisoned_padding_does_not_reach_advantages():
    rewards, values, mask = random_case()
    poisoned = [torch.where(mask, x, math.nan) for x in (rewards, values)]
    for found, expected in zip(
        gae(*poisoned, mask, 0.9, 0.7), gae(rewards, values, mask, 0.9, 0.7), strict=True
    ):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(whiten(poisoned[0], mask), whiten(rewards, mask))


def test_the_reward_lands_on_the_last_scored_token_and_kl_is_paid_at_each():
    mask = torch.tensor([[True, True, False], [False, True, True], [False, False, False]])
    kl = torch.tensor([[0.1, 0.2, math.nan], [math.nan, 0.3, 0.4], [1.0, 1, 1]])
    found = token_rewards(torch.tensor([1.0, 2.0, 3.0]), mask, kl, 0.5)
    torch.testing.assert_close(found, torch.tensor([[-0.05, 0.9, 0.0], [0.0, -0.15, 1.8], [0.0, 0.0, 0.0]]))


def test_whitened_advantages_have_mean_0_and_variance_1_over_scored_tokens_alone():
    _, values, mask = random_case()
    scored = whiten(values, mask)[mask]
    assert scored.mean().item() == pytest.approx(0, abs=1e-9)
    assert scored.var().item() == pytest.approx(1, rel=1e-6)
    equal = torch.full((1, 7), 0.1)
    assert whiten(equal, torch.ones(1, 7, dtype=torch.bool)).tolist() == [[0.0] * 7]
    assert whiten(equal, torch.zeros(1, 7, dtype=torch.bool)).tolist() == [[0.0] * 7]
    assert whiten(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)).shape == (0, 3)
