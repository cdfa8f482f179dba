"""Distributed Muon: ZeRO-1 over torch.distributed (Moonlight §2.3, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dslib.optim.muon import (
    Block,
    Muon,
    decay,
    evaluated,
    momentum_directions,
    momentum_dtype,
    orthogonalized,
)
from dslib.optim.sharding import gather_rounds
from dslib.optim.zero import Bucket, ZeroOptimizer


class Matrix(NamedTuple):
    """A matrix as the ranks hold it. ``owners``: (rank, start, stop) of its parts, in entries of the flat
    buffer, where it begins at ``begin``; ``members``: the ranks that orthogonalise it."""

    parameter: Tensor
    group: dict[str, Any]
    shape: tuple[int, int]
    begin: int
    owners: list[tuple[int, int, int]]
    members: tuple[int, ...]

    def part_of(self, rank: int) -> tuple[int, int]:
        """(start, stop) of the rank's part in the flat buffer; an empty range when it has none."""
        parts = ((start, stop) for owner, start, stop in self.owners if owner == rank)
        return next(parts, (self.begin, self.begin))


class ZeroMuon(ZeroOptimizer, Muon):
    """:class:`dslib.optim.Muon` whose momentum is spread over the ranks of a process group.

    All parameters stand end to end in one flat buffer, cut into equal shards wherever the cuts fall. A step
    (Moonlight, arXiv:2502.16982, Algorithm 1):

    1. *reduce-scatter*: each rank gets the mean of all ranks' gradients for its shard (as DDP averages);
    2. the momentum of the shard;
    3. *gather*: of a matrix that a cut goes through, each rank with a part of it gets the other parts;
       other matrices travel nowhere;
    4. Newton–Schulz on whole matrices, of which a rank keeps only what belongs to its shard;
    5. *all-gather* of the updated parameters.

    The update does not depend on the number of ranks: given the same mean gradients it equals that of
    ``Muon(..., batched=False)`` to the last bit for float32 and float64 parameters.

    ``params`` and the options are Muon's, groups and ``split_sizes`` too; ``lr`` is required. Every rank must
    give the same parameters, with equal values, in the same order. ``process_group``: None is the default
    group. ``gather_dtype``: what the momentum travels in, None for its own dtype; ``torch.bfloat16``, the
    dtype of the iterations, halves step 3 as in the paper, and rounds the directions of all matrices, cut
    or not, so that the result still does not depend on the number of ranks. ``overlap`` sends the parts
    of a matrix while others are iterated on: the same numbers. ``ranks``: how many you expect.

    Every rank must call ``step`` as often as the others, ``state_dict`` and ``add_param_group`` too. A
    parameter whose gradient is None on all ranks is left alone; on some, those count as zero. Between steps
    a rank keeps its share of the momentum and nothing else; within a step, one flat copy of the gradients,
    then of the parameters. ``traffic`` counts what was sent: :class:`dslib.optim.collectives.Collectives`.

    Raises RuntimeError without a process group, and ValueError, on all ranks and naming it, for a parameter,
    option or initial value that differs between ranks, a checkpoint of other shapes, a DTensor
    parameter (use Muon), a group of another size than ``ranks``; and whatever Muon raises. A rank that dies
    makes the others' next collective raise, at the latest when the group's timeout is over.
    """

    agreed = ("overlap", "gather_dtype")

    def __init__(
        self,
        params: Iterable,
        process_group: dist.ProcessGroup | None = None,
        *,
        lr: float | Tensor,
        overlap: bool = False,
        gather_dtype: torch.dtype | None = None,
        ranks: int | None = None,
        batched: bool = False,
        **options: Any,
    ) -> None:
        if gather_dtype is not None and not (
            isinstance(gather_dtype, torch.dtype) and gather_dtype.is_floating_point
        ):
            raise ValueError(f"gather_dtype={gather_dtype!r} must be a floating-point dtype or None")
        self._connect(process_group, ranks)
        self.overlap, self.gather_dtype = overlap, gather_dtype
        super().__init__(params, lr, batched=batched, **options)
        self._constructed()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient on some rank. Returns this rank's loss."""
        loss = evaluated(closure)
        gradients = self._reduced_gradients()
        weights = self._weight_shards()
        directions = self._directions(gradients, weights)
        for bucket, direction, weight in zip(self._buckets, directions, weights, strict=True):
            self._update([m for m in self._matrices(bucket) if m.parameter in gradients], direction, weight)
        self._spread(weights, gradients)
        return loss

    def _directions(self, gradients: dict[Tensor, Tensor], weights: list[Tensor]) -> list[Tensor]:
        """Momentum and decay of this rank's parts; returns shards of directions (step 2)."""
        shards = [torch.zeros_like(w, dtype=momentum_dtype(w.dtype)) for w in weights]
        places, parts = {}, {}
        for bucket, shard, weight in zip(self._buckets, shards, weights, strict=True):
            places.update(bucket.views(shard))
            parts.update(bucket.views(weight))
        for group in self.param_groups:
            active = [p for p in group["params"] if p in gradients]
            for p in active:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(gradients[p])
            buffers = [self.state[p]["momentum_buffer"] for p in active]
            found = momentum_directions(buffers, [gradients[p] for p in active], group)
            decay([parts[p] for p in active], group)
            for p, direction in zip(active, found, strict=True):
                places[p].copy_(direction)
        return shards

    def _matrices(self, bucket: Bucket) -> list[Matrix]:
        groups = {p: group for group in self.param_groups for p in group["params"]}
        matrices = []
        for p, begin in zip(bucket.parameters, bucket.layout.starts, strict=True):
            columns = p[0].numel() if len(p) else 0
            for rows in groups[p]["split_sizes"] or (len(p),):
                owners = bucket.layout.owners(begin, begin + rows * columns)
                members = self.members([rank for rank, _, _ in owners])
                matrices.append(Matrix(p, groups[p], (rows, columns), begin, owners, members))
                begin += rows * columns
        return matrices

    def members(self, owners: list[int]) -> tuple[int, ...]:
        """The ranks that orthogonalise a matrix: those that keep a part of it."""
        return tuple(owners)

    def _update(self, matrices: list[Matrix], directions: Tensor, weights: Tensor) -> None:
        """Gather, orthogonalise, and add to ``weights`` what belongs to this rank (steps 3 and 4). Both are
        shards of the matrices' bucket."""
        cut = [m for m in matrices if len(m.members) > 1]
        alone = [m for m in matrices if m.members == (self.traffic.rank,)]
        rounds = [cut] if cut else []
        if self.overlap:
            rounds = [[cut[i] for i in chosen] for chosen in gather_rounds([m.members for m in cut])]
        under_way = [(chosen, self._exchange(chosen, directions)) for chosen in rounds]
        self._apply(alone, [], directions, weights)
        for chosen, received in under_way:
            self._apply(chosen, received(), directions, weights)

    def _own(self, matrix: Matrix, shard: Tensor) -> Tensor:
        """This rank's part of a matrix: a view of its ``shard``."""
        before = self.traffic.rank * len(shard)
        start, stop = matrix.part_of(self.traffic.rank)
        return shard[start - before : stop - before] if start < stop else shard[:0]

    def _exchange(self, matrices: list[Matrix], directions: Tensor) -> Callable[[], list[Tensor]]:
        """Send this rank's parts to the matrices' other members. Every rank calls it, with or without parts."""
        me, dtype = self.traffic.rank, self.gather_dtype or directions.dtype
        parts, lengths = [], []
        for rank in range(self.traffic.ranks):
            mine = [self._own(m, directions) for m in matrices if rank != me and rank in m.members]
            theirs = [m.part_of(rank) for m in matrices if rank != me and me in m.members]
            parts.append(torch.cat([directions[:0], *mine]).to(dtype))
            lengths.append(sum(stop - start for start, stop in theirs))
        return self.traffic.exchange(parts, lengths, "momentum", wait=not self.overlap)

    def _apply(
        self, matrices: list[Matrix], received: list[Tensor], directions: Tensor, weights: Tensor
    ) -> None:
        """Put together the matrices of which this rank is a member, orthogonalise them, keep its part."""
        me = self.traffic.rank
        used = [0] * self.traffic.ranks
        blocks = []
        for matrix in (m for m in matrices if me in m.members):
            own = self._own(matrix, directions)
            whole = own.new_empty(matrix.shape[0] * matrix.shape[1])
            for rank, start, stop in matrix.owners:
                if rank == me:  # rounded as what travels is: no rank's result differs from another's
                    part = own.to(self.gather_dtype or own.dtype)
                else:
                    part = received[rank][used[rank] : used[rank] + stop - start]
                    used[rank] += stop - start
                whole[start - matrix.begin : stop - matrix.begin] = part
            blocks.append(Block(matrix.group, whole.view(matrix.shape), matrix))
        for block, update, scale in orthogonalized(blocks):
            start, stop = (entry - block.target.begin for entry in block.target.part_of(me))
            self._own(block.target, weights).add_(update.reshape(-1)[start:stop], alpha=scale)
