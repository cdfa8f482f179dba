"""Tables of measurements that ship with the package: every row says which command made it."""

from __future__ import annotations

import datetime
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from dslib import data
from dslib.cache import source_hash

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


def write(name: str, rows: pandas.DataFrame, command: str, corpus: str = "") -> Path:
    """Write ``rows`` with their provenance to ``data/measurements/NAME.csv`` of the source tree.

    The file is replaced as a whole or not at all. Raises ValueError for no rows or NaN in them.
    """
    if rows.empty:
        raise ValueError(f"rows of {name!r} are empty: there is nothing to ship")
    if rows.isna().any().any():
        columns = [str(column) for column in rows.columns[rows.isna().any()]]
        raise ValueError(f"rows of {name!r} hold NaN in {', '.join(columns)}")
    target = Path(data.__file__).parent / "measurements" / f"{name}.csv"
    target.parent.mkdir(exist_ok=True)
    temporary = target.with_suffix(".csv.part")
    rows.assign(**provenance(command, corpus)).to_csv(temporary, index=False, lineterminator="\n")
    temporary.replace(target)
    return target


def read(name: str) -> pandas.DataFrame:
    """The shipped table ``NAME.csv``. Raises FileNotFoundError when there is none, and ValueError when a
    row lacks its provenance."""
    import pandas

    rows = pandas.read_csv(data.path(f"measurements/{name}.csv"), keep_default_na=False, na_values=["nan"])
    missing = [
        column for column in PROVENANCE if column not in rows or (rows[column].astype(str) == "").all()
    ]
    if missing and missing != ["corpus"]:
        raise ValueError(f"measurements/{name}.csv lacks {', '.join(missing)}: it cannot be made again")
    return rows
