"""Rollouts: completions sampled with a KV cache, and their log-probabilities under a policy, with gradient.

Three things make the ratio of policies exactly 1 where nothing has changed, and each has its place here:
logits are divided by the temperature before the log-softmax, in sampling as in scoring; the tokens that
top-p or top-k left to choose from are recorded and replayed (Keep Sampling Mask), and so are the experts that
a token visited (Keep Routing; both DeepSeek-V3.2, arXiv:2512.02556, §3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dslib.attention import KVCache
from dslib.models.decoder import MLP, Decoder
from dslib.models.generation import filter_logits
from dslib.models.layers.dense import SelfAttention
from dslib.models.moe import recorded_routes, replayed_routes
from dslib.rl.selective import selective_log_softmax


@dataclass(frozen=True)
class SamplingConfig:
    """How to sample. Raises ValueError for numbers out of range, naming them."""

    #: The longest completion.
    max_new_tokens: int
    #: Logits are divided by it; 0 is greedy.
    temperature: float = 1.0
    #: Mass of the nucleus that is left, after the temperature (None: 1), as in :func:`dslib.models.filter_logits`.
    top_p: float | None = None
    #: How many of the likeliest tokens are left (None: all).
    top_k: int | None = None
    #: The token that ends a row (None: nothing does).
    end: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be finite and at least 0")
        filter_logits(torch.zeros(1), self.top_k, self.top_p)  # refuses bad filters


@dataclass(frozen=True)
class Rollout:
    """Completions of prompts of one length, one a row, as wide as the longest may be.

    ``tokens``: (sequences, prompt_length + new) int64; past its end a row is filled with the end token.
    ``mask``: (sequences, new) bool, True for a generated token that is scored: the end token is, what follows
    it is not. ``logp``, ``entropy``: (sequences, new), of the distribution that each token was drawn from, after
    temperature and filters; 0 where the mask is False, and for a greedy choice. ``kept``: None, or
    (sequences, new, vocabulary) bool, the tokens that the filters left to choose from (all of them where the
    mask is False). ``routes``: None, or (layers, sequences, prompt_length + new − 1, top_k) int16, the experts
    that each token which was read visited, −1 past a row's end.

    Raises ValueError for shapes that do not fit together.
    """

    tokens: Tensor
    prompt_length: int
    mask: Tensor
    logp: Tensor
    entropy: Tensor
    kept: Tensor | None = None
    routes: Tensor | None = None

    def __post_init__(self) -> None:
        sequences, total = self.tokens.shape
        shape = (sequences, total - self.prompt_length)
        for name in ("mask", "logp", "entropy"):
            if getattr(self, name).shape != shape:
                raise ValueError(
                    f"{name} has shape {tuple(getattr(self, name).shape)}; tokens {(sequences, total)} after "
                    f"prompt_length={self.prompt_length} need {shape}"
                )
        if self.kept is not None and self.kept.shape[:2] != shape:
            raise ValueError(
                f"kept has shape {tuple(self.kept.shape)}; it must begin with the mask's {shape}"
            )
        if self.routes is not None and self.routes.shape[1:3] != (sequences, total - 1):
            raise ValueError(
                f"routes have shape {tuple(self.routes.shape)}; tokens {(sequences, total)} need "
                f"(layers, {sequences}, {total - 1}, top_k)"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def completions(self) -> Tensor:
        """What was generated, (sequences, new) int64."""
        return self.tokens[:, self.prompt_length :]

    @property
    def lengths(self) -> Tensor:
        """Scored tokens of each row, (sequences,) int64."""
        return self.mask.sum(1)

    def rows(self, index: Tensor | slice, trim: bool = False) -> Rollout:
        """Some of the rows; with ``trim`` only as wide as the longest of them, and at least one token."""
        mask = self.mask[index]
        new = mask.shape[1]
        if trim:
            new = int(mask.any(0).nonzero().amax()) + 1 if mask.any() else 1
        return Rollout(
            tokens=self.tokens[index, : self.prompt_length + new],
            prompt_length=self.prompt_length,
            mask=mask[:, :new],
            logp=self.logp[index, :new],
            entropy=self.entropy[index, :new],
            kept=None if self.kept is None else self.kept[index, :new],
            routes=None if self.routes is None else self.routes[:, index, : self.prompt_length + new - 1],
        )


def concatenated(rollouts: Sequence[Rollout]) -> Rollout:
    """The rows of several rollouts. Raises ValueError for none, and for ones that were sampled differently:
    in the lengths of prompt and completion, or in whether kept sets or routes were recorded."""
    kinds = {(r.prompt_length, r.mask.shape[1], r.kept is None, r.routes is None) for r in rollouts}
    if len(kinds) != 1:
        raise ValueError(
            "rollouts of one kind can be concatenated, and these are of (prompt length, new tokens, without "
            f"kept sets, without routes) {sorted(kinds)}"
        )
    if len(rollouts) == 1:
        return rollouts[0]

    def joined(name: str, dim: int = 0) -> Tensor | None:
        parts = [getattr(rollout, name) for rollout in rollouts]
        return None if parts[0] is None else torch.cat(parts, dim)

    return Rollout(
        prompt_length=rollouts[0].prompt_length,
        routes=joined("routes", 1),
        **{name: joined(name) for name in ("tokens", "mask", "logp", "entropy", "kept")},
    )


@torch.no_grad()
def sample(
    model: nn.Module,
    prompts: Tensor,
    config: SamplingConfig,
    generator: torch.Generator | None = None,
    group_size: int = 1,
    record_routes: bool = False,
    record_kept: bool = False,
) -> Rollout:
    """Continue each of ``prompts`` (n, time) int64 ``group_size`` times → n·group_size rows, a prompt's together.

    A prompt is read once, whatever ``group_size`` is; finished rows leave the batch whenever they are half of it; and
    it ends when all have. The random numbers of a row do not depend on when others end, nor does what
    ``generator`` has drawn afterwards. Raises ValueError for empty prompts, tokens outside the model's
    vocabulary, and a model whose logits are not finite.
    """
    _check_prompts(model, prompts, config, group_size)
    count, prompt_length = len(prompts) * group_size, prompts.shape[1]
    device, width = prompts.device, config.max_new_tokens
    drawn = torch.rand(
        count, width, generator=generator, dtype=torch.float64, device=generator.device if generator else None
    ).to(device)
    completions = torch.full((count, width), 0 if config.end is None else config.end, device=device)
    mask = torch.zeros(count, width, dtype=torch.bool, device=device)
    logp = entropy = kept = routes = None
    rows = torch.arange(count, device=device)  # which row of the result a row of the batch is
    alive = torch.ones_like(rows, dtype=torch.bool)
    cache, was_training = KVCache(), model.training
    model.eval()
    try:
        with recorded_routes(model) if record_routes else nullcontext([]) as record:
            logits = model.lm_head(hidden_states(model, prompts, cache)[:, -1])
            if group_size > 1:
                which = torch.arange(len(prompts), device=device).repeat_interleave(group_size)
                logits, cache = logits[which], _cache_rows(cache, which)
            if record:
                seen = _popped(record).repeat_interleave(group_size, dim=1)
                routes = seen.new_full((len(seen), count, prompt_length + width - 1, seen.shape[-1]), -1)
                routes[:, :, :prompt_length] = seen
            for step in range(width):
                chosen, *found = draw(logits, drawn[rows, step], config)
                if logp is None:
                    logp, entropy = (found[0].new_zeros(count, width) for _ in range(2))
                    if record_kept:
                        kept = torch.ones(count, width, logits.shape[-1], dtype=torch.bool, device=device)
                here = rows[alive]
                completions[here, step], mask[here, step] = chosen[alive], True
                logp[here, step], entropy[here, step] = found[0][alive], found[1][alive]
                if kept is not None:
                    kept[here, step] = found[2][alive]
                if config.end is not None:
                    alive = alive & (chosen != config.end)
                living = int(alive.sum())
                if not living or step + 1 == width:
                    break
                if 2 * living <= len(rows):
                    rows, chosen, cache = rows[alive], chosen[alive], _cache_rows(cache, alive)
                    alive = alive[alive]
                logits = model(chosen.unsqueeze(1), cache=cache)[:, -1]
                if routes is not None:
                    routes[:, rows[alive], prompt_length + step] = _popped(record)[:, alive, 0]
    finally:
        model.train(was_training)
    if not logp.isfinite().all():
        row, step = (~logp.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"the model's logits are not finite at new token {step} of row {row}")
    tokens = torch.cat((prompts.repeat_interleave(group_size, dim=0), completions), dim=1)
    return Rollout(tokens, prompt_length, mask, logp, entropy, kept, routes)


def score(
    model: nn.Module,
    rollout: Rollout,
    temperature: float = 1.0,
    kept: Tensor | None = None,
    routes: Tensor | None = None,
) -> Tensor:
    """Log-probabilities of a rollout's tokens under ``model``, with gradient: (sequences, new), 0 where nothing
    is scored.

    One pass over prompt and completion. With the temperature of the sampling, and ``kept`` and ``routes`` of the
    rollout where it has them, the sampler's own ``logp`` comes out, to rounding. Errors as
    :func:`completion_states` and :func:`dslib.rl.selective.selective_log_softmax`, and ValueError for a temperature
    that is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0: a greedy choice has no log-probability")
    logits = model.lm_head(completion_states(model, rollout, routes))
    logp = selective_log_softmax(logits, rollout.completions, temperature, kept)
    return torch.where(rollout.mask, logp, 0)


