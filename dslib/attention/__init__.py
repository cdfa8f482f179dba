"""Attention as functions on (batch, heads, time, dim) tensors."""

from dslib.attention.dense import attention_scores, causal_mask, dense_attention
from dslib.attention.rope import apply_rotary, rotary_angles

__all__ = ["apply_rotary", "attention_scores", "causal_mask", "dense_attention", "rotary_angles"]
