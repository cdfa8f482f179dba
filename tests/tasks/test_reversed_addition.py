"""Reversed addition: sums by hand, one answer each, noise that is independent."""

import pytest
import torch

from dslib.tasks import EnumerableTask, ReversedAddition

TASK = ReversedAddition(problems=500, digits=3)


def ones(completions):
    return torch.ones_like(completions, dtype=torch.bool)


def number(digits):
    return int("".join(map(str, reversed(digits))))


def test_prompt_and_answer_read_backwards_are_a_sum():
    for index in range(20):
        first, second = TASK.problem(index)
        prompt, answer = TASK.prompts([index])[0].tolist(), TASK.correct_answers(index)
        assert number(prompt[:3]) == first
        assert prompt[3] == TASK.plus
        assert number(prompt[4:7]) == second
        assert prompt[7] == TASK.equals
        assert answer.shape == (1, 4)
        assert number(answer[0].tolist()) == first + second
    assert isinstance(TASK, EnumerableTask)


def test_one_answer_among_all_is_right():
    task = ReversedAddition(problems=3, digits=1)
    answers = task.answers(2)
    assert len(answers.unique(dim=0)) == task.answer_space == 100
    rewards = task.rewards([2] * 100, answers, ones(answers))
    assert torch.equal(answers[rewards.bool()], task.correct_answers(2))


def test_end_is_allowed_and_anything_else_is_wrong_in_its_place():
    good = TASK.correct_answers(0)[0].tolist()
    rows = [
        ([*good, TASK.end], 5, 1),
        ([*good, 7], 4, 1),
        ([*good, 7], 5, 0),
        ([*good, 0], 3, 0),
        ([*good, 0], 0, 0),
    ]
    completions = torch.tensor([row for row, _, _ in rows])
    mask = torch.arange(5) < torch.tensor([length for _, length, _ in rows]).unsqueeze(1)
    assert TASK.rewards([0] * 5, completions, mask).tolist() == [reward for _, _, reward in rows]
    assert TASK.rewards([0], completions[:1, :2], mask[:1, :2]).tolist() == [0]


def test_noise_hits_each_digit_by_itself():
    task = ReversedAddition(problems=4000, digits=2, noise=0.3)
    indices = torch.arange(4000)
    completions, mask = task.demonstrations(indices, torch.Generator().manual_seed(0))
    assert mask.all()
    right = completions == torch.cat([task.correct_answers(i) for i in range(4000)])
    expected = 0.7 + 0.3 / 10  # a random digit is right by chance
    assert right.double().mean(0).tolist() == pytest.approx([expected] * 3, abs=0.03)
    assert task.rewards(indices, completions, mask).mean().item() == pytest.approx(expected**3, abs=0.03)
    clean = ReversedAddition(problems=50, noise=0.0)
    assert clean.rewards(range(50), *clean.demonstrations(range(50), torch.Generator())).all()


def test_problems_differ_and_ranges_share_none():
    whole = ReversedAddition(problems=90, digits=1)
    first, second = ReversedAddition(problems=50, digits=1), ReversedAddition(problems=40, digits=1, skip=50)
    assert torch.equal(torch.cat((first._rows, second._rows)), whole._rows)
    assert len(whole._rows.unique(dim=0)) == 90
    with pytest.raises(ValueError, match="more than the 100 different ones found"):
        ReversedAddition(problems=101, digits=1).prompts([0])


def test_largest_sums_do_not_overflow():
    task = ReversedAddition(problems=5, digits=17)
    first, second = task.problem(0)
    assert number(task.correct_answers(0)[0].tolist()) == first + second


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"digits": 0}, "digits=0"),
        ({"digits": 18}, "digits=18"),
        ({"noise": -0.1}, "noise=-0.1"),
        ({"problems": 0}, "problems=0"),
        ({"skip": -1}, "skip=-1"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        ReversedAddition(**settings)


def test_answers_that_are_too_many_to_list():
    with pytest.raises(ValueError, match="digits=6 have 10000000 answers"):
        ReversedAddition(problems=1, digits=6).answers(0)
    with pytest.raises(IndexError):
        TASK.answers(500)
