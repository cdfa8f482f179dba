"""NSA, native sparse attention (arXiv:2502.11089): compressed blocks, selected blocks, a window, and gates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dslib.attention.block_sparse import block_mask, block_sparse_attention, positions, top_blocks
from dslib.attention.masked import attention_weights, check_attention, check_count, check_queries_are_last
from dslib.attention.sliding_window import sliding_window_attention, sliding_window_mask

KeysAndValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class NSASizes:
    """Sizes of NSA's branches, the paper's by default (§4.1): ``compress_block`` l and ``compress_stride`` d of
    the compressed blocks, ``select_block`` l′ and the number n of ``selected`` blocks, of which the first
    ``initial`` and the last ``local`` of the sequence are always taken, and the ``window`` w."""

    compress_block: int = 32
    compress_stride: int = 16
    select_block: int = 64
    selected: int = 16
    initial: int = 1
    local: int = 2
    window: int = 512

    def __post_init__(self) -> None:
        for name in ("compress_block", "compress_stride", "select_block", "selected", "local", "window"):
            check_count(name, getattr(self, name))
        check_count("initial", self.initial, least=0)
        if self.compress_stride > self.compress_block:
            raise ValueError(
                f"compress_stride={self.compress_stride} must not exceed compress_block={self.compress_block}: "
                "keys between the blocks would be lost"
            )
        if self.initial + self.local > self.selected:
            raise ValueError(
                f"selected={self.selected} must hold initial={self.initial} and local={self.local} blocks, "
                "which are always taken"
            )

    def compressed(self, keys: int) -> int:
        """How many complete compressed blocks ``keys`` positions hold."""
        return max(0, (keys - self.compress_block) // self.compress_stride + 1)


def complete_blocks(x: Tensor, length: int, stride: int) -> Tensor:
    """The overlapping blocks that φ compresses: x (batch, kv_heads, keys, dim) → (batch, kv_heads, blocks,
    length, dim), block i holding positions i·stride … i·stride + length − 1 (NSA eq. 7); those that reach past
    the end are left out."""
    if x.shape[2] < length:
        return x.new_zeros(*x.shape[:2], 0, length, x.shape[3])
    return x.unfold(2, length, stride).mT


def compressed_mask(queries: int, keys: int, sizes: NSASizes, device: torch.device | None = None) -> Tensor:
    """(queries, compressed blocks) bool: block i is visible at position t when it has ended, i·d + l − 1 ≤ t."""
    blocks = torch.arange(sizes.compressed(keys), device=device)
    ends = blocks * sizes.compress_stride + sizes.compress_block - 1
    return ends <= positions(queries, keys, device).unsqueeze(1)


def overlap(keys: int, sizes: NSASizes, dtype: torch.dtype = torch.float64) -> Tensor:
    """(compressed blocks, selection blocks): the tokens that the two share, in units of the stride d.

    This is eq. 9 as a matrix: with l = 2d and l′ = 4d, selection block j (from 0) takes the compressed
    blocks 4j − 1 … 4j + 3 with weights 1, 2, 2, 2, 1.
    """
    start = torch.arange(sizes.compressed(keys)).unsqueeze(1) * sizes.compress_stride
    first = torch.arange(-(-keys // sizes.select_block)) * sizes.select_block
    end = torch.minimum(start + sizes.compress_block, first + sizes.select_block)
    return (end - torch.maximum(start, first)).clamp(min=0).to(dtype) / sizes.compress_stride


def nsa_scores(q: Tensor, compressed_k: Tensor, keys: int, sizes: NSASizes) -> Tensor:
    """How much each query wants each selection block: (batch, kv_heads, queries, selection blocks).

    The compressed branch's attention (eq. 8), mapped by :func:`overlap` (eq. 9) and summed over the heads of a
    group, which select together (eq. 10). −inf for blocks of the future; +inf for the ``initial`` blocks and
    the ``local`` ones that end with the query's own (§4.1). 0 where no compressed block is visible yet.
    """
    with torch.no_grad():
        mask = compressed_mask(q.shape[2], keys, sizes, q.device)
        weights = attention_weights(q, compressed_k, mask)
        return _selection_scores(weights, compressed_k.shape[1], keys, sizes)


def _selection_scores(weights: Tensor, groups: int, keys: int, sizes: NSASizes) -> Tensor:
    wide = torch.promote_types(weights.dtype, torch.float32)
    scores = weights.detach().to(wide).unflatten(1, (groups, -1)).sum(2)
    scores = scores @ overlap(keys, sizes, scores.dtype).to(scores.device)
    own = (positions(weights.shape[2], keys, weights.device) // sizes.select_block).unsqueeze(1)
    block = torch.arange(scores.shape[-1], device=scores.device)
    always = (block < sizes.initial) | (block > own - sizes.local)
    return scores.masked_fill(always, math.inf).masked_fill(block > own, -math.inf)


def nsa_blocks(q: Tensor, compressed_k: Tensor, keys: int, sizes: NSASizes) -> Tensor:
    """The n blocks that each query of a group selects (eq. 11): (batch, kv_heads, queries, n) int64, −1 where
    there are fewer; ties to the smaller number."""
    return top_blocks(nsa_scores(q, compressed_k, keys, sizes), sizes.selected)


@dataclass(frozen=True)
class NSAMasks:
    """What each query sees, bool: ``compressed`` (queries, compressed blocks), ``selected`` (batch, kv_heads,
    queries, keys), ``window`` (queries, keys)."""

    compressed: Tensor
    selected: Tensor
    window: Tensor


def nsa_masks(q: Tensor, compressed_k: Tensor, keys: int, sizes: NSASizes) -> NSAMasks:
    """The masks of NSA's three branches for q (batch, heads, queries, dim), the last of ``keys`` positions."""
    blocks = nsa_blocks(q, compressed_k, keys, sizes)
    return NSAMasks(
        compressed_mask(q.shape[2], keys, sizes, q.device),
        block_mask(blocks, sizes.select_block, keys),
        sliding_window_mask(q.shape[2], keys, sizes.window, q.device),
    )


