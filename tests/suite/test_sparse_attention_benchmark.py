"""The benchmark of sparse attention on tiny cases: what is timed computes the same, and a miss is printed."""

import pytest
import torch

from dslib.suite.benchmarks import sparse_attention as benchmark


def test_table_has_all_ways_and_parts_with_their_goals(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(benchmark, "DECODE", ((64, 0.0), (32, 1e9)))
    monkeypatch.setattr(benchmark, "PREFILL", (32,))
    monkeypatch.setattr(benchmark, "MEMORY_LENGTH", 64)
    monkeypatch.setattr(benchmark, "REPEATS", 1)
    benchmark.main()
    printed = capsys.readouterr().out
    for part in (
        "dense",
        "one product",
        "part: scores",
        "part: selection",
        "part: attention",
        "masked dense",
    ):
        assert part in printed
    assert "≤ 0.0 missed" in printed
    assert "≤ 1000000000.0 reached" in printed


@pytest.mark.parametrize(("time", "context"), [(1, 64), (1, 33), (40, 40), (3, 50)])
def test_sparse_ways_agree_and_with_all_keys_selected_they_are_dense(monkeypatch, time, context):
    at = benchmark.inputs(time, context)
    torch.testing.assert_close(benchmark.sparse(**at), benchmark.masked_dense(**at), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(benchmark, "RATIO", 1)
    if time in (1, context):
        dense = benchmark.dense(at["q"], at["kv"])
        torch.testing.assert_close(benchmark.sparse(**at), dense, rtol=1e-4, atol=1e-5)


def test_dense_ways_agree():
    at = benchmark.inputs(1, 20)
    dense, by_hand = benchmark.dense(at["q"], at["kv"]), benchmark.one_product(at["q"], at["kv"])
    torch.testing.assert_close(dense, by_hand, rtol=1e-4, atol=1e-5)


def test_memory_that_the_allocator_still_held_is_a_rise_of_nothing_and_no_error(monkeypatch):
    monkeypatch.setattr(benchmark, "MEMORY_LENGTH", 64)
    monkeypatch.setattr(benchmark, "peak_memory", lambda function: 0)
    assert [row[-1] for row in benchmark._memory()] == ["0", "0"]
