"""Sparse attention in the decoder: a sliding window, MoBA, and NSA, as ``DecoderConfig.attention``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dslib.attention import (
    KVCache,
    NSASizes,
    apply_rotary,
    attention_scores,
    block_mask,
    block_sparse_attention,
    moba_scores,
    nsa_attention,
    nsa_scores,
    rotary_angles,
    sliding_window_attention,
    sliding_window_mask,
    top_blocks,
)
from dslib.attention.masked import check_count
from dslib.attention.nsa import KeysAndValues, complete_blocks
from dslib.models.layers.dense import SelfAttention

if TYPE_CHECKING:
    from dslib.models.decoder import DecoderConfig


@dataclass(frozen=True)
class SlidingWindowConfig:
    """Every layer attends to the last ``window`` keys (4096 in Mistral 7B, arXiv:2310.06825, Table 1)."""

    window: int = 4096

    def __post_init__(self) -> None:
        check_count("window", self.window)

    def module(self, config: DecoderConfig, layer: int) -> nn.Module:
        """The attention module of a layer."""
        return SlidingWindow(config, layer, self.window)

    def training_flops_per_token(self, config: DecoderConfig, context: int) -> float:
        """Forward and backward, averaged over the positions of a context: 12·d_model a key seen."""
        return 12 * config.d_model * _mean_up_to(self.window, context)

    def keys_read(self, context: int) -> float:
        """Pairs of key and value that decoding the token after ``context − 1`` others reads, own included."""
        return min(self.window, context)


@dataclass(frozen=True)
class MoBAConfig:
    """MoBA with the sizes of arXiv:2502.13189, §3.1."""

    #: Keys in a block.
    block_size: int = 512
    #: Blocks that a query attends to, its own among them.
    top_k: int = 3
    #: So many of the last layers attend to everything (§3.2, the layer-wise hybrid); the weights are the same.
    full_layers: int = 0
    #: What chooses the blocks: the ``"gate"``, or for comparison a fixed ``"random"`` pattern.
    selection: str = "gate"

    def __post_init__(self) -> None:
        check_count("block_size", self.block_size)
        check_count("top_k", self.top_k)
        check_count("full_layers", self.full_layers, least=0)
        if self.selection not in ("gate", "random"):
            raise ValueError(f"selection={self.selection!r} is unknown; use 'gate' or 'random'")

    def module(self, config: DecoderConfig, layer: int) -> nn.Module:
        """The attention module of a layer: MoBA, or dense attention in the last ``full_layers``."""
        full = layer >= config.layers - self.full_layers
        return SelfAttention(config, layer) if full else MoBA(config, layer, self)

    def training_flops_per_token(self, config: DecoderConfig, context: int) -> float:
        """Forward and backward, averaged over positions, and over layers where some are full: 12·d_model a key
        seen, and for the gate 2·d_model a block (forward alone)."""
        full = min(self.full_layers, config.layers) / config.layers
        own, blocks = _own_block(context, self.block_size), torch.arange(context) // self.block_size
        keys = own + blocks.clamp(max=self.top_k - 1) * self.block_size
        sparse = 12 * keys.double().mean() + 2 * blocks.double().mean()
        return config.d_model * (full * 6 * context + (1 - full) * sparse.item())

    def keys_read(self, context: int) -> float:
        """Pairs of key and value that decoding the token after ``context − 1`` others reads, in a layer of MoBA:
        those of the chosen blocks, and half a pair (a mean key) for each block before."""
        blocks = (context - 1) // self.block_size
        return (
            (context - 1) % self.block_size + 1 + min(blocks, self.top_k - 1) * self.block_size + blocks / 2
        )


@dataclass(frozen=True)
class NSAConfig:
    """NSA with the sizes of arXiv:2502.11089, §4.1."""

    sizes: NSASizes = field(default_factory=NSASizes)
    #: Inner size of φ, the MLP that compresses a block (None: 4·head_dim; the paper does not say).
    compress_hidden: int | None = None
    #: Whether the block's mean is added to what φ makes of it, which then need not be learnt from nothing.
    compress_mean: bool = False
    #: What chooses the blocks: compressed attention, ``"learned"``, or for comparison a fixed ``"random"`` pattern, or
    #: ``"own_keys"``: as in MoBA the mean of the selected branch's own keys.
    selection: str = "learned"

    def __post_init__(self) -> None:
        if self.compress_hidden is not None:
            check_count("compress_hidden", self.compress_hidden)
        if self.selection not in ("learned", "random", "own_keys"):
            raise ValueError(
                f"selection={self.selection!r} is unknown; use 'learned', 'random' or 'own_keys'"
            )

    def module(self, config: DecoderConfig, layer: int) -> nn.Module:
        """The attention module of a layer."""
        return NSA(config, layer, self)

    def training_flops_per_token(self, config: DecoderConfig, context: int) -> float:
        """Forward and backward, averaged over the positions: 12·d_model a key or compressed block seen; and φ's
        weights, which multiply once a block and head, not once a token."""
        s = self.sizes
        at = torch.arange(context)
        own = at // s.select_block
        selected = _own_block(context, s.select_block) + own.clamp(max=s.selected - 1) * s.select_block
        compressed = ((at - s.compress_block + 1).div(s.compress_stride, rounding_mode="floor") + 1).clamp(
            min=0
        )
        keys = (selected + compressed).double().mean().item() + _mean_up_to(s.window, context)
        kv_heads = config.kv_heads or config.heads
        visits = kv_heads * s.compressed(context) / context
        return 12 * config.d_model * keys + 6 * self.phi(config) * (visits - 1)

    def hidden(self, config: DecoderConfig) -> int:
        """The inner size of φ."""
        return self.compress_hidden or 4 * config.head_dim

    def phi(self, config: DecoderConfig) -> int:
        """How many weights multiply when a head's block is compressed, its keys and its values."""
        return 2 * self.hidden(config) * (self.sizes.compress_block * config.head_dim + config.head_dim)

    def keys_read(self, context: int) -> float:
        """Pairs of key and value that decoding the token after ``context − 1`` others reads: compressed blocks,
        selected blocks and the window (the paper's Table 4 counts each in full)."""
        s = self.sizes
        own, blocks = (context - 1) % s.select_block + 1, (context - 1) // s.select_block
        selected = own + min(blocks, s.selected - 1) * s.select_block
        return s.compressed(context) + selected + min(s.window, context)


