"""Log-probabilities at the sampled tokens, and the loss in chunks: the same numbers as the plain way."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dslib.rl import (
    LossConfig,
    PolicyBatch,
    chunked_log_probs,
    chunked_policy_loss,
    loss_normalizer,
    policy_loss,
    selective_log_softmax,
)

CONFIGS = {
    "token ratio": LossConfig(),
    "KL in the graph": LossConfig(kl=0.2, kl_unbiased=True, aggregation="sequence"),
    "k1, constant denominator": LossConfig(kl=0.2, kl_kind="k1", aggregation="constant", max_length=9),
    "sequence ratio": LossConfig(ratio="sequence", clip_low=0.05, clip_high=0.05, kl=0.1, kl_kind="k2"),
    "off-policy mask": LossConfig(off_policy_delta=0.1, kl=0.1),
}
SEQUENCES, TOKENS, DIM, VOCABULARY = 3, 5, 6, 13


def case(dtype=torch.float64, temperature=0.7, seed=0):
    """hidden, weight, tokens, and a batch whose old policy is not far from the one that they make."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden, weight = normal(SEQUENCES, TOKENS, DIM), normal(VOCABULARY, DIM)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, TOKENS), generator=generator)
    mask = torch.arange(TOKENS) < torch.tensor([[5], [2], [4]])
    logp = selective_log_softmax(hidden @ weight.T, tokens, temperature)
    shape = (SEQUENCES, TOKENS)
    batch = PolicyBatch(
        None, logp + 0.3 * normal(*shape), normal(SEQUENCES), mask, logp_ref=logp + 0.5 * normal(*shape)
    )
    return hidden.requires_grad_(), weight.requires_grad_(), tokens, batch


def plain(hidden, weight, tokens, batch, config, temperature=0.7, normalizer=None):
    logp = (hidden @ weight.T / temperature).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return policy_loss(dataclasses.replace(batch, logp=logp), config, normalizer)


def gradients(result, leaves, scale=1.0):
    return torch.autograd.grad(result.loss * scale, leaves)


