"""Rewards: what counts as right, as formatted, as too long; nothing ever leaves its place."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslib.evaluation.answers import boxed_answer, same_answer
from dslib.rl import (
    EffortPenalty,
    Rubric,
    exact_answer,
    f1_times_format,
    format_tags,
    group_advantages,
    language_consistency,
    length_penalty,
    overlong_penalty,
    rubric_reward,
    split_thought,
)


def test_an_unparsable_answer_earns_0_and_stays_in_its_place():
    texts = [r"so \boxed{4}", "no idea", r"\boxed{5", r"\boxed{ 4 }", r"first \boxed{5}, no: \boxed{4}"]
    rewards = exact_answer(texts, ["4"] * 5, boxed_answer)
    assert rewards.tolist() == [1, 0, 0, 1, 1]
    assert rewards.dtype == torch.float32

    def number(text):
        return int(text)  # raises ValueError for a word

    assert exact_answer(["3", "three", "4"], [3, 3, 3], number).tolist() == [1, 0, 0]


def test_answers_of_tokens_are_compared_element_by_element_and_equality_may_be_ones_own():
    assert exact_answer([[1, 2], [1], (1, 2), []], [[1, 2]] * 4).tolist() == [1, 0, 1, 0]
    assert exact_answer([" yes\n", "Yes"], ["yes", "yes"]).tolist() == [1, 0]
    assert exact_answer(["2/4"], ["1/2"], equal=same_answer).tolist() == [1]
    assert exact_answer(["1", "a"], [1, 1]).tolist() == [0, 0]
    assert exact_answer([], []).shape == (0,)


FORMATS = {
    "<think>a</think>b": ("a", "b"),
    " <think> a </think>\n b ": ("a", "b"),
    "<think></think>b": ("", "b"),
    "<think>a</think>": None,
    "<think>a</think>  ": None,
    "a</think>b": None,
    "<think>a b": None,
    "x<think>a</think>b": None,
    "<think>a</think>b</think>c": None,
    "<think>a<think>b</think>c": None,
    "</think><think>b": None,
    "": None,
}


@pytest.mark.parametrize("text", FORMATS)
def test_format_is_one_thought_between_its_tags_and_an_answer_behind(text):
    assert split_thought(text) == FORMATS[text]
    assert format_tags([text, "<think>a</think>b"]).tolist() == [FORMATS[text] is not None, 1]


def test_format_of_token_ids_and_of_thoughts_that_the_prompt_has_opened():
    assert format_tags(
        [[7, 1, 2, 8, 3], [7, 8, 3], [7, 1, 8], [1, 8, 3], [7, 7, 8, 3], []], 7, 8
    ).tolist() == [*(1, 1, 0, 0, 0, 0)]
    assert split_thought((7, 1, 2, 8, 3), 7, 8) == ([1, 2], [3])
    assert split_thought([1, 2, 8, 3], None, 8) == ([1, 2], [3])
    assert split_thought("a</think>b", None) == ("a", "b")
    assert format_tags([]).shape == (0,)


def test_language_consistency_is_the_share_of_words_in_the_language():
    thoughts = ["We add 2 and 3", "We 加 two", "三加四", "x = 3", "1 + 2 = 3", "", "Мы add"]
    torch.testing.assert_close(
        language_consistency(thoughts), torch.tensor([1, 2 / 3, 0, 1, 0, 0, 0.5]), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(language_consistency(thoughts, "zh")[:3], torch.tensor([0, 1 / 3, 1]))
    assert language_consistency([[1, 2, 30, 40], []], lambda token: token < 10).tolist() == [0.5, 0]
    assert language_consistency(["", "We", "1 + 2"], empty=0.7).tolist() == pytest.approx([0.7, 1, 0.7])


def test_f1_counts_only_in_the_right_form_and_form_only_with_an_answer():
    texts = [
        "<think>x</think>the big red fox",
        "the big red fox",
        "<think>x</think>blue",
        "<think>x</think>Red, fox!",
    ]
    rewards = f1_times_format(texts, ["red fox"] * 4)
    assert rewards.tolist() == pytest.approx([2 / 3, 0, 0, 1])  # "the" is a word of its own
    assert f1_times_format([[7, 8, 1, 1, 2]], [[2, 3, 3]], 7, 8).tolist() == pytest.approx([1 / 2])
    assert f1_times_format(texts[:1], ["?"], f1=lambda found, right: 0.25).tolist() == [0.25]


def test_overlong_answers_lose_linearly_up_to_1():
    lengths = torch.tensor([[0, 79, 80], [81, 90, 95], [100, 101, 500]])
    expected = torch.tensor([[0, 0, 0], [-0.05, -0.5, -0.75], [-1, -1, -1]])
    torch.testing.assert_close(overlong_penalty(lengths, 100, 20), expected)
    assert overlong_penalty([90], 100, 20).tolist() == [-0.5]


@given(st.lists(st.integers(0, 300), min_size=2, max_size=5), st.integers(1, 100))
def test_a_longer_answer_never_loses_less(lengths, cache):
    lengths = sorted(lengths)
    for penalty in (
        overlong_penalty(lengths, 100, cache),
        length_penalty(lengths, 0.1, free=cache, maximum=3.0),
        EffortPenalty()(lengths, 60),
    ):
        assert (penalty <= 0).all()
        assert (penalty.diff() <= 0).all()


def test_length_costs_its_coefficient_a_token_past_what_is_free_up_to_a_maximum():
    assert length_penalty([0, 1, 4], 0.5).tolist() == [0, -0.5, -2]
    assert length_penalty([0, 1, 4], 0.5, free=1, maximum=1.0).tolist() == [0, 0, -1]


def test_effort_fades_the_penalty_exponentially():
    penalty = EffortPenalty(
        (25, 50, 75, 100), base=2.0, decay=0.5, normal_length=200.0, maximum=0.75
    )  # τ = 12.5
    coefficients = penalty.coefficient([25, 37.5, 50, 100])
    torch.testing.assert_close(coefficients, 2 * torch.tensor([0.0, -1, -2, -6]).exp())
    assert penalty.tau == 12.5
    found = penalty([50, 100, 100, 0], [25, 25, 50, 25])
    torch.testing.assert_close(found, -torch.tensor([0.5, 0.75, math.exp(-2), 0.0]))
    assert penalty(torch.full((2, 3), 10), torch.tensor([[25.0], [100]])).shape == (2, 3)
    assert EffortPenalty((10, 20, 60)).tau == 25  # the mean distance


def test_rubrics_are_weighted_and_each_prompt_has_its_own():
    scores = {("a", "x", "short"): 1.0, ("a", "x", "kind"): 0.0, ("b", "y", "true"): 0.5}
    rubrics = [[Rubric("short", 3.0), Rubric("kind")], [Rubric("true")]]
    rewards = rubric_reward(lambda *key: scores[key], ["a", "b"], ["x", "y"], rubrics)
    assert rewards.tolist() == [0.75, 0.5]


def test_a_judge_that_cannot_tell_leaves_one_sample_out_and_not_its_group():
    def judge(prompt, completion, criterion):
        return None if completion == "?" else float(completion)

    rewards = rubric_reward(judge, ["p"] * 3, ["1", "?", "0"], [[Rubric("good")]] * 3)
    assert rewards.isnan().tolist() == [False, True, False]
    with pytest.warns(RuntimeWarning, match="1 of 3"):
        advantages = group_advantages(rewards.unsqueeze(0), "grpo_no_std")
    assert advantages.tolist() == [[0.5, 0, -0.5]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: exact_answer(["a"], ["a", "b"]), "2 answers for 1 completions"),
        (lambda: f1_times_format(["a", "b"], ["a"]), "1 answers for 2 completions"),
        (lambda: language_consistency(["a"], "fr"), "language='fr'"),
        (lambda: language_consistency([""], empty=2.0), "empty=2.0 is a share"),
        (lambda: language_consistency([""], empty=float("nan")), "empty=nan is a share"),
        (lambda: overlong_penalty([1], 10, 0), "cache=0"),
        (lambda: overlong_penalty([1], 10, 11), "cache=11"),
        (lambda: overlong_penalty([-1], 10, 2), "lengths goes down to -1"),
        (lambda: length_penalty([1], -0.1), "coefficient=-0.1"),
        (lambda: length_penalty([1], math.nan), "coefficient=nan"),
        (lambda: length_penalty([1], 0.1, free=-1), "free=-1"),
        (lambda: EffortPenalty((50,)), r"levels=\(50,\)"),
        (lambda: EffortPenalty((50, 25)), r"levels=\(50, 25\)"),
        (lambda: EffortPenalty(decay=0.0), "decay=0.0"),
        (lambda: EffortPenalty()([-2], 50), "lengths goes down to -2"),
        (lambda: EffortPenalty()([2], 200), "efforts holds 200; levels go from 25 to 100"),
        (lambda: EffortPenalty().coefficient([50, float("nan")]), "efforts holds nan"),
        (lambda: Rubric("good", 0.0), "weight=0.0 of 'good'"),
        (
            lambda: rubric_reward(lambda *_: 2.0, ["p"], ["c"], [[Rubric("good")]]),
            "judge gave 2.0 for 'good'",
        ),
        (lambda: rubric_reward(lambda *_: 1.0, ["p"], ["c"], [[]]), r"rubrics\[0\] is empty"),
        (lambda: rubric_reward(lambda *_: 1.0, ["p"], ["c"], []), "0 rubrics for 1 completions"),
    ],
)
def test_bad_input_is_refused_with_its_name_and_value(call, words):
    with pytest.raises(ValueError, match=words):
        call()
