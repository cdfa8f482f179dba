"""Symmetric products on the GPU: only the tiles on and below the diagonal are computed, and mirrored.

Half of the multiplications of X·Xᵀ are done twice, since (X·Xᵀ)ₘₙ = (X·Xᵀ)ₙₘ. One kernel computes
c·P·Qᵀ + b·P for a product known to be symmetric, accumulates in float32 and rounds once. The plain-torch
references are ``gram_matrix``, ``commuting_product`` and ``symmetric_polynomial`` in
``dslib.optim.newton_schulz``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_PRECISIONS = ("ieee", "tf32", "tf32x3")
_GRID_LIMIT = 2**31 - 1
#: The kernel steps through one tile, of up to 128 rows, in int32.
_ROW_LIMIT = 2**24


@dataclass(frozen=True)
class Tile:
    """How the work is cut: output tiles of ``size`` × ``size``, ``depth`` terms of the sum at a time,
    tile rows that are walked together, warps a tile and stages of the pipeline. The sizes are powers
    of two, at least 16."""

    size: int
    depth: int
    group: int = 8
    warps: int = 8
    stages: int = 3


def tile_for(dtype: torch.dtype, hip: bool = False) -> Tile:
    """The tile for operands of ``dtype``: one that fits every chip we compile for, 64 KiB of shared memory
    on gfx942 and no spilled registers anywhere. Not chosen by timings; ``tests/benchmarks/gpu_session.py``
    measures others beside it."""
    stages = 2 if hip else 3
    return Tile(64, 16, warps=4, stages=stages) if dtype == torch.float32 else Tile(128, 64, stages=stages)


@triton.jit
def _triangular(t):
    """Row and column of entry t of a lower triangle that is counted row by row: 0 | 1 2 | 3 4 5 | …"""
    row = ((tl.sqrt(8.0 * t + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The root is rounded; one step either way makes it exact.
    row = tl.where(row * (row + 1) // 2 > t, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= t, row + 1, row)
    return row, t - row * (row + 1) // 2


@triton.jit
def _lower_tile(t, tile_rows, GROUP: tl.constexpr):
    """Tile t of the lower triangle. GROUP tile rows are walked column by column, then their triangle at
    the diagonal: tiles that run at the same time then read the same rows and columns, from the cache."""
    in_order, _ = _triangular(t)
    first = in_order // GROUP * GROUP
    height = tl.minimum(GROUP, tile_rows - first)
    t -= first * (first + 1) // 2
    at_diagonal = t >= height * first
    below, across = _triangular(tl.maximum(t - height * first, 0))
    row = tl.where(at_diagonal, below, t % height)
    column = tl.where(at_diagonal, first + across, t // height)
    return first + row, column


@triton.jit
def _symmetric_kernel(
    P,
    Q,
    out,
    rows,
    depth,
    tile_rows,
    p_batch,
    p_row,
    q_batch,
    q_row,
    o_batch,
    o_row,
    b,
    c,
    SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    LINEAR: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tiles = tile_rows * (tile_rows + 1) // 2
    program = tl.program_id(0)
    # rows and depth are multiples of 16 (the launcher pads), and every row begins on one.
    # Whole tiles and matrices are stepped over in int64: a batch passes 2³¹ entries easily. Inside a tile
    # int32 is enough (the launcher sees to it) and halves the registers that addresses take.
    batch = (program // tiles).to(tl.int64)
    tile_row, tile_column = _lower_tile(program % tiles, tile_rows, GROUP)
    m0, n0 = tile_row.to(tl.int64) * SIZE, tile_column.to(tl.int64) * SIZE
    i, j, k = tl.arange(0, SIZE), tl.arange(0, SIZE), tl.arange(0, DEPTH)
    m, n = tile_row * SIZE + i, tile_column * SIZE + j

    P += batch * p_batch + m0 * p_row
    Q += batch * q_batch + n0 * q_row
    p, q = P, Q
    total = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        inside = k < depth - start
        left = tl.load(p + (i[:, None] * p_row + k[None, :]), (m < rows)[:, None] & inside[None, :], 0.0)
        right = tl.load(q + (j[None, :] * q_row + k[:, None]), (n < rows)[None, :] & inside[:, None], 0.0)
        if UPCAST:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        p += DEPTH
        q += DEPTH

    total = c * total
    inside = (m < rows)[:, None] & (n < rows)[None, :]
    if LINEAR:
        total += b * tl.load(P + n0 + (i[:, None] * p_row + j[None, :]), inside, 0.0).to(tl.float32)
    value = total.to(out.dtype.element_ty)
    out += batch * o_batch
    here = out + (m0 * o_row + n0) + (i[:, None] * o_row + j[None, :])
    mirror = out + (n0 * o_row + m0) + (j[None, :] * o_row + i[:, None])
    if tile_row == tile_column:
        # Here too the upper half is a copy of the lower: the result is symmetric to the last bit.
        lower = inside & (m[:, None] >= n[None, :])
        tl.store(here, value, lower)
        tl.store(mirror, value, lower)
    else:  # without the triangle's mask, which would store every entry by itself
        tl.store(here, value, inside)
        tl.store(mirror, value, inside)


def xxt(
    X: Tensor, out: Tensor | None = None, input_precision: str = "ieee", tile: Tile | None = None
) -> Tensor:
    """X·Xᵀ: (batch, M, K) → (batch, M, M), symmetric to the last bit.

    X is float16, bfloat16 or float32, on a GPU (on the CPU only in Triton's interpreter), with any
    sizes and strides; what is not contiguous along its rows or no multiple of 16 is copied first. ``out``:
    a tensor of the result's shape to fill, of X's dtype or float32, sharing no memory with X.
    ``input_precision``: how float32 is multiplied, ``"ieee"`` (torch's default) or, on tensor cores,
    ``"tf32"`` or ``"tf32x3"``. ``tile`` replaces :func:`tile_for`'s.

    Raises TypeError for another dtype, ValueError for shapes, memory or a precision that do not fit,
    and RuntimeError for a tensor on the CPU without the interpreter, or one that wants a gradient.
    """
    return _launch({"X": X}, 0.0, 1.0, out, input_precision, tile)


def commuting_product(
    P: Tensor, Q: Tensor, out: Tensor | None = None, input_precision: str = "ieee", tile: Tile | None = None
) -> Tensor:
    """P·Q of symmetric matrices that commute, whose product is symmetric too: (batch, M, M) all three.

    Neither property is checked: Q's rows are read where its columns are meant, and the lower triangle
    is mirrored. Arguments and errors as in :func:`xxt`.
    """
    return _launch({"P": P, "Q": Q}, 0.0, 1.0, out, input_precision, tile)


def symmetric_polynomial(
    A: Tensor,
    b: float,
    c: float,
    out: Tensor | None = None,
    input_precision: str = "ieee",
    tile: Tile | None = None,
) -> Tensor:
    """b·A + c·A² of symmetric A, (batch, M, M) → the same, rounded once (B of Moonlight eq. 2).

    A's symmetry is not checked: its rows are read where its columns are meant. As in torch.baddbmm,
    b = 0 leaves the linear term out with its NaN and infinities. Arguments and errors as in :func:`xxt`.
    """
    if isinstance(A, Tensor) and A.ndim == 3 and A.shape[1] != A.shape[2]:
        raise ValueError(f"A has shape {tuple(A.shape)}; a symmetric matrix is square")
    return _launch({"A": A}, b, c, out, input_precision, tile)


def _launch(operands: dict[str, Tensor], b, c, out, input_precision, tile) -> Tensor:
    interpreted = not isinstance(_symmetric_kernel, triton.JITFunction)
    _check(operands, input_precision, interpreted)
    first = next(iter(operands.values()))
    batch, rows = first.shape[:2]
    if out is not None:
        _check_out(out, operands)
    tile = tile or tile_for(first.dtype, hip=torch.version.hip is not None)
    tile_rows = triton.cdiv(rows, tile.size)
    programs = batch * (tile_rows * (tile_rows + 1) // 2)
    if programs > _GRID_LIMIT:
        raise ValueError(
            f"{next(iter(operands))} of shape {tuple(first.shape)} needs {programs} tiles, more than one "
            "launch can number; split the batch"
        )
    if programs == 0:
        return first.new_empty(batch, rows, rows) if out is None else out
    P, *rest = (_padded(operand) for operand in operands.values())
    Q = rest[0] if rest else P
    size = P.shape[1]
    result = out
    if out is None or size != rows or not _is_aligned(out):
        result = first.new_empty(batch, size, size, dtype=first.dtype if out is None else out.dtype)
    with torch.cuda.device_of(first):
        _symmetric_kernel[(programs,)](
            P,
            Q,
            result,
            size,
            P.shape[2],
            tile_rows,
            *P.stride()[:2],
            *Q.stride()[:2],
            *result.stride()[:2],
            float(b),
            float(c),
            SIZE=tile.size,
            DEPTH=tile.depth,
            GROUP=tile.group,
            LINEAR=b != 0,
            PRECISION=input_precision,
            UPCAST=interpreted,  # its bfloat16 arithmetic is wrong; products of float32 are not
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    if out is None:
        return result[:, :rows, :rows].contiguous()
    return out if result is out else out.copy_(result[:, :rows, :rows])


def _padded(x: Tensor) -> Tensor:
    """x itself where rows and columns are multiples of 16 and aligned, else a copy with zeros behind them,
    which add nothing to a sum. Single entries are loaded slowly, and their addresses spill registers."""
    batch, *sizes = x.shape
    rows, columns = (max(16, triton.cdiv(size, 16) * 16) for size in sizes)
    if [rows, columns] == sizes and _is_aligned(x):
        return x
    padded = x.new_zeros(batch, rows, columns)
    padded[:, : sizes[0], : sizes[1]] = x
    return padded


def _is_aligned(x: Tensor) -> bool:
    batch_step, row_step, step = x.stride()
    aligned = batch_step % 16 == 0 and row_step % 16 == 0 and x.data_ptr() % 16 == 0
    return step == 1 and row_step < _ROW_LIMIT and aligned


def _check(operands: dict[str, Tensor], input_precision: str, interpreted: bool) -> None:
    first = next(iter(operands.values()))
    for name, x in operands.items():
        if not isinstance(x, Tensor) or x.dtype not in _DTYPES:
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} is {kind}; the kernel takes float16, bfloat16 or float32")
        if x.ndim != 3 or x.shape[2] >= _ROW_LIMIT:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; the kernel takes (batch, rows, columns), "
                f"columns below {_ROW_LIMIT}"
            )
        if (x.shape, x.dtype, x.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}; "
                f"it must match {first.dtype} {tuple(first.shape)} on {first.device}"
            )
        if len(operands) > 1 and x.shape[1] != x.shape[2]:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; a symmetric matrix is square")
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"{name} wants a gradient, and the kernel has no backward; detach it first")
        if x.device.type == "cpu" and not interpreted:
            raise RuntimeError(
                f"{name} is on the CPU, where Triton runs only in its interpreter: set TRITON_INTERPRET=1 "
                "before Python starts, move the tensors to a GPU, or choose dslib.kernels.use('torch')"
            )
    if input_precision not in _PRECISIONS:
        known = ", ".join(map(repr, _PRECISIONS))
        raise ValueError(f"input_precision={input_precision!r} is unknown; use {known}")


def _check_out(out: Tensor, operands: dict[str, Tensor]) -> None:
    first = next(iter(operands.values()))
    shape = (*first.shape[:2], first.shape[1])
    if out.shape != shape or out.device != first.device or out.dtype not in (first.dtype, torch.float32):
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; "
            f"it must be {first.dtype} or float32, {shape} on {first.device}"
        )
    if any(step == 0 and size > 1 for step, size in zip(out.stride(), shape, strict=True)):
        raise ValueError(
            f"out has strides {out.stride()}: several of its entries are one; pass a full tensor"
        )
    for name, operand in operands.items():
        if out.numel() and operand.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
            raise ValueError(f"out shares memory with {name}, which is still read; pass another tensor")
