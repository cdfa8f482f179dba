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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dslib.experiments.search import (
    SEARCH_SEEDS,
    Choice,
    Grid,
    Runner,
    Trials,
    best_in_table,
    coordinate_search,
    on_seeds,
)
from dslib.models.decoder import DecoderConfig
from dslib.models.train_config import TrainConfig, flops_per_step, with_compute
from dslib.models.training import TrainResult, corpus_digest, train_many, train_to_end
from dslib.optim import newton_schulz, svd_orthogonalize
from dslib.runs.cache import cached
from dslib.spectra import singular_spectrum

if TYPE_CHECKING:
    import pandas

#: Share of AdamW's compute that Muon gets in the comparison.
SHARE = 0.75

#: Shares of the compute and values of the momentum that are swept.
SHARES = (0.5, 0.625, 0.75, 0.875, 1.0)
MOMENTUM_VALUES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98)

_MOST_PASSES = 6


def run_of(d_model: int, heads: int, layers: int, steps: int) -> TrainConfig:
    """The run that comparisons on a model of this size start from; AdamW's number of steps."""
    model = DecoderConfig(d_model=d_model, heads=heads, layers=layers)
    return TrainConfig(model, steps=steps, batch_size=32, context=64)


#: Width × layers. Every arm is compared on the first; larger ones train for fewer steps, so that they end in time.
MODELS = {
    "32 × 2": run_of(32, 2, 2, steps=200),
    "64 × 2": run_of(64, 2, 2, steps=150),
    "96 × 3": run_of(96, 3, 3, steps=100),
}


@dataclass(frozen=True)
class Rates:
    """What is searched of an optimizer."""

    #: Learning rate of the matrices.
    lr: float
    #: That of the rest (None: the same).
    rest_lr: float | None
    #: AdamW's β₁, or Muon's μ (whose AdamW for the rest keeps its own β₁).
    momentum: float


@dataclass(frozen=True)
class Rival:
    """One side of the comparison."""

    optimizer: str
    #: Of AdamW's compute.
    share: float
    #: The arm whose search gives its rates: itself, if it is searched.
    searched_as: str
    #: Whether one learning rate serves everything.
    one_rate: bool = False


ARMS = {
    "AdamW": Rival("adamw", 1.0, "AdamW"),
    "AdamW, short": Rival("adamw", SHARE, "AdamW, short"),
    "Muon, short": Rival("muon", SHARE, "Muon, short"),
    "Muon, short, reused": Rival("muon", SHARE, "AdamW"),
    "AdamW, one rate": Rival("adamw", 1.0, "AdamW, one rate", one_rate=True),
    "Muon, short, one rate reused": Rival("muon", SHARE, "AdamW, one rate", one_rate=True),
}

#: Where the searches start; they move on from there until the optimum is bracketed.
STARTS = {"adamw": Rates(0.008, 0.128, 0.9), "muon": Rates(0.064, 0.128, 0.9)}
#: The momentum of an arm that reuses another optimizer's learning rates: Moonlight's.
REUSED_MOMENTUM = 0.95


def with_rates(base: TrainConfig, optimizer: str, share: float, rates: Rates) -> TrainConfig:
    """``base`` under an optimizer at its rates, with ``share`` of the compute of AdamW's full run,
    Newton–Schulz counted, and its schedule fitted to the steps that this buys."""
    budget = share * base.steps * flops_per_step(replace(base, optimizer="adamw"))
    config = replace(base, optimizer=optimizer, lr=rates.lr, rest_lr=rates.rest_lr)
    if optimizer == "adamw":
        config = replace(config, betas=(rates.momentum, base.betas[1]))
    else:
        config = replace(config, momentum=rates.momentum)
    return with_compute(config, budget)


def rates_of(config: TrainConfig) -> Rates:
    """The rates of a run."""
    momentum = config.betas[0] if config.optimizer == "adamw" else config.momentum
    return Rates(config.lr, config.rest_lr, momentum)


def search_rates(
    base: TrainConfig,
    optimizer: str,
    share: float,
    start: Rates,
    seeds: Iterable[int] = SEARCH_SEEDS,
    momentum_values: Sequence[float] = MOMENTUM_VALUES,
    run: Runner = train_many,
) -> list[TrainResult]:
    """Search learning rates and momentum in turns until none of them moves.

    Each learning rate is bracketed on a grid of factor 2, refined by √2; the momentum is the best of
    ``momentum_values`` (empty: it stays at ``start``'s). ``start.rest_lr`` of None keeps one learning rate for
    everything. Returns every run made. Raises RuntimeError when the optimum keeps moving.
    """
    known: list[float] = []

    def snapped(value: float) -> float:
        """√2·√2 is not quite 2 in floats: a value that was met before, give or take rounding, is that one."""
        near = [old for old in known if abs(value / old - 1) < 1e-3]
        if not near:
            known.append(float(f"{value:.6g}"))
        return near[0] if near else known[-1]

    start = replace(start, lr=snapped(start.lr))
    coordinates = [Grid("lr", value=snapped)]
    if momentum_values:
        coordinates.insert(0, Choice("momentum", momentum_values))
    if start.rest_lr is not None:
        start = replace(start, rest_lr=snapped(start.rest_lr))
        coordinates.append(Grid("rest_lr", value=snapped))
    trials = Trials(on_seeds(run, lambda rates: with_rates(base, optimizer, share, rates), seeds))
    coordinate_search(start, coordinates, trials.losses, _MOST_PASSES)
    return trials.results


