"""How large updates and weights are in training, matrix by matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dslib.experiments.muon import Rates, best_rates, rows, search_rates
from dslib.experiments.search import SEARCH_SEEDS, Runner
from dslib.models.decoder import Decoder, DecoderConfig
from dslib.models.measuring import named_matrices, validation_loss
from dslib.models.train_config import TrainConfig
from dslib.models.training import (
    TrainResult,
    corpus_digest,
    evaluation_marks,
    train_to_end,
    training_batches,
    training_steps,
)
from dslib.optim import Muon, UpdateMeter, newton_schulz, update_rms
from dslib.optim.update_rms import ADAMW_RMS, adjusted_lr_factor, theoretical_update_rms
from dslib.runs.cache import cached
from dslib.spectra import singular_spectrum
from dslib.tasks.corpus import batches, evaluation_windows, load_corpus

if TYPE_CHECKING:
    import pandas

#: Moonlight's Table 8.
TARGETS = (0.05, 0.1, 0.2, 0.4, 0.8)


def run_of(d_model: int, heads: int, steps: int, batch_size: int = 16, layers: int = 2) -> TrainConfig:
    """AdamW's run on a model of this size, its MLPs of two matrices as Moonlight's Table 1 has them. The learning
    rates are those that its search starts from."""
    model = DecoderConfig(d_model=d_model, heads=heads, layers=layers, mlp="two_layer")
    return TrainConfig(
        model, steps=steps, batch_size=batch_size, context=64, lr=0.008, rest_lr=0.128, betas=(0.9, 0.95)
    )


#: Width × layers; larger models train for fewer steps, so that they end in time.
MODELS = {"32 × 2": run_of(32, 2, 300), "64 × 2": run_of(64, 2, 200), "96 × 2": run_of(96, 3, 150)}
#: The arms of the larger ones, on :data:`LARGER_SEEDS` seeds, AdamW's rates searched on one.
LARGER_ARMS = ("AdamW", "Baseline", "Baseline, lr × 2", "Adjusted LR", "RMS 0.8")
LARGER_SEEDS = 2
#: The long run of Figure 2. Its learning rate is four times the search's start and was not searched.
LONG = replace(run_of(32, 2, 2000, batch_size=8), lr=0.032, evaluations=20)

#: What a weight is called in tables, by a part of its name.
KINDS = {
    "attention.query": "query",
    "attention.key": "key",
    "attention.value": "value",
    "attention.output": "output",
    "mlp.gate": "MLP gate",
    "mlp.up": "MLP up",
    "mlp.down": "MLP down",
}


@dataclass(frozen=True)
class FollowedRun:
    """A training run and the sizes in it; every dictionary is keyed by the weight's name."""

    result: TrainResult
    shapes: dict[str, tuple[int, int]]
    #: RMS of each step's update without lr and decay (:class:`dslib.optim.UpdateMeter`), one entry a step.
    update_rms: dict[str, list[float]]
    #: At the end.
    weight_rms: dict[str, float]
    #: Of W_end − W_start.
    moved_rms: dict[str, float]
    #: Of all norms' gains at each evaluation of ``result``.
    gain_rms: list[float]


@cached(also=corpus_digest)
def follow(config: TrainConfig) -> FollowedRun:
    """Train, recording the update of every matrix at every step. Raises RuntimeError when the run diverges."""
    start: dict[str, Tensor] = {}
    meters: list[UpdateMeter] = []
    gains: list[float] = []

    def observe(step: int, model: Decoder, optimizers: list[torch.optim.Optimizer]) -> None:
        if step == 0:
            matrices = named_matrices(model)
            start.update({name: p.detach().clone() for name, p in matrices.items()})
            meters.append(UpdateMeter(optimizers[0], matrices.items()))
        gains.append(_gain_rms(model))

    trained = train_to_end(config, observe)
    end, records = named_matrices(trained.model), meters[0].records
    return FollowedRun(
        result=trained.result,
        shapes={name: tuple(weight.shape) for name, weight in end.items()},
        update_rms={name: [record[name] for record in records if name in record] for name in end},
        weight_rms={name: update_rms(weight.detach()).item() for name, weight in end.items()},
        moved_rms={name: update_rms(weight.detach() - start[name]).item() for name, weight in end.items()},
        gain_rms=[gains[at] for at in trained.result.at],
    )


