"""The indexer's kernels against a plain float64 sum over heads, and a plain sort."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("poisoned_memory")

#: Entries are about 1; float32 rounds each step of sums of at most 16·37 terms, float16 their factors too.
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 5e-5}, torch.float16: {"rtol": 4e-3, "atol": 3e-2}}
#: (batch, queries, heads, keys, dim)
CASES = {
    "one position": (1, 1, 1, 1, 16),
    "several tiles, prime": (1, 19, 2, 37, 16),
    "decoding one token": (2, 1, 3, 17, 16),
    "odd dim": (2, 5, 2, 7, 5),
}


@pytest.fixture
def indexer(device):
    from dslib.kernels import indexer

    return indexer


@pytest.fixture
def tile(indexer):
    return indexer.Tile(16, 16, warps=1, stages=1)


@pytest.fixture
def way(request, indexer, monkeypatch):
    """``"fused"``: the kernel's own top-k. ``"merged"``: torch's, of pieces smaller than the inputs."""
    if request.param == "merged":
        monkeypatch.setattr(indexer, "FUSED_TOP_K", 0)
        monkeypatch.setattr(indexer, "PIECE", (4, 6))
    return request.param


both_ways = pytest.mark.parametrize("way", ["fused", "merged"], indirect=True)


def random(case, dtype, device, seed=0):
    batch, queries, heads, keys, dim = case
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, queries, heads, dim), (batch, keys, dim), (batch, queries, heads)
    return [torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype).to(device) for s in shapes]


def whole_numbers(case, device, seed=0, most=1):
    """Small whole numbers: all sums are exact whatever their order, and many scores tie, at 0 and elsewhere."""
    batch, queries, heads, keys, dim = case
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, queries, heads, dim), (batch, keys, dim), (batch, queries, heads)
    return [torch.randint(-most, most + 1, s, generator=generator).float().to(device) for s in shapes]


def exact_scores(q, k, w):
    return torch.einsum("bthd,bsd->bths", q, k).relu().mul(w[..., None]).sum(2)


def exact_topk(scores, top_k, causal_offset):
    """Row by row: the visible keys that are numbers, sorted by score down and index up."""
    rows = []
    for batch in scores.double().tolist():
        for t, row in enumerate(batch):
            seen = [s for s, x in enumerate(row[: causal_offset + t + 1]) if x > -torch.inf]
            best = sorted(seen, key=lambda s, row=row: (-row[s], s))[:top_k]
            rows.append(best + [-1] * (top_k - len(best)))
    return torch.tensor(rows, dtype=torch.int64).view(*scores.shape[:2], top_k).to(scores.device)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES] + [("odd dim", torch.float16)],
    ids=str,
)
def test_scores_and_gradients_are_the_plain_sums(indexer, tile, device, agrees_with_gradients, case, dtype):
    scores = agrees_with_gradients(
        lambda q, k, w: indexer.indexer_scores_triton(q, k, w, tile=tile),
        exact_scores,
        random(CASES[case], dtype, device),
        **TOLERANCE[dtype],
    )
    assert scores.dtype == torch.float32


def test_the_tiles_that_are_really_used_give_the_same(indexer, device, agrees_with_gradients):
    agrees_with_gradients(
        indexer.indexer_scores_triton,
        exact_scores,
        random((1, 35, 2, 33, 20), torch.float32, device),
        **TOLERANCE[torch.float32],
    )


def test_products_that_are_exactly_zero_pass_no_gradient_as_in_relu(
    indexer, tile, device, agrees_with_gradients
):
    tensors = whole_numbers((1, 7, 2, 9, 4), device)
    assert (torch.einsum("bthd,bsd->bths", *tensors[:2]) == 0).any()
    agrees_with_gradients(
        lambda q, k, w: indexer.indexer_scores_triton(q, k, w, tile=tile),
        exact_scores,
        tensors,
        rtol=0,
        atol=1e-5,
    )


def test_nan_stays_in_its_row_or_column(indexer, tile, device):
    q, k, w = random((1, 3, 2, 4, 16), torch.float32, device)
    q[0, 1, 0, 3] = k[0, 2, 5] = torch.nan
    expected = torch.zeros(1, 3, 4, dtype=torch.bool, device=device)
    expected[:, 1], expected[:, :, 2] = True, True
    assert torch.equal(indexer.indexer_scores_triton(q, k, w, tile=tile).isnan(), expected)


@both_ways
@pytest.mark.parametrize(
    ("case", "top_k", "causal_offset"),
    [
        ((1, 1, 1, 1, 16), 1, 0),
        ((1, 5, 2, 5, 4), 3, 0),  # early rows have fewer keys than slots
        ((1, 2, 2, 41, 4), 7, 39),  # several steps through the keys, behind a cache
        ((2, 2, 3, 5, 3), 9, 3),  # more slots than keys
        ((1, 2, 2, 13, 4), 13, 100),  # an offset past the last key: all are seen
        ((1, 2, 2, 34, 4), 16, 16),  # as many slots as the kernel holds
    ],
    ids=str,
)
def test_best_keys_are_those_of_a_sort_with_ties_to_the_smaller_index(
    indexer, way, device, case, top_k, causal_offset
):
    q, k, w = whole_numbers(case, device)
    expected = exact_topk(exact_scores(q, k, w), top_k, causal_offset)
    found = indexer.indexer_topk(q, k, w, top_k, causal_offset, keys_at_once=16)
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)


@both_ways
def test_the_size_that_is_really_used_and_real_scores_give_the_same(indexer, way, device):
    q, k, w = random((1, 1, 3, 70, 20), torch.float32, device)
    found = indexer.indexer_topk(q, k, w, 5, 68)
    scores = exact_scores(q.double(), k.double(), w.double())
    gaps = scores.sort(-1).values.diff()
    assert (
        (gaps == 0) | (gaps > 1e-5)
    ).all()  # exact zeros tie, and no two are so near that rounding swaps them
    assert torch.equal(found, exact_topk(scores, 5, 68))


@both_ways
def test_all_equal_scores_take_the_first_keys(indexer, way, device):
    q, k, w = torch.zeros(1, 2, 1, 4), torch.ones(1, 20, 4), torch.ones(1, 2, 1)
    w[0, 1] = -1.0  # −1·0 = −0, a tie too
    found = indexer.indexer_topk(*(x.to(device) for x in (q, k, w)), 5, 18, keys_at_once=16)
    assert found.tolist() == [[[0, 1, 2, 3, 4]] * 2]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@both_ways
def test_nan_and_minus_inf_are_never_selected_and_inf_is_first(indexer, way, device):
    q, k, w = (
        torch.ones(1, 2, 2, 4),
        torch.rand(1, 19, 4, generator=torch.Generator().manual_seed(0)),
        torch.ones(1, 2, 2),
    )
    k[0, [0, 3, 17], 0] = torch.nan
    k[0, 9, 2] = torch.inf
    w[0, 1] = -1.0  # there the infinite score is −inf
    q, k, w = (x.to(device) for x in (q, k, w))
    found = indexer.indexer_topk(q, k, w, 16, 17, keys_at_once=16)
    assert torch.equal(found, exact_topk(exact_scores(q, k, w), 16, 17))
    assert found[0, 0, 0] == 9
    assert not torch.isin(found, torch.tensor([0, 3, 17], device=device)).any()
    assert (found[0, 1] == -1).sum() == 1  # of 19 keys 15 are left


@both_ways
def test_keys_of_the_future_change_nothing(indexer, way, device):
    q, k, w = whole_numbers((1, 2, 2, 9, 4), device)
    before = indexer.indexer_topk(q, k, w, 4, 2, keys_at_once=16)
    k[:, 5:] = torch.nan
    assert torch.equal(indexer.indexer_topk(q, k, w, 4, 2, keys_at_once=16), before)
    assert torch.equal(indexer.indexer_topk(q, k[:, :5], w, 4, 2, keys_at_once=16), before)


def test_one_more_than_the_kernel_holds_and_more_heads_than_a_tile_give_the_same(
    indexer, device, monkeypatch
):
    monkeypatch.setattr(indexer, "FUSED_TOP_K", 8)
    q, k, w = whole_numbers((1, 2, 35, 21, 4), device, most=3)
    fused = indexer.indexer_topk(q, k, w, 8, 19, keys_at_once=16)
    assert torch.equal(fused, exact_topk(exact_scores(q, k, w), 8, 19))
    assert torch.equal(indexer.indexer_topk(q, k, w, 9, 19)[..., :8], fused)


@both_ways
@pytest.mark.parametrize(
    ("batch", "queries", "keys", "heads"), [(0, 3, 3, 2), (2, 0, 4, 2), (1, 3, 0, 2), (1, 3, 4, 0)]
)
def test_empty_sizes(indexer, way, device, batch, queries, keys, heads):
    tensors = [x.requires_grad_() for x in random((batch, queries, heads, keys, 4), torch.float32, device)]
    scores = indexer.indexer_scores_triton(*tensors)
    assert torch.equal(scores, torch.zeros(batch, queries, keys, device=device))
    scores.sum().backward()
    for x in tensors:
        assert torch.equal(x.grad, torch.zeros_like(x))
    found = indexer.indexer_topk(*tensors, 2)
    # Without a head all scores are 0, and the first keys are the best.
    assert torch.equal(found, exact_topk(scores, 2, 0))


@both_ways
def test_strides_do_not_matter(indexer, way, tile, device):
    """Heads before time in memory, and one gradient for all scores."""
    plain = random((2, 2, 2, 5, 4), torch.float32, device)
    q, k, w = plain
    views = (
        q.transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat([k, k], -1)[..., :4],
        w.mT.contiguous().mT,
    )
    results = []
    for tensors in (plain, views):
        tensors = [x.detach().requires_grad_() for x in tensors]
        scores = indexer.indexer_scores_triton(*tensors, tile=tile)
        gradients = torch.autograd.grad(scores.sum(), tensors)
        results.append([scores, *gradients, indexer.indexer_topk(*tensors, 3, keys_at_once=16)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


BAD = {
    "q is torch.float64": (TypeError, lambda i, q, k, w: i.indexer_scores_triton(q.double(), k, w)),
    "k has shape (1, 5, 7), (B, S, D); D is 8": (
        ValueError,
        lambda i, q, k, w: i.indexer_topk(q, k[..., 1:], w, 1),
    ),
    "w has shape (1, 3, 1), (B, T, H); H is 2": (
        ValueError,
        lambda i, q, k, w: i.indexer_topk(q, k, w[..., 1:], 1),
    ),
    "w is torch.float16": (ValueError, lambda i, q, k, w: i.indexer_scores_triton(q, k, w.half())),
    "D is 129; the kernel takes 1 to 128": (
        ValueError,
        lambda i, q, k, w: i.indexer_topk(
            q[..., :1].expand(1, 3, 2, 129), k[..., :1].expand(1, 5, 129), w, 1
        ),
    ),
    "top_k=0 is below 1": (ValueError, lambda i, q, k, w: i.indexer_topk(q, k, w, 0)),
    "causal_offset=-1 must be": (ValueError, lambda i, q, k, w: i.indexer_topk(q, k, w, 1, -1)),
    "keys_at_once=24 must be": (ValueError, lambda i, q, k, w: i.indexer_topk(q, k, w, 1, keys_at_once=24)),
    "at least top_k=17": (ValueError, lambda i, q, k, w: i.indexer_topk(q, k, w, 17, keys_at_once=16)),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_refused_with_its_name_and_value(indexer, device, words):
    error, call = BAD[words]
    q, k, w = (torch.ones(*s, device=device) for s in ((1, 3, 2, 8), (1, 5, 8), (1, 3, 2)))
    with pytest.raises(error) as caught:
        call(indexer, q, k, w)
    assert words in str(caught.value)


def test_library_takes_the_kernel_where_it_is_chosen(device):
    from dslib import attention, kernels

    generator = torch.Generator().manual_seed(3)
    shapes = (1, 9, 2, 8), (1, 11, 8), (1, 9, 2)
    q, k, w = (torch.randn(*shape, generator=generator).to(device) for shape in shapes)
    k.requires_grad_()
    with kernels.use("torch"):
        expected = attention.indexer_scores(q, k, w), attention.indexer_topk(q, k, w, 4, 2)
    with kernels.use("triton"):
        found = attention.indexer_scores(q, k, w), attention.indexer_topk(q, k, w, 4, 2)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    assert "Scores" in type(found[0].grad_fn).__name__
    assert torch.equal(found[1], expected[1])
