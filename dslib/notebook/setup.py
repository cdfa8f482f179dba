"""The first lines of every notebook: style, versions, the sizes of the chosen profile."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import TypeVar

from dslib.notebook.style import use_style
from dslib.runs.workers import cores

T = TypeVar("T")
PROFILES = ("smoke", "quick", "full")


def setup(profile: str, seed: int) -> None:
    """Apply the plot style and print one line of versions.

    Raises ValueError for an unknown profile, TypeError for a seed that is not an int.
    """
    _check(profile)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed={seed!r} is a {type(seed).__name__}; give a whole number such as 0")
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
    _check(profile)
    if profile not in table:
        raise ValueError(f"table has no row for profile={profile!r}; it has {', '.join(map(repr, table))}")
    return table[profile]


def _check(profile: str) -> None:
    if profile not in PROFILES:
        raise ValueError(f"profile={profile!r} is unknown; use one of {', '.join(PROFILES)}")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
