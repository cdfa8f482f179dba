"""Countdown: arithmetic by hand, every answer there is, and completions of every wrong form."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslib.tasks import Countdown, EnumerableTask, Task
from dslib.tasks.countdown import from_left_to_right

TASK = Countdown(problems=30, numbers=3, largest=6, digits=2)
FIVE = Countdown(problems=20)


def ones(completions):
    return torch.ones_like(completions, dtype=torch.bool)


def by_hand(tokens, task):
    """Python's own arithmetic on an answer's text."""
    words = task.text(tokens).split()
    value = int(words[0])
    for operator, number in zip(words[1::2], words[2::2], strict=True):
        value = eval(f"({value}) {operator.replace('×', '*')} {number}")
    return value


def test_evaluates_from_left_to_right_without_precedence():
    plus, minus, times = 0, 1, 2
    assert from_left_to_right(torch.tensor([2, 3, 4]), torch.tensor([plus, times])) == 20
    assert from_left_to_right(torch.tensor([2, 3, 4]), torch.tensor([minus, times])) == -4


def test_sizes_and_layout_of_the_recipe():
    assert FIVE.answer_space == 9720
    assert FIVE.max_new_tokens == 9
    assert FIVE.vocab_size == 1 + 25 + 3 + 1 + 10
    prompt, problem = FIVE.prompts([3])[0], FIVE.problem(3)
    assert prompt.shape == (9,)
    numbers = " ".join(map(str, problem.numbers))
    assert str(problem) == f"{numbers} = {problem.target}"
    assert FIVE.text(prompt) == f"{numbers} = {problem.target:03d}"
    assert prompt[:5].tolist() == list(problem.numbers)
    assert isinstance(FIVE, EnumerableTask)
    assert isinstance(FIVE, Task)


def test_problems_lie_within_their_bounds():
    task = Countdown(problems=600, numbers=4, largest=7, digits=2)
    rows = task._rows
    assert ((rows[:, :4] >= 1) & (rows[:, :4] <= 7)).all()
    assert (rows[:, :4].sort(1).values.diff(dim=1) > 0).all()  # all different
    assert rows[:, 4].min() >= 1
    assert rows[:, 4].max() <= 99
    assert set(rows[:, :4].unique().tolist()) == set(range(1, 8))


def test_every_answer_is_listed_once_and_the_correct_ones_are_those_that_reach_the_target():
    for index in range(5):
        answers = TASK.answers(index)
        assert answers.shape == (54, 5)
        assert len(answers.unique(dim=0)) == TASK.answer_space == 54
        assert TASK.well_formed([index] * 54, answers, ones(answers)).all()
        right = [by_hand(answer, TASK) == TASK.problem(index).target for answer in answers]
        rewards = TASK.rewards([index] * 54, answers, ones(answers))
        assert rewards.dtype == torch.float32
        assert rewards.bool().tolist() == right
        assert torch.equal(TASK.correct_answers(index), answers[right])
        assert any(right)


def test_no_other_text_is_right():
    task = Countdown(problems=1, numbers=2, largest=2, digits=1)
    grid = torch.cartesian_prod(*[torch.arange(task.vocab_size)] * 3)
    rewards = task.rewards([0] * len(grid), grid, ones(grid))
    assert torch.equal(grid[rewards.bool()].unique(dim=0), task.correct_answers(0).unique(dim=0))
    assert task.well_formed([0] * len(grid), grid, ones(grid)).sum() == task.answer_space


def test_wrong_forms_get_nothing_and_shift_nobody():
    good = TASK.correct_answers(0)[0]
    n = good.tolist()
    end = TASK.end
    rows = [
        ([*n, end], 6, 1),  # an end after the answer
        ([*n, 9], 5, 1),  # what follows was not generated
        ([*n, n[0]], 6, 0),  # one token too many
        ([*n[:-1], end, 0], 5, 0),  # unfinished
        ([n[0], n[1], n[0], n[3], n[4], 0], 5, 0),  # a number twice
        ([n[1], n[0], *n[2:], 0], 5, 0),  # operator first
        ([*n, 0], 4, 0),  # cut off
        ([*n, 0], 0, 0),  # nothing
        ([10**9, -(10**9), *n[2:], 0], 5, 0),  # no tokens at all
    ]
    completions = torch.tensor([row for row, _, _ in rows])
    mask = torch.arange(6) < torch.tensor([length for _, length, _ in rows]).unsqueeze(1)
    rewards = TASK.rewards([0] * len(rows), completions, mask)
    assert rewards.tolist() == [reward for _, _, reward in rows]
    poisoned = completions.masked_fill(~mask, -(2**62))
    assert torch.equal(TASK.rewards([0] * len(rows), poisoned, mask), rewards)


def test_a_completion_shorter_than_any_answer_is_wrong():
    completions = torch.tensor([[1], [2]])
    assert TASK.rewards([0, 1], completions, ones(completions)).tolist() == [0, 0]
    empty = torch.empty(2, 0, dtype=torch.long)
    assert TASK.rewards([0, 1], empty, ones(empty)).tolist() == [0, 0]
    assert TASK.rewards([], empty[:0], ones(empty[:0])).shape == (0,)


def test_demonstrations_are_well_formed_and_the_stated_share_is_random():
    task = Countdown(problems=2000)
    indices = torch.arange(2000)
    for share, least, most in ((0.0, 1.0, 1.0), (0.4, 0.55, 0.65), (1.0, 0.0, 0.02)):
        shown = Countdown(problems=2000, random_share=share)
        completions, mask = shown.demonstrations(indices, torch.Generator().manual_seed(0))
        assert mask.all()
        assert task.well_formed(indices, completions, mask).all()
        assert least <= task.rewards(indices, completions, mask).mean() <= most


def test_shown_answers_are_spread_over_the_correct_ones():
    # Of one multiset and target, problems of other seeds show other expressions: all of them in the end.
    seen = {}
    for seed in range(40):
        task = Countdown(problems=8, seed=seed, numbers=2, largest=3, digits=1, random_share=0.0)
        for index, answer in enumerate(task.demonstrations(range(8), torch.Generator())[0].tolist()):
            problem = task.problem(index)
            key = (tuple(sorted(problem.numbers)), problem.target)
            seen.setdefault(key, set()).add(tuple(answer))
    task = Countdown(problems=8, numbers=2, largest=3, digits=1)
    for index in range(8):
        problem = task.problem(index)
        key = (tuple(sorted(problem.numbers)), problem.target)
        assert seen[key] == {tuple(answer) for answer in task.correct_answers(index).tolist()}


def test_ranges_of_one_seed_share_no_problem_in_any_order_and_other_seeds_differ():
    def keys(task):
        rows = task._rows
        return {(*sorted(row[:3]), row[3]) for row in rows.tolist()}

    settings = {"numbers": 3, "largest": 6, "digits": 2}
    whole = Countdown(problems=100, **settings)
    first, second = Countdown(problems=60, **settings), Countdown(problems=40, skip=60, **settings)
    assert torch.equal(torch.cat((first._rows, second._rows)), whole._rows)
    assert len(keys(whole)) == 100
    assert not keys(first) & keys(second)
    assert not torch.equal(Countdown(problems=60, seed=1, **settings)._rows, first._rows)


def test_equal_fields_are_equal_problems():
    assert Countdown(problems=30, numbers=3, largest=6, digits=2) == TASK
    assert torch.equal(
        Countdown(problems=30, numbers=3, largest=6, digits=2).prompts(range(30)), TASK.prompts(range(30))
    )


def test_prompts_can_be_written_to_without_changing_the_task():
    before = TASK.prompts([0]).clone()
    TASK.prompts([0]).zero_()
    assert torch.equal(TASK.prompts([0]), before)


@given(st.lists(st.integers(0, 29), max_size=8))
def test_any_indices_in_any_order(indices):
    prompts = TASK.prompts(indices)
    assert prompts.shape == (len(indices), 6)
    for row, index in zip(prompts, indices, strict=True):
        assert torch.equal(row, TASK.prompts([index])[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"problems": 0}, "problems=0"),
        ({"skip": -1}, "skip=-1"),
        ({"numbers": 1}, "numbers=1 must be 2 to 6"),
        ({"numbers": 5, "largest": 4}, "largest=4 must be 5 to 99"),
        ({"digits": 0}, "digits=0"),
        ({"random_share": 1.5}, "random_share=1.5"),
        ({"random_share": float("nan")}, "random_share=nan"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Countdown(**settings)


def test_more_problems_than_there_are():
    with pytest.raises(ValueError, match=r"problems=1000 after skip=0 are more than the \d+ different ones"):
        len(Countdown(problems=1000, numbers=2, largest=3, digits=1).prompts([0]))


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        ([30], IndexError, "problem 30 does not exist; there are 30"),
        ([-1], IndexError, "problem -1"),
        ([0.5], TypeError, "whole numbers"),
        ([True], TypeError, "whole numbers"),
        ([[0]], ValueError, "one dimension"),
    ],
)
def test_unknown_problems_are_named(indices, error, message):
    with pytest.raises(error, match=message):
        TASK.prompts(indices)


TWO = torch.ones(2, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("completions", "mask", "error", "message"),
    [
        (TWO, ones(TWO)[:, :4], ValueError, "must both be"),
        (TWO[:1], ones(TWO)[:1], ValueError, "n=2 indices"),
        (TWO[0], ones(TWO)[0], ValueError, "must both be"),
        (TWO.double(), ones(TWO), TypeError, "int64"),
        (TWO, TWO, TypeError, "bool"),
        (
            TWO,
            torch.tensor([[True] * 5, [True, False, True, True, True]]),
            ValueError,
            "mask of completion 1 has a gap",
        ),
    ],
)
def test_completions_of_another_shape_are_refused(completions, mask, error, message):
    with pytest.raises(error, match=message):
        TASK.rewards([0, 1], completions, mask)


def test_text_of_no_token_is_refused():
    with pytest.raises(ValueError, match="vocab_size=21"):
        TASK.text([21])
