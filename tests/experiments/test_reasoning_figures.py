"""Drawings of the reasoning study: what they say is what the problem, the stages and the answers say."""

from dataclasses import replace

import pytest
import torch
from matplotlib.figure import Figure

from dslib.experiments import reasoning_figures as figures
from dslib.experiments import reasoning_pipeline as study
from dslib.tasks import PointerChasing, TwoScripts
from dslib.tasks.pointer_chasing import PointerProblem

CIRCLE = PointerProblem(f=(1, 0, 2), start=0, hops=3, path=(1, 0, 1))
TASK = TwoScripts(PointerChasing(problems=4, symbols=6, least_hops=3, most_hops=3))


def texts(ax):
    return [text.get_text() for text in ax.texts]


def arrows(ax):
    return [text for text in ax.texts if getattr(text, "arrow_patch", None) is not None]


def test_an_arrow_carries_every_hop_that_takes_it():
    assert figures.edge_hops(CIRCLE) == {0: [1, 3], 1: [2]}
    ax = Figure().subplots()
    figures.draw_problem(ax, CIRCLE, "grey", "blue", "red")
    assert {"1, 3", "2"} <= set(texts(ax))
    assert len(arrows(ax)) == 2  # a symbol that leads to itself has a ring


def test_the_flow_hands_on_weights_and_samples_as_the_stages_say():
    ax = Figure().subplots()
    figures.draw_flow(ax, "blue", "orange")
    starts = [name for name in figures.FLOW if study.STAGES[name].start is not None]
    teachers = [name for name in figures.FLOW if study.STAGES[name].teacher is not None]
    assert len(arrows(ax)) == len(starts) + len(teachers)
    assert [text.split("\n")[0] for text in texts(ax) if text] == list(figures.FLOW)


def test_a_flow_refuses_what_it_cannot_draw():
    ax = Figure().subplots()
    with pytest.raises(ValueError, match="'beauty'"):
        figures.draw_flow(ax, "blue", "orange", places={"beauty": (0, 0)})
    with pytest.raises(ValueError, match="'RL' comes from 'cold start'"):
        figures.draw_flow(ax, "blue", "orange", places={"RL": (0, 0)})


def test_each_token_has_its_kind():
    problem, inner = TASK.problem(0), TASK.task
    wrong = next(node for node in range(6) if node not in problem.path)
    said = [inner.think, problem.path[0], wrong, inner.think_end, problem.answer, inner.end]
    tokens = torch.tensor([said])
    (reading,) = TASK.read([0], tokens, torch.ones_like(tokens, dtype=torch.bool))
    assert figures.token_kinds(6, reading) == ["tag", "step", "wrong step", "tag", "right", "tag"]
    bare = torch.tensor([[problem.path[0], wrong, inner.end]])
    (reading,) = TASK.read([0], bare, torch.ones_like(bare, dtype=torch.bool))
    assert figures.token_kinds(3, reading) == ["step", "wrong", "tag"]
    cut = replace(reading, pad=replace(reading.pad, well_formed=False, at=()))
    assert figures.token_kinds(3, cut) == ["tag"] * 3


def test_answers_are_written_token_by_token_and_ticks_as_a_hash():
    tokens = torch.tensor([[TASK.task.think, TASK.task.think_end, 0, TASK.end]])
    readings = TASK.read([0], tokens, torch.ones_like(tokens, dtype=torch.bool))
    ax = Figure().subplots()
    figures.draw_answers(ax, TASK, [tokens[0]], readings, figures.TONES)
    assert texts(ax) == ["<think>", "</think>", "0", "■"]
    ax = Figure().subplots()
    ticks = torch.tensor([TASK.vocab_size, TASK.end])
    figures.draw_answers(
        ax,
        TASK,
        [ticks],
        TASK.read([0], torch.tensor([[0, TASK.end]]), torch.ones(1, 2).bool()),
        figures.TONES,
    )
    assert texts(ax)[0] == "#"


def test_a_dot_a_seed_in_each_column():
    ax = Figure().subplots()
    figures.draw_seeds(ax, ["a", "b"], [[0.1, 0.2], [0.3]], ["red", "blue"])
    assert [list(line.get_xdata()) for line in ax.lines] == [[0, 0], [1]]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b"]
