"""Processes of a run: how much of the machine each may use, and how all of them are found again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from dslib.runs.workers import THREAD_VARIABLES, cores

MARKER = "DSLIB_RUN_ID"  # inherited by every process that a run starts, however deep
JOB_MARKER = "DSLIB_JOB_ID"


def worker_environment(run_id: str, job_id: str, jobs: int, profile: str, runtime: str) -> dict[str, str]:
    """The environment of one of ``jobs`` workers at a time: one thread, its share of the cores for worker processes
    of its own, markers, the profile, a place for its kernel's files."""
    environment = dict(os.environ)
    # One thread whatever there is: how sums are cut up must not depend on the machine.
    environment |= dict.fromkeys(THREAD_VARIABLES, "1")
    environment |= {
        "DSLIB_JOBS_CORES": str(max(1, cores() // jobs)),
        "DSLIB_PROFILE": profile,
        "DSLIB_HEADLESS": "1",  # nobody turns a knob: widgets call their function once
        MARKER: run_id,
        JOB_MARKER: job_id,
        "JUPYTER_RUNTIME_DIR": runtime,
        # The kernel of this environment, not a namesake in the home directory.
        "JUPYTER_PREFER_ENV_PATH": "1",
        "PYTHONUNBUFFERED": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    # Kernels run in the notebooks' directory; what was named from here must be found there too.
    for name in ("DSLIB_CLAIMS", "DSLIB_CACHE"):
        value = environment.get(name, "")
        if value and value.strip().lower() != "off":
            environment[name] = os.path.abspath(os.path.expanduser(value))
    # Sets of strings in the same order every time, unless the user fixed another seed.
    environment.setdefault("PYTHONHASHSEED", "0")
    # A backend meant for scripts (MPLBACKEND=Agg) would leave every notebook without figures.
    environment.pop("MPLBACKEND", None)
    return environment


def marked(variable: str, value: str) -> list[int]:
    """Process ids whose environment holds ``variable=value``, this process left out."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue  # gone meanwhile, or another user's
    return found


def kill_marked(variable: str, value: str, patience: float = 5.0) -> None:
    """Kill every process with the marker, also those that left their parents and groups."""
    import psutil

    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        processes = _processes(marked(variable, value))
        if not processes:
            return
        for process in processes:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(processes, timeout=1.0)


def _processes(pids: Iterable[int]) -> list:
    import psutil

    processes = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.Error:
            continue
    return processes
