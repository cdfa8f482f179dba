"""Write the README's figure, output and scoreboard from the newest run: ``python docs/make_readme.py``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from dslib.suite import render

ROOT = Path(__file__).resolve().parent.parent
#: notebook, id of the cell that draws the figure, file
FIGURE = ("01_muon", "finals-figure", "docs/muon_against_adamw.svg")

#: Lines of claims that the block of output shows.
SHOWN = 20


def figure(run: Path) -> str:
    """The SVG that the cell drew in the executed notebook."""
    name, cell_id, _ = FIGURE
    notebook = json.loads((run / f"{name}.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["id"] == cell_id:
            for output in cell["outputs"]:
                svg = output.get("data", {}).get("image/svg+xml")
                if svg:
                    return "".join(svg)
    sys.exit(f"{run / name}.ipynb has no figure in its cell {cell_id!r}; run it again")


def output(run: Path) -> str:
    """What the run printed at its end, as a block of text."""
    environment = {**os.environ, "COLUMNS": "110", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "dslib.suite", "report", "--out", str(run)]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ran.returncode not in (0, 1):
        sys.exit(ran.stderr)
    lines = [line.rstrip().replace(run.resolve().name, "latest") for line in ran.stdout.strip().splitlines()]
    end = next(i for i, line in enumerate(lines) if line.startswith("notebook "))
    if end > SHOWN:  # all claims stand in the scoreboard below
        lines = [*lines[:SHOWN], "…", "", *lines[end:]]
    return "```\n" + "\n".join(lines) + "\n```"


def scoreboard(run: Path) -> str:
    """The tables of the run, without their heading."""
    board = json.loads((run / "scoreboard.json").read_text(encoding="utf-8"))
    return render.markdown(board).partition("\n\n")[2].strip()


def replaced(text: str, name: str, content: str) -> str:
    """``text`` with what stands between the markers of ``name`` replaced."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    new, count = re.subn(pattern, lambda match: f"{match[1]}{content}\n{match[2]}", text, flags=re.DOTALL)
    if count != 1:
        sys.exit(f"README.md needs one pair of markers <!-- {name} --> and <!-- /{name} -->, it has {count}")
    return new


def main(run: Path) -> None:
    """Write the figure and the README of the source tree from ``run``."""
    (ROOT / FIGURE[2]).write_text(figure(run), encoding="utf-8")
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    for name, content in (("output", output(run)), ("scoreboard", scoreboard(run))):
        text = replaced(text, name, content)
    readme.write_text(text, encoding="utf-8")
    print(f"wrote {FIGURE[2]}, the output and the scoreboard in README.md from {run}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs" / "latest")
