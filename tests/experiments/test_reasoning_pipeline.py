"""The reasoning study: what each stage learns from, what it is rewarded for, and what its rows say."""

from dataclasses import replace

import pytest
import torch

from dslib import data
from dslib.experiments import reasoning_pipeline as study
from dslib.experiments.reasoning_tasks import Rewarded, Thinking, UnaskedEffort
from dslib.models import DecoderConfig
from dslib.rl import EffortTask, RLConfig, SFTConfig
from dslib.tasks import PointerChasing, Task

FEW = SFTConfig(steps=2, batch_size=4)
SMALLEST = DecoderConfig(d_model=8, layers=1, heads=2)
TINY = study.StudyConfig(
    task=PointerChasing(problems=64, symbols=6, least_hops=1, most_hops=6),
    model=SMALLEST,
    small=replace(SMALLEST, d_model=4),
    text=FEW,
    tuning=FEW,
    numbers=FEW,
    rl=RLConfig(prompts=2, group_size=4),
    rl_steps=2,
    effort_steps=2,
    asked=(10, 40, 100),
    held_out=8,
    evaluated=2,
    votes=3,
    cold=4,
    sampled=8,
)
TASK = TINY.train_task
INNER = TASK.task


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DSLIB_CACHE", str(tmp_path_factory.getbasetemp() / "reasoning"))


def demonstrated(count=64):
    indices = torch.arange(count)
    return indices, *TASK.demonstrations(indices, torch.Generator().manual_seed(0))


def test_every_stage_starts_and_is_taught_by_an_earlier_one_of_its_size():
    seen = set()
    for name, stage in study.STAGES.items():
        assert {stage.start, stage.teacher} - {None} <= seen
        if stage.start is not None:
            assert study.STAGES[stage.start].small == stage.small
        seen.add(name)


def test_rejection_sampling_goes_back_to_the_base_model():
    assert study.STAGES["SFT"].start == "base"
    assert study.STAGES["SFT"].teacher == "RL"
    assert study.STAGES["SFT on the checkpoint"].start == study.STAGES["SFT"].teacher


def test_rewards_add_up_and_each_is_the_share_it_says():
    indices, *said = demonstrated()
    readings = TASK.read(indices, *said)
    parts = {name: Rewarded(TASK, (name,)).rewards(indices, *said) for name in study.ALL}
    assert parts["accuracy"].eq(1).all()  # demonstrations are right
    assert parts["format"].tolist() == [float(r.tagged) for r in readings]
    shares = {
        empty: [r.tagged * (r.consistency if r.native else empty) for r in readings] for empty in (0, 1)
    }
    torch.testing.assert_close(parts["language"], torch.tensor(shares[0]))
    lenient = Rewarded(TASK, ("language or nothing",)).rewards(indices, *said)
    torch.testing.assert_close(lenient, torch.tensor(shares[1]))
    assert any(r.tagged and not r.native for r in readings)  # an empty thought, which the two tell apart
    torch.testing.assert_close(Rewarded(TASK).rewards(indices, *said), sum(parts.values()))
    both = Rewarded(TASK, ("tagged accuracy",)).rewards(indices, *said)
    torch.testing.assert_close(both, parts["accuracy"] * parts["format"])
    assert isinstance(Rewarded(TASK), Task)
    with pytest.raises(ValueError, match="beauty"):
        Rewarded(TASK, ("beauty",))


def test_a_thought_outside_its_tags_is_paid_for_too():
    path = INNER.problem(next(i for i in range(64) if INNER.problem(i).hops == 4)).path
    tagged = [INNER.think, *path[:-1], INNER.think_end, path[-1], INNER.end]
    hidden = [path[0], INNER.vocab_size + path[1], path[2], path[3], INNER.end, 0, 0]
    completions = torch.tensor([tagged, hidden])
    mask = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
    assert Thinking(TASK)(completions, mask).tolist() == [3, 3]


def test_unasked_effort_shows_every_level_as_often_and_independently_of_the_rewarded_one():
    task = TINY.effort_task(shuffled=True)
    assert isinstance(task, UnaskedEffort)
    count = len(task.asked)
    indices = torch.arange(len(task))
    shown = 10 * (task.prompts(indices)[:, :10] - task.task.vocab_size).sum(1)  # the bar's full ticks
    rewarded = task.split(indices)[1]
    pairs = {(a, b) for a, b in zip(shown.tolist(), rewarded.tolist(), strict=True)}
    assert len(pairs) == count**2
    told = TINY.effort_task()
    assert torch.equal(task.prompts(indices)[:, 10:], told.prompts(indices)[:, 10:])
    assert type(told) is EffortTask


def test_a_forced_empty_thought_is_part_of_the_completion():
    model = TINY.build(False, 0)
    indices, completions, mask = study.completions_of(model, TASK, torch.arange(5), 2, 0, thought=False)
    assert indices.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert completions.shape == mask.shape == (10, 4)
    assert completions[:, :2].tolist() == [[INNER.think, INNER.think_end]] * 10


def test_description_of_what_was_written():
    indices, *said = demonstrated()
    found = study.described(TASK.read(indices, *said))
    assert found["accuracy"] == found["valid"] == 1
    assert 0.4 < found["native"] < 0.6
    assert found["thought"] > 0
    assert study.described([]) == dict.fromkeys(found, 0.0)


def test_cold_start_is_readable_and_verified_samples_are_right_and_in_one_script():
    examples, _ = study.task_source(TINY, study.STAGES["cold start"], 0)
    assert len(examples) == TINY.cold
    thoughts = examples.completions[examples.mask]
    assert (thoughts < INNER.vocab_size).all()


def test_all_tables_of_a_seed_are_flat_complete_and_the_same_again():
    found = study.seed_tables(TINY, 0)
    assert tuple(found) == study.TABLES
    assert {row["stage"] for row in found["reasoning"]} == set(study.STAGES) - set(study.EFFORTS)
    assert len(found["reasoning_effort"]) == len(study.EFFORTS) * len(TINY.asked)
    reinforced = [s for s in study.STAGES.values() if s.kind in ("rl", "effort")]
    assert len(found["reasoning_curves"]) == 2 * len(reinforced)
    for rows in found.values():
        assert len({tuple(row) for row in rows}) == 1
    assert study.trained.__wrapped__(TINY, "zero", 0).table == study.trained(TINY, "zero", 0).table


def test_a_teacher_without_a_right_answer_leaves_the_weights_alone(monkeypatch):
    examples, _ = study.task_source(TINY, study.STAGES["cold start"], 0)
    monkeypatch.setattr(study, "verified", lambda *_: examples.rows(slice(0)))
    taught = study.trained.__wrapped__(TINY, "self-taught", 0)
    before = study.trained(TINY, "small base", 0).weights
    assert taught.flops == 0
    assert all(torch.equal(x, before[name]) for name, x in taught.weights.items())


def test_what_is_saved_is_what_ships(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(data, "__file__", str(tmp_path / "__init__.py"))
    study.save_models(TINY, 0, "dslib run 12")
    models = study.shipped(TINY)
    assert set(models) == set(study.SHIPPED)
    base = study.trained(TINY, "base", 0).weights  # was rounded before anything started from it
    assert all(torch.equal(x, base[name]) for name, x in models["base"].state_dict().items())