def best_rates(searched: pandas.DataFrame) -> Rates:
    """The rates of least mean loss in a table of one arm's search, both learning rates bracketed.

    ``searched`` has the columns lr, rest_lr (equal to lr where one rate serves all), momentum and
    final_loss. Raises ValueError when the best learning rate lies at an edge of what was searched.
    """
    one_rate = bool((searched["lr"] == searched["rest_lr"]).all())
    learning_rates = ["lr"] if one_rate else ["lr", "rest_lr"]
    best = best_in_table(searched, [*learning_rates, "momentum"], learning_rates)
    return Rates(float(best["lr"]), None if one_rate else float(best["rest_lr"]), float(best["momentum"]))


def search_arms(
    base: TrainConfig, names: Iterable[str] = tuple(ARMS), run: Runner = train_many
) -> list[dict]:
    """The searches that the named :data:`ARMS` need on ``base``: one row a run, kind="search", by arm.

    Raises ValueError for an unknown name.
    """
    names, found = list(names), []
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise ValueError(f"names={unknown} are no arms; use some of {', '.join(map(repr, ARMS))}")
    for name in dict.fromkeys(ARMS[name].searched_as for name in names):
        one = ARMS[name]
        start = replace(STARTS[one.optimizer], rest_lr=None) if one.one_rate else STARTS[one.optimizer]
        results = search_rates(base, one.optimizer, one.share, start, run=run)
        found += rows(results, kind="search", arm=name)
    return found


def tuned_arms(base: TrainConfig, searched: pandas.DataFrame) -> dict[str, TrainConfig]:
    """Every arm on ``base`` whose search is among ``searched``, with the rates found there.

    ``searched``: rows of kind "search" for this model. Raises ValueError when an optimum was not
    bracketed.
    """
    found = {name: best_rates(part) for name, part in searched.groupby("arm")}
    tuned = {}
    for name, one in ARMS.items():
        if one.searched_as in found:
            rates = found[one.searched_as]
            if ARMS[one.searched_as].optimizer != one.optimizer:
                rates = replace(rates, momentum=REUSED_MOMENTUM)
            tuned[name] = with_rates(base, one.optimizer, one.share, rates)
    return tuned


def arms_on(base: TrainConfig, tuned: Mapping[str, TrainConfig]) -> dict[str, TrainConfig]:
    """The arms of ``tuned`` (:func:`tuned_arms`) on another ``base``, each at its rates and its share of the
    compute."""
    return {
        name: with_rates(base, ARMS[name].optimizer, ARMS[name].share, rates_of(config))
        for name, config in tuned.items()
    }


def with_seeds(config: TrainConfig, seeds: Iterable[int]) -> list[TrainConfig]:
    """One configuration a seed."""
    return [replace(config, seed=seed) for seed in seeds]


def share_rows(
    arms: dict[str, TrainConfig],
    base: TrainConfig,
    shares: Iterable[float],
    seeds: Iterable[int],
    run: Runner = train_many,
) -> list[dict]:
    """Final losses of tuned AdamW and Muon at other shares of the compute, each on its own schedule."""
    seeds, found = list(seeds), []
    for share in shares:
        for optimizer, name in (("adamw", "AdamW"), ("muon", "Muon, short")):
            config = with_rates(base, optimizer, share, rates_of(arms[name]))
            found += rows(run(with_seeds(config, seeds)), kind="share", arm=optimizer, share=share)
    return found


@cached(also=corpus_digest)
def momenta(config: TrainConfig) -> dict[str, Tensor]:
    """The optimizer's momentum buffers at the end of a run with Muon: the matrix of every weight, by its name.

    Raises ValueError for another optimizer, and RuntimeError when the run diverges.
    """
    if config.optimizer != "muon":
        raise ValueError(f"config.optimizer={config.optimizer!r} keeps no momentum matrices; use 'muon'")
    trained = train_to_end(config)
    names = {parameter: name for name, parameter in trained.model.named_parameters()}
    return {names[p]: state["momentum_buffer"] for p, state in trained.optimizers[0].state.items()}


