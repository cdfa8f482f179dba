"""Attention of each query to blocks of keys of its own, forward and backward: NSA's selected branch, and MoBA.

Forward, and for dq, one program has one query of all heads of a group, which share its blocks (NSA,
arXiv:2502.11089, §3.4): keys are read once for the whole group. A group of few heads, MoBA's of one, fills few of
the 16 rows of a product on matrix cores; it is right there, and no faster than reading its keys allows. For dk and
dv one program has a tile of a block, and the queries that chose the block from a list sorted beforehand: nothing is
added up in memory, so two runs give the same bits. The plain-torch reference is ``block_sparse_attention`` in
``dslib.attention.block_sparse``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from dslib.kernels import launching
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Longest q, k or v vector: a tile's rows stay in registers.
DIM_LIMIT = 256


@dataclass(frozen=True)
class Tile:
    """How the work is cut: (query, head) ``rows`` × ``keys`` scores at a time, powers of two, at least 16;
    warps a program and stages of the pipeline."""

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2


def tile_for(
    dtype: torch.dtype, dim: int, heads: int, block_size: int, backward: bool = False, hip: bool = False
) -> Tile:
    """The tile for vectors of up to ``dim`` entries, groups of ``heads`` heads and blocks of ``block_size``: one
    that fits every chip we compile for, and spills nothing in 16 bits. Not chosen by timings."""
    if dtype == torch.float32 and not hip:  # no matrix cores: a thread's part of a product is all registers
        return Tile(16, 16, warps=8, stages=1)
    large = dtype == torch.float32 or dim > 128
    keys = launching.power_of_two(min(block_size, 32 if large else 64))
    if backward:
        return Tile(16 if hip else 32, keys, warps=4 if hip else 8, stages=1)
    rows = launching.power_of_two(min(heads, 32 if large else 64))
    return Tile(rows, keys, stages=1 if hip or large else 2)


@triton.jit
def _forward_kernel(
    q,
    k,
    v,
    blocks,
    out,
    lse,
    groups,
    kv_heads,
    heads,
    queries,
    keys,
    slots,
    block_size,
    tiles,
    scale,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # One program: one query of up to M of the group's heads. scale is in units of log 2.
    query_number = tl.program_id(0) // tiles
    t, group = query_number % queries, query_number // queries  # group counts through the batch
    batch, kv_head = (group // groups).to(tl.int64), (group % groups // (groups // kv_heads)).to(tl.int64)
    i = tl.program_id(0) % tiles * M + tl.arange(0, M)
    j, d, e = tl.arange(0, N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    position = keys - queries + t
    real = i < heads

    head = (group % groups * heads + i).to(tl.int64)
    q += batch * q_batch + t.to(tl.int64) * q_row
    query = tl.load(q + (head[:, None] * q_head + d[None, :]), real[:, None] & (d < D)[None, :], 0.0)
    if UPCAST:
        query = query.to(tl.float32)
    k += batch * k_batch + kv_head * k_head
    v += batch * v_batch + kv_head * v_head
    blocks += query_number.to(tl.int64) * slots
    highest = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    mean = tl.zeros((M, BLOCK_E), tl.float32)
    parts = (block_size + N - 1) // N
    for step in range(0, slots * parts):
        block = tl.load(blocks + step // parts).to(tl.int64)
        inside = step % parts * N + j
        place = block * block_size + inside
        seen = (block >= 0) & (inside < block_size) & (place <= position)
        key = tl.load(k + (place[None, :] * k_row + d[:, None]), seen[None, :] & (d < D)[:, None], 0.0)
        value = tl.load(v + (place[:, None] * v_row + e[None, :]), seen[:, None] & (e < E)[None, :], 0.0)
        if UPCAST:
            key, value = key.to(tl.float32), value.to(tl.float32)
        score = tl.dot(query, key, input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, -float("inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # no key yet: −inf − −inf would be NaN
        weight = tl.exp2(score - shift[:, None])
        shrink = tl.exp2(highest - shift)
        total = total * shrink + tl.sum(weight, 1)
        mean = tl.dot(weight.to(value.dtype), value, mean * shrink[:, None], input_precision="ieee")
        highest = higher

    empty = total == 0.0  # no key at all: 0, and exp2(score − inf) = 0 makes its gradients 0 too
    row = (batch * groups * heads + head) * queries + t
    mean = (mean / tl.where(empty, 1.0, total)[:, None]).to(out.dtype.element_ty)
    tl.store(out + (row[:, None] * E + e[None, :]), mean, real[:, None] & (e < E)[None, :])
    tl.store(lse + row, tl.where(empty, float("inf"), highest + tl.log2(tl.where(empty, 1.0, total))), real)


@triton.jit
def _query_gradient_kernel(
    q,
    k,
    v,
    blocks,
    lse,
    delta,
    d_out,
    d_q,
    groups,
    kv_heads,
    heads,
    queries,
    keys,
    slots,
    block_size,
    tiles,
    scale,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    o_batch,
    o_head,
    o_row,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # As the forward kernel, but the weights are known: P = 2^(score − lse), dS = P ∘ (dO·Vᵀ − Δ), dQ = dS·K.
    query_number = tl.program_id(0) // tiles
    t, group = query_number % queries, query_number // queries
    batch, kv_head = (group // groups).to(tl.int64), (group % groups // (groups // kv_heads)).to(tl.int64)
    i = tl.program_id(0) % tiles * M + tl.arange(0, M)
    j, d, e = tl.arange(0, N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    position = keys - queries + t
    real = i < heads

    head = (group % groups * heads + i).to(tl.int64)
    row = (batch * groups * heads + head) * queries + t
    q += batch * q_batch + t.to(tl.int64) * q_row
    d_out += batch * o_batch + t.to(tl.int64) * o_row
    query = tl.load(q + (head[:, None] * q_head + d[None, :]), real[:, None] & (d < D)[None, :], 0.0)
    d_mean = tl.load(d_out + (head[:, None] * o_head + e[None, :]), real[:, None] & (e < E)[None, :], 0.0)
    if UPCAST:
        query, d_mean = query.to(tl.float32), d_mean.to(tl.float32)
    log_total = tl.load(lse + row, real, float("inf"))
    shared = tl.load(delta + row, real, 0.0)
    k += batch * k_batch + kv_head * k_head
    v += batch * v_batch + kv_head * v_head
    blocks += query_number.to(tl.int64) * slots
    d_query = tl.zeros((M, BLOCK_D), tl.float32)
    parts = (block_size + N - 1) // N
    for step in range(0, slots * parts):
        block = tl.load(blocks + step // parts).to(tl.int64)
        inside = step % parts * N + j
        place = block * block_size + inside
        seen = (block >= 0) & (inside < block_size) & (place <= position)
        key = tl.load(k + (place[:, None] * k_row + d[None, :]), seen[:, None] & (d < D)[None, :], 0.0)
        value = tl.load(v + (place[:, None] * v_row + e[None, :]), seen[:, None] & (e < E)[None, :], 0.0)
        if UPCAST:
            key, value = key.to(tl.float32), value.to(tl.float32)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        weight = tl.exp2(tl.where(seen[None, :], score, -float("inf")) - log_total[:, None])
        d_weight = tl.dot(d_mean, tl.trans(value), input_precision="ieee")
        d_score = weight * (d_weight - shared[:, None])
        d_query = tl.dot(d_score.to(key.dtype), key, d_query, input_precision="ieee")
    d_query *= scale * 0.6931471805599453  # back from units of log 2
    d_q += row[:, None] * D + d[None, :]
    tl.store(d_q, d_query.to(d_q.dtype.element_ty), real[:, None] & (d < D)[None, :])


@triton.jit
def _key_gradient_kernel(
    q,
    k,
    v,
    order,
    bounds,
    lse,
    delta,
    d_out,
    d_k,
    d_v,
    groups,
    kv_heads,
    heads,
    queries,
    keys,
    slots,
    block_size,
    tiles,
    scale,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    o_batch,
    o_head,
    o_row,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # One program: N keys of one block for one group, and all (query, head) pairs of the group that chose it.
    listed = tl.program_id(0) // tiles  # (batch, group, block)
    numbers = (keys + block_size - 1) // block_size
    group = listed // numbers
    batch, kv_head = (group // groups).to(tl.int64), (group % groups // (groups // kv_heads)).to(tl.int64)
    inside = tl.program_id(0) % tiles * N + tl.arange(0, N)
    place = listed % numbers * block_size + inside
    i, d, e = tl.arange(0, M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    real = (inside < block_size) & (place < keys)

    k += batch * k_batch + kv_head * k_head
    v += batch * v_batch + kv_head * v_head
    far = place.to(tl.int64)[:, None]
    key = tl.load(k + (far * k_row + d[None, :]), real[:, None] & (d < D)[None, :], 0.0)
    value = tl.load(v + (far * v_row + e[None, :]), real[:, None] & (e < E)[None, :], 0.0)
    if UPCAST:
        key, value = key.to(tl.float32), value.to(tl.float32)
    q += batch * q_batch
    d_out += batch * o_batch
    start, stop = tl.load(bounds + listed), tl.load(bounds + listed + 1)
    pairs = ((stop - start) * heads).to(tl.int32)
    d_key = tl.zeros((N, BLOCK_D), tl.float32)
    d_value = tl.zeros((N, BLOCK_E), tl.float32)
    for pair in range(0, pairs, M):
        near = pair + i < pairs
        entry = tl.load(order + start + (pair + i) // heads, near, 0)
        t = entry // slots % queries  # its place among (batch, group, query, slot) tells the query
        head = group % groups * heads + (pair + i) % heads
        row = (batch * groups * heads + head) * queries + t
        query = tl.load(
            q + ((head * q_head + t * q_row)[:, None] + d[None, :]), near[:, None] & (d < D)[None, :], 0.0
        )
        d_mean = tl.load(
            d_out + ((head * o_head + t * o_row)[:, None] + e[None, :]), near[:, None] & (e < E)[None, :], 0.0
        )
        log_total = tl.load(lse + row, near, float("inf"))
        shared = tl.load(delta + row, near, 0.0)
        if UPCAST:
            query, d_mean = query.to(tl.float32), d_mean.to(tl.float32)
        score = tl.dot(key, tl.trans(query), input_precision="ieee") * scale
        seen = (place[:, None] <= (keys - queries + t)[None, :]) & real[:, None]
        weight = tl.exp2(tl.where(seen, score, -float("inf")) - log_total[None, :])
        d_value = tl.dot(weight.to(d_mean.dtype), d_mean, d_value, input_precision="ieee")
        d_weight = tl.dot(value, tl.trans(d_mean), input_precision="ieee")
        d_score = weight * (d_weight - shared[None, :])
        d_key = tl.dot(d_score.to(query.dtype), query, d_key, input_precision="ieee")
    d_key *= scale * 0.6931471805599453
    row = (group.to(tl.int64) * keys + place)[:, None]
    real = real[:, None]
    tl.store(d_k + (row * D + d[None, :]), d_key.to(d_k.dtype.element_ty), real & (d < D)[None, :])
    tl.store(d_v + (row * E + e[None, :]), d_value.to(d_v.dtype.element_ty), real & (e < E)[None, :])


def block_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    block_size: int,
    scale: float | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Causal attention of each query to the keys of its own blocks, differentiable once; 0 for one that sees none.

    q: (B, H, T, D); k: (B, Hkv, S, D); v: (B, Hkv, S, E), all float16, bfloat16 or float32 on a GPU (on the CPU
    only in Triton's interpreter), with any strides; S ≥ T: the queries are the last T positions. blocks:
    (B, G, T, n) int32 or int64: block b has the keys b·block_size and on, of which a query sees those up to its
    own position; −1 is an empty slot, and so is a number past the last block. The H/G heads of a group share
    their blocks; G is a multiple of Hkv. **A block named twice counts twice**, unlike in the reference, and that is
    not checked. ``scale`` is 1/√D. Result: (B, H, T, E), q's dtype; the sums and the softmax are float32. ``tile``
    replaces :func:`tile_for`'s.

    Raises TypeError for another dtype, ValueError for sizes that do not fit or D or E past 256, and RuntimeError
    for a tensor on the CPU without the interpreter.
    """
    sizes = launching.check_tensors({"q": (q, "B H T D"), "k": (k, "B Hkv S D"), "v": (v, "B Hkv S E")})
    launching.check_dims(sizes, {"D": DIM_LIMIT, "E": DIM_LIMIT})
    launching.check_indices("blocks", blocks, "B G T n", sizes, like=q)
    groups = blocks.shape[1]
    if sizes["H"] % max(groups, 1) or groups % max(sizes["Hkv"], 1) or not sizes["Hkv"] or not groups:
        raise ValueError(
            f"blocks has G = {groups} groups; G must divide H = {sizes['H']} and be a multiple of Hkv = {sizes['Hkv']}"
        )
    launching.check_queries(sizes["T"], sizes["S"])
    launching.check_count("block_size", block_size)
    block_size = min(
        block_size, max(sizes["S"], 1)
    )  # one block then, as before, and no more tiles than it has
    return _BlockSparse.apply(q, k, v, blocks, block_size, launching.scale_of(scale, sizes["D"]), tile)


