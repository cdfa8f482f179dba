"""Bytes or byte-level BPE: text to token ids and back, without loss."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


class ByteTokenizer:
    """One token a byte of UTF-8: ids 0–255."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of ``text``."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the bytes; a cut character becomes U+FFFD, so any model output can be shown.
        Raises ValueError for an id outside 0–255."""
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")


class BPETokenizer:
    """Byte-level byte-pair encoding by the ``tokenizers`` library; every text round-trips exactly."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of distinct ids."""
        return self._tokenizer.get_vocab_size()

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = 1024) -> BPETokenizer:
        """Learn merges from ``texts``. Raises ValueError for a vocabulary below the 256 bytes."""
        if vocab_size < 256:
            raise ValueError(f"vocab_size={vocab_size} is below 256, the bytes that BPE starts from")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: str | Path) -> BPETokenizer:
        """Read what :meth:`save` wrote."""
        return cls(Tokenizer.from_file(str(path)))

    def save(self, path: str | Path) -> None:
        """Write the vocabulary and merges as one JSON file."""
        self._tokenizer.save(str(path))

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)
