"""Simulated FP8: the format's steps, a scale a block."""

import pytest
import torch

from dslib.attention.fp8 import fp8_rounded, fp8_scores


def test_numbers_of_the_format_stay_and_others_go_to_the_nearest():
    x = torch.tensor([448.0, 1.0, 1.0625, 1.13, -0.5, 0.0])  # steps of 1/8 between 1 and 2
    assert fp8_rounded(x).tolist() == [448.0, 1.0, 1.0, 1.125, -0.5, 0.0]


def test_each_block_has_its_own_scale():
    x = torch.tensor([[448.0, 1.0, 1e-4, 2e-4]])
    assert fp8_rounded(x, block_size=2)[0, 2:].tolist() == pytest.approx([1e-4, 2e-4], rel=1e-5)
    assert fp8_rounded(x, block_size=4)[0, 2:].tolist() == [0.0, 0.0]


def test_relative_error_is_that_of_three_bits():
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(0)).double()
    error = ((fp8_rounded(x) - x).abs() / x.abs())[x.abs() > 0.05]
    assert error.max() <= 1 / 16 + 1e-6
    assert error.mean() > 0.01
    assert fp8_rounded(x).dtype == torch.float64


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 3)])
def test_nothing_and_zeros_stay(shape):
    assert torch.equal(fp8_rounded(torch.zeros(shape)), torch.zeros(shape))


def test_scores_of_exact_numbers_are_exact_and_bad_input_is_named():
    q, k, w = torch.ones(1, 2, 1, 4), torch.ones(1, 3, 4), torch.ones(1, 2, 1)
    assert (fp8_scores(q, k, w) == 4).all()
    with pytest.raises(ValueError, match="block_size=0"):
        fp8_rounded(q, 0)
    with pytest.raises(ValueError, match="int64"):
        fp8_rounded(torch.ones(2).long())
