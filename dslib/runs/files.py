"""Writing files so that a reader sees the old content or the new, never half of it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: How the names of unfinished files begin.
TEMPORARY = ".tmp-"


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary file beside ``path``, for a writer that wants a path; at the end of the block it becomes ``path``.

    An error in the block, or the death of the process, leaves ``path`` as it was. Missing directories are made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY, suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes files only their owner can read; results are ordinary files.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Write ``content``, text as UTF-8, to ``path`` through a temporary file beside it, as :func:`replacing` does."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON that any reader accepts: no NaN, a newline at the end."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def remove_leftovers(directory: Path) -> None:
    """Delete temporary files that a killed writer left in ``directory``."""
    for file in Path(directory).glob(f"{TEMPORARY}*"):
        file.unlink(missing_ok=True)


def _umask() -> int:
    # The mask can only be read by setting it.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
