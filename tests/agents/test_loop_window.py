"""Windows in the loop: resets that happen once and are recorded, and summarisers that do not help."""

import itertools

import pytest

from dslib.agents import (
    LoopConfig,
    Scripted,
    Strategy,
    TokenCounter,
    discard_75,
    discard_all,
    run,
    summarise_with,
    summary,
    view,
)
from dslib.agents.context import SUMMARY
from dslib.agents.messages import assistant, system, tool_call, user
from dslib.agents.outcome import OutOfWindow

TASK = [system("search, then answer"), user("which one?")]
COUNT = TokenCounter(length=len, overhead=1)
_NUMBERS = itertools.count(100)


def search(query: str) -> str:
    """Search."""
    return f"results for {query} " + "x" * 60


TOOLS = [search]


def endless(messages, tools=()):
    """A model that always finds something new to search for."""
    return assistant(None, [tool_call("search", {"query": f"q{next(_NUMBERS)}"})], "why")


# --- the window


def test_a_reset_happens_once_is_recorded_and_the_context_fills_again():
    model = Scripted([endless], forever=True)
    config = LoopConfig(max_turns=12, window=600, strategy=discard_all)
    out = run(model, TOOLS, TASK, config, count=COUNT)
    assert [event.kind for event in out.transcript.events] == ["reset"] * out.resets
    lengths = [sum(m.role == "tool" for m in seen) for seen in model.seen]
    assert lengths[0] == 0
    assert max(lengths) > 2
    assert lengths.count(1) == out.resets + 1  # after each reset the newest result is there, and alone
    assert all(COUNT(seen) <= 480 for seen in model.seen)
    assert all(seen[:2] == TASK for seen in model.seen)
    for seen, place in zip(
        model.seen, [i for i, m in enumerate(out.transcript) if m.role == "assistant"], strict=True
    ):
        assert place == 2 or seen[-1] == out.transcript[place - 1]  # the newest result, every turn


@pytest.mark.parametrize("strategy", [discard_75, discard_all], ids=lambda s: s.name)
def test_a_view_of_the_plain_messages_finds_the_resets_of_the_run(strategy):
    config, model = LoopConfig(max_turns=20, window=700, strategy=strategy), Scripted([endless], forever=True)
    out = run(model, TOOLS, TASK, config, count=COUNT)
    assert out.resets > 1
    places = [place for place, m in enumerate(out.transcript) if m.role == "assistant"]
    for place, seen in zip(places, model.seen, strict=True):
        assert view(out.transcript.messages[:place], "v32", strategy, config.budget, COUNT) == seen


def test_without_a_strategy_the_run_ends_out_of_window():
    out = run(endless, TOOLS, TASK, LoopConfig(window=600), count=COUNT)
    assert isinstance(out.stop, OutOfWindow)
    assert "the window has 600" in str(out.stop)
    assert COUNT(list(out.transcript)) > 600


def test_a_window_smaller_than_what_has_to_stay_is_out_of_window():
    out = run(endless, TOOLS, TASK, LoopConfig(window=30, strategy=discard_all), count=COUNT)
    assert (out.reason, out.turns) == ("window", 0)


def test_a_strategy_of_ones_own():
    def keep_last_two(history):
        return history[:-2]

    out = run(endless, TOOLS, TASK, LoopConfig(max_turns=9, window=800, strategy=keep_last_two), count=COUNT)
    assert out.resets > 0
    assert {event.kind for event in out.transcript.events} == {"discard"}


# --- summaries


def run_with_summary(summariser, strategy=summary, turns=12, **limits):
    config = LoopConfig(max_turns=turns, window=700, strategy=strategy, **limits)
    return run(endless, TOOLS, TASK, config, count=COUNT, summariser=summariser)


def test_the_first_summarys_facts_are_seen_by_the_second_and_stay():
    given = []

    def summariser(messages):
        given.append(list(messages))
        return f"fact {len(given)}"

    out = run_with_summary(summariser)
    assert out.resets >= 2
    assert given[0][:2] == TASK
    assert [m.content for m in given[1] if m.name == SUMMARY] == ["fact 1"]
    assert [m.content for m in view(out.transcript) if m.name == SUMMARY][:2] == ["fact 1", "fact 2"]
    assert out.transcript.events[0].text == "fact 1"


def test_a_merging_strategy_leaves_one_summary():
    merging = Strategy("merging", summary.choose, "summary", summarises=True, merges=True)
    out = run_with_summary(lambda messages: "so far", merging)
    assert out.resets >= 2
    assert sum(m.name == SUMMARY for m in view(out.transcript)) == 1


@pytest.mark.parametrize(
    ("summariser", "words"),
    [
        (lambda m: "", "empty"),
        (lambda m: None, "empty"),
        (lambda m: "x" * 5000, "and replaces"),
        (lambda m: 1 / 0, "division"),
    ],
    ids=["answers nothing", "answers None", "answers more than it replaces", "fails"],
)
def test_a_summariser_that_does_not_help_leaves_the_history_and_ends_after_three_attempts(summariser, words):
    out = run_with_summary(summariser, turns=40)
    # window 700, trigger 560: there is room for one more step or two, not for ever
    assert out.reason in ("summary", "window")
    assert out.resets == 0
    assert out.transcript.events == ()
    notes = [note for note in out.transcript.notes if note.kind == "summary_failed"]
    assert words in notes[0].data["text"]
    out = run_with_summary(summariser, turns=40, summary_attempts=1)
    assert out.reason == "summary"
    assert words in str(out.stop)


def test_a_summariser_that_recovers_is_forgiven():
    tries = itertools.count()
    out = run_with_summary(lambda m: "" if next(tries) % 2 == 0 else "so far", summary_attempts=2)
    assert out.reason == "turns"
    assert out.resets > 1


def test_a_model_can_be_the_summariser():
    writer = Scripted(["we know a"], forever=True)
    out = run_with_summary(summarise_with(writer))
    assert out.transcript.events[0].text == "we know a"
    assert writer.seen[0][-1].role == "user"
    assert "Sum up" in writer.seen[0][-1].text
