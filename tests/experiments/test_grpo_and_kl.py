"""The study of sampler and trainer: the switches reach the trainer, contrasts are what they say, flips are found."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from dslib.experiments import grpo_and_kl as study
from dslib.experiments.bases import BaseConfig
from dslib.models import DecoderConfig, MoEConfig
from dslib.rl import RLConfig, SFTConfig
from dslib.tasks import Countdown

TASK = Countdown(problems=100, numbers=2, largest=9, digits=2)
MODEL = DecoderConfig(
    TASK.vocab_size, 16, 1, 2, mlp_size=16, moe=MoEConfig(experts=4, top_k=2, expert_size=8)
)
BASE = BaseConfig(TASK, MODEL, SFTConfig(120, 32, lr=2e-2, rest_lr=1e-2))
TRAINER = RLConfig(
    "grpo_no_std", prompts=4, group_size=4, minibatches=4, lr=1e-2, top_p=0.9, sampler_dtype="bfloat16"
)
CONFIG = study.RunConfig(BASE, TRAINER, steps=3, problems=8, tested=8, delta=0.0)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DSLIB_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def test_the_design_has_every_combination_once_a_seed_and_each_control_with_the_rest_on():
    found = study.design(CONFIG, (3, 5))
    assert len(found) == len(set(found)) == 2 * (16 + 2)
    assert {config.seed for config in found} == {3, 5}
    for config in found:
        if config.control:
            assert all(getattr(config, name) for name in study.FACTORS)
    assert len(study.design(CONFIG, (3,), controls=False)) == 16


def test_switches_reach_the_trainer():
    on = CONFIG.training
    assert (on.keep_routing, on.keep_sampling_mask) == (True, True)
    assert (on.recipe.loss.off_policy_delta, on.recipe.loss.kl_unbiased, on.recipe.loss.kl) == (
        0.0,
        True,
        0.05,
    )
    off = replace(CONFIG, **dict.fromkeys(study.FACTORS, False)).training
    assert (off.keep_routing, off.keep_sampling_mask) == (False, False)
    assert (off.recipe.loss.off_policy_delta, off.recipe.loss.kl_unbiased, off.recipe.loss.kl) == (
        None,
        False,
        0.05,
    )
    assert replace(CONFIG, control="no KL").training.recipe.loss.kl == 0
    assert replace(CONFIG, control="random mask").training.recipe.loss.off_policy_delta is None
    with pytest.raises(ValueError, match="control='sham' is unknown; use one of random mask, no KL"):
        replace(CONFIG, control="sham")


def test_a_run_is_one_flat_row_without_gaps_and_the_same_each_time():
    found = study.run(CONFIG)
    row = study.row(found)
    assert len(found.table) == CONFIG.steps
    assert not pd.DataFrame([row]).isna().any().any()
    assert row == study.row(study.run.__wrapped__(CONFIG))
    assert 0 < row["masked_share"] <= 1
    assert row["exact_kl"] > 0
    assert found.rewards.shape == found.kl.shape == (8, 4)


def test_random_mask_leaves_out_about_as_many_bad_answers_and_no_good_one():
    trainer = study.RandomMaskTrainer(study.base_policy(CONFIG), TASK, replace(TRAINER, prompts=64))
    trainer.step()
    whole = super(study.RandomMaskTrainer, trainer).prepare(trainer.last).advantages
    trainer.share = 0.5
    left = trainer.prepare(trainer.last).advantages
    assert torch.equal(left[whole >= 0], whole[whole >= 0])
    gone = left[whole < 0] == 0
    assert 0.3 < gone.double().mean() < 0.7
    assert torch.equal(left[whole < 0][~gone], whole[whole < 0][~gone])
    assert study.run(replace(CONFIG, control="random mask")).numbers["kept_share"] == 1


def rows_of(outcome, seeds=(0, 1)):
    """A table in which the outcome of a run is a function of its switches and its seed."""
    table = []
    for config in study.design(CONFIG, seeds):
        levels = {name: int(getattr(config, name)) for name in study.FACTORS}
        value = outcome(levels, config.seed, config.control)
        table.append({"control": config.control or "none", **levels, "seed": config.seed, "y": value})
    return pd.DataFrame(table)


def test_effects_are_those_that_were_put_in():
    table = rows_of(lambda x, seed, _: 10 + seed + 2 * x["keep_routing"] - (3 + seed) * x["unbiased_kl"])
    assert study.effects(table, "y", ("keep_routing",)) == [2, 2]
    assert study.effects(table, "y", ("unbiased_kl",)) == [-3, -4]
    assert study.effects(table, "y", ("off_policy_mask",)) == [0, 0]
    assert study.effects(table, "y") == [0, 0]
    both = rows_of(lambda x, *_: x["keep_routing"] * x["unbiased_kl"])
    assert study.effects(both, "y", ("keep_routing", "unbiased_kl")) == [0.5, 0.5]
    shuffled = table.sample(frac=1, random_state=0)
    assert study.effects(shuffled, "y", ("unbiased_kl",)) == [-3, -4]
    with pytest.raises(ValueError, match="seed 1 has 15 runs of the 16 combinations"):
        study.effects(table.drop(index=table.index[20]), "y")


def test_control_effects_compare_with_the_run_in_which_only_that_switch_is_off():
    table = rows_of(lambda x, seed, control: 100 * (control == "no KL") + 7 * seed + 5 * x["unbiased_kl"])
    assert study.control_effects(table, "no KL", "y") == [105, 105]
    assert study.control_effects(table, "random mask", "y") == [0, 0]


def test_punished_share_counts_correct_answers_beside_a_wrong_one_only():
    rewards = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    kl = torch.tensor([[9.0, 0, 0, 0], [9, 0, 0, 0], [9, 0, 0, 0]])
    assert study.punished_share(rewards, kl, 0.0) == 0
    assert study.punished_share(rewards, kl, 0.1) == 0.5  # 1 − .9 is below the mean of .1, 1, 0, 0
    assert study.punished_share(rewards[1:], kl[1:], 0.1) == 0


def test_flipped_routes_are_where_they_were_changed_and_order_in_a_set_is_none():
    policy = study.base_policy(CONFIG)
    sampling = study.sampling_of(CONFIG, None)
    generator = torch.Generator().manual_seed(0)
    rollout = study.sample(policy, TASK.prompts([0, 1]), sampling, generator, 2, record_routes=True)
    assert not study.flipped_routes(policy, rollout).any()
    routes = rollout.routes.clone()
    routes[0, 1, 2] = routes[0, 1, 2].flip(0)
    assert not study.flipped_routes(policy, replace(rollout, routes=routes)).any()
    used = set(routes[0, 3, 4].tolist())
    routes[0, 3, 4, 0] = next(expert for expert in range(4) if expert not in used)
    assert study.flipped_routes(policy, replace(rollout, routes=routes)).nonzero().tolist() == [[0, 3, 4]]


def test_a_float32_sampler_has_no_mismatch_once_mask_and_routes_are_kept_and_a_bfloat16_one_has():
    table = pd.DataFrame(study.mismatch_rows(CONFIG, 0, problems=20))
    kept = table[(table.keep_routing == 1) & (table.keep_sampling_mask == 1) & (table.part == "all")]
    assert kept[kept.dtype == "float32"].size_max.max() < 1e-5
    assert kept[kept.dtype == "bfloat16"].size_max.min() > 1e-4
    assert (table[table.dtype == "float32"].flip_share == 0).all()
    lost = table[(table.top_p < 1) & (table.keep_sampling_mask == 0)]
    assert (lost.ratio_mean < 0.99).all()
    unflipped = table[table.part != "all"]
    routes = unflipped.pivot_table(
        index=["dtype", "top_p", "keep_sampling_mask"], columns="keep_routing", values="size_max"
    )
    torch.testing.assert_close(torch.tensor(routes[0].values), torch.tensor(routes[1].values))
