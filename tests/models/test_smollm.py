"""The reader of SmolLM2's weights; what needs the weights is skipped where `make llm` was not run."""

import pytest
import torch

from dslib.attention import apply_rotary, rotary_angles
from dslib.models import Decoder, DecoderConfig, smollm
from dslib.spectra import singular_spectrum


def test_every_weight_of_a_decoder_has_its_name_in_the_file():
    names = {smollm.decoder_name(f"blk.7.{part}.weight") for part in smollm._PARTS}
    names |= {smollm.decoder_name(name) for name in smollm._WHOLE}
    model = Decoder(DecoderConfig(d_model=8, heads=2, layers=8))
    assert names == {
        name for name in model.state_dict() if not name.startswith("blocks.") or name.startswith("blocks.7.")
    }


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs.weight", "blk.0.ffn_gate_exps.weight"])
def test_unknown_weight_is_refused_by_name(name):
    with pytest.raises(ValueError, match=name):
        smollm.decoder_name(name)


def test_rows_are_put_so_that_both_rotations_turn_the_same_pairs():
    """Interleaved rotary on the file's rows and half-split rotary on ours give the same scores."""
    generator = torch.Generator().manual_seed(0)
    wq, wk, x = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((12, 5), (12, 5), (7, 5)))
    angles = rotary_angles(torch.arange(7), 6).double()

    def interleaved(y):
        a, b, cos, sin = y[..., ::2], y[..., 1::2], angles.cos(), angles.sin()
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)

    def heads(w):
        return (x @ w.T).unflatten(-1, (2, 6)).transpose(0, 1)

    theirs = interleaved(heads(wq)) @ interleaved(heads(wk)).mT
    q, k = (apply_rotary(heads(smollm.half_split_rows(w, 2)), angles) for w in (wq, wk))
    torch.testing.assert_close(q @ k.mT, theirs, rtol=0, atol=1e-10)
    torch.testing.assert_close(singular_spectrum(smollm.half_split_rows(wq, 2)), singular_spectrum(wq))
    with pytest.raises(ValueError, match="heads=4"):
        smollm.half_split_rows(wq, 4)


def test_absence_is_said_with_what_to_install(monkeypatch):
    monkeypatch.setattr(smollm.importlib.util, "find_spec", lambda name: None)
    assert smollm.smollm2_file() is None
    for function in (smollm.load_smollm2_weights, smollm.smollm2_config, smollm.smollm2_digest):
        with pytest.raises(FileNotFoundError, match="make llm"):
            function()


@pytest.mark.skipif(smollm.smollm2_file() is None, reason="`make llm` was not run")
def test_weights_fit_a_decoder_of_the_stated_sizes():
    config, weights = smollm.smollm2_config(), smollm.load_smollm2_weights()
    assert (config.d_model, config.layers, config.heads, config.kv_heads) == (576, 30, 9, 3)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Decoder(config).state_dict().items()}
    assert {name: value.shape for name, value in weights.items()} == shapes
    assert all(value.isfinite().all() for value in weights.values())
    first = smollm.load_smollm2_weights(layer=0)
    assert len(first) == len(smollm._PARTS)
    assert all(torch.equal(value, weights[name]) for name, value in first.items())
    with pytest.raises(ValueError, match="layer=30"):
        smollm.load_smollm2_weights(layer=30)
