"""Attention of each query to chosen entries of a cache that all heads share: DeepSeek Sparse Attention in MQA mode.

One program has one query of up to M heads, and gathers the entries that the indexer chose for it (DeepSeek-V3.2,
arXiv:2512.02556, §2.1). An entry is key and value at once: its first ``value_dim`` numbers are the value, and the
rest, in MLA the part with the rotary embedding, is key alone; the two are multiplied apart, so that 576 = 512 + 64
need not be padded to 1024. The gradient of the entries is summed in memory by float32 atomics, in whatever order
the programs run: two runs may differ in the last bits. The plain-torch reference is ``sparse_attention`` in
``dslib.attention.dsa``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from dslib.kernels import launching
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Longest value, and longest rest of a key: a tile's rows stay in registers.
VALUE_LIMIT, REST_LIMIT = 512, 256


@dataclass(frozen=True)
class Tile:
    """How the work is cut: ``heads`` × ``keys`` scores at a time, powers of two, at least 16; warps a program and
    stages of the pipeline."""

    heads: int
    keys: int
    warps: int = 4
    stages: int = 1


def tile_for(dtype: torch.dtype, dim: int, heads: int, backward: bool = False, hip: bool = False) -> Tile:
    """The tile for entries of up to ``dim`` numbers, padding counted, and ``heads`` heads: one that fits every chip
    we compile for, and spills nothing in 16 bits; long float32 entries spill, and are slow. Not chosen by timings."""
    if dim <= 128 and dtype != torch.float32:
        return Tile(launching.power_of_two(min(heads, 64)), 32)
    most = 16 if backward or hip or dim > 640 else 32
    return Tile(launching.power_of_two(min(heads, most)), 16, warps=4 if backward and hip else 8)


@triton.jit
def _forward_kernel(
    q,
    kv,
    indices,
    out,
    lse,
    heads,
    queries,
    keys,
    slots,
    tiles,
    scale,
    q_batch,
    q_head,
    q_row,
    kv_batch,
    kv_row,
    E: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # An entry is E numbers of key and value, then REST of key alone. scale is in units of log 2.
    query_number = tl.program_id(0) // tiles
    t, batch = (query_number % queries).to(tl.int64), (query_number // queries).to(tl.int64)
    head = (tl.program_id(0) % tiles * M + tl.arange(0, M)).to(tl.int64)
    j, e, r = tl.arange(0, N), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_R)
    real = head < heads

    q += batch * q_batch + t * q_row + head[:, None] * q_head
    query = tl.load(q + e[None, :], real[:, None] & (e < E)[None, :], 0.0)
    if UPCAST:
        query = query.to(tl.float32)
    if REST > 0:
        rest = tl.load(q + (E + r)[None, :], real[:, None] & (r < REST)[None, :], 0.0)
        if UPCAST:
            rest = rest.to(tl.float32)
    kv += batch * kv_batch
    indices += query_number.to(tl.int64) * slots
    highest = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    mean = tl.zeros((M, BLOCK_E), tl.float32)
    for slot in range(0, slots, N):
        place = tl.load(indices + slot + j, slot + j < slots, -1).to(tl.int64)
        seen = (place >= 0) & (place < keys)
        value = tl.load(kv + (place[:, None] * kv_row + e[None, :]), seen[:, None] & (e < E)[None, :], 0.0)
        if UPCAST:
            value = value.to(tl.float32)
        score = tl.dot(query, tl.trans(value), input_precision="ieee")
        if REST > 0:
            key = tl.load(
                kv + (place[None, :] * kv_row + (E + r)[:, None]), seen[None, :] & (r < REST)[:, None], 0.0
            )
            if UPCAST:
                key = key.to(tl.float32)
            score = tl.dot(rest, key, score, input_precision="ieee")
        score = tl.where(seen[None, :], score * scale, -float("inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # no key yet: −inf − −inf would be NaN
        weight = tl.exp2(score - shift[:, None])
        shrink = tl.exp2(highest - shift)
        total = total * shrink + tl.sum(weight, 1)
        mean = tl.dot(weight.to(value.dtype), value, mean * shrink[:, None], input_precision="ieee")
        highest = higher

    empty = total == 0.0  # no key at all: 0, and exp2(score − inf) = 0 makes its gradients 0 too
    row = (batch * heads + head) * queries + t
    mean = (mean / tl.where(empty, 1.0, total)[:, None]).to(out.dtype.element_ty)
    tl.store(out + (row[:, None] * E + e[None, :]), mean, real[:, None] & (e < E)[None, :])
    tl.store(lse + row, tl.where(empty, float("inf"), highest + tl.log2(tl.where(empty, 1.0, total))), real)


@triton.jit
def _gradient_kernel(
    q,
    kv,
    indices,
    lse,
    delta,
    d_out,
    d_q,
    d_kv,
    heads,
    queries,
    keys,
    slots,
    tiles,
    scale,
    q_batch,
    q_head,
    q_row,
    kv_batch,
    kv_row,
    o_batch,
    o_head,
    o_row,
    E: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # The weights again, P = 2^(score − lse), dS = P ∘ (dO·Vᵀ − Δ); dQ = dS·K, dK = dSᵀ·Q, and Pᵀ·dO on its values.
    query_number = tl.program_id(0) // tiles
    t, batch = (query_number % queries).to(tl.int64), (query_number // queries).to(tl.int64)
    head = (tl.program_id(0) % tiles * M + tl.arange(0, M)).to(tl.int64)
    j, e, r = tl.arange(0, N), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_R)
    real = head < heads
    row = (batch * heads + head) * queries + t

    q += batch * q_batch + t * q_row + head[:, None] * q_head
    d_out += batch * o_batch + t * o_row + head[:, None] * o_head
    query = tl.load(q + e[None, :], real[:, None] & (e < E)[None, :], 0.0)
    d_mean = tl.load(d_out + e[None, :], real[:, None] & (e < E)[None, :], 0.0)
    if UPCAST:
        query, d_mean = query.to(tl.float32), d_mean.to(tl.float32)
    if REST > 0:
        rest = tl.load(q + (E + r)[None, :], real[:, None] & (r < REST)[None, :], 0.0)
        if UPCAST:
            rest = rest.to(tl.float32)
        d_rest = tl.zeros((M, BLOCK_R), tl.float32)
    log_total = tl.load(lse + row, real, float("inf"))
    shared = tl.load(delta + row, real, 0.0)
    kv += batch * kv_batch
    d_kv += batch * keys * (E + REST)
    indices += query_number.to(tl.int64) * slots
    d_query = tl.zeros((M, BLOCK_E), tl.float32)
    for slot in range(0, slots, N):
        place = tl.load(indices + slot + j, slot + j < slots, -1).to(tl.int64)
        seen = (place >= 0) & (place < keys)
        inside = seen[:, None] & (e < E)[None, :]
        value = tl.load(kv + (place[:, None] * kv_row + e[None, :]), inside, 0.0)
        if UPCAST:
            value = value.to(tl.float32)
        score = tl.dot(query, tl.trans(value), input_precision="ieee")
        if REST > 0:
            inside_rest = seen[:, None] & (r < REST)[None, :]
            key = tl.load(kv + (place[:, None] * kv_row + (E + r)[None, :]), inside_rest, 0.0)
            if UPCAST:
                key = key.to(tl.float32)
            score = tl.dot(rest, tl.trans(key), score, input_precision="ieee")
        score = tl.where(seen[None, :], score * scale, -float("inf"))
        weight = tl.exp2(score - log_total[:, None])
        d_weight = tl.dot(d_mean, tl.trans(value), input_precision="ieee")
        # back from units of log 2
        d_score = (weight * (d_weight - shared[:, None]) * (scale * 0.6931471805599453)).to(value.dtype)
        d_query = tl.dot(d_score, value, d_query, input_precision="ieee")
        d_value = tl.dot(tl.trans(d_score), query, input_precision="ieee")
        d_value = tl.dot(tl.trans(weight.to(value.dtype)), d_mean, d_value, input_precision="ieee")
        here = d_kv + place[:, None] * (E + REST)
        tl.atomic_add(here + e[None, :], d_value, inside, sem="relaxed")
        if REST > 0:
            d_rest = tl.dot(d_score, key, d_rest, input_precision="ieee")
            d_key = tl.dot(tl.trans(d_score), rest, input_precision="ieee")
            tl.atomic_add(here + (E + r)[None, :], d_key, inside_rest, sem="relaxed")
    d_q += row[:, None] * (E + REST)
    tl.store(d_q + e[None, :], d_query.to(d_q.dtype.element_ty), real[:, None] & (e < E)[None, :])
    if REST > 0:
        tl.store(d_q + (E + r)[None, :], d_rest.to(d_q.dtype.element_ty), real[:, None] & (r < REST)[None, :])


def sparse_mqa(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    value_dim: int,
    scale: float | None = None,
    return_lse: bool = False,
    tile: Tile | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of all heads of a query to the cache entries of its row of ``indices``, differentiable once.

    q: (B, H, T, D); kv: (B, S, D), both float16, bfloat16 or float32 on a GPU (on the CPU only in Triton's
    interpreter), with any strides; values are kv[..., :value_dim]. indices: (B, T, K) int32 or int64: the only
    entries that a query sees, wherever they stand; −1, or a number from S on, is an empty slot, and an entry named
    twice counts twice. ``scale`` is 1/√D. Result: (B, H, T, value_dim), q's dtype, 0 for a query with no entry;
    the sums and the softmax are float32. With ``return_lse`` also log Σ exp(score), (B, H, T) float32, without a
    gradient and +inf for such a query. ``tile`` replaces :func:`tile_for`'s.

    Raises TypeError for another dtype, ValueError for sizes that do not fit, a value_dim past 512 or more than 256
    numbers beside it, and RuntimeError for a tensor on the CPU without the interpreter.
    """
    sizes = launching.check_tensors({"q": (q, "B H T D"), "kv": (kv, "B S D")})
    launching.check_indices("indices", indices, "B T K", sizes, like=q)
    launching.check_count("value_dim", value_dim)
    dim = sizes["D"]
    if not dim - REST_LIMIT <= value_dim <= min(dim, VALUE_LIMIT):
        raise ValueError(
            f"value_dim={value_dim} of D = {dim} numbers; the kernel takes values of up to {VALUE_LIMIT} numbers, "
            f"and up to {REST_LIMIT} beside them"
        )
    out, lse = _SparseMQA.apply(q, kv, indices, value_dim, launching.scale_of(scale, dim), tile)
    return (out, lse / launching.LOG2E) if return_lse else out


