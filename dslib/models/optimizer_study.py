"""Muon against AdamW: both learning rates of both searched, then compared at equal compute.

A model trained for some hundred steps is limited by how fast its head and embedding grow, and a single
learning rate must be small enough for the matrices. Muon's matrices bear a larger one, so with one
learning rate for everything Muon also trains the *head* faster, which has nothing to do with
orthogonalisation. Here ``lr`` (matrices) and ``rest_lr`` (the rest) are searched for each optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dslib.models.search import best_bracketed, bracketed_minimum
from dslib.models.training import TrainConfig, TrainResult, flops_per_step, train_many, with_compute

if TYPE_CHECKING:
    import pandas

#: Seeds of searches stand apart from the seeds of the runs that are compared.
SEARCH_SEEDS = (1000, 1001, 1002)
_MOST_ROUNDS = 4


def arm(base: TrainConfig, optimizer: str, share: float, **options: Any) -> TrainConfig:
    """``base`` under another optimizer with ``share`` of the compute of AdamW's full run, Newton–Schulz
    counted, its schedule fitted to the steps that this buys."""
    budget = share * base.steps * flops_per_step(replace(base, optimizer="adamw"))
    return with_compute(replace(base, optimizer=optimizer, **options), budget)


def search_learning_rates(
    config: TrainConfig,
    lr: Sequence[float],
    rest_lr: Sequence[float] | None,
    seeds: Iterable[int] = SEARCH_SEEDS,
    run: Callable[[list[TrainConfig]], Iterable[TrainResult]] = train_many,
) -> list[TrainResult]:
    """Search ``lr`` and ``rest_lr`` in turns until the best pair is bracketed in both directions.

    ``lr``, ``rest_lr``: where the two grids start, ascending, neighbours a factor of 2 apart.
    ``rest_lr=None`` keeps one learning rate for everything. Returns every run made; the loss of a
    pair is its mean over ``seeds``. Raises RuntimeError when the optimum keeps moving.
    """
    seeds = list(seeds)
    runs: dict[tuple[float, float | None], list[TrainResult]] = {}

    def losses(pairs: list[tuple[float, float | None]]) -> list[float]:
        fresh = [pair for pair in dict.fromkeys(pairs) if pair not in runs]
        configs = [replace(config, lr=a, rest_lr=b, seed=seed) for a, b in fresh for seed in seeds]
        results = list(run(configs))
        for position, pair in enumerate(fresh):
            runs[pair] = results[position * len(seeds) : (position + 1) * len(seeds)]
        return [_mean(result.final_loss for result in runs[pair]) for pair in pairs]

    if rest_lr is None:
        bracketed_minimum(lambda values: losses([(_tidy(v), None) for v in values]), lr)
        return [result for results in runs.values() for result in results]
    best_lr, best_rest = lr[len(lr) // 2], rest_lr[len(rest_lr) // 2]
    for _ in range(_MOST_ROUNDS):
        before = (best_lr, best_rest)
        across = bracketed_minimum(
            lambda vs, b=best_rest: losses([(_tidy(v), b) for v in vs]), _around(best_lr, lr)
        )
        best_lr = _tidy(best_bracketed(across))
        across = bracketed_minimum(
            lambda vs, a=best_lr: losses([(a, _tidy(v)) for v in vs]), _around(best_rest, rest_lr)
        )
        best_rest = _tidy(best_bracketed(across))
        if (best_lr, best_rest) == before:
            return [result for results in runs.values() for result in results]
    raise RuntimeError(
        f"the best (lr, rest_lr) still moves after {_MOST_ROUNDS} rounds: {before} → {best_lr, best_rest}"
    )


def best_learning_rates(table: pandas.DataFrame) -> tuple[float, float]:
    """(lr, rest_lr) of the least mean loss in a table of search runs, bracketed in both.

    ``table`` has the columns lr, rest_lr (equal to lr where one rate serves all) and final_loss.
    Raises ValueError when the best lies at an edge of what was searched.
    """
    means = table.groupby(["lr", "rest_lr"])["final_loss"].mean()
    lr, rest_lr = means.idxmin()
    if (table["lr"] == table["rest_lr"]).all():
        best_bracketed({a: loss for (a, _), loss in means.items()})
    else:
        best_bracketed({a: loss for (a, b), loss in means.items() if b == rest_lr})
        best_bracketed({b: loss for (a, b), loss in means.items() if a == lr})
    return lr, rest_lr


def rows(results: Iterable[TrainResult], **labels: Any) -> list[dict[str, Any]]:
    """One flat row a run: ``labels``, then its settings, then what it measured at its end."""
    return [
        {
            **labels,
            "optimizer": result.config.optimizer,
            "d_model": result.config.model.d_model,
            "layers": result.config.model.layers,
            "steps": result.config.steps,
            "lr": result.config.lr,
            "rest_lr": result.config.lr if result.config.rest_lr is None else result.config.rest_lr,
            "weight_decay": result.config.weight_decay,
            "momentum": result.config.momentum,
            "ns_steps": result.config.ns_steps,
            "seed": result.config.seed,
            "flops": result.flops,
            "final_loss": result.final_loss,
            "weight_rms": result.weight_rms[-1],
            "activation_rms": result.activation_rms[-1],
            "largest_logit": result.largest_logit[-1],
            "logits_above": result.logits_above[-1],
        }
        for result in results
    ]


def _around(value: float, start: Sequence[float]) -> list[float]:
    """The starting grid moved so that it is centred on ``value``."""
    middle = start[len(start) // 2]
    return [_tidy(value * point / middle) for point in start]


def _tidy(value: float) -> float:
    """Six significant digits: the same pair gets the same key however it was reached."""
    return float(f"{value:.6g}")


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)
