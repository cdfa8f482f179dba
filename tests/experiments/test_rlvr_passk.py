"""What RL does to the problems that a model can solve: the measurements, on models that learn nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dslib import evaluation as ev
from dslib.experiments import rlvr_passk as study
from dslib.experiments import rlvr_tables as tables
from dslib.experiments.bases import BaseConfig
from dslib.models import DecoderConfig
from dslib.rl.config import RLConfig
from dslib.rl.rollout import Rollout
from dslib.rl.sft import SFTConfig
from dslib.runs.workers import in_workers
from dslib.tasks.countdown import Countdown
from dslib.tasks.pointer_chasing import PointerChasing
from dslib.tasks.reversed_addition import ReversedAddition


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setenv("DSLIB_CACHE", "off")
    monkeypatch.setattr("dslib.experiments.bases.TRAINING", (60, 20))
    monkeypatch.setattr("dslib.experiments.bases.HELD_OUT", (80, 20))


def small(task, **trainer):
    model = DecoderConfig(task.vocab_size, d_model=8, layers=1, heads=2)
    base = BaseConfig(task, model, SFTConfig(steps=2, batch_size=8))
    return study.StudyConfig(
        base, RLConfig(prompts=4, group_size=4, **trainer), (1, 2), problems=4, samples=64
    )


COUNTDOWN = Countdown(problems=60, numbers=3, largest=9, digits=2)
ADDITION = ReversedAddition(problems=60, digits=2, noise=0.5)
POINTERS = PointerChasing(problems=60, symbols=5, most_hops=4)


def uniform(task):
    model = DecoderConfig(task.vocab_size, d_model=8, layers=1, heads=2).build(0)
    torch.nn.init.zeros_(model.lm_head.weight)
    return model


def test_uniform_model_has_the_entropy_and_perplexity_of_its_vocabulary_and_the_rates_that_follow():
    model = uniform(COUNTDOWN)
    tokens, size = COUNTDOWN.max_new_tokens, COUNTDOWN.vocab_size
    rollout = study.sampled(model, COUNTDOWN, 3, limit=5)
    full = rollout.rows(rollout.lengths == tokens)
    assert torch.allclose(full.entropy.sum(1), torch.tensor(tokens * math.log(size)))
    assert study.median_perplexity(model, COUNTDOWN, rollout) == pytest.approx(size)
    assert study.guessed_perplexity(model, COUNTDOWN) == pytest.approx(size)
    rates = study.rates(model, replace(COUNTDOWN, problems=5))
    right = [len(COUNTDOWN.correct_answers(i)) for i in range(5)]
    assert rates == pytest.approx(np.array(right) * size**-tokens, rel=1e-5)
    assert study.wrong_target_rates(model, replace(COUNTDOWN, problems=5)) == pytest.approx(rates, rel=1e-5)
    assert study.answer_probabilities(model, COUNTDOWN, 0).sum() == pytest.approx(rates[0], rel=1e-5)


@pytest.mark.parametrize(("task", "asked"), [(COUNTDOWN, 2), (ADDITION, 3)])
def test_model_with_the_wrong_target_reads_the_end_of_the_prompt_before(task, asked):
    task, model = replace(task, problems=2), DecoderConfig(task.vocab_size, 8, 1, 2).build(0)
    prompts = task.prompts([0, 1])
    mixed = torch.cat((prompts[:, :-asked], prompts[[1, 0], -asked:]), dim=1)
    for index in (0, 1):
        answers = task.correct_answers(index)
        owner = torch.zeros(len(answers), dtype=torch.long)
        p = ev.answer_logp(model, mixed[index : index + 1], answers, owner).exp().sum().item()
        assert study.wrong_target_rates(model, task)[index] == pytest.approx(p, rel=1e-4)


def test_a_sharpened_model_has_the_entropy_of_its_base_at_the_factor_and_a_flat_one_at_no_higher_than_1():
    base, sharper = (DecoderConfig(COUNTDOWN.vocab_size, 8, 1, 2).build(0) for _ in range(2))
    with torch.no_grad():
        base.lm_head.weight.mul_(50)
        sharper.lm_head.weight.mul_(100)
    assert study.base_entropy_temperature(sharper, base, COUNTDOWN) == pytest.approx(2.0, rel=0.02)
    assert study.base_entropy_temperature(base, sharper, COUNTDOWN) == pytest.approx(1.0, rel=0.01)


def test_run_is_measured_at_its_marks_and_goes_on_from_the_base_as_a_run_of_ones_own_does():
    kind = small(COUNTDOWN)
    run = study.exact_run(kind, 0)
    trained = [row for row in run.rows if row["policy"] in ("base", "rl")]
    assert [(r["step"], r["set"]) for r in trained] == [(s, n) for s in (0, 1, 2) for n in study.SETS]
    base = kind.base.model.build()
    base.load_state_dict(run.weights["base"])
    assert np.array_equal(study.rates(base, kind.measured()), run.rates["training", "base"])
    own = study.trainer(kind, base, 0)
    own.run(2)
    assert all(torch.equal(x, run.weights["rl"][name]) for name, x in own.model.state_dict().items())
    assert np.array_equal(study.rates(own.model, kind.measured(True)), run.rates["held-out", "rl"])
    last = run.rows[-1]
    assert last["policy"] == "guesser"
    assert last["pass_1"] == pytest.approx(run.rates["held-out", "guesser"].mean())
    assert last["entropy"] == pytest.approx(math.log(COUNTDOWN.answer_space))


def pads(*completions):
    """A rollout of problem 0 and 1, two completions each."""
    width = POINTERS.max_new_tokens
    tokens = torch.full((4, width), POINTERS.end)
    mask = torch.zeros(4, width, dtype=torch.bool)
    for row, text in enumerate(completions):
        tokens[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), True
    prompts = POINTERS.prompts([0, 0, 1, 1])
    zero = torch.zeros(4, width)
    return Rollout(torch.cat((prompts, tokens), 1), prompts.shape[1], mask, zero, zero)


def test_answer_is_soundly_found_only_after_a_thought_that_is_there_and_follows_the_path():
    first, second = POINTERS.problem(0), POINTERS.problem(1)
    elsewhere = next(node for node in range(POINTERS.symbols) if node not in second.path)

    def written(thought, answer):
        return [POINTERS.think, *thought, POINTERS.think_end, answer, POINTERS.end]

    rollout = pads(
        written(first.path[:-1], first.answer),
        written((), first.answer),
        written((elsewhere, second.path[0]), second.answer),
        written(second.path[:-1], (second.answer + 1) % 5),
    )
    read = study.read_scratchpads(POINTERS, rollout, 2)
    assert read["correct"].tolist() == [[1, 1], [1, 0]]
    assert read["sound"].tolist() == [[1, 0], [0, 0]]
    assert read["unsound"].tolist() == [[0, 0], [1, 0]]
    assert read["length"].tolist() == [[len(first.path) - 1, 0], [2, len(second.path) - 1]]
    assert (read["chance"] <= read["correct"]).all()


def test_direct_rate_is_that_of_the_answer_right_after_two_tags():
    model = DecoderConfig(POINTERS.vocab_size, 8, 1, 2).build(0)
    found = study.direct_rates(model, replace(POINTERS, problems=3))
    for index in range(3):
        text = torch.cat((POINTERS.prompts([index])[0], torch.tensor([POINTERS.think, POINTERS.think_end])))
        p = model(text[None])[0, -1].softmax(-1)[POINTERS.problem(index).answer].item()
        assert found[index] == pytest.approx(p, rel=1e-4)


def test_scratchpad_run_has_a_row_a_mark_and_set_and_a_uniform_model_no_well_formed_answer():
    run = study.scratchpad_run(small(POINTERS, algorithm="grpo_no_std"), 3)
    assert [(r["seed"], r["step"], r["set"]) for r in run.rows] == [
        (3, s, n) for s in (0, 1, 2) for n in study.SETS
    ]
    row = study.scratchpad_row(uniform(POINTERS), replace(POINTERS, problems=4), 64)
    assert row["direct"] == pytest.approx(1 / POINTERS.vocab_size)
    chosen = study.choices(uniform(POINTERS), replace(POINTERS, problems=4))
    assert [len(values) for values in chosen.values()] == [len(study.SAMPLED_KS)] * 3


def test_workers_keep_the_order_of_seeds():
    kind = small(ADDITION)
    assert [run.rows[0]["seed"] for run in in_workers(study.exact_run, [(kind, 1), (kind, 0)])] == [1, 0]


@pytest.mark.parametrize(
    ("first", "second", "k"),
    [
        ([1.0, 0.0], [0.4, 0.4], 2),  # 0.5 against 1 − 0.6^k: 0.4, 0.64
        ([0.5], [0.4], 0),  # never
        ([0.4], [0.5], 0),  # ahead from the start
        ([0.5, 0.0], [0.5, 1e-5], 0),  # equal at first, then ahead: no crossing, but see the next
        ([0.5, 0.0], [0.4, 0.2], 0),
    ],
)
def test_crossing_is_the_first_k_at_which_the_later_starter_leads(first, second, k):
    assert study.crossing(np.array(first), np.array(second)) == k


@pytest.mark.parametrize("fault", [{"marks": ()}, {"marks": (2, 1)}, {"problems": 21}, {"samples": 63}])
def test_study_that_cannot_be_measured_is_refused(fault):
    with pytest.raises(ValueError, match=f"{next(iter(fault))}="):
        replace(small(COUNTDOWN), **fault)


def test_shipped_columns_keep_their_names():
    runs = {"Countdown": [study.exact_run(small(COUNTDOWN), 0)]}
    names = {c.removesuffix("_0") for c in tables.problem_table(runs, (0,)) if c.endswith("_0")}
    assert names == {"base", "rl", "sharp", "misled"}


def test_tables_give_back_the_rates_of_each_policy_and_seed():
    runs = {"Countdown": [study.exact_run(small(COUNTDOWN), seed) for seed in (0, 1)]}
    table = tables.problem_table(runs, (0, 1))
    assert len(table) == 2 * 4
    for seed, run in enumerate(runs["Countdown"]):
        for policy in tables.POLICIES:
            found = tables.rates_of(table, "Countdown", "held-out", policy)[seed]
            assert np.array_equal(found, run.rates["held-out", policy].astype(float))
        assert np.array_equal(
            tables.rates_of(table, "Countdown", "training", "guesser")[seed],
            run.rates["training", "guesser"].astype(float),
        )
    rows = tables.run_table(runs)
    values = tables.course(rows, "pass_16", task="Countdown", set="training")
    assert values.shape == (2, 3)
    assert values.loc[1, 2] == ev.exact_pass_at_k(runs["Countdown"][1].rates["training", "rl"], 16)


def test_of_a_policy_that_is_the_base_the_share_covered_is_that_of_independent_luck_problem_by_problem():
    base = np.array([0.0, 0.01, 1.0])
    found = tables.covered_shares(base, base, 64)
    solved = 1 - (1 - base) ** 64
    assert found.share["measured"] == pytest.approx((solved**2).sum() / solved.sum())
    assert found.share["base, again"] == pytest.approx(found.share["measured"])
    assert found.share["independent"] == pytest.approx(solved.mean())


def test_tiny_studies_keep_task_and_algorithm():
    kind = small(POINTERS, algorithm="grpo_no_std")
    short = tables.tiny(replace(kind, problems=20))
    assert (short.base.task, short.trainer.algorithm) == (POINTERS, "grpo_no_std")
    assert short.problems == 5


def test_choices_of_kept_problems_are_those_of_their_rows():
    model = uniform(POINTERS)
    few = replace(POINTERS, problems=6)
    alone = [study.choices(model, few, 64, kept=np.arange(6) == place)["pass@k"][0] for place in range(6)]
    both = np.arange(6) < 2
    assert study.choices(model, few, 64, kept=both)["pass@k"][0] == pytest.approx(np.mean(alone[:2]))
    with pytest.raises(ValueError, match="kept leaves no problem; keep one at least"):
        study.choices(model, few, 64, kept=np.zeros(6, dtype=bool))


def test_ends_are_the_last_steps_of_a_policy_in_the_order_of_seeds():
    rows = [("rl", 1, 9, 0.3), ("rl", 0, 9, 0.2), ("rl", 0, 4, 0.1), ("base", 0, 0, 0.7)]
    table = tables.pd.DataFrame(rows, columns=["policy", "seed", "step", "pass_256"])
    table = table.assign(task="Countdown", set="training")
    assert tables.ends(table, "Countdown", "rl").to_dict() == {0: 0.2, 1: 0.3}
