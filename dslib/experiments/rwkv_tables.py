"""The tables of the comparison of RWKV-7 with attention: learning rates searched, then a row a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from dslib.experiments.rwkv import (
    LONGER,
    LengthsRun,
    RecallRun,
    TrackingConfig,
    TrackingRun,
    arms,
    recall_arms,
    tracking_arms,
    with_facts,
)
from dslib.experiments.search import SEARCH_SEEDS, Grid, Runner, Trials, on_seeds, one_pass
from dslib.models.train_config import TrainConfig
from dslib.tasks.state_tracking import StateTracking

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
