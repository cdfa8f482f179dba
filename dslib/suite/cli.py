"""The ``dslib`` command. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer

from dslib.runs.profiles import PROFILES

app = typer.Typer(
    help="Run the notebooks, judge their claims, keep them clean.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


#: What ``--profile`` accepts.
ProfileName = enum.StrEnum("ProfileName", {name: name for name in PROFILES})


Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAMES]...", help="Numbers or names: 1, 01_muon, muon. All without."),
]
Notebooks = Annotated[
    Path | None, typer.Option("--notebooks", help="Directory of the notebooks (./notebooks).")
]
Out = Annotated[
    Path | None, typer.Option("--out", help="Directory of the run (runs/<stamp>; newest: runs/latest).")
]


def main() -> None:
    """Entry point of the ``dslib`` script: usage errors exit 2, failed notebooks or claims exit 1."""
    from dslib.suite.claims import ClaimError

    try:
        app()
    except (ValueError, FileNotFoundError) as error:
        # Errors of ours name the argument and what would do; a traceback would hide that.
        if not _ours(error) and not isinstance(error, ClaimError):
            raise
        print(f"dslib: {error}", file=sys.stderr)
        sys.exit(2)


@app.command("list")
def list_command(directory: Notebooks = None) -> None:
    """List the notebooks and how many claims each measures."""
    from dslib.suite import notebooks
    from dslib.suite.benchmarks import print_table
    from dslib.suite.claims import load_claims

    claims = load_claims().values()
    rows = []
    for file in notebooks.list_notebooks(notebooks.find_directory(directory)):
        count = sum(claim.notebook == file.stem for claim in claims)
        rows.append((file.stem, str(count), _title(file)))
    print_table("", ("notebook", "claims", "title"), rows)


@app.command("run")
def run_command(
    names: Names = None,
    profile: Annotated[
        ProfileName | None,
        typer.Option("--profile", help="smoke: seconds; quick: minutes (default); full: hours."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", help="Notebooks at a time (as many as there are cores).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the newest run, or the one in --out.")
    ] = False,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", metavar="NAME=VALUE", help="Set a notebook's parameter."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", help="Seconds for each notebook (smoke 120, quick 600, full 5400)."),
    ] = None,
    out: Out = None,
    directory: Notebooks = None,
) -> None:
    """Execute notebooks with papermill and print the scoreboard."""
    from dslib.suite import session

    request = session.Request(
        names=tuple(names or ()),
        profile=profile.value if profile else None,
        jobs=jobs,
        resume=resume,
        parameters=tuple(param or ()),
        timeout=timeout,
        out=out,
        notebooks=directory,
    )
    raise typer.Exit(session.run(request))


@app.command("report")
def report_command(out: Out = None, directory: Notebooks = None) -> None:
    """Judge the newest run (or the one in --out) again and print its scoreboard."""
    from dslib.suite import session

    raise typer.Exit(session.report(out, directory))


@app.command("diff")
def diff_command(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory, its stamp, or 'latest'.")],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="The run to hold against it.")],
    directory: Notebooks = None,
) -> None:
    """Print the claims whose samples or verdicts differ between two runs; exit 1 if there are any."""
    from dslib.suite import diff, notebooks, session

    base = session.runs_directory(None if directory is None else notebooks.find_directory(directory))
    found = diff.compare(first, second, base)
    for difference in found:
        typer.echo(f"{difference.id}: {difference.what}")
    typer.echo(f"{len(found)} claims differ" if len(found) != 1 else "1 claim differs")
    if found:
        raise typer.Exit(1)


@app.command("lint")
def lint_command(
    names: Names = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Clear outputs, counts, widget state; set ids and kernel.")
    ] = False,
    directory: Notebooks = None,
) -> None:
    """Check that notebooks are clean, short, and report the claims registered for them."""
    from dslib.suite import lint, notebooks, rundir, scoreboard, session
    from dslib.suite.claims import load_claims

    found = notebooks.find_directory(directory)
    files = notebooks.list_notebooks(found)
    chosen = notebooks.select(files, list(names or ()))
    claims = load_claims()  # before --fix writes anything
    solutions = sorted((found / "solutions").glob("*.ipynb")) if not names else []
    if fix:
        for file in [*chosen, *solutions]:
            if lint.fix(file):
                typer.echo(f"cleaned {file}")
    findings = [finding for file in chosen for finding in lint.lint_notebook(file, claims)]
    if not names:
        findings += lint.lint_unowned_claims(files, claims)
        if newest := rundir.latest(session.runs_directory(found)):
            findings += lint.lint_scoreboard(scoreboard.read(newest))
    for finding in findings:
        typer.echo(str(finding))
    if any(not finding.warning for finding in findings):
        raise typer.Exit(1)
    typer.echo(f"{len(chosen)} notebook{'s' * (len(chosen) != 1)} clean")


@app.command("new")
def new_command(
    name: Annotated[str, typer.Argument(metavar="NN_topic", help="A free number and a topic: 20_my_topic.")],
    directory: Notebooks = None,
) -> None:
    """Make a notebook, its solutions, an experiment, a test and claims: an example to change."""
    from dslib.suite import new, notebooks

    made = new.make(name, notebooks.find_directory(directory))
    for file in made:
        typer.echo(f"wrote {file}")
    typer.echo(f"next: dslib run {made[0].stem} --profile smoke")


@app.command("lab")
def lab_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTIONS]", help="Passed on to JupyterLab: dslib lab -- --no-browser"),
    ] = None,
    directory: Notebooks = None,
) -> None:
    """Open the notebooks in JupyterLab."""
    from dslib.suite import lab, notebooks

    raise typer.Exit(lab.open_lab(notebooks.find_directory(directory), arguments or ()))


@app.command("bench")
def bench_command(
    name: Annotated[str | None, typer.Argument(help="Which benchmark; all without.")] = None,
) -> None:
    """Print timings and memory, ours beside the known implementation."""
    from dslib.suite.benchmarks import BENCHMARKS, run_benchmark

    for each in [name] if name else BENCHMARKS:
        run_benchmark(each)


def _title(file: Path) -> str:
    from dslib.suite import notebooks

    try:
        return notebooks.title(notebooks.read_notebook(file))
    except notebooks.NotebookError:
        return "(cannot be read)"


def _ours(error: BaseException) -> bool:
    """Whether the error was raised by the suite itself, about what the user asked for."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__", ""))
    # An error inside a single benchmark is a bug of ours, and wants its traceback.
    return module.startswith(("dslib.suite.", "dslib.data")) and not module.startswith(
        "dslib.suite.benchmarks."
    )


if __name__ == "__main__":
    main()
