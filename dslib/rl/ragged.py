"""One token of every row at a time, the rows standing at different places of texts of different lengths."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dslib.attention import apply_rotary, rotary_angles
from dslib.models.decoder import Decoder
from dslib.rl.rollout import is_plain


class RaggedCache:
    """Keys and values of ``rows`` texts, each of a length of its own, that :meth:`step` makes longer or rewrites.

    A row whose text was cut back goes on at the cut: what the cache held from there on is neither read nor needed.
    Raises TypeError for anything but a decoder with plain attention and MLPs.
    """

    def __init__(self, model: Decoder, rows: int, capacity: int = 64) -> None:
        if not is_plain(model):
            raise TypeError(
                f"{type(model).__name__} is not a decoder with dense attention and MLPs, whose rows can stand apart"
            )
        self.model = model
        config, weight = model.config, model.lm_head.weight
        shape = (2, config.layers, rows, config.kv_heads or config.heads, capacity, config.head_dim)
        self.storage = weight.new_zeros(shape)

    def __len__(self) -> int:
        return self.storage.shape[2]

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but these, (n,) int64; they are then numbered in this order."""
        self.storage = self.storage[:, :, rows]

    @torch.no_grad()
    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Read one token of each row, at the place where it stands in its text: both (rows,) int64 → what the
        model feeds its ``lm_head``, (rows, d_model)."""
        model, longest = self.model, int(positions.max()) + 1
        if longest > self.storage.shape[-2]:
            larger = self.storage.new_zeros(*self.storage.shape[:-2], 2 * longest, self.storage.shape[-1])
            larger[..., : self.storage.shape[-2], :] = self.storage
            self.storage = larger
        every = torch.arange(len(tokens), device=tokens.device)
        seen = (torch.arange(longest, device=tokens.device) <= positions[:, None])[:, None, None]
        x = model.embedding(tokens).unsqueeze(1)
        for layer, block in enumerate(model.blocks):
            attention, (keys, values) = block.attention, self.storage[:, layer]
            config = attention.config
            angles = rotary_angles(positions, config.head_dim, config.rope_base)[:, None, None]
            h = block.attention_norm(x)
            q, k, v = (
                part(h).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
                for part in (attention.query, attention.key, attention.value)
            )
            keys[every, :, positions] = apply_rotary(k, angles).squeeze(2)
            values[every, :, positions] = v.squeeze(2)
            found = F.scaled_dot_product_attention(
                apply_rotary(q, angles),
                keys[:, :, :longest],
                values[:, :, :longest],
                attn_mask=seen,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            x = x + attention.output(found.transpose(1, 2).flatten(2))
            x = x + block.mlp(block.mlp_norm(x))
        return model.norm(x).squeeze(1)
