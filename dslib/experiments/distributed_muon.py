"""Data-parallel training of the small decoder: what a rank of ZeRO-1 Muon computes, keeps, sends, waits for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dslib.models.decoder import Decoder, DecoderConfig
from dslib.models.measuring import named_matrices
from dslib.models.train_config import TrainConfig
from dslib.models.training import training_batches, training_steps
from dslib.optim import Muon, ZeroAdamW, ZeroMuon, param_groups_for_muon

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class RankRun:
    """What one rank tells of a run. ``sent`` and ``state_bytes`` are of the optimizer of the ``"matrices"`` and of
    that of the ``"rest"``."""

    config: TrainConfig
    ranks: int
    #: Steps done.
    step: int
    #: The model's.
    weights: dict[str, Tensor]
    #: The state dictionaries of the optimizers, whole.
    states: list[dict[str, Any]]
    #: Of every step, mean over ranks, nats a token.
    losses: list[float]
    #: Bytes, by purpose.
    sent: dict[str, dict[str, int]]
    state_bytes: dict[str, int]
    #: ``"forward and backward"``, ``"optimizer"``, and of that ``"communication"``.
    seconds: dict[str, float]


class GatherEverything(ZeroMuon):
    """The null of the traffic: every rank gathers every matrix, whether it keeps a part of it or not."""

    def members(self, owners: list[int]) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(self.traffic.ranks))


def matrix_optimizer(
    named: Sequence[tuple[str, torch.nn.Parameter]],
    config: TrainConfig,
    everything: bool = False,
    rows_of: int = 0,
    **options: Any,
) -> torch.optim.Optimizer:
    """The optimizer of the matrices, Muon or AdamW as ``config`` says: sharded when there is a process group.

    ``options`` are Muon's or ZeroMuon's. ``everything`` takes :class:`GatherEverything`. ``rows_of=R`` is the
    null of the equality: what R ranks compute of which each orthogonalises its own rows of every
    matrix, alone.
    """
    sharded = dist.is_available() and dist.is_initialized()
    shared = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        return (ZeroAdamW if sharded else torch.optim.AdamW)(named, betas=config.betas, **shared, **options)
    groups = [
        {"params": [(name, p)], "split_sizes": row_blocks(len(p), rows_of) if rows_of else None}
        for name, p in named
    ]
    muon = (GatherEverything if everything else ZeroMuon) if sharded else Muon
    return muon(groups, momentum=config.momentum, batched=False, **shared, **options)


def optimizers_for_ranks(model: Decoder, config: TrainConfig, **options: Any) -> list[torch.optim.Optimizer]:
    """[:func:`matrix_optimizer`, AdamW of the rest], both sharded when there is a process group."""
    matrices, rest = param_groups_for_muon(model)
    names = {p: name for name, p in model.named_parameters()}
    sharded = dist.is_available() and dist.is_initialized()
    adamw = (ZeroAdamW if sharded else torch.optim.AdamW)(
        [(names[p], p) for p in rest],
        lr=config.lr if config.rest_lr is None else config.rest_lr,
        betas=config.betas,
        weight_decay=config.weight_decay,
    )
    return [matrix_optimizer([(names[p], p) for p in matrices], config, **options), adamw]


def train_rank(
    config: TrainConfig,
    options: Mapping[str, Any] | None = None,
    start: RankRun | None = None,
    stop: int = 0,
    before_step: Callable[[int], None] | None = None,
) -> RankRun:
    """Train on this rank's share of every batch: rows ``rank``, ``rank + ranks``, …; without a process group,
    on whole batches in one process. From ``start``, on any other number of ranks, when it is given; until
    ``stop`` steps are done, or ``config.steps``. ``before_step(steps_done)`` is called before each.

    Raises ValueError for a batch that the ranks cannot share evenly: a mean of means would be another loss.
    """
    sharded = dist.is_available() and dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)
    if config.batch_size % ranks:
        raise ValueError(f"batch_size={config.batch_size} must be a multiple of the {ranks} ranks")
    model = Decoder(config.model, seed=config.seed)
    stream = training_batches(config)
    first, stop = start.step if start else 0, stop or config.steps
    optimizers = optimizers_for_ranks(model, config, **(options or {}))
    if start is not None:
        model.load_state_dict(start.weights)
        for _ in range(first):
            next(stream)
        for optimizer, state in zip(optimizers, start.states, strict=True):
            optimizer.load_state_dict(state)

    def loss_of_batch(step: int) -> Tensor:
        if before_step is not None:
            before_step(step)
        inputs, targets = next(stream)
        return model.loss(inputs[rank::ranks], targets[rank::ranks])

    def backward(loss: Tensor) -> None:
        loss.backward()
        if sharded:
            dist.barrier()  # what a rank waits for a slower one here is no communication of the optimizer

    loop = training_steps(
        model,
        config,
        loss_of_batch,
        optimizers,
        backward=backward,
        first=first,
        stop=stop,
        end_at_infinity=False,
    )
    steps = list(loop)
    losses = torch.tensor([step.loss for step in steps])
    seconds = {
        "forward and backward": sum(step.seconds - step.optimizer_seconds for step in steps),
        "optimizer": sum(step.optimizer_seconds for step in steps),
        "communication": 0.0,
    }
    if sharded:
        dist.all_reduce(losses)
        seconds["communication"] = sum(sum(o.traffic.seconds.values()) for o in optimizers)
    names = ("matrices", "rest")
    return RankRun(
        config=config,
        ranks=ranks,
        step=stop,
        weights={name: value.clone() for name, value in model.state_dict().items()},
        sent={n: dict(o.traffic.sent) if sharded else {} for n, o in zip(names, optimizers, strict=True)},
        state_bytes={n: _state_bytes(o) for n, o in zip(names, optimizers, strict=True)},
        states=[optimizer.state_dict() for optimizer in optimizers],
        losses=(losses / ranks).tolist(),
        seconds=seconds,
    )


@dataclass(frozen=True)
class Recording:
    """Real gradients, to be replayed by any number of ranks. ``initial``: the matrices of a model at its
    start; ``gradients[step][micro batch]``: theirs along a one-process run, all by name."""

    config: TrainConfig
    initial: dict[str, Tensor]
    gradients: list[list[dict[str, Tensor]]]


@dataclass(frozen=True)
class Replay:
    """What came of a recording: ``weights``; ``sent`` (bytes, by purpose) and ``state_bytes`` of this rank."""

    weights: dict[str, Tensor]
    sent: dict[str, int]
    state_bytes: int


def record_gradients(config: TrainConfig, micro_batches: int = 4) -> Recording:
    """Train in this process at a constant learning rate, and keep the gradients of the matrices for each of
    ``micro_batches`` equal parts of every batch. Raises ValueError for a batch that cannot be parted so."""
    if config.batch_size % micro_batches:
        raise ValueError(f"batch_size={config.batch_size} must be a multiple of {micro_batches}")
    model = Decoder(config.model, seed=config.seed)
    matrices, stream = named_matrices(model), training_batches(config)
    initial = {name: p.detach().clone() for name, p in matrices.items()}
    losses: list[Tensor] = []
    gradients: list[list[dict[str, Tensor]]] = []

    def loss_of_batch(_: int) -> Tensor:
        inputs, targets = next(stream)
        losses[:] = [
            model.loss(inputs[micro::micro_batches], targets[micro::micro_batches])
            for micro in range(micro_batches)
        ]
        return torch.stack(losses).mean()

    def backward(_: Tensor) -> None:
        gradients.append([])
        total: dict[Tensor, Tensor] = {}
        for loss in losses:
            model.zero_grad(set_to_none=True)
            loss.backward()
            gradients[-1].append({name: p.grad.clone() for name, p in matrices.items()})
            for p in model.parameters():
                total[p] = total.get(p, 0) + p.grad / micro_batches
        for p, gradient in total.items():
            p.grad = gradient

    constant = replace(config, warmup=0.0, final_lr=1.0)
    for _ in training_steps(
        model, constant, loss_of_batch, optimizers_for_ranks(model, config), backward=backward
    ):
        pass
    return Recording(config, initial, gradients)


def matrix_shapes(model: DecoderConfig) -> list[tuple[int, int]]:
    """Shapes of a decoder's matrices, in their order."""
    return [tuple(p.shape) for p in param_groups_for_muon(Decoder(model))[0]]


