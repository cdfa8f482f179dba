"""Steepest descent under a norm: which direction lowers a linear loss most for its size.

The direction of steepest descent of a loss with gradient G, under a norm ‖·‖, is −argmax ⟨G, D⟩ over
‖D‖ ≤ 1 (Bernstein and Newhouse 2024, arXiv:2409.20325). The norm decides the optimizer: Frobenius is
normalised SGD, the largest entry is sign descent (Adam without averaging), the spectral norm is Muon,
and Schatten-p lies in between.
"""

from __future__ import annotations

import torch
from torch import Tensor

Norm = str | float


def matrix_norm(D: Tensor, norm: Norm) -> Tensor:
    """‖D‖ for ``norm`` in ``"frobenius"``, ``"max"`` (largest entry), ``"spectral"``, or a number p ≥ 1
    for Schatten-p. D: (A, B); the result has no dimensions. Raises ValueError for another norm."""
    p = _schatten_exponent(norm)
    if p is None:
        return D.abs().max()
    return torch.linalg.vector_norm(torch.linalg.svdvals(D), ord=p)


def steepest_direction(G: Tensor, norm: Norm) -> Tensor:
    """The D with ‖D‖ = 1 that maximises ⟨G, D⟩, in closed form.

    G: (A, B), not zero. ``"max"``: sign(G). Schatten-p with 1/p + 1/q = 1: U·diag(σ^(q−1))·Vᵀ over
    its norm, which is G/‖G‖_F at p = 2, U·Vᵀ at p = ∞ (``"spectral"``), and at p = 1 the leading
    rank-one part. Raises ValueError for a zero or non-matrix G, or an unknown norm.
    """
    if G.ndim != 2 or not bool((G != 0).any()):
        raise ValueError(f"G of shape {tuple(G.shape)} must be a matrix that is not all zero")
    p = _schatten_exponent(norm)
    if p is None:
        return torch.sign(G)
    U, sigma, Vh = torch.linalg.svd(G, full_matrices=False)
    tolerance = max(G.shape) * torch.finfo(G.dtype).eps * sigma[0]
    present = sigma > tolerance
    if p == 1:
        weights = torch.zeros_like(sigma)
        weights[0] = 1
    else:
        q = 1.0 if p == float("inf") else p / (p - 1)
        weights = torch.where(present, (sigma / sigma[0]).clamp(min=0) ** (q - 1), 0)
    D = (U * weights) @ Vh
    return D / matrix_norm(D, norm)


def solve_steepest_direction(G: Tensor, norm: Norm, steps: int = 300, seed: int = 0) -> Tensor:
    """The same D found without the closed form, to check it by.

    Projected ascent on ⟨G, D⟩ for the two norms with corners (``"max"`` and ``"spectral"``, projection
    by clamping entries or singular values); L-BFGS on ⟨G, D⟩/‖D‖ for the smooth Schatten norms, 1 < p < ∞.
    G: (A, B). Starts from a random D of the given seed. Raises ValueError for p = 1, which has no
    gradient where it matters.
    """
    p = _schatten_exponent(norm)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    D = torch.randn(G.shape, generator=generator, dtype=G.dtype).to(G.device)
    if p is None or p == float("inf"):
        for step in range(steps):
            # Growing steps: the objective is linear, and a small entry must reach its corner too.
            D = D + G / torch.linalg.matrix_norm(G) * 1.05**step
            if p is None:
                D = D.clamp(-1, 1)
            else:
                U, sigma, Vh = torch.linalg.svd(D, full_matrices=False)
                D = (U * sigma.clamp(max=1)) @ Vh
        return D
    if p <= 1:
        raise ValueError(f"norm={norm!r}: the numerical solver needs p > 1")
    D.requires_grad_(True)
    optimizer = torch.optim.LBFGS([D], max_iter=steps, line_search_fn="strong_wolfe", tolerance_grad=1e-12)

    def negative_ratio() -> Tensor:
        optimizer.zero_grad()
        loss = -(G * D).sum() / matrix_norm(D, p)
        loss.backward()
        return loss

    optimizer.step(negative_ratio)
    return (D / matrix_norm(D, p)).detach()


def _schatten_exponent(norm: Norm) -> float | None:
    """p of the Schatten norm that ``norm`` is, or None for the largest entry."""
    named = {"frobenius": 2.0, "spectral": float("inf"), "max": None}
    if isinstance(norm, str):
        if norm not in named:
            raise ValueError(
                f"norm={norm!r} is unknown; use 'frobenius', 'max', 'spectral' or a number p for Schatten-p"
            )
        return named[norm]
    if not norm >= 1:
        raise ValueError(f"norm={norm!r}: Schatten-p is a norm only for p of at least 1")
    return float(norm)
