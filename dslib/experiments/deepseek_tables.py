"""What notebook 06 shows of its runs: rows, their means, the attention mass where it matters, windows as read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dslib.experiments.deepseek_sparse_attention import (
    ARMS,
    DENSE,
    WARMED,
    Recipe,
    RecipeResult,
    RecipeRun,
    answering,
    evaluate,
    masses,
    planted,
    train_recipes,
)
from dslib.tasks.recall import RECALL, RecallTask

if TYPE_CHECKING:
    import pandas


def rows(trained: Iterable[RecipeResult], **labels: Any) -> list[dict[str, Any]]:
    """One flat row a run: labels, its recipe, what it measured at its end."""
    table = []
    for one in trained:
        recipe, config = one.run.recipe, one.result.config
        table.append(
            {
                **labels,
                "arm": one.run.name,
                "seed": recipe.base.seed,
                "d_model": config.model.d_model,
                "layers": config.model.layers,
                "context": config.context,
                "top_k": recipe.top_k,
                "base_steps": recipe.base.steps,
                "steps": config.steps,
                "lr": config.lr,
                "text_loss": one.text_loss,
                "recall_loss": one.recall_loss,
                "recall_accuracy": one.recall_accuracy,
                **one.checks,
                **{f"mass_{name}": value for name, value in one.masses.items()},
            }
        )
    return table


def measured_rows(recipes: Iterable[Recipe], jobs: int = 1, **labels: Any) -> list[dict[str, Any]]:
    """:func:`rows` of the dense training, the warm-up and every arm of every recipe, recipe by recipe."""
    names = [DENSE, WARMED, *ARMS]
    runs = [RecipeRun(recipe, name) for recipe in recipes for name in names]
    return rows(train_recipes(runs, jobs), **labels)


#: How the columns of :func:`means` and :func:`targets_compared` are shown.
MEANS_FORMATS = {
    "text, nats/byte": ".3f",
    "answers right": ".1%",
    "text and answers": ".3f",
    "against dense": "+.1%",
    "mass, indexer": ".1%",
    "mass, best k": ".1%",
}
COMPARED_FORMATS = {
    "answers right": "+.1%",
    "text and answers": "+.3f",
    "mass, indexer": "+.1%",
    "gap to dense, selected": ".1%",
    "gap to dense, full": ".1%",
}


def means(table: pandas.DataFrame) -> pandas.DataFrame:
    """Means over the seeds of measured rows with a ``ratio``: a row a ratio and arm, in the table's order, under
    the names of ``MEANS_FORMATS``; "against dense" is the loss over the dense arm's of that ratio, minus 1."""
    columns = ["text_loss", "recall_accuracy", "mixed_loss", "mass_indexer", "mass_best"]
    mean = table.groupby(["ratio", "arm"], sort=False)[columns].mean()
    dense = mean.mixed_loss.xs("dense", level="arm").reindex(mean.index, level="ratio")
    mean.insert(3, "against dense", mean.mixed_loss / dense - 1)
    mean.columns = list(MEANS_FORMATS)
    return mean.reset_index().rename(columns={"ratio": "context / k", "arm": "run"})


def by_seed(table: pandas.DataFrame) -> dict[int, pandas.DataFrame]:
    """The rows of each ratio, a row a seed: ``by_seed(table)[8].mixed_loss["sparse"]`` is a column of seeds."""
    return {ratio: part.pivot(index="seed", columns="arm") for ratio, part in table.groupby("ratio")}


def targets_compared(by_ratio: Mapping[int, pandas.DataFrame]) -> pandas.DataFrame:
    """The arm with the full target minus the one with the selected, means of paired differences over the seeds, and
    how far each ends above dense: a row a ratio of :func:`by_seed`, under the names of ``COMPARED_FORMATS``."""
    import pandas

    full, selected = "sparse, full target", "sparse"
    found = {}
    for ratio, runs in by_ratio.items():
        differences = [
            (runs[column][full] - runs[column][selected]).mean()
            for column in ("recall_accuracy", "mixed_loss", "mass_indexer")
        ]
        gaps = [(runs.mixed_loss[arm] / runs.mixed_loss["dense"] - 1).mean() for arm in (selected, full)]
        found[ratio] = [*differences, *gaps]
    frame = pandas.DataFrame.from_dict(found, orient="index", columns=list(COMPARED_FORMATS))
    return frame.rename_axis("context / k")


def mass_rows(trained: Iterable[RecipeResult], top_ks: Iterable[int]) -> list[dict[str, Any]]:
    """:func:`masses` of each run at each number of keys, over all queries and over those whose next token is an
    answer: flat rows with ``run``, ``keys``, ``queries`` and the four shares."""
    top_ks = list(top_ks)
    table = []
    for one in trained:
        tokens, config = planted(one.result.config)[0][:16], one.result.config
        for top_k in top_ks:
            for queries, where in (("all", None), ("questions", answering(config))):
                shares = masses(one.model(), tokens, top_k, where)
                table.append({"run": one.run.name, "keys": top_k, "queries": queries, **shares})
    return table


def fault_rows(trained: RecipeResult) -> list[list[float]]:
    """A sparse model as it was trained, with its indexer's rotation in the other layout, and with an FP8 indexer:
    for each the share of keys that stay selected, the text's loss (nats a byte), the share of answers right."""
    ways: list[tuple[float, dict[str, Any]]] = [
        (1.0, {}),
        (trained.checks["overlap_misrotated"], {"indexer_rope_layout": "interleaved"}),
        (trained.checks["overlap_fp8"], {"indexer_fp8": True}),
    ]
    found = [(kept, evaluate(trained, **changes)) for kept, changes in ways]
    return [[kept, at["loss"], at["recall_accuracy"]] for kept, at in found]


def fact_places(inputs: Tensor, targets: Tensor, kinds: Tensor) -> dict[int, int]:
    """Where the facts are that a window asks for: inputs, targets, kinds (context,) each → the place of each
    query whose next token is an answer, and the place of its fact."""
    queries = (kinds == RECALL).nonzero().flatten().tolist()
    return {query: (inputs == targets[query]).nonzero()[0].item() for query in queries}


def spelled(token: int, task: RecallTask) -> str:
    """A token as a reader sees it: text as it stands, a question as a capital letter with its mark, a fact as
    the small one with the number of its value."""
    kind, value = divmod(token - task.first_symbol, task.values)
    if kind < 0:
        return {10: "↵", 32: "·"}.get(token, chr(token))
    asked = token - task.first_symbol - task.facts * task.values
    return f"{chr(65 + asked)}?" if asked >= 0 else f"{chr(97 + kind)}{value}"
