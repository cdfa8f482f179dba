"""A policy loss from logits on the GPU: log-softmax at one token a row, clipped objective and KL in one pass.

One program has one row of logits and goes through it once: a running maximum and sum give log Σ exp, and with the
row's own token, its old and reference log-probability and its advantage, the token's loss and the loss's slope by
the log-probability follow at once. The gradient of a row of logits is slope·(one-hot − softmax)/T, a second pass,
which may write over the logits. Neither keeps anything of the size of the logits besides them. The plain-torch
reference is ``policy_loss`` in ``dslib.rl.objectives`` on ``selective_log_softmax`` of ``dslib.rl.selective``.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from dslib.kernels import launching
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Entries of a row that a program has at a time.
BLOCK = 4096
KL_KINDS = {"k1": 1, "k2": 2, "k3": 3}
#: Log-ratios are kept within ± this before they are exponentiated, as in ``dslib.rl.kl``.
LIMIT = 20.0


@triton.jit
def _exp(x):
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _rows_kernel(
    logits,
    tokens,
    old,
    ref,
    advantages,
    logp,
    sums,
    losses,
    slopes,
    columns,
    row_stride,
    inverse_temperature,
    low,
    high,
    beta,
    BLOCK: tl.constexpr,
    OBJECTIVE: tl.constexpr,
    KIND: tl.constexpr,
    UNBIASED: tl.constexpr,
    LIMIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    c = tl.arange(0, BLOCK)
    # A maximum and a sum a lane; they meet once, at the end.
    highest = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        x = (
            tl.load(logits + start + c, start + c < columns, -float("inf")).to(tl.float32)
            * inverse_temperature
        )
        higher = tl.maximum(highest, x)
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # −inf − −inf would be NaN
        total = total * _exp(highest - shift) + _exp(x - shift)
        highest = higher
    most = tl.max(highest, 0)
    shift = tl.where(most == -float("inf"), 0.0, most)
    log_total = tl.log(tl.sum(total * _exp(highest - shift), 0))
    token = tl.load(tokens + row)
    inside = (token >= 0) & (token < columns)  # NaN for a token that is none
    chosen = tl.load(logits + token, inside, float("nan")).to(tl.float32) * inverse_temperature
    # Two numbers in the place of their sum: large logits would take its digits.
    new = (chosen - shift) - log_total
    tl.store(logp + row, new)
    tl.store(sums + 2 * row, shift)
    tl.store(sums + 2 * row + 1, log_total)

    if OBJECTIVE:
        advantage = tl.load(advantages + row)
        log_ratio = new - tl.load(old + row)
        ratio = _exp(tl.minimum(tl.maximum(log_ratio, -LIMIT), LIMIT))
        # d ratio / d logp: past the limit the ratio is a constant.
        moving = tl.where((log_ratio >= -LIMIT) & (log_ratio <= LIMIT), ratio, 0.0)
        plain = ratio * advantage
        clipped = tl.minimum(tl.maximum(ratio, low), high) * advantage
        loss = -tl.minimum(plain, clipped)
        slope = tl.where(plain <= clipped, -moving * advantage, 0.0)
        if KIND > 0:
            d = tl.load(ref + row) - new
            if KIND == 1:
                kl = -d
                d_kl = 1.0
            elif KIND == 2:
                kl = d * d * 0.5
                d_kl = -d
            else:
                free = (d >= -LIMIT) & (d <= LIMIT)
                d = tl.minimum(tl.maximum(d, -LIMIT), LIMIT)
                # exp(d) − 1 − d loses its digits at small d; the series' next term is below d⁶/720.
                near = d * d * (0.5 + d * (1.0 / 6 + d * (1.0 / 24 + d * (1.0 / 120))))
                kl = tl.where(tl.abs(d) < 0.1, near, _exp(d) - 1.0 - d)
                d_kl = tl.where(free, -(kl + d), 0.0)
            if UNBIASED:
                d_kl = moving * kl + ratio * d_kl
                kl = ratio * kl
            loss += beta * kl
            slope += beta * d_kl
        tl.store(losses + row, loss)
        tl.store(slopes + row, slope)


@triton.jit
def _gradient_kernel(
    logits,
    tokens,
    sums,
    slopes,
    d_logits,
    columns,
    row_stride,
    d_row_stride,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    # slope/T·(one-hot − softmax). d_logits may be the logits: each entry is read before it is written.
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    c = start + tl.arange(0, BLOCK)
    inside = c < columns
    x = tl.load(logits + row * row_stride + c, inside, -float("inf")).to(tl.float32) * inverse_temperature
    share = _exp((x - tl.load(sums + 2 * row)) - tl.load(sums + 2 * row + 1))
    one_hot = tl.where(c == tl.load(tokens + row), 1.0, 0.0)
    gradient = tl.load(slopes + row) * inverse_temperature * (one_hot - share)
    tl.store(d_logits + row * d_row_stride + c, gradient.to(d_logits.dtype.element_ty), inside)


def selective_log_softmax(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits/T) at one token a row: logits (N, V), tokens (N,) int64 → (N,) float32, differentiable once.

    logits: float16, bfloat16 or float32 on a GPU (on the CPU only in Triton's interpreter), with any strides; −inf
    is probability 0. A token outside 0 … V − 1 gives NaN. Raises TypeError for another dtype, ValueError for
    shapes that do not fit or a temperature that is not positive, and RuntimeError for the CPU without the
    interpreter.
    """
    logits = _check(logits, temperature, tokens=tokens)
    return _LogSoftmax.apply(logits, tokens.contiguous(), float(temperature))


