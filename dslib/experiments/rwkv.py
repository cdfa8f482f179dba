"""What a state of constant size is good and bad at: text, longer texts than in training, recall, tracking."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dslib.attention import KVCache, wkv7
from dslib.models.decoder import Decoder, DecoderConfig
from dslib.models.layers.rwkv import RWKV7, RWKVConfig
from dslib.models.train_config import TrainConfig
from dslib.models.training import TrainResult, corpus_digest, fit, train_model
from dslib.runs.cache import cached
from dslib.tasks.corpus import evaluation_windows, load_corpus
from dslib.tasks.recall import RECALL
from dslib.tasks.state_tracking import StateTracking

#: Lengths are tested up to this multiple of the training length.
LONGER = 4


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
class LengthsRun:
    """A training run on text, and its model on windows :data:`LONGER` times as long as any it saw: as many of them,
    evenly spaced over the validation text, as the configuration evaluates with."""

    result: TrainResult
    #: An entry a position: the mean loss there over the windows, in nats a token.
    loss_at: list[float]
    #: Mean loss on the last half training length of these windows when the model sees no more than a training length
    #: of them; ``loss_long`` is that on the same tokens when it sees all.
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


@cached(also=corpus_digest)
def lengths(config: TrainConfig) -> LengthsRun:
    """Train on windows of ``config.context``, then measure the loss position by position on longer ones; the losses
    of a run that diverges are infinite."""
    trained = train_model(config)
    if trained.result.diverged:
        return LengthsRun(trained.result, [math.inf] * (LONGER * config.context), math.inf)
    inputs, targets = _long_windows(config)
    last = slice(-config.context, None)
    loss_at = loss_by_position(trained.model, inputs, targets)
    short = loss_by_position(trained.model, inputs[:, last], targets[:, last])[-(config.context // 2) :]
    return LengthsRun(trained.result, loss_at, math.fsum(short) / len(short))


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


def recall_arms(decoder: DecoderConfig) -> dict[str, DecoderConfig | RWKVConfig]:
    """The models that are compared on recall: attention, and RWKV-7 with a larger and a smaller state."""
    return {
        "attention": decoder,
        "RWKV-7, heads of 16": matched(decoder),
        "RWKV-7, heads of 4": matched(decoder, head_size=4),
    }


def with_facts(config: TrainConfig, facts: int) -> TrainConfig:
    """The same run with another number of facts. Raises ValueError without a recall task."""
    if config.recall is None:
        raise ValueError("config.recall=None has no facts; give a RecallTask")
    return replace(config, recall=replace(config.recall, facts=facts))


@dataclass(frozen=True)
class RecallRun:
    """A run on ``config.recall`` in windows that hold nothing else."""

    config: TrainConfig
    #: An entry a step.
    train_loss: list[float]
    #: Of the answers in 256 test windows, nats.
    loss: float
    #: Share of these answers whose likeliest token is right.
    accuracy: float


@cached
def recall(config: TrainConfig) -> RecallRun:
    """Train on windows of blanks (token 0) with facts and questions, on the answers alone: whoever must write
    what it reads into a state learns that far sooner without a text in between. Deterministic; a run that diverges
    has an infinite loss and no answer right.

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
    if not math.isfinite(history[-1]):
        return RecallRun(config, history, math.inf, 0.0)
    with torch.no_grad():
        loss, hits = losses(model, batch(256, torch.Generator().manual_seed(5_000_011)))
    return RecallRun(config, history, _finite(loss.item()), hits.double().mean().item())


def _finite(loss: float) -> float:
    """inf for a loss that is no number: a diverged run is a bad one to a search, and fits into a table."""
    return loss if math.isfinite(loss) else math.inf


@dataclass(frozen=True)
class TrackingConfig(TrainConfig):
    """A run on :class:`dslib.tasks.StateTracking` instead of text: products of permutations of ``objects``
    things, in words of ``context`` tokens. What concerns text — corpus, recall, evaluations — is not used."""

    #: How many things are permuted.
    objects: int = 2


@dataclass(frozen=True)
class TrackingRun:
    """A run on state tracking, tested on words up to :data:`LONGER` times the training length."""

    config: TrackingConfig
    #: An entry a step, nats a token.
    train_loss: list[float]
    #: An entry a position: the share of 256 test words whose likeliest element is right.
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


@cached
def track(config: TrackingConfig) -> TrackingRun:
    """Train on random words, test on longer ones. Deterministic as :func:`dslib.models.train` is; a run that
    diverges has no element right.

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
    if not math.isfinite(losses[-1]):
        return TrackingRun(config, losses, [0.0] * (LONGER * config.context))
    words = task.batch(256, LONGER * config.context, torch.Generator().manual_seed(3_000_017))
    return TrackingRun(config, losses, _accuracy(model, *words))


@torch.no_grad()
def _accuracy(model: torch.nn.Module, tokens: Tensor, targets: Tensor) -> list[float]:
    return (model(tokens).argmax(-1) == targets).double().mean(0).tolist()


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


def random_inputs(time: int, size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """r, w, k, v, a, b of :func:`dslib.attention.wkv7` with the ranges that RWKV-7 gives them, one head of one
    sequence: (1, 1, time, size) float64 each."""
    draws = torch.randn(6, 1, 1, time, size, generator=generator, dtype=torch.float64)
    r, x, k, v, kappa, eta = draws
    w = torch.exp(-math.exp(-0.5) * x.sigmoid())
    kappa = F.normalize(kappa, dim=-1)
    return r, w, k, v, -kappa, kappa * eta.sigmoid()


def memory_errors(
    pairs: int, rewritten: int, decay: float, eta: float, orthogonal: bool, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """What a head of 16 numbers per key gives back after writing ``pairs`` random keys with random values, then the
    first ``rewritten`` keys with new ones: ‖read − value last written‖ / ‖value‖ of every key, (pairs,), under the
    plain sum of RWKV-5 and 6 and under the delta rule with learning rate ``eta``."""
    draw = torch.Generator().manual_seed(seed)
    keys = F.normalize(torch.randn(pairs, 16, generator=draw), dim=1)
    if orthogonal:
        keys = torch.linalg.qr(torch.randn(16, 16, generator=draw)).Q[torch.arange(pairs) % 16]
    keys = torch.cat((keys, keys[:rewritten]))[None, None]
    v = torch.randn(keys.shape, generator=draw)
    newest = torch.cat((v[0, 0, pairs:], v[0, 0, min(rewritten, pairs) : pairs]))
    w, zero = torch.full_like(keys, decay), torch.zeros_like(keys)
    _, plain = wkv7(keys, w, keys, v, zero, zero)
    _, delta = wkv7(keys, w, eta * keys, v, -keys, eta * keys)
    return tuple(
        ((S[0, 0] @ keys[0, 0, :pairs].T).T - newest).norm(dim=1) / newest.norm(dim=1) for S in (plain, delta)
    )


def next_token(model: Decoder | RWKV7, length: int) -> Callable[[], Tensor]:
    """A call that reads one more token after ``length`` others. What a decoder would have kept of them is random
    numbers; a state has the same size whatever it has read, and starts empty."""
    cache, token = KVCache(), torch.zeros(1, 1, dtype=torch.long)
    if isinstance(model, Decoder):
        config = model.config
        for layer in range(config.layers):
            cache.append(layer, *torch.randn(2, 1, config.kv_heads or config.heads, length, config.head_dim))
        cache.length = length
    return lambda: model(token, cache=cache)
