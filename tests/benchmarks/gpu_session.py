"""One short session on a machine with a GPU: the kernels' tests on the card, then kernels beside cuBLAS and SDPA.

    python tests/benchmarks/gpu_session.py FOLDER             # some minutes, on a GPU
    python tests/benchmarks/gpu_session.py FOLDER --dry-run   # the same steps, tiny, on a CPU

It writes FOLDER/newton_schulz_gpu.csv and FOLDER/attention_gpu.csv, every row with the card, the date and the
versions that made it, and FOLDER/tests.txt. From the rows of the first follow the crossover
(``dslib.kernels.CROSSOVER``) and the tile (``dslib.kernels.symmetric.tile_for``); to ship them, copy the tables to
``data/measurements/``. A dry run's files are named ``dry_run.csv`` and ``dry_run_attention.csv``: their numbers are
the interpreter's, and mean nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parent.parent.parent
#: (output tile, depth, tile rows walked together, warps, stages) to try beside the one in use.
TILES = (
    (64, 64, 8, 4, 3),
    (64, 128, 8, 4, 3),
    (128, 32, 8, 8, 4),
    (128, 64, 8, 4, 3),
    (128, 64, 8, 8, 3),
    (128, 64, 1, 8, 3),
    (128, 64, 16, 8, 3),
    (128, 64, 8, 8, 4),
    (128, 128, 8, 8, 3),
)


def session(
    folder: Annotated[Path, typer.Argument(help="Where the table and the tests' output are written.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tiny sizes in Triton's interpreter.")] = False,
) -> None:
    """Test, measure, write; exits 1 without a GPU or when a test fails, since a wrong kernel's speed is none."""
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels' files are imported
    import torch

    if not dry_run and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --dry-run tries the steps on a CPU")
    folder.mkdir(parents=True, exist_ok=True)
    _run_tests(folder / "tests.txt", dry_run)
    names = ("dry_run", "dry_run_attention") if dry_run else ("newton_schulz_gpu", "attention_gpu")
    for name, measured in zip(names, (_rows, _attention_rows), strict=True):
        rows: list[dict] = []
        try:
            for row in measured(dry_run):
                rows.append(row)
                figures = f"{row['size']:>6}  {row['way']:50} {row['median_ms']:9.3f} ms"
                print(f"{row['task']:12} {figures}", flush=True)
        finally:
            if rows:  # an interrupted session keeps what it has
                _write(folder / f"{name}.csv", rows, dry_run)


def _run_tests(report: Path, dry_run: bool) -> None:
    # In the dry run one case a kernel: test_interpreter.py runs them all.
    names = ["symmetric", "sliding_window", "block_sparse", "sparse_mqa", "indexer"]
    cases = [f"tests/kernels/test_{name}.py" for name in names]
    cases += ["-k", "(xxt and shape4) or (one and position)"] if dry_run else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *cases]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    report.write_text(ran.stdout + ran.stderr, encoding="utf-8")
    print(ran.stdout[-2000:], flush=True)
    if ran.returncode != 0:
        raise SystemExit(f"the kernels' tests failed; nothing was measured. See {report}")


def _rows(dry_run: bool):
    import torch
    from dslib.kernels.symmetric import Tile

    from dslib.suite.benchmarks import newton_schulz as benchmark

    # float32 in the dry run: bfloat16 is no number format of the interpreter's host.
    device, dtype = ("cpu", torch.float32) if dry_run else ("cuda", torch.bfloat16)
    few = {"repeats": 2, "calls": 1} if dry_run else {}
    sizes = (16,) if dry_run else benchmark.SIZES
    tiles = ((16, 16, 1, 1, 1),) if dry_run else TILES
    yield from benchmark.measure(device, dtype, sizes, **few)
    for size in sizes if dry_run else (2048, 4096, 8192):
        yield from _each_tile(benchmark, device, dtype, size, [Tile(*tile) for tile in tiles], few)


def _attention_rows(dry_run: bool):
    import torch

    from dslib.suite.benchmarks import attention_kernels as benchmark

    if dry_run:
        yield from benchmark.measure("cpu", torch.float32, (5,), benchmark.SMALL, repeats=1)
    else:
        yield from benchmark.measure("cuda", torch.bfloat16)


def _each_tile(benchmark, device, dtype, size, tiles, few):
    """The tiles that this card can hold, in turns; one that it cannot is named and left out."""
    from dslib.kernels import symmetric

    fitting = []
    for tile in tiles:
        try:
            symmetric.xxt(_ones(device, dtype), tile=tile)
            fitting.append(tile)
        except Exception as error:  # the driver's out-of-resources error has no stable type
            print(f"left out: {tile} ({type(error).__name__}: {error})", flush=True)
    yield from benchmark.measure_tiles(device, dtype, size, tuple(fitting), **few)


def _ones(device, dtype):
    import torch

    return torch.ones(1, 16, 16, device=device, dtype=dtype)


def _write(file: Path, rows: list[dict], dry_run: bool) -> None:
    import pandas
    import torch

    from dslib.runs.measurements import provenance

    made = provenance(f"python tests/benchmarks/gpu_session.py FOLDER{' --dry-run' if dry_run else ''}")
    made["card"] = "none: Triton's interpreter" if dry_run else torch.cuda.get_device_name()
    made["triton"] = metadata.version("triton")
    made["cuda"] = str(torch.version.cuda or torch.version.hip or "none")
    pandas.DataFrame(rows).assign(**made).to_csv(file, index=False, lineterminator="\n")
    print(f"wrote {file}")


if __name__ == "__main__":
    typer.run(session)