def completion_states(model: nn.Module, rollout: Rollout, routes: Tensor | None = None) -> Tensor:
    """What goes into the head before each generated token: (sequences, new, d_model), with gradient.

    Where a decoder of plain attention is given prompts that recur, as in a group, it reads each once: the
    completions continue copies of its cache, through which the gradients add up. ``routes`` are replayed,
    :func:`dslib.models.moe.replayed_routes`. Raises ValueError for tokens outside the model's vocabulary.
    """
    vocabulary = model.lm_head.out_features
    largest = int(rollout.tokens.amax()) if rollout.tokens.numel() else 0
    if largest >= vocabulary:
        raise ValueError(f"token {largest} of the rollout is not in the model's vocabulary of {vocabulary}")
    start = rollout.prompt_length
    if routes is None and is_plain(model) and len(rollout) > 1 and rollout.mask.shape[1] > 1:
        prompts, which = rollout.tokens[:, :start].unique(dim=0, return_inverse=True)
        if 2 * len(prompts) <= len(rollout):
            cache = KVCache()
            first = hidden_states(model, prompts, cache)[:, -1:]
            rest = hidden_states(model, rollout.completions[:, :-1], _cache_rows(cache, which))
            return torch.cat((first[which], rest), dim=1)
    with nullcontext() if routes is None else replayed_routes(model, routes):
        return hidden_states(model, rollout.tokens[:, :-1])[:, start - 1 :]


