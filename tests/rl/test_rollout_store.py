"""Rollouts as Parquet: what is read is what was written, and without pyarrow the error says what to install."""

import sys
from dataclasses import replace

import pyarrow
import pytest
import torch
from pyarrow import parquet

from dslib.models import DecoderConfig, MoEConfig
from dslib.rl.rollout import SamplingConfig, sample
from dslib.rl.rollout_store import load_rollout, save_rollout

PROMPTS = torch.tensor([[1, 2, 3], [4, 5, 6]])
PARTS = ("tokens", "mask", "logp", "entropy", "kept", "routes")


def rollout_of(moe, kept):
    mixture = MoEConfig(experts=5, top_k=2, gate_scale=1.5) if moe else None
    model = DecoderConfig(vocab_size=11, d_model=16, layers=2, moe=mixture).build(1)
    sampling = SamplingConfig(9, top_p=0.8, end=10)
    return sample(model, PROMPTS, sampling, torch.Generator().manual_seed(0), 6, moe, kept)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "mixture"])
@pytest.mark.parametrize("kept", [False, True], ids=["whole", "kept"])
def test_what_is_read_is_what_was_written(tmp_path, moe, kept):
    rollout = rollout_of(moe, kept)
    rewards, indices = torch.rand(12), torch.arange(12)
    save_rollout(tmp_path / "r.parquet", rollout, reward=rewards, problem=indices)
    again, columns = load_rollout(tmp_path / "r.parquet")
    for name in PARTS:
        a, b = getattr(rollout, name), getattr(again, name)
        assert (a is None and b is None) or torch.equal(a, b), name
        assert a is None or a.dtype == b.dtype
    assert again.prompt_length == 3
    assert torch.equal(columns["reward"], rewards)
    assert torch.equal(columns["problem"], indices)


def test_other_readers_see_lists_without_padding(tmp_path):
    rollout = rollout_of(True, True)
    save_rollout(tmp_path / "r.parquet", rollout)
    rows = parquet.read_table(tmp_path / "r.parquet").to_pylist()
    for row, mask, completion, kept in zip(
        rows, rollout.mask, rollout.completions, rollout.kept, strict=True
    ):
        assert row["completion"] == completion[mask].tolist()
        assert [len(ids) for ids in row["kept"]] == kept[mask].sum(1).tolist()
        assert len(row["routes"]) == (3 + len(row["completion"]) - 1) * 2 * 2


def test_masks_with_gaps_and_rows_without_a_token_survive(tmp_path):
    rollout = rollout_of(False, False)
    mask = torch.zeros_like(rollout.mask)
    mask[0, [0, 4]] = True
    gaps = replace(rollout, mask=mask).rows(slice(0, 3))
    save_rollout(tmp_path / "r.parquet", gaps)
    again, _ = load_rollout(tmp_path / "r.parquet")
    assert torch.equal(again.mask, gaps.mask)
    assert torch.equal(again.completions[0, :5], gaps.completions[0, :5])


def test_bad_columns_and_files_are_refused(tmp_path):
    rollout = rollout_of(False, False)
    with pytest.raises(ValueError, match=r"reward has shape \(3,\); it must be \(12,\)"):
        save_rollout(tmp_path / "r.parquet", rollout, reward=torch.zeros(3))
    with pytest.raises(ValueError, match="'mask' is the rollout's own"):
        save_rollout(tmp_path / "r.parquet", rollout, mask=torch.zeros(12))
    parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="holds no rollout"):
        load_rollout(tmp_path / "other.parquet")


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"dslib-notebooks\[spark\]"):
        save_rollout(tmp_path / "r.parquet", rollout_of(False, False))
    with pytest.raises(ModuleNotFoundError, match=r"dslib-notebooks\[spark\]"):
        load_rollout(tmp_path / "r.parquet")
