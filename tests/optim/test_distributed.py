"""ZeRO-1 Muon over real processes: the numbers of one process, bytes, checkpoints, faults, deaths."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))  # so that new processes find the cases too
import distributed_cases as cases

from dslib.optim import Muon, RankFailed, ZeroMuon, distributed_launch, run_processes
from dslib.optim.sharding import planned_traffic

F32 = {"ns_dtype": torch.float32}
BITWISE = {
    "bf16 iterations": (cases.UNEVEN, 20, {}),
    "fp32 iterations": (cases.UNEVEN, 20, F32),
    "overlap": (cases.UNEVEN, 6, {"overlap": True}),
    "fewer entries than ranks": (cases.FEW_ENTRIES, 6, {}),
    "float64": (cases.UNEVEN, 6, {"dtype": torch.float64}),
    "float16": (cases.UNEVEN, 6, {"dtype": torch.float16}),
}
OTHERS = {
    "any gradients, fp32": (cases.UNEVEN, 20, {"dyadic": False, **F32}),
    "bf16 on the wire": (cases.UNEVEN, 6, {"gather_dtype": torch.bfloat16}),
    "bf16 parameters": (cases.UNEVEN, 6, {"dtype": torch.bfloat16}),
}
CASES = {**BITWISE, **OTHERS}


def reference(name):
    specification, steps, options = CASES[name]
    options = {k: v for k, v in options.items() if k not in ("overlap", "gather_dtype")}
    return cases.one_process(specification, steps, batched=False, **options)


@pytest.fixture(scope="module")
def halfway():
    """A checkpoint of the one-process optimizer after 10 steps."""
    torch.set_num_threads(1)
    values, optimizer = cases.one_process(cases.UNEVEN, 10, batched=False)
    return optimizer.state_dict(), values


@pytest.fixture(scope="module", params=[2, 4])
def told(request, halfway):
    """What every rank tells of all cases, for each number of ranks: one start of processes for all tests."""
    return run_processes(cases.everything, request.param, list(CASES.values()), *halfway)


@pytest.fixture
def alone():
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", BITWISE)
def test_any_number_of_ranks_equals_one_process_to_the_last_bit_given_the_same_mean_gradients(told, name):
    expected, _ = reference(name)
    for rank in told:
        values = rank["equality"][list(CASES).index(name)]["values"]
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


@pytest.mark.parametrize("name", BITWISE)
def test_one_rank_equals_one_process_to_the_last_bit(alone, name):
    specification, steps, options = BITWISE[name]
    values, _ = cases.sharded(specification, steps, **options)
    assert all(torch.equal(a, b) for a, b in zip(values, reference(name)[0], strict=True))


def test_gradients_that_round_differently_leave_weights_within_1e_6_with_fp32_iterations(told):
    expected, _ = reference("any gradients, fp32")
    values = told[0]["equality"][list(CASES).index("any gradients, fp32")]["values"]
    difference = max((a - b).abs().max().item() for a, b in zip(values, expected, strict=True))
    assert difference < 1e-6


def test_each_rank_orthogonalising_its_rows_alone_would_be_far_off():
    expected, _ = reference("fp32 iterations")
    rows = [
        (
            name,
            shape,
            {**options, "split_sizes": (-(-shape[0] // 2), shape[0] // 2)} if shape[0] > 1 else options,
        )
        for name, shape, options in cases.UNEVEN
    ]
    values, _ = cases.one_process(rows, 20, batched=False, **F32)
    assert max((a - b).abs().max().item() for a, b in zip(values, expected, strict=True)) > 0.01


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_end_with_the_same_parameters(told, name):
    first, *others = (rank["equality"][list(CASES).index(name)]["values"] for rank in told)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_bf16_on_the_wire_gives_the_same_for_any_number_of_ranks_and_rounds_once(told, alone):
    """All directions are rounded, cut or not: one rank, which sends nothing, must agree to the last bit."""
    specification, steps, options = CASES["bf16 on the wire"]
    one, _ = cases.sharded(specification, steps, **options)
    values = told[0]["equality"][list(CASES).index("bf16 on the wire")]["values"]
    assert all(torch.equal(a, b) for a, b in zip(values, one, strict=True))
    exact, _ = cases.one_process(specification, steps, batched=False)
    difference = max((a - b).abs().max().item() for a, b in zip(values, exact, strict=True))
    assert 0 < difference < 0.02


def test_bf16_parameters_agree_to_their_own_precision(told):
    expected, _ = reference("bf16 parameters")
    values = told[0]["equality"][list(CASES).index("bf16 parameters")]["values"]
    for a, b in zip(values, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def test_bytes_counted_at_the_collectives_are_the_planned_ones(told):
    """Blocks of a fused weight are matrices of their own; a convolution is [out, in·kh·kw]."""
    shapes = [(5, 7), (18, 5), (1, 9), (7, 12), (6, 5), (3, 5), (3, 5), (16, 16), (4, 6)]
    for name, sizes in {
        "bf16 on the wire": (4, 4, 2),
        "bf16 parameters": (2, 2, 2),
        "float64": (8, 8, 8),
    }.items():
        _, steps, _ = CASES[name]
        counts = [rank["equality"][list(CASES).index(name)]["sent"] for rank in told]
        plan = planned_traffic(shapes, len(told), *sizes)
        for purpose in ("gradients", "parameters"):
            assert sum(count[purpose] for count in counts) == steps * plan[purpose]
        # A parameter without any gradient in a step is not gathered.
        assert 0 < sum(count["momentum"] for count in counts) <= steps * plan["momentum"]


def test_without_missing_gradients_the_momentum_sent_is_the_planned_one(told):
    _, steps, _ = CASES["fewer entries than ranks"]
    counts = [rank["equality"][list(CASES).index("fewer entries than ranks")]["sent"] for rank in told]
    skipped = sum(
        all(cases.micro_gradient(step, micro, 0, (1, 3), torch.float32) is None for micro in range(4))
        for step in range(steps)
    )
    plan = planned_traffic([(1, 3)], len(told), momentum_bytes=4)
    assert sum(count["momentum"] for count in counts) == (steps - skipped) * plan["momentum"]


def test_overlap_sends_the_same_bytes_in_more_exchanges(told):
    index = list(CASES).index("overlap")
    plain, overlapped = (
        (rank["equality"][index]["calls"] for rank in told),
        told[0]["equality"][index]["calls"],
    )
    assert overlapped["momentum"] >= next(plain)["momentum"] >= 1


def test_state_is_a_shard_of_the_momentum_and_nothing_else(told):
    entries = sum(p.numel() for _, p in cases.parameters(cases.UNEVEN))
    sizes = [rank["equality"][0]["state_bytes"] for rank in told]
    assert sum(sizes) == 4 * entries
    assert max(sizes) == 4 * -(-entries // len(told))


def test_checkpoint_of_any_number_of_ranks_is_that_of_one_process(told):
    _, optimizer = reference("bf16 iterations")
    expected = optimizer.state_dict()
    for rank in told:
        found = rank["equality"][list(CASES).index("bf16 iterations")]["checkpoint"]
        assert found["state"].keys() == expected["state"].keys()
        for index, state in expected["state"].items():
            assert torch.equal(found["state"][index]["momentum_buffer"], state["momentum_buffer"])
        assert [g["params"] for g in found["param_groups"]] == [g["params"] for g in expected["param_groups"]]


def test_run_goes_on_bitwise_when_a_checkpoint_moves_from_one_process_to_many_ranks(told):
    expected, _ = reference("bf16 iterations")
    for rank in told:
        assert all(torch.equal(a, b) for a, b in zip(rank["resumed"], expected, strict=True))


def test_run_goes_on_bitwise_when_a_checkpoint_moves_from_many_ranks_to_one_process(told, halfway):
    """The ranks' checkpoint after 20 steps, loaded by plain Muon, against 22 steps of plain Muon."""
    of_ranks = told[0]["equality"][list(CASES).index("bf16 iterations")]
    values = cases.resume(of_ranks["checkpoint"], of_ranks["values"], 20, 22)
    expected, _ = cases.one_process(cases.UNEVEN, 22, batched=False)
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


