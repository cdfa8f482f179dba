"""Real text that every machine already has: the sources of Python's own standard library."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

#: The name of a text of questions and answers: :func:`load_corpus` takes it in the place of a path.
DOCSTRINGS = "stdlib:docstrings"

#: Folders that hold other people's files; and those of the standard library that are tests, generated,
#: or that only some installations carry.
_FOREIGN = frozenset({"site-packages", "dist-packages", "__pycache__"})
_NOT_LIBRARY = _FOREIGN | {"test", "tests", "idle_test", "lib2to3", "pydoc_data"}


@dataclass(frozen=True)
class Corpus:
    """Bytes of a text, split by file. ``train``, ``validation``: (n,) uint8. ``digest``: the first 12 hex
    digits of the SHA-256 over both, recorded with every measurement because the text differs between
    Python versions. ``name`` says what it is."""

    name: str
    train: Tensor
    validation: Tensor
    digest: str


def load_corpus(path: str | Path | None = None, validation_share: float = 0.05) -> Corpus:
    """Read a corpus of bytes.

    ``path=None``: the standard library's ``.py`` files, without tests and installed packages. Else a
    text file, whose last ``validation_share`` is held out, or a folder, all of whose ``.py``, ``.txt``
    and ``.md`` files are read (installed packages left out). Folders are split **by file**, by a
    hash of the file's name, so that
    validation text is unseen. Line ends are normalised. ``path=DOCSTRINGS``: what the standard library's
    functions and classes are called and what their docstrings say, question and answer, from the same files
    on the same sides of the split.

    Raises FileNotFoundError for a path that is not there, and ValueError for a share outside (0, 1) or
    a text too small to split.
    """
    if not 0 < validation_share < 1:
        raise ValueError(f"validation_share={validation_share} must lie between 0 and 1")
    if path is None:
        return _standard_library(validation_share)
    if path == DOCSTRINGS:
        return _docstrings(validation_share)
    return _read_corpus(Path(path).resolve(), None, {".py", ".txt", ".md"}, _FOREIGN, validation_share)


@lru_cache(maxsize=2)
def _standard_library(share: float) -> Corpus:
    """Kept, because it does not change while Python runs; a text of the reader's own may."""
    root = Path(sysconfig.get_path("stdlib"))
    return _read_corpus(root, "Python standard library", {".py"}, _NOT_LIBRARY, share)


@lru_cache(maxsize=2)
def _docstrings(share: float) -> Corpus:
    """The digest covers the whole library, not only what was taken from it: whoever trains on the docstrings
    of a text started from a model of that text."""
    library = _standard_library(share)
    parts = [_questions_and_answers(text.numpy().tobytes()) for text in (library.train, library.validation)]
    digest = hashlib.sha256(library.digest.encode() + b"".join(parts)).hexdigest()[:12]
    return Corpus("docstrings of the Python standard library", *map(_as_tensor, parts), digest)


#: A definition whose head is one line, and the docstring below it. (Parsing all files takes much longer.)
_DEFINITION = re.compile(
    rb'^[ \t]*((?:async def|def|class) [^\n]*):\n[ \t]+[rR]?"""(.+?)"""', re.MULTILINE | re.DOTALL
)


def _questions_and_answers(text: bytes) -> bytes:
    """``### def name(arguments)``, a line break, its docstring without indentation, an empty line."""
    found = (
        (match[1].decode(errors="replace"), inspect.cleandoc(match[2].decode(errors="replace")).strip())
        for match in _DEFINITION.finditer(text)
    )
    return "".join(f"### {head}\n{answer}\n\n" for head, answer in found).encode()


def _read_corpus(
    root: Path, name: str | None, endings: set[str], skipped: frozenset[str], share: float
) -> Corpus:
    if not root.exists():
        raise FileNotFoundError(f"path={str(root)!r} does not exist; name a text file or a folder of sources")
    if root.is_file():
        text = _read(root)
        cut = int(len(text) * (1 - share))
        train, validation = text[:cut], text[cut:]
    else:
        files = sorted((file.relative_to(root).as_posix(), file) for file in _walk(root, endings, skipped))
        held_out = {name for name, _ in files if _fraction(name) < share}
        train = b"".join(_read(file) for name, file in files if name not in held_out)
        validation = b"".join(_read(file) for name, file in files if name in held_out)
    if min(len(train), len(validation)) < 2:
        raise ValueError(
            f"path={str(root)!r} gives {len(train)} bytes for training and {len(validation)} for validation: "
            "too little text; name a larger file or folder"
        )
    digest = hashlib.sha256(len(train).to_bytes(8, "big") + train + validation).hexdigest()[:12]
    return Corpus(name or root.name, _as_tensor(train), _as_tensor(validation), digest)


def _walk(root: Path, endings: set[str], skipped: frozenset[str]) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped]  # pruned, not only passed over
        yield from (Path(folder, name) for name in names if Path(name).suffix in endings)


def _read(file: Path) -> bytes:
    return file.read_bytes().replace(b"\r\n", b"\n")


def _fraction(name: str) -> float:
    """A number in [0, 1) that depends on the file's name alone, so the split survives new files."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(
    tokens: Tensor, batch_size: int, context: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random windows of a text: (inputs, targets), each (batch_size, context) int64, the targets
    one position later. ``tokens``: (n,) integers.

    Raises ValueError at the call (not at the first batch) for a text shorter than context + 1.
    """
    if batch_size < 1 or context < 1:
        raise ValueError(f"batch_size={batch_size} and context={context} must be at least 1")
    if len(tokens) < context + 1:
        raise ValueError(f"tokens holds {len(tokens)} tokens, fewer than context + 1 = {context + 1}")

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        offsets = torch.arange(context + 1)
        while True:
            starts = torch.randint(len(tokens) - context, (batch_size, 1), generator=generator)
            window = tokens[starts + offsets].long()
            yield window[:, :-1], window[:, 1:]

    return endless()


def evaluation_windows(tokens: Tensor, count: int, context: int) -> tuple[Tensor, Tensor]:
    """The same ``count`` evenly spaced windows every time: (inputs, targets), (count, context) int64.

    Raises ValueError when the text is shorter than context + 1, or for a count or context below 1.
    """
    if count < 1 or context < 1:
        raise ValueError(f"count={count} and context={context} must be at least 1")
    if len(tokens) < context + 1:
        raise ValueError(f"tokens holds {len(tokens)} tokens, fewer than context + 1 = {context + 1}")
    starts = torch.arange(count) * (len(tokens) - context - 1) // max(1, count - 1)
    window = tokens[starts.unsqueeze(1) + torch.arange(context + 1)].long()
    return window[:, :-1], window[:, 1:]
