"""The committed board: one notebook's run renews its own rows, and nothing is shown that was not measured."""

import json

import pytest

from dslib.suite import board as boards
from dslib.suite.board import BoardError

ENVIRONMENT = {"python": "3.11.7", "platform": "Linux", "cores": 2, "packages": {"torch": "2.13.0"}}


@pytest.fixture
def claims(make_claim):
    two = make_claim(), make_claim(id="late.mean", notebook="02_late")
    return {claim.id: claim for claim in two}


@pytest.fixture
def run_of(claims):
    """A scoreboard of the given notebooks, every claim of theirs measured as ``value``."""

    def make(*stems, value=-1.0, status="ok"):
        rows = [
            boards._pending(claim)
            | {"verdict": "held", "measured": value, "samples": [value], "n": 1}
            | {"null": {"statement": "s", "samples": [0.0], "measured": 0.0, "ci": None}}
            for claim in claims.values()
            if claim.notebook in stems
        ]
        items = [{"name": stem, "status": status, "seconds": 60.0} for stem in stems]
        return {"claims": rows, "notebooks": items, "environment": ENVIRONMENT}

    return make


STEMS = ["01_toy", "02_late"]


def test_a_run_of_one_notebook_replaces_its_rows_and_leaves_the_others(claims, run_of):
    board = boards.merged({"claims": [], "notebooks": []}, run_of(*STEMS), claims, STEMS)
    board = boards.merged(board, run_of("02_late", value=-2.0), claims, STEMS)
    assert [row["measured"] for row in board["claims"]] == [-1.0, -2.0]
    assert [item["name"] for item in board["notebooks"]] == STEMS


def test_a_notebook_that_failed_keeps_its_earlier_rows(claims, run_of):
    board = boards.merged({"claims": [], "notebooks": []}, run_of(*STEMS), claims, STEMS)
    board = boards.merged(board, run_of("01_toy", value=5.0, status="failed"), claims, STEMS)
    assert board["claims"][0]["measured"] == -1.0


def test_samples_are_left_out_and_their_intervals_kept(claims, run_of):
    board = boards.merged({"claims": [], "notebooks": []}, run_of("01_toy"), claims, STEMS)
    assert "samples" not in boards.text(board).replace('"null"', "")
    assert board["claims"][0]["null"] == {"statement": "s", "measured": 0.0, "ci": None}


@pytest.mark.parametrize(
    "change", [{"statement": "another one"}, {"threshold": -0.5}, {"notebook": "02_late"}]
)
def test_a_claim_that_changed_since_its_run_waits(claims, run_of, make_claim, change):
    board = boards.merged({"claims": [], "notebooks": []}, run_of(*STEMS), claims, STEMS)
    assert boards.pending(board, claims) == []
    changed = claims | {"toy.mean": make_claim(**change)}
    assert boards.pending(board, changed) == ["toy.mean"]
    row = boards.merged(board, None, changed, STEMS)["claims"][0]
    assert (row["verdict"], row["measured"]) == (boards.PENDING, None)


def test_what_is_gone_from_claims_or_tree_is_gone_from_the_board(claims, run_of):
    board = boards.merged({"claims": [], "notebooks": []}, run_of(*STEMS), claims, STEMS)
    left = boards.merged(board, None, {"late.mean": claims["late.mean"]}, ["02_late"])
    assert [row["id"] for row in left["claims"]] == ["late.mean"]
    assert [item["name"] for item in left["notebooks"]] == ["02_late"]


@pytest.mark.parametrize("content", ["[]", "{", '{"claims": [{}], "notebooks": []}'])
def test_a_file_that_is_no_board_is_refused_by_name(tmp_path, content):
    file = tmp_path / "scoreboard.json"
    file.write_text(content)
    with pytest.raises(BoardError, match=r"scoreboard\.json is no scoreboard"):
        boards.read(file)


def test_what_is_written_is_read_again(tmp_path, claims, run_of):
    board = boards.merged({"claims": [], "notebooks": []}, run_of(*STEMS), claims, STEMS)
    (tmp_path / "b.json").write_text(boards.text(board))
    assert boards.read(tmp_path / "b.json") == board == json.loads(boards.text(board))
