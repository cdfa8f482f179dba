import importlib
import mmap

import pytest

from dslib.suite import benchmarks
from dslib.suite.benchmarks import interleaved, peak_memory, print_table


def test_functions_take_turns_so_that_a_slow_minute_hits_all_alike():
    calls = []
    timings = interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, warmup=1
    )
    assert "".join(calls) == "abababab"
    assert timings["a"].n == 3
    assert timings["a"].min <= timings["a"].median <= timings["a"].max


def test_a_budget_ends_after_one_round_at_least():
    assert interleaved({"a": lambda: None}, repeats=50, warmup=0, budget_s=0)["a"].n == 1


@pytest.mark.parametrize("wrong", [{"functions": {}}, {"repeats": 0}, {"warmup": -1}])
def test_nothing_to_measure_is_an_error(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        interleaved(**{"functions": {"a": lambda: None}, **wrong})


def test_peak_memory_sees_what_is_freed_again():
    def allocate():  # pages of its own: the allocator may hold enough that was freed before
        with mmap.mmap(-1, 64 * 2**20) as block:
            for i in range(0, len(block), 4096):
                block[i] = 1

    assert peak_memory(allocate) > 48 * 2**20


def test_a_table_prints_every_cell(capsys):
    print_table("Times", ("case", "ms"), [("a[0]", 1.23456), ("b", "–")])
    out = capsys.readouterr().out
    assert "Times" in out
    assert "a[0]" in out
    assert "1.235" in out
    with pytest.raises(ValueError, match="1 cells and the table 2 columns"):
        print_table("", ("a", "b"), [("a",)])


def test_an_unknown_benchmark_is_named_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'muon'"):
        benchmarks.run_benchmark("moun")


def test_every_registered_benchmark_is_a_function_that_exists():
    for name, target in benchmarks.BENCHMARKS.items():
        module, _, function = target.partition(":")
        assert module == f"dslib.suite.benchmarks.{name}"
        assert callable(getattr(importlib.import_module(module), function))
