"""Training runs: deterministic, comparable, and honest about divergence."""

import math
from dataclasses import replace

import pytest
import torch

from dslib.models import DecoderConfig, TrainConfig, flops_per_step, train, train_many, with_compute
from dslib.models.decoder import Decoder
from dslib.models.train_config import learning_rate_factor
from dslib.models.training import (
    fit,
    make_optimizers,
    train_model,
    train_to_end,
    training_batches,
    training_steps,
)
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


def quadratic(**options):
    """A model of one matrix, whose loss is half its squared distance from 1."""
    model = torch.nn.Linear(2, 2, bias=False)
    config = TrainConfig(steps=6, lr=0.1, weight_decay=0.0, **options)
    return model, config, lambda step: (model.weight - 1).square().sum() / 2


def test_loop_trains_as_one_by_hand_does_to_the_last_bit():
    torch.manual_seed(0)
    model, config, loss = quadratic(optimizer="adamw", warmup=0.4)
    start = model.weight.detach().clone()
    losses = fit(model, config, loss)
    with torch.no_grad():
        weight = torch.nn.Parameter(start)
    optimizer = torch.optim.AdamW([weight], lr=0.1, betas=config.betas, weight_decay=0.0)
    for step, expected in enumerate(losses):
        optimizer.param_groups[0]["lr"] = 0.1 * learning_rate_factor(step, config)
        optimizer.zero_grad()
        by_hand = (weight - 1).square().sum() / 2
        by_hand.backward()
        optimizer.step()
        assert by_hand.item() == expected
    assert torch.equal(weight, model.weight)


def test_whoever_iterates_stands_behind_a_step_with_its_gradients_and_its_rate():
    model, config, loss = quadratic(optimizer="adamw")
    optimizers = make_optimizers(model, config)
    for done, step in enumerate(training_steps(model, config, loss, optimizers), start=1):
        assert step.done == done
        assert model.weight.grad is not None
        assert optimizers[0].param_groups[0]["lr"] == 0.1 * learning_rate_factor(done - 1, config)
        assert 0 <= step.optimizer_seconds <= step.seconds
    assert model.weight.grad is None


def test_a_run_that_stopped_goes_on_where_it_was():
    torch.manual_seed(0)
    model, config, loss = quadratic(optimizer="adamw")
    start = model.weight.detach().clone()
    whole = fit(model, config, loss)
    end = model.weight.detach().clone()
    model.weight.data.copy_(start)
    optimizers = make_optimizers(model, config)
    first = [step.loss for step in training_steps(model, config, loss, optimizers, stop=4)]
    resumed = make_optimizers(model, config)
    resumed[0].load_state_dict(optimizers[0].state_dict())
    rest = [step.loss for step in training_steps(model, config, loss, resumed, first=4)]
    assert first + rest == whole
    assert torch.equal(model.weight, end)


def test_a_loss_that_is_not_finite_ends_the_loop_before_the_weights_are_touched():
    model, config, loss = quadratic()
    bad = lambda step: loss(step) * (math.inf if step == 2 else 1)  # noqa: E731
    before = []
    losses = fit(model, config, bad, lambda: before.append(model.weight.detach().clone()))
    assert [math.isfinite(value) for value in losses] == [True] * 2 + [False] * 4
    assert torch.equal(model.weight, before[-1])
    assert len(list(training_steps(model, config, bad, end_at_infinity=False))) == config.steps


def test_losses_of_the_models_own_are_added_and_told_apart():
    model, config, loss = quadratic()
    model.auxiliary_loss = None

    def loss_of_batch(step):
        model.auxiliary_loss = -loss(step) if step else None
        return loss(step)

    steps, norms = [], []
    for step in training_steps(model, config, loss_of_batch):
        steps.append(step)
        norms.append(model.weight.grad.norm().item())
    assert [step.auxiliary_loss for step in steps] == [None, *(-step.loss for step in steps[1:])]
    assert norms[0] > 0
    assert max(norms[1:]) == 0, "they cancel each other"


def test_gradients_can_be_made_by_the_caller():
    model, config, loss = quadratic()
    before = model.weight.detach().clone()
    seen = []

    def backward(loss):
        seen.append(loss.item())
        model.weight.grad = torch.zeros_like(model.weight)

    assert [step.loss for step in training_steps(model, config, loss, backward=backward)] == seen
    assert torch.equal(model.weight, before)


def test_a_run_leaves_its_model_and_optimizers_behind(tiny):
    config = replace(tiny, steps=2)
    trained = train_model(config)
    assert not trained.result.diverged
    assert trained.result.train_loss == train(config).train_loss
    model = MODEL.build()
    model.load_state_dict(trained.weights)
    assert torch.equal(model.lm_head.weight, trained.model.lm_head.weight)
    assert len(trained.optimizers[0].state) == len(list(model.parameters()))
    with pytest.raises(RuntimeError, match="diverged before its end, with lr=inf"):
        train_to_end(replace(config, lr=math.inf))


def test_batches_of_a_run_are_those_of_its_seed(tiny):
    one, again, other = (next(training_batches(c)) for c in (tiny, tiny, replace(tiny, seed=1)))
    assert torch.equal(one[0], again[0])
    assert not torch.equal(one[0], other[0])
    assert torch.equal(one[0][:, 1:], one[1][:, :-1])
    assert len(next(training_batches(replace(tiny, recall=RecallTask(facts=1, distance=8))))) == 3
