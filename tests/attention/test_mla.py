"""Latent attention: both modes are one attention, and the cache holds one small vector a position."""

import pytest
import torch

from dslib.attention import (
    MLA,
    MLAConfig,
    apply_rotary,
    apply_rotary_interleaved,
    dense_attention,
    rotary_angles,
)

CONFIGS = [
    MLAConfig(kv_rank=6, nope_dim=4, rope_dim=2, value_dim=3),
    MLAConfig(q_rank=5, kv_rank=4, nope_dim=3, rope_dim=4, value_dim=5, rope_layout="half_split", mscale=1.3),
]


def made(config, heads=3, d_model=8):
    torch.manual_seed(0)
    layer = MLA(d_model, heads, config).double()
    return layer, torch.randn(2, 7, d_model, dtype=torch.float64)


@pytest.mark.parametrize("config", CONFIGS)
def test_both_modes_give_the_same_numbers_and_gradients(config):
    layer, x = made(config)
    found = []
    for mode in ("mha", "mqa"):
        layer.zero_grad()
        out = layer(x, mode=mode)
        out.square().sum().backward()
        found.append([out.detach(), *(p.grad.clone() for p in layer.parameters())])
    for mha, mqa in zip(*found, strict=True):
        torch.testing.assert_close(mha, mqa)


@pytest.mark.parametrize("config", CONFIGS)
def test_mha_mode_is_dense_attention_on_expanded_keys_and_values(config):
    layer, x = made(config)
    q, (k, v) = layer.queries(layer.query_latent(x)), layer.expand(layer.entries(x))
    assert k.shape == (2, 3, 7, config.nope_dim + config.rope_dim)
    assert v.shape == (2, 3, 7, config.value_dim)
    expected = dense_attention(q * config.mscale**2, k, v)  # its own scale is 1/√dim
    torch.testing.assert_close(layer(x), layer.output(expected.transpose(1, 2).flatten(2)))


def test_scores_depend_on_positions_through_their_difference_alone():
    layer, x = made(CONFIGS[0])
    near, far = (
        layer.queries(x, at + 5)[:, :, :1] @ layer.expand(layer.entries(x, at))[0][:, :, :1].mT
        for at in (0, 40)
    )
    torch.testing.assert_close(near, far, rtol=0, atol=1e-5)  # angles are float32


def test_a_query_that_may_look_nowhere_gives_zero():
    layer, x = made(CONFIGS[0])
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    mask[3] = False
    for mode in ("mha", "mqa"):
        values = layer.attend(layer.queries(x), layer.entries(x), mode, mask)
        assert (values[:, :, 3] == 0).all()
        assert values.isfinite().all()


def test_interleaved_and_half_split_rotations_are_one_up_to_the_order_of_coordinates():
    x, angles = torch.randn(5, 8), rotary_angles(torch.arange(5), 8)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    torch.testing.assert_close(
        apply_rotary_interleaved(x, angles)[:, order], apply_rotary(x[:, order], angles)
    )
    assert not torch.allclose(apply_rotary_interleaved(x, angles), apply_rotary(x, angles))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_rank": 0}, "kv_rank=0"),
        ({"q_rank": 0}, "q_rank=0"),
        ({"rope_dim": 3}, "rope_dim=3 must be even"),
        ({"rope_layout": "neox"}, "rope_layout='neox'"),
        ({"mode": "gqa"}, "mode='gqa'"),
    ],
)
def test_bad_sizes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        MLAConfig(**arguments)


def test_unknown_mode_is_named():
    layer, x = made(CONFIGS[0])
    with pytest.raises(ValueError, match="mode='full' is unknown"):
        layer(x, mode="full")
