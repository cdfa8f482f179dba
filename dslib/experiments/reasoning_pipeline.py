"""DeepSeek-R1 in small: every stage of its pipeline, what each is compared with, and reasoning effort.

A stage is trained from another's weights; :data:`STAGES` says from which, on what. All of a seed's stages form a
tree whose root is the base model of that seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dslib.evaluation import consensus_at_k
from dslib.experiments.bases import BaseConfig, base_model
from dslib.experiments.controls import ShuffledRewards
from dslib.experiments.reasoning_tasks import ALL, Rewarded, Thinking, UnaskedEffort
from dslib.models.decoder import DecoderConfig
from dslib.rl.config import RLConfig
from dslib.rl.distill import rejection_sample
from dslib.rl.effort import EffortTask
from dslib.rl.rewards import EffortPenalty
from dslib.rl.rollout import SamplingConfig, sample
from dslib.rl.sft import Examples, SFTConfig, demonstrations, sft
from dslib.rl.trainer import Trainer
from dslib.runs import checkpoints
from dslib.runs.cache import cached
from dslib.tasks.pointer_chasing import PointerChasing
from dslib.tasks.scripts import Reading, TwoScripts


@dataclass(frozen=True)
class Stage:
    """One stage of training: where it starts, and what it learns from."""

    #: The stage whose weights are trained on; None for fresh ones.
    start: str | None
    #: ``"text"``, demonstrations of all kinds; ``"half the text"``, half as many steps of them; ``"cold"``, a few
    #: readable traces; ``"verified"``, what a verifier accepted of a teacher; ``"numbers"``, readable thoughts of every
    #: length with any effort in front; ``"rl"``; ``"effort"``, RL at an effort.
    kind: str
    #: What ``"rl"`` is rewarded for.
    rewards: tuple[str, ...] = ()
    #: The stage whose samples are verified.
    teacher: str | None = None
    #: The null: rewards of ``"rl"`` are shuffled within each group; the prompt of ``"effort"`` shows another one than
    #: rewards go by.
    shuffled: bool = False
    #: Whether the model is the small one.
    small: bool = False


STAGES: dict[str, Stage] = {
    "base": Stage(None, "text"),
    "zero": Stage("base", "rl", ("accuracy", "format")),
    "zero, shuffled rewards": Stage("base", "rl", ("accuracy", "format"), shuffled=True),
    "zero, format alone": Stage("base", "rl", ("format",)),
    "half-trained base": Stage(None, "half the text"),
    "zero, half-trained": Stage("half-trained base", "rl", ("accuracy", "format")),
    "zero, language": Stage("base", "rl", ALL),
    "zero, language or nothing": Stage("base", "rl", ("accuracy", "format", "language or nothing")),
    "cold start": Stage("base", "cold"),
    "RL": Stage("cold start", "rl", ALL),
    "RL, no language reward": Stage("cold start", "rl", ("accuracy", "format")),
    "SFT": Stage("base", "verified", teacher="RL"),
    "SFT on the checkpoint": Stage("RL", "verified", teacher="RL"),
    "R1": Stage("SFT", "rl", ALL),
    "small base": Stage(None, "text", small=True),
    "small RL": Stage("small base", "rl", ("accuracy", "format"), small=True),
    "distilled": Stage("small base", "verified", teacher="R1", small=True),
    "self-taught": Stage("small base", "verified", teacher="small base", small=True),
    "effort start": Stage("base", "numbers"),
    "effort": Stage("effort start", "effort"),
    "effort, shuffled": Stage("effort start", "effort", shuffled=True),
}
#: The tables of :func:`seed_tables`, and the stages whose weights ship with the package.
TABLES = ("reasoning", "reasoning_curves", "reasoning_effort")
SHIPPED = ("base", "R1", "effort")
#: Strides of the thoughts that reasoning effort starts from, all as often; 0 is none.
STRIDES = (0, 0, 1, 1, 2, 3)
EFFORTS = ("effort start", "effort", "effort, shuffled")


@dataclass(frozen=True)
class StudyConfig:
    """Sizes of everything."""

    #: The problems to train on; as many ``held_out`` ones behind them are for evaluation.
    task: PointerChasing = field(
        default_factory=lambda: PointerChasing(problems=20_000, symbols=6, least_hops=1, most_hops=6)
    )
    #: The model.
    model: DecoderConfig = field(
        default_factory=lambda: DecoderConfig(d_model=64, layers=2, heads=4, rope_base=100.0)
    )
    #: The student.
    small: DecoderConfig = field(
        default_factory=lambda: DecoderConfig(d_model=32, layers=2, heads=4, rope_base=100.0)
    )
    #: Fine-tuning of the base models.
    text: SFTConfig = field(
        default_factory=lambda: SFTConfig(steps=4000, batch_size=64, lr=1e-2, rest_lr=4e-3)
    )
    #: Fine-tuning on a cold start's traces, or on what was verified.
    tuning: SFTConfig = field(
        default_factory=lambda: SFTConfig(steps=100, batch_size=64, lr=2e-3, rest_lr=1e-3)
    )
    #: Fine-tuning on thoughts of every length.
    numbers: SFTConfig = field(
        default_factory=lambda: SFTConfig(steps=200, batch_size=64, lr=5e-3, rest_lr=2e-3)
    )
    #: Every stage of RL; at an effort it takes ``effort_lr``, and advantages without the deviation.
    rl: RLConfig = field(default_factory=lambda: RLConfig("grpo", prompts=32, group_size=16, lr=1e-3))
    #: Steps of RL.
    rl_steps: int = 100
    #: Steps of RL at an effort.
    effort_steps: int = 300
    #: Learning rate of RL at an effort.
    effort_lr: float = 8e-4
    #: The price of thoughts at each effort.
    penalty: EffortPenalty = field(
        default_factory=lambda: EffortPenalty(levels=(10, 40, 70, 100), normal_length=2.5)
    )
    #: Efforts at evaluation.
    asked: tuple[int, ...] = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
    #: Problems for evaluation.
    held_out: int = 256
    #: Samples of each at evaluation.
    evaluated: int = 8
    #: Samples of each for cons@k.
    votes: int = 64
    #: Readable traces of the cold start.
    cold: int = 300
    #: Readable thoughts of :data:`STRIDES`.
    varied: int = 4096
    #: Problems that a teacher is asked, eight times each.
    sampled: int = 512

    @property
    def train_task(self) -> TwoScripts:
        """The problems to train on."""
        return TwoScripts(self.task)

    @property
    def test_task(self) -> TwoScripts:
        """Problems that no stage is trained on."""
        return TwoScripts(replace(self.task, problems=self.held_out, skip=len(self.task)))

    def effort_task(self, test: bool = False, shuffled: bool = False) -> EffortTask:
        """The same at the levels of effort; at all ``asked`` ones with ``test``."""
        task = Rewarded(self.test_task if test else self.train_task, ("tagged accuracy",))
        kind = UnaskedEffort if shuffled else EffortTask
        thinking = Thinking(task.task)
        return kind(task, self.penalty, self.asked if test else None, thinking, "bar")

    def base(self, small: bool, half: bool = False) -> BaseConfig:
        """The base model, or the one that was trained for half as many steps; its vocabulary has the two ticks of an
        effort, too."""
        model = replace(self.small if small else self.model, vocab_size=self.effort_task().vocab_size)
        text = replace(self.text, steps=self.text.steps // 2) if half else self.text
        return BaseConfig(self.train_task, model, text)

    def build(self, small: bool, seed: int) -> nn.Module:
        """A fresh model."""
        return self.base(small).model.build(seed)


@dataclass(frozen=True)
class TrainedStage:
    """What a stage ended with."""

    #: Its weights.
    weights: dict[str, Tensor]
    #: A row a step of RL; empty for other kinds.
    table: list[dict[str, float]]
    #: Of its own training, what a teacher spent left out.
    flops: float


def load(config: StudyConfig, stage: str, seed: int) -> nn.Module:
    """The model of a stage, trained or from the cache, and everything it comes from."""
    model = config.build(STAGES[stage].small, seed)
    model.load_state_dict(trained(config, stage, seed).weights)
    return model


@cached
def trained(config: StudyConfig, stage: str, seed: int) -> TrainedStage:
    """Train a stage of :data:`STAGES`, in one seed; deterministic."""
    how = STAGES[stage]
    if how.start is None:
        model = base_model(config.base(how.small, how.kind == "half the text"), seed)
    else:
        model = load(config, how.start, seed)
    table: list[dict[str, float]] = []
    size = sum(weight.numel() for weight in model.parameters())
    if how.kind in ("rl", "effort"):
        table, flops = reinforce(model, rl_task(config, how), config, how.kind, seed)
    else:
        source, tuning = task_source(config, how, seed)
        some = source(256, torch.Generator().manual_seed(0)) if callable(source) else source
        flops = 0.0
        if len(some):  # a teacher that gets nothing right has nothing to teach
            if how.start is not None:
                sft(model, source, replace(tuning, seed=seed))
            tokens = some.prompts.shape[1] + some.mask.sum(1).double().mean().item()
            flops = 6 * size * tokens * tuning.batch_size * tuning.steps
    return TrainedStage({name: x.detach().clone() for name, x in model.state_dict().items()}, table, flops)


def rl_task(config: StudyConfig, stage: Stage) -> Any:
    """What a stage of RL is rewarded by."""
    if stage.kind == "effort":
        return config.effort_task(shuffled=stage.shuffled)
    task = Rewarded(config.train_task, stage.rewards)
    return ShuffledRewards(task, "group") if stage.shuffled else task


def task_source(config: StudyConfig, stage: Stage, seed: int) -> tuple[Any, SFTConfig]:
    """What a supervised stage learns from, and how long."""
    task, generator = config.train_task, torch.Generator().manual_seed(6_000_011 + seed)
    if stage.kind in ("text", "half the text"):
        return demonstrations(task), config.base(stage.small, stage.kind == "half the text").sft
    if stage.kind == "numbers":
        everything = replace(config.effort_task(), efforts=config.asked)
        chosen = torch.randint(len(everything), (config.varied,), generator=generator)
        inner = everything.split(chosen)[0]
        strides = torch.tensor(STRIDES)[torch.randint(len(STRIDES), inner.shape, generator=generator)]
        return Examples(everything.prompts(chosen), *config.task.traces(inner, strides)), config.numbers
    if stage.kind == "cold":
        chosen = torch.randint(len(task), (config.cold,), generator=generator)
        traces = config.task.traces(chosen, torch.ones_like(chosen))
        return Examples(task.prompts(chosen), *traces), config.tuning
    return verified(config, stage.teacher, seed), config.tuning


def verified(config: StudyConfig, teacher: str, seed: int) -> Examples:
    """Right answers among eight samples of each of ``sampled`` problems; of a teacher that was trained on
    language, those that are readable, as R1 drops mixed languages."""
    task, generator = config.train_task, torch.Generator().manual_seed(7_000_003 + seed)
    chosen = torch.randperm(len(task), generator=generator)[: config.sampled]
    mixes = "language" not in STAGES[teacher].rewards

    def keep(indices: Tensor, completions: Tensor, mask: Tensor) -> Tensor:
        return torch.tensor([mixes or all(r.native) for r in task.read(indices, completions, mask)])

    found = rejection_sample(
        load(config, teacher, seed), task, chosen, 8, generator, per_problem=2, keep=keep
    )
    return found.examples


def reinforce(
    model: nn.Module, task: Any, config: StudyConfig, kind: str, seed: int
) -> tuple[list[dict[str, float]], float]:
    """Train ``model`` in place by RL; a row a step — what its samples were like, before the update — and FLOPs:
    two a parameter and token for sampling, six for the update."""
    rl = (
        replace(config.rl, seed=seed)
        if kind == "rl"
        else replace(config.rl, algorithm="grpo_no_std", lr=config.effort_lr, seed=seed)
    )
    trainer, rows, flops = Trainer(model, task, rl), [], 0.0
    size = sum(weight.numel() for weight in model.parameters())
    for step in range(config.rl_steps if kind == "rl" else config.effort_steps):
        trainer.step()
        samples, rollout = trainer.last, trainer.last.rollout
        indices = samples.indices.repeat_interleave(rl.group_size)
        if kind == "effort":
            indices = task.split(indices)[0]
        readings = config.train_task.read(indices, rollout.completions, rollout.mask)
        rows.append({"step": step, "reward": samples.rewards.mean().item(), **described(readings)})
        tokens = len(samples.indices) * rollout.prompt_length + int(rollout.mask.sum())
        flops += 8.0 * size * tokens
    return rows, flops


def described(readings: Sequence[Reading]) -> dict[str, float]:
    """Means over completions: ``accuracy``, ``thought`` (nodes), ``tagged``, ``native`` (share of all nodes of
    thoughts in the prompt's script) and ``readable``; ``valid``: the share of right answers behind a thought whose
    thought has every step on the path. Shares of nothing are 0."""
    behind = [r for r in readings if r.pad.correct and r.pad.thought]
    nodes = [native for r in readings for native in r.native]
    return {
        "accuracy": _mean(r.pad.correct for r in readings),
        "thought": _mean(len(r.pad.thought) for r in readings),
        "tagged": _mean(r.tagged for r in readings),
        "native": _mean(nodes),
        "readable": _mean(r.readable for r in readings),
        "valid": _mean(r.pad.valid for r in behind),
    }


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return float(np.mean(values)) if values else 0.0


def completions_of(
    model: nn.Module, task: Any, indices: Tensor, samples: int, seed: int, thought: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """(indices, completions, mask) of ``samples`` completions of each problem at temperature 1; without
    ``thought`` an empty one has been written for the model, and it goes on with the answer."""
    prompts, width, started = task.prompts(indices), task.max_new_tokens, torch.empty(0, dtype=torch.long)
    if not thought:
        started, width = torch.tensor([task.task.think, task.task.think_end]), 2
    opened = torch.cat((prompts, started.expand(len(prompts), -1)), dim=1)
    generator = torch.Generator().manual_seed(8_000_009 + seed)
    rollout = sample(model, opened, SamplingConfig(width, end=task.end), generator, samples)
    first = started.expand(len(rollout), -1)
    mask = torch.cat((torch.ones_like(first, dtype=torch.bool), rollout.mask), dim=1)
    return indices.repeat_interleave(samples), torch.cat((first, rollout.completions), dim=1), mask


@cached
def stage_row(config: StudyConfig, stage: str, seed: int) -> dict[str, float]:
    """One stage on held-out problems: :func:`described`; ``accuracy_unthought`` with an empty thought forced;
    ``valid_by_luck``, ``valid`` had the thoughts been written for other problems; cons@k with and without
    thought; and ``flops``. Not for the stages of :data:`EFFORTS`, whose prompts differ."""
    model, task = load(config, stage, seed), config.test_task
    everything = torch.arange(len(task))
    written = completions_of(model, task, everything, config.evaluated, seed)
    readings = task.read(*written)
    right = torch.tensor([bool(r.pad.correct and r.pad.thought) for r in readings])
    indices, completions, mask = (x[right] for x in written)
    luck = task.read((indices + 1) % len(task), completions, mask)
    voted = {}
    for name, thought in (("", True), ("_unthought", False)):
        asked, *said = completions_of(model, task, everything, config.votes, 100 + seed, thought)
        pads = [r.pad for r in task.read(asked, *said)]
        answers = np.array([pad.answer for pad in pads], dtype=object).reshape(len(task), -1)
        truth = [task.problem(i).answer for i in range(len(task))]
        voted |= {
            f"once{name}": _mean(pad.correct for pad in pads),
            f"consensus{name}": float(consensus_at_k(answers.tolist(), truth).mean()),
        }
    return {
        **described(readings),
        "valid_by_luck": _mean(r.pad.valid for r in luck),
        **voted,
        "flops": trained(config, stage, seed).flops,
    }


@cached
def effort_rows(config: StudyConfig, stage: str, seed: int) -> list[dict[str, float]]:
    """A model of :data:`EFFORTS` on held-out problems at each of ``asked``."""
    model, task, rows = load(config, stage, seed), config.effort_task(test=True), []
    for place, effort in enumerate(config.asked):
        indices = torch.arange(len(task.task)) * len(config.asked) + place
        asked, *said = completions_of(model, task, indices, config.evaluated, seed)
        found = described(config.test_task.read(task.split(asked)[0], *said))
        rows.append({"effort": effort, "trained": int(effort in config.penalty.levels), **found})
    return rows


def seed_tables(config: StudyConfig, seed: int) -> dict[str, list[dict[str, Any]]]:
    """All rows of one seed, in three flat :data:`TABLES`: a row a stage, a row a step of RL, a row an effort."""
    stages, curves, efforts = [], [], []
    for stage in STAGES:
        labels = {"stage": stage, "seed": seed}
        if stage in EFFORTS:
            efforts += [labels | row for row in effort_rows(config, stage, seed)]
        else:
            stages.append(labels | stage_row(config, stage, seed))
        curves += [labels | row for row in trained(config, stage, seed).table]
    return dict(zip(TABLES, (stages, curves, efforts), strict=True))


def save_models(config: StudyConfig, seed: int, command: str) -> None:
    """Write the weights of the :data:`SHIPPED` stages of a seed, in half precision, to the source tree, with the
    command that made them."""
    models = nn.ModuleDict({stage: load(config, stage, seed) for stage in SHIPPED})
    checkpoints.write("reasoning", models, command, {"seed": seed})


def shipped(config: StudyConfig) -> nn.ModuleDict:
    """The models of the :data:`SHIPPED` stages from the package, by name."""
    models = nn.ModuleDict({stage: config.build(STAGES[stage].small, 0) for stage in SHIPPED})
    checkpoints.read("reasoning", models)
    return models
