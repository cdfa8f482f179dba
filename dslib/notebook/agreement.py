"""Whether what was measured here and now agrees with what ships; a disagreement fails the run."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from dslib.notebook.badges import ATTRIBUTE
from dslib.notebook.environment import show

BY = ("difference", "ratio", "order")
ROWS = 12  # a longer table is no check that somebody reads: the worst of them are shown


class Disagreement(AssertionError):
    """What was measured live is not what ships. ``what`` names the quantity."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(message)
        self.what = what


def agrees(
    what: str,
    live: Any,
    shipped: Any,
    tolerance: float,
    *,
    by: str = "difference",
    effect: float | None = None,
) -> None:
    """Compare numbers measured now with the shipped table's, show both, and fail where they disagree.

    ``live`` and ``shipped`` are two numbers, or as many: dictionaries, series or frames, paired by their
    labels, or arrays of the same shape. They agree when each pair is at most ``tolerance`` apart:
    ``by="difference"``, |live − shipped|; ``by="ratio"``, |live / shipped − 1|; ``by="order"``: two whose shipped
    values lie more than ``tolerance`` apart stand in the same order live. ``effect`` is the smallest
    effect that is judged on the table, in the tolerance's unit: the tolerance has to be smaller.

    Raises Disagreement, naming quantity, numbers and tolerance; ValueError for a tolerance that is not above
    0 or not below ``effect``, nothing to compare, values that are not finite, and labels or shapes that differ.
    """
    if by not in BY:
        raise ValueError(f"by={by!r} is unknown; use one of {', '.join(map(repr, BY))}")
    if not (math.isfinite(tolerance) and tolerance > 0):
        raise ValueError(f"tolerance={tolerance!r} must be above 0; give the largest {by} that still agrees")
    if effect is not None and not tolerance < effect:
        raise ValueError(
            f"tolerance={tolerance:g} is not smaller than the effect of {effect:g} that the table is used to "
            "judge: the table could be wrong by the whole effect and still agree"
        )
    now, then = _numbers("live", live), _numbers("shipped", shipped)
    _same_labels(what, now, then)
    if by == "order":
        _compare_order(what, now, then, tolerance, shipped)
        return
    if by == "ratio" and (zero := [label for label, value in then.items() if value == 0]):
        raise ValueError(f"shipped is 0{_at(zero[0])}, which has no ratio; use by='difference'")
    apart = {
        label: value / then[label] - 1 if by == "ratio" else value - then[label]
        for label, value in now.items()
    }
    worst = max(apart, key=lambda label: abs(apart[label]))
    agreed = abs(apart[worst]) <= tolerance
    _show(what, now, then, apart, tolerance, by, agreed)
    if not agreed:
        off = sum(abs(value) > tolerance for value in apart.values())
        count = f" ({off} of {len(apart)} numbers are off; this is the worst)" if len(apart) > 1 else ""
        raise Disagreement(
            what,
            f"{what}{_at(worst)}: live {_short(now[worst])}, shipped {_short(then[worst])}; "
            f"{_name(by)} {_amount(apart[worst], by)}, tolerance {_amount(tolerance, by, False)}{count}. "
            f"{_reasons(shipped)}",
        )


def _compare_order(
    what: str, now: Mapping[Any, float], then: Mapping[Any, float], tolerance: float, shipped: Any
) -> None:
    if len(now) < 2:
        raise ValueError(f"{what}: one number has no order; give two, or compare by 'difference'")
    told = " > ".join(f"{_label(each)} {_short(now[each])}" for each in sorted(now, key=lambda k: -now[k]))
    wrong = [
        (one, other)
        for one, other in combinations(now, 2)
        if abs(then[one] - then[other]) > tolerance
        and (then[one] - then[other]) * (now[one] - now[other]) <= 0
    ]
    if not wrong:
        show(
            f"✓ {what}, live: {told}; the same order as shipped (ties below {tolerance:g}).",
            markdown=f"✓ {what}, live: {told}; the same order as shipped (ties below {tolerance:g}).",
        )
        return
    one, other = max(wrong, key=lambda pair: abs(then[pair[0]] - then[pair[1]]))
    raise Disagreement(
        what,
        f"{what}: live {_label(one)} {_short(now[one])} and {_label(other)} {_short(now[other])}, "
        f"shipped {_short(then[one])} and {_short(then[other])}; the order differs, tolerance {tolerance:g}. "
        f"{_reasons(shipped)}",
    )