def arms(adamw: TrainConfig) -> dict[str, TrainConfig]:
    """AdamW's run, and Muon's on its learning rates and decay: Moonlight's Table 1 (Baseline, Update Norm,
    Adjusted LR) and Table 8 (the target RMS), and the nulls of both: Baseline with twice the matrices'
    learning rate, and each target with lr × target held constant."""
    muon = replace(adamw, optimizer="muon")
    found = {
        "AdamW": adamw,
        "Baseline": replace(muon, adjust_lr="baseline"),
        "Baseline, lr × 2": replace(muon, adjust_lr="baseline", lr=2 * adamw.lr),
        "Update Norm": replace(muon, adjust_lr="update_norm"),
        "Adjusted LR": muon,
    }
    others = [target for target in TARGETS if target != ADAMW_RMS]
    found |= {f"RMS {target:g}": replace(muon, target_rms=target) for target in others}
    for target in others:
        lr = adamw.lr * ADAMW_RMS / target
        found[f"RMS {target:g}, same product"] = replace(muon, target_rms=target, lr=lr)
    return found


def decay_arms(base: TrainConfig, adamw_lr: float) -> dict[str, TrainConfig]:
    """The long run of Moonlight's Figure 2: ``base`` with Muon and decay, the same without decay anywhere,
    without decay of the norms' gains only, and AdamW at ``adamw_lr`` with decay."""
    muon = replace(base, optimizer="muon")
    return {
        "Muon": muon,
        "Muon, no decay": replace(muon, weight_decay=0.0),
        "Muon, gains not decayed": replace(muon, norm_weight_decay=0.0),
        "AdamW": replace(base, optimizer="adamw", lr=adamw_lr),
    }


def search(base: TrainConfig, seeds: Iterable[int], run: Runner) -> list[dict[str, Any]]:
    """AdamW's two learning rates on ``base``, both bracketed: one row a run, kind="search".

    ``run`` trains configurations, as :func:`dslib.models.train_many`. The momentum stays: it is what sets
    the size of AdamW's updates.
    """
    start = Rates(base.lr, base.rest_lr, base.betas[0])
    found = search_rates(base, "adamw", 1.0, start, seeds, momentum_values=(), run=run)
    return rows(found, kind="search", arm="AdamW")


def tuned(base: TrainConfig, searched: pandas.DataFrame) -> TrainConfig:
    """``base`` with AdamW's best learning rates among ``searched``, the rows of :func:`search`.

    Raises ValueError when the optimum was not bracketed.
    """
    best = best_rates(searched)
    return replace(base, optimizer="adamw", lr=best.lr, rest_lr=best.rest_lr)


def measure(
    chosen: dict[str, TrainConfig],
    seeds: Iterable[int],
    run: Runner,
) -> list[dict[str, Any]]:
    """One row of kind="final" a run: the named configurations, each on every seed. ``run`` follows
    configurations, as :func:`follow` in workers."""
    named = [(name, replace(config, seed=seed)) for name, config in chosen.items() for seed in seeds]
    followed = run([config for _, config in named])
    return [row(each, kind="final", arm=name) for (name, _), each in zip(named, followed, strict=True)]


def curves(followed: FollowedRun, **labels: Any) -> list[dict[str, Any]]:
    """One row an evaluation of a run: ``labels``, its settings, and what was measured there."""
    config, result = followed.result.config, followed.result
    return [
        {
            **labels,
            "optimizer": config.optimizer,
            "d_model": config.model.d_model,
            "layers": config.model.layers,
            "steps": config.steps,
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "seed": config.seed,
            "at": at,
            "loss": result.validation_loss[place],
            "weight_rms": result.weight_rms[place],
            "output_rms": result.activation_rms[place],
            "gain_rms": followed.gain_rms[place],
        }
        for place, at in enumerate(result.at)
    ]


