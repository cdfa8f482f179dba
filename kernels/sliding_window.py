"""Attention to the last ``window`` keys, forward and backward: only tiles that a window reaches are read.

The softmax is kept running over the tiles of keys (FlashAttention-2, arXiv:2307.08691, §3.1), in float32; the
backward pass computes the weights again from the saved log of their sum, once by tiles of queries for dq and once
by tiles of keys for dk and dv, so nothing is added up in memory and two runs give the same bits. The plain-torch
reference is ``sliding_window_attention`` in ``dslib.attention.sliding_window``.
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
    """How the work is cut: ``queries`` × ``keys`` scores at a time, powers of two, at least 16; warps a
    program and stages of the pipeline."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2


def tile_for(dtype: torch.dtype, dim: int, kernel: str, hip: bool = False) -> Tile:
    """The tile for vectors of up to ``dim`` entries in the ``kernel`` of the result ("forward") or of the gradient
    of "queries" or "keys": one that fits every chip we compile for, and spills nothing in 16 bits. Not chosen by
    timings; ``tests/benchmarks/gpu_session.py`` takes them."""
    if dtype == torch.float32 and not hip:  # no matrix cores: a thread's part of a product is all registers
        return Tile(16, 32, warps=8, stages=1) if kernel == "keys" else Tile(32, 16, warps=8, stages=1)
    if dtype == torch.float32 or dim > 128:
        return Tile(16 if kernel == "keys" else 32, 32, warps=4 if hip else 8, stages=1)
    if hip:
        return Tile(16, 64, stages=1) if kernel == "keys" else Tile(128, 32, warps=8, stages=1)
    return Tile({"forward": 128, "queries": 64, "keys": 32}[kernel], 64, warps=8, stages=2)


