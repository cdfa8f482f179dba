"""From rewards to advantages: what each algorithm subtracts, what it divides by, and over which samples."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from dslib.rl.kl import check_same_shape, unmasked
from dslib.rl.masks import check_mask

#: kind → over which samples its statistics are taken, unless ``scope`` says otherwise.
ADVANTAGE_KINDS = {
    "grpo": "group",
    "grpo_no_std": "group",
    "rloo": "group",
    "reinforce++": "batch",
    "remax": None,
}
SCOPES = ("group", "batch")


def group_advantages(
    rewards: Tensor,
    kind: str = "grpo",
    baseline: Tensor | None = None,
    *,
    scope: str | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """One advantage a sample, from the rewards of all samples: (prompts, group_size) → the same shape.

    | kind | advantage | statistics of | source |
    |---|---|---|---|
    | ``"grpo"`` | (R − mean)/(std + eps) | the group | arXiv:2402.03300 |
    | ``"grpo_no_std"`` | R − mean | the group | arXiv:2503.20783; DeepSeek-V3.2, arXiv:2512.02556 |
    | ``"rloo"`` | R − mean of the others = n/(n − 1)·(R − mean) | the group | arXiv:2402.14740 |
    | ``"reinforce++"`` | (R − mean)/(std + eps) | the batch | arXiv:2501.03262 |
    | ``"remax"`` | R − ``baseline`` of the prompt | – | arXiv:2310.10505 |

    ``baseline``: (prompts,), the reward of the greedy answer, for ``"remax"`` and for it alone. ``scope``:
    ``"group"`` or ``"batch"`` in place of the one above: RLOO's paper leaves one out of the group, the
    description in arXiv:2504.13837 (appendix A.1) one out of the batch. ``ddof``: 1 divides the variance by
    n − 1, as ``torch.std`` does, 0 by n. Computed in float64; the result has the dtype of ``rewards``, float32
    for integers.

    Where all samples of a scope have one reward, and for a scope of a single sample, which has nothing to be
    compared with, the advantages are exactly 0. A NaN reward takes its sample out: its advantage is 0, the
    others' are what they would be without it, and a RuntimeWarning tells how many there were. (Take such a
    sample out of the loss's mask, too, where it should not count in denominators.)

    Raises ValueError for another shape, kind, scope or ddof, for a missing or superfluous baseline, for an
    infinite reward, and for a prompt all of whose rewards are NaN.
    """
    _check_rewards(rewards, kind, scope, ddof, eps)
    values = rewards.detach().double()
    present = ~values.isnan()
    if not present.all():
        _warn_of_missing(present)
    if kind == "remax":
        baseline = _checked_baseline(baseline, values)
        advantages = torch.where(present, values - baseline.unsqueeze(-1), 0.0)
    elif baseline is not None:
        raise ValueError(f"baseline was given with kind={kind!r}; only 'remax' takes one")
    else:
        over_batch = (scope or ADVANTAGE_KINDS[kind]) == "batch"
        shape = (1, -1) if over_batch else values.shape
        advantages = _relative(values.reshape(shape), present.reshape(shape), kind, ddof, eps)
        advantages = advantages.reshape(values.shape)
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def _relative(values: Tensor, present: Tensor, kind: str, ddof: int, eps: float) -> Tensor:
    """Advantages of each row (rows, n) float64 from its own entries that are present."""
    if values.numel() == 0:
        return values
    count = present.sum(-1, keepdim=True)
    lowest = values.masked_fill(~present, math.inf).amin(-1, keepdim=True)
    # From the lowest on: equal rewards are then exactly 0 from it, whatever the mean would round to.
    above = torch.where(present, values - lowest, 0.0)
    centred = torch.where(present, above - above.sum(-1, keepdim=True) / count.clamp_min(1), 0.0)
    if kind == "grpo_no_std":
        return centred
    if kind == "rloo":
        return centred * count / (count - 1).clamp_min(1)
    variance = centred.square().sum(-1, keepdim=True) / (count - ddof).clamp_min(1)
    return torch.where(variance > 0, centred / (variance.sqrt() + eps), 0.0)


def token_rewards(
    rewards: Tensor, mask: Tensor, kl: Tensor | None = None, coefficient: float = 0.0
) -> Tensor:
    """Rewards of sequences as rewards of tokens: all at a sequence's last scored token, minus coefficient·KL at
    each scored one, as PPO for language models has it (arXiv:2203.02155, eq. 2).

    rewards: (sequences,); mask: (sequences, tokens) bool; kl: (sequences, tokens), of
    :func:`dslib.rl.kl_estimate`, a constant → (sequences, tokens) float32, or float64 for float64 rewards. In
    GRPO a KL in the reward would disturb the comparison inside a group; there it is a term of the loss. Raises
    ValueError for shapes that do not fit, or a coefficient without kl.
    """
    check_mask(mask)
    if rewards.shape != mask.shape[:1]:
        raise ValueError(
            f"rewards has shape {tuple(rewards.shape)}; with this mask it must be ({len(mask)},)"
        )
    if kl is None and coefficient:
        raise ValueError(f"coefficient={coefficient} needs kl, (sequences, tokens)")
    rewards = unmasked(rewards.detach(), None)
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    spread = torch.where(last, rewards.unsqueeze(-1), 0)
    if kl is not None:
        check_same_shape(mask=mask, kl=kl)
        spread = spread - coefficient * unmasked(kl.detach(), mask)
    return spread


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16) → (advantages, returns), (sequences, tokens).

        δ_t = r_t + γ·V_{t+1} − V_t,    Â_t = Σ_l (γλ)^l·δ_{t+l},    returns = Â + V

    rewards, values: (sequences, tokens), V_t the critic's estimate before token t is chosen; mask: bool, True
    for scored tokens; the next token is the next scored one, so that what a tool wrote in between is stepped
    over, and after the last one the value is 0. 0 where the mask is False, whatever stands there. For γ = λ = 1
    and a reward at the end, Â_t = R − V_t. float32, or float64 for float64 input.

    Raises ValueError for shapes that do not fit, or γ or λ outside [0, 1].
    """
    check_mask(mask)
    check_same_shape(mask=mask, rewards=rewards, values=values)
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value} must lie in [0, 1]")
    rewards, values = unmasked(rewards, mask), unmasked(values, mask)
    advantages = torch.zeros_like(values)
    ahead, next_value = values.new_zeros(len(values)), values.new_zeros(len(values))
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        here = mask[:, t]
        ahead = torch.where(here, delta + gamma * lam * ahead, ahead)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, ahead, 0)
    return advantages, advantages + values


