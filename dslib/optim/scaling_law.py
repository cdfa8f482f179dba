"""Scaling laws L = a·C^−b: fitted, with bootstrap intervals, and compared at equal loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

#: FLOPs in a PFLOP/s-day, the unit of compute of Moonlight's Figure 3.
PFLOPS_DAY = 1e15 * 86_400

#: The share of the resamples that an interval holds.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class PowerLaw:
    """L(C) = irreducible + a·C^−b, with ``C`` in the unit that the law was fitted in.

    ``resampled`` holds a bootstrap refit a row, (resamples, 3): a, b, irreducible. It is None for a law
    without intervals.
    """

    a: float
    b: float
    irreducible: float = 0.0
    resampled: NDArray[np.float64] | None = None

    def loss(self, C: ArrayLike) -> NDArray[np.float64]:
        """Loss at compute ``C``, of its shape."""
        return self.irreducible + self.a * np.asarray(C, dtype=np.float64) ** -self.b

    def compute(self, L: ArrayLike) -> NDArray[np.float64]:
        """Compute that reaches the loss ``L``, the inverse of :meth:`loss`; infinite where no compute does."""
        reducible = np.asarray(L, dtype=np.float64) - self.irreducible
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return np.where(reducible > 0, (np.maximum(reducible, 0) / self.a) ** (-1 / self.b), np.inf)

    def interval(self, name: str) -> tuple[float, float] | None:
        """95 % bootstrap interval of ``"a"``, ``"b"`` or ``"irreducible"``; None for a law without resamples.

        Raises ValueError for another name.
        """
        names = ("a", "b", "irreducible")
        if name not in names:
            raise ValueError(f"name={name!r} is no parameter of a power law; use one of {', '.join(names)}")
        if self.resampled is None:
            return None
        low, high = np.quantile(self.resampled[:, names.index(name)], _TAILS)
        return float(low), float(high)

    def loss_interval(self, C: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Pointwise 95 % band of the loss at ``C`` (points,): lower and upper, each (points,).

        Raises ValueError for a law without resamples.
        """
        low, high = np.quantile(self._resamples().loss(C), _TAILS, axis=0)
        return low, high

    def _resamples(self) -> PowerLaw:
        """All resamples at once: a law whose parameters are columns, so that its results have a row each."""
        if self.resampled is None:
            raise ValueError("the law has no resamples; fit it with resamples=1000")
        return PowerLaw(*self.resampled.T[:, :, None])


_ENDLESS = 1e300
_TAILS = (0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2)


def fit_power_law(
    C: ArrayLike, L: ArrayLike, irreducible: bool = False, resamples: int = 1000, seed: int = 0
) -> PowerLaw:
    """Fit L = a·C^−b (Moonlight, Figure 3 and Table 3) by least squares in log L.

    ``C``: (budgets,) compute, any unit; ``L``: losses, (budgets,) or (seeds, budgets), whose mean over the
    seeds is fitted. With ``irreducible`` the law is L = E + a·C^−b, 0 ≤ E < min L (Hoffmann et al.,
    arXiv:2203.15556, eq. 2, along the compute-optimal frontier).

    The intervals are a bootstrap from ``seed``. Each resample draws the seeds of every budget with
    replacement, then adds residuals of the fit to the curve: one a budget, drawn with replacement and
    enlarged by √(n / (n − p)) for n budgets and p parameters. The first tells how much the runs scatter,
    the second how far the budgets' means lie off a law, which is where a hyper-parameter search's luck
    shows. (The residuals hold some of the seeds' scatter too: the intervals err on the wide side.) They
    know nothing of a curve that is no power law outside the range of ``C``.

    Raises ValueError for other shapes, for values that are not positive and finite, for fewer distinct
    budgets than parameters, and for negative ``resamples`` (0: no intervals).
    """
    compute, losses = _checked(C, L)
    parameters = 3 if irreducible else 2
    distinct = len(np.unique(compute))
    if distinct < parameters:
        raise ValueError(
            f"C has {distinct} distinct budget{'s' * (distinct != 1)}, too few for {parameters} parameters; "
            f"measure at {parameters} budgets or more"
        )
    if resamples < 0:
        raise ValueError(f"resamples={resamples} is negative; give 0 for no intervals, or about 1000")
    fit = _fit_with_floor if irreducible else _fit_line
    law = fit(compute, np.log(losses.mean(axis=0)))
    # Refits of the bootstrap need not look far: they start where the data's own fit ended.
    again_from = {"floors": (law.irreducible / losses.mean(axis=0).min(),)} if irreducible else {}
    if resamples == 0:
        return law
    generator = np.random.default_rng(seed)
    count, budgets = losses.shape
    drawn = losses[generator.integers(count, size=(resamples, count, budgets)), np.arange(budgets)]
    noise = np.log(drawn.mean(axis=1)) - np.log(losses.mean(axis=0))
    residuals = np.log(losses.mean(axis=0)) - np.log(law.loss(compute))
    residuals *= math.sqrt(budgets / (budgets - parameters)) if budgets > parameters else 0.0
    curves = np.log(law.loss(compute)) + noise + generator.choice(residuals, (resamples, budgets))
    again = [fit(compute, curve, **again_from) for curve in curves]
    return replace(law, resampled=np.array([[one.a, one.b, one.irreducible] for one in again]))


