"""The lightning indexer: scores of all keys, and the best of them without a (queries, keys) table.

I[t, s] = Σ_h w[t, h]·ReLU(q[t, h]·k[s]) (DeepSeek-V3.2, arXiv:2512.02556, eq. 1). ``indexer_scores_triton`` writes
the table, which the indexer's dense warm-up needs, and has a backward pass without atomics. ``indexer_topk`` keeps,
as it goes through the keys, only the best so far. Score and index share one int64 that sorts as wanted: higher
score first, and on a tie the smaller index. Up to ``FUSED_TOP_K`` best stay in one program's registers; more are
merged by torch.topk from tables of a bounded piece of the queries and keys. The plain-torch references are
``indexer_scores`` and ``select_topk`` in ``dslib.attention.dsa``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from dslib.kernels import launching
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Longest q or k vector: a tile's rows stay in registers.
DIM_LIMIT = 128
#: Past this a program's registers do not hold the best keys beside a tile, and compiling their sort takes minutes.
FUSED_TOP_K = 128
#: Queries and keys of one table on the way past FUSED_TOP_K: 32 MiB of packed scores.
PIECE = (512, 8192)
#: Below every packed score: an empty slot.
_EMPTY = tl.constexpr(-(2**63) + 1)
#: Indices are packed as their distance from here.
_LAST = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class Tile:
    """How the work is cut: ``queries`` × ``keys`` scores at a time, powers of two, at least 16; warps a program and
    stages of the pipeline."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2


def tile_for(dtype: torch.dtype, backward: bool = False, hip: bool = False) -> Tile:
    """The tile of a scores' kernel: one that fits every chip we compile for, and spills nothing in 16 bits. Not
    chosen by timings."""
    if dtype == torch.float32:
        return Tile(32, 32, warps=4 if hip else 8, stages=1)
    if hip:
        return Tile(32 if backward else 64, 64, stages=1)
    return Tile(64, 64, warps=8 if backward else 4)


