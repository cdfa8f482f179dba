"""Generation: the cache changes nothing, filters keep what they say, bad input is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslib.models import Decoder, DecoderConfig, filter_logits, generate

MODEL = Decoder(DecoderConfig(vocab_size=11, d_model=16, layers=2, heads=2), seed=1).double()
PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.7, "temperature": 1.3}]
)
def test_cached_and_uncached_generation_agree(options):
    a, b = (
        generate(MODEL, PROMPT, 8, **options, use_cache=cached, generator=torch.Generator().manual_seed(0))
        for cached in (True, False)
    )
    assert torch.equal(a, b)
    assert torch.equal(a[:, :3], PROMPT)
    assert a.shape == (2, 11)


def test_same_seed_same_text_and_training_mode_is_restored():
    MODEL.train()
    runs = [generate(MODEL, PROMPT, 8, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert MODEL.training


@given(seed=st.integers(0, 99), k=st.integers(1, 9), p=st.floats(0.01, 1.0))
def test_filters_keep_the_most_likely_and_just_enough_mass(seed, k, p):
    logits = torch.randn(7, generator=torch.Generator().manual_seed(seed))
    assert filter_logits(logits, top_k=k).isfinite().sum() == min(k, 7)
    probability = logits.softmax(-1)
    kept = filter_logits(logits, top_p=p).isfinite()
    assert kept[probability.argmax()]
    assert probability[kept].sum() >= p - 1e-6
    smallest = probability[kept].min()
    assert probability[kept].sum() - smallest < p


def test_nothing_to_generate_returns_the_prompt():
    assert torch.equal(generate(MODEL, PROMPT, 0), PROMPT)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt": torch.empty(1, 0, dtype=torch.long)}, "prompt"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 0, "temperature": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_bad_input_is_refused_with_its_value(arguments, words):
    with pytest.raises(ValueError, match=words):
        generate(**{"model": MODEL, "prompt": PROMPT, "max_new_tokens": 2, **arguments})
