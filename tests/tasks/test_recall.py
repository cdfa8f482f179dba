"""The recall task: facts and questions far apart, and an honest account of what can be foreseen."""

import pytest
import torch

from dslib.tasks import RecallTask, load_corpus
from dslib.tasks.recall import PLANTED, RECALL, TEXT


def planted(task, batch=64, time=96, seed=0):
    return task.plant(torch.zeros(batch, time, dtype=torch.long), torch.Generator().manual_seed(seed))


def test_each_question_is_followed_by_its_fact_which_stands_at_least_the_distance_before_it():
    task = RecallTask(facts=4, values=5, distance=40)
    tokens, kinds = planted(task)
    for row, kind in zip(tokens.tolist(), kinds.tolist(), strict=True):
        answers = [place for place, what in enumerate(kind) if what == RECALL]
        asked = [row[place - 1] - 128 - 20 for place in answers]
        assert sorted(asked) == [0, 1, 2, 3]
        for place, which in zip(answers, asked, strict=True):
            assert (row[place] - 128) // 5 == which
            assert row.index(row[place]) <= place - 1 - 40
        assert sum(what == PLANTED for what in kind) == 8
        assert all(token == 0 for token, what in zip(row, kind, strict=True) if what == TEXT)


def test_every_place_and_value_is_used_and_the_shortest_window_still_fits():
    task = RecallTask(facts=1, values=2, distance=3)
    tokens, _ = planted(task, batch=500, time=11)  # four places for the fact, two for the question
    seen = {tuple((row >= 128).nonzero().flatten()[:2].tolist()) for row in tokens}
    assert seen == {(fact, question) for fact in range(4) for question in (7, 9)}
    assert {int(row[row >= 128][0]) for row in tokens} == {128, 129}
    planted(task, time=task.least_time)
    with pytest.raises(ValueError, match=f"use at least {task.least_time}"):
        planted(task, time=task.least_time - 1)


def test_only_the_planted_share_is_changed():
    _, kinds = planted(RecallTask(facts=2, distance=8, planted=0.25), batch=400)
    assert 0.15 < (kinds == RECALL).any(dim=1).double().mean() < 0.35
    assert not planted(RecallTask(planted=0.0))[1].any()


def test_targets_stand_one_position_later_and_the_evaluation_is_the_same_every_time():
    task, text = RecallTask(facts=2, distance=8), torch.arange(120, dtype=torch.uint8)
    inputs, targets, kinds = task.evaluation(text, 5, 20)
    assert inputs.shape == targets.shape == kinds.shape == (5, 20)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert all(map(torch.equal, (inputs, targets, kinds), task.evaluation(text, 5, 20)))
    stream = task.batches(text, 3, 20, torch.Generator().manual_seed(0))
    inputs, targets, kinds = next(stream)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert ((targets >= 128) == (kinds != TEXT)).all()
    assert not torch.equal(next(stream)[0], inputs)


def test_what_nobody_can_foresee_counts_nothing_in_training():
    task = RecallTask(weight=3.0)
    assert task.weights(torch.tensor([[TEXT, PLANTED, RECALL]])).tolist() == [[1.0, 0.0, 3.0]]


def test_text_has_none_of_the_symbols():
    corpus = load_corpus()
    assert (corpus.train >= 128).double().mean() < 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"facts": 0}, "facts=0"),
        ({"distance": 0}, "distance=0"),
        ({"facts": 16}, "facts=16 of values=8 need 144 bytes"),
        ({"first_symbol": 200}, "first_symbol=200"),
        ({"planted": 1.5}, "planted=1.5"),
        ({"weight": -1.0}, "weight=-1.0"),
    ],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        RecallTask(**arguments)
