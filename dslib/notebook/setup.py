"""The first lines of every notebook: style, versions, the sizes of the chosen profile."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import TypeVar

from dslib.notebook.style import use_style
from dslib.runs.profiles import check_profile
from dslib.runs.workers import compute_on_one_thread, cores

T = TypeVar("T")


def setup(profile: str, seed: int) -> None:
    """Apply the plot style, compute on one thread from here on, and print one line of versions.

    One thread, so that a reader's numbers are those of the suite, whatever the machine; a notebook that wants more
    cores runs worker processes (:func:`dslib.notebook.jobs`).
    Raises ValueError for an unknown profile, TypeError for a seed that is not an int.
    """
    check_profile(profile)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed={seed!r} is a {type(seed).__name__}; give a whole number such as 0")
    compute_on_one_thread()
    use_style()
    parts = [f"dslib {_version('dslib-notebooks') or 'from source'}", f"Python {platform.python_version()}"]
    parts += [f"{name} {version}" for name in ("torch",) if (version := _version(name))]
    count = cores()
    parts += [f"{count} core{'s' if count > 1 else ''}", f"profile {profile}", f"seed {seed}"]
    print(" · ".join(parts))


def sizes(table: Mapping[str, T], profile: str) -> T:
    """The row of ``table`` for ``profile``; a notebook keeps all its sizes in one such table.

    Raises ValueError for an unknown profile and for a table without the row.
    """
    check_profile(profile)
    if profile not in table:
        raise ValueError(f"table has no row for profile={profile!r}; it has {', '.join(map(repr, table))}")
    return table[profile]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
