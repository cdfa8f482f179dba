"""Episodes of many turns: the batched engine against one pass over the text, and training that learns from gaps."""

from dataclasses import replace

import pytest
import torch

from dslib.models import DecoderConfig, MoEConfig
from dslib.rl import RLConfig, SamplingConfig, score
from dslib.rl.episodes import EpisodeTrainer, play
from dslib.rl.ragged import RaggedCache
from dslib.rl.rollout import hidden_states
from dslib.tasks.search_episode import SearchTask
from dslib.tasks.search_world import SearchWorlds

WORLDS = SearchWorlds(worlds=50, pages=1, results=3, values=2, max_calls=6)
TASK = SearchTask(WORLDS)
TINY = DecoderConfig(TASK.vocab_size, d_model=16, layers=2, heads=2, kv_heads=1)


def played(task=TASK, count=12, slots=5, temperature=1.0, seed=0, model=None, **options):
    model = TINY.build(1) if model is None else model
    episodes = [task.episode(i) for i in range(count)]
    streams = [(seed, i) for i in range(count)]
    return play(model, episodes, streams, SamplingConfig(1, temperature), slots, **options)


def biased(seed=1):
    """A policy that calls tools often enough for episodes of many turns."""
    model = TINY.build(seed)
    words = TASK.words
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.norm.weight.fill_(1)
        for token in (*words.tools, *words.entities, *words.facts):
            model.lm_head.weight[token].normal_(0, 0.4, generator=torch.Generator().manual_seed(token))
    return model


def test_rows_of_different_lengths_get_the_states_of_one_pass_each():
    model, lengths = TINY.build(0), torch.tensor([3, 9, 1, 6])
    texts = torch.randint(TASK.vocab_size, (4, 9), generator=torch.Generator().manual_seed(0))
    cache, found = RaggedCache(model, 4, capacity=2), torch.zeros(4, 9, 16)
    for step in range(9):
        at = torch.minimum(torch.tensor(step), lengths - 1)  # who is done reads its last token again
        found[torch.arange(4), at] = cache.step(texts[torch.arange(4), at], at)
    whole = hidden_states(model, texts)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(found[row, :length], whole[row, :length], atol=1e-5, rtol=1e-5)


def test_text_that_was_cut_back_goes_on_as_if_the_rest_had_never_been_read():
    model = TINY.build(0)
    cache, tokens = RaggedCache(model, 1), torch.tensor([1, 2, 3, 4, 5])
    for place, token in enumerate(tokens):
        cache.step(token[None], torch.tensor([place]))
    again = cache.step(torch.tensor([9]), torch.tensor([2]))
    expected = hidden_states(model, torch.tensor([[1, 2, 9]]))[:, -1]
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)


def test_other_models_than_plain_decoders_are_refused():
    mixture = replace(TINY, moe=MoEConfig(experts=2, top_k=1)).build()
    with pytest.raises(TypeError, match="dense attention"):
        RaggedCache(mixture, 2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reasoning": "drop_all"},
        {"window": 24, "strategy": "discard_all"},
        {"window": 24, "strategy": "summary"},
    ],
)
def test_recorded_log_probabilities_are_those_of_one_pass_over_each_segment(options):
    model = biased()
    result = played(replace(TASK, **options), model=model)
    rollout = result.rollout
    assert rollout.prompt_length == 1
    torch.testing.assert_close(score(model, rollout), rollout.logp, atol=1e-5, rtol=1e-4)
    assert int(rollout.mask.sum()) == int(result.written.sum())
    assert set(result.owner.tolist()) == set(range(12))
    assert (rollout.logp[~rollout.mask] == 0).all()


def test_what_the_environment_said_is_read_and_not_scored():
    result = played(model=biased())
    gaps = 0
    for row, owner in enumerate(result.owner.tolist()):
        episode = result.episodes[owner]
        own = result.rollout.completions[row][result.rollout.mask[row]].tolist()
        said = [t for turn in episode.turns for t in (*turn.thought, *turn.call)]
        assert own[: len(said)] == said
        gaps += int((result.rollout.mask[row, 1:] & ~result.rollout.mask[row, :-1]).sum() > 1)
    assert gaps


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_of_an_episode_do_not_depend_on_who_is_played_beside_it(temperature):
    model = biased()
    alone = [played(count=i + 1, slots=1, temperature=temperature, model=model).episodes[i] for i in range(5)]
    together = played(count=12, slots=12, temperature=temperature, model=model)
    for a, b in zip(alone, together.episodes, strict=False):
        assert (a.turns, a.outcome) == (b.turns, b.outcome)
    assert played(seed=1, model=model).outcomes != together.outcomes or temperature == 0


