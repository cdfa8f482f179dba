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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dslib.experiments.search import best_bracketed, bracketed_minimum
from dslib.models.decoder import Decoder, DecoderConfig
from dslib.models.training import TrainConfig, TrainResult, train_many
from dslib.optim import newton_schulz_flops, param_groups_for_muon

if TYPE_CHECKING:
    import pandas

#: The ladder of models: two layers each, so that one family is compared.
WIDTHS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
LAYERS = 2
CONTEXT = 64
MOMENTUM = 0.8

#: Seeds of searches stand apart from the seeds of the runs that are compared.
SEARCH_SEEDS = (1000, 1001)
_MOST_PASSES = 12

Run = Callable[[list[TrainConfig]], Iterable[TrainResult]]


@dataclass(frozen=True)
class Settings:
    """What is searched at a budget. ``rest_lr`` of None: one learning rate for everything."""

    width: int
    batch_size: int
    lr: float
    rest_lr: float | None


@dataclass(frozen=True)
class Arm:
    """One law: an optimizer, the arm whose search gives its settings (itself, if it is searched), where
    that search starts at the smallest budget, and Muon's momentum."""

    optimizer: str
    settings_of: str
    start: Settings | None = None
    momentum: float = MOMENTUM


ONE_RATE = "AdamW, one rate"

