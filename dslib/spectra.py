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


def leading_share(W: Tensor, k: int) -> Tensor:
    """Share of a matrix's squared Frobenius norm in its ``k`` leading singular directions.

    (..., A, B) → (...), float64; an all-zero matrix gives NaN. Raises ValueError for k below 1.
    """
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")
    energy = singular_spectrum(W).square()
    return energy[..., :k].sum(-1) / energy.sum(-1)


def matrix_with_spectrum(sigma: Tensor, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """A random matrix U·diag(σ)·Vᵀ of the given singular values, U and V uniform: (A, B) in σ's dtype.

    ``sigma``: (n,), n at most min(A, B); the other singular values are zero. Raises ValueError when there
    are more values than the shape has room for.
    """
    rows, columns = shape
    if sigma.ndim != 1 or len(sigma) > min(shape):
        raise ValueError(
            f"sigma has shape {tuple(sigma.shape)}; a {rows} × {columns} matrix has {min(shape)} values"
        )
    U, V = (
        torch.linalg.qr(torch.randn(size, len(sigma), generator=generator, dtype=sigma.dtype)).Q
        for size in shape
    )
    return (U * sigma) @ V.T
