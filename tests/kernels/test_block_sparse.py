"""The block-sparse kernels against a masked softmax in float64, results and gradients."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("poisoned_memory")

#: Entries are about 1; float32 rounds each step of sums of at most 47 terms, float16 the weights and the result.
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 2e-5}, torch.float16: {"rtol": 4e-3, "atol": 6e-3}}
#: (batch, heads, groups, kv_heads, queries, keys, dim, value_dim, slots, block_size)
CASES = {
    "one position": (1, 1, 1, 1, 1, 1, 16, 16, 1, 1),
    "group shares its blocks (NSA)": (1, 4, 2, 2, 5, 11, 16, 16, 3, 4),
    "each head its own (MoBA)": (1, 2, 2, 2, 7, 7, 16, 16, 2, 3),
    "more groups than kv heads": (1, 4, 4, 2, 3, 7, 16, 16, 2, 3),
    "blocks of several tiles": (1, 2, 1, 1, 3, 41, 16, 16, 1, 37),
    "chunk behind a cache": (2, 2, 1, 1, 3, 23, 16, 16, 3, 8),
    "decoding one token": (2, 2, 1, 1, 1, 29, 16, 16, 2, 8),
    "more heads than a tile has rows": (1, 19, 1, 1, 3, 17, 16, 16, 2, 8),
    "one block has all": (1, 2, 1, 1, 6, 6, 5, 3, 1, 100),
    "more slots than blocks": (1, 1, 1, 1, 5, 5, 16, 16, 7, 2),
}


@pytest.fixture
def sparse(device):
    from dslib.kernels import block_sparse

    return block_sparse


@pytest.fixture
def tile(sparse):
    return sparse.Tile(16, 16, warps=1, stages=1)


def random(case, dtype, device, seed=0):
    """q, k, v, and per query distinct blocks in any order, leading, middle and trailing −1 among them, a block
    of the future now and then, and the first query of each group without any."""
    batch, heads, groups, kv_heads, queries, keys, dim, value_dim, slots, block_size = case
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, value_dim)
    q, k, v = (torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype).to(device) for s in shapes)
    numbers = -(-keys // block_size)
    blocks = torch.rand(batch, groups, queries, numbers + slots, generator=generator).argsort(-1)[..., :slots]
    blocks = torch.where(blocks < numbers, blocks, -1)
    if queries > 1:
        blocks[:, :, 0] = -1
    return q, k, v, blocks.to(device)


def block_mask(blocks, heads, keys, block_size):
    """(B, H, T, S), one entry at a time."""
    batch, groups, queries, _ = blocks.shape
    mask = torch.zeros(batch, groups, queries, keys, dtype=torch.bool)
    for b, g, t in torch.cartesian_prod(*map(torch.arange, (batch, groups, queries))).tolist():
        for block in blocks[b, g, t].tolist():
            last = min((block + 1) * block_size, keys - queries + t + 1)
            if block >= 0:
                mask[b, g, t, block * block_size : max(last, 0)] = True
    return mask.repeat_interleave(heads // groups, dim=1).to(blocks.device)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES] + [("more groups than kv heads", torch.float16)],
    ids=str,
)
def test_result_and_gradients_are_the_masked_softmaxs(
    sparse, tile, device, masked_dense, agrees_with_gradients, case, dtype
):
    case = CASES[case]
    heads, keys, block_size = case[1], case[5], case[9]
    *tensors, blocks = random(case, dtype, device)
    mask = block_mask(blocks, heads, keys, block_size)
    out = agrees_with_gradients(
        lambda q, k, v: sparse.block_sparse(q, k, v, blocks, block_size, tile=tile),
        lambda q, k, v: masked_dense(q, k, v, mask),
        tensors,
        **TOLERANCE[dtype],
    )
    if case[4] > 1:
        assert (out[:, :, 0] == 0).all()


def test_the_tiles_that_are_really_used_give_the_same(sparse, device, masked_dense, agrees_with_gradients):
    case = (1, 4, 2, 1, 3, 39, 20, 24, 2, 16)
    *tensors, blocks = random(case, torch.float32, device)
    mask = block_mask(blocks, 4, 39, 16)
    agrees_with_gradients(
        lambda q, k, v: sparse.block_sparse(q, k, v, blocks.int(), 16, scale=-0.3),
        lambda q, k, v: masked_dense(q, k, v, mask, scale=-0.3),
        tensors,
        **TOLERANCE[torch.float32],
    )


def test_all_blocks_are_plain_causal_attention(sparse, tile, device):
    q, k, v, _ = random((1, 2, 1, 1, 7, 7, 16, 16, 4, 2), torch.float32, device)
    blocks = torch.arange(4, device=device).expand(1, 1, 7, 4)
    out = sparse.block_sparse(q, k, v, blocks, 2, tile=tile)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=2e-5)


def test_order_and_empty_slots_do_not_matter_and_numbers_past_the_end_are_empty(sparse, tile, device):
    q, k, v, _ = random((1, 1, 1, 1, 3, 9, 16, 16, 2, 4), torch.float32, device)
    results = []
    for row in ([2, 0, -1, -1], [-1, 0, -1, 2], [0, 2, 3, 1000]):
        tensors = [x.detach().requires_grad_() for x in (q, k, v)]
        blocks = torch.tensor(row, device=device).expand(1, 1, 3, 4)
        out = sparse.block_sparse(*tensors, blocks, 4, tile=tile)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "slots"), [(0, 3, 3, 2), (2, 0, 0, 2), (2, 0, 5, 2), (1, 3, 4, 0)]
)
def test_empty_sizes_give_empty_or_zero_results_and_zero_gradients(
    sparse, device, batch, queries, keys, slots
):
    q, k, v, _ = random((batch, 2, 1, 1, queries, keys, 4, 6, 1, 2), torch.float32, device)
    blocks = torch.zeros(batch, 1, queries, slots, dtype=torch.int64, device=device)
    tensors = [x.requires_grad_() for x in (q, k, v)]
    out = sparse.block_sparse(*tensors, blocks, 2)
    assert torch.equal(out.isnan(), torch.zeros(batch, 2, queries, 6, dtype=torch.bool, device=device))
    out.sum().backward()
    if not slots:
        assert (out == 0).all()
    for x in tensors:
        assert torch.equal(x.grad, torch.zeros_like(x))


def test_strides_do_not_matter(sparse, tile, device):
    """(batch, time, heads, dim) in memory, and one row of blocks for all queries."""
    *plain, _ = random((2, 2, 1, 1, 2, 6, 16, 16, 2, 4), torch.float32, device)
    shared = torch.tensor([1, 0], device=device).expand(2, 1, 2, 2)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]
    results = []
    for tensors, blocks in ((plain, shared.contiguous()), (views, shared)):
        tensors = [x.detach().requires_grad_() for x in tensors]
        out = sparse.block_sparse(*tensors, blocks, 4, tile=tile)
        results.append([out, *torch.autograd.grad(out.sum(), tensors)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_queries_are_listed_under_each_block_they_chose(sparse, device):
    blocks = torch.tensor([[[[0, 2], [-1, 0], [2, 9]], [[1, -1], [1, 0], [-1, -1]]]], device=device)
    order, bounds = sparse.queries_by_block(blocks, 3)
    lists = [order[i:j].tolist() for i, j in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
    assert lists == [[0, 3], [], [1, 4], [9], [6, 8], []]


BAD = {
    "q is torch.float64": (TypeError, lambda f, q, k, b: f(q.double(), k, k, b, 2)),
    "blocks is torch.float32": (TypeError, lambda f, q, k, b: f(q, k, k, b.float(), 2)),
    "blocks is list": (TypeError, lambda f, q, k, b: f(q, k, k, [0], 2)),
    "blocks has shape (1, 1, 5, 2)": (ValueError, lambda f, q, k, b: f(q, k, k, b[:, :, 1:], 2)),
    "(B = 1, G, T = 6, n)": (ValueError, lambda f, q, k, b: f(q, k, k, b[0], 2)),
    "G = 3 groups; G must divide H = 2": (ValueError, lambda f, q, k, b: f(q, k, k, b.expand(1, 3, 6, 2), 2)),
    "be a multiple of Hkv = 2": (ValueError, lambda f, q, k, b: f(q, q, q, b, 2)),
    "T = 6 and k S = 4": (ValueError, lambda f, q, k, b: f(q, k[:, :, :4], k[:, :, :4], b, 2)),
    "block_size=0 is below 1": (ValueError, lambda f, q, k, b: f(q, k, k, b, 0)),
    "E is 257": (ValueError, lambda f, q, k, b: f(q, k, k[..., :1].expand(1, 1, 6, 257), b, 2)),
    "scale=inf is not finite": (ValueError, lambda f, q, k, b: f(q, k, k, b, 2, scale=float("inf"))),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_refused_with_its_name_and_value(sparse, device, words):
    error, call = BAD[words]
    q, k = torch.ones(1, 2, 6, 8, device=device), torch.ones(1, 1, 6, 8, device=device)
    with pytest.raises(error) as caught:
        call(sparse.block_sparse, q, k, torch.zeros(1, 1, 6, 2, dtype=torch.int64, device=device))
    assert words in str(caught.value)


def test_library_takes_the_kernel_where_it_is_chosen(device):
    from dslib import attention, kernels

    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, h, 13, 8, generator=generator).to(device) for h in (4, 2, 2))
    k.requires_grad_()
    blocks = torch.tensor([0, 2]).expand(1, 2, 13, 2).to(device)
    with kernels.use("torch"):
        expected = attention.block_sparse_attention(q, k, v, blocks, 4)
    with kernels.use("triton"):
        found = attention.block_sparse_attention(q, k, v, blocks, 4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert "BlockSparse" in type(found.grad_fn).__name__
