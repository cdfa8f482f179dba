"""A small Llama-style decoder: RMSNorm, rotary positions, SwiGLU, attention of one's choice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dslib.attention import KVCache
from dslib.models.layers.dense import SelfAttention
from dslib.models.moe import MoE, MoEConfig


class AttentionConfig(Protocol):
    """What a frozen dataclass must offer to stand as ``DecoderConfig.attention``.

    A module that draws more than matrices, or biases, has a method ``initialize(generator)``.
    """

    def module(self, config: DecoderConfig, layer: int) -> nn.Module:
        """The attention module of a layer, with :class:`SelfAttention`'s ``forward``."""

    def training_flops_per_token(self, config: DecoderConfig, context: int) -> float:
        """FLOPs of one layer's attention, forward and backward, beyond those of its weights."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a :class:`Decoder`."""

    vocab_size: int = 256
    d_model: int = 64
    layers: int = 2
    heads: int = 4
    #: Heads of keys and values, shared by groups of query heads (None: as many as heads).
    kv_heads: int | None = None
    #: ``"swiglu"`` (three matrices, Llama) or ``"two_layer"`` (two matrices [4H, H] with GELU, as in Moonlight's
    #: Table 1).
    mlp: str = "swiglu"
    #: Its inner size (None: 8/3·d_model rounded up to a multiple of 16 for SwiGLU, 4·d_model for two layers).
    mlp_size: int | None = None
    #: Whether the output head is the embedding.
    tie_embeddings: bool = False
    #: Of the rotary embedding's wavelengths.
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    #: A mixture of such MLPs in the place of each (None: none).
    moe: MoEConfig | None = None
    #: Another attention than the dense one.
    attention: AttentionConfig | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.d_model % self.heads or self.head_dim % 2:
            raise ValueError(
                f"d_model={self.d_model} over heads={self.heads} must give an even whole head size"
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.mlp not in ("swiglu", "two_layer"):
            raise ValueError(f"mlp={self.mlp!r} is unknown; use 'swiglu' or 'two_layer'")

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.d_model // self.heads

    @property
    def hidden(self) -> int:
        """Size of the MLP's inner space."""
        if self.mlp_size is not None:
            return self.mlp_size
        return 4 * self.d_model if self.mlp == "two_layer" else 16 * math.ceil(8 * self.d_model / 3 / 16)

    def build(self, seed: int = 0) -> Decoder:
        """The model of these sizes, its weights drawn from ``seed``."""
        return Decoder(self, seed=seed)


class MLP(nn.Module):
    """SwiGLU, W_down(silu(W_gate·x) ⊙ W_up·x) (arXiv:2002.05202), or W_down·gelu(W_up·x)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.d_model, config.hidden, bias=False) if config.mlp == "swiglu" else None
        self.up = nn.Linear(config.d_model, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., d_model) → the same shape."""
        inner = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(inner)


class Block(nn.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: DecoderConfig, layer: int, attention: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = attention(config, layer)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp = MLP(config) if config.moe is None else _mixture(config, config.moe)

    def forward(self, x: Tensor, cache: KVCache | None = None, offset: int = 0) -> Tensor:
        """x: (batch, time, d_model) → the same shape."""
        x = x + self.attention(self.attention_norm(x), cache=cache, offset=offset)
        return x + self.mlp(self.mlp_norm(x))


def _mixture(config: DecoderConfig, moe: MoEConfig) -> MoE:
    return MoE(moe, config.d_model, config.hidden, lambda size: MLP(replace(config, mlp_size=size, moe=None)))


@torch.no_grad()
def initialize_weights(model: nn.Module, writers: tuple[str, ...], layers: int, seed: int) -> None:
    """Draw a model's weights from ``seed`` alone, as :class:`Decoder` describes; vectors stay as they are.

    ``writers``: how the names of the maps end that write into the residual stream. What modules with a method
    ``initialize(generator)`` set there comes last.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            continue
        if name.startswith(("embedding", "lm_head")):
            deviation = 0.02
        else:
            deviation = weight.shape[1] ** -0.5
            if name.endswith(writers):
                deviation /= math.sqrt(2 * layers)
        weight.normal_(0, deviation, generator=generator)
    for module in model.modules():
        if hasattr(module, "initialize"):
            module.initialize(generator)


class Decoder(nn.Module):
    """A decoder-only language model.

    ``attention(config, layer)`` makes the attention module of a layer; without it, ``config.attention``
    says. Weights come from ``seed`` alone: normal of deviation 1/√(inputs) — with the two maps that write
    into the residual stream divided by √(2·layers) — and 0.02 for embedding and head.
    """

    def __init__(
        self, config: DecoderConfig, attention: Callable[..., nn.Module] | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        if attention is None:
            attention = SelfAttention if config.attention is None else config.attention.module
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, layer, attention) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        initialize_weights(self, ("attention.output.weight", ".down.weight"), config.layers, seed)
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """tokens: (batch, time) int64 → logits (batch, time, vocab_size).

        With a ``cache``, the tokens continue what it holds, and it grows by them.
        """
        offset = cache.length if cache is not None else 0
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cache=cache, offset=offset)
        if cache is not None:
            cache.length = offset + tokens.shape[1]
        return self.lm_head(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token; tokens, targets: (batch, time) int64."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def mixtures(self) -> list[MoE]:
        """The mixture-of-experts layers, in order; none in a dense model."""
        return [block.mlp for block in self.blocks if isinstance(block.mlp, MoE)]

    def training_flops_per_token(self, context: int) -> float:
        """6·(parameters that multiply) + 6·layers·context·d_model for causal attention's two products,
        forward and backward, or what ``config.attention`` counts instead; the embedding is a look-up and
        counts nothing, and of a mixture's experts those count that a token visits."""
        multiplying = sum(p.numel() for p in self.parameters()) - self.embedding.weight.numel()
        multiplying -= sum(layer.idle_parameters for layer in self.mixtures())
        if self.config.tie_embeddings:
            multiplying += self.embedding.weight.numel()
        attention = self.config.attention
        if attention is None:
            per_layer = 6 * context * self.config.d_model
        else:
            per_layer = attention.training_flops_per_token(self.config, context)
        return 6 * multiplying + self.config.layers * per_layer