def token_losses(
    logits: Tensor,
    tokens: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    logp_ref: Tensor | None = None,
    *,
    temperature: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl: float = 0.0,
    kl_kind: str = "k3",
    kl_unbiased: bool = False,
) -> tuple[Tensor, Tensor]:
    """Each token's loss −min(r·Â, clip(r)·Â) + kl·KL and its log-probability, from logits.

    logits (N, V) and tokens (N,) as :func:`selective_log_softmax` takes them; logp_old, advantages and logp_ref
    (N,) float32, constants. Returns (losses, logp), (N,) float32 each; the losses are differentiable once, by the
    logits alone. What the options mean stands at ``LossConfig`` in ``dslib.rl``. Errors as there, and ValueError
    for a KL without logp_ref or of another kind.
    """
    logits = _check(
        logits, temperature, tokens=tokens, logp_old=logp_old, advantages=advantages, logp_ref=logp_ref
    )
    options = objective(clip_low, clip_high, kl, kl_kind, kl_unbiased)
    if kl and logp_ref is None:
        raise ValueError(f"kl={kl} needs logp_ref, (N,)")
    constants = tuple(
        None if x is None else x.detach().contiguous() for x in (logp_old, advantages, logp_ref)
    )
    return _TokenLosses.apply(logits, tokens.contiguous(), *constants, float(temperature), options)


