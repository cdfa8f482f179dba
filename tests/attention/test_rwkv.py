"""WKV-4 and WKV-7: by hand, recurrent = parallel, any length, gradients, and what a state holds."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dslib.attention import wkv4, wkv4_parallel, wkv4_weights, wkv7, wkv7_chunked

NAMES = ("r", "w", "k", "v", "a", "b")


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def wkv7_inputs(batch=2, heads=3, time=13, keys=4, values=5, seed=0, dtype=torch.float64):
    """As RWKV-7 makes them: w in (0.5452, 1), a = −κ̂, b = κ̂ ⊙ η."""
    r, w, k, kappa, eta = normal(5, batch, heads, time, keys, seed=seed)
    v = normal(batch, heads, time, values, seed=seed + 1)
    kappa = torch.nn.functional.normalize(kappa, dim=-1)
    w = torch.exp(-math.exp(-0.5) * w.sigmoid())
    state = normal(batch, heads, values, keys, seed=seed + 2)
    return tuple(x.to(dtype) for x in (r, w, k, v, -kappa, kappa * eta.sigmoid(), state))


def wkv4_inputs(time=9, channels=3):
    k, v = normal(2, 2, time, channels)
    return normal(channels, seed=1).exp(), normal(channels, seed=2), k, v


def test_wkv4_of_three_tokens_by_hand():
    w, u = torch.tensor([0.5], dtype=torch.float64), torch.tensor([0.25], dtype=torch.float64)
    k, v = torch.tensor([1.0, -2.0, 0.5]).double(), torch.tensor([3.0, 5.0, -1.0]).double()
    weights = [math.exp(1.0 - 0.5), math.exp(-2.0), math.exp(0.25 + 0.5)]
    last = sum(weight * x for weight, x in zip(weights, v.tolist(), strict=True)) / sum(weights)
    out, _ = wkv4(w, u, k.view(1, 3, 1), v.view(1, 3, 1))
    assert out[0, 0, 0].item() == pytest.approx(3.0)  # the first token averages itself only
    assert out[0, 2, 0].item() == pytest.approx(last)


def test_wkv4_recurrence_is_the_softmax_over_decayed_exponents():
    w, u, k, v = wkv4_inputs()
    torch.testing.assert_close(wkv4(w, u, k, v)[0], wkv4_parallel(w, u, k, v))
    weights = wkv4_weights(w, u, k)
    torch.testing.assert_close(weights.sum(2), torch.ones_like(k))
    assert (weights.permute(0, 3, 1, 2).triu(1) == 0).all()


@pytest.mark.parametrize("cut", [0, 1, 4, 9])
def test_wkv4_goes_on_from_its_state(cut):
    w, u, k, v = wkv4_inputs()
    whole, last = wkv4(w, u, k, v)
    first, state = wkv4(w, u, k[:, :cut], v[:, :cut])
    second, end = wkv4(w, u, k[:, cut:], v[:, cut:], state)
    torch.testing.assert_close(torch.cat((first, second), 1), whole)
    torch.testing.assert_close(end, last)


def test_wkv4_bears_exponents_that_overflow():
    w, u, k, v = (x.float() for x in wkv4_inputs())
    out, state = wkv4(w, u, 500 * k, v)
    assert out.isfinite().all()
    assert state.isfinite().all()
    torch.testing.assert_close(wkv4(w, u, k + 1000, v)[0], wkv4(w, u, k, v)[0], rtol=1e-3, atol=1e-3)


def test_wkv4_gradients():
    w, u, k, v = (x.requires_grad_() for x in wkv4_inputs(time=4, channels=2))
    assert torch.autograd.gradcheck(lambda *x: wkv4(*x)[0], (w, u, k, v))


def test_wkv7_one_step_by_hand():
    S = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double()
    r, w, k, a, b = (
        torch.tensor(x).double() for x in ([1.0, -1.0], [0.5, 1.0], [2.0, 0.0], [0.0, -1.0], [0.0, 0.5])
    )
    v = torch.tensor([10.0, 20.0]).double()
    # S·diag(w) = [[.5, 2], [1.5, 4]]; S·a = [−2, −4]; times bᵀ takes half of column 2; v·kᵀ adds to column 1.
    expected = torch.tensor([[20.5, 1.0], [41.5, 2.0]]).double()
    y, state = wkv7(*(x.view(1, 1, 1, 2) for x in (r, w, k, v, a, b)), S.view(1, 1, 2, 2))
    torch.testing.assert_close(state[0, 0], expected)
    torch.testing.assert_close(y[0, 0, 0], expected @ r)


def test_writing_twice_under_one_key_leaves_the_second_value_only_with_the_delta_rule():
    key = torch.nn.functional.normalize(normal(4), dim=0)
    v = normal(1, 1, 2, 3)
    k = key.expand(1, 1, 2, 4)
    one, zero = torch.ones_like(k), torch.zeros_like(k)
    delta, _ = wkv7(k, one, k, v, -k, k)
    torch.testing.assert_close(delta[:, :, 1], v[:, :, 1])
    plain, _ = wkv7(k, one, k, v, zero, zero)
    torch.testing.assert_close(plain[:, :, 1], v.sum(2))


@pytest.mark.parametrize("chunk", [1, 4, 16])
@pytest.mark.parametrize("time", [0, 1, 2, 13, 16, 31, 33])
def test_chunked_is_the_recurrence_at_any_length(time, chunk):
    *inputs, state = wkv7_inputs(time=time)
    for start in (None, state):
        y, end = wkv7(*inputs, start)
        ours, last = wkv7_chunked(*inputs, start, chunk=chunk)
        torch.testing.assert_close(ours, y)
        torch.testing.assert_close(last, end)
        assert ours.shape == inputs[3].shape


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(0, 20), st.integers(1, 5)),
    values=st.integers(1, 5),
    cut=st.integers(0, 20),
    chunk=st.integers(1, 9),
)
def test_chunked_goes_on_from_its_state_wherever_it_is_cut(sizes, values, cut, chunk):
    *inputs, state = wkv7_inputs(*sizes, values)
    whole, last = wkv7(*inputs, state)
    first, middle = wkv7_chunked(*(x[:, :, :cut] for x in inputs), state, chunk=chunk)
    second, end = wkv7_chunked(*(x[:, :, cut:] for x in inputs), middle, chunk=chunk)
    torch.testing.assert_close(torch.cat((first, second), 2), whole)
    torch.testing.assert_close(end, last)


def test_chunked_gradients_are_those_of_the_recurrence():
    inputs = wkv7_inputs(1, 2, 7, 3, 2)
    found = []
    for function in (wkv7, lambda *x: wkv7_chunked(*x, chunk=3)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        y, state = function(*leaves)
        (y.square().sum() + state.sin().sum()).backward()
        found.append([leaf.grad for leaf in leaves])
    for name, ours, expected in zip((*NAMES, "state"), found[1], found[0], strict=True):
        torch.testing.assert_close(ours, expected, msg=lambda text, name=name: f"d{name}: {text}")


def test_chunked_gradients_are_those_of_finite_differences():
    leaves = [x.requires_grad_() for x in wkv7_inputs(1, 1, 4, 2, 2)]
    assert torch.autograd.gradcheck(lambda *x: wkv7_chunked(*x, chunk=3), leaves)


def test_two_thousand_steps_in_float32_stay_as_exact_as_twenty():
    inputs = wkv7_inputs(1, 2, 2000, 8, 8)[:6]
    exact, _ = wkv7(*inputs)
    ours, state = wkv7_chunked(*(x.float() for x in inputs))
    error = (ours - exact).norm(dim=-1) / exact.norm(dim=-1).mean()
    assert error[:, :, :20].max() < 1e-5
    assert error[:, :, -200:].max() < 1e-5
    assert state.dtype == torch.float32


def test_gradients_in_float32_do_not_grow_wrong_over_two_thousand_steps():
    """A backward pass that divided the state by w at every step would be off by orders of magnitude."""
    inputs = wkv7_inputs(1, 1, 2000, 4, 4)[:6]
    found = []
    for kind, function in ((torch.float64, wkv7), (torch.float32, wkv7_chunked)):
        leaves = [x.to(kind, copy=True).requires_grad_() for x in inputs]
        function(*leaves)[0].square().mean().backward()
        found.append([leaf.grad for leaf in leaves])
    for expected, ours in zip(*found, strict=True):
        assert (ours - expected).norm() < 1e-4 * expected.norm()


def test_state_stays_in_float32_and_y_has_the_inputs_dtype():
    inputs = [x.bfloat16() for x in wkv7_inputs()[:6]]
    for function in (wkv7, wkv7_chunked):
        y, state = function(*inputs)
        assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    exact, _ = wkv7(*(x.double() for x in inputs))
    torch.testing.assert_close(wkv7_chunked(*inputs)[0].double(), exact, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(("function", "first"), [(wkv7, 7), (lambda *x: wkv7_chunked(*x, chunk=3), 6)])
def test_nan_stays_in_its_head_and_its_future_or_chunk(function, first):
    inputs = list(wkv7_inputs(time=9))
    inputs[3][0, 1, 7, 2] = math.nan
    bad = function(*inputs)[0].isnan()
    assert bad[0, 1, 7:, 2].all()
    assert not bad[1].any()
    assert not bad[0, 0].any()
    assert not bad[0, 1, :first].any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": (2, 3, 13, 5)}, "k has shape (2, 3, 13, 5)"),
        ({"v": (2, 3, 5)}, "v (2, 3, 5)"),
        ({"v": (2, 3, 12, 5)}, "r has shape (2, 3, 13, 4)"),
        ({"state": (2, 3, 4, 5)}, "state has shape (2, 3, 4, 5)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, words):
    inputs = dict(zip((*NAMES, "state"), wkv7_inputs(), strict=True))
    inputs |= {name: torch.ones(shape) for name, shape in change.items()}
    for function in (wkv7, wkv7_chunked):
        with pytest.raises(ValueError, match=re.escape(words)):
            function(**inputs)


def test_a_decay_that_a_chunk_cannot_invert_is_refused_and_the_recurrence_takes_it():
    *inputs, _ = (x.float() for x in wkv7_inputs())
    inputs[1][0, 0, 3, 1] = 1e-4
    with pytest.raises(ValueError, match="smaller chunk"):
        wkv7_chunked(*inputs)
    torch.testing.assert_close(wkv7_chunked(*inputs, chunk=4)[0], wkv7(*inputs)[0], rtol=1e-4, atol=1e-4)
    inputs[1][0, 0, 3, 1] = 0.0
    assert wkv7(*inputs)[0].isfinite().all()
    with pytest.raises(ValueError, match="w goes down to 0"):
        wkv7_chunked(*inputs, chunk=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"w": (4,)}, "w has shape"),
        ({"u": (2, 3)}, "u has shape"),
        ({"v": (2, 9, 4)}, "must both be"),
        ({"state": (2, 2, 3)}, "state has shape"),
    ],
)
def test_wkv4_refuses_shapes_that_do_not_fit(arguments, words):
    inputs = dict(zip("wukv", wkv4_inputs(), strict=True))
    inputs |= {name: torch.ones(shape) for name, shape in arguments.items()}
    with pytest.raises(ValueError, match=words):
        wkv4(**inputs)
