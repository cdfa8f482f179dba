"""The comparison of sparse attentions: same weights, right distances, honest switches."""

from dataclasses import replace

import pandas
import pytest
import torch

from dslib.attention import NSASizes
from dslib.experiments import sparse_attention as study
from dslib.models import DecoderConfig, MoBAConfig, NSAConfig, SlidingWindowConfig
from dslib.runs.workers import in_workers
from dslib.tasks import RecallTask

TASK = RecallTask(facts=2, values=3, distance=1)
MOBA, NSA = MoBAConfig(4, 2), NSAConfig(NSASizes(4, 2, 4, selected=4, window=4))


@pytest.fixture
def base(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    model = DecoderConfig(d_model=16, layers=2, heads=2)
    sizes = {"steps": 3, "batch_size": 2, "context": 24, "evaluations": 1, "evaluation_windows": 3}
    return study.SparseConfig(
        model, optimizer="muon", lr=0.02, recall=TASK, corpus=str(file), answers=5, **sizes
    )


class Oracle:
    """Answers every question from up to ``far`` tokens back, and says 0 to all else."""

    def __init__(self, far):
        self.far = far

    def __call__(self, tokens):
        logits = torch.zeros(*tokens.shape, 256)
        question = TASK.first_symbol + TASK.facts * TASK.values
        for row, line in enumerate(tokens.tolist()):
            for place, token in enumerate(line):
                if token >= question:
                    first = TASK.first_symbol + (token - question) * TASK.values
                    facts = [i for i, x in enumerate(line[:place]) if first <= x < first + TASK.values]
                    if place - facts[0] <= self.far:
                        logits[row, place, line[facts[0]]] = 1
        return logits


def test_distances_are_those_from_question_to_fact():
    text = torch.arange(400, dtype=torch.uint8) % 100
    planted = TASK.evaluation(text, 7, 24)
    distance, right = study.recall_by_distance(Oracle(9), planted, batch_size=3)
    assert distance.shape == right.shape == (7 * TASK.facts,)
    assert distance.min() >= 1
    assert torch.equal(right, distance <= 9)
    assert study.recall_by_distance(Oracle(99), planted)[1].all()


def test_arms_differ_in_their_attention_alone(base):
    arms = study.arms(base, 4, MOBA, NSA)
    assert len(arms) == 8
    assert set(study.NULLS) | set(study.NULLS.values()) <= set(arms)
    for config in arms.values():
        same = {"model": replace(config.model, attention=None), "switch": None, "null_switch": None}
        assert replace(config, **same) == base
    assert arms["dense"].switch == arms["MoBA"].model
    assert arms["MoBA"].switch == arms["window"].switch == arms["dense"].model
    assert arms["dense"].null_switch == arms["MoBA, random blocks"].model
    assert arms["window"].model.attention == SlidingWindowConfig(4)
    assert arms["MoBA, last layer full"].model.attention.full_layers == 1
    assert arms["NSA, chosen by its own keys"].model.attention.selection == "own_keys"


def test_every_arm_runs_and_makes_a_row_without_gaps_in_what_is_reported(base):
    arms = study.arms(base, 4, MOBA, NSA)
    runs = dict(zip(arms, in_workers(study.sparse_run, arms.values()), strict=True))
    rows = {name: study.row(run, 4, arm=name) for name, run in runs.items()}
    assert len({tuple(each) for each in rows.values()}) == 1  # the same columns
    for name, run in runs.items():
        each = rows[name]
        assert run.distance.shape == (5 * TASK.facts,)
        assert each["text_loss"] == run.text_loss[-1]
        switched = name in ("dense", "MoBA", "window")
        assert (each["switched_loss"] != each["text_loss"]) == switched
        assert (run.null_switched_right is not None) == (name == "dense")
        far = run.right[run.distance > 2 * 3].double().mean().item()
        assert each["far"] == far
    assert rows["NSA"]["flops"] != rows["dense"]["flops"] > rows["window"]["flops"]


def test_a_model_switched_to_itself_is_the_same(base):
    run = study.sparse_run(replace(base, switch=base.model))
    assert run.switched_text_loss == pytest.approx(run.text_loss[-1])
    assert torch.equal(run.switched_right, run.right)
    every = replace(base.model, attention=MoBAConfig(4, 6))  # as many blocks as there are: dense
    assert study.sparse_run(replace(base, switch=every)).switched_text_loss == pytest.approx(
        run.text_loss[-1], rel=1e-5
    )


def test_facts_are_seen_where_the_mask_lets_them(base):
    text = torch.arange(400, dtype=torch.uint8) % 100
    planted = TASK.evaluation(text, 7, 24)
    distance, _ = study.recall_by_distance(Oracle(9), planted)

    def seen(attention):
        return study.facts_seen(replace(base.model, attention=attention).build(), planted, batch_size=3)

    assert seen(None).all()
    assert torch.equal(seen(SlidingWindowConfig(6)), (distance < 6)[:, None, None].expand(-1, 2, 2))
    for attention in (MOBA, NSA):
        found = seen(attention)
        assert found.shape == (7 * TASK.facts, 2, 2)
        assert 0 < found.double().mean() < 1
    assert seen(replace(MOBA, top_k=6)).all()


def test_the_share_seen_is_that_of_the_best_head(base):
    run = study.sparse_run(replace(base, model=replace(base.model, attention=SlidingWindowConfig(6))))
    assert run.seen_share(1, 5) == 1
    assert run.seen_share(6, 24) == 0
    run.seen[:, 1, 0] = True
    assert run.seen_share(6, 24) == 1


def test_ranges_of_distances_cover_the_context_once():
    assert study.bins(24, 8) == [(1, 8), (9, 16), (17, 23)]
    assert [x for low, high in study.bins(96, 7) for x in range(low, high + 1)] == list(range(1, 96))


def test_reach_is_layers_times_window_minus_one():
    assert [study.reach(*case) for case in ((1, 1), (1, 8), (2, 16), (3, 4))] == [0, 7, 30, 9]


def test_a_run_needs_something_to_ask(base):
    with pytest.raises(ValueError, match="recall=None"):
        study.sparse_run(replace(base, recall=None))


def test_a_diverged_run_is_an_error_and_not_a_row(base):
    with pytest.raises(RuntimeError, match="diverged"):
        study.sparse_run(replace(base, optimizer="adamw", lr=float("inf")))


def test_decoding_costs_what_is_read():
    model = DecoderConfig(d_model=32, heads=4, kv_heads=2)
    dense = study.decoding_cost(None, model, 100)
    assert (dense.bytes, dense.flops) == (2 * 2 * 8 * 2 * 100, 4 * 32 * 100)
    assert study.decoding_cost(SlidingWindowConfig(10), model, 100).bytes == dense.bytes / 10
    assert study.decoding_cost(MOBA, model, 10).bytes == 2 * 2 * 8 * 2 * (2 + 4 + 1)
    nsa = study.decoding_cost(NSA, model, 100)
    assert nsa.flops == 4 * 32 * NSA.keys_read(100) + 2 * NSA.phi(model) * 2 / 2
    phi = NSA.module(model, 0).compress_key
    assert NSA.phi(model) == 2 * (phi.inner.weight.numel() + phi.outer.weight.numel())


def test_rows_of_all_seeds_and_their_means(base):
    arms = {name: study.arms(base, 4, MOBA, NSA)[name] for name in ("dense", "MoBA", "window")}
    table = pandas.DataFrame(study.measured_rows(arms, (1, 2), 4))
    assert table[["seed", "arm"]].values.tolist() == [[seed, arm] for seed in (1, 2) for arm in arms]
    assert table.iloc[0].text_loss == study.sparse_run(replace(base, seed=1, switch=base.model)).text_loss[-1]
    mean = study.means(table, arms)
    assert mean.arm.tolist() == list(arms)
    assert mean["read by the last query"].tolist() == [24, MOBA.keys_read(24), 4]
    assert mean["training FLOPs"][0] == 1
    assert mean["far"][2] == table[table.arm == "window"].far.mean()
    read = study.switches(table).set_index(["trained as", "read as"])
    assert read["text, nats/byte"]["window", "window"] == table[table.arm == "window"].text_loss.mean()
    assert read["text, nats/byte"]["window", "dense"] == table[table.arm == "window"].switched_loss.mean()


def test_a_strong_needle_is_chosen_and_no_window_sees_it():
    q, k = study.planted_qk(32, 8, 50.0)
    masks = study.seen_by(q, k, 4, MOBA, NSA.sizes)
    assert [masks[name][-1, 8].item() for name in ("dense", "window", "MoBA")] == [True, False, True]
    assert (q[0, 0, -1] @ k[0, 0, 8]) > 40
    assert masks["NSA, compressed"].shape == (32, NSA.sizes.compressed(32))
    plain = study.planted_qk(32, 8, 0.0)
    assert torch.equal(plain[0], q)
    assert not torch.equal(plain[1], k)
