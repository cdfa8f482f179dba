"""ZeRO-1 AdamW: what distributed Muon is compared with, and what trains the rest of its model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from dslib.optim.muon import evaluated
from dslib.optim.zero import ZeroOptimizer


class ZeroAdamW(ZeroOptimizer):
    """torch's AdamW with both of its moments spread over the ranks of a process group (ZeRO-1).

    Reduce-scatter of the mean gradients, AdamW on this rank's shard, all-gather of the parameters. Rules of
    use and errors are those of :class:`dslib.optim.ZeroMuon`; any real parameters will do. Its state
    dictionary is that of ``torch.optim.AdamW`` without ``amsgrad``.
    """

    def __init__(
        self,
        params: Iterable,
        process_group: dist.ProcessGroup | None = None,
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        ranks: int | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not float(value) >= 0:
                raise ValueError(f"{name}={value!r} must be at least 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas!r} must lie in [0, 1)")
        self._connect(process_group, ranks)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._constructed()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient on some rank. Returns this rank's loss."""
        loss = evaluated(closure)
        gradients = self._reduced_gradients()
        shards = self._weight_shards()
        weights: dict[Tensor, Tensor] = {}
        for bucket, shard in zip(self._buckets, shards, strict=True):
            weights.update(bucket.views(shard))
        for group in self.param_groups:
            active = [p for p in group["params"] if p in gradients]
            for p in active:
                if not self.state[p]:
                    moments = {name: torch.zeros_like(gradients[p]) for name in ("exp_avg", "exp_avg_sq")}
                    self.state[p].update(step=torch.tensor(0.0), **moments)
            states = [self.state[p] for p in active]
            adamw(
                [weights[p] for p in active],
                [gradients[p] for p in active],
                *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")),
                [],
                [state["step"] for state in states],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
        self._spread(shards, gradients)
        return loss
