import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dslib.suite.claims import ClaimError
from dslib.suite.samples import MINIMUM_SAMPLES
from dslib.suite.verdicts import bootstrap_interval, judge, student_interval

# Differences that squares can hold; below that scipy answers NaN.
numbers = st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 6))


@given(st.lists(numbers, min_size=2, max_size=20))
def test_student_interval_is_scipys(values):
    interval = student_interval(values)
    if min(values) == max(values):
        assert interval == (values[0], values[0])
        return
    expected = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    assert interval == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_student_interval_of_two_values_has_its_closed_form():
    # With one degree of freedom t is Cauchy: the quantile is tan(0.475 π).
    low, high = student_interval([0.0, 2.0])
    assert high == pytest.approx(1 + math.tan(0.475 * math.pi))
    assert low == pytest.approx(1 - math.tan(0.475 * math.pi))


def test_one_value_has_no_interval():
    assert student_interval([1.0]) is None


def test_bootstrap_gives_the_same_interval_every_time():
    table = np.random.default_rng(1).random((5, 30)).tolist()
    assert bootstrap_interval(table) == bootstrap_interval(table)


def test_bootstrap_of_one_column_has_the_spread_of_the_seeds():
    values = np.random.default_rng(2).normal(size=200)
    low, high = bootstrap_interval(values[:, None].tolist())
    half = 1.96 * values.std() / math.sqrt(200)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.03)


def test_bootstrap_sees_the_problems_too():
    # All seeds agree; only the problems differ. Resampling seeds alone would see no spread.
    row = [0.0, 1.0] * 10
    low, high = bootstrap_interval([row] * 5)
    assert low < 0.4 < 0.6 < high


def test_no_spread_gives_a_degenerate_interval_not_rounding_noise():
    assert bootstrap_interval([[0.1] * 7] * 5) == (0.1, 0.1)
    assert student_interval([0.1] * 7) == (0.1, 0.1)


@pytest.mark.parametrize(
    ("samples", "verdict"),
    [
        ([-1.0, -1.1, -0.9, -1.0, -1.05], "held"),
        ([1.0, 1.1, 0.9, 1.0, 1.05], "contradicted"),
        ([-1.0, 1.0, 0.5, -0.5, 0.1], "inconclusive"),
        ([-1.0] * 5, "held"),
        ([0.0] * 5, "contradicted"),  # below zero means below, not at
    ],
)
def test_an_interval_holds_contradicts_or_decides_nothing(make_claim, samples, verdict):
    assert judge(make_claim(), samples, None, "quick").verdict == verdict


@pytest.mark.parametrize(
    ("samples", "verdict"),
    [
        ([0.01, -0.01, 0.0, 0.005, -0.005], "held"),
        ([1.0, 1.1, 0.9, 1.0, 1.05], "contradicted"),
        ([-1.0, -1.1, -0.9, -1.0, -1.05], "contradicted"),
        ([0.04, 0.06, 0.05, 0.05, 0.05], "inconclusive"),
        ([0.05] * 5, "held"),
    ],
)
def test_within_is_an_equivalence(make_claim, samples, verdict):
    claim = make_claim(op="within", threshold=(-0.05, 0.05))
    assert judge(claim, samples, None, "quick").verdict == verdict


def test_pairs_are_judged_by_first_minus_second(make_claim):
    pairs = [(1.0, 2.0), (5.0, 6.1), (3.0, 3.9), (2.0, 3.0), (0.0, 1.0)]
    judgement = judge(make_claim(samples="pairs"), pairs, None, "quick")
    assert judgement.measured == pytest.approx(-1.0)
    assert judgement.n == 5
    assert judgement.verdict == "held"


def test_problems_are_counted_by_seeds(make_claim):
    table = [[-1.0, -0.5, -0.7]] * 5
    judgement = judge(make_claim(samples="problems"), table, None, "quick")
    assert (judgement.n, judgement.verdict) == (5, "held")


