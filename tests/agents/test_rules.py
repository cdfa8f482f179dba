"""Rules of deployed prompts, at their borders."""

import pytest

from dslib.agents import violations
from dslib.agents.messages import HARNESS, assistant, tool_call, tool_result, user
from dslib.agents.rules import rules_of


def act(name, result="ok", **more):
    call = tool_call(name, {}, more.get("id", "c"))
    return [assistant(None, [call]), tool_result(call, result)]


def failing(name, times):
    return [m for _ in range(times) for m in act(name, "Error: down")]


def broken(messages, rule):
    return violations(messages, [rule])[rule]


@pytest.mark.parametrize(
    ("messages", "times"),
    [
        ([*act("think"), *act("think"), *act("search")], 0),
        ([*act("think"), *act("think"), *act("think")], 1),
        ([*act("think"), *act("search"), *act("think"), *act("think")], 0),
        ([*act("think"), *act("think"), user("go on"), *act("think")], 0),
        ([*act("sequentialthinking"), assistant("hm"), user("no call", HARNESS), assistant("hm")], 1),
        ([*act("think"), *act("think"), *act("think"), *act("think")], 2),
        ([assistant(None, [tool_call("think", {}, str(i)) for i in range(3)])], 1),
    ],
)
def test_never_three_thoughts_in_a_row(messages, times):
    assert broken([user("q"), *messages], "no_three_thoughts") == times


@pytest.mark.parametrize(
    ("messages", "times"),
    [
        ([*failing("search", 3), *act("search")], 0),  # three failures are not more than three
        ([*failing("search", 4), *act("search")], 1),
        ([*failing("search", 4), *act("open")], 0),
        ([*failing("search", 3), *act("search"), *failing("search", 3), *act("search")], 0),
        ([*failing("search", 2), *failing("open", 4), *failing("search", 2), *act("search")], 1),
        ([*failing("search", 6)], 2),
    ],
)
def test_after_the_fourth_failure_another_tool(messages, times):
    assert broken([user("q"), *messages], "another_tool_after_failures") == times


def test_every_answer_is_a_call():
    assert broken([user("q"), *act("search"), assistant("Berlin")], "answer_by_tool") == 1
    assert broken([user("q"), *act("search"), *act("finish")], "answer_by_tool") == 0


def test_rules_of_ones_own_and_unknown_ones():
    def polite(messages, place):
        return None if "please" in messages[place].text else "say please"

    assert violations([user("q"), assistant("x"), assistant("please")], [polite]) == {"polite": 1}
    assert violations([]) == {"no_three_thoughts": 0, "another_tool_after_failures": 0, "answer_by_tool": 0}
    with pytest.raises(ValueError, match="'politeness' is unknown"):
        rules_of(["politeness"])
