"""RWKV-7's kernel against the float64 recurrence: results, states and gradients, at any length."""

import math

import pytest
import torch

from dslib import kernels
from dslib.attention import wkv7, wkv7_chunked
from dslib.models import RWKVConfig

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NAMES = ("r", "w", "k", "v", "a", "b", "state")
#: (batch, heads, time, keys, values), with chunks of 4 steps and 16 rows of the state a program.
CASES = {
    "one step": (1, 1, 1, 16, 16),
    "prime length, odd sizes": (1, 2, 5, 5, 3),
    "whole chunks": (1, 1, 8, 16, 16),
    "one short of a chunk, one key, one value": (2, 1, 7, 1, 1),
    "one past two chunks, two parts of values": (1, 1, 9, 8, 19),
    "as many keys as there may be": (1, 1, 2, 128, 8),
}


@pytest.fixture
def kernel(device):
    from dslib.kernels import wkv7

    return wkv7


@pytest.fixture
def small(kernel, monkeypatch):
    """Several chunks and several programs a head, from few steps and few values."""
    monkeypatch.setattr(kernel, "CHUNK", 4)
    monkeypatch.setattr(kernel, "ROWS", 16)


def inputs(case, device, dtype=torch.float32, seed=0):
    """As RWKV-7 makes them: w in (0.5452, 1), a = −κ̂, b = κ̂ ⊙ η; the state in float32."""
    batch, heads, time, keys, values = case
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    r, w, k, kappa, eta = normal(5, batch, heads, time, keys)
    kappa = torch.nn.functional.normalize(kappa, dim=-1)
    w = torch.exp(-math.exp(-0.5) * w.sigmoid())
    tensors = [r, w, k / keys**0.5, normal(batch, heads, time, values), -kappa, kappa * eta.sigmoid()]
    state = normal(batch, heads, values, keys).float().to(device)
    return [*(x.to(dtype).to(device) for x in tensors), state]


def gradients(function, tensors, kind=None):
    leaves = [x.detach().to(kind or x.dtype, copy=True).requires_grad_() for x in tensors]
    y, state = function(*leaves)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in (y, state)]
    loss = (y * weights[0]).sum() + (state * weights[1]).sum()
    return y.detach(), state.detach(), torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_the_float64_recurrences(kernel, small, device, case):
    check(kernel, inputs(CASES[case], device))


def test_the_chunks_that_are_really_used_give_the_same(kernel, device):
    check(kernel, inputs((1, 1, 17, 8, 33), device))


def check(kernel, tensors):
    y, state, found = gradients(kernel.wkv7, tensors)
    exact_y, exact_state, expected = gradients(wkv7, tensors, torch.float64)
    torch.testing.assert_close(y.double(), exact_y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double(), exact_state, rtol=1e-4, atol=1e-5)
    for name, ours, exact in zip(NAMES, found, expected, strict=True):
        scale = exact.abs().max().item()
        torch.testing.assert_close(
            ours.double(), exact, rtol=1e-4, atol=2e-5 * scale, msg=lambda text, n=name: f"d{n}: {text}"
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_values_are_computed_in_float32_and_rounded_at_the_end(kernel, small, device, dtype):
    tensors = inputs((1, 1, 6, 16, 16), device, dtype)
    y, state, found = gradients(kernel.wkv7, tensors)
    exact_y, exact_state, expected = gradients(wkv7, tensors, torch.float64)
    assert (y.dtype, state.dtype) == (dtype, torch.float32)
    # The interpreter truncates bfloat16, which is twice a rounding's error.
    rounding = 2**-6 if dtype == torch.bfloat16 else 2**-9
    torch.testing.assert_close(y.double(), exact_y, rtol=rounding, atol=4e-3)
    torch.testing.assert_close(state.double(), exact_state, rtol=4e-3, atol=4e-3)
    for x, ours, exact in zip(tensors, found, expected, strict=True):
        assert ours.dtype == x.dtype
        assert (ours.double() - exact).norm() < 2 * rounding * exact.norm()


def test_decays_may_be_in_float32_beside_short_values(kernel, device):
    tensors = [x.half() for x in inputs((1, 1, 5, 8, 8), device)[:6]]
    w, state = 1 - 1e-4 * torch.rand(tensors[1].shape).to(device), inputs((1, 1, 5, 8, 8), device)[6]
    tensors[1] = w  # float16 would round it to 1
    _, end = kernel.wkv7(*tensors, state)
    _, exact = wkv7(*(x.double() for x in tensors), state.double())
    torch.testing.assert_close(end.double(), exact, rtol=2e-3, atol=2e-3)


def test_many_steps_lose_nothing_that_one_chunk_keeps(kernel, small, device):
    """Divided back from the last, the first state would have no digit right: 0.2 to the 26 is 1e-18."""
    tensors = inputs((1, 1, 26, 4, 4), device)
    tensors[1] = torch.full_like(tensors[1], 0.2)
    _, _, found = gradients(kernel.wkv7, tensors)
    _, _, expected = gradients(wkv7, tensors, torch.float64)
    for ours, exact in zip(found, expected, strict=True):
        assert (ours - exact).norm() < 1e-4 * exact.norm()


def test_a_decay_of_zero_forgets_all_and_has_a_gradient(kernel, small, device):
    tensors = inputs((1, 1, 5, 4, 4), device)
    tensors[1][:, :, 3] = 0.0
    _, _, found = gradients(kernel.wkv7, tensors)
    _, _, expected = gradients(wkv7, tensors, torch.float64)
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)


