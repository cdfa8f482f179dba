"""Mixture of experts: sigmoid gates, top-k, and load balance by a bias instead of an auxiliary loss.

The layer of DeepSeek-V3 (arXiv:2412.19437, §2.1.2) with Moonlight's two changes (arXiv:2502.16982,
appendix C), on one machine: no groups of experts, no capacity limit and no sequence-wise auxiliary loss.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BIAS_RULES = ("moonlight", "deepseek")


@dataclass(frozen=True)
class MoEConfig:
    """Sizes of a :class:`MoE`."""

    #: Those that are routed to.
    experts: int = 8
    #: How many of them a token visits.
    top_k: int = 2
    #: Those that every token visits: one MLP of as many times the size.
    shared_experts: int = 1
    #: Inner size of one (None: that of the dense MLP, split over the experts that a token visits, so that a token
    #: costs about as much as in the dense model).
    expert_size: int | None = None
    #: The factor on the routed experts' weights (None: Moonlight's rule, :func:`gate_scaling_factor`).
    gate_scale: float | None = None
    #: u, 1e-3 in both papers (0: the bias stays).
    bias_update_rate: float = 1e-3
    #: The paper whose rule updates the bias: ``"moonlight"`` or ``"deepseek"``.
    bias_rule: str = "moonlight"

    def __post_init__(self) -> None:
        if self.experts < 1:
            raise ValueError(f"experts={self.experts} must be at least 1")
        _check_top_k(self.experts, self.top_k)
        if self.shared_experts < 0:
            raise ValueError(f"shared_experts={self.shared_experts} must be at least 0")
        if self.expert_size is not None and self.expert_size < 1:
            raise ValueError(f"expert_size={self.expert_size} must be at least 1")
        if self.gate_scale is not None and not 0 < self.gate_scale < math.inf:
            raise ValueError(f"gate_scale={self.gate_scale} must be a finite number above 0")
        if not 0 <= self.bias_update_rate < math.inf:
            raise ValueError(
                f"bias_update_rate={self.bias_update_rate} must be a finite number of at least 0"
            )
        if self.bias_rule not in BIAS_RULES:
            raise ValueError(
                f"bias_rule={self.bias_rule!r} is unknown; use {' or '.join(map(repr, BIAS_RULES))}"
            )

    @property
    def scale(self) -> float:
        """The factor on the routed experts' weights."""
        return gate_scaling_factor(self.experts, self.top_k) if self.gate_scale is None else self.gate_scale


