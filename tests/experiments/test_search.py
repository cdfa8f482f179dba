"""A search counts only when its optimum is bracketed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslib.experiments.search import best_bracketed, bracketed_minimum


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
