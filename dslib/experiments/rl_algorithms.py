"""RL algorithms side by side on one base, at equal steps and equal samples; and distillation, which widens it.

Every run starts from :func:`dslib.experiments.bases.base_model` of its seed and is measured exactly: pass@k by
enumeration of the correct answers, on problems that RL trains on and on held-out ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dslib.evaluation import (
    Distribution,
    correct_probability,
    exact_pass_at_k,
    guesser_rates,
    matched_temperature,
)
from dslib.experiments.bases import BaseConfig, base_model
from dslib.experiments.controls import ShuffledRewards
from dslib.models.decoder import Decoder
from dslib.rl.config import RLConfig
from dslib.rl.distill import rejection_sample, solver_examples
from dslib.rl.rollout import SamplingConfig
from dslib.rl.samples import sample_groups
from dslib.rl.sft import Examples, SFTConfig, sft
from dslib.rl.trainer import Trainer
from dslib.runs import checkpoints
from dslib.runs.cache import cached
from dslib.tasks.countdown import Countdown
from dslib.tasks.verifiable import Task

#: pass@k is measured at these k; columns ``train_1`` … and ``held_1`` ….
KS = tuple(2**n for n in range(13))

#: The algorithms that arXiv:2504.13837 compares (§4.3), and their names in print.
NAMES = {"ppo": "PPO", "grpo": "GRPO", "rloo": "RLOO"}
NAMES |= {"reinforce++": "REINFORCE++", "remax": "ReMax", "dapo": "DAPO"}

#: The teacher's problems: of the kind that the base saw, but neither among its own, nor RL's, nor held out.
TEACHER = (80_000, 4_000)

#: Where the answers come from that a student learns. ``"teacher"``: an enumeration of all answers picks a right one.
#: ``"own answers"``: the base's own, those that the verifier accepts. ``"random answers"``: well formed, no more.
#: ``"as the base"``: the mixture that the base was trained on. ``"RL's problems"``: the teacher's answers to these.
SOURCES = ("teacher", "own answers", "random answers", "as the base", "RL's problems")

#: Learning rates beside the common one, as multiples of it.
RATES = {"half rate": 0.5, "double rate": 2.0}

#: GRPO with groups of n, and the same number of prompts with less of them: which of the two do samples pay for?
LARGE_GROUPS, FEW_SAMPLES = "few prompts, large groups", "few prompts"

#: What an evaluation that does not come from RL has in the columns of RL.
WITHOUT_RL = {"prompts": 0, "group": 0, "beta": 0.0, "temperature": 1.0, "reward": 0.0, "entropy": 0.0}


@dataclass(frozen=True)
class StudyConfig:
    """Sizes of the study: training on-policy with AdamW, without KL, as in the paper (§4.3) but smaller."""

    #: Where every run starts.
    base: BaseConfig = field(default_factory=BaseConfig)
    #: RL trains on so many problems, and they are measured.
    problems: int = 100
    #: Steps of RL.
    steps: int = 80
    #: The step up to which a quick run trains again.
    early: int = 20
    #: Problems drawn in a step.
    prompts: int = 32
    #: Samples of each.
    group_size: int = 8
    #: Samples of each in the arm of large groups.
    large_group_size: int = 32
    #: RL's learning rate.
    lr: float = 1.5e-4
    #: Coefficients of the KL sweep.
    betas: tuple[float, ...] = (0.001, 0.03, 0.3)
    #: Fine-tuning from the base on somebody's answers.
    distil: SFTConfig = field(default_factory=lambda: SFTConfig(steps=60, lr=2e-3, rest_lr=1e-3))
    #: "own answers" are the right ones among so many samples a problem.
    tries: int = 16
    #: The teacher's problems, (skip, count).
    teacher: tuple[int, int] = TEACHER
    #: So many problems that nothing was trained on are measured.
    held_out: int = 100
    #: The checkpoint that holds the base of seed 0, to be read instead of trained; other seeds have none.
    shipped: str | None = None

    @property
    def budget(self) -> int:
        """The samples of a run that draws a group a prompt, no more."""
        return self.steps * self.prompts * self.group_size


@dataclass(frozen=True)
class RLRunConfig:
    """One run of RL from the base of its seed, measured at its end and in between."""

    #: Sizes, and the base.
    study: StudyConfig
    #: How it trains.
    trainer: RLConfig
    #: Of the base and of the training.
    seed: int
    #: Steps of training.
    steps: int
    #: Steps after which it is evaluated, besides the end.
    marks: tuple[int, ...] = ()
    #: It is also evaluated where the samples drawn first reach this number (None: not).
    budget: int | None = None
    #: RL trains on these problems, (skip, count), in the place of the study's.
    problems: tuple[int, int] | None = None
    #: The rewards of each step are shuffled within the batch.
    shuffled: bool = False
    #: At the end it is also evaluated at the temperature at which its tokens have the base's entropy, and so is the
    #: base.
    tempered: bool = False


@dataclass(frozen=True)
class SFTRunConfig:
    """Fine-tuning of the base of a seed."""

    #: Sizes, and the base.
    study: StudyConfig
    #: Whose answers, one of :data:`SOURCES`; ``"base"`` evaluates the base, ``"guesser"`` equally likely answers.
    source: str
    #: Of the base and of the fine-tuning.
    seed: int


RunConfig = RLRunConfig | SFTRunConfig


@dataclass(frozen=True)
class Run:
    """What came of a :data:`RunConfig`."""

    #: A row a mark.
    evaluations: list[dict[str, Any]]
    #: A row a step of RL: reward, entropy and samples drawn so far.
    curve: list[dict[str, float]]


def rl_runs(study: StudyConfig, seed: int) -> dict[str, RLRunConfig]:
    """The runs of a seed by the name of their arm: the algorithms, and what is varied about GRPO."""
    plain = RLConfig("grpo", prompts=study.prompts, group_size=study.group_size, lr=study.lr, seed=seed)
    run = RLRunConfig(study, plain, seed, study.steps, budget=study.budget)
    marks = tuple(range(study.early, study.steps, study.early))
    runs = {
        name: replace(run, trainer=replace(plain, algorithm=name), marks=(study.early,)) for name in NAMES
    }
    runs["grpo"] = replace(runs["grpo"], marks=marks, tempered=True)
    run = replace(run, budget=None)
    runs["shuffled rewards"] = replace(run, marks=marks[1:2], shuffled=True)
    runs["teacher's problems"] = replace(run, problems=study.teacher)
    for name, factor in RATES.items():
        runs[f"grpo, {name}"] = replace(run, trainer=replace(plain, lr=factor * study.lr))
    few = max(1, study.prompts * study.group_size // study.large_group_size)
    runs[LARGE_GROUPS] = replace(run, trainer=replace(plain, group_size=study.large_group_size, prompts=few))
    runs[FEW_SAMPLES] = replace(run, trainer=replace(plain, prompts=few))
    for beta in study.betas:
        runs[f"KL {beta:g}"] = replace(run, trainer=replace(plain, loss={"kl": beta}))
    return runs


def rate_runs(study: StudyConfig, seed: int) -> dict[str, RLRunConfig]:
    """Every algorithm but GRPO, which :func:`rl_runs` has, at half and twice the learning rate: whether the common
    rate favours one."""
    runs = rl_runs(study, seed)
    return {
        f"{name}, {rate}": replace(
            runs[name], trainer=replace(runs[name].trainer, lr=factor * study.lr), marks=(), budget=None
        )
        for name in NAMES
        if name != "grpo"
        for rate, factor in RATES.items()
    }


def sft_runs(study: StudyConfig, seed: int) -> dict[str, SFTRunConfig]:
    """The base and its guesser, and fine-tuning on every source."""
    return {source: SFTRunConfig(study, source, seed) for source in ("base", "guesser", *SOURCES)}


def all_runs(study: StudyConfig, seeds: Iterable[int]) -> list[tuple[str, RunConfig]]:
    """What a full run makes: (arm, run) of every seed, and of the first seed the other learning rates."""
    found: list[tuple[str, RunConfig]] = []
    for place, seed in enumerate(seeds):
        found += [*rl_runs(study, seed).items(), *sft_runs(study, seed).items()]
        found += rate_runs(study, seed).items() if place == 0 else ()
    return found


def live_runs(study: StudyConfig, seed: int) -> dict[str, RunConfig]:
    """What a quick run trains again: the algorithms up to ``early``, and the teacher's student."""
    again = {"marks": (), "budget": None, "tempered": False}
    runs = {name: run for name, run in rl_runs(study, seed).items() if name in NAMES}
    short = {name: replace(run, steps=study.early, **again) for name, run in runs.items()}
    return {"teacher": SFTRunConfig(study, "teacher", seed), **short}


