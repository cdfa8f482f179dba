"""Pointer chasing: paths by hand, thoughts checked node by node, and rewards for the answer alone."""

import pytest
import torch

from dslib.tasks import EnumerableTask, PointerChasing, Task

TASK = PointerChasing(problems=300)


def read(index, words, length=None):
    """The scratchpad of one completion; its words are numbers or "think", "think_end", "end"."""
    tokens = [getattr(TASK, word) if isinstance(word, str) else word for word in words]
    completions = torch.tensor([tokens], dtype=torch.long)
    mask = torch.arange(len(tokens)) < (len(tokens) if length is None else length)
    (pad,) = TASK.read([index], completions, mask[None])
    assert TASK.rewards([index], completions, mask[None]).item() == float(pad.correct)
    return pad


def said(answer, *thought):
    return ["think", *thought, "think_end", answer, "end"]


def long_problem():
    """The index of a problem of eight hops on a cycle of eight."""
    return next(i for i in range(300) if len(set(TASK.problem(i).path)) == 8)


def test_path_follows_the_permutation():
    for index in range(30):
        problem = TASK.problem(index)
        assert sorted(problem.f) == list(range(8))
        assert 2 <= problem.hops == len(problem.path) <= 8
        node = problem.start
        for expected in problem.path:
            node = problem.f[node]
            assert node == expected
        assert problem.answer == node


def test_prompt_is_the_permutation_the_start_and_the_hops():
    problem, prompt = TASK.problem(5), TASK.prompts([5])[0]
    assert prompt.shape == (10,)
    assert TASK.text(prompt) == " ".join([*map(str, problem.f), str(problem.start), f"{problem.hops}×"])
    assert TASK.vocab_size == 8 + 7 + 3
    assert TASK.prompts(range(300)).max() < TASK.think
    assert isinstance(TASK, Task)
    assert not isinstance(TASK, EnumerableTask)  # its thoughts are too many to list
    assert {TASK.problem(i).hops for i in range(300)} == set(range(2, 9))


def test_reading_prompts_changes_no_problem():
    before = TASK.problem(0)
    TASK.prompts([0])
    assert TASK.problem(0) == before
    assert torch.equal(TASK.prompts([0]), TASK.prompts([0]))


@pytest.mark.parametrize("stride", [0, 1, 2, 3, 20])
def test_traces_name_every_strideth_node_and_are_right(stride):
    completions, mask = TASK.traces(range(300), torch.full((300,), stride))
    assert completions.shape == mask.shape == (300, TASK.max_new_tokens)
    for index, pad in enumerate(TASK.read(range(300), completions, mask)):
        problem = TASK.problem(index)
        expected = problem.path[stride - 1 : -1 : stride] if stride else ()
        assert pad.thought == expected
        assert pad.valid
        assert pad.correct
        assert pad.answer == problem.answer
    assert TASK.rewards(range(300), completions, mask).all()
    assert (completions[~mask] == TASK.end).all()
    assert (mask.sum(1) == (completions == TASK.end).int().argmax(1) + 1).all()


def test_demonstrations_mix_the_strides():
    completions, mask = TASK.demonstrations(range(300), torch.Generator().manual_seed(0))
    assert TASK.rewards(range(300), completions, mask).all()
    pads = TASK.read(range(300), completions, mask)
    lengths = torch.tensor([float(len(pad.thought)) for pad in pads])
    assert lengths.mean().item() == pytest.approx(1.34, abs=0.3)
    assert 0.35 < (lengths == 0).double().mean() < 0.65
    whole = PointerChasing(problems=300, strides=(1,))
    completions, mask = whole.demonstrations(range(300), torch.Generator())
    thoughts = [pad.thought for pad in whole.read(range(300), completions, mask)]
    assert thoughts == [whole.problem(i).path[:-1] for i in range(300)]


