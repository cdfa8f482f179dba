"""What a state of constant size is good and bad at: text, longer texts than in training, recall, tracking."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dslib.experiments.search import best_bracketed, bracketed_minimum
from dslib.models.decoder import DecoderConfig
from dslib.models.layers.rwkv import RWKVConfig
from dslib.models.training import (
    TrainConfig,
    TrainResult,
    fit,
    in_workers,
    train,
)
from dslib.runs.cache import cached
from dslib.tasks.corpus import evaluation_windows, load_corpus
from dslib.tasks.recall import RECALL
from dslib.tasks.state_tracking import StateTracking

#: Lengths are tested up to this multiple of the training length.
LONGER = 4

#: Seeds of searches stand apart from the seeds of the runs that are compared.
SEARCH_SEEDS = (1000, 1001)


def matched(decoder: DecoderConfig, **options: Any) -> RWKVConfig:
    """The RWKV-7 of the decoder's width and depth whose number of parameters comes closest to its, by the size
    of the channel mix (a multiple of 8); ``options`` are the other fields of :class:`RWKVConfig`.

    Raises ValueError when even the smallest channel mix makes it larger by more than 2 %.
    """

    def parameters(config: DecoderConfig | RWKVConfig) -> int:
        return sum(weight.numel() for weight in config.build().parameters())

    config = RWKVConfig(decoder.vocab_size, decoder.d_model, decoder.layers, mlp_size=8, **options)
    wanted, least = parameters(decoder), parameters(config)
    eight_more = 2 * 8 * decoder.d_model * decoder.layers
    config = replace(config, mlp_size=8 * max(1, 1 + round((wanted - least) / eight_more)))
    if parameters(config) > 1.02 * wanted:
        raise ValueError(
            f"decoder has {wanted} parameters, and an RWKV-7 of d_model={decoder.d_model} has {least} at least; "
            "use a smaller rank"
        )
    return config


def arms(decoder: DecoderConfig) -> dict[str, DecoderConfig | RWKVConfig]:
    """The models that are compared on text: the decoder, an RWKV-7 of its size, and that one with a part
    taken out at a time."""
    ours = matched(decoder)
    return {
        "attention": decoder,
        "RWKV-7": ours,
        "no token shift": replace(ours, token_shift=False),
        "no delta rule": replace(ours, delta_rule=False),
        "no state": replace(ours, memory=False),
    }


@dataclass(frozen=True)
class Lengths:
    """A training run on text, and its model on windows :data:`LONGER` times as long as any it saw.

    ``loss_at`` has one entry a position: the mean loss there over the windows, in nats a token; there are as
    many windows, evenly spaced over the validation text, as the configuration evaluates with. ``loss_short``
    is the mean loss on the last half training length of these windows when the model sees no more than a
    training length of them, ``loss_long`` on the same tokens when it sees all.
    """

    result: TrainResult
    loss_at: list[float]
    loss_short: float

    @property
    def config(self) -> TrainConfig:
        """The run's configuration."""
        return self.result.config

    @property
    def loss(self) -> float:
        """Validation loss after the last step, on windows of the training length."""
        return self.result.final_loss

    @property
    def loss_long(self) -> float:
        """Mean of ``loss_at`` over the last half training length."""
        last = self.loss_at[-(self.result.config.context // 2) :]
        return math.fsum(last) / len(last)


def lengths(config: TrainConfig) -> Lengths:
    """Train on windows of ``config.context``, then measure the loss position by position on longer ones."""
    found: list[list[float]] = []

    def measure(step, model, optimizers) -> None:
        if step == config.steps:
            inputs, targets = _long_windows(config)
            found.append(loss_by_position(model, inputs, targets))
            last = slice(-config.context, None)
            found.append(loss_by_position(model, inputs[:, last], targets[:, last]))

    result = train(config, observe=measure)
    if not found:  # diverged
        return Lengths(result, [math.inf] * (LONGER * config.context), math.inf)
    short = found[1][-(config.context // 2) :]
    return Lengths(result, found[0], math.fsum(short) / len(short))


def _long_windows(config: TrainConfig) -> tuple[Tensor, Tensor]:
    text = load_corpus(config.corpus).validation
    return evaluation_windows(text, config.evaluation_windows, LONGER * config.context)


@torch.no_grad()
def loss_by_position(model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> list[float]:
    """Mean loss at each position of windows (count, time), in nats a token."""
    losses = [
        F.cross_entropy(model(x).mT, y, reduction="none")
        for x, y in zip(inputs.split(16), targets.split(16), strict=True)
    ]
    return torch.cat(losses).double().mean(0).tolist()


def lengths_many(configs: Iterable[TrainConfig], jobs: int = 1) -> Iterator[Lengths]:
    """:func:`lengths` of every configuration, in worker processes and cached, as
    :func:`dslib.models.train_many` does."""
    yield from in_workers(_lengths, configs, jobs)


@cached
def _lengths(config: TrainConfig, corpus: str) -> Lengths:
    return lengths(config)


Run = Callable[[list[TrainConfig]], Iterable[Any]]


def searched(config: TrainConfig, run: Run, seeds: Sequence[int] = SEARCH_SEEDS) -> list[Any]:
    """Search the learning rate of the matrices, then of the rest, then of the matrices again, each on a grid of
    factor 2 that grows until its best is inside. ``run`` gives results with a ``config`` and a ``loss``; that
    of a point is its mean over ``seeds``. Returns every result."""
    runs: dict[tuple[float, float], list[Any]] = {}

    def losses(points: list[tuple[float, float]]) -> list[float]:
        fresh = [point for point in dict.fromkeys(points) if point not in runs]
        tried = [
            replace(config, lr=lr, rest_lr=rest_lr, seed=seed) for lr, rest_lr in fresh for seed in seeds
        ]
        results = list(run(tried))
        for position, point in enumerate(fresh):
            runs[point] = results[position * len(seeds) : (position + 1) * len(seeds)]
        return [math.fsum(found.loss for found in runs[point]) / len(seeds) for point in points]

    best = {"lr": config.lr, "rest_lr": config.lr if config.rest_lr is None else config.rest_lr}
    for axis in ("lr", "rest_lr", "lr"):
        centre = best[axis]
        found = bracketed_minimum(
            lambda values, axis=axis: losses([tuple((best | {axis: value}).values()) for value in values]),
            [centre / 2, centre, centre * 2],
            refine=False,
        )
        best[axis] = best_bracketed(found)
    return [result for results in runs.values() for result in results]


def best_of(config: TrainConfig, runs: Iterable[Any]) -> TrainConfig:
    """``config`` at the learning rates of least mean loss among ``runs``."""
    at: dict[tuple[float, float], list[float]] = {}
    for found in runs:
        at.setdefault((found.config.lr, found.config.rest_lr), []).append(found.loss)
    lr, rest_lr = min(at, key=lambda point: math.fsum(at[point]) / len(at[point]))
    return replace(config, lr=lr, rest_lr=rest_lr)


def text_rows(base: TrainConfig, seeds: Iterable[int], run: Run) -> list[dict]:
    """Text: learning rates searched for attention and for RWKV-7, then all :func:`arms` on ``seeds``, those with
    a part taken out at RWKV-7's rates. ``base.model`` is the decoder; ``run`` is as :func:`lengths_many`."""
    table, seeds, rates = [], list(seeds), base
    for name, model in arms(base.model).items():
        config = replace(base, model=model)
        if name in ("attention", "RWKV-7"):
            runs = searched(config, run)
            table += [row(found, kind="search", arm=name) for found in runs]
            rates = best_of(config, runs)
        config = replace(config, lr=rates.lr, rest_lr=rates.rest_lr)
        results = run([replace(config, seed=seed) for seed in seeds])
        table += [row(found, kind="text", arm=name) for found in results]
    return table


def row(found: Lengths | Recalled | Tracked, **labels: Any) -> dict[str, Any]:
    """One flat row a run: ``labels``, its settings, what it measured at its end, and 0 for what is not of its
    kind. ``accuracy_trained`` and ``accuracy_longer`` are those of tracking over the first stretch of training
    length and over the last of :data:`LONGER`; the ``final_loss`` of tracking is :attr:`Tracked.loss`."""
    config = found.config
    is_text, is_recall = isinstance(found, Lengths), isinstance(found, Recalled)
    is_tracking = isinstance(found, Tracked)
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


def recall_arms(decoder: DecoderConfig) -> dict[str, DecoderConfig | RWKVConfig]:
    """The models that are compared on recall: attention, and RWKV-7 with a larger and a smaller state."""
    return {
        "attention": decoder,
        "RWKV-7, heads of 16": matched(decoder),
        "RWKV-7, heads of 4": matched(decoder, head_size=4),
    }


def recall_rows(base: TrainConfig, facts: Sequence[int], seeds: Iterable[int], run: Run) -> list[dict]:
    """Recall of growing numbers of facts; ``base.recall`` is the task whose ``facts`` are replaced, ``run`` is as
    :func:`recall_many`. The learning rates of each arm are searched at the middle number."""
    table, seeds = [], list(seeds)
    for name, model in recall_arms(base.model).items():
        config = replace(base, model=model)
        runs = searched(with_facts(config, facts[len(facts) // 2]), run, SEARCH_SEEDS[:1])
        table += [row(found, kind="recall search", arm=name) for found in runs]
        config = best_of(config, runs)
        several = [replace(with_facts(config, count), seed=seed) for count in facts for seed in seeds]
        table += [row(found, kind="recall", arm=name) for found in run(several)]
    return table


def with_facts(config: TrainConfig, facts: int) -> TrainConfig:
    """The same run with another number of facts. Raises ValueError without a recall task."""
    if config.recall is None:
        raise ValueError("config.recall=None has no facts; give a RecallTask")
    return replace(config, recall=replace(config.recall, facts=facts))


@dataclass(frozen=True)
class Recalled:
    """A run on ``config.recall`` in windows that hold nothing else. ``train_loss``: one entry a step; ``loss`` and
    ``accuracy`` of the answers in 256 test windows (nats, share of the likeliest that are right)."""

    config: TrainConfig
    train_loss: list[float]
    loss: float
    accuracy: float


def recall(config: TrainConfig) -> Recalled:
    """Train on windows of blanks (token 0) with facts and questions, on the answers alone: whoever must write
    what it reads into a state learns that far sooner without a text in between. Deterministic.

    Raises ValueError without a recall task, or where its symbols are no tokens of the model, or are blanks.
    """
    task, size = config.recall, config.model.vocab_size
    if task is None:
        raise ValueError("config.recall=None has no facts; give a RecallTask")
    last = task.first_symbol + task.facts * (task.values + 1) - 1
    if last >= size or task.first_symbol < 1:
        raise ValueError(f"recall's symbols go from {task.first_symbol} to {last}; use 1 to {size - 1}")

    def batch(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        blank = torch.zeros(count, config.context + 1, dtype=torch.long)
        tokens, kinds = task.plant(blank, generator)
        return tokens[:, :-1], tokens[:, 1:], kinds[:, 1:] == RECALL

    def losses(model: torch.nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        inputs, targets, asked = batch
        logits = model(inputs)[asked]
        return F.cross_entropy(logits, targets[asked]), logits.argmax(-1) == targets[asked]

    generator = torch.Generator().manual_seed(4_000_037 + config.seed)
    model = config.model.build(seed=config.seed)
    history = fit(model, config, lambda _: losses(model, batch(config.batch_size, generator))[0])
    with torch.no_grad():
        loss, hits = losses(model, batch(256, torch.Generator().manual_seed(5_000_011)))
    return Recalled(
        config, [_finite(loss) for loss in history], _finite(loss.item()), hits.double().mean().item()
    )


def recall_many(configs: Iterable[TrainConfig], jobs: int = 1) -> Iterator[Recalled]:
    """:func:`recall` of every configuration, in worker processes and cached."""
    yield from in_workers(_recall, configs, jobs)


@cached
def _recall(config: TrainConfig, corpus: str) -> Recalled:
    return recall(config)


def _finite(loss: float) -> float:
    """inf for a loss that is no number: a diverged run is a bad one to a search, and fits into a table."""
    return loss if math.isfinite(loss) else math.inf


@dataclass(frozen=True)
class TrackingConfig(TrainConfig):
    """A run on :class:`dslib.tasks.StateTracking` instead of text: products of permutations of ``objects``
    things, in words of ``context`` tokens. What concerns text — corpus, recall, evaluations — is not used."""

    objects: int = 2


@dataclass(frozen=True)
class Tracked:
    """``train_loss``: one entry a step, nats a token. ``accuracy_at``: one entry a position of words up to
    :data:`LONGER` times the training length, the share of 256 test words whose likeliest element is right."""

    config: TrackingConfig
    train_loss: list[float]
    accuracy_at: list[float]

    @property
    def loss(self) -> float:
        """Mean training loss of the last tenth of the steps."""
        last = self.train_loss[-max(1, self.config.steps // 10) :]
        return math.fsum(last) / len(last)

    def accuracy(self, number: int) -> float:
        """Mean accuracy over the ``number``-th stretch of training length, 1 to :data:`LONGER`."""
        context = self.config.context
        return math.fsum(self.accuracy_at[(number - 1) * context : number * context]) / context


def track(config: TrackingConfig) -> Tracked:
    """Train on random words, test on longer ones. Deterministic as :func:`dslib.models.train` is.

    Raises ValueError for a model whose vocabulary is smaller than the group.
    """
    task = StateTracking(config.objects)
    if config.model.vocab_size < task.elements:
        raise ValueError(
            f"vocab_size={config.model.vocab_size} is less than the {task.elements} elements of the group"
        )
    model = config.model.build(seed=config.seed)
    generator = torch.Generator().manual_seed(2_000_003 + config.seed)
    losses = fit(
        model, config, lambda _: model.loss(*task.batch(config.batch_size, config.context, generator))
    )
    words = task.batch(256, LONGER * config.context, torch.Generator().manual_seed(3_000_017))
    return Tracked(config, [_finite(loss) for loss in losses], _accuracy(model, *words))


@torch.no_grad()
def _accuracy(model: torch.nn.Module, tokens: Tensor, targets: Tensor) -> list[float]:
    return (model(tokens).argmax(-1) == targets).double().mean(0).tolist()


def track_many(configs: Iterable[TrackingConfig], jobs: int = 1) -> Iterator[Tracked]:
    """:func:`track` of every configuration, in worker processes and cached."""
    yield from in_workers(_track, configs, jobs)


@cached
def _track(config: TrackingConfig, corpus: str) -> Tracked:
    return track(config)


def tracking_arms(decoder: DecoderConfig, head_size: int = 8, rank: int = 4) -> dict[str, Any]:
    """The models that are compared on tracking: attention, and RWKV-7 of its width and depth with learning rates
    up to 1, as released, and up to 2; those two are smaller than the decoder, which has the larger MLP."""
    ours = RWKVConfig(
        decoder.vocab_size,
        decoder.d_model,
        decoder.layers,
        head_size=head_size,
        rank=rank,
        mlp_size=decoder.d_model,
    )
    return {"attention": decoder, "RWKV-7, η < 1": ours, "RWKV-7, η < 2": replace(ours, rate_range=2.0)}


def tracking_rows(
    base: TrackingConfig, rates: Sequence[float], objects: Sequence[int], seeds: Iterable[int], run: Run
) -> list[dict]:
    """State tracking: for every arm and number of objects the learning rate of ``rates`` that is best *beyond*
    the training length on a seed of its own, then the runs on ``seeds``. ``run`` is as :func:`track_many`."""
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
