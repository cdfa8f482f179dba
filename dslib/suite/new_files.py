"""Experiment, test and claims that ``dslib new`` writes: a small example to be changed into one's own.

The words NUMBER, TOPIC, STEM and TITLE stand for those of the new notebook.
"""

from __future__ import annotations

EXPERIMENT = '''\
"""Gradient descent with and without momentum on quadratics: how many steps each needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Quadratic:
    """f(x) = ½·Σ λᵢ·xᵢ², with eigenvalues from 1 to ``condition``, both of which occur."""

    condition: float = 100.0
    #: how many coordinates x has
    dimension: int = 32
    #: a run ends when the distance to the minimum is this share of what it was at the start
    share: float = 1e-6

    def __post_init__(self) -> None:
        if not self.condition > 1:
            raise ValueError(f"condition={self.condition} leaves nothing to compare; give more than 1")
        if self.dimension < 2:
            raise ValueError(f"dimension={self.dimension} has no room for two eigenvalues; give 2 or more")

    def draw(self, seed: int) -> tuple[Tensor, Tensor]:
        """The eigenvalues, log-uniform between the two ends, and a start: (dimension,) float64 each."""
        generator = torch.Generator().manual_seed(seed)
        inner = torch.rand(self.dimension - 2, generator=generator, dtype=torch.float64)
        ends = torch.tensor([1.0, self.condition], dtype=torch.float64)
        start = torch.randn(self.dimension, generator=generator, dtype=torch.float64)
        return torch.cat([ends, torch.exp(inner * math.log(self.condition))]), start


def best_settings(condition: float, momentum: bool) -> tuple[float, float]:
    """Learning rate and momentum that are the best for eigenvalues from 1 to ``condition`` (Polyak 1964)."""
    if not momentum:
        return 2 / (1 + condition), 0.0
    root = math.sqrt(condition)
    return 4 / (1 + root) ** 2, ((root - 1) / (root + 1)) ** 2


def distances(eigenvalues: Tensor, start: Tensor, lr: float, momentum: float, steps: int) -> list[float]:
    """How far x is from the minimum before each step and after the last, over the distance at the start.

    Sutskever et al. (2013), eqs. 1 and 2. Raises ValueError for fewer than one step.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} does not move; give 1 or more")
    x, velocity = start.clone(), torch.zeros_like(start)
    found = [1.0]
    for _ in range(steps):
        velocity = momentum * velocity - lr * eigenvalues * x
        x = x + velocity
        found.append(float(x.norm() / start.norm()))
    return found


def steps_needed(problem: Quadratic, seed: int, momentum: bool) -> int:
    """Steps until the distance is ``problem.share`` of the start's, at the best settings."""
    eigenvalues, start = problem.draw(seed)
    lr, beta = best_settings(problem.condition, momentum)
    steps = 16
    while (found := distances(eigenvalues, start, lr, beta, steps))[-1] > problem.share:
        steps *= 2
    return next(step for step, distance in enumerate(found) if distance <= problem.share)


def ratio(problem: Quadratic, seed: int) -> float:
    """Steps with momentum over steps without, from the same start."""
    return steps_needed(problem, seed, True) / steps_needed(problem, seed, False)
'''

TEST = '''\
"""Steps of gradient descent on quadratics: by hand where that is possible, and in the right order."""

import pytest
import torch

from dslib.experiments import TOPIC as study


def test_two_steps_are_those_made_by_hand():
    one = torch.ones(1, dtype=torch.float64)
    # v = -0.1, x = 0.9; then v = 0.5·(-0.1) - 0.1·0.9 = -0.14, x = 0.76
    assert study.distances(one, one, lr=0.1, momentum=0.5, steps=2) == pytest.approx([1.0, 0.9, 0.76])


def test_both_ends_of_the_spectrum_occur_and_a_seed_draws_the_same_again():
    problem = study.Quadratic(condition=50.0, dimension=8)
    eigenvalues, start = problem.draw(seed=3)
    assert (eigenvalues.min(), eigenvalues.max()) == (1.0, 50.0)
    assert torch.equal(start, problem.draw(seed=3)[1])


def test_the_last_of_the_steps_needed_is_the_first_to_arrive():
    problem = study.Quadratic(condition=20.0, dimension=4)
    eigenvalues, start = problem.draw(seed=0)
    needed = study.steps_needed(problem, seed=0, momentum=True)
    found = study.distances(eigenvalues, start, *study.best_settings(20.0, True), steps=needed)
    assert found[-1] <= problem.share < min(found[:-1])


def test_momentum_saves_more_where_the_condition_is_worse():
    mild, hard = (study.ratio(study.Quadratic(condition, 8), seed=0) for condition in (2.0, 200.0))
    assert hard < mild < 1


@pytest.mark.parametrize(("name", "value"), [("condition", 1.0), ("dimension", 1)])
def test_a_problem_without_a_question_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        study.Quadratic(**{name: value})
'''

CLAIMS = """
[[claim]]
id = "TOPIC.fewer_steps"
notebook = "STEM"
statement = "At condition number 100 momentum needs less than a fifth of gradient descent's steps, each at its best"
source = "Sutskever et al. 2013, §2"
paper = "√R times fewer, R the condition number"
quantity = "steps with momentum over steps without, to a millionth of the distance, same start"
unit = ""
samples = "seeds"
op = "<"
threshold = 0.2
on = "interval"
profile = "quick"
scale = "quadratics of 32 dimensions: what the analysis is about"
[claim.null]
statement = "the same at condition number 1.5: without narrow valleys there is nothing to save"

[[claim]]
id = "TOPIC.factor_is_root"
notebook = "STEM"
statement = "The factor saved at condition number 100 is √R, to a tenth"
source = "Sutskever et al. 2013, §2"
paper = "√R times fewer, R the condition number"
quantity = "steps with momentum over steps without, times √R"
unit = ""
samples = "seeds"
op = "within"
threshold = [0.9, 1.1]
on = "interval"
profile = "quick"
scale = "quadratics of 32 dimensions: what the analysis is about"
expected = "did not reproduce"
reason = "√R is the ratio of the rates in the limit; before it, momentum spends steps on building up its velocity"
"""

NOTE = """
[STEM]
question = "TITLE: what does momentum save?"
outcome = "At condition number 100 momentum needs {TOPIC.fewer_steps:.2f} of gradient descent's steps."
[STEM.supposes]
"TOPIC.fewer_steps" = "held"
"""
