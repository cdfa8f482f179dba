"""The algorithms by name: how each makes advantages, which loss it minimises, and what else it asks of a trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dslib.rl.advantages import ADVANTAGE_KINDS, group_advantages
from dslib.rl.objectives import LossConfig

#: Advantages of a critic, by :func:`dslib.rl.gae`.
GAE = "gae"


@dataclass(frozen=True)
class Algorithm:
    """A recipe, named in :data:`ALGORITHMS` or one's own.

    ``advantage`` may be a function of one's own:

        def best_of_group(rewards):  # (prompts, group_size) → the same
            return (rewards == rewards.amax(1, keepdim=True)).float() - 1 / rewards.shape[1]

        Trainer(model, task, RLConfig(Algorithm(best_of_group, LossConfig())))

    It is given the rewards of a step, (prompts, group_size), NaN for a sample whose reward is unknown, and with
    ``greedy_baseline`` the rewards of the greedy answers, (prompts,), as a second argument; it returns a finite
    advantage for each, of the same shape. What it returns for a NaN is not looked at. To stand in the
    configuration of a cached experiment it must be a frozen dataclass with ``__call__``, whose fields are then
    part of the key.

    Raises ValueError for an advantage that is neither a known name nor a function, and for ``"gae"`` without a critic
    or a critic without ``"gae"``.
    """

    #: A kind of :func:`dslib.rl.group_advantages`, ``"gae"``, or a function.
    advantage: str | Callable[..., Tensor]
    #: What is minimised.
    loss: LossConfig
    #: Draw prompts until the batch holds only groups whose rewards differ (DAPO, arXiv:2503.14476, eq. 11).
    dynamic_sampling: bool = False
    #: Add :func:`dslib.rl.overlong_penalty` to the rewards.
    overlong: bool = False
    #: Train a critic beside the policy.
    critic: bool = False
    #: Sample one greedy answer a prompt; its reward is the baseline.
    greedy_baseline: bool = False
    #: The paper.
    source: str = ""

    def __post_init__(self) -> None:
        known = (GAE, *ADVANTAGE_KINDS)
        if not callable(self.advantage) and self.advantage not in known:
            raise ValueError(
                f"advantage={self.advantage!r} is unknown; use one of {', '.join(map(repr, known))}, or a function of "
                "the rewards, (prompts, group_size)"
            )
        if self.critic != (self.advantage == GAE):
            raise ValueError(
                f"advantage={self.advantage!r} with critic={self.critic}; 'gae' and a critic need each other"
            )

    def advantages(self, rewards: Tensor, baseline: Tensor | None = None) -> Tensor:
        """One advantage a sample, from the rewards of a step: (prompts, group_size) → the same shape; ``baseline``:
        (prompts,), where the algorithm has one. Not for ``"gae"``, whose advantages are of tokens.

        Raises ValueError where a function of one's own returns another shape or numbers that are not finite, and
        what :func:`dslib.rl.group_advantages` raises.
        """
        if not callable(self.advantage):
            return group_advantages(rewards, self.advantage, baseline)
        found = self.advantage(rewards) if baseline is None else self.advantage(rewards, baseline)
        name = getattr(self.advantage, "__name__", type(self.advantage).__name__)
        if not isinstance(found, Tensor) or found.shape != rewards.shape:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"advantage: {name} returned {shape} for rewards {tuple(rewards.shape)}; return one number each"
            )
        found = found.detach().to(rewards.dtype if rewards.is_floating_point() else torch.float32)
        found = torch.where(rewards.isnan(), 0, found)
        if not found.isfinite().all():
            prompt, sample = (~found.isfinite()).nonzero()[0].tolist()
            raise ValueError(
                f"advantage: {name} returned {found[prompt, sample].item()} for sample {sample} of prompt {prompt}, "
                f"whose group has the rewards {rewards[prompt].tolist()}; return finite numbers"
            )
        return found


#: The algorithms that notebooks compare, without KL, as in the comparison of arXiv:2504.13837: put it back with
#: ``RLConfig(name, loss={"kl": …})``. The loss of "dr_grpo" still needs ``max_length``, the longest answer, which
#: :class:`dslib.rl.Trainer` takes from its task.
ALGORITHMS: dict[str, Algorithm] = {
    "ppo": Algorithm(GAE, LossConfig(value_coef=0.5), critic=True, source="arXiv:1707.06347"),
    "grpo": Algorithm("grpo", LossConfig(aggregation="sequence"), source="arXiv:2402.03300"),
    "grpo_no_std": Algorithm(
        "grpo_no_std", LossConfig(aggregation="sequence", kl_unbiased=True), source="arXiv:2512.02556"
    ),
    "dr_grpo": Algorithm("grpo_no_std", LossConfig(aggregation="constant"), source="arXiv:2503.20783"),
    "rloo": Algorithm("rloo", LossConfig(), source="arXiv:2402.14740"),
    "reinforce++": Algorithm("reinforce++", LossConfig(), source="arXiv:2501.03262"),
    "remax": Algorithm("remax", LossConfig(), greedy_baseline=True, source="arXiv:2310.10505"),
    "dapo": Algorithm(
        "grpo", LossConfig(clip_high=0.28), dynamic_sampling=True, overlong=True, source="arXiv:2503.14476"
    ),
    "gspo": Algorithm(
        "grpo",
        LossConfig(clip_low=3e-4, clip_high=4e-4, ratio="sequence", aggregation="sequence"),
        source="arXiv:2507.18071",
    ),
}
