"""Shipped weights say what made them, and are the weights that training went on from."""

import pytest
import torch

from dslib import data
from dslib.models import DecoderConfig
from dslib.runs import checkpoints

CONFIG = DecoderConfig(vocab_size=11, d_model=8, layers=1, heads=2)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(data, "__file__", str(tmp_path / "__init__.py"))
    return tmp_path


def test_weights_read_back_are_those_of_the_model_that_was_written_and_say_what_made_them(tree):
    model, other = CONFIG.build(0), CONFIG.build(1)
    checkpoints.write("toy", model, "dslib run 99", {"seed": 0})
    known = checkpoints.read("toy", other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert known["command"] == "dslib run 99"
    assert known["about"] == {"seed": 0}
    assert known["source"]


def test_rounding_twice_changes_nothing_and_keeps_the_dtype():
    model = checkpoints.rounded(CONFIG.build(0))
    before = [p.clone() for p in model.parameters()]
    checkpoints.rounded(model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("value", [1e6, float("nan")])
def test_weight_that_float16_cannot_hold_is_refused_and_nothing_is_written(tree, value):
    model = CONFIG.build(0)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = value
    with pytest.raises(OverflowError, match=r"lm_head\.weight"):
        checkpoints.write("toy", model, "dslib run 99")
    assert not (tree / "checkpoints").exists()


def test_model_of_other_sizes_is_an_error_that_names_the_file(tree):
    checkpoints.write("toy", CONFIG.build(0), "dslib run 99")
    other = DecoderConfig(vocab_size=12, d_model=8, layers=1, heads=2).build(0)
    with pytest.raises(ValueError, match=r"toy\.safetensors is of another model"):
        checkpoints.read("toy", other)


def test_file_without_its_command_is_refused(tree):
    checkpoints.write("toy", CONFIG.build(0), "")
    with pytest.raises(ValueError, match="lacks command"):
        checkpoints.read("toy", CONFIG.build(0))


def test_missing_file_names_what_is_there(tree):
    with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors"):
        checkpoints.read("nothing", CONFIG.build(0))
