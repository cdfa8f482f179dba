"""The study of RWKV-7: fair sizes, losses on long text, recall, tracking."""

import math
from dataclasses import replace

import pytest
import torch

from dslib.attention import wkv7, wkv7_chunked
from dslib.experiments import rwkv as study
from dslib.models import DecoderConfig, RWKVConfig, TrainConfig
from dslib.tasks import RecallTask

TINY = TrainConfig(
    DecoderConfig(d_model=16, layers=1, heads=2),
    optimizer="muon",
    steps=2,
    batch_size=2,
    context=16,
    lr=0.02,
    rest_lr=0.03,
    evaluations=1,
    evaluation_windows=3,
)


def size(config):
    return sum(weight.numel() for weight in config.build().parameters())


@pytest.mark.parametrize("d_model", [32, 64])
def test_matched_model_has_the_decoders_parameters_up_to_one_percent(d_model):
    decoder = DecoderConfig(d_model=d_model, layers=2, heads=2)
    for options in ({}, {"head_size": 4}):
        ours = study.matched(decoder, **options)
        assert size(ours) / size(decoder) == pytest.approx(1, abs=0.01)
        assert (ours.d_model, ours.layers) == (decoder.d_model, decoder.layers)


def test_decoder_too_small_to_match_is_refused():
    with pytest.raises(ValueError, match="smaller rank"):
        study.matched(DecoderConfig(d_model=16, layers=2, heads=2, mlp_size=16), rank=64)