@triton.jit
def _scores_kernel(
    q,
    k,
    w,
    out,
    heads,
    queries,
    keys,
    query_tiles,
    key_tiles,
    q_batch,
    q_row,
    q_head,
    k_batch,
    k_row,
    w_batch,
    w_row,
    w_head,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # One program: M queries × N keys, one head after the other.
    pair = tl.program_id(0)
    batch = (pair // (query_tiles * key_tiles)).to(tl.int64)
    t0, s0 = pair % query_tiles * M, pair // query_tiles % key_tiles * N
    i, j, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_D)
    real, near = t0 + i < queries, s0 + j < keys
    q += batch * q_batch + t0.to(tl.int64) * q_row
    w += batch * w_batch + t0.to(tl.int64) * w_row
    k += batch * k_batch + s0.to(tl.int64) * k_row
    key = tl.load(k + (j[None, :] * k_row + d[:, None]), near[None, :] & (d < D)[:, None], 0.0)
    if UPCAST:
        key = key.to(tl.float32)
    total = tl.zeros((M, N), tl.float32)
    for _ in range(0, heads):
        query = tl.load(q + (i[:, None] * q_row + d[None, :]), real[:, None] & (d < D)[None, :], 0.0)
        weight = tl.load(w + i * w_row, real, 0.0).to(tl.float32)
        if UPCAST:
            query = query.to(tl.float32)
        product = tl.dot(query, key, input_precision="ieee")
        total += weight[:, None] * tl.where(product < 0, 0.0, product)  # keeps NaN, as torch.relu does
        q += q_head
        w += w_head
    out += (batch * queries + t0) * keys + s0
    tl.store(out + (i.to(tl.int64)[:, None] * keys + j[None, :]), total, real[:, None] & near[None, :])


@triton.jit
def _query_gradient_kernel(
    q,
    k,
    w,
    d_out,
    d_q,
    d_w,
    heads,
    queries,
    keys,
    query_tiles,
    q_batch,
    q_row,
    q_head,
    k_batch,
    k_row,
    w_batch,
    w_row,
    w_head,
    o_batch,
    o_row,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # One program: M queries of one head, over all keys. dw = Σ_s dI·ReLU(q·k), dq = w·Σ_s dI·[q·k > 0]·k.
    sequence = tl.program_id(0) // query_tiles
    batch, head = (sequence // heads).to(tl.int64), (sequence % heads).to(tl.int64)
    t0 = (tl.program_id(0) % query_tiles * M).to(tl.int64)
    i, j, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_D)
    real = t0 + i < queries
    q += batch * q_batch + t0 * q_row + head * q_head
    k += batch * k_batch
    d_out += batch * o_batch + t0 * o_row
    query = tl.load(q + (i[:, None] * q_row + d[None, :]), real[:, None] & (d < D)[None, :], 0.0)
    weight = tl.load(w + batch * w_batch + (t0 + i) * w_row + head * w_head, real, 0.0).to(tl.float32)
    if UPCAST:
        query = query.to(tl.float32)
    d_query = tl.zeros((M, BLOCK_D), tl.float32)
    d_weight = tl.zeros((M,), tl.float32)
    for s in range(0, keys, N):
        near = s + j < keys
        key = tl.load(k + (j[:, None] * k_row + d[None, :]), near[:, None] & (d < D)[None, :], 0.0)
        d_score = tl.load(d_out + (i[:, None] * o_row + j[None, :]), real[:, None] & near[None, :], 0.0)
        if UPCAST:
            key = key.to(tl.float32)
        product = tl.dot(query, tl.trans(key), input_precision="ieee")
        d_score = tl.where(product > 0, d_score.to(tl.float32), 0.0)
        d_weight += tl.sum(d_score * product, 1)
        d_query = tl.dot((weight[:, None] * d_score).to(key.dtype), key, d_query, input_precision="ieee")
        k += N * k_row
        d_out += N
    row = ((batch * queries + t0 + i) * heads + head)[:, None]
    d_query = d_query.to(d_q.dtype.element_ty)
    tl.store(d_q + (row * D + d[None, :]), d_query, real[:, None] & (d < D)[None, :])
    tl.store(d_w + (batch * queries + t0 + i) * heads + head, d_weight.to(d_w.dtype.element_ty), real)


@triton.jit
def _key_gradient_kernel(
    q,
    k,
    w,
    d_out,
    d_k,
    heads,
    queries,
    keys,
    key_tiles,
    q_batch,
    q_row,
    q_head,
    k_batch,
    k_row,
    w_batch,
    w_row,
    w_head,
    o_batch,
    o_row,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # One program: N keys, over all queries and heads. dk = Σ_t,h dI·w·[q·k > 0]·q.
    batch = (tl.program_id(0) // key_tiles).to(tl.int64)
    s0 = (tl.program_id(0) % key_tiles * N).to(tl.int64)
    i, j, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_D)
    near = s0 + j < keys
    k += batch * k_batch + s0 * k_row
    key = tl.load(k + (j[:, None] * k_row + d[None, :]), near[:, None] & (d < D)[None, :], 0.0)
    if UPCAST:
        key = key.to(tl.float32)
    q += batch * q_batch
    w += batch * w_batch
    d_out += batch * o_batch + s0
    d_key = tl.zeros((N, BLOCK_D), tl.float32)
    for t in range(0, queries, M):
        real = t + i < queries
        d_score = tl.load(d_out + (j[:, None] + i[None, :] * o_row), near[:, None] & real[None, :], 0.0)
        d_score = d_score.to(tl.float32)
        q_here, w_here = q, w
        for _ in range(0, heads):
            query = tl.load(q_here + (i[:, None] * q_row + d[None, :]), real[:, None] & (d < D)[None, :], 0.0)
            weight = tl.load(w_here + i * w_row, real, 0.0).to(tl.float32)
            if UPCAST:
                query = query.to(tl.float32)
            product = tl.dot(key, tl.trans(query), input_precision="ieee")
            d_product = tl.where(product > 0, d_score * weight[None, :], 0.0)
            d_key = tl.dot(d_product.to(query.dtype), query, d_key, input_precision="ieee")
            q_here += q_head
            w_here += w_head
        q += M * q_row
        w += M * w_row
        d_out += M * o_row
    row = (batch * keys + s0 + j)[:, None]
    tl.store(d_k + (row * D + d[None, :]), d_key.to(d_k.dtype.element_ty), near[:, None] & (d < D)[None, :])


@triton.jit
def _topk_kernel(
    q,
    k,
    w,
    out,
    heads,
    queries,
    keys,
    top_k,
    causal_offset,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # One program: one query with all of its heads. best holds the N ≥ top_k best packed scores, best first.
    # Everything is contiguous.
    t, batch = tl.program_id(0) % queries, (tl.program_id(0) // queries).to(tl.int64)
    h, j, d = tl.arange(0, H), tl.arange(0, N), tl.arange(0, BLOCK_D)
    q += tl.program_id(0).to(tl.int64) * heads * D
    w += tl.program_id(0).to(tl.int64) * heads
    k += batch * keys * D
    best = tl.full((N,), _EMPTY, tl.int64)
    stop = tl.minimum(causal_offset + t + 1, keys)
    for s in range(0, stop, N):
        seen = s + j < stop
        key = tl.load(k + (j[None, :] * D + d[:, None]), seen[None, :] & (d < D)[:, None], 0.0)
        if UPCAST:
            key = key.to(tl.float32)
        score = tl.zeros((N,), tl.float32)
        for first in range(0, heads, H):  # few at a time: most registers are taken by sorting
            real = first + h < heads
            query = tl.load(
                q + ((first + h)[:, None] * D + d[None, :]), real[:, None] & (d < D)[None, :], 0.0
            )
            weight = tl.load(w + first + h, real, 0.0).to(tl.float32)
            if UPCAST:
                query = query.to(tl.float32)
            product = tl.dot(query, key, input_precision="ieee")
            product = weight[:, None] * tl.where(product < 0, 0.0, product)
            score += tl.sum(tl.where(real[:, None], product, 0.0), 0)
        bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # −0 ties with 0
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # now in the order of the scores
        packed = (bits.to(tl.int64) << 32) + (_LAST - s - j)
        packed = tl.where(seen & (score > -float("inf")), packed, _EMPTY)  # and NaN is not above anything
        # The ascending new ones against the descending best, the larger of each pair: the best N of both, which
        # rise and then fall or fall and then rise, so that merging sorts them.
        if tl.max(packed, 0) > tl.min(best, 0):
            best = tl.bitonic_merge(tl.maximum(best, tl.sort(packed)), descending=True)
        k += N * D
    index = tl.where(best == _EMPTY, -1, _LAST - (best & 0xFFFFFFFF))
    tl.store(out + tl.program_id(0).to(tl.int64) * top_k + j, index, j < top_k)


def indexer_scores_triton(q: Tensor, k: Tensor, w: Tensor, tile: Tile | None = None) -> Tensor:
    """I[t, s] = Σ_h w[t, h]·ReLU(q[t, h]·k[s]) for all s, future ones too; differentiable once.

    q: (B, T, H, D); k: (B, S, D); w: (B, T, H), all float16, bfloat16 or float32 on a GPU (on the CPU only in
    Triton's interpreter), with any strides. Result: (B, T, S) **float32** whatever the inputs are. NaN stay in
    their row or column. ``tile`` replaces :func:`tile_for`'s.

    Raises TypeError for another dtype, ValueError for sizes that do not fit or D past 128, and RuntimeError for a
    tensor on the CPU without the interpreter.
    """
    _check(q, k, w)
    return _Scores.apply(q, k, w, tile)


def indexer_topk(
    q: Tensor, k: Tensor, w: Tensor, top_k: int, causal_offset: int = 0, keys_at_once: int | None = None
) -> Tensor:
    """The ``top_k`` keys of highest score that each query may see: int64 (B, T, top_k), best first.

    Arguments as in :func:`indexer_scores_triton`; query t stands at position ``causal_offset`` + t and may see keys
    up to there. On a tie the smaller index is first and 0 is no more than −0; a key whose score is NaN or −inf is
    never taken; slots that are left are −1. There is no gradient. Up to ``FUSED_TOP_K`` one kernel does it all,
    ``keys_at_once`` keys at a time (a power of two, at least 16 and ``top_k``; None chooses). Past that tables of
    ``PIECE`` queries × keys are made and merged: memory grows with T·top_k, never with T·S.

    Raises TypeError and ValueError as :func:`indexer_scores_triton`, and ValueError for a top_k below 1, a
    causal_offset below 0, or a keys_at_once that does not fit.
    """
    sizes = _check(q, k, w)
    launching.check_count("top_k", top_k)
    if not isinstance(causal_offset, int) or causal_offset < 0:
        raise ValueError(
            f"causal_offset={causal_offset!r} must be an int, the position of the first query, from 0 on"
        )
    # Past the last key an offset changes nothing, and int32 must hold it.
    causal_offset = min(causal_offset, sizes["S"])
    if keys_at_once is None:
        keys_at_once = launching.power_of_two(top_k, least=64)
    elif keys_at_once < max(top_k, 16) or keys_at_once & (keys_at_once - 1):
        raise ValueError(
            f"keys_at_once={keys_at_once} must be a power of two, at least 16 and at least top_k={top_k}"
        )
    with torch.no_grad():
        q, k, w = (launching.rows(x, axis=1) for x in (q, k, w))
        if top_k <= FUSED_TOP_K:
            return _fused_topk(
                q.contiguous(), k.contiguous(), w.contiguous(), top_k, causal_offset, keys_at_once
            )
        return _merged_topk(q, k, w, top_k, causal_offset)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, w, tile):
        q, k, w = (launching.rows(x, axis=1) for x in (q, k, w))
        ctx.save_for_backward(q, k, w)
        ctx.tile = tile
        return _scores(q, k, w, tile)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, w = ctx.saved_tensors
        (batch, queries, heads, _), keys = q.shape, k.shape[1]
        d_out = launching.rows(d_out)
        d_q, d_k, d_w = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, w))
        constants = _constants(q, ctx.tile, backward=True)
        query_tiles, key_tiles = triton.cdiv(queries, constants["M"]), triton.cdiv(keys, constants["N"])
        strides = *_strides(q, k, w), *d_out.stride()[:2]
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            numbers = heads, queries, keys, query_tiles, *strides
            programs = batch * heads * query_tiles
            _launch(_query_gradient_kernel, programs, (q, k, w, d_out, d_q, d_w), numbers, constants)
        if ctx.needs_input_grad[1]:
            numbers = heads, queries, keys, key_tiles, *strides
            _launch(_key_gradient_kernel, batch * key_tiles, (q, k, w, d_out, d_k), numbers, constants)
        return d_q, d_k, d_w, None


def _scores(q: Tensor, k: Tensor, w: Tensor, tile: Tile | None = None) -> Tensor:
    (batch, queries, heads, _), keys = q.shape, k.shape[1]
    out = q.new_empty(batch, queries, keys, dtype=torch.float32)
    constants = _constants(q, tile)
    tiles = triton.cdiv(queries, constants["M"]), triton.cdiv(keys, constants["N"])
    numbers = heads, queries, keys, *tiles, *_strides(q, k, w)
    _launch(_scores_kernel, batch * tiles[0] * tiles[1], (q, k, w, out), numbers, constants)
    return out


def _fused_topk(q: Tensor, k: Tensor, w: Tensor, top_k: int, causal_offset: int, keys_at_once: int) -> Tensor:
    batch, queries, heads, dim = q.shape
    out = torch.empty(batch, queries, top_k, dtype=torch.int64, device=q.device)
    constants = {"D": dim, "BLOCK_D": launching.power_of_two(dim), "H": 16}
    options = {"num_warps": 4, "num_stages": 1, "UPCAST": launching.interpreted()}
    numbers = heads, queries, k.shape[1], top_k, causal_offset
    _launch(_topk_kernel, batch * queries, (q, k, w, out), numbers, constants | options | {"N": keys_at_once})
    return out


def _merged_topk(q: Tensor, k: Tensor, w: Tensor, top_k: int, causal_offset: int) -> Tensor:
    """Piece by piece: the table of a piece's scores, packed, beside the best so far, and torch.topk of both."""
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    out = torch.full((batch, queries, top_k), -1, dtype=torch.int64, device=q.device)
    for t in range(0, queries, PIECE[0]):
        own_q, own_w = q[:, t : t + PIECE[0]], w[:, t : t + PIECE[0]]
        position = causal_offset + torch.arange(t, t + own_q.shape[1], device=q.device)
        best = torch.full((batch, own_q.shape[1], top_k), _EMPTY.value, dtype=torch.int64, device=q.device)
        for s in range(0, min(keys, causal_offset + t + own_q.shape[1]), PIECE[1]):
            scores = _scores(own_q, k[:, s : s + PIECE[1]], own_w)
            index = torch.arange(s, s + scores.shape[-1], device=q.device)
            seen = (scores > -torch.inf) & (index <= position[:, None])  # NaN is not above anything
            packed = torch.where(seen, _packed(scores, index), _EMPTY.value)
            best = torch.cat([best, packed], -1).topk(top_k, sorted=True).values
        out[:, t : t + PIECE[0]] = torch.where(best == _EMPTY.value, -1, _LAST.value - (best & 0xFFFFFFFF))
    return out


def _packed(scores: Tensor, index: Tensor) -> Tensor:
    """Scores (…, S) float32 and indices (S,) as the kernel packs them."""
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.long() << 32) + (_LAST.value - index)


def _check(q: Tensor, k: Tensor, w: Tensor) -> dict[str, int]:
    sizes = launching.check_tensors({"q": (q, "B T H D"), "k": (k, "B S D"), "w": (w, "B T H")})
    launching.check_dims(sizes, {"D": DIM_LIMIT})
    return sizes


def _constants(q: Tensor, tile: Tile | None, backward: bool = False) -> dict:
    tile = tile or tile_for(q.dtype, backward, launching.on_hip())
    constants = {
        "D": q.shape[-1],
        "BLOCK_D": launching.power_of_two(q.shape[-1]),
        "M": tile.queries,
        "N": tile.keys,
    }
    return constants | {"UPCAST": launching.interpreted(), "num_warps": tile.warps, "num_stages": tile.stages}


def _strides(q: Tensor, k: Tensor, w: Tensor) -> tuple[int, ...]:
    return (*q.stride()[:3], *k.stride()[:2], *w.stride())


def _launch(kernel, programs, tensors, numbers, constants) -> None:
    launching.check_grid(programs)
    if programs:
        with torch.cuda.device_of(tensors[0]):
            kernel[(programs,)](*tensors, *numbers, **constants)
