"""Perplexity: uniform models, padding, and what has none."""

import math

import pytest
import torch

from dslib.evaluation import Distribution, perplexity, response_perplexity, sequence_logp
from dslib.models import Decoder, DecoderConfig

MODEL = Decoder(DecoderConfig(vocab_size=7, d_model=8, layers=1, heads=2), seed=0).double()
PROMPTS = torch.tensor([[1, 2], [3, 4]])
COMPLETIONS = torch.tensor([[5, 6, 1], [2, 0, 0]])
MASK = torch.tensor([[True, True, True], [True, False, False]])


def test_of_a_uniform_model_is_its_vocabulary_whatever_the_length():
    model = Decoder(MODEL.config, seed=0)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    found = response_perplexity(model, PROMPTS, COMPLETIONS, MASK)
    torch.testing.assert_close(found, torch.full((2,), 7.0, dtype=torch.float64))


def test_is_the_inverse_geometric_mean_of_the_probabilities():
    logp = torch.tensor([[0.5, 0.125, 0.9], [0.25, 0.1, 0.1]]).log()
    torch.testing.assert_close(
        perplexity(logp, torch.tensor([[True, True, False], [True, False, False]])),
        torch.tensor([4.0, 4.0], dtype=torch.float64),
    )


def test_padding_is_never_read():
    logp = sequence_logp(MODEL, PROMPTS, COMPLETIONS, MASK).detach()
    found = response_perplexity(MODEL, PROMPTS, COMPLETIONS.masked_fill(~MASK, -7), MASK)
    assert torch.equal(found, perplexity(logp.masked_fill(~MASK, math.nan), MASK))
    assert not found.requires_grad
    assert found[1].item() == pytest.approx(math.exp(-logp[1, 0].item()))


def test_temperature_is_the_distributions():
    cold = response_perplexity(MODEL, PROMPTS, COMPLETIONS, MASK, Distribution(temperature=0.5))
    assert not torch.allclose(cold, response_perplexity(MODEL, PROMPTS, COMPLETIONS, MASK))


def test_a_token_of_no_probability_is_infinitely_perplexing():
    assert perplexity(torch.tensor([[0.0, -math.inf]]), torch.ones(1, 2) > 0).tolist() == [math.inf]


@pytest.mark.parametrize(
    ("logp", "mask", "message"),
    [
        (torch.zeros(1, 2), torch.zeros(1, 2) > 0, "sequence 0 has no scored token"),
        (torch.tensor([[-1.0], [math.nan]]), torch.ones(2, 1) > 0, "sequence 1 has a logp of NaN"),
        (torch.tensor([[0.5]]), torch.ones(1, 1) > 0, "above 0"),
        (torch.zeros(0, 2), torch.zeros(0, 2) > 0, "at least one sequence"),
        (torch.zeros(1, 2), torch.ones(1, 3) > 0, "must both be"),
        (torch.zeros(1, 2), torch.ones(1, 2), "mask bool"),
        (torch.zeros(2), torch.ones(2) > 0, "must both be"),
    ],
)
def test_what_has_no_perplexity_is_refused(logp, mask, message):
    with pytest.raises(ValueError, match=message):
        perplexity(logp, mask)
