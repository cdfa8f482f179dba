"""Singular spectra."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslib.spectra import (
    effective_rank,
    leading_share,
    matrix_with_spectrum,
    singular_spectrum,
    spread,
    stable_rank,
    svd_entropy,
)

MEASURES = (svd_entropy, effective_rank, stable_rank)


def gaussian(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_spectrum_of_a_diagonal_matrix_is_its_sorted_diagonal():
    assert singular_spectrum(torch.diag(torch.tensor([2.0, -5.0, 0.0]))).tolist() == [5.0, 2.0, 0.0]


def test_normalised_spectrum_starts_at_one_and_zero_stays_zero():
    W = torch.stack([torch.diag(torch.tensor([4.0, 2.0])), torch.zeros(2, 2)])
    assert singular_spectrum(W, normalize=True).tolist() == [[1.0, 0.5], [0.0, 0.0]]


def test_vector_is_refused_with_its_shape():
    with pytest.raises(ValueError, match=r"\(3,\)"):
        singular_spectrum(torch.ones(3))


def test_leading_share_counts_squared_singular_values():
    assert leading_share(torch.diag(torch.tensor([3.0, 4.0, 0.0])), 1).item() == pytest.approx(16 / 25)
    assert leading_share(torch.eye(4).expand(2, 4, 4), 3).tolist() == pytest.approx([0.75, 0.75])
    with pytest.raises(ValueError, match="k=0"):
        leading_share(torch.eye(2), 0)


@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (3, 3)])
def test_matrix_with_spectrum_has_that_spectrum_and_zeros(shape):
    sigma = torch.tensor([2.0, 0.5, 1e-3], dtype=torch.float64)
    W = matrix_with_spectrum(sigma, shape, torch.Generator().manual_seed(0))
    assert W.shape == shape
    expected = torch.cat([sigma, torch.zeros(min(shape) - 3, dtype=torch.float64)])
    torch.testing.assert_close(singular_spectrum(W), expected, rtol=0, atol=1e-12)


def test_too_many_singular_values_for_a_shape_are_refused():
    with pytest.raises(ValueError, match="2 values"):
        matrix_with_spectrum(torch.ones(3), (2, 5), torch.Generator())


def test_svd_entropy_is_its_formula_on_a_known_spectrum():
    W = torch.diag(torch.tensor([3.0, 1.0, 2.0, 0.0]))
    p = [9 / 14, 4 / 14, 1 / 14]
    assert svd_entropy(W).item() == pytest.approx(-sum(x * math.log(x) for x in p) / math.log(4), abs=1e-14)
    assert stable_rank(W).item() == pytest.approx(14 / 9, abs=1e-14)
    q = [3 / 6, 2 / 6, 1 / 6]
    assert effective_rank(W).item() == pytest.approx(math.exp(-sum(x * math.log(x) for x in q)), abs=1e-13)


def test_entropy_from_the_gram_matrix_is_the_same():
    W = gaussian(6, 9)
    p = torch.linalg.eigvalsh(W @ W.T) / W.square().sum()
    assert svd_entropy(W).item() == pytest.approx(-(p * p.log()).sum().item() / math.log(6), abs=1e-12)


def test_squared_and_plain_shares_differ_on_a_long_tail():
    W = torch.diag(torch.tensor([1.0] + [0.05] * 99, dtype=torch.float64))
    assert math.exp(svd_entropy(W).item() * math.log(100)) < 6.5 < 40 < effective_rank(W).item()


@pytest.mark.parametrize("shape", [(5, 5), (4, 7), (7, 3), (13, 2)])
def test_orthogonal_matrix_is_spread_over_all_directions(shape):
    n = min(shape)
    W = matrix_with_spectrum(
        torch.full((n,), 0.3, dtype=torch.float64), shape, torch.Generator().manual_seed(0)
    )
    assert svd_entropy(W).item() == pytest.approx(1, abs=1e-12)
    assert effective_rank(W).item() == pytest.approx(n, abs=1e-9)
    assert stable_rank(W).item() == pytest.approx(n, abs=1e-9)


def test_rank_one_has_one_direction_and_zeros_count_in_n():
    W = torch.outer(gaussian(4), gaussian(6, seed=1))
    assert svd_entropy(W).item() == pytest.approx(0, abs=1e-12)
    assert effective_rank(W).item() == pytest.approx(1, abs=1e-9)
    assert stable_rank(W).item() == pytest.approx(1, abs=1e-12)
    two_of_four = torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert svd_entropy(two_of_four).item() == pytest.approx(0.5, abs=1e-14)
    assert svd_entropy(two_of_four[:2, :2]).item() == pytest.approx(1, abs=1e-14)


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1)])
def test_single_row_or_column_has_nothing_to_spread(shape):
    W = torch.full(shape, -2.0)
    assert [measure(W).item() for measure in MEASURES] == pytest.approx([0, 1, 1], abs=1e-12)


@pytest.mark.parametrize("measure", MEASURES)
def test_zero_matrix_is_nan_and_does_not_spoil_its_batch(measure):
    values = measure(torch.stack([torch.zeros(3, 4), torch.ones(3, 4)]))
    assert values[0].isnan()
    assert values[1].isfinite()


@pytest.mark.parametrize("measure", MEASURES)
def test_batch_is_each_matrix_by_itself_in_float64(measure):
    W = gaussian(2, 3, 5, 4).float()
    values = measure(W)
    assert (values.shape, values.dtype) == ((2, 3), torch.float64)
    torch.testing.assert_close(values[1, 2], measure(W[1, 2]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("measure", MEASURES)
def test_scale_transpose_and_rotation_change_nothing(measure):
    W = gaussian(5, 8)
    Q = torch.linalg.qr(gaussian(5, 5, seed=1)).Q
    for same in (W.T, Q @ W, -W, 1e-200 * W, 1e200 * W):
        torch.testing.assert_close(measure(same), measure(W), rtol=0, atol=1e-9)


def test_all_measures_at_once_are_the_measures_one_by_one():
    W = gaussian(2, 5, 4)
    for measure, values in zip(MEASURES, spread(W).values(), strict=True):
        assert torch.equal(values, measure(W))


@given(sigma=st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=7))
def test_measures_stay_in_their_range_and_in_their_order(sigma):
    W, n = torch.diag(torch.tensor(sigma, dtype=torch.float64)), len(sigma)
    entropy, effective, stable = (measure(W).item() for measure in MEASURES)
    assert -1e-9 <= entropy <= 1 + 1e-9
    assert 1 - 1e-9 <= stable <= n + 1e-9
    # Rényi entropies fall with their order: the one of σ², order ∞, then 1, then that of the flatter σ.
    assert stable <= n**entropy + 1e-6 <= effective + 2e-6


@pytest.mark.parametrize("measure", [*MEASURES, singular_spectrum])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_of_a_diverged_run_are_refused_with_their_number(measure, bad):
    W = torch.ones(3, 4)
    W[1, :2] = bad
    with pytest.raises(ValueError, match="2 entries"):
        measure(W)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("shape", [(0, 3), (4, 0)])
def test_empty_matrix_is_refused_with_its_shape(measure, shape):
    with pytest.raises(ValueError, match="without entries"):
        measure(torch.zeros(shape))


def test_random_initialisation_is_already_spread():
    """Why a high entropy alone says nothing about training: a square Gaussian has it from the start."""
    assert 0.85 < svd_entropy(gaussian(64, 64)).item() < 0.95
    assert svd_entropy(gaussian(64, 512)).item() > 0.97
