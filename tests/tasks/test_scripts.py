"""Two scripts: what was written is read whatever its script and tags, and who reads it can tell them apart."""

import pytest
import torch

from dslib.tasks import PointerChasing, Task, TwoScripts

TASK = TwoScripts(PointerChasing(problems=200))
INNER = TASK.task


def read(index, *tokens):
    completions = torch.tensor([tokens], dtype=torch.long)
    mask = torch.ones_like(completions, dtype=torch.bool)
    (reading,) = TASK.read([index], completions, mask)
    assert TASK.rewards([index], completions, mask).item() == float(reading.pad.correct)
    return reading


def second(node):
    return INNER.vocab_size + node


def test_a_thought_in_two_scripts_is_as_right_as_in_one_and_less_readable():
    path = INNER.problem(0).path
    one = read(0, INNER.think, *path[:-1], INNER.think_end, path[-1], INNER.end)
    mixed = read(0, INNER.think, second(path[0]), *path[1:-1], INNER.think_end, path[-1], INNER.end)
    assert one.pad == mixed.pad
    assert one.pad.correct
    assert one.readable
    assert not mixed.readable
    assert one.consistency == 1
    assert mixed.consistency == 1 - 1 / len(path[:-1])


def test_without_tags_the_last_node_is_the_answer_and_the_format_is_missing():
    path = INNER.problem(0).path
    for thought in ((), path[:-1], (second(path[0]),)):
        reading = read(0, *thought, path[-1], INNER.end)
        assert reading.pad.correct
        assert reading.pad.valid
        assert not reading.tagged
        assert len(reading.native) == len(reading.pad.thought) == len(thought)
    assert read(0, second(path[-1]), INNER.end).pad.correct  # an answer counts in either script
    assert read(0, second(path[0]), path[-1], INNER.end).native == (False,)


@pytest.mark.parametrize(
    "tokens", [["end"], ["think", "end"], [0], [0, 1], ["think_end", 0, "end"], [9, "end"]]
)
def test_what_cannot_be_read_earns_nothing(tokens):
    numbers = [getattr(INNER, token) if isinstance(token, str) else token for token in tokens]
    reading = read(0, *numbers)
    assert not reading.pad.well_formed
    assert not reading.pad.correct
    assert not reading.tagged
    assert reading.native == ()
    assert not reading.readable


def test_a_wrong_step_is_not_readable_even_before_a_right_answer():
    path = INNER.problem(0).path
    off = next(node for node in range(8) if node not in path)
    reading = read(0, INNER.think, off, INNER.think_end, path[-1], INNER.end)
    assert reading.pad.correct
    assert not reading.readable


def test_every_demonstration_is_right_and_the_shares_are_as_said():
    indices = torch.arange(200).repeat(5)
    completions, mask = TASK.demonstrations(indices, torch.Generator().manual_seed(0))
    readings = TASK.read(indices, completions, mask)
    assert all(r.pad.correct and r.pad.valid for r in readings)
    assert abs(sum(r.tagged for r in readings) / 1000 - 0.7) < 0.05
    nodes = [native for r in readings for native in r.native]
    assert abs(sum(nodes) / len(nodes) - 0.5) < 0.05
    poisoned = torch.where(mask, completions, 10**6)
    assert TASK.read(indices, poisoned, mask) == readings


def test_always_tagged_and_never_tagged():
    for share in (0.0, 1.0):
        task = TwoScripts(INNER, untagged=share)
        made = task.demonstrations(range(100), torch.Generator().manual_seed(1))
        assert {r.tagged for r in task.read(range(100), *made)} == {share == 0}
    with pytest.raises(ValueError, match=r"untagged=1\.5"):
        TwoScripts(INNER, untagged=1.5)


def test_it_is_a_task_with_eight_more_tokens_and_prompts_in_the_first_script():
    assert isinstance(TASK, Task)
    assert TASK.vocab_size == INNER.vocab_size + 8
    assert torch.equal(TASK.prompts(range(9))[:, 1:], INNER.prompts(range(9)))
    assert (TASK.prompts(range(9))[:, 0] == TASK.end).all()
    assert TASK.problem(3) == INNER.problem(3)
    assert len(TASK) == 200


def test_text_shows_the_second_names_as_letters():
    assert TASK.text([INNER.think, 3, second(7), INNER.think_end, 0, INNER.end]) == "<think> 3 h </think> 0 ■"
    with pytest.raises(ValueError, match="vocab_size"):
        TASK.text([999])


def test_no_completions_are_no_readings():
    empty = torch.empty(0, 4, dtype=torch.long)
    assert TASK.read([], empty, empty.bool()) == []
