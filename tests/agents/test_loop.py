"""The loop: every way to end, budgets, resets that happen once, rules, and models that misbehave."""

import itertools

import pytest

from dslib.agents import (
    LoopConfig,
    Message,
    Scripted,
    TokenCounter,
    Transcript,
    discard_all,
    finish,
    parallel_fewest_step,
    run,
    summary,
    tool,
    violations,
)
from dslib.agents.loop import _canonical
from dslib.agents.messages import HARNESS, assistant, system, tool_call, user
from dslib.agents.models import EndpointTimeout
from dslib.agents.outcome import Finished, Stop

TASK = [system("search, then answer"), user("which one?")]
COUNT = TokenCounter(length=len, overhead=1)


def search(query: str) -> str:
    """Search."""
    if query.startswith("bad"):
        raise ValueError("no such index")
    return f"results for {query} " + "x" * 60


def think(thought: str) -> str:
    """Think."""
    return "noted"


TOOLS = [search, think, tool(finish, ends=True)]


def searches(*queries):
    return assistant(None, [tool_call("search", {"query": q}, f"c{i}") for i, q in enumerate(queries)], "why")


def answers(text="Berlin"):
    return assistant(None, [tool_call("finish", {"answer": text}, "f")])


def endless(messages, tools=()):
    """A model that always finds something new to search for."""
    return searches(f"q{sum(len(m.calls) for m in messages)} {len(messages)} {next(_NUMBERS)}")


_NUMBERS = itertools.count(100)


def texts(transcript, role="tool"):
    return [m.text for m in transcript if m.role == role]


# --- ends


def test_searches_then_answers_by_a_tool():
    out = run(Scripted([searches("a", "b"), answers()]), TOOLS, TASK)
    assert (out.reason, out.answer, out.turns, out.calls) == ("finished", "Berlin", 2, 3)
    assert out.finished
    assert [m.role for m in out.transcript] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
    ]
    assert out.transcript.notes[-1].data["reason"] == "finished"


def test_words_without_a_call_are_the_answer():
    out = run(Scripted(["Berlin"]), TOOLS, TASK)
    assert (out.reason, out.answer, out.turns) == ("finished", "Berlin", 1)


def test_calls_beside_and_after_the_end_have_results_too():
    both = assistant(
        None,
        [
            tool_call("search", {"query": "a"}, "1"),
            tool_call("finish", {"answer": "x"}, "2"),
            tool_call("search", {"query": "b"}, "3"),
        ],
    )
    out = run(Scripted([both]), TOOLS, TASK)
    assert out.answer == "x"
    assert out.transcript.open_calls == ()
    assert texts(out.transcript)[2] == "Skipped: the run has ended"


def test_a_finish_that_fails_does_not_finish():
    wrong = assistant(None, [tool_call("finish", {"reply": "x"}, "f")])
    out = run(Scripted([wrong, answers()]), TOOLS, TASK)
    assert (out.turns, out.answer) == (2, "Berlin")


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"max_turns": 3}, "turns"), ({"max_tokens": 600}, "tokens"), ({"max_seconds": 5.0}, "time")],
)
def test_turns_tokens_and_time_are_bounded(limits, reason):
    clock = itertools.count()
    out = run(endless, TOOLS, TASK, LoopConfig(**limits), clock=lambda: next(clock))
    assert out.reason == reason
    assert out.answer is None
    assert not out.finished
    assert out.transcript.open_calls == ()
    assert out.turns <= 10


def test_time_that_runs_out_between_calls_skips_the_rest_but_answers_each():
    times = iter([0.0, 0.0, 0.0, 9.0, 9.0, 9.0, 9.0, 9.0])
    out = run(
        Scripted([searches("a", "b")]), TOOLS, TASK, LoopConfig(max_seconds=5), clock=lambda: next(times)
    )
    assert out.reason == "time"
    assert texts(out.transcript)[1].startswith("Skipped")


