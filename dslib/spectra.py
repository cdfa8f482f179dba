"""Singular spectra of weights, gradients and updates."""

from __future__ import annotations

import torch
from torch import Tensor


def singular_spectrum(W: Tensor, normalize: bool = False) -> Tensor:
    """Singular values in descending order, in float64; (..., A, B) → (..., min(A, B)).

    ``normalize`` divides by the largest (an all-zero matrix stays zero). Raises ValueError for
    fewer than two dimensions.
    """
    if W.ndim < 2:
        raise ValueError(f"W has shape {tuple(W.shape)}; a spectrum needs a matrix, (..., A, B)")
    sigma = torch.linalg.svdvals(W.detach().double())
    if normalize and sigma.numel():
        largest = sigma[..., :1]
        sigma = sigma / torch.where(largest == 0, torch.ones_like(largest), largest)
    return sigma
