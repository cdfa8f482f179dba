"""Temperatures that give a policy the entropy of another."""

import math

import pytest
import torch

from dslib.evaluation import matched_temperature

LOGITS = torch.tensor([2.0, 0.5, -1.0, 0.0], dtype=torch.float64)


def entropy(temperature):
    p = (LOGITS / temperature).softmax(0)
    return float(-(p * p.log()).sum())


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
def test_the_temperature_that_made_an_entropy_is_found(temperature):
    assert matched_temperature(entropy, entropy(temperature), halvings=30) == pytest.approx(temperature)


def test_precision_and_calls_are_those_that_the_halvings_say():
    asked = []

    def counted(temperature):
        asked.append(temperature)
        return entropy(temperature)

    found = matched_temperature(counted, entropy(1.7), lowest=1.0, highest=8.0, halvings=10)
    assert len(asked) == 10
    assert asked[0] == 8.0**0.5
    assert abs(math.log(found / 1.7)) <= math.log(8.0) / 2**10


def test_a_bound_comes_out_where_nothing_between_will_do():
    assert matched_temperature(entropy, 10.0, lowest=1.0, highest=8.0, halvings=30) == pytest.approx(8.0)
    assert matched_temperature(entropy, 0.0, lowest=1.0, highest=8.0, halvings=30) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 1.0, "lowest": 0.0}, "lowest=0.0 and highest=8.0"),
        ({"target": 1.0, "lowest": 9.0}, "lowest=9.0 and highest=8.0"),
        ({"target": 1.0, "halvings": 0}, "halvings=0 must be at least 1"),
        ({"target": math.nan}, "target is nan"),
    ],
)
def test_what_cannot_be_searched_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        matched_temperature(entropy, **options)


def test_an_entropy_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match=r"entropy\(1.0\) is nan"):
        matched_temperature(lambda temperature: math.nan, 1.0)
