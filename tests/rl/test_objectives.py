"""The policy loss: its value by hand, and what it must not depend on."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dslib.rl import (
    ALGORITHMS,
    LossConfig,
    PolicyBatch,
    kl_estimate,
    loss_normalizer,
    merged_metrics,
    policy_loss,
)
from dslib.rl.objectives import AGGREGATIONS, RATIOS

TENSORS = ("logp", "logp_old", "logp_ref", "values", "returns", "values_old", "entropy")
CONFIGS = {
    "PPO": LossConfig(),
    "GRPO with KL": LossConfig(aggregation="sequence", kl=0.1),
    "DeepSeek-V3.2": LossConfig(aggregation="sequence", kl=0.1, kl_unbiased=True, off_policy_delta=0.05),
    "Dr. GRPO": LossConfig(aggregation="constant", max_length=9),
    "DAPO": LossConfig(clip_high=0.28),
    "GSPO": LossConfig(clip_low=0.05, clip_high=0.06, ratio="sequence", aggregation="sequence", kl=0.1),
    "GSPO over tokens": LossConfig(ratio="sequence", kl=0.1, kl_kind="k2", kl_unbiased=True),
    "with critic and entropy": LossConfig(value_coef=0.5, entropy_coef=0.01),
}


def make_batch(seed=0, lengths=(5, 2, 4, 1), tokens=6, dtype=torch.float64, token_advantages=False):
    """Sequences with a prompt's gap in one of them; the policy has moved from the old and the reference one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    shape = (len(lengths), tokens)
    mask = torch.arange(tokens) < torch.tensor(lengths, dtype=torch.long).unsqueeze(1)
    if len(lengths) > 2:
        mask[2, 1] = False
    logp = -normal(*shape).abs() - 0.1
    return PolicyBatch(
        logp=logp.requires_grad_(),
        logp_old=logp.detach() + 0.3 * normal(*shape),
        advantages=normal(*shape) if token_advantages else normal(len(lengths)),
        mask=mask,
        logp_ref=logp.detach() + 0.5 * normal(*shape),
        values=normal(*shape).requires_grad_(),
        returns=normal(*shape),
        values_old=normal(*shape),
        entropy=normal(*shape).abs().requires_grad_(),
    )


def gradients(batch, config, normalizer=None):
    result = policy_loss(batch, config, normalizer)
    leaves = [batch.logp, batch.values, batch.entropy]
    found = torch.autograd.grad(result.loss, leaves, allow_unused=True)
    return result, [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def by_hand(batch, config):
    """The formula, token by token, in Python's numbers."""
    scored = [[t for t in range(batch.mask.shape[1]) if batch.mask[i, t]] for i in range(len(batch))]
    rows = [i for i, own in enumerate(scored) if own]
    total = 0.0
    for i in rows:
        steps = [(batch.logp[i, t] - batch.logp_old[i, t]).item() for t in scored[i]]
        mean = sum(steps) / len(steps)
        for t, step in zip(scored[i], steps, strict=True):
            advantage = batch.advantages[i] if batch.advantages.ndim == 1 else batch.advantages[i, t]
            advantage = advantage.item()
            ratio = math.exp(step if config.ratio == "token" else mean)
            clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            left_out = (
                config.off_policy_delta is not None and advantage < 0 and -mean > config.off_policy_delta
            )
            loss = 0.0 if left_out else -min(ratio * advantage, clipped * advantage)
            old = batch.logp_old[i, t] if config.kl_unbiased else None
            loss += (
                config.kl * kl_estimate(batch.logp[i, t], batch.logp_ref[i, t], config.kl_kind, old).item()
            )
            v, r, v_old = (getattr(batch, x)[i, t].item() for x in ("values", "returns", "values_old"))
            near = v_old + min(max(v - v_old, -config.value_clip), config.value_clip)
            loss += config.value_coef * max((v - r) ** 2, (near - r) ** 2) / 2
            loss -= config.entropy_coef * batch.entropy[i, t].item()
            total += {
                "token": loss / sum(map(len, scored)),
                "sequence": loss / len(scored[i]) / len(rows),
                "constant": loss / len(rows) / (config.max_length or 1),
            }[config.aggregation]
    return total


@pytest.mark.parametrize("name", CONFIGS)
def test_value_is_the_formulas_token_by_token(name):
    batch = make_batch()
    assert policy_loss(batch, CONFIGS[name]).loss.item() == pytest.approx(by_hand(batch, CONFIGS[name]))


def test_advantages_may_be_of_tokens():
    config = LossConfig(value_coef=0.5)
    batch = make_batch(token_advantages=True)
    assert policy_loss(batch, config).loss.item() == pytest.approx(by_hand(batch, config))


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("token", 5 / 3), ("sequence", 1.5), ("constant", 1.25)]
)
def test_aggregations_of_two_answers_of_2_and_4_tokens_differ(aggregation, expected):
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    batch = PolicyBatch(torch.zeros(2, 4), torch.zeros(2, 4), -torch.tensor([1.0, 2.0]), mask)
    config = LossConfig(aggregation=aggregation, max_length=4)
    assert policy_loss(batch, config).loss.item() == pytest.approx(expected)
    assert loss_normalizer(mask, config) == {"token": 6, "sequence": 2, "constant": 8}[aggregation]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 0.79, 0.81, 1.0, 1.19, 1.27, 1.29, 3.0])