class _SparseMQA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, indices, value_dim, scale, tile):
        q, kv, indices = launching.rows(q), launching.rows(kv), indices.contiguous()
        batch, heads, queries, _ = q.shape
        out = q.new_empty(batch, heads, queries, value_dim)
        lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
        ctx.save_for_backward(q, kv, indices, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.tile = scale, tile
        tensors = q, kv, indices, out, lse
        _launch(
            _forward_kernel, tensors, (q, kv, indices), (*q.stride()[:3], *kv.stride()[:2]), ctx, value_dim
        )
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, _):
        q, kv, indices, out, lse = ctx.saved_tensors
        d_out = launching.rows(d_out)
        delta = (out.float() * d_out.float()).sum(-1)
        d_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        d_kv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        tensors = q, kv, indices, lse, delta, d_out, d_q, d_kv
        strides = *q.stride()[:3], *kv.stride()[:2], *d_out.stride()[:3]
        _launch(_gradient_kernel, tensors, (q, kv, indices), strides, ctx, out.shape[-1], backward=True)
        return d_q, d_kv.to(kv.dtype), None, None, None, None


def _launch(kernel, tensors, inputs, strides, ctx, value_dim, backward: bool = False) -> None:
    q, kv, indices = inputs
    batch, heads, queries, dim = q.shape
    constants = {"E": value_dim, "REST": dim - value_dim, "UPCAST": launching.interpreted()}
    constants |= {
        "BLOCK_E": launching.power_of_two(value_dim),
        "BLOCK_R": launching.power_of_two(dim - value_dim),
    }
    padded = constants["BLOCK_E"] + constants["BLOCK_R"]
    tile = ctx.tile or tile_for(q.dtype, padded, heads, backward, launching.on_hip())
    tiles = triton.cdiv(heads, tile.heads)
    programs = batch * queries * tiles
    launching.check_grid(programs)
    if programs:
        constants |= {"M": tile.heads, "N": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages}
        numbers = heads, queries, kv.shape[1], indices.shape[2], tiles, ctx.scale * launching.LOG2E
        with torch.cuda.device_of(q):
            kernel[(programs,)](*tensors, *numbers, *strides, **constants)
