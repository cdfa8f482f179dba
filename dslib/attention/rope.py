"""Rotary position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, dim: int, base: float = 10_000.0) -> Tensor:
    """θ of RoFormer (arXiv:2104.09864, §3.2.2): position·base^(−2i/dim), i = 0 … dim/2 − 1.

    positions: (time,), any integer or float dtype → (time, dim/2) in float32. Raises ValueError for odd ``dim``.
    """
    if dim % 2:
        raise ValueError(f"dim={dim} must be even: rotary embeddings turn pairs of coordinates")
    frequencies = base ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    return positions.to(torch.float32).unsqueeze(-1) * frequencies


def apply_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pair (x[i], x[i + dim/2]) of each position by its angle: the half-split layout of GPT-NeoX
    and Llama's converted weights, not the interleaved one of the paper.

    x: (..., time, dim); angles: (time, dim/2). The result has x's shape and dtype; scores
    q·k then depend on positions only through their difference.
    """
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def apply_rotary_interleaved(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pair (x[2i], x[2i + 1]) of each position by its angle: the layout of the paper, of
    DeepSeek's latent attention — not of its indexer, which takes :func:`apply_rotary`'s.

    Arguments and result as in :func:`apply_rotary`.
    """
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
