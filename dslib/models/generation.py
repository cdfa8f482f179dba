"""Sampling from a decoder, one token at a time, with a KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from dslib.attention import KVCache
from dslib.models.decoder import Decoder


def filter_logits(logits: Tensor, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """−inf for every token outside the ``top_k`` most likely, and outside the smallest set whose
    probability reaches ``top_p`` (nucleus, arXiv:1904.09751). logits: (..., vocab) → the same shape.

    The most likely token always stays. Raises ValueError for top_k below 1 or top_p outside (0, 1].
    """
    if top_k is not None:
        if top_k < 1:
            raise ValueError(f"top_k={top_k} must be at least 1")
        kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p is not None:
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p} must lie in (0, 1]")
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probability = ordered.softmax(dim=-1)
        outside = probability.cumsum(dim=-1) - probability >= top_p
        logits = logits.masked_fill(outside.scatter(-1, order, outside), float("-inf"))
    return logits


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
) -> Tensor:
    """Continue ``prompt``: (batch, time) int64 → (batch, time + max_new_tokens).

    ``temperature=0`` is greedy (ties to the smaller id). ``generator`` seeds the sampling. With and
    without ``use_cache`` the tokens are the same; without, each token costs a pass over all of them.
    Raises ValueError for an empty prompt, a negative temperature or count, or a bad top_k or top_p.
    """
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(
            f"prompt has shape {tuple(prompt.shape)}; generation needs (batch, time) with time at least 1"
        )
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 0")
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature} must be at least 0")
    filter_logits(torch.zeros(1), top_k, top_p)  # bad filters are refused here, whatever the temperature
    was_training = model.training
    model.eval()
    tokens, cache, fresh = prompt, KVCache() if use_cache else None, prompt
    try:
        for _ in range(max_new_tokens):
            logits = model(fresh, cache=cache)[:, -1]
            if temperature == 0:
                chosen = logits.argmax(dim=-1, keepdim=True)
            else:
                probability = filter_logits(logits / temperature, top_k, top_p).softmax(dim=-1)
                chosen = torch.multinomial(probability, 1, generator=generator)
            tokens = torch.cat((tokens, chosen), dim=1)
            fresh = chosen if use_cache else tokens
    finally:
        model.train(was_training)
    return tokens