class _BlockSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, blocks, block_size, scale, tile):
        q, k, v, blocks = launching.rows(q), launching.rows(k), launching.rows(v), blocks.contiguous()
        batch, heads, queries, _ = q.shape
        out = q.new_empty(batch, heads, queries, v.shape[-1])
        lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, blocks, out, lse)
        ctx.block_size, ctx.scale, ctx.tile = block_size, scale, tile
        numbers, constants = _arguments(q, k, v, blocks, block_size, scale, tile, backward=False)
        programs = batch * blocks.shape[1] * queries * numbers[-2]
        _launch(_forward_kernel, programs, (q, k, v, blocks, out, lse), numbers, (q, k, v), constants)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, blocks, out, lse = ctx.saved_tensors
        d_out = launching.rows(d_out)
        delta = (out.float() * d_out.float()).sum(-1)
        d_q, d_k, d_v = None, None, None
        if ctx.needs_input_grad[0]:
            d_q = torch.empty_like(q, memory_format=torch.contiguous_format)
            numbers, constants = _arguments(
                q, k, v, blocks, ctx.block_size, ctx.scale, ctx.tile, backward=False
            )
            programs = q.shape[0] * blocks.shape[1] * q.shape[2] * numbers[-2]
            tensors = q, k, v, blocks, lse, delta, d_out, d_q
            _launch(_query_gradient_kernel, programs, tensors, numbers, (q, k, v, d_out), constants)
        if any(ctx.needs_input_grad[1:3]):
            d_k, d_v = _key_gradients(ctx, q, k, v, blocks, lse, delta, d_out)
        return d_q, d_k, d_v, None, None, None, None


