"""Training a small decoder: one configuration, one loop, one table of measurements out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from dslib.models.decoder import Decoder
from dslib.models.measuring import probe, recall_losses, validation_loss
from dslib.models.train_config import TrainConfig, flops_per_step, learning_rate_factor
from dslib.optim import Muon, param_groups_for_muon
from dslib.runs.cache import cached
from dslib.runs.workers import in_workers
from dslib.tasks.corpus import batches, evaluation_windows, load_corpus
from dslib.tasks.recall import RecallTask


@dataclass(frozen=True)
class TrainResult:
    """What a run measured; losses are nats a token. The lists from ``at`` on have an entry an evaluation."""

    config: TrainConfig
    #: An entry a step, auxiliary losses left out; ``inf`` from the step on whose loss was not finite.
    train_loss: list[float]
    #: Steps done at each evaluation.
    at: list[int]
    #: Of the text alone, where there is a recall task.
    validation_loss: list[float]
    #: This and the three below: what :func:`dslib.models.measuring.probe` returns.
    weight_rms: list[float]
    activation_rms: list[float]
    largest_logit: list[float]
    logits_above: list[float]
    #: Of all steps.
    flops: float
    #: Wall time of the steps, evaluations left out, under whatever load the machine had then …
    seconds: float
    #: … and the optimizer's part of it.
    optimizer_seconds: float
    #: Of the answers, with a recall task; empty without.
    recall_loss: list[float] = field(default_factory=list)
    #: Share of the answers that are the likeliest token, likewise.
    recall_accuracy: list[float] = field(default_factory=list)
    #: An entry a step for models with losses of their own, such as an indexer's, summed over the layers.
    auxiliary_loss: list[float] = field(default_factory=list)

    @property
    def final_loss(self) -> float:
        """Validation loss after the last step."""
        return self.validation_loss[-1]

    @property
    def diverged(self) -> bool:
        """Whether a loss stopped being finite, which ended the run."""
        return not math.isfinite(self.train_loss[-1])


def make_optimizers(model: Decoder, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """The optimizers of a run: AdamW alone, or Muon for the matrices and AdamW for the rest."""
    adamw = {"betas": config.betas, "weight_decay": config.weight_decay}
    rest_lr = config.lr if config.rest_lr is None else config.rest_lr
    matrices, rest = param_groups_for_muon(model)
    groups = [{"params": rest, "lr": rest_lr}]
    if config.norm_weight_decay is not None:
        norms = [m for m in model.modules() if isinstance(m, nn.RMSNorm)]
        gains = dict.fromkeys(p for norm in norms for p in norm.parameters())
        groups = [
            {"params": [p for p in rest if p not in gains], "lr": rest_lr},
            {"params": list(gains), "lr": rest_lr, "weight_decay": config.norm_weight_decay},
        ]
    if config.optimizer == "adamw":
        return [torch.optim.AdamW([{"params": matrices, "lr": config.lr}, *groups], **adamw)]
    muon = Muon(
        matrices,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.ns_steps,
        coefficients=config.coefficients,
        adjust_lr=config.adjust_lr,
        target_rms=config.target_rms,
    )
    return [muon, torch.optim.AdamW(groups, **adamw)]


@dataclass(frozen=True)
class Step:
    """A training step that was just made."""

    #: Steps made so far, this one included.
    done: int
    #: Of its batch, before the step, auxiliary losses left out.
    loss: float
    #: The model's own losses, summed over its modules (None: it has none).
    auxiliary_loss: float | None
    #: Wall time of all of it …
    seconds: float
    #: … and of the optimizers.
    optimizer_seconds: float


def training_steps(
    model: nn.Module,
    config: TrainConfig,
    loss_of_batch: Callable[[int], Tensor],
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
    *,
    backward: Callable[[Tensor], object] = Tensor.backward,
    first: int = 0,
    stop: int | None = None,
    end_at_infinity: bool = True,
) -> Iterator[Step]:
    """The training loop: whoever iterates stands behind each step, its gradients still in place.

    ``loss_of_batch(step)``: the loss of step 0, 1, … with its graph. Modules with an ``auxiliary_loss`` after the
    forward pass (a scalar, or None) have it added. ``optimizers``: those of ``config``, unless given; their
    learning rates are the peaks of its schedule. ``backward`` makes the gradients of a loss.
    Steps ``first`` to ``stop`` (None: all) are made; a run goes on with optimizers whose state a run like it saved.
    A loss that is not finite ends the loop, before the weights are touched; not with ``end_at_infinity=False``,
    for processes that others wait for.
    """
    optimizers = make_optimizers(model, config) if optimizers is None else optimizers
    schedules = [
        LambdaLR(optimizer, lambda step: learning_rate_factor(step, config), last_epoch=first - 1)
        for optimizer in optimizers
    ]
    own = [module for module in model.modules() if hasattr(module, "auxiliary_loss")]
    for step in range(first, config.steps if stop is None else stop):
        began = time.perf_counter()
        loss = loss_of_batch(step)
        auxiliary = [module.auxiliary_loss for module in own if module.auxiliary_loss is not None]
        backward(sum(auxiliary, loss))
        if end_at_infinity and not loss.isfinite():
            return
        before = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        after = time.perf_counter()
        summed = sum(value.item() for value in auxiliary) if auxiliary else None
        yield Step(step + 1, loss.item(), summed, after - began, after - before)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.zero_grad(set_to_none=True)
            schedule.step()


def fit(
    model: nn.Module,
    config: TrainConfig,
    loss_of_batch: Callable[[int], Tensor],
    after_step: Callable[[], object] | None = None,
) -> list[float]:
    """Train on whatever ``loss_of_batch(step)`` says, in place, by :func:`training_steps`; returns the loss of each
    step, ``inf`` from the one on that was not finite. ``after_step`` is called once the optimizers have moved."""
    losses: list[float] = []
    for step in training_steps(model, config, loss_of_batch):
        losses.append(step.loss)
        if after_step is not None:
            after_step()
    return losses + [math.inf] * (config.steps - len(losses))


Observer = Callable[[int, Decoder, list[torch.optim.Optimizer]], None]


def training_loss(model: Decoder, batch: tuple[Tensor, ...], recall: RecallTask | None = None) -> Tensor:
    """Cross-entropy of a batch in nats a token: (inputs, targets), or with ``recall`` (inputs, targets, kinds),
    each target counted as :meth:`dslib.tasks.RecallTask.weights` says."""
    if recall is None:
        return model.loss(*batch)
    inputs, targets, kinds = batch
    losses = torch.nn.functional.cross_entropy(model(inputs).mT, targets, reduction="none")
    weights = recall.weights(kinds)
    return (losses * weights).sum() / weights.sum()


@dataclass(frozen=True)
class TrainedModel:
    """What a run leaves behind."""

    result: TrainResult
    #: As the last step left it.
    model: Decoder
    #: Those of the matrices first.
    optimizers: list[torch.optim.Optimizer]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The model's ``state_dict``."""
        return self.model.state_dict()


