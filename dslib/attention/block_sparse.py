"""Attention to chosen blocks of keys: what NSA's selection and MoBA have in common."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from dslib import kernels
from dslib.attention.masked import check_attention, check_count, check_queries_are_last, masked_attention

#: Largest head that the kernel holds.
_KERNEL_DIM = 256
#: "auto" draws a mask up to this many (query, key) pairs: below it, gathering is slower on a CPU.
_MASKED_PAIRS = 2**22
#: Numbers that a gathered tile of keys holds at most.
_TILE_NUMBERS = 2**22


def positions(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """(queries,) int64: where the queries stand, as the last of ``keys`` positions."""
    return torch.arange(keys - queries, keys, device=device)


def top_blocks(scores: Tensor, count: int) -> Tensor:
    """The ``count`` blocks of largest score, in that order, ties to the smaller number.

    scores: (..., blocks); −inf (or NaN) is never chosen → (..., count) int64, −1 for an empty slot.
    Raises ValueError for a count below 1.
    """
    check_count("count", count)
    scores = scores.detach().masked_fill(scores.isnan(), -math.inf)
    ordered, blocks = scores.sort(dim=-1, descending=True, stable=True)
    blocks = blocks.masked_fill(ordered == -math.inf, -1)[..., :count]
    return F.pad(blocks, (0, count - blocks.shape[-1]), value=-1)


def block_mask(blocks: Tensor, block_size: int, keys: int) -> Tensor:
    """blocks: (batch, groups, queries, n) block numbers, −1 for none → (batch, groups, queries, keys) bool:
    the keys of its blocks, up to its own position, that each query sees."""
    number = -(-keys // block_size)
    # An extra last block takes the empty slots.
    chosen = torch.zeros(*blocks.shape[:-1], number + 1, dtype=torch.bool, device=blocks.device)
    chosen = chosen.scatter(-1, blocks.masked_fill(blocks < 0, number), True)[..., :number]
    causal = positions(blocks.shape[2], keys, blocks.device).unsqueeze(1) >= torch.arange(
        keys, device=blocks.device
    )
    return chosen.repeat_interleave(block_size, dim=-1)[..., :keys] & causal


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, block_size: int, method: str = "auto"
) -> Tensor:
    """Causal attention of each query to the keys of its own blocks; 0 for a query that has none.

    q: (batch, heads, queries, dim); k, v: (batch, kv_heads, keys, dim), keys ≥ queries: the queries are the
    last positions. blocks: (batch, groups, queries, n) integers: block j holds the keys j·block_size and on,
    −1 is an empty slot, none is named twice. A group of heads shares its blocks: ``groups`` is a multiple
    of kv_heads and divides heads. Result: (batch, heads, queries, dim).

    ``method="masked"`` draws the mask, O(queries·keys) memory; ``"gathered"`` copies the n blocks of each query,
    a tile of queries at a time: O(queries·n·block_size) time, whatever the length. Both give the same. ``"auto"``
    takes the mask for short sequences, and a kernel on a GPU or where ``dslib.kernels.use("triton")`` says so.
    Raises ValueError for what does not fit.
    """
    check_attention(q, k, v)
    check_queries_are_last(q, k)
    check_count("block_size", block_size)
    _check_blocks(q, k, blocks, block_size)
    if method not in ("auto", "masked", "gathered"):
        raise ValueError(f"method={method!r} is unknown; use 'auto', 'masked' or 'gathered'")
    fits = method == "auto" and max(q.shape[3], v.shape[3]) <= _KERNEL_DIM
    if fits and kernels.attention_implementation(q) == "triton":
        from dslib.kernels import block_sparse

        return block_sparse.block_sparse(q, k, v, blocks, block_size)
    if method == "auto":
        queries, keys = q.shape[2], k.shape[2]
        short = queries * keys <= _MASKED_PAIRS and (queries > 1 or keys <= 2 * blocks.shape[-1] * block_size)
        method = "masked" if short else "gathered"
    if method == "gathered":
        return _gathered(q, k, v, blocks.long(), block_size)
    mask = block_mask(blocks.long(), block_size, k.shape[2])
    return masked_attention(q, k, v, mask.repeat_interleave(q.shape[1] // mask.shape[1], dim=1))


def _gathered(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    batch, groups, queries, n = blocks.shape
    keys, rest = k.shape[2], -k.shape[2] % block_size
    # (batch, groups, blocks, block_size, dim): the last block is filled up, and what fills it is never seen.
    k, v = (
        F.pad(x, (0, 0, 0, rest))
        .unflatten(2, (-1, block_size))
        .repeat_interleave(groups // x.shape[1], dim=1)
        for x in (k, v)
    )
    q = q.unflatten(1, (groups, -1)).transpose(2, 3)  # (batch, groups, queries, heads of the group, dim)
    q, root = (q / math.sqrt(q.shape[-1]), 1.0) if q.dtype == torch.float16 else (q, math.sqrt(q.shape[-1]))
    places = positions(queries, keys, q.device)
    b = torch.arange(batch, device=q.device)[:, None, None, None]
    g = torch.arange(groups, device=q.device)[:, None, None]
    within = torch.arange(block_size, device=q.device)
    tile = max(1, _TILE_NUMBERS // max(1, batch * groups * n * block_size * k.shape[-1]))
    parts = []
    for start in range(0, queries, tile):
        chosen = blocks[:, :, start : start + tile]
        at = (chosen.unsqueeze(-1) * block_size + within).flatten(-2)  # the position of each gathered key
        seen = (chosen >= 0).repeat_interleave(block_size, dim=-1) & (
            at <= places[start : start + tile, None]
        )
        own_k, own_v = (x[b, g, chosen.clamp(min=0)].flatten(-3, -2) for x in (k, v))
        # A gathered block is copied for its query alone: what that does not see may be anything, and becomes 0.
        own_k, own_v = (x.masked_fill(~seen.unsqueeze(-1), 0) for x in (own_k, own_v))
        scores = q[:, :, start : start + tile] @ own_k.mT / root
        seen = seen.unsqueeze(-2)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        parts.append(torch.where(seen, weights, 0) @ own_v)
    if not parts:
        return q.new_zeros(batch, q.shape[1] * q.shape[3], 0, v.shape[-1])
    return torch.cat(parts, dim=2).transpose(2, 3).flatten(1, 2)


def _check_blocks(q: Tensor, k: Tensor, blocks: Tensor, block_size: int) -> None:
    if blocks.ndim != 4 or blocks.shape[0] != q.shape[0] or blocks.shape[2] != q.shape[2]:
        raise ValueError(
            f"blocks has shape {tuple(blocks.shape)}; give (batch, groups, queries, n) with batch={q.shape[0]} and "
            f"queries={q.shape[2]}"
        )
    if blocks.is_floating_point() or blocks.dtype == torch.bool:
        raise ValueError(f"blocks is {blocks.dtype}; give int32 or int64 block numbers")
    groups = blocks.shape[1]
    if not groups or groups % k.shape[1] or q.shape[1] % groups:
        raise ValueError(
            f"blocks has groups={groups}; that must be a multiple of kv_heads={k.shape[1]} and divide "
            f"heads={q.shape[1]}"
        )
    number = -(-k.shape[2] // block_size)
    if blocks.numel():
        low, high = (int(x) for x in blocks.aminmax())
        if low < -1 or high >= number:
            raise ValueError(
                f"blocks names block {high if high >= number else low}; {k.shape[2]} keys make {number} blocks of "
                f"block_size={block_size}, numbered from 0, and −1 is none"
            )