def measure_everything(
    models: Mapping[str, TrainConfig], seeds: Sequence[int], run: Runner, following: Runner
) -> dict[str, pandas.DataFrame]:
    """The tables ``update_rms_search`` and ``update_rms``: the search on every model, then all :func:`arms` on
    the first and :data:`LARGER_ARMS` on the others. ``run`` trains configurations, ``following`` follows them."""
    import pandas

    searched, finals = [], []
    for place, (name, model) in enumerate(models.items()):
        found = search(model, SEARCH_SEEDS if place == 0 else SEARCH_SEEDS[:1], run)
        chosen = arms(tuned(model, pandas.DataFrame(found)))
        if place:
            chosen = {arm: chosen[arm] for arm in LARGER_ARMS}
        ended = measure(chosen, seeds if place == 0 else seeds[:LARGER_SEEDS], following)
        searched += [{**each, "model": name} for each in found]
        finals += [{**each, "model": name} for each in ended]
    return {"update_rms_search": pandas.DataFrame(searched), "update_rms": pandas.DataFrame(finals)}


def decay_rows(
    long_arms: Mapping[str, TrainConfig], seeds: Sequence[int], following: Runner
) -> list[dict[str, Any]]:
    """The table ``weight_decay``: :func:`curves` of :func:`decay_arms`, Muon's on all seeds, AdamW's, which is
    there for comparison only, on two."""
    named = [
        (arm, replace(config, seed=seed))
        for arm, config in long_arms.items()
        for seed in (seeds[:2] if config.optimizer == "adamw" else seeds)
    ]
    followed = following([config for _, config in named])
    return [row for (arm, _), each in zip(named, followed, strict=True) for row in curves(each, arm=arm)]


@cached(also=lambda config, steps: corpus_digest(config))
def opening(config: TrainConfig, steps: int) -> dict[int, float]:
    """Validation loss, nats a token, by steps done, at those evaluations of a run that lie in its first ``steps``;
    the rest of it is not made, its schedule is that of the whole."""
    text = load_corpus(config.corpus).validation
    windows = evaluation_windows(text, config.evaluation_windows, config.context)
    model, stream = config.model.build(seed=config.seed), training_batches(config)
    marks, losses = evaluation_marks(config), {}
    for step in training_steps(model, config, lambda _: model.loss(*next(stream)), stop=steps):
        if step.done in marks:
            losses[step.done] = validation_loss(model, windows)
    return losses


def nominal_and_realised(
    matrices: Mapping[str, Tensor], orthogonalize: Callable[[Tensor], Tensor] = newton_schulz
) -> list[dict[str, Any]]:
    """For a table: Lemma 1's RMS of each orthogonalised matrix, the one that it has, that one under Adjusted LR's
    factor, and the matrix's smallest singular value over its largest."""
    return [
        {
            "momentum of": name.removeprefix("blocks."),
            "shape": str(list(matrix.shape)),
            "nominal RMS": theoretical_update_rms(matrix.shape),
            "realised RMS": (realised := update_rms(orthogonalize(matrix)).item()),
            "× 0.2·√max(A, B)": adjusted_lr_factor(matrix.shape, "match_rms_adamw") * realised,
            "σ_min/σ_max before": singular_spectrum(matrix, normalize=True)[-1].item(),
        }
        for name, matrix in matrices.items()
    ]


def arm_rows(chosen: Mapping[str, TrainConfig]) -> list[dict[str, Any]]:
    """What every arm is, for a table: optimizer, factor of the update, its target RMS, learning rates."""
    words = {
        "baseline": "0.2·√H",
        "update_norm": "0.2 / RMS(O)",
        "match_rms_adamw": "√max(A, B)",
    }
    return [
        {
            "arm": name,
            "optimizer": {"adamw": "AdamW", "muon": "Muon + AdamW"}[config.optimizer],
            "factor": "–"
            if config.optimizer == "adamw"
            else words[config.adjust_lr].replace("√max", f"{config.target_rms:g}·√max"),
            "lr, matrices": config.lr,
            "lr, rest": config.rest_lr,
            "weight decay": config.weight_decay,
        }
        for name, config in chosen.items()
    ]


