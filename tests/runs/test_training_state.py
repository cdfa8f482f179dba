"""Checkpoints: whole or not there, tied weights and optimizer states included."""

import pytest
import safetensors.torch
import torch

from dslib.models import Decoder, DecoderConfig
from dslib.optim import Muon, param_groups_for_muon
from dslib.runs.training_state import (
    load_checkpoint,
    load_optimizers,
    optimizer_parts,
    save_checkpoint,
    with_prefix,
)


def optimizers_of(model):
    matrices, rest = param_groups_for_muon(model)
    return [Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2, betas=(0.8, 0.9))]


def stepped(model, optimizers, steps=2):
    for step in range(steps):
        tokens = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(step))
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_models_and_optimizers_go_on_as_if_they_had_never_stopped(tmp_path):
    config = DecoderConfig(vocab_size=11, d_model=16, layers=1, tie_embeddings=True)
    model = Decoder(config)
    optimizers = optimizers_of(model)
    stepped(model, optimizers)
    tensors, rest = optimizer_parts(optimizers)
    tensors |= {f"model.{name}": x for name, x in model.state_dict().items()}
    save_checkpoint(tmp_path / "deep" / "run", tensors, {"optimizers": rest, "note": [1, 2.5, None]})
    found, state = load_checkpoint(tmp_path / "deep" / "run")
    assert state["note"] == [1, 2.5, None]
    again = Decoder(config, seed=9)
    again.load_state_dict(with_prefix(found, "model"))
    others = optimizers_of(again)
    load_optimizers(others, found, state["optimizers"])
    stepped(model, optimizers)
    stepped(again, others)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    with pytest.raises(ValueError, match="of 2 optimizers, and there are 1"):
        load_optimizers(others[:1], found, state["optimizers"])


def test_a_write_that_is_interrupted_leaves_the_file_before_it(tmp_path, monkeypatch):
    file = tmp_path / "run"
    save_checkpoint(file, {"x": torch.ones(2)}, {"step": 1})

    def half(tensors, path, metadata):
        path.write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.torch, "save_file", half)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(file, {"x": torch.zeros(2)}, {"step": 2})
    tensors, state = load_checkpoint(file)
    assert state == {"step": 1}
    assert tensors["x"].tolist() == [1, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["run"], "nothing unfinished is left"


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_checkpoint(tmp_path / "run")
    (tmp_path / "run").write_bytes(b"anything")
    with pytest.raises(ValueError, match="is no checkpoint of a training run"):
        load_checkpoint(tmp_path / "run")
    safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / "weights")
    with pytest.raises(ValueError, match="is no checkpoint"):
        load_checkpoint(tmp_path / "weights")


def test_names_that_only_begin_alike_are_not_taken():
    tensors = {"model.a": torch.ones(1), "models.b": torch.ones(1)}
    assert list(with_prefix(tensors, "model")) == ["a"]
