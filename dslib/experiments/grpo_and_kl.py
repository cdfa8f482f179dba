"""Sampling in bfloat16, training in float32: how far the two policies are apart, and what four remedies do.

A small mixture of experts learns a task by GRPO on stale samples. DeepSeek-V3.2 (arXiv:2512.02556, §3.1) keeps
the experts and the sampling mask of the sampler, leaves out bad sequences that have become improbable, and weighs
the KL estimate by the ratio: here each is switched on and off, in all combinations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from dslib.evaluation.exact import Distribution, answer_kl, correct_probability
from dslib.experiments.bases import BaseConfig, base_model
from dslib.models.decoder import Decoder
from dslib.models.moe import recorded_routes
from dslib.rl.advantages import group_advantages
from dslib.rl.config import RLConfig
from dslib.rl.kl import kl_estimate
from dslib.rl.objectives import PolicyBatch
from dslib.rl.rollout import Rollout, SamplingConfig, completion_states, sample, score
from dslib.rl.samples import Samples, sample_groups
from dslib.rl.trainer import Trainer
from dslib.runs.cache import cached
from dslib.tasks.countdown import Countdown

#: The switches, in the order of the columns of the design.
FACTORS = ("keep_routing", "keep_sampling_mask", "off_policy_mask", "unbiased_kl")

#: Runs beside the design: all switches are on, but the one named here is replaced by something that looks alike.
CONTROLS = {"random mask": "off_policy_mask", "no KL": "unbiased_kl"}

#: Coefficients at which a KL in the reward is tried, on the policies that the runs end with.
REWARD_COEFFICIENTS = (0.04, 0.1, 0.4, 1.0)


@dataclass(frozen=True)
class RunConfig:
    """One run of reinforcement learning from a base, a mixture of experts that has seen demonstrations of its task.

    Raises ValueError for a control that is none of :data:`CONTROLS`.
    """

    #: The policy to start from, which is also the reference.
    base: BaseConfig
    #: How it is trained, without seed, loss and switches: those are set below.
    trainer: RLConfig
    #: Of the base and of the run.
    seed: int = 0
    #: Steps of training.
    steps: int = 30
    #: It trains on so many of the task's first problems.
    problems: int = 128
    #: It is measured on so many of them.
    tested: int = 128
    #: Coefficient of the KL.
    kl: float = 0.05
    #: δ of the off-policy mask.
    delta: float = 0.05
    #: Replay the sampler's experts.
    keep_routing: bool = True
    #: Replay the sets that top-p left to the sampler.
    keep_sampling_mask: bool = True
    #: Leave out bad sequences that have become improbable.
    off_policy_mask: bool = True
    #: Weigh the KL estimate by the ratio.
    unbiased_kl: bool = True
    #: One of :data:`CONTROLS`, or empty.
    control: str = ""

    def __post_init__(self) -> None:
        if self.control not in ("", *CONTROLS):
            raise ValueError(f"control={self.control!r} is unknown; use one of {', '.join(CONTROLS)} or ''")

    @property
    def training(self) -> RLConfig:
        """The trainer's configuration with the switches set."""
        delta = self.delta if self.off_policy_mask and self.control != "random mask" else None
        loss = {
            "kl": 0.0 if self.control == "no KL" else self.kl,
            "kl_unbiased": self.unbiased_kl,
            "off_policy_delta": delta,
        }
        kept = {"keep_routing": self.keep_routing, "keep_sampling_mask": self.keep_sampling_mask}
        return replace(self.trainer, loss=loss, seed=self.seed, **kept)


@dataclass(frozen=True)
class Run:
    """What came of a :class:`RunConfig`."""

    config: RunConfig
    #: A row a step.
    table: list[dict[str, float]]
    #: What was measured at the end: the columns of :func:`row`.
    numbers: dict[str, float]
    #: Of samples of the final policy, (problems, group_size).
    rewards: Tensor
    #: Of the same samples to the base, the sum of k1, (problems, group_size).
    kl: Tensor


