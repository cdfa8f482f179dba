"""The root mean square of an update, Lemma 1, and the learning-rate factors built on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

#: What AdamW's updates measure (Moonlight §2.2: 0.2 to 0.4), and what Muon's are scaled to.
ADAMW_RMS = 0.2

ADJUST_LR_MODES = ("match_rms_adamw", "original", "spectral", "baseline", "update_norm", None)


def update_rms(update: Tensor) -> Tensor:
    """√(mean of squares) over all entries, a 0-dimensional tensor in at least float32.

    Any shape, any real dtype. Raises ValueError for an empty tensor.
    """
    if update.numel() == 0:
        raise ValueError(f"update has shape {tuple(update.shape)}: the RMS of no entries is undefined")
    return update.detach().to(torch.promote_types(update.dtype, torch.float32)).square().mean().sqrt()


def theoretical_update_rms(shape: Sequence[int], rank: int | None = None) -> float:
    """Lemma 1 (Moonlight, arXiv:2502.16982, appendix A): a rank-r orthogonalised update of shape
    [A, B] has RMS √(r / (A·B)), which is 1/√max(A, B) at full rank.

    Raises ValueError for a shape that is no matrix or a rank outside 0…min(A, B).
    """
    rows, columns = matrix_shape(shape)
    full = min(rows, columns)
    if rank is None:
        rank = full
    if not 0 <= rank <= full:
        raise ValueError(f"rank={rank} is outside 0…{full} for a matrix of shape {tuple(shape)}")
    return math.sqrt(rank / (rows * columns))


def adjusted_lr_factor(
    shape: Sequence[int], mode: str | None, hidden_size: int | None = None, target_rms: float = ADAMW_RMS
) -> float:
    """What multiplies the orthogonalised update of a weight of this shape ([out, in] = [A, B]).

    ==================  ==================  =====================================================
    mode                factor              source
    ==================  ==================  =====================================================
    "match_rms_adamw"   0.2·√max(A, B)      Moonlight eq. 4, "Adjusted LR" in its Table 1
    "baseline"          0.2·√H              Moonlight Table 1; H is ``hidden_size``, min(A, B) if None
    "original"          √max(1, A/B)        Jordan's repository and torch.optim.Muon's "original"
    "spectral"          √(A/B)              Bernstein's spectral condition, RMS → RMS operator norm
    None                1                   Jordan's blog, Moonlight eq. 1
    ==================  ==================  =====================================================

    ``target_rms`` replaces the 0.2 (Moonlight, Table 8, sweeps it). A convolution weight counts as
    [out, in·kh·kw]. ``"update_norm"`` (0.2 / RMS of each update)
    depends on the update and has no factor of the shape alone: ValueError, as for an unknown mode.
    """
    rows, columns = matrix_shape(shape)
    if mode == "match_rms_adamw":
        return target_rms * math.sqrt(max(rows, columns))
    if mode == "baseline":
        return target_rms * math.sqrt(min(rows, columns) if hidden_size is None else hidden_size)
    if mode == "original":
        return math.sqrt(max(1.0, rows / columns))
    if mode == "spectral":
        return math.sqrt(rows / columns)
    if mode is None:
        return 1.0
    if mode == "update_norm":
        raise ValueError(
            "mode='update_norm' divides by each update's own RMS: no factor follows from a shape"
        )
    raise ValueError(f"mode={mode!r} is unknown; use one of {', '.join(map(repr, ADJUST_LR_MODES))}")


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(A, B) of a weight: trailing dimensions of a convolution are folded into B.

    Raises ValueError for fewer than two dimensions or an empty one.
    """
    sizes = tuple(int(size) for size in shape)
    if len(sizes) < 2 or min(sizes) < 1:
        raise ValueError(
            f"shape={sizes} is not that of a matrix: two or more non-empty dimensions are needed"
        )
    return sizes[0], math.prod(sizes[1:])


class UpdateMeter:
    """Records the RMS of every update that an optimizer really makes, whatever the optimizer is.

        u = ((1 − lr·λ)·W_before − W_after) / lr        so that W_after = W_before − lr·(u + λ·W_before)

    the O·factor of Moonlight eq. 4, or AdamW's m̂/(√v̂ + ε). ``named_parameters``: (name, parameter)
    pairs, the ones to follow; a group with ``split_sizes`` gets one entry a block, "name[0]", "name[1]" ….

    ``records`` has a dictionary {name: RMS} a step; a parameter without a gradient is absent from its
    step's. Decay is taken to be decoupled, from the group's ``lr`` and ``weight_decay``; steps with
    lr = 0 are recorded as empty. Use as a context manager, or call :meth:`remove` to stop.

        with UpdateMeter(optimizer, model.named_parameters()) as meter:
            train()
        meter.records[-1]["blocks.0.mlp.up.weight"]

    Raises ValueError when none of the parameters belongs to the optimizer.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> None:
        names = {parameter: name for name, parameter in named_parameters}
        self._followed = [
            (names[parameter], parameter, group)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter in names
        ]
        if not self._followed:
            raise ValueError(
                "named_parameters holds no parameter of this optimizer; pass those that it updates"
            )
        self.records: list[dict[str, float]] = []
        self._before: list[tuple[str, Tensor, Tensor, dict[str, Any]]] = []
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._keep()),
            optimizer.register_step_post_hook(lambda *_: self._measure()),
        ]

    def _keep(self) -> None:
        self._before = [
            (name, parameter, parameter.detach().clone(), group)
            for name, parameter, group in self._followed
            if parameter.grad is not None
        ]

    @torch.no_grad()
    def _measure(self) -> None:
        record: dict[str, float] = {}
        for name, parameter, before, group in self._before:
            lr, decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
            if lr == 0:
                continue
            # In float64: the update is a small difference of large weights.
            update = ((1 - lr * decay) * before.double() - parameter.double()) / lr
            sizes = group.get("split_sizes")
            blocks = {name: update} if sizes is None else _numbered(name, update.split(tuple(sizes)))
            record |= {key: update_rms(block).item() for key, block in blocks.items()}
        self.records.append(record)
        self._before = []

    def remove(self) -> None:
        """Stop recording; what was recorded stays."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> UpdateMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _numbered(name: str, blocks: Iterable[Tensor]) -> dict[str, Tensor]:
    return {f"{name}[{position}]": block for position, block in enumerate(blocks)}
