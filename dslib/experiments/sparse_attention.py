"""Dense and sparse attention trained alike, on text into which facts are planted that are asked for later."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dslib.attention import causal_mask, moba_mask, nsa_masks, sliding_window_mask
from dslib.attention.nsa import NSASizes, complete_blocks
from dslib.models.decoder import Decoder, DecoderConfig
from dslib.models.layers.sparse import MoBAConfig, NSAConfig, SlidingWindowConfig
from dslib.models.measuring import recall_losses, recorded_calls
from dslib.models.train_config import TrainConfig
from dslib.models.training import corpus_digest, train_to_end
from dslib.runs.cache import cached
from dslib.runs.workers import in_workers
from dslib.tasks.corpus import load_corpus
from dslib.tasks.recall import RECALL, RecallTask

if TYPE_CHECKING:
    import pandas

#: The arms whose attention is chosen by content, with the null of each: the same pattern at random.
NULLS = {"MoBA": "MoBA, random blocks", "NSA": "NSA, random blocks"}


@dataclass(frozen=True)
class SparseConfig(TrainConfig):
    """A run, the trained model evaluated as other ones of the same weights, too."""

    #: Another model, as which it is evaluated …
    switch: DecoderConfig | None = None
    #: … and one more, to compare with.
    null_switch: DecoderConfig | None = None
    #: Planted windows that are asked at the end, none of which the run's own evaluations use.
    answers: int = 256


#: The runs of the shipped table, their attention dense, and the sizes of what takes its place …
BASE = SparseConfig(
    DecoderConfig(d_model=64, layers=2, heads=4, rope_base=1e5),
    optimizer="muon",
    lr=0.06,
    rest_lr=0.06,
    momentum=0.9,
    steps=400,
    batch_size=16,
    context=64,
    recall=RecallTask(values=4, distance=1),
    evaluations=5,
)
WINDOW = 16
MOBA = MoBAConfig(4, 4)
NSA = NSAConfig(NSASizes(4, 2, 4, selected=4, initial=0, local=1, window=8))
#: … and those of a run of seconds, to go every path.
TINY = replace(
    BASE,
    model=replace(BASE.model, d_model=16),
    steps=4,
    batch_size=2,
    context=32,
    recall=RecallTask(facts=2, values=4, distance=1),
    evaluation_windows=4,
    answers=64,
)
TINY_WINDOW = 4
TINY_MOBA = MoBAConfig(4, 2)
TINY_NSA = NSAConfig(NSASizes(4, 2, 4, selected=2, initial=0, local=1, window=4))


@dataclass(frozen=True)
class SparseRun:
    """What a run measured. What concerns another model is None where there is none."""

    config: SparseConfig
    #: Steps done at each evaluation.
    at: list[int]
    #: There, of the text, nats a token.
    text_loss: list[float]
    #: There, the share of answers that are the likeliest token.
    recall_accuracy: list[float]
    #: Of each question from its fact at the end, in tokens, (questions,) int64.
    distance: Tensor
    #: Whether it was answered, (questions,) bool.
    right: Tensor
    #: Which heads had its fact among their keys, (questions, layers, heads) bool.
    seen: Tensor
    #: When switched to the other model: the loss of the text …
    switched_text_loss: float | None
    #: … and the answers.
    switched_right: Tensor | None
    #: The answers as the ``null_switch``.
    null_switched_right: Tensor | None
    #: Of all steps.
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


@cached(also=corpus_digest)
def sparse_run(config: SparseConfig) -> SparseRun:
    """Train once and ask. Raises ValueError without a recall task, and RuntimeError when the run diverges."""
    if config.recall is None:
        raise ValueError("recall=None plants nothing to ask for; give a RecallTask")
    trained = train_to_end(config)
    model, result = trained.model, trained.result
    text = load_corpus(config.corpus).validation
    planted = config.recall.evaluation(text, config.answers, config.context, seed=1)
    distance, right = recall_by_distance(model, planted)
    own = config.recall.evaluation(text, config.evaluation_windows, config.context)
    switched_loss, switched_right, null_right = None, None, None
    if config.switch is not None:
        other = switched(model, config.switch)
        switched_right = recall_by_distance(other, planted)[1]
        switched_loss = recall_losses(other, own)["loss"]
    if config.null_switch is not None:
        null_right = recall_by_distance(switched(model, config.null_switch), planted)[1]
    return SparseRun(
        config=config,
        at=result.at,
        text_loss=result.validation_loss,
        recall_accuracy=result.recall_accuracy,
        distance=distance,
        right=right,
        seen=facts_seen(model, planted),
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
    parts = []
    for inputs, targets in zip(*(part.split(batch_size) for part in planted[:2]), strict=True):
        with recorded_calls(block.attention for block in model.blocks) as calls:
            model(inputs)
        facts = _facts(inputs, targets)
        parts.append(torch.stack([_sees(call.module.logits(call.input), facts) for call in calls], dim=2))
    return torch.cat(parts)[planted[2] == RECALL]


def _sees(logits: Tensor, facts: Tensor) -> Tensor:
    """Whether the keys at ``facts`` (windows, time) may be attended to: logits (windows, heads, time, keys) →
    (windows, time, heads) bool."""
    visible = logits > -math.inf
    at = facts[:, None, :, None].expand(-1, visible.shape[1], -1, -1)
    return visible.gather(-1, at).squeeze(-1).transpose(1, 2)


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


def measured_rows(
    configs: Mapping[str, SparseConfig], seeds: Iterable[int], window: int, jobs: int = 1, width: int = 8
) -> list[dict[str, Any]]:
    """:func:`row` of each of :func:`arms`, or of some, with every seed, trained in workers."""
    runs = [(name, replace(config, seed=seed)) for seed in seeds for name, config in configs.items()]
    results = in_workers(sparse_run, [config for _, config in runs], jobs)
    rows = []
    for (name, config), run in zip(runs, results, strict=True):
        sizes = {"context": config.context, "d_model": config.model.d_model}
        rows.append(row(run, window, width, arm=name, **sizes))
    return rows


#: How the columns of :func:`means` are shown.
MEANS_FORMATS = {
    "read by the last query": ".0f",
    "training FLOPs": ".2f",
    "text (nats/byte)": ".3f",
    "near": ".0%",
    "far": ".0%",
    "fact in sight": ".0%",
}


def means(table: pandas.DataFrame, configs: Mapping[str, SparseConfig]) -> pandas.DataFrame:
    """Means over the seeds of :func:`measured_rows`, a row an arm, under the names of ``MEANS_FORMATS``: the pairs of
    key and value that the last query reads, and FLOPs as a multiple of dense attention's, among them."""
    mean = table.groupby("arm", sort=False)[["flops", "text_loss", "near", "far", "far_seen"]].mean()
    mean["flops"] /= mean.flops["dense"]
    kinds = {name: configs[name].model.attention for name in mean.index}
    context = next(iter(configs.values())).context
    read = [context if kind is None else kind.keys_read(context) for kind in kinds.values()]
    mean.insert(0, "read", read)
    mean.columns = list(MEANS_FORMATS)
    return mean.reset_index()