def nsa_attention(
    q: Tensor,
    compressed: KeysAndValues,
    selected: KeysAndValues,
    window: KeysAndValues,
    gates: Tensor,
    sizes: NSASizes = NSASizes(),
    blocks: Tensor | None = None,
    method: str = "auto",
) -> Tensor:
    """Σ_c g_c·Attn(q, K_c, V_c) over the branches c: compressed, selected, window (NSA eq. 5).

    q: (batch, heads, queries, dim), the last of ``keys`` positions. Each branch has keys and values of its own:
    ``compressed`` (batch, kv_heads, sizes.compressed(keys), dim), what φ made of :func:`complete_blocks`;
    ``selected`` (batch, kv_heads, keys, dim); ``window`` the same, of which only the last ``window − 1`` before
    the first query need be there. gates: (batch, heads, queries, 3), each in [0, 1] (a sigmoid's). Result:
    (batch, heads, queries, dim). ``blocks`` puts another choice of blocks in the place of eq. 8 to 11.

    A query that no compressed block precedes gets 0 from that branch, never NaN. No gradient flows through
    the choice of blocks. Raises ValueError for sizes, dtypes or devices that do not fit.
    """
    for name, (k, v) in (("compressed", compressed), ("selected", selected), ("window", window)):
        check_attention(q, k, v, ("q", f"{name} keys", f"{name} values"))
    check_queries_are_last(q, selected[0], ("q", "selected keys"))
    keys, queries = selected[0].shape[2], q.shape[2]
    if compressed[0].shape[2] != sizes.compressed(keys):
        raise ValueError(
            f"compressed keys hold {compressed[0].shape[2]} blocks; {keys} positions make {sizes.compressed(keys)} of "
            f"compress_block={sizes.compress_block} at compress_stride={sizes.compress_stride}"
        )
    least = min(keys, queries + sizes.window - 1)
    if not least <= window[0].shape[2] <= keys:
        raise ValueError(f"window keys hold {window[0].shape[2]} positions; give {least} to {keys} of them")
    if gates.shape != (*q.shape[:3], 3):
        raise ValueError(
            f"gates has shape {tuple(gates.shape)}; give (batch, heads, queries, 3) = {(*q.shape[:3], 3)}"
        )
    weights = attention_weights(q, compressed[0], compressed_mask(queries, keys, sizes, q.device))
    if blocks is None:
        scores = _selection_scores(weights, compressed[0].shape[1], keys, sizes)
        blocks = top_blocks(scores, sizes.selected)
    out_compressed = weights @ compressed[1].repeat_interleave(q.shape[1] // compressed[1].shape[1], dim=1)
    out_selected = block_sparse_attention(q, *selected, blocks, sizes.select_block, method)
    out_window = sliding_window_attention(q, *window, sizes.window)
    return (torch.stack((out_compressed, out_selected, out_window), dim=-1) * gates.unsqueeze(-2)).sum(-1)
