"""Timings: measured fairly, printed whatever they are, never a claim.

``BENCHMARKS`` names what ``dslib bench`` knows; each entry is imported only when it runs.
"""

from __future__ import annotations

import importlib
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dslib.suite.claims import nearest

# name → "module:function"; the function takes no arguments and prints its table.
BENCHMARKS = {
    "context_view": "dslib.suite.benchmarks.context_view:main",
    "grpo_step": "dslib.suite.benchmarks.grpo_step:main",
    "muon": "dslib.suite.benchmarks.muon:main",
    "newton_schulz": "dslib.suite.benchmarks.newton_schulz:main",
    "pass_at_k": "dslib.suite.benchmarks.pass_at_k:main",
    "policy_loss": "dslib.suite.benchmarks.policy_loss:main",
    "sparse_attention": "dslib.suite.benchmarks.sparse_attention:main",
}


@dataclass(frozen=True)
class Timing:
    """Seconds of one function over its repeats."""

    median: float
    min: float
    max: float
    n: int


def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    repeats: int = 7,
    warmup: int = 1,
    budget_s: float | None = None,
) -> dict[str, Timing]:
    """Time functions in turns, A B C A B C, so that a slow minute of the machine hits all alike.

    After ``warmup`` untimed rounds, ``repeats`` rounds are timed; with ``budget_s`` no new round
    starts once that many seconds have passed, but one round is always measured. Functions on a
    GPU must synchronise by themselves. Raises ValueError when there is nothing to do.
    """
    if not functions:
        raise ValueError("functions is empty; name at least one to time")
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats={repeats} must be at least 1 and warmup={warmup} at least 0")
    for _ in range(warmup):
        for function in functions.values():
            function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    started = time.perf_counter()
    for _ in range(repeats):
        if budget_s is not None and any(seconds.values()) and time.perf_counter() - started > budget_s:
            break
        for name, function in functions.items():
            before = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - before)
    return {
        name: Timing(statistics.median(values), min(values), max(values), len(values))
        for name, values in seconds.items()
    }


def peak_memory(function: Callable[[], Any], interval_s: float = 0.001) -> int:
    """Bytes by which this process's resident memory rose above its start while ``function`` ran.

    Sampled by a thread, so a peak shorter than ``interval_s`` may be missed; memory that the
    allocator already holds and uses again does not count. For CUDA, ask torch instead.
    """
    import psutil

    process = psutil.Process()
    before = peak = process.memory_info().rss
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(interval_s):
            peak = max(peak, process.memory_info().rss)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        function()
    finally:
        done.set()
        thread.join()
    return max(peak, process.memory_info().rss) - before


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; the first column is left-aligned, the others are numbers and right-aligned."""
    from rich.markup import escape
    from rich.table import Table

    from dslib.suite.console import make_console

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left", no_wrap=True)
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"a row has {len(row)} cells and the table {len(columns)} columns: {row!r:.80}")
        table.add_row(*(escape(f"{cell:.4g}" if isinstance(cell, float) else str(cell)) for cell in row))
    make_console().print(table)


def run_benchmark(name: str) -> None:
    """Run one registered benchmark; raises ValueError with the nearest name for an unknown one."""
    if name not in BENCHMARKS:
        raise ValueError(f"there is no benchmark {name!r}{nearest(name, BENCHMARKS)}")
    module, _, function = BENCHMARKS[name].partition(":")
    getattr(importlib.import_module(module), function)()
