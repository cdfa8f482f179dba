"""Two runs are the same when every sample is, to the last digit."""

import json

import pytest

from dslib.suite.diff import compare, differences
from dslib.suite.rundir import RunError


def row(id="a.b", samples=(1.0, 2.0), null=None, verdict="held"):
    return {
        "id": id,
        "samples": list(samples),
        "null": None if null is None else {"samples": list(null)},
        "verdict": verdict,
    }


def board(*rows):
    return {"claims": list(rows)}


def run(base, name, rows=(), profile="quick"):
    path = base / name
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"profile": profile, "notebooks": []}))
    if rows is not None:
        (path / "scoreboard.json").write_text(json.dumps(board(*rows)))
    return path


def test_equal_boards_do_not_differ():
    assert differences(board(row(null=[0.0])), board(row(null=[0.0]))) == []


def test_a_last_digit_is_a_difference_and_its_size_is_said():
    (found,) = differences(board(row()), board(row(samples=(1.0, 2.0000000000000004))))
    assert found.id == "a.b"
    assert found.what.startswith("1 of 2 samples differ, by up to 2.2e-16")


def test_a_sample_that_was_zero_and_a_changed_sign_have_a_size():
    (found,) = differences(board(row(samples=(0.0, -1.0))), board(row(samples=(1.0, 1.0))))
    assert "2 of 2 samples differ, by up to 2.0e+00" in found.what


def test_null_samples_count_verdicts_and_nested_samples_are_compared():
    old = board(row(null=[1.0]), row("c.d", samples=[[1.0, 2.0], [3.0, 4.0]]))
    new = board(row(null=[2.0], verdict="inconclusive"), row("c.d", samples=[[1.0, 2.0], [3.0, 5.0]]))
    first, second = differences(old, new)
    assert first.what.startswith("held → inconclusive; 1 of 1 null differ")
    assert second.what.startswith("1 of 4 samples differ")


def test_samples_of_a_gate_are_compared_and_older_boards_have_none():
    with_gate = row() | {"gate": {"samples": [1.0]}}
    assert differences(board(row()), board(row() | {"gate": None})) == []
    (found,) = differences(board(with_gate), board(row() | {"gate": {"samples": [2.0]}}))
    assert found.what.startswith("1 of 1 gate differ")


def test_another_number_of_samples_none_at_all_and_a_claim_of_one_run_are_differences():
    old = board(row(), row("c.d"), row("only.first"))
    new = board(row(samples=(1.0,)), row("c.d", samples=()), row("only.second"))
    assert [d.what for d in differences(old, new)] == [
        "2 → 1 samples",
        "2 → 0 samples",
        "is only in the first run",
        "is only in the second run",
    ]


def test_runs_are_found_by_path_and_by_stamp(tmp_path):
    base = tmp_path / "runs"
    path = run(base, "20260101-000000", [row()])
    run(base, "20260102-000000", [row(samples=(1.0, 3.0))])
    assert [d.id for d in compare(path, "20260102-000000", base)] == ["a.b"]


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (
            "nothing",
            "nothing is no run; name a directory that `dslib run` made, or one of one, other, unfinished",
        ),
        ("other", "has profile quick and other smoke"),
        ("unfinished", "unfinished has no scoreboard yet"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path, second, says):
    base = tmp_path / "runs"
    run(base, "one", [row()])
    run(base, "other", [row()], profile="smoke")
    run(base, "unfinished", None)
    with pytest.raises(RunError, match=says) as error:
        compare("one", second, base)
    assert "\n" not in str(error.value)