def _key_gradients(ctx, q, k, v, blocks, lse, delta, d_out) -> tuple[Tensor, Tensor]:
    (batch, kv_heads, keys, _), groups = k.shape, blocks.shape[1]
    # Groups that share a kv head have a sum to make, in float32.
    dtype = k.dtype if groups == kv_heads else torch.float32
    d_k, d_v = (x.new_empty(batch, groups, keys, x.shape[-1], dtype=dtype) for x in (k, v))
    order, bounds = queries_by_block(blocks, triton.cdiv(keys, ctx.block_size))
    numbers, constants = _arguments(q, k, v, blocks, ctx.block_size, ctx.scale, ctx.tile, backward=True)
    tensors = q, k, v, order, bounds, lse, delta, d_out, d_k, d_v
    programs = (bounds.numel() - 1) * numbers[-2]
    _launch(_key_gradient_kernel, programs, tensors, numbers, (q, k, v, d_out), constants)
    if groups != kv_heads:
        d_k, d_v = (x.unflatten(1, (kv_heads, -1)).sum(2).to(k.dtype) for x in (d_k, d_v))
    return d_k, d_v


def queries_by_block(blocks: Tensor, numbers: int) -> tuple[Tensor, Tensor]:
    """Which entries of ``blocks`` (B, G, T, n) name each of the ``numbers`` blocks of each group of each batch row.

    Two int64 tensors, ``order`` and ``bounds``: block b of group g of batch row c is named by the entries
    ``order[bounds[i]:bounds[i + 1]]``, i = (c·G + g)·numbers + b, in ascending order.
    """
    batch, groups = blocks.shape[:2]
    lists = batch * groups * numbers
    own = torch.arange(batch * groups, device=blocks.device).view(batch, groups, 1, 1) * numbers
    own = torch.where(
        (blocks >= 0) & (blocks < numbers), own + blocks, lists
    ).flatten()  # the rest comes last
    own, order = own.sort(stable=True)
    return order, torch.searchsorted(own, torch.arange(lists + 1, device=blocks.device))