def measure(base: TrainConfig, seeds: Sequence[int], run: Runner = train_many) -> list[dict]:
    """Everything that ships about the main model: the searches and finals of all :data:`ARMS`, and both
    optimizers at other shares of the compute."""
    table = search_arms(base, ARMS, run)
    arms = tuned_arms(base, _frame(table))
    for name, config in arms.items():
        table += rows(run(with_seeds(config, seeds)), kind="final", arm=name)
    return table + share_rows(arms, base, SHARES, list(seeds)[:4], run)


def measure_larger(
    base: TrainConfig, tuned: dict[str, TrainConfig], seeds: Sequence[int], run: Runner = train_many
) -> list[dict]:
    """The shares of AdamW and Muon for a model whose runs cost more: the search starts from the main
    model's rates (``tuned``), on one seed, and leaves the momentum there."""
    table = []
    for name in ("AdamW", "Muon, short"):
        one, start = ARMS[name], rates_of(tuned[name])
        found = search_rates(base, one.optimizer, one.share, start, SEARCH_SEEDS[:1], (), run)
        table += rows(found, kind="search", arm=name)
    arms = tuned_arms(base, _frame(table))
    return table + share_rows(arms, base, (0.5, 0.75, 1.0), list(seeds)[:4], run)


def measure_everything(
    models: Mapping[str, TrainConfig], seeds: Sequence[int], run: Runner = train_many
) -> pandas.DataFrame:
    """The table that ships: :func:`measure` of the first of ``models``, :func:`measure_larger` of the others,
    with the name of each in the column ``model``."""
    main, *larger = models
    table = [{**each, "model": main} for each in measure(models[main], seeds, run)]
    tuned = tuned_arms(models[main], _frame([each for each in table if each["kind"] == "search"]))
    for name in larger:
        table += [{**each, "model": name} for each in measure_larger(models[name], tuned, seeds, run)]
    return _frame(table)


def arm_rows(arms: Mapping[str, TrainConfig]) -> list[dict[str, Any]]:
    """What every arm is, for a table: optimizer, compute, steps, and its rates and whose search gave them."""
    return [
        {
            "arm": name,
            "optimizer": {"adamw": "AdamW", "muon": "Muon + AdamW"}[config.optimizer],
            "compute": ARMS[name].share,
            "steps": config.steps,
            "lr, matrices": config.lr,
            "lr, rest": config.lr if config.rest_lr is None else config.rest_lr,
            "μ or β₁": rates_of(config).momentum,
            "rates searched for": ARMS[name].searched_as,
        }
        for name, config in arms.items()
    ]


def through_best(searched: pandas.DataFrame, best: Rates, axis: str) -> pandas.Series:
    """Mean final loss of one arm's search by its ``axis`` ("lr", "rest_lr" or "momentum"), the others at ``best``."""
    part = searched
    for other in ("lr", "rest_lr", "momentum"):
        if other != axis:
            part = part[part[other] == getattr(best, other)]
    return part.groupby(axis)["final_loss"].mean()


def polar_errors(
    matrices: Iterable[Tensor], coefficients: str = "jordan", steps: Iterable[int] = range(1, 11)
) -> Tensor:
    """How far Newton–Schulz is from the exact polar factor (SVD, float64) after each number of ``steps``.

    ``matrices``: (A, B) each. Returns (steps, 2) float64, means over the matrices: the relative Frobenius
    error, and the smallest singular value.
    """
    pairs = [(matrix, svd_orthogonalize(matrix.double())) for matrix in matrices]
    steps = list(steps)
    found = torch.zeros(len(steps), 2, dtype=torch.float64)
    for matrix, exact in pairs:
        for place, count in enumerate(steps):
            after = newton_schulz(matrix, count, coefficients, dtype=torch.float32).double()
            found[place, 0] += (after - exact).norm() / exact.norm()
            found[place, 1] += singular_spectrum(after)[-1]
    return found / len(pairs)


def logits_and_cost(arms: Mapping[str, Sequence[TrainResult]]) -> list[dict[str, Any]]:
    """For a table: the attention logits at the end of each arm's runs (worst and mean over them), and what the
    optimizer costs: its share of the wall time, and Newton–Schulz's share of the FLOPs."""
    found = []
    for name, results in arms.items():
        config, largest = results[0].config, [result.largest_logit[-1] for result in results]
        bare = flops_per_step(replace(config, optimizer="adamw"))
        found.append(
            {
                "arm": name,
                "largest logit": max(largest),
                "logits past 20": math.fsum(r.logits_above[-1] for r in results) / len(results),
                "optimizer, share of time": sum(r.optimizer_seconds for r in results)
                / sum(r.seconds for r in results),
                "Newton–Schulz, share of FLOPs": 1 - bare / flops_per_step(config),
            }
        )
    return found


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
            "momentum": rates_of(result.config).momentum,
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
