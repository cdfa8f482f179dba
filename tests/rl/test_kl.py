"""KL estimators: their means, their variances, and by enumeration what their gradients really are."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslib.rl import kl_estimate

LOGITS, REFERENCE, OLD = (torch.tensor(x).double() for x in ([0.0, 1, -1], [1.0, 0, 0], [0.2, 0.6, -0.5]))
REVERSE = [-0.3256068, 0.4453909, -0.1197841]  # ∇KL(π ‖ π_ref)
FORWARD = [-0.3313884, 0.4532994, -0.1219110]  # ∇KL(π_ref ‖ π) = π − π_ref


@pytest.mark.parametrize(
    ("mean", "kl", "means", "variances"),
    [
        (0.1, 0.005, (0.005, 0.0050125, 0.005), (0.01, 5.025e-5, 5.0167e-5)),
        (1.0, 0.5, (0.5, 0.625, 0.5), (1.0, 0.75, math.e - 2)),
    ],
)
def test_k1_and_k3_are_unbiased_and_k3_varies_less_where_policies_are_close(mean, kl, means, variances):
    """x ~ N(μ, 1) against N(0, 1), integrated on a grid."""
    x = torch.linspace(-14, 14, 200_001, dtype=torch.float64)
    logp, logp_ref = (-((x - m) ** 2) / 2 for m in (mean, 0.0))
    weight = logp.exp() / logp.exp().sum()
    for kind, expected, variance in zip(("k1", "k2", "k3"), means, variances, strict=True):
        estimate = kl_estimate(logp, logp_ref, kind)
        found = (weight * estimate).sum()
        assert found.item() == pytest.approx(expected, rel=1e-6)
        assert (weight * (estimate - found) ** 2).sum().item() == pytest.approx(variance, rel=1e-4)
    assert (weight * kl_estimate(logp, logp_ref)).sum().item() == pytest.approx(kl)


def test_k3_with_its_arguments_exchanged_estimates_no_divergence():
    x = torch.linspace(-14, 14, 200_001, dtype=torch.float64)
    logp, logp_ref = (-((x - m) ** 2) / 2 for m in (1.0, 0.0))
    weight = logp.exp() / logp.exp().sum()
    found = (weight * kl_estimate(logp_ref, logp, "k3")).sum().item()
    assert found == pytest.approx(math.e - 1.5, rel=1e-4)  # 1.21828, and the KL is 0.5


def expected_gradient(estimate, sampler, logits=LOGITS):
    """∇ of Σ_a sampler(a)·estimate(logp_a) by the logits: what averaging over many samples tends to."""
    logits = logits.clone().requires_grad_()
    values = estimate(logits.log_softmax(-1), REFERENCE.log_softmax(-1), sampler.log_softmax(-1))
    (gradient,) = torch.autograd.grad((sampler.softmax(-1) * values).sum(), logits)
    return gradient.tolist()


def plain(kind):
    return lambda logp, ref, old: kl_estimate(logp, ref, kind)


def weighted(kind):
    return lambda logp, ref, old: kl_estimate(logp, ref, kind, old)


def weighted_by_a_constant(kind):
    return lambda logp, ref, old: (logp - old).exp().detach() * kl_estimate(logp, ref, kind)


def test_the_two_divergences_have_the_gradients_that_the_cases_are_named_after():
    logits = LOGITS.clone().requires_grad_()
    p, r = logits.log_softmax(-1), REFERENCE.log_softmax(-1)
    (reverse,) = torch.autograd.grad((p.exp() * (p - r)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((r.exp() * (r - p)).sum(), logits)
    assert reverse.tolist() == pytest.approx(REVERSE, abs=1e-7)
    assert forward.tolist() == pytest.approx(FORWARD, abs=1e-7)


ON_POLICY = {
    "k1 has none": (plain("k1"), [0.0, 0.0, 0.0]),
    "k2 has the reverse KL's": (plain("k2"), REVERSE),
    "k3 has the forward KL's": (plain("k3"), FORWARD),
    "a weight in the graph makes k3's the reverse KL's": (weighted("k3"), REVERSE),
    "and k1's": (weighted("k1"), REVERSE),
}
OFF_POLICY = {
    "plain k3 has neither": (plain("k3"), [-0.3704, 0.5650, -0.1946]),
    "plain k2 has neither": (plain("k2"), [-0.3213, 0.4764, -0.1551]),
    "weighted k3 has the reverse KL's": (weighted("k3"), REVERSE),
    "weighted k1 has the reverse KL's": (weighted("k1"), REVERSE),
    "k2 with a constant weight has the reverse KL's": (weighted_by_a_constant("k2"), REVERSE),
    "k3 with a constant weight has the forward KL's": (weighted_by_a_constant("k3"), FORWARD),
}


@pytest.mark.parametrize("case", ON_POLICY)
def test_on_policy_gradient(case):
    estimate, expected = ON_POLICY[case]
    assert expected_gradient(estimate, LOGITS) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("case", OFF_POLICY)
def test_off_policy_gradient(case):
    estimate, expected = OFF_POLICY[case]
    assert expected_gradient(estimate, OLD) == pytest.approx(expected, abs=6e-5)


@pytest.mark.parametrize("sampler", [LOGITS, OLD])
def test_k2_with_its_weight_in_the_graph_has_neither_gradient(sampler):
    found = torch.tensor(expected_gradient(weighted("k2"), sampler)).double()
    for divergence in (REVERSE, FORWARD):
        assert (found - torch.tensor(divergence)).abs().max() > 0.03


def test_weighted_k3_is_sample_by_sample_k2s_gradient_where_the_policies_are_one():
    logp, ref = (torch.tensor([-3.0, -0.2, -1.0]).double().requires_grad_() for _ in range(2))
    reference = torch.tensor([-0.5, -0.4, -2.0]).double()
    (a,) = torch.autograd.grad(kl_estimate(logp, reference, "k3", logp.detach()).sum(), logp)
    (b,) = torch.autograd.grad(kl_estimate(ref, reference, "k2").sum(), ref)
    torch.testing.assert_close(a, b)


def test_coefficient_of_plain_k3_blows_up_for_a_token_that_the_policy_has_given_up():
    logp = torch.tensor([1e-4]).double().log().requires_grad_()
    ref = torch.tensor([0.5]).double().log()
    (k3,) = torch.autograd.grad(kl_estimate(logp, ref, "k3").sum(), logp)
    (weighted_k3,) = torch.autograd.grad(kl_estimate(logp, ref, "k3", logp.detach()).sum(), logp)
    assert k3.item() == pytest.approx(-4999)
    assert weighted_k3.item() == pytest.approx(-8.517, abs=1e-3)


@pytest.mark.parametrize("distance", [-1e4, -200.0, -89.0, 89.0, 200.0, 1e4])
@pytest.mark.parametrize("weighted", [False, True])
def test_huge_log_ratios_leave_value_and_gradient_finite(distance, weighted):
    logp = torch.tensor([-1.0, -2.0]).requires_grad_()
    ref = logp.detach() + torch.tensor([distance, 0.1])
    estimate = kl_estimate(logp, ref, "k3", logp.detach() - distance if weighted else None)
    (gradient,) = torch.autograd.grad(estimate.sum(), logp)
    assert estimate.isfinite().all()
    assert gradient.isfinite().all()
    assert gradient[1] != 0  # and the neighbour's is not touched


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_what_the_mask_hides_reaches_neither_value_nor_gradient(kind, poison):
    mask = torch.tensor([[True, False], [True, True]])
    logp = torch.tensor([[-1.0, poison], [-2.0, -0.5]], requires_grad=True)
    ref = torch.tensor([[-1.5, -poison], [-1.0, -0.5]])
    estimate = kl_estimate(logp, ref, kind, ref - 0.3, mask)
    clean = kl_estimate(*(x.detach()[mask] for x in (logp, ref)), kind, (ref - 0.3)[mask])
    torch.testing.assert_close(estimate[mask], clean)
    assert estimate[0, 1] == 0
    (gradient,) = torch.autograd.grad(estimate.sum(), logp)
    assert gradient.isfinite().all()
    assert gradient[0, 1] == 0


@given(st.floats(-15, 0), st.floats(-15, 0))
def test_k2_and_k3_are_never_negative_and_all_are_0_for_equal_policies(a, b):
    logp, ref = (torch.tensor([x], dtype=torch.float64) for x in (a, b))
    assert kl_estimate(logp, ref, "k2") >= 0
    assert kl_estimate(logp, ref, "k3") >= -1e-9
    assert all(kl_estimate(logp, logp, kind).item() == 0 for kind in ("k1", "k2", "k3"))
    assert kl_estimate(logp, ref).item() == pytest.approx(a - b)


def test_small_differences_keep_their_digits_in_float32():
    logp = torch.tensor([-1.0])
    exact = kl_estimate(logp.double(), logp.double() + 2**-10, "k3").item()
    assert kl_estimate(logp, logp + 2**-10, "k3").item() == pytest.approx(exact, rel=1e-3)


def test_short_dtypes_are_computed_in_float32():
    x = torch.tensor([-1.0, -12.0], dtype=torch.bfloat16)
    y = torch.tensor([-13.0, -1.0], dtype=torch.bfloat16)
    estimate = kl_estimate(x, y, "k3", y)  # e²² would leave float16's range, its square bfloat16's digits
    assert estimate.dtype == torch.float32
    torch.testing.assert_close(estimate, kl_estimate(x.float(), y.float(), "k3", y.float()))
    assert kl_estimate(torch.empty(0, 3), torch.empty(0, 3), "k2").shape == (0, 3)


def test_bad_input_is_refused_with_its_name_and_value():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="kind='k4'"):
        kl_estimate(x, x, "k4")
    with pytest.raises(ValueError, match=r"logp_ref has shape \(3,\) and logp \(2, 3\)"):
        kl_estimate(x, x[0])
    with pytest.raises(ValueError, match=r"logp_old has shape \(3, 2\)"):
        kl_estimate(x, x, logp_old=x.mT)
