"""The tables of :mod:`dslib.experiments.reasoning_pipeline` as a notebook reads them: one number a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from dslib.evaluation import consensus_at_k
from dslib.experiments.reasoning_pipeline import TABLES, StudyConfig, completions_of
from dslib.rl.rollout import SamplingConfig, sample
from dslib.tasks.scripts import Reading, TwoScripts

#: Steps of RL whose mean is one row of the curves.
EVERY = 5
#: A shorter thought, in nodes, counts as this long in a ratio, and a difference below ``NO_DIAL`` is no dial.
SHORTEST, NO_DIAL = 0.01, 0.1

#: What makes the shipped tables.
COMMAND = "dslib run 12 --profile full --param save_measurements=true --param seed={seed}"
#: Every path of the study in seconds, on models of the shipped shapes.
_FULL = StudyConfig()
_FEW = replace(_FULL.tuning, steps=2, batch_size=4)
TINY = replace(
    _FULL,
    text=_FEW,
    tuning=_FEW,
    numbers=_FEW,
    rl=replace(_FULL.rl, prompts=2, group_size=4),
    rl_steps=2,
    effort_steps=2,
    held_out=16,
    evaluated=2,
    votes=4,
    cold=4,
    sampled=8,
)


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, pd.DataFrame]:
    """The tables of several seeds, each from :func:`~dslib.experiments.reasoning_pipeline.seed_tables`, as one
    frame each by name; the curves as means of :data:`EVERY` steps. Raises ValueError for no seed."""
    if not parts:
        raise ValueError("parts is empty; give the tables of at least one seed")
    tables = {name: pd.DataFrame([row for part in parts for row in part[name]]) for name in TABLES}
    curves = tables["reasoning_curves"]
    curves["step"] = curves.step // EVERY * EVERY
    tables["reasoning_curves"] = curves.groupby(["stage", "seed", "step"], as_index=False).mean()
    return tables


@dataclass(frozen=True, eq=False)
class ReasoningTables:
    """All that was measured, as arrays whose first axis is the seeds, in order; raises KeyError for a stage that
    a table lacks."""

    #: A row a stage and seed.
    results: pd.DataFrame
    #: A row a stage, seed and :data:`EVERY` steps of RL.
    curves: pd.DataFrame
    #: A row a stage, seed and effort.
    efforts: pd.DataFrame

    def of(self, stage: str, column: str = "accuracy") -> np.ndarray:
        """One number a seed, (seeds,)."""
        return _rows(self.results, stage).set_index("seed").sort_index()[column].to_numpy()

    def gap(self, first: str, second: str, column: str = "accuracy") -> np.ndarray:
        """``first`` minus ``second`` in the same seed, (seeds,)."""
        return self.of(first, column) - self.of(second, column)

    def mean(self, stage: str, column: str = "accuracy") -> float:
        """The mean over seeds."""
        return float(self.of(stage, column).mean())

    def over_steps(self, stage: str, column: str) -> np.ndarray:
        """(seeds, rows), a row each :data:`EVERY` steps."""
        return _pivoted(self.curves, stage, "step", column)

    def curve(self, stage: str, seed: int) -> pd.DataFrame:
        """The rows of one run, by step."""
        rows = _rows(self.curves, stage)
        return rows[rows.seed == seed].sort_values("step").reset_index(drop=True)

    def growth(self, stage: str) -> np.ndarray:
        """Nodes of a thought over the last tenth of the steps over those of the first, minus 1; (seeds,)."""
        thought = self.over_steps(stage, "thought")
        tenth = max(1, thought.shape[1] // 10)
        first = np.maximum(SHORTEST, thought[:, :tenth].mean(1))
        return thought[:, -tenth:].mean(1) / first - 1

    @property
    def asked(self) -> np.ndarray:
        """The efforts, ascending."""
        return np.array(sorted(self.efforts.effort.unique()))

    @property
    def levels(self) -> np.ndarray:
        """The efforts that were trained with, ascending."""
        return np.array(sorted(self.efforts[self.efforts.trained == 1].effort.unique()))

    def at_effort(self, stage: str, column: str) -> np.ndarray:
        """(seeds, efforts)."""
        return _pivoted(self.efforts, stage, "effort", column)

    def between(self, stage: str, column: str, low: int, high: int) -> np.ndarray:
        """The value at effort ``high`` minus that at ``low``, (seeds,)."""
        values, asked = self.at_effort(stage, column), self.asked.tolist()
        return values[:, asked.index(high)] - values[:, asked.index(low)]

    def log_lengthening(self, stage: str) -> np.ndarray:
        """The natural logarithm of the nodes at the highest level over those at the lowest, (seeds,); both are at
        least :data:`SHORTEST`, so that a dial whose thoughts vanish everywhere counts 0."""
        thought = np.maximum(SHORTEST, self.at_effort(stage, "thought"))
        ends = [self.asked.tolist().index(level) for level in (self.levels[0], self.levels[-1])]
        return np.log(thought[:, ends[1]] / thought[:, ends[0]])

    def off_the_line(self, stage: str, shift: int = 0) -> np.ndarray:
        """How far thoughts at efforts between the levels are from the straight line between these: the mean distance
        over the difference of lengths at the ends, (seeds,); 1 where that is below :data:`NO_DIAL` nodes.
        ``shift``: held against the line so many efforts away."""
        asked, known = self.asked, np.isin(self.asked, self.levels)
        inside = ~known & (asked > self.levels[0])
        lengths = self.at_effort(stage, "thought")
        line = np.stack([np.interp(asked[inside], asked[known], row[known]) for row in lengths])
        far = np.abs(lengths[:, inside] - np.roll(line, shift, axis=1)).mean(1)
        span = np.abs(self.between(stage, "thought", self.levels[0], self.levels[-1]))
        return np.where(span < NO_DIAL, 1.0, far / np.maximum(NO_DIAL, span))

    def returns(self, stage: str) -> np.ndarray:
        """Accuracy gained over the first step between levels minus over the last, (seeds,)."""
        first = self.between(stage, "accuracy", *self.levels[:2])
        return first - self.between(stage, "accuracy", *self.levels[-2:])


def last_steps(curve: pd.DataFrame, steps: int) -> pd.Series:
    """``accuracy`` and ``tagged`` over the last ten of a run's first ``steps`` steps, whether ``curve`` has a row a
    step or one each :data:`EVERY`. Raises ValueError where there is none."""
    rows = curve[(curve.step >= steps - 10) & (curve.step < steps)]
    if rows.empty:
        raise ValueError(f"steps={steps}: the curve has steps {curve.step.min()} to {curve.step.max()}")
    return rows[["accuracy", "tagged"]].mean()


def by_hops(model: nn.Module, config: StudyConfig, seed: int) -> pd.DataFrame:
    """``right``, the share of answers, and ``nodes``, the mean of a thought's, for each number of ``hops`` of the
    held-out problems."""
    task = config.test_task
    written = completions_of(model, task, torch.arange(len(task)), config.evaluated, seed)
    rows = [
        {"hops": task.problem(index).hops, "right": reading.pad.correct, "nodes": len(reading.pad.thought)}
        for index, reading in zip(written[0].tolist(), task.read(*written), strict=True)
    ]
    return pd.DataFrame(rows).groupby("hops").mean()


def answers_of(
    model: nn.Module, config: StudyConfig, problems: int, samples: int, seed: int, thought: bool
) -> tuple[list[list[int | None]], list[int]]:
    """The answers of ``samples`` completions of each of the first held-out ``problems``, and the right ones."""
    task, chosen = config.test_task, torch.arange(problems)
    written = completions_of(model, task, chosen, samples, seed, thought)
    answers = np.array([reading.pad.answer for reading in task.read(*written)], dtype=object)
    return answers.reshape(problems, -1).tolist(), [task.problem(i).answer for i in range(problems)]


def by_votes(answers: Sequence[Sequence[int | None]], truth: Sequence[int]) -> pd.Series:
    """cons@k for k = 1, 2, 4, … as many as there are samples, by k."""
    sizes = [2**n for n in range(len(answers[0]).bit_length())]
    return pd.Series({k: float(consensus_at_k(answers, truth, k, resamples=20).mean()) for k in sizes})


def sampled(
    model: nn.Module,
    config: StudyConfig,
    problem: int,
    effort: int | None,
    temperature: float,
    seed: int,
    count: int = 4,
) -> tuple[list[torch.Tensor], list[Reading]]:
    """``count`` completions of one held-out problem, each as its tokens (time,) and what it says; at an ``effort`` of
    ``config.asked``, or None for a model without. Raises ValueError for another effort."""
    test, prompt = config.test_task, config.test_task.prompts([problem])
    if effort is not None:
        if effort not in config.asked:
            raise ValueError(f"effort={effort} is none of config.asked={config.asked}")
        place = problem * len(config.asked) + config.asked.index(effort)
        prompt = config.effort_task(test=True).prompts([place])
    sampling = SamplingConfig(test.max_new_tokens, temperature=temperature, end=test.end)
    rollout = sample(model, prompt, sampling, torch.Generator().manual_seed(seed), count)
    pairs = zip(rollout.completions, rollout.mask, strict=True)
    return [row[kept] for row, kept in pairs], test.read([problem] * count, rollout.completions, rollout.mask)


def knobs(test: TwoScripts) -> dict[str, tuple[float, ...]]:
    """What a reader may turn in the panel of :func:`sampled`: (least, most, step, first)."""
    return {
        "problem": (0, len(test) - 1, 1, 3),
        "effort": (10, 100, 10, 50),
        "temperature": (0.1, 2.0, 0.1, 1.0),
    }


def _rows(table: pd.DataFrame, stage: str) -> pd.DataFrame:
    rows = table[table.stage == stage]
    if rows.empty:
        raise KeyError(f"no rows of stage {stage!r}; there are {', '.join(sorted(set(table.stage)))}")
    return rows


def _pivoted(table: pd.DataFrame, stage: str, axis: str, column: str) -> np.ndarray:
    return _rows(table, stage).pivot(index="seed", columns=axis, values=column).sort_index().to_numpy()
