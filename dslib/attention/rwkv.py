"""The linear recurrences of RWKV-4 and RWKV-7, step by step and in a form that trains in parallel.

RWKV-4 (arXiv:2305.13048) keeps a weighted average a channel; RWKV-7 (arXiv:2503.14456) a matrix a head, into
which a delta rule writes. Both read a sequence of any length with a state of constant size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from dslib import kernels

#: exp of this, positive or negative, is a float32 far from overflow and underflow.
_LARGEST_EXPONENT = {torch.float32: 60.0, torch.float64: 600.0}


def wkv4(w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """RWKV-4's weighted average of the values so far (arXiv:2305.13048, eq. 16), as a recurrence.

    wkv_t = (Σ_{i<t} e^(−(t−1−i)w + k_i) v_i + e^(u + k_t) v_t) / (the same sum without v)

    w: (channels,) ≥ 0, the decay a step; u: (channels,), what the present token weighs instead;
    k, v: (batch, time, channels) → (wkv, state), wkv with v's shape, state (batch, 3, channels): numerator,
    denominator and the exponent that both are divided by. That exponent, the largest so far, is what keeps
    e^k from overflowing whatever k is (as in the paper's appendix). ``state=None`` is a beginning.

    Raises ValueError for shapes that do not fit.
    """
    if k.ndim != 3 or k.shape != v.shape:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must both be (batch, time, channels)")
    batch, time, channels = k.shape
    for name, x in (("w", w), ("u", u)):
        if x.shape != (channels,):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; one number a channel is ({channels},)")
    if state is None:
        state = k.new_zeros(batch, 3, channels)
        state[:, 2] = -math.inf
    elif state.shape != (batch, 3, channels):
        raise ValueError(f"state has shape {tuple(state.shape)}; it must be {(batch, 3, channels)}")
    top, bottom, largest = state.unbind(1)
    outputs = []
    for t in range(time):
        here = torch.maximum(largest, u + k[:, t])
        old, new = (largest - here).exp(), (u + k[:, t] - here).exp()
        outputs.append((old * top + new * v[:, t]) / (old * bottom + new))
        kept = torch.maximum(largest - w, k[:, t])
        old, new = (largest - w - kept).exp(), (k[:, t] - kept).exp()
        top, bottom, largest = old * top + new * v[:, t], old * bottom + new, kept
    out = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v)
    return out, torch.stack((top, bottom, largest), dim=1)


def wkv4_parallel(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """:func:`wkv4` from the beginning as one softmax over (time, time) exponents a channel: what the formula
    says, without a state. O(time²·channels) memory: for checking and for looking at the weights."""
    return torch.einsum("btic,bic->btc", wkv4_weights(w, u, k), v)


def wkv4_weights(w: Tensor, u: Tensor, k: Tensor) -> Tensor:
    """The weights that :func:`wkv4` averages with: (batch, time, time, channels), token t's of token i ≤ t,
    summing to 1 over i. k: (batch, time, channels)."""
    time = k.shape[1]
    steps = torch.arange(time, device=k.device)
    passed = (steps[:, None] - 1 - steps).unsqueeze(-1)  # steps that token i's contribution has decayed
    exponent = torch.where(passed < 0, u, -passed * w) + k.unsqueeze(1)
    return exponent.masked_fill(passed < -1, -math.inf).softmax(dim=2)


def wkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """RWKV-7's state evolution (arXiv:2503.14456, §4.1), one step after the other: the reference.

        S ← S·diag(w) + (S·a)·bᵀ + v·kᵀ,    y = S·r (reads the updated S)

    r, w, k, a, b: (batch, heads, time, K); v: (batch, heads, time, V); the decay w lies in (0, 1]. RWKV-7
    takes a = −κ̂ and b = κ̂ ⊙ η: first what the state holds under the key κ̂ is taken away, as far as the
    learning rate η says, then v is written under k. state: (batch, heads, V, K), None for a beginning.

    Returns (y, state): y with v's shape and dtype, state in float32 (float64 for float64 input), whatever
    the inputs are. Raises ValueError for shapes that do not fit.
    """
    state = _checked_state(r, w, k, v, a, b, state)
    dtype, kind = v.dtype, state.dtype
    r, w, k, v, a, b = (x.to(kind) for x in (r, w, k, v, a, b))
    outputs = []
    for t in range(v.shape[2]):
        held = state @ a[:, :, t, :, None]
        state = state * w[:, :, t, None] + held @ b[:, :, t, None] + v[:, :, t, :, None] @ k[:, :, t, None]
        outputs.append((state @ r[:, :, t, :, None]).squeeze(-1))
    y = torch.stack(outputs, dim=2) if outputs else torch.zeros_like(v)
    return y.to(dtype), state


def wkv7_chunked(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None = None,
    chunk: int = 16,
) -> tuple[Tensor, Tensor]:
    """:func:`wkv7`, ``chunk`` steps at a time: matrix products inside a chunk, and a loop over chunks only.

    Inside a chunk that begins with S₀ let P_t be the product of its decays up to t. What step t finds under
    its key, u_t = S_{t−1}·a_t, depends on the u before it:

        (I − A)·U = Ã·S₀ᵀ + D·V,    A_ti = ã_t·b̃_i,  D_ti = ã_t·k̃_i for i < t,
        ã_t = P_{t−1} ⊙ a_t,  b̃_i = b_i / P_i,  k̃_i = k_i / P_i

    a triangular system, solved for all chunks at once (the WY form of DeltaNet, arXiv:2406.06484, with
    decay); then S₀ → S is one affine map a chunk. The states between chunks are kept for the backward
    pass, and never computed back from later ones, which would divide by the decay and amplify errors.

    Any time, also no multiple of ``chunk``; a NaN spreads over its whole chunk. Arguments, results and
    errors as :func:`wkv7`; on a GPU, or where ``dslib.kernels.use("triton")`` says so, a Triton kernel
    computes the same, whatever ``chunk`` is. Raises ValueError, too, when the decays of a chunk multiply to
    less than the dtype can invert.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1")
    state = _checked_state(r, w, k, v, a, b, state)
    if v.numel() and kernels.attention_implementation(v) == "triton":
        from dslib.kernels import wkv7 as kernel

        if kernel.supported(r, v):
            return kernel.wkv7(r, w, k, v, a, b, state)
    smallest = w.amin().item() if w.numel() else 1.0
    if smallest <= 0 or -math.log(min(smallest, 1.0)) * chunk > _LARGEST_EXPONENT[state.dtype]:
        raise ValueError(
            f"w goes down to {smallest:.3g}: over chunk={chunk} steps that is less than {state.dtype} can "
            "divide by; use a smaller chunk, or wkv7"
        )
    return _chunked(r, w, k, v, a, b, state, chunk)


def _chunked(r, w, k, v, a, b, state, chunk):
    dtype, kind, time = v.dtype, state.dtype, v.shape[2]
    if v.shape[2] == 0:
        return torch.zeros_like(v), state
    missing = -time % chunk
    r, k, v, a, b = (_in_chunks(F.pad(x.to(kind), (0, 0, 0, missing)), chunk) for x in (r, k, v, a, b))
    decay = _in_chunks(F.pad(w.to(kind), (0, 0, 0, missing), value=1.0), chunk).log()

    passed = decay.cumsum(-2)  # log P_t
    end = passed[..., -1:, :]
    grown = (-passed).exp()
    r, a_start = r * passed.exp(), a * (passed - decay).exp()
    b_start, k_start = b * grown, k * grown
    b_end, k_end = b * (end - passed).exp(), k * (end - passed).exp()

    system = torch.eye(chunk, dtype=kind, device=v.device) - (a_start @ b_start.mT).tril(-1)
    right = torch.cat((a_start, (a_start @ k_start.mT).tril(-1) @ v), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    from_state, from_values = solved.split((a.shape[-1], v.shape[-1]), dim=-1)
    transition = torch.diag_embed(end.squeeze(-2).exp()) + from_state.mT @ b_end
    written = from_values.mT @ b_end + v.mT @ k_end

    starts = []
    for each, added in zip(transition.unbind(2), written.unbind(2), strict=True):
        starts.append(state)
        state = state @ each + added
    start = torch.stack(starts, dim=2)
    found = from_state @ start.mT + from_values
    y = r @ start.mT + (r @ b_start.mT).tril() @ found + (r @ k_start.mT).tril() @ v
    return y.flatten(2, 3)[:, :, :time].to(dtype), state


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    return x.unflatten(2, (-1, chunk))


def _checked_state(r, w, k, v, a, b, state):
    if v.ndim != 4 or r.ndim != 4:
        raise ValueError(f"r {tuple(r.shape)} and v {tuple(v.shape)} must be (batch, heads, time, dim)")
    batch, heads, time, size = v.shape
    keys = (batch, heads, time, r.shape[-1])
    for name, x in (("r", r), ("w", w), ("k", k), ("a", a), ("b", b)):
        if x.shape != keys:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; with v {tuple(v.shape)} it must be {keys}")
    kind = torch.float64 if v.dtype == torch.float64 else torch.float32
    shape = (batch, heads, size, r.shape[-1])
    if state is None:
        return torch.zeros(shape, dtype=kind, device=v.device)
    if state.shape != shape:
        raise ValueError(f"state has shape {tuple(state.shape)}; it must be {shape}: (batch, heads, V, K)")
    return state.to(kind)