def train(
    config: TrainConfig,
    observe: Observer | None = None,
    weights: Mapping[str, Tensor] | None = None,
    trainable: Callable[[str], bool] | None = None,
) -> TrainResult:
    """Train a decoder on the CPU; deterministic for a given machine and thread count.

    It starts from scratch, or from ``weights``, a model's ``state_dict`` (the seed then gives the batches
    only; the optimizers start fresh). ``trainable(name)`` says which parameters are trained, all without it.
    The biases of a mixture of experts are updated after every step.
    ``observe(steps_done, model, optimizers)`` is called before the first update, with 0, and after every
    update, gradients still in place.
    A loss that stops being finite ends the run early: the remaining entries are ``inf``, so that a
    search sees a diverged run as a bad one.
    """
    return train_model(config, observe, weights, trainable).result


def train_to_end(config: TrainConfig, *args: Any, **options: Any) -> TrainedModel:
    """:func:`train_model` with these arguments. Raises RuntimeError when the run diverges."""
    trained = train_model(config, *args, **options)
    if trained.result.diverged:
        raise RuntimeError(f"the run diverged before its end, with lr={config.lr}: lower it")
    return trained


def train_model(
    config: TrainConfig,
    observe: Observer | None = None,
    weights: Mapping[str, Tensor] | None = None,
    trainable: Callable[[str], bool] | None = None,
) -> TrainedModel:
    """:func:`train`, for who goes on with the model."""
    corpus = load_corpus(config.corpus)
    text = (corpus.validation, config.evaluation_windows, config.context)
    windows = evaluation_windows(*text) if config.recall is None else config.recall.evaluation(*text)
    model = config.model.build(seed=config.seed)
    if weights is not None:
        model.load_state_dict(weights)
    if trainable is not None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trainable(name))
    stream = training_batches(config)
    optimizers = make_optimizers(model, config)
    marks = evaluation_marks(config)
    steps: list[Step] = []
    records: list[dict[str, float]] = []
    if observe is not None:
        observe(0, model, optimizers)
    for step in training_steps(
        model, config, lambda _: training_loss(model, next(stream), config.recall), optimizers
    ):
        steps.append(step)
        if observe is not None:
            observe(step.done, model, optimizers)
        for layer in model.mixtures():
            layer.update_bias()
        if step.done in marks:
            record = probe(model, windows[0][:4])
            if config.recall is None:
                record["loss"] = validation_loss(model, windows)
            else:
                record |= recall_losses(model, windows)
            records.append(
                {key: value if math.isfinite(value) else math.inf for key, value in record.items()}
            )
    recalled = () if config.recall is None else ("recall_loss", "recall_accuracy")
    measured = ("loss", "weight_rms", "activation_rms", "largest_logit", "logits_above", *recalled)
    worst = dict.fromkeys(measured, math.inf) | dict.fromkeys(recalled[1:], 0.0)
    records += [worst] * (len(marks) - len(records))
    result = TrainResult(
        config=config,
        train_loss=[step.loss for step in steps] + [math.inf] * (config.steps - len(steps)),
        at=marks,
        validation_loss=[record["loss"] for record in records],
        weight_rms=[record["weight_rms"] for record in records],
        activation_rms=[record["activation_rms"] for record in records],
        largest_logit=[record["largest_logit"] for record in records],
        logits_above=[record["logits_above"] for record in records],
        flops=config.steps * flops_per_step(config),
        seconds=sum(step.seconds for step in steps),
        optimizer_seconds=sum(step.optimizer_seconds for step in steps),
        auxiliary_loss=[step.auxiliary_loss for step in steps if step.auxiliary_loss is not None],
        **{name: [record[name] for record in records] for name in recalled},
    )
    return TrainedModel(result, model, optimizers)


