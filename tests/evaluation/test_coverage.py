"""Coverage: four cells, what luck alone would give, and answers that are chosen among samples."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslib.evaluation import (
    best_of_n,
    consensus_at_k,
    coverage_table,
    majority_vote,
    pass_at_k,
    sampling_efficiency_gap,
    support_change,
)

RATES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6)


def test_at_k_equal_to_n_every_problem_is_in_one_cell():
    table = coverage_table([3, 1, 0, 0, 4], [4, 0, 1, 0, 4], k=4, n=4)
    assert (table.k, table.problems) == (4, 5)
    cells = table.cells
    assert (cells.both, cells.base_only, cells.policy_only, cells.neither) == (0.4, 0.2, 0.2, 0.2)
    assert table.same_rates is None  # 2k samples would be needed
    independent = table.independent
    assert independent.both == pytest.approx(0.36)
    assert independent.base_only == independent.policy_only == pytest.approx(0.24)


@given(RATES, st.integers(1, 50))
def test_cells_are_shares_and_have_the_coverages_as_margins(pairs, k):
    base, policy = map(np.array, zip(*pairs, strict=True))
    table = coverage_table(base, policy, k)
    at_k = [np.mean(1 - (1 - rates) ** k) for rates in (base, policy)]
    for cells in (table.cells, table.independent):
        assert sum(vars(cells).values()) == pytest.approx(1)
        assert cells.both + cells.base_only == pytest.approx(at_k[0], abs=1e-9)
        assert cells.both + cells.policy_only == pytest.approx(at_k[1], abs=1e-9)
    assert table.same_rates.both + table.same_rates.base_only == pytest.approx(at_k[0], abs=1e-9)


@given(RATES, st.integers(1, 50))
def test_an_unchanged_model_fills_the_cells_that_luck_gives(pairs, k):
    base = np.array(pairs)[:, 0]
    table = coverage_table(base, base, k)
    for name, share in vars(table.cells).items():
        assert share == pytest.approx(getattr(table.same_rates, name), abs=1e-9)


def test_what_luck_gives_is_estimated_without_bias_from_counts():
    n, k, p = 8, 3, 0.2
    weight = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    hit = 1 - (1 - p) ** k
    found = [coverage_table([c], [0], k, n=n).same_rates for c in range(n + 1)]
    assert np.dot(weight, [cells.base_only for cells in found]) == pytest.approx(hit * (1 - hit))
    assert np.dot(weight, [cells.both for cells in found]) == pytest.approx(hit**2)
    naive = [pass_at_k(n, c, k) * (1 - pass_at_k(n, c, k)) for c in range(n + 1)]
    assert np.dot(weight, naive) < hit * (1 - hit) - 0.02


def test_samples_of_different_size_can_be_compared():
    table = coverage_table([1], [2], k=2, n=4, n_policy=2)
    assert table.cells.both == pytest.approx(0.5)
    assert table.cells.policy_only == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base": [], "policy": []}, "no problem"),
        ({"base": [1], "policy": [1, 2]}, "base has 1 problems and policy 2"),
        ({"k": 5}, "k=5 exceeds the n=4"),
        ({"base": [5, 1]}, "c=5"),
        ({"base": [0.5, 1.5], "n": None}, "rate lies between"),
        ({"base": [[1, 2]], "policy": [[1, 2]]}, "shape"),
    ],
)
def test_tables_that_mean_nothing_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        coverage_table(**{"base": [1, 2], "policy": [1, 2], "k": 2, "n": 4, **arguments})


def test_gap_is_the_bases_coverage_minus_the_policys_accuracy():
    assert sampling_efficiency_gap([0.5, 0.0], [0.6, 0.1], k=2) == pytest.approx(0.375 - 0.35)
    assert sampling_efficiency_gap([2, 0], [3, 1], k=4, n=4) == pytest.approx(0.5 - 0.5)
    assert sampling_efficiency_gap([0.1], [1.0], k=1) < 0
    with pytest.raises(ValueError, match="k=256 exceeds the n=4"):
        sampling_efficiency_gap([2], [3], n=4)


def test_lost_support_is_told_from_lowered_probability():
    change = support_change(
        base=[0.5, 0.5, 0.2, 0.2, 1e-9, 0.0, 0.1, 0.1],
        policy=[1e-9, 0.1, 0.9, 0.2, 0.3, 1e-9, 0.0, 0.01],
        floor=0.01,
    )
    assert change.lost == 2 / 8
    assert change.lowered == 2 / 8  # the last stands on the floor
    assert (change.raised, change.equal, change.gained, change.out_of_reach) == (1 / 8, 1 / 8, 1 / 8, 1 / 8)
    assert sum(share for name, share in vars(change).items() if name != "floor") == 1


@pytest.mark.parametrize(
    ("base", "policy", "floor", "message"),
    [
        ([0.5], [0.5], 0.0, "floor=0.0"),
        ([0.5], [0.5], math.nan, "floor=nan"),
        ([0.5], [0.5, 0.1], 0.1, "must both be"),
        ([], [], 0.1, "base hold no problem"),
        ([0.5], [math.nan], 0.1, "policy hold nan"),
    ],
)
def test_bad_rates_or_floors_are_refused(base, policy, floor, message):
    with pytest.raises(ValueError, match=message):
        support_change(base, policy, floor)


def test_majority_keeps_ties_and_gives_the_unreadable_no_vote():
    assert majority_vote(["7", None, "3", "7", None, None]) == ["7"]
    assert majority_vote(["3", "7", None, "7", "3", "1"]) == ["3", "7"]
    assert majority_vote([None, None]) == majority_vote([]) == []


def test_consensus_of_all_samples_needs_no_chance():
    answers = [["a", "a", "b"], ["a", "b", "c"], [None, None, "b"], [None] * 3, ["b", "b", "a"]]
    found = consensus_at_k(answers, ["a"] * 5)
    np.testing.assert_allclose(found, [1, 1 / 3, 0, 0, 0])


def test_consensus_of_some_samples_is_the_mean_over_all_ways_to_take_them():
    answers = ["a", "a", "b", "b", "b", None, "c"]
    k, exact = 3, []
    for subset in itertools.combinations(answers, k):
        winners = majority_vote(subset)
        exact.append(winners.count("a") / len(winners))
    found = consensus_at_k([answers], ["a"], k=k, resamples=20_000)
    assert found[0] == pytest.approx(np.mean(exact), abs=0.012)
    assert (
        consensus_at_k([answers], ["a"], k=k, seed=1)[0] == consensus_at_k([answers], ["a"], k=k, seed=1)[0]
    )
    assert consensus_at_k([answers], ["a"], k=1, resamples=20_000)[0] == pytest.approx(2 / 7, abs=0.012)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"answers": [], "references": []}, "0 problems"),
        ({"references": ["a", "b"]}, "1 problems and 2 references"),
        ({"k": 3}, "k=3 must be 1 to the 2 samples of problem 0"),
        ({"k": 0}, "k=0"),
        ({"answers": [[]]}, "0 samples of problem 0"),
        ({"references": [None]}, "reference of problem 0"),
        ({"resamples": 0}, "resamples=0"),
    ],
)
def test_votes_that_cannot_be_held_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        consensus_at_k(**{"answers": [["a", "b"]], "references": ["a"], **arguments})


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=7).flatmap(
        lambda samples: st.tuples(st.just(samples), st.integers(1, len(samples)))
    )
)
def test_best_of_k_is_the_mean_over_all_ways_to_take_k(case):
    samples, k = case
    exact = []
    for subset in itertools.combinations(samples, k):
        best = max(score for score, _ in subset)
        exact.append(np.mean([right for score, right in subset if score == best]))
    scores, right = zip(*samples, strict=True)
    assert best_of_n([scores], [right], k=k)[0] == pytest.approx(np.mean(exact), abs=1e-12)


def test_a_perfect_score_finds_what_pass_at_k_counts_and_a_constant_one_is_pass_at_1():
    right = np.array([[1, 0, 0, 1, 0, 0, 0, 0]])
    assert best_of_n(right, right, k=3)[0] == pytest.approx(pass_at_k(8, 2, 3))
    assert best_of_n(np.zeros((1, 8)), right, k=3)[0] == pytest.approx(2 / 8)
    assert best_of_n(-right, right, k=8)[0] == 0
    assert best_of_n(right, right)[0] == 1


@pytest.mark.parametrize(
    ("scores", "correct", "k", "message"),
    [
        ([[1.0, 2.0]], [[1]], None, "must both be"),
        ([1.0], [1], None, "must both be"),
        (np.empty((0, 3)), np.empty((0, 3)), None, "not empty"),
        ([[1.0, math.nan]], [[1, 0]], None, r"NaN at \[0, 1\]"),
        ([[1.0, 2.0]], [[1, 0.5]], None, "0 and 1"),
        ([[1.0, 2.0]], [[1, 0]], 3, "k=3 must be 1 to the n=2"),
        ([[1.0, 2.0]], [[1, 0]], 0, "k=0"),
    ],
)
def test_choices_that_cannot_be_made_are_refused(scores, correct, k, message):
    with pytest.raises(ValueError, match=message):
        best_of_n(scores, correct, k)
