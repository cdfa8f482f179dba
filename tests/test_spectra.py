"""Singular spectra."""

import pytest
import torch

from dslib.spectra import singular_spectrum


def test_spectrum_of_a_diagonal_matrix_is_its_sorted_diagonal():
    assert singular_spectrum(torch.diag(torch.tensor([2.0, -5.0, 0.0]))).tolist() == [5.0, 2.0, 0.0]


def test_normalised_spectrum_starts_at_one_and_zero_stays_zero():
    W = torch.stack([torch.diag(torch.tensor([4.0, 2.0])), torch.zeros(2, 2)])
    assert singular_spectrum(W, normalize=True).tolist() == [[1.0, 0.5], [0.0, 0.0]]


def test_vector_is_refused_with_its_shape():
    with pytest.raises(ValueError, match=r"\(3,\)"):
        singular_spectrum(torch.ones(3))
