"""Files that travel with the package: claims, shipped measurements, checkpoints."""

from __future__ import annotations

from pathlib import Path


def path(name: str) -> Path:
    """The absolute path of a shipped file, ``path("claims.toml")``.

    Raises FileNotFoundError, naming what is there, when the package ships no such file.
    """
    root = Path(__file__).resolve().parent
    file = root / name
    if not file.is_file():
        there = sorted(
            str(p.relative_to(root)) for p in root.rglob("*") if p.suffix in {".toml", ".csv", ".safetensors"}
        )
        raise FileNotFoundError(f"name={name!r} is not among the shipped files: {', '.join(there)}")
    return file
