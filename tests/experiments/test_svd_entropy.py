"""Spectra of trained weights: what is measured, against what, and by which search."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from dslib.experiments import svd_entropy as study
from dslib.experiments.muon import Rates
from dslib.models import Decoder, DecoderConfig, TrainConfig, train
from dslib.models.moe import MoEConfig
from dslib.runs.workers import in_workers
from dslib.spectra import svd_entropy

MODEL = DecoderConfig(d_model=16, heads=2, layers=2, moe=MoEConfig(experts=4, top_k=2, bias_update_rate=0.1))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("to be or not to be that is the question " * 100)
    return TrainConfig(
        MODEL,
        steps=4,
        batch_size=2,
        context=16,
        lr=0.05,
        evaluations=2,
        evaluation_windows=2,
        corpus=str(file),
    )


@pytest.fixture(scope="module")
def run(tiny):
    return study.spectra_run(tiny)


def test_every_matrix_has_its_kind(run):
    assert {g: run.groups.count(g) for g in study.GROUPS} == {
        "query": 2, "key": 2, "value": 2, "output": 2, "MLP": 2 * 3 * 5, "router": 2
    }  # fmt: skip
    assert study.matrix_group("blocks.0.mlp.down.weight") == "MLP"
    for name in ("embedding.weight", "lm_head.weight", "blocks.0.mlp_norm.weight"):
        with pytest.raises(ValueError, match="no matrix"):
            study.matrix_group(name)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_measures_belong_to_the_weights_that_training_leaves(tiny, optimizer):
    config, last = replace(tiny, optimizer=optimizer), {}
    run = study.spectra_run(config)
    result = train(config, observe=lambda step, model, _: last.update(study.matrices_of(model)))
    assert (run.final_loss, run.at, run.names) == (result.final_loss, (2, 4), tuple(last))
    expected = torch.stack([svd_entropy(weight) for weight in last.values()])
    torch.testing.assert_close(run.entropy[-1], expected)
    of_spectra = torch.stack([svd_entropy(torch.diag(sigma)) for sigma in run.learnt_spectra.values()])
    torch.testing.assert_close(run.learnt_entropy[-1], of_spectra)
    assert run.loads.shape == run.biases.shape == (4, 2, 4)
    assert run.loads.sum(-1).unique().tolist() == [2 * 2 * 16]
    assert run.violations().shape == (4,)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weight_decay_of_the_start_is_not_counted_as_learnt(tiny, optimizer, monkeypatch):
    """With gradients that change nothing, all that is left of a run is the decay, and the learnt part is 0."""
    config = replace(tiny, optimizer=optimizer, weight_decay=5.0)
    monkeypatch.setattr(Decoder, "loss", lambda self, *_: sum(p.sum() for p in self.parameters()) * 0 + 1.0)
    monkeypatch.setattr(study, "svd_entropy", lambda W: W.norm())
    run = study.spectra_run(config)
    initial = torch.stack([w.double().norm() for w in study.matrices_of(Decoder(MODEL)).values()])
    assert (run.entropy[-1] < 0.7 * initial).all(), "the weights have decayed"
    assert (run.learnt_entropy[-1] < 1e-5 * initial).all()
    assert (run.distance < 1e-5).all()


def test_run_against_itself_is_nowhere_higher(run):
    rows = study.summary(run, run, arm="x")
    assert [row["at"] for row in rows] == [2, 4]
    assert all(row["higher"] == row["learnt_higher"] == 0 for row in rows)
    assert rows[-1]["entropy router"] == pytest.approx(
        run.by_group(run.entropy)["router"][-1].item(), abs=1e-6
    )
    assert rows[-1]["violation"] == run.violations()[-1].item()
    assert study.router_gap(run, run) == (0, 0)
    with pytest.raises(ValueError, match="differ"):
        study.summary(run, replace(run, at=(1, 2)))


def test_summaries_pair_runs_by_seed(run):
    other = replace(run, config=replace(run.config, seed=1))
    rows = pd.DataFrame(study.summaries({"AdamW": [run, other], "Muon": [other]}, model="m"))
    assert len(rows) == 3 * 2
    assert set(rows.model) == {"m"}
    with pytest.raises(ValueError, match="seed 1"):
        study.summaries({"AdamW": [run], "Muon": [other]})


def test_router_gap_tells_routers_from_the_rest(run):
    higher = replace(
        run, entropy=run.entropy + torch.tensor([0.5 if g == "router" else 0.1 for g in run.groups])
    )
    assert study.router_gap(higher, run) == pytest.approx((0.5, 0.1))
    assert study.share_higher(higher.entropy, run.entropy) == [1.0, 1.0]


def test_dense_model_has_no_loads(tiny):
    run = study.spectra_run(replace(tiny, model=replace(MODEL, moe=None)))
    assert run.loads.numel() == 0
    assert study.summary(run, run)[0]["violation"] == 0


def test_diverged_run_is_an_error_with_its_rate(tiny):
    with pytest.raises((RuntimeError, ValueError), match="diverge"):
        study.spectra_run(replace(tiny, lr=math.inf))


def test_workers_give_the_same_measurements(tiny, run):
    (again,) = in_workers(study.spectra_run, [tiny])
    assert torch.equal(again.learnt_entropy, run.learnt_entropy)


def test_search_is_bracketed_and_its_best_rate_trains_the_arms(tiny):
    best = {"adamw": 0.003, "muon": 0.4}

    def valley(configs):
        for c in configs:
            loss = math.log2(c.lr / best[c.optimizer]) ** 2 + 1e-3 * (c.seed % 3)
            yield SimpleNamespace(config=c, final_loss=loss)

    start = {"AdamW": Rates(0.016, 0.18, 0.8), "Muon": Rates(0.064, 0.13, 0.7)}
    table = pd.DataFrame(study.search_rates(tiny, start, (5, 6), valley, model="m"))
    assert set(table.seed) == {5, 6}
    assert set(table.model) == {"m"}
    arms = study.tuned_arms(tiny, start, table)
    for name, optimizer in study.OPTIMIZERS.items():
        assert abs(math.log2(arms[name].lr / best[optimizer])) < 0.51
        assert arms[name].steps == tiny.steps, "equal steps, as in the paper"
        assert arms[name].rest_lr == start[name].rest_lr
    assert (arms["AdamW"].betas[0], arms["Muon"].momentum) == (0.8, 0.7)
    assert arms[study.STAND_IN].lr == arms["AdamW"].lr / 2
    assert replace(arms[study.STAND_IN], lr=arms["AdamW"].lr) == arms["AdamW"]
    with pytest.raises(ValueError, match="edge"):
        study.tuned_arms(tiny, start, table[(table.arm == "Muon") | (table.lr == table.lr.min())])
    assert study.tuned_arms(tiny, start)["Muon"].lr == 0.064


def test_stand_in_halves_the_rate_of_the_matrices_only(tiny):
    shared = study.with_stand_in({"AdamW": replace(tiny, rest_lr=None)})[study.STAND_IN]
    assert (shared.lr, shared.rest_lr) == (tiny.lr / 2, tiny.lr)


def test_balance_arms_differ_in_the_bias_alone(tiny):
    arms = study.balance_arms(tiny)
    settings = [(c.model.moe.bias_rule, c.model.moe.bias_update_rate) for c in arms.values()]
    assert settings == [("moonlight", 0.1), ("deepseek", 0.1), ("moonlight", 0.0)]
    with pytest.raises(ValueError, match="dense"):
        study.balance_arms(replace(tiny, model=replace(MODEL, moe=None)))


def test_weights_of_any_decoder_are_measured_matrix_by_matrix():
    rows = study.measured_weights(Decoder(DecoderConfig(d_model=16, heads=2, layers=2)).state_dict())
    assert len(rows) == 2 * 7
    assert {row["group"] for row in rows} == set(study.GROUPS) - {"router"}
    assert rows[0]["svd_entropy"] == pytest.approx(
        svd_entropy(
            Decoder(DecoderConfig(d_model=16, heads=2, layers=2)).blocks[0].attention.query.weight
        ).item()
    )


def test_four_bits_keep_the_ends_of_a_block_and_leave_sixteen_levels():
    W = torch.randn(4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rounded = study.in_four_bits(W)
    for before, after in zip(W.view(-1, 32), rounded.view(-1, 32), strict=True):
        assert after.min().item() == pytest.approx(before.min().item())
        assert after.max().item() == pytest.approx(before.max().item())
        assert len(after.unique()) <= 16
        assert (after - before).abs().max() <= (before.max() - before.min()) / 30 + 1e-12


def test_middle_value_is_the_mean_over_matrices_and_runs():
    one, other = torch.tensor([1.0, 0.5, 0.1]), torch.tensor([1.0, 0.3])
    runs = [SimpleNamespace(learnt_spectra=each) for each in ({"a": one, "b": other}, {"a": one})]
    assert study.middle_values({"Muon": runs}) == {"Muon": pytest.approx((0.5 + 0.3 + 0.5) / 3)}
