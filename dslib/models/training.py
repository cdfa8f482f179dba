"""Training a small decoder: one configuration in, one table of measurements out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from dslib.models.decoder import Decoder, DecoderConfig
from dslib.optim import Muon, newton_schulz_flops, param_groups_for_muon
from dslib.optim.update_rms import ADAMW_RMS
from dslib.runs import workers
from dslib.runs.cache import cached
from dslib.tasks.corpus import batches, evaluation_windows, load_corpus
from dslib.tasks.recall import RECALL, TEXT, RecallTask

R = TypeVar("R")


@dataclass(frozen=True)
class TrainConfig:
    """One run. ``optimizer`` is ``"adamw"`` for everything, or ``"muon"``: Muon for the matrices and AdamW
    for the rest, at the same ``lr`` and ``weight_decay`` (Moonlight §2.2). ``rest_lr`` gives the rest —
    embedding, head, norms — a learning rate of its own, under either optimizer, and ``norm_weight_decay``
    gives the gains of norms a decay of their own (0: none, as some do).

    The learning rate rises linearly over ``warmup`` of the steps and falls on a cosine to ``final_lr``
    of its peak (``schedule="linear"``: on a line, as in Moonlight's fine-tuning): each run ends its own
    schedule. Batches are ``batch_size`` windows of ``context``
    bytes of ``corpus`` (None: the standard library), into which ``recall`` plants what must be looked up
    far back. The same ``seed`` gives the same weights and batches to every
    optimizer.
    """

    model: DecoderConfig = field(default_factory=DecoderConfig)
    optimizer: str = "adamw"
    steps: int = 400
    batch_size: int = 8
    context: int = 128
    lr: float = 4e-3
    rest_lr: float | None = None
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    coefficients: str = "jordan"
    adjust_lr: str | None = "match_rms_adamw"
    target_rms: float = ADAMW_RMS
    norm_weight_decay: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: float = 0.1
    final_lr: float = 0.1
    schedule: str = "cosine"
    seed: int = 0
    evaluations: int = 8
    evaluation_windows: int = 64
    corpus: str | None = None
    recall: RecallTask | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in ("adamw", "muon"):
            raise ValueError(f"optimizer={self.optimizer!r} is unknown; use 'adamw' or 'muon'")
        if self.schedule not in ("cosine", "linear"):
            raise ValueError(f"schedule={self.schedule!r} is unknown; use 'cosine' or 'linear'")
        for name in ("steps", "batch_size", "context", "evaluations", "evaluation_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class TrainResult:
    """What a run measured. ``train_loss`` has an entry a step; the lists from ``at`` on have one an
    evaluation: steps done, validation loss, and what :func:`probe` returns. Losses are nats a token.
    ``flops`` counts all steps. ``seconds`` is the wall time of the steps, evaluations left out, and
    ``optimizer_seconds`` the optimizer's part of it, under whatever load the machine had then. With a
    recall task ``validation_loss`` is that of the text alone, and ``recall_loss`` and ``recall_accuracy``
    (the share of its tokens that are the likeliest) have an entry an evaluation too. ``auxiliary_loss`` has an
    entry a step for models with losses of their own, such as an indexer's, summed over the layers."""

    config: TrainConfig
    train_loss: list[float]
    at: list[int]
    validation_loss: list[float]
    weight_rms: list[float]
    activation_rms: list[float]
    largest_logit: list[float]
    logits_above: list[float]
    flops: float
    seconds: float
    optimizer_seconds: float
    recall_loss: list[float] = field(default_factory=list)
    recall_accuracy: list[float] = field(default_factory=list)
    auxiliary_loss: list[float] = field(default_factory=list)

    @property
    def final_loss(self) -> float:
        """Validation loss after the last step."""
        return self.validation_loss[-1]


#: Attention logits past this in size are counted by :func:`probe`. (MuonClip's threshold is 100, at a
#: thousand billion parameters.)
LOGIT_THRESHOLD = 20.0


def make_optimizers(model: Decoder, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """The optimizers of a run: AdamW alone, or Muon for the matrices and AdamW for the rest."""
    adamw = {"betas": config.betas, "weight_decay": config.weight_decay}
    rest_lr = config.lr if config.rest_lr is None else config.rest_lr
    matrices, rest = param_groups_for_muon(model)
    groups = [{"params": rest, "lr": rest_lr}]
    if config.norm_weight_decay is not None:
        norms = [m for m in model.modules() if isinstance(m, torch.nn.RMSNorm)]
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


def fit(
    model: torch.nn.Module,
    config: TrainConfig,
    loss_of_batch: Callable[[int], Tensor],
    after_step: Callable[[], object] | None = None,
) -> list[float]:
    """Train on whatever ``loss_of_batch(step)`` says, with the optimizers and the schedule of ``config``, in place;
    returns the loss of each step. ``after_step`` is called once the optimizers have moved."""
    optimizers = make_optimizers(model, config)
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    history: list[float] = []
    for step in range(config.steps):
        for group, peak in groups:
            group["lr"] = peak * learning_rate_factor(step, config)
        loss = loss_of_batch(step)
        loss.backward()
        history.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if after_step is not None:
            after_step()
    return history


def learning_rate_factor(step: int, config: TrainConfig) -> float:
    """Share of the peak learning rate at ``step`` (0-based): linear warm-up, then a cosine or a line."""
    warmup = max(1, round(config.warmup * config.steps))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    left = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.final_lr + (1 - config.final_lr) * left


def flops_per_step(config: TrainConfig) -> float:
    """Model FLOPs of one step, plus Newton–Schulz's for Muon."""
    model = config.model.build()
    flops = config.batch_size * config.context * model.training_flops_per_token(config.context)
    if config.optimizer == "muon":
        matrices, _ = param_groups_for_muon(model)
        flops += sum(newton_schulz_flops(weight.shape, config.ns_steps) for weight in matrices)
    return float(flops)


def with_compute(config: TrainConfig, flops: float) -> TrainConfig:
    """The same run with as many whole steps as ``flops`` buys, its schedule fitted to them.

    Raises ValueError when it buys none.
    """
    steps = int(flops / flops_per_step(config))
    if steps < 1:
        raise ValueError(f"flops={flops:.3g} buys no step of {flops_per_step(config):.3g}")
    return replace(config, steps=steps)


@torch.no_grad()
def probe(model: Decoder, tokens: Tensor) -> dict[str, float]:
    """Sizes inside a model on ``tokens`` (batch, time): ``weight_rms`` over all of Muon's matrices,
    ``activation_rms`` over the outputs of all attention and MLP modules, ``largest_logit``: the largest
    absolute value of an attention logit of a key that may be seen, and ``logits_above``: the share of
    these whose absolute value is past ``LOGIT_THRESHOLD``. Not finite where the model is not."""
    matrices, _ = param_groups_for_muon(model)
    squares = sum(weight.square().sum().item() for weight in matrices)
    outputs: list[Tensor] = []
    logits: list[Tensor] = []
    hooks = []
    for block in model.blocks:
        for module in (block.attention, block.mlp):
            hooks.append(module.register_forward_hook(lambda _, __, output: outputs.append(output)))
        if hasattr(block.attention, "logits"):
            hooks.append(
                block.attention.register_forward_pre_hook(
                    lambda module, inputs: logits.append(module.logits(inputs[0]))
                )
            )
    try:
        model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    visible = torch.cat([layer[layer != -math.inf].abs() for layer in logits]) if logits else torch.zeros(1)
    return {
        "weight_rms": math.sqrt(squares / sum(weight.numel() for weight in matrices)),
        "activation_rms": torch.stack([output.square().mean() for output in outputs]).mean().sqrt().item(),
        "largest_logit": visible.max().item(),
        "logits_above": (visible > LOGIT_THRESHOLD).double().mean().item(),
    }


@torch.no_grad()
def validation_loss(model: Decoder, windows: tuple[Tensor, Tensor], batch_size: int = 32) -> float:
    """Mean loss over ``windows`` = (inputs, targets), (count, context) int64, in nats a token."""
    inputs, targets = windows
    total = 0.0
    for start in range(0, len(inputs), batch_size):
        part = slice(start, start + batch_size)
        total += model.loss(inputs[part], targets[part]).item() * len(inputs[part])
    return total / len(inputs)


@torch.no_grad()
def recall_losses(
    model: Decoder, planted: tuple[Tensor, Tensor, Tensor], batch_size: int = 32
) -> dict[str, float]:
    """Means over ``planted`` = (inputs, targets, kinds), (count, context) int64, of
    :meth:`dslib.tasks.RecallTask.evaluation`: ``"loss"`` of the text's tokens and ``"recall_loss"`` of the
    recalled, nats a token, and ``"recall_accuracy"``, the share of the recalled that are the likeliest."""
    losses, hits = [], []
    for inputs, targets in zip(*(part.split(batch_size) for part in planted[:2]), strict=True):
        logits = model(inputs)
        losses.append(torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none"))
        hits.append(logits.argmax(-1) == targets)
    loss, recall = torch.cat(losses), planted[2] == RECALL
    return {
        "loss": loss[planted[2] == TEXT].mean().item(),
        "recall_loss": loss[recall].mean().item(),
        "recall_accuracy": torch.cat(hits)[recall].double().mean().item(),
    }


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


def train(
    config: TrainConfig,
    observe: Observer | None = None,
    weights: Mapping[str, Tensor] | None = None,
    trainable: Callable[[str], bool] | None = None,
) -> TrainResult:
    """Train a decoder on the CPU; deterministic for a given machine and thread count.

    It starts from scratch, or from ``weights``, a model's ``state_dict`` (the seed then gives the batches
    only; the optimizers start fresh). ``trainable(name)`` says which parameters are trained, all without it.
    Modules with an ``auxiliary_loss`` after the forward pass (a scalar tensor) have it added to the loss.
    The biases of a mixture of experts are updated after every step.
    ``observe(steps_done, model, optimizers)`` is called before the first update, with 0, and after every
    update, gradients still in place.
    A loss that stops being finite ends the run early: the remaining entries are ``inf``, so that a
    search sees a diverged run as a bad one.
    """
    corpus = load_corpus(config.corpus)
    text = (corpus.validation, config.evaluation_windows, config.context)
    windows = evaluation_windows(*text) if config.recall is None else config.recall.evaluation(*text)
    model = config.model.build(seed=config.seed)
    if weights is not None:
        model.load_state_dict(weights)
    if trainable is not None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trainable(name))
    generator = torch.Generator().manual_seed(1_000_003 + config.seed)
    source = batches if config.recall is None else config.recall.batches
    stream = source(corpus.train, config.batch_size, config.context, generator)
    optimizers = make_optimizers(model, config)
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    marks = sorted(
        {round(config.steps * part / config.evaluations) for part in range(1, config.evaluations + 1)} - {0}
    )
    train_loss: list[float] = []
    auxiliary: list[float] = []
    records: list[dict[str, float]] = []
    seconds = optimizer_seconds = 0.0
    if observe is not None:
        observe(0, model, optimizers)
    for step in range(config.steps):
        began = time.perf_counter()
        for group, peak in groups:
            group["lr"] = peak * learning_rate_factor(step, config)
        loss = training_loss(model, next(stream), config.recall)
        own = [module.auxiliary_loss for module in model.modules() if hasattr(module, "auxiliary_loss")]
        own = [value for value in own if value is not None]
        if own:
            auxiliary.append(sum(value.item() for value in own))
        sum(own, loss).backward()
        train_loss.append(loss.item())
        if not math.isfinite(train_loss[-1]):
            break
        before = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        optimizer_seconds += time.perf_counter() - before
        seconds += time.perf_counter() - began
        if observe is not None:
            observe(step + 1, model, optimizers)
        for layer in model.mixtures():
            layer.update_bias()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        if step + 1 in marks:
            record = probe(model, windows[0][:4])
            if config.recall is None:
                record["loss"] = validation_loss(model, windows)
            else:
                record |= recall_losses(model, windows)
            records.append(
                {key: value if math.isfinite(value) else math.inf for key, value in record.items()}
            )
    train_loss += [math.inf] * (config.steps - len(train_loss))
    recalled = () if config.recall is None else ("recall_loss", "recall_accuracy")
    measured = ("loss", "weight_rms", "activation_rms", "largest_logit", "logits_above", *recalled)
    nothing = dict.fromkeys(measured, math.inf) | dict.fromkeys(recalled[1:], 0.0)
    records += [nothing] * (len(marks) - len(records))
    return TrainResult(
        config=config,
        train_loss=train_loss,
        at=marks,
        validation_loss=[record["loss"] for record in records],
        weight_rms=[record["weight_rms"] for record in records],
        activation_rms=[record["activation_rms"] for record in records],
        largest_logit=[record["largest_logit"] for record in records],
        logits_above=[record["logits_above"] for record in records],
        flops=config.steps * flops_per_step(config),
        seconds=seconds,
        optimizer_seconds=optimizer_seconds,
        auxiliary_loss=auxiliary,
        **{name: [record[name] for record in records] for name in recalled},
    )


def train_many(configs: Iterable[TrainConfig], jobs: int = 1) -> Iterator[TrainResult]:
    """Train every configuration in worker processes of one thread each, ``jobs`` at a time; results come
    in the order of ``configs``, each as soon as it and those before it are done.

    One thread a run whatever ``jobs`` is: the numbers do not depend on how many run at once. Finished
    runs are kept in the cache of :mod:`dslib.runs.cache`, so an interrupted series goes on where it was.
    Any joblib backend set by ``joblib.parallel_config`` is used.
    """
    yield from in_workers(_train, configs, jobs)


def in_workers(
    run: Callable[[TrainConfig, str], R], configs: Iterable[TrainConfig], jobs: int = 1
) -> Iterator[R]:
    """``run(config, digest of its corpus)`` for every configuration, as :func:`train_many` describes.

    ``run`` is a function at the top of a module, :func:`dslib.runs.cache.cached` if its results are to be kept;
    the digest is there for the cache's key, because the text is no part of the configuration.
    """
    calls = [(config, load_corpus(config.corpus).digest) for config in configs]
    yield from workers.in_workers(run, calls, jobs)


@cached
def _train(config: TrainConfig, corpus: str) -> TrainResult:
    return train(config)
