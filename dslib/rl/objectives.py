"""The policy loss: one pure function, in which every algorithm is a configuration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dslib.rl.kl import KL_KINDS, bounded_ratio, check_same_shape, kl_estimate, unmasked
from dslib.rl.masks import check_mask, off_policy_sequence_mask, per_token

RATIOS = ("token", "sequence")
AGGREGATIONS = ("token", "sequence", "constant")
#: Metrics that are means over sequences; all others are means over scored tokens, or, with "max", maxima.
SEQUENCE_METRICS = ("kept_share",)


@dataclass(frozen=True, eq=False)
class PolicyBatch:
    """What a policy loss is computed from; every tensor is of sampled sequences, prompts left out.

    logp: (sequences, tokens), log-probabilities of the sampled tokens under the policy that is trained, with
    their graph (None only for :func:`dslib.rl.chunked_policy_loss`, which computes them); logp_old: the same
    under the policy that sampled, as the sampler returned them; advantages: (sequences,) or (sequences, tokens);
    mask: (sequences, tokens) bool, True for a generated token that is scored, the end token included and
    nothing after it; logp_ref: under the reference model, for a KL term. For a critic: ``values``, with their
    graph, ``returns`` and ``values_old``; for an entropy bonus ``entropy`` of each token's distribution, with
    its graph; all (sequences, tokens). All log-probabilities are of logits divided by the same temperature.

    Where the mask is False a tensor may hold anything, NaN too. Raises ValueError for shapes that do not fit.
    """

    logp: Tensor | None
    logp_old: Tensor
    advantages: Tensor
    mask: Tensor
    logp_ref: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    values_old: Tensor | None = None
    entropy: Tensor | None = None

    def __post_init__(self) -> None:
        check_mask(self.mask)
        per_token(self.advantages, self.mask)
        names = ("logp", "logp_old", "logp_ref", "values", "returns", "values_old", "entropy")
        check_same_shape(mask=self.mask, **{name: getattr(self, name) for name in names})

    def __len__(self) -> int:
        return self.mask.shape[0]

    def rows(self, index: slice | Tensor) -> PolicyBatch:
        """The sequences that ``index`` selects, as a batch."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return PolicyBatch(**{name: None if x is None else x[index] for name, x in fields.items()})

    def split(self, size: int) -> Iterator[PolicyBatch]:
        """Micro-batches of up to ``size`` sequences. Their losses add up to the whole's where each is given the
        whole's :func:`loss_normalizer`. Raises ValueError for a size below 1."""
        if size < 1:
            raise ValueError(f"size={size} must be at least 1")
        return (self.rows(slice(start, start + size)) for start in range(0, len(self), size))


@dataclass(frozen=True)
class LossConfig:
    """A policy loss. The defaults are PPO's clipping (arXiv:1707.06347) over all tokens alike, without KL.

    Raises ValueError, with name and value, for anything that is not described here.
    """

    #: The ratio is clipped from below to 1 − clip_low; inf does not clip.
    clip_low: float = 0.2
    #: The ratio is clipped from above to 1 + clip_high; inf does not clip.
    clip_high: float = 0.2
    #: Of each ``"token"``, or of the ``"sequence"``, the geometric mean of its tokens' (GSPO, arXiv:2507.18071).
    ratio: str = "token"
    #: ``"token"``: the mean over all scored tokens (DAPO, arXiv:2503.14476); ``"sequence"``: the mean over sequences of
    #: the mean over their tokens (GRPO, arXiv:2402.03300); ``"constant"``: the sum over tokens divided by
    #: sequences × ``max_length`` (Dr. GRPO, arXiv:2503.20783).
    aggregation: str = "token"
    #: The longest answer allowed, in tokens; ``"constant"`` needs it.
    max_length: int | None = None
    #: Coefficient β of the KL to the reference, :func:`dslib.rl.kl_estimate`; 0 is without.
    kl: float = 0.0
    #: Which estimate: ``"k1"``, ``"k2"`` or ``"k3"``.
    kl_kind: str = "k3"
    #: Weigh the estimate by the ratio of the token, in the graph, also where the surrogate takes the sequence's
    #: (DeepSeek-V3.2, arXiv:2512.02556).
    kl_unbiased: bool = False
    #: δ of :func:`dslib.rl.off_policy_sequence_mask`; None leaves no sequence out.
    off_policy_delta: float | None = None
    #: Coefficient of the critic's squared error.
    value_coef: float = 0.0
    #: The critic's value is clipped to this around the old one (None: not).
    value_clip: float | None = 0.2
    #: Coefficient of the entropy bonus.
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        for name, known in (("ratio", RATIOS), ("aggregation", AGGREGATIONS), ("kl_kind", KL_KINDS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(map(repr, known))}"
                )
        for name in ("clip_low", "clip_high"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0; inf does not clip")
        for name in ("kl", "value_coef", "entropy_coef", "off_policy_delta", "value_clip"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value} must be a finite number of at least 0")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length={self.max_length} must be at least 1")

    @property
    def by_token(self) -> bool:
        """Whether a token's loss depends on no other token: no ratio of sequences, no mask of sequences."""
        return self.ratio == "token" and self.off_policy_delta is None


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """A loss with its graph, a scalar tensor to minimise; metrics, as plain numbers; and what was scored.

    metrics: ``surrogate``, the part of the loss that is not KL, critic or entropy; ``ratio_mean`` and
    ``ratio_max``; ``clip_share``, of tokens whose gradient clipping removed, and the two sides of it,
    ``clip_share_low`` and ``clip_share_high``; ``old_kl``, the mean of log(π_old/π); ``kept_share``, of sequences
    that the off-policy mask kept; and where they were computed ``kl``, ``value_loss``, ``entropy``. Means over
    scored tokens, ``kept_share`` over sequences, but ``surrogate``, which is aggregated as the loss is.
    """

    loss: Tensor
    metrics: dict[str, float]
    tokens: int
    sequences: int


