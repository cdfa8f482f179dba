"""What is shown of the runs from dense to sparse: flat rows, means of the right ones, facts where they stand."""

from dataclasses import replace

import pandas
import pytest
import torch

from dslib.experiments import deepseek_sparse_attention as study
from dslib.experiments import deepseek_tables as tables
from dslib.tasks import RecallTask

TASK = RecallTask(facts=2, values=4, distance=8)


@pytest.fixture(scope="module")
def recipe():
    model = replace(study.TINY.model, d_model=8, heads=2)
    return study.recipe_with(replace(study.TINY, model=model, steps=2), 8, warm_up_steps=1, steps=1)


@pytest.fixture(scope="module")
def rows(recipe, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSLIB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield pandas.DataFrame(tables.measured_rows([recipe], ratio=8))


def test_rows_are_flat_and_one_a_run(recipe, rows):
    assert not rows.isna().any().any()
    assert rows.arm.tolist() == [study.DENSE, study.WARMED, *study.ARMS]
    assert rows.ratio.eq(8).all()
    assert rows.top_k.eq(recipe.top_k).all()


def two_seeds(**losses):
    """Rows of arms whose losses of two seeds are given, everything else alike."""
    same = ("text_loss", "recall_accuracy", "mass_indexer", "mass_best")
    return pandas.DataFrame(
        [
            {"ratio": ratio, "arm": arm, "seed": seed, "mixed_loss": loss, **dict.fromkeys(same, 10 * loss)}
            for ratio, arms in ((8, losses), (32, dict.fromkeys(losses, (5.0, 5.0))))
            for arm, both in arms.items()
            for seed, loss in enumerate(both)
        ]
    )


def test_means_are_taken_against_the_dense_arm_of_the_same_ratio():
    mean = tables.means(two_seeds(dense=(1.0, 3.0), sparse=(2.0, 4.0)))
    assert mean.run.tolist() == ["dense", "sparse", "dense", "sparse"]
    assert mean["text and answers"].tolist() == [2.0, 3.0, 5.0, 5.0]
    assert mean["answers right"].tolist() == [20.0, 30.0, 50.0, 50.0]
    assert mean["against dense"].tolist() == [0.0, 0.5, 0.0, 0.0]


def test_targets_are_compared_seed_by_seed():
    arms = {"dense": (1.0, 2.0), "sparse": (2.0, 3.0), "sparse, full target": (1.5, 2.0)}
    compared = tables.targets_compared(tables.by_seed(two_seeds(**arms)))
    assert compared.loc[8].tolist() == [-7.5, -0.75, -7.5, 0.75, 0.25]
    assert compared.loc[32].tolist() == [0, 0, 0, 0, 0]


def test_a_fault_changes_the_indexer_and_nothing_is_lost_without_one(recipe):
    trained = study.recipe_result(study.RecipeRun(recipe, "sparse"))
    right, wrong, _ = tables.fault_rows(trained)
    assert right == pytest.approx([1.0, trained.text_loss, trained.recall_accuracy])
    assert wrong[0] == trained.checks["overlap_misrotated"] < 1


def test_mass_of_all_queries_and_of_the_questions_are_told_apart(recipe):
    trained = study.recipe_result(study.RecipeRun(recipe, study.DENSE))
    found = pandas.DataFrame(tables.mass_rows([trained], (2, 4)))
    assert found[["keys", "queries"]].values.tolist() == [
        [keys, queries] for keys in (2, 4) for queries in ("all", "questions")
    ]
    where = study.answering(trained.result.config)
    inputs = study.planted(trained.result.config)[0]
    asked = study.masses(trained.model(), inputs, 4, where)
    assert found.iloc[3]["window"] == asked["window"] != found.iloc[2]["window"]
    assert (found.best >= found[["indexer", "window", "random"]].max(axis=1)).all()


def test_facts_are_found_where_they_were_planted():
    text = torch.arange(400, dtype=torch.uint8) % 100
    inputs, targets, kinds = (part[0] for part in TASK.evaluation(text, 1, 24))
    places = tables.fact_places(inputs, targets, kinds)
    assert len(places) == TASK.facts
    for query, fact in places.items():
        assert inputs[fact] == targets[query]
        assert query - fact >= TASK.distance


@pytest.mark.parametrize(
    ("token", "seen"), [(97, "a"), (10, "↵"), (32, "·"), (128, "a0"), (133, "b1"), (136, "A?"), (137, "B?")]
)
def test_a_planted_token_is_spelled_by_its_kind(token, seen):
    assert tables.spelled(token, TASK) == seen
