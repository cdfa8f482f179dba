"""Spectra of the weights that AdamW and Muon train, in a small mixture of experts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dslib.experiments.muon import Rates, rates_of, with_rates
from dslib.experiments.search import Grid, Runner, Trials, best_in_table, on_seeds, one_pass
from dslib.models.decoder import Decoder
from dslib.models.measuring import named_matrices
from dslib.models.moe import max_violation
from dslib.models.train_config import TrainConfig
from dslib.models.training import corpus_digest, evaluation_marks, train_many, train_to_end
from dslib.runs.cache import cached
from dslib.spectra import singular_spectrum, spread, svd_entropy

if TYPE_CHECKING:
    import pandas

#: The null of every comparison here: AdamW itself, its matrices at half the learning rate, so that they stay
#: nearer to their random initialisation. It must not do what Muon is said to do.
STAND_IN = "AdamW, half rate"
OPTIMIZERS = {"AdamW": "adamw", "Muon": "muon"}
#: Steps after which spectra are measured besides a run's evaluations: Muon is soon as far from its start as AdamW
#: comes at all, and only then can the two be compared at equal distance.
EARLY_MARKS = (2, 5, 10)

#: The kinds of matrices that Moonlight's Figure 4 tells apart (up, gate and down are one kind here).
GROUPS = ("query", "key", "value", "output", "MLP", "router")


def matrix_group(name: str) -> str:
    """The kind, one of :data:`GROUPS`, of a weight by its name in a :class:`Decoder`.

    Raises ValueError for a name that is none of its matrices.
    """
    found = re.search(
        r"attention\.(query|key|value|output)\.weight$|(mlp)\.(?:.*\.)?(router|gate|up|down)\.weight$", name
    )
    if found is None:
        raise ValueError(f"name={name!r} is no matrix of a decoder's layers")
    return found[1] or ("router" if found[3] == "router" else "MLP")


def search_rates(
    base: TrainConfig,
    start: dict[str, Rates],
    seeds: Sequence[int],
    run: Runner = train_many,
    **labels: Any,
) -> list[dict[str, Any]]:
    """Search the matrices' learning rate of ``base`` for AdamW and Muon, bracketed, from ``start`` on, whose
    other rates stay: one row a run, with ``labels``. The loss of a rate is its mean over ``seeds``."""
    rows: list[dict[str, Any]] = []
    for arm, rates in start.items():
        trials = Trials(on_seeds(run, lambda point, arm=arm: _at_rates(base, arm, point), seeds))
        one_pass(rates, (Grid("lr"),), trials.losses)
        rows += [
            {
                **labels,
                "arm": arm,
                **vars(rates_of(result.config)),
                "seed": result.config.seed,
                "final_loss": result.final_loss,
            }
            for result in trials.results
        ]
    return rows


def _at_rates(base: TrainConfig, arm: str, rates: Rates) -> TrainConfig:
    """For equal steps, as in the paper."""
    return replace(with_rates(base, OPTIMIZERS[arm], 1.0, rates), steps=base.steps)


def tuned_arms(
    base: TrainConfig, start: dict[str, Rates], searched: pandas.DataFrame | None = None
) -> dict[str, TrainConfig]:
    """``base`` under AdamW and Muon, for the same number of steps, and the null's :data:`STAND_IN`: the
    rates of ``start``, the matrices' learning rate replaced by the best of ``searched`` (the rows of
    :func:`search_rates`). Raises ValueError when that lies at the edge of what was searched."""
    arms = {}
    for arm, rates in start.items():
        if searched is not None:
            best = best_in_table(searched[searched.arm == arm], ["lr"], ["lr"])
            rates = replace(rates, lr=float(best["lr"]))
        arms[arm] = _at_rates(base, arm, rates)
    return with_stand_in(arms)


def with_stand_in(arms: dict[str, TrainConfig]) -> dict[str, TrainConfig]:
    """``arms``, one of them "AdamW", and :data:`STAND_IN`: embedding, head and norms keep their rate."""
    adamw = arms["AdamW"]
    rest = adamw.lr if adamw.rest_lr is None else adamw.rest_lr
    return {**arms, STAND_IN: replace(adamw, lr=adamw.lr / 2, rest_lr=rest)}


def balance_arms(config: TrainConfig) -> dict[str, TrainConfig]:
    """A mixture's run with its bias updated by either rule, and with a bias that stays 0.

    Raises ValueError for a dense model."""
    moe = config.model.moe
    if moe is None:
        raise ValueError("config.model.moe=None is a dense model, which has no experts to balance")

    def with_moe(**options: Any) -> TrainConfig:
        return replace(config, model=replace(config.model, moe=replace(moe, **options)))

    return {
        "Moonlight's rule": with_moe(bias_rule="moonlight"),
        "DeepSeek-V3's rule": with_moe(bias_rule="deepseek"),
        "no bias": with_moe(bias_update_rate=0.0),
    }


@dataclass(frozen=True)
class SpectraRun:
    """What a run leaves behind. Each of its matrices has a column in ``entropy``, ``learnt_entropy`` and
    ``distance``, (marks, matrices) float64."""

    config: TrainConfig
    final_loss: float
    #: The matrices, in the order of the columns.
    names: tuple[str, ...]
    #: Steps done at each mark.
    at: tuple[int, ...]
    #: SVD entropy of the weight W.
    entropy: Tensor
    #: That of its learnt part, what the updates have added: W − c·W₀, where c is the share of the initial weight that
    #: weight decay has left.
    learnt_entropy: Tensor
    #: The learnt part's Frobenius norm over that of W₀.
    distance: Tensor
    #: The final singular values over the largest, by the matrix's name.
    spectra: dict[str, Tensor]
    #: Those of the learnt part.
    learnt_spectra: dict[str, Tensor]
    #: Of a mixture: (steps, layers, experts) int64; empty for a dense model.
    loads: Tensor
    #: Likewise, float32.
    biases: Tensor

    @property
    def groups(self) -> tuple[str, ...]:
        """The kind of each matrix."""
        return tuple(matrix_group(name) for name in self.names)

    def by_group(self, values: Tensor) -> dict[str, Tensor]:
        """``values`` (..., matrices) averaged over the matrices of each kind: {kind: (...)}."""
        kinds = self.groups
        return {
            group: values[..., [i for i, kind in enumerate(kinds) if kind == group]].mean(-1)
            for group in GROUPS
            if group in kinds
        }

    def violations(self) -> Tensor:
        """:func:`max_violation` of every step, the mean over layers: (steps,) float64."""
        return max_violation(self.loads).mean(-1)


@cached(also=corpus_digest)
def spectra_run(config: TrainConfig) -> SpectraRun:
    """Train once, and measure the matrices at :data:`EARLY_MARKS` and each evaluation. Raises RuntimeError when
    the run diverges."""
    marks = {*evaluation_marks(config), *EARLY_MARKS}
    marks = sorted(step for step in marks if 0 < step <= config.steps)
    initial: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}  # they share their memory with the model's parameters
    left = 1.0
    measured: list[list[Tensor]] = []
    loads, biases = [], []

    def learnt_parts() -> dict[str, Tensor]:
        return {name: weight.double() - left * initial[name] for name, weight in weights.items()}

    def observe(step: int, model: Decoder, optimizers: list[torch.optim.Optimizer]) -> None:
        nonlocal left
        if step == 0:
            weights.update(matrices_of(model))
            initial.update({name: weight.double().clone() for name, weight in weights.items()})
            return
        # Both optimizers decay by 1 − lr·λ, with the lr of the matrices (Moonlight eq. 3; AdamW).
        left *= 1 - optimizers[0].param_groups[0]["lr"] * config.weight_decay
        if mixtures := model.mixtures():
            loads.append(torch.stack([layer.load for layer in mixtures]))
            biases.append(torch.stack([layer.bias.clone() for layer in mixtures]))
        if step in marks:
            learnt = learnt_parts()
            measured.append(
                [
                    torch.stack([svd_entropy(weight) for weight in weights.values()]),
                    torch.stack([svd_entropy(part) for part in learnt.values()]),
                    torch.stack([part.norm() / initial[name].norm() for name, part in learnt.items()]),
                ]
            )

    trained = train_to_end(config, observe)
    spectra, learnt_spectra = (
        {name: singular_spectrum(weight, normalize=True) for name, weight in matrices.items()}
        for matrices in (weights, learnt_parts())
    )
    entropy, learnt_entropy, distance = (torch.stack(rows) for rows in zip(*measured, strict=True))
    return SpectraRun(
        config=config,
        final_loss=trained.result.final_loss,
        names=tuple(spectra),
        at=tuple(marks),
        entropy=entropy,
        learnt_entropy=learnt_entropy,
        distance=distance,
        spectra=spectra,
        learnt_spectra=learnt_spectra,
        loads=torch.stack(loads) if loads else torch.zeros(config.steps, 0, 0, dtype=torch.int64),
        biases=torch.stack(biases) if biases else torch.zeros(config.steps, 0, 0),
    )


def summary(run: SpectraRun, against: SpectraRun, **labels: Any) -> list[dict[str, Any]]:
    """One row a mark of ``run``: ``labels``, settings, the mean of each kind of matrix for ``entropy``,
    ``learnt`` entropy and ``distance``, and the shares of matrices whose entropy (``higher``) and whose learnt
    entropy (``learnt_higher``) is above that of the same matrix of ``against`` at the same mark. ``violation``
    is the mean MaxVio of a mixture over the tenth of the steps before the mark (0 for a dense model).

    Raises ValueError when the two runs have different matrices or marks.
    """
    if (run.names, run.at) != (against.names, against.at):
        raise ValueError(f"run and against differ in their matrices or marks: {run.at} and {against.at}")
    table = {
        "entropy": run.by_group(run.entropy),
        "learnt": run.by_group(run.learnt_entropy),
        "distance": run.by_group(run.distance),
    }
    window = max(1, run.config.steps // 10)
    violations = run.violations() if run.loads.numel() else torch.zeros(run.config.steps)
    return [
        {
            **labels,
            "steps": run.config.steps,
            "lr": run.config.lr,
            "rest_lr": run.config.lr if run.config.rest_lr is None else run.config.rest_lr,
            "seed": run.config.seed,
            "at": at,
            "final_loss": run.final_loss,
            "higher": share_higher(run.entropy, against.entropy)[mark],
            "learnt_higher": share_higher(run.learnt_entropy, against.learnt_entropy)[mark],
            "violation": violations[max(0, at - window) : at].mean().item(),
            **{
                f"{what} {group}": round(values[mark].item(), 6)
                for what, groups in table.items()
                for group, values in groups.items()
            },
        }
        for mark, at in enumerate(run.at)
    ]


def summaries(runs: dict[str, list[SpectraRun]], **labels: Any) -> list[dict[str, Any]]:
    """The rows of :func:`summary` for every run of every arm, each against AdamW's of the same seed.

    Raises ValueError where AdamW has no run of that seed."""
    against = {run.config.seed: run for run in runs["AdamW"]}
    rows = []
    for arm, group in runs.items():
        for run in group:
            if run.config.seed not in against:
                raise ValueError(f"runs of {arm!r} have the seed {run.config.seed}, those of 'AdamW' do not")
            rows += summary(run, against[run.config.seed], arm=arm, **labels)
    return rows


def share_higher(values: Tensor, others: Tensor) -> list[float]:
    """The share of matrices whose value is above the other run's: (marks, matrices) twice → one a mark."""
    return (values > others).double().mean(-1).tolist()