def test_clipping_removes_the_gradient_on_the_side_that_has_gone_far_enough(ratio, advantage):
    old = torch.tensor([[-3.0]], dtype=torch.float64)
    logp = (old + math.log(ratio)).requires_grad_()
    config = LossConfig(clip_low=0.2, clip_high=0.28)
    batch = PolicyBatch(logp, old, torch.tensor([advantage]), torch.ones(1, 1).bool())
    result = policy_loss(batch, config)
    (gradient,) = torch.autograd.grad(result.loss, logp)
    stopped = ratio > 1.28 if advantage > 0 else ratio < 0.8
    assert gradient.item() == pytest.approx(0.0 if stopped else -ratio * advantage)
    assert result.metrics["clip_share"] == stopped
    assert result.metrics["clip_share_high"] == (stopped and advantage > 0)
    assert result.metrics["clip_share_low"] == (stopped and advantage < 0)
    free = policy_loss(batch, LossConfig(clip_low=math.inf, clip_high=math.inf))
    assert free.loss.item() == pytest.approx(-ratio * advantage)


def test_on_policy_every_algorithm_without_kl_has_the_policy_gradient():
    """At π = π_old the ratio is 1 and its gradient ∇ log π, so −Σ w·Â·∇ log π is left, whatever is clipped."""
    batch = make_batch()
    batch = dataclasses.replace(batch, logp_old=batch.logp.detach())
    for name, algorithm in ALGORITHMS.items():
        config = dataclasses.replace(algorithm.loss, value_coef=0.0, max_length=9)
        result, (gradient, *_) = gradients(batch, config)
        weights = batch.mask.double()
        if config.aggregation == "sequence":
            weights = weights / batch.mask.sum(1, keepdim=True)
        weights = weights / loss_normalizer(batch.mask, config)
        torch.testing.assert_close(gradient, -weights * batch.advantages.unsqueeze(1), msg=name)
        assert result.metrics["ratio_mean"] == result.metrics["ratio_max"] == 1
        assert result.metrics["clip_share"] == result.metrics["old_kl"] == 0


def test_gspo_is_the_clipped_objective_of_whole_sequences():
    """Its value and its gradient, through s = exp(mean log-ratio), without going token by token."""
    config = CONFIGS["GSPO"]
    batch = make_batch(4, lengths=(5, 2, 4))
    result, (gradient, *_) = gradients(batch, dataclasses.replace(config, kl=0.0))
    leaf = batch.logp.detach().requires_grad_()
    steps = torch.where(batch.mask, leaf - batch.logp_old, 0)
    s = (steps.sum(1) / batch.mask.sum(1)).exp()
    clipped = s.clamp(1 - config.clip_low, 1 + config.clip_high)
    whole = -torch.minimum(s * batch.advantages, clipped * batch.advantages).mean()
    (expected,) = torch.autograd.grad(whole, leaf)
    assert 0 < result.metrics["clip_share"] < 1
    torch.testing.assert_close(result.loss, whole)
    torch.testing.assert_close(gradient, expected)


