"""Dense causal attention, as every other attention of this library is compared with it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from dslib.attention.masked import masked_attention


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
    q, root = (q / math.sqrt(q.shape[-1]), 1.0) if q.dtype == torch.float16 else (q, math.sqrt(q.shape[-1]))
    scores = q @ k.mT / root
    return scores.masked_fill(~causal_mask(q.shape[-2], k.shape[-2], q.device), float("-inf"))


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention, softmax(q·kᵀ/√dim)·v (arXiv:1706.03762, eq. 1).

    q: (batch, heads, queries, dim); k, v: (batch, kv_heads, keys, dim), keys ≥ queries: the queries
    are the last positions, as in decoding with a cache. Result: (batch, heads, queries, dim). A later key may hold
    anything, NaN too, on the CPU; on a GPU it is torch's kernels' affair.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    if queries == 1:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    return fused_attention(q, k, v, None if queries == keys else causal_mask(queries, keys, q.device))


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """torch's ``scaled_dot_product_attention`` under ``mask``, bool, or causal without one.

    On the CPU a key that is masked may hold anything: torch multiplies its value by 0, which NaN survives, so what
    is not finite goes the plain way of :func:`dslib.attention.masked_attention`.
    """
    if q.device.type == "cpu" and not (k.isfinite().all() and v.isfinite().all()):
        plain = causal_mask(q.shape[-2], k.shape[-2]) if mask is None else mask
        return masked_attention(q, k, v, plain)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
