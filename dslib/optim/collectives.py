"""The collectives of a sharded optimizer, each counted: bytes, calls, seconds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Collectives:
    """The collectives over one process group; every byte of a sharded optimizer goes through here.

    ``sent[name]`` counts the payload that this rank sends, in bytes, under the name of its purpose: for a
    reduce-scatter or an all-gather of a buffer of n bytes (R − 1)/R·n, for an all-reduce twice that, as
    on a ring, where nothing can do with less; for an exchange, what it sends to other ranks. A backend
    may send more. ``calls[name]`` counts calls, and ``seconds[name]`` the host's time in them, waiting for
    a slower rank included; a CUDA backend returns before it is done, so there that is no transfer time.

    Raises RuntimeError without an initialised process group, TypeError for what is no process group, and
    ValueError when this process is no member of it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "there is no process group: call torch.distributed.init_process_group first, under torchrun or "
                "in dslib.optim.run_processes"
            )
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"process_group does not contain this process, rank {dist.get_rank()}; only its members may "
                "construct the optimizer"
            )
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"process_group={group!r:.60} is a {type(group).__name__}, not a ProcessGroup")
        self.group = group
        self.ranks: int = dist.get_world_size(group)
        self.rank: int = dist.get_rank(group)
        self.reset()

    def reset(self) -> None:
        """Start all counts anew."""
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    def reduce_scatter(self, flat: Tensor, name: str) -> Tensor:
        """flat: (R·n,), each rank's own → (n,), this rank's part of the sum over ranks."""
        out = flat.new_empty(flat.numel() // self.ranks)
        # Renamed in torch 2.13, where the old name warns.
        collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        self._run(name, _bytes(flat) * (self.ranks - 1) // self.ranks, collective, out, flat)
        return out

    def all_gather(self, shard: Tensor, name: str) -> Tensor:
        """shard: (n,), each rank's own → (R·n,), the same everywhere."""
        out = shard.new_empty(shard.numel() * self.ranks)
        collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._run(name, _bytes(shard) * (self.ranks - 1), collective, out, shard)
        return out

    def maximum(self, values: Tensor, name: str) -> Tensor:
        """values: any shape, each rank's own → their largest over ranks, in place."""
        sent = 2 * _bytes(values) * (self.ranks - 1) // self.ranks
        self._run(name, sent, dist.all_reduce, values, op=dist.ReduceOp.MAX)
        return values

    def exchange(
        self, parts: Sequence[Tensor], lengths: Sequence[int], name: str, wait: bool = True
    ) -> Callable[[], list[Tensor]]:
        """Send ``parts[r]`` to rank r and receive ``lengths[r]`` entries from it, all of one dtype; both may
        be empty. Every rank joins. Returns a function that waits and returns what came, a tensor a rank;
        with ``wait=False`` the transfer goes on until it is called."""
        outgoing = torch.cat(list(parts))
        incoming = outgoing.new_empty(sum(lengths))
        sent = sum(_bytes(part) for rank, part in enumerate(parts) if rank != self.rank)
        work = self._run(
            name,
            sent,
            dist.all_to_all_single,
            incoming,
            outgoing,
            list(lengths),
            [len(part) for part in parts],
            async_op=not wait,
        )

        def finished() -> list[Tensor]:
            if work is not None:
                began = time.perf_counter()
                work.wait()
                self.seconds[name] += time.perf_counter() - began
            return list(incoming.split(list(lengths)))

        return finished

    def everyones(self, thing: Any) -> list[Any]:
        """``thing`` of every rank, pickled; for checks, not counted."""
        things: list[Any] = [None] * self.ranks
        dist.all_gather_object(things, thing, group=self.group)
        return things

    def _run(self, name: str, sent: int, collective: Callable[..., Any], *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        work = collective(*args, group=self.group, **options)
        self.seconds[name] += time.perf_counter() - began
        self.calls[name] += 1
        self.sent[name] += sent
        return work


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
