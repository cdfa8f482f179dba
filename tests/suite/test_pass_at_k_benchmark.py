"""The benchmark's rows on few problems: both ways compute the same, and a goal is judged by what was measured."""

import numpy as np
import pytest

from dslib.suite import benchmarks
from dslib.suite.benchmarks import pass_at_k as benchmark


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for name, value in {"PROBLEMS": 40, "SAMPLES": 16, "MOST_SAMPLES": 32, "K": 4, "REPEATS": 2}.items():
        monkeypatch.setattr(benchmark, name, value)


def test_prints_every_row_with_its_range_and_share(tiny, capsys):
    benchmarks.run_benchmark("pass_at_k")
    printed = capsys.readouterr().out
    for row in ("n = 16  loop", "n = 16  at once", "n = 4 … 32  loop", "n = 4 … 32  at once"):
        assert row in printed
    assert "pass@4 of 40 problems" in printed
    assert "1.0000" in printed  # the loop of itself


def test_both_ways_compute_the_same_on_counts_that_can_be(tiny):
    for n, c in benchmark.cases().values():
        assert len(n) == 40
        assert ((n >= 4) & (c >= 0) & (c <= n)).all()
        assert 0 < c.sum() < n.sum()
        np.testing.assert_allclose(benchmark.pass_at_k(n, c, 4), benchmark.loop(n, c), atol=1e-12)
    differences = [row[-1] for row in benchmark.timed("t", *benchmark.cases()["n = 16"])]
    assert all(float(difference) < 1e-12 for difference in differences)


@pytest.mark.parametrize(("median", "verdict"), [(0.09, "0.1 reached"), (0.11, "0.1 missed")])
def test_goal_is_a_share_of_the_loops_median(tiny, monkeypatch, median, verdict):
    times = {"loop": 1.0, "at once": median}
    monkeypatch.setattr(
        benchmark,
        "interleaved",
        lambda ways, **options: {
            way: benchmarks.Timing(times[way], times[way], times[way], 3) for way in ways
        },
    )
    loop, at_once = benchmark.timed("t", *benchmark.cases()["n = 16"])
    assert loop[4:6] == ["1.0000", ""]
    assert at_once[4:6] == [f"{median:.4f}", verdict]


def test_an_interrupted_benchmark_prints_what_it_has(tiny, monkeypatch, capsys):
    measured = []

    def timed(task, n, c):
        if measured:
            raise KeyboardInterrupt
        measured.append(task)
        return [[task, "1", "1–1", 1, "1", "", "0"]]

    monkeypatch.setattr(benchmark, "timed", timed)
    with pytest.raises(KeyboardInterrupt):
        benchmark.main()
    assert measured[0] in capsys.readouterr().out