def test_kl_is_weighted_by_the_tokens_ratio_also_where_the_surrogate_takes_the_sequences():
    batch = make_batch()
    parts = []
    for ratio in RATIOS:
        with_kl = LossConfig(ratio=ratio, kl=0.3, kl_unbiased=True)
        (_, with_gradient), (_, without) = (
            gradients(batch, config) for config in (with_kl, dataclasses.replace(with_kl, kl=0.0))
        )
        parts.append(with_gradient[0] - without[0])
    torch.testing.assert_close(*parts)
    expected = (
        kl_estimate(batch.logp, batch.logp_ref, "k3", batch.logp_old, batch.mask).sum() / batch.mask.sum()
    )
    (gradient,) = torch.autograd.grad(0.3 * expected, batch.logp)
    torch.testing.assert_close(parts[0], gradient)


def test_off_policy_mask_takes_out_surrogates_but_neither_kl_nor_denominators():
    batch = make_batch(lengths=(3, 3), tokens=3)
    logp = batch.logp.detach()
    batch = dataclasses.replace(batch, logp_old=logp + 0.5, advantages=torch.tensor([-1.0, 1.0]))
    config = LossConfig(kl=0.1, off_policy_delta=0.2)
    result, (gradient, *_) = gradients(batch, config)
    assert result.metrics["kept_share"] == 0.5
    assert result.metrics["old_kl"] == pytest.approx(0.5)
    kl = kl_estimate(batch.logp, batch.logp_ref, "k3")
    surrogate = (-(batch.logp[1] - batch.logp_old[1]).exp()).sum()
    expected = (0.1 * kl.sum() + surrogate) / 6
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, batch.logp)[0])
    lenient = policy_loss(batch, dataclasses.replace(config, off_policy_delta=0.6))
    assert lenient.metrics["kept_share"] == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_gradients_and_metrics_do_not_depend_on_the_cut_into_micro_batches(name, size, dtype):
    config, batch = CONFIGS[name], make_batch(dtype=dtype)
    whole, expected = gradients(batch, config)
    normalizer = loss_normalizer(batch.mask, config)
    parts = [policy_loss(part, config, normalizer) for part in batch.split(size)]
    loss = sum(part.loss for part in parts)
    leaves = [batch.logp, batch.values, batch.entropy]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    assert abs(loss.item() - whole.loss.item()) < 1e-6
    for ours, exact in zip(found, expected, strict=True):
        assert ours is None or (ours - exact).abs().max() < 1e-6
    assert merged_metrics(parts) == pytest.approx(whole.metrics, abs=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 0.0, 1e30])
def test_loss_gradients_and_metrics_do_not_depend_on_padding(name, poison):
    """More columns, a row in which nothing is scored, and anything at all in what is not."""
    config, batch = CONFIGS[name], make_batch()
    whole, expected = gradients(batch, config)
    mask = torch.zeros(len(batch) + 1, 9, dtype=torch.bool)
    mask[:-1, :6] = batch.mask
    fields = {}
    for field in TENSORS:
        x = torch.full(mask.shape, poison, dtype=torch.float64)
        x[mask] = getattr(batch, field).detach()[batch.mask]
        fields[field] = x.requires_grad_(field in ("logp", "values", "entropy"))
    advantages = torch.cat((batch.advantages, torch.tensor([poison])))
    padded, found = gradients(PolicyBatch(**fields, advantages=advantages, mask=mask), config)
    assert abs(padded.loss.item() - whole.loss.item()) < 1e-6
    for ours, exact in zip(found, expected, strict=True):
        assert (ours[mask] - exact[batch.mask]).abs().max() < 1e-6
        assert (ours[~mask] == 0).all()
    assert padded.metrics == pytest.approx(whole.metrics)
    assert (padded.tokens, padded.sequences) == (whole.tokens, whole.sequences) == (11, 4)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 1000), st.permutations(range(4)), st.sampled_from(AGGREGATIONS), st.sampled_from(RATIOS)
)
def test_the_order_of_sequences_does_not_matter(seed, order, aggregation, ratio):
    config = LossConfig(aggregation=aggregation, ratio=ratio, max_length=7, kl=0.1)
    batch = make_batch(seed)
    shuffled = policy_loss(batch.rows(torch.tensor(order)), config)
    assert shuffled.loss.item() == pytest.approx(policy_loss(batch, config).loss.item(), abs=1e-9)


