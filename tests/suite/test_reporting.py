import subprocess
import sys

import numpy as np
import pytest
import torch

from dslib.suite import report
from dslib.suite.claims import ClaimError
from dslib.suite.reporting import MIME, as_html, current_profile, plain_numbers


@pytest.fixture(autouse=True)
def registry(tmp_path, monkeypatch, write_claims):
    monkeypatch.setenv("DSLIB_CLAIMS", str(write_claims(tmp_path / "claims.toml")))
    monkeypatch.setenv("DSLIB_PROFILE", "quick")


DOWN = [-1.0, -1.5, -0.5, -1.0, -1.0]


@pytest.mark.parametrize(
    "samples",
    [
        DOWN,
        tuple(DOWN),
        np.array(DOWN),
        np.array(DOWN, dtype=np.float32),
        torch.tensor(DOWN, requires_grad=True),
        [np.float32(value) for value in DOWN],
        [torch.tensor(value) for value in DOWN],
        (value for value in DOWN),
    ],
    ids=["list", "tuple", "array", "float32", "tensor", "scalars", "tensors", "generator"],
)
def test_whatever_holds_numbers_is_accepted(samples, capsys):
    assert report("toy.mean", samples).measured == -1.0
    assert "toy.mean: held" in capsys.readouterr().out


def test_an_unregistered_id_is_named_with_the_nearest():
    with pytest.raises(ClaimError, match=r"'toy.men' is not registered.*did you mean 'toy.mean'"):
        report("toy.men", DOWN)


def test_bad_samples_fail_where_the_reader_stands():
    with pytest.raises(ClaimError, match=r"claim 'toy.mean': samples\[1\] is nan"):
        report("toy.mean", torch.tensor([1.0, float("nan")] * 3))


def test_an_edited_claims_file_counts_at_once(tmp_path, write_claims, claim_row):
    report("toy.mean", DOWN)
    import os

    path = write_claims(tmp_path / "claims.toml", [claim_row(threshold=-5.0)])
    os.utime(path, ns=(1, 1))
    assert report("toy.mean", DOWN).verdict == "contradicted"


def test_the_profile_comes_from_the_runner_and_must_be_one(monkeypatch):
    assert current_profile() == "quick"
    monkeypatch.setenv("DSLIB_PROFILE", "fast")
    with pytest.raises(ValueError, match="DSLIB_PROFILE is 'fast'"):
        current_profile()
    monkeypatch.delenv("DSLIB_PROFILE")
    assert current_profile() == "quick"


def test_what_is_no_number_stays_for_the_judge_to_name():
    assert plain_numbers(["a", None]) == ["a", None]


def test_in_ipython_the_row_carries_the_samples_and_takes_colours_from_the_page(make_claim):
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell.instance()
    try:
        with capture_output() as captured:
            judgement = report("toy.mean", DOWN)
        data = captured.outputs[0].data
    finally:
        type(shell).clear_instance()
    payload = {"id": "toy.mean", "samples": DOWN, "null": None, "gate": None, "profile": "quick"}
    assert data[MIME] == payload
    assert data["text/plain"].startswith("toy.mean: held")
    page = as_html(make_claim(), judgement)
    assert "currentColor" in page
    assert "#fff" not in page
    assert "white" not in page


def test_a_statement_with_markup_is_escaped(make_claim):
    from dslib.suite.verdicts import judge

    claim = make_claim(statement="a < b & <script>")
    assert "<script>" not in as_html(claim, judge(claim, DOWN, None, "quick"))


def test_null_contrast_premise_and_history_stand_where_the_reader_stands(
    tmp_path, write_claims, claim_row, make_claim, capsys
):
    parts = {
        "null": {"statement": "a coin", "paired": True},
        "gate": {"statement": "one step is mastered", "op": ">", "threshold": 0.5, "on": "value"},
        "changed": ["2026-12-01: null, it was a die"],
        "registered": "before data",
        "kind": "structural",
    }
    write_claims(tmp_path / "claims.toml", [claim_row(**parts)])
    judgement = report("toy.mean", DOWN, null=np.array(DOWN) + 0.5, gate=torch.ones(3))
    line = capsys.readouterr().out
    assert "toy.mean (structural): held" in line
    assert "null −0.5 [" in line
    assert "claim − null −0.5 [−0.5, −0.5], premise 1 ·" in line
    page = as_html(make_claim(**parts), judgement)
    for text in ("claim − null", "one step is mastered", "2026-12-01: null", "before data", "structural"):
        assert text in page


def test_importing_the_suite_is_cheap():
    code = (
        "import sys; import dslib.suite; "
        "print([m for m in ('torch', 'numpy', 'scipy', 'papermill', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
