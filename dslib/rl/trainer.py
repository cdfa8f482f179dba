"""Reinforcement learning with verifiable rewards, in one process: sample, reward, compare, step."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dslib.models.moe import MoE
from dslib.rl.advantages import gae, token_rewards, whiten
from dslib.rl.config import RLConfig
from dslib.rl.objectives import PolicyBatch, PolicyLoss, loss_normalizer, merged_metrics, policy_loss
from dslib.rl.rewards import overlong_penalty
from dslib.rl.rollout import Rollout, completion_states, score, token_entropy
from dslib.rl.samples import Samples, collect
from dslib.rl.selective import chunked_policy_loss, selective_log_softmax
from dslib.runs.training_state import (
    load_checkpoint,
    load_optimizers,
    optimizer_parts,
    save_checkpoint,
    with_prefix,
)
from dslib.tasks.verifiable import Task


class Trainer:
    """Trains ``model`` in place on ``task``, :class:`dslib.tasks.verifiable.Task`.

    ``reference``: the policy that a KL term holds on to; without one, a copy of ``model`` as it is now.
    ``optimizers(model)`` makes the policy's in the place of AdamW. ``table`` has a row a step, ``last`` is what
    the last step trained on. Raises ValueError for a vocabulary of the model that is smaller than the task's or
    differs from the reference's, and for a zone of DAPO's penalty that is longer than the task's answers.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        config: RLConfig,
        reference: nn.Module | None = None,
        optimizers: Callable[[nn.Module], Sequence[torch.optim.Optimizer]] | None = None,
    ) -> None:
        self.model, self.task, self.config, self.recipe = model, task, config, config.recipe
        self.loss = self.recipe.loss
        if self.loss.aggregation == "constant" and self.loss.max_length is None:
            self.loss = replace(self.loss, max_length=task.max_new_tokens)
        vocabulary, width = model.lm_head.out_features, model.lm_head.in_features
        if vocabulary < task.vocab_size:
            raise ValueError(
                f"the model's vocabulary of {vocabulary} lacks tokens of the task's {task.vocab_size}"
            )
        if self.recipe.overlong and not 1 <= config.overlong <= task.max_new_tokens:
            raise ValueError(
                f"overlong={config.overlong} must lie between 1 and the task's max_new_tokens={task.max_new_tokens}"
            )
        self.reference = None
        if self.loss.kl:
            self.reference = copy.deepcopy(model) if reference is None else reference
            self.reference.requires_grad_(False).eval()
            if self.reference.lm_head.out_features != vocabulary:
                raise ValueError(
                    f"the reference's vocabulary of {self.reference.lm_head.out_features} tokens differs from the "
                    f"policy's {vocabulary}"
                )
        if optimizers is None:
            adamw = {"lr": config.lr, "weight_decay": config.weight_decay}
            self.optimizers: list[torch.optim.Optimizer] = [
                torch.optim.AdamW(model.parameters(), **adamw, fused=True)
            ]
        else:
            self.optimizers = list(optimizers(model))
        self.critic = None
        if self.recipe.critic:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)
                self.critic = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
            nn.init.zeros_(self.critic[2].weight)
            nn.init.zeros_(self.critic[2].bias)
            self.critic.to(model.lm_head.weight)
            self.optimizers.append(
                torch.optim.AdamW(self.critic.parameters(), config.critic_lr, weight_decay=0)
            )
        self.skips = config.skip_settled and not (
            self.critic is not None or self.loss.kl or self.loss.entropy_coef or self._mixtures()
        )
        self.generator = torch.Generator().manual_seed(config.seed)
        self.table: list[dict[str, float]] = []
        self.last: Samples | None = None
        self.interrupted = False

    def run(
        self,
        steps: int,
        checkpoint: str | Path | None = None,
        every: int = 10,
        observe: Callable[[Trainer], object] | None = None,
    ) -> list[dict[str, float]]:
        """Train until ``steps`` steps are done in all, and return the table. ``checkpoint``: saved there after
        each ``every`` steps and at the end, and, where the file is there, gone on from, by a new trainer and by one
        whose last step was interrupted. ``observe(trainer)`` is called after each step."""
        stale = not self.table or self.interrupted
        if checkpoint is not None and stale and Path(checkpoint).is_file():
            self.resume(checkpoint)
        while len(self.table) < steps:
            self.step()
            if checkpoint is not None and (len(self.table) % every == 0 or len(self.table) == steps):
                self.save(checkpoint)
            if observe is not None:
                observe(self)
        return self.table

    def step(self) -> dict[str, float]:
        """Sample, and update on the samples; returns the new row of the table.

        Where dynamic sampling found no group to learn from, nothing is updated. Who interrupts a step and goes on
        without :meth:`resume` trains on, but no longer the run of its seed.
        """
        self.interrupted = True
        samples = self.last = self.collect()
        rollout = samples.rollout
        row = {
            "step": len(self.table) + 1,
            "reward": samples.reward,
            "length": rollout.lengths.double().mean().item(),
            "entropy": (rollout.entropy.double().sum() / rollout.mask.sum().clamp_min(1)).item(),
            "groups": len(samples.indices),
            "samples": samples.drawn + (self.table[-1]["samples"] if self.table else 0),
        }
        if len(samples.indices):
            batch = self.prepare(samples)
            updates = [
                self.update(rollout, batch, rows)
                for _ in range(self.config.epochs)
                for rows in self._minibatches(len(rollout))
            ]
            row |= {key: sum(u[key] for u in updates) / len(updates) for key in updates[0]}
        self.table.append(row)
        self.interrupted = False
        return row

    def sampler(self) -> nn.Module:
        """What samples: the policy, or with ``sampler_dtype`` a copy of it as it is now in that precision."""
        if self.config.sampler_dtype is None:
            return self.model
        copied = copy.deepcopy(self.model).requires_grad_(False)
        return copied.to(getattr(torch, self.config.sampler_dtype)).eval()

    def collect(self) -> Samples:
        """What the next step learns from: :func:`dslib.rl.samples.collect`."""
        return collect(self.sampler(), self.task, self.config, self.generator)

    @torch.no_grad()
    def prepare(self, samples: Samples) -> PolicyBatch:
        """What the loss takes as given, all but ``logp``: advantages, the sampler's and the reference's
        log-probabilities, returns. A sample whose reward is NaN is masked out."""
        rollout, rewards = samples.rollout, samples.rewards
        if self.recipe.overlong:
            penalty = overlong_penalty(rollout.lengths.cpu(), self.task.max_new_tokens, self.config.overlong)
            rewards = rewards + penalty.view_as(rewards)
        device, mask = rollout.tokens.device, rollout.mask
        mask = mask & ~rewards.isnan().view(-1, 1).to(device)
        logp_ref = returns = values = None
        if self.reference is not None:
            logp_ref = score(self.reference, rollout, self.config.temperature, rollout.kept)
        if self.critic is None:
            advantages = self.recipe.advantages(rewards, samples.baseline)
            advantages = advantages.flatten().to(device)
        else:
            values = self.critic(completion_states(self.model, rollout, rollout.routes)).squeeze(-1)
            earned = token_rewards(rewards.flatten().to(device), mask)
            advantages, returns = gae(earned, values, mask, self.config.gamma, self.config.lam)
            advantages = whiten(advantages, mask)
        return PolicyBatch(None, rollout.logp, advantages, mask, logp_ref, returns=returns, values_old=values)

    def update(self, rollout: Rollout, batch: PolicyBatch, rows: Tensor) -> dict[str, float]:
        """One step of the optimizers on the sequences ``rows``; the micro-batches' gradients add up to theirs."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.model.train()
        rows = rows.to(rollout.tokens.device)
        normalizer, parts = loss_normalizer(batch.mask[rows], self.loss), []
        if self.skips:
            informative = batch.advantages[rows] != 0
            rows = rows[informative] if informative.any() else rows[:1]
        if self.config.micro_batch is not None:  # by length: short ones then need no padding to the longest
            rows = rows[rollout.lengths[rows].argsort(stable=True)]
        for some in rows.split(self.config.micro_batch or len(rows)):
            parts.append(self.loss_of(rollout.rows(some, trim=True), batch.rows(some), normalizer))
            parts[-1].loss.backward()
        norm = nn.utils.clip_grad_norm_(
            self.model.parameters(), self.config.max_grad_norm, error_if_nonfinite=True
        )
        for optimizer in self.optimizers:
            optimizer.step()
        for layer in self._mixtures():
            layer.update_bias()
        return merged_metrics(parts) | {"loss": sum(p.loss.item() for p in parts), "grad_norm": norm.item()}

    def loss_of(self, rollout: Rollout, batch: PolicyBatch, normalizer: float) -> PolicyLoss:
        """One pass of the policy over a rollout, and the loss of its tokens, with its graph."""
        states = completion_states(self.model, rollout, rollout.routes)
        # The critic learns from the policy's states and does not change them.
        values = None if self.critic is None else self.critic(states.detach()).squeeze(-1)
        batch = replace(narrowed(batch, states.shape[1]), values=values)
        kept, temperature = rollout.kept, self.config.temperature
        if self.config.chunk is not None and kept is None and not self.loss.entropy_coef:
            head = (states, self.model.lm_head.weight, rollout.completions)
            return chunked_policy_loss(*head, batch, self.loss, self.config.chunk, temperature, normalizer)
        logits = self.model.lm_head(states)
        logp = selective_log_softmax(logits, rollout.completions, temperature, kept)
        entropy = token_entropy(logits, temperature, kept) if self.loss.entropy_coef else None
        return policy_loss(replace(batch, logp=logp, entropy=entropy), self.loss, normalizer)

    def save(self, path: str | Path) -> None:
        """Write everything that the next steps depend on to one file, :mod:`dslib.runs.training_state`."""
        tensors, rest = optimizer_parts(self.optimizers)
        for name, module in self._modules().items():
            tensors |= {f"{name}.{key}": x for key, x in module.state_dict().items()}
        tensors["generator"] = self.generator.get_state()
        state = {"config": self._described(), "table": self.table, "optimizers": rest}
        save_checkpoint(path, tensors, state)

    def resume(self, path: str | Path) -> None:
        """Go on from a file of :meth:`save`: the next steps are those of the run that was not interrupted.

        A step that was interrupted begins anew. Raises ValueError, naming what differs, for a file of another
        configuration, and errors of :func:`dslib.runs.training_state.load_checkpoint`.
        """
        tensors, state = load_checkpoint(path)
        own = self._described()
        different = [key for key in own if own[key] != state["config"].get(key)]
        if different:
            listed = ", ".join(f"{key}={state['config'].get(key)!r} (now {own[key]!r})" for key in different)
            raise ValueError(f"{path} is of a run with {listed}")
        for name, module in self._modules().items():
            module.load_state_dict(with_prefix(tensors, name))
        load_optimizers(self.optimizers, tensors, state["optimizers"])
        for layer in self._mixtures():
            layer.load.zero_()
        self.generator.set_state(tensors["generator"])
        self.table, self.interrupted = state["table"], False

    def _described(self) -> dict:
        # Tuples become lists, as in the file; a function of one's own is known by its name.
        return json.loads(json.dumps(asdict(self.config), default=_name_of))

    def _modules(self) -> dict[str, nn.Module]:
        named = {"model": self.model, "critic": self.critic, "reference": self.reference}
        return {name: module for name, module in named.items() if module is not None}

    def _mixtures(self) -> list[MoE]:
        return [module for module in self.model.modules() if isinstance(module, MoE)]

    def _minibatches(self, sequences: int) -> Sequence[Tensor]:
        if self.config.minibatches == 1:
            return [torch.arange(sequences)]
        order = torch.randperm(sequences, generator=self.generator)
        return [rows for rows in order.tensor_split(self.config.minibatches) if len(rows)]


def narrowed(batch: PolicyBatch, width: int) -> PolicyBatch:
    """A batch cut to its first ``width`` tokens; the others are padding."""
    if batch.mask.shape[1] == width:
        return batch
    cut = {name: x if x is None or x.ndim == 1 else x[:, :width] for name, x in vars(batch).items()}
    return PolicyBatch(**cut)


def _name_of(function: Callable) -> str:
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"
