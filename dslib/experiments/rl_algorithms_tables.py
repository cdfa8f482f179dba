"""The tables of :mod:`dslib.experiments.rl_algorithms` as a notebook reads them: a number a seed, by arm and k."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
from scipy import stats

from dslib.experiments.rl_algorithms import NAMES, StudyConfig, stopped_early
from dslib.models.decoder import DecoderConfig
from dslib.rl.sft import SFTConfig


def tiny(study: StudyConfig) -> StudyConfig:
    """The same study in a second, of a model that learns nothing: to try every path."""
    few = SFTConfig(steps=2, batch_size=8)
    model = DecoderConfig(study.base.task.vocab_size, d_model=16, layers=1, heads=2)
    return replace(
        study,
        base=replace(study.base, model=model, sft=few),
        problems=8,
        held_out=4,
        steps=4,
        early=1,
        prompts=4,
        group_size=4,
        large_group_size=8,
        distil=few,
        tries=2,
        teacher=(study.teacher[0], 8),
        shipped=None,
    )


def rows(table: pd.DataFrame, arm: str, mark: str = "end") -> pd.DataFrame:
    """An arm's evaluations at ``mark``, a row a seed: the seeds are the index, in order.

    Raises ValueError where the table has none.
    """
    found = table[(table["arm"] == arm) & (table["mark"] == mark)]
    if found.empty:
        raise ValueError(f"arm={arm!r} has no rows at mark={mark!r}; arms are {sorted(set(table['arm']))}")
    return found.set_index("seed").sort_index()


def passed(table: pd.DataFrame, arm: str, k: int, mark: str = "end", where: str = "train") -> np.ndarray:
    """pass@k of an arm, (seeds,): of RL's problems, ``"train"``, or of ``"held"``, held-out ones."""
    return rows(table, arm, mark)[f"{where}_{k}"].to_numpy()


def gained(table: pd.DataFrame, arm: str, k: int, mark: str = "end", where: str = "train") -> np.ndarray:
    """pass@k of an arm minus that of the base of the same seed, (seeds,)."""
    return passed(table, arm, k, mark, where) - passed(table, "base", k, where=where)


def others(table: pd.DataFrame, names: list[str], arm: str, k: int, mark: str = "end") -> np.ndarray:
    """The mean pass@k of ``names`` without ``arm`` on RL's problems, (seeds,)."""
    return np.mean([passed(table, other, k, mark) for other in names if other != arm], axis=0)


def course(table: pd.DataFrame, arm: str = "grpo") -> pd.DataFrame:
    """The base and an arm's evaluations in training, in the order of seeds and steps."""
    marks = table["mark"].isin(("early", "middle", "end"))
    found = table[(table["arm"] == "base") | ((table["arm"] == arm) & marks)]
    return found.sort_values(["seed", "step"])


def at_step(table: pd.DataFrame, arm: str, k: int, step: int) -> np.ndarray:
    """pass@k of an arm after ``step`` steps, on RL's problems, (seeds,)."""
    path = course(table, arm)
    return path[path["step"] == step].set_index("seed").sort_index()[f"train_{k}"].to_numpy()


def early_stop(table: pd.DataFrame, arm: str, k: int) -> np.ndarray:
    """pass@k of GRPO stopped where it had the pass@1 of ``arm``, minus GRPO's at its end, (seeds,)."""
    path = course(table)
    stopped = [
        stopped_early(path[path["seed"] == seed], target, f"train_{k}")
        for seed, target in rows(table, arm)["train_1"].items()
    ]
    return np.array(stopped) - passed(table, "grpo", k)


def as_live(table: pd.DataFrame, arms: list[str], seed: int) -> pd.DataFrame:
    """The rows of ``seed`` that :func:`dslib.experiments.rl_algorithms.live_runs` makes again, an arm a row: an
    algorithm's early one, the end of a fine-tuning."""
    found = [rows(table, arm, "early" if arm in NAMES else "end").loc[seed] for arm in arms]
    return pd.DataFrame(found, index=pd.Index(arms, name="arm"))


def half_width(samples: np.ndarray, share: float = 0.95) -> float:
    """Half of the interval of the mean by Student's t, of (seeds,)."""
    spread = samples.std(ddof=1) / len(samples) ** 0.5
    return float(stats.t.ppf((1 + share) / 2, len(samples) - 1) * spread)
