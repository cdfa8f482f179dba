"""Live against shipped: what agrees is shown, what disagrees fails the run, what cannot be compared is refused."""

import math

import numpy as np
import pandas as pd
import pytest

from dslib import notebook as nb


def test_one_number_within_its_tolerance_is_one_line(capsys):
    nb.agrees("loss", 1.02, 1.0, 0.05)
    nb.agrees("loss", 1.02, 1.0, 0.05, by="ratio")
    first, second = capsys.readouterr().out.splitlines()
    assert first == "✓ loss: live 1.02, shipped 1, difference +0.02 (allowed: 0.05)."
    assert second == "✓ loss: live 1.02, shipped 1, live / shipped − 1 +2.000% (allowed: 5.000%)."


def test_the_tolerance_itself_still_agrees_and_beyond_it_does_not():
    nb.agrees("loss", 1.25, 1.0, 0.25)
    with pytest.raises(nb.Disagreement):
        nb.agrees("loss", 1.25, 1.0, 0.2499)


def test_a_small_number_far_off_by_ratio_is_near_by_difference():
    nb.agrees("entropy", 0.02, 0.01, 0.05)
    with pytest.raises(nb.Disagreement, match=r"\+100\.000%, tolerance 5\.000%"):
        nb.agrees("entropy", 0.02, 0.01, 0.05, by="ratio")


def test_labels_pair_numbers_whatever_their_order(capsys):
    live, shipped = pd.Series({"a": 1.0, "b": 2.0}), pd.Series({"b": 2.0, "a": 1.0})
    nb.agrees("loss", live, shipped, 0.001)
    assert capsys.readouterr().out.startswith("✓ loss: live and shipped agree (allowed: 0.001)\n")


def test_a_disagreement_names_the_worst_number_both_values_tolerance_and_reasons(capsys):
    live, shipped = {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 1.01, "b": 2.5, "c": 3.2}
    with pytest.raises(nb.Disagreement) as error:
        nb.agrees("loss", live, shipped, 0.1)
    message = str(error.value)
    assert message.startswith(
        "loss (b): live 2, shipped 2.5; difference −0.5, tolerance 0.1 (2 of 3 numbers are off; this is the worst)."
    )
    assert "the standard library, the default text, differs from one Python to the next" in message
    assert error.value.what == "loss"
    assert "✗ loss: live and shipped disagree" in capsys.readouterr().out, "the reader sees all numbers"


def test_a_table_that_knows_its_command_names_it():
    shipped = pd.Series({"a": 1.0})
    shipped.attrs["dslib"] = {
        "origin": "shipped",
        "table": "toy",
        "python": ["3.11.7"],
        "torch": ["2.13.0"],
        "command": ["dslib run 99"],
    }
    with pytest.raises(
        nb.Disagreement, match=r"toy\.csv was made with Python 3\.11\.7, torch 2\.13\.0 by: dslib"
    ):
        nb.agrees("loss", pd.Series({"a": 2.0}), shipped, 0.1)


def test_arrays_and_frames_of_the_same_shape_are_compared_number_by_number():
    import torch

    nb.agrees("loss", torch.ones(2, 3), np.ones((2, 3)), 0.1)
    frame = pd.DataFrame({"x": [1.0, 2.0]}, index=["a", "b"])
    with pytest.raises(nb.Disagreement, match=r"loss \(b, x\): live 3, shipped 2"):
        nb.agrees("loss", frame.replace(2.0, 3.0), frame, 0.5)


def test_a_long_comparison_shows_its_worst_rows(capsys):
    nb.agrees("loss", np.arange(100.0) / 1e3, np.zeros(100), 0.1)
    shown = capsys.readouterr().out.splitlines()
    assert "the worst 12 of 100" in shown[0]
    assert shown[2].split() == ["88", "0.088", "0", "+0.088"]
    assert len(shown) == 2 + 12


def test_order_ignores_ties_and_fails_where_two_that_differ_change_places(capsys):
    shipped = {"a": 1.0, "b": 1.01, "c": 2.0}
    nb.agrees("success", {"a": 5.0, "b": 4.0, "c": 9.0}, shipped, 0.1, by="order")
    assert capsys.readouterr().out.startswith("✓ success, live: c 9 > a 5 > b 4; the same order as shipped")
    with pytest.raises(nb.Disagreement, match="live a 5 and c 5, shipped 1 and 2; the order differs"):
        nb.agrees("success", {"a": 5.0, "b": 4.0, "c": 5.0}, shipped, 0.1, by="order")


@pytest.mark.parametrize(
    ("live", "shipped", "words"),
    [
        (math.nan, 1.0, "live is nan"),
        (1.0, math.inf, "shipped is inf"),
        ({"a": math.nan}, {"a": 1.0}, r"live \(a\) is nan"),
        ([], [], "live is empty"),
        (pd.Series(dtype=float), pd.Series(dtype=float), "empty"),
        ([1.0], [1.0, 2.0], "shipped has 1 numbers that live lacks, 1 among them"),
        (1.0, [1.0], "same labels or shape"),
        ({"a": 1.0}, {"b": 1.0}, "a among them"),
        (np.ones((2, 1)), np.ones((1, 2)), "same labels or shape"),
        ({"a": "x"}, {"a": 1.0}, "no number"),
        (None, 1.0, "live is None, no number"),
        (pd.Series([1, 2], index=["a", "a"]), {"a": 1}, "a twice"),
    ],
)
def test_what_cannot_be_compared_is_refused_and_is_no_disagreement(live, shipped, words):
    with pytest.raises(ValueError, match=words):
        nb.agrees("loss", live, shipped, 0.1)


@pytest.mark.parametrize("tolerance", [0, -0.1, math.nan, math.inf])
def test_a_tolerance_that_nothing_or_everything_meets_is_refused(tolerance):
    with pytest.raises(ValueError, match="must be above 0"):
        nb.agrees("loss", 1.0, 1.0, tolerance)


def test_a_tolerance_as_large_as_the_effect_judged_is_refused():
    nb.agrees("loss", 1.0, 1.0, 0.01, effect=0.02)
    with pytest.raises(ValueError, match=r"not smaller than the effect of 0\.02"):
        nb.agrees("loss", 1.0, 1.0, 0.02, effect=0.02)


def test_a_ratio_to_zero_one_numbers_order_and_an_unknown_measure_are_refused():
    with pytest.raises(ValueError, match=r"shipped is 0 \(a\)"):
        nb.agrees("loss", {"a": 1.0}, {"a": 0.0}, 0.1, by="ratio")
    with pytest.raises(ValueError, match="one number has no order"):
        nb.agrees("loss", 1.0, 1.0, 0.1, by="order")
    with pytest.raises(ValueError, match="'percent' is unknown"):
        nb.agrees("loss", 1.0, 1.0, 0.1, by="percent")
