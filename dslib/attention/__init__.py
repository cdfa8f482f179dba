"""Attention as functions on (batch, heads, time, dim) tensors."""

from dslib.attention.block_sparse import block_mask, block_sparse_attention, top_blocks
from dslib.attention.cache import KVCache
from dslib.attention.dense import attention_scores, causal_mask, dense_attention
from dslib.attention.dsa import (
    LightningIndexer,
    indexer_kl_loss,
    indexer_scores,
    indexer_topk,
    select_topk,
    selection_mask,
    sparse_attention,
)
from dslib.attention.masked import attention_weights, masked_attention
from dslib.attention.mla import MLA, MLAConfig
from dslib.attention.moba import moba_attention, moba_blocks, moba_mask, moba_scores
from dslib.attention.nsa import NSAMasks, NSASizes, nsa_attention, nsa_blocks, nsa_masks, nsa_scores
from dslib.attention.rope import apply_rotary, apply_rotary_interleaved, rotary_angles
from dslib.attention.rwkv import wkv4, wkv4_parallel, wkv4_weights, wkv7, wkv7_chunked
from dslib.attention.sliding_window import sliding_window_attention, sliding_window_mask

__all__ = [
    "MLA",
    "KVCache",
    "LightningIndexer",
    "MLAConfig",
    "NSAMasks",
    "NSASizes",
    "apply_rotary",
    "apply_rotary_interleaved",
    "attention_scores",
    "attention_weights",
    "block_mask",
    "block_sparse_attention",
    "causal_mask",
    "dense_attention",
    "indexer_kl_loss",
    "indexer_scores",
    "indexer_topk",
    "masked_attention",
    "moba_attention",
    "moba_blocks",
    "moba_mask",
    "moba_scores",
    "nsa_attention",
    "nsa_blocks",
    "nsa_masks",
    "nsa_scores",
    "rotary_angles",
    "select_topk",
    "selection_mask",
    "sliding_window_attention",
    "sliding_window_mask",
    "sparse_attention",
    "top_blocks",
    "wkv4",
    "wkv4_parallel",
    "wkv4_weights",
    "wkv7",
    "wkv7_chunked",
]
