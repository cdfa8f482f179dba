"""Muon against AdamW: both learning rates of both searched, then compared at equal compute.

A model trained for some hundred steps is limited by how fast its head and embedding grow, and a single
learning rate must be small enough for the matrices. Muon's matrices bear a larger one, so with one
learning rate for everything Muon also trains the *head* faster, which has nothing to do with
orthogonalisation. Here ``lr`` (matrices) and ``rest_lr`` (the rest) are searched for each optimizer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dslib.models.decoder import Decoder
from dslib.models.search import best_bracketed, bracketed_minimum
from dslib.models.training import TrainConfig, TrainResult, flops_per_step, train, train_many, with_compute

if TYPE_CHECKING:
    import pandas

#: Share of AdamW's compute that Muon gets in the comparison.
SHARE = 0.75

#: Shares of the compute and momenta that :func:`measure` sweeps.
SHARES = (0.5, 0.625, 0.75, 0.875, 1.0)
MOMENTA = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99)

#: Where the searches start; they move on from there until the optimum is bracketed.
GRIDS = {
    "adamw": {"lr": (0.004, 0.008, 0.016), "rest_lr": (0.064, 0.128, 0.256)},
    "muon": {"lr": (0.016, 0.032, 0.064), "rest_lr": (0.064, 0.128, 0.256)},
}


@dataclass(frozen=True)
class Arm:
    """One side of the comparison: an optimizer, its share of AdamW's compute, the arm whose search gives
    its learning rates (itself, if it is searched), and whether one learning rate serves everything."""

    optimizer: str
    share: float
    rates_of: str
    one_rate: bool = False


ARMS = {
    "AdamW": Arm("adamw", 1.0, "AdamW"),
    "AdamW, short": Arm("adamw", SHARE, "AdamW, short"),
    "Muon, short": Arm("muon", SHARE, "Muon, short"),
    "Muon, short, reused": Arm("muon", SHARE, "AdamW"),
    "AdamW, one rate": Arm("adamw", 1.0, "AdamW, one rate", one_rate=True),
    "Muon, short, one rate reused": Arm("muon", SHARE, "AdamW, one rate", one_rate=True),
}

#: Seeds of searches stand apart from the seeds of the runs that are compared.
SEARCH_SEEDS = (1000, 1001, 1002)
_MOST_ROUNDS = 5

Run = Callable[[list[TrainConfig]], Iterable[TrainResult]]


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
    run: Run = train_many,
) -> list[TrainResult]:
    """Search ``lr`` and ``rest_lr`` in turns until the best pair is bracketed in both directions.

    ``lr``, ``rest_lr``: where the two grids start, ascending, neighbours a factor of 2 apart.
    ``rest_lr=None`` keeps one learning rate for everything. Returns every run made; the loss of a
    pair is its mean over ``seeds``. Raises RuntimeError when the optimum keeps moving.
    """
    seeds = list(seeds)
    runs: dict[tuple[float, float | None], list[TrainResult]] = {}
    known: list[float] = []

    def snapped(value: float) -> float:
        """√2·√2 is not quite 2 in floats: a value that was met before, give or take rounding, is that one."""
        near = [old for old in known if abs(value / old - 1) < 1e-3]
        if not near:
            known.append(float(f"{value:.6g}"))
        return near[0] if near else known[-1]

    def losses(pairs: list[tuple[float, float | None]]) -> list[float]:
        fresh = [pair for pair in dict.fromkeys(pairs) if pair not in runs]
        configs = [replace(config, lr=a, rest_lr=b, seed=seed) for a, b in fresh for seed in seeds]
        results = list(run(configs))
        for position, pair in enumerate(fresh):
            runs[pair] = results[position * len(seeds) : (position + 1) * len(seeds)]
        return [_mean(result.final_loss for result in runs[pair]) for pair in pairs]

    def search(
        start: Sequence[float], centre: float, pair: Callable[[float], tuple[float, float | None]]
    ) -> float:
        grid = [centre * value / start[len(start) // 2] for value in start]
        found = bracketed_minimum(lambda values: losses([pair(snapped(value)) for value in values]), grid)
        return snapped(best_bracketed(found))

    best_lr = snapped(lr[len(lr) // 2])
    if rest_lr is None:
        search(lr, best_lr, lambda value: (value, None))
        return [result for results in runs.values() for result in results]
    best_rest = snapped(rest_lr[len(rest_lr) // 2])
    for _ in range(_MOST_ROUNDS):
        before = (best_lr, best_rest)
        best_lr = search(lr, best_lr, lambda value, rest=best_rest: (value, rest))
        best_rest = search(rest_lr, best_rest, lambda value, matrices=best_lr: (matrices, value))
        if (best_lr, best_rest) == before:
            return [result for results in runs.values() for result in results]
    raise RuntimeError(
        f"the best (lr, rest_lr) still moves after {_MOST_ROUNDS} rounds: {before} → {best_lr, best_rest}"
    )


def search_arms(
    base: TrainConfig,
    names: Iterable[str] = tuple(ARMS),
    seeds: Iterable[int] = SEARCH_SEEDS,
    run: Run = train_many,
) -> list[dict]:
    """The searches that the named :data:`ARMS` need on ``base``: one row a run, kind="search", by arm.

    Raises ValueError for an unknown name.
    """
    names, seeds, found = list(names), list(seeds), []
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise ValueError(f"names={unknown} are no arms; use some of {', '.join(map(repr, ARMS))}")
    for name in dict.fromkeys(ARMS[name].rates_of for name in names):
        searched = ARMS[name]
        grid = GRIDS[searched.optimizer]
        rest_lr = None if searched.one_rate else grid["rest_lr"]
        config = arm(base, searched.optimizer, searched.share)
        found += rows(search_learning_rates(config, grid["lr"], rest_lr, seeds, run), kind="search", arm=name)
    return found


def tuned_arms(base: TrainConfig, searched: pandas.DataFrame) -> dict[str, TrainConfig]:
    """Every arm on ``base`` whose search is among ``searched``, with the learning rates found there.

    ``searched``: rows of :func:`search_arms` for this model. Raises ValueError when an optimum was not
    bracketed.
    """
    rates = {name: best_learning_rates(part) for name, part in searched.groupby("arm")}
    tuned = {name: (one, *rates[one.rates_of]) for name, one in ARMS.items() if one.rates_of in rates}
    return {
        name: arm(base, one.optimizer, one.share, lr=lr, rest_lr=rest_lr)
        for name, (one, lr, rest_lr) in tuned.items()
    }


def with_seeds(config: TrainConfig, seeds: Iterable[int]) -> list[TrainConfig]:
    """One configuration a seed."""
    return [replace(config, seed=seed) for seed in seeds]


def best_learning_rates(table: pandas.DataFrame) -> tuple[float, float]:
    """(lr, rest_lr) of the least mean loss in a table of search runs, bracketed in both.

    ``table`` has the columns lr, rest_lr (equal to lr where one rate serves all) and final_loss.
    Raises ValueError when the best lies at an edge of what was searched.
    """
    means = table.groupby(["lr", "rest_lr"])["final_loss"].mean()
    lr, rest_lr = (float(value) for value in means.idxmin())
    if (table["lr"] == table["rest_lr"]).all():
        best_bracketed({a: loss for (a, _), loss in means.items()})
    else:
        best_bracketed({a: loss for (a, b), loss in means.items() if b == rest_lr})
        best_bracketed({b: loss for (a, b), loss in means.items() if a == lr})
    return lr, rest_lr


def share_rows(
    arms: dict[str, TrainConfig],
    base: TrainConfig,
    shares: Iterable[float],
    seeds: Iterable[int],
    run: Run = train_many,
) -> list[dict]:
    """Final losses of tuned AdamW and Muon at other shares of the compute, each on its own schedule."""
    seeds, found = list(seeds), []
    for share in shares:
        for optimizer, name in (("adamw", "AdamW"), ("muon", "Muon, short")):
            tuned = arms[name]
            config = arm(base, optimizer, share, lr=tuned.lr, rest_lr=tuned.rest_lr)
            found += rows(run(with_seeds(config, seeds)), kind="share", arm=optimizer, share=share)
    return found


def momentum_rows(
    tuned: TrainConfig, momenta: Iterable[float], seeds: Iterable[int], run: Run = train_many
) -> list[dict]:
    """Muon at other momenta, each with its matrices' learning rate at half, once and twice the tuned one."""
    seeds, found = list(seeds), []
    for momentum in momenta:
        for factor in (0.5, 1.0, 2.0):
            config = replace(tuned, momentum=momentum, lr=tuned.lr * factor)
            found += rows(run(with_seeds(config, seeds)), kind="momentum", arm="Muon, short")
    return found


