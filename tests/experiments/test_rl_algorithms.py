"""The study of RL algorithms: equal steps and samples are equal, and every arm differs from GRPO in one thing."""

from dataclasses import asdict, replace

import pandas as pd
import pytest
import torch

from dslib.experiments import rl_algorithms as study
from dslib.experiments.bases import BaseConfig, base_model
from dslib.models import DecoderConfig
from dslib.rl.sft import SFTConfig
from dslib.rl.trainer import Trainer
from dslib.runs import checkpoints
from dslib.tasks.countdown import Countdown

TASK = Countdown(problems=50, numbers=3, largest=6, digits=2)
FEW = SFTConfig(steps=3, batch_size=8)
TINY = study.StudyConfig(
    BaseConfig(TASK, DecoderConfig(TASK.vocab_size, d_model=8, layers=1, heads=2), FEW),
    problems=4,
    held_out=4,
    steps=5,
    early=1,
    prompts=4,
    group_size=4,
    large_group_size=8,
    distil=FEW,
    tries=2,
    teacher=(50, 8),
)


@pytest.fixture(autouse=True)
def small_problems(monkeypatch):
    """Ranges that fit a task of few problems, and no cache."""
    monkeypatch.setenv("DSLIB_CACHE", "off")
    monkeypatch.setattr("dslib.experiments.bases.TRAINING", (60, 8))
    monkeypatch.setattr("dslib.experiments.bases.HELD_OUT", (70, 8))


def differing(first, second) -> set[str]:
    one, two = asdict(first), asdict(second)
    return {key for key in one if one[key] != two[key]}


def test_every_arm_starts_from_one_base_and_differs_from_grpo_in_what_its_name_says():
    runs = study.rl_runs(TINY, 3)
    plain = runs["grpo"].trainer
    assert {run.seed for run in runs.values()} == {run.trainer.seed for run in runs.values()} == {3}
    for name in study.NAMES:
        assert differing(runs[name].trainer, plain) <= {"algorithm"}
    for rate in study.RATES:
        assert differing(runs[f"grpo, {rate}"].trainer, plain) == {"lr"}
    for beta in TINY.betas:
        run = runs[f"KL {beta:g}"]
        assert differing(run.trainer, plain) == {"loss"}
        assert replace(run.trainer.recipe.loss, kl=0.0) == plain.recipe.loss
    assert differing(runs["shuffled rewards"].trainer, plain) == set()
    large, few = runs[study.LARGE_GROUPS].trainer, runs[study.FEW_SAMPLES].trainer
    assert large.prompts * large.group_size == plain.prompts * plain.group_size
    assert (few.prompts, few.group_size) == (large.prompts, plain.group_size)


def test_equal_samples_counts_what_dapo_throws_away_and_greedy_answers():
    rows = {name: study.trained(study.rl_runs(TINY, 0)[name])[0] for name in ("grpo", "remax", "dapo")}
    at = {name: next(row for row in found if row["mark"] == "equal samples") for name, found in rows.items()}
    assert at["grpo"]["step"] == TINY.steps
    assert at["grpo"]["samples"] == TINY.budget
    for name in ("remax", "dapo"):
        assert at[name]["samples"] >= TINY.budget
        assert at[name]["step"] <= TINY.steps
    assert at["remax"]["samples"] == at["remax"]["step"] * TINY.prompts * (TINY.group_size + 1)
    assert at["dapo"]["step"] < TINY.steps  # at this base nearly every group is drawn again


def test_marks_of_a_run_are_the_runs_of_as_many_steps():
    run = study.rl_runs(TINY, 0)["rloo"]
    rows, curve = study.trained(run)
    early = next(row for row in rows if row["mark"] == "early")
    short = study.trained(study.live_runs(TINY, 0)["rloo"])[0][-1]
    assert early | {"mark": "end"} == short
    assert [row["step"] for row in curve] == [1, 2, 3, 4, 5]


def test_run_that_never_draws_its_budget_is_refused():
    run = replace(study.rl_runs(TINY, 0)["grpo"], budget=10_000)
    with pytest.raises(ValueError, match="80 samples were drawn, fewer than budget=10000"):
        study.trained(run)


@pytest.mark.parametrize("source", study.SOURCES)
def test_sources_are_right_where_they_say_so_and_problems_are_whose_they_say(source):
    base = base_model(TINY.base, 0)
    examples = study.answers_of(source, base, TINY, 0)
    task = replace(TASK, skip=50, problems=8)
    if source == "RL's problems":
        task = replace(TASK, skip=60, problems=4)
    prompts = task.prompts(range(len(task)))
    owner = (examples.prompts[:, None] == prompts).all(-1).float()
    assert (owner.sum(1) == 1).all()
    rewards = task.rewards(owner.argmax(1), examples.completions, examples.mask)
    if source in ("teacher", "RL's problems"):
        assert len(examples) == len(task)
    if source in ("teacher", "RL's problems", "own answers"):
        assert (rewards == 1).all()


def test_tables_have_a_row_an_evaluation_without_gaps_and_a_row_a_block():
    named = [("grpo", study.rl_runs(TINY, 0)["grpo"]), ("guesser", study.sft_runs(TINY, 0)["guesser"])]
    table, curves = study.tables([arm for arm, _ in named], [study.run(run) for _, run in named], every=2)
    assert not table.isna().any().any()
    assert set(table[table.arm == "grpo"]["mark"]) >= {"early", "end", "equal samples", "entropy of the base"}
    assert curves.step.tolist() == [2, 4, 5]
    guesser = table[table.arm == "guesser"].iloc[0]
    assert guesser.train_1 < guesser.train_4096 <= 1


def test_a_temperature_restores_the_entropy():
    run = study.rl_runs(TINY, 0)["grpo"]
    base, sharper = base_model(TINY.base, 0), base_model(TINY.base, 0)
    with torch.no_grad():
        sharper.lm_head.weight.mul_(2)
    trainer = Trainer(sharper, TASK, replace(run.trainer, lr=0.0))
    trainer.step()
    own, of_base = study._tempered_rows(run, trainer, base)
    assert own["temperature"] == of_base["temperature"] == pytest.approx(2.0, rel=0.01)
    assert own["entropy"] == pytest.approx(study.sampled_entropy(base, TASK, 1.0), rel=0.01)
    assert own["entropy"] < of_base["entropy"]


def test_stopping_early_is_read_off_the_way_up():
    path = pd.DataFrame({"train_1": [0.1, 0.3, 0.2, 0.5], "train_256": [0.8, 0.6, 0.5, 0.4]})
    assert study.stopped_early(path, 0.2, "train_256") == pytest.approx(0.7)
    assert study.stopped_early(path, 0.4, "train_256") == pytest.approx(0.5)
    assert study.stopped_early(path, 0.9, "train_256") == 0.4


def test_shipped_base_is_that_of_its_seed_only(monkeypatch, tmp_path):
    model = base_model(TINY.base, 0)
    monkeypatch.setattr("dslib.data.__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr("dslib.data.path", lambda name: tmp_path / name)
    checkpoints.write("tiny", model, "a test", {"seed": 0})
    shipped = replace(TINY, shipped="tiny")
    run = study.sft_runs(shipped, 0)["base"]
    assert study.tuned(run) == study.tuned(replace(run, study=TINY))
    with pytest.raises(ValueError, match="is the base of seed 0; seed=1 does not ship"):
        study.tuned(replace(run, seed=1))
