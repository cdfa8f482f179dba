"""Dense attention in the decoder: the default, and the interface that every other attention has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dslib.attention import KVCache, apply_rotary, attention_scores, dense_attention, rotary_angles

if TYPE_CHECKING:
    from dslib.models.decoder import DecoderConfig


class SelfAttention(nn.Module):
    """Multi-head (or grouped-query) causal self-attention with rotary positions.

    Another attention is plugged into :class:`dslib.models.Decoder` as a module with this constructor and ``forward``.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        kv_size = (config.kv_heads or config.heads) * config.head_dim
        self.query = nn.Linear(config.d_model, config.d_model, bias=False)
        self.key = nn.Linear(config.d_model, kv_size, bias=False)
        self.value = nn.Linear(config.d_model, kv_size, bias=False)
        self.output = nn.Linear(config.d_model, config.d_model, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _queries_and_keys(self, x: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(offset, offset + x.shape[1], device=x.device)
        angles = rotary_angles(positions, self.config.head_dim, self.config.rope_base)
        return apply_rotary(self._heads(self.query(x)), angles), apply_rotary(
            self._heads(self.key(x)), angles
        )

    def logits(self, x: Tensor) -> Tensor:
        """Attention logits of a whole sequence, (batch, heads, time, time), −inf where none may look."""
        return attention_scores(*self._queries_and_keys(x, 0))

    def forward(self, x: Tensor, cache: KVCache | None = None, offset: int = 0) -> Tensor:
        """x: (batch, time, d_model) at positions ``offset`` and on → the same shape."""
        q, k = self._queries_and_keys(x, offset)
        v = self._heads(self.value(x))
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        return self.output(dense_attention(q, k, v).transpose(1, 2).flatten(2))
