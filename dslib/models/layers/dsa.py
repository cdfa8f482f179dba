"""Latent attention that becomes sparse: the attention of DeepSeek-V3.2 as layer of the small decoder.

One set of weights serves three stages (arXiv:2512.02556, §2.1.1): ``"dense"`` attention; ``"warm-up"``, dense
attention whose weights teach the indexer (eq. 3); and ``"sparse"``, attention to the selected keys alone, which
teaches the indexer about those (eq. 4). The indexer sees its inputs detached: it learns from its own loss
only, and the rest of the model only from the language model's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dslib.attention.cache import KVCache
from dslib.attention.dense import causal_mask
from dslib.attention.dsa import (
    LightningIndexer,
    indexer_kl_loss,
    indexer_topk,
    select_topk,
    selection_mask,
    sparse_attention,
)
from dslib.attention.fp8 import fp8_rounded
from dslib.attention.masked import attention_weights
from dslib.attention.mla import MLA, MLAConfig

if TYPE_CHECKING:
    from dslib.models.decoder import DecoderConfig

STAGES = ("dense", "warm-up", "sparse")
SELECTIONS = ("indexer", "window", "random")


@dataclass(frozen=True)
class SparseMLAConfig:
    """Sizes of :class:`SparseMLA`, small ones; DeepSeek-V3.2's stand beside them."""

    mla: MLAConfig = field(default_factory=MLAConfig)
    #: (64)
    indexer_heads: int = 4
    #: Of an indexer's head (128).
    indexer_dim: int = 16
    #: How many numbers of it are rotated.
    indexer_rope_dim: int = 8
    #: Which of them are turned together.
    indexer_rope_layout: str = "half_split"
    #: Keys that a query attends to in the sparse stage (2048).
    top_k: int = 32
    #: ``"dense"``, ``"warm-up"`` (dense attention teaches the indexer) or ``"sparse"``.
    stage: str = "dense"
    #: What chooses the keys in the sparse stage: the ``"indexer"``, or for comparison the last positions
    #: (``"window"``) or chance (``"random"``).
    selection: str = "indexer"
    #: :func:`dslib.attention.indexer_kl_loss`'s.
    target: str = "selected"
    #: Whether the indexer's queries and keys are rounded as FP8 would, whenever no gradient is asked for.
    indexer_fp8: bool = False

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1")
        for name, known in (("stage", STAGES), ("selection", SELECTIONS), ("target", ("selected", "full"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use one of {known}")

    def module(self, config: DecoderConfig, layer: int) -> SparseMLA:
        """The attention of a decoder's layer."""
        return SparseMLA(config, self, layer)

    def training_flops_per_token(self, config: DecoderConfig, context: int) -> float:
        """Forward and backward: attention over the keys that are seen, and the indexer's scores of all."""
        if self.stage == "dense":
            return self.mla.training_flops_per_token(config, context)
        scores = 3 * context * self.indexer_heads * (self.indexer_dim + 2)
        seen = context if self.stage == "warm-up" else min(context, 2 * self.top_k)
        return self.mla.training_flops_per_token(config, seen) + scores * (self.selection == "indexer")


class SparseMLA(MLA):
    """Multi-head latent attention with a lightning indexer.

    After a forward pass with gradients ``auxiliary_loss`` is the indexer's loss, None where it learns nothing
    (dense stage, or another selection). Whole sequences are computed in ``config.mla.mode``: ``"mha"`` under a
    mask, as short sequences are in the paper, ``"mqa"`` gathered, with memory that does not grow with the
    square of the length when no gradient is asked for. Decoding with a cache gathers.
    """

    def __init__(self, decoder: DecoderConfig, config: SparseMLAConfig, layer: int) -> None:
        super().__init__(
            decoder.d_model, decoder.heads, config.mla, decoder.rope_base, decoder.norm_eps, layer
        )
        self.sparse = config
        self.indexer = LightningIndexer(
            decoder.d_model,
            config.indexer_heads,
            config.indexer_dim,
            config.indexer_rope_dim,
            config.mla.q_rank,
            decoder.rope_base,
            config.indexer_rope_layout,
        )
        self.auxiliary_loss: Tensor | None = None
        self._chance = torch.Generator().manual_seed(layer)

    def forward(self, x: Tensor, cache: KVCache | None = None, offset: int = 0) -> Tensor:
        """x: (batch, time, d_model) at positions ``offset`` and on → the same shape."""
        self.auxiliary_loss = None
        latent = self.query_latent(x)
        q, entries = self.queries(latent, offset), self.entries(x, offset)
        learns = (
            torch.is_grad_enabled() and self.sparse.stage != "dense" and self.sparse.selection == "indexer"
        )
        if cache is not None:
            entries, keys = self._cached(cache, entries, x, offset)
            if self.sparse.stage == "sparse":
                return self._gathered(q, entries, self._indices(x, latent, keys, offset))
            return self._output(self.attend(q, entries, "mqa"))
        if learns:
            return self._teaching(x, latent, q, entries)
        if self.sparse.stage != "sparse":
            return self._output(self.attend(q, entries, self.config.mode))
        indices = self._indices(x, latent, None, 0)
        if self.config.mode == "mqa":
            return self._gathered(q, entries, indices)
        mask = selection_mask(indices, x.shape[1]).unsqueeze(1)
        return self._output(self.attend(q, entries, "mha", mask))

    def weights(self, x: Tensor) -> Tensor:
        """Dense attention weights of a whole sequence, (batch, heads, time, time)."""
        k, _ = self.expand(self.entries(x))
        mask = causal_mask(x.shape[1], x.shape[1], x.device)
        return attention_weights(self.queries(self.query_latent(x)), k, mask, self.config.scale)

    def select(self, x: Tensor) -> Tensor:
        """What each query of a whole sequence selects, (batch, time, top_k) int64."""
        return self._indices(x, self.query_latent(x), None, 0)

    def _teaching(self, x: Tensor, latent: Tensor, q: Tensor, entries: Tensor) -> Tensor:
        k, v = self.expand(entries)
        scores = self.indexer(x.detach(), latent.detach())
        mask = causal_mask(x.shape[1], x.shape[1], x.device)
        indices = None
        if self.sparse.stage == "sparse":
            indices = select_topk(scores, self.sparse.top_k)
            mask = selection_mask(indices, x.shape[1]).unsqueeze(1)
        weights = attention_weights(q, k, mask, self.config.scale)
        taught = weights
        if indices is not None and self.sparse.target == "full":
            with torch.no_grad():
                taught = attention_weights(
                    q, k, causal_mask(x.shape[1], x.shape[1], x.device), self.config.scale
                )
        self.auxiliary_loss = indexer_kl_loss(scores, taught, indices, self.sparse.target)
        return self._output(weights @ v)

    @torch.no_grad()
    def _indices(self, x: Tensor, latent: Tensor, keys: Tensor | None, offset: int) -> Tensor:
        batch, time = x.shape[:2]
        if self.sparse.selection == "indexer":
            q, w = self.indexer.queries(x, latent, offset)
            keys = self.indexer.keys(x) if keys is None else keys
            if self.sparse.indexer_fp8:
                q, keys = fp8_rounded(q), fp8_rounded(keys)
            return indexer_topk(q, keys, w, self.sparse.top_k, offset)
        position = torch.arange(offset, offset + time, device=x.device).unsqueeze(1)
        if self.sparse.selection == "window":
            last = position - torch.arange(self.sparse.top_k, device=x.device)
            return last.clamp_min(-1).expand(batch, -1, -1)
        chance = torch.rand(batch, time, offset + time, generator=self._chance).to(x.device)
        return select_topk(chance, self.sparse.top_k, offset)

    def _gathered(self, q: Tensor, entries: Tensor, indices: Tensor) -> Tensor:
        latent = sparse_attention(self.absorb(q), entries, indices, self.config.kv_rank, self.config.scale)
        return self._output(self.unabsorb(latent))

    def _output(self, values: Tensor) -> Tensor:
        return self.output(values.transpose(1, 2).flatten(2))

    def _cached(self, cache: KVCache, entries: Tensor, x: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        new = entries.unsqueeze(1), self.indexer.keys(x, offset).unsqueeze(1)
        stored, keys = cache.append(self.layer, *new)
        return stored.squeeze(1), keys.squeeze(1)
