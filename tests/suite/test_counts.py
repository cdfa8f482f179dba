"""What a board adds up to, counted by hand on a few rows."""

import pytest

from dslib.suite.counts import PENDING, count, structural_rows, summary


def row(verdict, expected=None, kind="claim", notebook="01_toy", ci=(0.0, 1.0)):
    return {"verdict": verdict, "expected": expected, "kind": kind, "notebook": notebook, "ci": ci}


ROWS = [
    row("held"),
    row("held", expected="inconclusive"),
    row("held", ci=None),
    row("inconclusive", expected="did not reproduce"),
    row("did not reproduce", expected="did not reproduce", notebook="02_other"),
    row("premise unmet", expected="premise unmet", notebook="02_other"),
    row("contradicted", notebook="02_other"),
    row("error", ci=None),
    row("not judged"),
    row("held", kind="structural"),
    row("contradicted", kind="structural"),
    row("not judged", kind="structural"),
]


def test_every_verdict_is_counted_and_structural_rows_are_in_none():
    counts = count(ROWS)
    assert dict(counts.verdicts) == {
        "held": 3,
        "inconclusive": 1,
        "did not reproduce": 1,
        "contradicted": 1,
        "premise unmet": 1,
        "error": 1,
        "not judged": 1,
    }
    assert (counts.held, counts.judged) == (3, 8)
    assert (counts.structural, counts.structural_held) == (2, 1)


def test_excused_is_what_is_not_held_and_well_for_the_suite():
    assert count(ROWS).excused == 3


def test_luck_is_a_twentieth_of_what_an_interval_judged():
    counts = count(ROWS)
    assert counts.by_interval == 6  # not the one judged by values, the error, the one not judged
    assert counts.by_luck == pytest.approx(0.3)


def test_a_notebook_counts_its_own_rows():
    counts = count(ROWS, "02_other")
    assert (counts.held, counts.judged, counts.structural) == (0, 3, 0)
    assert count(ROWS, "03_none").verdicts == {}


def test_the_sentences_say_all_of_it_and_nothing_that_is_not_there():
    lines = summary(count(ROWS))
    assert lines[0] == (
        "3 of 8 claims held, 1 inconclusive, 1 did not reproduce, 1 contradicted, 1 premise unmet, 1 error, "
        "1 not judged."
    )
    assert lines[1].startswith("3 of those not held are excused")
    assert "Of 6 judged by a 95 % interval up to 0.3 may be held by luck (0.05 × 6)." in lines
    assert "1 of 2 held" in lines[-1]
    assert summary(count([row("held", ci=None)])) == ["1 of 1 claims held."]


def test_rows_are_parted_by_kind():
    assert structural_rows(ROWS) == ROWS[-3:]


def test_what_was_not_measured_yet_is_counted_by_name_and_not_judged():
    counts = count([row("held"), row(PENDING)])
    assert (counts.judged, counts.verdicts[PENDING]) == (1, 1)
    assert summary(counts)[0] == "1 of 1 claims held, 1 not measured yet."
