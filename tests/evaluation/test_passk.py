"""pass@k: the exact fractions, against brute force, against chance, and what cannot be asked."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslib.evaluation import pass_at_k, pass_hat_k, plug_in_pass_at_k, rates_to_pass_at_k

TABLE = [
    (10, 3, 1, Fraction(3, 10)),
    (10, 3, 2, Fraction(8, 15)),
    (10, 3, 5, Fraction(11, 12)),
    (10, 5, 5, Fraction(251, 252)),
    (10, 2, 4, Fraction(2, 3)),
    (16, 4, 8, Fraction(25, 26)),
    (256, 1, 128, Fraction(1, 2)),
    (256, 3, 64, Fraction(5007, 8636)),
    (1024, 2, 256, Fraction(597, 1364)),
    (4, 2, 3, Fraction(1)),
    (5, 0, 3, Fraction(0)),
]


def exact(n, c, k):
    return 1 - Fraction(math.comb(n - c, k), math.comb(n, k))


@st.composite
def counts(draw, most=400):
    n = draw(st.integers(1, most))
    return n, draw(st.integers(0, n)), draw(st.integers(1, n))


@pytest.mark.parametrize(("n", "c", "k", "expected"), TABLE)
def test_table_of_exact_fractions(n, c, k, expected):
    assert exact(n, c, k) == expected
    assert abs(Fraction(pass_at_k(n, c, k)) - expected) < 1e-15


def test_published_decimal():
    assert pass_at_k(200, 5, 10) == pytest.approx(0.228284461, abs=5e-10)


@given(counts())
def test_any_counts_give_the_fraction_to_the_last_digit(case):
    assert abs(Fraction(pass_at_k(*case)) - exact(*case)) < 1e-15


@given(counts(most=60))
def test_small_chances_keep_their_relative_accuracy(case):
    n, _, k = case
    n *= 10**9
    assert Fraction(pass_at_k(n, 1, k)) == pytest.approx(Fraction(k, n), rel=1e-15)


@pytest.mark.parametrize(
    "case", [(10_000, 70, 70), (10_000, 100, 100), (10_000, 30, 200), (10_000, 3, 5_000)]
)
def test_product_is_accurate_where_log_gamma_is_off(case):
    n, c, k = case
    assert abs(Fraction(pass_at_k(*case)) - exact(*case)) < 1e-15
    logarithms = sum(
        sign * math.lgamma(x + 1)
        for sign, x in zip((1, 1, -1, -1), (n - c, n - k, n - c - k, n), strict=True)
    )
    assert abs(Fraction(1 - math.exp(logarithms)) - exact(*case)) > 1e-14


def test_counts_whose_binomials_overflow_a_float():
    with pytest.raises(OverflowError):
        float(math.comb(1030, 515))
    for c, k in ((1, 515), (2, 515), (515, 1)):
        assert abs(Fraction(pass_at_k(1030, c, k)) - exact(1030, c, k)) < 1e-15
    assert pass_at_k(1030, 515, 515) == 1.0


@given(counts(most=8))
def test_estimate_is_the_share_of_subsets_with_a_hit(case):
    n, c, k = case
    hits = [any(i < c for i in subset) for subset in itertools.combinations(range(n), k)]
    all_right = [all(i < c for i in subset) for subset in itertools.combinations(range(n), k)]
    assert pass_at_k(n, c, k) == pytest.approx(np.mean(hits), abs=1e-15)
    assert pass_hat_k(n, c, k) == pytest.approx(np.mean(all_right), abs=1e-15)


@given(counts())
def test_properties_of_a_probability(case):
    n, c, k = case
    value = pass_at_k(n, c, k)
    assert 0.0 <= value <= 1.0
    assert (value == 0.0) == (c == 0)
    assert pass_hat_k(n, c, k) <= c / n + 1e-15 <= value + 2e-15
    assert pass_at_k(n, c, n) == float(c > 0)
    assert pass_at_k(n, c, 1) == pytest.approx(c / n, abs=1e-15)
    assert pass_hat_k(n, c, 1) == pytest.approx(c / n, abs=1e-15)
    assert pass_at_k(n, c, k) == pass_at_k(n, k, c) if c else True  # the two draws are alike
    if n - c < k:
        assert value == 1.0
    if c < n:
        assert pass_at_k(n, c + 1, k) >= value - 1e-15
    if k < n:
        assert pass_at_k(n, c, k + 1) >= value - 1e-15


@given(counts())
def test_all_right_is_none_of_the_wrong(case):
    n, c, k = case
    exactly = Fraction(math.comb(c, k), math.comb(n, k))
    assert Fraction(pass_hat_k(*case)) == pytest.approx(exactly, rel=1e-12)
    assert pass_hat_k(n, c, k) == pytest.approx(1 - pass_at_k(n, n - c, k), abs=1e-15)


def test_plug_in_is_biased_low_and_the_estimate_is_not():
    assert plug_in_pass_at_k(10, 3, 5) == pytest.approx(0.83193, abs=1e-12)
    n, k, p = 10, 5, 0.3
    weight = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    truth = float(rates_to_pass_at_k(p, k))
    c = np.arange(n + 1)
    assert truth == pytest.approx(0.83193, abs=1e-12)
    assert np.dot(weight, pass_at_k(n, c, k)) == pytest.approx(truth, abs=1e-14)
    assert np.dot(weight, plug_in_pass_at_k(n, c, k)) < truth - 0.05
    assert (plug_in_pass_at_k(n, c, k) <= pass_at_k(n, c, k)).all()
    assert plug_in_pass_at_k(10, 3, 50) == pytest.approx(1 - 0.7**50)  # k may exceed n


def test_arrays_broadcast_and_agree_with_single_cases():
    n, c, k = np.array([[10], [16], [20]]), np.array([[3], [4], [0]]), np.array([1, 2, 8])
    found = pass_at_k(n, c, k)
    assert found.shape == (3, 3)
    assert found.dtype == np.float64
    for i, j in np.ndindex(3, 3):
        assert found[i, j] == pass_at_k(int(n[i, 0]), int(c[i, 0]), int(k[j]))
    assert isinstance(pass_at_k(10, 3, 2), float)
    np.testing.assert_array_equal(pass_at_k(10, torch.tensor([3, 0]), 2), [pass_at_k(10, 3, 2), 0.0])


def test_numbers_too_large_to_be_looked_up_give_the_same():
    n = np.array([3_000_000, 10, 3_000_000])
    c = np.array([2, 3, 5])
    np.testing.assert_array_equal(
        pass_at_k(n, c, 5), [pass_at_k(int(a), int(b), 5) for a, b in zip(n, c, strict=True)]
    )


@pytest.mark.parametrize("function", [pass_at_k, pass_hat_k])
@pytest.mark.parametrize(
    ("n", "c", "k", "message"),
    [
        (5, 2, 8, "k=8 exceeds the n=5 samples; sample more or lower k"),
        ([9, 9, 9, 5], 2, 8, "k=8 exceeds the n=5 samples of problem 3"),
        (5, 6, 2, "c=6 correct samples exceed its n=5"),
        (5, [1, -1], 2, "c=-1 correct samples of problem 1"),
        (5, 2, 0, "k=0 must be at least 1"),
        (5, 2, -3, "k=-3 must be at least 1"),
        (0, 0, 1, "n=0 samples must be at least 1"),
        (-4, 0, 1, "n=-4 samples"),
        ([], [], 1, "no problem"),
        ([[4, 4]], [[1], [5]], 2, "c=5 correct samples of problem 1, 0"),
    ],
)
def test_impossible_counts_are_named(function, n, c, k, message):
    with pytest.raises(ValueError, match=message):
        function(n, c, k)


@pytest.mark.parametrize("wrong", [{"n": 5.0}, {"c": 2.5}, {"k": "2"}, {"c": math.nan}, {"c": True}])
def test_only_whole_numbers_are_counts(wrong):
    with pytest.raises(TypeError, match=f"{next(iter(wrong))} is"):
        pass_at_k(**{"n": 5, "c": 2, "k": 2, **wrong})


def test_exact_rates_at_any_k():
    np.testing.assert_allclose(rates_to_pass_at_k([0.0, 0.5, 1.0], 3), [0.0, 0.875, 1.0], rtol=1e-15)
    assert rates_to_pass_at_k(1e-18, 1000) == pytest.approx(1e-15, rel=1e-12)  # 1 − (1 − p)^k would be 0
    assert rates_to_pass_at_k(1 + 1e-9, 2) == 1.0
    assert rates_to_pass_at_k(torch.tensor([0.5], requires_grad=True), 1) == pytest.approx(0.5)


@pytest.mark.parametrize("rates", [[0.5, math.nan], [0.5, 1.1], [0.5, -0.1], [0.5, math.inf]])
def test_rates_that_are_none_are_named(rates):
    with pytest.raises(ValueError, match=r"at \[1\]; a rate lies between 0 and 1"):
        rates_to_pass_at_k(rates, 2)


def test_rates_without_a_problem_or_a_k():
    with pytest.raises(ValueError, match="no problem"):
        rates_to_pass_at_k([], 2)
    with pytest.raises(ValueError, match="k=0"):
        rates_to_pass_at_k([0.5], 0)
    with pytest.raises(TypeError, match="k is float64"):
        rates_to_pass_at_k([0.5], 1.5)
