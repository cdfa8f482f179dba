"""RWKV-7 as a language model: causal, one pass = token by token, a state that does not grow, and its training."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from dslib.attention import KVCache
from dslib.models import RWKV7, RWKVConfig, TrainConfig, flops_per_step, generate, train
from dslib.models.layers.rwkv import TimeMix
from dslib.optim import Muon, param_groups_for_muon

TINY = RWKVConfig(vocab_size=11, d_model=8, layers=2, head_size=4, rank=2)
VARIANTS = [
    TINY,
    replace(TINY, layers=1, head_size=8, rate_range=2.0),
    replace(TINY, token_shift=False, delta_rule=False),
    replace(TINY, memory=False),
]


def tokens(batch=2, time=9, seed=0):
    return torch.randint(11, (batch, time), generator=torch.Generator().manual_seed(seed))


def trained_like(config=TINY, seed=0):
    """In float64, and with no parameter left at a beginning that switches its part of the model off."""
    model, generator = config.build(seed).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.mark.parametrize("config", VARIANTS)
def test_logits_are_causal(config):
    model, x = trained_like(config), tokens()
    before = model(x)
    assert before.shape == (2, 9, 11)
    x[:, 5:] = (x[:, 5:] + 1) % 11
    after = model(x)
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert not torch.allclose(after[:, 5:], before[:, 5:])


@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize("pieces", [(1,) * 9, (4, 1, 4), (8, 1), (0, 3, 6)])
def test_reading_in_pieces_equals_one_pass(config, pieces):
    model, x, cache = trained_like(config), tokens(), KVCache()
    logits = torch.cat([model(part, cache=cache) for part in x.split(pieces, dim=1)], dim=1)
    assert cache.length == 9
    torch.testing.assert_close(logits, model(x), rtol=0, atol=1e-8)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 3}])
def test_generation_with_a_state_equals_generation_from_all_tokens(options):
    model, prompt = trained_like(), tokens(time=3)
    a, b = (
        generate(model, prompt, 6, **options, use_cache=cached, generator=torch.Generator().manual_seed(0))
        for cached in (True, False)
    )
    assert torch.equal(a, b)


def test_state_is_as_large_after_two_hundred_tokens_as_after_one_and_as_the_configuration_says():
    model, sizes = TINY.build(), []
    for time in (1, 200):
        cache = KVCache()
        model(tokens(batch=1, time=time), cache=cache)
        sizes.append(sum(state.numel() * state.element_size() for state in cache.states.values()))
        assert not cache.layers
    assert sizes[0] == sizes[1] == TINY.state_bytes


def test_time_mix_is_the_papers_formulae():
    """Layer 1's, written out for one head, token by token, from the formulae of §4.1."""
    model = trained_like(replace(TINY, head_size=8))
    mix: TimeMix = model.blocks[1].attention
    x, first = (
        torch.randn(1, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (1, 2)
    )
    S, before, outputs = torch.zeros(8, 8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64), []
    for now, v_first in zip(x[0], first[0], strict=True):
        x_r, x_w, x_k, x_v, x_a, x_g = (now + (before - now) * mix.mix[name] for name in "rwkvag")
        r, k, v = mix.receptance(x_r), mix.key(x_k), mix.value(x_v)
        v = v + (v_first - v) * mix.residual.up(mix.residual.down(x_v)).sigmoid()
        w = (-math.exp(-0.5) * mix.decay.up(mix.decay.down(x_w).tanh()).sigmoid()).exp()
        assert ((w > 0.5452) & (w < 1)).all()
        eta = mix.rate.up(mix.rate.down(x_a)).sigmoid()
        kappa = k * mix.removal_key
        kappa = kappa / kappa.norm()
        k = k * (1 + (eta - 1) * mix.rate_key)
        S = S * w - (S @ kappa).outer(kappa * eta) + v.outer(k)
        y = S @ r
        y = (y - y.mean()) / (y.var(correction=0) + 64e-5).sqrt() * mix.head_norm.weight + mix.head_norm.bias
        y = y + (r * k * mix.bonus).sum() * v
        outputs.append(mix.output(y * mix.gate.up(mix.gate.down(x_g).sigmoid())))
        before = now
    torch.testing.assert_close(mix(x, first=[first])[0], torch.stack(outputs))


def test_channel_mix_is_a_squared_relu_of_the_shifted_token():
    mix = trained_like().blocks[0].mlp
    x = torch.randn(1, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = mix.down(F.relu(mix.up(x[:, 1] + (x[:, 0] - x[:, 1]) * mix.mix)) ** 2)
    torch.testing.assert_close(mix(x)[:, 1], expected)


def test_every_parameter_gets_a_gradient():
    model = trained_like()
    model.loss(tokens(), tokens(seed=1)).backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


def test_each_ablation_takes_away_what_it_says():
    model = trained_like()
    x = torch.randn(1, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mix, other = model.blocks[0].mlp, x.clone()
    other[:, 0] += 1
    assert not torch.allclose(mix(x)[:, 1], mix(other)[:, 1])
    mix.config = replace(TINY, token_shift=False)
    torch.testing.assert_close(mix(x)[:, 1], mix(other)[:, 1])
    # Without the delta rule the rate only scales the written key.
    attention = model.blocks[0].attention
    attention.config = replace(TINY, delta_rule=False)
    before = attention(x)
    with torch.no_grad():
        attention.removal_key.neg_().mul_(3)
    torch.testing.assert_close(attention(x), before)


def test_weights_come_from_the_seed_alone():
    torch.manual_seed(1)
    a = RWKV7(TINY, seed=3)
    torch.manual_seed(2)
    b, c = RWKV7(TINY, seed=3), RWKV7(TINY, seed=4)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embedding.weight, c.embedding.weight)
    assert a.loss(tokens(), tokens(seed=1)).item() == pytest.approx(math.log(11), abs=0.3)


def test_muon_gets_the_maps_and_adamw_the_vectors_and_tables():
    model = TINY.build()
    matrices, rest = param_groups_for_muon(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    ours = {names[p] for p in matrices}
    low_rank = {f"{n}.{side}.weight" for n in ("decay", "rate", "gate") for side in ("down", "up")}
    maps = {f"{n}.weight" for n in ("receptance", "key", "value", "output")} | low_rank
    residual = {"residual.down.weight", "residual.up.weight"}
    expected = {f"blocks.{layer}.attention.{n}" for layer in (0, 1) for n in maps}
    expected |= {f"blocks.1.attention.{n}" for n in residual}
    expected |= {f"blocks.{layer}.mlp.{n}.weight" for layer in (0, 1) for n in ("up", "down")}
    assert ours == expected
    assert {"embedding.weight", "lm_head.weight", "blocks.0.attention.bonus"} <= {names[p] for p in rest}
    Muon(matrices, lr=0.1)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_training_takes_it_as_it_takes_a_decoder(optimizer):
    config = TrainConfig(
        RWKVConfig(d_model=8, layers=1, head_size=4, rank=2),
        optimizer=optimizer,
        steps=6,
        batch_size=2,
        context=20,
        lr=0.02,
        evaluations=2,
        evaluation_windows=2,
    )
    result = train(config)
    assert result.final_loss < math.log(256)
    assert result.activation_rms[-1] > 0
    assert result.largest_logit == [0.0, 0.0]  # it has no attention logits
    model = config.model.build()
    multiplying = sum(p.numel() for n, p in model.named_parameters() if n != "embedding.weight")
    per_token = 6 * multiplying + 27 * 8 * 4
    assert model.training_flops_per_token(20) == model.training_flops_per_token(2000) == per_token
    assert flops_per_step(replace(config, optimizer="adamw")) == 40 * per_token


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head_size": 3}, "head_size=3"),
        ({"layers": 0}, "layers=0"),
        ({"rank": 0}, "rank=0"),
        ({"rate_range": 2.5}, "rate_range=2.5"),
        ({"rate_range": 0.0}, "rate_range=0.0"),
    ],
)
def test_impossible_sizes_are_refused_with_their_value(options, words):
    with pytest.raises(ValueError, match=words):
        replace(TINY, **options)