def policy_loss(batch: PolicyBatch, config: LossConfig, normalizer: float | None = None) -> PolicyLoss:
    """The loss of a batch of sampled sequences: its gradient is that of −J, to be minimised.

        J = Σ_{i,t} w_{i,t} · [ min(r·Â, clip(r, 1 − ε_low, 1 + ε_high)·Â)·M_i − β·KL ]
        r = π/π_old of the token; or of its sequence, exp(1/|o_i| Σ_t log π/π_old)    (GSPO, §4.1)

    w is 1/Σ|o_i|, 1/(n·|o_i|) or 1/(n·max_length), n the number of sequences with a scored token: the
    ``aggregation`` of :class:`LossConfig`. Sequences that the off-policy mask M leaves out still count in n and
    in Σ|o_i|, and their KL is kept (DeepSeek-V3.2, arXiv:2512.02556, §3.1).

    ``normalizer``: for a micro-batch, :func:`loss_normalizer` of the whole batch's mask; the losses and the
    gradients of the parts then add up to the whole's. Everything is computed in float32, or float64 for
    float64 input; logp_old, logp_ref, advantages, returns and values_old are constants. A batch in which
    nothing is scored has loss 0, with a graph.

    Raises ValueError for what a configuration needs and the batch lacks, for NaN or infinite numbers at
    scored tokens, with the first one's place, and for a normalizer smaller than the batch's own.
    """
    _check_batch(batch, config)
    mask = batch.mask
    logp, logp_old = unmasked(batch.logp, mask), unmasked(batch.logp_old.detach(), mask)
    advantages = unmasked(per_token(batch.advantages.detach(), mask), mask)
    logp_ref = None if batch.logp_ref is None else unmasked(batch.logp_ref.detach(), mask)
    weights = token_weights(mask, config, normalizer).to(logp.dtype)

    log_ratio = logp - logp_old
    if config.ratio == "sequence":
        # The value is the sequence's, the gradient each token's own (GSPO-token, §4.3): with one advantage a sequence
        # it is GSPO's exactly, and it does not need the sequence to lie in one piece.
        mean = log_ratio.detach().sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp_min(1)
        log_ratio = mean + (logp - logp.detach())
    surrogate, ratio = clipped_surrogate(log_ratio, advantages, config)
    kept = mask.any(-1)
    if config.off_policy_delta is not None:
        kept = kept & off_policy_sequence_mask(logp, logp_old, advantages, mask, config.off_policy_delta)
        surrogate = surrogate * kept.unsqueeze(-1)
    losses = -surrogate

    means = {}
    if logp_ref is not None:
        means["kl"] = token_kl(logp, logp_ref, logp_old, config)
        if config.kl:
            losses = losses + config.kl * means["kl"]
    if batch.values is not None and batch.returns is not None:
        means["value_loss"] = _value_losses(batch, config)
        losses = losses + config.value_coef * means["value_loss"]
    if batch.entropy is not None:
        means["entropy"] = unmasked(batch.entropy, mask)
        losses = losses - config.entropy_coef * means["entropy"]

    loss = (weights * losses).sum()
    with torch.no_grad():
        surrogate_loss = -(weights * surrogate).sum()
        tokens, sequences = mask.sum(), mask.any(-1).sum()
        scored, counted = tokens.clamp_min(1), sequences.clamp_min(1)
        low = mask & (ratio < 1 - config.clip_low) & (advantages < 0)
        high = mask & (ratio > 1 + config.clip_high) & (advantages > 0)
        means |= {"ratio_mean": ratio * mask, "old_kl": logp_old - logp}
        means |= {"clip_share": low | high, "clip_share_low": low, "clip_share_high": high}
        found = {name: x.detach().double().sum() / scored for name, x in means.items()}
        found["surrogate"] = surrogate_loss
        found["kept_share"] = (kept & mask.any(-1)).double().sum() / counted
        found["ratio_max"] = (ratio * mask).max() if mask.numel() else surrogate_loss
        numbers = torch.stack([x.double() for x in (*found.values(), tokens, sequences)]).tolist()
    *values, tokens, sequences = numbers
    return PolicyLoss(loss, dict(zip(found, values, strict=True)), int(tokens), int(sequences))


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """min(r·Â, clip(r)·Â), which is to be maximised (PPO, arXiv:1707.06347, eq. 7), and r without its graph; of
    the arguments' shape."""
    ratio = bounded_ratio(log_ratio)
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return torch.minimum(ratio * advantages, clipped * advantages), ratio.detach()


