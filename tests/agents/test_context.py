"""Contexts as views: Figure 4's policies by hand, the invariants on generated conversations, and agreement with a
slow implementation that follows the definitions word by word."""

import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dslib.agents import (
    REASONING_POLICIES,
    ContextEvent,
    ContextOverflow,
    OrphanResult,
    TokenCounter,
    Transcript,
    discard_75,
    discard_all,
    results_as_user,
    summary,
    view,
)
from dslib.agents.context import PLACEHOLDER, SUMMARY, Window
from dslib.agents.messages import HARNESS, assistant, system, tool_call, tool_result, user, without_reasoning

#: 10 000 conversations where asked for: DSLIB_EXAMPLES=10000 pytest tests/agents
EXAMPLES = settings(max_examples=int(os.environ.get("DSLIB_EXAMPLES", "200")))


def keep_last_two(history):
    """A strategy of one's own."""
    return history[:-2]


STRATEGIES = (discard_75, discard_all, summary, keep_last_two)
COUNT = TokenCounter(length=len, overhead=1)


def step(text, n=1, reasoning="why", size=10):
    calls = [tool_call("search", {"q": text}, f"{text}{i}") for i in range(n)]
    return [assistant(None, calls, reasoning), *(tool_result(call, "x" * size) for call in calls)]


def thinking(messages):
    return [m.reasoning_content for m in messages if m.role == "assistant"]


# --- Figure 4 by hand

FIGURE_4 = [
    system("be brief"),
    user("first"),
    *step("a", reasoning="1.1"),
    *step("b", reasoning="1.2"),
    assistant("answer 1", reasoning="1.3"),
    user("second"),
    assistant("answer 2", reasoning="2.1"),
    user("third"),
    *step("c", reasoning="3.1"),
]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("v32", [None, None, None, None, "3.1"]),
        ("keep_tool_turns", ["1.1", "1.2", "1.3", None, "3.1"]),
        ("keep_all", ["1.1", "1.2", "1.3", "2.1", "3.1"]),
        ("drop_all", [None] * 5),
    ],
)
def test_policies_keep_what_figure_4_keeps(policy, kept):
    seen = view(FIGURE_4, policy)
    assert thinking(seen) == kept
    assert [without_reasoning(m) for m in seen] == [without_reasoning(m) for m in FIGURE_4]  # calls stay


def test_within_a_turn_tool_messages_alone_drop_no_thinking():
    for end in (5, 7):
        messages = FIGURE_4[: end - 1]
        assert view(messages) == messages


def test_a_developer_message_is_a_boundary_as_a_users_is():
    messages = [user("q"), *step("a"), {"role": "developer", "content": "now in French"}]
    transcript = Transcript.from_openai([m if isinstance(m, dict) else m.to_openai() for m in messages])
    assert thinking(view(transcript)) == [None]


def test_without_a_user_message_nothing_is_dropped():
    messages = [system("s"), *step("a"), *step("b")]
    assert view(messages) == messages


def test_results_sent_as_user_messages_lose_all_thinking_but_the_last():
    """Roo Code, Terminus: each result is a new user message, so V3.2's rule drops what was thought before it."""
    messages = [user("q"), *step("a"), *step("b"), *step("c")]
    assert thinking(view(messages)) == ["why"] * 3
    assert thinking(view(results_as_user(messages))) == [None] * 3
    assert thinking(view(results_as_user(messages)[:-1])) == [None, None, "why"]


# --- strategies by hand


def history(steps, size=100):
    return [system("s"), user("q"), *(m for i in range(steps) for m in step(f"s{i}", size=size))]


def searched(messages):
    return [call.function.arguments[-4:-2] for m in messages for call in m.calls]


@pytest.mark.parametrize(("steps", "left"), [(8, 2), (7, 2), (4, 1), (3, 1), (2, 1)])
def test_discard_75_drops_the_first_three_quarters_of_the_steps_and_never_the_newest(steps, left):
    messages = history(steps)
    seen = view(messages, strategy=discard_75, budget=COUNT(messages) - 1, count=COUNT)
    assert searched(seen) == [f"s{i}" for i in range(steps - left, steps)]
    assert seen[:2] == messages[:2]


def test_discard_all_leaves_the_newest_step_and_the_context_fills_again():
    """A rule applied afresh at every call would leave one step for good."""
    budget = COUNT(history(4))
    assert len(searched(view(history(4), strategy=discard_all, budget=budget, count=COUNT))) == 4
    lengths = [
        len(searched(view(history(n), strategy=discard_all, budget=budget, count=COUNT)))
        for n in range(1, 12)
    ]
    assert lengths == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3]


def test_summary_stands_where_the_steps_stood_and_later_ones_do_not_replace_it():
    budget = COUNT(history(4))
    seen = view(history(12), strategy=summary, budget=budget, count=COUNT)
    texts = [m for m in seen if m.name == SUMMARY]
    assert len(texts) > 1
    assert {m.content for m in texts} == {PLACEHOLDER}
    assert [m.role for m in seen[:2]] == ["system", "user"]
    assert seen[-2:] == step("s11", size=100)