def rows(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    constants: tuple[Tensor, Tensor, Tensor | None] | None = None,
    options: dict | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(logp, sums, loss, slope of the loss by logp), (N,) float32 each, but sums (N, 2), the two parts of log Σ exp;
    without a graph. The last two are None without ``constants``, (logp_old, advantages, logp_ref). Nothing is
    checked."""
    count, columns = logits.shape
    logp, sums = (logits.new_empty(*shape, dtype=torch.float32) for shape in ((count,), (count, 2)))
    losses, slopes = (torch.empty_like(logp) for _ in range(2)) if constants else (None, None)
    old, advantages, ref = constants or (None, None, None)
    options = options or {"low": 0.0, "high": 0.0, "beta": 0.0, "KIND": 0, "UNBIASED": False}
    numbers = options["low"], options["high"], options["beta"]
    if count:
        with torch.cuda.device_of(logits):
            _rows_kernel[(count,)](
                *(logits, tokens, *(logp if x is None else x for x in (old, ref, advantages))),
                *(logp, sums, *(logp if x is None else x for x in (losses, slopes))),
                *(columns, logits.stride(0), 1 / temperature, *numbers),
                OBJECTIVE=constants is not None,
                KIND=options["KIND"],
                UNBIASED=options["UNBIASED"],
                LIMIT=LIMIT,
                **_tile(columns),
            )
    return logp, sums, losses, slopes


def logits_gradient(
    logits: Tensor,
    tokens: Tensor,
    sums: Tensor,
    slopes: Tensor,
    temperature: float,
    out: Tensor | None = None,
) -> Tensor:
    """slope·(one-hot − softmax)/T, (N, V) in the logits' dtype: the gradient of Σ slope·logp. ``out`` may be the
    logits themselves. sums: of :func:`rows`; slopes: (N,) float32. Nothing is checked."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format) if out is None else out
    count, columns = logits.shape
    if out.numel():
        tile = _tile(columns)
        with torch.cuda.device_of(logits):
            _gradient_kernel[(count, triton.cdiv(columns, tile["BLOCK"]))](
                *(logits, tokens, sums, slopes.contiguous(), out),
                *(columns, logits.stride(0), out.stride(0), 1 / temperature),
                **tile,
            )
    return out


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, tokens, temperature):
        logp, sums, _, _ = rows(logits, tokens, temperature)
        ctx.save_for_backward(logits, tokens, sums)
        ctx.temperature = temperature
        return logp

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logp):
        logits, tokens, sums = ctx.saved_tensors
        return logits_gradient(logits, tokens, sums, d_logp, ctx.temperature), None, None


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, tokens, old, advantages, ref, temperature, options):
        logp, sums, losses, slopes = rows(logits, tokens, temperature, (old, advantages, ref), options)
        ctx.save_for_backward(logits, tokens, sums, slopes)
        ctx.mark_non_differentiable(logp)
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        return losses, logp

    @staticmethod
    @once_differentiable
    def backward(ctx, d_losses, _):
        logits, tokens, sums, slopes = ctx.saved_tensors
        d_logits = logits_gradient(logits, tokens, sums, slopes * d_losses, ctx.temperature)
        return d_logits, *(None,) * 6


def objective(clip_low: float, clip_high: float, kl: float, kl_kind: str, kl_unbiased: bool) -> dict:
    """The ``options`` of :func:`rows`. Raises ValueError for another kl_kind."""
    if kl_kind not in KL_KINDS:
        raise ValueError(f"kl_kind={kl_kind!r} is unknown; use one of {', '.join(map(repr, KL_KINDS))}")
    kind = KL_KINDS[kl_kind] if kl else 0
    numbers = {"low": 1.0 - clip_low, "high": 1.0 + clip_high, "beta": float(kl)}
    return numbers | {"KIND": kind, "UNBIASED": bool(kl_unbiased)}


def _tile(columns: int) -> dict[str, int]:
    return {"BLOCK": launching.power_of_two(min(columns, BLOCK)), "num_warps": 8, "num_stages": 1}


def _check(logits: Tensor, temperature: float, tokens: Tensor, **constants: Tensor | None) -> Tensor:
    """The logits with their rows together in memory, once everything fits."""
    sizes = launching.check_tensors({"logits": (logits, "N V")})
    launching.check_indices("tokens", tokens, "N", sizes, like=logits)
    for name, x in constants.items():
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.dtype != torch.float32:
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} is {kind}; the kernel takes float32")
        if x.shape != tokens.shape or x.device != logits.device:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} on {x.device}; it must be {tuple(tokens.shape)} on {logits.device}"
            )
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature={temperature} must be a finite number above 0")
    if sizes["V"] == 0:
        raise ValueError(f"logits has shape {tuple(logits.shape)}; the kernel takes at least one column")
    launching.check_grid(sizes["N"])
    return launching.rows(logits)