def test_every_node_of_a_thought_is_judged_by_itself():
    index = long_problem()
    path = TASK.problem(index).path
    pad = read(index, said(path[-1], path[0], path[3], path[5]))
    assert pad.at == (1, 4, 6)
    assert pad.valid
    pad = read(index, said(path[-1], path[3], path[0], path[5]))  # the second stands before the first
    assert pad.at == (4, None, 6)
    assert not pad.valid
    assert pad.correct  # a lucky guess, or an answer found without the thought
    pad = read(index, said(path[2], path[0]))
    assert pad.valid
    assert not pad.correct
    assert read(index, said(path[-1], path[-1])).at == (8,)  # the answer may be thought
    assert read(index, said(path[-1], path[-1], path[-1])).at == (8, None)  # once


def test_a_short_cycle_is_walked_as_often_as_it_takes():
    task = PointerChasing(problems=4, symbols=2, least_hops=6, most_hops=6, max_thought=8)
    index = next(i for i in range(4) if task.problem(i).f == (1, 0))
    path = task.problem(index).path
    completions, mask = task.traces([index], [1])
    assert task.read([index], completions, mask)[0].at == (1, 2, 3, 4, 5)
    assert len(set(path)) == 2


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["end"],
        [3, "end"],
        ["think", 3, "end"],
        ["think", "think_end", "end"],
        ["think", "think_end", 3],
        ["think", "think_end", 3, 3],
        ["think", "think_end", "think", "end"],
        ["think", "think", "think_end", 3, "end"],
        ["think", "think_end", "think_end", 3, "end"],
        ["think", 9, "think_end", 3, "end"],  # a number of hops is no node
        ["think_end", "think", 3, "end"],
        [10**9, "think_end", 3, "end"],
        ["think", -5, "think_end", 3, "end"],
    ],
)
def test_completions_of_another_form_say_nothing(words):
    pad = read(0, words)
    assert not pad.well_formed
    assert not pad.correct
    assert not pad.valid
    assert pad.answer is None


def test_what_was_not_generated_is_not_read():
    answer = TASK.problem(0).answer
    assert read(0, [*said(answer), 10**9, -3], length=4).correct
    assert not read(0, [*said(answer), 5], length=3).well_formed  # cut off before the end
    assert not read(0, [*said(answer), 5]).well_formed  # something after the end


def test_rewards_stay_in_their_places():
    completions, mask = TASK.traces(range(4), [0, 1, 2, 0])
    completions[1, 0] = 0
    mask[3] = False
    assert TASK.rewards(range(4), completions, mask).tolist() == [1, 0, 1, 0]
    assert TASK.rewards([], completions[:0], mask[:0]).shape == (0,)


def test_a_guess_is_right_once_in_eight():
    answers = torch.tensor([TASK.problem(i).answer for i in range(300)])
    assert (answers == 3).double().mean().item() == pytest.approx(1 / 8, abs=0.06)


def test_ranges_of_one_seed_share_no_problem():
    whole = PointerChasing(problems=90, symbols=3)
    first, second = PointerChasing(problems=50, symbols=3), PointerChasing(problems=40, symbols=3, skip=50)
    assert torch.equal(torch.cat((first._rows, second._rows)), whole._rows)
    assert len(whole._rows.unique(dim=0)) == 90
    with pytest.raises(ValueError, match="more than the 126 different ones found"):  # 3! · 3 · 7
        PointerChasing(problems=127, symbols=3).prompts([0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"symbols": 1}, "symbols=1"),
        ({"least_hops": 0}, "least_hops=0"),
        ({"least_hops": 9}, "least_hops=9 must be 1 to 8"),
        ({"max_thought": 6}, "max_thought=6 is too short for the 7 nodes"),
        ({"strides": ()}, "strides"),
        ({"strides": (1, -1)}, "strides"),
        ({"problems": 0}, "problems=0"),
        ({"skip": -1}, "skip=-1"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        PointerChasing(**settings)


@pytest.mark.parametrize("strides", [[1], [1, -1], [[1, 1]]])
def test_strides_need_one_number_an_index(strides):
    with pytest.raises(ValueError, match="must be 2 numbers of at least 0"):
        TASK.traces([0, 1], strides)


def test_text_is_readable_and_bounded():
    completions, mask = TASK.traces([long_problem()], [3])
    path = TASK.problem(long_problem()).path
    assert TASK.text(completions[0][mask[0]]) == f"<think> {path[2]} {path[5]} </think> {path[7]} ■"
    with pytest.raises(ValueError, match="vocab_size=18"):
        TASK.text([18])
