"""The tables of :mod:`dslib.experiments.rlvr_passk`, made and read: what ships, and what a notebook asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from torch import nn

from dslib.evaluation.coverage import Cells, coverage_table
from dslib.evaluation.passk import rates_to_pass_at_k
from dslib.experiments.rlvr_passk import SETS, ExactRun, StudyConfig
from dslib.models.decoder import DecoderConfig
from dslib.rl.sft import SFTConfig
from dslib.runs import checkpoints, measurements

#: Policies whose rates are kept problem by problem, and how their columns begin.
POLICIES = {"base": "base", "rl": "rl", "sharp": "sharp", "wrong_target": "misled"}


def tiny(study: StudyConfig) -> StudyConfig:
    """The same study in a second, of a model that learns nothing: to try every path."""
    model = DecoderConfig(study.base.model.vocab_size, d_model=8, layers=1, heads=2)
    base = replace(study.base, model=model, sft=SFTConfig(steps=2, batch_size=4))
    trainer = replace(study.trainer, prompts=2, group_size=4)
    return replace(study, base=base, trainer=trainer, marks=(1, 2), problems=5, samples=64)


def run_table(runs: dict[str, list[ExactRun]]) -> pd.DataFrame:
    """A row a task, seed, mark and set of problems, and rows of the guesser and of RL at the base's entropy."""
    return pd.DataFrame(
        [{"task": task, **row} for task, found in runs.items() for run in found for row in run.rows]
    )


def problem_table(runs: dict[str, list[ExactRun]], seeds: Sequence[int]) -> pd.DataFrame:
    """A row a task, set and problem: the guesser's rate, and of each policy and seed, ``base_0`` and so on."""
    rows: list[dict[str, Any]] = []
    for task, found in runs.items():
        for name in SETS:
            for problem, guess in enumerate(found[0].rates[name, "guesser"]):
                row = {"task": task, "set": name, "problem": problem, "guesser": guess}
                for policy, column in POLICIES.items():
                    columns = zip(seeds, found, strict=True)
                    row |= {f"{column}_{seed}": run.rates[name, policy][problem] for seed, run in columns}
                rows.append(row)
    table = pd.DataFrame(rows)
    return table.astype({c: "float32" for c in table.columns if c not in ("task", "set", "problem")})


def made(runs: dict[str, list[Any]], seeds: Sequence[int]) -> list[pd.DataFrame]:
    """The three tables that ship, of the runs of every task by seed: all marks, problem by problem, scratchpads."""
    exact = {name: runs[name] for name in ("Countdown", "addition")}
    pads = [row for run in runs["pointers"] for row in run.rows]
    return [run_table(exact), problem_table(exact, seeds), pd.DataFrame(pads)]


def rates_of(table: pd.DataFrame, task: str, name: str, policy: str) -> np.ndarray:
    """From a :func:`problem_table`: the rates of a policy, (seeds, problems), the guesser's once for every seed."""
    part = table[(table.task == task) & (table.set == name)]
    if policy == "guesser":
        columns = ["guesser"] * sum(c.startswith("base_") for c in table.columns)
    else:
        columns = [c for c in table.columns if c.startswith(f"{POLICIES[policy]}_")]
    return part[columns].to_numpy().T.astype(np.float64)


def passed(table: pd.DataFrame, task: str, name: str, policy: str, k: int) -> np.ndarray:
    """The chance that k attempts solve each problem, (seeds, problems)."""
    return rates_to_pass_at_k(rates_of(table, task, name, policy), k)


def course(table: pd.DataFrame, column: str, **where: str) -> pd.DataFrame:
    """A column over the steps of RL, the base's as step 0: index seed, a column a step. ``where``: what other
    columns must hold, ``set="training"`` say."""
    if "policy" in table:
        table = table[table.policy.isin(["base", "rl"])]
    for key, value in where.items():
        table = table[table[key] == value]
    return table.pivot(index="seed", columns="step", values=column)


def ends(table: pd.DataFrame, task: str, policy: str, column: str = "pass_256") -> pd.Series:
    """A column of a policy at the end of training, on training problems: index seed, in order."""
    part = table[(table["task"] == task) & (table["set"] == "training") & (table["policy"] == policy)]
    return part[part["step"] == part["step"].max()].set_index("seed").sort_index()[column]


def covered_shares(base: ArrayLike, policy: ArrayLike, k: int) -> pd.DataFrame:
    """The four cells at k, and ``share``, the part of what the policy solves that the base solves as well; rates
    (problems,). Rows: what was measured; a second run of the base in the policy's place; a model of the policy's
    coverage that solves problems independently of the base."""
    found = coverage_table(base, policy, k)
    parts = {"measured": found.cells, "base, again": found.same_rates, "independent": found.independent}

    def row(cells: Cells) -> dict[str, float]:
        return vars(cells) | {"share": cells.both / (cells.both + cells.policy_only)}

    return pd.DataFrame({name: row(cells) for name, cells in parts.items()}).T


def ship(
    command: str, frames: dict[str, pd.DataFrame], models: dict[tuple[str, str], nn.Module], seed: int
) -> None:
    """Write the tables to ``data/measurements/NAME.csv`` and the models of ``seed``, known by task and policy, to
    ``data/checkpoints/TASK_POLICY.safetensors``, each with the ``command`` that made it."""
    for name, frame in frames.items():
        measurements.write(name, frame, command)
    for (task, policy), model in models.items():
        checkpoints.write(f"{task.lower()}_{policy}", model, command, {"seed": seed})
