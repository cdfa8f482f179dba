"""A search counts only when its optimum is bracketed."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslib.experiments.search import (
    Choice,
    Grid,
    Trials,
    along,
    best_bracketed,
    best_in_table,
    bracketed_minimum,
    coordinate_search,
    on_seeds,
    one_pass,
)


@given(optimum=st.floats(1e-6, 1e3))
def test_minimum_is_found_and_bracketed_wherever_it_lies(optimum):
    losses = bracketed_minimum(
        lambda values: [(math.log2(v / optimum)) ** 2 for v in values], [0.01, 0.02, 0.04], 4.0
    )
    best = best_bracketed(losses)
    assert abs(math.log2(best / optimum)) <= 0.51
    assert min(losses) < best < max(losses)


def test_values_of_a_stage_are_asked_for_together():
    stages = []
    bracketed_minimum(
        lambda values: stages.append(list(values)) or [abs(math.log(v)) for v in values], [1, 2, 4]
    )
    assert stages[0] == [1, 2, 4]
    assert stages[1] == [0.5]
    assert len(stages[-1]) == 2


def test_diverged_runs_are_bad_runs():
    losses = bracketed_minimum(
        lambda vs: [math.nan if v > 2 else abs(math.log(v / 2)) for v in vs], [1.0, 2.0]
    )
    assert best_bracketed(losses) == 2.0


def test_monotone_loss_ends_in_an_error_instead_of_an_endless_search():
    with pytest.raises(RuntimeError, match="no minimum"):
        bracketed_minimum(lambda values: [-v for v in values], [1.0])


@pytest.mark.parametrize("start", [[], [2.0, 1.0], [0.0, 1.0]])
def test_bad_start_is_refused(start):
    with pytest.raises(ValueError, match="start"):
        bracketed_minimum(lambda values: values, start)


def test_optimum_at_the_edge_is_refused():
    with pytest.raises(ValueError, match="edge"):
        best_bracketed({1.0: 3.0, 2.0: 2.0})


@dataclass(frozen=True)
class Point:
    lr: float
    width: float = 1.0
    seed: int = 0


def bowl(points):
    """A skewed bowl, at whose sides a pass ends before its bottom."""
    x, y = ([math.log2(p.lr) for p in points], [math.log2(p.width / 8) for p in points])
    return [a * a + b * b + 1.5 * a * b for a, b in zip(x, y, strict=True)]


WIDTH = Grid("width", refine=False)


def test_passes_go_on_until_no_coordinate_moves():
    start = Point(2.0**-4)
    coordinates = (Grid("lr", refine=False), WIDTH)
    once = one_pass(start, coordinates, bowl)
    assert once != one_pass(once, coordinates, bowl)
    found = coordinate_search(start, coordinates, bowl, most_passes=20)
    assert bowl([found]) < bowl([once])
    assert one_pass(found, coordinates, bowl) == found, "it is best along each, all others held"
    with pytest.raises(RuntimeError, match="after 2 passes"):
        coordinate_search(start, coordinates, bowl, most_passes=2)


def test_search_goes_on_from_what_the_last_look_finds():
    def losses(points):  # a dip at 64 that steps of two do not see
        return [0.0 if p.width == 64 else 1 + abs(math.log2(p.width / 4)) for p in points]

    found = coordinate_search(Point(1.0), (WIDTH,), losses, 9)
    assert found.width == 4
    wide = coordinate_search(Point(1.0), (WIDTH,), losses, 9, lambda best: (Choice("width", (64, 4)),))
    assert wide.width == 64


def test_choice_takes_the_first_of_equals_and_grid_refines_by_the_root():
    assert Choice("width", (3, 5, 7)).best(Point(1.0), lambda points: [1.0, 0.0, 0.0]).width == 5
    best = Grid("lr").best(Point(1.0), lambda points: [abs(math.log2(p.lr) - 0.4) for p in points])
    assert best.lr == math.sqrt(2)


def test_ladder_has_ends():
    rungs = (1, 3, 9)
    ladder = Grid(
        "width",
        refine=False,
        value=lambda place: rungs[round(math.log2(place))],
        place=lambda w: 2.0 ** rungs.index(w),
    )
    assert ladder.best(Point(1.0, 3), lambda points: [abs(p.width - 3) for p in points]).width == 3
    with pytest.raises(IndexError):
        ladder.best(Point(1.0, 9), lambda points: [-p.width for p in points])


def test_each_point_is_tried_once_on_every_seed_and_its_loss_is_the_mean():
    asked = []

    def run(configs):
        asked.append(list(configs))
        return [SimpleNamespace(config=c, final_loss=c.lr + c.seed) for c in configs]

    trials = Trials(on_seeds(run, lambda point: replace(point, width=7), (0, 2)))
    a, b, c = Point(1.0), Point(3.0), Point(0.5)
    assert trials.losses([a, b, a]) == [2.0, 4.0, 2.0]
    assert trials.losses([b, c]) == [4.0, 1.5]
    assert trials.losses([c]) == [1.5]
    assert [[(p.lr, p.seed) for p in configs] for configs in asked] == [
        [(1.0, 0), (1.0, 2), (3.0, 0), (3.0, 2)],
        [(0.5, 0), (0.5, 2)],
    ]
    assert trials.best == c
    assert [result.config.lr for result in trials.results] == [1.0, 1.0, 3.0, 3.0, 0.5, 0.5]
    assert {result.config.width for result in trials.results} == {7}


def test_winner_is_read_back_from_a_table_and_must_be_inside():
    points = [(0.5, 1), (1.0, 1), (2.0, 1), (1.0, 2)]
    table = pd.DataFrame(
        [{"lr": lr, "momentum": m, "final_loss": (lr - 1) ** 2 + m + s} for lr, m in points for s in (0, 1)]
    )
    assert best_in_table(table, ["lr", "momentum"], ["lr"]) == {"lr": 1.0, "momentum": 1}
    assert along(table, {"lr": 1.0, "momentum": 1}, "momentum") == {1.0: 1.5, 2.0: 2.5}
    with pytest.raises(ValueError, match="edge"):
        best_in_table(table, ["lr", "momentum"], ["momentum"])
    with pytest.raises(ValueError, match="edge"):
        best_in_table(table[table.lr <= 1], ["lr"], ["lr"])
