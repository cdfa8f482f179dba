import pytest

from dslib.suite.claims import Claim, ClaimError, load_claims

GATE = {"statement": "the teacher is better", "op": ">", "threshold": 0.5, "on": "interval"}


def load(tmp_path, write_claims, *rows):
    return load_claims(write_claims(tmp_path / "claims.toml", list(rows)))


def test_claims_come_by_id_in_the_order_of_the_file(tmp_path, write_claims, claim_row):
    claims = load(tmp_path, write_claims, claim_row(id="b.x"), claim_row(id="a.x"))
    assert list(claims) == ["b.x", "a.x"]
    assert isinstance(claims["a.x"], Claim)


def test_the_claims_that_ship_with_dslib_are_valid(monkeypatch):
    monkeypatch.delenv("DSLIB_CLAIMS", raising=False)
    assert load_claims()


def test_a_null_and_an_expected_failure_are_read(tmp_path, write_claims, claim_row):
    row = claim_row(expected="did not reproduce", reason="too small", null={"statement": "random"})
    claim = load(tmp_path, write_claims, row)["toy.mean"]
    assert claim.null.statement == "random"
    assert claim.reason == "too small"


def test_what_is_left_out_has_the_cautious_meaning(tmp_path, write_claims, claim_row):
    claim = load(tmp_path, write_claims, claim_row(null={"statement": "random"}, gate=GATE))["toy.mean"]
    assert (claim.kind, claim.registered, claim.changed) == ("claim", "with data", ())
    assert claim.null.paired is False
    assert (claim.gate.samples, claim.gate.rule) == ("seeds", "interval > 0.5")


def test_a_history_is_read_in_its_order(tmp_path, write_claims, claim_row):
    history = ["2026-01-31: null, it was empty", "2026-12-01: statement, half of it was missing"]
    assert load(tmp_path, write_claims, claim_row(changed=history))["toy.mean"].changed == tuple(history)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"treshold": 1.0}, "unknown key 'treshold'; did you mean 'threshold'"),
        ({"op": ">="}, "op='>='"),
        ({"op": "within"}, "needs threshold="),
        ({"op": "within", "threshold": [1.0, 0.5]}, "is no range"),
        ({"op": "within", "threshold": [1.0]}, "neither a number nor"),
        ({"threshold": [0.0, 1.0]}, "needs one number as threshold"),
        ({"threshold": "0"}, "neither a number nor"),
        ({"threshold": True}, "neither a number nor"),
        ({"samples": "rows"}, "samples='rows'"),
        ({"profile": "slow"}, "profile='slow'"),
        ({"statement": " "}, "statement"),
        ({"expected": "did not reproduce"}, "needs a reason"),
        ({"reason": "because"}, "without expected"),
        ({"null": {"text": "x"}}, "unknown key 'null.text'"),
        ({"null": {"statement": "x", "paired": "yes"}}, "null.paired='yes'"),
        ({"kind": "identity"}, "kind='identity': Input should be 'claim' or 'structural'"),
        ({"registered": "before"}, "registered='before'"),
        ({"changed": ["the rule was wrong"]}, "is not of the form '2026-12-01: what, why'"),
        ({"changed": ["2026-12-32: the rule, it was wrong"]}, "is not of the form"),
        ({"changed": ["2026-12-01: "]}, "is not of the form"),
        ({"expected": "premise unmet", "reason": "x"}, "needs a premise: add [claim.gate]"),
        ({"gate": GATE | {"treshold": 1}}, "unknown key 'gate.treshold'; did you mean 'threshold'"),
        ({"gate": GATE | {"threshold": "0"}}, "gate.threshold='0' is neither a number nor"),
        ({"gate": GATE | {"op": "within"}}, "gate: op='within' needs threshold="),
        ({"gate": {"op": ">", "threshold": 0, "on": "value"}}, "the key 'gate.statement' is missing"),
    ],
)
def test_a_wrong_row_is_an_error_that_names_the_claim(tmp_path, write_claims, claim_row, changes, message):
    row = claim_row(**changes)
    path = tmp_path / "claims.toml"
    write_claims(path, [row])
    with pytest.raises(ClaimError, match=r"claim 'toy\.mean'") as error:
        load_claims(path)
    assert message in str(error.value)


def test_a_missing_key_is_named(tmp_path, write_claims, claim_row):
    row = claim_row()
    del row["scale"]
    with pytest.raises(ClaimError, match=r"claim 'toy.mean': the key 'scale' is missing"):
        load(tmp_path, write_claims, row)


def test_a_row_without_an_id_is_named_by_its_position(tmp_path, write_claims, claim_row):
    row = claim_row()
    del row["id"]
    with pytest.raises(ClaimError, match="claim number 2"):
        load(tmp_path, write_claims, claim_row(), row)


def test_an_id_used_twice_is_refused_because_one_would_hide_the_other(tmp_path, write_claims, claim_row):
    with pytest.raises(ClaimError, match=r"'toy.mean' is registered twice"):
        load(tmp_path, write_claims, claim_row(), claim_row())


def test_broken_toml_and_a_missing_file_are_clear(tmp_path):
    (tmp_path / "c.toml").write_text("[[claim]\n")
    with pytest.raises(ClaimError, match="not valid TOML"):
        load_claims(tmp_path / "c.toml")
    (tmp_path / "c.toml").write_text("[claims]\nx = 1\n")
    with pytest.raises(ClaimError, match="unknown top-level key 'claims'"):
        load_claims(tmp_path / "c.toml")
    with pytest.raises(FileNotFoundError, match="DSLIB_CLAIMS"):
        load_claims(tmp_path / "none.toml")
