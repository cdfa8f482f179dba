"""The comparison of optimizers: searched on both sides, bracketed, and at equal compute."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest

from dslib.models import DecoderConfig, TrainConfig, flops_per_step
from dslib.models import optimizer_study as study

BASE = TrainConfig(model=DecoderConfig(d_model=16, layers=1, heads=2), steps=40, batch_size=4, context=16)


def valley(best):
    """A stand-in for training: the loss is the squared distance from ``best`` = (lr, rest_lr) in octaves."""
    import math

    calls = []

    def run(configs):
        calls.append(len(configs))
        for c in configs:
            rest = c.lr if c.rest_lr is None else c.rest_lr
            loss = math.log2(c.lr / best[0]) ** 2 + math.log2(rest / best[1]) ** 2 + 1e-3 * (c.seed % 3)
            measured = {
                key: [0.0] for key in ("weight_rms", "activation_rms", "largest_logit", "logits_above")
            }
            yield SimpleNamespace(config=c, final_loss=loss, flops=c.steps * 1.0, **measured)

    run.calls = calls
    return run


@pytest.mark.parametrize("best", [(0.03, 0.1), (0.001, 0.9), (0.5, 0.01)])
def test_pair_of_rates_is_found_and_bracketed_wherever_it_lies(best):
    results = study.search_learning_rates(
        BASE, (0.01, 0.02, 0.04), (0.05, 0.1, 0.2), seeds=(0, 1), run=valley(best)
    )
    lr, rest_lr = study.best_learning_rates(pd.DataFrame(study.rows(results)))
    assert 0.7 < lr / best[0] < 1.42
    assert 0.7 < rest_lr / best[1] < 1.42
    assert len({(r.config.lr, r.config.rest_lr, r.config.seed) for r in results}) == len(results)


def test_no_pair_is_trained_twice_because_of_rounding():
    results = study.search_learning_rates(
        BASE, (0.004, 0.008, 0.016), (0.064, 0.128, 0.256), seeds=(0,), run=valley((0.0113, 0.09))
    )
    rates = sorted({r.config.lr for r in results}) + sorted({r.config.rest_lr for r in results})
    assert all(b / a > 1.1 or b < a for a, b in itertools.pairwise(rates))


def test_one_rate_serves_all_where_the_arm_says_so():
    results = study.search_learning_rates(
        BASE, (0.01, 0.02, 0.04), None, seeds=(0,), run=valley((0.02, 0.08))
    )
    assert all(r.config.rest_lr is None for r in results)
    lr, rest_lr = study.best_learning_rates(pd.DataFrame(study.rows(results)))
    assert lr == rest_lr
    assert 0.02 < lr < 0.08


def test_arms_get_the_rates_of_their_own_search_and_the_compute_of_their_share():
    run = valley((0.02, 0.1))
    searched = pd.DataFrame(study.search_arms(BASE, study.ARMS, (0,), run))
    arms = study.tuned_arms(BASE, searched)
    assert list(arms) == list(study.ARMS)
    assert arms["AdamW"].steps == BASE.steps
    assert arms["AdamW, short"].steps == 30
    assert arms["Muon, short"].steps < 30
    assert arms["Muon, short, reused"].lr == arms["AdamW"].lr
    assert arms["Muon, short, reused"].rest_lr == arms["AdamW"].rest_lr
    one = arms["Muon, short, one rate reused"]
    assert one.lr == one.rest_lr == arms["AdamW, one rate"].lr
    budget = study.SHARE * BASE.steps * flops_per_step(BASE)
    for name, config in arms.items():
        if "Muon" in name:
            assert (
                config.steps * flops_per_step(config) <= budget < (config.steps + 1) * flops_per_step(config)
            )


def test_only_the_searches_that_the_named_arms_need_are_made():
    searched = pd.DataFrame(
        study.search_arms(BASE, ("AdamW", "Muon, short, reused"), (0,), valley((0.02, 0.1)))
    )
    assert set(searched.arm) == {"AdamW"}
    assert set(study.tuned_arms(BASE, searched)) == {"AdamW", "Muon, short, reused"}


def test_unbracketed_search_and_unknown_arm_are_refused():
    table = pd.DataFrame({"lr": [1.0, 2.0], "rest_lr": [1.0, 1.0], "final_loss": [3.0, 2.0]})
    with pytest.raises(ValueError, match="edge"):
        study.best_learning_rates(table)
    with pytest.raises(ValueError, match="AdamX"):
        study.search_arms(BASE, ("AdamX",), (0,), valley((1, 1)))


def test_shares_and_momenta_are_labelled_and_keep_the_tuned_rates():
    run = valley((0.02, 0.1))
    arms = study.tuned_arms(BASE, pd.DataFrame(study.search_arms(BASE, study.ARMS, (0,), run)))
    shares = pd.DataFrame(study.share_rows(arms, BASE, (0.5, 1.0), (0, 1), run))
    assert set(shares.share) == {0.5, 1.0}
    assert shares[(shares.arm == "adamw") & (shares.share == 1.0)].steps.unique() == [BASE.steps]
    assert set(shares[shares.arm == "muon"].lr) == {arms["Muon, short"].lr}
    momenta = pd.DataFrame(study.momentum_rows(arms["Muon, short"], (0.0, 0.9), (0,), run))
    assert len(momenta) == 6
    assert set(momenta.momentum) == {0.0, 0.9}


def test_row_holds_the_settings_and_the_last_measurements():
    (result,) = valley((0.02, 0.1))([replace(BASE, lr=0.02, rest_lr=None)])
    (row,) = study.rows([result], kind="final", arm="AdamW")
    assert row["kind"] == "final"
    assert row["rest_lr"] == 0.02
    assert row["final_loss"] == result.final_loss


def test_everything_that_ships_about_a_model_is_measured_by_one_call():
    run = valley((0.02, 0.1))
    table = pd.DataFrame(study.measure(BASE, range(5), run))
    assert set(table.kind) == {"search", "final", "share", "momentum"}
    assert set(table[table.kind == "final"].groupby("arm").size()) == {5}
    less = pd.DataFrame(study.measure(BASE, range(5), run, thorough=False))
    assert set(less.kind) == {"search", "final", "share"}
    assert set(less[less.kind == "final"].groupby("arm").size()) == {4}
    for one in (table, less):
        assert not one.isna().any().any()
        for _, part in one[one.kind == "search"].groupby("arm"):
            study.best_learning_rates(part)


@pytest.mark.parametrize(
    ("muon", "expected"),
    [((3.0, 1.0), 0.75), ((1.5, 1.0), 0.0), ((2.0, 1.0), 0.0), ((4.0, 3.0), float("inf"))],
)
def test_crossing_share_is_interpolated_or_says_that_there_is_none(muon, expected):
    shares = pd.DataFrame(
        {"arm": ["adamw", "adamw", "muon", "muon"], "share": [0.5, 1.0] * 2, "final_loss": [9.0, 2.0, *muon]}
    )
    assert study.crossing_share(shares) == expected


def test_momenta_are_the_optimizers_own_buffers(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be " * 100)
    config = replace(BASE, optimizer="muon", steps=2, corpus=str(tmp_path / "text.txt"))
    found = study.momenta(config)
    assert len(found) == 7
    assert all(".weight" in name and M.ndim == 2 and M.abs().sum() > 0 for name, M in found.items())
    with pytest.raises(ValueError, match="adamw"):
        study.momenta(replace(config, optimizer="adamw"))
