"""The tables of RWKV-7 and attention: rates bracketed on seeds of their own, a row a run."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest

from dslib.experiments import rwkv as study
from dslib.experiments import rwkv_tables as tables
from dslib.experiments.search import SEARCH_SEEDS
from dslib.models import DecoderConfig, TrainConfig
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


def bowl(configs, lr=0.16, rest_lr=0.03):
    """Results whose loss is least at these rates."""
    for config in configs:
        loss = abs(math.log2(config.lr / lr)) + abs(math.log2(config.rest_lr / rest_lr))
        if config.recall is None:
            result = SimpleNamespace(config=config, final_loss=loss)
            yield study.LengthsRun(result, [2.0] * (4 * config.context), 1.0)
        else:
            yield study.RecallRun(config, [], loss, 0.5)


def test_search_grows_until_the_best_is_inside():
    trials = tables.search_rates(TINY, bowl)
    best, runs = trials.best, trials.results
    assert (best.lr, best.rest_lr) == (0.16, 0.03)
    assert {found.config.seed for found in runs} == set(SEARCH_SEEDS)
    assert max(found.config.lr for found in runs) == pytest.approx(0.32)


def test_tables_hold_every_arm_seed_and_number_of_facts():
    base = replace(TINY, model=DecoderConfig(d_model=32, layers=1, heads=2))
    text = tables.text_rows(base, [0, 1, 2], bowl)
    finals = [row for row in text if row["kind"] == "text"]
    assert len(finals) == 5 * 3
    assert {(row["lr"], row["loss_long"], row["loss_short"]) for row in finals} == {(0.16, 2.0, 1.0)}
    assert {row["arm"] for row in text if row["kind"] == "search"} == {"attention", "RWKV-7"}
    assert not {row["seed"] for row in finals} & set(SEARCH_SEEDS)
    base = replace(base, recall=RecallTask(values=2, distance=8))
    recall = tables.recall_rows(base, [1, 2, 3], [0, 1], bowl)
    finals = [row for row in recall if row["kind"] == "recall"]
    assert sorted(row["facts"] for row in finals) == [1] * 6 + [2] * 6 + [3] * 6
    assert {row["facts"] for row in recall if row["kind"] == "recall search"} == {2}
    assert set(text[0]) == set(recall[0])


def test_tracking_table_takes_the_rate_that_is_best_beyond_the_training_length():
    def run(configs):
        for config in configs:
            far = 0.9 if config.lr == 0.02 else 0.5
            yield study.TrackingRun(config, [2.0] * 9 + [1.0], [1.0] * 6 + [0.7] * 12 + [far] * 6)

    decoder = DecoderConfig(d_model=16, layers=1, heads=2)
    base = study.TrackingConfig(decoder, steps=10, context=6)
    table = tables.tracking_rows(base, (0.01, 0.02, 0.04), (2, 3), [0, 1], run)
    finals = [row for row in table if row["kind"] == "tracking"]
    assert len(finals) == 2 * 3 * 2
    assert {(row["lr"], row["rest_lr"], row["final_loss"]) for row in finals} == {(0.02, 0.02, 1.0)}
    assert finals[0]["accuracy_trained"] == pytest.approx(1)
    assert finals[0]["accuracy_longer"] == pytest.approx(0.9)
    assert {row["objects"] for row in finals} == {2, 3}
    assert not {row["seed"] for row in table if row["kind"] == "tracking search"} & {0, 1}
    text = tables.row(next(bowl([replace(TINY, recall=None)])), kind="text")
    assert set(text) | {"arm"} == set(finals[0])


@pytest.fixture
def shipped():
    return pd.DataFrame(
        [
            {
                "kind": "recall",
                "arm": arm,
                "facts": facts,
                "objects": 0,
                "seed": seed,
                "lr": lr,
                "rest_lr": 2 * lr,
            }
            for arm, lr in (("attention", 0.1), ("RWKV-7, heads of 16", 0.2), ("RWKV-7, heads of 4", 0.3))
            for facts in (4, 8)
            for seed in (1, 0)
        ]
        + [
            {"kind": "tracking", "arm": arm, "facts": 0, "objects": 3, "seed": 0, "lr": 0.4, "rest_lr": 0.5}
            for arm in study.tracking_arms(DecoderConfig(d_model=16))
        ]
    )


def test_runs_of_an_arm_stand_by_seed_and_lacking_ones_are_an_error(shipped):
    found = tables.runs_of(shipped, "recall", "attention", facts=8)
    assert found.index.tolist() == [0, 1]
    assert set(found.facts) == {8}
    with pytest.raises(ValueError, match=r"'Mamba' and {'facts': 8}"):
        tables.runs_of(shipped, "recall", "Mamba", facts=8)


def test_live_runs_are_those_of_the_table_at_its_rates(shipped):
    recall = tables.live_recall(shipped, tables.FULL, seed=5)
    assert [(c.lr, c.rest_lr, c.seed) for c in recall.values()] == [
        (0.1, 0.2, 5),
        (0.2, 0.4, 5),
        (0.3, 0.6, 5),
    ]
    assert {config.recall.facts for config in recall.values()} == {8}
    tracking = tables.live_tracking(shipped, tables.FULL, seed=5, objects=3)
    assert {(c.objects, c.lr, c.rest_lr, c.seed) for c in tracking.values()} == {(3, 0.4, 0.5, 5)}
    assert {config.model.vocab_size for config in tracking.values()} == {6}


def test_whole_table_has_every_kind_of_run(monkeypatch):
    monkeypatch.setattr(
        tables, "text_rows", lambda base, seeds, run: [{"kind": "text", "seeds": list(seeds)}]
    )
    monkeypatch.setattr(tables, "recall_rows", lambda base, facts, seeds, run: [{"kind": facts}])
    monkeypatch.setattr(tables, "tracking_rows", lambda base, rates, objects, seeds, run: [{"kind": rates}])
    made = [row for part in tables.rows(tables.SMOKE, 3, 1) for row in part]
    assert made[0]["seeds"] == list(range(3, 11))
    assert [row["kind"] for row in made] == ["text", (2, 4, 8), (0.01, 0.02, 0.04)]


def test_pairs_of_lengths_and_the_rival_that_is_hurt_less():
    rows = [
        {"kind": "text", "arm": arm, "seed": seed, "loss_long": long, "loss_short": 2.0}
        for arm, losses in (("attention", (2.5, 1.9)), ("no state", (2.0, 2.0)))
        for seed, long in enumerate(losses)
    ]
    one, other = (tables.length_pairs(pd.DataFrame(rows), arm) for arm in ("attention", "no state"))
    assert one.long.tolist() == [2.5, 1.9]
    assert tables.less_changed(one, other).to_numpy().tolist() == [[2.0, 2.0], [1.9, 2.0]]


def test_live_text_runs_are_at_the_tables_rates():
    table = pd.DataFrame([{"kind": "text", "arm": "no state", "seed": 0, "lr": 0.3, "rest_lr": 0.7}])
    (config,) = tables.live_text(table, tables.FULL, 4, ["no state"]).values()
    assert (config.lr, config.rest_lr, config.seed, config.model.memory) == (0.3, 0.7, 4, False)
    assert config.steps == tables.FULL.text.steps
