"""Samples beside exact rates: through a file, held against the rates they were drawn at, and how far they may stray."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from dslib.evaluation.passk import pass_at_k
from dslib.rl.rollout import Rollout
from dslib.rl.rollout_store import load_rollout, save_rollout


def through_file(rollout: Rollout, **columns: Tensor) -> tuple[Rollout, dict[str, Any]]:
    """A rollout and columns of one value a sequence, written to a Parquet file and read from it alone."""
    with tempfile.TemporaryDirectory(prefix="rollouts-") as folder:
        path = Path(folder) / "rollout.parquet"
        save_rollout(path, rollout, **columns)
        return load_rollout(path)


def check_counts(counts: ArrayLike, rates: ArrayLike, n: int, deviations: float = 5.0) -> None:
    """Raise ValueError where ``counts`` (problems,) of ``n`` samples each are not of these rates: their sum lies more
    than so many standard deviations, and one, from what the rates say."""
    counts, p = np.asarray(counts), np.asarray(rates, dtype=np.float64)
    expected, spread = n * p.sum(), math.sqrt(n * (p * (1 - p)).sum())
    if abs(counts.sum() - expected) > deviations * spread + 1:
        raise ValueError(
            f"counts has {counts.sum()} right samples where the rates say {expected:.1f} ± {spread:.1f}; these are "
            "not samples of the policy that the rates are of"
        )


def sampling_interval(
    rates: ArrayLike, n: int, ks: ArrayLike, repeats: int = 400, seed: int = 0, share: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Where a ``share`` of the estimates of pass@k from ``n`` samples of each problem fall, given its rate: the lower
    and the upper end, (ks,) each, from ``repeats`` draws. rates: (problems,)."""
    p = np.asarray(rates, dtype=np.float64).clip(0, 1)
    counts = np.random.default_rng(seed).binomial(n, p, (repeats, len(p)))
    found = np.array([np.mean(pass_at_k(n, counts, int(k)), axis=1) for k in np.atleast_1d(ks)])
    low, high = np.quantile(found, [(1 - share) / 2, (1 + share) / 2], axis=1)
    return low, high
