"""A table that ships with the package: read, or at ``full`` made anew and saved."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from dslib.notebook.badges import ATTRIBUTE, badge_text
from dslib.notebook.environment import show
from dslib.notebook.progress import progress
from dslib.runs import measurements
from dslib.runs.profiles import PROFILES

if TYPE_CHECKING:
    from pandas import DataFrame


@overload
def shipped(name: str, make: Callable[[], Any] | None = ..., **options: Any) -> DataFrame: ...
@overload
def shipped(name: Sequence[str], make: Callable[[], Any] | None = ..., **options: Any) -> list[DataFrame]: ...
def shipped(
    name: str | Sequence[str],
    make: Callable[[], Any] | None = None,
    *,
    profile: str = "quick",
    save: bool = False,
    command: str = "",
    corpus: str = "",
    replacing: str | None = None,
    make_at: Sequence[str] = ("full",),
    total: int | None = None,
    seeds: int | None = None,
) -> DataFrame | list[DataFrame]:
    """The table ``data/measurements/NAME.csv``, or at ``full`` what ``make()`` measures now.

    ``make`` takes nothing and returns a frame, or rows (dictionaries, or lists of them; from a generator they
    are taken one by one, and of ``total`` is shown how far it is). Its heavy steps go through the cache, so that
    what was interrupted goes on where it stood. It is called at the profiles in ``make_at``; elsewhere,
    and without ``make``, the shipped table is read. With ``save`` at ``full`` the rows are written with
    ``command`` (the command line that makes them again) and ``corpus`` (the digest of the text), ``replacing``
    as in :func:`dslib.runs.measurements.write`, and read back. Several tables that are made together have a
    sequence of names; ``make`` returns as many, in that order or as a dictionary by name, and so does this.

    One quiet line says where the rows come from: when, by which command, with which versions, over how many
    seeds, and whether of another corpus than ``corpus``. The frame knows it too (``attrs``), and so
    does a part of it, for :func:`dslib.notebook.badge`. Seeds are counted in the column ``seed``; ``seeds``
    says how many there are in a table without one.

    Raises ValueError for an unknown profile, for ``save`` where nothing would be made or without a command
    (before anything runs), and for tables that are not as many as the names; FileNotFoundError when
    there is no such table to read.
    """
    names = [name] if isinstance(name, str) else list(name)
    for each in (profile, *make_at):
        if each not in PROFILES:
            raise ValueError(f"profile {each!r} is unknown; use one of {', '.join(PROFILES)}")
    making = make is not None and profile in make_at
    if save and not (making and profile == "full"):
        raise ValueError(
            f"save=True writes nothing at profile {profile!r}"
            f"{' without make' * (make is None)}; tables are made and saved at 'full'"
        )
    if save and not command:
        raise ValueError("save=True without a command; give the command line that makes the rows again")
    if not making:
        tables = [_mark(measurements.read(each), each, "shipped", seeds, corpus) for each in names]
        return tables[0] if isinstance(name, str) else tables
    tables = _made(names, make, isinstance(name, str), total)
    for place, each in enumerate(names):
        if save:
            measurements.write(each, tables[place], command, corpus=corpus, replacing=replacing)
            tables[place] = measurements.read(each)
        _mark(tables[place], each, "shipped" if save else "live", seeds, corpus)
    return tables[0] if isinstance(name, str) else tables


def _made(names: Sequence[str], make: Any, single: bool, total: int | None) -> list[DataFrame]:
    found = make()
    if single:
        return [_frame(found, names[0], total)]
    if isinstance(found, Mapping):
        if missing := [each for each in names if each not in found]:
            raise ValueError(f"make returned no table {missing[0]!r}; it has {', '.join(map(str, found))}")
        found = [found[each] for each in names]
    found = list(found)
    if len(found) != len(names):
        raise ValueError(f"make returned {len(found)} tables for the {len(names)} names {', '.join(names)}")
    return [_frame(each, own, total) for each, own in zip(found, names, strict=True)]


def _frame(found: Any, name: str, total: int | None) -> DataFrame:
    import pandas

    if isinstance(found, pandas.DataFrame):
        return found.reset_index(drop=True)
    if not isinstance(found, Iterable) or isinstance(found, (str, Mapping)):
        raise TypeError(f"make returned a {type(found).__name__} for {name!r}; return a frame or rows")
    rows: list[Any] = []
    for item in found if isinstance(found, Sequence) else progress(found, total=total, label=name):
        rows += [item] if isinstance(item, Mapping) else item
    return pandas.DataFrame(rows)


def _mark(table: DataFrame, name: str, origin: str, seeds: int | None, corpus: str) -> DataFrame:
    """Write into ``attrs`` where the rows come from (plain values, so that parquet can keep them); say it."""
    own = sorted(set(table["seed"].tolist())) if "seed" in table and table["seed"].dtype.kind in "iu" else []
    known: dict[str, Any] = {"origin": origin, "table": name, "seeds": own}
    known["count"] = len(own) if seeds is None else seeds
    if origin == "shipped":
        for column in measurements.PROVENANCE:
            known[column] = sorted({str(value) for value in table[column]} - {""})
    table.attrs[ATTRIBUTE] = known
    line = f"{name}: {badge_text(table)}, {len(table)} row{'s' * (len(table) != 1)}"
    line += f" · {_made_by(known)}" if origin == "shipped" else " · made now, not saved"
    if corpus and known.get("corpus") and corpus not in known["corpus"]:
        line += f" · of another corpus (digest {', '.join(known['corpus'])}) than here ({corpus})"
    show(line, html=f'<small style="opacity:0.75">{html.escape(line)}</small>')
    return table


def _made_by(known: Mapping[str, Any]) -> str:
    dates, commands = known["date"], known["command"]
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    by = commands[0] if len(commands) == 1 else f"{len(commands)} commands ({'; '.join(commands)})"
    return f"made {when} by {by} · Python {', '.join(known['python'])}, torch {', '.join(known['torch'])}"
