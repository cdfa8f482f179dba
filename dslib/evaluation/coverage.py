"""What two policies can solve, who solves what, and how often it would look so by chance.

Everywhere here a model is given either by its exact success rates, float (problems,), or, together with ``n``,
by how many of n samples of each problem were right, int (problems,).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dslib.evaluation.passk import checked_rates, hit_and_miss, pass_at_k, rates_to_pass_at_k


@dataclass(frozen=True)
class Cells:
    """Shares of the problems, 1 in sum, by who solves them."""

    both: float
    base_only: float
    policy_only: float
    neither: float


@dataclass(frozen=True)
class CoverageTable:
    """Who solves what within ``k`` samples each, over ``problems`` problems.

    ``cells`` is what was measured. ``same_rates`` is what a second set of k samples of the *base* in the place
    of the policy gives on average: the part of "base only" and "policy only" that is luck. It is None where
    it cannot be estimated without bias, for samples with n < 2k. ``independent`` is what two models of these
    coverages give that solve problems without regard to which the other solves.
    """

    k: int
    problems: int
    cells: Cells
    same_rates: Cells | None
    independent: Cells


def coverage_table(
    base: ArrayLike, policy: ArrayLike, k: int, n: int | None = None, n_policy: int | None = None
) -> CoverageTable:
    """Solvable problems of a base and of a policy trained from it, four cells at a stated k ("Does RL
    incentivize…", arXiv:2504.13837, Table 2, where k = n, so that each problem is in one cell).

    base, policy: rates or counts of the same problems, as the module says; ``n_policy`` is n unless given. A
    problem counts in each cell with the chance that k samples of either model put it there.
    Raises ValueError for no problem, for different numbers of problems, and as :func:`pass_at_k`.
    """
    base_solved = _solved(base, k, n)
    policy_solved = _solved(policy, k, n if n_policy is None else n_policy)
    if base_solved.shape != policy_solved.shape:
        raise ValueError(
            f"base has {len(base_solved)} problems and policy {len(policy_solved)}; compare them on the same ones"
        )
    same_rates = None
    if n is None or 2 * k <= n:
        # P(the first k hit and the second k miss) = P(k miss) − P(2k miss).
        miss, miss_twice = 1 - base_solved, 1 - _solved(base, 2 * k, n)
        one = miss - miss_twice
        same_rates = _cells(1 - miss - one, one, one, miss_twice)
    b, p = base_solved.mean(), policy_solved.mean()
    return CoverageTable(
        k=k,
        problems=len(base_solved),
        cells=_joint(base_solved, policy_solved),
        same_rates=same_rates,
        independent=_joint(np.array([b]), np.array([p])),
    )


def sampling_efficiency_gap(
    base: ArrayLike, policy: ArrayLike, k: int = 256, n: int | None = None, n_policy: int | None = None
) -> float:
    """Δ_SE: the base's pass@k minus the policy's pass@1, both means over problems (arXiv:2504.13837, §4.3).

    What is left to gain for training that only makes single samples as good as k of the base; lower is better.
    Arguments as for :func:`coverage_table`, and so are the errors; the problems need not be the same.
    """
    policy_once = _solved(policy, 1, n if n_policy is None else n_policy)
    return float(_solved(base, k, n).mean() - policy_once.mean())


@dataclass(frozen=True)
class SupportChange:
    """Shares of the problems, 1 in sum. ``lost``: the base's rate reaches the floor and the policy's does
    not; ``gained``: the other way round; ``out_of_reach``: neither does. Where both do, the rate
    was ``lowered``, ``raised`` or left ``equal``."""

    floor: float
    lost: float
    lowered: float
    equal: float
    raised: float
    gained: float
    out_of_reach: float


def support_change(base: ArrayLike, policy: ArrayLike, floor: float) -> SupportChange:
    """Which problems a policy lost, and which it only became less likely to solve.

    base, policy: exact rates (problems,). A softmax gives nothing the probability 0, so "lost" needs a
    ``floor`` in (0, 1): 1/k means that k samples hold fewer than one correct answer on average.
    Raises ValueError for another floor, other rates, no problem or different numbers of them.
    """
    base, policy = checked_rates("base", base), checked_rates("policy", policy)
    if not 0 < floor < 1:
        raise ValueError(f"floor={floor} must lie between 0 and 1; 1/k is the least that k samples can show")
    if base.shape != policy.shape or base.ndim != 1:
        raise ValueError(f"base {base.shape} and policy {policy.shape} must both be (problems,)")
    had, has = base >= floor, policy >= floor
    kept = had & has
    return SupportChange(
        floor=floor,
        lost=float((had & ~has).mean()),
        lowered=float((kept & (policy < base)).mean()),
        equal=float((kept & (policy == base)).mean()),
        raised=float((kept & (policy > base)).mean()),
        gained=float((~had & has).mean()),
        out_of_reach=float((~had & ~has).mean()),
    )


def majority_vote(answers: Sequence[Hashable | None]) -> list[Hashable]:
    """The most frequent answers, all of them where they tie, in order of appearance (self-consistency,
    arXiv:2203.11171). None is an answer that could not be read and has no vote; without any vote: []."""
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    return [answer for answer, count in votes.items() if count == most]


def consensus_at_k(
    answers: Sequence[Sequence[Hashable | None]],
    references: Sequence[Hashable],
    k: int | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> np.ndarray:
    """cons@k: how often the majority of k samples is right (DeepSeek-R1's cons@64, arXiv:2501.12948, §3).

    answers: for each problem its samples' final answers, None where unreadable; references: the right ones,
    equal to answers by ==. k=None takes all samples, without any chance; a smaller k is the mean over
    ``resamples`` random choices of k of them. Where answers tie, each wins equally often. (problems,) float64.
    Raises ValueError for no problem, a problem without answer or reference, or k outside 1 … samples.
    """
    if len(answers) == 0 or len(answers) != len(references):
        raise ValueError(
            f"{len(answers)} problems and {len(references)} references; give one each, at least one"
        )
    if resamples < 1:
        raise ValueError(f"resamples={resamples} must be at least 1")
    generator = np.random.default_rng(seed)
    found = np.empty(len(answers))
    for i, (given, reference) in enumerate(zip(answers, references, strict=True)):
        size = len(given) if k is None else k
        if reference is None:
            raise ValueError(f"the reference of problem {i} is None; give the right answer")
        if not 1 <= size <= len(given):
            raise ValueError(f"k={size} must be 1 to the {len(given)} samples of problem {i}")
        # Number 0 is unreadable, 1 the right answer, the others what else was said.
        numbers: dict[Hashable, int] = {reference: 1}
        votes = np.array([0 if a is None else numbers.setdefault(a, len(numbers) + 1) for a in given])
        if size == len(given):
            chosen = votes[None]
        else:
            chosen = generator.permuted(np.tile(votes, (resamples, 1)), axis=1)[:, :size]
        counts = (chosen[..., None] == np.arange(1, len(numbers) + 1)).sum(axis=1)
        most = counts.max(axis=1, keepdims=True)
        won = (counts[:, :1] == most) & (most > 0)
        found[i] = (won[:, 0] / (counts == most).sum(axis=1)).mean()
    return found


def best_of_n(scores: ArrayLike, correct: ArrayLike, k: int | None = None) -> np.ndarray:
    """How often the best-scored of k samples is right, exactly, over all ways to take k of the n that there are.

    scores: float (problems, n), higher is better; correct: bool or 0/1, the same shape; k=None is n. Equal
    scores win equally often. Returns (problems,) float64. Raises ValueError for other shapes, no problem,
    NaN scores, or k outside 1 … n.
    """
    scores, correct = np.asarray(scores, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    if scores.ndim != 2 or scores.size == 0 or scores.shape != correct.shape:
        raise ValueError(
            f"scores {scores.shape} and correct {correct.shape} must both be (problems, n), not empty"
        )
    if np.isnan(scores).any():
        raise ValueError(f"scores hold NaN at {np.argwhere(np.isnan(scores))[0].tolist()}; drop that sample")
    if not np.isin(correct, (0, 1)).all():
        raise ValueError("correct must hold nothing but 0 and 1")
    n = scores.shape[1]
    k = n if k is None else k
    if not 1 <= k <= n:
        raise ValueError(f"k={k} must be 1 to the n={n} samples of a problem")
    # The best of k has rank r when none of the other k − 1 is among the r above: k/n · C(n−1−r, k−1)/C(n−1, k−1).
    ranks = np.arange(n)
    none_above = hit_and_miss(np.full(n, n - 1), ranks, np.full(n, k - 1))[1]
    weights = k / n * none_above
    found = np.empty(len(scores))
    for i, (score, right) in enumerate(zip(scores, correct, strict=True)):
        _, block = np.unique(-score, return_inverse=True)  # 0 for the best score, then 1, …
        size, hits = np.bincount(block), np.bincount(block, weights=right)
        mass = np.add.reduceat(weights, np.concatenate(([0], np.cumsum(size)[:-1])))
        found[i] = (mass * hits / size).sum()
    return found


def _solved(model: ArrayLike, k: int, n: int | None) -> np.ndarray:
    """The chance that k samples solve each problem, (problems,)."""
    if n is None:
        solved = rates_to_pass_at_k(model, k)
    else:
        solved = np.asarray(pass_at_k(n, model, k))
    if solved.ndim != 1:
        raise ValueError(f"rates or counts have shape {solved.shape}; give (problems,)")
    return solved


def _joint(base: np.ndarray, policy: np.ndarray) -> Cells:
    return _cells(base * policy, base * (1 - policy), (1 - base) * policy, (1 - base) * (1 - policy))


def _cells(*cells: np.ndarray) -> Cells:
    return Cells(*(float(cell.mean()) for cell in cells))
