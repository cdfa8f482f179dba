"""The search world: one answer a question, tools that show little, words and messages that lose nothing."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslib.tasks.search_episode import (
    OUTCOMES,
    STRATEGIES,
    History,
    SearchEpisode,
    SearchTask,
    Turn,
    discard_75,
    managed,
    ruled_out,
    summary,
)
from dslib.tasks.search_expert import Demonstrations, expert_turn, play_expert
from dslib.tasks.search_tokens import SearchVocabulary
from dslib.tasks.search_world import SearchTools, SearchWorlds

WORLDS = SearchWorlds(worlds=500, pages=2, results=3, values=3, max_calls=20)
WORDS = SearchVocabulary(WORLDS)


def call(tool, argument, *thought):
    return WORDS.encode(" ".join([*thought, tool, argument]))


def test_exactly_one_entity_fits_each_question():
    for index in range(100):
        world = WORLDS.world(index)
        assert [e for e in range(WORLDS.entities) if world.fits(e)] == [world.target]
        assert sum(asked is not None for asked in world.question) == WORLDS.clues
        assert world.facts.min() >= 0
        assert world.facts.max() < WORLDS.values


def test_world_depends_on_seed_and_index_alone_so_strategies_meet_the_same():
    a, b = WORLDS.world(7), replace(WORLDS, worlds=8).world(7)
    assert np.array_equal(a.facts, b.facts)
    assert (a.question, a.target) == (b.question, b.target)
    assert np.array_equal(replace(WORLDS, skip=5).world(2).facts, a.facts)
    assert not np.array_equal(replace(WORLDS, seed=1).world(7).facts, a.facts)
    assert not np.array_equal(WORLDS.world(8).facts, a.facts)


def test_sizes_follow_from_pages_results_and_values():
    worlds = SearchWorlds(pages=6, results=4, values=6, clues=3)
    assert (worlds.entities, worlds.difficulty) == (144, 18)
    matches = [len(worlds.world(i).matches(a, 0)) for i in range(50) for a in range(4)]
    assert abs(np.mean(matches) - 24) < 1.5


def test_search_shows_matches_only_few_of_them_and_the_same_to_who_makes_the_same_calls():
    world = WORLDS.world(3)
    seen = set()
    for number in range(1, 60):
        found = world.search(1, 2, number)
        assert len(found) == len(set(found)) == min(3, len(world.matches(1, 2)))
        assert found == world.search(1, 2, number)
        seen |= set(found)
    assert seen == set(world.matches(1, 2).tolist())


def test_value_that_no_entity_has_gives_no_results_and_no_exception():
    rare = SearchWorlds(pages=1, results=1, values=99, attributes=1, clues=1)
    index, value = next((i, v) for i in range(50) for v in range(99) if not len(rare.world(i).matches(0, v)))
    assert rare.world(index).search(0, value, 1) == ()
    assert SearchTools(rare, index).search(f"field={value}") == "nothing"


def test_tools_speak_text_and_refuse_what_is_not_in_the_world():
    tools = SearchTools(WORLDS, 0)
    target = WORLDS.entity_names[tools.world.target]
    facts = dict(word.split("=") for word in tools.open(target).split())
    for word in tools.question.split():
        attribute, value = word.removeprefix("?").split("=")
        assert value in ("any", facts[attribute])
    with pytest.raises(ValueError, match=r"clue='colour=3' is not in this world.*field=3"):
        tools.search("colour=3")
    for refused in (tools.open, tools.answer):
        with pytest.raises(ValueError, match=r"entity='e99' is not in this world"):
            refused("e99")
    assert (tools.calls, tools.answered, tools.solved) == (4, None, False)
    tools.answer(target)
    assert tools.solved


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"clues": 5}, "clues=5 must be 1 to 4"),
        ({"values": 1}, "values=1"),
        ({"pages": 0}, "pages=0"),
        ({"max_calls": 0}, "max_calls=0"),
        ({"attributes": 9}, "attributes=9"),
    ],
)
def test_sizes_out_of_bounds_are_named(change, match):
    with pytest.raises(ValueError, match=match):
        replace(WORLDS, **change)
    with pytest.raises(IndexError, match="world 500 does not exist"):
        WORLDS.world(500)


def test_words_and_tokens_are_one_to_one():
    assert len(set(WORDS.words)) == len(WORDS) == len(WORDS.tokens)
    assert WORDS.encode(WORDS.decode(range(len(WORDS)))) == list(range(len(WORDS)))
    with pytest.raises(ValueError, match="'unheard'"):
        WORDS.encode("same unheard")
    with pytest.raises(ValueError, match="token -1"):
        WORDS.decode([-1])


def test_verdicts_compare_a_page_with_the_question():
    question = WORDS.encode("?field=1 ?origin=any ?decade=2 ?prize=0")
    page = WORDS.encode("field=1 origin=0 decade=1 prize=0")
    assert WORDS.decode(WORDS.verdicts_of(question, page)) == "same unasked other same"


@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=10))
def test_whatever_a_policy_writes_survives_the_way_through_messages(tokens):
    end = next((i + 1 for i in range(len(tokens)) if WORDS.turn_ended(tokens[: i + 1])), len(tokens))
    written = tokens[:end]
    message = WORDS.message(written, "call_1")
    assert WORDS.message_tokens(message) == written
    assert WORDS.message_tokens(json.loads(json.dumps(message))) == written
    assert bool(message.get("tool_calls")) == WORDS.turn_ended(written)


def test_prose_is_no_token_and_errors_are_one():
    question = "Please search and answer: ?field=1 ?origin=any ?decade=2 ?prize=0"
    assert WORDS.count([{"role": "system", "content": "open nothing twice"}]) == 0
    assert WORDS.count([{"role": "user", "content": question}]) == 4
    told = {"role": "user", "content": "ruled_out: e3 e4"}
    assert WORDS.decode(WORDS.message_tokens(told)) == "ruled_out: e3 e4"
    for content, words in (
        ("Error: unknown entity", "error"),
        ("", "error"),
        ("e1 or so", "error"),
        ("nothing", "nothing"),
        ("e1 e2", "e1 e2"),
        ("answered", ""),
    ):
        result = {"role": "tool", "tool_call_id": "a", "content": content}
        assert WORDS.decode(WORDS.message_tokens(result)) == words


@pytest.mark.parametrize("arguments", ["{", "[]", '{"entity": 3}', "{}", '{"a": "e1", "b": "e1"}', "null"])
def test_malformed_arguments_are_an_error_that_can_be_read(arguments):
    made = {"id": "a", "type": "function", "function": {"name": "open", "arguments": arguments}}
    assert WORDS.call_tokens(made) == (WORDS.open, WORDS.error)
    made["function"] = {"name": "delete", "arguments": '{"entity": "e1"}'}
    assert WORDS.call_tokens(made)[0] == WORDS.error


def test_expert_without_limits_solves_every_world_and_reads_its_own_history_only():
    solved = [play_expert(SearchEpisode(replace(WORLDS, max_calls=500), i, WORDS)) for i in range(60)]
    assert {episode.outcome for episode in solved} == {"solved"}
    history = History(tuple(WORDS.encode(solved[0].session.question)))
    assert WORDS.decode(expert_turn(history, WORDS, np.random.default_rng(0))).startswith("search")


def test_expert_opens_nothing_twice_nor_what_a_summary_has_ruled_out():
    question = tuple(WORDS.encode("?field=1 ?origin=any ?decade=2 ?prize=0"))
    found = Turn((), tuple(call("search", "field=1")), tuple(WORDS.encode("e1 e2 e3")))
    page = Turn((), tuple(call("open", "e2")), tuple(WORDS.encode("field=1 origin=1 decade=1 prize=1")))
    history = History(question, tuple(WORDS.encode("e1")), (found, page))
    turn = expert_turn(history, WORDS, np.random.default_rng(0))
    assert WORDS.decode(turn) == "same unasked other other open e3"
    fits = replace(page, result=tuple(WORDS.encode("field=1 origin=1 decade=2 prize=0")))
    turn = expert_turn(replace(history, turns=(found, fits)), WORDS, np.random.default_rng(0))
    assert WORDS.decode(turn) == "same unasked same same answer e2"


def test_noise_makes_the_expert_answer_wrongly_at_times_and_never_changes_its_verdicts():
    episodes = [play_expert(SearchEpisode(WORLDS, i, WORDS), noise=0.3) for i in range(40)]
    assert {"solved", "wrong answer"} <= {episode.outcome for episode in episodes}
    for episode in episodes:
        for before, turn in zip(episode.turns, episode.turns[1:], strict=False):
            if before.call[0] == WORDS.open:
                question = WORDS.encode(episode.session.question)
                assert list(turn.thought) == WORDS.verdicts_of(question, before.result)


def turns_of(count):
    return tuple(
        Turn(
            (),
            tuple(call("open", f"e{n % 18}")),
            tuple(WORDS.encode(f"field={n % 3} origin=0 decade=0 prize=0")),
        )
        for n in range(count)
    )


@pytest.mark.parametrize(("count", "left"), [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_discard_75_drops_three_quarters_rounded_down_and_never_the_newest(count, left):
    history = History((), None, turns_of(count))
    assert discard_75(history, WORDS).turns == history.turns[-left:]


def test_summary_rules_out_what_dropped_pages_contradict_and_keeps_what_an_earlier_one_said():
    question = tuple(WORDS.encode("?field=0 ?origin=0 ?decade=0 ?prize=any"))
    first = summary(History(question, None, turns_of(5)), WORDS)
    assert WORDS.decode(first.ruled_out) == "e1 e2"  # e0 and e3 fit, e4 is the newest
    assert len(first.turns) == 1
    second = summary(replace(first, turns=(*first.turns, *turns_of(3))), WORDS)
    assert WORDS.decode(second.ruled_out) == "e1 e2 e4"
    assert ruled_out(turns_of(3), question, WORDS) == WORDS.encode("e1 e2")


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(count=st.integers(1, 30), budget=st.integers(5, 120))
def test_managed_view_is_never_longer_keeps_question_and_newest_turn_and_is_idempotent(
    strategy, count, budget
):
    history = History(tuple(WORDS.encode("?field=0 ?origin=0 ?decade=0 ?prize=any")), None, turns_of(count))
    found = managed(history, STRATEGIES[strategy], budget, WORDS)
    assert len(found.tokens(WORDS)) <= len(history.tokens(WORDS))
    assert (found.question, found.turns[-1]) == (history.question, history.turns[-1])
    assert found.turns == history.turns[len(history.turns) - len(found.turns) :]
    assert len(found.tokens(WORDS)) <= budget or len(found.turns) == 1
    assert managed(found, STRATEGIES[strategy], budget, WORDS) == found
    if len(history.tokens(WORDS)) <= budget:
        assert found is history


def test_window_overflows_without_a_strategy_and_is_reset_with_one():
    hard = replace(WORLDS, pages=6, max_calls=60)
    words = SearchVocabulary(hard)
    for index in range(40):
        episode = play_expert(SearchEpisode(hard, index, words, window=40))
        assert episode.outcome in ("solved", "out of window")
        for strategy in STRATEGIES:
            other = play_expert(SearchEpisode(hard, index, words, 40, strategy))
            assert other.outcome in ("solved", "out of calls", "out of window")
            assert len(other.prompt) <= 40
            if episode.outcome == "out of window":
                assert other.resets
            else:
                assert other.calls >= episode.calls or other.outcome == "solved"


def test_reset_happens_once_and_the_context_fills_again():
    hard = replace(WORLDS, pages=6, max_calls=60)
    words = SearchVocabulary(hard)
    episode, lengths = SearchEpisode(hard, 3, words, 60, "discard_all"), []
    draw = np.random.default_rng(0)
    while episode.outcome is None:
        lengths.append(len(episode.prompt))
        episode.write(expert_turn(episode.history, words, draw))
    drops = sum(b < a for a, b in itertools.pairwise(lengths))
    assert drops == len(episode.resets)
    assert max(lengths) <= 48
    assert len(lengths) > 3 * drops


def test_episode_ends_for_each_reason():
    episode = SearchEpisode(WORLDS, 0, WORDS)
    wrong = WORLDS.entity_names[(episode.session.world.target + 1) % WORLDS.entities]
    episode.write(call("answer", wrong))
    assert (episode.outcome, episode.reward) == ("wrong answer", 0.0)
    with pytest.raises(RuntimeError, match="wrong answer"):
        episode.write(call("open", "e1"))
    episode = SearchEpisode(WORLDS, 0, WORDS)
    episode.write(call("answer", WORLDS.entity_names[episode.session.world.target]))
    assert (episode.outcome, episode.reward) == ("solved", 1.0)
    episode = SearchEpisode(WORLDS, 0, WORDS)
    for _ in range(4):  # one that is new, three that are not
        assert episode.outcome is None
        episode.write(call("open", "e1"))
    assert episode.outcome == "no progress"
    episode = SearchEpisode(replace(WORLDS, max_calls=2), 0, WORDS)
    episode.write(call("open", "e1"))
    episode.write(call("open", "e2"))
    assert episode.outcome == "out of calls"
    episode = SearchEpisode(WORLDS, 0, WORDS)
    assert episode.ended(WORDS.encode("same " * 10))
    episode.write(WORDS.encode("same " * 10))
    assert episode.outcome == "no call"
    episode = SearchEpisode(WORLDS, 0, WORDS, window=7)
    episode.write(call("open", "e1"))
    assert episode.outcome == "out of window"
    assert len({"solved", "wrong answer", "no progress", "out of calls", "no call", "out of window"}) == len(
        OUTCOMES
    )


def test_errors_become_observations():
    episode = SearchEpisode(WORLDS, 0, WORDS)
    episode.write(call("search", "e1"))
    episode.write(call("open", "open"))
    assert [turn.result for turn in episode.turns] == [(WORDS.error,)] * 2
    assert episode.outcome is None
    assert episode.calls == 2


def test_dropped_thinking_leaves_calls_and_results():
    episode = SearchEpisode(WORLDS, 0, WORDS, reasoning="drop_all")
    episode.write(call("open", "e1", "same"))
    assert WORDS.same not in episode.prompt
    assert episode.prompt[4:6] == call("open", "e1")
    kept = SearchEpisode(WORLDS, 0, WORDS)
    kept.write(call("open", "e1", "same"))
    assert len(kept.prompt) == len(episode.prompt) + 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"strategy": "forget"}, "strategy='forget' is unknown"),
        ({"reasoning": "some"}, "reasoning='some' is unknown"),
        ({"window": 5}, "window=5 has no room"),
    ],
)
def test_impossible_tasks_are_refused_at_the_door(options, match):
    with pytest.raises(ValueError, match=match):
        SearchTask(WORLDS, **options)


def test_demonstrations_score_what_the_expert_wrote_and_nothing_else():
    source = Demonstrations(WORLDS, resumed=0.0)
    tokens, own, episode = source.episode(4, WORDS, np.random.default_rng(0))
    assert tokens[:4] == WORDS.encode(episode.session.question)
    written = [t for t, mine in zip(tokens, own, strict=True) if mine]
    assert written == [t for turn in episode.turns for t in (*turn.thought, *turn.call)]
    assert len(tokens) - len(written) == 4 + sum(len(turn.result) for turn in episode.turns)
    prompts, completions, mask = source.batch(5, torch.Generator().manual_seed(0))
    assert prompts.shape == (5, 4)
    assert completions.shape == mask.shape
    assert not mask[completions == WORDS.pad].any()


def test_resumed_demonstrations_go_on_from_every_kind_of_reset():
    source, draw = Demonstrations(WORLDS, resumed=1.0, latest=6), np.random.default_rng(0)
    kinds = set()
    for index in range(60):
        tokens, own, episode = source.episode(index, WORDS, draw)
        start = own.index(True)
        kinds.add((tokens[4] == WORDS.ruled_out, start > 4))
        assert tokens[:4] == WORDS.encode(episode.session.question)
    assert {(True, True), (False, True)} <= kinds


def test_demonstrations_end_where_the_training_window_does():
    hard = replace(WORLDS, pages=6, max_calls=60)
    source, words = Demonstrations(hard, window=40, resumed=0.0), SearchVocabulary(hard)
    lengths = [len(source.episode(i, words, np.random.default_rng(i))[0]) for i in range(40)]
    assert max(lengths) <= 43  # the last result is not read
    with pytest.raises(ValueError, match="noise=2"):
        Demonstrations(hard, noise=2)
