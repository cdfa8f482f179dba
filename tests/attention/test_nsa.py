"""NSA against a loop over queries, eq. 9's weights, and its edges."""

import math

import pytest
import torch

from dslib.attention import NSASizes, nsa_attention, nsa_blocks, nsa_masks, nsa_scores
from dslib.attention.nsa import complete_blocks, compressed_mask, overlap

SMALL = NSASizes(4, 2, 8, selected=4, window=3)
ODD = NSASizes(3, 2, 5, selected=3, initial=0, local=1, window=2)
EVERYTHING = NSASizes(4, 2, 8, selected=9, window=100)


def branches(sizes, batch=1, heads=4, kv_heads=2, queries=13, keys=None, dim=4, seed=0, window=None):
    """q, the three pairs, gates: the arguments of nsa_attention, random."""
    keys = queries if keys is None else keys
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = sizes.compressed(keys), keys, keys if window is None else window
    pairs = [tuple(draw(batch, kv_heads, n, dim) for _ in range(2)) for n in lengths]
    return draw(batch, heads, queries, dim), *pairs, draw(batch, heads, queries, 3).sigmoid()


def attend(q, k, v):
    return (k @ q / math.sqrt(len(q))).softmax(0) @ v if len(k) else torch.zeros_like(q)


def by_hand(q, compressed, selected, window, gates, sizes):
    """One query at a time, from lists of positions and eq. 9's double sum where it applies."""
    out = torch.zeros_like(q)
    group, offset = q.shape[1] // selected[0].shape[1], selected[0].shape[2] - q.shape[2]
    keys, d, block = selected[0].shape[2], sizes.compress_stride, sizes.select_block
    for b in range(q.shape[0]):
        for g in range(selected[0].shape[1]):
            for i in range(q.shape[2]):
                t = offset + i
                visible = [c for c in range(sizes.compressed(keys)) if c * d + sizes.compress_block - 1 <= t]
                wanted = [0.0] * (t // block + 1)
                for h in range(g * group, (g + 1) * group):
                    logits = compressed[0][b, g, visible] @ q[b, h, i] / math.sqrt(q.shape[-1])
                    for c, p in zip(visible, logits.softmax(0).tolist(), strict=True):
                        for token in range(c * d, c * d + sizes.compress_block):
                            if token // block < len(wanted):
                                wanted[token // block] += p / d
                own = t // block
                always = {j for j in range(own + 1) if j < sizes.initial or j > own - sizes.local}
                order = sorted(range(own + 1), key=lambda j: (j not in always, -wanted[j], j))
                chosen = set(order[: sizes.selected])
                seen = [p for p in range(t + 1) if p // block in chosen]
                near = slice(max(0, t - sizes.window + 1), t + 1)
                for h in range(g * group, (g + 1) * group):
                    parts = (
                        attend(q[b, h, i], compressed[0][b, g, visible], compressed[1][b, g, visible]),
                        attend(q[b, h, i], selected[0][b, g, seen], selected[1][b, g, seen]),
                        attend(q[b, h, i], window[0][b, g, near], window[1][b, g, near]),
                    )
                    out[b, h, i] = sum(gate * part for gate, part in zip(gates[b, h, i], parts, strict=True))
    return out


@pytest.mark.parametrize("method", ["masked", "gathered"])
@pytest.mark.parametrize("sizes", [SMALL, ODD, EVERYTHING])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (37, 37), (32, 32), (1, 41), (6, 29)])
def test_equals_a_loop_over_queries(method, sizes, queries, keys):
    arguments = branches(sizes, queries=queries, keys=keys)
    torch.testing.assert_close(
        nsa_attention(*arguments, sizes, method=method), by_hand(*arguments, sizes), rtol=0, atol=1e-12
    )


def test_the_mapping_of_equation_9_has_the_weights_1_2_2_2_1():
    for sizes in (NSASizes(), NSASizes(2, 1, 4)):
        weights = overlap(6 * sizes.select_block, sizes)
        for j in range(1, 5):
            column = weights[:, j]
            assert column.nonzero().flatten().tolist() == list(range(4 * j - 1, 4 * j + 4))
            assert column[4 * j - 1 : 4 * j + 4].tolist() == [1, 2, 2, 2, 1]
    # eq. 9 as printed, from 1: p_slc[j] = sum over m = 0 … l'/d − 1 and n = 0 … l/d − 1 of p_cmp[l'/d·j − m − n]
    p = torch.rand(23, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    padded = dict(enumerate(p.tolist(), start=1))
    mapped = p @ overlap(6 * 4, NSASizes(2, 1, 4))
    for j in range(1, 7):
        printed = sum(padded.get(4 * j - m - n, 0.0) for m in range(4) for n in range(2))
        assert mapped[j - 1].item() == pytest.approx(printed)


def test_a_compressed_block_is_visible_once_it_has_ended():
    assert (
        compressed_mask(9, 9, SMALL).int().tolist()
        == [[0, 0, 0]] * 3 + [[1, 0, 0]] * 2 + [[1, 1, 0]] * 2 + [[1, 1, 1]] * 2
    )
    assert [SMALL.compressed(n) for n in (0, 3, 4, 5, 6)] == [0, 0, 1, 1, 2]
    x = torch.arange(9.0).reshape(1, 1, 9, 1)
    assert complete_blocks(x, 4, 2)[0, 0, :, :, 0].tolist() == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]]
    assert complete_blocks(x[:, :, :3], 4, 2).shape == (1, 1, 0, 4, 1)


