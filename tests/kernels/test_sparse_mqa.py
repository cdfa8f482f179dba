"""The kernels of sparse multi-query attention against a masked softmax in float64, results and gradients."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("poisoned_memory")

#: Entries are about 1; float32 rounds each step of sums of at most 41 terms, float16 the weights and the result.
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 3e-5}, torch.float16: {"rtol": 6e-3, "atol": 1e-2}}
#: (batch, heads, queries, keys, slots, dim, value_dim)
CASES = {
    "one position": (1, 1, 1, 1, 1, 16, 16),
    "value and rest": (2, 4, 5, 13, 6, 24, 16),
    "several tiles of keys, prime": (1, 3, 3, 41, 37, 16, 16),
    "more heads than a tile": (1, 19, 2, 11, 5, 17, 16),
    "more slots than keys": (1, 2, 6, 6, 11, 16, 16),
    "chunk behind a cache": (1, 2, 3, 23, 8, 16, 16),
    "small rotary size": (1, 2, 2, 9, 5, 96, 64),
    "odd dims": (1, 2, 3, 7, 4, 7, 3),
    "one number": (1, 1, 2, 3, 2, 1, 1),
}


@pytest.fixture
def sparse(device):
    from dslib.kernels import sparse_mqa

    return sparse_mqa


@pytest.fixture
def tile(sparse):
    return sparse.Tile(16, 16, warps=1)


def random(case, dtype, device, seed=0):
    """q, kv and per query distinct indices up to its own position in any order, with −1 anywhere among them; the
    first query of several has none."""
    batch, heads, queries, keys, slots, dim, _ = case
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, queries, dim), (batch, keys, dim)
    q, kv = (torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype).to(device) for s in shapes)
    indices = torch.rand(batch, queries, keys + slots, generator=generator).argsort(-1)[..., :slots]
    position = torch.arange(keys - queries, keys)[:, None]
    indices = torch.where(indices <= position, indices, -1)
    if queries > 1:
        indices[:, 0] = -1
        indices[:, -1, 0] = -1
    return q, kv, indices.to(device)


def dense(masked_dense, indices, value_dim, scale=None):
    def attend(q, kv):
        mask = torch.zeros(*indices.shape[:2], kv.shape[1] + 1, dtype=torch.bool, device=q.device)
        mask.scatter_(-1, torch.where(indices < 0, kv.shape[1], indices), True)
        kv = kv[:, None]
        return masked_dense(q, kv, kv[..., :value_dim], mask[:, None, :, :-1], scale)

    return attend


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES] + [("value and rest", torch.float16)],
    ids=str,
)
def test_result_and_gradients_are_the_masked_softmaxs(
    sparse, tile, device, masked_dense, agrees_with_gradients, case, dtype
):
    case = CASES[case]
    *tensors, indices = random(case, dtype, device)
    out = agrees_with_gradients(
        lambda q, kv: sparse.sparse_mqa(q, kv, indices, case[-1], tile=tile),
        dense(masked_dense, indices, case[-1]),
        tensors,
        **TOLERANCE[dtype],
    )
    if case[2] > 1:
        assert (out[:, :, 0] == 0).all()


@pytest.mark.parametrize("case", [(1, 4, 2, 11, 7, 576, 512), (1, 3, 4, 19, 40, 40, 24)], ids=str)
def test_the_tiles_that_are_really_used_give_the_same(
    sparse, device, masked_dense, agrees_with_gradients, case
):
    *tensors, indices = random(case, torch.float32, device)
    agrees_with_gradients(
        lambda q, kv: sparse.sparse_mqa(q, kv, indices.int(), case[-1], scale=-0.05),
        dense(masked_dense, indices, case[-1], scale=-0.05),
        tensors,
        **TOLERANCE[torch.float32],
    )


def test_lse_is_the_log_of_the_weights_sum_and_inf_without_a_key(sparse, tile, device):
    q, kv, indices = random((2, 2, 4, 9, 6, 16, 8), torch.float32, device)
    out, lse = sparse.sparse_mqa(q.requires_grad_(), kv, indices, 8, return_lse=True, tile=tile)
    assert not lse.requires_grad
    for b, t in [(0, 0), (0, 2), (1, 3)]:
        chosen = indices[b, t][indices[b, t] >= 0]
        scores = q[b, :, t].double() @ kv[b, chosen].double().T / 4
        exact = scores.logsumexp(-1) if len(chosen) else torch.full((2,), torch.inf).to(scores)
        torch.testing.assert_close(lse[b, :, t].double(), exact, rtol=1e-5, atol=1e-5)
    assert out.isfinite().all()


def test_gradients_of_an_empty_row_are_zero_and_of_unchosen_entries_too(sparse, tile, device):
    q, kv, _ = random((1, 2, 3, 8, 4, 16, 16), torch.float32, device)
    indices = torch.tensor(
        [[[-1, -1, -1], [-1, 5, -1], [2, 5, 8]]], device=device
    )  # 8 is past the last entry
    q, kv = q.requires_grad_(), kv.requires_grad_()
    sparse.sparse_mqa(q, kv, indices, 16, tile=tile).square().sum().backward()
    assert (q.grad[:, :, 0] == 0).all()
    assert (q.grad[:, :, 1].abs() < 1e-5).all()  # one key has weight 1 whatever the query
    touched = (kv.grad != 0).any(-1)[0].tolist()
    assert touched == [n in (2, 5) for n in range(8)]


def test_an_entry_named_twice_counts_twice(sparse, tile, device):
    q, kv, _ = random((1, 1, 1, 4, 4, 16, 16), torch.float32, device)
    twice = sparse.sparse_mqa(q, kv, torch.tensor([[[1, 2, 1]]], device=device), 16, tile=tile)
    apart = sparse.sparse_mqa(q, kv[:, [1, 2, 1]], torch.tensor([[[0, 1, 2]]], device=device), 16, tile=tile)
    assert torch.equal(twice, apart)


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "slots"), [(0, 3, 3, 2), (2, 0, 5, 2), (1, 3, 4, 0), (1, 2, 0, 2)]
)
def test_empty_sizes_give_empty_or_zero_results_and_zero_gradients(
    sparse, device, batch, queries, keys, slots
):
    q, kv, _ = random((batch, 2, queries, max(keys, queries), 1, 6, 4), torch.float32, device)
    q, kv = q.requires_grad_(), kv[:, :keys].detach().requires_grad_()
    indices = torch.zeros(batch, queries, slots, dtype=torch.int64, device=device)
    out = sparse.sparse_mqa(q, kv, indices, 4)
    assert torch.equal(out, torch.zeros(batch, 2, queries, 4, device=device))
    out.sum().backward()
    for x in (q, kv):
        assert torch.equal(x.grad, torch.zeros_like(x))


def test_strides_do_not_matter(sparse, tile, device):
    *plain, indices = random((2, 2, 3, 5, 3, 24, 16), torch.float32, device)
    layouts = (
        lambda q, kv: (q, kv),
        lambda q, kv: (q.transpose(1, 2).contiguous().transpose(1, 2), torch.cat([kv, kv], -1)[..., :24]),
    )
    results = []
    for layout in layouts:
        tensors = [x.detach().requires_grad_() for x in layout(*plain)]
        out = sparse.sparse_mqa(*tensors, indices.mT.contiguous().mT, 16, tile=tile)
        results.append([out, *torch.autograd.grad(out.sum(), tensors)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)  # atomics add in any order


BAD = {
    "q is torch.float64": (TypeError, lambda f, q, kv, i: f(q.double(), kv, i, 4)),
    "kv has shape (1, 5, 7), (B, S, D); D is 8": (ValueError, lambda f, q, kv, i: f(q, kv[..., 1:], i, 4)),
    "kv has shape (2, 5, 8), (B, S, D); B is 1": (
        ValueError,
        lambda f, q, kv, i: f(q, kv.expand(2, 5, 8), i, 4),
    ),
    "kv is torch.float16": (ValueError, lambda f, q, kv, i: f(q, kv.half(), i, 4)),
    "indices is torch.float32": (TypeError, lambda f, q, kv, i: f(q, kv, i.float(), 4)),
    "indices has shape (1, 2, 2)": (ValueError, lambda f, q, kv, i: f(q, kv, i[:, 1:], 4)),
    "value_dim=0 is below 1": (ValueError, lambda f, q, kv, i: f(q, kv, i, 0)),
    "value_dim=9 of D = 8": (ValueError, lambda f, q, kv, i: f(q, kv, i, 9)),
    "up to 256 beside them": (
        ValueError,
        lambda f, q, kv, i: f(q[..., :1].expand(1, 2, 3, 300), kv[..., :1].expand(1, 5, 300), i, 4),
    ),
    "scale=nan is not finite": (ValueError, lambda f, q, kv, i: f(q, kv, i, 4, scale=float("nan"))),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_refused_with_its_name_and_value(sparse, device, words):
    error, call = BAD[words]
    q, kv = torch.ones(1, 2, 3, 8, device=device), torch.ones(1, 5, 8, device=device)
    with pytest.raises(error) as caught:
        call(sparse.sparse_mqa, q, kv, torch.zeros(1, 3, 2, dtype=torch.int64, device=device))
    assert words in str(caught.value)


def test_library_takes_the_kernel_where_it_is_chosen(device):
    from dslib import attention, kernels

    generator = torch.Generator().manual_seed(3)
    q, kv = (torch.randn(*shape, generator=generator).to(device) for shape in ((1, 4, 9, 24), (1, 9, 24)))
    kv.requires_grad_()
    indices = attention.select_topk(torch.randn(1, 9, 9, generator=generator), 3).to(device)
    with kernels.use("torch"):
        expected = attention.sparse_attention(q, kv, indices, 16)
    with kernels.use("triton"):
        found = attention.sparse_attention(q, kv, indices, 16)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert "SparseMQA" in type(found.grad_fn).__name__
