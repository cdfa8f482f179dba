"""Attention to chosen blocks: masked and gathered alike, and what counts as chosen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dslib.attention import block_mask, block_sparse_attention, dense_attention, top_blocks
from dslib.attention import block_sparse as module


def tensors(batch=1, heads=2, kv_heads=None, queries=5, keys=None, dim=4, seed=0):
    keys = queries if keys is None else keys
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads, queries), (kv_heads or heads, keys), (kv_heads or heads, keys)
    return [torch.randn(batch, *shape, dim, generator=generator, dtype=torch.float64) for shape in shapes]


def random_blocks(batch, groups, queries, keys, block_size, n, seed=0):
    """Random choices, some of them of later blocks, some empty, some of nothing at all."""
    number = -(-keys // block_size)
    scores = torch.randn(
        batch, groups, queries, number, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return top_blocks(scores.masked_fill(scores < -0.5, -torch.inf), n)


def test_the_largest_come_first_ties_to_the_smaller_and_nan_never():
    inf, nan = torch.inf, torch.nan
    scores = torch.tensor(
        [[1.0, 3.0, 3.0, nan, inf], [-inf, nan, 0.0, -inf, -inf], [0.0, 0.0, 0.0, 0.0, 0.0]]
    )
    assert top_blocks(scores, 3).tolist() == [[4, 1, 2], [2, -1, -1], [0, 1, 2]]
    assert top_blocks(scores, 7)[0].tolist() == [4, 1, 2, 0, -1, -1, -1]
    assert top_blocks(torch.zeros(2, 0), 2).tolist() == [[-1, -1]] * 2
    with pytest.raises(ValueError, match="count=0"):
        top_blocks(scores, 0)


def test_the_mask_is_causal_within_the_blocks_and_empty_slots_see_nothing():
    blocks = torch.tensor([[[[1, -1], [0, 2], [-1, -1]]]])  # the queries stand at 2, 3 and 4
    assert block_mask(blocks, 2, 5).int().tolist() == [[[[0, 0, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]]]


@settings(max_examples=40, deadline=None)
@given(
    queries=st.integers(0, 9),
    before=st.integers(0, 7),
    block_size=st.integers(1, 6),
    n=st.integers(1, 5),
    heads=st.sampled_from([(2, 2, 2), (4, 2, 2), (4, 2, 4), (4, 1, 2), (3, 1, 1)]),
    tile=st.sampled_from([1, 100, 2**22]),
)
def test_gathered_equals_masked_at_any_length(queries, before, block_size, n, heads, tile):
    keys = queries + before
    q, k, v = tensors(2, *heads[:2], queries=queries, keys=keys, dim=3)
    blocks = random_blocks(2, heads[2], queries, keys, block_size, n)
    masked = block_sparse_attention(q, k, v, blocks, block_size, "masked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TILE_NUMBERS", tile)
        gathered = block_sparse_attention(q, k, v, blocks, block_size, "gathered")
    torch.testing.assert_close(gathered, masked, rtol=0, atol=1e-12)
    assert masked.shape == q.shape


@pytest.mark.parametrize("method", ["masked", "gathered", "auto"])
def test_all_blocks_are_dense_attention_and_none_is_zero(method):
    q, k, v = tensors(heads=4, kv_heads=2, queries=7, keys=11)
    every = torch.arange(4).expand(1, 2, 7, 4)
    torch.testing.assert_close(block_sparse_attention(q, k, v, every, 3, method), dense_attention(q, k, v))
    nothing = torch.full((1, 2, 7, 2), -1)
    assert block_sparse_attention(q, k, v, nothing, 3, method).abs().max() == 0


@pytest.mark.parametrize("method", ["masked", "gathered"])
def test_gradients_with_empty_rows(method):
    q, k, v = (x.requires_grad_() for x in tensors(heads=2, kv_heads=1, queries=4, keys=5, dim=2))
    blocks = random_blocks(1, 2, 4, 5, 2, 2, seed=3)
    assert (blocks == -1).all(-1).any()
    assert torch.autograd.gradcheck(lambda *x: block_sparse_attention(*x, blocks, 2, method), (q, k, v))


def test_auto_gathers_long_sequences_and_long_decoding(monkeypatch):
    used = []
    monkeypatch.setattr(module, "_gathered", lambda q, *rest: used.append(q.shape[2]) or q)
    for queries, keys in ((1, 40), (40, 40), (1, 8), (3, 20)):
        q, k, v = tensors(queries=queries, keys=keys)
        blocks = torch.zeros(1, 2, queries, 1, dtype=torch.int64)
        block_sparse_attention(q, k, v, blocks, 4)
    assert used == [1]
    monkeypatch.setattr(module, "_MASKED_PAIRS", 100)
    block_sparse_attention(*tensors(queries=20), torch.zeros(1, 2, 20, 1, dtype=torch.int64), 4)
    assert used == [1, 20]


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        (torch.zeros(1, 2, 4, 1, dtype=torch.int64), "queries=5"),
        (torch.zeros(1, 2, 5, dtype=torch.int64), "blocks has shape"),
        (torch.zeros(1, 3, 5, 1, dtype=torch.int64), "groups=3"),
        (torch.zeros(1, 2, 5, 1), r"torch\.float32"),
        (torch.full((1, 2, 5, 1), 3), "names block 3; 5 keys make 3 blocks"),
        (torch.full((1, 2, 5, 1), -2), "names block -2"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(blocks, words):
    with pytest.raises(ValueError, match=words):
        block_sparse_attention(*tensors(), blocks, 2)
    with pytest.raises(ValueError, match="method='fast'"):
        block_sparse_attention(*tensors(), torch.zeros(1, 2, 5, 1, dtype=torch.int64), 2, "fast")
