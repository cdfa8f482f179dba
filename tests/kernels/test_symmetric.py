"""The symmetric kernels against float64: on a GPU where there is one, else in the interpreter's process."""

import pytest
import torch

from dslib import kernels
from dslib.optim import newton_schulz
from dslib.optim.newton_schulz import commuting_product, gram_matrix, symmetric_polynomial

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: (batch, rows, columns): one, odd, prime, thin, wide, on and beside the edges of a tile of 16.
SHAPES = [(1, 1, 1), (2, 1, 7), (3, 5, 1), (1, 16, 32), (2, 17, 13), (1, 31, 64), (1, 53, 23)]
EMPTY = [(0, 4, 4), (2, 0, 5), (2, 3, 0), (0, 0, 0)]
B, C = -4.7750, 2.0315
#: Entries are about 1, and a sum has at most 139 of them; float32 rounds each step of it.
EXACT = {"rtol": 1e-5, "atol": 2e-5}
#: One rounding of the result. The interpreter truncates bfloat16, which is twice a rounding's error.
ROUNDED = {torch.float32: EXACT, torch.float16: {"rtol": 1e-3, "atol": 2e-3}}
ROUNDED[torch.bfloat16] = {"rtol": 2**-7, "atol": 2e-5}


@pytest.fixture
def symmetric(device):
    from dslib.kernels import symmetric

    return symmetric


@pytest.fixture
def tile(symmetric):
    """Small enough for several tiles, and for groups that do not divide their number."""
    return symmetric.Tile(16, 16, group=2, warps=1, stages=1)