@cached
def run(config: RunConfig) -> Run:
    """Train and measure; kept. Many: :func:`dslib.runs.workers.in_workers`."""
    if isinstance(config, RLRunConfig):
        return Run(*trained(config))
    return Run(tuned(config), [])


def tables(arms: Iterable[str], runs: Iterable[Run], every: int = 5) -> Any:
    """Two flat tables of what :func:`run` gave: the evaluations, and the means of ``every`` steps."""
    import pandas as pd

    rows: list[dict] = []
    blocks: list[dict] = []
    for arm, run in zip(arms, runs, strict=True):
        rows += [{"arm": arm, **row} for row in run.evaluations]
        for start in range(0, len(run.curve), every):
            part = pd.DataFrame(run.curve[start : start + every])
            means = {"reward": part.reward.mean(), "entropy": part.entropy.mean()}
            last = {"step": int(part.step.iloc[-1]), "samples": int(part.samples.iloc[-1])}
            blocks.append({"arm": arm, "seed": run.evaluations[0]["seed"], **last, **means})
    return pd.DataFrame(rows), pd.DataFrame(blocks)


def stopped_early(path: Any, pass_at_1: float, column: str) -> float:
    """What a run had in ``column`` where its ``train_1`` was first ``pass_at_1``: on straight lines between the rows of
    ``path``, a frame in the order of steps; its end, or its start, for a pass@1 that it never reaches."""
    best = np.maximum.accumulate(path["train_1"].to_numpy())
    kept = np.concatenate(
        ([True], np.diff(best) > 0)
    )  # later rows that are no better add nothing to the way up
    return float(np.interp(pass_at_1, best[kept], path[column].to_numpy()[kept]))


