"""Newton–Schulz against published values, the SVD, and itself computed another way."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslib.optim import newton_schulz, newton_schulz_flops, scalar_map, svd_orthogonalize
from dslib.optim.newton_schulz import JORDAN, POLAR_EXPRESS, coefficient_schedule

SHAPES = [(1, 1), (1, 7), (7, 1), (2, 3), (13, 13), (17, 5), (5, 61), (3, 4, 9), (2, 3, 11, 7)]


def matrix_with_spectrum(sigma, rows, columns, seed=0):
    """U·diag(σ)·Vᵀ in float64 with random orthogonal U, V."""
    generator = torch.Generator().manual_seed(seed)
    U = torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(columns, columns, generator=generator, dtype=torch.float64)).Q
    n = len(sigma)
    return U[:, :n] * sigma @ V[:, :n].T


def random_matrix(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("x", "expected"),
    [(1.0, 0.696436), (0.5, 0.765439), (0.1, 0.712120), (0.01, 0.698917), (0.001, 0.470544)],
)
def test_scalar_map_of_jordan_has_its_known_values(x, expected):
    assert scalar_map(torch.tensor(x, dtype=torch.float64)).item() == pytest.approx(expected, abs=1e-6)


def test_slope_at_zero_is_the_product_of_the_first_coefficients():
    tiny = torch.tensor(1e-9, dtype=torch.float64)
    assert (scalar_map(tiny) / tiny).item() == pytest.approx(484.876, abs=1e-3)


@pytest.mark.parametrize(
    ("low", "high", "band"), [(0.00519, 1.0, (0.68183, 1.13436)), (0.00315, 0.00518, (0.68, 1.20237))]
)
def test_band_of_jordan_depends_on_the_smallest_singular_value(low, high, band):
    y = scalar_map(torch.linspace(low, high, 400_001, dtype=torch.float64))
    assert y.min() >= band[0] - 1e-5
    assert y.max().item() == pytest.approx(band[1], abs=1e-4)


@pytest.mark.parametrize(("schedule", "low"), [(list(POLAR_EXPRESS), 0.876), ("polar_express", 0.846)])
def test_band_of_polar_express_with_and_without_its_safety_factor(schedule, low):
    y = scalar_map(torch.logspace(-3, 0, 100_001, dtype=torch.float64), 5, schedule)
    assert y.min().item() == pytest.approx(low, abs=1e-3)
    assert y.max().item() == pytest.approx(1.124, abs=1e-3)


@pytest.mark.parametrize("coefficients", ["jordan", "polar_express"])
def test_rank_one_gradient_does_not_explode_in_bfloat16(coefficients):
    G = random_matrix(96, 1, dtype=torch.float32) @ random_matrix(1, 96, seed=1, dtype=torch.float32)
    assert torch.linalg.matrix_norm(newton_schulz(G, coefficients=coefficients), 2) < 1.25


@pytest.mark.parametrize("method", ["plain", "gram"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 10])
def test_singular_values_follow_the_scalar_map_and_singular_vectors_stay(method, steps):
    sigma = torch.tensor([0.9, 0.4, 0.1, 0.01, 0.004], dtype=torch.float64)
    G = matrix_with_spectrum(sigma, 6, 9)
    U, _, Vh = torch.linalg.svd(G, full_matrices=False)
    expected = scalar_map(sigma / sigma.norm(), steps)
    diagonal = U.T @ newton_schulz(G, steps, method=method) @ Vh.T
    torch.testing.assert_close(diagonal[:5, :5], torch.diag(expected), rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("coefficients", ["jordan", "polar_express"])
def test_gram_equals_plain_in_float64(shape, coefficients):
    G = random_matrix(*shape)
    plain, gram = (newton_schulz(G, coefficients=coefficients, method=m) for m in ("plain", "gram"))
    torch.testing.assert_close(gram, plain, rtol=0, atol=1e-8)


@pytest.mark.parametrize("shape", [(4, 5, 8), (2, 3, 9, 4), (1, 6, 6), (0, 3, 4), (3, 0, 4)])
def test_batch_equals_its_slices(shape):
    G = random_matrix(*shape)
    flat = G.reshape(-1, *shape[-2:]) if G.numel() else G
    O = newton_schulz(G)
    assert O.shape == G.shape
    if G.numel():
        for one, many in zip(flat, O.reshape(flat.shape), strict=True):
            torch.testing.assert_close(newton_schulz(one), many, rtol=0, atol=1e-12)


@given(rows=st.integers(1, 24), columns=st.integers(1, 24), seed=st.integers(0, 99))
def test_transpose_commutes_and_the_input_is_untouched(rows, columns, seed):
    G = random_matrix(rows, columns, seed=seed)
    before = G.clone()
    torch.testing.assert_close(newton_schulz(G.mT), newton_schulz(G).mT, rtol=0, atol=1e-8)
    assert torch.equal(G, before)


@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 20),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 99),
)
def test_scale_does_not_matter_from_1e_minus_30_to_1e_30(rows, columns, exponent, seed):
    G = random_matrix(rows, columns, seed=seed, dtype=torch.float32)
    scaled = newton_schulz(G * 10.0**exponent, dtype=torch.float32)
    torch.testing.assert_close(scaled, newton_schulz(G, dtype=torch.float32), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float32, 1e-30),
        (torch.bfloat16, 1e-30),
        (torch.bfloat16, 1e30),
        (torch.float16, 6e-8),
        (torch.float16, 1e4),
    ],
)
def test_extreme_scales_of_short_dtypes_still_orthogonalise(dtype, scale):
    G = (torch.eye(5, dtype=torch.float64) * scale).to(dtype)
    O = newton_schulz(G)
    assert O.dtype == dtype
    torch.testing.assert_close(
        O.double().diagonal(), scalar_map(torch.full((5,), 5**-0.5).double()), rtol=0, atol=0.02
    )


@pytest.mark.parametrize("method", ["plain", "gram"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_zero_gives_zero_even_beside_a_nonzero_matrix(method, dtype):
    G = torch.zeros(2, 4, 6)
    G[1] = random_matrix(4, 6)
    O = newton_schulz(G, method=method, dtype=dtype)
    assert torch.equal(O[0], torch.zeros(4, 6))
    assert O[1].isfinite().all()
    assert O[1].abs().sum() > 1


def test_nan_stays_in_its_own_matrix():
    G = random_matrix(3, 4, 5)
    G[1, 2, 2] = float("nan")
    O = newton_schulz(G)
    assert O[1].isnan().any()
    assert O[0].isfinite().all()
    assert O[2].isfinite().all()


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_rank_deficient_matrices_keep_their_null_space(rank):
    G = random_matrix(9, rank) @ random_matrix(rank, 12, seed=1)
    assert torch.linalg.matrix_rank(newton_schulz(G), atol=1e-6) == rank
    assert torch.linalg.matrix_rank(svd_orthogonalize(G), atol=1e-6) == rank


@pytest.mark.parametrize("shape", [s for s in SHAPES if 0 not in s])
def test_svd_oracle_is_a_partial_isometry(shape):
    O = svd_orthogonalize(random_matrix(*shape))
    small = O @ O.mT if shape[-2] <= shape[-1] else O.mT @ O
    torch.testing.assert_close(
        small, torch.eye(min(shape[-2:])).double().expand_as(small), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("shape", [(64, 64), (48, 192), (192, 48)])
@pytest.mark.parametrize("method", ["plain", "gram"])
def test_bfloat16_error_is_that_of_the_polynomial_not_of_the_rounding(shape, method):
    G = random_matrix(*shape, dtype=torch.float32)
    exact = svd_orthogonalize(G)
    low, full = (newton_schulz(G, method=method, dtype=d) for d in (torch.bfloat16, torch.float32))
    error = lambda O: ((O - exact).norm() / exact.norm()).item()  # noqa: E731
    assert error(low) == pytest.approx(error(full), abs=0.03)
    assert ((low - full).norm() / exact.norm()).item() < 0.08


@pytest.mark.parametrize("method", ["plain", "gram"])
@pytest.mark.parametrize("shape", [(24, 24), (8, 40)])
def test_emulated_bfloat16_is_native_bfloat16_up_to_its_own_rounding(monkeypatch, method, shape):
    G = random_matrix(3, *shape, dtype=torch.float32)
    results = []
    for native in (True, False):
        monkeypatch.setitem(
            newton_schulz.__globals__, "_cpu_has_bf16_products", lambda dtype, native=native: native
        )
        results.append([newton_schulz(G, steps=n, method=method) for n in (1, 5)])
    (one, five), (emulated_one, emulated_five) = results
    torch.testing.assert_close(emulated_one, one, rtol=2**-6, atol=2**-9)
    exact = svd_orthogonalize(G)
    assert ((five - emulated_five).norm() / exact.norm()).item() < 0.08


@pytest.mark.parametrize("coefficients", ["jordan", "polar_express"])
@pytest.mark.parametrize("steps", [3, 5, 8, 10, 20])
@pytest.mark.parametrize("decades", [0, 3, 6])
def test_gram_stays_in_the_band_of_plain_in_bfloat16_however_many_steps(coefficients, steps, decades):
    """Rounding errors of the Gram matrix grow from step to step: without restarts σ reached 1e13."""
    G = random_matrix(24, 72, dtype=torch.float32) * torch.logspace(0, -decades, 72)
    largest = [
        torch.linalg.matrix_norm(newton_schulz(G, steps, coefficients, method), 2).item()
        for method in ("plain", "gram")
    ]
    assert largest[1] < max(largest[0], 1.2) + 0.05


def test_large_symmetric_products_by_blocks_equal_whole_ones(monkeypatch):
    G = random_matrix(45, 70)
    whole = {m: newton_schulz(G, method=m) for m in ("plain", "gram")}
    monkeypatch.setitem(newton_schulz.__globals__, "_SYMMETRIC_FROM", 8)
    monkeypatch.setitem(newton_schulz.__globals__, "_SYMMETRIC_BLOCK", 16)
    for method, expected in whole.items():
        torch.testing.assert_close(newton_schulz(G, method=method), expected, rtol=0, atol=1e-9)


def test_more_steps_than_triples_repeat_the_last():
    assert coefficient_schedule([(1, 2, 3), (4, 5, 6)], 4)[1:] == [(4.0, 5.0, 6.0)] * 3
    assert coefficient_schedule(JORDAN, 2) == [JORDAN, JORDAN]


def test_result_has_the_inputs_dtype_and_is_contiguous():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        O = newton_schulz(random_matrix(9, 4, dtype=dtype).requires_grad_())
        assert O.dtype == dtype
        assert O.is_contiguous()
        assert not O.requires_grad


def test_flops_are_counted_by_the_products():
    assert newton_schulz_flops((3, 5), steps=2) == 2 * (4 * 9 * 5 + 2 * 27)
    assert newton_schulz_flops((4, 5, 3), steps=1) == 4 * (4 * 9 * 5 + 2 * 27)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"steps": 0}, ValueError, "steps=0"),
        ({"steps": 2.0}, ValueError, "steps=2.0"),
        ({"coefficients": "jordon"}, ValueError, "jordon"),
        ({"coefficients": (1.0, 2.0)}, ValueError, "(1.0, 2.0)"),
        ({"coefficients": []}, ValueError, "coefficients"),
        ({"method": "fast"}, ValueError, "fast"),
        ({"dtype": torch.int8}, ValueError, "int8"),
        ({"G": torch.ones(3)}, ValueError, "(3,)"),
        ({"G": torch.ones(3, 3, dtype=torch.complex64)}, TypeError, "complex64"),
        ({"G": torch.ones(3, 3, dtype=torch.int64)}, TypeError, "int64"),
        ({"G": [[1.0]]}, TypeError, "list"),
    ],
)
def test_bad_input_is_refused_with_its_name_and_value(arguments, error, words):
    with pytest.raises(error) as caught:
        newton_schulz(**{"G": torch.ones(3, 3), **arguments})
    assert words in str(caught.value)


def test_the_last_polynomial_of_polar_express_converges_exactly():
    """It is the limit, whose fixed point is 1: divided by the safety factor it would end at 1 − 1e-2·…, not at 1."""
    G = torch.randn(12, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    errors = [
        (newton_schulz(G, steps, "polar_express") - svd_orthogonalize(G)).abs().max() for steps in (7, 12)
    ]
    assert errors[1] < 1e-14 < errors[0]


@pytest.mark.parametrize("shape", [(16, 24), (8, 64)])
def test_autocast_around_a_step_does_not_change_what_the_iteration_computes_in(shape):
    G = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    plain = newton_schulz(G, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = newton_schulz(G, dtype=torch.float32)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(plain, inside)