ARMS = {
    "AdamW": Arm("adamw", "AdamW", Settings(8, 8, 2**-5, 2**-2.5)),
    "Muon": Arm("muon", "Muon", Settings(8, 8, 2**-4, 2**-3)),
    ONE_RATE: Arm("adamw", ONE_RATE, Settings(6, 8, 2**-5, None)),
    "Muon, one rate reused": Arm("muon", ONE_RATE, momentum=0.95),
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


def configured(base: TrainConfig, arm: Arm, settings: Settings, budget: float) -> TrainConfig:
    """A run of ``arm`` with ``settings`` at ``budget``; ``base`` gives what is not searched."""
    config = replace(
        base,
        model=model_of(settings.width),
        optimizer=arm.optimizer,
        batch_size=settings.batch_size,
        lr=settings.lr,
        rest_lr=settings.rest_lr,
        momentum=arm.momentum,
        betas=(MOMENTUM, base.betas[1]),
    )
    return at_budget(config, budget)


#: What is searched, in this order.
AXES = ("lr", "rest_lr", "width", "batch_size")
# Every axis goes in steps of a factor two: a width by its place on the ladder.
_READ: dict[str, Callable[[Settings], float]] = {
    "width": lambda at: 2.0 ** WIDTHS.index(at.width),
    "batch_size": lambda at: float(at.batch_size),
    "lr": lambda at: at.lr,
    "rest_lr": lambda at: at.rest_lr,
}


def _moved(at: Settings, axis: str, value: float) -> Settings:
    """``at`` with another value of an axis, snapped to the grid: rounding must not make two of one point.

    Raises ValueError past the end of the ladder of widths, and for a batch of less than one window.
    """
    if axis == "width":
        place = round(math.log2(value))
        if not 0 <= place < len(WIDTHS):
            raise ValueError(f"the best width lies at the end of {WIDTHS}: a longer ladder is needed")
        return replace(at, width=WIDTHS[place])
    if axis == "batch_size":
        if value < 1:
            raise ValueError(
                "the best batch size is one window, with nothing below it: use a shorter context"
            )
        return replace(at, batch_size=round(value))
    return replace(at, **{axis: 2.0 ** (round(2 * math.log2(value)) / 2)})


def search(
    base: TrainConfig,
    arm: Arm,
    budget: float,
    starts: Sequence[Settings],
    axes: Sequence[str] = AXES,
    seeds: Sequence[int] = SEARCH_SEEDS,
    run: Run = train_many,
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
    runs: dict[Settings, list[TrainResult]] = {}

    def losses(points: Sequence[Settings]) -> list[float]:
        fresh = [point for point in dict.fromkeys(points) if point not in runs]
        tried = [configured(base, arm, point, budget) for point in fresh]
        configs = [replace(config, seed=seed) for config in tried for seed in seeds]
        results = list(run(configs)) if configs else []
        count = len(seeds)
        for position, point in enumerate(fresh):
            runs[point] = results[position * count : (position + 1) * count]
        return [math.fsum(result.final_loss for result in runs[point]) / count for point in points]

    def bracketed(best: Settings, axis: str, refine: bool) -> Settings:
        centre = _READ[axis](best)
        found = bracketed_minimum(
            lambda values: losses([_moved(best, axis, value) for value in values]),
            [centre / 2, centre, centre * 2],
            refine=refine and axis in ("lr", "rest_lr"),
        )
        return _moved(best, axis, best_bracketed(found))

    def descend(best: Settings) -> None:
        for axis in axes:
            best = bracketed(best, axis, refine=False)
        for _ in range(_MOST_PASSES):
            before = best
            for axis in axes:
                best = bracketed(best, axis, refine=True)
            if best == before and "width" in axes:
                place = WIDTHS.index(best.width)
                bowl = [replace(best, width=width) for width in WIDTHS[max(0, place - 2) : place + 3]]
                best = min(zip(losses(bowl), bowl, strict=True), key=lambda pair: pair[0])[1]
            if best == before:
                return
        raise RuntimeError(f"the best settings still move after {_MOST_PASSES} passes: {before} → {best}")

    for start in starts:
        descend(start)
    return [result for results in runs.values() for result in results]


def best_settings(searched: pandas.DataFrame) -> Settings:
    """The settings of least mean loss in the rows of one arm's search at one budget.

    Raises ValueError when an axis that was searched has its best value at an edge.
    """
    one_rate = bool((searched["lr"] == searched["rest_lr"]).all())
    axes = [axis for axis in AXES if axis != "rest_lr" or not one_rate]
    means = searched.groupby(axes)["final_loss"].mean()
    best = dict(zip(axes, means.idxmin(), strict=True))
    for axis in axes:
        if searched[axis].nunique() > 1:
            best_bracketed(along(searched, best, axis))
    width, batch_size = int(best["width"]), int(best["batch_size"])
    return Settings(width, batch_size, float(best["lr"]), None if one_rate else float(best["rest_lr"]))


def along(searched: pandas.DataFrame, best: dict[str, float] | Settings, axis: str) -> dict[float, float]:
    """{value: mean loss} of one axis of a search, all others at their values in ``best``, ascending."""
    best = vars(best) if isinstance(best, Settings) else best
    for name in (name for name in AXES if name != axis and best.get(name) is not None):
        searched = searched[searched[name] == best[name]]
    return {float(value): float(loss) for value, loss in searched.groupby(axis)["final_loss"].mean().items()}


def bowl(searched: pandas.DataFrame) -> tuple[list[int], list[float]]:
    """(N, mean loss) of every width in one arm's search at one budget, all else at its best, ascending."""
    losses = along(searched, best_settings(searched), "width")
    return [parameter_counts(model_of(int(width)))[0] for width in losses], list(losses.values())


def wider(settings: Settings) -> Settings:
    """Where the search at the next budget starts: one step up the ladder of widths."""
    place = min(WIDTHS.index(settings.width) + 1, len(WIDTHS) - 2)
    return replace(settings, width=WIDTHS[place])


def search_budgets(
    base: TrainConfig,
    budgets: Sequence[float],
    axes: Sequence[str] = AXES,
    search_seeds: Sequence[int] = SEARCH_SEEDS,
    run: Run = train_many,
) -> list[dict[str, Any]]:
    """The searches of all :data:`ARMS` that are searched, one row a run, kind="search".

    At each budget one rate is searched first. Every search starts from its own best settings at the budget
    below, and one with two rates also from the best with one, if all axes are searched: else that start would
    stay where it differs.
    """
    found: list[dict[str, Any]] = []
    best: dict[str, Settings] = {}
    order = sorted(
        (name for name, arm in ARMS.items() if arm.settings_of == name),
        key=lambda name: ARMS[name].start.rest_lr is not None,
    )
    for budget in sorted(budgets):
        for name in order:
            arm = ARMS[name]
            starts = [wider(best[name]) if name in best else arm.start]
            if arm.start.rest_lr is not None and set(AXES) <= set(axes):
                one_rate = best[ONE_RATE]
                starts.append(replace(one_rate, rest_lr=one_rate.lr))
            table = rows(
                search(base, arm, budget, starts, axes, search_seeds, run),
                kind="search",
                arm=name,
                budget=budget,
            )
            best[name] = best_settings(_frame(table))
            found += table
    return found


def tuned(base: TrainConfig, searched: pandas.DataFrame) -> dict[tuple[str, float], TrainConfig]:
    """{(arm, budget): its run with the settings that were searched for it}, for every budget searched."""
    configs = {}
    for (name, budget), part in searched.groupby(["arm", "budget"]):
        settings = best_settings(part)
        for arm in (arm for arm in ARMS if ARMS[arm].settings_of == name):
            configs[arm, float(budget)] = configured(base, ARMS[arm], settings, float(budget))
    return configs


def measure(
    base: TrainConfig,
    budgets: Sequence[float],
    seeds: Sequence[int],
    axes: Sequence[str] = AXES,
    search_seeds: Sequence[int] = SEARCH_SEEDS,
    run: Run = train_many,
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