def test_value_claims_need_every_sample_and_have_no_interval(make_claim):
    claim = make_claim(op="within", threshold=(0.68, 1.21), on="value")
    held = judge(claim, [0.7, 1.2], None, "quick")
    assert (held.verdict, held.ci, held.smallest, held.largest) == ("held", None, 0.7, 1.2)
    broken = judge(claim, [0.7, 1.2, 1.3], None, "quick")
    assert broken.verdict == "contradicted"
    assert "1 of 3" in broken.reason
    assert judge(claim, [0.7], None, "full").verdict == "held"


def test_a_claim_whose_null_passes_too_does_not_hold(make_claim):
    claim = make_claim(null={"statement": "nothing"})
    down = [-1.0, -1.1, -0.9, -1.0, -1.05]
    judgement = judge(claim, down, down, "quick")
    assert judgement.verdict == "inconclusive"
    assert "null passes too" in judgement.reason
    assert not judgement.ok
    up = [-value for value in down]
    assert judge(claim, down, up, "quick").verdict == "held"
    assert judge(claim, up, down, "quick").verdict == "contradicted"


DOWN = [-1.0, -1.1, -0.9, -1.0, -1.05]
UP = [-value for value in DOWN]
WIDE = [-1.0, 1.1, -0.9, 1.0, -0.05]


def paired(make_claim, **changes):
    return make_claim(null={"statement": "nothing", "paired": True}, **changes)


def test_beside_a_paired_null_that_passes_too_a_claim_holds_by_what_it_has_beyond_it(make_claim):
    null = [-0.5, -0.7, -0.4, -0.6, -0.45]
    assert judge(make_claim(null={"statement": "nothing"}), DOWN, null, "quick").verdict == "inconclusive"
    judgement = judge(paired(make_claim), DOWN, null, "quick")
    assert judgement.verdict == "held"
    assert judgement.contrast == pytest.approx(-0.48)
    differences = [ours - theirs for ours, theirs in zip(DOWN, null, strict=True)]
    assert judgement.contrast_ci == pytest.approx(student_interval(differences))
    assert "claim − null is below zero" in judgement.reason


def test_a_paired_null_that_fails_by_itself_is_not_enough(make_claim):
    # The null's own interval reaches over zero, and so does what lies between it and the claim.
    null = [-1.5, 0.4, -2.0, 0.5, -0.5]
    assert judge(make_claim(null={"statement": "nothing"}), DOWN, null, "quick").verdict == "held"
    judgement = judge(paired(make_claim), DOWN, null, "quick")
    assert (judgement.verdict, judgement.ok) == ("inconclusive", False)
    assert "claim − null is not below zero" in judgement.reason


def test_a_contrast_lies_on_the_rules_side_of_zero_wherever_the_threshold_is(make_claim):
    below_margin = paired(make_claim, op=">", threshold=-2.0)
    assert judge(below_margin, DOWN, [value - 0.5 for value in DOWN], "quick").verdict == "held"
    assert judge(below_margin, DOWN, [value + 0.5 for value in DOWN], "quick").verdict == "inconclusive"


def test_a_claim_that_breaks_its_rule_is_not_saved_by_its_contrast(make_claim):
    assert judge(paired(make_claim), UP, [value + 5 for value in UP], "quick").verdict == "contradicted"


def test_pairs_are_subtracted_pair_by_pair(make_claim):
    pairs = [(1.0, 2.0), (5.0, 6.5), (3.0, 4.5), (2.0, 3.0), (0.0, 1.0)]
    null = [(1.5, 2.0), (6.0, 6.5), (4.0, 4.5), (2.5, 3.0), (0.5, 1.0)]
    judgement = judge(paired(make_claim, samples="pairs"), pairs, null, "quick")
    assert judgement.contrast == pytest.approx(-0.7)  # −0.5, −1, −1, −0.5 and −0.5
    assert judgement.verdict == "held"


