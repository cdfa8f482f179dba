"""One ``dslib run`` or ``dslib report`` from request to exit status."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dslib.suite import console, notebooks, parameters, rundir, runner, scoreboard
from dslib.suite.claims import load_claims
from dslib.suite.rundir import RunDirectory, RunError


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    names: tuple[str, ...] = ()
    profile: str | None = None
    jobs: int | None = None
    resume: bool = False
    parameters: tuple[str, ...] = ()
    timeout: float | None = None
    out: Path | None = None
    notebooks: Path | None = None


def run(request: Request) -> int:
    """Execute what was asked for and print the scoreboard.

    Returns 0 if every notebook and claim is well, 1 if not, 128 + n after signal n. Raises
    ValueError (NotebookError, ParameterError, ClaimError, RunError) before anything runs
    when the request makes no sense.
    """
    directory = _directory(request)
    files = notebooks.list_notebooks(directory)
    given: dict[str, Any] = {}
    for text in request.parameters:
        name, value = parameters.split_assignment(text)
        if name in given:
            raise parameters.ParameterError(f"--param {name} is given twice")
        given[name] = value
    base = runs_directory(directory)
    run_path = request.out or (rundir.latest(base) if request.resume else None)
    before = RunDirectory(run_path).settings if request.resume and run_path else {}
    if request.resume and request.out is not None and not before:
        raise RunError(f"there is no run in {request.out} to continue; leave --resume out to start one there")
    names, profile = list(request.names), request.profile
    if before:
        # A run is continued as it was asked for; other notebooks and values may be named, but
        # one scoreboard has one profile.
        if profile not in (None, before["profile"]):
            raise RunError(
                f"--profile {profile}: the run in {run_path} has profile {before['profile']}; "
                "leave --profile out, or leave --resume out to start another run"
            )
        there = {file.stem for file in files}
        names = names or [name for name in before.get("requested", before["notebooks"]) if name in there]
        profile = profile or before["profile"]
        given = given or before.get("given", {})
    profile = profile or "quick"
    chosen = notebooks.select(files, names)
    claims = load_claims()
    before_us = rundir.seconds_before(base, profile)
    plan = runner.plan(chosen, profile, given, request.timeout, request.jobs, before_us)
    if request.out is not None:
        _check_out(request.out, directory)
    try:
        if run_path is None:
            run_path = rundir.new_directory(base)
        if request.out is None:
            rundir.point_latest(base, run_path)
        rundir.check_writable(run_path)
    except OSError as error:
        where = run_path or base
        raise RunError(
            f"{where} cannot be written ({error.strerror}); name a directory that can with --out DIR"
        ) from None
    terminal = console.make_console()
    count = f"{len(chosen)} notebook{'s' * (len(chosen) != 1)}"
    terminal.print(f"{count}, profile {profile}, {plan.workers} at a time → {run_path}", markup=False)
    out = RunDirectory(run_path)
    display = console.make_display(terminal, lambda result: scoreboard.build([result], claims)["claims"])
    outcome = runner.execute(plan, out, display, resume=bool(before), given=given)
    status = _conclude(terminal, out, claims, outcome.results)
    if outcome.signal is not None:
        where = "" if request.out is None else f" --out {shlex.quote(str(request.out))}"
        terminal.print(f"interrupted; `dslib run --resume{where}` continues", markup=False, soft_wrap=True)
        return 128 + outcome.signal
    return status


def _directory(request: Request) -> Path:
    """Where the notebooks are: as named, or as found, or where the first of the paths that were asked for lies."""
    try:
        return notebooks.find_directory(request.notebooks)
    except notebooks.NotebookError:
        if request.notebooks is None and request.names and all(map(notebooks.is_path, request.names)):
            return notebooks.find_directory(Path(request.names[0]).expanduser().parent)
        raise


def report(out: Path | None, named: Path | None) -> int:
    """Judge a run again, with the claims as they are registered now, and print its scoreboard."""
    base = runs_directory(None if named is None else notebooks.find_directory(named))
    path = out or rundir.latest(base)
    if path is None or not RunDirectory(path).settings:
        raise RunError(f"there is no run in {path or base}; `dslib run` makes one")
    return _conclude(console.make_console(), RunDirectory(path), load_claims(), {})


def runs_directory(directory: Path | None) -> Path:
    """``runs/`` in the working directory, or beside the notebooks when we stand among them."""
    here = Path.cwd()
    if directory is not None:
        return (here.parent if here.resolve() == directory.resolve() else here) / "runs"
    try:
        return runs_directory(notebooks.find_directory())
    except notebooks.NotebookError:
        return here / "runs"


def _conclude(terminal: Any, out: RunDirectory, claims: Any, fresh: Mapping[str, Mapping[str, Any]]) -> int:
    """Build, write and print the scoreboard of everything that has ended in this run directory."""
    results = []
    for name in out.settings["notebooks"]:
        result = out.result(name)
        if result is not None:
            results.append(result | {"kept": bool(fresh.get(name, {}).get("kept"))})
    results.sort(key=lambda result: result["name"])
    board = scoreboard.build(results, claims)
    scoreboard.write(board, out.path, results)
    console.print_summary(terminal, board, results, out.path)
    return 1 if scoreboard.failures(board) else 0


def _check_out(out: Path, directory: Path) -> None:
    if out.resolve() == directory.resolve():
        raise RunError(
            f"--out {out} is the directory of the notebooks; executed copies need one of their own"
        )
    if out.exists() and not out.is_dir():
        raise RunError(f"--out {out} is a file; name a directory")
    if out.is_dir() and any(out.iterdir()) and not RunDirectory(out).settings:
        raise RunError(f"--out {out} holds other files and no earlier run; name an empty or new directory")