def momenta(config: TrainConfig) -> dict[str, Tensor]:
    """The momentum matrix of every weight, by its name, at the end of a training run with Muon.

    Raises ValueError for another optimizer.
    """
    if config.optimizer != "muon":
        raise ValueError(f"config.optimizer={config.optimizer!r} keeps no momentum matrices; use 'muon'")
    kept: dict[str, Tensor] = {}

    def keep(step: int, model: Decoder, optimizers: list[torch.optim.Optimizer]) -> None:
        if step == config.steps:
            names = {parameter: name for name, parameter in model.named_parameters()}
            state = optimizers[0].state
            kept.update({names[p]: state[p]["momentum_buffer"].clone() for p in state})

    train(config, observe=keep)
    return kept


def measure(
    base: TrainConfig, seeds: Sequence[int], run: Run = train_many, thorough: bool = True
) -> list[dict]:
    """Everything that ships about one model: searches, finals, other shares of the compute.

    ``thorough=False``, for models whose runs cost more, searches on fewer seeds, compares on four, and
    leaves out AdamW's own short search and the sweep over momenta.
    """
    names = ARMS if thorough else ("AdamW", "Muon, short", "AdamW, one rate")
    table = search_arms(base, names, SEARCH_SEEDS if thorough else SEARCH_SEEDS[:2], run)
    arms = tuned_arms(base, _frame(table))
    compared = list(seeds) if thorough else list(seeds)[:4]
    for name, config in arms.items():
        table += rows(run(with_seeds(config, compared)), kind="final", arm=name)
    table += share_rows(arms, base, SHARES, list(seeds)[:4], run)
    if thorough:
        table += momentum_rows(arms["Muon, short"], MOMENTA, SEARCH_SEEDS, run)
    return table


