"""OpenAI's chat schema: what goes in comes out, and what fits no role is refused by name."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dslib.agents import Message, Transcript, from_openai, results_as_user, to_openai
from dslib.agents.messages import (
    HARNESS,
    ToolCall,
    assistant,
    system,
    tool_call,
    tool_result,
    user,
    without_reasoning,
)

PLAIN = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "what is in "}, {"type": "text", "text": "here?"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "two searches at once",
        "refusal": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}},
            {"id": "b", "type": "function", "function": {"name": "search", "arguments": "{not json"}},
        ],
    },
    {"role": "tool", "tool_call_id": "b", "content": ""},
    {"role": "tool", "tool_call_id": "a", "content": "found"},
    {"role": "assistant", "content": "it is x"},
]


def test_plain_lists_come_back_as_they_went_in():
    assert to_openai(from_openai(PLAIN)) == PLAIN
    assert Transcript.from_openai(PLAIN).to_openai() == PLAIN
    assert json.loads(json.dumps(to_openai(from_openai(PLAIN)))) == PLAIN


def test_arguments_are_a_json_string_and_a_mapping_becomes_one():
    call = tool_call("search", {"q": "größer"})
    assert call.function.arguments == '{"q": "größer"}'
    found = ToolCall.model_validate({"id": "a", "function": {"name": "f", "arguments": {"n": 1}}})
    assert found.function.arguments == '{"n": 1}'
    assert assistant(calls=[call]).to_openai()["tool_calls"][0]["type"] == "function"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"role": "bot", "content": "x"}, "role"),
        ({"role": "user", "content": ""}, "user message is empty"),
        ({"role": "system"}, "system message is empty"),
        ({"role": "developer", "content": []}, "developer message is empty"),
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "tool", "tool_call_id": "a"}, "content"),
        ({"role": "user", "content": "x", "tool_call_id": "a"}, "belongs to role 'tool'"),
        ({"role": "user", "content": "x", "reasoning_content": "r"}, "belong to role 'assistant'"),
        (
            {"role": "assistant", "tool_calls": [tool_call("f"), tool_call("g")]},
            "two calls have the id 'call_0'",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "", "function": {"name": "f", "arguments": ""}}]}, "id"),
    ],
)
def test_what_fits_no_role_is_refused_by_name(fields, words):
    with pytest.raises(ValidationError, match=words):
        Message.model_validate(fields)
    with pytest.raises(ValueError, match="message 1"):
        from_openai([PLAIN[0], fields])


def test_an_assistant_may_say_nothing_and_says_so():
    assert Message(role="assistant").is_empty
    assert assistant(" \n").is_empty
    assert not assistant(reasoning="hm").is_empty
    assert not assistant(calls=[tool_call("f")]).is_empty
    assert tool_result("a", "").text == ""


def test_messages_never_change():
    with pytest.raises(ValidationError):
        user("x").content = "y"


def test_fields_of_an_endpoint_are_kept_and_usage_is_not_sent():
    message = Message(
        role="assistant", content="x", annotations=[1], usage={"prompt_tokens": 3, "completion_tokens": 1}
    )
    assert message.to_openai() == {"role": "assistant", "content": "x", "annotations": [1]}
    assert message.usage.prompt_tokens == 3


def test_dropping_the_thinking_leaves_everything_else():
    message = assistant(None, [tool_call("f")], "why")
    assert without_reasoning(message).to_openai() == {
        key: value for key, value in message.to_openai().items() if key != "reasoning_content"
    }
    assert without_reasoning(assistant(reasoning="only thought")).content == ""
    assert without_reasoning(assistant("x")) == assistant("x")


def test_a_message_without_its_thinking_is_what_pydantic_would_copy():
    message = Message(
        role="assistant", content="so", reasoning_content="why", tool_calls=(tool_call("f"),), refusal="kept"
    )
    bare = without_reasoning(message)
    assert bare == message.model_copy(update={"reasoning_content": None})
    assert bare.model_dump() == message.model_dump() | {"reasoning_content": None}
    assert message.reasoning_content == "why"
    assert bare.refusal == "kept"
    assert Message.model_validate_json(bare.model_dump_json()) == bare


def test_a_harness_without_tool_messages_writes_results_as_a_user():
    converted = results_as_user([system("s"), user("q"), *from_openai(PLAIN[2:])])
    assert [m.role for m in converted] == ["system", "user", "assistant", "user", "user", "assistant"]
    assert [m.name for m in converted[3:5]] == [HARNESS, HARNESS]
    assert converted[4].content == "[search] found"
    assert '<search>{"q": "x"}</search>' in converted[2].text
    assert converted[2].reasoning_content == "two searches at once"


@given(st.text(), st.text(), st.text(min_size=1))
def test_any_text_survives_a_round_trip(content, reasoning, arguments):
    message = assistant(content, [tool_call("f", arguments)], reasoning)
    assert Message.model_validate(json.loads(json.dumps(message.to_openai()))) == message
