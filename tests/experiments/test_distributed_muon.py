"""Data-parallel training of the decoder, in one process here; the ranks are in tests/optim/test_distributed.py."""

import argparse
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from dslib.experiments import distributed_muon as study
from dslib.experiments import distributed_traffic as traffic
from dslib.models import DecoderConfig, TrainConfig, train
from dslib.optim import RankFailed, run_processes

CONFIG = TrainConfig(
    DecoderConfig(d_model=8, heads=2, layers=1, mlp_size=16),
    optimizer="muon",
    steps=3,
    batch_size=4,
    context=16,
    lr=0.01,
    evaluations=1,
    evaluation_windows=1,
    corpus=argparse.__file__,  # 100 kB instead of the whole standard library
)
F32 = {"ns_dtype": torch.float32}


@pytest.fixture(scope="module")
def recording():
    torch.set_num_threads(1)
    return study.record_gradients(CONFIG)


@pytest.fixture(scope="module")
def ranks(recording):
    """One start of processes for everything."""
    return run_processes(both, 2, recording)


MODELS = {"two matrices": [(6, 4), (4, 4)], "one matrix": [(6, 8)]}


def both(recording):
    half = study.train_rank(CONFIG, F32, stop=2)
    return {
        "counted": study.run_named(traffic.counting_runs(MODELS)),
        "straight": study.train_rank(CONFIG, F32),
        "resumed": study.train_rank(CONFIG, F32, half),
        "half": half,
        "adamw": study.train_rank(replace(CONFIG, optimizer="adamw")),
        "muon": study.replay(recording, {"gather_dtype": torch.bfloat16}),
        "exact": study.replay(recording, {}, True),
        "fsdp": study.train_fsdp(CONFIG, F32),
        "everything": study.replay(recording, {"everything": True}),
    }


def test_one_process_trains_as_the_plain_loop_does():
    run, expected = study.train_rank(CONFIG), train(CONFIG)
    assert run.losses == pytest.approx(expected.train_loss, abs=1e-3)  # batched and single iterations
    assert run.losses[0] == expected.train_loss[0]
    assert run.sent == {"matrices": {}, "rest": {}}


def test_ranks_train_as_one_process_does(ranks):
    one = study.train_rank(CONFIG, F32)
    for rank in ranks:
        assert rank["straight"].losses == pytest.approx(one.losses, abs=1e-5)
        assert study.largest_difference(rank["straight"].weights, one.weights) < 1e-4


def test_fsdp_trains_as_one_process_does(ranks):
    one = study.train_rank(CONFIG, F32)
    for rank in ranks:
        assert study.largest_difference(rank["fsdp"], one.weights) < 1e-4


def test_recording_of_shapes_has_those_of_a_decoder():
    shapes = study.matrix_shapes(CONFIG.model)
    made = traffic.recording_of_shapes(shapes, steps=2)
    assert (
        [tuple(value.shape) for value in made.initial.values()]
        == shapes
        == [(8, 8)] * 4 + [(16, 8)] * 2 + [(8, 16)]
    )
    assert len(made.gradients) == 2
    assert len(made.gradients[0]) == 4


def test_checkpoint_of_two_ranks_goes_on_on_two_and_on_one(ranks):
    straight, half = ranks[0]["straight"], ranks[0]["half"]
    assert study.differing_entries(ranks[0]["resumed"].weights, straight.weights) == 0
    assert half.step == 2
    assert study.train_rank(CONFIG, F32, half).losses == pytest.approx(straight.losses[2:], abs=1e-5)


def test_replay_of_exact_gradients_is_bitwise_and_row_blocks_are_not(ranks, recording):
    one = study.replay(recording, exact=True)
    assert study.differing_entries(ranks[0]["exact"].weights, one.weights) == 0
    rows = study.replay(recording, {"rows_of": 2}, exact=True)
    assert study.largest_difference(rows.weights, one.weights) > 1e-3


