"""Multi-head latent attention: one small vector a position is all that is kept (DeepSeek-V2, arXiv:2405.04434).

Keys and values of all heads are linear maps of a latent c of ``kv_rank`` numbers, and one rotated key of
``rope_dim`` is shared by all heads. What is cached is the *entry* [c, k_rope].

The same attention is computed in two ways. **MHA mode** expands each entry into keys and values of every
head. **MQA mode** absorbs the expansion: q·(W_uk·c) = (W_ukᵀ·q)·c, so that the queries are brought to the
latent space instead, and all heads look at the entry itself; the value map is applied to the result. Sparse
attention uses MQA mode, because there one gathered entry serves all heads (DeepSeek-V3.2, §2.1 and appendix A).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dslib.attention.cache import KVCache
from dslib.attention.dense import causal_mask
from dslib.attention.masked import masked_attention
from dslib.attention.rope import apply_rotary, apply_rotary_interleaved, rotary_angles

_ROTARY = {"interleaved": apply_rotary_interleaved, "half_split": apply_rotary}


class ModelSizes(Protocol):
    """What :class:`MLAConfig` asks of the model whose layer it becomes; :class:`dslib.models.DecoderConfig` has it."""

    d_model: int
    heads: int
    rope_base: float
    norm_eps: float


@dataclass(frozen=True)
class MLAConfig:
    """Sizes of :class:`MLA` a head, small ones; DeepSeek-V3's stand beside them."""

    #: Of the queries' latent (1536; None: queries come from the input without one).
    q_rank: int | None = None
    #: Of the latent that keys and values share (512).
    kv_rank: int = 32
    #: Numbers of a key or query that are not rotated (128) …
    nope_dim: int = 16
    #: … and that are (64).
    rope_dim: int = 8
    #: Of a head's values (128).
    value_dim: int = 16
    #: Which numbers are turned together: ``"interleaved"`` or ``"half_split"``.
    rope_layout: str = "interleaved"
    #: YaRN's factor, whose square multiplies the softmax scale.
    mscale: float = 1.0
    #: How a whole sequence is computed: ``"mha"`` or ``"mqa"``.
    mode: str = "mha"

    def __post_init__(self) -> None:
        for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.q_rank is not None and self.q_rank < 1:
            raise ValueError(f"q_rank={self.q_rank} must be at least 1, or None")
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim={self.rope_dim} must be even: rotary embeddings turn pairs")
        if self.rope_layout not in _ROTARY:
            raise ValueError(
                f"rope_layout={self.rope_layout!r} is unknown; use {' or '.join(map(repr, _ROTARY))}"
            )
        check_mode(self.mode)

    @property
    def entry_dim(self) -> int:
        """Numbers that are cached a position, for all heads together."""
        return self.kv_rank + self.rope_dim

    @property
    def scale(self) -> float:
        """Of the softmax: mscale²/√(nope_dim + rope_dim), in both modes."""
        return self.mscale**2 / math.sqrt(self.nope_dim + self.rope_dim)

    def module(self, config: ModelSizes, layer: int) -> MLA:
        """The attention of a decoder's layer."""
        return MLA(config.d_model, config.heads, self, config.rope_base, config.norm_eps, layer)

    def training_flops_per_token(self, config: ModelSizes, context: int) -> float:
        """Causal scores and values of all heads in MHA mode, forward and backward: half of the keys are seen."""
        return 3 * context * config.heads * (self.nope_dim + self.rope_dim + self.value_dim)


def check_mode(mode: str) -> None:
    """Raises ValueError for anything but "mha" and "mqa"."""
    if mode not in ("mha", "mqa"):
        raise ValueError(f"mode={mode!r} is unknown; use 'mha' or 'mqa'")


