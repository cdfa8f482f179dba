"""A learning-rate search that counts only when its optimum is bracketed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

#: A search that has not found its optimum after this many values is following noise or a bug.
_MOST_VALUES = 24


def bracketed_minimum(
    evaluate: Callable[[Sequence[float]], Sequence[float]],
    start: Sequence[float],
    factor: float = 2.0,
    refine: bool = True,
) -> dict[float, float]:
    """Evaluate a function on a geometric grid until its minimum is inside, then once more around it.

    ``evaluate``: a list of values → their losses (several at once, so that they can run in parallel).
    The grid ``start`` (ascending, neighbours ``factor`` apart) grows by ``factor`` on the side where
    the best value lies at the edge; then, with ``refine``, the two points √factor away from the best are
    added. Returns
    {value: loss} in ascending order of value, its minimum never at an edge. A NaN counts as infinite.

    Raises ValueError for an empty or unsorted start, and RuntimeError when no bracket is found.
    """
    if len(start) < 1 or list(start) != sorted(set(start)) or start[0] <= 0 or factor <= 1:
        raise ValueError(f"start={list(start)} must be ascending positive values and factor={factor} above 1")
    losses: dict[float, float] = {}

    def measure(values: Sequence[float]) -> None:
        for value, loss in zip(values, evaluate(values), strict=True):
            losses[value] = math.inf if math.isnan(loss) else loss

    measure(list(start))
    while True:
        grid = sorted(losses)
        best = min(losses, key=losses.__getitem__)
        missing = [best / factor] * (best == grid[0]) + [best * factor] * (best == grid[-1])
        if not missing:
            break
        if len(losses) >= _MOST_VALUES or not math.isfinite(losses[best]):
            raise RuntimeError(
                f"no minimum is bracketed by {len(losses)} values from {grid[0]:g} to {grid[-1]:g}"
            )
        measure(missing)
    if refine:
        root = math.sqrt(factor)
        measure([best / root, best * root])
    return dict(sorted(losses.items()))


def best_bracketed(losses: dict[float, float]) -> float:
    """The value of least loss. Raises ValueError when it lies at an edge: a search that was not bracketed."""
    grid = sorted(losses)
    best = min(grid, key=losses.__getitem__)
    if best in (grid[0], grid[-1]):
        raise ValueError(
            f"the best value {best:g} lies at the edge of {grid[0]:g}…{grid[-1]:g}: widen the search"
        )
    return best
