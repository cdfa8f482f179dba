"""A small decoder, its tokenizers, its generation and its training."""

from dslib.models.decoder import Decoder, DecoderConfig
from dslib.models.generation import filter_logits, generate
from dslib.models.layers.dense import SelfAttention
from dslib.models.layers.rwkv import RWKV7, RWKVConfig
from dslib.models.layers.sparse import NSA, MoBA, MoBAConfig, NSAConfig, SlidingWindow, SlidingWindowConfig
from dslib.models.measuring import probe
from dslib.models.moe import MoE, MoEConfig
from dslib.models.tokenizer import BPETokenizer, ByteTokenizer
from dslib.models.train_config import TrainConfig, flops_per_step, with_compute
from dslib.models.training import TrainResult, train, train_many

__all__ = [
    "NSA",
    "RWKV7",
    "BPETokenizer",
    "ByteTokenizer",
    "Decoder",
    "DecoderConfig",
    "MoBA",
    "MoBAConfig",
    "MoE",
    "MoEConfig",
    "NSAConfig",
    "RWKVConfig",
    "SelfAttention",
    "SlidingWindow",
    "SlidingWindowConfig",
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
