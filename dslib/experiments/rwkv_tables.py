"""The table of the comparison of RWKV-7 with attention: run sizes, learning rates searched, then a row a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from dslib.experiments.rwkv import (
    LONGER,
    LengthsRun,
    RecallRun,
    TrackingConfig,
    TrackingRun,
    arms,
    lengths,
    recall,
    recall_arms,
    track,
    tracking_arms,
    with_facts,
)
from dslib.experiments.search import SEARCH_SEEDS, Grid, Runner, Trials, on_seeds, one_pass
from dslib.models.decoder import DecoderConfig
from dslib.models.train_config import TrainConfig
from dslib.runs.workers import in_workers
from dslib.tasks.recall import RecallTask
from dslib.tasks.state_tracking import StateTracking

if TYPE_CHECKING:
    import pandas

C = TypeVar("C", bound=TrainConfig)

_DECODER = DecoderConfig(d_model=32, layers=2, heads=2)
#: Runs on text; learning rates are where the searches start.
TEXT = TrainConfig(
    _DECODER,
    optimizer="muon",
    lr=0.04,
    rest_lr=0.04,
    momentum=0.9,
    batch_size=16,
    steps=200,
    context=64,
    evaluations=4,
)
#: Runs on recall: one layer, a vocabulary of eight kinds of five symbols and the blank.
RECALL = replace(
    TEXT,
    model=replace(_DECODER, vocab_size=41, layers=1),
    context=48,
    recall=RecallTask(facts=8, values=4, distance=8, first_symbol=1),
)
#: Runs on state tracking.
TRACKING = TrackingConfig(
    DecoderConfig(vocab_size=2, d_model=16, layers=2, heads=2), steps=200, batch_size=32, context=16
)


@dataclass(frozen=True)
class Sizes:
    """What the table is made of."""

    text: TrainConfig = TEXT
    recall: TrainConfig = RECALL
    tracking: TrackingConfig = TRACKING
    #: Numbers of facts that are recalled, ascending.
    facts: tuple[int, ...] = (2, 4, 8)
    #: Numbers of things whose order is tracked.
    objects: tuple[int, ...] = (2, 3)
    #: Learning rates that are tried for tracking.
    rates: tuple[float, ...] = (0.01, 0.02, 0.04)
    seeds: int = 8


def _tiny(config: C) -> C:
    return replace(config, steps=2, batch_size=2, evaluation_windows=2, evaluations=1)


FULL = Sizes()
#: Every path in seconds.
SMOKE = Sizes(_tiny(TEXT), _tiny(RECALL), _tiny(TRACKING))

_LR, _REST_LR = Grid("lr", refine=False), Grid("rest_lr", refine=False)


def search_rates(
    config: TrainConfig, run: Runner, seeds: Sequence[int] = SEARCH_SEEDS
) -> Trials[TrainConfig, Any]:
    """Search the learning rate of the matrices, then of the rest, then of the matrices again, each on a grid of
    factor 2 that grows until its best is inside. ``run`` gives results with a ``config`` and a ``loss``."""
    trials = Trials(on_seeds(run, lambda point: point, seeds), attrgetter("loss"))
    start = replace(config, rest_lr=config.lr if config.rest_lr is None else config.rest_lr)
    one_pass(start, (_LR, _REST_LR, _LR), trials.losses)
    return trials


def text_rows(base: TrainConfig, seeds: Iterable[int], run: Runner) -> list[dict]:
    """Text: learning rates searched for attention and for RWKV-7, then all arms on ``seeds``, those with a part taken
    out at RWKV-7's rates. ``base.model`` is the decoder; ``run`` makes :func:`~dslib.experiments.rwkv.lengths`."""
    table, seeds, rates = [], list(seeds), base
    for name, model in arms(base.model).items():
        config = replace(base, model=model)
        if name in ("attention", "RWKV-7"):
            trials = search_rates(config, run)
            table += [row(found, kind="search", arm=name) for found in trials.results]
            rates = trials.best
        config = replace(config, lr=rates.lr, rest_lr=rates.rest_lr)
        results = run([replace(config, seed=seed) for seed in seeds])
        table += [row(found, kind="text", arm=name) for found in results]
    return table