def whiten(x: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """``x`` (sequences, tokens) with mean 0 and variance 1 over the scored tokens of the whole batch, 0 elsewhere:
    what PPO's implementations do with advantages. float32 at least; a single token, or equal ones, become 0.

    Raises ValueError for shapes that do not fit.
    """
    check_mask(mask)
    check_same_shape(mask=mask, x=x)
    clean = unmasked(x.detach(), mask)
    row = clean.double().reshape(1, -1)
    return _relative(row, mask.reshape(1, -1), "grpo", 1, eps).reshape(x.shape).to(clean.dtype)


def _checked_baseline(baseline: Tensor | None, values: Tensor) -> Tensor:
    if baseline is None:
        raise ValueError("baseline is None; kind='remax' needs the reward of each prompt's greedy answer")
    if baseline.shape != values.shape[:1]:
        raise ValueError(f"baseline has shape {tuple(baseline.shape)}; it must be ({values.shape[0]},)")
    if not baseline.isfinite().all():
        prompt = int((~baseline.isfinite()).nonzero()[0])
        raise ValueError(f"baseline is {baseline[prompt].item()} for prompt {prompt}; it must be finite")
    return baseline.detach().double()


def _warn_of_missing(present: Tensor) -> None:
    lost = ~present.any(-1)
    if present.shape[1] and lost.any():
        prompt = int(lost.nonzero()[0])
        raise ValueError(
            f"rewards: all {present.shape[1]} rewards of prompt {prompt} are NaN, and of {int(lost.sum())} prompts "
            "in all; leave such prompts out"
        )
    missing = int((~present).sum())
    warnings.warn(
        f"{missing} of {present.numel()} rewards are NaN; those samples have advantage 0",
        RuntimeWarning,
        stacklevel=3,
    )


def _check_rewards(rewards: Tensor, kind: str, scope: str | None, ddof: int, eps: float) -> None:
    if rewards.ndim != 2:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; give (prompts, group_size)")
    if kind not in ADVANTAGE_KINDS:
        raise ValueError(f"kind={kind!r} is unknown; use one of {', '.join(map(repr, ADVANTAGE_KINDS))}")
    if scope is not None and (scope not in SCOPES or kind == "remax"):
        raise ValueError(
            f"scope={scope!r} with kind={kind!r}; use None, or 'group' or 'batch' but for 'remax'"
        )
    if ddof not in (0, 1):
        raise ValueError(f"ddof={ddof} must be 0 or 1")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps={eps} must be a finite number of at least 0")
    if rewards.is_floating_point() and rewards.isinf().any():
        prompt, sample = rewards.isinf().nonzero()[0].tolist()
        raise ValueError(
            f"rewards is {rewards[prompt, sample].item()} for sample {sample} of prompt {prompt}; it must be finite"
        )
