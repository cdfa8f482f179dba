"""DeepSeek Sparse Attention: the edges of selection, equality of all ways, and who learns from what."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dslib.attention import (
    LightningIndexer,
    dsa,
    indexer_kl_loss,
    indexer_scores,
    select_topk,
    sparse_attention,
)
from dslib.attention.dsa import indexer_topk, selected_mass, selection_mask


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def indexer_inputs(batch=2, time=7, keys=7, heads=3, dim=4):
    return (
        random(batch, time, heads, dim),
        random(batch, keys, dim, seed=1),
        random(batch, time, heads, seed=2),
    )


@pytest.mark.parametrize("tile", [1, 2**23])
def test_scores_are_equation_1(monkeypatch, tile):
    monkeypatch.setattr(dsa, "_TILE_BYTES", tile)
    q, k, w = indexer_inputs(keys=5)
    expected = (w.unsqueeze(-1) * torch.einsum("bthd,bsd->bths", q, k).clamp_min(0)).sum(2)
    torch.testing.assert_close(indexer_scores(q, k, w), expected)


def test_neither_the_weights_nor_the_relu_can_be_left_out_without_selecting_other_keys():
    q, k, w = indexer_inputs(batch=4, time=32, keys=32, heads=4, dim=8)
    exact = select_topk(indexer_scores(q, k, w.abs()), 4)[:, 4:].sort(-1).values
    products = torch.einsum("bthd,bsd->bths", q, k)
    for other in (products.relu().sum(2), (w.abs().unsqueeze(-1) * products).sum(2)):
        changed = (select_topk(other, 4)[:, 4:].sort(-1).values != exact).any(-1)
        assert changed.double().mean() > 0.3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_floats_give_what_their_rounded_inputs_give(dtype):
    q, kv = random(1, 2, 5, 8).to(dtype), random(1, 9, 8, seed=1).to(dtype)
    indices = select_topk(random(1, 5, 9, seed=2).to(dtype), 3, 4)
    out = sparse_attention(q, kv, indices, 6)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), dense(q.double(), kv.double(), indices, 6), rtol=0.03, atol=0.03)


def by_hand(scores, k, causal_offset):
    rows = []
    for batch in scores.tolist():
        for t, row in enumerate(batch):
            seen = [
                (-value, s) for s, value in enumerate(row) if s <= causal_offset + t and value > -math.inf
            ]
            best = [s for _, s in sorted(seen)[:k]]
            rows.append(best + [-1] * (k - len(best)))
    return torch.tensor(rows, dtype=torch.int64).reshape(*scores.shape[:2], k)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 2),
    st.integers(0, 6),
    st.integers(0, 13),
    st.integers(1, 9),
    st.integers(0, 8),
    st.integers(0, 99),
)
def test_selection_is_that_of_sorting_by_hand_with_ties_nan_and_infinities(
    batch, time, keys, k, offset, seed
):
    scores = random(batch, time, keys, seed=seed).mul(2).round().clamp(0)  # ReLU: many exact zeros
    for value, place in ((math.nan, 3), (-math.inf, 5), (math.inf, 7)):
        scores.flatten()[seed % place :: place * 2] = value
    assert torch.equal(select_topk(scores, k, offset), by_hand(scores, k, offset))


def test_first_rows_have_fewer_keys_and_future_ones_are_never_picked():
    scores = torch.arange(5.0).expand(1, 5, 5)
    assert select_topk(scores, 3)[0].tolist() == [[0, -1, -1], [1, 0, -1], [2, 1, 0], [3, 2, 1], [4, 3, 2]]
    assert select_topk(scores[:, :1], 2, causal_offset=3).tolist() == [[[3, 2]]]


@pytest.mark.parametrize("tile", [1, 200, 10_000])
@pytest.mark.parametrize(
    ("time", "keys", "offset"), [(7, 7, 0), (1, 9, 8), (3, 11, 8), (5, 13, 2), (0, 4, 0)]
)
def test_tiled_selection_is_the_whole_ones(monkeypatch, tile, time, keys, offset):
    monkeypatch.setattr(dsa, "_TILE_BYTES", tile)
    q, k, w = indexer_inputs(time=time, keys=keys)
    assert torch.equal(indexer_topk(q, k, w, 4, offset), select_topk(indexer_scores(q, k, w), 4, offset))


def dense(q, kv, indices, value_dim):
    mask = selection_mask(indices, kv.shape[1]).unsqueeze(1)
    logits = (q @ kv.unsqueeze(1).mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    return logits.softmax(-1).nan_to_num() @ kv.unsqueeze(1)[..., :value_dim]


@pytest.mark.parametrize("tile", [1, 1000, 2**23])
@pytest.mark.parametrize(("time", "keys", "k"), [(1, 1, 1), (1, 13, 4), (7, 7, 3), (7, 11, 20), (5, 5, 5)])
def test_gathered_attention_is_masked_dense_attention(monkeypatch, tile, time, keys, k):
    monkeypatch.setattr(dsa, "_TILE_BYTES", tile)
    q, kv = random(2, 3, time, 6), random(2, keys, 6, seed=1)
    indices = select_topk(random(2, time, keys, seed=2), k, keys - time)
    torch.testing.assert_close(sparse_attention(q, kv, indices, 4), dense(q, kv, indices, 4))


def test_empty_slots_may_stand_anywhere_and_rows_without_a_key_give_zero_and_no_gradient():
    q, kv = random(1, 2, 3, 4).requires_grad_(), random(1, 5, 4, seed=1).requires_grad_()
    indices = torch.tensor([[[-1, -1, 2], [-1, -1, -1], [4, -1, 0]]])
    out = sparse_attention(q, kv, indices, 2)
    torch.testing.assert_close(out, dense(q, kv, torch.tensor([[[2, -1], [-1, -1], [0, 4]]]), 2))
    assert (out[:, :, 1] == 0).all()
    out.sum().backward()
    assert q.grad.isfinite().all()
    assert kv.grad.isfinite().all()
    assert (q.grad[:, :, 1] == 0).all()
    assert (kv.grad[:, [1, 3]] == 0).all()


@pytest.mark.parametrize("shape", [(0, 2, 3), (1, 2, 0)])
def test_nothing_in_nothing_out(shape):
    batch, heads, time = shape
    out = sparse_attention(
        random(batch, heads, time, 4), random(batch, 5, 4), torch.zeros(batch, time, 2).long(), 3
    )
    assert out.shape == (batch, heads, time, 3)


def test_gradients_of_gathered_attention_are_exact():
    q, kv = random(1, 2, 4, 4).requires_grad_(), random(1, 6, 4, seed=1).requires_grad_()
    indices = select_topk(random(1, 4, 6, seed=2), 3, 2)
    indices[0, 1, 0] = -1
    assert torch.autograd.gradcheck(lambda q, kv: sparse_attention(q, kv, indices, 3), (q, kv))


def weights(batch=2, heads=3, time=5, keys=5):
    logits = random(batch, heads, time, keys, seed=5)
    mask = torch.ones(time, keys, dtype=torch.bool).tril(keys - time)
    return logits.masked_fill(~mask, -math.inf).softmax(-1)


def kl_by_hand(scores, p, keys):
    """p, keys: lists of what counts in one row."""
    total = sum(p)
    log_sum = math.log(sum(math.exp(scores[s]) for s in keys))
    return sum(w / total * (math.log(w / total) - scores[s] + log_sum) for w, s in zip(p, keys, strict=True))


def test_warm_up_loss_is_equation_3():
    scores, attention = random(2, 5, 5), weights()
    rows = [
        kl_by_hand(scores[b, t].tolist(), attention[b, :, t, : t + 1].sum(0).tolist(), range(t + 1))
        for b in range(2)
        for t in range(5)
    ]
    assert indexer_kl_loss(scores, attention).item() == pytest.approx(sum(rows) / 10)


@pytest.mark.parametrize("target", ["selected", "full"])
def test_sparse_loss_is_equation_4_with_either_target(target):
    scores, attention = random(2, 5, 5), weights()
    indices = select_topk(random(2, 5, 5, seed=9), 2)
    rows = []
    for b in range(2):
        for t in range(5):
            keys = [s for s in indices[b, t].tolist() if s >= 0]
            heads = attention[b, :, t, keys]
            if target == "selected":
                heads = heads / heads.sum(-1, keepdim=True)
            rows.append(kl_by_hand(scores[b, t].tolist(), heads.sum(0).tolist(), keys))
    loss = indexer_kl_loss(scores, attention, indices, target)
    assert loss.item() == pytest.approx(sum(rows) / 10)


def test_loss_is_zero_when_the_indexer_says_what_attention_does():
    attention = weights()
    scores = attention.sum(1).log()  # −inf where none may look
    assert indexer_kl_loss(scores, attention).item() == pytest.approx(0, abs=1e-12)


def test_targets_agree_on_the_weights_of_a_sparse_model():
    indices = select_topk(random(2, 5, 5, seed=9), 2)
    attention = weights() * selection_mask(indices, 5).unsqueeze(1)
    attention = attention / attention.sum(-1, keepdim=True)
    losses = [
        indexer_kl_loss(random(2, 5, 5), attention, indices, target).item() for target in ("selected", "full")
    ]
    assert losses[0] == pytest.approx(losses[1])


def test_loss_has_exact_gradients_for_the_scores_none_for_the_attention_and_skips_empty_rows():
    scores, attention = random(1, 4, 6).requires_grad_(), weights(1, 2, 4, 6).requires_grad_()
    indices = select_topk(random(1, 4, 6, seed=3), 3, 2)
    indices[0, 1] = -1
    assert torch.autograd.gradcheck(lambda s: indexer_kl_loss(s, attention, indices), (scores,))
    assert torch.autograd.gradcheck(lambda s: indexer_kl_loss(s, attention), (scores,))
    indexer_kl_loss(scores, attention, indices).backward()
    assert attention.grad is None
    assert (scores.grad[0, 1] == 0).all()
    assert indexer_kl_loss(scores, attention, torch.full((1, 4, 3), -1)).item() == 0


def test_mass_is_the_share_of_the_summed_weights():
    attention = torch.tensor([[[[0.5, 0.3, 0.2]], [[0.1, 0.1, 0.8]]]])
    assert selected_mass(attention, torch.tensor([[[2, -1]]])).item() == pytest.approx(0.5)
    assert selected_mass(attention, torch.tensor([[[2, 0]]])).item() == pytest.approx(0.8)


def test_indexer_scores_a_sequence_in_pieces_as_in_one():
    indexer, x = LightningIndexer(12, heads=2, dim=6, rope_dim=4).double(), random(2, 7, 12)
    keys = torch.cat([indexer.keys(part, offset) for part, offset in ((x[:, :3], 0), (x[:, 3:], 3))], dim=1)
    q, w = indexer.queries(x[:, 5:], offset=5)
    torch.testing.assert_close(indexer_scores(q, keys, w), indexer(x)[:, 5:])


def test_indexer_depends_on_positions_through_their_difference_alone():
    indexer, x = LightningIndexer(12, heads=2, dim=6, rope_dim=4).double(), random(1, 1, 12)
    q, w = indexer.queries(x, offset=9)
    later, _ = indexer.queries(x, offset=29)
    near, far = (indexer_scores(q_, indexer.keys(x, at), w) for q_, at in ((q, 4), (later, 24)))
    torch.testing.assert_close(near, far, rtol=0, atol=1e-5)  # angles are float32


def test_indexer_takes_other_queries_and_normalises_its_keys_with_a_bias():
    indexer = LightningIndexer(12, heads=2, dim=6, rope_dim=0, query_dim=5)
    assert indexer(random(1, 3, 12, dtype=torch.float32), random(1, 3, 5, dtype=torch.float32)).shape == (
        1,
        3,
        3,
    )
    assert isinstance(indexer.key_norm, torch.nn.LayerNorm)
    assert indexer.key_norm.bias is not None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: select_topk(random(1, 2, 3), 0), "k=0"),
        (lambda: select_topk(random(1, 2, 3), 2, -1), "causal_offset=-1"),
        (lambda: select_topk(random(2, 3), 2), r"scores has shape \(2, 3\)"),
        (lambda: indexer_scores(random(1, 2, 3, 4), random(1, 5, 3), random(1, 2, 3)), r"k \(1, 5, 3\)"),
        (
            lambda: indexer_scores(random(1, 2, 3, 4), random(1, 5, 4).float(), random(1, 2, 3)),
            "different dtypes",
        ),
        (
            lambda: sparse_attention(random(1, 2, 3, 4), random(1, 5, 4), torch.zeros(1, 2, 2).long(), 3),
            "do not fit",
        ),
        (
            lambda: sparse_attention(random(1, 2, 3, 4), random(1, 5, 4), torch.zeros(1, 3, 2).long(), 5),
            "value_dim=5",
        ),
        (
            lambda: sparse_attention(random(1, 2, 3, 4), random(1, 5, 4), torch.zeros(1, 3, 2), 3),
            "float32; give int64",
        ),
        (
            lambda: sparse_attention(random(1, 2, 3, 4), random(1, 5, 4), torch.full((1, 3, 2), 5), 3),
            "holds 5, and kv has 5 keys",
        ),
        (lambda: indexer_kl_loss(random(1, 5, 5), weights(1), target="dense"), "target='dense'"),
        (lambda: indexer_kl_loss(random(1, 5, 4), weights(1)), r"scores \(1, 5, 4\)"),
        (
            lambda: indexer_kl_loss(random(1, 5, 5), weights(1), torch.zeros(1, 4, 2).long()),
            r"indices has shape",
        ),
        (lambda: LightningIndexer(8, heads=0), "heads=0"),
        (lambda: LightningIndexer(8, dim=4, rope_dim=6), "rope_dim=6"),
        (lambda: LightningIndexer(8, rope_layout="neox"), "rope_layout='neox'"),
    ],
)
def test_bad_input_is_named_with_its_sizes(call, message):
    with pytest.raises(ValueError, match=message):
        call()
