"""Sparse attention inside the decoder: causal, cached, counted, and trainable."""

from dataclasses import replace

import pytest
import torch

from dslib.attention import KVCache, NSASizes
from dslib.models import (
    NSA,
    Decoder,
    DecoderConfig,
    MoBA,
    MoBAConfig,
    NSAConfig,
    SelfAttention,
    SlidingWindow,
    SlidingWindowConfig,
    TrainConfig,
    probe,
    train,
)
from dslib.models.layers.sparse import Compression
from dslib.optim import param_groups_for_muon
from dslib.tasks import RecallTask

BASE = DecoderConfig(vocab_size=11, d_model=16, layers=2, heads=4, kv_heads=2)
SIZES = NSASizes(4, 2, 4, selected=4, window=3)
KINDS = {
    "window": SlidingWindowConfig(3),
    "MoBA": MoBAConfig(4, 2),
    "MoBA, last layer full": MoBAConfig(4, 2, full_layers=1),
    "MoBA, random": MoBAConfig(4, 2, selection="random"),
    "NSA": NSAConfig(SIZES),
    "NSA, random": NSAConfig(SIZES, selection="random"),
    "NSA, own keys": NSAConfig(SIZES, compress_mean=True, selection="own_keys"),
}
TIME = 23


def tokens(batch=2, time=TIME, seed=0):
    return torch.randint(11, (batch, time), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=KINDS)
def config(request):
    return replace(BASE, attention=KINDS[request.param])


def test_logits_are_causal(config):
    model, x = config.build(), tokens()
    before = model(x)
    x[:, 11:] = (x[:, 11:] + 1) % 11
    after = model(x)
    torch.testing.assert_close(after[:, :11], before[:, :11])
    assert not torch.allclose(after[:, 11:], before[:, 11:])