class SlidingWindow(SelfAttention):
    """Self-attention to the last ``window`` keys; its cache keeps no more than that (a rolling buffer)."""

    def __init__(self, config: DecoderConfig, layer: int, window: int) -> None:
        super().__init__(config, layer)
        self.window = window

    def logits(self, x: Tensor) -> Tensor:
        """Attention logits of a whole sequence, (batch, heads, time, time), −inf where none may look."""
        mask = sliding_window_mask(x.shape[1], x.shape[1], self.window, x.device)
        return super().logits(x).masked_fill(~mask, float("-inf"))

    def forward(self, x: Tensor, cache: KVCache | None = None, offset: int = 0) -> Tensor:
        """x: (batch, time, d_model) at positions ``offset`` and on → the same shape."""
        q, k = self._queries_and_keys(x, offset)
        v = self._heads(self.value(x))
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
            cache.layers[self.layer] = _last(k, self.window - 1), _last(v, self.window - 1)
        return self.output(sliding_window_attention(q, k, v, self.window).transpose(1, 2).flatten(2))


class MoBA(SelfAttention):
    """Self-attention to the blocks that MoBA's gate chooses, head by head; no weights beyond dense attention's."""

    def __init__(self, config: DecoderConfig, layer: int, moba: MoBAConfig) -> None:
        super().__init__(config, layer)
        self.moba = moba

    def _blocks(self, q: Tensor, k: Tensor) -> Tensor:
        scores = moba_scores(q, k, self.moba.block_size)
        if self.moba.selection == "random":
            scores = _shuffled(scores, k.shape[2], self.layer)
        return top_blocks(scores, self.moba.top_k)

    def logits(self, x: Tensor) -> Tensor:
        """Attention logits of a whole sequence, (batch, heads, time, time), −inf where none may look."""
        q, k = self._queries_and_keys(x, 0)
        mask = block_mask(self._blocks(q, k), self.moba.block_size, k.shape[2])
        return attention_scores(q, k).masked_fill(~mask, float("-inf"))

    def forward(self, x: Tensor, cache: KVCache | None = None, offset: int = 0) -> Tensor:
        """x: (batch, time, d_model) at positions ``offset`` and on → the same shape."""
        q, k = self._queries_and_keys(x, offset)
        v = self._heads(self.value(x))
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        out = block_sparse_attention(q, k, v, self._blocks(q, k), self.moba.block_size)
        return self.output(out.transpose(1, 2).flatten(2))