def test_problems_are_subtracted_problem_by_problem(make_claim):
    row = [-3.0, -1.0, -2.0]
    claim = paired(make_claim, samples="problems")
    judgement = judge(claim, [row] * 5, [[value + 0.25 for value in row]] * 5, "quick")
    # Each problem differs by as much, so the contrast has no spread although the problems have.
    assert (judgement.contrast, judgement.contrast_ci) == (-0.25, (-0.25, -0.25))
    assert judgement.verdict == "held"


def test_values_hold_beyond_a_paired_null_one_by_one(make_claim):
    claim = paired(make_claim, on="value")
    assert judge(claim, [-1.0, -2.0], [-0.5, -1.5], "quick").verdict == "held"
    assert judge(claim, [-1.0, -2.0], [-0.5, -2.5], "quick").verdict == "inconclusive"


@pytest.mark.parametrize(
    ("samples", "ours", "null", "shapes"),
    [
        ("seeds", DOWN, DOWN * 2, r"null has shape \(10,\) and samples \(5,\)"),
        ("pairs", [[0.0, 1.0]] * 5, [[0.0, 1.0]] * 8, r"null has shape \(8, 2\) and samples \(5, 2\)"),
        ("problems", [[0.0] * 4] * 5, [[0.0] * 3] * 5, r"null has shape \(5, 3\) and samples \(5, 4\)"),
    ],
)
def test_a_paired_null_of_another_shape_is_refused(make_claim, samples, ours, null, shapes):
    with pytest.raises(ClaimError, match=rf"claim 'toy.mean': {shapes}.*paired = false"):
        judge(paired(make_claim, samples=samples), ours, null, "quick")
    judge(make_claim(samples=samples, null={"statement": "nothing"}), ours, null, "quick")


INSIDE = [0.01, -0.01, 0.0, 0.005, -0.005]


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize(
    ("null", "verdict"),
    [
        ([0.5, 0.51, 0.49, 0.5, 0.5], "held"),
        (INSIDE, "inconclusive"),
        ([0.1, -0.1, 0.2, -0.2, 0.0], "inconclusive"),  # it may lie inside the margin or not
    ],
)
def test_the_null_of_an_equivalence_must_lie_outside_the_margin(make_claim, null, verdict, is_paired):
    rule = {"op": "within", "threshold": (-0.05, 0.05)}
    claim = make_claim(**rule, null={"statement": "another", "paired": is_paired})
    judgement = judge(claim, INSIDE, null, "quick")
    assert judgement.verdict == verdict
    assert (judgement.contrast is not None) == is_paired


GATE = {"statement": "the teacher is better", "op": ">", "threshold": 0.5, "on": "interval"}
MET, UNMET = [0.9, 0.92, 0.88, 0.9, 0.91], [0.2, 0.9, 0.3, 0.8, 0.4]


@pytest.mark.parametrize("samples", [DOWN, UP, WIDE], ids=["held", "contradicted", "inconclusive"])
def test_where_the_premise_fails_nothing_is_said_of_the_claim(make_claim, samples):
    judgement = judge(make_claim(gate=GATE), samples, None, "quick", UNMET)
    assert (judgement.verdict, judgement.ok) == ("premise unmet", False)
    assert "the teacher is better: 0.52 [" in judgement.reason
    assert "rule: interval > 0.5" in judgement.reason
    assert judgement.gate_measured == pytest.approx(0.52)


def test_where_the_premise_is_met_the_claim_is_judged_as_ever(make_claim):
    claim = make_claim(gate=GATE)
    assert judge(claim, DOWN, None, "quick", MET).verdict == "held"
    assert judge(claim, UP, None, "quick", MET).verdict == "contradicted"


