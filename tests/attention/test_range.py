"""What a query does not see cannot touch it, whatever it holds; and products stay within float16's range."""

import math

import pytest
import torch
from torch.nn import functional as F

from dslib.attention import (
    attention_scores,
    block_mask,
    block_sparse_attention,
    causal_mask,
    dense_attention,
    indexer_topk,
    masked_attention,
    moba_attention,
    sliding_window_attention,
    sparse_attention,
)

TIME, DIM = 12, 8
BLOCKS = torch.tensor([[[[t // 3, -1 if t < 6 else 0] for t in range(TIME)]]])


def selected():
    """Of each query the two keys before it; the first has none, and the slots of others are empty in places."""
    rows = torch.arange(TIME).unsqueeze(1) - torch.tensor([1, 2])
    return rows.clamp_min(-1).unsqueeze(0)


def shared(q, k, v):
    return sparse_attention(q, torch.cat((v[:, 0], k[:, 0]), -1), selected(), DIM)


def visible_to_selection():
    mask = torch.zeros(TIME, TIME, dtype=torch.bool)
    for query, keys in enumerate(selected()[0].tolist()):
        for key in keys:
            if key >= 0:
                mask[query, key] = True
    return mask


def windowed(window):
    distance = torch.arange(TIME).unsqueeze(1) - torch.arange(TIME)
    return (distance >= 0) & (distance < window)


FORMS = {
    "masked": (lambda q, k, v: masked_attention(q, k, v, windowed(3)), windowed(3)),
    "dense": (dense_attention, causal_mask(TIME, TIME)),
    "window": (lambda q, k, v: sliding_window_attention(q, k, v, 3), windowed(3)),
    "blocks, masked": (
        lambda q, k, v: block_sparse_attention(q, k, v, BLOCKS, 3, "masked"),
        block_mask(BLOCKS, 3, TIME)[0, 0],
    ),
    "blocks, gathered": (
        lambda q, k, v: block_sparse_attention(q, k, v, BLOCKS, 3, "gathered"),
        block_mask(BLOCKS, 3, TIME)[0, 0],
    ),
    "selected entries": (shared, visible_to_selection()),
}


def inputs(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, 1, TIME, DIM, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)
    ]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["key", "value", "both"])
@pytest.mark.parametrize("place", [0, 5, TIME - 1])
@pytest.mark.parametrize("form", FORMS)
def test_only_queries_that_see_an_entry_are_touched_by_what_it_holds(form, place, where, poison):
    attend, visible = FORMS[form]
    q, k, v = (x.requires_grad_() for x in inputs())
    if form == "selected entries":  # its queries reach over value and key
        q = inputs(seed=1)[0].repeat(1, 1, 1, 2).requires_grad_()
    clean = attend(q, k, v)
    sees = visible[:, place]
    weights = (~sees).double().unsqueeze(-1)
    expected = torch.autograd.grad((clean * weights).sum(), (q, k, v))

    dirty_k, dirty_v = (x.detach().clone() for x in (k, v))
    if where != "value":
        dirty_k[:, :, place] = poison
    if where != "key":
        dirty_v[:, :, place] = poison
    dirty_k.requires_grad_()
    dirty_v.requires_grad_()
    found = attend(q, dirty_k, dirty_v)
    torch.testing.assert_close(found[:, :, ~sees], clean[:, :, ~sees])
    gradients = torch.autograd.grad(found[:, :, ~sees].sum(), (q, dirty_k, dirty_v))
    torch.testing.assert_close(gradients[0][:, :, ~sees], expected[0][:, :, ~sees])
    # A query that sees it is NaN, and so is its part in the gradient of all keys that it sees.
    others = ~visible[sees].any(0) & (torch.arange(TIME) != place)
    for one, other in zip(gradients[1:], expected[1:], strict=True):
        torch.testing.assert_close(one[:, :, others], other[:, :, others])


@pytest.mark.parametrize("form", ["masked", "blocks, masked", "blocks, gathered", "selected entries"])
def test_a_nan_that_a_query_sees_is_not_hidden(form):
    attend, visible = FORMS[form]
    q, k, v = inputs()
    if form == "selected entries":
        q = q.repeat(1, 1, 1, 2)
    v[:, :, 5] = math.nan
    assert attend(q, k, v)[0, 0, visible[:, 5]].isnan().all()


def test_an_empty_selection_is_zero_in_the_graph_also_where_entries_are_nan():
    q = torch.ones(1, 2, 3, 4, requires_grad=True)
    kv = torch.full((1, 5, 4), math.nan, requires_grad=True)
    out = sparse_attention(q, kv, torch.empty(1, 3, 0, dtype=torch.int64), 2)
    out.sum().backward()
    assert out.eq(0).all()
    assert q.grad.eq(0).all()
    assert kv.grad.eq(0).all()


def large(heads=1):
    """q·k is past 65504 in float16, q·k/√dim is not."""
    generator = torch.Generator().manual_seed(0)
    return [(33 + torch.randn(1, heads, TIME, 64, generator=generator)).half() for _ in range(3)]


def test_float16_products_are_scaled_before_they_leave_its_range():
    q, k, v = large()
    assert (q @ k.mT).isinf().any()
    exact = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), is_causal=True)
    blocks = torch.tensor([[[[0, 1] for _ in range(TIME)]]])
    causal = causal_mask(TIME, TIME)
    forms = [
        masked_attention(q, k, v, causal),
        block_sparse_attention(q, k, v, blocks, 6, "masked"),
        block_sparse_attention(q, k, v, blocks, 6, "gathered"),
        moba_attention(q, k, v, 6, 2, "masked"),
        moba_attention(q, k, v, 6, 2, "gathered"),
    ]
    for found in forms:
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=0.1)
    scores = attention_scores(q, k)
    assert scores[..., causal].isfinite().all()
    indices = torch.where(causal, torch.arange(TIME), -1).unsqueeze(0)
    shared_kv = k[:, 0]
    sparse = sparse_attention(q, shared_kv, indices, 64)
    expected = F.scaled_dot_product_attention(*(x.double() for x in (q, k, k)), is_causal=True)
    torch.testing.assert_close(sparse.double(), expected, rtol=0, atol=0.1)


def test_float16_scores_of_the_indexer_are_ranked_as_in_float64():
    """With weights of both signs, infinities would make NaN, which is never selected."""
    generator = torch.Generator().manual_seed(0)
    q = (33 + torch.randn(1, TIME, 2, 64, generator=generator)).half()
    k = (33 + torch.randn(1, TIME, 64, generator=generator)).half()
    w = torch.tensor([1.0, -0.5]).half().expand(1, TIME, 2)
    found = indexer_topk(q, k, w, 3)
    assert torch.equal(found, indexer_topk(q.double(), k.double(), w.double(), 3))
    assert (found[0, -1] >= 0).all()