def evaluation_marks(config: TrainConfig) -> list[int]:
    """Steps done at each evaluation, ascending; fewer than ``evaluations`` in a run of fewer steps."""
    parts = range(1, config.evaluations + 1)
    return sorted({round(config.steps * part / config.evaluations) for part in parts} - {0})


def training_batches(config: TrainConfig) -> Iterator[tuple[Tensor, ...]]:
    """The batches of a run, drawn from its seed: (inputs, targets), with a recall task (inputs, targets, kinds),
    each (batch_size, context) int64."""
    generator = torch.Generator().manual_seed(1_000_003 + config.seed)
    source = batches if config.recall is None else config.recall.batches
    return source(load_corpus(config.corpus).train, config.batch_size, config.context, generator)


def train_many(configs: Iterable[TrainConfig], jobs: int = 1) -> Iterator[TrainResult]:
    """Train every configuration in worker processes of one thread each, ``jobs`` at a time; results come
    in the order of ``configs``, each as soon as it and those before it are done.

    One thread a run whatever ``jobs`` is: the numbers do not depend on how many run at once. Finished
    runs are kept in the cache of :mod:`dslib.runs.cache`, so an interrupted series goes on where it was.
    Any joblib backend set by ``joblib.parallel_config`` is used.
    """
    yield from in_workers(_train, configs, jobs)


def corpus_digest(config: Any) -> str:
    """The digest of the text that ``config.corpus`` names: for :func:`dslib.runs.cache.cached`'s ``also``, because
    the text is no part of the configuration."""
    return load_corpus(config.corpus).digest


@cached(also=corpus_digest)
def _train(config: TrainConfig) -> TrainResult:
    return train(config)
