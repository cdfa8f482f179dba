"""MoBA, mixture of block attention (arXiv:2502.13189): each query picks whole blocks of keys by their mean."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from dslib.attention.block_sparse import block_mask, block_sparse_attention, positions, top_blocks
from dslib.attention.masked import check_attention, check_count, check_queries_are_last


def moba_scores(q: Tensor, k: Tensor, block_size: int) -> Tensor:
    """The gate's affinity s_i = ⟨q, mean_pool(K[I_i])⟩ of each query with each block (MoBA eq. 6), in float32 or
    wider; −inf for blocks of the future and +inf for the query's own block (§2.2, "Causality").

    q: (batch, heads, queries, dim), k: (batch, kv_heads, keys, dim), the queries the last of the keys' positions
    → (batch, heads, queries, blocks). A block is scored only once it lies before the query as a whole, so
    the mean never sees a later key.
    """
    check_attention(q, k, k, ("q", "k", "k"))
    check_queries_are_last(q, k)
    check_count("block_size", block_size)
    keys = k.shape[2]
    number, rest = -(-keys // block_size), -keys % block_size
    wide = torch.promote_types(q.dtype, torch.float32)
    # The last block may be incomplete; then it is the last query's own block and its mean is never used.
    means = F.pad(k.detach().to(wide), (0, 0, 0, rest)).unflatten(2, (number, block_size)).mean(3)
    scores = q.detach().to(wide) @ means.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT
    own = (positions(q.shape[2], keys, q.device) // block_size).unsqueeze(1)
    block = torch.arange(number, device=q.device)
    return scores.masked_fill(block > own, -math.inf).masked_fill(block == own, math.inf)


def moba_blocks(q: Tensor, k: Tensor, block_size: int, top_k: int) -> Tensor:
    """The ``top_k`` blocks of each query, its own among them and first: (batch, heads, queries, top_k) int64,
    −1 where there are fewer (MoBA eq. 5). With ``top_k=1`` attention is block-diagonal."""
    check_count("top_k", top_k)
    return top_blocks(moba_scores(q, k, block_size), top_k)


def moba_mask(q: Tensor, k: Tensor, block_size: int, top_k: int) -> Tensor:
    """(batch, heads, queries, keys) bool: the keys that each query sees under :func:`moba_attention`."""
    return block_mask(moba_blocks(q, k, block_size, top_k), block_size, k.shape[2])


def moba_attention(
    q: Tensor, k: Tensor, v: Tensor, block_size: int, top_k: int, method: str = "auto"
) -> Tensor:
    """Softmax(q·K[I]ᵀ/√dim)·V[I] over the keys I of the ``top_k`` blocks that the gate chooses, the query's own
    block always and causally among them (MoBA eq. 2 to 6; defaults there: block_size 512, top_k 3).

    q: (batch, heads, queries, dim); k, v: (batch, kv_heads, keys, dim) from position 0 on, the queries the last
    of them; any length. Every head chooses for itself. Result: (batch, heads, queries, dim). With
    ``top_k`` as large as the number of blocks it is dense attention: MoBA adds no parameters, so a model may
    switch. No gradient flows through the choice. ``method`` as in
    :func:`dslib.attention.block_sparse_attention`.

    Raises ValueError for block_size or top_k below 1 and for q, k, v that do not fit together.
    """
    check_attention(q, k, v)
    return block_sparse_attention(q, k, v, moba_blocks(q, k, block_size, top_k), block_size, method)
