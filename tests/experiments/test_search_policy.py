"""The policy of the search world: its two trainings, its measurement in paired worlds, its command."""

import itertools
from dataclasses import asdict, replace

import pytest
import torch
from typer.testing import CliRunner

from dslib import data
from dslib.experiments.search_policy import (
    MODEL,
    TRAINER,
    TUNING,
    WORLDS,
    PolicyConfig,
    evaluate,
    rl_policy,
    sft_policy,
    shipped_policy,
    success,
)
from dslib.experiments.train_search_policy import main
from dslib.models import DecoderConfig
from dslib.runs import checkpoints
from dslib.tasks.search_tokens import SearchVocabulary
from dslib.tasks.search_world import SearchWorlds

SMALL = SearchWorlds(worlds=10**7, pages=1, results=2, values=2, max_calls=6)
TINY = PolicyConfig(
    worlds=SMALL,
    model=DecoderConfig(len(SearchVocabulary(SMALL)), d_model=32, layers=2, heads=2),
    sft=tuple(replace(settings, steps=15, batch_size=8) for settings in TUNING),
    rl=replace(TRAINER, prompts=4, group_size=4, micro_batch=8),
    rl_steps=2,
)


@pytest.fixture(scope="module")
def tuned():
    return sft_policy(TINY, seed=0)


def test_fine_tuning_learns_the_expert(tuned):
    _, losses = tuned
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_same_seed_gives_the_same_policy(tuned):
    model, _ = sft_policy(TINY, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), tuned[0].parameters(), strict=True))


def test_later_rounds_go_on_from_the_saved_weights_of_the_earlier(tuned):
    first, losses = sft_policy(TINY, seed=0, rounds=slice(1))
    both, more = sft_policy(TINY, seed=0, model=first, rounds=slice(1, None))
    assert losses + more == tuned[1]
    assert all(torch.equal(a, b) for a, b in zip(both.parameters(), tuned[0].parameters(), strict=True))


def test_worlds_of_training_and_measurement_do_not_overlap():
    parts = (TINY.demonstrations.worlds, TINY.training.worlds, TINY.held_out().worlds)
    spans = sorted((w.skip, w.skip + w.worlds) for w in parts)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert replace(TINY, window=64).training.window == 64
    assert replace(TINY, window=64).demonstrations.window == 64


def test_rows_are_paired_by_world_and_repeat(tuned):
    model = tuned[0]
    for sample in range(2):
        rows = evaluate(model, TINY.held_out(), range(6), sample)
        assert [r["world"] for r in rows] == list(range(6))
        assert rows == evaluate(model, TINY.held_out(), range(6), sample, slots=3)
        assert rows[1:2] == evaluate(model, TINY.held_out(), [1], sample)
        assert 0 <= success(rows) <= 1
    assert evaluate(model, TINY.held_out(), []) == []
    with pytest.raises(ValueError, match="rows is empty"):
        success([])
    managed = evaluate(model, TINY.held_out(window=30, strategy="discard_all"), range(6))
    assert [r["world"] for r in managed] == list(range(6))


def test_reinforcement_continues_where_it_was_interrupted(tuned, tmp_path):
    def policy():
        model = TINY.model.build()
        model.load_state_dict(tuned[0].state_dict())
        return model

    whole, half, file = policy(), policy(), tmp_path / "run.safetensors"
    table = rl_policy(TINY, whole, checkpoint=tmp_path / "whole.safetensors")
    rl_policy(replace(TINY, rl_steps=1), half, checkpoint=file)
    assert rl_policy(TINY, TINY.model.build(5), checkpoint=file)[0] == table[0]
    assert len(table) == 2


def test_vocabulary_of_the_model_must_be_the_worlds():
    with pytest.raises(ValueError, match="vocabulary of 9 is not the worlds'"):
        replace(TINY, model=DecoderConfig(9, d_model=8, layers=1, heads=2))


def test_policy_that_ships_is_below_four_megabytes():
    assert 2 * sum(p.numel() for p in MODEL.build().parameters()) < 3.9e6
    assert MODEL.vocab_size == len(SearchVocabulary(WORLDS))


def test_command_trains_measures_and_ships_both_policies(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(data, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(data, "path", lambda name: tmp_path / name)
    import typer

    app = typer.Typer()
    app.command()(main)
    options = "--sft-steps 1 --rl-steps 1 --d-model 16 --layers 1 --pages 1 --max-calls 3 --held-out 4 --save"
    result = CliRunner().invoke(app, options.split())
    assert result.exit_code == 0, result.output
    assert "after 1 steps of GRPO: success" in result.output
    for name in ("search_policy_sft", "search_policy"):
        model, worlds, known = shipped_policy(name)
        assert model.config.d_model == 16
        assert worlds == replace(WORLDS, pages=1, max_calls=3)
        assert known["about"]["training_window"] is None
        assert known["command"].startswith("python -m dslib.experiments.train_search_policy")
    assert asdict(worlds) == known["about"]["worlds"]
    assert checkpoints.read(name, model)["about"]["seed"] == 0
    more = f"{options} --tuned 2 --start search_policy_sft --window 64 --name hurried"
    result = CliRunner().invoke(app, more.split())
    assert result.exit_code == 0, result.output
    assert "nats a token" not in result.output  # it is not fine-tuned again
    assert shipped_policy("hurried")[2]["about"]["training_window"] == 64
    assert not (tmp_path / "checkpoints" / "hurried_sft.safetensors").exists()