@pytest.mark.parametrize("chunk", [1, 3, 11, 1000])
@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_change_neither_loss_nor_metrics_nor_gradients(name, chunk):
    hidden, weight, tokens, batch = case()
    expected = plain(hidden, weight, tokens, batch, CONFIGS[name])
    found = chunked_policy_loss(hidden, weight, tokens, batch, CONFIGS[name], chunk, 0.7)
    torch.testing.assert_close(found.loss, expected.loss)
    assert found.metrics == pytest.approx(expected.metrics)
    assert (found.tokens, found.sequences) == (expected.tokens, expected.sequences)
    for ours, exact in zip(
        gradients(found, (hidden, weight), 3.0), gradients(expected, (hidden, weight), 3.0), strict=True
    ):
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_in_chunks_add_up_to_the_whole(name):
    hidden, weight, tokens, batch = case()
    normalizer = loss_normalizer(batch.mask, CONFIGS[name])
    whole = plain(hidden, weight, tokens, batch, CONFIGS[name])
    loss = 0
    for i in range(SEQUENCES):
        row = slice(i, i + 1)
        part = chunked_policy_loss(
            hidden[row], weight, tokens[row], batch.rows(row), CONFIGS[name], 2, 0.7, normalizer
        )
        loss = loss + part.loss
    torch.testing.assert_close(loss, whole.loss)
    for ours, exact in zip(
        torch.autograd.grad(loss, (hidden, weight)), gradients(whole, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_is_not_even_multiplied(name):
    hidden, weight, tokens, batch = case()
    expected = gradients(chunked_policy_loss(hidden, weight, tokens, batch, CONFIGS[name]), (hidden, weight))
    poisoned = torch.where(batch.mask.unsqueeze(-1), hidden.detach(), math.nan).requires_grad_()
    wrong = torch.where(batch.mask, tokens, -100)
    fields = {
        field: torch.where(batch.mask, getattr(batch, field), math.nan) for field in ("logp_old", "logp_ref")
    }
    result = chunked_policy_loss(poisoned, weight, wrong, dataclasses.replace(batch, **fields), CONFIGS[name])
    for ours, exact in zip(gradients(result, (poisoned, weight)), expected, strict=True):
        torch.testing.assert_close(ours, exact)


def test_gradients_are_made_only_for_what_asks_for_them():
    hidden, weight, tokens, batch = case()
    for name in ("token ratio", "sequence ratio"):
        both = gradients(chunked_policy_loss(hidden, weight, tokens, batch, CONFIGS[name]), (hidden, weight))
        frozen = chunked_policy_loss(hidden, weight.detach(), tokens, batch, CONFIGS[name])
        torch.testing.assert_close(gradients(frozen, (hidden,))[0], both[0])
        frozen = chunked_policy_loss(hidden.detach(), weight, tokens, batch, CONFIGS[name])
        torch.testing.assert_close(gradients(frozen, (weight,))[0], both[1])
        with torch.no_grad():
            assert not chunked_policy_loss(hidden, weight, tokens, batch, CONFIGS[name]).loss.requires_grad


def test_backward_may_be_called_twice_and_reaches_a_critic():
    hidden, weight, tokens, batch = case()
    values = torch.zeros(batch.mask.shape, dtype=torch.float64, requires_grad=True)
    batch = dataclasses.replace(batch, values=values, returns=torch.ones_like(values))
    config = LossConfig(value_coef=0.5)
    result = chunked_policy_loss(hidden, weight, tokens, batch, config)
    once = torch.autograd.grad(result.loss, (hidden, weight, values), retain_graph=True)
    twice = torch.autograd.grad(result.loss, (hidden, weight, values))
    for a, b in zip(once, twice, strict=True):
        torch.testing.assert_close(a, b)
    expected = torch.where(batch.mask, -0.5 / batch.mask.sum(), 0.0).double()
    torch.testing.assert_close(once[2], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_dtypes_sum_in_float32(dtype):
    hidden, weight, tokens, batch = case(dtype)
    config = LossConfig(clip_low=math.inf, clip_high=math.inf)  # a clip decided by a rounding would be a jump
    found = chunked_policy_loss(hidden, weight, tokens, batch, config, 4, 0.7)
    exact = plain(*(x.detach().double().requires_grad_() for x in (hidden, weight)), tokens, batch, config)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert found.loss.dtype == torch.float32
    assert found.loss.item() == pytest.approx(exact.loss.item(), rel=tolerance, abs=tolerance)
    ours = gradients(found, (hidden, weight))
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    theirs = gradients(plain(*leaves, tokens, batch, config), leaves)
    for x, y, leaf in zip(ours, theirs, (hidden, weight), strict=True):
        assert x.dtype == leaf.dtype == dtype
        assert (x.double() - y).norm() < tolerance * y.norm()


@pytest.mark.parametrize("name", ["token ratio", "sequence ratio"])
def test_autocast_around_a_step_changes_nothing(name):
    hidden, weight, tokens, batch = case(torch.float32)
    expected = chunked_policy_loss(hidden, weight, tokens, batch, CONFIGS[name])
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked_policy_loss(hidden, weight, tokens, batch, CONFIGS[name])
    assert torch.equal(found.loss, expected.loss)
    for ours, exact in zip(
        gradients(found, (hidden, weight)), gradients(expected, (hidden, weight)), strict=True
    ):
        assert torch.equal(ours, exact)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (2, 3)])
@pytest.mark.parametrize("name", ["token ratio", "sequence ratio"])
def test_nothing_scored_is_a_loss_of_0_with_gradients_of_0(name, shape):
    hidden, weight = torch.zeros(*shape, 4, requires_grad=True), torch.zeros(7, 4, requires_grad=True)
    batch = PolicyBatch(None, torch.zeros(shape), torch.zeros(shape[0]), torch.zeros(shape, dtype=torch.bool))
    batch = dataclasses.replace(batch, logp_ref=torch.zeros(shape))
    tokens = torch.zeros(shape, dtype=torch.long)
    result = chunked_policy_loss(hidden, weight, tokens, batch, CONFIGS[name])
    assert result.loss.item() == 0
    assert all((gradient == 0).all() for gradient in gradients(result, (hidden, weight)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.3, 1.0, 2.5]), st.integers(1, 9))
def test_selective_log_softmax_is_the_gathered_log_softmax(seed, temperature, vocabulary):
    generator = torch.Generator().manual_seed(seed)
    logits = (5 * torch.randn(2, 3, vocabulary, generator=generator, dtype=torch.float64)).requires_grad_()
    tokens = torch.randint(vocabulary, (2, 3), generator=generator)
    found = selective_log_softmax(logits, tokens, temperature)
    expected = (logits / temperature).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found, expected)
    ours, exact = (torch.autograd.grad(x.square().sum(), logits)[0] for x in (found, expected))
    torch.testing.assert_close(ours, exact, rtol=1e-7, atol=1e-10)


def test_large_logits_do_not_overflow_and_short_ones_are_computed_in_float32():
    logits = torch.tensor([[3e4, 3e4, -3e4]], dtype=torch.float16)
    assert selective_log_softmax(logits, torch.tensor([1])).item() == pytest.approx(-math.log(2))
    assert selective_log_softmax(logits, torch.tensor([1])).dtype == torch.float32
    assert selective_log_softmax(torch.empty(0, 3), torch.empty(0, dtype=torch.long)).shape == (0,)