def test_before_the_first_compressed_block_ends_its_branch_is_zero_and_gradients_finite():
    q, *pairs, gates = branches(SMALL, queries=5)
    only = torch.zeros_like(gates)
    only[..., 0] = 1
    leaves = [q, *(x for pair in pairs for x in pair)]
    for x in leaves:
        x.requires_grad_()
    out = nsa_attention(q, *pairs, only, SMALL)
    assert out[:, :, :3].abs().max() == 0
    torch.testing.assert_close(out[:, :, 3:], pairs[0][1].repeat_interleave(2, 1).expand(1, 4, 2, 4))
    out.sum().backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in leaves)


@pytest.mark.parametrize("queries", [5, 9])
def test_gradients(queries):
    sizes = NSASizes(2, 1, 2, selected=2, local=1, window=2)
    q, *pairs, gates = branches(sizes, heads=2, kv_heads=1, queries=queries, dim=2)
    flat = [q, *(x for pair in pairs for x in pair), gates]
    for x in flat:
        x.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda q, a, b, c, d, e, f, g: nsa_attention(q, (a, b), (c, d), (e, f), g, sizes), flat
    )


def test_a_group_selects_together_the_first_and_the_local_blocks_always_and_no_later_one():
    q, compressed, *_ = branches(SMALL, queries=45)
    blocks = nsa_blocks(q, compressed[0], 45, SMALL)
    assert blocks.shape == (1, 2, 45, 4)
    for t in range(45):
        own = t // 8
        for row in blocks[0, :, t].tolist():
            assert {0, own, max(0, own - 1)} <= set(row)
            assert max(row) == own
            assert [block for block in row if block >= 0] == list(dict.fromkeys(row))[: min(4, own + 1)]
    # Early queries have not a compressed block to judge by: every score is 0 or infinite.
    assert set(nsa_scores(q, compressed[0], 45, SMALL)[0, :, :3].flatten().tolist()) == {math.inf, -math.inf}