def late_update_rms(followed: FollowedRun) -> dict[str, float]:
    """Each matrix's update RMS, mean over the second half of the run."""
    late = {name: values[len(values) // 2 :] for name, values in followed.update_rms.items()}
    return {name: math.fsum(values) / len(values) for name, values in late.items()}


def by_kind(sizes: dict[str, float]) -> dict[str, float]:
    """Mean over the layers for each kind of weight, in the order of :data:`KINDS`; others are left out."""
    groups: dict[str, list[float]] = {}
    for part, kind in KINDS.items():
        values = [value for name, value in sizes.items() if part in name]
        if values:
            groups[kind] = values
    return {kind: math.fsum(values) / len(values) for kind, values in groups.items()}


def adamw_on_noise(
    betas: tuple[float, float], steps: int, shape: tuple[int, int] = (64, 64), seed: int = 0
) -> float:
    """RMS of AdamW's update when every gradient is fresh Gaussian noise: nothing to learn at all.

    The mean over the last half of ``steps``. With v̂ near 1 it is √((1−β₁)/(1+β₁)), the size of an
    exponential average of noise: 0.229 at β₁ = 0.9.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, betas=betas, weight_decay=0.0)
    with UpdateMeter(optimizer, [("weight", weight)]) as meter:
        for _ in range(steps):
            weight.grad = torch.randn(shape, generator=generator)
            optimizer.step()
    late = [record["weight"] for record in meter.records[steps // 2 :]]
    return math.fsum(late) / len(late)


def first_update(
    model: Decoder,
    tokens: Tensor,
    weights: dict[str, Sequence[int] | None],
    adjust_lr: str | None,
    hidden_size: int | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """RMS of the first Muon update of the named ``weights`` (name: split_sizes, or None for the whole),
    from the gradient of one batch of 16 × 64 ``tokens``, as :class:`dslib.optim.UpdateMeter` records it.

    Raises ValueError for a name that is no weight of ``model``.
    """
    parameters = dict(model.named_parameters())
    for name in weights:
        if name not in parameters:
            raise ValueError(f"weights names {name!r}, which this model has not: {', '.join(parameters)}")
    model.loss(*next(batches(tokens, 16, 64, torch.Generator().manual_seed(seed)))).backward()
    groups = [
        {"params": [parameters[name]], "split_sizes": sizes, "hidden_size": hidden_size}
        for name, sizes in weights.items()
    ]
    optimizer = Muon(groups, lr=0.01, adjust_lr=adjust_lr)
    with UpdateMeter(optimizer, [(name, parameters[name]) for name in weights]) as meter:
        optimizer.step()
    return meter.records[0]


def row(followed: FollowedRun, **labels: Any) -> dict[str, Any]:
    """One flat row of a run for a table: ``labels``, its settings, and what it measured at its end."""
    config, result = followed.result.config, followed.result
    kinds, moved = by_kind(followed.weight_rms), by_kind(followed.moved_rms)
    means = by_kind(late_update_rms(followed))
    return {
        **labels,
        "optimizer": config.optimizer,
        "d_model": config.model.d_model,
        "layers": config.model.layers,
        "steps": config.steps,
        "lr": config.lr,
        "rest_lr": config.lr if config.rest_lr is None else config.rest_lr,
        "weight_decay": config.weight_decay,
        "seed": config.seed,
        "final_loss": result.final_loss,
        "query_rms": kinds["query"],
        "mlp_rms": kinds["MLP up"],
        "query_moved": moved["query"],
        "mlp_moved": moved["MLP up"],
        "query_update_rms": means["query"],
        "mlp_update_rms": means["MLP up"],
        "output_rms": result.activation_rms[-1],
        "gain_rms": followed.gain_rms[-1],
    }


def _gain_rms(model: nn.Module) -> float:
    gains = [module.weight for module in model.modules() if isinstance(module, nn.RMSNorm)]
    return update_rms(torch.cat([gain.detach() for gain in gains])).item()