def test_recorded_events_are_applied_and_plain_messages_show_the_run_without_them():
    transcript = Transcript.of(history(3))
    transcript.record(ContextEvent(kind="summary", at=8, dropped=((2, 6),), text="two searches failed"))
    transcript.extend(step("s3"))
    seen = view(transcript)
    assert [m.content for m in seen if m.role == "user"] == ["q", "two searches failed"]
    assert len(searched(seen)) == 2
    assert len(searched(view(transcript.messages))) == 4


def test_a_merging_summary_replaces_the_one_before():
    texts = []
    for merged in (False, True):
        transcript = Transcript.of(history(3))
        transcript.record(ContextEvent(kind="summary", at=8, dropped=((2, 6),), text="first"))
        transcript.extend(step("s3"))
        later = ContextEvent(kind="summary", at=10, dropped=((6, 8),), text="second", merged=merged)
        transcript.record(later)
        texts.append([m.content for m in view(transcript) if m.name == SUMMARY])
    assert texts == [["first", "second"], ["second"]]


def test_an_event_that_would_cut_a_step_is_refused():
    transcript = Transcript.of(history(2))
    transcript.record(ContextEvent(kind="discard", at=6, dropped=((2, 3),)))
    with pytest.raises(ValueError, match="whole visible steps"):
        view(transcript)


def test_replies_of_the_harness_leave_with_the_words_they_answer():
    nudged = [user("q"), assistant("hm"), user("call a tool", HARNESS), *step("a"), *step("b")]
    seen = view(nudged, strategy=discard_all, budget=COUNT(nudged) - 1, count=COUNT)
    assert seen == [user("q"), *step("b")]


# --- bad input


