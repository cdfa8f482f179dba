"""Muon against AdamW: both searched as widely, then compared at equal compute.

A model trained for some hundred steps is limited by how fast its head and embedding grow, and a single
learning rate must be small enough for the matrices. Muon's matrices bear a larger one, so with one
learning rate for everything Muon also trains the *head* faster, which has nothing to do with
orthogonalisation. And a momentum of 0.95 remembers twenty steps, which is long in a short run. Here
``lr`` (matrices), ``rest_lr`` (the rest) and the momentum (AdamW's β₁) are searched for each optimizer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dslib.experiments.search import best_bracketed, bracketed_minimum
from dslib.models.decoder import Decoder
from dslib.models.training import (
    TrainConfig,
    TrainResult,
    flops_per_step,
    in_workers,
    train,
    train_many,
    with_compute,
)
from dslib.runs.cache import cached

if TYPE_CHECKING:
    import pandas

#: Share of AdamW's compute that Muon gets in the comparison.
SHARE = 0.75

#: Shares of the compute and momenta that are swept.
SHARES = (0.5, 0.625, 0.75, 0.875, 1.0)
MOMENTA = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98)

#: Seeds of searches stand apart from the seeds of the runs that are compared.
SEARCH_SEEDS = (1000, 1001)
_MOST_ROUNDS = 6

Run = Callable[[list[TrainConfig]], Iterable[TrainResult]]


@dataclass(frozen=True)
class Settings:
    """What a search finds: learning rate of the matrices, of the rest (None: the same), and momentum."""

    lr: float
    rest_lr: float | None
    momentum: float


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

#: Where the searches start; they move on from there until the optimum is bracketed.
STARTS = {"adamw": Settings(0.008, 0.128, 0.9), "muon": Settings(0.064, 0.128, 0.9)}
#: The momentum of an arm that reuses another optimizer's learning rates: Moonlight's.
REUSED_MOMENTUM = 0.95


def configured(base: TrainConfig, optimizer: str, share: float, settings: Settings) -> TrainConfig:
    """``base`` under an optimizer and settings, with ``share`` of the compute of AdamW's full run,
    Newton–Schulz counted, and its schedule fitted to the steps that this buys. The momentum is AdamW's
    β₁, or Muon's μ (whose AdamW for the rest keeps ``base``'s β₁)."""
    budget = share * base.steps * flops_per_step(replace(base, optimizer="adamw"))
    config = replace(base, optimizer=optimizer, lr=settings.lr, rest_lr=settings.rest_lr)
    if optimizer == "adamw":
        config = replace(config, betas=(settings.momentum, base.betas[1]))
    else:
        config = replace(config, momentum=settings.momentum)
    return with_compute(config, budget)


def settings_of(config: TrainConfig) -> Settings:
    """The learning rates and the momentum (AdamW's β₁) of a run."""
    momentum = config.betas[0] if config.optimizer == "adamw" else config.momentum
    return Settings(config.lr, config.rest_lr, momentum)


def search_settings(
    base: TrainConfig,
    optimizer: str,
    share: float,
    start: Settings,
    seeds: Iterable[int] = SEARCH_SEEDS,
    momenta: Sequence[float] = MOMENTA,
    run: Run = train_many,
) -> list[TrainResult]:
    """Search learning rates and momentum in turns until none of them moves.

    Each learning rate is bracketed on a grid of factor 2, refined by √2; the momentum is the best of
    ``momenta`` (empty: it stays at ``start``'s). ``start.rest_lr`` of None keeps one learning rate for
    everything. Returns every run made; the loss of a point is its mean over ``seeds``. Raises
    RuntimeError when the optimum keeps moving.
    """
    seeds = list(seeds)
    runs: dict[Settings, list[TrainResult]] = {}
    known: list[float] = []

    def snapped(value: float) -> float:
        """√2·√2 is not quite 2 in floats: a value that was met before, give or take rounding, is that one."""
        near = [old for old in known if abs(value / old - 1) < 1e-3]
        if not near:
            known.append(float(f"{value:.6g}"))
        return near[0] if near else known[-1]

    def losses(points: list[Settings]) -> list[float]:
        fresh = [point for point in dict.fromkeys(points) if point not in runs]
        tried = [configured(base, optimizer, share, point) for point in fresh]
        results = list(run([replace(config, seed=seed) for config in tried for seed in seeds]))
        for position, point in enumerate(fresh):
            runs[point] = results[position * len(seeds) : (position + 1) * len(seeds)]
        return [_mean(result.final_loss for result in runs[point]) for point in points]

    def bracketed(best: Settings, axis: str) -> Settings:
        centre = getattr(best, axis)
        found = bracketed_minimum(
            lambda values: losses([replace(best, **{axis: snapped(value)}) for value in values]),
            [centre / 2, centre, centre * 2],
        )
        return replace(best, **{axis: snapped(best_bracketed(found))})

    best = replace(
        start, lr=snapped(start.lr), rest_lr=None if start.rest_lr is None else snapped(start.rest_lr)
    )
    for _ in range(_MOST_ROUNDS):
        before = best
        if momenta:
            points = [replace(best, momentum=momentum) for momentum in momenta]
            best = min(zip(losses(points), points, strict=True), key=lambda pair: pair[0])[1]
        best = bracketed(best, "lr")
        if best.rest_lr is not None:
            best = bracketed(best, "rest_lr")
        if best == before:
            return [result for results in runs.values() for result in results]
    raise RuntimeError(f"the best settings still move after {_MOST_ROUNDS} rounds: {before} → {best}")


def best_settings(table: pandas.DataFrame) -> Settings:
    """The settings of least mean loss in a table of one arm's search, both learning rates bracketed.

    ``table`` has the columns lr, rest_lr (equal to lr where one rate serves all), momentum and
    final_loss. Raises ValueError when the best learning rate lies at an edge of what was searched.
    """
    means = table.groupby(["lr", "rest_lr", "momentum"])["final_loss"].mean()
    lr, rest_lr, momentum = (float(value) for value in means.idxmin())
    if (table["lr"] == table["rest_lr"]).all():
        best_bracketed({a: loss for (a, _, m), loss in means.items() if m == momentum})
        return Settings(lr, None, momentum)
    best_bracketed({a: loss for (a, b, m), loss in means.items() if (b, m) == (rest_lr, momentum)})
    best_bracketed({b: loss for (a, b, m), loss in means.items() if (a, m) == (lr, momentum)})
    return Settings(lr, rest_lr, momentum)


def search_arms(base: TrainConfig, names: Iterable[str] = tuple(ARMS), run: Run = train_many) -> list[dict]:
    """The searches that the named :data:`ARMS` need on ``base``: one row a run, kind="search", by arm.

    Raises ValueError for an unknown name.
    """
    names, found = list(names), []
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise ValueError(f"names={unknown} are no arms; use some of {', '.join(map(repr, ARMS))}")
    for name in dict.fromkeys(ARMS[name].rates_of for name in names):
        one = ARMS[name]
        start = replace(STARTS[one.optimizer], rest_lr=None) if one.one_rate else STARTS[one.optimizer]
        results = search_settings(base, one.optimizer, one.share, start, run=run)
        found += rows(results, kind="search", arm=name)
    return found


def tuned_arms(base: TrainConfig, searched: pandas.DataFrame) -> dict[str, TrainConfig]:
    """Every arm on ``base`` whose search is among ``searched``, with the settings found there.

    ``searched``: rows of kind "search" for this model. Raises ValueError when an optimum was not
    bracketed.
    """
    found = {name: best_settings(part) for name, part in searched.groupby("arm")}
    tuned = {}
    for name, one in ARMS.items():
        if one.rates_of in found:
            settings = found[one.rates_of]
            if ARMS[one.rates_of].optimizer != one.optimizer:
                settings = replace(settings, momentum=REUSED_MOMENTUM)
            tuned[name] = configured(base, one.optimizer, one.share, settings)
    return tuned


def with_seeds(config: TrainConfig, seeds: Iterable[int]) -> list[TrainConfig]:
    """One configuration a seed."""
    return [replace(config, seed=seed) for seed in seeds]


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
            config = configured(base, optimizer, share, settings_of(arms[name]))
            found += rows(run(with_seeds(config, seeds)), kind="share", arm=optimizer, share=share)
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


def momenta_many(configs: Iterable[TrainConfig], jobs: int = 1) -> Iterator[dict[str, Tensor]]:
    """:func:`momenta` of every configuration, in worker processes and cached, as :func:`train_many` does."""
    yield from in_workers(_momenta, configs, jobs)


@cached
def _momenta(config: TrainConfig, corpus: str) -> dict[str, Tensor]:
    return momenta(config)


def measure(base: TrainConfig, seeds: Sequence[int], run: Run = train_many) -> list[dict]:
    """Everything that ships about the main model: the searches and finals of all :data:`ARMS`, and both
    optimizers at other shares of the compute."""
    table = search_arms(base, ARMS, run)
    arms = tuned_arms(base, _frame(table))
    for name, config in arms.items():
        table += rows(run(with_seeds(config, seeds)), kind="final", arm=name)
    return table + share_rows(arms, base, SHARES, list(seeds)[:4], run)


def measure_larger(
    base: TrainConfig, tuned: dict[str, TrainConfig], seeds: Sequence[int], run: Run = train_many
) -> list[dict]:
    """The shares of AdamW and Muon for a model whose runs cost more: the search starts from the main
    model's settings (``tuned``), on one seed, and leaves the momentum there."""
    table = []
    for name in ("AdamW", "Muon, short"):
        one, start = ARMS[name], settings_of(tuned[name])
        found = search_settings(base, one.optimizer, one.share, start, SEARCH_SEEDS[:1], (), run)
        table += rows(found, kind="search", arm=name)
    arms = tuned_arms(base, _frame(table))
    return table + share_rows(arms, base, (0.5, 0.75, 1.0), list(seeds)[:4], run)


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
            "momentum": settings_of(result.config).momentum,
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