def switches(table: pandas.DataFrame) -> pandas.DataFrame:
    """Means over the seeds of arms read as they were trained and as another attention with the same weights."""
    import pandas

    mean = table.groupby("arm")[["text_loss", "far", "switched_loss", "switched_far"]].mean()
    rows = []
    for trained, other in (("dense", "MoBA"), ("MoBA", "dense"), ("window", "dense")):
        at = mean.loc[trained]
        rows.append([trained, trained, at.text_loss, at.far])
        rows.append([trained, other, at.switched_loss, at.switched_far])
    columns = ["trained as", "read as", "text, nats/byte", "far answers right"]
    return pandas.DataFrame(rows, columns=columns)


def planted_qk(
    length: int, needle: int, strength: float, seed: int = 0, dim: int = 16
) -> tuple[Tensor, Tensor]:
    """Random q and k, (1, 1, length, dim), in which the last query looks for the key at ``needle``: that key has
    ``strength`` times the direction of the query added."""
    q, k = torch.randn(2, 1, 1, length, dim, generator=torch.Generator().manual_seed(seed))
    k[..., needle, :] += strength * F.normalize(q[..., -1, :], dim=-1)
    return q, k


def seen_by(q: Tensor, k: Tensor, window: int, moba: MoBAConfig, sizes: NSASizes) -> dict[str, Tensor]:
    """Which keys each query sees, (queries, keys) bool, by kind of attention; of NSA's branches the compressed one
    sees blocks. The means of NSA's blocks stand in for a learnt φ."""
    length = k.shape[2]
    compressed = complete_blocks(k, sizes.compress_block, sizes.compress_stride).mean(-2)
    branches = nsa_masks(q, compressed, length, sizes)
    return {
        "dense": causal_mask(length, length),
        "window": sliding_window_mask(length, length, window),
        "MoBA": moba_mask(q, k, moba.block_size, moba.top_k)[0, 0],
        "NSA, selected": branches.selected[0, 0],
        "NSA, window": branches.window,
        "NSA, compressed": branches.compressed,
    }


@dataclass(frozen=True)
class DecodingCost:
    """What one layer's attention does for one token."""

    #: Read, of keys and values.
    bytes: float
    #: Multiplied and added.
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