def test_going_on_from_a_state_is_one_pass(kernel, small, device):
    *tensors, state = inputs((1, 1, 7, 8, 8), device)
    whole, end = kernel.wkv7(*tensors, state)
    first, middle = kernel.wkv7(*(x[:, :, :3] for x in tensors), state)
    second, last = kernel.wkv7(*(x[:, :, 3:] for x in tensors), middle)
    torch.testing.assert_close(torch.cat((first, second), 2), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, end, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [(1, 2, 0, 4, 4), (0, 2, 5, 4, 4), (2, 0, 5, 4, 4)])
def test_nothing_to_do_leaves_the_state_and_its_gradient(kernel, device, case):
    tensors = inputs(case, device)
    y, state, found = gradients(kernel.wkv7, tensors)
    assert y.shape == tensors[3].shape
    assert torch.equal(state, tensors[6])
    assert all(ours.shape == x.shape for ours, x in zip(found, tensors, strict=True))
    assert found[6].isfinite().all()


def test_strides_do_not_matter_and_the_inputs_stay(kernel, device):
    tensors = inputs((1, 2, 3, 4, 4), device)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    expected = kernel.wkv7(*tensors)
    for ours, exact in zip(kernel.wkv7(*views), expected, strict=True):
        assert torch.equal(ours, exact)
    for view, x in zip(views, tensors, strict=True):
        assert torch.equal(view, x)


def test_nan_stays_in_its_head(kernel, device):
    tensors = inputs((2, 1, 9, 4, 4), device)
    tensors[3][1, 0, 5, 2] = math.nan
    y, _ = kernel.wkv7(*tensors)
    assert y[1, 0, 5:, 2].isnan().all()
    y[1, 0] = 0
    assert y.isfinite().all()


def test_the_librarys_function_and_model_take_the_kernel_that_was_chosen(kernel, device, monkeypatch):
    calls = []
    monkeypatch.setattr(kernel, "wkv7", lambda *x, original=kernel.wkv7: calls.append(x) or original(*x))
    tensors = inputs((1, 1, 5, 8, 8), device)
    model = RWKVConfig(vocab_size=7, d_model=16, layers=2, head_size=8, rank=2).build().to(device)
    tokens = torch.randint(7, (1, 3), generator=torch.Generator().manual_seed(0)).to(device)
    with kernels.use("torch"):
        expected, logits = wkv7_chunked(*tensors), model(tokens)
    assert not calls
    with kernels.use("triton"):
        for ours, exact in zip(wkv7_chunked(*tensors), expected, strict=True):
            torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(tokens), logits, rtol=1e-3, atol=1e-4)
        assert len(calls) == 3
        wkv7_chunked(*(x.double() for x in tensors))  # float64 stays on torch
        wkv7_chunked(*inputs((1, 1, 3, 129, 4), device))  # and so do more keys than the kernel holds
    assert len(calls) == 3


BAD = {
    "k is torch.float64": (TypeError, {"k": lambda x: x.double()}),
    "v is list": (TypeError, {"v": lambda x: [1.0]}),
    "state is torch.float16": (TypeError, {"state": lambda x: x.half()}),
    "r has shape (2, 9, 4)": (ValueError, {"r": lambda x: x[0]}),
    "w has shape (1, 2, 8, 4)": (ValueError, {"w": lambda x: x[:, :, 1:]}),
    "state has shape (1, 2, 4, 3)": (ValueError, {"state": lambda x: x[..., 1:]}),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_refused_with_its_name_and_value(kernel, device, words):
    error, change = BAD[words]
    arguments = dict(zip(NAMES, inputs((1, 2, 9, 4, 4), device), strict=True))
    arguments |= {name: f(arguments.get(name)) for name, f in change.items()}
    with pytest.raises(error) as caught:
        kernel.wkv7(**arguments)
    assert words in str(caught.value)


def test_more_keys_than_the_kernel_holds_are_refused(kernel, device):
    with pytest.raises(ValueError, match="at most 128 keys"):
        kernel.wkv7(*inputs((1, 1, 2, 129, 4), device))