def recall_rows(base: TrainConfig, facts: Sequence[int], seeds: Iterable[int], run: Runner) -> list[dict]:
    """Recall of growing numbers of facts; ``base.recall`` is the task whose ``facts`` are replaced, ``run`` makes
    :func:`~dslib.experiments.rwkv.recall`. The learning rates of each arm are searched at the middle number."""
    table, seeds = [], list(seeds)
    for name, model in recall_arms(base.model).items():
        config = replace(base, model=model)
        trials = search_rates(with_facts(config, facts[len(facts) // 2]), run, SEARCH_SEEDS[:1])
        table += [row(found, kind="recall search", arm=name) for found in trials.results]
        config = replace(config, lr=trials.best.lr, rest_lr=trials.best.rest_lr)
        several = [replace(with_facts(config, count), seed=seed) for count in facts for seed in seeds]
        table += [row(found, kind="recall", arm=name) for found in run(several)]
    return table


def tracking_rows(
    base: TrackingConfig, rates: Sequence[float], objects: Sequence[int], seeds: Iterable[int], run: Runner
) -> list[dict]:
    """State tracking: for every arm and number of objects the learning rate of ``rates`` that is best *beyond*
    the training length on a seed of its own, then the runs on ``seeds``. ``run`` makes
    :func:`~dslib.experiments.rwkv.track`."""
    table, seeds = [], list(seeds)
    for count in objects:
        elements = StateTracking(count).elements
        for name, model in tracking_arms(replace(base.model, vocab_size=elements)).items():
            config = replace(base, model=model, objects=count)
            tried = [replace(config, lr=lr, rest_lr=lr, seed=SEARCH_SEEDS[0]) for lr in rates]
            runs = list(run(tried))
            table += [row(found, kind="tracking search", arm=name) for found in runs]
            best = max(runs, key=lambda found: found.accuracy(LONGER)).config
            finals = run([replace(best, seed=seed) for seed in seeds])
            table += [row(found, kind="tracking", arm=name) for found in finals]
    return table


def row(found: LengthsRun | RecallRun | TrackingRun, **labels: Any) -> dict[str, Any]:
    """One flat row a run: ``labels``, its settings, what it measured at its end, and 0 for what is not of its
    kind. ``accuracy_trained`` and ``accuracy_longer`` are those of tracking over the first stretch of training
    length and over the last that is tested; the ``final_loss`` of tracking is :attr:`TrackingRun.loss`."""
    config = found.config
    is_text, is_recall = isinstance(found, LengthsRun), isinstance(found, RecallRun)
    is_tracking = isinstance(found, TrackingRun)
    return {
        **labels,
        "model": f"{config.model.d_model} × {config.model.layers}",
        "optimizer": config.optimizer,
        "steps": config.steps,
        "context": config.context,
        "batch_size": config.batch_size,
        "lr": config.lr,
        "rest_lr": config.lr if config.rest_lr is None else config.rest_lr,
        "seed": config.seed,
        "facts": config.recall.facts if is_recall else 0,
        "objects": config.objects if is_tracking else 0,
        "final_loss": found.loss,
        "loss_short": found.loss_short if is_text else 0.0,
        "loss_long": found.loss_long if is_text else 0.0,
        "recall_accuracy": found.accuracy if is_recall else 0.0,
        "accuracy_trained": found.accuracy(1) if is_tracking else 0.0,
        "accuracy_longer": found.accuracy(LONGER) if is_tracking else 0.0,
    }


def rows(sizes: Sizes, seed: int, jobs: int) -> Iterator[list[dict[str, Any]]]:
    """The whole table on ``sizes.seeds`` seeds from ``seed`` on, a part at a time; runs are cached."""
    seeds = range(seed, seed + sizes.seeds)
    yield text_rows(sizes.text, seeds, lambda configs: list(in_workers(lengths, configs, jobs)))
    yield recall_rows(
        sizes.recall, sizes.facts, seeds, lambda configs: list(in_workers(recall, configs, jobs))
    )
    yield tracking_rows(
        sizes.tracking,
        sizes.rates,
        sizes.objects,
        seeds,
        lambda configs: list(in_workers(track, configs, jobs)),
    )


def runs_of(table: pandas.DataFrame, kind: str, arm: str, **where: Any) -> pandas.DataFrame:
    """The rows of an arm by ascending seed, those with the values ``where`` (facts, objects) in their columns.

    Raises ValueError where there are none."""
    part = table[(table.kind == kind) & (table.arm == arm)]
    for column, value in where.items():
        part = part[part[column] == value]
    if part.empty:
        raise ValueError(f"the table has no row of kind {kind!r}, arm {arm!r} and {where}")
    return part.set_index("seed").sort_index()


def length_pairs(table: pandas.DataFrame, arm: str) -> pandas.DataFrame:
    """What an arm on text loses on the same tokens given the whole window (``long``) and given a training length of
    it (``short``), by seed."""
    pairs = runs_of(table, "text", arm)[["loss_long", "loss_short"]]
    return pairs.set_axis(["long", "short"], axis=1)


def less_changed(*rivals: pandas.DataFrame) -> pandas.DataFrame:
    """Of several :func:`length_pairs`, seed by seed the pair that gains most, or loses least, by the longer past."""
    import pandas

    changes = pandas.concat([pairs.long - pairs.short for pairs in rivals], axis=1)
    best = changes.set_axis(range(len(rivals)), axis=1).idxmin(axis=1)
    return pandas.DataFrame([rivals[place].loc[seed] for seed, place in best.items()])


def at_table_rates(table: pandas.DataFrame, base: C, kind: str, arm: str, model: Any, **where: Any) -> C:
    """``base`` with ``model`` and the learning rates of the rows that :func:`runs_of` finds."""
    found = runs_of(table, kind, arm, **where).iloc[0]
    return replace(base, model=model, lr=float(found.lr), rest_lr=float(found.rest_lr))


def live_text(
    table: pandas.DataFrame, sizes: Sizes, seed: int, names: Iterable[str]
) -> dict[str, TrainConfig]:
    """The configuration of each arm of ``names`` on text, at the table's rates."""
    models, base = arms(sizes.text.model), replace(sizes.text, seed=seed)
    return {name: at_table_rates(table, base, "text", name, models[name]) for name in names}


def command(seed: int) -> str:
    """The command line that makes the table."""
    return f"dslib run 07 --profile full --param save_measurements=true --param seed={seed}"


def live_recall(table: pandas.DataFrame, sizes: Sizes, seed: int) -> dict[str, TrainConfig]:
    """The configuration of each arm of recall at the largest number of facts, at the table's rates."""
    many = max(sizes.facts)
    return {
        arm: replace(
            with_facts(at_table_rates(table, sizes.recall, "recall", arm, model, facts=many), many), seed=seed
        )
        for arm, model in recall_arms(sizes.recall.model).items()
    }


def live_tracking(
    table: pandas.DataFrame, sizes: Sizes, seed: int, objects: int
) -> dict[str, TrackingConfig]:
    """The configuration of each arm of tracking ``objects`` things, at the table's rates."""
    elements = StateTracking(objects).elements
    return {
        arm: replace(
            at_table_rates(table, sizes.tracking, "tracking", arm, model, objects=objects),
            objects=objects,
            seed=seed,
        )
        for arm, model in tracking_arms(replace(sizes.tracking.model, vocab_size=elements)).items()
    }