def test_an_unmet_premise_is_well_only_where_it_is_registered(make_claim):
    claim = make_claim(gate=GATE, expected="premise unmet", reason="too few steps")
    unmet = judge(claim, UP, None, "quick", UNMET)
    assert (unmet.verdict, unmet.ok) == ("premise unmet", True)
    assert unmet.reason.startswith("too few steps (the teacher is better")
    assert not judge(claim, UP, None, "quick", MET).ok
    for other in ("did not reproduce", "inconclusive"):
        assert not judge(make_claim(gate=GATE, expected=other, reason="x"), UP, None, "quick", UNMET).ok


def test_below_its_profile_a_claim_is_not_judged_whatever_its_premise(make_claim):
    assert judge(make_claim(gate=GATE, profile="full"), [1.0], None, "quick", [0.0]).verdict == "not judged"


def test_a_gate_may_be_of_another_shape_and_judge_every_value(make_claim):
    claim = make_claim(samples="pairs", gate=GATE | {"on": "value"})
    pairs = [(value, 0.0) for value in DOWN]
    assert judge(claim, pairs, None, "quick", [0.6, 0.7]).verdict == "held"
    unmet = judge(claim, pairs, None, "quick", [0.6, 0.4])
    assert unmet.verdict == "premise unmet"
    assert "0.4 … 0.6" in unmet.reason


def test_a_gate_must_be_reported_exactly_when_it_is_registered(make_claim):
    with pytest.raises(ClaimError, match="registers no gate"):
        judge(make_claim(), DOWN, None, "quick", MET)
    with pytest.raises(ClaimError, match=r"gate samples are missing.*the teacher is better"):
        judge(make_claim(gate=GATE), DOWN, None, "quick")
    with pytest.raises(ClaimError, match=r"gate\[0\] is nan"):
        judge(make_claim(gate=GATE), DOWN, None, "quick", [math.nan] * 5)
    with pytest.raises(ClaimError, match=r"gate has 4 of the 5 seeds"):
        judge(make_claim(gate=GATE), DOWN, None, "quick", MET[:4])


def test_a_registered_failure_is_well_and_its_unexpected_success_is_not(make_claim):
    claim = make_claim(expected="did not reproduce", reason="too small")
    failed = judge(claim, UP, None, "quick")
    assert (failed.verdict, failed.ok) == ("did not reproduce", True)
    assert "too small" in failed.reason
    held = judge(claim, DOWN, None, "quick")
    assert (held.verdict, held.unexpected, held.ok) == ("held", True, False)


def test_an_interval_that_reaches_over_is_never_called_a_failure_to_reproduce(make_claim):
    judgement = judge(make_claim(expected="did not reproduce", reason="too small"), WIDE, None, "quick")
    assert (judgement.verdict, judgement.ok) == ("inconclusive", True)
    assert judgement.reason == "too small (the interval reaches over the threshold)"
    by_null = make_claim(expected="did not reproduce", reason="too small", null={"statement": "nothing"})
    assert judge(by_null, DOWN, DOWN, "quick").verdict == "inconclusive"


def test_what_is_structural_is_judged_by_the_same_rule(make_claim):
    assert judge(make_claim(kind="structural"), DOWN, None, "quick").verdict == "held"
    assert not judge(make_claim(kind="structural"), UP, None, "quick").ok


def test_an_open_question_may_end_inconclusive_or_held_but_not_contradicted(make_claim):
    claim = make_claim(expected="inconclusive", reason="the two end level")
    wide = judge(claim, [-1.0, 1.1, -0.9, 1.0, -0.05], None, "quick")
    assert (wide.verdict, wide.ok) == ("inconclusive", True)
    assert "end level" in wide.reason
    down = [-1.0, -1.1, -0.9, -1.0, -1.05]
    assert (judge(claim, down, None, "quick").verdict, judge(claim, down, None, "quick").ok) == ("held", True)
    up = judge(claim, [-value for value in down], None, "quick")
    assert (up.verdict, up.ok) == ("contradicted", False)


