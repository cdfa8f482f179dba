import xml.etree.ElementTree as ET

import pytest

from dslib.suite import render, scoreboard

DOWN = [-1.0, -1.5, -0.5, -1.0, -1.0]


def result(name="01_toy", *reports, status="ok", failure=None):
    content = {"name": name, "status": status, "seconds": 1.0, "page": f"{name}.html"}
    return content | {"failure": failure, "reports": list(reports), "notebook": None}


def payload(id="toy.mean", samples=DOWN, null=None, profile="quick"):
    return {"id": id, "samples": samples, "null": null, "profile": profile}


def build(make_claim, *results, **changes):
    claim = make_claim(**changes)
    return scoreboard.build(results, {claim.id: claim})


def test_a_reported_claim_is_judged(make_claim):
    board = build(make_claim, result("01_toy", payload()))
    assert board["claims"][0]["verdict"] == "held"
    assert scoreboard.failures(board) == []


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        ([result("01_toy")], "01_toy does not report it"),
        ([result("01_toy", status="failed")], "01_toy failed before reporting it"),
        ([result("01_toy", payload(), payload())], "reported 2 times"),
        ([result("01_toy"), result("02_other", payload())], "registered for 01_toy"),
        ([result("01_toy", payload(), payload("toy.men"))], "no claim registers it; did you mean 'toy.mean'"),
        ([result("01_toy", payload(samples=[1.0]))], "1 of the 5 seeds"),
    ],
    ids=["unreported", "failed", "twice", "elsewhere", "unregistered", "too few"],
)
def test_a_claim_without_exactly_one_good_report_is_an_error_that_fails_the_suite(
    make_claim, results, reason
):
    board = build(make_claim, *results)
    row = next(row for row in board["claims"] if row["verdict"] == "error")
    assert reason in row["reason"]
    assert any(row["id"] in line for line in scoreboard.failures(board))


def test_claims_of_notebooks_that_were_not_run_are_not_missing(make_claim):
    assert build(make_claim, result("02_other"))["claims"] == []


def test_inconclusive_contradicted_and_unexpected_fail_and_a_registered_failure_does_not(make_claim):
    expected = {"expected": "did not reproduce", "reason": "too small"}
    up = [-value for value in DOWN]
    assert scoreboard.failures(build(make_claim, result("01_toy", payload(samples=up))))
    assert scoreboard.failures(build(make_claim, result("01_toy", payload(samples=[-1.0, 1.0, 0, 2, -2]))))
    assert scoreboard.failures(build(make_claim, result("01_toy", payload()), **expected))
    assert not scoreboard.failures(build(make_claim, result("01_toy", payload(samples=up)), **expected))


GATE = {"statement": "one step is mastered", "op": ">", "threshold": 0.5, "on": "interval"}
HISTORY = ["2026-12-01: null, it was a |die|"]
EVERYTHING = {
    "gate": GATE,
    "null": {"statement": "a coin", "paired": True},
    "changed": HISTORY,
    "registered": "before data",
}


def everything(make_claim, kind="claim", gate=0.9):
    """The board of one claim that registers all that can be registered."""
    report = payload(null=[value + 0.5 for value in DOWN]) | {"gate": [gate] * 5}
    return build(make_claim, result("01_toy", report), kind=kind, **EVERYTHING)


def test_the_row_carries_kind_contrast_premise_and_history(make_claim):
    (row,) = everything(make_claim, "structural")["claims"]
    assert (row["kind"], row["registered"], row["changed"]) == ("structural", "before data", HISTORY)
    assert (row["contrast"], row["contrast_ci"]) == (-0.5, [-0.5, -0.5])
    assert row["null"]["paired"] is True
    assert row["gate"] == {
        "statement": "one step is mastered",
        "rule": "interval > 0.5",
        "samples": [0.9] * 5,
        "measured": 0.9,
        "ci": [0.9, 0.9],
    }


def test_a_premise_that_fails_fails_the_suite_unless_it_is_registered(make_claim):
    (line,) = scoreboard.failures(everything(make_claim, gate=0.1))
    assert "premise unmet: one step is mastered: 0.1 [0.1, 0.1]" in line