def test_masks_are_what_the_attention_uses():
    q, compressed, selected, window, _ = branches(SMALL, queries=29, keys=31)
    masks = nsa_masks(q, compressed[0], 31, SMALL)
    for branch, (mask, (k, v)) in enumerate(
        ((masks.compressed, compressed), (masks.selected, selected), (masks.window, window))
    ):
        gates = torch.zeros(1, 4, 29, 3, dtype=torch.float64)
        gates[..., branch] = 1
        weights = mask if mask.ndim == 2 else mask.repeat_interleave(2, 1)
        scores = (q @ k.repeat_interleave(2, 1).mT / 2).masked_fill(~weights, -math.inf)
        expected = scores.softmax(-1).nan_to_num() @ v.repeat_interleave(2, 1)
        out = nsa_attention(q, compressed, selected, window, gates, SMALL)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_pieces_of_a_sequence_and_a_window_that_forgets_give_the_same_numbers():
    q, compressed, selected, window, gates = branches(SMALL, queries=37)
    whole = nsa_attention(q, compressed, selected, window, gates, SMALL)
    for start, end in ((0, 5), (5, 6), (6, 20), (20, 37)):
        part = nsa_attention(
            q[:, :, start:end],
            tuple(x[:, :, : SMALL.compressed(end)] for x in compressed),
            tuple(x[:, :, :end] for x in selected),
            tuple(x[:, :, max(0, start - 2) : end] for x in window),
            gates[:, :, start:end],
            SMALL,
        )
        torch.testing.assert_close(part, whole[:, :, start:end])


def test_later_tokens_change_no_earlier_output():
    q, compressed, selected, window, gates = branches(SMALL, queries=37)
    before = nsa_attention(q, compressed, selected, window, gates, SMALL)
    for pair, first in ((compressed, SMALL.compressed(21)), (selected, 21), (window, 21)):
        for x in pair:
            x[:, :, first:] = 50.0
    after = nsa_attention(q, compressed, selected, window, gates, SMALL)
    torch.testing.assert_close(after[:, :, :21], before[:, :, :21])


def test_a_given_choice_of_blocks_takes_the_place_of_the_learned_one():
    q, *pairs, gates = branches(SMALL, queries=29)
    own = nsa_blocks(q, pairs[0][0], 29, SMALL)
    torch.testing.assert_close(
        nsa_attention(q, *pairs, gates, SMALL, blocks=own), nsa_attention(q, *pairs, gates, SMALL)
    )
    only_first = torch.zeros_like(own[..., :1])
    assert not torch.allclose(
        nsa_attention(q, *pairs, gates, SMALL, blocks=only_first), nsa_attention(q, *pairs, gates, SMALL)
    )


def test_the_papers_sizes_are_the_defaults_and_bfloat16_stays():
    assert NSASizes() == NSASizes(32, 16, 64, 16, 1, 2, 512)
    q, *pairs, gates = branches(SMALL, queries=11)
    pairs = [tuple(x.bfloat16() for x in pair) for pair in pairs]
    assert nsa_attention(q.bfloat16(), *pairs, gates.bfloat16(), SMALL).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 0}, "window=0"),
        ({"selected": 0}, "selected=0"),
        ({"selected": 2}, "selected=2 must hold initial=1 and local=2"),
        ({"compress_stride": 33}, "compress_stride=33 must not exceed compress_block=32"),
        ({"initial": -1}, "initial=-1"),
        ({"select_block": 1.5}, "select_block=1.5"),
    ],
)
def test_impossible_sizes_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        NSASizes(**options)


def test_what_does_not_fit_is_refused_with_its_size():
    q, compressed, selected, window, gates = branches(SMALL, queries=13)
    short = tuple(x[:, :, 1:] for x in compressed)
    cases = [
        ((q, short, selected, window, gates), "compressed keys hold 4 blocks; 13 positions make 5"),
        ((q, compressed, selected, window, gates[..., :2]), "gates has shape"),
        ((q[:, :3], compressed, selected, window, gates), "kv_heads=2 must divide heads=3"),
        ((q.float(), compressed, selected, window, gates), "dtypes"),
        (
            (q, compressed, selected, tuple(x[:, :, 5:] for x in window), gates),
            "window keys hold 8 positions",
        ),
    ]
    for arguments, words in cases:
        with pytest.raises(ValueError, match=words):
            nsa_attention(*arguments, SMALL)