class Compression(nn.Module):
    """φ of NSA eq. 7: the keys (or values) of a block, each with the embedding of its place in the block, through
    a two-layer MLP with GELU into one. With ``mean``, their mean is added, and the MLP starts at zero. All
    key–value heads of a layer share it."""

    def __init__(self, dim: int, length: int, hidden: int, mean: bool = False) -> None:
        super().__init__()
        self.mean = mean
        self.position_embeddings = nn.Parameter(torch.zeros(length, dim))
        self.inner = nn.Linear(length * dim, hidden, bias=False)
        self.outer = nn.Linear(hidden, dim, bias=False)

    def initialize(self, generator: torch.Generator) -> None:
        """What :class:`Decoder` calls once all matrices are drawn."""
        if self.mean:
            nn.init.zeros_(self.outer.weight)

    def forward(self, blocks: Tensor) -> Tensor:
        """blocks: (..., length, dim) → (..., dim)."""
        out = self.outer(F.gelu(self.inner((blocks + self.position_embeddings).flatten(-2))))
        return out + blocks.mean(-2) if self.mean else out


class NSA(SelfAttention):
    """NSA's three branches with keys and values of their own, mixed by gates of the query's token.

    What the paper leaves open, and what is done here: φ compresses keys before the rotary turn, and a compressed
    key is turned as if it stood at its block's first position; the gates are one linear map and a sigmoid.
    """

    def __init__(self, config: DecoderConfig, layer: int, nsa: NSAConfig) -> None:
        super().__init__(config, layer)  # its key and value maps are those of the selected branch
        self.nsa = nsa
        kv_size = (config.kv_heads or config.heads) * config.head_dim
        for name in ("window_key", "window_value", "compressed_key", "compressed_value"):
            setattr(self, name, nn.Linear(config.d_model, kv_size, bias=False))
        self.gate = nn.Linear(config.d_model, 3 * config.heads, bias=False)
        sizes = config.head_dim, nsa.sizes.compress_block, nsa.hidden(config), nsa.compress_mean
        self.compress_key, self.compress_value = Compression(*sizes), Compression(*sizes)

    def _rotated(self, x: Tensor, offset: int, stride: int = 1) -> Tensor:
        at = offset + stride * torch.arange(x.shape[2], device=x.device)
        return apply_rotary(x, rotary_angles(at, self.config.head_dim, self.config.rope_base))

    def _compressed(self, x: Tensor, cache: KVCache | None) -> KeysAndValues:
        """All complete blocks so far. The cache keeps them, and the tokens from the first incomplete one on."""
        sizes = self.nsa.sizes
        k, v = self._heads(self.compressed_key(x)), self._heads(self.compressed_value(x))
        old_k, old_v = k[:, :, :0], v[:, :, :0]
        if cache is not None and ("nsa", self.layer) in cache.states:
            old_k, old_v, rest_k, rest_v = cache.states["nsa", self.layer]
            k, v = torch.cat((rest_k, k), dim=2), torch.cat((rest_v, v), dim=2)
        new_k, new_v = (
            phi(complete_blocks(y, sizes.compress_block, sizes.compress_stride))
            for phi, y in ((self.compress_key, k), (self.compress_value, v))
        )
        new_k = self._rotated(new_k, old_k.shape[2] * sizes.compress_stride, sizes.compress_stride)
        used = new_k.shape[2] * sizes.compress_stride
        all_k, all_v = torch.cat((old_k, new_k), dim=2), torch.cat((old_v, new_v), dim=2)
        if cache is not None:
            cache.states["nsa", self.layer] = all_k, all_v, *(_last(y, y.shape[2] - used) for y in (k, v))
        return all_k, all_v

    def _window(self, x: Tensor, cache: KVCache | None, offset: int) -> KeysAndValues:
        k, v = self._rotated(self._heads(self.window_key(x)), offset), self._heads(self.window_value(x))
        if cache is not None:
            if ("nsa window", self.layer) in cache.states:
                old_k, old_v = cache.states["nsa window", self.layer]
                k, v = torch.cat((old_k, k), dim=2), torch.cat((old_v, v), dim=2)
            keep = self.nsa.sizes.window - 1
            cache.states["nsa window", self.layer] = _last(k, keep), _last(v, keep)
        return k, v

    def _blocks(self, q: Tensor, k: Tensor, compressed_k: Tensor) -> Tensor:
        scores = nsa_scores(q, compressed_k, k.shape[2], self.nsa.sizes)
        if self.nsa.selection == "random":
            scores = _shuffled(scores, k.shape[2], self.layer)
        if self.nsa.selection == "own_keys":
            own = moba_scores(q, k, self.nsa.sizes.select_block).unflatten(1, (k.shape[1], -1)).sum(2)
            scores = torch.where(scores.isinf(), scores, own)
        return top_blocks(scores, self.nsa.sizes.selected)

    def logits(self, x: Tensor) -> Tensor:
        """Logits of the selected branch, (batch, heads, time, time), −inf where none may look."""
        q, k = self._queries_and_keys(x, 0)
        blocks = self._blocks(q, k, self._compressed(x, None)[0])
        mask = block_mask(blocks, self.nsa.sizes.select_block, x.shape[1])
        mask = mask.repeat_interleave(q.shape[1] // mask.shape[1], dim=1)
        return attention_scores(q, k).masked_fill(~mask, float("-inf"))

    def forward(self, x: Tensor, cache: KVCache | None = None, offset: int = 0) -> Tensor:
        """x: (batch, time, d_model) at positions ``offset`` and on → the same shape."""
        q, k = self._queries_and_keys(x, offset)
        v = self._heads(self.value(x))
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        compressed, window = self._compressed(x, cache), self._window(x, cache, offset)
        gates = self.gate(x).sigmoid().unflatten(-1, (-1, 3)).transpose(1, 2)
        blocks = None if self.nsa.selection == "learned" else self._blocks(q, k, compressed[0])
        out = nsa_attention(q, compressed, (k, v), window, gates, self.nsa.sizes, blocks)
        return self.output(out.transpose(1, 2).flatten(2))


def _last(x: Tensor, count: int) -> Tensor:
    """The last ``count`` positions of x (batch, heads, time, dim), or all when there are fewer; a copy, so that
    what is left out is freed."""
    return x[:, :, max(0, x.shape[2] - count) :].contiguous()


def _shuffled(scores: Tensor, keys: int, layer: int) -> Tensor:
    """Random numbers in the place of the finite scores (batch, heads, queries, blocks): the same ones for a
    layer, head, position and block in every call, whatever the batch and however long the sequence is."""
    _, heads, queries, blocks = scores.shape
    head = torch.arange(heads, device=scores.device)[:, None, None]
    at = torch.arange(keys - queries, keys, device=scores.device)[:, None]
    mixed = (
        (layer + 1) * 7_919
        + head * 104_729
        + at * 1_299_709
        + torch.arange(blocks, device=scores.device) * 15_485_863
    )
    for factor in (
        0x45D9F3B,
        0x119DE1F3,
    ):  # an integer hash: multiply, and fold the high bits back, in 32 bits
        mixed = ((mixed ^ (mixed >> 16)) * factor) & 0xFFFFFFFF
    return torch.where(scores.isinf(), scores, (mixed ^ (mixed >> 16)).to(scores.dtype))


def _mean_up_to(most: int, context: int) -> float:
    """The mean of min(t, most) over t = 1 … context."""
    short = min(most, context)
    return (short * (short + 1) / 2 + (context - short) * most) / context


def _own_block(context: int, block_size: int) -> Tensor:
    """How many keys of its own block each of ``context`` positions sees: (context,) int64."""
    return torch.arange(context) % block_size + 1
