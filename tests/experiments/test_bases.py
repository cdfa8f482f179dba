"""The shared base of the RLVR studies."""

import pytest
import torch

from dslib.experiments.bases import BaseConfig, base_model
from dslib.models import DecoderConfig
from dslib.rl.sft import SFTConfig
from dslib.runs import checkpoints
from dslib.tasks.countdown import Countdown

TASK = Countdown(problems=50, numbers=3, largest=5, digits=2)
TINY = BaseConfig(
    TASK, DecoderConfig(TASK.vocab_size, d_model=8, layers=1, heads=2), SFTConfig(steps=3, batch_size=4)
)


def test_base_depends_on_its_seed_alone_and_is_what_a_shipped_file_would_hold(monkeypatch):
    monkeypatch.setenv("DSLIB_CACHE", "off")
    first, again, other = (base_model(TINY, seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    before = first.lm_head.weight.clone()
    assert torch.equal(checkpoints.rounded(first).lm_head.weight, before)


def test_no_problem_is_both_trained_on_and_held_out():
    config = BaseConfig()
    seen = [{str(task.problem(i)) for i in range(0, len(task), 100)} for task in (config.task,)]
    sets = [set(map(str, map(config.problems(held).problem, range(100)))) for held in (False, True)]
    assert not sets[0] & sets[1]
    assert not seen[0] & (sets[0] | sets[1])


def test_model_that_lacks_tokens_of_the_task_is_refused_and_one_with_more_is_not():
    with pytest.raises(ValueError, match="vocabulary of 9 lacks tokens of the task's"):
        BaseConfig(TASK, DecoderConfig(9, d_model=8, layers=1, heads=2))
    assert BaseConfig(TASK, DecoderConfig(TASK.vocab_size + 2, d_model=8, layers=1, heads=2))
