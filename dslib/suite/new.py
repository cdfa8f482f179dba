"""``dslib new``: notebook, solutions, experiment, test and claims of a new topic, all of them or none."""

from __future__ import annotations

import keyword
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from dslib.runs.files import write_atomic
from dslib.suite import landing, lint, new_files, new_notebook, notebooks
from dslib.suite.claims import Claim, load_claims

#: Longer topics would push lines of the new files over the width.
LONGEST = 30


class NewError(ValueError):
    """A name that a new notebook cannot have, or a tree that it cannot stand in."""


def make(name: str, directory: Path) -> list[Path]:
    """Write the files of a new notebook called ``name`` (``NN_topic``) and return them, the notebook first.

    ``directory`` is that of the notebooks, in a clone of the repository. Claims are appended to the file that
    ``DSLIB_CLAIMS`` names, or to ``data/claims.toml`` of the clone; then the README gets a row as well. Raises
    NewError, before anything is written, on a number or a topic that is taken or cannot be one.
    """
    root = directory.parent
    if not (root / "dslib" / "experiments").is_dir():
        raise NewError(f"there is no dslib/experiments in {root}; call this in a clone of the repository")
    there = notebooks.list_notebooks(directory)
    named = os.environ.get("DSLIB_CLAIMS")
    claims_file = Path(named) if named else root / "data" / "claims.toml"
    before = load_claims(claims_file)
    number, topic = _parts(name, there, _taken(directory, there, before))
    stem = f"{number}_{topic}"
    words = {"NUMBER": number, "TOPIC": topic, "STEM": stem, "TITLE": topic.replace("_", " ").capitalize()}
    made = {
        directory / f"{stem}.ipynb": _notebook(new_notebook.NOTEBOOK, words),
        directory / "solutions" / f"{stem}.ipynb": _notebook(new_notebook.SOLUTIONS, words),
        root / "dslib" / "experiments" / f"{topic}.py": _filled(new_files.EXPERIMENT, words),
        root / "tests" / "experiments" / f"test_{topic}.py": _filled(new_files.TEST, words),
    }
    stubs = _filled(new_files.CLAIMS, words)
    added = [Claim.model_validate(row) for row in tomllib.loads(stubs)["claim"]]
    made[claims_file] = _appended(claims_file, stubs)
    if not named and (root / landing.BOARD).is_file():
        claims = before | {claim.id: claim for claim in added}
        made |= _documents(root, there, claims, words)
    _write(made)
    return list(made)


def next_number(files: list[Path]) -> int:
    """The number after the largest in use."""
    return max((int(notebooks.NAME.fullmatch(file.stem)[1]) for file in files), default=0) + 1


def _parts(name: str, there: list[Path], taken: Mapping[str, str]) -> tuple[str, str]:
    """The number and the topic of ``name``, checked against what is there."""
    number, separator, topic = name.removesuffix(".ipynb").partition("_")
    numbered = separator and re.fullmatch(r"[0-9]{2}", number)
    free = f"{next_number(there):02}_{_free_topic(topic if numbered else name, taken)} would do"
    if not numbered:
        raise NewError(f"{name!r} is not like NN_topic, two digits and a topic; {free}")
    if (
        not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", topic)
        or keyword.iskeyword(topic)
        or len(topic) > LONGEST
    ):
        raise NewError(
            f"topic {topic!r} cannot name a module: use lower-case letters, digits and single underscores, "
            f"a letter first, at most {LONGEST} of them, and no keyword; {free}"
        )
    if topic in taken:
        raise NewError(f"topic {topic!r} is that of {taken[topic]}; {free}")
    for file in there:
        if int(notebooks.NAME.fullmatch(file.stem)[1]) == int(number):
            raise NewError(f"number {number} is that of {file.stem}; {free}")
    return number, topic


def _taken(directory: Path, there: list[Path], claims: Iterable[str]) -> dict[str, str]:
    """The topics that are in use, and by what."""
    root = directory.parent
    taken = {id.partition(".")[0]: f"claim {id}" for id in claims}
    for folder, pattern, prefix in (
        (directory / "solutions", "*.ipynb", r"\d+_"),
        (root / "tests" / "experiments", "test_*.py", "test_"),
        (root / "dslib" / "experiments", "*.py", ""),
    ):
        for file in folder.glob(pattern):
            taken[re.sub(f"^{prefix}", "", file.stem)] = str(file.relative_to(root))
    return taken | {notebooks.topic(file): file.stem for file in there}


def _free_topic(name: str, taken: Mapping[str, str]) -> str:
    """A topic like ``name`` that is allowed and that nothing has."""
    letters = re.sub(r"[^a-z0-9]+", "_", name.removesuffix(".ipynb").lower())
    letters = re.sub(r"^[0-9_]+", "", letters)[: LONGEST - 4].strip("_")
    if not letters or keyword.iskeyword(letters):
        letters = "my_topic"
    candidates = (letters, *(f"{letters}_{count}" for count in range(2, 1000)))
    return next(each for each in candidates if each not in taken)


def _documents(
    root: Path, there: list[Path], claims: Mapping[str, Claim], words: Mapping[str, str]
) -> dict[Path, str]:
    """The README and its sources with a row for the new notebook."""
    notes = _appended(root / landing.NOTES, _filled(new_files.NOTE, words))
    titles = {file.stem: notebooks.title(notebooks.read_notebook(file)) for file in there}
    titles[words["STEM"]] = words["TITLE"]
    stems = sorted(titles, key=lambda stem: (int(stem.partition("_")[0]), stem))
    made = landing.files(root, claims, stems, notes_text=notes, titles=titles)
    return {root / landing.NOTES: notes, **made}


def _notebook(text: str, words: Mapping[str, str]) -> str:
    """A notebook's JSON from cells that each follow a line ``# %% KIND ID``."""
    from dslib.suite._nbformat import nbformat

    made = []
    for kind, id, source in re.findall(
        r"^# %% (\S+) (\S+)\n(.*?)(?=^# %% |\Z)", text, re.DOTALL | re.MULTILINE
    ):
        source = _filled(source.strip("\n"), words)
        if kind == "markdown":
            made.append(nbformat.v4.new_markdown_cell(source, id=id))
        else:
            tags = {} if kind == "code" else {"tags": [kind]}
            made.append(nbformat.v4.new_code_cell(source, id=id, metadata=tags))
    metadata = {"kernelspec": dict(lint.KERNEL), "language_info": {"name": "python"}}
    notebook = nbformat.v4.new_notebook(cells=made, metadata=metadata, nbformat_minor=5)
    return nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n"


def _filled(text: str, words: Mapping[str, str]) -> str:
    return re.sub(r"\b(NUMBER|TOPIC|STEM|TITLE)\b", lambda match: words[match[0]], text)


def _appended(file: Path, text: str) -> str:
    before = file.read_text(encoding="utf-8") if file.is_file() else ""
    return (before.rstrip("\n") + "\n" + text) if before.strip() else text.lstrip("\n")


def _write(made: Mapping[Path, str]) -> None:
    """Write all files; if one cannot be written, put back what was there."""
    before = {file: file.read_bytes() if file.is_file() else None for file in made}
    written: list[Path] = []
    try:
        for file, content in made.items():
            write_atomic(file, content)
            written.append(file)
    except OSError as error:
        for file in written:
            if (old := before[file]) is None:
                file.unlink()
            else:
                write_atomic(file, old)
        raise NewError(
            f"cannot write {error.filename or 'a file'}: {error.strerror}; nothing was made"
        ) from None
