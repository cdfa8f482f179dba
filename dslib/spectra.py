"""Singular spectra of weights, gradients and updates."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def singular_spectrum(W: Tensor, normalize: bool = False) -> Tensor:
    """Singular values in descending order, in float64; (..., A, B) → (..., min(A, B)).

    ``normalize`` divides by the largest (an all-zero matrix stays zero), as in Moonlight's appendix F.
    Raises ValueError for fewer than two dimensions and for NaN or infinite entries.
    """
    if W.ndim < 2:
        raise ValueError(f"W has shape {tuple(W.shape)}; a spectrum needs a matrix, (..., A, B)")
    if not W.isfinite().all():
        count = int((~W.isfinite()).sum())
        raise ValueError(
            f"W holds {count} entries that are NaN or infinite; a spectrum needs finite weights (did the run "
            "diverge?)"
        )
    sigma = torch.linalg.svdvals(W.detach().double())
    if normalize and sigma.numel():
        largest = sigma[..., :1]
        sigma = sigma / torch.where(largest == 0, torch.ones_like(largest), largest)
    return sigma


def svd_entropy(W: Tensor) -> Tensor:
    """How evenly a matrix's energy is spread over its directions: (..., A, B) → (...), float64 in [0, 1].

        H(σ) = −1/log n · Σᵢ pᵢ·log pᵢ,   pᵢ = σᵢ² / Σⱼ σⱼ²        Moonlight §3.4, arXiv:2502.16982

    n = min(A, B), the length of the spectrum, zeros among it included: they add nothing to the sum
    (0·log 0 = 0) and still count in log n. Rank one gives 0, equal singular values give 1; scaling,
    transposing and rotating change nothing. A matrix of zeros has no direction at all: NaN. A single row
    or column (n = 1, log n = 0) has one direction and nothing to spread: 0. Raises ValueError as
    :func:`singular_spectrum` does, and for an empty matrix.
    """
    return _entropy_of(_spectrum_of_some(W))


def effective_rank(W: Tensor) -> Tensor:
    """How many directions of equal weight would be spread as evenly: (..., A, B) → (...), float64 in [1, n].

        erank(σ) = exp(−Σᵢ qᵢ·log qᵢ),   qᵢ = σᵢ / Σⱼ σⱼ            Roy & Vetterli 2007

    The shares are of σ itself, not of σ² as in :func:`svd_entropy`: a long tail of small singular values
    counts for more here. NaN for a matrix of zeros; raises ValueError as :func:`svd_entropy` does.
    """
    return _effective_rank_of(_spectrum_of_some(W))


def stable_rank(W: Tensor) -> Tensor:
    """‖W‖_F² / σ₁²: (..., A, B) → (...), float64 in [1, rank].

    Only the largest singular value and the total energy enter, so it hardly notices the tail. NaN for a
    matrix of zeros; raises ValueError as :func:`svd_entropy` does.
    """
    return _stable_rank_of(_spectrum_of_some(W))


def spread(W: Tensor) -> dict[str, Tensor]:
    """:func:`svd_entropy`, :func:`effective_rank` and :func:`stable_rank` by their names, from one SVD."""
    sigma = _spectrum_of_some(W)
    return {
        "svd_entropy": _entropy_of(sigma),
        "effective_rank": _effective_rank_of(sigma),
        "stable_rank": _stable_rank_of(sigma),
    }


def _spectrum_of_some(W: Tensor) -> Tensor:
    """Singular values over the largest, so that powers of them neither overflow nor vanish: (..., n)."""
    sigma = singular_spectrum(W, normalize=True)
    if sigma.shape[-1] == 0:
        raise ValueError(f"W has shape {tuple(W.shape)}: a matrix without entries has no spectrum to measure")
    return sigma


def _entropy_of(sigma: Tensor) -> Tensor:
    n = sigma.shape[-1]
    entropy = _shannon(sigma.square())
    return entropy / math.log(n) if n > 1 else entropy


def _effective_rank_of(sigma: Tensor) -> Tensor:
    return _shannon(sigma).exp()


def _stable_rank_of(sigma: Tensor) -> Tensor:
    return sigma.square().sum(-1) / sigma[..., 0]


def _shannon(weight: Tensor) -> Tensor:
    """−Σ p·log p in nats, p the shares of ``weight`` (..., n) and 0·log 0 = 0; NaN where all are zero."""
    return torch.special.entr(weight / weight.sum(-1, keepdim=True)).sum(-1)


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
