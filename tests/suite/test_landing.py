"""Sentences of the README: numbers from the board, words only under the verdicts that they suppose."""

import pytest

from dslib.suite import board as boards
from dslib.suite import landing
from dslib.suite.board import BoardError


@pytest.fixture
def row(make_claim):
    def make(**changes):
        measured = {"measured": -0.4142, "ci": [-0.5, -0.3], "n": 5, "verdict": "held", "reason": "it holds"}
        null = {"statement": "s", "measured": 0.25, "ci": None}
        return boards._pending(make_claim()) | measured | {"null": null} | changes

    return make


@pytest.fixture
def board(row):
    def make(*rows, seconds=90.0):
        items = [{"name": "01_toy", "status": "ok", "seconds": seconds}]
        return {"claims": list(rows or [row()]), "notebooks": items}

    return make


def note(outcome, **supposes):
    return {"question": "Does it?", "outcome": outcome, "supposes": supposes or {"toy.mean": "held"}}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{toy.mean:.2f}", "−0.41"),
        ("{-toy.mean:.2f}", "0.41"),
        ("{toy.mean:+.0%}", "−41 %"),
        ("{toy.mean:points} of a hundred", "−41 of a hundred"),
        ("{-toy.mean:+points}", "+41"),
        ("{toy.mean|null:.2f} {toy.mean|low:.1f} {toy.mean|high:.1f}", "0.25 −0.5 −0.3"),
        ("{toy.mean|n} seeds, {toy.mean|paper}", "5 seeds, 0.52"),
    ],
)
def test_fields_take_their_numbers_from_the_row(board, template, text):
    assert landing.outcome("01_toy", note(template), board()) == text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            note("{toy.mean}", **{"toy.mean": "contradicted"}),
            "supposes that toy.mean is 'contradicted', and it is 'held'",
        ),
        (note("{toy.men}"), "no claim is called 'toy.men'; did you mean 'toy.mean'"),
        ({"outcome": "{toy.mean}"}, "supposes must give its verdict"),
        (note("{toy.mean:q}"), "cannot be written"),
        (note("{toy}"), "a field that is none of a claim"),
    ],
)
def test_a_sentence_that_does_not_fit_is_refused_with_what_to_do(board, given, message):
    with pytest.raises(BoardError, match=message):
        landing.outcome("01_toy", given, board())


def test_a_number_that_the_board_lacks_is_no_sentence(board, row):
    with pytest.raises(BoardError, match="no value on the board"):
        landing.outcome("01_toy", note("{toy.mean|low}"), board(row(ci=None)))


def test_nothing_is_said_of_what_was_not_measured(board, row):
    waiting = row(verdict=boards.PENDING, measured=None, ci=None)
    assert landing.outcome("01_toy", note("{toy.mean}"), board(waiting)) == boards.PENDING


def test_a_notebook_has_minutes_and_held_over_judged(board, row):
    table = landing.table(
        board(row(), row(id="toy.two", verdict="inconclusive")), {"01_toy": note("Yes.")}, {}
    )
    assert table.endswith("| Does it? | Yes. | 1.5 | [1 / 2](docs/scoreboard.md#01_toy) |")


def test_a_notebook_without_a_note_is_asked_for_by_its_title(board):
    assert "| The title | see its rows on the scoreboard |" in landing.table(
        board(), {}, {"01_toy": "The title"}
    )


def test_all_sentences_that_do_not_fit_are_named_at_once(board, row):
    two = board(row(), row(id="late.mean", notebook="02_late"))
    two["notebooks"].append({"name": "02_late", "status": "ok", "seconds": 1.0})
    wrong = {"01_toy": note("x", **{"toy.mean": "error"}), "02_late": note("x", **{"late.mean": "error"})}
    with pytest.raises(BoardError, match=r"(?s)01_toy.*02_late"):
        landing.table(two, wrong, {})


def test_what_did_not_reproduce_stands_up_front_by_name(board, row):
    rows = [row(), row(id="toy.no", verdict="did not reproduce"), row(id="toy.count", kind="structural")]
    said = landing.verdicts(board(*rows))
    assert said.startswith("**1 of 2 claims held, 1 did not reproduce.**")
    assert "Structural, true by construction and not counted: 1 of 1 held." in said
    assert "Did not reproduce: `toy.no`." in said


def test_page_shows_structural_rows_apart_and_a_rule_that_was_changed(board, row):
    rows = [row(changed=["2026-11-02: margin, too tight"]), row(id="toy.count", kind="structural")]
    page = landing.page(board(*rows), {}, {})
    claims, identities = page.split("Identities, definitions and counts:")
    assert "Changed 2026-11-02: margin, too tight" in claims
    assert "toy.count" in identities
    assert "toy.count" not in claims


def test_markers_are_needed():
    assert (
        landing.replaced("a\n<!-- x -->\nold\n<!-- /x -->\nb", "x", "new")
        == "a\n<!-- x -->\nnew\n<!-- /x -->\nb"
    )
    with pytest.raises(BoardError, match="one pair of markers"):
        landing.replaced("no markers", "x", "new")
