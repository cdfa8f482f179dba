"""How numbers and intervals are written, wherever a claim is shown."""

from __future__ import annotations

from collections.abc import Sequence


def number(value: float | None) -> str:
    """Four significant digits, and a true minus sign."""
    return "–" if value is None else f"{value:.4g}".replace("-", "−")


def interval(bounds: Sequence[float] | None) -> str:
    """``"[low, high]"``, or ``"–"`` for None."""
    return "–" if bounds is None else f"[{number(bounds[0])}, {number(bounds[1])}]"


def with_interval(mean: float | None, bounds: Sequence[float] | None) -> str:
    """``"mean [low, high]"``, the mean alone without an interval."""
    return number(mean) + ("" if bounds is None else f" {interval(bounds)}")
