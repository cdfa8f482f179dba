"""Dense and sparse attention trained alike, on text into which facts are planted that are asked for later."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dslib.models.decoder import Decoder, DecoderConfig
from dslib.models.layers.sparse import MoBAConfig, NSAConfig, SlidingWindowConfig
from dslib.models.training import TrainConfig, in_workers, recall_losses, train
from dslib.runs.cache import cached
from dslib.tasks.corpus import load_corpus
from dslib.tasks.recall import RECALL

#: The arms whose attention is chosen by content, with the null of each: the same pattern at random.
NULLS = {"MoBA": "MoBA, random blocks", "NSA": "NSA, random blocks"}


@dataclass(frozen=True)
class SparseConfig(TrainConfig):
    """A run, and ``switch``: another model of the same weights, as which the trained one is evaluated too;
    ``null_switch`` is one more, to compare with.

    ``answers`` planted windows are asked at the end, none of which the run's own evaluations use."""

    switch: DecoderConfig | None = None
    null_switch: DecoderConfig | None = None
    answers: int = 256


@dataclass(frozen=True)
class SparseRun:
    """What a run measured: at the steps ``at``, the loss of the text (nats a token); at the end, for each
    question its ``distance`` from the fact in tokens, whether the answer was ``right``, (questions,), and which
    heads had ``seen`` the fact, (questions, layers, heads). The loss and the answers when switched to another
    model, and the answers as the ``null_switch``: ``None`` where there is none. ``flops`` counts all steps."""

    config: SparseConfig
    at: list[int]
    text_loss: list[float]
    recall_accuracy: list[float]
    distance: Tensor
    right: Tensor
    seen: Tensor
    switched_text_loss: float | None
    switched_right: Tensor | None
    null_switched_right: Tensor | None
    flops: float

    def accuracy(self, low: int, high: int, right: Tensor | None = None) -> float:
        """The share of right answers to questions ``low`` to ``high`` tokens (both included) after their fact;
        ``right`` is another model's answers, ``None`` the run's own."""
        within = (self.distance >= low) & (self.distance <= high)
        return (self.right if right is None else right)[within].double().mean().item()

    def seen_share(self, low: int, high: int) -> float:
        """The share of those questions whose fact is among the keys of the head that sees the most of them."""
        within = (self.distance >= low) & (self.distance <= high)
        return self.seen[within].double().mean(0).max().item()


def arms(base: SparseConfig, window: int, moba: MoBAConfig, nsa: NSAConfig) -> dict[str, SparseConfig]:
    """``base``, whose attention is dense, and the same run with each sparse attention. Dense and MoBA are
    also evaluated as each other; for comparison dense as blocks by chance, and the window as dense.
    In ``"NSA, chosen by its own keys"`` the keys that choose are those that are attended to, as in MoBA."""
    dense = base.model
    chance = replace(moba, selection="random")

    def arm(attention: Any, switch: Any = None, null: Any = None) -> SparseConfig:
        return replace(base, model=replace(dense, attention=attention), switch=switch, null_switch=null)

    return {
        "dense": arm(None, replace(dense, attention=moba), replace(dense, attention=chance)),
        "window": arm(SlidingWindowConfig(window), dense),
        "MoBA": arm(moba, dense),
        "MoBA, last layer full": arm(replace(moba, full_layers=1)),
        "NSA": arm(nsa),
        NULLS["MoBA"]: arm(chance),
        NULLS["NSA"]: arm(replace(nsa, selection="random")),
        "NSA, chosen by its own keys": arm(replace(nsa, selection="own_keys")),
    }


def sparse_runs(configs: Iterable[SparseConfig], jobs: int = 1) -> Iterator[SparseRun]:
    """:func:`sparse_run` of every configuration, as :func:`dslib.models.train_many` does: in workers of one
    thread, results in order and kept."""
    return in_workers(_sparse_run, configs, jobs)


@cached
def _sparse_run(config: SparseConfig, corpus: str) -> SparseRun:
    return sparse_run(config)


def sparse_run(config: SparseConfig) -> SparseRun:
    """Train once and ask; see :class:`SparseRun`. Raises ValueError without a recall task."""
    if config.recall is None:
        raise ValueError("recall=None plants nothing to ask for; give a RecallTask")
    last: list[Decoder] = []

    def observe(step: int, model: Decoder, _: list[torch.optim.Optimizer]) -> None:
        if step == config.steps:
            last.append(model)

    result = train(config, observe=observe)
    if not last:
        raise RuntimeError(f"the run diverged before its end, with lr={config.lr}: lower it")
    text = load_corpus(config.corpus).validation
    planted = config.recall.evaluation(text, config.answers, config.context, seed=1)
    distance, right = recall_by_distance(last[0], planted)
    own = config.recall.evaluation(text, config.evaluation_windows, config.context)
    switched_loss, switched_right, null_right = None, None, None
    if config.switch is not None:
        other = switched(last[0], config.switch)
        switched_right = recall_by_distance(other, planted)[1]
        switched_loss = recall_losses(other, own)["loss"]
    if config.null_switch is not None:
        null_right = recall_by_distance(switched(last[0], config.null_switch), planted)[1]
    return SparseRun(
        config=config,
        at=result.at,
        text_loss=result.validation_loss,
        recall_accuracy=result.recall_accuracy,
        distance=distance,
        right=right,
        seen=facts_seen(last[0], planted),
        switched_text_loss=switched_loss,
        switched_right=switched_right,
        null_switched_right=null_right,
        flops=result.flops,
    )


