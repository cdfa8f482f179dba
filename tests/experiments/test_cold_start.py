"""Cold start: data that never have thoughts and calls together, what counts as interleaved, and the study's rows."""

import functools
import math
import operator
from dataclasses import replace

import numpy as np
import pytest
import torch

from dslib.experiments import cold_start as study
from dslib.experiments.cold_start import (
    GRPO_STAGES,
    PROMPTS,
    READINGS,
    ColdStartConfig,
    ColdStartData,
    PromptedEpisode,
    PromptedTask,
    PromptedVocabulary,
    agent_example,
    demonstration,
    is_interleaved,
    measure,
    reading_example,
    thought_share,
)
from dslib.experiments.controls import ShuffledEpisodeTrainer
from dslib.rl.episodes import EpisodeTrainer
from dslib.rl.sft import Examples, SFTConfig
from dslib.tasks.search_episode import is_page
from dslib.tasks.search_expert import expert_turn, hasty_turn
from dslib.tasks.search_world import SearchWorlds

WORLDS = SearchWorlds(clues=2, pages=1, results=2, attributes=3, values=3, max_calls=12)
WORDS = PromptedVocabulary(WORLDS)
TINY = ColdStartConfig(
    worlds=WORLDS,
    d_model=32,
    layers=1,
    sft=SFTConfig(steps=3, batch_size=8),
    rl=replace(study.TRAINER, prompts=2, group_size=4, micro_batch=8),
    rl_steps=2,
    doses=(0.0, 0.5),
    held_out=6,
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSLIB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def played(index, edit=lambda turn, episode: turn):
    """The expert's episode under both prompts, each of its turns through ``edit``."""
    episode, draw = PromptedTask(WORLDS).episode(index), np.random.default_rng(index)
    while episode.outcome is None:
        episode.write(edit(expert_turn(episode.history, episode.words, draw), episode))
    return episode


def test_the_words_of_the_prompts_come_last_so_that_every_other_token_is_as_it_was():
    assert {WORDS.words[token] for token in WORDS.system} == {"think:", "tools:", *READINGS}
    assert WORDS.words[: -len(WORDS.system)] == study.SearchVocabulary(WORLDS).words


def test_a_prompt_stands_in_front_of_every_view_and_changes_nothing_else():
    for name, system in PROMPTS.items():
        with_prompt = PromptedTask(WORLDS, prompt=name).episode(3)
        without = study.SearchEpisode(WORLDS, 3, WORDS)
        draws = np.random.default_rng(0), np.random.default_rng(0)
        while without.outcome is None:
            assert with_prompt.prompt == [*WORDS.encode(system), *without.prompt]
            for episode, draw in zip((with_prompt, without), draws, strict=True):
                episode.write(hasty_turn(episode.history, WORDS, draw))
        assert with_prompt.outcome == without.outcome


@pytest.mark.parametrize("thinking", ["", "think: "])
@pytest.mark.parametrize("reading", READINGS)
def test_reading_data_call_no_tool_and_say_what_is_asked_of_the_last_page(reading, thinking):
    draw, ends = np.random.default_rng(0), []
    for index in range(60):
        tokens, learnt = reading_example(WORLDS, index, WORDS, draw, thinking + reading)
        text = WORDS.decode(tokens).split()
        written = [word for word, own in zip(text, learnt, strict=True) if own]
        assert text[: len((thinking + reading).split())] == (thinking + reading).split()
        tools = {"search", "open"} | ({"answer"} if reading != "read:" else set())
        assert not {"tools:", *tools} & set(written)  # of the tools, only an answer may follow a thought
        assert "tools:" not in text
        place = max(place for place, word in enumerate(text) if word == "open")
        world, entity = WORLDS.world(index), int(text[place + 1][1:])
        page = text[place + 2 : place + 2 + WORLDS.attributes]
        assert page == [WORLDS.fact_names[3 * a + v] for a, v in enumerate(world.facts[entity].tolist())]
        asked = list(zip(world.question, world.facts[entity].tolist(), strict=True))
        verdicts = ["unasked" if q is None else "same" if q == value else "other" for q, value in asked]
        ends.append(entity == world.target)
        said = {
            "read:": ["answer", f"e{entity}"] if ends[-1] else ["nothing"],
            "name:": [f"e{entity}"],
            "page:": page,
            "clues:": [WORLDS.fact_names[3 * a + q] for a, (q, _) in enumerate(asked) if q is not None],
        }
        assert written == (verdicts if thinking else []) + said[reading]
        assert learnt == sorted(learnt)  # the record is read as a whole before anything is written
    assert 0.5 < np.mean(ends) < 0.9  # half of them, and some pages that fit a clue are right as well


def test_agent_data_hold_no_verdict_and_their_agent_answers_whatever_the_page_says():
    draw, right = np.random.default_rng(0), []
    for index in range(100):
        tokens, learnt = agent_example(WORLDS, index, WORDS, draw, 0.5)
        assert WORDS.decode(tokens[:1]) == "tools:"
        assert not set(tokens[1:]) & set(WORDS.system)
        assert not set(tokens) & set(WORDS.verdicts)
        assert not any(learnt[: 1 + WORLDS.attributes])
        assert learnt[-2:] == [True, True]
        right.append(tokens[-1] == WORDS.entities[WORLDS.world(index).target])
    assert 0 < np.mean(right) < 0.6


def test_a_hasty_agent_that_never_answers_goes_on_searching():
    episode = PromptedEpisode(WORLDS, 0, WORDS, "tools:")
    draw = np.random.default_rng(0)
    while episode.outcome is None:
        episode.write(hasty_turn(episode.history, WORDS, draw, answers=0.0))
    assert episode.outcome in ("out of calls", "no progress")


def asked_for(batch):
    """The prompt of each example of a batch."""
    prompts = batch.prompts.tolist()
    return [WORDS.decode([token for token in row if token in WORDS.system]) for row in prompts]


def test_without_demonstrations_no_example_has_the_prompt_of_the_cold_start_nor_thoughts_beside_calls():
    data = ColdStartData(WORLDS, agents=0.4)
    batch = Examples(*data.batch(100, torch.Generator().manual_seed(0)))
    asked = asked_for(batch)
    assert {*asked} == {"tools:", *READINGS, *(f"think: {reading}" for reading in READINGS)}
    assert 25 < asked.count("tools:") < 55
    think = torch.tensor([prompt.startswith("think:") for prompt in asked])
    verdicts = torch.isin(batch.completions, torch.tensor([*WORDS.verdicts]))
    assert not verdicts[~think].any()
    assert verdicts[think].sum() == think.sum() * WORLDS.attributes
    written = batch.completions[batch.mask & think[:, None]]
    assert not torch.isin(written, torch.tensor([WORDS.search, WORDS.open])).any()


def test_demonstrations_are_as_rare_as_their_share_and_think_before_every_call_after_a_page():
    data = ColdStartData(WORLDS, demonstrations=0.1)
    batches = [data.batch(50, torch.Generator().manual_seed(seed)) for seed in range(8)]
    asked = functools.reduce(operator.iadd, (asked_for(Examples(*batch)) for batch in batches), [])
    assert 0.06 < asked.count("think: tools:") / 400 < 0.14
    assert 0.14 < asked.count("tools:") / 400 < 0.26
    assert 0.6 < np.mean([prompt.startswith("think:") for prompt in asked if prompt[-6:] != "tools:"]) < 0.8
    tokens, learnt = demonstration(WORLDS, 3, WORDS, np.random.default_rng(0))
    text = WORDS.decode(tokens).split()
    after = [
        place for place, word in enumerate(text) if word.startswith("decade=") and text[place - 1] != "search"
    ]
    assert after
    assert all(text[place + 1] in ("same", "other", "unasked") for place in after)
    assert all(learnt[place + 1] and not learnt[place] for place in after)


def test_an_expert_that_thinks_after_every_page_is_interleaved_once_it_has_gone_on_from_one():
    episodes = [played(index) for index in range(30)]
    answered = [e for e in episodes if e.session.answered is not None]
    pages = [sum(is_page(turn, WORDS) for turn in episode.turns) for episode in answered]
    assert {1, 2} <= set(pages)
    assert [is_interleaved(episode) for episode in answered] == [n > 1 for n in pages]
    assert all(thought_share(episode) == 1 for episode in answered)


def _silent(turn, episode):
    return episode.words.split_turn(turn)[1]


def _halved(turn, episode):
    thought, call = episode.words.split_turn(turn)
    return thought[:-1] + call


def _longer(turn, episode):
    thought, call = episode.words.split_turn(turn)
    return thought + thought[:1] + call


def _other_words(turn, episode):
    thought, call = episode.words.split_turn(turn)
    return [WORDS.no_result] * len(thought) + call


def _once_silent(turn, episode):
    pages = sum(is_page(t, episode.words) for t in episode.turns)
    return _silent(turn, episode) if pages == 1 else turn


def _unanswered(turn, episode):
    return [*turn[:-2], WORDS.open, turn[-1]] if turn[-2] == WORDS.answer else turn


@pytest.mark.parametrize(
    ("edit", "most"),
    [(_silent, 0), (_halved, 0), (_longer, 0), (_other_words, 0), (_once_silent, 0.99), (_unanswered, 1)],
)
def test_one_page_without_exactly_its_thought_or_no_answer_is_no_interleaved_trajectory(edit, most):
    shares = []
    for episode in (played(index, edit) for index in range(20)):
        assert not is_interleaved(episode)
        shares.append(thought_share(episode))
    assert max(shares) <= most


def test_a_page_after_which_no_call_was_made_has_not_been_thought_about():
    episode = PromptedTask(WORLDS).episode(0)
    episode.write([WORDS.open, WORDS.entities[0]])
    episode.write([WORDS.same] * (WORDS.longest_thought + 2))
    assert episode.outcome == "no call"
    assert thought_share(episode) == 0


def test_an_answer_without_a_page_is_no_interleaved_trajectory():
    episode = PromptedTask(WORLDS).episode(0)
    episode.write([WORDS.answer, WORDS.entities[0]])
    assert math.isnan(thought_share(episode))
    assert not is_interleaved(episode)


def test_the_word_of_a_prompt_is_no_argument_and_is_answered_by_an_error():
    episode = PromptedTask(WORLDS).episode(0)
    episode.write([WORDS.open, WORDS.system[0]])
    assert episode.turns[-1].result == (WORDS.error,)


@pytest.mark.parametrize("within", ["batch", "group"])
def test_shuffled_rewards_are_the_same_rewards_in_other_places(within):
    task = PromptedTask(replace(WORLDS, worlds=100_000), prompt="tools")
    config = replace(TINY.rl, prompts=8, seed=1)
    model = TINY.model.build(0)

    class Marked(EpisodeTrainer):
        def collect(self):
            samples = super().collect()
            return replace(samples, rewards=torch.arange(32.0).view(8, 4))

    class Shuffled(ShuffledEpisodeTrainer, Marked):
        pass

    rewards = Shuffled(model, task, config, within=within).collect().rewards
    assert rewards.shape == (8, 4)
    assert rewards.flatten().sort().values.tolist() == list(range(32))
    assert rewards.flatten().tolist() != list(range(32))
    own = [set(row) for row in torch.arange(32).view(8, 4).tolist()]
    assert ([set(row) for row in rewards.long().tolist()] == own) == (within == "group")


def test_rows_hold_every_stage_under_every_prompt_and_curves_every_step():
    rows, curves = measure(TINY, range(2))
    runs = len(GRPO_STAGES) + len(GRPO_STAGES) - 1  # the one with the tools prompt for the first dose alone
    assert len(rows) == 2 * (2 * len(TINY.doses) + runs) * len(PROMPTS)
    assert not rows.duplicated(["dose", "seed", "stage", "prompt"]).any()
    assert len(curves) == 2 * runs * TINY.rl_steps
    assert not rows.isna().any().any()
    assert rows[["interleaved", "solved"]].stack().between(0, 1).all()


def test_a_seed_trained_again_from_nothing_has_the_same_weights(tmp_path, monkeypatch):
    first = study.trained(TINY, 0.5, "GRPO", 1)
    monkeypatch.setenv("DSLIB_CACHE", str(tmp_path))
    again = study.trained(TINY, 0.5, "GRPO", 1)
    assert all(torch.equal(first["weights"][name], again["weights"][name]) for name in first["weights"])
    assert first["table"] == again["table"]
    other = study.trained(TINY, 0.0, "GRPO", 1)
    assert not all(torch.equal(first["weights"][name], other["weights"][name]) for name in first["weights"])


def test_fine_tuning_reinforcement_and_measuring_draw_from_worlds_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("DSLIB_CACHE", str(tmp_path))
    used = {"data": set(), "tasks": []}
    data, task = study.ColdStartData, study.PromptedTask

    def seen_data(worlds, **options):
        used["data"].add(worlds.skip)
        return data(worlds, **options)

    def seen_task(worlds, **options):
        used["tasks"].append(worlds.skip)
        return task(worlds, **options)

    monkeypatch.setattr(study, "ColdStartData", seen_data)
    monkeypatch.setattr(study, "PromptedTask", seen_task)
    weights = study.trained(TINY, 0.5, "GRPO", 3)["weights"]
    study.played(TINY, weights, "both", 3)
    assert used == {"data": {study.FINE_TUNING[0]}, "tasks": [study.TRAINING[0], study.HELD_OUT[0]]}


def test_a_prompt_or_an_option_that_an_episode_has_not_is_an_error():
    with pytest.raises(ValueError, match="prompt='zzz'"):
        PromptedTask(WORLDS, prompt="zzz")
    with pytest.raises(ValueError, match="window"):
        PromptedTask(WORLDS, window=50)
    with pytest.raises(ValueError, match="prompt='think: tools:'"):
        reading_example(WORLDS, 0, WORDS, np.random.default_rng(0), "think: tools:")


@pytest.mark.parametrize("name", ["answers", "agents", "thoughts", "demonstrations"])
@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_outside_0_and_1_is_an_error(name, share):
    with pytest.raises(ValueError, match=f"{name}="):
        ColdStartData(WORLDS, **{name: share})


def test_shares_of_more_than_all_examples_are_an_error():
    with pytest.raises(ValueError, match="more than all"):
        ColdStartData(WORLDS, agents=0.7, demonstrations=0.4)


def test_a_batch_and_a_measurement_of_nothing_are_errors():
    with pytest.raises(ValueError, match="found is empty"):
        ColdStartData(WORLDS).batch(0, torch.Generator())
    with pytest.raises(ValueError, match="episodes is empty"):
        study.measured([])
