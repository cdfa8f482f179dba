"""Dense and sparse attention trained alike, on text into which facts are planted that are asked for later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dslib.cache import cached
from dslib.models.decoder import Decoder, DecoderConfig
from dslib.models.sparse import MoBAConfig, NSAConfig, SlidingWindowConfig
from dslib.models.training import TrainConfig, in_workers, recall_losses, train
from dslib.tasks.corpus import load_corpus
from dslib.tasks.recall import RECALL

#: The arms whose attention is chosen by content, with the null of each: the same pattern at random.
NULLS = {"MoBA": "MoBA, random blocks", "NSA": "NSA, random blocks"}


@dataclass(frozen=True)
class SparseConfig(TrainConfig):
    """A run, and ``switch``: another model of the same weights, as which the trained one is evaluated too.

    ``answers`` planted windows are asked at the end, none of which the run's own evaluations use."""

    switch: DecoderConfig | None = None
    answers: int = 256


@dataclass(frozen=True)
class SparseRun:
    """What a run measured: at the steps ``at``, the loss of the text (nats a token); at the end, for each
    question its ``distance`` from the fact in tokens and whether the answer was ``right``, (questions,). The same
    three of the ``switch``\\ ed model, ``None`` where there is none. ``flops`` counts all steps."""

    config: SparseConfig
    at: list[int]
    text_loss: list[float]
    recall_accuracy: list[float]
    distance: Tensor
    right: Tensor
    switched_text_loss: float | None
    switched_right: Tensor | None
    flops: float

    def accuracy(self, low: int, high: int, switched: bool = False) -> float:
        """The share of right answers to questions ``low`` to ``high`` tokens (both included) after their fact."""
        right = self.switched_right if switched else self.right
        within = (self.distance >= low) & (self.distance <= high)
        return right[within].double().mean().item()


def arms(base: SparseConfig, window: int, moba: MoBAConfig, nsa: NSAConfig) -> dict[str, SparseConfig]:
    """``base``, whose attention is dense, and the same run with each sparse attention; dense and MoBA are
    also evaluated as each other. In ``"NSA, chosen by its own keys"`` the keys that choose are those that are
    attended to, as in MoBA."""
    dense = base.model

    def arm(attention: Any, switch: DecoderConfig | None = None) -> SparseConfig:
        return replace(base, model=replace(dense, attention=attention), switch=switch)

    return {
        "dense": arm(None, switch=replace(dense, attention=moba)),
        "window": arm(SlidingWindowConfig(window)),
        "MoBA": arm(moba, switch=dense),
        "MoBA, last layer full": arm(replace(moba, full_layers=1)),
        "NSA": arm(nsa),
        NULLS["MoBA"]: arm(replace(moba, selection="random")),
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
    switched_loss, switched_right = None, None
    if config.switch is not None:
        other = config.switch.build()
        other.load_state_dict(last[0].state_dict())
        switched_right = recall_by_distance(other, planted)[1]
        own = config.recall.evaluation(text, config.evaluation_windows, config.context)
        switched_loss = recall_losses(other, own)["loss"]
    return SparseRun(
        config=config,
        at=result.at,
        text_loss=result.validation_loss,
        recall_accuracy=result.recall_accuracy,
        distance=distance,
        right=right,
        switched_text_loss=switched_loss,
        switched_right=switched_right,
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
    # The answer's symbol stands once before its question: there is one fact of each kind.
    fact = (inputs.unsqueeze(1) == targets.unsqueeze(2)).int().argmax(-1)
    distance = torch.arange(inputs.shape[1]) - fact
    return distance[asked], (likeliest == targets)[asked]


def reach(layers: int, window: int) -> int:
    """How far back a stack of windows can see at all: each layer adds window − 1 to its predecessor's."""
    return layers * (window - 1)


def bins(context: int, width: int) -> list[tuple[int, int]]:
    """Ranges of distances, ``width`` each, (first, last), from 1 to the largest that a context holds."""
    return [(low, min(low + width - 1, context - 1)) for low in range(1, context, width)]


def row(run: SparseRun, window: int, width: int = 8, **labels: Any) -> dict[str, Any]:
    """One row a run: ``labels``, the settings, ``flops``, the loss of the text, the accuracy of ``near`` questions
    (up to window − 1 tokens after the fact) and ``far`` ones (past the reach of that window in all layers), and
    the accuracy of each range of distances, ``"recall 1-8"`` and so on. ``switched_loss`` and ``switched_far`` are
    those of the model evaluated as another; where there is none, the run's own."""
    config = run.config
    far = reach(config.model.layers, window) + 1, config.context
    is_switched = run.switched_right is not None
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
        "switched_loss": run.switched_text_loss if is_switched else run.text_loss[-1],
        "switched_far": run.accuracy(*far, switched=is_switched),
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
    :mod:`dslib.models.sparse`, None for dense): a key and value for each of ``keys_read``, 4·d_model FLOPs with
    each, MoBA's gate counted as half of that a block, and NSA's φ once every stride, for the heads of a group."""
    keys = context if attention is None else attention.keys_read(context)
    kv_heads = config.kv_heads or config.heads
    flops = 4 * config.d_model * keys
    if isinstance(attention, NSAConfig):
        flops += 2 * attention.phi(config) * kv_heads / attention.sizes.compress_stride
    return DecodingCost(2 * kv_heads * config.head_dim * bytes_per_number * keys, flops)
