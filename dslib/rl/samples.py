"""What a step of training learns from: problems of a task, a group of completions of each, their rewards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dslib.rl.config import RLConfig
from dslib.rl.masks import informative_groups
from dslib.rl.rollout import Rollout, SamplingConfig, concatenated, sample
from dslib.tasks.verifiable import Task


@dataclass(frozen=True)
class Samples:
    """What one step trains on: ``indices`` (groups,) of problems, their ``rollout`` of groups·group_size rows, and
    ``rewards`` (groups, group_size) of the task. ``drawn`` counts all samples that it took to get them, greedy ones
    and those of dropped groups too, and ``reward`` is the mean over all but the greedy. ``baseline``: (groups,)."""

    indices: Tensor
    rollout: Rollout
    rewards: Tensor
    drawn: int
    reward: float
    baseline: Tensor | None = None


def sample_groups(
    model: nn.Module,
    task: Task,
    indices: Tensor,
    sampling: SamplingConfig,
    generator: torch.Generator | None = None,
    group_size: int = 1,
    record_routes: bool = False,
    record_kept: bool = False,
) -> tuple[Rollout, Tensor]:
    """``group_size`` completions of each problem of ``indices`` (n,), a problem's beside each other, and their rewards
    (n, group_size), of the task's dtype.

    Arguments as in :func:`dslib.rl.rollout.sample`; the task works on the CPU. Raises ValueError for a model whose
    vocabulary is smaller than the task's, and for another number of rewards than of completions.
    """
    head = model.lm_head
    if head.out_features < task.vocab_size:
        raise ValueError(
            f"the model's vocabulary of {head.out_features} lacks tokens of the task's {task.vocab_size}"
        )
    prompts = task.prompts(indices).to(head.weight.device)
    rollout = sample(model, prompts, sampling, generator, group_size, record_routes, record_kept)
    rewards = task.rewards(
        indices.repeat_interleave(group_size), rollout.completions.cpu(), rollout.mask.cpu()
    )
    if rewards.shape != (len(rollout),):
        raise ValueError(
            f"the task gave rewards of shape {tuple(rewards.shape)} for {len(rollout)} completions; it must be "
            f"({len(rollout)},), one each in their order"
        )
    return rollout, rewards.view(-1, group_size)


def collect(model: nn.Module, task: Task, config: RLConfig, generator: torch.Generator) -> Samples:
    """Draw problems, with replacement, and sample their groups, as a step of ``config`` asks.

    With dynamic sampling, until there are enough groups whose rewards differ (DAPO, arXiv:2503.14476, eq. 11), or
    ``config.rounds`` draws: then there are fewer, or none. Raises what :func:`sample_groups` raises, and ValueError
    for a problem all of whose rewards are NaN.
    """
    recipe, filtered = config.recipe, config.top_p is not None or config.top_k is not None
    sampling = SamplingConfig(task.max_new_tokens, config.temperature, config.top_p, config.top_k, task.end)
    record = {"record_routes": config.keep_routing, "record_kept": config.keep_sampling_mask and filtered}
    found, everything, drawn = [], [], 0
    for _ in range(config.rounds if recipe.dynamic_sampling else 1):
        indices = torch.randint(len(task), (config.prompts,), generator=generator)
        rollout, rewards = sample_groups(
            model, task, indices, sampling, generator, config.group_size, **record
        )
        if rewards.isnan().all(1).any():
            prompt = int(indices[rewards.isnan().all(1)][0])
            raise ValueError(
                f"all {config.group_size} rewards of problem {prompt} are NaN; leave such problems out"
            )
        everything.append(rewards)
        drawn += len(rollout)
        if recipe.dynamic_sampling:
            kept = informative_groups(rewards)
            rollout = rollout.rows(kept.repeat_interleave(config.group_size).to(rollout.tokens.device))
            indices, rewards = indices[kept], rewards[kept]
        found.append((indices, rollout, rewards))
        if sum(len(part[0]) for part in found) >= config.prompts:
            break
    indices, rewards = (torch.cat([part[i] for part in found])[: config.prompts] for i in (0, 2))
    rollout = concatenated([part[1] for part in found]).rows(slice(rewards.numel()))
    baseline = None
    if recipe.greedy_baseline:
        greedy = SamplingConfig(task.max_new_tokens, temperature=0, end=task.end)
        baseline = sample_groups(model, task, indices, greedy)[1].squeeze(1)
        drawn += len(indices)
    mean = torch.cat(everything).double().nanmean().item()
    return Samples(indices, rollout, rewards, drawn, mean, baseline)