def test_tokens_are_those_reported_else_those_counted():
    said = Message(role="assistant", content="x", usage={"prompt_tokens": 70, "completion_tokens": 5})
    out = run(Scripted([said]), TOOLS, TASK)
    assert (out.prompt_tokens, out.completion_tokens) == (70, 5)
    out = run(Scripted(["x"]), TOOLS, TASK, count=COUNT)
    assert (out.prompt_tokens, out.completion_tokens) == (COUNT(TASK), COUNT([assistant("x")]))


def test_counting_is_corrected_by_what_the_endpoint_reports():
    """By our count everything fits; by the endpoint's it is four times as much."""

    def model(messages, tools):
        fields = searches(str(next(_NUMBERS))).to_openai()
        return Message(**fields, usage={"prompt_tokens": 4 * COUNT(messages), "completion_tokens": 1})

    config = LoopConfig(max_turns=6, window=900, strategy=discard_all)
    assert run(model, TOOLS, TASK, config, count=COUNT).resets > 0
    assert run(endless, TOOLS, TASK, config, count=COUNT).resets == 0


# --- no progress


def test_a_model_that_repeats_itself_for_ever_is_stopped():
    out = run(Scripted([searches("a")], forever=True), TOOLS, TASK, LoopConfig(no_progress=3))
    assert (out.reason, out.turns) == ("no_progress", 4)


def test_going_round_in_circles_is_no_progress_either():
    turns = itertools.cycle("abc")
    out = run(lambda m, t: searches(next(turns)), TOOLS, TASK, LoopConfig(no_progress=3))
    assert (out.reason, out.turns) == ("no_progress", 6)


def test_saying_nothing_for_ever_is_no_progress_and_once_is_forgiven():
    out = run(Scripted([Message(role="assistant")], forever=True), TOOLS, TASK)
    assert out.reason == "no_progress"
    out = run(Scripted([assistant(""), answers()]), TOOLS, TASK)
    assert (out.turns, out.answer) == (2, "Berlin")
    assert out.transcript[3].name == HARNESS


def test_a_result_that_changes_is_progress():
    counter = itertools.count()

    def draw() -> int:
        """Draw."""
        return next(counter)

    out = run(
        Scripted([assistant(None, [tool_call("draw")])], forever=True), [draw], TASK, LoopConfig(max_turns=9)
    )
    assert out.reason == "turns"


def test_spaces_and_order_in_arguments_make_no_new_call():
    assert _canonical('{"a": 1, "b": 2}') == _canonical('{"b":2,"a":1} ok')
    assert _canonical("{no") == "{no"


def test_after_a_reset_what_was_seen_may_be_seen_again():
    """The context no longer holds it; turns bound what remains."""
    turns = itertools.cycle("ab")
    config = LoopConfig(max_turns=20, window=330, strategy=discard_all, no_progress=4)
    out = run(lambda m, t: searches(next(turns)), TOOLS, TASK, config, count=COUNT)
    assert out.reason == "turns"
    assert out.resets > 3


# --- bad calls become observations


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (tool_call("nothing", {}), "there is no tool 'nothing'"),
        (tool_call("search", "{oops"), "are not JSON"),
        (tool_call("search", {"q": 1}), "query: Field required"),
        (tool_call("search", {"query": "bad"}), "search raised ValueError: no such index"),
    ],
)
def test_bad_calls_are_observed_and_the_run_goes_on(call, words):
    out = run(Scripted([assistant(None, [call]), answers()]), TOOLS, TASK)
    assert out.answer == "Berlin"
    assert words in texts(out.transcript)[0]


# --- models that fail


@pytest.mark.parametrize(
    "said",
    [EndpointTimeout("no answer in 1 s"), user("hello"), 3, {"role": "assistant", "tool_calls": [{}]}],
    ids=["timeout", "wrong role", "no message", "malformed"],
)
def test_a_model_without_a_usable_answer_ends_the_run_and_nothing_is_lost(said):
    out = run(Scripted([searches("a"), said]), TOOLS, TASK)
    assert out.reason == "model"
    assert len(out.transcript) == 4
    assert run(Scripted([answers()]), TOOLS, out.transcript).answer == "Berlin"  # and it can go on