@pytest.mark.parametrize("name", ["PPO", "GSPO", "DeepSeek-V3.2"])
def test_huge_log_ratios_leave_value_and_gradients_finite(name):
    for drift in (-1e4, -100.0, 100.0, 1e4):
        batch = make_batch(dtype=torch.float32)
        old = batch.logp.detach().clone()
        old[0, 0] -= drift
        for sign in (1.0, -1.0):
            changed = dataclasses.replace(
                batch, logp_old=old, logp_ref=batch.logp_ref + drift, advantages=sign * torch.ones(4)
            )
            result, found = gradients(changed, CONFIGS[name])
            assert result.loss.isfinite()
            assert all(gradient.isfinite().all() for gradient in found)


def test_constants_have_no_gradient_and_the_inputs_stay():
    batch = make_batch()
    constants = {
        name: getattr(batch, name).detach().clone().requires_grad_()
        for name in ("logp_old", "advantages", "logp_ref", "returns", "values_old")
    }
    before = {name: x.detach().clone() for name, x in constants.items()}
    loss = policy_loss(
        dataclasses.replace(batch, **constants), LossConfig(kl=0.1, kl_unbiased=True, value_coef=1)
    )
    loss.loss.backward()
    assert all(x.grad is None for x in constants.values())
    assert all(torch.equal(x, before[name]) for name, x in constants.items())
    assert batch.logp.grad is not None
    assert batch.values.grad is not None


def test_short_dtypes_are_computed_in_float32():
    batch = make_batch(dtype=torch.bfloat16)
    result, (gradient, *_) = gradients(batch, CONFIGS["DeepSeek-V3.2"])
    longer = {name: getattr(batch, name).detach().float() for name in TENSORS}
    exact = policy_loss(
        PolicyBatch(**longer, advantages=batch.advantages.float(), mask=batch.mask), CONFIGS["DeepSeek-V3.2"]
    )
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == pytest.approx(exact.loss.item(), rel=1e-6)
    assert gradient.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 3)])
@pytest.mark.parametrize("name", ["PPO", "GSPO", "Dr. GRPO"])
def test_nothing_scored_is_a_loss_of_0_with_a_graph(name, shape):
    logp = torch.zeros(shape, requires_grad=True)
    zeros = torch.zeros(shape)
    batch = PolicyBatch(logp, zeros, torch.zeros(shape[0]), zeros.bool(), logp_ref=zeros)
    result = policy_loss(batch, CONFIGS[name])
    result.loss.backward()
    assert result.loss.item() == 0
    assert logp.grad.eq(0).all()
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert merged_metrics([result, result])["ratio_mean"] == 0


def test_kl_is_measured_wherever_there_is_a_reference_and_costs_nothing_at_0():
    batch = make_batch()
    free = policy_loss(batch, LossConfig())
    assert free.metrics["kl"] == pytest.approx(policy_loss(batch, LossConfig(kl=1.0)).metrics["kl"])
    assert free.loss.item() == pytest.approx(free.metrics["surrogate"])
    assert "kl" not in policy_loss(dataclasses.replace(batch, logp_ref=None), LossConfig()).metrics


