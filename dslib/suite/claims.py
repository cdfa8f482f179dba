"""Claims are data: what a paper says, how we measure it, and when it counts as held.

``data/claims.toml`` holds one ``[[claim]]`` table for each. A claim is written before its
first run; notebooks report raw samples and never verdicts.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    StrictBool,
    StrictFloat,
    StrictInt,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from dslib.runs.profiles import PROFILES, Profile

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Number = StrictInt | StrictFloat


class ClaimError(ValueError):
    """A claim, or the samples reported for it, cannot be used; the message names the claim."""


class Rule(BaseModel):
    """What samples must satisfy: every value, or the 95 % interval of their mean.

    ``samples`` says what a notebook reports: ``"seeds"`` (n,), ``"pairs"`` (n, 2) judged by
    their difference first − second, ``"problems"`` (seeds, problems). ``on = "interval"``
    judges the interval, ``on = "value"`` every sample by itself.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: Literal["seeds", "pairs", "problems"]
    op: Literal[">", "<", "within"]
    threshold: Number | tuple[Number, Number]
    on: Literal["interval", "value"]

    @model_validator(mode="after")
    def _threshold_suits_op(self) -> Self:
        bounds = self.threshold if isinstance(self.threshold, tuple) else (self.threshold,)
        if not all(math.isfinite(bound) for bound in bounds):
            raise ValueError(f"threshold={self.threshold!r} is not finite")
        if self.op == "within":
            if not isinstance(self.threshold, tuple):
                raise ValueError(f"op='within' needs threshold=[low, high], not {self.threshold!r}")
            if not self.threshold[0] < self.threshold[1]:
                raise ValueError(f"threshold={list(self.threshold)} is no range: low must be below high")
        elif isinstance(self.threshold, tuple):
            raise ValueError(f"op={self.op!r} needs one number as threshold, not {list(self.threshold)}")
        return self

    @property
    def rule(self) -> str:
        """The rule in words: ``"interval < 0"``, ``"every value within [0.68, 1.21]"``."""
        subject = "interval" if self.on == "interval" else "every value"
        if isinstance(self.threshold, tuple):
            return f"{subject} within [{self.threshold[0]:g}, {self.threshold[1]:g}]"
        return f"{subject} {self.op} {self.threshold:g}"

    def satisfied_by(self, low: float, high: float) -> bool:
        """Whether every point from ``low`` to ``high`` satisfies the rule."""
        if isinstance(self.threshold, tuple):
            return self.threshold[0] <= low and high <= self.threshold[1]
        return low > self.threshold if self.op == ">" else high < self.threshold

    def broken_by(self, low: float, high: float) -> bool:
        """Whether no point from ``low`` to ``high`` satisfies the rule."""
        if isinstance(self.threshold, tuple):
            return high < self.threshold[0] or low > self.threshold[1]
        return high <= self.threshold if self.op == ">" else low >= self.threshold


