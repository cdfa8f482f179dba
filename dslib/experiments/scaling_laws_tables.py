"""What is read off the table of the scaling study: optima, laws of each seed, ratios, predictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dslib.experiments import scaling_laws
from dslib.experiments.scaling_laws import Allocation
from dslib.models.training import TrainResult
from dslib.optim import PowerLaw, compute_ratio, fit_power_law
from dslib.optim.scaling_law import bowl_minimum

if TYPE_CHECKING:
    import pandas

#: {arm: (C, L)}: budgets (n,) in any unit, losses (seeds, n).
Curves = Mapping[str, tuple[ArrayLike, NDArray[np.float64]]]


def searched(table: pandas.DataFrame) -> dict[tuple[str, float], pandas.DataFrame]:
    """{(arm, budget): the rows of its search}."""
    rows = table[table["kind"] == "search"]
    return {(arm, float(budget)): part for (arm, budget), part in rows.groupby(["arm", "budget"])}


def optima(searches: Mapping[tuple[str, float], pandas.DataFrame]) -> pandas.DataFrame:
    """A row a search: what it found, of how many runs."""
    import pandas

    rows = []
    for (arm, budget), part in searches.items():
        best = scaling_laws.best_allocation(part)
        N, _ = scaling_laws.parameter_counts(scaling_laws.model_of(best.width))
        chosen = part[(part["width"] == best.width) & (part["batch_size"] == best.batch_size)]
        rows.append(
            {
                "law": arm,
                "budget": budget,
                "width": best.width,
                "N": N,
                "batch": best.batch_size,
                "steps": chosen["steps"].iloc[0],
                "lr, matrices": best.lr,
                "lr, rest": best.lr if best.rest_lr is None else best.rest_lr,
                "runs": len(part),
            }
        )
    return pandas.DataFrame(rows)


def bottoms(searches: Mapping[tuple[str, float], pandas.DataFrame], arm: str) -> pandas.DataFrame:
    """The bottom of an arm's bowl at each budget: ``budget``, ``N``, ``loss``, ``bytes_per_parameter``. A search
    that tried fewer than three widths has no bowl, and no row."""
    import pandas

    rows = []
    for (name, budget), part in searches.items():
        sizes, losses = scaling_laws.bowl(part)
        if name == arm and len(sizes) > 2:
            N, loss = bowl_minimum(sizes, losses)
            rows.append({"budget": budget, "N": N, "loss": loss, "bytes_per_parameter": budget / (6 * N * N)})
    return pandas.DataFrame(rows, columns=["budget", "N", "loss", "bytes_per_parameter"])


def neighbours(best: Allocation) -> list[int]:
    """The width of an optimum between the next narrower and the next wider one."""
    place = scaling_laws.WIDTHS.index(best.width)
    return list(scaling_laws.WIDTHS[max(0, place - 1) : place + 2])


def points(results: Sequence[TrainResult], losses: Iterable[float] | None = None) -> pandas.Series:
    """The mean loss at each width over the seeds of ``results``; ``losses`` stand in for theirs, one each."""
    import pandas

    values = [result.final_loss for result in results] if losses is None else list(losses)
    widths = [result.config.model.d_model for result in results]
    return pandas.Series(values).groupby(pandas.Index(widths, name="width")).mean()


def known_losses(search: pandas.DataFrame, results: Iterable[TrainResult]) -> list[float]:
    """The losses that the rows of a search give for these very runs. Raises ValueError for a run it did not make."""
    found = []
    for result in results:
        config = result.config
        wanted = {
            "width": config.model.d_model,
            "batch_size": config.batch_size,
            "lr": config.lr,
            "rest_lr": config.lr if config.rest_lr is None else config.rest_lr,
            "seed": config.seed,
        }
        same = search
        for column, value in wanted.items():
            same = same[same[column] == value]
        if same.empty:
            raise ValueError(f"the search made no run with {wanted}; take settings of its table")
        found.append(float(same["final_loss"].iloc[0]))
    return found


def laws_of_seeds(C: ArrayLike, L: NDArray[np.float64]) -> list[PowerLaw]:
    """One law a seed, through its own losses: ``C`` (budgets,), ``L`` (seeds, budgets)."""
    return [fit_power_law(C, losses, resamples=0) for losses in L]


def ratios(curves: Curves, arm: str, rival: str, at: ArrayLike) -> NDArray[np.float64]:
    """Compute of ``arm`` over that of ``rival`` at the loss that the rival has at ``at``, from both laws of each seed:
    (seeds, *the shape of at)."""
    pairs = zip(laws_of_seeds(*curves[arm]), laws_of_seeds(*curves[rival]), strict=True)
    return np.array([compute_ratio(law, baseline, at) for law, baseline in pairs])


def prediction_errors(C: ArrayLike, L: NDArray[np.float64]) -> NDArray[np.float64]:
    """Predicted over measured loss at the largest budget, minus 1, by each seed's law through the others: (seeds,)."""
    compute = np.asarray(C, dtype=np.float64)
    predicted = [law.loss(compute[-1]) for law in laws_of_seeds(compute[:-1], L[:, :-1])]
    return np.array(predicted) / L[:, -1] - 1


def carried_errors(C: ArrayLike, L: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same without a law: the loss of the budget before stands for that of the largest."""
    return L[:, -2] / L[:, -1] - 1


def counted_ratios(
    table: pandas.DataFrame, arm: str, rival: str, ways: Mapping[str, str]
) -> pandas.DataFrame:
    """Compute of ``arm`` over ``rival``'s at equal loss, a row a way of counting (label: column of ``table``), a
    column a budget of the rival."""
    import pandas

    rows = []
    budgets = np.array(sorted(table["budget"].unique()))
    for label, counted in ways.items():
        pair = []
        for name in (arm, rival):
            C, L = scaling_laws.curve(table, name, counted)
            pair.append(fit_power_law(C / budgets[0], L, resamples=0))
        rows.append([label, *compute_ratio(*pair, budgets / budgets[0])])
    return pandas.DataFrame(rows, columns=["counted", *(f"{budget:.2g} FLOPs" for budget in budgets)])


def interval_text(law: PowerLaw, name: str) -> str:
    """A parameter of a law with its bootstrap interval: ``"0.062 [0.055, 0.070]"``."""
    low, high = law.interval(name)
    return f"{getattr(law, name):.3f} [{low:.3f}, {high:.3f}]"