def _arguments(q, k, v, blocks, block_size, scale, tile, backward: bool) -> tuple[tuple, dict]:
    """The numbers that all three kernels take, and their constants."""
    dim, value_dim, groups, kv_heads = q.shape[-1], v.shape[-1], blocks.shape[1], k.shape[1]
    heads = q.shape[1] // groups
    constants = {"BLOCK_D": launching.power_of_two(dim), "BLOCK_E": launching.power_of_two(value_dim)}
    largest = max(constants.values())
    tile = tile or tile_for(q.dtype, largest, heads, block_size, backward, launching.on_hip())
    tiles = triton.cdiv(block_size, tile.keys) if backward else triton.cdiv(heads, tile.rows)
    numbers = groups, kv_heads, heads, q.shape[2], k.shape[2], blocks.shape[3], block_size, tiles
    constants |= {"D": dim, "E": value_dim, "M": tile.rows, "N": tile.keys, "UPCAST": launching.interpreted()}
    constants |= {"num_warps": tile.warps, "num_stages": tile.stages}
    return (*numbers, scale * launching.LOG2E), constants


def _launch(kernel, programs, tensors, numbers, strided, constants) -> None:
    launching.check_grid(programs)
    if programs:
        with torch.cuda.device_of(tensors[0]):
            strides = [step for x in strided for step in x.stride()[:3]]
            kernel[(programs,)](*tensors, *numbers, *strides, **constants)