def crossing_share(shares: pandas.DataFrame) -> float:
    """The share of the compute at which Muon's mean loss equals AdamW's at 1.0, interpolated linearly.

    ``shares``: rows of :func:`share_rows` for one model. 0 when Muon is better at its smallest share
    already, infinity when it never is.
    """
    means = shares.groupby(["arm", "share"])["final_loss"].mean()
    target, curve = means["adamw"][1.0], list(means["muon"].items())
    if curve[0][1] <= target:
        return 0.0
    for (left, high), (right, low) in itertools.pairwise(curve):
        if high > target >= low:
            return left + (right - left) * (high - target) / (high - low)
    return math.inf


def rows(results: Iterable[TrainResult], **labels: Any) -> list[dict[str, Any]]:
    """One flat row a run: ``labels``, then its settings, then what it measured at its end. ``share`` is 0
    where no label gives it: only sweeps over shares do."""
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
            "share": labels.get("share", 0.0),
            "flops": result.flops,
            "final_loss": result.final_loss,
            "weight_rms": result.weight_rms[-1],
            "activation_rms": result.activation_rms[-1],
            "largest_logit": result.largest_logit[-1],
            "logits_above": result.logits_above[-1],
        }
        for result in results
    ]


def _frame(table: list[dict]) -> pandas.DataFrame:
    import pandas

    return pandas.DataFrame(table)


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)