class MLA(nn.Module):
    """Multi-head latent attention (arXiv:2405.04434, eq. 9–19; the names of its maps in brackets).

    As attention of a decoder, ``forward`` is :class:`dslib.models.SelfAttention`'s. Decoding with a cache
    runs in MQA mode on the cached entries, whatever ``config.mode`` says.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        config: MLAConfig | None = None,
        rope_base: float = 10_000.0,
        norm_eps: float = 1e-6,
        layer: int = 0,
    ) -> None:
        super().__init__()
        self.config = config = MLAConfig() if config is None else config
        self.heads, self.rope_base, self.layer = heads, rope_base, layer
        q_dim = heads * (config.nope_dim + config.rope_dim)
        if config.q_rank is not None:
            self.query_down = nn.Linear(d_model, config.q_rank, bias=False)  # W_DQ
            self.query_norm = nn.RMSNorm(config.q_rank, eps=norm_eps)
        self.query = nn.Linear(config.q_rank or d_model, q_dim, bias=False)  # W_UQ and W_QR
        self.kv_down = nn.Linear(d_model, config.entry_dim, bias=False)  # W_DKV and W_KR
        self.kv_norm = nn.RMSNorm(config.kv_rank, eps=norm_eps)
        self.key_up = nn.Linear(config.kv_rank, heads * config.nope_dim, bias=False)  # W_UK
        self.value_up = nn.Linear(config.kv_rank, heads * config.value_dim, bias=False)  # W_UV
        self.output = nn.Linear(heads * config.value_dim, d_model, bias=False)  # W_O

    def query_latent(self, x: Tensor) -> Tensor:
        """What queries are made of, (batch, time, q_rank): the normed latent, or x itself without one."""
        return x if self.config.q_rank is None else self.query_norm(self.query_down(x))

    def queries(self, latent: Tensor, offset: int = 0) -> Tensor:
        """Queries of positions ``offset`` and on: (batch, heads, time, nope_dim + rope_dim), rotated."""
        q = self.query(latent).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        plain, turned = q.split((self.config.nope_dim, self.config.rope_dim), dim=-1)
        return torch.cat((plain, self._rotated(turned, offset)), dim=-1)

    def entries(self, x: Tensor, offset: int = 0) -> Tensor:
        """What is cached: (batch, time, kv_rank + rope_dim), the normed latent and the rotated key."""
        latent, turned = self.kv_down(x).split((self.config.kv_rank, self.config.rope_dim), dim=-1)
        return torch.cat((self.kv_norm(latent), self._rotated(turned, offset)), dim=-1)

    def expand(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """MHA mode: keys (batch, heads, time, nope_dim + rope_dim) and values (…, value_dim) of all heads."""
        latent, turned = entries.split((self.config.kv_rank, self.config.rope_dim), dim=-1)
        key, value = (
            up(latent).unflatten(-1, (self.heads, -1)).transpose(1, 2) for up in (self.key_up, self.value_up)
        )
        return torch.cat((key, turned.unsqueeze(1).expand(-1, self.heads, -1, -1)), dim=-1), value

    def absorb(self, q: Tensor) -> Tensor:
        """MQA mode: queries that look at entries, (batch, heads, time, kv_rank + rope_dim)."""
        plain, turned = q.split((self.config.nope_dim, self.config.rope_dim), dim=-1)
        up = self.key_up.weight.unflatten(0, (self.heads, -1))
        return torch.cat((torch.einsum("bhtn,hnr->bhtr", plain, up), turned), dim=-1)

    def unabsorb(self, latent: Tensor) -> Tensor:
        """MQA mode: weighted latents (batch, heads, time, kv_rank) → the heads' values (…, value_dim)."""
        return torch.einsum("bhtr,hvr->bhtv", latent, self.value_up.weight.unflatten(0, (self.heads, -1)))

    def attend(self, q: Tensor, entries: Tensor, mode: str, mask: Tensor | None = None) -> Tensor:
        """Causal attention of ``q``, the last positions, over ``entries`` → (batch, heads, time, value_dim).

        ``mask``: bool, broadcast to (batch, heads, time, keys), True where a query may look, instead of the
        causal one; a query that may look nowhere gives 0.
        """
        check_mode(mode)
        if mask is None:
            mask = causal_mask(q.shape[-2], entries.shape[-2], q.device)
        if mode == "mha":
            return masked_attention(q, *self.expand(entries), mask, self.config.scale)
        # All heads look at the same entries: they are more queries of one head, and nothing is copied.
        shape = q.shape[:3]
        mask = mask.expand(*shape, entries.shape[-2]).flatten(1, 2).unsqueeze(1)
        k = entries.unsqueeze(1)
        q = self.absorb(q).flatten(1, 2).unsqueeze(1)
        latent = masked_attention(q, k, k[..., : self.config.kv_rank], mask, self.config.scale)
        return self.unabsorb(latent.squeeze(1).unflatten(1, shape[1:]))

    def forward(
        self, x: Tensor, cache: KVCache | None = None, offset: int = 0, mode: str | None = None
    ) -> Tensor:
        """x: (batch, time, d_model) at positions ``offset`` and on → the same shape."""
        q, entries = self.queries(self.query_latent(x), offset), self.entries(x, offset)
        if cache is not None:
            entries = cached_entries(cache, self.layer, entries)
        mode = mode or (self.config.mode if cache is None else "mqa")
        return self.output(self.attend(q, entries, mode).transpose(1, 2).flatten(2))

    def _rotated(self, x: Tensor, offset: int) -> Tensor:
        positions = torch.arange(offset, offset + x.shape[-2], device=x.device)
        angles = rotary_angles(positions, self.config.rope_dim, self.rope_base)
        return _ROTARY[self.config.rope_layout](x, angles)


def cached_entries(cache: KVCache, layer: Any, entries: Tensor) -> Tensor:
    """Append (batch, time, dim) to a layer of ``cache`` and return all that it holds."""
    stored, _ = cache.append(
        layer, entries.unsqueeze(1), entries.new_empty(*entries.shape[:1], 1, entries.shape[1], 0)
    )
    return stored.squeeze(1)
