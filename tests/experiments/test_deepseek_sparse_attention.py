"""The recipe from dense to sparse: what starts where, what is frozen, and what the measures mean."""

from dataclasses import replace

import pytest
import torch

from dslib.attention import MLAConfig
from dslib.experiments import deepseek_sparse_attention as study
from dslib.models import DecoderConfig, TrainConfig
from dslib.models.layers.dsa import SparseMLAConfig
from dslib.tasks import RecallTask

MODEL = DecoderConfig(
    d_model=16,
    layers=2,
    heads=2,
    attention=SparseMLAConfig(MLAConfig(kv_rank=8, nope_dim=4, rope_dim=4, value_dim=4), 2, 6, 4),
)
BASE = TrainConfig(
    MODEL,
    optimizer="muon",
    steps=3,
    batch_size=2,
    context=24,
    lr=0.02,
    evaluation_windows=4,
    recall=RecallTask(facts=2, values=2, distance=8),
)
RECIPE = study.Recipe(BASE, top_k=4, warm_up_steps=2, steps=2)
LONG = replace(RECIPE, context=40, distance=16, extension_steps=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSLIB_CACHE", str(tmp_path_factory.mktemp("cache")))
        names = [study.DENSE, study.WARMED, *study.ARMS]
        yield dict(
            zip(names, study.train_recipes([study.RecipeRun(RECIPE, name) for name in names]), strict=True)
        )


def test_arms_start_from_the_weights_they_name_and_train_on_the_same_batches():
    assert RECIPE.before("dense") == [study.DENSE]
    assert RECIPE.before("sparse") == [study.DENSE, study.WARMED]
    assert LONG.before("window") == [study.SHORT, study.DENSE]
    configs = [RECIPE.configuration(name) for name in study.ARMS]
    assert len({(c.seed, c.steps, c.lr, c.rest_lr, c.batch_size, c.context) for c in configs}) == 1
    assert configs[0].seed != BASE.seed


def test_longer_context_is_trained_after_the_short_one():
    assert LONG.configuration(study.SHORT).context == 24
    for name in (study.DENSE, study.WARMED, "sparse"):
        config = LONG.configuration(name)
        assert (config.context, config.recall.distance) == (40, 16)
    assert LONG.configuration(study.DENSE).seed not in (BASE.seed, LONG.configuration("dense").seed)


def test_longer_context_goes_on_from_the_short_one(trained):
    (long,) = study.train_recipes([study.RecipeRun(LONG, study.DENSE)])
    assert long.result.config.context == 40
    assert set(long.weights) == set(trained[study.DENSE].weights)
    assert not torch.equal(long.weights["lm_head.weight"], trained[study.DENSE].weights["lm_head.weight"])


def test_a_query_gets_the_share_of_the_context_that_the_ratio_names():
    for base, short, long in ((study.BASE, (96, 12), (128, 4)), (study.TINY, (32, 4), (64, 2))):
        for ratio, (context, top_k) in ((8, short), (32, long)):
            recipe = study.recipe_with(base, ratio, warm_up_steps=3, steps=5)
            config = recipe.configuration("sparse")
            assert (config.context, recipe.top_k, config.steps) == (context, top_k, 5)
            reach = config.model.layers * (top_k - 1)
            assert config.recall.distance > reach, "else a window of as many keys would find the facts"


def test_warm_up_moves_the_indexer_alone(trained):
    before, after = trained[study.DENSE].weights, trained[study.WARMED].weights
    for name in before:
        assert torch.equal(before[name], after[name]) != (".indexer." in name)
    assert trained[study.WARMED].text_loss == trained[study.DENSE].text_loss


def test_every_arm_ends_elsewhere_and_measures_what_its_name_says(trained):
    losses = [trained[name].result.train_loss[-1] for name in study.ARMS]
    assert len(set(losses[:5])) == 5
    for one in trained.values():
        assert set(one.masses) == {"indexer", "window", "random", "best"}
        assert max(one.masses.values()) == one.masses["best"] <= 1
        text, answers = one.text_loss, one.recall_loss
        assert min(text, answers) < one.checks["mixed_loss"] < max(text, answers)
        assert 0 <= one.checks["overlap_misrotated"] <= one.checks["overlap_fp8"] <= 1


def test_masses_by_hand(trained):
    model, tokens = trained["sparse"].model(), torch.arange(12)[None]
    module, x = study.attention_inputs(model, tokens)[1]
    weights = module.weights(x).sum(1)[0] / 2
    window = sum(weights[t, t - 3 : t + 1].sum() for t in range(4, 12)) / 8
    best = weights[4:].topk(4).values.sum(-1).mean()
    first, second = (study.attention_inputs(model, tokens)[layer] for layer in (0, 1))
    found = study.masses(model, tokens, 4)
    alone = []
    for one, inputs in (first, second):
        w = one.weights(inputs).sum(1)[0] / 2
        alone.append(torch.stack([w[t, t - 3 : t + 1].sum() for t in range(4, 12)]).mean().item())
    assert found["window"] == pytest.approx(sum(alone) / 2, rel=1e-5)
    assert alone[1] == pytest.approx(window.item(), rel=1e-5)
    assert best >= window


def test_another_configuration_changes_what_is_evaluated(trained):
    one = trained["sparse"]
    assert study.evaluate(one) == pytest.approx(
        {"loss": one.text_loss, "recall_loss": one.recall_loss, "recall_accuracy": one.recall_accuracy}
    )
    assert study.evaluate(one, top_k=24)["loss"] != one.text_loss
    assert study.overlap(one, lambda indexer, x, latent: indexer(x, latent)) == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: study.Recipe(replace(BASE, recall=None), 4), "a recall task"),
        (lambda: study.Recipe(replace(BASE, model=DecoderConfig()), 4), "SparseMLAConfig"),
        (lambda: replace(RECIPE, context=99), "context=99 and distance=None go together"),
        (lambda: RECIPE.configuration("sparser"), "run='sparser' is unknown"),
        (lambda: study.recipe_with(BASE, 16, 2, 2), "ratio=16 is not studied"),
    ],
)
def test_bad_recipes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
