"""Write the README's tables and figure, ``docs/scoreboard.md`` and ``docs/scoreboard.json``.

``python docs/make_readme.py [RUN]`` takes the notebooks that ended well in RUN (``runs/latest``), which may be
one notebook only, in place of their earlier rows. Without a run it writes what is on the board already, and
registers new claims there as "not measured yet".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dslib.runs.files import write_atomic
from dslib.suite import board as boards
from dslib.suite import landing, notebooks, scoreboard
from dslib.suite.board import BoardError
from dslib.suite.claims import load_claims
from dslib.suite.rundir import RunDirectory

ROOT = Path(__file__).resolve().parent.parent
#: notebook, id of the cell that draws the figure, file
FIGURE = ("01_muon", "finals-figure", "docs/muon_against_adamw.svg")


def figure(run: Path) -> str | None:
    """The SVG that the cell drew in the executed notebook; None if the run has not executed it."""
    name, cell_id, _ = FIGURE
    file = run / f"{name}.ipynb"
    if not file.is_file():
        return None
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", []) if cell["id"] == cell_id else []:
            if svg := output.get("data", {}).get("image/svg+xml"):
                return "".join(svg)
    raise BoardError(
        f"{file} has no figure in its cell {cell_id!r}; name the cell that draws it in {__file__}"
    )


def scoreboard_of(run: Path) -> dict:
    """The scoreboard of ``run``. Raises BoardError where there is none, or one of another profile."""
    found = scoreboard.read(run)
    if found is None:
        raise BoardError(f"there is no scoreboard in {run}; `dslib run` makes one")
    profile = RunDirectory(run).settings.get("profile")
    if profile != boards.PROFILE:
        raise BoardError(f"{run} is a run at {profile!r}; the board takes runs at {boards.PROFILE!r}")
    return found


def main(named: Path | None) -> None:
    """Write all files, or none. A run that was not asked for by name is left out where it does not fit."""
    run = named or ROOT / "runs" / "latest"
    found = None
    try:
        found = scoreboard_of(run)
    except BoardError as error:
        if named:
            raise
        print(f"{error}; nothing new is taken")
    there = notebooks.list_notebooks(ROOT / "notebooks")
    titles = {file.stem: notebooks.title(notebooks.read_notebook(file)) for file in there}
    claims = load_claims()
    made = landing.files(ROOT, claims, titles, found, titles=titles)
    if found and (svg := figure(run)):
        made[ROOT / FIGURE[2]] = svg
    for file, content in made.items():
        write_atomic(file, content)
    print(f"wrote {', '.join(str(file.relative_to(ROOT)) for file in made)}")
    if waiting := boards.pending(boards.read(ROOT / landing.BOARD), claims):
        print(f"not measured yet: {', '.join(waiting)}")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    except (BoardError, FileNotFoundError) as error:
        sys.exit(f"make_readme: {error}")
