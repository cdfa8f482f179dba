"""The comparison with TRL: what it measures is the same on both sides."""

import sys

import pytest
import torch

from dslib.models import DecoderConfig
from dslib.rl import RLConfig, Trainer
from dslib.suite.benchmarks import grpo_step
from dslib.tasks.verifiable import Task

SETTING = grpo_step.Setting(DecoderConfig(vocab_size=12, d_model=8, layers=1, heads=2), 3, 4, 5, 6)


def test_every_completion_is_of_full_length_and_every_group_teaches():
    assert isinstance(SETTING.task, Task)
    trainer = Trainer(SETTING.model.build(0), SETTING.task, RLConfig("grpo", prompts=3, group_size=4))
    row = trainer.step()
    assert row["length"] == SETTING.new_tokens
    rewards = trainer.last.rewards
    assert ((rewards - rewards.mean(1, keepdim=True)).abs().amax(1) > 0).all()
    torch.testing.assert_close(rewards * SETTING.new_tokens, (rewards * SETTING.new_tokens).round())


def test_without_trl_the_benchmark_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(SystemExit, match=r"pip install 'dslib-notebooks\[bench\]'"):
        grpo_step.main()


def test_both_models_are_the_same_function():
    pytest.importorskip("trl", reason="trl is in the extra bench")
    decoder = SETTING.model.build(0)
    grpo_step.check(decoder, grpo_step.as_llama(decoder, 30))
    ours, theirs = grpo_step.measure(SETTING, decoder, grpo_step.as_llama(decoder, 30), steps=1, warmup=0)
    assert len(ours) == len(theirs) == 1
