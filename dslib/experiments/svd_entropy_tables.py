"""The tables of the spectra under AdamW and Muon: run sizes, what is searched and measured, what is read off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dslib.experiments import interchange as stages
from dslib.experiments import muon
from dslib.experiments import svd_entropy as study
from dslib.experiments.search import SEARCH_SEEDS
from dslib.models.decoder import Decoder, DecoderConfig
from dslib.models.moe import MoEConfig
from dslib.models.train_config import TrainConfig
from dslib.models.training import train_many
from dslib.runs import measurements
from dslib.runs.workers import in_workers
from dslib.spectra import svd_entropy

if TYPE_CHECKING:
    import pandas

#: The smallest model, on which all arms and seeds are run.
SMALL = "32 × 2"


def mixture(d_model: int, heads: int, layers: int, experts: int = 16, **options: Any) -> TrainConfig:
    """A run of a mixture of experts of these sizes; ``options`` are the other fields of the run."""
    moe = MoEConfig(experts=experts, top_k=2, shared_experts=1, bias_update_rate=0.01)
    model = DecoderConfig(d_model=d_model, heads=heads, layers=layers, moe=moe)
    return TrainConfig(model, **({"steps": 80, "batch_size": 32, "context": 64, "evaluations": 4} | options))


_DENSE = DecoderConfig(d_model=32, heads=2, layers=2)
MODELS = {SMALL: mixture(32, 2, 2), "64 × 2": mixture(64, 2, 2), "96 × 3": mixture(96, 3, 3)}


@dataclass(frozen=True)
class Sizes:
    """What is trained."""

    #: The mixture, …
    base: TrainConfig = MODELS[SMALL]
    #: … the dense model of the fine-tuning, …
    dense: DecoderConfig = _DENSE
    #: … and its steps of pretraining and fine-tuning.
    pretrain_steps: int = 200
    tune_steps: int = 60
    batch_size: int = 32
    #: How many seeds ship, and how many are trained at "quick".
    seeds: int = 8
    live_seeds: int = 2


FULL = Sizes()
#: Every path in seconds.
SMOKE = Sizes(
    mixture(16, 2, 1, experts=4, steps=8, batch_size=4, context=32),
    DecoderConfig(d_model=16, heads=2, layers=1),
    pretrain_steps=8,
    tune_steps=4,
    batch_size=4,
)


def command(seed: int) -> str:
    """The command line that makes the tables."""
    return f"dslib run 08 --profile full --param save_measurements=true --param seed={seed}"


def dense_arms(corpus: str | None = None) -> dict[str, TrainConfig]:
    """The dense model of notebook 01 under AdamW and Muon, at the rates and momentum that were found there."""
    dense = TrainConfig(FULL.dense, steps=200, batch_size=32, context=64, evaluations=1)
    table = measurements.read("muon")
    found = muon.tuned_arms(dense, table[(table.model == SMALL) & (table.kind == "search")])
    arms = {"AdamW": found["AdamW"], "Muon": found["Muon, short"]}
    return {arm: replace(config, corpus=corpus) for arm, config in arms.items()}


def starts() -> dict[str, muon.Rates]:
    """Where the searches start: the rates of :func:`dense_arms`."""
    return {arm: muon.rates_of(config) for arm, config in dense_arms().items()}


def search_rows(corpus: str | None, jobs: int) -> Iterator[list[dict[str, Any]]]:
    """The searches of the matrices' learning rate, a model at a time; the larger ones on one seed."""
    for name, config in MODELS.items():
        seeds = SEARCH_SEEDS if name == SMALL else SEARCH_SEEDS[:1]
        yield study.search_rates(
            replace(config, corpus=corpus),
            starts(),
            seeds,
            lambda configs: list(train_many(configs, jobs)),
            model=name,
        )


def arms_of(
    searched: pandas.DataFrame, base: TrainConfig, model: str = SMALL, rules: bool = False
) -> dict[str, TrainConfig]:
    """``base`` under AdamW, Muon and the null at the rates found for ``model``; with ``rules`` also Muon with
    DeepSeek-V3's rule for the bias and without a bias."""
    arms = study.tuned_arms(base, starts(), searched[searched.model == model])
    if rules:
        balance = study.balance_arms(arms["Muon"])
        arms |= {name: balance[name] for name in ("DeepSeek-V3's rule", "no bias")}
    return arms