def test_a_critic_is_held_near_its_old_value():
    values = torch.tensor([[0.0, 0.0]], requires_grad=True)
    batch = PolicyBatch(
        *(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1), torch.ones(1, 2).bool()),
        values=values,
        returns=torch.tensor([[1.0, 1.0]]),
        values_old=torch.tensor([[-0.5, 0.0]]),
    )
    # −0.5 + 0.2 is as near as it may come: (−0.3 − 1)² is the larger error, and it has no gradient.
    result = policy_loss(batch, LossConfig(value_coef=1.0))
    assert result.metrics["value_loss"] == pytest.approx((1.3**2 + 1) / 4)
    result.loss.backward()
    assert values.grad.tolist() == [[0.0, -0.5]]
    free = policy_loss(batch, LossConfig(value_coef=1.0, value_clip=None))
    assert free.metrics["value_loss"] == pytest.approx(0.5)


BATCH = make_batch()
EYE = {"logp": BATCH.logp, "logp_old": BATCH.logp_old, "advantages": BATCH.advantages, "mask": BATCH.mask}


def spoiled(name, value, place):
    x = getattr(BATCH, name).detach().clone()
    x[place] = value
    return dataclasses.replace(BATCH, **{name: x})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: LossConfig(ratio="word"), "ratio='word'"),
        (lambda: LossConfig(aggregation="mean"), "aggregation='mean'"),
        (lambda: LossConfig(kl_kind="k4"), "kl_kind='k4'"),
        (lambda: LossConfig(clip_low=-0.1), "clip_low=-0.1"),
        (lambda: LossConfig(clip_high=math.nan), "clip_high=nan"),
        (lambda: LossConfig(kl=-1.0), "kl=-1.0"),
        (lambda: LossConfig(kl=math.inf), "kl=inf"),
        (lambda: LossConfig(off_policy_delta=-0.5), "off_policy_delta=-0.5"),
        (lambda: LossConfig(max_length=0), "max_length=0"),
        (lambda: PolicyBatch(**{**EYE, "mask": BATCH.mask.float()}), "mask is torch.float32"),
        (lambda: PolicyBatch(**{**EYE, "logp_old": BATCH.logp_old[:, 1:]}), r"logp_old has shape \(4, 5\)"),
        (lambda: PolicyBatch(**{**EYE, "advantages": torch.zeros(3)}), r"advantages has shape \(3,\)"),
        (lambda: BATCH.split(0), "size=0"),
        (lambda: policy_loss(PolicyBatch(**{**EYE, "logp": None}), LossConfig()), "logp is None"),
        (lambda: policy_loss(PolicyBatch(**EYE), LossConfig(kl=0.1)), "logp_ref is None; kl=0.1"),
        (
            lambda: policy_loss(PolicyBatch(**EYE), LossConfig(value_coef=0.5)),
            "values is None; value_coef=0.5",
        ),
        (lambda: policy_loss(PolicyBatch(**EYE), LossConfig(entropy_coef=0.1)), "entropy is None"),
        (lambda: policy_loss(BATCH, LossConfig(aggregation="constant")), "max_length=None"),
        (lambda: policy_loss(BATCH, LossConfig(), 10.0), "normalizer=10.0 is not a number from 11.0 on"),
        (lambda: policy_loss(BATCH, LossConfig(), math.nan), "normalizer=nan"),
        (
            lambda: policy_loss(spoiled("logp", math.nan, (1, 1)), LossConfig()),
            "logp is nan at sequence 1, token 1",
        ),
        (
            lambda: policy_loss(spoiled("logp_old", -math.inf, (0, 2)), LossConfig()),
            "logp_old is -inf at seq",
        ),
        (
            lambda: policy_loss(spoiled("advantages", math.nan, (3,)), LossConfig()),
            "advantages is nan at seq",
        ),
        (lambda: policy_loss(spoiled("logp_ref", math.nan, (0, 0)), LossConfig()), "logp_ref is nan"),
        (lambda: merged_metrics([]), "parts is empty"),
    ],
)
def test_bad_input_is_refused_with_its_name_and_value(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_configurations_can_be_compared_and_hashed_and_batches_cut():
    assert len({*CONFIGS.values(), *map(dataclasses.replace, CONFIGS.values())}) == len(CONFIGS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIGS["PPO"].kl = 1.0
    parts = list(BATCH.split(3))
    assert [len(part) for part in parts] == [3, 1]
    assert torch.equal(torch.cat([part.logp_ref for part in parts]), BATCH.logp_ref)
