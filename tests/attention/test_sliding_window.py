"""The sliding window: exactly so many keys, tiled and masked alike, at every length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dslib.attention import dense_attention, masked_attention, sliding_window_attention, sliding_window_mask


def tensors(batch=1, heads=2, kv_heads=None, queries=5, keys=None, dim=4, seed=0):
    keys = queries if keys is None else keys
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads, queries), (kv_heads or heads, keys), (kv_heads or heads, keys)
    return [torch.randn(batch, *shape, dim, generator=generator, dtype=torch.float64) for shape in shapes]


def test_a_query_sees_exactly_window_keys_its_own_among_them():
    assert sliding_window_mask(5, 5, 2).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert sliding_window_mask(2, 7, 3).sum(1).tolist() == [3, 3]
    assert torch.equal(sliding_window_mask(4, 6, 1), torch.eye(6, dtype=torch.bool)[2:])


@settings(max_examples=40, deadline=None)
@given(
    queries=st.integers(0, 13),
    before=st.integers(0, 9),
    window=st.integers(1, 24),
    tile=st.integers(1, 6),
    groups=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
)
def test_tiled_equals_the_mask_at_any_length(queries, before, window, tile, groups):
    q, k, v = tensors(2, *groups, queries=queries, keys=queries + before, dim=3)
    expected = masked_attention(q, k, v, sliding_window_mask(queries, queries + before, window))
    torch.testing.assert_close(sliding_window_attention(q, k, v, window, tile), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(sliding_window_attention(q, k, v, window), expected, rtol=0, atol=1e-12)


def test_a_window_past_the_sequence_is_dense_attention_and_of_one_is_the_value():
    q, k, v = tensors(queries=7)
    torch.testing.assert_close(sliding_window_attention(q, k, v, 7), dense_attention(q, k, v))
    torch.testing.assert_close(sliding_window_attention(q, k, v, 10**9), dense_attention(q, k, v))
    torch.testing.assert_close(sliding_window_attention(q, k, v, 1, tile=2), v)


def test_what_left_the_window_has_no_influence_even_as_nan():
    q, k, v = tensors(queries=9, keys=20)
    before = sliding_window_attention(q, k, v, 4, tile=3)
    k[:, :, :8], v[:, :, :8] = torch.nan, torch.nan  # the first query stands at 11 and sees 8 … 11
    torch.testing.assert_close(sliding_window_attention(q, k, v, 4, tile=3), before)
    torch.testing.assert_close(sliding_window_attention(q, k[:, :, 8:], v[:, :, 8:], 4, tile=3), before)


def test_gradients_of_the_tiles():
    q, k, v = (x.requires_grad_() for x in tensors(heads=2, kv_heads=1, queries=5, keys=6, dim=2))
    assert torch.autograd.gradcheck(lambda *x: sliding_window_attention(*x, 3, tile=2), (q, k, v))


def test_values_may_have_another_size_and_short_floats_stay_what_they_are():
    q, k, _ = tensors(queries=6)
    v = torch.randn(1, 2, 6, 7, dtype=torch.float64)
    assert sliding_window_attention(q, k, v, 2, tile=2).shape == (1, 2, 6, 7)
    short = [x.bfloat16() for x in (q, k, v)]
    assert sliding_window_attention(*short, 2, tile=2).dtype == torch.bfloat16


def test_memory_does_not_grow_with_the_square_of_the_length(monkeypatch):
    largest = []
    whole = torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, attn_mask=None, **options):
        largest.append(attn_mask.numel() * q.shape[1])
        return whole(q, k, v, attn_mask=attn_mask, **options)

    monkeypatch.setattr("dslib.attention.sliding_window.F.scaled_dot_product_attention", watched)
    for queries in (256, 512):
        sliding_window_attention(*tensors(queries=queries), 8, tile=8)
    assert largest[1] == 2 * largest[0] == 2 * 512 * 15 * 2 // 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window": 0}, "window=0"),
        ({"window": True}, "window=True"),
        ({"window": 2.0}, "window=2.0"),
        ({"tile": 0}, "tile=0"),
        ({"q": torch.zeros(1, 3, 5, 4, dtype=torch.float64)}, "kv_heads=2 must divide heads=3"),
        ({"q": torch.zeros(1, 2, 6, 4, dtype=torch.float64)}, "q has 6 positions and k 5"),
        ({"q": torch.zeros(1, 2, 5, 3, dtype=torch.float64)}, "do not fit"),
        ({"q": torch.zeros(1, 2, 5, 4)}, "dtypes torch.float32, torch.float64"),
        ({"k": torch.zeros(1, 2, 5, 4, dtype=torch.float64, device="meta")}, "devices cpu, meta"),
        ({"q": torch.zeros(2, 5, 4, dtype=torch.float64)}, "give \\(batch, heads, time, dim\\)"),
        ({"v": torch.zeros(1, 2, 5, 4, dtype=torch.int64)}, "v is torch.int64"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_value(change, words):
    q, k, v = tensors()
    with pytest.raises(ValueError, match=words):
        sliding_window_attention(**{"q": q, "k": k, "v": v, "window": 2} | change)


@pytest.mark.parametrize("shape", [(5, 4), (1, 3, 5, 5), (2, 1, 5, 5)])
def test_a_mask_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match="mask has shape"):
        masked_attention(*tensors(), torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask is torch\.float32"):
        masked_attention(*tensors(), torch.zeros(5, 5))


def test_a_query_without_a_key_gives_zero_and_finite_gradients():
    q, k, v = (x.requires_grad_() for x in tensors(queries=3))
    mask = torch.tensor([[False, False, False], [True, False, False], [True, True, True]])
    out = masked_attention(q, k, v, mask)
    assert out[:, :, 0].abs().max() == 0
    torch.testing.assert_close(out[:, :, 1], v[:, :, 0])
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert torch.autograd.gradcheck(lambda *x: masked_attention(*x, mask), (q, k, v))
