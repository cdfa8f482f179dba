"""Training runs: deterministic, comparable, and honest about divergence."""

import math
from dataclasses import replace

import pytest
import torch

from dslib.models import DecoderConfig, TrainConfig, flops_per_step, probe, train, train_many, with_compute
from dslib.models.decoder import Decoder
from dslib.models.measuring import recall_losses
from dslib.models.train_config import learning_rate_factor
from dslib.models.training import make_optimizers
from dslib.optim import Muon, newton_schulz_flops, param_groups_for_muon
from dslib.tasks import RecallTask

TEXT = "the quick brown fox jumps over the lazy dog. " * 400
MODEL = DecoderConfig(d_model=16, layers=1, heads=2)


@pytest.fixture
def tiny(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return TrainConfig(
        model=MODEL,
        steps=30,
        batch_size=4,
        context=16,
        lr=0.02,
        evaluations=2,
        evaluation_windows=4,
        corpus=str(file),
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_loss_falls_and_the_same_seed_gives_the_same_numbers(tiny, optimizer):
    config = replace(tiny, optimizer=optimizer)
    first, second = train(config), train(config)
    assert first.final_loss < 2.7 < first.train_loss[0]
    assert first.train_loss == second.train_loss
    assert first.validation_loss == second.validation_loss
    assert first.at == [15, 30]
    assert train(replace(config, seed=1)).train_loss != first.train_loss


def test_both_optimizers_start_from_the_same_weights_and_batches(tiny):
    assert train(tiny).train_loss[0] == train(replace(tiny, optimizer="muon")).train_loss[0]


def test_number_of_workers_changes_no_number(tiny):
    configs = [replace(tiny, seed=s, steps=5) for s in range(3)]
    alone = [train(c).train_loss for c in configs]
    assert [r.train_loss for r in train_many(configs, jobs=2)] == alone


def test_diverged_run_ends_early_with_infinite_losses(tiny):
    for steps in (30, 2):  # with two steps, two evaluations: the bad step falls on an evaluation
        result = train(replace(tiny, lr=math.inf, steps=steps))
        assert result.final_loss == math.inf
        assert len(result.train_loss) == steps
        measured = [result.validation_loss, result.weight_rms, result.activation_rms, result.largest_logit]
        assert all(len(values) == len(result.at) and values[-1] == math.inf for values in measured)


def test_schedule_warms_up_peaks_once_and_ends_at_its_final_share(tiny):
    factors = [learning_rate_factor(step, tiny) for step in range(tiny.steps)]
    assert factors[0] == pytest.approx(1 / 3)
    assert max(factors) == 1.0
    assert learning_rate_factor(tiny.steps, tiny) == pytest.approx(tiny.final_lr)
    assert factors[3:] == sorted(factors[3:], reverse=True)


def test_linear_schedule_falls_on_a_line_to_its_end(tiny):
    config = replace(tiny, schedule="linear", final_lr=0.0, warmup=0.1)
    factors = [learning_rate_factor(step, config) for step in range(config.steps + 1)]
    assert factors[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert factors[3:] == pytest.approx([1 - i / 27 for i in range(28)])
    with pytest.raises(ValueError, match="schedule='step'"):
        replace(tiny, schedule="step")


def test_training_goes_on_from_given_weights(tiny):
    kept = {}
    train(tiny, observe=lambda step, model, _: kept.update(model.state_dict()))
    weights = {name: value.clone() for name, value in kept.items()}
    seen = []
    train(replace(tiny, steps=1, lr=0.0, seed=5), lambda *a: seen.append(a[1].state_dict()), weights)
    assert all(torch.equal(value, weights[name]) for name, value in seen[0].items())


def test_compute_counts_newton_schulz_and_buys_fewer_steps_for_muon(tiny):
    adamw, muon = flops_per_step(tiny), flops_per_step(replace(tiny, optimizer="muon"))
    matrices, _ = param_groups_for_muon(Decoder(MODEL))
    assert muon - adamw == sum(newton_schulz_flops(m.shape) for m in matrices)
    assert with_compute(tiny, 10.5 * adamw).steps == 10
    assert with_compute(replace(tiny, optimizer="muon"), 10.5 * adamw).steps < 10
    with pytest.raises(ValueError, match="no step"):
        with_compute(tiny, adamw / 2)


def test_rest_has_its_own_learning_rate_under_both_optimizers(tiny):
    for optimizer in ("adamw", "muon"):
        model = Decoder(MODEL)
        made = make_optimizers(model, replace(tiny, optimizer=optimizer, lr=0.1, rest_lr=0.7))
        rates = {id(p): group["lr"] for o in made for group in o.param_groups for p in group["params"]}
        assert rates[id(model.lm_head.weight)] == 0.7
        assert rates[id(model.blocks[0].mlp.up.weight)] == 0.1
        assert len(rates) == len(list(model.parameters()))
        assert isinstance(made[0], Muon) == (optimizer == "muon")


def test_probe_sees_what_is_there_and_leaves_no_hook_behind():
    model = Decoder(MODEL)
    with torch.no_grad():
        for weight in param_groups_for_muon(model)[0]:
            weight.fill_(0.5)
        sizes = probe(model, torch.ones(2, 8, dtype=torch.long))
        model.blocks[0].attention.query.weight.zero_()
        silent = probe(model, torch.ones(2, 8, dtype=torch.long))
    assert sizes["weight_rms"] == pytest.approx(0.5)
    assert sizes["largest_logit"] > 0
    assert silent["largest_logit"] == silent["logits_above"] == 0
    assert not any(
        block.attention._forward_hooks or block.attention._forward_pre_hooks for block in model.blocks
    )


@pytest.mark.parametrize(("options", "words"), [({"optimizer": "sgd"}, "sgd"), ({"steps": 0}, "steps=0")])
def test_bad_configuration_is_refused_with_its_value(options, words):
    with pytest.raises(ValueError, match=words):
        TrainConfig(**options)


def test_recall_is_measured_apart_from_the_text(tiny):
    config = replace(tiny, context=24, recall=RecallTask(facts=2, distance=8))
    result = train(config)
    assert len(result.recall_loss) == len(result.recall_accuracy) == len(result.at) == 2
    assert result.final_loss < math.log(256) - 1
    assert not train(replace(tiny, steps=2)).recall_loss
    diverged = train(replace(config, lr=math.inf, steps=2))
    assert (diverged.recall_loss[-1], diverged.recall_accuracy[-1]) == (math.inf, 0.0)


def test_recall_losses_are_means_over_their_own_tokens_alone():
    model = Decoder(MODEL, seed=2)
    planted = RecallTask(facts=2, distance=8).evaluation(torch.arange(99, dtype=torch.uint8), 5, 20)
    found = recall_losses(model, planted, batch_size=2)
    logp = model(planted[0]).log_softmax(-1)
    text, recall = [], []
    for row, (targets, kinds) in enumerate(zip(*planted[1:], strict=True)):
        for place, (target, kind) in enumerate(zip(targets, kinds, strict=True)):
            where = recall if kind == 2 else text if kind == 0 else []
            where.append((-logp[row, place, target].item(), (logp[row, place].argmax() == target).item()))
    assert found["loss"] == pytest.approx(sum(loss for loss, _ in text) / len(text), rel=1e-5)
    assert found["recall_loss"] == pytest.approx(sum(loss for loss, _ in recall) / len(recall), rel=1e-5)
    assert found["recall_accuracy"] == pytest.approx(sum(hit for _, hit in recall) / len(recall))