def compute_ratio(law: PowerLaw, baseline: PowerLaw, C: ArrayLike) -> NDArray[np.float64]:
    """The compute with which ``law`` reaches the loss that ``baseline`` has at ``C``, as a share of ``C``.

    For two pure power laws (a, b) and (a₀, b₀) it is (a/a₀)^(1/b) · C^(b₀/b − 1): constant in C only when
    the exponents are equal. Infinite where ``law`` never gets there.
    """
    return law.compute(baseline.loss(C)) / np.asarray(C, dtype=np.float64)


def compute_ratio_interval(
    law: PowerLaw, baseline: PowerLaw, C: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Pointwise 95 % interval of :func:`compute_ratio` at ``C`` (points,) from both laws' resamples, which
    should come from different seeds; infinite where that many of them never get there.

    Raises ValueError when one of them has none, or they have not equally many.
    """
    one, other = law._resamples(), baseline._resamples()
    if np.size(one.a) != np.size(other.a):
        raise ValueError(
            f"law has {np.size(one.a)} resamples and baseline {np.size(other.a)}; fit both with as many"
        )
    # Quantiles interpolate, which infinity minus infinity does not survive: it stands in as a large number.
    ratios = np.minimum(compute_ratio(one, other, C), _ENDLESS)
    low, high = (np.where(value < _ENDLESS, value, np.inf) for value in np.quantile(ratios, _TAILS, axis=0))
    return low, high


def bowl_minimum(N: ArrayLike, L: ArrayLike) -> tuple[float, float]:
    """Where a parabola in log N through the losses ``L`` has its minimum: (N, loss there).

    ``N``, ``L``: (sizes,). The parabola goes through the size of least loss and its neighbours on either
    side: an isoFLOP curve is no parabola far away from its minimum (arXiv:2203.15556, §3.2 fits all
    points of a narrow range).

    Raises ValueError for fewer than three sizes, sizes used twice, values that are not positive and
    finite, and a least loss at the smallest or largest size: such a bowl has no bottom yet.
    """
    sizes, losses = _checked(N, L)
    if losses.shape[0] != 1 or len(np.unique(sizes)) != len(sizes) or len(sizes) < 3:
        raise ValueError(f"N={sizes.tolist()} must be three or more different sizes with one loss each")
    order = np.argsort(sizes)
    sizes, values = sizes[order], losses[0][order]
    best = int(values.argmin())
    if best in (0, len(sizes) - 1):
        raise ValueError(f"the least loss lies at the edge, N={sizes[best]:g}: measure beyond it")
    near = slice(best - 1, best + 2)
    centre = math.log(sizes[best])
    curve = np.polynomial.Polynomial.fit(np.log(sizes[near]) - centre, values[near], 2).convert()
    _, slope, curvature = curve.coef
    at = -slope / (2 * curvature)
    return math.exp(centre + at), float(curve(at))


def _checked(C: ArrayLike, L: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(budgets,) and (seeds, budgets), or a ValueError that says what came."""
    compute, losses = np.asarray(C, dtype=np.float64), np.asarray(L, dtype=np.float64)
    if (
        compute.ndim != 1
        or losses.ndim not in (1, 2)
        or losses.shape[-1:] != compute.shape
        or not losses.size
    ):
        raise ValueError(
            f"C has shape {compute.shape} and L {losses.shape}; give (n,) and (n,), or (n,) and (seeds, n)"
        )
    for name, values in (("C", compute), ("L", losses)):
        bad = ~(np.isfinite(values) & (values > 0))
        if bad.any():
            raise ValueError(
                f"{name} holds {values[bad][0]}; a power law needs positive finite numbers: drop the run, "
                "or find out why it diverged"
            )
    return compute, np.atleast_2d(losses)


def _fit_line(compute: NDArray[np.float64], log_loss: NDArray[np.float64]) -> PowerLaw:
    # log C is centred: its mean is some twenty times its spread, which would cost digits.
    centre = np.log(compute).mean()
    x = np.log(compute) - centre
    b = -float(x @ log_loss / (x @ x))
    return PowerLaw(math.exp(log_loss.mean() + b * centre), b)


def _fit_with_floor(
    compute: NDArray[np.float64], log_loss: NDArray[np.float64], floors: Sequence[float] = (0.0, 0.5, 0.9)
) -> PowerLaw:
    """Least squares in log L, started from the lines through L − E for E at ``floors``, as shares of min L:
    the surface has a long flat valley along which a, b and E trade."""
    from scipy.optimize import least_squares

    centre = float(np.log(compute).mean())
    x = np.log(compute) - centre
    loss = np.exp(log_loss)

    def residual(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        floor, height, b = theta
        return np.log(floor + np.exp(height - b * x)) - log_loss

    def slopes(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        floor, height, b = theta
        falling = np.exp(height - b * x)
        return np.stack([np.ones_like(x), falling, -x * falling], axis=1) / (floor + falling)[:, None]

    bounds = ([0.0, -np.inf, -np.inf], [loss.min(), np.inf, np.inf])
    fits = []
    for share in floors:
        floor = min(share, 0.99) * loss.min()
        line = _fit_line(np.exp(x), np.log(loss - floor))
        start = (floor, math.log(line.a), line.b)
        fits.append(least_squares(residual, start, slopes, bounds=bounds, x_scale=(1.0, 1.0, 0.1)))
    floor, height, b = min(fits, key=lambda fit: fit.cost).x
    return PowerLaw(math.exp(height + b * centre), float(b), float(floor))
