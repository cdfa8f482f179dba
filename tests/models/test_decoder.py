"""The small decoder: shapes, seeds, causality, cache, and another attention plugged in."""

import math

import pytest
import torch
from torch import nn

from dslib.attention import KVCache
from dslib.models import Decoder, DecoderConfig, SelfAttention

TINY = DecoderConfig(vocab_size=11, d_model=16, layers=2, heads=4)
VARIANTS = [
    TINY,
    DecoderConfig(vocab_size=11, d_model=16, layers=1, heads=4, kv_heads=2),
    DecoderConfig(
        vocab_size=11, d_model=16, layers=2, heads=2, kv_heads=1, mlp="two_layer", tie_embeddings=True
    ),
]


def tokens(batch=2, time=9, seed=0):
    return torch.randint(11, (batch, time), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("config", VARIANTS)
def test_logits_are_causal(config):
    model, x = Decoder(config), tokens()
    before = model(x)
    assert before.shape == (2, 9, 11)
    x[:, 5:] = (x[:, 5:] + 1) % 11
    after = model(x)
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert not torch.allclose(after[:, 5:], before[:, 5:])


@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize("pieces", [(1,) * 9, (4, 1, 4), (8, 1)])
def test_decoding_with_a_cache_equals_one_pass(config, pieces):
    model, x, cache = Decoder(config).double(), tokens(), KVCache()
    logits = torch.cat([model(part, cache=cache) for part in x.split(pieces, dim=1)], dim=1)
    assert cache.length == 9
    torch.testing.assert_close(logits, model(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("config", VARIANTS[:2])
def test_cache_grows_in_place_without_gradients_and_goes_on_from_either(config):
    model, x = Decoder(config).double(), tokens(time=14)
    cache, pieces = KVCache(), x.split((3, 1, 2, 1, 1, 6), dim=1)
    logits = [model(pieces[0], cache=cache)]
    with torch.no_grad():
        logits += [model(part, cache=cache) for part in pieces[1:4]]
        before = cache.layers[0][0].data_ptr()
        logits.append(model(pieces[4], cache=cache))
        assert cache.layers[0][0].data_ptr() == before
    logits.append(model(pieces[5], cache=cache))
    torch.testing.assert_close(torch.cat(logits, dim=1), model(x), rtol=0, atol=1e-6)


def test_weights_come_from_the_seed_alone():
    torch.manual_seed(1)
    a = Decoder(TINY, seed=3)
    torch.manual_seed(2)
    b, c = Decoder(TINY, seed=3), Decoder(TINY, seed=4)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embedding.weight, c.embedding.weight)


def test_fresh_model_is_near_the_uniform_loss():
    loss = Decoder(TINY).loss(tokens(), tokens(seed=1))
    assert loss.item() == pytest.approx(math.log(11), abs=0.3)


def test_attention_logits_are_those_of_the_forward_pass():
    attention = SelfAttention(TINY, 0).double()
    x = torch.randn(1, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    v = attention.value(x).unflatten(-1, (4, 4)).transpose(1, 2)
    by_hand = attention.output((attention.logits(x).softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), by_hand, rtol=0, atol=1e-10)


def test_another_attention_can_be_plugged_in():
    class Nothing(nn.Module):
        def __init__(self, config, layer):
            super().__init__()

        def forward(self, x, cache=None, offset=0):
            return torch.zeros_like(x)

    logits = Decoder(TINY, attention=Nothing)(torch.tensor([[1, 2, 1]]))
    torch.testing.assert_close(logits[:, 0], logits[:, 2])


def test_training_flops_are_six_a_parameter_that_multiplies():
    model = Decoder(TINY)
    multiplying = sum(p.numel() for n, p in model.named_parameters() if n != "embedding.weight")
    assert model.training_flops_per_token(8) == 6 * multiplying + 6 * 2 * 8 * 16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": 3}, "heads=3"),
        ({"d_model": 12, "heads": 4}, "d_model=12"),
        ({"kv_heads": 3}, "kv_heads=3"),
        ({"mlp": "relu"}, "relu"),
        ({"layers": 0}, "layers=0"),
    ],
)
def test_impossible_sizes_are_refused_with_their_value(options, words):
    with pytest.raises(ValueError, match=words):
        DecoderConfig(**{"d_model": 16, "heads": 4, **options})
