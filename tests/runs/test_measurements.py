"""Measurements are written whole, with their provenance, or not at all."""

import pandas as pd
import pytest

from dslib import data
from dslib.runs import measurements


@pytest.fixture
def tree(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(data, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(data, "path", lambda name: tmp_path / name)
    return tmp_path


def test_rows_read_back_with_what_made_them(tree):
    rows = pd.DataFrame({"arm": ["a", "b"], "loss": [0.1 + 0.2, 2.0]})
    measurements.write("toy", rows, command="dslib run 99", corpus="abc")
    back = measurements.read("toy")
    assert back["loss"].tolist() == [0.1 + 0.2, 2.0]
    assert set(measurements.PROVENANCE) <= set(back.columns)
    assert back["command"].unique() == ["dslib run 99"]
    assert [file.name for file in (tree / "measurements").iterdir()] == ["toy.csv"]


def test_only_what_was_measured_anew_is_replaced_and_the_rest_keeps_its_provenance(tree):
    both = pd.DataFrame({"model": ["a", "b"], "loss": [1.0, 2.0]})
    measurements.write("toy", both, command="first")
    measurements.write(
        "toy", pd.DataFrame({"model": ["b"], "loss": [3.0]}), command="second", replacing="model"
    )
    back = measurements.read("toy")
    assert back[["model", "loss", "command"]].to_numpy().tolist() == [
        ["a", 1.0, "first"],
        ["b", 3.0, "second"],
    ]


@pytest.mark.parametrize(
    ("rows", "words"),
    [(pd.DataFrame({"loss": []}), "empty"), (pd.DataFrame({"loss": [1.0, float("nan")]}), "NaN in loss")],
)
def test_nothing_and_nan_are_never_shipped(tree, rows, words):
    with pytest.raises(ValueError, match=words):
        measurements.write("toy", rows, command="x")
    assert not (tree / "measurements" / "toy.csv").exists()


def test_row_without_its_command_is_refused(tree):
    (tree / "measurements").mkdir()
    (tree / "measurements" / "toy.csv").write_text("loss\n1.0\n")
    with pytest.raises(ValueError, match="command"):
        measurements.read("toy")


def test_one_row_without_its_command_is_refused_too(tree):
    measurements.write("toy", pd.DataFrame({"loss": [1.0, 2.0]}), command="x")
    file = tree / "measurements" / "toy.csv"
    lines = file.read_text().splitlines()
    lines[-1] = lines[-1].replace(",x,", ",,", 1)
    file.write_text("\n".join(lines))
    with pytest.raises(ValueError, match="command"):
        measurements.read("toy")
