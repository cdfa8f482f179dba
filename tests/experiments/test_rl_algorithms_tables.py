"""Tables of the algorithms' study as a notebook reads them, and what one answer of a group weighs."""

import numpy as np
import pandas as pd
import pytest
import torch

from dslib.experiments import rl_algorithms as study
from dslib.experiments import rl_algorithms_tables as tables
from dslib.experiments.rl_algorithms_weights import LABELS, answer_weights, policy_gradient
from dslib.rl.objectives import LossConfig


def row(arm, seed, step, once, often, mark="end"):
    rates = {"train_1": once, "train_256": often, "held_1": once / 2, "held_256": often / 2}
    return {"arm": arm, "mark": mark, "seed": seed, "step": step} | rates


TABLE = pd.DataFrame(
    [
        row("grpo", 1, 4, 0.5, 0.4),
        row("base", 1, 0, 0.1, 0.8),
        row("base", 0, 0, 0.2, 0.8),
        row("grpo", 0, 4, 0.4, 0.6),
        row("grpo", 0, 2, 0.3, 0.7, "middle"),
        row("grpo", 1, 2, 0.3, 0.6, "middle"),
        row("grpo", 0, 4, 0.1, 0.9, "base, as hot"),
        row("rloo", 0, 4, 0.3, 0.5),
        row("rloo", 1, 4, 0.4, 0.3),
    ]
)


def test_numbers_stand_in_the_order_of_seeds_whatever_that_of_the_rows():
    assert tables.passed(TABLE, "grpo", 1).tolist() == [0.4, 0.5]
    assert tables.passed(TABLE, "grpo", 1, where="held").tolist() == [0.2, 0.25]
    assert tables.gained(TABLE, "grpo", 256) == pytest.approx([-0.2, -0.4])
    assert tables.at_step(TABLE, "grpo", 256, 2).tolist() == [0.7, 0.6]


def test_the_mean_of_others_leaves_the_arm_out():
    assert tables.others(TABLE, ["grpo", "rloo"], "grpo", 256).tolist() == [0.5, 0.3]


def test_course_goes_from_the_base_to_the_end_and_leaves_heated_rows_out():
    path = tables.course(TABLE)
    assert list(zip(path.seed, path.step, strict=True)) == [(0, 0), (0, 2), (0, 4), (1, 0), (1, 2), (1, 4)]


def test_stopping_early_is_read_seed_by_seed_and_compared_with_the_end():
    assert tables.early_stop(TABLE, "rloo", 256) == pytest.approx([0.7 - 0.6, 0.5 - 0.4])


def test_an_arm_without_rows_is_named():
    with pytest.raises(ValueError, match="arm='dapo' has no rows at mark='end'; arms are"):
        tables.rows(TABLE, "dapo")


def test_live_rows_are_an_algorithms_early_and_a_fine_tunings_last():
    table = pd.DataFrame([row("grpo", 0, 1, 0.2, 0.7, "early"), row("teacher", 0, 60, 0.3, 0.8)])
    found = tables.as_live(pd.concat([TABLE, table]), ["teacher", "grpo"], 0)
    assert found.train_1.to_dict() == {"teacher": 0.3, "grpo": 0.2}


def test_tiny_study_keeps_what_is_compared():
    full = study.StudyConfig(shipped="countdown_base")
    tiny = tables.tiny(full)
    assert (tiny.betas, tiny.lr, tiny.base.task) == (full.betas, full.lr, full.base.task)
    assert tiny.shipped is None
    assert tiny.budget < full.budget


def weights(**changes):
    knobs = {"right": 1, "n": 8, "long_right": 9, "long_wrong": 9, "elsewhere": 1}
    found = answer_weights(**(knobs | {"greedy_right": False, "critic": 0.25} | changes))
    return found.set_index(["algorithm", "answer"])


def test_one_answer_has_the_advantage_of_its_formula_and_a_token_its_share():
    found = weights()
    right = found.xs("right", level="answer").advantage
    assert right["GRPO"] == pytest.approx(7 / 8 * 8**0.5, rel=1e-4)
    assert right["RLOO"] == pytest.approx(1)
    assert right["ReMax"] == 1
    assert right["PPO"] == 0.75
    assert set(right.index) == set(LABELS.values())
    assert np.allclose(found.weight["GRPO"], found.advantage["GRPO"] / (64 * 9))


def test_long_answers_weigh_less_per_token_only_where_each_answer_counts_alike():
    short, long = weights(), weights(long_wrong=18)
    assert long.weight["GRPO", "wrong"] == pytest.approx(short.weight["GRPO", "wrong"] / 2)
    assert long.weight["RLOO", "wrong"] == pytest.approx(long.weight["RLOO", "right"] * -1 / 7)


def test_a_group_without_a_right_answer_has_no_such_row_and_teaches_grpo_nothing():
    found = weights(right=0)
    assert set(found.index.get_level_values("answer")) == {"wrong"}
    assert found.advantage["GRPO", "wrong"] == 0
    assert found.advantage["REINFORCE++", "wrong"] < 0


def test_gradient_on_policy_is_minus_the_advantage_shared_over_tokens():
    logp, mask = -torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    found = policy_gradient(LossConfig(), logp, logp, torch.tensor([1.0, -2.0]), mask)
    assert torch.allclose(found, torch.tensor([[-1.0], [2.0]]).expand(2, 3) / 6)


def test_half_width_of_two_samples_is_that_of_students_t_with_one_degree_of_freedom():
    assert tables.half_width(np.array([0.0, 2.0])) == pytest.approx(12.706, abs=1e-3)
