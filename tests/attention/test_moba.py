"""MoBA against a loop over queries, its edges, and the switch to full attention."""

import math

import pytest
import torch

from dslib.attention import (
    dense_attention,
    masked_attention,
    moba_attention,
    moba_blocks,
    moba_mask,
    moba_scores,
)


def tensors(batch=1, heads=2, kv_heads=None, queries=5, keys=None, dim=4, seed=0):
    keys = queries if keys is None else keys
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads, queries), (kv_heads or heads, keys), (kv_heads or heads, keys)
    return [torch.randn(batch, *shape, dim, generator=generator, dtype=torch.float64) for shape in shapes]


def by_hand(q, k, v, block_size, top_k):
    """One query at a time, from lists of positions (MoBA eq. 2 to 6)."""
    out = torch.zeros_like(q)
    group, offset = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                t, keys, values = offset + i, k[b, h // group], v[b, h // group]
                own = t // block_size
                affinity = [
                    (q[b, h, i] @ keys[j * block_size : (j + 1) * block_size].mean(0)).item()
                    for j in range(own)
                ]
                past = sorted(range(own), key=lambda j: (-affinity[j], j))[: top_k - 1]
                seen = [p for p in range(t + 1) if p // block_size in {own, *past}]
                weights = (keys[seen] @ q[b, h, i] / math.sqrt(q.shape[-1])).softmax(0)
                out[b, h, i] = weights @ values[seen]
    return out


@pytest.mark.parametrize("method", ["masked", "gathered"])
@pytest.mark.parametrize(
    ("queries", "keys", "block_size", "top_k"),
    [
        (1, 1, 4, 1),
        (13, 13, 4, 2),
        (12, 12, 4, 3),
        (1, 17, 4, 2),
        (5, 19, 3, 3),
        (11, 11, 16, 2),
        (7, 7, 1, 3),
    ],
)
def test_equals_a_loop_over_queries(method, queries, keys, block_size, top_k):
    q, k, v = tensors(2, 4, 2, queries=queries, keys=keys)
    expected = by_hand(q, k, v, block_size, top_k)
    torch.testing.assert_close(
        moba_attention(q, k, v, block_size, top_k, method), expected, rtol=0, atol=1e-12
    )


def test_top_k_counts_the_own_block_so_one_is_block_diagonal_and_not_full():
    q, k, v = tensors(queries=11)
    mask = moba_mask(q, k, 4, 1)
    block = torch.arange(11) // 4
    diagonal = (block[:, None] == block) & torch.ones(11, 11, dtype=torch.bool).tril()
    assert torch.equal(mask, diagonal.expand(1, 2, 11, 11))
    assert not torch.allclose(moba_attention(q, k, v, 4, 1), dense_attention(q, k, v))
    assert (moba_mask(q, k, 4, 2)[:, :, 8:].sum(-1) == torch.tensor([5, 6, 7])).all()


def test_with_as_many_blocks_as_there_are_it_is_dense_attention():
    q, k, v = tensors(heads=4, kv_heads=2, queries=11)
    for top_k in (3, 9):
        torch.testing.assert_close(moba_attention(q, k, v, 4, top_k), dense_attention(q, k, v))


def test_the_own_block_comes_first_and_the_future_never():
    q, k, _ = tensors(queries=11)
    scores = moba_scores(q, k, 4)
    own = torch.arange(11) // 4
    assert (scores.argmax(-1) == own).all()
    assert torch.equal(scores == -math.inf, (torch.arange(3) > own[:, None]).expand_as(scores))
    blocks = moba_blocks(q, k, 4, 4)
    assert (blocks[..., 0] == own).all()
    assert blocks[0, 0, 5].tolist() == [1, 0, -1, -1]


def test_later_tokens_change_no_earlier_choice_or_output():
    q, k, v = tensors(queries=14)
    blocks, out = moba_blocks(q, k, 4, 2), moba_attention(q, k, v, 4, 2)
    k[:, :, 9:], v[:, :, 9:] = 50.0, 50.0
    assert torch.equal(moba_blocks(q, k, 4, 2)[:, :, :9], blocks[:, :, :9])
    torch.testing.assert_close(moba_attention(q, k, v, 4, 2)[:, :, :9], out[:, :, :9])


def test_pieces_of_a_sequence_with_a_cache_give_the_same_numbers():
    q, k, v = tensors(heads=4, kv_heads=2, queries=13)
    whole = moba_attention(q, k, v, 4, 2)
    for start, end in ((0, 5), (5, 6), (6, 13)):
        part = moba_attention(q[:, :, start:end], k[:, :, :end], v[:, :, :end], 4, 2)
        torch.testing.assert_close(part, whole[:, :, start:end])


def test_the_gate_computes_in_float32_at_least_and_passes_no_gradient():
    q, k, v = tensors(queries=9)
    assert moba_scores(q, k, 4).dtype == torch.float64
    short = [x.bfloat16() for x in (q, k, v)]
    wide = [x.float() for x in short]
    assert torch.equal(moba_scores(*short[:2], 4), moba_scores(*wide[:2], 4))
    assert moba_attention(*short, 4, 2).dtype == torch.bfloat16
    assert not moba_scores(q.requires_grad_(), k.requires_grad_(), 4).requires_grad


def test_gradients_are_those_of_the_chosen_keys():
    q, k, v = (x.requires_grad_() for x in tensors(queries=6, dim=2))
    assert torch.autograd.gradcheck(lambda *x: moba_attention(*x, 2, 2), (q, k, v))
    mask = moba_mask(q, k, 2, 2)
    torch.testing.assert_close(moba_attention(q, k, v, 2, 2), masked_attention(q, k, v, mask))


def test_empty_inputs_give_empty_outputs():
    assert moba_attention(*tensors(queries=0), 4, 2).shape == (1, 2, 0, 4)
    assert moba_attention(*tensors(batch=0, queries=3), 4, 2).shape == (0, 2, 3, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"q": torch.zeros(1, 3, 5, 4, dtype=torch.float64)}, "must divide heads=3"),
        ({"q": torch.zeros(1, 2, 6, 4, dtype=torch.float64)}, "q has 6 positions"),
        ({"v": torch.zeros(1, 2, 5, 4)}, "dtypes"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_value(change, words):
    q, k, v = tensors()
    with pytest.raises(ValueError, match=words):
        moba_attention(**{"q": q, "k": k, "v": v, "block_size": 2, "top_k": 2} | change)
