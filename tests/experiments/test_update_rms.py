"""Sizes of updates and weights in training runs."""

import math
from dataclasses import replace

import pytest

from dslib.experiments.update_rms import adamw_on_noise, by_kind, follow, row
from dslib.models import DecoderConfig, TrainConfig, train
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
