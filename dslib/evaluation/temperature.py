"""The temperature at which one policy is as uncertain as another, so that the two can be compared at equal entropy."""

from __future__ import annotations

import math
from collections.abc import Callable


def matched_temperature(
    entropy: Callable[[float], float],
    target: float,
    lowest: float = 1 / 8,
    highest: float = 8.0,
    halvings: int = 12,
) -> float:
    """The temperature T at which ``entropy(T)`` is ``target``, by bisection of log T between two bounds.

    ``entropy``: rising in the temperature, in the unit of ``target``, nats a token or an answer; it is called
    ``halvings`` times, after which T is known to a factor of (highest/lowest)^(2^−halvings). A bound comes out, to
    that precision, where no temperature between them will do. arXiv:2504.13837 (§4.4) compares a model after RL with
    its base this way.

    Raises ValueError for bounds that are not 0 < lowest < highest, for fewer than one halving, and for a target or an
    entropy that is NaN.
    """
    if not 0 < lowest < highest < math.inf:
        raise ValueError(f"lowest={lowest} and highest={highest} must be finite, positive and rise")
    if halvings < 1:
        raise ValueError(f"halvings={halvings} must be at least 1")
    if math.isnan(target):
        raise ValueError("target is nan; give an entropy")
    low, high = lowest, highest
    for _ in range(halvings):
        middle = (low * high) ** 0.5
        found = entropy(middle)
        if math.isnan(found):
            raise ValueError(f"entropy({middle}) is nan; there is nothing to compare with target={target}")
        low, high = (middle, high) if found < target else (low, middle)
    return (low * high) ** 0.5
