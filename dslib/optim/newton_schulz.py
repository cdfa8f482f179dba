"""Newton–Schulz iterations: the orthogonal polar factor of a matrix by matrix products alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dslib import kernels

Triple = tuple[float, float, float]

#: Jordan (2024); Moonlight (arXiv:2502.16982), eq. 2: the same odd quintic at every step.
JORDAN: Triple = (3.4445, -4.7750, 2.0315)

#: Polar Express (arXiv:2505.16932): one optimal quintic a step for σ from 1e-3, then the limit.
POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.875, -1.25, 0.375),
)

#: Rounding can push a singular value past 1, where POLAR_EXPRESS explodes (σ = 89 404 on a rank-one
#: gradient in bf16). p(x / s) keeps the interval safe; s = 1.01.
SAFETY = 1.01

#: The Gram iteration squares the condition number and its rounding errors grow from step to step, so it
#: starts again from X after every second step. In bfloat16 three in a row take an ill-conditioned matrix
#: out of the band (σ to 1.45), eight in a row to infinity.
_RESTART_EVERY = 2

#: From this many rows on, a symmetric product is computed as its lower block rows and mirrored.
_SYMMETRIC_FROM, _SYMMETRIC_BLOCK = 1024, 512


def coefficient_schedule(coefficients: str | Sequence, steps: int) -> list[Triple]:
    """The (a, b, c) of p(x) = a·x + b·x³ + c·x⁵ for each of ``steps`` iterations.

    ``coefficients``: ``"jordan"``, ``"polar_express"`` (divided by its safety factor but for the last triple, which
    is the limit, 1 its stable fixed point, and is repeated when there are more steps), one triple, or a sequence of
    triples.
    Raises ValueError on an unknown name, a wrong shape or ``steps`` below 1.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}: the iteration needs a whole number of steps, at least 1")
    if coefficients == "jordan":
        return [JORDAN] * steps
    if coefficients == "polar_express":
        *first, limit = POLAR_EXPRESS
        triples = [*((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in first), limit]
    elif isinstance(coefficients, str):
        raise ValueError(
            f"coefficients={coefficients!r} is unknown; use 'jordan', 'polar_express' or (a, b, c)"
        )
    elif not isinstance(coefficients, Sequence):
        raise ValueError(f"coefficients={coefficients!r} must be a name, one (a, b, c) or a sequence of them")
    else:
        triples = list(coefficients)
        if len(triples) == 3 and all(isinstance(value, int | float) for value in triples):
            triples = [tuple(triples)]
        if not triples or any(not isinstance(t, Sequence) or len(t) != 3 for t in triples):
            raise ValueError(f"coefficients={coefficients!r} must be one (a, b, c) or a sequence of them")
    return [tuple(map(float, triples[min(step, len(triples) - 1)])) for step in range(steps)]


def scalar_map(x: Tensor, steps: int = 5, coefficients: str | Sequence = "jordan") -> Tensor:
    """What the iteration does to one singular value: p applied ``steps`` times to ``x``, elementwise.

    On a matrix of singular values σ, :func:`newton_schulz` returns U·diag(scalar_map(σ/‖σ‖))·Vᵀ.
    """
    for a, b, c in coefficient_schedule(coefficients, steps):
        square = x * x
        x = x * (a + square * (b + c * square))
    return x


def newton_schulz(
    G: Tensor,
    steps: int = 5,
    coefficients: str | Sequence = "jordan",
    method: str = "auto",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Approximate the orthogonal polar factor U·Vᵀ of G = U·Σ·Vᵀ (Moonlight eq. 2, arXiv:2502.16982).

        X₀ = G / ‖G‖_F,    Xₖ = a·Xₖ₋₁ + (b·A + c·A²)·Xₖ₋₁    with A = Xₖ₋₁·Xₖ₋₁ᵀ

    G: (..., A, B), real, tall or wide, any batch dimensions; it is never changed. The result has G's
    shape, dtype and device; it does not depend on G's scale, and an all-zero matrix gives zeros.

    ``method``: ``"plain"`` iterates on X; ``"gram"`` iterates on the A × A Gram matrix and multiplies
    into X only every second step, which is cheaper the further A and B are apart; ``"auto"`` takes ``"gram"``
    from an aspect ratio of 2. ``dtype``: what the iteration computes in. None is bfloat16 for 32-bit
    and shorter inputs, as in the papers, and float64 for float64; ``torch.autocast`` around the call changes nothing.
    Where the device has no bfloat16
    instructions, products of bfloat16 operands are accumulated in float32 and rounded once, which is
    what such instructions do. Symmetric products are computed by what :func:`dslib.kernels.use` chose: by
    torch unless the matrix is large and on a GPU. No gradient flows through the result.

    Raises ValueError for fewer than two dimensions, ``steps`` below 1, an unknown method or
    coefficients or a dtype that is none of bfloat16, float16, float32 and float64, and TypeError for
    complex or integer G.
    """
    if not isinstance(G, Tensor) or not G.is_floating_point():
        kind = G.dtype if isinstance(G, Tensor) else type(G).__name__
        raise TypeError(f"G is {kind}; Newton–Schulz needs a real floating-point tensor")
    if G.ndim < 2:
        raise ValueError(f"G has shape {tuple(G.shape)}; orthogonalisation needs a matrix, (..., A, B)")
    if method not in ("auto", "plain", "gram"):
        raise ValueError(f"method={method!r} is unknown; use 'auto', 'plain' or 'gram'")
    schedule = coefficient_schedule(coefficients, steps)
    if dtype is None:
        dtype = torch.float64 if G.dtype == torch.float64 else torch.bfloat16
    elif dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ValueError(
            f"dtype={dtype} cannot hold the iteration; use bfloat16, float16, float32 or float64"
        )
    if G.numel() == 0:
        return G.clone()

    with _without_autocast(G.device.type):
        return _orthogonalized(G, schedule, method, dtype)


def _orthogonalized(G: Tensor, schedule: list[Triple], method: str, dtype: torch.dtype) -> Tensor:
    carrier, rounded = _arithmetic(dtype, G.device)
    X = rounded(_unit_frobenius(G).to(dtype).to(carrier))
    tall = X.shape[-2] > X.shape[-1]
    if tall:
        X = X.mT
    batch, (rows, columns) = X.shape[:-2], X.shape[-2:]
    X = X.reshape(-1, rows, columns)
    if method == "auto":
        method = "gram" if columns >= 2 * rows else "plain"
    X = (_iterate_gram if method == "gram" else _iterate_plain)(X, schedule, rounded)
    X = X.reshape(*batch, rows, columns)
    return (X.mT if tall else X).to(G.dtype).contiguous()


def _without_autocast(device: str) -> AbstractContextManager:
    """The iteration computes in the precision that was asked for, also where a training step is autocast."""
    available = torch.amp.is_autocast_available(device)
    if available and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def svd_orthogonalize(G: Tensor) -> Tensor:
    """The exact polar factor U·Vᵀ of G by SVD in float64: the oracle of :func:`newton_schulz`.

    G: (..., A, B), real. Directions whose singular value is below max(A, B)·ε·σ_max are noise and
    are left out, so a matrix of rank r gives a partial isometry of rank r, and zeros give zeros.
    The result has G's dtype. Raises TypeError or ValueError as :func:`newton_schulz` does.
    """
    if not isinstance(G, Tensor) or not G.is_floating_point():
        kind = G.dtype if isinstance(G, Tensor) else type(G).__name__
        raise TypeError(f"G is {kind}; orthogonalisation needs a real floating-point tensor")
    if G.ndim < 2:
        raise ValueError(f"G has shape {tuple(G.shape)}; orthogonalisation needs a matrix, (..., A, B)")
    if G.numel() == 0:
        return G.clone()
    U, sigma, Vh = torch.linalg.svd(_unit_frobenius(G).double(), full_matrices=False)
    tolerance = max(G.shape[-2:]) * torch.finfo(torch.float64).eps * sigma[..., :1]
    keep = (sigma > tolerance).to(U.dtype)
    return ((U * keep.unsqueeze(-2)) @ Vh).to(G.dtype)


def newton_schulz_flops(shape: Sequence[int], steps: int = 5) -> int:
    """Floating-point operations of the plain iteration on one matrix: steps·(4·A²·B + 2·A³), A ≤ B.

    A multiply and an add count as two. The last two dimensions of ``shape`` are the matrix; leading
    ones multiply the count.
    """
    *batch, rows, columns = shape
    small, large = min(rows, columns), max(rows, columns)
    count = 1
    for size in batch:
        count *= size
    return count * steps * (4 * small * small * large + 2 * small**3)


def _unit_frobenius(G: Tensor) -> Tensor:
    """G / ‖G‖_F in at least float32, for any scale: dividing by the largest entry first keeps the
    squares of 1e±30 from over- or underflowing. Only an exact zero needs the guard."""
    X = G.detach().to(torch.promote_types(G.dtype, torch.float32))
    largest = X.abs().amax(dim=(-2, -1), keepdim=True)
    X = X / torch.where(largest == 0, torch.ones_like(largest), largest)
    norm = X.square().sum(dim=(-2, -1), keepdim=True).sqrt()
    return X / torch.where(norm == 0, torch.ones_like(norm), norm)


def _arithmetic(dtype: torch.dtype, device: torch.device) -> tuple[torch.dtype, Callable[[Tensor], Tensor]]:
    """How to compute in ``dtype`` on ``device``: the dtype that carries the numbers, and the rounding.

    A 16-bit product accumulates in float32 and rounds once. A CPU without 16-bit dot instructions
    does the same hundreds of times faster as a float32 product of already rounded operands.
    """
    if (
        dtype in (torch.bfloat16, torch.float16)
        and device.type == "cpu"
        and not _cpu_has_bf16_products(dtype)
    ):
        return torch.float32, lambda x: x.to(dtype).to(torch.float32)
    return dtype, lambda x: x


def _cpu_has_bf16_products(dtype: torch.dtype) -> bool:
    if dtype != torch.bfloat16:
        return False
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, check, bool)() for check in checks)


def gram_matrix(X: Tensor) -> Tensor:
    """X·Xᵀ: (batch, M, K) → (batch, M, M), by what :func:`dslib.kernels.use` chose."""
    if kernels.implementation(X) == "triton":
        from dslib.kernels import symmetric

        return symmetric.xxt(X)
    return _lower_product(X, X.mT)


def commuting_product(P: Tensor, Q: Tensor) -> Tensor:
    """P·Q of symmetric matrices that commute, so that the product is symmetric too: (batch, M, M).

    It is computed by what :func:`dslib.kernels.use` chose."""
    if kernels.implementation(P) == "triton":
        from dslib.kernels import symmetric

        return symmetric.commuting_product(P, Q)
    return _lower_product(P, Q)


def symmetric_polynomial(S: Tensor, b: float, c: float) -> Tensor:
    """b·S + c·S² of symmetric matrices, (batch, M, M), by what :func:`dslib.kernels.use` chose.

    In 16 bits it is rounded once, but for large ones on a CPU, where it is rounded three times."""
    if kernels.implementation(S) == "triton":
        from dslib.kernels import symmetric

        return symmetric.symmetric_polynomial(S, b, c)
    by_blocks = S.shape[-2] >= _SYMMETRIC_FROM and S.device.type == "cpu"
    if S.dtype in (torch.bfloat16, torch.float16) and not by_blocks:
        return torch.baddbmm(S, S, S, beta=b, alpha=c)
    return _lower_product(S, S).mul_(c).add_(S, alpha=b)


def _lower_product(P: Tensor, Q: Tensor) -> Tensor:
    """P·Q for a product known to be symmetric: large ones as lower block rows, mirrored."""
    rows = P.shape[-2]
    if rows < _SYMMETRIC_FROM or P.device.type != "cpu":
        return P @ Q
    out = P.new_empty(*P.shape[:-1], rows)
    for start in range(0, rows, _SYMMETRIC_BLOCK):
        stop = min(start + _SYMMETRIC_BLOCK, rows)
        out[..., start:stop, :stop] = P[..., start:stop, :] @ Q[..., :, :stop]
        out[..., :start, start:stop] = out[..., start:stop, :start].mT
    return out


def _iterate_plain(X: Tensor, schedule: list[Triple], rounded: Callable[[Tensor], Tensor]) -> Tensor:
    for a, b, c in schedule:
        A = rounded(gram_matrix(X))
        B = rounded(symmetric_polynomial(A, b, c))
        X = rounded(torch.baddbmm(X, B, X, beta=a))
    return X


def _iterate_gram(X: Tensor, schedule: list[Triple], rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """The same polynomial in S = X·Xᵀ: with P = a·I + b·S + c·S², X ← P·X and S ← P·S·P. All of these
    are symmetric and commute, so X is touched only where a restart or the end multiplies Q = Π P in."""
    Q = S = None
    for step, (a, b, c) in enumerate(schedule):
        if step > 0 and step % _RESTART_EVERY == 0:
            X, Q, S = rounded(Q @ X), None, None
        if S is None:
            S = rounded(gram_matrix(X))
        P = symmetric_polynomial(S, b, c)
        P.diagonal(dim1=-2, dim2=-1).add_(a)
        P = rounded(P)
        Q = P if Q is None else rounded(commuting_product(P, Q))
        last_use_of_S = step + 1 == len(schedule) or (step + 1) % _RESTART_EVERY == 0
        if not last_use_of_S:
            S = rounded(commuting_product(P, rounded(commuting_product(P, S))))
    return rounded(Q @ X)