@triton.jit
def _forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    heads,
    group,
    queries,
    keys,
    window,
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
    # One program: M queries of one head. scale is in units of log 2; D and E are the entries of k and v.
    sequence = tl.program_id(0) // tiles
    batch, head = (sequence // heads).to(tl.int64), (sequence % heads).to(tl.int64)
    first = tl.program_id(0) % tiles * M
    i, j, d, e = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    position = keys - queries + first + i
    start = tl.maximum(keys - queries + first - window + 1, 0)
    stop = tl.minimum(keys - queries + first + M, keys)

    q += batch * q_batch + head * q_head + first.to(tl.int64) * q_row
    k += batch * k_batch + head // group * k_head + start.to(tl.int64) * k_row
    v += batch * v_batch + head // group * v_head + start.to(tl.int64) * v_row
    real = first + i < queries
    query = tl.load(q + (i[:, None] * q_row + d[None, :]), real[:, None] & (d < D)[None, :], 0.0)
    if UPCAST:
        query = query.to(tl.float32)
    highest = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    mean = tl.zeros((M, BLOCK_E), tl.float32)
    for n in range(start, stop, N):
        near = n + j < stop
        key = tl.load(k + (j[None, :] * k_row + d[:, None]), near[None, :] & (d < D)[:, None], 0.0)
        value = tl.load(v + (j[:, None] * v_row + e[None, :]), near[:, None] & (e < E)[None, :], 0.0)
        if UPCAST:
            key, value = key.to(tl.float32), value.to(tl.float32)
        age = position[:, None] - (n + j)[None, :]
        score = tl.dot(query, key, input_precision="ieee") * scale
        score = tl.where((age >= 0) & (age < window), score, -float("inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # no key yet: −inf − −inf would be NaN
        weight = tl.exp2(score - shift[:, None])
        shrink = tl.exp2(highest - shift)
        total = total * shrink + tl.sum(weight, 1)
        mean = tl.dot(weight.to(value.dtype), value, mean * shrink[:, None], input_precision="ieee")
        highest = higher
        k += N * k_row
        v += N * v_row

    total = tl.where(real, total, 1.0)
    out += (sequence.to(tl.int64) * queries + first) * E
    mean = (mean / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (i[:, None] * E + e[None, :]), mean, real[:, None] & (e < E)[None, :])
    tl.store(lse + sequence.to(tl.int64) * queries + first + i, highest + tl.log2(total), real)


@triton.jit
def _query_gradient_kernel(
    q,
    k,
    v,
    lse,
    delta,
    d_out,
    d_q,
    heads,
    group,
    queries,
    keys,
    window,
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
    sequence = tl.program_id(0) // tiles
    batch, head = (sequence // heads).to(tl.int64), (sequence % heads).to(tl.int64)
    first = tl.program_id(0) % tiles * M
    i, j, d, e = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    position = keys - queries + first + i
    start = tl.maximum(keys - queries + first - window + 1, 0)
    stop = tl.minimum(keys - queries + first + M, keys)

    q += batch * q_batch + head * q_head + first.to(tl.int64) * q_row
    d_out += batch * o_batch + head * o_head + first.to(tl.int64) * o_row
    k += batch * k_batch + head // group * k_head + start.to(tl.int64) * k_row
    v += batch * v_batch + head // group * v_head + start.to(tl.int64) * v_row
    row = sequence.to(tl.int64) * queries + first
    real = first + i < queries
    query = tl.load(q + (i[:, None] * q_row + d[None, :]), real[:, None] & (d < D)[None, :], 0.0)
    d_mean = tl.load(d_out + (i[:, None] * o_row + e[None, :]), real[:, None] & (e < E)[None, :], 0.0)
    if UPCAST:
        query, d_mean = query.to(tl.float32), d_mean.to(tl.float32)
    log_total = tl.load(lse + row + i, real, float("inf"))
    shared = tl.load(delta + row + i, real, 0.0)
    d_query = tl.zeros((M, BLOCK_D), tl.float32)
    for n in range(start, stop, N):
        near = n + j < stop
        key = tl.load(k + (j[:, None] * k_row + d[None, :]), near[:, None] & (d < D)[None, :], 0.0)
        value = tl.load(v + (j[:, None] * v_row + e[None, :]), near[:, None] & (e < E)[None, :], 0.0)
        if UPCAST:
            key, value = key.to(tl.float32), value.to(tl.float32)
        age = position[:, None] - (n + j)[None, :]
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where((age >= 0) & (age < window), score, -float("inf"))
        weight = tl.exp2(score - log_total[:, None])
        d_weight = tl.dot(d_mean, tl.trans(value), input_precision="ieee")
        d_score = weight * (d_weight - shared[:, None])
        d_query = tl.dot(d_score.to(key.dtype), key, d_query, input_precision="ieee")
        k += N * k_row
        v += N * v_row
    d_query *= scale * 0.6931471805599453  # back from units of log 2
    d_q += row * D
    tl.store(
        d_q + (i[:, None] * D + d[None, :]),
        d_query.to(d_q.dtype.element_ty),
        real[:, None] & (d < D)[None, :],
    )


@triton.jit
def _key_gradient_kernel(
    q,
    k,
    v,
    lse,
    delta,
    d_out,
    d_k,
    d_v,
    kv_heads,
    group,
    queries,
    keys,
    window,
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
    # One program: N keys of one kv head, and all queries of the heads of its group that see one of them.
    sequence = tl.program_id(0) // tiles
    batch, kv_head = (sequence // kv_heads).to(tl.int64), (sequence % kv_heads).to(tl.int64)
    first = tl.program_id(0) % tiles * N
    i, j, d, e = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    # Query t stands at keys − queries + t.
    start = tl.maximum(first - (keys - queries), 0)
    stop = tl.minimum(first - (keys - queries) + N - 1 + window, queries)

    k += batch * k_batch + kv_head * k_head + first.to(tl.int64) * k_row
    v += batch * v_batch + kv_head * v_head + first.to(tl.int64) * v_row
    real = first + j < keys
    key = tl.load(k + (j[:, None] * k_row + d[None, :]), real[:, None] & (d < D)[None, :], 0.0)
    value = tl.load(v + (j[:, None] * v_row + e[None, :]), real[:, None] & (e < E)[None, :], 0.0)
    if UPCAST:
        key, value = key.to(tl.float32), value.to(tl.float32)
    d_key = tl.zeros((N, BLOCK_D), tl.float32)
    d_value = tl.zeros((N, BLOCK_E), tl.float32)
    for member in range(0, group):
        head = kv_head * group + member
        row = (batch * kv_heads * group + head) * queries + start
        q_here = q + batch * q_batch + head * q_head + start.to(tl.int64) * q_row
        o_here = d_out + batch * o_batch + head * o_head + start.to(tl.int64) * o_row
        lse_here, delta_here = lse + row, delta + row
        for t in range(start, stop, M):
            near = t + i < stop
            query = tl.load(q_here + (i[:, None] * q_row + d[None, :]), near[:, None] & (d < D)[None, :], 0.0)
            d_mean = tl.load(
                o_here + (i[:, None] * o_row + e[None, :]), near[:, None] & (e < E)[None, :], 0.0
            )
            log_total = tl.load(lse_here + i, near, float("inf"))
            shared = tl.load(delta_here + i, near, 0.0)
            if UPCAST:
                query, d_mean = query.to(tl.float32), d_mean.to(tl.float32)
            age = (keys - queries + t + i)[None, :] - (first + j)[:, None]
            score = tl.dot(key, tl.trans(query), input_precision="ieee") * scale
            score = tl.where((age >= 0) & (age < window), score, -float("inf"))
            weight = tl.exp2(score - log_total[None, :])
            d_value = tl.dot(weight.to(d_mean.dtype), d_mean, d_value, input_precision="ieee")
            d_weight = tl.dot(value, tl.trans(d_mean), input_precision="ieee")
            d_score = weight * (d_weight - shared[None, :])
            d_key = tl.dot(d_score.to(query.dtype), query, d_key, input_precision="ieee")
            q_here += M * q_row
            o_here += M * o_row
            lse_here += M
            delta_here += M
    d_key *= scale * 0.6931471805599453
    row = sequence.to(tl.int64) * keys + first
    d_k += row * D
    d_v += row * E
    real = real[:, None]
    tl.store(d_k + (j[:, None] * D + d[None, :]), d_key.to(d_k.dtype.element_ty), real & (d < D)[None, :])
    tl.store(d_v + (j[:, None] * E + e[None, :]), d_value.to(d_v.dtype.element_ty), real & (e < E)[None, :])


def sliding_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    scale: float | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Causal attention of each query to the last ``window`` keys, its own position's included, differentiable once.

    q: (B, H, T, D); k: (B, Hkv, S, D); v: (B, Hkv, S, E), all float16, bfloat16 or float32 on a GPU (on the CPU
    only in Triton's interpreter), with any strides; H a multiple of Hkv, S ≥ T: the queries are the last T
    positions. ``scale`` is 1/√D. Result: (B, H, T, E), q's dtype; the sums and the softmax are float32.
    ``tile`` replaces :func:`tile_for`'s.

    Raises TypeError for another dtype, ValueError for sizes that do not fit, a window below 1 or D or E past 256,
    and RuntimeError for a tensor on the CPU without the interpreter.
    """
    sizes = launching.check_tensors({"q": (q, "B H T D"), "k": (k, "B Hkv S D"), "v": (v, "B Hkv S E")})
    launching.check_dims(sizes, {"D": DIM_LIMIT, "E": DIM_LIMIT})
    launching.check_groups(sizes["H"], sizes["Hkv"])
    launching.check_queries(sizes["T"], sizes["S"])
    launching.check_count("window", window)
    return _SlidingWindow.apply(q, k, v, min(window, sizes["S"]), launching.scale_of(scale, sizes["D"]), tile)


class _SlidingWindow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, window, scale, tile):
        q, k, v = map(launching.rows, (q, k, v))
        (batch, heads, queries, _), (_, kv_heads, keys, value_dim) = q.shape, v.shape
        out = q.new_empty(batch, heads, queries, value_dim)
        lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.window, ctx.scale, ctx.tile = window, scale, tile
        constants = _constants(q, v, tile, "forward")
        tiles = triton.cdiv(queries, constants["M"])
        _launch(
            _forward_kernel,
            batch * heads * tiles,
            (q, k, v, out, lse),
            (heads, heads // max(kv_heads, 1), queries, keys, window, tiles, scale * launching.LOG2E),
            (q, k, v),
            constants,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        d_out = launching.rows(d_out)
        (batch, heads, queries, _), (_, kv_heads, keys, _) = q.shape, v.shape
        delta = (out.float() * d_out.float()).sum(-1)
        d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        group, scale = heads // max(kv_heads, 1), ctx.scale * launching.LOG2E
        if ctx.needs_input_grad[0]:
            constants = _constants(q, v, ctx.tile, "queries")
            tiles = triton.cdiv(queries, constants["M"])
            _launch(
                _query_gradient_kernel,
                batch * heads * tiles,
                (q, k, v, lse, delta, d_out, d_q),
                (heads, group, queries, keys, ctx.window, tiles, scale),
                (q, k, v, d_out),
                constants,
            )
        if any(ctx.needs_input_grad[1:3]):
            constants = _constants(q, v, ctx.tile, "keys")
            tiles = triton.cdiv(keys, constants["N"])
            _launch(
                _key_gradient_kernel,
                batch * kv_heads * tiles,
                (q, k, v, lse, delta, d_out, d_k, d_v),
                (kv_heads, group, queries, keys, ctx.window, tiles, scale),
                (q, k, v, d_out),
                constants,
            )
        return d_q, d_k, d_v, None, None, None


def _constants(q: Tensor, v: Tensor, tile: Tile | None, kernel: str) -> dict:
    dim, value_dim = q.shape[-1], v.shape[-1]
    blocks = {"BLOCK_D": launching.power_of_two(dim), "BLOCK_E": launching.power_of_two(value_dim)}
    tile = tile or tile_for(q.dtype, max(blocks.values()), kernel, launching.on_hip())
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "UPCAST": launching.interpreted()}
    return {"D": dim, "E": value_dim, **blocks, "M": tile.queries, "N": tile.keys, **options}


def _launch(kernel, programs, tensors, numbers, strided, constants) -> None:
    launching.check_grid(programs)
    if programs:
        with torch.cuda.device_of(tensors[0]):
            strides = [step for x in strided for step in x.stride()[:3]]
            kernel[(programs,)](*tensors, *numbers, *strides, **constants)
