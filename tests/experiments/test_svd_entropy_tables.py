"""What is read off the tables of spectra equals what the runs themselves say."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from dslib.experiments import svd_entropy as study
from dslib.experiments import svd_entropy_tables as tables
from dslib.models.train_config import TrainConfig
from dslib.runs import measurements


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("to be or not to be that is the question " * 100)
    tiny = replace(tables.SMOKE.base, steps=4, context=16, evaluation_windows=2, corpus=str(file))
    assert isinstance(tiny, TrainConfig)
    return tiny


@pytest.fixture(scope="module")
def runs(base):
    arms = study.with_stand_in({"AdamW": base, "Muon": replace(base, optimizer="muon")})
    return tables.run_arms(arms, (3, 4), jobs=1)


@pytest.fixture(scope="module")
def table(runs):
    return pd.DataFrame(study.summaries(runs, model=tables.SMALL))


def test_every_arm_has_a_run_per_seed(runs):
    assert list(runs) == ["AdamW", "Muon", study.STAND_IN]
    assert [[run.config.seed for run in group] for group in runs.values()] == [[3, 4]] * 3


def test_means_over_matrices_are_those_of_the_runs(base, runs, table):
    end = tables.at_end(table)
    found = tables.over_matrices(end[end.arm == "Muon"], "learnt", base.model)
    expected = [run.learnt_entropy[-1].mean().item() for run in runs["Muon"]]
    assert found.tolist() == pytest.approx(expected, abs=2e-6)


def test_router_gaps_are_those_of_the_runs(base, runs, table):
    found = tables.router_gaps(table, "Muon", base.model)
    expected = [study.router_gap(a, b) for a, b in zip(runs["Muon"], runs["AdamW"], strict=True)]
    torch.testing.assert_close(
        torch.tensor(found.to_numpy()), torch.tensor(expected).double(), atol=3e-6, rtol=0
    )
    assert found.index.tolist() == [3, 4]


def test_what_is_judged_is_read_for_the_seeds_asked(base, runs, table):
    found = tables.judged(table, base.model, [4])
    share = study.share_higher(runs["Muon"][1].entropy, runs["AdamW"][1].entropy)[-1]
    routers, others = study.router_gap(runs["Muon"][1], runs["AdamW"][1])
    assert found["share, W"] == share
    assert found["router gap"] == pytest.approx(routers - others, abs=3e-6)
    assert tables.judged(table, base.model, [3]) != found
    null = tables.judged(table, base.model, [4, 3])["share, W, null"]
    assert null == study.share_higher(runs[study.STAND_IN][1].entropy, runs["AdamW"][1].entropy)[-1]


def test_arms_of_the_shipped_search_are_those_that_ship():
    searched, shipped = measurements.read("spectra_search"), measurements.read("spectra")
    for name, config in tables.MODELS.items():
        arms = tables.arms_of(searched, config, name, rules=name == tables.SMALL)
        known = shipped[shipped.model == name].groupby("arm").lr.first()
        assert {arm: run.lr for arm, run in arms.items()} == pytest.approx(known.to_dict())


def test_pretrainings_have_the_rates_of_the_dense_model_and_the_sizes_asked():
    arms = tables.stage_arms(tables.SMOKE, "a.txt")
    assert list(arms) == ["AdamW", "Muon", study.STAND_IN]
    assert {(run.steps, run.batch_size, run.corpus) for run in arms.values()} == {(8, 4, "a.txt")}
    assert arms["Muon"].lr == tables.dense_arms()["Muon"].lr


def test_random_start_is_the_mean_entropy_of_initial_weights():
    config = tables.SMOKE.base.model
    found = tables.random_start(config, [0, 7])
    expected = [
        row["svd_entropy"]
        for seed in (0, 7)
        for row in study.measured_weights(config.build(seed).state_dict())
        if row["group"] == "key"
    ]
    assert set(found) == set(study.GROUPS)
    assert found["key"] == pytest.approx(sum(expected) / len(expected))
