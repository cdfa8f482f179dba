"""Where the cuts of a flat buffer fall: ZeRO's shards, and which ranks need which matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from dslib.optim.newton_schulz import newton_schulz_flops


class Piece(NamedTuple):
    """Entries ``start`` to ``stop`` of the flattened tensor number ``tensor``, which stand at ``offset`` in
    the shard of ``rank``."""

    tensor: int
    rank: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class FlatLayout:
    """Tensors of ``sizes`` entries laid end to end and cut into ``ranks`` shards of equal length, wherever
    the cuts fall; what is missing at the end is padding. A shard may hold many tensors, a part of one, or,
    when there are more ranks than entries, nothing. Raises ValueError for no rank or a negative size."""

    sizes: tuple[int, ...]
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks} must be at least 1")
        if any(size < 0 for size in self.sizes):
            raise ValueError(f"sizes={self.sizes} must not be negative")

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each tensor begins in the flat buffer."""
        return (0, *accumulate(self.sizes))[:-1]

    @property
    def shard_size(self) -> int:
        """Entries of a shard, padding included."""
        return math.ceil(sum(self.sizes) / self.ranks)

    def owners(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(rank, start, stop) of every rank that holds a part of the buffer's entries ``start`` to ``stop``."""
        if start >= stop:
            return []
        size = self.shard_size
        ranks = range(start // size, (stop - 1) // size + 1)
        return [(rank, max(start, rank * size), min(stop, (rank + 1) * size)) for rank in ranks]

    def pieces(self, tensor: int) -> list[Piece]:
        """The parts of one tensor, in the order of their ranks; none of an empty tensor."""
        first = self.starts[tensor]
        return [
            Piece(tensor, rank, start - first, stop - first, start - rank * self.shard_size)
            for rank, start, stop in self.owners(first, first + self.sizes[tensor])
        ]


def gather_rounds(members: Sequence[Sequence[int]]) -> list[list[int]]:
    """Split matrices, of which ``members[i]`` are the ranks that need matrix i, into rounds in which no rank
    needs two: while a rank iterates on the matrix of one round, that of the next can travel."""
    rounds: list[list[int]] = []
    busy: list[set[int]] = []
    for index, ranks in enumerate(members):
        for taken, chosen in zip(busy, rounds, strict=True):
            if taken.isdisjoint(ranks):
                taken.update(ranks)
                chosen.append(index)
                break
        else:
            busy.append(set(ranks))
            rounds.append([index])
    return rounds


def planned_traffic(
    shapes: Sequence[tuple[int, int]],
    ranks: int,
    gradient_bytes: int = 4,
    parameter_bytes: int = 4,
    momentum_bytes: int = 2,
) -> dict[str, float]:
    """Bytes that all ranks together send in a step of ZeRO-1 Muon over matrices of these ``shapes``.

    ``"gradients"`` (reduce-scatter) and ``"parameters"`` (all-gather) are what distributed AdamW sends as
    well: (R − 1)/R of the buffer a rank on a ring. ``"momentum"`` is the gather of Algorithm 1 (Moonlight
    §2.3): every rank that holds a part of a matrix sends it to the others that do. ``"ratio"`` is the
    whole over AdamW's share (1 for one rank), and ``"iterations"`` the Newton–Schulz FLOPs of the busiest
    rank over those of one process: a matrix is iterated on by every rank that holds a part of it.
    """
    layout = FlatLayout(tuple(a * b for a, b in shapes), ranks)
    padded = layout.shard_size * ranks
    gradients, parameters = ((ranks - 1) * padded * size for size in (gradient_bytes, parameter_bytes))
    momentum, work = 0, [0] * ranks
    for index, shape in enumerate(shapes):
        pieces = layout.pieces(index)
        momentum += (len(pieces) - 1) * layout.sizes[index] * momentum_bytes if pieces else 0
        for piece in pieces:
            work[piece.rank] += newton_schulz_flops(shape)
    shared = gradients + parameters
    return {
        "gradients": gradients,
        "momentum": momentum,
        "parameters": parameters,
        "ratio": (shared + momentum) / shared if shared else 1.0,
        "iterations": max(work) / max(1, sum(newton_schulz_flops(shape) for shape in shapes)),
    }
