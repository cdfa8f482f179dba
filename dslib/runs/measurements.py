"""Tables of measurements that ship with the package: every row says which command made it."""

from __future__ import annotations

import datetime
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from dslib import data
from dslib.runs import files
from dslib.runs.sources import source_hash

if TYPE_CHECKING:
    import pandas

#: The columns that :func:`write` adds: without them a shipped number is a defect.
PROVENANCE = ("command", "date", "python", "torch", "machine", "corpus", "source")


def provenance(command: str, corpus: str = "") -> dict[str, str]:
    """What a row needs to be made again: the command line, the UTC date, versions, kind of processor,
    ``corpus`` (the digest of :class:`dslib.tasks.Corpus`) and the hash of dslib's sources."""
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "machine": f"{platform.system()} {platform.machine()}",
        "corpus": corpus,
        "source": source_hash(),
    }


def write(
    name: str, rows: pandas.DataFrame, command: str, corpus: str = "", replacing: str | None = None
) -> Path:
    """Write ``rows`` with their provenance to ``data/measurements/NAME.csv`` of the source tree.

    ``replacing`` names a column: shipped rows stay, with their own provenance, unless the new rows have
    their value of it (``"model"``: only the models that were measured anew are replaced). The file
    appears as a whole or not at all. Raises ValueError for no rows or NaN in them.
    """
    import pandas

    if rows.empty:
        raise ValueError(f"rows of {name!r} are empty: there is nothing to ship")
    if rows.isna().any().any():
        columns = [str(column) for column in rows.columns[rows.isna().any()]]
        raise ValueError(f"rows of {name!r} hold NaN in {', '.join(columns)}")
    target = Path(data.__file__).parent / "measurements" / f"{name}.csv"
    table = rows.assign(**provenance(command, corpus))
    if replacing is not None and target.is_file():
        kept = read(name)
        table = pandas.concat([kept[~kept[replacing].isin(rows[replacing])], table], ignore_index=True)
    with files.replacing(target) as temporary:
        table.to_csv(temporary, index=False, lineterminator="\n")
    return target


def read(name: str) -> pandas.DataFrame:
    """The shipped table ``NAME.csv``, its numbers as they were written, to the last digit.

    Raises FileNotFoundError when there is none, and ValueError when a row lacks its provenance.
    """
    import pandas

    file = data.path(f"measurements/{name}.csv")
    rows = pandas.read_csv(file, keep_default_na=False, na_values=["nan"])
    optional = ("corpus",)  # not every measurement reads a text
    missing = [
        column
        for column in PROVENANCE
        if column not in rows or (column not in optional and (rows[column].astype(str) == "").any())
    ]
    if missing:
        raise ValueError(f"measurements/{name}.csv lacks {', '.join(missing)}: it cannot be made again")
    return rows
