"""The window's kernels against a masked softmax in float64, results and gradients."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("poisoned_memory")

#: Entries are about 1; float32 rounds each step of sums of at most 47 terms, float16 the weights and the result.
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 2e-5}, torch.float16: {"rtol": 4e-3, "atol": 6e-3}}
#: (batch, heads, kv_heads, queries, keys, dim, value_dim, window)
CASES = {
    "one position": (1, 1, 1, 1, 1, 16, 16, 1),
    "own key alone": (1, 1, 1, 19, 19, 8, 8, 1),
    "two keys, prime length": (2, 1, 1, 17, 17, 16, 16, 2),
    "several tiles, prime length and window": (1, 2, 1, 37, 37, 16, 16, 19),
    "window beyond the sequence": (1, 4, 2, 13, 13, 16, 16, 1000),
    "window as long as the sequence": (1, 1, 1, 32, 32, 16, 16, 32),
    "chunk behind a cache": (1, 2, 1, 19, 47, 16, 16, 20),
    "decoding one token": (2, 2, 1, 1, 35, 16, 16, 17),
    "odd dims": (1, 3, 1, 11, 11, 5, 33, 7),
    "one entry": (1, 1, 1, 5, 7, 1, 1, 3),
}


@pytest.fixture
def sliding(device):
    from dslib.kernels import sliding_window

    return sliding_window


@pytest.fixture
def tile(sliding):
    """Small enough for several tiles both ways, some of them with no key in sight for some queries."""
    return sliding.Tile(16, 16, warps=1, stages=1)


def random(case, dtype, device, seed=0):
    batch, heads, kv_heads, queries, keys, dim, value_dim, _ = case
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, value_dim)
    return [torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype).to(device) for s in shapes]


def window_mask(queries, keys, window, device):
    position = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    return (key <= position) & (key > position - window)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES]
    + [(case, torch.float16) for case in ("chunk behind a cache", "odd dims")],
    ids=str,
)
def test_result_and_gradients_are_the_masked_softmaxs(
    sliding, tile, device, masked_dense, agrees_with_gradients, case, dtype
):
    case = CASES[case]
    mask = window_mask(case[3], case[4], case[7], device)
    agrees_with_gradients(
        lambda q, k, v: sliding.sliding_window(q, k, v, case[7], tile=tile),
        lambda q, k, v: masked_dense(q, k, v, mask),
        random(case, dtype, device),
        **TOLERANCE[dtype],
    )


@pytest.mark.parametrize("queries", ["all", "last"])
def test_the_tile_that_is_really_used_gives_the_same(
    sliding, device, masked_dense, agrees_with_gradients, queries
):
    case = (1, 2, 1, 47 if queries == "all" else 3, 47, 20, 24, 29)
    mask = window_mask(case[3], case[4], case[7], device)
    agrees_with_gradients(
        lambda q, k, v: sliding.sliding_window(q, k, v, case[7], scale=-0.3),
        lambda q, k, v: masked_dense(q, k, v, mask, scale=-0.3),
        random(case, torch.float32, device),
        **TOLERANCE[torch.float32],
    )


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 3), (2, 0, 0), (2, 0, 5)])
def test_empty_sizes_give_empty_results_and_zero_gradients(sliding, device, batch, queries, keys):
    q, k, v = (
        x.requires_grad_() for x in random((batch, 2, 1, queries, keys, 4, 6, 0), torch.float32, device)
    )
    out = sliding.sliding_window(q, k, v, 3)
    assert out.shape == (batch, 2, queries, 6)
    out.sum().backward()
    for x in (q, k, v):
        assert torch.equal(x.grad, torch.zeros_like(x))


def test_strides_do_not_matter_and_the_inputs_stay(sliding, tile, device):
    """(batch, time, heads, dim) in memory, as projections leave it, and a gradient that is one number."""
    case = (2, 2, 1, 9, 9, 16, 16, 5)
    plain = random(case, torch.float32, device)
    before = [x.clone() for x in plain]
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]
    views[1] = torch.stack([views[1], views[1]], -1)[..., 0]  # every other entry
    results = []
    for tensors in (plain, views):
        tensors = [x.detach().requires_grad_() for x in tensors]
        out = sliding.sliding_window(*tensors, 5, tile=tile)
        out.sum().backward()
        results.append([out, *(x.grad for x in tensors)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    for x, again in zip(plain, before, strict=True):
        assert torch.equal(x, again)


def test_only_the_last_window_keys_are_seen(sliding, tile, device):
    """The key that has just left the window changes nothing, to the last bit; the oldest inside it does."""
    q, k, v = random((1, 1, 1, 40, 40, 16, 16, 0), torch.float32, device)
    before = sliding.sliding_window(q, k, v, 6, tile=tile)
    k[:, :, 20], v[:, :, 20] = 5.0, -7.0
    same = (sliding.sliding_window(q, k, v, 6, tile=tile) == before).all(-1)[0, 0]
    assert same.tolist() == [not 20 <= t < 26 for t in range(40)]


def test_gradients_only_where_they_are_wanted(sliding, tile, device):
    q, k, v = random((1, 1, 1, 9, 9, 16, 16, 0), torch.float32, device)
    sliding.sliding_window(q.requires_grad_(), k, v, 4, tile=tile).sum().backward()
    assert q.grad.isfinite().all()
    assert k.grad is None
    assert not sliding.sliding_window(q.detach(), k, v, 4, tile=tile).requires_grad


def test_offsets_past_two_to_the_31_are_no_problem(sliding, tile, device):
    """Heads 2³⁰ + 48 entries apart, of which the third begins past an int32."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("this GPU has less than 10 GiB free")
    apart = 2**30 + 48
    torch.utils.deterministic.fill_uninitialized_memory = False  # only the pages that are touched exist
    try:
        store = torch.empty(2 * apart + 4096, dtype=torch.float16, device=device)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    near = random((1, 3, 3, 16, 16, 16, 16, 0), torch.float16, device)
    far = [store.as_strided((1, 3, 16, 16), (3 * apart, apart, 16, 1), 256 * n) for n in range(3)]
    for x, y in zip(far, near, strict=True):
        x.copy_(y)
    assert torch.equal(
        sliding.sliding_window(*far, 5, tile=tile), sliding.sliding_window(*near, 5, tile=tile)
    )


