"""From raw samples to an interval and a verdict: pure functions, the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dslib.suite.claims import PROFILES, Claim, ClaimError

# How many samples an interval needs before a verdict may rest on it.
MINIMUM_SAMPLES = {"smoke": 2, "quick": 5, "full": 8}
BOOTSTRAP_RESAMPLES = 4000
CONFIDENCE = 0.95

Samples = tuple[float, ...] | tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Judgement:
    """What a claim's samples say.

    ``measured`` is the mean (of the differences, for pairs); ``ci`` its 95 % interval, None for
    ``on = "value"`` and for a single sample; ``n`` the number of samples, of seeds where there
    are seeds × problems. ``verdict`` is one of held, contradicted, inconclusive, did not
    reproduce, not judged; ``ok`` says whether the suite passes with it.
    """

    id: str
    measured: float
    ci: tuple[float, float] | None
    smallest: float
    largest: float
    n: int
    null_measured: float | None
    null_ci: tuple[float, float] | None
    verdict: str
    reason: str
    profile: str
    unexpected: bool = False
    open_question: bool = False

    @property
    def ok(self) -> bool:
        return is_well(self.verdict, self.unexpected, self.open_question)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _ipython_display_(self) -> None:
        """Nothing: ``report`` has shown the row, and a cell that ends with it would show it twice."""


@dataclass(frozen=True)
class _Summary:
    measured: float
    ci: tuple[float, float] | None
    smallest: float
    largest: float
    n: int
    broken: int  # samples that break the rule by themselves
    values: int


def judge(claim: Claim, samples: Samples, null: Samples | None, profile: str) -> Judgement:
    """Judge ``samples`` (and the null's) by the claim's rule, at ``profile``.

    Below the claim's profile the numbers are computed and the verdict is "not judged".
    Raises ClaimError on samples of the wrong shape, too few or not finite, on a null that is
    missing or not registered, and on an unknown profile.
    """
    if profile not in PROFILES:
        raise ClaimError(f"claim {claim.id!r}: profile={profile!r} is none of {', '.join(PROFILES)}")
    if claim.null is None and null is not None:
        raise ClaimError(
            f"claim {claim.id!r}: null samples came, but the claim registers no null; "
            "add [claim.null] to claims.toml or leave null out"
        )
    if claim.null is not None and null is None:
        raise ClaimError(
            f"claim {claim.id!r}: null samples are missing; report(..., null=...) takes the measurement of "
            f"its null, {claim.null.statement!r}"
        )
    own = _summarise(claim, samples, profile, "samples")
    other = None if null is None else _summarise(claim, null, profile, "null")
    verdict, reason, unexpected = _verdict(claim, own, other, profile)
    return Judgement(
        id=claim.id,
        measured=own.measured,
        ci=own.ci,
        smallest=own.smallest,
        largest=own.largest,
        n=own.n,
        null_measured=None if other is None else other.measured,
        null_ci=None if other is None else other.ci,
        verdict=verdict,
        reason=reason,
        profile=profile,
        unexpected=unexpected,
        open_question=claim.expected == "inconclusive",
    )


def row_ok(row: Mapping[str, Any]) -> bool:
    """Whether the suite passes with this row of the scoreboard."""
    return is_well(row["verdict"], row["unexpected"], row.get("open_question", False))


def is_well(verdict: str | None, unexpected: bool, open_question: bool) -> bool:
    """Whether the suite passes with this verdict. An inconclusive one is well only where the claim is
    registered as an open question: its interval may reach over the threshold on this machine or that."""
    well = {"held", "did not reproduce", "not judged"} | ({"inconclusive"} if open_question else set())
    return verdict in well and not unexpected


def student_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's t 95 % interval of the mean; None for a single value."""
    if len(values) < 2:
        return None
    if min(values) == max(values):
        # Rounding in the mean would widen what has no spread at all.
        return (values[0], values[0])
    from scipy.special import stdtrit

    n = len(values)
    mean = math.fsum(values) / n
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = float(stdtrit(n - 1, 0.5 + CONFIDENCE / 2)) * spread / math.sqrt(n)
    return (mean - half, mean + half)


def bootstrap_interval(table: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float]:
    """Percentile 95 % interval of the mean of a seeds × problems table.

    Seeds and problems are both drawn with replacement, so that neither a lucky seed nor an
    easy problem counts as many. The generator is seeded: the same table, the same interval.
    """
    import numpy as np

    values = np.asarray(table, dtype=np.float64)
    if values.min() == values.max():
        return (float(values.flat[0]), float(values.flat[0]))
    seeds, problems = values.shape
    generator = np.random.default_rng(seed)
    rows = generator.multinomial(seeds, np.full(seeds, 1 / seeds), size=BOOTSTRAP_RESAMPLES)
    columns = generator.multinomial(problems, np.full(problems, 1 / problems), size=BOOTSTRAP_RESAMPLES)
    means = np.einsum("bp,bp->b", rows @ values, columns) / (seeds * problems)
    low, high = np.quantile(means, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return (float(low), float(high))


def _summarise(claim: Claim, samples: Any, profile: str, name: str) -> _Summary:
    table = _checked(claim, samples, profile, name)
    if claim.samples == "seeds":
        values = list(table)
    elif claim.samples == "pairs":
        values = [first - second for first, second in table]
    else:
        values = [value for row in table for value in row]
    if claim.on == "value":
        interval = None
    elif claim.samples == "problems":
        interval = bootstrap_interval(table) if len(table) > 1 else None
    else:
        interval = student_interval(values)
    same = min(values) == max(values)
    return _Summary(
        measured=values[0] if same else math.fsum(values) / len(values),
        ci=interval,
        smallest=min(values),
        largest=max(values),
        n=len(table),
        broken=sum(not _satisfies(claim, value, value) for value in values),
        values=len(values),
    )


def _checked(claim: Claim, samples: Any, profile: str, name: str) -> list[Any]:
    """The samples as floats of the registered shape, or a ClaimError that says what came."""

    def refuse(came: str, needed: str) -> ClaimError:
        return ClaimError(f"claim {claim.id!r}: {name} {came}; {needed}")

    shapes = {
        "seeds": "report one number a seed, shape (n,)",
        "pairs": "report pairs, shape (n, 2); the difference first − second is judged",
        "problems": "report one row a seed and one column a problem, shape (seeds, problems)",
    }
    needed = shapes[claim.samples]
    if not isinstance(samples, (list, tuple)):
        raise refuse(f"is {type(samples).__name__} {samples!r:.60}", needed)
    if len(samples) == 0:
        raise refuse("is empty", needed)
    nested = [isinstance(row, (list, tuple)) for row in samples]
    if claim.samples == "seeds":
        if any(nested):
            raise refuse(f"holds rows, first {samples[nested.index(True)]!r:.60}", needed)
        table: list[Any] = [_number(claim, value, f"{name}[{i}]") for i, value in enumerate(samples)]
    else:
        if not all(nested):
            raise refuse(f"holds single numbers, first {samples[nested.index(False)]!r:.60}", needed)
        widths = sorted({len(row) for row in samples})
        if len(widths) > 1:
            raise refuse(f"has rows of {widths[0]} and of {widths[-1]} numbers", f"{needed}, without gaps")
        if claim.samples == "pairs" and widths != [2]:
            raise refuse(f"has rows of {widths[0]}", needed)
        if widths == [0]:
            raise refuse("has empty rows", needed)
        table = [
            tuple(_number(claim, value, f"{name}[{i}][{j}]") for j, value in enumerate(row))
            for i, row in enumerate(samples)
        ]
    if claim.on == "interval" and claim.judged_at(profile):
        minimum = MINIMUM_SAMPLES[profile]
        unit = "seeds" if claim.samples == "problems" else claim.samples
        if len(table) < minimum:
            raise refuse(
                f"has {len(table)} of the {minimum} {unit} that an interval needs at profile {profile!r}",
                f"report at least {minimum}",
            )
    return table


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


def _satisfies(claim: Claim, low: float, high: float) -> bool:
    if isinstance(claim.threshold, tuple):
        return claim.threshold[0] <= low and high <= claim.threshold[1]
    return low > claim.threshold if claim.op == ">" else high < claim.threshold


def _violates(claim: Claim, low: float, high: float) -> bool:
    """Whether no point between ``low`` and ``high`` satisfies the rule."""
    if isinstance(claim.threshold, tuple):
        return high < claim.threshold[0] or low > claim.threshold[1]
    return high <= claim.threshold if claim.op == ">" else low >= claim.threshold


def _raw_verdict(claim: Claim, summary: _Summary) -> tuple[str, str]:
    if claim.on == "value":
        if summary.broken:
            return "contradicted", f"{summary.broken} of {summary.values} values break the rule"
        return "held", f"all {summary.values} values satisfy the rule"
    if summary.ci is None:
        return "inconclusive", "one sample makes no interval"
    if _satisfies(claim, *summary.ci):
        return "held", "the whole interval satisfies the rule"
    if _violates(claim, *summary.ci):
        return "contradicted", "the whole interval breaks the rule"
    return "inconclusive", "the interval reaches over the threshold"


def _verdict(claim: Claim, own: _Summary, null: _Summary | None, profile: str) -> tuple[str, str, bool]:
    if not claim.judged_at(profile):
        return "not judged", f"judged at profile {claim.profile} and larger, not at {profile}", False
    verdict, reason = _raw_verdict(claim, own)
    if verdict == "held" and null is not None and _raw_verdict(claim, null)[0] == "held":
        verdict, reason = "inconclusive", "its null passes too"
    if claim.expected is None or (claim.expected == "inconclusive" and verdict != "inconclusive"):
        return verdict, reason, False
    if claim.expected == "inconclusive":
        return verdict, f"{claim.reason} ({reason})", False
    if verdict == "held":
        return verdict, "registered as 'did not reproduce', but it held: update the claim", True
    return "did not reproduce", f"{claim.reason} ({reason})", False