def base_policy(config: RunConfig) -> Decoder:
    """The policy that a run starts from, trained once and kept."""
    return base_model(config.base, config.seed).eval()


class RandomMaskTrainer(Trainer):
    """Leaves out the surrogate of ``share`` of all sequences of negative advantage, drawn at random: as many as
    the off-policy mask would, but others. The KL and the denominators stay, as under that mask."""

    share = 0.0

    def prepare(self, samples: Samples) -> PolicyBatch:
        batch = super().prepare(samples)
        drawn = torch.rand(len(batch), generator=self.generator) < self.share
        left_out = drawn & (batch.advantages < 0)
        return replace(batch, advantages=torch.where(left_out, 0, batch.advantages))


@cached
def run(config: RunConfig) -> Run:
    """Train and measure; deterministic on one thread, and kept. The random mask leaves out the share of negative
    sequences that the off-policy mask left out in the run without control, which is made (or read) first."""
    task = replace(config.base.task, problems=config.problems)
    policy, reference = (base_policy(config) for _ in range(2))
    trainer = RandomMaskTrainer(policy, task, config.training, reference)
    if config.control == "random mask":
        trainer.share = run(replace(config, control="")).numbers["masked_share"]
    negative = []
    for _ in range(config.steps):
        trainer.step()
        negative.append((group_advantages(trainer.last.rewards, "grpo_no_std") < 0).double().mean().item())
    table = trainer.table
    left_out = math.fsum(1 - step["kept_share"] for step in table) / max(math.fsum(negative), 1e-9)
    indices = torch.arange(config.tested)
    filtered = Distribution(config.trainer.temperature, top_p=config.trainer.top_p)
    policy.eval()
    with torch.no_grad():
        numbers = {
            "p_correct": correct_probability(policy, task, indices).mean().item(),
            "p_correct_filtered": correct_probability(policy, task, indices, filtered).mean().item(),
            "p_correct_base": correct_probability(reference, task, indices).mean().item(),
            "exact_kl": answer_kl(policy, reference, task, indices)[0].mean().item(),
        }
    last = table[-max(1, len(table) // 4) :]
    norms = torch.tensor([step["grad_norm"] for step in table], dtype=torch.float64)
    numbers |= {
        "reward": math.fsum(step["reward"] for step in last) / len(last),
        "reward_all": math.fsum(step["reward"] for step in table) / len(table),
        "grad_norm": norms.mean().item(),
        "grad_norm_max": norms.max().item(),
        "ratio_max": max(step["ratio_max"] for step in table),
        "old_kl": math.fsum(step["old_kl"] for step in table) / len(table),
        "clip_share": math.fsum(step["clip_share"] for step in table) / len(table),
        "kept_share": math.fsum(step["kept_share"] for step in table) / len(table),
        "masked_share": min(1.0, left_out),
    }
    rewards, kl = rewards_and_kl(policy, reference, task, config)
    numbers |= {f"punished_{beta}": punished_share(rewards, kl, beta) for beta in REWARD_COEFFICIENTS}
    return Run(config, table, numbers, rewards, kl)


@torch.no_grad()
def rewards_and_kl(
    policy: nn.Module, reference: nn.Module, task: Countdown, config: RunConfig
) -> tuple[Tensor, Tensor]:
    """Rewards of the policy's own samples, and the sum of k1 over each: (problems, group_size) float32 both."""
    generator = torch.Generator().manual_seed(7_000_003 + config.seed)
    temperature, indices = config.trainer.temperature, torch.arange(config.tested)
    sampling = SamplingConfig(task.max_new_tokens, temperature, end=task.end)
    size = config.trainer.group_size
    rollout, rewards = sample_groups(policy, task, indices, sampling, generator, size)
    k1 = kl_estimate(rollout.logp, score(reference, rollout, temperature), "k1", mask=rollout.mask)
    return rewards, k1.sum(1).view_as(rewards)


def punished_share(rewards: Tensor, kl: Tensor, beta: float) -> float:
    """Of the correct samples in groups that hold a wrong one, the share whose advantage turns negative when β·KL is
    taken from the reward; 0 where there are none. Both: (problems, group_size)."""
    asked = (rewards == 1) & (rewards.mean(1, keepdim=True) < 1)
    negative = group_advantages(rewards - beta * kl, "grpo_no_std") < 0
    return (negative & asked).sum().item() / max(1, asked.sum().item())


def design(config: RunConfig, seeds: Iterable[int], controls: bool = True) -> list[RunConfig]:
    """Every combination of the switches on every seed, and the controls, with all other switches on."""
    found = []
    for seed in seeds:
        base = replace(config, seed=seed)
        for levels in product((False, True), repeat=len(FACTORS)):
            found.append(replace(base, control="", **dict(zip(FACTORS, levels, strict=True))))
        if controls:
            on = replace(base, **dict.fromkeys(FACTORS, True))
            found += [replace(on, control=control) for control in CONTROLS]
    return found


def row(found: Run) -> dict[str, Any]:
    """One flat row a run: the switches as 0 and 1, the settings that matter, what was measured."""
    config = found.config
    return {
        "kind": "run",
        "control": config.control or "none",
        **{name: int(getattr(config, name)) for name in FACTORS},
        "seed": config.seed,
        "steps": config.steps,
        "lr": config.trainer.lr,
        "kl": config.kl,
        "delta": config.delta,
        "top_p": config.trainer.top_p or 1.0,
        **found.numbers,
    }


def effects(table: Any, outcome: str, factors: Sequence[str] = FACTORS) -> list[float]:
    """The effect of one switch, or the interaction of several, on ``outcome``: one number a seed, in their order.

    A mean over all runs of the design, a run counting with the product of its switches' signs: for a single switch
    the mean of the runs with it minus that of those without. ``table``: rows of :func:`row`. The interaction of all
    four is what chance alone makes, where no remedy depends on three others. Raises ValueError for a seed without all
    combinations, naming it.
    """
    part = table[table.control == "none"]
    signs = 1
    for name in factors:
        signs = signs * (2 * part[name] - 1)
    combinations = 2 ** len(FACTORS)
    counts = part.groupby("seed").size()
    if (counts != combinations).any():
        seed = counts.index[counts != combinations][0]
        raise ValueError(f"seed {seed} has {counts[seed]} runs of the {combinations} combinations")
    return ((signs * part[outcome]).groupby(part.seed).sum() / (combinations / 2)).tolist()


def control_effects(table: Any, control: str, outcome: str) -> list[float]:
    """What a control's run changes of ``outcome`` against the run in which the switch that it replaces is off and
    all others are on: one number a seed, in their order."""
    others = [name for name in FACTORS if name != CONTROLS[control]]
    part = table[(table[others] == 1).all(axis=1)].set_index("seed").sort_index()
    without = part[(part.control == "none") & (part[CONTROLS[control]] == 0)]
    return (part[part.control == control][outcome] - without[outcome]).tolist()


@dataclass(frozen=True)
class Mismatch:
    """One rollout of a sampler, scored by the policy in float32 in four ways.

    ``log_ratio``: (kept routing, kept sampling mask) → log π/π_old of each scored token, (tokens,) float64;
    ``flipped``: whether the expert set of *any* token up to it differs in any layer, and ``flip_share`` of all
    tokens read in how many it differs at that very token.
    """

    log_ratio: dict[tuple[bool, bool], Tensor]
    flipped: Tensor
    flip_share: float


def sampler_of(config: RunConfig) -> nn.Module:
    """The base policy as the trainer's sampler has it, in ``config.trainer.sampler_dtype``."""
    return Trainer(base_policy(config), config.base.task, config.training).sampler()


def sampling_of(config: RunConfig, top_p: float | None) -> SamplingConfig:
    """How the trainer samples, but for top-p."""
    task = config.base.task
    return SamplingConfig(task.max_new_tokens, config.trainer.temperature, top_p, end=task.end)


@torch.no_grad()
def mismatch(
    policy: nn.Module,
    sampler: nn.Module,
    sampling: SamplingConfig,
    task: Countdown,
    problems: int,
    group_size: int,
) -> Mismatch:
    """The mismatch of a policy and its sampler, mixtures of experts both, on the first ``problems`` of a task."""
    generator = torch.Generator().manual_seed(9_000_011)
    prompts = task.prompts(torch.arange(problems))
    rollout = sample(sampler, prompts, sampling, generator, group_size, record_routes=True, record_kept=True)
    differs = flipped_routes(policy, rollout).any(0)
    log_ratio = {}
    for routing, mask in product((False, True), repeat=2):
        logp = score(
            policy,
            rollout,
            sampling.temperature,
            rollout.kept if mask else None,
            rollout.routes if routing else None,
        )
        log_ratio[routing, mask] = (logp - rollout.logp).double()[rollout.mask]
    before = differs.cumsum(1)[:, rollout.prompt_length - 1 :] > 0
    read = (rollout.routes >= 0).all(-1).all(0)
    share = differs[read].double().mean().item()
    return Mismatch(log_ratio, before[rollout.mask], share)


@torch.no_grad()
def flipped_routes(policy: nn.Module, rollout: Rollout) -> Tensor:
    """Where the set of experts that the policy would visit is not that of the rollout: (layers, sequences, time)
    bool, False past a row's end."""
    with recorded_routes(policy) as passes:
        completion_states(policy, rollout)
    now = torch.stack([record[0] for record in passes]).sort(-1).values
    then = rollout.routes.long().sort(-1).values
    return (now != then).any(-1) & (then >= 0).all(-1)


def mismatch_rows(config: RunConfig, seed: int, problems: int = 200) -> list[dict[str, Any]]:
    """The mismatch of the base policy of ``seed`` and its samplers, as flat rows: one for each precision of the
    sampler, with and without top-p, and each way to score. ``part``: over all tokens, or over those which no token
    with another expert set comes before, in prompt or answer, themselves included."""
    config = replace(config, seed=seed)
    policy, rows = base_policy(config), []
    for dtype, top_p in product(("bfloat16", "float32"), (config.trainer.top_p, None)):
        sampler = sampler_of(replace(config, trainer=replace(config.trainer, sampler_dtype=dtype)))
        sizes = (config.base.task, problems, config.trainer.group_size)
        found = mismatch(policy, sampler, sampling_of(config, top_p), *sizes)
        for (routing, mask), log_ratio in found.log_ratio.items():
            for part in ("all", "no flip before"):
                chosen = log_ratio if part == "all" else log_ratio[~found.flipped]
                rows.append(
                    {
                        "kind": "mismatch",
                        "seed": seed,
                        "dtype": dtype,
                        "top_p": top_p or 1.0,
                        "keep_routing": int(routing),
                        "keep_sampling_mask": int(mask),
                        "part": part,
                        "tokens": len(chosen),
                        "flip_share": found.flip_share,
                        **tails(chosen),
                    }
                )
    return rows


def tails(log_ratio: Tensor) -> dict[str, float]:
    """Mean of |log ratio|, mean ratio, and how large |log ratio| is at the last 1 % and 0.1 % of tokens and at most."""
    size = log_ratio.abs()
    return {
        "size_mean": size.mean().item(),
        "ratio_mean": log_ratio.exp().mean().item(),
        "size_99": size.quantile(0.99).item(),
        "size_999": size.quantile(0.999).item(),
        "size_max": size.max().item(),
    }
