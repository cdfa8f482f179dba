"""Estimates of KL(π ‖ π_ref) from sampled tokens, and what their gradients are worth."""

from __future__ import annotations

import torch
from torch import Tensor

KL_KINDS = ("k1", "k2", "k3")

#: A log-ratio is kept within ± this before it is exponentiated: e²⁰ is 4.9e8, far from float32's end, so that
#: neither the value nor a product of two of them overflows. Past it the gradient is 0.
LOG_RATIO_LIMIT = 20.0


def kl_estimate(
    logp: Tensor,
    logp_ref: Tensor,
    kind: str = "k1",
    logp_old: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """KL(π ‖ π_ref), estimated at each sampled token (Schulman 2020, "Approximating KL divergence").

        d = log π_ref − log π:    k1 = −d,    k2 = d²/2,    k3 = eᵈ − d − 1

    logp, logp_ref and logp_old: log-probabilities of the same tokens, of one shape → that shape, in float32 or
    float64. For tokens drawn from π the means of k1 and k3 are the KL; k2's is close to it where the two are.

    With ``logp_old``, of the policy that drew the tokens, the estimate is multiplied by ρ = π/π_old **in the
    graph** (DeepSeek-V3.2, arXiv:2512.02556, §3.1). What one minimises with, on average over the tokens:

    | | on-policy, π_old = π | off-policy |
    |---|---|---|
    | ∇ k1 | 0 | wrong |
    | ∇ k2 | ∇KL(π ‖ π_ref) | wrong |
    | ∇ k3 | ∇KL(π_ref ‖ π) | wrong |
    | ∇ (ρ·k1), ∇ (ρ·k3), sg(ρ)·∇k2 | ∇KL(π ‖ π_ref) | ∇KL(π ‖ π_ref) |
    | ∇ (ρ·k2) | wrong | wrong |
    | sg(ρ)·∇k3 | ∇KL(π_ref ‖ π) | ∇KL(π_ref ‖ π) |

    ``mask``: bool, True where a token counts; elsewhere the result and its gradient are 0, whatever is there,
    NaN too. Log-ratios under an exponential are kept within ±:data:`LOG_RATIO_LIMIT` *before* it: bounding the
    result instead would leave 0·∞ = NaN to the backward pass.

    Raises ValueError for another kind or shapes that differ.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"kind={kind!r} is unknown; use one of {', '.join(map(repr, KL_KINDS))}")
    check_same_shape(logp=logp, logp_ref=logp_ref, logp_old=logp_old, mask=mask)
    logp = unmasked(logp, mask)
    difference = unmasked(logp_ref, mask) - logp
    if kind == "k1":
        estimate = -difference
    elif kind == "k2":
        estimate = difference.square() / 2
    else:
        bounded = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        estimate = torch.expm1(bounded) - bounded  # expm1 keeps the digits that exp(d) − 1 loses at small d
    if logp_old is not None:
        estimate = bounded_ratio(logp - unmasked(logp_old, mask)) * estimate
    return estimate


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio that is first kept within ±:data:`LOG_RATIO_LIMIT`; past it the gradient is 0."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def unmasked(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x`` in float32 at least, 0 where ``mask`` is False: what stands there reaches neither value nor gradient."""
    if x.dtype != torch.float64:
        x = x.float()
    return x if mask is None else torch.where(mask, x, 0)


def check_same_shape(**tensors: Tensor | None) -> None:
    """Raise ValueError, with names and shapes, unless all that are not None have the first one's shape."""
    (first, x), *rest = tensors.items()
    for name, other in rest:
        if other is not None and other.shape != x.shape:
            raise ValueError(
                f"{name} has shape {tuple(other.shape)} and {first} {tuple(x.shape)}; they must be the same"
            )
