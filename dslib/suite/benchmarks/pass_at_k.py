"""pass@k of a million problems: all at once, beside a Python loop over the usual estimator."""

from __future__ import annotations

import sys

import numpy as np

from dslib.evaluation import pass_at_k
from dslib.suite.benchmarks import interleaved, print_table

PROBLEMS = 1_000_000
SAMPLES, K = 256, 64
#: Problems whose number of samples varies have up to this many.
MOST_SAMPLES = 1024
#: The share of the loop's time that we aim for.
GOAL = 0.1
REPEATS = 5
BUDGET_S = 60.0

NOTES = """The loop calls, problem by problem, the estimator that Chen et al. (arXiv:2107.03374, fig. 3) print.
of the loop: the median as a share of the loop's. difference: the largest between the two results."""


def main() -> None:
    """Measure both ways and print the table; a missed goal is printed like a reached one."""
    rows: list[list] = []
    try:
        for task, (n, c) in cases().items():
            rows += timed(task, n, c)
            print(f"measured {task}", file=sys.stderr)
    finally:
        columns = ["task", "median ms", "min–max", "n", "of the loop", "goal", "difference"]
        print_table(f"pass@{K} of {PROBLEMS} problems, numpy {np.__version__}", columns, rows)
        print(NOTES)


def cases(seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Samples and correct samples (problems,) of problems most of which are hard, by name."""
    generator = np.random.default_rng(seed)
    rates = generator.beta(0.5, 2.0, PROBLEMS)
    same = np.full(PROBLEMS, SAMPLES)
    varied = generator.integers(K, MOST_SAMPLES + 1, PROBLEMS)
    return {
        f"n = {SAMPLES}": (same, generator.binomial(same, rates)),
        f"n = {K} … {MOST_SAMPLES}": (varied, generator.binomial(varied, rates)),
    }


def usual(n: int, c: int, k: int) -> float:
    """One problem's estimate as the paper prints it."""
    if n - c < k:
        return 1.0
    return 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))


def loop(n: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The usual estimate of each problem, one after the other: (problems,) float64."""
    return np.array([usual(*counts, K) for counts in zip(n.tolist(), c.tolist(), strict=True)])


def timed(task: str, n: np.ndarray, c: np.ndarray) -> list[list]:
    """Rows of the two ways on the same counts; the loop is the first."""
    difference = np.abs(loop(n, c) - pass_at_k(n, c, K)).max()  # and both are warm
    ways = {"loop": lambda: loop(n, c), "at once": lambda: pass_at_k(n, c, K)}
    timings = interleaved(ways, repeats=REPEATS, warmup=0, budget_s=BUDGET_S)
    rows = []
    for way, timing in timings.items():
        share = timing.median / timings["loop"].median
        goal = "" if way == "loop" else f"{GOAL} {'reached' if share <= GOAL else 'missed'}"
        rows.append(
            [
                f"{task}  {way}",
                f"{timing.median * 1e3:.2f}",
                f"{timing.min * 1e3:.2f}–{timing.max * 1e3:.2f}",
                timing.n,
                f"{share:.4f}",
                goal,
                f"{difference:.1e}",
            ]
        )
    return rows
