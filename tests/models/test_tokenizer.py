"""Tokenizers lose nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslib.models import BPETokenizer, ByteTokenizer

TEXT = "def f(x):\n    return x + x  # größe, 数学, \U0001f600\n" * 20
BPE = BPETokenizer.train([TEXT], vocab_size=280)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE])
@given(text=st.text())
def test_every_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_every_merge_shortens_the_text_it_was_learned_from():
    fewer = BPETokenizer.train([TEXT], vocab_size=268)
    assert (fewer.vocab_size, BPE.vocab_size) == (268, 280)
    assert len(BPE.encode(TEXT)) < len(fewer.encode(TEXT)) < len(ByteTokenizer().encode(TEXT))


def test_saved_tokenizer_reads_back_the_same(tmp_path):
    BPE.save(tmp_path / "bpe.json")
    assert BPETokenizer.load(tmp_path / "bpe.json").encode(TEXT) == BPE.encode(TEXT)


def test_half_a_character_decodes_and_bad_input_is_refused():
    assert ByteTokenizer().decode([0xC3]) == "�"
    with pytest.raises(ValueError, match="256"):
        ByteTokenizer().decode([256])
    with pytest.raises(ValueError, match="vocab_size=100"):
        BPETokenizer.train(["a"], vocab_size=100)
