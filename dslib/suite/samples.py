"""What a notebook reports, checked at the door: shape, finite numbers, and enough of them."""

from __future__ import annotations

import math
from typing import Any

from dslib.suite.claims import Claim, ClaimError, Rule

# How many samples an interval needs before a verdict may rest on it.
MINIMUM_SAMPLES = {"smoke": 2, "quick": 5, "full": 8}

SHAPES = {
    "seeds": "report one number a seed, shape (n,)",
    "pairs": "report pairs, shape (n, 2); the difference first − second is judged",
    "problems": "report one row a seed and one column a problem, shape (seeds, problems)",
}


def checked(claim: Claim, rule: Rule, samples: Any, profile: str, name: str) -> list[Any]:
    """The samples as floats of the shape that ``rule`` registers: a list of numbers, or of tuples.

    ``rule`` is the claim itself, or its gate; ``name`` is what the message calls the samples. Raises
    ClaimError, naming the claim, that says what came and what would do.
    """

    def refuse(came: str, needed: str) -> ClaimError:
        return ClaimError(f"claim {claim.id!r}: {name} {came}; {needed}")

    needed = SHAPES[rule.samples]
    if not isinstance(samples, (list, tuple)):
        raise refuse(f"is {type(samples).__name__} {samples!r:.60}", needed)
    if len(samples) == 0:
        raise refuse("is empty", needed)
    nested = [isinstance(row, (list, tuple)) for row in samples]
    if rule.samples == "seeds":
        if any(nested):
            raise refuse(f"holds rows, first {samples[nested.index(True)]!r:.60}", needed)
        table: list[Any] = [_number(claim, value, f"{name}[{i}]") for i, value in enumerate(samples)]
    else:
        if not all(nested):
            raise refuse(f"holds single numbers, first {samples[nested.index(False)]!r:.60}", needed)
        widths = sorted({len(row) for row in samples})
        if len(widths) > 1:
            raise refuse(f"has rows of {widths[0]} and of {widths[-1]} numbers", f"{needed}, without gaps")
        if rule.samples == "pairs" and widths != [2]:
            raise refuse(f"has rows of {widths[0]}", needed)
        if widths == [0]:
            raise refuse("has empty rows", needed)
        table = [
            tuple(_number(claim, value, f"{name}[{i}][{j}]") for j, value in enumerate(row))
            for i, row in enumerate(samples)
        ]
    if rule.on == "interval" and claim.judged_at(profile):
        minimum = MINIMUM_SAMPLES[profile]
        unit = "seeds" if rule.samples == "problems" else rule.samples
        if len(table) < minimum:
            raise refuse(
                f"has {len(table)} of the {minimum} {unit} that an interval needs at profile {profile!r}",
                f"report at least {minimum}",
            )
    return table


def differences(claim: Claim, samples: list[Any], null: list[Any]) -> list[Any]:
    """Claim minus paired null, entry by entry, in the shape of both. Raises ClaimError on unequal shapes."""
    shapes = [_shape(table) for table in (samples, null)]
    if shapes[0] != shapes[1]:
        raise ClaimError(
            f"claim {claim.id!r}: null has shape {shapes[1]} and samples {shapes[0]}; a paired null takes one "
            "sample for each of the claim's, of the same seed and in the same order, or paired = false"
        )
    pairs = zip(samples, null, strict=True)
    if claim.samples == "seeds":
        return [ours - theirs for ours, theirs in pairs]
    return [tuple(a - b for a, b in zip(ours, theirs, strict=True)) for ours, theirs in pairs]


def _shape(table: list[Any]) -> tuple[int, ...]:
    return (len(table), len(table[0])) if isinstance(table[0], tuple) else (len(table),)


def _number(claim: Claim, value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ClaimError(
            f"claim {claim.id!r}: {where} is {type(value).__name__} {value!r:.60}; report finite numbers only"
        )
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an integer beyond what a float can hold
        finite = False
    if not finite:
        raise ClaimError(
            f"claim {claim.id!r}: {where} is {value!s:.60}; report finite numbers only, and let a run that "
            "diverged fail instead of reporting it"
        )
    return float(value)