def test_zero_adamw_equals_torchs_and_survives_its_own_checkpoint(told):
    for rank in told:
        for ours, theirs in zip(*rank["adamw"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_group_added_later_moves_the_cuts_and_keeps_the_momentum(told):
    for rank in told:
        assert all(torch.equal(a, b) for a, b in zip(*rank["growing"], strict=True))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("order", ["parameter wide (", "parameter tall ("]),
        ("shape", ["parameter conv ((7, 3, 2, 2)", "rank 1 has parameter conv ((7, 3, 2, 3)"]),
        ("missing", ["parameter normed", "no further parameter"]),
        ("option", ["option weight_decay of group 0"]),
        ("overlap", ["option overlap (False) on rank 0", "option overlap (True)"]),
        ("size", ["process_group has", "are asked for"]),
        ("gather_dtype", ["gather_dtype=torch.int8"]),
        ("no group", ["process_group='all'"]),
        ("values", ["the initial value of parameter conv"]),
        ("sparse", ["RuntimeError", "parameter tall is sparse"]),
        ("checkpoint", ["momentum_buffer of parameter wide", "(7, 5)", "(5, 7)"]),
        ("flat", ["parameter gain", "(3,)"]),
        ("dtensor", ["parameter sharded is a DTensor"]),
    ],
)
def test_bad_input_is_refused_by_name_on_every_rank(told, fault, words):
    for rank in told:
        for word in words:
            assert word in rank["faults"][fault]


