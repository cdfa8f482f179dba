"""Dense attention and rotary positions against their formulae in float64."""

import pytest
import torch

from dslib.attention import apply_rotary, attention_scores, causal_mask, dense_attention, rotary_angles


def tensors(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (1, 9), (3, 8)])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_equals_the_softmax_of_its_scores(queries, keys, kv_heads):
    q, k, v = (
        tensors(2, 4, queries, 6),
        tensors(2, kv_heads, keys, 6, seed=1),
        tensors(2, kv_heads, keys, 6, seed=2),
    )
    weights = attention_scores(q, k).softmax(-1)
    expected = weights @ v.repeat_interleave(4 // kv_heads, dim=1)
    torch.testing.assert_close(dense_attention(q, k, v), expected, rtol=0, atol=1e-12)


def test_no_query_sees_a_later_key():
    assert causal_mask(2, 4).tolist() == [[True, True, True, False], [True] * 4]
    q, k, v = tensors(1, 1, 5, 4), tensors(1, 1, 5, 4, seed=1), tensors(1, 1, 5, 4, seed=2)
    before = dense_attention(q, k, v)
    k[..., 3:, :], v[..., 3:, :] = 99.0, 99.0
    torch.testing.assert_close(dense_attention(q, k, v)[..., :3, :], before[..., :3, :])


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = tensors(1, 8), tensors(1, 8, seed=1)

    def score(i, j):
        at = lambda t: rotary_angles(torch.tensor([t]), 8).double()  # noqa: E731
        return (apply_rotary(q, at(i)) * apply_rotary(k, at(j))).sum().item()

    assert score(5, 2) == pytest.approx(score(103, 100), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-4)


def test_rotary_keeps_lengths_and_refuses_odd_sizes():
    x = tensors(2, 3, 8)
    turned = apply_rotary(x, rotary_angles(torch.arange(3), 8).double())
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    with pytest.raises(ValueError, match="dim=7"):
        rotary_angles(torch.arange(3), 7)
