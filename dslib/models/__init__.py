"""A small decoder, its tokenizers, its generation and its training."""

from dslib.models.decoder import Decoder, DecoderConfig, KVCache, SelfAttention
from dslib.models.generation import filter_logits, generate
from dslib.models.moe import MoE, MoEConfig
from dslib.models.tokenizer import BPETokenizer, ByteTokenizer
from dslib.models.training import (
    TrainConfig,
    TrainResult,
    flops_per_step,
    probe,
    train,
    train_many,
    with_compute,
)

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "Decoder",
    "DecoderConfig",
    "KVCache",
    "MoE",
    "MoEConfig",
    "SelfAttention",
    "TrainConfig",
    "TrainResult",
    "filter_logits",
    "flops_per_step",
    "generate",
    "probe",
    "train",
    "train_many",
    "with_compute",
]