def passes(
    model: nn.Module, study: StudyConfig, distribution: Distribution | None = None
) -> dict[str, float]:
    """Exact pass@k at :data:`KS` on RL's problems and on held-out ones, to eight decimals."""
    with torch.no_grad():
        rates = {
            name: correct_probability(
                model, task, range(len(task)), distribution or Distribution(), rows=4096
            )
            for name, task in measured_problems(study).items()
        }
    return _columns({name: found.clamp(0, 1).numpy() for name, found in rates.items()})


def trained(run: RLRunConfig) -> tuple[list[dict], list[dict]]:
    """Train as ``run`` says: a row an evaluation, and a row a step of reward, entropy and samples drawn so far."""
    study, model = run.study, base_of(run.study, run.seed)
    task: Task = measured_problems(study)["train"] if run.problems is None else _problems(study, run.problems)
    reference = base_of(study, run.seed)
    learnt = ShuffledRewards(task, "batch", run.seed) if run.shuffled else task
    trainer = Trainer(model, learnt, run.trainer, reference)
    rows: list[dict] = []
    for step in range(1, run.steps + 1):
        before = trainer.table[-1]["samples"] if trainer.table else 0
        last = trainer.step()
        reached = run.budget is not None and before < run.budget <= last["samples"]
        at = {"early" if step == study.early else "middle"} if step in run.marks else set()
        at |= ({"equal samples"} if reached else set()) | ({"end"} if step == run.steps else set())
        if at:
            found = passes(model, study)
            rows += [_row(run, mark, trainer, found) for mark in sorted(at)]
    if run.budget is not None and trainer.table[-1]["samples"] < run.budget:
        raise ValueError(f"{trainer.table[-1]['samples']} samples were drawn, fewer than budget={run.budget}")
    if run.tempered:
        rows += _tempered_rows(run, trainer, reference)
    curve = [{key: row[key] for key in ("step", "reward", "entropy", "samples")} for row in trainer.table]
    return rows, curve


def _row(
    run: RLRunConfig, mark: str, trainer: Trainer, found: dict[str, float], temperature: float = 1.0
) -> dict:
    table, config = trainer.table, run.trainer
    return {
        "mark": mark,
        "seed": run.seed,
        "step": len(table),
        "samples": table[-1]["samples"],
        "prompts": config.prompts,
        "group": config.group_size,
        "lr": config.lr,
        "beta": trainer.loss.kl,
        "temperature": temperature,
        "reward": float(np.mean([row["reward"] for row in table[-10:]])),
        "entropy": float(np.mean([row["entropy"] for row in table[-10:]])),
        **found,
    }