def test_strategies_meet_the_same_luck_until_the_first_reset():
    model = biased()
    free, managed = played(model=model), played(replace(TASK, window=24, strategy="discard_all"), model=model)
    resets = 0
    for a, b in zip(free.episodes, managed.episodes, strict=True):
        same = b.resets[0] if b.resets else len(b.turns)
        assert a.turns[:same] == b.turns[:same]
        resets += len(b.resets)
    assert resets


def test_prefix_that_did_not_change_is_not_read_again():
    model = biased()
    kept, dropped = played(model=model), played(replace(TASK, reasoning="drop_all"), model=model)
    for result in (kept, dropped):
        for number, episode in enumerate(result.episodes):
            if episode.outcome == "no call":
                continue
            assert result.written[number] == sum(len(t.thought) + len(t.call) for t in episode.turns)
    assert len(kept.owner) == 12
    for number, episode in enumerate(kept.episodes):  # what the last call of an episode gave is not read
        turns = episode.turns if episode.outcome == "no call" else episode.turns[:-1]
        assert kept.read[number] == 4 + sum(len(t.result) for t in turns)


def test_forbidden_verdicts_are_never_written():
    result = played(replace(TASK, thinking=False), model=TINY.build(1))
    own = result.rollout.completions[result.rollout.mask].tolist()
    assert not set(own) & set(TASK.words.verdicts)


def test_bad_input_of_play_is_named():
    with pytest.raises(ValueError, match="1 streams for 2 episodes"):
        play(TINY.build(), [TASK.episode(0), TASK.episode(1)], [(0,)])
    with pytest.raises(ValueError, match="slots=0"):
        played(slots=0)
    small = DecoderConfig(5, d_model=8, layers=1, heads=2).build()
    with pytest.raises(ValueError, match="vocabulary is 5"):
        played(model=small)
    broken = TINY.build()
    broken.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite in episode"):
        played(model=broken)


def test_no_episodes_are_played_to_nothing():
    result = play(TINY.build(), [], [])
    assert len(result.episodes) == len(result.rollout) == 0


CONFIG = RLConfig(loss={"aggregation": "token"}, prompts=8, group_size=8, lr=3e-2)


def trainer(task=TASK, seed=1, **options):
    return EpisodeTrainer(biased(seed), task, replace(CONFIG, **options))


def test_first_step_is_on_policy():
    row = trainer().step()
    assert row["ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert row["old_kl"] == pytest.approx(0, abs=1e-5)
    assert row["clip_share"] == 0


def test_policy_learns_to_be_rewarded():
    """With two entities and one attribute a guess is right every other time, and who searches knows."""
    easy = SearchTask(
        SearchWorlds(worlds=50, pages=1, results=1, values=2, attributes=1, clues=1, max_calls=4)
    )
    model = DecoderConfig(easy.vocab_size, d_model=16, layers=2, heads=2).build(0)
    table = EpisodeTrainer(model, easy, replace(CONFIG, prompts=16)).run(30)
    first, last = (sum(row["reward"] for row in rows) / 5 for rows in (table[:5], table[-5:]))
    assert last > first + 0.2
    assert table[0]["calls"] >= 0


def test_each_segment_has_the_advantage_of_its_episode():
    made = trainer(replace(TASK, window=24, strategy="discard_all"))
    samples = made.collect()
    batch = made.prepare(samples)
    owner = made.played.owner
    assert len(owner) > 64
    for episode in range(64):
        assert len(set(batch.advantages[owner == episode].tolist())) == 1
    row = made.step()
    assert row["ratio_mean"] == pytest.approx(1, abs=1e-4)


def test_interrupted_training_goes_on_as_if_it_had_not_been(tmp_path):
    whole = trainer()
    whole.run(4)
    first = trainer()
    first.run(2, tmp_path / "run.safetensors")
    second = trainer(seed=2)
    second.run(4, tmp_path / "run.safetensors")
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert whole.table == second.table


def test_kl_to_a_reference_is_scored_over_the_gaps():
    row = trainer(loss={"aggregation": "token", "kl": 0.1}).step()
    assert row["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("algorithm", ["ppo", "dapo", "remax"])
def test_algorithms_that_need_more_than_episodes_have_are_refused(algorithm):
    with pytest.raises(ValueError, match=f"algorithm='{algorithm}'"):
        EpisodeTrainer(TINY.build(), TASK, RLConfig(algorithm))
    with pytest.raises(ValueError, match="forbids tokens"):
        EpisodeTrainer(TINY.build(), replace(TASK, thinking=False), CONFIG)