def replay(recording: Recording, options: Mapping[str, Any] | None = None, exact: bool = False) -> Replay:
    """Step the matrices along the recorded gradients. Each rank averages its share of the micro batches, and
    the optimizer the ranks; without a process group, Muon (or AdamW) gets the mean of all of them.

    ``options`` are those of :func:`optimizers_for_ranks`, with ``optimizer`` (``"muon"``, ``"adamw"``) among
    them. ``exact`` rounds the gradients to multiples of 2⁻²⁰, whose sums are exact in any order: every
    number of ranks then gets the same mean to the last bit. Raises ValueError for ranks that do not
    divide the number of micro batches.
    """
    sharded = dist.is_available() and dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)
    micro_batches = len(recording.gradients[0])
    if micro_batches % ranks:
        raise ValueError(f"{micro_batches} micro batches cannot be shared by {ranks} ranks")
    options = dict(options or {})
    config = replace(recording.config, optimizer=options.pop("optimizer", "muon"))
    named = [(name, torch.nn.Parameter(value.clone())) for name, value in recording.initial.items()]
    optimizer = matrix_optimizer(named, config, **options)
    share = micro_batches // ranks
    for parts in recording.gradients:
        for name, p in named:
            own = [part[name] for part in parts[rank * share : (rank + 1) * share]]
            if exact:
                own = [torch.round(gradient * 2**20) / 2**20 for gradient in own]
            p.grad = sum(own) / share
        optimizer.step()
    return Replay(
        weights={name: p.detach() for name, p in named},
        sent=dict(optimizer.traffic.sent) if sharded else {},
        state_bytes=_state_bytes(optimizer),
    )