def is_plain(model: nn.Module) -> bool:
    """Whether gradients through the cache are those of one pass, and no expert's load counts the tokens."""
    return isinstance(model, Decoder) and all(
        type(block.attention) is SelfAttention and type(block.mlp) is MLP for block in model.blocks
    )


def hidden_states(model: nn.Module, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
    """What a model feeds its ``lm_head``: tokens (batch, time) int64 → (batch, time, d_model), the head unused.

    Of any model whose ``forward(tokens, cache=…)`` ends in ``self.lm_head``.
    """
    states: list[Tensor] = []

    def divert(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        states.append(inputs[0])
        return (inputs[0][:, :0],)

    handle = model.lm_head.register_forward_pre_hook(divert)
    try:
        model(tokens, cache=cache)
    finally:
        handle.remove()
    return states[0]


def token_entropy(logits: Tensor, temperature: float = 1.0, kept: Tensor | None = None) -> Tensor:
    """−Σ π·log π of softmax(logits / T), over ``kept`` where given: (..., vocabulary) → (...), with gradient."""
    logp = (logits if kept is None else logits.masked_fill(~kept, float("-inf"))) / temperature
    logp = logp.log_softmax(-1)
    return -(logp.exp() * logp.masked_fill(logp == float("-inf"), 0)).sum(-1)


def draw(logits: Tensor, drawn: Tensor, config: SamplingConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From logits (rows, vocabulary) and uniform numbers (rows,) float64: tokens, their log-probabilities, the
    entropies, (rows,) each, and the kept sets (rows, vocabulary)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if config.temperature == 0:
        chosen = logits.argmax(-1)
        zero = logits.amax(-1) * 0  # NaN where the logits are
        return (
            chosen,
            zero,
            zero,
            torch.zeros_like(logits, dtype=torch.bool).scatter(-1, chosen[:, None], True),
        )
    logits = filter_logits(logits / config.temperature, config.top_k, config.top_p)
    logp = logits.log_softmax(-1)
    probability = logp.exp()
    # By the inverse of the distribution function: one random number a row, and no token of probability 0, whose
    # step in it is none. The target stays below the last value even where the product is rounded up to it.
    cumulative = probability.double().cumsum(-1)
    last = cumulative[:, -1]
    target = torch.minimum(drawn * last, last.nextafter(torch.zeros_like(last)))
    chosen = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True)
    chosen = chosen.clamp(max=logits.shape[-1] - 1)  # NaN only; sample() reports it
    own = logp.gather(-1, chosen).squeeze(-1)
    return chosen.squeeze(-1), own, torch.special.entr(probability).sum(-1), logits > float("-inf")


def _cache_rows(cache: KVCache, index: Tensor) -> KVCache:
    """A cache of the rows that ``index`` selects, the batch being the first dimension of all it holds."""

    def selected(value: Any) -> Any:
        return tuple(map(selected, value)) if isinstance(value, tuple) else value[index]

    rows = KVCache()
    rows.length = cache.length
    rows.layers = {layer: selected(pair) for layer, pair in cache.layers.items()}
    rows.states = {key: selected(value) for key, value in cache.states.items()}
    return rows


def _popped(record: list[list[Tensor]]) -> Tensor:
    """The routes of the last pass, (layers, batch, time, top_k) int16, taken out of the record."""
    return torch.stack([passes.pop() for passes in record]).to(torch.int16)


def _check_prompts(model: nn.Module, prompts: Tensor, config: SamplingConfig, group_size: int) -> None:
    if prompts.ndim != 2 or 0 in prompts.shape or prompts.is_floating_point():
        raise ValueError(
            f"prompts is {prompts.dtype} of shape {tuple(prompts.shape)}; sampling needs (prompts, time) int64, "
            "at least one of each"
        )
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be at least 1")
    vocabulary = model.lm_head.out_features
    if not 0 <= prompts.min() <= prompts.max() < vocabulary:
        raise ValueError(
            f"prompts hold tokens {int(prompts.min())} to {int(prompts.max())}, but the model's vocabulary is "
            f"0 to {vocabulary - 1}"
        )
    if config.end is not None and not 0 <= config.end < vocabulary:
        raise ValueError(f"end={config.end} is not in the model's vocabulary of {vocabulary}")
