"""Lemma 1 and the learning-rate factors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslib.optim import (
    Muon,
    UpdateMeter,
    adjusted_lr_factor,
    newton_schulz,
    svd_orthogonalize,
    theoretical_update_rms,
    update_rms,
)


@given(rows=st.integers(1, 20), columns=st.integers(1, 20), data=st.data())
def test_lemma_1_holds_for_every_shape_and_rank(rows, columns, data):
    rank = data.draw(st.integers(1, min(rows, columns)))
    generator = torch.Generator().manual_seed(rank)
    left = torch.randn(rows, rank, generator=generator, dtype=torch.float64)
    right = torch.randn(rank, columns, generator=generator, dtype=torch.float64)
    realised = update_rms(svd_orthogonalize(left @ right)).item()
    assert realised == pytest.approx(theoretical_update_rms((rows, columns), rank), rel=1e-6)


@pytest.mark.parametrize(
    ("shape", "expected"), [((4096, 1024), 12.8), ((1024, 1024), 6.4), ((1024, 4096), 12.8)]
)
def test_factor_of_match_rms_adamw_has_its_known_values(shape, expected):
    assert adjusted_lr_factor(shape, "match_rms_adamw") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("original", 2.0), ("spectral", 2.0), ("baseline", 0.2 * 8), ("match_rms_adamw", 0.2 * 16), (None, 1.0)],
)
def test_each_mode_is_the_formula_it_names(mode, expected):
    assert adjusted_lr_factor((256, 64), mode) == pytest.approx(expected)


def test_wide_matrices_tell_original_from_spectral_and_convolutions_are_flattened():
    assert adjusted_lr_factor((64, 256), "original") == 1.0
    assert adjusted_lr_factor((64, 256), "spectral") == pytest.approx(0.5)
    assert adjusted_lr_factor((8, 3, 4, 4), "match_rms_adamw") == pytest.approx(0.2 * math.sqrt(48))
    assert adjusted_lr_factor((64, 256), "baseline", hidden_size=100) == pytest.approx(2.0)


def test_matched_rms_is_0_2_for_a_full_rank_update_of_any_shape():
    for shape in [(3, 3), (5, 40), (40, 5)]:
        rms = theoretical_update_rms(shape) * adjusted_lr_factor(shape, "match_rms_adamw")
        assert rms == pytest.approx(0.2)


def test_rms_of_short_dtypes_does_not_overflow():
    assert update_rms(torch.full((10,), 6e4, dtype=torch.float16)).item() == pytest.approx(6e4, rel=1e-3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: adjusted_lr_factor((4, 4), "update_norm"), "update_norm"),
        (lambda: adjusted_lr_factor((4, 4), "muon"), "'muon'"),
        (lambda: adjusted_lr_factor((4,), None), r"\(4,\)"),
        (lambda: theoretical_update_rms((4, 0)), r"\(4, 0\)"),
        (lambda: theoretical_update_rms((4, 6), 5), "rank=5"),
        (lambda: update_rms(torch.empty(0, 3)), r"\(0, 3\)"),
        (lambda: Muon([torch.nn.Parameter(torch.eye(2))], lr=0.1, target_rms=0.0), "target_rms=0.0"),
        (lambda: Muon([torch.nn.Parameter(torch.eye(2))], lr=0.1, target_rms=math.nan), "target_rms=nan"),
        (lambda: UpdateMeter(torch.optim.SGD([torch.nn.Parameter(torch.eye(2))]), []), "named_parameters"),
    ],
)
def test_bad_input_is_refused_with_its_value(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def _parameter(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    parameter = torch.nn.Parameter(torch.randn(shape, generator=generator))
    parameter.grad = torch.randn(shape, generator=generator)
    return parameter


@pytest.mark.parametrize("decay", [0.0, 10.0])
def test_meter_sees_the_update_and_not_the_decay(decay):
    p = _parameter(5, 9)
    optimizer = Muon([p], lr=0.01, weight_decay=decay, momentum=0.0, nesterov=False)
    with UpdateMeter(optimizer, [("p", p)]) as meter:
        optimizer.step()
    expected = update_rms(0.2 * 3 * newton_schulz(p.grad)).item()
    assert meter.records == [{"p": pytest.approx(expected, rel=1e-4)}]


def test_first_update_of_adamw_is_a_sign():
    p = _parameter(6, 4)
    optimizer = torch.optim.AdamW([p], lr=0.01, weight_decay=0.5)
    with UpdateMeter(optimizer, [("p", p)]) as meter:
        optimizer.step()
    assert meter.records[0]["p"] == pytest.approx(1.0, rel=1e-3)


def test_meter_follows_the_learning_rate_skips_missing_gradients_and_stops_when_removed():
    p, frozen = _parameter(4, 4), _parameter(3, 3)
    frozen.grad = None
    optimizer = torch.optim.SGD([p, frozen], lr=0.5)
    meter = UpdateMeter(optimizer, [("p", p), ("frozen", frozen)])
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    meter.remove()
    optimizer.step()
    assert meter.records == [{"p": pytest.approx(update_rms(p.grad).item(), rel=1e-5)}, {}]


def test_split_weights_are_metered_block_by_block():
    fused = _parameter(9, 4)
    optimizer = Muon([{"params": [fused], "split_sizes": (3, 6)}], lr=0.1, adjust_lr="update_norm")
    with UpdateMeter(optimizer, [("qk", fused)]) as meter:
        optimizer.step()
    assert meter.records == [{"qk[0]": pytest.approx(0.2, rel=1e-4), "qk[1]": pytest.approx(0.2, rel=1e-4)}]


@pytest.mark.parametrize("mode", ["match_rms_adamw", "baseline", "update_norm"])
def test_target_rms_scales_every_mode_that_matches_adamw(mode):
    def moved(target):
        p = _parameter(8, 3)
        before = p.detach().clone()
        Muon([p], lr=0.1, weight_decay=0.0, adjust_lr=mode, target_rms=target).step()
        return p.detach() - before

    torch.testing.assert_close(moved(0.8), 4 * moved(0.2), rtol=1e-4, atol=1e-6)
