"""Scaling laws of AdamW and Muon: budgets along C = 6ND, everything searched at each (Moonlight §3.2, app. B).

A budget counts 6·N FLOPs a byte — N the parameters that multiply: the layers' matrices, the output head and
the gains of norms; the embedding, a look-up, is reported apart — and, for Muon, its Newton–Schulz FLOPs. So
Muon pays for its iterations in bytes that it does not see.

At each budget and for each optimizer the width, the batch size and two learning rates are searched in turns.
Round 1 goes in factors of two from the best settings of the budget below; round 2 goes on, with half steps
for the learning rates, until no axis moves any more. The optimum is then bracketed on every axis, with all
others at their best values. A search along axes can end in a side valley, so one with two learning rates is
made again from the best settings with one rate at the same budget, and the better end counts: no optimizer
with two rates, Muon included, ends worse than where one rate stood. Momentum is not searched: ``MOMENTUM``,
as Muon's μ and as AdamW's β₁, was the best for both optimizers in notebook 01.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dslib.experiments import search as searching
from dslib.experiments.search import SEARCH_SEEDS, Choice, Grid, Runner, Trials, coordinate_search, one_pass
from dslib.models.decoder import Decoder, DecoderConfig
from dslib.models.train_config import TrainConfig
from dslib.models.training import TrainResult, train_many
from dslib.optim import newton_schulz_flops, param_groups_for_muon

if TYPE_CHECKING:
    import pandas

#: The ladder of models: two layers each, so that one family is compared.
WIDTHS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
LAYERS = 2
CONTEXT = 64
MOMENTUM = 0.8

_MOST_PASSES = 12

#: What is searched, in this order.
AXES = ("lr", "rest_lr", "width", "batch_size")


@dataclass(frozen=True)
class Sizes:
    """What a profile runs."""

    #: What all runs share.
    base: TrainConfig
    #: FLOPs.
    budgets: tuple[float, ...]
    #: How many seeds are compared.
    repetitions: int
    axes: tuple[str, ...] = AXES
    search_seeds: tuple[int, ...] = SEARCH_SEEDS


_BASE = TrainConfig(context=CONTEXT, evaluations=1, evaluation_windows=256)
_WHOLE = Sizes(_BASE, tuple(8e8 * 2.5**k for k in range(3)), 8)

#: By profile. "quick" reads what "full" made.
SIZES = {
    "smoke": Sizes(
        replace(_BASE, context=16, evaluation_windows=4),
        tuple(5e7 * 1.7**k for k in range(3)),
        2,
        ("lr",),
        SEARCH_SEEDS[:1],
    ),
    "quick": _WHOLE,
    "full": _WHOLE,
}


@dataclass(frozen=True)
class Allocation:
    """How a budget is spent: what is searched at it."""

    #: d_model, one of :data:`WIDTHS`.
    width: int
    #: Windows in a step.
    batch_size: int
    #: Learning rate of the matrices.
    lr: float
    #: That of the rest (None: the same).
    rest_lr: float | None


@dataclass(frozen=True)
class Law:
    """One law: what is fitted."""

    optimizer: str
    #: The arm whose search gives its allocations: itself, if it is searched.
    searched_as: str
    #: Where that search starts at the smallest budget.
    start: Allocation | None = None
    #: Muon's μ.
    momentum: float = MOMENTUM


ONE_RATE = "AdamW, one rate"

ARMS = {
    "AdamW": Law("adamw", "AdamW", Allocation(8, 8, 2**-5, 2**-2.5)),
    "Muon": Law("muon", "Muon", Allocation(8, 8, 2**-4, 2**-3)),
    ONE_RATE: Law("adamw", ONE_RATE, Allocation(6, 8, 2**-5, None)),
    "Muon, one rate reused": Law("muon", ONE_RATE, momentum=0.95),
}


def model_of(width: int) -> DecoderConfig:
    """The model of a width: two layers, heads of about 16."""
    return DecoderConfig(d_model=width, layers=LAYERS, heads=max(1, width // 16))


@functools.lru_cache(maxsize=64)
def parameter_counts(model: DecoderConfig) -> tuple[int, int]:
    """(N, embedding): the parameters that multiply, and those of the look-up, which do not."""
    decoder = Decoder(model)
    embedding = decoder.embedding.weight.numel()
    total = sum(parameter.numel() for parameter in decoder.parameters())
    return total - (0 if model.tie_embeddings else embedding), embedding


@functools.lru_cache(maxsize=64)
def _newton_schulz_per_step(model: DecoderConfig, ns_steps: int) -> float:
    matrices, _ = param_groups_for_muon(Decoder(model))
    return float(sum(newton_schulz_flops(weight.shape, ns_steps) for weight in matrices))


def budget_per_step(config: TrainConfig) -> tuple[float, float]:
    """FLOPs of a step as the budget counts them: (6·N·bytes, Newton–Schulz's). The latter are 0 for AdamW."""
    N, _ = parameter_counts(config.model)
    own = _newton_schulz_per_step(config.model, config.ns_steps) if config.optimizer == "muon" else 0.0
    return 6.0 * N * config.batch_size * config.context, own


def at_budget(config: TrainConfig, budget: float) -> TrainConfig:
    """The same run with as many whole steps as ``budget`` FLOPs pay, its schedule fitted to them.

    Raises ValueError when they pay for none.
    """
    steps = int(budget / sum(budget_per_step(config)))
    if steps < 1:
        raise ValueError(f"budget={budget:.3g} pays for no step of {sum(budget_per_step(config)):.3g} FLOPs")
    return replace(config, steps=steps)


def allocated(base: TrainConfig, law: Law, allocation: Allocation, budget: float) -> TrainConfig:
    """A run of ``law`` that spends ``budget`` so; ``base`` gives what is not searched."""
    config = replace(
        base,
        model=model_of(allocation.width),
        optimizer=law.optimizer,
        batch_size=allocation.batch_size,
        lr=allocation.lr,
        rest_lr=allocation.rest_lr,
        momentum=law.momentum,
        betas=(MOMENTUM, base.betas[1]),
    )
    return at_budget(config, budget)


def _width(place: float) -> int:
    rung = round(math.log2(place))
    if not 0 <= rung < len(WIDTHS):
        raise ValueError(f"the best width lies at the end of {WIDTHS}: a longer ladder is needed")
    return WIDTHS[rung]


def _batch_size(place: float) -> int:
    if place < 1:
        raise ValueError("the best batch size is one window, with nothing below it: use a shorter context")
    return round(place)


def _half_octave(place: float) -> float:
    """√2·√2 is not quite 2 in floats: rounding must not make two of one learning rate."""
    return 2.0 ** (round(2 * math.log2(place)) / 2)


#: Every axis goes in steps of a factor two, a width up and down its ladder; the learning rates also in steps of √2.
_GRIDS = {
    "lr": Grid("lr", value=_half_octave),
    "rest_lr": Grid("rest_lr", value=_half_octave),
    "width": Grid("width", refine=False, value=_width, place=lambda width: 2.0 ** WIDTHS.index(width)),
    "batch_size": Grid("batch_size", refine=False, value=_batch_size),
}


def search(
    base: TrainConfig,
    law: Law,
    budget: float,
    starts: Sequence[Allocation],
    axes: Sequence[str] = AXES,
    seeds: Sequence[int] = SEARCH_SEEDS,
    run: Runner = train_many,
) -> list[TrainResult]:
    """Search the ``axes`` in two rounds until the optimum is bracketed on each; returns every run made.

    From each of the ``starts``: round 1 is one pass in factors of two; round 2 repeats passes, the learning
    rates refined by √2, until none moves. Then the widths two steps up and down the ladder complete the bowl,
    and if one of them is better, the passes go on from there. What was tried is not tried again, and the best
    of all ends is the best point of all. The loss of a point is its mean over ``seeds``. Raises RuntimeError
    when the optimum keeps moving, and ValueError when it lies at the end of the ladder or asks for less than
    one window a step.
    """
    axes = [axis for axis in axes if axis != "rest_lr" or starts[0].rest_lr is not None]
    fine = [_GRIDS[axis] for axis in axes]
    coarse = [replace(grid, refine=False) for grid in fine]
    trials = Trials(searching.on_seeds(run, lambda point: allocated(base, law, point, budget), seeds))

    def bowl_around(best: Allocation) -> tuple[Choice, ...]:
        place = WIDTHS.index(best.width)
        return (Choice("width", WIDTHS[max(0, place - 2) : place + 3]),) if "width" in axes else ()

    for start in starts:
        best = one_pass(start, coarse, trials.losses)
        coordinate_search(best, fine, trials.losses, _MOST_PASSES, bowl_around)
    return trials.results


def best_allocation(searched: pandas.DataFrame) -> Allocation:
    """The allocation of least mean loss in the rows of one arm's search at one budget.

    Raises ValueError when an axis that was searched has its best value at an edge.
    """
    one_rate = bool((searched["lr"] == searched["rest_lr"]).all())
    axes = [axis for axis in AXES if axis != "rest_lr" or not one_rate]
    best = searching.best_in_table(searched, axes, [axis for axis in axes if searched[axis].nunique() > 1])
    return Allocation(
        int(best["width"]),
        int(best["batch_size"]),
        float(best["lr"]),
        None if one_rate else float(best["rest_lr"]),
    )


def along(searched: pandas.DataFrame, best: Allocation, axis: str) -> dict[float, float]:
    """{value: mean loss} of one axis of a search, all others at their values in ``best``, ascending."""
    others = {name: value for name, value in vars(best).items() if value is not None}
    return searching.along(searched, others, axis)


def bowl(searched: pandas.DataFrame) -> tuple[list[int], list[float]]:
    """(N, mean loss) of every width in one arm's search at one budget, all else at its best, ascending."""
    losses = along(searched, best_allocation(searched), "width")
    return [parameter_counts(model_of(int(width)))[0] for width in losses], list(losses.values())


def wider(best: Allocation) -> Allocation:
    """Where the search at the next budget starts: one step up the ladder of widths."""
    place = min(WIDTHS.index(best.width) + 1, len(WIDTHS) - 2)
    return replace(best, width=WIDTHS[place])


def search_budgets(
    base: TrainConfig,
    budgets: Sequence[float],
    axes: Sequence[str] = AXES,
    search_seeds: Sequence[int] = SEARCH_SEEDS,
    run: Runner = train_many,
) -> list[dict[str, Any]]:
    """The searches of all :data:`ARMS` that are searched, one row a run, kind="search".

    At each budget one rate is searched first. Every search starts from its own best settings at the budget
    below, and one with two rates also from the best with one, if all axes are searched: else that start would
    stay where it differs.
    """
    found: list[dict[str, Any]] = []
    best: dict[str, Allocation] = {}
    order = sorted(
        (name for name, law in ARMS.items() if law.searched_as == name),
        key=lambda name: ARMS[name].start.rest_lr is not None,
    )
    for budget in sorted(budgets):
        for name in order:
            law = ARMS[name]
            starts = [wider(best[name]) if name in best else law.start]
            if law.start.rest_lr is not None and set(AXES) <= set(axes):
                one_rate = best[ONE_RATE]
                starts.append(replace(one_rate, rest_lr=one_rate.lr))
            table = rows(
                search(base, law, budget, starts, axes, search_seeds, run),
                kind="search",
                arm=name,
                budget=budget,
            )
            best[name] = best_allocation(_frame(table))
            found += table
    return found


def tuned(base: TrainConfig, searched: pandas.DataFrame) -> dict[tuple[str, float], TrainConfig]:
    """{(arm, budget): its run with the allocation that was searched for it}, for every budget searched."""
    configs = {}
    for (name, budget), part in searched.groupby(["arm", "budget"]):
        best = best_allocation(part)
        for arm in (arm for arm, law in ARMS.items() if law.searched_as == name):
            configs[arm, float(budget)] = allocated(base, ARMS[arm], best, float(budget))
    return configs


def measure(
    base: TrainConfig,
    budgets: Sequence[float],
    seeds: Sequence[int],
    axes: Sequence[str] = AXES,
    search_seeds: Sequence[int] = SEARCH_SEEDS,
    run: Runner = train_many,
) -> list[dict[str, Any]]:
    """Everything that ships: the searches, and the runs of every arm at every budget, kind="final"."""
    table = search_budgets(base, budgets, axes, search_seeds, run)
    final = tuned(base, _frame(table))
    # The long runs first: workers then end at about the same time.
    order = sorted(final, key=lambda key: -key[1])
    results = list(run([replace(final[key], seed=seed) for key in order for seed in seeds]))
    for position, (arm, budget) in enumerate(order):
        part = results[position * len(seeds) : (position + 1) * len(seeds)]
        table += rows(part, kind="final", arm=arm, budget=budget)
    return table


def curve(table: pandas.DataFrame, arm: str, counted: str = "compute") -> tuple[Any, Any]:
    """(C, L) of an arm's final runs for :func:`dslib.optim.fit_power_law`: (budgets,) and (seeds, budgets).

    ``counted`` is the column that counts the FLOPs: ``"compute"``, ``"six_nd"`` without Newton–Schulz's, or
    ``"flops"`` with attention's. Raises ValueError for an arm without final runs, or not all seeds at
    each budget.
    """
    part = table[(table["kind"] == "final") & (table["arm"] == arm)]
    losses = part.pivot_table(index="seed", columns="budget", values="final_loss")
    if losses.empty or losses.isna().any().any():
        raise ValueError(f"arm={arm!r} lacks final runs: every seed is needed at every budget")
    return part.groupby("budget")[counted].mean().to_numpy(), losses.to_numpy()


def rows(results: Iterable[TrainResult], **labels: Any) -> list[dict[str, Any]]:
    """One flat row a run: ``labels``, then its settings, sizes and FLOPs, then its final loss.

    ``bytes`` is D; ``six_nd`` is 6·N·D, ``compute`` adds Newton–Schulz's FLOPs, and ``flops`` attention's.
    """
    table = []
    for result in results:
        config = result.config
        N, embedding = parameter_counts(config.model)
        model, newton_schulz = budget_per_step(config)
        table.append(
            {
                **labels,
                "optimizer": config.optimizer,
                "width": config.model.d_model,
                "layers": config.model.layers,
                "parameters": N,
                "embedding": embedding,
                "batch_size": config.batch_size,
                "context": config.context,
                "steps": config.steps,
                "bytes": config.steps * config.batch_size * config.context,
                "lr": config.lr,
                "rest_lr": config.lr if config.rest_lr is None else config.rest_lr,
                "momentum": config.betas[0] if config.optimizer == "adamw" else config.momentum,
                "weight_decay": config.weight_decay,
                "seed": config.seed,
                "six_nd": config.steps * model,
                "compute": config.steps * (model + newton_schulz),
                "flops": result.flops,
                "final_loss": result.final_loss,
            }
        )
    return table


def _frame(table: list[dict[str, Any]]) -> pandas.DataFrame:
    import pandas

    return pandas.DataFrame(table)
