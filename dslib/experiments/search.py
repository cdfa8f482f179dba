"""One search for everything that is tuned: along the coordinates of a configuration, its optimum bracketed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import pandas

P = TypeVar("P")
R = TypeVar("R")

#: Seeds of searches stand apart from the seeds of the runs that are compared.
SEARCH_SEEDS = (1000, 1001)

#: Makes the runs of configurations; the results come in their order.
Runner = Callable[[list[Any]], Iterable[Any]]
#: Points → their losses; several at once, so that they can run in parallel.
Losses = Callable[[list[Any]], list[float]]


class Coordinate(Protocol):
    """What a search moves along."""

    def best(self, at: P, losses: Losses) -> P:
        """The best point that differs from ``at`` in this coordinate alone."""


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


@dataclass(frozen=True)
class Choice:
    """A coordinate with a list of values: all of them are tried."""

    #: A field of the points.
    name: str
    values: Sequence[Any]

    def best(self, at: Any, losses: Losses) -> Any:
        """The point of least loss among ``at`` with each of the values; the first, of equals."""
        points = [replace(at, **{self.name: value}) for value in self.values]
        return min(zip(losses(points), points, strict=True), key=lambda pair: pair[0])[1]


@dataclass(frozen=True)
class Grid:
    """A coordinate on a geometric grid, from where the search stands: see :func:`bracketed_minimum`."""

    #: A field of the points.
    name: str
    #: Whether the two points half a step away from the best are tried, too.
    refine: bool = True
    #: The coordinate's value at a place of the grid: snapped to what rounding must not tell apart, or the rung of a
    #: ladder. It may raise ValueError past an end.
    value: Callable[[float], Any] = float
    #: The place of a value.
    place: Callable[[Any], float] = float

    def best(self, at: Any, losses: Losses) -> Any:
        """The point of least loss among ``at`` with other values of the coordinate, bracketed."""

        def moved(place: float) -> Any:
            return replace(at, **{self.name: self.value(place)})

        centre = self.place(getattr(at, self.name))
        found = bracketed_minimum(
            lambda places: losses([moved(place) for place in places]),
            [centre / 2, centre, centre * 2],
            refine=self.refine,
        )
        return moved(best_bracketed(found))


class Trials(Generic[P, R]):
    """The points that a search has tried, each once.

    ``run`` makes the runs of several points at once and gives the results of each point, one a seed, in the order of
    the points; the loss of a point is the mean of ``loss`` of its results.
    """

    def __init__(
        self,
        run: Callable[[list[P]], Iterable[Sequence[R]]],
        loss: Callable[[R], float] = attrgetter("final_loss"),
    ) -> None:
        self._run, self._loss = run, loss
        self.found: dict[P, list[R]] = {}

    def losses(self, points: Sequence[P]) -> list[float]:
        """The losses of ``points``; those that are new are run, together."""
        fresh = [point for point in dict.fromkeys(points) if point not in self.found]
        if fresh:
            for point, results in zip(fresh, self._run(fresh), strict=True):
                self.found[point] = list(results)
        return [self.loss(point) for point in points]

    def loss(self, point: P) -> float:
        """Of a point that was tried."""
        values = [self._loss(result) for result in self.found[point]]
        return math.fsum(values) / len(values)

    @property
    def best(self) -> P:
        """The point of least loss of all that were tried."""
        return min(self.found, key=self.loss)

    @property
    def results(self) -> list[R]:
        """Every result, point by point in the order in which they were tried."""
        return [result for results in self.found.values() for result in results]


def on_seeds(
    run: Runner, configured: Callable[[P], Any], seeds: Iterable[int] = SEARCH_SEEDS
) -> Callable[[list[P]], list[list[Any]]]:
    """For :class:`Trials`: a run of ``configured(point)`` on each of the seeds, of all points in one call of
    ``run``."""
    seeds = list(seeds)

    def several(points: list[P]) -> list[list[Any]]:
        configs = [configured(point) for point in points]
        results = list(run([replace(config, seed=seed) for config in configs for seed in seeds]))
        return [results[i * len(seeds) : (i + 1) * len(seeds)] for i in range(len(points))]

    return several


def one_pass(start: P, coordinates: Iterable[Coordinate], losses: Losses) -> P:
    """Each coordinate in turn takes its best value, all others held: where that leads from ``start``."""
    best = start
    for coordinate in coordinates:
        best = coordinate.best(best, losses)
    return best


def coordinate_search(
    start: P,
    coordinates: Sequence[Coordinate],
    losses: Losses,
    most_passes: int,
    finally_along: Callable[[P], Iterable[Coordinate]] = lambda best: (),
) -> P:
    """Passes over the coordinates until none of them moves: the point that is best along each, all others held.

    Points are frozen dataclasses whose fields the coordinates name. Where a pass moved nothing, one over
    ``finally_along(best)`` is made, and if that finds better, the search goes on from there. Raises RuntimeError when
    the best still moves after ``most_passes``.
    """
    best = start
    for _ in range(most_passes):
        before = best
        best = one_pass(best, coordinates, losses)
        if best == before:
            best = one_pass(best, finally_along(best), losses)
        if best == before:
            return best
    raise RuntimeError(f"the best settings still move after {most_passes} passes: {before} → {best}")


def best_in_table(
    searched: pandas.DataFrame, columns: Sequence[str], bracketed: Sequence[str], loss: str = "final_loss"
) -> dict[str, Any]:
    """{column: value} of least mean loss in the rows of one search, by the ``columns`` that tell its points apart.

    Raises ValueError where the best of a ``bracketed`` column, the others at their best, lies at an edge of what was
    tried.
    """
    means = searched.groupby(list(columns))[loss].mean()
    found = means.idxmin() if len(columns) > 1 else (means.idxmin(),)
    best = dict(zip(columns, found, strict=True))
    for column in bracketed:
        best_bracketed(along(searched, best, column, loss))
    return best


def along(
    searched: pandas.DataFrame, best: dict[str, Any], column: str, loss: str = "final_loss"
) -> dict[float, float]:
    """{value: mean loss} of one column of a search, all others at their values in ``best``, ascending."""
    for name in (name for name in best if name != column):
        searched = searched[searched[name] == best[name]]
    return {float(value): float(mean) for value, mean in searched.groupby(column)[loss].mean().items()}