def test_rank_outside_the_group_is_told_so_and_no_parameters_are_no_fault(told):
    for rank in told:
        said = rank["faults"]["no member"]
        assert ("does not contain this process" in said) == (rank["rank"] > 0)
        assert rank["faults"]["nothing"] == "no error"


def test_muon_on_dtensors_gives_the_numbers_of_whole_tensors(told):
    for rank in told:
        found = rank["dtensors"]
        local = found.pop("local momentum")
        assert local < 35 / len(told) + 5  # rows of a 7 × 5 weight
        assert max(found.values()) < 1e-6


def test_without_a_process_group_the_error_says_what_to_do():
    with pytest.raises(RuntimeError, match="init_process_group"):
        ZeroMuon([nn.Parameter(torch.ones(2, 2))], lr=0.1)


def test_closure_scheduler_and_unnamed_parameters_work_as_in_torch(alone):
    p = nn.Parameter(torch.eye(4))
    optimizer = ZeroMuon([p], lr=torch.tensor(0.05))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)

    def closure():
        optimizer.zero_grad()
        loss = (p @ torch.ones(4, 2)).square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    schedule.step()
    assert [optimizer.step(closure).item() for _ in range(5)][-1] < first


def test_old_checkpoint_without_newer_options_loads(alone):
    p = nn.Parameter(torch.ones(2, 2))
    saved = Muon([p], lr=0.1).state_dict()
    for group in saved["param_groups"]:
        del group["ns_dtype"], group["batched"]
    for optimizer in (Muon([p], lr=0.2), ZeroMuon([p], lr=0.2)):
        optimizer.load_state_dict(saved)
        p.grad = torch.ones(2, 2)
        optimizer.step()


def test_killed_rank_ends_the_job_with_an_error_on_all_and_leaves_no_process():
    before = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_processes(cases.killed, 2, 1, 3, timeout=30)
    assert time.monotonic() - before < 30  # the broken connection, not the timeout
    assert caught.value.rank == 1
    assert caught.value.errors[1] == "killed by signal 9"
    assert "distributed_cases.py" in caught.value.errors[0]  # rank 0 raised, inside its step
    assert "RuntimeError" in str(caught.value) or "DistBackendError" in str(caught.value)
    # What may stay are direct children: multiprocessing's own servers, from which the ranks are forked.
    me = psutil.Process()
    assert not [child for child in me.children(recursive=True) if child.ppid() != me.pid]


def test_rank_that_raises_is_named_with_its_traceback():
    with pytest.raises(RankFailed, match="rank 1 failed first") as caught:
        run_processes(cases.one_raises_and_one_waits, 2, timeout=30)
    assert "ArithmeticError: of rank 1" in caught.value.errors[1]
    assert 0 in caught.value.errors


def test_rank_that_hangs_runs_into_the_timeout_of_the_others(monkeypatch):
    monkeypatch.setattr(distributed_launch, "GRACE", 0.2)
    with pytest.raises(RankFailed) as caught:
        run_processes(cases.one_waits_too_long, 2, timeout=1.5)
    assert caught.value.rank == 0
    assert "ended here" in caught.value.errors[1]


def test_rank_that_leaves_without_a_result_is_an_error():
    with pytest.raises(RankFailed, match="left with exit code 0"):
        run_processes(cases.leave_without_a_word, 1)


def test_processes_end_when_their_parent_is_killed(tmp_path):
    parent = subprocess.Popen([sys.executable, cases.__file__, str(tmp_path)])
    files = [tmp_path / f"{rank}.pid" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(file.is_file() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = [psutil.Process(int(file.read_text())) for file in files]
    parent.kill()
    parent.wait()
    gone, alive = psutil.wait_procs(children, timeout=20)
    assert len(gone) == 2
    assert not alive


@pytest.mark.parametrize(
    ("function", "ranks", "words"),
    [(cases.equality, 0, "ranks=0"), (threading.Lock().acquire, 2, "cannot be sent")],
)
def test_launcher_refuses_what_cannot_run(function, ranks, words):
    with pytest.raises(ValueError, match=words):
        run_processes(function, ranks)


def test_function_that_no_module_has_travels_with_what_it_uses():
    offset = 10

    def of_a_notebook(factor):
        return offset + factor * dist.get_rank()

    assert run_processes(of_a_notebook, 2, 3) == [10, 13]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU a rank")
def test_nccl_gives_the_same_numbers():
    ranks = min(2, torch.cuda.device_count())
    results = run_processes(cases.on_gpu, ranks, backend="nccl")
    for sharded, whole in results:
        for a, b in zip(sharded, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
