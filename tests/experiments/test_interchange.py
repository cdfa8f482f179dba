"""Pretraining and fine-tuning with either optimizer: the right weights, texts, rates and differences."""

import math
from dataclasses import replace

import pandas as pd
import pytest

from dslib.experiments import interchange as study
from dslib.experiments.svd_entropy import STAND_IN, with_stand_in
from dslib.models import Decoder, DecoderConfig, TrainConfig, train
from dslib.runs.workers import in_workers
from dslib.tasks import DOCSTRINGS

MODEL = DecoderConfig(d_model=16, heads=2, layers=1)


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be that is the question " * 100)
    return TrainConfig(
        MODEL,
        steps=3,
        batch_size=2,
        context=16,
        lr=0.05,
        evaluations=1,
        evaluation_windows=2,
        corpus=str(tmp_path / "text.txt"),
    )


def test_fine_tuning_starts_from_the_pretrained_weights(tiny):
    kept = {}
    result = train(tiny, observe=lambda step, model, _: kept.update(model=model.state_dict()))
    tunes = (study.fine_tuning(tiny, 2, 0.5), study.fine_tuning(replace(tiny, optimizer="muon"), 2, 0.0))
    (found,) = in_workers(study.fine_tuned, [study.FineTunings(tiny, tunes)])
    assert found.pretrained == result.final_loss
    assert found.losses[0] == train(tunes[0], weights=kept["model"]).final_loss != found.before
    assert found.losses[1] == found.before, "a learning rate of 0 leaves the weights as they were"
    model = Decoder(MODEL, seed=9)
    model.load_state_dict(kept["model"])
    assert found.pretrained == found.before, "here both stages are judged on the same text"


def test_fine_tuning_reads_another_text_and_ends_at_rate_zero(tiny):
    tune = study.fine_tuning(replace(tiny, corpus=None, rest_lr=None), 50, 0.25)
    assert (tune.corpus, tune.schedule, tune.final_lr, tune.steps) == (DOCSTRINGS, "linear", 0.0, 50)
    assert (tune.lr, tune.rest_lr) == (0.0125, 0.0125)
    assert study.fine_tuning(tiny, 5, 1.0).corpus == tiny.corpus


def fake(losses):
    """Stands in for training: ``losses(pretrain optimizer, its lr, tune)`` plus the seed."""

    def run(configs):
        for config in configs:
            first = config.pretrain
            yield study.FineTuningLosses(
                config,
                2.0,
                2.5,
                tuple(losses(first.optimizer, first.lr, t) + first.seed for t in config.tunes),
            )

    return run


def test_searches_are_bracketed_and_the_null_takes_adamws_rate(tiny):
    arms = with_stand_in({"AdamW": tiny, "Muon": replace(tiny, optimizer="muon", lr=0.2)})
    best = {("adamw", "adamw"): 0.3, ("adamw", "muon"): 2.0, ("muon", "adamw"): 0.05, ("muon", "muon"): 0.7}

    def losses(pretrain, lr, tune):
        full = 0.05 if tune.optimizer == "adamw" else 0.2
        return math.log2(tune.lr / full / best[pretrain, tune.optimizer]) ** 2

    rows = study.search_shares(arms, 4, (7, 8), fake(losses))
    assert {row["kind"] for row in rows} == {"search"}
    shares = study.best_shares(pd.DataFrame(rows))
    whole = study.measure(arms, 4, (0,), fake(losses), (7, 8))
    assert whole[: len(rows)] == rows
    assert {row["kind"] for row in whole[len(rows) :]} == {"final"}
    for (pretrain, tune), value in best.items():
        names = {"adamw": "AdamW", "muon": "Muon"}
        assert abs(math.log2(shares[names[pretrain], names[tune]] / value)) < 0.51
    assert {shares[cell] for cell in study.NULL_CELLS} == {shares["AdamW", "AdamW"]}


def test_cells_share_a_pretraining_and_differences_are_those_of_the_table(tiny):
    arms = with_stand_in({"AdamW": tiny, "Muon": replace(tiny, optimizer="muon", lr=0.2)})
    asked = []

    def losses(pretrain, lr, tune):
        if lr == tiny.lr / 2 or tune.lr == tiny.lr / 2:
            return 9.0
        return {
            ("muon", "muon"): 1.0,
            ("muon", "adamw"): 1.3,
            ("adamw", "muon"): 1.6,
            ("adamw", "adamw"): 1.5,
        }[pretrain, tune.optimizer]

    def run(configs):
        asked.extend(configs)
        return fake(losses)(configs)

    shares = dict.fromkeys(study.CELLS + study.NULL_CELLS, 1.0)
    table = pd.DataFrame(study.interchange(arms, shares, 4, range(3), run))
    assert len(asked) == 3 * 3
    assert len(table) == 3 * 7
    best = study.best_against_rest(table)
    assert (best["matched"] - best["best other"]).tolist() == pytest.approx([-0.3] * 3)
    gains = study.gains(table)
    assert gains["own"].tolist() == pytest.approx([-0.3] * 3)
    assert gains["other"].tolist() == pytest.approx([0.1] * 3)
    null = study.gains(table, study.NULL_CELLS)
    assert null["other"].tolist() == pytest.approx([9.0 - 1.5] * 3)
    assert {cell[0] for cell in study.NULL_CELLS} == {STAND_IN, "AdamW"}


def test_other_model_and_no_fine_tuning_are_refused(tiny):
    with pytest.raises(ValueError, match="tunes"):
        study.FineTunings(tiny, ())
    with pytest.raises(ValueError, match="model"):
        study.FineTunings(tiny, (replace(tiny, model=replace(MODEL, layers=2)),))