def test_a_script_that_ends_is_a_model_that_fails():
    out = run(Scripted([searches("a")]), TOOLS, TASK)
    assert (out.reason, str(out.stop)) == ("model", "ScriptEnded: the script has 1 answers; this is call 2")


def test_a_bug_in_the_model_is_raised_with_everything_on_disk(tmp_path):
    transcript = Transcript(tmp_path / "t.jsonl")
    transcript.extend(TASK)
    with pytest.raises(ZeroDivisionError):
        run(Scripted([searches("a"), ZeroDivisionError()]), TOOLS, transcript)
    assert len(Transcript.load(tmp_path / "t.jsonl")) == 4


def test_calls_that_a_crash_left_open_are_answered_first():
    transcript = Transcript.of([*TASK, searches("a", "b")])
    out = run(Scripted([answers()]), TOOLS, transcript)
    assert out.answer == "Berlin"
    assert texts(transcript)[:2] == ["Error: interrupted; it may or may not have run"] * 2


# --- rules


def thinks(place):
    return assistant(None, [tool_call("think", {"thought": f"{place}"})])


def test_rules_are_counted_and_change_nothing():
    script = [thinks(0), thinks(1), thinks(2), thinks(3), searches("a"), "Berlin"]
    out = run(Scripted(script), TOOLS, TASK, LoopConfig(rules=("no_three_thoughts", "answer_by_tool")))
    assert out.violations == {"no_three_thoughts": 2, "answer_by_tool": 1}
    assert out.answer == "Berlin"
    assert violations(out.transcript) == {**out.violations, "another_tool_after_failures": 0}


def test_enforced_rules_are_answered_with_the_complaint():
    script = [thinks(0), thinks(1), thinks(2), searches("a"), "Berlin", answers()]
    config = LoopConfig(rules=("no_three_thoughts", "answer_by_tool"), enforce=True)
    out = run(Scripted(script), TOOLS, TASK, config)
    assert texts(out.transcript)[2] == "Refused: 3 thoughts in a row; act before you think again"
    assert out.transcript[-3].name == HARNESS
    assert (out.answer, out.turns) == ("Berlin", 6)


def test_limits_of_ones_own_are_named():
    for arguments, words in (
        ({"max_turns": 0}, "max_turns=0"),
        ({"max_seconds": 0}, "max_seconds=0"),
        ({"trigger": 1.5}, "trigger=1.5"),
        ({"reasoning": "v33"}, "v32"),
        ({"strategy": discard_all}, "needs window"),
        ({"rules": ("no_rule",)}, "answer_by_tool"),
    ):
        with pytest.raises(ValueError, match=words):
            LoopConfig(**arguments)
    with pytest.raises(ValueError, match="transcript is empty"):
        run(Scripted(["x"]), TOOLS, [])
    with pytest.raises(ValueError, match="needs a summariser"):
        run(Scripted(["x"]), TOOLS, TASK, LoopConfig(window=100, strategy=summary))
    assert LoopConfig(window=1000, strategy=discard_all).budget == 800
    assert LoopConfig(window=1000).budget == 1000


# --- N runs


@pytest.mark.parametrize("threads", [1, 3])
def test_of_parallel_runs_the_finished_one_with_the_fewest_turns_is_taken(threads):
    lengths = [3, 1, 2, 1]

    def episode(index):
        script = [searches(str(i)) for i in range(lengths[index])]
        last = [answers(f"answer {index}")] if index != 1 else []  # the second never answers
        return run(Scripted([*script, *last]), TOOLS, TASK)

    found = parallel_fewest_step(episode, 4, threads)
    assert (found.chosen.answer, found.chosen.turns) == ("answer 3", 2)
    assert found.turns == 4 + 2 + 3 + 2
    assert not parallel_fewest_step(lambda i: run(Scripted([]), TOOLS, TASK), 2).chosen.finished
    with pytest.raises(ValueError, match="n=0"):
        parallel_fewest_step(episode, 0)


def test_a_stop_has_a_reason_of_one_word():
    reasons = [kind.reason for kind in Stop.__subclasses__()]
    assert len(set(reasons)) == len(reasons) == 8
    assert issubclass(Finished, Stop)
