"""RWKV-7 as a language model: the interface of :class:`dslib.models.Decoder`, and a state of constant size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dslib.attention import KVCache, wkv7, wkv7_chunked
from dslib.models.decoder import initialize_weights
from dslib.models.moe import MoE


@dataclass(frozen=True)
class RWKVConfig:
    """Sizes of an :class:`RWKV7`; ``TrainConfig(model=RWKVConfig(...))`` trains it. The last three are ablations."""

    vocab_size: int = 256
    d_model: int = 64
    layers: int = 2
    #: Side of a head's square state (64 in the paper).
    head_size: int = 16
    #: Of the low-rank maps for decay, learning rate and values; the gate's is twice as large.
    rank: int = 8
    #: Inner size of the channel mix (None: 4·d_model).
    mlp_size: int | None = None
    #: The largest learning rate η: 1 as released; 2 as in the paper's proof that a state can be permuted (appendix,
    #: "expressivity"), which lets an eigenvalue of the state's transition go down to −1.
    rate_range: float = 1.0
    #: What a layer sees of the token before.
    token_shift: bool = True
    #: The removal of what stood under a key.
    delta_rule: bool = True
    #: The state. Without it a head reads what the present token writes and nothing else, and only token shift looks
    #: back, a token a mix.
    memory: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "layers", "head_size", "rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.d_model % self.head_size:
            raise ValueError(f"head_size={self.head_size} must divide d_model={self.d_model}")
        if not 0 < self.rate_range <= 2:
            raise ValueError(f"rate_range={self.rate_range} must lie in (0, 2]: past 2 the state can grow")

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.d_model // self.head_size

    @property
    def hidden(self) -> int:
        """Size of the channel mix's inner space."""
        return 4 * self.d_model if self.mlp_size is None else self.mlp_size

    @property
    def state_bytes(self) -> int:
        """Bytes that a sequence needs between two tokens, in float32: a matrix a head and two token shifts, a
        layer. The same after one token and after a million."""
        return 4 * self.layers * (self.d_model * self.head_size + 2 * self.d_model)

    def build(self, seed: int = 0) -> RWKV7:
        """The model of these sizes, its weights drawn from ``seed``."""
        return RWKV7(self, seed=seed)


