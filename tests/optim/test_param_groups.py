"""The split between Muon's matrices and AdamW's rest."""

import pytest
import torch
from torch import nn

from dslib.models import Decoder, DecoderConfig
from dslib.optim import Muon, param_groups_for_muon


def names(model):
    matrices, rest = param_groups_for_muon(model)
    by_id = {id(p): n for n, p in model.named_parameters()}
    return {by_id[id(p)] for p in matrices}, {by_id[id(p)] for p in rest}


class Names(nn.Module):
    """Every kind of parameter under a common name."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(50, 8)
        self.wpe = nn.Parameter(torch.zeros(16, 8))
        self.conv = nn.Conv1d(8, 6, 3)
        self.mix = nn.Linear(8, 8)
        self.gate = nn.Linear(8, 1)
        self.column = nn.Parameter(torch.zeros(8, 1))
        self.norm = nn.LayerNorm((4, 8))
        self.to_words = nn.Linear(8, 50)
        self.block = nn.ModuleDict(
            {"output": nn.Linear(8, 8, bias=False), "router": nn.Linear(8, 4, bias=False)}
        )
        self.score = nn.Linear(8, 3, bias=False)


def test_kinds_are_told_apart_by_name_and_type_not_by_dimensions():
    matrices, rest = names(Names())
    assert matrices == {"conv.weight", "mix.weight", "block.output.weight", "block.router.weight"}
    assert {
        "wte.weight",
        "wpe",
        "norm.weight",
        "gate.weight",
        "column",
        "to_words.weight",
        "score.weight",
    } <= rest


def test_decoder_gives_its_blocks_matrices_and_nothing_else():
    matrices, rest = names(Decoder(DecoderConfig(d_model=16, layers=2, heads=2)))
    assert len(matrices) == 14
    assert rest == {"embedding.weight", "lm_head.weight", "norm.weight"} | {
        f"blocks.{i}.{n}.weight" for i in (0, 1) for n in ("attention_norm", "mlp_norm")
    }


@pytest.mark.parametrize("d_model", [96, 256])
def test_matrix_of_a_layer_stays_one_whatever_the_vocabulary_is(d_model):
    """At width 96 the MLP has 256 inner units, at 256 every projection has 256 outputs: as many as bytes."""
    matrices, rest = names(Decoder(DecoderConfig(vocab_size=256, d_model=d_model, layers=1, heads=2)))
    assert len(matrices) == 7
    assert rest >= {"embedding.weight", "lm_head.weight"}


def test_tied_frozen_and_shared_parameters_appear_at_most_once():
    model = Decoder(DecoderConfig(d_model=16, layers=2, heads=2, tie_embeddings=True))
    model.blocks[1].mlp.up.weight = model.blocks[0].mlp.up.weight
    model.blocks[0].attention.query.weight.requires_grad_(False)
    matrices, rest = param_groups_for_muon(model)
    assert len({id(p) for p in matrices + rest}) == len(matrices + rest)
    assert len(matrices) == 12
    assert any(p is model.embedding.weight for p in rest)


def test_the_two_lists_cover_a_model_and_muon_takes_the_first():
    model = Names()
    matrices, rest = param_groups_for_muon(model)
    assert len(matrices) + len(rest) == len(list(model.parameters()))
    Muon(matrices, lr=0.1)
