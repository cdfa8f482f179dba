"""Badges: whether a figure or a table shows what was measured here and now, or what ships."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dslib.notebook.style import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

#: Under this key of ``DataFrame.attrs`` a table of :func:`dslib.notebook.shipped` says where it comes from.
ATTRIBUTE = "dslib"
#: What a badge that is written out may begin with. "formula" is a curve in which no run has a part.
WORDS = ("live", "shipped", "formula", "paper")

_LABEL = "dslib badge"
_BETWEEN = " · "
_POINTS = 7.5
_WIDTH = 0.58  # of a letter of DejaVu Sans, as a share of its size: an upper estimate of the average

#: Where numbers come from: text, a table that knows it, or one of both for each part of a figure.
Origin = Any


def badge(figure: FigureBase | Axes, origin: Origin) -> None:
    """Write in a small frame at the bottom right, below the axes, where a figure's numbers come from.

    ``origin`` is ``"live"``; or a table of :func:`dslib.notebook.shipped`, or a part of one, which know it
    and their seeds (``shipped, 8 seeds``); or, for a mixed figure, a dictionary of its parts:
    ``{"lines": table, "dots": "live"}``. ``figure`` is a matplotlib figure or one of its axes. A second badge
    replaces the first. The layout keeps the place free, so call it when the panels stand.

    Raises TypeError for no figure, and what :func:`badge_text` raises.
    """
    text = badge_text(origin)
    root = _root(figure)
    for old in [each for each in root.texts if each.get_label() == _LABEL]:
        old.remove()
    columns = max(12, int(root.get_figwidth() * 72 / (_POINTS * _WIDTH)))
    lines = _lines(text, columns)
    height = (len(lines) * 1.25 + 1.1) * _POINTS / 72 / root.get_figheight()
    if (engine := root.get_layout_engine()) is not None and "rect" in engine.get():
        engine.set(rect=(0, height, 1, 1 - height))
        place = {"y": 0.35 * _POINTS / 72 / root.get_figheight(), "va": "bottom"}
    else:  # nothing can be kept free inside; the inline backend grows a figure by what stands below it
        place = {"y": 0, "va": "top"}
    root.text(
        1 - 0.5 * _POINTS / 72 / root.get_figwidth(),
        s="\n".join(lines),
        ha="right",
        multialignment="right",
        fontsize=_POINTS,
        color=INK,
        label=_LABEL,
        bbox={"boxstyle": "round,pad=0.3", "facecolor": "none", "edgecolor": INK, "linewidth": 0.5},
        **place,
    )


def badge_text(origin: Origin) -> str:
    """The words of a badge: ``"shipped, 8 seeds"``, ``"lines: shipped, 8 seeds · dots: live"``.

    The seeds are those in the frame's column or index level ``seed``; where it has none (a mean), those of
    the whole table. Raises ValueError for text that begins with none of :data:`WORDS`, an empty dictionary
    and a frame that does not know where it comes from; TypeError for anything else.
    """
    if isinstance(origin, Mapping):
        if not origin:
            raise ValueError("origin={} names no part; give {'lines': table, 'dots': 'live'}")
        return _BETWEEN.join(f"{part}: {badge_text(source)}" for part, source in origin.items())
    if isinstance(origin, str):
        if not origin.replace(",", " ").split() or origin.replace(",", " ").split()[0] not in WORDS:
            raise ValueError(f"origin={origin!r} says not where numbers come from; begin with {_any(WORDS)}")
        return origin
    if not hasattr(origin, "attrs"):
        raise TypeError(f"origin is a {type(origin).__name__}; give text, a table, or a dictionary of both")
    known = origin.attrs.get(ATTRIBUTE)
    if known is None:
        raise ValueError(
            "origin is a frame that does not know where its rows come from (built anew, or merged from two); "
            "give the table that nb.shipped returned, or text such as 'live'"
        )
    count = _seeds(origin, known)
    return known["origin"] + (f", {count} seed{'s' * (count != 1)}" if count else "")


def _seeds(frame: Any, known: Mapping[str, Any]) -> int:
    # A mean over seeds may keep a column of mean seeds; only whole numbers that the table has are seeds.
    if "seed" in getattr(frame, "columns", ()):
        seeds = frame["seed"]
    elif "seed" in frame.index.names:
        seeds = frame.index.get_level_values("seed")
    else:
        return int(known["count"])
    found = set(seeds.tolist())
    return len(found) if seeds.dtype.kind in "iu" and found <= set(known["seeds"]) else int(known["count"])


def _lines(text: str, columns: int) -> list[str]:
    """Broken between the parts of a figure, and inside one only where it is wider by itself."""
    lines: list[str] = []
    for part in text.split(_BETWEEN):
        if lines and len(lines[-1]) + len(_BETWEEN) + len(part) <= columns:
            lines[-1] += _BETWEEN + part
        else:
            lines += textwrap.wrap(part, columns, break_long_words=False)
    return lines


def _root(figure: Any) -> Any:
    while hasattr(figure, "figure") and figure.figure is not figure:  # axes, and figures inside figures
        figure = figure.figure
    if not hasattr(figure, "get_layout_engine"):
        raise TypeError(f"figure is a {type(figure).__name__}; give a matplotlib figure or one of its axes")
    return figure


def _any(words: tuple[str, ...]) -> str:
    return ", ".join(map(repr, words[:-1])) + f" or {words[-1]!r}"
