"""Numbers rounded to FP8 with a scale a block, as the lightning indexer computes (arXiv:2412.19437, §3.3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from dslib.attention.dsa import indexer_scores
from dslib.attention.masked import check_count


def fp8_rounded(x: Tensor, block_size: int = 128) -> Tensor:
    """``x`` as float8_e4m3fn keeps it: blocks of the last dimension are scaled so that their largest number
    is the format's largest, 448, rounded, and scaled back. Same shape and dtype; zeros stay zeros.

    Raises ValueError for a block size below 1 or an x that is no floating point.
    """
    check_count("block_size", block_size)
    if not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}; rounding needs floating point")
    blocks = [block.float() for block in x.split(block_size, dim=-1)]
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = [
        block.abs().amax(dim=-1, keepdim=True) / largest if block.numel() else block for block in blocks
    ]
    scales = [scale.masked_fill(scale == 0, 1) for scale in scales]
    rounded = [(b / s).to(torch.float8_e4m3fn).float() * s for b, s in zip(blocks, scales, strict=True)]
    return torch.cat(rounded, dim=-1).to(x.dtype) if rounded else x


def fp8_scores(q: Tensor, k: Tensor, w: Tensor, block_size: int = 128) -> Tensor:
    """:func:`dslib.attention.indexer_scores` with queries and keys rounded by :func:`fp8_rounded`; the weights
    and the sums keep their precision."""
    return indexer_scores(fp8_rounded(q, block_size), fp8_rounded(k, block_size), w)