def token_kl(logp: Tensor, logp_ref: Tensor, logp_old: Tensor, config: LossConfig) -> Tensor:
    """The KL term of each token under ``config``, coefficient left out."""
    return kl_estimate(logp, logp_ref, config.kl_kind, logp_old if config.kl_unbiased else None)


def loss_normalizer(mask: Tensor, config: LossConfig) -> float:
    """What a batch's loss is divided by: Σ|o_i|, n or n·max_length, as ``config.aggregation`` is ``"token"``,
    ``"sequence"`` or ``"constant"``; n counts the sequences with a scored token.

    mask: (sequences, tokens) bool, of the *whole* batch. Raises ValueError for ``"constant"`` without max_length.
    """
    check_mask(mask)
    if config.aggregation == "token":
        return float(mask.sum())
    sequences = float(mask.any(-1).sum())
    if config.aggregation == "sequence":
        return sequences
    if config.max_length is None:
        raise ValueError(
            "max_length=None; aggregation='constant' divides by it: give the longest answer allowed"
        )
    return sequences * config.max_length


def merged_metrics(parts: Sequence[PolicyLoss]) -> dict[str, float]:
    """The metrics of a whole batch from its micro-batches': means weighted by what each scored, maxima, and the
    sum of ``surrogate``, which the normalizer has weighted. Raises ValueError for no parts."""
    if not parts:
        raise ValueError("parts is empty; give the PolicyLoss of at least one micro-batch")
    merged = {}
    for name in parts[0].metrics:
        values = [part.metrics[name] for part in parts]
        if name.endswith("_max"):
            merged[name] = max(values)
        elif name == "surrogate":
            merged[name] = math.fsum(values)
        else:
            counts = [part.sequences if name in SEQUENCE_METRICS else part.tokens for part in parts]
            total = math.fsum(count * value for count, value in zip(counts, values, strict=True))
            merged[name] = total / max(sum(counts), 1)
    return merged


def token_weights(mask: Tensor, config: LossConfig, normalizer: float | None = None) -> Tensor:
    """What each token's loss counts, (sequences, tokens) float64, 0 where nothing is scored; it does not depend
    on how long the padding is. Raises ValueError for a normalizer that is smaller than this mask's own."""
    own = loss_normalizer(mask, config)
    if normalizer is None:
        normalizer = own
    elif not normalizer >= own or not math.isfinite(normalizer):
        raise ValueError(
            f"normalizer={normalizer} is not a number from {own} on, which is this part's own; give "
            "loss_normalizer(mask, config) of the whole batch"
        )
    weights = mask.double()
    if config.aggregation == "sequence":
        weights = weights / mask.sum(-1, keepdim=True).clamp_min(1)
    return weights / (normalizer or 1.0)


def _value_losses(batch: PolicyBatch, config: LossConfig) -> Tensor:
    """½·max((V − R)², (clip(V, V_old ± ε) − R)²), as PPO's authors' code has it."""
    values, returns = unmasked(batch.values, batch.mask), unmasked(batch.returns.detach(), batch.mask)
    error = (values - returns).square()
    if config.value_clip is not None and batch.values_old is not None:
        old = unmasked(batch.values_old.detach(), batch.mask)
        near = old + (values - old).clamp(-config.value_clip, config.value_clip)
        error = torch.maximum(error, (near - returns).square())
    return error / 2


def _check_batch(batch: PolicyBatch, config: LossConfig) -> None:
    needs = {
        "logp": True,
        "logp_ref": config.kl > 0,
        "values": config.value_coef > 0,
        "returns": config.value_coef > 0,
        "entropy": config.entropy_coef > 0,
    }
    reasons = {
        "logp_ref": f"kl={config.kl}",
        "values": f"value_coef={config.value_coef}",
        "returns": f"value_coef={config.value_coef}",
        "entropy": f"entropy_coef={config.entropy_coef}",
    }
    for name, needed in needs.items():
        if needed and getattr(batch, name) is None:
            raise ValueError(f"{name} is None; {reasons.get(name, 'the loss')} needs it, (sequences, tokens)")
    for name in ("logp", "logp_old", "advantages", "logp_ref", "values", "returns", "entropy"):
        x = getattr(batch, name)
        if x is None:
            continue
        scored = batch.mask if x.ndim == 2 else batch.mask.any(-1)
        bad = scored & ~x.detach().isfinite()
        if bad.any():
            place = bad.nonzero()[0].tolist()
            where = f"sequence {place[0]}" + (f", token {place[1]}" if len(place) > 1 else "")
            value = x.detach()[tuple(place)].item()
            raise ValueError(
                f"{name} is {value} at {where}, the first of {int(bad.sum())} scored entries that are not finite"
            )
