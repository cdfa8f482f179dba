"""The benchmark of the policy loss on tiny cases: what is timed computes the same, and a miss is printed."""

import pytest
import torch

from dslib.suite.benchmarks import policy_loss as benchmark


@pytest.fixture
def tiny(monkeypatch):
    sizes = {"SEQUENCES": 2, "TOKENS": 5, "VOCABULARY": 11, "DIM": 4, "CHUNK": 3, "REPEATS": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(benchmark, name, value)


@pytest.mark.parametrize(("goal", "verdict"), [(0.0, "missed"), (1e9, "reached")])
def test_table_has_both_ways_with_time_and_memory_and_their_goals(tiny, monkeypatch, capsys, goal, verdict):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(benchmark, "TIME_GOAL", goal)
    # Of so little, memory would be rounding errors of the system.
    monkeypatch.setattr(benchmark, "peak_memory", lambda call: call() and 2**20)
    benchmark.main()
    printed = capsys.readouterr().out
    for part in (
        "token ratio  eager",
        "token ratio  chunked",
        "sequence ratio  chunked",
        "3 tokens at a time",
    ):
        assert part in printed
    assert f"≤ {goal} {verdict}" in printed
    assert "≤ 0.25 missed" in printed
    assert printed.count("≤") == 2


@pytest.mark.parametrize("name", benchmark.CONFIGS)
def test_both_ways_agree_in_loss_and_gradients(tiny, name):
    benchmark.check(benchmark.CONFIGS[name])
    found = [call() for call in benchmark.ways(benchmark.CONFIGS[name]).values()]
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-6)


def test_a_way_that_computes_something_else_is_not_timed(tiny, monkeypatch):
    monkeypatch.setattr(benchmark, "eager", lambda *at: tuple(2 * x for x in benchmark.chunked(*at)))
    with pytest.raises(AssertionError):
        benchmark.main()
