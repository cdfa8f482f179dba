"""The corpus: real, split by file, recorded by its hash."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslib.tasks import DOCSTRINGS, batches, evaluation_windows, load_corpus


def test_standard_library_is_a_real_corpus_of_python_sources():
    corpus = load_corpus()
    assert len(corpus.train) > 5_000_000
    assert 0.01 < len(corpus.validation) / len(corpus.train) < 0.15
    assert corpus.train.dtype == torch.uint8
    assert b"def " in bytes(corpus.validation.tolist()[:200_000])
    assert len(corpus.digest) == 12


def test_folder_is_split_by_file_and_skips_installed_packages(tmp_path):
    for i in range(200):
        (tmp_path / f"f{i}.py").write_bytes(f"<{i}>\r\n".encode())
    for folder in ("venv/site-packages/x", "__pycache__"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("never")
    corpus = load_corpus(tmp_path, validation_share=0.2)
    train, validation = (
        set(bytes(t.tolist()).decode().split("\n")) for t in (corpus.train, corpus.validation)
    )
    assert train & validation == {""}
    assert len(train | validation) == 201
    assert 15 < len(validation) < 70


def test_a_new_file_does_not_move_the_others_across_the_split(tmp_path):
    for i in range(60):
        (tmp_path / f"f{i}.py").write_text(f"<{i}>")
    before = load_corpus(tmp_path, validation_share=0.3)
    (tmp_path / "later.py").write_text("<later>")
    (tmp_path / "again").mkdir()
    after = load_corpus(tmp_path, validation_share=0.3)
    assert before.digest != after.digest
    assert bytes(before.validation.tolist()) in bytes(after.validation.tolist()).replace(b"<later>", b"")


def test_docstrings_are_questions_and_answers_from_either_side_of_the_split():
    library, corpus = load_corpus(), load_corpus(DOCSTRINGS)
    for whole, part in ((library.train, corpus.train), (library.validation, corpus.validation)):
        assert 0.02 < len(part) / len(whole) < 0.5
        text, source = (t.numpy().tobytes().decode(errors="replace") for t in (part, whole))
        assert all(
            entry.startswith(("def ", "class ", "async def ")) for entry in text[4:20_000].split("\n### ")
        )
        heads = [line[4:] for line in text[:20_000].splitlines()[:-1] if line.startswith("### ")]
        assert heads
        assert all(f"{head}:\n" in source for head in heads)
    assert corpus.digest != library.digest
    assert load_corpus(DOCSTRINGS) is corpus


def test_one_text_file_holds_out_its_end(tmp_path):
    file = tmp_path / "größe ü.txt"
    file.write_text("abcdefghij")
    corpus = load_corpus(file, validation_share=0.2)
    assert bytes(corpus.train.tolist()) == b"abcdefgh"
    assert bytes(corpus.validation.tolist()) == b"ij"


@given(n=st.integers(2, 40), data=st.data())
def test_targets_are_the_inputs_one_position_later(n, data):
    context = data.draw(st.integers(1, n - 1))
    text = torch.arange(n)
    inputs, targets = next(batches(text, 3, context, torch.Generator().manual_seed(0)))
    assert inputs.shape == (3, context)
    assert torch.equal(inputs + 1, targets)
    x, y = evaluation_windows(text, 4, context)
    assert torch.equal(x + 1, y)
    assert x[0, 0] == 0
    assert y[-1, -1] == n - 1


def test_windows_of_a_long_text_are_exact_past_what_float32_can_count():
    n = 2**24 + 101
    x, y = evaluation_windows(torch.arange(n), 3, 4)
    assert x[:, 0].tolist() == [0, (n - 5) // 2, n - 5]
    assert y[-1, -1] == n - 1
    assert evaluation_windows(torch.arange(9), 1, 4)[0].tolist() == [[0, 1, 2, 3]]


def test_every_position_can_be_drawn_and_the_generator_decides():
    text = torch.arange(6)
    seen = {int(next(batches(text, 1, 5, torch.Generator().manual_seed(s)))[0][0, 0]) for s in range(20)}
    assert seen == {0}
    stream = batches(text, 64, 2, torch.Generator().manual_seed(0))
    assert set(next(stream)[0][:, 0].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda p: load_corpus(p / "none.txt"), FileNotFoundError, "none.txt"),
        (lambda p: load_corpus(p), ValueError, "too little text"),
        (lambda p: load_corpus(validation_share=0.0), ValueError, "validation_share=0.0"),
        (lambda p: batches(torch.arange(5), 1, 5, torch.Generator()), ValueError, "5 tokens"),
        (lambda p: batches(torch.arange(5), 0, 2, torch.Generator()), ValueError, "batch_size=0"),
        (lambda p: evaluation_windows(torch.arange(5), 2, 5), ValueError, "5 tokens"),
        (lambda p: evaluation_windows(torch.arange(5), 0, 2), ValueError, "count=0"),
    ],
)
def test_bad_input_is_refused_at_the_door(tmp_path, call, error, words):
    with pytest.raises(error, match=words):
        call(tmp_path)
