"""Attention to the last ``window`` keys (Longformer, arXiv:2004.05150, §3.1; Mistral 7B, arXiv:2310.06825, §2)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dslib import kernels
from dslib.attention.dense import dense_attention, fused_attention
from dslib.attention.masked import check_attention, check_count, check_queries_are_last

#: Largest head that the kernel holds.
_KERNEL_DIM = 256
#: The fewest queries that a tile holds: tiles as small as a small window would be all overhead.
_LEAST_TILE = 64


def sliding_window_mask(queries: int, keys: int, window: int, device: torch.device | None = None) -> Tensor:
    """(queries, keys) bool: query i at position t = keys − queries + i sees the keys t − window + 1 … t, its own
    included: exactly ``window`` of them once so many are there."""
    check_count("window", window)
    age = torch.arange(keys - queries, keys, device=device).unsqueeze(1) - torch.arange(keys, device=device)
    return (age >= 0) & (age < window)


def sliding_window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, tile: int | None = None) -> Tensor:
    """Causal attention of each query to the last ``window`` keys, its own position's included.

    q: (batch, heads, queries, dim); k, v: (batch, kv_heads, keys, dim), keys ≥ queries: the queries are the
    last positions, and keys that left every query's window may be missing (a rolling cache). Result:
    (batch, heads, queries, dim). ``tile`` queries at a time (None: ``window``, but at least 64) meet the
    ``tile + window − 1`` keys that they can see together, so memory and time are O(queries·window). On a GPU, or
    where ``dslib.kernels.use("triton")`` says so, a kernel does it, unless a ``tile`` is asked for.

    Raises ValueError for a window or tile below 1 and for q, k, v that do not fit together.
    """
    check_attention(q, k, v)
    check_queries_are_last(q, k)
    check_count("window", window)
    if tile is not None:
        check_count("tile", tile)
    queries, keys = q.shape[2], k.shape[2]
    fits = tile is None and max(q.shape[3], v.shape[3]) <= _KERNEL_DIM
    if fits and window < keys and kernels.attention_implementation(q) == "triton":
        from dslib.kernels import sliding_window

        return sliding_window.sliding_window(q, k, v, window)
    if window >= keys:
        return dense_attention(q, k, v)
    before = min(keys - queries, window - 1)  # keys older than these are out of every window
    k, v = k[:, :, keys - queries - before :], v[:, :, keys - queries - before :]
    tile = max(window, _LEAST_TILE) if tile is None else tile
    if queries <= tile:
        mask = sliding_window_mask(queries, queries + before, window, q.device)
        return fused_attention(q, k, v, mask)
    return _tiled(q, k, v, window, tile, before)


def _tiled(q: Tensor, k: Tensor, v: Tensor, window: int, tile: int, before: int) -> Tensor:
    """The queries in tiles, as a second batch dimension; ``before`` keys stand before the first query."""
    batch, _, queries, _ = q.shape
    tiles = -(-queries // tile)
    missing, rest = window - 1 - before, tiles * tile - queries
    # (batch, heads, tiles, tile, dim) and, of the keys, overlapping pieces (…, tiles, tile + window − 1, dim).
    q = F.pad(q, (0, 0, 0, rest)).unflatten(2, (tiles, tile))
    k, v = (F.pad(x, (0, 0, missing, rest)).unfold(2, tile + window - 1, tile).mT for x in (k, v))
    mask = sliding_window_mask(tile, tile + window - 1, window, q.device).repeat(tiles, 1, 1)
    places = torch.arange(tiles, device=q.device).unsqueeze(1) * tile + torch.arange(
        tile + window - 1, device=q.device
    )
    mask &= (places >= missing).unsqueeze(1)  # the padding before the first key
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = fused_attention(q, k, v, mask.repeat(batch, 1, 1).unsqueeze(1))
    return out.unflatten(0, (batch, tiles)).transpose(1, 2).flatten(2, 3)[:, :, :queries]
