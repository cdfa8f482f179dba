"""The reasoning study's tables as arrays over seeds."""

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch

from dslib.experiments import reasoning_pipeline as study
from dslib.experiments import reasoning_tables as tables
from dslib.experiments.reasoning_tables import ReasoningTables

LEVELS, ASKED = (10, 40), (10, 20, 30, 40)


def made(thoughts=((0.0, 1.0, 2.0, 3.0), (1.0, 1.0, 1.0, 1.0)), accuracy=(0.5, 0.5, 0.5, 0.9)):
    results = [
        {"stage": stage, "seed": seed, "accuracy": base + seed / 10}
        for stage, base in (("zero", 0.5), ("base", 0.2))
        for seed in (1, 0)  # not in order, as a table that was added to
    ]
    curves = [
        {"stage": "zero", "seed": seed, "step": step, "accuracy": 0.1 * step, "tagged": 1.0, "thought": nodes}
        for seed in (1, 0)
        for step, nodes in enumerate((1.0 + seed, 2.0, 3.0))
    ]
    efforts = [
        {"stage": "effort", "seed": s, "effort": b, "trained": int(b in LEVELS), "thought": n, "accuracy": a}
        for s, row in enumerate(thoughts)
        for b, n, a in zip(ASKED, row, accuracy, strict=True)
    ]
    return ReasoningTables(pd.DataFrame(results), pd.DataFrame(curves), pd.DataFrame(efforts))


def test_one_number_a_seed_in_the_order_of_seeds():
    assert made().of("zero").tolist() == [0.5, 0.6]
    assert made().gap("zero", "base") == pytest.approx([0.3, 0.3])
    assert made().mean("zero") == pytest.approx(0.55)


def test_a_stage_that_was_not_measured_is_named():
    with pytest.raises(KeyError, match="'one'; there are base, zero"):
        made().of("one")
    with pytest.raises(KeyError, match="'one'"):
        made().over_steps("one", "accuracy")


def test_growth_is_of_the_last_tenth_over_the_first():
    assert made().growth("zero").tolist() == [2.0, 0.5]


def test_efforts_are_columns_and_levels_those_trained_with():
    assert made().levels.tolist() == [10, 40]
    assert made().at_effort("effort", "thought")[0].tolist() == [0, 1, 2, 3]
    assert made().between("effort", "accuracy", 10, 40) == pytest.approx([0.4, 0.4])


def test_lengthening_is_a_logarithm_that_no_thoughts_at_all_leave_at_0():
    thoughts = ((0.5, 0.6, 0.7, 1.0), (0.0, 0.0, 0.0, 0.0), (0.0, 1.0, 1.0, 1.0))
    found = made(thoughts).log_lengthening("effort")
    assert found == pytest.approx([math.log(2), 0, math.log(100)])


def test_thoughts_that_lie_on_the_line_miss_nothing_and_no_dial_misses_all():
    assert made().off_the_line("effort") == pytest.approx([0, 1])
    # at 20 and 30 the line says 1 and 2; held against each other's, both miss by one of three nodes
    assert made().off_the_line("effort", shift=1)[0] == pytest.approx(1 / 3)


def test_returns_compare_the_first_step_between_levels_with_the_last():
    assert made().returns("effort") == pytest.approx([0, 0])  # two levels: they are the same step


def test_last_steps_take_rows_of_one_step_and_of_five():
    single = pd.DataFrame({"step": range(40), "accuracy": range(40), "tagged": 1.0})
    fives = single.assign(step=single.step // 5 * 5).groupby("step", as_index=False).mean()
    for curve in (single, fives):
        assert tables.last_steps(curve, 40).tolist() == [34.5, 1.0]
    with pytest.raises(ValueError, match="steps=60"):
        tables.last_steps(single, 60)


def test_one_run_of_the_curves_by_step():
    assert made().curve("zero", 1).thought.tolist() == [2.0, 2.0, 3.0]


def test_joined_seeds_are_means_of_five_steps():
    part = {
        "reasoning": [{"stage": "zero", "seed": 0}],
        "reasoning_curves": [{"stage": "zero", "seed": 0, "step": i, "thought": float(i)} for i in range(10)],
        "reasoning_effort": [{"stage": "effort", "seed": 0}],
    }
    found = tables.joined([part])
    assert tuple(found) == study.TABLES
    assert found["reasoning_curves"].step.tolist() == [0, 5]
    assert found["reasoning_curves"].thought.tolist() == [2, 7]
    with pytest.raises(ValueError, match="parts is empty"):
        tables.joined([])


def test_hops_votes_and_single_answers_of_a_model():
    config = replace(tables.TINY, task=replace(tables.TINY.task, problems=64), held_out=8)
    model = config.build(False, 0)
    found = tables.by_hops(model, config, 0)
    assert set(found.index) <= set(range(1, 7))
    assert found.right.between(0, 1).all()
    answers, truth = tables.answers_of(model, config, 3, 4, 0, thought=False)
    assert [len(row) for row in answers] == [4, 4, 4]
    assert truth == [config.test_task.problem(i).answer for i in range(3)]
    for effort in (None, 40):
        written, readings = tables.sampled(model, config, 2, effort, 1.0, 0)
        assert len(written) == len(readings) == 4
        assert all(row.ndim == 1 and row.dtype == torch.long for row in written)
    with pytest.raises(ValueError, match="45"):
        tables.sampled(model, config, 2, 45, 1.0, 0)


def test_votes_are_counted_at_powers_of_two():
    found = tables.by_votes([[1, 1, 1, 1], [2, 2, 2, 2]], [1, 0])
    assert found.index.tolist() == [1, 2, 4]
    assert found.tolist() == [0.5, 0.5, 0.5]