def test_every_page_shows_contrast_premise_history_and_registration(make_claim):
    board = everything(make_claim)
    for page in (render.markdown(board), render.html_page(board, [result("01_toy")])):
        for text in (
            "claim − null −0.5 [−0.5, −0.5]",
            "premise 0.9 [0.9, 0.9]",
            "before data",
            "2026-12-01: null",
        ):
            assert text in page
        assert "1 of 1 claims held." in page
        assert "1 / 1" in page
        assert "Structural:" not in page
    row = next(line for line in render.markdown(board).splitlines() if "goes down" in line)
    assert row.replace("\\|", "").count("|") == 8, "a bar in a history does not break the table either"


def test_structural_rows_stand_apart_and_are_not_counted_among_the_claims(make_claim):
    board = everything(make_claim, "structural")
    for page in (render.markdown(board), render.html_page(board, [result("01_toy")])):
        before, _, after = page.partition("Structural: identities")
        assert "The toy goes down" not in before
        assert "The toy goes down" in after
        assert "0 of 0 claims held." in page
    root = ET.fromstring(render.junit(board, [result("01_toy")]).split("\n", 1)[1])
    assert {suite.get("name"): suite.get("tests") for suite in root} == {
        "notebooks": "1",
        "claims": "0",
        "structural": "1",
    }


def test_a_structural_row_that_breaks_its_rule_fails_the_suite(make_claim):
    up = [-value for value in DOWN]
    board = build(make_claim, result("01_toy", payload(samples=up)), kind="structural")
    assert scoreboard.failures(board)
    assert 'failures="1"' in render.junit(board, [])


def test_reports_of_older_runs_know_no_gate(make_claim):
    assert "gate" not in payload()
    assert build(make_claim, result("01_toy", payload()))["claims"][0]["verdict"] == "held"
    (row,) = build(make_claim, result("01_toy", payload()), gate=GATE)["claims"]
    assert row["verdict"] == "error"
    assert "gate samples are missing" in row["reason"]


def test_the_same_results_give_the_same_bytes(make_claim, tmp_path):
    results = [result("01_toy", payload(null=[0.0, 0.1, -0.1, 0.2, -0.2]))]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        board = build(make_claim, *results, null={"statement": "a coin"})
        scoreboard.write(board, tmp_path / name, results)
    names = {file.name for file in (tmp_path / "a").iterdir()}
    assert names == {"scoreboard.json", "scoreboard.md", "scoreboard.html", "junit.xml"}
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert scoreboard.read(tmp_path / "a") == board


def test_the_page_needs_nothing_else_and_knows_the_dark(make_claim):
    failure = {"kind": "error", "message": "<b>", "cell": 3, "source": "1 < 0", "traceback": "E"}
    results = [result("01_toy", payload(), failure=failure, status="failed")]
    page = render.html_page(build(make_claim, *results, statement="a < b"), results)
    assert "color-scheme: light dark" in page
    assert "a &lt; b" in page
    assert "<b>" not in page
    assert "http" not in page
    assert "<script" not in page
    assert 'href="01_toy.html"' in page


def test_a_bar_in_a_statement_does_not_break_the_markdown_table(make_claim):
    board = build(make_claim, result("01_toy", payload()), statement="|x| falls")
    line = next(line for line in render.markdown(board).splitlines() if "falls" in line)
    assert line.replace("\\|", "").count("|") == 8


def test_junit_is_valid_xml_whatever_a_traceback_holds(make_claim):
    failure = {"kind": "error", "message": "\x1b[31m\x00", "cell": 1, "source": "a", "traceback": "]]>\x07"}
    results = [result("01_toy", payload(), failure=failure, status="failed"), result("02_other")]
    root = ET.fromstring(render.junit(build(make_claim, *results, profile="full"), results).split("\n", 1)[1])
    notebooks, claims = root
    assert (notebooks.get("tests"), notebooks.get("failures")) == ("2", "1")
    assert (claims.get("tests"), claims.get("skipped"), claims.get("failures")) == ("1", "1", "0")