@torch.no_grad()
def recall_by_distance(
    model: Decoder, planted: tuple[Tensor, Tensor, Tensor], batch_size: int = 32
) -> tuple[Tensor, Tensor]:
    """Every question of ``planted`` (inputs, targets, kinds, of :meth:`RecallTask.evaluation`): how many tokens
    it stands after its fact, (questions,) int64, and whether the likeliest token is the answer, (questions,) bool.
    A window of w keys reaches a fact directly up to a distance of w − 1."""
    inputs, targets, kinds = planted
    likeliest = torch.cat([model(part).argmax(-1) for part in inputs.split(batch_size)])
    asked = kinds == RECALL
    distance = torch.arange(inputs.shape[1]) - _facts(inputs, targets)
    return distance[asked], (likeliest == targets)[asked]


@torch.no_grad()
def facts_seen(model: Decoder, planted: tuple[Tensor, Tensor, Tensor], batch_size: int = 32) -> Tensor:
    """Of every question of ``planted``, in the order of :func:`recall_by_distance`: whether its fact is among the
    keys that a head may attend to, (questions, layers, heads) bool. In NSA these are the selected branch's."""
    layers: list[list[Tensor]] = [[] for _ in model.blocks]
    batch: list[Tensor] = []  # where the facts of the batch stand that the hooks are looking at

    def look(layer: int, x: Tensor) -> None:
        visible = model.blocks[layer].attention.logits(x) > -math.inf
        fact = batch[0][:, None, :, None].expand(-1, visible.shape[1], -1, -1)
        layers[layer].append(visible.gather(-1, fact).squeeze(-1).transpose(1, 2))

    hooks = [
        block.attention.register_forward_pre_hook(lambda _, given, layer=layer: look(layer, given[0]))
        for layer, block in enumerate(model.blocks)
    ]
    try:
        for inputs, targets in zip(*(part.split(batch_size) for part in planted[:2]), strict=True):
            batch[:] = [_facts(inputs, targets)]
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([torch.cat(parts) for parts in layers], dim=2)[planted[2] == RECALL]


def switched(model: Decoder, config: DecoderConfig) -> Decoder:
    """The model of ``config`` with the weights of ``model``, which must have the same ones."""
    other = config.build()
    other.load_state_dict(model.state_dict())
    return other


def _facts(inputs: Tensor, targets: Tensor) -> Tensor:
    """Where in ``inputs`` each target stands first, (windows, time): for an answer, its fact, since there is one
    fact of each kind and the answer's symbol does not stand before its question again."""
    return (inputs.unsqueeze(1) == targets.unsqueeze(2)).int().argmax(-1)


def reach(layers: int, window: int) -> int:
    """How far back a stack of windows can see at all: each layer adds window − 1 to its predecessor's."""
    return layers * (window - 1)


def bins(context: int, width: int) -> list[tuple[int, int]]:
    """Ranges of distances, ``width`` each, (first, last), from 1 to the largest that a context holds."""
    return [(low, min(low + width - 1, context - 1)) for low in range(1, context, width)]


def row(run: SparseRun, window: int, width: int = 8, **labels: Any) -> dict[str, Any]:
    """One row a run: ``labels``, the settings, ``flops``, the loss of the text, the accuracy of ``near`` questions
    (up to window − 1 tokens after the fact) and ``far`` ones (past the reach of that window in all layers), and
    the accuracy of each range of distances, ``"recall 1-8"`` and so on. ``far_seen`` is the share of far questions
    whose fact the best head of all may attend to. ``switched_loss``, ``switched_far`` and ``null_switched_far``
    are those of the model evaluated as another; where there is none, the run's own."""
    config = run.config
    far = reach(config.model.layers, window) + 1, config.context
    switched_loss = run.switched_text_loss
    return {
        **labels,
        "steps": config.steps,
        "lr": config.lr,
        "rest_lr": config.lr if config.rest_lr is None else config.rest_lr,
        "seed": config.seed,
        "flops": run.flops,
        "text_loss": run.text_loss[-1],
        "near": run.accuracy(1, window - 1),
        "far": run.accuracy(*far),
        "switched_loss": run.text_loss[-1] if switched_loss is None else switched_loss,
        "switched_far": run.accuracy(*far, run.switched_right),
        "null_switched_far": run.accuracy(*far, run.null_switched_right),
        "far_seen": run.seen_share(*far),
        **{f"recall {low}-{high}": run.accuracy(low, high) for low, high in bins(config.context, width)},
    }


@dataclass(frozen=True)
class DecodingCost:
    """What one layer's attention reads (``bytes`` of keys and values) and multiplies (``flops``) for one token."""

    bytes: float
    flops: float


def decoding_cost(
    attention: Any, config: DecoderConfig, context: int, bytes_per_number: int = 2
) -> DecodingCost:
    """The cost of decoding the token after ``context − 1`` others in a layer of ``attention`` (a configuration of
    :mod:`dslib.models.layers.sparse`, None for dense): a key and value for each of ``keys_read``, 4·d_model FLOPs with
    each, MoBA's gate counted as half of that a block, and NSA's φ once every stride, for the heads of a group."""
    keys = context if attention is None else attention.keys_read(context)
    kv_heads = config.kv_heads or config.heads
    flops = 4 * config.d_model * keys
    if isinstance(attention, NSAConfig):
        flops += 2 * attention.phi(config) * kv_heads / attention.sizes.compress_stride
    return DecodingCost(2 * kv_heads * config.head_dim * bytes_per_number * keys, flops)
