"""Samples beside exact rates: a file keeps them, counts of other rates are found out, intervals fit chance."""

import numpy as np
import pytest
import torch

from dslib.experiments.rlvr_samples import check_counts, sampling_interval, through_file
from dslib.rl.rollout import Rollout


def test_a_file_gives_back_a_rollout_and_its_columns():
    tokens, mask = torch.arange(12).view(3, 4), torch.tensor([[True, True], [True, False], [True, True]])
    logp = torch.where(mask, -torch.rand(3, 2), 0)
    rollout = Rollout(tokens, 2, mask, logp, torch.zeros(3, 2))
    again, columns = through_file(rollout, problem=torch.tensor([0, 0, 1]))
    assert torch.equal(again.mask, mask)
    assert torch.equal(again.logp, logp)
    assert torch.equal(again.completions[mask], rollout.completions[mask])
    assert columns["problem"].tolist() == [0, 0, 1]


def test_counts_of_other_rates_are_refused():
    check_counts([50, 52], [0.5, 0.5], 100)
    with pytest.raises(ValueError, match=r"counts has 160 right samples where the rates say 100\.0 ± 7\.1"):
        check_counts([80, 80], [0.5, 0.5], 100)


def test_interval_of_one_attempt_is_that_of_a_mean_and_of_sure_problems_has_no_width():
    low, high = sampling_interval(np.full(25, 0.5), 16, [1], repeats=4000)
    width = 1.96 * 0.5 / 20
    assert (low[0], high[0]) == (pytest.approx(0.5 - width, abs=0.006), pytest.approx(0.5 + width, abs=0.006))
    low, high = sampling_interval([0.0, 1.0], 8, [1, 4])
    assert low.tolist() == high.tolist() == [0.5, 0.5]
