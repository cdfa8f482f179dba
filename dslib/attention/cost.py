"""What attention costs, counted: FLOPs and bytes of dense and of sparse latent attention, part by part.

A multiply-add is two FLOPs. Counted is what grows with the context; the projections, which cost every token
the same, are apart. Batch 1, one layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes that a cost depends on; the defaults are DeepSeek-V3.2's, with ``kv_bytes`` bfloat16 entries and
    ``index_bytes`` FP8 indexer keys (arXiv:2512.02556; arXiv:2412.19437, §4.2)."""

    heads: int = 128
    kv_rank: int = 512
    rope_dim: int = 64
    nope_dim: int = 128
    value_dim: int = 128
    indexer_heads: int = 64
    indexer_dim: int = 128
    top_k: int = 2048
    kv_bytes: float = 2.0
    index_bytes: float = 1.0

    @property
    def entry_dim(self) -> int:
        """Numbers of a cached entry."""
        return self.kv_rank + self.rope_dim

    @property
    def absorbed_flops(self) -> float:
        """FLOPs a query and key in MQA mode, all heads: scores over entries, weighted sum of latents."""
        return 2.0 * self.heads * (self.entry_dim + self.kv_rank)

    @property
    def expanded_flops(self) -> float:
        """FLOPs a query and key in MHA mode, all heads."""
        return 2.0 * self.heads * (self.nope_dim + self.rope_dim + self.value_dim)

    @property
    def indexer_flops(self) -> float:
        """FLOPs a query and key of the indexer: products, ReLU and weighted sum (eq. 1)."""
        return self.indexer_heads * (2.0 * self.indexer_dim + 3)


Cost = dict[str, NDArray[np.float64]]


def decode_flops(context: ArrayLike, sizes: AttentionSizes = AttentionSizes()) -> dict[str, Cost]:
    """FLOPs of one token that sees ``context`` keys → {"dense": parts, "sparse": parts}, arrays of its shape.

    The parts are "attention" (MQA mode) and, when sparse, "indexer" and "selection" (one comparison a key, as a
    streaming top-k needs at least).
    """
    L = np.asarray(context, dtype=np.float64)
    nothing = np.zeros_like(L)
    seen = np.minimum(L, sizes.top_k)
    return {
        "dense": {"attention": L * sizes.absorbed_flops, "indexer": nothing, "selection": nothing},
        "sparse": {
            "attention": seen * sizes.absorbed_flops,
            "indexer": L * sizes.indexer_flops,
            "selection": L.copy(),
        },
    }


def prefill_flops(length: ArrayLike, sizes: AttentionSizes = AttentionSizes()) -> dict[str, Cost]:
    """FLOPs of all ``length`` tokens of a prompt: dense in MHA mode, sparse in MQA mode; parts as in
    :func:`decode_flops`."""
    L = np.asarray(length, dtype=np.float64)
    pairs = L * (L + 1) / 2
    k = np.minimum(L, sizes.top_k)
    seen = k * (k + 1) / 2 + (L - k) * k
    nothing = np.zeros_like(L)
    return {
        "dense": {"attention": pairs * sizes.expanded_flops, "indexer": nothing, "selection": nothing},
        "sparse": {
            "attention": seen * sizes.absorbed_flops,
            "indexer": pairs * sizes.indexer_flops,
            "selection": pairs,
        },
    }


def decode_bytes(context: ArrayLike, sizes: AttentionSizes = AttentionSizes()) -> dict[str, Cost]:
    """Bytes of cache that one token reads: entries, and when sparse all indexer keys; parts as in
    :func:`decode_flops`."""
    L = np.asarray(context, dtype=np.float64)
    entry = sizes.entry_dim * sizes.kv_bytes
    nothing = np.zeros_like(L)
    return {
        "dense": {"attention": L * entry, "indexer": nothing, "selection": nothing},
        "sparse": {
            "attention": np.minimum(L, sizes.top_k) * entry,
            "indexer": L * sizes.indexer_dim * sizes.index_bytes,
            "selection": nothing,
        },
    }


def cache_numbers(sizes: AttentionSizes = AttentionSizes()) -> dict[str, int]:
    """Numbers cached a position and layer: {"MHA": expanded keys and values of all heads, "MQA": the entry,
    "MQA + indexer": and the indexer's key}."""
    expanded = sizes.heads * (sizes.nope_dim + sizes.rope_dim + sizes.value_dim)
    entry = sizes.entry_dim
    return {"MHA": expanded, "MQA": entry, "MQA + indexer": entry + sizes.indexer_dim}


def total(parts: Cost) -> NDArray[np.float64]:
    """The sum of the parts."""
    return np.sum(list(parts.values()), axis=0)


def growth_exponent(length: ArrayLike, cost: ArrayLike) -> float:
    """b of cost ∝ length^b, fitted to the logarithms by least squares. Raises ValueError for fewer than two
    lengths or anything that is not positive."""
    x, y = np.asarray(length, dtype=np.float64), np.asarray(cost, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1 or len(x) < 2:
        raise ValueError(f"length {x.shape} and cost {y.shape} must be the same (n,), n at least 2")
    if not (x > 0).all() or not (y > 0).all():
        raise ValueError("length and cost must be positive: their logarithms are fitted")
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
