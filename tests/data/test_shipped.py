"""What ships: claims that parse, measurements that say how they were made."""

from pathlib import Path

import pytest

from dslib import data, measurements
from dslib.suite.claims import load_claims

SHIPPED = sorted((Path(data.__file__).parent / "measurements").glob("*.csv"))


def test_claims_parse_and_name_notebooks_that_exist():
    notebooks = Path(data.__file__).resolve().parent.parent / "notebooks"
    for claim in load_claims().values():
        assert (notebooks / f"{claim.notebook}.ipynb").is_file(), claim.id


def test_missing_file_is_an_error_that_names_what_is_there():
    with pytest.raises(FileNotFoundError, match=r"claims\.toml"):
        data.path("clams.toml")


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_shipped_row_has_the_command_that_made_it(file):
    rows = measurements.read(file.stem)
    assert len(rows)
    assert rows["command"].str.fullmatch(r"dslib run \d\d --profile full --param .+").all()
    assert rows["date"].str.fullmatch(r"\d{4}-\d\d-\d\d").all()
    assert rows["corpus"].str.fullmatch(r"[0-9a-f]{12}").all()
    assert rows["source"].str.fullmatch(r"[0-9a-f]{12}").all()


def test_shipped_models_have_the_sizes_that_their_names_say():
    rows = measurements.read("muon")
    assert (rows["model"] == rows["d_model"].astype(str) + " × " + rows["layers"].astype(str)).all()
    assert rows["model"].nunique() == 3
    assert not rows.duplicated(["model", "kind", "arm", "share", "lr", "rest_lr", "momentum", "seed"]).any()


def test_every_shipped_search_is_bracketed():
    from dslib.models import optimizer_study as study

    rows = measurements.read("muon")
    for _, part in rows[rows.kind == "search"].groupby(["model", "arm"]):
        study.best_settings(part)


def test_search_and_comparison_share_no_seed():
    rows = measurements.read("muon")
    assert not set(rows[rows.kind == "search"].seed) & set(rows[rows.kind == "final"].seed)
