"""From raw samples to an interval and a verdict: pure functions, the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dslib.suite.claims import PROFILES, Claim, ClaimError, Gate, Rule
from dslib.suite.formats import number, with_interval
from dslib.suite.samples import checked, differences

BOOTSTRAP_RESAMPLES = 4000
CONFIDENCE = 0.95

VERDICTS = (
    "held",
    "inconclusive",
    "did not reproduce",
    "contradicted",
    "premise unmet",
    "error",
    "not judged",
)
# The verdicts with which the suite passes, because ``expected`` registers them. An interval may reach
# over its threshold on this machine or that, also where the whole of it lay on the wrong side before.
EXCUSED = {
    None: frozenset(),
    "did not reproduce": frozenset({"did not reproduce", "inconclusive"}),
    "inconclusive": frozenset({"inconclusive"}),
    "premise unmet": frozenset({"premise unmet"}),
}

Samples = Sequence[float] | Sequence[Sequence[float]]


@dataclass(frozen=True)
class Judgement:
    """What a claim's samples say.

    ``measured`` is the mean (of the differences, for pairs); ``ci`` its 95 % interval, None for
    ``on = "value"`` and for a single sample; ``n`` the number of samples, of seeds where there
    are seeds × problems. ``contrast`` is the mean of claim − null where the two are paired,
    ``contrast_ci`` its interval. ``verdict`` is one of VERDICTS but "error"; ``expected`` is
    what the claim registers; ``ok`` says whether the suite passes.
    """

    id: str
    measured: float
    ci: tuple[float, float] | None
    smallest: float
    largest: float
    n: int
    null_measured: float | None
    null_ci: tuple[float, float] | None
    contrast: float | None
    contrast_ci: tuple[float, float] | None
    gate_measured: float | None
    gate_ci: tuple[float, float] | None
    verdict: str
    reason: str
    profile: str
    expected: str | None

    @property
    def unexpected(self) -> bool:
        return is_unexpected(self.verdict, self.expected)

    @property
    def ok(self) -> bool:
        return is_well(self.verdict, self.expected)

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


def judge(
    claim: Claim, samples: Samples, null: Samples | None, profile: str, gate: Samples | None = None
) -> Judgement:
    """Judge ``samples`` (and the null's, and the gate's) by the claim's rule, at ``profile``.

    Below the claim's profile the numbers are computed and the verdict is "not judged".
    Raises ClaimError on samples of the wrong shape, too few or not finite, on a null or a gate that
    is missing or not registered, on a paired null of another shape, and on an unknown profile.
    """
    if profile not in PROFILES:
        raise ClaimError(f"claim {claim.id!r}: profile={profile!r} is none of {', '.join(PROFILES)}")
    _registered(claim, "null", null)
    _registered(claim, "gate", gate)
    table = checked(claim, claim, samples, profile, "samples")
    own = _summarise(claim, table)
    other = contrast = premise = None
    if claim.null is not None:
        null_table = checked(claim, claim, null, profile, "null")
        other = _summarise(claim, null_table)
        if claim.null.paired:
            contrast = _summarise(_beyond_null(claim), differences(claim, table, null_table))
    if claim.gate is not None:
        premise = _summarise(claim.gate, checked(claim, claim.gate, gate, profile, "gate"))
    verdict, reason = _verdict(claim, own, other, contrast, premise, profile)
    return Judgement(
        id=claim.id,
        measured=own.measured,
        ci=own.ci,
        smallest=own.smallest,
        largest=own.largest,
        n=own.n,
        null_measured=other and other.measured,
        null_ci=other and other.ci,
        contrast=contrast and contrast.measured,
        contrast_ci=contrast and contrast.ci,
        gate_measured=premise and premise.measured,
        gate_ci=premise and premise.ci,
        verdict=verdict,
        reason=reason,
        profile=profile,
        expected=claim.expected,
    )


def row_ok(row: Mapping[str, Any]) -> bool:
    """Whether the suite passes with this row of the scoreboard."""
    return is_well(row["verdict"], row["expected"])


def is_well(verdict: str | None, expected: str | None) -> bool:
    """Whether the suite passes with this verdict: held, not judged, or excused by what is registered."""
    if verdict in ("held", "not judged"):
        return not is_unexpected(verdict, expected)
    return verdict in EXCUSED[expected]


def is_unexpected(verdict: str | None, expected: str | None) -> bool:
    """Whether a claim held that is registered not to reproduce."""
    return verdict == "held" and expected == "did not reproduce"


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


def _registered(claim: Claim, name: str, samples: Samples | None) -> None:
    """Raise ClaimError unless ``samples`` came exactly if the claim registers a ``name``."""
    registered = getattr(claim, name)
    if registered is None and samples is not None:
        raise ClaimError(
            f"claim {claim.id!r}: {name} samples came, but the claim registers no {name}; "
            f"add [claim.{name}] to claims.toml or leave {name} out"
        )
    if registered is not None and samples is None:
        raise ClaimError(
            f"claim {claim.id!r}: {name} samples are missing; report(..., {name}=...) takes the measurement of "
            f"its {name}, {registered.statement!r}"
        )


def _summarise(rule: Rule, table: Sequence[Any]) -> _Summary:
    if rule.samples == "seeds":
        values = list(table)
    elif rule.samples == "pairs":
        values = [first - second for first, second in table]
    else:
        values = [value for row in table for value in row]
    if rule.on == "value":
        interval = None
    elif rule.samples == "problems":
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
        broken=sum(not rule.satisfied_by(value, value) for value in values),
        values=len(values),
    )


def _beyond_null(claim: Claim) -> Rule:
    """The rule of claim − null: the rule's side of zero. For an equivalence it is only measured."""
    return claim if claim.op == "within" else claim.model_copy(update={"threshold": 0.0})


