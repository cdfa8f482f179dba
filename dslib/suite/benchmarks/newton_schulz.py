"""Newton–Schulz and its symmetric products: our kernels beside cuBLAS on a GPU, torch's own paths on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from dslib import kernels
from dslib.optim import newton_schulz
from dslib.optim.newton_schulz import gram_matrix, symmetric_polynomial
from dslib.suite.benchmarks import interleaved, print_table

SIZES = (1024, 2048, 4096, 8192)
REPEATS = 9
#: Calls between two synchronisations of a GPU, so that a launch's microseconds do not hide a product's.
CALLS = 10
B, C = -4.7750, 2.0315

#: On a CPU: X·Xᵀ of n × n, and matrices to orthogonalise, square and wide.
CPU_PRODUCTS = (1024, 2048)
CPU_SHAPES = ((512, 512), (256, 1024), (512, 2048))
CPU_BUDGET_S = 8.0

NOTES = """of the first: the median as a share of the task's first way.
error: relative Frobenius distance from the same in float64."""

Row = dict[str, object]
Function = Callable[[], Tensor]


def main() -> None:
    """Print what was measured; on a machine without a GPU, say so and time torch's paths alone."""
    if torch.cuda.is_available():
        where, rows = torch.cuda.get_device_name(), measure("cuda", torch.bfloat16, SIZES)
    else:
        where, rows = f"the CPU, {torch.get_num_threads()} threads", measure_cpu()
        print("There is no GPU here, so no Triton kernel was timed: these are torch's own paths.")
    found: list[Row] = []
    try:
        for row in rows:
            found.append(row)
            print(f"measured {row['task']}, {row['size']}, {row['way']}", file=sys.stderr)
    finally:
        columns = ["task", "median ms", "min–max", "n", "of the first", "error"]
        print_table(f"Newton–Schulz on {where}, torch {torch.__version__}", columns, _cells(found))
        print(NOTES)


def measure(
    device: str, dtype: torch.dtype, sizes: tuple[int, ...], repeats: int = REPEATS, calls: int = CALLS
) -> Iterator[Row]:
    """Rows of X·Xᵀ, b·A + c·A² and five Newton–Schulz steps of n × n matrices: ``torch`` beside ``triton``.

    On a GPU ``torch`` is cuBLAS. The two take turns; each turn is ``calls`` calls between two
    synchronisations, and the milliseconds are those of one call. ``device="cpu"`` needs Triton's
    interpreter and tries the procedure alone: its timings mean nothing.
    """
    for size in sizes:
        X = _random(size, size).to(device, dtype)[None] / size**0.5
        A = gram_matrix(X)
        exact_A, exact_update = A.double(), newton_schulz(X.double(), method="plain")
        tasks: dict[str, tuple[Function, Tensor]] = {
            "XXᵀ": (lambda X=X: gram_matrix(X), X.double() @ X.double().mT),
            "bA + cA²": (
                lambda A=A: symmetric_polynomial(A, B, C),
                torch.baddbmm(exact_A, exact_A, exact_A, beta=B, alpha=C),
            ),
            "NS5 plain": (lambda X=X: newton_schulz(X, method="plain", dtype=dtype), exact_update),
            "NS5 gram": (lambda X=X: newton_schulz(X, method="gram", dtype=dtype), exact_update),
        }
        for task, (function, exact) in tasks.items():
            ways = {way: _chosen(function, way) for way in ("torch", "triton")}
            yield from _measured(task, f"{size}²", ways, exact, device, repeats, calls)


def measure_tiles(
    device: str, dtype: torch.dtype, size: int, tiles: tuple, repeats: int = REPEATS, calls: int = CALLS
) -> Iterator[Row]:
    """Rows of X·Xᵀ by the kernel alone, once for each of ``tiles`` (:class:`dslib.kernels.symmetric.Tile`)."""
    from dslib.kernels import symmetric

    X = _random(size, size).to(device, dtype)[None] / size**0.5
    ways = {}
    for tile in tiles:
        name = (
            f"triton {tile.size}×{tile.depth}, group {tile.group}, {tile.warps} warps, {tile.stages} stages"
        )
        ways[name] = lambda tile=tile: symmetric.xxt(X, tile=tile)
    yield from _measured("XXᵀ by tile", f"{size}²", ways, X.double() @ X.double().mT, device, repeats, calls)


def measure_cpu() -> Iterator[Row]:
    """Rows of torch's own paths in float32: X·Xᵀ whole and by lower blocks; NS5 ``plain`` and ``gram``."""
    for size in CPU_PRODUCTS:
        X = _random(size, size)[None] / size**0.5
        ways: dict[str, Function] = {
            "whole product": lambda X=X: X @ X.mT,
            "lower blocks": _chosen(lambda X=X: gram_matrix(X), "torch"),
        }
        exact = X.double() @ X.double().mT
        yield from _measured("XXᵀ", f"{size}²", ways, exact, "cpu", REPEATS, 1, CPU_BUDGET_S)
    for rows, columns in CPU_SHAPES:
        G = _random(rows, columns)
        ways = {
            method: _chosen(lambda G=G, m=method: newton_schulz(G, method=m, dtype=torch.float32), "torch")
            for method in ("plain", "gram")
        }
        exact = newton_schulz(G.double(), method="plain")
        yield from _measured("NS5", f"{rows} × {columns}", ways, exact, "cpu", REPEATS, 1, CPU_BUDGET_S)


def _measured(
    task: str,
    size: str,
    ways: Mapping[str, Function],
    exact: Tensor,
    device: str,
    repeats: int,
    calls: int,
    budget_s: float | None = None,
) -> Iterator[Row]:
    """One row a way. The errors come from a first call, which also compiles what is to be compiled."""
    errors = {way: _error(function(), exact) for way, function in ways.items()}
    turns = {way: _turn(function, calls, device) for way, function in ways.items()}
    for way, timing in interleaved(turns, repeats=repeats, warmup=1, budget_s=budget_s).items():
        milliseconds = {
            f"{name}_ms": getattr(timing, name) * 1e3 / calls for name in ("median", "min", "max")
        }
        yield {"task": task, "size": size, "way": way, **milliseconds, "n": timing.n, "error": errors[way]}


def _turn(function: Function, calls: int, device: str) -> Callable[[], None]:
    def turn() -> None:
        for _ in range(calls):
            function()
        if device == "cuda":
            torch.cuda.synchronize()

    return turn


def _chosen(function: Function, way: str) -> Function:
    """``function`` by what ``way`` names, whatever was chosen outside."""

    def call() -> Tensor:
        with kernels.use(way):
            return function()

    return call


def _random(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def _error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def _cells(rows: list[Row]) -> list[list[object]]:
    cells, first = [], {}
    for row in rows:
        median = first.setdefault((row["task"], row["size"]), row["median_ms"])
        cells.append(
            [
                f"{row['task']}  {row['size']}  {row['way']}",
                f"{row['median_ms']:.3f}",
                f"{row['min_ms']:.3f}–{row['max_ms']:.3f}",
                row["n"],
                f"{row['median_ms'] / median:.3f}",
                f"{row['error']:.1e}",
            ]
        )
    return cells
