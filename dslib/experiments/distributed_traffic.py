"""What the ranks of a sharded optimizer keep and send: counted, and on the wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dslib.experiments.distributed_muon import Recording, Replay, replay
from dslib.models.train_config import TrainConfig
from dslib.optim.collectives import Collectives

if TYPE_CHECKING:
    import pandas

#: {optimizer: its options}: those that are counted.
COUNTED = {
    "AdamW": {"optimizer": "adamw"},
    "Muon": {"gather_dtype": torch.bfloat16},
    "gather all, fp32": {"everything": True},
}


def recording_of_shapes(
    shapes: Sequence[tuple[int, int]], steps: int = 1, micro_batches: int = 4
) -> Recording:
    """Random matrices and gradients of these shapes: enough where only bytes are counted."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> dict[str, Tensor]:
        return {f"{index}": torch.randn(shape, generator=generator) for index, shape in enumerate(shapes)}

    return Recording(TrainConfig(), draw(), [[draw() for _ in range(micro_batches)] for _ in range(steps)])


def counting_runs(
    models: Mapping[str, Sequence[tuple[int, int]]],
) -> dict[tuple[str, str], Callable[[], Replay]]:
    """{(model, optimizer): a step of it} for :func:`dslib.experiments.distributed_muon.run_named`; ``models`` gives
    the shapes of the matrices by name, and :data:`COUNTED` the optimizers."""
    return {
        (model, optimizer): partial(replay, recording_of_shapes(shapes), options)
        for model, shapes in models.items()
        for optimizer, options in COUNTED.items()
    }


def counts(
    models: Mapping[str, Sequence[tuple[int, int]]],
    results: Mapping[int, Sequence[Mapping[tuple[str, str], Replay]]],
) -> pandas.DataFrame:
    """A row a number of ranks, model and optimizer, from ``{ranks: what each rank's runs returned}``.

    Columns ``ranks``, ``model``, ``optimizer``; ``unsharded``, the bytes of one momentum buffer of the model in
    fp32; ``state``, the bytes of state on the fullest rank; ``sent``, the bytes that all ranks send in a step, and
    of these ``gradients``, ``parameters`` and ``momentum``.
    """
    import pandas

    rows = []
    for ranks, each_rank in results.items():
        for model, shapes in models.items():
            for optimizer in COUNTED:
                runs = [named[model, optimizer] for named in each_rank]
                sent = total_sent([run.sent for run in runs])
                rows.append(
                    {
                        "ranks": ranks,
                        "model": model,
                        "optimizer": optimizer,
                        "unsharded": 4 * sum(rows * columns for rows, columns in shapes),
                        "state": max(run.state_bytes for run in runs),
                        "sent": sum(sent.values()),
                        **{name: sent.get(name, 0) for name in ("gradients", "parameters", "momentum")},
                    }
                )
    return pandas.DataFrame(rows)


def total_sent(sent: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Bytes that all ranks of a run sent, by purpose, from what each did; checkpoints are left out."""
    purposes = dict.fromkeys(name for counts in sent for name in counts if name != "checkpoint")
    return {name: sum(counts.get(name, 0) for counts in sent) for name in purposes}


def wire_check(entries: int, repeats: int = 4) -> dict[str, tuple[float, float | None]]:
    """For each collective of a step, on a float32 buffer of ``entries``: (bytes counted, bytes that the
    operating system saw on its loopback interface), of all ranks together, a call. None where the system
    does not tell; it counts other programs too, so large buffers make it exact."""
    traffic = Collectives()
    flat = torch.ones(entries)
    shard = flat[: entries // traffic.ranks].clone()
    collectives: dict[str, Callable[[], Any]] = {
        "reduce-scatter": lambda: traffic.reduce_scatter(flat, "check"),
        "exchange": lambda: traffic.exchange(
            [shard] * traffic.ranks, [len(shard)] * traffic.ranks, "check"
        )(),
        "all-gather": lambda: traffic.all_gather(shard, "check"),
    }
    found = {}
    for name, collective in collectives.items():
        dist.barrier()
        before = _loopback_bytes()
        dist.barrier()
        traffic.reset()
        for _ in range(repeats):
            collective()
        dist.barrier()
        after = _loopback_bytes()
        dist.barrier()
        seen = None if before is None or after is None else (after - before) / repeats
        found[name] = (traffic.sent["check"] * traffic.ranks / repeats, seen)
    return found


def _loopback_bytes() -> int | None:
    try:
        with open("/proc/net/dev") as file:
            return next(int(line.split()[9]) for line in file if line.strip().startswith("lo:"))
    except (OSError, StopIteration):
        return None