def _tempered_rows(run: RLRunConfig, trainer: Trainer, base: nn.Module) -> list[dict]:
    task, study = trainer.task, run.study
    target = sampled_entropy(base, task, 1.0)
    temperature = matched_temperature(lambda t: sampled_entropy(trainer.model, task, t), target)
    rows = []
    for mark, model in (("entropy of the base", trainer.model), ("base, as hot", base)):
        row = _row(run, mark, trainer, passes(model, study, Distribution(temperature)), temperature)
        rows.append(row | {"entropy": sampled_entropy(model, task, temperature)})
    return rows


@torch.no_grad()
def sampled_entropy(model: nn.Module, task: Task, temperature: float, problems: int = 200) -> float:
    """Mean entropy of a token, nats, over four answers to each of the first ``problems`` problems."""
    sampling = SamplingConfig(task.max_new_tokens, temperature, end=task.end)
    indices = torch.arange(min(problems, len(task)))
    rollout, _ = sample_groups(model, task, indices, sampling, torch.Generator().manual_seed(0), 4)
    return float(rollout.entropy.double().sum() / rollout.mask.sum())


def tuned(run: SFTRunConfig) -> list[dict]:
    """Fine-tune the base on the source's answers: one row. ``samples`` counts the different examples."""
    study, count = run.study, 0
    if run.source == "guesser":
        tasks = measured_problems(study).items()
        found = _columns({name: guesser_rates(task, range(len(task))) for name, task in tasks})
    else:
        model = base_of(study, run.seed)
        if run.source != "base":
            examples = answers_of(run.source, model, study, run.seed)
            count = len(examples)
            if count:  # a base that is never right has nothing to teach itself
                sft(model, examples, replace(study.distil, seed=run.seed))
        found = passes(model, study)
    ran = {"mark": "end", "seed": run.seed, "step": study.distil.steps if count else 0, "samples": count}
    return [ran | {"lr": study.distil.lr} | WITHOUT_RL | found]


def answers_of(source: str, base: nn.Module, study: StudyConfig, seed: int) -> Examples:
    """What a student reads: problems with one answer each, or with several right ones of the base's own."""
    task = measured_problems(study)["train"] if source == "RL's problems" else _problems(study, study.teacher)
    indices, generator = torch.arange(len(task)), torch.Generator().manual_seed(seed)
    if source == "own answers":
        return rejection_sample(base, task, indices, study.tries, generator).examples
    if source in ("random answers", "as the base"):
        shown = replace(task, random_share=1.0) if source == "random answers" else task
        return Examples(shown.prompts(indices), *shown.demonstrations(indices, generator))

    def solve(index: int) -> Tensor:
        right = task.correct_answers(index)
        return right[int(torch.randint(len(right), (), generator=generator))]

    return solver_examples(task, indices, solve).examples


@lru_cache(maxsize=8)  # finding all different problems takes longer than solving some
def _problems(study: StudyConfig, part: tuple[int, int]) -> Countdown:
    return replace(study.base.task, skip=part[0], problems=part[1])


@lru_cache(maxsize=8)
def measured_problems(study: StudyConfig) -> dict[str, Countdown]:
    """The problems that every run is measured on: ``"train"``, RL's, and ``"held"``, which nothing trains on."""
    return {
        "train": replace(study.base.problems(), problems=study.problems),
        "held": replace(study.base.problems(held_out=True), problems=study.held_out),
    }


def base_of(study: StudyConfig, seed: int) -> Decoder:
    """Where the runs of ``seed`` start. Raises ValueError where only another seed's base ships."""
    if study.shipped is None:
        return base_model(study.base, seed)
    model = study.base.model.build(seed)
    about = checkpoints.read(study.shipped, model)["about"]
    if about.get("seed") != seed:
        raise ValueError(
            f"{study.shipped} is the base of seed {about.get('seed')}; seed={seed} does not ship"
        )
    return model


def _columns(rates: dict[str, np.ndarray]) -> dict[str, float]:
    return {
        f"{name}_{k}": round(value, 8)
        for name, found in rates.items()
        for k, value in zip(KS, exact_pass_at_k(found, KS).tolist(), strict=True)
    }
