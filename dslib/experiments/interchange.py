"""Does the optimizer of fine-tuning have to be that of pretraining? (Moonlight §3.5.1, Table 6)

A model is pretrained on Python's standard library and then fine-tuned on its docstrings as questions and
answers, the learning rate falling on a line to 0, each stage with either optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dslib.experiments.search import Grid, Runner, Trials, best_in_table, one_pass
from dslib.experiments.svd_entropy import STAND_IN
from dslib.models.decoder import Decoder
from dslib.models.measuring import validation_loss
from dslib.models.train_config import TrainConfig
from dslib.models.training import corpus_digest, train, train_to_end
from dslib.runs.cache import cached
from dslib.tasks.corpus import DOCSTRINGS, evaluation_windows, load_corpus

if TYPE_CHECKING:
    import pandas

#: Pretraining and fine-tuning optimizer of the four cells of the table, …
CELLS = (("Muon", "Muon"), ("Muon", "AdamW"), ("AdamW", "Muon"), ("AdamW", "AdamW"))
#: … and of the null's: a second AdamW, its matrices at half the learning rate, in Muon's place.
NULL_CELLS = tuple(tuple(STAND_IN if name == "Muon" else name for name in cell) for cell in CELLS)


@dataclass(frozen=True)
class Cell:
    """A point of the search: one cell of the table, at a share of the pretraining's learning rates."""

    pretrain: str
    tune: str
    share: float


@dataclass(frozen=True)
class FineTunings:
    """One pretraining and the fine-tunings that start from its weights. Raises ValueError when a fine-tuning
    has another model, or none is given."""

    pretrain: TrainConfig
    tunes: tuple[TrainConfig, ...]

    def __post_init__(self) -> None:
        if not self.tunes:
            raise ValueError(
                "tunes=() is empty; give the fine-tunings that start from the pretrained weights"
            )
        for tune in self.tunes:
            if tune.model != self.pretrain.model:
                raise ValueError(
                    f"tunes has a model {tune.model}, but the pretrained one is {self.pretrain.model}"
                )


@dataclass(frozen=True)
class FineTuningLosses:
    """In nats a byte."""

    config: FineTunings
    #: After pretraining, on its own held-out text …
    pretrained: float
    #: … and on that of the fine-tuning.
    before: float
    #: After each fine-tuning.
    losses: tuple[float, ...]


def _digests(config: FineTunings) -> str:
    return " ".join(map(corpus_digest, (config.pretrain, *config.tunes)))


@cached(also=_digests)
def fine_tuned(config: FineTunings) -> FineTuningLosses:
    """Pretrain, and fine-tune from the weights of that each time."""
    pretrained, weights = _pretrained(config.pretrain)
    model = Decoder(config.pretrain.model)
    model.load_state_dict(weights)
    first = config.tunes[0]
    windows = evaluation_windows(
        load_corpus(first.corpus).validation, first.evaluation_windows, first.context
    )
    return FineTuningLosses(
        config=config,
        pretrained=pretrained,
        before=validation_loss(model, windows),
        losses=tuple(train(tune, weights=weights).final_loss for tune in config.tunes),
    )


@cached(also=corpus_digest)
def _pretrained(config: TrainConfig) -> tuple[float, dict[str, Tensor]]:
    """Final loss and weights."""
    trained = train_to_end(config)
    return trained.result.final_loss, trained.weights


def fine_tuning(pretrain: TrainConfig, steps: int, share: float) -> TrainConfig:
    """A fine-tuning by the optimizer of ``pretrain``, at ``share`` of its learning rates, which fall on a
    line to 0. Its text is the docstrings, or a text of the reader's own that ``pretrain`` reads."""
    return replace(
        pretrain,
        steps=steps,
        lr=share * pretrain.lr,
        rest_lr=share * (pretrain.lr if pretrain.rest_lr is None else pretrain.rest_lr),
        schedule="linear",
        final_lr=0.0,
        evaluations=1,
        corpus=DOCSTRINGS if pretrain.corpus is None else pretrain.corpus,
    )


def search_shares(
    arms: dict[str, TrainConfig], steps: int, seeds: Sequence[int], run: Runner, start: float = 0.5
) -> list[dict[str, Any]]:
    """Search the share of the pretraining's learning rates for each of :data:`CELLS`, bracketed: rows. ``run`` makes
    :func:`fine_tuned`."""

    def on_seeds(cells: list[Cell]) -> list[tuple[dict[str, Any], ...]]:
        """One pretraining a seed serves all shares of a cell."""
        tunes, shares = [cell.tune for cell in cells], [cell.share for cell in cells]
        asked = [_fine_tunings(arms, cells[0].pretrain, tunes, shares, steps, seed) for seed in seeds]
        rows = [_rows(result, "search", cells[0].pretrain, tunes, shares) for result in run(asked)]
        return list(zip(*rows, strict=True))

    rows: list[dict[str, Any]] = []
    for pretrain, tune in CELLS:
        trials = Trials(on_seeds, itemgetter("loss"))
        one_pass(Cell(pretrain, tune, start), (Grid("share"),), trials.losses)
        rows += trials.results
    return rows