def test_kept_set_makes_the_ratio_1_that_would_be_below_1_without_it():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    kept = torch.tensor([[True, True, False, False]])
    tokens = torch.tensor([1])
    sampled = torch.tensor([2.0, 1.0]).double().log_softmax(-1)[1]
    with_mask = selective_log_softmax(logits, tokens, kept=kept)
    assert (with_mask - sampled).exp().item() == pytest.approx(1, abs=1e-12)
    assert (selective_log_softmax(logits, tokens) - sampled).exp().item() < 0.95
    (gradient,) = torch.autograd.grad(with_mask.sum(), logits)
    assert gradient[0, 2:].tolist() == [0, 0]


def test_log_probabilities_in_chunks_are_those_of_the_whole():
    hidden, weight, tokens, batch = case()
    expected = selective_log_softmax(hidden @ weight.T, tokens, 0.7)
    found = chunked_log_probs(hidden, weight, tokens, chunk=4, temperature=0.7)
    torch.testing.assert_close(found, expected.detach())
    some = chunked_log_probs(hidden, weight, tokens, batch.mask, 4, 0.7)
    torch.testing.assert_close(some, torch.where(batch.mask, expected, 0).detach())
    assert not found.requires_grad


HIDDEN, WEIGHT, IDS, BATCH = case()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: selective_log_softmax(torch.zeros(2, 3), torch.zeros(3).long()),
            r"tokens \(3,\) do not fit",
        ),
        (lambda: selective_log_softmax(torch.zeros(2, 3).long(), torch.zeros(2).long()), "torch.int64"),
        (lambda: selective_log_softmax(torch.zeros(2, 3), torch.zeros(2)), "tokens is torch.float32"),
        (
            lambda: selective_log_softmax(torch.zeros(2, 3), torch.tensor([0, 3])),
            "tokens holds 3; the vocabulary",
        ),
        (lambda: selective_log_softmax(torch.zeros(2, 3), torch.tensor([0, -1])), "tokens holds -1"),
        (lambda: selective_log_softmax(torch.zeros(1, 3), torch.tensor([0]), 0.0), "temperature=0.0"),
        (lambda: selective_log_softmax(torch.zeros(1, 3), torch.tensor([0]), math.nan), "temperature=nan"),
        (
            lambda: selective_log_softmax(torch.zeros(1, 3), torch.tensor([0]), kept=torch.ones(1, 2).bool()),
            r"kept is torch.bool of shape \(1, 2\)",
        ),
        (
            lambda: selective_log_softmax(
                torch.zeros(1, 3), torch.tensor([2]), kept=torch.tensor([[True, True, False]])
            ),
            r"tokens holds 2 at \(0,\), which kept leaves out",
        ),
        (lambda: chunked_policy_loss(HIDDEN, WEIGHT, IDS, BATCH, LossConfig(), 0), "chunk=0"),
        (
            lambda: chunked_policy_loss(HIDDEN, WEIGHT, IDS, BATCH, LossConfig(), temperature=-1.0),
            "temperature=-1",
        ),
        (lambda: chunked_policy_loss(HIDDEN, WEIGHT.T, IDS, BATCH, LossConfig()), r"weight \(6, 13\)"),
        (
            lambda: chunked_policy_loss(HIDDEN, WEIGHT.float(), IDS, BATCH, LossConfig()),
            "weight torch.float32",
        ),
        (lambda: chunked_policy_loss(HIDDEN, WEIGHT, IDS + 13, BATCH, LossConfig()), "the vocabulary has 13"),
        (
            lambda: chunked_policy_loss(HIDDEN, WEIGHT, IDS.int(), BATCH, LossConfig()),
            "tokens is torch.int32",
        ),
        (
            lambda: chunked_policy_loss(
                HIDDEN, WEIGHT, IDS, dataclasses.replace(BATCH, logp_ref=None), LossConfig(kl=0.1)
            ),
            "logp_ref is None; kl=0.1",
        ),
        (
            lambda: chunked_policy_loss(
                HIDDEN,
                WEIGHT,
                IDS,
                dataclasses.replace(BATCH, advantages=torch.full((3,), math.nan)),
                LossConfig(),
            ),
            "advantages is nan at sequence 0",
        ),
        (lambda: chunked_policy_loss(HIDDEN * math.nan, WEIGHT, IDS, BATCH, LossConfig()), "logp is nan at"),
        (lambda: chunked_log_probs(HIDDEN, WEIGHT, IDS, IDS), "mask is torch.int64"),
    ],
)
def test_bad_input_is_refused_with_its_name_and_value(call, words):
    with pytest.raises(ValueError, match=words):
        call()
