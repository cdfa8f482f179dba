"""Attention under any mask: the plain form that every sparse attention here is measured against."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """softmax(scale·q·kᵀ)·v over the keys that ``mask`` lets a query see; 0 for a query that sees none.

    q: (batch, heads, queries, dim); k: (batch, kv_heads, keys, dim), v: (batch, kv_heads, keys, value_dim), heads
    a multiple of kv_heads; mask: bool, broadcastable to (batch, heads, queries, keys), or with kv_heads in the
    place of heads (one mask a group). ``scale`` is 1/√dim. Result: (batch, heads, queries, value_dim) in q's dtype.

    Raises ValueError for sizes, dtypes, devices or a mask that do not fit.
    """
    check_attention(q, k, v)
    weights = attention_weights(q, k, mask, scale)
    if v.isfinite().all():
        return weights @ _per_head(v, q.shape[1])
    # 0·NaN is NaN: what is not finite is left out for all queries but those that see it.
    visible = _fitting(mask, weights.shape, k.shape[1])
    bad = _per_head(~v.isfinite().all(-1, keepdim=True), q.shape[1]).mT
    v = _per_head(v, q.shape[1])
    clean = weights @ v.masked_fill(~v.isfinite(), 0)
    return torch.where((visible & bad).any(-1, keepdim=True), weights @ v, clean)


def attention_weights(q: Tensor, k: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """The softmax of :func:`masked_attention`, (batch, heads, queries, keys); a row without a key is all 0."""
    heads, groups = q.shape[1], k.shape[1]
    shape = (q.shape[0], heads, q.shape[2], k.shape[2])
    mask = _fitting(mask, shape, groups)
    q, scale = within_range(q, q.shape[-1] ** -0.5 if scale is None else scale)
    k = _per_head(k, heads)
    bad = None if k.isfinite().all() else ~k.isfinite().all(-1, keepdim=True)
    if (
        bad is not None
    ):  # 0·NaN is NaN, in the gradient of q: only queries that see such a key have it in their sum
        k = k.masked_fill(bad, 0)
    scores = q @ k.mT * scale
    if bad is not None:
        scores = scores.masked_fill(bad.mT, math.nan)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.where(mask, weights, 0)  # a row without a key is NaN up to here


def within_range(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """What to multiply with the keys, and what the products are to be multiplied with: in float16 queries are scaled
    first, because q·k of 64 numbers of size 33 is past its largest number."""
    return (q * scale, 1.0) if q.dtype == torch.float16 else (q, scale)


def check_attention(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str, str] = ("q", "k", "v")) -> None:
    """Raise ValueError unless q (batch, heads, queries, dim), k (batch, kv_heads, keys, dim) and
    v (batch, kv_heads, keys, value_dim) fit together; ``names`` is what the message calls them."""
    for name, x in zip(names, (q, k, v), strict=True):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; give (batch, heads, time, dim)")
        if not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype}; attention needs floating point")
    sizes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip(names, (q, k, v), strict=True))
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{sizes} do not fit: batch, keys and the queries' and keys' dim must be the same")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{sizes}: kv_heads={k.shape[1]} must divide heads={q.shape[1]}")
    for what in ("dtype", "device"):
        found = [getattr(x, what) for x in (q, k, v)]
        if len(set(found)) > 1:
            raise ValueError(f"{', '.join(names)} have the {what}s {', '.join(map(str, found))}; use one")


def check_queries_are_last(q: Tensor, k: Tensor, names: tuple[str, str] = ("q", "k")) -> None:
    """Raise ValueError when there are more queries than keys: the queries are the last positions."""
    if q.shape[2] > k.shape[2]:
        raise ValueError(
            f"{names[0]} has {q.shape[2]} positions and {names[1]} {k.shape[2]}; the queries are the last of the keys'"
        )


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raise ValueError unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")


def _per_head(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _fitting(mask: Tensor, shape: tuple[int, int, int, int], groups: int) -> Tensor:
    """``mask`` per head, or a ValueError."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask is {mask.dtype}; give bool, True where a query may look")
    if mask.ndim == 4 and mask.shape[1] == groups != shape[1]:
        mask = _per_head(mask, shape[1])
    sizes = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if mask.ndim > 4 or any(have not in (1, need) for have, need in zip(sizes, shape, strict=True)):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}; it must broadcast to (batch, heads, queries, keys) = {shape}"
        )
    return mask
