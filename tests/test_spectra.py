"""Singular spectra."""

import pytest
import torch

from dslib.spectra import leading_share, matrix_with_spectrum, singular_spectrum


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