def gate_weights(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    scale: float = 1.0,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Which experts each token visits, and with which weight.

        s = sigmoid(logits),   chosen = top-k of s + b,   gᵢ = scale · sᵢ / Σ_chosen sⱼ

    (DeepSeek-V3, eq. 13 to 16): the bias decides who is chosen and never enters the weight.
    ``logits``: (..., experts); ``bias``: (experts,) → chosen (..., top_k) int64, best first and ties to the
    smaller index, and weights (..., top_k) in the dtype of ``logits``. ``chosen`` given, nobody chooses: the
    weights are those of these experts, whatever the preference (−1, no expert, has a weight of no meaning).
    Raises ValueError for a top_k outside 1…experts and a bias or a choice of another shape.
    """
    experts = logits.shape[-1]
    _check_top_k(experts, top_k)
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; {experts} experts need ({experts},)")
    scores = logits.sigmoid()
    if chosen is None:
        preference = scores.detach() if bias is None else scores.detach() + bias
        # torch.topk leaves the order of ties open; a stable sort does not.
        chosen = preference.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    elif chosen.shape != (*logits.shape[:-1], top_k):
        raise ValueError(
            f"chosen has shape {tuple(chosen.shape)}; {top_k} experts for each row of logits "
            f"{tuple(logits.shape)} need {(*logits.shape[:-1], top_k)}"
        )
    selected = scores.gather(-1, chosen.clamp(min=0))
    return chosen, scale * selected / selected.sum(-1, keepdim=True)


def expert_loads(chosen: Tensor, experts: int) -> Tensor:
    """How often each expert is chosen: (..., top_k) int64, −1 for none → (experts,) int64."""
    return torch.bincount(chosen.flatten() + 1, minlength=experts + 1)[1:]


def updated_bias(bias: Tensor, load: Tensor, rate: float, rule: str = "moonlight") -> Tensor:
    """The selection bias after one step that put ``load`` on the experts; both (experts,).

        eᵢ = mean load − loadᵢ        positive for an expert with too little to do
        "deepseek":   bᵢ + u·sign(eᵢ)                              DeepSeek-V3, §2.1.2
        "moonlight":  bᵢ + u·(sign(eᵢ) − mean(sign(e)))             Moonlight, appendix C

    The two differ by a shift common to all experts, which changes no top-k: "moonlight" only keeps the
    biases' mean where it is. Raises ValueError for an unknown rule and for shapes that differ.
    """
    if rule not in BIAS_RULES:
        raise ValueError(f"rule={rule!r} is unknown; use {' or '.join(map(repr, BIAS_RULES))}")
    if load.shape != bias.shape:
        raise ValueError(
            f"load has shape {tuple(load.shape)} and bias {tuple(bias.shape)}; they must be equal"
        )
    load = load.to(bias.dtype)
    sign = (load.mean() - load).sign()
    return bias + rate * (sign - sign.mean() if rule == "moonlight" else sign)


def max_violation(load: Tensor) -> Tensor:
    """How far the fullest expert is above the mean, as a share of it: (..., experts) → (...), float64.

        MaxVio = maxᵢ loadᵢ / mean load − 1            arXiv:2408.15664, eq. 4

    0 is perfect balance, experts/top_k − 1 the worst. NaN without any load.
    """
    load = load.double()
    return load.amax(-1) / load.mean(-1) - 1


@functools.lru_cache(maxsize=64)
def gate_scaling_factor(
    experts: int,
    top_k: int,
    tokens: int = 40_000,
    gate: str = "sigmoid",
    normalize: bool = True,
    seed: int = 0,
) -> float:
    """The factor that makes ``top_k`` weighted experts sum to the size of one, by simulation.

    Outputs of different experts are taken as uncorrelated and of equal size, so the weighted sum is ‖g‖₂
    times as large as one of them, and the factor is the mean of 1/‖g‖₂ over router logits ~ N(0, 1)
    (Moonlight, appendix C and Figure 6: 2.44 for 6 of 64). ``gate``: ``"sigmoid"``, or ``"softmax"``
    over all experts; ``normalize`` divides the chosen gates by their sum. Raises ValueError for a top_k
    outside 1…experts, no tokens, or another gate.
    """
    if experts < 1:
        raise ValueError(f"experts={experts} must be at least 1")
    _check_top_k(experts, top_k)
    if tokens < 1:
        raise ValueError(f"tokens={tokens} must be at least 1")
    if gate not in ("sigmoid", "softmax"):
        raise ValueError(f"gate={gate!r} is unknown; use 'sigmoid' or 'softmax'")
    logits = torch.randn(tokens, experts, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    scores = logits.sigmoid() if gate == "sigmoid" else logits.softmax(-1)
    chosen = scores.topk(top_k, dim=-1).values
    if normalize:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return (1 / torch.linalg.vector_norm(chosen, dim=-1)).mean().item()


@dataclass(frozen=True)
class BalanceTrail:
    """What :func:`simulate_balance` saw, by rule (and ``"none"``, no bias). ``bias_mean`` and ``violation``:
    (steps,) float64 each. ``same_choice``: the share of the last step's tokens whose set of experts is that
    under ``"moonlight"``. ``bias``: the last biases, and ``load``: the loads that led to them."""

    bias_mean: dict[str, Tensor]
    violation: dict[str, Tensor]
    same_choice: dict[str, float]
    bias: dict[str, Tensor]
    load: dict[str, Tensor]


def simulate_balance(
    steps: int = 200, tokens: int = 256, experts: int = 32, top_k: int = 2, rate: float = 0.01, seed: int = 0
) -> BalanceTrail:
    """Both rules, and no bias, on one stream of logits from a router that prefers a few experts by up to 3.

    In float64, so that the common shift between the rules does not round a choice over. Raises ValueError
    for a top_k outside 1…experts or no steps."""
    _check_top_k(experts, top_k)
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    generator = torch.Generator().manual_seed(seed)
    preference = 3 * torch.linspace(0, 1, experts, dtype=torch.float64) ** 4
    bias = {rule: torch.zeros(experts, dtype=torch.float64) for rule in (*BIAS_RULES, "none")}
    trail: list[list[list[float]]] = []
    for _ in range(steps):
        logits = preference + torch.randn(tokens, experts, dtype=torch.float64, generator=generator)
        sets = {rule: gate_weights(logits, top_k, b)[0].sort().values for rule, b in bias.items()}
        load = {rule: expert_loads(chosen, experts) for rule, chosen in sets.items()}
        for rule in BIAS_RULES:
            bias[rule] = updated_bias(bias[rule], load[rule], rate, rule)
        trail.append([[bias[rule].mean().item(), max_violation(load[rule]).item()] for rule in bias])
    kept = torch.tensor(trail, dtype=torch.float64)
    return BalanceTrail(
        bias_mean={rule: kept[:, i, 0] for i, rule in enumerate(bias)},
        violation={rule: kept[:, i, 1] for i, rule in enumerate(bias)},
        same_choice={
            rule: (chosen == sets["moonlight"]).all(-1).double().mean().item()
            for rule, chosen in sets.items()
        },
        bias=bias,
        load=load,
    )


class MoE(nn.Module):
    """An MLP that is a sum over few experts, x ↦ shared(x) + Σ_chosen gᵢ·expertᵢ(x).

    ``make_mlp(size)`` makes an expert of that inner size, and ``hidden`` is the dense MLP's. Every expert
    is a module of its own, not a slice of one [experts, A, B] parameter: an optimizer that flattens
    parameters of three dimensions, as Muon does for convolutions, would orthogonalise all experts of a
    stack as one matrix.

    In training, each forward pass under gradient adds to ``load``; :meth:`update_bias`, called once after the
    optimizer's step, turns it into the next bias. ``bias`` is a buffer: saved, and no optimizer moves it.
    :func:`recorded_routes` and :func:`replayed_routes` write ``record`` and ``replay``.
    """

    record: list[Tensor] | None = None
    replay: Tensor | None = None

    def __init__(
        self, config: MoEConfig, d_model: int, hidden: int, make_mlp: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.config = config
        size = config.expert_size
        if size is None:
            size = max(1, round(hidden / (config.top_k + config.shared_experts)))
        self.router = nn.Linear(d_model, config.experts, bias=False)
        self.experts = nn.ModuleList(make_mlp(size) for _ in range(config.experts))
        self.shared = make_mlp(size * config.shared_experts) if config.shared_experts else None
        self.scale = config.scale
        self.register_buffer("bias", torch.zeros(config.experts))
        self.register_buffer("load", torch.zeros(config.experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., d_model) → the same shape."""
        tokens = x.flatten(0, -2)
        chosen, weights = gate_weights(
            self.router(tokens), self.config.top_k, self.bias, self.scale, self._replayed(x)
        )
        if self.record is not None:
            self.record.append(chosen.view(*x.shape[:-1], -1))
        if self.training and torch.is_grad_enabled():
            self.load += expert_loads(chosen, self.config.experts)
        out = torch.zeros_like(tokens) if self.shared is None else self.shared(tokens)
        for index, expert in enumerate(self.experts):
            token, slot = (chosen == index).nonzero(as_tuple=True)
            if len(token):
                out = out.index_add(0, token, expert(tokens[token]) * weights[token, slot].unsqueeze(-1))
        return out.view_as(x)

    def _replayed(self, x: Tensor) -> Tensor | None:
        if self.replay is None:
            return None
        if self.replay.shape != (*x.shape[:-1], self.config.top_k):
            raise ValueError(
                f"routes of shape {tuple(self.replay.shape)} cannot be replayed on tokens of shape "
                f"{tuple(x.shape[:-1])} with top_k={self.config.top_k}; replay the pass that was recorded"
            )
        return self.replay.flatten(0, -2)

    @torch.no_grad()
    def update_bias(self) -> Tensor:
        """Move the bias by the load since the last call, which is returned, (experts,), and start anew."""
        load = self.load.clone()
        if load.any() and self.config.bias_update_rate:
            self.bias.copy_(
                updated_bias(self.bias, load, self.config.bias_update_rate, self.config.bias_rule)
            )
        self.load.zero_()
        return load

    @property
    def idle_parameters(self) -> int:
        """Parameters of the experts that a token does not visit."""
        one = sum(p.numel() for p in self.experts[0].parameters())
        return (self.config.experts - self.config.top_k) * one


@contextmanager
def recorded_routes(model: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Inside, the experts that each token visits are written down.

    Yields a list with an entry for each :class:`MoE` of ``model``, in the order of its modules, and that is
    the list of its forward passes: (batch, time, top_k) int64 each. Empty for a dense model.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    before = [layer.record for layer in layers]
    routes: list[list[Tensor]] = [[] for _ in layers]
    for layer, record in zip(layers, routes, strict=True):
        layer.record = record
    try:
        yield routes
    finally:
        for layer, record in zip(layers, before, strict=True):
            layer.record = record


@contextmanager
def replayed_routes(model: nn.Module, routes: Sequence[Tensor] | Tensor) -> Iterator[None]:
    """Inside, tokens visit the experts of ``routes`` and not those that their routers prefer now.

    Keep Routing (DeepSeek-V3.2, arXiv:2512.02556, §3.1): the experts that sampled a token are those that are
    trained on it. How much each counts, the gate weight, still comes from the router, and its gradient goes
    there. ``routes``: for each :class:`MoE`, in the order of the model's modules, (batch, time, top_k) of any
    integer dtype, for tokens of (batch, time); −1 is no expert: such a token, padding say, visits the shared
    ones alone and counts in no load. Raises ValueError for another number of layers and for experts that a
    layer has not, and within, for tokens of another shape.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if len(routes) != len(layers):
        raise ValueError(f"routes are of {len(routes)} layers, but the model has {len(layers)} mixtures")
    for index, (layer, route) in enumerate(zip(layers, routes, strict=True)):
        if route.numel() and not -1 <= route.min() <= route.max() < layer.config.experts:
            raise ValueError(
                f"routes[{index}] name experts {int(route.min())} to {int(route.max())}, but the layer has "
                f"{layer.config.experts}, counted from 0"
            )
    before = [layer.replay for layer in layers]
    for layer, route in zip(layers, routes, strict=True):
        layer.replay = route.long()
    try:
        yield
    finally:
        for layer, route in zip(layers, before, strict=True):
            layer.replay = route


def _check_top_k(experts: int, top_k: int) -> None:
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k={top_k} must lie in 1…{experts}, the number of experts")
