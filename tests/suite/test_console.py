import io

import pytest
from rich.console import Console

from dslib.suite import console, scoreboard

OK = {"name": "01_toy", "status": "ok", "seconds": 2.5, "failure": None, "page": "01_toy.html", "reports": []}
PROBLEM = {
    "kind": "error",
    "message": "ValueError: [bold]x[/bold]",
    "cell": 3,
    "source": "f(x)",
    "traceback": "T\nE",
}
FAILED = {
    **OK,
    "name": "02_bad",
    "status": "failed",
    "failure": PROBLEM,
    "page": None,
    "notebook": "02.failed.ipynb",
}


def play(display):
    display.begin(["01_toy", "02_bad"])
    display.event("01_toy", {"event": "started"})
    display.event("01_toy", {"event": "start", "cells": 9})
    display.event("01_toy", {"event": "ready"})
    display.event("01_toy", {"event": "cell", "index": 4, "of": 9, "section": "Spectra", "head": "x = [1]"})
    display.tick()
    display.done("01_toy", OK)
    display.done("02_bad", FAILED)
    display.tick()
    display.end()


def test_a_terminal_sees_the_cell_that_runs():
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=100, color_system=None)
    display = console.make_display(terminal)
    assert isinstance(display, console.LiveDisplay)
    play(display)
    assert "4/9" in out.getvalue()
    assert "Spectra · x = [1]" in out.getvalue()


def test_a_log_gets_plain_lines_without_a_line_a_cell():
    out = io.StringIO()
    display = console.make_display(Console(file=out, width=100))
    assert isinstance(display, console.LineDisplay)
    play(display)
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["01_toy: started", "01_toy: ok after 2.5 s"]
    assert "[bold]x[/bold]" in lines[2], "what a notebook says is no markup"
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_each_notebook_says_how_its_claims_stand_as_it_ends(terminal, make_claim):
    claims = [make_claim(id=f"toy.{name}") for name in ("mean", "worse", "late", "other")]
    claims[2] = make_claim(id="toy.late", profile="full")
    samples = {"mean": -1.0, "worse": 1.0, "late": 1.0, "other": -2.0}
    reports = [
        {"id": f"toy.{name}", "samples": [value] * 5, "null": None, "profile": "quick"}
        for name, value in samples.items()
    ]
    registered = {claim.id: claim for claim in claims}
    out = io.StringIO()
    display = console.make_display(
        Console(file=out, force_terminal=terminal, width=120, color_system=None),
        lambda result: scoreboard.build([result], registered)["claims"],
    )
    display.begin(["01_toy", "02_bad"])
    display.done("01_toy", {**OK, "reports": reports})
    text = out.getvalue()
    assert "01_toy: ok after 2.5 s; 2 held, 1 contradicted, 1 not judged" in text
    assert "  toy.worse: contradicted: the whole interval breaks the rule" in text
    assert "toy.late" not in text, "a claim that is not judged here is well"
    display.done("02_bad", {**FAILED, "reports": []})
    display.end()
    assert "02_bad: failed after 2.5 s ValueError: [bold]x[/bold]" in out.getvalue()


def test_a_log_hears_from_a_long_cell(monkeypatch):
    monkeypatch.setattr(console, "LOG_EVERY", 0.0)
    out = io.StringIO()
    play(console.LineDisplay(Console(file=out, width=100)))
    assert "cell 4/9 Spectra" in out.getvalue()


def test_a_log_hears_again_from_a_cell_that_goes_on(monkeypatch):
    monkeypatch.setattr(console, "LOG_LONG_CELL_EVERY", -1.0)
    out = io.StringIO()
    display = console.LineDisplay(Console(file=out, width=100))
    display.begin(["01_toy"])
    display.tick()
    display.event("01_toy", {"event": "started"})
    display.tick()
    assert out.getvalue().splitlines() == ["01_toy: started", "01_toy: 0 s, still in cell –"]


def test_the_summary_shows_source_frames_and_pages(tmp_path, monkeypatch, make_claim):
    monkeypatch.chdir(tmp_path)
    out = io.StringIO()
    payload = {"id": "toy.mean", "samples": [-1.0] * 5, "null": None, "profile": "quick"}
    results = [{**OK, "reports": [payload]}, FAILED]
    claim = make_claim()
    board = scoreboard.build(results, {claim.id: claim})
    console.print_summary(Console(file=out, width=120), board, results, tmp_path / "runs" / "a")
    text = out.getvalue()
    for part in ("02_bad, cell 3: error", "│ f(x)", "│ E", "1 / 1", "runs/a/01_toy.html", "toy.mean"):
        assert part in text
    assert str(tmp_path) not in text


def test_structural_rows_have_a_table_of_their_own_and_counts_close_the_claims(tmp_path, make_claim):
    claims = {
        "a.b": make_claim(id="a.b", changed=["2026-12-01: null, [it] was empty"]),
        "c.d": make_claim(id="c.d", kind="structural"),
    }
    reports = [{"id": id, "samples": [-1.0] * 5, "null": None, "profile": "quick"} for id in claims]
    results = [{**OK, "reports": reports}]
    out = io.StringIO()
    board = scoreboard.build(results, claims)
    console.print_summary(Console(file=out, width=160), board, results, tmp_path)
    text = out.getvalue()
    assert text.index("a.b") < text.index("structural, true by construction") < text.index("c.d")
    assert "a.b: changed 2026-12-01: null, [it] was empty" in text
    assert "1 of 1 claims held." in text
    assert "1 / 1" in text


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    play(console.LiveDisplay(Console(file=out, force_terminal=True, width=100)))
    assert "\x1b[31m" not in out.getvalue()
    assert "\x1b[32m" not in out.getvalue()


def test_a_narrow_encoding_gets_a_question_mark_and_no_exception(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    console.make_console().print("−1")
    assert raw.getvalue().strip() == b"?1"


@pytest.mark.parametrize("seconds", [0.04, 12.34])
def test_seconds_are_rounded(seconds):
    out = io.StringIO()
    display = console.LineDisplay(Console(file=out, width=100))
    display.begin(["01_toy"])
    display.done("01_toy", {**OK, "seconds": seconds})
    assert f"{seconds:.1f} s" in out.getvalue()
