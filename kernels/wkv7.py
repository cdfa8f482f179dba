"""RWKV-7's state evolution on the GPU, forward and backward: S ← S·diag(w) + (S·a)·bᵀ + v·kᵀ, y = S·r.

Rows of the state do not mix, so a program has one head and some of the rows, keeps them in registers in
float32, and walks through time. The forward pass stores the state at the beginning of every chunk of sixteen
steps; the backward pass starts from there, computes the states of the chunk once more, and walks back over
them. It never computes an earlier state from a later one, which would divide by the decay and amplify errors
by 1/w a step; a decay may even be 0. The plain-torch references are ``wkv7`` and, with the same chunks but
as matrix products, ``wkv7_chunked`` in ``dslib.attention.rwkv``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from dslib.kernels.launching import DTYPES, check_device, power_of_two
from torch import Tensor

CHUNK = 16
#: Rows of the state in one program, and the longest rows that its registers hold.
ROWS = 16
_LARGEST_KEYS = 128


@triton.jit
def _vector(pointer, offsets, mask):
    return tl.load(pointer + offsets, mask, 0.0).to(tl.float32)


@triton.jit
def _forward_kernel(
    R,
    W,
    K,
    V,
    A,
    B,
    first,
    Y,
    last,
    starts,
    time,
    keys,
    values,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    SAVE: tl.constexpr,
):
    # A head's tensors are stepped to in int64; one step and one state are small enough for int32.
    head = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, KEYS)
    d = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_key = c < keys
    is_value = d < values
    at_state = d[:, None] * keys + c[None, :]
    in_state = is_value[:, None] & is_key[None, :]
    state = tl.load(first + head * values * keys + at_state, in_state, 0.0)
    starts += head * tl.cdiv(time, CHUNK) * values * keys
    key, value = head * time * keys, head * time * values

    for t in range(time):
        if SAVE:
            if t % CHUNK == 0:
                tl.store(starts + at_state, state, in_state)
                starts += values * keys
        held = tl.sum(state * _vector(A + key, c, is_key)[None, :], axis=1)
        state = state * _vector(W + key, c, is_key)[None, :]
        state += held[:, None] * _vector(B + key, c, is_key)[None, :]
        state += _vector(V + value, d, is_value)[:, None] * _vector(K + key, c, is_key)[None, :]
        y = tl.sum(state * _vector(R + key, c, is_key)[None, :], axis=1)
        tl.store(Y + value + d, y.to(Y.dtype.element_ty), is_value)
        key += keys
        value += values
    tl.store(last + head * values * keys + at_state, state, in_state)


@triton.jit
def _backward_kernel(
    R,
    W,
    K,
    V,
    A,
    B,
    starts,
    states,
    dY,
    dlast,
    dR,
    dW,
    dK,
    dV,
    dA,
    dB,
    dfirst,
    time,
    keys,
    values,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    c = tl.arange(0, KEYS)
    d = part * ROWS + tl.arange(0, ROWS)
    is_key = c < keys
    is_value = d < values
    at_state = d[:, None] * keys + c[None, :]
    in_state = is_value[:, None] & is_key[None, :]
    size = values * keys
    chunks = tl.cdiv(time, CHUNK)
    starts += head * chunks * size
    states += head * CHUNK * size
    dstate = tl.load(dlast + head * size + at_state, in_state, 0.0)
    # Gradients of what belongs to the keys are summed over the parts of a head afterwards.
    to_part = part.to(tl.int64) * tl.num_programs(0) * time * keys

    for n in range(chunks):
        begin = (chunks - 1 - n) * CHUNK
        length = tl.minimum(CHUNK, time - begin)
        state = tl.load(starts + (chunks - 1 - n) * size + at_state, in_state, 0.0)
        key, value = (head * time + begin) * keys, (head * time + begin) * values
        for s in range(length):  # the states before each step, as the forward pass had them
            tl.store(states + s * size + at_state, state, in_state)
            held = tl.sum(state * _vector(A + key, c, is_key)[None, :], axis=1)
            state = state * _vector(W + key, c, is_key)[None, :]
            state += held[:, None] * _vector(B + key, c, is_key)[None, :]
            state += _vector(V + value, d, is_value)[:, None] * _vector(K + key, c, is_key)[None, :]
            key += keys
            value += values
        tl.debug_barrier()
        for s in range(length):
            key -= keys
            value -= values
            here = to_part + key + c
            dy = _vector(dY + value, d, is_value)
            tl.store(dR + here, tl.sum(dy[:, None] * state, axis=0), is_key)
            dstate += dy[:, None] * _vector(R + key, c, is_key)[None, :]
            dv = tl.sum(dstate * _vector(K + key, c, is_key)[None, :], axis=1)
            tl.store(dV + value + d, dv.to(dV.dtype.element_ty), is_value)
            v = _vector(V + value, d, is_value)
            tl.store(dK + here, tl.sum(dstate * v[:, None], axis=0), is_key)
            state = tl.load(states + (length - 1 - s) * size + at_state, in_state, 0.0)
            a = _vector(A + key, c, is_key)
            held = tl.sum(state * a[None, :], axis=1)
            tl.store(dB + here, tl.sum(dstate * held[:, None], axis=0), is_key)
            dheld = tl.sum(dstate * _vector(B + key, c, is_key)[None, :], axis=1)
            tl.store(dA + here, tl.sum(state * dheld[:, None], axis=0), is_key)
            tl.store(dW + here, tl.sum(dstate * state, axis=0), is_key)
            dstate = dstate * _vector(W + key, c, is_key)[None, :] + dheld[:, None] * a[None, :]
        tl.debug_barrier()
    tl.store(dfirst + head * size + at_state, dstate, in_state)


def supported(r: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes keys of this size and these dtypes; any size of values will do."""
    return r.shape[-1] <= _LARGEST_KEYS and r.dtype in DTYPES and v.dtype in DTYPES


def wkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """S ← S·diag(w) + (S·a)·bᵀ + v·kᵀ, y = S·r, with gradients for all of them (arXiv:2503.14456, §4.1).

    r, w, k, a, b: (batch, heads, time, K), K at most 128; v: (batch, heads, time, V); state: (batch, heads,
    V, K) float32. Each of the six is float16, bfloat16 or float32 for itself, on a GPU (on the CPU only in
    Triton's interpreter), of any strides. Returns (y, state): y with v's dtype, the state in float32;
    everything between is float32. For the backward pass a state a chunk and, while it runs, a chunk of
    states are kept.

    Raises TypeError for another dtype, ValueError for shapes that do not fit, and RuntimeError for the CPU
    without the interpreter.
    """
    _check(r, w, k, v, a, b, state)
    return _WKV7.apply(r, w, k, v, a, b, state)


class _WKV7(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, w, k, v, a, b, state):
        r, w, k, v, a, b, state = (x.contiguous() for x in (r, w, k, v, a, b, state))
        heads, (time, keys), values = r.shape[0] * r.shape[1], r.shape[2:], v.shape[-1]
        y, last, save = torch.empty_like(v), torch.empty_like(state), any(ctx.needs_input_grad)
        starts = state.new_empty(heads, triton.cdiv(time, CHUNK), values, keys) if save else state
        if last.numel():
            with torch.cuda.device_of(v):
                _forward_kernel[(heads, triton.cdiv(values, ROWS))](
                    *(r, w, k, v, a, b, state, y, last, starts, time, keys, values),
                    SAVE=save,
                    **_constants(keys),
                )
        ctx.save_for_backward(r, w, k, v, a, b, starts)
        return y, last

    @staticmethod
    def backward(ctx, dy, dlast):
        r, w, k, v, a, b, starts = ctx.saved_tensors
        heads, (time, keys), values = r.shape[0] * r.shape[1], r.shape[2:], v.shape[-1]
        parts = triton.cdiv(values, ROWS)
        dr, dw, dk, da, db = (starts.new_empty(parts, *r.shape) for _ in range(5))
        dv, dfirst = torch.empty_like(v), dlast.new_empty(dlast.shape)
        states = starts.new_empty(heads, CHUNK, values, keys)
        if dfirst.numel():
            with torch.cuda.device_of(v):
                _backward_kernel[(heads, parts)](
                    *(r, w, k, v, a, b, starts, states, dy.contiguous(), dlast.contiguous()),
                    *(dr, dw, dk, dv, da, db, dfirst, time, keys, values),
                    **_constants(keys),
                )
        sums = (d.sum(0).to(x.dtype) for d, x in ((dr, r), (dw, w), (dk, k), (da, a), (db, b)))
        dr, dw, dk, da, db = sums
        return dr, dw, dk, dv, da, db, dfirst


def _constants(keys: int) -> dict[str, int]:
    return {
        "CHUNK": CHUNK,
        "KEYS": power_of_two(keys),
        "ROWS": ROWS,
        "num_warps": 4,
        "num_stages": 1,
    }


def _check(r, w, k, v, a, b, state) -> None:
    tensors = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b, "state": state}
    for name, x in tensors.items():
        allowed = (torch.float32,) if name == "state" else DTYPES
        if not isinstance(x, Tensor) or x.dtype not in allowed:
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            known = "float32" if name == "state" else "float16, bfloat16 or float32"
            raise TypeError(f"{name} is {kind}; the kernel takes {known}")
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; the kernel takes four dimensions")
        if x.device != r.device:
            raise ValueError(f"{name} is on {x.device}; it must be on {r.device}, as r is")
        check_device(name, x)
    batch, heads, time, keys = r.shape
    if keys > _LARGEST_KEYS:
        raise ValueError(f"r has shape {tuple(r.shape)}; the kernel takes at most {_LARGEST_KEYS} keys")
    shapes = dict.fromkeys("wkab", tuple(r.shape))
    shapes |= {"v": (batch, heads, time, v.shape[-1]), "state": (batch, heads, v.shape[-1], keys)}
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}; it must be {shape}")
