"""Sparse latent attention in the decoder: all ways are one, stages share their weights, no gradient leaks."""

from dataclasses import replace

import pytest
import torch

from dslib.attention import KVCache, MLAConfig
from dslib.models import DecoderConfig, TrainConfig, generate, train
from dslib.models.layers.dsa import SparseMLAConfig
from dslib.tasks import RecallTask

MLA = MLAConfig(kv_rank=8, nope_dim=4, rope_dim=4, value_dim=4)
SPARSE = SparseMLAConfig(mla=MLA, indexer_heads=2, indexer_dim=6, indexer_rope_dim=4, top_k=3, stage="sparse")


def model(sparse=SPARSE, **changes):
    config = DecoderConfig(vocab_size=13, d_model=16, layers=2, heads=2, attention=replace(sparse, **changes))
    return config.build(seed=3).double()


def tokens(time=11, batch=2):
    return torch.randint(13, (batch, time), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("selection", ["indexer", "window"])
@pytest.mark.parametrize("top_k", [1, 3, 50])
def test_masked_gathered_and_learning_passes_and_decoding_with_a_cache_give_the_same_logits(selection, top_k):
    masked = model(selection=selection, top_k=top_k)
    gathered = model(selection=selection, top_k=top_k, mla=replace(MLA, mode="mqa"))
    x = tokens()
    learning = masked(x)
    with torch.no_grad():
        ways = [masked(x), gathered(x)]
        for pieces in ((1,) * 11, (4, 1, 6), (10, 1)):
            cache = KVCache()
            ways.append(torch.cat([masked(part, cache=cache) for part in x.split(pieces, dim=1)], dim=1))
            assert cache.length == 11
    for logits in ways:
        torch.testing.assert_close(logits, learning.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("time", [1, 2, 11])
def test_selecting_everything_is_dense_attention(time):
    x = tokens(time)
    torch.testing.assert_close(model(top_k=11)(x), model(stage="dense")(x), rtol=0, atol=1e-9)
    assert not torch.allclose(model(top_k=3)(tokens()), model(stage="dense")(tokens()))


def test_warm_up_attends_densely():
    torch.testing.assert_close(
        model(stage="warm-up")(tokens()), model(stage="dense")(tokens()), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("stage", ["warm-up", "sparse"])
@pytest.mark.parametrize("target", ["selected", "full"])
def test_indexer_learns_from_its_own_loss_only_and_nothing_else_does(stage, target):
    one = model(stage=stage, target=target)
    names = [name for name, _ in one.named_parameters()]
    logits = one(tokens())
    own = sum(block.attention.auxiliary_loss for block in one.blocks)
    from_own = torch.autograd.grad(own, list(one.parameters()), retain_graph=True, allow_unused=True)
    from_model = torch.autograd.grad(logits.square().sum(), list(one.parameters()), allow_unused=True)
    for name, mine, theirs in zip(names, from_own, from_model, strict=True):
        if ".indexer." in name:
            assert theirs is None
            assert mine.abs().sum() > 0
        else:
            assert mine is None
            assert theirs is not None


@pytest.mark.parametrize("changes", [{"stage": "dense"}, {"selection": "window"}, {"selection": "random"}])
def test_indexer_that_is_not_asked_has_no_loss(changes):
    one = model(**changes)
    one(tokens())
    assert all(block.attention.auxiliary_loss is None for block in one.blocks)


def test_no_loss_without_gradients():
    one = model()
    with torch.no_grad():
        one(tokens())
    assert all(block.attention.auxiliary_loss is None for block in one.blocks)


def test_random_selection_is_causal_and_whole():
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    chosen = model(selection="random").blocks[0].attention.select(x)
    position = torch.arange(7).view(1, 7, 1)
    assert (chosen <= position).all()
    assert ((chosen >= 0).sum(-1) == torch.tensor([1, 2, 3, 3, 3, 3, 3])).all()


def test_recipe_runs_through_train_with_all_but_the_indexer_frozen():
    attention = replace(SPARSE, stage="warm-up")
    config = TrainConfig(
        model=DecoderConfig(d_model=16, layers=1, heads=2, attention=attention),
        optimizer="muon",
        steps=25,
        batch_size=2,
        context=48,
        lr=0.02,
        evaluations=1,
        evaluation_windows=2,
        recall=RecallTask(facts=2, distance=8),
    )
    before, after = {}, {}

    def keep(step, model, optimizers):
        (before if step == 0 else after).update(
            {name: weight.clone() for name, weight in model.state_dict().items()}
        )

    result = train(config, observe=keep, trainable=lambda name: ".indexer." in name)
    assert len(result.auxiliary_loss) == 25
    assert result.auxiliary_loss[-1] < result.auxiliary_loss[0]
    for name in before:
        assert torch.equal(before[name], after[name]) != (".indexer." in name)


def test_fp8_rounds_what_the_indexer_sees_and_nothing_else():
    exact, rounded = model(), model(indexer_fp8=True)
    with torch.no_grad():
        assert not torch.allclose(exact(tokens(40)), rounded(tokens(40)), atol=1e-6)
        torch.testing.assert_close(model(indexer_fp8=True, top_k=40)(tokens(40)), model(top_k=40)(tokens(40)))


def test_generation_with_and_without_the_cache_is_the_same():
    one = model()
    outputs = [generate(one, tokens(5), 6, temperature=0, use_cache=use) for use in (True, False)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 0}, "top_k=0"),
        ({"stage": "warm"}, "stage='warm'"),
        ({"selection": "best"}, "selection='best'"),
        ({"target": "dense"}, "target='dense'"),
    ],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        SparseMLAConfig(**arguments)
