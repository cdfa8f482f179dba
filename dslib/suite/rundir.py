"""The directory of one run, and the pointer to the newest one.

``runs/<stamp>/`` holds ``NAME.ipynb`` and ``NAME.html`` of finished notebooks
(``NAME.failed.ipynb`` of failed ones), ``results/NAME.json``, ``logs/NAME.log``, ``run.json``
and the scoreboard. ``runs/latest`` points to the newest run from its start on, so that
``--resume`` and ``report`` find a run that was interrupted; it is a symbolic link, or where
links are impossible the file ``latest.txt`` with the directory's name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dslib.runs.files import remove_leftovers, write_atomic, write_json


class RunError(ValueError):
    """A run directory that cannot be used for what was asked."""


SCOREBOARD_FILES = ("scoreboard.json", "scoreboard.md", "scoreboard.html", "junit.xml")


class RunDirectory:
    """Paths and small files of one run."""

    def __init__(self, path: Path) -> None:
        # Workers and kernels run in other directories.
        self.path = Path(path).absolute()
        self.results = self.path / "results"
        self.logs = self.path / "logs"

    @property
    def settings(self) -> dict[str, Any]:
        """What the run was asked for; empty for a directory that is no run."""
        return _read_json(self.path / "run.json") or {}

    def prepare(self, settings: Mapping[str, Any], keep: bool) -> None:
        """Create the directory; ``keep=False`` removes what an earlier run left in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not keep:
            for name in self.settings.get("notebooks", []):
                self.discard(name)
            for name in SCOREBOARD_FILES:
                (self.path / name).unlink(missing_ok=True)
        for directory in (self.path, self.results, self.logs):
            directory.mkdir(exist_ok=True)
            remove_leftovers(directory)
        # Left by a run that was killed outright.
        for stale in self.path.glob(".work-*"):
            shutil.rmtree(stale, ignore_errors=True)
        write_json(self.path / "run.json", settings)

    def work(self) -> Path:
        """A temporary directory inside the run: job files, and what kernels put on disk."""
        return Path(tempfile.mkdtemp(dir=self.path, prefix=".work-"))

    def discard(self, name: str) -> None:
        """Remove everything known about one notebook."""
        for ending in (".ipynb", ".html", ".failed.ipynb", ".failed.html"):
            (self.path / f"{name}{ending}").unlink(missing_ok=True)
        self.result_file(name).unlink(missing_ok=True)

    def result_file(self, name: str) -> Path:
        return self.results / f"{name}.json"

    def log_file(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def result(self, name: str) -> dict[str, Any] | None:
        """The result of one notebook, or None when it has not ended."""
        return _read_json(self.result_file(name))

    def finished(self, name: str, key: str) -> bool:
        """Whether ``name`` went well with exactly this key and its notebook is still there."""
        result = self.result(name)
        return (
            result is not None
            and result.get("status") == "ok"
            and result.get("key") == key
            and all((self.path / result[part]).is_file() for part in ("notebook", "page") if result.get(part))
        )


def new_directory(base: Path) -> Path:
    """``base/<stamp>``, created now; a second run in one second gets a number."""
    base.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ["", *(f"-{count}" for count in range(2, 1000))]:
        path = base / f"{stamp}{suffix}"
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise RunError(f"no free name for a run at {base / stamp}")


def check_writable(path: Path) -> None:
    """Raise OSError unless files can be made in ``path``, which is made if it is missing."""
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path, prefix=".tmp-") as file:
        file.write(b"\0" * 65536)  # a full disk takes an empty file
        file.flush()


def latest(base: Path) -> Path | None:
    """The newest run under ``base``, or None."""
    link, text = base / "latest", base / "latest.txt"
    if link.is_dir():
        return link.resolve()
    if text.is_file() and (target := base / text.read_text(encoding="utf-8").strip()).is_dir():
        return target.resolve()
    return None


def point_latest(base: Path, run: Path) -> None:
    """Let ``base/latest`` name ``run``, replacing the old pointer in one step."""
    link = base / "latest"
    temporary = base / f".tmp-latest-{run.name}"
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(run.name, target_is_directory=True)
        temporary.replace(link)
    except OSError:
        temporary.unlink(missing_ok=True)
        write_atomic(base / "latest.txt", run.name + "\n")


def seconds_before(base: Path, profile: str) -> dict[str, float]:
    """What each notebook took when it last went well at ``profile``, in the runs under ``base``."""
    seconds: dict[str, float] = {}
    for settings in sorted(base.glob("*/run.json"), reverse=True):
        run = RunDirectory(settings.parent)
        if settings.parent.name == "latest" or run.settings.get("profile") != profile:
            continue
        for name in run.settings.get("notebooks", []):
            result = run.result(name) or {}
            if name not in seconds and result.get("status") == "ok":
                seconds[name] = result["seconds"]
    return seconds


def library_hash() -> str:
    """A hash of dslib's sources and shipped data: what an executed notebook depends on."""
    digest = hashlib.sha256()
    for package in ("dslib", "dslib.kernels", "dslib.data"):
        spec = importlib.util.find_spec(package)
        for root in spec.submodule_search_locations if spec else ():
            for file in sorted(Path(root).rglob("*")):
                if file.suffix in {".py", ".toml", ".csv", ".safetensors"} and file.is_file():
                    digest.update(f"{package}/{file.relative_to(root)}\0".encode())
                    digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def key(*parts: Any) -> str:
    """One hash over everything that decides what a notebook computes."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
