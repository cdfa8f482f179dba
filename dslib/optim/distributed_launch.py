"""Processes with a process group, for notebooks and tests; ``torchrun`` does it for programs."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cloudpickle

from dslib.runs.files import write_atomic

#: How long the other ranks may take to notice a dead one before they are ended too, in seconds.
GRACE = 10.0


class RankFailed(RuntimeError):
    """A rank died or raised. ``rank``: which one came first; ``errors``: what each rank ended with, its
    traceback, the signal that killed it, or that it was ended because it had not noticed."""

    def __init__(self, rank: int, errors: dict[int, str]) -> None:
        self.rank, self.errors = rank, errors
        last = {r: text.strip().splitlines()[-1] for r, text in sorted(errors.items()) if r != rank}
        others = "".join(f"\nrank {r} then: {line}" for r, line in last.items())
        super().__init__(f"rank {rank} failed first:\n{errors[rank].strip()}{others}")


def run_processes(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    backend: str = "gloo",
    timeout: float = 60.0,
    threads: int = 1,
) -> list[Any]:
    """Call ``function(*args)`` in ``ranks`` new processes that share a process group; returns what each
    returned, in the order of ranks.

    ``function`` is imported anew where it stands in a module; one of a notebook or script (``__main__``), or a
    lambda, travels with what it uses, by value. ``args`` and results are pickled; results are of types that this
    process can import. ``backend``: ``"gloo"``, or ``"nccl"`` with a GPU a rank. A collective that
    waits longer than ``timeout`` seconds raises in its rank. ``threads`` is what torch gets in each.

    The first rank that raises, is killed or leaves ends the job: the others have some seconds to notice
    (a broken connection, or the timeout), are then killed, and RankFailed, with the traceback of each, is
    raised here. No process outlives the call, nor this process. Raises ValueError for fewer than 1 ranks
    or a function, or arguments, that cannot be pickled.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    try:
        task = cloudpickle.dumps((function, args))
    except Exception as error:
        raise ValueError(
            f"function={getattr(function, '__qualname__', function)!r} or its arguments cannot be sent to a new "
            f"process: {error}; leave out what belongs to this one (files, locks, generators)"
        ) from error
    context = _context()
    with tempfile.TemporaryDirectory(prefix="dslib-ranks-") as folder:
        # Through a file: multiprocessing's own way gives every tensor a file descriptor, and there are few.
        Path(folder, "task").write_bytes(task)
        setting = (folder, ranks, backend, timeout, threads)
        processes = [
            context.Process(target=_main, args=(rank, *setting), daemon=True) for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            ended_here = _wait(processes)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                if process.pid is not None:
                    process.join()
        return _results(Path(folder), processes, ended_here)


def _context() -> Any:
    """Processes forked from a clean one that has imported torch start at once; where there is no such thing,
    each imports it anew. This process itself, with its threads, is never forked."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # torch._dynamo is what the first optimizer of a process imports, for two seconds. What the caller has imported
    # of this package, its functions will need. (No effect once it runs.)
    package = __name__.partition(".")[0]
    own = sorted(name for name in sys.modules if name.partition(".")[0] == package)
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed", *own])
    return context


def _wait(processes: list[BaseProcess]) -> set[int]:
    """Until all have ended, or the grace after the first that ended badly is over; returns who still runs."""
    deadline: float | None = None
    running = list(processes)
    while running:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        wait([process.sentinel for process in running], left)
        running = [process for process in running if process.is_alive()]
        if deadline is None and any(p.exitcode for p in processes if p not in running):
            deadline = time.monotonic() + GRACE
        if deadline is not None and time.monotonic() >= deadline:
            break
    return {rank for rank, process in enumerate(processes) if process in running}


def _results(folder: Path, processes: list[BaseProcess], ended_here: set[int]) -> list[Any]:
    results, errors, when = [], {}, {}
    for rank, process in enumerate(processes):
        file = folder / f"{rank}.result"
        if process.exitcode == 0 and file.is_file():
            results.append(pickle.loads(file.read_bytes()))
        elif (folder / f"{rank}.error").is_file():
            when[rank], errors[rank] = pickle.loads((folder / f"{rank}.error").read_bytes())
        elif rank in ended_here:
            when[rank] = math.inf
            errors[rank] = f"ended here, {GRACE:g} s after the first failure, which it had not noticed"
        else:  # no word of its own: it did not notice anything, it was what the others noticed
            when[rank], code = 0.0, process.exitcode or 0
            errors[rank] = f"killed by signal {-code}" if code < 0 else f"left with exit code {code}"
    if errors:
        raise RankFailed(min(errors, key=lambda rank: (when[rank], rank)), errors)
    return results


def _main(rank: int, folder: str, ranks: int, backend: str, timeout: float, threads: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(threads)
        if backend == "nccl":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        store = dist.FileStore(str(Path(folder, "store")), ranks)  # no port that another job may take
        limit = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
        function, args = pickle.loads(Path(folder, "task").read_bytes())
        result = function(*args)
        write_atomic(Path(folder, f"{rank}.result"), pickle.dumps(result))
        dist.destroy_process_group()
    except BaseException:
        write_atomic(Path(folder, f"{rank}.error"), pickle.dumps((time.time(), traceback.format_exc())))
        os._exit(1)  # destroying a broken group can wait for the dead


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
