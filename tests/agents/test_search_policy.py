"""The trained policy behind messages: the loop with its views gives the tokens of the batched engine."""

import pytest
import torch

from dslib.agents import LoopConfig, discard_75, discard_all, run
from dslib.agents.messages import user
from dslib.agents.search_policy import ORACLE, SearchPolicy, oracle_summary, search_tools
from dslib.models import DecoderConfig
from dslib.rl import SamplingConfig
from dslib.rl.episodes import play
from dslib.tasks.search_episode import SearchTask
from dslib.tasks.search_tokens import SearchVocabulary
from dslib.tasks.search_world import SearchTools, SearchWorlds

WORLDS = SearchWorlds(worlds=50, pages=1, results=3, values=2, max_calls=9)
WORDS = SearchVocabulary(WORLDS)
REASONS = {
    "no progress": "no_progress",
    "out of calls": "turns",
    "out of window": "window",
    "solved": "finished",
    "wrong answer": "finished",
    "no call": "finished",
}


@pytest.fixture(scope="module")
def model():
    """Untrained but for its head, which knows what may follow what: calls are well formed, answers rare."""
    made = DecoderConfig(len(WORDS), d_model=32, layers=2, heads=2).build(3)
    embedding = made.embedding.weight
    said = [*WORDS.facts, *WORDS.entities, *WORDS.questions, *WORDS.verdicts]
    with torch.no_grad():
        embedding.normal_(0, 1, generator=torch.Generator().manual_seed(0))
        embedding[said] += 2 * embedding[WORDS.same]  # alike, so that a call may follow each
        head = 0.02 * made.lm_head.weight
        for token in (WORDS.open, WORDS.search):
            head[token] += 0.15 * embedding[WORDS.same]
        for token in (*WORDS.verdicts, WORDS.answer):
            head[token] += 0.1 * embedding[WORDS.same]
        for token in WORDS.entities:
            head[token] += 0.3 * (embedding[WORDS.open] + embedding[WORDS.answer])
        for token in WORDS.facts:
            head[token] += 0.3 * embedding[WORDS.search]
        made.lm_head.weight.copy_(head + 0.05 * embedding)
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("reasoning", ["v32", "drop_all"])
@pytest.mark.parametrize(
    ("name", "strategy"),
    [(None, None), ("discard_75", discard_75), ("discard_all", discard_all), ("summary", ORACLE)],
)
def test_loop_over_messages_and_batched_engine_give_the_same_tokens(
    model, name, strategy, reasoning, temperature
):
    window = 34
    task = SearchTask(WORLDS, window, name, reasoning)
    episodes = [task.episode(i) for i in range(5)]
    streams = [(5, i) for i in range(5)]
    play(model, episodes, streams, SamplingConfig(1, temperature), slots=3)
    for index, (episode, stream) in enumerate(zip(episodes, streams, strict=True)):
        session = SearchTools(WORLDS, index)
        policy = SearchPolicy(model, WORLDS, temperature, stream, window)
        config = LoopConfig(max_turns=9, window=window, strategy=strategy, reasoning=reasoning)
        outcome = run(
            policy,
            search_tools(session),
            [user(session.question)],
            config,
            policy.count,
            lambda messages: oracle_summary(messages, WORDS),
        )
        said = [
            t
            for m in outcome.transcript
            if m.role == "assistant"
            for t in WORDS.message_tokens(m.to_openai())
        ]
        expected = [t for turn in episode.turns for t in (*turn.thought, *turn.call)]
        assert said[: len(expected)] == expected
        assert outcome.reason == REASONS[episode.outcome]
        assert outcome.resets == len(episode.resets)
        assert session.solved == (episode.outcome == "solved")
    assert strategy is None or temperature == 0 or sum(len(episode.resets) for episode in episodes) >= 3


def test_policy_takes_plain_messages_as_well_and_refuses_a_conversation_without_a_question(model):
    policy = SearchPolicy(model, WORLDS)
    plain = {"role": "user", "content": SearchTools(WORLDS, 0).question}
    assert policy([plain], []).role == "assistant"
    with pytest.raises(ValueError, match="no question"):
        policy([{"role": "user", "content": "hello"}], [])


def test_counter_counts_thoughts_calls_and_results(model):
    policy = SearchPolicy(model, WORLDS)
    message = WORDS.message(WORDS.encode("same other open e1"), "a")
    result = {"role": "tool", "tool_call_id": "a", "content": "field=1 origin=0 decade=0 prize=1"}
    assert policy.count([message, result]) == 8
    assert policy.count([]) == 0


def test_model_with_too_few_words_is_refused(model):
    with pytest.raises(ValueError, match="lacks words"):
        SearchPolicy(DecoderConfig(8, d_model=8, layers=1, heads=2).build(), WORLDS)


def test_oracle_summary_reads_pages_keeps_earlier_facts_and_takes_results_by_their_ids():
    def opened(name, entity):
        return WORDS.message(WORDS.encode(f"open {entity}"), name)

    def page(name, text):
        return {"role": "tool", "tool_call_id": name, "content": text}

    question = {"role": "user", "content": "?field=1 ?origin=any ?decade=0 ?prize=0"}
    earlier = {"role": "user", "content": "ruled_out: e5"}
    messages = [
        question,
        earlier,
        opened("a", "e1"),
        page("a", "field=0 origin=0 decade=0 prize=0"),
        opened("b", "e2"),
        page("b", "field=1 origin=0 decade=0 prize=0"),
        opened("c", "e3"),
        page("c", "Error: no such entity"),
    ]
    assert oracle_summary(messages, WORDS) == "ruled_out: e5 e1"
    assert oracle_summary([question], WORDS) == "ruled_out:"