def train_fsdp(config: TrainConfig, options: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """As :func:`train_rank`, but FSDP2 shards the parameters by rows, and plain Muon and AdamW step the
    DTensors. Returns the whole weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = Decoder(config.model, seed=config.seed)
    mesh = init_device_mesh("cpu", (ranks,))
    names = list(named_matrices(model))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = dict(model.named_parameters())  # DTensors now
    rest = [p for name, p in parameters.items() if name not in names]
    rest_lr = config.lr if config.rest_lr is None else config.rest_lr
    shared = {"lr": config.lr, "weight_decay": config.weight_decay, "momentum": config.momentum}
    optimizers = [
        Muon([(name, parameters[name]) for name in names], batched=False, **shared, **(options or {})),
        torch.optim.AdamW(rest, lr=rest_lr, betas=config.betas, weight_decay=config.weight_decay),
    ]
    stream = training_batches(config)

    def loss_of_batch(_: int) -> Tensor:
        inputs, targets = next(stream)
        return model.loss(inputs[rank::ranks], targets[rank::ranks])

    for _ in training_steps(model, config, loss_of_batch, optimizers, end_at_infinity=False):
        pass
    return {name: p.full_tensor().detach() for name, p in parameters.items()}


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the buffers alone: counts of steps are left out."""
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() * value.element_size() for value in tensors if value.ndim)


def largest_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The largest absolute difference between two sets of weights of the same names."""
    return max((a[name] - b[name]).abs().max().item() for name in a)


def differing_entries(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> int:
    """How many entries of two sets of weights are not equal to the last bit."""
    return sum(int((a[name] != b[name]).sum()) for name in a)


def small_run(width: int, layers: int, context: int, steps: int, corpus: str | None = None) -> TrainConfig:
    """A small decoder under Muon at the rates of the study: eight windows in a step, so that 1, 2, 4 and 8 ranks can
    share them."""
    return TrainConfig(
        DecoderConfig(d_model=width, heads=2, layers=layers),
        optimizer="muon",
        lr=4e-3,
        rest_lr=8e-3,
        steps=steps,
        batch_size=8,
        context=context,
        corpus=corpus,
    )


def compare(
    answers: Mapping[int, Mapping[tuple[str, int], Replay]], one: Mapping[tuple[str, int], Replay]
) -> pandas.DataFrame:
    """How far ``answers``, {ranks: {(optimizer, seed): replay}}, end from ``one`` process with the same names.

    A row a replay, indexed by ``optimizer``, ``seed`` and ``ranks``, in the order of ``answers``: ``largest``
    difference of a weight, and ``differing``, how many weights are not equal to the last bit.
    """
    import pandas

    rows = [
        {
            "optimizer": optimizer,
            "seed": seed,
            "ranks": ranks,
            "largest": largest_difference(replay.weights, one[optimizer, seed].weights),
            "differing": differing_entries(replay.weights, one[optimizer, seed].weights),
        }
        for ranks, named in answers.items()
        for (optimizer, seed), replay in named.items()
    ]
    return pandas.DataFrame(rows).set_index(["optimizer", "seed", "ranks"])


def run_named(runs: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """{name: what its run returns}, one after another in the same process: ``functools.partial`` objects of
    functions of this module, so that one start of the processes serves them all."""
    return {name: run() for name, run in runs.items()}


def row_blocks(rows: int, ranks: int) -> tuple[int, ...]:
    """Heights of the blocks when ``ranks`` ranks take the rows of a matrix in turn; no empty ones."""
    size = -(-rows // ranks)
    return tuple(min(size, rows - start) for start in range(0, rows, size))


def die(config: TrainConfig, rank: int, step: int) -> None:
    """Train, but be killed in ``rank`` after ``step`` steps, as by a fault of its machine."""

    def perhaps(done: int) -> None:
        if dist.get_rank() == rank and done == step:
            os.kill(os.getpid(), signal.SIGKILL)

    train_rank(config, before_step=perhaps)
