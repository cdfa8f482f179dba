"""ZeRO-1 for any elementwise optimizer state: gradients and state in shards, parameters everywhere."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dslib.optim.collectives import Collectives
from dslib.optim.dtensor import is_dtensor
from dslib.optim.muon import check_checkpoint, momentum_dtype, parameter_names
from dslib.optim.sharding import FlatLayout


@dataclass
class Bucket:
    """Parameters of one dtype and device, laid end to end in the order of their groups. ``parts`` holds what
    this rank keeps of each: (start, stop) in the flattened parameter and the offset in its shard."""

    parameters: list[Tensor]
    layout: FlatLayout
    parts: dict[Tensor, tuple[int, int, int]]

    def views(self, shard: Tensor) -> dict[Tensor, Tensor]:
        """This rank's shard as the parameters' parts, empty ones too."""
        return {p: shard[offset : offset + stop - start] for p, (start, stop, offset) in self.parts.items()}

    def whole(self, flat: Tensor) -> dict[Tensor, Tensor]:
        """The whole buffer as the parameters' values."""
        starts = zip(self.parameters, self.layout.starts, strict=True)
        return {p: flat[start : start + p.numel()].view(p.shape) for p, start in starts}


class ZeroOptimizer(torch.optim.Optimizer):
    """What sharded optimizers share; see :class:`dslib.optim.ZeroMuon` for the rules of use.

    The state of a parameter is that of this rank's part of it, flat, and may be empty. ``traffic`` is the
    :class:`dslib.optim.collectives.Collectives` whose counts say what was sent.
    """

    traffic: Collectives
    #: Attributes in which the ranks must agree, besides the options of the groups.
    agreed: tuple[str, ...] = ()

    def _connect(self, process_group: dist.ProcessGroup | None, ranks: int | None) -> None:
        """To be called before the groups are added."""
        self.traffic = Collectives(process_group)
        if ranks is not None and ranks != self.traffic.ranks:
            raise ValueError(
                f"process_group has {self.traffic.ranks} ranks where ranks={ranks} are asked for; start that "
                f"many processes (torchrun --nproc-per-node {ranks}) or pass the right group"
            )
        self._buckets: list[Bucket] = []

    def _constructed(self) -> None:
        """To be called at the end of the constructor: checks that all ranks agree, then cuts the shards."""
        self._check_ranks_agree()
        self._buckets = self._laid_out()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. After construction every rank must call it: the cuts move, and the state with them."""
        in_use = bool(self._buckets)
        saved = self.state_dict()["state"] if in_use else {}
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for name, parameter in zip(parameter_names(group), group["params"], strict=True):
                if is_dtensor(parameter):
                    raise ValueError(
                        f"parameter {name} is a DTensor, which is sharded already: use Muon, which gathers it"
                    )
            if in_use:
                self._check_ranks_agree()
        except ValueError:
            self.param_groups.pop()
            raise
        if in_use:
            self._buckets = self._laid_out()
            self._keep_parts(saved)

    def _laid_out(self) -> list[Bucket]:
        kinds: dict[tuple, list[Tensor]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                kinds.setdefault((p.dtype, p.device), []).append(p)
        return [self._bucket(parameters) for parameters in kinds.values()]

    def _bucket(self, parameters: list[Tensor]) -> Bucket:
        layout = FlatLayout(tuple(p.numel() for p in parameters), self.traffic.ranks)
        parts = {}
        for index, p in enumerate(parameters):
            mine = [piece for piece in layout.pieces(index) if piece.rank == self.traffic.rank]
            parts[p] = (mine[0].start, mine[0].stop, mine[0].offset) if mine else (0, 0, 0)
        return Bucket(parameters, layout, parts)

    def _check_ranks_agree(self) -> None:
        """Raise on all ranks alike, naming the first parameter or option in which a rank differs from rank 0."""
        mine = [(f"option {name}", repr(getattr(self, name))) for name in self.agreed]
        for number, group in enumerate(self.param_groups):
            members = list(zip(parameter_names(group), group["params"], strict=True))
            mine += [(f"parameter {name}", f"{tuple(p.shape)} {p.dtype}") for name, p in members]
            mine += [(f"the initial value of parameter {name}", _checksum(p)) for name, p in members]
            options = sorted(group.keys() - {"params", "param_names"})
            mine += [(f"option {name} of group {number}", repr(group[name])) for name in options]
        everyones = self.traffic.everyones(mine)
        for rank, theirs in enumerate(everyones):
            for first, other in zip_longest(everyones[0], theirs, fillvalue=("no further parameter", "")):
                if first != other:
                    shown = [
                        f"{what} {f'({value})' if value else ''}".strip() for what, value in (first, other)
                    ]
                    raise ValueError(
                        f"ranks must construct the same optimizer: {shown[0]} on rank 0 stands where rank {rank} "
                        f"has {shown[1]}; give every rank the same parameters, in the same order and with equal "
                        "values, and the same options"
                    )

    def _reduced_gradients(self) -> dict[Tensor, Tensor]:
        """This rank's part of the mean gradient of every parameter for which some rank has a gradient.

        A rank without one counts as zero. The reduce-scatter of Algorithm 1.
        """
        parameters = [p for bucket in self._buckets for p in bucket.parameters]
        if not parameters:
            return {}
        kinds = [0 if p.grad is None else 1 if p.grad.layout == torch.strided else 2 for p in parameters]
        flags = torch.tensor(kinds, dtype=torch.uint8, device=parameters[0].device)
        found = dict(zip(parameters, self.traffic.maximum(flags, "flags").tolist(), strict=True))
        for group in self.param_groups:
            for name, p in zip(parameter_names(group), group["params"], strict=True):
                if found[p] == 2:  # known to all ranks, so that none is left waiting
                    raise RuntimeError(
                        f"the gradient of parameter {name} is sparse on some rank: dense gradients are needed; "
                        "use sparse=False in the embedding, or another optimizer for it"
                    )
        gradients = {}
        for bucket in self._buckets:
            first, size = bucket.parameters[0], bucket.layout.shard_size * bucket.layout.ranks
            flat = torch.zeros(size, dtype=momentum_dtype(first.dtype), device=first.device)
            for p, place in bucket.whole(flat).items():
                if p.grad is not None:
                    place.copy_(p.grad)
            shard = self.traffic.reduce_scatter(flat, "gradients").div_(bucket.layout.ranks)
            gradients.update({p: part for p, part in bucket.views(shard).items() if found[p]})
        return gradients

    def _weight_shards(self) -> list[Tensor]:
        """Copies of this rank's shard of the parameters, a bucket each."""
        shards = []
        for bucket in self._buckets:
            shard = bucket.parameters[0].detach().new_zeros(bucket.layout.shard_size)
            for p, place in bucket.views(shard).items():
                start, stop, _ = bucket.parts[p]
                place.copy_(p.detach().reshape(-1)[start:stop])
            shards.append(shard)
        return shards

    def _spread(self, shards: list[Tensor], active: dict[Tensor, Any]) -> None:
        """Every rank's updated shard into every rank's parameters: the all-gather of Algorithm 1."""
        for bucket, shard in zip(self._buckets, shards, strict=True):
            flat = self.traffic.all_gather(shard, "parameters")
            for p, value in bucket.whole(flat).items():
                if p in active:
                    p.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the one-process optimizer saves it, on every rank; every rank must call it."""
        saved = super().state_dict()
        members = [p for group in self.param_groups for p in group["params"]]
        numbers = {p: number for number, p in enumerate(members)}
        whole: dict[int, dict[str, Any]] = {
            numbers[p]: dict(self.state[p]) for p in members if p in self.state
        }
        for bucket in self._buckets:
            keys = dict.fromkeys(key for p in bucket.parameters for key in self.state.get(p, {}))
            for key in (key for key in keys if key != "step"):  # a count of steps is whole already
                held = {p: self.state[p][key] for p in bucket.parameters if key in self.state.get(p, {})}
                shard = next(iter(held.values())).new_zeros(bucket.layout.shard_size)
                views = bucket.views(shard)
                for p, value in held.items():
                    views[p].copy_(value)
                values = bucket.whole(self.traffic.all_gather(shard, "checkpoint"))
                for p in held:
                    whole[numbers[p]][key] = values[p].clone()
        return {**saved, "state": whole}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what a ``state_dict`` of any number of ranks, or of the one-process optimizer, holds.

        Raises ValueError, naming the parameter, where a saved tensor has another shape.
        """
        check_checkpoint(state_dict, self.param_groups)
        super().load_state_dict({**state_dict, "state": {}})
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        saved = state_dict["state"]
        self._keep_parts({number: saved[index] for number, index in enumerate(indices) if index in saved})

    def _keep_parts(self, whole: dict[int, dict[str, Tensor]]) -> None:
        """This rank's parts of a whole state, which counts the parameters in the order of the groups."""
        members = [p for group in self.param_groups for p in group["params"]]
        parts = {p: part for bucket in self._buckets for p, part in bucket.parts.items()}
        for number, state in whole.items():
            p = members[number]
            start, stop, _ = parts[p]
            dtype = momentum_dtype(p.dtype)
            self.state[p] = {
                key: value.clone()
                if key == "step"
                else value.reshape(-1)[start:stop].to(p.device, dtype, copy=True)
                for key, value in state.items()
            }

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this rank keeps."""
        return sum(
            value.numel() * value.element_size() for state in self.state.values() for value in state.values()
        )


def _checksum(parameter: Tensor) -> str:
    values = parameter.detach().contiguous().cpu().reshape(-1)
    return f"checksum {zlib.crc32(values.view(torch.uint8).numpy()) if values.numel() else 0:08x}"
