"""pass@k and its relatives, from counts of correct samples, for many problems at once.

pass@k is the chance that at least one of k answers is right. It is estimated from n ≥ k samples of which c are
right: of all ways to pick k of the n, the share that holds a right one (Chen et al., arXiv:2107.03374, eq. 1).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def pass_at_k(n: ArrayLike, c: ArrayLike, k: ArrayLike) -> float | np.ndarray:
    """The unbiased estimate 1 − C(n−c, k)/C(n, k) (arXiv:2107.03374, eq. 1), accurate to 1e-15.

    n samples of which c are right, k ≤ n: whole numbers or arrays of them that broadcast, ``c[:, None]``
    against a row of k for a curve a problem. Returns float64 in their shape, a float for three numbers.
    Problems are never averaged here.

    Raises TypeError for anything but whole numbers; ValueError for n or k below 1, k > n, c outside 0 … n, or
    no problem at all, naming the first.
    """
    n, c, k = _checked(n, c, k)
    return _unpacked(_per_case(hit_and_miss, n, c, k)[0])


def pass_hat_k(n: ArrayLike, c: ArrayLike, k: ArrayLike) -> float | np.ndarray:
    """pass^k, the chance that all of k answers are right: the unbiased estimate C(c, k)/C(n, k)
    (τ-bench, arXiv:2406.12045, §4.1). Arguments, result and errors as for :func:`pass_at_k`."""
    n, c, k = _checked(n, c, k)
    return _unpacked(_per_case(hit_and_miss, n, n - c, k)[1])  # none of k falls on the n − c wrong ones


def plug_in_pass_at_k(n: ArrayLike, c: ArrayLike, k: ArrayLike) -> float | np.ndarray:
    """1 − (1 − c/n)^k, as if c/n were the true rate: too low on average, for the power is convex.

    Arguments, result and errors as for :func:`pass_at_k`; k may exceed n here.
    """
    n, c, k = _checked(n, c, k, most=None)
    return _unpacked(rates_to_pass_at_k(c / n, k))


def rates_to_pass_at_k(rates: ArrayLike, k: ArrayLike) -> np.ndarray:
    """1 − (1 − p)^k for the true rates p: exact where :func:`pass_at_k` estimates.

    rates: float in [0, 1]; k: whole numbers of at least 1, without an upper bound; they broadcast. Rates that
    rounding put up to 1e-6 outside are taken for 0 or 1. Returns float64 in their shape. Raises TypeError for k
    that are not whole; ValueError for k below 1, no problem at all, or a rate outside, NaN included.
    """
    rates, k = checked_rates("rates", rates), _whole("k", k)
    if (k < 1).any():
        raise ValueError(f"k={int(k.min())} must be at least 1")
    with np.errstate(divide="ignore"):  # a rate of 1 has a logarithm of −inf, and the result is 1
        return -np.expm1(k * np.log1p(-rates))


def checked_rates(name: str, rates: ArrayLike) -> np.ndarray:
    """``rates`` as float64 in [0, 1]. Raises as :func:`rates_to_pass_at_k`, naming ``name``."""
    if hasattr(rates, "detach"):  # a tensor that may carry a gradient
        rates = rates.detach().cpu().numpy()
    rates = np.asarray(rates, dtype=np.float64)
    if rates.size == 0:
        raise ValueError(f"{name} hold no problem; give at least one")
    outside = ~((rates >= -1e-6) & (rates <= 1 + 1e-6))
    if outside.any():
        place = _place(outside)
        raise ValueError(
            f"{name} hold {rates[place]} at {list(map(int, place))}; a rate lies between 0 and 1"
        )
    return np.clip(rates, 0.0, 1.0)


def _checked(
    n: ArrayLike, c: ArrayLike, k: ArrayLike, most: str | None = "n"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n, c, k = np.broadcast_arrays(_whole("n", n), _whole("c", c), _whole("k", k))
    if n.size == 0:
        raise ValueError(f"n, c and k of shape {n.shape} hold no problem; give at least one")

    def refuse(wrong: np.ndarray, message: str) -> None:
        if wrong.any():
            at = _place(wrong)
            where = f" of problem {', '.join(str(int(i)) for i in at)}" if at else ""
            raise ValueError(message.format(n=n[at], c=c[at], k=k[at], where=where))

    refuse(n < 1, "n={n} samples{where} must be at least 1")
    refuse(k < 1, "k={k}{where} must be at least 1")
    if most is not None:
        refuse(k > n, "k={k} exceeds the n={n} samples{where}; sample more or lower k")
    refuse(c < 0, "c={c} correct samples{where} must be at least 0")
    refuse(c > n, "c={c} correct samples{where} exceed its n={n} samples")
    return n, c, k


def _whole(name: str, values: ArrayLike) -> np.ndarray:
    found = np.asarray(values)
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"{name} is {found.dtype}; give whole numbers")
    return found.astype(np.int64)


def _place(wrong: np.ndarray) -> tuple[np.integer, ...]:
    return tuple(np.argwhere(wrong)[0])


def _unpacked(values: np.ndarray) -> float | np.ndarray:
    return float(values) if values.ndim == 0 else values


def _per_case(function, n: np.ndarray, c: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``function(n, c, k)`` computed once for each different case: a million problems hold few of them."""
    base = int(n.max()) + 1
    if base < 2**21:  # three numbers fit into one of 63 bits
        cases, which = np.unique(((n * base) + c) * base + k, return_inverse=True)
        rest, cases_k = np.divmod(cases, base)
        found = function(*np.divmod(rest, base), cases_k)
        return tuple(values[which.reshape(n.shape)] for values in found)
    found = function(n.ravel(), c.ravel(), k.ravel())
    return tuple(values.reshape(n.shape) for values in found)


def hit_and_miss(n: np.ndarray, c: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The chances that k of n samples hold, and do not hold, one of the c right ones; all (cases,).

    C(n−c, k)/C(n, k) is a product of min(c, k) factors 1 − max(c, k)/(n − i): draw the smaller set one by one,
    and each must miss the larger. No binomial overflows. Where 1 − miss would cancel, the chance to hit is the
    sum over the draw that hits first, Σ miss_i · max(c, k)/(n − i), of positive terms.
    """
    steps, targets = np.minimum(c, k), np.maximum(c, k)
    order = np.argsort(-steps, kind="stable")  # cases that are done are a tail that is cut off
    steps, targets, total = steps[order], targets[order].astype(np.float64), n[order].astype(np.float64)
    hit, miss = np.zeros(len(n)), np.ones(len(n))
    open_cases = len(n)
    for i in range(int(steps[0])):
        open_cases = int(np.searchsorted(-steps[:open_cases], -i, side="left"))
        now = slice(open_cases)
        left = total[now] - i
        hit[now] += miss[now] * (targets[now] / left)
        miss[now] *= np.maximum(left - targets[now], 0.0) / left
    hit = np.where(miss < 0.5, 1.0 - miss, hit)
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return hit[back], miss[back]
