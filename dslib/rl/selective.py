"""Log-probabilities of the sampled tokens alone, and a policy loss that never holds (tokens × vocabulary)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dslib import kernels
from dslib.rl.kl import unmasked
from dslib.rl.masks import per_token
from dslib.rl.objectives import (
    LossConfig,
    PolicyBatch,
    PolicyLoss,
    clipped_surrogate,
    policy_loss,
    token_kl,
    token_weights,
)


def selective_log_softmax(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, kept: Tensor | None = None
) -> Tensor:
    """log softmax(logits / T) at one token a position: logits (..., vocabulary), tokens (...) int64 → (...).

        log π(o) = z_o/T − log Σ_v exp(z_v/T)

    The result, which is differentiable, is float32 for shorter logits, else of their dtype. ``temperature`` is
    the sampler's; the old, the current and the reference policy all need the same one. ``kept``: bool, of the
    logits' shape, the tokens that top-p or top-k left to the sampler; the others get probability 0 (Keep
    Sampling Mask, DeepSeek-V3.2, arXiv:2512.02556, §3.1). On a GPU, or where ``dslib.kernels.use("triton")``
    says so, a Triton kernel computes the same.

    Raises ValueError for shapes that do not fit, a temperature that is not positive, and, on the CPU, for a
    token outside the vocabulary or outside its kept set.
    """
    _check_temperature(temperature)
    if logits.ndim < 1 or tokens.shape != logits.shape[:-1] or not logits.is_floating_point():
        raise ValueError(
            f"logits {logits.dtype} {tuple(logits.shape)} and tokens {tuple(tokens.shape)} do not fit: give floating "
            "point (..., vocabulary) and (...)"
        )
    _check_tokens(tokens, logits.shape[-1], logits.device)
    if kept is not None:
        logits = _within(logits, tokens, kept)
    if logits.numel() and kernels.attention_implementation(logits) == "triton":
        from dslib.kernels import policy_loss as kernel

        flat = kernel.selective_log_softmax(
            logits.reshape(-1, logits.shape[-1]), tokens.flatten(), temperature
        )
        return flat.view(tokens.shape)
    scaled = unmasked(logits, None)
    if temperature != 1:
        scaled = scaled / temperature
    # Not z − logsumexp(z), which has lost the digits that large logits have in common.
    return scaled.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    chunk: int = 1024,
    temperature: float = 1.0,
) -> Tensor:
    """:func:`selective_log_softmax` of ``hidden @ weight.T``, ``chunk`` positions at a time, without a graph: for
    the old and the reference policy. Arguments as in :func:`chunked_policy_loss`; ``mask``: (sequences, tokens)
    bool, positions to compute, 0 elsewhere. Returns (sequences, tokens), float32 or float64."""
    _check_hidden(hidden, weight, tokens, mask, chunk, temperature)
    mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    return _Chunks(hidden, weight, tokens, mask, chunk, temperature).log_probs()


def chunked_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    batch: PolicyBatch,
    config: LossConfig,
    chunk: int = 1024,
    temperature: float = 1.0,
    normalizer: float | None = None,
) -> PolicyLoss:
    """:func:`dslib.rl.policy_loss` from the last hidden states, ``chunk`` scored tokens at a time.

    hidden: (sequences, tokens, dim), the states from which each token was predicted; weight: (vocabulary, dim),
    of the output layer; tokens: (sequences, tokens) int64, the sampled ones, where ``batch.mask`` is False
    anything; ``batch.logp`` is not looked at and may be None. Value, metrics and gradients are those of

        policy_loss(replace(batch, logp=selective_log_softmax(hidden @ weight.T, tokens, temperature)), config)

    up to rounding, and so are the errors, but of the logits only a (chunk, vocabulary) part is ever held, and
    none for what is not scored. Where a token's loss depends on no other token, each chunk's gradient is computed
    right after its logits, with three products as in the plain way. A ratio of sequences or an off-policy mask
    needs all log-probabilities first: then each chunk's logits are computed twice. Either way the gradients of
    ``hidden`` and ``weight`` are made in this call and scaled in the backward pass, which works once or more
    often, but cannot itself be differentiated.

    Besides, raises ValueError for sizes, dtypes or devices that do not fit and for a chunk below 1.
    """
    _check_hidden(hidden, weight, tokens, batch.mask, chunk, temperature)
    chunks = _Chunks(hidden, weight, tokens, batch.mask, chunk, temperature)
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    d_hidden = d_weight = None
    if wanted and config.by_token:
        logp, d_hidden, d_weight = chunks.with_gradients(batch, config, normalizer)
    else:
        logp = chunks.log_probs()
    result = policy_loss(dataclasses.replace(batch, logp=logp), config, normalizer)
    if wanted and not config.by_token:
        logp = logp.requires_grad_()
        alone = dataclasses.replace(batch, logp=logp, values=None, entropy=None)
        without = dataclasses.replace(config, value_coef=0.0, entropy_coef=0.0)
        (slopes,) = torch.autograd.grad(policy_loss(alone, without, normalizer).loss, logp)
        d_hidden, d_weight = chunks.gradients(slopes)
    if wanted:
        loss = _Attached.apply(result.loss, hidden, weight, d_hidden, d_weight)
        result = dataclasses.replace(result, loss=loss)
    return result


class _Attached(torch.autograd.Function):
    """A loss, and the gradients by two tensors that were computed beside it."""

    @staticmethod
    def forward(ctx, loss, hidden, weight, d_hidden, d_weight):
        ctx.save_for_backward(d_hidden, d_weight)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss):
        d_hidden, d_weight = (None if d is None else d * d_loss.to(d.dtype) for d in ctx.saved_tensors)
        return d_loss, d_hidden, d_weight, None, None


class _Chunks:
    """The scored positions of a batch, ``chunk`` of them at a time; nothing here makes a graph."""

    def __init__(self, hidden, weight, tokens, mask, chunk, temperature) -> None:
        self.shape, self.needed = hidden.shape, (hidden.requires_grad, weight.requires_grad)
        self.hidden, self.weight = hidden.detach().flatten(0, 1), weight.detach()
        self.tokens, self.temperature = tokens.flatten(), temperature
        self.parts = mask.flatten().nonzero().squeeze(-1).split(chunk)
        self.kind = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.triton = kernels.attention_implementation(hidden) == "triton"
        rows = max((len(part) for part in self.parts), default=0)
        # One buffer for all chunks: fresh memory costs about as much as a product.
        self.buffer = None if self.triton else hidden.new_empty(rows, len(weight), dtype=self.kind)

    def _exact(self) -> torch.autocast:
        """Products in the dtype of the tensors, whatever autocast the caller trains under."""
        return torch.autocast(self.hidden.device.type, enabled=False)

    @torch.no_grad()
    def log_probs(self) -> Tensor:
        """(sequences, tokens), 0 where nothing is scored."""
        logp = self.hidden.new_zeros(self.tokens.shape, dtype=self.kind)
        with self._exact():
            for part in self.parts:
                logp[part] = self._rows(part)[0]
        return logp.view(self.shape[:2])

    @torch.no_grad()
    def gradients(self, slopes: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of Σ slopes·logp by hidden and weight; slopes (sequences, tokens)."""
        slopes = slopes.flatten()

        def d_logits(part: Tensor) -> Tensor:
            _, _, gradient = self._rows(part)
            return gradient(slopes[part])

        return self._products(d_logits)

    @torch.no_grad()
    def with_gradients(
        self, batch: PolicyBatch, config: LossConfig, normalizer: float | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """logp, and the gradients of a loss in which each token stands for itself."""
        mask, logp = batch.mask, self.hidden.new_zeros(self.tokens.shape, dtype=self.kind)
        weights = token_weights(mask, config, normalizer).to(self.kind).flatten()
        given = [batch.logp_old, per_token(batch.advantages, mask), batch.logp_ref if config.kl else None]
        given = [None if x is None else unmasked(x.detach(), mask).to(self.kind).flatten() for x in given]

        def d_logits(part: Tensor) -> Tensor:
            constants = [None if x is None else x[part] for x in given]
            logp[part], slopes, gradient = self._rows(part, constants, config)
            return gradient(slopes * weights[part])

        gradients = self._products(d_logits)
        return logp.view(self.shape[:2]), *gradients

    def _rows(self, part: Tensor, constants: list | None = None, config: LossConfig | None = None):
        """Of some positions: logp; with constants the slopes of their losses by it; and the function from what
        each logp counts to the gradient of the logits, which may be called once."""
        hidden, tokens = self.hidden[part], self.tokens[part]
        if self.triton:
            from dslib.kernels import policy_loss as kernel

            logits = hidden @ self.weight.mT
            options = None if config is None else kernel.objective(**_options(config))
            logp, sums, _, slopes = kernel.rows(logits, tokens, self.temperature, constants, options)
            return (
                logp,
                slopes,
                lambda x: kernel.logits_gradient(logits, tokens, sums, x, self.temperature, out=logits),
            )
        logits = self.buffer[: len(part)]
        if hidden.dtype == self.kind:
            torch.mm(hidden, self.weight.mT, out=logits)
        else:
            logits.copy_(hidden @ self.weight.mT)
        logp, gradient = _softmax_in_place(logits, tokens, self.temperature)
        return logp, None if constants is None else _slopes(logp, *constants, config), gradient

    def _products(self, d_logits_of: Callable[[Tensor], Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of hidden and weight, from that of each part's logits; sums are float32 at least."""
        d_hidden = torch.zeros_like(self.hidden) if self.needed[0] else None
        d_weight = torch.zeros_like(self.weight, dtype=self.kind) if self.needed[1] else None
        with self._exact():
            for part in self.parts:
                d_logits = d_logits_of(part).to(self.weight.dtype)
                if d_hidden is not None:
                    d_hidden[part] = d_logits @ self.weight
                if d_weight is not None and d_weight.dtype == d_logits.dtype:
                    d_weight.addmm_(d_logits.mT, self.hidden[part])
                elif d_weight is not None:
                    d_weight += d_logits.mT @ self.hidden[part]
        return (
            None if d_hidden is None else d_hidden.view(self.shape),
            None if d_weight is None else d_weight.to(self.weight.dtype),
        )


def _softmax_in_place(
    logits: Tensor, tokens: Tensor, temperature: float
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """logp of each row's token, and the gradient of Σ x·logp by the logits, which are overwritten by both."""
    at = tokens.unsqueeze(-1)
    if temperature != 1:
        logits.div_(temperature)
    most = logits.amax(-1, keepdim=True)
    chosen = logits.gather(-1, at) - most
    total = logits.sub_(most).exp_().sum(-1, keepdim=True)

    def gradient(x: Tensor) -> Tensor:
        x = x.unsqueeze(-1) / temperature
        return logits.mul_(-x / total).scatter_add_(-1, at, x)

    return (chosen - total.log()).squeeze(-1), gradient


@torch.enable_grad()
def _slopes(
    logp: Tensor, logp_old: Tensor, advantages: Tensor, logp_ref: Tensor | None, config: LossConfig
) -> Tensor:
    """d loss / d logp of tokens each of which stands for itself, all (n,)."""
    logp = logp.detach().requires_grad_()
    losses = -clipped_surrogate(logp - logp_old, advantages, config)[0]
    if logp_ref is not None:
        losses = losses + config.kl * token_kl(logp, logp_ref, logp_old, config)
    return torch.autograd.grad(losses.sum(), logp)[0]


def _options(config: LossConfig) -> dict[str, float | str | bool]:
    names = ("clip_low", "clip_high", "kl", "kl_kind", "kl_unbiased")
    return {name: getattr(config, name) for name in names}


def _within(logits: Tensor, tokens: Tensor, kept: Tensor) -> Tensor:
    if kept.dtype != torch.bool or kept.shape != logits.shape:
        raise ValueError(
            f"kept is {kept.dtype} of shape {tuple(kept.shape)}; it must be bool of shape {tuple(logits.shape)}"
        )
    outside = ~kept.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if tokens.device.type == "cpu" and outside.any():
        place = tuple(outside.nonzero()[0].tolist())
        raise ValueError(
            f"tokens holds {int(tokens[place])} at {place}, which kept leaves out: the sampler cannot have drawn it"
        )
    return logits.masked_fill(~kept, -math.inf)


def _check_temperature(temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature={temperature} must be a finite number above 0")


def _check_tokens(tokens: Tensor, vocabulary: int, device: torch.device) -> None:
    if tokens.dtype != torch.int64 or tokens.device != device:
        raise ValueError(f"tokens is {tokens.dtype} on {tokens.device}; give int64 on {device}")
    # On a GPU this would wait for it.
    if device.type == "cpu" and tokens.numel():
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= vocabulary:
            wrong = least if least < 0 else most
            raise ValueError(f"tokens holds {wrong}; the vocabulary has {vocabulary} tokens, from 0 on")


def _check_hidden(
    hidden: Tensor, weight: Tensor, tokens: Tensor, mask: Tensor | None, chunk: int, temperature: float
) -> None:
    _check_temperature(temperature)
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk={chunk!r} must be a whole number of at least 1")
    sizes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and tokens {tuple(tokens.shape)}"
    if (
        hidden.ndim != 3
        or weight.ndim != 2
        or tokens.shape != hidden.shape[:2]
        or weight.shape[1] != hidden.shape[2]
    ):
        raise ValueError(
            f"{sizes} do not fit: give (sequences, tokens, dim), (vocabulary, dim) and (sequences, tokens)"
        )
    if (hidden.dtype, hidden.device) != (weight.dtype, weight.device) or not hidden.is_floating_point():
        raise ValueError(
            f"hidden is {hidden.dtype} on {hidden.device} and weight {weight.dtype} on {weight.device}; give one "
            "floating point dtype on one device"
        )
    if mask is None:
        mask = torch.ones_like(tokens, dtype=torch.bool)
    elif mask.dtype != torch.bool or mask.shape != tokens.shape:
        raise ValueError(
            f"mask is {mask.dtype} of shape {tuple(mask.shape)}; give bool of {tuple(tokens.shape)}"
        )
    if tokens.dtype != torch.int64:
        raise ValueError(f"tokens is {tokens.dtype}; give int64")
    _check_tokens(tokens[mask], len(weight), hidden.device)
