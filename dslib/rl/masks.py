"""What is left out of a policy loss: sequences that the policy has drifted from, groups that teach nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dslib.rl.kl import check_same_shape, unmasked


def off_policy_sequence_mask(
    logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor, delta: float
) -> Tensor:
    """Which sequences a policy loss keeps: (sequences,) bool (DeepSeek-V3.2, arXiv:2512.02556, §3.1).

        M_i = 0  where  Â_i < 0  and  1/|o_i| · Σ_t log(π_old / π) > δ,  else 1

    logp, logp_old: (sequences, tokens), of the current policy and of the one that sampled, as the sampler
    itself returned it; advantages: (sequences,) or (sequences, tokens), where a sequence's mean decides; mask:
    (sequences, tokens) bool, its own scored tokens, over which the mean is taken. Only sequences of negative
    advantage are ever left out: a bad sequence that the policy would hardly produce any more teaches nothing and
    its ratio is not bounded from above by clipping. Sequences without a token are kept.

    :func:`dslib.rl.policy_loss` multiplies the surrogate alone by it: the KL term stays, and so does the
    denominator. Raises ValueError for shapes that do not fit or a δ that is negative or not finite.
    """
    if not (math.isfinite(delta) and delta >= 0):
        raise ValueError(f"delta={delta} must be a finite number of at least 0")
    check_mask(mask)
    check_same_shape(mask=mask, logp=logp, logp_old=logp_old)
    advantages = per_token(advantages.detach(), mask)
    lengths = mask.sum(-1).clamp_min(1)
    divergence = unmasked(logp_old.detach() - logp.detach(), mask).sum(-1) / lengths
    return ~((unmasked(advantages, mask).sum(-1) < 0) & (divergence > delta))


def informative_groups(rewards: Tensor) -> Tensor:
    """Which prompts' rewards (prompts, group_size) are not all equal → (prompts,) bool; NaN are not looked at.

    The others have advantage 0 throughout. DAPO's dynamic sampling (arXiv:2503.14476, eq. 11) draws prompts
    until a batch is full of informative ones, and so draws several times as many samples: compare at equal
    samples, too. Raises ValueError for another shape.
    """
    if rewards.ndim != 2:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; give (prompts, group_size)")
    if rewards.shape[1] == 0:
        return torch.zeros(len(rewards), dtype=torch.bool, device=rewards.device)
    rewards = (
        rewards if rewards.is_floating_point() else rewards.double()
    )  # counts and booleans are rewards too
    missing = rewards.isnan()
    most = rewards.masked_fill(missing, -math.inf).amax(-1)
    return most > rewards.masked_fill(missing, math.inf).amin(-1)


def per_token(advantages: Tensor, mask: Tensor) -> Tensor:
    """Advantages (sequences,) or (sequences, tokens) → (sequences, tokens). Raises ValueError for another shape."""
    if advantages.shape == mask.shape:
        return advantages
    if advantages.shape == mask.shape[:1]:
        return advantages.unsqueeze(-1).expand(mask.shape)
    raise ValueError(
        f"advantages has shape {tuple(advantages.shape)}; with mask {tuple(mask.shape)} it must be that, or "
        f"({mask.shape[0]},)"
    )


def check_mask(mask: Tensor) -> None:
    """Raise ValueError unless ``mask`` is (sequences, tokens) bool."""
    if mask.dtype != torch.bool or mask.ndim != 2:
        raise ValueError(
            f"mask is {mask.dtype} of shape {tuple(mask.shape)}; give (sequences, tokens) bool, True for a token "
            "that is scored"
        )
