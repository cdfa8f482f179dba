"""The Muon optimizer: momentum, orthogonalised by Newton–Schulz iterations."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dslib.optim import dtensor
from dslib.optim.newton_schulz import coefficient_schedule, newton_schulz
from dslib.optim.update_rms import ADAMW_RMS, ADJUST_LR_MODES, adjusted_lr_factor, update_rms

#: Equal shapes share one batched iteration, in batches of at most this many entries.
_BATCH_ENTRIES = 2**24

#: What ``ns_dtype`` may be, besides None.
ITERATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Muon(torch.optim.Optimizer):
    """MomentUm Orthogonalised by Newton–Schulz (Jordan 2024), with Moonlight's weight decay and scale.

        Mₜ = μ·Mₜ₋₁ + Gₜ                                      Moonlight eq. 1, arXiv:2502.16982
        Oₜ = NewtonSchulz(Gₜ + μ·Mₜ  if nesterov else  Mₜ)     eq. 1, iterated as in eq. 2
        Wₜ = Wₜ₋₁ − lr·(factor·Oₜ + λ·Wₜ₋₁)                    eq. 3 and 4

    ``params``: an iterable of parameters, of (name, parameter) pairs, or of group dictionaries, each
    of which may set every option below for itself. Parameters have at least two dimensions; a
    convolution weight counts as [out, in·kh·kw]. For the rest of a model use another optimizer:
    :func:`dslib.optim.param_groups_for_muon` splits them.

    ``adjust_lr`` names the factor: see :func:`dslib.optim.adjusted_lr_factor`; ``"update_norm"``
    divides each update by its own RMS and multiplies by 0.2. ``target_rms`` replaces that 0.2 in the modes
    that match AdamW's size (Moonlight, Table 8). The decay uses the unadjusted ``lr``.
    ``split_sizes`` (in a group): block heights along dimension 0 of a fused weight, (q, k, v) or
    (gate, up), unequal ones too; each block is orthogonalised and scaled as a parameter of its own.
    ``hidden_size`` (in a group): the H of ``adjust_lr="baseline"``.

    A parameter whose gradient is None is left alone, its decay too; a zero gradient still decays.
    Gradients and momentum buffers are never changed by the orthogonalisation. All matrices of one
    shape, transposed or not, are orthogonalised in one batch; ``batched=False`` takes them one by one, which
    is slower for small ones, and the last bits of an update then do not depend on its neighbours.
    ``ns_dtype`` is what the iterations compute in, as ``dtype`` of :func:`dslib.optim.newton_schulz`.
    State: ``momentum_buffer``, of the parameter's shape, in float32 for float16 parameters. It is the sum
    Σ μᵏ·Gₜ₋ₖ, not the average (1 − μ) times that, which ``torch.optim.Muon`` keeps: the directions are the same at
    a constant μ. Under a momentum warm-up the sum weighs a gradient by the product of the μ since then alone, the
    average also by 1 − μ at its own time, so that early gradients count more there.

    ``adjust_lr=None`` is a factor of 1 (``torch.optim.Muon``'s ``adjust_lr_fn=None`` is our ``"original"``).

    Parameters may be DTensors (FSDP2's ``fully_shard``, tensor parallelism): the momentum stays sharded as
    its parameter is, each matrix is gathered for its iterations, and every rank keeps its own part. (During
    a step every rank holds all of them whole.)

    Raises ValueError, naming the option and its value, for a negative or NaN lr or weight_decay,
    momentum outside [0, 1), ns_steps below 1, unknown modes, parameters of fewer than two dimensions
    and split_sizes that do not add up — in ``add_param_group`` too. ``step`` raises RuntimeError for
    a sparse gradient before it changes any parameter.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        coefficients: Any = "jordan",
        adjust_lr: str | None = "match_rms_adamw",
        target_rms: float = ADAMW_RMS,
        ns_dtype: torch.dtype | None = None,
        batched: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "coefficients": coefficients,
            "adjust_lr": adjust_lr,
            "target_rms": target_rms,
            "ns_dtype": ns_dtype,
            "batched": batched,
            "split_sizes": None,
            "hidden_size": None,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with options of its own; checked as the constructor checks, before it is added."""
        param_group = dict(param_group)
        if "params" not in param_group:
            raise ValueError(
                f"the group {sorted(param_group)} has no 'params'; give it the list of its parameters"
            )
        members = param_group["params"]
        if isinstance(members, set):
            raise TypeError("params is a set, whose order changes from run to run; give a list")
        members = [members] if isinstance(members, Tensor) else list(members)
        param_group["params"] = members
        _check_options({**self.defaults, **param_group})
        for position, member in enumerate(members):
            name, parameter = member if isinstance(member, tuple) else (f"number {position}", member)
            _check_parameter(name, parameter, param_group.get("split_sizes"))
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient. Returns the closure's loss, if one is given."""
        loss = evaluated(closure)
        active = [
            (group, parameters)
            for group in self.param_groups
            if (parameters := [p for p in group["params"] if p.grad is not None])
        ]
        for _, parameters in active:
            for p in parameters:
                if p.grad.is_sparse or p.grad.layout != torch.strided:
                    raise RuntimeError(
                        f"the gradient of a parameter of shape {tuple(p.shape)} is {p.grad.layout}: Muon needs dense "
                        "gradients; use sparse=False in the embedding, or another optimizer for it"
                    )
        blocks: list[Block] = []
        for group, parameters in active:
            blocks += self._blocks(group, parameters)
        for block, update, scale in orthogonalized(blocks):
            block.target.add_(update.reshape(block.target.shape), alpha=scale)
        for block in blocks:
            if block.finish is not None:
                block.finish()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but the momentum keeps the precision it was saved in (torch casts it to the parameter's: past
        65504 that is infinity in float16), one of another shape than its parameter's is a ValueError that names it,
        and ``batched``, which is about how and not what to compute, stays as it was constructed.

        A checkpoint of ``torch.optim.Muon`` is recognised and converted: its momentum is an average, ours a sum.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():  # what they change is checked too
            changed = hook(self, state_dict := state_dict.copy())
            state_dict = state_dict if changed is None else changed
        state_dict = from_torch_muon(state_dict)
        check_checkpoint(state_dict, self.param_groups)
        hooks, self._optimizer_load_state_dict_pre_hooks = (
            self._optimizer_load_state_dict_pre_hooks,
            OrderedDict(),
        )
        self._saved_state = state_dict
        try:
            super().load_state_dict(state_dict)
        finally:
            self._optimizer_load_state_dict_pre_hooks = hooks
            del self._saved_state

    def __setstate__(self, state: dict[str, Any]) -> None:
        batched = [group["batched"] for group in getattr(self, "param_groups", ())]
        super().__setstate__(state)
        for group in self.param_groups:  # saved before an option was there
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        if (saved := getattr(self, "_saved_state", None)) is None:
            return  # unpickled or copied
        for group, value in zip(self.param_groups, batched, strict=True):
            group["batched"] = value
        for group, before in zip(self.param_groups, saved["param_groups"], strict=True):
            for p, index in zip(group["params"], before["params"], strict=True):
                kept = saved["state"].get(index, {}).get("momentum_buffer")
                if kept is not None:
                    self.state[p]["momentum_buffer"] = kept.to(p.device, momentum_dtype(p.dtype), copy=True)

    def _blocks(self, group: dict[str, Any], parameters: list[Tensor]) -> list[Block]:
        """Momentum and decay of one group; the directions of its matrices, and what their updates are added to."""
        buffers = []
        for p in parameters:
            state = self.state[p]
            dtype = momentum_dtype(p.dtype)
            buffer = state.get("momentum_buffer")
            if buffer is None:
                buffer = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
                state["momentum_buffer"] = buffer
            buffers.append(buffer)
        # Of a DTensor these are this rank's parts, in the same memory: momentum and decay are elementwise.
        local = [dtensor.local(buffer) for buffer in buffers]
        gradients = [
            dtensor.local_like(p.grad, p).to(b.dtype) for p, b in zip(parameters, local, strict=True)
        ]
        directions = momentum_directions(local, gradients, group)
        decay([dtensor.local(p) for p in parameters], group)
        blocks = []
        for p, direction in zip(parameters, directions, strict=True):
            target, finish = p, None
            if dtensor.is_dtensor(p):
                direction, (target, finish) = dtensor.full(direction, p), dtensor.whole_update(p)
            sizes = group["split_sizes"] or (p.shape[0],)
            for part, weight in zip(direction.split(sizes), target.split(sizes), strict=True):
                blocks.append(Block(group, part.flatten(1), weight, finish))
                finish = None
        return blocks


class Block(NamedTuple):
    """A matrix to orthogonalise: its options, its direction (A, B), what the caller adds the update to,
    and what to call, once, when all blocks have theirs."""

    group: dict[str, Any]
    direction: Tensor
    target: Any
    finish: Callable[[], None] | None = None


def evaluated(closure: Callable[[], float] | None) -> float | None:
    """The loss that a ``step``'s closure computes, gradients on; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def momentum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the momentum of a parameter of ``dtype`` is kept in."""
    # The sum of float16 gradients leaves float16's range: 20 times 6e4.
    return torch.float32 if dtype == torch.float16 else dtype


def momentum_directions(
    buffers: list[Tensor], gradients: list[Tensor], group: dict[str, Any]
) -> list[Tensor]:
    """M ← μ·M + G in place (Moonlight eq. 1); returns G + μ·M with Nesterov, else M itself.

    Elementwise, so it serves parts of matrices as well as whole ones.
    """
    if not buffers:
        return []
    torch._foreach_mul_(buffers, group["momentum"])
    torch._foreach_add_(buffers, gradients)
    return torch._foreach_add(gradients, buffers, alpha=group["momentum"]) if group["nesterov"] else buffers


def decay(weights: list[Tensor], group: dict[str, Any]) -> None:
    """W ← (1 − lr·λ)·W in place, the decay of Moonlight eq. 3."""
    if weights and group["weight_decay"] != 0:
        torch._foreach_mul_(weights, 1 - float(group["lr"]) * group["weight_decay"])


def orthogonalized(blocks: list[Block]) -> Iterator[tuple[Block, Tensor, float]]:
    """(block, O, s) for every non-empty block: the weight's update is s·O, with s = −lr·factor (eq. 4)."""
    for same in _by_kind(blocks):
        group, first = same[0].group, same[0].direction
        if first.numel() == 0:
            continue
        chunk = max(1, _BATCH_ENTRIES // first.numel()) if group["batched"] else 1
        for start in range(0, len(same), chunk):
            members = same[start : start + chunk]
            stacked = torch.stack([_wide(block.direction) for block in members])
            updates = newton_schulz(
                stacked, group["ns_steps"], group["coefficients"], dtype=group["ns_dtype"]
            )
            for block, wide in zip(members, updates.unbind(), strict=True):
                update = wide if wide.shape == block.direction.shape else wide.mT
                yield block, update, -float(block.group["lr"]) * _factor(update, block.group)


def _factor(update: Tensor, group: dict[str, Any]) -> float:
    if group["adjust_lr"] == "update_norm":
        rms = update_rms(update).item()
        return group["target_rms"] / rms if rms > 0 else 0.0
    return adjusted_lr_factor(update.shape, group["adjust_lr"], group["hidden_size"], group["target_rms"])


def _wide(direction: Tensor) -> Tensor:
    """The orthogonal factor of a transpose is the transpose: tall and wide blocks share a batch."""
    return direction.mT if direction.shape[0] > direction.shape[1] else direction


def _by_kind(blocks: list[Block]) -> list[list[Block]]:
    """Blocks that one batched iteration can serve, in order of first appearance."""
    kinds: dict[tuple, list] = {}
    for block in blocks:
        group, direction = block.group, block.direction
        iteration = (group["ns_steps"], str(group["coefficients"]), group["ns_dtype"], group["batched"])
        key = (_wide(direction).shape, direction.dtype, direction.device, *iteration)
        kinds.setdefault(key, []).append(block)
    return list(kinds.values())


def from_torch_muon(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of ``torch.optim.Muon`` as one of ours; any other is returned as it is.

    Its momentum is the average (1 − μ)·Σ μᵏ·Gₜ₋ₖ and ours the sum, 1/(1 − μ) times as much. Its ``adjust_lr_fn`` is
    our ``adjust_lr``, where None means "original" (here None means a factor of 1).
    """
    groups = state_dict["param_groups"]
    if not any("adjust_lr_fn" in group for group in groups):
        return state_dict
    converted, state = [], dict(state_dict["state"])
    for saved in groups:
        group = dict(saved)
        group["adjust_lr"] = group.pop("adjust_lr_fn") or "original"
        group["coefficients"] = tuple(group.pop("ns_coefficients"))
        group.pop("eps", None)  # of its norm; ours never divides by zero
        for index in group["params"]:
            if "momentum_buffer" in state.get(index, {}):
                average = state[index]["momentum_buffer"]
                state[index] = {**state[index], "momentum_buffer": average / (1 - group["momentum"])}
        converted.append(group)
    return {**state_dict, "state": state, "param_groups": converted}


def check_checkpoint(state_dict: dict[str, Any], param_groups: list[dict[str, Any]]) -> None:
    """Raise ValueError, naming the parameter, where a saved tensor has another shape than its parameter.

    (Different numbers of groups or parameters are torch's own ValueError.)
    """
    for saved, group in zip(state_dict["param_groups"], param_groups, strict=False):
        names = parameter_names(group)
        for index, name, parameter in zip(saved["params"], names, group["params"], strict=False):
            for key, value in state_dict["state"].get(index, {}).items():
                if key != "step" and isinstance(value, Tensor) and value.shape != parameter.shape:
                    raise ValueError(
                        f"the checkpoint's {key} of parameter {name} has shape {tuple(value.shape)}, the "
                        f"parameter {tuple(parameter.shape)}: it was saved for another model"
                    )


def parameter_names(group: dict[str, Any]) -> list[str]:
    """The names of a group's parameters, where they were given, or ``"number 0"`` and so on."""
    return group.get("param_names") or [f"number {position}" for position in range(len(group["params"]))]


def _check_options(options: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay", "momentum"):
        if isinstance(options[name], str) or not hasattr(options[name], "__float__"):
            raise ValueError(f"{name}={options[name]!r} must be a number")
    lr, decay, momentum = float(options["lr"]), float(options["weight_decay"]), float(options["momentum"])
    if not (lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"lr={options['lr']!r} must be a finite number of at least 0")
    if not (decay >= 0 and math.isfinite(decay)):
        raise ValueError(f"weight_decay={options['weight_decay']!r} must be a finite number of at least 0")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={options['momentum']!r} must lie in [0, 1)")
    if options["adjust_lr"] not in ADJUST_LR_MODES:
        raise ValueError(
            f"adjust_lr={options['adjust_lr']!r} is unknown; use one of {', '.join(map(repr, ADJUST_LR_MODES))}"
        )
    try:
        coefficient_schedule(options["coefficients"], options["ns_steps"])
    except ValueError as error:
        raise ValueError(str(error).replace("steps=", "ns_steps=", 1)) from None
    target = options["target_rms"]
    if isinstance(target, str) or not (0 < float(target) < math.inf):
        raise ValueError(f"target_rms={target!r} must be a finite number above 0")
    if options["ns_dtype"] is not None and options["ns_dtype"] not in ITERATION_DTYPES:
        raise ValueError(
            f"ns_dtype={options['ns_dtype']!r} cannot hold the iteration; use None or one of "
            f"{', '.join(map(str, ITERATION_DTYPES))}"
        )
    if not isinstance(options["batched"], bool):
        raise ValueError(f"batched={options['batched']!r} must be True or False")
    hidden = options.get("hidden_size")
    if hidden is not None and hidden < 1:
        raise ValueError(f"hidden_size={hidden!r} must be at least 1")


def _check_parameter(name: str, parameter: Tensor, split_sizes: Iterable[int] | None) -> None:
    if not isinstance(parameter, Tensor):
        raise TypeError(f"parameter {name} is a {type(parameter).__name__}, not a tensor")
    shape = tuple(parameter.shape)
    if parameter.ndim < 2:
        raise ValueError(
            f"parameter {name} has shape {shape}: Muon orthogonalises matrices; give parameters of fewer than two "
            "dimensions to AdamW (dslib.optim.param_groups_for_muon splits a model)"
        )
    if not parameter.is_floating_point():
        raise ValueError(f"parameter {name} is {parameter.dtype}: Muon needs real floating-point parameters")
    if split_sizes is not None:
        sizes = list(split_sizes)
        if any(size < 1 for size in sizes) or sum(sizes) != shape[0]:
            raise ValueError(
                f"split_sizes={sizes} must be positive and add up to {shape[0]}, dimension 0 of {name}"
            )
