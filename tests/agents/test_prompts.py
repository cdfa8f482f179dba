"""Cold start: prompts that ask for thinking and calls at once, and what counts as having done it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslib.agents import (
    cold_start_prompt,
    interleaved_share,
    interleaving_fault,
    openai_tools,
    parse_completion,
)
from dslib.agents.messages import assistant, system, tool_call, tool_result, user
from dslib.agents.prompts import REASONING_PROMPT, render_message, tool_prompt
from dslib.agents.tools import finish

TOOLS = openai_tools([finish])
CALL = tool_call("finish", {"answer": "x"})
GOOD = [user("q"), assistant(None, [CALL], "so"), tool_result(CALL, "x"), assistant("x", reasoning="thus")]


def test_the_prompt_of_both_contains_the_tags_of_one_and_the_tools_of_the_other():
    prompt = cold_start_prompt(TOOLS, max_calls=20)
    assert tool_prompt(TOOLS) in prompt
    assert "at most 20 calls" in prompt
    for tag in ("<think>", "</think>"):
        assert tag in prompt
        assert tag in REASONING_PROMPT
        assert tag not in tool_prompt(TOOLS)
    with pytest.raises(ValueError, match="tools is empty"):
        cold_start_prompt([])


def test_thinking_calls_and_words_are_told_apart():
    text = (
        '<think>two\nlines</think>\nLet me see.\n<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'
    )
    message = parse_completion(f'{text}<tool_call>{{"name": "g"}}</tool_call>')
    assert (message.reasoning_content, message.content) == ("two\nlines", "Let me see.")
    assert [(c.function.name, c.function.arguments, c.id) for c in message.calls] == [
        ("f", '{"n": 1}', "call_0"),
        ("g", "{}", "call_1"),
    ]


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("", None, None, 0),
        ("just words", None, "just words", 0),
        ("<think>never ends", "never ends", None, 0),
        ("first words <think>late</think>", None, "first words <think>late</think>", 0),
        ("<think>a</think>b</think>", "a", "b</think>", 0),
        (
            '<tool_call>{"name": "f"} and more',
            None,
            None,
            1,
        ),  # the first value is decoded, the end tag missing
        ("<tool_call>f(1)</tool_call>", None, "<tool_call>f(1)</tool_call>", 0),
        ('<tool_call>{"name": ""}</tool_call>', None, '<tool_call>{"name": ""}</tool_call>', 0),
        ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', None, None, None),
        ("<think><tool_call>{}</tool_call></think>x", "<tool_call>{}</tool_call>", "x", 0),
    ],
)
def test_completions_of_every_form(text, reasoning, content, calls):
    message = parse_completion(text)
    assert message.reasoning_content == reasoning
    if calls is not None:
        assert (message.content, len(message.calls)) == (content, calls)


def test_a_prompt_that_opened_the_tag():
    message = parse_completion("so</think>x", opened=True)
    assert (message.reasoning_content, message.content) == ("so", "x")


@given(st.text())
def test_nothing_raises(text):
    parse_completion(text)
    parse_completion(f"<think>{text}</think><tool_call>{text}</tool_call>")


def test_what_is_rendered_is_read_back():
    message = assistant("words", [CALL], "thought")
    assert parse_completion(render_message(message)) == message
    assert render_message(user("q")) == "q"


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        (GOOD, None),
        (GOOD[:-1], None),  # a call that ended the run
        ([system("s"), user("q"), assistant("x", reasoning="r")], "no tool was called"),
        ([*GOOD[:-1], assistant("x")], "message 3 does not think"),
        ([*GOOD[:-1], assistant("x", reasoning=" ")], "message 3 does not think"),
        ([*GOOD[:-1], assistant(" ", reasoning="r")], "there is no answer"),
        ([*GOOD[:-1], assistant("</think>x", reasoning="r")], "message 3 has tags in its text"),
        (GOOD[:2], "the calls ['call_0'] have no result"),
        ([*GOOD[:2], user("q")], "message 2 comes before the results of ['call_0']"),
        (
            [user("q"), assistant(None, [tool_call("finish", "{")], "r"), *GOOD[2:]],
            "message 1: the arguments of finish are not JSON",
        ),
        (
            [user("q"), assistant(None, [tool_call("grep")], "r"), *GOOD[2:]],
            "message 1 calls 'grep', which is no tool",
        ),
    ],
)
def test_what_makes_a_trajectory_interleaved(messages, fault):
    found = interleaving_fault(messages, ["finish"])
    assert found == fault if fault is None else found.startswith(fault)


def test_the_share_of_valid_trajectories():
    assert interleaved_share([GOOD, GOOD[:2], GOOD, [user("q")]]) == 0.5
    with pytest.raises(ValueError, match="trajectories is empty"):
        interleaved_share([])
