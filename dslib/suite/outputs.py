"""What an executed notebook holds: keep its outputs small and in a fixed order, and search them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dslib.suite.reporting import MIME

TEXT_LIMIT = 20_000  # characters of one output
HTML_LIMIT = 2_000_000
FRAMES = 25  # lines of a traceback that a failure shows

_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# What Python prints when an error had nobody to go to.
_UNNOTICED = re.compile(r"^(Exception in thread |Task exception was never retrieved)", re.MULTILINE)
_FIGURES = ("image/svg+xml", "image/png", "image/jpeg")


def plain(text: str) -> str:
    """``text`` without terminal colours."""
    return _ANSI.sub("", text)


def last_frames(traceback: list[str]) -> str:
    """The end of a traceback as plain text."""
    lines = plain("\n".join(traceback)).splitlines()
    return "\n".join(lines if len(lines) <= FRAMES else ["…", *lines[-FRAMES:]])


def tidy(outputs: list[Any], left_out: dict[str, int] | None = None) -> list[Any]:
    """The outputs of one cell with streams joined and long texts cut.

    Between two displays all of stdout comes first, then all of stderr: their interleaving is
    a matter of luck, their order in one stream is not. ``left_out`` counts, for each stream,
    the characters that were dropped while the cell ran.
    """
    tidied: list[Any] = []
    run: dict[str, Any] = {}

    def close() -> None:
        tidied.extend(run[name] for name in sorted(run, reverse=True))
        run.clear()

    for output in outputs:
        if output["output_type"] == "stream":
            if output["name"] in run:
                run[output["name"]]["text"] += "".join(output["text"])
            else:
                run[output["name"]] = output
                output["text"] = "".join(output["text"])
            continue
        close()
        _shorten_display(output)
        tidied.append(output)
    close()
    streams = [output for output in tidied if output["output_type"] == "stream"]
    for output in streams:
        output["text"] = bounded(_carriage_returns(output["text"]))
    for name, count in (left_out or {}).items():
        last = [output for output in streams if output["name"] == name][-1:]
        for output in last:
            output["text"] += f"\n… {count} more characters were printed and left out\n"
    return tidied


def bounded(text: str, limit: int = TEXT_LIMIT) -> str:
    """``text``, or its beginning and end with a line between that says how much is missing."""
    if len(text) <= limit:
        return text
    head, tail = limit * 3 // 4, limit // 4
    missing = len(text) - head - tail
    return f"{text[:head]}\n… {missing} characters left out …\n{text[-tail:]}"


def errors(notebook: Any) -> Iterator[tuple[int | None, Any]]:
    """Errors that are shown but stopped nothing: (cell or None for a widget, the output).

    A cell tagged ``raises-exception`` may show its error.
    """
    for index, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code" or "raises-exception" in (cell["metadata"].get("tags") or []):
            continue
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                yield index, output
            elif output.get("name") == "stderr" and _UNNOTICED.search(output["text"]):
                yield index, _unnoticed(output["text"])
    yield from ((None, output) for output in widget_outputs(notebook) if output.get("output_type") == "error")


def has_figure(notebook: Any) -> bool:
    """Whether any output, in a cell or a widget, is an image."""
    return any(key in output.get("data", {}) for output in all_outputs(notebook) for key in _FIGURES)


def reports(notebook: Any) -> list[dict[str, Any]]:
    """The payloads of all ``report`` calls, in order."""
    return [output["data"][MIME] for output in all_outputs(notebook) if MIME in output.get("data", {})]


def all_outputs(notebook: Any) -> Iterator[Any]:
    """Every output of every code cell, in order."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            yield from cell["outputs"]
    yield from widget_outputs(notebook)


def widget_outputs(notebook: Any) -> Iterator[Any]:
    """What was captured by Output widgets: there an error neither stops a cell nor shows in one."""
    widgets = notebook["metadata"].get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {})
    for model in widgets.get("state", {}).values():
        outputs = model.get("state", {}).get("outputs") if isinstance(model.get("state"), dict) else None
        yield from (output for output in outputs or () if isinstance(output, dict))


def _unnoticed(text: str) -> dict[str, Any]:
    """An error of a thread or task, as the output it would have been in a cell."""
    lines = [line for line in plain(text).splitlines() if line.strip()]
    name, _, value = lines[-1].partition(": ")
    return {"output_type": "error", "ename": name, "evalue": value, "traceback": lines}


def _shorten_display(output: Any) -> None:
    if output["output_type"] == "error":
        output["traceback"] = [bounded(frame) for frame in output["traceback"]]
        output["evalue"] = bounded(output["evalue"])
        return
    data = output.get("data", {})
    for key in ("text/plain", "text/markdown"):
        if key in data:
            data[key] = bounded("".join(data[key]))
    if len("".join(data.get("text/html", ""))) > HTML_LIMIT:
        # Cut HTML is broken HTML.
        data["text/html"] = f"<p>A table of {len(''.join(data['text/html']))} characters was left out.</p>"


def _carriage_returns(text: str) -> str:
    """What a terminal would show of a line that was overwritten: its last state."""
    if "\r" not in text:
        return text
    text = text.replace("\r\n", "\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
