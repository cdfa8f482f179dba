"""Closed forms of steepest descent against duality and against a numerical solver."""

import pytest
import torch

from dslib.optim import matrix_norm, solve_steepest_direction, steepest_direction, svd_orthogonalize

NORMS = ["frobenius", "max", "spectral", 1.5, 3, 8]


def gradient(rows=4, columns=6, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (1, 5), (3, 3)])
def test_closed_form_equals_the_numerical_maximum(norm, shape):
    G = gradient(*shape)
    D, solved = steepest_direction(G, norm), solve_steepest_direction(G, norm)
    assert matrix_norm(D, norm).item() == pytest.approx(1, abs=1e-9)
    assert matrix_norm(solved, norm).item() == pytest.approx(1, abs=1e-6)
    assert (G * solved).sum().item() == pytest.approx((G * D).sum().item(), rel=1e-5)
    torch.testing.assert_close(solved, D, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("norm", "dual"),
    [
        ("spectral", lambda G: torch.linalg.matrix_norm(G, "nuc")),
        ("frobenius", lambda G: G.norm()),
        ("max", lambda G: G.abs().sum()),
        (1.0, lambda G: torch.linalg.matrix_norm(G, 2)),
    ],
)
def test_what_is_gained_is_the_dual_norm(norm, dual):
    G = gradient(5, 3)
    assert (G * steepest_direction(G, norm)).sum().item() == pytest.approx(dual(G).item())


def test_the_family_contains_sgd_sign_descent_and_muon():
    G = gradient()
    torch.testing.assert_close(steepest_direction(G, "frobenius"), G / G.norm())
    torch.testing.assert_close(steepest_direction(G, "max"), G.sign())
    torch.testing.assert_close(steepest_direction(G, "spectral"), svd_orthogonalize(G))
    torch.testing.assert_close(steepest_direction(G, 400), svd_orthogonalize(G), rtol=0, atol=0.05)


def test_numerical_solver_reaches_the_corners_of_tiny_entries():
    G = gradient(4, 4)
    G[0] *= 1e-3
    torch.testing.assert_close(solve_steepest_direction(G, "max"), G.sign())


def test_rank_deficient_gradient_leaves_its_null_space_alone():
    G = gradient(4, 1) @ gradient(1, 6)
    assert torch.linalg.matrix_rank(steepest_direction(G, "spectral"), atol=1e-8) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: steepest_direction(torch.zeros(3, 3), 2), "zero"),
        (lambda: steepest_direction(torch.ones(3), 2), r"\(3,\)"),
        (lambda: steepest_direction(torch.ones(3, 3), "nuclear"), "nuclear"),
        (lambda: matrix_norm(torch.ones(3, 3), 0.5), "0.5"),
        (lambda: solve_steepest_direction(torch.ones(3, 3), 1.0), "p > 1"),
    ],
)
def test_bad_input_is_refused_with_its_value(call, words):
    with pytest.raises(ValueError, match=words):
        call()