def router_gap(run: SpectraRun, against: SpectraRun, what: str = "entropy") -> tuple[float, float]:
    """How much higher ``what`` is at the end in ``run`` than in ``against``: (of the routers, of all other
    matrices), means over matrices."""
    difference = (getattr(run, what) - getattr(against, what))[-1]
    is_router = torch.tensor([group == "router" for group in run.groups])
    return difference[is_router].mean().item(), difference[~is_router].mean().item()


def middle_values(runs: dict[str, list[SpectraRun]]) -> dict[str, float]:
    """The singular value in the middle of the learnt part's spectrum, over the largest: each arm's mean over its
    matrices and runs."""
    means = {}
    for arm, group in runs.items():
        spectra = [sigma for run in group for sigma in run.learnt_spectra.values()]
        means[arm] = sum(sigma[len(sigma) // 2].item() for sigma in spectra) / len(spectra)
    return means


def measured_weights(weights: dict[str, Tensor]) -> list[dict[str, Any]]:
    """SVD entropy, effective and stable rank of every matrix of a decoder's layers, one row each:
    ``layer``, ``group``, ``name``, ``rows``, ``columns`` and the measures of :func:`dslib.spectra.spread`."""
    rows = []
    for name, weight in weights.items():
        if not name.startswith("blocks.") or weight.ndim != 2:
            continue
        rows.append(
            {
                "layer": int(name.split(".")[1]),
                "group": matrix_group(name),
                "name": name,
                "rows": weight.shape[0],
                "columns": weight.shape[1],
                **{measure: value.item() for measure, value in spread(weight).items()},
            }
        )
    return rows


def matrices_of(model: Decoder) -> dict[str, Tensor]:
    """The weights that Muon would train, by name, detached."""
    return {name: weight.detach() for name, weight in named_matrices(model).items()}


def in_four_bits(W: Tensor) -> Tensor:
    """``W``, its number of entries a multiple of 32, rounded as Q4_1 does: blocks of 32 numbers, each on 16 levels
    between its least and its largest."""
    blocks = W.reshape(-1, 32)
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    step = (high - low) / 15
    return (low + step * ((blocks - low) / step).round()).view_as(W)
