"""Dense causal attention, as every other attention of this library is compared with it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """(queries, keys) bool, True where a query may look: the last query sits at the last key."""
    rows = torch.arange(queries, device=device).unsqueeze(1) + (keys - queries)
    return torch.arange(keys, device=device) <= rows


def attention_scores(q: Tensor, k: Tensor) -> Tensor:
    """The logits q·kᵀ/√dim with −inf where a query may not look.

    q: (batch, heads, queries, dim), k: (batch, kv_heads, keys, dim), heads a multiple of kv_heads
    → (batch, heads, queries, keys).
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~causal_mask(q.shape[-2], k.shape[-2], q.device), float("-inf"))


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention, softmax(q·kᵀ/√dim)·v (arXiv:1706.03762, eq. 1).

    q: (batch, heads, queries, dim); k, v: (batch, kv_heads, keys, dim), keys ≥ queries: the queries
    are the last positions, as in decoding with a cache. Result: (batch, heads, queries, dim).
    """
    queries, keys = q.shape[-2], k.shape[-2]
    grouped = q.shape[1] != k.shape[1]
    if queries == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    mask = None if queries == 1 else causal_mask(queries, keys, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
