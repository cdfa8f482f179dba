"""The benchmark's rows on tiny cases: what is timed is what is named, and its error is measured."""

import pytest
import torch

from dslib import kernels
from dslib.suite import benchmarks
from dslib.suite.benchmarks import newton_schulz as benchmark


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(benchmark, "CPU_PRODUCTS", (12,))
    monkeypatch.setattr(benchmark, "CPU_SHAPES", ((6, 6), (4, 12)))
    monkeypatch.setattr(benchmark, "REPEATS", 2)


def test_without_a_gpu_it_says_so_and_times_torchs_own_paths(tiny, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    benchmarks.run_benchmark("newton_schulz")
    printed = capsys.readouterr().out
    assert "no GPU" in printed
    for row in ("12²  whole product", "12²  lower blocks", "6 × 6  plain", "4 × 12  gram"):
        assert row in printed
    assert "triton" not in printed


def test_interrupted_benchmark_prints_what_it_has(tiny, monkeypatch, capsys):
    rows = benchmark.measure_cpu()

    def interrupted():
        yield next(rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(benchmark, "measure_cpu", interrupted)
    with pytest.raises(KeyboardInterrupt):
        benchmark.main()
    assert "12²  whole product" in capsys.readouterr().out


def test_each_way_runs_under_its_own_choice_and_milliseconds_are_those_of_one_call(monkeypatch):
    seen = []
    monkeypatch.setattr(kernels, "_installed", lambda: True)

    def product(x):
        seen.append(kernels.chosen())
        return torch.ones_like(x) if kernels.chosen() == "triton" else x @ x.mT

    monkeypatch.setattr(benchmark, "gram_matrix", product)
    monkeypatch.setattr(benchmark, "symmetric_polynomial", lambda A, b, c: b * A + c * A @ A)
    monkeypatch.setattr(benchmark, "newton_schulz", lambda X, **options: X)
    before = kernels.chosen()
    rows = list(benchmark.measure("cpu", torch.float32, (8,), repeats=2, calls=3))
    assert kernels.chosen() == before
    # One product for A, one call a way for the errors, then three rounds (one untimed) of three calls.
    assert seen == [before, "torch", "triton", *(["torch"] * 3 + ["triton"] * 3) * 3]
    torch_row, triton_row = rows[:2]
    assert [row["way"] for row in rows[:2]] == ["torch", "triton"]
    assert torch_row["error"] < 1e-6 < 0.1 < triton_row["error"]
    assert all(row["min_ms"] <= row["median_ms"] <= row["max_ms"] and row["n"] == 2 for row in rows)
    assert len(rows) == 8


def test_milliseconds_are_divided_by_the_calls_of_a_turn(monkeypatch):
    timing = benchmarks.Timing(median=0.6, min=0.3, max=0.9, n=5)
    monkeypatch.setattr(benchmark, "interleaved", lambda turns, **options: dict.fromkeys(turns, timing))
    one = torch.ones(1)
    (row,) = benchmark._measured("t", "1²", {"a": lambda: one}, one, "cpu", repeats=1, calls=3)
    assert row["median_ms"] == pytest.approx(200.0)
    assert (row["min_ms"], row["max_ms"]) == pytest.approx((100.0, 300.0))