class Null(BaseModel):
    """The same measurement with the thing that matters removed.

    ``paired``: sample i of the null is of the same seed (of the same seeds and problems, of the
    same case) as sample i of the claim, so that the two can be judged by their difference.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    statement: Text
    paired: StrictBool = False


class Gate(Rule):
    """The premise under which the effect could show at all; where it fails, nothing is judged."""

    statement: Text
    samples: Literal["seeds", "pairs", "problems"] = "seeds"


class Claim(Rule):
    """One row of ``claims.toml``; how its samples are judged is said at :class:`Rule`.

    ``kind = "structural"`` is an identity, a definition or a count restated: true by construction,
    judged by the same rule and shown apart. ``changed`` is the history of rule, statement and null
    after the first run; ``registered`` says whether the rule is older than the data.
    """

    id: Text
    kind: Literal["claim", "structural"] = "claim"
    notebook: Text
    statement: Text
    source: Text
    paper: Text
    quantity: Text
    unit: Annotated[str, StringConstraints(strip_whitespace=True)]  # empty for a plain number
    profile: Profile
    scale: Text
    expected: Literal["did not reproduce", "inconclusive", "premise unmet"] | None = None
    reason: Text | None = None
    registered: Literal["before data", "with data"] = "with data"
    changed: tuple[Text, ...] = ()
    null: Null | None = None
    gate: Gate | None = None

    @field_validator("id")
    @classmethod
    def _plain_id(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)+", value):
            raise ValueError("an id is lower-case words joined by dots, such as 'muon.n10_against_n5'")
        return value

    @field_validator("changed")
    @classmethod
    def _dated(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        for entry in entries:
            day, colon, text = entry.partition(": ")
            if not (colon and text.strip() and _is_date(day)):
                raise ValueError(f"{entry!r} is not of the form '2026-12-01: what, why'")
        return entries

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.expected and not self.reason:
            raise ValueError(f"expected={self.expected!r} needs a reason")
        if self.reason and not self.expected:
            raise ValueError("reason is given without expected, the verdict that it explains")
        if self.expected == "premise unmet" and self.gate is None:
            raise ValueError("expected='premise unmet' needs a premise: add [claim.gate]")
        return self

    def judged_at(self, profile: str) -> bool:
        """Whether ``profile`` is at least the profile at which this claim is judged."""
        return PROFILES.index(profile) >= PROFILES.index(self.profile)


def claims_file() -> Path:
    """The claims file in use: ``DSLIB_CLAIMS`` if set, else the one that ships with dslib."""
    if named := os.environ.get("DSLIB_CLAIMS"):
        return Path(named)
    from dslib import data

    return data.path("claims.toml")


def load_claims(path: str | Path | None = None) -> dict[str, Claim]:
    """Read the claims, in the file's order, by id.

    ``path=None`` reads ``claims_file()``. Raises ClaimError, naming the claim, on unknown or
    missing keys, ids used twice and rules that make no sense; FileNotFoundError without a file.
    """
    path = claims_file() if path is None else Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no claims file {path}; DSLIB_CLAIMS names another one")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ClaimError(f"{path} is not valid TOML: {error}") from None
    if unknown := sorted(content.keys() - {"claim"}):
        raise ClaimError(f"{path}: unknown top-level key {unknown[0]!r}; every claim is a [[claim]] table")
    rows = content.get("claim", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ClaimError(f"{path}: every claim is a [[claim]] table with two brackets")
    claims: dict[str, Claim] = {}
    for position, row in enumerate(rows, start=1):
        claim = _claim(row, position)
        if claim.id in claims:
            raise ClaimError(f"claim {claim.id!r} is registered twice in {path}; give one another id")
        claims[claim.id] = claim
    return claims


def nearest(name: str, names: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest of ``names``, or the list of what there is."""
    names = list(names)
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.5):
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(names)}" if names else "; there are none"


def _claim(row: dict[str, Any], position: int) -> Claim:
    try:
        return Claim.model_validate(row)
    except ValidationError as error:
        name = row.get("id")
        name = (
            f"claim {name!r}" if isinstance(name, str) and name else f"claim number {position}, without an id"
        )
        raise ClaimError(f"{name}: " + "; ".join(_problems(row, error))) from None


def _problems(row: dict[str, Any], error: ValidationError) -> list[str]:
    tables = {"null": Null, "gate": Gate}
    problems: list[str] = []
    for item in error.errors():
        table = item["loc"][0] if item["loc"] and item["loc"][0] in tables else None
        given = row[table] if table else row
        path = item["loc"][1:] if table else item["loc"]
        field = ".".join(map(str, filter(None, (table, *path[:1]))))
        value = given.get(path[0]) if path and isinstance(given, dict) else None
        if item["type"] == "extra_forbidden":
            known = (tables[table] if table else Claim).model_fields
            text = f"unknown key {field!r}{nearest(str(path[-1]), known)}"
        elif item["type"] == "missing":
            text = f"the key {field!r} is missing"
        elif path and path[0] == "threshold":
            text = f"{field}={value!r} is neither a number nor [low, high]"
        else:
            message = item["msg"].removeprefix("Value error, ")
            text = f"{field}={value!r}: {message}" if path else ": ".join(filter(None, (table, message)))
        if text not in problems:
            problems.append(text)
    return problems


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
