"""The root mean square of an update, Lemma 1, and the learning-rate factors built on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

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
