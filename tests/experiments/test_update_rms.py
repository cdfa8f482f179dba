"""Sizes of updates and weights in training runs."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dslib.experiments import update_rms as study
from dslib.experiments.update_rms import adamw_on_noise, by_kind, follow, row
from dslib.models import DecoderConfig, TrainConfig, train
from dslib.optim import svd_orthogonalize
from dslib.runs.workers import in_workers

TEXT = "the quick brown fox jumps over the lazy dog. " * 200


@pytest.fixture
def tiny(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    model = DecoderConfig(d_model=16, layers=2, heads=2, mlp="two_layer")
    sizes = {"steps": 6, "batch_size": 2, "context": 16, "evaluations": 3, "evaluation_windows": 2}
    return TrainConfig(model, optimizer="muon", lr=0.02, corpus=str(file), **sizes)


def test_following_a_run_does_not_change_it(tiny):
    assert follow(tiny).result.train_loss == train(tiny).train_loss


def test_every_matrix_has_an_update_a_step_and_update_norm_makes_each_0_2(tiny):
    followed = follow(replace(tiny, adjust_lr="update_norm"))
    assert len(followed.update_rms) == 2 * 6
    for values in followed.update_rms.values():
        assert values == pytest.approx([0.2] * 6, rel=1e-3)


def test_baseline_gives_mlp_half_the_update_of_adjusted_lr(tiny):
    baseline, adjusted = (
        by_kind({k: v[0] for k, v in follow(replace(tiny, adjust_lr=mode)).update_rms.items()})
        for mode in ("baseline", "match_rms_adamw")
    )
    assert adjusted["MLP up"] / baseline["MLP up"] == pytest.approx(2, rel=1e-3)
    assert adjusted["query"] / baseline["query"] == pytest.approx(1, rel=1e-3)


def test_without_a_learning_rate_nothing_moves(tiny):
    followed = follow(replace(tiny, lr=0.0, rest_lr=0.01, weight_decay=0.0))
    assert set(followed.moved_rms.values()) == {0.0}


def test_decay_of_gains_is_their_own(tiny):
    fast = replace(tiny, rest_lr=0.1, weight_decay=0.0)
    free, decayed = follow(fast), follow(replace(fast, norm_weight_decay=5.0))
    assert decayed.gain_rms[-1] < free.gain_rms[-1]


def test_many_runs_come_in_order_and_make_flat_rows(tiny):
    runs = list(in_workers(follow, [tiny, replace(tiny, optimizer="adamw", betas=(0.9, 0.95))]))
    rows = [row(run, arm="x") for run in runs]
    assert [each["optimizer"] for each in rows] == ["muon", "adamw"]
    assert all(math.isfinite(value) for each in rows for value in each.values() if isinstance(value, float))


def test_a_diverged_run_is_an_error_and_not_a_row(tiny):
    with pytest.raises(RuntimeError, match="diverged"):
        follow(replace(tiny, lr=1e30, rest_lr=1e30))


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_adamw_on_noise_has_the_size_of_an_average_of_noise(beta):
    expected = math.sqrt((1 - beta) / (1 + beta))
    assert adamw_on_noise((beta, 0.99), 300, (32, 32)) == pytest.approx(expected, rel=0.05)


def test_kinds_average_over_layers_and_leave_others_out():
    sizes = {"blocks.0.mlp.up.weight": 1.0, "blocks.1.mlp.up.weight": 3.0, "router.weight": 9.0}
    assert by_kind(sizes) == {"MLP up": 2.0}


def test_the_opening_of_a_run_is_that_of_the_whole_run(tiny):
    whole = train(tiny)
    assert whole.at == [2, 4, 6]
    assert study.opening(tiny, 5) == dict(zip(whole.at[:2], whole.validation_loss[:2], strict=True))
    assert study.opening(tiny, 1) == {}


def test_late_update_is_the_mean_over_the_second_half(tiny):
    followed = follow(tiny)
    late = study.late_update_rms(followed)
    assert late.keys() == followed.update_rms.keys()
    name, values = next(iter(followed.update_rms.items()))
    assert late[name] == math.fsum(values[3:]) / 3


def test_decay_rows_follow_adamw_on_two_seeds_only(tiny):
    chosen = study.decay_arms(tiny, adamw_lr=0.01)
    followed = []

    def following(configs):
        followed.extend((config.optimizer, config.seed) for config in configs)
        return [follow(tiny)] * len(configs)

    rows = study.decay_rows(chosen, range(3), following)
    assert followed == [("muon", seed) for _ in range(3) for seed in range(3)] + [("adamw", 0), ("adamw", 1)]
    assert len(rows) == len(followed) * 3
    assert list(dict.fromkeys(each["arm"] for each in rows)) == list(chosen)


def test_nominal_and_realised_agree_on_the_exact_polar_factor():
    matrix = torch.randn(6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (found,) = study.nominal_and_realised({"blocks.0.mlp.up.weight": matrix}, svd_orthogonalize)
    assert (found["momentum of"], found["shape"]) == ("0.mlp.up.weight", "[6, 10]")
    assert found["nominal RMS"] == pytest.approx(1 / math.sqrt(10))
    assert found["realised RMS"] == pytest.approx(found["nominal RMS"], rel=1e-9)
    assert found["× 0.2·√max(A, B)"] == pytest.approx(0.2, rel=1e-9)


def test_table_of_arms_names_every_factor_with_its_target(tiny):
    rows = {each["arm"]: each for each in study.arm_rows(study.arms(replace(tiny, optimizer="adamw")))}
    assert rows["AdamW"]["factor"] == "–"
    assert rows["Baseline"]["factor"] == "0.2·√H"
    assert rows["Adjusted LR"]["factor"] == "0.2·√max(A, B)"
    assert rows["RMS 0.8, same product"]["factor"] == "0.8·√max(A, B)"
    assert rows["RMS 0.8, same product"]["lr, matrices"] == pytest.approx(tiny.lr / 4)


def test_larger_models_get_fewer_arms_and_seeds_at_rates_of_their_own(tiny):
    searched, trained = {}, []

    def run(configs):  # the best rates lie an octave higher on the larger model
        for config in configs:
            wide = config.model.d_model == 32
            best = (0.02, 0.1) if wide else (0.01, 0.1)
            loss = math.log2(config.lr / best[0]) ** 2 + math.log2(config.rest_lr / best[1]) ** 2
            searched.setdefault(wide, set()).add(config.seed)
            names = ("weight_rms", "activation_rms", "largest_logit", "logits_above")
            measured = {name: [0.0] for name in names}
            yield SimpleNamespace(config=config, final_loss=loss, flops=1.0, **measured)

    def following(configs):
        trained.extend((config.model.d_model, config.lr, config.seed) for config in configs)
        return [follow(tiny)] * len(configs)

    small = replace(tiny, optimizer="adamw", lr=0.01, rest_lr=0.1)
    models = {"small": small, "large": replace(small, model=replace(small.model, d_model=32))}
    tables = study.measure_everything(models, range(5), run, following)
    finals = tables["update_rms"]
    assert list(tables["update_rms_search"].model.unique()) == ["small", "large"]
    assert (len(searched[False]), len(searched[True])) == (2, 1)
    assert set(finals[finals.model == "small"].groupby("arm").size()) == {5}
    assert tuple(finals[finals.model == "large"].arm.unique()) == study.LARGER_ARMS
    assert (trained[0][:2], trained[-1][:2]) == ((16, pytest.approx(0.01)), (32, pytest.approx(0.02)))
    assert {seed for width, _, seed in trained if width == 32} == {0, 1}