def test_muon_keeps_half_of_adamws_state_and_sends_at_most_a_quarter_more(ranks):
    runs = [rank["straight"] for rank in ranks], [rank["adamw"] for rank in ranks]
    muon, adamw = (sum(run.state_bytes["matrices"] for run in group) for group in runs)
    assert muon * 2 == adamw
    baseline = sum(traffic.total_sent([run.sent["matrices"] for run in runs[1]]).values())
    sent = {
        name: sum(traffic.total_sent([r[name].sent for r in ranks]).values())
        for name in ("muon", "everything")
    }
    assert baseline <= sent["muon"] <= 1.25 * baseline < 1.4 * baseline < sent["everything"]


def test_counts_have_a_row_a_model_and_optimizer_and_add_up(ranks):
    table = traffic.counts(MODELS, {2: [rank["counted"] for rank in ranks]})
    assert len(table) == len(MODELS) * len(traffic.COUNTED)
    assert (
        table["sent"] > table[["gradients", "parameters", "momentum"]].sum(axis=1)
    ).all()  # flags, a few bytes
    one = table[table["model"] == "one matrix"].set_index("optimizer")
    assert one["unsharded"].tolist() == [4 * 48] * 3
    assert one["state"].to_dict() == {"AdamW": 2 * 4 * 24, "Muon": 4 * 24, "gather all, fp32": 4 * 24}
    assert one["momentum"].to_dict() == {"AdamW": 0, "Muon": 2 * 48, "gather all, fp32": 4 * 48}


def test_comparison_finds_the_largest_difference_and_counts_the_differing():
    def replay(*weights):
        return study.Replay({"w": torch.tensor(weights)}, {}, 0)

    one = {("Muon", 0): replay(1.0, 2.0, 3.0)}
    answers = {1: one, 2: {("Muon", 0): replay(1.0, 2.5, 3.25)}}
    table = study.compare(answers, one)
    assert table.loc[("Muon", 0, 1)].tolist() == [0.0, 0]
    assert table.loc[("Muon", 0, 2)].tolist() == [0.5, 2]


def test_small_run_can_be_shared_by_eight_ranks():
    run = study.small_run(24, 2, 32, 20)
    assert (run.batch_size % 8, run.model.d_model, run.steps, run.corpus) == (0, 24, 20, None)


def test_named_runs_come_back_under_their_names():
    runs = {"a": partial(int, "1"), ("b", 2): partial(str, 2)}
    assert study.run_named(runs) == {"a": 1, ("b", 2): "2"}


def test_rows_are_shared_without_empty_blocks():
    assert study.row_blocks(18, 8) == (3,) * 6
    assert study.row_blocks(3, 4) == (1, 1, 1)
    assert study.row_blocks(7, 2) == (4, 3)


def test_batches_that_cannot_be_shared_are_refused(recording, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(ValueError, match=r"batch_size=4.*3 ranks"):
        study.train_rank(CONFIG)
    with pytest.raises(ValueError, match=r"4 micro batches.*3 ranks"):
        study.replay(recording)
    with pytest.raises(ValueError, match=r"batch_size=4.*multiple of 3"):
        study.record_gradients(CONFIG, 3)


def test_wire_check_counts_what_the_formula_says_and_what_the_system_saw():
    found = run_processes(traffic.wire_check, 2, 2**16)[0]
    assert set(found) == {"reduce-scatter", "exchange", "all-gather"}
    for counted, seen in found.values():
        assert counted == 2**16 * 4  # both ranks together: each sends half of the buffer
        assert seen is None or seen >= counted


def test_dying_rank_is_reported():
    with pytest.raises(RankFailed, match="rank 1 failed first:\nkilled by signal 9"):
        run_processes(study.die, 2, CONFIG, 1, 1)


def test_torchrun_prints_the_losses_of_one_process():
    options = {"steps": 3, "d-model": 8, "context": 16, "lr": 0.01, "corpus": argparse.__file__}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "dslib.experiments.train_distributed", "--fp32"]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ran.returncode == 0, ran.stderr
    printed = [float(loss) for loss in re.findall(r"step \d+: ([\d.]+)", ran.stdout)]
    model = DecoderConfig(d_model=8, heads=2, layers=2)
    one = study.train_rank(replace(CONFIG, model=model, batch_size=8, rest_lr=0.032), F32)
    assert printed == pytest.approx(one.losses, abs=2e-5)