def _fine_tunings(
    arms: dict[str, TrainConfig],
    pretrain: str,
    tunes: Sequence[str],
    shares: Sequence[float],
    steps: int,
    seed: int,
) -> FineTunings:
    configs = (fine_tuning(arms[tune], steps, share) for tune, share in zip(tunes, shares, strict=True))
    return FineTunings(
        replace(arms[pretrain], seed=seed), tuple(replace(config, seed=seed) for config in configs)
    )


def best_shares(searched: pandas.DataFrame) -> dict[tuple[str, str], float]:
    """The best share of each cell in the rows of :func:`search_shares`; the null's cells take those of the
    cells they stand for, with AdamW's for its second AdamW.

    Raises ValueError when an optimum lies at an edge.
    """
    best = {
        cell: best_in_table(part, ["share"], ["share"], "loss")["share"]
        for cell, part in searched.groupby(["pretrain", "tune"])
    }
    return best | dict.fromkeys(NULL_CELLS, best["AdamW", "AdamW"])


def interchange(
    arms: dict[str, TrainConfig],
    shares: dict[tuple[str, str], float],
    steps: int,
    seeds: Iterable[int],
    run: Runner,
    cells: Sequence[tuple[str, str]] = tuple(dict.fromkeys(CELLS + NULL_CELLS)),
) -> list[dict[str, Any]]:
    """The losses of ``cells`` on every seed: one row a cell and seed. A pretraining is shared by the cells
    that start from it."""
    asked, labels = [], []
    for seed in seeds:
        for pretrain in dict.fromkeys(first for first, _ in cells):
            tunes = [tune for first, tune in cells if first == pretrain]
            chosen = [shares[pretrain, tune] for tune in tunes]
            asked.append(_fine_tunings(arms, pretrain, tunes, chosen, steps, seed))
            labels.append((pretrain, tunes, chosen))
    rows = []
    for result, (pretrain, tunes, chosen) in zip(run(asked), labels, strict=True):
        rows += _rows(result, "final", pretrain, tunes, chosen)
    return rows


def measure(
    arms: dict[str, TrainConfig], steps: int, seeds: Iterable[int], run: Runner, search_seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Everything that ships: the searches, then all cells, the null's too, at the shares found."""
    import pandas

    searched = search_shares(arms, steps, search_seeds, run)
    return searched + interchange(arms, best_shares(pandas.DataFrame(searched)), steps, seeds, run)


def best_against_rest(table: pandas.DataFrame, cells: Sequence[tuple[str, str]] = CELLS) -> pandas.DataFrame:
    """Of rows of :func:`interchange`, one row a seed: the loss of the first cell and the least loss of the
    other three, columns ``matched`` and ``best other``."""
    losses = _by_cell(table)
    first, *others = cells
    return (
        losses[others]
        .min(axis=1)
        .to_frame("best other")
        .assign(matched=losses[first])[["matched", "best other"]]
    )


def gains(table: pandas.DataFrame, cells: Sequence[tuple[str, str]] = CELLS) -> pandas.DataFrame:
    """What the first optimizer of ``cells`` gains over the second in fine-tuning (loss of the first minus
    loss of the second), one row a seed: after its own pretraining (``own``) and the other's (``other``)."""
    losses = _by_cell(table)
    return (
        (losses[cells[0]] - losses[cells[1]])
        .to_frame("own")
        .assign(other=losses[cells[2]] - losses[cells[3]])
    )


def _by_cell(table: pandas.DataFrame) -> pandas.DataFrame:
    return table.pivot_table(index="seed", columns=["pretrain", "tune"], values="loss")


def _rows(
    result: FineTuningLosses, kind: str, pretrain: str, tunes: Sequence[str], shares: Sequence[float]
) -> list[dict[str, Any]]:
    return [
        {
            "kind": kind,
            "pretrain": pretrain,
            "tune": tune,
            "seed": config.seed,
            "steps": config.steps,
            "share": share,
            "lr": config.lr,
            "rest_lr": config.rest_lr,
            "pretrained": result.pretrained,
            "before": result.before,
            "loss": loss,
        }
        for tune, share, config, loss in zip(tunes, shares, result.config.tunes, result.losses, strict=True)
    ]
