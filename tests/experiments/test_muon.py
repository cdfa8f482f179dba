"""The comparison of optimizers: searched on both sides, bracketed, and at equal compute."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from dslib.experiments import muon as study
from dslib.models import DecoderConfig, TrainConfig, flops_per_step
from dslib.runs.workers import in_workers

BASE = TrainConfig(model=DecoderConfig(d_model=16, layers=1, heads=2), steps=40, batch_size=4, context=16)
MEASURED = ("weight_rms", "activation_rms", "largest_logit", "logits_above")


def valley(lr, rest_lr, momentum=0.5):
    """A stand-in for training whose loss is the squared distance from a point, in octaves."""

    def run(configs):
        for config in configs:
            at = study.rates_of(config)
            rest = at.lr if at.rest_lr is None else at.rest_lr
            loss = (
                math.log2(at.lr / lr) ** 2
                + math.log2(rest / rest_lr) ** 2
                + 4 * (at.momentum - momentum) ** 2
            )
            measured = {name: [0.0] for name in MEASURED}
            yield SimpleNamespace(
                config=config, final_loss=loss + 1e-3 * (config.seed % 3), flops=1.0, **measured
            )

    return run


def searched(optimizer, start, run, **options):
    results = study.search_rates(BASE, optimizer, 1.0, start, run=run, **options)
    return results, study.best_rates(pd.DataFrame(study.rows(results)))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("best", [(0.03, 0.1, 0.8), (0.001, 0.9, 0.0), (0.5, 0.01, 0.95)])
def test_settings_are_found_and_bracketed_wherever_they_lie(optimizer, best):
    results, found = searched(optimizer, study.STARTS[optimizer], valley(*best), seeds=(0, 1))
    assert 0.7 < found.lr / best[0] < 1.42
    assert 0.7 < found.rest_lr / best[1] < 1.42
    assert found.momentum == best[2]
    assert len({(study.rates_of(r.config), r.config.seed) for r in results}) == len(results)


def test_no_point_is_trained_twice_because_of_rounding():
    results, _ = searched("adamw", study.Rates(0.008, 0.128, 0.9), valley(0.0113, 0.09), seeds=(0,))
    for values in ({r.config.lr for r in results}, {r.config.rest_lr for r in results}):
        assert all(b / a > 1.1 for a, b in itertools.pairwise(sorted(values)))


def test_one_rate_serves_all_and_the_momentum_can_stay():
    results, found = searched("muon", study.Rates(0.02, None, 0.9), valley(0.02, 0.08), momentum_values=())
    assert found.rest_lr is None
    assert 0.02 < found.lr < 0.08
    assert {r.config.momentum for r in results} == {0.9}


def test_momentum_is_adamws_beta_or_muons_mu():
    settings = study.Rates(0.1, None, 0.3)
    adamw, muon = (study.with_rates(BASE, name, 1.0, settings) for name in ("adamw", "muon"))
    assert adamw.betas == (0.3, BASE.betas[1])
    assert (muon.momentum, muon.betas) == (0.3, BASE.betas)
    assert study.rates_of(adamw) == study.rates_of(muon) == settings


def test_arms_get_the_rates_of_their_own_search_and_the_compute_of_their_share():
    arms = study.tuned_arms(BASE, pd.DataFrame(study.search_arms(BASE, study.ARMS, valley(0.02, 0.1))))
    assert list(arms) == list(study.ARMS)
    assert arms["AdamW"].steps == BASE.steps
    assert arms["AdamW, short"].steps == 30
    reused, source = arms["Muon, short, reused"], arms["AdamW"]
    assert (reused.lr, reused.rest_lr, reused.momentum) == (source.lr, source.rest_lr, study.REUSED_MOMENTUM)
    assert arms["Muon, short"].momentum == 0.5
    one = arms["Muon, short, one rate reused"]
    assert (one.lr, one.rest_lr) == (arms["AdamW, one rate"].lr, None)
    budget = study.SHARE * BASE.steps * flops_per_step(BASE)
    for name, config in arms.items():
        if "Muon" in name:
            assert (
                config.steps * flops_per_step(config) <= budget < (config.steps + 1) * flops_per_step(config)
            )


def test_only_the_searches_that_the_named_arms_need_are_made():
    names = (name for name in ("AdamW", "Muon, short, reused"))
    table = pd.DataFrame(study.search_arms(BASE, names, valley(0.02, 0.1)))
    assert set(table.arm) == {"AdamW"}
    assert set(study.tuned_arms(BASE, table)) == {"AdamW", "Muon, short, reused"}


def test_unbracketed_search_and_unknown_arm_are_refused():
    table = pd.DataFrame(
        {"lr": [1.0, 2.0], "rest_lr": [1.0, 1.0], "momentum": [0.9, 0.9], "final_loss": [3.0, 2.0]}
    )
    with pytest.raises(ValueError, match="edge"):
        study.best_rates(table)
    with pytest.raises(ValueError, match="AdamX"):
        study.search_arms(BASE, ("AdamX",), valley(1, 1))


def test_everything_that_ships_is_measured_by_two_calls():
    run = valley(0.02, 0.1)
    table = pd.DataFrame(study.measure(BASE, range(5), run))
    assert set(table.kind) == {"search", "final", "share"}
    assert set(table[table.kind == "final"].groupby("arm").size()) == {5}
    arms = study.tuned_arms(BASE, table[table.kind == "search"])
    larger = pd.DataFrame(study.measure_larger(replace(BASE, steps=60), arms, range(5), run))
    assert set(larger.kind) == {"search", "share"}
    for one in (table, larger):
        assert not one.isna().any().any()
        for _, part in one[one.kind == "search"].groupby("arm"):
            study.best_rates(part)
        shares = one[one.kind == "share"]
        assert set(shares.share) >= {0.5, 0.75, 1.0}
        assert set(shares.groupby(["arm", "share"]).size()) == {4}


@pytest.mark.parametrize(
    ("muon", "expected"),
    [((3.0, 1.0), 0.75), ((1.5, 1.0), 0.0), ((2.0, 1.0), 0.0), ((4.0, 3.0), float("inf"))],
)
def test_crossing_share_is_interpolated_or_says_that_there_is_none(muon, expected):
    shares = pd.DataFrame(
        {"arm": ["adamw", "adamw", "muon", "muon"], "share": [0.5, 1.0] * 2, "final_loss": [9.0, 2.0, *muon]}
    )
    assert study.crossing_share(shares) == expected


def test_row_holds_the_settings_and_the_last_measurements():
    (result,) = valley(0.02, 0.1)([replace(BASE, lr=0.02, rest_lr=None)])
    (row,) = study.rows([result], kind="final", arm="AdamW")
    assert (row["kind"], row["rest_lr"], row["momentum"]) == ("final", 0.02, BASE.betas[0])
    assert row["final_loss"] == result.final_loss


def test_momenta_are_the_optimizers_own_buffers(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be " * 100)
    config = replace(BASE, optimizer="muon", steps=2, corpus=str(tmp_path / "text.txt"))
    found = study.momenta(config)
    (in_a_worker,) = in_workers(study.momenta, [config])
    for name, buffer in found.items():
        assert torch.equal(in_a_worker[name], buffer)
    assert len(found) == 7
    assert all(".weight" in name and M.ndim == 2 and M.abs().sum() > 0 for name, M in found.items())
    with pytest.raises(ValueError, match="adamw"):
        study.momenta(replace(config, optimizer="adamw"))


def test_arms_move_to_another_base_with_their_rates_and_shares():
    tuned = study.tuned_arms(BASE, pd.DataFrame(study.search_arms(BASE, study.ARMS, valley(0.02, 0.1))))
    moved = study.arms_on(replace(BASE, steps=80), tuned)
    assert [study.rates_of(each) for each in moved.values()] == [
        study.rates_of(each) for each in tuned.values()
    ]
    assert (moved["AdamW"].steps, moved["AdamW, short"].steps) == (80, 60)
    assert study.arms_on(BASE, tuned) == tuned


def test_the_shipped_table_names_the_model_of_every_row_and_larger_ones_start_at_the_firsts_rates():
    models = {"first": BASE, "second": replace(BASE, steps=60)}
    table = study.measure_everything(models, range(5), valley(0.02, 0.1))
    assert list(table.model.unique()) == ["first", "second"]
    assert set(table[table.model == "second"].kind) == {"search", "share"}
    first = table[(table.model == "first") & (table.kind == "search") & (table.arm == "AdamW")]
    assert set(table[(table.model == "second") & (table.arm == "AdamW")].momentum) == {
        study.best_rates(first).momentum
    }


def test_table_of_arms_gives_one_rate_twice_where_it_serves_all():
    rows = {
        row["arm"]: row
        for row in study.arm_rows(
            {
                "AdamW": replace(BASE, lr=0.1, rest_lr=0.2),
                "Muon, short, one rate reused": replace(BASE, optimizer="muon", lr=0.1, rest_lr=None),
            }
        )
    }
    assert (rows["AdamW"]["lr, matrices"], rows["AdamW"]["lr, rest"]) == (0.1, 0.2)
    muon = rows["Muon, short, one rate reused"]
    assert (muon["lr, matrices"], muon["lr, rest"], muon["compute"]) == (0.1, 0.1, study.SHARE)
    assert muon["rates searched for"] == "AdamW, one rate"


def test_through_the_best_only_one_axis_moves():
    searched = pd.DataFrame(
        {
            "lr": [1.0, 2.0, 2.0, 2.0, 2.0],
            "rest_lr": [1.0, 1.0, 1.0, 4.0, 1.0],
            "momentum": [0.9, 0.9, 0.9, 0.9, 0.5],
            "final_loss": [3.0, 1.0, 2.0, 9.0, 9.0],
        }
    )
    assert study.through_best(searched, study.Rates(2.0, 1.0, 0.9), "lr").to_dict() == {1.0: 3.0, 2.0: 1.5}


def test_polar_errors_vanish_where_the_iteration_stands_still():
    """(15 − 10 + 3)/8 = 1: under this triple an orthogonal matrix, once it is divided by √2, converges to itself."""
    error, smallest = study.polar_errors([torch.eye(2)], (1.875, -1.25, 0.375), steps=[20])[0].tolist()
    assert error < 1e-6
    assert smallest == pytest.approx(1.0, abs=1e-6)


def test_polar_error_is_a_mean_over_matrices():
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 4, 6, generator=generator)
    both = study.polar_errors([one, other])
    assert both.shape == (10, 2)
    torch.testing.assert_close(both, (study.polar_errors([one]) + study.polar_errors([other])) / 2)


def test_cost_of_newton_schulz_is_what_muons_step_has_more_of():
    def result(optimizer, logit):
        config = replace(BASE, optimizer=optimizer)
        return SimpleNamespace(
            config=config, largest_logit=[logit], logits_above=[0.5], optimizer_seconds=1.0, seconds=4.0
        )

    adamw, muon = study.logits_and_cost(
        {"AdamW": [result("adamw", 1.0), result("adamw", 3.0)], "Muon": [result("muon", 2.0)]}
    )
    assert (adamw["largest logit"], adamw["logits past 20"]) == (3.0, 0.5)
    assert (adamw["optimizer, share of time"], adamw["Newton–Schulz, share of FLOPs"]) == (0.25, 0.0)
    steps = [flops_per_step(replace(BASE, optimizer=name)) for name in ("adamw", "muon")]
    assert muon["Newton–Schulz, share of FLOPs"] == 1 - steps[0] / steps[1] > 0