def run_arms(
    arms: dict[str, TrainConfig], seeds: Sequence[int], jobs: int
) -> dict[str, list[study.SpectraRun]]:
    """Every arm on every seed."""
    asked = [(arm, replace(config, seed=seed)) for arm, config in arms.items() for seed in seeds]
    runs: dict[str, list[study.SpectraRun]] = {arm: [] for arm in arms}
    results = in_workers(study.spectra_run, [config for _, config in asked], jobs)
    for (arm, _), result in zip(asked, results, strict=True):
        runs[arm].append(result)
    return runs


def rows(
    searched: pandas.DataFrame, corpus: str | None, seed: int, jobs: int, seeds: int = FULL.seeds
) -> Iterator[list[dict[str, Any]]]:
    """The runs that ship, a model at a time: the smallest with all arms, the larger ones on three seeds."""
    for name, config in MODELS.items():
        small = name == SMALL
        arms = arms_of(searched, replace(config, corpus=corpus), name, rules=small)
        runs = run_arms(arms, range(seed, seed + (seeds if small else 3)), jobs)
        yield study.summaries(runs, model=name)


def fine_tuned_in(jobs: int) -> Any:
    """What makes the fine-tunings of :mod:`dslib.experiments.interchange`, ``jobs`` at a time."""
    return lambda configs: list(in_workers(stages.fine_tuned, configs, jobs))


def stage_arms(sizes: Sizes, corpus: str | None) -> dict[str, TrainConfig]:
    """The pretrainings: the dense model under AdamW, Muon and the null's AdamW."""
    arms = {
        arm: replace(config, model=sizes.dense, steps=sizes.pretrain_steps, batch_size=sizes.batch_size)
        for arm, config in dense_arms(corpus).items()
    }
    return study.with_stand_in(arms)


def at_end(table: pandas.DataFrame, model: str = SMALL) -> pandas.DataFrame:
    """The rows of a model after its last step."""
    return table[(table.model == model) & (table["at"] == table.steps)]


def by_arm(table: pandas.DataFrame, column: str, model: str = SMALL) -> pandas.DataFrame:
    """A column after the last step: a row per seed, a column per arm. Arms without a seed are NaN there."""
    return at_end(table, model).pivot(index="seed", columns="arm", values=column)


def over_matrices(
    table: pandas.DataFrame, what: str, config: DecoderConfig, leave: Sequence[str] = ()
) -> pandas.Series:
    """The mean of ``what`` ("entropy", "learnt", "distance") over all matrices of a model, those of the kinds
    ``leave`` left out, from its means of every kind: one number per row of ``table``."""
    counts = Counter(study.matrix_group(name) for name in study.matrices_of(Decoder(config)))
    kept = {f"{what} {group}": counts[group] for group in study.GROUPS if group not in leave}
    return sum(table[column] * count for column, count in kept.items()) / sum(kept.values())


def random_start(config: DecoderConfig, seeds: Sequence[int]) -> dict[str, float]:
    """The mean SVD entropy of every kind of matrix before training, over ``seeds``."""
    entropies: dict[str, list[float]] = {}
    for seed in seeds:
        for name, weight in study.matrices_of(Decoder(config, seed=seed)).items():
            entropies.setdefault(study.matrix_group(name), []).append(svd_entropy(weight).item())
    return {group: sum(values) / len(values) for group, values in entropies.items()}


def router_gaps(
    table: pandas.DataFrame, arm: str, config: DecoderConfig, what: str = "entropy"
) -> pandas.DataFrame:
    """How much higher ``what`` ends under ``arm`` than under AdamW: columns ``routers`` and ``others``, the means
    over the smallest model's matrices of either kind, a row per seed."""
    import pandas

    end = at_end(table).set_index("seed").sort_index()
    means = pandas.DataFrame(
        {
            "arm": end.arm,
            "routers": end[f"{what} router"],
            "others": over_matrices(end, what, config, leave=("router",)),
        }
    )
    ours, adamw = (means[means.arm == name].drop(columns="arm") for name in (arm, "AdamW"))
    return ours - adamw


def judged(table: pandas.DataFrame, config: DecoderConfig, seeds: Sequence[int]) -> dict[str, float]:
    """What the claims judge, as means over ``seeds``, of the null on the first alone: for two tables that should
    agree."""
    table = table[table.seed.isin(list(seeds)) & (table.model == SMALL)]
    gaps = router_gaps(table, "Muon", config).mean()
    higher, learnt = (by_arm(table, column) for column in ("higher", "learnt_higher"))
    return {
        "share, W": higher["Muon"].mean(),
        "share, W, null": higher[study.STAND_IN][seeds[0]],
        "share, learnt part": learnt["Muon"].mean(),
        "router gap": gaps["routers"] - gaps["others"],
    }