def _numbers(name: str, values: Any) -> dict[Any, float]:
    if hasattr(values, "columns"):
        values = values.stack()
    if hasattr(values, "index") and hasattr(values, "items") and not isinstance(values, Mapping):
        if not values.index.is_unique:
            twice = values.index[values.index.duplicated()][0]
            raise ValueError(f"{name} has {_label(twice)} twice; compare means, or add the seed to the index")
        values = dict(values.items())
    if not isinstance(values, Mapping):
        values = _flat(values.tolist() if hasattr(values, "tolist") else values)
    found: dict[Any, float] = {}
    for label, value in values.items():
        try:
            found[label] = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}{_at(label)} is {value!r}, no number") from error
        if not math.isfinite(found[label]):
            raise ValueError(f"{name}{_at(label)} is {found[label]}; it was not measured")
    if not found:
        raise ValueError(f"{name} is empty: there is nothing to compare")
    return found


def _flat(values: Any, place: tuple[int, ...] = ()) -> dict[Any, Any]:
    if not isinstance(values, (list, tuple)):
        return {place: values}
    return {key: each for i, part in enumerate(values) for key, each in _flat(part, (*place, i)).items()}


def _same_labels(what: str, now: Mapping[Any, float], then: Mapping[Any, float]) -> None:
    for name, other, lacking in (
        ("live", "shipped", now.keys() - then),
        ("shipped", "live", then.keys() - now),
    ):
        if lacking:
            first = _label(sorted(lacking, key=str)[0])
            raise ValueError(
                f"{what}: {name} has {len(lacking)} numbers that {other} lacks, {first or 'a single one'} "
                f"among them; give both the same labels or shape ({len(now)} live, {len(then)} shipped)"
            )


def _show(
    what: str,
    now: Mapping[Any, float],
    then: Mapping[Any, float],
    apart: Mapping[Any, float],
    tolerance: float,
    by: str,
    agreed: bool,
) -> None:
    mark, word = ("✓", "agree") if agreed else ("✗", "disagree")
    allowed = f"allowed: {_amount(tolerance, by, False)}"
    if len(now) == 1:
        ((label, value),) = now.items()
        line = f"{mark} {what}{_at(label)}: live {_short(value)}, shipped {_short(then[label])}, "
        line += f"{_name(by)} {_amount(apart[label], by)} ({allowed})."
        show(line, markdown=line)
        return
    import pandas

    from dslib.notebook.tables import show_table

    worst = sorted(apart, key=lambda label: -abs(apart[label]))[:ROWS]
    rows = [
        [_label(label), _short(now[label]), _short(then[label]), _amount(apart[label], by)]
        for label in apart
        if label in worst
    ]
    frame = pandas.DataFrame(rows, columns=["", "live", "shipped", _name(by)])
    kept = f"; the worst {ROWS} of {len(apart)}" if len(apart) > ROWS else ""
    show_table(frame, f"{mark} {what}: live and shipped {word} ({allowed}{kept})")


def _reasons(shipped: Any) -> str:
    known = getattr(shipped, "attrs", {}).get(ATTRIBUTE, {})
    made = ""
    if known.get("origin") == "shipped":
        versions = f"Python {', '.join(known['python'])}, torch {', '.join(known['torch'])}"
        made = f" {known['table']}.csv was made with {versions} by: {'; '.join(known['command'])}."
    return (
        "Either the code has changed since the table was made (make it anew), or it was made with other versions, "
        "or of another corpus: the standard library, the default text, differs from one Python to the next "
        f"(here Python {platform.python_version()}).{made}"
    )


def _name(by: str) -> str:
    return "live / shipped − 1" if by == "ratio" else "difference"


def _amount(value: float, by: str, signed: bool = True) -> str:
    sign = "+" if signed else ""
    return (f"{value:{sign}.3%}" if by == "ratio" else f"{value:{sign}.4g}").replace("-", "−")


def _short(value: float) -> str:
    return f"{value:.6g}".replace("-", "−")


def _label(label: Any) -> str:
    return ", ".join(map(str, label)) if isinstance(label, tuple) else str(label)


def _at(label: Any) -> str:
    return f" ({_label(label)})" if _label(label) else ""
