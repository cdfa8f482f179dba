"""From dense to sparse attention on a small model: the recipe of DeepSeek-V3.2, and what could fake its success.

A dense model is trained on text with recall mixed in; its indexer is warmed up with all else frozen (eq. 3); then
both are trained sparsely (eq. 4). Beside it stand :data:`ARMS`, all continued from the same dense weights for as
many steps on the same batches: dense attention, sparse attention whose indexer was not warmed up, the last keys
in the indexer's place, and keys chosen by chance.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dslib.attention.dsa import LightningIndexer, select_topk, selected_mass
from dslib.attention.fp8 import fp8_scores
from dslib.attention.mla import MLAConfig
from dslib.models.decoder import Decoder, DecoderConfig
from dslib.models.layers.dsa import SparseMLA, SparseMLAConfig
from dslib.models.measuring import recall_losses, recorded_calls
from dslib.models.train_config import TrainConfig
from dslib.models.training import TrainResult, corpus_digest, train_to_end
from dslib.runs.cache import cached
from dslib.runs.workers import in_workers
from dslib.tasks.corpus import load_corpus
from dslib.tasks.recall import RECALL, TEXT, RecallTask

#: Batches of continued training come from other seeds than those of the training before it.
_EXTENDING, _LATER = 250, 500

SHORT, DENSE, WARMED = "short context", "dense training", "warm-up"

#: The dense training of the shipped table …
BASE = TrainConfig(
    DecoderConfig(
        d_model=64,
        layers=2,
        heads=4,
        rope_base=1e5,
        attention=SparseMLAConfig(MLAConfig(kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16)),
    ),
    optimizer="muon",
    lr=0.06,
    rest_lr=0.06,
    momentum=0.9,
    steps=500,
    context=96,
    recall=RecallTask(distance=32),
    evaluations=5,
)
#: … and one of seconds, to go every path.
TINY = replace(
    BASE,
    model=replace(BASE.model, d_model=16),
    steps=4,
    batch_size=2,
    context=32,
    recall=RecallTask(facts=2, values=4, distance=12),
    evaluations=1,
    evaluation_windows=4,
)


@dataclass(frozen=True)
class Continuation:
    """One way to go on from the dense model."""

    #: :class:`SparseMLAConfig`'s, like the two below.
    stage: str = "sparse"
    selection: str = "indexer"
    #: The run it starts from.
    start: str = DENSE
    #: Of the indexer's loss.
    target: str = "selected"


ARMS = {
    "dense": Continuation(stage="dense"),
    "sparse": Continuation(start=WARMED),
    "sparse, no warm-up": Continuation(),
    "window": Continuation(selection="window"),
    "random": Continuation(selection="random"),
    "sparse, full target": Continuation(start=WARMED, target="full"),
}


@dataclass(frozen=True)
class Recipe:
    """Dense training, perhaps on longer windows, too, as long-context models are made; the indexer's warm-up; then
    every arm from there. (The paper's sparse stage is fifteen times as long as its warm-up and runs at a
    learning rate far below the dense training's.)"""

    #: The dense training, with a recall task and :class:`SparseMLAConfig`'s attention.
    base: TrainConfig
    #: Keys a query in the sparse stage.
    top_k: int
    warm_up_steps: int = 100
    warm_up_lr: float = 0.03
    #: Of every arm.
    steps: int = 150
    #: Its learning rates as a share of the base's.
    lr_share: float = 0.3
    #: A longer length of windows, on which the dense training goes on (None: it does not) …
    context: int | None = None
    #: … facts and questions as far apart …
    distance: int | None = None
    #: … for so many steps.
    extension_steps: int = 200

    def __post_init__(self) -> None:
        if not isinstance(self.base.model.attention, SparseMLAConfig) or self.base.recall is None:
            raise ValueError("base needs a model with SparseMLAConfig's attention, and a recall task")
        if (self.context is None) != (self.distance is None):
            raise ValueError(
                f"context={self.context} and distance={self.distance} go together: give both or none"
            )

    def configuration(self, run: str) -> TrainConfig:
        """Of a run: ``SHORT``, ``DENSE``, ``WARMED``, or a name in :data:`ARMS`. Raises ValueError for another."""
        if run == SHORT or (run == DENSE and self.context is None):
            return self._attending(self.base, stage="dense")
        rest = self.base.lr if self.base.rest_lr is None else self.base.rest_lr
        later = replace(
            self.base,
            seed=self.base.seed + _LATER,
            evaluations=1,
            steps=self.steps,
            lr=self.base.lr * self.lr_share,
            rest_lr=rest * self.lr_share,
        )
        if self.context is not None:
            recall = replace(self.base.recall, distance=self.distance)
            later = replace(later, context=self.context, recall=recall)
        if run == DENSE:
            later = replace(later, seed=self.base.seed + _EXTENDING, steps=self.extension_steps)
            return self._attending(later, stage="dense")
        if run == WARMED:
            later = replace(later, steps=self.warm_up_steps, lr=self.warm_up_lr, rest_lr=self.warm_up_lr)
            return self._attending(later, stage="warm-up", top_k=self.top_k)
        if run not in ARMS:
            raise ValueError(f"run={run!r} is unknown; use one of {[SHORT, DENSE, WARMED, *ARMS]}")
        way = ARMS[run]
        return self._attending(
            later, stage=way.stage, selection=way.selection, target=way.target, top_k=self.top_k
        )

    def before(self, run: str) -> list[str]:
        """The runs that ``run`` goes on from, first to last."""
        if run == SHORT or (run == DENSE and self.context is None):
            return []
        start = SHORT if run == DENSE else DENSE if run == WARMED else ARMS[run].start
        return [*self.before(start), start]

    @staticmethod
    def _attending(config: TrainConfig, **changes: Any) -> TrainConfig:
        return replace(
            config, model=replace(config.model, attention=replace(config.model.attention, **changes))
        )


def recipe_with(
    base: TrainConfig, ratio: int, warm_up_steps: int, steps: int, extension_steps: int = 200
) -> Recipe:
    """The recipe in whose sparse stage a query gets a ``ratio``-th of the context: of ``base``'s for 8; for 32 of one
    a third longer, or more, in whole thirty-seconds, with facts three eighths of it away, since a thirty-second of
    ``base``'s would be too few keys. Raises ValueError for another ratio."""
    if ratio == 8:
        return Recipe(base, base.context // 8, warm_up_steps, steps=steps)
    if ratio != 32:
        raise ValueError(f"ratio={ratio} is not studied; use 8 or 32")
    context = 32 * (base.context // 32 + 1)
    return Recipe(
        base,
        context // 32,
        warm_up_steps,
        steps=steps,
        context=context,
        distance=3 * context // 8,
        extension_steps=extension_steps,
    )


@dataclass(frozen=True)
class RecipeRun:
    """One training of a recipe."""

    recipe: Recipe
    #: ``DENSE``, ``WARMED`` or a name in :data:`ARMS`.
    name: str

    @property
    def corpus(self) -> str | None:
        """The text."""
        return self.recipe.base.corpus


@dataclass(frozen=True)
class RecipeResult:
    """A finished run, and what was measured with the weights at its end."""

    run: RecipeRun
    weights: dict[str, Tensor] = field(repr=False)
    #: What training measured.
    result: TrainResult = field(repr=False)
    #: Shares of the attention mass: see :func:`masses`.
    masses: dict[str, float] = field(default_factory=dict)
    #: ``"mixed_loss"``: the mean over all tokens that can be foreseen, text and answers; ``"recall_misrotated"``: the
    #: accuracy with the indexer's rotation laid out the other way; and the overlaps of :func:`overlap` with keys
    #: selected so, and in FP8.
    checks: dict[str, float] = field(default_factory=dict)

    @property
    def text_loss(self) -> float:
        """Nats a byte on unseen files, recall left out."""
        return self.result.final_loss

    @property
    def recall_loss(self) -> float:
        """Nats an answer."""
        return self.result.recall_loss[-1]

    @property
    def recall_accuracy(self) -> float:
        """Share of the answers that are the likeliest token."""
        return self.result.recall_accuracy[-1]

    def model(self, **changes: Any) -> Decoder:
        """The trained model, its attention's configuration changed."""
        config = Recipe._attending(self.result.config, **changes).model
        model = config.build()
        model.load_state_dict(self.weights)
        return model.requires_grad_(False)


def train_recipes(runs: Iterable[RecipeRun], jobs: int = 1) -> list[RecipeResult]:
    """:func:`recipe_result` of every run, in workers; what several start from is trained once, first."""
    runs = list(runs)
    for name in (SHORT, DENSE, WARMED):
        wanted = [RecipeRun(run.recipe, name) for run in runs if name in run.recipe.before(run.name)]
        list(in_workers(recipe_result, dict.fromkeys(wanted), jobs))
    return list(in_workers(recipe_result, runs, jobs))


@cached(also=corpus_digest)
def recipe_result(run: RecipeRun) -> RecipeResult:
    """Train one run of a recipe and measure, after what it starts from. Raises RuntimeError when one diverges."""
    config = run.recipe.configuration(run.name)
    before = run.recipe.before(run.name)
    last = train_to_end(
        config,
        weights=recipe_result(RecipeRun(run.recipe, before[-1])).weights if before else None,
        trainable=_is_indexer if run.name == WARMED else None,
    )
    trained = RecipeResult(run, last.weights, last.result)
    inputs, _, kinds = planted(config)
    text, answers = ((kinds == kind).sum().item() for kind in (TEXT, RECALL))
    checks = {
        "mixed_loss": (trained.text_loss * text + trained.recall_loss * answers) / (text + answers),
        "recall_misrotated": evaluate(trained, indexer_rope_layout="interleaved")["recall_accuracy"],
        "overlap_misrotated": overlap(trained, misrotated_scores),
        "overlap_fp8": overlap(trained, fp8_indexer_scores),
    }
    return replace(trained, masses=masses(trained.model(), inputs[:16], run.recipe.top_k), checks=checks)


def _is_indexer(name: str) -> bool:
    return ".indexer." in name


def planted(config: TrainConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The windows that a run is evaluated on: inputs, targets, kinds, each (count, context)."""
    text = load_corpus(config.corpus).validation
    return config.recall.evaluation(text, config.evaluation_windows, config.context)


@torch.no_grad()
def attention_inputs(model: Decoder, tokens: Tensor) -> list[tuple[SparseMLA, Tensor]]:
    """Each layer's attention and what came into it, (batch, time, d_model), for ``tokens`` (batch, time)."""
    with recorded_calls(block.attention for block in model.blocks) as calls:
        model(tokens)
    return [(call.module, call.input) for call in calls]


@torch.no_grad()
def masses(model: Decoder, tokens: Tensor, top_k: int, where: Tensor | None = None) -> dict[str, float]:
    """Share of the dense attention mass, summed over heads, that ``top_k`` keys hold: the indexer's, the last
    ones, chance's, and the best possible.

    A mean over layers and over the queries that see more than ``top_k`` keys (``where``: (batch, time) bool,
    over those alone). Attention is what the layer would do densely on the inputs that it gets.
    """
    time = tokens.shape[1]
    position = torch.arange(time)
    counted = (position >= top_k).expand(len(tokens), -1)
    counted = counted if where is None else counted & where
    window = (position.unsqueeze(1) - torch.arange(top_k)).clamp_min(-1).expand(len(tokens), -1, -1)
    chance = torch.rand(len(tokens), time, time, generator=torch.Generator().manual_seed(0))
    found: dict[str, list[float]] = {"indexer": [], "window": [], "random": [], "best": []}
    for attention, x in attention_inputs(model, tokens):
        weights = attention.weights(x)
        selections = {
            "indexer": select_topk(attention.indexer(x, attention.query_latent(x)), top_k),
            "window": window,
            "random": select_topk(chance, top_k),
            "best": select_topk(weights.sum(1), top_k),
        }
        for name, indices in selections.items():
            found[name].append(selected_mass(weights, indices)[counted].mean().item())
    return {name: sum(layers) / len(layers) for name, layers in found.items()}


@torch.no_grad()
def evaluate(trained: RecipeResult, **changes: Any) -> dict[str, float]:
    """:func:`dslib.models.measuring.recall_losses` of a trained model with another configuration of its
    attention, such as ``indexer_rope_layout="interleaved"`` or another ``top_k``."""
    return recall_losses(trained.model(**changes), planted(trained.result.config))


@torch.no_grad()
def overlap(trained: RecipeResult, change: Callable[[LightningIndexer, Tensor, Tensor], Tensor]) -> float:
    """Share of the keys selected with exact scores that are selected with ``change(indexer, x, latent)``'s scores
    too, (batch, time, time), over layers and queries that see more than top_k keys."""
    model, top_k = trained.model(), trained.run.recipe.top_k
    shares = []
    for attention, x in attention_inputs(model, planted(trained.result.config)[0][:16]):
        latent = attention.query_latent(x)
        exact = select_topk(attention.indexer(x, latent), top_k)[:, top_k:]
        other = select_topk(change(attention.indexer, x, latent), top_k)[:, top_k:]
        shares.append((exact.unsqueeze(-1) == other.unsqueeze(-2)).any(-1).double().mean().item())
    return sum(shares) / len(shares)


def misrotated_scores(indexer: LightningIndexer, x: Tensor, latent: Tensor) -> Tensor:
    """An indexer's scores with its rotation in the other layout, as a mistaken port would compute them."""
    other = copy.copy(indexer)
    other.rope_layout = "interleaved" if indexer.rope_layout == "half_split" else "half_split"
    return other(x, latent)


def fp8_indexer_scores(indexer: LightningIndexer, x: Tensor, latent: Tensor) -> Tensor:
    """An indexer's scores with queries and keys in simulated FP8."""
    q, w = indexer.queries(x, latent)
    return fp8_scores(q, indexer.keys(x), w)


def answering(config: TrainConfig, count: int = 16) -> Tensor:
    """(count, context) bool: the queries whose next token is an answer, in the first evaluation windows."""
    return planted(config)[2][:count] == RECALL
