"""What a person sees while a run goes on, and at its end."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from dslib.suite import counts, render, scoreboard
from dslib.suite.verdicts import row_ok

#: The rows of the scoreboard for the result of one notebook.
Judge = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]

# A log wants to know that a long notebook is alive, not every cell of a short one.
LOG_EVERY = 10.0
#: … and that a cell which takes many minutes is.
LOG_LONG_CELL_EVERY = 120.0


def make_console() -> Console:
    """Colours and width as the terminal has them; in a log, no colours and lines that do not wrap."""
    if hasattr(sys.stdout, "reconfigure"):
        # A log in a narrow encoding gets a question mark for a minus sign, not an exception.
        sys.stdout.reconfigure(errors="replace")
    if sys.stdout.isatty():
        return Console()
    return Console(width=160, no_color=True, highlight=False, soft_wrap=True)


def make_display(console: Console, judge: Judge | None = None) -> LiveDisplay | LineDisplay:
    """The table redrawn in place on a terminal, plain lines in a log.

    Both say of each notebook, when it ends, how its claims stand: ``judge`` gives its rows of the scoreboard.
    """
    return LiveDisplay(console, judge) if console.is_terminal else LineDisplay(console, judge)


class _Progress:
    """What is known about each notebook."""

    def __init__(self, console: Console, judge: Judge | None = None) -> None:
        self.console, self.judge = console, judge
        self.states: dict[str, dict[str, Any]] = {}

    def begin(self, names: Sequence[str]) -> None:
        self.states = {name: {"status": "waiting", "cell": "", "head": "", "seconds": ""} for name in names}

    def event(self, name: str, event: Mapping[str, Any]) -> None:
        state = self.states[name]
        if event["event"] == "started":
            state |= {"status": "running", "since": time.monotonic()}
        elif event["event"] == "cell":
            head = " · ".join(part for part in (event.get("section"), event.get("head")) if part)
            state |= {"cell": f"{event['index']}/{event['of']}", "head": head}

    def done(self, name: str, result: Mapping[str, Any]) -> None:
        status = "kept" if result.get("kept") else result["status"]
        message = (result.get("failure") or {}).get("message", "")
        self.states[name] |= {
            "status": status,
            "cell": "",
            "head": message,
            "seconds": f"{result['seconds']:.1f}",
        }

        self._print_end(name, result)

    def _print_end(self, name: str, result: Mapping[str, Any]) -> None:
        """One line with the verdicts counted, and one for every claim that is not well."""
        state = self.states[name]
        ended = f"{state['status']} after {state['seconds']} s"
        if state["status"] == "kept":
            ended = "unchanged, kept from before"
        elif state["status"] == "failed":
            ended += f" {state['head'].partition(chr(10))[0]}"
        # A notebook that failed has reported nothing, or not all: its failure says enough.
        rows = self.judge(result) if self.judge and result["status"] == "ok" else []
        counts = Counter(render.verdict_text(row) for row in rows)
        if counts:
            ended += "; " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        self._line(f"{name}: {ended}", "red" if state["status"] == "failed" else "")
        for row in rows:
            if not row_ok(row):
                self._line(f"  {row['id']}: {render.verdict_text(row)}: {row['reason']}", "red")

    def _line(self, text: str, style: str = "") -> None:
        self.console.print(text, markup=False, style=style)

    def seconds(self, name: str) -> str:
        state = self.states[name]
        return (
            f"{time.monotonic() - state['since']:.0f}" if state["status"] == "running" else state["seconds"]
        )


class LiveDisplay(_Progress):
    """A table that is redrawn in place; what has ended stands above it, and stays."""

    def __init__(self, console: Console, judge: Judge | None = None) -> None:
        super().__init__(console, judge)
        self.live = Live(console=console, auto_refresh=False, transient=True)

    def begin(self, names: Sequence[str]) -> None:
        super().begin(names)
        self.live.start()
        self.tick()

    def tick(self) -> None:
        self.live.update(self._table(), refresh=True)

    def end(self) -> None:
        self.live.stop()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, expand=True)
        for column in ("notebook", "status", "s", "cell"):
            table.add_column(column, no_wrap=True, justify="right" if column == "s" else "left")
        table.add_column("", no_wrap=True, ratio=1, overflow="ellipsis")
        styles = {"running": "bold", "ok": "green", "kept": "green", "failed": "red"}
        for name, state in self.states.items():
            head = escape(state["head"].partition("\n")[0])
            row = (escape(name), state["status"], self.seconds(name), state["cell"], head)
            table.add_row(*row, style=styles.get(state["status"], "dim"))
        return table


class LineDisplay(_Progress):
    """One plain line an event, for logs."""

    def __init__(self, console: Console, judge: Judge | None = None) -> None:
        super().__init__(console, judge)
        self.printed: dict[str, float] = {}

    def event(self, name: str, event: Mapping[str, Any]) -> None:
        super().event(name, event)
        now = time.monotonic()
        if event["event"] == "started":
            self._line(f"{name}: started")
            self.printed[name] = now
        elif event["event"] == "cell" and now - self.printed.get(name, 0) > LOG_EVERY:
            state = self.states[name]
            self._line(f"{name}: {self.seconds(name)} s, cell {state['cell']} {state['head']}")
            self.printed[name] = now

    def tick(self) -> None:
        now = time.monotonic()
        for name, state in self.states.items():
            if state["status"] == "running" and now - self.printed.get(name, now) > LOG_LONG_CELL_EVERY:
                self._line(f"{name}: {self.seconds(name)} s, still in cell {state['cell'] or '–'}")
                self.printed[name] = now

    def end(self) -> None:
        pass


def print_summary(
    console: Console, board: Mapping[str, Any], results: Sequence[Mapping[str, Any]], directory: Path
) -> None:
    """Failures with their source and last frames, then the claims, the notebooks, and where the pages are."""
    directory = _short(directory)
    for result in results:
        if result.get("failure"):
            _print_failure(console, result, directory)
    _print_claims(console, board)
    table = Table(box=None, pad_edge=False)
    for column in ("notebook", "status", "seconds", "claims held / judged", "page"):
        table.add_column(column, no_wrap=column != "page", overflow="fold")
    for result in results:
        page = str(directory / result["page"]) if result.get("page") else ""
        claims = render.held_text(board["claims"], result["name"])
        style = "" if result["status"] == "ok" else "red"
        status = "kept" if result.get("kept") else result["status"]
        table.add_row(
            escape(result["name"]), status, f"{result['seconds']:.1f}", claims, escape(page), style=style
        )
    console.print(table)
    console.print(f"scoreboard: {directory / 'scoreboard.html'}", markup=False, soft_wrap=True)
    for line in scoreboard.failures(board):
        console.print(f"failed: {line}", markup=False, soft_wrap=True, style="red")


def _short(directory: Path) -> Path:
    """As seen from where we stand, if it lies below: absolute paths fill a line."""
    here, there = Path.cwd(), directory.resolve()
    return there.relative_to(here) if there.is_relative_to(here) else there


def _print_claims(console: Console, board: Mapping[str, Any]) -> None:
    rows = board["claims"]
    if not rows:
        return
    console.print(_claims_table("claim", counts.statements(rows)))
    console.print()
    if structural := counts.structural_rows(rows):
        console.print(_claims_table("structural, true by construction", structural))
        console.print()
    for row in rows:  # a history is too long for a cell
        for entry in row["changed"]:
            console.print(f"{row['id']}: changed {entry}", markup=False, soft_wrap=True)
    for line in counts.summary(counts.count(rows)):
        console.print(line, markup=False, soft_wrap=True)
    console.print()


def _claims_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in (title, "verdict", "paper", "measured, 95 % interval", "null", "rule"):
        table.add_column(column, overflow="fold")
    for row in rows:
        good = row["verdict"] != "not judged" and row_ok(row)
        style = "" if good else "dim" if row["verdict"] == "not judged" else "red"
        numbers = "; ".join(filter(None, (render.measured(row), render.premise_text(row))))
        cells = [row["id"], render.verdict_text(row), row["paper"] or "–"]
        cells += [numbers, render.null_text(row), render.rule_text(row)]
        table.add_row(*map(escape, cells), style=style)
    return table


def _print_failure(console: Console, result: Mapping[str, Any], directory: Path) -> None:
    problem = result["failure"]
    where = f", cell {problem['cell']}" if problem.get("cell") else ""
    console.print(f"{result['name']}{where}: {problem['kind']}", markup=False, style="bold red")
    console.print(f"  {problem['message']}", markup=False, soft_wrap=True)
    for part in ("source", "traceback"):
        if problem.get(part):
            for line in problem[part].splitlines():
                console.print(f"  │ {line}", markup=False, highlight=False, soft_wrap=True)
            console.print()
    if result.get("notebook"):
        console.print(f"  as far as it came: {directory / result['notebook']}", markup=False, soft_wrap=True)
    console.print()