def test_each_arm_differs_from_rwkv_in_one_field_and_the_null_looks_four_tokens_back():
    arms = study.arms(DecoderConfig(vocab_size=11, d_model=16, layers=2, heads=2))
    ours = vars(arms["RWKV-7"])
    for name in ("no token shift", "no delta rule", "no state"):
        assert sum(ours[field] != value for field, value in vars(arms[name]).items()) == 1
    model = arms["no state"].build().double()
    with torch.no_grad():  # no channel may begin without its share of the token before
        for name, parameter in model.named_parameters():
            if ".mix" in name:
                parameter.fill_(0.5)
            if name.endswith(("down.weight", "up.weight", "bonus")):
                parameter.add_(0.3)
    x = torch.randint(11, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[0, 2] = (x[0, 2] + 1) % 11
    differs = (model(x) - model(changed)).abs().amax(-1)[0] > 1e-9
    assert differs.tolist() == [2 <= t <= 6 for t in range(12)]


def test_long_and_short_losses_are_of_the_same_tokens():
    found = study.lengths(TINY)
    assert len(found.loss_at) == 4 * 16
    assert found.loss_long == pytest.approx(math.fsum(found.loss_at[-8:]) / 8)
    # At its beginning a model without a state cannot tell how much it has read, beyond what shift reaches.
    blind = replace(TINY, model=RWKVConfig(d_model=16, layers=1, head_size=8, rank=2, memory=False))
    found = study.lengths(blind)
    assert found.loss_long == pytest.approx(found.loss_short, abs=1e-6)
    assert found.result.final_loss < math.log(256) + 0.1


def test_loss_by_position_averages_to_the_models_loss():
    model = TINY.model.build()
    x, y = torch.randint(256, (2, 5, 9), generator=torch.Generator().manual_seed(0))
    losses = study.loss_by_position(model, x, y)
    assert math.fsum(losses) / 9 == pytest.approx(model.loss(x, y).item(), abs=1e-5)


def test_recall_trains_on_answers_alone_and_is_deterministic():
    task = RecallTask(facts=2, values=2, distance=4, first_symbol=1)
    model = RWKVConfig(vocab_size=7, d_model=8, layers=1, head_size=4, rank=2)
    config = replace(TINY, model=model, optimizer="adamw", context=12, recall=task)
    found = study.recall(config)
    assert found == study.recall(config)
    assert found.train_loss[0] == pytest.approx(math.log(7), abs=0.3)
    assert 0 <= found.accuracy <= 1
    with pytest.raises(ValueError, match="symbols go from 1 to 9; use 1 to 6"):
        study.recall(study.with_facts(config, 3))
    with pytest.raises(ValueError, match="symbols go from 0 to 5"):
        study.recall(replace(config, recall=replace(task, first_symbol=0)))


def test_facts_need_a_recall_task():
    for function in (lambda config: study.with_facts(config, 3), study.recall):
        with pytest.raises(ValueError, match="no facts; give a RecallTask"):
            function(TINY)


def test_tracking_learns_what_one_token_decides_and_tests_longer_words():
    model = RWKVConfig(vocab_size=2, d_model=8, layers=1, head_size=4, rank=2, rate_range=2.0)
    config = study.TrackingConfig(model, steps=3, batch_size=4, context=6, lr=0.02)
    found, again = study.track(config), study.track(config)
    assert found == again
    assert len(found.train_loss) == 3
    assert len(found.accuracy_at) == 24
    assert found.accuracy(4) == pytest.approx(math.fsum(found.accuracy_at[18:]) / 6)
    with pytest.raises(ValueError, match="vocab_size=2 is less than the 6"):
        study.track(replace(config, objects=3))


def test_tracking_arms_differ_in_the_range_of_the_rate_alone():
    arms = study.tracking_arms(DecoderConfig(vocab_size=6, d_model=16, layers=1, heads=2))
    below, above = arms["RWKV-7, η < 1"], arms["RWKV-7, η < 2"]
    assert replace(below, rate_range=2.0) == above
    assert size(below) < size(arms["attention"])


def test_a_run_that_diverges_is_a_bad_one_and_no_nan():
    task = RecallTask(facts=2, values=2, distance=4, first_symbol=1)
    model = RWKVConfig(vocab_size=7, d_model=8, layers=1, head_size=4, rank=2)
    config = replace(TINY, model=model, optimizer="adamw", context=12, recall=task, lr=1e30, rest_lr=1e30)
    found = study.recall(config)
    assert found.loss == math.inf
    tracking = study.TrackingConfig(replace(model, vocab_size=2), steps=4, batch_size=2, context=6, lr=1e30)
    assert study.track(tracking).loss == math.inf
    assert study.recall(config).accuracy == 0
    assert set(study.track(tracking).accuracy_at) == {0.0}


def test_random_inputs_have_the_ranges_of_the_layer():
    r, w, k, v, a, b = study.random_inputs(50, 4, torch.Generator().manual_seed(0))
    assert r.shape == v.shape == (1, 1, 50, 4)
    assert (w > math.exp(-math.exp(-0.5))).all()
    assert (w < 1).all()
    torch.testing.assert_close(a.norm(dim=-1), torch.ones(1, 1, 50).double())
    eta = -b / a
    assert ((0 < eta) & (eta < 1)).all()
    torch.testing.assert_close(wkv7(r, w, k, v, a, b), wkv7_chunked(r, w, k, v, a, b))


def test_delta_rule_reads_orthogonal_keys_exactly_and_forgives_rewriting_while_a_sum_does_not():
    plain, delta = study.memory_errors(12, 0, 1.0, 1.0, orthogonal=True)
    assert max(plain.max(), delta.max()) < 1e-5
    plain, delta = study.memory_errors(12, 4, 1.0, 1.0, orthogonal=True)
    assert delta.max() < 1e-5
    assert plain[:4].min() > 0.5
    assert plain[4:].max() < 1e-5


@pytest.mark.parametrize("rwkv", [False, True])
def test_next_token_is_read_after_as_many_as_asked(rwkv):
    decoder = DecoderConfig(vocab_size=7, d_model=32, layers=2, heads=2)
    config = study.matched(decoder, rank=2) if rwkv else decoder
    with torch.no_grad():
        assert study.next_token(config.build(), 9)().shape == (1, 1, 7)