class LowRank(nn.Module):
    """x → up(f(down(x))), a map of small rank (``loramlp`` in the paper); ``up`` may carry the bias."""

    def __init__(self, size: int, rank: int, f=None, bias: bool = True) -> None:
        super().__init__()
        self.down = nn.Linear(size, rank, bias=False)
        self.up = nn.Linear(rank, size, bias=bias)
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., size) → the same shape."""
        inner = self.down(x)
        return self.up(inner if self.f is None else self.f(inner))


class TimeMix(nn.Module):
    """What stands in the place of attention (arXiv:2503.14456, §4.1)."""

    def __init__(self, config: RWKVConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        size, rank = config.d_model, config.rank
        # How much of the token before goes into each of the six inputs.
        self.mix = nn.ParameterDict({name: nn.Parameter(torch.zeros(size)) for name in "rwkvag"})
        self.receptance, self.key, self.value, self.output = (
            nn.Linear(size, size, bias=False) for _ in range(4)
        )
        self.decay, self.rate = LowRank(size, rank, torch.tanh), LowRank(size, rank)
        self.gate = LowRank(size, 2 * rank, torch.sigmoid, bias=False)
        self.residual = LowRank(size, rank) if layer > 0 else None
        self.removal_key = nn.Parameter(torch.full((size,), 0.85))  # ξ, k_k in the code
        self.rate_key = nn.Parameter(torch.ones(size))  # α, k_a
        self.bonus = nn.Parameter(torch.zeros(size))  # ρ, r_k
        self.head_norm = nn.GroupNorm(config.heads, size, eps=64e-5)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """What is no plain matrix: as in the released code, up to small terms."""
        size = self.config.d_model
        depth = self.layer / max(1, self.config.layers - 1)
        late = 1 - self.layer / self.config.layers
        along = torch.arange(size) / size
        for name, power in {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}.items():
            self.mix[name].copy_(1 - along ** (power * late))
        # Channels from a memory of thousands of tokens down to one of a few.
        self.decay.up.bias.copy_(
            -5.5 + 5 * (torch.arange(size) / max(1, size - 1)) ** (0.85 + math.sqrt(depth))
        )
        for low_rank in (self.decay, self.rate, self.gate, self.residual):
            if low_rank is not None:
                low_rank.down.weight.zero_()
                low_rank.up.weight.normal_(0, 0.1 * low_rank.up.in_features**-0.5, generator=generator)
        self.gate.up.weight.normal_(0, 2 * self.gate.up.in_features**-0.5, generator=generator)
        self.rate.up.bias.zero_()
        if self.residual is not None:
            self.residual.up.bias.fill_(1.0)

    def forward(self, x: Tensor, cache: KVCache | None = None, first: list[Tensor] | None = None) -> Tensor:
        """x: (batch, time, d_model) → the same shape. ``first`` is a list that layer 0 puts its values into
        and the others read. With a ``cache`` x goes on where it ends."""
        config, first = self.config, [] if first is None else first
        x_r, x_w, x_k, x_v, x_a, x_g = shifted(
            x, [self.mix[name] for name in "rwkvag"], cache, ("time shift", self.layer), config
        )
        r, k, v = self.receptance(x_r), self.key(x_k), self.value(x_v)
        if self.residual is None:
            first.append(v)
        elif first:
            v = torch.lerp(v, first[0], self.residual(x_v).sigmoid())
        w = torch.exp(-math.exp(-0.5) * self.decay(x_w).sigmoid())
        rate = self.rate(x_a).sigmoid()
        removal = F.normalize(self._heads(k * self.removal_key), dim=-1)  # κ̂
        k = k * (1 + (rate - 1) * self.rate_key)
        removed = removal * self._heads(config.rate_range * rate) * config.delta_rule

        r, w, k, v = (self._heads(part) for part in (r, w, k, v))
        state = None if cache is None else cache.states.get(("wkv", self.layer))
        if config.memory:
            recurrence = wkv7 if x.shape[1] == 1 else wkv7_chunked
            y, state = recurrence(r, w, k, v, -removal, removed, state)
        else:
            y = (r * k).sum(-1, keepdim=True) * v
        if cache is not None:
            cache.states["wkv", self.layer] = state
        y = self.head_norm(y.transpose(1, 2).flatten(0, 1).flatten(1)).view_as(x)
        bonus = (r * k * self.bonus.view(config.heads, 1, -1)).sum(-1, keepdim=True) * v
        return self.output((y + bonus.transpose(1, 2).flatten(2)) * self.gate(x_g))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.heads, -1)).transpose(1, 2)


class ChannelMix(nn.Module):
    """W_down·max(W_up·x, 0)², x mixed with the token before (arXiv:2503.14456, §4.2)."""

    def __init__(self, config: RWKVConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.mix = nn.Parameter(torch.zeros(config.d_model))
        self.up = nn.Linear(config.d_model, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.d_model, bias=False)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """How much of the token before each channel begins with."""
        late = 1 - self.layer / self.config.layers
        self.mix.copy_(1 - (torch.arange(len(self.mix)) / len(self.mix)) ** (late**4))

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """x: (batch, time, d_model) → the same shape."""
        (x,) = shifted(x, [self.mix], cache, ("channel shift", self.layer), self.config)
        return self.down(self.up(x).relu().square())


def shifted(
    x: Tensor, mixes, cache: KVCache | None, key: tuple[str, int], config: RWKVConfig
) -> list[Tensor]:
    """Token shift: x_t + (x_{t−1} − x_t) ⊙ μ for each μ of ``mixes`` (arXiv:2305.13048, eq. 11). The first
    token sees zeros before it, or what ``cache`` keeps under ``key``."""
    before = None if cache is None else cache.states.get(key)
    if before is None:
        before = torch.zeros_like(x[:, :1])
    if cache is not None and x.shape[1]:
        cache.states[key] = x[:, -1:]
    if not config.token_shift:
        return [x for _ in mixes]
    change = torch.cat((before, x), dim=1)[:, :-1] - x
    return [torch.addcmul(x, change, mix) for mix in mixes]


class RWKVBlock(nn.Module):
    """x + time mix(norm(x)), then x + channel mix(norm(x)); under the names of :class:`Decoder`'s blocks."""

    def __init__(self, config: RWKVConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(config.d_model), nn.LayerNorm(config.d_model)
        self.attention, self.mlp = TimeMix(config, layer), ChannelMix(config, layer)

    def forward(self, x: Tensor, cache: KVCache | None = None, first: list[Tensor] | None = None) -> Tensor:
        """x: (batch, time, d_model) → the same shape."""
        x = x + self.attention(self.attention_norm(x), cache=cache, first=first)
        return x + self.mlp(self.mlp_norm(x), cache=cache)


class RWKV7(nn.Module):
    """A language model whose memory is a state of constant size (arXiv:2503.14456).

    Weights come from ``seed`` alone and are drawn as :class:`dslib.models.Decoder` draws them.
    """

    def __init__(self, config: RWKVConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.embedding_norm = nn.LayerNorm(config.d_model)
        self.blocks = nn.ModuleList(RWKVBlock(config, layer) for layer in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        initialize_weights(self, ("attention.output.weight", "mlp.down.weight"), config.layers, seed)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """tokens: (batch, time) int64 → logits (batch, time, vocab_size).

        With a ``cache``, the tokens continue what its states have read; they are replaced, and do not grow.
        """
        x, first = self.embedding_norm(self.embedding(tokens)), []
        for block in self.blocks:
            x = block(x, cache=cache, first=first)
        if cache is not None:
            cache.length += tokens.shape[1]
        return self.lm_head(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token; tokens, targets: (batch, time) int64."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def mixtures(self) -> list[MoE]:
        """The mixture-of-experts layers: none."""
        return []

    def training_flops_per_token(self, context: int) -> float:
        """6·(parameters that multiply) + 27·layers·d_model·head_size for the recurrence: decay, reading under
        the key, removing, writing and reading out are 9 operations an entry of the state, three times for
        forward and backward. It does not depend on ``context``."""
        multiplying = sum(p.numel() for p in self.parameters()) - self.embedding.weight.numel()
        return 6 * multiplying + 27 * self.config.layers * self.config.d_model * self.config.head_size