BAD = {
    "q is torch.float64": (TypeError, lambda f, q, k: f(q.double(), k, k, 2)),
    "k is list": (TypeError, lambda f, q, k: f(q, [1.0], k, 2)),
    "q has shape (2, 6, 8)": (ValueError, lambda f, q, k: f(q[0], k, k, 2)),
    "k has shape (1, 1, 6, 7), (B, Hkv, S, D); D is 8": (ValueError, lambda f, q, k: f(q, k[..., 1:], k, 2)),
    "v has shape (1, 1, 5, 8), (B, Hkv, S, E); S is 6": (ValueError, lambda f, q, k: f(q, k, k[:, :, 1:], 2)),
    "k is torch.float16": (ValueError, lambda f, q, k: f(q, k.half(), k.half(), 2)),
    "H = 2 heads and k Hkv = 3": (ValueError, lambda f, q, k: f(q, *[k.expand(1, 3, 6, 8)] * 2, 2)),
    "H = 2 heads and k Hkv = 0": (ValueError, lambda f, q, k: f(q, *[k[:, :0]] * 2, 2)),
    "T = 6 and k S = 4": (ValueError, lambda f, q, k: f(q, k[:, :, :4], k[:, :, :4], 2)),
    "D is 0; the kernel takes 1 to 256": (ValueError, lambda f, q, k: f(q[..., :0], k[..., :0], k, 2)),
    "E is 257; the kernel takes 1 to 256": (
        ValueError,
        lambda f, q, k: f(q, k, k[..., :1].expand(1, 1, 6, 257), 2),
    ),
    "window=0 is below 1": (ValueError, lambda f, q, k: f(q, k, k, 0)),
    "window=2.0 is float": (TypeError, lambda f, q, k: f(q, k, k, 2.0)),
    "scale=nan is not finite": (ValueError, lambda f, q, k: f(q, k, k, 2, scale=float("nan"))),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_refused_with_its_name_and_value(sliding, device, words):
    error, call = BAD[words]
    with pytest.raises(error) as caught:
        call(
            sliding.sliding_window,
            torch.ones(1, 2, 6, 8, device=device),
            torch.ones(1, 1, 6, 8, device=device),
        )
    assert words in str(caught.value)


def test_library_takes_the_kernel_where_it_is_chosen(device):
    from dslib import attention, kernels

    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, h, 13, 8, generator=generator).to(device) for h in (4, 2, 2))
    k.requires_grad_()
    with kernels.use("torch"):
        expected = attention.sliding_window_attention(q, k, v, 5)
    with kernels.use("triton"):
        found = attention.sliding_window_attention(q, k, v, 5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert "SlidingWindow" in type(found.grad_fn).__name__