def _by_rule(rule: Rule, summary: _Summary) -> tuple[str, str]:
    if rule.on == "value":
        if summary.broken:
            return "contradicted", f"{summary.broken} of {summary.values} values break the rule"
        return "held", f"all {summary.values} values satisfy the rule"
    if summary.ci is None:
        return "inconclusive", "one sample makes no interval"
    if rule.satisfied_by(*summary.ci):
        return "held", "the whole interval satisfies the rule"
    if rule.broken_by(*summary.ci):
        return "contradicted", "the whole interval breaks the rule"
    return "inconclusive", "the interval reaches over the threshold"


def _side(claim: Claim) -> str:
    return "above" if claim.op == ">" else "below"


def _against_null(claim: Claim, null: _Summary, contrast: _Summary | None) -> str | None:
    """What the null takes away from a claim that satisfies its rule; None if nothing."""
    by_itself = _by_rule(claim, null)[0]
    if claim.op == "within":
        # A difference says nothing about a margin: the null itself must lie outside of it.
        return {"held": "its null passes too", "inconclusive": "its null reaches into the margin"}.get(
            by_itself
        )
    if contrast is None:
        return "its null passes too" if by_itself == "held" else None
    if _by_rule(_beyond_null(claim), contrast)[0] == "held":
        return None
    return f"claim − null is not {_side(claim)} zero: {with_interval(contrast.measured, contrast.ci)}"


def _unmet(gate: Gate, premise: _Summary) -> str | None:
    """Why the gate fails, with its numbers; None if its rule holds. What is not shown to be met is not met."""
    if _by_rule(gate, premise)[0] == "held":
        return None
    spread = with_interval(premise.measured, premise.ci)
    if gate.on == "value":
        spread = f"{number(premise.smallest)} … {number(premise.largest)}"
    return f"{gate.statement}: {spread}, n = {premise.n}, rule: {gate.rule}"


def _verdict(
    claim: Claim,
    own: _Summary,
    null: _Summary | None,
    contrast: _Summary | None,
    premise: _Summary | None,
    profile: str,
) -> tuple[str, str]:
    if not claim.judged_at(profile):
        return "not judged", f"judged at profile {claim.profile} and larger, not at {profile}"
    verdict, reason = _by_rule(claim, own)
    if verdict == "held" and null is not None:
        if taken := _against_null(claim, null, contrast):
            verdict, reason = "inconclusive", taken
        elif contrast is not None and claim.op != "within":
            reason += f", and claim − null is {_side(claim)} zero"
    if claim.gate is not None and premise is not None and (unmet := _unmet(claim.gate, premise)):
        verdict, reason = "premise unmet", unmet
    if is_unexpected(verdict, claim.expected):
        return verdict, "registered as 'did not reproduce', but it held: update the claim"
    if verdict == "contradicted" and claim.expected == "did not reproduce":
        verdict = "did not reproduce"
    if verdict in EXCUSED[claim.expected]:
        reason = f"{claim.reason} ({reason})"
    return verdict, reason
