"""The study of context management: paired arms, thoughts that are replaced, the packed table and its questions."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from dslib import data
from dslib.experiments import agent_context as study
from dslib.experiments.agent_context import Arm, StudyConfig, measure, policy_of, random_75
from dslib.experiments.agent_context_tables import CODES, EpisodeTable, pack, unpack
from dslib.experiments.search_policy import COUNTS, TRAINER, TUNING, PolicyConfig
from dslib.models import DecoderConfig
from dslib.tasks.search_episode import (
    OUTCOMES,
    History,
    SearchEpisode,
    SearchTask,
    Turn,
    discard_75,
    guessers_choice,
)
from dslib.tasks.search_expert import play_expert
from dslib.tasks.search_tokens import SearchVocabulary
from dslib.tasks.search_world import SearchWorlds

SMALL = SearchWorlds(worlds=10**7, pages=1, results=2, values=2, max_calls=6)
WORDS = SearchVocabulary(SMALL)
TINY = PolicyConfig(
    worlds=SMALL,
    model=DecoderConfig(len(WORDS), d_model=32, layers=2, heads=2),
    sft=(replace(TUNING[0], steps=30, batch_size=8),),
    rl=replace(TRAINER, prompts=2, group_size=4, micro_batch=8),
    rl_steps=1,
)
CONFIG = StudyConfig(parts=2, part=4, windows=(24, 34), main=34, samples=2, trained=TINY)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSLIB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def rows():
    return measure(CONFIG, CONFIG.arms, range(2))


def test_every_arm_plays_every_world_once_and_names_differ(rows):
    names = [arm.name for arm in CONFIG.arms]
    assert len(set(names)) == len(names)
    assert rows.groupby("arm").world.apply(list).map(lambda worlds: worlds == list(range(8))).all()
    assert set(rows.arm) == set(names)
    assert {arm.name for arm in CONFIG.live} <= set(names)


def test_a_part_played_again_alone_is_the_same(rows):
    again = measure(CONFIG, CONFIG.live, [1])
    first = rows[rows.arm.isin(again.arm) & (rows.world >= 4)].reset_index(drop=True)
    pd.testing.assert_frame_equal(again, first)


def test_repeats_have_luck_of_their_own(rows):
    found = EpisodeTable(rows)
    one, two = found[Arm(34)], found[Arm(34, sample=1)]
    assert (one[["calls", "written"]] != two[["calls", "written"]]).any().any()


def test_packed_rows_come_back_and_gaps_are_refused(rows):
    pd.testing.assert_frame_equal(unpack(pack(rows)), rows)
    packed = pack(rows, seed=3)
    assert set(packed.seed) == {3}
    assert set("".join(packed.outcome)) <= set(CODES)
    assert len(CODES) == len(set(CODES)) == len(OUTCOMES)
    with pytest.raises(ValueError, match="does not hold each of the 8 worlds"):
        pack(rows.drop(index=0))


def table(**arms):
    found = []
    for arm, episodes in arms.values():
        for world, (outcome, calls, guess) in enumerate(episodes):
            row = {"arm": arm.name, "world": world, "outcome": outcome, "solved": outcome == "solved"}
            found.append(row | dict.fromkeys(COUNTS, 1) | {"calls": calls, "guess": guess})
    return EpisodeTable(pd.DataFrame(found))


BY_HAND = table(
    a=(Arm(34), [("solved", 7, 0), ("out of window", 9, 4), ("wrong answer", 3, 5)]),
    b=(Arm(34, sample=1), [("wrong answer", 3, 9), ("solved", 4, 0), ("no progress", 8, 0)]),
)


def test_parallel_takes_the_shortest_answer_right_or_wrong_and_pays_for_all():
    solved, spent = BY_HAND.parallel(Arm(34), 2)
    assert solved.tolist() == [0, 1, 0]
    assert spent.tolist() == [10, 13, 11]
    solved, spent = BY_HAND.parallel(Arm(34), 2, calls=3)
    assert solved.tolist() == [0, 0, 0]
    assert spent.tolist() == [6, 6, 6]


def test_one_run_gives_the_success_of_every_budget():
    spent, success = BY_HAND.curve(Arm(34))
    assert success.tolist() == pytest.approx([0] * 6 + [1 / 3] * 3)
    assert spent.tolist() == pytest.approx(
        [1, 2, 3, *((2 * c + 3) / 3 for c in (4, 5, 6, 7)), 18 / 3, 19 / 3]
    )
    assert BY_HAND.solved(Arm(34), calls=6).tolist() == [0, 0, 0]
    assert BY_HAND.solved(Arm(34), calls=[7, 1, 1]).tolist() == [1, 0, 0]


def test_only_who_has_not_answered_guesses():
    assert BY_HAND.guessed(Arm(34)).tolist() == [1, 1 / 4, 0]
    assert BY_HAND.guessed(Arm(34, sample=1)).tolist() == [0, 1, 0]


def test_line_of_parallel_counts_all_episodes():
    line = BY_HAND.line("both", Arm(34), 2)
    assert (line[""], line["success"], line["written"]) == ("both", pytest.approx(1 / 3), 2)
    assert line["calls per success"] == pytest.approx(34)


def test_arm_that_was_not_played_is_named():
    with pytest.raises(KeyError, match="discard_all@34"):
        BY_HAND[Arm(34, "discard_all")]
    assert Arm(34, "discard_all") not in BY_HAND
    assert Arm(34) in BY_HAND


@pytest.mark.parametrize("wrong", [{"strategy": "forget"}, {"thinking": "maybe"}, {"policy": "none"}])
def test_unknown_arm_is_refused(wrong):
    with pytest.raises(ValueError, match="is none of"):
        Arm(**wrong)


def test_main_window_must_be_one_of_the_windows():
    with pytest.raises(ValueError, match="main=128 is not among"):
        StudyConfig(windows=(96,))


def test_random_cut_keeps_as_many_turns_as_discard_75_the_newest_and_their_order():
    question = tuple(WORDS.encode("?field=1 ?origin=0 ?decade=any ?prize=0"))
    for length in range(1, 12):
        turns = tuple(Turn((), (WORDS.open, WORDS.entities[n % 4]), (n % 3 + 1,)) for n in range(length))
        history = History(question, None, turns)
        kept = random_75(history, WORDS).turns
        assert len(kept) == len(discard_75(history, WORDS).turns)
        assert kept[-1] is turns[-1]
        places = [next(i for i, t in enumerate(turns) if t is turn) for turn in kept]
        assert places == sorted(places)
        assert random_75(history, WORDS) == random_75(history, WORDS)


def test_random_thoughts_are_forced_after_a_page_and_nowhere_else():
    task = Arm(thinking="random").task(SMALL)
    episode = task.episode(3)
    assert set(episode.forbidden) == set(WORDS.verdicts)
    episode.write([WORDS.open, WORDS.entities[0]])
    written = []
    for _ in range(SMALL.attributes):
        (allowed,) = set(range(len(WORDS))) - set(episode.forbidden)
        assert allowed in WORDS.verdicts
        written.append(allowed)
        assert not episode.ended(written)
    assert set(episode.forbidden) == set(WORDS.verdicts)
    assert len({tuple(drawn_thought(index)) for index in range(20)}) > 5


def drawn_thought(index):
    episode = Arm(thinking="random").task(SMALL).episode(index)
    episode.write([WORDS.open, WORDS.entities[0]])
    for place in range(SMALL.attributes):
        yield next(t for t in WORDS.verdicts if t not in episode.forbidden)
        episode.ended([0] * (place + 1))


def test_scrambled_thoughts_keep_their_length_and_what_was_done():
    usual = play_expert(SearchTask(replace(SMALL, max_calls=30)).episode(5))
    other = Arm(thinking="scrambled").task(replace(SMALL, max_calls=30)).episode(5)
    for turn in usual.turns[:-1]:
        other.write([*turn.thought, *turn.call])
    assert [t.thought for t in other.turns] == [
        t.thought for t in usual.turns[:-1]
    ]  # what was written stays known
    seen, wrote = other.history.turns, usual.turns[:-1]
    assert [len(t.thought) for t in seen] == [len(t.thought) for t in wrote]
    assert [(t.call, t.result) for t in seen] == [(t.call, t.result) for t in wrote]
    assert len(other.prompt) == sum(len((*t.thought, *t.call, *t.result)) for t in wrote) + SMALL.attributes


def test_guesser_chooses_among_what_was_shown_and_not_opened():
    episode = SearchEpisode(SMALL, 0)
    target = WORDS.entities[episode.session.world.target]
    assert guessers_choice(episode) == SMALL.entities
    clue = next(i for i, token in enumerate(episode.history.question) if WORDS.clue(token)[1] is not None)
    while target not in {t for turn in episode.turns for t in turn.result}:
        episode.write([WORDS.search, WORDS.fact(clue, episode.session.world.question[clue])])
        episode.outcome = None
    shown = {t for turn in episode.turns for t in turn.result}
    assert guessers_choice(episode) == len(shown)
    episode.write([WORDS.open, target])
    assert guessers_choice(episode) == 0 or shown == {target}


def test_policy_of_another_number_of_calls_and_of_held_out_worlds():
    _, worlds = policy_of(replace(CONFIG, max_calls=3), "sft")
    assert worlds.max_calls == 3
    assert worlds.skip == TINY.held_out().worlds.skip
    first, _ = policy_of(CONFIG, "sft")
    second, _ = policy_of(CONFIG, "rl")
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_policy_trained_in_the_window_is_an_arm_only_where_it_ships(monkeypatch):
    def without(name):
        raise FileNotFoundError(name)

    monkeypatch.setattr(data, "path", without)
    assert all(arm.policy != "window" for arm in StudyConfig().arms)
    monkeypatch.setattr(data, "path", lambda name: name)
    assert sum(arm.policy == "window" for arm in StudyConfig().arms) == 3


def test_key_of_what_is_kept_holds_the_shipped_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "path", lambda name: tmp_path / "weights")
    (tmp_path / "weights").write_bytes(b"one")
    first = study.fingerprint(StudyConfig(), "rl")
    (tmp_path / "weights").write_bytes(b"two")
    assert study.fingerprint(StudyConfig(), "rl") != first
    assert study.fingerprint(CONFIG, "rl") == ""


@pytest.mark.parametrize(
    ("calls", "solved", "spent"),
    [
        (
            13,
            [1, 1, 0],
            [7, 13, 3],
        ),  # the second world's first attempt runs out of window, its next one solves it
        (12, [1, 0, 0], [7, 12, 3]),  # and here has one call too few; a wrong answer is an answer and ends it
        (5, [0, 0, 0], [5, 5, 3]),
    ],
)
def test_restarts_follow_only_what_ended_without_an_answer_and_share_one_budget(calls, solved, spent):
    found = BY_HAND.restarts(Arm(34), 2, calls)
    assert found[0].tolist() == solved
    assert found[1].tolist() == spent


def test_success_within_calls_never_exceeds_success(rows):
    found = EpisodeTable(rows)
    for arm in CONFIG.arms:
        spent, success = found.curve(arm)
        assert (np.diff(success) >= 0).all()
        assert success[-1] == found.solved(arm).mean()
        assert spent[-1] == found[arm].calls.mean()
