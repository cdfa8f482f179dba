"""The configuration of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from dslib.rl.advantages import ADVANTAGE_KINDS
from dslib.rl.algorithms import ALGORITHMS, Algorithm
from dslib.rl.objectives import LossConfig

#: Precisions a sampler may have; None: the policy samples itself.
SAMPLER_DTYPES = (None, "bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class RLConfig:
    """One run of reinforcement learning: what is sampled, how it is compared, and how the policy steps.

    Raises ValueError, with name and value, for an unknown algorithm, precision or part of the loss, for counts below
    1, for groups of one where answers are compared within their group, for a whole :class:`LossConfig` in the place
    of changes, and for sampling at temperature 0.
    """

    #: A name of :data:`dslib.rl.ALGORITHMS`, or an :class:`Algorithm` of one's own.
    algorithm: str | Algorithm = "grpo"
    #: Changes of the algorithm's loss by field of :class:`LossConfig`, ``{"kl": 0.05}`` say; the other fields stay
    #: the algorithm's. Kept as sorted pairs, so that configurations can be compared and hashed.
    loss: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    #: Problems drawn in a step, with replacement.
    prompts: int = 32
    #: Completions sampled of each.
    group_size: int = 16
    #: Passes over the samples of a step.
    epochs: int = 1
    #: Updates in a pass, each on a part of the samples.
    minibatches: int = 1
    #: Sequences that go through the model at a time (None: all of a minibatch); changes memory and nothing else.
    micro_batch: int | None = None
    #: Tokens whose logits are held at a time (None: all); not with kept sets or an entropy bonus.
    chunk: int | None = None
    #: Leave sequences of advantage 0 out of the passes where they add nothing to the gradient: without KL term,
    #: entropy bonus, critic and mixtures of experts. Metrics of an update are then means over the others.
    skip_settled: bool = True
    #: AdamW's learning rate.
    lr: float = 2e-4
    #: AdamW's weight decay.
    weight_decay: float = 0.0
    #: Gradients longer than this are shortened to it.
    max_grad_norm: float = 1.0
    #: The sampler's, and that of all log-probabilities.
    temperature: float = 1.0
    #: The sampler's nucleus (None: all tokens).
    top_p: float | None = None
    #: The sampler's number of likeliest tokens (None: all).
    top_k: int | None = None
    #: Replay in training the sets of tokens that top-p or top-k left to the sampler.
    keep_sampling_mask: bool = True
    #: Replay in training the experts of a mixture that the sampler visited.
    keep_routing: bool = True
    #: Sample with a copy of the policy in this precision, made anew before each step, as engines for inference do;
    #: ``logp_old`` is then that sampler's, and ratios differ from 1 before anything is updated.
    sampler_dtype: str | None = None
    #: Draws after which dynamic sampling gives up and takes what it has.
    rounds: int = 10
    #: Length of the zone before ``max_new_tokens`` in which DAPO's penalty grows, in tokens.
    overlong: int = 4
    #: PPO's discount.
    gamma: float = 1.0
    #: λ of PPO's advantage estimation.
    lam: float = 1.0
    #: Learning rate of PPO's critic.
    critic_lr: float = 1e-3
    #: Determines problems, samples, the order of updates and the critic.
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.algorithm, str) and self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm={self.algorithm!r} is unknown; use one of {', '.join(ALGORITHMS)}")
        object.__setattr__(self, "loss", _changes(self.loss))
        _ = self.recipe  # refuses bad values of the loss
        for name in ("prompts", "group_size", "epochs", "minibatches", "rounds", "micro_batch", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.minibatches > self.prompts * self.group_size:
            raise ValueError(
                f"minibatches={self.minibatches} of {self.prompts * self.group_size} samples are empty"
            )
        if self.group_size == 1 and self._within_group:
            raise ValueError(
                f"group_size=1 leaves {self.recipe.advantage!r} nothing to compare an answer with, and every "
                "advantage is 0; give at least 2, or an algorithm with a critic or a greedy baseline"
            )
        if self.sampler_dtype not in SAMPLER_DTYPES:
            raise ValueError(
                f"sampler_dtype={self.sampler_dtype!r} is none of {', '.join(map(repr, SAMPLER_DTYPES))}"
            )
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be above 0: greedy samples teach nothing")

    @property
    def recipe(self) -> Algorithm:
        """The algorithm, its loss changed as ``loss`` says."""
        named = ALGORITHMS[self.algorithm] if isinstance(self.algorithm, str) else self.algorithm
        return replace(named, loss=replace(named.loss, **dict(self.loss))) if self.loss else named

    @property
    def _within_group(self) -> bool:
        named = self.recipe.advantage
        return isinstance(named, str) and ADVANTAGE_KINDS.get(named) == "group"


def _changes(loss: Mapping[str, Any] | tuple[tuple[str, Any], ...] | None) -> tuple[tuple[str, Any], ...]:
    """The changes as sorted pairs of name and value."""
    if isinstance(loss, LossConfig):
        raise ValueError(
            "loss is a whole LossConfig, which would replace the algorithm's clipping, ratio and aggregation; give the "
            'changes alone, loss={"kl": 0.05}, or as algorithm one with a loss of its own, Algorithm("grpo", loss)'
        )
    changes = dict(loss or ())
    known = [field.name for field in fields(LossConfig)]
    for name in changes:
        if name not in known:
            raise ValueError(f"loss changes {name!r}, which is unknown; use some of {', '.join(known)}")
    return tuple(sorted(changes.items()))
