"""``dslib diff``: the claims whose samples or verdicts differ between two runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dslib.suite import rundir, scoreboard
from dslib.suite.rundir import RunDirectory, RunError


@dataclass(frozen=True)
class Difference:
    """One claim that two runs do not agree on; ``what`` says in one line where they part."""

    id: str
    what: str


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """Every claim of two scoreboards whose samples, null samples or verdict are not the very same.

    Numbers are compared to the last digit: two runs of one tree have none of these, whatever the number of jobs.
    A claim that stands on one board only is a difference too.
    """
    rows = [{row["id"]: row for row in board["claims"]} for board in (first, second)]
    found = []
    for id in dict.fromkeys((*rows[0], *rows[1])):
        pair = [board.get(id) for board in rows]
        if None in pair:
            found.append(Difference(id, f"is only in the {'second' if pair[0] is None else 'first'} run"))
            continue
        if parts := list(_parts(*pair)):
            found.append(Difference(id, "; ".join(parts)))
    return found


def find_run(named: Path, base: Path) -> RunDirectory:
    """The run that ``named`` means: a directory, or the name of one in ``base`` (a stamp, ``latest``).

    Raises RunError for what is no run, and for a run without a scoreboard.
    """
    for path in (named, base / named):
        # On systems without symbolic links `latest` is a file beside the runs.
        path = rundir.latest(base) if path == base / "latest" and not path.is_dir() else path
        if path is not None and RunDirectory(path).settings:
            if scoreboard.read(path) is None:
                raise RunError(
                    f"{named} has no scoreboard yet: `dslib run --resume --out {path}` finishes it"
                )
            return RunDirectory(path)
    raise RunError(f"{named} is no run; name a directory that `dslib run` made, or one of {_names(base)}")


def compare(first: Path, second: Path, base: Path) -> list[Difference]:
    """:func:`differences` of two runs on disk. Raises RunError for what is no run, or of another profile."""
    runs = [find_run(named, base) for named in (first, second)]
    profiles = [run.settings["profile"] for run in runs]
    if profiles[0] != profiles[1]:
        raise RunError(
            f"{first} has profile {profiles[0]} and {second} {profiles[1]}: "
            "their samples are not meant to be equal; compare runs of one profile"
        )
    boards = [scoreboard.read(run.path) for run in runs]
    return differences(*boards)


def _parts(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    if first["verdict"] != second["verdict"]:
        yield f"{first['verdict']} → {second['verdict']}"
    compared = {"samples": [row["samples"] for row in (first, second)]}
    for part in ("null", "gate"):  # boards of older runs know no gate
        compared[part] = [(row.get(part) or {}).get("samples") for row in (first, second)]
    for name, (before, after) in compared.items():
        if before == after:
            continue
        numbers = [list(_flat(values)) for values in (before, after)]
        if len(numbers[0]) != len(numbers[1]):
            yield f"{len(numbers[0])} → {len(numbers[1])} {name}"
            continue
        pairs = [(a, b) for a, b in zip(*numbers, strict=True) if a != b]
        apart = max(abs(a - b) / max(abs(a), abs(b)) for a, b in pairs)
        means = [math.fsum(values) / len(values) for values in numbers]
        yield (
            f"{len(pairs)} of {len(numbers[0])} {name} differ, by up to {apart:.1e} of their size "
            f"(mean {means[0]:.6g} → {means[1]:.6g})"
        )


def _flat(values: Any) -> Iterator[float]:
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from _flat(value)
    elif values is not None:
        yield values


def _names(base: Path) -> str:
    runs = sorted(path.name for path in base.glob("*") if (path / "run.json").is_file())
    return ", ".join(runs[-3:]) if runs else f"{base}/*, where there is none"
