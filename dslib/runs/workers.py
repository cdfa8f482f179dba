"""Runs in worker processes, each on one thread, so that their numbers depend only on what they are given."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

R = TypeVar("R")

#: What the numerical libraries read, when they are loaded, for the number of their threads.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def cores() -> int:
    """The CPUs this process may use: those it is bound to, and no more than its container's share."""
    from joblib import cpu_count

    return cpu_count()


def compute_on_one_thread() -> None:
    """From here on torch, and the processes that this one starts, compute on one thread each.

    For a notebook or a command; a library function puts back what it changes (:func:`one_thread`).
    """
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    if torch := sys.modules.get("torch"):  # else it reads the variable when it is imported
        torch.set_num_threads(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes on one thread inside, and on as many as before after it.

    Sums are cut up by threads: what is kept or compared must not depend on who happens to compute it.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def in_workers(run: Callable[..., R], calls: Iterable[Any], jobs: int = 1) -> Iterator[R]:
    """``run`` of every call, on one thread each, ``jobs`` at a time; results come in the order of the calls, each as
    soon as it and those before it are done. A call is a tuple of arguments, or one argument that is no tuple.

    ``run`` is a function at the top of a module, :func:`dslib.runs.cache.cached` if its results are to be kept. Any
    joblib backend set by ``joblib.parallel_config`` is used.
    """
    import joblib

    tasks = [
        joblib.delayed(_on_one_thread)(run, *(call if isinstance(call, tuple) else (call,))) for call in calls
    ]
    yield from joblib.Parallel(n_jobs=jobs, return_as="generator")(tasks)


def _on_one_thread(run: Callable[..., R], *call: Any) -> R:
    with one_thread():
        return run(*call)
