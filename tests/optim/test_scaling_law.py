"""Power laws: recovered exactly, inverted, compared at equal loss, and honest about what they do not know."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslib.optim import (
    PowerLaw,
    bowl_minimum,
    compute_ratio,
    compute_ratio_interval,
    fit_power_law,
)

C = np.array([1e9, 3e9, 1e10, 3e10, 1e11, 3e11])
MUON, ADAMW = PowerLaw(2.506, 0.052), PowerLaw(2.608, 0.054)  # the paper's Table 3


def noisy(law, seeds=8, scatter=0.01, seed=0):
    generator = np.random.default_rng(seed)
    return law.loss(C) * np.exp(scatter * generator.normal(size=(seeds, len(C))))


@given(a=st.floats(0.1, 1e3), b=st.floats(-0.5, 0.5), unit=st.floats(1e-20, 1e20))
def test_exact_data_give_back_the_law_in_any_unit_of_compute(a, b, unit):
    law = PowerLaw(a, b)
    found = fit_power_law(C * unit, law.loss(C), resamples=0)
    assert found.b == pytest.approx(b, abs=1e-9)
    np.testing.assert_allclose(found.loss(C * unit), law.loss(C), rtol=1e-9)


@pytest.mark.parametrize("floor", [0.3, 1.0, 1.5])
def test_exact_data_give_back_the_irreducible_loss(floor):
    law = PowerLaw(40.0, 0.15, floor)
    found = fit_power_law(C, law.loss(C), irreducible=True, resamples=0)
    assert found.irreducible == pytest.approx(floor, rel=1e-3)
    assert found.b == pytest.approx(0.15, rel=1e-3)


def test_fit_without_a_floor_is_the_line_that_numpy_finds_in_logarithms():
    losses = noisy(PowerLaw(30.0, 0.1))
    slope, height = np.polynomial.Polynomial.fit(np.log(C), np.log(losses.mean(0)), 1).convert().coef[::-1]
    found = fit_power_law(C, losses)
    assert found.b == pytest.approx(-slope)
    assert math.log(found.a) == pytest.approx(height)


def test_floor_fits_at_least_as_well_as_none_and_stays_below_the_data():
    losses = noisy(PowerLaw(30.0, 0.1), scatter=0.02)
    pure, floored = (fit_power_law(C, losses, irreducible=floor, resamples=0) for floor in (False, True))
    errors = [np.square(np.log(law.loss(C) / losses.mean(0))).sum() for law in (pure, floored)]
    assert errors[1] <= errors[0] * (1 + 1e-6)
    assert 0 <= floored.irreducible < losses.mean(0).min()


def test_interval_covers_the_truth_about_as_often_as_it_says():
    law = PowerLaw(30.0, 0.1)
    covered = []
    for seed in range(40):
        low, high = fit_power_law(C, noisy(law, 4, 0.02, seed), resamples=200, seed=seed).interval("b")
        covered.append(low < 0.1 < high)
    assert 0.85 <= np.mean(covered)


def test_interval_widens_away_from_the_data():
    law = fit_power_law(C, noisy(PowerLaw(30.0, 0.1), scatter=0.03))
    at = np.array([3e10, 1e13, 1e16])
    low, high = law.loss_interval(at)
    relative = (high - low) / law.loss(at)
    assert relative[0] < relative[1] < relative[2]


def test_interval_also_covers_budgets_that_lie_off_the_line():
    # Every seed alike, so the seeds scatter not at all; the budgets' means do.
    losses = np.tile(noisy(PowerLaw(30.0, 0.1), 1, 0.05), (5, 1))
    low, high = fit_power_law(C, losses).interval("b")
    assert high - low > 1e-3


def test_same_seed_same_intervals_and_one_budget_per_parameter_rests_on_the_seeds_alone():
    losses = noisy(PowerLaw(30.0, 0.1))
    one, same, other = (fit_power_law(C, losses, resamples=50, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.resampled, same.resampled)
    assert not np.array_equal(one.resampled, other.resampled)
    low, high = fit_power_law(C[:2], losses[:, :2], resamples=50).interval("b")
    assert low < high


@given(at=st.floats(1e-3, 1e4), floor=st.floats(0, 2))
def test_compute_inverts_loss(at, floor):
    law = PowerLaw(2.0, 0.05, floor)
    assert law.compute(law.loss(at)) == pytest.approx(at, rel=1e-6)


def test_loss_at_or_below_the_floor_costs_infinite_compute():
    assert PowerLaw(2.0, 0.1, 1.0).compute([0.5, 1.0]).tolist() == [math.inf, math.inf]
    assert compute_ratio(PowerLaw(2.0, 0.1, 1.5), PowerLaw(2.0, 0.1), 1e9) == math.inf


@pytest.mark.parametrize(("at", "ratio"), [(0.01, 0.39), (1.0, 0.464), (1000.0, 0.61)])
def test_papers_two_laws_give_no_constant_ratio(at, ratio):
    assert compute_ratio(MUON, ADAMW, at) == pytest.approx(ratio, abs=0.006)
    closed = (MUON.a / ADAMW.a) ** (1 / MUON.b) * at ** (ADAMW.b / MUON.b - 1)
    assert compute_ratio(MUON, ADAMW, at) == pytest.approx(closed)


def test_ratio_is_one_against_itself_and_its_interval_says_so():
    laws = [fit_power_law(C, noisy(PowerLaw(30.0, 0.1), seed=seed), seed=seed) for seed in (0, 1)]
    np.testing.assert_allclose(compute_ratio(laws[0], laws[0], C), 1.0)
    low, high = compute_ratio_interval(*laws, C)
    assert (low < 1).all()
    assert (high > 1).all()
    stuck = PowerLaw(1.0, 0.1, 5.0, resampled=np.tile([1.0, 0.1, 5.0], (1000, 1)))
    assert compute_ratio_interval(stuck, laws[0], C[-1:])[1] == math.inf
    with pytest.raises(ValueError, match="as many"):
        compute_ratio_interval(laws[0], fit_power_law(C, noisy(ADAMW), resamples=10), C)
    twice = PowerLaw(laws[0].a * 2**-0.1, 0.1)
    assert compute_ratio(twice, PowerLaw(laws[0].a, 0.1), 1e10) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("compute", "losses", "message"),
    [
        ([1e9, 1e9], [2.0, 2.1], "distinct"),
        ([1e9], [2.0], "distinct"),
        ([], [], "shape"),
        ([1e9, 2e9], [2.0], "shape"),
        ([1e9, 0.0], [2.0, 1.9], "C holds 0.0"),
        ([1e9, 2e9], [2.0, math.nan], "L holds nan"),
        ([1e9, 2e9], [2.0, math.inf], "L holds inf"),
        ([1e9, 2e9], [2.0, -1.0], "L holds -1"),
        ([[1e9, 2e9]], [2.0, 1.0], "shape"),
    ],
)
def test_data_without_a_law_are_refused(compute, losses, message):
    with pytest.raises(ValueError, match=message):
        fit_power_law(compute, losses)


def test_floor_needs_three_budgets_and_intervals_need_resamples():
    with pytest.raises(ValueError, match="3 parameters"):
        fit_power_law(C[:2], [2.0, 1.9], irreducible=True)
    with pytest.raises(ValueError, match="resamples=-1"):
        fit_power_law(C[:2], [2.0, 1.9], resamples=-1)
    law = fit_power_law(C, ADAMW.loss(C), resamples=0)
    assert law.interval("a") is None
    with pytest.raises(ValueError, match="no resamples"):
        law.loss_interval(C)
    with pytest.raises(ValueError, match="'c'"):
        law.interval("c")


@given(bottom=st.floats(2.0, 44.0), bend=st.floats(0.01, 10.0))
def test_bottom_of_a_parabola_in_log_size_is_found_exactly(bottom, bend):
    sizes = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    size, loss = bowl_minimum(sizes[::-1], (bend * np.log(sizes / bottom) ** 2 + 1.5)[::-1])
    assert size == pytest.approx(bottom, rel=1e-6)
    assert loss == pytest.approx(1.5, abs=1e-6)


@pytest.mark.parametrize(
    ("sizes", "losses", "message"),
    [
        ([1, 2, 4], [3, 2, 1], "edge"),
        ([1, 2], [3, 2], "three"),
        ([1, 1, 2], [3, 2, 4], "three"),
        ([1, 2, 4], [3, math.nan, 4], "nan"),
    ],
)
def test_bowl_without_a_bottom_is_refused(sizes, losses, message):
    with pytest.raises(ValueError, match=message):
        bowl_minimum(sizes, losses)
