"""``dslib run``: choose notebooks, execute each in a worker, collect results, leave nothing behind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Protocol

from dslib.runs.files import remove_leftovers, write_json
from dslib.runs.profiles import check_profile
from dslib.suite import notebooks, parameters, processes, rundir
from dslib.suite.claims import claims_file
from dslib.suite.parameters import ParameterError
from dslib.suite.rundir import RunDirectory, RunError

TIMEOUTS = {"smoke": 120.0, "quick": 600.0, "full": 5400.0}
# The worker stops a notebook by itself at its limit, and a kernel that does not start. These
# are the seconds after which the runner does it, should the worker hang.
GRACE = 45.0
START_LIMIT = 300.0
PATIENCE = 3.0  # seconds that interrupted workers get to end by themselves


class Display(Protocol):
    """Where progress is shown; ``console.py`` has one for terminals and one for logs."""

    def begin(self, names: Sequence[str]) -> None: ...
    def event(self, name: str, event: Mapping[str, Any]) -> None: ...
    def done(self, name: str, result: Mapping[str, Any]) -> None: ...
    def tick(self) -> None: ...
    def end(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """One notebook and everything that decides what it computes."""

    name: str
    source: Path
    parameters: Mapping[str, str]  # as Python literals
    key: str
    problem: str | None = None  # why it cannot even start
    seconds: float = 0.0  # what it is expected to take, against the others of its plan


@dataclass(frozen=True)
class Plan:
    """What a run will do: ``workers`` notebooks at a time, the longest first, each with its share of the cores."""

    jobs: tuple[Job, ...]  # in reading order
    profile: str
    timeout: float
    workers: int


@dataclass
class Outcome:
    """Results by notebook; ``signal`` is the number of the signal that ended the run early."""

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    signal: int | None = None


def plan(
    files: Sequence[Path],
    profile: str,
    given: Mapping[str, Any],
    timeout: float | None = None,
    jobs: int | None = None,
    seconds: Mapping[str, float] | None = None,
) -> Plan:
    """Check everything that can be checked before a kernel starts.

    ``jobs``: notebooks at a time; None is one a core. ``seconds``: what notebooks took before, by name; for
    others it is guessed from the length of their code.

    Raises ParameterError when a notebook does not have a parameter or a value does not fit it,
    ValueError for an unknown profile, a timeout or a number of jobs that is not positive.
    """
    check_profile(profile)
    if timeout is not None and not 0 < timeout < float("inf"):
        raise ValueError(f"timeout={timeout} must be a positive number of seconds")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    if given.get("profile", profile) != profile:
        raise ParameterError(f"set the profile with --profile {given['profile']}, not with --param")
    library = rundir.library_hash() + _claims_hash()
    expected = _expected_seconds(files, seconds or {})
    planned = tuple(
        replace(_job(file, profile, given, library), seconds=expected[file.stem]) for file in files
    )
    workers = max(1, min(jobs or processes.cores(), len(planned)))
    return Plan(planned, profile, timeout or TIMEOUTS[profile], workers)


def execute(
    plan: Plan,
    run: RunDirectory,
    display: Display,
    resume: bool = False,
    given: Mapping[str, Any] | None = None,
) -> Outcome:
    """Execute the plan into ``run``; with ``resume`` keep what is finished and unchanged.

    Ends early on SIGINT and SIGTERM: no process and no half-written file stays, finished
    notebooks do. ``given`` is recorded, for a later ``--resume``. Raises RunError when another
    run is using the directory.
    """
    from filelock import FileLock, Timeout

    run.path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run.path / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RunError(f"another run is using {run.path}; wait for it, or choose another --out") from None
    try:
        names = [job.name for job in plan.jobs]
        # A continued run keeps the rows of notebooks that are not asked for this time.
        known = set(run.settings.get("notebooks", [])) if resume else set()
        settings = {
            "profile": plan.profile,
            "notebooks": sorted(known | set(names)),
            "requested": names,
            "given": dict(given or {}),
        }
        run.prepare(settings, keep=resume)
        return _Execution(plan, run, display, resume).execute()
    finally:
        lock.release()


class _Execution:
    """The state of one run: what waits, what runs, what is done."""

    def __init__(self, plan: Plan, run: RunDirectory, display: Display, resume: bool) -> None:
        self.plan, self.run, self.display = plan, run, display
        self.id = uuid.uuid4().hex
        self.events: Queue[tuple[_Worker, dict[str, Any]]] = Queue()
        self.running: list[_Worker] = []
        self.outcome = Outcome()
        self.kept = {job.name for job in plan.jobs if resume and run.finished(job.name, job.key)}
        waiting = [job for job in plan.jobs if job.name not in self.kept]
        # The longest first, so that none of them is left alone at the end while cores idle.
        self.waiting = sorted(waiting, key=lambda job: -job.seconds)
        self.workers = max(1, min(plan.workers, len(waiting)))
        self.signal: int | None = None

    def execute(self) -> Outcome:
        self.work = self.run.work()
        self.display.begin([job.name for job in self.plan.jobs])
        with self._listening():
            try:
                for name in self.kept:
                    self._finish(name, {**(self.run.result(name) or {}), "kept": True})
                for job in self.waiting:
                    self.run.discard(job.name)
                self._loop()
            finally:
                if self.running or self.signal is not None:
                    self._stop()
                self.display.end()
                shutil.rmtree(self.work, ignore_errors=True)
        self.outcome.signal = self.signal
        return self.outcome

    def _loop(self) -> None:
        while (self.waiting or self.running) and self.signal is None:
            while self.waiting and len(self.running) < self.workers:
                self._start(self.waiting.pop(0))
            with contextlib.suppress(Empty):
                worker, event = self.events.get(timeout=0.2)
                if event["event"] == "exit":
                    self._collect(worker)
                else:
                    if event["event"] == "ready":
                        worker.ready = True
                        worker.deadline = time.monotonic() + self.plan.timeout + GRACE
                    worker.last = event
                    self.display.event(worker.job.name, event)
            for worker in [late for late in self.running if time.monotonic() > late.deadline]:
                worker.overdue = True
                processes.kill_marked(processes.JOB_MARKER, worker.id)
                worker.deadline = float("inf")
            self.display.tick()

    def _start(self, job: Job) -> None:
        if job.problem is not None:
            self._write(job, _failure("notebook", job.problem), 0.0)
            return
        worker = _Worker(self, job)
        self.running.append(worker)
        self.display.event(job.name, {"event": "started"})

    def _collect(self, worker: _Worker) -> None:
        """The worker ended: by itself with a result, or somehow else without one."""
        worker.process.wait()
        self.running.remove(worker)
        # What the notebook started and did not end.
        processes.kill_marked(processes.JOB_MARKER, worker.id)
        result = self.run.result(worker.job.name)
        if result is not None:
            self._finish(worker.job.name, result)
            return
        if worker.overdue:
            reason = f"it ran past {self.plan.timeout:g} s (--timeout)"
            if not worker.ready:
                reason = f"its kernel did not start in {START_LIMIT:g} s"
            failure = _failure("timeout", f"stopped by the watchdog: {reason}")
        else:
            failure = _failure(
                "worker", f"the worker ended with status {worker.process.returncode} and no result"
            )
            failure["traceback"] = _tail(self.run.log_file(worker.job.name))
        failure["cell"] = worker.last.get("index")
        self._write(worker.job, failure, time.monotonic() - worker.started)

    def _write(self, job: Job, failure: dict[str, Any], seconds: float) -> None:
        result = {"name": job.name, "status": "failed", "key": job.key, "profile": self.plan.profile}
        result |= {
            "failure": failure,
            "notebook": None,
            "page": None,
            "reports": [],
            "seconds": round(seconds, 1),
        }
        write_json(self.run.result_file(job.name), result)
        self._finish(job.name, result)

    def _finish(self, name: str, result: dict[str, Any]) -> None:
        self.outcome.results[name] = result
        self.display.done(name, result)

    def _stop(self) -> None:
        """Pass the signal on, wait a moment, then end whatever still carries the run's marker."""
        for worker in self.running:
            with contextlib.suppress(OSError):
                worker.process.send_signal(self.signal or signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE
        for worker in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        processes.kill_marked(processes.MARKER, self.id)
        for worker in self.running:
            worker.process.wait()
            # A notebook that finished in this very moment counts; its files are complete.
            if (result := self.run.result(worker.job.name)) is not None:
                self._finish(worker.job.name, result)
            else:
                self.run.discard(worker.job.name)
        self.running.clear()
        for directory in (self.run.path, self.run.results):
            remove_leftovers(directory)

    @contextlib.contextmanager
    def _listening(self):
        """Signals set a flag that the loop sees; outside the main thread Python allows no handlers."""

        def note(number: int, frame: Any) -> None:
            self.signal = number

        numbers = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP"):
            numbers.append(signal.SIGHUP)
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Worker:
    """One worker process and the thread that reads its events."""

    def __init__(self, execution: _Execution, job: Job) -> None:
        self.job = job
        self.id = f"{execution.id}/{uuid.uuid4().hex[:8]}"
        self.last: dict[str, Any] = {}
        self.ready = self.overdue = False
        self.started = time.monotonic()
        self.deadline = self.started + START_LIMIT
        run, work = execution.run, execution.work
        job_file = work / f"{self.id[-8:]}.json"
        content = {
            "name": job.name,
            "source": str(job.source),
            "parameters": dict(job.parameters),
            "key": job.key,
        }
        content |= {"profile": execution.plan.profile, "timeout": execution.plan.timeout}
        content |= {"out": str(run.path.resolve()), "result": str(run.result_file(job.name).resolve())}
        write_json(job_file, content)
        environment = processes.worker_environment(
            execution.id, self.id, execution.workers, execution.plan.profile, str(work / "runtime")
        )
        with open(run.log_file(job.name), "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dslib.suite.worker", str(job_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                # `python -m` imports from the working directory first; this one is empty.
                cwd=work,
                start_new_session=True,
            )
        threading.Thread(target=self._read, args=(execution.events,), daemon=True).start()

    def _read(self, events: Queue) -> None:
        import json

        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                events.put((self, json.loads(line)))
        events.put((self, {"event": "exit"}))


def _job(file: Path, profile: str, given: Mapping[str, Any], library: str) -> Job:
    try:
        notebook = notebooks.read_notebook(file)
    except (notebooks.NotebookError, OSError) as error:
        return Job(file.stem, file, {}, "", problem=str(error))
    try:
        known = parameters.read_parameters(notebook)
        values = {name: value for name, value in given.items() if name != "profile"}
        if known is not None and "profile" in known:
            values = {"profile": profile, **values}
        filled = parameters.fill(known, values)
    except ParameterError as error:
        if given:
            raise ParameterError(f"{file.stem}: {error}") from None
        return Job(file.stem, file, {}, "", problem=str(error))
    literals = {name: parameters.literal(value) for name, value in filled.items()}
    return Job(
        file.stem, file, literals, rundir.key(notebooks.source_hash(notebook), literals, profile, library)
    )


def _expected_seconds(files: Sequence[Path], known: Mapping[str, float]) -> dict[str, float]:
    """What each notebook took before; for the others, as long as the known ones for the same length of code."""
    lengths = {file.stem: notebooks.code_length(file) for file in files}
    measured = {name: known[name] for name in lengths if name in known}
    rate = sum(measured.values()) / (sum(lengths[name] for name in measured) or 1) or 1.0
    return {name: measured.get(name, rate * length) for name, length in lengths.items()}


def _claims_hash() -> str:
    if not os.environ.get("DSLIB_CLAIMS"):
        return ""  # the shipped file is part of the library
    with contextlib.suppress(OSError):
        return hashlib.sha256(claims_file().read_bytes()).hexdigest()
    return ""


def _failure(kind: str, message: str) -> dict[str, Any]:
    return {"kind": kind, "message": message, "cell": None, "source": None, "traceback": None}


def _tail(file: Path, lines: int = 20) -> str | None:
    with contextlib.suppress(OSError):
        return "\n".join(file.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]) or None
    return None