def test_a_window_smaller_than_what_has_to_stay_is_a_typed_error_with_numbers():
    with pytest.raises(ContextOverflow, match="discard_all has nothing left") as caught:
        view(history(3), strategy=discard_all, budget=20, count=COUNT)
    assert caught.value.budget == 20
    assert caught.value.tokens == COUNT([*history(0), *step("s2", size=100)])
    with pytest.raises(ContextOverflow, match="without a strategy"):
        view(history(3), budget=20, count=COUNT)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"reasoning": "v33"}, ValueError, "keep_tool_turns"),
        ({"budget": 0}, ValueError, "budget=0"),
        ({"strategy": discard_all}, ValueError, "needs a budget"),
        ({"strategy": "discard_all", "budget": 9}, TypeError, "discard_all"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        view(history(1), **arguments)


@pytest.mark.parametrize("reasoning", ["keep_all", "drop_all"])
def test_a_strategy_reads_what_a_step_shows_and_costs_as_long_as_it_is_visible(reasoning):
    messages, read, steps = history(4), [], []

    def oldest(offered):
        read.append([(step.messages, step.tokens) for step in offered])
        steps.append(offered[0])
        return offered[:1]

    shown = view(messages, reasoning)
    view(messages, reasoning, oldest, COUNT(shown) - 1, COUNT)
    pairs = [shown[place : place + 2] for place in range(2, len(shown) - 2, 2)]
    assert [step for step, _ in read[0]] == pairs
    assert [tokens for _, tokens in read[0]] == [COUNT(pair) for pair in pairs]
    assert steps[0].messages == []  # gone by now


def test_a_strategy_may_drop_only_what_it_was_offered():
    def greedy(steps):
        return [object()]

    with pytest.raises(ValueError, match="greedy chose"):
        view(history(3), strategy=greedy, budget=300, count=COUNT)


def test_orphans_are_refused_and_the_empty_and_the_single_message_pass():
    with pytest.raises(OrphanResult):
        view([user("q"), tool_result("c", "x")])
    assert view([]) == []
    assert view([], strategy=discard_all, budget=5) == []
    assert view([user("q")]) == [user("q")]


# --- generated conversations


def keys_of(messages):
    """Users, instructions and the harness's replies, as they must survive or may go."""
    kept, asked = [], False
    for place, m in enumerate(messages):
        reply = (
            m.name == HARNESS
            and asked
            and place > 0
            and messages[place - 1].role == "assistant"
            and not messages[place - 1].calls
        )
        asked = asked or m.role == "user"
        if m.role in ("system", "developer", "user") and not reply:
            kept.append(m)
    return kept


def newest_step(messages):
    for place in reversed(range(len(messages))):
        if messages[place].calls:
            return messages[place : place + 1 + len(messages[place].calls)]
    return []


def viewed(transcript, policy, strategy, budget):
    """The view, or None where what has to stay exceeds the budget, which the error says in numbers."""
    window = Window.of(transcript, policy, strategy, budget, COUNT)
    if window.tokens <= budget:
        return view(transcript, policy, strategy, budget, COUNT)
    with pytest.raises(ContextOverflow) as caught:
        view(transcript, policy, strategy, budget, COUNT)
    assert caught.value.tokens == window.tokens > budget == caught.value.budget
    return None


@EXAMPLES
@given(data=st.data())
def test_invariants_of_every_policy_under_every_strategy(conversations, data):
    messages = data.draw(conversations)
    transcript = Transcript.of(messages)
    share = data.draw(st.integers(0, 100))
    before, keys = transcript.to_openai(), keys_of(messages)
    bare, newest = (
        [without_reasoning(m) for m in messages],
        [without_reasoning(m) for m in newest_step(messages)],
    )
    for policy in REASONING_POLICIES:
        plain = view(transcript, policy)
        whole = COUNT(plain)
        assert view(plain, policy) == plain
        assert [without_reasoning(m) for m in plain] == bare
        budget = max(1, whole * share // 80)
        for strategy in STRATEGIES:
            seen = viewed(transcript, policy, strategy, budget)
            if seen is None:
                continue
            assert COUNT(seen) <= min(budget, whole)  # within the budget, and never larger than before
            assert view(seen, policy, strategy, budget, COUNT) == seen  # idempotent
            again = Transcript.of(seen)  # calls and results whole, in order, no orphan
            assert again.open_calls == ()
            kept = iter(seen)
            assert all(m in kept for m in keys)
            seen_bare, order = [without_reasoning(m) for m in seen if m.name != SUMMARY], iter(bare)
            assert newest_step(seen_bare) == newest
            assert all(m in order for m in seen_bare)  # in order, and nothing of a call or a result changed
    assert transcript.to_openai() == before


@EXAMPLES
@given(data=st.data())
def test_within_the_budget_nothing_is_dropped_but_what_the_policy_drops(conversations, data):
    """As long as no context on the way has passed it."""
    messages = data.draw(conversations)
    budget = COUNT(messages) + 1
    for policy in REASONING_POLICIES:
        for strategy in STRATEGIES:
            assert view(messages, policy, strategy, budget, COUNT) == view(messages, policy)


def replayed(messages, policy, strategy, budget):
    """The slow way: before every answer look at the whole context, and record a reset where it is too long."""
    transcript = Transcript()

    def reset():
        if COUNT(view(transcript, policy)) > budget:
            window = Window.of(transcript, policy, budget=budget, count=COUNT)
            planned = window.plan(strategy, budget)
            if planned:
                transcript.record(planned[0])

    for message in messages:
        if message.role == "assistant":
            reset()
        transcript.append(message)
    reset()
    return transcript


@EXAMPLES
@given(data=st.data())
def test_the_fold_finds_the_resets_that_a_run_would_have_recorded(conversations, data):
    messages = data.draw(conversations)
    policy = data.draw(st.sampled_from(REASONING_POLICIES))
    budget = max(1, COUNT(messages) * data.draw(st.integers(0, 100)) // 100)
    for strategy in (discard_75, discard_all, keep_last_two):
        expected = view(replayed(messages, policy, strategy, budget), policy)
        assert Window.of(messages, policy, strategy, budget, COUNT).visible() == expected


def by_definition(messages, policy):
    """What each policy drops, said once more, without any bookkeeping."""
    ends = [i for i, m in enumerate(messages) if m.role in ("user", "developer")]
    out = []
    for place, message in enumerate(messages):
        old = bool(ends) and place < ends[-1]
        turn = [
            m for i, m in enumerate(messages) if not any(min(i, place) < e <= max(i, place) for e in ends)
        ]
        drop = {
            "v32": old,
            "keep_tool_turns": old and not any(m.calls for m in turn),
            "keep_all": False,
            "drop_all": True,
        }[policy]
        out.append(without_reasoning(message) if drop else message)
    return out


@EXAMPLES
@given(data=st.data())
def test_policies_agree_with_their_definitions(conversations, data):
    messages = data.draw(conversations)
    for policy in REASONING_POLICIES:
        assert view(messages, policy) == by_definition(messages, policy)


# --- cost


def long_conversation(size):
    messages = [system("s"), user("q")]
    while len(messages) < size:
        messages += step(f"s{len(messages)}", 1 + len(messages) % 3, size=200)
        if len(messages) % 5 == 0:
            messages += [assistant("so far", reasoning="hm"), user("go on")]
    return Transcript.of(messages)


def seconds(transcript, **arguments):
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        view(transcript, **arguments)
        best = min(best, time.process_time() - start)
    return best


def test_a_view_is_linear_in_the_length_and_of_a_thousand_messages_takes_milliseconds():
    """The bound is 5 ms on an idle machine; a busy one gets three times that here."""
    arguments = {"strategy": discard_75, "budget": 20_000}
    short, long = (seconds(long_conversation(size), **arguments) for size in (1_000, 4_000))
    assert short < 0.015
    assert long < 4 * 2.5 * short