def random(shape, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def symmetric_matrices(batch, rows, dtype, device, seed=0):
    X = random((batch, rows, rows), torch.float32, "cpu", seed) / max(rows, 1) ** 0.5
    return ((X + X.mT) / 2).to(dtype).to(device)


def poisoned(batch, rows, device, dtype=torch.float32):
    return torch.full((batch, rows, rows), float("nan"), dtype=dtype, device=device)


def agrees(out, expected, **tolerance):
    torch.testing.assert_close(out.double(), expected.to(out.device), **tolerance)
    assert torch.equal(out, out.mT), "the result is not symmetric to the last bit"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_xxt_is_the_float64_product_and_exactly_symmetric(symmetric, tile, device, shape, dtype):
    X = random(shape, dtype, device)
    out = poisoned(*shape[:2], device)
    assert symmetric.xxt(X, out=out, tile=tile) is out
    agrees(out, X.double() @ X.double().mT, **EXACT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_polynomial_is_the_float64_one_and_exactly_symmetric(symmetric, tile, device, shape, dtype):
    A = symmetric_matrices(*shape[:2], dtype, device)
    out = symmetric.symmetric_polynomial(A, B, C, out=poisoned(*shape[:2], device), tile=tile)
    agrees(out, B * A.double() + C * A.double() @ A.double(), **EXACT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_commuting_product_is_the_float64_one_and_exactly_symmetric(symmetric, tile, device, shape, dtype):
    S = symmetric_matrices(*shape[:2], torch.float64, device)
    P, Q = (x.to(dtype) for x in (S, S @ S))
    out = symmetric.commuting_product(P, Q, out=poisoned(*shape[:2], device), tile=tile)
    # P and Q commute up to their own rounding: the lower triangle of P·Q is what is mirrored.
    lower = (P.double() @ Q.double()).tril()
    agrees(out, lower + lower.tril(-1).mT, **EXACT)


@pytest.mark.parametrize("dtype", DTYPES)
def test_result_is_rounded_once_to_the_operands_dtype(symmetric, tile, device, dtype):
    X, A = random((1, 23, 20), dtype, device), symmetric_matrices(1, 23, dtype, device)
    out = symmetric.xxt(X, out=poisoned(1, 23, device, dtype), tile=tile)
    agrees(out, X.double() @ X.double().mT, **ROUNDED[dtype])
    polynomial = symmetric.symmetric_polynomial(A, B, C, tile=tile)
    assert polynomial.dtype == dtype
    agrees(polynomial, B * A.double() + C * A.double() @ A.double(), **ROUNDED[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tile_that_is_really_used_gives_the_same(symmetric, device, dtype):
    X = random((1, 139, 70), dtype, device)
    agrees(symmetric.xxt(X, out=poisoned(1, 139, device)), X.double() @ X.double().mT, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_every_tile_is_visited_whatever_the_group(symmetric, device, group):
    X = random((1, 16 * 6 - 5, 3), torch.float32, device)
    out = poisoned(1, X.shape[1], device)
    symmetric.xxt(X, out=out, tile=symmetric.Tile(16, 16, group=group, warps=1, stages=1))
    agrees(out, X.double() @ X.double().mT, **EXACT)


@pytest.mark.parametrize("shape", EMPTY)
def test_empty_sizes_give_empty_or_zero(symmetric, device, shape):
    out = symmetric.xxt(random(shape, torch.float32, device), out=poisoned(*shape[:2], device))
    assert torch.equal(out, torch.zeros(*shape[:2], shape[1], device=device))
    square = torch.zeros(shape[0], shape[1], shape[1], device=device)
    assert symmetric.symmetric_polynomial(square, B, C).shape == square.shape
    assert symmetric.commuting_product(square, square).shape == square.shape


VIEWS = {
    "transposed": lambda X: X.mT,
    "every other column": lambda X: X[:, :, ::2],
    "every other row": lambda X: X[:, ::2],
    "beside the start": lambda X: X[:, 1:, 3:],
    "batch in the middle": lambda X: X.transpose(0, 1),
    "one matrix for all": lambda X: X[:1].expand(4, -1, -1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strides_do_not_matter_and_the_input_stays(symmetric, tile, device, view):
    whole = random((3, 8, 24), torch.float32, device)
    before = whole.clone()
    X = VIEWS[view](whole)
    out = symmetric.xxt(X, out=poisoned(*X.shape[:2], device), tile=tile)
    agrees(out, X.double() @ X.double().mT, **EXACT)
    assert torch.equal(whole, before)


def test_out_may_be_a_window_and_nothing_beside_it_is_written(symmetric, tile, device):
    frame = torch.full((4, 40, 64), 7.0, device=device)
    X = random((2, 21, 9), torch.float32, device)
    symmetric.xxt(X, out=frame[1:3, 3:24, 5:26], tile=tile)
    agrees(frame[1:3, 3:24, 5:26], X.double() @ X.double().mT, **EXACT)
    frame[1:3, 3:24, 5:26] = 7.0
    assert torch.equal(frame, torch.full_like(frame, 7.0))


def test_offsets_past_two_to_the_31_are_no_problem(symmetric, tile, device):
    """Three matrices 2³⁰ + 48 entries apart: an int32 offset of the third would be negative."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("this GPU has less than 10 GiB free")
    apart = 2**30 + 48
    # Never filled, so the system hands out only the pages that are touched.
    store, results = (torch.empty(2 * apart + 1024, dtype=torch.float16, device=device) for _ in range(2))
    # 16 × 16, which the kernel reads and writes in place: nothing is padded.
    X = store.as_strided((3, 16, 16), (apart, 16, 1))
    X.copy_(random((3, 16, 16), torch.float16, device))
    out = results.as_strided((3, 16, 16), (apart, 16, 1))
    out.fill_(float("nan"))
    agrees(symmetric.xxt(X, out=out, tile=tile), X.double() @ X.double().mT, **ROUNDED[torch.float16])
    # Rows too far apart for the int32 offsets inside a tile are brought together first.
    rows = store.as_strided((1, 16, 16), (16, 2**24, 1))
    assert symmetric._padded(rows).stride(1) == 16
    assert symmetric._padded(X) is X


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_stay_in_their_matrix_and_are_torchs_there(symmetric, tile, device, bad):
    X = random((3, 20, 19), torch.float32, device)
    X[1, 17, 7] = bad
    out, expected = symmetric.xxt(X, out=poisoned(3, 20, device), tile=tile), X @ X.mT
    torch.testing.assert_close(out, expected, equal_nan=True, **EXACT)
    assert out[::2].isfinite().all()
    A = symmetric_matrices(3, 20, torch.float32, device)
    A[1, 17, 7] = A[1, 7, 17] = bad
    out = symmetric.symmetric_polynomial(A, B, C, tile=tile)
    torch.testing.assert_close(out, B * A + C * A @ A, equal_nan=True, **EXACT)
    assert out[::2].isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_without_a_linear_term_its_nan_are_left_out_as_in_baddbmm(symmetric, tile, device):
    A = torch.full((1, 3, 3), float("inf"), device=device)
    expected = torch.baddbmm(A, A, A, beta=0.0, alpha=2.0)
    assert torch.equal(symmetric.symmetric_polynomial(A, 0.0, 2.0, tile=tile), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_largest_float16_products_overflow_only_where_the_result_does(symmetric, tile, device):
    X = torch.full((1, 2, 4), 200.0, dtype=torch.float16, device=device)
    assert symmetric.xxt(X, tile=tile).isinf().all()  # 160 000 is past float16's 65 504
    assert (symmetric.xxt(X, out=poisoned(1, 2, device), tile=tile) == 160_000.0).all()


BAD = {
    "X is torch.float64": (TypeError, lambda s, x: s.xxt(x.double())),
    "X is list": (TypeError, lambda s, x: s.xxt([[1.0]])),
    "X has shape (8, 16)": (ValueError, lambda s, x: s.xxt(x[0])),
    "X wants a gradient": (RuntimeError, lambda s, x: s.xxt(x.clone().requires_grad_())),
    "input_precision='exact'": (ValueError, lambda s, x: s.xxt(x, input_precision="exact")),
    "out is torch.float32 (2, 8, 9)": (ValueError, lambda s, x: s.xxt(x, out=x.new_empty(2, 8, 9))),
    "out is torch.float16": (
        ValueError,
        lambda s, x: s.xxt(x, out=x.new_empty(2, 8, 8, dtype=torch.float16)),
    ),
    "out has strides (0, 8, 1)": (
        ValueError,
        lambda s, x: s.xxt(x, out=x.new_empty(1, 8, 8).expand(2, 8, 8)),
    ),
    "out shares memory with X": (ValueError, lambda s, x: s.xxt(x, out=x[:, :, :8])),
    "A has shape (2, 8, 16)": (ValueError, lambda s, x: s.symmetric_polynomial(x, B, C)),
    "P has shape (2, 8, 16)": (ValueError, lambda s, x: s.commuting_product(x, x)),
    "Q is torch.float32 (1, 8, 8)": (
        ValueError,
        lambda s, x: s.commuting_product(x[:, :, :8], x[:1, :, :8]),
    ),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_refused_with_its_name_and_value(symmetric, device, words):
    error, call = BAD[words]
    with pytest.raises(error) as caught:
        call(symmetric, torch.ones(2, 8, 16, device=device))
    assert words in str(caught.value)


def test_the_librarys_products_take_the_kernel_that_was_chosen(symmetric, device):
    """Against float64 on torch, and told apart from torch by the exact symmetry of P·Q."""
    X = random((2, 20, 33), torch.float32, device)
    S = symmetric_matrices(2, 20, torch.float32, device)
    T = (S @ S + 0.1 * symmetric_matrices(2, 20, torch.float32, device, seed=1)).contiguous()
    T = (T + T.mT) / 2
    with kernels.use("triton"):
        results = gram_matrix(X), commuting_product(S, S @ S), symmetric_polynomial(S, B, C)
        mirrored = commuting_product(S, T)
    with kernels.use("torch"):
        for result, again in zip(
            results, (gram_matrix(X), commuting_product(S, S @ S), symmetric_polynomial(S, B, C)), strict=True
        ):
            torch.testing.assert_close(result, again, rtol=1e-4, atol=1e-4)
        assert not torch.equal(commuting_product(S, T), commuting_product(S, T).mT)
    assert torch.equal(mirrored, mirrored.mT)


@pytest.mark.parametrize("method", ["plain", "gram"])
@pytest.mark.parametrize("shape", [(1, 1), (23, 23), (61, 13), (2, 1, 11, 40)])
def test_newton_schulz_on_the_kernels_equals_newton_schulz_on_torch(device, shape, method):
    G = random(shape, torch.float32, device)
    before = G.clone()
    with kernels.use("triton"):
        ours = newton_schulz(G, method=method, dtype=torch.float32)
    with kernels.use("torch"):
        exact = newton_schulz(G.double(), method=method)
    assert (ours.shape, ours.dtype, ours.device) == (G.shape, G.dtype, G.device)
    assert ours.is_contiguous()
    assert torch.equal(G, before)
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-3)


@pytest.mark.parametrize("method", ["plain", "gram"])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("shape", [(48, 48), (24, 96)])
def test_bfloat16_iteration_on_the_kernels_stays_within_its_rounding(
    device, monkeypatch, shape, method, native
):
    """Both ways of a CPU: float32 operands that were rounded to bfloat16, and bfloat16 operands. On a GPU
    they are one."""
    monkeypatch.setitem(newton_schulz.__globals__, "_cpu_has_bf16_products", lambda dtype: native)
    G = random(shape, torch.float32, device)
    exact = newton_schulz(G.double(), method=method)
    errors = {}
    for choice in ("triton", "torch"):
        with kernels.use(choice):
            found = newton_schulz(G, method=method)
        errors[choice] = ((found - exact).norm() / exact.norm()).item()
    # bfloat16 costs torch a few hundredths; truncation, in the interpreter, twice that.
    assert 0 < errors["triton"] < max(2.5 * errors["torch"], 0.05)


def test_float64_stays_on_torch_whatever_was_chosen(device):
    G = random((9, 14), torch.float64, device)
    with kernels.use("triton"):
        chosen = newton_schulz(G)
    assert torch.equal(chosen, newton_schulz(G))
