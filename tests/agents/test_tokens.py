"""Token counts: everything that is sent counts, costs add up, and reports correct them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslib.agents import TokenCounter, openai_tools, shared_prefix
from dslib.agents.messages import assistant, tool_call, tool_result, user
from dslib.agents.tokens import quarter_bytes
from dslib.agents.tools import finish

SCHEMAS = tuple(openai_tools([finish]))


def test_calls_reasoning_ids_names_and_schemas_count():
    count = TokenCounter(length=len, overhead=0)
    assert count([user("abcd")]) == 4
    assert count([assistant("ab", reasoning="abc")]) == 2 + 1 + 3
    call = tool_call("find", '{"a":1}', "id")
    assert count([assistant(None, [call])]) == len("id\nfind\n" + '{"a":1}')
    assert count([tool_result("id", "xyz")]) == len("xyz\nid")
    assert count([user("abcd", name="harness")]) == len("abcd\nharness")
    assert count.with_tools(SCHEMAS)([]) == len(json.dumps(SCHEMAS[0]))
    assert TokenCounter(length=len, overhead=4)([user("a"), assistant(None, [call])]) == 4 + 1 + 8 + 15


def test_counting_the_content_alone_is_off_by_more_than_two():
    messages = [user("q" * 40), assistant(None, [tool_call("search", {"q": "x" * 40})], "r" * 200)]
    whole = TokenCounter().with_tools(SCHEMAS)(messages)
    assert whole / sum(quarter_bytes(m.text) for m in messages) > 2.4


def test_letters_outside_ascii_cost_their_bytes():
    assert quarter_bytes("思考") == 2
    assert quarter_bytes("") == 0
    assert quarter_bytes("abcde") == 2


def test_reports_correct_the_scale_by_the_ratio_of_their_sums():
    count = TokenCounter(length=len, overhead=0).with_tools(SCHEMAS)
    better = count.calibrated([(100, 150), (300, 350), (0, 9)])
    assert better.scale == 500 / 400
    assert better([]) >= count([]) * 1.25
    assert count.calibrated([]) is count
    twice = better.calibrated([(100, 200)])
    assert twice.scale == 2.5


@given(st.lists(st.text(max_size=30), max_size=8), st.floats(0.1, 9))
def test_costs_add_up_whatever_the_scale(texts, scale):
    count = TokenCounter(scale=scale, tools=SCHEMAS)
    messages = [assistant(text, reasoning=text) for text in texts]
    assert count(messages) - count([]) == sum(count([m]) - count([]) for m in messages)


@pytest.mark.parametrize("arguments", [{"overhead": -1}, {"scale": 0}, {"scale": float("inf")}])
def test_wrong_arguments_are_named(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        TokenCounter(**arguments)


def test_a_context_that_only_grows_finds_all_of_the_last_one_in_the_cache():
    count = TokenCounter(length=len, overhead=0)
    before = [user("q" * 10), assistant("a" * 10, reasoning="r" * 9)]
    assert shared_prefix(before, [*before, user("z" * 10)], count) == 30 / 40
    stripped = [before[0], assistant("a" * 10), user("z" * 10)]
    assert shared_prefix(before, stripped, count) == 10 / 30
    assert shared_prefix([], stripped, count) == 0
    assert shared_prefix(before, [], count) == 1