@pytest.mark.parametrize("pieces", [(1,) * TIME, (5, 1, 9, 8)])
def test_decoding_with_a_cache_equals_one_pass(config, pieces):
    model, x, cache = config.build().double(), tokens(), KVCache()
    logits = torch.cat([model(part, cache=cache) for part in x.split(pieces, dim=1)], dim=1)
    torch.testing.assert_close(logits, model(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("time", [1, 2, 7])
def test_short_sequences_give_finite_losses_and_gradients(config, time):
    model = config.build()
    model.loss(tokens(time=time), tokens(time=time, seed=1)).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is None or weight.grad.isfinite().all(), name


def test_every_weight_learns(config):
    model = config.build()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Compression):
                module.position_embeddings.fill_(0.1)
                module.outer.weight.add_(0.1)  # where it starts at zero
    model.loss(tokens(), tokens(seed=1)).backward()
    assert all(weight.grad.abs().max() > 0 for weight in model.parameters())


def test_the_window_forgets_what_layers_times_window_minus_one_tokens_lie_back():
    model = replace(BASE, attention=SlidingWindowConfig(3)).build().double()
    x = tokens(batch=1)
    last = model(x)[:, -1]
    for back in range(TIME):
        changed = x.clone()
        changed[:, -1 - back] = (changed[:, -1 - back] + 1) % 11
        assert torch.equal(model(changed)[:, -1], last) == (back > 2 * (3 - 1))


def test_a_cache_of_windows_stays_as_short_as_the_window():
    model, cache = replace(BASE, attention=SlidingWindowConfig(3)).build(), KVCache()
    model(tokens(), cache=cache)
    assert {k.shape[2] for k, _ in cache.layers.values()} == {2}
    nsa, cache = replace(BASE, attention=NSAConfig(SIZES)).build(), KVCache()
    nsa(tokens(), cache=cache)
    compressed_k, _, rest_k, _ = cache.states["nsa", 0]
    assert compressed_k.shape[2] == SIZES.compressed(TIME) == 10
    assert rest_k.shape[2] == TIME - 10 * 2
    assert cache.states["nsa window", 0][0].shape[2] == 2


def test_moba_has_the_weights_of_dense_attention_and_switches():
    dense, sparse = BASE.build(seed=3), replace(BASE, attention=MoBAConfig(4, 2)).build(seed=3)
    assert all(map(torch.equal, dense.parameters(), sparse.parameters()))
    x = tokens()
    assert not torch.allclose(sparse(x), dense(x))
    full = replace(BASE, attention=MoBAConfig(4, 2, full_layers=2)).build(seed=3)
    assert torch.equal(full(x), dense(x))
    every = replace(BASE, attention=MoBAConfig(4, 9)).build(seed=3)
    torch.testing.assert_close(every(x), dense(x), atol=1e-5, rtol=1e-5)
    kinds = [
        type(b.attention) for b in replace(BASE, attention=KINDS["MoBA, last layer full"]).build().blocks
    ]
    assert kinds == [MoBA, SelfAttention]


def test_random_blocks_are_the_same_in_every_call_and_differ_by_head_and_layer():
    model = replace(BASE, attention=MoBAConfig(4, 2, selection="random")).build()
    first, second = (block.attention for block in model.blocks)
    q, k = torch.randn(2, 4, TIME, 4), torch.randn(2, 2, TIME, 4)
    blocks = first._blocks(q, k)
    assert torch.equal(blocks, first._blocks(q + 1, k - 1))
    assert torch.equal(blocks[:, :, -1:], first._blocks(q[:, :, -1:], k))
    assert torch.equal(blocks[0], blocks[1])
    assert not torch.equal(blocks[:, 0], blocks[:, 1])
    assert not torch.equal(blocks, second._blocks(q, k))
    many = MoBA(replace(BASE, heads=8), 0, MoBAConfig(4, 2, selection="random"))
    chosen = many._blocks(torch.randn(1, 8, 2000, 4), torch.randn(1, 8, 2000, 4))[..., 1]
    share = (chosen / (torch.arange(2000) // 4))[..., 400:].mean().item()
    assert share == pytest.approx(0.5, abs=0.01)  # spread evenly over the past


def test_logits_for_the_probe_are_infinite_exactly_where_none_may_look(config):
    model = config.build()
    x = torch.randn(2, TIME, 16, generator=torch.Generator().manual_seed(0))
    logits = model.blocks[0].attention.logits(x)
    assert logits.shape == (2, 4, TIME, TIME)
    later = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
    assert (logits[..., later] == -torch.inf).all()
    assert logits.diagonal(dim1=-2, dim2=-1).isfinite().all()
    assert (logits[..., ~later] == -torch.inf).any()  # sparse: not all of the past is seen
    sizes = probe(model, tokens(batch=1, time=9))
    assert all(value == value and abs(value) != float("inf") for value in sizes.values())


def test_muon_takes_the_matrices_of_nsa_and_leaves_its_positions():
    model = replace(BASE, attention=NSAConfig(SIZES)).build()
    matrices, rest = (set(map(id, group)) for group in param_groups_for_muon(model))
    attention = model.blocks[0].attention
    assert isinstance(attention, NSA)
    assert {id(attention.gate.weight), id(attention.window_key.weight)} <= matrices
    assert id(attention.compress_key.inner.weight) in matrices
    assert id(attention.compress_key.position_embeddings) in rest


def seen_pairs(attention, context):
    """Mean number of keys a query sees, from the module's own mask."""
    model = replace(BASE, attention=attention).build()
    x = torch.randn(1, context, 16, generator=torch.Generator().manual_seed(0))
    return (model.blocks[0].attention.logits(x) != -torch.inf).double().sum(-1).mean().item()


def test_flops_count_the_keys_that_the_masks_let_through():
    context, per_key = 29, 12 * BASE.d_model
    window = SlidingWindowConfig(5)
    assert window.training_flops_per_token(BASE, context) == pytest.approx(
        per_key * seen_pairs(window, context)
    )
    moba = MoBAConfig(4, 3)
    gate = 2 * BASE.d_model * sum(t // 4 for t in range(context)) / context
    assert moba.training_flops_per_token(BASE, context) == pytest.approx(
        per_key * seen_pairs(moba, context) + gate
    )
    half = replace(moba, full_layers=1).training_flops_per_token(BASE, context)
    assert half == pytest.approx(
        (moba.training_flops_per_token(BASE, context) + 6 * context * BASE.d_model) / 2
    )


def test_nsa_flops_count_three_branches_and_phi_once_a_block():
    context, nsa = 29, NSAConfig(SIZES)
    selected = seen_pairs(nsa, context)
    compressed = sum(SIZES.compressed(t + 1) for t in range(context)) / context
    window = sum(min(t + 1, 3) for t in range(context)) / context
    phi = 2 * (4 * 4 * 16 + 16 * 4)
    blocks = 2 * SIZES.compressed(context) / context  # of two key-value heads
    total = replace(BASE, attention=nsa).build().training_flops_per_token(context)
    others = replace(BASE, attention=nsa).build()
    multiplying = sum(p.numel() for p in others.parameters()) - others.embedding.weight.numel()
    multiplying -= 2 * 2 * (4 * 4 * 16 + 16 * 4)  # φ of both layers
    expected = 6 * multiplying + 2 * (12 * 16 * (selected + compressed + window) + 6 * phi * blocks)
    assert total == pytest.approx(expected)


@pytest.mark.parametrize("context", [1, 3, 8, 22, 61])
def test_keys_read_are_those_of_the_last_row(context):
    for attention in (SlidingWindowConfig(5), MoBAConfig(4, 3)):
        model = replace(BASE, attention=attention).build()
        x = torch.randn(1, context, 16, generator=torch.Generator().manual_seed(0))
        row = (model.blocks[0].attention.logits(x)[0, 0, -1] != -torch.inf).sum().item()
        means = (context - 1) // 4 / 2 if isinstance(attention, MoBAConfig) else 0
        assert attention.keys_read(context) == row + means


def test_keys_read_by_nsa_are_those_of_the_papers_table_4():
    for context, paper in ((8192, 2048), (16384, 2560), (32768, 3584), (65536, 5632)):
        assert NSAConfig().keys_read(context) == pytest.approx(paper, abs=1)


def test_all_kinds_train_on_recall_and_text(config, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    model = replace(config, vocab_size=256)
    result = train(
        TrainConfig(
            model,
            optimizer="muon",
            steps=5,
            batch_size=2,
            context=24,
            lr=0.02,
            evaluations=1,
            evaluation_windows=2,
            corpus=str(file),
            recall=RecallTask(facts=2, values=2, distance=12),
        )
    )
    assert result.train_loss[-1] < result.train_loss[0]
    assert 0 <= result.recall_accuracy[-1] <= 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SlidingWindowConfig(0), "window=0"),
        (lambda: MoBAConfig(top_k=0), "top_k=0"),
        (lambda: MoBAConfig(selection="best"), "selection='best'"),
        (lambda: NSAConfig(selection="gate"), "selection='gate'"),
        (lambda: NSAConfig(compress_hidden=0), "compress_hidden=0"),
    ],
)
def test_bad_configurations_are_refused_with_their_value(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_plugged_modules_are_of_their_kinds():
    assert isinstance(Decoder(replace(BASE, attention=KINDS["window"])).blocks[1].attention, SlidingWindow)