def test_below_its_profile_a_claim_is_measured_but_not_judged(make_claim):
    judgement = judge(make_claim(profile="full"), [-1.0], None, "quick")
    assert (judgement.verdict, judgement.measured, judgement.ci, judgement.ok) == (
        "not judged",
        -1.0,
        None,
        True,
    )


@pytest.mark.parametrize("profile", MINIMUM_SAMPLES)
def test_too_few_samples_name_the_claim_and_the_number_needed(make_claim, profile):
    minimum = MINIMUM_SAMPLES[profile]
    with pytest.raises(ClaimError, match=rf"claim 'toy.mean'.*{minimum - 1} of the {minimum} seeds"):
        judge(make_claim(), [-1.0] * (minimum - 1), None, profile)
    assert judge(make_claim(), [-1.0] * minimum, None, profile).verdict == "held"


@pytest.mark.parametrize(
    ("shape", "samples", "message"),
    [
        ("seeds", [], "is empty"),
        ("seeds", [1.0, math.nan] * 3, r"samples\[1\] is nan"),
        ("seeds", [1.0, math.inf] * 3, r"samples\[1\] is inf"),
        ("seeds", [10**400] * 5, r"samples\[0\] is 1000"),
        ("seeds", [[1.0, 2.0]] * 5, "holds rows"),
        ("seeds", ["1"] * 5, "is str '1'"),
        ("seeds", [True] * 5, "is bool True"),
        ("seeds", [None] * 5, "is NoneType"),
        ("seeds", 3.0, "is float"),
        ("pairs", [1.0] * 5, "holds single numbers"),
        ("pairs", [[1.0, 2.0, 3.0]] * 5, "has rows of 3"),
        ("pairs", [[1.0, 2.0], [1.0]] * 5, "has rows of 1 and of 2"),
        ("problems", [[1.0, 2.0], [1.0]] * 5, "has rows of 1 and of 2"),
        ("problems", [[]] * 5, "has empty rows"),
        ("problems", [[1.0, math.nan]] * 5, r"samples\[0\]\[1\] is nan"),
    ],
)
def test_samples_of_a_wrong_shape_say_what_came_and_what_would_do(make_claim, shape, samples, message):
    with pytest.raises(ClaimError, match=rf"claim 'toy.mean': .*{message}.*report"):
        judge(make_claim(samples=shape), samples, None, "quick")


def test_a_null_must_be_reported_exactly_when_it_is_registered(make_claim):
    with pytest.raises(ClaimError, match="registers no null"):
        judge(make_claim(), [-1.0] * 5, [0.0] * 5, "quick")
    claim = make_claim(null={"statement": "a coin"})
    with pytest.raises(ClaimError, match=r"null samples are missing.*a coin"):
        judge(claim, [-1.0] * 5, None, "quick")
    with pytest.raises(ClaimError, match=r"null\[0\] is nan"):
        judge(claim, [-1.0] * 5, [math.nan] * 5, "quick")


def test_an_unknown_profile_is_refused(make_claim):
    with pytest.raises(ClaimError, match="profile='slow'"):
        judge(make_claim(), [-1.0] * 5, None, "slow")


@settings(max_examples=60)
@given(samples=st.lists(numbers, min_size=5, max_size=12), shift=st.floats(1, 1e3))
def test_moving_samples_in_the_claims_direction_never_weakens_the_verdict(samples, shift):
    from dslib.suite.claims import Claim

    row = dict.fromkeys(("notebook", "statement", "source", "paper", "quantity", "unit", "scale"), "x")
    claim = Claim(**row, id="a.b", samples="seeds", op="<", threshold=0.0, on="interval", profile="smoke")
    order = ["contradicted", "inconclusive", "held"]
    before = judge(claim, samples, None, "quick").verdict
    after = judge(claim, [value - shift for value in samples], None, "quick").verdict
    assert order.index(after) >= order.index(before)
